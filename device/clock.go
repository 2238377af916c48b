package device

import (
	"context"
	"sync"
	"time"
)

// Clock is the time of a machine: wall time, or a virtual time that passes only while
// somebody waits for the machine. Its users need not know which.
type Clock interface {
	// Now is the time since the machine was opened.
	Now() time.Duration
	// Loop calls f again and again, the first time after pause, then each time after
	// the pause that f returned; a negative one ends the loop. stop ends it too, and
	// waits for a call under way, so f must not call it. On a wall clock the calls
	// come from a goroutine of their own; on a virtual one they come from Turn,
	// whatever the pauses. A loop is stopped before its machine is closed.
	Loop(pause time.Duration, f func(now time.Duration) time.Duration) (stop func())
	// Turn is for whoever drives the machine, between two rounds of work (steps, say):
	// on a virtual clock it calls every loop's f once, the loop begun first first; on
	// a wall clock it does nothing.
	Turn()
	// Yield lets others go on: it waits for d, or until ctx is done, whose error it
	// returns. A virtual machine does one operation, or lets time pass to the end of
	// one, in place of the wait, unless there is none that could go on.
	Yield(ctx context.Context, d time.Duration) error
}

// WallClock is the Clock of machines whose time is everybody's.
type WallClock struct {
	// Opened is when its time began.
	Opened time.Time
}

var _ Clock = WallClock{}

// Now implements Clock.
func (c WallClock) Now() time.Duration { return time.Since(c.Opened) }

// Loop implements Clock.
func (c WallClock) Loop(pause time.Duration, f func(now time.Duration) time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var loop sync.WaitGroup
	loop.Go(func() {
		for c.Yield(ctx, pause) == nil {
			if pause = f(c.Now()); pause < 0 {
				return
			}
		}
	})
	return func() {
		cancel()
		loop.Wait()
	}
}

// Turn implements Clock.
func (WallClock) Turn() {}

// Yield implements Clock.
func (WallClock) Yield(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx.Err()
}
