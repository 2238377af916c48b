package harvest

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/residency"
)

// Holder is who takes references, by a name that stands in the report when
// references are held for too long. One Holder serves any number of goroutines.
type Holder struct{ name string }

// NewHolder makes a holder: "expert fetch", say.
func NewHolder(name string) *Holder { return &Holder{name: name} }

var unnamed = NewHolder("unnamed")

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
	slab   *slab

	cell  residency.Cell
	cost  atomic.Int64  // nanoseconds
	clock *atomic.Int64 // the runtime's, nanoseconds
	holds [maxHolds]hold

	mu   sync.Mutex
	left []departure
	look int // with how many of them it is looked which are over

	// Guarded by Runtime.mu.
	runtime  *Runtime
	off      int64
	state    handleState
	callback func(Revocation)
	// ex is held in every state but live and ended. It belongs to the goroutine in
	// Free, then to who holds Runtime.run.
	ex      residency.Exclusive
	freedAt time.Duration
	// reported says that a violation was.
	reported bool
}

// maxHolds is how many references of one handle are known by name at a time.
const maxHolds = 4

// hold is one reference that is out. since is under 0 while the slot is changing
// hands.
type hold struct {
	by    atomic.Pointer[Holder]
	since atomic.Int64
}

// departure is a holder who has given its reference back for some later point.
type departure struct {
	by    *Holder
	at    time.Duration
	point device.Point
}

type handleState uint8

const (
	live     handleState = iota
	freeing              // by Free, draining
	revoking             // draining
	freed
	revoked
)

// ID is unique within the runtime, from 1.
func (h *Handle) ID() uint64 { return h.id }

// Device is the peer's memory in which it lies.
func (h *Handle) Device() device.Space { return h.r.Space }

// Region is where it lies. It may be touched only under a reference.
func (h *Handle) Region() device.Region { return h.r }

// Slab is the number of the piece of borrowed memory that it is part of. Two pieces may
// lie side by side; a copy must not reach from one into the other all the same.
func (h *Handle) Slab() uint64 { return h.slab.id }

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
func (h *Handle) Acquire(by *Holder) (Ref, bool) {
	if h == nil {
		return Ref{}, false
	}
	ref, ok := h.cell.Acquire()
	if !ok {
		return Ref{}, false
	}
	if by == nil {
		by = unnamed
	}
	r := Ref{h: h, ref: ref, by: by, slot: -1}
	for i := range h.holds {
		s := &h.holds[i]
		if s.by.Load() == nil && s.by.CompareAndSwap(nil, by) {
			s.since.Store(h.clock.Load())
			r.slot = i
			break
		}
	}
	return r, true
}

// State is a snapshot: whether Acquire would succeed, and how many references are
// out.
func (h *Handle) State() (available bool, references int) {
	_, available, references = h.cell.State()
	return available, references
}

// Ref is a reference on a handle's memory. It is given back once, through the
// variable that holds it.
type Ref struct {
	h    *Handle
	ref  residency.Ref
	by   *Holder
	slot int
}

// Handle is what it refers to.
func (r *Ref) Handle() *Handle { return r.h }

// Held reports whether it has not been given back.
func (r *Ref) Held() bool { return r.ref.Held() }

// Release gives the reference back: nothing of the holder touches the memory any
// more, and the host knows.
func (r *Ref) Release() {
	r.depart()
	r.ref.Release()
}

// ReleaseAt gives the reference back now, and what the holder has enqueued may
// touch the memory until p. p must be reached in the end, by Raise or by Fail, and
// only once nothing of the holder touches the memory any more; its fence must not
// be closed before.
func (r *Ref) ReleaseAt(p device.Point) {
	if h := r.h; r.ref.Held() {
		h.mu.Lock()
		h.left = later(h.left, departure{r.by, time.Duration(h.clock.Load()), p})
		var all []departure
		if len(h.left) >= max(h.look, fewDepartures) {
			all = slices.Clone(h.left)
		}
		h.mu.Unlock()
		if all != nil {
			h.forget(all)
		}
	}
	r.depart()
	r.ref.ReleaseAt(p)
}

func (r *Ref) depart() {
	if r.slot < 0 || !r.ref.Held() {
		return
	}
	s := &r.h.holds[r.slot]
	r.slot = -1
	s.since.Store(math.MinInt64)
	s.by.Store(nil)
}

// fewDepartures are kept whether or not they are over.
const fewDepartures = 16

// forget drops those of the departures that are over, so that a handle that is read for
// long does not keep one for every fence there ever was.
func (h *Handle) forget(all []departure) {
	var over []departure
	for _, d := range all {
		if ok, _ := reached(d.point); ok {
			over = append(over, d)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.left = slices.DeleteFunc(h.left, func(d departure) bool { return slices.Contains(over, d) })
	h.look = 2 * len(h.left)
}

// later keeps one departure for each fence: the one with the last point.
func later(left []departure, d departure) []departure {
	for i := range left {
		if left[i].point.Fence == d.point.Fence {
			if d.point.After(left[i].point) {
				left[i] = d
			}
			return left
		}
	}
	return append(left, d)
}

// reached says whether p is, without waiting. The error is that of the work behind
// it. A virtual machine may take the question as a poll and run work.
func reached(p device.Point) (bool, error) {
	if !p.Reached() {
		return false, nil
	}
	// It is reached, so this does not wait: it learns of a failure, and orders what
	// comes next after the work.
	return true, p.Await(background)
}

// drained says whether nobody refers to the handle any more and everything its
// holders had enqueued is over; failed is the error of such work. The caller owns
// h.ex and does not hold Runtime.mu.
func (h *Handle) drained() (ok bool, failed error) {
	if _, _, n := h.cell.State(); n > 0 {
		return false, nil
	}
	for _, p := range h.ex.Points() {
		if h.runtime.without.noDrain {
			break
		}
		ok, err := reached(p)
		if !ok {
			return false, nil
		}
		if failed == nil {
			failed = err
		}
	}
	return true, failed
}

// holders says who keeps the handle from being drained, and for how long.
func (h *Handle) holders(now time.Duration) []Holding {
	var hs []Holding
	_, _, n := h.cell.State()
	for i := range h.holds {
		by, since := h.holds[i].by.Load(), time.Duration(h.holds[i].since.Load())
		if by == nil {
			continue
		}
		if since < 0 { // it was taken, or given back, this very moment
			since = now
		}
		hs = append(hs, Holding{Holder: by.name, For: now - since})
	}
	for len(hs) < n {
		hs = append(hs, Holding{Holder: "one of more than can be named"})
	}
	h.mu.Lock()
	left := append([]departure(nil), h.left...)
	h.mu.Unlock()
	for _, d := range left {
		if ok, _ := reached(d.point); !ok {
			hs = append(hs, Holding{Holder: d.by.name, For: now - d.at, Work: true})
		}
	}
	return hs
}
