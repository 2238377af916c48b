package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a machine with an engine, closed at the end of the test; the machine
// fails the test on findings of its check and on leaks.
type rig struct {
	*testing.T
	m      *emulated.Machine
	engine *transfer.Engine
	fences int
}

func newRig(t *testing.T, mo emulated.Options, o transfer.Options) *rig {
	t.Helper()
	mo.Check = true
	m, err := emulated.New(mo)
	if err != nil {
		t.Fatal(err)
	}
	return rigOn(t, m, m, o)
}

// rigOn is newRig on a machine that may not be checked, and that the engine sees as another one.
func rigOn(t *testing.T, m *emulated.Machine, seen device.Machine, o transfer.Options) *rig {
	t.Helper()
	o.Machine = seen
	e, err := transfer.New(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, m: m, engine: e}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		if err := e.Close(); err != nil && !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
	})
	return r
}

func (r *rig) alloc(s device.Space, n int64) device.Memory {
	r.Helper()
	m, err := r.m.Alloc(s, n, fmt.Sprintf("test %s", s))
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := m.Free(); err != nil {
			r.Error(err)
		}
	})
	return m
}

func (r *rig) stream(s device.Space, name string) device.Executor {
	r.Helper()
	st, err := r.m.NewStream(s, device.StreamOptions{Name: name})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := st.Close(); err != nil {
			r.Error(err)
		}
	})
	return st.(device.Executor)
}

func (r *rig) point() device.Point {
	r.Helper()
	r.fences++
	f, err := r.m.NewFence(fmt.Sprintf("fence %d", r.fences))
	if err != nil {
		r.Fatal(err)
	}
	return device.Point{Fence: f, Value: 1}
}

func (r *rig) submit(q transfer.Request) *transfer.Ticket {
	r.Helper()
	t, err := r.engine.Submit(q)
	if err != nil {
		r.Fatal(err)
	}
	return t
}

func (r *rig) wait(t *transfer.Ticket) {
	r.Helper()
	if err := t.Wait(r.Context()); err != nil {
		r.Error(err)
	}
}

// filled allocates host memory with bytes that encode their offset.
func (r *rig) filled(n int64, salt byte) device.Memory {
	m := r.alloc(device.Host, n)
	for i, b := 0, m.Write(0, n); i < len(b); i++ {
		b[i] = byte(i*7+i>>8) ^ salt
	}
	return m
}

// down is a copy of all of src to dst.
func (r *rig) down(dst, src device.Memory, p transfer.Priority) transfer.Request {
	return transfer.Request{
		Src: src.Region(0, src.Bytes()), Dst: dst.Region(0, dst.Bytes()),
		Priority: p, Done: r.point(),
	}
}

// content brings what is in m to the host.
func (r *rig) content(m device.Memory) []byte {
	r.Helper()
	host := r.alloc(device.Host, m.Bytes())
	s := r.stream(m.Space(), "content")
	if err := s.Copy(host.Range(0, m.Bytes()), m.Range(0, m.Bytes())); err != nil {
		r.Fatal(err)
	}
	if err := s.Synchronize(r.Context()); err != nil {
		r.Fatal(err)
	}
	return host.Read(0, m.Bytes())
}

func (r *rig) equal(got, want device.Memory) {
	r.Helper()
	if !bytes.Equal(r.content(got), r.content(want)) {
		r.Errorf("what arrived on %s differs from its source", got.Space())
	}
}

// machines runs a test on every kind of machine.
func machines(t *testing.T, f func(t *testing.T, o emulated.Options)) {
	for _, s := range []emulated.Schedule{emulated.Eager, emulated.Lazy, emulated.Random} {
		t.Run(s.String(), func(t *testing.T) { f(t, emulated.Options{Virtual: true, Schedule: s, Seed: 3}) })
	}
	t.Run("wall", func(t *testing.T) { f(t, emulated.Options{}) })
}

func TestCopy(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, n := range []int64{1, 99, 100, 101, 1000} {
			for _, pair := range []device.Pair{
				{From: device.Host, To: device.HBM(0)},
				{From: device.HBM(0), To: device.Host},
				{From: device.HBM(1), To: device.HBM(0)},
				{From: device.Host, To: device.Host},
				{From: device.HBM(0), To: device.HBM(0)},
			} {
				r := newRig(t, o, transfer.Options{ChunkBytes: 100, Depth: 3})
				src, there, dst := r.filled(n, 1), r.alloc(pair.From, n), r.alloc(pair.To, n)
				r.wait(r.submit(r.down(there, src, transfer.Demand)))
				ticket := r.submit(r.down(dst, there, transfer.Demand))
				r.wait(ticket)
				if !ticket.Ended() {
					t.Error("a ticket that was waited for has not ended")
				}
				r.equal(dst, src)
			}
		}
	})
}

// TestNoHeadOfLine: a copy that waits for what comes after a later copy does not
// hold that one up.
func TestNoHeadOfLine(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 100, Depth: 1})
		const n = 1000
		srcA, srcB := r.filled(n, 1), r.filled(n, 2)
		slot := r.alloc(device.HBM(0), n)
		keep := r.alloc(device.HBM(0), n)
		compute := r.stream(device.HBM(0), "compute")
		read := r.point()

		b := r.down(slot, srcB, transfer.Prefetch)
		a := r.down(slot, srcA, transfer.Demand) // overwrites what compute reads of b
		a.After = []device.Point{read}
		ta := r.submit(a)
		tb := r.submit(b)
		for _, err := range []error{
			compute.WaitFence(b.Done.Fence, b.Done.Value),
			compute.Copy(keep.Range(0, n), slot.Range(0, n)),
			compute.SignalFence(read.Fence, read.Value),
			compute.WaitFence(a.Done.Fence, a.Done.Value),
			compute.Synchronize(t.Context()),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		r.wait(ta)
		r.wait(tb)
		r.equal(slot, srcA)
		r.equal(keep, srcB)
	})
}

// TestOvertaking: a needed copy goes before the rest of a prefetch, behind no more
// than Depth chunks of it.
func TestOvertaking(t *testing.T) {
	for _, depth := range []int{1, 2, 5} {
		var mu sync.Mutex
		var sizes []string
		r := newRig(t, emulated.Options{
			Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6},
			Trace: func(tr emulated.Trace) {
				mu.Lock()
				defer mu.Unlock()
				if tr.Op == "copy" && strings.HasPrefix(tr.Stream, "copy") {
					sizes = append(sizes, fmt.Sprint(tr.Bytes))
				}
			},
		}, transfer.Options{ChunkBytes: 100, Depth: depth})
		low := r.down(r.alloc(device.HBM(0), 1000), r.filled(1000, 1), transfer.Prefetch)
		late := r.down(r.alloc(device.HBM(0), 30), r.filled(30, 1), transfer.Prefetch)
		high := r.down(r.alloc(device.HBM(0), 10), r.filled(10, 1), transfer.Demand)
		tl, tm, th := r.submit(low), r.submit(late), r.submit(high)
		tm.RaisePriority(transfer.Demand) // submitted before high, so it goes before it
		r.wait(tl)
		r.wait(tm)
		r.wait(th)
		want := slices.Concat(slices.Repeat([]string{"100"}, depth), []string{"30", "10"}, slices.Repeat([]string{"100"}, 10-depth))
		if !slices.Equal(sizes, want) {
			t.Errorf("depth %d: copies of %v bytes, want %v", depth, sizes, want)
		}
	}
}

