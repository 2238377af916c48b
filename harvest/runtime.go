package harvest

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Runtime borrows memory from peers and releases it. It is the shell around a controller,
// which makes the decisions. All methods may be called from any goroutine; from Work on a
// stream all except Tick, Reclamation.Wait and Close, which query fences or wait.
//
// mu guards the controller. It is held briefly, and never while a callback runs, memory
// is freed or a fence is queried, which on a virtual machine may run other work.
// Acquiring and releasing references does not take it.
type Runtime struct {
	o         Options
	resources resources
	// release releases the resources, once.
	release func() error
	clock   timeline

	mu          sync.Mutex
	control     *controller
	stepReaders []*StepReader
	listeners   []releaseListener
	// ticking: a goroutine reads peers and carries out actions. Only one does at a time.
	ticking      bool
	stop         func() // ends the loop; nil before Start
	ticksStopped bool   // no goroutine ticks any more
}

// New takes the first readings. Nothing is borrowed before Alloc.
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

// now is the time of the latest tick, or the machine's time if that is later.
func (r *Runtime) now() time.Duration { return max(r.clock.now(), r.o.Machine.Now()) }

// Alloc borrows so many bytes of a peer's memory, aligned to 256. It never waits for
// memory to be released: without room now it fails with ErrNoCapacity; if the policy
// refuses, with the policy's error (ErrQuota, ErrRate).
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

// Free frees the memory. It does not wait: new references fail from now on, and the
// memory is reused once the present ones are released and the work behind them has ended.
// After Free has returned nil, the handle's callback will not run. ErrRevoked: the handle
// was revoked before; its callback has run or will, and nothing is left to do. ErrFreed:
// a second Free.
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

// RegisterCallback sets f to be called once if the handle is revoked, when it is drained
// and cannot be acquired any more. A handle has one callback. ErrRevoked: the handle is
// already revoked and f will not be called.
//
// f runs on the goroutine that ticks, without locks: it may call the runtime. Its slab is
// not released before f has returned, so f must not block, in particular not wait for a
// Reclamation or Close. If f panics, that is reported, and f counts as returned.
func (r *Runtime) RegisterCallback(h *Handle, f func(Revocation)) error {
	return r.update(func(c *controller) error { return c.callback(h, f) })
}

// Exclude marks a peer unhealthy, because of an error that the caller saw: a copy that
// failed with device.ErrLost, say. Everything on it is revoked at once, without
// scrubbing. It holds until Readmit.
func (r *Runtime) Exclude(s device.Space, cause error) error {
	if cause == nil {
		return fmt.Errorf("harvest: exclude %s: the cause is nil", s)
	}
	return r.setExcluded("exclude", s, cause)
}

// Readmit undoes Exclude. The peer is used again if its readings are healthy.
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

// update calls the controller, and carries out the actions that need no wait; f causes no
// others.
func (r *Runtime) update(f func(*controller) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := f(r.control)
	r.apply()
	return err
}

// apply carries out the actions that need no wait, and returns the others. mu is held.
func (r *Runtime) apply() (rest []action) {
	all := r.control.takeActions()
	defer r.control.recycle(all)
	for _, a := range all {
		switch a := a.(type) {
		case refuse:
			r.refuse(a.h)
		case invalidate:
			a.h.readers.invalidate()
		case notify, runCallback, scrub, freeMemory, reportMiss:
			rest = append(rest, a)
		default:
			r.o.Events.emit(a)
		}
	}
	return rest
}

// Tick reads the peers, starts the revocations that are needed, and advances those in
// progress; it waits for nothing. now is on the clock of Options.Machine and must not run
// backwards. The result is the number of frees and revocations in progress. ErrClosed
// after Close. While another goroutine ticks, and within a callback, Tick only advances
// the clock. On a virtual machine time passes only in waits, so ticks alone do not let
// readers and scrubbing finish.
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

