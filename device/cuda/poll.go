//go:build cuda

package cuda

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
)

// How the host waits: it asks without a pause for spinFor, then with short sleeps
// of the thread (Go's own timers may be late by a millisecond while a program is
// idle), then with timers. A sleep is a small part of the wait so far, so that nobody is
// late by much more than that. Every probeEvery it asks whether the devices live.
const (
	spinFor    = 50 * time.Microsecond
	napFor     = 2 * time.Second
	shortNap   = 20 * time.Microsecond
	longNap    = 200 * time.Microsecond
	napShare   = 400
	pause      = time.Millisecond
	probeEvery = 10 * time.Millisecond
)

// waiting runs a wait of the host, unless the machine is past waiting.
func (m *Machine) waiting(what string, wait func() error) error {
	m.waits.RLock()
	defer m.waits.RUnlock()
	if m.aborting.Load() {
		return closedError("wait", device.Host, what+": the machine")
	}
	return wait()
}

// poll asks done until it is true or fails, ctx is done, or the machine is closed; what is
// asked where that needs words. It runs inside of waiting.
func (m *Machine) poll(ctx context.Context, what func() string, done func() (bool, error)) error {
	begin := time.Now()
	probed := begin
	var timer *time.Timer
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("cuda: %s: %w", what(), err)
		}
		if m.aborting.Load() {
			return closedError("wait", device.Host, what()+": the machine")
		}
		now := time.Now()
		if now.Sub(probed) > probeEvery {
			probed = now
			for _, g := range m.gpus {
				g.probe()
			}
		}
		switch waited := now.Sub(begin); {
		case waited < spinFor:
			runtime.Gosched()
		case waited < napFor:
			precise()
			nap(min(longNap, max(shortNap, waited/napShare)))
		default:
			if timer == nil {
				timer = time.NewTimer(pause)
				defer timer.Stop()
			} else {
				timer.Reset(pause)
			}
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
		}
	}
}

// nap lets the thread sleep, for about as long as it asks for where it is precise.
func nap(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // cut short by a signal, it only asks at another time
}

// precise has the thread woken on time: Linux lets it sleep 50 us longer than it asked
// for, unless it says otherwise.
func precise() {
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // refused, it is late by that
}
