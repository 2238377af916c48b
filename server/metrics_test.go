package server_test

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/server"
)

// scrape reads the metrics: a value for each name with its labels.
func (h *harness) scrape() map[string]float64 {
	h.t.Helper()
	a := h.send(http.MethodGet, "/metrics", "")
	if !strings.HasPrefix(a.header.Get("Content-Type"), "text/plain") {
		h.t.Fatalf("%v", a.header)
	}
	values := map[string]float64{}
	for line := range strings.Lines(a.body) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if value == "" {
			name, value, _ = strings.Cut(strings.TrimSpace(line), " ")
		} else {
			name += "}"
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			h.t.Fatalf("%q: %v", line, err)
		}
		values[name] = v
	}
	return values
}

// The names that routers look for are there, and count what has happened.
func TestMetrics(t *testing.T) { synctest.Test(t, testMetrics) }

func testMetrics(t *testing.T) {
	counted := server.NewMetrics("tiny")
	slow := slow()
	slow.Settings.Batch.MaxNumSeqs = 1
	wait := slow.Listener.StepFinished
	slow.Listener.StepFinished = func(i engine.StepInfo) {
		counted.ObserveStep(i)
		wait(i)
	}
	h := start(t, options{
		server: server.Options{Metrics: counted},
		node:   slow,
		pipes:  true,
		change: func(m *server.Model) {
			c := metrics.NewCounter(metrics.NewDesc("moeserve_expert_uses_total", "Hits."))
			c.Add(5)
			m.Collectors = []metrics.Collector{c}
		},
	})
	const model = `{engine="0",model_name="tiny"}`
	h.post("/v1/completions", completionBody(`"1+2="`, ""))
	h.post("/v1/completions", completionBody(`"1+2="`, `, "n": 2, "max_tokens": 1`))
	h.events("/v1/chat/completions", chatBody("1+2=", `, "stream": true`))
	h.idle()
	counted.ObserveDrain(2 * time.Second)
	m := h.scrape()
	for name, want := range map[string]float64{
		"vllm:num_requests_waiting" + model: 0,
		"vllm:num_requests_running" + model: 0,
		"vllm:kv_cache_usage_perc" + model:  0,
		`vllm:cache_config_info{block_size="16",engine="0",model_name="tiny",num_gpu_blocks="` + strconv.Itoa(h.State().KVMaxBlocks) + `"}`: 1,
		"vllm:prompt_tokens_total" + model:                                                  4 + 4 + 6,
		"vllm:generation_tokens_total" + model:                                              2 + 2 + 2,
		"vllm:request_prompt_tokens_sum" + model:                                            4 + 4 + 6,
		"vllm:request_prompt_tokens_count" + model:                                          3,
		"vllm:request_generation_tokens_sum" + model:                                        2 + 2 + 2,
		"vllm:request_max_num_generation_tokens_sum" + model:                                2 + 1 + 2,
		"vllm:request_params_n_sum" + model:                                                 1 + 2 + 1,
		"vllm:request_params_max_tokens_sum" + model:                                        16 + 1 + 250,
		"vllm:iteration_tokens_total_count" + model:                                         float64(h.State().Steps),
		"vllm:iteration_tokens_total_sum" + model:                                           float64(h.State().PrefillTokens) + 2, // one of each request that generates two tokens
		"vllm:num_preemptions_total" + model:                                                0,
		"moeserve_step_retries_total":                                                       0,
		`vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}`:   2,
		`vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}`: 1,
		`vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}`:  0,
		"vllm:time_to_first_token_seconds_count" + model:                                    3,
		"vllm:e2e_request_latency_seconds_count" + model:                                    3,
		"vllm:request_queue_time_seconds_count" + model:                                     3,
		"vllm:request_prefill_time_seconds_count" + model:                                   3,
		"vllm:request_decode_time_seconds_count" + model:                                    3,
		"vllm:request_inference_time_seconds_count" + model:                                 3,
		"vllm:inter_token_latency_seconds_count" + model:                                    2,
		"vllm:request_time_per_output_token_seconds_count" + model:                          2,
		"moeserve_step_duration_seconds_count":                                              float64(h.State().Steps),
		"moeserve_expert_uses_total":                                                        5,
		"moeserve_harvest_drain_seconds_count":                                              1,
		"moeserve_harvest_drain_seconds_sum":                                                2,
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s: %v (there %v), want %v", name, got, ok, want)
		}
	}
	// A step takes 60 ms here, and a request several.
	for name, least := range map[string]float64{
		"vllm:time_to_first_token_seconds_sum": 3 * .05, "vllm:inter_token_latency_seconds_sum": 2 * .05,
		"vllm:request_time_per_output_token_seconds_sum": 2 * .05, "vllm:e2e_request_latency_seconds_sum": 5 * .05,
		"vllm:request_decode_time_seconds_sum": 2 * .05,
	} {
		if got := m[name+model]; got < least || got > 30 {
			t.Errorf("%s: %v s, want %v or more", name, got, least)
		}
	}

	ctx, leave := context.WithCancel(t.Context())
	r, _ := h.begin(ctx)
	waits := make(chan struct{})
	go func() {
		defer close(waits)
		if r, err := h.do(ctx, http.MethodPost, "/v1/completions", `{"prompt": "1+2="}`); err == nil {
			r.Body.Close() //nolint:errcheck // not read from
		}
	}()
	eventually(t, "one waits", func() bool { return h.scrape()["vllm:num_requests_waiting"+model] == 1 })
	if m = h.scrape(); m["vllm:num_requests_running"+model] != 1 || !(m["vllm:kv_cache_usage_perc"+model] > 0) {
		t.Errorf("running %v, usage %v", m["vllm:num_requests_running"+model], m["vllm:kv_cache_usage_perc"+model])
	}
	leave()
	<-waits
	r.Body.Close() //nolint:errcheck // left in the middle
	h.idle()
	eventually(t, "both are counted as aborted", func() bool {
		return h.scrape()[`vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}`] == 2
	})
}

