// Package lease tracks whether one memory location holds a valid object, and who uses it:
// one atomic state word per location.
//
// A Cell is the state of one location that holds at most one object: a slot of the expert
// cache, a KV block, an allocation in peer memory. Readers take a reference without
// blocking, and fail if there is nothing to read. An owner that wants the location for
// another object first locks new readers out, then waits until the last reader is done:
//
//	ref, ok := cell.Acquire()         // reader
//	if !ok { … use another copy … }
//	…
//	ref.ReleaseAt(device.Point{Fence: f, Value: v}) // done when the fence reaches v
//
//	ex, ok := cell.BeginExclusive()   // owner of the location
//	… wait until State says that there are no references …
//	copyInto(location, ex.Points())   // ordered after the fence values of the readers' work
//	generation := ex.Replace()        // the location holds a new object
//
// # References and streams
//
// Work on a device outlives the call that enqueued it. So there are two ways to release a
// reference: Release, if the caller knows that its reads have ended, and ReleaseAt, with
// the fence value at which they will have. The exclusive owner waits for these fence
// values (Points) on the host, or passes them to the stream or copy that overwrites the
// location and never waits itself.
//
// # What it is not
//
// The package owns no memory, copies nothing, and has no policy: what is moved, and when,
// is decided by experts and harvest.
//
// # Invariants
//
//   - Acquire never blocks and takes no lock. It fails for a cell that is invalid or held
//     exclusively.
//   - The generation grows with every Replace and Invalidate, so that a reference to an
//     earlier object can be distinguished.
//   - There is at most one exclusive owner.
//   - Releasing a reference twice, or one of another generation, panics.
package lease
