// Package experts keeps the weights of a model's experts: where each one is, the
// memory for all of them, and the copies that bring those that are not in the
// compute GPU's memory there in time.
//
// # Where experts are
//
// An expert is one contiguous extent in the backend's layout (kernels.ExpertLayout),
// the same bytes wherever it lies. A Placement says which experts are offloaded;
// the others are local: they lie in the compute GPU's memory for good and have no
// other copy. The authoritative copy of an offloaded expert lies in pinned host
// memory. To be used it is fetched into a slot of the ring: RingSlots extents of
// the compute GPU's memory, by default twice the largest number that one layer
// misses, so that the next layer's experts arrive while this one's are read.
//
// A kernel finds experts through the layer's slot table, [experts] U64 in device
// memory, and is given the experts of one launch as a list. The store updates the
// table in stream order, so nothing depends on where an expert lies.
//
// # Filling
//
// Expert hands in rows of one matrix; it may be called from several goroutines and
// in any order (a fused checkpoint brings w1 and w3 of all experts before any w2).
// Offloaded experts are packed straight into their host extents. Local ones go
// through a few pinned buffers of StagingBytes in all. Seal checks that every row
// of every expert has come, exactly once, and ends the loading.
//
// # A step
//
// One goroutine, the pipeline, drives the layers in their order, all on one
// compute stream:
//
//	for _, l := range layers {                    // those with experts
//		use, err := store.Open(ctx, l, compute)   // slot table updated on compute
//		store.Prefetch(next(l))                   // the copies for the layer after it
//		for _, w := range use.Waves {             // residents first
//			w.Wait(compute)                       // for this wave's copies only
//			up.Slots, up.Experts = use.Slots, w.Experts
//			…
//		}
//		store.Done(l, compute)                    // the slots may be overwritten
//	}
//	… the step's end is synchronized …
//	if err := store.Err(); err != nil {           // never believe a step before this
//		compute.Recover(ctx)
//		store.Reset(ctx)
//		… run the step again …
//	}
//
// Open and Done come in pairs; Prefetch may come any time and any number of times.
// Open fetches what no Prefetch has. When Prefetch(l+1) comes after Open(l) and
// before Done(l), the ring holds both layers, and the copies into slots that layer
// l-1 used wait on the device for the fence that Done(l-1) put on the stream: the
// host never waits.
//
// After Err, every Prefetch and Open fails until Reset. Reset wants the compute
// stream recovered (nothing of the dropped step is running); it waits for copies
// under way, drops what did not arrive whole, and keeps what did.
//
// # What it is not
//
// It does not compute, count activations, or decide who is offloaded where while
// it runs: that is for models and for the rebalancer. Peer memory is a third tier
// between ring and host: an extent of it is one more source of a fetch.
//
// # Invariants
//
//   - A slot never serves an expert before its last byte has landed: whoever reads
//     it stands behind a fence that only the end of the copy raises.
//   - A slot is overwritten only after the last reader's fence.
//   - Slots are chosen in ring order, waves by expert id: never by time.
//   - One allocation for all local extents, one for the ring, one for all host
//     extents.
package experts
