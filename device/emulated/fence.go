package emulated

import (
	"context"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// fence is a counter. Machine.mu guards it.
type fence struct {
	m      *Machine
	label  string
	value  uint32
	closed bool
	// failed reports that a wait for failedAt or a lower value returns err.
	failed   bool
	failedAt uint32
	err      error
	waiters  []*waiter
	blocked  []blocked
	watches  []*watch
	polled   uint64
	// raised holds, on a checked machine, the clocks of the latest signals, so that a wait
	// learns no more than the signal that it waited for.
	raised []raised
}

type blocked struct {
	s     *stream
	value uint32
}

type raised struct {
	value uint32
	clock vclock
}

// maxRaised is the number of signals that a fence remembers; older ones count as the oldest
// of these.
const maxRaised = 64

var _ device.Fence = (*fence)(nil)

// NewFence implements device.Machine.
func (m *Machine) NewFence(label string) (device.Fence, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.space("fence", device.Host); err != nil {
		return nil, err
	}
	return &fence{m: m, label: label, value: m.o.FenceStart}, nil
}

func (f *fence) String() string { return fmt.Sprintf("fence %q", f.label) }

// before reports whether a comes before b, modulo 2^32.
func before(a, b uint32) bool { return int32(a-b) < 0 }

func (f *fence) reached(value uint32) bool { return !before(f.value, value) }

// failure returns the error of a wait for value, or nil.
func (f *fence) failure(value uint32) error {
	if f.failed && !before(f.failedAt, value) {
		return f.err
	}
	return nil
}

// set sets the counter to value, with clock as what is known then, and wakes the waiters
// whose value is reached.
func (f *fence) set(value uint32, clock vclock) {
	rose := before(f.value, value)
	if rose {
		f.value = value
	}
	if f.failed && before(f.value, f.failedAt) {
		// The counter has passed half its range: no waiter can still be affected by the
		// failure.
		f.failed, f.err = false, nil
	}
	if f.m.check != nil && rose {
		if n := len(f.raised); n > 0 {
			clock = joined(f.raised[n-1].clock, clock)
		}
		f.raised = append(f.raised, raised{value, clock})
		if len(f.raised) > maxRaised {
			f.raised = slices.Delete(f.raised, 0, len(f.raised)-maxRaised)
		}
	}
	f.blocked = slices.DeleteFunc(f.blocked, func(b blocked) bool {
		if !f.reached(b.value) {
			return false
		}
		b.s.wake()
		return true
	})
	f.waiters = slices.DeleteFunc(f.waiters, func(w *waiter) bool {
		if !f.reached(w.value) {
			return false
		}
		w.fire(f.failure(w.value))
		return true
	})
	f.watches = slices.DeleteFunc(f.watches, func(w *watch) bool {
		if !f.reached(w.value) {
			return false
		}
		w.fire(f.failure(w.value), f.clockAt(w.value))
		return true
	})
}

// fail signals value with an error.
func (f *fence) fail(value uint32, err error, clock vclock) {
	if !f.failed || before(f.failedAt, value) {
		f.failed, f.failedAt, f.err = true, value, err
	}
	f.set(value, clock)
}

// clockAt returns the clock known when the counter reached value.
func (f *fence) clockAt(value uint32) vclock {
	for _, r := range f.raised {
		if !before(r.value, value) {
			return r.clock
		}
	}
	return nil
}

// raiseFrom signals the fence from a stream; failed is the stream's error.
func (m *Machine) raiseFrom(s *stream, o *op, failed error) error {
	f := o.fence
	var clock vclock
	if m.check != nil {
		clock = s.actor.snapshot()
	}
	if failed != nil {
		f.fail(o.value, failed, clock)
		return failed
	}
	if !before(f.value, o.value) && f.failure(o.value) == nil {
		// Waits for this value have already succeeded, so the error misleads no waiter.
		return &device.Error{
			Op: "signal", Space: s.sp.id,
			Detail: fmt.Sprintf("%s: %s to %d, and it is at %d: values must increase", s, f, o.value, f.value),
		}
	}
	f.set(o.value, clock)
	return nil
}

// host checks that the fence is open and returns the caller's clock.
func (f *fence) host(op string) (vclock, error) {
	if f.closed || f.m.closed {
		return nil, &device.Error{Op: op, Space: device.Host, Detail: f.String(), Err: device.ErrClosed}
	}
	f.m.called()
	if f.m.check != nil {
		return f.m.check.caller().snapshot(), nil
	}
	return nil, nil
}

// Signal implements device.Fence. Values must increase, except that a value set by Fail may
// be signaled.
func (f *fence) Signal(value uint32) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	clock, err := f.host("signal")
	if err != nil {
		return err
	}
	if !before(f.value, value) && f.failure(value) == nil {
		return &device.Error{
			Op: "signal", Space: device.Host,
			Detail: fmt.Sprintf("%s to %d, and it is at %d: values must increase", f, value, f.value),
		}
	}
	f.set(value, clock)
	return nil
}

// Fail implements device.Fence. A counter that has reached value stays unchanged.
func (f *fence) Fail(value uint32, cause error) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	clock, err := f.host("fail")
	if err != nil {
		return err
	}
	if cause == nil {
		return &device.Error{Op: "fail", Space: device.Host, Detail: f.String() + ": without an error; use Signal"}
	}
	f.fail(value, cause, clock)
	return nil
}

// Wait implements device.Fence.
func (f *fence) Wait(ctx context.Context, value uint32) error {
	m := f.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := f.host("wait"); err != nil {
		return err
	}
	if !f.reached(value) {
		w := &waiter{ready: make(chan struct{}, 1), fence: f, value: value}
		f.waiters = append(f.waiters, w)
		if err := m.wait(ctx, w); err != nil {
			f.waiters = without(f.waiters, w)
			return err
		}
	}
	if m.check != nil {
		m.check.caller().join(f.clockAt(value))
	}
	return f.failure(value)
}

// Value implements device.Fence.
func (f *fence) Value() uint32 {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if !f.closed && !f.m.closed {
		f.m.poll(&f.polled)
	}
	return f.value
}

// Close implements device.Fence.
func (f *fence) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return &device.Error{Op: "close", Space: device.Host, Detail: f.String(), Err: device.ErrClosed}
	}
	f.closed = true
	for _, w := range f.watches {
		w.fire(&device.Error{Op: "watch", Space: device.Host, Detail: f.String(), Err: device.ErrClosed}, nil)
	}
	f.watches = nil
	return nil
}
