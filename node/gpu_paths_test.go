//go:build cuda

package node_test

import (
	"context"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// TestGPUHostPaths: tokens do not depend on whether copies from the host go over another GPU's link, too, nor
// on its memory being revoked while they do.
func TestGPUHostPaths(t *testing.T) {
	needPeer(t)
	for _, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			dir := fixtures.Dir(t, name)
			want := generateOnGPU(t, func(s *configs.Settings) { s.Model.Name, s.Offload.Tier = dir, configs.HostTier })
			for trouble, make := range map[string]func(context.Context, *node.Node) error{"none": nil, "taken": take} {
				n := openOnGPU(t, node.Options{CacheLayers: 1, Settings: gpuSettings(func(s *configs.Settings) {
					s.Model.Name, s.Offload.Fraction, s.Offload.Tier, s.Device.HostPaths = dir, 1, configs.HostTier, *peer+","
					s.Plan.Hardware = calibrated(t, 1) // for its small chunks
				})})
				ctx, stop := context.WithCancel(t.Context())
				var loop sync.WaitGroup
				if make != nil {
					loop.Go(func() {
						if err := make(ctx, n); err != nil {
							t.Error(err)
						}
					})
				}
				for round := range 3 {
					if got := generate(t, n); got != want {
						t.Errorf("memory %s, round %d: tokens %s, want %s", trouble, round, got, want)
					}
				}
				stop()
				loop.Wait()
				in, out := relayed(n)
				t.Logf("memory %s: %v bytes relayed in, %v out", trouble, in, out)
				if in[device.HBM(1)] == 0 {
					t.Errorf("memory %s: nothing was relayed", trouble)
				}
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
