package transfer

import (
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestExhaustedDoneFence: the end of a copy stays reached, however many copies come after it.
func TestExhaustedDoneFence(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := emulated.New(emulated.Options{Virtual: true})
	ok(err)
	e, err := New(Options{Machine: m})
	ok(err)
	src, err := m.Alloc(device.Host, 256, "source")
	ok(err)
	dst, err := m.Alloc(device.HBM(0), 256, "destination")
	ok(err)
	done, err := m.NewFence("done")
	ok(err)
	end := func(n uint32) device.Point {
		ticket, err := e.Submit(Request{Src: src.Region(0, 256), Dst: dst.Region(0, 256), Done: device.Point{Fence: done, Value: n}})
		ok(err)
		ok(ticket.Wait(t.Context()))
		p := ticket.End()
		ticket.Release()
		return p
	}
	first := end(1)
	// As if so many copies had come between.
	e.doneFences[0].Value = maxTickets - 1
	ok(first.Fence.Signal(maxTickets - 1))
	if p := end(2); p.Fence != first.Fence || p.Value != maxTickets {
		t.Errorf("the copy before the last of its fence ends at %v", p)
	}
	if end(3).Fence == first.Fence || !first.Reached() {
		t.Error("an exhausted fence is used again")
	}
	ok(e.Close())
	for _, f := range []func() error{src.Free, dst.Free, done.Close, m.Close} {
		ok(f())
	}
}
