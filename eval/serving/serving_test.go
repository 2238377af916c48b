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

func prompts(n int) []serving.Request { return slices.Repeat([]serving.Request{{Text: "p"}}, n) }

func TestRun(t *testing.T) {
	for _, endpoint := range serving.Endpoints {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{}
			c := client(f)
			c.Endpoint = endpoint
			var calls []int
			r, err := serving.Run(t.Context(), c, serving.Options{
				Requests: prompts(4), OutputLen: 11, MaxConcurrency: 2, IgnoreEOS: true, Percentiles: []float64{50, 99},
				Run: eval.Run{Version: "v1"}, Progress: func(done, total int) { calls = append(calls, 10*done+total) },
			})
			if err != nil {
				t.Fatal(err)
			}
			// Two at a time, of 200 ms each.
			if r.DurationSeconds != 0.4 || r.Completed != 4 || r.Failed != 0 || r.PeakConcurrency != 2 || r.MaxConcurrency != 2 || r.Arrivals.Rate != 0 {
				t.Errorf("%+v", r)
			}
			if r.TotalInputTokens != 16 || r.TotalOutputTokens != 44 || r.RequestThroughput != 10 || r.OutputThroughput != 110 || r.TotalThroughput != 150 {
				t.Errorf("%+v", r)
			}
			for name, d := range map[float64]serving.Distribution{0.1: r.TTFT, 0.01: r.TPOT, 0.2: r.E2EL} {
				if math.Abs(d.Mean-name) > 1e-9 || d.Stddev > 1e-9 || math.Abs(d.Median-name) > 1e-9 || len(d.Percentiles) != 2 || math.Abs(d.Percentiles[1].Value-name) > 1e-9 || d.Percentiles[1].P != 99 {
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
		r, err := serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(n), OutputLen: 2, Arrivals: serving.Arrivals{Rate: 20}, Seed: 3})
		if err != nil || r.Arrivals.Rate != 20 || r.MaxConcurrency != 0 {
			t.Fatalf("%+v, %v", r, err)
		}
		for i, at := range (serving.Arrivals{Rate: 20}).Times(n, 3) {
			if got := f.at[i+1].Sub(f.at[1]); got != at {
				t.Errorf("request %d arrives at %v, want %v", i, got, at)
			}
		}
	})
}

