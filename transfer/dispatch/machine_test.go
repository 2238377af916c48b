package dispatch

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// TestMachine is a device of a few links, and a core above it, by random histories: every
// byte of a request that succeeds lands exactly once, none before its points are reached,
// a request finishes once, when nothing of it is in flight, and links take the first
// request that they may.
func TestMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"submit": m.submit, "land": m.land, "fail": m.fail, "point": m.point, "recover": m.recover,
			"promote": m.promote, "cancel": m.cancel, "abort": m.abort, "redirect": m.redirect, "skip": m.skip, "lose": m.lose,
			"": m.check,
		})
		m.drain()
	})
}

// copied is what the model knows of a request.
type copied struct {
	*Request
	after []*pointState
	done  *pointState
	// landed counts how often each byte has, by the address that it goes to. Those of a request that
	// was redirected come from moved addresses further on.
	landed   map[device.Addr]int
	moved    device.Addr
	inFlight int
	finished int
	err      error
	canceled bool
	// last counts launches up to its latest.
	last int
}

// pointState is a point. It is reached by its own, or ends with a request.
type pointState struct {
	point                    device.Point
	of                       *copied
	awaited, reached, failed bool
}

// track is the device's side of a link: chunks that it has, in order.
type track struct {
	Link
	flights []sent
	// broken: the stream is in error, so what is launched fails.
	broken, recovering, lost bool
	// refused are requests of chunks that the device refused, of which it may execute a part until the link
	// has recovered.
	refused []*copied
	// decided is how many launches were decided on before the device was lost, and are refused.
	decided int
	// ended is last of the request that has finished last.
	ended int
}

// sent is a chunk with the device; arrived says that it has landed, which is not
// reported yet.
type sent struct {
	slot    int
	c       Chunk
	arrived bool
}

// enough reports whether no chunk of these bytes should be launched.
func (l *track) enough(next int64) bool {
	if len(l.flights) < l.Depth {
		return false
	}
	var bytes int64
	for _, f := range l.flights {
		bytes += f.c.Bytes
	}
	return len(l.flights) == l.Slots() || bytes-l.flights[0].c.Bytes >= l.WindowBytes || bytes+next > int64(l.Depth)*l.ChunkBytes
}

type model struct {
	t        *rapid.T
	core     Core
	links    []*track
	requests []*copied
	points   []*pointState
	addr     device.Addr
	launches int
	// again are chunks that were launched and failed, which come out of order.
	again map[string]int
}

var errChunk = errors.New("chunk failed")

func newModel(t *rapid.T) *model {
	m := &model{t: t, again: map[string]int{}}
	for _, pair := range []device.Pair{{From: 0, To: 1}, {From: 2, To: 1}, {From: 0, To: 2}} {
		l := Link{From: pair.From, To: pair.To, ChunkBytes: rapid.Int64Range(1, 1500).Draw(t, "chunk"), Depth: rapid.IntRange(1, 3).Draw(t, "depth")}
		l.WindowBytes = rapid.Int64Range(0, 2*l.ChunkBytes).Draw(t, "window")
		m.core.AddLink(l)
		m.links = append(m.links, &track{Link: l})
	}
	for range 3 {
		m.newPoint()
	}
	return m
}

func (m *model) newPoint() *pointState {
	p := &pointState{point: device.Point{Fence: &fence{name: fmt.Sprint(len(m.points))}, Value: 1}}
	m.points = append(m.points, p)
	return p
}

func (m *model) submit(t *rapid.T) {
	l := rapid.SampledFrom(m.links).Draw(t, "link")
	c := &copied{
		Request: &Request{From: l.From, To: l.To, Class: uint8(rapid.IntRange(0, Classes-1).Draw(t, "class"))},
		landed:  map[device.Addr]int{},
	}
	c.Owner = c
	for range rapid.IntRange(1, 5).Draw(t, "pieces") {
		n := rapid.Int64Range(1, 2000).Draw(t, "bytes")
		m.addr += device.Addr(rapid.IntRange(0, 1).Draw(t, "gap"))
		c.Add(Piece{Src: device.Range{Addr: m.addr, Bytes: n}, Dst: device.Range{Addr: 1<<40 + m.addr, Bytes: n}})
		m.addr += device.Addr(n)
	}
	m.addr += 2
	var after []device.Point
	for _, p := range m.points {
		if !p.reached && !p.failed && rapid.IntRange(0, 3).Draw(t, "waits") == 0 {
			c.after, after = append(c.after, p), append(after, p.point)
		}
	}
	c.done = m.newPoint()
	c.Done, c.done.of = c.done.point, c
	err := m.core.Submit(c.Request, after)
	if (err != nil) != l.lost {
		t.Fatalf("submitted to a link, lost: %v: %v", l.lost, err)
	}
	if err == nil {
		m.requests = append(m.requests, c)
	} else {
		c.done.failed = true
	}
	m.act()
}

