package experts

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestEstimate: measurements bring the assumed coefficients to the true ones, as far as they tell them.
func TestEstimate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	vary := func() [terms]float64 {
		n := 1 + r.IntN(12)
		return [terms]float64{1, float64(n), float64(r.IntN(3 * n))}
	}
	same := func() [terms]float64 { return [terms]float64{1, 4, 2} }
	for _, c := range []struct {
		what              string
		assumed, truth    [terms]float64
		quantities        func() [terms]float64
		noise, stragglers float64 // relative deviation; share of times that are 50 times as long
		known             bool    // each coefficient, not only the time
		off               float64
	}{
		{"as assumed", [terms]float64{1, 2, 3}, [terms]float64{1, 2, 3}, vary, 0, 0, true, 1e-9},
		{"faster", [terms]float64{100, 500, 90}, [terms]float64{50, 130, 8}, vary, 0, 0, true, 0.06},
		{"slower", [terms]float64{20, 30, 3}, [terms]float64{300, 400, 100}, vary, 0, 0, true, 0.04},
		{"noise", [terms]float64{100, 500, 90}, [terms]float64{200, 130, 30}, vary, 0.1, 0, false, 0.03},
		{"stragglers", [terms]float64{100, 150, 10}, [terms]float64{200, 130, 30}, vary, 0.05, 0.01, false, 0.06},
		{"always the same experts", [terms]float64{100, 500, 90}, [terms]float64{200, 130, 30}, same, 0, 0, false, 0.01},
		{"a term that the time does not have", [terms]float64{40, 18, 0}, [terms]float64{90, 20, 0}, vary, 0, 0, true, 0.04},
		{"no time for rows", [terms]float64{40, 18, 5}, [terms]float64{90, 20, 0}, vary, 0, 0, false, 0.02},
	} {
		var e estimate
		for range 2000 {
			x := c.quantities()
			seconds := sum(c.truth, x) * (1 + c.noise*r.NormFloat64())
			if r.Float64() < c.stragglers {
				seconds *= 50
			}
			e.add(c.assumed, x, seconds)
		}
		e.add(c.assumed, [terms]float64{1, 1, 1}, 0) // of a clock that did not advance: ignored
		got := e.coefficients(c.assumed)
		for i := range got {
			if got[i] < 0 || c.known && math.Abs(got[i]-c.truth[i]) > c.off*(c.truth[i]+1e-12) {
				t.Errorf("%s: estimated %v, want %v", c.what, got, c.truth)
			}
		}
		for range 20 {
			x := c.quantities()
			if a, b := sum(got, x), sum(c.truth, x); math.Abs(a-b) > c.off*b+1e-9 {
				t.Errorf("%s: %v takes %v, estimated %v", c.what, x, b, a)
			}
		}
	}
}

// hostTimes are a host's true times of a layer: of the CPU, and of the link in seconds and bytes per
// second. While both work, the CPU takes slowed times as long.
type hostTimes struct {
	cpu    CPUTime
	start  float64
	rate   float64
	slowed float64
	// readStart and readRate are of kernels that read over the link; 0: they cannot.
	readStart, readRate float64
}

func (h hostTimes) layer(list []candidate, d division) (cpu, link float64) {
	if on := computed(list, d); len(on) > 0 {
		cpu = sum(h.cpu.terms(), quantities(on))
	}
	copied, read := h.onLink(copiedBytes(list, d), readBytes(d))
	if link = max(copied, read); link > 0 {
		cpu *= h.slowed
	}
	return cpu, link
}

// onLink is when so many bytes have been copied, and read by kernels, which share the link's rate fairly.
func (h hostTimes) onLink(copies, reads float64) (copied, read float64) {
	now := 0.0
	for copies > 0 || reads > 0 {
		copying, reading := copies > 0 && now >= h.start, reads > 0 && now >= h.readStart
		next := math.Inf(1)
		if copies > 0 && !copying {
			next = h.start
		}
		if reads > 0 && !reading {
			next = min(next, h.readStart)
		}
		copyRate, readRate := h.rate, h.readRate
		if copying && reading {
			readRate = min(h.readRate, h.rate/2)
			copyRate = h.rate - readRate
		}
		if copying {
			next = min(next, now+copies/copyRate)
		}
		if reading {
			next = min(next, now+reads/readRate)
		}
		if copying {
			if copies -= (next - now) * copyRate; copies < 1 {
				copies, copied = 0, next
			}
		}
		if reading {
			if reads -= (next - now) * readRate; reads < 1 {
				reads, read = 0, next
			}
		}
		now = next
	}
	return copied, read
}

