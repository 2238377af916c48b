package node

import (
	"slices"

	"github.com/moeserve/moeserve/experts"
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
	// maxModelLen is the most tokens of a sequence, microRows the setting
	// micro-batch-size.
	maxModelLen int
	// ringLayers as in Options; adaptive is the setting adapt-local.
	ringLayers int
	adaptive   bool
	// steps says how steps run, as far as memory depends on it.
	steps pipeline.Options
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

// limits of steps of so many rows and sequences.
func (f *footprint) limits(rows, sequences int) models.Limits {
	l := models.Limits{
		MaxRows: rows, MaxSeqs: min(sequences, rows),
		MaxModelLen: f.maxModelLen, BlockTokens: kvcache.DefaultBlockTokens, MaxTopLogProbs: topLogProbs,
	}
	l.MaxLogits = l.MaxSeqs
	if f.steps.HostLogits {
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
		DType: f.types.ActivationDType(), BlockTokens: kvcache.DefaultBlockTokens,
	}
}

// experts is the configuration of the store, but for a placement.
func (f *footprint) experts(largest int) experts.Config {
	return experts.Config{
		Layers: f.layers, Experts: f.config.Experts, Layout: f.expert,
		Adaptive: f.adaptive, RingSlots: f.ringLayers * largest,
	}
}

// stepBytes is what steps within the limits take, in micro-batches of at most microRows
// rows (0: of all): activations, row data on the GPU and again in pinned memory, what
// comes back, and what goes to the host's attention and back.
func (f *footprint) stepBytes(l models.Limits, microRows int) (activations, rowData, back, attention int64) {
	o := f.steps
	o.MicroBatchRows = microRows
	activations = int64(o.Groups()) * models.WorkspaceBytes(f.config, f.types, o.GroupLimits(l))
	return activations, o.RowDataBytes(l), allocated(o.BackBytes(f.config, l)), o.StagingBytes(f.config, f.types.ActivationDType(), l)
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
func (f *footprint) parts(p *experts.Plan, l models.Limits, microRows int) (gpu, host []Part) {
	activations, rowData, back, attention := f.stepBytes(l, microRows)
	gpu = []Part{
		{"weights but experts", f.layout.Bytes},
		{"local experts", p.LocalBytes},
		{"ring of fetched experts", p.RingBytes},
		{"tables", allocated(p.TableBytes)},
		{"activations", activations},
		{"row data", rowData},
	}
	if f.kernels > 0 {
		gpu = append(gpu, Part{"kernels", f.kernels})
	}
	host = []Part{
		{"offloaded experts", p.HostBytes},
		{"loading", p.StagingBytes + uploadBuffers*uploadBytes},
		{"tables", allocated(p.UploadBytes)},
		{"clearing of borrowed memory", f.zeros(p.OffloadedExperts)},
		{"row data", rowData + back},
	}
	if attention > 0 {
		host = append(host, Part{"attention", attention})
	}
	return gpu, host
}

// allocated is what bytes take where they are a memory of their own: devices round up.
func allocated(bytes int64) int64 { return (bytes + 255) / 256 * 256 }

// given are settings of the same names that somebody has given, and that hold whatever
// the policy; 0: nobody has.
type given struct{ maxNumSeqs, maxNumBatchedTokens, microBatchSize int }

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
		Workspace: func(rows, microBatch, sequences int) (gpu, host int64) {
			micro := microRows(microBatch, sequences)
			if fixed.maxNumSeqs > 0 {
				sequences = fixed.maxNumSeqs
			}
			if fixed.maxNumBatchedTokens > 0 {
				rows = fixed.maxNumBatchedTokens
			}
			if fixed.microBatchSize > 0 {
				micro = fixed.microBatchSize
			}
			activations, rowData, back, attention := f.stepBytes(f.limits(rows, sequences), micro)
			return activations + rowData, rowData + back + attention
		},
		GPUFixed:  allocated(none.TableBytes) + f.kernels,
		HostFixed: allocated(none.UploadBytes) + uploadBuffers*uploadBytes,
	}, nil
}

// microRows is the setting micro-batch-size of a policy's micro-batches of so many of
// so many sequences.
func microRows(microBatch, sequences int) int {
	if microBatch >= sequences {
		return 0
	}
	return microBatch
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
