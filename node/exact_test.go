package node_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is one way to run the same requests.
type machine struct {
	name     string
	fraction float64
	options  emulated.Options
}

// machines cover the fractions, real concurrency, and the orders in which streams
// may advance; all but the first under the happens-before checker.
func machines() []machine {
	virtual := func(s emulated.Schedule, seed uint64) emulated.Options {
		return emulated.Options{Virtual: true, Check: true, Schedule: s, Seed: seed}
	}
	return []machine{
		{"resident", 0, emulated.Options{}},
		{"half/random", 0.5, virtual(emulated.Random, 7)},
		{"half/concurrent", 0.5, emulated.Options{Check: true}},
		{"none/lazy", 1, virtual(emulated.Lazy, 0)},
	}
}

// open starts a node, and checks at the test's end that it releases everything.
func open(t *testing.T, m machine, change func(*configs.Settings)) *node.Node {
	t.Helper()
	s := configs.Defaults()
	s.Offload.Fraction = m.fraction
	s.Batch.MaxNumBatchedTokens = 192
	if change != nil {
		change(&s)
	}
	n, err := node.Open(t.Context(), node.Options{
		Settings: s, HostLogits: true,
		OpenMachine: func() (device.Machine, error) { return emulated.Open(m.options) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil { // leaks, and what the checker found
			t.Error(err)
		}
	})
	return n
}

// TestExact compares every fixture with the reference implementation: the logits of each
// prompt, greedy tokens, and texts.
func TestExact(t *testing.T) {
	for _, name := range fixtures.Names(t) {
		t.Run(name, func(t *testing.T) {
			if !slices.Contains(sameOn, name) { // other weights and layers, and the same goroutines
				racedetector.SkipSequential(t)
			}
			t.Parallel()
			want := fixtures.Load(t, name)
			dir := fixtures.Dir(t, name)
			for _, m := range machines() {
				t.Run(m.name, func(t *testing.T) {
					n := open(t, m, func(s *configs.Settings) { s.Model.Name = dir })
					worst := 0.0
					for i, p := range want.Prompts {
						worst = max(worst, checkLogits(t, n, fmt.Sprintf("prompt %d", i), p, want.Vocab))
					}
					t.Logf("largest absolute difference of a logit: %.2g", worst)
					checkGreedy(t, n, want)
				})
			}
		})
	}
}

// tolerance of logits against the reference, float32 on both sides.
const tolerance = 5e-5

func checkLogits(t *testing.T, n *node.Node, name string, p fixtures.Prompt, vocab int) float64 {
	t.Helper()
	table := n.KV().NewTable()
	defer table.Release(false)
	if !table.Reserve(len(p.IDs)) {
		t.Fatal("too few KV blocks")
	}
	boundary := n.Info().Config.RoPE.LongAfter
	res, err := n.Pipeline().Step(t.Context(), &pipeline.Step{
		Logits: true,
		Sequences: []pipeline.Sequence{{
			Tokens: int32s(p.IDs), Table: table, LogitRows: len(p.IDs), Long: boundary > 0 && len(p.IDs) > boundary,
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	worst := 0.0
	for r, row := range res.Logits {
		for v, x := range row {
			d := math.Abs(float64(x) - float64(p.Logits[r*vocab+v]))
			if !(d <= tolerance) {
				t.Fatalf("%s: logit %d of row %d is %v, the reference has %v", name, v, r, x, p.Logits[r*vocab+v])
			}
			worst = max(worst, d)
		}
	}
	return worst
}

func checkGreedy(t *testing.T, n *node.Node, want fixtures.Expected) {
	t.Helper()
	var requests []engine.Request
	var ids [][]int
	for _, p := range want.Prompts {
		if len(p.Greedy) > 0 {
			requests = append(requests, request(int32s(p.IDs), len(p.Greedy)))
			ids = append(ids, p.Greedy)
		}
	}
	for _, x := range want.Texts {
		got := encode(t, n.Text().Tokenizer, x.Prompt, true)
		if !slices.Equal(got, int32s(x.PromptIDs)) {
			t.Errorf("prompt %q has ids %v, want %v", x.Prompt, got, x.PromptIDs)
		}
		requests = append(requests, request(int32s(x.PromptIDs), len(x.GreedyIDs)))
		ids = append(ids, x.GreedyIDs)
	}
	outs, err := n.Engine().Generate(t.Context(), requests, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, out := range outs {
		if !slices.Equal(out.TokenIDs, int32s(ids[i])) {
			t.Errorf("request %d: greedy ids\n%v, the reference has\n%v", i, out.TokenIDs, ids[i])
		}
	}
	for i, x := range want.Texts {
		if got := n.Text().Tokenizer.Decode(int32s(x.GreedyIDs), true); got != x.GreedyText {
			t.Errorf("text %d is %q, want %q", i, got, x.GreedyText)
		}
	}
}

func int32s(x []int) []int32 {
	out := make([]int32, len(x))
	for i, v := range x {
		out[i] = int32(v)
	}
	return out
}

// request goes on greedily for n tokens, whatever comes.
func request(prompt []int32, n int) engine.Request {
	p := engine.DefaultParams()
	p.MaxTokens, p.IgnoreEOS = n, true
	return engine.Request{Prompt: prompt, Params: p}
}

// encode is the text's ids.
func encode(t testing.TB, tok tokenizer.Tokenizer, text string, special bool) []int32 {
	t.Helper()
	ids, err := tok.Encode(text, special)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
