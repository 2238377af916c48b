package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/pipeline"
)

// drawn are the tokens that a drawing draws for a sample, made without blocks.
func drawn(q engine.Request, sample int) (tokens []int32) {
	var hash uint64
	for p := 0; len(tokens) < q.Params.MaxTokens; p++ {
		token := int32(0)
		if p < len(q.Prompt) {
			token = q.Prompt[p]
		} else {
			token = tokens[p-len(q.Prompt)]
		}
		if hash = mix(hash, mix(hash, uint64(token)+1)); p >= len(q.Prompt)-1 {
			tokens = append(tokens, rand.New(rand.NewPCG(q.Params.Seed<<8+uint64(sample), hash)).Int32N(250)+3)
			if slices.Contains(q.Params.StopIDs, tokens[len(tokens)-1]) {
				break
			}
		}
	}
	return tokens
}

// copying counts the copies of blocks, and makes them unless it forgets them.
type copying struct {
	*drawing
	copies  int
	forgets bool
}

func (c *copying) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	if c.copies += len(s.Copies); c.forgets {
		s.Copies = nil
	}
	return c.drawing.Step(ctx, s)
}

// TestSamplesShareTheirPrompt: of a request's samples one computes the prompt. The others share its
// blocks, copy the last one where it is not full, and compute the last token only.
func TestSamplesShareTheirPrompt(t *testing.T) {
	const samples = 5
	for _, caching := range []bool{false, true} {
		for _, c := range []struct{ prompt, completion, copies int }{
			{1, 6, 0},
			{2, 6, 4},
			{4, 6, 4},
			{5, 6, 0},
			{6, 6, 4},
			{11, 9, 4},
			{12, 9, 4},
			{13, 9, 0},
			{30, 30, 4},
			{11, 1, 4}, // the first has ended before the others begin
		} {
			kv := smallBlocks(t, 90)
			step := &copying{drawing: newDrawing(t, kv)}
			e := newEngine(t, engine.Options{Pipeline: step, KV: kv, PrefixCaching: caching, MaxModelLen: 100, LongAfter: longAfter, Vocab: 256})
			q := ask(1, c.prompt, c.completion)
			q.Params.N, q.Params.Seed = samples, 7
			outs, err := e.Generate(t.Context(), []engine.Request{q}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, o := range outs {
				if want := drawn(q, i); !slices.Equal(o.TokenIDs, want) {
					t.Errorf("caching: %v, %+v: sample %d is %v, want %v", caching, c, i, o.TokenIDs, want)
				}
			}
			prefill := c.prompt + samples - 1
			if c.prompt+c.completion > longAfter {
				prefill += samples * (longAfter + 1) // each computes all again past longrope's boundary
			}
			if s := e.State(); s.PrefillTokens != int64(prefill) || step.copies != c.copies {
				t.Errorf("caching: %v, %+v: %d prefill tokens, want %d, and %d copies", caching, c, s.PrefillTokens, prefill, step.copies)
			}
			if kv.Free() != kv.Blocks() {
				t.Errorf("caching: %v, %+v: %d of %d blocks are free", caching, c, kv.Free(), kv.Blocks())
			}
		}
	}
}

// TestCopiesOfBlocksMatter: without them samples have wrong tokens.
func TestCopiesOfBlocksMatter(t *testing.T) {
	kv := smallBlocks(t, 90)
	step := &copying{drawing: newDrawing(t, kv), forgets: true}
	wrong := 0
	step.errorf = func(string, ...any) { wrong++ }
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, MaxModelLen: 100, Vocab: 256})
	q := ask(1, 11, 5)
	q.Params.N = 2
	if _, err := e.Generate(t.Context(), []engine.Request{q}, nil); err != nil {
		t.Fatal(err)
	}
	if step.copies != 1 || wrong == 0 {
		t.Errorf("%d copies were forgotten, and nothing is wrong", step.copies)
	}
}

// TestSamplesInLittleRoom: the blocks of a prompt that samples have yet to fork are given up where
// there are no others, and a canceled request leaves none.
func TestSamplesInLittleRoom(t *testing.T) {
	for _, c := range []struct{ blocks, prompt, completion int }{{5, 18, 1}, {5, 18, 2}, {5, 11, 9}, {6, 11, 9}, {7, 13, 12}} {
		kv := smallBlocks(t, c.blocks)
		e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 4 * c.blocks, Vocab: 256})
		q := ask(1, c.prompt, c.completion)
		q.Params.N = 4
		outs, err := e.Generate(t.Context(), []engine.Request{q, q}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i, o := range outs {
			if want := drawn(q, i%4); !slices.Equal(o.TokenIDs, want) {
				t.Errorf("%+v: sample %d is %v, want %v", c, i, o.TokenIDs, want)
			}
		}
		for turns := range 6 {
			ctx, cancel := context.WithCancel(t.Context())
			r := &race{T: t, Engine: e}
			j := r.submit(ctx, q)
			for range turns {
				if _, err := engine.Turn(e, ctx); err != nil {
					t.Fatal(err)
				}
			}
			cancel()
			for j.Times().Finished.IsZero() {
				if _, err := engine.Turn(e, t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if kv.Free() != kv.Blocks() {
				t.Errorf("%+v: %d of %d blocks are free after a cancellation in turn %d", c, kv.Free(), kv.Blocks(), turns)
			}
		}
	}
}

// TestSamplesOnPipeline: greedy samples, which share blocks of the device's memory, are equal, also
// where the KV cache is in host memory.
func TestSamplesOnPipeline(t *testing.T) {
	for _, attention := range []configs.Place{configs.OnGPU, configs.OnCPU} {
		n, _ := open(t, func(s *configs.Settings) { s.Batch.Attention, s.KV.EnablePrefixCaching = attention, false })
		before := int64(0)
		for _, length := range []int{1, 7, 15, 16, 17, 18, 31, 32, 33} {
			r := engine.Request{Prompt: prompt(1, length, n.Info().Config.Vocab), Params: params(20)}
			want := alone(t, n, []engine.Request{r})[0][0].TokenIDs
			r.Params.N = 4
			for i, o := range alone(t, n, []engine.Request{r})[0] {
				if !slices.Equal(o.TokenIDs, want) {
					t.Errorf("attention on %v, %d tokens of prompt: sample %d is %v, want %v", attention, length, i, o.TokenIDs, want)
				}
			}
			s := n.Engine().State()
			if got, want := fmt.Sprint(s.PrefillTokens-before), fmt.Sprint(2*length+3); got != want {
				t.Errorf("attention on %v, %d tokens of prompt: %s prefill tokens, want %s", attention, length, got, want)
			}
			before = s.PrefillTokens
		}
	}
}
