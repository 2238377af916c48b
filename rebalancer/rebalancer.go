package rebalancer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// Store is the store to rebalance: *experts.Store. Its methods may be called while steps
// run, and only WaitMoves waits.
type Store interface {
	// Plan has the size of an expert, and whether resident ones may be swapped.
	Plan() experts.Plan
	Uses() [][]int64
	Placed() [][]experts.Placed
	// Links into the GPU, from the host and from peers.
	Links() []experts.Link

	Promote(experts.ID, experts.PromoteOptions) error
	Demote(experts.ID) error
	Swap(in, out experts.ID) error
	SetCost(experts.ID, time.Duration)
	Poll() (moving int)
	WaitMoves(context.Context) error
}

// Places is lent memory of the GPU for more resident experts: *experts.Store. Its methods never
// wait.
type Places interface {
	// FreePlaces is how many experts can be made resident now.
	FreePlaces() int
	MakeResident(experts.ID) error
	Offload(experts.ID)
}

// Options describe a Rebalancer.
type Options struct {
	Store Store
	// Places that lent memory of the GPU may add to the store. Default: none.
	Places Places
	// Harvest lends the memory of peer copies. Nil: there are no peers, and only resident
	// experts are swapped, if the store allows that.
	Harvest *harvest.Runtime
	// Clock is the machine's, for Start and FillAll.
	Clock device.Clock
	// Core has the limits and the tuning; its Bytes and Dynamic are set from the store.
	Core CoreOptions
	// Interval between two ticks of the loop that Start begins. Default: 100 ms.
	Interval time.Duration
	// Backoff is the time after which a peer that was excluded because copies failed is
	// readmitted; it doubles with each further exclusion, up to 5 min. Default: 5 s.
	Backoff time.Duration
	// Log of failed ticks and readmitted peers. Default: discarded.
	Log *slog.Logger
}

// EnsureDefaults returns o with every unset field at its default.
func (o Options) EnsureDefaults() Options {
	setDefault(&o.Interval, 100*time.Millisecond)
	setDefault(&o.Backoff, harvest.ReadmitBackoff)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Store != nil {
		p := o.Store.Plan()
		o.Core.Bytes, o.Core.Dynamic = p.Layout.Size, p.Dynamic
	}
	o.Core = o.Core.EnsureDefaults()
	return o
}

// Validate reports the first invalid option; defaults must be set.
func (o Options) Validate() error {
	c := o.Core
	switch {
	case o.Store == nil:
		return errors.New("rebalancer: Options.Store is not set")
	case o.Clock == nil:
		return errors.New("rebalancer: Options.Clock is not set")
	case o.Interval < 0 || o.Backoff < 0 || c.HalfLife < 0 || c.Tuning.Horizon < 0:
		return fmt.Errorf("rebalancer: durations must not be negative: interval %v, back-off %v, half-life %v, horizon %v", o.Interval, o.Backoff, c.HalfLife, c.Tuning.Horizon)
	case c.Tuning.Hysteresis < 1:
		return fmt.Errorf("rebalancer: hysteresis %v is below 1: experts would be swapped back and forth; set at least 1", c.Tuning.Hysteresis)
	case c.MaxMoving < 0:
		return fmt.Errorf("rebalancer: invalid maximum of %d migrations in progress: must be at least 1", c.MaxMoving)
	}
	return nil
}

// ErrDoesNotFit: peers have no room for every offloaded expert.
var ErrDoesNotFit = errors.New("peer memory does not hold all offloaded experts")

// maxRefusalBackoff is the maximum time before a peer is asked for memory again after a refusal.
const maxRefusalBackoff = time.Second

