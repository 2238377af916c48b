package harvest

import (
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/lease"
)

// Owner is who takes references, by a name that stands in the report when
// references are held for too long. One Holder serves any number of goroutines.
type Owner struct{ name string }

// NewOwner makes a holder: "expert fetch", say.
func NewOwner(name string) *Owner { return &Owner{name: name} }

var unnamed = NewOwner("unnamed")

// readers are those who use a handle's memory: how many, who, since when, and until
// when work that they have enqueued does. Taking and giving back a reference changes the
// cell's state word and at most one hold, without a lock.
type readers struct {
	cell  lease.Cell
	clock *timeline // the runtime's
	holds [maxHolds]hold
	// ex is held from refuse to invalidate. It belongs to the goroutine in Runtime.Free,
	// then to the one that ticks.
	ex lease.Exclusive

	mu   sync.Mutex
	left []departure
	look int // with how many of them it is looked which are over
}

// maxHolds is how many references of one handle are known by name at a time.
const maxHolds = 4

// hold is one reference that is out. since is under 0 while the slot is changing
// hands.
type hold struct {
	by    atomic.Pointer[Owner]
	since atomic.Int64
}

// departure is a holder who has given its reference back for some later point.
type departure struct {
	by    *Owner
	at    time.Duration
	point device.Point
}

// admit lets readers in.
func (r *readers) admit(clock *timeline) {
	r.clock = clock
	ex, _ := r.cell.BeginExclusive() // nobody else knows of the handle
	ex.Replace()
}

// refuse lets no new readers in.
func (r *readers) refuse() { r.ex, _ = r.cell.BeginExclusive() } // only one ends a handle

// invalidate ends what refuse began. There are no readers any more.
func (r *readers) invalidate() { r.ex.Invalidate() }

// acquire takes a reference, and the number of the hold that names it, -1 for none.
func (r *readers) acquire(by *Owner) (ref lease.Ref, slot int, ok bool) {
	if ref, ok = r.cell.Acquire(); !ok {
		return ref, -1, false
	}
	for i := range r.holds {
		s := &r.holds[i]
		if s.by.Load() == nil && s.by.CompareAndSwap(nil, by) {
			s.since.Store(r.clock.at.Load())
			return ref, i, true
		}
	}
	return ref, -1, true
}

// vacate gives the hold back.
func (r *readers) vacate(slot int) {
	if slot < 0 {
		return
	}
	s := &r.holds[slot]
	s.since.Store(math.MinInt64)
	s.by.Store(nil)
}

// depart notes that work of a holder goes on until p.
func (r *readers) depart(by *Owner, p device.Point) {
	r.mu.Lock()
	r.left = later(r.left, departure{by, r.clock.now(), p})
	var all []departure
	if len(r.left) >= max(r.look, fewDepartures) {
		all = slices.Clone(r.left)
	}
	r.mu.Unlock()
	if all != nil {
		r.forget(all)
	}
}

// fewDepartures are kept whether or not they are over.
const fewDepartures = 16

// forget drops those of the departures that are over, so that a handle that is read for
// long does not keep one for every fence there ever was.
func (r *readers) forget(all []departure) {
	var over []departure
	for _, d := range all {
		if ok, _ := reached(d.point); ok {
			over = append(over, d)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = slices.DeleteFunc(r.left, func(d departure) bool { return slices.Contains(over, d) })
	r.look = 2 * len(r.left)
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

// drained says whether nobody refers to the memory any more and everything that
// holders had enqueued is over; failed is the error of such work. The caller owns ex,
// and holds no lock.
func (r *readers) drained() (ok bool, failed error) {
	if _, _, n := r.cell.State(); n > 0 {
		return false, nil
	}
	for _, p := range r.ex.Points() {
		ok, err := reached(p)
		if !ok {
			return false, nil
		}
		if failed == nil && !errors.Is(err, device.ErrClosed) { // a fence may be closed once it has come so far
			failed = err
		}
	}
	return true, failed
}

// holders says who keeps the handle from being drained, and for how long. The caller
// holds no lock.
func (r *readers) holders(now time.Duration) []Hold {
	var hs []Hold
	_, _, n := r.cell.State()
	for i := range r.holds {
		by, since := r.holds[i].by.Load(), time.Duration(r.holds[i].since.Load())
		if by == nil {
			continue
		}
		if since < 0 { // it was taken, or given back, this very moment
			since = now
		}
		hs = append(hs, Hold{Owner: by.name, For: now - since})
	}
	for len(hs) < n {
		hs = append(hs, Hold{Owner: "one of more than can be named"})
	}
	r.mu.Lock()
	left := slices.Clone(r.left)
	r.mu.Unlock()
	for _, d := range left {
		if ok, _ := reached(d.point); !ok {
			hs = append(hs, Hold{Owner: d.by.name, For: now - d.at, Work: true})
		}
	}
	return hs
}
