package emulated

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

type opKind uint8

const (
	opCopy opKind = iota
	opWork
	opRecord
	opWait
	opRaise
	opAwait
)

var opNames = [...]string{opCopy: "copy", opWork: "launch", opRecord: "record", opWait: "wait", opRaise: "signal", opAwait: "wait"}

// op is one operation in a stream's queue.
type op struct {
	kind opKind
	// seen reports that faults of kind StallCopy were already consulted.
	seen bool
	// value of a fence signal or wait.
	value          uint32
	dst, src       device.Range
	dstMem, srcMem *memory
	// batch holds the copies of a batch, of which dst, src, dstMem and srcMem are the first;
	// bytes is the total of a copy.
	batch []part
	bytes int64
	rec   *recording
	fence *fence
	work  device.Work
	// used holds the allocations that the Work declared, on a checked machine.
	used             []*memory
	start, stallTime time.Duration
	// noticed is the time before which watched Work does not run.
	noticed time.Duration
	// clock is the enqueuer's vector clock at the enqueue, on a checked machine.
	clock vclock
	// failure is the error for which watched Work does not run; dropped is that for which
	// the operation is skipped, because the host knew of it at the enqueue.
	failure, dropped error
	// For Trace: the stream's note and the time of the enqueue.
	note   any
	queued time.Duration
}

// queue is a growing ring of operations.
type queue struct {
	buf     []op
	first   int
	n       int
	popping op
}

func (q *queue) push(o *op) {
	if q.n == len(q.buf) {
		grown := make([]op, max(16, 2*len(q.buf)))
		for i := range q.n {
			grown[i] = *q.at(i)
		}
		q.buf, q.first = grown, 0
	}
	q.n++
	*q.at(q.n - 1) = *o
}

func (q *queue) at(i int) *op { return &q.buf[(q.first+i)&(len(q.buf)-1)] }

func (q *queue) head() *op { return q.at(0) }

// pop removes and returns the first operation; the result is valid until the next pop.
func (q *queue) pop() *op {
	h := q.head()
	q.popping, *h = *h, op{}
	q.first = (q.first + 1) & (len(q.buf) - 1)
	q.n--
	return &q.popping
}

// stream is an in-order queue of a GPU or of the host. Machine.mu guards it.
type stream struct {
	m        *Machine
	sp       *space
	name     string
	priority int

	q queue
	// enqueued and done count the operations enqueued and ended.
	enqueued, done uint64
	// err is the stream's error; a stream of a lost GPU is in error as well.
	err error
	// undefined is, with Options.LikeCUDA, the error of a wait behind which the stream runs
	// on with undefined data, and detected the same once the host knows of it.
	undefined, detected error
	// closing makes the stream refuse new operations; stop ends its goroutine.
	closing, stop bool
	exited        chan struct{}
	// goroutine identifies the stream's own goroutine, on a checked machine.
	goroutine uintptr

	// cur is the operation that runs while busy is set; due reports, on a virtual machine,
	// that its modeled time has passed.
	cur       *op
	busy, due bool
	stalled   *Fault

	// cond wakes the stream's goroutine while parked. subscribed is the position of the
	// operation for which an event or fence will wake it.
	cond       sync.Cond
	parked     bool
	subscribed uint64

	// note is the annotation of operations enqueued from now on; ended is the time at which
	// the latest operation ended.
	note  any
	ended time.Duration

	waiters, settlers []*waiter
	// batches are freelists of op.batch, sides is scratch space of checkOverlaps.
	batches [][]part
	sides   []side
	// watches holds the stream's active watches, spare those that can be reused.
	watches, spare []*watch
	access         access
	// actor is the stream's actor in the check.
	actor *actor
}

var _ device.Watcher = (*stream)(nil)

// NewStream implements device.Machine. Every stream it makes is a
// device.Executor.
func (m *Machine) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	if o.Name == "" {
		o.Name = "stream"
	}
	sp, err := m.space("stream", space)
	if err != nil {
		return nil, err
	}
	if sp.lost {
		return nil, sp.lostErr("stream", o.Name)
	}
	s := &stream{m: m, sp: sp, name: o.Name, priority: o.Priority, exited: make(chan struct{})}
	s.cond.L = &m.mu
	s.access.s = s
	if m.check != nil {
		s.actor = m.check.newActor()
	}
	m.streams = append(m.streams, s)
	if m.o.Virtual {
		close(s.exited)
	} else {
		m.loops.Add(1)
		go s.loop()
	}
	return s, nil
}

