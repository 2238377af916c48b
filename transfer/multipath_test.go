package transfer_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// relay makes a GPU a relay with n buffers of these bytes in each direction.
func (r *rig) relay(gpu device.Space, n int, bytes int64) transfer.Relay {
	r.Helper()
	relay := r.buffers(gpu, n, bytes)
	if err := r.engine.AddRelay(relay); err != nil {
		r.Fatal(err)
	}
	return relay
}

func (r *rig) buffers(gpu device.Space, n int, bytes int64) transfer.Relay {
	r.Helper()
	relay := transfer.Relay{GPU: gpu}
	memory := r.alloc(gpu, 2*int64(n)*bytes)
	for i := range int64(n) {
		relay.In = append(relay.In, memory.Region(i*bytes, bytes))
		relay.Out = append(relay.Out, memory.Region((int64(n)+i)*bytes, bytes))
	}
	return relay
}

// small are options whose chunks and thresholds are some bytes.
func small() transfer.Options {
	return transfer.Options{ChunkBytes: 128, Multipath: transfer.Multipath{ChunkIn: 64, ChunkOut: 80, ThresholdIn: 300, ThresholdOut: 200}}
}

// path are the counters of a link.
func (r *rig) path(from, to device.Space) transfer.PathStats {
	return r.engine.Path(device.Pair{From: from, To: to})
}

// TestMultipath: large copies between the host and a GPU take the links of others, too, and small
// ones, and those between GPUs, do not; every byte arrives.
func TestMultipath(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, n := range []int64{100, 299, 300, 5000} {
			r := newRig(t, o, small())
			r.relay(device.HBM(1), 2, 80)
			r.relay(device.HBM(2), 3, 50)
			src, there, back := r.filled(n, 1), r.alloc(device.HBM(0), n), r.alloc(device.Host, n)
			beside := r.alloc(device.HBM(1), n)
			r.wait(r.submit(r.down(there, src, transfer.Demand)))
			r.wait(r.submit(r.down(beside, there, transfer.Demand)))
			r.wait(r.submit(r.down(back, beside, transfer.Demand)))
			r.equal(there, src)
			r.equal(back, src)
			in := r.path(device.Host, device.HBM(1)).RelayedBytes + r.path(device.Host, device.HBM(2)).RelayedBytes
			out := r.path(device.HBM(2), device.Host)
			if (in > 0) != (n >= 300) || in >= n || (out.RelayedBytes > 0) != (n >= 200) || out.RelayedCopies*50 < out.RelayedBytes {
				t.Errorf("%d bytes: relays carried %d in, and of the way out %+v", n, in, out)
			}
			if s := r.path(device.Host, device.HBM(0)); s.Bytes != n || s.Copies != 1 || s.RelayedBytes != 0 {
				t.Errorf("%d bytes: %+v", n, s)
			}
			// Links between GPUs are others than the relays' hops.
			last := r.alloc(device.HBM(0), n)
			r.wait(r.submit(r.down(last, beside, transfer.Demand)))
			onward := r.alloc(device.HBM(2), n)
			r.wait(r.submit(r.down(onward, last, transfer.Demand)))
			r.equal(onward, src)
			if stats := r.engine.Stats(); len(stats) != 8 && n >= 300 {
				t.Errorf("%d links: %+v", len(stats), stats)
			}
		}
	})
}

// shuffled copies pieces of n bytes, of which piece i becomes piece i * stride modulo their number.
func (r *rig) shuffled(dst, src device.Memory, pieces, n, stride int) transfer.Request {
	q := transfer.Request{Priority: transfer.Demand, Done: r.point()}
	for i := range pieces {
		q.Pieces = append(q.Pieces, transfer.Piece{Src: src.Region(int64(i*n), int64(n)), Dst: dst.Region(int64(i*stride%pieces*n), int64(n))})
	}
	return q
}

