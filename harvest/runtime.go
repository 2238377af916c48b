package harvest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Runtime borrows memory from peers and gives it back: the shell around a controller,
// which decides. All methods may be called from any goroutine; from Work on a stream all
// but Tick, Reclamation.Wait and Close, which ask fences or wait.
//
// mu guards the controller. It is taken for moments only, and never held while a
// callback runs, memory is given back or a fence is asked, which on a virtual machine may
// run other work. Taking and releasing references does not need it.
type Runtime struct {
	o         Options
	resources resources
	// release gives them up, once.
	release func() error
	clock   timeline

	mu      sync.Mutex
	control *controller
	// ticking says that a goroutine reads peers and carries out actions. Only one does
	// at a time.
	ticking      bool
	stop         func() // ends the loop; nil before Start
	ticksStopped bool   // nobody ticks any more
}

// New takes the first readings. Nothing is borrowed before Alloc asks.
func New(o Options) (*Runtime, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &Runtime{o: o, control: newController(o)}
	r.release = sync.OnceValue(r.resources.close)
	if err := r.resources.open(o); err != nil {
		return nil, errors.Join(err, r.release())
	}
	r.observe(r.now())
	return r, nil
}

// now is the time of the latest tick, or the machine's if that is later.
func (r *Runtime) now() time.Duration { return max(r.clock.now(), r.o.Machine.Now()) }

// Alloc borrows bytes of a peer's memory, aligned to 256. It never waits for
// memory to be given back: where there is no room now it fails with ErrNoCapacity,
// where the policy refuses with what that says (ErrQuota, ErrRate).
func (r *Runtime) Alloc(bytes int64, hints Hints) (*Handle, error) {
	setDefault(&hints.Client, unnamed.name)
	setDefault(&hints.Label, unnamed.name)
	r.mu.Lock()
	defer r.mu.Unlock()
	h, err := r.alloc(bytes, hints)
	r.apply()
	if err != nil {
		err = fmt.Errorf("harvest: alloc %d bytes for %s (%s): %w", bytes, hints.Client, hints.Label, err)
		r.o.Events.emit(RefuseInfo{Client: hints.Client, Bytes: bytes, Err: err})
		return nil, err
	}
	return h, nil
}

func (r *Runtime) alloc(bytes int64, hints Hints) (*Handle, error) {
	c := r.control
	req, err := c.request(bytes, hints, r.clock.now())
	if err != nil {
		return nil, err
	}
	for {
		to, err := c.choose(req)
		if err != nil {
			return nil, err
		}
		if to.slab == nil {
			at, err := r.resources.allocate(to.peer.space, to.bytes, c.slabs+1)
			if err != nil {
				c.slabRefused(to, err)
				continue
			}
			to.slab = c.slabAllocated(to, at)
		}
		return c.grant(to.slab, to.off, bytes, req, &r.clock), nil
	}
}

// Free gives the memory back. It does not wait: new references fail from now on,
// and the memory is used again when those that are out, and the work behind them,
// are done. Once Free has returned nil, the handle's callback will not run.
// ErrRevoked means that the runtime was first: the callback has run or will, and
// nothing is left to do. ErrFreed means a second Free.
func (r *Runtime) Free(h *Handle) error {
	if err := r.update(func(c *controller) error { return c.free(h, r.now()) }); err != nil {
		return err
	}
	ok, failed := h.readers.drained()
	return r.update(func(c *controller) error {
		c.finishFree(h, ok, failed)
		return nil
	})
}

// RegisterCallback has f called once if the handle is revoked, when nobody can
// acquire it any more and nobody reads it. A handle has one callback. ErrRevoked
// means that it is too late and f will not be called.
//
// f runs on the goroutine that ticks, and nothing of the runtime is locked meanwhile:
// it may call it. But its slab goes no further before f has returned, so f must not
// block, and least of all wait for a Reclamation or Close.
func (r *Runtime) RegisterCallback(h *Handle, f func(Revocation)) error {
	return r.update(func(c *controller) error { return c.callback(h, f) })
}

// Exclude says that a peer must not be used, because of what the caller saw: a copy
// that failed with device.ErrLost, say. Everything on it is revoked at once, without
// clearing. It holds until Readmit.
func (r *Runtime) Exclude(s device.Space, cause error) error {
	if cause == nil {
		return fmt.Errorf("harvest: exclude %s: say why", s)
	}
	return r.setExcluded("exclude", s, cause)
}

// Readmit takes back an Exclude. The peer is used again once its readings say that
// it is healthy.
func (r *Runtime) Readmit(s device.Space) error { return r.setExcluded("readmit", s, nil) }

func (r *Runtime) setExcluded(op string, s device.Space, cause error) error {
	return r.update(func(c *controller) error {
		p, err := c.peers.find(op, s)
		if err == nil {
			c.setExcluded(p, cause, r.now())
		}
		return err
	})
}

// update tells the controller something that leads to no action but those done at once,
// and does these.
func (r *Runtime) update(f func(*controller) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := f(r.control)
	r.apply()
	return err
}

