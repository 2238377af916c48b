package kvcache

import (
	"fmt"
	"slices"
)

// ManagerOptions describe the blocks that a Manager accounts for.
type ManagerOptions struct {
	// Blocks is the number of blocks; their ids are [0, Blocks).
	Blocks int
	// BlockTokens is the number of tokens per block. Default: DefaultBlockTokens.
	BlockTokens int
	// Policy orders free blocks that have a key. Default: NewLRU.
	Policy Policy
	// Extents is the number of extents, each of ExtentBlocks blocks with successive ids, that
	// can be withdrawn: the last Extents * ExtentBlocks blocks. Default: none.
	Extents, ExtentBlocks int
	// Events keeps what is stored and removed for TakeEvents, which must then be called.
	Events bool
}

// EnsureDefaults returns o with its defaults filled in.
func (o ManagerOptions) EnsureDefaults() ManagerOptions {
	if o.BlockTokens == 0 {
		o.BlockTokens = DefaultBlockTokens
	}
	if o.Policy == nil {
		o.Policy = NewLRU(max(0, o.Blocks))
	}
	return o
}

// Validate reports the first invalid option.
func (o ManagerOptions) Validate() error {
	switch {
	case o.Blocks < 1:
		return fmt.Errorf("kvcache: Blocks is %d; it must be positive", o.Blocks)
	case o.BlockTokens < 1:
		return fmt.Errorf("kvcache: BlockTokens is %d; it must be positive", o.BlockTokens)
	case o.Extents < 0 || o.Extents > 0 && o.ExtentBlocks < 1:
		return fmt.Errorf("kvcache: %d extents of %d blocks; there must be at least one block in each", o.Extents, o.ExtentBlocks)
	case o.Extents > 0 && o.Extents > (o.Blocks-1)/o.ExtentBlocks:
		return fmt.Errorf("kvcache: %d extents of %d blocks, of %d blocks in all; at least one must be in none", o.Extents, o.ExtentBlocks, o.Blocks)
	}
	return nil
}

// Manager is the only account of KV blocks: which blocks each sequence has (its Table),
// how many sequences share a block, which blocks are free, and which content free blocks
// still have. It is a pure data structure: no memory access, no clock. One goroutine uses
// a Manager and its tables, except that any goroutine may call Blocks, BlockTokens and
// Capacity, whose results never change.
//
// A block is used, with refs counting its tables, held, because a copy still reads or
// writes it (Hold), free, or withdrawn (Withdraw). Free blocks are allocated in this order:
//
//   - empty: blocks without a key, those of no extent first, then by extent. Among these the
//     block released last is allocated first, so that a small working set keeps using the same
//     memory, and those that were never used come last, in ascending order of id.
//   - cached: blocks with a key, which sequences can match until the policy evicts them.
//
// So a cached block is evicted only when no other block is free, and where sequences have
// keys the whole pool is used before the first eviction.
type Manager struct {
	blockTokens int
	policy      Policy
	refs        []int32
	holds       []int32       // copies under way, by block
	held        int           // blocks that no sequence uses and that are held
	keys        []Key         // by block; zero: no key
	byKey       map[Key]int32 // block with a key
	next        []int32       // by block: the one that was found behind it last
	empty       emptyBlocks
	cached      int // free blocks with a key, ordered by the policy
	copies      []Copy
	// gained counts the blocks that a Match finds beside the free ones since they got a key, or
	// since they were allocated or held with the one that they had.
	gained int64
	// losses counts the keys that blocks have lost while a sequence went on using them.
	losses  int64
	extents extents
	reuse   reuse
	// events are those that nobody has taken, if record is set.
	events []Event
	record bool
}

// Copy is a block whose content is to be copied to another one.
type Copy struct {
	Src, Dst int32
}

// NewManager returns a manager whose blocks are all free.
func NewManager(o ManagerOptions) (*Manager, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	x := newExtents(o)
	return &Manager{
		blockTokens: o.BlockTokens, policy: o.Policy,
		refs: make([]int32, o.Blocks), holds: make([]int32, o.Blocks), keys: make([]Key, o.Blocks), byKey: make(map[Key]int32, o.Blocks), next: make([]int32, o.Blocks),
		empty: newEmptyBlocks(o.Blocks, x), extents: x, reuse: newReuse(o), record: o.Events,
	}, nil
}

// NewTable returns the empty block table of a new sequence.
func (m *Manager) NewTable() *Table { return &Table{m: m, shared: -1} }

// Blocks is the number of blocks, withdrawn ones included.
func (m *Manager) Blocks() int { return len(m.refs) }

// BlockTokens is the number of tokens per block.
func (m *Manager) BlockTokens() int { return m.blockTokens }

// Capacity is the maximum number of tokens of one sequence: what fits where all extents are
// withdrawn.
func (m *Manager) Capacity() int { return m.extents.first * m.blockTokens }

// Free is the number of blocks that can be allocated, cached ones included.
func (m *Manager) Free() int { return m.empty.n + m.cached }

// DropCached makes blocks that no sequence uses lose their keys: no sequence can match them
// any more. Blocks in use stay.
func (m *Manager) DropCached() {
	for ; m.cached > 0; m.cached-- {
		id := m.policy.Victim()
		m.clearKey(id)
		m.uncached(id)
		m.empty.push(id, m.extents.of(id))
	}
	m.reuse.forget()
	if m.held == 0 {
		return
	}
	for id, refs := range m.refs {
		if refs == 0 {
			m.clearKey(int32(id))
		}
	}
}

func (m *Manager) blocksFor(tokens int) int { return (tokens + m.blockTokens - 1) / m.blockTokens }

