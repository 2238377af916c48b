//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"context"
	"sync"
	"time"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
)

// event refers to its latest recording: at most one of gpu and host is set.
type event struct {
	m *Machine
	// flags of the driver's events: cu.DisableTiming of an untimed one.
	flags cu.EventFlags

	mu     sync.Mutex
	closed bool
	gpu    *gpuRecording
	host   *hostRecording
	// spare holds, per GPU, a driver event that no recording uses: driver events belong
	// to a context.
	spare []cu.Event

	// word counts the completed recordings on host streams, so that GPU streams can wait
	// for them; generation is the number of the latest recording.
	word       word
	generation uint32
}

// gpuRecording is one recording on a GPU stream. The event's lock guards it. The event's
// next recording reuses it once no host wait refers to it; GPU streams that wait for it
// need no reference, since cuStreamWaitEvent captures the recording.
type gpuRecording struct {
	g      *gpu
	handle cu.Event
	epoch  *epoch
	point  uint64
	// passed and, if timed is set, at are cached results of queries.
	passed, timed bool
	at            time.Duration
	// refs counts the host waits for it; stale means that the event has a newer
	// recording or is closed.
	refs  int
	stale bool
}

// hostRecording is one recording on a host stream. at and err are set before done
// is closed.
type hostRecording struct {
	done       chan struct{}
	at         time.Duration
	err        error
	word       word
	generation uint32
}

func (r *hostRecording) passed() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// pass completes the recording.
func (r *hostRecording) pass(now time.Duration, err error) {
	r.at, r.err = now, err
	close(r.done)
	// A later recording, on another stream, may have completed first.
	for at := r.word.value.Load(); before(at, r.generation) && !r.word.value.CompareAndSwap(at, r.generation); {
		at = r.word.value.Load()
	}
}

var _ device.Event = (*event)(nil)

// NewEvent implements device.Machine.
func (m *Machine) NewEvent() (device.Event, error) { return m.newEvent(cu.DefaultEvent) }

// NewUntimedEvent implements device.Machine.
func (m *Machine) NewUntimedEvent() (device.Event, error) { return m.newEvent(cu.DisableTiming) }

func (m *Machine) newEvent(flags cu.EventFlags) (device.Event, error) {
	if err := m.usable("event", device.Host); err != nil {
		return nil, err
	}
	e := &event{m: m, flags: flags, spare: make([]cu.Event, len(m.gpus))}
	m.mu.Lock()
	m.events[e] = struct{}{}
	m.mu.Unlock()
	return e, nil
}

// event returns the machine's own event behind e.
func (m *Machine) event(op string, space device.Space, e device.Event) (*event, error) {
	ev, ok := e.(*event)
	if !ok || ev.m != m {
		return nil, badArgument(op, space, "the event is not of this machine")
	}
	return ev, nil
}

// open returns an error if the event is closed; its lock is held.
func (e *event) open(op string, space device.Space) error {
	if e.closed {
		return closedError(op, space, "event")
	}
	return nil
}

// recorded returns an error if the event is closed or has no recording; its lock is held.
func (e *event) recorded(op string, space device.Space) error {
	if err := e.open(op, space); err != nil {
		return err
	}
	if e.gpu == nil && e.host == nil {
		return &device.Error{Op: op, Space: space, Detail: "event", Err: device.ErrNotRecorded}
	}
	return nil
}

// recordHost starts a recording on a host stream.
func (e *event) recordHost() (*hostRecording, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.open("record", device.Host); err != nil {
		return nil, err
	}
	if e.word.value == nil {
		w, err := e.m.words.alloc(e.m.anyGPU())
		if err != nil {
			return nil, err
		}
		e.word = w
	}
	e.generation++
	e.host = &hostRecording{done: make(chan struct{}), word: e.word, generation: e.generation}
	e.retire()
	return e.host, nil
}

// recordGPU records the event on a stream at a point; the stream's context is current.
func (e *event) recordGPU(s *Stream, point uint64) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.open("record", s.g.space); err != nil {
		return success, err
	}
	r := e.gpu
	if r == nil || r.g != s.g || r.refs > 0 {
		r = &gpuRecording{g: s.g, handle: e.spare[s.g.index]}
		if r.handle == (cu.Event{}) {
			made, err := cu.MakeEvent(e.flags)
			if err != nil {
				return code(err), err
			}
			r.handle = made
		}
		e.spare[s.g.index] = cu.Event{}
	}
	first := s.begins(recordOperation)
	err := r.handle.Record(s.s)
	if first {
		e.m.endEnqueuing()
	}
	if err != nil {
		if r != e.gpu {
			e.keep(r)
		}
		return code(err), err
	}
	if r != e.gpu {
		e.retire()
	}
	r.epoch, r.point, r.passed, r.timed = s.epoch, point, false, false
	e.gpu, e.host = r, nil
	return success, nil
}

// retire detaches the GPU recording, if any, in favor of a newer recording.
func (e *event) retire() {
	if r := e.gpu; r != nil {
		e.gpu, r.stale = nil, true
		if r.refs == 0 {
			e.keep(r)
		}
	}
}

