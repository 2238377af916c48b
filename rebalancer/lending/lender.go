package lending

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/rebalancer"
)

// Store is the store that memory is lent to: *experts.Store. Its methods never wait, but for
// WaitMoves.
type Store interface {
	AddPlace(device.Region) (*experts.LentPlace, error)
	RemovePlace(*experts.LentPlace) (gone bool, err error)
	PlaceState(*experts.LentPlace) experts.PlaceState
	WaitMoves(context.Context) error
}

// Options describe a Lender.
type Options struct {
	// Manager has the extents; Pool their memory.
	Manager *kvcache.Manager
	Pool    *kvcache.Pool
	Store   Store
	// Worth is what memory is worth to experts: Rebalancer.Worth.
	Worth func() rebalancer.Worth
	// Waited is how long compute has waited for copies of experts so far, and Copied how long
	// these copies take, in seconds.
	Waited, Copied func() float64
	// ReloadSeconds is what the load of a block from a tier takes; 0: there is none. Default: 0.
	ReloadSeconds func() float64
	// Clock is the machine's.
	Clock interface{ Now() time.Duration }
	// Core has the tuning; its ExtentBlocks are set from Manager.
	Core CoreOptions
	// Interval between two decisions. Default: 100 ms.
	Interval time.Duration
	// Log of what fails. Default: discarded.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.ReloadSeconds == nil {
		o.ReloadSeconds = func() float64 { return 0 }
	}
	setDefault(&o.Interval, 100*time.Millisecond)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Manager != nil && o.Manager.Extents() > 0 {
		_, o.Core.ExtentBlocks = o.Manager.ExtentBlocks(0)
	}
	o.Core = o.Core.EnsureDefaults()
	return o
}

// Validate reports the first invalid option; defaults must be set.
func (o Options) Validate() error {
	switch {
	case o.Manager == nil || o.Pool == nil || o.Store == nil || o.Worth == nil || o.Waited == nil || o.Copied == nil || o.Clock == nil:
		return errors.New("lending: an option without a default is not set")
	case o.Manager.Extents() == 0:
		return errors.New("lending: the manager has no extents")
	case o.Core.Factor < 1:
		return fmt.Errorf("lending: factor %v is below 1: memory would be moved back and forth; set at least 1", o.Core.Factor)
	}
	return nil
}

// Stats are the state and the counts of a Lender. They have a JSON form.
type Stats struct {
	// Extents of the KV cache can be lent, of ExtentBytes each. Lent ones are the experts' now;
	// Withdrawing ones are still used by sequences, Returning ones still by experts.
	Extents     int   `json:"extents"`
	ExtentBytes int64 `json:"extent_bytes"`
	Lent        int   `json:"lent_extents"`
	Withdrawing int   `json:"withdrawing_extents"`
	Returning   int   `json:"returning_extents"`
	// ToExperts and ToKV count extents that were lent, and that came back.
	ToExperts int64 `json:"lent_to_experts"`
	ToKV      int64 `json:"returned_to_kv"`
	// WorthToExperts is what the next extent would save experts, WorthToKV what one more would
	// save the KV cache, in seconds per second, at the latest decision.
	WorthToExperts float64 `json:"worth_to_experts"`
	WorthToKV      float64 `json:"worth_to_kv"`
	// Target is the number of extents that SetTarget asks for; nil: the worth decides.
	Target *int `json:"target_extents"`
}

// Lender carries out what a Core decides. One goroutine calls its methods, but for Stats and
// SetTarget, which any may call.
type Lender struct {
	o     Options
	core  *Core
	loans []*loan
	next  time.Duration // decision
	// blockSeconds is what computing a block takes; 0: unknown.
	blockSeconds float64
	exposure     exposure
	// retargeted: the target was set since the latest decision.
	retargeted atomic.Bool

	mu    sync.Mutex
	stats Stats // and the target
}

// loan is an extent that is not the KV cache's, or not for long.
type loan struct {
	extent int
	place  *experts.LentPlace // nil: the extent is still being withdrawn
	since  time.Duration
	// used is when an expert was last seen there.
	used time.Duration
	// back: it is to be returned.
	back bool
}

// withdrawLimit is the time after which an extent that sequences still use is left to them.
const withdrawLimit = 10 * time.Second

// New makes a Lender. Nothing is lent before Turn.
func New(o Options) (*Lender, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	l := &Lender{o: o, core: NewCore(o.Core)}
	l.stats = Stats{Extents: o.Manager.Extents(), ExtentBytes: int64(o.Core.ExtentBlocks) * o.Pool.Shape().BlockBytes()}
	return l, nil
}

