package harvest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// controller decides what is borrowed, where handles are placed and what is released, and
// keeps account of it. It is pure: events go in by its methods, with the time, and
// actions come out of takeActions. It has no lock, clock, goroutine, memory, stream or
// fence: Runtime has those. It reads the cost and the number of references of handles,
// which change concurrently.
//
// A slab is released in these steps, each an action out and its result in:
//
//	startRelease ─► refuse each handle
//	step(drained) ─► invalidate, runCallback ─► complete(called) ─► scrub
//	step(scrubbed) ─► freeMemory ─► complete(memoryFreed)
type controller struct {
	rules
	peers   peers
	clients map[string]*client
	handles uint64 // last handle number
	slabs   uint64 // last slab number
	// freeing are handles that are freed once drained, draining slabs that are being
	// released.
	freeing  []*Handle
	draining []*revocation
	revoked  [reasons]int64 // slabs
	// displaced is when each client last gave way to another.
	displaced map[displacement]time.Duration
	// refreshed is the slab whose handles were refreshed last, at refreshedAt.
	refreshed   uint64
	refreshedAt time.Duration
	panics      int64 // callbacks that panicked
	closing     bool
	suspended   bool // nothing may be borrowed for now
	actions     []action
	candidates  []Candidate // scratch space of choose
	latest      *Handle     // the latest that was allocated
}

// rules are the options that the controller decides by.
type rules struct {
	policy       Policy
	reader       device.Space
	slabBytes    int64
	ownSlabBytes map[string]int64 // of clients with slabs of their own
	reserve      map[string]int64 // of clients that memory of each peer is kept for

	deadline, cooldown, halfLife, callbackLimit time.Duration

	displaceFactor                        float64 // 0: no client displaces another
	residence, reserved, displaceInterval time.Duration
}

// slabsFor returns the owner and the size of the slabs for the client's handles; owner is
// empty for shared slabs.
func (r *rules) slabsFor(client string) (owner string, bytes int64) {
	if n, ok := r.ownSlabBytes[client]; ok {
		return client, n
	}
	return "", r.slabBytes
}

func newController(o Options) *controller {
	c := &controller{rules: o.rules(), clients: map[string]*client{}, displaced: map[displacement]time.Duration{}}
	top := o.Machine.Topology()
	for _, s := range o.Peers {
		p := &peer{space: s, weight: o.Weight, paths: map[device.Space]device.Path{}, closedTo: map[string]bool{}, kept: map[string]int64{}, stale: errors.New("no reading yet")}
		for _, to := range top.Spaces() {
			if path, err := top.Path(s, to); err == nil {
				p.paths[to] = path
			}
		}
		info, _ := top.Info(s)
		p.headroom = max(o.HeadroomBytes, 0)
		if o.HeadroomBytes == 0 {
			p.headroom = int64(o.HeadroomShare * float64(info.MemoryBytes))
		}
		for name, client := range o.Clients {
			if len(client.Peers) > 0 && !slices.Contains(client.Peers, s) {
				p.closedTo[name] = true
			} else if n := c.reserve[name]; n > 0 {
				p.kept[name] = n
			}
		}
		c.peers = append(c.peers, p)
	}
	return c
}

type client struct {
	held    int64
	handles int
	use     Use
	// active is the time that the client has worked for, by SetUse, last at useAt.
	active, useAt time.Duration
	// revoked counts slabs by reason, and displaced the bytes of those revoked for another
	// client.
	revoked   [reasons]int64
	displaced int64
	// displacing is the number of slabs that are being released for the client. None are
	// displaced for it before idleUntil, nor for refused requests before searchAt.
	displacing          int
	idleUntil, searchAt time.Duration
}

// client returns the client's account, a new one for the first call.
func (c *controller) client(name string) *client {
	if c.clients[name] == nil {
		c.clients[name] = &client{}
	}
	return c.clients[name]
}

// allocation is the controller's account of a handle: its slab and its state.
type allocation struct {
	controller *controller
	slab       *slab
	offset     int64
	state      handleState
	callback   func(Revocation)
	freedAt    time.Duration
	// missReported: a missed deadline was reported.
	missReported bool
}

type handleState uint8

const (
	live     handleState = iota
	freeing              // by Free, draining
	revoking             // draining
	freed
	revoked
)

// action is what the runtime must do: one of the types below, or an Info for the
// listener. Infos, refuse and invalidate are carried out at once; the others without the
// lock, one after the other, and their results are passed to complete.
type action any

