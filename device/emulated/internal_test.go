package emulated

import (
	"math"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// TestShareIsFair: rates fill no resource beyond its rate, and every flow is held by
// its own limit, or by a full resource on which nobody is faster.
func TestShareIsFair(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "resources")
		f := fluid{rates: rapid.SliceOfN(rapid.Float64Range(1, 1000), n, n).Draw(t, "rates")}
		for range rapid.IntRange(1, 10).Draw(t, "flows") {
			fl := &flow{running: rapid.IntRange(0, 5).Draw(t, "running") > 0, left: 1}
			fl.resources = rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 1, n, rapid.ID[int]).Draw(t, "uses")
			if rapid.Bool().Draw(t, "limited") {
				fl.limit = rapid.Float64Range(1, 1000).Draw(t, "limit")
			}
			f.flows = append(f.flows, fl)
		}
		f.share()
		used, fastest := make([]float64, n), make([]float64, n)
		for _, fl := range f.flows {
			for _, r := range fl.resources {
				used[r] += fl.rate
				fastest[r] = max(fastest[r], fl.rate)
			}
		}
		const close = 1 + 1e-9
		for r := range used {
			if used[r] > f.rates[r]*close {
				t.Fatalf("resource %d gives %g of %g", r, used[r], f.rates[r])
			}
		}
		for i, fl := range f.flows {
			if !fl.running {
				if fl.rate != 0 {
					t.Fatalf("flow %d has not started and drains %g", i, fl.rate)
				}
				continue
			}
			held := fl.limit > 0 && fl.rate*close >= fl.limit
			for _, r := range fl.resources {
				held = held || used[r]*close >= f.rates[r] && fl.rate*close >= fastest[r]
			}
			if !held || fl.limit > 0 && fl.rate > fl.limit*close {
				t.Fatalf("flow %d drains %g (limit %g), and nothing holds it: rates %v, used %v", i, fl.rate, fl.limit, f.rates, used)
			}
		}
	})
}

// TestFluidEnds: flows end, in whatever steps the clock moves, when all they had
// has drained.
func TestFluidEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rates := []float64{1e9, 3e9}
		type plan struct {
			start, left time.Duration
			uses        []int
		}
		var plans []plan
		total := time.Duration(0)
		for range rapid.IntRange(1, 6).Draw(t, "flows") {
			p := plan{
				start: time.Duration(rapid.IntRange(0, 1000).Draw(t, "start")),
				left:  time.Duration(rapid.IntRange(0, 1000).Draw(t, "left")),
				uses:  rapid.SliceOfNDistinct(rapid.IntRange(0, 1), 1, 2, rapid.ID[int]).Draw(t, "uses"),
			}
			plans = append(plans, p)
			total += p.left
		}
		// run returns when each flow ended; step 0 jumps from end to end.
		run := func(step time.Duration) []time.Duration {
			f := fluid{rates: rates}
			ends := make([]time.Duration, len(plans))
			for i, p := range plans {
				ends[i] = -1
				f.add(&flow{start: p.start, left: float64(p.left), resources: p.uses})
			}
			flows := append([]*flow{}, f.flows...)
			for now := time.Duration(0); ; {
				next, ok := f.next()
				if !ok {
					return ends
				}
				if step == 0 {
					now = next
				} else {
					now += step
				}
				f.advance(now, func(*flow) {})
				for i, fl := range flows {
					if fl.done && ends[i] < 0 {
						ends[i] = now
					}
				}
			}
		}
		exact, coarse := run(0), run(37)
		for i, p := range plans {
			if low := p.start + p.left/3; exact[i] < low {
				t.Fatalf("flow %d of %+v ended at %v", i, p, exact[i])
			}
			if exact[i] > 1000+total+time.Duration(len(plans)) {
				t.Fatalf("flow %d ended at %v, and all together need %v from 1 us on", i, exact[i], total)
			}
			if coarse[i] < exact[i]-1 || coarse[i] > exact[i]+38 {
				t.Fatalf("flow %d ended at %v, and in steps of 37 ns at %v", i, exact[i], coarse[i])
			}
		}
	})
}

