package harvest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// peer is one lender, as the controller knows it.
type peer struct {
	space device.Space
	paths map[device.Space]device.Path // by reader
	slabs []*slab

	reading Reading
	// free is what is free on the device: the latest reading, and what was taken and
	// given back since. moves counts these.
	free        int64
	slabChanges int
	headroom    int64
	// draining is what leaving slabs will give back.
	draining int64
	// stale is why there is no reading that counts.
	stale error
	// health is why the peer must not be used; excluded the part of that which came
	// by Exclude.
	health, excluded error
	cooldown         time.Duration // until then no slab is taken
	bandwidth        average
	churn            churn
	churnRate        float64
}

// peers are all lenders.
type peers []*peer

// find returns the peer of that space.
func (ps peers) find(op string, s device.Space) (*peer, error) {
	if i := slices.IndexFunc(ps, func(p *peer) bool { return p.space == s }); i >= 0 {
		return ps[i], nil
	}
	return nil, fmt.Errorf("harvest: %s: %s is no peer", op, s)
}

// total is what there is for clients: slabs in service, and what may still be taken.
func (ps peers) total() (n int64) {
	for _, p := range ps {
		if p.health == nil {
			n += p.inService() + max(p.borrowable(), 0)
		}
	}
	return n
}

// candidates lists where the request fits: into slabs of that owner, or new ones of that
// size.
func (ps peers) candidates(req Request, owner string, slabBytes int64) []Candidate {
	var cs []Candidate
	n := req.Bytes
	after := req.Hints.After
	for _, p := range ps {
		if p.unusable(req) != "" {
			continue
		}
		state := p.state(req.Hints.Reader)
		for _, s := range p.slabs {
			if s.draining != nil || s.owner != owner {
				continue
			}
			if h, ok := s.segments.bestFit(n); ok {
				cs = append(cs, Candidate{Peer: state, Slab: s.id, FreeExtent: h.bytes, Leftover: h.bytes - n, offset: h.off})
			}
			if after != nil && after.account.slab == s && after.account.state == live {
				if h, ok := s.segments.freeAt(after.account.offset+device.Align(after.r.Bytes), n); ok {
					cs = append(cs, Candidate{Peer: state, Slab: s.id, FreeExtent: h.bytes, Leftover: h.bytes - n, Adjacent: true, offset: h.off})
				}
			}
		}
		if p.noNewSlabs(req) == "" {
			size := slabBytes
			if n > size || p.borrowable() < size {
				size = n
			}
			cs = append(cs, Candidate{Peer: state, FreeExtent: size, Leftover: size - n})
		}
	}
	return cs
}

// noCapacity says why the request fits nowhere.
func (ps peers) noCapacity(req Request) error {
	var why []string
	for _, p := range ps {
		w := p.unusable(req)
		if w == "" {
			w = p.noNewSlabs(req)
		}
		why = append(why, p.space.String()+" "+w)
	}
	if len(why) == 0 {
		return fmt.Errorf("%w: there are no peers", ErrNoCapacity)
	}
	return fmt.Errorf("%w: %s", ErrNoCapacity, strings.Join(why, "; "))
}

// slab is a piece of device memory that is divided among handles.
type slab struct {
	id       uint64
	peer     *peer
	owner    string // the only client whose handles lie there; empty: all that have none of their own
	region   device.Region
	segments segments
	handles  map[int64]*Handle // by offset
	draining *revocation
}

// borrowable is what may still be taken from the device.
func (p *peer) borrowable() int64 { return p.free - p.headroom }

// inService is what slabs hold that are not leaving.
func (p *peer) inService() (n int64) {
	for _, s := range p.slabs {
		if s.draining == nil {
			n += s.segments.bytes
		}
	}
	return n
}

// unusable is why nothing may be allocated on the peer, noNewSlabs why no slab may be
// taken from it.
func (p *peer) unusable(req Request) string {
	switch _, path := p.paths[req.Hints.Reader]; {
	case len(req.Hints.Peers) > 0 && !slices.Contains(req.Hints.Peers, p.space):
		return "is not among those hinted at"
	case !path:
		return "cannot be reached from " + req.Hints.Reader.String()
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
		return fmt.Sprintf("gave memory back to others; ask again in %v", p.cooldown-req.Now)
	case p.borrowable() < req.Bytes:
		return fmt.Sprintf("has %d bytes free, of which %d are headroom", p.free, p.headroom)
	}
	return ""
}

func (p *peer) state(reader device.Space) PeerState {
	return PeerState{
		Space: p.space, Reading: p.reading, Borrowable: p.borrowable(),
		Bandwidth: p.bandwidth.value, Churn: p.churnRate, Path: p.paths[reader],
	}
}

// update notes a reading.
func (p *peer) update(reading Reading, now, halfLife time.Duration) {
	p.reading, p.stale, p.free = reading, nil, reading.Free
	p.bandwidth.add(reading.Bandwidth, now, halfLife)
	p.churnRate = p.churn.add(reading.OtherProcesses, reading.Capacity, now, halfLife)
}

// state is what the choice of victims goes by.
func (s *slab) state() SlabState {
	st := SlabState{ID: s.id, Peer: s.peer.space, Bytes: s.segments.bytes}
	for off, h := range s.handles {
		st.Used += s.segments.used[off]
		st.Cost += h.Cost()
		_, n := h.State()
		st.References += n
	}
	return st
}

// average is a mean over the past in which what lies one half-life back counts
// half.
type average struct {
	value float64
	at    time.Duration
	begun bool
}

// decayFactor is what is left of the past's weight after dt.
func decayFactor(dt, halfLife time.Duration) float64 {
	return math.Exp2(-float64(dt) / float64(halfLife))
}

// add notes that the quantity was v since the last call.
func (a *average) add(v float64, now, halfLife time.Duration) {
	if !a.begun {
		*a = average{v, now, true}
		return
	}
	k := decayFactor(now-a.at, halfLife)
	a.value, a.at = k*a.value+(1-k)*v, now
}

// churn is a rate of change, in the same sense of past.
type churn struct {
	sum   float64 // of changes, each decayed since
	level int64
	at    time.Duration
	begun bool
}

// add takes the level now and returns the rate, in shares of capacity per minute.
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
