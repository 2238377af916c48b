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
	claim    *claim // guarded by Runtime.mu
}

// Reclaim gives back at least bytes of what harvest holds on a peer, or all of it,
// within that time (0: Options.Deadline), for a neighbor who wants to allocate
// there; for Options.Cooldown after, nothing more is taken from that peer. It begins
// at once and does not wait: ticks carry it on, and so does Reclamation.Wait.
func (r *Runtime) Reclaim(s device.Space, bytes int64, within time.Duration) (*Reclamation, error) {
	if bytes <= 0 || within < 0 {
		return nil, fmt.Errorf("harvest: reclaim %d bytes within %v: ask for more than 0, in no negative time", bytes, within)
	}
	def(&within, r.o.Deadline)
	rec := &Reclamation{r: r, device: s}
	err := r.decide(func(c *controller) error {
		p, err := c.peers.find("reclaim", s)
		if err != nil {
			return err
		}
		now := r.now()
		rec.deadline = now + within
		rec.claim, err = c.reclaim(p, bytes, now, within)
		return err
	})
	if err != nil {
		return nil, err
	}
	return rec, nil
}

// Planned is how much will be given back, in bytes.
func (c *Reclamation) Planned() int64 { return c.now().planned }

// Freed is how much has been given back so far, in bytes.
func (c *Reclamation) Freed() int64 { return c.now().freed }

// Done says whether all that was planned has been given back.
func (c *Reclamation) Done() bool { return c.now().left == 0 }

func (c *Reclamation) now() claim {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return *c.claim
}

// Wait carries the reclamation on until it is done. It fails with ErrDeadline, naming
// who holds what, when the deadline passes first; the memory is still given back
// later, and Wait may be called again.
func (c *Reclamation) Wait(ctx context.Context) error {
	for !c.Done() {
		c.r.carry()
		switch state := c.now(); {
		case state.left == 0:
			return nil
		case c.r.now() > c.deadline:
			return fmt.Errorf("harvest: reclaim on %s: %d of %d bytes are not given back: %s: %w",
				c.device, state.planned-state.freed, state.planned, c.r.late(c.claim), ErrDeadline)
		}
		if err := c.r.rest(ctx); err != nil {
			return fmt.Errorf("harvest: reclaim on %s: %s: %w", c.device, c.r.late(c.claim), err)
		}
	}
	return nil
}

// late says what is not given back and who holds it: what belongs to the claim, or
// everything for nil.
func (r *Runtime) late(of *claim) string {
	r.mu.Lock()
	vs := r.control.late(of)
	r.mu.Unlock()
	now := r.clock.now()
	var parts []string
	for _, v := range vs {
		if v.Handle != nil {
			v.Owners = v.Handle.readers.holders(now)
		}
		parts = append(parts, v.String())
	}
	return strings.Join(parts, "; ")
}

// carry carries on what was begun, for somebody who waits for the end of it, and says
// how much is left.
func (r *Runtime) carry() (pending int) {
	return r.turn(func() { r.carryOn(r.clock.pass(r.now())) })
}

// rest lets others go on, for whose end somebody waits.
func (r *Runtime) rest(ctx context.Context) error {
	return r.o.Machine.Yield(ctx, 100*time.Microsecond)
}