// copiedBytes is what is copied of a layer's candidates.
func copiedBytes(list []candidate, d division) float64 {
	n := len(list) - d.onCPU
	if d.first > 0 {
		n--
	}
	return float64(int64(n) * mixtralExpert.Size)
}

// readBytes is what kernels read of a divided expert.
func readBytes(d division) float64 {
	return float64(mixtralExpert.Size) * float64(d.first) / float64(mixtralExpert.Intermediate)
}

// divisions are all of so many experts.
func (h hostTimes) divisions(missing int) (all []division) {
	for n := range missing + 1 {
		all = append(all, division{onCPU: n})
		for first := kernels.TileColumns; h.readRate > 0 && n < missing && first < mixtralExpert.Intermediate; first += 16 * kernels.TileColumns {
			all = append(all, division{onCPU: n, first: first})
		}
	}
	return all
}

// play has a share divide a layer of the host, at the time now, and measure what then takes place.
func (h hostTimes) play(auto *CPUShare, list []candidate, now time.Duration, r *rand.Rand) (cpu, link float64) {
	noise := func(s float64) time.Duration {
		return time.Duration(s * (1 + 0.05*r.NormFloat64()) * float64(time.Second))
	}
	forCPU(list)
	d := auto.divide(&mixtralExpert, hostLink{bytesPerSecond: 50e9}, list, h.readRate > 0, now)
	cpu, link = h.layer(list, d)
	copies, reads := copiedBytes(list, d), readBytes(d)
	copied, read := h.onLink(copies, reads)
	auto.fetching(int64(copies))
	auto.Computed(&mixtralExpert, computed(list, d), noise(cpu))
	if copied > 0 {
		auto.Fetched(noise(copied))
	}
	auto.ReadInPlace(int64(reads), noise(read))
	return cpu, link
}

// best is the shortest time of a layer, of all divisions.
func (h hostTimes) best(list []candidate) float64 {
	best := math.Inf(1)
	for _, d := range h.divisions(len(list)) {
		best = min(best, max(h.layer(list, d)))
	}
	return best
}

// simulate lets shares divide layers of a host, and returns the seconds of the layers behind the
// first, with each share and with the best division of each layer; changed applies from the middle on.
func simulate(layers, first, missing int, before, after hostTimes, auto *CPUShare) (seconds map[string]float64) {
	r := rand.New(rand.NewPCG(3, 4))
	seconds = map[string]float64{}
	now := time.Duration(0)
	for i := range layers {
		h := before
		if i >= layers/2 {
			h = after
		}
		var list []candidate
		for range missing - missing/2 + r.IntN(missing/2*2+1) {
			list = append(list, candidate{expert: len(list), rows: 1 + r.IntN(2), left: mixtralExpert.Size})
		}
		cpu, link := h.play(auto, list, now, r)
		now += time.Second
		if i < first || i >= layers/2 && i < layers/2+first {
			continue
		}
		seconds["auto"] += max(cpu, link)
		seconds["best"] += h.best(list)
		for tenths := range 11 {
			seconds[fmt.Sprint("fraction ", float64(tenths)/10)] += max(h.layer(list, division{onCPU: int(math.Round(float64(tenths) / 10 * float64(len(list))))}))
		}
	}
	return seconds
}