type (
	// refuse locks new readers out; invalidate ends a handle without readers.
	refuse     struct{ h *Handle }
	invalidate struct{ h *Handle }
	// notify tells the listeners of these clients that the release of a slab has begun; it has no
	// result.
	notify struct {
		slab    uint64
		clients []string
	}
	// runCallback calls f; its result is called.
	runCallback struct {
		h *Handle
		f func(Revocation)
		v Revocation
	}
	// scrub overwrites the first bytes of a slab with zeros; its result is scrubbed.
	scrub struct {
		slab  *slab
		bytes int64
	}
	// freeMemory frees a slab's memory; its result is memoryFreed.
	freeMemory struct{ slab *slab }
	// reportMiss reports a missed deadline, with the owners that hold the handle; it has
	// no result.
	reportMiss struct{ v DeadlineMissInfo }
)

// result is the result of an action, or the end of a handle's readers.
type result any

type (
	// drained: the handle has no readers any more; err is the error of their work.
	drained struct {
		h   *Handle
		err error
	}
	called struct {
		h        *Handle
		took     time.Duration
		panicked *PanicInfo
	}
	scrubbed struct {
		slab *slab
		err  error
	}
	memoryFreed struct {
		slab *slab
		err  error
	}
)

// takeActions returns and removes the pending actions, in order.
func (c *controller) takeActions() []action {
	all := c.actions
	c.actions = nil
	return all
}

// recycle takes back the memory of takeActions' result.
func (c *controller) recycle(all []action) {
	if clear(all); c.actions == nil {
		c.actions = all[:0]
	}
}

func (c *controller) emit(a action) { c.actions = append(c.actions, a) }

// placement is where a request is allocated.
type placement struct {
	peer *peer
	// slab is nil for a new one of so many bytes: the caller allocates it from the device
	// and passes the result to slabAllocated or slabRefused.
	slab  *slab
	bytes int64
	owner string // of a new slab
	off   int64
	// client that asked, at now.
	client string
	now    time.Duration
}

// request validates and completes a client's request.
func (c *controller) request(bytes int64, hints Hints, now time.Duration) (Request, error) {
	switch {
	case bytes <= 0:
		return Request{}, errors.New("the size must be positive")
	case bytes > 1<<60:
		return Request{}, ErrNoCapacity
	case c.closing:
		return Request{}, ErrClosed
	case c.suspended:
		return Request{}, fmt.Errorf("the model sleeps: %w", ErrNoCapacity)
	}
	setDefault(&hints.Reader, c.reader)
	req := Request{Bytes: device.Align(bytes), Hints: hints, Held: c.client(hints.Client).held, Now: now}
	for name := range c.clients {
		if c.reserve[name] == 0 { // the others have their own memory
			req.Clients++
		}
	}
	req.Total = c.peers.total()
	return req, nil
}

// policyFor is the policy that places a client's requests: none refuses what is kept for it.
func (c *controller) policyFor(client string) Policy {
	if c.reserve[client] > 0 {
		return BestFit{}
	}
	return c.policy
}

// choose places the request.
func (c *controller) choose(req Request) (placement, error) {
	owner, slabBytes := c.slabsFor(req.Hints.Client)
	policy := c.policyFor(req.Hints.Client)
	from := c.candidates[:0]
	if after := req.Hints.After; after != nil && after == c.latest {
		// Right behind the latest is mostly room, which is the best fit on its peer: one of many
		// objects need not look at all slabs, where the policy prefers no other peer.
		if from = c.peers.behind(from, c.policy, req, owner); len(from) > 1 {
			if i, err := policy.Choose(req, from); err != nil || i > 0 {
				from = from[:0]
			} else {
				from = from[:1]
			}
		}
	}
	if len(from) == 0 {
		from = c.peers.candidates(from, c.policy, req, owner, slabBytes)
	}
	c.candidates = from
	if len(from) == 0 {
		for _, p := range c.peers {
			if p.unusable(req) == "" {
				p.refused, p.refusedAt = true, req.Now
			}
		}
		err := c.peers.noCapacity(req, c.policy)
		c.displaceForRequest(req)
		return placement{}, err
	}
	i, err := policy.Choose(req, from)
	if err != nil {
		return placement{}, err
	}
	to := from[i]
	p, err := c.peers.find("alloc", to.Peer.Space)
	if err != nil {
		return placement{}, err
	}
	return placement{peer: p, slab: to.slab, bytes: to.FreeExtent, owner: owner, off: to.offset, client: req.Hints.Client, now: req.Now}, nil
}