// keep makes the driver event of an unused recording a spare, or destroys it.
func (e *event) keep(r *gpuRecording) {
	if e.closed || e.spare[r.g.index] != (cu.Event{}) {
		_ = r.g.destroyEvent(&r.handle)
		return
	}
	e.spare[r.g.index] = r.handle
}

// hold and drop bracket a host wait for a recording. For hold, the lock is held.
func (e *event) hold(r *gpuRecording) { r.refs++ }

func (e *event) drop(r *gpuRecording) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.refs--; r.refs == 0 && r.stale {
		e.keep(r)
	}
}

// await waits on the host for a recording that the caller holds, and drops it.
func (e *event) await(ctx context.Context, r *gpuRecording) error {
	const what = "synchronize with an event"
	return e.m.waiting(what, func() error {
		defer e.drop(r)
		return e.m.poll(ctx, longNap, func() string { return what }, func() (bool, error) {
			e.mu.Lock()
			defer e.mu.Unlock()
			return r.query()
		})
	})
}

// query reports whether the recording has completed, and its error. The event's lock is
// held.
func (r *gpuRecording) query() (bool, error) {
	if r.passed {
		return true, r.epoch.at(r.point)
	}
	if r.g.lost.Load() == nil {
		switch c := C.ms_event_query(r.g.context(), eventHandle(&r.handle)); c {
		case success:
			r.passed = true
			return true, r.epoch.at(r.point)
		case notReady:
			return false, nil
		default:
			return true, r.g.fail("query", int(c), "event")
		}
	}
	return true, r.g.lostError("query", "event")
}

// query reports the same for the latest recording; the lock is held.
func (e *event) query() (bool, error) {
	if e.host != nil {
		return e.host.passed(), e.host.failure()
	}
	return e.gpu.query()
}

// failure returns the error of a completed recording, nil while it is pending.
func (r *hostRecording) failure() error {
	if r.passed() {
		return r.err
	}
	return nil
}

// Query implements device.Event.
func (e *event) Query() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.recorded("query", device.Host); err != nil {
		return false, err
	}
	return e.query()
}

// Synchronize implements device.Event.
func (e *event) Synchronize(ctx context.Context) error {
	e.mu.Lock()
	err := e.recorded("synchronize", device.Host)
	host, r := e.host, e.gpu
	if err == nil && r != nil {
		e.hold(r)
	}
	e.mu.Unlock()
	switch {
	case err != nil:
		return err
	case host != nil:
		return e.m.awaitHost(ctx, host)
	}
	return e.await(ctx, r)
}

// awaitHost waits on the host for a recording of a host stream.
func (m *Machine) awaitHost(ctx context.Context, r *hostRecording) error {
	select {
	case <-r.done:
		return r.err
	default:
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmtWait("synchronize with an event", ctx)
	case <-m.aborted:
		return closedError("synchronize", device.Host, "the machine")
	}
}

// Time implements device.Event.
func (e *event) Time() (time.Duration, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.recorded("time", device.Host); err != nil {
		return 0, err
	}
	over, err := e.query()
	switch {
	case e.flags == cu.DisableTiming:
		return 0, badArgument("time", device.Host, "the event is an untimed one")
	case !over:
		return 0, badArgument("time", device.Host, "the event has not passed yet: ask Query or Synchronize first")
	case err != nil:
		return 0, err
	case e.host != nil:
		return e.host.at, nil
	}
	r := e.gpu
	if r.timed {
		return r.at, nil
	}
	err = r.g.enter()
	if err == nil {
		r.at, err = r.g.clock.read(r.g, r.handle)
	}
	r.g.leave()
	if err != nil {
		return 0, r.g.fail("time", code(err), "event")
	}
	r.timed = true
	return r.at, nil
}

// Close implements device.Event.
func (e *event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return closedError("close", device.Host, "event")
	}
	e.m.mu.Lock()
	delete(e.m.events, e)
	e.m.mu.Unlock()
	e.closed = true
	if e.gpu != nil {
		e.gpu.stale = true
	}
	if e.word.value != nil && e.word.value.Load() == e.generation {
		e.m.words.release(e.word)
	}
	for i := range e.spare {
		if err := e.m.gpus[i].destroyEvent(&e.spare[i]); err != nil {
			return err
		}
	}
	if r := e.gpu; r != nil && r.refs == 0 {
		return r.g.destroyEvent(&r.handle)
	}
	return nil
}

// destroyEvent destroys a driver event; it does nothing for the zero value.
// ---
func (g *gpu) destroyEvent(h *cu.Event) error {
	if *h == (cu.Event{}) {
		return nil
	}
	err := g.enter()
	if err == nil {
		err = cu.DestroyEvent(h)
	}
	g.leave()
	*h = cu.Event{}
	if err != nil && g.lost.Load() == nil {
		return g.fail("close", code(err), "event")
	}
	return nil
}
