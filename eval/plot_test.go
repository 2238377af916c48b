package eval

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
)

// predicted are results as a sweep has them, of Mixtral on an H200, with predictions
// only.
func predicted(t *testing.T, requests int, onDemand, calibrated bool, fractions ...float64) ([]Result, *Info) {
	t.Helper()
	h, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	if !calibrated {
		h.Compute = nil // rates alone
	}
	info := &Info{
		Machine: Machine{Device: "H200", Hardware: &Hardware{Hardware: h, Comparable: true}}, StepTokens: 32768,
		Shape: planner.Model{
			Layers: 32, Hidden: 4096, Vocab: 32000, Heads: 32, KVHeads: 8, HeadDim: 128,
			Experts: 8, TopK: 2, ExpertWidth: 14336, Window: 4096,
		},
	}
	if onDemand {
		info.OnDemandTokens = requests
	}
	var results []Result
	for _, c := range Cells(fractions, []configs.Tier{configs.HostTier, configs.PeerTier}, 1) {
		r := Result{
			Model: "mixtral", Machine: info.Machine, Requests: requests, MicroBatchTokens: requests, NumMicroBatches: 1, ExpertGrouping: configs.PerLayer, Attention: configs.OnGPU,
			Tier: c.Tier, OffloadFraction: c.Fraction, PromptTokens: 77 * requests, GeneratedTokens: 32 * requests, DecodeTokS: 1,
		}
		if r.plan(info); r.Prediction == nil {
			t.Fatalf("no prediction of %+v", c)
		}
		results = append(results, r)
	}
	return results, info
}

// The curve drawn from a sweep of three fractions is what the planner predicts at all.
func TestPredictedCurve(t *testing.T) {
	for _, c := range []struct {
		requests   int
		onDemand   bool
		calibrated bool
	}{{3240, false, false}, {324, false, false}, {1, true, false}, {3240, false, true}, {324, false, true}, {1, true, true}} {
		sparse, _ := predicted(t, c.requests, c.onDemand, c.calibrated, 0, 0.5, 1)
		var dense []float64
		for n := range 257 { // an expert each
			dense = append(dense, float64(n)/256)
		}
		all, _ := predicted(t, c.requests, c.onDemand, c.calibrated, dense...)
		for _, tier := range []configs.Tier{configs.HostTier, configs.PeerTier} {
			curve := predictedCurve(sparse, Cell{Tier: tier})
			if curve[0].X != 0 || curve[len(curve)-1].X != 100 {
				t.Fatalf("%d requests, %s: from %v to %v", c.requests, tier, curve[0].X, curve[len(curve)-1].X)
			}
			for _, r := range ofLine(all, Cell{Tier: tier}) {
				x := 100 * r.OffloadFraction
				at := 1
				for at < len(curve)-1 && (curve[at].X < x || curve[at].X == curve[at-1].X && x > 0) {
					at++
				}
				a, b := curve[at-1], curve[at]
				drawn := a.Y + (b.Y-a.Y)*(x-a.X)/(b.X-a.X)
				if math.Abs(drawn/r.Prediction.DecodeTokS-1) > 0.01 {
					t.Errorf("%d requests, %s at %.1f %%: drawn at %.1f, predicted %.1f", c.requests, tier, x, drawn, r.Prediction.DecodeTokS)
				}
			}
		}
	}
}

// The curve goes through its saturation point, which is where its tag stands.
func TestSaturationPoint(t *testing.T) {
	results, _ := predicted(t, 3240, false, false, 0, 0.5, 1)
	chart := sweepFigure(results)
	if len(chart.Tags) != 2 {
		t.Fatalf("%+v", chart.Tags)
	}
	for i, tier := range []configs.Tier{configs.HostTier, configs.PeerTier} {
		tag, through := chart.Tags[i], false
		for _, p := range predictedCurve(results, Cell{Tier: tier}) {
			through = through || p.X == tag.X && p.Y == results[0].Prediction.DecodeTokS
		}
		if want := fmt.Sprintf("%s: saturation point %.1f %%", tier, tag.X); !through || tag.Name != want {
			t.Errorf("%+v: on the curve: %v; want %q", tag, through, want)
		}
	}
	// Steps that fetch what their router chose hide nothing.
	results, _ = predicted(t, 1, true, false, 0, 0.5, 1)
	if chart = sweepFigure(results); len(chart.Tags) != 0 {
		t.Errorf("%+v", chart.Tags)
	}
	// Without predictions lines join the points.
	for i := range results {
		results[i].Prediction = nil
	}
	for _, s := range sweepFigure(results).Panels[0].Series {
		if !s.Line || !s.Marks || !strings.Contains(s.Name, "measured") {
			t.Errorf("%+v", s)
		}
	}
}

