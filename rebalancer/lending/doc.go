// Package lending shares the computing GPU's memory between KV blocks and experts: it decides how
// many extents of the KV cache (kvcache.Manager) are lent to the experts' store, as places for more
// resident experts (experts.Store.AddPlace), and carries that out.
//
//	l, err := lending.New(lending.Options{Manager: manager, Pool: pool, Store: store, Worth: rb.Worth, …})
//	for {                                 // the engine's loop
//		l.Turn(lacking, running)          // no step runs
//		… plan and run a step …
//	}
//	err = l.Close()                       // the engine is closed; the pool and the store are not
//
// # What an extent is worth
//
// Both sides are counted in seconds saved per second, as harvest counts what peers' memory is
// worth (harvest.Cost), and an extent holds one expert, so worths compare per byte.
//
// To experts an extent is worth the copies that one more resident expert saves: its uses per
// second times the seconds of a fetch (rebalancer.Worth), times the share of these seconds for
// which compute waits. The rest is hidden behind compute.
//
// To the KV cache it is worth the blocks that would be found there, times the seconds to compute
// a block again, or to load it from a tier. What one extent less would cost is estimated by the
// hits in the coldest quarter of the cache, what one more would save by matches of blocks that
// were evicted or withdrawn lately (kvcache.Reuse). Empty blocks are worth nothing beyond those
// that running sequences will need. If a request waits for blocks, an extent is also worth the
// throughput that it would add: with n running sequences a further one adds 1/n.
//
// # When memory moves
//
// An extent moves if it is worth Factor times as much to the other side, and, to experts, if that
// pays for the copy and for the blocks that are lost within a few seconds. It stays for Residence
// at least, and after extents came back none is lent for that long, or longer where they come and
// go; only a request that lacks blocks gets them back at once. No more is lent ahead than a few
// extents that no expert has come to yet.
//
// # A target
//
// With Lender.SetTarget an operator decides instead: so many extents are lent, whatever they are worth,
// however lately they came, and whether requests wait. The way there is the same: lent is what
// running sequences neither use nor will soon need, and no more ahead of the experts. Requests wait for
// those that run, as with a smaller KV cache. Only where none runs does one that lacks blocks
// get extents back, until it runs.
//
// # What it is not
//
// It does not choose experts: the rebalancer does. It moves no data: sequences leave withdrawn
// extents as they end, the content of tiers below has been stored when blocks were filled, and an
// expert's host copy is authoritative.
//
// # Invariants
//
//   - An extent is the KV cache's, is being withdrawn, is the store's, or is being returned; the
//     sum is Manager.Extents.
//   - The store has an extent only while no sequence uses and no copy holds a block of it, and the
//     KV cache only while the store does not use its memory.
//   - Nothing waits: what is still in use is looked at again in the next Turn.
//   - Core is pure: time is passed in, and equal histories give equal decisions.
package lending
