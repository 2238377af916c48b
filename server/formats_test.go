package server_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/server"
)

const (
	messagesPath  = "/v1/messages"
	responsesPath = "/v1/responses"
)

// named are the events of a stream, by their names, which their data repeats.
func (h *harness) named(path, body string) []event {
	h.t.Helper()
	r, err := h.do(h.t.Context(), http.MethodPost, path, body)
	if err != nil {
		h.t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != "text/event-stream" {
		h.t.Fatalf("%s %s: status %d, %s", path, body, r.StatusCode, r.Header.Get("Content-Type"))
	}
	var events []event
	lines := bufio.NewScanner(r.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
			events = append(events, event{name: name})
		} else if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			e := &events[len(events)-1]
			e.data = decode[map[string]any](h.t, data)
			if e.data["type"] != e.name || e.json != "" {
				h.t.Errorf("event %s has the data %s", e.name, data)
			}
			e.json = data
		}
	}
	if err := lines.Err(); err != nil {
		h.t.Fatal(err)
	}
	return events
}

type event struct {
	name, json string
	data       map[string]any
}

// at is a member of a JSON value, by its path.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[p]
		case int:
			l, _ := v.([]any)
			if p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

// collected is the message that the events of /v1/messages are, as clients collect them.
func collected(t *testing.T, events []event) map[string]any {
	t.Helper()
	if len(events) < 4 || events[0].name != "message_start" || events[1].name != "ping" || events[len(events)-1].name != "message_stop" || events[len(events)-2].name != "message_delta" {
		t.Fatalf("%+v", events)
	}
	m := events[0].data["message"].(map[string]any)
	if len(m["content"].([]any)) != 0 || m["stop_reason"] != nil || at(m, "usage", "output_tokens") != 0.0 {
		t.Errorf("it starts with %v", m)
	}
	var blocks []any
	var partial string
	open := false
	for _, e := range events[2 : len(events)-2] {
		index, _ := e.data["index"].(float64)
		switch e.name {
		case "content_block_start":
			if open || int(index) != len(blocks) {
				t.Errorf("block %v begins where %d have, open: %v", index, len(blocks), open)
			}
			open, partial = true, ""
			blocks = append(blocks, e.data["content_block"])
			continue
		case "content_block_delta":
			b := blocks[len(blocks)-1].(map[string]any)
			switch d := e.data["delta"].(map[string]any); d["type"] {
			case "text_delta":
				b["text"] = b["text"].(string) + d["text"].(string)
			case "thinking_delta":
				b["thinking"] = b["thinking"].(string) + d["thinking"].(string)
			case "input_json_delta":
				partial += d["partial_json"].(string)
			default:
				t.Errorf("delta %v", d)
			}
		case "content_block_stop":
			if b := blocks[len(blocks)-1].(map[string]any); b["type"] == "tool_use" && json.Valid([]byte(partial)) {
				b["input"] = decode[any](t, partial)
			}
			open = false
			continue
		default:
			t.Errorf("event %s", e.name)
		}
		if !open || int(index) != len(blocks)-1 {
			t.Errorf("a delta of block %v of %d, open: %v", index, len(blocks), open)
		}
	}
	end := events[len(events)-2].data
	m["content"], m["usage"] = blocks, end["usage"]
	if blocks == nil {
		m["content"] = []any{}
	}
	m["stop_reason"], m["stop_sequence"] = at(end, "delta", "stop_reason"), at(end, "delta", "stop_sequence")
	return m
}

// same compares two answers but for the ids and times, which differ.
func same(t *testing.T, what string, a, b any) {
	t.Helper()
	ids := regexp.MustCompile(`"(id|call_id|created_at|item_id)":("[^"]*"|\d+)`)
	text := func(v any) string {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return ids.ReplaceAllString(string(data), `"$1":0`)
	}
	if d := cmp.Diff(text(a), text(b)); d != "" {
		t.Errorf("%s: streamed, and not, differ: %s", what, d)
	}
}

