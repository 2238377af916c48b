package dispatch

import (
	"math"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestEvenly: the parts with which all links end together.
func TestEvenly(t *testing.T) {
	a, b, c := &link{}, &link{}, &link{}
	for _, x := range []struct {
		name  string
		parts []part
		bytes float64
		want  float64 // of b
	}{
		{"equal links", []part{{link: a, rate: 10}, {link: b, rate: 10}}, 100, 50},
		{"by rate", []part{{link: a, rate: 30}, {link: b, rate: 10}}, 100, 25},
		{"less what is in flight", []part{{link: a, rate: 10}, {link: b, rate: 10, backlog: 40}}, 100, 30},
		{"less what a hop takes", []part{{link: a, rate: 10}, {link: b, rate: 10, delay: 2}}, 100, 40},
		{"none, with enough in flight", []part{{link: a, rate: 10}, {link: b, rate: 10, backlog: 200}}, 100, 0},
		{"none, far away", []part{{link: a, rate: 10}, {link: b, rate: 10, delay: 20}}, 100, 0},
		{"what others cannot take", []part{{link: a, rate: 10, backlog: 500}, {link: b, rate: 10}, {link: c, rate: 10, delay: 90}}, 100, 100},
		{"of three", []part{{link: a, rate: 10, backlog: 50}, {link: b, rate: 10}, {link: c, rate: 20}}, 150, 50},
	} {
		if got := evenly(x.parts, b, x.bytes); math.Abs(got-x.want) > 1e-9 {
			t.Errorf("%s: %g, want %g", x.name, got, x.want)
		}
	}
}

// TestMeter: the rate of the last few chunks, each from when the link could begin with it.
func TestMeter(t *testing.T) {
	const ms = time.Millisecond
	var m meter
	if got := m.rate(7, 0); got != 7 {
		t.Errorf("nothing measured: %g", got)
	}
	m.add(10<<20, 0, 1*ms)
	if got := m.add(10<<20, 0, 2*ms); got != ms {
		t.Errorf("the second of two that were launched together took %v", got)
	}
	if got, want := m.rate(7, 2*ms), float64(10<<20)*1e3; math.Abs(got/want-1) > 1e-9 {
		t.Errorf("rate %g, want %g", got, want)
	}
	m.add(100, 2*ms, 10*ms) // shows latency
	for at := 20 * ms; at <= 100*ms; at += 10 * ms {
		m.add(10<<20, at-10*ms, at)
	}
	if got, slow := m.rate(7, 100*ms), float64(10<<20)*1e2; got < slow || got > 1.2*slow {
		t.Errorf("slower for nine chunks: %g, not about %g", got, slow)
	}
	if !m.slowed(1e10, 100*ms) || m.slowed(1e9, 100*ms) || m.slowed(0, 100*ms) {
		t.Error("a link is slowed that is not, or the other way round")
	}
	if got := m.rate(7, 200*ms); got != 7 {
		t.Errorf("100 ms later: %g", got)
	}
}

// TestNoGarbageOfRelays: in the steady state relays allocate nothing.
func TestNoGarbageOfRelays(t *testing.T) {
	var c Core
	for g := range 3 {
		c.AddLink(Link{From: device.Host, To: device.HBM(g), ChunkBytes: 100, Depth: 2, RelayFrom: 300})
	}
	for g := 1; g < 3; g++ {
		if err := c.AddRelay(Relay{Link: g, Buffers: 3, BufferBytes: 100}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.AddHop(g, Link{From: device.HBM(g), To: device.HBM(0)}); err != nil {
			t.Fatal(err)
		}
	}
	r := &Request{}
	relayed := 0
	round := func() {
		r.Reset()
		r.From, r.To = device.Host, device.HBM(0)
		r.Add(Piece{Src: device.Range{Addr: 1, Bytes: 3000}, Dst: device.Range{Addr: 1 << 40, Bytes: 3000}})
		if err := c.Submit(r, nil); err != nil {
			t.Fatal(err)
		}
		for a, ok := c.Next(); ok; a, ok = c.Next() {
			if a.Kind == Launch {
				if a.Via.Hop == ToBuffer {
					relayed++
				}
				c.Landed(a.Link, a.Slot)
			}
		}
		if !r.Ended() || r.Landed() != 3000 {
			t.Fatalf("%d bytes have landed", r.Landed())
		}
	}
	if n := testing.AllocsPerRun(200, round); n > 0 || relayed == 0 {
		t.Errorf("%v allocations per request, %d chunks relayed", n, relayed)
	}
}

// TestTurnsOverRelays: requests that take turns share all links that carry them, whichever of them
// take their chunks, and end together.
func TestTurnsOverRelays(t *testing.T) {
	for _, buffers := range []int{1, 3} {
		var c Core
		for g := range 3 {
			c.AddLink(Link{From: device.Host, To: device.HBM(g), ChunkBytes: 100, Depth: 2, RelayFrom: 300})
		}
		for g := 1; g < 3; g++ {
			if err := c.AddRelay(Relay{Link: g, Buffers: buffers, BufferBytes: 100}); err != nil {
				t.Fatal(err)
			}
			if _, err := c.AddHop(g, Link{From: device.HBM(g), To: device.HBM(0)}); err != nil {
				t.Fatal(err)
			}
		}
		var all []*Request
		for i := range 3 {
			r := &Request{From: device.Host, To: device.HBM(0), TakesTurns: true}
			at := device.Addr(i) << 20
			r.Add(Piece{Src: device.Range{Addr: 1 + at, Bytes: 20000}, Dst: device.Range{Addr: 1<<40 + at, Bytes: 20000}})
			if err := c.Submit(r, nil); err != nil {
				t.Fatal(err)
			}
			all = append(all, r)
		}
		var flights []Action
		began := all[0].launched // before the others came
		for {
			for a, ok := c.Next(); ok; a, ok = c.Next() {
				if a.Kind == Launch {
					flights = append(flights, a)
				}
			}
			if len(flights) == 0 {
				break
			}
			a := flights[0]
			flights = flights[1:]
			c.Landed(a.Link, a.Slot)
			for _, r := range all[1:] {
				if d := all[0].launched - began - r.launched; all[0].launched < 20000 && (d > 300 || d < -300) {
					t.Fatalf("%d buffers: of two requests one has launched %d bytes more", buffers, d)
				}
			}
		}
		for _, r := range all {
			if !r.Ended() {
				t.Error("a request has not ended")
			}
		}
	}
}
