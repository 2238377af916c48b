package paper_test

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/eval/paper"
)

func TestReadMemory(t *testing.T) {
	a, b := device.HBM(0), device.HBM(1)
	trace := tenants.Trace{{At: 0, Peer: a, Bytes: 10}, {At: 0, Peer: b, Bytes: 0}, {At: 90 * time.Minute, Peer: a, Bytes: 60}, {At: 3 * time.Hour, Peer: b, Bytes: 900}}
	m, err := paper.ReadMemory("m", trace, map[device.Space]int64{a: 100, b: 200}, time.Hour, 3*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	// a: 10, 10, 60, 60 %; b: 0, 0, 0 % and more than it has.
	if m.Machines != 2 || m.Snapshots != 8 || m.AtMost20 != 5./8 || m.AtMost50 != 5./8 || m.EverySeconds != 3600 {
		t.Errorf("%+v", m)
	}
	if x := m.Over[3]; x.Seconds != 3*3600 || math.Abs(x.Mean-0.8) > 1e-9 || x.Median != 0.6 || x.P90 != 1 {
		t.Errorf("%+v", m.Over)
	}
	chart, err := paper.Figure2([]*paper.Memory{m})
	if err != nil {
		t.Fatal(err)
	}
	s := chart.Panels[0].Series
	if len(s) != 2 || s[0].Points[0].Y != 37.5 || s[0].Points[10].Y != 62.5 || s[0].Points[59].Y != 62.5 || s[0].Points[60].Y != 87.5 || s[0].Points[100].Y != 100 {
		t.Errorf("%+v", s)
	}
	if p := s[1].Points; len(p) != 2 || p[0] != (figure.Point{X: 20, Y: 68}) || p[1] != (figure.Point{X: 50, Y: 87}) {
		t.Errorf("the paper's numbers: %+v", p)
	}
	over, err := paper.Figure2OverTime([]*paper.Memory{m, m})
	if err != nil || len(over.Panels) != 2 || over.Panels[1].Series[0].Points[3] != (figure.Point{X: 3, Y: 80}) {
		t.Errorf("%+v, %v", over, err)
	}
	var svg bytes.Buffer
	if err := errors.Join(chart.Write(&svg, "svg"), over.Write(&svg, "svg")); err != nil {
		t.Error(err)
	}
	for name, f := range map[string]func() error{
		"no time between snapshots": func() error { _, err := paper.ReadMemory("m", trace, nil, 0, time.Hour); return err },
		"memory not known":          func() error { _, err := paper.ReadMemory("m", trace, nil, time.Hour, time.Hour); return err },
		"no sample": func() error {
			_, err := paper.ReadMemory("m", nil, nil, time.Hour, time.Hour)
			return err
		},
		"no trace": func() error { _, err := paper.Figure2(nil); return err },
	} {
		if err := f(); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// measured is a machine with a GPU, predicted one on a virtual clock.
var (
	measured  = eval.Machine{Device: "NVIDIA H200"}
	predicted = eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Spec: "virtual,pcie=55GB/s,nvlink=395GB/s", Rates: eval.RatesVirtual}}
)

func TestFigure3(t *testing.T) {
	r := &eval.TransferResult{Machine: measured, Run: eval.Run{Commit: "0123456789abcdef"}}
	for path, factor := range map[string]float64{eval.HostPath: 6, eval.PeerPath: 1} {
		r.Points = append(r.Points, eval.TransferPoint{Path: path, Bytes: 336 << 20, LatencySeconds: factor}, eval.TransferPoint{Path: path, Bytes: 33 << 19, LatencySeconds: factor / 2})
	}
	chart, err := paper.Figure3(r)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]float64{}
	for _, g := range chart.Groups {
		name, _, _ := strings.Cut(g.Name, ",")
		got[name] = g.Values
	}
	if len(got) != 3 || got["Mixtral-8x7B"][0] != 6 || got["Mixtral-8x7B"][1] != 9.5 || got["Qwen1.5-MoE"][0] != 6 || !math.IsNaN(got["Qwen1.5-MoE"][1]) ||
		!math.IsNaN(got["Phi-tiny-MoE"][0]) || got["Phi-tiny-MoE"][1] != 7.5 {
		t.Errorf("%v", got)
	}
	if !strings.Contains(chart.Note, "Measured on NVIDIA H200, 0123456789ab") {
		t.Error(chart.Note)
	}
	var svg bytes.Buffer
	if err := chart.Write(&svg, "svg"); err != nil || strings.Contains(svg.String(), "NaN") {
		t.Errorf("%v: a bar without a value is drawn", err)
	}
	r.Machine = eval.Machine{Emulated: true}
	if _, err := paper.Figure3(r); !errors.Is(err, eval.ErrInput) {
		t.Errorf("of devices without rates: %v", err)
	}
}

