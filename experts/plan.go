package experts

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/kernels"
)

// Config describes a store before any memory is allocated.
type Config struct {
	// Layers are the model's numbers of the layers with experts, ascending. The store's
	// methods take these numbers.
	Layers []int
	// Experts per layer.
	Experts int
	// Layout of one expert, from the backend.
	Layout kernels.ExpertLayout
	// Placement of the layers in the order of Layers: see Place and PlaceResident.
	Placement Placement
	// CacheSlots is the number of slots of the expert cache: at least the largest number
	// of offloaded experts in one layer. Default: twice that.
	CacheSlots int
	// Waves is the maximum number of waves (lists of experts launched together) of a
	// layer whose offloaded experts are all fetched, OnDemandWaves that of a layer of
	// which only the routed ones are. Many waves start computing when the first experts
	// arrive; few compute faster. With an expert cache for two layers copies continue
	// during the computation, so that Waves should be small. Defaults: 1 and 4.
	Waves, OnDemandWaves int
	// OnDemandWaveBytes is the minimum size of a wave of routed experts if there are
	// several: each wave costs a request, a wait and a launch. Default: 32 MiB.
	OnDemandWaveBytes int64
	// Dynamic (dynamic residency) gives resident experts a host copy as well, so that
	// Swap can replace them.
	Dynamic bool
	// SpareSlots is the maximum number of swaps in progress: extents of GPU memory
	// besides those of resident experts. Default: 2 if Dynamic and some but not all
	// experts are resident, otherwise 0.
	SpareSlots int
	// InPlace allocates tables for steps whose kernels read offloaded experts where they lie
	// (Step.ReadInPlace), also where none is offloaded.
	InPlace bool
	// StagingBytes is the size of the load staging buffers: pinned memory through which
	// resident experts are loaded. Seal frees it. Default: 16 MiB, or two extents if the
	// layout is not row-major.
	StagingBytes int64
}

const (
	defaultWaves             = 1
	defaultOnDemandWaves     = 4
	defaultOnDemandWaveBytes = 32 << 20
	defaultSpareSlots        = 2
)

// Plan is the memory footprint of a Config, in bytes.
type Plan struct {
	Config
	// ResidentExperts and OffloadedExperts add up to all experts.
	ResidentExperts, OffloadedExperts int
	// ResidentBytes (with spare extents), CacheBytes and TableBytes are in GPU memory.
	ResidentBytes, CacheBytes, TableBytes int64
	// HostBytes and UploadBytes are in pinned host memory; so is Config.StagingBytes,
	// while loading.
	HostBytes, UploadBytes int64
	// InPlaceBytes are in GPU memory, and as many in pinned host memory: the tables of steps that
	// read experts in place.
	InPlaceBytes int64
}

// DeviceBytes is the GPU memory that the store needs.
func (p Plan) DeviceBytes() int64 {
	return p.ResidentBytes + p.CacheBytes + p.TableBytes + p.InPlaceBytes
}

// PinnedBytes is the pinned host memory that the store needs while loading, its peak.
func (p Plan) PinnedBytes() int64 {
	return p.HostBytes + p.UploadBytes + p.InPlaceBytes + p.StagingBytes
}

// Next is the layer whose experts are needed after those of layer: the next one with
// experts or, after the last, the first. layer itself need not have experts. -1: the
// model has no experts.
func (p Plan) Next(layer int) int {
	if len(p.Layers) == 0 {
		return -1
	}
	i, found := slices.BinarySearch(p.Layers, layer)
	if found {
		i++
	}
	return p.Layers[i%len(p.Layers)]
}

// OffloadedIn is the number of offloaded experts of a layer, by the model's number; 0 for
// a layer without experts. Swaps do not change it.
func (p Plan) OffloadedIn(layer int) int {
	i, found := slices.BinarySearch(p.Layers, layer)
	if !found {
		return 0
	}
	return len(p.Placement[i])
}

// name of an expert, with the model's number of the layer.
func (p Plan) name(id ID) string {
	if id.Layer < 0 || id.Layer >= len(p.Layers) {
		return fmt.Sprintf("%+v", id)
	}
	return fmt.Sprintf("layer %d expert %d", p.Layers[id.Layer], id.Expert)
}

