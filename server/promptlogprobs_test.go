package server_test

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// of the log-probability of token id at a row of logits, and its rank.
func ofRow(logits []float32, id int) (logProb float64, rank int) {
	largest, sum := slices.Max(logits), 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v - largest))
		if v >= logits[id] {
			rank++
		}
	}
	return float64(logits[id]-largest) - math.Log(sum), rank
}

// echoed are the log-probabilities of a completion with echo.
type echoed struct {
	Choices []struct {
		Text         string
		FinishReason string `json:"finish_reason"`
		LogProbs     struct {
			Tokens        []string
			TokenLogProbs []*float64           `json:"token_logprobs"`
			TopLogProbs   []map[string]float64 `json:"top_logprobs"`
			TextOffset    []int                `json:"text_offset"`
		}
		PromptLogProbs []map[string]struct {
			LogProb      float64
			Rank         int
			DecodedToken string `json:"decoded_token"`
		} `json:"prompt_logprobs"`
	}
	PromptLogProbs []map[string]struct{ LogProb float64 } `json:"prompt_logprobs"`
	Usage          struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
	}
}

// TestPromptLogProbs holds what a server says of prompts to the reference's logits: as vLLM's
// prompt_logprobs, and as OpenAI's echo with logprobs, which evaluations of likelihood use.
func TestPromptLogProbs(t *testing.T) {
	s := configs.Defaults()
	s.Model.Name = fixtures.Dir(t, "qwen3_moe")
	o := options{}
	o.node.Settings = s
	h := start(t, o)
	expected := fixtures.Load(t, "qwen3_moe")
	for turn := range 2 { // the second finds the prompts in the prefix cache
		for _, p := range expected.Prompts {
			list, err := json.Marshal(p.IDs)
			if err != nil {
				t.Fatal(err)
			}
			var a echoed
			h.ok(t, "/v1/completions", fmt.Sprintf(`{"prompt": %s, "echo": true, "logprobs": 2, "max_tokens": %d, "prompt_logprobs": 3, "ignore_eos": true, "temperature": 0}`, list, turn), &a)
			l, ranked := a.Choices[0].LogProbs, a.Choices[0].PromptLogProbs
			if n := len(p.IDs) + turn; len(l.Tokens) != n || len(l.TokenLogProbs) != n || len(l.TopLogProbs) != n || len(l.TextOffset) != n || len(ranked) != len(p.IDs) {
				t.Fatalf("%d tokens: %+v", len(p.IDs), a)
			}
			if l.TokenLogProbs[0] != nil || l.TopLogProbs[0] != nil || ranked[0] != nil || a.Choices[0].FinishReason != "length" || a.Usage.CompletionTokens != turn || a.Usage.PromptTokens != len(p.IDs) {
				t.Errorf("%d tokens: %+v", len(p.IDs), a)
			}
			for i, id := range p.IDs[1:] {
				want, rank := ofRow(p.Logits[i*expected.Vocab:][:expected.Vocab], id)
				own := ranked[i+1][fmt.Sprint(id)]
				if got := *l.TokenLogProbs[i+1]; math.Abs(got-want) > 2e-3 || got != own.LogProb || math.Abs(float64(own.Rank-rank)) > 3 {
					t.Errorf("turn %d, position %d of %d: log-probability %g and %+v, the reference has %g and rank %d", turn, i+1, len(p.IDs), got, own, want, rank)
				}
				if n := len(ranked[i+1]); n != 3 && n != 4 || n == 4 && own.Rank <= 3 {
					t.Errorf("position %d: %d tokens, the prompt's has rank %d", i+1, n, own.Rank)
				}
				most := math.Inf(-1)
				for _, o := range ranked[i+1] {
					most = max(most, o.LogProb)
				}
				for _, lp := range l.TopLogProbs[i+1] {
					if lp > most {
						t.Errorf("position %d: %v has more than the most probable token, %g", i+1, l.TopLogProbs[i+1], most)
					}
				}
			}
			if strings.Join(l.Tokens, "") != "" && !slices.IsSorted(l.TextOffset) {
				t.Errorf("offsets %v", l.TextOffset)
			}
		}
	}

	var a echoed
	h.ok(t, "/v1/chat/completions", `{"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "max_tokens": 1}`, &a)
	if n := len(a.PromptLogProbs); n != a.Usage.PromptTokens || a.PromptLogProbs[0] != nil || len(a.PromptLogProbs[1]) != 1 {
		t.Errorf("of a chat's prompt: %+v", a)
	}

	// The text of the prompt, then that of the completion: as much as the offsets say.
	a = echoed{}
	h.ok(t, "/v1/completions", `{"prompt": ["one two three", "four"], "echo": true, "logprobs": 0, "max_tokens": 2, "n": 2, "ignore_eos": true}`, &a)
	for i, c := range a.Choices {
		prompt := []string{"one two three", "four"}[i/2]
		l := c.LogProbs
		n := len(l.Tokens) - 2
		if !strings.HasPrefix(c.Text, prompt) || l.TextOffset[n] != len(prompt) || strings.Join(l.Tokens[:n], "") != prompt || l.TopLogProbs[0] != nil {
			t.Errorf("choice %d: %+v", i, c)
		}
		for k, token := range l.Tokens[:n] {
			if !strings.HasPrefix(prompt[l.TextOffset[k]:], token) {
				t.Errorf("token %q at %d of %q", token, l.TextOffset[k], prompt)
			}
		}
	}

	// A stream begins with what a whole response begins with.
	for _, most := range []int{0, 2} {
		body := fmt.Sprintf(`{"prompt": "one two three", "echo": true, "logprobs": 1, "max_tokens": %d, "ignore_eos": true, "temperature": 0`, most)
		var whole, sum echoed
		h.ok(t, "/v1/completions", body+`}`, &whole)
		for i, e := range h.events("/v1/completions", body+`, "stream": true}`) {
			c := decode[echoed](t, e).Choices[0]
			if i == 0 {
				sum.Choices = append(sum.Choices, c)
				continue
			}
			all := &sum.Choices[0]
			all.Text, all.FinishReason = all.Text+c.Text, c.FinishReason
			all.LogProbs.Tokens = append(all.LogProbs.Tokens, c.LogProbs.Tokens...)
			all.LogProbs.TokenLogProbs = append(all.LogProbs.TokenLogProbs, c.LogProbs.TokenLogProbs...)
			all.LogProbs.TopLogProbs = append(all.LogProbs.TopLogProbs, c.LogProbs.TopLogProbs...)
			all.LogProbs.TextOffset = append(all.LogProbs.TextOffset, c.LogProbs.TextOffset...)
		}
		if d := cmp.Diff(whole.Choices, sum.Choices); d != "" {
			t.Errorf("streamed, %d tokens: %s", most, d)
		}
	}

	for body, param := range map[string]string{
		`{"prompt": "x", "prompt_logprobs": 21}`:                "prompt_logprobs",
		`{"prompt": "x", "prompt_logprobs": -1}`:                "prompt_logprobs",
		`{"prompt": "x", "prompt_logprobs": 1, "stream": true}`: "prompt_logprobs",
		`{"prompt": "x", "max_tokens": -2}`:                     "max_tokens",
		`{"prompt": "x", "allowed_token_ids": []}`:              "allowed_token_ids",
		`{"prompt": "x", "allowed_token_ids": [100000]}`:        "allowed_token_ids",
		`{"prompt": "x", "bad_words": "x"}`:                     "bad_words",
		`{"prompt": "x", "bad_words": [1]}`:                     "bad_words[0]",
		`{"prompt": "x", "bad_words": [" "]}`:                   "bad_words",
		`{"prompt": "x", "use_beam_search": true}`:              "use_beam_search",
		`{"prompt": "x", "best_of": 2}`:                         "best_of",
	} {
		if got := h.refused(t, "/v1/completions", body); got != param {
			t.Errorf("%s: refused is %q", body, got)
		}
	}
	if got := h.refused(t, "/v1/chat/completions", `{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}`); got != "max_tokens" {
		t.Errorf("a chat without tokens: %q", got)
	}
}

