//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
)

// gpu is one device with its primary context, which it shares with CUDA libraries.
type gpu struct {
	m     *Machine
	index int
	space device.Space
	dev   cu.Device
	ctx   cu.CUContext
	facts facts
	// granularity is the driver's allocation granularity of device memory, in bytes.
	granularity int64
	// access lists the devices that this device's memory is mapped for.
	access []C.int
	// idle is a stream without work: queries of it show whether the context is alive, and
	// the clock's anchor is recorded on it.
	idle  cu.Stream
	clock clock
	lost  atomic.Pointer[device.Error]
	// account is guarded by Machine.mu.
	account account
}

// account sums the sizes of the live allocations of one space, in bytes.
type account struct{ allocated, peak int64 }

func (a *account) add(n int64) {
	a.allocated += n
	a.peak = max(a.peak, a.allocated)
}

// Package cu hides these handles; each is a struct of one pointer.
const (
	_ = -(unsafe.Sizeof(cu.CUContext{}) ^ unsafe.Sizeof(uintptr(0)))
	_ = -(unsafe.Sizeof(cu.Event{}) ^ unsafe.Sizeof(uintptr(0)))
	_ = -(unsafe.Sizeof(cu.Function{}) ^ unsafe.Sizeof(uintptr(0)))
)

func (g *gpu) context() C.CUcontext { return *(*C.CUcontext)(unsafe.Pointer(&g.ctx)) }

func eventHandle(e *cu.Event) C.CUevent { return *(*C.CUevent)(unsafe.Pointer(e)) }

func streamHandle(s cu.Stream) C.CUstream { return C.CUstream(unsafe.Pointer(s.C())) }

// open retains the primary context, reads the granularity and creates the idle stream.
func (g *gpu) open() error {
	var err error
	if g.ctx, err = g.dev.RetainPrimaryCtx(); err != nil {
		e := failure("open", g.space, code(err), fmt.Sprintf("CUDA device %d (%s)", int(g.dev), g.facts.name))
		if e.Code == deviceInUse {
			e.Detail += " is in use by a process that keeps it to itself (compute mode)"
		}
		return e
	}
	if c := C.ms_granularity(C.int(g.dev), (*C.size_t)(unsafe.Pointer(&g.granularity))); c != success {
		return failure("open", g.space, int(c), "granularity of memory")
	}
	if err := g.enter(); err != nil {
		return failure("open", g.space, code(err), "context")
	}
	defer g.leave()
	if g.idle, err = cu.MakeStream(cu.NonBlocking); err != nil {
		return failure("open", g.space, code(err), "stream")
	}
	return nil
}

// allow maps future allocations of this device for another device too.
func (g *gpu) allow(to *gpu) { g.access = append(g.access, C.int(to.dev)) }

// close releases the context. Errors of a lost device are ignored.
func (g *gpu) close() error {
	if g.ctx == (cu.CUContext{}) {
		return nil
	}
	if g.enter() == nil {
		g.clock.close()
		if g.idle != cu.NoStream {
			_ = g.idle.Destroy()
		}
	}
	g.leave()
	err := g.dev.ReleasePrimaryCtx()
	if err == nil || g.lost.Load() != nil {
		return nil
	}
	return failure("close", g.space, code(err), "primary context")
}

// enter locks the goroutine to its thread until leave and makes the context current
// there: calls through package cu must be between the two.
func (g *gpu) enter() error {
	runtime.LockOSThread()
	return cu.SetCurrentContext(g.ctx)
}

func (g *gpu) leave() { runtime.UnlockOSThread() }

// fail returns the typed error of a driver call, and marks the device as lost if c is a
// result that ends the context.
func (g *gpu) fail(op string, c int, detail string) *device.Error {
	if e := g.lostError(op, detail); e != nil {
		return e
	}
	e := failure(op, g.space, c, detail)
	if endsDevice[c] {
		g.lose(e)
	}
	return e
}

// lose marks the device as lost and fails the fence values that it had yet to signal, so
// that waits for them end.
func (g *gpu) lose(e *device.Error) {
	if !g.lost.CompareAndSwap(nil, e) {
		return
	}
	g.m.o.Log.Error("device lost", "device", g.space.String(), "op", e.Op, "cuda_error", e.Name, "detail", e.Detail)
	g.m.mu.Lock()
	var fences []*fence
	for f := range g.m.fences {
		fences = append(fences, f)
	}
	g.m.mu.Unlock()
	for _, f := range fences {
		f.orphan(g, e)
	}
}