// tickAlone calls f unless another goroutine is ticking, and returns the number of frees
// and revocations in progress.
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

// observe reads all peers and starts the revocations that follow.
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

// advance advances frees and revocations as far as possible without waiting.
func (r *Runtime) advance(now time.Duration) {
	r.mu.Lock()
	wanted, live := r.control.undrained(), r.control.nextToRefresh(now)
	r.mu.Unlock()
	for _, h := range live {
		h.readers.refresh()
	}
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

// execute calls f and carries out the actions that follow, and those that follow from
// their results, until there are no more.
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

// perform carries out one action, without the lock. The result is nil if it comes later
// or is not needed.
func (r *Runtime) perform(a action, now time.Duration) result {
	switch a := a.(type) {
	case notify:
		r.notify(a)
	case runCallback:
		began := r.o.Machine.Now()
		panicked := a.call()
		return called{a.h, r.o.Machine.Now() - began, panicked}
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

// releaseListener learns which slabs with memory of a client are being released.
type releaseListener struct {
	client string
	f      func(slab uint64)
}

// OnRelease sets f to be called when the release of a slab with memory of a client has begun: its
// handles cannot be acquired any more, and who has a reference, for work that has not begun, can
// take it back and read elsewhere, so that the slab is released in time. f runs on the goroutine
// that ticks, without locks, and must not block. It is called until the runtime is closed.
func (r *Runtime) OnRelease(client string, f func(slab uint64)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listeners = append(r.listeners, releaseListener{client, f})
}

// notify calls the listeners of a slab's clients.
func (r *Runtime) notify(a notify) {
	r.mu.Lock()
	listeners := slices.Clone(r.listeners)
	r.mu.Unlock()
	for _, l := range listeners {
		if slices.Contains(a.clients, l.client) {
			l.f(a.slab)
		}
	}
}

// call calls the callback. A panic must not end the goroutine that ticks.
func (a runCallback) call() (panicked *PanicInfo) {
	defer func() {
		if v := recover(); v != nil {
			panicked = &PanicInfo{Handle: a.h, Reason: a.v.Reason, Value: v, Stack: string(debug.Stack())}
		}
	}()
	a.f(a.v)
	return nil
}

// Start starts a loop of the machine's clock that ticks until Close. Start is called at
// most once.
func (r *Runtime) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop != nil || r.control.closing {
		return errors.New("harvest: start: already started or closed")
	}
	r.stop = r.o.Machine.Loop(0, func(now time.Duration) time.Duration {
		if _, err := r.Tick(now); err != nil {
			return -1 // closed
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.control.pause(r.clock.now(), r.o.Interval)
	})
	return nil
}

// Close revokes everything, waits until it is released, and releases the runtime's
// resources. If ctx ends first, the error names the owners that still hold memory, and
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
	// The loop ends by itself: its ticks fail.
	if stop := r.stop; stop != nil {
		stop()
	}
	return r.release()
}

// Suspend revokes everything, refuses to borrow until Resume, and waits until all memory is
// released. If ctx ends first, the error names the owners that still hold memory; it is released
// later all the same.
func (r *Runtime) Suspend(ctx context.Context) error {
	if err := r.update(func(c *controller) error {
		if c.closing {
			return ErrClosed
		}
		c.suspended = true
		c.releaseAll(r.now())
		return nil
	}); err != nil {
		return fmt.Errorf("harvest: suspend: %w", err)
	}
	for r.progress() > 0 {
		if err := r.yield(ctx); err != nil {
			return fmt.Errorf("harvest: suspend: %s: %w", r.describeOverdue(nil), err)
		}
	}
	return nil
}

// Resume ends a Suspend.
func (r *Runtime) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.control.suspended = false
}

// stopTicks prevents further ticks, unless one is in progress.
func (r *Runtime) stopTicks() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ticksStopped = r.ticksStopped || !r.ticking
	return r.ticksStopped
}