// allocate returns a free block with one reference and without a key. The caller has
// checked that a block is free.
func (m *Manager) allocate() int32 {
	id, ok := m.empty.pop()
	if !ok {
		id = m.policy.Victim()
		m.cached--
		m.uncached(id)
		m.reuse.evicted(id, m.keys[id])
		m.clearKey(id)
	}
	m.refs[id] = 1
	m.used(id, 1)
	return id
}

// share adds a reference to a block with a key, used, held or free.
func (m *Manager) share(id int32) {
	if m.refs[id] == 0 {
		m.take(id)
	}
	m.refs[id]++
}

// take takes a block with a key that no sequence uses from the free or the held ones.
func (m *Manager) take(id int32) {
	if m.holds[id] > 0 {
		m.held--
		return
	}
	m.policy.Remove(id)
	m.cached--
	m.gained++
	m.uncached(id)
	m.used(id, 1)
}

// writable reports whether the sequence that uses a block is the only one, and no copy
// reads it.
func (m *Manager) writable(id int32) bool { return m.refs[id] == 1 && m.holds[id] == 0 }

// release drops a reference. The last one frees the block, which keeps its key where
// keep is set; without, nobody matches it any more, also while others use it.
func (m *Manager) release(id int32, keep bool) {
	if !keep {
		if m.refs[id] > 1 {
			m.losses++
		}
		m.clearKey(id)
	}
	if m.refs[id]--; m.refs[id] > 0 {
		return
	}
	m.free(id)
}

// free frees a block that no sequence uses, unless it is held.
func (m *Manager) free(id int32) {
	if m.holds[id] > 0 {
		m.held++
		return
	}
	m.dropCopies(id)
	m.used(id, -1)
	switch x := m.extents.of(id); {
	case m.extents.withdrawn(x):
	case m.keys[id] == (Key{}):
		m.empty.push(id, x)
	default:
		m.policy.Add(id)
		m.cached++
		m.extents.addCached(x, 1)
		m.reuse.cached(id)
	}
}

// Hold keeps the content of blocks for a copy that reads or writes them: they are not
// allocated for anything else, nor written by a sequence, until Unhold, also where their
// sequences release them meanwhile. Holds nest. The blocks are used or have a key.
func (m *Manager) Hold(blocks []int32) {
	for _, id := range blocks {
		if m.refs[id] == 0 && m.holds[id] == 0 {
			if m.keys[id] == (Key{}) {
				panic(fmt.Sprintf("kvcache: hold of free block %d", id))
			}
			m.take(id)
			m.held++
		}
		m.holds[id]++
	}
}

// Unhold ends a Hold of these blocks.
func (m *Manager) Unhold(blocks []int32) {
	for _, id := range blocks {
		if m.holds[id] == 0 {
			panic(fmt.Sprintf("kvcache: block %d is not held", id))
		}
		if m.holds[id]--; m.holds[id] == 0 && m.refs[id] == 0 {
			m.held--
			m.free(id)
		}
	}
}

// copy adds to the copies to be made, and holds the source until then.
func (m *Manager) copy(src, dst int32) {
	m.Hold([]int32{src})
	m.copies = append(m.copies, Copy{src, dst})
}

// Copies are to be made, in this order, before the next step writes to blocks: those of forked
// sequences that are about to write to a block of which they share a part. The slice is valid
// until another method is called.
func (m *Manager) Copies() []Copy { return m.copies }

// Copied reports that all Copies were made.
func (m *Manager) Copied() {
	copies := m.copies
	m.copies = nil
	for _, c := range copies {
		m.Unhold([]int32{c.Src})
	}
}

// dropCopies drops the copy to a block that is not used any more.
func (m *Manager) dropCopies(dst int32) {
	if i := slices.IndexFunc(m.copies, func(c Copy) bool { return c.Dst == dst }); i >= 0 {
		src := m.copies[i].Src
		m.copies = slices.Delete(m.copies, i, i+1)
		m.Unhold([]int32{src})
	}
}

// moving is the number of blocks that no sequence uses, that others hold than Copies, which
// end only with a step, and that will be free then.
func (m *Manager) moving() int {
	n := m.held
	for x := range m.extents.list {
		if m.extents.withdrawn(x) {
			n -= m.heldIn(x)
		}
	}
	for i, c := range m.copies {
		same := func(o Copy) bool { return o.Src == c.Src }
		if m.extents.withdrawn(m.extents.of(c.Src)) || m.refs[c.Src] > 0 || slices.ContainsFunc(m.copies[:i], same) {
			continue
		}
		copies := int32(0)
		for _, o := range m.copies[i:] {
			if same(o) {
				copies++
			}
		}
		if m.holds[c.Src] == copies {
			n--
		}
	}
	return n
}

// Held is the number of blocks that no sequence uses and that are held.
func (m *Manager) Held() int { return m.held }

// find returns the block with a key, which is not zero. Where a prefix is found again, it is the one that
// was found behind the same block before, which takes a fraction of the time of looking it up.
func (m *Manager) find(k Key, before int32) (id int32, ok bool) {
	if id = m.next[before]; m.keys[id] == k {
		return id, true
	}
	if id, ok = m.byKey[k]; ok {
		m.next[before] = id
	}
	return id, ok
}

// setKey sets a block's key, unless another block has the same one, or the block is withdrawn, and reports
// whether it did.
func (m *Manager) setKey(id int32, k Key) bool {
	if _, ok := m.byKey[k]; ok || m.extents.withdrawn(m.extents.of(id)) {
		return false
	}
	m.byKey[k], m.keys[id] = id, k
	m.gained++
	return true
}

// clearKey removes a block's key, if it has one.
func (m *Manager) clearKey(id int32) {
	if k := m.keys[id]; k != (Key{}) {
		delete(m.byKey, k)
		m.keys[id] = Key{}
		m.removed(k)
	}
}
