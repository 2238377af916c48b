package planner

import (
	"math"
	"testing"
)

// rooflineTable is the maximum decode throughput on an H200, in tokens/s, with a mean
// context of 93 tokens: all experts in HBM, half of them fetched from the host over
// one and over two paths, half and all of them from a peer, all from peer and host
// together. Its figures are rounded to three or four digits.
var rooflineTable = []struct {
	model  string
	rows   int
	groups int
	tokS   [6]float64
}{
	{"mixtral-8x7b", 324, 1, [6]float64{14_500, 397, 740, 2_840, 1_420, 1_620}},
	{"mixtral-8x7b", 3240, 1, [6]float64{28_200, 3_970, 7_400, 28_200, 14_200, 16_200}},
	{"mixtral-8x7b", 4536, 1, [6]float64{28_200, 5_560, 10_360, 28_200, 19_900, 22_600}},
	{"mixtral-8x7b", 4536, 14, [6]float64{14_500, 5_560, 10_360, 14_500, 14_500, 14_500}},
	{"phi-3.5-moe", 324, 1, [6]float64{16_200, 445, 829, 3_180, 1_590, 1_810}},
	{"phi-3.5-moe", 3240, 1, [6]float64{50_400, 4_450, 8_290, 31_800, 15_900, 18_100}},
	{"phi-3.5-moe", 4536, 1, [6]float64{50_400, 6_230, 11_600, 44_500, 22_200, 25_400}},
	{"phi-3.5-moe", 4536, 14, [6]float64{16_200, 6_230, 11_600, 16_200, 16_200, 16_200}},
	{"phi-tiny-moe", 4536, 1, [6]float64{201_000, 89_000, 166_000, 201_000, 201_000, 201_000}},
	{"qwen1.5-moe-a2.7b", 324, 1, [6]float64{39_500, 1_440, 2_680, 10_270, 5_140, 5_860}},
	{"qwen1.5-moe-a2.7b", 4536, 1, [6]float64{96_500, 20_100, 37_500, 96_500, 71_900, 82_000}},
	{"qwen1.5-moe-a2.7b", 4536, 14, [6]float64{39_500, 20_100, 37_500, 39_500, 39_500, 39_500}},
	{"mixtral-8x7b", 1, 1, [6]float64{180, 4.90, 9.14, 35.0, 17.5, 20.0}},
}

// Every cell to 1 %; what is left of it is the table's own rounding.
func TestRooflines(t *testing.T) {
	h := h200(t)
	host, both, peer := h.HostToGPU[0], h.HostToGPU[1], h.PeerToGPU
	columns := [6][2]float64{{0, 0}, {0.5, host}, {0.5, both}, {0.5, peer}, {1, peer}, {1, peer + host}}
	worst := 0.0
	for _, row := range rooflineTable {
		for i, c := range columns {
			f := Rooflines(presetModel(t, row.model), h, RooflineCase{Batch: row.rows, Context: 93, Groups: row.groups, Fraction: c[0], Rate: c[1]})
			off := f.TokS/row.tokS[i] - 1
			worst = math.Max(worst, math.Abs(off))
			if math.Abs(off) > 0.01 {
				t.Errorf("%s, %d tokens in %d groups, column %d: %.5g tokens/s, the table has %.5g (%+.2f %%)", row.model, row.rows, row.groups, i, f.TokS, row.tokS[i], 100*off)
			}
			sum := 0.0
			for _, p := range f.Phases {
				sum += p.Seconds
			}
			if !near(sum, f.Compute, 1e-12) {
				t.Errorf("phases add up to %v s, compute is %v s", sum, f.Compute)
			}
		}
	}
	t.Logf("worst of %d cells: %.2f %%", 6*len(rooflineTable), 100*worst)
	if worst > 0.003 {
		t.Errorf("worst cell is off by %.2f %%: rounding explains less", 100*worst)
	}
}

// Work that can be counted by hand: one layer, all sizes small.
func TestWork(t *testing.T) {
	m := Model{
		Layers: 3, DenseLayers: 1, Hidden: 4, Heads: 2, KVHeads: 1, HeadDim: 3, Experts: 2, TopK: 1, ExpertWidth: 5,
		SharedWidth: 7, DenseWidth: 11, Vocab: 13,
	}.EnsureDefaults()
	// Two rows in two parts: a part of one row touches one expert.
	x := m.work(stepShape{tokens: 2, logits: 1, pairs: 10, kvTokens: 20, projections: 2, experts: 2})
	for phase, want := range map[int][2]float64{
		phaseQKV:         {3 * (2*2*4*12 + 2*2*(4+12)), 3 * 2 * 2 * 4 * 12},
		phaseOutput:      {3 * (2*2*6*4 + 2*2*(4+6)), 3 * 2 * 2 * 6 * 4},
		phaseRouter:      {2 * (2*4*2 + 2*2*4 + 4*2*2), 2 * 2 * 2 * 4 * 2},
		phaseElementwise: {3 * 2 * 2 * (8 + 24 + 16 + 12), 0},
		phaseShared:      {2 * (2*6*4*7 + 2*2*(8+14)), 2 * 6 * 2 * 4 * 7},
		phaseDense:       {2*6*4*11 + 2*2*(8+22), 6 * 2 * 4 * 11},
		phaseUp:          {2 * (4*2*4*5 + 2*2*(4+5)), 2 * 4 * 2 * 4 * 5},
		phaseDown:        {2 * (2*2*4*5 + 2*2*(4+5)), 2 * 2 * 2 * 4 * 5},
		phaseAttention:   {20*3*2*6 + 4*3*2*6, 4 * 10 * 6 * 3},
		phaseHead:        {2*4*13 + 2*4 + 4*13, 2 * 4 * 13},
	} {
		if !near(x[phase].bytes, want[0], 1e-12) || !near(x[phase].flops, want[1], 1e-12) {
			t.Errorf("%s: %v bytes and %v flops, want %v", phaseNames[phase], x[phase].bytes, x[phase].flops, want)
		}
	}
}

// Attention has a rate of its own from LongContext tokens on, where the hardware has one.
func TestLongContext(t *testing.T) {
	m := Model{Layers: 1, Hidden: 4, Heads: 2, KVHeads: 1, HeadDim: 3, Experts: 2, TopK: 1, ExpertWidth: 5, Vocab: 13}.EnsureDefaults()
	h := Hardware{GPUMemoryRate: 1e30, GPUFlops: 1, GPUAttentionFlops: 10, GPULongAttentionFlops: 100}
	other := h
	other.GPULongAttentionFlops = 0
	for context, want := range map[float64]float64{LongContext - 1: 10, LongContext: 100, 1e6: 100} {
		x := m.work(stepShape{tokens: 1, logits: 1, pairs: context, kvTokens: context, context: context, projections: 1, experts: 1})
		for hardware, rate := range map[*Hardware]float64{&h: want, &other: 10} {
			if s, _ := hardware.seconds(phaseAttention, x[phaseAttention]); !near(s, 4*context*6/rate, 1e-12) {
				t.Errorf("%v tokens: %v s, want %v", context, s, 4*context*6/rate)
			}
		}
	}
}
