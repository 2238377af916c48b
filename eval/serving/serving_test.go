package serving_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/serving"
)

// fake is a server in memory that takes 100 ms for the first token of a request and 10 ms
// for each other one.
type fake struct {
	// spoil, if set, replaces the stream of the n-th request, from 0.
	spoil func(n int) string
	// refuse is a body with status 400 for the n-th request; empty: none.
	refuse func(n int) string
	// lose, if set, is why the n-th request fails to be sent.
	lose func(n int) error
	// lost: there is no /tokenize.
	lost bool

	mu       sync.Mutex
	requests []map[string]any
	at       []time.Time
	headers  http.Header
}

func (f *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	answer := func(status int, body string) (*http.Response, error) {
		return &http.Response{StatusCode: status, Status: fmt.Sprint(status, " ", http.StatusText(status)), Body: io.NopCloser(strings.NewReader(body))}, nil
	}
	switch r.URL.Path {
	case "/v1/models":
		return answer(http.StatusOK, `{"data": [{"id": "m"}, {"id": "other"}]}`)
	case "/version":
		return answer(http.StatusOK, `{"version": "v9"}`)
	case "/tokenize":
		if f.lost {
			return answer(http.StatusNotFound, `no such page`)
		}
		return answer(http.StatusOK, `{"tokens": [7, 3, 7, 5]}`)
	}
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		return nil, err
	}
	f.mu.Lock()
	n := len(f.requests)
	f.requests, f.at, f.headers = append(f.requests, body), append(f.at, time.Now()), r.Header
	f.mu.Unlock()
	if f.lose != nil && f.lose(n) != nil {
		return nil, f.lose(n)
	}
	if f.refuse != nil && f.refuse(n) != "" {
		return answer(http.StatusBadRequest, f.refuse(n))
	}
	in, out := io.Pipe()
	context.AfterFunc(r.Context(), func() { in.CloseWithError(r.Context().Err()) })
	go func() {
		defer out.Close()
		if f.spoil != nil && f.spoil(n) != "" {
			io.WriteString(out, f.spoil(n)) //nolint:errcheck // the client may have left
			return
		}
		tokens := int(body["max_tokens"].(float64))
		if r.URL.Path == serving.ChatCompletions {
			io.WriteString(out, "data: {\"choices\": [{\"delta\": {\"role\": \"assistant\", \"content\": \"\"}}]}\n\n") //nolint:errcheck // as above
		}
		wait := 100 * time.Millisecond
		for i := range tokens {
			time.Sleep(wait) // of the bubble's clock
			wait = 10 * time.Millisecond
			text := `"text": "x"`
			if r.URL.Path == serving.ChatCompletions {
				text = []string{
					`"delta": {"content": "x"}`, `"delta": {"reasoning": "x"}`, `"delta": {"reasoning_content": "x"}`,
					`"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}`,
				}[i%4]
			}
			end := "null"
			if i == tokens-1 {
				end = `"length"`
			}
			fmt.Fprintf(out, ": a comment\n\ndata: {\"choices\": [{%s, \"finish_reason\": %s}], \"usage\": null}\n\n", text, end)
		}
		fmt.Fprintf(out, "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 4, \"completion_tokens\": %d}}\n\ndata: [DONE]\n\n", tokens)
	}()
	return &http.Response{StatusCode: http.StatusOK, Body: in}, nil
}

func client(f *fake) *serving.Client {
	return &serving.Client{BaseURL: "http://server/", Endpoint: serving.Completions, Model: "m", APIKey: "k", HTTP: &http.Client{Transport: f}}
}

func prompts(n int) []serving.Prompt { return slices.Repeat([]serving.Prompt{{Text: "p"}}, n) }

