package kvcache

import "fmt"

// Table is one sequence's part of a Manager's account: block i holds its positions
// [i*B, (i+1)*B).
//
// A sequence without blocks asks what of it is there (Match). Then, for each step,
// it reserves the blocks that the step will write (Reserve), and when the step has
// ended it says up to where they are filled (Filled). In the end it gives all of them
// back (Release), and may begin again.
//
// Full blocks can be shared, by sequences that begin with the same tokens: once a
// block is filled it has the key that Identify gave for it, and is matched by that. A
// sequence without keys shares nothing.
type Table struct {
	m      *Manager
	keys   []Key
	blocks []int32
	filled int // tokens
	// own: behind filled, blocks up to this position are the sequence's own and have no
	// name. It is where a block ends.
	own int
}

// Identify gives the keys of the sequence's first full blocks, those that are known.
// The table refers to the slice; the keys of blocks that are filled do not change.
func (t *Table) Identify(keys []Key) { t.keys = keys }

// Match gives the sequence, which has no blocks, those that hold its first tokens,
// full ones and at most as many as hold most tokens, and returns how many tokens these
// are. They can be read at once: ready is always true while there is one tier.
func (t *Table) Match(most int) (tokens int, ready bool) {
	if len(t.blocks) > 0 {
		panic(fmt.Sprintf("kvcache: match of a sequence with %d blocks", len(t.blocks)))
	}
	for _, k := range t.keys[:min(len(t.keys), most/t.m.blockTokens)] {
		id, ok := t.m.found[k]
		if !ok {
			break
		}
		t.m.share(id)
		t.blocks = append(t.blocks, id)
	}
	t.filled = len(t.blocks) * t.m.blockTokens
	t.own = t.filled
	return t.filled, true
}

// Room says whether Reserve would succeed.
func (t *Table) Room(tokens int) bool { return t.need(tokens) <= t.m.Free() }

// need is how many blocks Reserve takes.
func (t *Table) need(tokens int) int {
	end := t.m.blocksFor(tokens)
	n := max(0, end-len(t.blocks))
	for i := t.own / t.m.blockTokens; i < min(end, len(t.blocks)); i++ {
		if t.m.refs[t.blocks[i]] > 1 {
			n++
		}
	}
	return n
}

// Reserve makes sure that the sequence has blocks for its first tokens, and that those
// behind Filled, which are to be written, are its own and have no name any more. It
// takes all the blocks that it needs for that, or none and returns false. Blocks that
// are there already stay, also where they are more.
//
// Only full blocks are shared, so a block that is replaced has nothing to be copied.
func (t *Table) Reserve(tokens int) bool {
	if tokens <= t.own {
		return true
	}
	if !t.Room(tokens) {
		return false
	}
	end := t.m.blocksFor(tokens)
	for i := t.own / t.m.blockTokens; i < min(end, len(t.blocks)); i++ {
		if id := t.blocks[i]; t.m.refs[id] > 1 {
			t.m.release(id, true)
			t.blocks[i] = t.m.take()
		} else {
			t.m.forget(id)
		}
	}
	for len(t.blocks) < end {
		t.blocks = append(t.blocks, t.m.take())
	}
	t.own = end * t.m.blockTokens
	return true
}

// Filled says that the blocks hold the sequence's first tokens: more than before where
// a step has written them, which was reserved; or fewer, in whole blocks, where the
// rest will be written again.
func (t *Table) Filled(tokens int) {
	b := t.m.blockTokens
	if tokens > t.own || tokens < t.filled && tokens%b != 0 {
		panic(fmt.Sprintf("kvcache: %d tokens are filled behind %d, in blocks of %d; %d were reserved", tokens, t.filled, b, t.own))
	}
	if tokens < t.filled {
		t.own = tokens
	}
	for i := t.filled / b; i < min(tokens/b, len(t.keys)); i++ {
		t.m.name(t.blocks[i], t.keys[i])
	}
	t.filled = tokens
}

// Release gives all blocks back. Those that nobody else has are free: with keep what
// they hold can be matched until they are reused, else it is forgotten.
//
// The last block goes first. So the end of a prefix is given up before its beginning,
// and a sequence that comes next gets blocks without names in the same order.
func (t *Table) Release(keep bool) {
	for i := len(t.blocks) - 1; i >= 0; i-- {
		t.m.release(t.blocks[i], keep)
	}
	t.blocks, t.filled, t.own = t.blocks[:0], 0, 0
}

// Blocks returns the ids in order of position, valid until the next call of another
// method; the caller does not change them.
func (t *Table) Blocks() []int32 { return t.blocks }
