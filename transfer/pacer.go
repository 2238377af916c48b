package transfer

import (
	"slices"
	"sync/atomic"
	"time"
)

// pacer says when the chunks in flight on a link's stream can have landed at the earliest
// (device.Work.NotBefore), so that the host need not look before. What it says must not be too late: a
// link would run dry, and a consumer wait. So it reckons with paceMargin times the rate, which is the
// topology's, or that of recent chunks where it is higher: a profile with too low a rate is corrected by
// the chunks themselves, for one that has landed by then is seen when it is due, which is sooner than the
// rate would have it. Links that are slower, as those that share a root are, are looked at for longer.
type pacer struct {
	// profile is the topology's rate, rate that of recent chunks, or profile, if that is higher; in bytes
	// per second. 0: unknown.
	profile, rate float64
	// flight are the chunks in flight, in the order of their launch. seen is when the host learned of the
	// end of the one before the first.
	flight []paced
	seen   time.Duration
}

// paced is a chunk in flight.
type paced struct {
	// due is what is told of it: when it is due, 0 where that is not known, or soon.
	due      *atomic.Int64
	bytes    int64
	launched time.Duration
	// takes is how long it is copied for, at the least, ends when it can have landed at the earliest.
	takes, ends time.Duration
}

const (
	paceMargin = 1.15
	// paceLeast is the least wait for which a due time is told: a sleep saves little of a shorter one, and
	// what takes no longer is on links whose chunks the host must see at once, NVLink.
	paceLeast = 60 * time.Microsecond
	// paceFall is the weight of a chunk that was slower than the fastest recent ones: one that the host has
	// seen late, or that waited for others, says little of the link.
	paceFall = 1. / 8
)

// launch notes a chunk that is about to be enqueued behind the others, and sets its due time.
func (p *pacer) launch(now time.Duration, bytes int64, due *atomic.Int64) {
	due.Store(0)
	if p.profile <= 0 {
		return
	}
	starts := now
	if n := len(p.flight); n > 0 {
		starts = max(starts, p.flight[n-1].ends)
	}
	takes := time.Duration(float64(bytes) / (paceMargin * max(p.profile, p.rate)) * 1e9)
	c := paced{due: due, bytes: bytes, launched: now, takes: takes, ends: starts + takes}
	c.tell(now)
	p.flight = append(p.flight, c)
}

// tell sets the due time.
func (c *paced) tell(now time.Duration) {
	at := c.ends
	if at-now < paceLeast {
		at = 0
	}
	c.due.Store(int64(at))
}

// land notes that the host has learned of the end of a chunk that was launched with due. The others are
// copied from then on, one after the other.
func (p *pacer) land(now time.Duration, due *atomic.Int64) {
	k := p.find(due)
	if k < 0 {
		return
	}
	if k == 0 {
		p.learn(now)
		p.seen = now
	}
	p.flight = slices.Delete(p.flight, k, k+1)
	if k > 0 {
		return // one before it is still being copied, for all that is known
	}
	at := now
	for i := range p.flight {
		c := &p.flight[i]
		at += c.takes
		c.ends = at
		c.tell(now)
	}
}

// drop forgets a chunk that has failed, or was not enqueued. Those behind it may be over at any time.
func (p *pacer) drop(now time.Duration, due *atomic.Int64) {
	k := p.find(due)
	if k < 0 {
		return
	}
	p.flight = slices.Delete(p.flight, k, k+1)
	for i := range p.flight[k:] {
		c := &p.flight[k+i]
		c.ends = now
		c.tell(now)
	}
}

func (p *pacer) find(due *atomic.Int64) int {
	return slices.IndexFunc(p.flight, func(c paced) bool { return c.due == due })
}

// learn takes the rate of the first chunk, which has landed, into account. What the host has seen late
// makes the chunk behind look fast, so that no chunk counts for more than the margin.
func (p *pacer) learn(now time.Duration) {
	c, rate := &p.flight[0], max(p.profile, p.rate)
	if c.takes < paceLeast {
		return // of a small chunk much of the time is latency
	}
	got := paceMargin * rate
	if took := now - max(p.seen, c.launched); took > 0 {
		got = min(got, float64(c.bytes)/took.Seconds())
	}
	if got < rate {
		got = rate - (rate-got)*paceFall
	}
	p.rate = max(p.profile, got)
}
