package dispatch

import (
	"cmp"
	"errors"
	"slices"

	"github.com/moeserve/moeserve/device"
)

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
	c.advance(l)
}

// Recovered reports that nothing of a link is in flight any more, and that it can be used again unless its
// device is lost. Errors that do not wrap device.ErrLost are ignored.
func (c *Core) Recovered(number int, err error) {
	l := c.links[number]
	l.recovering, l.broken = false, false
	if errors.Is(err, device.ErrLost) {
		c.loseLink(l, err)
	}
	if l.lost != nil {
		c.advance(l)
		return
	}
	c.order = c.order[:0]
	for i := range l.slots[:l.used] {
		if s := &l.slots[i]; s.state == failed || s.state == refused || s.state == ready {
			c.order = append(c.order, i)
		}
	}
	// Chunks that wait in buffers were not launched yet: they go behind the others.
	slices.SortFunc(c.order, func(a, b int) int {
		return cmp.Or(cmp.Compare(l.slots[a].state/ready, l.slots[b].state/ready), cmp.Compare(l.slots[a].seq, l.slots[b].seq))
	})
	c.retryOrFail(l)
	back := c.back[:0]
	for _, i := range c.order {
		s := &l.slots[i]
		switch f := s.f; {
		case f.chunk.Request.failure != nil:
			c.settle(f, false)
		case f.relay != nil && (f.direct || f.relay.ending || !f.hop().hop.helps()):
			back = append(back, f)
		default:
			c.launch(stop{l, i})
		}
	}
	c.giveBack(back)
	c.advance(l)
}

// retryOrFail finds the chunk that caused the failures of the others: by order of
// launches the first that failed or was refused, which may have put the stream into error
// too. It retries that chunk, or fails its request. A chunk that a relay carried is retried on
// the request's own link, which may accept what the relay refused, and try that twice.
func (c *Core) retryOrFail(l *link) {
	blamed := false
	for _, i := range c.order {
		s := &l.slots[i]
		f := s.f
		switch {
		case s.state == ready || blamed && s.state == failed:
			continue
		case f.relay != nil:
			f.direct, f.retried = true, s.state == failed
			if !blamed {
				c.blame(l, s.err)
			}
		case s.state == refused || f.retried:
			blamed = true
			c.fail(f.chunk.Request, s.err)
			continue
		default:
			f.retried = true
		}
		if blamed = true; f.chunk.Request.failure == nil {
			c.emit(Action{Kind: Retry, Link: l.number, Chunk: f.chunk, Err: s.err})
		}
	}
}

// loseLink fails every request that only this link can carry.
func (c *Core) loseLink(l *link, err error) {
	if l.lost != nil {
		return
	}
	l.lost = err
	c.retire(l, err)
	for i := range l.slots[:l.used] {
		if s := &l.slots[i]; s.state != free && s.f.relay == nil {
			c.fail(s.f.chunk.Request, err)
		}
	}
	if l.hop != nil {
		return
	}
	for _, r := range l.queue.all() {
		if l.carries(r) && c.checkCarried(r) != nil {
			c.fail(r, err)
		}
	}
}

// abandon ends the failed chunks of a lost link, which will not arrive; those that it relays go
// back to their requests.
func (c *Core) abandon(l *link) {
	back := c.back[:0]
	for i := range l.slots[:l.used] {
		switch s := &l.slots[i]; {
		case s.state != failed && s.state != refused && s.state != ready:
		case s.f.relay != nil:
			back = append(back, s.f)
		default:
			c.settle(s.f, false)
		}
	}
	c.giveBack(back)
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
		return
	}
	for len(r.returned) > 0 {
		f := r.returned[0]
		r.returned = slices.Delete(r.returned, 0, 1)
		c.settle(f, false)
	}
}

func (c *Core) end(r *Request) {
	r.ended = true
	err := r.failure
	if r.Skipped() {
		err = nil
	}
	c.emit(Action{Kind: Finish, Request: r, Err: err})
}
