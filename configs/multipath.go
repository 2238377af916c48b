package configs

import (
	"fmt"
	"slices"
	"strings"
)

// Multipath says how copies between host memory and one GPU of a machine use the PCIe links of
// several GPUs: the object multipath of a hardware file, which `bench transfer --calibrate` measures.
// Copies to a GPU go in, copies from it out. GPUs have the driver's numbers.
type Multipath struct {
	// GPU is the one that was measured: the others of a machine may have other relays.
	GPU int `json:"gpu"`
	// Relays are the GPUs through whose memory and over whose link copies gain, in the order in
	// which they gain most: each is measured with those before it. A GPU whose link shares its rate
	// with those before it gains nothing and is none of them.
	Relays []int `json:"relays"`
	// GPUToHost is the rate of copies out, in bytes/s, with 0, 1, 2, … of the relays. Those of copies
	// in are host_to_gpu_bytes_per_s of the file, in the same order.
	GPUToHost []float64 `json:"gpu_to_host_bytes_per_s"`
	// ChunkIn and ChunkOut are the sizes of chunks in bytes.
	ChunkIn  int64 `json:"chunk_in_bytes"`
	ChunkOut int64 `json:"chunk_out_bytes"`
	// ThresholdIn and ThresholdOut are the sizes of copies in bytes below which no relay is used.
	ThresholdIn  int64 `json:"threshold_in_bytes"`
	ThresholdOut int64 `json:"threshold_out_bytes"`
	// Depth is the number of chunks in flight on each link.
	Depth int `json:"depth"`
	// SharedRoots are sets of GPUs whose links share a rate: the rates of these links do not add up. None
	// where every link adds its own.
	SharedRoots [][]int `json:"shared_roots,omitempty"`
}

// Validate names the fields that cannot be.
func (m *Multipath) Validate() error {
	var wrong []string
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	for i, g := range m.Relays {
		switch {
		case g < 0:
			bad("relays has %d: GPUs are numbered from 0", g)
		case g == m.GPU:
			bad("relays has %d, the GPU that was measured", g)
		case slices.Contains(m.Relays[:i], g):
			bad("relays has %d twice", g)
		}
	}
	if len(m.GPUToHost) != len(m.Relays)+1 {
		bad("gpu_to_host_bytes_per_s has %d rates, it must have one for each of 0 to %d relays", len(m.GPUToHost), len(m.Relays))
	}
	for i, rate := range m.GPUToHost {
		if !(rate > 0) || i > 0 && rate < m.GPUToHost[i-1] {
			bad("gpu_to_host_bytes_per_s is %v, it must be above 0 and ascending", m.GPUToHost)
			break
		}
	}
	for _, f := range []struct {
		key   string
		value int64
		least int64
	}{
		{"gpu", int64(m.GPU), 0},
		{"chunk_in_bytes", m.ChunkIn, 1},
		{"chunk_out_bytes", m.ChunkOut, 1},
		{"threshold_in_bytes", m.ThresholdIn, 0},
		{"threshold_out_bytes", m.ThresholdOut, 0},
		{"depth", int64(m.Depth), 1},
	} {
		if f.value < f.least {
			bad("%s is %d, it must be at least %d", f.key, f.value, f.least)
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("multipath: %s", strings.Join(wrong, "; "))
	}
	return nil
}
