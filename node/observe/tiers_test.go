package observe

import (
	"strings"
	"testing"

	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/metrics"
)

// TestKVTierMetrics: the counters of tiers as they are exported, with vLLM's names by transfer type
// and by direction.
func TestKVTierMetrics(t *testing.T) {
	k := modelTiers{"m", KVTiers{Tiers: []KVTier{
		{
			Medium: offload.CPU, CapacityBlocks: 9, UsedBlocks: 4, Offloaded: 1, Reloaded: 2, Allocated: 3, Evicted: 4, Freed: 5,
			StoredBytes: 3e6, LoadedBytes: 7e6,
			Stores: offload.Transfers{Seconds: 0.5, Sizes: [11]uint64{2, 1}}, Loads: offload.Transfers{Seconds: 0.25, Sizes: [11]uint64{10: 1}},
		},
		{Medium: offload.File, StoredBytes: 10, Stores: offload.Transfers{Seconds: 1, Sizes: [11]uint64{1}}},
	}}}
	var b strings.Builder
	if err := metrics.Write(&b, collector[modelTiers]{func() modelTiers { return k }}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`moeserve_kv_tier_blocks_total{medium="CPU",operation="offloaded"} 1`,
		`moeserve_kv_tier_blocks_total{medium="CPU",operation="reloaded"} 2`,
		`moeserve_kv_tier_blocks_total{medium="CPU",operation="allocated"} 3`,
		`moeserve_kv_tier_blocks_total{medium="CPU",operation="evicted"} 4`,
		`moeserve_kv_tier_blocks_total{medium="CPU",operation="freed"} 5`,
		`vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="GPU_to_CPU"} 3e+06`,
		`vllm:kv_offload_total_time_total{engine="0",model_name="m",transfer_type="GPU_to_CPU"} 0.5`,
		`vllm:kv_offload_size_bucket{engine="0",model_name="m",transfer_type="GPU_to_CPU",le="1e+06"} 2`,
		`vllm:kv_offload_size_bucket{engine="0",model_name="m",transfer_type="GPU_to_CPU",le="5e+06"} 3`,
		`vllm:kv_offload_size_bucket{engine="0",model_name="m",transfer_type="CPU_to_GPU",le="2e+08"} 0`,
		`vllm:kv_offload_size_count{engine="0",model_name="m",transfer_type="CPU_to_GPU"} 1`,
		`vllm:kv_offload_size_sum{engine="0",model_name="m",transfer_type="CPU_to_GPU"} 7e+06`,
		`vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="GPU_to_FILE"} 10`,
		`vllm:kv_offload_store_bytes_total{engine="0",model_name="m"} 3.00001e+06`,
		`vllm:kv_offload_store_time_total{engine="0",model_name="m"} 1.5`,
		`vllm:kv_offload_store_size_count{engine="0",model_name="m"} 4`,
		`vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 7e+06`,
		`vllm:kv_offload_load_time_total{engine="0",model_name="m"} 0.25`,
	} {
		if !strings.Contains(b.String(), want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if t.Failed() {
		t.Log(b.String())
	}
	b.Reset()
	if err := metrics.Write(&b, collector[modelTiers]{func() modelTiers { return modelTiers{model: "m"} }}); err != nil || b.Len() > 0 {
		t.Errorf("without tiers: %v, %s", err, b.String())
	}
}
