package engine_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
	"github.com/moeserve/moeserve/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// question is a line of the built-in model's test set.
type question struct{ Task, Prompt, Answer string }

// questions reads the first n of each task.
func questions(t *testing.T, n int) (tasks []string, byTask map[string][]question) {
	t.Helper()
	return readSet(t, "eval", n, func(q question) string { return q.Task })
}

// readSet reads the first n rows of each of the five tasks of a test set of the built-in model.
func readSet[row any](t *testing.T, name string, n int, task func(row) string) (tasks []string, byTask map[string][]row) {
	t.Helper()
	f, err := os.Open("../models/tiny/testdata/" + name + ".jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read from
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	byTask = map[string][]row{}
	lines := bufio.NewScanner(z)
	for lines.Scan() {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		of := task(r)
		if byTask[of] == nil {
			tasks = append(tasks, of)
		}
		if len(byTask[of]) < n {
			byTask[of] = append(byTask[of], r)
		}
	}
	if err := lines.Err(); err != nil || len(tasks) != 5 {
		t.Fatalf("test set: %d tasks, %v", len(tasks), err)
	}
	return tasks, byTask
}

// scored is how many prompts of each task are asked: MOESERVE_SCORE, or a few. The test sets have 1,000.
func scored(t *testing.T) int {
	t.Helper()
	v := os.Getenv("MOESERVE_SCORE")
	if v == "" {
		return 24
	}
	count, err := strconv.Atoi(v)
	if err != nil || count < 1 {
		t.Fatalf("MOESERVE_SCORE is %q: give a number of prompts", v)
	}
	return count
}

// halfOffloaded is a node of the built-in model, half of whose experts are offloaded.
func halfOffloaded(t *testing.T) *node.Node {
	t.Helper()
	s := configs.Defaults()
	s.Offload.Fraction = 0.5
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

// TestBuiltInModelScore asks the built-in model unseen prompts of every task, half
// its experts offloaded.
func TestBuiltInModelScore(t *testing.T) {
	n := halfOffloaded(t)
	tasks, byTask := questions(t, scored(t))
	var score, activation strings.Builder
	before, err := n.Pipeline().Counts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		var requests []engine.Request
		for _, q := range byTask[task] {
			requests = append(requests, engine.Request{Prompt: encode(t, n.Text().Tokenizer, q.Prompt, true), Params: engine.DefaultParams()})
		}
		outs, err := n.Engine().Generate(t.Context(), requests, nil)
		if err != nil {
			t.Fatal(err)
		}
		exact := 0
		for i, q := range byTask[task] {
			got := n.Text().Tokenizer.Decode(outs[i].TokenIDs, true)
			if got == q.Answer && outs[i].FinishReason == engine.FinishStop {
				exact++
			} else {
				t.Logf("%s: %q gives %q (%s), not %q", task, q.Prompt, got, outs[i].FinishReason, q.Answer)
			}
		}
		fmt.Fprintf(&score, "\n%-10s %5d of %d exact", task, exact, len(requests))
		if 100*exact < 98*len(requests) {
			t.Errorf("%s: %d of %d exact, want 98 %%", task, exact, len(requests))
		}
		after, err := n.Pipeline().Counts(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for l := range after {
			fmt.Fprintf(&activation, "\n| %d | %s |", l, task)
			var all int64
			for e := range after[l] {
				all += after[l][e] - before[l][e]
			}
			for e := range after[l] {
				fmt.Fprintf(&activation, " %.1f |", 100*float64(after[l][e]-before[l][e])/float64(all))
			}
		}
		before = after
	}
	t.Logf("scores:%s", score.String())
	t.Logf("share of the choices that fell on each expert, in %%:%s", activation.String())
}

// conversation is a line of the built-in model's test conversations: turns of a prompt and its answer, with what a chat
// template puts around messages but for <|assistant|> between the two and <|endoftext|> behind an answer.
type conversation struct {
	Task  string
	Turns [][2]string
}

// TestBuiltInModelCallsTools holds the built-in model to unseen conversations with tools, half its experts offloaded: calls,
// two calls at once, answers to their results, questions that need no tool, and JSON, also where a schema forces it.
func TestBuiltInModelCallsTools(t *testing.T) {
	n := halfOffloaded(t)
	_, vocabulary := builtIn(t)
	tasks, byTask := readSet(t, "calls-eval", scored(t), func(c conversation) string { return c.Task })
	var score strings.Builder
	for _, task := range tasks {
		for turn := range byTask[task][0].Turns {
			var requests []engine.Request
			for _, c := range byTask[task] {
				text := ""
				for _, before := range c.Turns[:turn] {
					text += before[0] + "<|assistant|>" + before[1] + "<|endoftext|>"
				}
				r := engine.Request{Prompt: encode(t, n.Text().Tokenizer, text+c.Turns[turn][0]+"<|assistant|>", true), Params: engine.DefaultParams()}
				r.Params.MaxTokens = 64 // as in generation_config.json
				if task == "forced" {
					r.Params.Grammar = sameFields(t, vocabulary, c.Turns[turn][1])
				}
				requests = append(requests, r)
			}
			outs, err := n.Engine().Generate(t.Context(), requests, nil)
			if err != nil {
				t.Fatal(err)
			}
			exact := 0
			for i, c := range byTask[task] {
				got, want := n.Text().Tokenizer.Decode(outs[i].TokenIDs, true), c.Turns[turn][1]
				if got == want && outs[i].FinishReason == engine.FinishStop {
					exact++
				} else {
					t.Logf("%s: %q gives %q (%s), not %q", task, c.Turns[:turn+1], got, outs[i].FinishReason, want)
				}
			}
			what := task + []string{"", " result"}[turn]
			fmt.Fprintf(&score, "\n%-15s %5d of %d exact", what, exact, len(requests))
			if 100*exact < 98*len(requests) {
				t.Errorf("%s: %d of %d exact, want 98 %%", what, exact, len(requests))
			}
		}
	}
	t.Logf("scores:%s", score.String())
}

// member is a member of a JSON answer: its name and its value.
var member = regexp.MustCompile(`"(\w+)": ("\w+"|\d+)`)

// sameFields is the grammar of objects that have the fields of a JSON text, with values of the same types.
func sameFields(t *testing.T, v *grammar.Vocabulary, text string) *grammar.Grammar {
	t.Helper()
	var properties, required []string
	for _, m := range member.FindAllStringSubmatch(text, -1) {
		kind := "integer"
		if strings.HasPrefix(m[2], `"`) {
			kind = "string"
		}
		properties, required = append(properties, fmt.Sprintf(`%q: {"type": %q}`, m[1], kind)), append(required, strconv.Quote(m[1]))
	}
	e, err := schema.Compile(fmt.Appendf(nil, `{"type": "object", "properties": {%s}, "required": [%s], "additionalProperties": false}`,
		strings.Join(properties, ", "), strings.Join(required, ", ")), schema.Options{})
	if err != nil {
		t.Fatal(err)
	}
	g, err := grammar.New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	if !g.Match(text) {
		t.Fatalf("the schema of %s does not have it", text)
	}
	return g
}
