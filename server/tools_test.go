package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/server"
)

// script is an engine whose model, whatever the prompt, writes a text and ends: only the tokens are
// given, and all else is as it serves.
type script struct {
	*engine.Engine
	mu     sync.Mutex
	tokens []int32
	prompt int
	last   engine.Request
	// steps, if set, samples instead.
	steps func(context.Context, *pipeline.Step) (pipeline.Result, error)
}

// Submit implements server.Engine.
func (s *script) Submit(ctx context.Context, r engine.Request) (*engine.Job, error) {
	s.mu.Lock()
	s.prompt, s.last = len(r.Prompt), r
	s.mu.Unlock()
	return s.Engine.Submit(ctx, r)
}

// Discard implements engine.Stepper.
func (s *script) Discard(context.Context) error { return nil }

// Step implements engine.Stepper.
func (s *script) Step(ctx context.Context, step *pipeline.Step) (pipeline.Result, error) {
	if s.steps != nil {
		return s.steps(ctx, step)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var r pipeline.Result
	for _, q := range step.Sequences {
		if q.LogitRows > 0 {
			r.Sampled = append(r.Sampled, s.tokens[min(q.Start+len(q.Tokens)-s.prompt, len(s.tokens)-1)])
		}
	}
	return r, nil
}

// scripted is a server of scripts, in the format of a family of models.
type scripted struct {
	*harness
	script    *script
	tokenizer tokenizer.Tokenizer
	end       int32
}

// scriptedChat serves scripts with a chat template. Each of the marks is a special token.
func scriptedChat(t *testing.T, template string, marks []string, change func(*server.Model)) *scripted {
	t.Helper()
	data, err := os.ReadFile("../testdata/fixtures/qwen3_moe/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	for i, m := range marks {
		file["added_tokens"] = append(file["added_tokens"].([]any), map[string]any{
			"id": 2000 + i, "content": m, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
		})
	}
	if data, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(fstest.MapFS{"chat_template.jinja": {Data: []byte(template)}}, "scripted")
	if err != nil {
		t.Fatal(err)
	}
	kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 4096, BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{script: &script{}, tokenizer: tok}
	s.end, _ = tok.ID("<|im_end|>")
	if s.script.Engine, err = engine.New(engine.Options{
		Pipeline: s.script, KV: kv, Tokenizer: tok, MaxModelLen: 8192, MaxNumBatchedTokens: 8192, Vocab: 4096, StopIDs: []int32{s.end},
	}); err != nil {
		t.Fatal(err)
	}
	m := &server.Model{
		Names: []string{"scripted"}, Vocab: 4096, Engine: s.script, Tokenizer: tok, Template: tmpl, MaxModelLen: 8192,
		Calls: output.Detect(tmpl.Mentions), Reasoning: output.DetectReasoning(tmpl.Mentions), Defaults: engine.DefaultParams(), Created: time.Unix(1, 0),
	}
	if change != nil {
		change(m)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.harness = &harness{t: t, server: server.New(server.Options{}), url: "http://" + l.Addr().String(), client: &http.Client{Transport: &http.Transport{}}}
	s.server.SetModels(m)
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		if err := s.server.Serve(ctx, l); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	ended.Go(func() {
		if err := s.script.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		stop()
		ended.Wait()
		if err := s.script.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// write has the model write a text.
func (s *scripted) write(text string) {
	s.t.Helper()
	s.script.mu.Lock()
	defer s.script.mu.Unlock()
	s.script.tokens = append(encode(s.t, s.tokenizer, text, false), s.end)
}

// prompt is the text of the last prompt.
func (s *scripted) prompt() string {
	s.script.mu.Lock()
	defer s.script.mu.Unlock()
	return s.tokenizer.Decode(s.script.last.Prompt, false)
}

// toolMessage is an assistant's message, or what came of one.
type toolMessage struct {
	Role             string     `json:"role,omitempty"`
	Content          *string    `json:"content"`
	Reasoning        string     `json:"reasoning,omitempty"`
	ReasoningContent string     `json:"reasoning_content,omitempty"`
	ToolCalls        []toolCall `json:"tool_calls,omitempty"`
	Finish           string     `json:"-"`
}

type toolCall struct {
	Index    *int   `json:"index,omitempty"`
	ID       string `json:"id,omitempty"`
	Type     string `json:"type,omitempty"`
	Function struct {
		Name      string `json:"name,omitempty"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

func (m *toolMessage) String() string {
	var b strings.Builder
	if m.Reasoning != "" {
		fmt.Fprintf(&b, "{%s}", m.Reasoning)
	}
	if m.Content == nil {
		b.WriteString("null")
	} else {
		b.WriteString(*m.Content)
	}
	for _, c := range m.ToolCalls {
		fmt.Fprintf(&b, " %s(%s)", c.Function.Name, c.Function.Arguments)
	}
	return b.String() + " " + m.Finish
}

// ask has a chat answered whole and in a stream, and returns the message once it is the same.
func (s *scripted) ask(more string) *toolMessage {
	s.t.Helper()
	body := strings.TrimSuffix(chatBody("What is the weather?", more), "}")
	whole := decode[struct {
		Choices []struct {
			Message      toolMessage
			FinishReason string `json:"finish_reason"`
		}
	}](s.t, s.post(chatPath, body+"}"))
	var sum []toolMessage
	for i, c := range whole.Choices {
		m := c.Message
		m.Finish = c.FinishReason
		for k, call := range m.ToolCalls {
			if call.Index != nil || call.Type != "function" || call.ID == "" {
				s.t.Errorf("choice %d, call %d: %+v", i, k, call)
			}
		}
		if m.Reasoning != m.ReasoningContent {
			s.t.Errorf("reasoning %q, reasoning_content %q", m.Reasoning, m.ReasoningContent)
		}
		sum = append(sum, toolMessage{Role: "assistant"})
	}
	tokens := 0
	for _, e := range s.events(chatPath, body+`, "stream": true, "stream_options": {"include_usage": true}}`) {
		chunk := decode[struct {
			Choices []struct {
				Index        int
				Delta        toolMessage
				FinishReason string `json:"finish_reason"`
			}
			Usage *usage
		}](s.t, e)
		for _, c := range chunk.Choices {
			m, d := &sum[c.Index], c.Delta
			if m.Finish != "" {
				s.t.Errorf("%s comes behind the end", e)
			}
			if d.Content != nil && *d.Content != "" {
				if m.Content == nil {
					m.Content = new(string)
				}
				*m.Content += *d.Content
			}
			if d.Reasoning != d.ReasoningContent {
				s.t.Errorf("reasoning %q, reasoning_content %q", d.Reasoning, d.ReasoningContent)
			}
			m.Reasoning += d.Reasoning
			for _, call := range d.ToolCalls {
				switch {
				case call.Index == nil || *call.Index > len(m.ToolCalls):
					s.t.Fatalf("a call out of order: %s", e)
				case *call.Index == len(m.ToolCalls):
					if call.ID == "" || call.Type != "function" || call.Function.Name == "" {
						s.t.Errorf("a call begins without its name: %s", e)
					}
					m.ToolCalls = append(m.ToolCalls, call)
				default:
					if call.ID != "" || call.Type != "" || call.Function.Name != "" {
						s.t.Errorf("a call goes on with a name: %s", e)
					}
					m.ToolCalls[*call.Index].Function.Arguments += call.Function.Arguments
				}
			}
			m.Finish = c.FinishReason
			if d.Role == "" && c.FinishReason == "" {
				tokens++
			}
		}
		if chunk.Usage != nil && tokens < chunk.Usage.CompletionTokens-len(sum) {
			s.t.Errorf("%d chunks for %d tokens", tokens, chunk.Usage.CompletionTokens)
		}
	}
	for i := range sum {
		m := whole.Choices[i].Message
		m.Finish = whole.Choices[i].FinishReason
		if sum[i].Content == nil && sum[i].ToolCalls == nil && sum[i].Reasoning == "" {
			sum[i].Content = new(string)
		}
		if got, want := sum[i].String(), m.String(); got != want {
			s.t.Errorf("streamed: %s\n  whole: %s", got, want)
		}
	}
	m := whole.Choices[0].Message
	m.Finish = whole.Choices[0].FinishReason
	return &m
}

const (
	oneTool  = `, "max_tokens": 2000, "tools": [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]`
	twoTools = `, "max_tokens": 2000, "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}, {"type": "function", "function": {"name": "time", "parameters": null}}]`
	qwenCall = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Malmö\"}}\n</tool_call>"
)

func qwenTemplate(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../models/chat/testdata/templates/qwen3.jinja")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// mistralTemplate writes tools, calls and results as Mistral's models know them.
const mistralTemplate = `{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools is not none and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]` +
	`{% elif m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}{{ c.function | tojson }}, {"id": "{{ c.id }}"}{% endfor %}]` +
	`{% elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}{% endfor %}`

// Calls, reasoning and content come apart, whole as streamed.
func TestToolCalls(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	for _, c := range []struct{ writes, more, want string }{
		{"It rains.", oneTool, "It rains. stop"},
		{qwenCall, oneTool, `null weather({"city": "Malmö"}) tool_calls`},
		{"I look.\n\n" + qwenCall + "\n" + strings.Replace(qwenCall, "Malmö", "Pécs", 1), oneTool, `I look. weather({"city": "Malmö"}) weather({"city": "Pécs"}) tool_calls`},
		{"<think>\nHm, <b>.\n</think>\n\n" + qwenCall, oneTool, `{Hm, <b>.}null weather({"city": "Malmö"}) tool_calls`},
		{"<think>\nHm.\n</think>\n\nYes.", "", "{Hm.}Yes. stop"},
		{"<think>\nHm.\n</think>\n\nYes.", `, "include_reasoning": false`, "Yes. stop"},
		{"<think>\nHm", "", "{Hm}null stop"},
		// A call of no tool, or without tools, is text.
		{strings.Replace(qwenCall, "weather", "wheather", 1), oneTool, strings.Replace(qwenCall, "weather", "wheather", 1) + " stop"},
		{"<tool_call>\n{\"name\": \"weather\"}\n</tool_call>", oneTool, "<tool_call>\n{\"name\": \"weather\"}\n</tool_call> stop"},
		{qwenCall, "", qwenCall + " stop"},
		{qwenCall, oneTool + `, "tool_choice": "none"`, qwenCall + " stop"},
		// The end of the tokens in a call.
		{qwenCall, strings.Replace(oneTool, "2000", "18", 1), `null weather({"city) length`},
		{qwenCall + qwenCall, oneTool + `, "parallel_tool_calls": false`, `null weather({"city": "Malmö"}) tool_calls`},
		{qwenCall, oneTool + `, "stop": "Mal"`, `null weather({"city": ") tool_calls`},
		{qwenCall, oneTool + `, "n": 3`, `null weather({"city": "Malmö"}) tool_calls`},
	} {
		s.write(c.writes)
		if strings.HasSuffix(c.want, " length") { // as many tokens as the text has up to there
			at := strings.Index(c.writes, `": "Malmö"`)
			c.more = strings.Replace(oneTool, "2000", fmt.Sprint(len(encode(t, s.tokenizer, c.writes[:at], false))), 1)
		}
		got := s.ask(c.more)
		if got.String() != c.want {
			t.Errorf("%q%s:\n got %s\nwant %s", c.writes, c.more, got, c.want)
		}
		for _, call := range got.ToolCalls {
			if !regexp.MustCompile(`^call_[0-9A-Za-z]{20,}$`).MatchString(call.ID) {
				t.Errorf("id %q", call.ID)
			}
		}
	}
	// No more calls means that nothing is written behind the first.
	s.write(qwenCall + strings.Repeat(" x", 500))
	for more, most := range map[string]int{"": 1200, `, "parallel_tool_calls": false`: len(encode(t, s.tokenizer, qwenCall, false)), `, "parallel_tool_calls": false, "stop": "§"`: len(encode(t, s.tokenizer, qwenCall, false))} {
		r := decode[struct{ Usage usage }](t, s.post(chatPath, chatBody("a", oneTool+more)))
		if n := r.Usage.CompletionTokens; n > most || n < most/2 {
			t.Errorf("%s: %d tokens, want up to %d", more, n, most)
		}
	}
	// Where the template ends the reasoning, a tag is text.
	s.write("<think>Yes.")
	for _, more := range []string{`, "chat_template_kwargs": {"enable_thinking": false}`, `, "enable_thinking": false`} {
		if got := s.ask(more).String(); got != "<think>Yes. stop" || !strings.HasSuffix(s.prompt(), "<think>\n\n</think>\n\n") {
			t.Errorf("%s behind %q", got, s.prompt())
		}
	}
	if s.ask(`, "enable_thinking": false, "chat_template_kwargs": {"enable_thinking": true}`); strings.Contains(s.prompt(), "<think>") {
		t.Errorf("the prompt is %q", s.prompt())
	}
}

// A required call begins in the prompt.
func TestRequiredCalls(t *testing.T) {
	thinking := strings.Replace(qwenTemplate(t), `{{- '<|im_start|>assistant\n' }}`, `{{- '<|im_start|>assistant\n<think>\n' }}`, 1)
	for _, c := range []struct{ template, writes, more, prompt, want string }{
		{qwenTemplate(t), ` {"city": "Malmö"}}` + "\n</tool_call>", oneTool + `, "tool_choice": "required"`, "assistant\n<think>\n\n</think>\n\n<tool_call>\n" + `{"name": "weather", "arguments":`, `null weather({"city": "Malmö"}) tool_calls`},
		{qwenTemplate(t), ` {}}` + "\n</tool_call>", twoTools + `, "tool_choice": {"type": "function", "function": {"name": "time"}}`, `{"name": "time", "arguments":`, `null time({}) tool_calls`},
		{qwenTemplate(t), ` {}}` + "\n</tool_call>\n" + qwenCall, twoTools + `, "tool_choice": {"type": "function", "function": {"name": "time"}}`, `{"name": "time", "arguments":`, `null time({}) tool_calls`},
		{qwenTemplate(t), `time", "arguments": {}}` + "\n</tool_call>", twoTools + `, "tool_choice": "required"`, "<tool_call>\n" + `{"name": "`, `null time({}) tool_calls`},
		{qwenTemplate(t), `time", "arguments": {}}` + "\n</tool_call>", twoTools + `, "tool_choice": "required", "enable_thinking": true`, "assistant\n<tool_call>\n" + `{"name": "`, `null time({}) tool_calls`},
		{thinking, ` {}}` + "\n</tool_call>", oneTool + `, "tool_choice": "required", "enable_thinking": true`, "assistant\n<think>\n\n</think>\n\n<tool_call>\n" + `{"name": "weather", "arguments":`, `null weather({}) tool_calls`},
		{mistralTemplate, `{}}]`, oneTool + `, "tool_choice": "required"`, `[TOOL_CALLS] [{"name": "weather", "arguments":`, `null weather({}) tool_calls`},
	} {
		s := scriptedChat(t, c.template, nil, nil)
		s.write(c.writes)
		if got := s.ask(c.more).String(); got != c.want {
			t.Errorf("%q%s:\n got %s\nwant %s", c.writes, c.more, got, c.want)
		}
		if got := s.prompt(); !strings.HasSuffix(got, c.prompt) {
			t.Errorf("%s: the prompt ends with %q, want %q", c.more, got[max(0, len(got)-len(c.prompt)-20):], c.prompt)
		}
	}
	// The name is the client's: a marker in it is plain text.
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	s.write(" {}}")
	s.ask(`, "tools": [{"type": "function", "function": {"name": "a<|im_end|>"}}], "tool_choice": "required"`)
	prompt := s.script.last.Prompt
	if at := slices.Index(prompt[len(prompt)-24:], s.end); at >= 0 {
		t.Errorf("the name of a tool ends a turn: %q", s.prompt())
	}
	refused := scriptedChat(t, qwenTemplate(t), nil, func(m *server.Model) { m.Calls = nil })
	status := refused.send(http.MethodPost, chatPath, chatBody("x", oneTool+`, "tool_choice": "required"`))
	if message, _, param, _ := failed(t, status); param != "tool_choice" || !strings.Contains(message, "--tool-call-parser") {
		t.Errorf("%s: %s", param, message)
	}
	status = s.send(http.MethodPost, chatPath, chatBody("x", oneTool+`, "tool_choice": "required", "add_generation_prompt": false`))
	if message, _, param, _ := failed(t, status); param != "add_generation_prompt" {
		t.Errorf("%s: %s", param, message)
	}
}

// Markers that are special tokens are found, and others are not in the text, unless it is asked for.
func TestSpecialTokensInText(t *testing.T) {
	marks := []string{"[TOOL_CALLS]", "[OTHER]", "<think>", "</think>"}
	s := scriptedChat(t, mistralTemplate+"{# </think> #}", marks, nil)
	for _, c := range []struct{ writes, more, want string }{
		{`[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Malmö"}}]`, oneTool, `null weather({"city": "Malmö"}) tool_calls`},
		{`a[OTHER]b`, oneTool, "ab stop"},
		{`a[OTHER]b`, oneTool + `, "skip_special_tokens": false`, "a[OTHER]b stop"},
		{`a[OTHER]b`, `, "skip_special_tokens": false`, "a[OTHER]b stop"},
		{`a[TOOL_CALLS]b`, "", "ab stop"},
		{`<think>a</think>b`, "", "{a}b stop"},
	} {
		s.write(c.writes)
		got := s.ask(c.more)
		if got.String() != c.want {
			t.Errorf("%q%s:\n got %s\nwant %s", c.writes, c.more, got, c.want)
		}
		for _, call := range got.ToolCalls {
			if !regexp.MustCompile(`^[0-9A-Za-z]{9}$`).MatchString(call.ID) {
				t.Errorf("id %q", call.ID)
			}
		}
	}
	s.write("a[OTHER]b")
	for more, want := range map[string]string{"": "ab", `, "skip_special_tokens": false`: "a[OTHER]b", `, "skip_special_tokens": true`: "ab"} {
		if got := texts(decode[reply](t, s.post(completionsPath, completionBody(`"x"`, more))))[0]; got != want {
			t.Errorf("%s: %q, want %q", more, got, want)
		}
	}
}

// A call and its result go back through the template.
func TestToolResults(t *testing.T) {
	for name, c := range map[string]struct{ template, writes, want string }{
		"qwen": {
			qwenTemplate(t), qwenCall,
			"<|im_start|>assistant\n" + qwenCall + "<|im_end|>\n<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
		},
		"mistral": {
			mistralTemplate, `[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Malmö"}}]`,
			`[/INST][TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Malmö"}}, {"id": "ID"}][TOOL_RESULTS] {"content": 21, "call_id": "ID"}[/TOOL_RESULTS]`,
		},
	} {
		s := scriptedChat(t, c.template, nil, nil)
		s.write(c.writes)
		body := strings.TrimSuffix(chatBody("What is the weather?", oneTool), "}")
		answer := decode[struct {
			Choices []struct{ Message json.RawMessage }
		}](t, s.post(chatPath, body+"}")).Choices[0].Message
		id := decode[toolMessage](t, string(answer)).ToolCalls[0].ID
		s.write("It is warm.")
		s.post(chatPath, `{"messages": [{"role": "user", "content": "What is the weather?"}, `+string(answer)+`, {"role": "tool", "tool_call_id": "`+id+`", "content": "21"}]`+oneTool+`}`)
		if got, want := s.prompt(), strings.ReplaceAll(c.want, "ID", id); !strings.HasSuffix(got, want) {
			t.Errorf("%s:\n%s", name, cmp.Diff(got, want))
		}
	}
}

// Templates may want the name of the function with a result, and tools in any case.
func TestDemandingTemplates(t *testing.T) {
	s := scriptedChat(t, `{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}`+
		`{% if m.role == 'tool' %}{% if m.name is not defined %}{{ raise_exception('no name') }}{% endif %} of {{ m.name }}{% endif %}|{% endfor %}`, nil, nil)
	s.write("ok")
	s.post(chatPath, `{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": "{}"}}, {"id": "b", "function": {"name": "time", "arguments": "{}"}}]},
		{"role": "tool", "tool_call_id": "b", "content": "12"}, {"role": "tool", "tool_call_id": "a", "content": "21"}, {"role": "tool", "tool_call_id": "a", "name": "x", "content": "22"}]`+oneTool+`}`)
	if got, want := s.prompt(), "weather;assistant:|tool:12 of time|tool:21 of weather|tool:22 of x|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	message, _, _, _ := failed(t, s.send(http.MethodPost, chatPath, `{"messages": [{"role": "tool", "tool_call_id": "c", "content": "12"}]`+oneTool+`}`))
	if !strings.Contains(message, "no name") {
		t.Error(message)
	}
}

// Messages of this API, and those of other servers, can be sent back.
func TestSentBack(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, nil)
	s.write("<think>Hm")
	answer := decode[struct {
		Choices []struct{ Message json.RawMessage }
	}](t, s.post(chatPath, chatBody("a", ""))).Choices[0].Message
	if !strings.Contains(string(answer), `"content":null`) {
		t.Errorf("the answer is %s", answer)
	}
	s.post(chatPath, `{"messages": [{"role": "user", "content": "a"}, `+string(answer)+`]}`)
	if got := s.prompt(); !strings.HasSuffix(got, "<think>\nHm\n</think>\n\n<|im_end|>\n<|im_start|>assistant\n") {
		t.Errorf("the prompt is %q", got)
	}
	// Calls of functions without parameters may have no arguments.
	s = scriptedChat(t, `{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}:{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}`, nil, nil)
	s.write("ok")
	for arguments, want := range map[string]string{"": "f:", `, "arguments": ""`: "f:", `, "arguments": null`: "f:", `, "arguments": "{\"a\": 1}"`: "f:a=1;", `, "arguments": {"a": 1}`: "f:a=1;"} {
		s.post(chatPath, `{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"`+arguments+`}}]}]}`)
		if got := s.prompt(); got != want {
			t.Errorf("%s: %q, want %q", arguments, got, want)
		}
	}
}

// Values of Qwen3-Coder are strings where the schema says so, which clients also write as anyOf.
func TestStringsOfSchemas(t *testing.T) {
	s := scriptedChat(t, qwenTemplate(t), nil, func(m *server.Model) { m.Calls = output.QwenXML })
	for schema, want := range map[string]string{
		`{}`: "1", `{"type": "integer"}`: "1", `{"type": "string"}`: `"1"`, `{"type": ["string", "null"]}`: `"1"`,
		`{"anyOf": [{"type": "string"}, {"type": "null"}]}`: `"1"`, `{"anyOf": [{"type": "string"}, {"type": "integer"}]}`: "1",
		`{"anyOf": [{"type": "string"}, {"$ref": "#"}]}`: "1", `{"type": [[], {}]}`: "1", `1`: "1",
	} {
		s.write("<function=f><parameter=a>1</parameter></function>")
		got := s.ask(`, "max_tokens": 2000, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": ` + schema + `}}}}]`).String()
		if want = `null f({"a": ` + want + `}) tool_calls`; got != want {
			t.Errorf("%s: %s, want %s", schema, got, want)
		}
	}
}

// A tool whose name calls of the model cannot have is refused, as its calls would be text, where the model is told of it.
func TestNamesOfTools(t *testing.T) {
	tool := func(name string) string {
		return `, "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "` + name + `"}}]`
	}
	for _, c := range []struct {
		format *output.Format
		name   string
		ok     bool
	}{
		{output.Olmo, "a b", false}, {output.Olmo, "a-b_2", true}, {output.QwenXML, "a>b", false}, {output.QwenXML, "a b", true}, {output.Hermes, "a b", true},
	} {
		s := scriptedChat(t, qwenTemplate(t), nil, func(m *server.Model) { m.Calls = c.format })
		s.write("ok")
		if c.ok {
			s.ask(tool(c.name))
			continue
		}
		a := s.send(http.MethodPost, chatPath, chatBody("x", tool(c.name)))
		message, _, param, code := failed(t, a)
		if want := fmt.Sprintf("calls as this model writes them (%s) cannot have the name %q; use letters", c.format.Name, c.name); param != "tools[1]" || code != "invalid_value" || !strings.Contains(message, want) {
			t.Errorf("%s: %d %s", c.name, a.status, a.body)
		}
		s.ask(tool(c.name) + `, "tool_choice": "none"`)
	}
}

// What the server does not know how to read is text.
func TestWithoutParsers(t *testing.T) {
	text := "<think>\nHm.\n</think>\n\n" + qwenCall
	for name, c := range map[string]struct {
		change func(*server.Model)
		more   string
		want   string
	}{
		"no parser":    {func(m *server.Model) { m.Calls, m.Reasoning = nil, nil }, oneTool, text + " stop"},
		"no calls":     {func(m *server.Model) { m.Calls = nil }, oneTool, "{Hm.}" + qwenCall + " stop"},
		"no reasoning": {func(m *server.Model) { m.Reasoning = nil }, oneTool, "<think>\nHm.\n</think>" + ` weather({"city": "Malmö"}) tool_calls`},
		"not auto":     {func(m *server.Model) { m.AutoCallsAreText = true }, oneTool, "{Hm.}" + qwenCall + " stop"},
		"another":      {func(m *server.Model) { m.Calls = output.Mistral }, oneTool, "{Hm.}" + qwenCall + " stop"},
	} {
		s := scriptedChat(t, qwenTemplate(t), nil, c.change)
		s.write(text)
		if got := s.ask(c.more).String(); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// Each format comes through HTTP.
func TestFormats(t *testing.T) {
	const args = `{"city": "Malmö", "days": 3}`
	writes := map[string]string{
		"hermes":         "<tool_call>\n" + `{"name": "weather", "arguments": ` + args + "}\n</tool_call>",
		"mistral":        `[TOOL_CALLS] [{"name": "weather", "arguments": ` + args + `}]`,
		"phi4_mini_json": `functools[{"name": "weather", "arguments": ` + args + `}]`,
		"llama3_json":    `{"name": "weather", "parameters": ` + args + `}`,
		"json":           `[{"name": "weather", "arguments": ` + args + `}]`,
		"qwen3_xml":      "<tool_call>\n<function=weather>\n<parameter=city>\nMalmö\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
		"qwen3_coder":    "<tool_call>\n<function=weather>\n<parameter=city>\nMalmö\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
		"olmo3":          "<function_calls>\nweather(city=\"Malmö\", days=3)\n</function_calls>",
	}
	for name, text := range writes {
		s := scriptedChat(t, qwenTemplate(t), nil, func(m *server.Model) { m.Calls = output.Find(name) })
		s.write(text)
		if got := s.ask(oneTool).String(); got != "null weather("+args+") tool_calls" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if tried := slices.Sorted(maps.Keys(writes)); !slices.Equal(tried, output.Names()) {
		t.Errorf("formats %v, tried %v", output.Names(), tried)
	}
}
