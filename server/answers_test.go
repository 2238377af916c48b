package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/server"
)

const (
	sorting = "sort: t h e m o e ="
	sorted  = "e e h m o t"
	ball    = "Ann gave the red ball to Ben. Who has the ball?"
	ballIs  = "Ben has the red ball."
)

func chatBody(prompt, more string) string {
	return fmt.Sprintf(`{"messages": [{"role": "user", "content": %q}], "temperature": 0%s}`, prompt, more)
}

func completionBody(prompt, more string) string {
	return fmt.Sprintf(`{"prompt": %s, "temperature": 0%s}`, prompt, more)
}

func texts(r reply) []string {
	var all []string
	for _, c := range r.Choices {
		all = append(all, c.Text+c.Message.Content)
	}
	return all
}

func TestCompletions(t *testing.T) { synctest.Test(t, testCompletions) }

func testCompletions(t *testing.T) {
	h := start(t, options{pipes: true})
	ids, err := json.Marshal(encode(t, h.node.Text().Tokenizer, sorting, true))
	if err != nil {
		t.Fatal(err)
	}
	list := fmt.Sprintf("[%s, [1]]", ids)
	for _, c := range []struct {
		prompt, more string
		want         []string
		tokens       int // of all prompts
		finish       string
	}{
		{`"` + sorting + `"`, "", []string{sorted}, 9, "stop"},
		{`"` + sorting + `"`, `, "model": "tiny"`, []string{sorted}, 9, "stop"},
		{`"` + sorting + `"`, `, "echo": true`, []string{sorting + sorted}, 9, "stop"},
		{`"` + sorting + `"`, `, "max_tokens": 2`, []string{"e e"}, 9, "length"},
		{`"` + sorting + `"`, `, "max_tokens": 2.0, "echo": null`, []string{"e e"}, 9, "length"},
		{`"` + sorting + `"`, `, "stop": " m"`, []string{"e e h"}, 9, "stop"},
		{`"` + sorting + `"`, `, "stop": ["x", "h m"], "include_stop_str_in_output": true`, []string{"e e h m"}, 9, "stop"},
		{`"` + sorting + `"`, `, "n": 2, "best_of": 2`, []string{sorted, sorted}, 9, "stop"},
		{`"` + sorting + `"`, `, "ignore_eos": true, "max_tokens": 7, "stop_token_ids": [0]`, []string{sorted}, 9, "stop"},
		{string(ids), "", []string{sorted}, 9, "stop"},
		{string(ids), `, "echo": true`, []string{sorting + sorted}, 9, "stop"},
		{list, `, "echo": true, "max_tokens": 1`, []string{sorting + "e", ""}, 10, "length"},
		{`["` + sorting + `", "1+2=", "` + ball + `"]`, `, "n": 2, "user": "me"`, []string{sorted, sorted, "3", "3", ballIs, ballIs}, 9 + 4 + 13, "stop"},
	} {
		r := decode[reply](t, h.post("/v1/completions", completionBody(c.prompt, c.more)))
		got := texts(r)
		if strings.HasPrefix(c.prompt, "[[") {
			got[1], c.want[1] = "", "" // a prompt outside the forms: any completion will do
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s%s: %q, want %q", c.prompt, c.more, got, c.want)
		}
		if r.Object != "text_completion" || r.Model != "tiny" || !strings.HasPrefix(r.ID, "cmpl-") || r.Created == 0 {
			t.Errorf("%s%s: head %+v", c.prompt, c.more, r)
		}
		for i, ch := range r.Choices {
			if ch.Index != i || ch.FinishReason == nil || *ch.FinishReason != c.finish || ch.LogProbs != nil || ch.TokenIDs != nil {
				t.Errorf("%s%s: choice %d is %+v", c.prompt, c.more, i, ch)
			}
		}
		u := r.Usage
		if u == nil || u.PromptTokens != c.tokens || u.TotalTokens != u.PromptTokens+u.CompletionTokens || u.Details == nil || *u.Details.CachedTokens != 0 {
			t.Errorf("%s%s: usage %+v, want %d tokens of prompt", c.prompt, c.more, u, c.tokens)
		}
	}
	h.idle()
}

