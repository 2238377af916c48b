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
	// Await: watch Point, and report when it is reached or has failed. Request is the
	// first that waits for it. If Point cannot be watched, call Withdraw.
	Await Kind = iota
	// Launch: enqueue Chunk on Link, and report its end for Slot.
	Launch
	// Recover: wait until Link is idle, clear the error of its stream, and call
	// Recovered.
	Recover
	// Retry reports that Chunk failed with Err and will be launched again.
	Retry
	// Finish: Request has ended, with or without Err.
	Finish
)

// Action is what the caller must do next.
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
	// ChunkBytes is the maximum size of a chunk, Depth the number of chunks in flight, of
	// which the device copies the first. Behind it are more than Depth - 1, up to Slots, until
	// they add up to WindowBytes: what the device copies while the host learns of the end of
	// the first and enqueues the next. In flight are never more than Depth times ChunkBytes:
	// a request of a higher class waits for these at most.
	ChunkBytes, WindowBytes int64
	Depth                   int
	// PartBytes is what the link could copy in the time that each contiguous part of a chunk takes
	// beside its bytes: parts that are smaller count as much for the window, unless the request has
	// ChunkPieces.
	PartBytes int64
}

// maxSmallChunks is the maximum number of small chunks in flight.
const maxSmallChunks = 32

// Slots is the maximum number of chunks in flight.
func (l Link) Slots() int { return max(l.Depth, maxSmallChunks) }

// state of a slot.
type state uint8

const (
	free state = iota
	// inFlight: the chunk is on the device. landed: it has arrived, but the end of an
	// earlier chunk is not reported yet.
	inFlight
	landed
	// failed on the device, or refused by it: the chunk waits until its link is
	// recovered.
	failed
	refused
)

// slot is one chunk that a link may have in flight.
type slot struct {
	state state
	chunk Chunk
	// seq is the order of launches; retried: the chunk failed before.
	seq     uint64
	retried bool
	err     error
	// weight is what the chunk counts for the window, in bytes.
	weight int64
}

type link struct {
	Link
	queue *queue
	slots []slot
	seq   uint64
	// broken: nothing is launched until the link is recovered; recovering: a Recover
	// action is in progress.
	broken, recovering bool
	// virtual is the virtual time, in bytes, of the requests of each class that take turns: at
	// the end of the chunk launched last, as in self-clocked fair queueing (Golestani, 1994).
	// Each of them advances by what it launches, and one that comes begins there; the least
	// goes first.
	virtual [Classes]int64
	// lost is the error of a lost device: nothing can be launched any more.
	lost error
}

// waiters are the requests that wait for a point. The request that ends at the point, if it
// is one, has at least that class.
type waiters struct {
	point    device.Point
	requests []*Request
	class    uint8
}

