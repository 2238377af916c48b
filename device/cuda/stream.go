//go:build cuda

package cuda

/*
#include <stdlib.h>
#include "glue.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
)

// Stream is an in-order queue of one GPU. Like every device.Stream, only one goroutine
// may use it at a time.
type Stream struct {
	m    *Machine
	g    *gpu
	name string
	s    cu.Stream
	args Args
	// batch holds the arguments of the latest CopyBatch, so that it need not allocate.
	batch batch

	// ops counts the enqueued operations; epoch holds the operation from which on the
	// stream is in error.
	ops       uint64
	epoch     *epoch
	capturing bool
	// begun counts operations by kind, up to beginning.
	begun [operations]uint8
	// overlapping is the number of the latest launch with Grid.Overlap, 0 for none.
	overlapping uint64

	// gone guards closed against Machine.Close.
	gone   sync.Mutex
	closed bool
}

var _ device.Stream = (*Stream)(nil)

// NewStream implements device.Machine. A stream of a GPU is a *Stream, one of the
// host a device.Executor.
func (m *Machine) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	if err := m.usable("stream", space); err != nil {
		return nil, err
	}
	if o.Name == "" {
		o.Name = "stream"
	}
	if space == device.Host {
		return m.newHostStream(o)
	}
	return m.newStream(space, o)
}

func (m *Machine) newStream(space device.Space, o device.StreamOptions) (*Stream, error) {
	i, _ := space.GPU()
	s, err := m.newSide(m.gpus[i], o)
	if err != nil {
		return nil, err
	}
	if s.args.block = C.ms_arguments_new(); s.args.block == nil {
		return nil, errors.Join(badArgument("stream", space, "no memory for the arguments of launches"), s.destroy())
	}
	m.mu.Lock()
	closed := m.closed.Load()
	if !closed {
		m.streams[s] = struct{}{}
	}
	m.mu.Unlock()
	if closed {
		return nil, errors.Join(closedError("stream", space, "the machine"), s.destroy())
	}
	return s, nil
}

// newSide creates a stream that is not registered with the machine and has no argument
// block. The caller destroys it.
func (m *Machine) newSide(g *gpu, o device.StreamOptions) (*Stream, error) {
	s := &Stream{m: m, g: g, name: o.Name, epoch: &epoch{}}
	err := g.enter()
	if err == nil {
		var least, greatest int
		if least, greatest, err = cu.StreamPriorityRange(); err == nil {
			// In CUDA a lower number is a higher priority.
			s.s, err = cu.MakeStreamWithPriority(min(max(-o.Priority, greatest), least), cu.NonBlocking)
		}
	}
	g.leave()
	if err != nil {
		return nil, g.fail("stream", code(err), fmt.Sprintf("%q", o.Name))
	}
	return s, nil
}

// Name implements device.Stream.
func (s *Stream) Name() string { return s.name }

// Space implements device.Stream.
func (s *Stream) Space() device.Space { return s.g.space }

func (s *Stream) String() string { return fmt.Sprintf("stream %q (%s)", s.name, s.g.space) }

// usable returns an error if no operation can be enqueued.
func (s *Stream) usable(op string) error {
	if s.closed || s.m.closed.Load() {
		return closedError(op, s.g.space, s.String())
	}
	if e := s.g.lostError(op, ""); e != nil {
		return e
	}
	return nil
}

// captures returns an error during a capture, for operations that cannot be part of a
// graph.
func (s *Stream) captures(op string) error {
	if s.capturing {
		return badArgument(op, s.g.space, "%s: not inside of Capture, which takes launches and copies", s)
	}
	return nil
}

// next numbers the next operation. dropped reports that the stream is in error, so the
// operation must be dropped.
func (s *Stream) next() (op uint64, dropped bool) {
	s.ops++
	return s.ops, s.epoch.failed.Load()
}

// refused puts the stream into error after the driver refused operation op.
func (s *Stream) refused(op uint64, what string, c int, detail string) error {
	if detail != "" {
		detail = ": " + detail
	}
	e := s.g.fail(what, c, s.String()+detail)
	s.epoch.fail(op, e)
	return e
}

// Copy implements device.Stream.
func (s *Stream) Copy(dst, src device.Range) error {
	if err := s.usable("copy"); err != nil {
		return err
	}
	to, from, err := s.m.copyable(s, dst, src)
	if err != nil || dst.Bytes == 0 {
		return err
	}
	if to.g == nil && from.g == nil {
		if err := s.captures("copy within host memory"); err != nil {
			return err
		}
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if c := s.copy(to, from, dst, src); c != success {
		return s.refused(op, "copy", c, fmt.Sprintf("%d bytes from %s to %s", dst.Bytes, from.space, to.space))
	}
	return nil
}

func (s *Stream) copy(to, from *memory, dst, src device.Range) int {
	o := copyOperation(to, from)
	if o == copyOnHostOperation {
		if s.begins(o) {
			defer s.m.endEnqueuing()
		}
		return int(C.ms_host_copy(s.g.context(), streamHandle(s.s), C.uint64_t(dst.Addr), C.uint64_t(src.Addr), C.size_t(dst.Bytes)))
	}
	return s.enqueue(o, func() error {
		// Unified addressing identifies both memories, which are mapped for all peers.
		return cu.MemcpyAsync(cu.DevicePtr(dst.Addr), cu.DevicePtr(src.Addr), dst.Bytes, s.s)
	})
}

// enqueue gives the driver an operation, with the GPU's context current.
func (s *Stream) enqueue(o operation, call func() error) int {
	if s.begins(o) {
		defer s.m.endEnqueuing()
	}
	err := s.g.enter()
	if err == nil {
		err = call()
	}
	s.g.leave()
	return code(err)
}

// copyable checks the arguments of a copy and returns its allocations; both are nil for a
// copy of 0 bytes.
func (m *Machine) copyable(s device.Stream, dst, src device.Range) (to, from *memory, err error) {
	if dst.Bytes != src.Bytes {
		return nil, nil, badArgument("copy", s.Space(), "%v: destination has %d bytes and source %d", s, dst.Bytes, src.Bytes)
	}
	if dst.Bytes == 0 {
		return nil, nil, nil
	}
	to, from = m.memory.find(dst), m.memory.find(src)
	if to == nil || from == nil {
		r, side := dst, "destination"
		if to != nil {
			r, side = src, "source"
		}
		return nil, nil, badArgument("copy", s.Space(), "%v: %s %v is not in one live allocation: it was freed, or is too long", s, side, r)
	}
	if dst.Addr < src.End() && src.Addr < dst.End() {
		return nil, nil, badArgument("copy", s.Space(), "%v: source %v and destination %v overlap", s, src, dst)
	}
	for _, g := range [...]*gpu{from.g, to.g} {
		if g == nil || g.lost.Load() == nil {
			continue
		}
		return nil, nil, g.lostError("copy", fmt.Sprintf("%v: %d bytes from %s to %s", s, dst.Bytes, from.space, to.space))
	}
	if from.space != to.space {
		if _, ok := m.topo.Paths[device.Pair{From: from.space, To: to.space}]; !ok {
			_, err := m.topo.Path(from.space, to.space)
			return nil, nil, &device.Error{Op: "copy", Space: s.Space(), Detail: fmt.Sprint(s), Err: err}
		}
	}
	return to, from, nil
}

// Record implements device.Stream.
func (s *Stream) Record(e device.Event) error {
	if err := s.usable("record"); err != nil {
		return err
	}
	if err := s.captures("record"); err != nil {
		return err
	}
	ev, err := s.m.event("record", s.g.space, e)
	if err != nil {
		return err
	}
	// The event is recorded even if the stream is in error: earlier operations may still
	// be running.
	op, _ := s.next()
	c := success
	if err = s.g.enter(); err != nil {
		c = code(err)
	} else {
		c, err = ev.recordGPU(s, op)
	}
	s.g.leave()
	if c != success {
		return s.refused(op, "record", c, "")
	}
	return err
}

// Wait implements device.Stream.
func (s *Stream) Wait(e device.Event) error {
	if err := s.usable("wait"); err != nil {
		return err
	}
	if err := s.captures("wait"); err != nil {
		return err
	}
	ev, err := s.m.event("wait", s.g.space, e)
	if err != nil {
		return err
	}
	ev.mu.Lock()
	defer ev.mu.Unlock()
	if err := ev.recorded("wait", s.g.space); err != nil {
		return err
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	c := success
	if r := ev.host; r != nil {
		if r.passed() {
			if r.err != nil {
				s.epoch.fail(op, r.err)
			}
			return nil
		}
		s.epoch.expect(outcome{op: op, host: r})
		c = s.await(r.word, r.generation)
	} else {
		r := ev.gpu
		if r.g.lost.Load() != nil {
			s.epoch.fail(op, r.g.lostError("wait", s.String()))
			return nil
		}
		s.epoch.inherit(op, r.epoch, r.point)
		c = s.enqueue(awaitEventOperation, func() error { return s.s.Wait(r.handle, 0) })
	}
	if c != success {
		return s.refused(op, "wait", c, "")
	}
	return nil
}

// await enqueues a wait for a word to reach value.
func (s *Stream) await(w word, value uint32) int {
	return s.enqueue(awaitOperation, func() error {
		return s.s.WaitOnValue32(cu.DevicePtr(w.addr), value, C.CU_STREAM_WAIT_VALUE_GEQ)
	})
}

// SignalFence implements device.Stream.
func (s *Stream) SignalFence(f device.Fence, value uint32) error {
	fe, err := s.fence("signal", f)
	if err != nil {
		return err
	}
	if err := s.usable("signal"); err != nil {
		if errors.Is(err, device.ErrLost) {
			// The lost stream can no longer signal the fence.
			return errors.Join(err, fe.fail(value, err))
		}
		return err
	}
	if err := fe.enqueued("signal", s.g.space, value); err != nil {
		return err
	}
	op, dropped := s.next()
	if dropped {
		// Waits for value get the stream's error, but the signal still follows the running
		// work. epoch.at may lock fences, this one included, so it is called before fe.mu.
		cause := s.epoch.at(op)
		fe.mu.Lock()
		fe.condemn(value, cause)
		fe.mu.Unlock()
	}
	c := s.enqueue(signalOperation, func() error {
		return s.s.WriteValue32(cu.DevicePtr(fe.word.addr), value, C.CU_STREAM_WRITE_VALUE_DEFAULT)
	})
	if c != success {
		e := s.refused(op, "signal", c, fe.String())
		return errors.Join(e, fe.fail(value, e))
	}
	return nil
}

// WaitFence implements device.Stream.
func (s *Stream) WaitFence(f device.Fence, value uint32) error {
	fe, err := s.fence("wait", f)
	if err != nil {
		return err
	}
	if err := s.usable("wait"); err != nil {
		return err
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if err := fe.enqueued("wait", s.g.space, value); err != nil {
		return err
	}
	s.epoch.expect(outcome{op: op, fence: fe, value: value})
	if c := s.await(fe.word, value); c != success {
		return s.refused(op, "wait", c, fe.String())
	}
	return nil
}

// fence returns f as a fence of this machine; it refuses during a capture.
func (s *Stream) fence(op string, f device.Fence) (*fence, error) {
	if err := s.captures(op); err != nil {
		return nil, err
	}
	return s.m.fence(op, s.g.space, f)
}

func (m *Machine) fence(op string, space device.Space, f device.Fence) (*fence, error) {
	fe, ok := f.(*fence)
	if !ok || fe.m != m {
		return nil, badArgument(op, space, "the fence is not of this machine")
	}
	return fe, nil
}

// idle reports whether the stream has no work.
func (s *Stream) idle() (bool, error) {
	if s.g.lost.Load() != nil {
		return true, s.g.lostError("synchronize", s.String())
	}
	switch c := C.ms_stream_query(s.g.context(), streamHandle(s.s)); c {
	case success:
		return true, nil
	case notReady:
		return false, nil
	default:
		return true, s.g.fail("synchronize", int(c), s.String())
	}
}

// drain waits until everything enqueued has completed; its error is that of the wait, not
// of the stream.
func (s *Stream) drain(ctx context.Context, op string) error {
	if s.closed || s.m.closed.Load() {
		return closedError(op, s.g.space, s.String())
	}
	if err := s.captures(op); err != nil {
		return err
	}
	return s.m.waiting(s.name, func() error {
		if done, err := s.idle(); done {
			return err
		}
		return s.m.poll(ctx, longNap, func() string { return op + " " + s.String() }, s.idle)
	})
}

// Synchronize implements device.Stream.
func (s *Stream) Synchronize(ctx context.Context) error {
	if err := s.drain(ctx, "synchronize"); err != nil {
		return err
	}
	return s.epoch.at(s.ops)
}

// Recover implements device.Stream.
func (s *Stream) Recover(ctx context.Context) error {
	if err := s.drain(ctx, "recover"); err != nil {
		return err
	}
	err := s.epoch.at(s.ops)
	s.epoch = &epoch{}
	return err
}

// Close implements device.Stream. It does not return the error the stream is in.
func (s *Stream) Close() error {
	if err := s.drain(context.Background(), "close"); err != nil && !errors.Is(err, device.ErrLost) {
		return err
	}
	s.m.mu.Lock()
	delete(s.m.streams, s)
	s.m.mu.Unlock()
	return s.destroy()
}

// destroy releases the stream; further calls do nothing.
// ---
func (s *Stream) destroy() error {
	s.gone.Lock()
	defer s.gone.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	C.free(unsafe.Pointer(s.args.block))
	s.args.block = nil
	err := s.g.enter()
	if err == nil {
		err = s.s.Destroy()
	}
	s.g.leave()
	if err != nil && s.g.lost.Load() == nil {
		return s.g.fail("close", code(err), s.String())
	}
	return nil
}
