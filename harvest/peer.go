package harvest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// peer is the controller's state of one peer.
type peer struct {
	space device.Space
	paths map[device.Space]device.Path // by reader
	slabs []*slab
	// open are the slabs that have a free extent, in any order: what was allocated before a
	// request must not make it slower.
	open []*slab
	// held is the size of the handles of each client, with those that drain.
	held map[string]int64
	// serving is the size of the slabs that are not being released.
	serving int64

	reading Reading
	// free is the free memory of the device: the latest reading, less slabs allocated and
	// plus slabs released since. slabChanges counts these.
	free        int64
	slabChanges int
	headroom    int64
	rush        rush
	// draining is the size of the slabs that are being released.
	draining int64
	// stale is why there is no valid reading.
	stale error
	// health is why the peer must not be used; excluded is the cause passed to Exclude.
	health, excluded error
	cooldown         time.Duration // until then no slab is allocated
	reserved         []reservation
	// closedTo are clients that may not use the peer, kept is what is kept for clients that do not
	// hold it.
	closedTo map[string]bool
	kept     map[string]int64
	// withdrawn: nothing may be borrowed from it: see Runtime.Withdraw.
	withdrawn bool
	// refused: a request found no room on the peer, the last time at refusedAt.
	refused   bool
	refusedAt time.Duration
	others    []Other // that borrow from the peer, too
	weight    float64 // of the runtime among these
	bandwidth average
	churn     churn
	churnRate float64
}

// count counts memory that a client gets, or gives back.
func (p *peer) count(client string, bytes int64) {
	if p.held == nil {
		p.held = map[string]int64{}
	}
	if p.held[client] += bytes; p.held[client] == 0 {
		delete(p.held, client)
	}
}

// peers are all peers.
type peers []*peer

// find returns the peer of that space.
func (ps peers) find(op string, s device.Space) (*peer, error) {
	if i := slices.IndexFunc(ps, func(p *peer) bool { return p.space == s }); i >= 0 {
		return ps[i], nil
	}
	return nil, fmt.Errorf("harvest: %s: %s is not a peer", op, s)
}

// total is the memory for clients: slabs in service, and borrowable memory.
func (ps peers) total() (n int64) {
	for _, p := range ps {
		if p.health == nil && !p.withdrawn {
			n += p.serving + max(p.borrowable(), 0)
		}
	}
	return n
}

// candidates appends to cs where the request fits: in slabs of that owner, or in new ones of that
// size, on peers that the policy does not evacuate. Of a peer's slabs whose best free extents have
// equal sizes, the one with the lowest number stands for all: policies prefer it.
func (ps peers) candidates(cs []Candidate, policy Policy, req Request, owner string, slabBytes int64) []Candidate {
	n := req.Bytes
	after := req.Hints.After
	for _, p := range ps {
		if p.unusable(req) != "" {
			continue
		}
		state := p.state(req.Hints.Reader)
		if policy.Evacuate(state) {
			continue
		}
		first := len(cs)
		for _, s := range p.open {
			if s.draining != nil || s.owner != owner {
				continue
			}
			if h, ok := s.segments.bestFit(n); ok {
				i := slices.IndexFunc(cs[first:], func(c Candidate) bool { return c.FreeExtent == h.bytes && !c.Adjacent })
				switch {
				case i < 0:
					cs = append(cs, Candidate{Peer: state, Slab: s.id, FreeExtent: h.bytes, Leftover: h.bytes - n, offset: h.off, slab: s})
				case s.id < cs[first+i].Slab:
					c := &cs[first+i]
					c.Slab, c.offset, c.slab = s.id, h.off, s
				}
			}
			if after != nil && after.account.slab == s && after.account.state == live {
				if h, ok := s.segments.freeAt(after.account.offset+device.Align(after.r.Bytes), n); ok {
					cs = append(cs, Candidate{Peer: state, Slab: s.id, FreeExtent: h.bytes, Leftover: h.bytes - n, Adjacent: true, offset: h.off, slab: s})
				}
			}
		}
		if p.noNewSlabs(req) == "" {
			// The last slabs are small: those of a small shortage.
			size := slabBytes
			if n > size || p.lendable(req.Hints.Client, req.Now) < 2*size {
				size = n
			}
			cs = append(cs, Candidate{Peer: state, FreeExtent: size, Leftover: size - n})
		}
	}
	return cs
}

