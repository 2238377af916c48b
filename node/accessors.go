package node

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/pipeline"
)

// ErrLost marks errors of a device that is gone, whenever it went.
var ErrLost = device.ErrLost

// EncodePrompt turns text into the ids of a prompt: as it stands, with the special
// tokens that the tokenizer puts around a prompt, or, if asChat, as a user's
// message in the model's chat template. Errors wrap ErrConfig where the model has
// no tokenizer or no template.
func (n *Node) EncodePrompt(text string, asChat bool) ([]int32, error) {
	if n.tokenizer == nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no tokenizer: give the prompt as token ids", n.name))
	}
	if !asChat {
		return n.tokenizer.Encode(text, true), nil
	}
	if n.template == nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no chat template: leave out --chat, or add a chat_template.jinja", n.name))
	}
	text, err := n.template.Render([]chat.Message{{Role: "user", Content: text}}, chat.Options{AddGenerationPrompt: true})
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	// The template has written the special tokens out.
	return n.tokenizer.Encode(text, false), nil
}

// Where counts the experts by the name of the tier that they are in.
func (r *Report) Where() map[string]int {
	where := byTier(make([]int, len(r.Experts.Hits)))
	for _, l := range r.Layers {
		for _, t := range l.Tiers {
			where[t.String()]++
		}
	}
	return where
}

// Hits is how often an expert was where a layer needed it, by tier.
func (r *Report) Hits() map[string]int64 { return byTier(r.Experts.Hits[:]) }

// Fetched is the bytes of fetched experts by the tier that they came from.
func (r *Report) Fetched() map[string]int64 { return byTier(r.Experts.Fetched[:]) }

func byTier[T any](values []T) map[string]T {
	m := make(map[string]T, len(values))
	for t, v := range values {
		m[experts.Tier(t).String()] = v
	}
	return m
}

// Inspection is what Open would do with the same options.
type Inspection struct {
	Model  string
	Config *models.Config
	Sizes  Sizes
	// Routing and DType in words: how experts are chosen, the type of weights.
	Routing, DType string
	// Local and Offloaded experts, and the tier of each.
	Local, Offloaded int
	Placement        []LayerPlacement
	// Demands on the memory spaces, without the KV cache.
	Demands []Demand
	// KV is the cache that the rest is used for, in blocks of KVBlockBytes.
	KV           KVFit
	KVBlockBytes int64
	// Problem is why Open would fail for lack of memory on these devices; nil if it
	// would not. Here is why they cannot be emulated on this machine, or nil.
	Problem, Here error
}

// LayerPlacement says of one layer in which tiers its experts start.
type LayerPlacement struct {
	Layer int
	Tiers []string
}

// Inspect tells a model's sizes and works out what would live where. It reads no
// weights and takes no memory; a preset needs no load format. Errors are as those
// of Open, but for memory that does not suffice, which Inspection tells.
func Inspect(o Options) (_ *Inspection, err error) {
	if _, ok := configs.Preset(o.Settings.Model); ok {
		o.Settings.LoadFormat = "dummy"
	}
	if err := o.Settings.Validate(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	n := &Node{settings: o.Settings}
	defer func() { err = errors.Join(err, n.Close()) }()
	model, err := OpenModel(o.Settings)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fail(ErrModel, model.Close())) }()
	n.name, n.config = model.Name, model.Config
	if err := n.machines(&o); err != nil {
		return nil, err
	}
	if n.layout, err = models.NewLayout(n.config, model.Source, nil); err != nil {
		return nil, fail(ErrModel, err)
	}
	needs, err := n.needs(&o)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	in := &Inspection{
		Model: n.name, Config: n.config, Sizes: SizesOf(n.config, n.layout),
		Routing: routing(n.config.Route), DType: n.config.DType.String(),
		Local: n.plan.LocalExperts, Offloaded: n.plan.OffloadedExperts,
		Demands: []Demand{needs.device, needs.host}, KVBlockBytes: needs.kv.BlockBytes(),
	}
	for i, l := range n.plan.Layers {
		tiers := make([]string, n.plan.Experts)
		for e := range tiers {
			tiers[e] = experts.Local.String()
		}
		for _, e := range n.plan.Placement[i] {
			tiers[e] = experts.Host.String()
		}
		in.Placement = append(in.Placement, LayerPlacement{l, tiers})
	}
	in.KV, in.Problem = n.fit(&o, needs)
	in.Here = n.together(needs.device.Need(), needs.host.Need())
	return in, nil
}