// Core holds the requests and the links. Its zero value is ready for use. After each call
// that reports an event, Next returns the actions that follow.
type Core struct {
	links  []*link
	queues []*queue
	seq    uint64
	// waiting are the requests that wait for each point; freeLists is a freelist.
	waiting   map[device.Point]*waiters
	freeLists []*waiters
	// actions from next on were not returned yet.
	actions []Action
	next    int
	order   []int // scratch space of Recovered
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

// Next returns the next action, false if there is none. Events may be reported before all
// actions are carried out.
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

func (c *Core) emit(a Action) { c.actions = append(c.actions, a) }

// carries reports whether the link can copy chunks of the request.
func (l *link) carries(r *Request) bool { return l.From == r.From && l.To == r.To }

// Submit queues a request that waits for these points; the slice is not retained. It
// fails if no link can carry the request.
func (c *Core) Submit(r *Request, after []device.Point) error {
	if err := c.checkCarried(r); err != nil {
		return err
	}
	c.seq++
	r.seq = c.seq
	for i, p := range after {
		if !slices.Contains(after[:i], p) {
			c.awaitPoint(r, p)
		}
	}
	if w := c.waiting[r.Done]; w != nil {
		r.Class = max(r.Class, w.class)
	}
	c.queue(r.To).insert(r)
	c.passOn(r)
	if len(r.waiting) == 0 {
		c.join(r)
		c.offer(r)
	}
	return nil
}

// checkCarried fails if no link can carry the request.
func (c *Core) checkCarried(r *Request) error {
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

// awaitPoint makes the request wait for another point.
func (c *Core) awaitPoint(r *Request, p device.Point) {
	waiting, ok := c.waiting[p]
	if !ok {
		if c.waiting == nil {
			c.waiting = map[device.Point]*waiters{}
		}
		if n := len(c.freeLists); n > 0 {
			waiting, c.freeLists = c.freeLists[n-1], c.freeLists[:n-1]
		} else {
			waiting = &waiters{}
		}
		waiting.point, c.waiting[p] = p, waiting
		c.emit(Action{Kind: Await, Point: p, Request: r})
	}
	waiting.requests, r.waiting = append(waiting.requests, r), append(r.waiting, waiting)
}

// passOn raises the class of the queued requests that the request waits for to its own, and
// of those that they wait for: it cannot start before they have finished.
func (c *Core) passOn(r *Request) {
	for _, w := range r.waiting {
		if w.class >= r.Class {
			continue
		}
		w.class = r.Class
		if first := c.endingAt(w.point); first != nil {
			c.RaiseClass(first, r.Class)
		}
	}
}

// endingAt is the queued request that finishes at a point, or nil.
func (c *Core) endingAt(p device.Point) *Request {
	for _, q := range c.queues {
		if r := q.first(func(r *Request) bool { return r.Done == p }); r != nil {
			return r
		}
	}
	return nil
}

// offer dispatches chunks on the links that can carry the request.
func (c *Core) offer(r *Request) {
	for i, l := range c.links {
		if l.carries(r) {
			c.dispatch(i)
		}
	}
}

// join lets a request begin to take turns on the links that can carry it.
func (c *Core) join(r *Request) {
	for _, l := range c.links {
		if l.carries(r) {
			l.join(r)
		}
	}
}

// Withdraw removes a request whose point cannot be watched, in answer to Await: it does
// not finish.
func (c *Core) Withdraw(r *Request, unwatched device.Point) {
	delete(c.waiting, unwatched)
	c.queue(r.To).remove(r)
	for _, w := range c.waiting {
		if i := slices.Index(w.requests, r); i >= 0 {
			// An empty list stays until the point is reached: the point is being watched.
			w.requests = slices.Delete(w.requests, i, i+1)
		}
	}
}

// Reached reports that a point is reached.
func (c *Core) Reached(p device.Point) { c.pointEnded(p, nil) }

// PointFailed reports that a point has failed, which fails the requests that wait for it.
func (c *Core) PointFailed(p device.Point, err error) { c.pointEnded(p, err) }

func (c *Core) pointEnded(p device.Point, err error) {
	w := c.waiting[p]
	if w == nil {
		return
	}
	delete(c.waiting, p)
	for _, r := range w.requests {
		i := slices.Index(r.waiting, w)
		r.waiting = slices.Delete(r.waiting, i, i+1)
		if err != nil {
			c.fail(r, err)
		}
	}
	for _, r := range w.requests {
		if len(r.waiting) == 0 && r.failure == nil {
			c.join(r)
			c.offer(r)
		}
	}
	clear(w.requests)
	*w = waiters{requests: w.requests[:0]}
	c.freeLists = append(c.freeLists, w)
}

// full reports whether enough chunks are in flight, before one of at most next bytes.
func (l *link) full(next int64) bool {
	n, bytes, weight := 0, int64(0), int64(0)
	var first *slot // earliest launched
	for i := range l.slots {
		s := &l.slots[i]
		if s.state == free {
			continue
		}
		if n, bytes, weight = n+1, bytes+s.chunk.Bytes, weight+s.weight; first == nil || s.seq < first.seq {
			first = s
		}
	}
	return n >= l.Depth && (weight-first.weight >= l.WindowBytes || bytes+next > int64(l.Depth)*l.ChunkBytes)
}

// dispatch launches chunks on the link until enough are in flight.
func (c *Core) dispatch(number int) {
	l := c.links[number]
	for i := range l.slots {
		if l.broken || l.lost != nil || l.full(0) {
			return
		}
		if l.slots[i].state != free {
			continue
		}
		r := l.queue.next(l)
		if r == nil || l.full(l.nextBytes(r)) {
			return
		}
		chunk := r.cutChunk(l.ChunkBytes)
		l.took(r, chunk.Bytes)
		if r.launched == r.bytes {
			l.queue.remove(r)
		}
		r.inFlight++
		l.slots[i] = slot{chunk: chunk, weight: l.weight(chunk)}
		c.launch(number, i)
	}
}

// weight is what a chunk counts for the window, in bytes.
func (l *link) weight(c Chunk) int64 {
	if c.Request.ChunkPieces > 0 || l.PartBytes == 0 {
		return c.Bytes
	}
	parts := int64(0)
	_ = c.Each(func(_, _ device.Range) error { parts++; return nil }) // which does not fail
	return max(c.Bytes, parts*l.PartBytes)
}

func (c *Core) launch(number, i int) {
	l := c.links[number]
	l.seq++
	s := &l.slots[i]
	s.state, s.seq, s.err = inFlight, l.seq, nil
	c.emit(Action{Kind: Launch, Link: number, Slot: i, Chunk: s.chunk})
}

// Landed reports that the chunk of a slot has arrived. Chunks of a link are counted in the order
// of their launches, whatever the order of the reports; those of a request arrive in this order.
func (c *Core) Landed(number, i int) {
	l := c.links[number]
	l.inFlightSlot(i).state = landed
	c.completeInOrder(l)
	c.advance(number)
}

// completeInOrder counts landed chunks before which no chunk is in flight.
func (c *Core) completeInOrder(l *link) {
	for {
		var first *slot // earliest launched
		for i := range l.slots {
			s := &l.slots[i]
			if (s.state == inFlight || s.state == landed) && (first == nil || s.seq < first.seq) {
				first = s
			}
		}
		if first == nil || first.state == inFlight {
			return
		}
		// Bytes behind a chunk that was refused, and will not arrive, are not the next in order.
		r := first.chunk.Request
		if !slices.ContainsFunc(l.slots, func(s slot) bool { return s.state == refused && s.chunk.Request == r && s.seq < first.seq }) {
			r.landed += first.chunk.Bytes
		}
		c.release(first)
	}
}

// Failed reports that the chunk of a slot failed on the device, or was not executed
// because an earlier one failed.
func (c *Core) Failed(number, i int, err error) { c.chunkFailed(number, i, failed, err) }

// Refused reports that the device did not accept all of the chunk of a slot.
func (c *Core) Refused(number, i int, err error) { c.chunkFailed(number, i, refused, err) }

func (c *Core) chunkFailed(number, i int, as state, err error) {
	l := c.links[number]
	s := l.inFlightSlot(i)
	s.state, s.err = as, err
	l.broken = true
	if errors.Is(err, device.ErrLost) {
		c.loseLink(l, err)
	}
	c.completeInOrder(l)
	c.advance(number)
}

// inFlightSlot returns a slot, whose chunk must be in flight.
func (l *link) inFlightSlot(i int) *slot {
	s := &l.slots[i]
	if s.state != inFlight {
		panic(fmt.Sprintf("dispatch: end reported of a chunk from %s to %s that is not in flight", l.From, l.To))
	}
	return s
}

// release frees a slot; its request ends if that was its last chunk.
func (c *Core) release(s *slot) {
	r := s.chunk.Request
	*s = slot{}
	if r.inFlight--; r.inFlight > 0 || r.ended {
		return
	}
	if r.failure != nil || r.landed == r.bytes {
		c.end(r)
	}
}

// advance dispatches chunks on a link, or recovers it, as its state allows.
func (c *Core) advance(number int) {
	l := c.links[number]
	switch {
	case l.lost != nil:
		// Failed chunks will not arrive.
		for i := range l.slots {
			if s := &l.slots[i]; s.state == failed || s.state == refused {
				c.release(s)
			}
		}
	case !l.broken:
		c.dispatch(number)
	case !l.recovering && !slices.ContainsFunc(l.slots, func(s slot) bool { return s.state == inFlight }):
		l.recovering = true
		c.emit(Action{Kind: Recover, Link: number})
	}
}

// Recovered reports that a link can be used again. Errors that do not wrap device.ErrLost
// are ignored.
func (c *Core) Recovered(number int, err error) {
	l := c.links[number]
	l.recovering, l.broken = false, false
	if errors.Is(err, device.ErrLost) {
		c.loseLink(l, err)
	}
	c.order = c.order[:0]
	for i := range l.slots {
		if l.slots[i].state != free {
			c.order = append(c.order, i)
		}
	}
	slices.SortFunc(c.order, func(a, b int) int { return cmp.Compare(l.slots[a].seq, l.slots[b].seq) })
	c.retryOrFail(l, number)
	for _, i := range c.order {
		if s := &l.slots[i]; s.chunk.Request.failure != nil {
			c.release(s)
		} else {
			c.launch(number, i)
		}
	}
	c.advance(number)
}

// retryOrFail finds the chunk that caused the failures of the others: by order of
// launches the first that failed or was refused, which may have put the stream into error
// too. It retries that chunk or fails its request.
func (c *Core) retryOrFail(l *link, number int) {
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
				c.emit(Action{Kind: Retry, Link: number, Chunk: s.chunk, Err: s.err})
			}
		}
	}
}

