package sizing

import (
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// Shaper is the part of a backend that types and sizes depend on.
type Shaper interface {
	ActivationDType() kernels.DType
	ExpertLayout(shape kernels.ExpertShape) (kernels.ExpertLayout, error)
}

// Options of a footprint.
type Options struct {
	Config *models.Config
	Layout *models.Layout
	Types  Shaper
	// MaxModelLen is the maximum length of a sequence in tokens. Default and maximum: the
	// model's context.
	MaxModelLen int
	// BlockTokens is the number of tokens of a block of the KV cache. Default: that of
	// kvcache.Shape.
	BlockTokens int
	// CacheLayers is the number of layers whose fetched experts the expert cache holds.
	// Default: that of experts.Config.
	CacheLayers int
	// Dynamic: the set of resident experts may change.
	Dynamic bool
	// InPlace: steps of few tokens may read offloaded experts in place.
	InPlace bool
	// HostLogits reserves room for the logits of a step.
	HostLogits bool
	// Graphs: decode steps may be CUDA graphs.
	Graphs bool
	// Clears: peer memory is borrowed, which is scrubbed before release.
	Clears bool
	// Kernels is the GPU memory that the backend has allocated itself, in bytes.
	Kernels int64
	// HostKV is the pinned host memory of KV tiers, by the size of a KV block in bytes.
	// Default: none.
	HostKV func(blockBytes int64) int64
	// ClearsAlways: other memory of peers is borrowed, whatever is offloaded: for KV blocks, or relays.
	ClearsAlways bool
}

// Footprint computes the memory of an engine. It is immutable.
type Footprint struct {
	o      Options
	expert kernels.ExpertLayout
	// layers with experts, by the model's numbers.
	layers []int
}

// New computes the layout of experts.
func New(o Options) (*Footprint, error) {
	f := &Footprint{o: o}
	var err error
	if f.expert, err = o.Types.ExpertLayout(o.Config.ExpertShape(o.Layout.ExpertDType)); err != nil {
		return nil, err
	}
	for l, dense := range o.Config.Dense {
		if !dense {
			f.layers = append(f.layers, l)
		}
	}
	f.o.MaxModelLen = o.Config.MaxPositions
	if o.MaxModelLen > 0 {
		f.o.MaxModelLen = min(f.o.MaxModelLen, o.MaxModelLen)
	}
	return f, nil
}

// Within is the footprint with a lower maximum length of sequences, in tokens.
func (f *Footprint) Within(maxModelLen int) *Footprint {
	shorter := *f
	shorter.o.MaxModelLen = maxModelLen
	return &shorter
}

// MaxModelLen is the maximum length of a sequence in tokens.
func (f *Footprint) MaxModelLen() int { return f.o.MaxModelLen }

// ExpertBytes is the size of an expert in the backend's layout.
func (f *Footprint) ExpertBytes() int64 { return f.expert.Size }

// topLogProbs is the number of alternatives reported with a token's log-probability: the
// maximum of the OpenAI API.
const topLogProbs = 20

// Limits of steps with a maximum of tokens and sequences.
func (f *Footprint) Limits(tokens, sequences int) forward.Limits {
	l := forward.Limits{
		MaxTokens: tokens, MaxSeqs: min(sequences, tokens),
		MaxModelLen: f.o.MaxModelLen, BlockTokens: f.KV().BlockTokens, MaxTopLogProbs: topLogProbs,
	}
	l.MaxLogits = l.MaxSeqs
	if f.o.HostLogits {
		l.MaxLogits = l.MaxTokens
	}
	// Room for all adjustments of one request and, up to a bound, for the tokens that all
	// of them have in their contexts.
	l.MaxAdjust = max(f.o.Config.Vocab, min(1<<20, l.MaxSeqs*min(f.o.MaxModelLen, f.o.Config.Vocab)))
	return l
}

// KV is the shape of KV blocks.
func (f *Footprint) KV() kvcache.Shape {
	return kvcache.Shape{
		Layers: f.o.Config.Layers, KVHeads: f.o.Config.KVHeads, HeadDim: f.o.Config.HeadDim,
		DType: f.o.Types.ActivationDType(), BlockTokens: f.o.BlockTokens,
	}.EnsureDefaults()
}

// Experts is the configuration of the store, without a placement.
func (f *Footprint) Experts(largest int) experts.Config {
	return experts.Config{
		Layers: f.layers, Experts: f.o.Config.Experts, Layout: f.expert,
		Dynamic: f.o.Dynamic, InPlace: f.o.InPlace, CacheSlots: f.o.CacheLayers * largest,
	}
}

// sizeOnlyBackend stands for the backend of attention or experts on the CPU where only sizes are needed.
type sizeOnlyBackend struct{ kernels.Backend }

// Steps are a pipeline's options, as far as sizes depend on them.
func (f *Footprint) Steps(l forward.Limits, b configs.Batch) pipeline.Options {
	o := pipeline.Options{
		Limits: l, HostLogits: f.o.HostLogits,
		MicroBatchTokens: b.MicroBatchSize, MicroBatches: b.NumMicroBatches, Grouping: b.Grouping,
	}
	if !f.o.Graphs {
		o.Graphs = -1
	}
	if b.Attention == configs.OnCPU {
		o.HostAttention = sizeOnlyBackend{}
	}
	if c, err := b.ParseCPUExperts(); err == nil && c.On() {
		o.CPUExperts = sizeOnlyBackend{}
	}
	return o
}

// stepBytes is the memory of steps within the limits: activations, per-step metadata on the
// GPU and again in pinned memory, results in pinned memory, with those of steps that are enqueued ahead, and the
// staging buffers of attention and experts on the CPU.
func (f *Footprint) stepBytes(l forward.Limits, b configs.Batch) (activations, metadata, results, attention, experts int64) {
	o, act := f.Steps(l, b), f.o.Types.ActivationDType()
	activations = int64(o.Groups()) * forward.WorkspaceBytes(f.o.Config, f.o.Types, o.GroupLimits(l))
	results = device.Align(o.ResultBytes(f.o.Config, l)) + o.AheadBytes(f.o.Config, l)
	return activations, o.StepMetadataBytes(f.o.Config, l), results, device.Align(o.StagingBytes(f.o.Config, act, l)), device.Align(o.CPUExpertBytes(f.o.Config, act, l))
}

// scrubBuffer is the pinned memory of zeros that borrowed memory is scrubbed with, for a
// number of offloaded experts.
func (f *Footprint) scrubBuffer(offloaded int) int64 {
	if !f.o.ClearsAlways && (!f.o.Clears || offloaded == 0) {
		return 0
	}
	return harvest.Options{}.EnsureDefaults().ScrubBytes
}

// Parts of the memory of GPU and host that a plan of experts and steps need.
func (f *Footprint) Parts(p *experts.Plan, l forward.Limits, b configs.Batch) (gpu, host []planner.Part) {
	activations, metadata, results, attention, onCPU := f.stepBytes(l, b)
	gpu = []planner.Part{
		{Name: "non-expert weights", Bytes: f.o.Layout.Bytes},
		{Name: "resident experts", Bytes: p.ResidentBytes},
		{Name: "expert cache", Bytes: p.CacheBytes},
		{Name: "expert tables", Bytes: device.Align(p.TableBytes) + device.Align(p.InPlaceBytes)},
		{Name: "activations", Bytes: activations},
		{Name: "per-step metadata buffers", Bytes: metadata},
	}
	if f.o.Kernels > 0 {
		gpu = append(gpu, planner.Part{Name: "kernel workspaces", Bytes: f.o.Kernels})
	}
	host = []planner.Part{
		{Name: "offloaded experts", Bytes: p.HostBytes},
		{Name: loadPart, Bytes: p.StagingBytes + checkpoint.UploadBytes},
		{Name: "expert tables", Bytes: device.Align(p.UploadBytes) + device.Align(p.InPlaceBytes)},
		{Name: "scrub buffer", Bytes: f.scrubBuffer(p.OffloadedExperts)},
		{Name: "per-step metadata buffers", Bytes: metadata + results},
		{Name: "CPU attention staging buffer", Bytes: attention},
		{Name: kvTierPart, Bytes: f.hostKV()},
	}
	if onCPU > 0 {
		host = append(host, planner.Part{Name: "CPU experts staging buffer", Bytes: onCPU})
	}
	return gpu, host
}

const (
	// kvTierPart is the name of the host memory of KV tiers.
	kvTierPart = "offloaded KV blocks"
	// loadPart is that of host memory which is released when the model is loaded.
	loadPart = "load staging buffer"
)

// hostKV is the pinned host memory of KV blocks that the GPU has no room for, in bytes.
func (f *Footprint) hostKV() int64 {
	if f.o.HostKV == nil {
		return 0
	}
	return f.o.HostKV(f.KV().BlockBytes())
}

// Sizes are the parts of any policy for the planner, with experts spread evenly over
// layers. The fields of fixed hold for all policies; 0: the policy's.
func (f *Footprint) Sizes(fixed configs.Batch) (planner.Sizes, error) {
	layers := len(f.layers)
	all := layers * f.o.Config.Experts
	none, err := f.Experts(0).SizePlan(0, 0)
	if err != nil {
		return planner.Sizes{}, err
	}
	sized := func(offloaded, largest int) experts.Plan {
		p, err := f.Experts(largest).SizePlan(offloaded, largest)
		if err != nil {
			panic("sizing: a plan of experts that is valid with none offloaded: " + err.Error())
		}
		return p
	}
	kv := f.KV()
	return planner.Sizes{
		Expert: f.expert.Size, Other: f.o.Layout.Bytes,
		KVBlockTokens: kv.BlockTokens, KVBlock: kv.BlockBytes(),
		ExpertCache: func(missing int) int { return sized(missing, missing).CacheSlots },
		Beside: func(resident int) (gpu, host int64) {
			offloaded := all - resident
			p := sized(offloaded, (offloaded+layers-1)/layers)
			return p.ResidentBytes - int64(resident)*f.expert.Size,
				p.HostBytes - int64(offloaded)*f.expert.Size + p.StagingBytes + f.scrubBuffer(offloaded)
		},
		Workspace: func(x *planner.Policy) (gpu, host int64) {
			tokens, sequences := x.MicroBatchTokens(), x.Batch
			if fixed.MaxNumSeqs > 0 {
				sequences = fixed.MaxNumSeqs
			}
			if fixed.MaxNumBatchedTokens > 0 {
				tokens = fixed.MaxNumBatchedTokens
			}
			b := BatchOf(x)
			if fixed.NumMicroBatches > 0 {
				b.NumMicroBatches, b.MicroBatchSize = fixed.NumMicroBatches, 0
			}
			if fixed.MicroBatchSize > 0 {
				b.MicroBatchSize = fixed.MicroBatchSize
			}
			b.CPUExperts = fixed.CPUExperts
			activations, metadata, results, attention, experts := f.stepBytes(f.Limits(tokens, sequences), b)
			return activations + metadata, metadata + results + attention + experts
		},
		GPUFixed:  device.Align(none.TableBytes) + device.Align(none.InPlaceBytes) + f.o.Kernels,
		HostFixed: device.Align(none.UploadBytes) + device.Align(none.InPlaceBytes) + checkpoint.UploadBytes + f.hostKV(),
	}, nil
}

// BatchOf is the batch settings of a policy, without the limits that follow from its batch.
func BatchOf(x *planner.Policy) configs.Batch {
	b := configs.Batch{Grouping: x.Grouping, Attention: x.Attention}
	if x.MicroBatch < x.Batch {
		b.MicroBatchSize = x.MicroBatch
	}
	return b
}

// Model is the planner's model, with a name for messages.
func (f *Footprint) Model(name string) planner.Model {
	c, activation := f.o.Config, f.o.Types.ActivationDType().Size()
	m := planner.Model{
		Name: name, Layers: c.Layers, DenseLayers: c.Layers - c.MoELayers(), Hidden: c.Hidden,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Experts: c.Experts, TopK: c.TopK, ExpertWidth: c.ExpertWidth, SharedWidth: c.SharedWidth,
		DenseWidth: c.DenseWidth, Vocab: c.Vocab, TiedEmbeddings: c.TiedEmbeddings,
		WeightBytes: f.o.Layout.ExpertDType.Size(), ActivationBytes: activation, KVBytes: activation,
	}
	// Where only some layers have a window, the full context of all is counted.
	if w := slices.Compact(slices.Clone(c.Windows)); len(w) == 1 {
		m.Window = w[0]
	}
	return m
}