func TestRun(t *testing.T) {
	for _, endpoint := range serving.Endpoints {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{}
			c := client(f)
			c.Endpoint = endpoint
			var calls []int
			r, err := serving.Run(t.Context(), c, serving.Options{
				Prompts: prompts(4), OutputLen: 11, MaxConcurrency: 2, IgnoreEOS: true, Percentiles: []float64{50, 99},
				Run: eval.Run{Version: "v1"}, Progress: func(done, total int) { calls = append(calls, 10*done+total) },
			})
			if err != nil {
				t.Fatal(err)
			}
			// Two at a time, of 200 ms each.
			if r.DurationSeconds != 0.4 || r.Completed != 4 || r.Failed != 0 || r.PeakConcurrency != 2 || *r.MaxConcurrency != 2 || r.RequestRate != nil {
				t.Errorf("%+v", r)
			}
			if r.TotalInputTokens != 16 || r.TotalOutputTokens != 44 || r.RequestThroughput != 10 || r.OutputThroughput != 110 || r.TotalTokenThroughput != 150 {
				t.Errorf("%+v", r)
			}
			for name, d := range map[float64]serving.Distribution{0.1: r.TTFT, 0.01: r.TPOT, 0.2: r.E2EL} {
				if math.Abs(d.Mean-name) > 1e-9 || *d.Stddev > 1e-9 || len(d.Percentiles) != 2 || math.Abs(d.Percentiles[1].Value-name) > 1e-9 || d.Percentiles[1].P != 99 {
					t.Errorf("%v: %+v", name, d)
				}
			}
			if math.Abs(r.ITL.Mean-0.01) > 1e-9 {
				t.Errorf("%+v", r.ITL)
			}
			if r.ServerVersion != "v9" || r.Model != "m" || len(calls) != 4 || calls[3] != 44 {
				t.Errorf("%+v, progress %v", r, calls)
			}
			// One goes ahead.
			b := f.requests[1]
			if len(f.requests) != 5 || b["stream"] != true || b["ignore_eos"] != true || b["model"] != "m" || f.headers.Get("Authorization") != "Bearer k" {
				t.Errorf("%d requests: %v, %v", len(f.requests), b, f.headers)
			}
			if text := fmt.Sprint(b["prompt"], b["messages"]); text != "p<nil>" && text != "<nil> [map[content:p role:user]]" {
				t.Error(text)
			}
		})
	}
}

// Requests are sent when they arrive.
func TestRateIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		const n = 50
		r, err := serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(n), OutputLen: 2, Rate: 20, Seed: 3})
		if err != nil || *r.RequestRate != 20 || r.MaxConcurrency != nil {
			t.Fatalf("%+v, %v", r, err)
		}
		for i, at := range serving.Arrivals(n, 20, 3) {
			if got := f.at[i+1].Sub(f.at[1]); got != at {
				t.Errorf("request %d arrives at %v, want %v", i, got, at)
			}
		}
	})
}

func TestArrivals(t *testing.T) {
	const n, rate = 20000, 5
	at := serving.Arrivals(n, rate, 1)
	if at[0] != 0 || !slices.IsSorted(at) || !slices.Equal(at, serving.Arrivals(n, rate, 1)) || slices.Equal(at, serving.Arrivals(n, rate, 2)) {
		t.Error("not a process from 0 on that the seed decides")
	}
	if mean := at[n-1].Seconds() / (n - 1); math.Abs(mean*rate-1) > 0.03 {
		t.Errorf("%v s between arrivals", mean)
	}
	// Of an exponential distribution the share above the mean is 1/e.
	above := 0
	for i := range n - 1 {
		if (at[i+1] - at[i]).Seconds() > 1.0/rate {
			above++
		}
	}
	if share := float64(above) / n; math.Abs(share-1/math.E) > 0.02 {
		t.Errorf("%v of the gaps are above their mean", share)
	}
	if got := serving.Arrivals(3, 0, 1); !slices.Equal(got, make([]time.Duration, 3)) {
		t.Errorf("without a rate %v", got)
	}
}

