//go:build cuda

package engine_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// -on cpu lets the tests named GPU run on the CPU instead, as a test of themselves.
var on = flag.String("on", "cuda", "device of the tests named GPU: cuda or cpu")

var tryGPU = sync.OnceValue(func() error {
	m, err := cuda.Open(cuda.Options{})
	if err != nil {
		return err
	}
	return m.Close()
})

// openOnGPU starts a node on the built-in model, half its experts offloaded, unless
// change says otherwise.
func openOnGPU(t *testing.T, change func(*configs.Settings)) *node.Node {
	t.Helper()
	if *on == "cuda" && os.Getenv("MOESERVE_CUDA_TEST") != "gpu" {
		if err := tryGPU(); errors.Is(err, cuda.ErrUnavailable) {
			t.Skip(err)
		}
	}
	s := configs.Defaults()
	if err := s.Device.Kind.UnmarshalText([]byte(*on)); err != nil {
		t.Fatal(err)
	}
	s.Offload.Fraction = 0.5
	change(&s)
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// same reports tokens, texts or log-probabilities that differ.
func same(t *testing.T, what string, got, want []engine.Output) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d outputs, want %d", what, len(got), len(want))
	}
	for i, g := range got {
		w := want[i]
		if !slices.Equal(g.TokenIDs, w.TokenIDs) || g.Text != w.Text || g.FinishReason != w.FinishReason {
			t.Errorf("%s: request %d: %v %q (%v), want %v %q (%v)", what, i, g.TokenIDs, g.Text, g.FinishReason, w.TokenIDs, w.Text, w.FinishReason)
			continue
		}
		for k, x := range g.Tokens {
			if x.LogProb != w.Tokens[k].LogProb || !slices.Equal(x.Top, w.Tokens[k].Top) {
				t.Errorf("%s: request %d, token %d: log-probabilities %+v, want %+v", what, i, k, x, w.Tokens[k])
			}
		}
	}
}

// TestGPUNeighborsChangeNothing: with batch-invariant GEMMs, requests that use
// every parameter give together what each gives alone, to the bit, also where the
// cache has so little room that they are preempted.
func TestGPUNeighborsChangeNothing(t *testing.T) {
	invariant := func(s *configs.Settings) { s.Kernels.BatchInvariant = true }
	n := openOnGPU(t, invariant)
	rs := varied(24, n.Info().Config.Vocab)
	var want []engine.Output
	for _, outs := range alone(t, n, rs) {
		want = append(want, outs...)
	}
	together, err := n.Engine().Generate(t.Context(), rs, nil)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "together", together, want)
	for _, fraction := range []float64{0, 1} {
		tight := openOnGPU(t, func(s *configs.Settings) {
			invariant(s)
			s.Offload.Fraction = fraction
			s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen, s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.Batch.MicroBatchSize = 9, 48, 40, 12, 17
		})
		got, err := tight.Engine().Generate(t.Context(), rs, nil)
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("in little room, fraction %v", fraction), got, want)
		s := tight.Engine().State()
		if s.Preemptions == 0 {
			t.Error("nothing was preempted: the cache is too large for this test")
		}
		if s.Running != 0 || s.Waiting != 0 || s.KVUsedBlocks != 0 || tight.KV().Free() != s.KVBlocks {
			t.Errorf("after the last request: %+v, %d blocks free", s, tight.KV().Free())
		}
		t.Logf("fraction %v: %d steps, %d preemptions", fraction, s.Steps, s.Preemptions)
	}
}

// TestGPUNotANumber: rows of NaN logits fail their own requests on a GPU too.
func TestGPUNotANumber(t *testing.T) {
	notANumber(t, openOnGPU(t, func(s *configs.Settings) {
		s.Model.Name = fixtures.WithNaN(t, "mixtral", 500)
		s.Kernels.BatchInvariant = true
		s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen = 40, 64
	}))
}

// TestGPUSameTwice: with the fastest GEMMs, the same requests give the same
// tokens again, in the same engine and in another with experts in other tiers. These depend on
// the batch, and so on what is cached.
func TestGPUSameTwice(t *testing.T) {
	var want []engine.Output
	for _, fraction := range []float64{0, 0.5, 1} {
		n := openOnGPU(t, func(s *configs.Settings) { s.Offload.Fraction, s.KV.EnablePrefixCaching = fraction, false })
		rs := varied(24, n.Info().Config.Vocab)
		for range 2 {
			got, err := n.Engine().Generate(t.Context(), rs, nil)
			if err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = got
			}
			same(t, fmt.Sprintf("fraction %v", fraction), got, want)
		}
	}
}

// TestGPUAhead: decode steps that are enqueued before the tokens of the steps in front are known give the same tokens
// as those of an engine that enqueues none, where sequences end by stop ids, by stop strings and by their limits.
func TestGPUAhead(t *testing.T) {
	for _, invariant := range []bool{false, true} {
		resident := func(s *configs.Settings) { s.Offload.Fraction, s.Kernels.BatchInvariant = 0, invariant }
		plain := openOnGPU(t, func(s *configs.Settings) {
			resident(s)
			s.Kernels.EnforceEager = true
		})
		n := openOnGPU(t, resident)
		for _, together := range []int{1, 3, 8} {
			var rs []engine.Request
			for i := range together {
				r := engine.Request{ID: fmt.Sprint(i), Prompt: prompt(i, 5+i, n.Info().Config.Vocab), Params: params(40 + 30*i)}
				if r.Params.Seed = uint64(i); i%3 == 1 {
					r.Params.Temperature = 1
				}
				if r.Params.IgnoreEOS = i%2 == 0; i == 5 {
					r.Params.Stop = []string{"e"}
				}
				if i == 6 {
					r.Params.StopIDs = []int32{7, 70, 170}
				}
				rs = append(rs, r)
			}
			want, err := plain.Engine().Generate(t.Context(), rs, nil)
			if err != nil {
				t.Fatal(err)
			}
			before := n.Pipeline().Graphs()
			got, err := n.Engine().Generate(t.Context(), rs, nil)
			if err != nil {
				t.Fatal(err)
			}
			same(t, fmt.Sprintf("%d requests, batch-invariant: %v", together, invariant), got, want)
			s := n.Pipeline().Graphs()
			t.Logf("%d requests, batch-invariant: %v: %d graphs, %d ahead, %d of them discarded", together, invariant, s.Launched-before.Launched, s.Ahead-before.Ahead, s.Discarded-before.Discarded)
			if s.Ahead-before.Ahead < 20 && *on == "cuda" {
				t.Errorf("%d requests: %d steps were enqueued ahead", together, s.Ahead-before.Ahead)
			}
		}
	}
}

// TestGPUPromptLogProbs holds the log-probabilities of prompts to the reference, as TestPromptLogProbs does,
// as near as bfloat16 activations are. Where these make a router select other experts, log-probabilities differ by
// more: on H200, at nine positions of phimoe's prompts, by up to 0.4.
func TestGPUPromptLogProbs(t *testing.T) {
	for _, model := range []string{"qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "phimoe"} {
		t.Run(model, func(t *testing.T) {
			n := openOnGPU(t, func(s *configs.Settings) {
				s.Model.Name = fixtures.Dir(t, model)
				s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs = 50, 7
			})
			deviating := 0.0
			if model == "phimoe" {
				deviating = 0.1
			}
			testPromptLogProbs(t, n, model, 0.15, deviating)
		})
	}
}
