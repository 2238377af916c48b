package models

import (
	"fmt"
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

// BenchmarkPack is what the host does for a decode step's row data.
func BenchmarkPack(b *testing.B) {
	c := preset(b, "mixtral-8x7b")
	for _, shape := range [][2]int{{324, 100}, {324, 4000}, {4536, 100}} {
		sequences, context := shape[0], shape[1]
		m := &Model{Config: c, Limits: Limits{MaxRows: sequences, MaxSeqs: sequences, MaxLogits: sequences, MaxModelLen: 8192, BlockTokens: 16}}
		dst := make([]byte, BatchBytes(m.Limits))
		blocks := make([]int32, context/16+1)
		ids := []int32{7}
		var h HostBatch
		b.Run(fmt.Sprintf("sequences=%d/context=%d", sequences, context), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				h.Reset(0, 0)
				for range sequences {
					row, err := m.Append(&h, &Sequence{IDs: ids, Start: context - 1, Blocks: blocks})
					if err == nil {
						_, err = m.Draw(&h, row, &Draw{Seed: 9, Position: int32(context)})
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				_, _, err := PackBatch(&h, dst, 256)
				check(b, err)
			}
		})
	}
}
