package engine_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// storing runs steps that compute nothing, in each of which a store ends, if one is under way. It sums
// up the wall time between its steps.
type storing struct {
	idleStepper
	tiers   *offload.Tiers // nil: none
	ended   time.Time
	between time.Duration
}

func (s *storing) Step(ctx context.Context, step *pipeline.Step) (r pipeline.Result, err error) {
	if !s.ended.IsZero() {
		s.between += time.Since(s.ended)
	}
	if s.tiers != nil {
		step.Meanwhile()
		err = s.tiers.Wait(ctx)
	}
	r, failed := s.idleStepper.Step(ctx, step)
	s.ended = time.Now()
	return r, errors.Join(err, failed)
}

// BenchmarkMiss is what the engine does between the steps of a prompt of 32,000 tokens, which it
// computes and stores in a tier, for the first time or in place of others.
func BenchmarkMiss(b *testing.B) {
	const tokens, blockTokens = 32000, 16
	for _, c := range []struct {
		name   string
		config offload.Config
		room   int // prompts that the tier has room for
	}{
		{"none", offload.Config{}, 1},
		{"host", offload.Config{}, 1 << 20},
		{"host", offload.Config{}, 2},
		{"peer", offload.Config{}, 1 << 20},
		{"peer", offload.Config{}, 2},
	} {
		name := fmt.Sprintf("tier=%s/full=%t", c.name, c.room == 2)
		b.Run(name, func(b *testing.B) {
			ok := func(err error) {
				b.Helper()
				if err != nil {
					b.Fatal(err)
				}
			}
			blocks := (min(c.room, 200) * tokens) / blockTokens
			switch c.name {
			case "host":
				c.config.CPUBlocks = blocks
			case "peer":
				c.config.GPUBlocks = blocks
			}
			m, err := emulated.New(emulated.Options{
				Virtual: true, NoData: true, GPUs: []emulated.GPU{{MemoryBytes: 64 << 30}, {MemoryBytes: 1 << 40}}, Host: emulated.GPU{MemoryBytes: 1 << 40},
				HostLink: emulated.Link{BytesPerSecond: 50e9}, PeerLink: emulated.Link{BytesPerSecond: 200e9},
			})
			ok(err)
			copies, err := transfer.New(transfer.Options{Machine: m})
			ok(err)
			shape := kvcache.Shape{Layers: 8, KVHeads: 8, HeadDim: 128, DType: kernels.BF16, BlockTokens: blockTokens}
			pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Shape: shape, Blocks: 2 * tokens / blockTokens})
			ok(err)
			lender, err := harvest.New(harvest.Options{
				Machine: m, Peers: []device.Space{device.HBM(1)}, HeadroomBytes: -1,
				Clients: map[string]harvest.ClientOptions{offload.HarvestClient: {SlabBytes: 16 * shape.BlockBytes()}},
			})
			ok(err)
			kv := cache(b, 2*tokens/blockTokens)
			step := &storing{}
			o := engine.Options{Pipeline: step, KV: kv, MaxModelLen: tokens + 2, MaxNumBatchedTokens: 2048, Vocab: 1 << 15, Clock: m.Now}
			var tiers *offload.Tiers
			if c.name != "none" {
				tiers, err = offload.New(offload.Options{Machine: m, Space: device.HBM(0), Pool: pool, Blocks: kv, Transfer: copies, Harvest: lender, Config: c.config})
				ok(err)
				o.Offload, step.tiers = tiers, tiers
			}
			e := newEngine(b, o)
			n := 0
			run := func() {
				n++
				p := prompt(n, tokens, 1<<15)
				p[0] = int32(n)
				_, err := e.Generate(b.Context(), []engine.Request{{Prompt: p, Params: params(1)}}, nil)
				ok(err)
			}
			for range 3 {
				run()
			}
			step.between = 0
			b.ReportAllocs()
			for b.Loop() {
				step.ended = time.Time{}
				run()
			}
			b.ReportMetric(float64(step.between.Nanoseconds())/float64(b.N), "ns-between/op")
			if tiers != nil {
				for _, s := range tiers.Stats() {
					if s.Stored < int64(n)*tokens/blockTokens*9/10 {
						b.Errorf("%+v", s)
					}
				}
				ok(lender.Close(b.Context()))
				ok(tiers.Close())
			}
		})
	}
}
