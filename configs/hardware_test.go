package configs

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// Every machine has the same keys; every number that is not zero says where it is
// from, and nothing else does.
func TestHardware(t *testing.T) {
	want := []string{"a100-80", "h100-80", "h200", "l4", "t4"}
	if got := HardwareNames(); !slices.Equal(got, want) {
		t.Fatalf("machines %v, want %v", got, want)
	}
	type machine struct {
		Name              string            `json:"name"`
		GPUMemory         *float64          `json:"gpu_memory_bytes"`
		GPUMemoryRate     *float64          `json:"gpu_memory_bytes_per_s"`
		GPUFlops          *float64          `json:"gpu_flop_per_s"`
		GPUAttentionFlops *float64          `json:"gpu_attention_flop_per_s"`
		HostMemory        *float64          `json:"host_memory_bytes"`
		HostMemoryRate    *float64          `json:"host_memory_bytes_per_s"`
		CPUFlops          *float64          `json:"cpu_flop_per_s"`
		HostToGPU         []float64         `json:"host_to_gpu_bytes_per_s"`
		GPUToHost         *float64          `json:"gpu_to_host_bytes_per_s"`
		HostCopyStart     *float64          `json:"host_copy_latency_s"`
		RoundTrip         *float64          `json:"round_trip_s"`
		PeerMemory        *float64          `json:"peer_memory_bytes"`
		PeerToGPU         *float64          `json:"peer_to_gpu_bytes_per_s"`
		PeerCopyStart     *float64          `json:"peer_copy_latency_s"`
		Sources           map[string]string `json:"sources"`
	}
	for _, name := range want {
		data, ok := Hardware(name)
		if !ok {
			t.Fatalf("no %s", name)
		}
		var m machine
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		if err := d.Decode(&m); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if strings.ToLower(m.Name) != name {
			t.Errorf("%s calls itself %q", name, m.Name)
		}
		if len(m.HostToGPU) == 0 || !slices.IsSorted(m.HostToGPU) || m.HostToGPU[0] <= 0 {
			t.Errorf("%s: host_to_gpu_bytes_per_s %v", name, m.HostToGPU)
		}
		sourced := []string{"host_to_gpu_bytes_per_s"}
		for key, v := range map[string]*float64{
			"gpu_memory_bytes": m.GPUMemory, "gpu_memory_bytes_per_s": m.GPUMemoryRate, "gpu_flop_per_s": m.GPUFlops,
			"gpu_attention_flop_per_s": m.GPUAttentionFlops, "host_memory_bytes": m.HostMemory,
			"host_memory_bytes_per_s": m.HostMemoryRate, "cpu_flop_per_s": m.CPUFlops, "gpu_to_host_bytes_per_s": m.GPUToHost,
			"host_copy_latency_s": m.HostCopyStart, "round_trip_s": m.RoundTrip, "peer_memory_bytes": m.PeerMemory,
			"peer_to_gpu_bytes_per_s": m.PeerToGPU, "peer_copy_latency_s": m.PeerCopyStart,
		} {
			optional := strings.HasPrefix(key, "peer_") || strings.HasSuffix(key, "_s") && !strings.Contains(key, "_per_s")
			switch {
			case v == nil:
				t.Errorf("%s has no %s", name, key)
			case *v < 0 || *v == 0 && !optional:
				t.Errorf("%s: %s is %v", name, key, *v)
			case *v > 0:
				sourced = append(sourced, key)
			}
		}
		for _, key := range sourced {
			if m.Sources[key] == "" {
				t.Errorf("%s: nothing says where %s is from", name, key)
			}
		}
		if len(m.Sources) != len(sourced) {
			t.Errorf("%s: %d sources for %d numbers", name, len(m.Sources), len(sourced))
		}
	}
	for _, name := range []string{"", "H200", "../presets/mixtral-8x7b", "h200.json"} {
		if _, ok := Hardware(name); ok {
			t.Errorf("there is a machine %q", name)
		}
	}
}
