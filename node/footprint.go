package node

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
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// shaper is what a backend's types and sizes are known from.
type shaper interface {
	ActivationDType() kernels.DType
	ExpertLayout(shape kernels.ExpertShape) (kernels.ExpertLayout, error)
}

// footprint works out what an engine takes of which memory. What a node needs and what
// the planner counts with are both from here, so that they are the same.
type footprint struct {
	config *models.Config
	layout *models.Layout
	types  shaper
	expert kernels.ExpertLayout
	// layers that have experts, by the model's numbers.
	layers []int
	// maxModelLen is the most tokens of a sequence.
	maxModelLen int
	// ringLayers as in Options; adaptive is the setting adapt-local.
	ringLayers           int
	adaptive, hostLogits bool
	// clears says that memory is borrowed, which is cleared before it is given back.
	clears bool
	// kernels is what the backend has taken of the GPU itself, in bytes.
	kernels int64
}

// newFootprint fills in what follows from the rest: the experts' layout and layers.
func newFootprint(f footprint, maxModelLen int) (*footprint, error) {
	var err error
	if f.expert, err = f.types.ExpertLayout(f.config.ExpertShape(f.layout.ExpertDType)); err != nil {
		return nil, err
	}
	for l, dense := range f.config.Dense {
		if !dense {
			f.layers = append(f.layers, l)
		}
	}
	f.maxModelLen = f.config.MaxPositions
	if maxModelLen > 0 {
		f.maxModelLen = min(f.maxModelLen, maxModelLen)
	}
	return &f, nil
}

// BlockTokens are the tokens of a block of the KV cache.
const BlockTokens = kvcache.DefaultBlockTokens

// limits of steps of so many rows and sequences.
func (f *footprint) limits(rows, sequences int) forward.Limits {
	l := forward.Limits{
		MaxRows: rows, MaxSeqs: min(sequences, rows),
		MaxModelLen: f.maxModelLen, BlockTokens: BlockTokens, MaxTopLogProbs: topLogProbs,
	}
	l.MaxLogits = l.MaxSeqs
	if f.hostLogits {
		l.MaxLogits = l.MaxRows
	}
	// Whatever one request adjusts has room, and, up to a bound, what all of them have
	// seen.
	l.MaxAdjust = max(f.config.Vocab, min(1<<20, l.MaxSeqs*min(f.maxModelLen, f.config.Vocab)))
	return l
}

// kv is the shape of the cache's blocks.
func (f *footprint) kv() kvcache.Shape {
	return kvcache.Shape{
		Layers: f.config.Layers, KVHeads: f.config.KVHeads, HeadDim: f.config.HeadDim,
		DType: f.types.ActivationDType(), BlockTokens: BlockTokens,
	}
}

// experts is the configuration of the store, but for a placement.
func (f *footprint) experts(largest int) experts.Config {
	return experts.Config{
		Layers: f.layers, Experts: f.config.Experts, Layout: f.expert,
		Adaptive: f.adaptive, RingSlots: f.ringLayers * largest,
	}
}

// way is how steps run, as the settings of the same names say.
type way struct {
	microBatchSize, numMicroBatches int
	byMicroBatch                    bool // expert-grouping
	hostAttention                   bool // attention
}

func wayOf(s *configs.Settings) way {
	return way{s.Batch.MicroBatchSize, s.Batch.NumMicroBatches, s.Batch.Grouping == configs.PerMicroBatch, s.Batch.Attention == configs.OnCPU}
}

// somebody stands for whoever attends on the host where only sizes are asked for.
type somebody struct{ kernels.Backend }

// steps are a pipeline's options, as far as sizes depend on them.
func (f *footprint) steps(l forward.Limits, w way) pipeline.Options {
	o := pipeline.Options{Limits: l, HostLogits: f.hostLogits, MicroBatchRows: w.microBatchSize, MicroBatches: w.numMicroBatches}
	if w.byMicroBatch {
		o.Grouping = pipeline.ByMicroBatch
	}
	if w.hostAttention {
		o.HostAttention = somebody{}
	}
	return o
}

// stepBytes is what steps within the limits take: activations, row data on the GPU and
// again in pinned memory, what comes back, and what goes to the host for attention.
func (f *footprint) stepBytes(l forward.Limits, w way) (activations, rowData, back, attention int64) {
	o := f.steps(l, w)
	activations = int64(o.Groups()) * forward.WorkspaceBytes(f.config, f.types, o.GroupLimits(l))
	return activations, o.RowDataBytes(l), device.Align(o.BackBytes(f.config, l)), device.Align(o.StagingBytes(f.config, f.types.ActivationDType(), l))
}

