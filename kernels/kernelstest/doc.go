// Package kernelstest is the conformance suite of kernels.Backend: every
// operation against a plain float64 reference, on fresh random inputs, at shapes
// ragged and (with Options.Full) of real models.
//
// The suite reaches device memory by copies from and to pinned host memory only.
// Outputs and everything around tensors are poisoned with NaN beforehand;
// afterwards every byte that is no output must be as it was, and every output
// must be written.
//
// It is not a benchmark, and it does not test how backends report bad data in
// device memory (ids out of range): only kernels/cpu promises that.
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
