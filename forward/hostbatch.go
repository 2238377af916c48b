package forward

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/models"
)

// HostBatch is a micro-batch in host memory: the tokens of its sequences, and which of them to
// sample after, or to compare with what follows. Reset keeps its slices for reuse.
type HostBatch struct {
	config *models.Config
	limits Limits

	// first is the index in the step of the micro-batch's first token, firstLogit that of its
	// first logit row, firstTarget that of its first target.
	first, firstLogit, firstTarget int

	rows    []hostRow
	seqs    hostSequences
	samples hostSamples
	targets []hostTarget
}

// hostRow is one token: its id, its row of the RoPE table, and its slot in the KV cache.
type hostRow struct{ id, ropeRow, slot int32 }

// hostSequences are the sequences of a micro-batch, as attention needs them.
type hostSequences struct {
	list                         []hostSequence
	widest                       int // the maximum number of blocks of a sequence
	maxContext, maxSeqTokens     int
	cachedTokens, attendedTokens int64 // see kernels.Attention; 0 after PadContext
	continued                    bool  // some sequence is
}

// hostSequence has the tokens from the previous sequence's rowEnd to its own, and a context of
// that many tokens. Its blocks are the caller's, until the batch is packed.
type hostSequence struct {
	rowEnd, context int32
	blocks          []int32
}

// Sequence is one sequence's part of a micro-batch.
type Sequence struct {
	// IDs are the tokens to compute now, at least one.
	IDs []int32
	// Start is the position of IDs[0], and the number of tokens that the KV cache holds
	// already.
	Start int
	// Continued: an earlier micro-batch of the same step has tokens before Start.
	Continued bool
	// Long selects the long factors of longrope: see RoPE.LongAfter.
	Long bool
	// Blocks are the sequence's KV blocks from position 0 on, enough for Start +
	// len(IDs) tokens.
	Blocks []int32
}

// NewHostBatch returns an empty micro-batch for models of config c with limits l.
func NewHostBatch(c *models.Config, l Limits) HostBatch { return HostBatch{config: c, limits: l} }

// Reset empties h, keeping its memory, for a micro-batch that begins at these tokens, logit
// rows and targets of its step.
func (h *HostBatch) Reset(first, firstLogit, firstTarget int) {
	clear(h.samples.masks)
	*h = HostBatch{
		first: first, firstLogit: firstLogit, firstTarget: firstTarget, config: h.config, limits: h.limits, rows: h.rows[:0],
		seqs:    hostSequences{list: h.seqs.list[:0]},
		samples: hostSamples{list: h.samples.list[:0], adjusts: h.samples.adjusts[:0], masks: h.samples.masks[:0]},
		targets: h.targets[:0],
	}
}

// Rows is the number of tokens so far.
func (h *HostBatch) Rows() int { return len(h.rows) }

// Masked reports whether some sample has a mask.
func (h *HostBatch) Masked() bool { return len(h.samples.masks) > 0 }

// MaxContext is the maximum context length of a sequence so far, in tokens.
func (h *HostBatch) MaxContext() int { return h.seqs.maxContext }

// PadContext pretends that the longest sequence of h has at least context tokens (at most
// MaxModelLen), so that the Batches of different steps are equal and one CUDA graph serves
// them.
func (h *HostBatch) PadContext(context int) {
	s := &h.seqs
	s.maxContext = max(s.maxContext, min(context, h.limits.MaxModelLen))
	s.cachedTokens, s.attendedTokens = 0, 0
	s.widest = max(s.widest, (s.maxContext+h.limits.BlockTokens-1)/h.limits.BlockTokens)
}

// Append adds a sequence and returns the row, within h, of its first token. It refers to
// q.Blocks until h is packed.
func (h *HostBatch) Append(q *Sequence) (int, error) {
	context, b := q.Start+len(q.IDs), h.limits.BlockTokens
	switch {
	case len(q.IDs) == 0 || q.Start < 0:
		return 0, fmt.Errorf("forward: sequence of %d tokens from position %d", len(q.IDs), q.Start)
	case context > h.limits.MaxModelLen:
		return 0, fmt.Errorf("forward: sequence of %d tokens exceeds the maximum of %d", context, h.limits.MaxModelLen)
	case len(q.Blocks)*b < context:
		return 0, fmt.Errorf("forward: %d blocks of %d tokens are too few for a sequence of %d tokens", len(q.Blocks), b, context)
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
		r := grow(&h.rows)
		r.id, r.ropeRow, r.slot = id, rope+int32(i), q.Blocks[block]*int32(b)+int32(in)
		in++
	}
	all := &h.seqs
	s := grow(&all.list)
	s.rowEnd, s.context, s.blocks = int32(len(h.rows)), int32(context), q.Blocks[:block+1]
	all.widest = max(all.widest, block+1)
	all.maxContext = max(all.maxContext, context)
	all.maxSeqTokens = max(all.maxSeqTokens, len(q.IDs))
	all.cachedTokens += int64(context)
	all.continued = all.continued || q.Continued
	all.attendedTokens += int64(len(q.IDs)) * int64(q.Start+context+1) / 2
	return first, nil
}

// grow appends an element to s and returns it, to be filled in: appending a struct would write
// it twice.
func grow[T any](s *[]T) *T {
	n := len(*s)
	if n == cap(*s) {
		*s = slices.Grow(*s, 1)
	}
	*s = (*s)[:n+1]
	return &(*s)[n]
}
