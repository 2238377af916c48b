package transfer

import (
	"context"
	"fmt"

	"github.com/moeserve/moeserve/device"
)

// Ticket is a request that was submitted. Its methods may be called from any
// goroutine.
type Ticket struct {
	link *link
	req  *request
}

// Promote raises the request's priority, if p is higher than it is: a prefetch is
// needed now. Among the requests of p it stands where its submission puts it.
func (t *Ticket) Promote(p Priority) {
	t.link.mu.Lock()
	defer t.link.mu.Unlock()
	t.link.queue.promote(t.req, p)
}

// Cancel fails the request with an error that wraps ErrCanceled, if nothing of it
// was given to the device yet, and reports whether it did.
func (t *Ticket) Cancel() bool { return t.link.cancel(t.req) }

// Forgo ends the request as if it had landed, if all its After points are reached and
// nothing of it was given to the device yet, and reports whether it did. It is for bytes
// that nobody wants any more: Done is raised, so whoever waits for it goes on, and finds
// in Dst what was there before.
func (t *Ticket) Forgo() bool { return t.link.forgo(t.req) }

// Release gives the ticket of a copy that has landed up, so that a later request uses its
// memory again: nobody may use the ticket after that. Of a copy that is under way, or has
// failed, it does nothing. Tickets need not be released.
func (t *Ticket) Release() { t.link.recycle(t.req) }

// End is reached, and never fails, when the request has ended and nothing of it is under
// way: from then on Src and Dst may be used otherwise. Done may be reached before, where a
// later request fails the fence that it shares. It is a point of the engine's own, valid
// until the engine is closed.
func (t *Ticket) End() device.Point { return t.req.mark }

// Ended reports whether Done was raised or failed.
func (t *Ticket) Ended() bool {
	t.link.mu.Lock()
	defer t.link.mu.Unlock()
	return t.req.ended
}

// Err is why the copy failed: nil while it is under way and after it has landed.
// It wraps device.ErrCopyFailed, device.ErrLost, device.ErrClosed, ErrAfter or
// ErrCanceled.
func (t *Ticket) Err() error {
	t.link.mu.Lock()
	defer t.link.mu.Unlock()
	return t.req.err
}

// Wait waits on the host until the request has ended and nothing of it is under
// way, or ctx is done, and returns Err.
func (t *Ticket) Wait(ctx context.Context) error {
	r := t.req
	if err := r.mark.Await(ctx); err != nil && !t.Ended() {
		return fmt.Errorf("transfer: wait for %s: %w", r.name(), err)
	}
	return t.Err()
}
