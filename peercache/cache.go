package peercache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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

	mu     sync.Mutex
	closed bool
	// moving copies have not landed; canceled ones were removed before, and their
	// transfers are not known to have ended.
	moving, canceled []*Copy[K]
	fences           fencePool
	stats            Stats
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
	began  time.Duration
	// ticket of the transfer that fills the copy, and its Done.
	ticket *transfer.Ticket
	done   device.Point
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
	return &Cache[K]{
		o: o, reader: harvest.NewOwner(o.Noun + " fetch"), mover: harvest.NewOwner(o.Noun + " move"),
		landed: newIndex[K, Copy[K]](),
		fences: fencePool{machine: o.Machine, name: o.Noun + " moved"},
	}, nil
}

// Acquire returns the object's copy with a reference on it: the copy stays while the
// reference is held, and until the fence value at which it is released. False: there is
// none, or it is being removed.
func (c *Cache[K]) Acquire(key K) (*Copy[K], harvest.Ref, bool) {
	if c == nil {
		return nil, harvest.Ref{}, false
	}
	x := c.landed.get(key)
	if x == nil {
		return nil, harvest.Ref{}, false
	}
	ref, ok := x.handle.Acquire(c.reader)
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
func (c *Cache[K]) lookup(key K) (landed, moving *Copy[K]) {
	if i := slices.IndexFunc(c.moving, func(x *Copy[K]) bool { return x.key == key }); i >= 0 {
		moving = c.moving[i]
	}
	return c.landed.get(key), moving
}

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
	if c == nil {
		return fmt.Errorf("no peer memory is configured: %w", harvest.ErrNoCapacity)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch landed, moving := c.lookup(key); {
	case c.closed:
		return harvest.ErrClosed
	case moving != nil || landed != nil && !o.Move:
		return ErrBusy
	}
	hints := harvest.Hints{Client: c.o.Client, Label: c.o.Name(key), Peers: o.Peers, Reader: c.o.Reader, Cost: o.Cost}
	if o.After != nil {
		for before := range o.After {
			if landed, moving := c.lookup(before); landed != nil || moving != nil {
				hints.After = cmp.Or(moving, landed).handle
				break
			}
		}
	}
	h, err := c.o.Harvest.Alloc(src.Bytes, hints)
	if err != nil {
		return err
	}
	x := &Copy[K]{key: key, handle: h, began: c.o.Machine.Now()}
	if err := c.fill(x, src); err != nil {
		return errors.Join(err, c.free(x))
	}
	c.moving = append(c.moving, x)
	return nil
}

// fill starts the transfer. mu is held.
func (c *Cache[K]) fill(x *Copy[K], src device.Region) error {
	if err := c.o.Harvest.RegisterCallback(x.handle, func(harvest.Revocation) { c.revoked(x) }); err != nil {
		return err
	}
	// Without the reference the memory could be freed during the transfer.
	ref, ok := x.handle.Acquire(c.mover)
	if !ok {
		return harvest.ErrRevoked
	}
	done, err := c.fences.take()
	if err != nil {
		ref.Release()
		return err
	}
	x.done = done
	x.ticket, err = c.o.Transfer.Submit(transfer.Request{
		Src: src, Dst: x.handle.Region(),
		Priority: c.o.Priority, Done: done, Label: c.o.Label(x.key),
	})
	if err != nil {
		c.fences.cancelTake(done)
		ref.Release()
		c.failed(x.handle.Device(), err)
		return err
	}
	ref.ReleaseAt(done)
	return nil
}

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
	c.landed.remove(x.key, x)
	if i := slices.Index(c.moving, x); i >= 0 {
		c.moving = slices.Delete(c.moving, i, i+1)
		c.canceled = append(c.canceled, x)
		x.ticket.Cancel()
	}
	c.o.Events.Removed(c.info(x, reason))
}

func (c *Cache[K]) info(x *Copy[K], reason Reason) CopyInfo[K] {
	return CopyInfo[K]{Key: x.key, Device: x.handle.Device(), Bytes: x.handle.Bytes(), Reason: reason}
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

// Poll makes landed copies available to readers, and removes those that failed. It never
// waits. The result is the number of moving copies.
func (c *Cache[K]) Poll() (moving int) {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.moving = slices.DeleteFunc(c.moving, func(x *Copy[K]) bool {
		if !x.ticket.Ended() {
			return false
		}
		c.publish(x, c.complete(x))
		return true
	})
	c.canceled = slices.DeleteFunc(c.canceled, func(x *Copy[K]) bool {
		if !x.ticket.Ended() {
			return false
		}
		_ = c.complete(x) // not needed any more
		return true
	})
	return len(c.moving)
}

// complete returns the result of a transfer that has ended.
func (c *Cache[K]) complete(x *Copy[K]) error {
	err := x.ticket.Wait(context.Background()) // does not wait: orders what follows after the transfer
	c.fences.put(x.done)
	return err
}

// publish makes the copy available to readers, or removes it if its transfer failed. mu
// is held.
func (c *Cache[K]) publish(x *Copy[K], err error) {
	if err != nil {
		c.failed(x.handle.Device(), err)
		c.o.Events.Removed(c.info(x, Failed))
		c.logFreeError(c.free(x))
		return
	}
	c.peers.reset(x.handle.Device())
	c.logFreeError(c.drop(c.landed.get(x.key)))
	c.landed.put(x.key, x)
	c.stats.Landed++
	c.stats.Bytes += x.handle.Bytes()
	i := c.info(x, 0)
	i.Took = c.o.Machine.Now() - x.began
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
	keys := make([]K, len(c.moving))
	for i, x := range c.moving {
		keys[i] = x.key
	}
	return keys
}

// Wait waits until no copy is moving any more, and polls them.
func (c *Cache[K]) Wait(ctx context.Context) error {
	for c.Poll() > 0 {
		c.mu.Lock()
		var t *transfer.Ticket
		if len(c.moving) > 0 {
			t = c.moving[0].ticket
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
	for _, x := range append(all, c.moving...) {
		errs = append(errs, c.release(x, Closed))
	}
	for _, x := range c.canceled {
		_ = x.ticket.Wait(context.Background()) // a failed transfer has ended, too
	}
	c.canceled = nil
	return errors.Join(append(errs, c.fences.close())...)
}
