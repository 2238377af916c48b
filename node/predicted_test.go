package node_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/planner"
)

// TestPredicted compares what a policy should give with what steps then take, in
// virtual time on devices with the rates that were planned with: full shapes, fewer
// layers. What differs is that an expert is copied in chunks, each of which has to start,
// where the planner counts one start, and that a fetch from a peer takes a part over the
// host's link, which the planner does not count for that tier.
func TestPredicted(t *testing.T) {
	const prompt, tokens = 16, 4
	for _, c := range []struct {
		model    string
		rows     int
		fraction float64
		tier     string
	}{
		{"mixtral-8x7b", 324, 0, "host"},
		{"mixtral-8x7b", 324, 0.5, "host"},
		{"mixtral-8x7b", 324, 0.5, "peer"},
		{"mixtral-8x7b", 3240, 0.5, "peer"},
		{"mixtral-8x7b", 3240, 1, "peer"},
		{"qwen1.5-moe-a2.7b", 324, 1, "host"},
		{"qwen1.5-moe-a2.7b", 324, 0.5, "peer"},
	} {
		s := configs.Defaults()
		s.Model, s.LoadFormat, s.NumHiddenLayers, s.MaxModelLen = c.model, "dummy", 6, 128
		s.OffloadFraction, s.OffloadTier, s.MaxNumSeqs, s.Policy = c.fraction, c.tier, c.rows, "auto"
		var m *emulated.Machine
		n, err := node.Open(t.Context(), node.Options{
			Settings: s, Workload: planner.Workload{PromptTokens: prompt, NewTokens: tokens},
			Given: func(key string) bool { return key == "offload-fraction" || key == "max-num-seqs" },
			OpenMachine: func() (_ device.Machine, err error) {
				gpu := emulated.GPU{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.6e12}
				m, err = emulated.New(emulated.Options{
					Virtual: true, NoData: true, GPUs: []emulated.GPU{gpu, gpu},
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
		p := n.Planned().Prediction
		t.Logf("%s, %d rows, %v from %s: a step takes %.3f ms, predicted %.3f (%s); prefill %.1f ms, predicted %.1f", c.model, c.rows, c.fraction, c.tier,
			1e3*step, 1e3*p.Decode.Seconds, p.Decode.Bound, 1e3*prefill, 1e3*p.PrefillSeconds)
		if off := step/p.Decode.Seconds - 1; off > 0.15 || off < -0.18 {
			t.Errorf("%s, %d rows, %v from %s: a step takes %+.1f %% of what is predicted", c.model, c.rows, c.fraction, c.tier, 100*off)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
