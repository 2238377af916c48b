package dispatch

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// TestRelayMachine is a host with three GPUs, of which any may relay, by random histories that
// copy real bytes: each arrives where it should, a buffer has one chunk at a time, what Landed
// counts has landed, links keep their limits and order, with direct first and without, relays that fail, are lost or removed
// fail no request, of one that was aborted or skipped nothing more is launched, and a relay is drained when nothing is in its
// buffers.
func TestRelayMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newRelays(t)
		t.Repeat(map[string]func(*rapid.T){
			"submit": m.submit, "run": m.run, "run2": m.run, "run3": m.run, "fail": m.fail, "refuse": m.refuse, "recover": m.recover,
			"lose": m.lose, "remove": m.remove, "add": m.add, "promote": m.promote, "cancel": m.cancel, "abort": m.abort, "skip": m.skip,
			"": m.check,
		})
		m.drain()
	})
}

// relayed is a request and its bytes.
type relayed struct {
	*Request
	src, dst []byte
	// taken is the number of bytes whose launch the model has seen.
	taken int64
	// harmed: a chunk failed or was refused on a link of its own.
	harmed, canceled, ended bool
	// aborted, or skipped: nothing more of it may be launched.
	aborted bool
	err     error
}

// order is a launched chunk.
type order struct{ a Action }

// lane is the stream of a link.
type lane struct {
	Link
	hop                      bool
	relay                    int // number of the link whose relay the hop is of
	orders                   []order
	broken, recovering, lost bool
	refuses                  bool // the next launch
}

// bufferSet are a relay's buffers.
type bufferSet struct {
	content                  [][]byte
	ending, drained, retired bool
}

const relayChunk = 32

type relays struct {
	t        *rapid.T
	core     Core
	lanes    []*lane
	sets     map[int]*bufferSet
	requests []*relayed
	// relayed are launches into buffers.
	relayed []Action
	addr    device.Addr
	now     time.Duration
	// cut are the chunks whose launch the model has seen. unsure: a launch was refused before the core's
	// other actions were carried out, so that it decided on some of them without knowing.
	cut    map[Chunk]bool
	unsure bool
}

func newRelays(t *rapid.T) *relays {
	m := &relays{t: t, sets: map[int]*bufferSet{}, cut: map[Chunk]bool{}}
	m.core.Yields = rapid.Bool().Draw(t, "yields")
	m.core.NoDirectFirst = rapid.Bool().Draw(t, "no direct first")
	m.core.Preferred = device.Space(rapid.IntRange(0, 3).Draw(t, "preferred"))
	rate := rapid.SampledFrom([]float64{0, 1e9}).Draw(t, "rate")
	for gpu := device.Space(1); gpu <= 3; gpu++ {
		for _, p := range []device.Pair{{From: device.Host, To: gpu}, {From: gpu, To: device.Host}} {
			l := Link{
				From: p.From, To: p.To, ChunkBytes: rapid.Int64Range(16, 64).Draw(t, "chunk"), Depth: rapid.IntRange(1, 3).Draw(t, "depth"),
				BytesPerSecond: rate, RelayFrom: 100, RelayChunkBytes: relayChunk,
			}
			l.WindowBytes = rapid.Int64Range(0, 2*l.ChunkBytes).Draw(t, "window")
			m.core.AddLink(l)
			m.lanes = append(m.lanes, &lane{Link: l})
		}
	}
	for i := range m.lanes {
		if rapid.IntRange(0, 3).Draw(t, "relays") > 0 {
			m.addRelay(i)
		}
	}
	return m
}

func (m *relays) addRelay(i int) {
	b := &bufferSet{}
	for range rapid.IntRange(1, 3).Draw(m.t, "buffers") {
		b.content = append(b.content, make([]byte, relayChunk))
	}
	again := m.sets[i] != nil
	if err := m.core.AddRelay(Relay{Link: i, Buffers: len(b.content), BufferBytes: relayChunk}); err != nil {
		m.t.Fatal(err)
	}
	m.sets[i] = b
	m.act()
	for gpu := device.Space(1); gpu <= 3 && !again; gpu++ {
		l := m.lanes[i]
		d := Link{From: l.To, To: gpu, BytesPerSecond: l.BytesPerSecond}
		if l.To == device.Host {
			d.From, d.To = gpu, l.From
		}
		if d.From == d.To {
			continue
		}
		m.lanes = append(m.lanes, &lane{Link: d, hop: true, relay: i})
		if n, err := m.core.AddHop(i, d); err != nil || n != len(m.lanes)-1 {
			m.t.Fatal(n, err)
		}
		m.act()
	}
}

