package models

import (
	"errors"
	"fmt"
	"math"
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

	ids, ropeRows, slots []int32 // per row
	starts, contexts     []int32 // per sequence; starts has one more
	blocks               []int32 // all sequences' blocks, one after another
	blockEnds            []int   // per sequence: end in blocks
	widest               int     // the most blocks of a sequence
	maxContext           int
	stored, seen         int64 // see kernels.Attention; 0 after Widen
	maxSeqRows           int

	draws
}

// draws is what a micro-batch draws from which rows: one element per logit row
// unless said.
type draws struct {
	logitRows    []int32 // rows of this batch
	temperatures []float32
	seeds        []uint64
	samples      []int32
	positions    []int32
	// What cuts the distribution, and whether some row uses it.
	topK                         []int32
	topP, minP                   []float32
	usesTopK, usesTopP, usesMinP bool
	// Penalties, and the adjusted tokens of all rows, one row after another.
	repetition, presence, frequency []float32
	adjustEnds                      []int32
	adjustIDs, adjustSeen           []int32
	adjustBias                      []float32
	logProbs                        bool // of some row
}

// reset empties d and keeps its room.
func (d *draws) reset() {
	*d = draws{
		logitRows: d.logitRows[:0], temperatures: d.temperatures[:0], seeds: d.seeds[:0],
		samples: d.samples[:0], positions: d.positions[:0],
		topK: d.topK[:0], topP: d.topP[:0], minP: d.minP[:0],
		repetition: d.repetition[:0], presence: d.presence[:0], frequency: d.frequency[:0],
		adjustEnds: d.adjustEnds[:0], adjustIDs: d.adjustIDs[:0], adjustSeen: d.adjustSeen[:0], adjustBias: d.adjustBias[:0],
	}
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
	h.draws.reset()
	*h = HostBatch{
		First: first, FirstLogit: firstLogit,
		ids: h.ids[:0], ropeRows: h.ropeRows[:0], slots: h.slots[:0],
		starts: h.starts[:0], contexts: h.contexts[:0], blocks: h.blocks[:0], blockEnds: h.blockEnds[:0],
		draws: h.draws,
	}
}

// Rows is the number of rows so far, Logits of logit rows.
func (h *HostBatch) Rows() int { return len(h.ids) }

// Logits is the number of logit rows so far.
func (h *HostBatch) Logits() int { return len(h.logitRows) }

