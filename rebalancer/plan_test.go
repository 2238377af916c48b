package rebalancer_test

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/rebalancer"
)

const planBytes = 100 << 20

// situation reads layers of experts, each written as place:rate: L is resident, G in lent memory
// of the GPU, H the host, a digit a peer, and * stands behind those that move.
func situation(t *testing.T, layers string) rebalancer.Stats {
	s := rebalancer.Stats{Bytes: planBytes}
	for _, layer := range strings.Split(strings.TrimSpace(layers), "\n") {
		var homes []experts.Placed
		var rates []float64
		for _, f := range strings.Fields(layer) {
			place, rate, _ := strings.Cut(f, ":")
			h := experts.Placed{Tier: experts.Host}
			place, h.Moving = strings.CutSuffix(place, "*")
			switch place {
			case "L":
				h.Tier = experts.Resident
			case "G":
				h.Tier, h.Lent = experts.Resident, true
			case "H":
			default:
				n, err := strconv.Atoi(place)
				if err != nil {
					t.Fatal(err)
				}
				h.Tier, h.Device = experts.Peer, device.HBM(n)
			}
			r, err := strconv.ParseFloat(rate, 64)
			if err != nil {
				t.Fatal(err)
			}
			homes, rates = append(homes, h), append(rates, r)
		}
		s.Placed, s.Rates = append(s.Placed, homes), append(s.Rates, rates)
	}
	return s
}

func peer(gpu int, gigabytes float64, free int) rebalancer.Peer {
	return rebalancer.Peer{Link: experts.Link{From: device.HBM(gpu), BytesPerSecond: gigabytes * 1e9}, Free: free}
}

func capacity(host float64, peers ...rebalancer.Peer) rebalancer.Capacity {
	return rebalancer.Capacity{Host: experts.Link{From: device.Host, BytesPerSecond: host * 1e9}, Peers: peers}
}

// lending is c with free places in lent memory of the GPU.
func lending(places int, c rebalancer.Capacity) rebalancer.Capacity {
	c.Places = places
	return c
}

// filling is c with its free places filled.
func filling(c rebalancer.Capacity) rebalancer.Capacity {
	c.FillPlaces = true
	return c
}

// TestPlanBesideDeadPeer: a peer that lends nothing, or is in back-off after a refusal, does
// not keep experts from being replaced on the other one.
func TestPlanBesideDeadPeer(t *testing.T) {
	s := situation(t, "1:1 1:1 1:1 1:1 H:100 H:100 H:100 H:100")
	s.SingleUse = 0.1
	kinds := func(what string, now time.Duration, peers ...rebalancer.Peer) {
		t.Helper()
		moves := rebalancer.Plan(s, capacity(55, peers...), rebalancer.Tuning{}, now)
		for _, m := range moves {
			if m.Kind != rebalancer.Replace || len(m.To) != 1 && m.To[0] != 0 {
				t.Errorf("%s: %v", what, m)
			}
		}
		if len(moves) != 4 {
			t.Errorf("%s: %d moves, want 4", what, len(moves))
		}
	}
	kinds("alone", 0, peer(1, 395, 0))
	kinds("beside one that lends nothing", 0, peer(1, 395, 0), peer(2, 395, 0))
	refused := peer(2, 395, 40)
	refused.NotBefore = time.Second
	kinds("beside one that refused", time.Millisecond, peer(1, 395, 0), refused)
}

