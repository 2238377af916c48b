package kvcache

// Reuse counts what shows how much a larger prefix cache would be worth, and a smaller one
// cost. The counts are cumulative.
type Reuse struct {
	// Hits are blocks that a sequence matched and that no other used. ColdHits are those among
	// them in the coldest quarter of the cache: which had been free for more than three quarters
	// of the time after which blocks are evicted. Time is counted in blocks that became free.
	Hits, ColdHits int64
	// LostHits are blocks that would have been matched if there had been memory for Lost more,
	// and LateHits those among them that would have been with memory for MaxLost/4 more, since
	// they were lost last.
	LostHits, LateHits int64
	// Lost is the number of blocks whose content was evicted last, or withdrawn, and is
	// remembered by key, MaxLost its maximum.
	Lost, MaxLost int
	// Cached is the number of free blocks with content now, Empty of those without.
	Cached, Empty int
}

// reuse watches blocks that are free and have a key.
type reuse struct {
	hits, cold, lostHits, lateHits int64
	// clock counts blocks that became free with a key; freed is its value when a block did, by
	// block. span is the age at which the last block was evicted; 0: none was.
	clock, span int64
	freed       []int64
	// asBefore: blocks become free that no sequence has used meanwhile.
	asBefore bool
	// lost are the keys of blocks that were evicted, numbered in the order of that, which is also
	// that of the ring.
	lost map[Key]int64
	ring []Key
	next int64
}

// newReuse returns one that remembers as many lost blocks as can be withdrawn.
func newReuse(o ManagerOptions) reuse {
	r := reuse{freed: make([]int64, o.Blocks), ring: make([]Key, o.Extents*o.ExtentBlocks)}
	if len(r.ring) > 0 {
		r.lost = make(map[Key]int64, len(r.ring))
	}
	return r
}

// cached records that a block became free with a key.
func (r *reuse) cached(id int32) {
	if r.asBefore {
		return
	}
	r.clock++
	r.freed[id] = r.clock
}

// isCold reports whether a free block is in the coldest quarter of the cache.
func (r *reuse) isCold(id int32) bool { return r.span > 0 && 4*(r.clock-r.freed[id]) > 3*r.span }

// hit records that free blocks were matched, and are used.
func (r *reuse) hit(blocks, cold int64) {
	r.hits += blocks
	r.cold += cold
}

// evicted records that a block lost its key for lack of memory.
func (r *reuse) evicted(id int32, k Key) {
	r.span = r.clock - r.freed[id]
	r.dropped(k)
}

// dropped remembers a key that was lost.
func (r *reuse) dropped(k Key) {
	if len(r.ring) == 0 {
		return
	}
	n := int64(len(r.ring))
	at := &r.ring[r.next%n]
	if number, ok := r.lost[*at]; ok && number == r.next-n { // and not lost again since
		delete(r.lost, *at)
	}
	*at, r.lost[k] = k, r.next
	r.next++
}

// forget forgets the lost keys.
func (r *reuse) forget() {
	clear(r.lost)
}

// missed counts those of the first keys that no block has any more that were lost, in a row
// with those that some block has. It counts each once: its content is about to be computed
// again.
func (m *Manager) missed(keys []Key) {
	if len(m.reuse.lost) == 0 {
		return
	}
	for _, k := range keys {
		if _, ok := m.byKey[k]; ok {
			continue
		}
		number, ok := m.reuse.lost[k]
		if !ok {
			return
		}
		delete(m.reuse.lost, k)
		m.reuse.lostHits++
		if m.reuse.next-number <= int64(len(m.reuse.ring)/4) {
			m.reuse.lateHits++
		}
	}
}

// Reuse returns the counts.
func (m *Manager) Reuse() Reuse {
	return Reuse{
		Hits: m.reuse.hits, ColdHits: m.reuse.cold, LostHits: m.reuse.lostHits, LateHits: m.reuse.lateHits,
		Lost: len(m.reuse.lost), MaxLost: len(m.reuse.ring), Cached: m.cached, Empty: m.empty.n,
	}
}
