package configs

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
)

// peaks are the datasheets' rates of a profile, written down apart from it.
type peaks struct {
	memory, flops   float64 // of the GPU, in bytes/s and flop/s (bf16 or fp16, dense)
	host, peer      float64 // of one direction of PCIe x16 and NVLink, in bytes/s
	memoryGiB       float64 // of the GPU, at most
	noPeers, bridge bool    // no link to peers; one that most machines lack
}

const pcie3, pcie4, pcie5 = 15.75e9, 31.5e9, 63e9

var datasheets = map[string]peaks{
	"rtx-3090": {memory: 936e9, flops: 71e12, host: pcie4, peer: 56.25e9, memoryGiB: 24, bridge: true},
	"rtx-4090": {memory: 1008e9, flops: 165.2e12, host: pcie4, memoryGiB: 24, noPeers: true},
	"rtx-5090": {memory: 1792e9, flops: 209.5e12, host: pcie5, memoryGiB: 32, noPeers: true},
	"a10":      {memory: 600e9, flops: 125e12, host: pcie4, memoryGiB: 24, noPeers: true},
	"l4":       {memory: 300e9, flops: 121e12, host: pcie4, memoryGiB: 24, noPeers: true},
	"l40s":     {memory: 864e9, flops: 362.05e12, host: pcie4, memoryGiB: 48, noPeers: true},
	"t4":       {memory: 320e9, flops: 65e12, host: pcie3, memoryGiB: 16, noPeers: true},
	"a100-40":  {memory: 1555e9, flops: 312e12, host: pcie4, peer: 300e9, memoryGiB: 40},
	"a100-80":  {memory: 2039e9, flops: 312e12, host: pcie4, peer: 300e9, memoryGiB: 80},
	"h100-80":  {memory: 3350e9, flops: 989e12, host: pcie5, peer: 450e9, memoryGiB: 80},
	"h20":      {memory: 4000e9, flops: 148e12, host: pcie5, peer: 450e9, memoryGiB: 96},
	"h200":     {memory: 4800e9, flops: 989e12, host: pcie5, peer: 450e9, memoryGiB: 141},
	"b200":     {memory: 8000e9, flops: 2250e12, host: pcie5, peer: 900e9, memoryGiB: 180},
}

// Every profile has the same fields, each with its source, and no rate is above the
// datasheet's. Those without a link to peers have no peer memory.
func TestHardware(t *testing.T) {
	want := []string{"a10", "a100-40", "a100-80", "b200", "h100-80", "h20", "h200", "l4", "l40s", "rtx-3090", "rtx-4090", "rtx-5090", "t4"}
	if got := HardwareNames(); !slices.Equal(got, want) {
		t.Fatalf("profiles %v, want %v", got, want)
	}
	var fields []string
	for _, name := range want {
		data, ok := Hardware(name)
		if !ok {
			t.Fatalf("no %s", name)
		}
		var raw map[string]json.RawMessage
		if err := json.Unmarshal(data, &raw); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var called string
		var sources map[string]string
		for key, to := range map[string]any{"name": &called, "sources": &sources} {
			if err := json.Unmarshal(raw[key], to); err != nil {
				t.Errorf("%s: %s: %v", name, key, err)
			}
			delete(raw, key)
		}
		if called != name {
			t.Errorf("%s calls itself %q", name, called)
		}
		// What kernels reach, an object, is only of machines where that was measured.
		if strings.HasPrefix(sources["compute"], "measured") != (raw["compute"] != nil) {
			t.Errorf("%s: compute is %s, and its source %q", name, raw["compute"], sources["compute"])
		}
		delete(raw, "compute")
		delete(sources, "compute")
		values := map[string][]float64{}
		for key, text := range raw {
			var list []float64
			if text[0] != '[' {
				list = []float64{0}
				err := json.Unmarshal(text, &list[0])
				if err != nil {
					t.Errorf("%s: %s: %v", name, key, err)
				}
			} else if err := json.Unmarshal(text, &list); err != nil || len(list) == 0 {
				t.Errorf("%s: %s: %s: %v", name, key, text, err)
			}
			values[key] = list
			optional := strings.HasPrefix(key, "peer_") || strings.HasSuffix(key, "_s") && !strings.Contains(key, "_per_s")
			for _, v := range list {
				if v < 0 || v == 0 && !optional {
					t.Errorf("%s: %s is %v", name, key, v)
				}
			}
			if sources[key] == "" {
				t.Errorf("%s: nothing says where %s is from", name, key)
			}
			if none := strings.HasPrefix(sources[key], "none"); none != (list[0] == 0) {
				t.Errorf("%s: %s is %v, and its source %q", name, key, list[0], sources[key])
			}
		}
		if long := values["gpu_long_attention_flop_per_s"]; long != nil && long[0] < values["gpu_attention_flop_per_s"][0] {
			t.Errorf("%s: attention is slower, %v, where contexts are long", name, long)
		}
		delete(raw, "gpu_long_attention_flop_per_s") // which few have
		delete(sources, "gpu_long_attention_flop_per_s")
		for key := range raw { // only of machines where they were measured
			if strings.Contains(key, "_kernel_read_") || strings.HasPrefix(key, "cpu_attention_") {
				delete(raw, key)
				delete(sources, key)
			}
		}
		keys := slices.Sorted(maps.Keys(raw))
		if fields == nil {
			fields = keys
		}
		if !slices.Equal(keys, fields) || len(sources) != len(fields) {
			t.Errorf("%s: fields %v with %d sources, want %v", name, keys, len(sources), fields)
			continue
		}
		peak := datasheets[name]
		for key, limit := range map[string]float64{
			"gpu_memory_bytes_per_s": peak.memory, "gpu_flop_per_s": peak.flops, "gpu_attention_flop_per_s": peak.flops, "gpu_long_attention_flop_per_s": peak.flops,
			"host_to_gpu_bytes_per_s": peak.host, "gpu_to_host_bytes_per_s": peak.host, "peer_to_gpu_bytes_per_s": peak.peer,
			"gpu_memory_bytes": peak.memoryGiB * (1 << 30),
		} {
			// More paths from the host lead over other GPUs' links.
			for i, v := range values[key] {
				if v > limit*float64(i+1) {
					t.Errorf("%s: %s is %v, and the datasheet has %v", name, key, v, limit)
				}
				if v < limit/4 && key != "gpu_attention_flop_per_s" {
					t.Errorf("%s: %s is %v, far below the datasheet's %v", name, key, v, limit)
				}
			}
		}
		if memory, rate := values["peer_memory_bytes"][0], values["peer_to_gpu_bytes_per_s"][0]; (rate == 0) != peak.noPeers || (memory == 0) != (peak.noPeers || peak.bridge) {
			t.Errorf("%s: %v bytes of peers at %v bytes/s", name, memory, rate)
		}
	}
	for _, name := range []string{"", "H200", "../presets/mixtral-8x7b", "h200.json"} {
		if _, ok := Hardware(name); ok {
			t.Errorf("there is a machine %q", name)
		}
	}
}
