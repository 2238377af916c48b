//go:build cuda

package node_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// askOnce lets a neighbor request the peer's whole memory once experts on it were used.
func askOnce(ctx context.Context, n *node.Node) error {
	for {
		e := n.Observe().Experts()
		switch {
		case ctx.Err() != nil:
			return nil
		case e.ReadInPlace[experts.Peer] > 0 || n.Pipeline().StepsByAccess().Copied > 50:
			_, err := n.Harvest().Reclaim(device.HBM(1), 1<<40, 0)
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// TestGPUInPlace: steps whose kernels read experts in host memory, or in that of -peer, sample the
// same tokens as steps whose experts are resident, and as steps that copy them; most are graphs.
// Meanwhile a neighbor asks for the peer's memory.
func TestGPUInPlace(t *testing.T) {
	const steps = 400
	tiers := []configs.Tier{configs.HostTier}
	if *peer != "" {
		tiers = append(tiers, configs.PeerTier)
	}
	for i, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			run := func(fraction float64, tier configs.Tier, access configs.ExpertAccess, asked bool) ([]string, *node.Node) {
				// The cache does not hold all offloaded experts: those that it lacks are read in place to the end.
				n := openOnGPU(t, node.Options{CacheLayers: 1, Settings: gpuSettings(func(s *configs.Settings) {
					s.Model.Name, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = fixtures.Dir(t, name), 192, 12*12
					s.Offload.Fraction, s.Offload.Tier, s.Batch.ExpertAccess = fraction, tier, access
					if tier == configs.PeerTier {
						s.Device.Peers, s.Harvest.MigrationLimit = *peer, "0"
					}
				})})
				ctx, stop := context.WithCancel(t.Context())
				var loop sync.WaitGroup
				if asked {
					loop.Go(func() {
						if err := askOnce(ctx, n); err != nil {
							t.Error(err)
						}
					})
				}
				lines := live(t, n, uint64(i), steps)
				stop()
				loop.Wait()
				return lines, n
			}
			want, _ := run(0, configs.HostTier, configs.CopyAccess, false)
			for _, tier := range tiers {
				for _, fraction := range []float64{0.5, 1} {
					for _, access := range []configs.ExpertAccess{configs.CopyAccess, configs.DirectAccess, configs.AutoAccess} {
						for _, asked := range []bool{false, true} {
							if asked && tier != configs.PeerTier {
								continue
							}
							got, n := run(fraction, tier, access, asked)
							for at := range want {
								if got[at] != want[at] {
									t.Fatalf("fraction %v in %s, %s, step %d: %s, with resident experts %s", fraction, tier, access, at, got[at], want[at])
								}
							}
							by, graphs, traffic := n.Pipeline().StepsByAccess(), n.Pipeline().Graphs(), n.Observe().Experts()
							t.Logf("fraction %v in %s, %s, asked for %t: %+v, %+v; read in place %v", fraction, tier, access, asked, by, graphs, traffic.ReadInPlace)
							if access == configs.AutoAccess {
								continue
							}
							if direct := access == configs.DirectAccess; direct != (by.Direct > steps/2) || direct && *on == "cuda" && (graphs.Launched < by.Direct/2 || graphs.Failed > 0) {
								t.Errorf("fraction %v in %s, %s: %+v, %+v", fraction, tier, access, by, graphs)
							}
							from := experts.Host
							if tier == configs.PeerTier {
								from = experts.Peer
							}
							if asked && access == configs.DirectAccess {
								if traffic.ReadInPlace[experts.Peer] == 0 || traffic.ReadInPlace[experts.Host] == 0 || traffic.Revoked == 0 {
									t.Errorf("fraction %v: %v read in place, %d experts were revoked", fraction, traffic.ReadInPlace, traffic.Revoked)
								}
								continue
							}
							if access == configs.DirectAccess && traffic.ReadInPlace[from] == 0 && traffic.Uses[experts.Cached] == 0 {
								t.Errorf("fraction %v in %s: nothing was read in place: %v", fraction, tier, traffic.ReadInPlace)
							}
						}
					}
				}
			}
		})
	}
}
