package harvest

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// market is a controller with two clients that compete for a peer's memory. What is revoked is
// released by its next turn.
type market struct {
	fail    func(format string, args ...any)
	c       *controller
	now     time.Duration
	clock   timeline
	other   int64 // used by other processes
	handles map[*Handle]bool
	quota   map[string]int64
	// started are the displacements, in order.
	started []started
}

type started struct {
	displacement
	at    time.Duration
	bytes int64
}

const marketBytes = 64 << 10

func newMarket(fail func(string, ...any), o Options) *market {
	o.SlabBytes = 4096
	o.Clients = map[string]ClientOptions{"experts": {SlabBytes: 8192}, "kv": {SlabBytes: 2048}}
	o = o.EnsureDefaults()
	m := &market{fail: fail, handles: map[*Handle]bool{}}
	m.c = &controller{rules: o.rules(), clients: map[string]*client{}, displaced: map[displacement]time.Duration{}}
	for i := range 2 {
		p := &peer{space: device.HBM(i + 1), headroom: max(o.HeadroomBytes, 0), paths: map[device.Space]device.Path{device.HBM(0): {}}}
		p.update(Reading{Capacity: marketBytes, Free: marketBytes}, 0, time.Minute)
		m.c.peers = append(m.c.peers, p)
	}
	return m
}

// slabCosts are the costs per byte of the slabs, by number.
func (m *market) slabCosts() map[uint64]float64 {
	all := map[uint64]float64{}
	for _, p := range m.c.peers {
		for _, s := range p.slabs {
			all[s.id] = SlabState{Bytes: s.segments.bytes, Cost: m.c.cost(s)}.costPerByte()
		}
	}
	return all
}

// check checks what the controller has displaced for a demand that costs so much per byte.
func (m *market) check(before map[uint64]float64, known int, by string, costPerByte float64) {
	for _, l := range m.c.draining[known:] {
		if l.beneficiary == "" {
			continue
		}
		if q, ok := m.quota[by]; ok && m.c.clients[by].held >= q {
			m.fail("slab %d is displaced for %s, which has used up its quota", l.slab.id, by)
		}
		if l.beneficiary != by {
			m.fail("slab %d is displaced for %s, and %s asked", l.slab.id, l.beneficiary, by)
		}
		if got := before[l.slab.id]; got*m.c.displaceFactor > costPerByte*(1+1e-9) {
			m.fail("slab %d costs %g per byte, and is displaced for what costs %g", l.slab.id, got, costPerByte)
		}
		if age := m.now - l.slab.since; age < m.c.residence {
			m.fail("slab %d is displaced after %v", l.slab.id, age)
		}
		if len(l.slab.clients) > 1 || l.slab.clients[by] > 0 {
			m.fail("slab %d is displaced for %s, and has objects of %v", l.slab.id, by, l.slab.clients)
		}
		for from := range l.slab.clients {
			for _, d := range m.started {
				if d.displacement == (displacement{by, from}) && m.now-d.at < m.c.residence {
					m.fail("%s displaces %s %v after it was displaced", by, from, m.now-d.at)
				}
			}
			m.started = append(m.started, started{displacement{from, by}, m.now, l.slab.segments.bytes})
		}
	}
}

