package node_test

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestPredicted compares what a policy should give with what steps then take, in
// virtual time on devices with the rates that were planned with: full shapes, fewer
// layers. With attention on the CPU the two groups begin and end a step one after the
// other, which weighs more with few layers and is not predicted.
func TestPredicted(t *testing.T) {
	const prompt, tokens = 16, 4
	for _, c := range []struct {
		model    string
		rows     int
		fraction float64
		tier     configs.Tier
		// attention, and micro-batches that run experts each by itself; 0: all at once.
		attention    configs.Place
		microBatches int
	}{
		{"mixtral-8x7b", 324, 0, configs.HostTier, configs.OnGPU, 0},
		{"mixtral-8x7b", 324, 0.5, configs.HostTier, configs.OnGPU, 0},
		{"mixtral-8x7b", 324, 0.5, configs.PeerTier, configs.OnGPU, 0},
		{"mixtral-8x7b", 3240, 0.5, configs.PeerTier, configs.OnGPU, 0},
		{"mixtral-8x7b", 3240, 1, configs.PeerTier, configs.OnGPU, 0},
		{"mixtral-8x7b", 3240, 0, configs.HostTier, configs.OnGPU, 10},
		{"mixtral-8x7b", 324, 0, configs.HostTier, configs.OnCPU, 0},
		{"mixtral-8x7b", 3240, 0.5, configs.PeerTier, configs.OnCPU, 0},
		{"mixtral-8x7b", 3240, 0.5, configs.PeerTier, configs.OnCPU, 10},
		{"qwen1.5-moe-a2.7b", 324, 1, configs.HostTier, configs.OnGPU, 0},
		{"qwen1.5-moe-a2.7b", 324, 0.5, configs.PeerTier, configs.OnGPU, 0},
	} {
		if racedetector.Enabled && c.rows > 1000 {
			continue
		}
		s := configs.Defaults()
		s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.KV.MaxModelLen = c.model, configs.LoadDummy, 6, 128
		s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumSeqs, s.Plan.Policy, s.Batch.Attention = c.fraction, c.tier, c.rows, configs.PlannedPolicy, c.attention
		given := []string{"offload-fraction", "max-num-seqs", "attention", "expert-grouping"}
		if c.microBatches > 0 {
			s.Batch.Grouping, s.Batch.MicroBatchSize = configs.PerMicroBatch, c.rows/c.microBatches
			given = append(given, "micro-batch-size")
		}
		var m *emulated.Machine
		n, err := node.Open(t.Context(), node.Options{
			Settings: s, Workload: planner.Workload{PromptTokens: prompt, NewTokens: tokens},
			Explicit: func(key string) bool { return slices.Contains(given, key) },
			OpenMachine: func() (_ device.Machine, err error) {
				gpu := emulated.GPU{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.6e12}
				m, err = emulated.New(emulated.Options{
					Virtual: true, NoData: true, GPUs: []emulated.GPU{gpu, gpu},
					Host:     emulated.GPU{MemoryBytes: 300e9, FlopsPerSecond: 4.3e12, BytesPerSecond: 135e9},
					HostLink: emulated.Link{BytesPerSecond: 55.3e9, Latency: 7 * time.Microsecond},
					PeerLink: emulated.Link{BytesPerSecond: 395e9, Latency: 9 * time.Microsecond},
				})
				return m, err
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		run := func(tokens int) time.Duration {
			ids := make([]int32, prompt)
			requests := make([]engine.Request, c.rows)
			for i := range requests {
				requests[i] = request(ids, tokens)
			}
			began := m.Now()
			if _, err := n.Engine().Generate(t.Context(), requests, nil); err != nil {
				t.Fatal(err)
			}
			return m.Now() - began
		}
		run(1)
		prefill := run(1).Seconds()
		step := (run(tokens).Seconds() - prefill) / (tokens - 1)
		p := n.Info().Planned.Prediction
		what := fmt.Sprintf("%s, %d rows, %v from %s, attention on the %s, %d micro-batches", c.model, c.rows, c.fraction, c.tier, c.attention, c.microBatches)
		t.Logf("%s: a step takes %.3f ms, predicted %.3f (%s); prefill %.1f ms, predicted %.1f", what,
			1e3*step, 1e3*p.Decode.Seconds, p.Decode.Bound, 1e3*prefill, 1e3*p.PrefillSeconds)
		near := 0.05
		if c.attention == configs.OnCPU {
			near = 0.2
		}
		if off := step/p.Decode.Seconds - 1; math.Abs(off) > near {
			t.Errorf("%s: a step takes %+.1f %% more than predicted", what, 100*off)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
