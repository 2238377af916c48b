package harvest

import (
	"slices"
	"time"
)

// Snapshot is the state of a runtime at one moment, for metrics and for people.
// Bytes are bytes, durations nanoseconds.
type Snapshot struct {
	Now   time.Duration  `json:"now_ns"`
	Peers []PeerSnapshot `json:"peers"`
	// Clients by name.
	Clients map[string]ClientSnapshot `json:"clients"`
	// Draining is how many handles were freed and are still in use.
	Draining int `json:"draining"`
	// Revocations counts revoked slabs by reason.
	Revocations map[string]int64 `json:"revocations"`
}

// ClientSnapshot is a client's account.
type ClientSnapshot struct {
	Bytes   int64 `json:"bytes"`
	Handles int   `json:"handles"`
}

// PeerSnapshot is one peer.
type PeerSnapshot struct {
	Device   string `json:"device"`
	Capacity int64  `json:"capacity_bytes"`
	// Free on the device, Other held by others, Headroom to stay free, Spare what may
	// still be taken.
	Free     int64 `json:"free_bytes"`
	Other    int64 `json:"other_bytes"`
	Headroom int64 `json:"headroom_bytes"`
	Spare    int64 `json:"spare_bytes"`
	// Used and Unused are the parts of the slabs in service; Leaving is all of the
	// others.
	Used    int64 `json:"used_bytes"`
	Unused  int64 `json:"unused_bytes"`
	Leaving int64 `json:"leaving_bytes"`
	// LargestHole in a slab in service. Fragmentation is the share of Unused that one
	// request could not have: 1 - LargestHole / Unused.
	LargestHole   int64   `json:"largest_hole_bytes"`
	Fragmentation float64 `json:"fragmentation"`
	Utilization   float64 `json:"utilization"`
	Bandwidth     float64 `json:"bandwidth"`
	// Churn is the share of the memory that others take and give back per minute.
	Churn  float64        `json:"churn_per_minute"`
	Health string         `json:"health"`
	Slabs  []SlabSnapshot `json:"slabs"`
}

// SlabSnapshot is one slab.
type SlabSnapshot struct {
	ID    uint64 `json:"id"`
	Bytes int64  `json:"bytes"`
	// Leaving is the reason it is given back for, empty while it is in service.
	Leaving  string            `json:"leaving,omitempty"`
	Segments []SegmentSnapshot `json:"segments"`
}

// SegmentSnapshot is one handle, by its place in the slab.
type SegmentSnapshot struct {
	Offset     int64         `json:"offset"`
	Bytes      int64         `json:"bytes"`
	Handle     uint64        `json:"handle"`
	Client     string        `json:"client"`
	Label      string        `json:"label"`
	References int           `json:"references"`
	Cost       time.Duration `json:"cost_ns"`
	// Draining says that it was freed, or is being revoked.
	Draining bool `json:"draining,omitempty"`
}

// Snapshot takes one.
func (r *Runtime) Snapshot() Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Snapshot{
		Now:         time.Duration(r.clock.Load()),
		Clients:     map[string]ClientSnapshot{},
		Revocations: map[string]int64{},
	}
	for reason := ReasonPressure; reason < reasons; reason++ {
		s.Revocations[reason.String()] = r.control.counts[reason]
	}
	for name, c := range r.control.clients {
		s.Clients[name] = ClientSnapshot{c.held, c.handles}
	}
	for _, p := range r.control.peers {
		s.Peers = append(s.Peers, p.snapshot(&s))
	}
	return s
}

func (p *peer) snapshot(all *Snapshot) PeerSnapshot {
	s := PeerSnapshot{
		Device: p.space.String(), Capacity: p.reading.Capacity, Free: p.free, Other: p.reading.Other,
		Headroom: p.headroom, Spare: p.spare(), Leaving: p.coming,
		Utilization: p.reading.Utilization, Bandwidth: p.reading.Bandwidth, Churn: p.churnRate, Health: "ok",
	}
	if p.health != nil {
		s.Health = p.health.Error()
	}
	for _, l := range p.slabs {
		slab := SlabSnapshot{ID: l.id, Bytes: l.segments.bytes}
		if l.leaving != nil {
			slab.Leaving = l.leaving.reason.String()
		} else {
			free, largest := l.segments.room()
			s.Unused += free
			s.Used += l.segments.bytes - free
			s.LargestHole = max(s.LargestHole, largest)
		}
		for off, h := range l.handles {
			_, refs := h.State()
			if h.account.state == freeing {
				all.Draining++
			}
			slab.Segments = append(slab.Segments, SegmentSnapshot{
				Offset: off, Bytes: l.segments.used[off], Handle: h.id, Client: h.client, Label: h.label,
				References: refs, Cost: h.Cost(), Draining: h.account.state != live,
			})
		}
		slices.SortFunc(slab.Segments, func(a, b SegmentSnapshot) int { return int(a.Offset - b.Offset) })
		s.Slabs = append(s.Slabs, slab)
	}
	s.Fragmentation = fragmentation(s.Unused, s.LargestHole)
	return s
}
