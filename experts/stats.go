package experts

import "slices"

// Tier is where an expert's bytes are.
type Tier int

// The tiers, the nearest first. Memory of peer GPUs would stand before Host.
const (
	// Local: in the compute GPU's memory for good.
	Local Tier = iota
	// Ring: in the compute GPU's memory, or on the way there, until its slot is
	// needed.
	Ring
	// Host: in pinned host memory.
	Host

	tiers = int(Host) + 1
)

func (t Tier) String() string { return [tiers]string{"local", "ring", "host"}[t] }

// Residency is a snapshot of where every expert is: [layer in Layers][expert].
func (s *Store) Residency() [][]Tier {
	s.mu.Lock()
	defer s.mu.Unlock()
	where := make([][]Tier, len(s.layers))
	for i := range s.layers {
		l := &s.layers[i]
		where[i] = make([]Tier, s.plan.Experts)
		for k, e := range l.missing {
			where[i][e] = Host
			if at := l.slot[k]; at >= 0 && s.slots[at].holds == (ID{i, e}) {
				where[i][e] = Ring
			}
		}
	}
	return where
}

// Stats count experts over all layers opened since New.
type Stats struct {
	// Hits: the expert was there, by tier: Local, or in the Ring since an earlier use.
	Hits [tiers]int64
	// Misses: it had to be fetched for this use. Prefetched: how many of these were
	// submitted by Prefetch.
	Misses, Prefetched int64
	// Fetched is the bytes of the copies submitted, by the tier they came from.
	Fetched [tiers]int64
	// Failed is how many copies failed or were canceled by a Reset.
	Failed int64
}

// Stats is a snapshot.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// Fetches says how often each expert was fetched: [layer in Layers][expert].
func (s *Store) Fetches() [][]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make([][]int64, len(s.counts))
	for i := range counts {
		counts[i] = slices.Clone(s.counts[i])
	}
	return counts
}
