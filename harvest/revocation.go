package harvest

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// revocation is a slab on its way back to its device.
type revocation struct {
	slab   *slab
	reason Reason
	cause  error
	phase  phase
	// handles is how many were to be revoked, calling how many callbacks are not over.
	handles, calling int
	// began, drained and the deadline are on the runtime's clock.
	began, deadline, drained time.Duration
	cleared                  bool
	tries                    int
	// asked says that the memory is about to be given back.
	asked bool
	// err is why it goes no further: of the last clearing, or freeing. unclear is why the
	// content is still there.
	err, unclear error
	reported     bool
	claim        *claim
}

type phase uint8

const (
	draining phase = iota
	clearing
	returning
	gone
)

// clearTries is how often clearing is tried before memory is given back as it is.
const clearTries = 3

// claim is the account of a Reclamation.
type claim struct {
	planned, freed int64
	left           int // slabs
}

// reading is what the monitor said of a peer.
type reading struct {
	peer *peer
	Reading
	err error
	// moves are the peer's when it was asked.
	moves int
}

// observe takes in readings, and begins what follows from them.
func (c *controller) observe(now time.Duration, rs []reading) {
	for _, r := range rs {
		switch p := r.peer; {
		case r.err != nil:
			p.stale = fmt.Errorf("has no reading: %w", r.err)
		case r.moves == p.moves: // else an Alloc came between, and it is not known which was first
			p.take(r.Reading, now, c.halfLife)
		}
		c.judge(r.peer)
	}
	c.decide(now)
}

// judge notes the peer's health.
func (c *controller) judge(p *peer) {
	before := p.health
	p.health = p.excluded
	if p.health == nil {
		p.health = p.reading.Health
	}
	if (before == nil) != (p.health == nil) {
		c.do(PeerInfo{Device: p.space, Health: p.health})
	}
}

// exclude leaves a peer out because of cause, or takes it back for a nil one.
func (c *controller) exclude(p *peer, cause error, now time.Duration) {
	p.excluded = cause
	c.judge(p)
	if cause != nil {
		c.decide(now)
	}
}

// decide begins to give back what the readings, the policy and the accounts ask for.
func (c *controller) decide(now time.Duration) {
	var needs []PeerNeed
	var slabs []SlabState
	byID := map[uint64]*slab{}
	for _, p := range c.peers {
		for _, s := range p.slabs {
			if s.draining == nil && len(s.handles) == 0 {
				c.begin(s, ReasonEmpty, now, c.deadline, nil)
			}
		}
		need := PeerNeed{
			Space: p.space, Free: p.free, Coming: p.coming, Headroom: p.headroom, Unhealthy: p.health != nil,
			Evacuate: c.policy.Evacuate(p.state(c.reader)),
		}
		if !need.any() {
			continue
		}
		needs = append(needs, need)
		for _, s := range p.slabs {
			if s.draining == nil {
				slabs = append(slabs, s.state())
				byID[s.id] = s
			}
		}
	}
	for _, v := range Victims(needs, slabs) {
		c.begin(byID[v.Slab], v.Reason, now, c.deadline, nil)
	}
}

// reclaim begins to give back at least bytes of what lies on a peer, or all of it.
func (c *controller) reclaim(p *peer, bytes int64, now, within time.Duration) (*claim, error) {
	if c.closing {
		return nil, fmt.Errorf("harvest: reclaim: %w", ErrClosed)
	}
	cl := &claim{}
	var there []SlabState
	for _, s := range p.slabs {
		if s.draining == nil {
			there = append(there, s.state())
		}
	}
	for _, v := range Cheapest(there, bytes) {
		i := slices.IndexFunc(p.slabs, func(s *slab) bool { return s.id == v.ID })
		cl.planned += v.Bytes
		cl.left++
		c.begin(p.slabs[i], ReasonExternal, now, within, cl)
	}
	p.cooldown = max(p.cooldown, now+c.cooldown)
	return cl, nil
}