func TestArrivals(t *testing.T) {
	const n, rate = 20000, 5
	poisson := serving.Arrivals{Rate: rate}
	at := poisson.Times(n, 1)
	if at[0] != 0 || !slices.IsSorted(at) || !slices.Equal(at, poisson.Times(n, 1)) || slices.Equal(at, poisson.Times(n, 2)) {
		t.Error("not a process from 0 on that the seed decides")
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
	if got := (serving.Arrivals{}).Times(3, 1); !slices.Equal(got, make([]time.Duration, 3)) {
		t.Errorf("without a rate %v", got)
	}
	// The mean of gaps is 1 / rate whatever the burstiness, and their variance that over it.
	for _, burstiness := range []float64{0.25, 1, 4, math.Inf(1)} {
		at := serving.Arrivals{Rate: rate, Burstiness: burstiness}.Times(n, 1)
		mean, square := at[n-1].Seconds()/(n-1), 0.0
		for i := range n - 1 {
			d := (at[i+1] - at[i]).Seconds() - mean
			square += d * d / (n - 1)
		}
		if variance := square * rate * rate; math.Abs(mean*rate-1) > 0.03 || math.Abs(variance-1/burstiness) > 0.1/burstiness+1e-12 {
			t.Errorf("burstiness %v: %v s between arrivals, variance %v", burstiness, mean, variance)
		}
	}
	// A ramp has its rates at its ends; an exponential one has their geometric mean in the middle.
	for _, ramp := range []serving.Ramp{{serving.Linear, 1, 9}, {serving.Exponential, 1, 9}} {
		at := serving.Arrivals{Burstiness: math.Inf(1), Ramp: ramp}.Times(1001, 1)
		rateAt := func(i int) float64 { return 1 / (at[i+1] - at[i]).Seconds() }
		middle := map[string]float64{serving.Linear: 5, serving.Exponential: 3}[ramp.Strategy]
		if math.Abs(rateAt(0)-1) > 0.01 || math.Abs(rateAt(999)-9) > 0.1 || math.Abs(rateAt(500)-middle) > 0.05 {
			t.Errorf("%+v: %v, %v, %v requests/s", ramp, rateAt(0), rateAt(500), rateAt(999))
		}
	}
}

func TestDistribute(t *testing.T) {
	d := serving.Distribute([]float64{4, 1, 3, 2}, []float64{50, 90, 99})
	if d.Mean != 2.5 || d.Median != 2.5 || math.Abs(d.Stddev-math.Sqrt(1.25)) > 1e-9 || d.Percentiles[0].Value != 2.5 || math.Abs(d.Percentiles[1].Value-3.7) > 1e-9 || math.Abs(d.Percentiles[2].Value-3.97) > 1e-9 {
		t.Errorf("%+v", d)
	}
	if d := serving.Distribute([]float64{7}, []float64{1, 99}); d.Mean != 7 || d.Stddev != 0 || d.Percentiles[0].Value != 7 || d.Percentiles[1].Value != 7 {
		t.Errorf("of one value %+v", d)
	}
	if d := serving.Distribute(nil, []float64{50}); d.Mean != 0 || d.Median != 0 || d.Percentiles[0] != (serving.Percentile{P: 50}) {
		t.Errorf("of none %+v", d)
	}
}

// Goodput counts the requests that keep all bounds. Each takes 100 ms for its first token, and 10
// for each other one.
func TestGoodput(t *testing.T) {
	for text, good := range map[string]float64{
		"ttft:101": 4, "ttft:99": 0, "tpot:11": 4, "tpot:9,ttft:101": 0, "e2el:201": 4, "ttft:101 tpot:11 e2el:199": 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			bounds, err := serving.ParseGoodput(text)
			if err != nil {
				t.Fatal(err)
			}
			r, err := serving.Run(t.Context(), client(&fake{}), serving.Options{Requests: prompts(4), OutputLen: 11, Goodput: bounds})
			if err != nil || math.Abs(r.RequestGoodput*r.DurationSeconds-good) > 1e-9 {
				t.Errorf("%s: %v requests/s in %v s, want %v requests; %v", text, r.RequestGoodput, r.DurationSeconds, good, err)
			}
		})
	}
	for _, text := range []string{"itl:5", "ttft", "ttft:0", "ttft:-1", "tpot:NaN", "e2el:Inf", "ttft:5ms"} {
		if _, err := serving.ParseGoodput(text); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The object has vLLM's keys, its units, and nothing that JSON does not know.
func TestJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bounds, _ := serving.ParseGoodput("ttft:101")
		r, err := serving.Run(t.Context(), client(&fake{}), serving.Options{
			Requests: prompts(4), OutputLen: 11, MaxConcurrency: 2, Warmups: 3, Percentiles: []float64{90, 99.9}, Goodput: bounds, Detailed: true,
			Arrivals: serving.Arrivals{Burstiness: math.Inf(1), Ramp: serving.Ramp{Strategy: serving.Linear, Start: 100, End: 200}},
		})
		if err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(r)
		var got map[string]any
		if err = errors.Join(err, json.Unmarshal(data, &got)); err != nil {
			t.Fatalf("%v: %s", err, data)
		}
		for key, want := range map[string]any{
			"endpoint_type": "openai", "model_id": "m", "label": nil, "num_prompts": 4.0, "request_rate": "inf", "burstiness": "inf", "max_concurrency": 2.0,
			"ramp_up_strategy": "linear", "ramp_up_end_rps": 200.0, "completed": 4.0, "failed": 0.0, "total_output_tokens": 44.0, "max_concurrent_requests": 2.0,
			"server_version": "v9", "max_output_tokens_per_s": 44.0,
		} {
			if got[key] != want {
				t.Errorf("%s is %v, want %v", key, got[key], want)
			}
		}
		for key, want := range map[string]float64{"mean_ttft_ms": 100, "median_tpot_ms": 10, "p90_itl_ms": 10, "p99.9_e2el_ms": 200, "std_ttft_ms": 0} {
			if x, ok := got[key].(float64); !ok || math.Abs(x-want) > 1e-6 {
				t.Errorf("%s is %v, want %v", key, got[key], want)
			}
		}
		if x := got["request_goodput"].(float64) * got["duration"].(float64); math.Abs(x-4) > 1e-9 || fmt.Sprint(got["goodput"]) != "map[ttft:101]" {
			t.Errorf("%v good requests, bounds %v", x, got["goodput"])
		}
		itls, texts := got["itls"].([]any), got["generated_texts"].([]any)
		if len(itls) != 4 || len(itls[0].([]any)) != 10 || texts[3] != strings.Repeat("x", 11) || len(got["start_times"].([]any)) != 4 {
			t.Errorf("%v, %v", itls, texts)
		}
	})
}

