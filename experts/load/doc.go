// Package load brings the experts of a checkpoint to their places: rows of matrices come
// in, in any order and from several goroutines, and are packed into the backend's layout
// (kernels.ExpertLayout).
//
//	l, err := load.New(load.Options{…}, func(layer, expert int) load.Place { … })
//	err = l.Rows(layer, expert, kernels.W1, 0, data)   // a fused checkpoint brings w1 and w3 of all before any w2
//	err = l.Finish(ctx)                                // every row has come, and is where it should be
//
// # Staging
//
// What goes to host memory is packed straight into its place. What goes to a device passes
// through a few pinned buffers of StagingBytes in all. In a row-major layout rows are
// bytes at a known place and go there piece by piece; in any other an expert is packed as
// a whole in a buffer. Where more experts are begun than there are buffers, the one longest
// unused goes to its place as far as it came, and is brought back when more of it comes.
//
// # What it is not
//
// It decides no places and owns no memory but its buffers, and knows nothing of steps.
//
// # Invariants
//
//   - Every row of every expert comes exactly once, or Rows or Finish fails.
//   - An expert that is on its way from a buffer is not taken up again before it is there.
package load
