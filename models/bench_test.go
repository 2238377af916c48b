package models

import (
	"testing"

	"github.com/moeserve/moeserve/models/safetensors"
)

func BenchmarkLoad(b *testing.B) {
	c := mustParse(b, "qwen2_moe", map[string]any{"hidden_size": 512, "moe_intermediate_size": 768, "vocab_size": 4096, "num_experts": 64})
	files, err := safetensors.Open(save(b, c, 0))
	check(b, err)
	defer func() { check(b, files.Close()) }()
	for name, src := range map[string]Source{"checkpoint": NewCheckpoint(files), "dummy": NewDummy(c, 1)} {
		b.Run("source="+name, func(b *testing.B) {
			l, err := NewLayout(c, src, nil)
			check(b, err)
			b.SetBytes(l.Bytes + l.ExpertBytes)
			b.ReportAllocs()
			for b.Loop() {
				check(b, Load(b.Context(), src, l, &toucher{}, nil))
			}
		})
	}
}

func BenchmarkNewLayout(b *testing.B) {
	c := preset(b, "qwen3-30b-a3b")
	src := NewDummy(c, 0)
	for b.Loop() {
		_, err := NewLayout(c, src, nil)
		check(b, err)
	}
}
