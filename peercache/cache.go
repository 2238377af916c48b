package peercache

import (
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

// ErrBusy: the object is there already, or on its way.
var ErrBusy = errors.New("it is there already, or on its way")

// Cache keeps copies in peers' memory. Its methods may be called from any goroutine. The
// nil Cache, of a client to whom nobody lends, has nothing and takes nothing.
//
// # Locks
//
// mu guards what is moving and the counts, and writes to landed. It may be held while a
// device is asked for memory, so who is in a hurry takes none: Acquire reads landed and
// takes a reference on the handle's own state word. Harvest calls back without locks of
// its own; callbacks take mu only.
type Cache[K comparable] struct {
	o Options[K]
	// reader and mover are in whose name references are taken.
	reader, mover *harvest.Owner
	// landed are the copies that Acquire finds.
	landed *index[K, Copy[K]]
	peers  failures

	mu     sync.Mutex
	closed bool
	// moving copies have not landed; ending ones were given up, and their transfers are
	// not seen to have ended.
	moving, ending []*Copy[K]
	fences         fences
	stats          Stats
}

// Stats count copies since New.
type Stats struct {
	// Landed copies came to a peer's memory; Dropped and Revoked ones have left it, or
	// were on their way.
	Landed, Dropped, Revoked int64
	// Bytes of the copies that landed.
	Bytes int64
}

// Copy is the copy of an object in a peer's memory. One that has gone harms nobody: it
// can no longer be acquired.
type Copy[K comparable] struct {
	key    K
	handle *harvest.Handle
	began  time.Duration
	// ticket of the transfer that fills it, which done follows.
	ticket *transfer.Ticket
	done   device.Point
}

// Key is the object's.
func (c *Copy[K]) Key() K { return c.key }

// Device is the peer's memory in which it lies.
func (c *Copy[K]) Device() device.Space { return c.handle.Device() }

// Region is where it lies. It may be read only under a reference.
func (c *Copy[K]) Region() device.Region { return c.handle.Region() }

// Slab is the number of the piece of borrowed memory that it is part of: see
// harvest.Handle.
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
		fences: fences{machine: o.Machine, name: o.Noun + " moved"},
	}, nil
}

// Acquire returns the object's copy with a reference on it: while that is held, or until
// the point at which it is given back, the copy stays. False: there is none, or it is
// about to go.
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

// Find returns the object's copy, or nil where none has landed.
func (c *Cache[K]) Find(key K) *Copy[K] {
	if c == nil {
		return nil
	}
	return c.landed.get(key)
}

// of is the object's copy, landed or on its way. mu is held.
func (c *Cache[K]) of(key K) *Copy[K] {
	if x := c.landed.get(key); x != nil {
		return x
	}
	if i := slices.IndexFunc(c.moving, func(x *Copy[K]) bool { return x.key == key }); i >= 0 {
		return c.moving[i]
	}
	return nil
}

// Put begins to copy an object's bytes to the memory of a peer, and returns at once. src
// is not written until the copy has landed or failed. An error wraps
// harvest.ErrNoCapacity, ErrQuota, ErrRate or ErrClosed where harvest has no room for it,
// or ErrBusy.
func (c *Cache[K]) Put(key K, src device.Region, o PutOptions[K]) error {
	if c == nil {
		return fmt.Errorf("nobody lends memory: %w", harvest.ErrNoCapacity)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return harvest.ErrClosed
	case c.of(key) != nil:
		return ErrBusy
	}
	hints := harvest.Hints{Client: c.o.Client, Label: c.o.Name(key), Peers: o.Peers, Reader: c.o.Reader, Cost: o.Cost}
	if o.After != nil {
		for before := range o.After {
			if x := c.of(before); x != nil {
				hints.After = x.handle
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
	// Without the reference the memory could be given back under the transfer.
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
		c.fences.unused(done)
		ref.Release()
		c.failed(x.handle.Device(), err)
		return err
	}
	ref.ReleaseAt(done)
	return nil
}

// Drop gives the object's copy up, or one that is on its way. It is no error where there
// is none.
func (c *Cache[K]) Drop(key K) error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.of(key)
	if x == nil {
		return nil
	}
	c.stats.Dropped++
	return c.giveBack(x, Dropped)
}

// giveBack gives a copy up. mu is held.
func (c *Cache[K]) giveBack(x *Copy[K], why Reason) error {
	c.unlist(x, why)
	return c.free(x)
}

// free gives a copy's memory back, which may be gone already.
func (c *Cache[K]) free(x *Copy[K]) error {
	if err := c.o.Harvest.Free(x.handle); err != nil && !errors.Is(err, harvest.ErrRevoked) {
		return err
	}
	return nil
}

// unlist lets nobody find the copy any more. mu is held.
func (c *Cache[K]) unlist(x *Copy[K], why Reason) {
	c.landed.remove(x.key, x)
	if i := slices.Index(c.moving, x); i >= 0 {
		c.moving = slices.Delete(c.moving, i, i+1)
		c.ending = append(c.ending, x)
		x.ticket.Cancel()
	}
	c.o.Events.Gone(c.info(x, why))
}

func (c *Cache[K]) info(x *Copy[K], why Reason) CopyInfo[K] {
	return CopyInfo[K]{Key: x.key, Device: x.handle.Device(), Bytes: x.handle.Bytes(), Why: why}
}

// revoked is harvest's callback: the memory is gone, and so are its readers.
func (c *Cache[K]) revoked(x *Copy[K]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of(x.key) != x {
		return // it was given up before
	}
	c.stats.Revoked++
	c.unlist(x, Revoked)
}

// SetCost says what losing the object's copy would cost: see harvest.Hints. It does
// nothing where there is none.
func (c *Cache[K]) SetCost(key K, cost time.Duration) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x := c.of(key); x != nil {
		x.handle.SetCost(cost)
	}
}

