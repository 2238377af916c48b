package forward

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Limits size a Model's workspace and its batches.
type Limits struct {
	// MaxTokens is the maximum number of tokens of a step.
	MaxTokens int
	// MaxSeqs is the maximum number of sequences of a micro-batch.
	MaxSeqs int
	// MaxLogits is the maximum number of tokens of a step whose logits are computed.
	MaxLogits int
	// MaxModelLen is the maximum number of tokens of a sequence.
	MaxModelLen int
	// BlockTokens is the number of tokens of a KV block.
	BlockTokens int
	// MaxAdjust is the maximum number of adjusted tokens of a step; 0: none.
	MaxAdjust int
	// MaxTopLogProbs is how many of the most probable tokens are reported with the
	// log-probability of a sampled one (at most the vocabulary); 0: log-probabilities are
	// disabled.
	MaxTopLogProbs int
}

// MaxBlocks is the maximum number of KV blocks of a sequence.
func (l Limits) MaxBlocks() int { return (l.MaxModelLen + l.BlockTokens - 1) / l.BlockTokens }

// TopLogProbs is how many of the most probable tokens the model reports: MaxTopLogProbs, at
// most the vocabulary.
func (l Limits) TopLogProbs(c *models.Config) int { return min(l.MaxTopLogProbs, c.Vocab) }

func (l Limits) validate(c *models.Config) error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"MaxTokens", l.MaxTokens},
		{"MaxSeqs", l.MaxSeqs},
		{"MaxLogits", l.MaxLogits},
		{"MaxModelLen", l.MaxModelLen},
		{"BlockTokens", l.BlockTokens},
	} {
		if f.value < 1 {
			return fmt.Errorf("forward: limit %s is %d, must be at least 1", f.name, f.value)
		}
	}
	if l.MaxAdjust < 0 || l.MaxAdjust > math.MaxInt32 || l.MaxTopLogProbs < 0 {
		return fmt.Errorf("forward: limits MaxAdjust %d and MaxTopLogProbs %d, must be 0 or more", l.MaxAdjust, l.MaxTopLogProbs)
	}
	if l.MaxModelLen > c.MaxPositions {
		return fmt.Errorf("forward: a context of %d tokens exceeds the model's maximum of %d", l.MaxModelLen, c.MaxPositions)
	}
	return nil
}

// Span is tokens [First, First+Rows) of a step: all of them, or those of a micro-batch.
type Span struct{ First, Rows int }

// slice returns the span's part of a tensor that has width rows for each token of the step.
func (r Span) slice(t kernels.Tensor, width int) kernels.Tensor {
	return t.Slice(r.First*width, (r.First+r.Rows)*width)
}