// TestSharedDone: of two copies that share a fence the one with the higher value lands
// first. The other has landed, too, and is not reported as failed.
func TestSharedDone(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, transfer.Options{Depth: 1, ChunkBytes: 100})
	done := r.point()
	var tickets [3]*transfer.Ticket
	for i := range tickets {
		q := r.down(r.alloc(device.HBM(0), 100), r.filled(100, byte(i)), []transfer.Priority{transfer.Prefetch, transfer.Prefetch, transfer.Demand}[i])
		if i > 0 { // of the two that wait, the second overtakes
			q.Done = device.Point{Fence: done.Fence, Value: uint32(i)}
		}
		tickets[i] = r.submit(q)
	}
	for i, ticket := range tickets {
		if err := ticket.Wait(t.Context()); err != nil {
			t.Errorf("copy %d: %v", i, err)
		}
	}
	if s := r.engine.Path(device.Pair{From: device.Host, To: device.HBM(0)}); s.Copies != 3 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	// A fence that was closed is an error.
	closed := r.down(r.alloc(device.HBM(0), 100), r.filled(100, 9), transfer.Demand)
	if err := closed.Done.Fence.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.submit(closed).Wait(t.Context()); !errors.Is(err, device.ErrClosed) {
		t.Errorf("a copy whose fence is closed: %v", err)
	}
}

// TestDemandBehindPrefetch: a prefetch that a demanded copy waits for, because it fills the
// same memory, goes before other prefetches.
func TestDemandBehindPrefetch(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}}, transfer.Options{Depth: 1, ChunkBytes: 1000})
	dst := r.alloc(device.HBM(0), 1000)
	for _, demanded := range []bool{false, true} {
		var tickets []*transfer.Ticket
		for range 5 {
			tickets = append(tickets, r.submit(r.down(r.alloc(device.HBM(0), 1000), r.filled(1000, 1), transfer.Prefetch)))
		}
		begin := r.m.Now()
		first := r.down(dst, r.filled(1000, 2), transfer.Prefetch)
		last := r.submit(first)
		if demanded {
			tickets = append(tickets, last)
			q := r.down(dst, r.filled(1000, 3), transfer.Demand)
			q.After = []device.Point{first.Done}
			last = r.submit(q)
		}
		r.wait(last)
		// Each copy takes a millisecond, and one is under way. Another one is launched before
		// the host knows that the first of two has landed.
		took, want := r.m.Now()-begin, 6*time.Millisecond
		if demanded {
			want = 4 * time.Millisecond
		}
		if took != want {
			t.Errorf("demanded %t: the last copy has landed after %v, want %v", demanded, took, want)
		}
		for _, ticket := range tickets {
			r.wait(ticket)
		}
	}
	// Of the first round six prefetches, of the second four; there the two that were demanded count as such.
	by := r.engine.Path(device.Pair{From: device.Host, To: device.HBM(0)}).ByPriority
	if by[transfer.Prefetch] != 11_000 || by[transfer.Demand] != 2_000 {
		t.Errorf("bytes by priority: %v", by)
	}
}

// TestMetamorphic: whatever the chunks, depth, priorities and schedule, the same
// requests leave the same memory. Requests that touch the same bytes are ordered by
// After; the rest are free.
func TestMetamorphic(t *testing.T) {
	const slots, size, requests = 6, 257, 40
	for seed := range uint64(6) {
		var want [][]byte
		for variant := range uint64(8) {
			rng := rand.New(rand.NewPCG(seed, 0))        // the requests: the same in every variant
			free := rand.New(rand.NewPCG(seed, variant)) // what may differ
			o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(variant % 3), Seed: variant}
			if variant%4 == 3 {
				o = emulated.Options{}
			}
			o.CopyErrorsLoseDevice = variant >= 4
			r := newRig(t, o, transfer.Options{ChunkBytes: 1 + free.Int64N(300), Depth: 1 + free.IntN(4)})
			spaces := []device.Space{device.Host, device.HBM(0), device.HBM(1)}
			var memory []device.Memory
			for _, s := range spaces {
				memory = append(memory, r.alloc(s, slots*size))
			}
			type place struct{ space, slot int }
			// users are the points after which a place may be written (all of them) or
			// read (the last writer's).
			writer, readers := map[place]device.Point{}, map[place][]device.Point{}
			start := r.filled(slots*size, byte(seed))
			for i := range spaces {
				q := r.down(memory[i], start, transfer.Rebalance)
				r.submit(q)
				for s := range slots {
					writer[place{i, s}] = q.Done
				}
			}
			var tickets []*transfer.Ticket
			for range requests {
				from, to := place{rng.IntN(3), rng.IntN(slots)}, place{rng.IntN(3), rng.IntN(slots)}
				n := 1 + rng.Int64N(size)
				offset := rng.Int64N(size - n + 1)
				if from == to {
					continue
				}
				q := transfer.Request{
					Src:      memory[from.space].Region(int64(from.slot)*size+offset, n),
					Dst:      memory[to.space].Region(int64(to.slot)*size, n),
					Priority: transfer.Priority(free.IntN(5)),
					After:    append([]device.Point{writer[from], writer[to]}, readers[to]...),
					Done:     r.point(),
				}
				q.DoneInOrder = free.IntN(2) == 0
				tickets = append(tickets, r.submit(q))
				readers[from] = append(readers[from], q.Done)
				writer[to], readers[to] = q.Done, nil
				if free.IntN(4) == 0 {
					tickets[free.IntN(len(tickets))].RaisePriority(transfer.Priority(free.IntN(5)))
				}
			}
			for _, ticket := range tickets {
				r.wait(ticket)
			}
			var got [][]byte
			for _, m := range memory {
				got = append(got, bytes.Clone(r.content(m)))
			}
			if want == nil {
				want = got
			}
			for i := range got {
				if !bytes.Equal(got[i], want[i]) {
					t.Errorf("seed %d variant %d: %s differs from variant 0", seed, variant, spaces[i])
				}
			}
		}
	}
}

func TestChunkFailsOnce(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for nth := range 7 {
			r := newRig(t, o, transfer.Options{ChunkBytes: 100, Depth: 3})
			r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Skip: nth})
			a, b := r.filled(350, 1), r.filled(250, 2)
			da, db := r.alloc(device.HBM(0), 350), r.alloc(device.HBM(0), 250)
			ta, tb := r.submit(r.down(da, a, transfer.Prefetch)), r.submit(r.down(db, b, transfer.Prefetch))
			r.wait(ta)
			r.wait(tb)
			r.equal(da, a)
			r.equal(db, b)
			s := r.engine.Stats()[0]
			if s.Retries != 1 || s.Failed != 0 || s.Copies != 2 || s.Bytes != 600 {
				t.Errorf("chunk %d failed: %+v", nth, s)
			}
		}
	})
}

