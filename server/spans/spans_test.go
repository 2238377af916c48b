package spans

import (
	"bytes"
	"context"
	"encoding/pem"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/server/spans/spanstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answers with a status, a header and a body of JSON.
func answers(code int, body string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		_, _ = w.Write([]byte(body))
	}
}

// export sends one span of each request to a collector, and returns what was logged.
func export(t *testing.T, c *spanstest.Collector, of ...*server.RequestTrace) string {
	t.Helper()
	var log bytes.Buffer
	e, err := New(t.Context(), Options{Endpoint: c.URL, Version: "1.2.3", Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	e.sender.backoff = time.Microsecond
	for _, r := range of {
		e.Record(r)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	return log.String()
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// request is one that failed, with times that do not depend on when the test runs.
func request() *server.RequestTrace {
	at := func(ms int) time.Time {
		return time.Unix(1700000000, 123456789).Add(time.Duration(ms) * time.Millisecond)
	}
	r := &server.RequestTrace{
		ID: "cmpl-1", Endpoint: "/v1/completions", Status: 500, Error: "the \"GPU\" is lost <\xff>", Model: "small", Header: http.Header{},
		Start: at(0), End: at(1000), PromptTokens: 1 << 53, FinishReasons: []string{"stop", "length"},
	}
	r.Header.Set("Traceparent", parent)
	r.Header.Set("Tracestate", "vendor=1")
	r.Params.Temperature = float32(math.Inf(1))
	r.Times.Arrived, r.Times.Admitted, r.Times.FirstToken, r.Times.Finished = at(1), at(251), at(501), at(1000)
	return r
}

// TestFields: each field of a span arrives as it was, also what JSON has no number for.
func TestFields(t *testing.T) {
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
	c := spanstest.Start(t)
	child, root := request(), request()
	root.Header, root.Status = nil, 200
	if log := export(t, c, child, root); log != "" {
		t.Errorf("log: %s", log)
	}
	got, resource := c.Got()
	if len(got) != 2 || resource["service.name"] != "moeserve" || resource["service.version"] != "1.2.3" ||
		resource["deployment.environment"] != "test" || resource["process.pid"] != int64(os.Getpid()) {
		t.Fatalf("%v of %v", got, resource)
	}
	s := got[0]
	if s.TraceID != "0af7651916cd43dd8448eb211c80319c" || s.ParentSpanID != "b7ad6b7169203331" || s.SpanID == s.ParentSpanID || s.TraceState != "vendor=1" ||
		s.Flags != 0x301 || s.Kind != 2 || s.Name != "llm_request" || s.Start != 1700000000123456789 || s.End != 1700000001123456789 {
		t.Errorf("%+v", s)
	}
	const says = "the \"GPU\" is lost <\uFFFD>"
	if s.Status == nil || s.Status.Code != 2 || s.Status.Message != says {
		t.Errorf("status %+v", s.Status)
	}
	for name, want := range map[string]any{
		"error.message": says, "http.response.status_code": int64(500), "gen_ai.usage.prompt_tokens": int64(1 << 53), "gen_ai.request.temperature": math.Inf(1),
		"gen_ai.response.finish_reasons": []any{"stop", "length"}, "gen_ai.latency.time_in_queue": 0.25,
	} {
		if !reflect.DeepEqual(s.Attributes[name], want) {
			t.Errorf("%s is %v, want %v", name, s.Attributes[name], want)
		}
	}
	if len(s.Events) != 2 || s.Events[0].Name != "admitted" || s.Events[0].Time != 1700000000374456789 || s.Events[1].Name != "first token" {
		t.Errorf("events %+v", s.Events)
	}
	if r := got[1]; r.ParentSpanID != "" || r.TraceID == s.TraceID || r.Flags != 0x101 || r.Status == nil || *r.Status != (spanstest.StatusOfSpan{}) {
		t.Errorf("a span without a parent: %+v", r)
	}
}

// TestValues: attributes that Record does not use, and the environment might.
func TestValues(t *testing.T) {
	for _, tt := range []struct {
		of   attribute.Value
		want map[string]any
	}{
		{attribute.BoolValue(true), map[string]any{"boolValue": true}},
		{attribute.Int64Value(math.MinInt64), map[string]any{"intValue": "-9223372036854775808"}},
		{attribute.Float64Value(math.Inf(-1)), map[string]any{"doubleValue": "-Infinity"}},
		{attribute.Float64Value(math.NaN()), map[string]any{"doubleValue": "NaN"}},
		{attribute.Int64SliceValue([]int64{1, 2}), map[string]any{"stringValue": "[1,2]"}},
	} {
		if got := anyValue(tt.of); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%v: %v", tt.want, got)
		}
	}
}

// TestAnswers: spans are sent again where the collector asks for that, and no longer than the timeout
// allows; what it refuses or warns of is logged.
func TestAnswers(t *testing.T) {
	for _, tt := range []struct {
		name     string
		answers  []http.HandlerFunc
		requests int
		got      int
		log      string
	}{
		{"busy", []http.HandlerFunc{answers(429, ""), answers(502, ""), answers(503, ""), answers(504, "")}, 5, 1, ""},
		{"soon", []http.HandlerFunc{answers(503, "", "Retry-After", "0")}, 2, 1, ""},
		{"too late", []http.HandlerFunc{answers(503, "", "Retry-After", "3600")}, 1, 0, "503 Service Unavailable"},
		{"bad", []http.HandlerFunc{answers(400, `{"code":3,"message":"no such tenant"}`)}, 1, 0, "no such tenant"},
		{"failed", []http.HandlerFunc{answers(500, "")}, 1, 0, "500 Internal Server Error"},
		{"partial", []http.HandlerFunc{answers(200, `{"partialSuccess":{"rejectedSpans":"1","errorMessage":"too old"}}`)}, 1, 1, "the collector refused 1 spans"},
		{"number", []http.HandlerFunc{answers(200, `{"partialSuccess":{"rejectedSpans":1}}`)}, 1, 1, "the collector refused 1 spans"},
		{"warning", []http.HandlerFunc{answers(200, `{"partialSuccess":{"errorMessage":"use /v2"}}`)}, 1, 1, `msg="the collector of traces warns" message="use /v2"`},
		{"nothing refused", []http.HandlerFunc{answers(200, `{"partialSuccess":{}}`)}, 1, 1, ""},
		{"not JSON", []http.HandlerFunc{answers(200, "ok", "Content-Type", "text/plain")}, 1, 1, ""},
		{"broken", []http.HandlerFunc{answers(200, "{")}, 1, 1, "the collector's answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := spanstest.Start(t, tt.answers...)
			log := export(t, c, request())
			if got, _ := c.Got(); len(got) != tt.got || len(c.Requests()) != tt.requests {
				t.Errorf("%d spans, %d requests; want %d, %d", len(got), len(c.Requests()), tt.got, tt.requests)
			}
			if !strings.Contains(log, tt.log) || tt.log == "" && log != "" {
				t.Errorf("log %q, want %q", log, tt.log)
			}
		})
	}
}

// TestErrorsOnceInAWhile: a collector that refuses each batch has one line in the log.
func TestErrorsOnceInAWhile(t *testing.T) {
	t.Setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
	c := spanstest.Start(t, answers(400, ""), answers(400, ""))
	log := export(t, c, request(), request())
	if len(c.Requests()) != 2 || strings.Count(log, "\n") != 1 {
		t.Errorf("%d requests; log: %s", len(c.Requests()), log)
	}
}

// TestStops: Shutdown ends what is being sent, and what waits to be sent again.
func TestStops(t *testing.T) {
	var e *Exporter
	c := spanstest.Start(t, func(w http.ResponseWriter, r *http.Request) {
		_ = e.sender.Shutdown(context.Background())
		answers(503, "", "Retry-After", "4")(w, r)
	})
	e, err := New(t.Context(), Options{Endpoint: c.URL + "/v1/traces"})
	if err != nil {
		t.Fatal(err)
	}
	e.Record(request())
	if err := e.Close(); err != nil || len(c.Requests()) != 1 {
		t.Errorf("%v after %d requests", err, len(c.Requests()))
	}
}

// TestRetryAfter reads both forms of the header.
func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for header, want := range map[string]time.Duration{
		"": -1, "soon": -1, "-1": -1, "0": 0, "120": 2 * time.Minute,
		"Fri, 02 Jan 2026 03:04:35 GMT": 30 * time.Second, "Fri, 02 Jan 2026 03:04:00 GMT": 0,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
}

// TestEnvironment: variables of OpenTelemetry's exporter; those of traces go before the general ones.
func TestEnvironment(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-other=1")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20abc=, x-tenant = a,")
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2500")
	c := spanstest.Start(t)
	if log := export(t, c, request()); log != "" || len(c.Requests()) != 1 {
		t.Fatalf("%d requests, log: %s", len(c.Requests()), log)
	}
	h := c.Requests()[0].Header
	for name, want := range map[string]string{"Authorization": "Bearer abc=", "X-Tenant": "a", "X-Other": "", "Content-Encoding": "gzip", "User-Agent": "moeserve/1.2.3"} {
		if h.Get(name) != want {
			t.Errorf("%s: %q, want %q", name, h.Get(name), want)
		}
	}
	e, err := New(t.Context(), Options{Endpoint: c.URL})
	if err != nil {
		t.Fatal(err)
	}
	if e.sender.timeout != 2500*time.Millisecond {
		t.Errorf("timeout %v", e.sender.timeout)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestBadEnvironment: an error names the variable, and no secret.
func TestBadEnvironment(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range [][2]string{
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "secret"},
		{"OTEL_EXPORTER_OTLP_HEADERS", "a=secret%zz"},
		{"OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"},
		{"OTEL_EXPORTER_OTLP_TIMEOUT", "10s"},
		{"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", "/none"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", empty},
		{"OTEL_EXPORTER_OTLP_CLIENT_KEY", empty},
	} {
		t.Run(tt[0], func(t *testing.T) {
			t.Setenv(tt[0], tt[1])
			if _, err := New(t.Context(), Options{Endpoint: "http://127.0.0.1:1"}); err == nil || !strings.Contains(err.Error(), tt[0]) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestCertificate: a collector is reached by HTTPS with the certificate that the environment names, and
// not without it.
func TestCertificate(t *testing.T) {
	var taken atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { taken.Add(1) }))
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	s.StartTLS()
	defer s.Close()
	c := &spanstest.Collector{URL: s.URL}
	if log := export(t, c, request()); taken.Load() != 0 || !strings.Contains(log, "certificate") {
		t.Errorf("%d requests, log: %s", taken.Load(), log)
	}
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", path)
	if log := export(t, c, request()); taken.Load() != 1 || log != "" {
		t.Errorf("%d requests, log: %s", taken.Load(), log)
	}
}