// act does what the core asks for.
func (m *model) act() {
	var ended []*copied
	for a, ok := m.core.Next(); ok; a, ok = m.core.Next() {
		switch a.Kind {
		case Await:
			i := slices.IndexFunc(m.points, func(p *pointState) bool { return p.point == a.Point })
			if m.points[i].awaited {
				m.t.Fatal("a point is awaited twice")
			}
			m.points[i].awaited = true
		case Launch:
			m.launch(a)
		case Recover:
			l := m.links[a.Link]
			if len(l.flights) > 0 || l.recovering {
				m.t.Fatal("a link is recovered under its chunks, or twice")
			}
			l.recovering = true
		case Retry:
		case Finish:
			c := a.Request.Owner.(*copied)
			c.finished++
			c.err = a.Err
			if a.Err == nil && !a.Request.Skipped() {
				l := m.links[slices.IndexFunc(m.links, func(l *track) bool { return l.From == c.From && l.To == c.To })]
				if c.last < l.ended {
					m.t.Fatal("requests finish in another order than that in which they were launched")
				}
				l.ended = c.last
			}
			if c.inFlight > 0 || c.finished > 1 {
				m.t.Fatalf("a request has finished with %d chunks in flight, for the time %d", c.inFlight, c.finished)
			}
			if slices.ContainsFunc(m.links, func(l *track) bool { return slices.Contains(l.refused, c) }) {
				m.t.Fatal("a request has finished with a chunk that was refused, before its link has recovered")
			}
			ended = append(ended, c)
		}
	}
	for _, c := range ended {
		m.passed(c.done, c.err != nil)
	}
}

func (m *model) launch(a Action) {
	l, c := m.links[a.Link], a.Chunk.Request.Owner.(*copied)
	switch {
	case l.recovering || l.lost && l.decided == 0:
		m.t.Fatal("launched on a link that is being recovered, or lost")
	case c.finished > 0:
		m.t.Fatal("launched for a request that has finished")
	case c.Skipped():
		m.t.Fatal("launched for a request that was skipped")
	case c.From != l.From || c.To != l.To:
		m.t.Fatal("launched on a link that does not lead there")
	case a.Chunk.Bytes < 1 || a.Chunk.Bytes > l.ChunkBytes:
		m.t.Fatalf("a chunk of %d bytes", a.Chunk.Bytes)
	case slices.ContainsFunc(c.after, func(p *pointState) bool { return !p.reached }):
		m.t.Fatal("launched before its points are reached")
	case l.enough(min(a.Chunk.Bytes, chunkSize(c.bytes-c.launched+a.Chunk.Bytes, l.ChunkBytes))): // a chunk that ends with a piece may be larger than that
		m.t.Fatal("enough chunks are in flight")
	case slices.ContainsFunc(l.flights, func(f sent) bool { return f.slot == a.Slot }):
		m.t.Fatal("a slot is used twice")
	}
	if key := text(m.named(a.Chunk)); m.again[key] > 0 {
		m.again[key]--
	} else {
		for _, other := range m.requests {
			first := other.Class > c.Class || other.Class == c.Class && other.seq < c.seq
			if first && other.From == c.From && other.To == c.To && other.launched < other.bytes && other.failure == nil && !other.ended && len(other.waiting) == 0 {
				m.t.Fatalf("a request of class %d goes before one of class %d", c.Class, other.Class)
			}
		}
	}
	if l.lost || rapid.IntRange(0, 19).Draw(m.t, "refuses") == 0 {
		l.refused = append(l.refused, c)
		switch {
		case l.lost:
			l.decided--
			m.core.Refused(a.Link, a.Slot, device.ErrLost)
		case rapid.IntRange(0, 7).Draw(m.t, "loses") == 0:
			l.lost, l.broken = true, true
			for _, s := range m.core.links[a.Link].slots {
				if s.state == inFlight {
					l.decided++
				}
			}
			l.decided -= len(l.flights) + 1
			m.core.Refused(a.Link, a.Slot, device.ErrLost)
		default:
			// The stream may be in error then, and fail what was launched together with this.
			l.broken = l.broken || rapid.Bool().Draw(m.t, "breaks")
			m.core.Refused(a.Link, a.Slot, errChunk)
		}
		return
	}
	c.inFlight++
	m.launches++
	c.last = m.launches
	l.flights = append(l.flights, sent{slot: a.Slot, c: a.Chunk})
}

