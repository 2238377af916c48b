package node_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// drawing is a prompt that is gone on from, with every way of drawing.
type drawing struct {
	prompt []int32
	length int // of the answer
	params pipeline.SamplingParams
	bias   map[int32]float32

	tokens   []int32 // prompt and answer
	computed int
	table    *kvcache.Table
	probs    []pipeline.LogProb
}

// drawings use all parameters, alone and together, among plain and greedy ones.
func drawings(vocab int) []*drawing {
	banned := float32(math.Inf(-1))
	var all []*drawing
	for i, d := range []pipeline.SamplingParams{
		{},
		{Temperature: 0.9, Seed: 1},
		{Temperature: 1.5, Seed: 2, TopK: 5},
		{Temperature: 1.5, Seed: 3, TopP: 0.8, LogProbs: true},
		{Temperature: 2, Seed: 3, Sample: 1, MinP: 0.1},
		{RepetitionPenalty: 1.5, PresencePenalty: 0.3, FrequencyPenalty: 0.2, LogProbs: true},
		{Temperature: 1.2, Seed: 4, TopK: 30, TopP: 0.9, MinP: 0.02, RepetitionPenalty: 1.2, FrequencyPenalty: -0.1, LogProbs: true},
		{Temperature: 0.7, Seed: 5, PresencePenalty: 1},
	} {
		r := &drawing{length: 5 + i%4, params: d, bias: map[int32]float32{}}
		for j := range []int{9, 1, 23, 40, 17, 2, 33, 12}[i] {
			r.prompt = append(r.prompt, int32((5*i+11*j+j*j)%vocab))
		}
		if i%2 == 1 {
			r.bias = map[int32]float32{int32(i): 3, int32(i + 20): banned, int32((5 * i) % vocab): -1}
		}
		all = append(all, r)
	}
	return all
}

// next is how the token behind the last is drawn.
func (d *drawing) next() pipeline.SamplingParams {
	params := d.params
	penalties := params.RepetitionPenalty != 0 || params.PresencePenalty != 0 || params.FrequencyPenalty != 0
	at := map[int32]int{}
	add := func(id int32) *pipeline.TokenAdjust {
		i, ok := at[id]
		if !ok {
			i = len(params.Adjust)
			at[id] = i
			params.Adjust = append(params.Adjust, pipeline.TokenAdjust{ID: id, Seen: -1})
		}
		return &params.Adjust[i]
	}
	if penalties {
		for _, id := range d.prompt {
			add(id).Seen = 0
		}
		for _, id := range d.tokens[len(d.prompt):] {
			a := add(id)
			a.Seen = max(a.Seen, 0) + 1
		}
	}
	for id, b := range d.bias { // in any order
		add(id).Bias = b
	}
	return params
}

// run has the drawings go on together, in steps that each take at most chunk
// tokens of one, and says what they gave.
func run(t *testing.T, n *node.Node, all []*drawing, chunk int) string {
	t.Helper()
	for _, d := range all {
		d.tokens, d.computed, d.table, d.probs = slices.Clone(d.prompt), 0, n.KV().NewTable(), nil
		defer d.table.Release(false)
		if !d.table.Reserve(len(d.prompt) + d.length) {
			t.Fatal("too few KV blocks")
		}
	}
	for {
		var step pipeline.Step
		var in []*drawing
		for _, d := range all {
			if len(d.tokens) == len(d.prompt)+d.length {
				continue
			}
			to := min(len(d.tokens), d.computed+chunk)
			s := pipeline.Sequence{Tokens: d.tokens[d.computed:to], Start: d.computed, Table: d.table}
			if to == len(d.tokens) {
				s.LogitRows, s.SamplingParams = 1, d.next()
			}
			step.Sequences = append(step.Sequences, s)
			in = append(in, d)
			d.computed = to
		}
		if len(in) == 0 {
			break
		}
		res, err := n.Pipeline().Step(t.Context(), &step)
		if err != nil {
			t.Fatal(err)
		}
		row := 0
		for i, d := range in {
			if step.Sequences[i].LogitRows == 0 {
				continue
			}
			d.tokens = append(d.tokens, res.Sampled[row])
			if d.params.LogProbs {
				p := res.LogProbs[row] // valid until the next step
				p.TopIDs, p.Top = slices.Clone(p.TopIDs), slices.Clone(p.Top)
				d.probs = append(d.probs, p)
			} else if res.LogProbs != nil && res.LogProbs[row].TopIDs != nil {
				t.Errorf("log-probabilities that nobody asked for")
			}
			row++
		}
	}
	return report(all)
}

// report is a line for each drawing.
func report(all []*drawing) string {
	var b strings.Builder
	for _, d := range all {
		fmt.Fprintf(&b, "%v %v\n", d.tokens[len(d.prompt):], d.probs)
	}
	return b.String()
}

