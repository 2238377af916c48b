package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// ErrBusy: the expert is there already, or on its way.
var ErrBusy = peercache.ErrBusy

// HarvestClient is the name under which harvest knows the store.
const HarvestClient = "experts"

// openPeers makes the cache in peers' memory, where there is somebody who lends.
func (s *Store) openPeers() (err error) {
	if s.o.Harvest == nil {
		return nil
	}
	e := s.o.Events
	s.peers, err = peercache.New(peercache.Options[ID]{
		Machine: s.o.Machine, Harvest: s.o.Harvest, Transfer: s.o.Transfer, Client: HarvestClient, Reader: s.o.Space,
		Name: s.name, Noun: "expert", Priority: transfer.Rebalance, Log: s.o.Log,
		Events: peercache.EventListener[ID]{
			Landed: func(i peercache.CopyInfo[ID]) { e.Promoted(s.moveInfo(i)) },
			Gone: func(i peercache.CopyInfo[ID]) {
				m := s.moveInfo(i)
				if m.Why = i.Why.String(); i.Why == peercache.Dropped {
					m.Why = "demoted"
				}
				e.Demoted(m)
			},
			PeerFailed: func(i peercache.PeerInfo) { e.PeerFailed(PeerInfo(i)) },
		},
	})
	return err
}

func (s *Store) moveInfo(i peercache.CopyInfo[ID]) MoveInfo {
	return MoveInfo{Layer: s.plan.Layers[i.Key.Layer], Expert: i.Key.Expert, Device: i.Device, Bytes: i.Bytes, Took: i.Took}
}

// PromoteOptions say where an expert should go.
type PromoteOptions struct {
	// Peers are the only ones to be used. Default: all.
	Peers []device.Space
	// Cost of losing the copy: see harvest.Hints.
	Cost time.Duration
}

// Promote begins to copy an offloaded expert to the memory of a peer, and returns at
// once. Fetches take it from there as soon as a Settle finds that it has landed. An
// error wraps harvest.ErrNoCapacity, ErrQuota, ErrRate or ErrClosed where harvest has
// no room for it, or ErrBusy.
func (s *Store) Promote(id ID, o PromoteOptions) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: promote %s: %w", s.name(id), err)
	}
	if err := s.movable(id); err != nil {
		return wrap(err)
	}
	// Fetches take neighbors in one copy where they lie side by side.
	before := func(yield func(ID) bool) {
		for e := id.Expert - 1; e >= 0 && yield(ID{id.Layer, e}); e-- {
		}
	}
	if err := s.peers.Put(id, s.hostRegion(id), peercache.PutOptions[ID]{Peers: o.Peers, Cost: o.Cost, After: before}); err != nil {
		return wrap(err)
	}
	return nil
}

// movable says why the expert has no business outside of local memory.
func (s *Store) movable(id ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return device.ErrClosed
	case s.loader != nil:
		return errors.New("the store is not sealed")
	case id.Layer < 0 || id.Layer >= len(s.layers) || id.Expert < 0 || id.Expert >= s.plan.Experts:
		return fmt.Errorf("there are %d layers of %d experts", len(s.layers), s.plan.Experts)
	case s.layers[id.Layer].localAt[id.Expert] >= 0:
		return fmt.Errorf("it is local: %w", ErrBusy)
	}
	return nil
}

// name of an expert, with the model's number of the layer.
func (s *Store) name(id ID) string {
	if id.Layer < 0 || id.Layer >= len(s.plan.Layers) {
		return fmt.Sprintf("%+v", id)
	}
	return fmt.Sprintf("layer %d expert %d", s.plan.Layers[id.Layer], id.Expert)
}

// Demote gives the expert's copy in a peer's memory back, or one that is on its way.
// It is no error where there is none.
func (s *Store) Demote(id ID) error {
	if err := s.peers.Drop(id); err != nil {
		return fmt.Errorf("experts: demote %s: %w", s.name(id), err)
	}
	return nil
}

