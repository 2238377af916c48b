package planner

import (
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/configs"
)

func problem(t testing.TB, model, hardware string) Problem {
	t.Helper()
	return Problem{
		Model: presetModel(t, model), Hardware: hardwarePreset(t, hardware),
		Workload: Workload{PromptTokens: 77, NewTokens: 32}, Sizes: Sizes{KVBlockTokens: 16},
	}
}

// fits ignores that a policy does not fit.
func predict(t testing.TB, p Problem, x Policy) Prediction {
	t.Helper()
	r, err := p.Predict(x)
	var misfit *MisfitError
	if err != nil && !asMisfit(err, &misfit) {
		t.Fatal(err)
	}
	return r
}

func offload(t testing.TB, p Problem, x Policy, fraction float64, tier configs.Tier) Policy {
	t.Helper()
	x, err := p.Offload(x, fraction, tier)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// A prediction differs from the table of rooflines only by the latency of copies,
// and, per micro-batch, by nothing.
func TestPredictMeetsRooflines(t *testing.T) {
	for _, row := range rooflineTable[:12] {
		p := problem(t, row.model, "h200")
		// As much as the policies need: the question is time alone.
		p.Hardware.GPUMemory *= 4
		x := Policy{Batch: row.rows}
		if row.groups > 1 {
			x.MicroBatch, x.Grouping = row.rows/row.groups, configs.PerMicroBatch
		}
		for column, c := range []struct {
			fraction float64
			tier     configs.Tier
			paths    int
		}{{0, configs.HostTier, 1}, {0.5, configs.HostTier, 1}, {0.5, configs.HostTier, 2}, {0.5, configs.PeerTier, 1}, {1, configs.PeerTier, 1}, {1, configs.AnyTier, 1}} {
			x.HostPaths = c.paths
			r := predict(t, p, offload(t, p, x, c.fraction, c.tier))
			share := 0.01
			if c.fraction > 0 {
				expert := p.Model.ExpertBytes()
				share += max(p.Hardware.PeerCopyLatency/p.Hardware.PeerCopySeconds(expert, 1), p.Hardware.HostCopyLatency/p.Hardware.HostCopySeconds(expert, 1, 1))
			}
			if want := row.tokS[column]; r.DecodeTokS > want*1.01 || r.DecodeTokS < want*(1-share) {
				t.Errorf("%s, %d tokens in %d groups, column %d: %.5g tokens/s, the roofline is %.5g", row.model, row.rows, row.groups, column, r.DecodeTokS, want)
			}
		}
	}
}

// One row: all experts chosen by the router before their copies start.
func TestPredictChosenOnly(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	x := offload(t, p, Policy{Batch: 1}, 0.5, configs.PeerTier)
	all := predict(t, p, x)
	x.OnDemand = true
	r := predict(t, p, x)
	// The roofline with perfect prefetch is 35.0, and about 29 where nothing is known
	// ahead.
	if r.Decode.Bound != BoundOnDemandFetch || r.DecodeTokS < 28 || r.DecodeTokS > 30 || r.DecodeTokS < 2*all.DecodeTokS {
		t.Errorf("%.1f tokens/s by %s, %.1f with all experts streamed", r.DecodeTokS, r.Decode.Bound, all.DecodeTokS)
	}
	if got := 1 / max(r.Decode.PeerLink, r.Decode.GPU); !near(got, 35.0, 0.02) {
		t.Errorf("%.2f tokens/s by the link alone, want 35.0", got)
	}
}

// A step is flat up to the saturation point and rises from there.
func TestSaturationPoint(t *testing.T) {
	for _, c := range []struct {
		model string
		rows  int
		tier  configs.Tier
		want  float64
	}{
		{"mixtral-8x7b", 3240, configs.PeerTier, 0.502},
		{"mixtral-8x7b", 3240, configs.HostTier, 0.070},
		{"phi-3.5-moe", 4536, configs.PeerTier, 0.432},
		{"phi-tiny-moe", 4536, configs.PeerTier, 1},
		{"qwen1.5-moe-a2.7b", 4536, configs.HostTier, 0.101},
	} {
		p := problem(t, c.model, "h200")
		p.Hardware.GPUMemory *= 4
		x := Policy{Batch: c.rows}
		point, err := p.SaturationPoint(x, c.tier)
		if err != nil {
			t.Fatal(err)
		}
		if c.want == 1 && point > 1 {
			continue
		}
		if !near(point, c.want, 0.03) {
			t.Errorf("%s at %d from %v: saturation point at %.4f, want %v", c.model, c.rows, c.tier, point, c.want)
		}
		flat := predict(t, p, offload(t, p, x, 0, c.tier)).Decode.Seconds
		below := predict(t, p, offload(t, p, x, 0.97*point, c.tier)).Decode
		above := predict(t, p, offload(t, p, x, 1.03*point, c.tier)).Decode
		if below.Seconds != flat || above.Seconds <= flat {
			t.Errorf("%s at %d from %v: %v s, %v below the saturation point and %v above", c.model, c.rows, c.tier, flat, below.Seconds, above.Seconds)
		}
		want := BoundPeerLink
		if c.tier == configs.HostTier {
			want = BoundHostLink
		}
		if above.Bound != want || below.Bound == want {
			t.Errorf("bounds are %s below and %s above the saturation point", below.Bound, above.Bound)
		}
	}
}

// Misses are split so that both links end together, in whole experts.
func TestSplit(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	x := offload(t, p, Policy{Batch: 4536}, 1, configs.AnyTier)
	r := predict(t, p, x)
	one := p.Hardware.HostCopySeconds(p.Model.ExpertBytes(), 1, 1)
	if math.Abs(r.Decode.HostLink-r.Decode.PeerLink) > one {
		t.Errorf("links end at %v and %v s", r.Decode.HostLink, r.Decode.PeerLink)
	}
	ratio := float64(x.PeerExperts) / float64(x.HostExperts(p.Model))
	if !near(ratio, 395/55.3, 0.05) {
		t.Errorf("%d from peers, %d from the host", x.PeerExperts, x.HostExperts(p.Model))
	}
	// A peer with little room gets what fits.
	p.Hardware.PeerMemory = 100 * p.Model.ExpertBytes()
	if x := offload(t, p, Policy{Batch: 4536}, 1, configs.AnyTier); x.PeerExperts != 90 {
		t.Errorf("%d experts in nine tenths of a memory for 100", x.PeerExperts)
	}
}

func TestCPUAttention(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "l4")
	x := offload(t, p, Policy{Batch: 4536, Attention: configs.OnCPU}, 0.95, configs.HostTier)
	r := predict(t, p, x)
	// The KV cache of 93 tokens and the queries, read at 76 GiB/s.
	want := (4536*93*131072.0 + 2*2*4536*4096*32) / p.Hardware.HostMemoryRate
	if !near(r.Decode.CPU, want, 1e-9) || slices.ContainsFunc(r.Decode.Phases, func(x Phase) bool { return x.Name == "attention" }) {
		t.Errorf("CPU %v s, want %v; phases %+v", r.Decode.CPU, want, r.Decode.Phases)
	}
	rows := 4536.0 * 32 * 2 / p.Hardware.GPUToHost
	if !near(r.Decode.D2HLink, rows*(4096+2048), 1e-9) {
		t.Errorf("queries, keys and values take %v s", r.Decode.D2HLink)
	}
	// Twice the experts' weights as with attention on the GPU.
	x.Attention = configs.OnGPU
	gpu := predict(t, p, x)
	up := func(r Prediction) float64 {
		i := slices.IndexFunc(r.Decode.Phases, func(x Phase) bool { return x.Name == "experts gate/up" })
		return r.Decode.Phases[i].Bytes
	}
	if d := up(r) - up(gpu); !near(d, 32*8*2*2*4096*14336, 1e-3) {
		t.Errorf("two groups read %v bytes more", d)
	}
	// One row at a time cannot take turns.
	x = Policy{Batch: 1, Attention: configs.OnCPU, ResidentExperts: 256}
	if s := predict(t, p, x).Decode; s.Bound != BoundOverhead || s.Seconds < s.GPU+s.CPU {
		t.Errorf("%+v", s)
	}
}

