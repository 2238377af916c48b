//go:build cuda

package node_test

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node"
)

var hits = flag.Int("hits", 0, "requests of TestGPUHit; 0: it skips")

// TestGPUHit prints where the time of a request goes whose prefix of 32,000 tokens is in the GPU's
// memory, with Mixtral cut to 8 layers and dummy weights.
func TestGPUHit(t *testing.T) {
	if *hits == 0 {
		t.Skip("without -hits")
	}
	const tokens, generated = 32000, 8
	var steps []time.Duration
	var ended []time.Time
	n := openOnGPU(t, node.Options{
		Settings: gpuSettings(func(s *configs.Settings) {
			s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers = "mixtral-8x7b", configs.LoadDummy, 8
			s.Batch.MaxNumBatchedTokens = 8192
		}),
		Listener: engine.Listener{StepFinished: func(i engine.StepInfo) { steps, ended = append(steps, i.Duration), append(ended, time.Now()) }},
	})
	p := eval.GeneratePrompts(1, tokens+1, n.Info().Config.Vocab, 1)[0]
	params := engine.DefaultParams()
	params.MaxTokens, params.IgnoreEOS = generated, true
	names := []string{"first token", "before its step", "its step", "after it", "second step", "mean of the others", "between two steps"}
	parts := make([][]time.Duration, len(names))
	for i := range *hits + 1 {
		var first time.Time
		steps, ended = nil, nil
		began := time.Now()
		if _, err := n.Engine().Generate(t.Context(), []engine.Request{{Prompt: p, Params: params}}, func(int, engine.Update) {
			if first.IsZero() {
				first = time.Now()
			}
		}); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			continue // it computes the prefix
		}
		if len(steps) != generated {
			t.Fatalf("%d steps", len(steps))
		}
		var others time.Duration
		for _, d := range steps[2:] {
			others += d
		}
		others /= generated - 2
		for k, d := range []time.Duration{
			first.Sub(began), ended[0].Sub(began) - steps[0], steps[0], first.Sub(ended[0]), steps[1], others,
			(ended[generated-1].Sub(ended[1]))/(generated-2) - others,
		} {
			parts[k] = append(parts[k], d)
		}
	}
	for k, name := range names {
		slices.Sort(parts[k])
		fmt.Printf("us of a hit: %-20s %8.1f\n", name, float64(parts[k][len(parts[k])/2].Nanoseconds())/1e3)
	}
	fmt.Printf("%+v\n", n.Observe().Pipeline().Graphs)
}
