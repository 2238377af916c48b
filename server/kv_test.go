package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/server"
)

// TestKVOverHTTP: after requests whose KV blocks were stored in three tiers, loaded, evicted and dropped,
// /debug/kv has the five counters of each tier under vLLM's names, with the values that Go reads, and
// /debug/residency has the same beside every expert.
func TestKVOverHTTP(t *testing.T) {
	s := configs.Defaults()
	s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 12, "num_cpu_blocks": 7, "num_file_blocks": 9, "directory": "` + t.TempDir() + `", "load_policy": "always"}}`
	s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride, s.Offload.Fraction = false, 14, 0.5
	var h *harness
	o := options{server: server.Options{Admin: true}, change: func(m *server.Model) {
		m.Residency = func() any { return h.node.Observe().Residency() }
		m.KV = func() any { return h.node.Observe().KV() }
	}}
	o.node.Settings = s
	h = start(t, o)
	for round := range 9 {
		ids := make([]int, 70)
		for i := range ids {
			ids[i] = 3 + (7*i+5*(round%3))%40 // each third prompt is the same
		}
		prompt, err := json.Marshal(ids)
		if err != nil {
			t.Fatal(err)
		}
		h.post("/v1/completions", fmt.Sprintf(`{"prompt": %s, "max_tokens": 12, "ignore_eos": true, "temperature": 0}`, prompt))
		if round == 5 {
			if a := h.send(http.MethodPost, "/reset_prefix_cache?reset_external=true", ""); a.status != http.StatusOK {
				t.Fatalf("reset: status %d: %s", a.status, a.body)
			}
		}
	}
	type kv struct {
		Used   int              `json:"used_blocks"`
		Blocks int              `json:"blocks"`
		Tiers  []map[string]any `json:"tiers"`
	}
	var residency struct {
		Experts struct {
			Layers []struct{ Experts []struct{ Tier string } }
		}
		KV kv
	}
	var alone kv
	read := func(path string, to any) {
		if err := json.Unmarshal([]byte(h.send(http.MethodGet, path, "").body), to); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	// Stores of the last request may be under way: nothing changes between two equal readings.
	var want observe.KVResidency
	for {
		want = h.node.Observe().KV()
		residency.KV, alone = kv{}, kv{}
		read("/debug/residency", &residency)
		read("/debug/kv", &alone)
		if reflect.DeepEqual(want, h.node.Observe().KV()) {
			break
		}
	}
	for path, got := range map[string]kv{"/debug/residency": residency.KV, "/debug/kv": alone} {
		if got.Used != want.UsedBlocks || got.Blocks != 14 || len(got.Tiers) != 3 || len(want.Tiers) != 3 {
			t.Fatalf("%s: %+v, want %+v", path, got, want)
		}
		for i, tier := range want.Tiers {
			for name, blocks := range map[string]int64{
				"blocks_offloaded": tier.Offloaded, "blocks_reloaded": tier.Reloaded, "blocks_allocated": tier.Allocated,
				"blocks_evicted": tier.Evicted, "blocks_freed": tier.Freed, "capacity_blocks": int64([]int{12, 7, 9}[i]), "used_blocks": int64(tier.UsedBlocks),
			} {
				if v, ok := got.Tiers[i][name].(float64); !ok || int64(v) != blocks {
					t.Errorf("%s: %s of %s is %v, want %d", path, name, tier.Medium, got.Tiers[i][name], blocks)
				}
			}
			if m := []string{"PEER_GPU", "CPU", "FILE"}[i]; got.Tiers[i]["medium"] != m {
				t.Errorf("%s: tier %d is %v, want %s", path, i, got.Tiers[i]["medium"], m)
			}
			if tier.Offloaded == 0 || tier.Allocated == 0 || tier.Evicted == 0 || tier.Freed == 0 {
				t.Errorf("the requests leave a counter at 0: %+v", tier)
			}
		}
	}
	if want.Tiers[0].Reloaded+want.Tiers[1].Reloaded+want.Tiers[2].Reloaded == 0 {
		t.Error("nothing was loaded")
	}
	places := map[string]int{}
	for _, l := range residency.Experts.Layers {
		for _, e := range l.Experts {
			places[e.Tier]++
		}
	}
	c := h.node.Info().Config
	if all := c.Layers * c.Experts; places["resident"] != all/2 || places[""] > 0 || len(residency.Experts.Layers) != c.Layers {
		t.Errorf("experts are %v in %d layers, want %d of %d resident", places, len(residency.Experts.Layers), all/2, all)
	}
}
