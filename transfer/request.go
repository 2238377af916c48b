package transfer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Priority orders requests of one link: the higher goes first.
type Priority uint8

// Priorities by what the bytes are for. Any below Priorities may be used.
const (
	// Rebalance moves what may be used some day.
	Rebalance Priority = iota
	// Prefetch brings what the next layers will use.
	Prefetch
	// Demand brings what the running layer waits for.
	Demand

	// Priorities is how many there are.
	Priorities = dispatch.Classes
)

var priorityNames = [...]string{Rebalance: "migration", Prefetch: "prefetch", Demand: "demand"}

func (p Priority) String() string {
	if int(p) < len(priorityNames) {
		return priorityNames[p]
	}
	return fmt.Sprintf("priority(%d)", uint8(p))
}

// Piece is one of the parts that a request copies. Apart says that it is of another
// allocation than the piece before it, on either side: else pieces that adjoin in both
// memories are copied as one.
type Piece struct {
	Dst, Src device.Region
	Apart    bool
}

// Request is one copy: of one Src to one Dst, or of many Pieces.
type Request struct {
	// Src and Dst have the same size, at least one byte, and do not overlap. They
	// belong to the engine until Done: Src is not written and Dst not touched.
	Src, Dst device.Region
	// Pieces in place of Src and Dst, all of them from one memory to one other. They
	// are copied in this order, small ones together in one chunk. The slice is not kept.
	Pieces   []Piece
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

// count is how many pieces the request has, at returns one of them.
func (r *Request) count() int { return max(1, len(r.Pieces)) }

func (r *Request) at(i int) Piece {
	if len(r.Pieces) == 0 {
		return Piece{Dst: r.Dst, Src: r.Src}
	}
	return r.Pieces[i]
}

// pair is where the request goes from and to.
func (r *Request) pair() device.Pair {
	p := r.at(0)
	return device.Pair{From: p.Src.Space, To: p.Dst.Space}
}

func (r *Request) name() string {
	var bytes int64
	for i := range r.count() {
		bytes += r.at(i).Src.Bytes
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
		return errors.New("it has pieces, and a source or destination besides")
	case r.Priority >= Priorities:
		return fmt.Errorf("invalid %v", r.Priority)
	case r.Done.None():
		return errors.New("no Done point, so nobody would learn of its end")
	case slices.ContainsFunc(r.After, device.Point.None):
		return errors.New("an After point without a fence")
	}
	for i := range r.count() {
		p := r.at(i)
		if err := p.validate(m); err != nil {
			return err
		}
		if pair := r.pair(); p.Src.Space != pair.From || p.Dst.Space != pair.To {
			return fmt.Errorf("a piece from %s to %s, and the first is from %s to %s", p.Src.Space, p.Dst.Space, pair.From, pair.To)
		}
	}
	return nil
}

func (p *Piece) validate(m device.Machine) error {
	switch {
	case p.Src.Bytes != p.Dst.Bytes:
		return fmt.Errorf("%d bytes into %d", p.Src.Bytes, p.Dst.Bytes)
	case p.Src.Bytes <= 0:
		return fmt.Errorf("%d bytes; a copy has at least one", p.Src.Bytes)
	case p.Src.Addr < p.Dst.End() && p.Dst.Addr < p.Src.End():
		return fmt.Errorf("source %v and destination %v overlap", p.Src, p.Dst)
	}
	if err := placed(m, "source", p.Src); err != nil {
		return err
	}
	return placed(m, "destination", p.Dst)
}

// placed says whether the bytes of a region are in the space that it names: spaces
// choose the link.
func placed(m device.Machine, side string, r device.Region) error {
	space, ok := m.SpaceOf(r.Addr)
	switch {
	case !ok:
		return fmt.Errorf("%s %v is in no live allocation", side, r)
	case space != r.Space:
		return fmt.Errorf("%s %v is on %s", side, r, space)
	}
	return nil
}
