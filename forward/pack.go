package forward

import (
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Batch is a micro-batch on the device: views of one upload. Its span is of the step's tokens,
// N of them. Two equal Batches are the same work for the device, so one CUDA graph serves both.
type Batch struct {
	Span
	IDs, RopeRows kernels.Tensor // [N] I32

	Attention AttentionMetadata
	Sampling  SamplingMetadata
	Targets   TargetMetadata
}

// AttentionMetadata maps the tokens of a micro-batch to its S sequences and to their slots in
// the KV cache.
type AttentionMetadata struct {
	Seqs int
	// MaxContext and MaxSeqTokens are maxima over the sequences; CachedTokens and
	// AttendedTokens are as in kernels.Attention.
	MaxContext, MaxSeqTokens     int
	CachedTokens, AttendedTokens int64
	// PastReady is as in kernels.Attention: no earlier micro-batch of the step has tokens of these sequences.
	PastReady bool

	Slots       kernels.Tensor // [N] I32
	SeqStarts   kernels.Tensor // [S+1] I32
	ContextLens kernels.Tensor // [S] I32
	BlockTable  kernels.Tensor // [S, widest] I32
}

// SamplingMetadata describes how tokens are sampled from a micro-batch's logits. Its span is of
// the step's logit rows, L of them.
type SamplingMetadata struct {
	Span
	LogitRows, Samples, Positions kernels.Tensor // [L] I32
	Temperature                   kernels.Tensor // [L] F32
	Seeds                         kernels.Tensor // [L] U64

	// TopK, TopP and MinP are each none unless some row uses it.
	TopK       kernels.Tensor // [L] I32
	TopP, MinP kernels.Tensor // [L] F32

	Adjust AdjustMetadata
	// LogProbs is set if some row requests log-probabilities.
	LogProbs bool

	// Masks are none before PackMasks.
	Masks MaskMetadata
}

// MaskMetadata has the tokens that M of the logit rows may sample. Both tensors are none if M is 0.
type MaskMetadata struct {
	Rows    kernels.Tensor // [M] I32, within the batch
	Allowed kernels.Tensor // [M, Vocab/32 rounded up] I32: see kernels.Mask
}

// TargetMetadata describes tokens whose log-probabilities are computed, each as the one that follows a
// row of the micro-batch. Its span is of the step's targets, T of them; the tensors are none if T is 0.
type TargetMetadata struct {
	Span
	RowIDs, IDs kernels.Tensor // [T] I32
}

// AdjustMetadata describes how the logits of A tokens are changed before sampling. All tensors
// are none if A is 0.
type AdjustMetadata struct {
	Starts                          kernels.Tensor // [L+1] I32
	IDs, Seen                       kernels.Tensor // [A] I32
	Bias                            kernels.Tensor // [A] F32
	Repetition, Presence, Frequency kernels.Tensor // [L] F32
}

// Relocated returns the metadata of a copy of the upload at address to, where a's upload is at
// from.
func (a AttentionMetadata) Relocated(from, to device.Addr) AttentionMetadata {
	for _, t := range [...]*kernels.Tensor{&a.Slots, &a.SeqStarts, &a.ContextLens, &a.BlockTable} {
		t.Addr += to - from
	}
	return a
}

// StepUploadBytes is the maximum size of the uploads, one after another, of a step divided into
// that many micro-batches. MaxAdjust limits the step, not the micro-batch, and counts once.
func StepUploadBytes(l Limits, batches int) int64 {
	n, s, d := int64(l.MaxTokens), int64(l.MaxSeqs), int64(l.MaxLogits)
	each := 5*device.Align(4*n) + device.Align(4*(s+1)) + device.Align(4*s) + device.Align(4*s*int64(l.MaxBlocks())) + 7*device.Align(4*d) + device.Align(8*d)
	var adjust int64
	if l.MaxAdjust > 0 {
		each += device.Align(4*(d+1)) + 3*device.Align(4*d) + 3*device.Alignment
		adjust = 3 * device.Align(4*int64(l.MaxAdjust))
	}
	return int64(batches)*each + adjust
}

// MaskUploadBytes is the maximum size of the masks, one after another, of a step divided into that many micro-batches.
func MaskUploadBytes(c *models.Config, l Limits, batches int) int64 {
	d, each := int64(l.MaxLogits), 4*int64((c.Vocab+31)/32)
	return device.Align(4*d) + device.Align(d*each) + 2*int64(batches)*device.Alignment
}

// PackMasks writes the masks of h to dst as Pack does the rest, and completes b, which Pack returned. It waits until they
// are computed.
func (h *HostBatch) PackMasks(dst []byte, base device.Addr, b *Batch) (int64, error) {
	list := h.samples.masks
	p := packer{dst: dst, base: base}
	m := &b.Sampling.Masks
	words := (h.config.Vocab + 31) / 32
	var rows []int32
	var bits []uint32
	m.Rows, rows = p.ints(len(list))
	m.Allowed, bits = place[uint32](&p, kernels.I32, len(list), words)
	if p.full() {
		return 0, fmt.Errorf("forward: masks of %d bytes in an upload buffer of %d", p.used, len(dst))
	}
	for i := range list {
		rows[i] = list[i].sample
		list[i].mask.Allowed(bits[i*words:][:words])
	}
	return p.used, nil
}

// Pack writes h to dst, in host memory at a multiple of 8 bytes. The caller uploads the number
// of bytes returned to base in device memory, which is aligned to 256 bytes.
func (h *HostBatch) Pack(dst []byte, base device.Addr) (Batch, int64, error) {
	if len(h.rows) == 0 {
		return Batch{}, 0, fmt.Errorf("forward: empty micro-batch")
	}
	b := Batch{Span: Span{First: h.first, Rows: len(h.rows)}}
	b.Sampling.Span = Span{First: h.firstLogit, Rows: len(h.samples.list)}
	p := packer{dst: dst, base: base}
	b.IDs, b.RopeRows, b.Attention.Slots = p.rows(h.rows)
	p.sequences(&h.seqs, &b.Attention)
	if b.Sampling.Rows > 0 {
		if err := p.sampling(h.samples.list, b.Rows, &b.Sampling); err != nil {
			return Batch{}, 0, err
		}
		p.truncation(&h.samples, &b.Sampling)
		p.adjusts(&h.samples, &b.Sampling.Adjust)
		b.Sampling.LogProbs = h.samples.logProbs
	}
	b.Targets.Span = Span{First: h.firstTarget, Rows: len(h.targets)}
	if err := p.targets(h.targets, b.Rows, &b.Targets); err != nil {
		return Batch{}, 0, err
	}
	if p.used > int64(len(dst)) {
		return Batch{}, 0, fmt.Errorf("forward: micro-batch of %d bytes in an upload buffer of %d", p.used, len(dst))
	}
	return b, p.used, nil
}

// packer allocates the places of an upload, one after another.
type packer struct {
	dst  []byte
	base device.Addr
	used int64
}

// place returns a tensor on the device, and its elements in dst (host and device have the same
// byte order), or nil if dst is too small, which Pack reports.
func place[T int32 | uint32 | uint64 | float32](p *packer, t kernels.DType, shape ...int) (kernels.Tensor, []T) {
	x := kernels.New(p.base+device.Addr(p.used), t, shape...)
	var out []T
	if n := x.Bytes(); p.used+n <= int64(len(p.dst)) {
		out = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p.dst[p.used:]))), n/int64(unsafe.Sizeof(*new(T))))
	}
	p.used += device.Align(x.Bytes())
	return x, out
}

