package transfer

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
)

// Priority orders requests of one link: the higher goes first.
type Priority uint8

// The priorities, by what the bytes are for.
const (
	// Rebalance moves what may be used some day.
	Rebalance Priority = iota
	// Prefetch brings what the next layers will use.
	Prefetch
	// KVStore writes KV blocks to a lower tier.
	KVStore
	// KVReload brings back KV blocks that a request waits for.
	KVReload
	// Needed brings what the running layer waits for.
	Needed

	priorities = int(Needed) + 1
)

func (p Priority) String() string {
	if int(p) >= priorities {
		return fmt.Sprintf("priority(%d)", uint8(p))
	}
	return [priorities]string{"rebalance", "prefetch", "kv-store", "kv-reload", "needed"}[p]
}

// Request is one copy.
type Request struct {
	// Src and Dst have the same size, at least one byte, lie in the spaces that they
	// name, and do not overlap. They belong to the engine until Done: Src is not
	// written and Dst not touched.
	Src, Dst device.Region
	Priority Priority
	// After must all be reached before the first byte is written (or read). A point
	// that fails fails the request. The slice is not kept.
	After []device.Point
	// Done is raised when the last byte has landed, and failed where the copy
	// failed. It must be given. Several requests may share a fence only if nobody
	// awaits the value of one that may end after, or is failed by the failure of, one
	// with a higher value.
	Done device.Point
	// Label names the request in errors; it is not asked otherwise. Default: none.
	Label fmt.Stringer
}

// Text is a Label that is known.
type Text string

// String implements fmt.Stringer.
func (t Text) String() string { return string(t) }

// ErrAfter: the copy was not started because one of its After points failed.
var ErrAfter = errors.New("what the copy waits for has failed")

// ErrCanceled: the copy was canceled before it began.
var ErrCanceled = errors.New("copy canceled")
