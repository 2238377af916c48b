package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/server"
)

const person = `{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
	"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}, "child": {"anyOf": [{"$ref": "#/$defs/child"}, {"type": "null"}]}},
	"required": ["name", "age", "child"], "additionalProperties": false, "$defs": {"child": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f]{2}$"}}, "required": ["id"]}}}`

// validates reports an error unless a text is a value of a schema, by a validator that is not this project's.
func validates(schema, text string) error {
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", document); err != nil {
		return err
	}
	s, err := c.Compile("schema.json")
	if err != nil {
		return err
	}
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

// TestStructuredOutputs: completions of the built-in model, which knows nothing of JSON, are what requests ask for, on both
// endpoints, whole as streamed.
func TestStructuredOutputs(t *testing.T) {
	h := start(t, options{})
	matches := func(pattern string) func(string) error {
		return func(text string) error {
			if !regexp.MustCompile("^(?:" + pattern + ")$").MatchString(text) {
				return fmt.Errorf("it does not match %s", pattern)
			}
			return nil
		}
	}
	of := func(schema string) func(string) error {
		return func(text string) error { return validates(schema, text) }
	}
	for _, c := range []struct {
		more  string
		check func(text string) error
		may   string // also end for this reason
	}{
		{`"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": ` + person + `}}`, of(person), ""},
		{`"structured_outputs": {"json": ` + person + `, "disable_any_whitespace": true}`, of(person), ""},
		{`"structured_outputs": {"json": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 4}, "whitespace_pattern": " ?"}`, of(`{"type": "array", "maxItems": 4, "items": {"type": "integer"}}`), ""},
		{`"response_format": {"type": "json_object"}`, of(`{"type": "object"}`), "length"},
		{`"structured_outputs": {"json_object": true}`, of(`{"type": "object"}`), "length"},
		{`"structured_outputs": {"regex": "[A-Z][a-z]{3,6} \\d{2}(!|\\?)"}`, matches(`[A-Z][a-z]{3,6} \d{2}(!|\?)`), ""},
		{`"structured_outputs": {"regex": "é{3}"}`, matches(`é{3}`), ""},
		{`"structured_outputs": {"choice": ["positive", "negative", "neutral 😀"]}`, matches("positive|negative|neutral 😀"), ""},
		{`"structured_outputs": {"grammar": "root ::= sum \" = \" [0-9]{1,3}\nsum ::= n (\" + \" n){1,3}\nn ::= [1-9] [0-9]?"}`, matches(`[1-9]\d?( \+ [1-9]\d?){1,3} = \d{1,3}`), ""},
		{`"structured_outputs": {"regex": "a{2,}"}, "min_tokens": 4`, matches("a{2,}"), "length"},
		{`"structured_outputs": {"regex": "abc"}, "min_tokens": 20, "ignore_eos": true`, matches("abc"), ""},
		{`"structured_outputs": {"regex": "abc|abd"}, "logit_bias": {"7": 5}, "repetition_penalty": 1.2, "presence_penalty": 1`, matches("ab[cd]"), ""},
	} {
		for _, sampling := range []string{`"temperature": 0`, `"temperature": 1, "seed": 3, "n": 3`, `"temperature": 1, "top_k": 5, "top_p": 0.9, "seed": 5`} {
			for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
				body := `{"prompt": "1+2=", ` + sampling + `, "max_tokens": 180, ` + c.more
				if path != "/v1/completions" {
					body = strings.Replace(body, `"prompt": "1+2="`, `"messages": [{"role": "user", "content": "1+2="}]`, 1)
				}
				r := decode[reply](t, h.post(path, body+"}"))
				whole := texts(r)
				for i, text := range whole {
					finish := *r.Choices[i].FinishReason
					if finish == "stop" {
						if err := c.check(text); err != nil {
							t.Errorf("%s: %q: %v", body, text, err)
						}
					} else if finish != c.may {
						t.Errorf("%s: %q ends for %s", body, text, finish)
					}
				}
				streamed := make([]string, len(whole))
				for _, e := range h.events(path, body+`, "stream": true}`) {
					for _, ch := range decode[reply](t, e).Choices {
						streamed[ch.Index] += ch.Text
						if ch.Delta.Content != nil {
							streamed[ch.Index] += *ch.Delta.Content
						}
					}
				}
				if !slices.Equal(streamed, whole) && strings.Contains(body, "seed") == strings.Contains(body, `"temperature": 1`) {
					t.Errorf("%s: streamed %q, whole %q", body, streamed, whole)
				}
			}
		}
	}
	// A grammar is compiled once, and a stop string ends a text before the grammar does.
	r := decode[reply](t, h.post("/v1/completions", completionBody(`"1+2="`, `, "structured_outputs": {"regex": "abcdef"}, "stop": "cd", "max_tokens": 50, "logprobs": 2`)))
	if got := r.Choices[0]; got.Text != "ab" || *got.FinishReason != "stop" {
		t.Errorf("%+v", got)
	}
	for i, lp := range r.Choices[0].LogProbs.TokenLogProbs {
		if !(lp <= 0 && lp > -9999) {
			t.Errorf("token %d has the log-probability %g", i, lp)
		}
	}
}

