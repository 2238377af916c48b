package harvest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// leaving is a slab on its way back to its device. Its fields but slab belong to
// who holds Runtime.run.
type leaving struct {
	slab   *slab
	reason Reason
	cause  error
	phase  phase
	// handles that are to be revoked, by offset; nil where that is done. count is how
	// many they were.
	handles []*Handle
	count   int
	// began, drained and the deadline are on the runtime's clock.
	began, deadline, drained time.Duration
	cleared                  bool
	clearValue               uint32
	tries                    int
	err                      error // of the last clearing or freeing
	reported                 bool
	reclaim                  *Reclamation
}

type phase uint8

const (
	draining phase = iota
	waiting        // to be cleared
	clearing
	returning
	gone
)

// clearTries is how often clearing is tried before memory is given back as it is.
const clearTries = 3

// begin refuses new references to everything on a slab. Runtime.mu is held.
func (r *Runtime) begin(s *slab, reason Reason, now, within time.Duration, c *Reclamation) {
	l := &leaving{slab: s, reason: reason, began: now, deadline: now + within, reclaim: c}
	if reason == ReasonUnhealthy {
		l.cause = s.peer.health
	}
	for _, h := range s.handles {
		if h.state != live {
			continue // it is being freed, and will be
		}
		h.ex, _ = h.cell.BeginExclusive() // a live handle's cell is nobody's
		h.state = revoking
		l.handles = append(l.handles, h)
	}
	slices.SortFunc(l.handles, func(a, b *Handle) int { return int(a.off - b.off) })
	l.count = len(l.handles)
	s.leaving = l
	s.peer.coming += s.segments.bytes
	r.leaving = append(r.leaving, l)
	if reason != ReasonEmpty {
		r.counts[reason]++
		r.o.Events.RevocationBegan(l.info(now))
	}
}

func (l *leaving) info(now time.Duration) RevocationInfo {
	i := RevocationInfo{
		Slab: l.slab.id, Device: l.slab.peer.space, Bytes: l.slab.segments.bytes, Handles: l.count,
		Reason: l.reason, Cause: l.cause, Deadline: l.deadline - l.began, Took: now - l.began, Late: now > l.deadline,
	}
	if l.phase > draining {
		i.Drain = l.drained - l.began
	}
	return i
}

// Tick reads the peers, revokes what must be, and carries on what was begun; it
// waits for nothing. now must not run backwards, and is on the clock of
// Options.Machine. The result is how many frees and revocations are not over.
// ErrClosed after Close. On a virtual machine, where nothing goes on while nobody
// waits, ticks alone do not make readers and clearing end.
func (r *Runtime) Tick(now time.Duration) (pending int, err error) {
	if err := r.refuseCallback("tick"); err != nil {
		return 0, err
	}
	r.run.Lock()
	defer r.run.Unlock()
	r.mu.Lock()
	closing := r.closing
	r.mu.Unlock()
	if closing {
		return 0, fmt.Errorf("harvest: tick: %w", ErrClosed)
	}
	now = r.observe(now)
	return r.advance(now), nil
}