// Name implements device.Stream.
func (s *stream) Name() string { return s.name }

// Space implements device.Stream.
func (s *stream) Space() device.Space { return s.sp.id }

func (s *stream) String() string { return fmt.Sprintf("stream %q (%s)", s.name, s.sp.id) }

// usable returns the error for which an operation cannot be enqueued, or nil. The lock is
// held.
func (s *stream) usable(op string) error {
	if s.m.closed || s.closing {
		return &device.Error{Op: op, Space: s.sp.id, Detail: s.String(), Err: device.ErrClosed}
	}
	if s.sp.lost {
		return s.sp.lostErr(op, s.String())
	}
	return nil
}

// failed returns the stream's error, or nil.
func (s *stream) failed() error {
	if s.sp.lost {
		return s.sp.lostErr("stream", s.String())
	}
	return s.err
}

func (s *stream) enqueue(o *op) {
	m := s.m
	if m.check != nil {
		o.clock = m.check.caller().snapshot()
	}
	if o.note = s.note; m.o.Trace != nil {
		o.queued = m.clock()
	}
	o.dropped = s.detected
	s.enqueued++
	s.q.push(o)
	m.called()
	s.wake()
}

// Annotate implements device.Annotator.
func (s *stream) Annotate(note any) (before any) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	before, s.note = s.note, note
	return before
}

func (s *stream) wake() {
	if s.parked {
		s.parked = false
		s.cond.Signal()
	}
}

// Copy implements device.Stream.
func (s *stream) Copy(dst, src device.Range) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.usable("copy"); err != nil {
		return err
	}
	o, err := s.copyOp(dst, src)
	if err != nil || dst.Bytes == 0 {
		return err
	}
	m.hold(&o)
	s.enqueue(&o)
	return nil
}

// copyOp checks the arguments of a copy and returns its operation, which is empty for a copy of
// 0 bytes.
func (s *stream) copyOp(dst, src device.Range) (op, error) {
	m := s.m
	if dst.Bytes != src.Bytes {
		return op{}, s.badCopy("destination has %d bytes and source %d", dst.Bytes, src.Bytes)
	}
	if dst.Bytes == 0 {
		return op{}, nil
	}
	o := op{kind: opCopy, dst: dst, src: src, dstMem: m.memory.find(dst), srcMem: m.memory.find(src), bytes: dst.Bytes}
	if o.dstMem == nil || o.srcMem == nil {
		r, side := dst, "destination"
		if o.dstMem != nil {
			r, side = src, "source"
		}
		if m.check != nil {
			m.check.outOfBounds(s, r, o.dstMem == nil)
		}
		return op{}, s.badCopy("%s %v is not in one live allocation: it was freed, or is too long", side, r)
	}
	if dst.Addr < src.End() && src.Addr < dst.End() {
		return op{}, s.badCopy("source %v and destination %v overlap", src, dst)
	}
	from, to := o.srcMem.space, o.dstMem.space
	for _, sp := range []*space{from, to} {
		if sp.lost {
			return op{}, sp.lostErr("copy", fmt.Sprintf("%s: %d bytes from %s to %s", s, dst.Bytes, from.id, to.id))
		}
	}
	if from != to {
		if _, err := m.topo.Path(from.id, to.id); err != nil {
			return op{}, &device.Error{Op: "copy", Space: s.sp.id, Detail: s.String(), Err: err}
		}
	}
	return o, nil
}

func (s *stream) badCopy(format string, args ...any) error {
	return &device.Error{Op: "copy", Space: s.sp.id, Detail: s.String() + ": " + fmt.Sprintf(format, args...)}
}

// Execute implements device.Executor.
func (s *stream) Execute(w device.Work) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.usable("launch"); err != nil {
		return err
	}
	o, err := s.workOp(w)
	if err == nil {
		s.enqueue(&o)
	}
	return err
}