// TestMultipathPieces: scattered pieces are contiguous in a relay's buffer, and scattered again.
func TestMultipathPieces(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, noBatches := range []bool{false, true} {
			o.NoBatches = noBatches
			r := newRig(t, o, small())
			r.relay(device.HBM(1), 3, 80)
			const pieces, n = 40, 23
			src, dst, back := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n), r.alloc(device.Host, pieces*n)
			r.wait(r.submit(r.shuffled(dst, src, pieces, n, 7)))
			r.wait(r.submit(r.shuffled(back, dst, pieces, n, 7)))
			// Piece i went to 7 i, and from there to 49 i.
			got, want := back.Read(0, pieces*n), src.Read(0, pieces*n)
			for i := range pieces {
				if at := i * 49 % pieces; !bytes.Equal(got[at*n:][:n], want[i*n:][:n]) {
					t.Errorf("piece %d differs", i)
				}
			}
			if s := r.path(device.Host, device.HBM(1)); s.RelayedBytes == 0 {
				t.Error("nothing was relayed")
			}
		}
	})
}

// TestMultipathRate: three links of equal rates take a third of the time, and the rate is that of
// all of them; a copy's times are those of its first and its last chunk.
func TestMultipathRate(t *testing.T) {
	const ms = time.Millisecond
	for _, out := range []bool{false, true} {
		r := newRig(t, emulated.Options{
			Virtual: true, NoData: true, Report: func(emulated.Finding) {},
			HostLink: emulated.Link{BytesPerSecond: 50e9}, PeerLink: emulated.Link{BytesPerSecond: 400e9}, NoticeLatency: 10 * time.Microsecond,
		}, transfer.Options{Timed: true})
		r.relay(device.HBM(1), 3, 5<<20)
		r.relay(device.HBM(2), 3, 5<<20)
		src, dst := r.alloc(device.Host, 1<<30), r.alloc(device.HBM(0), 1<<30)
		if out {
			src, dst = dst, src
		}
		began := r.m.Now()
		ticket := r.submit(r.down(dst, src, transfer.Demand))
		r.wait(ticket)
		took := r.m.Now() - began
		if best := time.Duration(1 << 30 / 150); took < best || took > best*106/100 {
			t.Errorf("out %t: 1 GiB in %v, at best %v", out, took, best)
		}
		times, err := ticket.Times()
		if err != nil || times.Started-began > ms || times.Landed > began+took || times.Done-times.Landed > 11*time.Microsecond {
			t.Errorf("out %t: %+v, %v; began at %v and took %v", out, times, err, began, took)
		}
		if !out {
			in := r.engine.Inbound(device.HBM(0))
			in.Update()
			if rate := in.Rate(device.Host); rate < 90e9 || rate > 150e9 {
				t.Errorf("a rate of %.3g, from 50e9 half way to 150e9", rate)
			}
			// What the relay's link carried for others is no reason to think it slow.
			own := r.alloc(device.HBM(1), 256<<20)
			end, err := r.engine.RemoveRelay(device.HBM(2))
			if err != nil {
				t.Fatal(err)
			}
			if err := end.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.wait(r.submit(r.down(own, r.alloc(device.Host, 256<<20), transfer.Demand)))
			other := r.engine.Inbound(device.HBM(1))
			other.Update()
			if rate := other.Rate(device.Host); rate < 48e9 {
				t.Errorf("a rate of the relay's own link of %.3g, want about 50e9", rate)
			}
		}
	}
}

