package engine

import (
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/pipeline"
)

// batch is what a step computes: sequences[i] is the pipeline's part of chunks[i]. Its slices
// are reused by the next step.
type batch struct {
	sequences []pipeline.Sequence
	chunks    []chunk
}

// chunk is a chunk of the step with its sequence.
type chunk struct {
	scheduler.Chunk
	seq *sequence
}

// compose fills b with chunks of a plan, without those whose adjusted logits exceed the
// step's limit; a later step has them.
func (b *batch) compose(chunks []scheduler.Chunk, seqs map[scheduler.ID]*sequence, maxAdjust int) {
	adjusted := 0
	for _, c := range chunks {
		q := seqs[c.ID]
		if c.Sample && adjusted > 0 && adjusted+len(q.adjust.list) > maxAdjust {
			continue
		}
		b.sequences = append(b.sequences, pipeline.Sequence{Tokens: q.tokens[c.From:c.To], Start: c.From, Table: q.blocks.Table, Long: q.long})
		s := &b.sequences[len(b.sequences)-1]
		s.Targets = q.sub.prompt.targets(c.From, c.To)
		if c.Sample {
			s.LogitRows = 1
			q.samplingParams(&s.SamplingParams)
			adjusted += len(s.SamplingParams.Adjust)
		}
		b.chunks = append(b.chunks, chunk{c, q})
	}
}

// keep removes the sequences that have ended: those that seqs has no longer.
func (b *batch) keep(seqs map[scheduler.ID]*sequence) {
	n := 0
	for i, c := range b.chunks {
		if seqs[c.ID] != nil {
			b.sequences[n], b.chunks[n] = b.sequences[i], c
			n++
		}
	}
	clear(b.sequences[n:])
	clear(b.chunks[n:])
	b.sequences, b.chunks = b.sequences[:n], b.chunks[:n]
}

// clear empties b, so that it refers to no sequence.
func (b *batch) clear() {
	clear(b.sequences)
	clear(b.chunks)
	b.sequences, b.chunks = b.sequences[:0], b.chunks[:0]
}

// tokens is the number of tokens, and how many of them are of prompts.
func (b *batch) tokens() (all, prefill int) {
	for i := range b.chunks {
		c := &b.chunks[i]
		n := c.To - c.From
		all += n
		if c.seq.sampled == 0 || n > 1 {
			prefill += n
		}
	}
	return all, prefill
}

// promptTokens is the number of tokens in chunks of more than one.
func (b *batch) promptTokens() (n int) {
	for i := range b.chunks {
		if c := &b.chunks[i]; c.To-c.From > 1 {
			n += c.To - c.From
		}
	}
	return n
}

// mix is what the step's time depends on.
func (b *batch) mix() (m scheduler.Mix) {
	for i := range b.chunks {
		c := &b.chunks[i]
		switch n := c.To - c.From; {
		case n == 1:
			m.Decodes++
			m.DecodeContext += c.From
		case m.Prompt == 0:
			m.Prompt, m.PromptContext = n, c.From
		default:
			m.Prompt += n
		}
	}
	return m
}