// slabRefused records that the device could not allocate the slab: its peer gets no new
// slabs until the next reading.
func (c *controller) slabRefused(at placement, err error) {
	at.peer.stale = fmt.Errorf("cannot allocate a slab: %w", err)
}

// slabAllocated records that the device allocated the slab at r.
func (c *controller) slabAllocated(at placement, r device.Region) *slab {
	p := at.peer
	c.slabs++
	s := &slab{
		id: c.slabs, peer: p, owner: at.owner, region: r, since: at.now,
		segments: newSegments(r.Bytes), handles: map[int64]*Handle{}, clients: map[string]int{},
	}
	s.use.reuse.at = c.client(at.client).active
	p.add(s)
	p.useReserved(at.client, r.Bytes)
	p.keep(s, c.reserve, -r.Bytes)
	c.emit(SlabInfo{Slab: s.id, Device: p.space, Bytes: r.Bytes})
	return s
}

// grant creates the handle.
func (c *controller) grant(s *slab, off, bytes int64, req Request, clock *timeline) *Handle {
	if c.reserve[req.Hints.Client] == 0 {
		c.policy.Granted(req)
	}
	if s.segments.allocate(off, req.Bytes); len(s.segments.free) == 0 {
		s.peer.close(s)
	}
	s.empty = false
	c.handles++
	h := &Handle{
		id: c.handles, r: s.region.Slice(off, bytes),
		client: req.Hints.Client, label: req.Hints.Label,
		account: allocation{controller: c, slab: s, offset: off},
	}
	c.latest = h
	h.SetCost(req.Hints.Cost)
	h.readers.open(clock)
	s.handles[off] = h
	s.clients[h.client]++
	owner := c.clients[h.client]
	owner.held += req.Bytes
	s.peer.count(h.client, req.Bytes)
	owner.handles++
	c.emit(AllocInfo{Handle: h, Slab: s.id})
	return h
}

// checkRuntime fails if the handle is not one of c's.
func (h *Handle) checkRuntime(op string, c *controller) error {
	if h == nil || h.account.controller != c {
		return fmt.Errorf("harvest: %s: the handle belongs to another runtime", op)
	}
	return nil
}

// checkLive fails if the handle was freed or revoked, or is being so.
func (h *Handle) checkLive(op string) error {
	switch h.account.state {
	case freeing, freed:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrFreed)
	case revoking, revoked:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrRevoked)
	}
	return nil
}

// callback sets f to be called if the handle is revoked.
func (c *controller) callback(h *Handle, f func(Revocation)) error {
	if err := h.checkRuntime("register a callback", c); err != nil {
		return err
	}
	if h.account.state != revoking { // its callback has not run
		if err := h.checkLive("register a callback"); err != nil {
			return err
		}
	}
	switch {
	case f == nil:
		return errors.New("harvest: register a callback: the callback is nil")
	case h.account.callback != nil:
		return fmt.Errorf("harvest: register a callback: %v already has one", h)
	}
	h.account.callback = f
	return nil
}

// free starts to end a handle. The caller checks whether it is drained and calls
// finishFree.
func (c *controller) free(h *Handle, now time.Duration) error {
	if err := h.checkRuntime("free", c); err != nil {
		return err
	}
	if err := h.checkLive("free"); err != nil {
		return err
	}
	h.account.state, h.account.callback, h.account.freedAt = freeing, nil, now
	h.account.slab.freeing++
	c.emit(refuse{h})
	return nil
}

// finishFree frees a handle if it is drained; otherwise step frees it later.
func (c *controller) finishFree(h *Handle, ok bool, failed error) {
	if !ok {
		c.freeing = append(c.freeing, h)
		return
	}
	c.removeHandle(h, freed)
	c.emit(FreeInfo{Handle: h, Failed: failed})
}

// removeHandle removes h from the accounts. It has no readers any more.
func (c *controller) removeHandle(h *Handle, end handleState) {
	a := &h.account
	c.emit(invalidate{h})
	if a.state == freeing {
		a.slab.freeing--
	}
	a.state = end
	n := a.slab.segments.used[a.offset]
	a.slab.segments.release(a.offset)
	a.slab.peer.reopen(a.slab)
	delete(a.slab.handles, a.offset)
	if a.slab.clients[h.client]--; a.slab.clients[h.client] == 0 {
		delete(a.slab.clients, h.client)
	}
	h.endCost()
	owner := c.clients[h.client]
	owner.held -= n
	a.slab.peer.count(h.client, -n)
	owner.handles--
}