// TestRelayFails: a chunk that fails on a relay is copied over the GPU's own link; the second
// failure retires the relay, which works again when it was removed and added.
func TestRelayFails(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, hop := range []string{"relay", "copy"} {
			r := newRig(t, o, small())
			relay := r.relay(device.HBM(1), 3, 64)
			fault := &emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool {
				return strings.HasPrefix(p.Stream, hop) && (p.From == device.HBM(1) || p.To == device.HBM(1))
			}}
			r.m.Inject(fault)
			src, dst := r.filled(3000, 1), r.alloc(device.HBM(0), 3000)
			r.wait(r.submit(r.down(dst, src, transfer.Demand)))
			r.equal(dst, src)
			s := r.path(device.Host, device.HBM(1))
			// A third chunk may be in flight when the second fails.
			if !s.Retired || s.Retries < 2 || s.Retries > 3 || r.path(device.Host, device.HBM(0)).Failed != 0 {
				t.Errorf("%s fails: %+v", hop, s)
			}
			fault.Release()
			end, err := r.engine.RemoveRelay(device.HBM(1))
			if err == nil {
				err = end.Wait(t.Context())
			}
			if err == nil {
				err = r.engine.AddRelay(relay)
			}
			if err != nil {
				t.Fatal(err)
			}
			before := s.RelayedBytes
			again := r.alloc(device.HBM(0), 3000)
			r.wait(r.submit(r.down(again, src, transfer.Demand)))
			r.equal(again, src)
			if s := r.path(device.Host, device.HBM(1)); s.Retired || s.RelayedBytes == before {
				t.Errorf("%s, added again: %+v", hop, s)
			}
		}
	})
}

// TestRelayLost: copies go on when the relay's device is lost in the middle of them.
func TestRelayLost(t *testing.T) {
	for seed := range uint64(20) {
		for _, out := range []bool{false, true} {
			link := emulated.Link{BytesPerSecond: 1e6}
			r := newRig(t, emulated.Options{Virtual: true, Schedule: emulated.Random, Seed: seed, HostLink: link, PeerLink: emulated.Link{BytesPerSecond: 5e6}}, small())
			r.relay(device.HBM(1), 3, 64)
			src, dst := r.filled(5000, 1), r.alloc(device.HBM(0), 5000)
			if out {
				r.wait(r.submit(r.down(dst, src, transfer.Demand)))
				src, dst = dst, r.alloc(device.Host, 5000)
			}
			ticket := r.submit(r.down(dst, src, transfer.Demand))
			for range 1 + seed*3 {
				_ = r.m.Yield(t.Context(), 0)
			}
			if err := r.m.Lose(1); err != nil {
				t.Fatal(err)
			}
			r.wait(ticket)
			r.equal(dst, src)
			end, err := r.engine.RemoveRelay(device.HBM(1))
			if err == nil {
				err = end.Wait(t.Context())
			}
			if err != nil {
				t.Errorf("removing a lost relay: %v", err)
			}
		}
	}
}

// TestRemoveRelay: the point is reached when the buffers are not in use, so that their memory may be
// freed in the middle of a copy.
func TestRemoveRelay(t *testing.T) {
	for _, out := range []bool{false, true} {
		for step := range 24 {
			r := newRig(t, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 5e6}}, small())
			memory, err := r.m.Alloc(device.HBM(1), 6*64, "buffers")
			if err != nil {
				t.Fatal(err)
			}
			relay := transfer.Relay{GPU: device.HBM(1)}
			for i := range int64(3) {
				relay.In, relay.Out = append(relay.In, memory.Region(i*64, 64)), append(relay.Out, memory.Region((3+i)*64, 64))
			}
			if err := r.engine.AddRelay(relay); err != nil {
				t.Fatal(err)
			}
			src, dst := r.filled(5000, 1), r.alloc(device.HBM(0), 5000)
			if out {
				r.wait(r.submit(r.down(dst, src, transfer.Demand)))
				src, dst = dst, r.alloc(device.Host, 5000)
			}
			ticket := r.submit(r.down(dst, src, transfer.Demand))
			for range step {
				_ = r.m.Yield(t.Context(), 0)
			}
			end, err := r.engine.RemoveRelay(device.HBM(1))
			if err != nil {
				t.Fatal(err)
			}
			if again, err := r.engine.RemoveRelay(device.HBM(1)); !end.Reached() && (err != nil || again != end) {
				t.Errorf("removed twice: %v, %v", again, err)
			}
			if err := r.engine.AddRelay(relay); !end.Reached() && (err == nil || !strings.Contains(err.Error(), "still in use")) {
				t.Errorf("added while it is in use: %v", err)
			}
			if err := end.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if ticket.Ended() {
				t.Fatal("the copy has ended before the relay is drained: the test removes it too late")
			}
			if err := memory.Free(); err != nil {
				t.Error(err)
			}
			r.wait(ticket)
			r.equal(dst, src)
		}
	}
}

