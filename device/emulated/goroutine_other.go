//go:build !amd64 && !arm64

package emulated

import (
	"bytes"
	"runtime"
	"strconv"
)

// goroutine is as on other processors, and takes longer: the number in the goroutine's stack
// trace.
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