func TestDistribute(t *testing.T) {
	d := serving.Distribute([]float64{4, 1, 3, 2}, []float64{50, 90, 99})
	if d.Mean != 2.5 || math.Abs(*d.Stddev-1.2909944) > 1e-6 || d.Percentiles[0].Value != 2.5 || math.Abs(d.Percentiles[1].Value-3.7) > 1e-9 || math.Abs(d.Percentiles[2].Value-3.97) > 1e-9 {
		t.Errorf("%+v", d)
	}
	if d := serving.Distribute([]float64{7}, []float64{1, 99}); d.Mean != 7 || d.Stddev != nil || d.Percentiles[0].Value != 7 || d.Percentiles[1].Value != 7 {
		t.Errorf("of one value %+v", d)
	}
	if d := serving.Distribute(nil, []float64{50}); d.Mean != 0 || d.Stddev != nil || d.Percentiles[0] != (serving.Percentile{P: 50}) {
		t.Errorf("of none %+v", d)
	}
}

// What fails is counted with its reason, and in no latency.
func TestFailures(t *testing.T) {
	const chunk = "data: {\"choices\": [{\"text\": \"x\"}]}\n\n"
	synctest.Test(t, func(t *testing.T) {
		f := &fake{
			spoil: func(n int) string {
				return map[int]string{
					2: chunk,
					3: "data: {\"error\": {\"message\": \"out of memory\"}}\n\n",
					4: chunk + "data: [DONE]\n\n",
					5: "data: {\"usage\": {\"prompt_tokens\": 1, \"completion_tokens\": 0}}\n\ndata: [DONE]\n\n",
					6: "data: {\n\n",
				}[n]
			},
			refuse: func(n int) string {
				return map[int]string{7: `{"error": {"message": "too long"}}`, 8: `{"error": {"message": "too long"}}`}[n]
			},
		}
		r, err := serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(8), OutputLen: 2, MaxConcurrency: 1})
		if err != nil || r.Completed != 1 || r.Failed != 7 || r.TTFT.Mean != 0.1 || r.TTFT.Stddev != nil || r.TotalOutputTokens != 2 {
			t.Fatalf("%+v, %v", r, err)
		}
		want := map[string]int{
			"serving: /v1/completions: the stream ends without [DONE]": 1, "serving: /v1/completions: out of memory": 1,
			"serving: /v1/completions: the stream has no usage: the server ignores stream_options.include_usage": 1, "serving: /v1/completions: the stream has no token": 1,
			"serving: /v1/completions: a chunk of the stream: unexpected end of JSON input": 1, "/v1/completions: 400 Bad Request: too long": 2,
		}
		for reason, n := range want {
			if r.Errors[reason] != n {
				t.Errorf("%d times %q, want %d: %v", r.Errors[reason], reason, n, r.Errors)
			}
		}
		var table bytes.Buffer
		if err := serving.WriteTable(&table, &r); err != nil || !strings.Contains(table.String(), "\nfailed: /v1/completions: 400 Bad Request: too long (2); serving: ") {
			t.Errorf("%v\n%s", err, &table)
		}
	})
	for refused, want := range map[string]string{
		`{"error": {"message": "who are you?"}}`: "/v1/completions: 400 Bad Request: who are you?", `{"message": "vLLM's shape"}`: "/v1/completions: 400 Bad Request: vLLM's shape",
		"text\nand more": "/v1/completions: 400 Bad Request: text",
	} {
		f := &fake{refuse: func(int) string { return refused }}
		var status *serving.StatusError
		if _, err := serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(3), OutputLen: 2}); !errors.As(err, &status) || err.Error() != want || len(f.requests) != 1 {
			t.Errorf("%v after %d requests, want %s", err, len(f.requests), want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		f := &fake{refuse: func(n int) string { return []string{"", "full", "full"}[n] }}
		if _, err := serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(2), OutputLen: 2}); err == nil || err.Error() != "serving: all 2 requests failed: /v1/completions: 400 Bad Request: full (2)" {
			t.Error(err)
		}
	})
}

