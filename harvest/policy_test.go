package harvest

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// at is a candidate in slab `slab` (0: new) on a GPU.
func at(gpu int, slab uint64, leftover int64, f func(*PeerState)) Candidate {
	c := Candidate{Peer: PeerState{Space: device.HBM(gpu), Borrowable: 1000}, Slab: slab, FreeExtent: leftover + 100, Leftover: leftover}
	if f != nil {
		f(&c.Peer)
	}
	return c
}

func path(rate float64, latency time.Duration, links int) func(*PeerState) {
	return func(p *PeerState) {
		p.Path = device.Path{BytesPerSecond: rate, Latency: latency, Links: make([]int, links)}
	}
}

// TestPolicies: what each takes, beside what best fit takes of the same.
func TestPolicies(t *testing.T) {
	bandwidth := func(now, mean float64) func(*PeerState) {
		return func(p *PeerState) { p.Reading.Bandwidth, p.Bandwidth = now, mean }
	}
	churn := func(c float64) func(*PeerState) { return func(p *PeerState) { p.Churn = c } }
	adjacent := at(2, 4, 500, nil)
	adjacent.Adjacent = true
	roomy := at(2, 0, 0, func(p *PeerState) { p.Borrowable = 2000 })
	for _, c := range []struct {
		name   string
		policy Policy
		from   []Candidate
		// want and fit are indices.
		want, fit int
	}{
		{"the tightest extent", BestFit{}, []Candidate{at(1, 1, 300, nil), at(2, 2, 20, nil), at(1, 3, 50, nil)}, 1, 1},
		{"no new slab where a extent fits", BestFit{}, []Candidate{at(1, 0, 0, nil), at(2, 2, 300, nil)}, 1, 1},
		{"beside its neighbor", BestFit{}, []Candidate{at(1, 1, 0, nil), adjacent}, 1, 1},
		{"a new slab where most is to spare", BestFit{}, []Candidate{at(1, 0, 0, nil), roomy}, 1, 1},
		{"the first of equals", BestFit{}, []Candidate{at(2, 3, 5, nil), at(1, 2, 5, nil), at(1, 1, 5, nil)}, 2, 2},
		{"the faster path, though it takes a new slab", Locality{}, []Candidate{at(1, 1, 0, path(50e9, 0, 2)), at(2, 0, 900, path(400e9, 0, 1))}, 1, 0},
		{"no limit is fastest", Locality{}, []Candidate{at(1, 1, 0, path(400e9, 0, 1)), at(2, 2, 900, path(0, 0, 1))}, 1, 0},
		{"the lower latency among equal rates", Locality{}, []Candidate{at(1, 1, 0, path(50e9, 9, 1)), at(2, 2, 900, path(50e9, 5, 2))}, 1, 0},
		{"fewer links among equals", Locality{}, []Candidate{at(1, 1, 0, path(50e9, 5, 3)), at(2, 2, 900, path(50e9, 5, 2))}, 1, 0},
		{"fit on the same path", Locality{}, []Candidate{at(1, 1, 9, path(50e9, 5, 1)), at(2, 2, 0, path(50e9, 5, 1))}, 1, 1},
		{"a peer that leaves its bandwidth alone", Interference{}, []Candidate{at(1, 1, 0, bandwidth(0.8, 0.8)), at(2, 2, 900, bandwidth(0.1, 0.1))}, 1, 0},
		{"a lull does not count", Interference{}, []Candidate{at(1, 1, 0, bandwidth(0, 0.7)), at(2, 2, 900, bandwidth(0.3, 0.1))}, 1, 0},
		{"fit where bandwidth is alike", Interference{}, []Candidate{at(1, 1, 0, bandwidth(0.18, 0.1)), at(2, 2, 900, bandwidth(0.11, 0.1))}, 0, 0},
		{"a peer with little churn", Stability{}, []Candidate{at(1, 1, 0, churn(0.5)), at(2, 2, 900, churn(0.02))}, 1, 0},
		{"fit where churn is alike", Stability{}, []Candidate{at(1, 1, 0, churn(0.03)), at(2, 2, 900, churn(0.02))}, 0, 0},
		{"fairness places by fit", NewFairness(FairnessOptions{Quota: 1000}), []Candidate{at(1, 1, 9, nil), at(2, 2, 0, nil)}, 1, 1},
	} {
		t.Run(c.policy.Name()+"/"+c.name, func(t *testing.T) {
			got, err := c.policy.Choose(Request{Bytes: 100}, c.from)
			fit, _ := BestFit{}.Choose(Request{Bytes: 100}, c.from)
			if err != nil || got != c.want || fit != c.fit {
				t.Errorf("takes %d, %v, and best fit %d; want %d and %d", got, err, fit, c.want, c.fit)
			}
			// The order of the candidates decides nothing.
			slices.Reverse(c.from)
			if got, _ := c.policy.Choose(Request{Bytes: 100}, c.from); got != len(c.from)-1-c.want {
				t.Errorf("reversed: takes %d, want %d", got, len(c.from)-1-c.want)
			}
		})
	}
}

