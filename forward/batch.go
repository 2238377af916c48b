package forward

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// HostBatch is a micro-batch as the host puts it together: rows of sequences,
// and what to draw from which of them. Its slices are used again after Reset.
type HostBatch struct {
	// First is the row of the group at which the micro-batch begins, FirstLogit
	// the first of the group's logit rows that it uses.
	First, FirstLogit int

	rows         []hostRow
	seqs         []hostSequence
	widest       int // the most blocks of a sequence
	maxContext   int
	stored, seen int64 // see kernels.Attention; 0 after Widen
	maxSeqRows   int

	draws   []hostDraw
	adjusts []TokenAdjust // of all draws, one after another
	// What some draw uses.
	usesTopK, usesTopP, usesMinP, logProbs bool
}

// hostRow is a token's row: its id, its row of the RoPE table, and its place in the cache.
type hostRow struct{ id, ropeRow, slot int32 }

// hostSequence has the rows before rowEnd that no sequence before it has, and context
// tokens. Its blocks are the caller's, until the batch is packed.
type hostSequence struct {
	rowEnd, context int32
	blocks          []int32
}

// hostDraw is what is drawn from one row of the batch; its adjusted tokens end at adjustEnd.
type hostDraw struct {
	seed                            uint64
	row, sample, position           int32
	temperature                     float32
	topK                            int32
	topP, minP                      float32
	repetition, presence, frequency float32
	adjustEnd                       int32
}

// Sequence is one sequence's part of a micro-batch.
type Sequence struct {
	// IDs are the tokens whose rows run now, at least one.
	IDs []int32
	// Start is the position of IDs[0]: the tokens that the cache holds before.
	Start int
	// Long takes the long factors of longrope: see RoPE.LongAfter.
	Long bool
	// Blocks are the sequence's KV blocks from position 0 on, enough for Start +
	// len(IDs) tokens.
	Blocks []int32
}

// Draw says how a token is drawn from a row's logits. The zero Draw is greedy.
type Draw struct {
	// Temperature 0 takes the largest logit, whatever TopK, TopP and MinP.
	Temperature float32
	Seed        uint64
	// Sample tells a request's samples apart.
	Sample int32
	// Position is that of the token drawn.
	Position int32
	// TopK keeps that many likeliest tokens, 0: all. TopP, 0 to 1, keeps the
	// likeliest that together reach this probability, 0 or 1: all. MinP, 0 to 1,
	// keeps those that are at least so many times as likely as the likeliest, 0: all.
	// See kernels.Sample.
	TopK       int32
	TopP, MinP float32
	// RepetitionPenalty (1, or 0: off), PresencePenalty and FrequencyPenalty change
	// the logits of the tokens in Adjust, and of no others: see kernels.Adjust.
	RepetitionPenalty, PresencePenalty, FrequencyPenalty float32
	// Adjust lists tokens, each once, in any order.
	Adjust []TokenAdjust
	// LogProbs asks for log-probabilities, of the logits before penalties, bias and
	// temperature.
	LogProbs bool
}

// TokenAdjust changes the logit of one token: see kernels.Adjust.
type TokenAdjust struct {
	ID int32
	// Seen is -1 for a token in neither prompt nor answer, 0 for one in the prompt
	// only, n for one that stands n times in the answer.
	Seen int32
	// Bias is added to the logit; -Inf bans the token.
	Bias float32
}

// Reset empties h and keeps its room.
func (h *HostBatch) Reset(first, firstLogit int) {
	*h = HostBatch{
		First: first, FirstLogit: firstLogit,
		rows: h.rows[:0], seqs: h.seqs[:0], draws: h.draws[:0], adjusts: h.adjusts[:0],
	}
}

// Rows is the number of rows so far, Logits of logit rows.
func (h *HostBatch) Rows() int { return len(h.rows) }

// Logits is the number of logit rows so far.
func (h *HostBatch) Logits() int { return len(h.draws) }

// Adjusts is the number of adjusted tokens so far, of all logit rows.
func (h *HostBatch) Adjusts() int { return len(h.adjusts) }

// MaxContext is the most tokens of a sequence so far.
func (h *HostBatch) MaxContext() int { return h.maxContext }

// Widen makes h look as if its longest sequence had so many tokens, where that is more,
// or MaxModelLen, where that is less, so that Batches of different steps are equal.
func (m *Model) Widen(h *HostBatch, context int) {
	h.maxContext = max(h.maxContext, min(context, m.Limits.MaxModelLen))
	h.stored, h.seen = 0, 0
	h.widest = max(h.widest, (h.maxContext+m.Limits.BlockTokens-1)/m.Limits.BlockTokens)
}