func (m *relays) submit(t *rapid.T) {
	gpu := device.Space(rapid.IntRange(1, 3).Draw(t, "gpu"))
	c := &relayed{Request: &Request{From: device.Host, To: gpu, Class: uint8(rapid.IntRange(0, 2).Draw(t, "class"))}}
	if rapid.Bool().Draw(t, "out") {
		c.From, c.To = gpu, device.Host
	}
	c.Owner, c.TakesTurns, c.Direct = c, rapid.Bool().Draw(t, "turns"), rapid.IntRange(0, 7).Draw(t, "direct") == 0
	at := device.Addr(0)
	for range rapid.IntRange(1, 6).Draw(t, "pieces") {
		n := rapid.Int64Range(1, 150).Draw(t, "bytes")
		c.Add(Piece{Src: device.Range{Addr: m.addr + at, Bytes: n}, Dst: device.Range{Addr: m.addr + at, Bytes: n}, Separate: true})
		at += device.Addr(n)
	}
	c.src, c.dst = make([]byte, at), make([]byte, at)
	for i := range c.src {
		c.src[i] = byte(1 + (int(m.addr)+i)*7%251)
	}
	for i := range c.Pieces { // addresses are offsets in the request
		c.Pieces[i].Src.Addr -= m.addr
		c.Pieces[i].Dst.Addr -= m.addr
	}
	m.addr += at
	lost := m.lanes[m.own(c.Request)].lost
	if err := m.core.Submit(c.Request, nil); (err != nil) != lost {
		t.Fatalf("submitted to a link, lost %t: %v", lost, err)
	} else if err == nil {
		m.requests = append(m.requests, c)
	}
	m.act()
}

// own is the number of the link that carries a request all the way.
func (m *relays) own(r *Request) int {
	return slices.IndexFunc(m.lanes, func(l *lane) bool { return !l.hop && l.From == r.From && l.To == r.To })
}

func (m *relays) act() {
	m.core.At(m.now)
	m.unsure = false
	for a, ok := m.core.Next(); ok; a, ok = m.core.Next() {
		switch a.Kind {
		case Launch:
			m.launch(a)
		case Recover:
			l := m.lanes[a.Link]
			if len(l.orders) > 0 || l.recovering {
				m.t.Fatal("a link is recovered under its chunks, or twice")
			}
			l.recovering = true
		case Finish:
			c := a.Request.Owner.(*relayed)
			if c.ended {
				m.t.Fatal("a request ends twice")
			}
			c.ended, c.err = true, a.Err
			for _, l := range m.lanes {
				if slices.ContainsFunc(l.orders, func(o order) bool { return o.a.Chunk.Request == a.Request }) {
					m.t.Fatal("a request ends with a chunk in flight")
				}
			}
			switch {
			case a.Err == nil && !c.Skipped() && !bytes.Equal(c.src, c.dst):
				m.t.Fatalf("a request ends with other bytes")
			case a.Err != nil && !c.harmed && !c.canceled && !m.lanes[m.own(a.Request)].lost:
				m.t.Fatalf("a request fails that its own link could have carried: %v", a.Err)
			}
		case Retire:
			if l := m.lanes[a.Link]; !l.hop {
				m.sets[a.Link].retired = true
			}
		case Drained:
			b := m.sets[a.Link]
			if !b.ending || b.drained || m.inUse(a.Link, -1) {
				m.t.Fatal("a relay is drained that was not removed, twice, or with a chunk in a buffer")
			}
			b.drained = true
		}
	}
}

