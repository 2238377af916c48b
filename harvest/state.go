package harvest

import (
	"maps"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// State is the state of a runtime at one moment. The debug endpoints print its JSON form.
type State struct {
	// Now is the time of the latest tick.
	Now   time.Duration
	Peers []PeerUsage
	// Clients by name.
	Clients map[string]ClientUsage
	// Draining is the number of handles that were freed and still have readers.
	Draining int
	// Revocations counts revoked slabs by reason, with an entry for each.
	Revocations map[Reason]int64
	// CallbackPanics counts callbacks that panicked.
	CallbackPanics int64
}

// ClientUsage is a client's account.
type ClientUsage struct {
	Bytes   int64 `json:"bytes"`
	Handles int   `json:"handles"`
	// Revocations counts revoked slabs with objects of the client, by reason, those that
	// happened; Displaced is the size of those that gave way to another client.
	Revocations map[Reason]int64 `json:"revocations,omitempty"`
	Displaced   int64            `json:"displaced_bytes"`
}

// PeerUsage is the account of one peer, in bytes.
type PeerUsage struct {
	Space device.Space
	// Health is why the peer must not be used; nil if it may.
	Health error
	// Reading is the latest reading. Free is its Free, less slabs allocated and plus
	// slabs released since.
	Reading Reading
	Free    int64
	// Headroom must stay free; Borrowable may still be allocated.
	Headroom, Borrowable int64
	// Used and FreeInSlabs are the two parts of slabs in service; Draining is the size of
	// slabs that are being released.
	Used, FreeInSlabs, Draining int64
	// Clients have these bytes of Used and of Draining, by name; those that have none are absent.
	Clients map[string]int64
	// LargestFreeExtent in a slab in service.
	LargestFreeExtent int64
	// Churn is the fraction of the memory that other processes allocate and free per
	// minute.
	Churn float64
	// Slabs; none in a Summary.
	Slabs []SlabUsage
}

// Fragmentation is the fraction of FreeInSlabs outside the largest free extent.
func (p PeerUsage) Fragmentation() float64 { return fragmentation(p.FreeInSlabs, p.LargestFreeExtent) }

// SlabUsage is one slab.
type SlabUsage struct {
	ID    uint64
	Bytes int64
	// Client that the slab is reserved for; empty: shared.
	Client string
	// Draining: the slab is being released, for Reason.
	Draining bool
	Reason   Reason
	// Segments by offset.
	Segments []SegmentUsage
}

// SegmentUsage is a handle in the slab.
type SegmentUsage struct {
	Offset     int64         `json:"offset"`
	Bytes      int64         `json:"bytes"`
	Handle     uint64        `json:"handle"`
	Client     string        `json:"client"`
	Label      string        `json:"label"`
	References int           `json:"references"`
	Cost       time.Duration `json:"reload_cost_ns"`
	// Draining: the handle was freed or is being revoked.
	Draining bool `json:"draining,omitempty"`
}

// State is a snapshot, with every handle.
func (r *Runtime) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.control.state(r.clock.now())
}

// Summary is the State without slabs: the time that it takes does not depend on the number of
// handles.
func (r *Runtime) Summary() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.control.summary(r.clock.now())
}

// Health is why each peer must not be used; nil if it may.
func (r *Runtime) Health() map[device.Space]error {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[device.Space]error{}
	for _, p := range r.control.peers {
		all[p.space] = p.health
	}
	return all
}

// Room is how many more objects of that size the client could allocate on each peer,
// regardless of its health: in free extents of slabs in service, including those that are
// about to be freed, and in borrowable memory. Peers that are withdrawn are not in it.
func (r *Runtime) Room(client string, bytes int64) map[device.Space]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	owner, _ := r.control.slabsFor(client)
	all := map[device.Space]int{}
	for _, p := range r.control.peers {
		if p.withdrawn {
			continue
		}
		all[p.space] = p.room(client, owner, bytes, r.clock.now())
	}
	return all
}

func (p *peer) room(client, owner string, bytes int64, now time.Duration) int {
	if p.closedTo[client] {
		return 0
	}
	unit := device.Align(max(bytes, 1))
	n := max(p.lendable(client, now), 0) / unit
	for _, s := range p.slabs {
		if s.draining != nil || s.owner != owner {
			continue
		}
		if s.freeing == 0 { // the slab may have thousands of handles
			for _, e := range s.segments.free {
				n += e.bytes / unit
			}
			continue
		}
		at := int64(0)
		for _, h := range s.held(live) {
			n += (h.account.offset - at) / unit
			at = h.account.offset + s.segments.used[h.account.offset]
		}
		n += (s.segments.bytes - at) / unit
	}
	return int(n)
}

func (c *controller) state(now time.Duration) State {
	s := c.summary(now)
	for i, p := range c.peers {
		for _, l := range p.slabs {
			s.Peers[i].Slabs = append(s.Peers[i].Slabs, c.slabUsage(l))
		}
	}
	return s
}

func (c *controller) summary(now time.Duration) State {
	s := State{Now: now, Clients: map[string]ClientUsage{}, Revocations: map[Reason]int64{}, CallbackPanics: c.panics}
	for reason := ReasonPressure; reason < reasons; reason++ {
		s.Revocations[reason] = c.revoked[reason]
	}
	for name, client := range c.clients {
		u := ClientUsage{Bytes: client.held, Handles: client.handles, Displaced: client.displaced}
		for reason, n := range client.revoked {
			if n > 0 {
				if u.Revocations == nil {
					u.Revocations = map[Reason]int64{}
				}
				u.Revocations[Reason(reason)] = n
			}
		}
		s.Clients[name] = u
	}
	for _, p := range c.peers {
		s.Peers = append(s.Peers, p.usage())
		for _, l := range p.slabs {
			s.Draining += l.freeing
		}
	}
	return s
}

func (p *peer) usage() PeerUsage {
	u := PeerUsage{
		Space: p.space, Health: p.health, Reading: p.reading, Free: p.free,
		Headroom: p.headroom, Borrowable: p.borrowable(), Draining: p.draining, Churn: p.churnRate, Clients: maps.Clone(p.held),
	}
	for _, s := range p.slabs {
		if s.draining == nil {
			free, largest := s.segments.freeBytes()
			u.FreeInSlabs += free
			u.Used += s.segments.bytes - free
			u.LargestFreeExtent = max(u.LargestFreeExtent, largest)
		}
	}
	return u
}

func (c *controller) slabUsage(s *slab) SlabUsage {
	u := SlabUsage{ID: s.id, Bytes: s.segments.bytes, Client: s.owner}
	if s.draining != nil {
		u.Draining, u.Reason = true, s.draining.reason
	}
	for off, h := range s.handles {
		_, refs := h.State()
		use := c.clients[h.client].use
		u.Segments = append(u.Segments, SegmentUsage{
			Offset: off, Bytes: s.segments.used[off], Handle: h.id, Client: h.client, Label: h.label,
			References: refs, Cost: h.Cost() + Cost(use.PerSecond, use.Saved), Draining: h.account.state != live,
		})
	}
	slices.SortFunc(u.Segments, func(a, b SegmentUsage) int { return int(a.Offset - b.Offset) })
	return u
}
