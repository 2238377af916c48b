//go:build cuda

package cuda

import (
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestHelp: while a host stream sleeps, who waits by Await runs what the stream watches for, and the
// stream itself runs what nobody waits for.
func TestHelp(t *testing.T) {
	r := newRig(t, 1)
	s, gpu := r.host("watches").(*hostStream), r.stream(0, "gpu")
	gate, done, e := r.fence("gate"), r.fence("done"), r.event()
	value, helped, alone := uint32(0), 0, 0
	round := func(wait func(device.Point) error) {
		value++
		at := device.Point{Fence: done, Value: value}
		r.ok(gpu.WaitFence(gate, value))
		r.ok(gpu.Record(e))
		by := make(chan bool, 1)
		passed, err := s.WatchEvent(e, device.Work{Run: func(device.Access) error {
			by <- strings.Contains(string(debug.Stack()), ").help(")
			return done.Signal(at.Value)
		}})
		r.ok(err)
		if passed {
			t.Fatal("the event has passed before the fence was signaled")
		}
		time.Sleep(2 * spinFor) // it sleeps most of the time
		r.ok(gate.Signal(value))
		r.ok(wait(at))
		if <-by {
			helped++
		} else {
			alone++
		}
	}
	for range 20 {
		round(func(at device.Point) error { return at.Wait(r.ctx) })
	}
	if helped > 0 {
		t.Errorf("%d of 20 works ran on other goroutines than their stream's", helped)
	}
	for n := 0; helped == 0; n++ {
		if n == 200 {
			t.Fatal("no work ran on the goroutine that waits")
		}
		round(func(at device.Point) error { return s.Await(r.ctx, at) })
	}
	r.ok(s.Close())
}
