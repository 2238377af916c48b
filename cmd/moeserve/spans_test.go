package main

import (
	"io"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/server/spans/spanstest"
)

// TestRequestSpans: a collector gets a span of each request that uses the model, a child of the
// client's, with vLLM's attributes; one that is refused has a span, too, and health has none.
func TestRequestSpans(t *testing.T) {
	c := spanstest.Start(t)
	p := startServe(t, "--emulate", "hbm=256MiB", "--otlp-traces-endpoint", c.URL, "--served-model-name", "small")
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	send := func(body string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Traceparent", parent)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close() //nolint:errcheck // only read from
	}
	p.get(t, "/health")
	send(`{"prompt": "1+2=", "temperature": 0.5, "top_p": 0.75, "ignore_eos": true, "max_tokens": 7, "n": 2}`)
	send(`{"prompt": "1+2=", "temperature": -1}`)
	send(`{"prompt": "1+2=", "stream": true, "ignore_eos": true, "max_tokens": 3}`)
	p.end(t) // which sends what is left
	got, resource := c.Got()
	if len(got) != 3 || resource["service.name"] != "moeserve" || resource["service.version"] == "" {
		t.Fatalf("%d spans of %v; log: %s", len(got), resource, p.log)
	}
	for _, s := range got {
		const server = 2 // SPAN_KIND_SERVER
		if s.Name != "llm_request" || string(s.TraceID) != parent[3:35] || string(s.ParentSpanID) != parent[36:52] || s.Kind != server {
			t.Errorf("%+v", s)
		}
		if took := time.Duration(s.End - s.Start); took <= 0 || took > time.Minute {
			t.Errorf("a span of %v", took)
		}
	}
	first := got[0].Attributes
	for name, want := range map[string]any{
		"http.route": "/v1/completions", "http.response.status_code": int64(200), "gen_ai.response.model": "small",
		"gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75, "gen_ai.request.max_tokens": int64(7), "gen_ai.request.n": int64(2),
		"gen_ai.usage.prompt_tokens": int64(4), "gen_ai.usage.completion_tokens": int64(14), "gen_ai.usage.num_sequences": int64(2), "gen_ai.response.finish_reasons": []any{"length"},
	} {
		if !reflect.DeepEqual(first[name], want) {
			t.Errorf("%s is %v, want %v", name, first[name], want)
		}
	}
	whole, sum := first["gen_ai.latency.e2e"].(float64), 0.0
	for _, part := range []string{"time_in_queue", "time_in_model_prefill", "time_in_model_decode"} {
		sum += first["gen_ai.latency."+part].(float64)
	}
	if d := whole - sum; whole <= 0 || d > 1e-6 || d < -1e-6 {
		t.Errorf("parts of %v s take %v s", whole, sum)
	}
	refused := got[1].Attributes
	if refused["http.response.status_code"] != int64(400) || refused["gen_ai.response.model"] != nil || !strings.Contains(refused["error.message"].(string), "temperature") {
		t.Errorf("a request that was refused: %v", refused)
	}
	if streamed := got[2].Attributes; streamed["gen_ai.usage.completion_tokens"] != int64(3) {
		t.Errorf("a streamed request: %v", streamed)
	}
}

// TestSpansWithoutCollector: requests are served and the server ends soon where no collector answers,
// and the log says so.
func TestSpansWithoutCollector(t *testing.T) {
	if os.Getenv("OTEL_BSP_SCHEDULE_DELAY") == "" {
		t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
	}
	p := startServe(t, "--emulate", "hbm=256MiB", "--otlp-traces-endpoint", "http://127.0.0.1:1", "--log-format", "json")
	for range 3 {
		if answer, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "1+2="}`).Body); err != nil || !strings.Contains(string(answer), "choices") {
			t.Errorf("%v: %s", err, answer)
		}
	}
	began := time.Now()
	p.end(t)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the end took %v", took)
	}
	if !regexp.MustCompile(`"level":"WARN","msg":"(traces of requests cannot be sent|the last traces of requests were not sent)"`).MatchString(p.log.String()) {
		t.Errorf("the log does not say that traces are lost: %s", p.log)
	}
}
