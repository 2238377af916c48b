package harvest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Reclamation is the release of memory that Reclaim requested.
type Reclamation struct {
	r        *Runtime
	device   device.Space
	deadline time.Duration
	request  *reclaimRequest // guarded by Runtime.mu
}

// Reclaim makes so many bytes of a peer's memory free for another process: it releases
// what is missing of them, or all that harvest holds there if that is less, within that
// time (0: Options.Deadline). If anything is missing, the process will use up the headroom, which is
// released, too, within Options.Deadline; the Reclamation does not wait for that. For Options.Cooldown no new slab is allocated on that peer,
// so that the process can allocate what is free. Reclaim does not wait: ticks, and
// Reclamation.Wait, advance it. What is free is known from the latest tick.
func (r *Runtime) Reclaim(s device.Space, bytes int64, within time.Duration) (*Reclamation, error) {
	if bytes <= 0 || within < 0 {
		return nil, fmt.Errorf("harvest: reclaim %d bytes within %v: bytes must be positive, and the time not negative", bytes, within)
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

// Planned is the number of bytes that will be released.
func (c *Reclamation) Planned() int64 { return c.state().planned }

// Freed is the number of bytes released so far.
func (c *Reclamation) Freed() int64 { return c.state().freed }

// Done reports whether all planned bytes are released.
func (c *Reclamation) Done() bool { return c.state().remaining == 0 }

func (c *Reclamation) state() reclaimRequest {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return *c.request
}

// Wait advances the reclamation until it is done. It fails with ErrDeadline when the
// deadline passes first, and names the owners that hold the memory; the memory is still
// released later, and Wait may be called again.
func (c *Reclamation) Wait(ctx context.Context) error {
	for !c.Done() {
		c.r.progress()
		switch state := c.state(); {
		case state.remaining == 0:
			return nil
		case c.r.now() > c.deadline:
			return fmt.Errorf("harvest: reclaim on %s: %d of %d bytes are not released: %s: %w",
				c.device, state.planned-state.freed, state.planned, c.r.describeOverdue(c.request), ErrDeadline)
		}
		if err := c.r.yield(ctx); err != nil {
			return fmt.Errorf("harvest: reclaim on %s: %s: %w", c.device, c.r.describeOverdue(c.request), err)
		}
	}
	return nil
}

// describeOverdue describes what is not released and which owners hold it: for a reclaim
// request, or everything for nil.
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

// progress advances frees and revocations on behalf of a waiting caller, and returns how
// many are pending.
func (r *Runtime) progress() (pending int) {
	return r.tickAlone(func() { r.advance(r.clock.advance(r.now())) })
}

// yield lets other work proceed that the caller waits for.
func (r *Runtime) yield(ctx context.Context) error {
	return r.o.Machine.Yield(ctx, 100*time.Microsecond)
}