// workOp returns the operation of w. It copies w's ranges, so the caller may change them
// after.
func (s *stream) workOp(w device.Work) (op, error) {
	o := op{kind: opWork, work: w}
	o.work.Reads, o.work.Writes = nil, nil
	if s.m.check != nil {
		o.work.Reads, o.work.Writes = slices.Clone(w.Reads), slices.Clone(w.Writes)
		if err := s.m.check.use(s, &o); err != nil {
			return op{}, err
		}
	}
	return o, nil
}

// Record implements device.Stream.
func (s *stream) Record(e device.Event) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.usable("record"); err != nil {
		return err
	}
	ev, err := m.event("record", s.sp.id, e)
	if err != nil {
		return err
	}
	r := ev.cur
	if r == nil || !r.passed || r.refs > 0 {
		r = &recording{}
		ev.cur = r
	}
	*r = recording{stream: s, waiters: r.waiters[:0], blocked: r.blocked[:0], watches: r.watches[:0]}
	s.enqueue(&op{kind: opRecord, rec: r})
	return nil
}

// Wait implements device.Stream.
func (s *stream) Wait(e device.Event) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.usable("wait"); err != nil {
		return err
	}
	ev, err := m.event("wait", s.sp.id, e)
	if err != nil {
		return err
	}
	if ev.cur == nil {
		return &device.Error{Op: "wait", Space: s.sp.id, Detail: s.String(), Err: device.ErrNotRecorded}
	}
	ev.cur.refs++
	s.enqueue(&op{kind: opWait, rec: ev.cur})
	return nil
}

// SignalFence implements device.Stream.
func (s *stream) SignalFence(f device.Fence, value uint32) error {
	return s.fenceOp(opRaise, f, value)
}

// WaitFence implements device.Stream.
func (s *stream) WaitFence(f device.Fence, value uint32) error {
	return s.fenceOp(opAwait, f, value)
}

func (s *stream) fenceOp(kind opKind, f device.Fence, value uint32) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	fe, err := s.fence(opNames[kind], f)
	if err != nil {
		return err
	}
	s.enqueue(&op{kind: kind, fence: fe, value: value})
	return nil
}

// fence checks that the stream and f can be used.
func (s *stream) fence(op string, f device.Fence) (*fence, error) {
	if err := s.usable(op); err != nil {
		return nil, err
	}
	fe, ok := f.(*fence)
	if !ok || fe.m != s.m {
		return nil, &device.Error{Op: op, Space: s.sp.id, Detail: s.String() + ": the fence is not of this machine"}
	}
	if fe.closed {
		return nil, &device.Error{Op: op, Space: s.sp.id, Detail: fe.String(), Err: device.ErrClosed}
	}
	return fe, nil
}

// Synchronize implements device.Stream.
func (s *stream) Synchronize(ctx context.Context) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.drain(ctx, "synchronize"); err != nil {
		return err
	}
	return s.detect()
}

// Recover implements device.Stream.
func (s *stream) Recover(ctx context.Context) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.drain(ctx, "recover"); err != nil {
		return err
	}
	err := s.detect()
	s.err, s.undefined, s.detected = nil, nil, nil
	return err
}

// detect returns the error that the host learns of when it synchronizes with the stream.
func (s *stream) detect() error {
	s.detected = s.undefined
	return cmp.Or(s.failed(), s.detected)
}

// waited takes the result of a wait for an event or a fence, and returns the stream's error.
func (s *stream) waited(err error) error {
	if _, gpu := s.sp.id.GPU(); err == nil || !gpu || !s.m.o.LikeCUDA {
		s.err = err
		return err
	}
	s.undefined, s.m.undefined = cmp.Or(s.undefined, err), true
	return nil
}

// drain waits for all enqueued operations. The lock is held.
func (s *stream) drain(ctx context.Context, op string) error {
	m := s.m
	m.calls++
	if s.stop || m.closed {
		return &device.Error{Op: op, Space: s.sp.id, Detail: s.String(), Err: device.ErrClosed}
	}
	if s.done < s.enqueued {
		w := &waiter{ready: make(chan struct{}, 1), stream: s, pos: s.enqueued}
		s.waiters = append(s.waiters, w)
		if err := m.wait(ctx, w); err != nil {
			s.waiters = without(s.waiters, w)
			return err
		}
	}
	if m.check != nil {
		m.check.caller().join(s.actor.snapshot())
	}
	return nil
}

