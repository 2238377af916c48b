package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
)

// FinishReason says why a request ended, in the words of the OpenAI API.
type FinishReason string

// The reasons.
const (
	// FinishStop: a stop id was drawn.
	FinishStop FinishReason = "stop"
	// FinishLength: MaxNewTokens were generated, or the sequence is as long as the
	// engine allows.
	FinishLength FinishReason = "length"
)

// ErrPromptTooLong marks a request whose prompt leaves no room for a new token.
var ErrPromptTooLong = errors.New("prompt too long")

// ErrBadRequest marks a request that can never run as it is.
var ErrBadRequest = errors.New("bad request")

// Stepper runs steps. *pipeline.Pipeline is one.
type Stepper interface {
	// Step runs s to its end. After an error that wraps pipeline.ErrStepFailed the
	// same step may be run again.
	Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error)
}

// Options of an engine.
type Options struct {
	Pipeline Stepper
	KV       *kvcache.Pool
	// MaxModelLen is the most tokens of a sequence, prompt and generated.
	MaxModelLen int
	// MaxNumSeqs is the most sequences that run at once. Default: 256.
	MaxNumSeqs int
	// MaxNumBatchedTokens is the most rows of a step. Default: 2048.
	MaxNumBatchedTokens int
	// LongAfter is longrope's boundary in tokens: a sequence that grows past it is
	// computed again with the long factors. 0: there is none.
	LongAfter int
	// Vocab is the number of ids the model knows.
	Vocab int
	// StopIDs end every request that does not ignore them.
	StopIDs []int32
	// Retries is how often a step is run again after copies failed. Default: 3.
	Retries int
	// Log gets what an operator can act on. Default: none.
	Log *slog.Logger
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if o.MaxNumSeqs == 0 {
		o.MaxNumSeqs = 256
	}
	if o.MaxNumBatchedTokens == 0 {
		o.MaxNumBatchedTokens = 2048
	}
	if o.Retries == 0 {
		o.Retries = 3
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Request is one prompt to go on from.
type Request struct {
	Prompt []int32
	// MaxNewTokens ends it at the latest; at least 1.
	MaxNewTokens int
	// Temperature 0 is greedy.
	Temperature float32
	Seed        uint64
	// IgnoreEOS goes on behind stop ids.
	IgnoreEOS bool
}

// Output is what became of a request.
type Output struct {
	// TokenIDs generated, the stop id included where there was one.
	TokenIDs     []int32
	FinishReason FinishReason
}

// Engine runs requests. One goroutine uses it.
type Engine struct {
	o Options
	// Steps run so far, and how many of them were run again.
	steps, retried int
}

// New makes an engine.
func New(o Options) *Engine { return &Engine{o: o.EnsureDefaults()} }

// Stats are the engine's counts since it was made.
type Stats struct {
	// Steps that ended, and how often a step was dropped and run again.
	Steps, Retried int
}

// Stats of the engine so far.
func (e *Engine) Stats() Stats { return Stats{Steps: e.steps, Retried: e.retried} }

// sequence is a request that runs.
type sequence struct {
	index    int // among the requests
	req      *Request
	tokens   []int32 // prompt and generated
	computed int     // tokens whose keys and values are in the cache
	limit    int     // tokens at which it ends
	long     bool
	table    *kvcache.Table
	out      *Output
}

// Generate runs requests, all admitted as soon as there is room for them, and
// returns their outputs in the same order. onToken, which may be nil, is called
// from this goroutine with each token as it is drawn. An error ends all of them;
// none runs if one of them never could.
func (e *Engine) Generate(ctx context.Context, requests []Request, onToken func(request int, id int32)) ([]Output, error) {
	outs := make([]Output, len(requests))
	waiting := make([]*sequence, 0, len(requests))
	for i := range requests {
		s, err := e.admissible(&requests[i])
		if err != nil {
			if len(requests) > 1 {
				err = fmt.Errorf("request %d: %w", i, err)
			}
			return nil, err
		}
		s.index, s.out = i, &outs[i]
		waiting = append(waiting, s)
	}
	var running []*sequence
	defer func() {
		for _, s := range running {
			s.table.Free()
		}
	}()
	for len(waiting)+len(running) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("engine: before step %d: %w", e.steps, err)
		}
		for len(waiting) > 0 && len(running) < e.o.MaxNumSeqs {
			s := waiting[0]
			s.table = e.o.KV.NewTable()
			if err := s.table.Grow(s.limit); err != nil {
				break // room comes when a running one ends
			}
			waiting, running = waiting[1:], append(running, s)
		}
		if err := e.step(ctx, running, onToken); err != nil {
			return nil, err
		}
		running = slices.DeleteFunc(running, func(s *sequence) bool {
			if s.out.FinishReason == "" {
				return false
			}
			s.table.Free()
			return true
		})
	}
	return outs, nil
}