// Computed reports that so many tokens of prompts took so many seconds.
func (l *Lender) Computed(tokens int, seconds float64) {
	if tokens <= 0 || seconds <= 0 {
		return
	}
	const weight = 0.1 // of a step in the mean
	now := seconds / float64(tokens) * float64(l.o.Manager.BlockTokens())
	if l.blockSeconds == 0 {
		l.blockSeconds = now
	}
	l.blockSeconds += weight * (now - l.blockSeconds)
}

// Turn is called between steps, before each is planned, with how many blocks the first waiting
// request needs if it waits for them, else 0, and the number of running sequences. It moves
// extents on that are free by now, and decides anew where that is due. It never waits.
func (l *Lender) Turn(lacking, running int) {
	now := l.o.Clock.Now()
	l.advance(now)
	if l.retargeted.Swap(false) || now >= l.next || lacking > l.o.Manager.Free() && len(l.loans) > 0 {
		l.next = now + l.o.Interval
		v := l.view(lacking, running, now)
		d := l.core.Decide(v, now)
		l.apply(d, now)
		l.note(&v)
	}
	l.count()
}

// SetTarget has so many extents be lent from the next Turn on, of those that there are, whatever they
// are worth; nil: the worth decides again.
func (l *Lender) SetTarget(extents *int) {
	if extents != nil {
		n := min(max(*extents, 0), l.o.Manager.Extents())
		extents = &n
	}
	l.add(func(s *Stats) { s.Target = extents })
	l.retargeted.Store(true)
}

// advance moves loans on whose extents nobody else uses any more.
func (l *Lender) advance(now time.Duration) {
	kept := l.loans[:0]
	for _, x := range l.loans {
		if l.step(x, now) {
			kept = append(kept, x)
		}
	}
	clear(l.loans[len(kept):])
	l.loans = kept
}

// step moves one loan on. False: it has ended.
func (l *Lender) step(x *loan, now time.Duration) bool {
	m := l.o.Manager
	switch {
	case x.place == nil && (x.back || now-x.since > withdrawLimit && m.Extent(x.extent).Busy > 0):
		m.Restore(x.extent)
		return false
	case x.place == nil && m.Extent(x.extent).Busy == 0:
		place, err := l.o.Store.AddPlace(l.region(x.extent))
		if err != nil {
			l.o.Log.Warn("memory of the KV cache not lent to experts", "err", err)
			m.Restore(x.extent)
			return false
		}
		x.place, x.since = place, now
		l.add(func(s *Stats) { s.ToExperts++ })
	case x.place != nil && x.back:
		gone, err := l.o.Store.RemovePlace(x.place)
		if err != nil {
			l.o.Log.Warn("memory not returned to the KV cache", "err", err)
		}
		if gone {
			m.Restore(x.extent)
			l.add(func(s *Stats) { s.ToKV++ })
			return false
		}
	}
	return true
}

// region is the memory of an extent.
func (l *Lender) region(extent int) device.Region {
	first, blocks := l.o.Manager.ExtentBlocks(extent)
	r := l.o.Pool.Run(first, blocks)
	return r.Slice(skew(r), r.Bytes-skew(r))
}

// skew is the number of bytes before the first aligned address of a region.
func skew(r device.Region) int64 { return device.Align(int64(r.Addr)) - int64(r.Addr) }

// apply carries a decision out as far as that is possible now.
func (l *Lender) apply(d Decision, now time.Duration) {
	lent := l.lent()
	for _, i := range d.Return {
		lent[i].back = true
	}
	for range d.Lend {
		x, ok := l.o.Manager.LeastUsed()
		if !ok {
			break
		}
		l.o.Manager.Withdraw(x)
		l.loans = append(l.loans, &loan{extent: x, since: now})
	}
	l.advance(now)
}

// Move lends so many extents more, or has so many returned where the number is negative, whatever
// they are worth. Tests and measurements use it; like Turn it is called between steps.
func (l *Lender) Move(extents int) {
	d := Decision{Lend: max(extents, 0)}
	for i := range min(max(-extents, 0), len(l.lent())) {
		d.Return = append(d.Return, i)
	}
	l.apply(d, l.o.Clock.Now())
	l.count()
}

// lent are the loans that are not being returned.
func (l *Lender) lent() []*loan {
	var lent []*loan
	for _, x := range l.loans {
		if !x.back {
			lent = append(lent, x)
		}
	}
	return lent
}

