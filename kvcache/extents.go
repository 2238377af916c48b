package kvcache

import "fmt"

// ExtentState is how the blocks of an extent are used.
type ExtentState struct {
	// Withdrawn: Withdraw has taken the extent, and Restore has not given it back.
	Withdrawn bool
	// Busy blocks are used by sequences or held; Cached ones are free and have a key.
	Busy, Cached int
}

// extents are runs of blocks that can be withdrawn together: those from block first on, in
// runs of blocks many.
type extents struct {
	first, blocks int
	list          []ExtentState
}

func newExtents(o ManagerOptions) extents {
	return extents{first: o.Blocks - o.Extents*o.ExtentBlocks, blocks: o.ExtentBlocks, list: make([]ExtentState, o.Extents)}
}

// of is the extent of a block, or -1.
func (x *extents) of(id int32) int {
	if int(id) < x.first {
		return -1
	}
	return (int(id) - x.first) / x.blocks
}

// withdrawn reports whether an extent is withdrawn.
func (x *extents) withdrawn(extent int) bool { return extent >= 0 && x.list[extent].Withdrawn }

func (x *extents) addCached(extent, n int) {
	if extent >= 0 {
		x.list[extent].Cached += n
	}
}

// ids is the first block of an extent, and the one after its last.
func (x *extents) ids(extent int) (from, to int32) {
	from = int32(x.first + extent*x.blocks)
	return from, from + int32(x.blocks)
}

// used counts blocks of extents that are used or held from now on, or not any more.
func (m *Manager) used(id int32, n int) {
	if x := m.extents.of(id); x >= 0 {
		m.extents.list[x].Busy += n
	}
}

// uncached records that a block is not free and with a key any more.
func (m *Manager) uncached(id int32) { m.extents.addCached(m.extents.of(id), -1) }

// heldIn is the number of blocks of an extent that no sequence uses and that are held.
func (m *Manager) heldIn(extent int) (n int) {
	if m.extents.list[extent].Busy == 0 {
		return 0
	}
	for id, to := m.extents.ids(extent); id < to; id++ {
		if m.refs[id] == 0 && m.holds[id] > 0 {
			n++
		}
	}
	return n
}

// Extents is the number of extents.
func (m *Manager) Extents() int { return len(m.extents.list) }

// Extent is the state of an extent.
func (m *Manager) Extent(extent int) ExtentState { return m.extents.list[extent] }

// ExtentBlocks are the blocks of an extent: from the first on, so many.
func (m *Manager) ExtentBlocks(extent int) (first int32, blocks int) {
	first, _ = m.extents.ids(extent)
	return first, m.extents.blocks
}

// Present is the number of blocks but for the withdrawn ones that nothing uses any more.
func (m *Manager) Present() int {
	n := len(m.refs)
	for _, s := range m.extents.list {
		if s.Withdrawn {
			n -= m.extents.blocks - s.Busy
		}
	}
	return n
}

// Withdraw takes the blocks of an extent out of use: none of them is allocated or matched
// until Restore. Those that are free lose their content at once. Sequences keep what they use
// there, and copies what they hold; when the last of these has been released, which Extent
// shows as Busy being 0, the memory of the extent may be used for anything else, as a released
// block's may by the next sequence.
func (m *Manager) Withdraw(extent int) {
	s := &m.extents.list[extent]
	if s.Withdrawn {
		panic(fmt.Sprintf("kvcache: extent %d is already withdrawn", extent))
	}
	s.Withdrawn = true
	for id, to := m.extents.ids(extent); id < to; id++ {
		if m.keys[id] == (Key{}) {
			continue
		}
		if m.refs[id] == 0 && m.holds[id] == 0 {
			m.policy.Remove(id)
			m.cached--
			s.Cached--
		}
		if m.refs[id] > 0 {
			m.losses++
		}
		m.reuse.dropped(m.keys[id])
		m.clearKey(id)
	}
	m.empty.drop(extent)
}

// Restore gives the blocks of a withdrawn extent back. The content of those that nothing uses
// is undefined.
func (m *Manager) Restore(extent int) {
	s := &m.extents.list[extent]
	if !s.Withdrawn {
		panic(fmt.Sprintf("kvcache: extent %d is not withdrawn", extent))
	}
	s.Withdrawn = false
	from, to := m.extents.ids(extent)
	for id := to - 1; id >= from; id-- {
		if m.refs[id] == 0 && m.holds[id] == 0 {
			m.empty.push(id, extent)
		}
	}
}

// LeastUsed is the extent whose withdrawal costs least: the one with the fewest busy blocks,
// then the fewest cached ones, then the last. False: all are withdrawn.
func (m *Manager) LeastUsed() (extent int, ok bool) {
	var least ExtentState
	for x := len(m.extents.list) - 1; x >= 0; x-- {
		s := m.extents.list[x]
		if s.Withdrawn || ok && (s.Busy > least.Busy || s.Busy == least.Busy && s.Cached >= least.Cached) {
			continue
		}
		extent, least, ok = x, s, true
	}
	return extent, ok
}

// emptyBlocks are the free blocks without a key: a stack for those of no extent, and one for
// each extent.
type emptyBlocks struct {
	stacks [][]int32 // [extent + 1]
	// lowest is a stack before which all are empty. n counts all blocks.
	lowest, n int
}

// newEmptyBlocks has all blocks, the first on top of each stack.
func newEmptyBlocks(blocks int, x extents) emptyBlocks {
	e := emptyBlocks{stacks: make([][]int32, len(x.list)+1)}
	e.stacks[0] = make([]int32, 0, x.first)
	for i := range x.list {
		e.stacks[i+1] = make([]int32, 0, x.blocks)
	}
	for id := int32(blocks) - 1; id >= 0; id-- {
		e.push(id, x.of(id))
	}
	return e
}

// push adds a block of an extent, -1: of none.
func (e *emptyBlocks) push(id int32, extent int) {
	e.stacks[extent+1] = append(e.stacks[extent+1], id)
	e.lowest = min(e.lowest, extent+1)
	e.n++
}

// pop removes the block to be allocated next. False: there is none.
func (e *emptyBlocks) pop() (id int32, ok bool) {
	if e.n == 0 {
		return 0, false
	}
	for len(e.stacks[e.lowest]) == 0 {
		e.lowest++
	}
	s := &e.stacks[e.lowest]
	last := len(*s) - 1
	id, *s = (*s)[last], (*s)[:last]
	e.n--
	return id, true
}

// drop removes the blocks of an extent.
func (e *emptyBlocks) drop(extent int) {
	e.n -= len(e.stacks[extent+1])
	e.stacks[extent+1] = e.stacks[extent+1][:0]
}
