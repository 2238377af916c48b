package harvest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// controller decides what is borrowed, where handles lie and what is given back, and
// keeps the accounts of it. It is pure: what has happened goes in by its methods, with
// the time, and what is to be done comes out of take. It has no lock, clock, goroutine,
// memory, stream or fence: Runtime has those. Of handles it reads the cost and the
// number of references, which change beside it.
//
// A slab leaves in these steps, each of which is an action out and its end in:
//
//	begin ─► refuse each handle
//	step(drained) ─► invalidate, runCallback ─► ended(called) ─► scrub
//	step(cleared) ─► freeSlab ─► ended(returned)
type controller struct {
	rules
	peers   peers
	clients map[string]*client
	handles uint64 // numbers given
	slabs   uint64 // numbers given
	// freeing are handles that are freed once drained, leaving slabs that are.
	freeing  []*Handle
	draining []*revocation
	counts   [reasons]int64 // of revoked slabs
	closing  bool
	actions  []action
}

// rules are the part of the options that the controller decides by.
type rules struct {
	policy       Policy
	reader       device.Space
	slabBytes    int64
	ownSlabBytes map[string]int64 // slab bytes of clients that share theirs with nobody

	deadline, cooldown, halfLife, callbackLimit time.Duration
}

// slabsFor says whose slabs the client's handles lie in, which is nobody's where they
// are shared, and their size.
func (r *rules) slabsFor(client string) (owner string, bytes int64) {
	if n, ok := r.ownSlabBytes[client]; ok {
		return client, n
	}
	return "", r.slabBytes
}

func newController(o Options) *controller {
	c := &controller{rules: o.rules(), clients: map[string]*client{}}
	top := o.Machine.Topology()
	for _, s := range o.Peers {
		p := &peer{space: s, paths: map[device.Space]device.Path{}, stale: errors.New("no reading yet")}
		for _, to := range top.Spaces() {
			if path, err := top.Path(s, to); err == nil {
				p.paths[to] = path
			}
		}
		info, _ := top.Info(s)
		p.headroom = max(o.HeadroomBytes, 0)
		if o.HeadroomBytes == 0 {
			p.headroom = info.MemoryBytes / 20
		}
		c.peers = append(c.peers, p)
	}
	return c
}

type client struct {
	held    int64
	handles int
}

