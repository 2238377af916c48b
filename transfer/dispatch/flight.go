package dispatch

import "slices"

// flight is a chunk that was cut and has not ended.
type flight struct {
	chunk Chunk
	// begin is the number of bytes of the request before it; weight is what it counts for the
	// window.
	begin, weight int64
	// retried: the chunk failed before. direct: it is retried on a link of its request.
	retried, direct bool
	// before and after are its neighbors in Request.first.
	before, after *flight
	// way has the slots that it takes: one, or, over a relay, two, and a buffer.
	way    [2]stop
	relay  *relay
	buffer int
}

// stop is a slot of a link.
type stop struct {
	link *link
	slot int
}

// hop is the hop of a relay that the chunk takes.
func (f *flight) hop() *link {
	if f.way[0].link.hop != nil {
		return f.way[0].link
	}
	return f.way[1].link
}

// via says which part of its way the chunk takes on a link.
func (f *flight) via(l *link) Via {
	switch {
	case f.relay == nil:
		return Via{}
	case l == f.way[0].link:
		return Via{Hop: ToBuffer, Relay: f.relay.link.number, Buffer: f.buffer}
	}
	return Via{Hop: FromBuffer, Relay: f.relay.link.number, Buffer: f.buffer}
}

// newFlight cuts the next chunk of a request.
func (c *Core) newFlight(r *Request, limit int64) *flight {
	var f *flight
	if n := len(c.freeFlights); n > 0 {
		f, c.freeFlights = c.freeFlights[n-1], c.freeFlights[:n-1]
	} else {
		f = &flight{}
	}
	*f = flight{begin: r.launched, before: r.last}
	f.chunk = r.cutChunk(limit)
	if r.last != nil {
		r.last.after = f
	} else {
		r.first = f
	}
	r.last = f
	r.inFlight++
	return f
}

// leave gives back the slots and the buffer that a chunk has.
func (c *Core) leave(f *flight) {
	for _, at := range f.way {
		if at.link != nil && at.link.slots[at.slot].f == f {
			at.link.free(at.slot)
		}
	}
	f.way = [2]stop{}
	if b := f.relay; b != nil {
		b.buffers[f.buffer] = false
		f.relay = nil
		c.drained(b)
	}
}

// settle ends a chunk that has landed in its destination, or never will; its request ends if that
// was its last chunk.
func (c *Core) settle(f *flight, landed bool) {
	c.leave(f)
	r := f.chunk.Request
	if !landed && (r.missing == 0 || f.begin < r.missing-1) {
		r.missing = f.begin + 1
	}
	if f.before != nil {
		f.before.after = f.after
	} else {
		r.first = f.after
	}
	if f.after != nil {
		f.after.before = f.before
	} else {
		r.last = f.before
	}
	*f = flight{}
	c.freeFlights = append(c.freeFlights, f)
	if r.inFlight--; r.inFlight > 0 || r.ended {
		return
	}
	if r.failure != nil || r.landed == r.bytes {
		c.end(r)
	}
}

// giveBack lets links of their requests launch chunks that a relay could not carry.
func (c *Core) giveBack(back []*flight) {
	for _, f := range back {
		r := f.chunk.Request
		c.leave(f)
		if err := c.checkCarried(r); err != nil {
			c.fail(r, err)
		}
		if r.failure != nil {
			c.settle(f, false)
			continue
		}
		i, _ := slices.BinarySearchFunc(r.returned, f.begin, func(f *flight, begin int64) int { return int(f.begin - begin) })
		r.returned = slices.Insert(r.returned, i, f)
		if q := c.queue(r.To); !q.has(r) {
			q.insert(r)
		}
		c.offer(r)
	}
	clear(back)
	c.back = back[:0]
}
