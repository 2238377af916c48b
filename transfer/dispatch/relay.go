package dispatch

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Relay is buffers in the memory of a GPU, through which its link from or to the host carries
// chunks of other GPUs' requests.
type Relay struct {
	// Link is the number of that link.
	Link int
	// Buffers is their number, BufferBytes the size of each: with two, the link fills one while
	// the other is emptied and the host learns of that.
	Buffers     int
	BufferBytes int64
}

type relay struct {
	Relay
	link *link
	// hops connect the buffers with other spaces.
	hops []*link
	// buffers says which are in use.
	buffers []bool
	// ending: it was removed. retired: its link failed too often.
	ending, retired bool
	trouble         trouble
}

// hop is the part of a link that belongs to a relay: it connects the relay's buffers with the
// other end of the requests of a pair.
type hop struct {
	relay   *relay
	pair    device.Pair
	retired bool
	trouble trouble
	// delay is how long it takes from the launch of a chunk until the host knows that it has
	// landed: a moving average.
	delay time.Duration
	// latest is the number of the last chunk that the relay took over the hop, in the order of all.
	latest uint64
}

// trouble counts failures of relayed chunks.
type trouble struct{ failures, since int }

// A relay or a hop is retired by the second failure without forgiveAfter chunks in between.
const forgiveAfter = 256

func (t *trouble) landed() {
	if t.since++; t.since == forgiveAfter {
		*t = trouble{}
	}
}

func (t *trouble) again() bool {
	t.failures, t.since = t.failures+1, 0
	return t.failures > 1
}

// AddRelay lets a link carry chunks for others, over the hops of AddHop, which is called before or
// after. A relay that was removed and is drained may be added again, with its hops, and is no longer
// retired.
func (c *Core) AddRelay(d Relay) error {
	l := c.links[d.Link]
	switch b := l.relay; {
	case d.Buffers < 1 || d.BufferBytes < 1:
		return fmt.Errorf("dispatch: a relay of %d buffers of %d bytes: must be at least 1", d.Buffers, d.BufferBytes)
	case l.hop != nil:
		return errors.New("dispatch: a hop of a relay cannot be a relay")
	case b != nil && !b.ending:
		return fmt.Errorf("dispatch: the link from %s to %s is a relay already", l.From, l.To)
	case b != nil && b.used():
		return fmt.Errorf("dispatch: buffers of the relay from %s to %s are still in use", l.From, l.To)
	case b == nil:
		l.relay = &relay{link: l}
	}
	b := l.relay
	*b = relay{Relay: d, link: l, hops: b.hops, buffers: make([]bool, d.Buffers)}
	for _, h := range b.hops {
		h.slots, h.used = make([]slot, d.Buffers), 0
		h.hop.retired, h.hop.trouble = false, trouble{}
	}
	c.dispatch(l)
	return nil
}

// AddHop connects the buffers of a link's relay with another space, and returns the number of the
// hop, which is launched on like a link: into the buffers, or out of them.
func (c *Core) AddHop(number int, d Link) (int, error) {
	l := c.links[number]
	pair := device.Pair{From: l.From, To: d.To}
	if d.To == l.From {
		pair = device.Pair{From: d.From, To: l.To}
	}
	if d.From != l.To && d.To != l.From {
		return 0, fmt.Errorf("dispatch: a hop from %s to %s does not continue the link from %s to %s", d.From, d.To, l.From, l.To)
	}
	if l.relay == nil {
		l.relay = &relay{link: l, ending: true} // as if it had been removed
	}
	d.Depth = l.relay.Buffers
	h := &link{Link: d, number: len(c.links), slots: make([]slot, l.relay.Buffers), hop: &hop{relay: l.relay, pair: pair}}
	c.links = append(c.links, h)
	l.relay.hops = append(l.relay.hops, h)
	for _, o := range c.links {
		if o.hop == nil && o.From == pair.From && o.To == pair.To {
			o.helpers = append(o.helpers, h)
		}
	}
	c.dispatch(l)
	return h.number, nil
}

// RemoveRelay ends the use of a link's relay: no further chunk takes it. Drained follows, when
// none is in its buffers.
func (c *Core) RemoveRelay(number int) {
	b := c.links[number].relay
	if b == nil || b.ending {
		return
	}
	b.ending = true
	c.drained(b)
}

func (b *relay) used() bool { return slices.Contains(b.buffers, true) }

// drained reports a relay that was removed and is not used.
func (c *Core) drained(b *relay) {
	if b.ending && !b.used() {
		c.emit(Action{Kind: Drained, Link: b.link.number})
	}
}

// helps reports whether the hop can be used.
func (h *hop) helps() bool { return !h.retired && !h.relay.ending && !h.relay.retired }

