package engine

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/pipeline"
)

// What a step gets of a sample is what the parameters say of each token, one by one, whatever
// other samples of the request have sampled.
func TestAdjustments(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const vocab = 24
	ids := func(n int) []int32 {
		list := make([]int32, rng.IntN(n))
		for i := range list {
			list[i] = rng.Int32N(vocab)
		}
		return list
	}
	for range 2000 {
		p := DefaultParams()
		p.MinTokens, p.StopIDs = rng.IntN(4), ids(6)
		p.RepetitionPenalty = []float32{1, 1.5}[rng.IntN(2)]
		p.FrequencyPenalty = []float32{0, 0.5}[rng.IntN(2)]
		p.LogitBias = map[int32]float32{}
		for _, id := range ids(8) {
			p.LogitBias[id] = []float32{-100, 0, 3}[rng.IntN(3)]
		}
		for range rng.IntN(4) {
			p.BadWords = append(p.BadWords, append(ids(2), rng.Int32N(vocab)))
		}
		if rng.IntN(3) == 0 {
			p.AllowedIDs = ids(2 * vocab)
		}
		prompt, model := ids(10), ids(3)
		request := newAdjustments(&p, prompt, model, vocab)
		samples := []adjustments{request.sample(), request.sample()}
		completions := make([][]int32, len(samples))
		for range 8 {
			k := rng.IntN(len(samples))
			id := rng.Int32N(vocab)
			samples[k].addToken(id)
			completions[k] = append(completions[k], id)
			for k := range samples {
				want := map[int32]pipeline.TokenAdjust{}
				for id := range int32(vocab) {
					w := pipeline.TokenAdjust{ID: id, Seen: -1, Bias: p.LogitBias[id]}
					if p.RepetitionPenalty != 1 && slices.Contains(prompt, id) {
						w.Seen = 0
					}
					for _, c := range completions[k] {
						if c == id && (p.RepetitionPenalty != 1 || p.FrequencyPenalty != 0) {
							w.Seen = max(w.Seen, 0) + 1
						}
					}
					stops := slices.Contains(p.StopIDs, id) || slices.Contains(model, id)
					bad := slices.ContainsFunc(p.BadWords, func(w []int32) bool {
						n := len(w) - 1
						said := completions[k]
						return w[n] == id && len(said) >= n && slices.Equal(said[len(said)-n:], w[:n])
					})
					if len(p.AllowedIDs) > 0 && !slices.Contains(p.AllowedIDs, id) || bad || w.Bias <= banned || stops && len(completions[k]) < p.MinTokens {
						w.Bias = float32(math.Inf(-1))
					}
					if samples[k].ends(id) != stops {
						t.Fatalf("token %d ends: %v, want %v", id, !stops, stops)
					}
					want[id] = w
				}
				got := map[int32]pipeline.TokenAdjust{}
				for _, a := range samples[k].list {
					got[a.ID] = a
				}
				once := len(got) == len(samples[k].list)
				for id := range int32(vocab) { // those that are not listed are not changed
					if _, ok := got[id]; !ok {
						got[id] = pipeline.TokenAdjust{ID: id, Seen: -1}
					}
				}
				if !once || !maps.Equal(got, want) {
					t.Fatalf("%+v, prompt %v, model's stop ids %v, completion %v: %+v, want %+v", p, prompt, model, completions[k], samples[k].list, want)
				}
			}
		}
	}
}

// A request's lists are made once, before the engine's goroutine sees it: a sample costs nothing,
// however long they are.
func TestSampleOfLongListsIsFree(t *testing.T) {
	p := DefaultParams()
	p.MinTokens, p.LogitBias = 1, map[int32]float32{}
	for id := range int32(50_000) {
		p.StopIDs = append(p.StopIDs, 50_000-id)
		p.LogitBias[id] = 1
	}
	request := newAdjustments(&p, []int32{1}, nil, 50_001)
	var sample adjustments
	if n := testing.AllocsPerRun(10, func() { sample = request.sample() }); n != 0 || len(sample.list) != 50_001 {
		t.Errorf("%v allocations, %d entries", n, len(sample.list))
	}
}
