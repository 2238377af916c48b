package planner

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
)

// hardwarePreset is a profile by its rates alone; calibrated has also what was measured of kernels.
func hardwarePreset(t testing.TB, name string) Hardware {
	t.Helper()
	h := calibrated(t, name)
	h.Compute = nil
	return h
}

func calibrated(t testing.TB, name string) Hardware {
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
		if h.GPUMemory < 14<<30 || h.GPUFlops/h.GPUMemoryRate < 25 || h.PeerMemory > 0 && h.PeerToGPU < 2*h.HostToGPU[0] {
			t.Errorf("%s: %+v", name, h)
		}
	}
	if _, err := HardwarePreset("tpu"); err == nil || !strings.Contains(err.Error(), "no hardware") || !strings.Contains(err.Error(), strings.Join(configs.HardwareNames(), ", ")) {
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
		if host := 1e6 * h.HostCopySeconds(n, 1, 1); !near(host, c.host, 0.04) {
			t.Errorf("%v MiB from the host: %.1f us, measured %v", c.mib, host, c.host)
		}
		if peer := 1e6 * h.PeerCopySeconds(n, 1); !near(peer, c.peer, 0.04) {
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
	h := h200(t)
	h.GPUFlops, h.RoundTrip, h.HostToGPU = 0, -1, nil
	if err := h.Validate(); err == nil || !strings.Contains(err.Error(), "gpu_flop_per_s") || !strings.Contains(err.Error(), "round_trip_s") || !strings.Contains(err.Error(), "host_to_gpu") {
		t.Errorf("not all that is wrong: %v", err)
	}
}

// An error names all that is missing or unknown, and what there is.
func TestParseHardwareRefuses(t *testing.T) {
	data, _ := configs.Hardware("h200")
	for text, want := range map[string][]string{
		``:                              {"read hardware: it is empty"},
		`{`:                             {"read hardware: it is not JSON: it ends too early"},
		"name,gpu\nh200,1\n":            {`read hardware: line 1 is not JSON from "name,gpu" on`},
		"{\n\t\"base\": \"h200\",\n}\n": {`read hardware: line 3 is not JSON from "}" on`},
		`[]`:                            {"read hardware: json: cannot unmarshal array"},
		`null`:                          {"read hardware: null is not a JSON object"},
		string(data) + `{}`:             {"data after the JSON object"},
		`{"name": "x", "vram": 3, "gpu_memory": 4}`: {
			`unknown field "gpu_memory" (did you mean gpu_memory_bytes or gpu_memory_bytes_per_s?), "vram": known are name, base, sources, gpu_memory_bytes, `, "peer_copy_",
		},
		`{"name": "x"}`: {
			`hardware "x" lacks gpu_memory_bytes (bytes), gpu_memory_bytes_per_s (bytes/s), gpu_flop_per_s (flop/s), gpu_attention_flop_per_s (flop/s), host_memory_bytes (bytes), `,
			"host_to_gpu_bytes_per_s (a list, bytes/s), gpu_to_host_bytes_per_s (bytes/s); optional are ", "round_trip_s (seconds)", `or take what is missing from a profile with "base", one of a10, a100-40`,
		},
		`{"base": "h201"}`:                                  {`base: there is no hardware "h201": known are a10`, "; did you mean h20 or h200?"},
		`{"base": "a100"}`:                                  {`base: hardware "a100" is ambiguous: give a100-40 or a100-80`},
		`{"base": 3}`:                                       {"read hardware: base: "},
		`{"base": "h200", "sources": 3}`:                    {"read hardware: sources: "},
		`{"base": "h200", "gpu_flop_per_s": "a lot"}`:       {"gpu_flop_per_s must be a number (flop/s), and is: string"},
		`{"base": "h200", "host_to_gpu_bytes_per_s": 55e9}`: {"host_to_gpu_bytes_per_s must be a number (a list, bytes/s), and is: number"},
		`{"base": "h200", "gpu_memory_bytes": 1.5}`:         {"gpu_memory_bytes must be a number (bytes), and is: number 1.5"},
		`{"base": "h200", "name": 3}`:                       {"name must be a text, and is: number"},
		`{"base": "h200", "gpu_flop_per_s": -1}`:            {`hardware "h200 with changes": gpu_flop_per_s is -1, it must be above 0`},
		`{"base": "l4", "peer_memory_bytes": 24e9}`:         {"peer_to_gpu_bytes_per_s is 0, it must be above 0 where there is peer memory"},
		`{"name": "x", "gpu_flop_per_s": null}`:             {"gpu_flop_per_s (flop/s)"},
		`{"base": "h200", "multipath": {"gpus": 1}}`:        {`read hardware: multipath: unknown field "gpus"`},
		`{"base": "h200", "multipath": {"gpu": 1, "relays": [0, 2, 1, 2], "gpu_to_host_bytes_per_s": [2, 1]}}`: {
			"multipath: relays has 1, the GPU that was measured; relays has 2 twice; gpu_to_host_bytes_per_s has 2 rates, it must have one for each of 0 to 4 relays; gpu_to_host_bytes_per_s is [2 1], it must be above 0 and ascending",
			"chunk_in_bytes is 0, it must be at least 1; chunk_out_bytes", "depth is 0, it must be at least 1",
		},
		`{"base": "h200", "multipath": {"relays": [3, 1], "gpu_to_host_bytes_per_s": [1, 1, 1], "chunk_in_bytes": 1, "chunk_out_bytes": 1, "depth": 1}}`: {
			"host_to_gpu_bytes_per_s is [5.53e+10 1.03e+11], it must be 3 rates or more: with 0 to 2 relays of multipath",
		},
	} {
		_, err := ParseHardware([]byte(text))
		if err == nil {
			t.Errorf("%s is hardware", text)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v\nwant %s", text, err, w)
			}
		}
	}
}

