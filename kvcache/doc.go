// Package kvcache holds the keys and values of sequences in fixed-size blocks
// of device memory: the Pool they lie in, and the Manager that accounts for them,
// with a block table for each sequence.
//
// A block is [layers, 2, block tokens, kv heads, head dim]: the K and V of all
// layers for BlockTokens positions, contiguous, so that one copy moves it between
// memories. Kernels see the pool one layer at a time, as strided tensors of shape
// [blocks, block tokens, kv heads, head dim] (Pool.View), and find a sequence's
// rows through its block ids (Table.Blocks).
//
// # Content
//
// A full block whose sequence has keys (Table.Identify) is named by its key, a hash
// of all tokens up to its end and of a salt. A sequence that begins with the same
// tokens gets the block by that name (Table.Match), beside others that have it or,
// where it is free, as long as nothing else has taken it. Free blocks that hold named
// content are reused last, in the order of a Policy. A sequence without keys names
// nothing, finds nothing and computes no hash.
//
// # What it is not
//
// It moves nothing between tiers. It does not decide who gets blocks when there are
// too few: Reserve says no, and the scheduler decides. It does not make keys known: who
// has the tokens chains them with RootKey and Next.
//
// # Invariants
//
//   - A block is either free or referenced; the sum of both is the pool's size.
//   - Reserve takes all the blocks it needs, or none.
//   - What a sequence reserves behind its filled tokens nobody else has; a block that
//     several have is full, named, and not written.
//   - A name is of one block, which holds just that content until it is reserved anew.
//   - A block that is freed may be handed out again at once. The caller frees only
//     what no enqueued work will read: work that will write it again is enqueued
//     later on the same stream, or behind an event.
//
// # Example
//
//	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Blocks: 512, Shape: shape})
//	manager, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 512})
//	seq := manager.NewTable()
//	if !seq.Reserve(len(prompt)) { … }
//	k, v := pool.View(layer)       // for kernels.RoPEAppendKV and kernels.Attention, with seq.Blocks()
//	seq.Filled(len(prompt))        // when the step has ended
//	seq.Release(true)
package kvcache