func (p *packer) ints(n int) (kernels.Tensor, []int32) { return place[int32](p, kernels.I32, n) }

func (p *packer) floats(n int) (kernels.Tensor, []float32) { return place[float32](p, kernels.F32, n) }

// full reports whether dst was too small for some tensor.
func (p *packer) full() bool { return p.used > int64(len(p.dst)) }

func (p *packer) rows(rows []hostRow) (ids, ropeRows, slots kernels.Tensor) {
	ids, id := p.ints(len(rows))
	ropeRows, ropeRow := p.ints(len(rows))
	slots, slot := p.ints(len(rows))
	if p.full() {
		return ids, ropeRows, slots
	}
	for i := range rows {
		r := &rows[i]
		id[i], ropeRow[i], slot[i] = r.id, r.ropeRow, r.slot
	}
	return ids, ropeRows, slots
}

func (p *packer) sequences(h *hostSequences, a *AttentionMetadata) {
	a.PastReady = !h.continued
	a.Seqs, a.MaxContext, a.MaxSeqTokens, a.CachedTokens, a.AttendedTokens = len(h.list), h.maxContext, h.maxSeqTokens, h.cachedTokens, h.attendedTokens
	var starts, contexts, table []int32
	a.SeqStarts, starts = p.ints(a.Seqs + 1)
	a.ContextLens, contexts = p.ints(a.Seqs)
	a.BlockTable, table = place[int32](p, kernels.I32, a.Seqs, h.widest)
	if p.full() {
		return
	}
	starts[0] = 0
	for i := range h.list {
		q := &h.list[i]
		starts[i+1], contexts[i] = q.rowEnd, q.context
		row := table[:h.widest]
		table = table[h.widest:]
		clear(row[copy(row, q.blocks):])
	}
}