// apply does at once what the controller wants done at once, and returns the rest. mu is
// held.
func (r *Runtime) apply() (rest []action) {
	for _, a := range r.control.takeActions() {
		switch a := a.(type) {
		case refuse:
			a.h.readers.refuse()
		case invalidate:
			a.h.readers.invalidate()
		case runCallback, scrub, freeMemory, reportMiss:
			rest = append(rest, a)
		default:
			r.o.Events.emit(a)
		}
	}
	return rest
}

// Tick reads the peers, revokes what must be, and carries on what was begun; it
// waits for nothing. now must not run backwards, and is on the clock of
// Options.Machine. The result is how many frees and revocations are not over.
// ErrClosed after Close. While another goroutine ticks, or in a callback, which is
// amid a tick, a Tick does nothing but tell the time. On a virtual machine, where
// nothing goes on while nobody waits, ticks alone do not make readers and clearing end.
func (r *Runtime) Tick(now time.Duration) (pending int, err error) {
	now = r.clock.advance(now)
	r.mu.Lock()
	closing := r.control.closing
	r.mu.Unlock()
	if closing {
		return 0, fmt.Errorf("harvest: tick: %w", ErrClosed)
	}
	return r.tickAlone(func() {
		r.observe(now)
		r.advance(now)
	}), nil
}

// tickAlone has f done by this goroutine, unless another is at it, and returns how much is
// not over.
func (r *Runtime) tickAlone(f func()) (pending int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ticking && !r.ticksStopped {
		r.ticking = true
		func() {
			r.mu.Unlock()
			defer r.mu.Lock()
			f()
		}()
		r.ticking = false
	}
	return r.control.pending()
}

// observe reads all peers and begins what follows from that.
func (r *Runtime) observe(now time.Duration) {
	r.mu.Lock()
	var rs []reading
	for _, p := range r.control.peers {
		rs = append(rs, reading{peer: p, slabChanges: p.slabChanges})
	}
	r.mu.Unlock()
	for i := range rs {
		rs[i].Reading, rs[i].err = r.resources.monitor.Read(rs[i].peer.space)
	}
	_ = r.update(func(c *controller) error {
		c.observe(now, rs)
		return nil
	})
}

// advance takes what was begun as far as it goes without waiting.
func (r *Runtime) advance(now time.Duration) {
	r.mu.Lock()
	wanted := r.control.undrained()
	r.mu.Unlock()
	var ends []result
	for _, h := range wanted {
		if ok, err := h.readers.drained(); ok {
			ends = append(ends, drained{h, err})
		}
	}
	ends = append(ends, r.resources.completedScrubs()...)
	r.execute(now, func(c *controller) { c.step(now, ends) })
	r.execute(now, func(c *controller) { c.reportOverdue(now) })
}

// execute does what the controller wants done because of f, and what it wants done
// because that has ended, until it wants nothing more.
func (r *Runtime) execute(now time.Duration, f func(*controller)) {
	var todo []action
	ask := func(f func(*controller)) {
		r.mu.Lock()
		defer r.mu.Unlock()
		f(r.control)
		todo = append(todo, r.apply()...)
	}
	for ask(f); len(todo) > 0; {
		a := todo[0]
		todo = todo[1:]
		if end := r.perform(a, now); end != nil {
			ask(func(c *controller) { c.complete(now, end) })
		}
	}
}

// perform does one thing, without the lock. The result is nil where its end comes
// later, or nobody asks for it.
func (r *Runtime) perform(a action, now time.Duration) result {
	switch a := a.(type) {
	case runCallback:
		began := r.o.Machine.Now()
		a.f(a.v)
		return called{a.h, r.o.Machine.Now() - began}
	case scrub:
		r.resources.scrub(a.slab, a.bytes)
	case freeMemory:
		return memoryFreed{a.slab, r.resources.freeSlab(a.slab)}
	case reportMiss:
		a.v.Owners = a.v.Handle.readers.currentHolds(now)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.o.Events.emit(a.v)
	}
	return nil
}

// Start begins a loop of the machine's clock that ticks by itself, until Close. Start is
// called at most once.
func (r *Runtime) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop != nil || r.control.closing {
		return errors.New("harvest: start: it was started, or closed, before")
	}
	r.stop = r.o.Machine.Loop(0, func(now time.Duration) time.Duration {
		switch pending, err := r.Tick(now); {
		case err != nil:
			return -1 // closed
		case pending > 0:
			return max(r.o.Interval/10, time.Microsecond)
		}
		return r.o.Interval
	})
	return nil
}

// Close revokes everything that is left, waits until it is given back, and
// releases the runtime. If ctx ends first, the error says who still holds what, and
// Close may be called again. A second Close after success does nothing.
func (r *Runtime) Close(ctx context.Context) error {
	_ = r.update(func(c *controller) error {
		c.close(r.now())
		return nil
	})
	for r.progress() > 0 || !r.stopTicks() {
		if err := r.yield(ctx); err != nil {
			return fmt.Errorf("harvest: close: %s: %w", r.describeOverdue(nil), err)
		}
	}
	// The loop has ended, or is about to: its ticks fail.
	if stop := r.stop; stop != nil {
		stop()
	}
	return r.release()
}

// stopTicks ends all ticks, unless one is under way.
func (r *Runtime) stopTicks() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ticksStopped = r.ticksStopped || !r.ticking
	return r.ticksStopped
}