// Close implements device.Stream. It does not return the stream's error.
func (s *stream) Close() error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.closing || m.closed {
		return &device.Error{Op: "close", Space: s.sp.id, Detail: s.String(), Err: device.ErrClosed}
	}
	s.closing = true
	if err := s.drain(context.Background(), "close"); err != nil {
		s.closing = false
		return err
	}
	s.stop = true
	s.unwatch()
	s.wake()
	m.streams = slices.DeleteFunc(m.streams, func(t *stream) bool { return t == s })
	if m.check != nil {
		m.check.dropActor(s.actor)
	}
	m.called()
	m.mu.Unlock()
	<-s.exited
	m.mu.Lock()
	return nil
}

// pending reports whether any operation is queued or running.
func (s *stream) pending() bool { return s.done < s.enqueued }

// held reports whether a fault stalls the stream's next copy.
func (s *stream) held() bool {
	if s.stalled != nil && (s.stalled.released || s.failed() != nil) {
		s.stalled = nil
	}
	return s.stalled != nil
}

// runnable reports whether the stream's next operation can start.
func (m *Machine) runnable(s *stream) bool {
	return !s.busy && s.q.n > 0 && !s.held() && m.ready(s, s.q.head())
}

// ready reports whether nothing blocks o. Nothing blocks a stream in error: it skips o and
// propagates the error to its waiters.
func (m *Machine) ready(s *stream, o *op) bool {
	switch {
	case s.failed() != nil || o.dropped != nil:
		return true
	case o.kind == opWait:
		return o.rec.passed
	case o.kind == opAwait:
		return o.fence.reached(o.value)
	}
	return true
}

// loop runs the stream on the wall clock.
func (s *stream) loop() {
	m := s.m
	defer m.loops.Done()
	defer close(s.exited)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.check != nil {
		s.goroutine = goroutine()
	}
	for {
		for !m.aborting && !m.runnable(s) {
			if s.stop {
				return
			}
			s.park()
		}
		if m.aborting {
			return
		}
		if !m.begin(s) {
			continue
		}
		over, err := m.admit(s)
		if !over && err == nil {
			err = m.execute(s)
		}
		m.complete(s, err)
	}
}

// park sleeps until wake, subscribed to the event or fence that the next operation waits
// for.
func (s *stream) park() {
	if s.q.n > 0 && s.subscribed != s.done+1 {
		switch o := s.q.head(); o.kind {
		case opWait:
			o.rec.blocked = append(o.rec.blocked, s)
			s.subscribed = s.done + 1
		case opAwait:
			o.fence.blocked = append(o.fence.blocked, blocked{s, o.value})
			s.subscribed = s.done + 1
		}
	}
	s.settled()
	s.parked = true
	for s.parked {
		s.cond.Wait()
	}
}

// settled signals Machine.settle that the stream cannot continue by itself.
func (s *stream) settled() {
	for _, w := range s.settlers {
		w.fire(nil)
	}
	s.settlers = s.settlers[:0]
}

// begin takes the next operation off the queue; it returns false if a fault stalls the
// operation.
func (m *Machine) begin(s *stream) bool {
	o := s.q.head()
	if len(m.faults) > 0 && o.kind == opCopy && !o.seen && s.failed() == nil {
		o.seen = true
		if f := m.faultIn(o, StallCopy, s); f != nil {
			if f.For == 0 {
				s.stalled = f
				return false
			}
			o.stallTime = f.For
		}
	}
	s.cur, s.busy = s.q.pop(), true
	s.cur.start = m.clock()
	return true
}

func (p part) point(kind FaultKind, s *stream) Point {
	return Point{
		Kind: kind, Space: s.sp.id, Label: p.dstMem.label, Stream: s.name, Src: p.src, Dst: p.dst,
		From: p.srcMem.space.id, To: p.dstMem.space.id, Bytes: p.dst.Bytes,
	}
}