// observe reads all peers and begins what follows from that. It returns the time,
// which never runs backwards.
func (r *Runtime) observe(now time.Duration) time.Duration {
	now = max(now, time.Duration(r.clock.Load()))
	r.clock.Store(int64(now))
	for _, p := range r.peers {
		r.mu.Lock()
		moves := p.moves
		r.mu.Unlock()
		reading, err := r.o.Monitor.Read(p.space)
		r.mu.Lock()
		switch {
		case err != nil:
			p.stale = fmt.Errorf("has no reading: %w", err)
		case moves == p.moves: // else an Alloc came between, and it is not known which was first
			p.take(reading, now, r.o.HalfLife)
		}
		r.judge(p)
		r.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.decide(now)
	return now
}

// decide begins to give back what the readings, the policy and the accounts ask for.
// Runtime.mu is held.
func (r *Runtime) decide(now time.Duration) {
	var needs []PeerNeed
	var slabs []SlabState
	byID := map[uint64]*slab{}
	for _, p := range r.peers {
		for _, s := range p.slabs {
			if s.leaving == nil && len(s.handles) == 0 {
				r.begin(s, ReasonEmpty, now, r.o.Deadline, nil)
			}
		}
		need := PeerNeed{
			Space: p.space, Free: p.free, Coming: p.coming, Headroom: p.headroom, Unhealthy: p.health != nil,
			Leave: r.o.Policy.Leave(r.state(p, r.o.Reader)),
		}
		if !need.any() {
			continue
		}
		needs = append(needs, need)
		for _, s := range p.slabs {
			if s.leaving == nil {
				slabs = append(slabs, s.state())
				byID[s.id] = s
			}
		}
	}
	for _, v := range Victims(needs, slabs) {
		r.begin(byID[v.Slab], v.Reason, now, r.o.Deadline, nil)
	}
}

// take notes a reading.
func (p *peer) take(reading Reading, now, halfLife time.Duration) {
	p.reading, p.stale, p.free = reading, nil, reading.Free
	p.bandwidth.level(reading.Bandwidth, now, halfLife)
	p.churnRate = p.churn.note(reading.Other, reading.Capacity, now, halfLife)
}

// judge notes the peer's health.
func (r *Runtime) judge(p *peer) {
	before := p.health
	p.health = p.excluded
	if p.health == nil {
		p.health = p.reading.Health
	}
	if (before == nil) != (p.health == nil) {
		r.o.Events.Peer(PeerInfo{Device: p.space, Health: p.health})
	}
}

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

// advance carries on what was begun, as far as it goes without waiting. Runtime.run
// is held, Runtime.mu is not. It returns how much is left.
func (r *Runtime) advance(now time.Duration) int {
	now = max(now, time.Duration(r.clock.Load()))
	r.clock.Store(int64(now))
	r.mu.Lock()
	free, leave := slices.Clone(r.freeing), slices.Clone(r.leaving)
	r.mu.Unlock()
	for _, h := range free {
		if ok, failed := h.drained(); ok {
			r.mu.Lock()
			r.forget(h, freed)
			r.o.Events.Freed(FreeInfo{Handle: h, Drain: now - h.freedAt, Failed: failed})
			r.mu.Unlock()
		}
	}
	for _, l := range leave {
		r.proceed(l, now)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.freeing = slices.DeleteFunc(r.freeing, func(h *Handle) bool { return h.state == freed })
	r.leaving = slices.DeleteFunc(r.leaving, func(l *leaving) bool { return l.phase == gone })
	return len(r.freeing) + len(r.leaving)
}

// proceed takes one slab as far as it goes.
func (r *Runtime) proceed(l *leaving, now time.Duration) {
	p := l.slab.peer
	if l.phase == draining && r.drain(l, now) {
		l.phase, l.drained = waiting, now
	}
	if l.phase == clearing {
		r.finishClearing(l)
	}
	if l.phase == waiting {
		r.startClearing(l)
	}
	if l.phase == returning {
		r.giveBack(l, now)
	}
	// Where readers were late, that was reported.
	if l.phase > draining && l.phase < gone && now > l.deadline && !l.reported && (l.drained <= l.deadline || l.err != nil) {
		l.reported = true
		r.violated(ViolationInfo{Slab: l.slab.id, Device: p.space, Reason: l.reason, Err: l.err})
	}
}

func (r *Runtime) violated(v ViolationInfo) {
	r.mu.Lock()
	r.o.Events.Violated(v)
	r.mu.Unlock()
}

// drain ends the handles that nobody uses any more, and says whether all have
// ended.
func (r *Runtime) drain(l *leaving, now time.Duration) bool {
	for i, h := range l.handles {
		if h == nil {
			continue
		}
		ok, failed := h.drained()
		if !ok {
			continue
		}
		l.handles[i] = nil
		r.mu.Lock()
		r.forget(h, revoked)
		f := h.callback
		h.callback = nil
		r.o.Events.Revoked(RevokeInfo{Handle: h, Reason: l.reason, Drain: now - l.began, Failed: failed})
		r.mu.Unlock()
		if f != nil {
			r.call(l, h, f)
		}
	}
	r.mu.Lock()
	var late []*Handle
	left := len(l.slab.handles)
	if now > l.deadline {
		for _, h := range l.slab.handles {
			if !h.reported {
				h.reported = true
				late = append(late, h)
			}
		}
	}
	r.mu.Unlock()
	slices.SortFunc(late, func(a, b *Handle) int { return int(a.off - b.off) })
	for _, h := range late {
		r.violated(ViolationInfo{Slab: l.slab.id, Device: h.Device(), Reason: l.reason, Handle: h, Holders: h.holders(now)})
	}
	return left == 0
}

// call runs a callback and takes its time.
func (r *Runtime) call(l *leaving, h *Handle, f func(Revocation)) {
	began := r.o.Machine.Now()
	func() {
		r.calling.Store(goroutine())
		defer r.calling.Store(0)
		f(Revocation{Handle: h, Reason: l.reason, Cause: l.cause})
	}()
	if took := r.o.Machine.Now() - began; took > r.o.CallbackLimit {
		r.violated(ViolationInfo{Slab: l.slab.id, Device: h.Device(), Reason: l.reason, Handle: h, Callback: true, Took: took})
	}
}

// startClearing enqueues the overwriting of all that was ever handed out: the first
// part from the zeros, the rest by doubling within the device, so that little goes
// over the host's link. After a failure it waits until the stream has nothing more
// to do.
func (r *Runtime) startClearing(l *leaving) {
	p, n := l.slab.peer, l.slab.segments.high
	if p.broken {
		if p.outstanding > 0 {
			return
		}
		// All that is behind the failure was skipped, so this hardly waits; the error is
		// known.
		_ = p.stream.Recover(background)
		p.broken = false
	}
	if n == 0 || r.unhealthy(p) || l.tries == clearTries {
		l.cleared, l.phase = n == 0, returning
		return
	}
	l.tries++
	mem := l.slab.mem
	done := min(n, r.zeros.Bytes())
	err := p.stream.Copy(mem.Range(0, done), r.zeros.Range(0, done))
	for done < n && err == nil {
		more := min(done, n-done)
		err = p.stream.Copy(mem.Range(done, more), mem.Range(0, more))
		done += more
	}
	if err == nil {
		err = p.stream.Raise(p.cleared, p.clearValue+1)
	}
	if err != nil {
		p.broken, l.err = true, fmt.Errorf("clear: %w", err)
		return
	}
	p.clearValue++
	p.outstanding++
	l.clearValue, l.phase = p.clearValue, clearing
}

func (r *Runtime) unhealthy(p *peer) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return p.health != nil
}

func (r *Runtime) finishClearing(l *leaving) {
	p := l.slab.peer
	ok, err := reached(device.Point{Fence: p.cleared, Value: l.clearValue})
	if !ok {
		return
	}
	p.outstanding--
	if err == nil {
		l.cleared, l.phase, l.err = true, returning, nil
		return
	}
	p.broken, l.phase, l.err = true, waiting, fmt.Errorf("clear: %w", err)
}

// giveBack frees the slab's memory; a device that refuses is asked again at the next
// tick.
func (r *Runtime) giveBack(l *leaving, now time.Duration) {
	s := l.slab
	p, n := s.peer, s.segments.bytes
	if err := s.mem.Free(); err != nil {
		l.err = fmt.Errorf("give the memory back: %w", err)
		return
	}
	l.phase = gone
	r.mu.Lock()
	defer r.mu.Unlock()
	p.slabs = slices.DeleteFunc(p.slabs, func(t *slab) bool { return t == s })
	p.free += n
	p.coming -= n
	p.moves++
	i := SlabInfo{Slab: s.id, Device: p.space, Bytes: n, Reason: l.reason, Cleared: l.cleared}
	if !l.cleared {
		i.Err = l.err
	}
	r.o.Events.SlabReturned(i)
	if l.reason == ReasonEmpty {
		return
	}
	p.cooldown = max(p.cooldown, now+max(r.o.Cooldown, 0))
	r.o.Events.RevocationEnded(l.info(now))
	if c := l.reclaim; c != nil {
		c.freed += n
		c.left--
	}
}

// describe says what is not given back and who holds it: what belongs to c, or
// everything. Runtime.run is held.
func (r *Runtime) describe(c *Reclamation) string {
	r.mu.Lock()
	var late []*Handle
	var parts []string
	for _, l := range r.leaving {
		if c != nil && l.reclaim != c {
			continue
		}
		for _, h := range l.slab.handles {
			late = append(late, h)
		}
		if len(l.slab.handles) == 0 {
			parts = append(parts, ViolationInfo{Slab: l.slab.id, Device: l.slab.peer.space, Err: l.err}.String())
		}
	}
	r.mu.Unlock()
	slices.SortFunc(late, func(a, b *Handle) int { return int(a.id) - int(b.id) })
	now := time.Duration(r.clock.Load())
	for _, h := range late {
		parts = append(parts, ViolationInfo{Handle: h, Holders: h.holders(now)}.String())
	}
	return strings.Join(parts, "; ")
}

// Reclamation is memory on its way back to somebody who asked for it.
type Reclamation struct {
	r        *Runtime
	device   device.Space
	deadline time.Duration

	// Guarded by Runtime.mu.
	planned, freed int64
	left           int // slabs
}

// Reclaim gives back at least bytes of what harvest holds on a peer, or all of it,
// within that time (0: Options.Deadline), for a neighbor who wants to allocate
// there; for Options.Cooldown after, nothing more is taken from that peer. It begins
// at once and does not wait: ticks carry it on, and so does Reclamation.Wait.
func (r *Runtime) Reclaim(s device.Space, bytes int64, within time.Duration) (*Reclamation, error) {
	if err := r.refuseCallback("reclaim"); err != nil {
		return nil, err
	}
	if bytes <= 0 || within < 0 {
		return nil, fmt.Errorf("harvest: reclaim %d bytes within %v: ask for more than 0, in no negative time", bytes, within)
	}
	def(&within, r.o.Deadline)
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.peer("reclaim", s)
	if err != nil {
		return nil, err
	}
	if r.closing {
		return nil, fmt.Errorf("harvest: reclaim: %w", ErrClosed)
	}
	now := r.now()
	c := &Reclamation{r: r, device: s, deadline: now + within}
	var there []SlabState
	for _, s := range p.slabs {
		if s.leaving == nil {
			there = append(there, s.state())
		}
	}
	for _, v := range Cheapest(there, bytes) {
		i := slices.IndexFunc(p.slabs, func(s *slab) bool { return s.id == v.ID })
		c.planned += v.Bytes
		c.left++
		r.begin(p.slabs[i], ReasonExternal, now, within, c)
	}
	p.cooldown = max(p.cooldown, now+max(r.o.Cooldown, 0))
	return c, nil
}

// Planned is how much will be given back, Freed how much has been, in bytes.
func (c *Reclamation) Planned() int64 { return c.planned }

// Freed is how much has been given back so far, in bytes.
func (c *Reclamation) Freed() int64 {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return c.freed
}

// Done says whether all that was planned has been given back.
func (c *Reclamation) Done() bool {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return c.left == 0
}

// Wait carries the reclamation on until it is done. It fails with ErrDeadline, naming
// who holds what, when the deadline passes first; the memory is still given back
// later, and Wait may be called again.
func (c *Reclamation) Wait(ctx context.Context) error {
	r := c.r
	if err := r.refuseCallback("wait for a reclamation"); err != nil {
		return err
	}
	for wait := (pause{r: r}); ; {
		if over, err := c.carryOn(ctx); over {
			return err
		}
		wait.step()
		// The next round says why, if ctx is done.
		_ = wait.rest(ctx)
	}
}

// carryOn takes the reclamation as far as it goes, and says whether to stop waiting.
func (c *Reclamation) carryOn(ctx context.Context) (over bool, err error) {
	r := c.r
	r.run.Lock()
	defer r.run.Unlock()
	now := r.now()
	if !c.Done() {
		r.advance(now)
	}
	switch {
	case c.Done():
		return true, nil
	case now > c.deadline:
		return true, fmt.Errorf("harvest: reclaim on %s: %d of %d bytes are not given back: %s: %w",
			c.device, c.planned-c.Freed(), c.planned, r.describe(c), ErrDeadline)
	case ctx.Err() != nil:
		return true, fmt.Errorf("harvest: reclaim on %s: %s: %w", c.device, r.describe(c), ctx.Err())
	}
	return false, nil
}

// pause waits a little for work that others do: on a virtual machine, by making it
// go on, one step at a time; elsewhere, or if nothing can go on there, by sleeping,
// longer each time.
type pause struct {
	r     *Runtime
	sleep time.Duration
}

const (
	shortestSleep = 10 * time.Microsecond
	longestSleep  = 200 * time.Microsecond
)

// step lets a virtual machine go on. Runtime.run may be held.
func (p *pause) step() {
	// Asked twice with nothing between, a virtual machine does one step.
	p.r.nudge.Value()
	p.r.nudge.Value()
}

func (p *pause) rest(ctx context.Context) error {
	p.sleep = min(max(2*p.sleep, shortestSleep), longestSleep)
	timer := time.NewTimer(p.sleep)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