// SetCost says what losing the expert's copy in a peer's memory would cost: see
// harvest.Hints. It does nothing where there is none.
func (s *Store) SetCost(id ID, cost time.Duration) { s.peers.SetCost(id, cost) }

// Settle takes in the copies to peers that have landed, and forgets those that
// failed. It never waits. The result is how many are on their way.
func (s *Store) Settle() (moving int) { return s.peers.Settle() }

// WaitMoves waits until no copy is on its way to a peer, or to stay, any more. The
// swaps are carried out by BeginStep.
func (s *Store) WaitMoves(ctx context.Context) error {
	if err := s.peers.Wait(ctx); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	s.mu.Lock()
	swaps := slices.Clone(s.swaps)
	s.mu.Unlock()
	for _, w := range swaps {
		if err := w.ticket.Wait(ctx); !w.ticket.Ended() {
			return fmt.Errorf("experts: %w", err)
		}
	}
	return nil
}

// Homes is a snapshot of where every expert lives between steps: [layer in
// Layers][expert].
func (s *Store) Homes() [][]Home {
	s.mu.Lock()
	defer s.mu.Unlock()
	homes := make([][]Home, len(s.layers))
	for i := range s.layers {
		homes[i] = make([]Home, s.plan.Experts)
		for e, at := range s.layers[i].localAt {
			h := &homes[i][e]
			h.Tier = Host
			if at >= 0 {
				h.Tier = Local
			} else if c := s.peers.Find(ID{i, e}); c != nil {
				h.Tier, h.Device = Peer, c.Device()
			}
		}
	}
	for _, w := range s.swaps {
		homes[w.in.Layer][w.in.Expert].Moving = true
	}
	for _, id := range s.peers.Moving() {
		homes[id.Layer][id.Expert].Moving = true
	}
	return homes
}

// spareExtent is a local extent that nobody uses, at an offset, with the fence of the copy
// that brings an expert there.
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

// Swap begins to bring an offloaded expert to the compute GPU's memory for good, in
// place of a local one of the same layer, and returns at once. The BeginStep that finds
// that it has landed makes the change. ErrBusy means that one of them is being swapped
// already, is where it should be, or that all spare extents are in use.
func (s *Store) Swap(in, out ID) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: swap %s for %s: %w", s.name(in), s.name(out), err)
	}
	if err := s.movable(in); err != nil {
		return wrap(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.plan.Adaptive:
		return wrap(errors.New("the store is not adaptive: local experts have no host copy"))
	case in.Layer != out.Layer || out.Expert < 0 || out.Expert >= s.plan.Experts:
		return wrap(errors.New("they are not of one layer"))
	case s.layers[in.Layer].localAt[in.Expert] >= 0: // since movable has looked
		return wrap(fmt.Errorf("the first is local: %w", ErrBusy))
	case s.layers[out.Layer].localAt[out.Expert] < 0:
		return wrap(fmt.Errorf("the second is not local: %w", ErrBusy))
	case len(s.spare) == 0:
		return wrap(fmt.Errorf("no spare extent: %w", ErrBusy))
	case slices.ContainsFunc(s.swaps, func(w *swap) bool { return w.in == in || w.out == out }):
		return wrap(ErrBusy)
	}
	last := len(s.spare) - 1
	w := &swap{in: in, out: out, to: s.spare[last]}
	w.to.done.Value++
	var err error
	w.ticket, err = s.o.Transfer.Submit(transfer.Request{
		Src: s.hostRegion(in), Dst: s.local.Region(w.to.at, s.plan.Layout.Size),
		Priority: transfer.Rebalance, Done: w.to.done, Label: transfer.Text(s.name(in) + " to stay"),
	})
	if err != nil {
		return wrap(err)
	}
	s.spare = s.spare[:last]
	s.swaps = append(s.swaps, w)
	return nil
}

