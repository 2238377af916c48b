package harvest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// revocation is the release of a slab to its device.
type revocation struct {
	slab   *slab
	reason Reason
	cause  error
	phase  phase
	// beneficiary is the client that the slab was displaced for.
	beneficiary string
	// handles is the number of handles to be revoked, callbacksRunning the number of
	// callbacks that have not returned.
	handles, callbacksRunning int
	// told: listeners know of it.
	told bool
	// began, drained and the deadline are on the runtime's clock.
	began, deadline, drained time.Duration
	scrubbed                 bool
	scrubTries               int
	// freeRequested: a freeMemory action is pending.
	freeRequested bool
	// err is the error of the last scrub or free; scrubErr is why the slab was not
	// scrubbed.
	err, scrubErr error
	missReported  bool
	requests      []*reclaimRequest // that wait for the slab
}

type phase uint8

const (
	draining phase = iota
	scrubbing
	releasing
	released
)

// maxScrubTries is the number of attempts to scrub a slab before it is released
// unscrubbed.
const maxScrubTries = 3

// reclaimRequest is the account of a Reclamation, in bytes.
type reclaimRequest struct {
	planned, freed int64
	remaining      int // slabs
}

// reading is a Reading of a peer.
type reading struct {
	peer *peer
	Reading
	err error
	// slabChanges of the peer when it was read.
	slabChanges int
}

// health is why the peer must not be used, previously for a reading that does not say.
func (r *reading) health(previously error) error {
	switch {
	case r.err == nil || r.Health != nil:
		return r.Health
	case errors.Is(r.err, device.ErrLost):
		return r.err
	}
	return previously
}

// observe records readings, and starts the revocations that follow from them.
func (c *controller) observe(now time.Duration, rs []reading) {
	for _, r := range rs {
		p := r.peer
		health := r.health(p.reading.Health)
		switch {
		case r.err != nil:
			p.stale = fmt.Errorf("has no reading: %w", r.err)
		case r.slabChanges == p.slabChanges: // otherwise a slab changed meanwhile, before or after the reading
			taken := p.free - r.Free
			if p.stale != nil {
				taken = 0 // since when is not known
			}
			p.rush.update(taken, r.Free < p.headroom, now, c.deadline)
			p.update(r.Reading, now, c.halfLife)
		}
		p.reading.Health = health
		c.updateHealth(p)
	}
	c.revokeNeeded(now)
}

// updateHealth updates the peer's health.
func (c *controller) updateHealth(p *peer) {
	before := p.health
	p.health = p.excluded
	if p.health == nil {
		p.health = p.reading.Health
	}
	if (before == nil) != (p.health == nil) {
		c.emit(PeerInfo{Device: p.space, Health: p.health})
	}
}

// setExcluded excludes a peer because of cause, or readmits it if cause is nil.
func (c *controller) setExcluded(p *peer, cause error, now time.Duration) {
	p.excluded = cause
	c.updateHealth(p)
	if cause != nil {
		c.revokeNeeded(now)
	}
}

// revokeNeeded starts to release empty slabs, and those that must be revoked by the
// readings and the policy.
func (c *controller) revokeNeeded(now time.Duration) {
	var needs []PeerNeed
	var slabs []SlabState
	byID := map[uint64]*slab{}
	for _, p := range c.peers {
		for _, s := range p.slabs {
			if s.draining == nil && len(s.handles) == 0 && c.idle(s, now) {
				c.startRelease(&revocation{slab: s, reason: ReasonEmpty}, now, c.deadline)
			}
		}
		need := PeerNeed{
			Space: p.space, Free: p.free, Draining: p.draining, Headroom: p.wanted(), Unhealthy: p.health != nil,
			Evacuate: p.withdrawn || c.policy.Evacuate(p.state(c.reader)), AboveShare: p.aboveShare(now),
		}
		if !need.mustRevoke() {
			continue
		}
		needs = append(needs, need)
		for _, s := range p.slabs {
			if s.draining == nil {
				slabs = append(slabs, c.slabState(s))
				byID[s.id] = s
			}
		}
	}
	for _, v := range Victims(needs, slabs) {
		c.startRelease(&revocation{slab: byID[v.Slab], reason: v.Reason}, now, c.deadline)
	}
}

