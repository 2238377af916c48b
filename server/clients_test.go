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
		want := chat.Message{Role: role.Role, Content: "b", Parts: tmpl.messages[1].Parts}
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
		a := h.send(http.MethodPost, path, body)
		if path == messagesPath { // errors have no code there
			if a.status != http.StatusBadRequest || !strings.Contains(a.body, "'"+param+"' is not supported: "+m.Why) {
				t.Errorf("%s: %d %s", body, a.status, a.body)
			}
			continue
		}
		message, _, gotParam, code := failed(t, a)
		if code != "unsupported_parameter" || gotParam != param || !strings.Contains(message, m.Why) {
			t.Errorf("%s: %s of %s: %s", body, code, gotParam, message)
		}
	}
	// The order of requests is not ignored in silence.
	for _, body := range []string{
		chatBody("x", `, "priority": 5`), chatBody("x", `, "thinking_token_budget": 5`),
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
	case messagesPath:
		body, path = `{"max_tokens": 1, "messages": [{"role": "user", "content": "1+2="}]`+pair+`}`, messagesPath
	case responsesPath:
		body, path = `{"max_output_tokens": 1, "input": "1+2="`+pair+`}`, responsesPath
	case "`text` of responses":
		body, path, param = `{"max_output_tokens": 1, "input": "1+2=", "text": {"format": {"type": "text"}`+pair+`}}`, responsesPath, "text."+m.Name
	case "stream_options":
		body, param = chatBody("1+2=", `, "stream": true, "stream_options": {"include_usage": false`+pair+`}`), "stream_options."+m.Name
	case "structured_outputs":
		body, param = chatBody("1+2=", `, "max_tokens": 2, "structured_outputs": {"regex": "a+"`+pair+`}`), "structured_outputs."+m.Name
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
	for more, want := range map[string]string{
		`, "reasoning_effort": "low"`: `"low"`,
		`, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}`: `"high"`,
		``: "",
	} {
		h.post(chatPath, chatBody("1", more+`, "max_tokens": 1`))
		if got := string(tmpl.options.Extra.Get("reasoning_effort")); got != want {
			t.Errorf("%s: %s, want %s", more, got, want)
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

// A model of several names answers to all of them, by the one that was asked for.
func TestSeveralNames(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) { m.Names = []string{"a", "org/b"} }})
	for sent, want := range map[string]string{``: "a", `, "model": "a"`: "a", `, "model": "org/b"`: "org/b"} {
		for path, body := range map[string]string{completionsPath: completionBody(`"1+2="`, sent), chatPath: chatBody("1+2=", sent)} {
			if got := decode[reply](t, h.post(path, body)).Model; got != want {
				t.Errorf("%s: model %q, want %q", body, got, want)
			}
		}
	}
	var list struct{ Data []struct{ ID string } }
	if err := json.Unmarshal([]byte(h.send(http.MethodGet, "/v1/models", "").body), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Data) != 2 || list.Data[0].ID != "a" || list.Data[1].ID != "org/b" {
		t.Errorf("%+v", list)
	}
	if got := h.send(http.MethodGet, "/v1/models/org/b", ""); !strings.Contains(got.body, `"id":"org/b"`) {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := h.send(http.MethodPost, chatPath, chatBody("x", `, "model": "c"`)); got.status != http.StatusNotFound || !strings.Contains(got.body, `\"a\", \"org/b\"`) {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// Browsers may send what the settings allow, and nothing else.
func TestCORS(t *testing.T) {
	some := server.CORS{Origins: []string{"https://a.example"}, Methods: []string{"POST"}, Headers: []string{"content-type", "Authorization"}}
	all := server.CORS{Origins: []string{"*"}, Methods: []string{"*"}, Headers: []string{"*"}}
	credentials := some
	credentials.Credentials = true
	const a, b = "https://a.example", "https://b.example"
	for name, c := range map[string]struct {
		cors                    server.CORS
		method, origin          string
		asks, headers           string
		status                  int
		allowed, allowedHeaders string
	}{
		"none":             {server.CORS{}, "OPTIONS", a, "POST", "", 405, "", ""},
		"none, a request":  {server.CORS{}, "GET", a, "", "", 200, "", ""},
		"allowed":          {some, "OPTIONS", a, "POST", "Content-Type, authorization", 204, a, "Content-Type, authorization"},
		"another origin":   {some, "OPTIONS", b, "POST", "", 403, "", ""},
		"another method":   {some, "OPTIONS", a, "DELETE", "", 403, a, ""},
		"another header":   {some, "OPTIONS", a, "POST", "X-Other", 403, a, ""},
		"a request":        {some, "GET", a, "", "", 200, a, ""},
		"another's":        {some, "GET", b, "", "", 200, "", ""},
		"no origin":        {some, "GET", "", "", "", 200, "", ""},
		"no question":      {some, "OPTIONS", a, "", "", 405, a, ""},
		"all":              {all, "OPTIONS", b, "POST", "X-Other", 204, "*", "X-Other"},
		"all, a request":   {all, "GET", b, "", "", 200, "*", ""},
		"with credentials": {credentials, "GET", a, "", "", 200, a, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := start(t, options{loading: true, server: server.Options{CORS: c.cors, APIKey: "key"}})
			var header []string
			for k, v := range map[string]string{"Origin": c.origin, "Access-Control-Request-Method": c.asks, "Access-Control-Request-Headers": c.headers} {
				if v != "" {
					header = append(header, k, v)
				}
			}
			got := h.send(c.method, "/version", "", header...)
			if got.status != c.status || got.header.Get("Access-Control-Allow-Origin") != c.allowed || got.header.Get("Access-Control-Allow-Headers") != c.allowedHeaders {
				t.Errorf("%d %v %s", got.status, got.header, got.body)
			}
			if (got.header.Get("Access-Control-Allow-Credentials") == "true") != c.cors.Credentials {
				t.Errorf("%v", got.header)
			}
			if (c.cors.Origins != nil && c.origin != "" && c.allowed != "*") != (got.header.Get("Vary") == "Origin") {
				t.Errorf("Vary %q", got.header.Get("Vary"))
			}
		})
	}
}

// Chats that give no max_tokens have the model's, as far as it fits.
func TestChatTokens(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) { m.ChatTokens = 20 }})
	for more, want := range map[string]int{"": 20, `, "max_tokens": 30`: 30, `, "max_tokens": -1`: h.model.MaxModelLen - 6} {
		h.post(chatPath, chatBody("1+2=", more))
		if got := h.last().Params.MaxTokens; got != want {
			t.Errorf("%s: %d, want %d", more, got, want)
		}
	}
	h.post(completionsPath, completionBody(`"1+2="`, ""))
	if got := h.last().Params.MaxTokens; got != 16 {
		t.Errorf("a completion: %d, want OpenAI's 16", got)
	}
}
