package engine_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/pipeline"
)

// paceLog lets steps that decode have 10 prompt tokens, and keeps what it is told.
type paceLog struct {
	mixes   []scheduler.Mix
	seconds []float64
}

func (p *paceLog) PromptTokens(m scheduler.Mix, most int) int { return min(10, most) }

func (p *paceLog) Measured(m scheduler.Mix, seconds float64) {
	p.mixes, p.seconds = append(p.mixes, m), append(p.seconds, seconds)
}

// TestPace: the prompt tokens of steps that decode, and of no others, are those of the pace. It is
// told of every step how long it took, with the host's work before it but not the time in which the
// engine was idle.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &paceLog{}
		e := newEngine(t, engine.Options{
			Pipeline: stepFunc(func(_ context.Context, s *pipeline.Step) error {
				for i := range s.Sequences {
					time.Sleep(time.Duration(len(s.Sequences[i].Tokens)) * time.Millisecond) // of the bubble's clock
				}
				return nil
			}),
			KV: cache(t, 64), MaxModelLen: 256, MaxNumBatchedTokens: 64, Vocab: 100, Pace: p,
		})
		generate := func(prompts ...int) {
			var requests []engine.Request
			for _, n := range prompts {
				requests = append(requests, engine.Request{Prompt: make([]int32, n), Params: params(4)})
			}
			if _, err := e.Generate(t.Context(), requests, nil); err != nil {
				t.Fatal(err)
			}
		}
		generate(50, 40)
		time.Sleep(time.Hour)
		generate(5)
		want := []scheduler.Mix{
			{Prompt: 64}, // 50 and 14
			{Decodes: 1, DecodeContext: 50, Prompt: 10, PromptContext: 14},
			{Decodes: 1, DecodeContext: 51, Prompt: 10, PromptContext: 24},
			{Decodes: 1, DecodeContext: 52, Prompt: 6, PromptContext: 34},
			{Decodes: 1, DecodeContext: 40},
			{Decodes: 1, DecodeContext: 41},
			{Decodes: 1, DecodeContext: 42},
			{Prompt: 5},
			{Decodes: 1, DecodeContext: 5},
			{Decodes: 1, DecodeContext: 6},
			{Decodes: 1, DecodeContext: 7},
		}
		if !slices.Equal(p.mixes, want) {
			t.Errorf("got\n%v, want\n%v", p.mixes, want)
		}
		for i, m := range p.mixes {
			if n := float64(m.Decodes+m.Prompt) / 1000; p.seconds[i] != n {
				t.Errorf("step %d took %v s, want %v", i, p.seconds[i], n)
			}
		}
	})
}
