package sizing

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/planner"
)

// Memories are the memory spaces of a configuration.
type Memories struct {
	// Space of the GPU that computes.
	Space device.Space
	// GPU and Host are their usage.
	GPU, Host device.Usage
	// Share is the usable part of the GPU's memory, 0 to 1.
	Share float64
}

// Needs is the memory of a configuration, whether or not it fits.
type Needs struct {
	Plan         experts.Plan
	Limits       forward.Limits
	KV           kvcache.Shape
	Device, Host Demand
	// kvOnHost: the KV cache is in host memory. positions is the model's context.
	kvOnHost  bool
	positions int
}

// Needs computes the plan of experts and the limits of steps, and their memory.
func (f *Footprint) Needs(b configs.Batch, placement experts.Placement, m Memories) (*Needs, error) {
	store := f.Experts(placement.MaxPerLayer())
	store.Placement = placement
	plan, err := experts.NewPlan(store)
	if err != nil {
		return nil, err
	}
	limits := f.Limits(b.MaxNumBatchedTokens, b.MaxNumSeqs)
	gpu, host := f.Parts(&plan, limits, b)
	return &Needs{
		Plan: plan, Limits: limits, KV: f.KV(), kvOnHost: b.Attention == configs.OnCPU, positions: f.o.Config.MaxPositions,
		Device: Demand{
			Space: m.Space.String(), Capacity: m.GPU.Capacity - m.GPU.OtherProcesses, Share: m.Share, Parts: gpu,
		},
		Host: Demand{
			Space: device.Host.String(), Capacity: m.Host.Capacity - m.Host.OtherProcesses, Share: 1, Parts: host,
		},
	}, nil
}

// Held is what the GPU's memory is for while the model runs, with the KV cache.
func (w *Needs) Held(fit KVFit) []planner.Part { return w.held(w.Device.Parts, fit, !w.kvOnHost) }

// HeldOnHost is the same of pinned host memory.
func (w *Needs) HeldOnHost(fit KVFit) []planner.Part { return w.held(w.Host.Parts, fit, w.kvOnHost) }

func (w *Needs) held(parts []planner.Part, fit KVFit, kv bool) (all []planner.Part) {
	if kv {
		parts = append(slices.Clone(parts), planner.Part{Name: "KV cache", Bytes: int64(fit.Blocks) * w.KV.BlockBytes()})
	}
	return slices.DeleteFunc(slices.Clone(parts), func(p planner.Part) bool { return p.Bytes == 0 || p.Name == loadPart })
}

// HostKVShare is the part of the host's free memory that the KV cache may use: other
// processes need memory, too.
const HostKVShare = 0.8

// KVTierRoom is the host memory, in bytes, that KV tiers may take where those of the needs do not
// fit and less of them would: false where they are not why.
func (w *Needs) KVTierRoom() (int64, bool) {
	var tiers int64
	for _, p := range w.Host.Parts {
		if p.Name == kvTierPart {
			tiers = p.Bytes
		}
	}
	room := w.Host.Usable() - (w.Host.Need() - tiers)
	return room, tiers > 0 && room >= 0 && room < tiers
}

// Fit sizes the KV cache with the room that the needs leave in its memory space. Where they
// do not fit, the error is a *MisfitError.
func (w *Needs) Fit(maxNumSeqs int, kv configs.KV) (KVFit, error) {
	if err := checkLength(kv.MaxModelLen, w.positions); err != nil {
		return KVFit{}, err
	}
	room, err := w.Device.Room()
	if err != nil {
		return KVFit{}, err
	}
	onHost, err := w.Host.Room()
	if err != nil {
		return KVFit{}, err
	}
	if w.kvOnHost {
		room = int64(HostKVShare * float64(onHost))
	}
	return KVDemand{
		Lendable: w.lendable(kv), Room: room, BlockBytes: w.KV.BlockBytes(), BlockTokens: w.KV.BlockTokens,
		MaxModelLen: kv.MaxModelLen, ModelPositions: w.positions, MaxNumSeqs: maxNumSeqs, Blocks: kv.NumGPUBlocksOverride,
	}.Fit()
}

