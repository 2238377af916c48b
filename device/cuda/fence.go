//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/moeserve/moeserve/device"
)

// word is a 32-bit counter in pinned memory, alone in its cache line.
type word struct {
	value *atomic.Uint32
	addr  device.Addr
}

const (
	wordBytes = 64
	// slabBytes is for 1,024 words, so that work in progress seldom needs another slab: the driver may
	// allocate pinned memory only once the GPU is idle, and let nobody enqueue work until then, but a
	// stream may be waiting for a fence that such work signals.
	slabBytes = 64 << 10
)

// words allocates counters from pinned pages.
type words struct {
	mu    sync.Mutex
	free  []word
	slabs []unsafe.Pointer
}

func (w *words) grow(g *gpu) error {
	var p unsafe.Pointer
	if c := C.ms_host_alloc(g.context(), slabBytes, &p); c != success {
		return g.fail("fence", int(c), "pinned memory for counters")
	}
	w.slabs = append(w.slabs, p)
	for off := slabBytes - wordBytes; off >= 0; off -= wordBytes {
		at := unsafe.Add(p, off)
		w.free = append(w.free, word{(*atomic.Uint32)(at), device.Addr(uintptr(at))})
	}
	return nil
}

// alloc returns a counter at 0.
func (w *words) alloc(g *gpu) (word, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.free) == 0 {
		if err := w.grow(g); err != nil {
			return word{}, err
		}
	}
	last := len(w.free) - 1
	one := w.free[last]
	w.free = w.free[:last]
	one.value.Store(0)
	return one, nil
}

// release returns a counter to the pool; no stream or host wait may use it any more.
func (w *words) release(one word) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.free = append(w.free, one)
}

// close frees the pages.
func (w *words) close(g *gpu) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.slabs {
		if c := C.ms_host_free(g.context(), p); c != success && g.lost.Load() == nil {
			return g.fail("close", int(c), "pinned memory of counters")
		}
	}
	w.slabs, w.free = nil, nil
	return nil
}

// before reports whether a precedes b, modulo 2^32.
func before(a, b uint32) bool { return int32(a-b) < 0 }

// highWater is the maximum (modulo 2^32) of the values noted so far, if any.
type highWater struct {
	set   bool
	value uint32
}

func (m *highWater) note(v uint32) {
	if !m.set || before(m.value, v) {
		m.set, m.value = true, v
	}
}

// behind reports whether the counter has yet to reach the mark.
func (m *highWater) behind(counter uint32) bool { return m.set && before(counter, m.value) }

// fence is a word that the host and streams signal and wait for.
type fence struct {
	m     *Machine
	label string
	word  word

	mu     sync.Mutex
	closed bool
	last   uint32 // the counter when it was closed; the word may count for another then
	// failed means that every wait for failedAt or less returns err.
	failed   bool
	failedAt uint32
	err      error
	// raises holds, per GPU, the maximum value that its streams were enqueued to
	// signal; awaits is the maximum value that any stream waits for.
	raises []highWater
	awaits highWater
}

var _ device.Fence = (*fence)(nil)

// NewFence implements device.Machine.
func (m *Machine) NewFence(label string) (device.Fence, error) {
	if err := m.usable("fence", device.Host); err != nil {
		return nil, err
	}
	w, err := m.words.alloc(m.anyGPU())
	if err != nil {
		return nil, err
	}
	f := &fence{m: m, label: label, word: w, raises: make([]highWater, len(m.gpus))}
	m.mu.Lock()
	m.fences[f] = struct{}{}
	m.mu.Unlock()
	return f, nil
}

func (f *fence) String() string { return fmt.Sprintf("fence %q", f.label) }

func (f *fence) reached(value uint32) bool { return !before(f.word.value.Load(), value) }

// failure returns the error of a wait for value.
func (f *fence) failure(value uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failureLocked(value)
}

// settled reports whether a stream's wait for value is over, and its error; also of a fence that was
// closed since.
func (f *fence) settled(value uint32) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	// While a wait is outstanding, Close keeps the word from being used for another fence.
	over := f.closed && !before(f.last, value) || f.reached(value)
	return over, f.failureLocked(value)
}

func (f *fence) failureLocked(value uint32) error {
	if f.failed && !before(f.failedAt, value) {
		return f.err
	}
	return nil
}