// Append adds a sequence to h, for m's block size and RoPE table, and returns
// the row, within h, of its first token. It keeps q.Blocks until h is packed.
func (m *Model) Append(h *HostBatch, q *Sequence) (int, error) {
	context, b := q.Start+len(q.IDs), m.Limits.BlockTokens
	switch {
	case len(q.IDs) == 0 || q.Start < 0:
		return 0, fmt.Errorf("forward: sequence of %d rows from position %d", len(q.IDs), q.Start)
	case context > m.Limits.MaxModelLen:
		return 0, fmt.Errorf("forward: sequence of %d tokens, at most %d fit", context, m.Limits.MaxModelLen)
	case len(q.Blocks)*b < context:
		return 0, fmt.Errorf("forward: %d blocks of %d tokens for a sequence of %d", len(q.Blocks), b, context)
	}
	for _, id := range q.IDs {
		if id < 0 || int(id) >= m.Config.Vocab {
			return 0, fmt.Errorf("forward: token id %d is outside the model's vocabulary of %d", id, m.Config.Vocab)
		}
	}
	first := len(h.rows)
	block, in := q.Start/b, q.Start%b
	rope := m.RopeRow(q.Start, q.Long)
	for i, id := range q.IDs {
		if in == b {
			block, in = block+1, 0
		}
		r := more(&h.rows)
		r.id, r.ropeRow, r.slot = id, rope+int32(i), q.Blocks[block]*int32(b)+int32(in)
		in++
	}
	blocks := block + 1
	s := more(&h.seqs)
	s.rowEnd, s.context, s.blocks = int32(len(h.rows)), int32(context), q.Blocks[:blocks]
	h.widest = max(h.widest, blocks)
	h.maxContext = max(h.maxContext, context)
	h.stored += int64(context)
	h.seen += int64(len(q.IDs)) * int64(q.Start+context+1) / 2
	h.maxSeqRows = max(h.maxSeqRows, len(q.IDs))
	return first, nil
}

// Draw asks for the logits of a row, counted within h, and for a token drawn
// from them. It returns the index of the logit row within h. It checks d as far as
// bad values could lead a backend out of its tensors or to a draw of nothing; that
// Adjust lists a token twice is left to the caller.
func (m *Model) Draw(h *HostBatch, row int, d *Draw) (int, error) {
	if err := m.drawable(d); err != nil {
		return 0, err
	}
	if n := len(h.adjusts) + len(d.Adjust); n > m.Limits.MaxAdjust {
		return 0, fmt.Errorf("forward: %d adjusted tokens, at most %d fit", n, m.Limits.MaxAdjust)
	}
	if len(d.Adjust) > 0 {
		h.adjusts = append(h.adjusts, d.Adjust...)
	}
	topP, repetition := d.TopP, d.RepetitionPenalty
	if topP == 0 {
		topP = 1
	}
	if repetition == 0 {
		repetition = 1
	}
	if d.Temperature > 0 {
		h.usesTopK = h.usesTopK || d.TopK > 0
		h.usesTopP = h.usesTopP || topP < 1
		h.usesMinP = h.usesMinP || d.MinP > 0
	}
	h.logProbs = h.logProbs || d.LogProbs
	x := more(&h.draws)
	x.seed, x.row, x.sample, x.position, x.temperature = d.Seed, int32(row), d.Sample, d.Position, d.Temperature
	x.topK, x.topP, x.minP = d.TopK, topP, d.MinP
	x.repetition, x.presence, x.frequency = repetition, d.PresencePenalty, d.FrequencyPenalty
	x.adjustEnd = int32(len(h.adjusts))
	return len(h.draws) - 1, nil
}

// more is one more element of s, to be filled in: appending a struct would write it twice.
func more[T any](s *[]T) *T {
	n := len(*s)
	if n == cap(*s) {
		*s = slices.Grow(*s, 1)
	}
	*s = (*s)[:n+1]
	return &(*s)[n]
}

