package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
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
		Name: s.plan.name, Label: func(id ID) fmt.Stringer { return migration{&s.plan, id, "promote expert", " to peer"} }, Noun: "expert", Priority: transfer.Rebalance, Log: s.o.Log,
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
		return fmt.Errorf("experts: promote %s: %w", s.plan.name(id), err)
	}
	if err := s.movable(id); err != nil {
		return wrap(err)
	}
	// Experts that lie side by side are one copy of the device when they are fetched.
	before := func(yield func(ID) bool) {
		for e := id.Expert - 1; e >= 0 && yield(ID{id.Layer, e}); e-- {
		}
	}
	if err := s.peers.Put(id, s.places.hostRegion(id), peercache.PutOptions[ID]{Peers: o.Peers, Cost: o.Cost, After: before}); err != nil {
		return wrap(err)
	}
	return nil
}

// movable says why the expert has no business outside of local memory.
func (s *Store) movable(id ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.unsealed(); err != nil {
		return err
	}
	switch {
	case id.Layer < 0 || id.Layer >= len(s.plan.Layers) || id.Expert < 0 || id.Expert >= s.plan.Experts:
		return fmt.Errorf("there are %d layers of %d experts", len(s.plan.Layers), s.plan.Experts)
	case s.places.resident(id):
		return fmt.Errorf("it is local: %w", ErrBusy)
	}
	return nil
}

// Demote gives the expert's copy in a peer's memory back, or one that is on its way.
// It is no error where there is none.
func (s *Store) Demote(id ID) error {
	if err := s.peers.Drop(id); err != nil {
		return fmt.Errorf("experts: demote %s: %w", s.plan.name(id), err)
	}
	return nil
}

// SetCost says what losing the expert's copy in a peer's memory would cost: see
// harvest.Hints. It does nothing where there is none.
func (s *Store) SetCost(id ID, cost time.Duration) { s.peers.SetCost(id, cost) }

// Poll takes in the copies to peers that have landed, and forgets those that
// failed. It never waits. The result is how many are on their way.
func (s *Store) Poll() (moving int) { return s.peers.Poll() }

// WaitMoves waits until no copy is on its way to a peer, or to stay, any more. The
// swaps are carried out by BeginStep.
func (s *Store) WaitMoves(ctx context.Context) error {
	if err := s.peers.Wait(ctx); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	s.mu.Lock()
	swaps := slices.Clone(s.places.swaps)
	s.mu.Unlock()
	for _, w := range swaps {
		if err := w.ticket.Wait(ctx); !w.ticket.Ended() {
			return fmt.Errorf("experts: %w", err)
		}
	}
	return nil
}

// Placed is a snapshot of where every expert lives between steps: [layer in
// Layers][expert].
func (s *Store) Placed() [][]Placed {
	s.mu.Lock()
	defer s.mu.Unlock()
	homes := make([][]Placed, len(s.plan.Layers))
	for i := range homes {
		homes[i] = make([]Placed, s.plan.Experts)
		for e, at := range s.places.residentAt[i] {
			h := &homes[i][e]
			h.Tier = Host
			if at >= 0 {
				h.Tier = Resident
			} else if c := s.peers.Find(ID{i, e}); c != nil {
				h.Tier, h.Device = Peer, c.Device()
			}
		}
	}
	for _, w := range s.places.swaps {
		homes[w.in.Layer][w.in.Expert].Moving = true
	}
	for _, id := range s.peers.Moving() {
		homes[id.Layer][id.Expert].Moving = true
	}
	return homes
}

// Swap begins to bring an offloaded expert to the compute GPU's memory for good, in
// place of a local one of the same layer, and returns at once. The BeginStep that finds
// that it has landed makes the change. ErrBusy means that one of them is being swapped
// already, is where it should be, or that all spare extents are in use.
func (s *Store) Swap(in, out ID) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: swap %s for %s: %w", s.plan.name(in), s.plan.name(out), err)
	}
	if err := s.movable(in); err != nil {
		return wrap(err)
	}
	if !s.plan.Dynamic {
		return wrap(errors.New("the store is not adaptive: local experts have no host copy"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.places.swap(in, out, s.o.Transfer, migration{&s.plan, in, "swap in expert", " to stay"}); err != nil {
		return wrap(err)
	}
	return nil
}

// migration labels a copy that changes where an expert lives.
type migration struct {
	plan *Plan
	id   ID
	// what it is in traces, and where the expert goes.
	what, to string
}

// String names the copy.
func (m migration) String() string { return m.plan.name(m.id) + m.to }

// Describe implements trace.Describer.
func (m migration) Describe(n *trace.Note) {
	n.Name, n.Layer, n.Experts, n.Tier = m.what, m.plan.Layers[m.id.Layer], []int{m.id.Expert}, Host.String()
}
