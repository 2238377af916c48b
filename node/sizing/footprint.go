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

// Shaper is what a backend's types and sizes are known from.
type Shaper interface {
	ActivationDType() kernels.DType
	ExpertLayout(shape kernels.ExpertShape) (kernels.ExpertLayout, error)
}

// Options say of what the footprint is.
type Options struct {
	Config *models.Config
	Layout *models.Layout
	Types  Shaper
	// MaxModelLen is the most tokens of a sequence. Default and at most: the model's.
	MaxModelLen int
	// CacheLayers is for how many layers' fetched experts the compute device has room.
	// Default: that of experts.Config.
	CacheLayers int
	// Adaptive: other experts may become local.
	Dynamic bool
	// HostLogits keeps room for the logits of a step.
	HostLogits bool
	// Clears says that memory is borrowed, which is cleared before it is given back.
	Clears bool
	// Kernels is what the backend has taken of the GPU itself, in bytes.
	Kernels int64
}

// Footprint works out what an engine takes of which memory. It does not change.
type Footprint struct {
	o      Options
	expert kernels.ExpertLayout
	// layers that have experts, by the model's numbers.
	layers []int
}

// New lays experts out.
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

// Within is the footprint with sequences of at most so many tokens.
func (f *Footprint) Within(maxModelLen int) *Footprint {
	shorter := *f
	shorter.o.MaxModelLen = maxModelLen
	return &shorter
}

// ExpertBytes is the size of an expert as it is laid out.
func (f *Footprint) ExpertBytes() int64 { return f.expert.Size }

// BlockTokens are the tokens of a block of the KV cache.
const BlockTokens = kvcache.DefaultBlockTokens

// topLogProbs is how many alternatives come with the log-probability of a token:
// what the OpenAI API allows at most.
const topLogProbs = 20

// Limits of steps of so many rows and sequences.
func (f *Footprint) Limits(rows, sequences int) forward.Limits {
	l := forward.Limits{
		MaxTokens: rows, MaxSeqs: min(sequences, rows),
		MaxModelLen: f.o.MaxModelLen, BlockTokens: BlockTokens, MaxTopLogProbs: topLogProbs,
	}
	l.MaxLogits = l.MaxSeqs
	if f.o.HostLogits {
		l.MaxLogits = l.MaxTokens
	}
	// Whatever one request adjusts has room, and, up to a bound, what all of them have
	// seen.
	l.MaxAdjust = max(f.o.Config.Vocab, min(1<<20, l.MaxSeqs*min(f.o.MaxModelLen, f.o.Config.Vocab)))
	return l
}

// KV is the shape of the cache's blocks.
func (f *Footprint) KV() kvcache.Shape {
	return kvcache.Shape{
		Layers: f.o.Config.Layers, KVHeads: f.o.Config.KVHeads, HeadDim: f.o.Config.HeadDim,
		DType: f.o.Types.ActivationDType(), BlockTokens: BlockTokens,
	}
}

// Experts is the configuration of the store, but for a placement.
func (f *Footprint) Experts(largest int) experts.Config {
	return experts.Config{
		Layers: f.layers, Experts: f.o.Config.Experts, Layout: f.expert,
		Dynamic: f.o.Dynamic, CacheSlots: f.o.CacheLayers * largest,
	}
}

// somebody stands for whoever attends on the host where only sizes are asked for.
type somebody struct{ kernels.Backend }

// Steps are a pipeline's options, as far as sizes depend on them.
func (f *Footprint) Steps(l forward.Limits, b configs.Batch) pipeline.Options {
	o := pipeline.Options{
		Limits: l, HostLogits: f.o.HostLogits,
		MicroBatchTokens: b.MicroBatchSize, MicroBatches: b.NumMicroBatches, Grouping: b.Grouping,
	}
	if b.Attention == configs.OnCPU {
		o.HostAttention = somebody{}
	}
	return o
}

// stepBytes is what steps within the limits take: activations, row data on the GPU and
// again in pinned memory, what comes back, and what goes to the host for attention.
func (f *Footprint) stepBytes(l forward.Limits, b configs.Batch) (activations, rowData, back, attention int64) {
	o := f.Steps(l, b)
	activations = int64(o.Groups()) * forward.WorkspaceBytes(f.o.Config, f.o.Types, o.GroupLimits(l))
	return activations, o.StepMetadataBytes(l), device.Align(o.ResultBytes(f.o.Config, l)), device.Align(o.StagingBytes(f.o.Config, f.o.Types.ActivationDType(), l))
}

