package dispatch

import (
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// meter measures the rate of a link by the chunks that land: a moving average over the last few.
type meter struct {
	bytes, seconds float64
	// last is when one landed.
	last time.Duration
}

const (
	// meterDecay is the weight of what was measured before, with each chunk.
	meterDecay = 0.75
	// meteredBytes is the minimum size of a chunk that shows the rate, not the latency.
	meteredBytes = 256 << 10
	// An older measurement than meteredFor says nothing about other users of the link now.
	meteredFor = 20 * time.Millisecond
	// A link below this share of its rate has other users.
	slowedBelow = 0.75
)

// add counts a chunk that was launched and has landed, and returns how long the link took for it.
func (m *meter) add(bytes int64, launched, now time.Duration) time.Duration {
	began := max(launched, m.last)
	if began-m.last > meteredFor {
		m.bytes, m.seconds = 0, 0
	}
	m.last = now
	if bytes >= meteredBytes {
		m.bytes = m.bytes*meterDecay + float64(bytes)
		m.seconds = m.seconds*meterDecay + (now - began).Seconds()
	}
	return now - began
}

// rate is the measured rate, or else the given one.
func (m *meter) rate(otherwise float64, now time.Duration) float64 {
	if m.seconds == 0 || now-m.last > meteredFor {
		return otherwise
	}
	return m.bytes / m.seconds
}

// rate is the link's rate: as measured, otherwise as described; 0 if neither is known.
func (l *link) rate(now time.Duration) float64 { return l.meter.rate(l.BytesPerSecond, now) }

// slowed reports whether the link has other users.
func (m *meter) slowed(alone float64, now time.Duration) bool {
	return alone > 0 && m.rate(alone, now) < slowedBelow*alone
}

// pauses reports whether the link leaves others' chunks to other links for now.
func (c *Core) pauses(l *link) bool { return c.Yields && c.now < l.pausedUntil }

// shares reports whether relays may carry chunks of a request, where so many bytes wait for the
// link.
func (l *link) shares(r *Request, waiting int64) bool {
	return !r.Direct && l.RelayFrom > 0 && max(r.bytes, waiting) >= l.RelayFrom
}

// waiting is the number of bytes of at least this class that the link could launch and relays
// could carry, counted until there are enough.
func (l *link) waiting(class uint8, enough int64) (n int64) {
	for k := int(class); k < Classes && n < enough; k++ {
		n += l.queue.bytes(l, k, enough)
	}
	return n
}

// relayed reports whether relays carry chunks of a request of the link now.
func (c *Core) relayed(l *link, r *Request) bool {
	if !l.shares(r, l.waiting(r.Class, l.RelayFrom)) {
		return false
	}
	for _, h := range l.helpers {
		if h.usable() && !c.pauses(h.hop.relay.link) {
			return true
		}
	}
	return false
}

// part is a link that takes part in a request.
type part struct {
	link *link
	// rate in bytes per second, and backlog, the bytes that the link has to copy before.
	rate, backlog float64
	// delay is how long, in seconds, a chunk takes beside its time on the link.
	delay float64
}

// minChunks is how many of the smallest chunks are one of the largest.
const minChunks = 4

// share is the maximum size of the next chunk that a link takes of a request, over a hop unless
// that is nil; direct is the link that carries the request all the way. 0: none, since the others will
// have copied all that waits before this link would have copied a chunk.
func (c *Core) share(l, h, direct *link, r *Request) int64 {
	most := direct.RelayChunkBytes
	if h != nil {
		most = min(most, l.relay.BufferBytes)
	}
	least := min(device.Align(most/minChunks), most)
	rate, rates := l.rate(c.now), direct.rate(c.now)
	for _, o := range direct.helpers {
		rates += o.hop.relay.link.rate(c.now)
	}
	far := int64(math.MaxInt64) // the end is, with so many bytes waiting
	if rate > 0 {
		far = int64(min(2*float64(most)*rates/rate, 1<<60))
	}
	waiting := direct.waiting(r.Class, far)
	if waiting >= far {
		return most
	}
	parts := c.partners(direct, r.Class, most)
	if !slices.ContainsFunc(parts, func(p part) bool { return p.link == l }) {
		return least
	}
	rest := evenly(parts, l, float64(waiting))
	if rest < float64(least)/2 && (h != nil || l.inFlight() >= l.Depth) {
		return 0
	}
	return max(least, min(most, device.Align(int64(rest/2))))
}

// partners lists the links that take chunks of the requests of a link, of this class.
func (c *Core) partners(direct *link, class uint8, chunk int64) []part {
	parts := c.parts[:0]
	known := true
	add := func(l, h *link) {
		p := part{link: l, rate: l.rate(c.now)}
		known = known && p.rate > 0
		p.backlog = l.backlog(p.rate, c.now)
		if h != nil && p.rate > 0 {
			delay := h.hop.delay
			if delay == 0 && h.BytesPerSecond > 0 {
				delay = time.Duration(float64(chunk) / h.BytesPerSecond * 1e9)
			}
			p.delay = delay.Seconds()
			if h.To == l.From { // the chunk is late only where the link has nothing else to copy
				p.delay = max(0, p.delay-p.backlog/p.rate)
			}
		}
		parts = append(parts, p)
	}
	if own := direct.queue.next(direct, false); direct.works() && (own == nil || own.Class <= class) {
		add(direct, nil)
	}
	for _, h := range direct.helpers {
		l := h.hop.relay.link
		if !h.usable() || c.pauses(l) {
			continue
		}
		if own := l.queue.next(l, false); own == nil || own.Class < class || c.NoDirectFirst && own.Class == class {
			add(l, h)
		}
	}
	if !known {
		for i := range parts {
			parts[i].rate, parts[i].delay = 1, 0
		}
	}
	c.parts = parts
	return parts
}

// backlog is the number of bytes in flight on the link, less what it has copied of the first chunk at
// a rate.
func (l *link) backlog(rate float64, now time.Duration) float64 {
	var bytes int64
	var first *slot
	for i := range l.slots[:l.used] {
		s := &l.slots[i]
		if s.state == free {
			continue
		}
		bytes += s.f.chunk.Bytes
		if s.state == inFlight && (first == nil || s.seq < first.seq) {
			first = s
		}
	}
	if first == nil {
		return float64(bytes)
	}
	done := rate * (now - max(first.launched, l.meter.last)).Seconds()
	return float64(bytes) - min(done, float64(first.f.chunk.Bytes))
}

// evenly is the part of so many bytes that a link copies if all links that copy some end at the
// same time.
func evenly(parts []part, l *link, bytes float64) float64 {
	for {
		rates, sum := 0.0, bytes
		for _, p := range parts {
			rates, sum = rates+p.rate, sum+p.backlog+p.rate*p.delay
		}
		end := sum / rates // seconds from now
		left := parts[:0]
		for _, p := range parts {
			if p.rate*(end-p.delay) > p.backlog {
				left = append(left, p)
			}
		}
		if len(left) == len(parts) || len(left) == 0 {
			for _, p := range left {
				if p.link == l {
					return p.rate*(end-p.delay) - p.backlog
				}
			}
			return 0
		}
		parts = left
	}
}
