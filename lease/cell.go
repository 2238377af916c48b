package lease

import (
	"context"
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

// Cell is the state of one place. The zero Cell is invalid, with generation 0. A
// Cell must not be copied. Its methods may be called from any goroutine.
type Cell struct {
	word atomic.Uint64

	mu     sync.Mutex
	points []device.Point // until when work enqueued by former readers may still read
	look   int            // with how many points it is looked which of them are reached
	gone   chan struct{}  // closed by the release that ends a Drain
}

// Acquire takes a reference on the object that is here. It fails where there is
// none, or where somebody holds the cell exclusively. It never blocks.
func (c *Cell) Acquire() (Ref, bool) {
	for {
		old := c.word.Load()
		w := word(old)
		if w.exclusive() || !w.valid() {
			return Ref{}, false
		}
		if w.references() == referenceMask {
			panic("residency: more than 2^32-1 references on one cell")
		}
		if c.word.CompareAndSwap(old, old+1) {
			return Ref{cell: c, generation: w.generation()}, true
		}
	}
}

// State is a snapshot of the cell: its generation, whether there is an object that
// can be acquired, and how many references are out.
func (c *Cell) State() (generation uint32, available bool, references int) {
	w := word(c.word.Load())
	return w.generation(), w.valid() && !w.exclusive(), w.references()
}

// BeginExclusive keeps new readers out. It fails where somebody else does so
// already. It does not wait for readers that are in: see Exclusive.Drain.
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

// Ref is a reference on the object in a cell: while it is held, the object stays.
// It is released once, through the variable that holds it.
type Ref struct {
	cell       *Cell
	generation uint32
}

// Generation is that of the object referred to.
func (r *Ref) Generation() uint32 { return r.generation }

// Held reports whether the reference has not been released.
func (r *Ref) Held() bool { return r.cell != nil }

// Release gives the reference back; nothing of the holder reads the object any
// more.
func (r *Ref) Release() {
	c := r.take()
	c.release(r.generation)
}

// ReleaseAt gives the reference back now; what the holder has enqueued may read
// the object until p.
func (r *Ref) ReleaseAt(p device.Point) {
	c := r.take()
	c.mu.Lock()
	c.points = later(c.points, p)
	var all []device.Point
	if len(c.points) >= max(c.look, fewPoints) {
		all = slices.Clone(c.points)
	}
	c.mu.Unlock()
	if all != nil {
		c.forget(all)
	}
	c.release(r.generation)
}

// fewPoints are kept whether or not they are reached.
const fewPoints = 16

// forget drops those of the points that are reached: a place that is read for long,
// by work that ends at ever other fences, would otherwise keep a point of each. The
// caller has a reference, so nobody else is using the points. A virtual machine may
// take the questions as polls and run work.
func (c *Cell) forget(points []device.Point) {
	var reached []device.Point
	for _, p := range points {
		// Where it is reached Await does not wait: it orders what comes next after the
		// reader. A reader's failure is left for who drains the cell.
		if p.Reached() && p.Await(context.Background()) == nil {
			reached = append(reached, p)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.points = slices.DeleteFunc(c.points, func(p device.Point) bool { return slices.Contains(reached, p) })
	c.look = 2 * len(c.points)
}

func (r *Ref) take() *Cell {
	c := r.cell
	if c == nil {
		panic("residency: a reference is released twice, or was never taken")
	}
	r.cell = nil
	return c
}

func (c *Cell) release(generation uint32) {
	for {
		old := c.word.Load()
		w := word(old)
		if w.generation() != generation || w.references() == 0 {
			panic(fmt.Sprintf("residency: a reference of generation %d is released on a cell with %v", generation, w))
		}
		if !c.word.CompareAndSwap(old, old-1) {
			continue
		}
		if w.exclusive() && w.references() == 1 {
			c.mu.Lock()
			if c.gone != nil {
				close(c.gone)
				c.gone = nil
			}
			c.mu.Unlock()
		}
		return
	}
}

// later adds p to points, which hold one value for each fence: the last.
func later(points []device.Point, p device.Point) []device.Point {
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

// Drain waits until all references are gone and everything their holders had
// enqueued has passed, or ctx is done. After an error the cell is still held
// exclusively, and Drain may be called again.
func (e *Exclusive) Drain(ctx context.Context) error {
	c := e.held()
	for {
		c.mu.Lock()
		if word(c.word.Load()).references() == 0 {
			break
		}
		gone := make(chan struct{})
		c.gone = gone
		if word(c.word.Load()).references() == 0 { // the last release may have come before gone was there
			break
		}
		c.mu.Unlock()
		select {
		case <-gone:
		case <-ctx.Done():
			return fmt.Errorf("residency: %d references are not released: %w", word(c.word.Load()).references(), ctx.Err())
		}
	}
	c.gone = nil
	points := c.points
	c.mu.Unlock()
	// Nobody adds points any more: there are no references, and no new ones.
	for len(points) > 0 {
		if err := points[0].Await(ctx); err != nil {
			return fmt.Errorf("residency: wait for the last reader: %w", err)
		}
		points = points[1:]
		c.setPoints(points)
	}
	return nil
}

// Points returns until when work of former readers may still read the object: what
// overwrites it must wait for all of them. There are no references any more, or it
// panics. The slice is valid until the exclusive right ends.
func (e *Exclusive) Points() []device.Point {
	c := e.held()
	e.mustBeDrained("points")
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.points
}

// Settle forgets the points: the owner knows by other means that nothing of the
// former readers reads any more, because their stream was drained after it failed.
func (e *Exclusive) Settle() { e.held().forgetAll() }

// Replace says that a new object is here, or will be for everyone who waits for
// its arrival, ends the exclusive right and returns the new generation. There are
// no references any more, or it panics. Points that are left are forgotten: the
// caller has handed them to what writes the object.
func (e *Exclusive) Replace() uint32 { return e.finish(true).generation() }

// Invalidate says that nothing is here any more and ends the exclusive right.
// There are no references any more, or it panics. Points stay: the place may still
// be read.
func (e *Exclusive) Invalidate() { e.finish(false) }

// End ends the exclusive right and leaves the object as it was.
func (e *Exclusive) End() {
	c := e.held()
	e.cell = nil
	c.word.And(^uint64(exclusiveBit))
}

func (e *Exclusive) finish(valid bool) word {
	c := e.held()
	e.mustBeDrained("replace or invalidate")
	if valid {
		c.forgetAll()
	}
	e.cell = nil
	w := word(c.word.Load()).next(valid)
	c.word.Store(uint64(w)) // exclusive and without references: nobody else changes the word
	return w
}

func (e *Exclusive) mustBeDrained(what string) {
	if w := word(e.cell.word.Load()); w.references() != 0 {
		panic(fmt.Sprintf("residency: %s of a cell with %v", what, w))
	}
}

func (e *Exclusive) held() *Cell {
	if e.cell == nil {
		panic("residency: an exclusive right is used after its end")
	}
	return e.cell
}

// forgetAll keeps the room of the points.
func (c *Cell) forgetAll() {
	c.mu.Lock()
	clear(c.points)
	c.points = c.points[:0]
	c.mu.Unlock()
}

func (c *Cell) setPoints(p []device.Point) {
	c.mu.Lock()
	c.points = p
	c.mu.Unlock()
}
