package peercache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/transfer"
)

// ErrBusy: the object has a copy already, or one is being made.
var ErrBusy = errors.New("already there, or being copied there")

// Cache keeps copies in peers' memory. Its methods may be called from any goroutine. The
// nil Cache, of a client without peers, is empty, and its Put fails.
//
// # Locks
//
// mu guards moving copies, the statistics, and writes to landed. It may be held during an
// allocation of device memory, so Acquire does without: it reads landed and takes a
// reference on the handle's own state word. Harvest holds no lock during callbacks;
// callbacks take mu only.
type Cache[K comparable] struct {
	o Options[K]
	// reader and mover are the owners of references, for harvest's reports.
	reader, mover *harvest.Owner
	// landed are the copies that Acquire finds.
	landed *index[K, Copy[K]]
	peers  failures
	// steps reads copies in place. landings counts copies that have landed so far, count those
	// that are there.
	steps    *harvest.StepReader
	landings atomic.Uint64
	count    atomic.Int64

	mu     sync.Mutex
	closed bool
	// moving are the copies that have not landed, and moves their transfers in order of
	// submission, with those whose copies were removed and that are not known to have ended.
	moving map[K]*Copy[K]
	moves  []*move[K]
	fences fencePool
	stats  Stats
}

// move is a transfer that fills copies on one peer.
type move[K comparable] struct {
	copies []*Copy[K]
	// wanted is the number of copies that were not removed.
	wanted int
	ticket *transfer.Ticket
	done   device.Point
	began  time.Duration
}

// Stats count copies since New.
type Stats struct {
	// Landed counts completed copies; Dropped and Revoked count removed ones, moving or
	// landed.
	Landed, Dropped, Revoked int64
	// Bytes of the copies that landed.
	Bytes int64
}

// Copy is the copy of an object in a peer's memory. After its removal it can no longer be
// acquired.
type Copy[K comparable] struct {
	key    K
	handle *harvest.Handle
	// parts are what it is copied from, by move, both nil once it has landed.
	parts []device.Region
	move  *move[K]
}

// Key of the object.
func (c *Copy[K]) Key() K { return c.key }

// Device is the peer's memory.
func (c *Copy[K]) Device() device.Space { return c.handle.Device() }

// Region of the copy. It may be read only under a reference.
func (c *Copy[K]) Region() device.Region { return c.handle.Region() }

// Slab is the number of the slab that the copy lies in: see harvest.Handle.
func (c *Copy[K]) Slab() uint64 { return c.handle.Slab() }

// New makes an empty cache.
func New[K comparable](o Options[K]) (*Cache[K], error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c := &Cache[K]{
		o: o, steps: o.Harvest.NewStepReader(o.Client, harvest.NewOwner(o.Noun+" read in place")), reader: harvest.NewOwner(o.Noun + " fetch"), mover: harvest.NewOwner(o.Noun + " move"),
		landed: newIndex[K, Copy[K]](), moving: map[K]*Copy[K]{},
		fences: fencePool{machine: o.Machine, name: o.Noun + " moved"},
	}
	o.Harvest.OnRelease(o.Client, c.releasing)
	return c, nil
}

// Acquire returns the object's copy with a reference on it: the copy stays while the
// reference is held, and until the fence value at which it is released. False: there is
// none, or it is being removed. It counts as a use of the copy: see SetUse.
func (c *Cache[K]) Acquire(key K) (*Copy[K], harvest.Ref, bool) {
	if c == nil {
		return nil, harvest.Ref{}, false
	}
	x := c.landed.get(key)
	if x == nil {
		return nil, harvest.Ref{}, false
	}
	ref, ok := x.handle.Acquire(c.reader)
	if ok {
		x.handle.CountUse()
	}
	return x, ref, ok
}

// Find returns the object's copy, or nil if none has landed.
func (c *Cache[K]) Find(key K) *Copy[K] {
	if c == nil {
		return nil
	}
	return c.landed.get(key)
}

// lookup returns the object's copies, or nil: one that has landed, and one that is moving.
// There are both only while the object moves to another place. mu is held.
func (c *Cache[K]) lookup(key K) (landed, moving *Copy[K]) { return c.landed.get(key), c.moving[key] }

