package planner

import (
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
)

func hardwarePreset(t testing.TB, name string) Hardware {
	t.Helper()
	h, err := HardwarePreset(name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func h200(t testing.TB) Hardware { return hardwarePreset(t, "h200") }

func TestHardwarePresets(t *testing.T) {
	for _, name := range configs.HardwareNames() {
		h := hardwarePreset(t, name)
		if h.GPUMemory < 14<<30 || h.GPUFlops/h.GPUMemoryRate < 100 || h.PeerMemory > 0 && h.PeerToGPU < 2*h.HostToGPU[0] {
			t.Errorf("%s: %+v", name, h)
		}
	}
	if _, err := HardwarePreset("tpu"); err == nil || !strings.Contains(err.Error(), "a100-80, h100-80, h200, l4, t4") {
		t.Errorf("got %v", err)
	}
}

// Single copies measured on two H200, in microseconds.
func TestCopySeconds(t *testing.T) {
	h := h200(t)
	for _, c := range []struct {
		mib        float64
		host, peer float64
	}{
		{1.0 / 16, 8.6, 9.5}, {1, 26, 12}, {4, 83, 20}, {16.5, 319, 55}, {150, 2839, 407}, {336, 6371, 900},
	} {
		n := int64(c.mib * (1 << 20))
		if host := 1e6 * h.HostCopySeconds(n, 1); !near(host, c.host, 0.04) {
			t.Errorf("%v MiB from the host: %.1f us, measured %v", c.mib, host, c.host)
		}
		if peer := 1e6 * h.PeerCopySeconds(n); !near(peer, c.peer, 0.04) {
			t.Errorf("%v MiB from a peer: %.1f us, measured %v", c.mib, peer, c.peer)
		}
	}
}

func TestHardwareValidate(t *testing.T) {
	for _, c := range []struct {
		change func(*Hardware)
		want   string
	}{
		{func(h *Hardware) { h.GPUFlops = 0 }, "gpu_flop_per_s is 0, it must be above 0"},
		{func(h *Hardware) { h.HostMemoryRate = math.NaN() }, "host_memory_bytes_per_s is NaN"},
		{func(h *Hardware) { h.RoundTrip = -1 }, "round_trip_s is -1, it must be at least 0"},
		{func(h *Hardware) { h.HostToGPU = nil }, "host_to_gpu_bytes_per_s is empty"},
		{func(h *Hardware) { h.HostToGPU = []float64{2, 1} }, "ascending"},
		{func(h *Hardware) { h.PeerToGPU = 0 }, "where there is peer memory"},
		{func(h *Hardware) { h.PeerToGPU, h.PeerMemory = 0, 0 }, "several paths"},
	} {
		h := h200(t)
		c.change(&h)
		if err := h.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	data, _ := configs.Hardware("h200")
	for _, text := range []string{`{`, string(data) + `{}`, `{"name": "x", "speed": 3}`, `{"name": "x"}`} {
		if _, err := ParseHardware([]byte(text)); err == nil {
			t.Errorf("%s is hardware", text)
		}
	}
}

// Whatever is read as hardware can be planned for.
func FuzzParseHardware(f *testing.F) {
	for _, name := range configs.HardwareNames() {
		data, _ := configs.Hardware(name)
		f.Add(data)
	}
	f.Add([]byte(`{"host_to_gpu_bytes_per_s": [1e308, 1e309]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := ParseHardware(data)
		if err != nil {
			return
		}
		p := Problem{Model: presetModel(t, "phi-tiny-moe"), Hardware: h, Workload: Workload{PromptTokens: 77, NewTokens: 32}}
		r := predict(t, p, Policy{Batch: 8})
		if !(r.Decode.Seconds >= 0) || len(r.Memory.GPU.Parts) == 0 {
			t.Errorf("%+v", r)
		}
		if best, err := p.Search(Choices{MaxBatch: 8}); err == nil {
			if again, err := p.Predict(best.Policy); err != nil {
				t.Errorf("%+v: %v", again.Policy, err)
			}
		}
	})
}