// Failures of connections count by what went wrong: their ports are all different.
func TestLostConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lose: func(n int) error {
			if n == 0 {
				return nil // the one that goes ahead
			}
			return &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: n}, Err: errors.New("connection reset by peer")}
		}}
		r, err := serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(9), OutputLen: 2})
		want := map[string]int{`serving: Post "http://server/v1/completions": read: connection reset by peer`: 9}
		if err == nil || !maps.Equal(r.Errors, want) {
			t.Errorf("%v, %v", r.Errors, err)
		}
		// Nor does a result have every message of a server that puts something new into each.
		f = &fake{refuse: func(n int) string {
			if n == 0 {
				return ""
			}
			return fmt.Sprint(n)
		}}
		r, err = serving.Run(t.Context(), client(f), serving.Options{Prompts: prompts(90), OutputLen: 2})
		if err == nil || r.Failed != 90 || len(r.Errors) > 33 || r.Errors["other reasons"] != 58 {
			t.Errorf("%v, %v", r.Errors, err)
		}
	})
}

// endings counts the bodies that are read to their end before they are closed: only their
// connections serve another request.
type endings struct {
	fake
	ended, closed atomic.Int32
}

func (e *endings) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := e.fake.RoundTrip(r)
	if err == nil && r.URL.Path == serving.Completions {
		res.Body = &ending{ReadCloser: res.Body, of: e}
	}
	return res, err
}

type ending struct {
	io.ReadCloser
	of *endings
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		e.of.ended.Add(1)
	}
	return n, err
}

func (e *ending) Close() error {
	e.of.closed.Add(1)
	return e.ReadCloser.Close()
}

// A connection serves one request after another, so that latencies have no handshakes.
func TestConnectionsAreReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &endings{}
		c := client(&e.fake)
		c.HTTP.Transport = e
		if _, err := serving.Run(t.Context(), c, serving.Options{Prompts: prompts(3), OutputLen: 2}); err != nil || e.ended.Load() != 4 || e.closed.Load() != 4 {
			t.Errorf("%d of %d bodies are read to their end, %v", e.ended.Load(), e.closed.Load(), err)
		}
	})
}

// A result names the server, and not who logs on to it.
func TestNoCredentialsInResults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := client(&fake{})
		c.BaseURL = "http://me:secret@server/"
		if r, err := serving.Run(t.Context(), c, serving.Options{Prompts: prompts(1), OutputLen: 2}); err != nil || r.BaseURL != "http://xxxxx@server/" {
			t.Errorf("%q, %v", r.BaseURL, err)
		}
	})
}

// An interrupt keeps the requests that have completed; those that it aborts have not failed.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		// The first is not counted; then each takes 110 ms.
		r, err := serving.Run(ctx, client(&fake{}), serving.Options{Prompts: prompts(9), OutputLen: 2, MaxConcurrency: 1})
		if !errors.Is(err, context.DeadlineExceeded) || r.Completed != 3 || r.Failed != 0 || r.NumPrompts != 9 {
			t.Errorf("%+v, %v", r, err)
		}
		time.Sleep(time.Second) // of the bubble's clock: the server ends its stream
	})
}