// named gives the chunk a name of its own.
func (m *model) named(c Chunk) Chunk {
	r := *c.Request
	r.Owner = r.seq
	c.Request = &r
	return c
}

// end removes a chunk of a link.
func (m *model) end(i, k int) sent {
	f := m.links[i].flights[k]
	m.links[i].flights = slices.Delete(m.links[i].flights, k, k+1)
	f.c.Request.Owner.(*copied).inFlight--
	return f
}

func (m *model) link(t *rapid.T, is func(*track) bool) int {
	var l []int
	for i, x := range m.links {
		if is(x) {
			l = append(l, i)
		}
	}
	if len(l) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(l).Draw(t, "link")
}

func (m *model) land(t *rapid.T) {
	i := m.link(t, func(l *track) bool { return len(l.flights) > 0 && (!l.broken || l.flights[0].arrived) })
	l := m.links[i]
	if l.broken {
		m.report(i, 0)
		return
	}
	// The device copies in order, and is not asked in order.
	k := rapid.IntRange(0, len(l.flights)-1).Draw(t, "which")
	for j := range k {
		l.flights[j].arrived = true
	}
	m.report(i, k)
}

// report reports that a chunk has landed.
func (m *model) report(i, k int) {
	f := m.end(i, k)
	owner := f.c.Request.Owner.(*copied)
	_ = f.c.Each(func(dst, src device.Range) error {
		if dst.Addr-src.Addr != 1<<40-owner.moved || dst.Bytes != src.Bytes {
			m.t.Fatalf("%v is copied to %v", src, dst)
		}
		for b := range src.Bytes {
			owner.landed[dst.Addr+device.Addr(b)]++
		}
		return nil
	})
	m.core.Landed(i, f.slot)
	m.act()
}

func (m *model) fail(t *rapid.T) {
	i := m.link(t, func(l *track) bool { return l.left() >= 0 })
	l := m.links[i]
	l.broken = true
	m.failFirst(i)
}

// left is the first chunk that has not landed, or -1.
func (l *track) left() int {
	return slices.IndexFunc(l.flights, func(f sent) bool { return !f.arrived })
}

func (m *model) failFirst(i int) {
	f := m.end(i, m.links[i].left())
	m.again[text(m.named(f.c))]++
	err := errChunk
	if m.links[i].lost {
		err = device.ErrLost
	}
	m.core.Failed(i, f.slot, err)
	m.act()
}

func (m *model) recover(t *rapid.T) {
	i := m.link(t, func(l *track) bool { return l.recovering })
	m.recovered(i)
}

func (m *model) recovered(i int) {
	l := m.links[i]
	l.recovering, l.broken, l.refused = false, l.lost, nil
	err := errChunk
	if l.lost {
		err = device.ErrLost
	}
	m.core.Recovered(i, err)
	m.act()
}

func (m *model) lose(t *rapid.T) {
	i := m.link(t, func(l *track) bool { return !l.lost && (l.left() >= 0 || l.recovering) })
	if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
		t.Skip("not yet")
	}
	l := m.links[i]
	l.lost, l.broken = true, true
	if l.left() >= 0 {
		m.failFirst(i)
	} else {
		m.recovered(i)
	}
}

func (m *model) point(t *rapid.T) {
	p := rapid.SampledFrom(m.points).Draw(t, "point")
	if p.of != nil {
		t.Skip("ends with its request")
	}
	m.passed(p, rapid.IntRange(0, 4).Draw(t, "fails") == 0)
}

func (m *model) passed(p *pointState, fails bool) {
	if p.reached || p.failed {
		return
	}
	if p.reached, p.failed = !fails, fails; fails {
		m.core.PointFailed(p.point, errChunk)
	} else {
		m.core.Reached(p.point)
	}
	m.act()
	if p.of == nil {
		m.newPoint()
	}
}

func (m *model) request(t *rapid.T) *copied {
	if len(m.requests) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(m.requests).Draw(t, "request")
}