// close begins to give back everything.
func (c *controller) close(now time.Duration) {
	c.closing = true
	for _, p := range c.peers {
		for _, s := range p.slabs {
			if s.draining == nil {
				reason := ReasonShutdown
				if len(s.handles) == 0 {
					reason = ReasonEmpty
				}
				c.begin(s, reason, now, c.deadline, nil)
			}
		}
	}
}

// begin refuses new references to everything on a slab.
func (c *controller) begin(s *slab, reason Reason, now, within time.Duration, cl *claim) {
	l := &revocation{slab: s, reason: reason, began: now, deadline: now + within, claim: cl}
	if reason == ReasonUnhealthy {
		l.cause = s.peer.health
	}
	for _, h := range s.held(live) { // others are being freed, and will be
		h.account.state = revoking
		c.do(refuse{h})
		l.handles++
	}
	s.draining = l
	s.peer.coming += s.segments.bytes
	c.draining = append(c.draining, l)
	if reason != ReasonEmpty {
		c.counts[reason]++
		c.do(l.info(now))
	}
}

func (l *revocation) info(now time.Duration) RevocationInfo {
	i := RevocationInfo{
		Slab: l.slab.id, Device: l.slab.peer.space, Bytes: l.slab.segments.bytes, Handles: l.handles,
		Reason: l.reason, Cause: l.cause, Deadline: l.deadline - l.began, Took: now - l.began, Late: now > l.deadline,
		Ended: l.phase == gone,
	}
	if l.phase > draining {
		i.Drain = l.drained - l.began
	}
	return i
}

// pending is how many frees and revocations are not over.
func (c *controller) pending() int { return len(c.freeing) + len(c.draining) }

// undrained lists the handles of which step wants to know whether they are drained, those
// of a slab by their places.
func (c *controller) undrained() []*Handle {
	all := slices.Clone(c.freeing)
	for _, l := range c.draining {
		if l.phase == draining {
			all = append(all, l.slab.held(revoking)...)
		}
	}
	return all
}

// held lists the slab's handles in one of the states, by their places.
func (s *slab) held(in ...handleState) []*Handle {
	var hs []*Handle
	for _, h := range s.handles {
		if slices.Contains(in, h.account.state) {
			hs = append(hs, h)
		}
	}
	slices.SortFunc(hs, func(a, b *Handle) int { return int(a.account.off - b.account.off) })
	return hs
}

// step takes in what has ended since the last one, and asks again for what was refused.
func (c *controller) step(now time.Duration, rs []result) {
	for _, l := range c.draining {
		if l.phase == returning && !l.asked {
			l.asked = true
			c.do(giveBack{l.slab})
		}
	}
	for _, r := range rs {
		c.ended(now, r)
	}
	for _, l := range c.draining {
		c.proceed(l, now)
	}
}

// ended takes in one end.
func (c *controller) ended(now time.Duration, r result) {
	switch r := r.(type) {
	case drained:
		c.drain(r.h, now, r.err)
	case called:
		l := r.h.account.slab.draining
		l.calling--
		if r.took > c.callbackLimit {
			c.do(DeadlineMissInfo{Slab: l.slab.id, Device: r.h.r.Space, Reason: l.reason, Handle: r.h, Callback: true, Took: r.took})
		}
		c.proceed(l, now)
	case cleared:
		l := r.slab.draining
		if l.cleared, l.err = r.err == nil, nil; r.err != nil {
			l.err = fmt.Errorf("clear: %w", r.err)
		}
		l.unclear = l.err
		c.clear(l)
	case returned:
		c.finish(r.slab.draining, now, r.err)
	}
	c.draining = slices.DeleteFunc(c.draining, func(l *revocation) bool { return l.phase == gone })
}

