package transfer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Priority orders requests of a link: higher ones go first.
type Priority uint8

// Priorities by purpose. Any value below Priorities may be used.
const (
	// Rebalance is for migrations.
	Rebalance Priority = iota
	// KVStore is for KV blocks that leave the GPU's memory, KVLoad for those that come back
	// into it: nothing but their own sequence waits for them. Requests of either priority
	// share a link.
	KVStore
	KVLoad
	// Prefetch is for data that later layers will use.
	Prefetch
	// Demand is for data that the current layer waits for.
	Demand

	// Priorities is the number of priorities.
	Priorities = dispatch.Classes
)

var priorityNames = [...]string{Rebalance: "migration", KVStore: "kv-store", KVLoad: "kv-load", Prefetch: "prefetch", Demand: "demand"}

func (p Priority) String() string {
	if int(p) < len(priorityNames) {
		return priorityNames[p]
	}
	return fmt.Sprintf("priority(%d)", uint8(p))
}

// Piece is one part of a request. Pieces that are adjacent in both memories are copied as
// one, unless Separate: the piece is in another allocation than the one before it, in
// either memory.
type Piece struct {
	Dst, Src device.Region
	Separate bool
}

// Request is one copy: of one Src to one Dst, or of many Pieces.
type Request struct {
	// Src and Dst have the same size, at least one byte, and do not overlap. They belong
	// to the engine until Done: the caller does not write Src, and does not access Dst.
	Src, Dst device.Region
	// Pieces in place of Src and Dst, all from the same memory to the same other one. Chunks
	// have them in this order. Those of one chunk are copied in any order and at the same time,
	// so the Dst of a piece must not overlap any other range of the request. The slice is not
	// retained.
	Pieces   []Piece
	Priority Priority
	// After are fence values that must be reached before the first byte is read or
	// written. If one fails, the request fails. The slice is not retained. A request whose
	// Done is among them gets at least this one's priority.
	After []device.Point
	// Done is signaled when the last byte has landed, and failed if the copy fails. It is
	// required. Requests may share a fence only if nothing waits for the value of a
	// request that may end after one with a higher value, or that the failure of one with
	// a higher value would fail.
	Done device.Point
	// DoneInOrder: nobody but the engine sets the fence of Done, and of the requests that have it, with
	// this flag or without, each begins only when the one before has ended or its Done is reached. Then
	// the device signals Done itself, behind the last chunk, where it can
	// (device.Capabilities.CopyErrorsLoseDevice) and no relay takes part: what waits on a device goes on
	// some us earlier than if the host does.
	DoneInOrder bool
	// Label names the request in errors and traces. Default: none.
	Label fmt.Stringer
}

// Text is a constant Label.
type Text string

// String implements fmt.Stringer.
func (t Text) String() string { return string(t) }

// ErrAfter: the copy was not started because one of its After points failed.
var ErrAfter = errors.New("a fence that the copy waits for has failed")

// ErrCanceled: the copy was canceled before it began.
var ErrCanceled = errors.New("copy canceled")

// numPieces is the number of pieces of the request, piece returns one of them.
func (r *Request) numPieces() int { return max(1, len(r.Pieces)) }

func (r *Request) piece(i int) Piece {
	if len(r.Pieces) == 0 {
		return Piece{Dst: r.Dst, Src: r.Src}
	}
	return r.Pieces[i]
}

// pair is the request's source and destination memory.
func (r *Request) pair() device.Pair {
	p := r.piece(0)
	return device.Pair{From: p.Src.Space, To: p.Dst.Space}
}

func (r *Request) name() string {
	var bytes int64
	for i := range r.numPieces() {
		bytes += r.piece(i).Src.Bytes
	}
	return name(r.Label, bytes, r.pair())
}

func name(label fmt.Stringer, bytes int64, p device.Pair) string {
	if label == nil {
		return fmt.Sprintf("copy of %d bytes from %s to %s", bytes, p.From, p.To)
	}
	return fmt.Sprintf("%s (%d bytes from %s to %s)", label, bytes, p.From, p.To)
}

func (r *Request) validate(m device.Machine) error {
	switch {
	case len(r.Pieces) > 0 && (r.Src != device.Region{} || r.Dst != device.Region{}):
		return errors.New("the request has both Pieces and Src or Dst")
	case r.Priority >= Priorities:
		return fmt.Errorf("invalid %v", r.Priority)
	case r.Done.None():
		return errors.New("no Done fence is set")
	case slices.ContainsFunc(r.After, device.Point.None):
		return errors.New("an After point has no fence")
	}
	for i := range r.numPieces() {
		p := r.piece(i)
		if err := p.validate(m); err != nil {
			return err
		}
		if pair := r.pair(); p.Src.Space != pair.From || p.Dst.Space != pair.To {
			return fmt.Errorf("a piece goes from %s to %s, the first one from %s to %s", p.Src.Space, p.Dst.Space, pair.From, pair.To)
		}
	}
	return nil
}

func (p Piece) dispatched() dispatch.Piece {
	return dispatch.Piece{Dst: p.Dst.Range, Src: p.Src.Range, Separate: p.Separate}
}

func (p *Piece) validate(m device.Machine) error {
	switch {
	case p.Src.Bytes != p.Dst.Bytes:
		return fmt.Errorf("%d bytes into %d", p.Src.Bytes, p.Dst.Bytes)
	case p.Src.Bytes <= 0:
		return fmt.Errorf("%d bytes: a copy needs at least 1", p.Src.Bytes)
	case p.Src.Addr < p.Dst.End() && p.Dst.Addr < p.Src.End():
		return fmt.Errorf("source %v and destination %v overlap", p.Src, p.Dst)
	}
	if err := checkSpace(m, "source", p.Src); err != nil {
		return err
	}
	return checkSpace(m, "destination", p.Dst)
}

// checkSpace fails if the bytes of a region are not in the space that it names, which
// selects the link.
func checkSpace(m device.Machine, side string, r device.Region) error {
	space, ok := m.SpaceOf(r.Addr)
	switch {
	case !ok:
		return fmt.Errorf("%s %v is not in a live allocation", side, r)
	case space != r.Space:
		return fmt.Errorf("%s %v is on %s", side, r, space)
	}
	return nil
}
