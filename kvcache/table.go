package kvcache

import "fmt"

// Table is the block table of one sequence: block i holds its positions
// [i*B, (i+1)*B). It is used by one goroutine at a time.
type Table struct {
	alloc       *Allocator
	blockTokens int
	blocks      []int32
}

// NewTable returns an empty table over blocks of blockTokens positions.
func NewTable(a *Allocator, blockTokens int) *Table {
	return &Table{alloc: a, blockTokens: blockTokens}
}

// Grow makes room for positions [0, tokens). Room that is there already stays,
// also where it is more. It takes all the blocks it needs, or none and returns an
// error that wraps ErrNoBlocks.
func (t *Table) Grow(tokens int) error {
	need := (tokens+t.blockTokens-1)/t.blockTokens - len(t.blocks)
	if need <= 0 {
		return nil
	}
	blocks, err := t.alloc.Alloc(t.blocks, need)
	if err != nil {
		return err
	}
	t.blocks = blocks
	return nil
}

// Capacity is how many positions there is room for.
func (t *Table) Capacity() int { return len(t.blocks) * t.blockTokens }

// Slot returns the place of a position in the pool: block * block tokens + row. It
// panics for a position without room.
func (t *Table) Slot(position int) int32 {
	if position < 0 || position >= t.Capacity() {
		panic(fmt.Sprintf("kvcache: slot of position %d in a table with room for %d", position, t.Capacity()))
	}
	return t.blocks[position/t.blockTokens]*int32(t.blockTokens) + int32(position%t.blockTokens)
}

// Blocks returns the ids in order of position, valid until the next Grow or Free;
// the caller does not change them.
func (t *Table) Blocks() []int32 { return t.blocks }

// Free releases every block, the last first, so that the next sequence gets them
// in the same order. The table is empty then and may be used again.
func (t *Table) Free() {
	for i := len(t.blocks) - 1; i >= 0; i-- {
		t.alloc.Release(t.blocks[i])
	}
	t.blocks = t.blocks[:0]
}
