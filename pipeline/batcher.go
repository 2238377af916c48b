package pipeline

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
)

// microBatch is one micro-batch of a step, as packed by the host and as seen by the device.
type microBatch struct {
	host  forward.HostBatch
	batch forward.Batch
	// group is its merge group. firstToken, firstLogit and firstTarget are counted within the step,
	// not within the group.
	group                               int
	firstToken, firstLogit, firstTarget int
	// hostMetadata is what attention needs of batch, in pinned memory. trip is the
	// micro-batch's latest round trip through host attention, qkvOnHost the event behind its
	// copy of q, k and v to the host, hostDone the event behind its work on the host.
	hostMetadata        forward.AttentionMetadata
	trip                uint32
	qkvOnHost, hostDone device.Event
}

// group is a merge group of a step. tokens, logits and targets count its tokens, logit rows and
// targets; firstLogit is its first logit row within the step.
type group struct{ tokens, logits, targets, firstLogit int }

func (g *group) span() forward.Span { return forward.Span{Rows: g.tokens} }

// batcher splits steps into micro-batches, and these into merge groups.
type batcher struct {
	microBatching microBatching
	limits        forward.Limits
	// roundContexts rounds the contexts of decode steps up, so that one graph serves many of
	// them.
	roundContexts bool

	all    []microBatch
	groups []group
	// n is the number of micro-batches of the step: the first n of all.
	n int
	// decode: each sequence of the step has one token.
	decode bool
	// masked: some token of the step is sampled with a mask.
	masked bool
	// wantLogProbs: whether log-probabilities of each logit row of the step are requested.
	wantLogProbs []bool
	// targets of the step.
	targets int
}

func newBatcher(o *Options, batch func() forward.HostBatch) *batcher {
	c := o.microBatching()
	b := &batcher{microBatching: c, limits: o.Limits, all: make([]microBatch, c.maxBatches(o.Limits.MaxTokens)), groups: make([]group, c.groups)}
	for i := range b.all {
		b.all[i].host = batch()
	}
	return b
}

// used returns the step's micro-batches.
func (b *batcher) used() []microBatch { return b.all[:b.n] }

// validate checks a step and returns the number of its tokens.
func (b *batcher) validate(s *Step) (tokens int, err error) {
	l := b.limits
	logits, adjusts, targets := 0, 0, 0
	for i := range s.Sequences {
		q := &s.Sequences[i]
		if len(q.Tokens) == 0 || q.LogitRows > len(q.Tokens) {
			return 0, &SequenceError{i, fmt.Errorf("it has %d tokens and LogitRows is %d", len(q.Tokens), q.LogitRows)}
		}
		if len(q.Targets) > len(q.Tokens) {
			return 0, &SequenceError{i, fmt.Errorf("it has %d tokens and %d targets", len(q.Tokens), len(q.Targets))}
		}
		targets += len(q.Targets)
		tokens += len(q.Tokens)
		logits += q.LogitRows
		if q.LogitRows > 0 {
			adjusts += len(q.SamplingParams.Adjust)
		}
	}
	switch {
	case tokens == 0:
		return 0, errors.New("pipeline: the step has no tokens")
	case tokens > l.MaxTokens:
		return 0, fmt.Errorf("pipeline: the step has %d tokens, the maximum is %d", tokens, l.MaxTokens)
	case s.Logits && targets > 0:
		return 0, errors.New("pipeline: the step has targets, whose logits take the place of those that are requested")
	case logits > l.MaxLogits:
		return 0, fmt.Errorf("pipeline: the step has %d logit rows, the maximum is %d", logits, l.MaxLogits)
	case adjusts > l.MaxAdjust:
		return 0, fmt.Errorf("pipeline: the step adjusts %d logits, the maximum is %d", adjusts, l.MaxAdjust)
	}
	return tokens, nil
}