// Rebalancer carries out what a Core decides. All methods but Close may be called
// from any goroutine; Tick, FillAll and the loop take turns.
type Rebalancer struct {
	o     Options
	store Store

	mu     sync.Mutex
	core   *Core
	peers  map[device.Space]*peerState
	counts Counts
	// readmission is of peers that were excluded because copies failed.
	readmission *harvest.Readmission
	// waiting are promotions whose room is still being read by those that had it.
	waiting []promotion
	// becomingResident are experts that are being swapped in or made resident: their peer
	// copies are demoted afterwards.
	becomingResident []experts.ID
	// worth as of the latest Tick, which Worth reads without waiting for one.
	worth atomic.Pointer[Worth]

	stop func() // ends the loop; nil before Start
	// paused: ticks do nothing. fill: see SetFillPlaces.
	paused, fill bool
}

// promotion is a started Replace: its copy starts when the replaced one's memory is free.
type promotion struct {
	id      experts.ID
	options experts.PromoteOptions
	// room is the peer that has the memory, until when the promotion is given up.
	room  device.Space
	until time.Duration
}

// peerState is the back-off state of a peer.
type peerState struct {
	// notBefore is the end of the back-off after a refused allocation, backoff its
	// length, and fullUntil the time until which the peer's free memory counts as 0,
	// because the quota is used up.
	notBefore, backoff, fullUntil time.Duration
}

// Counts of what a Rebalancer has done since New.
type Counts struct {
	// Promoted counts started promotions to free peer memory, Replaced those in place of
	// another copy, Swapped started swaps of resident experts.
	Promoted int64 `json:"promoted"`
	Replaced int64 `json:"replaced"`
	Swapped  int64 `json:"swapped"`
	// MadeResident counts experts that were brought to lent memory of the GPU.
	MadeResident int64 `json:"made_resident"`
	// Refused counts moves for which harvest refused the memory.
	Refused int64 `json:"refused"`
	// Readmitted counts readmissions of peers.
	Readmitted int64 `json:"peers_readmitted"`
}

// New makes a Rebalancer. Nothing moves before Tick, Start or FillAll.
func New(o Options) (*Rebalancer, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Rebalancer{o: o, store: o.Store, core: NewCore(o.Core), peers: map[device.Space]*peerState{}, readmission: harvest.NewReadmission(o.Harvest, o.Backoff, o.Log)}, nil
}

// Counts is a snapshot.
func (r *Rebalancer) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts
}

// Start starts a loop of the clock that ticks until Close. It logs an error once, until a
// tick succeeds or the error changes. Start is called at most once.
func (r *Rebalancer) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop != nil {
		return errors.New("rebalancer: start: already started")
	}
	logged := ""
	r.stop = r.o.Clock.Loop(r.o.Interval, func(now time.Duration) time.Duration {
		switch err := r.Tick(now); {
		case err == nil:
			logged = ""
		case errors.Is(err, harvest.ErrClosed):
			return -1
		case err.Error() != logged:
			logged = err.Error()
			r.o.Log.Warn("rebalance failed; offloaded experts are fetched from where they are", "err", err)
		}
		return r.o.Interval
	})
	return nil
}

// Close ends the loop and waits for it. Experts stay where they are.
func (r *Rebalancer) Close() error {
	r.mu.Lock()
	stop := r.stop
	r.mu.Unlock()
	if stop != nil {
		stop()
	}
	return nil
}

// Pause has ticks start nothing, until Resume, and gives up promotions that wait for room. Moves
// under way continue.
func (r *Rebalancer) Pause() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.paused, r.waiting = true, nil
}

// Resume ends a Pause.
func (r *Rebalancer) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.paused = false
}

// SetMigrationLimit changes CoreOptions.MigrationLimit.
func (r *Rebalancer) SetMigrationLimit(bytesPerSecond float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.o.MigrationLimit = bytesPerSecond
}

// SetFillPlaces has free places be filled with experts that are used little, too.
func (r *Rebalancer) SetFillPlaces(fill bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fill = fill
}