func TestChat(t *testing.T) {
	h := start(t, options{})
	for _, c := range []struct{ body, want, finish string }{
		{chatBody(ball, ""), ballIs, "stop"},
		{chatBody(ball, `, "max_tokens": 100, "max_completion_tokens": 2`), "Ben has", "length"},
		{chatBody(ball, `, "stop": " ball"`), "Ben has the red", "stop"},
		{chatBody(ball, `, "response_format": {"type": "text"}, "tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]`), ballIs, "stop"},
		{`{"messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "1+2="},
			{"role": "assistant", "content": "3", "refusal": null, "annotations": []},
			{"role": "user", "name": "Ann", "content": [{"type": "text", "text": "10+20="}]}], "temperature": 0}`, "30", "stop"},
		{`{"messages": [{"role": "user", "content": "reverse: a b"}], "messages": [{"role": "user", "content": "1+1="}], "temperature": 0}`, "2", "stop"},
	} {
		r := decode[reply](t, h.post("/v1/chat/completions", c.body))
		if got := texts(r); !slices.Equal(got, []string{c.want}) {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
		ch := r.Choices[0]
		if r.Object != "chat.completion" || !strings.HasPrefix(r.ID, "chatcmpl-") || ch.Message.Role != "assistant" || *ch.FinishReason != c.finish {
			t.Errorf("%s: %+v", c.body, r)
		}
	}
	// Without max_tokens a completion may fill the context.
	h.post("/v1/chat/completions", chatBody(ball, ""))
	if p := h.last(); p.Params.MaxTokens != h.model.MaxModelLen-len(p.Prompt) {
		t.Errorf("%d prompt tokens and %d completion tokens in a context of %d", len(p.Prompt), p.Params.MaxTokens, h.model.MaxModelLen)
	}
}

// A streamed completion has the same text, tokens and usage as one in one piece.
func TestStreams(t *testing.T) {
	h := start(t, options{})
	for i, c := range []struct{ path, body string }{
		{"/v1/completions", completionBody(`"`+sorting+`"`, "")},
		{"/v1/completions", completionBody(`"`+sorting+`"`, `, "echo": true, "logprobs": null`)},
		{"/v1/completions", completionBody(`"`+sorting+`"`, `, "logprobs": 2`)},
		{"/v1/completions", completionBody(`["`+sorting+`", "`+ball+`", "1+2="]`, `, "n": 3, "max_tokens": 5`)},
		{"/v1/completions", completionBody(`[1, 2, 3]`, `, "ignore_eos": true, "max_tokens": 40, "seed": 3, "temperature": 2`)},
		{"/v1/completions", completionBody(`[[1, 2, 3], [4]]`, `, "ignore_eos": true, "n": 2, "stop": ["e", "t h"], "seed": -4, "temperature": 2`)},
		{"/v1/chat/completions", chatBody(ball, "")},
		{"/v1/chat/completions", chatBody(ball, `, "n": 4, "seed": 7, "temperature": 5, "max_tokens": 30`)},
		{"/v1/chat/completions", chatBody(ball, `, "logprobs": true, "top_logprobs": 3`)},
	} {
		body := strings.TrimSuffix(c.body, "}") + `, "return_token_ids": true`
		whole := decode[reply](t, h.post(c.path, body+"}"))
		for _, withUsage := range []bool{false, true}[i%2:] { // half of them both ways
			chunks := h.stream(c.path, body+fmt.Sprintf(`, "stream": true, "stream_options": {"include_usage": %v, "include_obfuscation": false}}`, withUsage))
			joined := join(t, chunks, len(whole.Choices), strings.HasPrefix(c.path, "/v1/chat"))
			if (joined.Usage != nil) != withUsage || withUsage && (joined.Usage.PromptTokens != whole.Usage.PromptTokens || joined.Usage.TotalTokens != whole.Usage.TotalTokens) {
				t.Errorf("%s: usage %+v, want %+v", body, joined.Usage, whole.Usage)
			}
			if !slices.Equal(joined.PromptTokenIDs, whole.PromptTokenIDs) {
				t.Errorf("%s: prompt %v, want %v", body, joined.PromptTokenIDs, whole.PromptTokenIDs)
			}
			for i, want := range whole.Choices {
				got := joined.Choices[i]
				if got.Text != want.Text+want.Message.Content || !slices.Equal(got.TokenIDs, want.TokenIDs) || *got.FinishReason != *want.FinishReason || !slices.Equal(got.PromptTokenIDs, want.PromptTokenIDs) {
					t.Errorf("%s: choice %d is %q %v, want %q %v", body, i, got.Text, got.TokenIDs, want.Text+want.Message.Content, want.TokenIDs)
				}
				a, b := fmt.Sprintf("%+v", got.LogProbs), fmt.Sprintf("%+v", want.LogProbs)
				if a != b {
					t.Errorf("%s: log-probabilities %s, want %s", body, a, b)
				}
			}
		}
	}
}

// Who asks for the usage of a stream has the member in every chunk, as with OpenAI.
func TestUsageIsNull(t *testing.T) {
	h := start(t, options{})
	for path, body := range map[string]string{"/v1/completions": completionBody(`"1+2="`, ""), "/v1/chat/completions": chatBody("1+2=", "")} {
		for _, asked := range []bool{false, true} {
			events := h.events(path, strings.TrimSuffix(body, "}")+fmt.Sprintf(`, "stream": true, "stream_options": {"include_usage": %v}}`, asked))
			for i, e := range events {
				_, there := decode[map[string]any](t, e)["usage"]
				if null := strings.HasSuffix(e, `"usage":null}`); there != asked || null != (asked && i < len(events)-1) {
					t.Errorf("%s, asked for %v: chunk %d is %s", path, asked, i, e)
				}
			}
		}
	}
}

// join puts the chunks of a stream together and checks their order.
func join(t *testing.T, chunks []reply, n int, isChat bool) reply {
	t.Helper()
	all := reply{Choices: make([]choice, n)}
	for i, r := range chunks {
		if r.ID != chunks[0].ID || r.Created != chunks[0].Created || r.Model != "tiny" || isChat != (r.Object == "chat.completion.chunk") {
			t.Errorf("chunk %d: head %+v", i, r)
		}
		if all.Usage != nil {
			t.Errorf("chunk %d comes behind the usage", i)
		}
		all.Usage = r.Usage
		all.PromptTokenIDs = append(all.PromptTokenIDs, r.PromptTokenIDs...)
		if r.Usage != nil && len(r.Choices) > 0 {
			t.Errorf("chunk %d has usage and choices", i)
		}
		for _, c := range r.Choices {
			sum := &all.Choices[c.Index]
			if sum.FinishReason != nil {
				t.Errorf("chunk %d: choice %d had ended", i, c.Index)
			}
			if first := sum.Delta.Role == ""; isChat && first != (c.Delta.Role == "assistant") {
				t.Errorf("chunk %d: role %q", i, c.Delta.Role)
			}
			sum.Delta.Role = "assistant"
			sum.Text += c.Text
			if c.Delta.Content != nil {
				sum.Text += *c.Delta.Content
			}
			sum.TokenIDs = append(sum.TokenIDs, c.TokenIDs...)
			sum.PromptTokenIDs = append(sum.PromptTokenIDs, c.PromptTokenIDs...)
			sum.FinishReason = c.FinishReason
			if l := c.LogProbs; l != nil {
				if sum.LogProbs == nil {
					sum.LogProbs = &logProbs{}
				}
				s := sum.LogProbs
				s.Tokens, s.TokenLogProbs = append(s.Tokens, l.Tokens...), append(s.TokenLogProbs, l.TokenLogProbs...)
				s.TopLogProbs, s.TextOffset = append(s.TopLogProbs, l.TopLogProbs...), append(s.TextOffset, l.TextOffset...)
				s.Content = append(s.Content, l.Content...)
			}
		}
	}
	for i, c := range all.Choices {
		if c.FinishReason == nil {
			t.Errorf("choice %d has no end", i)
		}
	}
	return all
}

// Everything that a body may say reaches the engine.
func TestParameters(t *testing.T) {
	h := start(t, options{})
	defaults := engine.Params{MaxTokens: 16, Temperature: 1, TopP: 1, RepetitionPenalty: 1, N: 1}
	for _, c := range []struct {
		body string
		set  func(*engine.Params)
	}{
		{`"seed": 1`, func(p *engine.Params) { p.Seed = 1 }},
		{`"seed": -1`, func(p *engine.Params) { p.Seed = math.MaxUint64 }},
		{`"seed": 9223372036854775807`, func(p *engine.Params) { p.Seed = math.MaxInt64 }},
		{`"max_tokens": 3, "min_tokens": 2`, func(p *engine.Params) { p.MaxTokens, p.MinTokens = 3, 2 }},
		{`"temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_p": 0.125`, func(p *engine.Params) {
			p.Temperature, p.TopP, p.TopK, p.MinP = 0.5, 0.25, 5, 0.125
		}},
		{`"top_k": -1, "temperature": null`, func(*engine.Params) {}},
		{`"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2e0`, func(p *engine.Params) {
			p.RepetitionPenalty, p.PresencePenalty, p.FrequencyPenalty = 1.5, -1, 2
		}},
		{`"logit_bias": {"1": -100, "543": 2.5}`, func(p *engine.Params) { p.LogitBias = map[int32]float32{1: -100, 543: 2.5} }},
		{`"stop": "é\n"`, func(p *engine.Params) { p.Stop = []string{"é\n"} }},
		{`"stop": ["a", "b"], "include_stop_str_in_output": true`, func(p *engine.Params) { p.Stop, p.IncludeStop = []string{"a", "b"}, true }},
		{`"stop": []`, func(p *engine.Params) { p.Stop = []string{} }},
		{`"stop_token_ids": [3, 4], "ignore_eos": true`, func(p *engine.Params) { p.StopIDs, p.IgnoreEOS = []int32{3, 4}, true }},
		{`"logprobs": 0`, func(p *engine.Params) { p.LogProbs = true }},
		{`"logprobs": 20`, func(p *engine.Params) { p.LogProbs, p.TopLogProbs = true, 20 }},
		{`"n": 3`, func(p *engine.Params) { p.N = 3 }},
		{`"max_tokens": 252`, func(p *engine.Params) { p.MaxTokens = 252 }},
		{`"user": {}, "metadata": 1, "store": [], "service_tier": "default", "use_beam_search": false, "suffix": "", "echo": false`, func(*engine.Params) {}},
	} {
		h.post("/v1/completions", `{"prompt": "1+2=", `+c.body+`}`)
		want, got := defaults, h.last().Params
		if c.set(&want); !strings.Contains(c.body, "seed") {
			want.Seed = got.Seed // drawn
		}
		if a, b := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); a != b {
			t.Errorf("%s: %s, want %s", c.body, a, b)
		}
	}
	h.post("/v1/chat/completions", `{"messages": [{"role": "user", "content": "1+2="}], "logprobs": true, "top_logprobs": 4, "max_completion_tokens": 9}`)
	if p := h.last().Params; !p.LogProbs || p.TopLogProbs != 4 || p.MaxTokens != 9 {
		t.Errorf("chat: %+v", p)
	}
	// The other forms of a chat end where it does.
	for path, body := range map[string]string{
		responsesPath: `"input": "1+2=", "stop": ["a"], "max_output_tokens": 9`,
		messagesPath:  `"messages": [{"role": "user", "content": "1+2="}], "stop_sequences": ["a"], "max_tokens": 9`,
	} {
		h.post(path, `{`+body+`, "min_tokens": 2, "stop_token_ids": [3, 4], "include_stop_str_in_output": true, "ignore_eos": true}`)
		want := defaults
		want.MaxTokens, want.MinTokens, want.Stop, want.StopIDs, want.IncludeStop, want.IgnoreEOS = 9, 2, []string{"a"}, []int32{3, 4}, true, true
		got := h.last().Params
		want.Seed = got.Seed
		if a, b := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); a != b {
			t.Errorf("%s: %s, want %s", path, a, b)
		}
	}
	// Two requests that do not ask for a seed have different ones.
	first := h.last().Params.Seed
	h.post("/v1/completions", `{"prompt": "1+2="}`)
	if h.last().Params.Seed == first {
		t.Error("two requests have the same seed")
	}
}