// TestBadRelays: a relay that cannot be one is refused, and says why.
func TestBadRelays(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, small())
	good := r.buffers(device.HBM(1), 2, 64)
	host := r.alloc(device.Host, 64)
	for want, relay := range map[string]transfer.Relay{
		"transfer: add host as a relay: only a GPU can be one": {GPU: device.Host, In: good.In},
		"it has no buffers":                    {GPU: device.HBM(1)},
		"is not in its memory":                 {GPU: device.HBM(1), In: []device.Region{host.Region(0, 64)}},
		"all in one direction have one size":   {GPU: device.HBM(1), In: []device.Region{good.In[0], good.In[1].Slice(0, 63)}},
		"overlap":                              {GPU: device.HBM(1), In: good.In, Out: good.In[1:]},
		"is not in a live allocation":          {GPU: device.HBM(1), In: []device.Region{{Space: device.HBM(1), Range: device.Range{Addr: 1, Bytes: 64}}}},
		"all in one direction have one size, ": {GPU: device.HBM(1), In: []device.Region{good.In[0].Slice(0, 0)}},
	} {
		if err := r.engine.AddRelay(relay); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	if _, err := r.engine.RemoveRelay(device.HBM(1)); err == nil || !strings.Contains(err.Error(), "it is none") {
		t.Errorf("removing what was not added: %v", err)
	}
	if err := r.engine.AddRelay(good); err != nil {
		t.Error(err)
	}
	if err := r.engine.AddRelay(good); err == nil || !strings.Contains(err.Error(), "one already") {
		t.Errorf("added twice: %v", err)
	}
	for _, o := range []transfer.Multipath{{ChunkIn: -1}, {Depth: -1}, {Preferred: -1}} {
		if _, err := transfer.New(transfer.Options{Machine: r.m, Multipath: o}); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}

// TestRelayWithoutPath: a relay that has no path to a GPU carries nothing for it.
func TestRelayWithoutPath(t *testing.T) {
	top := &device.Topology{Host: device.Info{MemoryBytes: 1 << 30}, GPUs: make([]device.Info, 3), Paths: map[device.Pair]device.Path{}}
	for i := range top.GPUs {
		top.GPUs[i].MemoryBytes = 1 << 30
		top.Paths[device.Pair{From: device.Host, To: device.HBM(i)}] = device.Path{}
		top.Paths[device.Pair{From: device.HBM(i), To: device.Host}] = device.Path{}
	}
	top.Paths[device.Pair{From: device.HBM(1), To: device.HBM(2)}] = device.Path{}
	r := newRig(t, emulated.Options{Virtual: true, Topology: top}, small())
	r.relay(device.HBM(1), 3, 64)
	for gpu, relays := range map[int]bool{0: false, 2: true} {
		before := r.path(device.Host, device.HBM(1)).RelayedBytes
		src, dst := r.filled(3000, 1), r.alloc(device.HBM(gpu), 3000)
		r.wait(r.submit(r.down(dst, src, transfer.Demand)))
		r.equal(dst, src)
		if got := r.path(device.Host, device.HBM(1)).RelayedBytes > before; got != relays {
			t.Errorf("for gpu%d: relayed %t", gpu, got)
		}
	}
}

// TestMultipathFaults: random copies while relays come, go, fail and stall, streams of the GPUs' own links fail
// now and then, and copies are canceled and aborted: what lands is what was sent, what does not says so, what ended
// is not written any more, and relays get their buffers back.
func TestMultipathFaults(t *testing.T) {
	const n = 20
	var relayed, retries int64
	var failed, canceled, aborted, midway int
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 3))
		o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed, LikeCUDA: seed%5 == 0}
		if seed%4 == 3 {
			o = emulated.Options{Seed: seed}
		}
		if seed%2 == 0 {
			o.HostLink, o.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 5e6}
		}
		if !o.Virtual {
			o.HostLink, o.PeerLink = emulated.Link{}, emulated.Link{}
		}
		options := small()
		options.Multipath.Wait = seed%3 == 1
		options.Timed = seed%7 == 0
		r := newRig(t, o, options)
		own, chance := seed%6 == 5, 0.03 // also own links fail
		if own {
			chance = 0.1 // so that chunks fail twice, and with them copies
		}
		var src, dst []device.Memory
		var before [][]byte // what is in dst at first: each byte differs from that of src
		for i := range n {
			size := 1 + rng.Int64N(3000)
			s, d := r.filled(size, byte(i)), r.alloc(device.HBM(0), size)
			other := r.filled(size, 0xff)
			before = append(before, r.content(other))
			if i%2 == 0 {
				r.wait(r.submit(r.down(d, other, transfer.Demand)))
			} else { // to the host
				r.wait(r.submit(r.down(d, s, transfer.Demand)))
				s, d = d, other
			}
			src, dst = append(src, s), append(dst, d)
		}
		r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: chance, Match: func(p emulated.Point) bool {
			return strings.HasPrefix(p.Stream, "relay") || strings.HasPrefix(p.Stream, "copy ") && (own || p.To != device.HBM(0) && p.From != device.HBM(0))
		}})
		relays := map[int]transfer.Relay{}
		for gpu := 1; gpu < 3; gpu++ {
			relays[gpu] = r.relay(device.HBM(gpu), 1+rng.IntN(3), 80)
		}
		var tickets []*transfer.Ticket
		var given [n]bool // up by Cancel or Abort
		for i := range n {
			tickets = append(tickets, r.submit(r.down(dst[i], src[i], transfer.Priority(rng.IntN(5)))))
			if rng.IntN(3) == 0 {
				tickets[rng.IntN(len(tickets))].RaisePriority(transfer.Demand)
			}
			if rng.IntN(4) == 0 {
				for range rng.IntN(8) {
					_ = r.m.Yield(t.Context(), time.Microsecond)
				}
				k := rng.IntN(len(tickets))
				if rng.IntN(3) == 0 {
					if tickets[k].Cancel() {
						given[k], canceled = true, canceled+1
					}
				} else if tickets[k].Abort() {
					given[k], aborted = true, aborted+1
				}
			}
			if rng.IntN(3) == 0 {
				gpu := 1 + rng.IntN(2)
				end, err := r.engine.RemoveRelay(device.HBM(gpu))
				if err != nil {
					t.Fatal(err)
				}
				if err := end.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := r.engine.AddRelay(relays[gpu]); err != nil {
					t.Fatal(err)
				}
			}
		}
		var at [n][]byte // what is in dst when a copy has ended
		for i, ticket := range tickets {
			err := ticket.Wait(t.Context())
			want := r.content(src[i])
			at[i] = r.content(dst[i])
			switch {
			case given[i] != errors.Is(err, transfer.ErrCanceled):
				t.Errorf("seed %d, copy %d: canceled or aborted %t: %v", seed, i, given[i], err)
			case err == nil:
				if !bytes.Equal(at[i], want) {
					t.Errorf("seed %d, copy %d: what arrived differs from its source", seed, i)
				}
			case given[i]:
			case own && errors.Is(err, device.ErrCopyFailed):
				failed++
			default:
				t.Errorf("seed %d, copy %d: %v", seed, i, err)
			}
			if landed := ticket.Landed(); err != nil && !bytes.Equal(at[i][:landed], want[:landed]) {
				t.Errorf("seed %d, copy %d: %d bytes are said to have landed that have not", seed, i, landed)
			}
			written := false
			for k, b := range at[i] {
				if b != want[k] && b != before[i][k] {
					t.Fatalf("seed %d, copy %d: byte %d of what ended with %v is neither from before nor from the source", seed, i, k, err)
				}
				written = written || b != before[i][k]
			}
			if given[i] && written {
				midway++
			}
		}
		for gpu := range relays { // all buffers come back
			end, err := r.engine.RemoveRelay(device.HBM(gpu))
			if err != nil {
				t.Fatal(err)
			}
			if err := end.Wait(t.Context()); err != nil {
				t.Errorf("seed %d: gpu%d is not drained: %v", seed, gpu, err)
			}
		}
		for i := range tickets {
			if !bytes.Equal(r.content(dst[i]), at[i]) {
				t.Errorf("seed %d, copy %d: written after its end", seed, i)
			}
		}
		for _, s := range r.engine.Stats() {
			relayed, retries = relayed+s.RelayedBytes, retries+s.Retries
		}
	}
	t.Logf("%d bytes were relayed, %d chunks retried, %d copies failed, %d were canceled, %d aborted, %d of them midway", relayed, retries, failed, canceled, aborted, midway)
	if relayed < 100_000 || retries < 100 || failed == 0 || canceled < 10 || aborted < 50 || midway < 10 {
		t.Error("the test shows nothing")
	}
}

