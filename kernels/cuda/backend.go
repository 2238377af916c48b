package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cuda/internal/cublaslt"
)

// runner puts kernels and the library's products on streams. Its methods may be
// called for several streams at once.
type runner interface {
	// launch enqueues one kernel. args is its argument struct, to be copied.
	launch(s device.Stream, k kernelID, g grid, args []byte) error
	// matmul enqueues a dense product through a library, which may use work, or
	// returns false for one that it does not take.
	matmul(s device.Stream, work device.Range, p *libraryProduct) (bool, error)
	// mapTiles writes what kernels are to be told of a matrix.
	mapTiles(to *tensorMap, of *tileMap) error
	close() error
}

// grid is the shape of a launch: blocks in x, y and z, and threads and bytes of
// dynamic shared memory of each.
type grid struct {
	x, y, z         int
	threads, shared int
	// apart: no block starts before the kernel in front has ended.
	apart bool
}

// libraryProduct is Out = X Wᵀ (+ Bias), all of the activation type but Out, which
// may be float32. Addresses are multiples of 16 bytes, sizes and strides (in
// elements) multiples of 8.
type libraryProduct struct {
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
	// multiprocessors of the device, for the choice of grids
	multiprocessors int
	// hopper: the kernels that are for sm_90a are there.
	hopper bool
	// deep: blocks may have the shared memory that few_rows_5 takes.
	deep   bool
	mu     sync.RWMutex
	closed bool
	lanes  map[device.Stream]*lane
	free   []device.Range // workspaces of lanes to come, the next one last
}

var _ kernels.Backend = (*Backend)(nil)

// newBackend returns a backend of the device whose memory space is; it owns run from
// now on, also where it fails.
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
	b := &Backend{o: o, run: run, work: work, multiprocessors: max(info.Multiprocessors, 1), lanes: make(map[device.Stream]*lane)}
	for i := range o.Streams {
		b.free = append(b.free, work.Range(int64(o.Streams-1-i)*per, per))
	}
	return b, nil
}

// Name implements kernels.Backend.
func (b *Backend) Name() string { return "cuda" }

// ActivationDType implements kernels.Backend.
func (b *Backend) ActivationDType() kernels.DType { return b.o.Activation }

// WeightDType is the type to which weights of type t are best cast at load: the
// activation type, with which products are fast.
func (b *Backend) WeightDType(kernels.DType) kernels.DType { return b.o.Activation }

// WarmRows lists the numbers of rows, up to most, for which dense products should be
// enqueued once before anything waits for a fence: cuBLASLt loads code at the first
// product of a shape, for which the driver waits until the device is idle and lets
// nobody else enqueue meanwhile, who might have to raise that fence.
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
	for _, l := range b.lanes {
		l.release()
	}
	return errors.Join(b.work.Free(), b.run.close())
}

// Enqueue implements kernels.Backend. s is a stream of the backend's GPU, which the
// backend has to itself from the first operation on until it is closed.
func (b *Backend) Enqueue(s device.Stream, op kernels.Op) error {
	l, err := b.lane(s)
	if err != nil {
		return fmt.Errorf("cuda: %s: %w", op.Name(), err)
	}
	if err := op.Check(); err != nil {
		return err
	}
	return l.enqueue(op)
}

// activation checks that a tensor has the activation type; Check holds the others to
// it.
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

// aligned says whether every row (of the last dimension) of all tensors that are
// there starts at a multiple of 16 bytes.
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

// truth is a bool as kernels take it.
func truth(v bool) int32 {
	if v {
		return 1
	}
	return 0
}

func ceil(n, d int) int { return (n + d - 1) / d }
