package rebalancer

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// View is the state that a Core decides by.
type View struct {
	// Uses of each expert, cumulative: [position of the layer][expert].
	Uses   [][]int64
	Placed [][]experts.Placed
	// Capacity for copies; Moving is the number of migrations in progress.
	Capacity
	Moving int
}

// Core decides which moves to make: it keeps the rates, and passes on as many of Plan's
// moves as the limits allow. It is pure: time is passed in.
type Core struct {
	o     CoreOptions
	rates *Rates
	// budget is the number of bytes that may be migrated, as of at.
	budget float64
	at     time.Duration
}

// CoreOptions describe a Core.
type CoreOptions struct {
	// Bytes of one expert.
	Bytes int64
	// Dynamic: resident experts may be swapped.
	Dynamic bool
	// MigrationLimit is the maximum rate of migrations, in bytes per second; negative: no
	// limit. Default: a fifth of the host link's rate, or no limit if that is unknown.
	MigrationLimit float64
	// MaxMoving is the maximum number of migrations in progress: one that waits behind
	// many others would be based on outdated rates. Default: as many as make 1 GiB, at
	// least 16.
	MaxMoving int
	// HalfLife of rates: uses that long ago count half. Default: 10 s.
	HalfLife time.Duration
	// Tuning of Plan.
	Tuning Tuning
}

// EnsureDefaults returns o with every unset field at its default.
func (o CoreOptions) EnsureDefaults() CoreOptions {
	setDefault(&o.MaxMoving, max(16, int((1<<30)/max(o.Bytes, 1))))
	setDefault(&o.HalfLife, 10*time.Second)
	o.Tuning = o.Tuning.EnsureDefaults()
	return o
}

// NewCore returns a core without history.
func NewCore(o CoreOptions) *Core {
	o = o.EnsureDefaults()
	return &Core{o: o, rates: NewRates(o.HalfLife), budget: float64(o.Bytes)}
}

// defaultHostShare is the default migration limit as a share of the host link's rate.
const defaultHostShare = 0.2

// limit in bytes per second.
func (c *Core) limit(host experts.Link) float64 {
	switch l := c.o.MigrationLimit; {
	case l > 0:
		return l
	case l < 0 || host.BytesPerSecond <= 0:
		return math.Inf(1)
	}
	return defaultHostShare * host.BytesPerSecond
}

// burst is the time over which unused budget accumulates, at least one expert's bytes.
const burst = 250 * time.Millisecond

// Step offers moves to try, the most rewarding first, until as many are started as the
// limits allow. To in moves are indices into v.Peers. try reports whether it has started
// the move.
func (c *Core) Step(v View, now time.Duration, try func(Move) bool) {
	c.rates.Observe(v.Uses, now)
	limit := c.limit(v.Host)
	n := c.o.MaxMoving - v.Moving
	if !math.IsInf(limit, 1) {
		c.budget += limit * (now - c.at).Seconds()
		c.budget = min(c.budget, max(limit*burst.Seconds(), float64(c.o.Bytes)))
		n = min(n, int(c.budget/float64(c.o.Bytes)))
	}
	c.at = now
	if n <= 0 {
		return
	}
	for _, m := range Plan(c.stats(v), v.Capacity, c.o.Tuning, now) {
		if !try(m) {
			continue
		}
		c.budget -= float64(c.o.Bytes)
		if n--; n == 0 {
			return
		}
	}
}

func (c *Core) stats(v View) Stats {
	return Stats{Bytes: c.o.Bytes, Rates: c.rates.PerSecond(), SingleUse: c.rates.SingleUse(), Placed: v.Placed, Dynamic: c.o.Dynamic}
}

// saving is what one use of an expert saves if it is fetched in so much less time.
func saving(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// Costs is the cost of losing each peer copy (harvest.Cost), [position of the layer][expert]; 0
// without a copy. A use saves the difference of fetches from the host and from the peer.
func (c *Core) Costs(v View) [][]time.Duration {
	p := newPlanner(c.stats(v), v.Capacity, c.o.Tuning, c.at, false)
	costs := make([][]time.Duration, len(v.Placed))
	for l := range costs {
		costs[l] = make([]time.Duration, len(v.Placed[l]))
	}
	for _, it := range p.items {
		if it.at != hostMemory && it.at != residentMemory {
			costs[it.id.Layer][it.id.Expert] = harvest.Cost(it.rate, saving(p.host-p.seconds(it)))
		}
	}
	return costs
}

// Worth is what lent memory of the GPU is worth to experts, in seconds of copies that they save
// per second.
type Worth struct {
	// Next are the experts that would be made resident next, those of the largest worth first; at
	// most worthAhead.
	Next []float64
	// Lent are the experts in lent memory.
	Lent map[experts.ID]float64
	// Fetch is the duration of a fetch from host memory, in seconds.
	Fetch float64
}

// worthAhead is the maximum number of experts that Worth looks ahead.
const worthAhead = 64

// Worth returns it. No expert is next where none was used for a half-life: rates of before a
// pause take no memory from others.
func (c *Core) Worth(v View) Worth {
	p := newPlanner(c.stats(v), v.Capacity, c.o.Tuning, c.at, false)
	w := Worth{Lent: map[experts.ID]float64{}, Fetch: p.host}
	for _, it := range p.items {
		if it.lent {
			w.Lent[it.id] = it.rate * p.host
		}
	}
	if c.at-c.rates.at > c.o.HalfLife {
		return w
	}
	for _, it := range p.candidates(residentMemory) {
		if len(w.Next) == worthAhead || it.gain <= 0 {
			break
		}
		w.Next = append(w.Next, it.gain)
	}
	slices.SortFunc(w.Next, func(a, b float64) int { return cmp.Compare(b, a) }) // nearly equal ones are ordered by layers' shares
	return w
}

// Demand is what experts that are only in host memory would use of full peers, and on which
// peers, the fastest that are full: indices into v.Peers. These experts are those that would
// gain most, as many as the migration limit allows to copy in a short time. No peers: there is
// room on peers that are as fast, nothing would gain enough to pay for its copy, or no expert
// was used for a half-life: rates of before a pause displace nothing.
func (c *Core) Demand(v View) (d harvest.Demand, on []int) {
	if c.at-c.rates.at > c.o.HalfLife {
		return d, nil
	}
	p := newPlanner(c.stats(v), v.Capacity, c.o.Tuning, c.at, false)
	n := c.o.MaxMoving
	if limit := c.limit(v.Host); !math.IsInf(limit, 1) {
		n = max(1, min(n, int(limit*burst.Seconds()/float64(c.o.Bytes))))
	}
	for k, cl := range p.classes {
		if slices.ContainsFunc(cl.peers, func(i int) bool { return v.Peers[i].Free > 0 }) {
			return d, nil
		}
		d = harvest.Demand{Client: experts.HarvestClient, Bytes: c.o.Bytes}
		for _, it := range p.candidates(k) {
			if it.at == hostMemory && d.Objects < n && p.worthwhile(it, nil, it.gain, 0) {
				d.Objects++
				d.Cost += harvest.Cost(it.rate, saving(p.host-cl.seconds))
			}
		}
		if d.Objects > 0 {
			return d, cl.peers
		}
	}
	return d, nil
}