// alloc asks for an object of a client.
func (m *market) alloc(name string, bytes int64, cost time.Duration) *Handle {
	before, known := m.slabCosts(), len(m.c.draining)
	req, err := m.c.request(bytes, Hints{Client: name, Cost: cost}, m.now)
	if err != nil {
		m.fail("request: %v", err)
	}
	to, err := m.c.choose(req)
	m.check(before, known, name, cost.Seconds()/float64(req.Bytes))
	m.takeActions()
	if err != nil {
		if len(m.c.draining) > known && !errors.Is(err, ErrNoCapacity) {
			m.fail("displaced after %v", err)
		}
		return nil
	}
	if to.slab == nil {
		for _, r := range to.peer.reserved {
			if left := to.peer.borrowable() - to.bytes; r.client != name && m.now < r.until && left < r.bytes && r.bytes > 0 {
				m.fail("a slab of %d bytes for %s leaves %d, of %d reserved for %s", to.bytes, name, left, r.bytes, r.client)
			}
		}
		to.slab = m.c.slabAllocated(to, device.Region{Space: to.peer.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
		if to.peer.free < to.peer.headroom {
			m.fail("%d bytes are free after a slab, and %d are to be", to.peer.free, to.peer.headroom)
		}
	}
	h := m.c.grant(to.slab, to.off, bytes, req, &m.clock)
	m.handles[h] = true
	m.takeActions()
	return h
}

func (m *market) free(h *Handle) {
	if err := m.c.free(h, m.now); err != nil {
		m.fail("free: %v", err)
	}
	m.takeActions()
	m.c.finishFree(h, h.id%4 > 0, nil) // else by the next turn
	m.takeActions()
}

// takeActions carries out what the controller asks for, but for what turn does.
func (m *market) takeActions() (rest []action) {
	for _, a := range m.c.takeActions() {
		switch a := a.(type) {
		case refuse:
			a.h.readers.refuse()
			delete(m.handles, a.h)
		case invalidate:
			a.h.readers.invalidate()
		case scrub, freeMemory:
			rest = append(rest, a)
		}
	}
	return rest
}

// turn ends what is being released, reads the peers, and checks the headroom.
func (m *market) turn(dt time.Duration) {
	m.now += dt
	m.clock.advance(m.now)
	var ends []result
	for _, h := range m.c.undrained() {
		ends = append(ends, drained{h, nil})
	}
	m.c.step(m.now, ends)
	for todo := m.takeActions(); len(todo) > 0; todo = append(todo[1:], m.takeActions()...) {
		switch a := todo[0].(type) {
		case scrub:
			m.c.complete(m.now, scrubbed{a.slab, nil})
		case freeMemory:
			m.c.complete(m.now, memoryFreed{a.slab, nil})
		}
	}
	var rs []reading
	for _, p := range m.c.peers {
		r := Reading{Capacity: marketBytes, Free: marketBytes - m.other, OtherProcesses: m.other}
		for _, s := range p.slabs {
			r.Free -= s.segments.bytes
		}
		rs = append(rs, reading{peer: p, Reading: r, slabChanges: p.slabChanges})
	}
	m.c.observe(m.now, rs)
	m.takeActions()
	for _, p := range m.c.peers {
		if err := p.check(); err != nil {
			m.fail("%v", err)
		}
		if p.free+p.draining < p.headroom && p.serving > 0 {
			m.fail("%d bytes are free and %d coming, and %d are to be", p.free, p.draining, p.headroom)
		}
	}
}

// check compares what the peer counts with its slabs.
func (p *peer) check() error {
	serving, open := int64(0), 0
	for _, s := range p.slabs {
		if s.draining == nil {
			serving += s.segments.bytes
		}
		free := len(s.segments.free) > 0
		if free {
			open++
		}
		if s.open != free || free && p.open[s.openAt] != s {
			return fmt.Errorf("%s: slab %d has free extents: %v, listed: %v", p.space, s.id, free, s.open)
		}
	}
	if serving != p.serving || open != len(p.open) {
		return fmt.Errorf("%s: %d bytes in service, counted %d; %d slabs with free extents, listed %d", p.space, serving, p.serving, open, len(p.open))
	}
	return nil
}

// held is what the client's slabs in service take.
func (m *market) held(name string) (n int64) {
	for _, p := range m.c.peers {
		for _, s := range p.slabs {
			if s.owner == name && s.draining == nil {
				n += s.segments.bytes
			}
		}
	}
	return n
}

// TestDisplaceHistories: whatever happens, nothing displaces what is worth more, too early, or
// in turn; headroom and quotas hold; reserved memory is not given away.
func TestDisplaceHistories(t *testing.T) {
	displaced := 0
	rapid.Check(t, func(t *rapid.T) {
		quota := map[string]int64{}
		o := Options{HeadroomBytes: 4096, Cooldown: 50 * time.Millisecond, Residence: time.Second, Reserve: 200 * time.Millisecond}
		if rapid.Bool().Draw(t, "quotas") {
			quota["experts"], quota["kv"] = marketBytes, marketBytes/2
			o.Policy = NewFairness(FairnessOptions{Quotas: quota})
		}
		m := newMarket(t.Fatalf, o)
		m.quota = quota
		client := rapid.SampledFrom([]string{"experts", "kv", "kv", "guest"})
		size := map[string]int64{"experts": 2048, "kv": 512, "guest": 1024}
		cost := rapid.Custom(func(t *rapid.T) time.Duration {
			return time.Duration(rapid.SampledFrom([]int{0, 1, 2, 5, 10, 100}).Draw(t, "cost")) * time.Millisecond
		})
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				name, d := client.Draw(t, "client"), cost.Draw(t, "cost")
				for range rapid.IntRange(1, 40).Draw(t, "objects") {
					m.alloc(name, size[name], d)
				}
				if q, ok := quota[name]; ok && m.c.clients[name].held > q {
					t.Fatalf("%s holds %d bytes of %d", name, m.c.clients[name].held, q)
				}
			},
			"want": func(t *rapid.T) {
				name, n := client.Draw(t, "client"), rapid.IntRange(1, 20).Draw(t, "objects")
				d := Demand{Client: name, Bytes: size[name], Objects: n, Cost: cost.Draw(t, "cost") * time.Duration(n)}
				before, known := m.slabCosts(), len(m.c.draining)
				if err := m.c.want(m.c.peers[rapid.IntRange(0, 1).Draw(t, "peer")], d, m.now); err != nil {
					t.Fatal(err)
				}
				m.check(before, known, name, d.costPerByte())
				m.takeActions()
			},
			"free": func(t *rapid.T) {
				if hs := m.sorted(); len(hs) > 0 {
					m.free(rapid.SampledFrom(hs).Draw(t, "handle"))
				}
			},
			"cost": func(t *rapid.T) {
				name, d := client.Draw(t, "client"), cost.Draw(t, "cost")
				every := rapid.IntRange(1, 5).Draw(t, "every")
				for i, h := range m.sorted() {
					if h.client == name && i%every == 0 {
						h.SetCost(d)
					}
				}
			},
			"turn": func(t *rapid.T) {
				m.turn(rapid.SampledFrom([]time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second}).Draw(t, "time"))
			},
			"others": func(t *rapid.T) {
				m.other = rapid.SampledFrom([]int64{0, 0, marketBytes / 4, marketBytes}).Draw(t, "bytes")
			},
			"": func(t *rapid.T) {
				byClient := map[string]int64{}
				for _, p := range m.c.peers {
					u := p.usage()
					for name, n := range u.Clients {
						byClient[name] += n
						u.Used -= n
					}
					if u.Used > 0 || u.Used < -u.Draining || p.draining == 0 && u.Used != 0 {
						t.Fatalf("clients have %v of %+v", u.Clients, p.usage())
					}
				}
				for name, c := range m.c.clients {
					if byClient[name] != c.held {
						t.Fatalf("%s has %d bytes, and %d on peers", name, c.held, byClient[name])
					}
				}
				for _, p := range m.c.peers {
					for _, s := range p.slabs {
						sum := time.Duration(0)
						for _, h := range s.handles {
							sum += h.Cost()
						}
						if n := len(s.held(freeing)); n != s.freeing {
							t.Fatalf("%d handles are being freed, and %d count", n, s.freeing)
						}
						if got := time.Duration(s.cost.Load()); got != sum {
							t.Fatalf("slab %d costs %v, and its handles %v", s.id, got, sum)
						}
					}
				}
			},
		})
		displaced += len(m.started)
	})
	if displaced == 0 {
		t.Error("nothing was displaced")
	}
}