func TestChunkFailsTwice(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for nth := range int64(4) {
			r := newRig(t, o, transfer.Options{ChunkBytes: 100, Depth: 3})
			a, b, c := r.filled(350, 1), r.filled(250, 2), r.filled(10, 3)
			da, db, dc := r.alloc(device.HBM(0), 350), r.alloc(device.HBM(0), 250), r.alloc(device.HBM(0), 10)
			r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2, Match: func(p emulated.Point) bool {
				return p.Src.Addr == a.Range(100*nth, 1).Addr
			}})
			qa := r.down(da, a, transfer.Prefetch)
			qa.Label = transfer.Text("the one that fails")
			consumer := r.stream(device.HBM(0), "consumer")
			ta, tb := r.submit(qa), r.submit(r.down(db, b, transfer.Prefetch))
			if err := consumer.WaitFence(qa.Done.Fence, qa.Done.Value); err != nil {
				t.Fatal(err)
			}
			err := ta.Wait(t.Context())
			if !errors.Is(err, device.ErrCopyFailed) || !strings.Contains(err.Error(), "the one that fails") {
				t.Errorf("chunk %d failed twice: Wait says %v", nth, err)
			}
			if err := consumer.Recover(t.Context()); !errors.Is(err, device.ErrCopyFailed) {
				t.Errorf("the stream that waited is in error %v", err)
			}
			r.wait(tb)
			r.equal(db, b)
			r.wait(r.submit(r.down(dc, c, transfer.Rebalance)))
			r.equal(dc, c)
			s := r.engine.Stats()[0]
			if s.Retries != 1 || s.Failed != 1 || s.Copies != 2 || s.Bytes != 260 {
				t.Errorf("chunk %d failed twice: %+v", nth, s)
			}
			// The fence goes on with the next value.
			again := qa
			again.Done.Value++
			r.wait(r.submit(again))
			r.equal(da, a)
		}
	})
}

// TestChance: whatever chunks fail, a copy lands whole or fails.
func TestChance(t *testing.T) {
	for seed := range uint64(20) {
		o := emulated.Options{Virtual: true, Schedule: emulated.Random, Seed: seed}
		if seed%2 == 1 {
			o = emulated.Options{Seed: seed}
		}
		r := newRig(t, o, transfer.Options{ChunkBytes: 64, Depth: 1 + int(seed%4)})
		r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Chance: 0.2, Times: -1, Match: func(p emulated.Point) bool {
			return strings.HasPrefix(p.Stream, "copy")
		}})
		var tickets []*transfer.Ticket
		var src, dst []device.Memory
		for i := range 12 {
			src, dst = append(src, r.filled(300, byte(i))), append(dst, r.alloc(device.HBM(i%2), 300))
			tickets = append(tickets, r.submit(r.down(dst[i], src[i], transfer.Priority(i%5))))
		}
		failed := 0
		for i, ticket := range tickets {
			switch err := ticket.Wait(t.Context()); {
			case err == nil:
				r.equal(dst[i], src[i])
			case errors.Is(err, device.ErrCopyFailed):
				failed++
			default:
				t.Errorf("seed %d: %v", seed, err)
			}
		}
		var stats int64
		for _, s := range r.engine.Stats() {
			stats += s.Failed
		}
		if int64(failed) != stats {
			t.Errorf("seed %d: %d tickets failed and Stats count %d", seed, failed, stats)
		}
	}
}

func TestStall(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1000}}, transfer.Options{ChunkBytes: 100})
	r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Skip: 1, For: 5 * time.Second})
	src, dst := r.filled(300, 1), r.alloc(device.HBM(0), 300)
	r.wait(r.submit(r.down(dst, src, transfer.Demand)))
	r.equal(dst, src)
	if busy := r.engine.Stats()[0].Busy; (busy - 5300*time.Millisecond).Abs() > time.Millisecond {
		t.Errorf("busy for %v, want 5.3 s", busy)
	}
}

// TestBusy: with one chunk always queued behind another the link never idles.
func TestBusy(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}}, transfer.Options{ChunkBytes: 1000, Depth: 2})
	a, b := r.down(r.alloc(device.HBM(0), 50_000), r.filled(50_000, 1), transfer.Prefetch), r.down(r.alloc(device.HBM(0), 50_000), r.filled(50_000, 1), transfer.Demand)
	ta, tb := r.submit(a), r.submit(b)
	r.wait(ta)
	r.wait(tb)
	if now := r.m.Now(); (now - 100*time.Millisecond).Abs() > time.Microsecond {
		t.Errorf("100 kB at 1 MB/s took %v", now)
	}
	s := r.engine.Stats()
	if len(s) != 1 || s[0].From != device.Host || s[0].To != device.HBM(0) || (s[0].Busy-100*time.Millisecond).Abs() > time.Microsecond {
		t.Errorf("stats %+v, want one link, busy for 100 ms", s)
	}
}

func TestLost(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 100})
		a, b, c := r.filled(1000, 1), r.filled(10, 2), r.filled(10, 3)
		da, db, dc := r.alloc(device.HBM(0), 1000), r.alloc(device.HBM(0), 10), r.alloc(device.HBM(1), 10)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Skip: 3})
		ta, tb := r.submit(r.down(da, a, transfer.Prefetch)), r.submit(r.down(db, b, transfer.Rebalance))
		if err := r.m.Lose(0); err != nil {
			t.Fatal(err)
		}
		stall.Release()
		for _, ticket := range []*transfer.Ticket{ta, tb} {
			if err := ticket.Wait(t.Context()); !errors.Is(err, device.ErrLost) {
				t.Errorf("a copy to a lost device: %v", err)
			}
		}
		if _, err := r.engine.Submit(r.down(db, b, transfer.Demand)); !errors.Is(err, device.ErrLost) {
			t.Errorf("submitting to a lost device: %v", err)
		}
		r.wait(r.submit(r.down(dc, c, transfer.Demand)))
		r.equal(dc, c)
	})
}

// TestRefused: what the device does not take fails its ticket and holds nothing up.
func TestRefused(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		o.Report = func(f emulated.Finding) {
			if f.Kind != emulated.OutOfBounds {
				t.Error(f)
			}
		}
		r := newRig(t, o, transfer.Options{ChunkBytes: 60})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		beyond := r.down(dst, src, transfer.Demand) // its second chunk lies outside
		beyond.Dst.Addr += 10
		tb := r.submit(beyond)
		if err := tb.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "destination") {
			t.Errorf("a copy beyond its memory: %v", err)
		}
		r.wait(r.submit(r.down(dst, src, transfer.Demand)))
		r.equal(dst, src)

		// A fence that cannot be waited for is an error of Submit.
		bad := r.down(dst, src, transfer.Demand)
		bad.After = []device.Point{r.point()}
		if err := bad.After[0].Fence.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.engine.Submit(bad); !errors.Is(err, device.ErrClosed) {
			t.Errorf("after a closed fence: %v", err)
		}
		r.wait(r.submit(r.down(dst, src, transfer.Demand)))
	})
}