func (m *model) promote(t *rapid.T) {
	m.core.RaiseClass(m.request(t).Request, uint8(rapid.IntRange(0, Classes-1).Draw(t, "class")))
	m.act()
}

func (m *model) cancel(t *rapid.T) {
	c := m.request(t)
	if m.core.Cancel(c.Request, errChunk) {
		c.canceled = true
	}
	m.act()
	if c.canceled && (c.finished != 1 || c.err == nil || len(c.landed) > 0) {
		t.Fatal("a request that was canceled has not finished so, or was copied")
	}
}

func (m *model) abort(t *rapid.T) {
	c := m.request(t)
	launched := c.launched
	if m.core.Abort(c.Request, errChunk) {
		m.act()
		if c.launched != launched || c.Request.inFlight == 0 && (c.finished != 1 || c.err == nil) {
			t.Fatal("a request that was aborted goes on, or has not finished so")
		}
		return
	}
	m.act()
	if c.finished == 0 && c.failure == nil && c.launched < c.bytes {
		t.Fatal("a request was not aborted")
	}
}

// redirect lets a request to the space of two links come from the other one.
func (m *model) redirect(t *rapid.T) {
	c := m.request(t)
	if c.To != 1 {
		t.Skip("there is no other link")
	}
	before, from := c.launched, 2-c.From
	var pieces []Piece
	for _, p := range c.Pieces {
		p.Src.Addr += 1 << 30
		pieces = append(pieces, p)
	}
	lost := m.links[slices.IndexFunc(m.links, func(l *track) bool { return l.From == from && l.To == c.To })].lost
	began := c.launched > 0 || c.finished > 0 || c.failure != nil
	done := m.core.Redirect(c.Request, from, pieces)
	if done {
		c.moved += 1 << 30
	}
	if done != (!began && !lost) {
		t.Fatalf("redirected: %v; %d bytes were launched, the other link is lost: %v", done, before, lost)
	}
	m.act()
}

func (m *model) skip(t *rapid.T) {
	c := m.request(t)
	may := c.finished == 0 && c.failure == nil && len(c.waiting) == 0
	want := c.bytes - c.launched // nothing is returned: there are no relays
	left := m.core.Skip(c.Request)
	m.act()
	if !may && left > 0 || may && left != want {
		t.Fatalf("%d bytes were skipped, %d are not launched, and it may be: %v", left, want, may)
	}
	if left > 0 && (!c.Skipped() || (c.finished == 1) != (c.Request.inFlight == 0) || c.err != nil) {
		t.Fatalf("a request that was skipped has finished %d times, with %d chunks in flight: %v", c.finished, c.Request.inFlight, c.err)
	}
}

// check holds after every event.
func (m *model) check(t *rapid.T) {
	for _, c := range m.requests {
		for _, p := range c.after {
			if first := p.of; first != nil && first.finished == 0 && first.launched < first.bytes && first.failure == nil && first.Class < c.Class && c.failure == nil {
				t.Fatalf("a request of class %d waits for one of class %d", c.Class, first.Class)
			}
		}
		if c.Ended() != (c.finished == 1) {
			t.Fatal("a request has ended that has not finished, or the other way round")
		}
		if c.finished == 1 && c.err == nil {
			if int64(len(c.landed)) != c.Bytes() && !c.Skipped() {
				t.Fatalf("%d of %d bytes have landed", len(c.landed), c.Bytes())
			}
			for _, n := range c.landed {
				if n != 1 {
					t.Fatalf("a byte has landed %d times", n)
				}
			}
		}
	}
	for i, l := range m.links {
		idle := !slices.ContainsFunc(m.requests, func(c *copied) bool {
			return c.From == l.From && c.To == l.To && c.finished == 0 && c.failure == nil && len(c.waiting) == 0 && c.launched < c.bytes
		})
		if !idle && !l.enough(l.ChunkBytes) && !m.core.links[i].broken && !held(m.core.links[i]) {
			t.Fatal("a link idles")
		}
	}
}

// held says whether chunks have landed that do not count yet.
func held(l *link) bool {
	return slices.ContainsFunc(l.slots, func(s slot) bool { return s.state == landed })
}

