//go:build amd64 || arm64

package emulated

// goroutine returns a value that is unique among live goroutines: the address of the
// runtime's record of the calling goroutine. It distinguishes Work that waits or accesses
// host memory from other goroutines. Only virtual and checked machines call it; they do so
// often.
func goroutine() uintptr