func TestPlan(t *testing.T) {
	refusing := peer(1, 300, 4)
	refusing.NotBefore = time.Minute + 1
	for _, c := range []struct {
		name     string
		layers   string
		capacity rebalancer.Capacity
		tuning   rebalancer.Tuning
		one      float64
		adaptive bool
		want     string
	}{
		{name: "no peers", layers: "H:5 H:1", capacity: capacity(50)},
		{
			name: "the hottest first, and none that is not used", layers: "H:1 H:5 H:0 L:9\nH:0 H:3 L:9 L:9",
			capacity: capacity(50, peer(1, 300, 9)),
			want:     "promote 0/1 to [0], promote 1/1 to [0], promote 0/0 to [0]",
		},
		{
			name: "as many as fit", layers: "H:1 H:5\nH:2 H:3",
			capacity: capacity(50, peer(1, 300, 2)),
			want:     "promote 0/1 to [0], promote 1/1 to [0]",
		},
		{
			name: "peers that are alike are harvest's to choose from", layers: "H:1 H:5\nH:2 H:3",
			capacity: capacity(50, peer(1, 300, 1), peer(2, 310, 1)),
			want:     "promote 0/1 to [0 1], promote 1/1 to [0 1]",
		},
		{
			name: "the hottest to the fastest peer", layers: "H:1 H:5\nH:2 H:3",
			capacity: capacity(50, peer(1, 100, 2), peer(2, 300, 1)),
			want:     "promote 0/1 to [1], promote 1/1 to [0], promote 1/0 to [0]",
		},
		{
			name: "none to a peer slower than the host", layers: "H:5",
			capacity: capacity(50, peer(1, 40, 2)),
		},
		{
			name: "a peer whose rate nobody knows is faster", layers: "H:5",
			capacity: capacity(0, peer(1, 0, 2)),
			want:     "promote 0/0 to [0]",
		},
		{
			name: "before any use all count the same, and layers share evenly", layers: "H:0 H:0 H:0 H:0\nH:0 H:0 L:0 L:0\n1:0 H:0 H:0 H:0",
			capacity: capacity(50, peer(1, 300, 6)),
			want:     "promote 0/0 to [0], promote 0/1 to [0], promote 1/0 to [0], promote 2/1 to [0], promote 0/2 to [0], promote 2/2 to [0]",
		},
		{
			name: "whole layers: the same with rates that differ by the step under way", layers: "H:50.1 H:50.1\nH:50 H:50\n1:50 H:50",
			capacity: capacity(50, peer(1, 300, 3)), one: 0.07,
			want: "promote 0/0 to [0], promote 1/0 to [0], promote 0/1 to [0]",
		},
		{
			name: "what moves is left alone", layers: "H*:5 H:1 1*:0",
			capacity: capacity(50, peer(1, 300, 0)),
		},
		{
			name: "what moves counts as its layer's", layers: "H*:5 H:5\nH:5 H:5",
			capacity: capacity(50, peer(1, 300, 1)),
			want:     "promote 1/0 to [0]",
		},
		{
			name: "the coldest goes for the hottest", layers: "H:5 1:3 1:1\nH:2 1:4 1:2",
			capacity: capacity(50, peer(1, 300, 0)),
			want:     "replace 0/0 for 0/2 to [0]",
		},
		{
			name: "as often as it pays", layers: "H:5 1:3 1:1\nH:4 1:4 1:2",
			capacity: capacity(50, peer(1, 300, 0)),
			want:     "replace 0/0 for 0/2 to [0], replace 1/0 for 1/2 to [0]",
		},
		{
			name: "hysteresis", layers: "H:1.2 1:1",
			capacity: capacity(50, peer(1, 300, 0)),
		},
		{
			name: "hysteresis that is set", layers: "H:1.2 1:1",
			capacity: capacity(50, peer(1, 300, 0)), tuning: rebalancer.Tuning{Hysteresis: 1.1},
			want: "replace 0/0 for 0/1 to [0]",
		},
		{
			name: "the copy is not earned back", layers: "H:0.11 1:0",
			capacity: capacity(50, peer(1, 300, 0)),
		},
		{
			name: "the copy is earned back in the time that is given", layers: "H:0.11 1:0",
			capacity: capacity(50, peer(1, 300, 0)), tuning: rebalancer.Tuning{Horizon: 20 * time.Second},
			want: "replace 0/0 for 0/1 to [0]",
		},
		{
			name: "chance", layers: "H:0.5 1:0.1",
			capacity: capacity(50, peer(1, 300, 0)), one: 0.2,
		},
		{
			name: "chance is let decide", layers: "H:0.5 1:0.1",
			capacity: capacity(50, peer(1, 300, 0)), one: 0.2, tuning: rebalancer.Tuning{Deviations: -1},
			want: "replace 0/0 for 0/1 to [0]",
		},
		{
			name: "to the faster peer where there is room", layers: "1:5 1:0.01",
			capacity: capacity(50, peer(1, 100, 0), peer(2, 300, 3)),
			want:     "replace 0/0 for 0/0 to [1]",
		},
		{
			name: "in place of a cold one on the faster peer", layers: "1:5 2:0.1",
			capacity: capacity(50, peer(1, 100, 0), peer(2, 300, 0)),
			want:     "replace 0/0 for 0/1 to [1]",
		},
		{
			name: "a peer that refuses neither gets nor gives", layers: "H:9 1:0 H:9",
			capacity: capacity(50, refusing),
		},
		{
			name: "another like it does not", layers: "H:9 1:0 2:0",
			capacity: capacity(50, refusing, peer(2, 300, 0)),
			want:     "replace 0/0 for 0/2 to [1]",
		},
		{
			name: "copies on a peer that is given up stay out of it", layers: "H:9 3:1",
			capacity: capacity(50, peer(1, 300, 0)),
		},
		{
			name: "resident ones are swapped within their layer", layers: "L:1 H:5 H:2\nL:3 H:3.5 H:0",
			capacity: capacity(50), adaptive: true,
			want: "swap 0/1 for 0/0",
		},
		{
			name: "swaps come before copies of less worth", layers: "L:1 1:9 H:2 H:3",
			capacity: capacity(50, peer(1, 300, 1)), adaptive: true,
			want: "swap 0/3 for 0/0, promote 0/2 to [0]",
		},
		{name: "resident ones stay without dynamic residency", layers: "L:1 H:5", capacity: capacity(50)},
		{
			name: "free lent memory goes to the hottest that pay for their copies", layers: "H:5 H:0.01 L:9\nH:7 1:6 L:9",
			capacity: lending(9, capacity(50, peer(1, 300, 0))),
			want:     "make resident 1/0, make resident 0/0, make resident 1/1",
		},
		{
			name: "and, where it is to be filled, to the others, of each layer as many", layers: "H:5 H:0.01 H*:0 L:9\nH:0 1:0 H:0 L:9",
			capacity: filling(lending(4, capacity(50, peer(1, 300, 0)))),
			want:     "make resident 0/0, make resident 0/1, make resident 1/0, make resident 1/1",
		},
		{
			name: "before copies on peers", layers: "H:5 H:4",
			capacity: lending(1, capacity(50, peer(1, 300, 1))),
			want:     "make resident 0/0, promote 0/1 to [0]",
		},
		{
			name: "whole layers share lent memory evenly", layers: "H:50 H:50 L:50\nH:50 H:50 H:50\nG:50 H:50 H:50",
			capacity: lending(3, capacity(50)), one: 0.07,
			want: "make resident 1/0, make resident 0/0, make resident 1/1",
		},
		{
			name: "the coldest leaves lent memory, of any layer", layers: "G:5 G:1 H:2\nG*:0 H:8 H:1.2 L:0",
			capacity: capacity(50),
			want:     "make resident 1/1 for 0/1",
		},
		{
			name: "those in lent memory are not swapped", layers: "G:1 H:1.1 H:5 L:4", capacity: capacity(50), adaptive: true,
			want: "make resident 0/2 for 0/0",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := situation(t, c.layers)
			s.SingleUse, s.Dynamic = c.one, c.adaptive
			moves := rebalancer.Plan(s, c.capacity, c.tuning, time.Minute)
			var got []string
			for _, m := range moves {
				got = append(got, m.String())
			}
			if strings.Join(got, ", ") != c.want {
				t.Errorf("%s\nwant %s", strings.Join(got, ", "), c.want)
			}
		})
	}
}

