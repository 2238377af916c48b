package experts

// Snapshot is the state of the store at one moment, for people.
type Snapshot struct {
	// Layers by the model's numbers.
	Layers []LayerSnapshot `json:"layers"`
	// ExpertBytes is the size of one.
	ExpertBytes int64 `json:"expert_bytes"`
	// Cache lists what its slots hold.
	Cache []SlotSnapshot `json:"cache"`
	// Links into the compute GPU.
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
	// Peer has a copy.
	Peer string `json:"peer,omitempty"`
	// Moving: a copy is on its way to a peer or to stay.
	Moving       bool  `json:"moving,omitempty"`
	Uses         int64 `json:"uses"`
	Fetches      int64 `json:"fetches"`
	RoutedTokens int64 `json:"routed_tokens"`
}

// SlotSnapshot is one slot of the ring. Layer is -1 where it holds nothing.
type SlotSnapshot struct {
	Layer      int `json:"layer"`
	Expert     int `json:"expert"`
	References int `json:"references"`
}

// LinkSnapshot is the way from a memory to the compute GPU; a rate of 0 is not known.
type LinkSnapshot struct {
	From           string  `json:"src"`
	BytesPerSecond float64 `json:"bytes_per_s"`
}

// Snapshot takes one. Its parts are of slightly different moments while steps run.
func (s *Store) Snapshot() Snapshot {
	where, homes := s.Residency(), s.Placed()
	uses, fetches, activations := s.Uses(), s.Fetches(), s.RoutedTokens()
	snap := Snapshot{ExpertBytes: s.plan.Layout.Size, Layers: []LayerSnapshot{}, Cache: []SlotSnapshot{}, Links: []LinkSnapshot{}}
	for i, number := range s.plan.Layers {
		l := LayerSnapshot{Layer: number}
		for e, h := range homes[i] {
			x := ExpertSnapshot{Tier: where[i][e], Moving: h.Moving, Uses: uses[i][e], Fetches: fetches[i][e], RoutedTokens: activations[i][e]}
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
		if key := s.fetch.cache.Holds(at); key >= 0 {
			x.Layer, x.Expert = s.plan.Layers[key/s.plan.Experts], key%s.plan.Experts
		}
		snap.Cache = append(snap.Cache, x)
	}
	return snap
}
