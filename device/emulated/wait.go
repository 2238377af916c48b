package emulated

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// ErrDeadlock is returned by a wait on a virtual machine that can never end: no operation
// can run, and no goroutine has called the machine for Options.DeadlockAfter.
var ErrDeadlock = errors.New("no operation can run")

// waiter is one wait of the host: for a position of a stream, a recording, a value of a
// fence, or (settle) until nothing can run.
type waiter struct {
	ready  chan struct{}
	done   bool
	err    error
	stream *stream
	pos    uint64
	rec    *recording
	fence  *fence
	value  uint32
	settle bool
}

// fire ends the wait.
func (w *waiter) fire(err error) {
	if !w.done {
		w.done, w.err = true, err
		w.ready <- struct{}{}
	}
}

func (w *waiter) String() string {
	switch {
	case w.stream != nil:
		return fmt.Sprintf("the host waits for %s", w.stream)
	case w.rec != nil:
		return fmt.Sprintf("the host waits for an event of %s", w.rec.stream)
	case w.fence != nil:
		return fmt.Sprintf("the host waits for %s to reach %d (now %d)", w.fence, w.value, w.fence.value)
	}
	return "the host closes the machine"
}

func without(ws []*waiter, w *waiter) []*waiter {
	return slices.DeleteFunc(ws, func(x *waiter) bool { return x == w })
}

// wait blocks until w is fired. The lock is held on entry and return, and released while
// blocked. On the wall clock wait sleeps. On a virtual machine the first goroutine that
// waits drives the machine step by step, and goroutines that wait meanwhile sleep until it
// is done; so nothing runs, and no time passes, unless a goroutine waits. Work that waits
// drives the machine from inside its own step.
func (m *Machine) wait(ctx context.Context, w *waiter) error {
	m.waiters = append(m.waiters, w)
	defer func() { m.waiters = without(m.waiters, w) }()
	if !m.o.Virtual {
		m.mu.Unlock()
		select {
		case <-w.ready:
		case <-ctx.Done():
		}
		m.mu.Lock()
		if w.done {
			return w.err
		}
		return fmt.Errorf("emulated: %s: %w", w, ctx.Err())
	}
	self := goroutine()
	// A goroutine that slept meanwhile may have to take over as driver.
	defer m.notify()
	for !w.done {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("emulated: %s: %w", w, err)
		}
		if m.driver != 0 && m.driver != self {
			m.sleep(ctx, w, nil)
			continue
		}
		if m.drive(self) {
			continue
		}
		if w.settle {
			return nil
		}
		calls, timer := m.calls, time.NewTimer(m.o.DeadlockAfter)
		if m.sleep(ctx, w, timer.C) && m.calls == calls && !w.done {
			return m.deadlock()
		}
		timer.Stop()
	}
	return w.err
}

// sleep releases the lock until something changes; it returns true if timer fired.
func (m *Machine) sleep(ctx context.Context, w *waiter, timer <-chan time.Time) bool {
	change := m.change
	m.sleepers++
	m.mu.Unlock()
	late := false
	select {
	case <-w.ready:
	case <-change:
	case <-ctx.Done():
	case <-timer:
		late = true
	}
	m.mu.Lock()
	m.sleepers--
	return late
}

// notify wakes the goroutines asleep in wait.
func (m *Machine) notify() {
	if m.sleepers > 0 {
		close(m.change)
		m.change = make(chan struct{})
	}
}

// called counts a call of the host and wakes the sleepers.
func (m *Machine) called() {
	m.calls++
	m.notify()
}

// drive executes one step as goroutine self; it returns false if nothing can run.
func (m *Machine) drive(self uintptr) bool {
	outer := m.driver
	m.driver = self
	defer func() { m.driver = outer }()
	if m.o.Idle != nil {
		calls := m.calls
		m.mu.Unlock()
		m.o.Idle()
		m.mu.Lock()
		if m.calls != calls {
			// Other goroutines called the machine: the wait may be over, or new operations
			// can run.
			return true
		}
	}
	return m.step()
}

// poll advances a virtual machine by one step if the same poll is repeated with no other
// call in between, so that polling loops end.
func (m *Machine) poll(polled *uint64) {
	if !m.o.Virtual {
		return
	}
	if *polled == m.calls+1 {
		if self := goroutine(); m.driver == 0 || m.driver == self {
			m.drive(self)
		}
	}
	*polled = m.calls + 1
}