func (m *relays) launch(a Action) {
	l, r := m.lanes[a.Link], a.Chunk.Request
	c := r.Owner.(*relayed)
	if l.recovering || l.lost || c.ended || c.aborted {
		m.t.Fatal("launched on a link that is being recovered or lost, or for a request that has ended or was aborted")
	}
	if slices.ContainsFunc(l.orders, func(o order) bool { return o.a.Slot == a.Slot }) {
		m.t.Fatal("a slot is used twice")
	}
	if !l.hop {
		m.checkLimits(l, a)
	}
	if a.Via.Hop == Direct {
		if l.From != r.From || l.To != r.To {
			m.t.Fatal("launched on a link that does not lead there")
		}
	} else {
		m.checkRelay(l, a)
	}
	if !m.cut[a.Chunk] {
		m.cut[a.Chunk] = true
		c.taken += a.Chunk.Bytes
	}
	if l.refuses {
		l.refuses, m.unsure = false, true
		m.harm(a)
		m.core.Refused(a.Link, a.Slot, errChunk)
		return
	}
	l.orders = append(l.orders, order{a: a})
}

// checkLimits checks the depth and the window of a link before a launch, except of what comes out
// of a buffer.
func (m *relays) checkLimits(l *lane, a Action) {
	behind, all := int64(0), a.Chunk.Bytes
	for i, o := range l.orders {
		if all += o.a.Chunk.Bytes; i > 0 {
			behind += o.a.Chunk.Bytes
		}
	}
	if a.Via.Hop != FromBuffer && len(l.orders) >= l.Depth && (behind >= l.WindowBytes || all > int64(l.Depth)*l.ChunkBytes) {
		m.t.Fatalf("%d chunks are in flight, %d bytes behind the first", len(l.orders), behind)
	}
}

// checkRelay checks a launch into or out of a buffer.
func (m *relays) checkRelay(l *lane, a Action) {
	r, b := a.Chunk.Request, m.sets[a.Via.Relay]
	via := m.lanes[a.Via.Relay]
	from, to := via, l
	if l == via || l.hop && l.From == r.From {
		from, to = l, via
	}
	if a.Via.Hop == ToBuffer && from.From != r.From || a.Via.Hop == FromBuffer && l.To != r.To || to == nil {
		m.t.Fatal("relayed over a link that does not lead there")
	}
	if r.Direct || a.Chunk.Bytes > relayChunk {
		m.t.Fatalf("a chunk of %d bytes is relayed, direct %t", a.Chunk.Bytes, r.Direct)
	}
	if a.Via.Hop == FromBuffer {
		return
	}
	if b.ending || b.retired {
		m.t.Fatal("a chunk is relayed by a relay that was removed or retired")
	}
	if m.inUse(a.Via.Relay, a.Via.Buffer) {
		m.t.Fatal("a buffer is used twice")
	}
	again := slices.Contains(m.relayed, a)
	m.relayed = append(m.relayed, a)
	if again {
		return // it failed because of another one
	}
	waiting := int64(0) // at most, since the core decided on several launches
	for _, o := range m.requests {
		if o.From == r.From && o.To == r.To && o.Class >= r.Class && !o.ended && !o.Direct {
			waiting += o.bytes
		}
	}
	if waiting < 100 {
		m.t.Fatalf("a chunk of a request of %d bytes is relayed, with at most %d waiting", r.bytes, waiting)
	}
	if via.broken || a.Link != a.Via.Relay {
		return
	}
	own := m.waiting(via.From, via.To, r.Class)
	for _, o := range m.requests {
		if o.From != via.From || o.To != via.To || o.Class < r.Class || o.launched == o.bytes || o.failure != nil || o.ended {
			continue
		}
		// The link's own requests go first, unless their class is lower, or more waits of others'.
		switch {
		case !m.core.NoDirectFirst || o.Class > r.Class:
			m.t.Fatalf("a chunk of class %d is relayed before one of class %d of the link's own", r.Class, o.Class)
		case m.unsure || m.core.Preferred != device.Host && r.To == m.core.Preferred:
		case m.core.Preferred != device.Host && o.To == m.core.Preferred:
			m.t.Fatal("a chunk is relayed before one of the link's own, the preferred GPU's")
		case m.waiting(r.From, r.To, r.Class) < own:
			m.t.Fatalf("a chunk of %d waiting bytes is relayed before the link's own, of which %d wait", m.waiting(r.From, r.To, r.Class), own)
		}
	}
}

// waiting is the number of bytes of at least a class that relays may carry and whose launch the model has not
// seen.
func (m *relays) waiting(from, to device.Space, class uint8) (n int64) {
	for _, o := range m.requests {
		if o.From == from && o.To == to && o.Class >= class && !o.Direct && o.failure == nil && !o.ended {
			n += o.bytes - o.taken
		}
	}
	return n
}