func TestAfterFails(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		boom := errors.New("boom")
		for range 3 { // the stream that waited is used again
			q := r.down(dst, src, transfer.Demand)
			q.After = []device.Point{r.point()}
			ticket := r.submit(q)
			if err := q.After[0].Fence.Fail(1, boom); err != nil {
				t.Fatal(err)
			}
			if err := ticket.Wait(t.Context()); !errors.Is(err, transfer.ErrAfter) || !errors.Is(err, boom) {
				t.Errorf("after a failed point: %v", err)
			}
			r.wait(r.submit(r.down(dst, src, transfer.Demand)))
		}
	})
}

// TestAfterFailsUnasked: no ticket is queried and the link does nothing else. A
// stream that waits for the last of a chain of copies, over two links, learns that the
// point before the first has failed, whether the host says so or a stream.
func TestAfterFailsUnasked(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, byHost := range []bool{true, false} {
			r := newRig(t, o, transfer.Options{})
			src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
			consumer, producer := r.stream(device.HBM(0), "consumer"), r.stream(device.HBM(1), "producer")
			boom := errors.New("boom")
			first := r.point()
			after := first
			for i := range 6 {
				q := r.down(dst, src, transfer.Demand)
				if i%2 == 1 {
					q = r.down(src, dst, transfer.Demand)
				}
				q.After = []device.Point{after}
				after = q.Done
				r.submit(q)
			}
			if err := consumer.WaitFence(after.Fence, after.Value); err != nil {
				t.Fatal(err)
			}
			if byHost {
				if err := first.Fence.Fail(first.Value, boom); err != nil {
					t.Fatal(err)
				}
			} else if err := errors.Join(
				producer.Execute(device.Work{Name: "boom", Run: func(device.Access) error { return boom }}),
				producer.SignalFence(first.Fence, first.Value),
			); err != nil {
				t.Fatal(err)
			}
			if err := consumer.Recover(t.Context()); !errors.Is(err, transfer.ErrAfter) || !errors.Is(err, boom) {
				t.Errorf("the stream that waited for Done is in error %v", err)
			}
			_ = producer.Recover(t.Context()) // boom
			// The streams that waited are used again.
			q := r.down(dst, src, transfer.Demand)
			q.After = []device.Point{r.point()}
			ticket := r.submit(q)
			if err := q.After[0].Fence.Signal(1); err != nil {
				t.Fatal(err)
			}
			r.wait(ticket)
			r.equal(dst, src)
		}
	})
}

// TestWaitingTogether: requests that wait for the same point watch for it once, however
// many they are, and go in their order; and whatever is waited for, on however many links,
// there is one host stream.
func TestWaitingTogether(t *testing.T) {
	var mu sync.Mutex
	var work []string
	r := newRig(t, emulated.Options{Virtual: true, Trace: func(tr emulated.Trace) {
		mu.Lock()
		defer mu.Unlock()
		if tr.Space == device.Host && tr.Op != "copy" {
			work = append(work, tr.Stream+": "+tr.Name)
		}
	}}, transfer.Options{})
	src, dst, other := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(1), 100)
	p := r.point()
	var tickets []*transfer.Ticket
	for range 5 {
		q := r.down(dst, src, transfer.Demand)
		q.After = []device.Point{p}
		tickets = append(tickets, r.submit(q))
	}
	separate := r.down(other, src, transfer.Demand)
	separate.After = []device.Point{r.point()}
	last := r.submit(separate)
	if !tickets[2].Cancel() {
		t.Error("a copy that waits was not canceled")
	}
	if err := p.Fence.Signal(1); err != nil {
		t.Fatal(err)
	}
	for i, ticket := range tickets {
		if err := ticket.Wait(t.Context()); errors.Is(err, transfer.ErrCanceled) != (i == 2) || i != 2 && err != nil {
			t.Errorf("copy %d: %v", i, err)
		}
	}
	if err := separate.After[0].Fence.Signal(1); err != nil {
		t.Fatal(err)
	}
	r.wait(last)
	start, end := "transfer worker: wait for slot", "transfer worker: complete transfer"
	if want := []string{start, end, end, end, end, start, end}; !slices.Equal(work, want) {
		t.Errorf("work of the host: %q, want %q", work, want)
	}
}

func TestCancel(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 10, Depth: 1})
		src, dst, other := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
		blocked := r.down(other, src, transfer.Demand)
		blocked.After = []device.Point{r.point()}
		tb := r.submit(blocked)
		running := r.submit(r.down(dst, src, transfer.Demand))
		if !tb.Cancel() {
			t.Error("a copy that has not begun was not canceled")
		}
		if err := tb.Wait(canceled()); err == nil {
			t.Error("a wait with a context that is done returns nil")
		}
		if err := tb.Err(); !errors.Is(err, transfer.ErrCanceled) || !tb.Ended() {
			t.Errorf("canceled: Err says %v", err)
		}
		r.wait(running)
		if running.Cancel() || tb.Cancel() {
			t.Error("a copy that has ended was canceled")
		}
		// What waited for the point still does, and lets go in the end.
		if err := blocked.After[0].Fence.Signal(1); err != nil {
			t.Fatal(err)
		}
		blocked.Done = r.point()
		r.wait(r.submit(blocked))
		r.equal(other, src)
	})
}

// TestSkip: a copy that is not needed any more ends as if it had landed, and nothing more of it
// is copied; one that waits for a reader of its target goes on.
func TestSkip(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 10, Depth: 1})
		src, empty := r.filled(100, 1), r.filled(100, 2)
		dst, unwanted, read := r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
		r.wait(r.submit(r.down(unwanted, empty, transfer.Demand)))
		r.wait(r.submit(r.down(dst, empty, transfer.Demand)))
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		running := r.submit(r.down(dst, src, transfer.Demand))
		waiting := r.down(read, src, transfer.Demand)
		waiting.After = []device.Point{r.point()}
		tw, tu := r.submit(waiting), r.submit(r.down(unwanted, src, transfer.Prefetch))
		if left := tw.Skip(); left != 0 {
			t.Errorf("%d bytes of a copy that waits for a reader were skipped", left)
		}
		if left, again := tu.Skip(), tu.Skip(); left != 100 || again != 0 {
			t.Errorf("%d bytes of a copy that has not begun were skipped, and %d", left, again)
		}
		if err := tu.Wait(t.Context()); err != nil || !tu.Ended() {
			t.Errorf("skipped: %v", err)
		}
		if left, again := running.Skip(), running.Skip(); left != 90 || again != 0 {
			t.Errorf("%d bytes of a copy whose first chunk is in flight were skipped, and %d", left, again)
		}
		if running.Ended() {
			t.Error("a copy has ended whose first chunk is in flight")
		}
		stall.Release()
		if err := waiting.After[0].Fence.Signal(1); err != nil {
			t.Fatal(err)
		}
		r.wait(running)
		r.wait(tw)
		if got := r.content(dst); !bytes.Equal(got[:10], r.content(src)[:10]) || !bytes.Equal(got[10:], r.content(empty)[10:]) {
			t.Error("other bytes than those of the first chunk were copied")
		}
		r.equal(read, src)
		r.equal(unwanted, empty)
		for _, s := range r.engine.Stats() {
			if s.From == device.Host && (s.Copies != 3 || s.Bytes != 310 || s.Failed != 0) {
				t.Errorf("%+v", s)
			}
		}
	})
}

