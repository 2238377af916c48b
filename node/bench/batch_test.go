package bench_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/node/fault"
)

// A batch samples what the engine samples, however its prompts are divided into steps, and
// again when it goes back.
func TestBatchSamplesWhatTheEngineSamples(t *testing.T) {
	const newTokens = 6
	prompts := [][]int32{{5}, {9, 8, 7, 6, 5, 4, 3, 2, 1, 30, 31, 32, 33}, {40, 41, 42}}
	for _, rows := range []int{3, 7, 64} {
		s := configs.Defaults()
		s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.Offload.Fraction, s.KV.MaxModelLen = rows, 3, 0.5, 64
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		var requests []engine.Request
		for _, p := range prompts {
			params := engine.DefaultParams()
			params.MaxTokens, params.IgnoreEOS = newTokens, true
			requests = append(requests, engine.Request{Prompt: p, Params: params})
		}
		want, err := n.Engine().Generate(t.Context(), requests, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := bench.NewBatch(n, prompts, newTokens)
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string) {
			t.Helper()
			for i, got := range b.Tokens() {
				if !slices.Equal(got, want[i].TokenIDs) {
					t.Errorf("%d tokens per step, %s: sequence %d samples %v, the engine %v", rows, what, i, got, want[i].TokenIDs)
				}
			}
		}
		run := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		run("prefill", b.Prefill(t.Context()))
		run("decode", b.Decode(t.Context(), 1, newTokens))
		check("at first")
		run("decode again", b.Decode(t.Context(), 3, newTokens))
		check("again from the third on")
		run("prefill again", b.Prefill(t.Context()))
		if err := b.Decode(t.Context(), 3, newTokens); err == nil {
			t.Error("went on from tokens that were not sampled")
		}
		run("decode", b.Decode(t.Context(), 1, newTokens))
		check("from the prompts again")
		if err := b.Decode(t.Context(), newTokens, newTokens+1); err == nil {
			t.Error("sampled more tokens than the maximum")
		}
		b.Close()
		if free, all := n.KV().Free(), n.KV().Blocks(); free != all {
			t.Errorf("%d of %d blocks are free behind a batch", free, all)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestBatchRefuses(t *testing.T) {
	s := configs.Defaults()
	s.Batch.MaxNumSeqs, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = 2, 32, 3
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close() //nolint:errcheck // only read from
	long := make([]int32, 20)
	for _, c := range []struct {
		prompts   [][]int32
		newTokens int
		want      string
	}{
		{[][]int32{{1}, {2}, {3}}, 1, "node: a batch of 3 sequences exceeds the maximum of 2 per step"},
		{[][]int32{{1}, {}}, 1, "node: sequence 1 of a batch has 0 tokens"},
		{[][]int32{long}, 13, "node: sequence 0 of a batch has 20 tokens and 13 new ones; the context is 32"},
		{[][]int32{{1}}, math.MaxInt, fmt.Sprintf("node: sequence 0 of a batch has 1 tokens and %d new ones; the context is 32", math.MaxInt)},
		{[][]int32{{1}}, -1, "node: sequence 0 of a batch has 1 tokens and -1 new ones; the context is 32"},
		{[][]int32{long, long}, 12, "node: the KV cache holds 1 of a batch of 2 sequences: sequence 1 has 32 tokens, and 1 of 3 blocks of 16 tokens are free"},
	} {
		_, err := bench.NewBatch(n, c.prompts, c.newTokens)
		if !errors.Is(err, fault.ErrConfig) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if free := n.KV().Free(); free != 3 {
			t.Errorf("%s: %d blocks are free, of 3", c.want, free)
		}
	}
}