// view collects what the core decides by.
func (l *Lender) view(lacking, running int, now time.Duration) View {
	m, w := l.o.Manager, l.o.Worth()
	v := View{
		Reuse: m.Reuse(), Present: m.Present(), Free: m.Free(), Lacking: lacking, Running: running,
		BlockSeconds: l.blockSeconds, Next: w.Next, Fetch: w.Fetch, Target: l.Stats().Target,
	}
	if s := l.o.ReloadSeconds(); s > 0 && (s < v.BlockSeconds || v.BlockSeconds == 0) {
		v.BlockSeconds = s
	}
	l.exposure.observe(l.o.Waited(), l.o.Copied(), now)
	v.Exposed, v.Load = l.exposure.exposed(), l.exposure.load()
	for _, x := range l.lent() {
		e := Extent{Since: x.since, Free: true}
		if x.place != nil {
			if s := l.o.Store.PlaceState(x.place); s.Occupied {
				x.used, e.Free = now, false
				var known bool
				// One that moves, or has come since Worth was told, was chosen before the next one.
				if e.Worth, known = w.Lent[s.Expert]; (s.Moving || !known) && len(w.Next) > 0 {
					e.Worth = w.Next[0]
				} else if !known {
					e.Worth = largest(w.Lent)
				}
			}
		}
		e.FreeSince = max(x.since, x.used)
		v.Lent = append(v.Lent, e)
	}
	if x, ok := m.LeastUsed(); ok {
		v.Least = m.Extent(x)
	} else {
		v.Next = nil
	}
	return v
}

func (l *Lender) add(f func(*Stats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.stats)
}

// count counts extents by state.
func (l *Lender) count() {
	l.add(func(s *Stats) {
		s.Lent, s.Withdrawing, s.Returning = 0, 0, 0
		for _, x := range l.loans {
			switch {
			case x.place == nil:
				s.Withdrawing++
			case x.back:
				s.Returning++
			default:
				s.Lent++
			}
		}
	})
}

// note keeps the worths of a decision.
func (l *Lender) note(v *View) {
	l.add(func(s *Stats) {
		s.WorthToExperts = 0
		if len(v.Next) > 0 {
			s.WorthToExperts = v.Next[0] * v.Exposed
		}
		s.WorthToKV = float64(min(v.Reuse.Lost, l.o.Core.ExtentBlocks)) * l.core.wanted() * v.BlockSeconds
	})
}

// Stats is a snapshot.
func (l *Lender) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// Close takes all memory back. It waits for copies of experts to it.
func (l *Lender) Close() error {
	defer l.count()
	for _, x := range l.loans {
		x.back = true
	}
	l.advance(l.o.Clock.Now())
	if len(l.loans) == 0 {
		return nil
	}
	if err := l.o.Store.WaitMoves(context.Background()); err != nil {
		return fmt.Errorf("lending: %w", err)
	}
	l.advance(l.o.Clock.Now())
	if n := len(l.loans); n > 0 {
		return fmt.Errorf("lending: %d extents are still in use", n)
	}
	return nil
}

// exposure estimates for which share of experts' copies compute waits: decaying means with a
// half-life of exposureHalfLife.
type exposure struct {
	at, waited, copied               float64 // as of the latest call
	meanTime, meanWaited, meanCopied float64
	begun                            bool
}

// exposureHalfLife is in seconds: for so long an extent stays with a side.
const exposureHalfLife = 5

// minExposed is the share of copies for which compute waits above which each further copy is
// waited for.
const minExposed = 0.05

func (e *exposure) observe(waited, copied float64, now time.Duration) {
	t := now.Seconds()
	dt := min(t-e.at, 1)
	if e.begun && dt > 0 {
		keep := math.Exp2(-dt / exposureHalfLife)
		e.meanTime = keep*e.meanTime + dt
		e.meanWaited = keep*e.meanWaited + (waited - e.waited)
		e.meanCopied = keep*e.meanCopied + max(copied-e.copied, 0) // copies that are skipped are taken back
	}
	e.at, e.waited, e.copied, e.begun = t, waited, copied, true
}

// exposed is the share for which compute would wait of one copy more or less.
func (e *exposure) exposed() float64 { return share(share(e.meanWaited, e.meanCopied), minExposed) }

// load is the share of time in which experts are copied.
func (e *exposure) load() float64 { return share(e.meanCopied, e.meanTime) }

// largest is the worth of the expert that is worth most; 0: there is none.
func largest(of map[experts.ID]float64) (most float64) {
	for _, x := range of {
		most = max(most, x)
	}
	return most
}
