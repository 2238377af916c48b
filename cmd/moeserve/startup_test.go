package main

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/observe"
)

// What a server logs when it begins to serve, as text and as JSON.
func TestStartup(t *testing.T) {
	s := startup{
		model: "mixtral-8x7b", address: "http://127.0.0.1:8000", device: "NVIDIA H200 (cuda)",
		memory:  observe.Memories{{Space: "host", Capacity: 64 << 30, Allocated: 1 << 30}, {Space: "gpu0", Capacity: 140 << 30, Allocated: 3 << 30}, {Space: "gpu1"}},
		experts: observe.Experts{Tiers: map[experts.Tier]int{experts.Resident: 64, experts.Host: 192}, ResidentExperts: 64, PeerCopies: 7}, expertBytes: 336 << 20,
		kv: engine.State{KVBlocks: 100, BlockTokens: 16}, maxModelLen: 500,
		kvTiers: []observe.KVTier{{Medium: "PEER_GPU", CapacityBlocks: 100, BlockTokens: 32, BlockBytes: 4 << 20}, {Medium: "FILE", CapacityBlocks: 1, BlockTokens: 16, BlockBytes: 2 << 20}},
		peers:   []peerMemory{{"gpu1", "NVIDIA H200", 1 << 30, 2 << 30, 3 << 20}},
	}
	timeless := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}
	var text, json strings.Builder
	s.log(slog.New(slog.NewTextHandler(&text, timeless)))
	want := `level=INFO msg=device device="NVIDIA H200 (cuda)" host.used_bytes="1.00 GiB" host.capacity_bytes="64.00 GiB" gpu0.used_bytes="3.00 GiB" gpu0.capacity_bytes="140.00 GiB"
level=INFO msg=experts resident=64 offloaded=192 peer_copies=7 offload_fraction=0.75 expert_bytes="336.00 MiB"
level=INFO msg=peer device=gpu1 name="NVIDIA H200" borrowed_bytes="1.00 GiB" borrowable_bytes="2.00 GiB" other_processes_bytes="3.00 MiB"
level=INFO msg="KV cache" tokens=1600 max_model_len=500 full_context_sequences=3
level=INFO msg="KV tier" medium=PEER_GPU blocks=100 tokens=3200 bytes="400.00 MiB"
level=INFO msg="KV tier" medium=FILE blocks=1 tokens=16 bytes="2.00 MiB"
level=INFO msg=serving model=mixtral-8x7b address=http://127.0.0.1:8000
`
	if diff := cmp.Diff(want, text.String()); diff != "" {
		t.Error(diff)
	}
	s.log(slog.New(slog.NewJSONHandler(&json, timeless)))
	want = `{"level":"INFO","msg":"device","device":"NVIDIA H200 (cuda)","host":{"used_bytes":1073741824,`
	if !strings.HasPrefix(json.String(), want) {
		t.Errorf("%s", &json)
	}
}