// TestGain: the benefit is in seconds saved per second and byte.
func TestGain(t *testing.T) {
	s := situation(t, "H:5 1:1 H:2")
	moves := rebalancer.Plan(s, capacity(50, peer(1, 200, 1)), rebalancer.Tuning{}, 0)
	if len(moves) != 2 {
		t.Fatal(moves)
	}
	saved := 1/50e9 - 1/200e9 // seconds per byte of one use
	for i, want := range []float64{5 * saved, (2 - 1) * saved} {
		if math.Abs(moves[i].Gain-want) > 1e-9*want {
			t.Errorf("%v: gain %g, want %g", moves[i], moves[i].Gain, want)
		}
	}
}

// random draws a situation in which everything fits.
func random(t *rapid.T) (rebalancer.Stats, rebalancer.Capacity) {
	s := rebalancer.Stats{Bytes: planBytes, Dynamic: rapid.Bool().Draw(t, "adaptive"), SingleUse: rapid.SampledFrom([]float64{0, 0.1}).Draw(t, "one")}
	c := capacity(rapid.SampledFrom([]float64{0, 50}).Draw(t, "host"))
	for i := range rapid.IntRange(0, 3).Draw(t, "peers") {
		c.Peers = append(c.Peers, peer(i+1, rapid.SampledFrom([]float64{0, 25, 100, 110, 300}).Draw(t, "rate"), rapid.IntRange(0, 6).Draw(t, "free")))
	}
	c.Places, c.FillPlaces = rapid.IntRange(0, 3).Draw(t, "places"), rapid.Bool().Draw(t, "fill")
	layers, n := rapid.IntRange(1, 4).Draw(t, "layers"), rapid.IntRange(1, 8).Draw(t, "experts")
	rate := rapid.SampledFrom([]float64{0, 0, 0.1, 0.5, 1, 1.05, 2, 10, 50})
	for range layers {
		var homes []experts.Placed
		for range n {
			h := experts.Placed{Tier: rapid.SampledFrom([]experts.Tier{experts.Resident, experts.Peer, experts.Host, experts.Host}).Draw(t, "tier")}
			if h.Tier == experts.Peer {
				if len(c.Peers) == 0 {
					h.Tier = experts.Host
				} else {
					h.Device = rapid.SampledFrom(c.Peers).Draw(t, "on").From
				}
			}
			h.Lent = h.Tier == experts.Resident && rapid.Bool().Draw(t, "lent")
			h.Moving = rapid.IntRange(0, 9).Draw(t, "moving") == 0
			homes = append(homes, h)
		}
		s.Placed = append(s.Placed, homes)
		s.Rates = append(s.Rates, rapid.SliceOfN(rate, n, n).Draw(t, "rates"))
	}
	return s, c
}

