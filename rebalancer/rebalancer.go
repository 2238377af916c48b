package rebalancer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// Store is what is rebalanced: *experts.Store. Its methods may be called while steps
// run, and none but WaitMoves waits.
type Store interface {
	// Plan says how large experts are, and whether local ones may be swapped.
	Plan() experts.Plan
	Uses() [][]int64
	Placed() [][]experts.Placed
	// Links into the compute GPU: of the host and of peers.
	Links() []experts.Link

	Promote(experts.ID, experts.PromoteOptions) error
	Demote(experts.ID) error
	Swap(in, out experts.ID) error
	SetCost(experts.ID, time.Duration)
	Poll() (moving int)
	WaitMoves(context.Context) error
}

// Options describe a Rebalancer.
type Options struct {
	Store Store
	// Harvest lends the memory that the store's copies lie in. Nil: there is none, and
	// all there is to do is to swap local experts where the store allows that.
	Harvest *harvest.Runtime
	// Clock is the machine's, for Start and FillAll.
	Clock device.Clock
	// Core says how fast, and what is worth it; its Bytes and Adaptive are the store's.
	Core CoreOptions
	// Interval between two ticks of the loop that Start begins. Default: 100 ms.
	Interval time.Duration
	// Backoff is after how long a peer that was left out because copies failed is tried
	// again; each further time it takes twice as long, up to 5 min. Default: 5 s.
	Backoff time.Duration
	// Log hears of what an operator may want to know. Default: nobody.
	Log *slog.Logger
}

// EnsureDefaults returns o with every unset field at its default.
func (o Options) EnsureDefaults() Options {
	setDefault(&o.Interval, 100*time.Millisecond)
	setDefault(&o.Backoff, 5*time.Second)
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

// Validate says what is wrong with o, whose defaults are set.
func (o Options) Validate() error {
	c := o.Core
	switch {
	case o.Store == nil:
		return errors.New("rebalancer: no store")
	case o.Clock == nil:
		return errors.New("rebalancer: no clock")
	case o.Interval < 0 || o.Backoff < 0 || c.HalfLife < 0 || c.Tuning.Horizon < 0:
		return fmt.Errorf("rebalancer: a duration under 0: interval %v, back-off %v, half-life %v, horizon %v", o.Interval, o.Backoff, c.HalfLife, c.Tuning.Horizon)
	case c.Tuning.Hysteresis < 1:
		return fmt.Errorf("rebalancer: a hysteresis of %v: experts would go to and fro; give it at least 1", c.Tuning.Hysteresis)
	case c.MaxMoving < 0:
		return fmt.Errorf("rebalancer: %d experts on their way: allow at least one", c.MaxMoving)
	}
	return nil
}

// ErrDoesNotFit: peers have no room for every offloaded expert.
var ErrDoesNotFit = errors.New("peer memory does not hold all offloaded experts")

// maxBackoff is the longest a peer is left out before it is tried again; maxRefusalBackoff the
// longest that a refusal of free memory is believed in.
const (
	maxBackoff        = 5 * time.Minute
	maxRefusalBackoff = time.Second
)

// Rebalancer carries out what a Core decides. All methods but Close may be called
// from any goroutine; Tick, FillAll and the loop take turns.
type Rebalancer struct {
	o     Options
	store Store

	mu     sync.Mutex
	core   *Core
	peers  map[device.Space]*peerState
	counts Counts
	// becomingResident are experts that a Swap is to make local: their peer copy is given
	// back when they are.
	becomingResident []experts.ID

	stop func() // ends the loop; nil before Start
}

// peerState is what is remembered of a peer.
type peerState struct {
	// notBefore is until when it is not asked again after a refusal, wait for how long
	// that is, and fullUntil until when what is free there is not for us.
	notBefore, backoff, fullUntil time.Duration
	// left out since a tick, until which it stays so, and the delay that led there.
	excluded            bool
	retryAt, retryDelay time.Duration
	// unhealthy is what the peer's readings say, which trying again does not mend.
	unhealthy string
	// readmittedAt is when it was last taken back.
	readmittedAt time.Duration
}

// Counts are what a Rebalancer has done since New.
type Counts struct {
	// Promoted counts copies to free peer memory begun, Replaced those in place of
	// another, Swapped swaps of local experts begun.
	Promoted int64 `json:"promoted"`
	Replaced int64 `json:"replaced"`
	Swapped  int64 `json:"swapped"`
	// Refused counts moves that there was no room for after all.
	Refused int64 `json:"refused"`
	// Readmitted counts peers that were tried again.
	Readmitted int64 `json:"peers_readmitted"`
}

// New makes one. Nothing moves before Tick, Start or FillAll.
func New(o Options) (*Rebalancer, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Rebalancer{o: o, store: o.Store, core: NewCore(o.Core), peers: map[device.Space]*peerState{}}, nil
}

// Counts is a snapshot.
func (r *Rebalancer) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts
}

