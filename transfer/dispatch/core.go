package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// Kind of an action.
type Kind uint8

// The actions, with the fields of Action that they use.
const (
	// Await: report when Point is reached, or fails. Request is the first that waits
	// for it. Where it cannot be watched, Withdraw takes the request back.
	Await Kind = iota
	// Launch: give Chunk to the device, on Link, and report its end for Slot.
	Launch
	// Recover: wait until nothing of Link is with the device, clear the error of its
	// stream, and report that by Recovered.
	Recover
	// Retry tells that Chunk has failed with Err and will be launched again.
	Retry
	// Finish: Request has ended, with Err or without.
	Finish
)

// Action is what is to be done next.
type Action struct {
	Kind       Kind
	Link, Slot int
	Chunk      Chunk
	Request    *Request
	Point      device.Point
	Err        error
}

// Link describes one link.
type Link struct {
	From, To device.Space
	// ChunkBytes is the most that one chunk has, Depth how many chunks are with the
	// device at a time. Small ones are more: until they come to half of ChunkBytes, so that
	// the device has enough to do while the end of one is noticed, but at most Slots.
	ChunkBytes int64
	Depth      int
}

// manySlots bounds the small chunks that are with the device.
const manySlots = 8

// Slots is how many chunks can be with the device at most.
func (l Link) Slots() int { return max(l.Depth, manySlots) }

// state of a slot.
type state uint8

const (
	free state = iota
	// flying: the chunk is with the device. landed: it has arrived, and the end of one
	// that was launched before it is not reported yet.
	flying
	landed
	// failed on the device, refused by it: the chunk waits until its link is recovered.
	failed
	refused
)

// slot is one of the chunks that a link may have with the device.
type slot struct {
	state state
	chunk Chunk
	// seq is the order of launches; retried says that the chunk failed before.
	seq     uint64
	retried bool
	err     error
}

type link struct {
	Link
	queue *queue
	slots []slot
	seq   uint64
	// broken: nothing is launched until the link was recovered, which goes on while
	// recovering.
	broken, recovering bool
	// lost is why nothing can be launched any more.
	lost error
}

// Core holds the requests and the links. Its zero value is ready for use. After each
// call that reports an event Next gives the actions that follow.
type Core struct {
	links  []*link
	queues []*queue
	seq    uint64
	// waits are the requests that wait for each point; spare has room for more.
	waits map[device.Point][]*Request
	spare [][]*Request
	// actions from next on are still to be done.
	actions []Action
	next    int
	order   []int // room for Recovered
}

// AddLink adds a link and returns its number.
func (c *Core) AddLink(l Link) int {
	c.links = append(c.links, &link{Link: l, queue: c.queue(l.To), slots: make([]slot, l.Slots())})
	return len(c.links) - 1
}

func (c *Core) queue(to device.Space) *queue {
	for _, q := range c.queues {
		if q.to == to {
			return q
		}
	}
	c.queues = append(c.queues, &queue{to: to})
	return c.queues[len(c.queues)-1]
}

// Next is the next action, false if there is none. Events may be reported before all
// actions are done.
func (c *Core) Next() (Action, bool) {
	if c.next == len(c.actions) {
		c.actions, c.next = c.actions[:0], 0
		return Action{}, false
	}
	a := c.actions[c.next]
	c.actions[c.next] = Action{}
	c.next++
	return a, true
}

func (c *Core) do(a Action) { c.actions = append(c.actions, a) }

// carries says whether the link can take chunks of the request.
func (l *link) carries(r *Request) bool { return l.From == r.From && l.To == r.To }

// Submit takes a request, which must wait for these points first; the slice is not
// kept. An error means that no link can carry it, and says why.
func (c *Core) Submit(r *Request, after []device.Point) error {
	if err := c.carried(r); err != nil {
		return err
	}
	c.seq++
	r.seq = c.seq
	for i, p := range after {
		if !slices.Contains(after[:i], p) {
			c.wait(r, p)
		}
	}
	c.queue(r.To).insert(r)
	if r.waiting == 0 {
		c.ready(r)
	}
	return nil
}

// carried says why no link can carry the request.
func (c *Core) carried(r *Request) error {
	var lost error
	for _, l := range c.links {
		if !l.carries(r) {
			continue
		}
		if l.lost == nil {
			return nil
		}
		lost = l.lost
	}
	if lost != nil {
		return lost
	}
	return fmt.Errorf("from %s to %s: %w", r.From, r.To, device.ErrUnreachable)
}

// wait has the request wait for one more point.
func (c *Core) wait(r *Request, p device.Point) {
	r.waiting++
	waiting, ok := c.waits[p]
	if !ok {
		if c.waits == nil {
			c.waits = map[device.Point][]*Request{}
		}
		if n := len(c.spare); n > 0 {
			waiting, c.spare = c.spare[n-1], c.spare[:n-1]
		}
		c.do(Action{Kind: Await, Point: p, Request: r})
	}
	c.waits[p] = append(waiting, r)
}

