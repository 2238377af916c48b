package cpu

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Options of a Backend.
type Options struct {
	// Threads is the number of goroutines that one operation runs on, including its stream's.
	// Default: GOMAXPROCS.
	Threads int
	// ISA is the instruction set, one of ISAs. Default: the best.
	ISA ISA
	// Spin is how long idle goroutines poll for work before they sleep: waking many of them takes as
	// long as reading some MB. It is for cores that have nothing else to do. Default: 0.
	Spin time.Duration
}

// Backend is a kernels.Backend. It may serve any number of streams at once.
type Backend struct {
	*pool
	shut  atomic.Bool
	decls sync.Pool // *kernels.Decl
	jobs  [30]sync.Pool
	draws sync.Pool // *draws
}

var _ kernels.Backend = (*Backend)(nil)

// New returns a backend, whose goroutines live until Close. It panics if the machine lacks
// Options.ISA.
func New(o Options) *Backend {
	if o.Threads <= 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	return &Backend{pool: newPool(o.Threads, instructionsOf(o.ISA), o.Spin)}
}

// Name implements kernels.Backend.
func (b *Backend) Name() string { return "cpu" }

// ISA returns the instruction set that the backend computes with.
func (b *Backend) ISA() ISA { return b.set.isa }

// ActivationDType implements kernels.Backend: float32.
func (b *Backend) ActivationDType() kernels.DType { return kernels.F32 }

// Close ends the goroutines. No work may be outstanding.
func (b *Backend) Close() error {
	if b.shut.Swap(true) {
		return fmt.Errorf("cpu: close: %w", device.ErrClosed)
	}
	b.close()
	return nil
}

// Enqueue implements kernels.Backend. s must be a device.Executor.
func (b *Backend) Enqueue(s device.Stream, op kernels.Op) error {
	if b.shut.Load() {
		return fmt.Errorf("cpu: %s: %w", op.Name(), device.ErrClosed)
	}
	e, ok := s.(device.Executor)
	if !ok {
		return fmt.Errorf("cpu: %s: stream %q of %s cannot run Go functions: use a host stream or a stream of an emulated device", op.Name(), s.Name(), s.Space())
	}
	if err := op.Check(); err != nil {
		return err
	}
	switch o := op.(type) {
	case *kernels.Embed:
		return enqueue(b, e, 0, op, o, (*Backend).embed, act{"Out", &o.Out})
	case *kernels.Norm:
		return enqueue(b, e, 1, op, o, (*Backend).norm, act{"X", &o.X})
	case *kernels.MatMul:
		return enqueue(b, e, 2, op, o, (*Backend).matmul, act{"X", &o.X})
	case *kernels.Clamp:
		return enqueue(b, e, 3, op, o, (*Backend).clamp, act{"X", &o.X})
	case *kernels.RoPE:
		return enqueue(b, e, 4, op, o, (*Backend).rope, act{"Q", &o.Q})
	case *kernels.AppendKV:
		return enqueue(b, e, 5, op, o, (*Backend).appendKV, act{})
	case *kernels.Attention:
		return enqueue(b, e, 6, op, o, (*Backend).attention, act{})
	case *kernels.Route:
		return enqueue(b, e, 7, op, o, (*Backend).route, act{"Logits", &o.Logits})
	case *kernels.RouterGateUp:
		return enqueue(b, e, 27, op, o, (*Backend).routerGateUp, act{"Router.X", &o.Router.X})
	case *kernels.RouteDown:
		return enqueue(b, e, 28, op, o, (*Backend).routeDown, act{"Down.X", &o.Down.X})
	case *kernels.RouteExpertUp:
		if err := kernels.CheckRowMajor("cpu", o.Name(), o.Up.Layout); err != nil {
			return err
		}
		return enqueue(b, e, 29, op, o, (*Backend).routeExpertUp, act{"Up.X", &o.Up.X})
	case *kernels.SortByExpert:
		return enqueue(b, e, 8, op, o, (*Backend).group, act{})
	case *kernels.ExpertUp:
		if err := kernels.CheckRowMajor("cpu", o.Name(), o.Layout); err != nil {
			return err
		}
		return enqueue(b, e, 9, op, o, (*Backend).expertUp, act{})
	case *kernels.ExpertDown:
		if err := kernels.CheckRowMajor("cpu", o.Name(), o.Layout); err != nil {
			return err
		}
		return enqueue(b, e, 10, op, o, (*Backend).expertDown, act{})
	case *kernels.Combine:
		return enqueue(b, e, 11, op, o, (*Backend).combine, act{"X", &o.X})
	case *kernels.SiluMul:
		return enqueue(b, e, 12, op, o, (*Backend).siluMul, act{"Gate", &o.Gate})
	case *kernels.Gather:
		return enqueue(b, e, 13, op, o, (*Backend).gather, act{"X", &o.X})
	case *kernels.Sample:
		return enqueue(b, e, 14, op, o, (*Backend).sample, act{"Logits", &o.Logits})
	case *kernels.Adjust:
		return enqueue(b, e, 15, op, o, (*Backend).adjust, act{})
	case *kernels.Restore:
		return enqueue(b, e, 16, op, o, (*Backend).restore, act{})
	case *kernels.LogProbs:
		return enqueue(b, e, 17, op, o, (*Backend).logProbs, act{})
	case *kernels.CombineNorm:
		return enqueue(b, e, 18, op, o, (*Backend).combineNorm, act{"X", &o.X})
	case *kernels.RoPEAppendKV:
		return enqueue(b, e, 19, op, o, (*Backend).ropeAppendKV, act{"Q", &o.Q})
	case *kernels.RoPEAttention:
		return enqueue(b, e, 26, op, o, (*Backend).ropeAttention, act{"Q", &o.Append.Q})
	case *kernels.Mask:
		return enqueue(b, e, 21, op, o, (*Backend).mask, act{})
	case *kernels.CopyBlocks:
		return enqueue(b, e, 20, op, o, (*Backend).copyBlocks, act{})
	case *kernels.AddRows:
		return enqueue(b, e, 25, op, o, (*Backend).addRows, act{})
	case *kernels.Copy:
		return enqueue(b, e, 24, op, o, (*Backend).copy, act{})
	case *kernels.ExpertFFN:
		if o.Layout.Tag != kernels.Tiles || !o.Layout.Tileable() {
			if err := kernels.CheckRowMajor("cpu", o.Name(), o.Layout); err != nil {
				return err
			}
		}
		return enqueue(b, e, 22, op, o, (*Backend).expertFFN, act{})
	case *kernels.GatedMatMul:
		return enqueue(b, e, 23, op, o, (*Backend).gatedMatmul, act{"X", &o.X})
	}
	return fmt.Errorf("cpu: %s: operation of unknown type %T", op.Name(), op)
}