// needs is what a configuration takes, before it is known whether that is there.
type needs struct {
	kv           kvcache.Shape
	device, host Demand
}

// needs works out plan and limits, and what they take of which memory.
func (n *Node) needs(o *Options) (*needs, error) {
	s, c := &o.Settings, n.config
	n.limits = models.Limits{
		MaxRows: s.MaxNumBatchedTokens, MaxSeqs: min(s.MaxNumSeqs, s.MaxNumBatchedTokens),
		MaxModelLen: c.MaxPositions, BlockTokens: kvcache.DefaultBlockTokens,
	}
	n.limits.MaxLogits = n.limits.MaxSeqs
	if o.HostLogits {
		n.limits.MaxLogits = n.limits.MaxRows
	}
	if s.MaxModelLen > 0 && s.MaxModelLen < n.limits.MaxModelLen {
		n.limits.MaxModelLen = s.MaxModelLen
	}
	var layers []int
	for l, dense := range c.Dense {
		if !dense {
			layers = append(layers, l)
		}
	}
	layout, err := n.backend.ExpertLayout(c.ExpertShape(n.layout.ExpertDType))
	if err != nil {
		return nil, err
	}
	placement, err := experts.Place(len(layers), c.Experts, s.OffloadFraction)
	if err != nil {
		return nil, err
	}
	if n.plan, err = experts.NewPlan(experts.Config{Layers: layers, Experts: c.Experts, Layout: layout, Placement: placement}); err != nil {
		return nil, err
	}
	usage, err := n.machine.Usage(n.space)
	if err != nil {
		return nil, err
	}
	host, err := n.machine.Usage(device.Host)
	if err != nil {
		return nil, err
	}
	rows := pipeline.RowDataBytes(n.limits, s.MicroBatchSize)
	return &needs{
		kv: kvcache.Shape{
			Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
			DType: n.backend.ActivationDType(), BlockTokens: kvcache.DefaultBlockTokens,
		},
		device: Demand{
			Space: n.space.String(), Capacity: usage.Capacity - usage.Other, Share: s.GPUMemoryUtilization,
			Parts: []Part{
				{"weights but experts", n.layout.Bytes},
				{"local experts", n.plan.LocalBytes},
				{"ring of fetched experts", n.plan.RingBytes},
				{"tables", n.plan.TableBytes},
				{"activations", models.WorkspaceBytes(c, n.backend, n.limits)},
				{"row data", rows},
			},
			Advice: "offload more experts (offload-fraction), lower max-num-batched-tokens, or give the device more memory",
		},
		host: Demand{
			Space: device.Host.String(), Capacity: host.Capacity - host.Other, Share: 1,
			Parts: []Part{
				{"offloaded experts", n.plan.HostBytes},
				{"loading", n.plan.StagingBytes + uploadBuffers*uploadBytes},
				{"tables", n.plan.UploadBytes},
				{"row data", rows + pipeline.BackBytes(c, n.limits, o.HostLogits)},
			},
			Advice: "offload fewer experts (offload-fraction), or give the host more memory",
		},
	}, nil
}

// fit sizes the KV cache with what the needs leave, or says what there is too
// little of.
func (n *Node) fit(o *Options, w *needs) (KVFit, error) {
	s := &o.Settings
	room, err := w.device.Room()
	if err != nil {
		return KVFit{}, err
	}
	if _, err := w.host.Room(); err != nil {
		return KVFit{}, err
	}
	return KVDemand{
		Room: room, BlockBytes: w.kv.BlockBytes(), BlockTokens: w.kv.BlockTokens,
		MaxModelLen: s.MaxModelLen, ModelPositions: n.config.MaxPositions, MaxNumSeqs: s.MaxNumSeqs, Blocks: s.NumKVBlocks,
	}.Fit()
}

func routing(m kernels.RouteMethod) string {
	return [...]string{
		kernels.Softmax:       "softmax",
		kernels.SoftmaxRenorm: "softmax, renormalized",
		kernels.SparseMixer:   "sparsemixer",
	}[m]
}

// AvailableMemory is what this machine can still give to processes, in bytes, and
// false where the system does not say.
func AvailableMemory() (int64, bool) { return availableMemory() }

// EmulateHelp tells what the setting emulate may hold.
const EmulateHelp = emulated.SpecHelp
