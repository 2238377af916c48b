package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/pipeline"
)

// batchRetries is how often a step of a batch is retried after copies failed.
const batchRetries = 3

// Batch is sequences that run in lockstep, without the engine: all their prompts, then a
// token of each a step. Measurements use it, since every run of it has the same steps.
// One goroutine uses it, and no request runs meanwhile.
type Batch struct {
	n       *node.Node
	prompts [][]int32
	// maxTokens is the maximum of a step; longAfter is the config's.
	maxTokens, longAfter int
	tables               []*kvcache.Table
	// tokens sampled of each sequence, with capacity for all.
	tokens [][]int32
	draw   pipeline.SamplingParams
	// decode is a step of a token of each sequence: only Tokens and Start change.
	decode pipeline.Step
}

// NewBatch allocates the KV blocks of prompts and newTokens behind each. Sampling is
// that of the settings. An error wraps ErrConfig where steps or the KV cache are too small.
func NewBatch(n *node.Node, prompts [][]int32, newTokens int) (*Batch, error) {
	info := n.Info()
	limits, sampling := &info.Limits, &info.Settings.Generate
	b := &Batch{
		n: n, prompts: prompts, maxTokens: limits.MaxTokens, longAfter: info.Config.RoPE.LongAfter,
		draw: pipeline.SamplingParams{Temperature: float32(sampling.Temperature), Seed: sampling.Seed},
	}
	if limit := min(limits.MaxTokens, limits.MaxLogits); len(prompts) > limit {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: a batch of %d sequences exceeds the maximum of %d per step", len(prompts), limit))
	}
	for i, p := range prompts {
		if limit := limits.MaxModelLen; len(p) == 0 || len(p) > limit || newTokens < 1 || newTokens > limit-len(p) {
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: sequence %d of a batch has %d tokens and %d new ones; the context is %d", i, len(p), newTokens, limits.MaxModelLen))
		}
	}
	tokens := make([]int32, len(prompts)*newTokens)
	for i, p := range prompts {
		t := n.KV().NewTable()
		b.tables = append(b.tables, t)
		b.tokens = append(b.tokens, tokens[:0:newTokens])
		tokens = tokens[newTokens:]
		if !t.Reserve(len(p) + newTokens) {
			kv := n.KV()
			free := kv.Free()
			b.Close()
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: the KV cache holds %[2]d of a batch of %[1]d sequences: sequence %[3]d has %[4]d tokens, and %[5]d of %[6]d blocks of %[7]d tokens are free",
				len(prompts), i, i, len(p)+newTokens, free, kv.Blocks(), kv.BlockTokens()))
		}
		s := b.sequence(i, nil, 0)
		s.LogitRows = 1
		b.decode.Sequences = append(b.decode.Sequences, s)
	}
	return b, nil
}

// Close releases the KV blocks.
func (b *Batch) Close() {
	for _, t := range b.tables {
		t.Release(false)
	}
	b.tables = nil
}

// Tokens sampled so far, by sequence; valid until the next step.
func (b *Batch) Tokens() [][]int32 { return b.tokens }

// Prefill computes the prompts, in steps of the maximum of tokens, and samples the first
// token of each sequence.
func (b *Batch) Prefill(ctx context.Context) error {
	var step pipeline.Step
	var sampled []int // sequences whose first token the step samples
	tokens := 0
	run := func() error {
		out, err := b.step(ctx, &step)
		if err != nil {
			return err
		}
		for i, q := range sampled {
			b.tokens[q] = append(b.tokens[q][:0], out[i])
		}
		step, sampled, tokens = pipeline.Step{}, sampled[:0], 0
		return nil
	}
	for i, p := range b.prompts {
		for from := 0; from < len(p); {
			to := min(len(p), from+b.maxTokens-tokens)
			s := b.sequence(i, p[from:to], from)
			if to == len(p) {
				s.LogitRows = 1
				sampled = append(sampled, i)
			}
			step.Sequences = append(step.Sequences, s)
			tokens += to - from
			from = to
			if tokens == b.maxTokens {
				if err := run(); err != nil {
					return err
				}
			}
		}
	}
	if tokens == 0 {
		return nil
	}
	return run()
}

// Decode samples tokens from to to-1 of each sequence, a step each. Those before from
// must have been sampled; those that were sampled from from on are dropped.
func (b *Batch) Decode(ctx context.Context, from, to int) error {
	for at := from; at < to; at++ {
		for i, tokens := range b.tokens {
			if at < 1 || len(tokens) < at || at >= cap(tokens) {
				return fmt.Errorf("node: token %d of sequence %d of a batch: %d are sampled, and the maximum is %d", at, i, len(tokens), cap(tokens))
			}
			s := &b.decode.Sequences[i]
			s.Tokens, s.Start = tokens[at-1:at], len(b.prompts[i])+at-1
		}
		b.decode.Ahead = at+1 < to // no sequence ends before that
		out, err := b.step(ctx, &b.decode)
		if err != nil {
			return err
		}
		for i, id := range out {
			b.tokens[i] = append(b.tokens[i][:at], id)
		}
	}
	return nil
}

// sequence is one sequence's tokens of a step. Its index is that of its sample, so that
// equal prompts sample different tokens.
func (b *Batch) sequence(i int, tokens []int32, start int) pipeline.Sequence {
	// A sequence that will grow past the boundary of longrope has its long factors from the start.
	after := b.longAfter
	s := pipeline.Sequence{Tokens: tokens, Start: start, Table: b.tables[i], SamplingParams: b.draw, Long: after > 0 && len(b.prompts[i])+cap(b.tokens[i]) > after}
	s.SamplingParams.Sample = int32(i)
	return s
}

// step runs s, and retries where copies failed.
func (b *Batch) step(ctx context.Context, s *pipeline.Step) ([]int32, error) {
	for try := 0; ; try++ {
		out, err := b.n.Step(ctx, s)
		if !errors.Is(err, pipeline.ErrStepFailed) || try == batchRetries {
			return out.Sampled, err
		}
		b.n.Log().Warn("retrying step", "try", try+1, "err", err)
	}
}