// ready lets the links pull that can carry the request.
func (c *Core) ready(r *Request) {
	for i, l := range c.links {
		if l.carries(r) {
			c.pull(i)
		}
	}
}

// Withdraw takes a request back whose point cannot be watched, when Await asks for that:
// it does not finish.
func (c *Core) Withdraw(r *Request, unwatched device.Point) {
	delete(c.waits, unwatched)
	c.queue(r.To).remove(r)
	for p, waiting := range c.waits {
		if i := slices.Index(waiting, r); i >= 0 {
			// An empty list stays until the point is reached: it is watched.
			c.waits[p] = slices.Delete(waiting, i, i+1)
		}
	}
}

// Reached reports that a point is.
func (c *Core) Reached(p device.Point) { c.passed(p, nil) }

// PointFailed reports that a point has failed, and what waits for it with it.
func (c *Core) PointFailed(p device.Point, err error) { c.passed(p, err) }

func (c *Core) passed(p device.Point, err error) {
	waiting := c.waits[p]
	delete(c.waits, p)
	for _, r := range waiting {
		r.waiting--
		if err != nil {
			c.fail(r, err)
		}
	}
	for _, r := range waiting {
		if r.waiting == 0 && r.failure == nil {
			c.ready(r)
		}
	}
	if cap(waiting) > 0 {
		clear(waiting)
		c.spare = append(c.spare, waiting[:0])
	}
}

// enough says whether so many chunks are with the device that no more should be.
func (l *link) enough() bool {
	n, bytes := 0, int64(0)
	for i := range l.slots {
		if s := &l.slots[i]; s.state != free {
			n, bytes = n+1, bytes+s.chunk.Bytes
		}
	}
	return n >= l.Depth && 2*bytes >= l.ChunkBytes
}

// pull gives the link chunks until enough are with the device.
func (c *Core) pull(number int) {
	l := c.links[number]
	for i := range l.slots {
		if l.broken || l.lost != nil || l.enough() {
			return
		}
		if l.slots[i].state != free {
			continue
		}
		r := l.queue.first(func(r *Request) bool { return r.waiting == 0 && l.carries(r) })
		if r == nil {
			return
		}
		chunk := r.take(l.ChunkBytes)
		if r.issued == r.bytes {
			l.queue.remove(r)
		}
		r.flying++
		l.slots[i] = slot{chunk: chunk}
		c.launch(number, i)
	}
}

func (c *Core) launch(number, i int) {
	l := c.links[number]
	l.seq++
	s := &l.slots[i]
	s.state, s.seq, s.err = flying, l.seq, nil
	c.do(Action{Kind: Launch, Link: number, Slot: i, Chunk: s.chunk})
}

// Landed reports that the chunk of a slot has arrived. Chunks of a link arrive in the
// order of their launches, and so they count, whatever the order of the reports.
func (c *Core) Landed(number, i int) {
	l := c.links[number]
	l.at(i).state = landed
	c.land(l)
	c.settle(number)
}

// land counts the chunks that have landed and have none before them that is under way.
func (c *Core) land(l *link) {
	for {
		var first *slot // that is with the device
		for i := range l.slots {
			s := &l.slots[i]
			if (s.state == flying || s.state == landed) && (first == nil || s.seq < first.seq) {
				first = s
			}
		}
		if first == nil || first.state == flying {
			return
		}
		first.chunk.Request.landed += first.chunk.Bytes
		c.release(first)
	}
}

// Failed reports that the chunk of a slot has failed on the device, or was not run
// because one before it failed.
func (c *Core) Failed(number, i int, err error) { c.broke(number, i, failed, err) }

// Refused reports that the device did not accept the chunk of a slot, or not all of it.
func (c *Core) Refused(number, i int, err error) { c.broke(number, i, refused, err) }

func (c *Core) broke(number, i int, as state, err error) {
	l := c.links[number]
	s := l.at(i)
	s.state, s.err = as, err
	l.broken = true
	if errors.Is(err, device.ErrLost) {
		c.lose(l, err)
	}
	c.land(l)
	c.settle(number)
}

// at is a slot whose chunk is with the device.
func (l *link) at(i int) *slot {
	s := &l.slots[i]
	if s.state != flying {
		panic(fmt.Sprintf("dispatch: the end of a chunk from %s to %s is reported that is not under way", l.From, l.To))
	}
	return s
}

// release frees a slot; its request ends if that was the last of it.
func (c *Core) release(s *slot) {
	r := s.chunk.Request
	*s = slot{}
	if r.flying--; r.flying > 0 || r.ended {
		return
	}
	if r.failure != nil || r.landed == r.bytes {
		c.end(r)
	}
}

