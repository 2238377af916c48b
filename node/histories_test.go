package node_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestHistories: nodes of any settings that sleep and wake, lend memory, whose copies fail and whose peers are lost or
// withdrawn, complete the same tokens.
func TestHistories(t *testing.T) {
	refused, histories := 0, 16
	if testing.Short() || racedetector.Enabled {
		histories = 4
	}
	want := tokensOf(t, open(t, machine{}, nil))
	for seed := range histories {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(seed), 3))
			s := configs.Defaults()
			s.Batch.MaxNumBatchedTokens = 192
			s.Offload.Fraction = []float64{0, 0.5, 0.75}[rng.IntN(3)]
			s.Offload.Tier = []configs.Tier{configs.AnyTier, configs.HostTier, configs.PeerTier}[rng.IntN(3)]
			s.Offload.DynamicResidency = rng.IntN(2) == 0
			lend := rng.IntN(2) == 0
			if lend {
				s.KV.ExpertsShare, s.KV.MaxModelLen = configs.AutoShare, 128
			}
			kv := rng.IntN(4)
			switch kv {
			case 1:
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", "num_gpu_blocks": 40}}`
			case 2:
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", "num_cpu_blocks": 20, "num_gpu_blocks": 10}}`
			case 3:
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", "num_file_blocks": 40, "directory": "` + t.TempDir() + `"}}`
			}
			s.Batch.ExpertAccess = []configs.ExpertAccess{configs.AutoAccess, configs.CopyAccess, configs.DirectAccess}[rng.IntN(3)]
			if rng.IntN(3) == 0 {
				s.Batch.CPUExperts = []string{"auto", "0.5"}[rng.IntN(2)]
			}
			settings := fmt.Sprintf("fraction %v tier %v dynamic %v lend %v kv %d access %v cpu %q", s.Offload.Fraction, s.Offload.Tier, s.Offload.DynamicResidency, lend, kv, s.Batch.ExpertAccess, s.Batch.CPUExperts)
			var m *emulated.Machine
			n, err := node.Open(t.Context(), node.Options{Settings: s, HostLogits: true, OpenMachine: func() (_ device.Machine, err error) {
				m, err = emulated.New(emulated.Options{Check: true, LikeCUDA: rng.IntN(2) == 0})
				return m, err
			}})
			if err != nil {
				if !errors.Is(err, fault.ErrConfig) {
					t.Fatalf("%s: %v", settings, err)
				}
				refused++ // they contradict each other
				return
			}
			history := "open"
			done := false
			defer func() {
				if err := n.Close(); err != nil && done {
					t.Errorf("%s: %s: close: %v", settings, history, err)
				}
			}()
			check := func() {
				t.Helper()
				if got := tokensOf(t, n); got != want {
					t.Errorf("%s: %s: tokens %s, want %s", settings, history, got, want)
				}
			}
			check()
			for range 6 {
				switch op := rng.IntN(8); op {
				case 0, 1, 2:
					level := []sleeping.Level{sleeping.Copy, sleeping.Drop}[rng.IntN(2)]
					mode := []engine.PauseMode{engine.PauseWait, engine.PauseKeep, engine.PauseAbort}[rng.IntN(3)]
					history += fmt.Sprintf(", sleep %d", level)
					if _, err := n.Sleep(t.Context(), level, mode); err != nil {
						t.Fatalf("%s: %s: %v", settings, history, err)
					}
					for range rng.IntN(3) {
						tag := []sleeping.Tag{sleeping.Weights, sleeping.KVCache}[rng.IntN(2)]
						history += fmt.Sprintf(", wake %s", tag)
						if _, err := n.Wake(t.Context(), tag); err != nil {
							t.Fatalf("%s: %s: %v", settings, history, err)
						}
						if n.Sleeping().Asleep() && rng.IntN(2) == 0 {
							history += ", sleep again"
							if _, err := n.Sleep(t.Context(), []sleeping.Level{sleeping.Copy, sleeping.Drop}[rng.IntN(2)], mode); err != nil {
								t.Fatalf("%s: %s: %v", settings, history, err)
							}
						}
					}
					history += ", wake"
					if _, err := n.Wake(t.Context()); err != nil {
						t.Fatalf("%s: %s: %v", settings, history, err)
					}
				case 3:
					if l := n.KVLender(); l != nil {
						history += ", lend"
						l.Move(2 - rng.IntN(4))
					}
				case 4:
					g := 1 + rng.IntN(2)
					history += fmt.Sprintf(", fail copies of %d", g)
					m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 1 + rng.IntN(8), Match: func(p emulated.Point) bool {
						return p.From == device.HBM(g) || p.To == device.HBM(g)
					}})
				case 5:
					if rng.IntN(2) == 0 {
						history += ", lose 2"
						_ = m.Lose(2)
					}
				case 6:
					if n.Harvest() != nil {
						history += ", withdraw"
						_ = n.Harvest().Withdraw(device.HBM(1), rng.IntN(2) == 0)
					}
				case 7:
					f := []float64{0, 0.25, 0.5, 0.75}[rng.IntN(4)]
					if err := n.SetOffloadFraction(&f); err == nil {
						history += fmt.Sprintf(", fraction %v", f)
					}
				}
				check()
			}
			done = true
		})
	}
	if refused > histories/2 {
		t.Errorf("%d of %d settings contradict each other", refused, histories)
	}
}
