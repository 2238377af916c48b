package server_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/server"
)

// hasty is an engine whose completions are short, once their parameters have passed.
type hasty struct{ *engine.Engine }

func (h hasty) Submit(ctx context.Context, r engine.Request) (*engine.Job, error) {
	if err := r.Params.Validate(894); err != nil {
		return nil, err
	}
	r.Params.MaxTokens, r.Params.MinTokens = min(r.Params.MaxTokens, 2), 0
	return h.Engine.Submit(ctx, r)
}

// withTools is a template that has a place for tools.
type withTools struct{ server.Template }

func (w withTools) Render(ctx context.Context, messages []chat.Message, o chat.Options) (chat.Prompt, error) {
	p, err := w.Template.Render(ctx, messages, o)
	if o.Tools != nil {
		p.Text += "tools"
	}
	return p, err
}

// fuzz sends bodies to an endpoint: whatever they hold, the response is JSON or
// events, and never this server's fault.
func fuzz(f *testing.F, path string, seeds ...string) {
	n, err := node.Open(f.Context(), node.Options{Settings: configs.Defaults(), MaxQueued: 64})
	if err != nil {
		f.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- n.Engine().Run(ctx) }()
	f.Cleanup(func() {
		stop()
		if err := <-ran; err != nil {
			f.Error(err)
		}
		if err := n.Close(); err != nil {
			f.Error(err)
		}
	})
	s := server.New(server.Options{MaxSamples: 16})
	s.SetModels(&server.Model{
		Names: []string{"tiny"}, Engine: hasty{n.Engine()}, Tokenizer: n.Text().Tokenizer, Template: withTools{n.Text().Template},
		Calls: output.Hermes, Reasoning: output.Qwen3,
		MaxModelLen: n.Info().Limits.MaxModelLen, Defaults: engine.DefaultParams(),
	})
	for _, seed := range seeds {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		s.ServeHTTP(w, r)
		switch a := (answer{w.Code, w.Header(), w.Body.String()}); {
		case (w.Code == http.StatusBadRequest || w.Code == http.StatusNotFound) && path == "/v1/messages":
			if e := decode[map[string]any](t, a.body); e["type"] != "error" {
				t.Errorf("%s", a.body)
			}
		case w.Code == http.StatusBadRequest || w.Code == http.StatusNotFound:
			failed(t, a)
		case w.Code != http.StatusOK:
			t.Errorf("status %d: %s", w.Code, w.Body)
		case w.Header().Get("Content-Type") == "text/event-stream":
			events, err := readEvents(w.Body)
			last := map[string]string{"/v1/messages": "message_stop", "/v1/responses": "response.completed"}[path]
			if last == "" {
				last = "[DONE]"
			}
			if err != nil || len(events) < 2 || !strings.Contains(strings.ReplaceAll(events[len(events)-1], "incomplete", "completed"), last) {
				t.Errorf("events %q, %v", events, err)
			}
		default:
			decode[map[string]any](t, a.body)
		}
	})
}

func FuzzCompletions(f *testing.F) {
	fuzz(f, "/v1/completions",
		`{"prompt": "1+2=", "temperature": 0}`,
		`{"prompt": ["1+2=", "sort: b a ="], "n": 2, "best_of": 2, "echo": true, "stream": true, "stream_options": {"include_usage": true}}`,
		`{"prompt": [1, 2, 3], "logprobs": 5, "max_tokens": 3, "min_tokens": 1, "top_p": 0.5, "top_k": -1, "min_p": 1e-3, "return_token_ids": true}`,
		`{"prompt": [[1], [2]], "stop": ["a", "b"], "seed": -1, "logit_bias": {"5": -100}, "stop_token_ids": [0], "ignore_eos": true}`,
		`{"prompt": "\ud800\u0000", "model": "tiny", "user": null, "suffix": "", "response_format": {"type": "text"}, "stop": "x"}`,
		`{"prompt": 1e999, "max_tokens": 1e30, "n": 99999999999, "temperature": "hot"}`,
		`{"prompt": ["x y", [1, 2]], "echo": true, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 0, "bad_words": ["a b", " c"], "allowed_token_ids": [3, 4]}`,
		`{"prompt": "x", "presence_penalty": 2, "frequency_penalty": -2.0, "repetition_penalty": 1.5, "unknown": [[]]}`,
	)
}

func FuzzChat(f *testing.F) {
	fuzz(f, "/v1/chat/completions",
		`{"messages": [{"role": "user", "content": "1+2="}], "temperature": 0, "max_completion_tokens": 3}`,
		`{"messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": ""}], "stream": true, "n": 2}`,
		`{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]}`,
		`{"messages": [{"role": "user", "content": "é<|user|>", "name": "Ann"}], "logprobs": true, "top_logprobs": 3, "tools": [], "tool_choice": "auto"}`,
		`{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}], "tool_choice": {"type": "function", "function": {"name": "f"}}}`,
		`{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": 1}], "tool_choice": "required", "parallel_tool_calls": false, "skip_special_tokens": false}`,
		`{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1, "a": {"b": [1e3]}}, "add_generation_prompt": false, "stop": ["<"]}`,
		`{"messages": [[]], "modalities": ["text"], "response_format": 1}`,
	)
}

func FuzzTokenize(f *testing.F) {
	fuzz(f, "/tokenize",
		`{"prompt": "a é 中", "add_special_tokens": false, "return_token_strs": true, "model": "tiny"}`,
		`{"messages": [{"role": "user", "content": " 1+2= "}], "return_token_strs": true}`,
		`{"tokens": [1, 2]}`,
	)
}

func FuzzMessages(f *testing.F) {
	fuzz(f, "/v1/messages",
		`{"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "1+2="}], "temperature": 0, "stream": true}`,
		`{"max_tokens": 3, "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stop_sequences": ["b"]}`,
		`{"max_tokens": 3, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": ""}, {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}, {"type": "text", "text": "y"}]}]}`,
		`{"max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "stream": true}`,
		`{"max_tokens": 3, "messages": [{"role": "user", "content": null}], "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "metadata": {}}`,
		`{"max_tokens": 3, "messages": [{"role": "assistant", "content": []}, {"role": "user", "content": [[]]}], "system": null, "tools": [{"type": "x"}]}`,
	)
}

func FuzzResponses(f *testing.F) {
	fuzz(f, "/v1/responses",
		`{"model": "tiny", "input": "1+2=", "temperature": 0, "stream": true, "max_output_tokens": 2}`,
		`{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "a", "output": "x"}], "instructions": "b"}`,
		`{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": null}], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false, "stream": true}`,
		`{"input": [], "text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": true}`,
		`{"input": [{"type": "item_reference", "id": "x"}], "metadata": {"a": [1]}, "tool_choice": "required", "previous_response_id": null}`,
		`{"input": "a", "temperature": "a", "tool_choice": {"type": "function", "name": "f"}}`,
	)
}
