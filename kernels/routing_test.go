package kernels

import (
	"math/rand/v2"
	"testing"
)

// TestMostRuns: no distribution of pairs over experts has more runs, and some have as many.
func TestMostRuns(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		experts, pairs := 1+r.IntN(9), r.IntN(200)
		of := make([]int, experts)
		for range pairs {
			of[r.IntN(1+r.IntN(experts))]++
		}
		if runs := runsOf(of); runs > MostRuns(experts, pairs) {
			t.Fatalf("%d pairs of experts are %v: %d runs, at most %d expected", pairs, of, runs, MostRuns(experts, pairs))
		}
		// One pair of each expert, and the rest of the first.
		clear(of)
		for i := range min(experts, pairs) {
			of[i] = 1
		}
		of[0] += max(0, pairs-experts)
		if runs := runsOf(of); runs != MostRuns(experts, pairs) {
			t.Fatalf("%d pairs of experts are %v: %d runs, %d expected", pairs, of, runs, MostRuns(experts, pairs))
		}
	}
}

// runsOf is how many runs experts with those numbers of pairs have.
func runsOf(pairs []int) (runs int) {
	for _, n := range pairs {
		runs += (n + MaxRunPairs - 1) / MaxRunPairs
	}
	return runs
}

func TestListsRuns(t *testing.T) {
	for _, test := range []struct {
		name       string
		experts, k int
		most       int // tokens for which runs are listed
	}{
		{"Mixtral", 8, 2, 20},
		{"Phi-3.5", 16, 2, 40},
		{"Qwen1.5-MoE", 60, 4, 64},
		{"Qwen3", 128, 8, 64},
		{"all experts", 4, 4, 16},
	} {
		for tokens := range 100 {
			if got, want := ListsRuns(tokens, test.experts, test.k), tokens <= test.most; got != want {
				t.Errorf("%s: %d tokens: %v", test.name, tokens, got)
			}
		}
	}
}
