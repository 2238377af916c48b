package rebalancer_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/rebalancer"
)

// The simulation's model: experts of Qwen1.5-MoE's size and number, in a few layers,
// all offloaded, of which a small batch's step uses some.
const (
	simLayers, simExperts = 8, 60
	simBytes              = 16 << 20
	simStep               = 20 * time.Millisecond
	simTick               = 100 * time.Millisecond
	simHalfLife           = 10 * time.Second
	simPhase              = 60 * time.Second
	simHost, simPeer      = 55e9, 317e9 // bytes per second
)

// zipf draws distinct experts of each layer; which of them are hot shifts.
type zipf struct {
	rng  *rand.Rand
	n    int
	sum  []float64 // of the weights of ranks
	rank [simLayers][]int
}

func newZipf(n int, exponent float64, seed uint64) *zipf {
	z := &zipf{n: n, rng: rand.New(rand.NewPCG(seed, 1))}
	total := 0.0
	for r := range simExperts {
		total += math.Pow(float64(r+1), -exponent)
		z.sum = append(z.sum, total)
	}
	for l := range z.rank {
		z.rank[l] = z.rng.Perm(simExperts)
	}
	return z
}

// shift makes the coldest half of the ranks the hottest.
func (z *zipf) shift() {
	for l := range z.rank {
		z.rank[l] = slices.Concat(z.rank[l][simExperts/2:], z.rank[l][:simExperts/2])
	}
}

func (z *zipf) draw(layer int) []int {
	var chosen []int
	for len(chosen) < z.n {
		r, _ := slices.BinarySearch(z.sum, z.rng.Float64()*z.sum[simExperts-1])
		if e := z.rank[layer][r]; !slices.Contains(chosen, e) {
			chosen = append(chosen, e)
		}
	}
	return chosen
}

// world is where experts are, in virtual time and without bytes.
type world struct {
	t     testing.TB
	bytes int64 // of an expert
	now   time.Duration
	uses  [][]int64
	homes [][]experts.Placed
	// capacity of each peer in experts; used of it.
	capacity, used []int
	// landing is when the copies under way land, in the order in which they were begun.
	landing []landing
	link    time.Duration // is busy until then
	moved   int
	rng     *rand.Rand
}

type landing struct {
	id experts.ID
	at time.Duration
}

func newWorld(t testing.TB, bytes int64, layers, n int, capacity ...int) *world {
	w := &world{t: t, bytes: bytes, capacity: capacity, used: make([]int, len(capacity)), rng: rand.New(rand.NewPCG(7, 7))}
	for range layers {
		w.uses = append(w.uses, make([]int64, n))
		w.homes = append(w.homes, slices.Repeat([]experts.Placed{{Tier: experts.Host}}, n))
	}
	return w
}

func (w *world) at(id experts.ID) *experts.Placed { return &w.homes[id.Layer][id.Expert] }

func (w *world) view() rebalancer.View {
	v := rebalancer.View{Uses: w.uses, Placed: w.homes, Moving: len(w.landing)}
	v.Host = experts.Link{From: device.Host, BytesPerSecond: simHost}
	for k, n := range w.capacity {
		v.Peers = append(v.Peers, rebalancer.Peer{
			Link: experts.Link{From: device.HBM(k + 1), BytesPerSecond: simPeer}, Free: n - w.used[k],
		})
	}
	return v
}

// promote begins a copy to one of the peers that have room.
func (w *world) promote(id experts.ID, to []int) {
	h := w.at(id)
	if h.Tier != experts.Host || h.Moving {
		w.t.Fatalf("%v: %v is %+v", w.now, id, *h)
	}
	to = slices.DeleteFunc(slices.Clone(to), func(k int) bool { return w.used[k] == w.capacity[k] })
	if len(to) == 0 {
		w.t.Fatalf("%v: no room for %v", w.now, id)
	}
	k := to[w.rng.IntN(len(to))]
	w.used[k]++
	h.Moving, h.Device = true, device.HBM(k+1)
	w.link = max(w.link, w.now) + time.Duration(float64(w.bytes)/simHost*float64(time.Second))
	w.landing = append(w.landing, landing{id, w.link})
	w.moved++
}