// sampling packs the sampling parameters; the micro-batch has of rows.
func (p *packer) sampling(list []hostSample, of int, d *SamplingMetadata) error {
	var rows, samples, positions []int32
	var temperatures []float32
	var seeds []uint64
	d.LogitRows, rows = p.ints(len(list))
	d.Samples, samples = p.ints(len(list))
	d.Positions, positions = p.ints(len(list))
	d.Temperature, temperatures = p.floats(len(list))
	d.Seeds, seeds = place[uint64](p, kernels.U64, len(list))
	for i := range list {
		x := &list[i]
		if x.row < 0 || int(x.row) >= of {
			return fmt.Errorf("forward: logits of row %d of %d", x.row, of)
		}
		if !p.full() {
			rows[i], samples[i], positions[i], temperatures[i], seeds[i] = x.row, x.sample, x.position, x.temperature, x.seed
		}
	}
	return nil
}

// targets packs the targets of a micro-batch, which has of rows.
func (p *packer) targets(list []hostTarget, of int, d *TargetMetadata) error {
	if len(list) == 0 {
		return nil
	}
	var rows, ids []int32
	d.RowIDs, rows = p.ints(len(list))
	d.IDs, ids = p.ints(len(list))
	for i, t := range list {
		if t.row < 0 || int(t.row) >= of {
			return fmt.Errorf("forward: a target of row %d of %d", t.row, of)
		}
		if !p.full() {
			rows[i], ids[i] = t.row, t.id
		}
	}
	return nil
}

// truncation packs TopK, TopP and MinP, each if some sample uses it.
func (p *packer) truncation(h *hostSamples, d *SamplingMetadata) {
	var topK []int32
	var topP, minP []float32
	if h.usesTopK {
		d.TopK, topK = p.ints(len(h.list))
	}
	if h.usesTopP {
		d.TopP, topP = p.floats(len(h.list))
	}
	if h.usesMinP {
		d.MinP, minP = p.floats(len(h.list))
	}
	for i := range topK {
		topK[i] = h.list[i].topK
	}
	for i := range topP {
		topP[i] = h.list[i].topP
	}
	for i := range minP {
		minP[i] = h.list[i].minP
	}
}

// adjusts packs adjusted tokens and penalties, if any token is adjusted.
func (p *packer) adjusts(h *hostSamples, a *AdjustMetadata) {
	n, logits := len(h.adjusts), len(h.list)
	if n == 0 {
		return
	}
	var starts, ids, seen []int32
	var bias, repetition, presence, frequency []float32
	a.Starts, starts = p.ints(logits + 1)
	a.IDs, ids = p.ints(n)
	a.Seen, seen = p.ints(n)
	a.Bias, bias = p.floats(n)
	a.Repetition, repetition = p.floats(logits)
	a.Presence, presence = p.floats(logits)
	a.Frequency, frequency = p.floats(logits)
	if p.full() {
		return
	}
	starts[0] = 0
	for i := range h.list {
		d := &h.list[i]
		starts[i+1] = d.adjustEnd
		repetition[i], presence[i], frequency[i] = d.repetition, d.presence, d.frequency
	}
	for i, x := range h.adjusts {
		ids[i], seen[i], bias[i] = x.ID, x.Seen, x.Bias
	}
}
