package dispatch

import (
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

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
	// BytesPerSecond is the link's rate with no other traffic; 0: unknown. It counts only for
	// requests that relays carry, too, until chunks have shown the rate.
	BytesPerSecond float64
	// RelayFrom is the number of bytes waiting for the link from which on relays carry some of
	// them; 0: never. RelayChunkBytes is the maximum size of a chunk then, on this link and on
	// relays; 0: ChunkBytes.
	RelayFrom, RelayChunkBytes int64
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
	// reserved: the chunk is on its way to a relay's buffer, and then takes this slot. ready:
	// it is in the buffer, and waits until the link is recovered.
	reserved
	ready
)

// slot is one chunk that a link may have in flight.
type slot struct {
	state state
	f     *flight
	// seq is the order of launches, launched the time of this one.
	seq      uint64
	launched time.Duration
	err      error
}

type link struct {
	Link
	number int
	// queue of the destination; nil: the link is a hop of a relay, which takes no chunks by
	// itself.
	queue *queue
	// Of the slots, those from used on are free.
	slots []slot
	used  int
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

	// relay has the buffers through which the link carries chunks of others; nil: none.
	relay *relay
	// hop is set for a hop of a relay.
	hop *hop
	// helpers are the hops of relays that can carry the link's requests.
	helpers []*link
	meter   meter
	// pausedUntil is when the link takes chunks of others again, see Core.Yields.
	pausedUntil time.Duration
	// latest is the number of the last chunk that the link took of its own requests, in the order of all.
	latest uint64
}

// AddLink adds a link and returns its number.
func (c *Core) AddLink(d Link) int {
	if d.RelayChunkBytes == 0 {
		d.RelayChunkBytes = d.ChunkBytes
	}
	l := &link{Link: d, number: len(c.links), queue: c.queue(d.To), slots: make([]slot, d.Slots())}
	for _, h := range c.links {
		if h.hop != nil && h.hop.pair == (device.Pair{From: d.From, To: d.To}) {
			l.helpers = append(l.helpers, h)
		}
	}
	c.links = append(c.links, l)
	return l.number
}

// carries reports whether the link can copy chunks of the request all the way.
func (l *link) carries(r *Request) bool { return l.hop == nil && l.From == r.From && l.To == r.To }

// works reports whether chunks can be launched.
func (l *link) works() bool { return l.lost == nil && !l.broken }

// full reports whether enough chunks are in flight, before one of at most next bytes. Chunks that
// are on their way to a buffer do not count, and before one that would follow them, relayed,
// the first of them does not: it comes when another one has landed.
func (l *link) full(next int64, relayed bool) bool {
	n, bytes, weight := 0, int64(0), int64(0)
	var first *slot // earliest launched
	coming := false
	for i := range l.slots[:l.used] {
		s := &l.slots[i]
		switch {
		case s.state == free:
			continue
		case s.state != reserved:
		case relayed && coming:
		default:
			coming = true
			continue
		}
		if n, bytes, weight = n+1, bytes+s.f.chunk.Bytes, weight+s.f.weight; first == nil || s.seq < first.seq {
			first = s
		}
	}
	return n >= l.Depth && (weight-first.f.weight >= l.WindowBytes || bytes+next > int64(l.Depth)*l.ChunkBytes)
}

// Queued is how many requests of a link have bytes that it copies now, or that wait for nothing but the link, and how many
// bytes. It does not count what is on its way through relays.
func (c *Core) Queued(number int) (requests int, bytes int64) {
	l := c.links[number]
	if l.queue == nil {
		return 0, 0
	}
	under := l.slots[:l.used]
	for i := range under {
		if under[i].state == free || !l.carries(under[i].f.chunk.Request) {
			continue
		}
		r := under[i].f.chunk.Request
		bytes += under[i].f.chunk.Bytes
		same := func(s slot) bool { return s.state != free && s.f.chunk.Request == r }
		if (r.failure != nil || r.launched == r.bytes && len(r.returned) == 0) && !slices.ContainsFunc(under[:i], same) { // not in the queue
			requests++
		}
	}
	for _, class := range l.queue.byClass {
		for _, r := range class {
			if len(r.waiting) > 0 || !l.carries(r) {
				continue
			}
			requests++
			bytes += r.bytes - r.launched
			for _, f := range r.returned {
				bytes += f.chunk.Bytes
			}
		}
	}
	return requests, bytes
}

// inFlight is the number of chunks with the device.
func (l *link) inFlight() (n int) {
	for i := range l.slots[:l.used] {
		if l.slots[i].state == inFlight {
			n++
		}
	}
	return n
}

// dispatch launches chunks on the link until enough are in flight.
func (c *Core) dispatch(l *link) {
	for c.dispatchOne(l) {
	}
}

// dispatchOne launches a chunk on the link, unless enough are in flight, and reports whether it did.
func (c *Core) dispatchOne(l *link) bool {
	if !l.works() || l.full(0, false) {
		return false
	}
	i := 0
	for i < l.used && l.slots[i].state != free {
		i++
	}
	if i == len(l.slots) {
		return false
	}
	p := c.next(l)
	if p.request == nil || l.full(p.bytes, false) {
		return false
	}
	f := c.take(l, p)
	f.way[0] = stop{l, i}
	l.reserve(i, f)
	if p.hop != nil {
		c.board(f, l, p.hop)
	}
	c.launch(f.way[0])
	return true
}

