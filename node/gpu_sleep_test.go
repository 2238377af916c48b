//go:build cuda

package node_test

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// TestGPUSleep: on a GPU, too, tokens after each level of sleep are those from before, with graphs
// captured anew, and other processes get the memory meanwhile.
func TestGPUSleep(t *testing.T) {
	needGPU(t)
	cases := map[string]func(*configs.Settings){
		"resident":  func(*configs.Settings) {},
		"half/host": func(s *configs.Settings) { s.Offload.Fraction, s.Offload.Tier = 0.5, configs.HostTier },
		"half/dynamic": func(s *configs.Settings) {
			s.Offload.Fraction, s.Offload.DynamicResidency, s.Offload.Tier = 0.5, true, configs.HostTier
		},
		"KV tier": func(s *configs.Settings) { s.KV.OffloadingSize = 0.1 },
	}
	if *peer != "" {
		cases["half/peer"] = func(s *configs.Settings) {
			s.Offload.Fraction, s.Offload.Tier, s.Device.Peers, s.Harvest.Headroom = 0.5, configs.PeerTier, *peer, "1GiB"
		}
	}
	for _, model := range append([]string{""}, onGPU...) {
		dir := ""
		if model != "" {
			dir = fixtures.Dir(t, model)
		}
		for name, change := range cases {
			t.Run(fmt.Sprintf("model=%s/%s", model, name), func(t *testing.T) {
				n := openOnGPU(t, node.Options{Settings: gpuSettings(func(s *configs.Settings) {
					s.Model.Name, s.Kernels.BatchInvariant = dir, true
					change(s)
				})})
				sleepOnGPU(t, n)
			})
		}
	}
}

func sleepOnGPU(t *testing.T, n *node.Node) {
	want := tokensOf(t, n)
	gpu := device.HBM(0)
	before, err := n.Machine().Usage(gpu)
	if err != nil {
		t.Fatal(err)
	}
	for i, level := range []sleeping.Level{sleeping.Copy, sleeping.Copy, sleeping.Drop, sleeping.Copy} {
		times, err := n.Sleep(t.Context(), level, []engine.PauseMode{engine.PauseWait, engine.PauseKeep}[i%2])
		if err != nil {
			t.Fatal(err)
		}
		asleep, err := n.Machine().Usage(gpu)
		if err != nil {
			t.Fatal(err)
		}
		// What the driver says is free grows by what was released.
		if freed := asleep.Free() - before.Free(); freed < times.Freed || before.Allocated-asleep.Allocated < times.Freed {
			t.Errorf("level %d: %d bytes more are free for others, want %d; %d are allocated, before %d", level, freed, times.Freed, asleep.Allocated, before.Allocated)
		}
		woken, err := n.Wake(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		after, err := n.Machine().Usage(gpu)
		if err != nil || after.Allocated != before.Allocated {
			t.Errorf("level %d: %d bytes are allocated after the wake, %d before, %v", level, after.Allocated, before.Allocated, err)
		}
		for range 2 { // the second with what the first has cached
			if got := tokensOf(t, n); got != want {
				t.Fatalf("level %d: tokens %s, want %s", level, got, want)
			}
		}
		t.Logf("level %d: sleep %v, of it copies %v, pinning %v, unmapping %v; wake %v, of it copies %v, mapping %v, loading %v; %d bytes",
			level, times.Total, times.Copies, times.Pin, times.Map, woken.Total, woken.Copies, woken.Map, woken.Load, woken.Bytes)
	}
}
