package serving

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// The endpoints that can be measured.
const (
	Completions     = "/v1/completions"
	ChatCompletions = "/v1/chat/completions"
)

// Endpoints lists them.
var Endpoints = []string{Completions, ChatCompletions}

// Client sends requests to a server.
type Client struct {
	// BaseURL of the server, without /v1.
	BaseURL string
	// Endpoint is one of Endpoints.
	Endpoint string
	// Model as the server names it.
	Model string
	// APIKey, if not empty, is sent as a bearer token.
	APIKey string
	// HTTP sends. Default: a client that keeps as many connections open as requests run.
	HTTP *http.Client
}

// maxErrorBytes bounds what is read of an error's body.
const maxErrorBytes = 64 << 10

// maxEventBytes bounds a line of a stream.
const maxEventBytes = 16 << 20

func (c *Client) http() *http.Client {
	if c.HTTP == nil {
		c.HTTP = &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 1 << 16}}
	}
	return c.HTTP
}

// send sends a request; the caller closes the response's body. A status other than 200 is an
// error with the server's message.
func (c *Client) send(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var payload io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("serving: %w", err)
		}
		payload = bytes.NewReader(data)
	}
	r, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.BaseURL, "/")+path, payload)
	if err != nil {
		return nil, fmt.Errorf("serving: %w", err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.APIKey != "" {
		r.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	res, err := c.http().Do(r)
	if err != nil {
		return nil, fmt.Errorf("serving: %w", err)
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer res.Body.Close()                                         //nolint:errcheck // only read from
	text, _ := io.ReadAll(io.LimitReader(res.Body, maxErrorBytes)) // the status is reported all the same
	return nil, &StatusError{Path: path, Status: res.Status, Message: message(text)}
}

// StatusError is a server's refusal of a request.
type StatusError struct{ Path, Status, Message string }

func (e *StatusError) Error() string {
	s := e.Path + ": " + e.Status
	if e.Message != "" {
		s += ": " + e.Message
	}
	return s
}

// message is that of an error's body: OpenAI's shape, or text.
func message(body []byte) string {
	var e struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
		Message string `json:"message"`
	}
	if json.Unmarshal(body, &e) == nil {
		if e.Error.Message != "" {
			return e.Error.Message
		}
		return e.Message
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	return line[:min(len(line), 200)]
}

// get reads a JSON object.
func (c *Client) get(ctx context.Context, method, path string, body, into any) error {
	res, err := c.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer res.Body.Close() //nolint:errcheck // only read from
	if err := json.NewDecoder(io.LimitReader(res.Body, maxEventBytes)).Decode(into); err != nil {
		return fmt.Errorf("serving: %s: %w", path, err)
	}
	return nil
}

// Models are the names of the server's models.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := c.get(ctx, http.MethodGet, "/v1/models", nil, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	if names == nil {
		return nil, errors.New("serving: the server has no model")
	}
	return names, nil
}

// Version of the server; empty where it reports none.
func (c *Client) Version(ctx context.Context) string {
	var v struct {
		Version string `json:"version"`
	}
	if c.get(ctx, http.MethodGet, "/version", nil, &v) != nil {
		return ""
	}
	return v.Version
}

// Vocabulary is the token ids of a text, each once: what random prompts are made of. It needs
// /tokenize, which vLLM and moeserve have.
func (c *Client) Vocabulary(ctx context.Context) ([]int32, error) {
	var t struct {
		Tokens []int32 `json:"tokens"`
	}
	err := c.get(ctx, http.MethodPost, "/tokenize", map[string]any{"model": c.Model, "prompt": pangrams, "add_special_tokens": false}, &t)
	if err != nil {
		return nil, err
	}
	if len(t.Tokens) == 0 {
		return nil, errors.New("serving: /tokenize returns no tokens")
	}
	slices.Sort(t.Tokens)
	return slices.Compact(t.Tokens), nil
}

// pangrams is a text with many tokens.
const pangrams = `The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs; how vexingly
quick daft zebras jump! Sphinx of black quartz, judge my vow: 0 1 2 3 4 5 6 7 8 9 + = ( ) [ ] a b c d e f g h i j k l m n o p
q r s t u v w x y z. When the cache holds what a layer needs, nothing waits; when it does not, the engine copies weights
from memory that is farther away, and the step takes as long as the slowest link between them.`

// body is a request for a completion.
func (c *Client) body(p *Request, o *Options) map[string]any {
	b := map[string]any{
		"model": c.Model, "max_tokens": cmp.Or(p.OutputLen, o.OutputLen), "temperature": o.Temperature, "stream": true,
		"stream_options": map[string]any{"include_usage": true},
	}
	if o.IgnoreEOS {
		b["ignore_eos"] = true
	}
	switch {
	case c.Endpoint == ChatCompletions:
		b["messages"] = []map[string]string{{"role": "user", "content": p.Text}}
	case p.IDs != nil:
		b["prompt"] = p.IDs
	default:
		b["prompt"] = p.Text
	}
	return b
}

// sample is the measurement of one request.
type sample struct {
	request                    int // its place among the requests
	promptTokens, outputTokens int
	began                      time.Time
	ttft, e2e                  time.Duration
	itl                        []time.Duration
	// text that was generated, with Options.Detailed.
	text string
	// failure is why it has failed; empty: it has completed.
	failure string
}

// chunk is a chunk of either endpoint's stream.
type chunk struct {
	Choices []struct {
		Text  string `json:"text"`
		Delta struct {
			Role    string  `json:"role"`
			Content *string `json:"content"`
			// Reasoning has one of two names, or both.
			Reasoning        string            `json:"reasoning"`
			ReasoningContent string            `json:"reasoning_content"`
			ToolCalls        []json.RawMessage `json:"tool_calls"`
		} `json:"delta"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
	} `json:"usage"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// measure sends one request and reads its stream.
func (c *Client) measure(ctx context.Context, p *Request, o *Options) (sample, error) {
	began := time.Now()
	s := sample{began: began, promptTokens: len(p.IDs)}
	res, err := c.send(ctx, http.MethodPost, c.Endpoint, c.body(p, o))
	if err != nil {
		return s, err
	}
	defer res.Body.Close() //nolint:errcheck // only read from
	var first, last time.Time
	var generated strings.Builder
	usage, done := false, false
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, maxEventBytes)
	for lines.Scan() { // to the end: only then the connection serves another request
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		if done {
			continue
		}
		now := time.Now()
		if data = bytes.TrimSpace(data); string(data) == "[DONE]" {
			done, s.e2e = true, now.Sub(began)
			continue
		}
		var k chunk
		if err := json.Unmarshal(data, &k); err != nil {
			return s, fmt.Errorf("serving: %s: a chunk of the stream: %w", c.Endpoint, err)
		}
		if k.Error != nil {
			return s, fmt.Errorf("serving: %s: %s", c.Endpoint, k.Error.Message)
		}
		if k.Usage != nil {
			usage, s.promptTokens, s.outputTokens = true, k.Usage.PromptTokens, k.Usage.CompletionTokens
		}
		if len(k.Choices) == 0 {
			continue
		}
		x := &k.Choices[0]
		if o.Detailed {
			generated.WriteString(x.Text)
			if x.Delta.Content != nil {
				generated.WriteString(*x.Delta.Content)
			}
		}
		// A chunk is of a token also where that has no text yet, or none at all. Not so those of a chat that only begin or end
		// the message.
		text := x.Text != "" || x.Delta.Content != nil && *x.Delta.Content != "" || x.Delta.Reasoning != "" || x.Delta.ReasoningContent != "" || len(x.Delta.ToolCalls) > 0
		begins := x.Delta.Role != "" && x.FinishReason == nil
		ends := c.Endpoint == ChatCompletions && x.Delta.Content == nil && !first.IsZero()
		switch {
		case !text && (begins || ends):
		case first.IsZero():
			first, last = now, now
			s.ttft = now.Sub(began)
		default:
			s.itl = append(s.itl, now.Sub(last))
			last = now
		}
	}
	s.text = generated.String()
	switch err := lines.Err(); {
	case err != nil && !done:
		return s, fmt.Errorf("serving: %s: read the stream: %w", c.Endpoint, err)
	case !done:
		return s, fmt.Errorf("serving: %s: the stream ends without [DONE]", c.Endpoint)
	case first.IsZero():
		return s, fmt.Errorf("serving: %s: the stream has no token", c.Endpoint)
	case !usage:
		return s, fmt.Errorf("serving: %s: the stream has no usage: the server ignores stream_options.include_usage", c.Endpoint)
	}
	return s, nil
}
