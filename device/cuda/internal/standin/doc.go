// Package standin builds a stand-in for the CUDA driver out of C, for tests on
// machines without a GPU: everything between Go and the driver then runs, on
// devices whose memory is the host's. See testdata/standin.c for what it does and
// does not do. It is no emulation of a GPU: package device/emulated serves the
// tests of what stands above devices.
//
// Only tests import it. It needs the build tag cuda.
//
// # Example
//
//	path, err := standin.Build(dir)
//	m, err := cuda.Open(cuda.Options{GPUs: []int{0, 1}, Driver: path})
package standin
