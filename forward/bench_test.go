package forward

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models"
)

// BenchmarkPack is what the host does for a decode step's row data.
func BenchmarkPack(b *testing.B) {
	data, _ := configs.Preset("mixtral-8x7b")
	c, err := models.ParseConfig(data, "mixtral-8x7b")
	check(b, err)
	for _, shape := range [][2]int{{324, 100}, {324, 4000}, {4536, 100}} {
		sequences, context := shape[0], shape[1]
		limits := Limits{MaxTokens: sequences, MaxSeqs: sequences, MaxLogits: sequences, MaxModelLen: 8192, BlockTokens: 16}
		dst := make([]byte, StepUploadBytes(limits, 1))
		blocks := make([]int32, context/16+1)
		ids := []int32{7}
		h := NewHostBatch(c, limits)
		b.Run(fmt.Sprintf("sequences=%d/context=%d", sequences, context), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				h.Reset(0, 0, 0)
				for range sequences {
					row, err := h.Append(&Sequence{IDs: ids, Start: context - 1, Blocks: blocks})
					if err == nil {
						_, err = h.Sample(row, &SamplingParams{Seed: 9, Position: int32(context)})
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				_, _, err := h.Pack(dst, 256)
				check(b, err)
			}
		})
	}
}
