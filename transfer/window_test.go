package transfer_test

import (
	"math"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// TestWindow: where the host learns late of the end of a chunk, a link does not idle, whatever
// the size of the copies; with a shorter window it does.
func TestWindow(t *testing.T) {
	const rate, total = 400e9, 512 << 20
	load := func(size int64, window time.Duration) float64 {
		r := newRig(t, emulated.Options{
			Virtual: true, NoData: true, PeerLink: emulated.Link{BytesPerSecond: rate}, NoticeLatency: 70 * time.Microsecond,
		}, transfer.Options{Window: window})
		src, dst := r.alloc(device.HBM(1), total), r.alloc(device.HBM(0), total)
		s := r.stream(device.HBM(1), "content")
		if err := s.Execute(device.Work{Name: "write", Writes: []device.Range{src.Range(0, total)}}); err != nil {
			t.Fatal(err)
		}
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		began := r.m.Now()
		var tickets []*transfer.Ticket
		for at := int64(0); at < total; at += size {
			tickets = append(tickets, r.submit(transfer.Request{Src: src.Region(at, size), Dst: dst.Region(at, size), Priority: transfer.KVLoad, Done: r.point()}))
		}
		for _, ticket := range tickets {
			r.wait(ticket)
		}
		return total / rate / (r.m.Now() - began).Seconds()
	}
	for _, size := range []int64{2 << 20, 4 << 20, 8 << 20, 32 << 20, 64 << 20, total} {
		if fraction := load(size, 0); fraction < 0.93 { // the host learns once of the end of the last
			t.Errorf("copies of %d MiB have %.1f %% of the link's rate", size>>20, 100*fraction)
		}
	}
	if fraction := load(4<<20, time.Microsecond); fraction > 0.5 {
		t.Errorf("copies of 4 MiB with too short a window have %.1f %% of the link's rate", 100*fraction)
	}
}

// TestWindowBound: however large the copies in flight are, a demanded copy waits for no more
// than two full chunks.
func TestWindowBound(t *testing.T) {
	const rate = 10e9
	for _, sizes := range [][]int64{{64 << 10}, {1 << 20}, {3 << 20}, {8 << 20}, {100 << 20}, {8 << 20, 700 << 10, 8 << 20}} {
		r := newRig(t, emulated.Options{Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: rate}}, transfer.Options{})
		const total = 200 << 20
		src, dst := r.alloc(device.Host, total), r.alloc(device.HBM(0), total)
		src.Write(0, total)
		var kv []*transfer.Ticket
		for at, i := int64(0), 0; at+sizes[i%len(sizes)] < total; i++ {
			size := sizes[i%len(sizes)]
			kv = append(kv, r.submit(transfer.Request{Src: src.Region(at, size), Dst: dst.Region(at, size), Priority: transfer.Prefetch, Done: r.point()}))
			at += size
		}
		began := r.m.Now()
		r.wait(r.submit(transfer.Request{Src: src.Region(total-256, 256), Dst: dst.Region(total-256, 256), Priority: transfer.Demand, Done: r.point()}))
		took := r.m.Now() - began
		bound := time.Duration(math.Ceil(2 * (8 << 20) / rate * 1e9))
		if took > bound+time.Microsecond {
			t.Errorf("behind copies of %v bytes, a demanded one takes %v, want at most %v", sizes, took, bound)
		}
		for _, ticket := range kv {
			r.wait(ticket)
		}
	}
}
