package configs

import (
	"strings"
	"testing"
)

// The sizes of entries, with the factors that docs/guide/benchmarks.md lists.
func TestKVEntries(t *testing.T) {
	want := map[string]struct {
		bytes      int64
		derivation string
	}{
		"deepseek-v3":       {70272, "61 layers x (512 kv_lora_rank + 64 qk_rope_head_dim) x 2 bytes"},
		"kimi-k2":           {70272, "61 layers x (512 kv_lora_rank + 64 qk_rope_head_dim) x 2 bytes"},
		"mistral-large-3":   {70272, "61 layers x (512 kv_lora_rank + 64 qk_rope_head_dim) x 2 bytes"},
		"mixtral-8x7b":      {131072, "32 layers x 2 x 8 KV heads x 128 head_dim x 2 bytes"},
		"phi-3.5-moe":       {131072, "32 layers x 2 x 8 KV heads x 128 head_dim x 2 bytes"},
		"phi-tiny-moe":      {65536, "32 layers x 2 x 4 KV heads x 128 head_dim x 2 bytes"},
		"qwen1.5-moe-a2.7b": {196608, "24 layers x 2 x 16 KV heads x 128 head_dim x 2 bytes"},
		"qwen2-57b-a14b":    {57344, "28 layers x 2 x 4 KV heads x 128 head_dim x 2 bytes"},
		"qwen3-30b-a3b":     {98304, "48 layers x 2 x 4 KV heads x 128 head_dim x 2 bytes"},
	}
	entries := KVEntries()
	if len(entries) != len(want) {
		t.Errorf("%d models, want %d", len(entries), len(want))
	}
	for _, e := range entries {
		w := want[e.Name]
		if e.Bytes() != w.bytes || e.Derivation() != w.derivation {
			t.Errorf("%s: %d bytes = %s, want %d = %s", e.Name, e.Bytes(), e.Derivation(), w.bytes, w.derivation)
		}
		if !strings.Contains(e.Repository, "/") || e.Source == "" {
			t.Errorf("%s: repository %q, source %q", e.Name, e.Repository, e.Source)
		}
	}
}
