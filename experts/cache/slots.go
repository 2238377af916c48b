// Package cache keeps the state of the expert cache: the slots of GPU memory that fetched
// experts pass through, which expert each slot holds, who has a reference on it, and which
// slot is assigned next. It is pure: it owns no memory, copies nothing and has no clock.
// Experts and slots are numbers.
//
//	slot, ok := c.NextFree()                        // the next slot, round robin, without references
//	ref, after := c.Assign(slot, expert, after[:0]) // the slot is the expert's from now on
//	… submit the copy into the slot, ordered after the fence values in after …
//	ref.ReleaseAt(point)                            // its readers are done at this fence value
//
// # Invariants
//
//   - Slots are assigned round robin, starting behind the last one assigned: the choice
//     never depends on time.
//   - A slot with references is not assigned, and Assign returns the fence values after
//     which its earlier readers are done.
//   - An expert is in at most one slot.
package cache

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/lease"
)

// Slots is the state of the expert cache's slots. One goroutine at a time uses it.
type Slots struct {
	slots []slot
	// last is the slot that each expert was assigned last, or -1.
	last []int
	next int // where the search for a free slot begins
}

type slot struct {
	cell lease.Cell
	// expert that the slot holds, or that is being copied into it; -1: none.
	expert int
}

// New returns so many empty slots, for so many experts.
func New(slots, experts int) *Slots {
	c := &Slots{slots: make([]slot, slots), last: make([]int, experts)}
	for i := range c.slots {
		c.slots[i].expert = -1
	}
	for i := range c.last {
		c.last[i] = -1
	}
	return c
}

// Len is the number of slots.
func (c *Slots) Len() int { return len(c.slots) }

// LastSlot is the slot that an expert was assigned last, or -1. It may hold another expert
// by now.
func (c *Slots) LastSlot(expert int) int { return c.last[expert] }

// Has reports whether an expert is cached, or being copied into its slot.
func (c *Slots) Has(expert int) bool {
	at := c.last[expert]
	return at >= 0 && c.slots[at].expert == expert
}

// Expert is the expert that a slot holds, or -1.
func (c *Slots) Expert(slot int) int { return c.slots[slot].expert }

// References is the number of references on a slot.
func (c *Slots) References(slot int) int {
	_, _, n := c.slots[slot].cell.State()
	return n
}

// Acquire takes a reference on the slot of a cached expert.
func (c *Slots) Acquire(expert int) (lease.Ref, bool) {
	if !c.Has(expert) {
		return lease.Ref{}, false
	}
	return c.slots[c.last[expert]].cell.Acquire()
}

// NextFree is the next slot without references.
func (c *Slots) NextFree() (slot int, ok bool) {
	for k := range c.slots {
		at := (c.next + k) % len(c.slots)
		if c.References(at) == 0 {
			return at, true
		}
	}
	return 0, false
}

// Assign gives a free slot to an expert and returns a reference on it. It appends to after
// the fence values until which earlier readers may still read the slot.
func (c *Slots) Assign(at, expert int, after []device.Point) (lease.Ref, []device.Point) {
	s := &c.slots[at]
	exclusive := s.exclusive(at)
	after = append(after, exclusive.Points()...)
	exclusive.Replace()
	s.expert, c.last[expert] = expert, at
	c.next = (at + 1) % len(c.slots)
	ref, _ := s.cell.Acquire() // the slot is free and valid, so this succeeds
	return ref, after
}

func (s *slot) exclusive(at int) lease.Exclusive {
	e, ok := s.cell.BeginExclusive()
	if !ok {
		panic(fmt.Sprintf("experts/cache: slot %d is already held exclusively", at))
	}
	return e
}

// Clear records that the copy into a slot failed or was skipped, so that the slot holds no
// expert.
func (c *Slots) Clear(slot int) { c.slots[slot].expert = -1 }

// ForgetReaders drops the fence values of readers that have released their references, all
// of which have finished. Fence values wrap around: very old ones would count as not
// reached.
func (c *Slots) ForgetReaders() {
	for i := range c.slots {
		exclusive := c.slots[i].exclusive(i)
		exclusive.ForgetReaders()
		exclusive.End()
	}
}

// Reset drops the fence values of all readers and invalidates empty slots. No slot has
// references, and nothing reads one any more.
func (c *Slots) Reset() {
	for i := range c.slots {
		s := &c.slots[i]
		exclusive := s.exclusive(i)
		exclusive.ForgetReaders()
		if s.expert < 0 {
			exclusive.Invalidate()
		} else {
			exclusive.End()
		}
	}
}