// smallSlabLinger is the time for which a small slab is kept empty: one object in it is often
// replaced by another, which would have to wait for scrubbing and the driver.
const smallSlabLinger = 100 * time.Millisecond

// idle reports whether an empty slab is to be released.
func (c *controller) idle(s *slab, now time.Duration) bool {
	full := c.slabBytes
	if s.owner != "" {
		full = c.ownSlabBytes[s.owner]
	}
	if s.segments.bytes >= full {
		return true
	}
	if !s.empty {
		s.empty, s.emptySince = true, now
	}
	return now-s.emptySince >= smallSlabLinger
}

// reclaim starts to release what so many free bytes on a peer lack, or all slabs. Slabs
// that are being released already count.
func (c *controller) reclaim(p *peer, bytes int64, now, within time.Duration) (*reclaimRequest, error) {
	if c.closing {
		return nil, fmt.Errorf("harvest: reclaim: %w", ErrClosed)
	}
	cl := &reclaimRequest{}
	var there []SlabState
	for _, s := range p.slabs {
		if s.draining == nil {
			there = append(there, c.slabState(s))
		}
	}
	missing := bytes - p.free
	if missing > 0 {
		for _, l := range c.draining {
			if l.slab.peer == p {
				l.requests = append(l.requests, cl)
				cl.planned += l.slab.segments.bytes
				cl.remaining++
			}
		}
	}
	release := func(v SlabState, l *revocation, within time.Duration) {
		i := slices.IndexFunc(p.slabs, func(s *slab) bool { return s.id == v.ID })
		l.slab = p.slabs[i]
		c.startRelease(l, now, within)
	}
	for _, v := range toRelease(there, missing-p.draining) {
		cl.planned += v.Bytes
		cl.remaining++
		release(v, &revocation{reason: ReasonExternal, requests: []*reclaimRequest{cl}}, within)
	}
	if missing > 0 {
		// The process will take all of it. The headroom is then missing, too: it is released now, so that
		// it need not wait for one release after the other. The request does not wait for it.
		there = slices.DeleteFunc(there, func(s SlabState) bool {
			return slices.ContainsFunc(p.slabs, func(t *slab) bool { return t.id == s.ID && t.draining != nil })
		})
		for _, v := range toRelease(there, missing+p.wanted()-p.draining) {
			release(v, &revocation{reason: ReasonPressure}, c.deadline)
		}
	}
	p.cooldown = max(p.cooldown, now+c.cooldown)
	return cl, nil
}

// close starts to release everything, for good.
func (c *controller) close(now time.Duration) {
	c.closing = true
	c.releaseAll(now)
}

// releaseAll starts to release everything.
func (c *controller) releaseAll(now time.Duration) {
	for _, p := range c.peers {
		for _, s := range p.slabs {
			if s.draining == nil {
				reason := ReasonShutdown
				if len(s.handles) == 0 {
					reason = ReasonEmpty
				}
				c.startRelease(&revocation{slab: s, reason: reason}, now, c.deadline)
			}
		}
	}
}

// startRelease starts the release of a slab, as l says, which has slab, reason and, where
// there are, beneficiary and requests: it refuses new references to its handles.
func (c *controller) startRelease(l *revocation, now, within time.Duration) {
	s := l.slab
	l.began, l.deadline = now, now+within
	if l.reason == ReasonUnhealthy {
		l.cause = s.peer.health
	}
	for _, h := range s.held(live) { // others are being freed already
		h.account.state = revoking
		c.emit(refuse{h})
		l.handles++
	}
	s.draining = l
	s.peer.serving -= s.segments.bytes
	s.peer.draining += s.segments.bytes
	c.draining = append(c.draining, l)
	if l.reason != ReasonEmpty {
		c.countRevocation(l)
		c.emit(l.info(now))
	}
}

// countRevocation counts the slab for each of its clients, and its bytes as displaced.
func (c *controller) countRevocation(l *revocation) {
	c.revoked[l.reason]++
	for name := range l.slab.clients {
		client := c.clients[name]
		client.revoked[l.reason]++
		if l.beneficiary != "" {
			client.displaced += l.slab.segments.bytes
		}
	}
}