// TestEnd: a copy ends where it does, also where a later one has failed the fence of both.
func TestEnd(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 50})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		first := r.down(dst, src, transfer.Demand)
		running := r.submit(first)
		second := first
		second.Done.Value++
		second.After = []device.Point{first.Done}
		later := r.submit(second)
		if !later.Cancel() {
			t.Fatal("a copy behind one that stalls has begun")
		}
		r.reached(first.Done, true)
		r.reached(later.End(), true)
		end := running.End()
		r.reached(end, false)
		stall.Release()
		r.wait(running)
		r.reached(end, true)
		r.equal(dst, src)
	})
}

func (r *rig) reached(p device.Point, want bool) {
	r.Helper()
	if got := p.Reached(); got != want {
		r.Errorf("the point is reached: %v, want %v", got, want)
	}
}

// TestRelease: the memory of a released ticket serves a later copy, and that of
// one that is in progress, or failed, does not.
func TestRelease(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 10, Depth: 1})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		landed := r.submit(r.down(dst, src, transfer.Demand))
		r.wait(landed)
		landed.Release()

		held := r.down(dst, src, transfer.Demand)
		held.After = []device.Point{r.point()}
		under := r.submit(held)
		if under != landed {
			t.Error("a released ticket is not used again")
		}
		under.Release()
		other := r.submit(r.down(r.alloc(device.HBM(0), 100), src, transfer.Prefetch))
		if other == under {
			t.Fatal("the ticket of a copy in progress is used again")
		}
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		running := r.submit(r.down(r.alloc(device.HBM(0), 100), src, transfer.Demand))
		queued := r.submit(r.down(r.alloc(device.HBM(0), 100), src, transfer.Prefetch))
		if !queued.Cancel() {
			t.Fatal("a copy behind one that stalls has begun")
		}
		queued.Release()
		if err := queued.Err(); !errors.Is(err, transfer.ErrCanceled) {
			t.Errorf("canceled, and released: %v", err)
		}
		stall.Release()
		if err := held.After[0].Fence.Signal(1); err != nil {
			t.Fatal(err)
		}
		for _, ticket := range []*transfer.Ticket{running, other, under} {
			r.wait(ticket)
		}
		r.equal(dst, src)
	})
}

// TestReleaseUnderLoad: with memory reused by other requests, every copy brings its own bytes,
// and every ticket says what became of its own copy.
func TestReleaseUnderLoad(t *testing.T) {
	const goroutines, rounds, size = 4, 300, 64
	r := newRig(t, emulated.Options{Seed: 5}, transfer.Options{ChunkBytes: 20, Depth: 2})
	defer r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.05, Match: func(p emulated.Point) bool { return p.From == device.Host }}).Release()
	var wg sync.WaitGroup
	ends := make([]map[string]int, goroutines)
	for g := range goroutines {
		src, there, back := r.filled(size, byte(g)), r.alloc(device.HBM(0), size), r.alloc(device.Host, size)
		after, down, up := r.point(), r.point(), r.point()
		rng, end := rand.New(rand.NewPCG(uint64(g), 3)), map[string]int{}
		ends[g] = end
		wg.Go(func() {
			for n := range uint32(rounds) {
				name := fmt.Sprintf("goroutine %d round %d", g, n)
				sent := src.Write(0, size)
				for i := range sent {
					sent[i] = byte(rng.Uint32())
				}
				down.Value, up.Value, after.Value = n+1, n+1, n+1
				q := transfer.Request{
					Src: src.Region(0, size), Dst: there.Region(0, size),
					Priority: transfer.Priority(rng.IntN(5)), Done: down, Label: transfer.Text(name),
				}
				waits := rng.IntN(3) == 0
				if waits {
					q.After = []device.Point{after}
				}
				ticket, err := r.engine.Submit(q)
				if err != nil {
					t.Error(err)
					return
				}
				skipped, canceled := false, false
				switch rng.IntN(4) {
				case 0:
					ticket.RaisePriority(transfer.Demand)
				case 1:
					skipped = ticket.Skip() > 0
				case 2:
					canceled = ticket.Cancel()
				}
				if err := after.Fence.Signal(n + 1); err != nil {
					t.Error(err)
				}
				err = ticket.Wait(context.Background())
				switch {
				case err == nil && !canceled:
				case errors.Is(err, transfer.ErrCanceled) == canceled && strings.Contains(err.Error(), name):
				default:
					t.Errorf("%s, canceled: %v: %v", name, canceled, err)
				}
				ticket.Release()
				if end[fmt.Sprint(skipped, canceled, err == nil)]++; err != nil || skipped {
					continue
				}
				ticket, err = r.engine.Submit(transfer.Request{
					Src: there.Region(0, size), Dst: back.Region(0, size), Done: up,
				})
				if err == nil {
					err = ticket.Wait(context.Background())
					ticket.Release()
				}
				if err != nil || !bytes.Equal(back.Read(0, size), sent) {
					t.Errorf("%s: what arrived differs from its source: %v", name, err)
					return
				}
			}
		})
	}
	wg.Wait()
	all := map[string]int{}
	for _, end := range ends {
		for k, n := range end {
			all[k] += n
		}
	}
	t.Logf("skipped, canceled, landed: %v", all)
	if all["false false true"] == 0 || all["true false true"] == 0 || all["false true false"] == 0 || all["false false false"] == 0 {
		t.Errorf("not all has happened: %v", all)
	}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestClose(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		o.HostLink, o.Pace = emulated.Link{BytesPerSecond: 200}, !o.Virtual // Close comes long before the first copy's end
		m, err := emulated.New(o)
		if err != nil {
			t.Fatal(err)
		}
		e, err := transfer.New(transfer.Options{Machine: m, ChunkBytes: 10, Depth: 2})
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{T: t, m: m, engine: e}
		t.Run("", func(t *testing.T) { // memory is freed before the machine is closed
			r.T = t
			src, dst, other := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
			begun, queued := r.submit(r.down(dst, src, transfer.Demand)), r.submit(r.down(other, src, transfer.Demand))
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			if err := begun.Err(); err != nil || !begun.Ended() {
				t.Errorf("what was begun has not landed: %v", err)
			}
			if err := queued.Err(); !errors.Is(err, device.ErrClosed) {
				t.Errorf("what was not begun: %v", err)
			}
			if _, err := e.Submit(r.down(dst, src, transfer.Demand)); !errors.Is(err, device.ErrClosed) {
				t.Errorf("submitting to a closed engine: %v", err)
			}
			if err := e.Close(); !errors.Is(err, device.ErrClosed) {
				t.Errorf("a second Close: %v", err)
			}
			r.equal(dst, src)
		})
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestBadRequests(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, Topology: &device.Topology{
		Host: device.Info{MemoryBytes: 1 << 20}, GPUs: []device.Info{{MemoryBytes: 1 << 20}},
		Paths: map[device.Pair]device.Path{{From: device.Host, To: device.HBM(0)}: {}},
	}}, transfer.Options{})
	src, dst := r.alloc(device.Host, 100), r.alloc(device.HBM(0), 100)
	for want, change := range map[string]func(*transfer.Request){
		"99 bytes into 100":    func(q *transfer.Request) { q.Src.Bytes-- },
		"at least 1":           func(q *transfer.Request) { q.Src.Bytes, q.Dst.Bytes = 0, 0 },
		"overlap":              func(q *transfer.Request) { q.Dst = q.Src },
		"priority(8)":          func(q *transfer.Request) { q.Priority = transfer.Priorities },
		"no Done fence is set": func(q *transfer.Request) { q.Done = device.Point{} },
		"has no fence":         func(q *transfer.Request) { q.After = make([]device.Point, 1) },
		"both Pieces and Src":  func(q *transfer.Request) { q.Pieces = []transfer.Piece{{Src: q.Src, Dst: q.Dst}} },
		"the first one from host": func(q *transfer.Request) {
			q.Pieces = []transfer.Piece{{Src: q.Src, Dst: q.Dst}, {Src: q.Dst, Dst: q.Src}}
			q.Src, q.Dst = device.Region{}, device.Region{}
		},
		"no path between these": func(q *transfer.Request) { q.Src, q.Dst = q.Dst, q.Src },
	} {
		q := r.down(dst, src, transfer.Demand)
		change(&q)
		if _, err := r.engine.Submit(q); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	for _, o := range []transfer.Options{{}, {Machine: r.m, Depth: -1}, {Machine: r.m, ChunkBytes: -1}} {
		if _, err := transfer.New(o); err == nil {
			t.Errorf("New takes %+v", o)
		}
	}
}

