package engine_test

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// expectedLogProb is what a reference says of a token of a prompt. Rounding may move its rank between two.
type expectedLogProb struct {
	engine.PromptLogProb
	from, to int
}

// reference is what the logits of a prompt's reference say of its tokens but the first, with this
// tolerance of log-probabilities.
func reference(vocab int, p fixtures.Prompt, top int, tolerance float64) []expectedLogProb {
	list := make([]expectedLogProb, 0, len(p.IDs))
	for i, id := range p.IDs[1:] {
		logits := p.Logits[i*vocab:][:vocab]
		largest := slices.Max(logits)
		sum := 0.0
		for _, v := range logits {
			sum += math.Exp(float64(v - largest))
		}
		of := func(id int) float32 { return float32(float64(logits[id]-largest) - math.Log(sum)) }
		t := expectedLogProb{PromptLogProb: engine.PromptLogProb{Token: engine.Token{ID: int32(id), LogProb: of(id)}}, from: 1}
		order := make([]int, vocab)
		for j, v := range logits {
			order[j] = j
			if d := float64(v - logits[id]); d >= -2*tolerance {
				if t.to++; d > 2*tolerance {
					t.from++
				}
			}
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
		for _, id := range order[:top] {
			t.Top = append(t.Top, engine.TopLogProb{ID: int32(id), LogProb: of(id)})
		}
		list = append(list, t)
	}
	return list
}

// checkLogProbs holds a prompt's log-probabilities to the reference, but for at most so many positions that
// may deviate by more than tolerance: there a router that rounds otherwise may have selected other experts.
func checkLogProbs(t *testing.T, what string, got []engine.PromptLogProb, want []expectedLogProb, tolerance float64, deviating int) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d log-probabilities, want %d", what, len(got), len(want))
	}
	near := func(a, b float32) bool { return math.Abs(float64(a-b)) <= tolerance }
	far := 0
	for i, w := range want {
		g := got[i]
		if g.ID != w.ID || len(g.Top) != len(w.Top) {
			t.Fatalf("%s: position %d: %+v, want %+v", what, i+1, g, w)
		}
		for _, o := range g.Top { // the token itself is where its rank says
			if o.ID == g.ID && (g.Rank < 1 || g.Rank > len(g.Top) || g.Top[g.Rank-1].LogProb != g.LogProb) {
				t.Fatalf("%s: position %d: %+v", what, i+1, g)
			}
		}
		if math.Abs(float64(g.LogProb-w.LogProb)) > 1 {
			t.Fatalf("%s: position %d: %+v, want %+v", what, i+1, g, w)
		}
		same := near(g.LogProb, w.LogProb) && g.Rank >= w.from && g.Rank <= w.to
		for j := range w.Top {
			same = same && near(g.Top[j].LogProb, w.Top[j].LogProb)
		}
		if same {
			continue
		}
		if far++; far > deviating {
			t.Fatalf("%s: position %d: %+v, want %+v, rank %d to %d; %d positions deviate, at most %d may", what, i+1, g, w, w.from, w.to, far, deviating)
		}
	}
	if far > 0 {
		t.Logf("%s: %d of %d positions deviate by more than %v", what, far, len(want), tolerance)
	}
}

// TestPromptLogProbs holds the log-probabilities of prompts to the reference's logits: in steps that hold
// a prompt in parts, in several micro-batches, with less memory for logits than tokens, beside requests
// that generate, from a cache that has the prompt, and with more samples than one.
func TestPromptLogProbs(t *testing.T) {
	for _, c := range []struct {
		model  string
		change func(*configs.Settings)
	}{
		{"qwen3_moe", func(*configs.Settings) {}},
		{"mixtral", func(s *configs.Settings) { s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs = 23, 3 }},
		{"olmoe", func(s *configs.Settings) { s.Batch.MicroBatchSize = 9; s.Batch.MaxNumSeqs = 7 }},
		{"qwen2_moe", func(s *configs.Settings) { s.KV.NumGPUBlocksOverride = 11 }},
		{"phimoe", func(s *configs.Settings) { s.Batch.MaxNumBatchedTokens = 50 }},
	} {
		t.Run(c.model, func(t *testing.T) {
			n, _ := open(t, func(s *configs.Settings) {
				s.Model.Name = fixtures.Dir(t, c.model)
				c.change(s)
			})
			testPromptLogProbs(t, n, c.model, 2e-3, 0)
		})
	}
}