// harm notes a failure of a chunk on a link of its own.
func (m *relays) harm(a Action) {
	if a.Via.Hop == Direct {
		a.Chunk.Request.Owner.(*relayed).harmed = true
	}
}

// inUse reports whether a copy into or out of a relay's buffer, or any of them, is in a stream.
func (m *relays) inUse(relay, buffer int) bool {
	return slices.ContainsFunc(m.lanes, func(l *lane) bool {
		return slices.ContainsFunc(l.orders, func(o order) bool {
			return o.a.Via.Hop != Direct && o.a.Via.Relay == relay && (buffer < 0 || o.a.Via.Buffer == buffer)
		})
	})
}

func (m *relays) pickLane(t *rapid.T, is func(*lane) bool) int {
	var l []int
	for i, x := range m.lanes {
		if is(x) {
			l = append(l, i)
		}
	}
	if len(l) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(l).Draw(t, "link")
}

// run lets a stream make its first copy.
func (m *relays) run(t *rapid.T) {
	m.step(m.pickLane(t, func(l *lane) bool { return len(l.orders) > 0 }), rapid.Int64Range(0, 3000).Draw(t, "time"))
}

func (m *relays) step(i int, took int64) {
	l := m.lanes[i]
	m.now += time.Duration(took)
	m.core.At(m.now)
	a := l.orders[0].a
	l.orders = l.orders[1:]
	if l.broken || l.lost {
		err := errChunk
		if l.lost {
			err = device.ErrLost
		}
		m.core.Failed(i, a.Slot, err)
		m.act()
		return
	}
	m.move(a, int(a.Chunk.Bytes))
	m.core.Landed(i, a.Slot)
	m.act()
}

// move copies the first n bytes of a chunk.
func (m *relays) move(a Action, n int) {
	c := a.Chunk.Request.Owner.(*relayed)
	var buffer []byte
	if a.Via.Hop != Direct {
		buffer = m.sets[a.Via.Relay].content[a.Via.Buffer]
	}
	at := 0
	_ = a.Chunk.Each(func(dst, src device.Range) error {
		k := min(int(dst.Bytes), n-at)
		if k <= 0 {
			return nil
		}
		from, to := c.src[src.Addr:], c.dst[dst.Addr:]
		switch a.Via.Hop {
		case ToBuffer:
			to = buffer[at:]
		case FromBuffer:
			from = buffer[at:]
		}
		copy(to[:k], from[:k])
		at += int(dst.Bytes)
		return nil
	})
}

// fail lets the first copy of a stream fail, in the middle.
func (m *relays) fail(t *rapid.T) {
	i := m.pickLane(t, func(l *lane) bool { return len(l.orders) > 0 && !l.broken })
	l := m.lanes[i]
	a := l.orders[0].a
	m.move(a, rapid.IntRange(0, int(a.Chunk.Bytes)).Draw(t, "moved"))
	l.broken = true
	m.harm(a)
	m.step(i, 1)
}

func (m *relays) refuse(t *rapid.T) {
	m.lanes[m.pickLane(t, func(l *lane) bool { return true })].refuses = true
}

func (m *relays) recover(t *rapid.T) {
	m.recovered(m.pickLane(t, func(l *lane) bool { return l.recovering }))
}

func (m *relays) recovered(i int) {
	l := m.lanes[i]
	l.recovering, l.broken = false, l.lost
	err := errChunk
	if l.lost {
		err = fmt.Errorf("recover: %w", device.ErrLost)
	}
	m.core.Recovered(i, err)
	m.act()
}

func (m *relays) lose(t *rapid.T) {
	i := m.pickLane(t, func(l *lane) bool { return !l.lost && len(l.orders) > 0 })
	if rapid.IntRange(0, 5).Draw(t, "really") > 0 {
		t.Skip("not yet")
	}
	m.lanes[i].lost = true
	m.step(i, 1)
}

func (m *relays) remove(t *rapid.T) {
	i := m.pickLane(t, func(l *lane) bool { return !l.hop })
	if b := m.sets[i]; b != nil {
		b.ending = true
	}
	m.core.RemoveRelay(i)
	m.act()
}