// behind appends to cs the extent right behind Hints.After, if the request fits into it, and behind that
// each of the other peers as if there were room for the request on it.
func (ps peers) behind(cs []Candidate, policy Policy, req Request, owner string) []Candidate {
	after := req.Hints.After
	s := after.account.slab
	if after.account.state != live || s.draining != nil || s.owner != owner || s.peer.unusable(req) != "" {
		return cs
	}
	state := s.peer.state(req.Hints.Reader)
	h, ok := s.segments.freeAt(after.account.offset+device.Align(after.r.Bytes), req.Bytes)
	if !ok || policy.Evacuate(state) {
		return cs
	}
	cs = append(cs, Candidate{Peer: state, Slab: s.id, FreeExtent: h.bytes, Leftover: h.bytes - req.Bytes, Adjacent: true, offset: h.off, slab: s})
	for _, p := range ps {
		if p != s.peer && p.unusable(req) == "" {
			cs = append(cs, Candidate{Peer: p.state(req.Hints.Reader), FreeExtent: req.Bytes})
		}
	}
	return cs
}

// noCapacity is the error of a request that fits nowhere.
func (ps peers) noCapacity(req Request, policy Policy) error {
	var why []string
	for _, p := range ps {
		w := p.unusable(req)
		if w == "" {
			w = p.noNewSlabs(req)
		}
		if w == "" && policy.Evacuate(p.state(req.Hints.Reader)) {
			w = "is left by the policy " + policy.Name()
		}
		why = append(why, p.space.String()+" "+w)
	}
	if len(why) == 0 {
		return fmt.Errorf("%w: no peers are configured", ErrNoCapacity)
	}
	return fmt.Errorf("%w: %s", ErrNoCapacity, strings.Join(why, "; "))
}

// slab is an allocation of device memory that is divided among handles.
type slab struct {
	id       uint64
	peer     *peer
	owner    string // client that the slab is reserved for; empty: shared
	region   device.Region
	segments segments
	// open: it is in the peer's list of slabs with a free extent, at openAt.
	open    bool
	openAt  int
	handles map[int64]*Handle // by offset
	clients map[string]int    // number of handles
	freeing int               // number of handles that are freed and not drained
	since   time.Duration     // in service
	// cost is the sum of the handles' costs, in nanoseconds.
	cost     atomic.Int64
	use      slabUse
	draining *revocation
	// empty: a small slab that a tick has found without handles, first at emptySince.
	empty      bool
	emptySince time.Duration
}

// borrowable is what may still be allocated from the device; 0 without a valid reading, and of a peer
// that is withdrawn.
func (p *peer) borrowable() int64 {
	if p.stale != nil || p.withdrawn {
		return 0
	}
	return p.free - p.wanted()
}

// wanted is what is to be free: the headroom, and more in a rush.
func (p *peer) wanted() int64 { return p.headroom + int64(p.rush.taken) }

// add adds a new slab.
func (p *peer) add(s *slab) {
	p.slabs = append(p.slabs, s)
	p.serving += s.segments.bytes
	p.free -= s.segments.bytes
	p.slabChanges++
	p.reopen(s)
}

// remove removes a slab that was being released, and that is freed.
func (p *peer) remove(s *slab) {
	p.slabs = slices.DeleteFunc(p.slabs, func(t *slab) bool { return t == s })
	p.draining -= s.segments.bytes
	p.free += s.segments.bytes
	p.slabChanges++
	p.close(s)
}

// keep changes what is kept for the client that has the slab for itself, if any is, by so many bytes.
func (p *peer) keep(s *slab, reserve map[string]int64, bytes int64) {
	if n := reserve[s.owner]; n > 0 {
		p.kept[s.owner] = min(max(p.kept[s.owner]+bytes, 0), n)
	}
}

// reopen lists a slab that has a free extent again; close removes one from the list.
func (p *peer) reopen(s *slab) {
	if !s.open {
		s.open, s.openAt = true, len(p.open)
		p.open = append(p.open, s)
	}
}

func (p *peer) close(s *slab) {
	if s.open {
		last := p.open[len(p.open)-1]
		p.open[s.openAt], last.openAt = last, s.openAt
		p.open[len(p.open)-1] = nil
		p.open, s.open = p.open[:len(p.open)-1], false
	}
}

