package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/pipeline"
)

// nextIsKnown reports whether the step behind the batch's can be enqueued before the batch's tokens are known: it is of
// the same sequences, as far as their tokens do not end them, one token later, and nobody waits to join them. Their
// tables then have blocks for that token. mayEnd of the sequences may end by their tokens.
func (e *Engine) nextIsKnown() (known bool, mayEnd int) {
	n := len(e.batch.chunks)
	// A lender takes its turns between steps.
	if n != e.sched.Running() || n > pipeline.MaxAheadSequences || e.sched.Waiting()+e.sched.Loading() > 0 || e.o.Lender != nil {
		return false, 0
	}
	e.mu.Lock()
	asked := len(e.inbox) > 0 || e.canceled || e.reset || e.pausing != nil
	e.mu.Unlock()
	if asked {
		return false, 0
	}
	for i := range e.batch.chunks {
		c := &e.batch.chunks[i]
		if !c.Sample || c.To-c.From != 1 || !c.seq.foreseeable() || e.prefixes.long(len(c.seq.tokens)+1) != c.seq.long {
			return false, 0
		}
		if q := c.seq; len(q.adjust.stop) > 0 || len(q.sub.req.Params.Stop) > 0 || q.text != nil && q.text.ends != nil {
			mayEnd++
		}
	}
	for i := range e.batch.chunks {
		if c := &e.batch.chunks[i]; !c.seq.blocks.Reserve(c.To + 1) {
			return false, 0
		}
	}
	return true, mayEnd
}

// foreseeable reports whether a sequence goes on behind the token that is being sampled, unless that ends it, and
// whether everything but that token is known of how the next one is sampled.
func (q *sequence) foreseeable() bool {
	a := &q.adjust
	return len(q.tokens)+1 < q.sub.limit && q.constraint == nil && !q.sub.req.Params.LogProbs &&
		len(a.list) == 0 && !a.counts && len(a.phrases) == 0
}

// discard waits for the end of a step ahead whose tokens nobody needs. An error means that no step can run any more, or
// that ctx is done; after any other the step would only have been run again.
func (e *Engine) discard(ctx context.Context) error {
	if e.ahead == 0 {
		return nil
	}
	e.ahead = 0
	err := e.o.Pipeline.Discard(ctx)
	e.stepEnded = e.o.Clock()
	if err == nil {
		return nil
	}
	e.o.Log.Warn("a step enqueued ahead failed, whose tokens were not needed", "err", err)
	if ctx.Err() == nil && !errors.Is(err, pipeline.ErrDeviceLost) {
		return nil
	}
	return fmt.Errorf("engine: %w", err)
}