// TestWrongSpace: the space that a request names is where its bytes are, or the copy would
// be queued and counted on the link of two other memories.
func TestWrongSpace(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		for want, change := range map[string]func(*transfer.Request){
			"source gpu1 [":      func(q *transfer.Request) { q.Src.Space = device.HBM(1) },
			"destination gpu1 [": func(q *transfer.Request) { q.Dst.Space = device.HBM(1) },
			"destination host [": func(q *transfer.Request) { q.Dst.Space = device.Host },
			"is on host":         func(q *transfer.Request) { q.Src.Space = device.HBM(0) },
			"is on gpu0": func(q *transfer.Request) {
				q.Src.Space, q.Dst.Space = q.Dst.Space, q.Src.Space
				q.Src, q.Dst = q.Dst, q.Src
			},
			"not in a live allocation": func(q *transfer.Request) { q.Src.Addr = 8 },
			"destination gpu0 [0x8,+":  func(q *transfer.Request) { q.Dst.Addr = 8 },
		} {
			q := r.down(dst, src, transfer.Demand)
			change(&q)
			if _, err := r.engine.Submit(q); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want an error with %q", err, want)
			}
		}
		if s := r.engine.Stats(); len(s) != 0 {
			t.Errorf("refused requests made links: %+v", s)
		}
		q := r.down(dst, src, transfer.Demand)
		r.wait(r.submit(q))
		r.equal(dst, src)
	})
}

func TestPriorities(t *testing.T) {
	for p, want := range map[transfer.Priority]string{transfer.Rebalance: "migration", transfer.KVStore: "kv-store", transfer.KVLoad: "kv-load", transfer.Prefetch: "prefetch", transfer.Demand: "demand", 7: "priority(7)"} {
		if p.String() != want || p >= transfer.Priorities {
			t.Errorf("priority %d of %d prints as %q, want %q", p, transfer.Priorities, p, want)
		}
	}
	if transfer.Rebalance >= transfer.Prefetch || transfer.Prefetch >= transfer.Demand {
		t.Error("priorities are not in the order of urgency")
	}
}

// scattered is a request of so many pieces of n bytes each, which lie in the other order
// at their destination, and are adjacent nowhere or by fours.
func (r *rig) scattered(dst, src device.Memory, pieces int, n int64, together int) transfer.Request {
	q := transfer.Request{Priority: transfer.Demand, Done: r.point(), Label: transfer.Text("scattered")}
	for i := range pieces {
		group, at := i/together, i%together
		from, to := int64(i)*n, int64((pieces/together-1-group)*together+at)*n
		q.Pieces = append(q.Pieces, transfer.Piece{Src: src.Region(from, n), Dst: dst.Region(to, n)})
	}
	return q
}

// TestScattered: many pieces are one copy, with few events and, where the device has batches,
// few operations; and neighbors are one piece.
func TestScattered(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, c := range []struct {
			together        int
			copies, records int64
			noBatches       bool
		}{{1, 16, 16, false}, {4, 4, 4, false}, {1, 1000, 16, true}, {4, 250, 4, true}} {
			o.NoBatches = c.noBatches
			var copies, records atomic.Int64
			o.Trace = func(tr emulated.Trace) {
				if strings.HasPrefix(tr.Stream, "copy") && tr.Op == "copy" {
					copies.Add(1)
				}
				if tr.Op == "record" {
					records.Add(1)
				}
			}
			const pieces, n = 1000, 32
			r := newRig(t, o, transfer.Options{})
			src, dst := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n)
			ticket := r.submit(r.scattered(dst, src, pieces, n, c.together))
			r.wait(ticket)
			if copies.Load() != c.copies || records.Load() != c.records {
				t.Errorf("%d pieces, %d together: %d copies and %d events, want %d and %d", pieces, c.together, copies.Load(), records.Load(), c.copies, c.records)
			}
			got, want := r.content(dst), src.Read(0, pieces*n)
			groups := pieces / c.together
			size := int64(c.together) * n
			for g := range int64(groups) {
				if !bytes.Equal(got[(int64(groups)-1-g)*size:][:size], want[g*size:][:size]) {
					t.Fatalf("pieces %d and on have not arrived", g*int64(c.together))
				}
			}
			if s := r.engine.Stats()[0]; s.Copies != 1 || s.Bytes != pieces*n {
				t.Errorf("stats %+v", s)
			}
		}
	})
}

