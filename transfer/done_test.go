package transfer_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// TestDoneOfRefusedRelay: the first relayed chunk is refused on its way to the buffer.
func TestDoneOfRefusedRelay(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, stream := range []string{"copy host to gpu1", "relay gpu0 to gpu1"} {
			for _, timed := range []bool{false, true} {
				o.CopyErrorsLoseDevice = true
				to := small()
				to.Timed = timed
				r, m := newRefusingRig(t, o, to)
				r.relay(device.HBM(1), 3, 64)
				const pieces, n = 40, 64
				src, dst := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n)
				if stream == "relay gpu0 to gpu1" {
					r.wait(r.submit(r.shuffled(dst, src, pieces, n, 1)))
					src, dst = dst, r.alloc(device.Host, pieces*n)
				}
				left := 1
				m.set(func(s, op string) bool {
					if s == stream && op == "copy" && left > 0 {
						left--
						return true
					}
					return false
				})
				consumer := r.stream(device.HBM(0), "consumer")
				q := r.shuffled(dst, src, pieces, n, 1)
				q.DoneInOrder = true
				got := r.alloc(device.HBM(0), pieces*n)
				if err := consumer.WaitFence(q.Done.Fence, q.Done.Value); err != nil {
					t.Fatal(err)
				}
				if err := consumer.Copy(got.Range(0, pieces*n), dst.Range(0, pieces*n)); err != nil {
					t.Fatal(err)
				}
				ticket := r.submit(q)
				if err := ticket.Wait(t.Context()); err != nil {
					t.Errorf("%s: %v", stream, err)
				}
				r.consumed(consumer, got, dst, src)
				m.set(nil)
			}
		}
	})
}

// consumed waits for a stream that has copied dst to got, compares both with src, and removes the relay.
func (r *rig) consumed(consumer device.Executor, got, dst, src device.Memory) {
	r.Helper()
	if err := consumer.Synchronize(r.Context()); err != nil {
		r.Error(err)
	}
	r.equal(got, src)
	r.equal(dst, src)
	if _, err := r.engine.RemoveRelay(device.HBM(1)); err != nil {
		r.Error(err)
	}
}

// TestDoneBehindRefusedChunk: the own link refuses a chunk before the last one.
func TestDoneBehindRefusedChunk(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, timed := range []bool{false, true} {
			o.CopyErrorsLoseDevice = true
			r, m := newRefusingRig(t, o, transfer.Options{ChunkBytes: 50, Depth: 2, Timed: timed})
			src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
			left := 1
			m.set(func(s, op string) bool {
				if s == "copy host to gpu0" && op == "copy" && left > 0 {
					left--
					return true
				}
				return false
			})
			q := r.down(dst, src, transfer.Demand)
			q.DoneInOrder = true
			ticket := r.submit(q)
			err := ticket.Wait(t.Context())
			ended, derr := q.Done.Ended()
			t.Logf("ticket: %v; done: %v %v", err, ended, derr)
			consumerErr := q.Done.Wait(t.Context())
			if err == nil || consumerErr == nil {
				t.Errorf("ticket: %v; done: %v", err, consumerErr)
			}
		}
	})
}

// TestDoneBehindRefusedChunkOfConsumer: what a waiting stream sees then.
func TestDoneBehindRefusedChunkOfConsumer(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		o.CopyErrorsLoseDevice = true
		r, m := newRefusingRig(t, o, transfer.Options{ChunkBytes: 50, Depth: 2})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		left := 1
		m.set(func(s, op string) bool {
			if s == "copy host to gpu0" && op == "copy" && left > 0 {
				left--
				return true
			}
			return false
		})
		q := r.down(dst, src, transfer.Demand)
		q.DoneInOrder = true
		ticket := r.submit(q)
		// The host waits for Done as a consumer does.
		err := q.Done.Wait(t.Context())
		t.Logf("the consumer's wait returned %v", err)
		if err == nil {
			t.Errorf("Done is signaled without an error though the first chunk was refused")
		}
		_ = ticket.Wait(t.Context())
	})
}

// TestDoneOfThree: a later request is launched on the same fence before the host knows of the end of the first,
// and a third was canceled meanwhile.
func TestDoneOfThree(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		o.CopyErrorsLoseDevice = true
		r := newRig(t, o, transfer.Options{ChunkBytes: 200})
		src, dst := r.filled(100, 1), r.alloc(device.HBM(0), 100)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		q := r.down(dst, src, transfer.Demand)
		q.DoneInOrder = true
		// The second is submitted before the first begins, so that its watch is first.
		gate := r.point()
		q.After = []device.Point{gate}
		t1 := r.submit(q)
		q.After = []device.Point{q.Done}
		q.Done.Value++
		t2 := r.submit(q)
		q.After = []device.Point{q.Done}
		q.Done.Value++
		t3 := r.submit(q)
		if err := gate.Fence.Signal(gate.Value); err != nil {
			t.Fatal(err)
		}
		for range 100 { // the first is launched
			if err := r.m.Yield(t.Context(), time.Millisecond); err != nil {
				t.Fatal(err)
			}
		}
		if !t3.Cancel() {
			t.Fatal("not canceled")
		}
		stall.Release()
		if err := errors.Join(t1.Wait(t.Context()), t2.Wait(t.Context())); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := q.Done.Wait(ctx); !errors.Is(err, transfer.ErrCanceled) {
			t.Errorf("Done of the canceled copy: %v", err)
		}
	})
}