// inBlocks is the content of a message in short, and why it ended.
func inBlocks(m map[string]any) string {
	var b strings.Builder
	for _, one := range m["content"].([]any) {
		switch at(one, "type") {
		case "thinking":
			fmt.Fprintf(&b, "{%v}", at(one, "thinking"))
		case "tool_use":
			input, _ := json.Marshal(at(one, "input")) //nolint:errcheck // it was decoded
			fmt.Fprintf(&b, "%v(%s)", at(one, "name"), input)
		default:
			fmt.Fprint(&b, at(one, "text"))
		}
		b.WriteByte(' ')
	}
	fmt.Fprint(&b, m["stop_reason"])
	if s := m["stop_sequence"]; s != nil {
		fmt.Fprint(&b, " ", s)
	}
	return b.String()
}

const messageTool = `, "tools": [{"name": "weather", "description": "Weather of a city", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}, "cache_control": {"type": "ephemeral"}}]`

func TestMessages(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	for _, c := range []struct{ writes, more, want string }{
		{"It rains.", "", "It rains. end_turn"},
		{"It rains.", `, "stop_sequences": ["x", "ain"]`, "It r stop_sequence ain"},
		{"It rains.", `, "max_tokens": 1`, "I max_tokens"},
		{qwenCall, messageTool, `weather({"city":"Malmö"}) tool_use`},
		{"I look.\n" + qwenCall + "\n" + qwenCall, messageTool, `I look. weather({"city":"Malmö"}) weather({"city":"Malmö"}) tool_use`},
		{"<think>\nHm.\n</think>\n\nYes. " + qwenCall, messageTool, `{Hm.} Yes. weather({"city":"Malmö"}) tool_use`},
		{qwenCall + qwenCall, messageTool + `, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}`, `weather({"city":"Malmö"}) tool_use`},
		{` {}}` + "\n</tool_call>", messageTool + `, "tool_choice": {"type": "tool", "name": "weather"}`, `weather({}) tool_use`},
		{` {}}` + "\n</tool_call>", messageTool + `, "tool_choice": {"type": "any"}`, `weather({}) tool_use`},
		{qwenCall, messageTool + `, "tool_choice": {"type": "none"}`, qwenCall + " end_turn"},
		{"It rains.", `, "messages": [{"role": "user", "content": "Weather?"}, {"role": "system", "content": "Be short."}]`, "It rains. end_turn"},
	} {
		s.write(c.writes)
		body := `{"model": "scripted", "messages": [{"role": "user", "content": "What is the weather?"}]` + c.more
		if !strings.Contains(c.more, "max_tokens") {
			body += `, "max_tokens": 200`
		}
		whole := decode[map[string]any](t, s.post(messagesPath, body+"}"))
		if got := inBlocks(whole); got != c.want {
			t.Errorf("%q%s:\n got %s\nwant %s", c.writes, c.more, got, c.want)
		}
		same(t, c.writes+c.more, collected(t, s.named(messagesPath, body+`, "stream": true}`)), whole)
		if whole["type"] != "message" || whole["role"] != "assistant" || whole["model"] != "scripted" || at(whole, "usage", "input_tokens").(float64) < 5 {
			t.Errorf("%v", whole)
		}
		counted := strings.NewReplacer(`, "max_tokens": 200`, "", `, "max_tokens": 1`, "").Replace(body)
		if n := decode[map[string]any](t, s.post(messagesPath+"/count_tokens", counted+"}"))["input_tokens"]; n != at(whole, "usage", "input_tokens") {
			t.Errorf("%v tokens counted, %v used", n, whole["usage"])
		}
	}
}

// outItems is the output of a response in short, and how it ended.
func outItems(r map[string]any) string {
	var b strings.Builder
	for _, one := range r["output"].([]any) {
		switch at(one, "type") {
		case "reasoning":
			fmt.Fprintf(&b, "{%v}", at(one, "content", 0, "text"))
		case "function_call":
			fmt.Fprintf(&b, "%v(%v)", at(one, "name"), at(one, "arguments"))
		default:
			fmt.Fprint(&b, at(one, "content", 0, "text"))
		}
		if s := at(one, "status"); s != "completed" {
			fmt.Fprintf(&b, "[%v]", s)
		}
		b.WriteByte(' ')
	}
	fmt.Fprint(&b, r["status"])
	return b.String()
}

