package rebalancer

import (
	"math"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// View is what a Core is shown of the world at one moment.
type View struct {
	// Uses of each expert, cumulative: [position of the layer][expert].
	Uses   [][]int64
	Placed [][]experts.Placed
	// Capacity there is; Moving is how many experts are on their way.
	Capacity
	Moving int
}

// Core is the decision without the world: it keeps the rates, and lets through as
// many of Plan's moves as the limits allow. It is pure: time comes with the view.
type Core struct {
	o     CoreOptions
	rates *Rates
	// budget are bytes that may be moved now, as of at.
	budget float64
	at     time.Duration
}

// CoreOptions describe a Core.
type CoreOptions struct {
	// Bytes of one expert.
	Bytes int64
	// Dynamic says that local experts may be swapped.
	Dynamic bool
	// MigrationLimit is how fast experts are moved, in bytes per second; under 0: no
	// limit. Default: a fifth of the host link's rate, or no limit where that is not
	// known.
	MigrationLimit float64
	// MaxMoving is how many experts are on their way at a time, at most: what waits
	// behind many others was decided on rates that have grown old. Default: as many as
	// make 1 GiB, at least 16.
	MaxMoving int
	// HalfLife of rates: what lies so far back counts half. Default: 10 s.
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

// NewCore makes one.
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

// burst is how long nothing may be moved before more is not saved up. One expert
// always is.
const burst = 250 * time.Millisecond

// Step offers moves to try, the most rewarding first, until as many are begun as the
// limits allow; To in them are indices into v.Peers. try says whether it has begun
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

// Costs is what losing each peer copy would cost: the seconds that its expert's
// fetches would take longer within the horizon. [position of the layer][expert]; 0
// where there is no copy.
func (c *Core) Costs(v View) [][]time.Duration {
	p := newPlanner(c.stats(v), v.Capacity, c.o.Tuning, c.at, false)
	costs := make([][]time.Duration, len(v.Placed))
	for l := range costs {
		costs[l] = make([]time.Duration, len(v.Placed[l]))
	}
	for _, it := range p.items {
		if it.at != hostMemory && it.at != residentMemory {
			saved := it.rate * (p.host - p.seconds(it)) * c.o.Tuning.Horizon.Seconds()
			costs[it.id.Layer][it.id.Expert] = time.Duration(saved * float64(time.Second))
		}
	}
	return costs
}