func TestLogProbs(t *testing.T) {
	h := start(t, options{})
	r := decode[reply](t, h.post("/v1/chat/completions", chatBody(ball, `, "logprobs": true, "top_logprobs": 5`)))
	l := r.Choices[0].LogProbs
	if l == nil || len(l.Content) != r.Usage.CompletionTokens {
		t.Fatalf("%+v for %d tokens", l, r.Usage.CompletionTokens)
	}
	var text []byte
	for i, c := range l.Content {
		if len(c.Top) != 5 || c.Top[0].Token != c.Token || c.Top[0].LogProb != c.LogProb || c.LogProb > 0 {
			t.Errorf("greedy token %d is %+v, of %+v", i, c.logProb, c.Top)
		}
		sum := 0.0
		for k, top := range c.Top {
			sum += math.Exp(top.LogProb)
			if k > 0 && top.LogProb > c.Top[k-1].LogProb {
				t.Errorf("token %d: %+v is not in order", i, c.Top)
			}
		}
		if sum > 1.0001 {
			t.Errorf("token %d: probabilities of %v together", i, sum)
		}
		for _, b := range c.Bytes {
			text = append(text, byte(b))
		}
	}
	if string(text) != ballIs+"<|endoftext|>" {
		t.Errorf("the tokens' bytes are %q", text)
	}

	r = decode[reply](t, h.post("/v1/completions", completionBody(`"`+sorting+`"`, `, "logprobs": 3`)))
	l = r.Choices[0].LogProbs
	n := r.Usage.CompletionTokens
	if l == nil || len(l.Tokens) != n || len(l.TokenLogProbs) != n || len(l.TopLogProbs) != n || len(l.TextOffset) != n {
		t.Fatalf("%+v for %d tokens", l, n)
	}
	for i, token := range l.Tokens {
		if !strings.HasPrefix((sorted + "<|endoftext|>")[l.TextOffset[i]:], token) {
			t.Errorf("token %d is %q at %d", i, token, l.TextOffset[i])
		}
		if len(l.TopLogProbs[i]) != 3 || l.TopLogProbs[i][token] != l.TokenLogProbs[i] {
			t.Errorf("token %d, %q: %v of %v", i, token, l.TokenLogProbs[i], l.TopLogProbs[i])
		}
	}
	// The sampled token is there even if it is not among the likeliest, and so is one
	// that is half a character.
	id, ok := h.node.Text().Tokenizer.ID("Ã")
	if !ok {
		t.Fatal("no token for the byte c3")
	}
	for path, body := range map[string]string{"/v1/completions": `{"prompt": "1+2=", "logprobs": 1`, "/v1/chat/completions": `{"messages": [{"role": "user", "content": "1+2="}], "logprobs": true, "top_logprobs": 1`} {
		r = decode[reply](t, h.post(path, fmt.Sprintf(`%s, "max_tokens": 1, "logit_bias": {"%d": 100}, "temperature": 0}`, body, id)))
		l = r.Choices[0].LogProbs
		if path == "/v1/completions" {
			if l.Tokens[0] != `bytes:\xc3` || len(l.TopLogProbs[0]) != 2 || l.TopLogProbs[0]["3"] < -0.1 || l.TokenLogProbs[0] > -1 {
				t.Errorf("%+v", l)
			}
		} else if c := l.Content[0]; c.Token != `bytes:\xc3` || !slices.Equal(c.Bytes, []int{0xc3}) || c.Top[0].Token != "3" {
			t.Errorf("%+v", l)
		}
		if got := texts(r)[0]; got != "\uFFFD" {
			t.Errorf("text %q", got)
		}
	}
}