// drain lets everything happen that can: then all requests have finished.
func (m *model) drain() {
	for _, p := range m.points {
		if p.of == nil {
			m.passed(p, false)
		}
	}
	for again := true; again; {
		again = false
		for i, l := range m.links {
			for len(l.flights) > 0 {
				if again = true; l.broken && !l.flights[0].arrived {
					m.failFirst(i)
				} else {
					m.report(i, 0)
				}
			}
			if l.recovering {
				again = true
				m.recovered(i)
			}
		}
	}
	m.check(m.t)
	for _, c := range m.requests {
		if c.finished != 1 {
			m.t.Fatal("a request has not finished")
		}
	}
	if r := m.core.InFlight(); r != nil || len(m.core.waiting) > 0 && slices.ContainsFunc(m.points, func(p *pointState) bool { return p.reached && m.core.waiting[p.point] != nil }) {
		m.t.Fatal("something is left")
	}
}

// TestNoGarbage: in the steady state the core allocates nothing.
func TestNoGarbage(t *testing.T) {
	var c Core
	link := c.AddLink(Link{From: 0, To: 1, ChunkBytes: 100, Depth: 2})
	p := device.Point{Fence: &fence{}}
	r, after := &Request{}, make([]device.Point, 1)
	round := func() {
		r.Reset()
		r.From, r.To = 0, 1
		for i := range device.Addr(4) {
			r.Add(Piece{Src: device.Range{Addr: 1000 * i, Bytes: 60}, Dst: device.Range{Addr: 1<<40 + 1000*i, Bytes: 60}})
		}
		p.Value++
		after[0] = p
		if err := c.Submit(r, after); err != nil {
			t.Fatal(err)
		}
		for finished := false; !finished; {
			a, ok := c.Next()
			switch {
			case !ok:
				t.Fatal("nothing to do, and not finished")
			case a.Kind == Await:
				c.Reached(a.Point)
			case a.Kind == Launch:
				c.Landed(link, a.Slot)
			case a.Kind == Finish:
				finished = true
			}
		}
	}
	if n := testing.AllocsPerRun(200, round); n > 0 {
		t.Errorf("%v allocations per request", n)
	}
}

// TestTake: a request of one piece is cut into as few chunks as possible, none of them
// much smaller than the others.
func TestTake(t *testing.T) {
	for _, c := range []struct{ bytes, chunk, first, count int64 }{
		{8 << 20, 8 << 20, 8 << 20, 1},
		{8<<20 + 256, 8 << 20, 4<<20 + 256, 2},
		{311_000_000, 61 << 20, 62_200_064, 5},
		{352_321_536, 61 << 20, 58_720_256, 6},
		{10, 8, 8, 2}, // no multiple of 256 fits
		{100, 1 << 20, 100, 1},
	} {
		r := &Request{}
		r.Add(Piece{Src: device.Range{Addr: 1, Bytes: c.bytes}, Dst: device.Range{Addr: 1 << 50, Bytes: c.bytes}})
		var sizes []int64
		for r.launched < c.bytes {
			chunk := r.cutChunk(c.chunk)
			if chunk.Bytes <= 0 || chunk.Bytes > c.chunk || chunk.Offset != r.launched-chunk.Bytes {
				t.Fatalf("a chunk of %d bytes at %d", chunk.Bytes, chunk.Offset)
			}
			sizes = append(sizes, chunk.Bytes)
		}
		if sizes[0] != c.first || int64(len(sizes)) != c.count {
			t.Errorf("%d bytes: the first of %d chunks has %d, want %d and %d", c.bytes, len(sizes), sizes[0], c.count, c.first)
		}
		if c.chunk > 1<<20 && len(sizes) > 1 && slices.Min(sizes) < sizes[0]*9/10 {
			t.Errorf("%d bytes: chunks of %v", c.bytes, sizes)
		}
	}
}

// TestAdd: adjacent pieces are merged, but not those of different allocations.
func TestAdd(t *testing.T) {
	at := func(a device.Addr) Piece {
		return Piece{Dst: device.Range{Addr: 1<<40 + a, Bytes: 8}, Src: device.Range{Addr: a, Bytes: 8}}
	}
	separate := at(24)
	separate.Separate = true
	r := &Request{}
	for _, p := range []Piece{at(8), at(16), separate, at(32), at(48)} {
		r.Add(p)
	}
	var sizes []int64
	for _, p := range r.Pieces {
		sizes = append(sizes, p.Src.Bytes)
	}
	if want := []int64{16, 16, 8}; !slices.Equal(sizes, want) || r.Bytes() != 40 {
		t.Errorf("pieces of %v, %d bytes in all, want %v", sizes, r.Bytes(), want)
	}
}