// Poll takes in the copies that have landed, and forgets those that failed. It never
// waits. The result is how many are on their way.
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
		c.land(x, c.end(x))
		return true
	})
	c.ending = slices.DeleteFunc(c.ending, func(x *Copy[K]) bool {
		if !x.ticket.Ended() {
			return false
		}
		_ = c.end(x) // nobody wants it any more
		return true
	})
	return len(c.moving)
}

// end takes the result of a transfer that has ended.
func (c *Cache[K]) end(x *Copy[K]) error {
	err := x.ticket.Wait(context.Background()) // does not wait: it orders what comes next after the transfer
	c.fences.put(x.done)
	return err
}

// land lets the copy be found, or gives it up where its transfer has failed. mu is held.
func (c *Cache[K]) land(x *Copy[K], err error) {
	if err != nil {
		c.failed(x.handle.Device(), err)
		c.o.Events.Gone(c.info(x, Failed))
		c.tell(c.free(x))
		return
	}
	c.peers.worked(x.handle.Device())
	c.landed.put(x.key, x)
	c.stats.Landed++
	c.stats.Bytes += x.handle.Bytes()
	i := c.info(x, 0)
	i.Took = c.o.Machine.Now() - x.began
	c.o.Events.Landed(i)
}

// tell logs memory that cannot be given back, where nobody can be told of it otherwise.
func (c *Cache[K]) tell(err error) {
	if err != nil {
		c.o.Log.Error("peer memory not released", "client", c.o.Client, "err", err)
	}
}

// ReadFailed says that a transfer that has read these copies, all of one peer, has
// failed: they are given up, and it counts as a failure of the peer. False: the transfer
// never began, so nothing is known of them, and nothing happens.
func (c *Cache[K]) ReadFailed(copies []*Copy[K], err error) bool {
	if neverBegan(err) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed(copies[0].Device(), err)
	for _, x := range copies {
		if c.of(x.key) == x { // else it was revoked meanwhile, or belongs to two reads
			c.tell(c.giveBack(x, Failed))
		}
	}
	return true
}

func neverBegan(err error) bool {
	return errors.Is(err, transfer.ErrCanceled) || errors.Is(err, transfer.ErrAfter)
}

// ReadWorked says that a transfer from a peer has succeeded. It takes no lock that is
// held while a device is asked for memory.
func (c *Cache[K]) ReadWorked(peer device.Space) {
	if c != nil {
		c.peers.worked(peer)
	}
}

// failed counts a failure of transfers with a peer and excludes the peer where there is
// no hope. mu is held.
func (c *Cache[K]) failed(peer device.Space, err error) {
	if neverBegan(err) || errors.Is(err, device.ErrClosed) {
		return
	}
	n := c.peers.failed(peer)
	i := PeerInfo{Device: peer, Err: err, Excluded: errors.Is(err, device.ErrLost) || n >= c.o.MaxFailures}
	if i.Excluded {
		c.peers.worked(peer) // it begins anew when it is tried again
		if excluded := c.o.Harvest.Exclude(peer, err); excluded != nil {
			i.Err = errors.Join(err, excluded)
		}
	}
	c.o.Events.PeerFailed(i)
}

// Moving lists the objects whose copies are on their way.
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

// Wait waits until no copy is on its way any more, and settles them.
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

// Close ends what is on its way and gives everything back. Nobody reads a copy any more.
// A second Close does nothing.
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
		errs = append(errs, c.giveBack(x, Closed))
	}
	for _, x := range c.ending {
		_ = x.ticket.Wait(context.Background()) // a transfer that failed is over, too
	}
	c.ending = nil
	return errors.Join(append(errs, c.fences.close())...)
}
