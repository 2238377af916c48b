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

// The host polls without a pause for spinFor, longer than most copies of a few MiB and than a
// chunk of a large one take, then with short sleeps of the thread (Go's own timers may be late
// by a millisecond while a program is idle) until napFor, then with timers. Each sleep is 1/napShare of
// the wait so far, between shortNap and longNap (watchNap where chunks of copies follow what is waited
// for), which bounds the delay. Every probeEvery it checks whether the devices are alive.
// A host stream whose watches are not due does none of this: see outlook.
const (
	spinFor    = 200 * time.Microsecond
	napFor     = 2 * time.Second
	shortNap   = 20 * time.Microsecond
	longNap    = 200 * time.Microsecond
	napShare   = 400
	spinShare  = 100
	pause      = time.Millisecond
	probeEvery = 10 * time.Millisecond
)

// minSpinProcs is the number of processors of the program from which on the goroutine of a host
// stream polls without yielding: it is locked to its thread, so that runtime.Gosched has the
// system switch threads twice, which takes 10 us and more.
const minSpinProcs = 4

// waiting runs a host wait, unless Close has begun to abort waits.
func (m *Machine) waiting(what string, wait func() error) error {
	m.waits.RLock()
	defer m.waits.RUnlock()
	if m.aborting.Load() {
		return closedError("wait", device.Host, what+": the machine")
	}
	return wait()
}

// poll calls done until it returns true or an error, ctx is done, or Close aborts waits;
// what describes the wait in errors, most is the longest sleep between two calls: with less than
// longNap there are no timers after napFor. poll must run inside waiting.
func (m *Machine) poll(ctx context.Context, most time.Duration, what func() string, done func() (bool, error)) error {
	begin := time.Now()
	return m.pollFrom(ctx, &begin, most, what, done)
}

// pollFrom is poll for a wait that began at begin. done moves begin where what it looks for has become
// likely again, so that sleeps are short, or there are none, from then on.
func (m *Machine) pollFrom(ctx context.Context, begin *time.Time, most time.Duration, what func() string, done func() (bool, error)) error {
	probed := *begin
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
		switch waited := now.Sub(*begin); {
		case waited < spinFor:
			runtime.Gosched()
		case waited < napFor || most < longNap:
			precise()
			nap(min(most, max(shortNap, waited/napShare)))
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

// dueSoon is where polling begins anew, for pollFrom, in a wait since first that has slept until a chunk of a
// copy is due soon: now, or so long before that it sleeps for shortNap between two looks, if that is at most
// 1/spinShare of the wait so far.
func dueSoon(first, now time.Time) (begin time.Time) {
	if now.Sub(first) >= spinShare*shortNap {
		return now.Add(-spinFor)
	}
	return now
}

// nap puts the thread to sleep for d; precise reduces how late it wakes.
func nap(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // cut short by a signal, it only asks at another time
}

// precise sets the thread's timer slack to 1 ns: by default Linux may wake it 50 us late.
// ---
func precise() {
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // refused, it is late by that
}