func TestRandomRequests(t *testing.T) {
	vocabulary := []int32{3, 5, 7}
	requests := serving.Random{Count: 400, InputLen: 100, OutputLen: 50, RangeRatio: 0.2, PrefixLen: 10}.Requests(vocabulary, 1)
	low, high, sum := 1000, 0, 0
	for _, r := range requests {
		if !slices.Equal(r.IDs[:10], requests[0].IDs[:10]) || r.OutputLen < 40 || r.OutputLen > 60 {
			t.Fatalf("%+v", r)
		}
		n := len(r.IDs) - 10
		low, high, sum = min(low, n), max(high, n), sum+n
	}
	if low != 80 || high != 120 || math.Abs(float64(sum)/400-100) > 2 || slices.Equal(requests[0].IDs[10:60], requests[1].IDs[10:60]) {
		t.Errorf("lengths from %d to %d, %d in all", low, high, sum)
	}
	// Their tails differ, and prefixes are used equally often.
	shared := serving.PrefixRepetition{Count: 10, Prefixes: 3, PrefixLen: 40, SuffixLen: 5}.Requests(vocabulary, 1)
	count := map[string]int{}
	for _, r := range shared {
		if len(r.IDs) != 45 {
			t.Fatalf("%d tokens", len(r.IDs))
		}
		count[fmt.Sprint(r.IDs[:40])]++
	}
	if n := slices.Sorted(maps.Values(count)); !slices.Equal(n, []int{3, 3, 4}) {
		t.Errorf("prefixes are used %v times", n)
	}
}

func TestReadTrace(t *testing.T) {
	const trace = `{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 3]}

{"timestamp": 1250.5, "input_length": 600, "output_length": 7, "hash_ids": [1, 9], "chat_id": 4}
{"timestamp": 1250.5, "input_length": 4, "output_length": 1}
`
	vocabulary := []int32{3, 5, 7}
	requests, err := serving.ReadTrace(strings.NewReader(trace), "t", 0, vocabulary, 1)
	if err != nil || len(requests) != 3 {
		t.Fatalf("%d requests, %v", len(requests), err)
	}
	a, b := requests[0], requests[1]
	if a.At != 0 || b.At != 250500*time.Microsecond || len(a.IDs) != 1300 || len(b.IDs) != 600 || b.OutputLen != 7 || len(requests[2].IDs) != 4 {
		t.Errorf("%v, %v, %d and %d tokens", a.At, b.At, len(a.IDs), len(b.IDs))
	}
	if !slices.Equal(a.IDs[:512], b.IDs[:512]) || slices.Equal(a.IDs[512:600], b.IDs[512:]) || slices.Equal(a.IDs[:512], a.IDs[512:1024]) {
		t.Error("prompts have blocks in common by other things than their hash ids")
	}
	if first, err := serving.ReadTrace(strings.NewReader(trace), "t", 1, vocabulary, 1); err != nil || len(first) != 1 {
		t.Errorf("%d requests, %v", len(first), err)
	}
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		r, err := serving.Run(t.Context(), client(f), serving.Options{Requests: requests, OutputLen: 2, Timed: true})
		if err != nil || f.at[2].Sub(f.at[1]) != 250500*time.Microsecond || r.TotalOutputTokens != 13 || !strings.Contains(fmt.Sprint(f.requests[1]["prompt"]), "[") {
			t.Errorf("%+v, %v", r, err)
		}
	})
	for text, want := range map[string]string{
		"": "t has no requests", "{": "t: line 1: not a JSON object", `{"input_length": 1, "output_length": 1}`: `t: line 1: it has no "timestamp"`,
		`{"timestamp": 1, "input_length": 0, "output_length": 1}`:         `t: line 1: "input_length" is 0`,
		`{"timestamp": 1, "input_length": 1e9, "output_length": 1}`:       `t: line 1: not a JSON object`,
		`{"timestamp": 1, "input_length": 999999999, "output_length": 1}`: "t: line 1: prompts of more than",
		trace + `{"timestamp": 3, "input_length": 1, "output_length": 1}`: `t: line 5: "timestamp" 3 comes after 1250.5`,
	} {
		if _, err := serving.ReadTrace(strings.NewReader(text), "t", 0, vocabulary, 1); !errors.Is(err, eval.ErrInput) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestReadCustom(t *testing.T) {
	requests, err := serving.ReadCustom(strings.NewReader("{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"output_tokens\": 3}\n"), "t")
	if err != nil || len(requests) != 2 || requests[0].Text != "a" || requests[0].OutputLen != 0 || requests[1].OutputLen != 3 {
		t.Errorf("%+v, %v", requests, err)
	}
	synctest.Test(t, func(t *testing.T) {
		r, err := serving.Run(t.Context(), client(&fake{}), serving.Options{Requests: requests, OutputLen: 2})
		if err != nil || r.TotalOutputTokens != 5 {
			t.Errorf("%+v, %v", r, err)
		}
	})
	for _, text := range []string{"", "x", "{}", `{"prompt": "a", "output_tokens": -1}`} {
		if _, err := serving.ReadCustom(strings.NewReader(text), "t"); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v", text, err)
		}
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
		r, err := serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(8), OutputLen: 2, MaxConcurrency: 1})
		if err != nil || r.Completed != 1 || r.Failed != 7 || r.TTFT.Mean != 0.1 || r.TotalOutputTokens != 2 {
			t.Fatalf("%+v, %v", r, err)
		}
		want := map[string]int{
			"serving: /v1/completions: the stream ends without [DONE]": 1, "serving: /v1/completions: out of memory": 1,
			"serving: /v1/completions: the stream has no usage: the server ignores stream_options.include_usage": 1, "serving: /v1/completions: the stream has no token": 1,
			"serving: /v1/completions: a chunk of the stream: unexpected end of JSON input": 1, "/v1/completions: 400 Bad Request: too long": 2,
		}
		for reason, n := range want {
			if r.Failures[reason] != n {
				t.Errorf("%d times %q, want %d: %v", r.Failures[reason], reason, n, r.Failures)
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
		if _, err := serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(3), OutputLen: 2}); !errors.As(err, &status) || err.Error() != want || len(f.requests) != 1 {
			t.Errorf("%v after %d requests, want %s", err, len(f.requests), want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		f := &fake{refuse: func(n int) string { return []string{"", "full", "full"}[n] }}
		if _, err := serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(2), OutputLen: 2}); err == nil || err.Error() != "serving: all 2 requests failed: /v1/completions: 400 Bad Request: full (2)" {
			t.Error(err)
		}
	})
}

