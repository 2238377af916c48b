package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/transfer"
)

// ErrBusy: the expert is there already, or on its way.
var ErrBusy = errors.New("it is there already, or on its way")

// HarvestClient is the name under which harvest knows the store.
const HarvestClient = "experts"

// failuresInARow of copies with one peer, after which it is left out.
const failuresInARow = 3

// peers keeps the copies in peers' memory.
type peers struct {
	// at is where a fetch looks: the copy that has landed, or nil. [position][expert]
	at [][]atomic.Pointer[lent]

	fetcher, mover *harvest.Holder

	mu sync.Mutex
	// moving copies have not landed; ending ones were given up, and their copies are
	// not seen to have ended.
	moving, ending []*lent
	// idle fences, with their values; fences are all.
	idle   []device.Point
	fences []device.Fence
	// failures in a row, by peer; failing is how many peers have any.
	failures map[device.Space]int
	failing  atomic.Int32

	promoted, demoted, revoked, movedBytes int64
}

// lent is the copy of an expert in a peer's memory.
type lent struct {
	id     ID
	handle *harvest.Handle
	began  time.Duration
	// ticket of the copy that fills it, which done follows.
	ticket *transfer.Ticket
	done   device.Point
}

func (p *peers) arrange(layers, experts int) {
	p.fetcher, p.mover = harvest.NewHolder("expert fetch"), harvest.NewHolder("expert move")
	p.failures = map[device.Space]int{}
	for range layers {
		p.at = append(p.at, make([]atomic.Pointer[lent], experts))
	}
}

func (p *peers) published(id ID) *lent { return p.at[id.Layer][id.Expert].Load() }

// worked ends a row of failures. It takes mu only where there is one: whoever moves
// experts may hold it while a device is asked for memory.
func (p *peers) worked(peer device.Space) {
	if p.failing.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended(peer)
}

// ended forgets a row of failures. mu is held.
func (p *peers) ended(peer device.Space) {
	delete(p.failures, peer)
	p.failing.Store(int32(len(p.failures)))
}

// of is the copy of the expert that has landed or is on its way. mu is held.
func (p *peers) of(id ID) *lent {
	if l := p.published(id); l != nil {
		return l
	}
	if i := slices.IndexFunc(p.moving, func(l *lent) bool { return l.id == id }); i >= 0 {
		return p.moving[i]
	}
	return nil
}

// fence returns the next point of a fence that nobody waits for. mu is held.
func (p *peers) fence(m device.Machine) (device.Point, error) {
	if n := len(p.idle); n > 0 {
		at := p.idle[n-1]
		p.idle = p.idle[:n-1]
		at.Value++
		return at, nil
	}
	f, err := m.NewFence("expert moved")
	if err != nil {
		return device.Point{}, err
	}
	p.fences = append(p.fences, f)
	return device.Point{Fence: f, Value: 1}, nil
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
	if s.o.Harvest == nil {
		return wrap(fmt.Errorf("the store has no harvest: %w", harvest.ErrNoCapacity))
	}
	p := &s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of(id) != nil {
		return wrap(ErrBusy)
	}
	hints := harvest.Hints{Client: HarvestClient, Label: s.name(id), Peers: o.Peers, Reader: s.o.Space, Cost: o.Cost}
	for e := id.Expert - 1; e >= 0 && hints.After == nil; e-- {
		if before := p.of(ID{id.Layer, e}); before != nil {
			hints.After = before.handle
		}
	}
	h, err := s.o.Harvest.Alloc(s.plan.Layout.Size, hints)
	if err != nil {
		return wrap(err)
	}
	l := &lent{id: id, handle: h, began: s.o.Machine.Now()}
	if err := s.fill(l); err != nil {
		if freed := s.o.Harvest.Free(h); freed != nil && !errors.Is(freed, harvest.ErrRevoked) {
			err = errors.Join(err, freed)
		}
		return wrap(err)
	}
	p.moving = append(p.moving, l)
	return nil
}

