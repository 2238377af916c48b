//go:build cuda

package node_test

import (
	"context"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/fixtures"
)

var peer = flag.String("peer", "", "GPU that lends memory in the tests named Tiers: its number")

func needPeer(t *testing.T) {
	t.Helper()
	needGPU(t)
	if *peer == "" {
		t.Skip("give -peer, the number of a second GPU")
	}
}

// TestGPUTiers: tokens depend neither on whether experts are fetched from a peer or from the
// host, nor on revocations while requests run, whether requested by another user of the peer
// or forced by its allocations.
func TestGPUTiers(t *testing.T) {
	needPeer(t)
	for _, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			dir := fixtures.Dir(t, name)
			want := generateOnGPU(t, func(s *configs.Settings) { s.Model.Name, s.Offload.Tier = dir, configs.HostTier })
			fetched, revoked := int64(0), int64(0)
			for _, f := range []float64{0.5, 1} {
				for _, tier := range []configs.Tier{configs.PeerTier} {
					for trouble, make := range map[string]func(context.Context, *node.Node) error{"none": nil, "asked": ask, "taken": take} {
						n := openOnGPU(t, node.Options{CacheLayers: 1, Settings: gpuSettings(func(s *configs.Settings) {
							s.Model.Name, s.Offload.Fraction, s.Offload.Tier, s.Device.Peers, s.Harvest.MigrationLimit = dir, f, tier, *peer, "0"
							s.Batch.ExpertAccess = configs.CopyAccess // TestGPUInPlace reads in place
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
								t.Errorf("fraction %v, tier %s, memory %s, round %d: tokens %s, want %s", f, tier, trouble, round, got, want)
							}
						}
						stop()
						loop.Wait()
						traffic := n.Observe().Experts()
						fetched += traffic.Fetched[experts.Peer]
						revoked += traffic.Revoked
						t.Logf("fraction %v, tier %s, memory %s: fetched %v, moves %v, revocations %v", f, tier, trouble, traffic.Fetched, traffic.Stats, n.Observe().Harvest().Revocations)
						if err := n.Close(); err != nil {
							t.Error(err)
						}
					}
				}
			}
			if fetched == 0 || revoked == 0 {
				t.Errorf("%d bytes came from the peer, %d experts were revoked", fetched, revoked)
			}
		})
	}
}

// ask lets a neighbor request the whole memory, over and over, once something was fetched.
func ask(ctx context.Context, n *node.Node) error {
	for ctx.Err() == nil && n.Observe().Experts().Fetched[experts.Peer] == 0 {
		time.Sleep(time.Millisecond)
	}
	for ctx.Err() == nil {
		if _, err := n.Harvest().Reclaim(device.HBM(1), 1<<40, 0); err != nil {
			return err
		}
		time.Sleep(3 * time.Millisecond)
	}
	return nil
}

// take lets a neighbor allocate all that is free on the peer, twice, and waits each
// time until the headroom is free again.
func take(ctx context.Context, n *node.Node) error {
	for range 2 {
		u, err := n.Machine().Usage(device.HBM(1))
		if err != nil {
			return err
		}
		m, err := n.Machine().Alloc(device.HBM(1), u.Free()-(64<<20), "a neighbor's")
		if err != nil {
			return err
		}
		for ctx.Err() == nil && held(n.Harvest().State()) > 0 {
			time.Sleep(time.Millisecond)
		}
		if err := m.Free(); err != nil {
			return err
		}
	}
	return nil
}

func held(s harvest.State) int64 {
	return s.Peers[0].Used + s.Peers[0].FreeInSlabs + s.Peers[0].Draining
}

// tierOf splits a fraction of -whole, "0.5" or "0.5p", where p asks for a peer.
func tierOf(text string) (fraction string, tier configs.Tier) {
	if n := len(text); n > 0 && text[n-1] == 'p' {
		return text[:n-1], configs.PeerTier
	}
	return text, configs.HostTier
}

// accessOf splits a fraction of -whole, "0.5", "0.5c" or "0.5d", where c and d say how steps of few
// tokens get at offloaded experts.
func accessOf(text string) (fraction string, access configs.ExpertAccess) {
	if n := len(text); n > 0 && text[n-1] == 'c' {
		return text[:n-1], configs.CopyAccess
	} else if n > 0 && text[n-1] == 'd' {
		return text[:n-1], configs.DirectAccess
	}
	return text, configs.AutoAccess
}

// logTraffic logs the bytes fetched from each tier since before, and the rate.
func logTraffic(t *testing.T, what string, before, after observe.Experts, took time.Duration) {
	t.Helper()
	for tier := range after.Fetched {
		if bytes := after.Fetched[tier] - before.Fetched[tier]; bytes > 0 {
			t.Logf("%s: %.3f GB from %s in %v: %.1f GB/s", what, float64(bytes)/1e9, experts.Tier(tier), took.Round(time.Microsecond), float64(bytes)/1e9/took.Seconds())
		}
	}
	for tier := range after.ReadInPlace {
		if bytes := after.ReadInPlace[tier] - before.ReadInPlace[tier]; bytes > 0 {
			t.Logf("%s: %.3f GB read in place from %s in %v: %.1f GB/s", what, float64(bytes)/1e9, experts.Tier(tier), took.Round(time.Microsecond), float64(bytes)/1e9/took.Seconds())
		}
	}
	if n := after.PrefetchPredicted - before.PrefetchPredicted; n > 0 {
		t.Logf("%s: %d of %d predicted prefetches were used", what, after.PrefetchUsed-before.PrefetchUsed, n)
	}
}
