package compute_test

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/eval/compute"
	"github.com/moeserve/moeserve/planner"
)

// gpu is a GPU whose costs are known: 4 TB/s and 600 TFLOP/s of weights, and launches.
func gpu() *planner.Compute {
	curve := func(at []float64, f func(x float64) float64) planner.Curve {
		c := planner.Curve{At: at}
		for _, x := range at {
			c.Values = append(c.Values, f(x))
		}
		return c
	}
	rows := []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}
	weight := func(memory, flops float64) planner.Curve {
		return curve(rows, func(n float64) float64 { return max(2/memory, 2*n/flops) })
	}
	fixed := func(step, layer, shared float64) planner.FixedCosts {
		return planner.FixedCosts{
			Step:   curve([]float64{1, 8192}, func(n float64) float64 { return step * (1 + n/8192) }),
			Layer:  curve(rows, func(n float64) float64 { return layer * (1 + n/1024) }),
			Shared: curve([]float64{1, 8192}, func(float64) float64 { return shared }),
		}
	}
	return &planner.Compute{
		Decode: fixed(40e-6, 25e-6, 6e-6), Enqueued: fixed(300e-6, 60e-6, 15e-6),
		Dense: weight(3.8e12, 600e12), Experts: weight(4.1e12, 650e12), Head: weight(4.2e12, 550e12),
		Sampling: 3e-12, Elementwise: 1 / 2.5e12,
		Attention: curve([]float64{1, 4096}, func(float64) float64 { return 1 / 3e12 }),
		Prompts:   curve([]float64{64, 8192}, func(n float64) float64 { return 1 / (100e12 + n*5e10) }),
	}
}

var models = []planner.Model{
	{Name: "a", Layers: 32, Hidden: 4096, Heads: 32, KVHeads: 8, HeadDim: 128, Experts: 8, TopK: 2, ExpertWidth: 14336, Vocab: 32000},
	{Name: "b", Layers: 24, Hidden: 2048, Heads: 16, KVHeads: 16, HeadDim: 128, Experts: 60, TopK: 4, ExpertWidth: 1408, SharedWidth: 5632, Vocab: 151936},
	{Name: "c", Layers: 48, Hidden: 2048, Heads: 32, KVHeads: 4, HeadDim: 128, Experts: 128, TopK: 8, ExpertWidth: 768, Vocab: 151936},
}

// TestFitPredictsOtherModels: from the times of the generic models on a GPU whose costs are known follow
// those of models of other shapes.
func TestFitPredictsOtherModels(t *testing.T) {
	truth := gpu()
	h := planner.Hardware{GPUMemoryRate: 4.6e12, GPUFlops: 800e12}
	var points []compute.Point
	for _, c := range compute.DefaultCases() {
		for i, s := range c.Steps {
			s.Used = c.Model.Distinct(float64(s.Sequences * s.Tokens))
			noise := 1 + 0.004*float64(i%3-1)
			points = append(points, compute.Point{Model: c.Model, Step: s, Seconds: noise * truth.Seconds(c.Model, s)})
		}
	}
	got, fitted, err := compute.Fit(points, &h)
	if err != nil {
		t.Fatal(err)
	}
	if fitted.Median > 0.01 || fitted.Worst > 0.05 {
		t.Errorf("the fit is off by %.2f %% of the points that it was made of, at most %.2f %%; at most 1 and 5 are allowed", 100*fitted.Median, 100*fitted.Worst)
	}
	var errors []float64
	for _, m := range models {
		for _, s := range []planner.ComputeStep{
			{Sequences: 1, Tokens: 1, Context: 90},
			{Sequences: 8, Tokens: 1, Context: 90},
			{Sequences: 64, Tokens: 1, Context: 90},
			{Sequences: 324, Tokens: 1, Context: 90},
			{Sequences: 3240, Tokens: 1, Context: 90},
			{Sequences: 16, Tokens: 1, Context: 2000},
			{Sequences: 1, Tokens: 77, Context: 77, Enqueued: true},
			{Sequences: 100, Tokens: 77, Context: 77, Enqueued: true},
			{Sequences: 2, Tokens: 4000, Context: 4000, Enqueued: true},
		} {
			off := got.Seconds(m, s)/truth.Seconds(m, s) - 1
			errors = append(errors, math.Abs(off))
			if math.Abs(off) > 0.15 {
				t.Errorf("%s, %d sequences of %d tokens: %+.1f %%", m.Name, s.Sequences, s.Tokens, 100*off)
			}
		}
	}
	slices.Sort(errors)
	if m := errors[len(errors)/2]; m > 0.03 {
		t.Errorf("median error %.1f %%, at most 3 are allowed", 100*m)
	}
}

// TestFitWithoutPoints: nothing measured is an error that says so.
func TestFitWithoutPoints(t *testing.T) {
	if _, _, err := compute.Fit(nil, &planner.Hardware{}); err == nil || !strings.Contains(err.Error(), "no steps were measured") {
		t.Error(err)
	}
}

// TestConfig: the configurations have the shapes of the cases.
func TestConfig(t *testing.T) {
	for _, c := range slices.Concat(compute.DefaultCases(), compute.Small(compute.DefaultCases())) {
		data, err := compute.Config(&c.Model)
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Hidden int `json:"hidden_size"`
			Shared int `json:"shared_expert_intermediate_size"`
			Layers int `json:"num_hidden_layers"`
		}
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if got.Hidden != c.Model.Hidden || got.Shared != c.Model.SharedWidth || got.Layers != c.Model.Layers {
			t.Errorf("%s: %s", c.Model.Name, data)
		}
		if err := c.Model.Validate(); err != nil {
			t.Error(err)
		}
	}
}
