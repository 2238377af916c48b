// Package experts keeps the weights of a model's experts: where each one is, the
// memory for all of them but what peers lend, and the copies that bring those that are
// not in the compute GPU's memory there in time.
//
// # Where experts are
//
// An expert is one contiguous extent in the backend's layout (kernels.ExpertLayout),
// the same bytes wherever it lies. A Placement says which experts are offloaded; the
// others are local: they lie in the compute GPU's memory. The authoritative copy of an
// offloaded expert lies in pinned host memory. Promote puts another into a peer's
// memory, which harvest lends and may take back at any moment; fetches come from there
// as long as it is there. To be used, an offloaded expert is fetched into a slot of the
// ring: CacheSlots extents of the compute GPU's memory, by default twice the largest
// number that one layer misses, so that the next layer's experts arrive while this
// one's are read. In an adaptive store local experts have a host copy as well, and Swap
// puts others in their places.
//
// A kernel finds experts through the layer's slot table, [experts] U64 in device
// memory, and is given the experts of one launch as a list. The store updates both in
// stream order, so nothing depends on where an expert lies.
//
// # Parts
//
// A Store puts together what does the work: the loader of checkpoints (package
// experts/load), the places where experts live and their swaps, the ring's choice of slots
// (package experts/ring) with the fetches into them, the tables that kernels read, and the
// steps that drive them. Copies in peers' memory are package peercache's.
//
// # Fetches
//
// A fetch asks the cache in peers' memory for a copy with a reference on it: if there is
// one it reads the peer, else the host. It takes no lock that anybody waits under. The
// experts of a wave come in one request from each memory, wherever they lie there and in
// the ring; predicted ones come each by itself, so that a wrong one can be forgone. Where
// a peer and the host together are faster than the peer alone, the last experts of a
// request come from the host: by the links' rates, which copies made so far correct, so
// that both end at the same time.
//
// # Filling
//
// Expert hands in rows of one matrix; it may be called from several goroutines and
// in any order (a fused checkpoint brings w1 and w3 of all experts before any w2).
// Experts with a host copy are packed straight into their host extents. Others go
// through a few pinned buffers of StagingBytes in all (package experts/load). Seal checks that every row
// of every expert has come, exactly once, and ends the loading.
//
// # A step
//
// One goroutine, the pipeline, drives the layers in their order, all on one
// compute stream. A step is a value, and so is a layer that is open:
//
//	step, err := store.BeginStep(ctx, compute)
//	for _, l := range layers {                    // those with experts
//		use, err := step.Layer(ctx, l)            // tables updated on compute
//		step.Prefetch(next(l))                    // the copies for the layer after it
//		for _, w := range use.Waves {             // resident ones first
//			… compute awaits w.Await …            // this wave's copies only
//			up.Slots, up.Experts = use.Slots, w.Experts
//			…
//		}
//		use.Close()                               // the slots may be overwritten
//	}
//	… the step's end is synchronized …
//	if err := step.End(); err != nil {            // never believe a step before this
//		compute.Recover(ctx)
//		step.Drop(ctx)
//		… run the step again …
//	}
//
// With few rows a layer needs few of its experts, and only these are fetched once the
// host knows which. A layer that awaits its router's choice is a value of another type,
// which cannot be closed:
//
//	open, err := step.LayerUnrouted(ctx, l)
//	… router; its choice and a prediction for the next layer come to the host …
//	… open.Waves: the resident experts …
//	use, err := open.FetchChosen(ctx, chosen)
//	step.PrefetchPredicted(next(l), predicted)
//	… use.Waves, each behind its copies …
//	use.Close()
//
// A store that misses nothing can be used as a whole, as a CUDA graph needs it: while the
// graph is captured, layers are those of step.Frozen(), and step.Layers comes before each
// launch.
//
// Prefetch and PrefetchPredicted may come any time and any number of times; opening a
// layer and FetchChosen fetch what these have not. When the next layer is prefetched while
// one is open, the ring holds both, and the copies into slots that the layer before used
// wait on the device for the fence that its Close put on the stream: the host never waits.
//
// Once a fetch has failed, everything but Drop fails. Drop wants the compute
// stream recovered (nothing of the dropped step is running); it waits for copies
// under way, drops what did not arrive whole, and keeps what did. Peer copies that
// could not be read are given back, and a peer whose copies fail three times in a row,
// or that is lost, is left out.
//
// # What it is not
//
// It does not compute, and it does not decide who is offloaded where: that is for the
// rebalancer, which calls Promote, Demote, Swap and Settle. A miss never puts an expert
// into a peer's memory.
//
// # Invariants
//
//   - A slot never serves an expert before its last byte has landed: whoever reads
//     it stands behind fences that only the ends of its copies raise.
//   - A slot is overwritten only after the last reader's fence.
//   - Every copy from a peer's memory holds a reference on it until it has ended.
//   - Slots are chosen in ring order, waves by expert id: never by time.
//   - What a step reads does not depend on tiers, moves, revocations or failures.
//   - One allocation for all local extents, one for the ring, one for all host
//     extents.
package experts
