package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cuda/internal/cublaslt"
)

// runner launches kernels and library GEMMs on streams. Its methods may be called for several
// streams at once.
type runner interface {
	// launch enqueues one kernel. It copies args, the kernel's argument struct.
	launch(s device.Stream, k kernelID, g grid, args []byte) error
	// matmul enqueues a dense GEMM of a library (cuBLASLt), which may use work as workspace. It
	// returns false if the library does not support it.
	matmul(s device.Stream, work device.Range, p *libraryGEMM) (bool, error)
	// mapTiles encodes a tensor map.
	mapTiles(to *tensorMap, of *tileMap) error
	close() error
}

// grid is the shape of a launch: blocks in x, y and z, and threads and bytes of dynamic shared
// memory per block.
type grid struct {
	x, y, z         int
	threads, shared int
	// noOverlap: no block starts before the preceding kernel has ended.
	noOverlap bool
}

// libraryGEMM is Out = X Wᵀ (+ Bias). All tensors have the activation type, except that Out may
// be float32. Addresses are multiples of 16 bytes, sizes and strides (in elements) multiples of
// 8.
type libraryGEMM struct {
	x, w, bias, out      device.Addr // bias: 0 for none
	rows, columns, inner int
	xStride, outStride   int
	outFloat             bool
}

// Backend is a kernels.Backend.
type Backend struct {
	o    Options
	run  runner
	work device.Memory
	// multiprocessors is the device's number of multiprocessors, for the choice of grids.
	multiprocessors int
	// hopper: the kernels for sm_90a are available.
	hopper bool
	// largeSmem: blocks may use the shared memory that few_rows_5 needs.
	largeSmem bool
	mu        sync.RWMutex
	closed    bool
	states    map[device.Stream]*streamState
	free      []device.Range // free workspaces of further streams, the next one last
}

var _ kernels.Backend = (*Backend)(nil)

// newBackend returns a backend for the device with memory space. It owns run from now on, also
// if it fails.
func newBackend(m device.Machine, space device.Space, o Options, run runner) (*Backend, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, errors.Join(err, run.close())
	}
	info, ok := m.Topology().Info(space)
	if _, gpu := space.GPU(); !ok || !gpu {
		return nil, errors.Join(fmt.Errorf("cuda: backend of %v: the machine has no such GPU", space), run.close())
	}
	per := device.Align(o.WorkspaceBytes)
	work, err := m.Alloc(space, per*int64(o.Streams), "kernel workspaces")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cuda: backend: %w", err), run.close())
	}
	o.WorkspaceBytes = per
	b := &Backend{o: o, run: run, work: work, multiprocessors: max(info.Multiprocessors, 1), states: make(map[device.Stream]*streamState)}
	for i := range o.Streams {
		b.free = append(b.free, work.Range(int64(o.Streams-1-i)*per, per))
	}
	return b, nil
}

// Name implements kernels.Backend.
func (b *Backend) Name() string { return "cuda" }

// ActivationDType implements kernels.Backend.
func (b *Backend) ActivationDType() kernels.DType { return b.o.Activation }

// WeightDType is the best type to convert weights of type t to at load: the activation type,
// for which GEMMs are fastest.
func (b *Backend) WeightDType(kernels.DType) kernels.DType { return b.o.Activation }

// WarmRows lists the numbers of rows, up to most, for which dense GEMMs should be enqueued once
// before any stream waits for a fence. At the first GEMM of a shape cuBLASLt loads code, for
// which the driver waits until the device is idle, and blocks all other enqueues, including one
// that would signal that fence: a deadlock.
func (b *Backend) WarmRows(most int) []int {
	if b.o.BatchInvariant {
		return nil
	}
	return cublaslt.Buckets(most)
}

// Close implements kernels.Backend.
func (b *Backend) Close() error {
	b.mu.Lock()
	closed := b.closed
	b.closed = true
	b.mu.Unlock()
	if closed {
		return fmt.Errorf("cuda: close: %w", device.ErrClosed)
	}
	for _, l := range b.states {
		l.release()
	}
	return errors.Join(b.work.Free(), b.run.close())
}

// Enqueue implements kernels.Backend. s is a stream of the backend's GPU, which the backend
// uses exclusively from its first operation on s until Close.
func (b *Backend) Enqueue(s device.Stream, op kernels.Op) error {
	copies := false
	switch op.(type) {
	case *kernels.CopyBlocks, *kernels.Copy:
		copies = true
	}
	l, err := b.streamState(s, !copies)
	if err != nil {
		return fmt.Errorf("cuda: %s: %w", op.Name(), err)
	}
	if err := op.Check(); err != nil {
		return err
	}
	return l.enqueue(op)
}

// activation checks that a tensor has the activation type; Check verifies that the others have
// the same.
func (b *Backend) activation(op, name string, t *kernels.Tensor) error {
	if t.DType == b.o.Activation {
		return nil
	}
	return fmt.Errorf("cuda: %s: %s is %v, want %v, the activation type", op, name, *t, b.o.Activation)
}

func address(t *kernels.Tensor) uint64 {
	if t.None() {
		return 0
	}
	return uint64(t.Addr)
}

// aligned reports whether every row (of the last dimension) of all tensors that are not none
// starts at a multiple of 16 bytes.
func aligned(tensors ...*kernels.Tensor) bool {
	for _, t := range tensors {
		if t.None() {
			continue
		}
		if t.Addr%16 != 0 {
			return false
		}
		for i := range t.Rank - 1 {
			if t.Shape[i] > 1 && t.Stride[i]*t.DType.Size()%16 != 0 {
				return false
			}
		}
	}
	return true
}

// b2i converts a bool to 0 or 1 for kernels.
func b2i(v bool) int32 {
	if v {
		return 1
	}
	return 0
}

func ceil(n, d int) int { return (n + d - 1) / d }