func (w *world) demote(id experts.ID) {
	h := w.at(id)
	if h.Tier != experts.Peer || h.Moving {
		w.t.Fatalf("%v: %v is %+v", w.now, id, *h)
	}
	i, _ := h.Device.GPU()
	w.used[i-1]--
	*h = experts.Placed{Tier: experts.Host}
}

func (w *world) carryOut(m rebalancer.Move) bool {
	if m.Kind == rebalancer.Replace {
		w.demote(m.Out)
		if w.at(m.In).Tier == experts.Peer {
			w.demote(m.In)
		}
	}
	w.promote(m.In, m.To)
	return true
}

// settle makes those that have landed available.
func (w *world) settle() {
	for len(w.landing) > 0 && w.landing[0].at <= w.now {
		h := w.at(w.landing[0].id)
		h.Tier, h.Moving = experts.Peer, false
		w.landing = w.landing[1:]
	}
}

// placement decides what moves in a simulated run. used is called for each use, in
// order, and whether the expert was found on a peer; tick comes between steps.
type placement interface {
	used(id experts.ID, hit bool)
	tick()
}

// ours is the core.
type ours struct {
	w     *world
	core  *rebalancer.Core
	limit float64 // bytes per second
}

func (ours) used(experts.ID, bool) {}

func (o ours) tick() {
	o.core.Step(o.w.view(), o.w.now, o.w.carryOut)
	if allowed := o.limit*o.w.now.Seconds() + max(o.limit/4, float64(o.w.bytes)); float64(o.w.moved)*float64(o.w.bytes) > allowed {
		o.w.t.Fatalf("%v: %d experts were moved, more than %.0f bytes", o.w.now, o.w.moved, allowed)
	}
}

// static is the core until memory is full.
type static struct {
	ours
	full *bool
}

func (s static) tick() {
	if !*s.full {
		s.ours.tick()
	}
	*s.full = slices.Equal(s.w.used, s.w.capacity)
}

// lru promotes what missed, in place of what was used longest ago, as far as the
// migration limit goes.
type lru struct {
	w      *world
	limit  float64 // bytes per second
	tokens float64
	at     time.Duration
	clock  int
	last   map[experts.ID]int
}

func (l *lru) tick() {}

func (l *lru) used(id experts.ID, hit bool) {
	l.clock++
	l.last[id] = l.clock
	l.tokens = min(l.tokens+l.limit*(l.w.now-l.at).Seconds(), max(l.limit/4, float64(l.w.bytes)))
	l.at = l.w.now
	if hit || l.w.at(id).Moving || l.tokens < float64(l.w.bytes) {
		return
	}
	to := slices.Repeat([]int{0}, len(l.w.capacity))
	for k := range to {
		to[k] = k
	}
	if slices.Equal(l.w.used, l.w.capacity) {
		oldest := experts.ID{Layer: -1}
		for layer, homes := range l.w.homes {
			for e, h := range homes {
				c := experts.ID{Layer: layer, Expert: e}
				if h.Tier == experts.Peer && !h.Moving && (oldest.Layer < 0 || l.last[c] < l.last[oldest]) {
					oldest = c
				}
			}
		}
		if oldest.Layer < 0 {
			return
		}
		l.w.demote(oldest)
	}
	l.tokens -= float64(l.w.bytes)
	l.w.promote(id, to)
}

// outcome of a run: hit rates by second, and what was moved.
type outcome struct {
	hits  []float64
	total float64 // hit rate of the whole run
	moved int     // experts
}

// before is the hit rate over the last seconds before second at.
func (o outcome) before(at int) float64 {
	const window = 20
	sum := 0.0
	for _, h := range o.hits[at-window : at] {
		sum += h
	}
	return sum / window
}

// recovered is after how many seconds behind second at the hit rate reaches the
// level again, over three seconds together so that chance does not decide.
func (o outcome) recovered(at int, level float64) (int, bool) {
	for i := at; i+3 <= len(o.hits); i++ {
		if (o.hits[i]+o.hits[i+1]+o.hits[i+2])/3 >= level {
			return i - at, true
		}
	}
	return 0, false
}