// allocation is a handle's account: where it lies, and how far its end has come.
type allocation struct {
	controller *controller
	slab       *slab
	offset     int64
	state      handleState
	callback   func(Revocation)
	freedAt    time.Duration
	// missReported says that a violation was.
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

// action is something to be done: one of the types below, or an Info, of which the
// listener is to be told. Infos, refuse and invalidate take effect at once; the others
// are carried out without the lock, one after the other, and their ends are told to
// ended.
type action any

type (
	// refuse lets no new readers in, and invalidate ends a handle that has none.
	refuse     struct{ h *Handle }
	invalidate struct{ h *Handle }
	// runCallback calls f; its end is called.
	runCallback struct {
		h *Handle
		f func(Revocation)
		v Revocation
	}
	// scrub overwrites the first bytes of a slab with zeros; its end is cleared.
	scrub struct {
		slab  *slab
		bytes int64
	}
	// freeMemory frees a slab's memory; its end is returned.
	freeMemory struct{ slab *slab }
	// reportMiss tells of a violation, with the holders of its handle; it has no end.
	reportMiss struct{ v DeadlineMissInfo }
)

// result is the end of an action, or of what a handle's readers did.
type result any

type (
	// drained: nobody uses the handle's memory any more; err is that of the work that
	// did.
	drained struct {
		h   *Handle
		err error
	}
	called struct {
		h    *Handle
		took time.Duration
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

// takeActions returns what is to be done, in order, and forgets it.
func (c *controller) takeActions() []action {
	all := c.actions
	c.actions = nil
	return all
}

func (c *controller) emit(a action) { c.actions = append(c.actions, a) }

// placement is where a request goes.
type placement struct {
	peer *peer
	// slab is nil for a new one, of bytes, which the caller has to take from the device
	// and give to took, or refused.
	slab  *slab
	bytes int64
	owner string // of a new slab
	off   int64
}

// request completes what a client asks for.
func (c *controller) request(bytes int64, hints Hints, now time.Duration) (Request, error) {
	switch {
	case bytes <= 0:
		return Request{}, errors.New("ask for more than 0")
	case bytes > 1<<60:
		return Request{}, ErrNoCapacity
	case c.closing:
		return Request{}, ErrClosed
	}
	setDefault(&hints.Reader, c.reader)
	if c.clients[hints.Client] == nil {
		c.clients[hints.Client] = &client{}
	}
	req := Request{Bytes: device.Align(bytes), Hints: hints, Held: c.clients[hints.Client].held, Clients: len(c.clients), Now: now}
	req.Total = c.peers.total()
	return req, nil
}

// choose says where the request goes.
func (c *controller) choose(req Request) (placement, error) {
	owner, slabBytes := c.slabsFor(req.Hints.Client)
	from := c.peers.candidates(req, owner, slabBytes)
	if len(from) == 0 {
		return placement{}, c.peers.noCapacity(req)
	}
	i, err := c.policy.Choose(req, from)
	if err != nil {
		return placement{}, err
	}
	to := from[i]
	p, err := c.peers.find("alloc", to.Peer.Space)
	if err != nil {
		return placement{}, err
	}
	at := placement{peer: p, bytes: to.FreeExtent, owner: owner, off: to.offset}
	if to.Slab != 0 {
		at.slab = p.slabs[slices.IndexFunc(p.slabs, func(s *slab) bool { return s.id == to.Slab })]
	}
	return at, nil
}

// slabRefused says that the device did not give the slab: its peer is no candidate until
// there is a reading again.
func (c *controller) slabRefused(at placement, err error) {
	at.peer.stale = fmt.Errorf("refused a slab: %w", err)
}

// slabAllocated says that the device gave the slab, and where.
func (c *controller) slabAllocated(at placement, r device.Region) *slab {
	p := at.peer
	c.slabs++
	s := &slab{id: c.slabs, peer: p, owner: at.owner, region: r, segments: newSegments(r.Bytes), handles: map[int64]*Handle{}}
	p.slabs = append(p.slabs, s)
	p.free -= r.Bytes
	p.slabChanges++
	c.emit(SlabInfo{Slab: s.id, Device: p.space, Bytes: r.Bytes})
	return s
}

// grant makes the handle.
func (c *controller) grant(s *slab, off, bytes int64, req Request, clock *timeline) *Handle {
	c.policy.Granted(req)
	s.segments.allocate(off, req.Bytes)
	c.handles++
	h := &Handle{
		id: c.handles, r: s.region.Slice(off, bytes),
		client: req.Hints.Client, label: req.Hints.Label,
		account: allocation{controller: c, slab: s, offset: off},
	}
	h.SetCost(req.Hints.Cost)
	h.readers.open(clock)
	s.handles[off] = h
	owner := c.clients[h.client]
	owner.held += req.Bytes
	owner.handles++
	c.emit(AllocInfo{Handle: h, Slab: s.id})
	return h
}

// checkRuntime fails where the handle is not one of c's.
func (h *Handle) checkRuntime(op string, c *controller) error {
	if h == nil || h.account.controller != c {
		return fmt.Errorf("harvest: %s: the handle is not of this runtime", op)
	}
	return nil
}

// checkLive is the error for a handle that has ended, or is about to.
func (h *Handle) checkLive(op string) error {
	switch h.account.state {
	case freeing, freed:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrFreed)
	case revoking, revoked:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrRevoked)
	}
	return nil
}

// callback has f called if the handle is revoked.
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
		return errors.New("harvest: register a callback: it is nil")
	case h.account.callback != nil:
		return fmt.Errorf("harvest: register a callback: %v has one", h)
	}
	h.account.callback = f
	return nil
}

// free begins to end a handle: once it is known whether it is drained, which its caller
// finds out, release does.
func (c *controller) free(h *Handle, now time.Duration) error {
	if err := h.checkRuntime("free", c); err != nil {
		return err
	}
	if err := h.checkLive("free"); err != nil {
		return err
	}
	h.account.state, h.account.callback, h.account.freedAt = freeing, nil, now
	c.emit(refuse{h})
	return nil
}

// finishFree frees a handle, or has it freed by step once it is drained.
func (c *controller) finishFree(h *Handle, ok bool, failed error) {
	if !ok {
		c.freeing = append(c.freeing, h)
		return
	}
	c.removeHandle(h, freed)
	c.emit(FreeInfo{Handle: h, Failed: failed})
}

// removeHandle takes h out of the accounts. Nobody reads it any more.
func (c *controller) removeHandle(h *Handle, end handleState) {
	a := &h.account
	c.emit(invalidate{h})
	a.state = end
	n := a.slab.segments.used[a.offset]
	a.slab.segments.release(a.offset)
	delete(a.slab.handles, a.offset)
	owner := c.clients[h.client]
	owner.held -= n
	owner.handles--
}
