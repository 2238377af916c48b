package planner

import (
	"cmp"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// For each preset of a model and of hardware there is a policy, it fits, and it is found
// again.
func TestSearch(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, hardware := range hardwareNames {
		for _, model := range modelNames {
			p := problem(t, model, hardware)
			r, err := p.Search(Choices{})
			if model == "qwen2-57b-a14b" && p.Hardware.GPUMemory <= 24<<30 {
				var m *MisfitError
				if !errors.As(err, &m) || m.Space.Name != "gpu" || !strings.Contains(err.Error(), "non-expert weights 15.06 GiB") {
					t.Errorf("%s on %s: %v", model, hardware, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s on %s: %v", model, hardware, err)
				continue
			}
			again, err := p.Predict(r.Policy)
			if err != nil || !reflect.DeepEqual(again, r) {
				t.Errorf("%s on %s: predicted otherwise than found: %v", model, hardware, err)
			}
			if second, err := p.Search(Choices{}); err != nil || !reflect.DeepEqual(second, r) {
				t.Errorf("%s on %s: found %+v, then %+v", model, hardware, r.Policy, second.Policy)
			}
		}
	}
}

// What a search should come to, seen from above.
func TestSearchMakesSense(t *testing.T) {
	find := func(model, hardware string, c Choices) Prediction {
		t.Helper()
		r, err := problem(t, model, hardware).Search(c)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	// Where all fits, nothing is offloaded, and nothing is complicated.
	r := find("mixtral-8x7b", "h200", Choices{})
	if r.Policy.ResidentExperts != 256 || r.Policy.complexity() != 0 || r.Policy.MicroBatch != r.Policy.Batch || !near(r.DecodeTokS, 28_200, 0.02) {
		t.Errorf("Mixtral on an H200: %+v", r.Policy)
	}
	// On an L4 the KV cache goes to the host, attention with it, and the link is
	// the limit: more than MoE-Lightning's 945 tokens/s, whose experts run per
	// micro-batch.
	r = find("mixtral-8x7b", "l4", Choices{})
	if r.Policy.Attention != configs.OnCPU || r.Policy.Grouping != configs.PerLayer || r.Decode.Bound != BoundHostLink || r.DecodeTokS < 1000 || r.DecodeTokS > 1300 {
		t.Errorf("Mixtral on an L4: %+v, %v tokens/s by %s", r.Policy, r.DecodeTokS, r.Decode.Bound)
	}
	// One sequence: on-demand fetches.
	half := 0.5
	r = find("mixtral-8x7b", "h200", Choices{Batch: 1, Offload: &half, Tier: configs.PeerTier})
	if !r.Policy.OnDemand || r.Policy.PeerExperts != 128 {
		t.Errorf("one sequence: %+v", r.Policy)
	}
	// Two paths where one does not suffice.
	r = find("mixtral-8x7b", "h200", Choices{Batch: 3240, Offload: &half, Tier: configs.HostTier, Attention: []configs.Place{configs.OnGPU}, KVOnHost: []float64{0}})
	if r.Policy.HostPaths != 2 || !near(r.DecodeTokS, 7400, 0.01) {
		t.Errorf("half from the host: %+v, %v tokens/s", r.Policy, r.DecodeTokS)
	}
	// Pins are kept.
	r = find("mixtral-8x7b", "l4", Choices{MicroBatch: 324, MicroBatches: 14, Attention: []configs.Place{configs.OnCPU}, Grouping: []configs.Grouping{configs.PerMicroBatch}, MaxPrefillTokens: 8192})
	if p := r.Policy; p.Batch != 4536 || p.MicroBatch != 324 || p.MicroBatches() != 14 || p.Attention != configs.OnCPU || p.Grouping != configs.PerMicroBatch || p.PrefillTokens > 8192 {
		t.Errorf("pinned: %+v", p)
	}
	if r = find("phi-tiny-moe", "h200", Choices{MicroBatches: 14}); r.Policy.MicroBatches() != 14 {
		t.Errorf("%d micro-batches, 14 are pinned", r.Policy.MicroBatches())
	}
	// A hundred requests are not run as 99 and one.
	p := problem(t, "qwen1.5-moe-a2.7b", "t4")
	p.Workload.Requests = 100
	if r, err := p.Search(Choices{}); err != nil || r.Policy.Batch != 100 {
		t.Errorf("100 requests: %+v, %v", r.Policy, err)
	}
	p = problem(t, "phi-tiny-moe", "h200")
	p.Workload.Requests = 40
	if r, err := p.Search(Choices{MaxBatch: 50}); err != nil || r.Policy.Batch > 40 {
		t.Errorf("%+v, %v", r.Policy, err)
	}
}

// Bounds cost throughput and hold; where they are out of reach, the nearest is named.
func TestSearchWithBounds(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "l4")
	free, err := p.Search(Choices{})
	if err != nil {
		t.Fatal(err)
	}
	tight, err := p.Search(Choices{MaxTTFT: 30, MaxTPOT: 4.6})
	if err != nil || tight.TTFT() > 30 || tight.TPOT() > 4.6 || tight.TokS >= free.TokS || tight.Policy.Batch < 100 {
		t.Errorf("%+v, %v", tight.Policy, err)
	}
	if loose, err := p.Search(Choices{MaxTTFT: 1000, MaxTPOT: 10}); err != nil || !reflect.DeepEqual(loose, free) {
		t.Errorf("%+v with bounds that bind nothing, %+v without, %v", loose.Policy, free.Policy, err)
	}
	_, err = p.Search(Choices{MaxTTFT: 1000, MaxTPOT: 0.1})
	var late *LatencyError
	if !errors.As(err, &late) || late.Nearest.Policy.Batch != 1 || late.Nearest.TPOT() < 0.1 || late.Nearest.TPOT() > 2 {
		t.Fatalf("%v", err)
	}
	if want := "planner: no policy has a TTFT of at most 1000 s and a TPOT of at most 100 ms: the nearest has a TTFT of 4.39 s and a TPOT of 1.19 s, with a batch of 1, "; !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "--offload-fraction 0.") {
		t.Errorf("%v", err)
	}
}

// Where a search tries every batch, the policies that it does not try are no better, and
// bounds of TTFT and TPOT hold.
func TestSearchAgainstBruteForce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := problem(t, rapid.SampledFrom(modelNames).Draw(rt, "model"), rapid.SampledFrom(hardwareNames).Draw(rt, "hardware"))
		p.Model.Layers = rapid.IntRange(1, 3).Draw(rt, "layers")
		p.Workload.PromptTokens = rapid.IntRange(1, 600).Draw(rt, "prompt")
		p.Workload.NewTokens = rapid.IntRange(1, 300).Draw(rt, "new")
		p.Workload.Requests = rapid.SampledFrom([]int{1, 2, 3, 5, 8, 13, 21, batchesTried}).Draw(rt, "requests")
		// Room for a few of the experts, or for all of them.
		experts := rapid.SampledFrom([]float64{0.3, 1.1, 2.05, 2.3, 2.7, 3, 4}).Draw(rt, "memory") * float64(p.Model.Experts) * float64(p.Model.ExpertBytes())
		p.Hardware.GPUMemory = int64((1.2*float64(p.Model.OtherBytes()) + experts) / 0.9)
		if rapid.Bool().Draw(rt, "workspace by micro-batch") {
			p.Sizes.Workspace = func(x *Policy) (int64, int64) {
				return int64(x.MicroBatchTokens())*20_000 + int64(x.MicroBatch)*1_000_000, 0
			}
		}
		p.PromptsAlike = rapid.Bool().Draw(rt, "prompts alike")
		shares := []float64{0, 0.5}
		c := Choices{KVOnHost: shares, Slack: -1}
		if free, err := p.Search(c); err == nil && rapid.Bool().Draw(rt, "bounded") {
			// From out of reach to no bound at all.
			if rapid.Bool().Draw(rt, "TTFT") {
				c.MaxTTFT = free.TTFT() * rapid.Float64Range(0.01, 1.1).Draw(rt, "of the TTFT")
			}
			if rapid.Bool().Draw(rt, "TPOT") {
				c.MaxTPOT = free.TPOT() * rapid.Float64Range(0.1, 1.1).Draw(rt, "of the TPOT")
			}
		}
		got, err := p.Search(c)
		excess := func(r *Prediction) float64 {
			return max(1, r.TTFT()/cmp.Or(c.MaxTTFT, math.Inf(1)), r.TPOT()/cmp.Or(c.MaxTPOT, math.Inf(1)))
		}

		n, nerr := p.normalized()
		if nerr != nil {
			rt.Fatal(nerr)
		}
		best, bestPolicy, nearest := 0.0, Policy{}, math.Inf(1)
		for batch := 1; batch <= p.Workload.Requests; batch++ {
			all := batch * p.Workload.PromptTokens
			for _, prefill := range []int{max(batch, (all+3)/4), all} {
				for _, micro := range []int{batch, (batch + 1) / 2, (batch + 2) / 3, (batch + 7) / 8} {
					for _, x := range []Policy{{}, {KVOnHost: 0.5}, {Attention: configs.OnCPU}, {Attention: configs.OnCPU, Grouping: configs.PerMicroBatch}, {Grouping: configs.PerMicroBatch}, {OnDemand: true}} {
						x.Batch, x.MicroBatch, x.PrefillTokens = batch, micro, prefill
						x, err := n.normal(x)
						if err != nil {
							rt.Fatal(err)
						}
						local, ok := n.mostResident(x)
						if !ok {
							continue
						}
						x.ResidentExperts = local
						for paths := range p.Hardware.HostToGPU {
							x.HostPaths = paths + 1
							x.PeerExperts = n.split(&x, configs.AnyTier)
							r := n.predict(x)
							nearest = min(nearest, excess(&r))
							if r.TokS > best && excess(&r) == 1 {
								best, bestPolicy = r.TokS, x
							}
						}
					}
				}
			}
		}
		if (err == nil) != (best > 0) {
			rt.Fatalf("search: %v; trying everything: %v tok/s", err, best)
		}
		var late *LatencyError
		if errors.As(err, &late) {
			if e := excess(&late.Nearest); e <= 1 || e > 1.001*nearest {
				rt.Fatalf("search comes to %v of the bounds with %+v, trying everything to %v", e, late.Nearest.Policy, nearest)
			}
		}
		if err != nil {
			return
		}
		if excess(&got) > 1 {
			rt.Fatalf("%v s to the first token and %v s per token, with bounds %v and %v", got.TTFT(), got.TPOT(), c.MaxTTFT, c.MaxTPOT)
		}
		if got.TokS < 0.998*best {
			rt.Fatalf("search finds %v tok/s with %+v, trying everything %v with %+v", got.TokS, got.Policy, best, bestPolicy)
		}
	})
}

