package server_test

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// question is a line of the built-in model's test set.
type question struct{ Task, Prompt, Answer string }

// questions reads the first n of each task.
func questions(t *testing.T, n int) []question {
	t.Helper()
	f, err := os.Open("../models/tiny/testdata/eval.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read from
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all []question
	count := map[string]int{}
	lines := bufio.NewScanner(z)
	for lines.Scan() {
		var q question
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		if count[q.Task]++; count[q.Task] <= n {
			all = append(all, q)
		}
	}
	if err := lines.Err(); err != nil || len(count) != 5 {
		t.Fatalf("test set: %d tasks, %v", len(count), err)
	}
	return all
}

// asked is a request and, without the headers, the response that it had alone.
type asked struct {
	path, body string
	choices    int
	// right is the expected text of the completion, where there is one.
	right string
	// answer is the whole response, streamed the summary of the streamed one.
	answer, streamed string
}

// comparable is a response without what differs from one request to the next. A
// streamed one is put together first.
func comparable(body string) (string, error) {
	var r map[string]any
	if err := json.Unmarshal([]byte(body), &r); err != nil {
		return "", fmt.Errorf("%w in %s", err, body)
	}
	delete(r, "id")
	delete(r, "created")
	if u, ok := r["usage"].(map[string]any); ok {
		delete(u, "prompt_tokens_details") // what is cached depends on the others
	}
	data, err := json.Marshal(r)
	return string(data), err
}

// joined is the summary of a stream's events.
func joined(events []string, choices int) (string, error) {
	all := reply{Choices: make([]choice, choices), Usage: &usage{}}
	for _, e := range events {
		if e == "[DONE]" {
			continue
		}
		var r reply
		if err := json.Unmarshal([]byte(e), &r); err != nil {
			return "", fmt.Errorf("%w in %s", err, e)
		}
		if r.ID == "" {
			return "", fmt.Errorf("not a chunk: %s", e)
		}
		if r.Usage != nil {
			all.Usage = r.Usage
		}
		for _, c := range r.Choices {
			sum := &all.Choices[c.Index]
			sum.Text += c.Text
			if c.Delta.Content != nil {
				sum.Text += *c.Delta.Content
			}
			sum.FinishReason = c.FinishReason
		}
	}
	return summary(all), nil
}

// summary is what both kinds of response hold.
func summary(r reply) string {
	var all strings.Builder
	for _, c := range r.Choices {
		end := "nothing"
		if c.FinishReason != nil {
			end = *c.FinishReason
		}
		fmt.Fprintf(&all, "%q %s; ", c.Text+c.Message.Content, end)
	}
	fmt.Fprintf(&all, "%d %d", r.Usage.PromptTokens, r.Usage.CompletionTokens)
	return all.String()
}

// ask sends a request and returns its response, comparable.
func (h *harness) ask(ctx context.Context, a *asked, stream bool) (string, error) {
	body := a.body + "}"
	if stream {
		body = a.body + `, "stream": true, "stream_options": {"include_usage": true}}`
	}
	r, err := h.do(ctx, http.MethodPost, a.path, body)
	if err != nil {
		return "", err
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	if r.StatusCode != http.StatusOK {
		data, _ := io.ReadAll(r.Body)
		return "", fmt.Errorf("status %d: %s", r.StatusCode, data)
	}
	if stream {
		events, err := readEvents(r.Body)
		if err != nil {
			return "", err
		}
		return joined(events, a.choices)
	}
	data, err := io.ReadAll(r.Body)
	if err != nil {
		return "", err
	}
	return comparable(string(data))
}

// stepCount counts the engine's steps, and calls who waits for one.
type stepCount struct {
	mu    sync.Mutex
	steps int
	calls map[int][]func()
}

// call calls f once n steps have ended from now on: at once where n is 0.
func (c *stepCount) call(n int, f func()) {
	if n == 0 {
		f()
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[c.steps+n] = append(c.calls[c.steps+n], f)
}

// step is an engine's listener.
func (c *stepCount) step(engine.StepInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps++
	for _, f := range c.calls[c.steps] {
		f()
	}
	delete(c.calls, c.steps)
}

// 64 clients at once, some of whom leave in the middle: each response is the one that
// the request has alone. MOESERVE_LOAD is how often each asks: more often where too little
// has happened by then.
func TestConcurrentClients(t *testing.T) { synctest.Test(t, testConcurrentClients) }

func testConcurrentClients(t *testing.T) {
	const clients = 64
	times := 3
	if v := os.Getenv("MOESERVE_LOAD"); v != "" {
		var err error
		if times, err = strconv.Atoi(v); err != nil || times < 1 {
			t.Fatalf("MOESERVE_LOAD is %q: give how often each client asks, such as 100", v)
		}
	}
	set := configs.Defaults()
	// Experts move, requests wait, and their keys and values do not all fit.
	set.Offload.Fraction, set.Batch.MaxNumSeqs, set.Batch.MaxNumBatchedTokens, set.KV.NumGPUBlocksOverride = 0.5, 40, 96, 40
	count := &stepCount{calls: map[int][]func(){}}
	h := start(t, options{pipes: true, node: node.Options{Settings: set, Listener: engine.Listener{StepFinished: count.step}}})

	each := racedetector.Fewer(2, 1)
	var all []*asked
	for i, q := range questions(t, each) {
		prompt := fmt.Sprintf("%q", q.Prompt)
		greedy := &asked{path: "/v1/completions", choices: 1, body: `{"temperature": 0, "max_tokens": 32, "prompt": ` + prompt}
		all = append(all, greedy,
			&asked{path: "/v1/chat/completions", choices: 1, body: fmt.Sprintf(`{"seed": %d, "temperature": 1.5, "ignore_eos": true, "max_tokens": %d, "messages": [{"role": "user", "content": %s}]`, i, 16*each+i, prompt)},
			&asked{path: "/v1/chat/completions", choices: 2, body: fmt.Sprintf(`{"seed": %d, "n": 2, "temperature": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.001, "max_tokens": 24, "logprobs": true, "top_logprobs": 2, "messages": [{"role": "user", "content": %s}]`, i, prompt)},
			&asked{path: "/v1/completions", choices: 4, body: fmt.Sprintf(`{"seed": %d, "n": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "stop": [" b", "7"], "min_tokens": 2, "return_token_ids": true, "prompt": [%s, "1+2="]`, i, prompt)})
		greedy.right = q.Answer
	}
	for _, a := range all {
		var err error
		if a.answer, err = h.ask(t.Context(), a, false); err != nil {
			t.Fatal(err)
		}
		r := decode[reply](t, a.answer)
		if a.right != "" && r.Choices[0].Text != a.right {
			t.Errorf("%s: %q, want %q", a.body, r.Choices[0].Text, a.right)
		}
		a.streamed = summary(r)
	}

	var wg sync.WaitGroup
	var answers, left, most atomic.Int64
	enough := func() bool { return answers.Load() >= clients && left.Load() > 0 && h.State().Preemptions > 0 }
	for c := range clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 1))
			for n := 0; (n < times || n < 50*times && !enough()) && !t.Failed(); n++ {
				a, stream := all[rng.IntN(len(all))], rng.IntN(2) == 0
				if rng.IntN(10) == 0 {
					ctx, cancel := context.WithCancel(t.Context())
					count.call(rng.IntN(12), cancel)
					if _, err := h.ask(ctx, a, stream); err != nil {
						left.Add(1)
					}
					cancel()
					continue
				}
				got, err := h.ask(t.Context(), a, stream)
				want := a.answer
				if stream {
					want = a.streamed
				}
				if err != nil || got != want {
					t.Errorf("%s %s}, streamed %v: %v\n  %s\nalone\n  %s", a.path, a.body, stream, err, got, want)
				}
				answers.Add(1)
				if n := int64(h.State().Running); n > most.Load() {
					most.Store(n)
				}
			}
		})
	}
	wg.Wait()
	h.idle()
	s := h.State()
	t.Logf("%d clients with %d requests or more each: %d responses as alone, %d left; peak of %d samples at once, %d preemptions, %d steps",
		clients, times, answers.Load(), left.Load(), most.Load(), s.Preemptions, s.Steps)
	if !enough() {
		t.Error("too little has happened")
	}
}