// sorted lists the live handles by number.
func (m *market) sorted() []*Handle {
	var hs []*Handle
	for h := range m.handles {
		hs = append(hs, h)
	}
	slices.SortFunc(hs, func(a, b *Handle) int { return int(a.id) - int(b.id) })
	return hs
}

// fill has a client allocate until it is refused.
func (m *market) fill(name string, bytes int64, cost time.Duration) {
	for m.alloc(name, bytes, cost) != nil {
	}
}

// TestDisplaceProgress: a client whose objects are worth much more than those of another gets
// all of its memory, at least one slab of its own each turn, and the other gets it back later.
func TestDisplaceProgress(t *testing.T) {
	m := newMarket(t.Fatalf, Options{})
	m.fill("experts", 2048, time.Millisecond)
	m.turn(m.c.residence)
	shift := func(name string, bytes int64, cost time.Duration) {
		t.Helper()
		m.c.client(name).use.Wanted = 2 * marketBytes
		for range 2 * marketBytes / 2048 { // a slab of KV blocks at a time
			m.fill(name, bytes, cost)
			m.turn(50 * time.Millisecond)
		}
		if got := m.held(name); got != 2*marketBytes {
			t.Errorf("%s holds %d bytes after %v", name, got, m.now)
		}
	}
	shift("kv", 512, 4*time.Millisecond)
	m.turn(m.c.residence)
	for _, h := range m.sorted() {
		h.SetCost(time.Microsecond)
	}
	shift("experts", 2048, time.Millisecond)
	if s := m.c.state(m.now); s.Clients["kv"].Displaced != 2*marketBytes || s.Clients["experts"].Displaced != 2*marketBytes || s.Clients["kv"].Revocations[ReasonPolicy] == 0 {
		t.Errorf("%+v", s.Clients)
	}
}