// has reports whether the copy was not removed. mu is held.
func (c *Cache[K]) has(x *Copy[K]) bool {
	landed, moving := c.lookup(x.key)
	return x == landed || x == moving
}

// Put starts to copy an object to a peer's memory, and returns at once. The caller does
// not write src until the copy has landed or failed. An error wraps
// harvest.ErrNoCapacity, ErrQuota, ErrRate or ErrClosed if harvest has no memory for it,
// or ErrBusy. If the copy fails, one that the object had before stays.
func (c *Cache[K]) Put(key K, src device.Region, o PutOptions[K]) error {
	_, err := c.PutAll([]Object[K]{{Key: key, Src: src}}, o)
	return err
}

// Object is the name of an object and where it lies.
type Object[K comparable] struct {
	Key K
	Src device.Region
	// Parts in place of Src: the object is scattered over these, all in one memory. In the
	// peer's memory they are contiguous.
	Parts []device.Region
}

// parts of the object.
func (o *Object[K]) parts() []device.Region {
	if len(o.Parts) == 0 {
		return []device.Region{o.Src}
	}
	return o.Parts
}

// Transfer fills the copies of several objects on one peer. A copy is there once the
// transfer has ended, a Poll has followed, and Find finds it.
type Transfer[K comparable] struct {
	// Keys of the objects, in the order of PutAll's; the caller's.
	Keys   []K
	Ticket *transfer.Ticket
}

