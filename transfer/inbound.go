package transfer

import (
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// rate is what one link gives. What copies reach is measured where the topology limits the
// link: else they say how fast the host is.
type rate struct {
	bytesPerSecond float64
	measured       bool
	seen           PathStats
}

// Copies of less than this, together, say little about a link's rate. What is
// measured counts by half beside what was known before.
const (
	measureBytes = 64 << 20
	measureTime  = time.Millisecond
)

// update corrects the rate by what the link has done since.
func (r *rate) update(now PathStats) {
	bytes, busy := now.Bytes-r.seen.Bytes, now.Busy-r.seen.Busy
	if !r.measured || bytes < measureBytes || busy < measureTime {
		return
	}
	r.seen = now
	r.bytesPerSecond += (float64(bytes)/busy.Seconds() - r.bytesPerSecond) / 2
}

// Rate is what copies from one memory to another have reached lately, in bytes per second;
// before Inbound.Update has seen enough of them, what the topology says; 0 where that does
// not say, or there is no path.
func (e *Engine) Rate(pair device.Pair) float64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.existing(pair); l != nil {
		return l.rate.bytesPerSecond
	}
	return e.o.Machine.Topology().Paths[pair].BytesPerSecond
}

// update corrects the rate of a link, and says for how long it has been busy so far.
func (e *Engine) update(pair device.Pair) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.existing(pair)
	if l == nil {
		return 0
	}
	s := l.snapshot()
	l.rate.update(s)
	return s.Busy
}

// Inbound are the links into one memory: what they give, and how copies are shared between
// them. It is used by one goroutine at a time.
type Inbound struct {
	engine *Engine
	to     device.Space
	from   []device.Space
	busy   []time.Duration
	// What Split works with.
	peers []device.Space
	loads []load
	moved []float64
	parts []int64
}

// Inbound returns the links into a memory.
func (e *Engine) Inbound(to device.Space) *Inbound {
	in := &Inbound{engine: e, to: to}
	t := e.o.Machine.Topology()
	for _, from := range t.Spaces() {
		if _, err := t.Path(from, to); err == nil && from != to {
			in.from = append(in.from, from)
		}
	}
	in.busy = make([]time.Duration, len(in.from))
	return in
}

// From lists the memories that the links come from, the host first.
func (in *Inbound) From() []device.Space { return in.from }

// Rate is that of the link from one of them.
func (in *Inbound) Rate(from device.Space) float64 {
	return in.engine.Rate(device.Pair{From: from, To: in.to})
}

// Update corrects the links' rates by the copies made since, and says for how long the
// link that was longest at work was so. It is best called when little is under way.
func (in *Inbound) Update() time.Duration {
	var longest time.Duration
	for i, from := range in.from {
		busy := in.engine.update(device.Pair{From: from, To: in.to})
		longest = max(longest, busy-in.busy[i])
		in.busy[i] = busy
	}
	return longest
}

// Load is what is to be copied from one memory.
type Load struct {
	From  device.Space
	Bytes int64
}

// Split says how many bytes of each of these copies should come from the host instead, so
// that all links end at the same time; what has a part of less than least comes whole. The
// result is valid until the next call.
func (in *Inbound) Split(copies []Load, least int64) []int64 {
	host := load{rate: in.Rate(device.Host)}
	in.peers, in.loads, in.parts = in.peers[:0], in.loads[:0], in.parts[:0]
	for _, c := range copies {
		if c.From == device.Host {
			host.bytes += float64(c.Bytes)
			continue
		}
		k := slices.Index(in.peers, c.From)
		if k < 0 {
			k = len(in.peers)
			in.peers, in.loads = append(in.peers, c.From), append(in.loads, load{rate: in.Rate(c.From)})
		}
		in.loads[k].bytes += float64(c.Bytes)
	}
	in.moved = shift(in.moved, host, in.loads)
	for _, c := range copies {
		var n int64
		if k := slices.Index(in.peers, c.From); k >= 0 {
			n = part(float64(c.Bytes)*in.moved[k]/in.loads[k].bytes, least)
		}
		in.parts = append(in.parts, n)
	}
	return in.parts
}
