//go:build cuda

package node_test

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node"
)

// TestGPUPlanned compares what is planned for named hardware with what a node then
// takes of a GPU, which rounds each memory up to 2 MiB.
func TestGPUPlanned(t *testing.T) {
	if *on != "cuda" {
		t.Skip("named hardware is planned with a GPU's sizes")
	}
	for _, fraction := range []float64{0, 0.5, 1} {
		s := gpuSettings(func(s *configs.Settings) {
			s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers = "qwen1.5-moe-a2.7b", configs.LoadDummy, 2
			s.Offload.Fraction, s.Batch.MaxNumSeqs, s.Batch.MaxNumBatchedTokens, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = fraction, 32, 2464, 256, 300
		})
		n := openOnGPU(t, node.Options{Settings: s})
		r, err := n.Observe().Report(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Plan.Hardware = "h200"
		p, err := node.Plan(node.PlanOptions{Options: node.Options{Settings: s, Explicit: func(string) bool { return true }}})
		if err != nil {
			t.Fatal(err)
		}
		const memories, rounding = 10, 2 << 20
		for _, m := range r.Memory {
			if m.Space != device.HBM(0).String() {
				continue
			}
			t.Logf("fraction %v: %d bytes taken, %d planned", fraction, m.Allocated, p.Prediction.Memory.GPU.Need())
			if over := m.Allocated - p.Prediction.Memory.GPU.Need(); over < 0 || over > memories*rounding {
				t.Errorf("fraction %v: %d bytes taken, %d planned: %v", fraction, m.Allocated, p.Prediction.Memory.GPU.Need(), p.Prediction.Memory.GPU)
			}
		}
	}
}
