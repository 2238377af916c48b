package planner

import (
	"math"
	"testing"
)

// A step that only decodes takes as long as its roofline; prompt tokens beside it take less than
// by themselves, as the weights are read once; and no step is faster for having more to do.
func TestMixedSeconds(t *testing.T) {
	h, err := HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	m := presetModel(t, "qwen1.5-moe-a2.7b").EnsureDefaults()
	const sequences, context = 324, 192
	decode := MixedStep{Decodes: sequences, DecodeContext: sequences * context}
	alone := MixedSeconds(&m, &h, decode)
	roofline := Rooflines(m, h, RooflineCase{Batch: sequences, Context: context})
	if math.Abs(alone-roofline.Compute) > 1e-9 {
		t.Errorf("a decode step takes %v, its roofline is %v", alone, roofline.Compute)
	}
	last := alone
	for tokens := 1.0; tokens <= 8192; tokens *= 2 {
		mixed := decode
		mixed.PromptTokens = tokens
		together, prompts := MixedSeconds(&m, &h, mixed), MixedSeconds(&m, &h, MixedStep{PromptTokens: tokens})
		if together < last || together > alone+prompts {
			t.Errorf("%v prompt tokens: %v beside decodes, %v alone, decodes %v, with half as many %v", tokens, together, prompts, alone, last)
		}
		last = together
	}
	// Below the knee prompts are nearly free, above it they are not.
	few, many := decode, decode
	few.PromptTokens, many.PromptTokens = 256, 8192
	if few, many := MixedSeconds(&m, &h, few), MixedSeconds(&m, &h, many); few > 1.25*alone || many < 3*alone {
		t.Errorf("decodes take %v, with 256 prompt tokens %v, with 8192 %v", alone, few, many)
	}
	// Copies of all experts hide the rest; a longer context does not.
	offloaded := decode
	offloaded.Fraction, offloaded.Rate = 1, 55e9
	copies := m.Distinct(sequences) * float64(m.MoELayers()) * float64(m.ExpertBytes()) / 55e9
	if got := MixedSeconds(&m, &h, offloaded); math.Abs(got-copies) > 1e-9 {
		t.Errorf("with all experts copied %v, want %v", got, copies)
	}
	long := MixedStep{PromptTokens: 2048, PromptContext: 1 << 17}
	if short := MixedSeconds(&m, &h, MixedStep{PromptTokens: 2048}); MixedSeconds(&m, &h, long) < 2*short {
		t.Error("a context of 131,072 tokens takes no time")
	}
	if got := MixedSeconds(&m, &h, MixedStep{}); got != 0 {
		t.Errorf("an empty step takes %v", got)
	}
}
