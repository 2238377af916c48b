package tier

import "github.com/moeserve/moeserve/kvcache"

// ARC is the adaptive replacement cache of Megiddo and Modha (FAST 2003), over blocks that may be
// pinned. It keeps blocks that were stored and not touched since (T1) apart from those touched
// again (T2), and remembers the keys that it evicted from each (the ghosts B1 and B2, at most as
// many as the tier has blocks in either). Touching a ghost of T1 says that T1 was too small, one
// of T2 that T2 was; by that it moves its target size of T1.
//
// Unlike LRU's, the order within T1 and T2 is by Insert and Touch alone: a block that is pinned
// keeps its place. A list may have no evictable block while the other has, and then the other's
// are evicted.
type ARC struct {
	target float64 // of the size of T1, in blocks
	t      [2]segment
	ghosts [2]ghosts
	blocks []arcBlock
	now    uint64  // counts uses
	kept   []int32 // reused by Evict
}

// segment is T1 or T2: the number of its blocks, and those that are evictable as a binary heap,
// the one used first at the top.
type segment struct {
	size      int
	evictable []int32
}

// arcBlock is the policy's part of a block.
type arcBlock struct {
	key     kvcache.Key
	used    uint64
	place   int32 // in the heap; -1: not evictable
	segment uint8
}

const (
	t1 = 0
	t2 = 1
)

// NewARC returns the policy of a tier of so many blocks.
func NewARC(blocks int) *ARC {
	return &ARC{ghosts: [2]ghosts{newGhosts(blocks), newGhosts(blocks)}, blocks: make([]arcBlock, blocks)}
}

// Insert implements Eviction.
func (a *ARC) Insert(id int32, k kvcache.Key) {
	a.ghosts[t1].remove(k)
	a.ghosts[t2].remove(k)
	a.now++
	a.blocks[id] = arcBlock{key: k, used: a.now, place: -1, segment: t1}
	a.t[t1].size++
}

// SetEvictable implements Eviction.
func (a *ARC) SetEvictable(id int32, evictable bool) {
	if evictable {
		a.push(id)
	} else {
		a.pull(id)
	}
}

// Touch implements Eviction.
func (a *ARC) Touch(id int32, k kvcache.Key, s State) {
	if s == Miss {
		a.touchGhost(k)
		return
	}
	b := &a.blocks[id]
	evictable := b.place >= 0
	if evictable {
		a.pull(id)
	}
	if s == Hit { // a block that is being filled was not used twice
		a.t[b.segment].size--
		b.segment = t2
		a.t[t2].size++
	}
	a.now++
	b.used = a.now
	if evictable {
		a.push(id)
	}
}

// touchGhost moves the target towards the list that would still have the key if it were larger.
func (a *ARC) touchGhost(k kvcache.Key) {
	b1, b2 := &a.ghosts[t1], &a.ghosts[t2]
	switch {
	case b1.touch(k):
		a.target = min(a.target+max(1, float64(b2.len())/float64(b1.len())), float64(len(a.blocks)))
	case b2.touch(k):
		a.target = max(a.target-max(1, float64(b1.len())/float64(b2.len())), 0)
	}
}

// Remove implements Eviction. The key becomes no ghost: it was not evicted.
func (a *ARC) Remove(id int32) {
	if a.blocks[id].place >= 0 {
		a.pull(id)
	}
	a.t[a.blocks[id].segment].size--
}

// Evict implements Eviction. It fails only where there are too few blocks.
func (a *ARC) Evict(victims []int32, n int, keep func(id int32) bool) ([]int32, bool) {
	from := len(victims)
	a.kept = a.kept[:0]
	size := a.t[t1].size
	for len(victims)-from < n {
		s := t2
		if size >= int(a.target) {
			s = t1
		}
		id, ok := a.oldest(s, keep)
		if !ok {
			id, ok = a.oldest(1-s, keep)
		}
		if !ok {
			break
		}
		if a.blocks[id].segment == t1 {
			size--
		}
		victims = append(victims, id)
	}
	for _, id := range a.kept {
		a.push(id)
	}
	if len(victims)-from < n {
		for _, id := range victims[from:] {
			a.push(id)
		}
		return victims[:from], false
	}
	for _, id := range victims[from:] {
		b := &a.blocks[id]
		a.ghosts[b.segment].add(b.key)
		a.t[b.segment].size--
	}
	return victims, true
}

