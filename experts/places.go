package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/transfer"
)

// places record where experts live: which are resident, and where their extents lie.
// Swaps change them. The store's lock guards them, except hostRegion, whose result never
// changes.
type places struct {
	size      int64
	gpu, host device.Memory
	// hostOffset and residentOffset are the offsets of each expert's extents,
	// [position][expert]; -1: it has none.
	hostOffset, residentOffset [][]int64
	// spare are resident extents that no expert uses.
	spare []spareExtent
	swaps []*swap
	// lent is memory for more resident experts; lentAt is the place of those that are resident
	// there, [position][expert]. Their layers have more resident experts than the placement says,
	// never fewer, so that the expert cache has slots for the others.
	lent   []*LentPlace
	lentAt [][]*LentPlace
}

// spareExtent is an unused resident extent, with the fence of the copy that fills it.
type spareExtent struct {
	offset int64
	done   device.Point
}

// swap is an offloaded expert that is being copied to a spare resident extent.
type swap struct {
	in, out ID
	to      spareExtent
	ticket  *transfer.Ticket
}

// newPlaces assigns every expert its extents. The caller sets gpu and host to the memory
// that it allocates.
func newPlaces(p *Plan, m device.Machine) (*places, error) {
	s := &places{size: p.Layout.Size}
	var residentBytes, hostBytes int64
	for i := range p.Layers {
		resident, host := slices.Repeat([]int64{-1}, p.Experts), slices.Repeat([]int64{-1}, p.Experts)
		for e := range p.Experts {
			_, offloaded := slices.BinarySearch(p.Placement[i], e)
			if offloaded || p.Dynamic {
				host[e], hostBytes = hostBytes, hostBytes+s.size
			}
			if !offloaded {
				resident[e], residentBytes = residentBytes, residentBytes+s.size
			}
		}
		s.residentOffset, s.hostOffset = append(s.residentOffset, resident), append(s.hostOffset, host)
		s.lentAt = append(s.lentAt, make([]*LentPlace, p.Experts))
	}
	for range p.SpareSlots {
		f, err := m.NewFence("expert swap")
		if err != nil {
			return s, err
		}
		s.spare = append(s.spare, spareExtent{offset: residentBytes, done: device.Point{Fence: f, Value: f.Value()}})
		residentBytes += s.size
	}
	return s, nil
}

// resident reports whether an expert is resident.
func (p *places) resident(id ID) bool { return p.own(id) || p.lentAt[id.Layer][id.Expert] != nil }

// own reports whether an expert is resident in an extent of the store's own.
func (p *places) own(id ID) bool { return p.residentOffset[id.Layer][id.Expert] >= 0 }

func (p *places) residentRegion(id ID) device.Region {
	if x := p.lentAt[id.Layer][id.Expert]; x != nil {
		return x.region
	}
	return p.gpu.Region(p.residentOffset[id.Layer][id.Expert], p.size)
}

// hostRegion is the expert's extent in host memory.
func (p *places) hostRegion(id ID) device.Region {
	return p.host.Region(p.hostOffset[id.Layer][id.Expert], p.size)
}

// loadTarget is where an expert is loaded to: its host copy, if it has one.
func (p *places) loadTarget(layer, expert int) load.Place {
	if at := p.hostOffset[layer][expert]; at >= 0 {
		return load.Place{Memory: p.host, Offset: at}
	}
	return load.Place{Memory: p.gpu, Offset: p.residentOffset[layer][expert]}
}

// swap starts to copy an offloaded expert to a spare extent, to replace a resident one of
// the same layer.
func (p *places) swap(in, out ID, e *transfer.Engine, label fmt.Stringer) error {
	switch {
	case in.Layer != out.Layer || out.Expert < 0 || out.Expert >= len(p.residentOffset[in.Layer]):
		return errors.New("the two experts are of different layers")
	case p.resident(in): // it may have become so since movable checked
		return fmt.Errorf("the first is already resident: %w", ErrBusy)
	case p.lentTo(in) != nil:
		return fmt.Errorf("the first is on its way to lent memory: %w", ErrBusy)
	case p.lentAt[out.Layer][out.Expert] != nil:
		return fmt.Errorf("the second is in lent memory: %w", ErrBusy)
	case !p.own(out):
		return fmt.Errorf("the second is not resident: %w", ErrBusy)
	case len(p.spare) == 0:
		return fmt.Errorf("no spare extent: %w", ErrBusy)
	case slices.ContainsFunc(p.swaps, func(w *swap) bool { return w.in == in || w.out == out }):
		return ErrBusy
	}
	last := len(p.spare) - 1
	w := &swap{in: in, out: out, to: p.spare[last]}
	w.to.done.Value++
	var err error
	w.ticket, err = e.Submit(transfer.Request{
		Src: p.hostRegion(in), Dst: p.gpu.Region(w.to.offset, p.size),
		Priority: transfer.Rebalance, Done: w.to.done, Label: label,
	})
	if err != nil {
		return err
	}
	p.spare = p.spare[:last]
	p.swaps = append(p.swaps, w)
	return nil
}

// completeSwaps makes the swaps effective whose copies have ended, and reports each of
// them, or its failure. No step runs.
func (p *places) completeSwaps(done func(in, out ID, err error)) {
	p.swaps = slices.DeleteFunc(p.swaps, func(w *swap) bool {
		if !w.ticket.Ended() {
			return false
		}
		err := w.ticket.Wait(context.Background()) // does not wait: orders the step after the copy
		if err == nil {
			at := p.residentOffset[w.in.Layer]
			at[w.in.Expert], w.to.offset = w.to.offset, at[w.out.Expert]
			at[w.out.Expert] = -1
		}
		p.spare = append(p.spare, w.to)
		done(w.in, w.out, err)
		return true
	})
}

// close cancels the swaps in progress and frees the memory.
func (p *places) close() error {
	for _, w := range p.swaps {
		w.ticket.Cancel()
		_ = w.ticket.Wait(context.Background()) // a failed copy has ended, too
		p.spare = append(p.spare, w.to)
	}
	errs := p.closePlaces()
	errs = append(errs, free(p.gpu), free(p.host))
	for _, x := range p.spare {
		errs = append(errs, x.done.Fence.Close())
	}
	return errors.Join(errs...)
}

// free frees memory, if there is any.
func free(m device.Memory) error {
	if m == nil {
		return nil
	}
	return m.Free()
}
