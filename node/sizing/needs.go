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

// Memories are those that a configuration may use.
type Memories struct {
	// Space of the GPU that computes.
	Space device.Space
	// GPU and Host are their accounts.
	GPU, Host device.Usage
	// Share of the GPU's that may be used, 0 to 1.
	Share float64
}

// Needs is what a configuration takes, before it is known whether that is there.
type Needs struct {
	Plan         experts.Plan
	Limits       forward.Limits
	KV           kvcache.Shape
	Device, Host Demand
	// kvOnHost says where keys and values lie; positions is the most that the model has.
	kvOnHost  bool
	positions int
}

// Needs works out plan and limits of steps, and what they take of which memory.
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
			Advice: "offload more experts (offload-fraction), lower max-num-batched-tokens, or give the device more memory",
		},
		Host: Demand{
			Space: device.Host.String(), Capacity: m.Host.Capacity - m.Host.OtherProcesses, Share: 1, Parts: host,
			Advice: "offload fewer experts (offload-fraction), or give the host more memory",
		},
	}, nil
}

// hostKVShare of the host's room may be keys and values: the rest of the machine lives
// there too.
const hostKVShare = 0.8

// Fit sizes the KV cache with what the needs leave where it lies, or says what there is
// too little of.
func (w *Needs) Fit(maxNumSeqs int, kv configs.KV) (KVFit, error) {
	room, err := w.Device.Room()
	if err != nil {
		return KVFit{}, err
	}
	onHost, err := w.Host.Room()
	if err != nil {
		return KVFit{}, err
	}
	if w.kvOnHost {
		room = int64(hostKVShare * float64(onHost))
	}
	return KVDemand{
		Room: room, BlockBytes: w.KV.BlockBytes(), BlockTokens: w.KV.BlockTokens,
		MaxModelLen: kv.MaxModelLen, ModelPositions: w.positions, MaxNumSeqs: maxNumSeqs, Blocks: kv.NumGPUBlocksOverride,
	}.Fit()
}

// Together refuses what emulated devices could hold one by one but this machine, which
// has so many bytes and whose memory they all share, cannot.
func (w *Needs) Together(have int64) error {
	_, err := Demand{
		Space: "this machine", Capacity: have, Share: 1,
		Parts:  []planner.Part{{Name: "emulated " + w.Device.Space, Bytes: w.Device.Need()}, {Name: "emulated host", Bytes: w.Host.Need()}},
		Advice: "use a smaller model, fewer layers (num-hidden-layers, with dummy weights), or a machine with more memory",
	}.Room()
	return err
}

// Left is what of so many bytes, which all emulated memories share, is left for each of a
// number of peers beside the GPU's and the host's needs and the cache.
func (w *Needs) Left(have int64, fit KVFit, peers int) int64 {
	left := max(have-w.Device.Need()-w.Host.Need(), 0)
	// A cache is taken page by page as sequences grow; it has a right to half.
	left -= min(int64(fit.Blocks)*w.KV.BlockBytes(), left/2)
	return left / int64(peers)
}

// Place says which experts are offloaded: a fraction, or, where local experts are asked
// for, all but those that list has.
func (f *Footprint) Place(o configs.Offload, list string) (experts.Placement, error) {
	layers, each := f.layers, f.o.Config.Experts
	if o.ResidentExperts == "" {
		return experts.Place(len(layers), each, o.Fraction)
	}
	named, err := configs.ParseExperts(list)
	if err != nil {
		return nil, fmt.Errorf("resident-experts: %w", err)
	}
	var local []experts.ID
	for _, l := range named {
		at, ok := slices.BinarySearch(layers, l.Layer)
		if !ok {
			return nil, fmt.Errorf("resident-experts: layer %d has no experts; the model's layers that have are %s", l.Layer, spans(layers))
		}
		for _, e := range l.Experts {
			if e >= each {
				return nil, fmt.Errorf("resident-experts: there is no expert %d in layer %d: it has %d, from 0 on", e, l.Layer, each)
			}
			local = append(local, experts.ID{Layer: at, Expert: e})
		}
	}
	return experts.PlaceResident(len(layers), each, local)
}

// spans writes ascending numbers shortly: "0-5, 8".
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

// ModelSizes are a model's, in bytes, as `inspect` shows them.
type ModelSizes struct {
	Parameters           int64
	ExpertCount          int
	ExpertBytes, Experts int64 // one, and all of them
	Other                int64
	KVPerToken           int64 // 16 bit
}

// OfModel is the sizes of a model whose weights lie as l says.
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
