//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestHelpers: with helpers that come and go, others that enqueue, gates that open at any time, and the
// world stopped now and then, each work runs, in the order in which it was enqueued, and never two at a
// time; also with one processor.
func TestHelpers(t *testing.T) {
	for _, procs := range []int{1, 4} {
		t.Run(fmt.Sprintf("%d processors", procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			testHelpers(t)
		})
	}
}

func testHelpers(t *testing.T) {
	r := newRig(t, 1)
	end := make(chan struct{})
	defer close(end)
	go func() {
		for {
			select {
			case <-end:
				return
			case <-time.After(2 * time.Millisecond):
				runtime.GC()
			}
		}
	}()
	s := r.host("watches").(*hostStream)
	var running atomic.Int32
	work := func(f func() error) device.Work {
		return device.Work{Run: func(device.Access) error {
			if running.Add(1) != 1 {
				t.Error("two works run at a time")
			}
			err := f()
			running.Add(-1)
			return err
		}}
	}
	const goroutines, rounds = 4, 100
	var wg sync.WaitGroup
	for g := range goroutines {
		gpu, gate, next, done, e := r.stream(0, "gpu"), r.fence("gate"), r.fence("next"), r.fence("done"), r.event()
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			at := 0 // in order
			for i := range uint32(rounds) {
				v := i + 1
				first := work(func() error { // watched work that watches in turn
					reached, err := s.Watch(device.Point{Fence: next, Value: v}, work(func() error { return done.Signal(v) }))
					if reached {
						return done.Signal(v)
					}
					return err
				})
				if err := gpu.WaitFence(gate, v); err != nil {
					t.Error(err)
				}
				if err := gpu.Record(e); err != nil {
					t.Error(err)
				}
				passed, err := s.WatchEvent(e, first)
				if passed || err != nil {
					t.Error(passed, err)
				}
				for k := range rng.IntN(3) {
					if err := s.Execute(work(func() error {
						if at%10 != k {
							t.Errorf("work %d runs before work %d", k, at)
						}
						at++
						return nil
					})); err != nil {
						t.Error(err)
					}
				}
				wait := time.Duration(rng.IntN(400)) * time.Microsecond
				opened := make(chan error, 1)
				go func() {
					time.Sleep(wait)
					err := gate.Signal(v)
					time.Sleep(wait / 2)
					opened <- errors.Join(err, next.Signal(v))
				}()
				p := device.Point{Fence: done, Value: v}
				err = nil
				if rng.IntN(4) == 0 {
					err = p.Wait(r.ctx)
				} else {
					err = s.Await(r.ctx, p)
				}
				if err != nil {
					t.Errorf("round %d: %v", i, err)
					return
				}
				if err := <-opened; err != nil {
					t.Error(err)
				}
				if err := s.Synchronize(r.ctx); err != nil {
					t.Error(err)
				}
				at = 0
			}
		})
	}
	wg.Wait()
	r.ok(s.Close())
}
