// Package openai_test holds moeserve to what the official clients of the OpenAI API
// expect. It is a module of its own, so that their dependencies are not moeserve's.
package openai_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/shared"
)

const (
	key     = "a key of this test"
	ball    = "Ann gave the red ball to Ben. Who has the ball?"
	ballIs  = "Ben has the red ball."
	builtIn = "built-in"
	tools   = "with-tools"
)

// address of the server that all tests talk to, and toolAddress of one whose model's template has tools.
var address, toolAddress string

func TestMain(m *testing.M) {
	code, err := serveAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "openai:", err)
		code = 1
	}
	os.Exit(code)
}

// serveAndRun builds and starts moeserve, runs the tests, and ends it in order.
func serveAndRun(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "moeserve")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	binary := filepath.Join(dir, "moeserve")
	build := exec.Command("go", "build", "-o", binary, "./cmd/moeserve")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		return 1, fmt.Errorf("build moeserve: %w\n%s", err, out)
	}
	model := filepath.Join(dir, tools)
	if err := toolModel(model); err != nil {
		return 1, err
	}
	for _, s := range []struct {
		address *string
		args    []string
	}{{&address, []string{"--offload-fraction", "0.5"}}, {&toolAddress, []string{"--model", model}}} {
		at, stop, err := serve(binary, s.args...)
		if err != nil {
			return 1, err
		}
		*s.address = at
		defer func() {
			if err2 := stop(); err2 != nil {
				code, err = 1, errors.Join(err, err2)
			}
		}()
	}
	return m.Run(), nil
}

// toolModel makes a model's directory: random weights, and a chat template with tools.
func toolModel(dir string) error {
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("..", "..", "testdata", "fixtures", "qwen3_moe"))); err != nil {
		return err
	}
	template, err := os.ReadFile(filepath.Join("testdata", "tools.jinja"))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "chat_template.jinja"), template, 0o600)
}

// serve starts a server on a free port. stop ends it in order.
func serve(binary string, args ...string) (at string, stop func() error, err error) {
	p := exec.Command(binary, append([]string{"serve", "--port", "0"}, args...)...)
	p.Dir = filepath.Dir(binary)
	p.Env = append(os.Environ(), "MOESERVE_API_KEY="+key)
	stderr, err := p.StderrPipe()
	if err != nil {
		return "", nil, err
	}
	if err := p.Start(); err != nil {
		return "", nil, err
	}
	lines := bufio.NewScanner(stderr)
	serving := regexp.MustCompile(`msg=serving .*address=(http://\S+)`)
	late := time.AfterFunc(time.Minute, func() { _ = p.Process.Kill() }) // ends the loop
	for at == "" && lines.Scan() {
		if found := serving.FindStringSubmatch(lines.Text()); found != nil {
			at = found[1]
		} else {
			fmt.Fprintln(os.Stderr, lines.Text())
		}
	}
	if at == "" {
		return "", nil, fmt.Errorf("moeserve did not serve: %w", p.Wait())
	}
	late.Stop()
	read := make(chan struct{})
	go func() { // the log of requests must not fill the pipe
		defer close(read)
		for lines.Scan() {
			fmt.Fprintln(os.Stderr, lines.Text())
		}
	}()
	return at, func() error {
		if err := p.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		<-read
		return p.Wait()
	}, nil
}

func client(more ...option.RequestOption) openai.Client {
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL(address + "/v1"), option.WithAPIKey(key), option.WithMaxRetries(0), option.WithRequestTimeout(time.Minute),
	}, more...)...)
}

func chat(prompt string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: builtIn, Temperature: param.NewOpt(0.0),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("Be right."), openai.UserMessage(prompt)},
	}
}

