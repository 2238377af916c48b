package forward

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Limits size a Model's workspace and its batches.
type Limits struct {
	// MaxTokens is the most rows (tokens) of a group.
	MaxTokens int
	// MaxSeqs is the most sequences of a micro-batch.
	MaxSeqs int
	// MaxLogits is the most rows of a group whose logits are wanted.
	MaxLogits int
	// MaxModelLen is the most tokens of a sequence.
	MaxModelLen int
	// BlockTokens is the tokens of a KV block.
	BlockTokens int
	// MaxAdjust is the most adjusted tokens of a group, 0: none may be.
	MaxAdjust int
	// MaxTopLogProbs is how many of the likeliest tokens come with the
	// log-probability of a drawn one, where the vocabulary has so many; 0: there are
	// no log-probabilities.
	MaxTopLogProbs int
}

// MaxBlocks is the most KV blocks of a sequence.
func (l Limits) MaxBlocks() int { return (l.MaxModelLen + l.BlockTokens - 1) / l.BlockTokens }

// TopLogProbs is how many likeliest tokens the model's log-probabilities come
// with: MaxTopLogProbs, at most the vocabulary.
func (l Limits) TopLogProbs(c *models.Config) int { return min(l.MaxTopLogProbs, c.Vocab) }

func (l Limits) validate(c *models.Config) error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"MaxRows", l.MaxTokens},
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
		return fmt.Errorf("forward: a length of %d tokens is more than the model's %d positions", l.MaxModelLen, c.MaxPositions)
	}
	return nil
}

// Span is rows [First, First+Rows) of a group: all of them, or a micro-batch's.
type Span struct{ First, Rows int }

// of is the span's part of a tensor with width rows for each row of the group.
func (r Span) of(t kernels.Tensor, width int) kernels.Tensor {
	return t.Slice(r.First*width, (r.First+r.Rows)*width)
}
