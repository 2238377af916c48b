package harvest

import (
	"errors"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestSafeguards: a revocation that waits for the readers is not found fault with by the
// checker, and one whose controller gets their release, while they read, is.
func TestSafeguards(t *testing.T) {
	for _, drain := range []bool{true, false} {
		found := 0
		m, err := emulated.New(emulated.Options{Virtual: true, Check: true, Report: func(emulated.Finding) { found++ }})
		if err != nil {
			t.Fatal(err)
		}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		r, err := New(Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 1024, HeadroomBytes: -1})
		ok(err)
		h, err := r.Alloc(1024, Hints{})
		ok(err)
		stream, err := m.NewStream(device.HBM(1), device.StreamOptions{Name: "client"})
		ok(err)
		host, err := m.Alloc(device.Host, 1024, "content")
		ok(err)
		clear(host.Write(0, 1024))
		slot, err := m.Alloc(device.HBM(0), 1024, "slot")
		ok(err)
		fence, err := m.NewFence("client")
		ok(err)

		ref, held := h.Acquire(nil)
		if !held {
			t.Fatal("no reference")
		}
		ok(stream.Copy(h.Region().Range, host.Range(0, 1024)))
		stall := m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.Stream == "client" && p.To == device.HBM(0) }})
		ok(stream.Copy(slot.Range(0, 1024), h.Region().Range))
		ok(stream.SignalFence(fence, 1))
		ref.ReleaseAt(device.Point{Fence: fence, Value: 1})
		c, err := r.Reclaim(device.HBM(1), 1<<40, time.Minute)
		ok(err)
		if !drain {
			r.execute(m.Now(), func(c *controller) { c.step(m.Now(), []result{drained{h: h}}) })
		}
		for range 20 { // each look lets the machine go on
			fence.Value()
			_, err := r.Tick(m.Now())
			ok(err)
		}
		if c.Done() {
			t.Errorf("drained %t: the memory is released while it is read", drain)
		}
		stall.Release()
		ok(stream.Synchronize(t.Context()))
		ok(c.Wait(t.Context()))
		if (found > 0) == drain {
			t.Errorf("drained %t: %d findings", drain, found)
		}
		ok(r.Close(t.Context()))
		ok(errors.Join(stream.Close(), host.Free(), slot.Free(), fence.Close()))
		_ = m.Close() // what was found is counted above
	}
}

// TestReleaseRecordsArePruned: of who reads a handle for long only those are remembered
// who may still be at it.
func TestReleaseRecordsArePruned(t *testing.T) {
	m, err := emulated.New(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r, err := New(Options{Machine: m, Peers: []device.Space{device.HBM(1)}, HeadroomBytes: -1})
	ok(err)
	h, err := r.Alloc(1024, Hints{})
	ok(err)
	by := NewOwner("slow reader")
	var fences []device.Fence
	for i := range 500 {
		f, err := m.NewFence("reader")
		ok(err)
		fences = append(fences, f)
		ref, _ := h.Acquire(by)
		ref.ReleaseAt(device.Point{Fence: f, Value: 1})
		if i != 3 {
			ok(f.Signal(1))
		}
	}
	if len(h.readers.releases) > 32 {
		t.Errorf("%d departures are kept", len(h.readers.releases))
	}
	if hs := h.readers.currentHolds(0); len(hs) != 1 || hs[0].Owner != "slow reader" || !hs[0].PendingWork {
		t.Errorf("holders %+v", hs)
	}
	ok(fences[3].Signal(1))
	ok(r.Close(t.Context()))
	for _, f := range fences {
		ok(f.Close())
	}
	ok(m.Close())
}
