package transfer_test

import (
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// TestActivity: from the first call on, chunks are recorded, with the priority that they had in the
// end, and add up to the time that the link was busy; those that follow each other are one. What
// the link copies and what waits for it counts as queued, what waits for a point does not. Recording stops when nobody asks.
func TestActivity(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}}, transfer.Options{Depth: 1, ChunkBytes: 1000})
	src, dst := r.filled(5000, 1), r.alloc(device.HBM(0), 5000)
	copyOf := func(bytes int64, p transfer.Priority) transfer.Request {
		return transfer.Request{Src: src.Region(0, bytes), Dst: dst.Region(0, bytes), Priority: p, Done: r.point()}
	}
	r.wait(r.submit(copyOf(1000, transfer.Demand))) // before anybody asks
	if all, complete := r.engine.Activity(nil); len(all) != 0 || complete {
		t.Errorf("before the first call: %v, complete: %t", all, complete)
	}
	before := r.engine.Stats()[0]

	first := r.submit(copyOf(3000, transfer.Rebalance)) // one chunk of 3 is launched
	second := r.submit(copyOf(1000, transfer.Prefetch))
	q := copyOf(500, transfer.Demand)
	point := r.point()
	q.After = []device.Point{point}
	third := r.submit(q)
	if s := r.engine.Stats()[0]; s.Queued != 2 || s.QueuedBytes != 4000 {
		t.Errorf("%d copies and %d bytes are queued", s.Queued, s.QueuedBytes)
	}
	second.RaisePriority(transfer.Demand)
	r.wait(first) // the other one went before its last chunks
	if s := r.engine.Stats()[0]; s.Queued != 0 || s.QueuedBytes != 0 {
		t.Errorf("%d copies and %d bytes are queued, and one waits for a point", s.Queued, s.QueuedBytes)
	}
	r.wait(second)
	if err := point.Fence.Signal(point.Value); err != nil {
		t.Fatal(err)
	}
	r.wait(third)
	s := r.engine.Stats()[0]
	if s.Queued != 0 || s.QueuedBytes != 0 {
		t.Errorf("%d copies and %d bytes are queued at the end", s.Queued, s.QueuedBytes)
	}
	all, complete := r.engine.Activity([]transfer.Activity{{}})
	var busy time.Duration
	var order []transfer.Priority
	if all = all[1:]; !complete {
		t.Fatalf("%v are not complete", all)
	}
	for i, a := range all {
		if a.From != device.Host || a.To != device.HBM(0) || a.End <= a.Begin || i > 0 && a.Begin < all[i-1].End {
			t.Errorf("chunk %d: %+v after %+v", i, a, all[max(0, i-1)])
		}
		busy += a.End - a.Begin
		order = append(order, a.Priority)
	}
	if busy != s.Busy-before.Busy {
		t.Errorf("chunks take %v, and the link was busy for %v", busy, s.Busy-before.Busy)
	}
	if want := []transfer.Priority{transfer.Rebalance, transfer.Demand, transfer.Rebalance, transfer.Demand}; !slices.Equal(order, want) {
		t.Errorf("priorities are %v, want %v", order, want)
	}

	long := r.filled(4096*1000+10, 2) // many chunks without a pause
	to := r.alloc(device.HBM(0), 4096*1000+10)
	r.wait(r.submit(transfer.Request{Src: long.Region(0, long.Bytes()), Dst: to.Region(0, to.Bytes()), Priority: transfer.Prefetch, Done: r.point()}))
	if all, complete := r.engine.Activity(nil); len(all) != 1 || !complete || all[0].End-all[0].Begin < 4096*time.Millisecond {
		t.Errorf("a long copy: %v, complete: %t", all, complete)
	}

	for i := range 4096 + 1 {
		r.wait(r.submit(copyOf(10, transfer.Priority(i%2))))
	}
	if all, complete := r.engine.Activity(nil); len(all) != 4096 || complete {
		t.Errorf("nobody asked: %d chunks, complete: %t", len(all), complete)
	}
	r.wait(r.submit(copyOf(10, transfer.Demand)))
	if all, complete := r.engine.Activity(nil); len(all) != 1 || !complete {
		t.Errorf("when somebody asks again: %v, complete: %t", all, complete)
	}
}