// admit completes the current operation if it takes no time or if the stream is in error
// and skips it; then over is true. Otherwise the operation is still to be executed, unless
// err is set: then it fails.
func (m *Machine) admit(s *stream) (over bool, err error) {
	o := s.cur
	if m.check != nil {
		s.actor.join(o.clock)
	}
	failed := cmp.Or(s.failed(), o.dropped)
	switch o.kind {
	case opRecord:
		m.pass(o.rec, cmp.Or(failed, s.undefined))
		return true, failed
	case opRaise:
		return true, m.raiseFrom(s, o, failed)
	}
	if failed != nil || o.failure != nil {
		if o.kind == opWork && o.work.Failed != nil {
			m.notifyWork(s, o.work.Failed, cmp.Or(o.failure, failed))
		}
		return true, failed
	}
	switch o.kind {
	case opWait:
		if m.check != nil {
			s.actor.join(o.rec.clock)
		}
		return true, s.waited(o.rec.err)
	case opAwait:
		if m.check != nil {
			s.actor.join(o.fence.clockAt(o.value))
		}
		return true, s.waited(o.fence.failure(o.value))
	case opCopy:
		return false, m.copyError(s, o)
	}
	return false, nil
}

// copyError returns the error for which the copy fails before it starts, or nil.
func (m *Machine) copyError(s *stream, o *op) error {
	from, to := o.srcMem.space, o.dstMem.space
	for _, sp := range [...]*space{from, to} {
		if sp.lost {
			return sp.lostErr("copy", fmt.Sprintf("%s: %d bytes from %s to %s", s, o.bytes, from.id, to.id))
		}
	}
	if m.down(from.id, to.id) {
		return s.downErr(o)
	}
	if len(m.faults) == 0 {
		return nil
	}
	if f := m.faultIn(o, FailCopy, s); f != nil {
		return &device.Error{
			Op: "copy", Space: s.sp.id, Err: f.cause(device.ErrCopyFailed),
			Detail: fmt.Sprintf("%s: %d bytes from %s to %s; failed by fault injection", s, o.bytes, from.id, to.id),
		}
	}
	return nil
}

// execute runs a copy or Work on the wall clock; on a paced machine it takes at least the
// modeled time.
func (m *Machine) execute(s *stream) error {
	o := s.cur
	var fl *flow
	if m.o.Pace {
		fl = m.flow(s, o)
	}
	switch {
	case fl != nil:
		m.fluid.advance(m.clock(), ended)
		m.fluid.add(fl)
	case o.stallTime > 0:
		m.mu.Unlock()
		time.Sleep(o.stallTime)
		m.mu.Lock()
	}
	err := m.effect(s)
	if fl != nil {
		m.pace(fl)
	}
	return err
}

// effect moves the bytes or runs the Work. The lock is released meanwhile.
func (m *Machine) effect(s *stream) error {
	o := s.cur
	if o.kind == opCopy {
		if m.check != nil {
			m.check.copy(s, o)
		}
		if !m.o.NoData {
			m.mu.Unlock()
			for i := range o.parts() {
				o.part(i).move()
			}
			m.mu.Lock()
		}
		return m.copyErrorAfter(s, o)
	}
	if m.check != nil {
		m.check.work(s, o)
	}
	w := &o.work
	if w.Run == nil || m.o.NoData && !w.Host {
		return nil
	}
	if m.check != nil {
		defer m.check.enter(s, w.Host)()
	}
	s.access.lost = nil
	err := m.unlocked(w.Run, &s.access)
	if lost := s.access.lost; lost != nil {
		return lost.lostErr("launch", fmt.Sprintf("%q on %s reads its memory", w.Name, s))
	}
	if err != nil {
		return &device.Error{Op: "launch", Space: s.sp.id, Detail: fmt.Sprintf("%q on %s", w.Name, s), Err: err}
	}
	if s.sp.lost {
		return s.sp.lostErr("launch", fmt.Sprintf("%q on %s", w.Name, s))
	}
	return nil
}

// notifyWork calls Failed of skipped Work. The lock is released meanwhile.
func (m *Machine) notifyWork(s *stream, failed func(error), err error) {
	if m.check != nil {
		defer m.check.enter(s, true)()
	}
	_ = m.unlocked(func(device.Access) error { failed(err); return nil }, &s.access)
}