// guesser is an engine whose model knows nothing: it samples any token that the mask allows, late rather what ends strings
// and lists.
type guesser struct {
	*engine.Engine
	mu     sync.Mutex
	random *rand.Rand
	prompt int
	vocab  int
	closes []int32
	free   []int32 // written where there is no mask
}

func (s *guesser) Submit(ctx context.Context, r engine.Request) (*engine.Job, error) {
	s.mu.Lock()
	s.prompt = len(r.Prompt)
	s.mu.Unlock()
	return s.Engine.Submit(ctx, r)
}

func (s *guesser) Discard(context.Context) error { return nil }

func (s *guesser) Step(_ context.Context, step *pipeline.Step) (pipeline.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var r pipeline.Result
	for _, q := range step.Sequences {
		if q.LogitRows == 0 {
			continue
		}
		at := q.Start + len(q.Tokens) - s.prompt
		if q.SamplingParams.Mask == nil {
			r.Sampled = append(r.Sampled, s.free[min(at, len(s.free)-1)])
			continue
		}
		bits := make([]uint32, (s.vocab+31)/32)
		q.SamplingParams.Mask.Allowed(bits)
		var ids []int32
		for id := range int32(s.vocab) {
			if bits[id/32]>>(id%32)&1 != 0 {
				ids = append(ids, id)
			}
		}
		if len(ids) == 0 {
			r.Sampled = append(r.Sampled, -1)
			continue
		}
		id := ids[s.random.IntN(len(ids))]
		if at > 60 {
			may := slices.DeleteFunc(slices.Clone(s.closes), func(c int32) bool { return !slices.Contains(ids, c) })
			switch {
			case len(may) > 0 && may[0] == s.closes[0]: // the end
				id = may[0]
			case len(may) > 0:
				id = may[s.random.IntN(len(may))]
			}
		}
		r.Sampled = append(r.Sampled, id)
	}
	return r, nil
}

// guessing is a scripted server whose model guesses.
func guessing(t *testing.T, template string, marks []string, change func(*server.Model)) *scripted {
	t.Helper()
	var g *guesser
	s := scriptedChat(t, template, marks, func(m *server.Model) {
		if change != nil {
			change(m)
		}
		closes := []int32{}
		for _, text := range []string{"</think>", "</tool_call>", "<|/tool_call|>", "\"", "}", "]", "<", "/", ")", ":", ",", "p", "f", "t"} {
			if id, ok := m.Tokenizer.ID(text); ok {
				closes = append(closes, id)
			}
		}
		g = &guesser{random: rand.New(rand.NewPCG(1, 1)), vocab: m.Vocab, closes: closes}
		m.Engine = g
	})
	g.Engine, g.free, g.closes = s.script.Engine, []int32{s.end}, append([]int32{s.end}, g.closes...)
	s.script.steps = g.Step
	return s
}

