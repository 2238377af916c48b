// Package kvcache holds the keys and values of sequences in fixed-size blocks
// of device memory: the pool they lie in, the allocator that hands them out, and
// the block table of each sequence.
//
// A block is [layers, 2, block tokens, kv heads, head dim]: the K and V of all
// layers for BlockTokens positions, contiguous, so that one copy moves it between
// memories. Kernels see the pool one layer at a time, as strided tensors of shape
// [blocks, block tokens, kv heads, head dim] (Pool.View), and find a sequence's
// rows through its block ids (Table.Blocks) and slots (Table.Slot).
//
// # What it is not
//
// It moves nothing between tiers and indexes no prefixes: managers that do stand
// on top of Allocator, which counts references so that blocks may be shared. It
// does not decide who gets blocks when there are too few: Grow says ErrNoBlocks
// and the engine decides.
//
// # Invariants
//
//   - A block is either free or referenced; the sum of both is the pool's size.
//   - Grow takes all the blocks it needs, or none.
//   - A block that is freed may be handed out again at once. The caller frees only
//     what no enqueued work will read: work that will write it again is enqueued
//     later on the same stream, or behind an event.
//
// # Example
//
//	pool, err := kvcache.New(kvcache.Options{Machine: m, Space: device.HBM(0), Blocks: 512, Shape: shape})
//	seq := pool.NewTable()
//	if err := seq.Grow(len(prompt)); errors.Is(err, kvcache.ErrNoBlocks) { … }
//	slot := seq.Slot(0)            // for kernels.RoPEAppendKV
//	k, v := pool.View(layer)       // for kernels.RoPEAppendKV and kernels.Attention
//	seq.Free()
package kvcache