// TestChunksWithoutText: a token whose text is empty, or ends only with the next one, is a token, as for vllm bench serve. What
// begins or ends a message of a chat is none.
func TestChunksWithoutText(t *testing.T) {
	const (
		end        = `{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 4}}`
		completion = `{"choices": [{"text": "", "finish_reason": null}]}|{"choices": [{"text": "", "finish_reason": null}]}|{"choices": [{"text": "x", "finish_reason": null}]}|{"choices": [{"text": "", "finish_reason": "stop"}]}|`
		chat       = `{"choices": [{"delta": {"role": "assistant", "content": ""}}]}|{"choices": [{"delta": {"content": ""}}]}|{"choices": [{"delta": {"content": ""}}]}|{"choices": [{"delta": {"content": "x"}}]}|{"choices": [{"delta": {"content": "y"}}]}|{"choices": [{"delta": {}, "finish_reason": "length"}]}|`
	)
	for endpoint, chunks := range map[string]string{serving.Completions: completion, serving.ChatCompletions: chat} {
		synctest.Test(t, func(t *testing.T) {
			var stream strings.Builder
			for _, c := range strings.Split(chunks+end+"|[DONE]", "|") {
				fmt.Fprintf(&stream, "data: %s\n\n", c)
			}
			c := client(&fake{spoil: func(int) string { return stream.String() }})
			c.Endpoint = endpoint
			r, err := serving.Run(t.Context(), c, serving.Options{Requests: prompts(1), OutputLen: 4, Detailed: true})
			if err != nil || len(r.Details.ITLs[0]) != 3 || r.PeakOutputThroughput != 4 {
				t.Errorf("%s: %v; of 4 tokens %v in the first second, with %d times between them", endpoint, err, r.PeakOutputThroughput, len(r.Details.ITLs[0]))
			}
		})
	}
}