// drain ends a handle that nobody uses any more.
func (c *controller) drain(h *Handle, now time.Duration, failed error) {
	a := &h.account
	switch a.state {
	case freeing:
		c.freeing = slices.DeleteFunc(c.freeing, func(o *Handle) bool { return o == h })
		c.forget(h, freed)
		c.do(FreeInfo{Handle: h, Drain: now - a.freedAt, Failed: failed})
	case revoking:
		l, f := a.slab.draining, a.callback
		c.forget(h, revoked)
		a.callback = nil
		c.do(RevokeInfo{Handle: h, Reason: l.reason, Drain: now - l.began, Failed: failed})
		if f != nil {
			l.calling++
			c.do(callBack{h, f, Revocation{Handle: h, Reason: l.reason, Cause: l.cause}})
		}
	}
}

// proceed begins to clear a slab that has no handles any more, and whose callbacks are
// over.
func (c *controller) proceed(l *revocation, now time.Duration) {
	if l.phase == draining && len(l.slab.handles) == 0 && l.calling == 0 {
		l.phase, l.drained = clearing, now
		c.clear(l)
	}
}

// clear has the slab overwritten, or given back where it need not be, or cannot.
func (c *controller) clear(l *revocation) {
	n := l.slab.segments.high
	l.cleared = l.cleared || n == 0
	if !l.cleared && l.slab.peer.health == nil && l.tries < clearTries {
		l.tries++
		c.do(scrub{l.slab, n})
		return
	}
	l.phase, l.asked = returning, true
	c.do(giveBack{l.slab})
}

// finish takes a slab out of the accounts that has gone back to its device; one that
// the device refuses to take is offered again at the next step.
func (c *controller) finish(l *revocation, now time.Duration, err error) {
	if err != nil {
		l.asked, l.err = false, fmt.Errorf("give the memory back: %w", err)
		return
	}
	s := l.slab
	p, n := s.peer, s.segments.bytes
	l.phase = gone
	p.slabs = slices.DeleteFunc(p.slabs, func(t *slab) bool { return t == s })
	p.free += n
	p.coming -= n
	p.moves++
	c.do(SlabInfo{Slab: s.id, Device: p.space, Bytes: n, Returned: true, Reason: l.reason, Cleared: l.cleared, Err: l.unclear})
	if l.reason == ReasonEmpty {
		return
	}
	p.cooldown = max(p.cooldown, now+c.cooldown)
	c.do(l.info(now))
	if cl := l.claim; cl != nil {
		cl.freed += n
		cl.left--
	}
}

// review reports what is late, once.
func (c *controller) review(now time.Duration) {
	for _, l := range c.draining {
		if now <= l.deadline {
			continue
		}
		v := DeadlineMissInfo{Slab: l.slab.id, Device: l.slab.peer.space, Reason: l.reason}
		if l.phase == draining {
			for _, h := range l.slab.held(freeing, revoking) {
				if !h.account.reported {
					h.account.reported = true
					v.Handle = h
					c.do(report{v})
				}
			}
			continue
		}
		// Where readers were late, that was reported.
		if !l.reported && (l.drained <= l.deadline || l.err != nil) {
			l.reported = true
			v.Err = l.err
			c.do(v)
		}
	}
}

// late describes what is not given back: what belongs to cl, or everything for nil.
func (c *controller) late(cl *claim) []DeadlineMissInfo {
	var handles, slabs []DeadlineMissInfo
	for _, l := range c.draining {
		if cl != nil && l.claim != cl {
			continue
		}
		v := DeadlineMissInfo{Slab: l.slab.id, Device: l.slab.peer.space, Reason: l.reason, Err: l.err}
		if l.calling > 0 {
			v.Err = errCalling
		}
		if len(l.slab.handles) == 0 {
			slabs = append(slabs, v)
		}
		for _, h := range l.slab.held(freeing, revoking) {
			v.Handle = h
			handles = append(handles, v)
		}
	}
	slices.SortFunc(handles, func(a, b DeadlineMissInfo) int { return int(a.Handle.id) - int(b.Handle.id) })
	return append(slabs, handles...)
}

var errCalling = errors.New("a callback is running")
