package experts

// Snapshot is the state of the store at one moment, for /debug/residency.
type Snapshot struct {
	// Layers by the model's numbers.
	Layers []LayerSnapshot `json:"layers"`
	// ExpertBytes is the size of one expert.
	ExpertBytes int64 `json:"expert_bytes"`
	// Cache lists the slots of the expert cache.
	Cache []SlotSnapshot `json:"cache"`
	// Links into the GPU.
	Links []LinkSnapshot `json:"links"`
}

// LayerSnapshot is one layer.
type LayerSnapshot struct {
	Layer   int              `json:"layer"`
	Experts []ExpertSnapshot `json:"experts"`
}

// ExpertSnapshot is one expert.
type ExpertSnapshot struct {
	Tier Tier `json:"tier"`
	// Peer that has a copy.
	Peer string `json:"peer,omitempty"`
	// Lent: it is resident in memory lent by the KV cache.
	Lent bool `json:"lent,omitempty"`
	// Moving: the expert is being promoted, swapped in or made resident, or is leaving lent
	// memory.
	Moving bool `json:"moving,omitempty"`
	// Unused: a prefetch has put it into the expert cache, or will, and its layer has run without it since.
	Unused bool `json:"unused,omitempty"`
	// Uses, of which Hits found it in the GPU's memory; see Stats.
	Uses         int64 `json:"uses"`
	Hits         int64 `json:"hits"`
	Fetches      int64 `json:"fetches"`
	RoutedTokens int64 `json:"routed_tokens"`
	// UnusedPrefetches: see Store.UnusedPrefetches.
	UnusedPrefetches int64 `json:"unused_prefetches"`
}

// SlotSnapshot is one slot of the expert cache. Layer is -1 if it is empty.
type SlotSnapshot struct {
	Layer      int `json:"layer"`
	Expert     int `json:"expert"`
	References int `json:"references"`
}

// LinkSnapshot is the link from a memory to the GPU; a rate of 0 is unknown.
type LinkSnapshot struct {
	Src            string  `json:"src"`
	BytesPerSecond float64 `json:"bytes_per_s"`
}

// Snapshot returns the state. While steps run, its parts are of slightly different
// moments.
func (s *Store) Snapshot() Snapshot {
	where, placed := s.Residency(), s.Placed()
	uses, hits, fetches, activations, unused := s.Uses(), s.ExpertHits(), s.Fetches(), s.RoutedTokens(), s.UnusedPrefetches()
	snap := Snapshot{ExpertBytes: s.plan.Layout.Size, Layers: []LayerSnapshot{}, Cache: []SlotSnapshot{}, Links: []LinkSnapshot{}}
	for i, number := range s.plan.Layers {
		l := LayerSnapshot{Layer: number}
		for e, h := range placed[i] {
			x := ExpertSnapshot{
				Tier: where[i][e], Lent: h.Lent, Moving: h.Moving, Uses: uses[i][e], Hits: hits[i][e],
				Fetches: fetches[i][e], RoutedTokens: activations[i][e], UnusedPrefetches: unused[i][e],
			}
			if h.Tier == Peer {
				x.Peer = h.Device.String()
			}
			l.Experts = append(l.Experts, x)
		}
		snap.Layers = append(snap.Layers, l)
	}
	for _, l := range s.Links() {
		snap.Links = append(snap.Links, LinkSnapshot{l.From.String(), l.BytesPerSecond})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for at := range s.fetch.slots {
		x := SlotSnapshot{Layer: -1, Expert: -1, References: s.fetch.cache.References(at)}
		if key := s.fetch.cache.Expert(at); key >= 0 {
			layer, expert := key/s.plan.Experts, key%s.plan.Experts
			x.Layer, x.Expert = s.plan.Layers[layer], expert
			snap.Layers[layer].Experts[expert].Unused = s.fetch.slots[at].passed
		}
		snap.Cache = append(snap.Cache, x)
	}
	return snap
}
