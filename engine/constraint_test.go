package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
)

// choosing is a pipeline whose model samples the token that a hash of the sequence chooses among those that its mask and
// its biases allow. Some steps fail.
type choosing struct {
	vocab, steps int
}

func (c *choosing) Discard(context.Context) error { return nil }

func (c *choosing) Step(_ context.Context, s *pipeline.Step) (pipeline.Result, error) {
	if c.steps++; c.steps%7 == 3 {
		return pipeline.Result{}, fmt.Errorf("%w: a copy", pipeline.ErrStepFailed)
	}
	var r pipeline.Result
	for _, q := range s.Sequences {
		if q.LogitRows == 0 {
			continue
		}
		bits := make([]uint32, (c.vocab+31)/32)
		for i := range bits {
			bits[i] = math.MaxUint32
		}
		if q.SamplingParams.Mask != nil {
			q.SamplingParams.Mask.Allowed(bits)
		}
		var ids []int32
		for id := range int32(c.vocab) {
			banned := slices.ContainsFunc(q.SamplingParams.Adjust, func(a pipeline.TokenAdjust) bool { return a.ID == id && math.IsInf(float64(a.Bias), -1) })
			if bits[id/32]>>(id%32)&1 != 0 && !banned {
				ids = append(ids, id)
			}
		}
		if len(ids) == 0 {
			r.Sampled = append(r.Sampled, -1)
			continue
		}
		position := uint64(q.Start + len(q.Tokens))
		r.Sampled = append(r.Sampled, ids[mix(q.SamplingParams.Seed+uint64(q.SamplingParams.Sample)<<32, position)%uint64(len(ids))])
	}
	return r, nil
}

// builtIn is the tokenizer of the built-in model, and its vocabulary.
func builtIn(t *testing.T) (tokenizer.Tokenizer, *grammar.Vocabulary) {
	t.Helper()
	data, err := fs.ReadFile(tiny.FS(), "tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	var tokens []grammar.Token
	for id := range int32(tok.VocabSize()) {
		if text, first, special, ok := tok.Piece(id); ok && !special {
			tokens = append(tokens, grammar.Token{ID: id, Text: text, First: first})
		}
	}
	return tok, grammar.NewVocabulary(tok.VocabSize(), tokens)
}

// TestConstraint: completions fit their grammar, and are the same with memory for few of them, which preempts sequences and
// computes them again, as with memory for all; also where steps fail.
func TestConstraint(t *testing.T) {
	tok, vocabulary := builtIn(t)
	patterns := []string{`[a-f]{3,9}(-[0-9]{2}){2}`, `(yes|no|maybe) \d+!`, `[x-z]*`}
	var requests []engine.Request
	for i := range 12 {
		e, err := grammar.Regex(patterns[i%len(patterns)])
		if err != nil {
			t.Fatal(err)
		}
		g, err := grammar.New(e, vocabulary)
		if err != nil {
			t.Fatal(err)
		}
		q := ask(i, 5+i, 20)
		q.Params.Grammar, q.Params.Seed, q.Params.N = g, uint64(i), 1+i%3
		requests = append(requests, q)
	}
	requests[2].Params.MinTokens = 4
	requests[5].Params.IgnoreEOS = true
	var want []string
	for _, blocks := range []int{400, 14} {
		kv := smallBlocks(t, blocks)
		e := newEngine(t, engine.Options{Pipeline: &choosing{vocab: tok.VocabSize()}, KV: kv, Tokenizer: tok, MaxModelLen: 50, Vocab: tok.VocabSize(), StopIDs: []int32{0}, Pause: func(ctx context.Context, _ time.Duration) error { return ctx.Err() }})
		outs, err := e.Generate(t.Context(), requests, nil)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		n := 0
		for i := range requests {
			for range requests[i].Params.N {
				o := outs[n]
				n++
				got = append(got, o.Text)
				pattern := patterns[i%len(patterns)]
				if o.FinishReason == engine.FinishStop && !regexp.MustCompile("^("+pattern+")$").MatchString(o.Text) {
					t.Errorf("request %d: %q does not match %s", i, o.Text, pattern)
				}
				if i%len(patterns) == 0 && o.FinishReason != engine.FinishStop {
					t.Errorf("request %d: %q ends for %s", i, o.Text, o.FinishReason)
				}
				if m := requests[i].Params.MinTokens; m > 0 && len(o.TokenIDs) < m {
					t.Errorf("request %d: %d tokens, want at least %d", i, len(o.TokenIDs), m)
				}
			}
		}
		if want == nil {
			want = got
		} else if !slices.Equal(got, want) {
			t.Errorf("with %d blocks %q, want %q", blocks, got, want)
		}
		if s := e.State(); blocks < 100 && s.Preemptions == 0 || s.Retried == 0 {
			t.Errorf("%d preemptions and %d retries", s.Preemptions, s.Retried)
		}
	}
	// A vocabulary that cannot spell what has to come fails the request alone.
	e := newEngine(t, engine.Options{Pipeline: &choosing{vocab: tok.VocabSize()}, KV: smallBlocks(t, 100), Tokenizer: tok, MaxModelLen: 50, Vocab: tok.VocabSize()})
	x, _ := grammar.Regex("ab")
	only, err := grammar.New(x, grammar.NewVocabulary(tok.VocabSize(), []grammar.Token{{ID: 70, Text: "a", First: "a"}}))
	if err != nil {
		t.Fatal(err)
	}
	q := ask(1, 3, 5)
	q.Params.Grammar = only
	if _, err := e.Generate(t.Context(), []engine.Request{q}, nil); !errors.Is(err, engine.ErrNoToken) {
		t.Errorf("%v, want ErrNoToken", err)
	}
	if other, err := grammar.New(x, grammar.NewVocabulary(9000, nil)); err == nil {
		q.Params.Grammar = other
		if _, err := e.Generate(t.Context(), []engine.Request{q}, nil); !errors.Is(err, engine.ErrBadRequest) {
			t.Errorf("%v, want ErrBadRequest", err)
		}
	}
}
