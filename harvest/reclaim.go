package harvest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Reclamation is memory on its way back to somebody who asked for it.
type Reclamation struct {
	r        *Runtime
	device   device.Space
	deadline time.Duration
	request  *reclaimRequest // guarded by Runtime.mu
}

// Reclaim gives back at least bytes of what harvest holds on a peer, or all of it,
// within that time (0: Options.Deadline), for a neighbor who wants to allocate
// there; for Options.Cooldown after, nothing more is taken from that peer. It begins
// at once and does not wait: ticks carry it on, and so does Reclamation.Wait.
func (r *Runtime) Reclaim(s device.Space, bytes int64, within time.Duration) (*Reclamation, error) {
	if bytes <= 0 || within < 0 {
		return nil, fmt.Errorf("harvest: reclaim %d bytes within %v: ask for more than 0, in no negative time", bytes, within)
	}
	setDefault(&within, r.o.Deadline)
	rec := &Reclamation{r: r, device: s}
	err := r.update(func(c *controller) error {
		p, err := c.peers.find("reclaim", s)
		if err != nil {
			return err
		}
		now := r.now()
		rec.deadline = now + within
		rec.request, err = c.reclaim(p, bytes, now, within)
		return err
	})
	if err != nil {
		return nil, err
	}
	return rec, nil
}

// Planned is how much will be given back, in bytes.
func (c *Reclamation) Planned() int64 { return c.state().planned }

// Freed is how much has been given back so far, in bytes.
func (c *Reclamation) Freed() int64 { return c.state().freed }

// Done says whether all that was planned has been given back.
func (c *Reclamation) Done() bool { return c.state().remaining == 0 }

func (c *Reclamation) state() reclaimRequest {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return *c.request
}

// Wait carries the reclamation on until it is done. It fails with ErrDeadline, naming
// who holds what, when the deadline passes first; the memory is still given back
// later, and Wait may be called again.
func (c *Reclamation) Wait(ctx context.Context) error {
	for !c.Done() {
		c.r.progress()
		switch state := c.state(); {
		case state.remaining == 0:
			return nil
		case c.r.now() > c.deadline:
			return fmt.Errorf("harvest: reclaim on %s: %d of %d bytes are not given back: %s: %w",
				c.device, state.planned-state.freed, state.planned, c.r.describeOverdue(c.request), ErrDeadline)
		}
		if err := c.r.yield(ctx); err != nil {
			return fmt.Errorf("harvest: reclaim on %s: %s: %w", c.device, c.r.describeOverdue(c.request), err)
		}
	}
	return nil
}

// describeOverdue says what is not given back and who holds it: what belongs to the claim, or
// everything for nil.
func (r *Runtime) describeOverdue(of *reclaimRequest) string {
	r.mu.Lock()
	vs := r.control.overdue(of)
	r.mu.Unlock()
	now := r.clock.now()
	var parts []string
	for _, v := range vs {
		if v.Handle != nil {
			v.Owners = v.Handle.readers.currentHolds(now)
		}
		parts = append(parts, v.String())
	}
	return strings.Join(parts, "; ")
}

// progress carries on what was begun, for somebody who waits for the end of it, and says
// how much is left.
func (r *Runtime) progress() (pending int) {
	return r.tickAlone(func() { r.advance(r.clock.advance(r.now())) })
}

// yield lets others go on, for whose end somebody waits.
func (r *Runtime) yield(ctx context.Context) error {
	return r.o.Machine.Yield(ctx, 100*time.Microsecond)
}
