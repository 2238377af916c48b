package transfer

import (
	"errors"
	"fmt"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Times are when the parts of a copy were, on the machine's clock. Between two of them it
// waits in the queue, for the device to begin, is copied, waits for the host to notice.
type Times struct {
	// Submitted: Submit was called. Enqueued: the host began to enqueue the first chunk.
	Submitted, Enqueued time.Duration
	// Started and Landed: the device came to the first chunk, and had copied the last.
	Started, Landed time.Duration
	// Done: the host signaled Done.
	Done time.Duration
}

// timing is what a ticket has of its times, where Options.Timed is set.
type timing struct {
	times Times
	// started and landed are the events around its chunks, which belong to the ticket until it
	// is released, or has failed.
	started, landed device.Event
}

// Times returns when the parts of a copy that has landed were. It is an error without
// Options.Timed, of a copy that has not landed or was skipped, or if a device cannot tell.
func (t *Ticket) Times() (Times, error) {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	switch {
	case !t.req.Ended() || t.err != nil:
		return Times{}, fmt.Errorf("transfer: times of %s: it has not landed", t.name())
	case t.timing.landed == nil || t.timing.started == nil:
		return Times{}, errors.New("transfer: Options.Timed is not set, or the copy was skipped")
	}
	times := t.timing.times
	for at, e := range map[*time.Duration]device.Event{&times.Started: t.timing.started, &times.Landed: t.timing.landed} {
		if _, err := e.Query(); err != nil {
			return Times{}, err
		}
		var err error
		if *at, err = e.Time(); err != nil {
			return Times{}, fmt.Errorf("transfer: times of %s: %w", t.name(), err)
		}
	}
	return times, nil
}

// Timed reports whether copies have Times.
func (e *Engine) Timed() bool { return e.o.Timed }

// timedEvent returns a timed event, from the freelist if possible.
func (e *Engine) timedEvent() (device.Event, error) {
	if n := len(e.freeEvents); n > 0 {
		ev := e.freeEvents[n-1]
		e.freeEvents = e.freeEvents[:n-1]
		return ev, nil
	}
	ev, err := e.o.Machine.NewEvent()
	if err == nil {
		e.events = append(e.events, ev)
	}
	return ev, err
}

// putEvents puts the ticket's events on the freelist.
func (e *Engine) putEvents(t *Ticket) {
	for _, ev := range []*device.Event{&t.timing.started, &t.timing.landed} {
		if *ev != nil {
			e.freeEvents = append(e.freeEvents, *ev)
			*ev = nil
		}
	}
}

// keepTimes gives the ticket of a chunk that has landed the events around it: that before its
// first, and that behind the one that has landed last. The slot gets others.
func (l *link) keepTimes(s *slot) {
	t := s.chunk.Request.Owner.(*Ticket)
	keep := func(to, from *device.Event) {
		if *to != nil {
			*to, *from = *from, *to
			return
		}
		if other, err := l.engine.timedEvent(); err == nil { // otherwise the copy has no times
			*to, *from = *from, other
		}
	}
	if s.begins() {
		keep(&t.timing.started, &s.start)
	}
	if s.ends() {
		keep(&t.timing.landed, &s.event)
	}
}
