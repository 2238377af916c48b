package server

import (
	"context"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/engine"
)

// requestLog is how an HTTP request ran on the model.
type requestLog struct {
	usage usage
	// ttft is the time to the first token of all samples, tpot the mean time per output token
	// after the first; 0 where there was none.
	ttft, tpot time.Duration
	// finish reasons of its samples, each once.
	finish []string
	// times of its samples together, and their number.
	times   engine.Times
	samples int
	// model and parameters that it ran with.
	model  string
	params engine.Params
}

// jobLog is one of the engine's requests that an HTTP request made.
type jobLog struct {
	usage   engine.Usage
	times   engine.Times
	samples int
	finish  []engine.FinishReason
}

// summarize combines the engine's requests of one HTTP request.
func summarize(jobs []jobLog) requestLog {
	var l requestLog
	var decoding time.Duration
	tokens := 0
	for _, j := range jobs {
		l.usage.add(j.usage)
		l.samples += j.samples
		addTimes(&l.times, j.times)
		for _, f := range j.finish {
			if reason := string(f); !slices.Contains(l.finish, reason) {
				l.finish = append(l.finish, reason)
			}
		}
		if j.times.FirstToken.IsZero() {
			continue
		}
		if ttft := j.times.FirstToken.Sub(j.times.Arrived); l.ttft == 0 || ttft < l.ttft {
			l.ttft = ttft
		}
		// Samples run side by side.
		if more := j.usage.CompletionTokens - j.samples; more > 0 && !j.times.Finished.IsZero() {
			decoding += j.times.Finished.Sub(j.times.FirstToken) * time.Duration(j.samples)
			tokens += more
		}
	}
	if tokens > 0 {
		l.tpot = decoding / time.Duration(tokens)
	}
	return l
}

// logRequest logs a request: at info where it needs the model, else at debug.
func (s *Server) logRequest(w *response, r *http.Request, took time.Duration) {
	level := slog.LevelDebug
	if w.works {
		level = slog.LevelInfo
	}
	attrs := []slog.Attr{
		slog.String("request_id", w.id), slog.String("method", r.Method), slog.String("endpoint", truncate(r.URL.Path)),
		slog.String("client", r.RemoteAddr), slog.Int("status", w.status), slog.Float64("duration_s", inSeconds(took)),
	}
	if l := w.ran; l != nil {
		attrs = append(attrs, slog.Int("prompt_tokens", l.usage.PromptTokens), slog.Int("completion_tokens", l.usage.CompletionTokens),
			slog.String("finish_reason", strings.Join(l.finish, ",")))
		if l.ttft > 0 {
			attrs = append(attrs, slog.Float64("ttft_s", inSeconds(l.ttft)))
		}
		if l.tpot > 0 {
			attrs = append(attrs, slog.Float64("tpot_s", inSeconds(l.tpot)))
		}
	}
	if w.refused != nil {
		attrs = append(attrs, slog.String("err", w.refused.Error()))
	}
	s.o.Log.LogAttrs(context.WithoutCancel(r.Context()), level, "request", attrs...)
}

// inSeconds rounds to a microsecond.
func inSeconds(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e6 }
