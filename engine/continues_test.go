package engine_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
)

// spelling samples the tokens of a text.
type spelling []int32

func (s spelling) Discard(context.Context) error { return nil }

func (s spelling) Step(_ context.Context, step *pipeline.Step) (pipeline.Result, error) {
	var r pipeline.Result
	for _, q := range step.Sequences {
		r.Sampled = append(r.Sampled, s[q.Start+len(q.Tokens)])
	}
	return r, nil
}

// TestContinues: the text of a request that goes on from its prompt's keeps a space at its start.
func TestContinues(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "models", "tokenizer", "testdata", "tiny_bytefallback.json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	const before, after = "The capital", " of France"
	prompt, whole := encode(t, tok, before, false), encode(t, tok, before+after, false)
	e := newEngine(t, engine.Options{Pipeline: spelling(whole), KV: smallBlocks(t, 64), MaxModelLen: 96, Vocab: tok.VocabSize(), Tokenizer: tok})
	for continues, want := range map[bool]string{true: after, false: after[1:]} {
		o, err := e.Generate(t.Context(), []engine.Request{{Prompt: prompt, Continues: continues, Params: params(len(whole) - len(prompt))}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if o[0].Text != want {
			t.Errorf("continues %v: %q, want %q", continues, o[0].Text, want)
		}
	}
}