func (m *relays) add(t *rapid.T) {
	i := m.pickLane(t, func(l *lane) bool { return !l.hop && !l.lost })
	if b := m.sets[i]; b != nil && !b.drained {
		if m.core.AddRelay(Relay{Link: i, Buffers: 1, BufferBytes: 1}) == nil {
			t.Fatal("a relay is added that is in use")
		}
		return
	}
	m.addRelay(i)
}

func (m *relays) request(t *rapid.T) *relayed {
	if len(m.requests) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(m.requests).Draw(t, "request")
}

func (m *relays) promote(t *rapid.T) {
	m.core.RaiseClass(m.request(t).Request, uint8(rapid.IntRange(0, 2).Draw(t, "class")))
	m.act()
}

func (m *relays) cancel(t *rapid.T) {
	c := m.request(t)
	c.canceled = m.core.Cancel(c.Request, errors.New("canceled")) || c.canceled
	m.act()
}

func (m *relays) abort(t *rapid.T) {
	c := m.request(t)
	open := !c.ended && c.failure == nil && (c.launched < c.bytes || len(c.returned) > 0)
	aborted := m.core.Abort(c.Request, errors.New("aborted"))
	if aborted != open {
		t.Fatalf("a request with %d of %d bytes launched, ended %t: aborted %t", c.launched, c.bytes, c.ended, aborted)
	}
	if aborted {
		c.canceled, c.aborted = true, true
	}
	m.act()
	if c.aborted && !c.ended && c.inFlight == 0 {
		t.Fatal("a request that was aborted has not ended, and no chunk of it is in flight")
	}
}

func (m *relays) skip(t *rapid.T) {
	c := m.request(t)
	want := c.bytes - c.launched
	for _, f := range c.returned {
		want += f.chunk.Bytes
	}
	if c.ended || c.failure != nil {
		want = 0
	}
	left := m.core.Skip(c.Request)
	if left != want {
		t.Fatalf("%d bytes were skipped, want %d", left, want)
	}
	c.aborted = c.aborted || left > 0
	m.act()
	if left > 0 && (c.ended != (c.inFlight == 0) || c.err != nil || len(c.returned) > 0) {
		t.Fatalf("a request that was skipped has ended: %v, with %d chunks in flight: %v", c.ended, c.inFlight, c.err)
	}
}

// check holds after every event.
func (m *relays) check(t *rapid.T) {
	for _, c := range m.requests {
		if n := c.Landed(); !bytes.Equal(c.src[:n], c.dst[:n]) {
			t.Fatalf("%d bytes are said to have landed that have not", n)
		}
		if c.ended && c.err == nil && !c.Skipped() && c.Landed() != c.Bytes() {
			t.Fatalf("a request has ended, and %d of %d bytes have landed", c.Landed(), c.Bytes())
		}
	}
	for i, b := range m.sets {
		if b.ending && !b.drained && !slices.Contains(m.core.links[i].relay.buffers, true) {
			t.Fatal("a relay that is not used is not drained")
		}
	}
	// A link whose own requests wait does not idle.
	for i, l := range m.lanes {
		if l.hop || !m.core.links[i].works() || len(l.orders) > 0 || m.core.Busy(i) {
			continue
		}
		for _, c := range m.requests {
			if !c.ended && c.failure == nil && m.own(c.Request) == i && (c.launched < c.bytes || len(c.returned) > 0) {
				t.Fatalf("the link from %s to %s idles: a request of class %d with %d of %d bytes launched", l.From, l.To, c.Class, c.launched, c.bytes)
			}
		}
	}
}

// drain lets everything happen that can: then all requests have ended, and relays are drained.
func (m *relays) drain() {
	for i := range m.sets {
		m.sets[i].ending = true
		m.core.RemoveRelay(i)
		m.act()
	}
	for again := true; again; {
		again = false
		for i := range m.lanes {
			for len(m.lanes[i].orders) > 0 {
				again = true
				m.step(i, 1000)
			}
			if m.lanes[i].recovering {
				again = true
				m.recovered(i)
			}
		}
		m.check(m.t)
	}
	for _, c := range m.requests {
		if !c.ended {
			m.t.Fatalf("a request has not ended: %d of %d bytes launched, %d chunks", c.launched, c.bytes, c.inFlight)
		}
	}
	for _, b := range m.sets {
		if !b.drained {
			m.t.Fatal("a relay was not drained")
		}
	}
	if m.core.InFlight() != nil {
		m.t.Fatal("something is left")
	}
}
