package offload

import (
	"math"
	"testing"
	"time"
)

// measured is a model of steps of up to most tokens, which take base seconds and each more.
func measured(base, each float64, most int) *costs {
	var c costs
	for n := 1; n <= most; n *= 2 {
		c.computed(n, base+each*float64(n))
	}
	return &c
}

func part(medium string, tokens int, bytes int64, rate float64) Part {
	return Part{Medium: medium, Blocks: tokens / 16, Tokens: tokens, Bytes: bytes, BytesPerSecond: rate}
}

// TestChoose: what is faster is chosen, by prefix of the run.
func TestChoose(t *testing.T) {
	const mb = 1 << 20
	for name, c := range map[string]struct {
		costs *costs
		run   []Part
		want  int
	}{
		"nothing measured":       {&costs{}, []Part{part(CPU, 1024, 1<<40, 1)}, 1},
		"rate unknown":           {measured(0.01, 1e-6, 4096), []Part{part(File, 1024, 1<<40, 0)}, 1},
		"nothing to choose":      {measured(0.01, 1e-6, 4096), nil, 0},
		"load is faster":         {measured(0.01, 1e-4, 4096), []Part{part(CPU, 1024, 128*mb, 50e9)}, 1},
		"compute is faster":      {measured(0.001, 1e-6, 4096), []Part{part(CPU, 1024, 1024*mb, 1e9)}, 0},
		"queue is long":          {measured(0.001, 1e-5, 4096), []Part{{Medium: CPU, Tokens: 1024, Bytes: mb, BytesPerSecond: 1e9, QueuedBytes: 1 << 30}}, 0},
		"first part only":        {measured(0.001, 1e-6, 4096), []Part{part(PeerGPU, 2048, 16*mb, 400e9), part(File, 2048, 1024*mb, 1e9)}, 1},
		"slow part, fast behind": {measured(0.001, 1e-5, 4096), []Part{part(CPU, 16, mb, 1e9), part(PeerGPU, 4096, 64*mb, 400e9)}, 2},
		"many steps":             {measured(0.001, 1e-6, 1024), []Part{part(CPU, 1<<20, 1024*mb, 50e9)}, 1},
	} {
		if got := c.costs.choose(c.run); got != c.want {
			t.Errorf("%s: %d parts, want %d", name, got, c.want)
		}
	}
}

// TestHysteresis: near the border the choice stays what it was; every 32nd refusal is a try.
func TestHysteresis(t *testing.T) {
	c := measured(0, 1e-5, 4096)    // 10.24 ms for 1,024 tokens
	at := func(share float64) int { // a load of so much of that
		run := []Part{part(CPU, 1024, int64(share*10.24e6), 1e9)}
		n := c.choose(run)
		c.count(run, n)
		return n
	}
	for i, step := range []struct {
		share float64
		want  int
	}{{0.5, 1}, {1.05, 1}, {1.2, 0}, {1.05, 0}, {0.95, 0}, {0.85, 1}, {0.95, 1}} {
		if got := at(step.share); got != step.want {
			t.Errorf("step %d, a load of %g: %d", i, step.share, got)
		}
	}
	if want := (Decisions{Loaded: 4, Computed: 3, LoadedTokens: 4096, ComputedTokens: 3072}); c.decisions != want {
		t.Errorf("%+v, want %+v", c.decisions, want)
	}
	tries := 0
	for range 96 {
		tries += at(3)
	}
	if tries != 3 {
		t.Errorf("%d tries in 96 refusals", tries)
	}
}

// TestLine: what steps take is found from a mix of sizes, and follows a change.
func TestLine(t *testing.T) {
	var l line
	for range 50 {
		for _, n := range []float64{1, 300, 4096, 17} {
			l.add(lineDecay, n, 0.02+1e-5*n)
		}
	}
	for _, n := range []float64{1, 100, 4096} {
		if got, want := l.at(n), 0.02+1e-5*n; math.Abs(got-want) > 1e-6 {
			t.Errorf("%g seconds for %g, want %g", got, n, want)
		}
	}
	for range 300 {
		l.add(lineDecay, 512, 0.5)
	}
	if got := l.at(512); math.Abs(got-0.5) > 1e-3 {
		t.Errorf("%g seconds after the change", got)
	}
	if got := l.at(1024); math.Abs(got-1) > 0.05 {
		t.Errorf("%g seconds for twice as many, as all were of one size", got)
	}
	// Larger steps that take less time have no negative cost.
	l = line{}
	l.add(lineDecay, 1, 2)
	l.add(lineDecay, 1000, 1)
	if got := l.at(1e6); got <= 0 {
		t.Errorf("%g seconds", got)
	}
}