func TestTokenize(t *testing.T) {
	h := start(t, options{})
	type tokens struct {
		Count       int
		MaxModelLen int `json:"max_model_len"`
		Tokens      []int32
		Strs        []string `json:"token_strs"`
	}
	for _, c := range []struct {
		body, text string
		strs       bool
	}{
		{`{"prompt": "1+2="}`, "1+2=", false},
		{`{"prompt": "a é 中", "add_special_tokens": false, "return_token_strs": true, "model": "tiny"}`, "a é 中", true},
		{`{"prompt": ""}`, "", false},
		{`{"messages": [{"role": "user", "content": " 1+2= "}]}`, "<|user|>1+2=<|assistant|>", false},
		{`{"messages": [{"role": "user", "content": "1+2="}], "add_generation_prompt": false, "return_token_strs": true}`, "<|user|>1+2=", true},
	} {
		body := h.post("/tokenize", c.body)
		got := decode[tokens](t, body)
		if got.Count != len(got.Tokens) || got.MaxModelLen != h.model.MaxModelLen || (len(got.Strs) == got.Count && got.Count > 0) != c.strs || strings.Contains(body, `"tokens":null`) {
			t.Errorf("%s: %s", c.body, body)
		}
		if text := h.node.Text().Tokenizer.Decode(got.Tokens, false); text != c.text {
			t.Errorf("%s: %q", c.body, text)
		}
		ids, err := json.Marshal(got.Tokens)
		if err != nil {
			t.Fatal(err)
		}
		if back := decode[map[string]string](t, h.post("/detokenize", fmt.Sprintf(`{"tokens": %s}`, ids))); back["prompt"] != c.text || len(back) != 1 {
			t.Errorf("%s: back as %q", c.body, back)
		}
	}
}