// carryOutSwaps makes those changes whose experts have landed. No step runs.
func (s *Store) carryOutSwaps() {
	s.swaps = slices.DeleteFunc(s.swaps, func(w *swap) bool {
		if !w.ticket.Ended() {
			return false
		}
		err := w.ticket.Wait(context.Background()) // orders the step after the copy
		if err != nil {
			s.spare = append(s.spare, w.to)
			s.o.Log.Warn("experts: a local expert is not swapped", "in", s.name(w.in), "out", s.name(w.out), "err", err)
			return true
		}
		l := &s.layers[w.in.Layer]
		l.localAt[w.in.Expert], w.to.at = w.to.at, l.localAt[w.out.Expert]
		l.localAt[w.out.Expert] = -1
		l.moved = true
		s.spare = append(s.spare, w.to)
		if l.refs[w.in.Expert].Held() { // it was prefetched for the step that begins
			l.refs[w.in.Expert].Release()
		}
		l.listAll()
		s.stats.Swapped++
		s.stats.MovedBytes += s.plan.Layout.Size
		s.o.Events.Swapped(SwapInfo{Layer: s.plan.Layers[w.in.Layer], In: w.in.Expert, Out: w.out.Expert})
		return true
	})
}

// Snapshot is the state of the store at one moment, for people.
type Snapshot struct {
	// Layers by the model's numbers.
	Layers []LayerSnapshot `json:"layers"`
	// ExpertBytes is the size of one.
	ExpertBytes int64 `json:"expert_bytes"`
	// Ring lists what its slots hold.
	Ring []SlotSnapshot `json:"ring"`
	// Links into the compute GPU.
	Links []LinkSnapshot `json:"links"`
}

// LayerSnapshot is one layer.
type LayerSnapshot struct {
	Layer   int              `json:"layer"`
	Experts []ExpertSnapshot `json:"experts"`
}

// ExpertSnapshot is one expert.
type ExpertSnapshot struct {
	Tier Tier `json:"tier"`
	// Peer has a copy.
	Peer string `json:"peer,omitempty"`
	// Moving: a copy is on its way to a peer or to stay.
	Moving      bool  `json:"moving,omitempty"`
	Uses        int64 `json:"uses"`
	Fetches     int64 `json:"fetches"`
	Activations int64 `json:"activations"`
}

// SlotSnapshot is one slot of the ring. Layer is -1 where it holds nothing.
type SlotSnapshot struct {
	Layer      int `json:"layer"`
	Expert     int `json:"expert"`
	References int `json:"references"`
}

// LinkSnapshot is the way from a memory to the compute GPU; a rate of 0 is not known.
type LinkSnapshot struct {
	From           string  `json:"from"`
	BytesPerSecond float64 `json:"bytes_per_second"`
}

// Snapshot takes one. Its parts are of slightly different moments while steps run.
func (s *Store) Snapshot() Snapshot {
	where, homes := s.Residency(), s.Homes()
	uses, fetches, activations := s.Uses(), s.Fetches(), s.Activations()
	snap := Snapshot{ExpertBytes: s.plan.Layout.Size, Layers: []LayerSnapshot{}, Ring: []SlotSnapshot{}, Links: []LinkSnapshot{}}
	for i, number := range s.plan.Layers {
		l := LayerSnapshot{Layer: number}
		for e, h := range homes[i] {
			x := ExpertSnapshot{Tier: where[i][e], Moving: h.Moving, Uses: uses[i][e], Fetches: fetches[i][e], Activations: activations[i][e]}
			if h.Tier == Peer {
				x.Peer = h.Device.String()
			}
			l.Experts = append(l.Experts, x)
		}
		snap.Layers = append(snap.Layers, l)
	}
	for _, l := range s.Links() {
		snap.Links = append(snap.Links, LinkSnapshot{l.From.String(), l.BytesPerSecond})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.slots {
		x := SlotSnapshot{Layer: -1, Expert: -1}
		if id := s.slots[i].holds; s.inUse(i) {
			x.Layer, x.Expert = s.plan.Layers[id.Layer], id.Expert
		}
		_, _, x.References = s.slots[i].cell.State()
		snap.Ring = append(snap.Ring, x)
	}
	return snap
}

// inUse reports whether the slot holds an expert.
func (s *Store) inUse(at int) bool {
	_, available, _ := s.slots[at].cell.State()
	return available && s.slots[at].holds != nothing
}
