package device

import (
	"context"
	"sync"
	"time"
)

// Clock is the time of a machine: wall time, or a virtual time that passes only while a caller
// waits for the machine. Its users need not know which.
type Clock interface {
	// Now is the time since the machine was opened.
	Now() time.Duration
	// Loop calls f repeatedly, first after pause, then each time after the pause that f
	// returned; a negative one ends the loop. stop ends it too, and waits for a call in
	// progress, so f must not call it. On a wall clock a separate goroutine makes the calls; on
	// a virtual one Turn does, regardless of the pauses. A loop must be stopped before its
	// machine is closed.
	Loop(pause time.Duration, f func(now time.Duration) time.Duration) (stop func())
	// Turn is called by the driver of the machine between two rounds of work (for example
	// steps): on a virtual clock it calls every loop's f once, in the order in which the loops
	// began; on a wall clock it does nothing.
	Turn()
	// Yield waits for d, or until ctx is done, whose error it returns. A virtual machine
	// instead runs one operation, or lets time pass to the end of one, if any can run.
	Yield(ctx context.Context, d time.Duration) error
}

// WallClock is the Clock of machines on wall time.
type WallClock struct {
	// Opened is when the machine was opened.
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