// unusable is why nothing may be allocated on the peer, noNewSlabs why no new slab may
// be; empty if it may.
func (p *peer) unusable(req Request) string {
	switch _, path := p.paths[req.Hints.Reader]; {
	case len(req.Hints.Peers) > 0 && !slices.Contains(req.Hints.Peers, p.space):
		return "is not among the requested peers"
	case p.withdrawn:
		return "is withdrawn by the operator"
	case p.closedTo[req.Hints.Client]:
		return "is not lent to " + req.Hints.Client
	case !path:
		return "has no path to " + req.Hints.Reader.String()
	case p.health != nil:
		return "is unhealthy: " + p.health.Error()
	}
	return ""
}

func (p *peer) noNewSlabs(req Request) string {
	switch {
	case p.stale != nil:
		return p.stale.Error()
	case req.Now < p.cooldown:
		return fmt.Sprintf("has released memory to other processes; retry in %v", p.cooldown-req.Now)
	case p.serving+req.Bytes > p.share(req.Now):
		return "has lent this process its share; other processes want more"
	case p.borrowable() < req.Bytes:
		return fmt.Sprintf("has %d bytes free, of which %d are headroom", p.free, p.wanted())
	case p.lendable(req.Hints.Client, req.Now) < req.Bytes:
		return fmt.Sprintf("has %d bytes free, of which %d are headroom and %d are reserved for other clients", p.free, p.wanted(), p.borrowable()-p.lendable(req.Hints.Client, req.Now))
	}
	return ""
}

func (p *peer) state(reader device.Space) PeerState {
	return PeerState{
		Space: p.space, Reading: p.reading, Borrowable: p.borrowable(),
		Bandwidth: p.bandwidth.value, Churn: p.churnRate, Path: p.paths[reader],
	}
}

// update records a reading.
func (p *peer) update(reading Reading, now, halfLife time.Duration) {
	p.reading, p.stale, p.free = reading, nil, reading.Free
	p.bandwidth.add(reading.Bandwidth, now, halfLife)
	p.churnRate = p.churn.add(reading.OtherProcesses, reading.Capacity, now, halfLife)
}

// rush is a time in which other processes take memory of a peer faster than it is released: from a
// reading with less than the headroom free to one deadline after the last of these. What they take
// meanwhile, beyond what led to it, they are expected to take again within a deadline. So a process that
// allocates all it can get, again and again, gets more each time, and one that takes memory once
// costs no more than that.
type rush struct {
	until time.Duration
	// taken meanwhile, less what was returned; what was taken a quarter of a deadline ago counts half.
	taken float64
	at    time.Duration
}

// update records what was taken since the last reading, and whether it has left too little.
func (r *rush) update(taken int64, short bool, now, deadline time.Duration) {
	if now < r.until {
		r.taken = max(r.taken*decayFactor(now-r.at, deadline/4)+float64(taken), 0)
	} else {
		r.taken = 0
	}
	r.at = now
	if short {
		r.until = now + deadline
	}
}

// slabState is the input of Victims.
func (c *controller) slabState(s *slab) SlabState {
	st := SlabState{ID: s.id, Peer: s.peer.space, Bytes: s.segments.bytes, Cost: c.cost(s), First: c.reserve[s.owner] > 0}
	for off, h := range s.handles {
		st.Used += s.segments.used[off]
		_, n := h.State()
		st.References += n
	}
	return st
}

// average is an exponentially decaying mean: values one half-life ago count half.
type average struct {
	value float64
	at    time.Duration
	begun bool
}

// decayFactor is the factor by which the weight of past values falls in dt.
func decayFactor(dt, halfLife time.Duration) float64 {
	return math.Exp2(-float64(dt) / float64(halfLife))
}

// add records that the quantity was v since the last call.
func (a *average) add(v float64, now, halfLife time.Duration) {
	if !a.begun {
		*a = average{v, now, true}
		return
	}
	k := decayFactor(now-a.at, halfLife)
	a.value, a.at = k*a.value+(1-k)*v, now
}

// churn is a rate of change, with the same decay.
type churn struct {
	sum   float64 // of changes, each decayed since
	level int64
	at    time.Duration
	begun bool
}

// add records the present level and returns the rate, as a fraction of capacity per
// minute.
func (c *churn) add(level, capacity int64, now, halfLife time.Duration) float64 {
	if !c.begun {
		*c = churn{level: level, at: now, begun: true}
		return 0
	}
	c.sum *= decayFactor(now-c.at, halfLife)
	if capacity > 0 {
		c.sum += math.Abs(float64(level-c.level)) / float64(capacity)
	}
	c.level, c.at = level, now
	// A steady rate r per half-life adds up to r / ln 2.
	return c.sum * math.Ln2 / halfLife.Minutes()
}