// Tick updates the rates and starts the moves that the limits allow. It does not wait for
// them. Harvest's refusals (no room, quota, rate) are not errors; other errors end the
// tick's moves.
func (r *Rebalancer) Tick(now time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.paused {
		return nil
	}
	failed := r.promoteWaiting(now)
	v := r.view(now, true)
	r.core.Step(v, now, func(m Move) bool {
		if failed != nil || r.backedOff(m, v, now) {
			return false
		}
		err := r.startMove(m, v, now)
		switch {
		case err == nil:
			return true
		case refused(err):
			r.backOff(m, v, now, err)
		case errors.Is(err, experts.ErrBusy), errors.Is(err, harvest.ErrRevoked):
		default:
			failed = err
		}
		return false
	})
	if err := r.want(&v); err != nil && failed == nil {
		failed = err
	}
	r.setCosts(v)
	if r.o.Places != nil {
		w := r.core.Worth(v)
		r.worth.Store(&w)
	}
	return failed
}

// Worth is what lent memory of the GPU is worth to experts, as of the latest Tick. It never waits.
// The caller does not change it.
func (r *Rebalancer) Worth() Worth {
	if w := r.worth.Load(); w != nil {
		return *w
	}
	return Worth{}
}

// want reports to harvest the peers that have no room for experts that are fetched from host
// memory, since the plan asks such a peer for nothing, so that no refused request shows it; and
// what they would be worth there, so that other clients give way to them.
func (r *Rebalancer) want(v *View) error {
	fetched := false
	for l, layer := range v.Placed {
		for e, h := range layer {
			fetched = fetched || h.Tier == experts.Host && !h.Moving && v.Uses[l][e] > 0
		}
	}
	if !fetched {
		return nil
	}
	demand, on := r.core.Demand(*v)
	for k, p := range v.Peers {
		if p.Free > 0 {
			continue
		}
		d := demand
		if !slices.Contains(on, k) {
			d = harvest.Demand{}
		}
		if err := r.o.Harvest.Want(p.From, d); err != nil {
			return err
		}
	}
	return nil
}

// promoteWaiting starts the promotions whose room is free by now.
func (r *Rebalancer) promoteWaiting(now time.Duration) (failed error) {
	r.waiting = slices.DeleteFunc(r.waiting, func(p promotion) bool {
		switch err := r.store.Promote(p.id, p.options); {
		case err == nil:
			r.counts.Replaced++
			return true
		case refused(err):
			if now < p.until {
				return false
			}
			r.counts.Refused++
		case errors.Is(err, experts.ErrBusy), errors.Is(err, harvest.ErrRevoked):
		default:
			failed = err
		}
		return true
	})
	return failed
}

// view collects what the core decides by. readmit: excluded peers are readmitted when
// due.
func (r *Rebalancer) view(now time.Duration, readmit bool) View {
	v := View{Moving: r.store.Poll(), Uses: r.store.Uses(), Placed: r.store.Placed()}
	r.becomingResident = slices.DeleteFunc(r.becomingResident, func(id experts.ID) bool {
		switch h := v.Placed[id.Layer][id.Expert]; {
		case h.Tier == experts.Resident:
			// A copy that cannot be freed now stays until it is revoked.
			_ = r.store.Demote(id)
			return true
		default:
			return !h.Moving // the swap failed
		}
	})
	v.Moving += len(r.waiting)
	for _, p := range r.waiting {
		v.Placed[p.id.Layer][p.id.Expert].Moving = true
	}
	if r.o.Places != nil {
		v.Places, v.FillPlaces = r.o.Places.FreePlaces(), r.fill
	}
	var health map[device.Space]error
	var room map[device.Space]int
	if r.o.Harvest != nil {
		health, room = r.o.Harvest.Health(), r.o.Harvest.Room(experts.HarvestClient, r.o.Core.Bytes)
		for _, p := range r.waiting {
			if _, ok := room[p.room]; ok {
				room[p.room]--
			}
		}
	}
	for _, l := range r.store.Links() {
		if _, gpu := l.From.GPU(); !gpu {
			v.Host = l
			continue
		}
		unhealthy, ok := health[l.From]
		free, lends := room[l.From]
		if !ok || !lends {
			continue
		}
		st := r.peers[l.From]
		if st == nil {
			st = &peerState{}
			r.peers[l.From] = st
		}
		if readmit {
			again := false
			if unhealthy, again = r.readmission.Look(l.From, unhealthy, now); again {
				r.counts.Readmitted++
			}
		}
		if unhealthy == nil {
			v.Peers = append(v.Peers, Peer{Link: l, Free: free, NotBefore: st.notBefore})
			if now < st.fullUntil {
				v.Peers[len(v.Peers)-1].Free = 0
			}
		}
	}
	return v
}