// drawable checks one Draw by itself.
func (m *Model) drawable(d *Draw) error {
	finite := func(f float32) bool { return f-f == 0 }
	switch {
	case !(d.Temperature >= 0 && finite(d.Temperature)):
		return fmt.Errorf("forward: temperature %g, want a finite number of at least 0", d.Temperature)
	case d.TopK < 0:
		return fmt.Errorf("forward: top-k %d, want 0 (all) or more", d.TopK)
	case !(d.TopP >= 0 && d.TopP <= 1):
		return fmt.Errorf("forward: top-p %g, want 0 to 1", d.TopP)
	case !(d.MinP >= 0 && d.MinP <= 1):
		return fmt.Errorf("forward: min-p %g, want 0 to 1", d.MinP)
	case !(d.RepetitionPenalty >= 0 && finite(d.RepetitionPenalty)):
		return fmt.Errorf("forward: repetition penalty %g, want a finite number above 0", d.RepetitionPenalty)
	case !finite(d.PresencePenalty) || !finite(d.FrequencyPenalty):
		return fmt.Errorf("forward: presence penalty %g and frequency penalty %g, want finite numbers", d.PresencePenalty, d.FrequencyPenalty)
	case d.LogProbs && m.Limits.MaxTopLogProbs == 0:
		return errors.New("forward: log-probabilities asked of a model whose limit MaxTopLogProbs is 0")
	}
	for i, a := range d.Adjust {
		switch {
		case a.ID < 0 || int(a.ID) >= m.Config.Vocab:
			return fmt.Errorf("forward: adjusted token %d has id %d, outside the model's vocabulary of %d", i, a.ID, m.Config.Vocab)
		case a.Seen < -1:
			return fmt.Errorf("forward: adjusted token %d was seen %d times, want -1 or more", i, a.Seen)
		case a.Bias != a.Bias || a.Bias > math.MaxFloat32:
			return fmt.Errorf("forward: adjusted token %d has bias %g, want a finite number or -Inf", i, a.Bias)
		}
	}
	return nil
}

// Batch is a micro-batch on the device: views of one upload, with N rows, S
// sequences, L logit rows and A adjusted tokens.
type Batch struct {
	First, Rows, Seqs, FirstLogit, Logits int
	// MaxContext and MaxSeqRows are the largest of the sequences', Stored and Seen what
	// kernels.Attention says of them.
	MaxContext, MaxSeqRows int
	Stored, Seen           int64

	IDs, RopeRows, Slots              kernels.Tensor // [N] I32
	SeqStarts                         kernels.Tensor // [S+1] I32
	ContextLens                       kernels.Tensor // [S] I32
	BlockTable                        kernels.Tensor // [S, widest] I32
	LogitRows, Samples, DrawPositions kernels.Tensor // [L] I32
	Temperature                       kernels.Tensor // [L] F32
	Seeds                             kernels.Tensor // [L] U64

	// Each none unless some row uses it.
	TopK       kernels.Tensor // [L] I32
	TopP, MinP kernels.Tensor // [L] F32
	// None unless A is above 0.
	AdjustStarts                    kernels.Tensor // [L+1] I32
	AdjustIDs, AdjustSeen           kernels.Tensor // [A] I32
	AdjustBias                      kernels.Tensor // [A] F32
	Repetition, Presence, Frequency kernels.Tensor // [L] F32
	// LogProbs says whether some row wants them.
	LogProbs bool
}

// BatchBytes is the most bytes that the upload of a micro-batch takes.
func BatchBytes(l Limits) int64 { return GroupBytes(l, 1) }

// GroupBytes is the most bytes that the uploads of a group of so many
// micro-batches take together, one behind another. What limits a group and not a
// micro-batch, MaxAdjust, counts once.
func GroupBytes(l Limits, batches int) int64 {
	n, s, d := int64(l.MaxRows), int64(l.MaxSeqs), int64(l.MaxLogits)
	each := 3*device.Align(4*n) + device.Align(4*(s+1)) + device.Align(4*s) + device.Align(4*s*int64(l.MaxBlocks())) + 7*device.Align(4*d) + device.Align(8*d)
	var adjust int64
	if l.MaxAdjust > 0 {
		each += device.Align(4*(d+1)) + 3*device.Align(4*d) + 3*device.Alignment
		adjust = 3 * device.Align(4*int64(l.MaxAdjust))
	}
	return int64(batches)*each + adjust
}