// loseLink fails every request that only this link can carry.
func (c *Core) loseLink(l *link, err error) {
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
		if l.carries(r) && c.checkCarried(r) != nil {
			c.fail(r, err)
		}
	}
}

// fail stops further launches of the request, and ends it once none of its chunks is in
// flight.
func (c *Core) fail(r *Request, err error) {
	if r.ended || r.failure != nil {
		return
	}
	r.failure = err
	c.queue(r.To).remove(r)
	if r.inFlight == 0 {
		c.end(r)
	}
}

func (c *Core) end(r *Request) {
	r.ended = true
	c.emit(Action{Kind: Finish, Request: r, Err: r.failure})
}

// RaiseClass gives the request a higher class, among whose requests its order of
// submission counts, and those that it waits for, too. A lower class is ignored.
func (c *Core) RaiseClass(r *Request, class uint8) {
	if class <= r.Class {
		return
	}
	q := c.queue(r.To)
	queued := q.remove(r)
	r.Class = class
	if queued {
		c.join(r)
		q.insert(r)
		c.passOn(r)
	}
}

// Cancel fails the request if nothing of it was launched yet, and reports whether it did.
func (c *Core) Cancel(r *Request, err error) bool {
	if r.ended || r.failure != nil || r.launched > 0 {
		return false
	}
	c.fail(r, err)
	return true
}

// Skip ends the request without an error and without a copy, if all its points are
// reached and nothing of it was launched yet, and reports whether it did.
func (c *Core) Skip(r *Request) bool {
	if r.ended || r.failure != nil || r.launched > 0 || len(r.waiting) > 0 {
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

// Busy reports whether a chunk of the link is in flight, or waits for the link's
// recovery.
func (c *Core) Busy(number int) bool {
	return slices.ContainsFunc(c.links[number].slots, func(s slot) bool { return s.state != free })
}

// InFlight returns a request that has chunks in flight, nil if there is none.
func (c *Core) InFlight() *Request {
	for _, l := range c.links {
		for i := range l.slots {
			if l.slots[i].state != free {
				return l.slots[i].chunk.Request
			}
		}
	}
	return nil
}