func TestModels(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) { m.Names = []string{"org/tiny"} }})
	const model = `{"id":"org/tiny","object":"model","created":1,"owned_by":"moeserve","max_model_len":256}`
	for path, want := range map[string]string{
		"/v1/models":            `{"object":"list","data":[` + model + `]}`,
		"/v1/models/org/tiny":   model,
		"/v1/models/org%2Ftiny": model,
	} {
		if got := h.send(http.MethodGet, path, ""); got.status != http.StatusOK || strings.TrimSpace(got.body) != want {
			t.Errorf("%s: %d %s, want %s", path, got.status, got.body, want)
		}
	}
}

// rendered is a template that writes all it is given.
type rendered struct {
	messages []chat.Message
	options  chat.Options
}

func (r *rendered) Render(_ context.Context, messages []chat.Message, o chat.Options) (chat.Prompt, error) {
	r.messages, r.options = messages, o
	return chat.Prompt{Text: fmt.Sprint("1+2=", len(o.Tools))}, nil
}

// What a template is given: tools, and messages with all their members.
func TestTemplateInput(t *testing.T) {
	tmpl := &rendered{}
	h := start(t, options{change: func(m *server.Model) { m.Template = tmpl }})
	h.post("/v1/chat/completions", `{"messages": [
		{"role": "developer", "content": "x"},
		{"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}]},
		{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
		"chat_template_kwargs": {"enable_thinking": false}, "max_tokens": 1, "tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": true}`)
	want := []chat.Message{
		{Role: "developer", Content: "x"},
		{Role: "assistant", Extra: json.RawMessage(`{"reasoning_content":"hm","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{"b": 1, "a": 2}}}]}`)},
		{Role: "tool", Content: "a\nb", Parts: json.RawMessage(`[{"type": "text", "text": "a"},{"type": "text", "text": "b"}]`), Extra: json.RawMessage(`{"tool_call_id":"1","name":"f"}`)},
	}
	if got := fmt.Sprintf("%s", tmpl.messages); got != fmt.Sprintf("%s", want) {
		t.Errorf("%s, want %s", got, want)
	}
	if o := tmpl.options; !o.AddGenerationPrompt || o.Tools != nil || string(o.Extra.Get("enable_thinking")) != "false" {
		t.Errorf("%+v", o)
	}
	h.post("/v1/chat/completions", chatBody("1", `, "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}]`))
	if got := h.node.Text().Tokenizer.Decode(h.last().Prompt, false); got != "1+2=49" {
		t.Errorf("prompt %q", got)
	}
}

