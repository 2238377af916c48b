//go:build cuda

package cuda

/*
#cgo noescape ms_copy_batch
#cgo nocallback ms_copy_batch
#include "glue.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/internal/driver"
)

// ErrNoBatches: the driver has no batched copies; it is older than CUDA 12.8.
var ErrNoBatches = errors.New("the driver has no cuMemcpyBatchAsync, which CUDA 12.8 brought: install a later one")

// batch are the arguments of a batched copy: addresses of destinations and of sources, and
// sizes.
type batch struct{ to, from, bytes []uint64 }

// CopyBatch copies src[i] to dst[i] for all i in one call of the driver (cuMemcpyBatchAsync).
// As a whole it runs in the stream's order, its copies in any order. Each pair is as for Copy,
// but not within host memory. The error wraps ErrNoBatches where the driver has no such call.
func (s *Stream) CopyBatch(dst, src []device.Range) error {
	if err := s.usable("copy"); err != nil {
		return err
	}
	if err := s.captures("a batch of copies"); err != nil {
		return err
	}
	if len(dst) != len(src) {
		return badArgument("copy", s.g.space, "%s: a batch of %d destinations and %d sources", s, len(dst), len(src))
	}
	call := driver.Symbol("cuMemcpyBatchAsync")
	if call == nil {
		return &device.Error{Op: "copy", Space: s.g.space, Detail: s.String(), Err: ErrNoBatches}
	}
	b := &s.batch
	b.to, b.from, b.bytes = b.to[:0], b.from[:0], b.bytes[:0]
	total := int64(0)
	for i, to := range dst {
		into, of, err := s.m.copyable(s, to, src[i])
		switch {
		case err != nil:
			return err
		case to.Bytes == 0:
			continue
		case into.g == nil && of.g == nil:
			return badArgument("copy", s.g.space, "%s: pair %d of a batch is within host memory: use Copy", s, i)
		}
		b.to, b.from, b.bytes = append(b.to, uint64(to.Addr)), append(b.from, uint64(src[i].Addr)), append(b.bytes, uint64(to.Bytes))
		total += to.Bytes
	}
	n := len(b.to)
	if n == 0 {
		return nil
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	c := C.ms_copy_batch(s.g.context(), call, words64(b.to), words64(b.from), words64(b.bytes), C.size_t(n), streamHandle(s.s))
	if c != success {
		return s.refused(op, "copy", int(c), fmt.Sprintf("a batch of %d copies, %d bytes", n, total))
	}
	return nil
}

// words64 passes a slice's array to C.
func words64(v []uint64) *C.uint64_t { return (*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(v))) }
