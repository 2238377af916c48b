package engine_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// question is a line of the built-in model's test set.
type question struct{ Task, Prompt, Answer string }

// questions reads the first n of each task.
func questions(t *testing.T, n int) (tasks []string, byTask map[string][]question) {
	t.Helper()
	f, err := os.Open("../models/tiny/testdata/eval.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read from
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	byTask = map[string][]question{}
	lines := bufio.NewScanner(z)
	for lines.Scan() {
		var q question
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		if byTask[q.Task] == nil {
			tasks = append(tasks, q.Task)
		}
		if len(byTask[q.Task]) < n {
			byTask[q.Task] = append(byTask[q.Task], q)
		}
	}
	if err := lines.Err(); err != nil || len(tasks) != 5 {
		t.Fatalf("test set: %d tasks, %v", len(tasks), err)
	}
	return tasks, byTask
}

// TestBuiltInModelScore asks the built-in model unseen prompts of every task, half
// its experts offloaded. MOESERVE_SCORE is how many of each; the test set has
// 1,000.
func TestBuiltInModelScore(t *testing.T) {
	count := 24
	if v := os.Getenv("MOESERVE_SCORE"); v != "" {
		var err error
		if count, err = strconv.Atoi(v); err != nil || count < 1 {
			t.Fatalf("MOESERVE_SCORE is %q: give a number of prompts", v)
		}
	}
	s := configs.Defaults()
	s.Offload.Fraction = 0.5
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	tasks, byTask := questions(t, count)
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
