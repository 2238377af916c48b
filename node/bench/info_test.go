package bench_test

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// TestInfoCPUExperts: results know which steps fetch on demand, and what of them the CPU computes.
func TestInfoCPUExperts(t *testing.T) {
	for _, c := range []struct {
		set    string
		want   float64
		tokens int // the default model has 8 experts, of which a token has 2
	}{{"off", 0, 4}, {"auto", -1, 16}, {"25%", 0.25, 16}} {
		s := configs.Defaults()
		s.Device.Emulate, s.Batch.CPUExperts, s.Offload.Fraction, s.KV.MaxModelLen = "virtual,hbm=256MiB", c.set, 0.5, 128
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		if i := bench.New(n, nil).Info(); i.CPUExperts != c.want || i.OnDemandTokens != c.tokens {
			t.Errorf("--cpu-experts %s: %v of the experts of steps of up to %d tokens, want %v and %d", c.set, i.CPUExperts, i.OnDemandTokens, c.want, c.tokens)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