// startMove starts a move.
func (r *Rebalancer) startMove(m Move, v View, now time.Duration) error {
	if m.Kind == Swap || m.Kind == MakeResident {
		if err := r.startResident(m); err != nil {
			return err
		}
		if v.Placed[m.In.Layer][m.In.Expert].Tier == experts.Peer {
			r.becomingResident = append(r.becomingResident, m.In)
		}
		return nil
	}
	o := experts.PromoteOptions{
		Cost: harvest.Cost(m.Gain*float64(r.o.Core.Bytes), time.Second),
		Move: v.Placed[m.In.Layer][m.In.Expert].Tier == experts.Peer,
	}
	for _, k := range m.To {
		o.Peers = append(o.Peers, v.Peers[k].From)
	}
	err := r.promote(m, o, v, now)
	if err != nil {
		return err
	}
	for _, k := range m.To {
		r.peers[v.Peers[k].From].backoff = 0
	}
	return nil
}

// startResident starts a Swap or a MakeResident. Where an expert has yet to leave the place, a
// later Tick finds that free.
func (r *Rebalancer) startResident(m Move) error {
	if m.Kind == Swap {
		if err := r.store.Swap(m.In, m.Out); err != nil {
			return err
		}
		r.counts.Swapped++
		return nil
	}
	if m.Out != m.In {
		r.o.Places.Offload(m.Out)
	}
	switch err := r.o.Places.MakeResident(m.In); {
	case err == nil:
		r.counts.MadeResident++
	case m.Out == m.In || !errors.Is(err, experts.ErrBusy):
		return err
	}
	return nil // or Out has yet to leave: that counts as the move, and a later Tick fills the place
}

// promote starts the copy of a Promote or a Replace.
func (r *Rebalancer) promote(m Move, o experts.PromoteOptions, v View, now time.Duration) error {
	if m.Kind == Promote || m.Out == m.In {
		// An expert that moves to a faster peer has two copies for a time, unless that is
		// beyond the quota.
		err := r.store.Promote(m.In, o)
		switch {
		case err == nil && m.Kind == Promote:
			r.counts.Promoted++
		case err == nil:
			r.counts.Replaced++
		case m.Kind == Replace && errors.Is(err, harvest.ErrQuota):
			return r.replace(m, o, v, now)
		}
		return err
	}
	return r.replace(m, o, v, now)
}

// replace demotes an expert and promotes another in its place, as soon as fetches that
// still read the memory have ended.
func (r *Rebalancer) replace(m Move, o experts.PromoteOptions, v View, now time.Duration) error {
	if err := r.store.Demote(m.Out); err != nil {
		return err
	}
	err := r.store.Promote(m.In, o)
	if refused(err) {
		r.waiting = append(r.waiting, promotion{m.In, o, v.Placed[m.Out.Layer][m.Out.Expert].Device, now + maxRefusalBackoff})
		return nil
	}
	if err == nil {
		r.counts.Replaced++
	}
	return err
}

// refused reports whether harvest refused the memory.
func refused(err error) bool {
	return errors.Is(err, harvest.ErrNoCapacity) || errors.Is(err, harvest.ErrQuota) || errors.Is(err, harvest.ErrRate)
}

// backedOff reports whether all peers of the move are in back-off.
func (r *Rebalancer) backedOff(m Move, v View, now time.Duration) bool {
	return m.Kind != Swap && m.Kind != MakeResident && !slices.ContainsFunc(m.To, func(k int) bool {
		return now >= r.peers[v.Peers[k].From].notBefore
	})
}

