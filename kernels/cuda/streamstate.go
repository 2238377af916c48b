package cuda

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// streamState is the backend's state of a stream that it uses exclusively: no other backend of
// the process launches there, so that a kernel knows its predecessor. Like the stream it is
// used by one goroutine at a time.
type streamState struct {
	b      *Backend
	stream device.Stream
	work   device.Range
	// args holds the arguments of the current launch, which would otherwise escape to the heap.
	args    [512]byte
	library libraryGEMM
	tiles   tileMap
	maps    [2]tensorMap
	// last is what the next launch may overlap with.
	last lastLaunch
	// routeDowns is what the latest RouteDown reads and writes.
	routeDowns kernels.Decl
}

// lastLaunch is what expert GEMMs have to know of the latest launch; zero if there is nothing.
type lastLaunch struct {
	// gateUp has the lists of a gate/up projection of tiled experts, and selected the router's scores by which that has
	// selected its experts.
	gateUp   expertLists
	selected routeSortArgs
	// routeDown is what a RouteDown routes.
	routeDown routeSortArgs
}

// streamOwners has the streams that are in use by any backend of the process.
var streamOwners sync.Map

// streamState returns the state of a stream, which is created at its first operation. It has a
// workspace from the first operation on that needs one, which not all do.
func (b *Backend) streamState(s device.Stream, workspace bool) (*streamState, error) {
	b.mu.RLock()
	l, closed := b.states[s], b.closed
	b.mu.RUnlock()
	switch {
	case closed:
		return nil, device.ErrClosed
	case l != nil && (l.work.Bytes > 0 || !workspace):
		return l, nil
	}
	return b.newStreamState(s, l, workspace)
}

// newStreamState makes b the owner of a stream without owner, if l is nil, and assigns it a
// workspace.
func (b *Backend) newStreamState(s device.Stream, l *streamState, workspace bool) (*streamState, error) {
	if s.Space() != b.work.Space() {
		return nil, fmt.Errorf("stream %q belongs to %v, but the backend to %v", s.Name(), s.Space(), b.work.Space())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.free)
	if n == 0 && workspace {
		return nil, fmt.Errorf("stream %q exceeds Options.Streams (%d)", s.Name(), b.o.Streams)
	}
	if l == nil {
		if _, other := streamOwners.LoadOrStore(s, true); other {
			return nil, fmt.Errorf("stream %q is in use by another backend until that is closed: use one stream per backend", s.Name())
		}
		l = &streamState{b: b, stream: s}
		b.states[s] = l
	}
	if workspace {
		l.work, b.free = b.free[n-1], b.free[:n-1]
	}
	return l, nil
}

// release gives up the stream and frees its workspace; all launched work must have ended.
func (l *streamState) release() {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	delete(l.b.states, l.stream)
	if l.work.Bytes > 0 {
		l.b.free = append(l.b.free, l.work)
	}
	streamOwners.Delete(l.stream)
}

// enqueue enqueues a checked operation on the stream.
func (l *streamState) enqueue(op kernels.Op) error {
	switch o := op.(type) {
	case *kernels.Embed:
		return l.embed(o)
	case *kernels.Norm:
		return l.norm(o)
	case *kernels.MatMul:
		return l.matmul(o)
	case *kernels.GatedMatMul:
		return l.gatedMatmul(o)
	case *kernels.Clamp:
		return l.clamp(o)
	case *kernels.RoPE:
		return l.rope(o)
	case *kernels.AppendKV:
		return l.appendKV(o)
	case *kernels.RoPEAppendKV:
		return l.ropeAppendKV(o)
	case *kernels.Attention:
		return l.attention(o, nil)
	case *kernels.RoPEAttention:
		return l.ropeAttention(o)
	case *kernels.Route:
		return l.route(o)
	case *kernels.RouterGateUp:
		return l.routerGateUp(o)
	case *kernels.RouteDown:
		return l.routeDown(o)
	case *kernels.RouteExpertUp:
		return l.routeExpertUp(o)
	case *kernels.SortByExpert:
		return l.group(o)
	case *kernels.ExpertUp:
		return l.expertUp(o)
	case *kernels.ExpertDown:
		return l.expertDown(o)
	case *kernels.Combine:
		return l.combine(o)
	case *kernels.CombineNorm:
		return l.combineNorm(o)
	case *kernels.SiluMul:
		return l.siluMul(o)
	case *kernels.Gather:
		return l.gather(o)
	case *kernels.CopyBlocks:
		return l.copyBlocks(o)
	case *kernels.AddRows:
		return l.addRows(o)
	case *kernels.Copy:
		return l.copy(o)
	case *kernels.Sample:
		return l.sample(o)
	case *kernels.Adjust:
		return l.adjust(o)
	case *kernels.Restore:
		return l.restore(o)
	case *kernels.Mask:
		return l.mask(o)
	case *kernels.LogProbs:
		return l.logProbs(o)
	}
	return fmt.Errorf("cuda: %s: operation of unknown type %T", op.Name(), op)
}

// maxGrid is the maximum number of blocks in y and z.
const maxGrid = 65535

// launch enqueues k with args, which must have the layout of the kernel's struct. A grid
// without blocks is a no-op.
func launch[A any](l *streamState, op string, k kernelID, g grid, args *A) error {
	g.y, g.z = max(g.y, 1), max(g.z, 1)
	switch {
	case g.x <= 0:
		return nil
	case g.x > 1<<31-1 || g.y > maxGrid || g.z > maxGrid:
		return fmt.Errorf("cuda: %s: %d x %d x %d blocks exceed the maximum of a launch: use fewer rows or columns", op, g.x, g.y, g.z)
	}
	l.last = lastLaunch{}
	n := copy(l.args[:], unsafe.Slice((*byte)(unsafe.Pointer(args)), unsafe.Sizeof(*args)))
	if err := l.b.run.launch(l.stream, k, g, l.args[:n]); err != nil {
		return fmt.Errorf("cuda: %s: %w", op, err)
	}
	return nil
}