// TestConstrainedCalls: calls that requests require, or of strict tools, are complete and follow the schema of their tool,
// in every format.
func TestConstrainedCalls(t *testing.T) {
	const parameters = `{"type": "object", "properties": {"city": {"type": "string", "enum": ["Malmö", "Pécs"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}, "exact": {"type": "boolean"}, "note": {"type": "string"}}, "required": ["city", "days"], "additionalProperties": false}`
	const other = `{"type": "object", "properties": {"zone": {"type": ["string", "null"], "enum": ["CET", "UTC", null]}, "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "minItems": 1, "maxItems": 2}}, "required": ["zone", "at"], "additionalProperties": false}`
	schemas := map[string]string{"weather": parameters, "time": other}
	tools := `, "max_tokens": 1500, "tools": [{"type": "function", "function": {"name": "weather", "strict": true, "parameters": ` + parameters + `}}, {"type": "function", "function": {"name": "time", "parameters": ` + other + `}}]`
	phi := `{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}`
	for name, c := range map[string]struct {
		template string
		marks    []string
		format   *output.Format
	}{
		"hermes":       {qwenTemplate(t), []string{"</think>", "</tool_call>"}, output.Hermes},
		"mistral":      {mistralTemplate, []string{"[TOOL_CALLS]"}, output.Mistral},
		"phi4 words":   {phi, nil, output.Phi4Mini},
		"phi4 tokens":  {phi, []string{"<|tool_call|>", "<|/tool_call|>"}, output.Phi4MiniTokens},
		"llama":        {phi, nil, output.JSON},
		"qwen3 coder":  {phi, nil, output.QwenXML},
		"olmo":         {phi, nil, output.Olmo},
		"with thought": {qwenTemplate(t), []string{"<think>", "</think>"}, output.Hermes},
	} {
		t.Run(name, func(t *testing.T) {
			s := guessing(t, c.template, c.marks, func(m *server.Model) { m.Calls = c.format })
			for _, more := range []string{
				`, "tool_choice": "required"`,
				`, "tool_choice": "required", "parallel_tool_calls": false`,
				`, "tool_choice": {"type": "function", "function": {"name": "time"}}`,
				`, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ` + person + `}}`,
				"",
			} {
				for range 4 {
					body := chatBody("What is the weather?", tools+more)
					r := decode[struct {
						Choices []struct {
							Message      toolMessage
							FinishReason string `json:"finish_reason"`
						}
					}](t, s.post(chatPath, body))
					m := r.Choices[0].Message
					forced := strings.Contains(more, "tool_choice")
					if forced && (r.Choices[0].FinishReason != "tool_calls" || len(m.ToolCalls) == 0 || m.Content != nil) {
						t.Errorf("%s: %s %s", more, m.String(), r.Choices[0].FinishReason)
					}
					if (strings.Contains(more, "parallel") || strings.Contains(more, `"name": "time"`)) && len(m.ToolCalls) > 1 {
						t.Errorf("%s: %d calls", more, len(m.ToolCalls))
					}
					for _, call := range m.ToolCalls {
						if err := validates(schemas[call.Function.Name], call.Function.Arguments); err != nil {
							t.Errorf("%s: %s(%s): %v", more, call.Function.Name, call.Function.Arguments, err)
						}
					}
					if strings.Contains(more, "response_format") && len(m.ToolCalls) == 0 {
						if m.Content == nil {
							t.Errorf("%s: %s", more, m.String())
						} else if err := validates(person, *m.Content); err != nil {
							t.Errorf("%s: %q: %v", more, *m.Content, err)
						}
					}
				}
			}
		})
	}
}

// TestStrictTools: a keyword that is not supported is refused where its tool is strict, and else means nothing: the others
// hold.
func TestStrictTools(t *testing.T) {
	s := guessing(t, qwenTemplate(t), nil, nil)
	for _, strict := range []bool{true, false} {
		body := chatBody("x", fmt.Sprintf(`, "max_tokens": 900, "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "strict": %v, "parameters": {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "uniqueItems": true, "contains": {"const": "x"}}}, "required": ["a"]}}}]`, strict))
		a := s.send("POST", chatPath, body)
		if !strict {
			if a.status != 200 {
				t.Fatalf("status %d: %s", a.status, a.body)
			}
			r := decode[struct {
				Choices []struct{ Message toolMessage }
			}](t, s.post(chatPath, body))
			call := r.Choices[0].Message.ToolCalls[0].Function.Arguments
			if !regexp.MustCompile(`^\{\s*"a"\s*:\s*\[\s*"[xy]"(\s*,\s*"[xy]")+\s*\]\s*\}$`).MatchString(call) {
				t.Errorf("arguments %s", call)
			}
			continue
		}
		if message, _, param, _ := failed(t, a); a.status != 400 || param != "tools[0].function.parameters" || !strings.Contains(message, "uniqueItems at #/properties/a") {
			t.Errorf("status %d: %s", a.status, a.body)
		}
	}
	if !json.Valid([]byte(person)) {
		t.Error("the schema of these tests is not JSON")
	}
}