// admissible checks what can be known of a request before it runs.
func (e *Engine) admissible(r *Request) (*sequence, error) {
	switch {
	case len(r.Prompt) == 0:
		return nil, fmt.Errorf("engine: %w: the prompt has no tokens; give at least one", ErrBadRequest)
	case r.MaxNewTokens < 1:
		return nil, fmt.Errorf("engine: %w: %d new tokens asked; ask for at least 1", ErrBadRequest, r.MaxNewTokens)
	case r.Temperature < 0:
		return nil, fmt.Errorf("engine: %w: temperature %v; it cannot be negative", ErrBadRequest, r.Temperature)
	case len(r.Prompt) >= e.o.MaxModelLen:
		return nil, fmt.Errorf("engine: %w: it has %d tokens and the context is %d, of which at least one must be left for the answer; shorten the prompt, or raise --max-model-len if the model allows it",
			ErrPromptTooLong, len(r.Prompt), e.o.MaxModelLen)
	}
	for i, id := range r.Prompt {
		if id < 0 || int(id) >= e.o.Vocab {
			return nil, fmt.Errorf("engine: %w: prompt token %d has id %d, the model knows 0 to %d; tokenizer and model do not belong together", ErrBadRequest, i, id, e.o.Vocab-1)
		}
	}
	// The subtraction cannot overflow, as the sum of both could.
	limit := e.o.MaxModelLen
	if r.MaxNewTokens < limit-len(r.Prompt) {
		limit = len(r.Prompt) + r.MaxNewTokens
	}
	if have := e.o.KV.Allocator().Blocks() * e.o.KV.Shape().BlockTokens; limit > have {
		return nil, fmt.Errorf("engine: %w: prompt and new tokens are %d, the KV cache holds %d; ask for fewer, or give the cache more memory", ErrPromptTooLong, limit, have)
	}
	return &sequence{
		req: r, tokens: slices.Clone(r.Prompt), limit: limit,
		long: e.o.LongAfter > 0 && len(r.Prompt) > e.o.LongAfter,
	}, nil
}

// step schedules and runs one step, and gives its tokens to their sequences.
func (e *Engine) step(ctx context.Context, running []*sequence, onToken func(int, int32)) error {
	candidates := make([]Candidate, len(running))
	for i, s := range running {
		if !s.long && e.o.LongAfter > 0 && len(s.tokens) > e.o.LongAfter {
			// It crosses longrope's boundary: all its keys are computed again.
			s.long, s.computed = true, 0
		}
		candidates[i] = Candidate{Tokens: len(s.tokens), Computed: s.computed}
	}
	chunks := Schedule(candidates, e.o.MaxNumBatchedTokens)
	var step pipeline.Step
	for _, c := range chunks {
		s := running[c.Index]
		q := pipeline.Sequence{
			Tokens: s.tokens[c.From:c.To], Start: c.From, Table: s.table, Long: s.long,
			Temperature: s.req.Temperature, Seed: s.req.Seed,
		}
		if c.Sample {
			q.LogitRows = 1
		}
		step.Sequences = append(step.Sequences, q)
	}
	res, err := e.run(ctx, &step)
	if err != nil {
		return err
	}
	for _, c := range chunks {
		s := running[c.Index]
		s.computed = c.To
		if !c.Sample {
			continue
		}
		id := res.Sampled[0]
		res.Sampled = res.Sampled[1:]
		s.tokens = append(s.tokens, id)
		s.out.TokenIDs = append(s.out.TokenIDs, id)
		switch {
		case !s.req.IgnoreEOS && slices.Contains(e.o.StopIDs, id):
			s.out.FinishReason = FinishStop
		case len(s.tokens) >= s.limit:
			s.out.FinishReason = FinishLength
		}
		if onToken != nil {
			onToken(s.index, id)
		}
	}
	return nil
}

// run runs a step, again if copies failed.
func (e *Engine) run(ctx context.Context, step *pipeline.Step) (pipeline.Result, error) {
	for try := 0; ; try++ {
		res, err := e.o.Pipeline.Step(ctx, step)
		if err == nil {
			e.steps++
			return res, nil
		}
		if !errors.Is(err, pipeline.ErrStepFailed) || try == e.o.Retries {
			return res, fmt.Errorf("engine: step %d: %w", e.steps, err)
		}
		e.retried++
		e.o.Log.Warn("step dropped and run again", "step", e.steps, "try", try+1, "error", err)
	}
}
