package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// poisonous is a machine whose streams refuse copies, records and signals; with like, as on CUDA, the
// stream is in error then, and drops what follows.
type poisonous struct {
	device.Machine
	mu         sync.Mutex
	rng        *rand.Rand
	chance     float64
	like, once bool
	refusals   int
}

func (m *poisonous) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if b, ok := s.(device.BatchCopier); ok && space != device.Host {
		return &poisonousStream{b, m}, err
	}
	return s, err
}

type poisonousStream struct {
	device.BatchCopier
	m *poisonous
}

var errPoison = errors.New("refused by the fuzz")

func (s *poisonousStream) refuse(op string) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.once {
		s.m.once = false
	} else if s.m.rng.Float64() >= s.m.chance {
		return nil
	}
	s.m.refusals++
	if s.m.like {
		if err := s.BatchCopier.(device.Executor).Execute(device.Work{Name: "poison", Host: true, Run: func(device.Access) error { return errPoison }}); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s on %s: %w", op, s.Name(), errPoison)
}

func (s *poisonousStream) Copy(dst, src device.Range) error {
	if err := s.refuse("copy"); err != nil {
		return err
	}
	return s.BatchCopier.Copy(dst, src)
}

func (s *poisonousStream) CopyBatch(dst, src []device.Range) error {
	if err := s.refuse("copy"); err != nil {
		return err
	}
	return s.BatchCopier.CopyBatch(dst, src)
}

func (s *poisonousStream) Record(e device.Event) error {
	if err := s.refuse("record"); err != nil {
		return err
	}
	return s.BatchCopier.Record(e)
}

func (s *poisonousStream) SignalFence(f device.Fence, v uint32) error {
	if err := s.refuse("signal"); err != nil {
		if s.m.like {
			return errors.Join(err, f.Fail(v, err))
		}
		return err
	}
	_ = s.BatchCopier.(device.Executor).Execute(device.Work{Name: "check", Host: true, Run: func(device.Access) error {
		if now := f.Value(); int32(now-v) >= 0 {
			panic(fmt.Sprintf("the device sets a fence that is at %d to %d", now, v))
		}
		return nil
	}})
	return s.BatchCopier.SignalFence(f, v)
}

// TestDoneAnyHistory: requests that share fences, some of whose Done a device signals, end as they say, with
// the right bytes: with relays that come and go, refusals as of CUDA, redirected, aborted, skipped and
// canceled requests, lost devices, fence values that wrap around, and an engine that is closed meanwhile.
func TestDoneAnyHistory(t *testing.T) {
	var total counts
	for seed := range uint64(200) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { doneHistory(t, seed, &total) })
	}
	t.Logf("%+v", total)
	if total.landed == 0 || total.failed == 0 || total.skipped == 0 || total.redirected == 0 || total.aborted == 0 || total.canceled == 0 || total.refusals == 0 || total.relayed == 0 || total.lost == 0 {
		t.Errorf("not all has happened: %+v", total)
	}
}

type counts struct{ requests, landed, failed, skipped, redirected, aborted, canceled, refusals, relayed, lost, consumed int64 }

type doneSlot struct {
	dst    device.Memory
	fence  device.Fence
	value  uint32
	last   *doneRequest
	before []*doneRequest
}
type doneRequest struct {
	t                *transfer.Ticket
	done             device.Point
	salt             byte
	n                int64
	check            device.Memory
	passed           device.Point
	stream           device.Executor
	slot             *doneSlot
	skipped, endUsed bool
	src              device.Memory
}