// act is a tensor of the activation type; Check verifies that the others match it. AppendKV,
// Attention and the operations of experts, which also serve GPUs, accept 16-bit activations as well.
type act struct {
	name string
	t    *kernels.Tensor
}

// job is an enqueued operation: a copy of its arguments. Jobs are pooled.
type job[T any] struct {
	args T
	run  func(device.Access) error
}

// enqueue puts a copy of args on s; do executes it.
func enqueue[T any](b *Backend, s device.Executor, kind int, op kernels.Op, args *T, do func(*Backend, *T, device.Access) error, a act) error {
	if a.t != nil && a.t.DType != kernels.F32 {
		return fmt.Errorf("cpu: %s: %s is %v, want %v, the activation type", op.Name(), a.name, *a.t, kernels.F32)
	}
	j, _ := b.jobs[kind].Get().(*job[T])
	if j == nil {
		j = &job[T]{}
		j.run = func(access device.Access) error {
			err := do(b, &j.args, access)
			b.jobs[kind].Put(j)
			return err
		}
	}
	j.args = *args
	d, _ := b.decls.Get().(*kernels.Decl)
	if d == nil {
		d = &kernels.Decl{}
	}
	op.Declare(d)
	err := s.Execute(device.Work{
		Name: op.Name(), Reads: d.Reads, Writes: d.Writes, Flops: d.Flops, Bytes: d.Bytes, Run: j.run,
	})
	d.Reset()
	b.decls.Put(d)
	return err
}

// ExpertLayout implements kernels.Backend.
func (b *Backend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	return kernels.RowMajorLayout("cpu", s)
}

// PackExpert implements kernels.Backend.
func (b *Backend) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	if l.Tag == kernels.Tiles {
		return kernels.PackTiles("cpu", l, part, row, src, dst)
	}
	return kernels.PackRowMajor("cpu", l, part, row, src, dst)
}

// errValue reports a value in device memory that would index outside of a tensor.
func errValue(op, name string, i int, value int64, want string, args ...any) error {
	return fmt.Errorf("cpu: %s: %s[%d] is %d, want %s", op, name, i, value, fmt.Sprintf(want, args...))
}