func TestPredictRefuses(t *testing.T) {
	for _, c := range []struct {
		x    Policy
		want string
	}{
		{Policy{}, "a batch of 0 sequences"},
		{Policy{Batch: 4, MicroBatch: 8}, "micro-batches of 8 tokens in a batch of 4: make them at most the batch"},
		{Policy{Batch: 101}, "a batch of 101 sequences for 100 requests"},
		{Policy{Batch: 1, ResidentExperts: 257}, "resident_experts is 257, and model mixtral-8x7b has 256"},
		{Policy{Batch: 1, ResidentExperts: 200, PeerExperts: 57}, "57 experts in peer memory, and 56 are offloaded"},
		{Policy{Batch: 1, PeerExperts: 1}, "hardware l4 has no peers"},
		{Policy{Batch: 1, KVOnHost: math.NaN()}, "a share NaN of the KV cache"},
		{Policy{Batch: 1, HostPaths: 2}, "2 paths from the host, and hardware l4 has 1"},
		{Policy{Batch: 1, PrefillTokens: -1}, "-1 prompt tokens a step"},
		{Policy{Batch: 1, Attention: 7}, "invalid attention 7"},
	} {
		p := problem(t, "mixtral-8x7b", "l4")
		p.Workload.Requests = 100
		if _, err := p.Predict(c.x); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %s", c.x, err, c.want)
		}
	}
	p := problem(t, "mixtral-8x7b", "l4")
	for _, f := range []func() error{
		func() error { _, err := p.Offload(Policy{Batch: 1}, 0.5, configs.PeerTier); return err },
		func() error { _, err := p.SaturationPoint(Policy{Batch: 1}, configs.PeerTier); return err },
		func() error { _, err := p.Offload(Policy{Batch: 1}, 1.5, configs.HostTier); return err },
		func() error { _, err := p.Offload(Policy{Batch: 1}, 0.5, configs.Tier(9)); return err },
		func() error { _, err := p.Search(Choices{Tier: configs.PeerTier}); return err },
	} {
		if f() == nil {
			t.Error("no error")
		}
	}
	p.Shares.GPU = 1.5
	if _, err := p.Predict(Policy{Batch: 1}); err == nil {
		t.Error("a memory was used more than once")
	}
}

