package cuda

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// lane is a stream that a backend has taken for itself, and what goes with it: of all
// backends of the process it alone launches there, so that a kernel knows which one is in
// front of it. Like the stream it is used by one goroutine at a time.
type lane struct {
	b      *Backend
	stream device.Stream
	work   device.Range
	// The arguments under way lie here, since runners would make them escape.
	args    [512]byte
	library libraryProduct
	tiles   tileMap
	maps    [2]tensorMap
	// up is what the latest launch took, if it was the tiled experts' way up.
	up chosenExperts
}

// taken are the streams of all lanes of the process.
var taken sync.Map

// lane returns the stream's, which it takes when it comes first.
func (b *Backend) lane(s device.Stream) (*lane, error) {
	b.mu.RLock()
	l, closed := b.lanes[s], b.closed
	b.mu.RUnlock()
	switch {
	case closed:
		return nil, device.ErrClosed
	case l != nil:
		return l, nil
	}
	return b.take(s)
}

// take makes a stream that no backend has a lane of b, with a workspace of its own.
func (b *Backend) take(s device.Stream) (*lane, error) {
	if s.Space() != b.work.Space() {
		return nil, fmt.Errorf("stream %q is of %v, and the backend of %v", s.Name(), s.Space(), b.work.Space())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.free)
	if n == 0 {
		return nil, fmt.Errorf("stream %q is one too many: Options.Streams is %d", s.Name(), b.o.Streams)
	}
	if _, other := taken.LoadOrStore(s, true); other {
		return nil, fmt.Errorf("stream %q is used through another backend, which has it until it is closed: give each a stream of its own", s.Name())
	}
	l := &lane{b: b, stream: s, work: b.free[n-1]}
	b.free = b.free[:n-1]
	b.lanes[s] = l
	return l, nil
}

// release gives the stream up, and its workspace back; nothing that was launched may be
// under way.
func (l *lane) release() {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	delete(l.b.lanes, l.stream)
	l.b.free = append(l.b.free, l.work)
	taken.Delete(l.stream)
}

// enqueue puts a checked operation on the stream.
func (l *lane) enqueue(op kernels.Op) error {
	switch o := op.(type) {
	case *kernels.Embed:
		return l.embed(o)
	case *kernels.Norm:
		return l.norm(o)
	case *kernels.MatMul:
		return l.matmul(o)
	case *kernels.Clamp:
		return l.clamp(o)
	case *kernels.RoPE:
		return l.rope(o)
	case *kernels.AppendKV:
		return l.appendKV(o)
	case *kernels.RoPEAppendKV:
		return l.ropeAppendKV(o)
	case *kernels.Attention:
		return l.attention(o)
	case *kernels.Route:
		return l.route(o)
	case *kernels.Group:
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
	case *kernels.Sample:
		return l.sample(o)
	case *kernels.Adjust:
		return l.adjust(o)
	case *kernels.Restore:
		return l.restore(o)
	case *kernels.LogProbs:
		return l.logProbs(o)
	}
	return fmt.Errorf("cuda: %s: operation of unknown type %T", op.Name(), op)
}

// maxGrid is the most blocks in y and z.
const maxGrid = 65535

// launch enqueues k with args, a struct laid out as the kernel's. A grid without
// blocks does nothing.
func launch[A any](l *lane, op string, k kernelID, g grid, args *A) error {
	g.y, g.z = max(g.y, 1), max(g.z, 1)
	switch {
	case g.x <= 0:
		return nil
	case g.x > 1<<31-1 || g.y > maxGrid || g.z > maxGrid:
		return fmt.Errorf("cuda: %s: %d x %d x %d blocks, more than a launch may have: give it fewer rows or columns", op, g.x, g.y, g.z)
	}
	l.up = chosenExperts{}
	n := copy(l.args[:], unsafe.Slice((*byte)(unsafe.Pointer(args)), unsafe.Sizeof(*args)))
	if err := l.b.run.launch(l.stream, k, g, l.args[:n]); err != nil {
		return fmt.Errorf("cuda: %s: %w", op, err)
	}
	return nil
}
