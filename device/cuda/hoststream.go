//go:build cuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// hostStream runs Go work, copies, and event and fence operations on one goroutine that is
// locked to its own thread. The stream is in error from its first failed operation on.
type hostStream struct {
	m    *Machine
	name string
	// yields: the goroutine yields between polls, see minSpinProcs.
	yields bool
	// spin is device.StreamOptions.Spin; ran is when the goroutine last ended an operation, if spin is
	// not 0.
	spin time.Duration
	ran  time.Time

	// sleeper is where the goroutine's thread sleeps, freed where it waits for a helper that has taken
	// the stream. It does not poll there: Go hardly ever takes the processor away from such a loop, and
	// the helper may need it.
	sleeper, freed sleeper

	// helpers is the number of goroutines in Await that look, and do not sleep until a watch is due.
	helpers atomic.Int32

	mu sync.Mutex
	// taken: the goroutine is awake, or a helper looks in its place.
	taken bool
	// queue holds the pending operations, starting at index first.
	queue []hostOp
	first int
	busy  bool
	// closed refuses new operations; ending makes the goroutine exit once the queue is
	// empty.
	closed, ending bool
	exited         chan struct{}
	// watches are the pending watches; changed is when one was last added or removed. until is when the
	// goroutine wakes of itself, while it sleeps because no watch is due before.
	watches        []watch
	changed, until time.Duration

	// sides are GPU streams for copies from or to device memory; probed is when the
	// devices were last checked for being alive. Only the goroutine uses them.
	sides  map[*gpu]*Stream
	probed time.Time
	// failed is the stream's error, and outlook what the latest look has left; looked, pending and ends
	// are scratch space of look. Whoever has taken the stream uses them.
	failed  error
	outlook outlook
	looked  []watch
	pending []*gpuRecording
	ends    []watchEnd
}

type hostOpKind uint8

const (
	hostCopy hostOpKind = iota
	hostWork
	hostRecord
	hostWait
	hostRaise
	hostAwait
	// hostMark notifies a waiting Synchronize that the stream has reached this point.
	hostMark
	// hostRecover does the same and clears the stream's error.
	hostRecover
	// hostFailed calls work.Failed: the fence or event that the work was waiting for failed.
	hostFailed
)

type hostOp struct {
	kind     hostOpKind
	dst, src device.Range
	to, from *memory
	work     device.Work
	rec      *hostRecording
	gpuRec   *gpuRecording
	event    *event
	fence    *fence
	value    uint32
	failure  error
	// watched: it is the work of a watch.
	watched bool
	// reached receives the stream's error, unless abandoned is closed first.
	reached   chan error
	abandoned chan struct{}
}

var _ device.Watcher = (*hostStream)(nil)

func (m *Machine) newHostStream(o device.StreamOptions) (device.Stream, error) {
	s := &hostStream{m: m, name: o.Name, spin: o.Spin, yields: runtime.GOMAXPROCS(0) < minSpinProcs, exited: make(chan struct{}), sides: map[*gpu]*Stream{}, taken: true}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return nil, closedError("stream", device.Host, "the machine")
	}
	m.hosts[s] = struct{}{}
	go s.loop()
	return s, nil
}

// Name implements device.Stream.
func (s *hostStream) Name() string { return s.name }

// Space implements device.Stream.
func (s *hostStream) Space() device.Space { return device.Host }

func (s *hostStream) String() string { return fmt.Sprintf("stream %q (host)", s.name) }

func (s *hostStream) enqueue(what string, o hostOp) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.m.closed.Load() {
		return closedError(what, device.Host, s.String())
	}
	s.push(o)
	s.sleeper.wake()
	return nil
}

// push appends to the queue; the lock is held.
func (s *hostStream) push(o hostOp) {
	if s.first > 0 && len(s.queue) == cap(s.queue) {
		n := copy(s.queue, s.queue[s.first:])
		clear(s.queue[n:])
		s.queue, s.first = s.queue[:n], 0
	}
	s.queue = append(s.queue, o)
}

// Copy implements device.Stream.
func (s *hostStream) Copy(dst, src device.Range) error {
	to, from, err := s.m.copyable(s, dst, src)
	if err != nil || dst.Bytes == 0 {
		return err
	}
	return s.enqueue("copy", hostOp{kind: hostCopy, dst: dst, src: src, to: to, from: from})
}

