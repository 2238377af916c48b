// Package tenants plays other tenants of emulated GPUs: what programs beside this one
// hold of a peer's memory over time, from a recording (Read) or made up (Generate) with
// the published distribution of memory in use. Real devices need none of it: there,
// other programs do what a Player does here.
//
//	trace, err := tenants.Read(file, peers, 0)
//	p := tenants.NewPlayer(trace, machine)
//	err = p.Advance(now) // often
//	err = p.Stop()
//
// # What it is not
//
// It has no clock and no goroutine, and knows nothing of who borrows the memory that
// others leave.
//
// # Invariants
//
//   - A Trace has its samples in the order of time, then of peers, the first of each
//     peer at 0; what Write writes Read reads back the same.
//   - What a Player took is given back by Stop.
package tenants