func (l *revocation) info(now time.Duration) RevocationInfo {
	i := RevocationInfo{
		Slab: l.slab.id, Device: l.slab.peer.space, Bytes: l.slab.segments.bytes, Handles: l.handles,
		Reason: l.reason, Cause: l.cause, For: l.beneficiary, Client: l.slab.owner, Deadline: l.deadline - l.began, Took: now - l.began, DeadlineMissed: now > l.deadline,
		Ended: l.phase == released,
	}
	if l.phase > draining {
		i.Drain = l.drained - l.began
	}
	return i
}

// pending is the number of frees and revocations in progress.
func (c *controller) pending() int { return len(c.freeing) + len(c.draining) }

// pause is the time until the next tick: a tenth of interval while memory drains, or where another
// process has just taken more than leaves the headroom, and so may take more.
func (c *controller) pause(now, interval time.Duration) time.Duration {
	if c.pending() > 0 || slices.ContainsFunc(c.peers, func(p *peer) bool { return now < p.rush.until }) {
		return max(interval/10, time.Microsecond)
	}
	return interval
}

// undrained lists the handles that step needs to know drained or not; those of a slab by
// offset.
func (c *controller) undrained() []*Handle {
	all := slices.Clone(c.freeing)
	for _, l := range c.draining {
		if l.phase == draining {
			all = append(all, l.slab.held(revoking)...)
		}
	}
	return all
}

// refreshInterval is the minimum time between the refreshing of two slabs' handles. In the
// time that it takes for thousands of slabs, fences advance by far less than half of their
// range.
const refreshInterval = 100 * time.Millisecond

// nextToRefresh lists the live handles of the next slab, if it is time.
func (c *controller) nextToRefresh(now time.Duration) []*Handle {
	if now-c.refreshedAt < refreshInterval {
		return nil
	}
	c.refreshedAt = now
	var next, first *slab // by number
	for _, p := range c.peers {
		for _, s := range p.slabs {
			if s.id > c.refreshed && (next == nil || s.id < next.id) {
				next = s
			}
			if first == nil || s.id < first.id {
				first = s
			}
		}
	}
	if next == nil {
		next = first
	}
	if next == nil {
		return nil
	}
	c.refreshed = next.id
	return next.held(live)
}

// held lists the slab's handles in one of the states, by offset.
func (s *slab) held(in ...handleState) []*Handle {
	var hs []*Handle
	for _, h := range s.handles {
		if slices.Contains(in, h.account.state) {
			hs = append(hs, h)
		}
	}
	slices.SortFunc(hs, func(a, b *Handle) int { return int(a.account.offset - b.account.offset) })
	return hs
}

// step takes the results since the last step, tells listeners of releases that have begun, and
// retries frees that failed.
func (c *controller) step(now time.Duration, rs []result) {
	for _, l := range c.draining {
		if l.phase == draining && !l.told && len(l.slab.handles) > 0 {
			l.told = true
			c.emit(notify{l.slab.id, slices.Sorted(maps.Keys(l.slab.clients))})
		}
		if l.phase == releasing && !l.freeRequested {
			l.freeRequested = true
			c.emit(freeMemory{l.slab})
		}
	}
	for _, r := range rs {
		c.complete(now, r)
	}
	for _, l := range c.draining {
		c.proceed(l, now)
	}
}

// complete takes one result.
func (c *controller) complete(now time.Duration, r result) {
	switch r := r.(type) {
	case drained:
		c.endHandle(r.h, now, r.err)
	case called:
		l := r.h.account.slab.draining
		l.callbacksRunning--
		if r.panicked != nil {
			c.panics++
			c.emit(*r.panicked)
		}
		if r.took > c.callbackLimit {
			c.emit(DeadlineMissInfo{Slab: l.slab.id, Device: r.h.r.Space, Reason: l.reason, Handle: r.h, Callback: true, Took: r.took})
		}
		c.proceed(l, now)
	case scrubbed:
		l := r.slab.draining
		if l.scrubbed, l.err = r.err == nil, nil; r.err != nil {
			l.err = fmt.Errorf("scrub: %w", r.err)
		}
		l.scrubErr = l.err
		c.scrubOrFree(l)
	case memoryFreed:
		c.slabFreed(r.slab.draining, now, r.err)
	}
	c.draining = slices.DeleteFunc(c.draining, func(l *revocation) bool { return l.phase == released })
}

