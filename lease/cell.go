package lease

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/moeserve/moeserve/device"
)

// The state word, from the highest bit: exclusive, valid, 30 bits of generation,
// 32 bits of references.
const (
	exclusiveBit word = 1 << 63
	validBit     word = 1 << 62

	generationShift = 32
	generationMask  = 1<<30 - 1
	referenceMask   = 1<<32 - 1
)

type word uint64

func (w word) exclusive() bool    { return w&exclusiveBit != 0 }
func (w word) valid() bool        { return w&validBit != 0 }
func (w word) generation() uint32 { return uint32(w>>generationShift) & generationMask }
func (w word) references() int    { return int(w & referenceMask) }

// next is w with the following generation, valid or not, and not exclusive.
func (w word) next(valid bool) word {
	n := word(w.generation()+1) & generationMask << generationShift
	if valid {
		n |= validBit
	}
	return n
}

func (w word) String() string {
	return fmt.Sprintf("generation %d, valid %t, exclusive %t, %d references", w.generation(), w.valid(), w.exclusive(), w.references())
}

// Cell is the state of one memory location. The zero Cell is invalid, with generation 0.
// A Cell must not be copied. Its methods may be called from any goroutine.
type Cell struct {
	word atomic.Uint64

	mu      sync.Mutex
	points  []device.Point // fence values until which released readers may still read
	pruneAt int            // number of points at which reached ones are dropped
}

// Acquire takes a reference on the object. It fails if there is none, or if the cell is
// held exclusively. It never blocks.
func (c *Cell) Acquire() (Ref, bool) {
	for {
		old := c.word.Load()
		w := word(old)
		if w.exclusive() || !w.valid() {
			return Ref{}, false
		}
		if w.references() == referenceMask {
			panic("lease: more than 2^32-1 references on one cell")
		}
		if c.word.CompareAndSwap(old, old+1) {
			return Ref{cell: c, generation: w.generation()}, true
		}
	}
}

// State is a snapshot of the cell: its generation, whether Acquire would succeed, and the
// number of references.
func (c *Cell) State() (generation uint32, available bool, references int) {
	w := word(c.word.Load())
	return w.generation(), w.valid() && !w.exclusive(), w.references()
}

// BeginExclusive locks new readers out. It fails if the cell is already held exclusively.
// It does not wait for present readers: State has the number of references that are left,
// and Exclusive.Points what their work must be waited for.
func (c *Cell) BeginExclusive() (Exclusive, bool) {
	for {
		old := c.word.Load()
		if word(old).exclusive() {
			return Exclusive{}, false
		}
		if c.word.CompareAndSwap(old, old|uint64(exclusiveBit)) {
			return Exclusive{cell: c}, true
		}
	}
}

// Ref is a reference on the object in a cell: while it is held, the object stays valid.
// It is released once, through the variable that holds it.
type Ref struct {
	cell       *Cell
	generation uint32
}

// Generation of the object.
func (r *Ref) Generation() uint32 { return r.generation }

// Held reports whether the reference has not been released.
func (r *Ref) Held() bool { return r.cell != nil }

// Release releases the reference. No work of the holder reads the object any more.
func (r *Ref) Release() {
	c := r.detach()
	c.release(r.generation)
}

// ReleaseAt releases the reference now; work that the holder has enqueued may read the
// object until p is reached.
func (r *Ref) ReleaseAt(p device.Point) {
	c := r.detach()
	c.mu.Lock()
	c.points = merge(c.points, p)
	var all []device.Point
	if len(c.points) >= max(c.pruneAt, minPrunePoints) {
		all = slices.Clone(c.points)
	}
	c.mu.Unlock()
	if all != nil {
		c.prune(all)
	}
	c.release(r.generation)
}

// minPrunePoints is the number of points below which reached ones are not looked for.
const minPrunePoints = 16

// DropReached drops the points that are reached, and returns the first error of those that
// have failed. Fence values wrap around: a point that is half of their range old would
// count as not reached, so an object that stays in use for long needs a call in between.
// It does nothing if the object cannot be acquired.
func (c *Cell) DropReached() (failed error) {
	ref, ok := c.Acquire()
	if !ok {
		return nil
	}
	defer ref.Release()
	c.mu.Lock()
	all := slices.Clone(c.points)
	c.mu.Unlock()
	return c.drop(all, true)
}

