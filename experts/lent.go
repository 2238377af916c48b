package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// LentPlace is lent memory for one more resident expert. The store's lock guards it.
type LentPlace struct {
	region device.Region
	// done is signaled by the latest copy into the place.
	done device.Point
	// expert that is there or, with a ticket, on its way.
	expert   ID
	occupied bool
	ticket   *transfer.Ticket
	// leaving: the expert is no longer resident when the next step begins. removed: nothing
	// may come here any more.
	leaving, removed bool
}

// PlaceState is what is in a LentPlace.
type PlaceState struct {
	// Occupied: Expert is there or, where Moving is set, on its way.
	Occupied, Moving bool
	Expert           ID
}

// AddPlace gives the store memory in the GPU for one more resident expert, until RemovePlace.
// Nothing that was enqueued before reads or writes it.
func (s *Store) AddPlace(r device.Region) (*LentPlace, error) {
	if r.Space != s.o.Space || r.Bytes < s.plan.Layout.Size || uint64(r.Addr)%device.Alignment != 0 {
		return nil, fmt.Errorf("experts: a place of %d bytes at %#x of %s; an expert has %d bytes in %s, at a multiple of %d", r.Bytes, r.Addr, r.Space, s.plan.Layout.Size, s.o.Space, device.Alignment)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSealed(); err != nil {
		return nil, fmt.Errorf("experts: add a place: %w", err)
	}
	f, err := s.o.Machine.NewFence("expert place")
	if err != nil {
		return nil, fmt.Errorf("experts: add a place: %w", err)
	}
	p := &LentPlace{region: r.Slice(0, s.plan.Layout.Size), done: device.Point{Fence: f, Value: f.Value()}}
	s.places.lent = append(s.places.lent, p)
	return p, nil
}

// RemovePlace takes the memory of a place back. The expert in it is offloaded: at once between
// steps, and otherwise when the next one begins. True: the store does not use the memory any
// more, and nothing that was enqueued reads or writes it. False: RemovePlace must be called
// again later; nothing is waited for. After a removal that was begun nothing comes to the place.
func (s *Store) RemovePlace(p *LentPlace) (gone bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false, fmt.Errorf("experts: remove a place: %w", device.ErrClosed)
	}
	i := slices.Index(s.places.lent, p)
	if i < 0 {
		panic("experts: the place was removed")
	}
	p.removed, p.leaving = true, true
	if p.ticket != nil {
		p.ticket.Cancel()
	}
	if !s.steps.running {
		s.places.settle(p, s.steps.onLent)
	}
	if p.occupied {
		return false, nil
	}
	s.places.lent = slices.Delete(s.places.lent, i, i+1)
	return true, p.done.Fence.Close()
}

// PlaceState returns what is in a place.
func (s *Store) PlaceState(p *LentPlace) PlaceState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return PlaceState{Occupied: p.occupied, Moving: p.ticket != nil, Expert: p.expert}
}

// FreePlaces is the number of places to which MakeResident can bring experts.
func (s *Store) FreePlaces() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.places.lent {
		if p.free() {
			n++
		}
	}
	return n
}