func TestFairness(t *testing.T) {
	from := []Candidate{at(1, 0, 0, nil)}
	ask := func(p Policy, client string, held, bytes int64, now time.Duration) error {
		r := Request{Bytes: bytes, Hints: Hints{Client: client}, Held: held, Clients: 4, Total: 4000, Now: now}
		if _, err := (BestFit{}).Choose(r, from); err != nil {
			t.Fatalf("best fit refuses: %v", err)
		}
		_, err := p.Choose(r, from)
		if err == nil {
			p.Granted(r)
		}
		return err
	}
	for _, c := range []struct {
		name        string
		o           FairnessOptions
		client      string
		held, bytes int64
		want        error
	}{
		{"an equal share", FairnessOptions{}, "a", 900, 100, nil},
		{"more than an equal share", FairnessOptions{}, "a", 901, 100, ErrQuota},
		{"a quota for all", FairnessOptions{Quota: 500}, "a", 450, 51, ErrQuota},
		{"a quota for one", FairnessOptions{Quota: 500, Quotas: map[string]int64{"a": 600}}, "a", 450, 51, nil},
		{"nothing for one", FairnessOptions{Quotas: map[string]int64{"a": 0}}, "a", 0, 1, ErrQuota},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := ask(NewFairness(c.o), c.client, c.held, c.bytes, 0); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
	p := NewFairness(FairnessOptions{Quota: 1 << 40, Rate: 100, Burst: 150})
	for i, c := range []struct {
		client string
		bytes  int64
		now    time.Duration
		want   error
	}{
		{"a", 100, 0, nil},
		{"a", 100, 0, ErrRate},
		{"b", 100, 0, nil},
		{"a", 50, 0, nil},
		{"a", 50, 400 * time.Millisecond, ErrRate},
		{"a", 50, 500 * time.Millisecond, nil},
		// After a long pause there is one burst, and a request beyond it makes debts.
		{"a", 400, time.Minute, nil},
		{"a", 1, 62 * time.Second, ErrRate},
		{"a", 1, 62510 * time.Millisecond, nil},
	} {
		if err := ask(p, c.client, 0, c.bytes, c.now); !errors.Is(err, c.want) {
			t.Errorf("request %d: %v, want %v", i, err, c.want)
		}
	}
}

func TestEvacuate(t *testing.T) {
	busy := PeerState{Bandwidth: 0.9, Churn: 3}
	for _, c := range []struct {
		p    Policy
		want bool
	}{
		{BestFit{}, false},
		{Locality{}, false},
		{NewFairness(FairnessOptions{}), false},
		{Interference{}, false},
		{Interference{EvacuateAt: 0.9}, true},
		{Interference{EvacuateAt: 0.95}, false},
		{Stability{}, false},
		{Stability{EvacuateAt: 2}, true},
		{Stability{EvacuateAt: 4}, false},
	} {
		if got := c.p.Evacuate(busy); got != c.want {
			t.Errorf("%s %+v leaves: %t", c.p.Name(), c.p, got)
		}
	}
}

func TestNewPolicy(t *testing.T) {
	for _, name := range []string{"best-fit", "locality", "fairness", "interference", "stability"} {
		if p, err := NewPolicy(name, PolicyOptions{}); err != nil || p.Name() != name {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	if _, err := NewPolicy("worst-fit", PolicyOptions{}); err == nil || !strings.Contains(err.Error(), "best-fit, fairness, interference, locality") {
		t.Errorf("%v does not say what there is", err)
	}
}

func TestVictims(t *testing.T) {
	const a, b = device.Space(2), device.Space(3)
	slabs := []SlabState{
		{ID: 1, Peer: a, Bytes: 100, Used: 100, Cost: 50 * time.Millisecond},
		{ID: 2, Peer: a, Bytes: 100, Used: 100, Cost: 10 * time.Millisecond},
		{ID: 3, Peer: a, Bytes: 100, Used: 100, Cost: 10 * time.Millisecond, References: 45},
		{ID: 4, Peer: a, Bytes: 400, Used: 10, Cost: 80 * time.Millisecond},
		{ID: 5, Peer: b, Bytes: 100, Used: 40},
		{ID: 6, Peer: b, Bytes: 100, Used: 30},
	}
	for _, c := range []struct {
		name  string
		peers []PeerNeed
		want  []Victim
	}{
		{"enough is free", []PeerNeed{{Space: a, Free: 50, Headroom: 50}}, nil},
		{"the cheapest", []PeerNeed{{Space: a, Headroom: 100}}, []Victim{{2, ReasonPressure}}},
		// 4 costs 0.2 ms a byte, 2 costs 0.1, 1 costs 0.5, 3 costs 0.55 with its readers.
		{"cheapest first, by the byte", []PeerNeed{{Space: a, Headroom: 500}}, []Victim{{2, ReasonPressure}, {4, ReasonPressure}}},
		{"none that can be spared", []PeerNeed{{Space: a, Headroom: 400}}, []Victim{{4, ReasonPressure}}},
		{"readers count", []PeerNeed{{Space: a, Headroom: 600}}, []Victim{{2, ReasonPressure}, {4, ReasonPressure}, {1, ReasonPressure}}},
		{"what is coming counts", []PeerNeed{{Space: a, Headroom: 100, Draining: 100}}, nil},
		{"others took more than there is", []PeerNeed{{Space: a, Free: -350, Headroom: 50}}, []Victim{{4, ReasonPressure}}},
		{"all there is", []PeerNeed{{Space: b, Headroom: 1000}}, []Victim{{6, ReasonPressure}, {5, ReasonPressure}}},
		{"each peer for itself", []PeerNeed{{Space: a, Free: 1000, Headroom: 100}, {Space: b, Headroom: 100}}, []Victim{{6, ReasonPressure}}},
		{"sick, with all there is free", []PeerNeed{{Space: b, Free: 1000, Unhealthy: true, Evacuate: true}}, []Victim{{5, ReasonUnhealthy}, {6, ReasonUnhealthy}}},
		{"others have less than their share", []PeerNeed{{Space: b, Free: 1000, AboveShare: 90}}, []Victim{{6, ReasonPolicy}}},
		{"pressure and shares", []PeerNeed{{Space: b, Headroom: 150, AboveShare: 90}}, []Victim{{6, ReasonPressure}, {5, ReasonPressure}}},
		{"the policy leaves", []PeerNeed{{Space: b, Free: 1000, Evacuate: true}}, []Victim{{5, ReasonPolicy}, {6, ReasonPolicy}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Victims(c.peers, slabs); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestCheapest: a small need costs a small slab where that is cheaper than a part of a large
// one, and the sum is never far from the best possible.
func TestCheapest(t *testing.T) {
	const large, small = 4, 1
	slabs := []SlabState{
		{ID: 1, Bytes: large, Cost: 20 * time.Millisecond},
		{ID: 2, Bytes: large, Cost: 40 * time.Millisecond},
		{ID: 3, Bytes: small, Cost: 10 * time.Millisecond},
		{ID: 4, Bytes: small, Cost: 11 * time.Millisecond},
	}
	for need, want := range map[int64][]uint64{0: nil, 1: {3}, 2: {1}, 4: {1}, 5: {1, 3}, 6: {1, 3, 4}, 8: {1, 2}, 9: {1, 2, 3}, 99: {1, 2, 3, 4}} {
		var got []uint64
		for _, s := range Cheapest(slabs, need) {
			got = append(got, s.ID)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("need %d: slabs %v, want %v", need, got, want)
		}
	}
	// Slabs that nobody misses: as few bytes as possible.
	for i := range slabs {
		slabs[i].Cost = 0
	}
	if got := Cheapest(slabs, 1); len(got) != 1 || got[0].Bytes != small {
		t.Errorf("1 byte of slabs without a cost: %v", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		var all []SlabState
		for i := range rapid.IntRange(1, 8).Draw(t, "slabs") {
			all = append(all, SlabState{
				ID: uint64(i + 1), Bytes: rapid.SampledFrom([]int64{1, 1, 4, 4, 4, 7}).Draw(t, "bytes"),
				Cost: time.Duration(rapid.IntRange(0, 9).Draw(t, "cost")) * time.Millisecond,
			})
		}
		of := func(slabs []SlabState) (t total) {
			for _, s := range slabs {
				t = t.add(s)
			}
			return t
		}
		need := rapid.Int64Range(1, of(all).bytes).Draw(t, "need")
		got := Cheapest(all, need)
		sum := of(got)
		for _, s := range got {
			if sum.bytes < need || sum.bytes-s.Bytes >= need {
				t.Fatalf("need %d of %v: %v", need, all, got)
			}
		}
		best := time.Duration(math.MaxInt64)
		for set := range 1 << len(all) {
			var some []SlabState
			for i, s := range all {
				if set>>i&1 == 1 {
					some = append(some, s)
				}
			}
			if sum := of(some); sum.bytes >= need {
				best = min(best, sum.cost)
			}
		}
		if sum.cost > 2*best {
			t.Fatalf("need %d of %v: %v costs %v, the best %v", need, all, got, sum.cost, best)
		}
	})
}

func TestAverages(t *testing.T) {
	var a average
	a.add(1, 0, time.Minute)
	a.add(0, time.Minute, time.Minute)
	if a.value != 0.5 {
		t.Errorf("a half-life after: %g", a.value)
	}
	// A tenth of the memory changes hands every six seconds: the whole in a minute.
	var c churn
	rate, level := 0.0, int64(0)
	for i := range 1000 {
		level = 100 - level
		rate = c.add(level, 1000, time.Duration(i)*6*time.Second, time.Minute)
	}
	if rate < 0.95 || rate > 1.05 {
		t.Errorf("churn %g per minute, want about 1", rate)
	}
	if rate = c.add(level, 1000, 2*time.Hour, time.Minute); rate > 0.01 {
		t.Errorf("churn %g after a long calm", rate)
	}
}
