// Package tier accounts for the KV blocks of one tier: the blocks that a medium other than
// the first GPU's pool holds (peer memory, host memory, files), by the key of their content.
// A Manager says which keys the tier has, which blocks a load reads and a store fills, and which
// are evicted for a store; an Eviction policy, LRU, ARC or one of the caller's, orders the
// blocks that may be. One implementation is for all tiers.
//
// # Loads and stores
//
// A store begins with PrepareStore, which allocates blocks and names them by ids; the caller then
// copies the content there, and CompleteStore makes it ready. A load begins with PrepareLoad,
// which pins ready blocks until CompleteLoad. A block is in one of these states:
//
//	free ── PrepareStore ──> pending ── CompleteStore ──> evictable ── PrepareLoad ──> pinned
//	  ^                        │                           ^    │                        │
//	  └── failed store ────────┘                           └────┼── last CompleteLoad ───┘
//	  └── evicted, or lost ─────────────────────────────────────┘
//
// Lose takes the key from a block at once, in any state: a pinned or pending block then is in
// quarantine, and becomes free when its loads or its store are completed.
//
// Fresh ids are allocated in ascending order, and when all have been used the id that was freed
// last comes first.
//
// # What it is not
//
// The package copies nothing, knows no memory, clock or goroutine, and does not decide what is
// worth storing or loading. It does not hold back a copy: that a medium has finished writing a
// block before CompleteStore, and reading before CompleteLoad, is the caller's. One goroutine
// uses a Manager.
//
// # Invariants
//
//   - Free, evictable, pinned, pending and quarantined blocks add up to the capacity.
//   - A key has one block at most, and a block that is not free has one key, until it is lost.
//   - PrepareLoad and PrepareStore do all of what they are asked for, or nothing: a refusal takes
//     no reference, moves no id, and reports no event.
//   - No more free blocks are allocated than are not withheld.
//   - A victim is ready, is read by no load, and its key is not among those to be stored.
//   - The id of a block is not allocated again before the loads and stores of the block are
//     completed, except after Reset.
//   - Events, applied in order, give the set of ready keys.
//
// # The order of a prefix
//
// Blocks become evictable in the order of their completion. With LRU the first block of a prefix
// would therefore be evicted before the last, which is of no use without it. Touch goes through
// keys from the last to the first: a caller who touches a prefix after it completed a store or a
// load of it has its end evicted first.
//
// # Example
//
//	m, err := tier.New(tier.Options{Blocks: 10_000, Medium: "CPU", Policy: tier.PolicyARC})
//	s, ok := m.PrepareStore(keys) // ok is false: no room
//	// Copy the blocks of s.Keys to s.IDs.
//	m.CompleteStore(s, copied)
//
//	l, err := m.PrepareLoad(keys) // after m.Lookup(k) == tier.Hit of each
//	// Copy from l.IDs.
//	err = m.CompleteLoad(l, copied)
package tier