// prune drops the points that are reached: a location that is read for long, by work
// behind ever new fences, would otherwise keep a point of each. Failed points are kept for
// the exclusive owner.
func (c *Cell) prune(points []device.Point) { _ = c.drop(points, false) }

// drop drops those of the points that are reached, and failed ones only if withFailed is
// set. The caller has a reference, so there is no exclusive owner that uses the points.
func (c *Cell) drop(points []device.Point, withFailed bool) (failed error) {
	var over []device.Point
	for _, p := range points {
		ok, err := p.Ended()
		if !ok || err != nil && !withFailed {
			continue
		}
		over = append(over, p)
		failed = cmp.Or(failed, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.points = slices.DeleteFunc(c.points, func(p device.Point) bool { return slices.Contains(over, p) })
	c.pruneAt = 2 * len(c.points)
	return failed
}

func (r *Ref) detach() *Cell {
	c := r.cell
	if c == nil {
		panic("lease: a reference is released twice, or was never acquired")
	}
	r.cell = nil
	return c
}

func (c *Cell) release(generation uint32) {
	for {
		old := c.word.Load()
		w := word(old)
		if w.generation() != generation || w.references() == 0 {
			panic(fmt.Sprintf("lease: a reference of generation %d is released on a cell with %v", generation, w))
		}
		if c.word.CompareAndSwap(old, old-1) {
			return
		}
	}
}

// merge adds p to points, which contain the highest value of each fence.
func merge(points []device.Point, p device.Point) []device.Point {
	for i := range points {
		if points[i].Fence == p.Fence {
			if p.After(points[i]) {
				points[i] = p
			}
			return points
		}
	}
	return append(points, p)
}

// Exclusive is the right to change what a cell holds. It ends with Replace,
// Invalidate or End, once, through the variable that holds it, and is used by one
// goroutine at a time.
type Exclusive struct{ cell *Cell }

// Points returns the fence values until which released readers may still read the object:
// what overwrites it must wait for all of them. It panics if there are references. The
// slice is valid until the exclusive right ends.
func (e *Exclusive) Points() []device.Point {
	c := e.mustHold()
	e.mustBeDrained("points")
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.points
}

// ForgetReaders drops the points: the owner knows by other means that no released reader
// still reads, because their stream was synchronized or recovered.
func (e *Exclusive) ForgetReaders() { e.mustHold().clearPoints() }

// Replace makes the cell valid for a new object, which may still be arriving, ends the
// exclusive right and returns the new generation. It panics if there are references. It
// drops the points: the caller has passed them to what writes the object.
func (e *Exclusive) Replace() uint32 { return e.finish(true).generation() }

// Invalidate makes the cell invalid and ends the exclusive right. It panics if there are
// references. It keeps the points: the location may still be read.
func (e *Exclusive) Invalidate() { e.finish(false) }

// End ends the exclusive right without changing the object.
func (e *Exclusive) End() {
	c := e.mustHold()
	e.cell = nil
	c.word.And(^uint64(exclusiveBit))
}

func (e *Exclusive) finish(valid bool) word {
	c := e.mustHold()
	e.mustBeDrained("replace or invalidate")
	if valid {
		c.clearPoints()
	}
	e.cell = nil
	w := word(c.word.Load()).next(valid)
	c.word.Store(uint64(w)) // exclusive and without references: no other goroutine changes the word
	return w
}

func (e *Exclusive) mustBeDrained(what string) {
	if w := word(e.cell.word.Load()); w.references() != 0 {
		panic(fmt.Sprintf("lease: %s of a cell with %v", what, w))
	}
}

func (e *Exclusive) mustHold() *Cell {
	if e.cell == nil {
		panic("lease: an exclusive right is used after its end")
	}
	return e.cell
}

// clearPoints drops the points and keeps their capacity.
func (c *Cell) clearPoints() {
	c.mu.Lock()
	clear(c.points)
	c.points = c.points[:0]
	c.mu.Unlock()
}
