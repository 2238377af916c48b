package engine_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
)

// instant runs steps in no time, so that what is left is the engine between them.
type instant struct{ sampled []int32 }

func (s *instant) Step(_ context.Context, step *pipeline.Step) (pipeline.Result, error) {
	s.sampled = s.sampled[:0]
	for i := range step.Sequences {
		if step.Sequences[i].LogitRows > 0 {
			s.sampled = append(s.sampled, int32(i))
		}
	}
	return pipeline.Result{Sampled: s.sampled}, nil
}

// BenchmarkBetweenSteps is a decode step of the engine without the pipeline's part.
func BenchmarkBetweenSteps(b *testing.B) {
	for _, sequences := range []int{1, 324} {
		b.Run(fmt.Sprintf("sequences=%d", sequences), func(b *testing.B) {
			m, err := emulated.Open(emulated.Options{})
			if err != nil {
				b.Fatal(err)
			}
			const length = 2048
			kv, err := kvcache.New(kvcache.Options{Machine: m, Space: device.HBM(0), Blocks: sequences * length / 16, Shape: kvcache.Shape{
				Layers: 1, KVHeads: 1, HeadDim: 8, DType: kernels.F32, BlockTokens: 16,
			}})
			if err != nil {
				b.Fatal(err)
			}
			e := engine.New(engine.Options{Pipeline: &instant{}, KV: kv, MaxModelLen: length, MaxNumSeqs: sequences, MaxNumBatchedTokens: 8192, Vocab: 1 << 15})
			ctx, cancel := context.WithCancel(b.Context())
			b.ReportAllocs()
			steps := 0
			for b.Loop() {
				if steps == 0 {
					b.StopTimer()
					for range sequences {
						p := params(length - 16)
						if _, err := e.Submit(ctx, engine.Request{Prompt: prompt(1, 16, 1<<15), Params: p}); err != nil {
							b.Fatal(err)
						}
					}
					steps = length - 16
					if _, err := engine.Turn(e, ctx); err != nil {
						b.Fatal(err)
					}
					steps--
					b.StartTimer()
				}
				if _, err := engine.Turn(e, ctx); err != nil {
					b.Fatal(err)
				}
				steps--
			}
			cancel()
			if err := kv.Close(); err != nil {
				b.Error(err)
			}
			if err := m.Close(); err != nil {
				b.Error(err)
			}
		})
	}
}
