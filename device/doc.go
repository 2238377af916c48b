// Package device says what a machine offers to the engine: memory spaces
// (pinned host memory and the HBM of each GPU), in-order streams, events,
// fences, copies between any two spaces, host streams that run Go work in the
// same order, the topology that connects them, and a clock.
//
// A Range is bytes at an address, which is all that a stream needs; a Region says
// in which space they are as well, for whoever chooses a way to them. A Point is a
// value of a fence that is reached sooner or later. What differs between machines
// and matters above is in their Capabilities, and whether time is virtual behind
// Clock, so that nobody asks for the type of a machine.
//
// It holds contracts, and the wall clock. Two implementations stand behind one conformance
// suite (package devicetest): device/emulated, any number of devices inside
// this process, and device/cuda. Nothing above this package and kernels knows
// which of them runs.
//
// # What it is not
//
// It computes nothing (package kernels does), schedules nothing (package
// transfer orders copies) and owns no policy on who may use which memory
// (package harvest).
//
// # Invariants
//
//   - Everything a stream is given runs in the order given, each operation
//     after the one before has ended. Nothing is ordered between two streams
//     but by an event or a fence, and nothing between a stream and the host but
//     by these, Stream.Synchronize, or having been enqueued later.
//   - Enqueueing never waits for the work enqueued.
//   - Waiting for an event that was never recorded is an error: what is not
//     enqueued yet is awaited by a fence.
//   - Memory has one owner, who frees it once, when no work that touches it is
//     outstanding. Host access to host-visible memory goes through
//     Memory.Read and Memory.Write, so that an implementation can check it.
//   - An operation that fails puts its stream into error: what stands behind it
//     on that stream does not run, events recorded there and fences raised there
//     carry the error to whoever waits for them, until Stream.Recover.
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