// TestShareConverges: on hosts with other times than assumed, and that change, auto is at most 3 %
// slower than any fixed fraction, none and all included, and at most 5 % than the best division of each
// layer.
func TestShareConverges(t *testing.T) {
	racedetector.SkipSequential(t)
	x := float64(mixtralExpert.Size)
	slow := func(h hostTimes) hostTimes { h.cpu.Expert *= 4; return h }
	hosts := map[string]hostTimes{
		"as assumed":                 {CPUTime{50e-6, x / 90e9, 0.2e-3}, 40e-6, 50e9, 1, 0, 0},
		"a long start":               {CPUTime{5e-3, x / 120e9, 0.1e-3}, 40e-6, 50e9, 1, 0, 0},
		"a long start of the link":   {CPUTime{100e-6, x / 60e9, 0}, 6e-3, 55e9, 1, 0, 0},
		"a fast CPU":                 {CPUTime{20e-6, x / 400e9, 0}, 20e-6, 25e9, 1, 0, 0},
		"a slow CPU":                 {CPUTime{50e-6, x / 8e9, 1e-3}, 40e-6, 55e9, 1, 0, 0},
		"a very slow CPU":            {CPUTime{50e-6, x / 1e9, 1e-3}, 40e-6, 55e9, 1, 0, 0},
		"a common memory":            {CPUTime{50e-6, x / 110e9, 0.1e-3}, 40e-6, 50e9, 1.3, 0, 0},
		"kernels read":               {CPUTime{50e-6, x / 110e9, 0.2e-3}, 40e-6, 50e9, 1, 60e-6, 45e9},
		"kernels read slowly":        {CPUTime{50e-6, x / 110e9, 0.2e-3}, 40e-6, 50e9, 1, 200e-6, 12e9},
		"kernels read, slow CPU":     {CPUTime{50e-6, x / 8e9, 1e-3}, 40e-6, 55e9, 1, 60e-6, 50e9},
		"kernels read, fast CPU":     {CPUTime{50e-6, x / 200e9, 0.2e-3}, 40e-6, 50e9, 1, 60e-6, 45e9},
		"little is left to the CPU":  {CPUTime{90e-6, x / 149e9, 0}, 40e-6, 53e9, 1.45, 70e-6, 36e9},
		"kernels read common memory": {CPUTime{50e-6, x / 110e9, 0.1e-3}, 40e-6, 50e9, 1.3, 60e-6, 45e9},
	}
	for name, h := range hosts {
		for _, missing := range []int{1, 2, 4, 13} {
			for what, after := range map[string]hostTimes{"": h, ", then slower": slow(h)} {
				auto := NewCPUShare(AutoCPUShare, serverCPU)
				auto.Divide()
				seconds := simulate(6000, 1500, missing, h, after, auto)
				for other, s := range seconds {
					limit := 1.03
					if other == "best" {
						limit = 1.05
					}
					if seconds["auto"] > limit*s {
						t.Errorf("%s%s, about %d experts: auto takes %.3f s, %s %.3f s", name, what, missing, seconds["auto"], other, s)
					}
				}
			}
		}
	}
}

// converged lets layers of a host be divided that always miss as many experts, or one more or less, and
// returns how many times as long as the best division the last tenth of them takes; after is from layer 3,000
// on. Where kernels read, they and copies share the link.
func converged(r *rand.Rand, missing, spread int, before, after hostTimes) float64 {
	const layers, changed, counted = 40000, 3000, 36000
	auto := NewCPUShare(AutoCPUShare, serverCPU)
	auto.Divide()
	took, best, now := 0.0, 0.0, time.Duration(0)
	bests := map[int]float64{}
	for i := range layers {
		h := before
		if i >= changed {
			h = after
		}
		list := make([]candidate, max(1, missing-spread+r.IntN(2*spread+1)))
		for e := range list {
			list[e] = candidate{expert: e, rows: 1, left: mixtralExpert.Size}
		}
		cpu, link := h.play(auto, list, now, r)
		now += time.Second
		if i < counted {
			continue
		}
		n := len(list)
		if bests[n] == 0 {
			bests[n] = h.best(list)
		}
		took, best = took+max(cpu, link), best+bests[n]
	}
	return took / best
}

