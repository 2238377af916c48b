package pipeline

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
)

// BenchmarkSplit measures the host's work for a large decode step before the device can
// start: splitting the step and packing its metadata.
func BenchmarkSplit(b *testing.B) {
	const context, block = 100, 16
	text, _ := configs.Preset("phi-3.5-moe")
	c, err := models.ParseConfig(text, "config.json")
	check(b, err)
	for _, n := range []int{324, 3240, 4536} {
		for _, micro := range []int{1, 4} {
			b.Run(fmt.Sprintf("sequences=%d/micro-batches=%d", n, micro), func(b *testing.B) {
				l := forward.Limits{MaxTokens: n, MaxSeqs: n, MaxLogits: n, MaxModelLen: 1024, BlockTokens: block}
				o := Options{Limits: l, MicroBatches: micro}
				batches := newBatcher(&o, func() forward.HostBatch { return forward.NewHostBatch(c, l) })
				dst := make([]byte, o.StepMetadataBytes(o.config(), l))
				kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: n * (context + block) / block, BlockTokens: block})
				check(b, err)
				step := &Step{Sequences: make([]Sequence, n)}
				for i := range step.Sequences {
					t := kv.NewTable()
					reserve(b, t, context)
					step.Sequences[i] = Sequence{
						Tokens: []int32{int32(i)}, Start: context - 1, Table: t, LogitRows: 1, SamplingParams: SamplingParams{Sample: int32(i)},
					}
				}
				b.ReportAllocs()
				for b.Loop() {
					check(b, batches.split(step, n, &Shape{MicroBatches: micro}))
					used := int64(0)
					for i := range batches.used() {
						_, bytes, err := batches.all[i].host.Pack(dst[used:], 256)
						check(b, err)
						used += bytes
					}
				}
			})
		}
	}
}
