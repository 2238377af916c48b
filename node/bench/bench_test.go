package bench_test

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// BenchmarkBatchDecode is the host's work for a decode step of a large batch: one layer
// of a preset, on a machine that keeps no data and whose clock is virtual.
func BenchmarkBatchDecode(b *testing.B) {
	const prompt, newTokens = 77, 32
	for _, c := range []struct {
		model     string
		sequences int
	}{{"phi-3.5-moe", 3240}, {"phi-3.5-moe", 4536}} {
		b.Run(fmt.Sprintf("model=%s/sequences=%d", c.model, c.sequences), func(b *testing.B) {
			s := configs.Defaults()
			s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.KV.MaxModelLen = c.model, configs.LoadDummy, 1, 1024
			s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.KV.NumGPUBlocksOverride = 8192, c.sequences, c.sequences*((prompt+newTokens+15)/16)
			n, err := node.Open(b.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
				return emulated.New(emulated.Options{
					Virtual: true, NoData: true,
					GPUs: []emulated.GPU{{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.8e12}},
				})
			}})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := n.Close(); err != nil {
					b.Error(err)
				}
			}()
			prompts := make([][]int32, c.sequences)
			for i := range prompts {
				prompts[i] = make([]int32, prompt)
			}
			batch, err := bench.NewBatch(n, prompts, newTokens)
			if err != nil {
				b.Fatal(err)
			}
			defer batch.Close()
			if err := batch.Prefill(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for at := 1; b.Loop(); at = at%(newTokens-1) + 1 {
				if err := batch.Decode(b.Context(), at, at+1); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
