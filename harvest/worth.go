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
	// PerSecond is the number of uses of one object per second, the mean over all that the
	// client holds, and estimates for those that it would hold if it had more memory.
	PerSecond float64
	// Saved is what one use of an object saves: see Cost.
	Saved time.Duration
	// Wanted is how much more memory the client would use so, in bytes.
	Wanted int64
}

// cost of losing one object.
func (u Use) cost() time.Duration { return Cost(u.PerSecond, u.Saved) }

// SetUse sets how a client uses its objects, for all of them at once: it takes the same time
// whatever their number. The cost of a slab is the sum of its handles' own costs, and for
// clients with a Use the number of its objects times that of one. In slabs that the client
// shares with no other, the rate is corrected by the uses that harvest counts in each slab
// (Handle.CountUse): slabs of objects that are used much cost more than others.
//
// Call it whenever the rate has changed; a client that sets the cost of each handle does not
// need it.
func (r *Runtime) SetUse(clientName string, u Use) error {
	setDefault(&clientName, unnamed.name)
	return r.update(func(c *controller) error {
		c.client(clientName).use = u
		return nil
	})
}

// useRate estimates the uses per second of a slab's objects: an exponentially decaying mean,
// drawn to the client's.
type useRate struct {
	count atomic.Int64 // so far
	seen  int64        // of count, in sum
	// sum of uses and weight in seconds, both decayed, as of at.
	sum, weight float64
	at          time.Duration
}

// useHalfLife is the half-life of a slab's rate of use, and the time for which the client's
// mean counts in it.
const useHalfLife = Horizon

// update counts the uses since the last call.
func (u *useRate) update(now time.Duration) {
	dt := now - u.at
	if dt <= 0 {
		return
	}
	keep := decayFactor(dt, useHalfLife)
	weight := (1 - keep) * useHalfLife.Seconds() / math.Ln2
	n := u.count.Load()
	u.sum = keep*u.sum + float64(n-u.seen)/dt.Seconds()*weight
	u.weight = keep*u.weight + weight
	u.seen, u.at = n, now
}

// perSecond estimates the rate of all of the slab's objects, of which the client expects the
// rate expected.
func (u *useRate) perSecond(expected float64) float64 {
	return (u.sum + expected*useHalfLife.Seconds()) / (u.weight + useHalfLife.Seconds())
}

// cost of losing the slab.
func (c *controller) cost(s *slab, now time.Duration) time.Duration {
	s.uses.update(now)
	cost := time.Duration(s.cost.Load())
	for name, n := range s.clients {
		u := c.clients[name].use
		if u.Saved <= 0 {
			continue
		}
		rate := u.PerSecond * float64(n)
		if s.owner != "" {
			rate = s.uses.perSecond(rate)
		}
		cost += Cost(rate, u.Saved)
	}
	return cost
}
