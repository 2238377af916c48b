package experts

import (
	"encoding/json"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// Tier is where an expert's nearest copy is.
type Tier int

// The tiers, nearest first.
const (
	// Resident: pinned in the GPU's memory.
	Resident Tier = iota
	// Cached: in the expert cache, or being fetched, until its slot is needed.
	Cached
	// Peer: in a peer GPU's memory, which may be revoked, and in host memory.
	Peer
	// Host: in pinned host memory only.
	Host

	tiers = int(Host) + 1
)

var tierNames = [tiers]string{"resident", "cached", "peer", "host"}

func (t Tier) String() string { return tierNames[t] }

// MarshalText writes the tier's name.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Residency is a snapshot of every expert's tier, [position in Plan.Layers][expert].
func (s *Store) Residency() [][]Tier {
	s.mu.Lock()
	defer s.mu.Unlock()
	where := make([][]Tier, len(s.plan.Layers))
	for i := range where {
		where[i] = make([]Tier, s.plan.Experts)
		for e := range where[i] {
			switch {
			case s.places.resident(ID{i, e}):
				where[i][e] = Resident
			case s.fetch.has(ID{i, e}):
				where[i][e] = Cached
			case s.peers.Find(ID{i, e}) != nil:
				where[i][e] = Peer
			default:
				where[i][e] = Host
			}
		}
	}
	return where
}

// ByTier is a count for each tier.
type ByTier [tiers]int64

// MarshalJSON writes the counts by the tiers' names.
func (b ByTier) MarshalJSON() ([]byte, error) {
	named := map[Tier]int64{}
	for t, n := range b {
		named[Tier(t)] = n
	}
	return json.Marshal(named)
}

// FetchedBytes are bytes fetched by the tier that they came from, Peer or Host.
type FetchedBytes [tiers]int64

// MarshalJSON writes the bytes by the two tiers' names.
func (b FetchedBytes) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[Tier]int64{Peer: b[Peer], Host: b[Host]})
}

// Stats count uses and fetches over all layers opened since New. A use is one expert needed
// by one layer of one step; those of a step that is run again count again. They have a JSON
// form.
type Stats struct {
	// Uses by the tier that the expert was found in: Resident; Cached, in the expert cache
	// from an earlier use; or Peer or Host, from where it was fetched for this use, or read in
	// place.
	Uses ByTier `json:"uses"`
	// Hits are uses of resident and cached experts. Misses are uses for which the expert was
	// fetched, read in place, or which the CPU computed. The first use of a fetched expert is a
	// miss, even if a prefetch had landed by then; later uses are hits until its slot is reused.
	// Hits and Misses add up to all uses.
	Hits   int64 `json:"hits"`
	Misses int64 `json:"misses"`
	// OnCPU counts the misses that the CPU computed where they lay, or parts of them of which kernels
	// read the rest: they were not fetched.
	OnCPU int64 `json:"on_cpu"`
	// HitRate is Hits / (Hits + Misses), from 0 to 1; 0 before the first use.
	HitRate float64 `json:"hit_rate"`
	// Prefetched counts the misses whose fetch was submitted before the layer needed it.
	Prefetched int64 `json:"prefetched"`
	// Failed is how many copies failed or were canceled by a Drop.
	Failed int64 `json:"failed_fetches"`
	// Fetched is the bytes of the copies submitted, less what was skipped, by the tier they came from.
	Fetched FetchedBytes `json:"fetched_bytes"`
	// ReadInPlace is the bytes of the experts that kernels read in a peer's or the host's memory.
	ReadInPlace FetchedBytes `json:"read_in_place_bytes"`
	// ReadDivided is the part of ReadInPlace that is of experts of which the CPU computed the rest, which
	// OnCPU counts.
	ReadDivided int64 `json:"read_divided_bytes"`
	// PrefetchPredicted counts the offloaded experts that were predicted, PrefetchUsed those
	// of them that the router then selected, and RouterSyncs all offloaded experts that it
	// selected.
	PrefetchPredicted int64 `json:"prefetch_predicted"`
	PrefetchUsed      int64 `json:"prefetch_used"`
	RouterSyncs       int64 `json:"-"`
	// Promoted counts copies that came to peers' memory, Demoted those dropped there, and
	// Revoked those lost because the peer needed its memory.
	Promoted int64 `json:"promoted"`
	Demoted  int64 `json:"demoted"`
	Revoked  int64 `json:"revoked"`
	// Swapped counts experts that became resident in place of others. MadeResident counts those
	// that became so in lent memory, Offloaded those that had to leave it. MigratedBytes is what
	// all moves have copied.
	Swapped       int64 `json:"swapped"`
	MadeResident  int64 `json:"made_resident"`
	Offloaded     int64 `json:"offloaded"`
	MigratedBytes int64 `json:"migrated_bytes"`
}