// zeros is the pinned memory that borrowed memory is cleared with, where so many
// experts are offloaded.
func (f *Footprint) zeros(offloaded int) int64 {
	if !f.o.Clears || offloaded == 0 {
		return 0
	}
	return harvest.Options{}.EnsureDefaults().ScrubBytes
}

// Parts of the GPU's and the host's memory that a plan of experts and steps take.
func (f *Footprint) Parts(p *experts.Plan, l forward.Limits, b configs.Batch) (gpu, host []planner.Part) {
	activations, rowData, back, attention := f.stepBytes(l, b)
	gpu = []planner.Part{
		{Name: "weights but experts", Bytes: f.o.Layout.Bytes},
		{Name: "local experts", Bytes: p.ResidentBytes},
		{Name: "ring of fetched experts", Bytes: p.CacheBytes},
		{Name: "tables", Bytes: device.Align(p.TableBytes)},
		{Name: "activations", Bytes: activations},
		{Name: "row data", Bytes: rowData},
	}
	if f.o.Kernels > 0 {
		gpu = append(gpu, planner.Part{Name: "kernels", Bytes: f.o.Kernels})
	}
	return gpu, []planner.Part{
		{Name: "offloaded experts", Bytes: p.HostBytes},
		{Name: "loading", Bytes: p.StagingBytes + checkpoint.UploadBytes},
		{Name: "tables", Bytes: device.Align(p.UploadBytes)},
		{Name: "clearing of borrowed memory", Bytes: f.zeros(p.OffloadedExperts)},
		{Name: "row data", Bytes: rowData + back},
		{Name: "attention", Bytes: attention},
	}
}

// Sizes tells the planner what the parts are of any policy, with the experts spread
// evenly over layers. What is fixed holds whatever the policy; 0: the policy says.
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
			panic("sizing: experts that are fine with none offloaded: " + err.Error())
		}
		return p
	}
	kv := f.KV()
	return planner.Sizes{
		Expert: f.expert.Size, Other: f.o.Layout.Bytes,
		KVBlockTokens: kv.BlockTokens, KVBlock: kv.BlockBytes(),
		ExpertCache: func(missing int) int { return sized(missing, missing).CacheSlots },
		Beside: func(local int) (gpu, host int64) {
			offloaded := all - local
			p := sized(offloaded, (offloaded+layers-1)/layers)
			return p.ResidentBytes - int64(local)*f.expert.Size,
				p.HostBytes - int64(offloaded)*f.expert.Size + p.StagingBytes + f.zeros(offloaded)
		},
		Workspace: func(x *planner.Policy) (gpu, host int64) {
			rows, sequences := x.MicroBatchTokens(), x.Batch
			if fixed.MaxNumSeqs > 0 {
				sequences = fixed.MaxNumSeqs
			}
			if fixed.MaxNumBatchedTokens > 0 {
				rows = fixed.MaxNumBatchedTokens
			}
			b := BatchOf(x)
			if fixed.NumMicroBatches > 0 {
				b.NumMicroBatches, b.MicroBatchSize = fixed.NumMicroBatches, 0
			}
			if fixed.MicroBatchSize > 0 {
				b.MicroBatchSize = fixed.MicroBatchSize
			}
			activations, rowData, back, attention := f.stepBytes(f.Limits(rows, sequences), b)
			return activations + rowData, rowData + back + attention
		},
		GPUFixed:  device.Align(none.TableBytes) + f.o.Kernels,
		HostFixed: device.Align(none.UploadBytes) + checkpoint.UploadBytes,
	}, nil
}

// BatchOf is how a policy has steps run, without the limits that follow from its batch.
func BatchOf(x *planner.Policy) configs.Batch {
	b := configs.Batch{Grouping: x.Grouping, Attention: x.Attention}
	if x.MicroBatch < x.Batch {
		b.MicroBatchSize = x.MicroBatch
	}
	return b
}

// Model is the planner's.
func (f *Footprint) Model(name string) planner.Model {
	c, activation := f.o.Config, f.o.Types.ActivationDType().Size()
	m := planner.Model{
		Name: name, Layers: c.Layers, DenseLayers: c.Layers - c.MoELayers(), Hidden: c.Hidden,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Experts: c.Experts, TopK: c.TopK, ExpertWidth: c.ExpertWidth, SharedWidth: c.SharedWidth,
		DenseWidth: c.DenseWidth, Vocab: c.Vocab, TiedEmbeddings: c.TiedEmbeddings,
		WeightBytes: f.o.Layout.ExpertDType.Size(), ActivationBytes: activation, KVBytes: activation,
	}
	// Where only some layers have a window, keys and values of all are counted.
	if w := slices.Compact(slices.Clone(c.Windows)); len(w) == 1 {
		m.Window = w[0]
	}
	return m
}
