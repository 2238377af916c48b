package offload

import (
	"slices"

	"github.com/moeserve/moeserve/kvcache"
)

// members are the GPU's blocks that are in a tier's blocks, where these are larger: the events of the account, which
// are of the tier's blocks, become those of their members. vLLM's events name them too, but once for each block that
// has them; here a member is stored with the first of them and removed with the last, as routers do not count.
//
// A key covers all tokens before its block, so the key of a tier's block, which is that of its last member, determines
// the others. Blocks of sequences that part within a block have their first members in common.
type members struct {
	factor int
	// by has the members of the blocks that are ready by the events so far: at most factor times as many as
	// the tier has blocks.
	by     map[kvcache.Key]member
	events []kvcache.Event
}

type member struct {
	// before is the member before this one in its blocks. Of a first member it has no meaning.
	before kvcache.Key
	// blocks of the tier that have it.
	blocks int32
}

func newMembers(factor int) *members { return &members{factor: factor, by: map[kvcache.Key]member{}} }

// apply takes events of the account. of are the members of all blocks that they say are stored.
func (m *members) apply(events []kvcache.Event, of map[kvcache.Key][]kvcache.Key) {
	for _, e := range events {
		var changed []kvcache.Key
		// The end of a prefix is stored before its beginning: this gives successive blocks.
		for _, k := range slices.Backward(e.Stored) {
			changed = m.store(changed, of[k])
		}
		if len(changed) > 0 {
			m.events = append(m.events, kvcache.Event{Medium: e.Medium, Stored: changed})
			changed = nil
		}
		for _, k := range e.Removed {
			changed = m.remove(changed, k)
		}
		if len(changed) > 0 {
			m.events = append(m.events, kvcache.Event{Medium: e.Medium, Removed: changed})
		}
	}
}

// store counts a block with these members, and appends those to added that no block had.
func (m *members) store(added, of []kvcache.Key) []kvcache.Key {
	before := kvcache.Key{}
	for _, k := range of {
		x := m.by[k]
		if x.blocks == 0 {
			added = append(added, k)
		}
		m.by[k] = member{before, x.blocks + 1}
		before = k
	}
	return added
}

// remove is the end of the block of a key. It appends the members to removed that no block has any more.
func (m *members) remove(removed []kvcache.Key, k kvcache.Key) []kvcache.Key {
	for range m.factor {
		x := m.by[k]
		if x.blocks--; x.blocks == 0 {
			delete(m.by, k)
			removed = append(removed, k)
		} else {
			m.by[k] = x
		}
		k = x.before
	}
	return removed
}

// take returns the events since the last call.
func (m *members) take() []kvcache.Event {
	e := m.events
	m.events = nil
	return e
}

// membersOf are the members of the blocks of some of the keys that were offered, which are in their order.
func membersOf(all []offered, keys []kvcache.Key) map[kvcache.Key][]kvcache.Key {
	of, next := make(map[kvcache.Key][]kvcache.Key, len(keys)), 0
	for _, k := range keys {
		for all[next].key() != k {
			next++
		}
		of[k] = slices.Clone(all[next].keys)
	}
	return of
}