// followedThrough is the response at the end of the events of /v1/responses, which it holds to their order.
func followedThrough(t *testing.T, events []event) map[string]any {
	t.Helper()
	var deltas, done string
	for i, e := range events {
		if e.data["sequence_number"] != float64(i) {
			t.Errorf("event %d has the number %v", i, e.data["sequence_number"])
		}
		switch {
		case e.name == "response.output_item.added":
			deltas, done = "", ""
			if at(e.data, "item", "status") != "in_progress" {
				t.Errorf("%s", e.json)
			}
		case strings.HasSuffix(e.name, ".delta"):
			deltas += e.data["delta"].(string)
		case e.name == "response.output_text.done", e.name == "response.reasoning_text.done":
			done = e.data["text"].(string)
		case e.name == "response.function_call_arguments.done":
			done = e.data["arguments"].(string)
		case e.name == "response.output_item.done" && (done != deltas || done == ""):
			t.Errorf("the deltas are %q, the text %q", deltas, done)
		}
	}
	if len(events) < 3 || events[0].name != "response.created" || events[1].name != "response.in_progress" {
		t.Fatalf("%+v", events)
	}
	last := events[len(events)-1]
	r := last.data["response"].(map[string]any)
	if last.name != "response."+r["status"].(string) {
		t.Errorf("it ends with %s: %v", last.name, r)
	}
	return r
}

const responseTool = `, "tools": [{"type": "function", "name": "weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}, "strict": false}]`

func TestResponses(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	for _, c := range []struct{ writes, more, want string }{
		{"It rains.", "", "It rains. completed"},
		{"It rains.", `, "max_output_tokens": 1`, "I[incomplete] incomplete"},
		{qwenCall, responseTool, `weather({"city": "Malmö"}) completed`},
		{"<think>\nHm.\n</think>\n\nYes. " + qwenCall + "\n" + qwenCall, responseTool, `{Hm.} Yes. weather({"city": "Malmö"}) weather({"city": "Malmö"}) completed`},
		{qwenCall + qwenCall, responseTool + `, "parallel_tool_calls": false`, `weather({"city": "Malmö"}) completed`},
		{` {}}` + "\n</tool_call>", responseTool + `, "tool_choice": {"type": "function", "name": "weather"}`, `weather( {}) completed`},
		{` {}}` + "\n</tool_call>", responseTool + `, "tool_choice": "required", "reasoning": {"effort": "low"}`, `weather( {}) completed`},
	} {
		s.write(c.writes)
		body := `{"model": "scripted", "input": "What is the weather?", "store": true, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}` + c.more
		if !strings.Contains(c.more, "max_output_tokens") {
			body += `, "max_output_tokens": 200`
		}
		whole := decode[map[string]any](t, s.post(responsesPath, body+"}"))
		if got := strings.ReplaceAll(outItems(whole), "( ", "("); got != strings.ReplaceAll(c.want, "( ", "(") {
			t.Errorf("%q%s:\n got %s\nwant %s", c.writes, c.more, got, c.want)
		}
		same(t, c.writes+c.more, followedThrough(t, s.named(responsesPath, body+`, "stream": true}`)), whole)
		if whole["object"] != "response" || whole["store"] != false || at(whole, "metadata", "a") != "b" || at(whole, "usage", "total_tokens").(float64) < 5 {
			t.Errorf("%v", whole)
		}
		if hm := strings.Contains(c.writes, "Hm."); hm != (at(whole, "usage", "output_tokens_details", "reasoning_tokens").(float64) > 0) {
			t.Errorf("reasoning tokens: %v", whole["usage"])
		}
	}
}

// TestSameConversation sends one conversation with a call, its result and reasoning through the three
// APIs: its prompt is the same.
func TestSameConversation(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	s.write("ok")
	var prompts []string
	for _, c := range []struct{ path, body string }{
		{chatPath, `{"max_tokens": 9, "messages": [{"role": "system", "content": "Be right."}, {"role": "user", "content": "Weather?"},
			{"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Malmö\"}"}}, {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
			{"role": "tool", "tool_call_id": "a", "content": "21"}, {"role": "tool", "tool_call_id": "b", "content": "22\n23"}, {"role": "user", "content": "And now?"}]` + strings.ReplaceAll(oneTool, `, "max_tokens": 2000`, "") + `}`},
		{messagesPath, `{"max_tokens": 9, "system": [{"type": "text", "text": "Be right.", "cache_control": {"type": "ephemeral"}}], "messages": [{"role": "user", "content": "Weather?"},
			{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Malmö"}}, {"type": "tool_use", "id": "b", "name": "weather", "input": {}}]},
			{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "21"}, {"type": "tool_result", "tool_use_id": "b", "is_error": false, "content": [{"type": "text", "text": "22"}, {"type": "text", "text": "23"}]}, {"type": "text", "text": "And now?"}]}],
			"tools": [{"name": "weather", "description": "Weather of a city", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}]}`},
		{responsesPath, `{"max_output_tokens": 9, "instructions": "Be right.", "input": [{"role": "user", "content": "Weather?"},
			{"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
			{"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
			{"type": "function_call", "id": "fc_1", "call_id": "a", "name": "weather", "arguments": "{\"city\": \"Malmö\"}", "status": "completed"}, {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
			{"type": "function_call_output", "call_id": "a", "output": "21"}, {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "22"}, {"type": "input_text", "text": "23"}]},
			{"role": "user", "content": [{"type": "input_text", "text": "And now?"}]}],
			"tools": [{"type": "function", "name": "weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}]}`},
	} {
		s.post(c.path, c.body)
		prompts = append(prompts, s.prompt())
	}
	for i, p := range prompts {
		if d := cmp.Diff(prompts[0], p); d != "" || !strings.Contains(p, "Malmö") {
			t.Errorf("prompt %d differs from that of the chat: %s", i, d)
		}
	}
}