// testPromptLogProbs runs the reference's prompts of a fixture on a node. Completions are as the reference
// has them only where log-probabilities are nearly exact.
func testPromptLogProbs(t *testing.T, n *node.Node, model string, tolerance, deviating float64) {
	t.Helper()
	stop := run(t, n)
	expected := fixtures.Load(t, model)
	for turn := range 2 { // the second finds the prompts in the prefix cache
		var jobs []*engine.Job
		for i, p := range expected.Prompts {
			r := engine.Request{Params: params(6)}
			for _, id := range p.IDs {
				r.Prompt = append(r.Prompt, int32(id))
			}
			r.Params.PromptLogProbs, r.Params.TopPromptLogProbs = true, 5
			if r.Params.N = 1 + i%2; turn == 1 && i == 3 {
				r.Params.MaxTokens = 0
			}
			j, err := n.Engine().Submit(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			plain := r
			plain.Params.PromptLogProbs = false
			if _, err := n.Engine().Submit(t.Context(), plain); err != nil {
				t.Fatal(err)
			}
			jobs = append(jobs, j)
		}
		for i, j := range jobs {
			p := expected.Prompts[i]
			first, err := j.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			checkLogProbs(t, model, j.PromptLogProbs(), reference(expected.Vocab, p, 5, tolerance), tolerance, int(deviating*float64(len(p.IDs))))
			rest := wait(t, j)
			if i == 3 && turn == 1 {
				if first.Finish != engine.FinishLength || len(first.Tokens) != 0 || j.Usage().CompletionTokens != 0 {
					t.Errorf("without a completion: %+v, %+v", first, j.Usage())
				}
				continue
			}
			if got := append(ids(first), ids(rest[0])...); tolerance < 0.01 && len(p.Greedy) > 0 && !slices.Equal(got, to32(p.Greedy[:6])) {
				t.Errorf("prompt %d goes on with %v, want %v", i, got, p.Greedy[:6])
			}
			if got := j.Usage().CachedTokens; got != 0 {
				t.Errorf("prompt %d: %d tokens from the cache, whose log-probabilities nobody knows", i, got)
			}
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func to32(ids []int) []int32 {
	all := make([]int32, len(ids))
	for i, id := range ids {
		all[i] = int32(id)
	}
	return all
}

// TestBans bans words and tokens: what is sampled is the likeliest of the rest.
func TestBans(t *testing.T) {
	n, _ := open(t, func(s *configs.Settings) { s.Model.Name = fixtures.Dir(t, "qwen3_moe") })
	p := fixtures.Load(t, "qwen3_moe").Prompts[1]
	generate := func(change func(*engine.Params)) []int32 {
		t.Helper()
		r := engine.Request{Prompt: to32(p.IDs), Params: params(8)}
		change(&r.Params)
		outs, err := n.Engine().Generate(t.Context(), []engine.Request{r}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return outs[0].TokenIDs
	}
	free := generate(func(*engine.Params) {})
	if !slices.Equal(free, to32(p.Greedy[:8])) {
		t.Fatalf("without bans %v, want %v", free, p.Greedy[:8])
	}
	if got := generate(func(p *engine.Params) { p.BadWords = [][]int32{{free[0]}} }); slices.Contains(got, free[0]) {
		t.Errorf("%v has %d, which is banned", got, free[0])
	}
	// A phrase is banned where it would be complete, and its last token elsewhere is not.
	phrase := slices.Clone(free[2:5])
	got := generate(func(p *engine.Params) { p.BadWords = [][]int32{phrase} })
	if !slices.Equal(got[:4], free[:4]) || got[4] == free[4] {
		t.Errorf("%v: the phrase %v was not avoided at its last token", got, phrase)
	}
	got = generate(func(p *engine.Params) {
		p.BadWords, p.LogitBias = [][]int32{{free[0], free[1]}, {100, 100}}, map[int32]float32{100: 50}
	})
	for i, id := range got { // the likeliest by far, but never twice in a row
		if (id == 100) != (i%2 == 0) {
			t.Errorf("%v: every other token must be 100", got)
			break
		}
	}
	// The words of the prompt do not count.
	last := int32(p.IDs[len(p.IDs)-1])
	if got := generate(func(p *engine.Params) { p.BadWords = [][]int32{{last, free[0]}} }); got[0] != free[0] {
		t.Errorf("%v begins with %d, which is banned only behind a token of the completion", got, got[0])
	}
	allowed := []int32{7, 9, free[0]}
	got = generate(func(p *engine.Params) { p.AllowedIDs = allowed; p.MinTokens = 3; p.StopIDs = []int32{9} })
	if got[0] != free[0] || slices.ContainsFunc(got, func(id int32) bool { return !slices.Contains(allowed, id) }) || slices.Contains(got[:min(3, len(got))], 9) {
		t.Errorf("%v, with %v allowed", got, allowed)
	}
}