// TestBatchBelow: large pieces are copied one by one.
func TestBatchBelow(t *testing.T) {
	for below, want := range map[int64]int64{32: 10, 33: 1, 0: 1} {
		var copies atomic.Int64
		r := newRig(t, emulated.Options{Virtual: true, Trace: func(tr emulated.Trace) {
			if strings.HasPrefix(tr.Stream, "copy") && tr.Op == "copy" {
				copies.Add(1)
			}
		}}, transfer.Options{BatchBelow: below})
		r.wait(r.submit(r.scattered(r.alloc(device.HBM(0), 320), r.filled(320, 1), 10, 32, 1)))
		if copies.Load() != want {
			t.Errorf("batches of pieces below %d bytes: %d copies of 10 pieces of 32 bytes, want %d", below, copies.Load(), want)
		}
	}
}

// TestScatteredFails: whichever piece fails, once all land, twice none counts.
func TestScatteredFails(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for nth := range int64(10) {
			o.NoBatches = nth >= 5
			nth %= 5
			for _, times := range []int{1, 2} {
				const pieces, n = 5, 64
				r := newRig(t, o, transfer.Options{ChunkBytes: 130, Depth: 2})
				src, dst, other := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n), r.alloc(device.HBM(0), 100)
				r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: times, Match: func(p emulated.Point) bool {
					return p.Src.Addr == src.Range(nth*n, 1).Addr
				}})
				q := r.scattered(dst, src, pieces, n, 1)
				ticket, behind := r.submit(q), r.submit(r.down(other, r.filled(100, 2), transfer.Prefetch))
				err := ticket.Wait(t.Context())
				if err == nil {
					for i, b := range r.content(dst) {
						if want := src.Read(0, pieces*n)[(pieces-1-i/n)*n+i%n]; b != want {
							t.Fatalf("piece %d failed once: byte %d is %d, want %d", nth, i, b, want)
						}
					}
				}
				if times == 1 && err != nil || times == 2 && !errors.Is(err, device.ErrCopyFailed) {
					t.Errorf("piece %d fails %d times: %v", nth, times, err)
				}
				r.wait(behind)
				if s := r.engine.Stats()[0]; s.Retries != 1 || s.Failed != int64(times-1) {
					t.Errorf("piece %d fails %d times: %+v", nth, times, s)
				}
			}
		}
	})
}

// TestNoGarbage: in the steady state a copy that waits for a point, with a ticket that is
// released, allocates nothing.
func TestNoGarbage(t *testing.T) {
	m, err := emulated.New(emulated.Options{}) // not checked: checks allocate
	if err != nil {
		t.Fatal(err)
	}
	r := rigOn(t, m, m, transfer.Options{ChunkBytes: 64, Depth: 2})
	const pieces, n = 8, 32
	src, dst := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n)
	q, after := r.scattered(dst, src, pieces, n, 1), r.point()
	q.After = []device.Point{after}
	copied := func() {
		ticket, err := r.engine.Submit(q)
		if err == nil {
			err = after.Fence.Signal(q.After[0].Value)
		}
		if err != nil {
			t.Fatal(err)
		}
		for !ticket.Ended() {
			runtime.Gosched()
		}
		ticket.Release()
		q.After[0].Value++
		q.Done.Value++
	}
	if got := testing.AllocsPerRun(200, copied); got > 0 {
		t.Errorf("%v allocations per copy", got)
	}
}

// TestConcurrent: several goroutines submit at once, for the race detector.
func TestConcurrent(t *testing.T) {
	r := newRig(t, emulated.Options{}, transfer.Options{ChunkBytes: 50})
	src := r.filled(400, 9)
	var wg sync.WaitGroup
	var all []device.Memory
	for g := range 4 {
		dst := make([]device.Memory, 5)
		queries := make([]transfer.Request, len(dst))
		for i := range dst {
			dst[i] = r.alloc(device.HBM(g%2), 400)
			queries[i] = r.down(dst[i], src, transfer.Prefetch)
		}
		wg.Go(func() {
			for _, q := range queries {
				ticket, err := r.engine.Submit(q)
				if err != nil {
					t.Error(err)
					return
				}
				ticket.RaisePriority(transfer.Demand)
				if err := ticket.Wait(context.Background()); err != nil {
					t.Error(err)
				}
				r.engine.Stats()
			}
		})
		all = append(all, dst...)
	}
	wg.Wait()
	for _, dst := range all {
		r.equal(dst, src)
	}
}

// TestChunksByRate: left to itself, the engine cuts copies into what their path moves in
// 160 us, but into no less than 8 MiB.
func TestChunksByRate(t *testing.T) {
	const bytes = 8 * 61 << 20 // whole chunks of either size
	var largest map[device.Space]int64
	r := newRig(t, emulated.Options{
		Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: 10e9}, PeerLink: emulated.Link{BytesPerSecond: 400e9},
		Trace: func(e emulated.Trace) {
			if e.Op == "copy" {
				largest[e.Space] = max(largest[e.Space], e.Bytes)
			}
		},
	}, transfer.Options{})
	largest = map[device.Space]int64{}
	dst := r.alloc(device.HBM(0), bytes)
	for _, from := range []device.Space{device.Host, device.HBM(1)} {
		src := r.alloc(from, bytes)
		if from == device.Host {
			src.Write(0, bytes)
		} else { // has what the target has by then
			r.wait(r.submit(transfer.Request{Src: dst.Region(0, bytes), Dst: src.Region(0, bytes), Done: r.point()}))
			clear(largest)
		}
		r.wait(r.submit(transfer.Request{Src: src.Region(0, bytes), Dst: dst.Region(0, bytes), Done: r.point()}))
		// Copies stand on the stream of a GPU: the target's where the source is none.
		want := map[device.Space]int64{device.HBM(0): 8 << 20}
		if from != device.Host {
			want = map[device.Space]int64{from: 61 << 20}
		}
		if !maps.Equal(largest, want) {
			t.Errorf("from %s: chunks of up to %v bytes, want %v", from, largest, want)
		}
		clear(largest)
	}
}

