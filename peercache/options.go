package peercache

import (
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/transfer"
)

// Options describe a cache.
type Options[K comparable] struct {
	Machine device.Machine
	// Harvest lends the memory. It is closed before the cache.
	Harvest *harvest.Runtime
	// Transfer makes the copies.
	Transfer *transfer.Engine
	// Client is the cache's client name in harvest.
	Client string
	// Reader is the memory of the GPU that reads the copies.
	Reader device.Space
	// Name names an object in errors and reports. Default: fmt's %v.
	Name func(K) string
	// Label names the copy of an object to a peer, in errors and traces. Default: Name and
	// the destination.
	Label func(K) fmt.Stringer
	// Noun is the kind of object, for the names under which harvest reports references.
	// Default: "object".
	Noun string
	// MaxFailures is the number of consecutive failed transfers from or to a peer after
	// which it is excluded. Default: 3.
	MaxFailures int
	// Priority of the transfers to peers. Default: transfer's lowest.
	Priority transfer.Priority
	// Releasing is called, from a goroutine that ticks harvest, when a slab with copies begins to be
	// released: reads of its copies that have not begun had better go elsewhere. It must not block.
	// Default: none.
	Releasing func(slab uint64)
	// Events receives what happens to copies. Default: none.
	Events EventListener[K]
	// Log of memory that cannot be freed. Default: discarded.
	Log *slog.Logger
}

const defaultMaxFailures = 3

// EnsureDefaults returns o with its defaults set.
func (o Options[K]) EnsureDefaults() Options[K] {
	if o.Name == nil {
		o.Name = func(key K) string { return fmt.Sprint(key) }
	}
	if o.Label == nil {
		name := o.Name
		o.Label = func(key K) fmt.Stringer { return transfer.Text(name(key) + " to peer") }
	}
	if o.Noun == "" {
		o.Noun = "object"
	}
	if o.MaxFailures == 0 {
		o.MaxFailures = defaultMaxFailures
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Events = o.Events.EnsureDefaults()
	return o
}

// Validate reports the first invalid option.
func (o Options[K]) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("peercache: Options.Machine is not set")
	case o.Harvest == nil:
		return errors.New("peercache: Options.Harvest is not set")
	case o.Transfer == nil:
		return errors.New("peercache: Options.Transfer is not set")
	case o.MaxFailures < 0:
		return fmt.Errorf("peercache: invalid MaxFailures %d: must be at least 1", o.MaxFailures)
	}
	return nil
}

// PutOptions say which peers may hold a copy, and what it is worth.
type PutOptions[K comparable] struct {
	// Peers that may be used. Default: all.
	Peers []device.Space
	// Cost of losing the copy: see harvest.Hints. Leave it 0 with Cache.SetUse.
	Cost time.Duration
	// Move: the object may have a copy already, which is removed once the new one has
	// landed.
	Move bool
	// After yields objects that this one is read together with, the best first: the
	// memory right behind the copy of the first of them that has one is requested.
	// Default: none.
	After iter.Seq[K]
	// Behind are fence values that must be reached before the object is read. If one
	// fails, so does the copy. Default: none.
	Behind []device.Point
}

// Reason is why a copy was removed.
type Reason uint8

// The reasons.
const (
	Dropped Reason = iota
	// Revoked by harvest.
	Revoked
	// Failed: a transfer to or from the copy.
	Failed
	// Closed with the cache.
	Closed
)

func (r Reason) String() string {
	return [...]string{"dropped", "revoked", "copy failed", "closed"}[r]
}

// CopyInfo is a copy that has landed or was removed.
type CopyInfo[K comparable] struct {
	Key    K
	Device device.Space
	Bytes  int64
	// Took is the time from Put to the Poll that found the copy landed.
	Took time.Duration
	// Reason of a removal.
	Reason Reason
}

// PeerInfo is a peer with a failed transfer.
type PeerInfo struct {
	Device device.Space
	Err    error
	// Excluded: nothing is copied to the peer or read from it any more.
	Excluded bool
}

// EventListener receives what happens to copies. Any func may be nil. Funcs are called
// from several goroutines, must be quick, and must not call the cache.
type EventListener[K comparable] struct {
	// Landed: Acquire finds the copy from now on. Removed: Acquire does not find it any
	// more.
	Landed, Removed func(CopyInfo[K])
	// PeerFailed: a transfer from or to a peer failed.
	PeerFailed func(PeerInfo)
}

// EnsureDefaults returns l with a no-op for each func that is nil.
func (l EventListener[K]) EnsureDefaults() EventListener[K] {
	if l.Landed == nil {
		l.Landed = func(CopyInfo[K]) {}
	}
	if l.Removed == nil {
		l.Removed = func(CopyInfo[K]) {}
	}
	if l.PeerFailed == nil {
		l.PeerFailed = func(PeerInfo) {}
	}
	return l
}
