package device

import (
	"errors"
	"fmt"
	"slices"
)

// Causes that callers decide on; an *Error wraps one of them where it fits.
var (
	// ErrOutOfMemory: the space has not enough free bytes.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrNotRecorded: an event was awaited that no stream has recorded.
	ErrNotRecorded = errors.New("event was never recorded; use a fence for what is not enqueued yet")
	// ErrCopyFailed: one copy failed; its source may be excluded and the work done
	// again.
	ErrCopyFailed = errors.New("copy failed")
	// ErrLost: the device is gone, with all its memory. Nothing on it can succeed
	// any more.
	ErrLost = errors.New("device lost")
	// ErrClosed: the object was closed or freed before.
	ErrClosed = errors.New("closed")
	// ErrUnreachable: the topology has no path between two spaces.
	ErrUnreachable = errors.New("no path between these memory spaces")
)

// Error is a failure of one operation on one device.
type Error struct {
	// Op is the operation as the contract names it: "alloc", "copy", "launch".
	Op string
	// Space is where it happened.
	Space Space
	// Code and Name are the driver's, where there is one ("CUDA_ERROR_ILLEGAL_ADDRESS").
	Code int
	Name string
	// Detail says what was asked, in words.
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

// LostSpaces are the spaces whose loss err tells of, each once: for every ErrLost in
// its tree that of the *Error nearest around it, whose operation met the loss; those
// further out only passed it on. An ErrLost that no *Error surrounds names no space.
func LostSpaces(err error) []Space {
	var lost []Space
	// walk takes err as any: it looks at one node of the tree, not at what that wraps.
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
