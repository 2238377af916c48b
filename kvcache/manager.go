package kvcache

import "fmt"

// ManagerOptions describe the blocks that a Manager accounts for.
type ManagerOptions struct {
	// Blocks is how many there are; their ids are [0, Blocks).
	Blocks int
	// BlockTokens is the positions of a block. Default: DefaultBlockTokens.
	BlockTokens int
	// Policy orders free blocks whose content can still be matched. Default: NewLRU.
	Policy Policy
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

// Validate reports the first option that cannot be.
func (o ManagerOptions) Validate() error {
	switch {
	case o.Blocks < 1:
		return fmt.Errorf("kvcache: Blocks is %d; it must be positive", o.Blocks)
	case o.BlockTokens < 1:
		return fmt.Errorf("kvcache: BlockTokens is %d; it must be positive", o.BlockTokens)
	}
	return nil
}

// Manager is the account of KV blocks, and the only one: which of them each sequence
// has (its Table), how many sequences refer to a block, which are free, and what free
// ones still hold. It is pure: it touches no memory and has no clock. One goroutine
// uses it and its tables; but what never changes (Blocks, BlockTokens, Capacity) may be
// asked by any.
//
// A block is used, and then refs counts the tables that have it, or free. A free
// block is in one of three places, and is taken from there in this order:
//
//   - empty: what it holds has no name. The last freed is taken first, so that a small
//     working set keeps using the same memory.
//   - fresh: it was never used. Ids ascend.
//   - with the policy: it holds named content, which can be matched until the policy
//     gives the block up.
//
// So content is given up only where nothing else is free; and where sequences have
// keys, all of the pool's memory is touched before any content goes.
type Manager struct {
	blockTokens int
	policy      Policy
	refs        []int32
	names       []Key         // of what a block holds; zero: it has none
	found       map[Key]int32 // the block that a name is of
	empty       []int32
	fresh       int32 // the first block that was never used
	kept        int   // blocks with the policy
}

// NewManager returns an account of blocks that are all free.
func NewManager(o ManagerOptions) (*Manager, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Manager{
		blockTokens: o.BlockTokens, policy: o.Policy,
		refs: make([]int32, o.Blocks), names: make([]Key, o.Blocks), found: map[Key]int32{},
	}, nil
}

// NewTable returns the empty block table of a sequence.
func (m *Manager) NewTable() *Table { return &Table{m: m} }

// Blocks is how many blocks there are in all.
func (m *Manager) Blocks() int { return len(m.refs) }

// BlockTokens is the positions of a block.
func (m *Manager) BlockTokens() int { return m.blockTokens }

// Capacity is the most tokens that one sequence can have.
func (m *Manager) Capacity() int { return len(m.refs) * m.blockTokens }

// Free is how many blocks no sequence has.
func (m *Manager) Free() int { return len(m.empty) + len(m.refs) - int(m.fresh) + m.kept }

func (m *Manager) blocksFor(tokens int) int { return (tokens + m.blockTokens - 1) / m.blockTokens }

// take gives out a free block, of which there is one, with one reference to it and
// without a name.
func (m *Manager) take() int32 {
	var id int32
	if last := len(m.empty) - 1; last >= 0 {
		id, m.empty = m.empty[last], m.empty[:last]
	} else if int(m.fresh) < len(m.refs) {
		id = m.fresh
		m.fresh++
	} else {
		id = m.policy.Victim()
		m.kept--
		m.forget(id)
	}
	m.refs[id] = 1
	return id
}

// share adds a reference to a block with a name, used or free.
func (m *Manager) share(id int32) {
	if m.refs[id] == 0 {
		m.policy.Remove(id)
		m.kept--
	}
	m.refs[id]++
}

// release takes a reference back. The last one frees the block, whose content keeps
// its name where keep is set.
func (m *Manager) release(id int32, keep bool) {
	if m.refs[id]--; m.refs[id] > 0 {
		return
	}
	if !keep {
		m.forget(id)
	}
	if m.names[id] == (Key{}) {
		m.empty = append(m.empty, id)
		return
	}
	m.policy.Add(id)
	m.kept++
}

// name gives a name to what a block holds, unless another block has it already.
func (m *Manager) name(id int32, k Key) {
	if _, ok := m.found[k]; !ok {
		m.found[k], m.names[id] = id, k
	}
}

// forget takes a block's name away, if it has one.
func (m *Manager) forget(id int32) {
	if k := m.names[id]; k != (Key{}) {
		delete(m.found, k)
		m.names[id] = Key{}
	}
}
