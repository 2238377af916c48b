package harvest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// rushed is a controller in a simulation, whose peer another process uses: slabs take times to drain, to be
// scrubbed and to be freed, the latter one after the other, as the driver does. Time passes in
// steps of 0.1 ms.
type rushed struct {
	c    *controller
	p    *peer
	now  time.Duration
	busy int64 // bytes that the other process holds
	lent int64
	took func() // what the other process does
	due  []due  // drains and scrubs under way

	drain, scrub, free time.Duration

	short, longest time.Duration // for how long less than the headroom has been free, and the longest time of it
	restored       time.Duration // when it was free again
}

type due struct {
	at time.Duration
	r  result
}

const gib = int64(1) << 30

// newRushed has a peer of 141 GiB, 7 of which stay free, and lends the rest but what the other process holds,
// at most so much, in slabs of four experts of Mixtral.
func newRushed(t *testing.T, busy, lent int64) *rushed {
	r := &rushed{busy: busy, drain: 20 * time.Millisecond, scrub: 2 * time.Millisecond, free: time.Millisecond}
	r.c = &controller{rules: (Options{}).EnsureDefaults().rules(), clients: map[string]*client{}, displaced: map[displacement]time.Duration{}}
	r.c.slabBytes = 4 * (336 << 20)
	r.p = &peer{space: device.HBM(1), headroom: 7 * gib, paths: map[device.Space]device.Path{device.HBM(0): {}}}
	r.c.peers = peers{r.p}
	r.p.update(Reading{Capacity: 141 * gib, Free: 141*gib - busy}, 0, time.Minute)
	for r.lent+r.c.slabBytes <= lent {
		req, err := r.c.request(r.c.slabBytes, Hints{Client: "experts"}, 0)
		if err != nil {
			t.Fatal(err)
		}
		to, err := r.c.choose(req)
		if err != nil {
			break // the rest is the headroom
		}
		at := r.c.slabAllocated(to, device.Region{Space: r.p.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
		r.c.grant(at, to.off, r.c.slabBytes, req, &timeline{})
		r.lent += to.bytes
	}
	r.c.takeActions()
	return r
}

func (r *rushed) unused() int64 { return 141*gib - r.busy - r.lent }

// pass lets time pass.
func (r *rushed) pass(d time.Duration) {
	for end := r.now + d; r.now < end; r.now += 100 * time.Microsecond {
		r.took()
		if r.unused() < r.p.headroom && r.lent > 0 {
			r.short += 100 * time.Microsecond
			r.longest = max(r.longest, r.short)
			r.restored = r.now + 100*time.Microsecond
		} else {
			r.short = 0
		}
	}
}

// tick is one of Runtime's loop.
func (r *rushed) tick() {
	now := r.now
	r.c.observe(now, []reading{{peer: r.p, slabChanges: r.p.slabChanges, Reading: Reading{Capacity: 141 * gib, Free: r.unused(), OtherProcesses: r.busy}}})
	r.perform()
	var over []result
	for i := 0; i < len(r.due); i++ {
		if r.due[i].at <= now {
			over = append(over, r.due[i].r)
			r.due = append(r.due[:i], r.due[i+1:]...)
			i--
		}
	}
	r.c.step(now, over)
	r.perform()
}

func (r *rushed) perform() {
	for all := r.c.takeActions(); len(all) > 0; all = append(all[1:], r.c.takeActions()...) {
		switch a := all[0].(type) {
		case refuse:
			r.due = append(r.due, due{r.now + r.drain, drained{h: a.h}})
		case scrub:
			r.due = append(r.due, due{r.now + r.scrub, scrubbed{slab: a.slab}})
		case freeMemory:
			r.pass(r.free)
			r.lent -= a.slab.segments.bytes
			r.c.complete(r.now, memoryFreed{slab: a.slab})
		}
	}
}

// user is a process that allocates on the peer.
type user struct {
	*rushed
	wants, missing, piece int64
	every, next           time.Duration
	// returned: after that time it returns all, and begins again.
	returned time.Duration
	// asks: it asks for what a piece lacks, as with the preloaded library; otherwise it tries again.
	asks    bool
	request *reclaimRequest
	got     time.Duration // when it had all, the first time
}

func (u *user) run() {
	if u.now < u.next {
		return
	}
	n := min(u.piece, u.missing)
	switch {
	case u.missing == 0 && u.returned > 0:
		u.busy, u.missing = u.busy-u.wants, u.wants
	case u.missing == 0:
	case u.unused() >= n:
		u.busy, u.missing, u.request, u.next = u.busy+n, u.missing-n, nil, u.now+u.every
		if u.missing == 0 {
			setDefault(&u.got, u.now)
			u.next = u.now + u.returned
		}
	case u.asks && (u.request == nil || u.request.remaining == 0):
		u.request, _ = u.c.reclaim(u.p, n+2<<20, u.now, 500*time.Millisecond)
	}
}

// TestRush: however a process takes memory of a peer, also more than is free, it gets it, and the headroom is
// never missing for longer than the deadline, as long as releases keep up with it. What is released beyond
// what it and the headroom need is little, or for a process in a rush at most what it has just taken.
func TestRush(t *testing.T) {
	const begin = 3 * time.Millisecond // a third of the way from one reading to the next
	var table strings.Builder
	fmt.Fprintf(&table, "%-30s %9s %9s %9s %9s %9s\n", "", "got, ms", "short, ms", "restored", "released", "needed")
	for _, test := range []struct {
		name              string
		busy, lent        int64
		want, piece       int64
		every, returned   time.Duration
		asks              bool
		drain             time.Duration
		shortMS, extraGiB int64 // at most
	}{
		{name: "5 GiB at once", want: 5 * gib, piece: 5 * gib, shortMS: 50, extraGiB: 1},
		{name: "17 GiB at once, asks", want: 17 * gib, piece: 17 * gib, asks: true, shortMS: 10, extraGiB: 1},
		{name: "35 GiB at once, asks", want: 35 * gib, piece: 35 * gib, asks: true, shortMS: 10, extraGiB: 1},
		{name: "the same, steps of 0.6 s", want: 35 * gib, piece: 35 * gib, asks: true, drain: 600 * time.Millisecond, shortMS: 10, extraGiB: 1},
		{name: "60 GiB at once, 37 are free", busy: 20 * gib, want: 60 * gib, piece: 60 * gib, asks: true, shortMS: 50, extraGiB: 1},
		{name: "30 GiB by 2 GiB, asks", want: 30 * gib, piece: 2 * gib, every: time.Millisecond, asks: true, shortMS: 100, extraGiB: 25},
		{name: "30 GiB by 1 GiB, tries again", want: 30 * gib, piece: gib, every: time.Millisecond, shortMS: 100, extraGiB: 25},
		{name: "30 GiB, 100 GiB/s", want: 30 * gib, piece: 256 << 20, every: 2500 * time.Microsecond, shortMS: 60, extraGiB: 10},
		{name: "30 GiB, 20 GiB/s", want: 30 * gib, piece: 64 << 20, every: 3 * time.Millisecond, shortMS: 50, extraGiB: 3},
		{name: "6 GiB, again and again", want: 6 * gib, piece: 2 * gib, every: time.Millisecond, returned: 20 * time.Millisecond, shortMS: 50, extraGiB: 10},
	} {
		if test.lent == 0 {
			test.lent = 84 * gib
		}
		if test.busy == 0 {
			test.busy = 50 * gib
		}
		r := newRushed(t, test.busy, test.lent)
		if test.drain > 0 {
			r.drain = test.drain
		}
		u := &user{rushed: r, wants: test.want, missing: test.want, piece: test.piece, every: test.every, returned: test.returned, asks: test.asks, next: begin}
		r.took = u.run
		lent, free := r.lent, r.unused()
		for r.now < 3*time.Second {
			r.tick()
			r.pass(r.c.pause(r.now, 10*time.Millisecond))
		}
		released, needed := lent-r.lent, max(test.want+r.p.headroom-free, 0)
		fmt.Fprintf(&table, "%-30s %9.1f %9.1f %9.1f %9.1f %9.1f\n", test.name, ms(u.got-begin), ms(r.longest), ms(max(r.restored-begin, 0)),
			float64(released)/float64(gib), float64(needed)/float64(gib))
		if u.got == 0 || ms(r.longest) > float64(test.shortMS) || r.unused() < r.p.headroom || released > needed+test.extraGiB*gib {
			t.Errorf("%s: got %v, too little for %v, %d of %d bytes released, %d free", test.name, u.got, r.longest, released, needed, r.unused())
		}
	}
	t.Log("\n" + table.String())
}

func ms(d time.Duration) float64 { return 1e3 * d.Seconds() }