// PutAll is Put for several objects, which lie in one memory: one transfer for each peer
// that they go to. The error is why the first of the objects that are in none of them is
// not; those after one that finds no memory are not tried.
func (c *Cache[K]) PutAll(objects []Object[K], o PutOptions[K]) ([]Transfer[K], error) {
	if c == nil {
		return nil, fmt.Errorf("no peer memory is configured: %w", harvest.ErrNoCapacity)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var (
		moves   []*move[K]
		refused error
		before  *harvest.Handle
	)
	for _, object := range objects {
		x, err := c.place(object, before, o)
		if err != nil {
			refused = cmp.Or(refused, err)
			if errors.Is(err, ErrBusy) {
				continue
			}
			break
		}
		before = x.handle
		i := slices.IndexFunc(moves, func(m *move[K]) bool { return m.copies[0].Device() == x.Device() })
		if i < 0 {
			i = len(moves)
			moves = append(moves, &move[K]{began: c.o.Machine.Now()})
		}
		x.move = moves[i]
		moves[i].copies = append(moves[i].copies, x)
	}
	var started []Transfer[K]
	for _, m := range moves {
		if err := c.start(m, o.Behind); err != nil {
			refused = cmp.Or(refused, err)
		}
		if m.ticket == nil {
			continue
		}
		t := Transfer[K]{Keys: make([]K, 0, len(m.copies)), Ticket: m.ticket}
		for _, x := range m.copies {
			t.Keys = append(t.Keys, x.key)
		}
		started = append(started, t)
	}
	return started, refused
}

// place allocates the memory of a copy: right behind that handle, if it is not nil and
// there is room. mu is held.
func (c *Cache[K]) place(object Object[K], before *harvest.Handle, o PutOptions[K]) (*Copy[K], error) {
	switch landed, moving := c.lookup(object.Key); {
	case c.closed:
		return nil, harvest.ErrClosed
	case moving != nil || landed != nil && !o.Move:
		return nil, ErrBusy
	}
	hints := harvest.Hints{Client: c.o.Client, Label: c.o.Name(object.Key), Peers: o.Peers, Reader: c.o.Reader, Cost: o.Cost, After: before}
	if before == nil && o.After != nil {
		for key := range o.After {
			if landed, moving := c.lookup(key); landed != nil || moving != nil {
				hints.After = cmp.Or(moving, landed).handle
				break
			}
		}
	}
	parts, bytes := object.parts(), int64(0)
	for _, p := range parts {
		bytes += p.Bytes
	}
	h, err := c.o.Harvest.Alloc(bytes, hints)
	if err != nil {
		return nil, err
	}
	x := &Copy[K]{key: object.Key, handle: h, parts: parts}
	c.moving[x.key] = x
	return x, nil
}

// start starts the transfer of a move. Copies that cannot be filled are removed from it;
// the error is why. Without any there is no transfer. mu is held.
func (c *Cache[K]) start(m *move[K], behind []device.Point) error {
	var (
		errs   []error
		refs   = make([]harvest.Ref, 0, len(m.copies))
		pieces = make([]transfer.Piece, 0, len(m.copies))
		filled = make([]*Copy[K], 0, len(m.copies))
	)
	give := func(x *Copy[K], err error) {
		delete(c.moving, x.key)
		errs = append(errs, err, c.free(x))
	}
	for _, x := range m.copies {
		err := c.o.Harvest.RegisterCallback(x.handle, func(harvest.Revocation) { c.revoked(x) })
		if err != nil {
			give(x, err)
			continue
		}
		// Without the reference the memory could be freed during the transfer.
		ref, ok := x.handle.Acquire(c.mover)
		if !ok {
			give(x, harvest.ErrRevoked)
			continue
		}
		n, at := len(filled), int64(0)
		for i, p := range x.parts {
			separate := i == 0 && n > 0 && filled[n-1].Slab() != x.Slab()
			pieces = append(pieces, transfer.Piece{Src: p, Dst: x.handle.Region().Slice(at, p.Bytes), Separate: separate})
			at += p.Bytes
		}
		refs, filled = append(refs, ref), append(filled, x)
	}
	if m.copies = filled; len(filled) == 0 {
		return errors.Join(errs...)
	}
	if err := c.submit(m, pieces, behind); err != nil {
		for i, x := range filled {
			refs[i].Release()
			give(x, err)
		}
		m.copies = nil
		return errors.Join(errs...)
	}
	for i := range refs {
		refs[i].ReleaseAt(m.done)
	}
	m.wanted = len(filled)
	c.moves = append(c.moves, m)
	return errors.Join(errs...)
}

// submit submits the transfer of a move. mu is held.
func (c *Cache[K]) submit(m *move[K], pieces []transfer.Piece, behind []device.Point) error {
	done, err := c.fences.take()
	if err != nil {
		return err
	}
	m.ticket, err = c.o.Transfer.Submit(transfer.Request{Pieces: pieces, Priority: c.o.Priority, After: behind, Done: done, DoneInOrder: true, Label: c.label(m)})
	if err != nil {
		m.ticket = nil
		c.fences.cancelTake(done)
		c.failed(m.copies[0].Device(), err)
		return err
	}
	m.done = done
	return nil
}

// label names a move in errors and traces.
func (c *Cache[K]) label(m *move[K]) fmt.Stringer {
	first := c.o.Label(m.copies[0].key)
	if n := len(m.copies); n > 1 {
		return severalLabel{first, n - 1}
	}
	return first
}

// severalLabel names a transfer of several objects by the first.
type severalLabel struct {
	first  fmt.Stringer
	others int
}

func (l severalLabel) String() string { return fmt.Sprintf("%s and %d more", l.first, l.others) }

// Drop removes the object's copies, moving or landed. Without one it does nothing.
func (c *Cache[K]) Drop(key K) error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	landed, moving := c.lookup(key)
	return errors.Join(c.drop(landed), c.drop(moving))
}

// drop removes a copy that is not needed any more; x may be nil. mu is held.
func (c *Cache[K]) drop(x *Copy[K]) error {
	if x == nil {
		return nil
	}
	c.stats.Dropped++
	return c.release(x, Dropped)
}

// release removes a copy and frees its memory. mu is held.
func (c *Cache[K]) release(x *Copy[K], reason Reason) error {
	c.remove(x, reason)
	return c.free(x)
}

// free frees a copy's memory, which may have been revoked already.
func (c *Cache[K]) free(x *Copy[K]) error {
	if err := c.o.Harvest.Free(x.handle); err != nil && !errors.Is(err, harvest.ErrRevoked) {
		return err
	}
	return nil
}

