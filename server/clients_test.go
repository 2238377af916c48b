package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/server"
)

const (
	completionsPath = "/v1/completions"
	chatPath        = "/v1/chat/completions"
)

// Messages as clients keep them are accepted when they are sent back: those of OpenAI's parse() and
// stream(), of LiteLLM, and of LiteLLM's hosted_vllm, which makes parts of thinking blocks.
func TestMessagesOfClientsComeBack(t *testing.T) {
	tmpl := &rendered{}
	h := start(t, options{change: func(m *server.Model) { m.Template = tmpl }})
	for _, c := range []struct{ message, extra string }{
		{`{"role": "assistant", "content": "b", "refusal": null, "annotations": null, "audio": null, "function_call": null, "tool_calls": null, "parsed": null}`, ``},
		{`{"role": "assistant", "content": "b", "parsed": {"a": 1}, "annotations": [{"type": "url_citation"}], "id": "msg-1"}`, ``},
		{`{"role": "assistant", "content": "b", "tool_calls": null, "function_call": null, "provider_specific_fields": {"refusal": null}}`, ``},
		{`{"role": "assistant", "content": "b", "reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]}`, `{"reasoning_content":"hm"}`},
		{`{"role": "assistant", "content": "b", "reasoning": "hm"}`, `{"reasoning":"hm","reasoning_content":"hm"}`},
		{`{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm \"", "signature": "x"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}`, `{"reasoning_content":"hm \""}`},
		{`{"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}, "prefix": false, "foo": null}`, ``},
	} {
		h.post(chatPath, `{"max_tokens": 1, "foo": null, "messages": [{"role": "user", "content": "a"}, `+c.message+`, {"role": "user", "content": "c"}]}`)
		var role struct{ Role string }
		if err := json.Unmarshal([]byte(c.message), &role); err != nil {
			t.Fatal(err)
		}
		want := chat.Message{Role: role.Role, Content: "b"}
		if c.extra != "" {
			want.Extra = json.RawMessage(c.extra)
		}
		if got := tmpl.messages[1]; fmt.Sprintf("%s", got) != fmt.Sprintf("%s", want) {
			t.Errorf("%s: %s, want %s", c.message, got, want)
		}
	}
}

