package node_test

import (
	"maps"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
)

// TestStepEvents: what is observed of each step adds up: every token is routed to as many experts of each layer as the
// model has it, and what the steps copied is what the links have copied since the first.
func TestStepEvents(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Plan.Hardware = 0.5, configs.HostTier, "h100-80"
	var n *node.Node
	var steps []observe.Step
	var first, after, last int64 // what links had copied before and after the first step was observed, and before the last
	links := func() (bytes int64) {
		for _, l := range n.Observe().Now().Links {
			bytes += l.Bytes
		}
		return bytes
	}
	var before int64
	n, err := node.Open(t.Context(), node.Options{Settings: s, Listener: engine.Listener{StepFinished: func(i engine.StepInfo) {
		last = links()
		steps = append(steps, n.Observe().Step(i))
		if len(steps) == 1 {
			first, after, before = last, links(), n.Observe().Experts().Fetched[experts.Host]
		}
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := n.Engine().Generate(t.Context(), []engine.Request{request([]int32{5, 6, 7}, 6), request([]int32{8, 9}, 4)}, nil); err != nil {
		t.Fatal(err)
	}
	c := n.Info().Config
	var copied, fetches int64
	counted, shown := map[string]bool{}, map[string]bool{} // links, and what for
	for i, step := range steps {
		if step.Step != int64(i+1) || step.Tokens == 0 || step.Seconds <= 0 || step.Predicted <= 0 {
			t.Errorf("%+v", step)
		}
		for _, l := range step.Links {
			copied += l.Bytes
			for purpose, bytes := range l.ByPurpose {
				counted[l.Source+" "+l.Destination+" "+purpose] = true
				l.Bytes -= bytes
			}
			if l.Bytes != 0 || l.ByPurpose["demand"]+l.ByPurpose["prefetch"] == 0 {
				t.Errorf("step %d: %d bytes of a link are for nothing: %v", i, l.Bytes, l.ByPurpose)
			}
		}
		if line := step.Timeline; i > 0 && i < 16 {
			if line == nil {
				t.Fatalf("step %d has no timeline", i)
			}
			waited, at := map[string]float64{}, int64(0)
			for _, s := range line.Stalls {
				if waited[s.For] += float64(s.To-s.From) / 1e9; s.From < at || s.To <= s.From || s.To > line.Duration {
					t.Errorf("step %d, of %d ns: stall %+v after %d", i, line.Duration, s, at)
				}
				at = s.To
			}
			gaps := float64(len(line.Stalls)) * float64(line.Duration) / 500e9 // what joins short stalls
			for cause := range maps.Keys(step.Stalls) {
				if d := waited[cause] - step.Stalls[cause]; d < -1e-6 || d > 20*gaps+1e-6 {
					t.Errorf("step %d: %v s of %s, and in its timeline %v", i, step.Stalls[cause], cause, waited[cause])
				}
			}
			for _, l := range line.Links {
				for _, s := range l.Copies {
					shown[l.Source+" "+l.Destination+" "+s.For] = true
				}
			}
		}
		if b := step.Bound; i > 0 && (b == nil || b.Share <= 0 || b.Share > 1) {
			t.Errorf("step %d is bound by %+v", i, b)
		}
		listed := int64(0)
		for _, f := range step.Fetched {
			listed += f[2]
		}
		if fetches += step.Fetches; listed != step.Fetches {
			t.Errorf("step %d: %d fetches, and experts with %d", i, step.Fetches, listed)
		}
		layers := map[int64]int64{}
		for _, r := range step.Routed {
			layers[r[0]] += r[2]
		}
		if i == 0 {
			if len(layers) > 0 || len(step.Links) > 0 || len(step.Fetched) > 0 || step.Bound != nil || step.Timeline != nil {
				t.Errorf("the first step that is observed has what came before: %+v", step)
			}
			continue
		}
		for layer, tokens := range layers {
			if tokens != int64(step.Tokens*c.TopK) {
				t.Errorf("step %d: %d tokens of layer %d are routed %d times", i, step.Tokens, layer, tokens)
			}
		}
		if len(layers) != c.Layers {
			t.Errorf("step %d: experts of %d layers", i, len(layers))
		}
	}
	if !maps.Equal(counted, shown) {
		t.Errorf("links have copied %v, and timelines have %v", counted, shown)
	}
	now := n.Observe().Now()
	if bytes := n.Observe().Experts().Fetched[experts.Host] - before; bytes == 0 || fetches*n.Info().Sizes.Expert != bytes {
		t.Errorf("%d fetches, and %d bytes were fetched", fetches, bytes)
	}
	// What memory is for is all that is allocated.
	for _, m := range now.Memories {
		var parts int64
		for _, p := range m.Parts {
			parts += p.Bytes
		}
		if parts != m.Allocated || m.Space == "gpu0" && parts == 0 {
			t.Errorf("%s: %d bytes are allocated, for %+v", m.Space, m.Allocated, m.Parts)
		}
	}
	// Prefetches go on between steps.
	if most, least := links()-first, last-after; len(steps) < 6 || copied < least || copied > most || copied == 0 || now.Hits+now.Misses == 0 {
		t.Errorf("%d steps; they copied %d bytes, and the links %d to %d", len(steps), copied, least, most)
	}
}

// TestPeerMemoryByPurpose: what the memory of peers is for adds up to harvest's accounts of each purpose, and to all that is
// allocated on each peer.
func TestPeerMemoryByPurpose(t *testing.T) {
	n := open(t, machine{fraction: 0.5, options: four(emulated.Random, 1)}, func(s *configs.Settings) {
		s.Plan.Hardware, s.Device.HostPaths, s.Offload.Tier, s.Device.Peers = calibrated(t, 3, 2, 1), "4", configs.AnyTier, "1,2"
		s.KV.TransferConfig, s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride = `{"kv_connector_extra_config": {"num_gpu_blocks": 40}}`, false, 14
	})
	for round := range 6 {
		comeBack(t, n, round)
	}
	clients := n.Observe().Residency().Harvest.Clients
	accounts := map[string]int64{
		"copies of experts": clients[experts.HarvestClient].Bytes, "offloaded KV blocks": clients[offload.HarvestClient].Bytes, "relay buffers": clients[observe.RelayClient].Bytes,
	}
	got := map[string]int64{}
	for _, m := range n.Observe().Now().Memories {
		if m.Space == "host" || m.Space == "gpu0" {
			continue
		}
		all := int64(0)
		for _, p := range m.Parts {
			got[p.Name] += p.Bytes
			all += p.Bytes
		}
		if all != m.Allocated {
			t.Errorf("%s: %d bytes are allocated, for %+v", m.Space, m.Allocated, m.Parts)
		}
	}
	delete(got, "borrowed, free")
	if accounts["copies of experts"] == 0 || accounts["offloaded KV blocks"] == 0 || accounts["relay buffers"] == 0 || !maps.Equal(got, accounts) {
		t.Errorf("peers have %v, and the accounts %v", got, accounts)
	}
}
