package emulated

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/device"
)

// event is a handle to its latest recording.
type event struct {
	m      *Machine
	cur    *recording
	closed bool
	// untimed: it has no time.
	untimed bool
	// polled is Machine.calls + 1 at the last Query that found the event pending; see
	// Machine.poll.
	polled uint64
}

// recording is one point in a stream. The event's next recording reuses it if it has passed
// and refs is 0.
type recording struct {
	stream *stream
	passed bool
	err    error
	at     time.Duration
	clock  vclock
	// refs counts the queued Waits, the host's waits and the watches that refer to the
	// recording.
	refs    int
	waiters []*waiter
	blocked []*stream
	watches []*watch
}

var _ device.Event = (*event)(nil)

// NewEvent implements device.Machine.
func (m *Machine) NewEvent() (device.Event, error) { return m.newEvent(false) }

// NewUntimedEvent implements device.Machine.
func (m *Machine) NewUntimedEvent() (device.Event, error) { return m.newEvent(true) }

func (m *Machine) newEvent(untimed bool) (device.Event, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.space("event", device.Host); err != nil {
		return nil, err
	}
	return &event{m: m, untimed: untimed}, nil
}

// event checks that e is open and belongs to this machine.
func (m *Machine) event(op string, s device.Space, e device.Event) (*event, error) {
	ev, ok := e.(*event)
	if !ok || ev.m != m {
		return nil, &device.Error{Op: op, Space: s, Detail: "the event is not of this machine"}
	}
	if ev.closed {
		return nil, &device.Error{Op: op, Space: s, Detail: "event", Err: device.ErrClosed}
	}
	return ev, nil
}

// pass marks the recording as passed, with err, and wakes all that wait for it.
func (m *Machine) pass(r *recording, err error) {
	r.passed, r.err, r.at = true, err, m.clock()
	if m.check != nil {
		r.clock = r.stream.actor.snapshot()
	}
	for _, s := range r.blocked {
		s.wake()
	}
	r.blocked = r.blocked[:0]
	for _, w := range r.waiters {
		w.fire(err)
	}
	r.waiters = r.waiters[:0]
	for _, w := range r.watches {
		r.refs--
		w.fire(err, r.clock)
	}
	clear(r.watches)
	r.watches = r.watches[:0]
}

// latest returns the latest recording. The lock is held.
func (e *event) latest(op string) (*recording, error) {
	if _, err := e.m.event(op, device.Host, e); err != nil {
		return nil, err
	}
	if e.cur == nil {
		return nil, &device.Error{Op: op, Space: device.Host, Detail: "event", Err: device.ErrNotRecorded}
	}
	return e.cur, nil
}

// Synchronize implements device.Event.
func (e *event) Synchronize(ctx context.Context) error {
	m := e.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	r, err := e.latest("synchronize")
	if err != nil {
		return err
	}
	r.refs++
	defer func() { r.refs-- }()
	if !r.passed {
		w := &waiter{ready: make(chan struct{}, 1), rec: r}
		r.waiters = append(r.waiters, w)
		if err := m.wait(ctx, w); err != nil {
			r.waiters = without(r.waiters, w)
			if !r.passed {
				return err
			}
		}
	}
	return m.learn(r)
}

// learn returns the error of a recording that has passed, which the host knows of from now
// on, and joins its clock into the caller's.
func (m *Machine) learn(r *recording) error {
	if m.check != nil {
		m.check.caller().join(r.clock)
	}
	if r.err != nil {
		r.stream.detected = r.stream.undefined
	}
	return r.err
}

// Query implements device.Event.
func (e *event) Query() (bool, error) {
	m := e.m
	m.mu.Lock()
	defer m.mu.Unlock()
	r, err := e.latest("query")
	if err != nil {
		return false, err
	}
	if !r.passed {
		m.poll(&e.polled)
	}
	if !r.passed {
		return false, nil
	}
	return true, m.learn(r)
}

// Time implements device.Event.
func (e *event) Time() (time.Duration, error) {
	e.m.mu.Lock()
	defer e.m.mu.Unlock()
	r, err := e.latest("time")
	if err != nil {
		return 0, err
	}
	if e.untimed {
		return 0, &device.Error{Op: "time", Space: device.Host, Detail: "the event is an untimed one"}
	}
	if !r.passed {
		return 0, &device.Error{Op: "time", Space: device.Host, Detail: "the event has not passed yet: ask Query or Synchronize first"}
	}
	if _, gpu := r.stream.sp.id.GPU(); gpu && e.m.o.TimeFailures > 0 && e.m.rng.Float64() < e.m.o.TimeFailures {
		return 0, &device.Error{Op: "time", Space: r.stream.sp.id, Detail: "event; failed by Options.TimeFailures"}
	}
	return r.at, r.err
}

// Close implements device.Event.
func (e *event) Close() error {
	e.m.mu.Lock()
	defer e.m.mu.Unlock()
	if e.closed {
		return &device.Error{Op: "close", Space: device.Host, Detail: "event", Err: device.ErrClosed}
	}
	e.closed = true
	return nil
}