// zeros is the pinned memory that borrowed memory is cleared with, where so many
// experts are offloaded.
func (f *footprint) zeros(offloaded int) int64 {
	if !f.clears || offloaded == 0 {
		return 0
	}
	return harvest.Options{}.EnsureDefaults().ClearBytes
}

// parts of the GPU's and the host's memory that a plan of experts and steps take.
func (f *footprint) parts(p *experts.Plan, l forward.Limits, w way) (gpu, host []Part) {
	activations, rowData, back, attention := f.stepBytes(l, w)
	gpu = []Part{
		{"weights but experts", f.layout.Bytes},
		{"local experts", p.LocalBytes},
		{"ring of fetched experts", p.RingBytes},
		{"tables", device.Align(p.TableBytes)},
		{"activations", activations},
		{"row data", rowData},
	}
	if f.kernels > 0 {
		gpu = append(gpu, Part{"kernels", f.kernels})
	}
	return gpu, []Part{
		{"offloaded experts", p.HostBytes},
		{"loading", p.StagingBytes + uploadBuffers*uploadBytes},
		{"tables", device.Align(p.UploadBytes)},
		{"clearing of borrowed memory", f.zeros(p.OffloadedExperts)},
		{"row data", rowData + back},
		{"attention", attention},
	}
}

// given are settings of the same names that somebody has given, and that hold whatever
// the policy; 0: nobody has.
type given struct{ maxNumSeqs, maxNumBatchedTokens, microBatchSize, numMicroBatches int }

// sizes tells the planner what the parts are of any policy, with the experts spread
// evenly over layers.
func (f *footprint) sizes(fixed given) (planner.Sizes, error) {
	layers := len(f.layers)
	all := layers * f.config.Experts
	none, err := f.experts(0).Sized(0, 0)
	if err != nil {
		return planner.Sizes{}, err
	}
	sized := func(offloaded, largest int) experts.Plan {
		p, err := f.experts(largest).Sized(offloaded, largest)
		if err != nil {
			panic("node: experts that are fine with none offloaded: " + err.Error())
		}
		return p
	}
	kv := f.kv()
	return planner.Sizes{
		Expert: f.expert.Size, Other: f.layout.Bytes,
		KVBlockTokens: kv.BlockTokens, KVBlock: kv.BlockBytes(),
		Ring: func(missing int) int { return sized(missing, missing).RingSlots },
		Beside: func(local int) (gpu, host int64) {
			offloaded := all - local
			p := sized(offloaded, (offloaded+layers-1)/layers)
			return p.LocalBytes - int64(local)*f.expert.Size,
				p.HostBytes - int64(offloaded)*f.expert.Size + p.StagingBytes + f.zeros(offloaded)
		},
		Workspace: func(x *planner.Policy) (gpu, host int64) {
			rows, sequences := x.Rows(), x.Batch
			if fixed.maxNumSeqs > 0 {
				sequences = fixed.maxNumSeqs
			}
			if fixed.maxNumBatchedTokens > 0 {
				rows = fixed.maxNumBatchedTokens
			}
			w := wayFor(x)
			if fixed.numMicroBatches > 0 {
				w.numMicroBatches, w.microBatchSize = fixed.numMicroBatches, 0
			}
			if fixed.microBatchSize > 0 {
				w.microBatchSize = fixed.microBatchSize
			}
			activations, rowData, back, attention := f.stepBytes(f.limits(rows, sequences), w)
			return activations + rowData, rowData + back + attention
		},
		GPUFixed:  device.Align(none.TableBytes) + f.kernels,
		HostFixed: device.Align(none.UploadBytes) + uploadBuffers*uploadBytes,
	}, nil
}

// wayFor is how a policy has steps run.
func wayFor(x *planner.Policy) way {
	w := way{byMicroBatch: x.Grouping == configs.PerMicroBatch, hostAttention: x.Attention == configs.OnCPU}
	if x.MicroBatch < x.Batch {
		w.microBatchSize = x.MicroBatch
	}
	return w
}

// model is the planner's.
func (f *footprint) model(name string) planner.Model {
	c, activation := f.config, f.types.ActivationDType().Size()
	m := planner.Model{
		Name: name, Layers: c.Layers, DenseLayers: c.Layers - c.MoELayers(), Hidden: c.Hidden,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Experts: c.Experts, TopK: c.TopK, ExpertWidth: c.ExpertWidth, SharedWidth: c.SharedWidth,
		DenseWidth: c.DenseWidth, Vocab: c.Vocab, TiedEmbeddings: c.TiedEmbeddings,
		WeightBytes: f.layout.ExpertDType.Size(), ActivationBytes: activation, KVBytes: activation,
	}
	// Where only some layers have a window, keys and values of all are counted.
	if w := slices.Compact(slices.Clone(c.Windows)); len(w) == 1 {
		m.Window = w[0]
	}
	return m
}
