package experts

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// ErrBusy: the expert is already there, or being copied there.
var ErrBusy = peercache.ErrBusy

// HarvestClient is the store's client name in harvest.
const HarvestClient = "experts"

// openPeers makes the cache in peers' memory, if the store has a harvest runtime.
func (s *Store) openPeers() (err error) {
	if s.o.Harvest == nil {
		return nil
	}
	e := s.o.Events
	s.peers, err = peercache.New(peercache.Options[ID]{
		Machine: s.o.Machine, Harvest: s.o.Harvest, Transfer: s.o.Transfer, Client: HarvestClient, Reader: s.o.Space,
		Name: s.plan.name, Label: func(id ID) fmt.Stringer { return migration{&s.plan, id, "promote expert", " to peer"} }, Noun: "expert", Priority: transfer.Rebalance, Log: s.o.Log,
		Releasing: s.releasing,
		Events: peercache.EventListener[ID]{
			Landed: func(i peercache.CopyInfo[ID]) { e.Promoted(s.moveInfo(i)) },
			Removed: func(i peercache.CopyInfo[ID]) {
				m := s.moveInfo(i)
				if m.Reason = i.Reason.String(); i.Reason == peercache.Dropped {
					m.Reason = "demoted"
				}
				e.Demoted(m)
			},
			PeerFailed: func(i peercache.PeerInfo) { e.PeerFailed(PeerInfo(i)) },
		},
	})
	return err
}

// releasing is called when the memory of a slab is needed: fetches from it that have not begun read
// host memory instead. The fetches of all layers are submitted when a step begins, so that the last
// of them would begin only at its end.
func (s *Store) releasing(slab uint64) {
	for !s.mu.TryLock() {
		if s.sealing.Load() {
			return // no fetch is queued, and Seal waits for copies with the lock held
		}
		runtime.Gosched()
	}
	defer s.mu.Unlock()
	if !s.closed {
		s.fetch.leave(slab)
	}
}

func (s *Store) moveInfo(i peercache.CopyInfo[ID]) MoveInfo {
	return MoveInfo{Layer: s.plan.Layers[i.Key.Layer], Expert: i.Key.Expert, Device: i.Device, Bytes: i.Bytes, Took: i.Took}
}

// PromoteOptions say which peers may hold the copy, and what it is worth.
type PromoteOptions struct {
	// Peers that may be used. Default: all.
	Peers []device.Space
	// Cost of losing the copy: see harvest.Hints.
	Cost time.Duration
	// Move: the expert may have a copy on another peer, which is freed once the new one is
	// complete.
	Move bool
}

// Promote starts the copy of an offloaded expert to a peer's memory, and returns at once.
// Fetches read the peer as soon as a Poll finds the copy complete. An error wraps
// harvest.ErrNoCapacity, ErrQuota, ErrRate or ErrClosed if harvest has no memory for it,
// or ErrBusy.
func (s *Store) Promote(id ID, o PromoteOptions) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: promote %s: %w", s.plan.name(id), err)
	}
	if err := s.movable(id); err != nil {
		return wrap(err)
	}
	// Adjacent experts are fetched by one copy of the device.
	before := func(yield func(ID) bool) {
		for e := id.Expert - 1; e >= 0 && yield(ID{id.Layer, e}); e-- {
		}
	}
	if err := s.peers.Put(id, s.places.hostRegion(id), peercache.PutOptions[ID]{Peers: o.Peers, Cost: o.Cost, Move: o.Move, After: before}); err != nil {
		return wrap(err)
	}
	return nil
}

// movable returns an error if the expert is resident or does not exist.
func (s *Store) movable(id ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSealed(); err != nil {
		return err
	}
	switch {
	case id.Layer < 0 || id.Layer >= len(s.plan.Layers) || id.Expert < 0 || id.Expert >= s.plan.Experts:
		return fmt.Errorf("the model has %d layers of %d experts", len(s.plan.Layers), s.plan.Experts)
	case s.places.resident(id):
		return fmt.Errorf("the expert is resident: %w", ErrBusy)
	}
	return nil
}

// Demote frees the expert's peer copy, or cancels one that is being made. Without a peer
// copy it does nothing.
func (s *Store) Demote(id ID) error {
	if err := s.peers.Drop(id); err != nil {
		return fmt.Errorf("experts: demote %s: %w", s.plan.name(id), err)
	}
	return nil
}

// SetCost sets what losing the expert's peer copy would cost: see harvest.Hints. Without
// a peer copy it does nothing.
func (s *Store) SetCost(id ID, cost time.Duration) { s.peers.SetCost(id, cost) }

// Poll makes completed peer copies available to fetches and frees failed ones. It never
// waits. The result is the number of copies in progress.
func (s *Store) Poll() (moving int) { return s.peers.Poll() }

// WaitMoves waits for the copies of all promotions and swaps, and of experts that are made
// resident. BeginStep completes the latter two.
func (s *Store) WaitMoves(ctx context.Context) error {
	if err := s.peers.Wait(ctx); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	s.mu.Lock()
	var tickets []*transfer.Ticket
	for _, w := range s.places.swaps {
		tickets = append(tickets, w.ticket)
	}
	for _, x := range s.places.lent {
		if x.ticket != nil {
			tickets = append(tickets, x.ticket)
		}
	}
	s.mu.Unlock()
	for _, t := range tickets {
		if err := t.Wait(ctx); !t.Ended() {
			return fmt.Errorf("experts: %w", err)
		}
	}
	return nil
}

// Placed is a snapshot of where every expert lives between steps, [position in
// Plan.Layers][expert].
func (s *Store) Placed() [][]Placed {
	s.mu.Lock()
	defer s.mu.Unlock()
	placed := make([][]Placed, len(s.plan.Layers))
	for i := range placed {
		placed[i] = make([]Placed, s.plan.Experts)
		for e := range placed[i] {
			h := &placed[i][e]
			h.Tier = Host
			if s.places.resident(ID{i, e}) {
				h.Tier, h.Lent = Resident, !s.places.own(ID{i, e})
			} else if c := s.peers.Find(ID{i, e}); c != nil {
				h.Tier, h.Device = Peer, c.Device()
			}
		}
	}
	for _, w := range s.places.swaps {
		placed[w.in.Layer][w.in.Expert].Moving = true
	}
	for _, x := range s.places.lent {
		if x.ticket != nil || x.occupied && x.leaving {
			placed[x.expert.Layer][x.expert.Expert].Moving = true
		}
	}
	for _, id := range s.peers.Moving() {
		placed[id.Layer][id.Expert].Moving = true
	}
	return placed
}

// Swap starts to make an offloaded expert resident in place of a resident one of the same
// layer, and returns at once. The first BeginStep after its copy completes the swap.
// ErrBusy: one of them is already being swapped or in its target tier, or all spare
// extents are in use.
func (s *Store) Swap(in, out ID) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: swap %s for %s: %w", s.plan.name(in), s.plan.name(out), err)
	}
	if err := s.movable(in); err != nil {
		return wrap(err)
	}
	if !s.plan.Dynamic {
		return wrap(errors.New("dynamic residency is off: resident experts have no host copy"))
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