// What is known and not done is ignored where it changes nothing, and else refused by its name.
func TestMembers(t *testing.T) {
	h := start(t, options{})
	some := []string{`{"a": [1]}`, `7`, `"x"`, `true`, `[]`}
	for _, m := range server.Members() {
		values := m.Neutral
		if m.Ignored {
			values = some
		}
		for _, v := range append(values, "null") {
			path, body, _ := memberBody(m, v)
			if a := h.send(http.MethodPost, path, body); a.status != http.StatusOK {
				t.Errorf("%s: %d %s", body, a.status, a.body)
			}
		}
		if m.Ignored {
			continue
		}
		path, body, param := memberBody(m, `{"a": "other"}`)
		message, _, gotParam, code := failed(t, h.send(http.MethodPost, path, body))
		if code != "unsupported_parameter" || gotParam != param || !strings.Contains(message, m.Why) {
			t.Errorf("%s: %s of %s: %s", body, code, gotParam, message)
		}
	}
	// The order of requests, and the number of calls, are not ignored in silence.
	for _, body := range []string{
		chatBody("x", `, "priority": 5`), chatBody("x", `, "parallel_tool_calls": false`),
		chatBody("x", `, "service_tier": "flex"`), chatBody("x", `, "verbosity": "low"`),
	} {
		if a := h.send(http.MethodPost, chatPath, body); a.status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	h.post(chatPath, chatBody("x", `, "priority": 0.0, "reasoning_effort": "low"`))
}

// memberBody is a request with a member, and the member's name in errors.
func memberBody(m server.Member, value string) (path, body, param string) {
	pair := fmt.Sprintf(`, %q: %s`, m.Name, value)
	body, param, path = chatBody("1+2=", pair), m.Name, chatPath
	switch m.In {
	case completionsPath:
		body, path = completionBody(`"1+2="`, pair), completionsPath
	case "stream_options":
		body, param = chatBody("1+2=", `, "stream": true, "stream_options": {"include_usage": false`+pair+`}`), "stream_options."+m.Name
	case "messages[]":
		body, param = `{"messages": [{"role": "user", "content": "1+2="`+pair+`}]}`, "messages[0]."+m.Name
	case "messages[].content[]":
		body, param = `{"messages": [{"role": "user", "content": [{"type": "text", "text": "1+2="`+pair+`}]}]}`, "messages[0].content[0]."+m.Name
	}
	return path, body, param
}

// The template gets the effort that a client asks for, unless its own variables have another.
func TestReasoningEffort(t *testing.T) {
	tmpl := &rendered{}
	h := start(t, options{change: func(m *server.Model) { m.Template = tmpl }})
	for more, want := range map[string]any{
		`, "reasoning_effort": "low"`: "low",
		`, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}`: "high",
		``: nil,
	} {
		h.post(chatPath, chatBody("1", more+`, "max_tokens": 1`))
		if got := tmpl.options.Extra["reasoning_effort"]; got != want {
			t.Errorf("%s: %v, want %v", more, got, want)
		}
	}
}

// A stream has a chunk for every token, also for one that is a part of a character.
func TestChunkForEveryToken(t *testing.T) {
	h := start(t, options{})
	id, ok := h.node.Text().Tokenizer.ID("Ã")
	if !ok {
		t.Fatal("no token for the byte c3")
	}
	more := fmt.Sprintf(`, "max_tokens": 8, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "logit_bias": {"%d": 100}`, id)
	for path, body := range map[string]string{completionsPath: completionBody(`"x"`, more), chatPath: chatBody("x", more)} {
		chunks := h.stream(path, body)
		usage := chunks[len(chunks)-1].Usage
		tokens := 0
		for _, c := range chunks {
			if len(c.Choices) == 1 && c.Choices[0].Delta.Role == "" && (path == completionsPath || c.Choices[0].Delta.Content != nil) {
				tokens++
			}
		}
		if usage == nil || usage.CompletionTokens != 8 || tokens != 8 {
			t.Errorf("%s: %d chunks for %+v", path, tokens, usage)
		}
	}
}

// With continuous_usage_stats every chunk has the usage so far.
func TestContinuousUsage(t *testing.T) {
	h := start(t, options{})
	for path, body := range map[string]string{
		completionsPath: completionBody(`["1+2=", "`+ball+`"]`, `, "n": 2`), chatPath: chatBody(ball, ""),
	} {
		body = strings.TrimSuffix(body, "}") + `, "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}`
		chunks := h.stream(path, body)
		last := *chunks[len(chunks)-1].Usage
		before := 0
		for i, c := range chunks {
			u := c.Usage
			if u == nil || u.PromptTokens != last.PromptTokens || u.TotalTokens != u.PromptTokens+u.CompletionTokens || u.CompletionTokens < before || u.CompletionTokens > before+1 {
				t.Fatalf("%s: chunk %d has %+v behind %d tokens, the last %+v", path, i, u, before, last)
			}
			before = u.CompletionTokens
		}
		if before != last.CompletionTokens || before < 7 || len(chunks[len(chunks)-1].Choices) != 0 {
			t.Errorf("%s: %d tokens, want %+v", path, before, last)
		}
		// As with vLLM it is a part of the usage.
		for i, e := range h.events(path, strings.Replace(body, `"include_usage": true`, `"include_usage": false`, 1)) {
			if strings.Contains(e, `"usage"`) {
				t.Errorf("%s: chunk %d is %s", path, i, e)
			}
		}
	}
}

// max_tokens -1 is all that fits.
func TestAllThatFits(t *testing.T) {
	h := start(t, options{})
	for path, body := range map[string]string{
		completionsPath: completionBody(`"1+2="`, `, "max_tokens": -1`), chatPath: chatBody("1+2=", `, "max_completion_tokens": -1`),
	} {
		h.post(path, body)
		if r := h.last(); r.Params.MaxTokens != h.model.MaxModelLen-len(r.Prompt) {
			t.Errorf("%s: %d tokens behind %d of %d", path, r.Params.MaxTokens, len(r.Prompt), h.model.MaxModelLen)
		}
	}
	if a := h.send(http.MethodPost, completionsPath, completionBody(`"x"`, `, "max_tokens": -2`)); a.status != http.StatusBadRequest || !strings.Contains(a.body, "-1 for all that fits") {
		t.Errorf("%d %s", a.status, a.body)
	}
}