// step runs one stream at this instant, or advances the clock to the next one. It returns
// false if neither is possible.
func (m *Machine) step() bool {
	m.candidates = m.candidates[:0]
	for _, s := range m.streams {
		if s.due || m.runnable(s) {
			m.candidates = append(m.candidates, s)
		}
	}
	s := m.choose(m.candidates)
	if s == nil {
		t, ok := m.fluid.next()
		if ok {
			m.now = max(m.now, t)
			m.fluid.advance(m.now, ended)
		}
		return ok
	}
	var err error
	if !s.due {
		if !m.begin(s) {
			return true
		}
		var over bool
		if over, err = m.admit(s); over {
			m.complete(s, err)
			return true
		}
		if err == nil {
			if fl := m.flow(s, s.cur); fl != nil {
				m.fluid.advance(m.now, ended)
				m.fluid.add(fl)
				return true
			}
		}
	} else {
		s.due = false
		if s.cur.kind == opCopy {
			err = m.copyErrorAfter(s, s.cur)
		} else {
			err = s.failed()
		}
	}
	if err == nil {
		err = m.effect(s)
	}
	m.complete(s, err)
	return true
}

// ended marks the flow's operation as due on a virtual machine.
func ended(fl *flow) {
	fl.stream.due = fl.stream.m.o.Virtual
}

// choose returns the stream to run next, or nil to advance the clock.
func (m *Machine) choose(from []*stream) *stream {
	if len(from) == 0 {
		return nil
	}
	switch m.o.Schedule {
	case Random:
		return from[m.rng.IntN(len(from))]
	case Lazy:
		seen := map[*stream]bool{}
		for _, w := range m.waiters {
			if s := m.needed(w, seen); s != nil {
				return s
			}
		}
		for _, s := range from {
			if s.due {
				return s
			}
		}
		if _, ok := m.fluid.next(); ok {
			return nil
		}
		return from[len(from)-1]
	}
	best := from[0]
	for _, s := range from[1:] {
		if s.due && !best.due || s.due == best.due && s.priority > best.priority {
			best = s
		}
	}
	return best
}

// needed returns a stream that can run and that w depends on, directly or through other
// blocked streams; nil if there is none.
func (m *Machine) needed(w *waiter, seen map[*stream]bool) *stream {
	switch {
	case w.done:
		return nil
	case w.stream != nil:
		return m.behind(w.stream, seen)
	case w.rec != nil:
		return m.behind(w.rec.stream, seen)
	case w.fence != nil:
		return m.raiser(w.fence, w.value, seen)
	}
	return nil
}

func (m *Machine) behind(s *stream, seen map[*stream]bool) *stream {
	if seen[s] {
		return nil
	}
	seen[s] = true
	if s.due || m.runnable(s) {
		return s
	}
	if s.busy || s.q.n == 0 || s.held() {
		return nil
	}
	switch o := s.q.head(); o.kind {
	case opWait:
		return m.behind(o.rec.stream, seen)
	case opAwait:
		return m.raiser(o.fence, o.value, seen)
	}
	return nil
}

func (m *Machine) raiser(f *fence, value uint32, seen map[*stream]bool) *stream {
	for _, s := range m.streams {
		for i := range s.q.n {
			if o := s.q.at(i); o.kind == opRaise && o.fence == f && !before(o.value, value) {
				if t := m.behind(s, seen); t != nil {
					return t
				}
				break
			}
		}
	}
	return nil
}

// describe returns a description of what blocks a stream.
func (m *Machine) describe(s *stream) string {
	switch {
	case s.busy:
		return fmt.Sprintf("%s runs %s %q", s, opNames[s.cur.kind], s.cur.work.Name)
	case s.q.n == 0:
		return fmt.Sprintf("%s is idle", s)
	case s.held():
		return fmt.Sprintf("%s is stalled by an injected fault", s)
	}
	switch o := s.q.head(); o.kind {
	case opWait:
		return fmt.Sprintf("%s waits for an event of %s", s, o.rec.stream)
	case opAwait:
		return fmt.Sprintf("%s waits for %s to reach %d (now %d)", s, o.fence, o.value, o.fence.value)
	default:
		return fmt.Sprintf("%s could run %s", s, opNames[o.kind])
	}
}

func (m *Machine) deadlock() error {
	var parts []string
	for _, s := range m.streams {
		if s.pending() {
			parts = append(parts, m.describe(s))
		}
		for _, w := range s.watches {
			parts = append(parts, w.String())
		}
	}
	for _, w := range m.waiters {
		parts = append(parts, w.String())
	}
	return &device.Error{Op: "wait", Space: device.Host, Detail: strings.Join(parts, "; "), Err: ErrDeadlock}
}
