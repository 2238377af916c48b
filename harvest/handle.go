package harvest

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/lease"
)

// Handle is one allocation of borrowed memory. It comes from Runtime.Alloc and ends in
// exactly one of two ways: Runtime.Free returns nil, or it is revoked and its callback,
// if it has one, runs once. Handles are not reused: Acquire of an ended one fails.
//
// Its content is undefined until the client has filled it. Every copy into or out of the
// memory must hold a reference: that is how harvest knows of it.
type Handle struct {
	id     uint64
	r      device.Region
	client string
	label  string

	cost    atomic.Int64 // nanoseconds; negative once the handle has ended
	readers readers
	// account belongs to the controller.
	account allocation
}

// ID is unique within the runtime, from 1.
func (h *Handle) ID() uint64 { return h.id }

// Device is the peer's memory.
func (h *Handle) Device() device.Space { return h.r.Space }

// Region of the memory. It may be accessed only under a reference.
func (h *Handle) Region() device.Region { return h.r }

// Slab is the number of its slab. Slabs may be adjacent, but are separate allocations:
// one copy must not span two of them.
func (h *Handle) Slab() uint64 { return h.account.slab.id }

// Bytes is the requested size.
func (h *Handle) Bytes() int64 { return h.r.Bytes }

// Client that it was allocated for, see Hints.
func (h *Handle) Client() string { return h.client }

func (h *Handle) String() string {
	return fmt.Sprintf("handle %d (%s, %d bytes on %s)", h.id, h.label, h.r.Bytes, h.r.Space)
}

// Cost of losing the handle, see Hints.Cost; 0 once it has ended.
func (h *Handle) Cost() time.Duration { return max(time.Duration(h.cost.Load()), 0) }

// SetCost sets the cost of losing the handle. It takes no lock.
func (h *Handle) SetCost(d time.Duration) {
	cost := int64(min(max(d, 0), maxCost))
	for {
		old := h.cost.Load()
		if old < 0 {
			return
		}
		if h.cost.CompareAndSwap(old, cost) {
			h.account.slab.cost.Add(cost - old)
			return
		}
	}
}

// endCost takes the cost of an ended handle out of its slab's.
func (h *Handle) endCost() { h.account.slab.cost.Add(-max(h.cost.Swap(-1), 0)) }

// CountUse counts a use of the memory by its client: see Runtime.SetUse. It takes no lock.
func (h *Handle) CountUse() { h.account.slab.use.count.Add(1) }

// Acquire takes a reference for an owner (nil: unnamed): the memory stays valid while the
// reference is held, and until the fence value at which it is released. It fails for the
// nil Handle, and once the handle is freed or revoked, or is being so. It does not block,
// take locks or allocate.
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

// State is a snapshot: whether Acquire would succeed, and the number of references.
func (h *Handle) State() (available bool, references int) {
	_, available, references = h.readers.cell.State()
	return available, references
}

// Ref is a reference on a handle's memory. It is released once, through the variable that
// holds it.
type Ref struct {
	h     *Handle
	ref   lease.Ref
	owner *Owner
	slot  int
}

// Handle that it refers to.
func (r *Ref) Handle() *Handle { return r.h }

// Held reports whether the reference has not been released.
func (r *Ref) Held() bool { return r.ref.Held() }

// Release releases the reference: no work of the owner accesses the memory any more, and
// the host knows.
func (r *Ref) Release() {
	r.releaseHold()
	r.ref.Release()
}

// ReleaseAt releases the reference now; work that the owner has enqueued may access the
// memory until p. p must eventually be signaled or failed, and only after that work has
// ended; its fence must not be closed before.
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
