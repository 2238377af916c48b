// Package dylib opens CUDA's libraries (NVRTC, cuBLASLt) at run time, and knows
// where they lie: in a toolkit, among the distribution's libraries, or in the
// folders of NVIDIA's Python wheels. It needs the build tag cuda.
//
// The folders of MOESERVE_CUDA_LIBRARIES, separated by colons, come first where it
// is set, and nothing else is looked through then but the dynamic linker's own.
//
// It is not for the driver, which device/cuda opens itself.
//
// # Example
//
//	l, err := dylib.Open(dylib.Names("libcublasLt.so", 13), dylib.Folders())
//	create, err := l.Symbol("cublasLtCreate")
package dylib