// TestShadowRuns compares the shadow's runs with one cell per byte.
func TestShadowRuns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 60).Draw(t, "bytes")
		s := newShadow(n)
		model := make([]*cell, n)
		for i := range model {
			model[i] = quietUnwritten
		}
		cells := []*cell{quietUnwritten, quietWritten, {}, {}}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				at := int64(0)
				for i, r := range s.runs {
					if r.lo != at || r.hi <= r.lo {
						t.Fatalf("runs %+v", s.runs)
					}
					if i > 0 && s.runs[i-1].cell == r.cell {
						t.Fatalf("two runs of one cell: %+v", s.runs)
					}
					for ; at < r.hi; at++ {
						if model[at] != r.cell {
							t.Fatalf("byte %d", at)
						}
					}
				}
				if at != n {
					t.Fatalf("runs end at %d of %d", at, n)
				}
			},
			"update": func(t *rapid.T) {
				lo := rapid.Int64Range(0, n-1).Draw(t, "lo")
				hi := rapid.Int64Range(lo+1, n).Draw(t, "hi")
				to := rapid.IntRange(0, 3).Draw(t, "to")
				only := rapid.IntRange(-1, 3).Draw(t, "only")
				change := func(c *cell) *cell {
					if only >= 0 && c != cells[only] {
						return c
					}
					return cells[to]
				}
				s.update(lo, hi, func(l, h int64, c *cell) *cell {
					if l < lo || h > hi || l >= h || model[l] != c {
						t.Fatalf("asked for [%d, %d) of [%d, %d)", l, h, lo, hi)
					}
					return change(c)
				})
				for i := lo; i < hi; i++ {
					model[i] = change(model[i])
				}
			},
			"each": func(t *rapid.T) {
				lo := rapid.Int64Range(0, n-1).Draw(t, "lo")
				hi := rapid.Int64Range(lo, n).Draw(t, "hi")
				at := lo
				s.each(lo, hi, func(l, h int64, c *cell) {
					if l != at {
						t.Fatalf("from %d, want %d", l, at)
					}
					for ; at < h; at++ {
						if model[at] != c {
							t.Fatalf("byte %d", at)
						}
					}
				})
				if at != hi {
					t.Fatalf("to %d, want %d", at, hi)
				}
			},
		})
	})
}

// TestClocks: a snapshot holds what came before it and nothing that comes after.
func TestClocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 4
		var actors []*actor
		for i := range n {
			a := &actor{id: i, clock: make(vclock, i+1)}
			a.clock[i] = 1
			actors = append(actors, a)
		}
		type did struct{ actor, seq int }
		// known is what each actor really knows of: all accesses by sequence number.
		known := make([]map[did]bool, n)
		for i := range known {
			known[i] = map[did]bool{}
		}
		stamps := map[did]uint32{}
		type shot struct {
			clock vclock
			known map[did]bool
		}
		var shots []shot
		for seq := range rapid.IntRange(1, 60).Draw(t, "steps") {
			i := rapid.IntRange(0, n-1).Draw(t, "actor")
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				d := did{i, seq}
				stamps[d] = actors[i].tick()
				known[i][d] = true
			case 1:
				k := map[did]bool{}
				for d := range known[i] {
					k[d] = true
				}
				shots = append(shots, shot{actors[i].snapshot(), k})
			case 2:
				if len(shots) == 0 {
					continue
				}
				s := shots[rapid.IntRange(0, len(shots)-1).Draw(t, "shot")]
				actors[i].join(s.clock)
				for d := range s.known {
					known[i][d] = true
				}
			}
			for d, at := range stamps {
				for j, a := range actors {
					if says := at <= a.clock.at(d.actor); says != known[j][d] {
						t.Fatalf("actor %d: the clock says %v of access %+v", j, says, d)
					}
				}
				for _, s := range shots {
					if says := at <= s.clock.at(d.actor); says != s.known[d] {
						t.Fatalf("a snapshot says %v of access %+v", says, d)
					}
				}
			}
		}
	})
}

