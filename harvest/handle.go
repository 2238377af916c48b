package harvest

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/lease"
)

// Handle is one piece of borrowed memory. It comes from Runtime.Alloc and ends in
// exactly one of two ways: Runtime.Free returns nil, or it is revoked, and its
// callback, if it has one, runs once. A Handle is never used for anything else
// afterwards, so one that is kept too long does no harm: Acquire fails.
//
// Its content is undefined until whoever allocated it has filled it. Harvest knows
// of copies into the memory and out of it only by the references that their makers
// hold meanwhile.
type Handle struct {
	id     uint64
	r      device.Region
	client string
	label  string

	cost    atomic.Int64 // nanoseconds
	readers readers
	// account is the controller's.
	account allocation
}

// ID is unique within the runtime, from 1.
func (h *Handle) ID() uint64 { return h.id }

// Device is the peer's memory in which it lies.
func (h *Handle) Device() device.Space { return h.r.Space }

// Region is where it lies. It may be touched only under a reference.
func (h *Handle) Region() device.Region { return h.r }

// Slab is the number of the piece of borrowed memory that it is part of. Two pieces may
// lie side by side; a copy must not reach from one into the other all the same.
func (h *Handle) Slab() uint64 { return h.account.slab.id }

// Bytes is its size as asked for.
func (h *Handle) Bytes() int64 { return h.r.Bytes }

// Client is whose it is, see Hints.
func (h *Handle) Client() string { return h.client }

func (h *Handle) String() string {
	return fmt.Sprintf("handle %d (%s, %d bytes on %s)", h.id, h.label, h.r.Bytes, h.r.Space)
}

// Cost is what losing the handle costs its client, see Hints.Cost.
func (h *Handle) Cost() time.Duration { return time.Duration(h.cost.Load()) }

// SetCost changes what losing the handle would cost, as use changes.
func (h *Handle) SetCost(d time.Duration) { h.cost.Store(int64(max(d, 0))) }

// Acquire takes a reference in the name of by (nil: unnamed): while it is held, or
// until the point at which it is given back, the memory stays. It fails once the
// handle is freed, revoked or about to be, and for the nil Handle. It neither
// blocks, locks nor allocates.
func (h *Handle) Acquire(by *Owner) (Ref, bool) {
	if h == nil {
		return Ref{}, false
	}
	if by == nil {
		by = unnamed
	}
	ref, slot, ok := h.readers.acquire(by)
	if !ok {
		return Ref{}, false
	}
	return Ref{h: h, ref: ref, owner: by, slot: slot}, true
}

// State is a snapshot: whether Acquire would succeed, and how many references are
// out.
func (h *Handle) State() (available bool, references int) {
	_, available, references = h.readers.cell.State()
	return available, references
}

// Ref is a reference on a handle's memory. It is given back once, through the
// variable that holds it.
type Ref struct {
	h     *Handle
	ref   lease.Ref
	owner *Owner
	slot  int
}

// Handle is what it refers to.
func (r *Ref) Handle() *Handle { return r.h }

// Held reports whether it has not been given back.
func (r *Ref) Held() bool { return r.ref.Held() }

// Release gives the reference back: nothing of the holder touches the memory any
// more, and the host knows.
func (r *Ref) Release() {
	r.releaseHold()
	r.ref.Release()
}

// ReleaseAt gives the reference back now, and what the holder has enqueued may
// touch the memory until p. p must be reached in the end, by Raise or by Fail, and
// only once nothing of the holder touches the memory any more; its fence must not
// be closed before.
func (r *Ref) ReleaseAt(p device.Point) {
	if r.ref.Held() {
		r.h.readers.recordRelease(r.owner, p)
	}
	r.releaseHold()
	r.ref.ReleaseAt(p)
}

func (r *Ref) releaseHold() {
	if r.ref.Held() {
		r.h.readers.releaseHold(r.slot)
		r.slot = -1
	}
}
