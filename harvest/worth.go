package harvest

import (
	"math"
	"sync/atomic"
	"time"
)

// Horizon is the time over which the cost of losing a copy is counted: until about then its
// client does without.
const Horizon = 10 * time.Second

// Cost is the cost of losing copies: the time that their client is expected to lose within
// Horizon. usesPerSecond is the number of uses of all of them, and saved what one use saves
// over the client's next best source: host memory instead of the peer's, say, or computing
// the content again.
//
// Divided by Horizon it is what the copies are worth: seconds saved per second. It is the
// same quantity for every client, so that costs per byte compare: those of experts, whose
// rates of use the rebalancer knows, and those of KV blocks, whose rate of use is that of
// hits per block.
func Cost(usesPerSecond float64, saved time.Duration) time.Duration {
	cost := usesPerSecond * float64(saved) * Horizon.Seconds()
	if !(cost > 0) {
		return 0
	}
	return time.Duration(min(cost, float64(maxCost)))
}

// maxCost of one handle or slab: sums of costs do not overflow.
const maxCost = math.MaxInt64 / (1 << 20)

// Use is how a client uses its objects: the cheap way to give many of them their cost.
type Use struct {
	// PerSecond is the number of uses of one object that the client holds, per second, on
	// average (see Reuse), and Saved what one use saves: see Cost.
	PerSecond float64
	Saved     time.Duration
	// Wanted is how much more memory the client would use, in bytes, and WantedPerSecond how
	// often one object there would be used: KV blocks that are only in host memory, and their
	// hits, say. A request of the client without a Cost is worth that.
	Wanted          int64
	WantedPerSecond float64
}

// SetUse sets how a client uses its objects, for all of them at once: it takes the same time
// whatever their number. The cost of a slab is the sum of its handles' own costs, and for
// clients with a Use the number of its objects times that of one. In slabs that the client
// shares with no other, the rate is corrected by the uses that harvest counts in each slab
// (Handle.CountUse): slabs of objects that are used much cost more than others.
//
// Call it at least once a second while the client works. In a pause, without calls, the rates
// of its slabs stay as they are: what was used before a night without requests is still worth
// something in the morning. A client that sets the cost of each handle does not need it.
func (r *Runtime) SetUse(clientName string, u Use) error {
	setDefault(&clientName, unnamed.name)
	return r.update(func(c *controller) error {
		c.setUse(clientName, u, r.now())
		return nil
	})
}

// maxUseInterval is the maximum time that counts between two calls of SetUse or Reuse.Observe.
const maxUseInterval = time.Second

func (c *controller) setUse(name string, u Use, now time.Duration) {
	client := c.client(name)
	client.use = u
	client.active += min(now-client.useAt, maxUseInterval)
	client.useAt = now
}

// Reuse estimates how often one of a set of objects is used, from the number of uses and of
// objects: an exponentially decaying mean. A second mean has a shorter half-life: if they differ
// by more than chance explains, the use has changed, and the first is reset to the second. It is
// pure, and the zero Reuse has seen nothing.
type Reuse struct {
	uses        int64 // so far
	at          time.Duration
	long, short useMean
}

// useMean is a decaying mean: a sum of uses, and of seconds of objects.
type useMean struct{ sum, seconds float64 }

const (
	// Uses so long ago count half.
	reuseHalfLife, shortReuseHalfLife = Horizon, Horizon / 4
	// changeDeviations is the difference of the means that counts as a change, in standard
	// deviations.
	changeDeviations = 3
)

// add ages the mean by dt, in which there were so many uses of so many objects.
func (m *useMean) add(uses, objects float64, dt, halfLife time.Duration) {
	keep := decayFactor(dt, halfLife)
	weight := (1 - keep) * halfLife.Seconds() / math.Ln2
	m.sum = keep*m.sum + uses/dt.Seconds()*weight
	m.seconds = keep*m.seconds + objects*weight
}

func (m *useMean) perSecond() float64 {
	if m.seconds == 0 {
		return 0
	}
	return m.sum / m.seconds
}

// Observe records how many uses there have been in all, and how many objects since the last
// call, which may be a mean. The clock and the uses start at 0. Call it at least once a second
// while there is work: a pause counts as a second.
func (r *Reuse) Observe(uses int64, objects float64, now time.Duration) {
	r.observe(uses, objects, now, min(now-r.at, maxUseInterval))
}

// observe is Observe, with the time for which the call counts.
func (r *Reuse) observe(uses int64, objects float64, now, dt time.Duration) {
	if dt <= 0 {
		return
	}
	n := float64(uses - r.uses)
	r.long.add(n, objects, dt, reuseHalfLife)
	r.short.add(n, objects, dt, shortReuseHalfLife)
	r.uses, r.at = uses, now
	// The variance of the sum of the short mean is half of its expectation.
	expected := r.long.perSecond() * r.short.seconds
	if math.Abs(r.short.sum-expected) > changeDeviations*math.Sqrt(max(r.short.sum, expected)/2) {
		r.long.sum = r.short.perSecond() * r.long.seconds
	}
}

// PerSecond is the rate of use of one object; 0 before there was one.
func (r *Reuse) PerSecond() float64 { return r.long.perSecond() }

// slabUse is the use of a slab's objects.
type slabUse struct {
	count atomic.Int64
	reuse Reuse // of all of them, as one
}

// priorTime is the time for which the client's mean counts in the rate of a slab.
const priorTime = 2 * time.Second

// perSecond estimates the rate of all of the slab's objects, of which the client expects the
// rate expected; now is on the clock of the client's work.
func (u *slabUse) perSecond(expected float64, now time.Duration) float64 {
	u.reuse.observe(u.count.Load(), 1, now, now-u.reuse.at)
	seen := u.reuse.long
	return (seen.sum + expected*priorTime.Seconds()) / (seen.seconds + priorTime.Seconds())
}

// cost of losing the slab.
func (c *controller) cost(s *slab) time.Duration {
	cost := time.Duration(s.cost.Load())
	for name, n := range s.clients {
		u := c.clients[name].use
		if u.Saved <= 0 {
			continue
		}
		rate := u.PerSecond * float64(n)
		if s.owner != "" {
			rate = s.use.perSecond(rate, c.clients[name].active)
		}
		cost += Cost(rate, u.Saved)
	}
	return cost
}
