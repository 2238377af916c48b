package experts

import (
	"encoding/json"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// Tier is where an expert's bytes are.
type Tier int

// The tiers, the nearest first.
const (
	// Local: in the compute GPU's memory for good.
	Resident Tier = iota
	// Ring: in the compute GPU's memory, or on the way there, until its slot is
	// needed.
	Cached
	// Peer: in a peer GPU's memory, which may be taken back, and in host memory.
	Peer
	// Host: in pinned host memory.
	Host

	tiers = int(Host) + 1
)

var tierNames = [tiers]string{"resident", "cached", "peer", "host"}

func (t Tier) String() string { return tierNames[t] }

// MarshalText writes the tier's name.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Residency is a snapshot of where the nearest copy of every expert is: [layer in
// Layers][expert].
func (s *Store) Residency() [][]Tier {
	s.mu.Lock()
	defer s.mu.Unlock()
	where := make([][]Tier, len(s.plan.Layers))
	for i := range where {
		where[i] = make([]Tier, s.plan.Experts)
		for e, at := range s.places.residentAt[i] {
			switch {
			case at >= 0:
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

// Stats count experts over all layers opened since New. They have a JSON form.
type Stats struct {
	// Uses is how often an expert that a layer needed was found in a tier: Local, Ring
	// (since an earlier use), or Peer or Host, from where it had to be fetched.
	Uses ByTier `json:"uses"`
	// Misses: it had to be fetched for this use. Prefetched: how many of these were
	// submitted ahead of need.
	Misses     int64 `json:"misses"`
	Prefetched int64 `json:"prefetched"`
	// Failed is how many copies failed or were canceled by a Drop.
	Failed int64 `json:"failed_fetches"`
	// Fetched is the bytes of the copies submitted, by the tier they came from.
	Fetched ByTier `json:"fetched_bytes"`
	// PrefetchPredicted counts the offloaded experts that were predicted, PrefetchUsed those that
	// were chosen, and Asked all offloaded experts that were chosen.
	PrefetchPredicted int64 `json:"prefetch_predicted"`
	PrefetchUsed      int64 `json:"prefetch_used"`
	RouterSyncs       int64 `json:"-"`
	// Promoted and Demoted count copies that came to peers' memory and that were given
	// back, Revoked those that were taken.
	Promoted int64 `json:"promoted"`
	Demoted  int64 `json:"demoted"`
	Revoked  int64 `json:"revoked"`
	// Swapped counts experts that became local, MigratedBytes what Promote and Swap have moved.
	Swapped       int64 `json:"swapped"`
	MigratedBytes int64 `json:"migrated_bytes"`
}

// Stats is a snapshot.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	st := s.counts.Stats
	s.mu.Unlock()
	p := s.peers.Stats()
	st.Promoted, st.Demoted, st.Revoked = p.Landed, p.Dropped, p.Revoked
	st.MigratedBytes += p.Bytes
	return st
}

// counts are the statistics of a store, those of every expert by [position][expert].
type counts struct {
	Stats
	fetches, uses, routedTokens [][]int64
}

func (c *counts) open(p *Plan) {
	for _, of := range []*[][]int64{&c.fetches, &c.uses, &c.routedTokens} {
		for range p.Layers {
			*of = append(*of, make([]int64, p.Experts))
		}
	}
}

// Fetches says how often each expert was fetched: [layer in Layers][expert].
func (s *Store) Fetches() [][]int64 { return s.copyOf(s.counts.fetches) }

// Uses says in how many steps each expert was needed: every step in which its layer
// was opened whole, and those in which it was chosen.
func (s *Store) Uses() [][]int64 { return s.copyOf(s.counts.uses) }

// RoutedTokens says how many rows chose each expert, as far as Activated was told.
func (s *Store) RoutedTokens() [][]int64 { return s.copyOf(s.counts.routedTokens) }

func (s *Store) copyOf(of [][]int64) [][]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make([][]int64, len(of))
	for i := range counts {
		counts[i] = slices.Clone(of[i])
	}
	return counts
}

// AddRoutedTokens notes how many rows have chosen each expert since the device began to
// count: [model layers, experts].
func (s *Store) AddRoutedTokens(counts []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, number := range s.plan.Layers {
		copy(s.counts.routedTokens[i], counts[number*s.plan.Experts:])
	}
}

// Placed is where an expert lives between steps.
type Placed struct {
	// Tier is Local, Peer or Host.
	Tier Tier
	// Device has the copy where Tier is Peer.
	Device device.Space
	// Moving says that a copy is on its way to a peer, or to stay.
	Moving bool
}
