// Package load copies the experts of a checkpoint to their places. It receives rows of
// matrices, in any order and from several goroutines, and packs them into the backend's
// layout (kernels.ExpertLayout).
//
//	l, err := load.New(load.Options{…}, func(layer, expert int) load.Place { … })
//	err = l.Rows(layer, expert, kernels.W1, 0, data)   // a fused checkpoint brings w1 and w3 of all before any w2
//	err = l.Finish(ctx)                                // every row was received and is at its place
//
// # Staging
//
// Experts in host memory are packed directly into their places. Experts on a device pass
// through staging buffers: a few pinned buffers of StagingBytes in total. In a row-major
// layout the rows are bytes at a known offset and are copied piece by piece. In any other
// layout an expert is packed as a whole in a buffer; if more experts are incomplete than
// there are buffers, the least recently used one is stored to its place as it is, and
// loaded back when more of its rows are received.
//
// # What it is not
//
// The package decides no places, owns no memory except its staging buffers, and knows
// nothing of steps.
//
// # Invariants
//
//   - Every row of every expert is received exactly once, or Rows or Finish fails.
//   - An expert that is being stored to its place is not loaded back before that copy ends.
package load