// settle does what a link can do now.
func (c *Core) settle(number int) {
	l := c.links[number]
	switch {
	case l.lost != nil:
		// Nothing of what failed can still arrive.
		for i := range l.slots {
			if s := &l.slots[i]; s.state == failed || s.state == refused {
				c.release(s)
			}
		}
	case !l.broken:
		c.pull(number)
	case !l.recovering && !slices.ContainsFunc(l.slots, func(s slot) bool { return s.state == flying }):
		l.recovering = true
		c.do(Action{Kind: Recover, Link: number})
	}
}

// Recovered reports that a link can be used again. Only an error that wraps
// device.ErrLost counts.
func (c *Core) Recovered(number int, err error) {
	l := c.links[number]
	l.recovering, l.broken = false, false
	if errors.Is(err, device.ErrLost) {
		c.lose(l, err)
	}
	c.order = c.order[:0]
	for i := range l.slots {
		if l.slots[i].state != free {
			c.order = append(c.order, i)
		}
	}
	slices.SortFunc(c.order, func(a, b int) int { return cmp.Compare(l.slots[a].seq, l.slots[b].seq) })
	c.judge(l, number)
	for _, i := range c.order {
		if s := &l.slots[i]; s.chunk.Request.failure != nil {
			c.release(s)
		} else {
			c.launch(number, i)
		}
	}
	c.settle(number)
}

// judge finds the chunk, in the order of launches, because of which the others failed: the
// first that failed, or was refused, which may have put the stream into error too.
func (c *Core) judge(l *link, number int) {
	blamed := false
	for _, i := range c.order {
		switch s := &l.slots[i]; {
		case s.state == refused:
			blamed = true
			c.fail(s.chunk.Request, s.err)
		case blamed:
		case s.retried:
			blamed = true
			c.fail(s.chunk.Request, s.err)
		default:
			blamed, s.retried = true, true
			if s.chunk.Request.failure == nil {
				c.do(Action{Kind: Retry, Link: number, Chunk: s.chunk, Err: s.err})
			}
		}
	}
}

// lose fails every request that only this link can carry.
func (c *Core) lose(l *link, err error) {
	if l.lost != nil {
		return
	}
	l.lost = err
	for i := range l.slots {
		if l.slots[i].state != free {
			c.fail(l.slots[i].chunk.Request, err)
		}
	}
	for _, r := range l.queue.all() {
		if l.carries(r) && c.carried(r) != nil {
			c.fail(r, err)
		}
	}
}

// fail lets nothing more of the request be launched, and ends it as soon as nothing of
// it is with the device.
func (c *Core) fail(r *Request, err error) {
	if r.ended || r.failure != nil {
		return
	}
	r.failure = err
	c.queue(r.To).remove(r)
	if r.flying == 0 {
		c.end(r)
	}
}

func (c *Core) end(r *Request) {
	r.ended = true
	c.do(Action{Kind: Finish, Request: r, Err: r.failure})
}

// Promote gives the request a higher class, among whose requests it stands where its
// submission puts it. A lower one changes nothing.
func (c *Core) Promote(r *Request, class uint8) {
	if class <= r.Class {
		return
	}
	q := c.queue(r.To)
	queued := q.remove(r)
	r.Class = class
	if queued {
		q.insert(r)
	}
}

// Cancel fails the request if nothing of it was launched yet, and reports whether it
// did.
func (c *Core) Cancel(r *Request, err error) bool {
	if r.ended || r.failure != nil || r.issued > 0 {
		return false
	}
	c.fail(r, err)
	return true
}

// Skip ends the request without an error and without a copy, if all its points are
// reached and nothing of it was launched yet, and reports whether it did.
func (c *Core) Skip(r *Request) bool {
	if r.ended || r.failure != nil || r.issued > 0 || r.waiting > 0 {
		return false
	}
	c.queue(r.To).remove(r)
	r.skipped = true
	c.end(r)
	return true
}

// CancelAll cancels every request that Cancel would.
func (c *Core) CancelAll(err error) {
	for _, q := range c.queues {
		for _, r := range q.all() {
			c.Cancel(r, err)
		}
	}
}

// Busy says whether a chunk of the link is with the device, or about to be once the
// link was recovered.
func (c *Core) Busy(number int) bool {
	return slices.ContainsFunc(c.links[number].slots, func(s slot) bool { return s.state != free })
}

// Begun is a request of which something was launched and that has not ended, nil if
// there is none.
func (c *Core) Begun() *Request {
	for _, l := range c.links {
		for i := range l.slots {
			if l.slots[i].state != free {
				return l.slots[i].chunk.Request
			}
		}
	}
	return nil
}
