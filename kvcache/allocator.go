package kvcache

import (
	"errors"
	"fmt"
)

// ErrNoBlocks: fewer blocks are free than asked for. Nothing was taken; free a
// sequence, or wait.
var ErrNoBlocks = errors.New("no free KV blocks")

// Allocator hands out block ids and counts who refers to each. It is pure: it
// touches no memory. It is used by one goroutine at a time.
//
// Ids never used before ascend from 0; freed ones come back first, the last freed
// first, so that a small working set keeps using the same memory.
type Allocator struct {
	refs  []int32
	free  []int32
	fresh int32
}

// NewAllocator returns an allocator of the ids [0, blocks).
func NewAllocator(blocks int) *Allocator { return &Allocator{refs: make([]int32, blocks)} }

// Blocks is how many blocks there are in all.
func (a *Allocator) Blocks() int { return len(a.refs) }

// Free is how many blocks nobody refers to.
func (a *Allocator) Free() int { return len(a.free) + len(a.refs) - int(a.fresh) }

// Alloc appends n blocks to dst, each with one reference, and returns it. Where
// fewer are free it returns dst as it was, and ErrNoBlocks.
func (a *Allocator) Alloc(dst []int32, n int) ([]int32, error) {
	if n > a.Free() {
		return dst, fmt.Errorf("kvcache: %d blocks asked, %d of %d free: %w", n, a.Free(), len(a.refs), ErrNoBlocks)
	}
	for range n {
		var id int32
		if last := len(a.free) - 1; last >= 0 {
			id, a.free = a.free[last], a.free[:last]
		} else {
			id = a.fresh
			a.fresh++
		}
		a.refs[id] = 1
		dst = append(dst, id)
	}
	return dst, nil
}

// References is how many refer to a block; 0 for a free one.
func (a *Allocator) References(id int32) int { return int(a.refs[id]) }

// Retain adds a reference to a block that is in use. Retaining a free block is a
// broken invariant and panics.
func (a *Allocator) Retain(id int32) {
	a.mustBeUsed(id, "retained")
	a.refs[id]++
}

// Release takes a reference back; the last one frees the block. Releasing a free
// block is a broken invariant and panics.
func (a *Allocator) Release(id int32) {
	a.mustBeUsed(id, "released")
	if a.refs[id]--; a.refs[id] == 0 {
		a.free = append(a.free, id)
	}
}

func (a *Allocator) mustBeUsed(id int32, verb string) {
	if id < 0 || int(id) >= len(a.refs) || a.refs[id] == 0 {
		panic(fmt.Sprintf("kvcache: block %d of %d is %s while it is free", id, len(a.refs), verb))
	}
}