// drawPolicy draws a policy that can be run, whether or not it fits.
func drawPolicy(t *rapid.T, p Problem) Policy {
	x := Policy{
		Batch:     rapid.IntRange(1, 5000).Draw(t, "batch"),
		Grouping:  rapid.SampledFrom([]configs.Grouping{configs.PerLayer, configs.PerMicroBatch}).Draw(t, "grouping"),
		Attention: rapid.SampledFrom([]configs.Place{configs.OnGPU, configs.OnCPU}).Draw(t, "attention"),
		KVOnHost:  rapid.SampledFrom([]float64{0, 0.3, 1}).Draw(t, "kv"),
		HostPaths: rapid.IntRange(1, len(p.Hardware.HostToGPU)).Draw(t, "paths"),
	}
	x.MicroBatch = rapid.IntRange(1, x.Batch).Draw(t, "micro")
	x.PrefillTokens = rapid.IntRange(1, x.Batch*p.Workload.PromptTokens).Draw(t, "prefill")
	x.ResidentExperts = rapid.IntRange(0, p.Model.ExpertCount()).Draw(t, "local")
	if p.Hardware.PeerMemory > 0 {
		x.PeerExperts = rapid.IntRange(0, p.Model.ExpertCount()-x.ResidentExperts).Draw(t, "peers")
	}
	x.OnDemand = rapid.Bool().Draw(t, "chosen")
	return x
}

var (
	modelNames    = []string{"mixtral-8x7b", "phi-3.5-moe", "phi-tiny-moe", "qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-30b-a3b"}
	hardwareNames = configs.HardwareNames()
)

// No faster part, no additional resident expert and no larger window of time makes a
// policy slower; a step is never shorter than its busiest resource.
func TestPredictIsMonotone(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := problem(t, rapid.SampledFrom(modelNames).Draw(rt, "model"), rapid.SampledFrom(hardwareNames).Draw(rt, "hardware"))
		if rapid.Bool().Draw(rt, "calibrated") {
			p.Hardware.Compute = calibrated(t, "h200").Compute
		}
		x := drawPolicy(rt, p)
		was := predict(t, p, x)
		for _, s := range []Step{was.Decode, was.Prefill} {
			busiest := max(s.GPU, s.CPU, s.HostLink, s.D2HLink, s.PeerLink)
			if !(s.Seconds > 0) || math.IsInf(s.Seconds, 0) || s.Seconds < busiest || s.Bound == "" {
				rt.Fatalf("%+v", s)
			}
			sum := 0.0
			for _, ph := range s.Phases {
				sum += ph.Seconds
			}
			if !near(sum, s.GPU, 1e-9) {
				rt.Fatalf("phases take %v s, the GPU %v", sum, s.GPU)
			}
		}
		faster := p
		faster.Hardware.HostToGPU = slices.Clone(p.Hardware.HostToGPU)
		switch rapid.IntRange(0, 6).Draw(rt, "part") {
		case 0:
			faster.Hardware.GPUMemoryRate *= 2
		case 1:
			faster.Hardware.GPUFlops *= 2
		case 2:
			faster.Hardware.PeerToGPU *= 2
		case 3:
			for i := range faster.Hardware.HostToGPU {
				faster.Hardware.HostToGPU[i] *= 2
			}
		case 4:
			faster.Hardware.CPUFlops *= 2
			faster.Hardware.HostMemoryRate *= 2
		case 5:
			faster.Hardware.GPUToHost *= 2
			faster.Hardware.GPUAttentionFlops *= 2
		case 6:
			if x.ResidentExperts+x.PeerExperts < p.Model.ExpertCount() {
				x.ResidentExperts++
			}
		}
		if is := predict(t, faster, x); is.TokS < was.TokS*(1-1e-12) || is.DecodeTokS < was.DecodeTokS*(1-1e-12) {
			rt.Fatalf("%v tok/s, then %v", was.TokS, is.TokS)
		}
	})
}

