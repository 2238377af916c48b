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

// Owner names those who take references, for the reports of missed deadlines. Any number
// of goroutines may use an Owner.
type Owner struct{ name string }

// NewOwner makes an owner: "expert fetch", say.
func NewOwner(name string) *Owner { return &Owner{name: name} }

var unnamed = NewOwner("unnamed")

// readers tracks the references on a handle: their number, owners and times, and the
// fence values of pending work. Acquiring and releasing a reference changes the cell's
// state word and at most one hold, without a lock; ReleaseAt takes mu.
type readers struct {
	cell  lease.Cell
	clock *timeline // the runtime's
	holds [maxHolds]hold
	// ex is held from refuse to invalidate, by the goroutine in Runtime.Free, then by the
	// one that ticks.
	ex lease.Exclusive
	// inSteps are the steps that may have been reading when the handle was refused.
	inSteps []stepHold

	mu       sync.Mutex
	releases []releaseRecord
	pruneAt  int // number of them at which completed ones are dropped
	// failed is the first error of work whose point was dropped.
	failed error
}

// maxHolds is the maximum number of references of a handle whose owners are known at a
// time.
const maxHolds = 4

// hold is one reference. since is negative while the slot is being acquired or released.
type hold struct {
	owner atomic.Pointer[Owner]
	since atomic.Int64
}

// releaseRecord is a reference that was released at a later fence value.
type releaseRecord struct {
	owner *Owner
	at    time.Duration
	point device.Point
}

// open makes the handle available to readers.
func (r *readers) open(clock *timeline) {
	r.clock = clock
	ex, _ := r.cell.BeginExclusive() // succeeds: the handle is new
	ex.Replace()
}

// refuse locks new readers out.
func (r *readers) refuse() { r.ex, _ = r.cell.BeginExclusive() } // succeeds: a handle is ended once

// invalidate completes refuse. There are no readers any more.
func (r *readers) invalidate() { r.ex.Invalidate() }

// acquire takes a reference and a hold that names its owner; slot is -1 if all holds are
// in use.
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

// releaseHold releases the hold.
func (r *readers) releaseHold(slot int) {
	if slot < 0 {
		return
	}
	s := &r.holds[slot]
	s.since.Store(math.MinInt64)
	s.owner.Store(nil)
}

// recordRelease records that work of an owner is pending until p.
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

// minPruneReleases is the number of records below which completed ones are not looked
// for.
const minPruneReleases = 16

// prune drops completed records, so that a handle that is read for long does not keep one
// for every fence.
func (r *readers) prune(all []releaseRecord) {
	var over []releaseRecord
	for _, d := range all {
		if ok, _ := d.point.Ended(); ok {
			over = append(over, d)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.releases = slices.DeleteFunc(r.releases, func(d releaseRecord) bool { return slices.Contains(over, d) })
	r.pruneAt = 2 * len(r.releases)
}

// refresh drops what is known of work that has ended: fence values wrap around, so that it
// would count as pending half of their range later.
func (r *readers) refresh() {
	failed := r.cell.DropReached()
	r.mu.Lock()
	if r.failed == nil && !errors.Is(failed, device.ErrClosed) { // a fence may be closed once it was signaled
		r.failed = failed
	}
	all := slices.Clone(r.releases)
	r.mu.Unlock()
	r.prune(all)
}

// mergeRelease keeps one record for each fence: the one with the highest value.
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

// reached reports whether p is reached, without waiting; the error is that of its work.
// On a virtual machine the query may run other work.
func reached(p device.Point) (bool, error) {
	if !p.Reached() {
		return false, nil
	}
	// p is reached, so this does not wait: it returns a failure, and orders what follows
	// after the work.
	return true, p.Wait(background)
}

// drained reports whether there are no references any more and no pending work; failed is
// the error of such work. The caller owns ex, and holds no lock.
func (r *readers) drained() (ok bool, failed error) {
	if _, _, n := r.cell.State(); n > 0 {
		return false, nil
	}
	if slices.ContainsFunc(r.inSteps, func(h stepHold) bool { return h.running() }) {
		return false, nil
	}
	r.mu.Lock()
	failed = r.failed
	r.mu.Unlock()
	for _, p := range r.ex.Points() {
		ok, err := reached(p)
		if !ok {
			return false, nil
		}
		if failed == nil && !errors.Is(err, device.ErrClosed) { // a fence may be closed once it was signaled
			failed = err
		}
	}
	return true, failed
}

// currentHolds lists what keeps the handle from being drained. The caller holds no lock.
func (r *readers) currentHolds(now time.Duration) []Hold {
	var hs []Hold
	_, _, n := r.cell.State()
	for i := range r.holds {
		by, since := r.holds[i].owner.Load(), time.Duration(r.holds[i].since.Load())
		if by == nil {
			continue
		}
		if since < 0 { // it is being acquired or released
			since = now
		}
		hs = append(hs, Hold{Owner: by.name, Duration: now - since})
	}
	for len(hs) < n {
		hs = append(hs, Hold{Owner: "an unknown owner"})
	}
	for i := range r.inSteps {
		if r.inSteps[i].running() {
			hs = append(hs, r.inSteps[i].hold(now))
		}
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
