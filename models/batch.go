package models

import (
	"encoding/binary"
	"fmt"
	"math"

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
	maxSeqRows           int

	logitRows    []int32 // rows of this batch
	temperatures []float32
	seeds        []uint64
	samples      []int32
	positions    []int32
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

// Draw says how a token is drawn from a row's logits.
type Draw struct {
	// Temperature 0 takes the largest logit.
	Temperature float32
	Seed        uint64
	// Sample tells a request's samples apart.
	Sample int32
	// Position is that of the token drawn.
	Position int32
}

// Reset empties h and keeps its room.
func (h *HostBatch) Reset(first, firstLogit int) {
	*h = HostBatch{
		First: first, FirstLogit: firstLogit,
		ids: h.ids[:0], ropeRows: h.ropeRows[:0], slots: h.slots[:0],
		starts: h.starts[:0], contexts: h.contexts[:0], blocks: h.blocks[:0], blockEnds: h.blockEnds[:0],
		logitRows: h.logitRows[:0], temperatures: h.temperatures[:0], seeds: h.seeds[:0],
		samples: h.samples[:0], positions: h.positions[:0],
	}
}

// Rows is the number of rows so far, Logits of logit rows.
func (h *HostBatch) Rows() int { return len(h.ids) }

// Logits is the number of logit rows so far.
func (h *HostBatch) Logits() int { return len(h.logitRows) }

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
	h.maxSeqRows = max(h.maxSeqRows, len(q.IDs))
	return first, nil
}

// Draw asks for the logits of a row, counted within h, and for a token drawn
// from them. It returns the index of the logit row within h.
func (h *HostBatch) Draw(row int, d Draw) int {
	h.logitRows = append(h.logitRows, int32(row))
	h.temperatures = append(h.temperatures, d.Temperature)
	h.seeds = append(h.seeds, d.Seed)
	h.samples = append(h.samples, d.Sample)
	h.positions = append(h.positions, d.Position)
	return len(h.logitRows) - 1
}

// Batch is a micro-batch on the device: views of one upload, with N rows, S
// sequences and L logit rows.
type Batch struct {
	First, Rows, Seqs, FirstLogit, Logits int
	// MaxContext and MaxSeqRows are the largest of the sequences'.
	MaxContext, MaxSeqRows int

	IDs, RopeRows, Slots              kernels.Tensor // [N] I32
	SeqStarts                         kernels.Tensor // [S+1] I32
	ContextLens                       kernels.Tensor // [S] I32
	BlockTable                        kernels.Tensor // [S, widest] I32
	LogitRows, Samples, DrawPositions kernels.Tensor // [L] I32
	Temperature                       kernels.Tensor // [L] F32
	Seeds                             kernels.Tensor // [L] U64
}

// BatchBytes is the most bytes that the upload of a micro-batch takes.
func BatchBytes(l Limits) int64 {
	n, s, d := int64(l.MaxRows), int64(l.MaxSeqs), int64(l.MaxLogits)
	return 3*align(4*n) + align(4*(s+1)) + align(4*s) + align(4*s*int64(l.MaxBlocks())) + 4*align(4*d) + align(8*d)
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
		MaxContext: h.maxContext, MaxSeqRows: h.maxSeqRows,
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
		putInts(out, v)
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
			putInts(table[4*i*h.widest:], h.blocks[from:end])
			from = end
		}
	}
	if b.Logits > 0 {
		b.LogitRows, b.Samples, b.DrawPositions = ints(h.logitRows), ints(h.samples), ints(h.positions)
		var out []byte
		b.Temperature, out = place(kernels.F32, b.Logits)
		if out != nil {
			for i, t := range h.temperatures {
				binary.LittleEndian.PutUint32(out[4*i:], math.Float32bits(t))
			}
		}
		b.Seeds, out = place(kernels.U64, b.Logits)
		if out != nil {
			for i, s := range h.seeds {
				binary.LittleEndian.PutUint64(out[8*i:], s)
			}
		}
	}
	if used > int64(len(dst)) {
		return Batch{}, 0, fmt.Errorf("models: micro-batch of %d bytes, room for %d", used, len(dst))
	}
	return b, used, nil
}

// putInts writes v to dst; a nil dst has no room, which PackBatch reports.
func putInts(dst []byte, v []int32) {
	if dst == nil {
		return
	}
	for i, x := range v {
		binary.LittleEndian.PutUint32(dst[4*i:], uint32(x))
	}
}
