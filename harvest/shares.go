package harvest

import (
	"cmp"
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
	// Weight of its share: see Options.Weight. Default: 1.
	Weight float64
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

// share is what the runtime may hold on the peer: as much as any other, by weight, and what
// the others leave; no limit if none of them wants more.
func (p *peer) share(now time.Duration) int64 {
	if !slices.ContainsFunc(p.others, func(o Other) bool { return o.Wants }) {
		return math.MaxInt64
	}
	total := p.serving + max(p.borrowable()+p.draining, 0)
	all := []sharer{newSharer(p.serving, p.wants(now), p.weight)}
	for _, o := range p.others {
		total += o.Held
		all = append(all, newSharer(o.Held, o.Wants, o.Weight))
	}
	return fairShares(total, all)[0]
}

// sharer is one of those that share memory.
type sharer struct {
	demand int64
	weight float64
}

func newSharer(held int64, wants bool, weight float64) sharer {
	setDefault(&weight, 1)
	if wants {
		held = math.MaxInt64
	}
	return sharer{held, weight}
}

// fairShares divides total: each demand is met up to a level that is the same for all, per
// weight (max-min fairness).
func fairShares(total int64, all []sharer) []int64 {
	order := make([]int, len(all))
	left := 0.0 // weight
	for i, s := range all {
		order[i] = i
		left += s.weight
	}
	level := func(i int) float64 { return float64(all[i].demand) / all[i].weight }
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(level(a), level(b)) })
	shares := make([]int64, len(all))
	for _, i := range order {
		shares[i] = min(all[i].demand, total, int64(float64(total)*all[i].weight/left))
		total -= shares[i]
		left -= all[i].weight
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
	return max(p.serving-share-largest, 0)
}
