package main

import (
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collected is a collector of OpenTelemetry, and what came to it.
type collected struct {
	url string

	mu       sync.Mutex
	resource map[string]any
	spans    []*otlp.Span
}

func collect(t *testing.T) *collected {
	t.Helper()
	c := &collected{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var m collector.ExportTraceServiceRequest
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &m) != nil {
			t.Errorf("%s: %v, %d bytes", r.URL.Path, err, len(body))
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, of := range m.GetResourceSpans() {
			c.resource = attributes(of.GetResource().GetAttributes())
			for _, scope := range of.GetScopeSpans() {
				c.spans = append(c.spans, scope.GetSpans()...)
			}
		}
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	t.Cleanup(s.Close)
	c.url = s.URL
	return c
}

// attributes by name: strings, numbers, and lists of strings joined by commas.
func attributes(of []*common.KeyValue) map[string]any {
	all := map[string]any{}
	for _, kv := range of {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			all[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			all[kv.GetKey()] = v.IntValue
		case *common.AnyValue_DoubleValue:
			all[kv.GetKey()] = v.DoubleValue
		case *common.AnyValue_ArrayValue:
			var list []string
			for _, x := range v.ArrayValue.GetValues() {
				list = append(list, x.GetStringValue())
			}
			all[kv.GetKey()] = strings.Join(list, ",")
		}
	}
	return all
}

// TestRequestSpans: a collector gets a span of each request that uses the model, a child of the
// client's, with vLLM's attributes; one that is refused has a span, too, and health has none.
func TestRequestSpans(t *testing.T) {
	c := collect(t)
	p := startServe(t, "--emulate", "hbm=256MiB", "--otlp-traces-endpoint", c.url, "--served-model-name", "small")
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
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.spans) != 3 || c.resource["service.name"] != "moeserve" || c.resource["service.version"] == "" {
		t.Fatalf("%d spans of %v; log: %s", len(c.spans), c.resource, p.log)
	}
	for _, s := range c.spans {
		if s.GetName() != "llm_request" || hex.EncodeToString(s.GetTraceId()) != parent[3:35] || hex.EncodeToString(s.GetParentSpanId()) != parent[36:52] || s.GetKind() != otlp.Span_SPAN_KIND_SERVER {
			t.Errorf("%v", s)
		}
		if took := time.Duration(s.GetEndTimeUnixNano() - s.GetStartTimeUnixNano()); took <= 0 || took > time.Minute {
			t.Errorf("a span of %v", took)
		}
	}
	first := attributes(c.spans[0].GetAttributes())
	for name, want := range map[string]any{
		"http.route": "/v1/completions", "http.response.status_code": int64(200), "gen_ai.response.model": "small",
		"gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75, "gen_ai.request.max_tokens": int64(7), "gen_ai.request.n": int64(2),
		"gen_ai.usage.prompt_tokens": int64(4), "gen_ai.usage.completion_tokens": int64(14), "gen_ai.usage.num_sequences": int64(2), "gen_ai.response.finish_reasons": "length",
	} {
		if first[name] != want {
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
	refused := attributes(c.spans[1].GetAttributes())
	if refused["http.response.status_code"] != int64(400) || refused["gen_ai.response.model"] != nil || !strings.Contains(refused["error.message"].(string), "temperature") {
		t.Errorf("a request that was refused: %v", refused)
	}
	if streamed := attributes(c.spans[2].GetAttributes()); streamed["gen_ai.usage.completion_tokens"] != int64(3) {
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