// fill starts the copy. peers.mu is held.
func (s *Store) fill(l *lent) error {
	p := &s.peers
	if err := s.o.Harvest.RegisterCallback(l.handle, func(harvest.Revocation) { s.revoked(l) }); err != nil {
		return err
	}
	// Without the reference the memory could be given back under the copy.
	ref, ok := l.handle.Acquire(p.mover)
	if !ok {
		return harvest.ErrRevoked
	}
	done, err := p.fence(s.o.Machine)
	if err != nil {
		ref.Release()
		return err
	}
	l.done = done
	l.ticket, err = s.o.Transfer.Submit(transfer.Request{
		Src: s.hostRegion(l.id), Dst: l.handle.Region(),
		Priority: transfer.Rebalance, Done: done, Label: transfer.Text(s.name(l.id) + " to peer"),
	})
	if err != nil {
		done.Value--
		p.idle = append(p.idle, done)
		ref.Release()
		s.failed(l.handle.Device(), err)
		return err
	}
	ref.ReleaseAt(done)
	return nil
}

// movable says why the expert has no business outside of local memory.
func (s *Store) movable(id ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return device.ErrClosed
	case !s.sealed:
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
	p := &s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.of(id)
	if l == nil {
		return nil
	}
	p.demoted++
	if err := s.giveBack(l, "demoted"); err != nil {
		return fmt.Errorf("experts: demote %s: %w", s.name(id), err)
	}
	return nil
}

// giveBack frees a copy. peers.mu is held.
func (s *Store) giveBack(l *lent, why string) error {
	s.unlist(l, why)
	if err := s.o.Harvest.Free(l.handle); err != nil && !errors.Is(err, harvest.ErrRevoked) {
		return err
	}
	return nil
}

// unlist lets no fetch find the copy any more. peers.mu is held.
func (s *Store) unlist(l *lent, why string) {
	p := &s.peers
	p.at[l.id.Layer][l.id.Expert].CompareAndSwap(l, nil)
	if i := slices.Index(p.moving, l); i >= 0 {
		p.moving = slices.Delete(p.moving, i, i+1)
		p.ending = append(p.ending, l)
		l.ticket.Cancel()
	}
	s.o.Events.Demoted(s.moveInfo(l, why))
}

func (s *Store) moveInfo(l *lent, why string) MoveInfo {
	return MoveInfo{
		Layer: s.plan.Layers[l.id.Layer], Expert: l.id.Expert, Device: l.handle.Device(),
		Bytes: l.handle.Bytes(), Why: why,
	}
}

// revoked is harvest's callback: the memory is gone, and so are its readers.
func (s *Store) revoked(l *lent) {
	p := &s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of(l.id) != l {
		return // it was given up before
	}
	p.revoked++
	s.unlist(l, "revoked")
}

// failed counts a failure of copies with a peer and leaves the peer out where there
// is no hope. peers.mu is held.
func (s *Store) failed(peer device.Space, err error) {
	if errors.Is(err, transfer.ErrCanceled) || errors.Is(err, transfer.ErrAfter) || errors.Is(err, device.ErrClosed) {
		return
	}
	p := &s.peers
	p.failures[peer]++
	p.failing.Store(int32(len(p.failures)))
	i := PeerInfo{Device: peer, Err: err, Excluded: errors.Is(err, device.ErrLost) || p.failures[peer] >= failuresInARow}
	if i.Excluded {
		p.ended(peer)
		if excluded := s.o.Harvest.Exclude(peer, err); excluded != nil {
			i.Err = errors.Join(err, excluded)
		}
	}
	s.o.Events.PeerFailed(i)
}

// SetCost says what losing the expert's copy in a peer's memory would cost: see
// harvest.Hints. It does nothing where there is none.
func (s *Store) SetCost(id ID, cost time.Duration) {
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	if l := s.peers.of(id); l != nil {
		l.handle.SetCost(cost)
	}
}

// Settle takes in the copies to peers that have landed, and forgets those that
// failed. It never waits. The result is how many are on their way.
func (s *Store) Settle() (moving int) {
	p := &s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range []*[]*lent{&p.moving, &p.ending} {
		*list = slices.DeleteFunc(*list, func(l *lent) bool {
			if s.without.noLanding && list == &p.moving {
				s.landed(l, nil)
				p.ending = append(p.ending, l)
				return true
			}
			if !l.ticket.Ended() {
				return false
			}
			// The copy has ended, so this does not wait: it orders what comes next after
			// the copy.
			err := l.ticket.Wait(context.Background())
			p.idle = append(p.idle, l.done)
			if list == &p.moving {
				s.landed(l, err)
			}
			return true
		})
	}
	return len(p.moving)
}