// TestRelayStreams: the copies of a relayed chunk are on streams of the relay, in both directions, and
// are called by it in traces.
func TestRelayStreams(t *testing.T) {
	var names []string
	relay := device.HBM(1)
	r := newRig(t, emulated.Options{Virtual: true, Trace: func(tr emulated.Trace) {
		if tr.Op == "copy" {
			names = append(names, fmt.Sprintf("%s on %s", tr.Stream, tr.Space))
		}
	}}, small())
	r.relay(relay, 3, 64)
	there := r.alloc(device.HBM(0), 1000)
	r.wait(r.submit(r.down(there, r.filled(1000, 1), transfer.Demand)))
	r.wait(r.submit(r.down(r.alloc(device.Host, 1000), there, transfer.Demand)))
	for _, name := range []string{
		"copy host to gpu0 on gpu0", "copy host to gpu1 on gpu1", "relay gpu1 to gpu0 on gpu1",
		"copy gpu0 to host on gpu0", "copy gpu1 to host on gpu1", "relay gpu0 to gpu1 on gpu1",
	} {
		if !slices.Contains(names, name) {
			t.Errorf("no %q in %q", name, names)
		}
	}
}

// TestRelayWaits: with Multipath.Wait a relay leaves more of its link to other programs' copies.
func TestRelayWaits(t *testing.T) {
	relayed := func(wait, busy bool) int64 {
		r := newRig(t, emulated.Options{
			Virtual: true, NoData: true, Report: func(emulated.Finding) {},
			HostLink: emulated.Link{BytesPerSecond: 50e9}, PeerLink: emulated.Link{BytesPerSecond: 400e9},
		}, transfer.Options{Multipath: transfer.Multipath{Wait: wait}})
		r.relay(device.HBM(1), 3, 5<<20)
		other := r.stream(device.HBM(1), "other program")
		if busy {
			from, to := r.alloc(device.Host, 4<<30), r.alloc(device.HBM(1), 4<<30)
			if err := other.Copy(to.Range(0, 4<<30), from.Range(0, 4<<30)); err != nil {
				t.Fatal(err)
			}
		}
		r.wait(r.submit(r.down(r.alloc(device.HBM(0), 1<<30), r.alloc(device.Host, 1<<30), transfer.Demand)))
		if err := other.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		return r.path(device.Host, device.HBM(1)).RelayedBytes
	}
	if alone, takes, waits := relayed(true, false), relayed(false, true), relayed(true, true); waits*10 > takes*8 || alone < 500<<20 {
		t.Errorf("relayed %d bytes alone, beside others %d, and waiting %d", alone, takes, waits)
	}
}

