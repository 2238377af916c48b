package transfer

import (
	"context"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Ticket is a request that was submitted. Its methods may be called from any
// goroutine.
type Ticket struct {
	engine *Engine
	// req is owned by the ticket.
	req   dispatch.Request
	label fmt.Stringer
	done  device.Point
	// end is raised when the request has ended either way. Done cannot say so: its
	// fence may be failed by a later request while this one is still under way.
	end device.Point
	err error
	// traced is nil where nothing is; priority is that of the request.
	traced   *trace.Copy
	priority Priority
}

// Promote raises the request's priority, if p is higher than it is: a prefetch is
// needed now. Among the requests of p it stands where its submission puts it.
func (t *Ticket) Promote(p Priority) {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.core.Promote(&t.req, uint8(min(p, Priorities-1)))
}

// Cancel fails the request with an error that wraps ErrCanceled, if nothing of it
// was given to the device yet, and reports whether it did.
func (t *Ticket) Cancel() bool {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	done := e.core.Cancel(&t.req, ErrCanceled)
	e.act()
	return done
}

// Skip ends the request as if it had landed, if all its After points are reached and
// nothing of it was given to the device yet, and reports whether it did. It is for bytes
// that nobody wants any more: Done is raised, so whoever waits for it goes on, and finds
// in Dst what was there before.
func (t *Ticket) Skip() bool {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	done := e.core.Skip(&t.req)
	e.act()
	return done
}

// Release gives the ticket of a copy that has landed up, so that a later request uses its
// memory again: nobody may use the ticket after that. Of a copy that is under way, or has
// failed, it does nothing. Tickets need not be released.
func (t *Ticket) Release() {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if t.req.Ended() && t.err == nil {
		e.recycle(t)
	}
}

// End is reached, and never fails, when the request has ended and nothing of it is under
// way: from then on Src and Dst may be used otherwise. Done may be reached before, where a
// later request fails the fence that it shares. It is a point of the engine's own, valid
// until the engine is closed.
func (t *Ticket) End() device.Point { return t.end }

// Ended reports whether Done was raised or failed.
func (t *Ticket) Ended() bool {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.req.Ended()
}

// Err is why the copy failed: nil while it is under way and after it has landed.
// It wraps device.ErrCopyFailed, device.ErrLost, device.ErrClosed, ErrAfter or
// ErrCanceled.
func (t *Ticket) Err() error {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.err
}

// Wait waits on the host until the request has ended and nothing of it is under
// way, or ctx is done, and returns Err.
func (t *Ticket) Wait(ctx context.Context) error {
	if err := t.end.Await(ctx); err != nil && !t.Ended() {
		return fmt.Errorf("transfer: wait for %s: %w", t.name(), err)
	}
	return t.Err()
}

func (t *Ticket) pair() device.Pair { return device.Pair{From: t.req.From, To: t.req.To} }

// note is what a trace prints of a chunk of the request.
func (t *Ticket) note(last bool) *trace.Note {
	n := &trace.Note{Layer: trace.NoLayer, Priority: t.priority.String()}
	if now := Priority(t.req.Class); now != t.priority {
		n.StartedAs = now.String()
	}
	t.traced.Note(n, last)
	if d, ok := t.label.(trace.Describer); ok {
		d.Describe(n)
		return n
	}
	if t.label != nil {
		n.Detail = t.label.String()
	}
	switch t.priority {
	case Rebalance:
		n.Name = "migrate"
	case Prefetch:
		n.Name = "prefetch"
	}
	return n
}

func (t *Ticket) name() string { return name(t.label, t.req.Bytes(), t.pair()) }