// TestRedirect: a copy of which nothing was launched reads other memory in place of its own, whose
// readers it leaves; one that was launched goes on.
func TestRedirect(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 10, Depth: 1})
		src, wrong := r.filled(100, 1), r.alloc(device.HBM(1), 100)
		first, second, waiting := r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
		r.wait(r.submit(r.down(wrong, r.filled(100, 2), transfer.Demand)))
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.From == device.HBM(1) }})
		running := r.submit(r.down(first, wrong, transfer.Demand))
		queued := r.submit(r.down(second, wrong, transfer.Demand))
		behind := r.down(waiting, wrong, transfer.Demand)
		behind.After = []device.Point{r.point()}
		tb := r.submit(behind)
		from := func(dst device.Memory) []transfer.Piece {
			return []transfer.Piece{
				{Src: src.Region(0, 40), Dst: dst.Region(0, 40)},
				{Src: src.Region(40, 60), Dst: dst.Region(40, 60)},
			}
		}
		if _, err := queued.Redirect(from(second)[:1], nil); err == nil || !strings.Contains(err.Error(), "the request has 100 bytes to gpu0") {
			t.Errorf("to fewer bytes: %v", err)
		}
		ends := []device.Point{running.End(), queued.End(), tb.End()}
		for i, c := range []struct {
			t    *transfer.Ticket
			dst  device.Memory
			want bool
		}{{running, first, false}, {queued, second, true}, {tb, waiting, true}} {
			done, err := c.t.Redirect(from(c.dst), transfer.Text("elsewhere"))
			if err != nil || done != c.want {
				t.Errorf("request %d: redirected: %v, %v", i, done, err)
			}
			r.reached(ends[i], c.want)
		}
		if tb.Ended() {
			t.Error("a copy that was redirected has ended before its point is reached")
		}
		stopped := make(chan error, 1)
		go func() { stopped <- tb.Wait(canceled()) }()
		if err := <-stopped; err == nil {
			t.Error("a wait for a redirected copy that cannot start returns nil")
		}
		r.wait(queued) // beside the copy that stalls
		r.equal(second, src)
		if err := behind.After[0].Fence.Signal(1); err != nil {
			t.Fatal(err)
		}
		r.wait(tb)
		r.equal(waiting, src)
		stall.Release()
		r.wait(running)
		r.equal(first, wrong)
		if done, err := queued.Redirect(from(second), nil); done || err != nil {
			t.Errorf("one that has landed: %v, %v", done, err)
		}
		for _, s := range r.engine.Stats() {
			if s.From == device.HBM(1) && s.To == device.HBM(0) && (s.Copies != 1 || s.Bytes != 100) {
				t.Errorf("%+v", s)
			}
		}
	})
}

// TestAbort: nothing more of an aborted copy is launched, and it ends when what was launched has.
func TestAbort(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 10, Depth: 1})
		src, dst, next := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		running := r.submit(r.down(dst, src, transfer.Demand))
		if running.Cancel() || !running.Abort() || running.Abort() {
			t.Error("a copy that has begun was canceled, or not aborted, or twice")
		}
		r.reached(running.End(), false)
		stall.Release()
		if err := running.Wait(t.Context()); !errors.Is(err, transfer.ErrCanceled) || !running.Ended() {
			t.Errorf("aborted: %v", err)
		}
		if n := running.Landed(); n > 20 {
			t.Errorf("%d bytes have landed", n)
		}
		stall = r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		last := r.down(next, src, transfer.Demand)
		last.Src, last.Dst = src.Region(0, 10), next.Region(0, 10) // one chunk
		launched := r.submit(last)
		if launched.Abort() {
			t.Error("a copy was aborted of which all is launched")
		}
		stall.Release()
		r.wait(launched)
		after := r.submit(r.down(next, src, transfer.Demand))
		r.wait(after)
		if after.Abort() {
			t.Error("a copy that has landed was aborted")
		}
		r.equal(next, src)
	})
}

// TestDoneByDevice: a stream that waits for a copy goes on though the host does not know yet that it
// has landed, if the device may signal Done.
func TestDoneByDevice(t *testing.T) {
	for _, c := range []struct{ able, inOrder, relay, want bool }{
		{able: true, inOrder: true, want: true}, {able: true}, {inOrder: true}, {able: true, inOrder: true, relay: true},
	} {
		o := transfer.Options{ChunkBytes: 40, Depth: 4}
		o.Multipath.ChunkIn, o.Multipath.ChunkOut, o.Multipath.ThresholdIn, o.Multipath.ThresholdOut = 40, 40, 1, 1
		r := newRig(t, emulated.Options{CopyErrorsLoseDevice: c.able}, o)
		src, dst, relay := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(1), 240)
		if c.relay {
			at := transfer.Relay{GPU: device.HBM(1)}
			for i := range int64(3) {
				at.In, at.Out = append(at.In, relay.Region(40*i, 40)), append(at.Out, relay.Region(120+40*i, 40))
			}
			if err := r.engine.AddRelay(at); err != nil {
				t.Fatal(err)
			}
		}
		consumer := r.stream(device.HBM(0), "consumer")
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To != device.Host }})
		q := r.down(dst, src, transfer.Demand)
		q.DoneInOrder = c.inOrder
		ticket := r.submit(q)
		if err := consumer.WaitFence(q.Done.Fence, q.Done.Value); err != nil {
			t.Fatal(err)
		}
		release := r.engine.Hold()
		stall.Release()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if c.want {
			ctx = t.Context() // it must not depend on how fast this machine is
		}
		if err := consumer.Synchronize(ctx); (err == nil) != c.want {
			t.Errorf("%+v: the stream goes on while the host does nothing: %v", c, err)
		}
		cancel()
		release()
		r.wait(ticket)
		if err := consumer.Synchronize(t.Context()); err != nil {
			t.Error(err)
		}
		r.equal(dst, src)
		if c.relay {
			if _, err := r.engine.RemoveRelay(device.HBM(1)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestFailedBehindSignal: where the device will signal Done, a later request with the same fence that
// fails meanwhile does not set the fence before: the device's value would follow the higher one.
func TestFailedBehindSignal(t *testing.T) {
	r := newRig(t, emulated.Options{CopyErrorsLoseDevice: true}, transfer.Options{ChunkBytes: 50})
	src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
	consumer := r.stream(device.HBM(0), "consumer")
	stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
	first := r.down(dst, src, transfer.Demand)
	first.DoneInOrder = true
	running := r.submit(first)
	var later []*transfer.Ticket
	q := first
	for range 2 {
		q.After = []device.Point{q.Done}
		q.Done.Value++
		later = append(later, r.submit(q))
	}
	if !later[1].Cancel() || !later[0].Cancel() {
		t.Fatal("a copy behind one that stalls has begun")
	}
	if err := consumer.WaitFence(first.Done.Fence, first.Done.Value); err != nil {
		t.Fatal(err)
	}
	r.reached(later[0].End(), true)
	r.reached(first.Done, false)
	if now := first.Done.Fence.Value(); now >= first.Done.Value {
		t.Errorf("the fence is at %d before the copy has landed", now)
	}
	stall.Release()
	r.wait(running)
	for i, ticket := range later {
		if err := ticket.Wait(t.Context()); !errors.Is(err, transfer.ErrCanceled) {
			t.Errorf("canceled: %v", err)
		}
		if p := (device.Point{Fence: first.Done.Fence, Value: first.Done.Value + uint32(i) + 1}); !errors.Is(p.Wait(t.Context()), transfer.ErrCanceled) {
			t.Errorf("value %d is not failed", p.Value)
		}
	}
	r.equal(dst, src)
	_ = consumer.Synchronize(t.Context()) // the fence may have failed when it waited
	q.After, q.Done.Value = nil, q.Done.Value+1
	r.wait(r.submit(q))
}