// TestDetailsOfFailures: details are of all requests, in their order, as vllm bench serve has them, and say why one has failed.
func TestDetailsOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{
			refuse: func(n int) string { return map[int]string{2: "full"}[n] },
			spoil:  func(n int) string { return map[int]string{4: "data: {\"choices\": [{\"text\": \"y\"}]}\n\n"}[n] },
		}
		requests := slices.Repeat([]serving.Request{{IDs: []int32{5, 6, 7}}}, 4)
		r, err := serving.Run(t.Context(), client(f), serving.Options{Requests: requests, OutputLen: 2, Detailed: true, MaxConcurrency: 1})
		if err != nil || r.Completed != 2 || r.Failed != 2 {
			t.Fatalf("%+v, %v", r, err)
		}
		data, err := json.Marshal(r)
		var got struct {
			Errors []string    `json:"errors"`
			Texts  []string    `json:"generated_texts"`
			Inputs []int       `json:"input_lens"`
			Output []int       `json:"output_lens"`
			Starts []float64   `json:"start_times"`
			TTFTs  []float64   `json:"ttfts"`
			ITLs   [][]float64 `json:"itls"`
		}
		if err = errors.Join(err, json.Unmarshal(data, &got)); err != nil {
			t.Fatalf("%v: %s", err, data)
		}
		if want := []string{"", "/v1/completions: 400 Bad Request: full", "", "serving: /v1/completions: the stream ends without [DONE]"}; !slices.Equal(got.Errors, want) {
			t.Errorf("errors %q", got.Errors)
		}
		if !slices.Equal(got.Output, []int{2, 0, 2, 0}) || !slices.Equal(got.Inputs, []int{4, 3, 4, 3}) || !slices.Equal(got.Texts, []string{"xx", "", "xx", "y"}) ||
			len(got.ITLs) != 4 || len(got.TTFTs) != 4 || got.TTFTs[1] != 0 || !slices.IsSorted(got.Starts) || len(got.Starts) != 4 {
			t.Errorf("%+v", got)
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
		r, err := serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(9), OutputLen: 2})
		want := map[string]int{`serving: Post "http://server/v1/completions": read: connection reset by peer`: 9}
		if err == nil || !maps.Equal(r.Failures, want) {
			t.Errorf("%v, %v", r.Failures, err)
		}
		// Nor does a result have every message of a server that puts something new into each.
		f = &fake{refuse: func(n int) string {
			if n == 0 {
				return ""
			}
			return fmt.Sprint(n)
		}}
		r, err = serving.Run(t.Context(), client(f), serving.Options{Requests: prompts(90), OutputLen: 2})
		if err == nil || r.Failed != 90 || len(r.Failures) > 33 || r.Failures["other reasons"] != 58 {
			t.Errorf("%v, %v", r.Failures, err)
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
		if _, err := serving.Run(t.Context(), c, serving.Options{Requests: prompts(3), OutputLen: 2}); err != nil || e.ended.Load() != 4 || e.closed.Load() != 4 {
			t.Errorf("%d of %d bodies are read to their end, %v", e.ended.Load(), e.closed.Load(), err)
		}
	})
}

// A result names the server, and not who logs on to it.
func TestNoCredentialsInResults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := client(&fake{})
		c.BaseURL = "http://me:secret@server/"
		if r, err := serving.Run(t.Context(), c, serving.Options{Requests: prompts(1), OutputLen: 2}); err != nil || r.BaseURL != "http://xxxxx@server/" {
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
		r, err := serving.Run(ctx, client(&fake{}), serving.Options{Requests: prompts(9), OutputLen: 2, MaxConcurrency: 1})
		if !errors.Is(err, context.DeadlineExceeded) || r.Completed != 3 || r.Failed != 0 || r.NumPrompts != 9 {
			t.Errorf("%+v, %v", r, err)
		}
		time.Sleep(time.Second) // of the bubble's clock: the server ends its stream
	})
}