// downErr is the error of a copy over a link that is down.
func (s *stream) downErr(o *op) error {
	return &device.Error{
		Op: "copy", Space: s.sp.id, Err: device.ErrCopyFailed,
		Detail: fmt.Sprintf("%s: %d bytes from %s to %s; the link is down", s, o.bytes, o.srcMem.space.id, o.dstMem.space.id),
	}
}

// copyErrorAfter returns an error if the source's or destination's GPU was lost, or the link went
// down, during the copy.
func (m *Machine) copyErrorAfter(s *stream, o *op) error {
	for _, sp := range [...]*space{o.srcMem.space, o.dstMem.space} {
		if sp.lost {
			return sp.lostErr("copy", fmt.Sprintf("%s: %d bytes", s, o.bytes))
		}
	}
	if m.down(o.srcMem.space.id, o.dstMem.space.id) {
		return s.downErr(o)
	}
	return nil
}

// unlocked calls run with the lock released, and reacquires it even if run panics or ends
// its goroutine.
func (m *Machine) unlocked(run func(device.Access) error, a device.Access) error {
	m.mu.Unlock()
	defer m.mu.Lock()
	return run(a)
}

// complete ends the current operation with err.
func (m *Machine) complete(s *stream, err error) {
	o := s.cur
	if err != nil && s.err == nil && (o.kind == opCopy || o.kind == opWork || o.kind == opRaise) {
		s.err = err
	}
	m.unref(o)
	if o.batch != nil {
		s.batches = append(s.batches, o.batch[:0])
	}
	if m.o.Trace != nil {
		start, end := o.start, m.clock()
		if o.kind == opWait || o.kind == opAwait { // which begin, to the stream, once they are over
			start = max(s.ended, o.queued)
		}
		s.ended = end
		m.o.Trace(Trace{
			Stream: s.name, Space: s.sp.id, Op: opNames[o.kind], Name: o.work.Name, Bytes: o.bytes,
			Host: o.work.Host, Note: o.note, Start: start, End: end, Err: err,
		})
	}
	*o = op{}
	s.busy = false
	s.done++
	if len(s.waiters) > 0 {
		m.releaseWaiters(s)
	}
}

// unref releases the references that a queued operation holds.
func (m *Machine) unref(o *op) {
	switch o.kind {
	case opCopy:
		for i := range o.parts() {
			p := o.part(i)
			p.dstMem.users--
			p.srcMem.users--
		}
	case opWork:
		for _, mem := range o.used {
			mem.users--
		}
	case opWait:
		o.rec.refs--
	}
}

// drop discards an operation that was still queued when the machine was closed.
func (m *Machine) drop(s *stream, o *op) {
	err := &device.Error{Op: opNames[o.kind], Space: s.sp.id, Detail: s.String(), Err: device.ErrClosed}
	switch o.kind {
	case opRecord:
		m.pass(o.rec, err)
	case opRaise:
		o.fence.fail(o.value, err, nil)
	}
	m.unref(o)
	s.done++
}

// releaseWaiters ends the waits whose position the stream has reached.
func (m *Machine) releaseWaiters(s *stream) {
	s.waiters = slices.DeleteFunc(s.waiters, func(w *waiter) bool {
		if s.done < w.pos {
			return false
		}
		w.fire(nil)
		return true
	})
}

// access is the device.Access of the Work that a stream runs.
type access struct {
	s *stream
	// deed is the record of the running Work, written the cell that its writes leave, on a
	// checked machine.
	deed    *accessRecord
	written *cell
	// lost is a lost GPU whose memory the running Work has accessed; nil: none.
	lost *space
}

// Read implements device.Access.
func (a *access) Read(r device.Range) { a.declare(r, false) }

// Write implements device.Access.
func (a *access) Write(r device.Range) { a.declare(r, true) }

func (a *access) declare(r device.Range, write bool) {
	m := a.s.m
	if m.check == nil && !m.anyLost.Load() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if mem := m.memory.find(r); mem != nil && mem.space.lost {
		a.lost = mem.space
	}
	if m.check != nil {
		m.check.declared(a.s, r, write)
	}
}