func doneHistory(t *testing.T, seed uint64, total *counts) {
	rng := rand.New(rand.NewPCG(seed, 77))
	o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed, CopyErrorsLoseDevice: true}
	if rng.IntN(2) == 0 {
		o.HostLink, o.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 5e6}
	}
	o.NoBatches = rng.IntN(3) == 0
	o.FenceStart = []uint32{0, 1<<32 - 10, 1<<31 - 10}[rng.IntN(3)]
	if seed%6 == 5 {
		o.Virtual, o.Schedule = false, 0
	}
	_ = rng.IntN(2)
	options := small()
	options.Timed = rng.IntN(4) == 0
	options.Depth = 1 + rng.IntN(4)
	r := newRig(t, o, options)
	m := &poisonous{Machine: r.m, rng: rand.New(rand.NewPCG(seed, 5)), like: rng.IntN(2) == 0}
	if rng.IntN(2) == 0 {
		m.chance = []float64{0.02, 0.1, 0.3}[rng.IntN(3)]
	}
	options.Machine = m
	e, err := transfer.New(options)
	if err != nil {
		t.Fatal(err)
	}
	r.engine = e
	closed := false
	t.Cleanup(func() {
		if !closed {
			if err := e.Close(); err != nil && !errors.Is(err, device.ErrLost) {
				t.Error(err)
			}
		}
	})
	const slots = 4
	size := int64(2000)
	mk := func(s device.Space, salt byte) device.Memory {
		src := r.filled(size, salt)
		if s == device.Host {
			return src
		}
		mem := r.alloc(s, size)
		st := r.stream(s, "fill")
		if err := st.Copy(mem.Range(0, size), src.Range(0, size)); err != nil {
			t.Fatal(err)
		}
		if err := st.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		return mem
	}
	hosts, peers := map[byte]device.Memory{}, map[byte]device.Memory{}
	for salt := byte(1); salt <= 5; salt++ {
		hosts[salt], peers[salt] = mk(device.Host, salt), mk(device.HBM(1+int(salt)%2), salt)
	}
	var ss []*doneSlot
	for range slots {
		f, err := r.m.NewFence("slot")
		if err != nil {
			t.Fatal(err)
		}
		d := mk(device.HBM(0), 0)
		ss = append(ss, &doneSlot{dst: d, fence: f, value: f.Value()})
	}
	relayAt := map[int]bool{}
	addRelay := func(g int) {
		if relayAt[g] {
			return
		}
		if err := e.AddRelay(r.buffers(device.HBM(g), 3, 64)); err == nil {
			relayAt[g] = true
		}
	}
	if rng.IntN(2) == 0 {
		addRelay(1)
	}
	if rng.IntN(3) == 0 {
		addRelay(2)
	}
	lose := rng.IntN(6) == 0
	isLost := -1
	var all []*doneRequest
	var stalls []*emulated.Fault
	for range 60 {
		switch rng.IntN(16) {
		default: // submit
			s := ss[rng.IntN(slots)]
			q := &doneRequest{salt: byte(1 + rng.IntN(5)), slot: s, n: 1 + rng.Int64N(size)}
			if rng.IntN(3) == 0 {
				q.n = min(q.n, 100)
			}
			q.src = hosts[q.salt]
			if rng.IntN(2) == 0 {
				q.src = peers[q.salt]
			}
			s.value++
			q.done = device.Point{Fence: s.fence, Value: s.value}
			rq := transfer.Request{Done: q.done, DoneInOrder: true, Priority: transfer.Priority(rng.IntN(int(transfer.Priorities)))}
			for at := int64(0); at < q.n; {
				k := min(q.n-at, 1+rng.Int64N(400))
				rq.Pieces = append(rq.Pieces, transfer.Piece{Src: q.src.Region(at, k), Dst: s.dst.Region(at, k), Separate: rng.IntN(2) == 0})
				at += k
			}
			left := s.before[:0]
			for _, p := range s.before {
				if !p.passed.None() {
					if ended, _ := p.passed.Ended(); !ended {
						rq.After = append(rq.After, p.passed)
						left = append(left, p)
						if p.t.Ended() {
							_ = p.t.Wait(t.Context())
						} else if rng.IntN(2) == 0 {
							p.endUsed = true
							rq.After = append(rq.After, p.t.End())
						} else {
							rq.After = append(rq.After, p.done)
						}
						continue
					}
				}
				if p.t.Ended() {
					_ = p.t.Wait(t.Context())
					continue
				}
				left = append(left, p)
				if rng.IntN(2) == 0 {
					p.endUsed = true
					rq.After = append(rq.After, p.t.End())
				} else {
					rq.After = append(rq.After, p.done)
				}
			}
			s.before = left
			q.t, err = e.Submit(rq)
			if err != nil {
				if !errors.Is(err, device.ErrLost) {
					t.Fatal(err)
				}
				s.value--
				continue
			}
			total.requests++
			if rng.IntN(3) == 0 { // a consumer
				q.stream = r.stream(device.HBM(0), "consumer")
				q.check = r.alloc(device.HBM(0), q.n)
				q.passed = r.point()
				q.passed.Value = q.passed.Fence.Value() + 1
				ok := q.stream.WaitFence(q.done.Fence, q.done.Value)
				ok = errors.Join(ok, q.stream.Copy(q.check.Range(0, q.n), s.dst.Range(0, q.n)), q.stream.SignalFence(q.passed.Fence, q.passed.Value))
				if ok != nil {
					t.Fatal(ok)
				}
			}
			s.last = q
			s.before = append(s.before, q)
			all = append(all, q)
		case 8, 9:
			if len(all) > 0 {
				q := all[len(all)-1-rng.IntN(min(8, len(all)))]
				h := hosts[q.salt]
				if rng.IntN(3) == 0 {
					h = peers[q.salt]
				}
				if q.endUsed {
					continue
				}
				var ps []transfer.Piece
				for at := int64(0); at < q.n; {
					k := min(q.n-at, 1+rng.Int64N(400))
					ps = append(ps, transfer.Piece{Src: h.Region(at, k), Dst: q.slot.dst.Region(at, k), Separate: rng.IntN(2) == 0})
					at += k
				}
				done, err := q.t.Redirect(ps, transfer.Text("redirected"))
				if err != nil && !errors.Is(err, device.ErrLost) {
					t.Fatal(err)
				}
				if done {
					total.redirected++
				}
			}
		case 10, 11:
			if len(all) > 0 {
				q := all[len(all)-1-rng.IntN(min(8, len(all)))]
				switch rng.IntN(4) {
				case 0:
					if q.t.Cancel() {
						total.canceled++
					}
				case 1:
					if q.t.Abort() {
						total.aborted++
					}
				case 2:
					if q.t.Skip() > 0 {
						q.skipped = true
						total.skipped++
					}
				case 3:
					q.t.RaisePriority(transfer.Demand)
				}
			}
		case 12:
			for range rng.IntN(20) {
				_ = r.m.Yield(t.Context(), time.Microsecond)
			}
		case 13:
			stalls = append(stalls, r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, For: time.Duration(1 + rng.IntN(300_000)), Skip: rng.IntN(9), Match: func(p emulated.Point) bool { return p.Stream != "consumer" }}))
			if len(stalls) > 2 {
				stalls[0].Release()
				stalls = stalls[1:]
			}
		case 14:
			if g := 1 + rng.IntN(2); rng.IntN(2) == 0 && g != isLost {
				addRelay(g)
			} else if relayAt[g] {
				if _, err := e.RemoveRelay(device.HBM(g)); err == nil {
					relayAt[g] = false
				}
			}
		case 15:
			if lose && rng.IntN(8) == 0 && isLost < 0 {
				isLost = 1 + rng.IntN(2)
				total.lost++
				if err := r.m.Lose(isLost); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for _, f := range stalls {
		f.Release()
	}
	if rng.IntN(5) == 0 {
		closed = true
		if err := e.Close(); err != nil && !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for i, q := range all {
		if !closed {
			if err := q.t.Wait(ctx); err != nil && !q.t.Ended() {
				t.Fatalf("request %d: %v", i, err)
			}
		}
		if !q.t.Ended() {
			t.Fatalf("request %d has not ended", i)
		}
		derr := q.done.Wait(ctx)
		if ctx.Err() != nil {
			t.Fatalf("request %d: Done %d of %v is not reached (now %d), ticket: %v; %v", i, q.done.Value, q.done.Fence, q.done.Fence.Value(), q.t.Err(), derr)
		}
		if q.t.Err() == nil {
			total.landed++
		} else {
			total.failed++
			if derr == nil {
				t.Fatalf("request %d failed with %v, and Done says nothing", i, q.t.Err())
			}
		}
		if q.stream != nil {
			serr := q.stream.Synchronize(ctx)
			if ctx.Err() != nil {
				t.Fatalf("request %d: consumer: %v", i, serr)
			}
			if serr == nil && !q.skipped && (!o.LikeCUDA || derr == nil) {
				total.consumed++
				if !bytes.Equal(r.content(q.check), hosts[q.salt].Read(0, q.n)) {
					t.Fatalf("request %d (%d bytes from %s): the consumer read other bytes; ticket: %v", i, q.n, q.src.Space(), q.t.Err())
				}
			}
		}
	}
	for i, s := range ss {
		if q := s.last; q != nil && q.t.Err() == nil && !q.skipped {
			if got := r.content(s.dst)[:q.n]; !bytes.Equal(got, hosts[q.salt].Read(0, q.n)) {
				t.Fatalf("slot %d: other bytes", i)
			}
		}
	}
	total.refusals += int64(m.refusals)
	if !closed {
		for _, s := range e.Stats() {
			total.relayed += s.RelayedBytes
		}
		for g, on := range relayAt {
			if on {
				if p, err := e.RemoveRelay(device.HBM(g)); err == nil {
					_ = p.Wait(ctx)
				}
			}
		}
	}
}
