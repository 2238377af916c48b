package pipeline

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
)

// Executor computes the tokens of a merge group. The model's workspace belongs to the group,
// and its backend runs on the device with that memory. The pipeline provides the stream.
type Executor struct {
	Space device.Space
	Model *forward.Model
}

// Options configure a pipeline. The pipeline owns only its streams and its own buffers, and
// none of the parts given here.
type Options struct {
	Machine device.Machine
	// Executors are one for each merge group (see Groups), with models over the same weights,
	// on the same device.
	Executors []Executor
	// Limits of a step; the limits of the executors' models are GroupLimits of them. Default:
	// the first model's.
	Limits forward.Limits
	// Experts is the store of the model's experts, nil for a dense model.
	Experts *experts.Store
	// KV is the KV cache, in the memory of the device or host that computes attention.
	KV *kvcache.Pool
	// MicroBatchTokens is the maximum number of tokens of a micro-batch. Default and maximum:
	// the step's Limits.MaxTokens.
	MicroBatchTokens int
	// MicroBatches is the minimum number of micro-batches of a step with at least that many
	// tokens. Default: as few as MicroBatchTokens allows.
	MicroBatches int
	// Grouping selects the tokens that a layer's experts run over at once: those of a merge
	// group, or those of a micro-batch, in the order of CGOPipe (see CGOPipe).
	Grouping configs.Grouping
	// HostAttention computes attention on the host, with the KV cache in host memory. It
	// takes the model's activation type. Default: nil, the device computes attention.
	HostAttention kernels.Backend
	// CPUExperts computes those of a step's experts on the host that CPUShare, the store's own
	// experts.Options.CPU, selects in steps of OnDemand. It takes the model's activation type and
	// the layout of experts. Default: nil, all missing experts are fetched.
	CPUExperts kernels.Backend
	CPUShare   *experts.CPUShare
	// SmallBatchTokens is the maximum number of tokens of a step for which only routed
	// experts are fetched (the plan OnDemand). Default: SmallBatch of the model, or with
	// CPUExperts as many as give experts 4 rows on average, if that is more; negative: none. Machines that keep no data never use OnDemand, since the host cannot read the
	// router's selection.
	SmallBatchTokens int
	// ExpertAccess says how steps of few tokens get at offloaded experts: by copies (OnDemand),
	// or, up to MaxInPlaceTokens tokens, in place (InPlace), for which the store has tables
	// (experts.Config.InPlace). AutoAccess chooses by AccessModel and by the times of steps; what is
	// not known of the model keeps it to copies, and so does a CPUShare with a fraction, since in place
	// the CPU computes nothing.
	ExpertAccess configs.ExpertAccess
	AccessModel  AccessModel
	// HostLogits allocates pinned memory for the logits of a step, for Step.Logits. Default:
	// off.
	HostLogits bool
	// BatchInvariant: what kernels compute for a sequence does not depend on the others of its step.
	BatchInvariant bool
	// Graphs is the maximum number of decode steps kept as CUDA graphs, where streams are
	// device.Capturers, of steps whose experts are all resident or read in place; negative: none. Default: 16.
	Graphs int
	// Trace receives notes about the operations of steps. Default: none.
	Trace *trace.Writer
	// Log receives warnings about what makes steps slower. Default: none.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if len(o.Executors) > 0 && o.Executors[0].Model != nil {
		if o.Limits == (forward.Limits{}) {
			o.Limits = o.Executors[0].Model.Limits
		}
		if o.SmallBatchTokens == 0 {
			o.SmallBatchTokens = OnDemandTokens(o.config().Experts, o.config().TopK, o.CPUExperts != nil)
		}
	}
	if o.MicroBatchTokens <= 0 || o.MicroBatchTokens > o.Limits.MaxTokens {
		o.MicroBatchTokens = o.Limits.MaxTokens
	}
	if o.Graphs == 0 {
		o.Graphs = 16
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("pipeline: Options.Machine is nil")
	case o.KV == nil:
		return errors.New("pipeline: Options.KV is nil")
	case o.Grouping > configs.PerMicroBatch:
		return fmt.Errorf("pipeline: invalid grouping %d", o.Grouping)
	case o.MicroBatches < 0:
		return fmt.Errorf("pipeline: MicroBatches is %d; it must be at least 0", o.MicroBatches)
	case len(o.Executors) != o.Groups():
		return fmt.Errorf("pipeline: %d executors, want %d: one per merge group", len(o.Executors), o.Groups())
	}
	if (o.CPUExperts == nil) != (o.CPUShare == nil) {
		return errors.New("pipeline: Options.CPUExperts and CPUShare must be set together")
	}
	for i, x := range o.Executors {
		switch {
		case x.Model == nil:
			return fmt.Errorf("pipeline: Executors[%d].Model is nil", i)
		case x.Space != o.Executors[0].Space:
			return fmt.Errorf("pipeline: executors on %s and %s; all must be on one device", o.Executors[0].Space, x.Space)
		case x.Model.Limits != o.GroupLimits(o.Limits):
			return fmt.Errorf("pipeline: the model of Executors[%d] has limits %+v, want %+v", i, x.Model.Limits, o.GroupLimits(o.Limits))
		}
	}
	if o.Experts == nil && o.config().MoELayers() > 0 {
		return errors.New("pipeline: Options.Experts is nil and the model has MoE layers")
	}
	return nil
}

