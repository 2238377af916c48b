package kvcache

import (
	"fmt"
	"slices"
)

// Table is the block table of one sequence: block i holds the tokens at positions
// [i*B, (i+1)*B), where B is the number of tokens per block.
//
// The order of calls: Match finds blocks that already hold the sequence's first tokens.
// For each step, Reserve allocates the blocks that the step will write, and SetFilled
// records, after the step, how many tokens they hold. Release releases all blocks; the
// table may then be used again.
//
// Sequences that begin with the same tokens share full blocks: a filled block gets its
// key from Identify, and Match finds it by this key. Fork shares the blocks of a given
// sequence, with keys or without; the last one may be partly filled, and is copied before the
// new sequence writes to it.
type Table struct {
	m      *Manager
	keys   []Key
	tokens []int32 // of the blocks with keys, for events
	blocks []int32
	filled int // tokens
	// writable is the end, in tokens, of the blocks reserved for writing: those from
	// filled to writable belong to this sequence alone and have no key. A multiple of
	// the block size.
	writable int
	// matched: the blocks are those of a Match, and no others.
	matched bool
	// hits and cold are those of the last Match, which count once a Reserve makes use of it.
	hits, cold int64
	// keyed is how many of the first blocks had keys when Manager.losses was losses.
	keyed  int
	losses int64
	// shared is the number of blocks of the last Match, after which Manager.gained was gained, that
	// were not free when it had released them; -1: unknown.
	shared int
	gained int64
}

// Identify sets the keys of the sequence's first full blocks, as far as its tokens are
// known, of which events have no tokens until SetTokens. The table keeps the slice; keys of filled blocks
// must not change.
func (t *Table) Identify(keys []Key) { t.keys, t.tokens, t.shared = keys, nil, -1 }

// SetTokens sets the tokens that the sequence's keys are of, which events then have. The table keeps the slice,
// as events do; its elements must not change.
func (t *Table) SetTokens(tokens []int32) { t.tokens = tokens }

// Match adds the full blocks that already hold the sequence's first tokens, at most
// maxTokens of them, to a table without blocks, and returns their number of tokens.
func (t *Table) Match(maxTokens int) (tokens int) {
	if len(t.blocks) > 0 {
		panic(fmt.Sprintf("kvcache: match of a sequence with %d blocks", len(t.blocks)))
	}
	keys := t.keys[:min(len(t.keys), maxTokens/t.m.blockTokens)]
	before := int32(0)
	t.hits, t.cold = 0, 0
	for i, k := range keys {
		id, ok := t.m.find(k, before)
		if !ok {
			t.m.missed(keys[i:])
			break
		}
		if i == 0 {
			t.blocks = slices.Grow(t.blocks, len(keys)+1)
		}
		if t.m.refs[id] == 0 && t.m.holds[id] == 0 {
			t.hits++
			if t.m.reuse.isCold(id) {
				t.cold++
			}
		}
		t.m.share(id)
		t.blocks = append(t.blocks, id)
		before = id
	}
	t.filled = len(t.blocks) * t.m.blockTokens
	t.writable = t.filled
	t.matched, t.gained = true, t.m.gained
	return t.filled
}

// MayReserve reports whether CanReserve could succeed after another Match, of a table that was
// released after the last one. It looks at no block: since then, at most those blocks can have become
// shared that the manager has counted. So a sequence that waits for room is matched again only when
// that may help.
func (t *Table) MayReserve(tokens, leave int) bool {
	if t.shared < 0 {
		return true
	}
	shared := int64(t.shared) + t.m.gained - t.gained
	return int64(t.m.blocksFor(tokens)+leave)-shared <= int64(t.m.Free())
}

// Lacks is how many blocks must be free for CanReserve to be true after a Match, of a table without
// blocks; 0: as many are, as far as can be said without one. It looks at the sequence's blocks only
// where MayReserve is true.
func (t *Table) Lacks(tokens, leave int) int {
	shared := int64(t.shared) + t.m.gained - t.gained
	if t.MayReserve(tokens, leave) {
		shared = 0
		for _, k := range t.keys {
			id, ok := t.m.byKey[k]
			if !ok {
				break
			}
			if t.m.refs[id] > 0 || t.m.holds[id] > 0 {
				shared++
			}
		}
	}
	if n := int(max(0, int64(t.m.blocksFor(tokens))-shared)) + leave; n > t.m.Free() {
		return n
	}
	return 0
}

// Fork shares the blocks that hold another sequence's first tokens, with a table without
// blocks. Both sequences have these tokens.
func (t *Table) Fork(from *Table, tokens int) {
	if len(t.blocks) > 0 || tokens > from.filled {
		panic(fmt.Sprintf("kvcache: fork of %d tokens of a sequence with %d to one with %d blocks", tokens, from.filled, len(t.blocks)))
	}
	for _, id := range from.blocks[:t.m.blocksFor(tokens)] {
		t.m.refs[id]++
		t.blocks = append(t.blocks, id)
	}
	t.filled, t.writable, t.matched = tokens, tokens/t.m.blockTokens*t.m.blockTokens, false
}

// CanReserve reports whether Reserve would succeed, and leave so many blocks free.
func (t *Table) CanReserve(tokens, leave int) bool { return t.Missing(tokens)+leave <= t.m.Free() }