// TestLoadRate: rates are those of the times during which loads were under way.
func TestLoadRate(t *testing.T) {
	var c levelCounts
	at := func(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }
	load := func(bytes, ended int64) *running {
		r := &running{job: &Job{Blocks: []Block{{Pieces: make([]Piece, 1)}}}, ended: at(ended)}
		r.job.Blocks[0].Pieces[0].GPU.Bytes = bytes
		return r
	}
	c.loading(10<<20, at(100))
	c.loading(30<<20, at(105))
	c.loaded(load(10<<20, 120), []int{0})
	if c.rate.bytesPerSecond() != 0 {
		t.Error("measured while loads are under way")
	}
	c.loaded(load(30<<20, 140), []int{0})
	if got, want := c.rate.bytesPerSecond(), float64(40<<20)/0.04; math.Abs(got-want) > 1 {
		t.Errorf("%g bytes per second, want %g", got, want)
	}
	c.loading(100, at(200))
	c.loaded(load(100, 200), []int{0}) // in no time
	if got, want := c.rate.bytesPerSecond(), float64(40<<20)/0.04; math.Abs(got-want) > 1 {
		t.Errorf("%g bytes per second after a load without a time, want %g", got, want)
	}
}

// TestLoadCost: latency and rate are found from loads of all sizes, also where all are small; of one
// size alone what the path does not need is latency, where its rate is known.
func TestLoadCost(t *testing.T) {
	const latency, rate = 2e-3, 1e9
	for name, c := range map[string]struct {
		sizes                 []int64
		expected              float64
		wantLatency, wantRate float64
	}{
		"nothing":                       {nil, 5e9, 0, 5e9},
		"nothing, unknown":              {nil, 0, 0, 0},
		"small":                         {[]int64{1 << 12, 1 << 14, 1 << 16, 1 << 18}, 0, latency, rate},
		"large":                         {[]int64{1 << 22, 1 << 25, 1 << 27}, 0, latency, rate},
		"all":                           {[]int64{1 << 12, 1 << 27}, 5e9, latency, rate},
		"one size":                      {[]int64{1 << 16}, 0, 0, (1 << 16) / (latency + (1<<16)/rate)},
		"one size, rate known":          {[]int64{1 << 16}, rate, latency, rate},
		"one size, rate overestimated":  {[]int64{1 << 16}, 2 * rate, latency + (1<<16)/rate/2, 2 * rate},
		"one size, rate underestimated": {[]int64{1 << 27}, rate / 2, 0, (1 << 27) / (latency + (1<<27)/rate)},
	} {
		var r loadRate
		now := time.Duration(0)
		for range 30 {
			for _, n := range c.sizes {
				r.begin(now)
				r.bytes = n
				now += time.Duration((latency + float64(n)/rate) * 1e9)
				r.ended(now, true)
			}
		}
		gotLatency, gotRate := r.cost(c.expected)
		if math.Abs(gotLatency-c.wantLatency) > 1e-5 || math.Abs(gotRate-c.wantRate) > 0.01*c.wantRate {
			t.Errorf("%s: %g s and %g bytes per second, want %g and %g", name, gotLatency, gotRate, c.wantLatency, c.wantRate)
		}
	}
	// Larger loads that take less time have no rate below the path's, nor a negative or endless one.
	var r loadRate
	r.times.add(rateDecay, 1000, 2)
	r.times.add(rateDecay, 1e6, 1)
	if l, rate := r.cost(1e9); l <= 0 || math.Abs(rate-1e9) > 1 {
		t.Errorf("%g s and %g bytes per second", l, rate)
	}
	if l, rate := r.cost(0); l <= 0 || rate <= 0 || rate > 1e9 {
		t.Errorf("%g s and %g bytes per second", l, rate)
	}
}

// TestSmallLoadsAreChosen: between a few tokens and many the latency of a tier decides, either way.
func TestSmallLoadsAreChosen(t *testing.T) {
	c := measured(0, 1e-5, 4096) // 0.16 ms for a block of 16 tokens
	for latency, want := range map[float64][2]int{
		2e-5: {1, 1}, // computing one block takes longer
		1e-3: {0, 1}, // and here a hundred
		1:    {0, 0},
	} {
		for i, blocks := range []int{1, 150} {
			run := []Part{{Medium: File, Tokens: 16 * blocks, Bytes: int64(blocks) << 12, Latency: latency, BytesPerSecond: 1e9}}
			if got := c.choose(run); got != want[i] {
				t.Errorf("latency %g s, %d blocks: %d parts, want %d", latency, blocks, got, want[i])
			}
		}
	}
}