// usable reports whether the relay of a hop can carry chunks now.
func (l *link) usable() bool { return l.works() && l.hop.helps() && l.hop.relay.link.works() }

// direct is a link that carries the hop's requests all the way, nil if there is none.
func (h *hop) direct(c *Core) *link {
	for _, l := range c.links {
		if l.hop == nil && l.lost == nil && l.From == h.pair.From && l.To == h.pair.To {
			return l
		}
	}
	return nil
}

// assist lets relays take what the link has not.
func (c *Core) assist(l *link) {
	for _, h := range l.helpers {
		c.dispatch(h.hop.relay.link)
	}
}

// longQueue is a queue's length, in bytes, from which on it counts as no longer than others.
const longQueue = 1 << 30

// steal is the chunk of another link's requests that a link takes over its relay, where it could take one
// of its own request, or that is nil: of a higher class; of these the highest; the preferred space's; that of
// the longest queue. Without direct first one of the same class may go before its own by these rules, too; of
// queues of one length that of which the link took a chunk longest ago.
func (c *Core) steal(l *link, own *Request) (p pick) {
	b := l.relay
	if !slices.Contains(b.buffers, false) || c.pauses(l) {
		return pick{}
	}
	var most int64
	var preferred bool
	var latest uint64
	above := -1
	if own != nil {
		above = int(own.Class)
	}
	if own != nil && c.NoDirectFirst && len(own.returned) == 0 && c.relayed(l, own) {
		above--
		p.request, most, preferred, latest = own, l.waiting(own.Class, longQueue), c.prefers(l), l.latest
	}
	for _, h := range b.hops {
		d := h.hop.direct(c)
		if d == nil || !h.usable() {
			continue
		}
		r := d.queue.next(d, true)
		if r == nil || int(r.Class) <= above {
			continue
		}
		wants := c.prefers(d)
		waiting := d.waiting(r.Class, longQueue)
		if q := p.request; q != nil {
			switch {
			case r.Class < q.Class, r.Class == q.Class && preferred && !wants,
				r.Class == q.Class && preferred == wants && (waiting < most || waiting == most && (!c.NoDirectFirst || h.hop.latest >= latest)):
				continue
			}
		}
		limit := c.share(l, h, d, r)
		if limit == 0 {
			continue
		}
		p = pick{request: r, hop: h, limit: limit, bytes: chunkSize(r.bytes-r.launched, limit)}
		most, preferred, latest = waiting, wants, h.hop.latest
	}
	if p.hop == nil {
		return pick{}
	}
	return p
}

// prefers reports whether the requests of a link are the preferred space's.
func (c *Core) prefers(l *link) bool {
	return c.Preferred != device.Host && (l.From == c.Preferred || l.To == c.Preferred)
}

// board reserves what a chunk needs to take a hop beside a link, in the order of its way.
func (c *Core) board(f *flight, l, h *link) {
	b := l.relay
	f.relay, f.buffer = b, slices.Index(b.buffers, false)
	b.buffers[f.buffer] = true
	h.reserve(f.buffer, f)
	f.way[1] = stop{h, f.buffer}
	if h.To == l.From {
		f.way[0], f.way[1] = f.way[1], f.way[0]
	}
}

// stoppedOver counts a part of a relayed chunk's way, which took so long on its link.
func (c *Core) stoppedOver(l *link, f *flight, launched, took time.Duration) {
	if h := l.hop; h != nil {
		h.trouble.landed()
		if h.delay == 0 {
			h.delay = c.now - launched
		}
		h.delay += (c.now - launched - h.delay) / 4
		return
	}
	f.relay.trouble.landed()
	if c.Yields && l.meter.slowed(l.BytesPerSecond, c.now) {
		l.pausedUntil = c.now + took
	}
}

// goOn lets a chunk that has arrived in a buffer take the rest of its way.
func (c *Core) goOn(f *flight) {
	at := f.way[1]
	switch {
	case f.chunk.Request.failure != nil:
		c.settle(f, false)
	case at.link.lost != nil:
		c.giveBack(append(c.back[:0], f))
	case at.link.broken:
		at.link.slots[at.slot].state = ready
	default:
		c.launch(at)
	}
}

// blame counts a failure of a chunk that was relayed over the link, and retires it by the second.
func (c *Core) blame(l *link, err error) {
	if l.hop != nil && l.hop.trouble.again() || l.hop == nil && l.relay.trouble.again() {
		c.retire(l, err)
	}
}

// retire ends the use of a hop, or of the relay of a link.
func (c *Core) retire(l *link, err error) {
	var retired *bool
	switch {
	case l.hop != nil:
		retired = &l.hop.retired
	case l.relay != nil && !l.relay.ending:
		retired = &l.relay.retired
	}
	if retired != nil && !*retired {
		*retired = true
		c.emit(Action{Kind: Retire, Link: l.number, Err: err})
	}
}
