package tier

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/kvcache"
)

// Check counts all blocks again, and reports the first thing about the account, or its policy,
// that does not hold.
func (m *Manager) Check() error {
	s := Stats{Capacity: len(m.blocks), Free: len(m.blocks) - int(m.fresh) + len(m.free)}
	s.Allocated, s.Evicted, s.Freed, s.Stored, s.Loaded = m.stats.Allocated, m.stats.Evicted, m.stats.Freed, m.stats.Stored, m.stats.Loaded
	free := map[int32]bool{}
	for _, id := range m.free {
		if free[id] || id >= m.fresh {
			return fmt.Errorf("block %d is free twice", id)
		}
		free[id] = true
	}
	keys, evictable := 0, map[int32]bool{}
	for i := range m.blocks {
		id, b := int32(i), &m.blocks[i]
		switch {
		case id >= m.fresh || free[id]:
			if *b != (block{}) {
				return fmt.Errorf("block %d is free, and is %+v", id, *b)
			}
			continue
		case b.number == 0:
			return fmt.Errorf("block %d is nowhere", id)
		case b.lost && b.refs == 0:
			return fmt.Errorf("block %d is in quarantine, and nobody uses it", id)
		case b.lost:
			s.Quarantined++
			continue
		case b.refs == 0:
			s.Evictable++
			evictable[id] = true
		case b.refs == pending:
			s.Pending++
		case b.refs > 0:
			s.Pinned++
		default:
			return fmt.Errorf("block %d has %d references", id, b.refs)
		}
		if at, ok := m.byKey[b.key]; !ok || at != id {
			return fmt.Errorf("block %d has a key that leads to %d, %v", id, at, ok)
		}
		keys++
	}
	if s != m.stats {
		return fmt.Errorf("numbers %+v, counted again %+v", m.stats, s)
	}
	if sum := s.Free + s.Evictable + s.Pinned + s.Pending + s.Quarantined; sum != s.Capacity {
		return fmt.Errorf("%d blocks of %d", sum, s.Capacity)
	}
	if used := s.Allocated - s.Evicted - s.Freed; used != int64(s.Capacity-s.Free) {
		return fmt.Errorf("%d blocks were allocated and not freed, %d are in use", used, s.Capacity-s.Free)
	}
	if keys != len(m.byKey) {
		return fmt.Errorf("%d blocks have keys, %d keys are found", keys, len(m.byKey))
	}
	var has []int32 // evictable blocks of the policy
	switch e := m.eviction.(type) {
	case *LRU:
		for id := e.order.first(); id != e.order.end(); id = e.order.next(id) {
			has = append(has, id)
		}
	case *ARC:
		for i, t := range e.t {
			for at, id := range t.evictable {
				if b := e.blocks[id]; int(b.place) != at || int(b.segment) != i {
					return fmt.Errorf("block %d is in place %d of T%d, and says %+v", id, at, i+1, b)
				}
				if at > 0 && e.before(id, t.evictable[(at-1)/2]) {
					return fmt.Errorf("T%d is no heap", i+1)
				}
				has = append(has, id)
			}
		}
		for i, g := range e.ghosts {
			if g.len() > len(m.blocks) || len(g.keys) > len(m.blocks) {
				return fmt.Errorf("B%d has %d keys in %d places, the tier %d blocks", i+1, g.len(), len(g.keys), len(m.blocks))
			}
		}
	default:
		return nil
	}
	for _, id := range has {
		if !evictable[id] {
			return fmt.Errorf("the policy would evict block %d", id)
		}
		delete(evictable, id)
	}
	if len(evictable) > 0 {
		return fmt.Errorf("the policy lacks blocks %v", evictable)
	}
	return nil
}

// ARCState returns the target size of T1, and the keys of T1, T2, B1 and B2, the least recent
// first. ok is false for another policy.
func (m *Manager) ARCState() (target float64, lists [4][]kvcache.Key, ok bool) {
	e, ok := m.eviction.(*ARC)
	if !ok {
		return 0, lists, false
	}
	var t [2][]int32
	for id, b := range m.blocks {
		if b.number != 0 && !b.lost {
			s := e.blocks[id].segment
			t[s] = append(t[s], int32(id))
		}
	}
	for i, ids := range t {
		if len(ids) != e.t[i].size {
			panic(fmt.Sprintf("T%d has %d blocks, and says %d", i+1, len(ids), e.t[i].size))
		}
		slices.SortFunc(ids, func(x, y int32) int { return cmp.Compare(e.blocks[x].used, e.blocks[y].used) })
		for _, id := range ids {
			lists[i] = append(lists[i], m.blocks[id].key)
		}
		g := &e.ghosts[i]
		for n := g.order.first(); n != g.order.end(); n = g.order.next(n) {
			lists[2+i] = append(lists[2+i], g.keys[n])
		}
	}
	return e.target, lists, true
}