// landed publishes a copy, or gives it back. peers.mu is held.
func (s *Store) landed(l *lent, err error) {
	p := &s.peers
	peer := l.handle.Device()
	if err != nil {
		s.failed(peer, err)
		s.o.Events.Demoted(s.moveInfo(l, "copy failed"))
		if err := s.o.Harvest.Free(l.handle); err != nil && !errors.Is(err, harvest.ErrRevoked) {
			s.log.Error("experts: memory of a peer is not given back", "err", err)
		}
		return
	}
	p.ended(peer)
	p.at[l.id.Layer][l.id.Expert].Store(l)
	p.promoted++
	p.movedBytes += l.handle.Bytes()
	i := s.moveInfo(l, "")
	i.Took = s.o.Machine.Now() - l.began
	s.o.Events.Promoted(i)
}

// WaitMoves waits until no copy is on its way to a peer, or to stay, any more. The
// swaps are carried out by BeginStep.
func (s *Store) WaitMoves(ctx context.Context) error {
	for s.Settle() > 0 {
		s.peers.mu.Lock()
		var t *transfer.Ticket
		if len(s.peers.moving) > 0 {
			t = s.peers.moving[0].ticket
		}
		s.peers.mu.Unlock()
		if t == nil {
			continue
		}
		if err := t.Wait(ctx); !t.Ended() {
			return fmt.Errorf("experts: %w", err)
		}
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
			} else if l := s.peers.published(ID{i, e}); l != nil {
				h.Tier, h.Device = Peer, l.handle.Device()
			}
		}
	}
	for _, w := range s.swaps {
		homes[w.in.Layer][w.in.Expert].Moving = true
	}
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	for _, l := range s.peers.moving {
		homes[l.id.Layer][l.id.Expert].Moving = true
	}
	return homes
}

// closePeers ends what is on its way and gives everything back.
func (s *Store) closePeers() error {
	p := &s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for i := range p.at {
		for e := range p.at[i] {
			if l := p.at[i][e].Load(); l != nil {
				errs = append(errs, s.giveBack(l, "closed"))
			}
		}
	}
	for len(p.moving) > 0 {
		errs = append(errs, s.giveBack(p.moving[0], "closed"))
	}
	for _, l := range p.ending {
		_ = l.ticket.Wait(context.Background()) // a copy that failed is over, too
	}
	return errors.Join(errs...)
}

// swap is an expert on its way to a spare local extent.
type swap struct {
	in, out ID
	to      int64
	ticket  *transfer.Ticket
	done    device.Point
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
	s.peers.mu.Lock()
	done, err := s.peers.fence(s.o.Machine)
	s.peers.mu.Unlock()
	if err != nil {
		return wrap(err)
	}
	last := len(s.spare) - 1
	w := &swap{in: in, out: out, to: s.spare[last], done: done}
	w.ticket, err = s.o.Transfer.Submit(transfer.Request{
		Src: s.hostRegion(in), Dst: s.local.Region(w.to, s.plan.Layout.Size),
		Priority: transfer.Rebalance, Done: done, Label: transfer.Text(s.name(in) + " to stay"),
	})
	if err != nil {
		done.Value--
		s.returnFence(done)
		return wrap(err)
	}
	s.spare = s.spare[:last]
	s.swaps = append(s.swaps, w)
	return nil
}

func (s *Store) returnFence(at device.Point) {
	s.peers.mu.Lock()
	s.peers.idle = append(s.peers.idle, at)
	s.peers.mu.Unlock()
}

// carryOutSwaps makes those changes whose experts have landed. No step runs.
func (s *Store) carryOutSwaps() {
	s.swaps = slices.DeleteFunc(s.swaps, func(w *swap) bool {
		if !w.ticket.Ended() {
			return false
		}
		err := w.ticket.Wait(context.Background()) // orders the step after the copy
		s.returnFence(w.done)
		if err != nil {
			s.spare = append(s.spare, w.to)
			s.log.Warn("experts: a local expert is not swapped", "in", s.name(w.in), "out", s.name(w.out), "err", err)
			return true
		}
		l := &s.layers[w.in.Layer]
		l.localAt[w.in.Expert], w.to = w.to, l.localAt[w.out.Expert]
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
