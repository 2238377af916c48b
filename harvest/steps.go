package harvest

import (
	"sync/atomic"
	"time"
)

// StepReader reads the memory of any number of a client's handles at once, in steps: by kernels
// that take addresses from a table, say. Where a reference on each handle would cost time for
// each, a step takes one for all of them, which is two atomic operations (epoch-based
// reclamation: Fraser, Practical lock-freedom, 2004, section 5.2.3):
//
//	version := reader.Begin()
//	if version != table.version {
//		… write the table of the handles that are available (Handle.State) …
//	}
//	… work that reads them; the host waits for its end …
//	reader.End()
//
// A handle that was available after Begin, or after an earlier Begin that returned the same
// version, can be read until End. If it is freed or revoked meanwhile, it is drained once the
// step has ended. Later steps see another version, and so delay nothing.
type StepReader struct {
	client string
	owner  *Owner
	clock  *timeline
	// step counts Begins and Ends: it is odd within a step, which began at since.
	step  atomic.Uint64
	since atomic.Int64
	// refused counts the client's handles that were freed or revoked.
	refused atomic.Uint64
}

// stepHold is a step that may read a handle.
type stepHold struct {
	reader *StepReader
	step   uint64
}

// NewStepReader makes a reader of a client's handles, for the lifetime of the runtime. owner
// names it in reports of missed deadlines; nil: unnamed.
func (r *Runtime) NewStepReader(client string, owner *Owner) *StepReader {
	if owner == nil {
		owner = unnamed
	}
	s := &StepReader{client: client, owner: owner, clock: &r.clock}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stepReaders = append(r.stepReaders, s)
	return s
}

// Begin begins a step and returns the version of the client's handles: it changes when one of
// them is freed or revoked. It takes no lock. One goroutine at a time uses the reader.
func (s *StepReader) Begin() (version uint64) {
	s.since.Store(s.clock.at.Load())
	if s.step.Add(1)%2 == 0 {
		panic("harvest: a step began before the one before it ended")
	}
	// Loaded after the step is visible: a handle that is refused later finds the step.
	return s.refused.Load()
}

// Continue reports whether the version that Begin returned still holds, so that within this step the same handles may be read
// once more, from now on until End. A handle that is refused later is drained only then.
func (s *StepReader) Continue(version uint64) bool {
	s.since.Store(s.clock.at.Load())
	return s.refused.Load() == version
}

// End ends the step: nothing of it reads any more, and the host knows.
func (s *StepReader) End() {
	if s.step.Add(1)%2 == 1 {
		panic("harvest: no step to end")
	}
}

// refuse locks new readers of a handle out, and notes the steps that may be reading it. mu is
// held.
func (r *Runtime) refuse(h *Handle) {
	h.readers.refuse()
	for _, s := range r.stepReaders {
		if s.client != h.client {
			continue
		}
		// In this order: a step that begins after the count has the new version.
		s.refused.Add(1)
		if step := s.step.Load(); step%2 == 1 {
			h.readers.inSteps = append(h.readers.inSteps, stepHold{s, step})
		}
	}
}

// running reports whether the step has not ended.
func (h *stepHold) running() bool { return h.reader.step.Load() == h.step }

// hold describes a step that is running.
func (h *stepHold) hold(now time.Duration) Hold {
	return Hold{Owner: h.reader.owner.name, Duration: now - time.Duration(h.reader.since.Load())}
}