// seconds of fetches per second in a situation.
func seconds(s rebalancer.Stats, c rebalancer.Capacity) float64 {
	sum := 0.0
	for l, homes := range s.Placed {
		for e, h := range homes {
			sum += s.Rates[l][e] * float64(s.Bytes) * perByte(c, h)
		}
	}
	return sum
}

// perByte is what reading a byte from there costs, in seconds; rates that are not
// known are nominal ones.
func perByte(c rebalancer.Capacity, h experts.Placed) float64 {
	host := c.Host.BytesPerSecond
	if host == 0 {
		host = 55e9
	}
	switch h.Tier {
	case experts.Resident:
		return 0
	case experts.Peer:
		for _, p := range c.Peers {
			if p.From == h.Device {
				if p.BytesPerSecond == 0 {
					return 1 / (7 * host)
				}
				return 1 / p.BytesPerSecond
			}
		}
	}
	return 1 / host
}

// startMove applies moves as store and harvest would, the peer among those named being
// anyone's choice, and fails where they do not fit.
func carryOut(t *rapid.T, s rebalancer.Stats, c *rebalancer.Capacity, moves []rebalancer.Move) {
	at := func(id experts.ID) *experts.Placed { return &s.Placed[id.Layer][id.Expert] }
	demote := func(id experts.ID) {
		h := at(id)
		i := slices.IndexFunc(c.Peers, func(p rebalancer.Peer) bool { return h.Tier == experts.Peer && p.From == h.Device })
		if i < 0 || h.Moving {
			t.Fatalf("%v gives way from %+v", id, *h)
		}
		c.Peers[i].Free++
		*h = experts.Placed{Tier: experts.Host}
	}
	for _, m := range moves {
		if m.Kind == rebalancer.Swap {
			in, out := at(m.In), at(m.Out)
			if in.Tier == experts.Resident || in.Moving || out.Tier != experts.Resident || out.Moving || m.In.Layer != m.Out.Layer {
				t.Fatalf("%v: %+v for %+v", m, *in, *out)
			}
			if in.Tier == experts.Peer {
				demote(m.In)
			}
			if out.Lent {
				t.Fatalf("%v: %+v is in lent memory", m, *out)
			}
			in.Tier, out.Tier = experts.Resident, experts.Host
			continue
		}
		if m.Kind == rebalancer.MakeResident {
			if in, out := at(m.In), at(m.Out); m.In == m.Out {
				c.Places--
			} else {
				if !out.Lent || out.Moving {
					t.Fatalf("%v: %+v leaves", m, *out)
				}
				if *out = (experts.Placed{Tier: experts.Host}); in.Moving {
					t.Fatalf("%v: %+v moves", m, *in)
				}
			}
			in := at(m.In)
			if in.Tier == experts.Peer {
				demote(m.In)
			}
			if c.Places < 0 || in.Tier != experts.Host || in.Moving {
				t.Fatalf("%v of %+v, with %d places left", m, *in, c.Places)
			}
			in.Tier, in.Lent = experts.Resident, true
			continue
		}
		if m.Kind == rebalancer.Replace {
			demote(m.Out)
			if at(m.In).Tier == experts.Peer {
				demote(m.In)
			}
		}
		h := at(m.In)
		to := slices.DeleteFunc(slices.Clone(m.To), func(k int) bool { return c.Peers[k].Free == 0 })
		if h.Tier != experts.Host || h.Moving || len(to) == 0 {
			t.Fatalf("%v: it is %+v, room on %v of %+v", m, *h, to, c.Peers)
		}
		k := rapid.SampledFrom(to).Draw(t, "chosen")
		c.Peers[k].Free--
		h.Tier, h.Device = experts.Peer, c.Peers[k].From
	}
}