// backOff starts the back-off of the move's peers after a refusal; it doubles with each
// consecutive one. A peer that the plan expected no room on is not why harvest has none:
// copies there may be replaced. A client that has reached its quota may still replace
// copies, too.
func (r *Rebalancer) backOff(m Move, v View, now time.Duration, err error) {
	r.counts.Refused++
	for _, k := range m.To {
		if v.Peers[k].Free <= 0 && errors.Is(err, harvest.ErrNoCapacity) {
			continue
		}
		st := r.peers[v.Peers[k].From]
		st.backoff = min(max(2*st.backoff, r.o.Interval), maxRefusalBackoff)
		st.notBefore = now + st.backoff
		if m.Kind == Promote && errors.Is(err, harvest.ErrQuota) {
			st.fullUntil = st.notBefore + maxRefusalBackoff
		}
	}
}

// setCosts passes the costs of losing copies to harvest, which revokes the cheapest.
func (r *Rebalancer) setCosts(v View) {
	for l, costs := range r.core.Costs(v) {
		for e, c := range costs {
			if v.Placed[l][e].Tier == experts.Peer {
				r.store.SetCost(experts.ID{Layer: l, Expert: e}, c)
			}
		}
	}
}

// FillAll gives every offloaded expert a peer copy, regardless of the limits, and waits
// for the copies. If they do not all fit, the error wraps ErrDoesNotFit and says how many
// do.
func (r *Rebalancer) FillAll(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	previous := -1
	for {
		if err := r.store.WaitMoves(ctx); err != nil {
			return fmt.Errorf("rebalancer: fill peer memory: %w", err)
		}
		now := r.o.Clock.Now()
		v := r.view(now, false)
		onPeers, offloaded := countOffloaded(v.Placed)
		if onPeers == offloaded {
			return nil
		}
		if onPeers <= previous {
			return r.doesNotFit(v, nil)
		}
		previous = onPeers
		for k := range v.Peers {
			v.Peers[k].NotBefore = 0
		}
		s := r.core.stats(v)
		s.Rates = zeroRates(v.Placed)
		var refusal error
		for _, m := range newPlanner(s, v.Capacity, r.o.Core.Tuning, now, true).plan() {
			if refusal = r.startMove(m, v, now); refusal != nil {
				break
			}
		}
		if refusal != nil && !errors.Is(refusal, harvest.ErrNoCapacity) {
			return r.doesNotFit(v, refusal)
		}
	}
}

// countOffloaded counts the experts with a peer copy, and all offloaded experts.
func countOffloaded(placed [][]experts.Placed) (onPeers, offloaded int) {
	for _, layer := range placed {
		for _, h := range layer {
			if h.Tier != experts.Resident {
				offloaded++
			}
			if h.Tier == experts.Peer {
				onPeers++
			}
		}
	}
	return onPeers, offloaded
}

// zeroRates are the rates of unused experts.
func zeroRates(placed [][]experts.Placed) [][]float64 {
	rates := make([][]float64, len(placed))
	for l := range placed {
		rates[l] = make([]float64, len(placed[l]))
	}
	return rates
}

func (r *Rebalancer) doesNotFit(v View, refusal error) error {
	onPeers, offloaded := countOffloaded(v.Placed)
	var where string
	for _, p := range v.Peers {
		n := 0
		for _, layer := range v.Placed {
			for _, h := range layer {
				if h.Tier == experts.Peer && h.Device == p.From {
					n++
				}
			}
		}
		where += fmt.Sprintf(", %d on %s", n, p.From)
	}
	err := fmt.Errorf("rebalancer: %w: %d of %d fit%s; an expert takes %d bytes; free memory on the peers, name more --peers, or offload fewer experts", ErrDoesNotFit, onPeers, offloaded, where, r.o.Core.Bytes)
	if refusal != nil {
		err = fmt.Errorf("%w (%w)", err, refusal)
	}
	return err
}