// TestStrictToolsOfFormats: strict tools constrain calls in Anthropic's and OpenAI's newer API, too.
func TestStrictToolsOfFormats(t *testing.T) {
	const parameters = `{"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14}}, "required": ["days"], "additionalProperties": false}`
	s := guessing(t, qwenTemplate(t), nil, nil)
	for _, c := range []struct{ path, body, param, choices string }{
		{messagesPath, `{"max_tokens": 900, "messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "strict": true, "input_schema": %s}]`, "tools[0].input_schema", `, "tool_choice": {"type": "any"}`},
		{responsesPath, `{"max_output_tokens": 900, "input": "x", "tools": [{"type": "function", "name": "f", "strict": true, "parameters": %s}]`, "tools[0].parameters", `, "tool_choice": "required"`},
	} {
		for _, choice := range []string{"", c.choices} {
			for _, stream := range []string{"", `, "stream": true`} {
				if a := s.send("POST", c.path, fmt.Sprintf(c.body, parameters)+choice+stream+"}"); a.status != 200 {
					t.Errorf("%s%s%s: status %d: %s", c.path, choice, stream, a.status, a.body)
				}
			}
		}
		r := decode[struct {
			Content []struct{ Input json.RawMessage }
			Output  []struct{ Arguments string }
		}](t, s.post(c.path, fmt.Sprintf(c.body, parameters)+c.choices+"}"))
		calls := 0
		for _, b := range r.Content {
			calls++
			if err := validates(parameters, string(b.Input)); err != nil {
				t.Errorf("%s: %s: %v", c.path, b.Input, err)
			}
		}
		for _, b := range r.Output {
			calls++
			if err := validates(parameters, b.Arguments); err != nil {
				t.Errorf("%s: %s: %v", c.path, b.Arguments, err)
			}
		}
		if calls == 0 {
			t.Errorf("%s: no call", c.path)
		}
		if a := s.send("POST", c.path, fmt.Sprintf(c.body, `{"type": "object", "properties": {"a": {"not": {"format": "date"}}}}`)+"}"); a.status != 400 || !strings.Contains(a.body, c.param) {
			t.Errorf("%s: status %d: %s", c.path, a.status, a.body)
		}
	}
}

// TestGrammarKeys: a grammar that is kept is not that of another request, whose members would be the same if they
// were joined.
func TestGrammarKeys(t *testing.T) {
	h := start(t, options{})
	body := func(members string) string {
		return `{"prompt": "1+2=", "max_tokens": 9, "structured_outputs": {` + members + `}}`
	}
	if a := h.send("POST", completionsPath, body(`"regex": "a", "whitespace_pattern": "\u0000"`)); a.status != 400 {
		t.Errorf("status %d: %s", a.status, a.body)
	}
	r := decode[struct{ Choices []struct{ Text string } }](t, h.post(completionsPath, body(`"regex": "a\u0000"`)))
	if r.Choices[0].Text != "a\x00" {
		t.Errorf("%q", r.Choices[0].Text)
	}
}

// TestReasoningFirst: an answer is constrained behind the reasoning, wherever the prompt leaves the model.
func TestReasoningFirst(t *testing.T) {
	s := guessing(t, qwenTemplate(t), []string{"<think>", "</think>"}, nil)
	thought := 0
	for i, more := range slices.Repeat([]string{"", `, "enable_thinking": false`}, 8) {
		r := decode[struct {
			Choices []struct {
				Message      toolMessage
				FinishReason string `json:"finish_reason"`
			}
		}](t, s.post(chatPath, chatBody("x", `, "max_tokens": 2000, "structured_outputs": {"choice": ["yes", "no"]}`+more)))
		m := r.Choices[0].Message
		if m.Content == nil || *m.Content != "yes" && *m.Content != "no" {
			t.Errorf("%d: %s", i, m.String())
		}
		if m.Reasoning != "" {
			thought++
		}
	}
	if thought == 0 {
		t.Error("no completion has reasoning")
	}
}