// simulate runs two phases, with a shift of the hot set between them.
func simulate(w *world, z *zipf, p placement) outcome {
	var o outcome
	hits, uses, allHits, all := 0, 0, 0, 0
	for phase := range 2 {
		if phase > 0 {
			z.shift()
		}
		for end := w.now + simPhase; w.now < end; {
			w.settle()
			for l := range simLayers {
				for _, e := range z.draw(l) {
					hit := w.homes[l][e].Tier == experts.Peer
					if hit {
						hits++
						allHits++
					}
					uses++
					all++
					w.uses[l][e]++
					p.used(experts.ID{Layer: l, Expert: e}, hit)
				}
			}
			w.now += simStep
			if w.now%simTick == 0 {
				p.tick()
			}
			if w.now%time.Second == 0 {
				o.hits = append(o.hits, float64(hits)/float64(uses))
				hits, uses = 0, 0
			}
		}
	}
	o.total, o.moved = float64(allHits)/float64(all), w.moved
	return o
}

// shiftCase is a model's use of experts, and what peers hold of them.
type shiftCase struct {
	chosen   int // of each layer, in a step
	exponent float64
	capacity []int
	limit    float64 // bytes per second
}

// shiftCases of every test run; the tag simulate adds others.
var shiftCases = []shiftCase{{2, 0.9, []int{60, 60}, 1e9}}

// TestShift: when the hot set shifts, the hit rate comes back in the time that moving
// it takes; placement that stays does not, and LRU moves more for less.
func TestShift(t *testing.T) {
	const shift = int(simPhase / time.Second)
	for _, c := range shiftCases {
		slots := 0
		for _, n := range c.capacity {
			slots += n
		}
		t.Run(fmt.Sprintf("chosen=%d/zipf=%.1f/slots=%d/limit=%.2fGB", c.chosen, c.exponent, slots, c.limit/1e9), func(t *testing.T) {
			t.Parallel()
			run := func(make func(w *world) placement) outcome {
				w := newWorld(t, simBytes, simLayers, simExperts, c.capacity...)
				return simulate(w, newZipf(c.chosen, c.exponent, 42), make(w))
			}
			core := func(w *world) ours {
				return ours{w, rebalancer.NewCore(rebalancer.CoreOptions{Bytes: simBytes, MigrationLimit: c.limit, HalfLife: simHalfLife}), c.limit}
			}
			o := run(func(w *world) placement { return core(w) })
			s := run(func(w *world) placement { return static{core(w), new(bool)} })
			l := run(func(w *world) placement { return &lru{w: w, limit: c.limit, last: map[experts.ID]int{}} })

			level := o.before(shift)
			bound := 1.5*float64(slots)*simBytes/c.limit + 2*simHalfLife.Seconds()
			took, ok := o.recovered(shift, 0.9*level)
			lruTook, lruOK := l.recovered(shift, 0.9*l.before(shift))
			t.Logf("%d of %d experts fit, %.2f GB/s: hit rate before the shift %.3f (static %.3f, LRU %.3f), in the second after it %.3f; back at 90 %% after %d s of %.0f allowed (LRU %d s, %v); at the end %.3f (static %.3f, LRU %.3f), whole run %.3f (static %.3f, LRU %.3f); moved %.1f GB (static %.1f, LRU %.1f)",
				slots, simLayers*simExperts, c.limit/1e9, level, s.before(shift), l.before(shift), o.hits[shift], took, bound, lruTook, lruOK,
				o.before(2*shift), s.before(2*shift), l.before(2*shift), o.total, s.total, l.total,
				float64(o.moved)*simBytes/1e9, float64(s.moved)*simBytes/1e9, float64(l.moved)*simBytes/1e9)
			switch {
			case o.hits[shift] > 0.7*level:
				t.Errorf("the shift does not shift: %.3f after %.3f", o.hits[shift], level)
			case !ok || float64(took) > bound:
				t.Errorf("ours is not back at 90 %% after %.0f s (%d, %v)", bound, took, ok)
			}
			if _, ok := s.recovered(shift, 0.9*s.before(shift)); ok {
				t.Error("static placement recovers: it is not static")
			}
			if o.moved >= l.moved {
				t.Errorf("ours moves %d experts, LRU %d", o.moved, l.moved)
			}
			if o.total < l.total {
				t.Errorf("ours has a hit rate of %.3f, LRU %.3f", o.total, l.total)
			}
		})
	}
}
