package simulation

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Options are how the core copies.
type Options struct {
	// Inbound: from the host; otherwise to it.
	Inbound bool
	// ChunkBytes is the maximum size of chunks, Depth how many are in flight on a link, Window
	// what is enqueued behind the first, Buffers the number of a relay's.
	ChunkBytes int64
	Depth      int
	Window     time.Duration
	Buffers    int
	// Begin is when the first request is submitted.
	Begin time.Duration
	Seed  uint64
	// Yields is dispatch.Core.Yields.
	Yields bool
	// NoDirectFirst is dispatch.Core.NoDirectFirst.
	NoDirectFirst bool
}

// Default are the options of package transfer, and three buffers, which node gives a relay.
func Default() Options {
	o := transfer.Options{}.EnsureDefaults()
	return Options{Inbound: true, ChunkBytes: o.Multipath.ChunkIn, Depth: o.Depth, Window: o.Window, Buffers: 3}
}

// Request is a copy to or from a GPU.
type Request struct {
	GPU   int
	Bytes int64
	At    time.Duration
	Class uint8
}

// Result is what came of a run.
type Result struct {
	// Ended is when each request has landed, Last when the last of them has.
	Ended []time.Duration
	Last  time.Duration
	// Relayed is the number of bytes that relays carried, Launches that of copies enqueued.
	Relayed  int64
	Launches int
	// HostBusy is how long the host worked.
	HostBusy time.Duration
}

// op is a copy in a stream.
type op struct {
	link, slot int
	left       float64
	start      time.Duration // not before
}

type report struct {
	at         time.Duration
	link, slot int
}

type run struct {
	m     *Machine
	o     Options
	core  dispatch.Core
	pairs []device.Pair // of links
	// streams have the copies that are enqueued on each link.
	streams  [][]op
	reports  []report
	now      time.Duration
	hostFree time.Duration
	random   *rand.Rand
	result   Result
	left     int
}

// Copy makes one copy to or from the first GPU, and returns how long it takes.
func (m *Machine) Copy(bytes int64, o Options) time.Duration {
	r := m.Run([]Request{{Bytes: bytes, At: o.Begin}}, o)
	return r.Last - o.Begin
}

// Run submits requests, in order of their times, and waits for their ends.
func (m *Machine) Run(requests []Request, o Options) Result {
	r := &run{m: m, o: o, random: rand.New(rand.NewPCG(o.Seed, 1)), left: len(requests)}
	r.result.Ended = make([]time.Duration, len(requests))
	r.core.Yields, r.core.NoDirectFirst = o.Yields, o.NoDirectFirst
	r.build()
	next := 0
	for r.left > 0 {
		at := time.Duration(math.MaxInt64)
		if next < len(requests) {
			at = max(requests[next].At, r.hostFree)
		}
		i := -1
		for k, p := range r.reports {
			if t := max(p.at, r.hostFree); t < at {
				at, i = t, k
			}
		}
		if !r.advance(at) {
			continue // something has landed: there may be an earlier event
		}
		r.core.At(r.now)
		if i >= 0 {
			p := r.reports[i]
			r.reports = slices.Delete(r.reports, i, i+1)
			r.core.Landed(p.link, p.slot)
		} else {
			r.submit(next, requests[next])
			next++
		}
		r.act()
	}
	return r.result
}

func (r *run) build() {
	link := func(from, to device.Space, rate float64) dispatch.Link {
		return dispatch.Link{
			From: from, To: to, ChunkBytes: 8 << 20, Depth: r.o.Depth, WindowBytes: min(int64(rate*r.o.Window.Seconds()), int64(r.o.Depth-1)*8<<20),
			BytesPerSecond: rate, RelayFrom: 2 * r.o.ChunkBytes, RelayChunkBytes: r.o.ChunkBytes,
		}
	}
	add := func(p device.Pair) {
		r.pairs, r.streams = append(r.pairs, p), append(r.streams, nil)
	}
	for g := range r.m.GPUs {
		p := device.Pair{From: device.Host, To: device.HBM(g)}
		if !r.o.Inbound {
			p.From, p.To = p.To, p.From
		}
		r.core.AddLink(link(p.From, p.To, r.m.PCIe))
		add(p)
	}
	for g := range r.m.GPUs {
		if err := r.core.AddRelay(dispatch.Relay{Link: g, Buffers: r.o.Buffers, BufferBytes: r.o.ChunkBytes}); err != nil {
			panic(err)
		}
		for t := range r.m.GPUs {
			if t == g {
				continue
			}
			p := device.Pair{From: device.HBM(g), To: device.HBM(t)}
			if !r.o.Inbound {
				p.From, p.To = p.To, p.From
			}
			if _, err := r.core.AddHop(g, link(p.From, p.To, r.m.NVLink)); err != nil {
				panic(err)
			}
			add(p)
		}
	}
}