// remove makes the copy unavailable to readers. mu is held.
func (c *Cache[K]) remove(x *Copy[K], reason Reason) {
	if c.landed.get(x.key) == x {
		c.landed.remove(x.key, x)
		c.count.Add(-1)
	}
	if c.moving[x.key] == x {
		delete(c.moving, x.key)
		if x.move.wanted--; x.move.wanted == 0 {
			x.move.ticket.Cancel()
		}
	}
	c.o.Events.Removed(c.info(x, reason))
}

func (c *Cache[K]) info(x *Copy[K], reason Reason) CopyInfo[K] {
	return CopyInfo[K]{Key: x.key, Device: x.handle.Device(), Bytes: x.handle.Bytes(), Reason: reason}
}

// releasing is called when the release of a slab has begun: transfers into it end as soon as they
// can, unless they also fill copies elsewhere that stay.
func (c *Cache[K]) releasing(slab uint64) {
	c.mu.Lock()
	for _, m := range c.moves {
		in := func(x *Copy[K]) bool { return x.Slab() == slab }
		kept := func(x *Copy[K]) bool {
			available, _ := x.handle.State()
			return available && c.moving[x.key] == x
		}
		if slices.ContainsFunc(m.copies, in) && !slices.ContainsFunc(m.copies, kept) {
			m.ticket.Abort()
		}
	}
	c.mu.Unlock()
	if c.o.Releasing != nil {
		c.o.Releasing(slab)
	}
}

// revoked is harvest's callback: the handle is invalid and has no readers any more.
func (c *Cache[K]) revoked(x *Copy[K]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.has(x) {
		return // removed before
	}
	c.stats.Revoked++
	c.remove(x, Revoked)
}

// SetCost sets what losing the object's copy would cost: see harvest.Hints. Without a
// copy it does nothing.
func (c *Cache[K]) SetCost(key K, cost time.Duration) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	landed, moving := c.lookup(key)
	for _, x := range []*Copy[K]{landed, moving} {
		if x != nil {
			x.handle.SetCost(cost)
		}
	}
}

// SetUse sets what losing any of the cache's copies would cost, by how they are used: see
// harvest.Runtime.SetUse. It takes the same time whatever their number, and is the way for
// caches of many copies; those put with a Cost of their own have that in addition.
func (c *Cache[K]) SetUse(u harvest.Use) error {
	if c == nil {
		return nil
	}
	return c.o.Harvest.SetUse(c.o.Client, u)
}

// Poll makes landed copies available to readers, and removes those that failed. It never
// waits. The result is the number of moving copies.
func (c *Cache[K]) Poll() (moving int) {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.moves = slices.DeleteFunc(c.moves, func(m *move[K]) bool {
		if !m.ticket.Ended() {
			return false
		}
		c.complete(m)
		return true
	})
	return len(c.moving)
}

// complete makes the copies of a transfer that has ended available, unless it failed.
// Those that were removed meanwhile are not needed any more. mu is held.
func (c *Cache[K]) complete(m *move[K]) {
	err := m.ticket.Wait(context.Background()) // does not wait: orders what follows after the transfer
	c.fences.put(m.done)
	if err != nil && m.wanted > 0 {
		c.failed(m.copies[0].Device(), err)
	}
	for _, x := range m.copies {
		x.move, x.parts = nil, nil
		if c.moving[x.key] != x {
			continue
		}
		delete(c.moving, x.key)
		c.publish(x, err, c.o.Machine.Now()-m.began)
	}
}

// publish makes the copy, which is not moving any more, available to readers, or frees it
// if its transfer failed. mu is held.
func (c *Cache[K]) publish(x *Copy[K], err error, took time.Duration) {
	if err != nil {
		c.o.Events.Removed(c.info(x, Failed))
		c.logFreeError(c.free(x))
		return
	}
	c.peers.reset(x.handle.Device())
	c.logFreeError(c.drop(c.landed.get(x.key)))
	c.landed.put(x.key, x)
	c.landings.Add(1)
	c.count.Add(1)
	c.stats.Landed++
	c.stats.Bytes += x.handle.Bytes()
	i := c.info(x, 0)
	i.Took = took
	c.o.Events.Landed(i)
}

