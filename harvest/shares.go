package harvest

import (
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Other is another runtime, of another process, that borrows from the same peer.
type Other struct {
	// Held bytes; Wants: it has had requests refused lately.
	Held  int64
	Wants bool
}

// SetOthers reports which other runtimes borrow from a peer. Without a report there are
// none. If one of them wants more, this runtime holds no more than its share of what they
// all may borrow, and releases what is above it, for ReasonPolicy.
func (r *Runtime) SetOthers(s device.Space, others []Other) error {
	return r.update(func(c *controller) error {
		p, err := c.peers.find("share", s)
		if err == nil {
			p.others = slices.Clone(others)
		}
		return err
	})
}

// share is what the runtime may hold on the peer: as much as any other, and what the others
// leave; no limit if none of them wants more.
func (p *peer) share(now time.Duration) int64 {
	if !slices.ContainsFunc(p.others, func(o Other) bool { return o.Wants }) {
		return math.MaxInt64
	}
	total := p.inService() + max(p.borrowable()+p.draining, 0)
	demands := []int64{demand(p.inService(), p.wants(now))}
	for _, o := range p.others {
		total += o.Held
		demands = append(demands, demand(o.Held, o.Wants))
	}
	return fairShares(total, demands)[0]
}

func demand(held int64, wants bool) int64 {
	if wants {
		return math.MaxInt64
	}
	return held
}

// fairShares divides total: each demand is met up to a level that is the same for all
// (max-min fairness).
func fairShares(total int64, demands []int64) []int64 {
	order := make([]int, len(demands))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case demands[a] < demands[b]:
			return -1
		case demands[a] > demands[b]:
			return 1
		}
		return 0
	})
	shares := make([]int64, len(demands))
	for i, k := range order {
		shares[k] = min(demands[k], total/int64(len(order)-i))
		total -= shares[k]
	}
	return shares
}

// aboveShare is how much is to be released for the others. What is above the share by less
// than a slab stays: released, it would be missing next.
func (p *peer) aboveShare(now time.Duration) int64 {
	share := p.share(now)
	if share == math.MaxInt64 {
		return 0
	}
	largest := int64(0)
	for _, s := range p.slabs {
		if s.draining == nil {
			largest = max(largest, s.segments.bytes)
		}
	}
	return max(p.inService()-share-largest, 0)
}