// TestDoneBehindRefusedRelay: a relay, whose link is busy with another copy, refuses the first chunk that it is given of a
// request; the link of the GPU copies the others, and signals Done behind the last one.
func TestDoneBehindRefusedRelay(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		o.CopyErrorsLoseDevice = true
		r, m := newRefusingRig(t, o, small())
		r.relay(device.HBM(1), 3, 64)
		const n = 1280
		busy, other := r.filled(64, 9), r.alloc(device.HBM(1), 64)
		src, dst, got := r.filled(n, 1), r.alloc(device.HBM(0), n), r.alloc(device.HBM(0), n)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }})
		tb := r.submit(r.down(other, busy, transfer.Demand)) // in flight on the relay's link
		left := 1
		m.set(func(s, op string) bool {
			if s == "copy host to gpu1" && op == "copy" && left > 0 {
				left--
				return true
			}
			return false
		})
		consumer := r.stream(device.HBM(0), "consumer")
		q := r.down(dst, src, transfer.Prefetch)
		q.DoneInOrder = true
		if err := consumer.WaitFence(q.Done.Fence, q.Done.Value); err != nil {
			t.Fatal(err)
		}
		if err := consumer.Copy(got.Range(0, n), dst.Range(0, n)); err != nil {
			t.Fatal(err)
		}
		ticket := r.submit(q)
		if left > 0 {
			t.Fatal("nothing was refused")
		}
		// Time in which Done could be signaled too early, which the consumer's copy would show.
		if o.Virtual {
			for range 300 {
				_ = r.m.Yield(t.Context(), 0)
			}
		} else {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			_ = q.Done.Wait(ctx)
			cancel()
		}
		if done, err := q.Done.Ended(); err != nil {
			t.Errorf("Done has ended, %t, with %v", done, err)
		}
		stall.Release()
		r.wait(ticket)
		r.wait(tb)
		r.consumed(consumer, got, dst, src)
		m.set(nil)
	})
}

// TestDoneBehindLostRelay: the GPU of the relay is lost.
func TestDoneBehindLostRelay(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for n := int64(128); n < 1400; n += 16 {
			o.CopyErrorsLoseDevice = true
			to := small()
			to.Multipath.ThresholdIn = 100
			r := newRig(t, o, to)
			r.relay(device.HBM(1), 3, 64)
			warm, wdst := r.filled(1000, 3), r.alloc(device.HBM(0), 1000)
			r.wait(r.submit(r.down(wdst, warm, transfer.Demand)))
			src, dst, got := r.filled(n, 1), r.alloc(device.HBM(0), n), r.alloc(device.HBM(0), n)
			consumer := r.stream(device.HBM(0), "consumer")
			q := r.down(dst, src, transfer.Prefetch)
			q.DoneInOrder = true
			if err := consumer.WaitFence(q.Done.Fence, q.Done.Value); err != nil {
				t.Fatal(err)
			}
			if err := consumer.Copy(got.Range(0, n), dst.Range(0, n)); err != nil {
				t.Fatal(err)
			}
			if err := r.m.Lose(1); err != nil {
				t.Fatal(err)
			}
			ticket := r.submit(q)
			if err := ticket.Wait(t.Context()); err != nil {
				t.Errorf("%d: %v", n, err)
			}
			if err := consumer.Synchronize(t.Context()); err != nil {
				t.Error(n, err)
			}
			if string(r.content(got)) != string(r.content(src)) {
				t.Errorf("%d bytes: the consumer read before all had landed", n)
			}
		}
	})
}

// TestDoneOfOthers: a stream that, as on CUDA, is in error after a refusal and drops what follows: the request
// behind the refused one, which is launched in the same turn, is made again.
func TestDoneOfOthers(t *testing.T) {
	for _, inOrder := range []bool{false, true} {
		o := emulated.Options{Virtual: true, CopyErrorsLoseDevice: true}
		to := transfer.Options{ChunkBytes: 100, Depth: 4}
		r := newRig(t, o, to)
		m := &poisonous{Machine: r.m, like: true, rng: rand.New(rand.NewPCG(1, 1))}
		to.Machine = m
		e, err := transfer.New(to)
		if err != nil {
			t.Fatal(err)
		}
		r.engine = e
		t.Cleanup(func() { _ = e.Close() })
		src, a, b := r.filled(100, 1), r.alloc(device.HBM(0), 100), r.alloc(device.HBM(0), 100)
		gate := r.point()
		qa, qb := r.down(a, src, transfer.Demand), r.down(b, src, transfer.Demand)
		qa.After, qb.After = []device.Point{gate}, []device.Point{gate}
		qa.DoneInOrder, qb.DoneInOrder = inOrder, inOrder
		ta, tb := r.submit(qa), r.submit(qb)
		m.once = true
		if err := gate.Fence.Signal(gate.Value); err != nil {
			t.Fatal(err)
		}
		ea, eb := ta.Wait(t.Context()), tb.Wait(t.Context())
		t.Logf("in order %v: refused: %v; behind it: %v, Done: %v", inOrder, ea, eb, qb.Done.Wait(t.Context()))
		if ea == nil || eb != nil {
			t.Errorf("in order %v: refused: %v; behind it: %v", inOrder, ea, eb)
		}
	}
}