// OffloadedUses is how many of all uses were of offloaded experts.
func (s *Store) OffloadedUses() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := &s.counts.Uses
	return u[Cached] + u[Peer] + u[Host]
}

// HitRate returns hits / (hits + misses); 0 if both are 0.
func HitRate(hits, misses int64) float64 {
	if hits+misses == 0 {
		return 0
	}
	return float64(hits) / float64(hits+misses)
}

// Stats is a snapshot.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	st := s.counts.Stats
	s.mu.Unlock()
	p := s.peers.Stats()
	st.Promoted, st.Demoted, st.Revoked = p.Landed, p.Dropped, p.Revoked
	st.MigratedBytes += p.Bytes
	st.Hits, st.Misses = st.Uses[Resident]+st.Uses[Cached], st.Uses[Peer]+st.Uses[Host]
	st.HitRate = HitRate(st.Hits, st.Misses)
	return st
}

// counts are the statistics of a store; per expert: [position][expert].
type counts struct {
	Stats
	fetches, uses, hits, routedTokens, unused [][]int64
}

func (c *counts) open(p *Plan) {
	for _, of := range []*[][]int64{&c.fetches, &c.uses, &c.hits, &c.routedTokens, &c.unused} {
		for range p.Layers {
			*of = append(*of, make([]int64, p.Experts))
		}
	}
}

// use counts a use of an expert that was found in a tier.
func (c *counts) use(position, expert int, found Tier) {
	c.uses[position][expert]++
	if found == Resident || found == Cached {
		c.hits[position][expert]++
	}
	c.Uses[found]++
}

// Fetches is how often each expert was fetched: [layer in Layers][expert].
func (s *Store) Fetches() [][]int64 { return s.copyOf(s.counts.fetches) }

// Uses is how often each expert was needed, by layer and expert: by every step that opened
// its layer whole, and by those whose router selected it.
func (s *Store) Uses() [][]int64 { return s.copyOf(s.counts.uses) }

// ExpertHits is how many of an expert's Uses were hits (Stats), by layer and expert.
func (s *Store) ExpertHits() [][]int64 { return s.copyOf(s.counts.hits) }

// UnusedPrefetches is how many prefetches of each expert no layer used before another expert got their
// slot of the expert cache, or their rest was skipped, by layer and expert. Prefetches of which no byte was
// copied do not count.
func (s *Store) UnusedPrefetches() [][]int64 { return s.copyOf(s.counts.unused) }

// RoutedTokens is how many tokens were routed to each expert, as of the latest
// AddRoutedTokens.
func (s *Store) RoutedTokens() [][]int64 { return s.copyOf(s.counts.routedTokens) }

// LayerNumbers are the model's numbers of the layers with experts, in the order of Uses and RoutedTokens.
func (s *Store) LayerNumbers() []int { return slices.Clone(s.plan.Layers) }

func (s *Store) copyOf(of [][]int64) [][]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make([][]int64, len(of))
	for i := range counts {
		counts[i] = slices.Clone(of[i])
	}
	return counts
}

// AddRoutedTokens sets the number of tokens routed to each expert since the device began
// to count, [model layers, experts].
func (s *Store) AddRoutedTokens(counts []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := s.inPlace.uncounted > 0
	for i, number := range s.plan.Layers {
		if count {
			s.steps.countInPlace(i, counts[number*s.plan.Experts:][:s.plan.Experts])
		}
		copy(s.counts.routedTokens[i], counts[number*s.plan.Experts:])
	}
	s.inPlace.uncounted = max(0, s.inPlace.uncounted-1)
}

// Placed is where an expert lives between steps.
type Placed struct {
	// Tier is Resident, Peer or Host.
	Tier Tier
	// Device that has the copy if Tier is Peer.
	Device device.Space
	// Lent: the expert is resident in lent memory (AddPlace).
	Lent bool
	// Moving: the expert is being promoted, swapped in or made resident, or is leaving lent
	// memory.
	Moving bool
}
