//go:build cuda

package cuda

import (
	"sync"
	"sync/atomic"
)

// epoch is the known error state of one GPU stream since its creation or last recovery.
// Operations of the stream are numbered from 1; a point of the stream is the number of
// the last operation before it.
//
// A wait may turn out to have failed only after it was enqueued. Such outcomes are kept
// until they are known: an error then applies from the operation that waited.
type epoch struct {
	// failed is true once an error is known.
	failed atomic.Bool

	mu   sync.Mutex
	err  error
	from uint64
	open []outcome

	// taken is scratch space of inherit, used only by the stream's own goroutine.
	taken []outcome
}

// outcome is a wait, for a recording on a host stream or for a fence, whose result may
// not be known yet.
type outcome struct {
	op    uint64
	host  *hostRecording
	fence *fence
	value uint32
}

// known reports whether the wait is over, and its error.
func (o *outcome) known() (bool, error) {
	if o.host != nil {
		if !o.host.passed() {
			return false, nil
		}
		return true, o.host.err
	}
	return o.fence.settled(o.value)
}

// fail notes an error that applies from operation op on.
func (e *epoch) fail(op uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failLocked(op, err)
}

func (e *epoch) failLocked(op uint64, err error) {
	if e.err == nil || op < e.from {
		e.err, e.from = err, op
	}
	e.failed.Store(true)
}

// expect remembers a wait of operation o.op.
func (e *epoch) expect(o outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.open) >= 16 {
		e.settle()
	}
	e.open = append(e.open, o)
}

// settle removes the outcomes that are known and notes their errors. The lock is held.
func (e *epoch) settle() {
	left := e.open[:0]
	for i := range e.open {
		o := &e.open[i]
		over, err := o.known()
		switch {
		case !over:
			left = append(left, *o)
		case err != nil:
			e.failLocked(o.op, err)
		}
	}
	clear(e.open[len(left):])
	e.open = left
}

// at returns the error that applies at a point of the stream, nil if none is known.
func (e *epoch) at(point uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.settle()
	if e.err != nil && e.from <= point {
		return e.err
	}
	return nil
}

// inherit applies to operation op of this stream the error and the unknown outcomes that
// precede a point of another stream.
// ---
func (e *epoch) inherit(op uint64, from *epoch, point uint64) {
	if e == from {
		return
	}
	from.mu.Lock()
	from.settle()
	err := from.err
	if from.from > point {
		err = nil
	}
	e.taken = e.taken[:0]
	for _, o := range from.open {
		if o.op <= point {
			o.op = op
			e.taken = append(e.taken, o)
		}
	}
	from.mu.Unlock()
	if err != nil {
		e.fail(op, err)
	}
	for _, o := range e.taken {
		e.expect(o)
	}
	clear(e.taken)
}
