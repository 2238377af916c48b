// Package devicetest is the conformance suite of package device: the observable behavior
// required of every implementation of device.Machine.
//
// The suite does not test speed and requires nothing that hardware cannot provide: it
// accesses GPU memory only by copies, runs no Go code on GPU streams, and skips parts that
// need two GPUs if there is only one.
//
// Run closes each machine that it opens and fails on an error of Close, so implementations
// that check themselves (for leaks or missing ordering) should report there. The suite
// itself orders all its accesses.
//
// # Example
//
//	func TestConformance(t *testing.T) {
//		devicetest.Run(t, func(t *testing.T) device.Machine {
//			m, err := emulated.Open(emulated.Options{Check: true})
//			if err != nil {
//				t.Fatal(err)
//			}
//			return m
//		})
//	}
package devicetest
