package tenants

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Occupier is a machine on which memory can be occupied as by another process; negative
// bytes release, and more than is free is refused with device.ErrOutOfMemory. Emulated
// machines implement it.
type Occupier interface {
	Occupy(s device.Space, bytes int64) error
	Usage(s device.Space) (device.Usage, error)
}

// Ask asks for so many bytes of a peer's memory to be free. The answer is memory: Ask does
// not wait for it.
type Ask func(peer device.Space, bytes int64)

// Player replays a trace: it occupies and releases memory as time passes. Where more is to
// be occupied than is free it asks for the memory, and tries again at each Advance until it
// gets all of it, or until the trace changes: as a process does that allocates in one
// piece. Only one goroutine may use it.
type Player struct {
	trace    Trace
	occupier Occupier
	ask      Ask
	next     int
	// held is what is occupied, wanted what the trace says.
	held, wanted map[device.Space]int64
}

// NewPlayer returns a Player at the beginning of the trace. ask may be nil: then memory is
// only tried again.
func NewPlayer(t Trace, on Occupier, ask Ask) *Player {
	if ask == nil {
		ask = func(device.Space, int64) {}
	}
	return &Player{trace: t, occupier: on, ask: ask, held: map[device.Space]int64{}, wanted: map[device.Space]int64{}}
}

// Advance applies all changes due until now, counted from the trace's beginning, and tries
// again what was refused.
func (p *Player) Advance(now time.Duration) error {
	for p.next < len(p.trace) && p.trace[p.next].At <= now {
		s := p.trace[p.next]
		p.wanted[s.Peer] = s.Bytes
		p.next++
	}
	for _, s := range slices.SortedFunc(maps.Keys(p.wanted), cmp.Compare[device.Space]) {
		if err := p.set(s); err != nil {
			return fmt.Errorf("tenants: play a trace: %w", err)
		}
	}
	return nil
}

// Want replaces what the trace says of a peer until its next change there: the bytes that Advance
// occupies.
func (p *Player) Want(s device.Space, bytes int64) { p.wanted[s] = bytes }

// Next returns the time of the next change; false at the trace's end.
func (p *Player) Next() (time.Duration, bool) {
	if p.next == len(p.trace) {
		return 0, false
	}
	return p.trace[p.next].At, true
}

// Waiting reports whether memory was refused that Advance will try again.
func (p *Player) Waiting() bool { return !maps.Equal(p.held, p.wanted) }

// Stop releases all occupied memory.
func (p *Player) Stop() error {
	p.next = len(p.trace)
	var errs []error
	for s := range p.held {
		p.wanted[s] = 0
		errs = append(errs, p.set(s))
	}
	return errors.Join(errs...)
}

// set occupies or releases what the peer's wanted bytes lack.
func (p *Player) set(s device.Space) error {
	u, err := p.occupier.Usage(s)
	if err != nil {
		return err
	}
	// A trace of larger GPUs occupies all of this one.
	p.wanted[s] = min(p.wanted[s], u.Capacity)
	missing := p.wanted[s] - p.held[s]
	if missing != 0 {
		err = p.occupier.Occupy(s, missing)
	}
	switch {
	case errors.Is(err, device.ErrOutOfMemory):
		p.ask(s, missing)
		return nil
	case err != nil:
		return err
	}
	p.held[s] = p.wanted[s]
	return nil
}