func TestFormatsRefuse(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	s.write("ok")
	for _, c := range []struct{ path, more, says string }{
		{messagesPath, ``, "max_tokens"},
		{messagesPath, `"max_tokens": 0`, "max_tokens"},
		{messagesPath, `"max_tokens": 1, "frobnicate": 1`, "frobnicate"},
		{messagesPath, `"max_tokens": 1, "n": 2`, "Unrecognized request argument supplied: n"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]`, "messages[0].content[0].type"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]`, "not continued"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "system", "content": "x"}]`, "there must be a user message, and all are system messages"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "assistant", "content": "x"}]`, "one of the assistant's is not continued"},
		{messagesPath, `"max_tokens": 1, "system": "x", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "system", "content": "z"}]`, "The last message must be the user's"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "robot", "content": "x"}]`, "messages[0].role"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "user"}]`, "messages[0].content"},
		{messagesPath, `"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}, {"role": "user", "content": "x"}]`, "messages[0].content[0]"},
		{messagesPath, `"max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "web_search"}]`, "tools[0].type"},
		{messagesPath, `"max_tokens": 1, "tools": [{"name": ""}]`, "Invalid value for 'tools[0].name': it is empty."},
		{responsesPath, `"tools": [{"type": "function", "name": ""}]`, "Invalid value for 'tools[0].name': it is empty."},
		{messagesPath, `"max_tokens": 1, "tool_choice": {"type": "tool", "name": "x"}`, "tool_choice"},
		{messagesPath, `"max_tokens": 1, "stop_sequences": ["x", 1]`, "'stop_sequences[1]': it must be a string, and is a number"},
		{messagesPath, `"max_tokens": 1, "temperature": "a", "thinking": 1, "output_config": {"format": 1}, "tool_choice": {"type": "tool"}`, "Invalid type for 'temperature'"},
		{messagesPath, `"max_tokens": 1, "thinking": {"type": "x"}`, "thinking.type"},
		{messagesPath, `"max_tokens": 1, "output_config": {"format": {"type": "json_schema"}}`, "output_config.format.schema"},
		{messagesPath, `"max_tokens": 1, "mcp_servers": [{}]`, "mcp_servers"},
		{responsesPath, `"previous_response_id": "resp_1"`, "previous_response_id"},
		{responsesPath, `"conversation": "conv_1"`, "conversation"},
		{responsesPath, `"background": true`, "background"},
		{responsesPath, `"text": {"format": {"type": "grammar"}}`, "text.format.type"},
		{responsesPath, `"tools": [{"type": "web_search"}]`, "tools[0].type"},
		{responsesPath, `"input": [{"type": "item_reference", "id": "x"}]`, "input[0].type"},
		{responsesPath, `"input": [{"type": "computer_call"}]`, "input[0].type"},
		{responsesPath, `"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]`, "input[0].content[0].type"},
		{responsesPath, `"input": 1`, "input"},
		{responsesPath, `"input": []`, "input"},
		{responsesPath, `"include": ["file_search_call.results"]`, "include"},
		{responsesPath, `"include": ["reasoning.encrypted_content", 1]`, "'include[1]': it must be a string, and is a number"},
		{responsesPath, `"temperature": "a", "tool_choice": {"type": "function", "name": "f"}`, "Invalid type for 'temperature'"},
		{responsesPath, `"temperature": "a", "stream_options": 1, "reasoning": 1, "text": {"format": 1}`, "Invalid type for 'temperature'"},
		{responsesPath, `"tool_choice": {"type": "auto"}`, `'tool_choice.type': it must be "function", and is "auto"; "none", "auto" and "required" are sent as strings, without a type.`},
		{responsesPath, `"truncation": "auto"`, "truncation"},
		{responsesPath, `"max_output_tokens": 0`, "max_output_tokens"},
		{responsesPath, `"frobnicate": 1`, "frobnicate"},
	} {
		base := map[string]string{messagesPath: `"messages": [{"role": "user", "content": "x"}]`, responsesPath: `"input": "x"`}[c.path]
		key, _, _ := strings.Cut(base, ":")
		body := "{" + c.more + "}"
		if !strings.Contains(c.more, key+":") {
			body = strings.TrimSuffix("{"+base+", "+c.more, ", ") + "}"
		}
		res := s.send(http.MethodPost, c.path, body)
		e := decode[map[string]any](t, res.body)
		if res.status != http.StatusBadRequest || !strings.Contains(fmt.Sprint(at(e, "error", "message")), c.says) || at(e, "error", "type") != "invalid_request_error" {
			t.Errorf("%s %s: status %d, %s; want %q", c.path, body, res.status, res.body, c.says)
		}
		if c.path == messagesPath && (e["type"] != "error" || e["request_id"] == nil) {
			t.Errorf("%s: not in Anthropic's form: %s", body, res.body)
		}
	}
	locked := start(t, options{server: server.Options{APIKey: "k"}})
	res := locked.send(http.MethodPost, messagesPath, `{}`, "X-Api-Key", "wrong")
	if e := decode[map[string]any](t, res.body); res.status != 401 || at(e, "error", "type") != "authentication_error" {
		t.Errorf("with a wrong key: %d %s", res.status, res.body)
	}
	res = locked.send(http.MethodPost, messagesPath, `{"max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": "`+ball+`"}]}`, "X-Api-Key", "k")
	if res.status != 200 || !strings.Contains(res.body, ballIs) || res.header.Get("Request-Id") == "" {
		t.Errorf("with the key: %d %s", res.status, res.body)
	}
}

