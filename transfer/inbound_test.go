package transfer_test

import (
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// TestInbound: copies correct what the topology says of links, and only that; copies are
// split by what is known.
func TestInbound(t *testing.T) {
	const bytes = 128 << 20
	r := newRig(t, emulated.Options{
		Virtual: true, NoData: true, PeerLink: emulated.Link{},
		HostLink: emulated.Link{BytesPerSecond: 50e9, Latency: 100 * time.Microsecond}, Report: func(emulated.Finding) {},
	}, transfer.Options{ChunkBytes: 8 << 20, Depth: 1})
	in := r.engine.Inbound(device.HBM(0))
	if from := in.From(); len(from) != 3 || from[0] != device.Host || slices.Contains(from, device.HBM(0)) {
		t.Fatalf("links from %v", from)
	}
	src, peer, dst := r.alloc(device.Host, bytes), r.alloc(device.HBM(1), bytes), r.alloc(device.HBM(0), bytes)
	if got := in.Update(); got != 0 || in.Rate(device.Host) != 50e9 || in.Rate(device.HBM(1)) != 0 || in.Rate(device.HBM(7)) != 0 {
		t.Errorf("before the first copy: busy for %v, %v from the host and %v from a peer", got, in.Rate(device.Host), in.Rate(device.HBM(1)))
	}
	small := r.down(r.alloc(device.HBM(0), 4<<20), r.alloc(device.Host, 4<<20), transfer.Demand)
	r.wait(r.submit(small))
	in.Update()
	if got := in.Rate(device.Host); got != 50e9 {
		t.Errorf("after a small copy: %v", got)
	}
	var rates []float64
	for range 3 {
		began := r.m.Now()
		r.wait(r.submit(r.down(dst, src, transfer.Demand)))
		r.wait(r.submit(r.down(dst, peer, transfer.Demand)))
		if got, want := in.Update(), r.m.Now()-began; (got - want).Abs() > time.Microsecond {
			t.Errorf("the busiest link was so for %v, want %v", got, want)
		}
		rates = append(rates, in.Rate(device.Host))
	}
	// 168 us of bytes and 100 of latency for each chunk: 31 GB/s, by half each time.
	if rates[0] > 41e9 || rates[2] > 34e9 || rates[2] < 31e9 || !slices.IsSortedFunc(rates, func(a, b float64) int { return int(b - a) }) {
		t.Errorf("rates with a latency of 100 us per 8 MiB: %.3g", rates)
	}
	if got := in.Rate(device.HBM(1)); got != 0 {
		t.Errorf("a link that the topology does not limit: %v", got)
	}
}

// TestInboundSplit: the parts of copies from peers that come from the host.
func TestInboundSplit(t *testing.T) {
	r := newRig(t, emulated.Options{
		Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e9}, PeerLink: emulated.Link{BytesPerSecond: 3e9},
	}, transfer.Options{})
	in := r.engine.Inbound(device.HBM(0))
	one, two := device.HBM(1), device.HBM(2)
	for _, c := range []struct {
		copies []transfer.Load
		least  int64
		want   []int64
	}{
		{nil, 1, nil},
		{[]transfer.Load{{one, 4096}}, 1, []int64{1024}},
		{[]transfer.Load{{one, 4096}}, 1024, []int64{1024}},
		{[]transfer.Load{{one, 4096}}, 1025, []int64{0}},
		{[]transfer.Load{{one, 4000}}, 1, []int64{768}},                       // whole multiples of 256
		{[]transfer.Load{{device.Host, 2048}, {one, 4096}}, 1, []int64{0, 0}}, // the host is busy enough
		{[]transfer.Load{{one, 8192}, {device.Host, 1024}, {one, 4096}}, 1, []int64{1536, 0, 768}},
		{[]transfer.Load{{one, 7168}, {two, 7168}}, 1, []int64{1024, 1024}},
	} {
		if got := in.Split(c.copies, c.least); !slices.Equal(got, c.want) {
			t.Errorf("%v, at least %d: %v, want %v", c.copies, c.least, got, c.want)
		}
	}
}
