// Package kvcache holds the keys and values of sequences in fixed-size blocks
// of device memory: the Pool they lie in, and the Manager that accounts for them,
// with a block table for each sequence.
//
// A block is [layers, 2, block tokens, kv heads, head dim]: the K and V of all
// layers for BlockTokens positions, contiguous, so that one copy moves it between
// memories. Kernels see the pool one layer at a time, as strided tensors of shape
// [blocks, block tokens, kv heads, head dim] (Pool.View), and find a sequence's
// tokens through its block ids (Table.Blocks).
//
// # Content
//
// A full block of a sequence with keys (Table.Identify) has a key: a hash of a salt and
// of all tokens up to the block's end. A sequence that begins with the same tokens finds
// the block by this key (Table.Match) and shares it, also after its last user released
// it, until the block is allocated for something else. Free blocks with a key are
// allocated last, in the order of a Policy. Samples of one prompt share its blocks without keys,
// too (Table.Fork), also the last one, which may be partly filled: it is copied before another
// sequence than its first writes to it (Manager.Copies).
//
// # Extents
//
// The last blocks can be divided into extents (ManagerOptions.Extents), each large enough for
// what else the memory is used for: an expert's weights. Withdraw takes an extent out of use, and
// Restore gives it back. Empty blocks outside of extents are allocated first, so that extents
// stay empty as long as there is room. Reuse counts what a larger or smaller prefix cache would
// change.
//
// # What it is not
//
// The package copies no blocks between tiers. It does not decide which sequence gets
// blocks when there are too few: Reserve returns false, and the scheduler decides. It does
// not compute keys: the owner of the tokens chains them with RootKey and Next.
//
// # Invariants
//
//   - A block is free, referenced, held by a copy alone, or withdrawn; the sum is the pool's
//     size.
//   - A withdrawn block is neither allocated nor matched. Its extent is free for other use when
//     nothing references or holds a block of it.
//   - Reserve allocates all the blocks it needs, or none.
//   - A block is written by one sequence at most, after the tokens of it that others share.
//   - A key identifies one block, whose content does not change until the block is
//     allocated again.
//   - A released block may be allocated again at once, unless it is held (Manager.Hold). The caller releases only blocks
//     that no enqueued work will read, or whose next writer is enqueued later on the same
//     stream or after an event.
//
// # Example
//
//	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Blocks: 512, Shape: shape})
//	manager, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 512})
//	seq := manager.NewTable()
//	if !seq.Reserve(len(prompt)) { … }
//	k, v := pool.View(layer)       // for kernels.RoPEAttention, with seq.Blocks()
//	seq.Filled(len(prompt))        // when the step has ended
//	seq.Release(true)
package kvcache