// Before there is a model nothing runs or waits, and its gauges say so; what is not known is not
// there. Routers that look for LoRA adapters find that there are none.
func TestMetricsOfNothing(t *testing.T) {
	h := start(t, options{loading: true})
	m := h.scrape()
	for _, name := range []string{"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "num_preemptions_total"} {
		if v, ok := m["vllm:"+name+`{engine="0",model_name="tiny"}`]; !ok || v != 0 {
			t.Errorf("%s: %v, there %v", name, v, ok)
		}
	}
	for name := range m {
		if strings.HasPrefix(name, "vllm:cache_config_info") || strings.HasPrefix(name, "moeserve_expert") {
			t.Errorf("there is %s", name)
		}
	}
	if at := m[`vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""}`]; at < 1e9 {
		t.Errorf("LoRA's gauge is %v", at)
	}
	server.NewMetrics("a").ObserveStep(engine.StepInfo{Duration: time.Second})
	server.NewMetrics("a") // twice in a process
}

type collect func(to *metrics.Sink)

func (c collect) Collect(to *metrics.Sink) { c(to) }

// Metrics are compressed for those who ask, and not for those who do not.
func TestMetricsAreCompressed(t *testing.T) {
	h := start(t, options{loading: true})
	plain := h.send(http.MethodGet, "/metrics", "", "Accept-Encoding", "identity")
	if e := plain.header.Get("Content-Encoding"); e != "" || plain.header.Get("Content-Type") != metrics.ContentType || !strings.Contains(plain.body, "vllm:generation_tokens_total{") {
		t.Errorf("%v: %s", plain.header, plain.body)
	}
	a := h.send(http.MethodGet, "/metrics", "", "Accept-Encoding", "deflate, gzip")
	if a.header.Get("Content-Encoding") != "gzip" {
		t.Fatalf("%v", a.header)
	}
	z, err := gzip.NewReader(strings.NewReader(a.body))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil || !strings.Contains(string(text), "vllm:generation_tokens_total{") {
		t.Errorf("%v: %s", err, text)
	}
}

// Collectors that hang hold no more than a few readers.
func TestMetricsAreReadByFew(t *testing.T) {
	entered, gate := make(chan struct{}), make(chan struct{})
	h := start(t, options{change: func(m *server.Model) {
		m.Collectors = []metrics.Collector{collect(func(*metrics.Sink) { entered <- struct{}{}; <-gate })}
	}})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			if a := h.send(http.MethodGet, "/metrics", ""); a.status != http.StatusOK {
				t.Errorf("%d: %s", a.status, a.body)
			}
		})
	}
	for range 4 {
		<-entered
	}
	if a := h.send(http.MethodGet, "/metrics", ""); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "too many requests for metrics") {
		t.Errorf("%d: %s", a.status, a.body)
	}
	close(gate)
	readers.Wait()
}

// Metrics that contradict each other are an error, and not half a response.
func TestMetricsContradict(t *testing.T) {
	h := start(t, options{change: func(m *server.Model) {
		d := metrics.NewDesc("moeserve_a", "A.")
		m.Collectors = []metrics.Collector{metrics.NewCounter(d), metrics.NewCounter(d)}
	}})
	if a := h.send(http.MethodGet, "/metrics", ""); a.status != http.StatusInternalServerError || !strings.Contains(a.body, "moeserve_a is there twice") {
		t.Errorf("%d: %s", a.status, a.body)
	}
}

// brokenWriter is the response writer of a client that stops reading once it has seen so many finish reasons.
type brokenWriter struct {
	*httptest.ResponseRecorder
	finished, after int
}

func (w *brokenWriter) Write(b []byte) (int, error) {
	if w.finished >= w.after {
		return 0, errors.New("broken pipe")
	}
	if strings.Contains(string(b), `"finish_reason":"`) {
		w.finished++
	}
	return w.ResponseRecorder.Write(b)
}
func (w *brokenWriter) Flush() {}

// TestBrokenStream: a request with two choices whose client is lost after the end of the first has not
// succeeded.
func TestBrokenStream(t *testing.T) {
	h := start(t, options{})
	body := `{"prompt": [1, 2, 3], "ignore_eos": true, "max_tokens": 200, "n": 2, "stream": true, "temperature": 2, "seed": 3, "stop": ["e", "a"]}`
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := &brokenWriter{httptest.NewRecorder(), 0, 1}
	h.server.ServeHTTP(w, r)
	if w.finished != 1 || strings.Contains(w.Body.String(), "[DONE]") {
		t.Fatalf("%d choices have finished: %s", w.finished, w.Body)
	}
	m := h.send(http.MethodGet, "/metrics", "").body
	if !strings.Contains(m, `vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1`) {
		t.Error("the request whose client has gone is not counted as aborted")
	}
}