// split packs a step of total tokens into micro-batches, and these into the groups of its
// shape. A sequence that does not fit is continued in the next micro-batch, which finds the
// keys and values of its earlier tokens in the KV cache: within a layer, attention runs in
// the order of micro-batches.
func (b *batcher) split(s *Step, total int, shape *Shape) error {
	var each int
	b.n, each = b.microBatching.split(total)
	b.decode = total == len(s.Sequences)
	b.masked = false
	clear(b.groups)
	b.wantLogProbs, b.targets = b.wantLogProbs[:0], 0
	tokens, at := 0, -1
	var mb *microBatch
	var g *group
	for i := range s.Sequences {
		q := &s.Sequences[i]
		for from := 0; from < len(q.Tokens); {
			if at < 0 || mb.host.Rows() == each {
				at++
				mb = &b.all[at]
				mb.group, mb.firstToken, mb.firstLogit, mb.firstTarget = shape.groupOf(at), tokens, len(b.wantLogProbs), b.targets
				g = &b.groups[mb.group]
				if g.tokens == 0 {
					g.firstLogit = mb.firstLogit
				}
				mb.host.Reset(g.tokens, g.logits, g.targets)
			}
			to := min(from+each-mb.host.Rows(), len(q.Tokens))
			first, err := mb.host.Append(&forward.Sequence{
				IDs: q.Tokens[from:to], Start: q.Start + from, Continued: from > 0, Long: q.Long, Blocks: q.Table.Blocks(),
			})
			if err != nil {
				return &SequenceError{i, err}
			}
			for r := max(from, len(q.Tokens)-q.LogitRows); r < to; r++ {
				d := q.SamplingParams
				d.Position = int32(q.Start + r + 1)
				if r < len(q.Tokens)-1 {
					d.Adjust, d.Mask = nil, nil
				}
				b.masked = b.masked || d.Mask != nil
				if _, err := mb.host.Sample(first+r-from, &d); err != nil {
					return &SequenceError{i, err}
				}
				b.wantLogProbs = append(b.wantLogProbs, d.LogProbs)
				g.logits++
			}
			for r := from; r < min(to, len(q.Targets)); r++ {
				if err := mb.host.Target(first+r-from, q.Targets[r]); err != nil {
					return &SequenceError{i, err}
				}
				b.targets++
				g.targets++
			}
			tokens += to - from
			g.tokens += to - from
			from = to
		}
	}
	if b.roundContexts && b.decode {
		for i := range b.used() {
			h := &b.all[i].host
			h.PadContext(roundContext(h.MaxContext()))
		}
	}
	return nil
}

// stepMetadata is the memory of micro-batches' metadata (token ids, positions, block tables,
// sampling parameters): on the device, and the pinned memory that it is uploaded from, at the
// same offsets. The metadata of a step's micro-batches is contiguous; used counts its bytes
// so far.
type stepMetadata struct {
	pinned *kernels.Pinned
	device device.Memory
	used   int64
}

func newStepMetadata(o *Options) (d *stepMetadata, err error) {
	d = &stepMetadata{}
	bytes := o.StepMetadataBytes(o.config(), o.Limits)
	if d.pinned, err = newPinned(o, bytes, "step metadata, pinned"); err != nil {
		return d, err
	}
	d.device, err = o.Machine.Alloc(o.space(), bytes, "step metadata")
	return d, err
}

// upload packs a micro-batch's metadata and enqueues its copy to the device.
func (d *stepMetadata) upload(s device.Stream, b *microBatch) error {
	off, free := d.used, d.pinned.Bytes()-d.used
	base := d.device.Range(off, free).Addr
	batch, bytes, err := b.host.Pack(d.pinned.Write(off, free), base)
	if err != nil {
		return err
	}
	b.batch, b.hostMetadata = batch, batch.Attention.Relocated(base, d.pinned.Range(off, free).Addr)
	d.used += bytes
	return d.pinned.ToDevice(s, d.device.Range(off, bytes), off)
}

// uploadMasks packs a micro-batch's masks, when they are computed, and enqueues their copy to the device.
func (d *stepMetadata) uploadMasks(s device.Stream, b *microBatch) error {
	off, free := d.used, d.pinned.Bytes()-d.used
	bytes, err := b.host.PackMasks(d.pinned.Write(off, free), d.device.Range(off, free).Addr, &b.batch)
	if err != nil {
		return err
	}
	d.used += bytes
	return d.pinned.ToDevice(s, d.device.Range(off, bytes), off)
}

func (d *stepMetadata) close() error { return errors.Join(freePinned(d.pinned), free(d.device)) }

// newPinned allocates pinned memory for copies on the compute stream.
func newPinned(o *Options, bytes int64, label string) (*kernels.Pinned, error) {
	mem, err := o.Machine.Alloc(device.Host, bytes, label)
	if err != nil {
		return nil, err
	}
	return kernels.NewPinned(o.Machine, mem, o.space(), o.Executors[0].Model.Backend()), nil
}

func freePinned(p *kernels.Pinned) error {
	if p == nil {
		return nil
	}
	return p.Free()
}

func free(m device.Memory) error {
	if m == nil {
		return nil
	}
	return m.Free()
}