func TestValidate(t *testing.T) {
	for want, o := range map[string]serving.Options{
		"no prompts": {OutputLen: 1}, "output length 0": {Prompts: prompts(1)}, "rate -1": {Prompts: prompts(1), OutputLen: 1, Rate: -1},
		"rate NaN": {Prompts: prompts(1), OutputLen: 1, Rate: math.NaN()}, "concurrency -1": {Prompts: prompts(1), OutputLen: 1, MaxConcurrency: -1},
		"percentile 100": {Prompts: prompts(1), OutputLen: 1, Percentiles: []float64{100}},
	} {
		if _, err := serving.Run(t.Context(), client(&fake{}), o); err == nil || !strings.HasPrefix(err.Error(), "serving: "+want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestClient(t *testing.T) {
	c := client(&fake{})
	if models, err := c.Models(t.Context()); err != nil || !slices.Equal(models, []string{"m", "other"}) {
		t.Errorf("%v, %v", models, err)
	}
	ids, err := c.Vocabulary(t.Context())
	if err != nil || !slices.Equal(ids, []int32{3, 5, 7}) {
		t.Errorf("%v, %v", ids, err)
	}
	random := serving.RandomPrompts(5, 8, ids, 1)
	for _, p := range random {
		if len(p.IDs) != 8 || slices.ContainsFunc(p.IDs, func(id int32) bool { return !slices.Contains(ids, id) }) {
			t.Errorf("%v", p)
		}
	}
	if again := serving.RandomPrompts(5, 8, ids, 1); !slices.Equal(again[4].IDs, random[4].IDs) || slices.Equal(serving.RandomPrompts(5, 8, ids, 2)[4].IDs, random[4].IDs) {
		t.Error("the seed does not decide")
	}
	var status *serving.StatusError
	if _, err := client(&fake{lost: true}).Vocabulary(t.Context()); !errors.As(err, &status) || err.Error() != "/tokenize: 404 Not Found: no such page" {
		t.Error(err)
	}
}

func TestTables(t *testing.T) {
	rate, limit, deviation := 4.0, 8, 0.0125
	d := serving.Distribution{Mean: 0.1, Stddev: &deviation, Percentiles: []serving.Percentile{{P: 50, Value: 0.09}, {P: 99.9, Value: 0.2}}}
	r := serving.Result{
		Run:     eval.Run{Version: "v1", Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Command: "moeserve bench serve"},
		BaseURL: "http://server", Endpoint: serving.Completions, Model: "m", ServerVersion: "v9", RequestRate: &rate, MaxConcurrency: &limit,
		NumPrompts: 10, Completed: 10, PeakConcurrency: 5, DurationSeconds: 2.5, TotalInputTokens: 100, TotalOutputTokens: 200,
		RequestThroughput: 4, OutputThroughput: 80, TotalTokenThroughput: 120, TTFT: d, TPOT: d, ITL: d, E2EL: d,
	}
	var table, out bytes.Buffer
	if err := errors.Join(serving.WriteTable(&table, &r), serving.WriteCSV(&out, &r)); err != nil {
		t.Fatal(err)
	}
	const want = `moeserve v1, 2026-01-02T03:04:05Z
command: moeserve bench serve
server: http://server, /v1/completions, model m, version v9

requests         10 completed of 10, 0 failed
request rate     4 requests/s, Poisson
max concurrency  8; peak 5
duration         2.5 s
tokens           100 input, 200 output
throughput       4 requests/s, 80 output tok/s, 120 total tok/s

                            ms    mean      ±    p50   p99.9
    TTFT (time to first token)  100.00  12.50  90.00  200.00
  TPOT (time per output token)  100.00  12.50  90.00  200.00
     ITL (inter-token latency)  100.00  12.50  90.00  200.00
            end-to-end latency  100.00  12.50  90.00  200.00
`
	if table.String() != want {
		t.Errorf("got\n%s, want\n%s", &table, want)
	}
	rows, err := csv.NewReader(&out).ReadAll()
	if err != nil || len(rows) != 2 {
		t.Fatalf("%v, %v", rows, err)
	}
	for column, want := range map[string]string{
		"version": "v1", "command": "moeserve bench serve", "base_url": "http://server", "request_rate": "4", "max_concurrency": "8",
		"completed": "10", "output_throughput": "80", "ttft_s_mean": "0.1", "itl_s_stddev": "0.0125", "tpot_s_p99.9": "0.2", "e2el_s_p50": "0.09",
	} {
		if at := slices.Index(rows[0], column); at < 0 || rows[1][at] != want {
			t.Errorf("column %s of %v: %v, want %q", column, rows[0], rows[1], want)
		}
	}
}
