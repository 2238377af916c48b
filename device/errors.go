package device

import (
	"errors"
	"fmt"
	"slices"
)

// Causes that callers decide on; an *Error wraps one of them if it applies.
var (
	// ErrOutOfMemory: the space has too little free memory.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrNotRecorded: wait for an event that no stream has recorded.
	ErrNotRecorded = errors.New("event was never recorded; use a fence for what is not enqueued yet")
	// ErrCopyFailed: one copy failed; the caller may exclude its source and retry.
	ErrCopyFailed = errors.New("copy failed")
	// ErrNoBatches: the machine has no batched copies; use Copy for each.
	ErrNoBatches = errors.New("no batched copies")
	// ErrLost: the device is lost, with all its memory. Every further operation on it fails.
	ErrLost = errors.New("device lost")
	// ErrClosed: the object was already closed or freed.
	ErrClosed = errors.New("closed")
	// ErrUnreachable: the topology has no path between two spaces.
	ErrUnreachable = errors.New("no path between these memory spaces")
)

// Error is a failure of one operation on one device.
type Error struct {
	// Op is the operation, named as in package device: "alloc", "copy", "launch".
	Op string
	// Space is the space in which it failed.
	Space Space
	// Code and Name are the driver's, if it reported any ("CUDA_ERROR_ILLEGAL_ADDRESS").
	Code int
	Name string
	// Detail describes the arguments.
	Detail string
	// Err is the cause: one of the sentinels, or an error of the work itself.
	Err error
}

func (e *Error) Error() string {
	s := fmt.Sprintf("device: %s on %s", e.Op, e.Space)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Name != "" {
		s += fmt.Sprintf(": %s (%d)", e.Name, e.Code)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// LostSpaces returns the spaces whose loss err reports, each once: for every ErrLost in its
// tree the space of the innermost *Error around it, whose operation found the loss; outer ones
// only passed it on. An ErrLost without an *Error around it names no space.
func LostSpaces(err error) []Space {
	var lost []Space
	// walk takes err as any: errors.As would look at what the node wraps, not only at the node.
	var walk func(err any, nearest *Error)
	walk = func(err any, nearest *Error) {
		if err == any(ErrLost) && nearest != nil && !slices.Contains(lost, nearest.Space) {
			lost = append(lost, nearest.Space)
		}
		switch e := err.(type) {
		case *Error:
			walk(e.Err, e)
		case interface{ Unwrap() error }:
			walk(e.Unwrap(), nearest)
		case interface{ Unwrap() []error }:
			for _, part := range e.Unwrap() {
				walk(part, nearest)
			}
		}
	}
	walk(err, nil)
	return lost
}
