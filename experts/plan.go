package experts

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/kernels"
)

// Config says what there is to keep, before any memory is taken.
type Config struct {
	// Layers lists the model's layers that have experts, ascending, by the model's
	// own numbers. These numbers are what the store's methods take.
	Layers []int
	// Experts is how many each of them has.
	Experts int
	// Layout of one expert, from the backend.
	Layout kernels.ExpertLayout
	// Placement of the layers in the order of Layers: see Place and PlaceResident.
	Placement Placement
	// CacheSlots is how many fetched experts the compute GPU holds. Default: twice
	// the largest number that one layer misses. At least that number.
	CacheSlots int
	// Waves is into how many launches the fetched experts of a layer opened whole are cut,
	// at most, OnDemandWaves into how many those of a layer of which only chosen ones are
	// fetched. Many launches begin with the first experts that arrive; few compute faster.
	// A ring of two layers lets copies go on meanwhile, so that the second counts where
	// all are fetched. Default: 1 and 4.
	Waves, OnDemandWaves int
	// OnDemandWaveBytes is the least that a wave of chosen experts brings, where there are
	// several: each wave costs a request, a wait and a launch of its own. Default: 32 MiB.
	OnDemandWaveBytes int64
	// Dynamic gives local experts a host copy as well, so that Swap can put others in
	// their places.
	Dynamic bool
	// SpareSlots is how many swaps can be under way: extents of the compute GPU's
	// memory beside those of local experts. Default: 2 where Adaptive and something is
	// local and something is not, else none.
	SpareSlots int
	// StagingBytes is the pinned memory that local experts are filled through. It
	// is given back by Seal. Default: 16 MiB, or two extents where the layout is
	// not row-major.
	StagingBytes int64
}

const (
	defaultWaves         = 1
	defaultOnDemandWaves = 4
	defaultWaveBytes     = 32 << 20
	defaultSpareSlots    = 2
)

// Plan is how much memory a Config takes, in bytes.
type Plan struct {
	Config
	// ResidentExperts and OffloadedExperts add up to all of them.
	ResidentExperts, OffloadedExperts int
	// ResidentBytes (with spare extents), CacheBytes and TableBytes lie in the compute
	// GPU's memory.
	ResidentBytes, CacheBytes, TableBytes int64
	// HostBytes and UploadBytes lie in pinned host memory; so does StagingBytes (of
	// the Config), while loading.
	HostBytes, UploadBytes int64
}

// DeviceBytes is what the compute GPU's memory must have.
func (p Plan) DeviceBytes() int64 { return p.ResidentBytes + p.CacheBytes + p.TableBytes }

// PinnedBytes is what the host must have while loading, the most there ever is.
func (p Plan) PinnedBytes() int64 { return p.HostBytes + p.UploadBytes + p.StagingBytes }

// Next is the layer whose experts are wanted after those of layer: the next one
// with experts, or, behind the last, the first. layer itself need not have any. It
// is -1 for a model without experts.
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

// Missing is how many experts of a layer, by the model's number, are not local: 0 for
// a layer without experts. It stays the same, whichever they are: swaps take one for one.
func (p Plan) Missing(layer int) int {
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

// NewPlan fills in the defaults of c and says what it takes.
func NewPlan(c Config) (Plan, error) {
	if len(c.Placement) != len(c.Layers) {
		return Plan{}, fmt.Errorf("experts: a placement of %d layers for a model with %d layers of experts", len(c.Placement), len(c.Layers))
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
	return c.Sized(c.Placement.Offloaded(), c.Placement.Largest())
}

// Sized says what c takes where so many experts are offloaded, largest of them in one
// layer, wherever: c's Placement is not looked at, and not checked.
func (c Config) Sized(offloaded, largest int) (Plan, error) {
	if c.Layout.Size < c.Layout.Bytes() || c.Layout.Size%device.Alignment != 0 {
		return Plan{}, fmt.Errorf("experts: an extent of %d bytes for an expert of %d; it must be a multiple of %d and hold the expert", c.Layout.Size, c.Layout.Bytes(), device.Alignment)
	}
	if c.CacheSlots == 0 {
		c.CacheSlots = 2 * largest
	}
	if c.CacheSlots < largest {
		return Plan{}, fmt.Errorf("experts: a ring of %d slots cannot hold the %d experts that one layer misses; give it at least %d", c.CacheSlots, largest, largest)
	}
	if c.Waves == 0 {
		c.Waves = defaultWaves
	}
	if c.OnDemandWaves == 0 {
		c.OnDemandWaves = defaultOnDemandWaves
	}
	if c.OnDemandWaveBytes == 0 {
		c.OnDemandWaveBytes = defaultWaveBytes
	}
	if c.Waves < 0 || c.OnDemandWaves < 0 {
		return Plan{}, fmt.Errorf("experts: %d waves, and %d waves of chosen experts; there must be at least one", c.Waves, c.OnDemandWaves)
	}
	all := len(c.Layers) * c.Experts
	swaps := c.Dynamic && offloaded > 0 && offloaded < all
	switch {
	case c.SpareSlots < 0:
		return Plan{}, fmt.Errorf("experts: %d spare slots", c.SpareSlots)
	case !swaps:
		c.SpareSlots = 0
	case c.SpareSlots == 0:
		c.SpareSlots = defaultSpareSlots
	}
	switch {
	case c.StagingBytes < 0:
		return Plan{}, fmt.Errorf("experts: %d bytes of staging memory", c.StagingBytes)
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
	p.UploadBytes = uploadRows * p.TableBytes
	return p, nil
}

const (
	slotBytes = 8 // an address of the slot table
	idBytes   = 4 // an expert's number in a wave's list
	// uploadRows is how many images of a layer's row of the tables there are in pinned
	// memory: the one on its way, and the one being written.
	uploadRows = 2
)

// rowBytes is the size of a layer's row of the tables: addresses, then numbers.
func (c Config) rowBytes() int64 {
	return (int64(c.Experts)*(slotBytes+idBytes) + slotBytes - 1) / slotBytes * slotBytes
}

// onDemandWaves is into how many waves so many chosen experts are cut.
func (p *Plan) onDemandWaves(experts int) int {
	return max(1, min(p.OnDemandWaves, int(int64(experts)*p.Layout.Size/p.OnDemandWaveBytes)))
}