// PackBatch writes h to dst, in host memory at a multiple of 8 bytes, for an upload of
// the bytes returned to base on the device, which is aligned to 256 bytes.
func PackBatch(h *HostBatch, dst []byte, base device.Addr) (Batch, int64, error) {
	if len(h.rows) == 0 {
		return Batch{}, 0, fmt.Errorf("forward: empty micro-batch")
	}
	b := Batch{
		First: h.First, Rows: len(h.rows), Seqs: len(h.seqs), FirstLogit: h.FirstLogit, Logits: len(h.draws),
		MaxContext: h.maxContext, MaxSeqRows: h.maxSeqRows, Stored: h.stored, Seen: h.seen,
	}
	p := packer{dst: dst, base: base}
	p.rows(h, &b)
	p.sequences(h, &b)
	if b.Logits > 0 {
		if err := p.draws(h, &b); err != nil {
			return Batch{}, 0, err
		}
		p.cuts(h, &b)
		p.adjusts(h, &b)
		b.LogProbs = h.logProbs
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
// bytes that host and device have, or nil where dst has too little room, which PackBatch
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

func (p *packer) rows(h *HostBatch, b *Batch) {
	var ids, ropeRows, slots []int32
	b.IDs, ids = p.ints(b.Rows)
	b.RopeRows, ropeRows = p.ints(b.Rows)
	b.Slots, slots = p.ints(b.Rows)
	if p.full() {
		return
	}
	for i := range h.rows {
		r := &h.rows[i]
		ids[i], ropeRows[i], slots[i] = r.id, r.ropeRow, r.slot
	}
}

func (p *packer) sequences(h *HostBatch, b *Batch) {
	var starts, contexts, table []int32
	b.SeqStarts, starts = p.ints(b.Seqs + 1)
	b.ContextLens, contexts = p.ints(b.Seqs)
	b.BlockTable, table = place[int32](p, kernels.I32, b.Seqs, h.widest)
	if p.full() {
		return
	}
	starts[0] = 0
	for i := range h.seqs {
		q := &h.seqs[i]
		starts[i+1], contexts[i] = q.rowEnd, q.context
		row := table[:h.widest]
		table = table[h.widest:]
		clear(row[copy(row, q.blocks):])
	}
}

func (p *packer) draws(h *HostBatch, b *Batch) error {
	var rows, samples, positions []int32
	var temperatures []float32
	var seeds []uint64
	b.LogitRows, rows = p.ints(b.Logits)
	b.Samples, samples = p.ints(b.Logits)
	b.DrawPositions, positions = p.ints(b.Logits)
	b.Temperature, temperatures = p.floats(b.Logits)
	b.Seeds, seeds = place[uint64](p, kernels.U64, b.Logits)
	for i := range h.draws {
		d := &h.draws[i]
		if d.row < 0 || int(d.row) >= b.Rows {
			return fmt.Errorf("forward: logits of row %d of %d", d.row, b.Rows)
		}
		if !p.full() {
			rows[i], samples[i], positions[i], temperatures[i], seeds[i] = d.row, d.sample, d.position, d.temperature, d.seed
		}
	}
	return nil
}

// cuts packs what cuts the distributions, as far as some draw uses it.
func (p *packer) cuts(h *HostBatch, b *Batch) {
	var topK []int32
	var topP, minP []float32
	if h.usesTopK {
		b.TopK, topK = p.ints(b.Logits)
	}
	if h.usesTopP {
		b.TopP, topP = p.floats(b.Logits)
	}
	if h.usesMinP {
		b.MinP, minP = p.floats(b.Logits)
	}
	for i := range topK {
		topK[i] = h.draws[i].topK
	}
	for i := range topP {
		topP[i] = h.draws[i].topP
	}
	for i := range minP {
		minP[i] = h.draws[i].minP
	}
}

// adjusts packs adjusted tokens and penalties, if there are any of the first.
func (p *packer) adjusts(h *HostBatch, b *Batch) {
	n := len(h.adjusts)
	if n == 0 {
		return
	}
	var starts, ids, seen []int32
	var bias, repetition, presence, frequency []float32
	b.AdjustStarts, starts = p.ints(b.Logits + 1)
	b.AdjustIDs, ids = p.ints(n)
	b.AdjustSeen, seen = p.ints(n)
	b.AdjustBias, bias = p.floats(n)
	b.Repetition, repetition = p.floats(b.Logits)
	b.Presence, presence = p.floats(b.Logits)
	b.Frequency, frequency = p.floats(b.Logits)
	if p.full() {
		return
	}
	starts[0] = 0
	for i := range h.draws {
		d := &h.draws[i]
		starts[i+1] = d.adjustEnd
		repetition[i], presence[i], frequency[i] = d.repetition, d.presence, d.frequency
	}
	for i, a := range h.adjusts {
		ids[i], seen[i], bias[i] = a.ID, a.Seen, a.Bias
	}
}