// logFreeError logs memory that cannot be freed, where the caller cannot return the
// error.
func (c *Cache[K]) logFreeError(err error) {
	if err != nil {
		c.o.Log.Error("peer memory not released", "client", c.o.Client, "err", err)
	}
}

// ReadFailed reports a failed transfer that read these copies, all on one peer: they are
// removed, and a failure of the peer is counted. False: the transfer had not started,
// which says nothing about the copies, and nothing changes.
func (c *Cache[K]) ReadFailed(copies []*Copy[K], err error) bool {
	if notStarted(err) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed(copies[0].Device(), err)
	for _, x := range copies {
		if c.has(x) { // otherwise it was revoked meanwhile, or removed after another read
			c.logFreeError(c.release(x, Failed))
		}
	}
	return true
}

func notStarted(err error) bool {
	return errors.Is(err, transfer.ErrCanceled) || errors.Is(err, transfer.ErrAfter)
}

// ReadSucceeded reports a successful transfer from a peer. It takes no lock that is held
// during an allocation of device memory.
func (c *Cache[K]) ReadSucceeded(peer device.Space) {
	if c != nil {
		c.peers.reset(peer)
	}
}

// failed counts a failed transfer from or to a peer, and excludes a peer that is lost or
// has reached MaxFailures. mu is held.
func (c *Cache[K]) failed(peer device.Space, err error) {
	if notStarted(err) || errors.Is(err, device.ErrClosed) {
		return
	}
	n := c.peers.add(peer)
	i := PeerInfo{Device: peer, Err: err, Excluded: errors.Is(err, device.ErrLost) || n >= c.o.MaxFailures}
	if i.Excluded {
		c.peers.reset(peer) // readmitted peers start without failures
		if excluded := c.o.Harvest.Exclude(peer, err); excluded != nil {
			i.Err = errors.Join(err, excluded)
		}
	}
	c.o.Events.PeerFailed(i)
}

// Moving lists the objects whose copies have not landed.
func (c *Cache[K]) Moving() []K {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var keys []K
	for _, m := range c.moves {
		for _, x := range m.copies {
			if c.moving[x.key] == x {
				keys = append(keys, x.key)
			}
		}
	}
	return keys
}

// Keys lists the objects that have a copy, landed or moving.
func (c *Cache[K]) Keys() []K {
	if c == nil {
		return nil
	}
	keys := c.Moving()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.landed.each(func(key K, _ *Copy[K]) { keys = append(keys, key) })
	return keys
}

// Wait waits until no copy is moving any more, and polls them.
func (c *Cache[K]) Wait(ctx context.Context) error {
	for c.Poll() > 0 {
		c.mu.Lock()
		var t *transfer.Ticket
		if i := slices.IndexFunc(c.moves, func(m *move[K]) bool { return m.wanted > 0 }); i >= 0 {
			t = c.moves[i].ticket
		}
		c.mu.Unlock()
		if t == nil {
			continue
		}
		if err := t.Wait(ctx); !t.Ended() {
			return fmt.Errorf("peercache: %w", err)
		}
	}
	return nil
}

// Stats is a snapshot.
func (c *Cache[K]) Stats() Stats {
	if c == nil {
		return Stats{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Close cancels moving copies and frees all memory. No copy is read any more. A second
// Close does nothing.
func (c *Cache[K]) Close() error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	var all []*Copy[K]
	c.landed.each(func(_ K, x *Copy[K]) { all = append(all, x) })
	var errs []error
	for _, m := range c.moves {
		for _, x := range m.copies {
			if c.moving[x.key] == x {
				all = append(all, x)
			}
		}
	}
	for _, x := range all {
		errs = append(errs, c.release(x, Closed))
	}
	for _, m := range c.moves {
		_ = m.ticket.Wait(context.Background()) // a failed transfer has ended, too
	}
	c.moves = nil
	return errors.Join(append(errs, c.fences.close())...)
}
