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
