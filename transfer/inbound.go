package transfer

import (
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// linkRate is the rate of one link. It is measured only if the topology limits the link:
// otherwise copies would show the speed of the emulating host.
type linkRate struct {
	bytesPerSecond float64
	measured       bool
	last           PathStats
}

// Minimum bytes and busy time of a measurement. A new measurement and the previous rate
// are averaged.
const (
	measureBytes = 64 << 20
	measureTime  = time.Millisecond
)

// update averages the rate with that of the copies since the last measurement.
func (r *linkRate) update(now PathStats) {
	// What relays carried for the link's GPU is the link's, too: the rate is that of all paths.
	bytes, busy := now.Bytes+now.RelayedBytes-r.last.Bytes-r.last.RelayedBytes, now.Busy-r.last.Busy
	if !r.measured || bytes < measureBytes || busy < measureTime {
		return
	}
	r.last = now
	r.bytesPerSecond += (float64(bytes)/busy.Seconds() - r.bytesPerSecond) / 2
}

// Rate is the recently measured rate of copies between two memories, in bytes per second;
// before Inbound.Update has measured enough of them, the topology's rate; 0 if that is
// unknown, or there is no path.
func (e *Engine) Rate(pair device.Pair) float64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.findLink(pair); l != nil {
		return l.rate.bytesPerSecond
	}
	return e.o.Machine.Topology().Paths[pair].BytesPerSecond
}

// update updates the rate of a link, and returns its total busy time.
func (e *Engine) update(pair device.Pair) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.findLink(pair)
	if l == nil {
		return 0
	}
	s := l.snapshot()
	l.rate.update(s)
	return s.Busy
}

// Inbound are the links into one memory: it measures their rates and splits copies
// between them. One goroutine at a time uses it.
type Inbound struct {
	engine *Engine
	to     device.Space
	from   []device.Space
	busy   []time.Duration
	// Scratch space of Split.
	peers    []device.Space
	loads    []linkLoad
	fromHost []float64
	shares   []int64
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

// From lists the source memories of the links, the host first.
func (in *Inbound) From() []device.Space { return in.from }

// Rate is the rate of the link from one of them, see Engine.Rate.
func (in *Inbound) Rate(from device.Space) float64 {
	return in.engine.Rate(device.Pair{From: from, To: in.to})
}

// Update updates the links' rates by the copies made since the last call, and returns the
// busy time of the busiest link since then. It is best called when few copies are in
// progress.
func (in *Inbound) Update() time.Duration {
	var longest time.Duration
	for i, from := range in.from {
		busy := in.engine.update(device.Pair{From: from, To: in.to})
		longest = max(longest, busy-in.busy[i])
		in.busy[i] = busy
	}
	return longest
}

// Load is the bytes to be copied from one memory.
type Load struct {
	From  device.Space
	Bytes int64
}

// Split returns how many bytes of each of these copies the host should send, so that all
// links end at the same time; 0 for a share of less than least. The result is valid until
// the next call.
func (in *Inbound) Split(copies []Load, least int64) []int64 {
	host := linkLoad{rate: in.Rate(device.Host)}
	in.peers, in.loads, in.shares = in.peers[:0], in.loads[:0], in.shares[:0]
	for _, c := range copies {
		if c.From == device.Host {
			host.bytes += float64(c.Bytes)
			continue
		}
		k := slices.Index(in.peers, c.From)
		if k < 0 {
			k = len(in.peers)
			in.peers, in.loads = append(in.peers, c.From), append(in.loads, linkLoad{rate: in.Rate(c.From)})
		}
		in.loads[k].bytes += float64(c.Bytes)
	}
	in.fromHost = hostShares(in.fromHost, host, in.loads)
	for _, c := range copies {
		var n int64
		if k := slices.Index(in.peers, c.From); k >= 0 {
			n = alignedShare(float64(c.Bytes)*in.fromHost[k]/in.loads[k].bytes, least)
		}
		in.shares = append(in.shares, n)
	}
	return in.shares
}
