// Package tenants emulates other processes that use the memory of emulated GPUs: it replays
// how many bytes they hold on each peer over time, from a recording (Read) or generated
// (Generate) from a published distribution of memory in use. Real GPUs do not need it:
// there, other processes really allocate.
//
//	trace, err := tenants.Read(file, peers, 0)
//	p := tenants.NewPlayer(trace, machine)
//	err = p.Advance(now) // often
//	err = p.Stop()
//
// # What it is not
//
// The package has no clock and no goroutine, and does not know who borrows the memory left
// free.
//
// # Invariants
//
//   - A Trace's samples are sorted by time, then by peer; the first sample of each peer
//     is at 0. Read reads back exactly what Write writes.
//   - Stop releases all memory that a Player occupies.
package tenants
