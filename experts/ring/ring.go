// Package ring chooses among the slots that fetched experts pass through on the compute
// GPU: which expert each slot holds, who still refers to it, and which slot is taken
// next. It is pure: it owns no memory, copies nothing and knows no time. An expert is a
// number, a slot another.
//
//	slot, ok := r.Free()                          // the next in ring order that nobody refers to
//	ref, after := r.Put(slot, expert, after[:0])  // it is expert's now
//	… submit the copy into the slot behind the points in after …
//	ref.ReleaseAt(point)                          // its readers are done at point
//
// # Invariants
//
//   - Slots are taken in ring order from behind the last one taken: never by time.
//   - A slot that somebody refers to is not taken, and Put says until when its earlier
//     readers may still read.
//   - An expert is in one slot at most.
package ring

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/lease"
)

// Ring is the state of the slots. One goroutine at a time uses it.
type Ring struct {
	slots []slot
	// last is the slot that each expert was put into last, or -1.
	last []int
	next int // where the search for a free slot begins
}

type slot struct {
	cell lease.Cell
	// holds is the expert that is here or on its way, or -1.
	holds int
}

// New makes a ring of so many slots, all empty, for so many experts.
func New(slots, experts int) *Ring {
	r := &Ring{slots: make([]slot, slots), last: make([]int, experts)}
	for i := range r.slots {
		r.slots[i].holds = -1
	}
	for i := range r.last {
		r.last[i] = -1
	}
	return r
}

// Len is how many slots there are.
func (r *Ring) Len() int { return len(r.slots) }

// Last is the slot that an expert was put into last, or -1. It may hold another by now.
func (r *Ring) Last(expert int) int { return r.last[expert] }

// Has says whether an expert is in its slot, or on its way there.
func (r *Ring) Has(expert int) bool {
	at := r.last[expert]
	return at >= 0 && r.slots[at].holds == expert
}

// Holds is the expert that is in a slot, or -1.
func (r *Ring) Holds(slot int) int { return r.slots[slot].holds }

// References is how many hold the slot.
func (r *Ring) References(slot int) int {
	_, _, n := r.slots[slot].cell.State()
	return n
}

// Acquire takes a reference on the slot of an expert that the ring has.
func (r *Ring) Acquire(expert int) (lease.Ref, bool) {
	if !r.Has(expert) {
		return lease.Ref{}, false
	}
	return r.slots[r.last[expert]].cell.Acquire()
}

// Free is the next slot that nobody refers to.
func (r *Ring) Free() (slot int, ok bool) {
	for k := range r.slots {
		at := (r.next + k) % len(r.slots)
		if r.References(at) == 0 {
			return at, true
		}
	}
	return 0, false
}

// Put gives a free slot to an expert, with a reference, and adds to after until when those
// who held it before may still read.
func (r *Ring) Put(at, expert int, after []device.Point) (lease.Ref, []device.Point) {
	s := &r.slots[at]
	exclusive := s.exclusive(at)
	after = append(after, exclusive.Points()...)
	exclusive.Replace()
	s.holds, r.last[expert] = expert, at
	r.next = (at + 1) % len(r.slots)
	ref, _ := s.cell.Acquire() // it is free and valid, so there is one
	return ref, after
}

func (s *slot) exclusive(at int) lease.Exclusive {
	e, ok := s.cell.BeginExclusive()
	if !ok {
		panic(fmt.Sprintf("ring: slot %d is held exclusively by somebody else", at))
	}
	return e
}

// Forget says that what a slot should hold has not come, or not whole.
func (r *Ring) Forget(slot int) { r.slots[slot].holds = -1 }

// Settle forgets the readers who have given their references back: nothing reads a slot any
// more for which nobody has one. Points of long ago would be taken for ones to come.
func (r *Ring) Settle() {
	for i := range r.slots {
		exclusive := r.slots[i].exclusive(i)
		exclusive.Settle()
		exclusive.End()
	}
}

// Reset forgets all readers: nobody refers to any slot, and nothing reads one any more.
func (r *Ring) Reset() {
	for i := range r.slots {
		s := &r.slots[i]
		exclusive := s.exclusive(i)
		exclusive.Settle()
		if s.holds < 0 {
			exclusive.Invalidate()
		} else {
			exclusive.End()
		}
	}
}
