// Package devicetest is the conformance suite of package device: what every
// implementation of device.Machine must do, as far as a program can see it.
//
// It is not a test of speed, and it assumes nothing that hardware cannot give: GPU
// memory is reached by copies only, GPU streams run no Go code, and parts that need
// two GPUs are skipped where there is one.
//
// Run closes each machine that it opens and fails on what Close reports, so
// implementations that check themselves (for leaks, for missing order) should report
// there. Everything the suite does is ordered properly.
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