// ok posts a body and decodes the response.
func (h *harness) ok(t *testing.T, path, body string, to any) {
	t.Helper()
	if err := json.Unmarshal([]byte(h.post(path, body)), to); err != nil {
		t.Fatal(err)
	}
}

// refused posts a body that is refused, and returns the member that is wrong.
func (h *harness) refused(t *testing.T, path, body string) string {
	t.Helper()
	var e struct{ Error struct{ Param string } }
	res := h.send(http.MethodPost, path, body)
	if err := json.Unmarshal([]byte(res.body), &e); err != nil || res.status != 400 {
		t.Errorf("%s %s: status %d: %s", path, body, res.status, res.body)
	}
	return e.Error.Param
}

// TestBans bans words in both forms, and allows tokens.
func TestBans(t *testing.T) {
	h := start(t, options{})
	tok := h.node.Text().Tokenizer
	h.send(http.MethodPost, "/v1/completions", completionBody(`"`+ball+`"`, `, "bad_words": ["red", " to the"], "max_tokens": 4`))
	want := [][]int32{encode(t, tok, "red", false)}
	if spaced := encode(t, tok, " red", false); len(spaced) == len(want[0]) && spaced[0] != want[0][0] {
		want = append(want, spaced)
	}
	if got := h.last().Params.BadWords; len(got) < len(want)+1 || !slices.EqualFunc(got[:len(want)], want, slices.Equal) {
		t.Errorf("bad words are %v, want %v and those of another", got, want)
	}
	var a struct{ Choices []struct{ Text string } }
	h.ok(t, "/v1/completions", completionBody(`"`+ball+`"`, `, "bad_words": ["red"]`), &a)
	if strings.Contains(a.Choices[0].Text, "red") {
		t.Errorf("%q has a bad word", a.Choices[0].Text)
	}
	three := encode(t, tok, "3", false)
	h.ok(t, "/v1/completions", completionBody(`"`+ball+`"`, fmt.Sprintf(`, "allowed_token_ids": [%d], "max_tokens": 3, "ignore_eos": true`, three[len(three)-1])), &a)
	if a.Choices[0].Text != "333" {
		t.Errorf("%q, where only 3 is allowed", a.Choices[0].Text)
	}
	if p := h.last().Params; p.PromptLogProbs || p.MaxTokens != 3 || !slices.Equal(p.AllowedIDs, three[len(three)-1:]) {
		t.Errorf("%+v", p)
	}
}

func TestTokenizerInfo(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) {
		m.TokenizerConfig = []byte(`{"tokenizer_class": "T", "eos_token": {"content": "</s>", "lstrip": false}, "bos_token": "<s>"}`)
	}})
	var info map[string]any
	if err := json.Unmarshal([]byte(h.send(http.MethodGet, "/tokenizer_info", "").body), &info); err != nil {
		t.Fatal(err)
	}
	if info["tokenizer_class"] != "T" || info["eos_token"] != "</s>" || info["bos_token"] != "<s>" || info["pad_token"] != nil || !strings.Contains(fmt.Sprint(info["chat_template"]), "messages") {
		t.Errorf("%v", info)
	}
}