// lostError returns the error that lost the device as an error of op; nil while the device
// is alive.
func (g *gpu) lostError(op, detail string) *device.Error {
	first := g.lost.Load()
	if first == nil {
		return nil
	}
	if detail != "" {
		detail += "; "
	}
	return &device.Error{
		Op: op, Space: g.space, Code: first.Code, Name: first.Name, Err: device.ErrLost,
		Detail: fmt.Sprintf("%sthe device was lost in an earlier %s (%s)", detail, first.Op, first.Detail),
	}
}

// probe checks whether the context is alive, and marks the device as lost if not.
func (g *gpu) probe() {
	if g.lost.Load() != nil {
		return
	}
	if c := C.ms_stream_query(g.context(), streamHandle(g.idle)); c != success && c != notReady {
		g.fail("probe", int(c), "")
	}
}

// clock converts event times to the machine's clock. CUDA returns the time between two
// events as a float32 in milliseconds, so the reference event, the anchor, is recorded
// again before the distance grows too large for microsecond precision.
type clock struct {
	mu     sync.Mutex
	made   bool
	anchor cu.Event
	at     time.Duration
}

const maxAnchorDistance = 2 * time.Second

// read returns the time at which e, which must have completed, did so. The context is
// current.
func (c *clock) read(g *gpu, e cu.Event) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for fresh := false; ; fresh = true {
		if c.made {
			var ms C.float // package cu would put it on the heap
			if r := C.ms_event_elapsed(g.context(), eventHandle(&c.anchor), eventHandle(&e), &ms); r != success {
				return 0, cuResult(r)
			}
			d := time.Duration(float64(ms) * float64(time.Millisecond))
			if fresh || d.Abs() <= maxAnchorDistance && g.m.Now()-c.at <= maxAnchorDistance {
				return max(0, min(c.at+d, g.m.Now())), nil
			}
		}
		if err := c.renew(g); err != nil {
			return 0, err
		}
	}
}

// anchorPatience bounds the wait for an anchor: with more streams than hardware queues,
// the idle stream may share a queue with a stream that waits for a fence.
const anchorPatience = 100 * time.Millisecond

// The host knows the time of an anchor to half of what recording it and waiting for it took. If
// that is more than anchorSpan, the host was interrupted, and it tries again, at most anchorTries
// times: an anchor that seems too late would put events behind the present.
const (
	anchorSpan  = 20 * time.Microsecond
	anchorTries = 8
)

// renew makes the anchor the best of some that it records on the idle stream, in some
// microseconds each. The context is current.
func (c *clock) renew(g *gpu) error {
	best := time.Duration(math.MaxInt64)
	for range anchorTries {
		anchor, at, span, err := g.recordAnchor()
		if err != nil && best == math.MaxInt64 {
			return err
		}
		if err != nil {
			break
		}
		if span >= best {
			_ = cu.DestroyEvent(&anchor)
			continue
		}
		c.close()
		c.made, c.anchor, c.at, best = true, anchor, at, span
		if span <= anchorSpan {
			break
		}
	}
	return nil
}

// recordAnchor records a new event on the idle stream, and waits for it: it was then at the time
// at, give or take half of span. The context is current.
func (g *gpu) recordAnchor() (anchor cu.Event, at, span time.Duration, err error) {
	if anchor, err = cu.MakeEvent(cu.DefaultEvent); err != nil {
		return anchor, 0, 0, err
	}
	before := g.m.Now()
	err = anchor.Record(g.idle)
	for err == nil {
		r := C.ms_event_query(g.context(), eventHandle(&anchor))
		span = g.m.Now() - before
		switch {
		case r == success:
			return anchor, before + span/2, span, nil
		case r != notReady || span > anchorPatience:
			err = cuResult(r)
		default:
			runtime.Gosched()
		}
	}
	_ = cu.DestroyEvent(&anchor) // the first error is the one that matters
	return anchor, 0, 0, err
}

func (c *clock) close() {
	if c.made {
		_ = cu.DestroyEvent(&c.anchor)
		c.made = false
	}
}