// TestCPUExperts: of the experts that one sequence of Mixtral misses, half of which lie in host
// memory, CPU and link take parts, in no less time than that memory needs for both.
func TestCPUExperts(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	x := offload(t, p, Policy{Batch: 1, OnDemand: true}, 0.5, configs.HostTier)
	fetched := predict(t, p, x).Decode
	p.CPUExperts = -1
	both := predict(t, p, x).Decode
	p.CPUExperts = 1
	computed := predict(t, p, x).Decode
	missing := 0.5 * 32 * 2 * float64(p.Model.EnsureDefaults().ExpertBytes())
	near := func(what string, got, want float64) {
		if math.Abs(got/want-1) > 0.01 {
			t.Errorf("%s takes %v s, want %v", what, got, want)
		}
	}
	near("the link, with all fetched,", fetched.HostLink, missing/p.Hardware.HostToGPU[0])
	start := 32 * CPUExpertsStart.Seconds()
	near("the CPU, with all computed,", computed.CPU, start+missing/p.Hardware.HostMemoryRate)
	near("the CPU, with both,", both.CPU, computed.CPU)
	near("the link, with both,", both.HostLink, (start*p.Hardware.HostMemoryRate+missing)/(p.Hardware.HostMemoryRate+p.Hardware.HostToGPU[0]))
	near("the step, with all computed,", computed.Seconds, computed.GPU+computed.CPU+32*p.Hardware.RoundTrip)
	if fetched.CPU != 0 || computed.HostLink != 0 || both.Seconds > 0.1 || fetched.Seconds < 0.2 {
		t.Errorf("fetched %+v, computed %+v, both %+v", fetched, computed, both)
	}
	// A CPU bound by its arithmetic leaves memory to the link: both end together.
	slow := p
	slow.CPUExperts = -1
	slow.Hardware.CPUFlops = 0.05e12
	each := 6 * 4096 * 14336 / slow.Hardware.CPUFlops
	link := float64(p.Model.EnsureDefaults().ExpertBytes()) / p.Hardware.HostToGPU[0]
	s := predict(t, slow, x).Decode
	near("a slow CPU, with both,", s.CPU, (start/each+32)/(1/each+1/link))
	near("the link, with a slow CPU,", s.HostLink, s.CPU)
	// Many rows are bound by arithmetic, and layers fetched whole have no experts on the CPU.
	x.Batch = 4096
	many := predict(t, p, x).Decode
	near("the CPU, with many rows,", many.CPU, 0.5*32*4096*2*6*4096*14336/p.Hardware.CPUFlops)
	x.OnDemand = false
	if s := predict(t, p, x).Decode; s.CPU != 0 {
		t.Errorf("%+v", s)
	}
}

// TestCPUAttentionMeasured: where attention on the CPU was measured, steps take as long as at its rates.
func TestCPUAttentionMeasured(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	x := offload(t, p, Policy{Batch: 4536, Attention: configs.OnCPU}, 0, configs.HostTier)
	times := func() (decode, prefill float64) {
		r := predict(t, p, x)
		return r.Decode.CPU, r.Prefill.CPU
	}
	p.Hardware.CPUAttentionRate, p.Hardware.CPUAttentionFlops = 0, 0
	decode, prefill := times()
	p.Hardware.CPUAttentionRate, p.Hardware.CPUAttentionFlops = p.Hardware.HostMemoryRate/5, p.Hardware.CPUFlops/10
	slowDecode, slowPrefill := times()
	if r := slowDecode / decode; r < 4.5 || r > 5 {
		t.Errorf("a fifth of the rate: decode steps take %.2f times as long", r)
	}
	if r := slowPrefill / prefill; r < 9.9 || r > 10.1 {
		t.Errorf("a tenth of the rate: prompts take %.2f times as long", r)
	}
}
