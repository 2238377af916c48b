// Package tenants emulates other processes that use the memory of emulated GPUs: it replays
// how many bytes they hold on each peer over time, from a recording (Read), from a published trace of
// a cluster (ReadAlibaba), or generated (Generate) from a published distribution of memory in use. Real GPUs do not need it:
// there, other processes really allocate.
//
//	trace, err := tenants.Read(file, peers, 0)
//	p := tenants.NewPlayer(trace, machine, func(s device.Space, bytes int64) { … Reclaim … })
//	err = p.Advance(now) // often
//	err = p.Stop()
//
// As on a GPU, nobody occupies more than is free: what is refused, a Player asks for, and
// tries again.
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