// TestNoDirectFirst: copies of two GPUs at once, each the other's relay, take the GPUs' own links, and without
// direct first whichever is free; every byte arrives.
func TestNoDirectFirst(t *testing.T) {
	const n = 32 << 20
	relayed := func(off bool) (part float64) {
		r := newRig(t, emulated.Options{
			Virtual: true, HostLink: emulated.Link{BytesPerSecond: 50e9}, PeerLink: emulated.Link{BytesPerSecond: 400e9},
		}, transfer.Options{Multipath: transfer.Multipath{ChunkIn: 1 << 20, ChunkOut: 1 << 20, NoDirectFirst: off}})
		var tickets []*transfer.Ticket
		var src, dst []device.Memory
		for gpu := range 2 {
			r.relay(device.HBM(gpu), 3, 1<<20)
			src, dst = append(src, r.filled(n, byte(gpu))), append(dst, r.alloc(device.HBM(gpu), n))
		}
		for i := range dst {
			tickets = append(tickets, r.submit(r.down(dst[i], src[i], transfer.Demand)))
		}
		for i, ticket := range tickets {
			r.wait(ticket)
			r.equal(dst[i], src[i])
		}
		for gpu := range 2 {
			part += float64(r.path(device.Host, device.HBM(gpu)).RelayedBytes) / (2 * n)
		}
		return part
	}
	if on, off := relayed(false), relayed(true); on > 0.15 || off < 0.3 {
		t.Errorf("%.2f of the bytes went over relays, and %.2f without direct first", on, off)
	}
}