// A sweep of fraction 0 alone has its point.
func TestNothingOffloaded(t *testing.T) {
	results, _ := predicted(t, 324, false, false, 0)
	series := sweepFigure(results).Panels[0].Series
	if len(series) != 1 || series[0].Name != "nothing offloaded, measured" || len(series[0].Points) != 1 || !series[0].Marks {
		t.Errorf("%+v", series)
	}
}

// One trial has no deviation.
func TestMeasuredPoints(t *testing.T) {
	two := 2.0
	r := []Result{
		{Tier: configs.HostTier, OffloadFraction: 0.5, DecodeTokS: 9, DecodeStddevTokS: &two, Trials: make([]Trial, 2)},
		{Tier: configs.PeerTier, OffloadFraction: 0.5, DecodeTokS: 11, DecodeStddevTokS: &two, Trials: make([]Trial, 2)},
		{Tier: configs.NoTier, DecodeTokS: 20, Trials: make([]Trial, 1)},
	}
	p := measuredPoints(r, Cell{Tier: configs.HostTier})
	if len(p) != 2 || p[0].X != 0 || p[0].Y != 20 || p[0].Deviation != 0 || p[1].X != 50 || p[1].Y != 9 || p[1].Deviation != 2 {
		t.Errorf("%+v", p)
	}
}

// Models' experts are as large as their presets say, and each is measured by default.
func TestExpertSizes(t *testing.T) {
	sizes := map[int64]bool{}
	for _, n := range DefaultSizes() {
		sizes[n] = true
	}
	presets := map[string]bool{}
	for _, e := range expertSizes {
		presets[e.preset] = true
		data, ok := configs.Preset(e.preset)
		if !ok {
			t.Errorf("there is no preset %s", e.preset)
			continue
		}
		var c struct {
			Hidden   int64  `json:"hidden_size"`
			Expert   int64  `json:"moe_intermediate_size"`
			Other    int64  `json:"intermediate_size"`
			DataType string `json:"torch_dtype"`
		}
		if err := json.Unmarshal(data, &c); err != nil {
			t.Fatal(err)
		}
		if c.Expert == 0 {
			c.Expert = c.Other
		}
		if want := 3 * c.Hidden * c.Expert * 2; e.bytes != want || !sizes[want] {
			t.Errorf("%s: %d bytes, want %d; measured: %v", e.preset, e.bytes, want, sizes[want])
		}
	}
	for _, name := range configs.PresetNames() {
		if !presets[name] {
			t.Errorf("preset %s is in no figure", name)
		}
	}
}

