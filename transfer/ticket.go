package transfer

import (
	"context"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Ticket is a submitted request. Its methods may be called from any goroutine.
type Ticket struct {
	engine *Engine
	// req belongs to the core until it has finished.
	req   dispatch.Request
	label fmt.Stringer
	done  device.Point
	// end is signaled when the request has ended, with or without an error. Done does not
	// show that: a later request may fail its fence while this one is in progress.
	end device.Point
	err error
	// traced is nil where nothing is; priority is that of the request.
	traced   *trace.Copy
	priority Priority
	timing   timing
	// inOrder: see Request.DoneInOrder. relayed: relays have taken part. signaled: the device
	// signals done.
	inOrder, relayed, signaled bool
	// next are other requests of the fence that have ended, whose Done is set once the device has
	// signaled that of this one.
	next []deferred
	// unit is the size of the blocks in which a kernel copies the pieces; 0: none does.
	unit int64
}

// RaisePriority raises the request's priority to p, if p is higher: a prefetch is needed
// now. Among the requests of priority p its order of submission counts.
func (t *Ticket) RaisePriority(p Priority) {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.core.RaiseClass(&t.req, uint8(min(p, Priorities-1)))
}

// Cancel fails the request with an error that wraps ErrCanceled, if nothing of it was
// launched yet, and reports whether it did.
func (t *Ticket) Cancel() bool {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	done := e.core.Cancel(&t.req, ErrCanceled)
	e.doActions()
	return done
}

// Abort fails the request with an error that wraps ErrCanceled, also if part of it was launched:
// nothing more is, and the request ends once nothing is in flight. It reports whether it did;
// false: all of it was launched, or it has ended.
func (t *Ticket) Abort() bool {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	done := e.core.Abort(&t.req, ErrCanceled)
	e.doActions()
	return done
}

// Redirect lets the request read its bytes elsewhere, if nothing of it was launched yet, and
// reports whether it does: these pieces, all in one memory, have the request's destinations in
// the same order. label, for the rest of its way, replaces the request's. Points that End
// returned before are reached at once, since nothing will be read where the request would have
// read; Done and the request's place among the others stay. After an error nothing has changed.
// A request of which a kernel copies blocks (Options.Kernel) is not redirected.
func (t *Ticket) Redirect(pieces []Piece, label fmt.Stringer) (bool, error) {
	e := t.engine
	r := Request{Pieces: pieces, Label: label, Done: t.done}
	if err := r.validate(e.o.Machine); err != nil {
		return false, fmt.Errorf("transfer: redirect %s: %w", r.name(), err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	done, err := e.redirect(t, &r)
	if err != nil {
		return false, fmt.Errorf("transfer: redirect %s: %w", r.name(), err)
	}
	return done, nil
}

func (e *Engine) redirect(t *Ticket, r *Request) (bool, error) {
	if e.closed || t.unit > 0 || t.req.Ended() {
		return false, nil
	}
	into := make([]dispatch.Piece, len(r.Pieces))
	var bytes int64
	for i := range r.Pieces {
		into[i] = r.Pieces[i].dispatched()
		bytes += into[i].Src.Bytes
	}
	if pair := r.pair(); bytes != t.req.Bytes() || pair.To != t.req.To {
		return false, fmt.Errorf("the request has %d bytes to %s", t.req.Bytes(), t.req.To)
	}
	if _, err := e.link(r.pair()); err != nil {
		return false, err
	}
	end, err := e.endPoint()
	if err != nil {
		return false, err
	}
	e.tick()
	if !e.core.Redirect(&t.req, r.pair().From, into) {
		e.unusedEnd(end)
		return false, nil
	}
	before := t.end
	t.end, t.label = end, r.Label // before the core's actions
	if err := before.Fence.Signal(before.Value); err != nil {
		e.o.Log.Error("the end of a copy's old source cannot be signaled", "copy", t.name(), "err", err)
	}
	e.releaseDoneFence(before)
	_ = e.doActions() // nothing was submitted
	return true, nil
}

// Skip ends the request as if it had landed, if all its After points are reached: nothing more of
// it is launched, and Done is signaled once nothing of it is in flight. It is for bytes that are no
// longer needed: Dst may have any part of what was launched, and otherwise keeps its content, and a
// failure of what was launched is no error. Skip returns how many bytes are thus not copied; 0: all of
// it is launched, it has ended, or it waits for a point.
func (t *Ticket) Skip() int64 {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	left := e.core.Skip(&t.req)
	e.doActions()
	return left
}

// Release lets a later request reuse the ticket of a copy that has landed. The ticket
// must not be used after that. For a copy that is in progress or has failed, Release does
// nothing. Tickets need not be released.
func (t *Ticket) Release() {
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if t.req.Ended() && t.err == nil {
		e.recycle(t)
	}
}

// End is a fence value that is reached, and never fails, when the request has ended and
// none of its chunks is in flight: from then on Src and Dst may be used for other
// purposes. Done may be reached before, if a later request fails the fence that they
// share. The fence belongs to the engine, and is valid until the engine is closed. After a
// Redirect there is another one: the one before says that Src of before is not read, and nothing
// about Dst.
func (t *Ticket) End() device.Point {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.end
}

// Ended reports whether Done was signaled or failed.
func (t *Ticket) Ended() bool {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.req.Ended()
}

// Err is the error of a failed copy; nil while the copy is in progress and after it has
// landed. It wraps device.ErrCopyFailed, device.ErrLost, device.ErrClosed, ErrAfter or
// ErrCanceled.
func (t *Ticket) Err() error {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.err
}

// InFlight is the number of bytes that links are copying.
func (t *Ticket) InFlight() int64 {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.req.InFlight()
}

// Landed is the number of bytes that have landed, in the order of the pieces: of a request
// that failed or was skipped, those before the first that did not.
func (t *Ticket) Landed() int64 {
	t.engine.mu.Lock()
	defer t.engine.mu.Unlock()
	return t.req.Landed()
}

// Wait waits on the host until the request has ended and none of its chunks is in flight,
// or ctx is done, and returns Err.
func (t *Ticket) Wait(ctx context.Context) error {
	for {
		end := t.End()
		err := t.engine.await(ctx, end)
		if err != nil && !t.Ended() {
			t.engine.mu.Lock()
			defer t.engine.mu.Unlock()
			return fmt.Errorf("transfer: wait for %s: %w", t.name(), err)
		}
		if err != nil || t.End() == end {
			return t.Err()
		}
	}
}

func (t *Ticket) pair() device.Pair { return device.Pair{From: t.req.From, To: t.req.To} }

// note is what a trace prints of a chunk of the request.
func (t *Ticket) note(s *slot) *trace.Note {
	n := &trace.Note{Layer: trace.NoLayer, Priority: t.priority.String()}
	if now := Priority(t.req.Class); now != t.priority {
		n.StartedAs = now.String()
	}
	t.traced.Note(n, s.ends() && s.chunk.Last())
	if s.via.Hop != dispatch.Direct {
		n.Relay = t.engine.links[s.via.Relay].relay.gpu.String()
	}
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
	case KVStore:
		n.Name = "store kv"
	case KVLoad:
		n.Name = "load kv"
	case Prefetch:
		n.Name = "prefetch"
	}
	return n
}

func (t *Ticket) name() string { return name(t.label, t.req.Bytes(), t.pair()) }
