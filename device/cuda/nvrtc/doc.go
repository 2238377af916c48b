// Package nvrtc compiles CUDA C++ at run time and keeps the results on disk.
//
// Compiler is libnvrtc, opened when first needed; it needs the build tag cuda, but no
// header and no GPU. Cache keeps what was compiled: a file for each Key, which is a
// hash of everything that shapes the result. Processes may share a cache: files appear
// whole, and one that is damaged counts as missing.
//
// NVRTC has no header of CUDA's own at hand: sources use raw bits and PTX instead of
// cuda_bf16.h, or bring their headers along in Source.Headers.
//
// It knows no kernels and loads nothing on a device.
//
// # Example
//
//	c, err := nvrtc.Open(dylib.Folders(), 13)
//	cubin, hit, err := c.Cached(nvrtc.Cache{Dir: dir}, nvrtc.Source{Name: "norm.cu", Text: text}, nvrtc.Arch(90))
package nvrtc