// TestDivisionConverges: where kernels can read, auto comes within 6 % of the best division of a layer (within
// 20 % while it forgets slow copies), also after reads, copies or the CPU have been slow for long, and where
// layers always miss as many experts.
func TestDivisionConverges(t *testing.T) {
	racedetector.SkipSequential(t)
	x := float64(mixtralExpert.Size)
	cpu := func(rate float64) CPUTime { return CPUTime{50e-6, x / rate, 0} }
	for _, c := range []struct {
		what          string
		before, after hostTimes
	}{
		{"steady", hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 45e9}, hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 45e9}},
		{"common memory", hostTimes{cpu(110e9), 40e-6, 50e9, 1.3, 60e-6, 45e9}, hostTimes{cpu(110e9), 40e-6, 50e9, 1.3, 60e-6, 45e9}},
		{"slow reads", hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 12e9}, hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 12e9}},
		{"reads become fast", hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 3e9}, hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 45e9}},
		{"reads become slow", hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 45e9}, hostTimes{cpu(110e9), 40e-6, 50e9, 1, 60e-6, 3e9}},
		{"the CPU becomes fast", hostTimes{cpu(20e9), 40e-6, 50e9, 1, 60e-6, 45e9}, hostTimes{cpu(200e9), 40e-6, 50e9, 1, 60e-6, 45e9}},
		{"the CPU becomes slow", hostTimes{cpu(200e9), 40e-6, 50e9, 1, 60e-6, 45e9}, hostTimes{cpu(20e9), 40e-6, 50e9, 1, 60e-6, 45e9}},
		{"copies start sooner", hostTimes{cpu(25e9), 8e-3, 50e9, 1, 60e-6, 12e9}, hostTimes{cpu(25e9), 40e-6, 50e9, 1, 60e-6, 12e9}},
	} {
		for _, missing := range []int{1, 2, 3, 4, 8, -4} {
			limit := 1.06
			if c.what == "copies start sooner" {
				limit = 1.2 // whole experts are copied in one of 256 layers, and as many such layers are remembered
			}
			r := rand.New(rand.NewPCG(5, 6))
			if times := converged(r, max(missing, -missing), max(0, -missing/2), c.before, c.after); times > limit {
				t.Errorf("%s, %d missing: %.2f times the best division", c.what, missing, times)
			}
		}
	}
}

// TestDivisionOfRandomHosts: on hosts with any times, in which the CPU takes up to three times as long beside
// the link, auto comes within 6 % of the best division of a layer.
func TestDivisionOfRandomHosts(t *testing.T) {
	racedetector.SkipSequential(t)
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 6))
		between := func(a, b float64) float64 { return a * math.Exp(r.Float64()*math.Log(b/a)) }
		rate := between(10e9, 60e9)
		h := hostTimes{
			CPUTime{between(10e-6, 2e-3), float64(mixtralExpert.Size) / between(5e9, 400e9), 0},
			between(10e-6, 1e-3), rate,
			1 + 2*r.Float64(), between(10e-6, 1e-3), rate * between(0.1, 1),
		}
		missing := 1 + r.IntN(8)
		if times := converged(r, missing, r.IntN(2), h, h); times > 1.06 {
			t.Errorf("seed %d, about %d missing: %.2f times the best division on %+v", seed, missing, times, h)
		}
	}
}

// TestShareExplores: a CPU that gets nothing is tried now and then, and gets experts once it is fast.
func TestShareExplores(t *testing.T) {
	auto := NewCPUShare(AutoCPUShare, CPURate{BytesPerSecond: 10e9, FlopsPerSecond: 1e12})
	list := []candidate{{rows: 1, left: mixtralExpert.Size}, {expert: 1, rows: 1, left: mixtralExpert.Size}}
	link := hostLink{bytesPerSecond: 50e9}
	layers := 0
	for range 60000 {
		n := auto.divide(&mixtralExpert, link, list, false, 0).onCPU
		auto.fetching(int64(2-n) * mixtralExpert.Size)
		if n > 0 {
			layers++
			auto.Computed(&mixtralExpert, computed(list, division{onCPU: n}), time.Duration(n)*3*time.Millisecond)
		}
		if n < 2 {
			auto.Fetched(time.Duration(2-n) * 7 * time.Millisecond)
		}
	}
	if n := auto.divide(&mixtralExpert, link, list, false, 0).onCPU; n == 0 || layers < 1000 {
		t.Errorf("a CPU that is faster than assumed got %d experts lately, in %d layers", n, layers)
	}
}

// TestShareLearnsSoon: where host memory hardly feeds both, so that the CPU alone is faster, that is found
// within four steps of 24 layers.
func TestShareLearnsSoon(t *testing.T) {
	x := float64(mixtralExpert.Size)
	h := hostTimes{CPUTime{90e-6, x / 149e9, 0}, 40e-6, 90e9, 2.2, 0, 0}
	auto, r := NewCPUShare(AutoCPUShare, serverCPU), rand.New(rand.NewPCG(7, 8))
	took, best, now := 0.0, 0.0, time.Duration(0)
	for i := range 24 * 24 {
		list := make([]candidate, 1+r.IntN(3))
		for e := range list {
			list[e] = candidate{expert: e, rows: 1, left: mixtralExpert.Size}
		}
		cpu, link := h.play(auto, list, now, r)
		now += time.Second
		if i >= 24*4 {
			took, best = took+max(cpu, link), best+h.best(list)
		}
	}
	if took > 1.03*best {
		t.Errorf("%.3f times the best division", took/best)
	}
}
