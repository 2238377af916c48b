package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

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
}

var _ kernels.Backend = (*Backend)(nil)

// lane is what one stream has to itself; like the stream it is used by one
// goroutine at a time.
type lane struct {
	stream device.Stream
	work   device.Range
	// The arguments under way lie here, since runners would make them escape.
	args    [512]byte
	product libraryProduct
	tiles   tileMap
	maps    [2]tensorMap
	// up is what the latest launch took, if it was the tiled experts' way up.
	up chosenExperts
}

// newBackend returns a backend of the device whose memory space is; it owns run from
// now on, also where it fails.
func newBackend(m device.Machine, space device.Space, o Options, run runner) (*Backend, error) {
	o, err := o.withDefaults()
	if err != nil {
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
	return &Backend{o: o, run: run, work: work, multiprocessors: max(info.Multiprocessors, 1), lanes: make(map[device.Stream]*lane)}, nil
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
	return errors.Join(b.work.Free(), b.run.close())
}

// lane returns the stream's, and gives it a workspace when it comes first.
func (b *Backend) lane(op string, s device.Stream) (*lane, error) {
	b.mu.RLock()
	l, closed := b.lanes[s], b.closed
	b.mu.RUnlock()
	switch {
	case closed:
		return nil, fmt.Errorf("cuda: %s: %w", op, device.ErrClosed)
	case l != nil:
		return l, nil
	case s.Space() != b.work.Space():
		return nil, fmt.Errorf("cuda: %s: stream %q is of %v, and the backend of %v", op, s.Name(), s.Space(), b.work.Space())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.lanes)
	if n == b.o.Streams {
		return nil, fmt.Errorf("cuda: %s: stream %q is one too many: Options.Streams is %d", op, s.Name(), n)
	}
	l = &lane{stream: s, work: b.work.Range(int64(n)*b.o.WorkspaceBytes, b.o.WorkspaceBytes)}
	b.lanes[s] = l
	return l, nil
}

// Enqueue implements kernels.Backend. s is a stream of the backend's GPU.
func (b *Backend) Enqueue(s device.Stream, op kernels.Op) error {
	l, err := b.lane(op.Name(), s)
	if err != nil {
		return err
	}
	if err := op.Check(); err != nil {
		return err
	}
	switch o := op.(type) {
	case *kernels.Embed:
		return b.embed(l, o)
	case *kernels.Norm:
		return b.norm(l, o)
	case *kernels.MatMul:
		return b.matmul(l, o)
	case *kernels.Clamp:
		return b.clamp(l, o)
	case *kernels.RoPE:
		return b.rope(l, o)
	case *kernels.AppendKV:
		return b.appendKV(l, o)
	case *kernels.RoPEAppendKV:
		return b.ropeAppendKV(l, o)
	case *kernels.Attention:
		return b.attention(l, o)
	case *kernels.Route:
		return b.route(l, o)
	case *kernels.Group:
		return b.group(l, o)
	case *kernels.ExpertUp:
		return b.expertUp(l, o)
	case *kernels.ExpertDown:
		return b.expertDown(l, o)
	case *kernels.Combine:
		return b.combine(l, o)
	case *kernels.CombineNorm:
		return b.combineNorm(l, o)
	case *kernels.SiluMul:
		return b.siluMul(l, o)
	case *kernels.Gather:
		return b.gather(l, o)
	case *kernels.Sample:
		return b.sample(l, o)
	case *kernels.Adjust:
		return b.adjust(l, o)
	case *kernels.Restore:
		return b.restore(l, o)
	case *kernels.LogProbs:
		return b.logProbs(l, o)
	}
	return fmt.Errorf("cuda: %s: operation of unknown type %T", op.Name(), op)
}

// maxGrid is the most blocks in y and z.
const maxGrid = 65535

// launch enqueues k with args, a struct laid out as the kernel's. A grid without
// blocks does nothing.
func launch[A any](b *Backend, l *lane, op string, k kernelID, g grid, args *A) error {
	g.y, g.z = max(g.y, 1), max(g.z, 1)
	switch {
	case g.x <= 0:
		return nil
	case g.x > 1<<31-1 || g.y > maxGrid || g.z > maxGrid:
		return fmt.Errorf("cuda: %s: %d x %d x %d blocks, more than a launch may have: give it fewer rows or columns", op, g.x, g.y, g.z)
	}
	l.up = chosenExperts{}
	n := copy(l.args[:], unsafe.Slice((*byte)(unsafe.Pointer(args)), unsafe.Sizeof(*args)))
	if err := b.run.launch(l.stream, k, g, l.args[:n]); err != nil {
		return fmt.Errorf("cuda: %s: %w", op, err)
	}
	return nil
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
