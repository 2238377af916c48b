package eval_test

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/eval"
)

func TestReadPrompts(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     []string
		err      string
	}{
		{"MT-Bench", `{"question_id": 81, "turns": ["a", "b"]}` + "\n" + `{"turns": ["c"]}`, []string{"a", "c"}, ""},
		{"MT-Bench-101", `{"history": [{"user": "u", "bot": "v"}, {"user": "w", "bot": "x"}]}` + "\n\n", []string{"u"}, ""},
		{"blank lines", "\n  \n" + `{"turns": ["a"]}` + "\r\n", []string{"a"}, ""},
		{"broken", `{"turns": ["a"]}` + "\n\n" + `{"turns": ["a"`, nil, "file: line 3: not a JSON object of MT-Bench: it is not JSON: it ends too early"},
		{"an array", `["a"]`, nil, "file: line 1: not a JSON object"},
		{"other keys", `{"prompt": "a"}`, nil, `file: line 1: it has neither "turns"`},
		{"no turns", `{"turns": []}`, nil, `file: line 1: its "turns" is empty`},
		{"no history", `{"history": []}`, nil, `file: line 1: its "history" is empty`},
		{"null for turns", `{"turns": null}`, nil, `file: line 1: it has neither "turns"`},
		{"an empty turn", `{"turns": ["", "b"]}`, nil, "file: line 1: its first turn is empty"},
		{"a wrong kind", `{"turns": [5]}`, nil, "file: line 1: not a JSON object of MT-Bench"},
		{"nothing", "\n", nil, "file has no prompts"},
		{"endless", `{"turns": ["` + strings.Repeat("a", 17<<20), nil, "file: line 1 exceeds the maximum of 16 MiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := eval.ReadPrompts(strings.NewReader(c.in), "file")
			if c.err == "" {
				if err != nil || !reflect.DeepEqual(got, c.want) {
					t.Errorf("%q, %v", got, err)
				}
				return
			}
			if !errors.Is(err, eval.ErrInput) || !strings.HasPrefix(err.Error(), c.err) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want %s", err, c.err)
			}
		})
	}
}

func FuzzReadPrompts(f *testing.F) {
	for _, s := range []string{`{"turns": ["a", "b"]}`, `{"history": [{"user": "u"}]}`, "{}\n[]", `{"turns": null}`, "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		prompts, err := eval.ReadPrompts(strings.NewReader(in), "file")
		if err != nil && !errors.Is(err, eval.ErrInput) {
			t.Errorf("%v", err)
		}
		if (err == nil) != (len(prompts) > 0) {
			t.Errorf("%d prompts, %v", len(prompts), err)
		}
		for _, p := range prompts {
			if p == "" {
				t.Error("an empty prompt")
			}
		}
	})
}

// The published files read whole.
func TestMTBench(t *testing.T) {
	dir := os.Getenv("MOESERVE_TESTDATA")
	if dir == "" {
		t.Skip("MOESERVE_TESTDATA is not set: MT-Bench is not part of this repository")
	}
	for name, want := range map[string]int{"question.jsonl": 80, "mtbench101.jsonl": 1388} {
		f, err := os.Open(filepath.Join(dir, "mtbench", name))
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := eval.ReadPrompts(f, name)
		if err != nil || len(prompts) != want {
			t.Errorf("%s: %d prompts, %v", name, len(prompts), err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestPromptLength(t *testing.T) {
	if low, high := eval.PromptLength(0), eval.PromptLength(1); low != 9 || high != 418 {
		t.Errorf("from %d to %d tokens, want 9 to 418", low, high)
	}
	if median := eval.PromptLength(0.5); median != 47 {
		t.Errorf("a median of %d tokens, want 47", median)
	}
	last := 0
	for i := range 101 {
		n := eval.PromptLength(float64(i) / 100)
		if n < last {
			t.Errorf("quantile %d: %d tokens after %d", i, n, last)
		}
		last = n
	}
}

func TestGeneratePrompts(t *testing.T) {
	for _, count := range []int{1, 64, 324, 4536} {
		prompts := eval.GeneratePrompts(count, 0, 50, 7)
		tokens, longest := 0, 0
		for _, p := range prompts {
			tokens += len(p)
			longest = max(longest, len(p))
			for _, id := range p {
				if id < 0 || id >= 50 {
					t.Fatalf("id %d", id)
				}
			}
		}
		mean := float64(tokens) / float64(count)
		if count >= 64 && math.Abs(mean-77) > 1 || longest > 418 {
			t.Errorf("%d prompts: %.1f tokens on average, %d at most", count, mean, longest)
		}
		if !reflect.DeepEqual(prompts, eval.GeneratePrompts(count, 0, 50, 7)) {
			t.Errorf("%d prompts: others the second time", count)
		}
	}
	if reflect.DeepEqual(eval.GeneratePrompts(8, 0, 50, 1), eval.GeneratePrompts(8, 0, 50, 2)) {
		t.Error("two seeds give the same prompts")
	}
	for _, p := range eval.GeneratePrompts(5, 12, 50, 1) {
		if len(p) != 12 {
			t.Errorf("a prompt of %d tokens, want 12", len(p))
		}
	}
}

func TestRepeat(t *testing.T) {
	prompts := [][]int32{{1}, {2, 3, 4}, {5, 6}}
	got, cut := eval.Repeat(prompts, 5, 2)
	if want := [][]int32{{1}, {2, 3}, {5, 6}, {1}, {2, 3}}; !reflect.DeepEqual(got, want) || cut != 2 {
		t.Errorf("%v, %d cut", got, cut)
	}
	if blocks, longest := eval.Room(got, 15, 16); blocks != 1+2+2+1+2 || longest != 17 {
		t.Errorf("%d blocks, longest %d", blocks, longest)
	}
}