// Start begins a loop of the clock that ticks until Close. It says once what goes wrong,
// until it does not or something else does. Start is called at most once.
func (r *Rebalancer) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop != nil {
		return errors.New("rebalancer: start: it was started before")
	}
	told := ""
	r.stop = r.o.Clock.Loop(r.o.Interval, func(now time.Duration) time.Duration {
		switch err := r.Tick(now); {
		case err == nil:
			told = ""
		case errors.Is(err, harvest.ErrClosed):
			return -1
		case err.Error() != told:
			told = err.Error()
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

// Tick looks at what has happened and begins the moves that the limits allow. It does
// not wait for them. That a peer has no room after all, or harvest's policy lets
// nothing more be had, is no error; others end the tick's moves.
func (r *Rebalancer) Tick(now time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.view(now, true)
	var failed error
	r.core.Step(v, now, func(m Move) bool {
		if failed != nil || r.backedOff(m, v, now) {
			return false
		}
		err := r.startMove(m, v)
		switch {
		case err == nil:
			return true
		case errors.Is(err, harvest.ErrNoCapacity), errors.Is(err, harvest.ErrQuota), errors.Is(err, harvest.ErrRate):
			r.backOff(m, v, now, err)
		case errors.Is(err, experts.ErrBusy), errors.Is(err, harvest.ErrRevoked):
		default:
			failed = err
		}
		return false
	})
	r.setCosts(v)
	return failed
}

// view gathers what the core needs. mend takes back peers whose time has come.
func (r *Rebalancer) view(now time.Duration, mend bool) View {
	v := View{Moving: r.store.Poll(), Uses: r.store.Uses(), Placed: r.store.Placed()}
	r.becomingResident = slices.DeleteFunc(r.becomingResident, func(id experts.ID) bool {
		switch h := v.Placed[id.Layer][id.Expert]; {
		case h.Tier == experts.Resident:
			// A copy that cannot be given back now stays until it is revoked.
			_ = r.store.Demote(id)
			return true
		default:
			return !h.Moving // it came to nothing
		}
	})
	var health map[device.Space]error
	var room map[device.Space]int
	if r.o.Harvest != nil {
		health, room = r.o.Harvest.Health(), r.o.Harvest.Room(experts.HarvestClient, r.o.Core.Bytes)
	}
	for _, l := range r.store.Links() {
		if _, gpu := l.From.GPU(); !gpu {
			v.Host = l
			continue
		}
		sick, ok := health[l.From]
		if !ok {
			continue
		}
		st := r.peers[l.From]
		if st == nil {
			st = &peerState{}
			r.peers[l.From] = st
		}
		if mend {
			sick = r.readmit(st, l.From, sick, now)
		}
		if sick == nil {
			v.Peers = append(v.Peers, Peer{Link: l, Free: room[l.From], NotBefore: st.notBefore})
			if now < st.fullUntil {
				v.Peers[len(v.Peers)-1].Free = 0
			}
		}
	}
	return v
}

// readmit takes a peer back that was left out because copies failed, when its time has
// come. Where its own readings say that it is sick it is left at that. The result is why
// the peer must not be used after that, nil where it may.
func (r *Rebalancer) readmit(st *peerState, peer device.Space, sick error, now time.Duration) error {
	switch {
	case sick == nil:
		if st.retryDelay > 0 && !st.excluded && now-st.readmittedAt > 2*st.retryDelay {
			st.retryDelay = 0 // it has been well for longer than it was left out
		}
		st.excluded, st.unhealthy = false, ""
		return nil
	case sick.Error() == st.unhealthy:
		return sick
	case !st.excluded:
		st.excluded, st.unhealthy = true, ""
		st.retryDelay = min(max(2*st.retryDelay, r.o.Backoff), maxBackoff)
		st.retryAt = now + st.retryDelay
		return sick
	case now < st.retryAt:
		return sick
	}
	st.excluded = false
	if err := r.o.Harvest.Readmit(peer); err != nil {
		st.unhealthy = sick.Error()
		return sick
	}
	if again := r.o.Harvest.Health()[peer]; again != nil {
		st.unhealthy = again.Error()
		return again
	}
	r.counts.Readmitted++
	st.readmittedAt = now
	r.o.Log.Info("retrying a disabled peer", "device", peer.String(), "after", st.retryDelay, "cause", sick.Error())
	return nil
}

// startMove begins one move.
func (r *Rebalancer) startMove(m Move, v View) error {
	if m.Kind == Swap {
		if err := r.store.Swap(m.In, m.Out); err != nil {
			return err
		}
		r.counts.Swapped++
		if v.Placed[m.In.Layer][m.In.Expert].Tier == experts.Peer {
			r.becomingResident = append(r.becomingResident, m.In)
		}
		return nil
	}
	if m.Kind == Replace {
		if err := r.store.Demote(m.Out); err != nil {
			return err
		}
		if v.Placed[m.In.Layer][m.In.Expert].Tier == experts.Peer {
			if err := r.store.Demote(m.In); err != nil {
				return err
			}
		}
	}
	var o experts.PromoteOptions
	for _, k := range m.To {
		o.Peers = append(o.Peers, v.Peers[k].From)
	}
	o.Cost = time.Duration(m.Gain * float64(r.o.Core.Bytes) * float64(r.o.Core.Tuning.Horizon))
	if err := r.store.Promote(m.In, o); err != nil {
		return err
	}
	for _, k := range m.To {
		r.peers[v.Peers[k].From].backoff = 0
	}
	if m.Kind == Replace {
		r.counts.Replaced++
	} else {
		r.counts.Promoted++
	}
	return nil
}

// backedOff says that all peers that the move may go to have just refused another.
func (r *Rebalancer) backedOff(m Move, v View, now time.Duration) bool {
	return m.Kind != Swap && !slices.ContainsFunc(m.To, func(k int) bool {
		return now >= r.peers[v.Peers[k].From].notBefore
	})
}

// backOff leaves the move's peers alone for a while, for longer each time in a row. A
// client that has its quota may still replace what it has.
func (r *Rebalancer) backOff(m Move, v View, now time.Duration, err error) {
	r.counts.Refused++
	for _, k := range m.To {
		st := r.peers[v.Peers[k].From]
		st.backoff = min(max(2*st.backoff, r.o.Interval), maxRefusalBackoff)
		st.notBefore = now + st.backoff
		if m.Kind == Promote && errors.Is(err, harvest.ErrQuota) {
			st.fullUntil = st.notBefore + maxRefusalBackoff
		}
	}
}

// setCosts tells harvest what can best be spared.
func (r *Rebalancer) setCosts(v View) {
	for l, costs := range r.core.Costs(v) {
		for e, c := range costs {
			if v.Placed[l][e].Tier == experts.Peer {
				r.store.SetCost(experts.ID{Layer: l, Expert: e}, c)
			}
		}
	}
}

// FillAll gives every offloaded expert a copy in peer memory, whatever the limits,
// and waits until all are there. An error wraps ErrDoesNotFit where they do not all
// fit, and says how many do.
func (r *Rebalancer) FillAll(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	there := -1
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
		if onPeers <= there {
			return r.doesNotFit(v, nil)
		}
		there = onPeers
		for k := range v.Peers {
			v.Peers[k].NotBefore = 0
		}
		s := r.core.stats(v)
		s.Rates = zeroRates(v.Placed)
		var refusal error
		for _, m := range newPlanner(s, v.Capacity, r.o.Core.Tuning, now, true).plan() {
			if refusal = r.startMove(m, v); refusal != nil {
				break
			}
		}
		if refusal != nil && !errors.Is(refusal, harvest.ErrNoCapacity) {
			return r.doesNotFit(v, refusal)
		}
	}
}

// countOffloaded counts the experts that have a copy on a peer and all that are not local.
func countOffloaded(homes [][]experts.Placed) (onPeers, offloaded int) {
	for _, layer := range homes {
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

// zeroRates are those of experts that nobody has used.
func zeroRates(homes [][]experts.Placed) [][]float64 {
	rates := make([][]float64, len(homes))
	for l := range homes {
		rates[l] = make([]float64, len(homes[l]))
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
	err := fmt.Errorf("rebalancer: %w: %d of %d fit%s; an expert takes %d bytes; free memory on the peers, name more peers, or offload fewer experts", ErrDoesNotFit, onPeers, offloaded, where, r.o.Core.Bytes)
	if refusal != nil {
		err = fmt.Errorf("%w (%w)", err, refusal)
	}
	return err
}
