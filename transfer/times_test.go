package transfer_test

import (
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// TestTimes: a copy of several chunks has times of its parts: it waits behind another one, for
// the link's latency, is copied, and waits for the host to notice.
func TestTimes(t *testing.T) {
	const ms = time.Millisecond
	r := newRig(t, emulated.Options{
		Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6, Latency: ms}, NoticeLatency: 3 * ms,
	}, transfer.Options{ChunkBytes: 1000, Depth: 1, Timed: true})
	for round := range 3 { // tickets and events are used again
		first := r.down(r.alloc(device.HBM(0), 1000), r.filled(1000, 1), transfer.Prefetch)
		second := r.down(r.alloc(device.HBM(0), 2000), r.filled(2000, 1), transfer.Prefetch)
		began := r.m.Now()
		a, b := r.submit(first), r.submit(second)
		if _, err := a.Times(); err == nil || !strings.Contains(err.Error(), "not landed") {
			t.Errorf("times of a copy that has not landed: %v", err)
		}
		r.wait(a)
		r.wait(b)
		for i, c := range []struct {
			ticket *transfer.Ticket
			want   transfer.Times
		}{
			{a, transfer.Times{Started: 0, Landed: 2 * ms, Done: 5 * ms}},
			{b, transfer.Times{Enqueued: 5 * ms, Started: 5 * ms, Landed: 12 * ms, Done: 15 * ms}},
		} {
			got, err := c.ticket.Times()
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range []*time.Duration{&got.Submitted, &got.Enqueued, &got.Started, &got.Landed, &got.Done} {
				*at = (*at - began).Round(ms / 100)
			}
			if got != c.want {
				t.Errorf("round %d, copy %d: %+v, want %+v", round, i, got, c.want)
			}
			c.ticket.Release()
		}
	}
	untimed := newRig(t, emulated.Options{Virtual: true}, transfer.Options{})
	ticket := untimed.submit(untimed.down(untimed.alloc(device.HBM(0), 10), untimed.filled(10, 1), transfer.Demand))
	untimed.wait(ticket)
	if _, err := ticket.Times(); err == nil {
		t.Error("an engine without Options.Timed has times")
	}
}

// TestTimesOfFailedChunks: a copy whose chunk is made again has times, and all events are closed.
func TestTimesOfFailedChunks(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for nth := range 3 {
			r := newRig(t, o, transfer.Options{ChunkBytes: 100, Timed: true})
			r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Skip: nth})
			ticket := r.submit(r.down(r.alloc(device.HBM(0), 300), r.filled(300, 1), transfer.Demand))
			r.wait(ticket)
			got, err := ticket.Times()
			if err != nil || got.Enqueued < got.Submitted || got.Landed < got.Started || got.Done < got.Landed {
				t.Errorf("%+v, %v", got, err)
			}
		}
	})
}

// TestEventsOfFailedCopies: a copy that has failed gives its events back, whether it is released or not.
func TestEventsOfFailedCopies(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		r := newRig(t, o, transfer.Options{ChunkBytes: 100, Depth: 1, Timed: true})
		src, dst := r.filled(300, 1), r.alloc(device.HBM(0), 300)
		var events int
		for i := range 20 {
			f := r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Skip: 2, Times: -1}) // all but the first chunks
			ticket := r.submit(r.down(dst, src, transfer.Demand))
			_ = ticket.Wait(t.Context())
			f.Release()
			if ticket.Err() == nil || ticket.Landed() == 0 {
				t.Fatalf("copy %d: %v, %d bytes landed", i, ticket.Err(), ticket.Landed())
			}
			if i == 0 {
				events = r.engine.TimedEvents()
			} else if n := r.engine.TimedEvents(); n != events {
				t.Fatalf("%d events after %d copies, %d after the first", n, i+1, events)
			}
		}
	})
}

// TestPerBatch: the pieces of an operation are bounded by its bytes and by their number.
func TestPerBatch(t *testing.T) {
	for bytes, want := range map[int64]int{1 << 30: 1, 1 << 10: 64, 1: 64} {
		if got := transfer.PerBatch(50e9, bytes); got != want {
			t.Errorf("%d bytes: %d, want %d", bytes, got, want)
		}
	}
}
