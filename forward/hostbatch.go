package forward

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/models"
)

// HostBatch is a micro-batch as the host puts it together: rows of sequences, and what to
// draw from which of them. Its slices are used again after Reset.
type HostBatch struct {
	config *models.Config
	limits Limits

	// first is the row of the group at which the micro-batch begins, firstLogit
	// the first of the group's logit rows that it uses.
	first, firstLogit int

	rows  []hostRow
	seqs  hostSequences
	draws hostDraws
}

// hostRow is a token's row: its id, its row of the RoPE table, and its place in the cache.
type hostRow struct{ id, ropeRow, slot int32 }

// hostSequences are a micro-batch's, as attention sees them.
type hostSequences struct {
	list                []hostSequence
	widest              int // the most blocks of a sequence
	maxContext, maxRows int
	stored, seen        int64 // see kernels.Attention; 0 after Widen
}

// hostSequence has the rows before rowEnd that no sequence before it has, and context
// tokens. Its blocks are the caller's, until the batch is packed.
type hostSequence struct {
	rowEnd, context int32
	blocks          []int32
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

// NewHostBatch is an empty micro-batch for models of config c with limits l.
func NewHostBatch(c *models.Config, l Limits) HostBatch { return HostBatch{config: c, limits: l} }

// Reset empties h, which keeps its room, for a micro-batch that begins at these rows and
// logit rows of its group.
func (h *HostBatch) Reset(first, firstLogit int) {
	*h = HostBatch{
		first: first, firstLogit: firstLogit, config: h.config, limits: h.limits, rows: h.rows[:0],
		seqs:  hostSequences{list: h.seqs.list[:0]},
		draws: hostDraws{list: h.draws.list[:0], adjusts: h.draws.adjusts[:0]},
	}
}

// Rows is the number of rows so far.
func (h *HostBatch) Rows() int { return len(h.rows) }

// MaxContext is the most tokens of a sequence so far.
func (h *HostBatch) MaxContext() int { return h.seqs.maxContext }

// Widen makes h look as if its longest sequence had so many tokens, where that is more,
// or MaxModelLen, where that is less, so that Batches of different steps are equal.
func (h *HostBatch) Widen(context int) {
	s := &h.seqs
	s.maxContext = max(s.maxContext, min(context, h.limits.MaxModelLen))
	s.stored, s.seen = 0, 0
	s.widest = max(s.widest, (s.maxContext+h.limits.BlockTokens-1)/h.limits.BlockTokens)
}

// Append adds a sequence and returns the row, within h, of its first token. It keeps
// q.Blocks until h is packed.
func (h *HostBatch) Append(q *Sequence) (int, error) {
	context, b := q.Start+len(q.IDs), h.limits.BlockTokens
	switch {
	case len(q.IDs) == 0 || q.Start < 0:
		return 0, fmt.Errorf("forward: sequence of %d rows from position %d", len(q.IDs), q.Start)
	case context > h.limits.MaxModelLen:
		return 0, fmt.Errorf("forward: sequence of %d tokens, at most %d fit", context, h.limits.MaxModelLen)
	case len(q.Blocks)*b < context:
		return 0, fmt.Errorf("forward: %d blocks of %d tokens for a sequence of %d", len(q.Blocks), b, context)
	}
	for _, id := range q.IDs {
		if id < 0 || int(id) >= h.config.Vocab {
			return 0, fmt.Errorf("forward: token id %d is outside the model's vocabulary of %d", id, h.config.Vocab)
		}
	}
	first := len(h.rows)
	block, in := q.Start/b, q.Start%b
	rope := ropeRow(h.config, &h.limits, q.Start, q.Long)
	for i, id := range q.IDs {
		if in == b {
			block, in = block+1, 0
		}
		r := more(&h.rows)
		r.id, r.ropeRow, r.slot = id, rope+int32(i), q.Blocks[block]*int32(b)+int32(in)
		in++
	}
	all := &h.seqs
	s := more(&all.list)
	s.rowEnd, s.context, s.blocks = int32(len(h.rows)), int32(context), q.Blocks[:block+1]
	all.widest = max(all.widest, block+1)
	all.maxContext = max(all.maxContext, context)
	all.maxRows = max(all.maxRows, len(q.IDs))
	all.stored += int64(context)
	all.seen += int64(len(q.IDs)) * int64(q.Start+context+1) / 2
	return first, nil
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
