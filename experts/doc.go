// Package experts keeps the weights of a model's experts: where each one is, the memory
// for all of them except what peers lend, and the copies that bring offloaded experts into
// the GPU's memory in time.
//
// # Where experts are
//
// An expert is one contiguous extent in the backend's layout (kernels.ExpertLayout), the
// same bytes in every memory. A Placement lists the offloaded experts; the others are
// resident in the GPU's memory. The authoritative copy of an offloaded expert is in pinned
// host memory. Promote adds a copy in a peer's memory, which harvest lends and may revoke
// at any time; while that copy exists, fetches read it. To be used, an offloaded expert is
// fetched into a slot of the expert cache: CacheSlots extents of the GPU's memory, by
// default twice the largest number of offloaded experts in one layer, so that the next
// layer's experts arrive while this layer's are read. With dynamic residency, resident
// experts have a host copy as well, and Swap exchanges them with offloaded ones.
//
// A kernel finds experts through the layer's slot table, [experts] U64 in device memory,
// and gets the experts of one launch as a list. The store updates both in stream order, so
// a kernel does not depend on where an expert is.
//
// # Parts
//
// A Store combines: the checkpoint loader (package experts/load); the places where experts
// live, and their swaps; the state of the expert cache (package experts/cache) with the
// fetches into it; the tables that kernels read; and the steps that drive these. Package
// peercache keeps the copies in peers' memory.
//
// # Fetches
//
// A wave is a list of experts of one layer that are fetched and launched together. A fetch
// asks peercache for a peer copy with a reference on it; if there is one, the fetch reads
// the peer, otherwise host memory. This takes no lock that anything waits under. The
// experts of a wave are copied by one request per source memory, wherever they lie in it
// and in the expert cache. Predicted experts are copied by a request each, so that a wrong
// prediction can be skipped. Where a peer and the host together are faster than the peer
// alone, the last experts of a request come from the host. The split follows the measured
// rates of the links, so that both copies end at the same time.
//
// # Loading
//
// Expert takes rows of one matrix, in any order and from several goroutines (a fused
// checkpoint brings w1 and w3 of all experts before any w2). Experts with a host copy are
// packed directly into their host extents, others go through staging buffers of
// StagingBytes in total. Seal checks that every row of every expert has come exactly once,
// and ends the loading.
//
// # A step
//
// One goroutine, the pipeline, drives the layers in their order, all on one compute
// stream. A step is a value, and so is an open layer:
//
//	step, err := store.BeginStep(ctx, compute)
//	for _, l := range layers {                    // those with experts
//		use, err := step.Layer(ctx, l)            // tables updated on compute
//		step.Prefetch(next(l))                    // the copies for the next layer
//		for _, w := range use.Waves {             // resident experts first
//			… compute awaits w.Await …            // this wave's copies only
//			up.Slots, up.Experts = use.Slots, w.Experts
//			…
//		}
//		use.Release()                             // the slots may be overwritten
//	}
//	… synchronize with the end of the step …
//	if err := step.End(); err != nil {            // results are valid only without an error
//		compute.Recover(ctx)
//		step.Drop(ctx)
//		… run the step again …
//	}
//
// A step with few tokens needs few experts of a layer. These are fetched once the host
// knows the router's selection. A layer that waits for its router's selection is a value of
// another type, which cannot be released:
//
//	open, err := step.LayerUnrouted(ctx, l)
//	… router; its selection and a prediction for the next layer are copied to the host …
//	… open.Waves: the resident experts …
//	onCPU, err := open.ChooseOnCPU(chosen)    // with Options.CPU: what the CPU computes in host memory
//	… start computing onCPU …
//	use, err := open.FetchChosen(ctx, chosen) // the others
//	step.PrefetchPredicted(next(l), predicted)
//	… use.Waves, each after its copies …
//	use.Release()
//
// A CUDA graph needs a store whose experts are all resident: during capture, layers come
// from step.ForCapture(), and step.UseAllLayers precedes each launch.
//
// In a step of few tokens kernels can also read every expert where it lies (Config.InPlace):
//
//	step, err = step.ReadInPlace()    // one reference on all peer copies, tables up to date
//	use, err := step.Layer(ctx, l)    // all experts in one wave, nothing to wait for
//	again := step.ContinueInPlace()   // another pass may be enqueued, by the same tables
//	step.End()                        // the references end
//
// What Layer returns then is the same in every step, so that graphs of such steps can be
// captured, too.
//
// Prefetch and PrefetchPredicted may be called at any time and repeatedly; opening a layer
// and FetchChosen fetch what these have not. When the next layer is prefetched while one
// is open, the expert cache holds both. Copies into slots that an earlier layer used wait
// on the device for the fence that its Release put on the stream: the host never waits.
//
// After a failed fetch every method except Drop fails. Drop needs the compute stream
// recovered, with nothing of the dropped step running. It waits for copies in progress,
// drops experts that did not arrive completely, and keeps the others. Peer copies that
// could not be read are freed. A peer that is lost, or whose copies fail three times in a
// row, is excluded.
//
// # What it is not
//
// The package computes nothing (what the CPU computes of an expert in host memory is the
// pipeline's; see CPUShare) and does not decide where experts live: the rebalancer
// does, by Promote, Demote, Swap and Poll. A miss never creates a peer copy.
//
// # Invariants
//
//   - A slot is read only after the last byte of its expert has landed: readers wait for
//     fences that only completed copies signal.
//   - A slot is overwritten only after its last reader's fence value.
//   - Every copy from a peer's memory holds a reference on it until the copy has ended; so does
//     every step that reads peers' memory in place, until the host has seen its end.
//   - Slots are assigned round robin, waves by expert id: never by time.
//   - What a step reads does not depend on tiers, migrations, revocations or failures.
//   - There is one allocation for all resident extents, one for the expert cache, and one
//     for all host extents.
package experts
