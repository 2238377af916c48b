//go:build cuda

package cuda

import "time"

// Of six streams that begin at once, by a thread each, and wait for each other in turn, a copy stood behind another
// stream's wait once in 5 to 80 times, and would have for ever (H200, driver 580.159; docs/log/two-gpus-2026-11-29.md).
// That was always within the first two turns of a stream, and never where the driver got one operation at a time. So it
// seems that the driver assigns hardware queues to a stream with its first operations, and that two that begin at once may
// get the same. Hence the driver gets the first operations of every kind of all streams one at a time. It does not get all
// of them so: one may block for as long as a queue is full, whose work waits for what another thread has to enqueue.

// operation is a kind of operation of a stream.
type operation int

const (
	copyToGPUOperation operation = iota
	copyToHostOperation
	copyWithinGPUOperation
	copyToPeerOperation
	copyOnHostOperation
	batchOperation
	awaitOperation
	awaitEventOperation
	signalOperation
	recordOperation
	launchOperation
	graphOperation
	operations
)

const (
	// beginning is the number of first operations of a kind.
	beginning = 4
	// beginPatience is how long one waits for another thread's, in case that the driver does not take it.
	beginPatience = 50 * time.Millisecond
)

// copyOperation is the kind of a copy.
func copyOperation(to, from *memory) operation {
	switch {
	case to.g == nil && from.g == nil:
		return copyOnHostOperation
	case from.g == nil:
		return copyToGPUOperation
	case to.g == nil:
		return copyToHostOperation
	case to.g == from.g:
		return copyWithinGPUOperation
	}
	return copyToPeerOperation
}

// begins is called before the driver is given an operation. If it returns true the driver gets no other stream's first
// operations until endEnqueuing, which the caller calls behind it.
func (s *Stream) begins(o operation) bool {
	if s.capturing || s.begun[o] == beginning {
		return false
	}
	s.begun[o]++
	select {
	case s.m.enqueuing <- struct{}{}:
		return true
	default:
	}
	patience := time.NewTimer(beginPatience)
	defer patience.Stop()
	select {
	case s.m.enqueuing <- struct{}{}:
		return true
	case <-patience.C:
		return false
	}
}

func (m *Machine) endEnqueuing() { <-m.enqueuing }
