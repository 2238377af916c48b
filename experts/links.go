package experts

import (
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// Link is the way from a memory to the compute GPU.
type Link struct {
	From device.Space
	// BytesPerSecond is what copies have reached lately; before there were any, what
	// the topology says; 0 where that does not say.
	BytesPerSecond float64
}

// load is what one memory is to send: bytes at a rate.
type load struct{ bytes, rate float64 }

// shift says how many bytes of what each peer is to send should come from the host
// instead, so that all links end at the same time: the host has bytes of its own to
// send, which only it can. Nothing is shifted where a rate is not known, which is 0. The
// result uses the room of moved.
func shift(moved []float64, host load, peers []load) []float64 {
	moved = append(moved[:0], make([]float64, len(peers))...)
	if host.rate <= 0 || slices.ContainsFunc(peers, func(p load) bool { return p.rate <= 0 }) {
		return moved
	}
	// Peers that would end before the others keep all of theirs: moved is -1 there.
	for {
		bytes, rate := host.bytes, host.rate
		for i, p := range peers {
			if moved[i] == 0 {
				bytes, rate = bytes+p.bytes, rate+p.rate
			}
		}
		end := bytes / rate // in seconds
		again := false
		for i, p := range peers {
			if moved[i] == 0 && p.bytes <= end*p.rate {
				moved[i], again = -1, true
			}
		}
		if again {
			continue
		}
		for i, p := range peers {
			if moved[i] == 0 && end > host.bytes/host.rate { // else the host is the last to end by itself
				moved[i] = p.bytes - end*p.rate
			}
			moved[i] = max(moved[i], 0)
		}
		return moved
	}
}

// rates are those of the links into the compute GPU.
type rates struct {
	links []Link
	// known are rates of the topology: only where it limits a link is it worth while
	// to measure what the link gives.
	known []float64
	seen  []transfer.PathStats
	// busy is for how long each link has been at work so far, atWork for how long the one
	// that was so longest since the update before.
	busy   []time.Duration
	atWork time.Duration
}

// Copies of less than this, together, say little about a link's rate. What is
// measured counts by half beside what was known before.
const (
	measureBytes = 64 << 20
	measureTime  = time.Millisecond
)

func newRates(t *device.Topology, to device.Space) rates {
	var r rates
	for _, from := range t.Spaces() {
		if p, err := t.Path(from, to); err == nil && from != to {
			r.links = append(r.links, Link{from, p.BytesPerSecond})
			r.known = append(r.known, p.BytesPerSecond)
			r.seen = append(r.seen, transfer.PathStats{})
			r.busy = append(r.busy, 0)
		}
	}
	return r
}

// update corrects the rates by the copies made since.
func (r *rates) update(e *transfer.Engine, to device.Space) {
	r.atWork = 0
	for i := range r.links {
		p := e.Path(device.Pair{From: r.links[i].From, To: to})
		r.atWork = max(r.atWork, p.Busy-r.busy[i])
		r.busy[i] = p.Busy
		if r.known[i] == 0 {
			continue
		}
		bytes, busy := p.Bytes-r.seen[i].Bytes, p.Busy-r.seen[i].Busy
		if bytes < measureBytes || busy < measureTime {
			continue
		}
		r.seen[i] = p
		r.links[i].BytesPerSecond += (float64(bytes)/busy.Seconds() - r.links[i].BytesPerSecond) / 2
	}
}

func (r *rates) of(from device.Space) float64 {
	if i := slices.IndexFunc(r.links, func(l Link) bool { return l.From == from }); i >= 0 {
		return r.links[i].BytesPerSecond
	}
	return 0
}

// Links are the ways into the compute GPU, the host's first.
func (s *Store) Links() []Link {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.rates.links)
}