// TestDisplaceOscillation: where worths swing to and fro, faster or slower than memory stays,
// the direction changes at most once per residence.
func TestDisplaceOscillation(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, period := range []time.Duration{200 * time.Millisecond, time.Second, 4 * time.Second, 20 * time.Second} {
		t.Run(fmt.Sprint("period=", period), func(t *testing.T) {
			m := newMarket(t.Fatalf, Options{})
			const length = 2 * time.Minute
			m.c.client("kv").use.Wanted, m.c.client("experts").use.Wanted = 2*marketBytes, 2*marketBytes
			m.fill("experts", 2048, time.Millisecond)
			for m.now < length {
				up := (m.now/period)%2 == 0
				worth := map[string]time.Duration{"experts": 4 * time.Millisecond, "kv": 10 * time.Millisecond} // four and forty times
				if !up {
					worth = map[string]time.Duration{"experts": 40 * time.Millisecond, "kv": time.Millisecond}
				}
				for _, h := range m.sorted() {
					h.SetCost(worth[h.client])
				}
				for _, name := range []string{"experts", "kv"} {
					m.fill(name, map[string]int64{"experts": 2048, "kv": 512}[name], worth[name])
				}
				m.turn(50 * time.Millisecond)
			}
			flips, moved := 0, int64(0)
			for i, d := range m.started {
				moved += d.bytes
				if i > 0 && m.started[i-1].displacement != d.displacement {
					flips++
				}
			}
			t.Logf("%d bytes displaced, the direction changed %d times", moved, flips)
			if limit := int(length / m.c.residence); flips > limit {
				t.Errorf("the direction changed %d times in %v", flips, length)
			}
			// Between two changes each byte moves at most once.
			if limit := int64(flips+1) * 2 * marketBytes; moved > limit {
				t.Errorf("%d bytes were displaced in %v, more than %d", moved, length, limit)
			}
		})
	}
}

// BenchmarkManyBlocks: what a client of many objects asks for takes as long as its slabs, not its
// objects, are many.
func BenchmarkManyBlocks(b *testing.B) {
	const block, perSlab = 512, 64
	for _, blocks := range []int{1 << 10, 100 << 10} {
		p := &peer{space: device.HBM(1), paths: map[device.Space]device.Path{device.HBM(0): {}}}
		p.update(Reading{Capacity: int64(blocks) * block, Free: int64(blocks) * block}, 0, time.Minute)
		o := Options{Clients: map[string]ClientOptions{"kv": {SlabBytes: perSlab * block}}}.EnsureDefaults()
		m := &market{fail: b.Fatalf, handles: map[*Handle]bool{}}
		m.c = &controller{rules: o.rules(), clients: map[string]*client{}, displaced: map[displacement]time.Duration{}, peers: peers{p}}
		m.c.setUse("kv", Use{PerSecond: 1, Saved: time.Millisecond}, 0)
		req, _ := m.c.request(block, Hints{Client: "kv"}, 0)
		for range blocks / perSlab {
			s := m.c.slabAllocated(placement{peer: p, owner: "kv", client: "kv"}, device.Region{Space: p.space, Range: device.Range{Addr: 1 << 20, Bytes: perSlab * block}})
			for i := range int64(perSlab) {
				m.c.grant(s, i*block, block, req, &m.clock)
			}
			m.takeActions()
		}
		run := func(name string, f func()) {
			b.Run(fmt.Sprintf("%s/blocks=%d", name, blocks), func(b *testing.B) {
				for b.Loop() {
					f()
				}
			})
		}
		run("use", func() { m.c.setUse("kv", Use{PerSecond: 1, Saved: time.Millisecond}, 0) })
		run("room", func() { p.room("kv", "kv", block, 0) })
		m.now = time.Minute
		run("want", func() { // too little to displace a slab
			if err := m.c.want(p, Demand{Client: "experts", Bytes: block, Objects: 1, Cost: time.Millisecond}, m.now); err != nil || len(m.c.draining) > 0 {
				b.Fatal(err)
			}
		})
		run("refused", func() {
			req, _ := m.c.request(block, Hints{Client: "kv"}, m.now)
			if _, err := m.c.choose(req); err == nil {
				b.Fatal("not refused")
			}
		})
	}
}
