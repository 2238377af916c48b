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

// Executor is what computes a merge group's rows: a model whose workspace is that group's,
// and whose backend is of the device with that memory. The pipeline gives it a stream.
type Executor struct {
	Space device.Space
	Model *forward.Model
}

// Options are the parts a pipeline works with. It owns none of them but its
// streams and its own buffers.
type Options struct {
	Machine device.Machine
	// Executors are one for each merge group (see Groups), with models over the same
	// weights, on the same device.
	Executors []Executor
	// Limits of a step; those of the executors' models are GroupLimits of them. Default:
	// the first model's.
	Limits forward.Limits
	// Experts is the store of the model's experts, nil for a model without.
	Experts *experts.Store
	// KV lies in the memory of whoever attends.
	KV *kvcache.Pool
	// MicroBatchTokens is how many rows attention takes at a time, at most. Default and
	// at most: the step's Limits.MaxRows.
	MicroBatchTokens int
	// MicroBatches is into how many micro-batches a step is cut, at least, where it has
	// so many rows. Default: as few as MicroBatchTokens allows.
	MicroBatches int
	// Grouping of rows for experts. Those of a layer are all of a merge group; per
	// micro-batch they run in the order of CGOPipe (see CGOPipe).
	Grouping configs.Grouping
	// HostAttention attends on the host, over keys and values in its memory. It takes
	// the model's activation type. Default: none, and the device attends.
	HostAttention kernels.Backend
	// SmallBatchTokens is the most rows of a step for which only chosen experts are
	// fetched (the plan OnDemand). Default: what SmallBatch says; negative: none.
	// On a machine that keeps no data there are none, since no choice comes back.
	SmallBatchTokens int
	// HostLogits keeps room in pinned memory for the logits of a step, for those
	// who ask for them. Default: off.
	HostLogits bool
	// Graphs is how many decode steps are kept as graphs, at most, where streams are
	// device.Capturers and every expert is local; negative: none. Default: 16.
	Graphs int
	// Trace prints what the operations of steps are about. Default: none.
	Trace *trace.Writer
	// Log hears of what makes steps slower. Default: nobody.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if len(o.Executors) > 0 && o.Executors[0].Model != nil {
		if o.Limits == (forward.Limits{}) {
			o.Limits = o.Executors[0].Model.Limits
		}
		if o.SmallBatchTokens == 0 {
			o.SmallBatchTokens = SmallBatch(o.config().Experts, o.config().TopK)
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

// Validate reports the first option that cannot be.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("pipeline: options without a machine")
	case o.KV == nil:
		return errors.New("pipeline: options without a KV cache")
	case o.Grouping > configs.PerMicroBatch:
		return fmt.Errorf("pipeline: invalid grouping %d", o.Grouping)
	case o.MicroBatches < 0:
		return fmt.Errorf("pipeline: MicroBatches is %d; it must be at least 0", o.MicroBatches)
	case len(o.Executors) != o.Groups():
		return fmt.Errorf("pipeline: %d executors, want %d, one for each merge group", len(o.Executors), o.Groups())
	}
	for i, x := range o.Executors {
		switch {
		case x.Model == nil:
			return fmt.Errorf("pipeline: executor %d without a model", i)
		case x.Space != o.Executors[0].Space:
			return fmt.Errorf("pipeline: executors on %s and %s, want one device", o.Executors[0].Space, x.Space)
		case x.Model.Limits != o.GroupLimits(o.Limits):
			return fmt.Errorf("pipeline: a model with limits %+v, want %+v", x.Model.Limits, o.GroupLimits(o.Limits))
		}
	}
	if o.Experts == nil && o.config().MoELayers() > 0 {
		return errors.New("pipeline: a model with experts and no store of them")
	}
	return nil
}

// config is that of the executors' models.
func (o *Options) config() *models.Config { return o.Executors[0].Model.Config }

// space is the memory of the device that computes.
func (o *Options) space() device.Space { return o.Executors[0].Space }

// Groups is how many merge groups a step has: two where the host attends while the
// device runs experts over many rows, so that each has something to do while the other
// works.
func (o *Options) Groups() int {
	if o.HostAttention != nil && o.Grouping == configs.PerLayer {
		return 2
	}
	return 1
}

// GroupLimits are the limits of each group's model, for steps of limits l.
func (o Options) GroupLimits(l forward.Limits) forward.Limits {
	if o.Groups() > 1 {
		// Half of the micro-batches, each of which has up to a row more than its share.
		l.MaxTokens = min(l.MaxTokens, (l.MaxTokens+o.cutting().most(l.MaxTokens)+1)/2)
		l.MaxSeqs, l.MaxLogits = min(l.MaxSeqs, l.MaxTokens), min(l.MaxLogits, l.MaxTokens)
	}
	return l
}

// StepMetadataBytes is what row data takes on the device, and again in pinned memory.
func (o Options) StepMetadataBytes(l forward.Limits) int64 {
	return forward.GroupBytes(l, o.cutting().most(l.MaxTokens))
}

// ResultBytes is the pinned memory for what comes back from a step of limits l.
func (o Options) ResultBytes(c *models.Config, l forward.Limits) int64 {
	n := placesOf(c, l, o.Groups()).logits
	if o.HostLogits {
		n += 4 * int64(l.MaxLogits) * int64(c.Vocab)
	}
	return n
}

// StagingBytes is the pinned memory through which the host attends for steps of limits l,
// with activations of type act.
func (o Options) StagingBytes(c *models.Config, act kernels.DType, l forward.Limits) int64 {
	if o.HostAttention == nil {
		return 0
	}
	return forward.NewAttentionBuffers(&c.Attention, act, l.MaxTokens, 0).Bytes()
}

func (o *Options) cutting() cutting {
	return cutting{rows: o.MicroBatchTokens, batches: o.MicroBatches, groups: o.Groups()}
}

// cutting says how the rows of steps are cut into micro-batches: of at most rows rows
// (0: any number), at least so many batches where there are so many rows, in so many
// merge groups.
type cutting struct{ rows, batches, groups int }

// most is the most micro-batches of a step of up to so many rows.
func (c cutting) most(rows int) int {
	size := c.rows
	if size <= 0 || size > rows {
		size = rows
	}
	n := max((rows+size-1)/size, c.batches)
	return min((n+c.groups-1)/c.groups*c.groups, rows)
}

// of is into how many micro-batches so many rows are cut, and how many rows each
// has: as even as can be, none empty, and as many in each group as in the others, or
// one less.
func (c cutting) of(rows int) (n, each int) {
	most := c.most(rows)
	each = (rows + most - 1) / most
	return (rows + each - 1) / each, each
}