// ExtentBlocks is the number of successive KV blocks that hold an expert, wherever they begin.
func (w *Needs) ExtentBlocks() int {
	block, bytes := w.KV.BlockBytes(), w.Plan.Layout.Size
	if block%device.Alignment != 0 {
		bytes += device.Alignment
	}
	return int((bytes + block - 1) / block)
}

// lendable is the number of KV blocks that experts could use if they were lent all: those of the
// offloaded experts.
func (w *Needs) lendable(kv configs.KV) int {
	if kv.ExpertsShare != configs.AutoShare || w.kvOnHost {
		return 0
	}
	return w.Plan.OffloadedExperts * w.ExtentBlocks()
}

// Extents is the number of extents, of ExtentBlocks each, that the KV cache may lend to experts:
// what is left beside a sequence of maximum length.
func (w *Needs) Extents(fit KVFit, kv configs.KV) int {
	n := min(w.lendable(kv), fit.Blocks-w.KV.BlocksFor(fit.MaxModelLen))
	return max(n, 0) / w.ExtentBlocks()
}

// Together refuses needs that fit emulated devices one by one but not this machine, which
// has a number of bytes and whose memory they share.
func (w *Needs) Together(have int64) error {
	_, err := Demand{
		Space: "this machine", Capacity: have, Share: 1,
		Parts:  []planner.Part{{Name: "emulated " + w.Device.Space, Bytes: w.Device.Need()}, {Name: "emulated host", Bytes: w.Host.Need()}},
		Advice: "use a smaller model, fewer layers (--num-hidden-layers, with --load-format dummy), or a machine with more memory",
	}.Room()
	return err
}

// Left is the memory left for each of a number of peers of the bytes that all emulated
// memories share, beside the needs of GPU and host and the KV cache.
func (w *Needs) Left(have int64, fit KVFit, peers int) int64 {
	left := max(have-w.Device.Need()-w.Host.Need(), 0)
	// The KV cache is allocated page by page as sequences grow, up to half of what is left.
	left -= min(int64(fit.Blocks)*w.KV.BlockBytes(), left/2)
	return left / int64(peers)
}

// Place returns the offloaded experts: a fraction or, where resident experts are named, all
// but those of the list.
func (f *Footprint) Place(o configs.Offload, list string) (experts.Placement, error) {
	layers, each := f.layers, f.o.Config.Experts
	if o.ResidentExperts == "" {
		return experts.Place(len(layers), each, o.Fraction)
	}
	named, err := configs.ParseExperts(list)
	if err != nil {
		return nil, fmt.Errorf("--resident-experts: %w", err)
	}
	var resident []experts.ID
	for _, l := range named {
		at, ok := slices.BinarySearch(layers, l.Layer)
		if !ok {
			return nil, fmt.Errorf("--resident-experts: layer %d has no experts; the model's layers with experts are %s", l.Layer, spans(layers))
		}
		for _, e := range l.Experts {
			if e >= each {
				return nil, fmt.Errorf("--resident-experts: no expert %d in layer %d: the layer has %d, from 0 on", e, l.Layer, each)
			}
			resident = append(resident, experts.ID{Layer: at, Expert: e})
		}
	}
	return experts.PlaceResident(len(layers), each, resident)
}

// spans prints ascending numbers as ranges: "0-5, 8".
func spans(numbers []int) string {
	if len(numbers) == 0 {
		return "none"
	}
	var parts []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		part := strconv.Itoa(numbers[i])
		if j > i {
			part += "-" + strconv.Itoa(numbers[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return strings.Join(parts, ", ")
}

// ModelSizes are the sizes of a model's weights in bytes, as inspect prints them.
type ModelSizes struct {
	Parameters           int64
	ExpertCount          int
	ExpertBytes, Experts int64 // one, and all of them
	Other                int64 // non-expert (dense) weights
	KVPerToken           int64 // 16 bit
}

// OfModel is the sizes of a model in a layout.
func OfModel(c *models.Config, l *models.Layout) ModelSizes {
	s := ModelSizes{
		Parameters: c.Parameters(), ExpertCount: c.ExpertCount(), Experts: l.ExpertBytes,
		Other: l.Bytes, KVPerToken: c.KVBytesPerToken(c.DType),
	}
	if s.ExpertCount > 0 {
		s.ExpertBytes = l.ExpertBytes / int64(s.ExpertCount)
	}
	return s
}