// set advances the counter to value; a counter at value or beyond is unchanged. f.mu is
// held.
func (f *fence) set(value uint32) {
	was := f.word.value.Load()
	for before(was, value) && !f.word.value.CompareAndSwap(was, value) {
		was = f.word.value.Load()
	}
	if f.failed && !before(was, f.failedAt) && before(f.word.value.Load(), f.failedAt) {
		// The counter advanced by half its range, so failedAt would appear to be ahead of
		// it again: the failure is cleared. A failure that the counter has not reached yet
		// is kept.
		f.failed, f.err = false, nil
	}
}

// condemn makes every wait for value or less return err; the counter is unchanged. f.mu
// is held.
func (f *fence) condemn(value uint32, err error) {
	if !f.failed || before(f.failedAt, value) {
		f.failed, f.failedAt, f.err = true, value, err
	}
}

// raise implements Signal for the host (by is nil) and for a host stream.
func (f *fence) raise(value uint32, by *hostStream) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return closedError("signal", device.Host, f.String())
	}
	if f.reached(value) && f.failureLocked(value) == nil {
		who := "the host"
		if by != nil {
			who = by.String()
		}
		return badArgument("signal", device.Host, "%s signals %s with %d, and it is at %d: values must increase", who, f, value, f.word.value.Load())
	}
	f.set(value)
	return nil
}

// Signal implements device.Fence. Values must increase, but signaling a value that Fail
// has already set is accepted.
func (f *fence) Signal(value uint32) error {
	if f.m.closed.Load() {
		return closedError("signal", device.Host, f.String())
	}
	return f.raise(value, nil)
}

// fail implements Fail for callers inside the package, without its checks.
func (f *fence) fail(value uint32, cause error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return closedError("fail", device.Host, f.String())
	}
	f.condemn(value, cause)
	f.set(value)
	return nil
}

// Fail implements device.Fence. A counter at value or beyond is unchanged.
func (f *fence) Fail(value uint32, cause error) error {
	if f.m.closed.Load() {
		return closedError("fail", device.Host, f.String())
	}
	if cause == nil {
		return badArgument("fail", device.Host, "%s: without an error; use Signal", f)
	}
	return f.fail(value, cause)
}

// orphan fails the values that the lost device g had yet to signal.
func (f *fence) orphan(g *gpu, cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := &f.raises[g.index]; r.behind(f.word.value.Load()) {
		f.condemn(r.value, cause)
		f.set(r.value)
	}
}

// enqueued notes that a stream is about to signal or wait for value, and refuses if the
// fence is closed.
func (f *fence) enqueued(op string, space device.Space, value uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return closedError(op, space, f.String())
	}
	if op == "wait" {
		f.awaits.note(value)
	} else if i, ok := space.GPU(); ok {
		f.raises[i].note(value)
	}
	return nil
}

// Wait implements device.Fence.
func (f *fence) Wait(ctx context.Context, value uint32) error { return f.wait(ctx, value, nil) }

// wait is Wait; helped, if it is not nil, is helped between two looks.
func (f *fence) wait(ctx context.Context, value uint32, helped *hostStream) error {
	f.mu.Lock()
	closed := f.closed
	f.mu.Unlock()
	if closed || f.m.closed.Load() {
		return closedError("wait", device.Host, f.String())
	}
	return f.await(ctx, value, helped)
}

func (f *fence) await(ctx context.Context, value uint32, helped *hostStream) error {
	return f.m.waiting(f.label, func() error {
		if !f.reached(value) {
			what := func() string { return fmt.Sprintf("await %s at %d", f, value) }
			most := longNap
			if helped != nil {
				most = watchNap
			}
			first := time.Now()
			begin := first
			err := f.m.pollFrom(ctx, &begin, most, what, func() (bool, error) {
				if helped != nil && helped.help() {
					begin = dueSoon(first, time.Now())
				}
				return f.reached(value), nil
			})
			if err != nil {
				return err
			}
		}
		return f.failure(value)
	})
}

// Value implements device.Fence.
func (f *fence) Value() uint32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.last
	}
	return f.word.value.Load()
}

// Close implements device.Fence.
func (f *fence) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return closedError("close", device.Host, f.String())
	}
	f.closed = true
	f.m.mu.Lock()
	delete(f.m.fences, f)
	f.m.mu.Unlock()
	now := f.word.value.Load()
	f.last = now
	busy := f.awaits.behind(now)
	for i := range f.raises {
		busy = busy || f.raises[i].behind(now)
	}
	if !busy {
		// A busy word may still be written by a stream; it is freed with its page.
		// ---
		f.m.words.release(f.word)
	}
	return nil
}
