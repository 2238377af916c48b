// Package device defines the hardware interface of the engine: memory spaces (pinned host
// memory and the HBM of each GPU), in-order streams, events, fences, copies between any two
// spaces, host streams that run Go functions in the same order, the topology that connects the
// spaces, and a clock.
//
// A Range is bytes at an address, which is all that a stream needs; a Region adds their space,
// for code that selects a path to them. A Point is a value of a fence that will be reached.
// Differences between machines that users depend on are in Capabilities, and Clock hides
// whether time is virtual, so that no code needs the type of a machine.
//
// The package has contracts and the wall clock. Two implementations pass one conformance suite
// (package devicetest): device/emulated, any number of devices inside this process, and
// device/cuda. Nothing above this package and kernels knows which of them runs.
//
// # What it is not
//
// It computes nothing (package kernels does), schedules nothing (package transfer orders
// copies) and has no policy on who may use which memory (package harvest).
//
// # Invariants
//
//   - The operations of a stream run in order, each after the previous one has
//     ended. Two streams are ordered only by an event or a fence; a stream and the host
//     only by these, by Stream.Synchronize, or by enqueuing later.
//   - Enqueuing never waits for the enqueued work.
//   - Waiting for an event that was never recorded is an error: use a fence to wait
//     for work that is not enqueued yet.
//   - Memory has one owner, who frees it once, when no work that accesses it is
//     outstanding. The host accesses host memory through Memory.Read and Memory.Write,
//     so that an implementation can check it.
//   - A failed operation puts its stream into the error state: later operations of
//     the stream do not run, and events recorded and fences signaled by it pass the error
//     to their waiters, until Stream.Recover.
//
// # Example
//
//	src, _ := m.Alloc(device.Host, 1<<20, "staging")
//	dst, _ := m.Alloc(device.HBM(0), 1<<20, "weights")
//	s, _ := m.NewStream(device.HBM(0), device.StreamOptions{Name: "copy"})
//	copy(src.Write(0, src.Bytes()), weights)
//	if err := s.Copy(dst.Range(0, 1<<20), src.Range(0, 1<<20)); err != nil { … }
//	if err := s.Synchronize(ctx); err != nil { … }
package device
