package kvcache

import "fmt"

// Check reports the first invariant of the account that does not hold; the tables are
// all that have blocks.
func (m *Manager) Check(tables ...*Table) error {
	refs := make([]int32, len(m.refs))
	for _, t := range tables {
		for _, id := range t.blocks {
			refs[id]++
		}
	}
	writers := make([]int, len(m.refs))
	for _, t := range tables {
		for i := t.filled / m.blockTokens; i < t.writable/m.blockTokens; i++ {
			if writers[t.blocks[i]]++; writers[t.blocks[i]] > 1 {
				return fmt.Errorf("block %d is written by two sequences", t.blocks[i])
			}
		}
	}
	free := make([]int, len(m.refs)) // places where a block is free
	empty := 0
	for x, stack := range m.empty.stacks {
		for _, id := range stack {
			free[id]++
			empty++
			if m.keys[id] != (Key{}) || m.extents.of(id) != x-1 {
				return fmt.Errorf("block %d of extent %d is empty, has key %x, and is in the list of extent %d", id, m.extents.of(id), m.keys[id], x-1)
			}
		}
	}
	if empty != m.empty.n {
		return fmt.Errorf("%d blocks are empty, %d counted", empty, m.empty.n)
	}
	withdrawn := 0
	counts := make([]ExtentState, len(m.extents.list))
	for id, n := range refs {
		x := m.extents.of(int32(id))
		if x < 0 {
			continue
		}
		busy := n > 0 || m.holds[id] > 0
		if busy {
			counts[x].Busy++
		} else if m.keys[id] != (Key{}) {
			counts[x].Cached++
		}
		if counts[x].Withdrawn = m.extents.withdrawn(x); counts[x].Withdrawn {
			if free[id] > 0 || m.keys[id] != (Key{}) {
				return fmt.Errorf("block %d is withdrawn, is free in %d places and has key %x", id, free[id], m.keys[id])
			}
			if !busy {
				free[id]++ // in no list
				withdrawn++
			}
		}
	}
	for x, s := range counts {
		if s != m.extents.list[x] {
			return fmt.Errorf("extent %d is %+v, counted as %+v", x, s, m.extents.list[x])
		}
	}
	if n := len(m.refs) - withdrawn; n != m.Present() {
		return fmt.Errorf("%d blocks are present, %d counted", n, m.Present())
	}
	kept := 0
	l := m.policy.(*LRU)
	for id := l.after[l.head()]; id != l.head(); id = l.after[id] {
		free[id]++
		kept++
		if m.keys[id] == (Key{}) {
			return fmt.Errorf("block %d is kept and has no name", id)
		}
	}
	if kept != m.cached {
		return fmt.Errorf("%d blocks are kept, %d counted", kept, m.cached)
	}
	all, held := 0, 0
	for id, n := range refs {
		if n == 0 && m.holds[id] > 0 {
			held++
			if free[id] > 0 {
				return fmt.Errorf("block %d is held and free", id)
			}
			continue
		}
		if n != m.refs[id] || (n > 0) == (free[id] > 0) || free[id] > 1 {
			return fmt.Errorf("block %d is with %d tables, %d counted, and free in %d places", id, n, m.refs[id], free[id])
		}
		all += free[id]
	}
	if held != m.Held() {
		return fmt.Errorf("%d blocks are held, %d counted", held, m.Held())
	}
	if all -= withdrawn; all != m.Free() {
		return fmt.Errorf("%d blocks are free, %d counted", all, m.Free())
	}
	named := 0
	for id, k := range m.keys {
		if k == (Key{}) {
			continue
		}
		if named++; m.byKey[k] != int32(id) {
			return fmt.Errorf("block %d has the name of block %d", id, m.byKey[k])
		}
	}
	if named != len(m.byKey) {
		return fmt.Errorf("%d blocks have names, %d names are found", named, len(m.byKey))
	}
	return nil
}

// Found are the keys that sequences can find.
func (m *Manager) Found() map[Key]bool {
	all := map[Key]bool{}
	for k := range m.byKey {
		all[k] = true
	}
	return all
}

// Manager is the table's account.
func (t *Table) Manager() *Manager { return t.m }