// config returns the configuration of the executors' models.
func (o *Options) config() *models.Config { return o.Executors[0].Model.Config }

// space is the memory of the compute device.
func (o *Options) space() device.Space { return o.Executors[0].Space }

// Groups returns the number of merge groups of a step: two where the host computes attention
// and experts run over all tokens of a group, so that host and device work at the same time;
// otherwise one.
func (o *Options) Groups() int {
	if o.HostAttention != nil && o.Grouping == configs.PerLayer {
		return 2
	}
	return 1
}

// GroupLimits returns the limits of each group's model, for steps of limits l.
func (o Options) GroupLimits(l forward.Limits) forward.Limits {
	if o.Groups() > 1 {
		// Half of the micro-batches, each of which may exceed its share by a token.
		l.MaxTokens = min(l.MaxTokens, (l.MaxTokens+o.microBatching().maxBatches(l.MaxTokens)+1)/2)
		l.MaxSeqs, l.MaxLogits = min(l.MaxSeqs, l.MaxTokens), min(l.MaxLogits, l.MaxTokens)
	}
	return l
}

// StepMetadataBytes returns the bytes of step metadata on the device; the pinned copy takes
// as many again.
func (o Options) StepMetadataBytes(c *models.Config, l forward.Limits) int64 {
	batches := o.microBatching().maxBatches(l.MaxTokens)
	return forward.StepUploadBytes(l, batches) + forward.MaskUploadBytes(c, l, batches)
}

// AheadBytes returns the bytes of pinned memory for metadata and results of steps that are enqueued ahead (Step.Ahead),
// beside those of others.
func (o Options) AheadBytes(c *models.Config, l forward.Limits) int64 {
	if o.HostAttention != nil || o.Groups() > 1 || o.Graphs < 0 {
		return 0
	}
	metadata, results, _ := aheadBytes(c, aheadLimits(l))
	return 2 * (device.Align(metadata) + results)
}

// ResultBytes returns the bytes of pinned memory for the results of a step of limits l.
func (o Options) ResultBytes(c *models.Config, l forward.Limits) int64 {
	n := newResultOffsets(c, l, o.Groups()).logits
	if o.HostLogits {
		n += 4 * int64(l.MaxLogits) * int64(c.Vocab)
	}
	return n
}

// StagingBytes returns the bytes of pinned memory that stage activations of type act for
// attention on the host, for steps of limits l.
func (o Options) StagingBytes(c *models.Config, act kernels.DType, l forward.Limits) int64 {
	if o.HostAttention == nil {
		return 0
	}
	return forward.NewAttentionBuffers(&c.Attention, act, l.MaxTokens, 0).Bytes()
}

// CPUExpertBytes returns the bytes of pinned memory for experts that the host computes, in the
// largest step of limits l that is OnDemand.
func (o Options) CPUExpertBytes(c *models.Config, act kernels.DType, l forward.Limits) int64 {
	if o.CPUExperts == nil || c.MoELayers() == 0 {
		return 0
	}
	return newCPUBuffers(c, act, o.onDemandTokens(c, l), 0).bytes
}

// onDemandTokens returns the maximum number of tokens of a step whose plan may be OnDemand.
func (o *Options) onDemandTokens(c *models.Config, l forward.Limits) int {
	n := o.SmallBatchTokens
	if n == 0 {
		n = OnDemandTokens(c.Experts, c.TopK, o.CPUExperts != nil)
	}
	return max(0, min(n, o.GroupLimits(l).MaxTokens)) // such a step is one group
}

// OnDemandTokens is the default of Options.SmallBatchTokens for a model that selects topK of a number
// of experts per token; onCPU: the CPU computes some of them.
func OnDemandTokens(experts, topK int, onCPU bool) int {
	n := SmallBatch(experts, topK)
	if onCPU && topK > 0 {
		n = max(n, cpuExpertRows*experts/topK)
	}
	return n
}

func (o *Options) microBatching() microBatching {
	return microBatching{maxTokens: o.MicroBatchTokens, minBatches: o.MicroBatches, groups: o.Groups()}
}

// microBatching configures how a step's tokens are split into micro-batches: at most
// maxTokens tokens each (0: no limit), at least minBatches of them if there are that many
// tokens, in a number of merge groups.
type microBatching struct{ maxTokens, minBatches, groups int }

// maxBatches returns the maximum number of micro-batches of a step of at most this many
// tokens.
func (c microBatching) maxBatches(tokens int) int {
	size := c.maxTokens
	if size <= 0 || size > tokens {
		size = tokens
	}
	n := max((tokens+size-1)/size, c.minBatches)
	return min((n+c.groups-1)/c.groups*c.groups, tokens)
}

// split returns the number of micro-batches for this many tokens, and the tokens of each: as
// even as possible, and none empty. The groups' numbers of micro-batches differ by at most
// one.
func (c microBatching) split(tokens int) (n, each int) {
	n = c.maxBatches(tokens)
	each = (tokens + n - 1) / n
	return (tokens + each - 1) / each, each
}