// WillReserve reports whether Reserve would succeed if the transfers under way had ended, which
// hold blocks that no sequence uses.
func (t *Table) WillReserve(tokens, leave int) bool {
	return t.Missing(tokens)+leave <= t.m.Free()+t.m.moving()
}

// Missing is the number of blocks that Reserve allocates.
func (t *Table) Missing(tokens int) int {
	end := t.m.blocksFor(tokens)
	n := max(0, end-len(t.blocks))
	for i := t.writable / t.m.blockTokens; i < min(end, len(t.blocks)); i++ {
		if !t.m.writable(t.blocks[i]) {
			n++
		}
	}
	return n
}

// Reserve ensures that the sequence has blocks for its first tokens, and that the blocks
// after the filled ones, which will be written, are neither shared nor held and have no key. It
// allocates all the blocks needed for that, or returns false and allocates none. It never
// releases blocks, even where the sequence has more.
//
// Where a shared block that holds the last filled tokens is replaced, these are yet to be copied:
// see Manager.Copies.
func (t *Table) Reserve(tokens int) bool {
	if tokens > t.writable && !t.CanReserve(tokens, 0) {
		return false
	}
	t.m.reuse.hit(t.hits, t.cold)
	t.hits, t.cold = 0, 0
	if tokens <= t.writable {
		return true
	}
	t.matched = false
	end := t.m.blocksFor(tokens)
	for i := t.writable / t.m.blockTokens; i < min(end, len(t.blocks)); i++ {
		if id := t.blocks[i]; !t.m.writable(id) {
			t.blocks[i] = t.m.allocate()
			if i*t.m.blockTokens < t.filled {
				t.m.copy(id, t.blocks[i])
			}
			t.m.release(id, true)
		} else {
			t.m.clearKey(id)
		}
	}
	for len(t.blocks) < end {
		t.blocks = append(t.blocks, t.m.allocate())
	}
	t.writable = end * t.m.blockTokens
	return true
}

// SetFilled records that the blocks hold the sequence's first tokens: more than before after
// a step has written reserved blocks, or fewer, in whole blocks, where the rest will be
// computed again.
func (t *Table) SetFilled(tokens int) {
	b := t.m.blockTokens
	if tokens > max(t.filled, t.writable) || tokens < t.filled && tokens%b != 0 {
		panic(fmt.Sprintf("kvcache: %d tokens are filled after %d, in blocks of %d; %d were reserved", tokens, t.filled, b, t.writable))
	}
	if tokens < t.filled {
		t.writable, t.keyed = tokens, min(t.keyed, tokens/b)
	}
	first, end := t.filled/b, min(tokens/b, len(t.keys))
	if first < end {
		first = t.lost(first)
	}
	for i := first; i < end; i++ {
		if !t.m.setKey(t.blocks[i], t.keys[i]) {
			t.m.stored(t, first, i)
			first = i + 1
		}
	}
	t.m.stored(t, first, max(first, end))
	t.filled = tokens
}

// lost is the first of so many blocks whose key no block has: another one had it, or a sequence that shared the
// block has released it without keep. Match would find no block behind it. The result is n where there is none.
//
// A long sequence is not searched anew for each block that it fills: its first blocks have kept their keys unless a
// block that is used has lost one.
func (t *Table) lost(n int) int {
	if t.losses != t.m.losses {
		t.keyed, t.losses = 0, t.m.losses
	}
	for i := t.keyed; i < n; i++ {
		id := t.blocks[i]
		if t.m.keys[id] != (Key{}) {
			if i == t.keyed {
				t.keyed++
			}
			continue
		}
		if _, ok := t.m.byKey[t.keys[i]]; !ok && !t.m.extents.withdrawn(t.m.extents.of(id)) {
			return i
		}
	}
	return n
}

// Release releases all blocks. Those that no other sequence uses become free; with keep
// they keep their keys and can be matched until they are evicted.
//
// The last block is released first, so the end of a prefix is evicted before its
// beginning, and the next sequence gets blocks without keys in the same order.
func (t *Table) Release(keep bool) {
	free := t.m.Free()
	t.m.reuse.asBefore = t.hits > 0 // what was only matched is as old as before
	for i := len(t.blocks) - 1; i >= 0; i-- {
		t.m.release(t.blocks[i], keep)
	}
	t.m.reuse.asBefore, t.hits, t.cold = false, 0, 0
	if t.shared = -1; t.matched {
		t.shared, t.matched = len(t.blocks)-(t.m.Free()-free), false
	}
	t.blocks, t.filled, t.writable, t.keyed = t.blocks[:0], 0, 0, 0
}

// Filled is the number of the sequence's first tokens that the blocks hold.
func (t *Table) Filled() int { return t.filled }

// Exclusive is the number of blocks that no other sequence uses: those that Release frees.
func (t *Table) Exclusive() (blocks int) {
	for _, id := range t.blocks {
		if t.m.refs[id] == 1 {
			blocks++
		}
	}
	return blocks
}

// Blocks returns the block ids in order of position. The slice is valid until another
// method is called; the caller must not change it.
func (t *Table) Blocks() []int32 { return t.blocks }