// TestPlans: whatever the situation, plans fit, each saves time, and they come to an
// end.
func TestPlans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, c := random(t)
		for round := 0; ; round++ {
			before, now := seconds(s, c), time.Duration(round)
			moves := rebalancer.Plan(s, c, rebalancer.Tuning{}, now)
			if again := rebalancer.Plan(s, c, rebalancer.Tuning{}, now); fmt.Sprint(again) != fmt.Sprint(moves) {
				t.Fatalf("one situation, two plans:\n%v\n%v", moves, again)
			}
			if len(moves) == 0 {
				return
			}
			if round > 20 {
				t.Fatalf("there is no end of moves: %v", moves)
			}
			// Any number from the front may be carried out.
			moves = moves[:rapid.IntRange(1, len(moves)).Draw(t, "begun")]
			// Links that are nearly alike count as equal, so what is read from a peer, and what gives
			// way there, may have cost less than the plan says.
			slack := 0.0
			for _, m := range moves {
				ids := []experts.ID{m.In}
				if m.Out != m.In && m.Kind != rebalancer.Promote {
					ids = append(ids, m.Out)
				}
				for _, id := range ids {
					if h := s.Placed[id.Layer][id.Expert]; h.Tier == experts.Peer {
						slack += (rebalancer.SimilarLinks - 1) * s.Rates[id.Layer][id.Expert] * float64(s.Bytes) * perByte(c, h)
					}
				}
			}
			carryOut(t, s, &c, moves)
			gain := 0.0
			for _, m := range moves {
				gain += m.Gain * float64(s.Bytes)
				if filled := c.FillPlaces && m.Kind == rebalancer.MakeResident && m.In == m.Out; m.Kind != rebalancer.Promote && !filled && m.Gain <= 0 {
					t.Fatalf("%v gains %g", m, m.Gain)
				}
			}
			if after := seconds(s, c); before-after < gain-slack-1e-12 {
				t.Fatalf("%v should save %g s/s, and saves %g, which is more than %g less", moves, gain, before-after, slack)
			}
		}
	})
}

func TestRates(t *testing.T) {
	const halfLife = 10 * time.Second
	r := rebalancer.NewRates(halfLife)
	uses := [][]int64{{0, 0}, {7, 0}}
	now := time.Duration(0)
	run := func(d time.Duration, perTick ...int64) {
		for end := now + d; now < end; {
			now += 100 * time.Millisecond
			uses[0][0] += perTick[0]
			uses[0][1] += perTick[1]
			r.Observe(uses, now)
		}
	}
	expect := func(what string, a, b float64) {
		t.Helper()
		got := r.PerSecond()
		if math.Abs(got[0][0]-a) > 0.05*a+1e-9 || math.Abs(got[0][1]-b) > 0.05*b+1e-9 || got[1][0] != 0 {
			t.Errorf("%s: %.3f, want %.3f and %.3f", what, got, a, b)
		}
	}
	r.Observe(uses, now)
	expect("nothing used", 0, 0)
	if r.SingleUse() != 0 {
		t.Errorf("one use counts %v before any", r.SingleUse())
	}
	run(time.Second, 1, 4)
	expect("from the beginning on", 10, 40)
	run(time.Minute, 1, 4)
	expect("steady", 10, 40)
	run(halfLife, 1, 4)
	if one := math.Ln2 / halfLife.Seconds(); math.Abs(r.SingleUse()-one) > 0.05*one {
		t.Errorf("one use counts %v, want %v", r.SingleUse(), one)
	}
	now += 10 * time.Hour
	r.Observe(uses, now)
	expect("a night in which nothing is used", 10, 40)
	run(halfLife/4, 8, 4)
	if got := r.PerSecond()[0][0]; got < 25 {
		t.Errorf("a quarter of a half-life after 10 became 80 it is taken for %.1f", got)
	}
	run(5*halfLife, 8, 4)
	expect("changed", 80, 40)
	uses[0][0] = 0 // the store was opened anew
	r.Observe(uses, now)
	expect("counted anew", 0, 0)
	run(time.Second, 2, 0)
	expect("anew", 20, 0)
}

