package planner

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
)

func TestCurve(t *testing.T) {
	c := Curve{At: []float64{1, 3, 8}, Values: []float64{10, 30, 20}}
	for x, want := range map[float64]float64{0: 10, 1: 10, 2: 20, 3: 30, 4: 28, 8: 20, 13: 20} {
		if got := c.Value(x); math.Abs(got-want) > 1e-12 {
			t.Errorf("at %v: %v, want %v", x, got, want)
		}
		sum := 0.0
		for _, w := range c.Weights(x) {
			sum += w
		}
		if math.Abs(sum-1) > 1e-12 {
			t.Errorf("at %v: weights %v", x, c.Weights(x))
		}
	}
	// Behind the last point it goes on.
	if rising := (Curve{At: []float64{1, 2}, Values: []float64{5, 6}}); rising.Value(4) != 8 || (Curve{}).Value(1) != 0 || (Curve{At: []float64{7}, Values: []float64{3}}).Value(9) != 3 {
		t.Error(rising.Value(4))
	}
	text, err := json.Marshal(c)
	if err != nil || string(text) != "[[1,10],[3,30],[8,20]]" {
		t.Errorf("%s, %v", text, err)
	}
	var back Curve
	if err := json.Unmarshal(text, &back); err != nil || back.Value(4) != c.Value(4) {
		t.Errorf("%+v, %v", back, err)
	}
	for _, bad := range []string{"5", "[[1]]", `[["x",2]]`} {
		if err := json.Unmarshal([]byte(bad), &back); err == nil || !strings.Contains(err.Error(), "pairs of a point and a value") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// What a hardware file has of compute is checked, by key.
func TestComputeRefuses(t *testing.T) {
	for given, want := range map[string]string{
		`{"base": "h200", "compute": {"dense": 5}}`:                        `compute: unknown field "dense"`,
		`{"base": "h200", "compute": {"expert_s": [[2, 1], [1, 1]]}}`:      "expert_s has points that do not ascend",
		`{"base": "h200", "compute": {"expert_s": [[1, -1]]}}`:             "expert_s has a negative or infinite number",
		`{"base": "h200", "compute": {}}`:                                  "decode.step_s has 0 points and 0 values",
		`{"base": "h200", "compute": {"sampling_s_per_logit": -1}}`:        "sampling_s_per_logit is -1, it must be at least 0",
		`{"base": "h200", "compute": {"dense_s_per_weight": [[1, 2, 3]]}}`: "pairs of a point and a value",
	} {
		if _, err := ParseHardware([]byte(given)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", given, err, want)
		}
	}
	if h, err := ParseHardware([]byte(`{"base": "h200"}`)); err != nil || h.Compute == nil {
		t.Errorf("a file on the profile of the H200 has not what its kernels reach: %v", err)
	}
}

// What the kernels of a profile's GPU reach does not hold for a GPU with other rates: these would change
// nothing.
func TestComputeOfOtherRates(t *testing.T) {
	for given, keeps := range map[string]bool{
		`{"base": "h200", "host_memory_bytes": 1000000000}`: true,
		`{"base": "h200", "gpu_memory_bytes_per_s": 1e12}`:  false,
		`{"base": "h200", "gpu_flop_per_s": 1e14}`:          false,
	} {
		h, err := ParseHardware([]byte(given))
		if err != nil || (h.Compute != nil) != keeps || keeps != (h.Sources["compute"] != "") {
			t.Errorf("%s: %v, compute %v from %q", given, err, h.Compute != nil, h.Sources["compute"])
		}
	}
}

// A step is as long as its terms, a graph is no longer than the same step enqueued, and no step is
// faster than the rates allow by more than the fit's slack.
func TestComputeTimes(t *testing.T) {
	h := calibrated(t, "h200")
	for _, name := range modelNames {
		p := problem(t, name, "h200")
		for _, n := range []int{1, 8, 64, 324, 3240} {
			ideal := predict(t, p, Policy{Batch: n, ResidentExperts: p.Model.ExpertCount()})
			q := p
			q.Hardware = h
			real := predict(t, q, Policy{Batch: n, ResidentExperts: p.Model.ExpertCount()})
			if real.Decode.Seconds < 0.85*ideal.Decode.Seconds || real.Decode.Seconds > 4*ideal.Decode.Seconds {
				t.Errorf("%s, %d sequences: %v s, and by rates %v", name, n, real.Decode.Seconds, ideal.Decode.Seconds)
			}
			s := ComputeStep{Sequences: n, Tokens: 1, Context: int(p.Workload.Context())}
			if got := h.Compute.Seconds(p.Model, s); !near(got, real.Decode.Seconds, 1e-9) {
				t.Errorf("%s, %d sequences: terms take %v s, the step %v", name, n, got, real.Decode.Seconds)
			}
			graph := h.Compute.Seconds(p.Model, s)
			if s.Enqueued = true; h.Compute.Seconds(p.Model, s) < 0.97*graph {
				t.Errorf("%s, %d sequences: enqueued %v s, as a graph %v", name, n, h.Compute.Seconds(p.Model, s), graph)
			}
		}
	}
}

// Few sequences read offloaded experts in place where that is faster than copies, or where they are
// told to.
func TestInPlace(t *testing.T) {
	p := problem(t, "qwen3-30b-a3b", "h200")
	p.Hardware = calibrated(t, "h200")
	at := func(n, limit int, always bool) Step {
		q := p
		q.InPlaceTokens, q.AlwaysInPlace = limit, always
		return predict(t, q, offload(t, q, Policy{Batch: n, OnDemand: true}, 0.5, configs.HostTier)).Decode
	}
	copied, read := at(1, 0, false), at(1, 16, false)
	link := 0.5 * 48 * 8 * float64(p.Model.ExpertBytes()) / p.Hardware.HostReadRate
	resident := 0.0 // the other half of the experts, which the same launches read from the GPU's memory meanwhile
	for _, phase := range read.Phases {
		if strings.HasPrefix(phase.Name, "experts ") {
			resident += 0.5 * phase.Seconds
		}
	}
	if copied.Bound != BoundOnDemandFetch || read.Bound != BoundHostLink || read.Seconds >= copied.Seconds || resident == 0 || !near(read.Seconds, read.GPU-resident+link, 1e-9) {
		t.Errorf("copied %+v, read in place %+v", copied, read)
	}
	if got := at(32, 16, true); got.Seconds != at(32, 0, false).Seconds {
		t.Errorf("32 sequences: %+v", got)
	}
	// Slow reads are used only where they are told to.
	p.Hardware.HostReadRate /= 10
	if at(1, 16, false).Seconds != copied.Seconds || at(1, 16, true).Seconds < 5*copied.Seconds {
		t.Errorf("%+v, %+v", at(1, 16, false), at(1, 16, true))
	}
}

// What steps were counted to use takes the place of equal use.
func TestRouting(t *testing.T) {
	p := problem(t, "qwen3-30b-a3b", "h200")
	p.Hardware = calibrated(t, "h200")
	x := offload(t, p, Policy{Batch: 8, OnDemand: true}, 0.5, configs.HostTier)
	equal := predict(t, p, x)
	p.Routing = Routing{Decode: 30, Prefill: 60, Fetched: 5e9}
	counted := predict(t, p, x)
	if got, want := counted.Decode.HostLink, 5e9/p.Hardware.HostToGPU[0]; !near(got, want, 0.05) {
		t.Errorf("5 GB take %v s of the link, want about %v", got, want)
	}
	if counted.Decode.GPU >= equal.Decode.GPU || counted.Prefill.GPU >= equal.Prefill.GPU {
		t.Errorf("fewer experts take as long: %+v, %+v", counted.Decode, equal.Decode)
	}
}