// TestKernelBesideRelays: a kernel copies small pieces on the link's own GPU; relays carry none of
// them, and all others.
func TestKernelBesideRelays(t *testing.T) {
	c := &copier{}
	o := small()
	o.ChunkBytes, o.Kernel = 4096, c.kernel(t, 1<<20)
	o.Multipath.ThresholdIn = 60 << 10
	r := newRig(t, emulated.Options{Virtual: true}, o)
	r.relay(device.HBM(1), 3, 64)
	const pieces, n = 64, 1024
	src, dst := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n)
	q := r.shuffled(dst, src, pieces, n, 7)
	q.Priority = transfer.KVLoad
	r.wait(r.submit(q))
	if s := r.path(device.Host, device.HBM(1)); c.launches() == 0 || s.RelayedBytes > 0 {
		t.Errorf("%d launches, and relays carried %d bytes", c.launches(), s.RelayedBytes)
	}
	large := r.shuffled(dst, src, 1, pieces*n, 1)
	large.Priority = transfer.KVLoad
	r.wait(r.submit(large))
	r.equal(dst, src)
	if s := r.path(device.Host, device.HBM(1)); s.RelayedBytes == 0 {
		t.Error("relays carried nothing of a large piece")
	}
}

// TestCloseWithRelays: Close waits for what is on its way over relays, and fails what has not begun.
func TestCloseWithRelays(t *testing.T) {
	for step := range 30 {
		m, err := emulated.New(emulated.Options{
			Virtual: true, Check: true, Schedule: emulated.Random, Seed: uint64(step),
			HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 5e6},
		})
		if err != nil {
			t.Fatal(err)
		}
		o := small()
		o.Machine = m
		e, err := transfer.New(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Run("", func(t *testing.T) { // memory is freed before the machine is closed
			r := &rig{T: t, m: m, engine: e}
			r.relay(device.HBM(1), 3, 80)
			m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2, Chance: 0.1, Match: func(p emulated.Point) bool { return p.Stream != "content" }})
			var tickets []*transfer.Ticket
			var src, dst []device.Memory
			for i := range 3 {
				src, dst = append(src, r.filled(2000, byte(i))), append(dst, r.alloc(device.HBM(0), 2000))
				tickets = append(tickets, r.submit(r.down(dst[i], src[i], transfer.Prefetch)))
			}
			for range step {
				_ = m.Yield(t.Context(), 0)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			for i, ticket := range tickets {
				switch err := ticket.Err(); {
				case !ticket.Ended():
					t.Errorf("copy %d has not ended", i)
				case err == nil:
					r.equal(dst[i], src[i])
				case !errors.Is(err, device.ErrClosed) && !errors.Is(err, device.ErrCopyFailed):
					t.Error(err)
				}
			}
			if _, err := e.RemoveRelay(device.HBM(1)); !errors.Is(err, device.ErrClosed) {
				t.Errorf("a relay of a closed engine: %v", err)
			}
		})
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}