// MakeResident starts to copy an offloaded expert to a free place, and returns at once. The
// first BeginStep after its copy makes it resident. ErrBusy: the expert is on its way, or no
// place is free.
func (s *Store) MakeResident(id ID) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: make %s resident: %w", s.plan.name(id), err)
	}
	if err := s.movable(id); err != nil {
		return wrap(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.places.bring(id, s.o.Transfer, migration{&s.plan, id, "make expert resident", " to stay"}); err != nil {
		return wrap(err)
	}
	return nil
}

// Offload ends the residence of an expert in a place, which is then free: at once between
// steps, and otherwise when the next one begins. For any other expert it does nothing.
func (s *Store) Offload(id ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.places.lentTo(id); p != nil && p.ticket == nil {
		if p.leaving = true; !s.steps.running {
			s.places.settle(p, s.steps.onLent)
		}
	}
}

// free reports whether an expert can come to the place.
func (p *LentPlace) free() bool { return !p.occupied && !p.removed }

// lentTo is the place that has an expert, or that it is on its way to.
func (p *places) lentTo(id ID) *LentPlace {
	for _, x := range p.lent {
		if x.occupied && x.expert == id {
			return x
		}
	}
	return nil
}

// bring starts to copy an offloaded expert to a free place. The copy has the priority of what a step
// waits for: where fetches keep the link busy all the time one of lower priority would never end, and
// each expert that has come makes them fewer. The rebalancer limits the rate of these copies.
func (p *places) bring(id ID, e *transfer.Engine, label fmt.Stringer) error {
	i := slices.IndexFunc(p.lent, (*LentPlace).free)
	switch {
	case p.resident(id) || p.lentTo(id) != nil: // it may have become so since movable checked
		return ErrBusy
	case slices.ContainsFunc(p.swaps, func(w *swap) bool { return w.in == id }):
		return ErrBusy
	case i < 0:
		return fmt.Errorf("no place is free: %w", ErrBusy)
	}
	x := p.lent[i]
	x.done.Value++
	ticket, err := e.Submit(transfer.Request{
		Src: p.hostRegion(id), Dst: x.region, Priority: transfer.Demand, Done: x.done, Label: label,
	})
	if err != nil {
		return err
	}
	x.ticket, x.expert, x.occupied = ticket, id, true
	return nil
}

// settleAll does what is due in all places. No step runs.
func (p *places) settleAll(moved func(id ID, resident bool, err error)) {
	for _, x := range p.lent {
		p.settle(x, moved)
	}
}

// settle makes the expert resident whose copy to the place has ended, and the one offloaded that
// leaves, and reports it. No step runs.
func (p *places) settle(x *LentPlace, moved func(id ID, resident bool, err error)) {
	if x.ticket != nil {
		if !x.ticket.Ended() {
			return
		}
		err := x.ticket.Wait(context.Background()) // does not wait: orders what follows after the copy
		switch x.ticket = nil; {
		case x.removed:
			x.occupied, x.leaving = false, false
			return
		case err != nil:
			x.occupied = false
			moved(x.expert, false, err)
			return
		}
		p.lentAt[x.expert.Layer][x.expert.Expert] = x
		moved(x.expert, true, nil)
	}
	if x.leaving && x.occupied {
		p.lentAt[x.expert.Layer][x.expert.Expert] = nil
		x.occupied = false
		moved(x.expert, false, nil)
	}
	x.leaving = false
}

// closePlaces cancels copies to places, and waits for them.
func (p *places) closePlaces() (errs []error) {
	for _, x := range p.lent {
		if x.ticket != nil {
			x.ticket.Cancel()
			_ = x.ticket.Wait(context.Background()) // a failed copy has ended, too
		}
		errs = append(errs, x.done.Fence.Close())
	}
	p.lent = nil
	return errs
}

// onLent updates the layer after an expert in a place has become resident, or is no longer.
func (s *steps) onLent(id ID, resident bool, err error) {
	switch {
	case errors.Is(err, transfer.ErrCanceled):
		return
	case err != nil:
		s.log.Warn("expert not made resident", "expert", s.plan.name(id), "err", err)
		return
	case resident:
		s.counts.MadeResident++
		s.counts.MigratedBytes += s.plan.Layout.Size
	default:
		s.counts.Offloaded++
	}
	s.changed(id)
	s.lent(LentInfo{Layer: s.plan.Layers[id.Layer], Expert: id.Expert, Resident: resident})
}

// changed updates an expert's layer, which is not open, after the expert has become resident, or
// is no longer.
func (s *steps) changed(id ID) {
	s.tables.rows[id.Layer].stale, s.inPlace.valid = true, false
	if ref := &s.layers[id.Layer].refs[id.Expert]; ref.Held() { // prefetched for the step that begins
		ref.Release()
	}
	s.listAll(id.Layer)
}
