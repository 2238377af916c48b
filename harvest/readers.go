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

	mu       sync.Mutex
	releases []releaseRecord
	pruneAt  int // with how many of them it is looked which are over
}

// maxHolds is how many references of one handle are known by name at a time.
const maxHolds = 4

// hold is one reference that is out. since is under 0 while the slot is changing
// hands.
type hold struct {
	owner atomic.Pointer[Owner]
	since atomic.Int64
}

// releaseRecord is a holder who has given its reference back for some later point.
type releaseRecord struct {
	owner *Owner
	at    time.Duration
	point device.Point
}

// open lets readers in.
func (r *readers) open(clock *timeline) {
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
		if s.owner.Load() == nil && s.owner.CompareAndSwap(nil, by) {
			s.since.Store(r.clock.at.Load())
			return ref, i, true
		}
	}
	return ref, -1, true
}

// releaseHold gives the hold back.
func (r *readers) releaseHold(slot int) {
	if slot < 0 {
		return
	}
	s := &r.holds[slot]
	s.since.Store(math.MinInt64)
	s.owner.Store(nil)
}

// recordRelease notes that work of a holder goes on until p.
func (r *readers) recordRelease(by *Owner, p device.Point) {
	r.mu.Lock()
	r.releases = mergeRelease(r.releases, releaseRecord{by, r.clock.now(), p})
	var all []releaseRecord
	if len(r.releases) >= max(r.pruneAt, minPruneReleases) {
		all = slices.Clone(r.releases)
	}
	r.mu.Unlock()
	if all != nil {
		r.prune(all)
	}
}

// minPruneReleases are kept whether or not they are over.
const minPruneReleases = 16

// prune drops those of the departures that are over, so that a handle that is read for
// long does not keep one for every fence there ever was.
func (r *readers) prune(all []releaseRecord) {
	var over []releaseRecord
	for _, d := range all {
		if ok, _ := reached(d.point); ok {
			over = append(over, d)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.releases = slices.DeleteFunc(r.releases, func(d releaseRecord) bool { return slices.Contains(over, d) })
	r.pruneAt = 2 * len(r.releases)
}

// mergeRelease keeps one departure for each fence: the one with the last point.
func mergeRelease(left []releaseRecord, d releaseRecord) []releaseRecord {
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

// currentHolds says who keeps the handle from being drained, and for how long. The caller
// holds no lock.
func (r *readers) currentHolds(now time.Duration) []Hold {
	var hs []Hold
	_, _, n := r.cell.State()
	for i := range r.holds {
		by, since := r.holds[i].owner.Load(), time.Duration(r.holds[i].since.Load())
		if by == nil {
			continue
		}
		if since < 0 { // it was taken, or given back, this very moment
			since = now
		}
		hs = append(hs, Hold{Owner: by.name, Duration: now - since})
	}
	for len(hs) < n {
		hs = append(hs, Hold{Owner: "one of more than can be named"})
	}
	r.mu.Lock()
	left := slices.Clone(r.releases)
	r.mu.Unlock()
	for _, d := range left {
		if ok, _ := reached(d.point); !ok {
			hs = append(hs, Hold{Owner: d.owner.name, Duration: now - d.at, PendingWork: true})
		}
	}
	return hs
}