// Execute implements device.Executor.
func (s *hostStream) Execute(w device.Work) error {
	// The caller may reuse these slices.
	w.Reads, w.Writes = nil, nil
	return s.enqueue("launch", hostOp{kind: hostWork, work: w})
}

// Record implements device.Stream.
func (s *hostStream) Record(e device.Event) error {
	ev, err := s.m.event("record", device.Host, e)
	if err != nil {
		return err
	}
	if s.gone() {
		return closedError("record", device.Host, s.String())
	}
	r, err := ev.recordHost()
	if err != nil {
		return err
	}
	return s.enqueue("record", hostOp{kind: hostRecord, rec: r})
}

// Wait implements device.Stream.
func (s *hostStream) Wait(e device.Event) error {
	ev, err := s.m.event("wait", device.Host, e)
	if err != nil {
		return err
	}
	ev.mu.Lock()
	err = ev.recorded("wait", device.Host)
	o := hostOp{kind: hostWait, event: ev, rec: ev.host, gpuRec: ev.gpu}
	if o.gpuRec != nil {
		ev.hold(o.gpuRec)
	}
	ev.mu.Unlock()
	if err == nil {
		err = s.enqueue("wait", o)
	}
	if err != nil && o.gpuRec != nil {
		ev.drop(o.gpuRec)
	}
	return err
}

// SignalFence implements device.Stream.
func (s *hostStream) SignalFence(f device.Fence, value uint32) error {
	return s.fenceOp("signal", hostRaise, f, value)
}

// WaitFence implements device.Stream.
func (s *hostStream) WaitFence(f device.Fence, value uint32) error {
	return s.fenceOp("wait", hostAwait, f, value)
}

func (s *hostStream) fenceOp(what string, kind hostOpKind, f device.Fence, value uint32) error {
	fe, err := s.m.fence(what, device.Host, f)
	if err != nil {
		return err
	}
	if s.gone() {
		return closedError(what, device.Host, s.String())
	}
	if err := fe.enqueued(what, device.Host, value); err != nil {
		return err
	}
	return s.enqueue(what, hostOp{kind: kind, fence: fe, value: value})
}

func (s *hostStream) gone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed || s.m.closed.Load()
}

// Synchronize implements device.Stream.
func (s *hostStream) Synchronize(ctx context.Context) error {
	return s.reach(ctx, hostMark, "synchronize")
}

// Recover implements device.Stream.
func (s *hostStream) Recover(ctx context.Context) error { return s.reach(ctx, hostRecover, "recover") }

// reach waits until the stream has completed everything enqueued so far, and returns its
// error at that point. If ctx ends first, a recovery does not clear the error.
func (s *hostStream) reach(ctx context.Context, kind hostOpKind, what string) error {
	o := hostOp{kind: kind, reached: make(chan error), abandoned: make(chan struct{})}
	if err := s.enqueue(what, o); err != nil {
		return err
	}
	select {
	case err := <-o.reached:
		return err
	case <-ctx.Done():
		close(o.abandoned)
		return fmtWait(what+" "+s.String(), ctx)
	}
}

// Close implements device.Stream. It does not return the error the stream is in.
func (s *hostStream) Close() error {
	s.mu.Lock()
	if s.closed || s.m.closed.Load() {
		s.mu.Unlock()
		return closedError("close", device.Host, s.String())
	}
	s.mu.Unlock()
	s.end()
	s.m.mu.Lock()
	delete(s.m.hosts, s)
	s.m.mu.Unlock()
	return nil
}

// end waits until the goroutine has finished the queue and exited.
func (s *hostStream) end() {
	s.mu.Lock()
	s.closed, s.ending = true, true
	s.sleeper.wake()
	s.mu.Unlock()
	<-s.exited
}

// idle reports whether the stream has no work.
func (s *hostStream) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.busy && s.first == len(s.queue)
}

// loop is the stream's goroutine. Its thread ends with it.
func (s *hostStream) loop() {
	defer close(s.exited)
	runtime.LockOSThread()
	precise()
	s.mu.Lock()
	for {
		s.look()
		for s.first == len(s.queue) && !s.ending {
			s.rest()
			s.look()
		}
		if s.first == len(s.queue) {
			break
		}
		s.runNext()
	}
	s.mu.Unlock()
	s.unwatch()
	for _, side := range s.sides {
		// The goroutine has waited for each copy.
		_ = side.destroy()
	}
}

