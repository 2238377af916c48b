package planner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/moeserve/moeserve/configs"
)

// Hardware is a machine: one GPU that computes, its host, and what it may borrow of
// its peers. Rates are what is reached; a data sheet's peaks overstate them.
type Hardware struct {
	Name string `json:"name"`

	// GPUMemory is in bytes, GPUMemoryRate what a kernel reads of it, in bytes/s.
	GPUMemory     int64   `json:"gpu_memory_bytes"`
	GPUMemoryRate float64 `json:"gpu_memory_bytes_per_s"`
	// GPUFlops is the rate of dense 16-bit products, in flop/s, GPUAttentionFlops that
	// of attention.
	GPUFlops          float64 `json:"gpu_flop_per_s"`
	GPUAttentionFlops float64 `json:"gpu_attention_flop_per_s"`

	// HostMemory is in bytes, HostMemoryRate what all threads read of it, in bytes/s.
	HostMemory     int64   `json:"host_memory_bytes"`
	HostMemoryRate float64 `json:"host_memory_bytes_per_s"`
	// CPUFlops is the rate of all cores, in flop/s.
	CPUFlops float64 `json:"cpu_flop_per_s"`

	// HostToGPU is the rate of copies from host memory over 1, 2, … paths, in
	// bytes/s. Paths after the first lead through peers.
	HostToGPU []float64 `json:"host_to_gpu_bytes_per_s"`
	// GPUToHost is the rate of copies to host memory, in bytes/s.
	GPUToHost float64 `json:"gpu_to_host_bytes_per_s"`
	// HostCopyLatency and PeerCopyLatency, in seconds, come on top of a copy's bytes;
	// queueing does not hide them.
	HostCopyLatency float64 `json:"host_copy_latency_s"`
	PeerCopyLatency float64 `json:"peer_copy_latency_s"`
	// RoundTrip is what the host needs to see a result of the GPU and answer, in
	// seconds.
	RoundTrip float64 `json:"round_trip_s"`

	// PeerMemory is what may be borrowed of peers in all, in bytes; 0: there is none.
	PeerMemory int64 `json:"peer_memory_bytes"`
	// PeerToGPU is the rate of copies from all peers together, in bytes/s.
	PeerToGPU float64 `json:"peer_to_gpu_bytes_per_s"`

	// Sources says of each field, by its key, where the number is from.
	Sources map[string]string `json:"sources,omitempty"`
}

// HardwarePreset returns a machine of package configs by its name: "h200".
func HardwarePreset(name string) (Hardware, error) {
	data, ok := configs.Hardware(name)
	if !ok {
		return Hardware{}, fmt.Errorf("planner: there is no hardware %q: give one of %s", name, strings.Join(configs.HardwareNames(), ", "))
	}
	return ParseHardware(data)
}

// ParseHardware reads a machine from JSON with the keys of Hardware. A key that it
// does not know is an error.
func ParseHardware(data []byte) (Hardware, error) {
	var h Hardware
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&h); err != nil {
		return Hardware{}, fmt.Errorf("planner: read hardware: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Hardware{}, errors.New("planner: read hardware: something follows the object")
	}
	return h, h.Validate()
}

// Validate names the first field, by its key, that cannot be.
func (h Hardware) Validate() error {
	bad := func(key string, value any, want string) error {
		return fmt.Errorf("planner: hardware %q: %s is %v, it must be %s", h.Name, key, value, want)
	}
	for _, f := range []struct {
		key      string
		value    float64
		optional bool
	}{
		{"gpu_memory_bytes", float64(h.GPUMemory), false},
		{"gpu_memory_bytes_per_s", h.GPUMemoryRate, false},
		{"gpu_flop_per_s", h.GPUFlops, false},
		{"gpu_attention_flop_per_s", h.GPUAttentionFlops, false},
		{"host_memory_bytes", float64(h.HostMemory), false},
		{"host_memory_bytes_per_s", h.HostMemoryRate, false},
		{"cpu_flop_per_s", h.CPUFlops, false},
		{"gpu_to_host_bytes_per_s", h.GPUToHost, false},
		{"host_copy_latency_s", h.HostCopyLatency, true},
		{"peer_copy_latency_s", h.PeerCopyLatency, true},
		{"round_trip_s", h.RoundTrip, true},
		{"peer_memory_bytes", float64(h.PeerMemory), true},
		{"peer_to_gpu_bytes_per_s", h.PeerToGPU, true},
	} {
		if f.optional && !(f.value >= 0) {
			return bad(f.key, f.value, "at least 0")
		}
		if !f.optional && !(f.value > 0) {
			return bad(f.key, f.value, "above 0")
		}
	}
	if len(h.HostToGPU) == 0 {
		return bad("host_to_gpu_bytes_per_s", "empty", "one rate or more")
	}
	for i, rate := range h.HostToGPU {
		if !(rate > 0) || i > 0 && rate < h.HostToGPU[i-1] {
			return bad("host_to_gpu_bytes_per_s", h.HostToGPU, "above 0 and ascending")
		}
	}
	if h.PeerMemory > 0 && h.PeerToGPU == 0 {
		return bad("peer_to_gpu_bytes_per_s", 0, "above 0 where there is peer memory")
	}
	if len(h.HostToGPU) > 1 && h.PeerToGPU == 0 {
		return bad("peer_to_gpu_bytes_per_s", 0, "above 0 where there are several paths from the host")
	}
	return nil
}

// HostCopySeconds is the time of one copy from host memory over a number of paths.
func (h Hardware) HostCopySeconds(bytes int64, paths int) float64 {
	return h.HostCopyLatency + float64(bytes)/h.HostToGPU[paths-1]
}

// PeerCopySeconds is the time of one copy from a peer.
func (h Hardware) PeerCopySeconds(bytes int64) float64 {
	return h.PeerCopyLatency + float64(bytes)/h.PeerToGPU
}