// endHandle ends a drained handle.
func (c *controller) endHandle(h *Handle, now time.Duration, failed error) {
	a := &h.account
	switch a.state {
	case freeing:
		c.freeing = slices.DeleteFunc(c.freeing, func(o *Handle) bool { return o == h })
		c.removeHandle(h, freed)
		c.emit(FreeInfo{Handle: h, Drain: now - a.freedAt, Failed: failed})
	case revoking:
		l, f := a.slab.draining, a.callback
		c.removeHandle(h, revoked)
		a.callback = nil
		c.emit(RevokeInfo{Handle: h, Reason: l.reason, Drain: now - l.began, Failed: failed})
		if f != nil {
			l.callbacksRunning++
			c.emit(runCallback{h, f, Revocation{Handle: h, Reason: l.reason}})
		}
	}
}

// proceed starts to scrub a slab once it has no handles and its callbacks have returned.
func (c *controller) proceed(l *revocation, now time.Duration) {
	if l.phase == draining && len(l.slab.handles) == 0 && l.callbacksRunning == 0 {
		l.phase, l.drained = scrubbing, now
		c.scrubOrFree(l)
	}
}

// scrubOrFree scrubs the slab, or frees it if it needs no scrubbing or cannot be
// scrubbed.
func (c *controller) scrubOrFree(l *revocation) {
	n := l.slab.segments.highWater
	l.scrubbed = l.scrubbed || n == 0
	if !l.scrubbed && l.slab.peer.health == nil && l.scrubTries < maxScrubTries {
		l.scrubTries++
		c.emit(scrub{l.slab, n})
		return
	}
	l.phase, l.freeRequested = releasing, true
	c.emit(freeMemory{l.slab})
}

// slabFreed removes a freed slab from the accounts; if the device failed to free it, the
// next step retries.
func (c *controller) slabFreed(l *revocation, now time.Duration, err error) {
	if err != nil {
		l.freeRequested, l.err = false, fmt.Errorf("free the memory: %w", err)
		return
	}
	s := l.slab
	p, n := s.peer, s.segments.bytes
	l.phase = released
	p.remove(s)
	p.keep(s, c.reserve, n)
	c.emit(SlabInfo{Slab: s.id, Device: p.space, Bytes: n, Released: true, Reason: l.reason, Scrubbed: l.scrubbed, Err: l.scrubErr})
	for _, cl := range l.requests {
		cl.freed += n
		cl.remaining--
	}
	if l.reason == ReasonEmpty {
		return
	}
	switch {
	case l.reason == ReasonShutdown: // no other process has asked for it
	case l.beneficiary == "":
		p.cooldown = max(p.cooldown, now+c.cooldown)
	default: // the memory is for a client, not for another process
		c.clients[l.beneficiary].displacing--
		p.reserve(l.beneficiary, n, now+c.reserved)
	}
	c.emit(l.info(now))
}

// reportOverdue reports missed deadlines, once each.
func (c *controller) reportOverdue(now time.Duration) {
	for _, l := range c.draining {
		if now <= l.deadline {
			continue
		}
		v := DeadlineMissInfo{Slab: l.slab.id, Device: l.slab.peer.space, Reason: l.reason}
		if l.phase == draining {
			for _, h := range l.slab.held(freeing, revoking) {
				if !h.account.missReported {
					h.account.missReported = true
					v.Handle = h
					c.emit(reportMiss{v})
				}
			}
			continue
		}
		// If readers were late, that was reported.
		if !l.missReported && (l.drained <= l.deadline || l.err != nil) {
			l.missReported = true
			v.Err = l.err
			c.emit(v)
		}
	}
}

// overdue describes what is not released: of the reclaim request cl, or everything for
// nil.
func (c *controller) overdue(cl *reclaimRequest) []DeadlineMissInfo {
	var handles, slabs []DeadlineMissInfo
	for _, l := range c.draining {
		if cl != nil && !slices.Contains(l.requests, cl) {
			continue
		}
		v := DeadlineMissInfo{Slab: l.slab.id, Device: l.slab.peer.space, Reason: l.reason, Err: l.err}
		if l.callbacksRunning > 0 {
			v.Err = errCallbackRunning
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

var errCallbackRunning = errors.New("a callback is running")