// TestPrune: what the check remembers stays small over many operations, of which
// none is lost track of.
func TestPrune(t *testing.T) {
	m, err := New(Options{Check: true, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	const blocks, block = 500, 64
	mem, err := m.Alloc(device.HBM(0), blocks*block, "cache")
	if err != nil {
		t.Fatal(err)
	}
	var streams []device.Executor
	for range 3 {
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{})
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s.(device.Executor))
	}
	e, err := m.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	most := 0
	for i := range 20_000 {
		r := mem.Range(int64(i*7%blocks)*block, block)
		s, next := streams[i%3], streams[(i+1)%3]
		if err := s.Execute(device.Work{Name: "append", Writes: []device.Range{r}}); err != nil {
			t.Fatal(err)
		}
		if err := s.Execute(device.Work{Name: "attend", Reads: []device.Range{r}}); err != nil {
			t.Fatal(err)
		}
		if err := s.Record(e); err != nil {
			t.Fatal(err)
		}
		if err := next.Wait(e); err != nil {
			t.Fatal(err)
		}
		if i%100 == 99 {
			if err := next.Synchronize(t.Context()); err != nil {
				t.Fatal(err)
			}
			m.mu.Lock()
			if m.check.ops%pruneEvery < 200 && m.check.ops > pruneEvery {
				most = max(most, len(m.memory.live[0].shadow.runs))
			}
			m.mu.Unlock()
		}
	}
	if most == 0 || most > 250 {
		t.Errorf("up to %d runs of %d blocks are remembered behind a pruning", most, blocks)
	}
	// A copy that is held up while the host learns of later reads, and prunes, is
	// still not ordered with them.
	loose, err := m.NewStream(device.HBM(1), device.StreamOptions{Name: "loose"})
	if err != nil {
		t.Fatal(err)
	}
	src, err := m.Alloc(device.HBM(1), block, "src")
	if err != nil {
		t.Fatal(err)
	}
	if err := loose.(device.Executor).Execute(device.Work{Name: "fill", Writes: []device.Range{src.Range(0, block)}}); err != nil {
		t.Fatal(err)
	}
	stall := m.Inject(&Fault{Kind: StallCopy})
	if err := loose.Copy(mem.Range(0, block), src.Range(0, block)); err != nil {
		t.Fatal(err)
	}
	for range pruneEvery {
		if err := streams[0].Execute(device.Work{Name: "attend", Reads: []device.Range{mem.Range(0, 1)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := streams[0].Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := m.Findings(); len(got) != 0 {
		t.Fatal(got[0])
	}
	stall.Release()
	if err := loose.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := m.Findings(); len(got) == 0 || got[0].Kind != Unordered {
		t.Errorf("findings %v", got)
	}
	for _, mem := range []device.Memory{mem, src} {
		if err := mem.Free(); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Close(); err == nil {
		t.Error("Close is silent about findings")
	}
}

// TestQueue compares the ring with a slice.
func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q queue
		var model []uint32
		next := uint32(0)
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			if rapid.Bool().Draw(t, "push") || q.n == 0 {
				next++
				q.push(&op{value: next})
				model = append(model, next)
			} else if got := q.pop().value; got != model[0] {
				t.Fatalf("popped %d, want %d", got, model[0])
			} else {
				model = model[1:]
			}
			if q.n != len(model) {
				t.Fatalf("%d queued, want %d", q.n, len(model))
			}
		}
	})
}

// TestBefore: the order of fence values goes round.
func TestBefore(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{{0, 1, true}, {1, 1, false}, {1, 0, false}, {math.MaxUint32, 0, true}, {0, math.MaxUint32, false}, {0, 1 << 30, true}, {5, 5 + 1<<31 - 1, true}} {
		if got := before(c.a, c.b); got != c.want {
			t.Errorf("%#x before %#x: %v", c.a, c.b, got)
		}
	}
}

// TestGoroutine: goroutines that there are at the same time are told apart, wherever their
// stacks are.
func TestGoroutine(t *testing.T) {
	const n = 100
	seen := make(chan uintptr)
	end := make(chan struct{})
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			first := goroutine()
			grow(100)
			if again := goroutine(); again != first {
				t.Errorf("goroutine %#x is %#x with a larger stack", first, again)
			}
			seen <- first
			<-end
		})
	}
	different := map[uintptr]bool{0: true, goroutine(): true}
	for range n {
		different[<-seen] = true
	}
	close(end)
	all.Wait()
	if len(different) != n+2 {
		t.Errorf("%d of %d goroutines are told apart", len(different)-2, n)
	}
}

// grow needs a stack of so many kilobytes, which moves.
func grow(n int) byte {
	var local [1024]byte
	local[n] = 1
	if n > 0 {
		return local[n-1] + grow(n-1)
	}
	return local[0]
}