// BenchmarkPlan is one tick's plan for as many experts as Qwen3-30B-A3B has, half of
// which lie on peers already.
func BenchmarkPlan(b *testing.B) {
	for _, free := range []int{0, 6144} {
		b.Run(fmt.Sprintf("free=%d", free), func(b *testing.B) {
			s := rebalancer.Stats{Bytes: 9 << 20, SingleUse: 0.07}
			for l := range 48 {
				homes, rates := make([]experts.Placed, 128), make([]float64, 128)
				for e := range homes {
					homes[e], rates[e] = experts.Placed{Tier: experts.Host}, 1/float64(1+(e*37+l)%128)
					if e%2 == 0 {
						homes[e] = experts.Placed{Tier: experts.Peer, Device: device.HBM(1)}
					}
				}
				s.Placed, s.Rates = append(s.Placed, homes), append(s.Rates, rates)
			}
			c := capacity(55, peer(1, 317, free))
			for b.Loop() {
				rebalancer.Plan(s, c, rebalancer.Tuning{}, 0)
			}
		})
	}
}

// TestDemand: what experts in host memory would be worth on peers that are full.
func TestDemand(t *testing.T) {
	const second = time.Second
	cost := func(rates ...float64) (sum time.Duration) {
		for _, r := range rates { // 100 MiB over 10 GB/s, and over 100
			sum += harvest.Cost(r, time.Duration(planBytes*(1/10e9-1/100e9)*float64(second)))
		}
		return sum
	}
	for _, c := range []struct {
		name  string
		uses  string // by expert: its place, and its uses per second
		peers []rebalancer.Peer
		limit float64 // bytes per second
		after time.Duration
		want  int
		cost  time.Duration
		on    []int
	}{
		{"the most used", "H:8 H:4 H:2 1:1 L:9", []rebalancer.Peer{peer(1, 100, 0)}, 8 * planBytes, 0, 2, cost(8, 4), []int{0}},
		{"without a limit", "H:8 H:4 H:2 1:1 L:9", []rebalancer.Peer{peer(1, 100, 0)}, -1, 0, 3, cost(8, 4, 2), []int{0}},
		{"what does not pay for its copy", "H:8 H:0 H:0.01 1:1", []rebalancer.Peer{peer(1, 100, 0)}, -1, 0, 1, cost(8), []int{0}},
		{"moving", "H:8 H*:4", []rebalancer.Peer{peer(1, 100, 0)}, -1, 0, 1, cost(8), []int{0}},
		{"room", "H:8 H:4", []rebalancer.Peer{peer(1, 100, 0), peer(2, 100, 1)}, -1, 0, 0, 0, nil},
		{"room on a slower peer", "H:8 H:4", []rebalancer.Peer{peer(1, 20, 3), peer(2, 100, 0)}, -1, 0, 2, cost(8, 4), []int{1}},
		{"only slower than the host", "H:8 H:4", []rebalancer.Peer{peer(1, 5, 0)}, -1, 0, 0, 0, nil},
		{"a pause", "H:8 H:4", []rebalancer.Peer{peer(1, 100, 0)}, -1, 11 * second, 0, 0, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := situation(t, c.uses)
			core := rebalancer.NewCore(rebalancer.CoreOptions{Bytes: planBytes, MigrationLimit: c.limit})
			v := rebalancer.View{Placed: s.Placed, Capacity: capacity(10, c.peers...), Uses: [][]int64{make([]int64, len(s.Rates[0]))}}
			never := func(rebalancer.Move) bool { return false }
			now := time.Duration(0)
			for range 1000 { // 100 s, in which the rates settle
				core.Step(v, now, never)
				now += second / 10
				for e, r := range s.Rates[0] {
					v.Uses[0][e] = int64(math.Round(r * now.Seconds()))
				}
			}
			core.Step(v, now+c.after, never)
			core.Step(v, now+2*c.after, never)
			d, on := core.Demand(v)
			if d.Objects != c.want || !slices.Equal(on, c.on) {
				t.Fatalf("%+v on %v, want %d on %v", d, on, c.want, c.on)
			}
			if diff := (d.Cost - c.cost).Abs(); diff > c.cost/20 {
				t.Errorf("costs %v, want %v", d.Cost, c.cost)
			}
			if c.want > 0 && (d.Bytes != planBytes || d.Client != experts.HarvestClient) {
				t.Errorf("%+v", d)
			}
		})
	}
}
