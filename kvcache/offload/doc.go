// Package offload keeps KV blocks in tiers outside of the GPU's pool, and brings them back: in
// the memory of peers, in pinned host memory, in files. It is the connector between the engine
// and the tiers, and does what vLLM's OffloadingConnector does, with its names.
//
//	t, err := offload.New(offload.Options{
//		Machine: m, Space: device.HBM(0), Pool: pool, Blocks: manager, Transfer: engine,
//		Config: offload.Config{CPUBlocks: 10_000},
//	})
//	t.Store(keys, from, blocks, offload.Filled) // after a step: never waits
//
//	n, wait := t.Lookup(keys, from, tokens) // a sequence begins: how many blocks are worth loading
//	err = t.Load(sequence, keys, from, blocks[from:from+n])
//	for _, l := range t.Poll() { … l.Blocks have arrived … } // each turn of the engine
//
//	err = t.Close()
//
// # Tiers, mediums, handlers
//
// A tier is a medium and the account of its blocks (package tier), the same for all. Tiers are
// in order of speed: blocks are stored in the first, and in those behind it unless it is lossy;
// they are loaded from the first that has them. A Medium names itself and its capacity, and has
// a Handler for each direction; the worker finds the handler by (source, destination) and
// collects the transfers that have ended. A Spec makes the mediums of a Config; Register adds
// one by name. So a new medium is one file: cpu.go is the smallest.
//
// Which blocks are stored, loaded and evicted is decided by policies of these names in the Config:
// RegisterStorePolicy, RegisterLoadPolicy and tier.RegisterPolicy add some.
//
// A tier's block holds Factor blocks of the GPU, and its key is that of the last of them, which
// covers the tokens of all before it. Only whole ones are stored; a part may be loaded.
//
// # The life of a transfer
//
// Load holds the destination in the pool's account and pins the source in the tier's, Store
// holds the source and has the destination pending; so a sequence may release its blocks, or
// end, at once. All blocks of a load from one memory are one request with many pieces. A load
// from several tiers is a request to each, side by side. Poll, on the engine's goroutine, ends
// what has ended: it is the only one to change accounts. Blocks of a failed load that come
// behind the first that has not arrived are not reported; those that failed are lost to their
// tier. A failed store is one that was never made.
//
// A lookup of a block that is being stored, or loaded for another sequence, says wait: it will
// be there soon, and a second copy of it would be waste.
//
// # Revocation
//
// Harvest's callback, on any goroutine, only puts the key on a list. Each method of the
// engine's goroutine takes the list first, and has the account lose the keys.
//
// # Memory that others want
//
// A medium with a Budget has as much memory as its blocks are worth. Ten times a second Poll
// reports how often blocks are loaded from there, how often from slower tiers, and what such a
// load saves (harvest.Use), and learns for how many more blocks there is memory. The account
// allocates no more than that (tier.Manager.Withhold): new blocks take the place of old ones.
// Where a store is refused the memory nevertheless, blocks are evicted for it at once.
//
// # What it is not
//
// The package does not know requests, and decides neither who runs nor who is preempted. It
// writes nothing back: every block can be computed again. It keeps no block of the GPU beyond
// a transfer.
//
// # Invariants
//
//   - A block that Poll reports has the bytes that were stored under its key.
//   - Nothing is copied from a block of the GPU before the points of Behind are reached, nor
//     into one; and such a block is held until the copy has ended.
//   - Every load is reported once, when none of its copies is under way.
//   - A key is loaded for one sequence at a time.
//   - No method but Close waits for a transfer.
//   - After Close no block is held, and no memory or file is left.
package offload