// pick is what a link launches next: a chunk of at most limit bytes, and about bytes, of a
// request; over a hop, unless that is nil.
type pick struct {
	request      *Request
	hop          *link
	bytes, limit int64
}

// next is the chunk that the link takes next: of its own requests, unless one that it relays
// has a higher class, or goes first with NoDirectFirst.
func (c *Core) next(l *link) (p pick) {
	r := l.queue.next(l, false)
	if l.relay != nil {
		if p = c.steal(l, r); p.request != nil && !l.full(p.bytes, true) {
			return p
		}
	}
	switch {
	case r == nil:
		return pick{}
	case len(r.returned) > 0:
		return pick{request: r, bytes: r.returned[0].chunk.Bytes}
	}
	limit := l.ChunkBytes
	if len(l.helpers) > 0 && c.relayed(l, r) {
		if limit = c.share(l, nil, l, r); limit == 0 {
			return pick{}
		}
	}
	return pick{request: r, limit: limit, bytes: chunkSize(r.bytes-r.launched, limit)}
}

// take takes the chunk from its request.
func (c *Core) take(l *link, p pick) *flight {
	r := p.request
	if c.takes++; p.hop != nil {
		p.hop.hop.latest = c.takes
	} else {
		l.latest = c.takes
	}
	var f *flight
	if p.hop == nil && len(r.returned) > 0 {
		f = r.returned[0]
		r.returned = slices.Delete(r.returned, 0, 1)
	} else {
		f = c.newFlight(r, p.limit)
		turns := l // whose turns the request takes
		if p.hop != nil {
			turns = p.hop.hop.direct(c)
		}
		turns.took(r, f.chunk.Bytes)
	}
	if r.launched == r.bytes && len(r.returned) == 0 {
		c.queue(r.To).remove(r)
	}
	f.weight = l.weight(f.chunk)
	return f
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

// launch launches the chunk that has a slot.
func (c *Core) launch(at stop) {
	l := at.link
	l.seq++
	s := &l.slots[at.slot]
	s.state, s.seq, s.launched, s.err = inFlight, l.seq, c.now, nil
	c.emit(Action{Kind: Launch, Link: l.number, Slot: at.slot, Chunk: s.f.chunk, Via: s.f.via(l)})
}

// Landed reports that the chunk of a slot has arrived. Chunks of a link are counted in the order
// of their launches, whatever the order of the reports.
func (c *Core) Landed(number, i int) {
	l := c.links[number]
	l.inFlightSlot(i).state = landed
	c.completeInOrder(l)
	c.advance(l)
}

// completeInOrder counts landed chunks before which no chunk is in flight.
func (c *Core) completeInOrder(l *link) {
	for {
		first := -1 // earliest launched
		for i := range l.slots[:l.used] {
			s := &l.slots[i]
			if (s.state == inFlight || s.state == landed) && (first < 0 || s.seq < l.slots[first].seq) {
				first = i
			}
		}
		if first < 0 || l.slots[first].state == inFlight {
			return
		}
		c.complete(l, first)
	}
}

// complete counts a chunk that has landed: in its destination, or in a relay's buffer, from
// where it goes on.
func (c *Core) complete(l *link, i int) {
	f, launched := l.slots[i].f, l.slots[i].launched
	took := l.meter.add(f.chunk.Bytes, launched, c.now)
	l.free(i)
	if f.relay != nil {
		c.stoppedOver(l, f, launched, took)
		if l == f.way[0].link {
			c.goOn(f)
			return
		}
	}
	f.chunk.Request.landed += f.chunk.Bytes
	c.settle(f, true)
}

// reserve gives a slot to a chunk, and free takes it back.
func (l *link) reserve(i int, f *flight) {
	l.slots[i] = slot{state: reserved, f: f}
	l.used = max(l.used, i+1)
}

func (l *link) free(i int) {
	l.slots[i] = slot{}
	for l.used > 0 && l.slots[l.used-1].state == free {
		l.used--
	}
}

// inFlightSlot returns a slot, whose chunk must be in flight.
func (l *link) inFlightSlot(i int) *slot {
	s := &l.slots[i]
	if s.state != inFlight {
		panic(fmt.Sprintf("dispatch: end reported of a chunk from %s to %s that is not in flight", l.From, l.To))
	}
	return s
}

// advance dispatches chunks on a link, or recovers it, as its state allows.
func (c *Core) advance(l *link) {
	switch {
	case l.broken: // also of a lost device, which may still execute part of what it refused
		if !l.recovering && !slices.ContainsFunc(l.slots[:l.used], func(s slot) bool { return s.state == inFlight }) {
			l.recovering = true
			c.emit(Action{Kind: Recover, Link: l.number})
		}
	case l.lost != nil:
		c.abandon(l)
	case l.hop != nil:
		c.dispatch(l.hop.relay.link)
	default:
		c.dispatch(l)
		c.assist(l)
	}
}

// Busy reports whether a chunk of the link is in flight, or waits for the link's
// recovery.
func (c *Core) Busy(number int) bool {
	return slices.ContainsFunc(c.links[number].slots[:c.links[number].used], func(s slot) bool { return s.state != free && s.state != reserved })
}

// InFlight returns a request that has chunks in flight, nil if there is none.
func (c *Core) InFlight() *Request {
	for _, l := range c.links {
		for i := range l.slots[:l.used] {
			if l.slots[i].state != free {
				return l.slots[i].f.chunk.Request
			}
		}
	}
	return nil
}
