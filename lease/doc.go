// Package lease answers where one movable object is, and whether it may be
// used: one atomic state word per object.
//
// A Cell is the word of one place that can hold one object: a slot of expert
// weights, a block of a tier, a piece of borrowed memory. Readers take a
// reference without ever blocking, and fail where there is nothing to read; whoever
// wants the place for something else first keeps new readers out, then waits until
// the last one is gone:
//
//	ref, ok := cell.Acquire()         // reader
//	if !ok { … use another copy … }
//	…
//	ref.ReleaseAt(device.Point{Fence: f, Value: v}) // when the stream is past v
//
//	ex, ok := cell.BeginExclusive()   // owner of the place
//	if err := ex.Drain(ctx); err != nil { … }
//	generation := ex.Replace()        // a new object is here
//
// # References and streams
//
// Work on a device outlives the call that enqueued it, so a reference is given
// back in one of two ways: Release, when the caller knows that nothing reads any
// more, and ReleaseAt, which says at which fence value nothing will. The exclusive
// owner either waits for these points on the host (Drain) or hands them to the
// stream or copy that will overwrite the place (Points), and then never waits
// itself.
//
// # What it is not
//
// It owns no memory, copies nothing, and knows no policy: who moves what, and when,
// is for experts and harvest.
//
// # Invariants
//
//   - Acquire never blocks and never takes a lock. It fails for a cell that is
//     invalid or held exclusively.
//   - The generation grows with every Replace and Invalidate, so a reference to an
//     earlier object is told from one to the present.
//   - There is at most one exclusive owner.
//   - Releasing twice, or releasing a reference of another generation, is a broken
//     invariant and panics.
package lease
