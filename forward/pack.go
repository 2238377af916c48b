package forward

import (
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Batch is a micro-batch on the device: views of one upload. Its span is of the group's
// rows, N of them. Two batches that are equal are the same to the device.
type Batch struct {
	Span
	IDs, RopeRows kernels.Tensor // [N] I32

	Attention AttentionMetadata
	Sampling  SamplingMetadata
}

// AttentionMetadata says which rows of a micro-batch are whose, and where their keys and
// values lie: S sequences.
type AttentionMetadata struct {
	Seqs int
	// MaxContext and MaxSeqRows are the largest of the sequences', Stored and Seen what
	// kernels.Attention says of them.
	MaxContext, MaxSeqRows int
	Stored, Seen           int64

	Slots       kernels.Tensor // [N] I32
	SeqStarts   kernels.Tensor // [S+1] I32
	ContextLens kernels.Tensor // [S] I32
	BlockTable  kernels.Tensor // [S, widest] I32
}

// SamplingMetadata says how tokens are drawn from a micro-batch's logit rows. Its span is
// of the group's logit rows, L of them.
type SamplingMetadata struct {
	Span
	LogitRows, Samples, Positions kernels.Tensor // [L] I32
	Temperature                   kernels.Tensor // [L] F32
	Seeds                         kernels.Tensor // [L] U64

	// Each none unless some row uses it.
	TopK       kernels.Tensor // [L] I32
	TopP, MinP kernels.Tensor // [L] F32

	Adjust AdjustMetadata
	// LogProbs says whether some row wants them.
	LogProbs bool
}

// AdjustMetadata says how the logits of A tokens are changed before tokens are drawn. All
// of it is none where A is 0.
type AdjustMetadata struct {
	Starts                          kernels.Tensor // [L+1] I32
	IDs, Seen                       kernels.Tensor // [A] I32
	Bias                            kernels.Tensor // [A] F32
	Repetition, Presence, Frequency kernels.Tensor // [L] F32
}

// Moved is the metadata of a copy of the upload, at to where a's is at from.
func (a AttentionMetadata) Moved(from, to device.Addr) AttentionMetadata {
	for _, t := range [...]*kernels.Tensor{&a.Slots, &a.SeqStarts, &a.ContextLens, &a.BlockTable} {
		t.Addr += to - from
	}
	return a
}

// GroupBytes is the most bytes that the uploads of a group of so many
// micro-batches take together, one behind another. What limits a group and not a
// micro-batch, MaxAdjust, counts once.
func GroupBytes(l Limits, batches int) int64 {
	n, s, d := int64(l.MaxTokens), int64(l.MaxSeqs), int64(l.MaxLogits)
	each := 3*device.Align(4*n) + device.Align(4*(s+1)) + device.Align(4*s) + device.Align(4*s*int64(l.MaxBlocks())) + 7*device.Align(4*d) + device.Align(8*d)
	var adjust int64
	if l.MaxAdjust > 0 {
		each += device.Align(4*(d+1)) + 3*device.Align(4*d) + 3*device.Alignment
		adjust = 3 * device.Align(4*int64(l.MaxAdjust))
	}
	return int64(batches)*each + adjust
}

// Pack writes h to dst, in host memory at a multiple of 8 bytes, for an upload of the
// bytes returned to base on the device, which is aligned to 256 bytes.
func (h *HostBatch) Pack(dst []byte, base device.Addr) (Batch, int64, error) {
	if len(h.rows) == 0 {
		return Batch{}, 0, fmt.Errorf("forward: empty micro-batch")
	}
	b := Batch{Span: Span{First: h.first, Rows: len(h.rows)}}
	b.Sampling.Span = Span{First: h.firstLogit, Rows: len(h.draws.list)}
	p := packer{dst: dst, base: base}
	b.IDs, b.RopeRows, b.Attention.Slots = p.rows(h.rows)
	p.sequences(&h.seqs, &b.Attention)
	if b.Sampling.Rows > 0 {
		if err := p.draws(h.draws.list, b.Rows, &b.Sampling); err != nil {
			return Batch{}, 0, err
		}
		p.cuts(&h.draws, &b.Sampling)
		p.adjusts(&h.draws, &b.Sampling.Adjust)
		b.Sampling.LogProbs = h.draws.logProbs
	}
	if p.used > int64(len(dst)) {
		return Batch{}, 0, fmt.Errorf("forward: micro-batch of %d bytes, room for %d", p.used, len(dst))
	}
	return b, p.used, nil
}

// packer gives out the places of an upload, one behind another.
type packer struct {
	dst  []byte
	base device.Addr
	used int64
}

// place is a tensor's place, on the device and in dst: its elements there, in the order of
// bytes that host and device have, or nil where dst has too little room, which Pack
// reports.
func place[T int32 | uint64 | float32](p *packer, t kernels.DType, shape ...int) (kernels.Tensor, []T) {
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

// full says that some place was not in dst.
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
	a.Seqs, a.MaxContext, a.MaxSeqRows, a.Stored, a.Seen = len(h.list), h.maxContext, h.maxRows, h.stored, h.seen
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

// draws packs how a token is drawn from each of some of a micro-batch's rows.
func (p *packer) draws(draws []hostDraw, of int, d *SamplingMetadata) error {
	var rows, samples, positions []int32
	var temperatures []float32
	var seeds []uint64
	d.LogitRows, rows = p.ints(len(draws))
	d.Samples, samples = p.ints(len(draws))
	d.Positions, positions = p.ints(len(draws))
	d.Temperature, temperatures = p.floats(len(draws))
	d.Seeds, seeds = place[uint64](p, kernels.U64, len(draws))
	for i := range draws {
		x := &draws[i]
		if x.row < 0 || int(x.row) >= of {
			return fmt.Errorf("forward: logits of row %d of %d", x.row, of)
		}
		if !p.full() {
			rows[i], samples[i], positions[i], temperatures[i], seeds[i] = x.row, x.sample, x.position, x.temperature, x.seed
		}
	}
	return nil
}

// cuts packs what cuts the distributions, as far as some draw uses it.
func (p *packer) cuts(h *hostDraws, d *SamplingMetadata) {
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

// adjusts packs adjusted tokens and penalties, if there are any of the first.
func (p *packer) adjusts(h *hostDraws, a *AdjustMetadata) {
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
