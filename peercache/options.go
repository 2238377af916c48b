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
	// Client is the cache's account at harvest.
	Client string
	// Reader is the GPU that copies are read from.
	Reader device.Space
	// Name names an object in errors and reports. Default: fmt's %v.
	Name func(K) string
	// Label names the copy of an object to a peer, in errors and traces. Default: Name, and
	// where it goes.
	Label func(K) fmt.Stringer
	// Noun is what an object is, in the names under which harvest reports references.
	// Default: "object".
	Noun string
	// MaxFailures of copies with one peer in a row, after which it is excluded.
	// Default: 3.
	MaxFailures int
	// Priority of the copies that fill it. Default: transfer's lowest.
	Priority transfer.Priority
	// Events is told what happens. Default: nobody.
	Events EventListener[K]
	// Log hears of memory that cannot be given back. Default: nobody.
	Log *slog.Logger
}

const defaultMaxFailures = 3

// EnsureDefaults returns o with its defaults filled in.
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

// Validate reports the first option that makes no sense.
func (o Options[K]) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("peercache: Options.Machine is not set")
	case o.Harvest == nil:
		return errors.New("peercache: Options.Harvest is not set")
	case o.Transfer == nil:
		return errors.New("peercache: Options.Transfer is not set")
	case o.MaxFailures < 0:
		return fmt.Errorf("peercache: a peer is excluded after %d failures; it must be at least one", o.MaxFailures)
	}
	return nil
}

// PutOptions say where a copy should go.
type PutOptions[K comparable] struct {
	// Peers are the only ones to be used. Default: all.
	Peers []device.Space
	// Cost of losing the copy: see harvest.Hints.
	Cost time.Duration
	// After names objects that this one is read together with, the best first: the place
	// right behind the first of them that has a copy is asked for. Default: none.
	After iter.Seq[K]
}

// Reason is why a copy has gone.
type Reason uint8

// The reasons.
const (
	Dropped Reason = iota
	// Revoked by harvest.
	Revoked
	// Failed: a copy to it or from it.
	Failed
	// Closed with the cache.
	Closed
)

func (r Reason) String() string {
	return [...]string{"dropped", "revoked", "copy failed", "closed"}[r]
}

// CopyInfo is a copy that has come or gone.
type CopyInfo[K comparable] struct {
	Key    K
	Device device.Space
	Bytes  int64
	// Took is the time from Put to the Settle that saw the copy's end, where it has come.
	Took time.Duration
	// Why it has gone.
	Why Reason
}

// PeerInfo is a peer whose copies failed.
type PeerInfo struct {
	Device device.Space
	Err    error
	// Excluded says that nothing is copied to it or read from it any more.
	Excluded bool
}

// EventListener is told what happens to copies. Any func may be nil. They are called
// from several goroutines, must be quick, and must not call the cache.
type EventListener[K comparable] struct {
	// Landed: Acquire finds the copy from now on. Gone: it does not any more.
	Landed, Gone func(CopyInfo[K])
	// PeerFailed: a copy from or to a peer failed.
	PeerFailed func(PeerInfo)
}

// EnsureDefaults returns l with funcs that do nothing where it has none.
func (l EventListener[K]) EnsureDefaults() EventListener[K] {
	if l.Landed == nil {
		l.Landed = func(CopyInfo[K]) {}
	}
	if l.Gone == nil {
		l.Gone = func(CopyInfo[K]) {}
	}
	if l.PeerFailed == nil {
		l.PeerFailed = func(PeerInfo) {}
	}
	return l
}
