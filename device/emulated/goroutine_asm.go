//go:build amd64 || arm64

package emulated

// goroutine tells the calling goroutine from all others that there are now: what tells a Work
// that waits, or touches host memory, from the goroutines beside it. It is where the runtime
// keeps what it knows of the goroutine, and is asked only on virtual and on checked machines,
// there often.
func goroutine() uintptr