func TestModels(t *testing.T) {
	c := client()
	models, err := c.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(models.Data) != 1 || models.Data[0].ID != builtIn || models.Data[0].Created == 0 || models.Data[0].OwnedBy != "moeserve" {
		t.Errorf("%+v", models.Data)
	}
	m, err := c.Models.Get(t.Context(), builtIn)
	if err != nil || m.ID != builtIn {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestChat(t *testing.T) {
	c := client()
	p := chat(ball)
	p.N, p.Seed, p.Logprobs, p.TopLogprobs = param.NewOpt[int64](2), param.NewOpt[int64](7), param.NewOpt(true), param.NewOpt[int64](3)
	p.User, p.MaxCompletionTokens = param.NewOpt("me"), param.NewOpt[int64](20)
	a, err := c.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if a.Object != "chat.completion" || a.Model != builtIn || a.ID == "" || a.Created == 0 || len(a.Choices) != 2 {
		t.Errorf("%s", a.RawJSON())
	}
	for i, choice := range a.Choices {
		if choice.Index != int64(i) || choice.Message.Content != ballIs || choice.Message.Role != "assistant" || choice.FinishReason != "stop" {
			t.Errorf("%s", choice.RawJSON())
		}
		var text []byte
		for _, l := range choice.Logprobs.Content {
			if len(l.TopLogprobs) != 3 || l.TopLogprobs[0].Token != l.Token || l.Logprob > 0 {
				t.Errorf("%s", l.RawJSON())
			}
			for _, b := range l.Bytes {
				text = append(text, byte(b))
			}
		}
		if !strings.HasPrefix(string(text), ballIs) {
			t.Errorf("the tokens' bytes are %q", text)
		}
	}
	u := a.Usage
	if u.PromptTokens != 15 || u.CompletionTokens != 2*7 || u.TotalTokens != 15+2*7 || !u.PromptTokensDetails.JSON.CachedTokens.Valid() {
		t.Errorf("%s", u.RawJSON())
	}
	// An answer goes back as it came.
	p = chat("1+2=")
	p.Messages = append(p.Messages, openai.AssistantMessage("3"), a.Choices[0].Message.ToParam(), openai.UserMessage("sort: d a c b ="))
	if a, err = c.Chat.Completions.New(t.Context(), p); err != nil || a.Choices[0].Message.Content != "a b c d" {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestChatStream(t *testing.T) {
	c := client()
	p := chat(ball)
	p.StreamOptions.IncludeUsage = param.NewOpt(true)
	p.Stop = openai.ChatCompletionNewParamsStopUnion{OfStringArray: []string{" ball"}}
	stream := c.Chat.Completions.NewStreaming(t.Context(), p)
	var sum openai.ChatCompletionAccumulator
	var pieces int
	for stream.Next() {
		chunk := stream.Current()
		if !sum.AddChunk(chunk) {
			t.Fatalf("a chunk that does not fit: %s", chunk.RawJSON())
		}
		if len(chunk.Choices) > 0 && chunk.Choices[0].Delta.Content != "" {
			pieces++
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(sum.Choices) != 1 || sum.Choices[0].Message.Content != "Ben has the red" || sum.Choices[0].FinishReason != "stop" || pieces < 2 {
		t.Errorf("%d pieces of %+v", pieces, sum.Choices)
	}
	if sum.Usage.PromptTokens != 15 || sum.Usage.CompletionTokens == 0 || sum.Usage.TotalTokens != sum.Usage.PromptTokens+sum.Usage.CompletionTokens {
		t.Errorf("%+v", sum.Usage)
	}
}

// braces are biases for "{" and then "}".
func braces(t *testing.T) map[string]int64 {
	t.Helper()
	c := client()
	var b struct{ Tokens []int64 }
	err := c.Post(t.Context(), "tokenize", map[string]any{"prompt": "{}", "add_special_tokens": false}, &b, option.WithBaseURL(toolAddress))
	if err != nil || len(b.Tokens) != 2 {
		t.Fatalf("%+v, %v", b, err)
	}
	return map[string]int64{fmt.Sprint(b.Tokens[0]): 100, fmt.Sprint(b.Tokens[1]): 99}
}

// A call that the request names begins in the prompt, and the model's next two tokens, which biases
// choose, are its arguments. Call and result go back as they came.
func TestTools(t *testing.T) {
	c := client(option.WithBaseURL(toolAddress + "/v1"))
	p := chat("Hi")
	p.Model = tools
	p.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: "weather"})}
	p.ToolChoice = openai.ToolChoiceOptionFunctionToolChoice(openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "weather"})
	p.LogitBias = braces(t)
	p.PresencePenalty = param.NewOpt(2.0)
	p.Stop = openai.ChatCompletionNewParamsStopUnion{OfString: param.NewOpt("}")}
	ends := option.WithJSONSet("include_stop_str_in_output", true)
	check := func(what string, choices []openai.ChatCompletionChoice) {
		t.Helper()
		if len(choices) != 1 || len(choices[0].Message.ToolCalls) != 1 {
			t.Fatalf("%s: %+v", what, choices)
		}
		m := choices[0].Message
		call := m.ToolCalls[0]
		if choices[0].FinishReason != "tool_calls" || m.Content != "" || call.Type != "function" || !strings.HasPrefix(call.ID, "call_") ||
			call.Function.Name != "weather" || call.Function.Arguments != "{}" {
			t.Errorf("%s: %s %+v", what, choices[0].FinishReason, m)
		}
	}
	a, err := c.Chat.Completions.New(t.Context(), p, ends)
	if err != nil {
		t.Fatal(err)
	}
	check("whole", a.Choices)

	stream := c.Chat.Completions.NewStreaming(t.Context(), p, ends)
	var sum openai.ChatCompletionAccumulator
	finished := 0
	for stream.Next() {
		if chunk := stream.Current(); !sum.AddChunk(chunk) {
			t.Fatalf("a chunk that does not fit: %s", chunk.RawJSON())
		}
		if call, ok := sum.JustFinishedToolCall(); ok {
			finished++
			if call.Name != "weather" || call.Arguments != "{}" {
				t.Errorf("%+v", call)
			}
		}
	}
	if err := stream.Err(); err != nil || finished != 1 {
		t.Fatalf("%d calls finished, %v", finished, err)
	}
	check("streamed", sum.Choices)

	call := a.Choices[0].Message.ToolCalls[0]
	p = chat("Hi")
	p.Model, p.MaxTokens = tools, param.NewOpt[int64](4)
	p.Messages = append(p.Messages, a.Choices[0].Message.ToParam(), openai.ToolMessage("21", call.ID))
	if a, err = c.Chat.Completions.New(t.Context(), p); err != nil || len(a.Choices[0].Message.ToolCalls) != 0 || a.Choices[0].Message.Content == "" {
		t.Errorf("%+v, %v", a, err)
	}
}

// A response format makes JSON of what a model writes that knows none. Members come in the order of the schema, which Go sorts.
func TestResponseFormat(t *testing.T) {
	c := client()
	p := chat("1+2=")
	p.ResponseFormat = openai.ChatCompletionNewParamsResponseFormatUnion{OfJSONSchema: &shared.ResponseFormatJSONSchemaParam{
		JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "sum", Strict: param.NewOpt(true), Schema: map[string]any{
			"type": "object", "properties": map[string]any{"sum": map[string]any{"type": "integer", "minimum": 0, "maximum": 9}, "kind": map[string]any{"enum": []string{"odd", "even"}}},
			"required": []string{"sum", "kind"}, "additionalProperties": false,
		}},
	}}
	a, err := c.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if choice := a.Choices[0]; choice.FinishReason != "stop" || !regexp.MustCompile(`^\{\s*"kind"\s*:\s*"(odd|even)"\s*,\s*"sum"\s*:\s*\d\s*\}$`).MatchString(choice.Message.Content) {
		t.Errorf("%s", choice.RawJSON())
	}
	stream := c.Chat.Completions.NewStreaming(t.Context(), p)
	var sum openai.ChatCompletionAccumulator
	for stream.Next() {
		sum.AddChunk(stream.Current())
	}
	if err := stream.Err(); err != nil || sum.Choices[0].Message.Content != a.Choices[0].Message.Content {
		t.Errorf("streamed %+v, %v", sum.Choices, err)
	}
}

func TestCompletions(t *testing.T) {
	c := client()
	for _, test := range []struct {
		prompt openai.CompletionNewParamsPromptUnion
		want   []string
	}{
		{openai.CompletionNewParamsPromptUnion{OfString: param.NewOpt("1+2=")}, []string{"3"}},
		{openai.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{"1+2=", "sort: d a c b ="}}, []string{"3", "a b c d"}},
	} {
		p := openai.CompletionNewParams{Model: builtIn, Prompt: test.prompt, Temperature: param.NewOpt(0.0), Logprobs: param.NewOpt[int64](2)}
		a, err := c.Completions.New(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, choice := range a.Choices {
			got = append(got, choice.Text)
			if len(choice.Logprobs.Tokens) == 0 || len(choice.Logprobs.TopLogprobs[0]) != 2 || choice.FinishReason != "stop" {
				t.Errorf("%s", choice.RawJSON())
			}
		}
		if !slices.Equal(got, test.want) || a.Object != "text_completion" {
			t.Errorf("%q, want %q", got, test.want)
		}
		stream := c.Completions.NewStreaming(t.Context(), p)
		got = make([]string, len(test.want))
		for stream.Next() {
			for _, choice := range stream.Current().Choices {
				got[choice.Index] += choice.Text
			}
		}
		if err := stream.Err(); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("streamed: %q, want %q: %v", got, test.want, err)
		}
	}
	ids := openai.CompletionNewParamsPromptUnion{OfArrayOfTokens: []int64{1, 2, 3}}
	a, err := c.Completions.New(t.Context(), openai.CompletionNewParams{Model: builtIn, Prompt: ids, MaxTokens: param.NewOpt[int64](1)})
	if err != nil || a.Usage.PromptTokens != 3 || a.Usage.CompletionTokens != 1 {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestErrors(t *testing.T) {
	long := chat(strings.Repeat("1+2=", 100))
	hot := chat("1+2=")
	hot.Temperature = param.NewOpt(-1.0)
	other := chat("1+2=")
	other.Model = "gpt-5"
	audio := chat("1+2=")
	audio.Modalities = []string{"audio"}
	for _, test := range []struct {
		p                 openai.ChatCompletionNewParams
		more              []option.RequestOption
		status            int
		param, code, kind string
	}{
		{long, nil, 400, "messages", "context_length_exceeded", "invalid_request_error"},
		{hot, nil, 400, "temperature", "invalid_value", "invalid_request_error"},
		{audio, nil, 400, "modalities", "unsupported_parameter", "invalid_request_error"},
		{chat("1+2="), []option.RequestOption{option.WithJSONSet("frobnicate", 1)}, 400, "frobnicate", "unknown_parameter", "invalid_request_error"},
		{other, nil, 404, "model", "model_not_found", "invalid_request_error"},
		{chat("1+2="), []option.RequestOption{option.WithAPIKey("wrong")}, 401, "", "invalid_api_key", "invalid_request_error"},
		{chat("1+2="), []option.RequestOption{option.WithBaseURL(address + "/v2")}, 404, "", "unknown_url", "invalid_request_error"},
	} {
		c := client(test.more...)
		_, err := c.Chat.Completions.New(t.Context(), test.p)
		var e *openai.Error
		if !errors.As(err, &e) || e.StatusCode != test.status || e.Param != test.param || e.Code != test.code || e.Type != test.kind || e.Message == "" {
			t.Errorf("%v, want %d %s %s", err, test.status, test.param, test.code)
		}
		stream := c.Chat.Completions.NewStreaming(t.Context(), test.p)
		if stream.Next() {
			t.Errorf("a chunk: %s", stream.Current().RawJSON())
		}
		if err := stream.Err(); !errors.As(err, &e) || e.StatusCode != test.status {
			t.Errorf("streamed: %v, want %d", err, test.status)
		}
	}
}
