package spans

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/moeserve/moeserve/server"
)

// Options of an exporter.
type Options struct {
	// Endpoint is the collector's URL, as http://127.0.0.1:4318/v1/traces; that path is its default.
	Endpoint string
	// Version of the product.
	Version string
	// Log gets why spans cannot be sent, once a minute at most. Default: none.
	Log *slog.Logger
}

// Exporter is a server.Tracer.
type Exporter struct {
	sender   *sender
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

var _ server.Tracer = (*Exporter)(nil)

// New starts an exporter. It does not wait for the collector. One process has one: the SDK reports
// errors to one place.
func New(ctx context.Context, o Options) (*Exporter, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	to, err := url.Parse(o.Endpoint)
	if err != nil {
		return nil, err
	}
	if to.Path == "" || to.Path == "/" {
		to.Path = "/v1/traces"
	}
	otel.SetLogger(logr.FromSlogHandler(o.Log.Handler()))
	otel.SetErrorHandler(&errorLog{log: o.Log})
	// What the environment says of the service goes before this.
	of, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "moeserve"), attribute.String("service.version", o.Version)),
		resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv(), resource.WithTelemetrySDK())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, err
	}
	send, err := newSender(to, o.Version)
	if err != nil {
		return nil, err
	}
	p := sdk.NewTracerProvider(sdk.WithBatcher(send), sdk.WithResource(of))
	return &Exporter{sender: send, provider: p, tracer: p.Tracer("github.com/moeserve/moeserve", trace.WithInstrumentationVersion(o.Version))}, nil
}

// closeTimeout bounds Close.
const closeTimeout = 5 * time.Second

// Close sends what has not been sent, and ends the exporter.
func (e *Exporter) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return errors.Join(e.provider.Shutdown(ctx), e.sender.Shutdown(ctx)) // the provider leaves its sender where it does not wait on
}

// Record implements server.Tracer. Attributes have vLLM's names, and those of OpenTelemetry's
// conventions where it has none.
func (e *Exporter) Record(r *server.RequestTrace) {
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.HeaderCarrier(r.Header))
	_, span := e.tracer.Start(ctx, "llm_request", trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(r.Start))
	if !span.IsRecording() {
		return
	}
	defer span.End(trace.WithTimestamp(r.End))
	span.SetAttributes(
		attribute.String("gen_ai.request.id", r.ID), attribute.String("http.route", r.Endpoint), attribute.Int("http.response.status_code", r.Status),
	)
	if r.Status >= http.StatusInternalServerError {
		span.SetStatus(codes.Error, r.Error)
	}
	if r.Error != "" {
		span.SetAttributes(attribute.String("error.message", r.Error))
	}
	if r.Model == "" {
		return // it did not get to the engine
	}
	p, t := r.Params, r.Times
	span.SetAttributes(
		attribute.String("gen_ai.response.model", r.Model),
		attribute.Int("gen_ai.request.n", p.N), attribute.Int("gen_ai.request.max_tokens", p.MaxTokens),
		attribute.Float64("gen_ai.request.temperature", float64(p.Temperature)), attribute.Float64("gen_ai.request.top_p", float64(p.TopP)),
		attribute.Int("gen_ai.usage.num_sequences", r.Sequences),
		attribute.Int("gen_ai.usage.prompt_tokens", r.PromptTokens), attribute.Int("gen_ai.usage.completion_tokens", r.CompletionTokens),
		attribute.Int("gen_ai.usage.cache_read.input_tokens", r.CachedTokens),
		attribute.StringSlice("gen_ai.response.finish_reasons", r.FinishReasons),
	)
	// seconds adds a latency whose two ends there were.
	seconds := func(name string, from, to time.Time) {
		if !from.IsZero() && !to.IsZero() {
			span.SetAttributes(attribute.Float64("gen_ai.latency."+name, to.Sub(from).Seconds()))
		}
	}
	seconds("time_in_queue", t.Arrived, t.Admitted)
	seconds("time_sendfirst_token", t.Arrived, t.FirstToken)
	seconds("time_in_model_prefill", t.Admitted, t.FirstToken)
	seconds("time_in_model_decode", t.FirstToken, t.Finished)
	seconds("time_in_model_inference", t.Admitted, t.Finished)
	seconds("e2e", t.Arrived, t.Finished)
	if !t.Admitted.IsZero() {
		span.AddEvent("admitted", trace.WithTimestamp(t.Admitted))
	}
	if !t.FirstToken.IsZero() {
		span.AddEvent("first token", trace.WithTimestamp(t.FirstToken))
	}
}

// errorLog logs errors of the SDK, of which each batch may have one.
type errorLog struct {
	log  *slog.Logger
	mu   sync.Mutex
	last time.Time
}

// Handle implements otel.ErrorHandler.
func (l *errorLog) Handle(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); now.Sub(l.last) >= time.Minute {
		l.last = now
		var of *partialError
		if errors.As(err, &of) && of.refused == 0 {
			l.log.Warn("the collector of traces warns", "message", of.message)
			return
		}
		l.log.Warn("traces of requests cannot be sent", "err", err)
	}
}