// The id that a body gives is that of the response.
func TestRequestIDInBody(t *testing.T) {
	h := start(t, options{})
	for _, c := range []struct{ path, body, id string }{
		{completionsPath, `{"prompt": "1+2=", "max_tokens": 1`, "cmpl-mine"},
		{chatPath, `{"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 1`, "chatcmpl-mine"},
		{messagesPath, `{"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 1`, "msg_mine"},
		{responsesPath, `{"input": "1+2=", "max_output_tokens": 1`, "resp_mine"},
	} {
		a := h.send(http.MethodPost, c.path, c.body+`, "request_id": "mine"}`)
		if got := decode[map[string]any](t, a.body)["id"]; got != c.id || a.header.Get("X-Request-Id") != "mine" {
			t.Errorf("%s: %v, %s", c.path, got, a.header.Get("X-Request-Id"))
		}
		if a := h.send(http.MethodPost, c.path, c.body+`, "request_id": "a b"}`); a.status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", c.path, a.status, a.body)
		}
	}
}

// A text of a format is JSON of its schema, which chats without one do not write.
func TestFormatsOfText(t *testing.T) {
	h := start(t, options{})
	const schema = `{"type": "json_schema", "name": "n", "strict": true, "schema": {"type": "array", "items": {"enum": [7, true]}, "minItems": 2, "maxItems": 2}}`
	for _, c := range []struct {
		path, body string
		text       []any
	}{
		{messagesPath, `{"max_tokens": 64, "messages": [{"role": "user", "content": "1+2="}], "output_config": {"format": ` + schema + `}}`, []any{"content", 0, "text"}},
		{responsesPath, `{"max_output_tokens": 64, "input": "1+2=", "text": {"format": ` + schema + `}}`, []any{"output", 0, "content", 0, "text"}},
	} {
		a := decode[map[string]any](t, h.post(c.path, c.body))
		text, _ := at(a, c.text...).(string)
		if list := decode[[]any](t, text); len(list) != 2 {
			t.Errorf("%s: %q", c.path, text)
		}
	}
}
