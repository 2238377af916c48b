package dispatch

import (
	"errors"
	"fmt"
	"slices"
	"time"

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
	// Retire reports that no more chunks are relayed over Link, which failed with Err, again or
	// with its device: a hop, or the link whose relay it is.
	Retire
	// Drained: the buffers of the relay of Link, which was removed, are no longer used.
	Drained
)

// Hop says which part of its way a chunk is launched on.
type Hop uint8

// The parts: all of it; from the source to a relay's buffer, where its bytes are contiguous; from
// there to the destination.
const (
	Direct Hop = iota
	ToBuffer
	FromBuffer
)

// Via is the part of a chunk's way that is launched, and the buffer, of the relay of a link.
type Via struct {
	Hop           Hop
	Relay, Buffer int
}

// Action is what the caller must do next.
type Action struct {
	Kind       Kind
	Link, Slot int
	Chunk      Chunk
	Via        Via
	Request    *Request
	Point      device.Point
	Err        error
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
	// Preferred is the space whose requests, from or to it, are relayed before those of others
	// of their class. Default: where most bytes wait.
	Preferred device.Space
	// Yields: a link that copies slower than it could, because others use it too, relays
	// nothing for as long as its last chunk took. Default: it goes on.
	Yields bool
	// NoDirectFirst: of requests of one class that relays carry, a link's own have no precedence over
	// others': it takes a chunk of those of which most waits. To measure what the precedence is worth.
	NoDirectFirst bool

	links  []*link
	queues []*queue
	seq    uint64
	// takes is the number of chunks that links have taken.
	takes uint64
	// waiting are the requests that wait for each point; freeLists is a freelist.
	waiting   map[device.Point]*waiters
	freeLists []*waiters
	// The first of the actions were returned already.
	actions  []Action
	returned int
	// now is the time of the events that are reported.
	now         time.Duration
	freeFlights []*flight
	// Scratch space of Recovered, giveBack and share.
	order []int
	back  []*flight
	parts []part
}

// At sets the time of the events that are reported next; it never decreases. Only relays need it.
func (c *Core) At(now time.Duration) { c.now = now }

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
	if c.returned == len(c.actions) {
		c.actions, c.returned = c.actions[:0], 0
		return Action{}, false
	}
	a := c.actions[c.returned]
	c.actions[c.returned] = Action{}
	c.returned++
	return a, true
}

func (c *Core) emit(a Action) { c.actions = append(c.actions, a) }

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

// offer dispatches chunks on the links that can carry the request, and on relays: one on each,
// then another, so that all begin soon.
func (c *Core) offer(r *Request) {
	for again := true; again; {
		again = false
		for _, l := range c.links {
			if !l.carries(r) {
				continue
			}
			if len(l.helpers) == 0 {
				c.dispatch(l)
				continue
			}
			again = c.dispatchOne(l) || again
			for _, h := range l.helpers {
				again = c.dispatchOne(h.hop.relay.link) || again
			}
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

// errSkipped is the failure of a request that was skipped, which finishes without an error.
var errSkipped = errors.New("skipped")

// Skip ends the request without an error, if all its points are reached: nothing more of it is
// launched, and it ends when nothing of it is in flight any more. It returns how many bytes are
// thus not copied; 0: all of it is launched, it has failed or ended, or it waits for a point.
func (c *Core) Skip(r *Request) int64 {
	left := r.bytes - r.launched
	for _, f := range r.returned {
		left += f.chunk.Bytes
	}
	if r.ended || r.failure != nil || left == 0 || len(r.waiting) > 0 {
		return 0
	}
	c.fail(r, errSkipped)
	return left
}

// Abort fails the request: nothing more of it is launched, and it ends when nothing of it is in
// flight any more. False: it has failed or ended, or all of it is launched.
func (c *Core) Abort(r *Request, err error) bool {
	if r.ended || r.failure != nil || r.launched == r.bytes && len(r.returned) == 0 {
		return false
	}
	c.fail(r, err)
	return true
}

// Redirect lets the request read these pieces in another memory, if nothing of it was launched
// yet, and reports whether it does. They have the same destinations. Its place among the others
// stays. False, too, if no link can carry it.
func (c *Core) Redirect(r *Request, from device.Space, pieces []Piece) bool {
	if r.ended || r.failure != nil || r.launched > 0 {
		return false
	}
	old := r.From
	if r.From = from; c.checkCarried(r) != nil {
		r.From = old
		return false
	}
	r.Pieces, r.bytes = r.Pieces[:0], 0
	for _, p := range pieces {
		r.Add(p)
	}
	if len(r.waiting) == 0 {
		c.join(r)
		c.offer(r)
	}
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