func (r *run) submit(i int, q Request) {
	gpu := device.HBM(q.GPU)
	d := &dispatch.Request{From: device.Host, To: gpu, Class: q.Class, Owner: i}
	if !r.o.Inbound {
		d.From, d.To = gpu, device.Host
	}
	at := device.Addr(i+1) << 44
	d.Add(dispatch.Piece{Src: device.Range{Addr: at, Bytes: q.Bytes}, Dst: device.Range{Addr: 1<<60 + at, Bytes: q.Bytes}, Separate: true})
	if err := r.core.Submit(d, nil); err != nil {
		panic(err)
	}
}

func (r *run) act() {
	r.hostFree = max(r.hostFree, r.now)
	for a, ok := r.core.Next(); ok; a, ok = r.core.Next() {
		switch a.Kind {
		case dispatch.Launch:
			r.hostFree += r.m.Enqueue
			r.result.HostBusy += r.m.Enqueue
			r.result.Launches++
			if a.Via.Hop == dispatch.ToBuffer {
				r.result.Relayed += a.Chunk.Bytes
			}
			r.streams[a.Link] = append(r.streams[a.Link], op{link: a.Link, slot: a.Slot, left: float64(a.Chunk.Bytes), start: r.hostFree + r.m.Start})
		case dispatch.Finish:
			if a.Err != nil {
				panic(a.Err)
			}
			r.left--
			r.result.Ended[a.Request.Owner.(int)] = r.now
			r.result.Last = r.now
		default:
			panic(fmt.Sprintf("simulation: unexpected action %d", a.Kind))
		}
	}
}

// uses are the wires that a copy on a link uses.
func (r *run) uses(w *wires, link int) []int {
	from, okFrom := r.pairs[link].From.GPU()
	to, okTo := r.pairs[link].To.GPU()
	switch {
	case okFrom && okTo:
		return w.peer(from, to)
	case okFrom:
		return w.host(from)
	}
	return w.host(to)
}

// advance lets copies proceed until a time, or, and then returns false, until one has landed.
func (r *run) advance(to time.Duration) bool {
	for r.now < to {
		w := r.m.wires(r.now)
		uses := r.m.flows(w, r.now)
		n := len(uses)
		var active []*op
		until := min(to, r.m.next(r.now))
		for i, s := range r.streams {
			if len(s) == 0 {
				continue
			}
			if s[0].start > r.now {
				until = min(until, s[0].start)
				continue
			}
			uses, active = append(uses, r.uses(w, i)), append(active, &r.streams[i][0])
		}
		rates := w.share(uses)[n:]
		for i, o := range active {
			until = min(until, r.now+max(1, seconds(o.left/rates[i])))
		}
		if until == math.MaxInt64 {
			panic("simulation: nothing can happen")
		}
		landed := false
		for i, o := range active {
			if o.left -= rates[i] * (until - r.now).Seconds(); o.left < 1 {
				landed = true
				notice := r.m.Notice[0]
				if d := r.m.Notice[1] - r.m.Notice[0]; d > 0 {
					notice += time.Duration(r.random.Int64N(int64(d)))
				}
				r.reports = append(r.reports, report{at: until + notice, link: o.link, slot: o.slot})
				s := r.streams[o.link][1:]
				if len(s) > 0 {
					s[0].start = max(s[0].start, until+r.m.Start)
				}
				r.streams[o.link] = s
			}
		}
		if r.now = until; landed {
			return false
		}
	}
	return true
}
