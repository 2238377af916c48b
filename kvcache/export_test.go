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
	for _, id := range m.empty {
		free[id]++
		if m.keys[id] != (Key{}) {
			return fmt.Errorf("block %d is empty and has a name", id)
		}
	}
	for id := int(m.fresh); id < len(m.refs); id++ {
		free[id]++
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
	if all != m.Free() {
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

// Manager is the table's account.
func (t *Table) Manager() *Manager { return t.m }