func TestTransferFigure(t *testing.T) {
	r := &TransferResult{Machine: Machine{Device: "NVIDIA H200"}}
	for _, n := range []int64{1 << 20, 336 << 20} {
		r.Points = append(r.Points,
			TransferPoint{Path: HostPath, Bytes: n, LatencySeconds: float64(n) / 50e9}, TransferPoint{Path: PeerPath, Bytes: n, LatencySeconds: float64(n) / 400e9},
			TransferPoint{Path: D2HPath, Bytes: n, LatencySeconds: float64(n) / 50e9})
	}
	chart := transferFigure(r)
	if len(chart.Tags) != 1 || chart.Tags[0].Name != "Mixtral-8x7B, 336 MiB: 8.0×" || chart.Tags[0].X != 336 {
		t.Errorf("%+v", chart.Tags)
	}
	if len(chart.Panels) != 2 || len(chart.Panels[0].Series) != 3 || len(chart.Panels[1].Series) != 1 || chart.Panels[1].Series[0].Points[0].Y != 8 {
		t.Errorf("%+v", chart.Panels)
	}
	if chart.Title != "Copy latency to and from NVIDIA H200" {
		t.Error(chart.Title)
	}
	// Nor of emulated devices without rates, which copy as fast as this CPU does.
	unpaced := *r
	unpaced.Machine = Machine{Device: "emulated", Emulated: true, Emulation: &Emulation{Rates: RatesNone}}
	if chart = transferFigure(&unpaced); len(chart.Panels) != 1 || chart.Tags[0].Name != "Mixtral-8x7B, 336 MiB" || strings.Contains(chart.Note, "×") {
		t.Errorf("%+v", chart)
	}
	unpaced.Emulation = &Emulation{Rates: RatesPaced}
	if chart = transferFigure(&unpaced); len(chart.Panels) != 2 {
		t.Errorf("%+v", chart)
	}
	// Without a peer there is no ratio.
	alone := &TransferResult{Machine: Machine{Device: "emulated", Emulated: true}}
	for _, p := range r.Points {
		if p.Path != PeerPath {
			alone.Points = append(alone.Points, p)
		}
	}
	chart = transferFigure(alone)
	if len(chart.Panels) != 1 || chart.Tags[0].Name != "Mixtral-8x7B, 336 MiB" || !strings.Contains(chart.Note, "emulated") || strings.Contains(chart.Note, "×") {
		t.Errorf("%+v", chart)
	}
}

// Batches of one size stand in the note, others with their models.
func TestGainsFigure(t *testing.T) {
	gains := []Gain{{Model: "a", Requests: 324, Decode: 0.5, EndToEnd: -0.25, Emulated: true}, {Model: "b", Requests: 324}}
	chart := gainsFigure(gains)
	if !strings.Contains(chart.Note, "324 requests") || chart.Groups[0].Name != "a, emulated" || chart.Groups[1].Name != "b" || chart.Groups[0].Values[1] != -25 {
		t.Errorf("%+v", chart)
	}
	if got := chart.Value(-25) + " " + chart.Value(50); got != "−25 % +50 %" {
		t.Error(got)
	}
	// Gains of one model on two machines have different labels.
	twice := []Gain{{Model: "a", Requests: 324, Machine: "NVIDIA H100"}, {Model: "a", Requests: 324, Machine: "NVIDIA H200"}, {Model: "b", Requests: 324, Machine: "NVIDIA H200"}}
	if chart := gainsFigure(twice); chart.Groups[0].Name != "a, NVIDIA H100" || chart.Groups[1].Name != "a, NVIDIA H200" || chart.Groups[2].Name != "b" {
		t.Errorf("%+v", chart.Groups)
	}
	gains[1].Requests, gains[1].Emulated = 1, true
	chart = gainsFigure(gains)
	if !strings.Contains(chart.Note, "emulated") || chart.Groups[0].Name != "a, 324 requests" || chart.Groups[1].Name != "b, 1 request" {
		t.Errorf("%+v", chart)
	}
}

// Where the CPU computes attention, it does so for prompts, too: their prediction is bound by it.
func TestPredictedCPUAttention(t *testing.T) {
	results, info := predicted(t, 4536, false, true, 0)
	r := results[0]
	onGPU := *r.Prediction
	r.Attention, r.MicroBatchTokens, r.NumMicroBatches = configs.OnCPU, 324, 14
	r.plan(info)
	if got := r.Prediction; got.PrefillBound != string(planner.BoundCPU) || got.Bound != string(planner.BoundCPUMemory) || got.PrefillSeconds < 2*onGPU.PrefillSeconds {
		t.Errorf("prefill of %.1f s bound by %s, decode by %s; with attention on the GPU %.1f s", got.PrefillSeconds, got.PrefillBound, got.Bound, onGPU.PrefillSeconds)
	}
}