// oldest takes the evictable block off a segment's heap that was used first, and appends those
// that it passes over to a.kept.
func (a *ARC) oldest(s int, keep func(id int32) bool) (int32, bool) {
	for len(a.t[s].evictable) > 0 {
		id := a.t[s].evictable[0]
		a.pull(id)
		if !keep(id) {
			return id, true
		}
		a.kept = append(a.kept, id)
	}
	return 0, false
}

// push puts a block into its segment's heap.
func (a *ARC) push(id int32) {
	b := &a.blocks[id]
	h := &a.t[b.segment].evictable
	b.place = int32(len(*h))
	*h = append(*h, id)
	a.up(*h, b.place)
}

// pull takes a block out of its segment's heap.
func (a *ARC) pull(id int32) {
	b := &a.blocks[id]
	h := &a.t[b.segment].evictable
	last := int32(len(*h) - 1)
	at := b.place
	b.place = -1
	moved := (*h)[last]
	*h = (*h)[:last]
	if at == last {
		return
	}
	a.put(*h, at, moved)
	a.up(*h, at)
	a.down(*h, a.blocks[moved].place)
}

func (a *ARC) put(h []int32, at, id int32) {
	h[at] = id
	a.blocks[id].place = at
}

func (a *ARC) before(x, y int32) bool { return a.blocks[x].used < a.blocks[y].used }

func (a *ARC) up(h []int32, at int32) {
	id := h[at]
	for at > 0 {
		parent := (at - 1) / 2
		if !a.before(id, h[parent]) {
			break
		}
		a.put(h, at, h[parent])
		at = parent
	}
	a.put(h, at, id)
}

func (a *ARC) down(h []int32, at int32) {
	id := h[at]
	for {
		child := 2*at + 1
		if int(child) >= len(h) {
			break
		}
		if right := child + 1; int(right) < len(h) && a.before(h[right], h[child]) {
			child = right
		}
		if !a.before(h[child], id) {
			break
		}
		a.put(h, at, h[child])
		at = child
	}
	a.put(h, at, id)
}

// ghosts are keys in the order of their eviction or last touch.
type ghosts struct {
	byKey map[kvcache.Key]int32
	keys  []kvcache.Key // by number in the list, up to as many as there were at once
	free  []int32       // numbers without a key
	order list
}

func newGhosts(limit int) ghosts {
	return ghosts{byKey: map[kvcache.Key]int32{}, order: newList(limit)}
}

func (g *ghosts) len() int { return len(g.byKey) }

// add adds a key, which is none of them, and forgets the first one if there are too many.
func (g *ghosts) add(k kvcache.Key) {
	if g.len() == int(g.order.end()) {
		g.remove(g.keys[g.order.first()])
	}
	var n int32
	if last := len(g.free) - 1; last >= 0 {
		n, g.free = g.free[last], g.free[:last]
		g.keys[n] = k
	} else {
		n = int32(len(g.keys))
		g.keys = append(g.keys, k)
	}
	g.byKey[k] = n
	g.order.pushBack(n)
}

// touch moves a key to the end, and returns whether it is one of them.
func (g *ghosts) touch(k kvcache.Key) bool {
	n, ok := g.byKey[k]
	if ok {
		g.order.remove(n)
		g.order.pushBack(n)
	}
	return ok
}

func (g *ghosts) remove(k kvcache.Key) {
	if n, ok := g.byKey[k]; ok {
		delete(g.byKey, k)
		g.order.remove(n)
		g.free = append(g.free, n)
	}
}