// runNext executes the first operation of the queue. The lock is held on entry and on return, and
// released in between.
func (s *hostStream) runNext() {
	o := s.queue[s.first]
	s.queue[s.first] = hostOp{}
	if s.first++; s.first == len(s.queue) {
		s.queue, s.first = s.queue[:0], 0
	}
	s.busy = true
	s.mu.Unlock()
	s.failed = s.run(&o, s.failed)
	if s.spin > 0 {
		s.ran = time.Now()
	}
	s.mu.Lock()
	s.busy = false
}

// sleep sleeps until the queue or the watches change, or for d unless that is 0. Meanwhile helpers
// may take the stream, each for one look. The lock is held on entry and on return, and released in
// between.
func (s *hostStream) sleep(d time.Duration) {
	s.taken = false
	s.sleeper.lie()
	s.mu.Unlock()
	s.sleeper.sleep(d)
	s.mu.Lock()
	for s.taken {
		s.freed.lie()
		s.mu.Unlock()
		s.freed.sleep(0)
		s.mu.Lock()
	}
	s.taken = true
}

// run executes one operation while the stream's error is err, and returns the stream's
// error afterwards.
func (s *hostStream) run(o *hostOp, err error) error {
	switch o.kind {
	case hostRecord:
		o.rec.pass(s.m.Now(), err)
		return err
	case hostRaise:
		if err != nil {
			// The error is ignored: no one waits for a closed fence.
			_ = o.fence.fail(o.value, err)
			return err
		}
		return o.fence.raise(o.value, s)
	case hostFailed:
		if o.work.Failed != nil {
			o.work.Failed(o.failure)
		}
		return err
	case hostMark, hostRecover:
		select {
		case o.reached <- err:
			if o.kind == hostRecover {
				return nil
			}
		case <-o.abandoned:
		}
		return err
	}
	if err != nil {
		if o.gpuRec != nil {
			o.event.drop(o.gpuRec)
		}
		if o.kind == hostWork && o.work.Failed != nil {
			o.work.Failed(err)
		}
		return err
	}
	switch o.kind {
	case hostCopy:
		return s.copy(o)
	case hostWork:
		return s.execute(o)
	case hostWait:
		if o.rec != nil {
			return s.m.awaitHost(context.Background(), o.rec)
		}
		return o.event.await(context.Background(), o.gpuRec)
	case hostAwait:
		return o.fence.await(context.Background(), o.value, nil)
	}
	return nil
}

// direct ignores declared accesses: this backend does not check them.
type direct struct{}

func (direct) Read(device.Range)  {}
func (direct) Write(device.Range) {}

func (s *hostStream) execute(o *hostOp) error {
	if o.work.Run == nil {
		return nil
	}
	if err := o.work.Run(direct{}); err != nil {
		return &device.Error{Op: "launch", Space: device.Host, Detail: fmt.Sprintf("%q on %s", o.work.Name, s), Err: err}
	}
	return nil
}

// copy runs a copy and waits for it.
func (s *hostStream) copy(o *hostOp) error {
	if o.to.g == nil && o.from.g == nil {
		copy(o.to.data[o.dst.Addr-o.to.base:][:o.dst.Bytes], o.from.data[o.src.Addr-o.from.base:][:o.src.Bytes])
		return nil
	}
	// Between peers, a copy is faster when the source GPU pushes it.
	// ---
	g := o.from.g
	if g == nil {
		g = o.to.g
	}
	side := s.sides[g]
	if side == nil {
		var err error
		if side, err = s.m.newSide(g, device.StreamOptions{Name: s.name}); err != nil {
			return err
		}
		s.sides[g] = side
	}
	detail := func() string {
		return fmt.Sprintf("%s: %d bytes from %s to %s", s, o.dst.Bytes, o.from.space, o.to.space)
	}
	if c := side.copy(o.to, o.from, o.dst, o.src); c != success {
		return g.fail("copy", c, detail())
	}
	err := s.m.poll(context.Background(), longNap, detail, side.idle)
	if errors.Is(err, device.ErrLost) {
		return g.lostError("copy", detail())
	}
	return err
}