// results are a sweep of a model: rates by tier and fraction.
func results(model string, m eval.Machine) []eval.Result {
	var all []eval.Result
	for _, c := range []struct {
		tier     configs.Tier
		fraction float64
		rate     float64
	}{{configs.NoTier, 0, 400}, {configs.PeerTier, 1, 300}, {configs.HostTier, 0.5, 100}, {configs.PeerTier, 0.5, 350}, {configs.HostTier, 1, 50}} {
		all = append(all, eval.Result{
			Model: model, Machine: m, Requests: 4536, NumMicroBatches: 14, Tier: c.tier, OffloadFraction: c.fraction, DecodeTokS: c.rate, ThroughputTokS: c.rate / 2,
		})
	}
	return all
}

func TestExperts(t *testing.T) {
	both := append(results("mixtral-8x7b", predicted), results("phi-3.5-moe", predicted)...)
	bars, err := paper.Figure5(both)
	if err != nil {
		t.Fatal(err)
	}
	if g := bars.Groups; len(g) != 4 || g[0].Name != "mixtral-8x7b" || math.Abs(g[0].Values[0]-250) > 1e-9 || math.Abs(g[2].Values[2]-48) > 1e-9 || math.Abs(g[3].Values[2]-110) > 1e-9 {
		t.Errorf("%+v", g)
	}
	lines, err := paper.Figure6(both)
	if err != nil {
		t.Fatal(err)
	}
	for _, note := range []string{bars.Note, lines.Note} {
		for _, want := range []string{"Predicted, in virtual time, of pcie=55GB/s, nvlink=395GB/s;", "batches of 4536 sequences in 14 micro-batches", "The paper: 2 H100"} {
			if !strings.Contains(note, want) {
				t.Errorf("%s\nhas not %s", note, want)
			}
		}
	}
	p := lines.Panels
	if len(p) != 4 || p[1].Title != "phi-3.5-moe" || len(p[1].Series) != 2 {
		t.Fatalf("%+v", p)
	}
	for tier, want := range [][]figure.Point{{{X: 0, Y: 400}, {X: 50, Y: 350}, {X: 100, Y: 300}}, {{X: 0, Y: 400}, {X: 50, Y: 100}, {X: 100, Y: 50}}} {
		for i, q := range p[1].Series[tier].Points {
			if q != want[i] {
				t.Errorf("%+v, want %+v", p[1].Series[tier].Points, want)
			}
		}
	}
	if q := p[2].Series; q[0].Points[1].Y != 975 || q[1].Points[0].Y != 810 || !strings.Contains(p[3].Title, "below 600") {
		t.Errorf("the paper's numbers: %+v", p[2:])
	}
	other := results("b", measured)
	other[0].Attention = configs.OnCPU
	later := results("b", measured)
	later[0].Run.Commit = "f00"
	if lines, err := paper.Figure6(append(results("a", measured), later...)); err != nil || !strings.Contains(lines.Note, "and other commits") {
		t.Errorf("%+v, %v", lines, err)
	}
	varied := results("a", measured)
	for i := range varied {
		varied[i].Setting = "harvest-slab-size=64MiB"
	}
	if lines, err := paper.Figure6(varied); err != nil || !strings.Contains(lines.Note, "harvest-slab-size=64MiB") {
		t.Errorf("of one value of a varied setting: %+v, %v", lines, err)
	}
	rates := predicted
	rates.Emulation = &eval.Emulation{Spec: "virtual,pcie=25GB/s,nvlink=395GB/s", Rates: eval.RatesVirtual}
	for name, r := range map[string][]eval.Result{
		"two GPUs":                       append(results("a", measured), results("b", eval.Machine{Device: "NVIDIA L4"})...),
		"two predicted machines":         append(results("a", predicted), results("b", rates)...),
		"two values of a varied setting": append(results("a", measured), varied...),
		"two settings":                   append(results("a", measured), other...),
		"nothing":                        nil,
		"measured and predicted":         append(results("a", measured), results("b", predicted)...),
		"without rates":                  results("a", eval.Machine{Emulated: true}),
		"no peer":                        results("a", measured)[:1],
	} {
		_, err5 := paper.Figure5(r)
		_, err6 := paper.Figure6(r)
		if name == "no peer" {
			err6 = eval.ErrInput // nothing offloaded can be drawn
		}
		if !errors.Is(err5, eval.ErrInput) || !errors.Is(err6, eval.ErrInput) {
			t.Errorf("%s: %v, %v", name, err5, err6)
		}
	}
}
