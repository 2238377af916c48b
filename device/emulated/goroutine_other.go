//go:build !amd64 && !arm64

package emulated

import (
	"bytes"
	"runtime"
	"strconv"
)

// goroutine returns the goroutine's number from its stack trace; it is slower than the
// assembly version of other processors.
func goroutine() uintptr {
	var buf [64]byte
	b := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	id, _, _ := bytes.Cut(b, []byte(" "))
	n, err := strconv.ParseUint(string(id), 10, 0)
	if err != nil {
		panic("emulated: no goroutine number in " + string(b))
	}
	return uintptr(n)
}