// NewPlan sets the defaults of c and returns its memory footprint.
func NewPlan(c Config) (Plan, error) {
	if len(c.Placement) != len(c.Layers) {
		return Plan{}, fmt.Errorf("experts: the placement has %d layers, the model has %d layers with experts", len(c.Placement), len(c.Layers))
	}
	for i, l := range c.Layers {
		if l < 0 || i > 0 && l <= c.Layers[i-1] {
			return Plan{}, fmt.Errorf("experts: layers %v are not ascending numbers", c.Layers)
		}
		for j, e := range c.Placement[i] {
			if e < 0 || e >= c.Experts || j > 0 && e <= c.Placement[i][j-1] {
				return Plan{}, fmt.Errorf("experts: offloaded experts %v of layer %d are not ascending numbers below %d", c.Placement[i], l, c.Experts)
			}
		}
	}
	return c.SizePlan(c.Placement.Offloaded(), c.Placement.MaxPerLayer())
}

// SizePlan returns the memory footprint of c for so many offloaded experts in total, of
// which at most largest are in one layer. It ignores c.Placement.
func (c Config) SizePlan(offloaded, largest int) (Plan, error) {
	if c.Layout.Size < c.Layout.Bytes() || c.Layout.Size%device.Alignment != 0 {
		return Plan{}, fmt.Errorf("experts: an extent of %d bytes for an expert of %d bytes; it must be a multiple of %d and hold the expert", c.Layout.Size, c.Layout.Bytes(), device.Alignment)
	}
	if c.CacheSlots == 0 {
		c.CacheSlots = 2 * largest
	}
	if c.CacheSlots < largest {
		return Plan{}, fmt.Errorf("experts: an expert cache of %d slots cannot hold the %d offloaded experts of one layer; give it at least %d", c.CacheSlots, largest, largest)
	}
	if c.Waves == 0 {
		c.Waves = defaultWaves
	}
	if c.OnDemandWaves == 0 {
		c.OnDemandWaves = defaultOnDemandWaves
	}
	if c.OnDemandWaveBytes == 0 {
		c.OnDemandWaveBytes = defaultOnDemandWaveBytes
	}
	if c.Waves < 0 || c.OnDemandWaves < 0 {
		return Plan{}, fmt.Errorf("experts: %d waves and %d on-demand waves; there must be at least one", c.Waves, c.OnDemandWaves)
	}
	all := len(c.Layers) * c.Experts
	swaps := c.Dynamic && offloaded > 0 && offloaded < all
	switch {
	case c.SpareSlots < 0:
		return Plan{}, fmt.Errorf("experts: %d spare slots; must not be negative", c.SpareSlots)
	case !swaps:
		c.SpareSlots = 0
	case c.SpareSlots == 0:
		c.SpareSlots = defaultSpareSlots
	}
	switch {
	case c.StagingBytes < 0:
		return Plan{}, fmt.Errorf("experts: %d bytes of staging buffers; must not be negative", c.StagingBytes)
	case offloaded == all, swaps:
		c.StagingBytes = 0
	default:
		c.StagingBytes = load.StagingBytes(c.Layout, c.StagingBytes)
	}
	p := Plan{Config: c, ResidentExperts: all - offloaded, OffloadedExperts: offloaded}
	p.ResidentBytes = int64(p.ResidentExperts+c.SpareSlots) * c.Layout.Size
	p.HostBytes = int64(offloaded) * c.Layout.Size
	if swaps {
		p.HostBytes = int64(all) * c.Layout.Size
	}
	p.Dynamic = swaps
	p.CacheBytes = int64(c.CacheSlots) * c.Layout.Size
	p.TableBytes = int64(len(c.Layers)) * c.rowBytes()
	p.UploadBytes = imagesPerRow * p.TableBytes
	if c.InPlace {
		p.InPlaceBytes = p.inPlaceBytes()
	}
	return p, nil
}

const (
	slotBytes = 8 // an address of the slot table
	idBytes   = 4 // an expert's number in a wave's list
	// imagesPerRow is the number of pinned images of a layer's row of the tables: one
	// being copied to the device, one being written.
	imagesPerRow = 2
)

// rowBytes is the size of a layer's row of the tables: addresses, then numbers.
func (c Config) rowBytes() int64 {
	return (int64(c.Experts)*(slotBytes+idBytes) + slotBytes - 1) / slotBytes * slotBytes
}

// onDemandWaves is the number of waves for so many routed experts.
func (p *Plan) onDemandWaves(experts int) int {
	return max(1, min(p.OnDemandWaves, int(int64(experts)*p.Layout.Size/p.OnDemandWaveBytes)))
}
