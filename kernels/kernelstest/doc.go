// Package kernelstest is the conformance suite of kernels.Backend: it compares every
// operation with a plain float64 reference, on fresh random inputs, at ragged shapes and
// (with Options.Full) at shapes of real models.
//
// The suite accesses device memory only by copies from and to pinned host memory. It
// poisons outputs and the memory around tensors with NaN beforehand; afterwards every
// output byte must be written and every other byte unchanged.
//
// The suite is not a benchmark. It does not test how backends report bad data in device
// memory (ids out of range), because only kernels/cpu promises that.
//
// # Invariants
//
//   - References follow the comments in package kernels, are written to be read,
//     and share no code with any backend; only the random numbers are those of package
//     philox, which is part of the contract.
//   - A failure can be had again: the seed is logged, and Options.Seed sets it.
//
// # Example
//
//	func TestConformance(t *testing.T) {
//		kernelstest.Run(t, func(t *testing.T) (device.Machine, kernels.Backend, device.Stream) {
//			m, err := emulated.Open(emulated.Options{Check: true})
//			…
//			return m, backend, stream
//		}, kernelstest.Options{BatchInvariant: true})
//	}
package kernelstest