// A file with a base has the base's figures where it gives none, and says so.
func TestParseHardwareBase(t *testing.T) {
	base := hardwarePreset(t, "rtx-4090")
	h, err := ParseHardware([]byte(`{
		"name": "desk", "base": "RTX 4090", "host_memory_bytes": 64e9, "host_to_gpu_bytes_per_s": [13e9], "gpu_to_host_bytes_per_s": null,
		"sources": {"host_memory_bytes": "two DIMMs"}
	}`))
	if err != nil {
		t.Fatal(err)
	}
	want := base
	want.Name, want.HostMemory, want.HostToGPU = "desk", 64e9, []float64{13e9}
	want.Sources = map[string]string{}
	for _, key := range HardwareFields() {
		want.Sources[key] = "from rtx-4090"
	}
	want.Sources["host_memory_bytes"], want.Sources["host_to_gpu_bytes_per_s"] = "two DIMMs", "given"
	if !reflect.DeepEqual(h, want) {
		t.Errorf("%+v\nwant %+v", h, want)
	}
	if h, err := ParseHardware([]byte(`{"base": "h200"}`)); err != nil || h.Name != "h200 with changes" || h.GPUFlops != h200(t).GPUFlops {
		t.Errorf("%+v, %v", h, err)
	}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ParseHardware(data); err != nil || !reflect.DeepEqual(again, h) {
		t.Errorf("written and read: %+v, %v", again, err)
	}
}

// The section of multipath copies is read and written.
func TestParseMultipath(t *testing.T) {
	h, err := ParseHardware([]byte(`{
		"base": "h200", "multipath": {
			"gpu": 0, "relays": [1], "gpu_to_host_bytes_per_s": [54.1e9, 100e9], "chunk_in_bytes": 2810000, "chunk_out_bytes": 5370000,
			"threshold_in_bytes": 11300000, "threshold_out_bytes": 13000000, "depth": 2, "shared_roots": [[0, 4]]
		}
	}`))
	if err != nil {
		t.Fatal(err)
	}
	want := configs.Multipath{
		Relays: []int{1}, GPUToHost: []float64{54.1e9, 100e9}, ChunkIn: 2810000, ChunkOut: 5370000,
		ThresholdIn: 11300000, ThresholdOut: 13000000, Depth: 2, SharedRoots: [][]int{{0, 4}},
	}
	if !reflect.DeepEqual(*h.Multipath, want) || h.Sources["multipath"] != "given" {
		t.Errorf("%+v, %q", *h.Multipath, h.Sources["multipath"])
	}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ParseHardware(data); err != nil || !reflect.DeepEqual(again, h) {
		t.Errorf("written and read: %+v, %v", again, err)
	}
}

// Whatever is read as hardware can be planned for.
func FuzzParseHardware(f *testing.F) {
	for _, name := range configs.HardwareNames() {
		data, _ := configs.Hardware(name)
		f.Add(data)
	}
	f.Add([]byte(`{"base": "l4", "peer_memory_bytes": 24e9, "peer_to_gpu_bytes_per_s": 1e9}`))
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