// Adjusts is the number of adjusted tokens so far, of all logit rows.
func (h *HostBatch) Adjusts() int { return len(h.adjustIDs) }

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
// the row, within h, of its first token.
func (m *Model) Append(h *HostBatch, q Sequence) (int, error) {
	context, b := q.Start+len(q.IDs), m.Limits.BlockTokens
	switch {
	case len(q.IDs) == 0 || q.Start < 0:
		return 0, fmt.Errorf("models: sequence of %d rows from position %d", len(q.IDs), q.Start)
	case context > m.Limits.MaxModelLen:
		return 0, fmt.Errorf("models: sequence of %d tokens, at most %d fit", context, m.Limits.MaxModelLen)
	case len(q.Blocks)*b < context:
		return 0, fmt.Errorf("models: %d blocks of %d tokens for a sequence of %d", len(q.Blocks), b, context)
	}
	for _, id := range q.IDs {
		if id < 0 || int(id) >= m.Config.Vocab {
			return 0, fmt.Errorf("models: token id %d is outside the model's vocabulary of %d", id, m.Config.Vocab)
		}
	}
	first := len(h.ids)
	if len(h.starts) == 0 {
		h.starts = append(h.starts, 0)
	}
	h.ids = append(h.ids, q.IDs...)
	for i := range q.IDs {
		p := q.Start + i
		h.ropeRows = append(h.ropeRows, m.RopeRow(p, q.Long))
		h.slots = append(h.slots, q.Blocks[p/b]*int32(b)+int32(p%b))
	}
	h.starts = append(h.starts, int32(len(h.ids)))
	h.contexts = append(h.contexts, int32(context))
	blocks := (context + b - 1) / b
	h.blocks = append(h.blocks, q.Blocks[:blocks]...)
	h.blockEnds = append(h.blockEnds, len(h.blocks))
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
func (m *Model) Draw(h *HostBatch, row int, d Draw) (int, error) {
	if err := m.drawable(&d); err != nil {
		return 0, err
	}
	if n := len(h.adjustIDs) + len(d.Adjust); n > m.Limits.MaxAdjust {
		return 0, fmt.Errorf("models: %d adjusted tokens, at most %d fit", n, m.Limits.MaxAdjust)
	}
	h.logitRows = append(h.logitRows, int32(row))
	h.temperatures = append(h.temperatures, d.Temperature)
	h.seeds = append(h.seeds, d.Seed)
	h.samples = append(h.samples, d.Sample)
	h.positions = append(h.positions, d.Position)
	if d.TopP == 0 {
		d.TopP = 1
	}
	if d.RepetitionPenalty == 0 {
		d.RepetitionPenalty = 1
	}
	h.topK, h.topP, h.minP = append(h.topK, d.TopK), append(h.topP, d.TopP), append(h.minP, d.MinP)
	if d.Temperature > 0 {
		h.usesTopK = h.usesTopK || d.TopK > 0
		h.usesTopP = h.usesTopP || d.TopP < 1
		h.usesMinP = h.usesMinP || d.MinP > 0
	}
	h.repetition, h.presence, h.frequency = append(h.repetition, d.RepetitionPenalty), append(h.presence, d.PresencePenalty), append(h.frequency, d.FrequencyPenalty)
	for _, a := range d.Adjust {
		h.adjustIDs, h.adjustSeen, h.adjustBias = append(h.adjustIDs, a.ID), append(h.adjustSeen, a.Seen), append(h.adjustBias, a.Bias)
	}
	h.adjustEnds = append(h.adjustEnds, int32(len(h.adjustIDs)))
	h.logProbs = h.logProbs || d.LogProbs
	return len(h.logitRows) - 1, nil
}

// drawable checks one Draw by itself.
func (m *Model) drawable(d *Draw) error {
	finite := func(f float32) bool { return f-f == 0 }
	switch {
	case !(d.Temperature >= 0 && finite(d.Temperature)):
		return fmt.Errorf("models: temperature %g, want a finite number of at least 0", d.Temperature)
	case d.TopK < 0:
		return fmt.Errorf("models: top-k %d, want 0 (all) or more", d.TopK)
	case !(d.TopP >= 0 && d.TopP <= 1):
		return fmt.Errorf("models: top-p %g, want 0 to 1", d.TopP)
	case !(d.MinP >= 0 && d.MinP <= 1):
		return fmt.Errorf("models: min-p %g, want 0 to 1", d.MinP)
	case !(d.RepetitionPenalty >= 0 && finite(d.RepetitionPenalty)):
		return fmt.Errorf("models: repetition penalty %g, want a finite number above 0", d.RepetitionPenalty)
	case !finite(d.PresencePenalty) || !finite(d.FrequencyPenalty):
		return fmt.Errorf("models: presence penalty %g and frequency penalty %g, want finite numbers", d.PresencePenalty, d.FrequencyPenalty)
	case d.LogProbs && m.Limits.MaxTopLogProbs == 0:
		return errors.New("models: log-probabilities asked of a model whose limit MaxTopLogProbs is 0")
	}
	for i, a := range d.Adjust {
		switch {
		case a.ID < 0 || int(a.ID) >= m.Config.Vocab:
			return fmt.Errorf("models: adjusted token %d has id %d, outside the model's vocabulary of %d", i, a.ID, m.Config.Vocab)
		case a.Seen < -1:
			return fmt.Errorf("models: adjusted token %d was seen %d times, want -1 or more", i, a.Seen)
		case a.Bias != a.Bias || a.Bias > math.MaxFloat32:
			return fmt.Errorf("models: adjusted token %d has bias %g, want a finite number or -Inf", i, a.Bias)
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
	each := 3*align(4*n) + align(4*(s+1)) + align(4*s) + align(4*s*int64(l.MaxBlocks())) + 7*align(4*d) + align(8*d)
	var adjust int64
	if l.MaxAdjust > 0 {
		each += align(4*(d+1)) + 3*align(4*d) + 3*alignment
		adjust = 3 * align(4*int64(l.MaxAdjust))
	}
	return int64(batches)*each + adjust
}

// PackBatch writes h to dst, in host memory, for an upload of the bytes returned
// to base on the device, which is aligned to 256 bytes.
func PackBatch(h *HostBatch, dst []byte, base device.Addr) (Batch, int64, error) {
	if len(h.ids) == 0 {
		return Batch{}, 0, fmt.Errorf("models: empty micro-batch")
	}
	for _, r := range h.logitRows {
		if r < 0 || int(r) >= len(h.ids) {
			return Batch{}, 0, fmt.Errorf("models: logits of row %d of %d", r, len(h.ids))
		}
	}
	seqs := len(h.contexts)
	b := Batch{
		First: h.First, Rows: len(h.ids), Seqs: seqs, FirstLogit: h.FirstLogit, Logits: len(h.logitRows),
		MaxContext: h.maxContext, MaxSeqRows: h.maxSeqRows, Stored: h.stored, Seen: h.seen,
	}
	var used int64
	place := func(t kernels.DType, shape ...int) (kernels.Tensor, []byte) {
		x := kernels.New(base+device.Addr(used), t, shape...)
		var out []byte
		if end := used + x.Bytes(); end <= int64(len(dst)) {
			out = dst[used:end]
		}
		used += align(x.Bytes())
		return x, out
	}
	ints := func(v []int32) kernels.Tensor {
		x, out := place(kernels.I32, len(v))
		put(out, v)
		return x
	}
	floats := func(v []float32) kernels.Tensor {
		x, out := place(kernels.F32, len(v))
		put(out, v)
		return x
	}
	b.IDs, b.RopeRows, b.Slots = ints(h.ids), ints(h.ropeRows), ints(h.slots)
	b.SeqStarts, b.ContextLens = ints(h.starts), ints(h.contexts)
	var table []byte
	b.BlockTable, table = place(kernels.I32, seqs, h.widest)
	if table != nil {
		clear(table)
		from := 0
		for i, end := range h.blockEnds {
			put(table[4*i*h.widest:], h.blocks[from:end])
			from = end
		}
	}
	if b.Logits > 0 {
		b.LogitRows, b.Samples, b.DrawPositions = ints(h.logitRows), ints(h.samples), ints(h.positions)
		b.Temperature = floats(h.temperatures)
		var out []byte
		b.Seeds, out = place(kernels.U64, b.Logits)
		put(out, h.seeds)
		if h.usesTopK {
			b.TopK = ints(h.topK)
		}
		if h.usesTopP {
			b.TopP = floats(h.topP)
		}
		if h.usesMinP {
			b.MinP = floats(h.minP)
		}
		if len(h.adjustIDs) > 0 {
			var starts []byte
			b.AdjustStarts, starts = place(kernels.I32, b.Logits+1)
			if starts != nil {
				clear(starts[:4])
				put(starts[4:], h.adjustEnds)
			}
			b.AdjustIDs, b.AdjustSeen, b.AdjustBias = ints(h.adjustIDs), ints(h.adjustSeen), floats(h.adjustBias)
			b.Repetition, b.Presence, b.Frequency = floats(h.repetition), floats(h.presence), floats(h.frequency)
		}
		b.LogProbs = h.logProbs
	}
	if used > int64(len(dst)) {
		return Batch{}, 0, fmt.Errorf("models: micro-batch of %d bytes, room for %d", used, len(dst))
	}
	return b, used, nil
}

// put writes v to dst, in the order of bytes that host and device have; a nil dst has no
// room, which PackBatch reports.
func put[T int32 | uint64 | float32](dst []byte, v []T) {
	copy(dst, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(*new(T)))))
}
