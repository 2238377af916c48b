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

// batchRetries is how often a step of a batch is run again after copies failed.
const batchRetries = 3

// Batch is sequences that go in lockstep, beside the engine: all their prompts, then a
// token of each a step. Measurements use it, since every run of it has the same steps.
// One goroutine uses it, and no request runs meanwhile.
type Batch struct {
	n       *node.Node
	prompts [][]int32
	// rows are the most of a step; longAfter is the config's.
	rows, longAfter int
	tables          []*kvcache.Table
	// tokens drawn of each sequence, with room for all.
	tokens [][]int32
	draw   pipeline.Draw
	// decode is a step of a row of each sequence: only Tokens and Start change.
	decode pipeline.Step
}

// NewBatch takes the cache blocks of prompts and newTokens behind each. Sampling is
// that of the settings. An error wraps ErrConfig where steps or cache have too little
// room.
func NewBatch(n *node.Node, prompts [][]int32, newTokens int) (*Batch, error) {
	info := n.Info()
	limits, sampling := &info.Limits, &info.Settings.Generate
	b := &Batch{
		n: n, prompts: prompts, rows: limits.MaxTokens, longAfter: info.Config.RoPE.LongAfter,
		draw: pipeline.Draw{Temperature: float32(sampling.Temperature), Seed: sampling.Seed},
	}
	if most := min(limits.MaxTokens, limits.MaxLogits); len(prompts) > most {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: a batch of %d sequences in steps of at most %d", len(prompts), most))
	}
	for i, p := range prompts {
		if most := limits.MaxModelLen; len(p) == 0 || len(p) > most || newTokens < 1 || newTokens > most-len(p) {
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: sequence %d of a batch has %d tokens and %d new ones; the context is %d", i, len(p), newTokens, limits.MaxModelLen))
		}
	}
	drawn := make([]int32, len(prompts)*newTokens)
	for i, p := range prompts {
		t := n.KV().NewTable()
		b.tables = append(b.tables, t)
		b.tokens = append(b.tokens, drawn[:0:newTokens])
		drawn = drawn[newTokens:]
		if !t.Reserve(len(p) + newTokens) {
			kv := n.KV()
			free := kv.Free()
			b.Close()
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: the KV cache does not hold a batch of %d sequences, only %d: sequence %d has %d tokens, and %d of %d blocks of %d are free",
				len(prompts), i, i, len(p)+newTokens, free, kv.Blocks(), kv.BlockTokens()))
		}
		s := b.sequence(i, nil, 0)
		s.LogitRows = 1
		b.decode.Sequences = append(b.decode.Sequences, s)
	}
	return b, nil
}

// Close gives the blocks back.
func (b *Batch) Close() {
	for _, t := range b.tables {
		t.Release(false)
	}
	b.tables = nil
}

// Tokens drawn so far, by sequence; valid until the next step.
func (b *Batch) Tokens() [][]int32 { return b.tokens }

// Prefill computes the prompts, in steps of as many rows as there may be, and draws the
// first token of each sequence.
func (b *Batch) Prefill(ctx context.Context) error {
	var step pipeline.Step
	var drawn []int
	rows := 0
	run := func() error {
		out, err := b.step(ctx, &step)
		if err != nil {
			return err
		}
		for i, q := range drawn {
			b.tokens[q] = append(b.tokens[q][:0], out[i])
		}
		step, drawn, rows = pipeline.Step{}, drawn[:0], 0
		return nil
	}
	for i, p := range b.prompts {
		for from := 0; from < len(p); {
			to := min(len(p), from+b.rows-rows)
			s := b.sequence(i, p[from:to], from)
			if to == len(p) {
				s.LogitRows = 1
				drawn = append(drawn, i)
			}
			step.Sequences = append(step.Sequences, s)
			rows += to - from
			from = to
			if rows == b.rows {
				if err := run(); err != nil {
					return err
				}
			}
		}
	}
	if rows == 0 {
		return nil
	}
	return run()
}

// Decode draws tokens from to to-1 of each sequence, a step each. Those before from
// must have been drawn; those that were drawn from from on are dropped.
func (b *Batch) Decode(ctx context.Context, from, to int) error {
	for at := from; at < to; at++ {
		for i, drawn := range b.tokens {
			if at < 1 || len(drawn) < at || at >= cap(drawn) {
				return fmt.Errorf("node: token %d of sequence %d of a batch: %d are drawn, and there is room for %d", at, i, len(drawn), cap(drawn))
			}
			s := &b.decode.Sequences[i]
			s.Tokens, s.Start = drawn[at-1:at], len(b.prompts[i])+at-1
		}
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

// sequence is one sequence's rows of a step. Its number is its sample's, so that equal
// prompts draw different tokens.
func (b *Batch) sequence(i int, tokens []int32, start int) pipeline.Sequence {
	// One that will grow past the boundary of longrope has its long factors from the start.
	after := b.longAfter
	s := pipeline.Sequence{Tokens: tokens, Start: start, Table: b.tables[i], Draw: b.draw, Long: after > 0 && len(b.prompts[i])+cap(b.tokens[i]) > after}
	s.Draw.Sample = int32(i)
	return s
}

// step runs s, again where copies failed.
func (b *Batch) step(ctx context.Context, s *pipeline.Step) ([]int32, error) {
	for try := 0; ; try++ {
		out, err := b.n.Step(ctx, s)
		if !errors.Is(err, pipeline.ErrStepFailed) || try == batchRetries {
			return out.Sampled, err
		}
		b.n.Log().Warn("retrying step", "try", try+1, "err", err)
	}
}
