//go:build cuda

package cuda

/*
#cgo noescape ms_copy_batch
#cgo nocallback ms_copy_batch
#include "glue.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/internal/driver"
)

var _ device.BatchCopier = (*Stream)(nil)

// batch are the arguments of a batched copy: addresses of destinations and of sources, and
// sizes.
type batch struct{ to, from, bytes []uint64 }

// CopyBatch implements device.BatchCopier by one call of the driver (cuMemcpyBatchAsync). The
// error wraps device.ErrNoBatches where the driver has no such call (before CUDA 12.8), or no
// support for it on this device.
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
		return s.noBatches("the driver has no cuMemcpyBatchAsync, which CUDA 12.8 brought")
	}
	b := &s.batch
	b.to, b.from, b.bytes = b.to[:0], b.from[:0], b.bytes[:0]
	var total int64
	var target, source *memory
	for i, to := range dst {
		into, of, err := s.m.copyable(s, to, src[i])
		switch {
		case err != nil:
			return err
		case to.Bytes == 0:
			continue
		case into.g == nil && of.g == nil:
			return badArgument("copy", s.g.space, "%s: pair %d of a batch is within host memory: use Copy", s, i)
		case target == nil:
			target, source = into, of
		case into.space != target.space || of.space != source.space:
			return badArgument("copy", s.g.space, "%s: pair %d of a batch is from %s to %s, others from %s to %s", s, i, of.space, into.space, source.space, target.space)
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
	first := s.begins(batchOperation)
	c := C.ms_copy_batch(s.g.context(), call, words64(b.to), words64(b.from), words64(b.bytes), C.size_t(n), streamHandle(s.s))
	if first {
		s.m.endEnqueuing()
	}
	if c == notSupported {
		return s.noBatches("cuMemcpyBatchAsync is not supported on this device")
	}
	if c != success {
		return s.refused(op, "copy", int(c), fmt.Sprintf("a batch of %d copies, %d bytes", n, total))
	}
	return nil
}

func (s *Stream) noBatches(why string) error {
	return &device.Error{Op: "copy", Space: s.g.space, Detail: fmt.Sprintf("%s: %s", s, why), Err: device.ErrNoBatches}
}

// words64 passes a slice's array to C.
func words64(v []uint64) *C.uint64_t { return (*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(v))) }
