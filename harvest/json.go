package harvest

import (
	"encoding/json"
	"time"
)

// The JSON form of a State: spaces, health and reasons are text, durations are in
// nanoseconds.
type stateJSON struct {
	Now            time.Duration          `json:"now_ns"`
	Peers          []peerJSON             `json:"peers"`
	Clients        map[string]ClientUsage `json:"clients"`
	Draining       int                    `json:"draining"`
	Revocations    map[Reason]int64       `json:"revocations"`
	CallbackPanics int64                  `json:"callback_panics"`
}

type peerJSON struct {
	Device            string           `json:"device"`
	Capacity          int64            `json:"capacity_bytes"`
	Free              int64            `json:"free_bytes"`
	Other             int64            `json:"other_processes_bytes"`
	Headroom          int64            `json:"headroom_bytes"`
	Borrowable        int64            `json:"borrowable_bytes"`
	Used              int64            `json:"used_bytes"`
	ByClient          map[string]int64 `json:"bytes_by_client,omitempty"`
	FreeInSlabs       int64            `json:"slab_free_bytes"`
	Draining          int64            `json:"draining_bytes"`
	LargestFreeExtent int64            `json:"largest_free_extent_bytes"`
	Fragmentation     float64          `json:"fragmentation"`
	Utilization       float64          `json:"utilization"`
	Bandwidth         float64          `json:"bandwidth"`
	Churn             float64          `json:"churn_per_minute"`
	Health            string           `json:"health"`
	Slabs             []slabJSON       `json:"slabs"`
}

type slabJSON struct {
	ID    uint64 `json:"id"`
	Bytes int64  `json:"bytes"`
	// Client is empty where the slab is shared.
	Client string `json:"client,omitempty"`
	// Draining is the reason it is released for, empty while it is in service.
	Draining string         `json:"draining,omitempty"`
	Segments []SegmentUsage `json:"segments"`
}

// MarshalJSON implements json.Marshaler.
func (s State) MarshalJSON() ([]byte, error) {
	j := stateJSON{Now: s.Now, Clients: s.Clients, Draining: s.Draining, Revocations: s.Revocations, CallbackPanics: s.CallbackPanics}
	for _, p := range s.Peers {
		j.Peers = append(j.Peers, p.json())
	}
	return json.Marshal(j)
}

func (p PeerUsage) json() peerJSON {
	j := peerJSON{
		Device: p.Space.String(), Capacity: p.Reading.Capacity, Free: p.Free, Other: p.Reading.OtherProcesses,
		Headroom: p.Headroom, Borrowable: p.Borrowable, Used: p.Used, ByClient: p.Clients, FreeInSlabs: p.FreeInSlabs, Draining: p.Draining,
		LargestFreeExtent: p.LargestFreeExtent, Fragmentation: p.Fragmentation(),
		Utilization: p.Reading.Utilization, Bandwidth: p.Reading.Bandwidth, Churn: p.Churn, Health: "ok",
	}
	if p.Health != nil {
		j.Health = p.Health.Error()
	}
	for _, s := range p.Slabs {
		slab := slabJSON{ID: s.ID, Bytes: s.Bytes, Client: s.Client, Segments: s.Segments}
		if s.Draining {
			slab.Draining = s.Reason.String()
		}
		j.Slabs = append(j.Slabs, slab)
	}
	return j
}