// TestSameSamples: a prompt gets the same tokens and log-probabilities, bit for bit, alone
// and in a batch, whatever the chunks and the micro-batches.
func TestSameSamples(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	for _, name := range []string{"mixtral", "qwen2_moe_sparse_step"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := fixtures.Dir(t, name)
			m := machine{"", 0.5, emulated.Options{Virtual: true, Check: true}}
			one := open(t, m, func(s *configs.Settings) { s.Model.Name = dir })
			all := drawings(one.Info().Config.Vocab)
			var want strings.Builder
			for _, d := range all {
				want.WriteString(run(t, one, []*drawing{d}, 1000))
			}
			checkDraws(t, all, one.Info().Config.Vocab)
			for _, c := range []struct{ micro, chunk int }{{0, 1000}, {0, 3}, {1, 7}, {5, 1000}, {16, 20}} {
				n := open(t, m, func(s *configs.Settings) { s.Model.Name, s.Batch.MicroBatchSize = dir, c.micro })
				if got := run(t, n, all, c.chunk); got != want.String() {
					t.Errorf("%+v:\n%s\nalone:\n%s", c, got, want.String())
				}
			}
			backwards := slices.Clone(all)
			slices.Reverse(backwards)
			run(t, one, backwards, 10)
			if got := report(all); got != want.String() {
				t.Errorf("in the other order:\n%s\nalone:\n%s", got, want.String())
			}
		})
	}
}

// checkDraws compares the sampled tokens with the sampling parameters.
func checkDraws(t *testing.T, all []*drawing, vocab int) {
	t.Helper()
	for i, d := range all {
		answer := d.tokens[len(d.prompt):]
		for _, id := range answer {
			if math.IsInf(float64(d.bias[id]), -1) {
				t.Errorf("drawing %d: token %d is banned and was drawn", i, id)
			}
		}
		if want := len(answer); d.params.LogProbs && len(d.probs) != want {
			t.Errorf("drawing %d: %d log-probabilities of %d tokens", i, len(d.probs), want)
		}
		for j, p := range d.probs {
			if len(p.TopIDs) != min(20, vocab) || len(p.Top) != len(p.TopIDs) || !slices.IsSortedFunc(p.Top, func(a, b float32) int { return cmp.Compare(b, a) }) {
				t.Fatalf("drawing %d, token %d: %+v", i, j, p)
			}
			if at := slices.Index(p.TopIDs, answer[j]); at >= 0 && p.Top[at] != p.Sampled {
				t.Errorf("drawing %d, token %d has log-probability %g, among the likeliest %g", i, j, p.Sampled, p.Top[at])
			}
		}
	}
}

// TestManyLogitRows samples after several tokens of one sequence: each row by its own
// position, and adjusted after the last token only.
func TestManyLogitRows(t *testing.T) {
	n := open(t, machines()[0], func(s *configs.Settings) { s.Model.Name, s.Batch.MicroBatchSize = fixtures.Dir(t, "mixtral"), 3 })
	prompt := []int32{5, 9, 14, 3, 200, 77, 1, 30}
	draws := func(tokens []int32, rows int, d pipeline.SamplingParams) pipeline.Result {
		t.Helper()
		table := n.KV().NewTable()
		defer table.Release(false)
		if !table.Reserve(len(tokens)) {
			t.Fatal("too few KV blocks")
		}
		res, err := n.Pipeline().Step(t.Context(), &pipeline.Step{Logits: true, Sequences: []pipeline.Sequence{{Tokens: tokens, Table: table, LogitRows: rows, SamplingParams: d}}})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	d := pipeline.SamplingParams{Temperature: 1, Seed: 8, TopP: 0.9, LogProbs: true, Position: 99}
	var want []int32
	for i := range prompt {
		want = append(want, draws(prompt[:i+1], 1, d).Sampled...)
	}
	last := len(prompt) - 1
	d.Adjust = []pipeline.TokenAdjust{{ID: 42, Seen: -1, Bias: 1000}}
	want[last] = 42
	res := draws(prompt, len(prompt), d)
	if !slices.Equal(res.Sampled, want) {
		t.Errorf("drew %v, want %v", res.Sampled, want)
	}
	for i, p := range res.LogProbs {
		var sum float64
		for _, v := range res.Logits[i] {
			sum += math.Exp(float64(v))
		}
		if x := float64(res.Logits[i][want[i]]) - math.Log(sum); math.Abs(x-float64(p.Sampled)) > 1e-4 {
			t.Errorf("row %d has log-probability %g, its logits %g", i, p.Sampled, x)
		}
	}
	if len(res.LogProbs) != len(prompt) {
		t.Errorf("%d log-probabilities of %d rows", len(res.LogProbs), len(prompt))
	}
}

// TestTooManyAdjusted: a step that adjusts too many logits is rejected, and the next step
// runs.
func TestTooManyAdjusted(t *testing.T) {
	n := open(t, machines()[0], func(s *configs.Settings) { s.Model.Name, s.Batch.MaxNumSeqs = fixtures.Dir(t, "mixtral"), 2 })
	if got, least := n.Info().Limits.MaxAdjust, n.Info().Config.Vocab; got < least {
		t.Errorf("%d tokens may be adjusted, want at least the %d that one request can", got, least)
	}
	step := func(adjusted int) error {
		table := n.KV().NewTable()
		defer table.Release(false)
		if !table.Reserve(1) {
			t.Fatal("too few KV blocks")
		}
		d := pipeline.SamplingParams{}
		for i := range adjusted {
			d.Adjust = append(d.Adjust, pipeline.TokenAdjust{ID: int32(i % n.Info().Config.Vocab)})
		}
		_, err := n.Pipeline().Step(t.Context(), &pipeline.Step{Sequences: []pipeline.Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1, SamplingParams: d}}})
		return err
	}
	if err := step(n.Info().Limits.MaxAdjust + 1); err == nil || !strings.Contains(err.Error(), "the step adjusts") {
		t.Errorf("one logit too many: %v", err)
	}
	if err := step(n.Info().Config.Vocab); err != nil {
		t.Errorf("the whole vocabulary: %v", err)
	}
}