// A model without tokenizer completes token IDs with token IDs, and refuses all else with the reason.
func TestWithoutTokenizer(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) { m.Tokenizer, m.Template = nil, nil }})
	ids, err := json.Marshal(encode(t, h.node.Text().Tokenizer, sorting, true))
	if err != nil {
		t.Fatal(err)
	}
	r := decode[reply](t, h.post("/v1/completions", completionBody(string(ids), `, "return_token_ids": true, "logprobs": 1`)))
	if got := h.node.Text().Tokenizer.Decode(r.Choices[0].TokenIDs, true); got != sorted {
		t.Errorf("%q", got)
	}
	if l := r.Choices[0].LogProbs; l.Tokens[0] != fmt.Sprintf("token_id:%d", r.Choices[0].TokenIDs[0]) {
		t.Errorf("%+v", l)
	}
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt": "x"}`, "/v1/chat/completions": chatBody("x", ""), "/tokenize": `{"prompt": "x"}`, "/detokenize": `{"tokens": [1]}`,
	} {
		if a := h.send(http.MethodPost, path, body); a.status != http.StatusBadRequest || !strings.Contains(a.body, "no tokenizer") && !strings.Contains(a.body, "no chat template") {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
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

// TestTextOffset: text_offset is where a token's text begins in the choice's text, also behind characters of
// several tokens.
func TestTextOffset(t *testing.T) {
	h := start(t, options{})
	for _, body := range []string{
		`{"prompt": "1+2=", "max_tokens": 40, "temperature": 0, "logprobs": 0, "structured_outputs": {"choice": ["é😀 xyz"]}}`,
		`{"prompt": "1+2=é😀", "max_tokens": 40, "temperature": 0, "echo": true, "logprobs": 0, "structured_outputs": {"choice": ["é😀 xyz"]}}`,
	} {
		r := decode[reply](t, h.post("/v1/completions", body))
		c := r.Choices[0]
		text := []rune(c.Text)
		for i, tok := range c.LogProbs.Tokens {
			at := c.LogProbs.TextOffset[i]
			if strings.HasPrefix(tok, "bytes:") || tok == "" || strings.HasPrefix(tok, "<") {
				continue
			}
			if at > len(text) || !strings.HasPrefix(string(text[at:]), tok) {
				t.Errorf("token %d, %q, has text_offset %d in %q", i, tok, at, c.Text)
			}
		}
	}
}