// Narrowing the grid of batches finds what a fine scan of them finds.
func TestSearchNarrows(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, c := range [][2]string{{"mixtral-8x7b", "l4"}, {"qwen2-57b-a14b", "a100-80"}, {"phi-3.5-moe", "h100-80"}, {"qwen1.5-moe-a2.7b", "t4"}} {
		p := problem(t, c[0], c[1])
		r, err := p.Search(Choices{Slack: -1})
		if err != nil {
			t.Fatal(err)
		}
		for batch := 1.0; batch < 20_000; batch *= 1.15 {
			x, err := p.Search(Choices{Batch: int(batch), Slack: -1})
			if err == nil && x.TokS > 1.01*r.TokS {
				t.Errorf("%s on %s: %v tok/s at a batch of %d, and %v at %v", c[0], c[1], r.TokS, r.Policy.Batch, x.TokS, int(batch))
			}
		}
	}
}

func TestSearchRefuses(t *testing.T) {
	bad := 1.5
	for _, c := range []struct {
		c    Choices
		want string
	}{
		{Choices{Batch: -1}, "batch is -1"},
		{Choices{Batch: 8, MicroBatch: 9}, "micro-batches of 9 tokens in a batch of 8: make them at most the batch"},
		{Choices{Batch: 8, MicroBatches: 9}, "9 micro-batches in a batch of 8"},
		{Choices{Batch: 8, MicroBatch: 4, MicroBatches: 3}, "3 micro-batches of 4 tokens are not a batch of 8"},
		{Choices{Batch: 8, MaxBatch: 7}, "a batch of 8, and the maximum is 7"},
		{Choices{PrefillTokens: 8, MaxPrefillTokens: 7}, "8 prompt tokens a step, and the maximum is 7"},
		{Choices{Batch: 101}, "for 100 requests"},
		{Choices{Offload: &bad}, "offload fraction 1.5"},
		{Choices{Slack: 1}, "a slack of 1"},
		{Choices{MaxTTFT: -1}, "maximum TTFT is -1 s: must be at least 0"},
		{Choices{MaxTPOT: math.NaN()}, "maximum TPOT is NaN s"},
		{Choices{HostPaths: []int{3}}, "3 paths from the host, and hardware h200 has 2"},
		{Choices{Attention: []configs.Place{}}, "no choices"},
		{Choices{Attention: []configs.Place{7}}, "invalid attention 7"},
		{Choices{Grouping: []configs.Grouping{7}}, "invalid expert grouping 7"},
		{Choices{KVOnHost: []float64{0.5, 0}}, "must ascend"},
		{Choices{KVOnHost: []float64{2}}, "a share 2 of the KV cache"},
		{Choices{Batch: 15, MicroBatches: 14}, "a batch of 15 cannot be cut into 14 micro-batches"},
	} {
		p := problem(t, "mixtral-8x7b", "h200")
		p.Workload.Requests = 100
		if _, err := p.Search(c.c); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %s", c.c, err, c.want)
		}
	}
	// A batch that does not fit: what does.
	p := problem(t, "mixtral-8x7b", "h200")
	none := 0.0
	_, err := p.Search(Choices{Batch: 4536, Offload: &none, Attention: []configs.Place{configs.OnGPU}, KVOnHost: []float64{0}})
	var m *MisfitError
	if !errors.As(err, &m) || len(m.Nearest) != 2 || !strings.Contains(err.Error(), "; use a batch of 4536 with ") {
		t.Errorf("got %v", err)
	}
}

func BenchmarkSearch(b *testing.B) {
	for _, model := range []string{"mixtral-8x7b", "qwen3-30b-a3b"} {
		b.Run("model="+model, func(b *testing.B) {
			p := problem(b, model, "h200")
			for b.Loop() {
				if _, err := p.Search(Choices{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestLatencyOfThreeDigits(t *testing.T) {
	for s, want := range map[float64]string{0.9994: "999 ms", 0.9996: "1 s", 0.158: "158 ms", 999.4: "999 s", 999.6: "1000 s", 4567: "4567 s"} {
		if got := latency(s); got != want {
			t.Errorf("%v s: %q, want %q", s, got, want)
		}
	}
}
