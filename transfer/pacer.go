package transfer

import (
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// pacer says when the chunks in flight on a link's stream can have landed at the earliest
// (device.Due), so that the host need not look before. What it says must not be too late: a link would
// run dry, and a consumer wait. So
//
//   - it reckons with paceMargin times the rate, which is the topology's, or that of recent chunks where
//     it is higher, and from when the chunk before can have landed at the earliest, not from when the host
//     has seen it: then it had been looked for in vain, or was not due;
//   - it says nothing before a large chunk was seen not to have landed at the time that it reckoned with,
//     and nothing again after one was not: its rate may be too low, or the host looks too seldom to tell.
//     Then the host looks as often as it would without. A link whose rate changes, beyond a profile that is
//     too low, has one chunk that is seen late for each change.
//
// Links that are slower, as those that share a root are, are looked at for longer.
type pacer struct {
	// profile is the topology's rate, rate that of recent chunks, or profile, if that is higher; in bytes
	// per second. 0: unknown.
	profile, rate float64
	// trusted: the latest chunk was seen not to have landed when it can have landed at the earliest.
	trusted bool
	// flight are the chunks in flight, in the order of their launch. seen is when the host learned of the
	// end of the one before the first; exact: it had been looked for in vain shortly before.
	flight []paced
	seen   time.Duration
	exact  bool
}

// paced is a chunk in flight.
type paced struct {
	due      *device.Due
	bytes    int64
	launched time.Duration
	// takes is how long it is copied for, at the least, ends when it can have landed at the earliest.
	takes, ends time.Duration
}

const (
	paceMargin = 1.15
	// paceLeast is the least wait for which a due time is told: a sleep saves little of a shorter one.
	paceLeast = 60 * time.Microsecond
	// paceFall is the weight of a chunk that was slower than the fastest recent ones: one that the host has
	// seen late, or that waited for others, says little of the link.
	paceFall = 1. / 8
)

// launch notes a chunk that is about to be enqueued behind the others, and says when it is due.
func (p *pacer) launch(now time.Duration, bytes int64, due *device.Due) {
	due.NotBefore.Store(0)
	due.Pending.Store(0)
	if p.profile <= 0 {
		return
	}
	starts := now
	if n := len(p.flight); n > 0 {
		starts = max(starts, p.flight[n-1].ends)
	}
	takes := time.Duration(float64(bytes) / (paceMargin * max(p.profile, p.rate)) * 1e9)
	p.flight = append(p.flight, paced{due: due, bytes: bytes, launched: now, takes: takes, ends: starts + takes})
	p.tell(now, len(p.flight)-1)
}

// tell says when the chunks from the i-th on are due: 0 where that is not known, or soon.
func (p *pacer) tell(now time.Duration, i int) {
	for ; i < len(p.flight); i++ {
		c := &p.flight[i]
		at := c.ends
		if !p.trusted || at-now < paceLeast {
			at = 0
		}
		c.due.NotBefore.Store(int64(at))
	}
}

// land notes that the host has learned of the end of a chunk that was launched with due. The others are
// copied one after the other, from when that can have been on.
func (p *pacer) land(now time.Duration, due *device.Due) {
	k := p.find(due)
	if k < 0 {
		return
	}
	c := &p.flight[k]
	pending := time.Duration(due.Pending.Load())
	at := max(pending, c.launched)
	if c.ends <= now { // otherwise it has landed sooner than was thought possible
		at = max(at, c.ends)
	}
	if k == 0 {
		if p.large(c.bytes) {
			p.trusted = pending >= c.ends
			p.learn(now)
		}
		p.seen, p.exact = now, pending > 0 && now-pending <= c.takes/8
	}
	p.flight = slices.Delete(p.flight, k, k+1)
	if k > 0 {
		return // one before it is still being copied, for all that is known
	}
	for i := range p.flight {
		c := &p.flight[i]
		at += c.takes
		c.ends = at
	}
	p.tell(now, 0)
}

// drop forgets a chunk that has failed, or was not enqueued. Those behind it may be over at any time.
func (p *pacer) drop(now time.Duration, due *device.Due) {
	k := p.find(due)
	if k < 0 {
		return
	}
	p.flight = slices.Delete(p.flight, k, k+1)
	for i := range p.flight[k:] {
		p.flight[k+i].ends = now
	}
	p.tell(now, k)
}

// large reports whether so many bytes take so long, by the profile, that the link learns from them. Of a
// small chunk much of the time is latency, and it is seldom looked for in time to tell.
func (p *pacer) large(bytes int64) bool {
	return time.Duration(float64(bytes)/(paceMargin*p.profile)*1e9) >= paceLeast
}

func (p *pacer) find(due *device.Due) int {
	return slices.IndexFunc(p.flight, func(c paced) bool { return c.due == due })
}

// learn takes the rate of the first chunk, which has landed, into account, unless it was behind one that the
// host has seen late: that makes it look fast.
func (p *pacer) learn(now time.Duration) {
	c, rate := &p.flight[0], max(p.profile, p.rate)
	if p.seen > c.launched && !p.exact {
		return
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
