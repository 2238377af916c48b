package harvest

import (
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Demand is memory that a client would borrow beyond what it holds.
type Demand struct {
	Client string
	// Bytes of one object, and the number of objects.
	Bytes   int64
	Objects int
	// Cost of losing all of them, if they were there: see Cost.
	Cost time.Duration
}

// total is the size of all objects.
func (d Demand) total() int64 { return d.Bytes * int64(max(d.Objects, 1)) }

// costPerByte in seconds per byte.
func (d Demand) costPerByte() float64 { return d.Cost.Seconds() / float64(d.total()) }

// Displace decides which of other clients' slabs, all on one peer, give way to a demand: the
// cheapest that cover at least bytes, and one object; none, if what the demand is worth is not
// more than factor times the cost of losing them. Each of them costs less per byte than the
// demand, by at least that factor. It is pure.
func Displace(d Demand, bytes int64, slabs []SlabState, factor float64) []SlabState {
	worth := d.costPerByte()
	if worth <= 0 {
		return nil
	}
	slabs = slices.DeleteFunc(slices.Clone(slabs), func(s SlabState) bool { return s.costPerByte()*factor >= worth })
	victims := Cheapest(slabs, min(bytes, d.total()))
	var sum total
	for _, s := range victims {
		sum = sum.add(s)
	}
	if sum.bytes < d.Bytes || worth*float64(min(sum.bytes, d.total())) <= factor*sum.cost.Seconds() {
		return nil
	}
	return victims
}

// reservation is memory of a peer that was displaced for a client: until its end no other
// client is given it.
type reservation struct {
	client string
	// bytes are left of so many.
	bytes, of int64
	until     time.Duration
}

// reserve reserves memory that was displaced for a client.
func (p *peer) reserve(client string, bytes int64, until time.Duration) {
	if i := slices.IndexFunc(p.reserved, func(r reservation) bool { return r.client == client }); i >= 0 {
		r := &p.reserved[i]
		r.bytes, r.of, r.until = r.bytes+bytes, r.of+bytes, until
		return
	}
	p.reserved = append(p.reserved, reservation{client, bytes, bytes, until})
}

// useReserved is called when a client has been given a new slab.
func (p *peer) useReserved(client string, bytes int64) {
	for i := range p.reserved {
		if r := &p.reserved[i]; r.client == client {
			r.bytes -= min(bytes, r.bytes)
		}
	}
}

// lendable is what may be allocated from the device for a client: borrowable memory that is
// not reserved, and not kept, for another.
func (p *peer) lendable(client string, now time.Duration) int64 {
	n := p.borrowable()
	for name, kept := range p.kept {
		if name != client {
			n -= kept
		}
	}
	for _, r := range p.reserved {
		if r.client != client && now < r.until {
			n -= r.bytes
		}
	}
	return n
}

// expireReservations ends those whose time is over. A client that has not used most of what
// was displaced for it displaces nothing for Residence.
func (c *controller) expireReservations(now time.Duration) {
	for _, p := range c.peers {
		p.reserved = slices.DeleteFunc(p.reserved, func(r reservation) bool {
			if now < r.until {
				return r.bytes == 0
			}
			if 2*r.bytes > r.of {
				c.clients[r.client].idleUntil = r.until + c.residence
			}
			return true
		})
	}
}

// displacement is a pair of clients: slabs of from were displaced for to.
type displacement struct{ from, to string }

// displaceForRequest displaces memory for a refused request. It does not look for some each
// time: a client may be refused thousands of times a second.
func (c *controller) displaceForRequest(req Request) {
	owner := c.clients[req.Hints.Client]
	if req.Now < owner.searchAt {
		return
	}
	owner.searchAt = req.Now + c.displaceInterval
	n := max(int(owner.use.Wanted/req.Bytes), 1)
	cost := req.Hints.Cost
	if cost == 0 {
		cost = Cost(owner.use.WantedPerSecond, owner.use.Saved)
	}
	_, step := c.slabsFor(req.Hints.Client)
	c.displace(req, max(step, req.Bytes), Demand{Client: req.Hints.Client, Bytes: req.Bytes, Objects: n, Cost: time.Duration(n) * min(cost, maxCost/time.Duration(n))})
}

// displace starts to release slabs of other clients of so many bytes, if that is worthwhile for
// the demand: on the peer where the least is lost. No more are displaced for a client before it
// could have been given these.
func (c *controller) displace(req Request, bytes int64, d Demand) {
	c.expireReservations(req.Now)
	asking := c.clients[d.Client]
	if d.Cost <= 0 || c.displaceFactor <= 0 || c.closing || asking.displacing > 0 || req.Now < asking.idleUntil {
		return
	}
	var best []SlabState
	var on *peer
	for _, p := range c.peers {
		if p.unusable(req) != "" || p.noDisplacement(req) != "" {
			continue
		}
		if p.lendable(d.Client, req.Now)+c.coming(p, d.Client, req.Now) >= req.Bytes {
			return // it will have room
		}
		state := p.state(req.Hints.Reader)
		if c.policy.Evacuate(state) {
			continue
		}
		victims := Displace(d, bytes, c.displaceable(p, d.Client, req.Now), c.displaceFactor)
		if len(victims) == 0 {
			continue
		}
		if _, err := c.policyFor(d.Client).Choose(req, []Candidate{{Peer: state, FreeExtent: bytes, Leftover: bytes - req.Bytes}}); err != nil {
			continue // the quota or the rate would refuse it
		}
		if best == nil || meanCost(victims) < meanCost(best) {
			best, on = victims, p
		}
	}
	for _, v := range best {
		s := on.slabs[slices.IndexFunc(on.slabs, func(s *slab) bool { return s.id == v.ID })]
		for name := range s.clients {
			c.displaced[displacement{name, d.Client}] = req.Now
		}
		asking.displacing++
		c.startRelease(&revocation{slab: s, reason: ReasonPolicy, beneficiary: d.Client}, req.Now, c.deadline)
	}
}

// coming is the memory of the peer that is being released, in time, and not for another client.
func (c *controller) coming(p *peer, client string, now time.Duration) (n int64) {
	for _, l := range c.draining {
		if l.slab.peer == p && now <= l.deadline && (l.beneficiary == "" || l.beneficiary == client) {
			n += l.slab.segments.bytes
		}
	}
	return n
}

// meanCost per byte.
func meanCost(slabs []SlabState) float64 {
	var sum total
	for _, s := range slabs {
		sum = sum.add(s)
	}
	return sum.cost.Seconds() / float64(sum.bytes)
}

// displaceable lists the slabs of the peer that may give way to the client: they have been in
// service for at least Residence, the client has nothing in them, and was not itself displaced
// for one of their clients within Residence.
func (c *controller) displaceable(p *peer, client string, now time.Duration) []SlabState {
	var slabs []SlabState
	for _, s := range p.slabs {
		if s.draining != nil || c.reserve[s.owner] > 0 || now-s.since < c.residence || s.owner == client || s.clients[client] > 0 || c.displacedBy(client, s, now) {
			continue
		}
		// References are left out: to count them takes long where objects are many.
		slabs = append(slabs, SlabState{ID: s.id, Peer: p.space, Bytes: s.segments.bytes, Used: s.segments.bytes, Cost: c.cost(s)})
	}
	return slabs
}

// displacedBy reports whether the client was displaced lately for one that has objects in the
// slab.
func (c *controller) displacedBy(client string, s *slab, now time.Duration) bool {
	for name := range s.clients {
		if at, ok := c.displaced[displacement{client, name}]; ok && now-at < c.residence {
			return true
		}
	}
	return false
}

// noDisplacement is why no client gives way to another on the peer; empty if one may.
func (p *peer) noDisplacement(req Request) string {
	switch {
	case p.stale != nil:
		return p.stale.Error()
	case req.Now < p.cooldown:
		return "has released memory to other processes"
	case p.serving > p.share(req.Now):
		return "has lent more than this process's share"
	}
	return ""
}

// Want reports that a client would borrow more of a peer than it has room for, as an Alloc that
// is refused does, for two seconds: other processes that hold more than their share then release
// some (see SetOthers). If the demand is worth much more than what other clients hold on the
// peer, they give way to it: see package documentation. The zero Demand displaces nothing.
func (r *Runtime) Want(s device.Space, d Demand) error {
	return r.update(func(c *controller) error {
		p, err := c.peers.find("want", s)
		if err != nil {
			return err
		}
		return c.want(p, d, r.clock.now())
	})
}

func (c *controller) want(p *peer, d Demand, now time.Duration) error {
	if p.closedTo[d.Client] || p.withdrawn {
		return nil
	}
	p.refused, p.refusedAt = true, now
	if d == (Demand{}) {
		return nil
	}
	setDefault(&d.Client, unnamed.name)
	req, err := c.request(d.Bytes, Hints{Client: d.Client, Peers: []device.Space{p.space}}, now)
	if err != nil {
		return fmt.Errorf("harvest: want %d bytes for %s: %w", d.Bytes, d.Client, err)
	}
	c.displace(req, max(d.total(), req.Bytes), d)
	return nil
}
