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

// places say where experts live: which are local, and where their extents lie. Swaps change
// them. The store's lock is held while they are used, but for hostRegion, which never
// changes.
type places struct {
	size      int64
	gpu, host device.Memory
	// hostAt and residentAt are the offsets of each expert's extents, [position][expert], -1
	// where it has none.
	hostAt, residentAt [][]int64
	// spare are local extents that nobody uses.
	spare []spareExtent
	swaps []*swap
}

// spareExtent is a local extent at an offset, with the fence of the copy that brings an
// expert there.
type spareExtent struct {
	at   int64
	done device.Point
}

// swap is an expert on its way to a spare local extent.
type swap struct {
	in, out ID
	to      spareExtent
	ticket  *transfer.Ticket
}

// newPlaces gives every expert its place; the memory is set where the plan has some.
func newPlaces(p *Plan, m device.Machine) (*places, error) {
	s := &places{size: p.Layout.Size}
	var localBytes, hostBytes int64
	for i := range p.Layers {
		local, host := slices.Repeat([]int64{-1}, p.Experts), slices.Repeat([]int64{-1}, p.Experts)
		for e := range p.Experts {
			_, offloaded := slices.BinarySearch(p.Placement[i], e)
			if offloaded || p.Dynamic {
				host[e], hostBytes = hostBytes, hostBytes+s.size
			}
			if !offloaded {
				local[e], localBytes = localBytes, localBytes+s.size
			}
		}
		s.residentAt, s.hostAt = append(s.residentAt, local), append(s.hostAt, host)
	}
	for range p.SpareSlots {
		f, err := m.NewFence("expert to stay")
		if err != nil {
			return s, err
		}
		s.spare = append(s.spare, spareExtent{at: localBytes, done: device.Point{Fence: f}})
		localBytes += s.size
	}
	return s, nil
}

// resident says whether an expert is local.
func (p *places) resident(id ID) bool { return p.residentAt[id.Layer][id.Expert] >= 0 }

func (p *places) residentRegion(id ID) device.Region {
	return p.gpu.Region(p.residentAt[id.Layer][id.Expert], p.size)
}

// hostRegion is the expert's extent in host memory.
func (p *places) hostRegion(id ID) device.Region {
	return p.host.Region(p.hostAt[id.Layer][id.Expert], p.size)
}

// loaded is where an expert is loaded to: its host copy, where it has one.
func (p *places) loaded(layer, expert int) load.Place {
	if at := p.hostAt[layer][expert]; at >= 0 {
		return load.Place{Memory: p.host, Offset: at}
	}
	return load.Place{Memory: p.gpu, Offset: p.residentAt[layer][expert]}
}

// swap begins to bring an offloaded expert to a spare extent, to take the place of a local
// one of the same layer.
func (p *places) swap(in, out ID, e *transfer.Engine, label fmt.Stringer) error {
	switch {
	case in.Layer != out.Layer || out.Expert < 0 || out.Expert >= len(p.residentAt[in.Layer]):
		return errors.New("they are not of one layer")
	case p.resident(in): // since movable has looked
		return fmt.Errorf("the first is local: %w", ErrBusy)
	case !p.resident(out):
		return fmt.Errorf("the second is not local: %w", ErrBusy)
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
		Src: p.hostRegion(in), Dst: p.gpu.Region(w.to.at, p.size),
		Priority: transfer.Rebalance, Done: w.to.done, Label: label,
	})
	if err != nil {
		return err
	}
	p.spare = p.spare[:last]
	p.swaps = append(p.swaps, w)
	return nil
}

// carryOut makes those swaps whose experts have landed, and tells of each, or of its
// failure. No step runs.
func (p *places) carryOut(told func(in, out ID, err error)) {
	p.swaps = slices.DeleteFunc(p.swaps, func(w *swap) bool {
		if !w.ticket.Ended() {
			return false
		}
		err := w.ticket.Wait(context.Background()) // does not wait: it orders the step after the copy
		if err == nil {
			at := p.residentAt[w.in.Layer]
			at[w.in.Expert], w.to.at = w.to.at, at[w.out.Expert]
			at[w.out.Expert] = -1
		}
		p.spare = append(p.spare, w.to)
		told(w.in, w.out, err)
		return true
	})
}

// close ends the swaps under way and gives the memory back.
func (p *places) close() error {
	for _, w := range p.swaps {
		w.ticket.Cancel()
		_ = w.ticket.Wait(context.Background()) // a copy that failed is over, too
		p.spare = append(p.spare, w.to)
	}
	errs := []error{free(p.gpu), free(p.host)}
	for _, x := range p.spare {
		errs = append(errs, x.done.Fence.Close())
	}
	return errors.Join(errs...)
}

// free gives memory back, where there is any.
func free(m device.Memory) error {
	if m == nil {
		return nil
	}
	return m.Free()
}