func TestValidate(t *testing.T) {
	for want, o := range map[string]serving.Options{
		"no requests": {OutputLen: 1}, "output length 0": {Requests: prompts(1)}, "rate -1": {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Rate: -1}},
		"rate NaN": {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Rate: math.NaN()}}, "concurrency -1": {Requests: prompts(1), OutputLen: 1, MaxConcurrency: -1},
		"burstiness -1":        {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Burstiness: -1}},
		"ramp-up strategy":     {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Ramp: serving.Ramp{Strategy: "steep", Start: 1, End: 2}}},
		"ramp-up from 0":       {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Ramp: serving.Ramp{Strategy: serving.Linear, End: 2}}},
		"rate 3":               {Requests: prompts(1), OutputLen: 1, Arrivals: serving.Arrivals{Rate: 3, Ramp: serving.Ramp{Strategy: serving.Linear, Start: 1, End: 2}}},
		"a trace has arrivals": {Requests: prompts(1), OutputLen: 1, Timed: true, Arrivals: serving.Arrivals{Rate: 1}},
		"percentile 100":       {Requests: prompts(1), OutputLen: 1, Percentiles: []float64{100}},
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
	random := serving.Random{Count: 5, OutputLen: 3}.Requests(ids, 1)
	for _, p := range random {
		if len(p.IDs) < 9 || slices.ContainsFunc(p.IDs, func(id int32) bool { return !slices.Contains(ids, id) }) {
			t.Errorf("%v", p)
		}
	}
	if again := (serving.Random{Count: 5, OutputLen: 3}).Requests(ids, 1); !slices.Equal(again[4].IDs, random[4].IDs) || slices.Equal((serving.Random{Count: 5, OutputLen: 3}).Requests(ids, 2)[4].IDs, random[4].IDs) {
		t.Error("the seed does not decide")
	}
	var status *serving.StatusError
	if _, err := client(&fake{lost: true}).Vocabulary(t.Context()); !errors.As(err, &status) || err.Error() != "/tokenize: 404 Not Found: no such page" {
		t.Error(err)
	}
}

func TestTables(t *testing.T) {
	d := serving.Distribution{Mean: 0.1, Median: 0.095, Stddev: 0.0125, Percentiles: []serving.Percentile{{P: 50, Value: 0.09}, {P: 99.9, Value: 0.2}}}
	r := serving.Result{
		Run:     eval.Run{Version: "v1", Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Command: "moeserve bench serve"},
		BaseURL: "http://server", Endpoint: serving.Completions, Model: "m", ServerVersion: "v9", Arrivals: serving.Arrivals{Rate: 4}, MaxConcurrency: 8,
		NumPrompts: 10, Completed: 10, PeakConcurrency: 5, DurationSeconds: 2.5, TotalInputTokens: 100, TotalOutputTokens: 200,
		RequestThroughput: 4, OutputThroughput: 80, TotalThroughput: 120, TTFT: d, TPOT: d, ITL: d, E2EL: d,
		Goodput: serving.Goodput{TTFT: 0.5, TPOT: 0.02}, RequestGoodput: 3,
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
goodput          3 requests/s within TTFT 500 ms, TPOT 20 ms

                            ms    mean      ±  median    p50   p99.9
    TTFT (time to first token)  100.00  12.50   95.00  90.00  200.00
  TPOT (time per output token)  100.00  12.50   95.00  90.00  200.00
     ITL (inter-token latency)  100.00  12.50   95.00  90.00  200.00
            end-to-end latency  100.00  12.50   95.00  90.00  200.00
`
	if table.String() != want {
		t.Errorf("got\n%s, want\n%s", &table, want)
	}
	for text, arrivals := range map[string]serving.Arrivals{
		"all at once": {}, "2 requests/s, gamma distribution of burstiness 0.5": {Rate: 2, Burstiness: 0.5},
		"1 to 9 requests/s, exponential, Poisson": {Ramp: serving.Ramp{Strategy: serving.Exponential, Start: 1, End: 9}},
	} {
		r := r
		r.Arrivals = arrivals
		var table bytes.Buffer
		if err := serving.WriteTable(&table, &r); err != nil || !strings.Contains(table.String(), "request rate     "+text+"\n") {
			t.Errorf("want %s: %v\n%s", text, err, &table)
		}
	}
	rows, err := csv.NewReader(&out).ReadAll()
	if err != nil || len(rows) != 2 {
		t.Fatalf("%v, %v", rows, err)
	}
	for column, want := range map[string]string{
		"version": "v1", "command": "moeserve bench serve", "base_url": "http://server", "request_rate": "4", "max_concurrency": "8", "label": "",
		"completed": "10", "output_throughput": "80", "request_goodput": "3", "mean_ttft_ms": "100", "std_itl_ms": "12.5", "p99.9_tpot_ms": "200", "median_e2el_ms": "95",
	} {
		if at := slices.Index(rows[0], column); at < 0 || rows[1][at] != want {
			t.Errorf("column %s of %v: %v, want %q", column, rows[0], rows[1], want)
		}
	}
}
