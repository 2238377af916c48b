package server

import (
	"net/http"
	"time"

	"github.com/moeserve/moeserve/engine"
)

// Tracer records requests that use a model. Record may be called from any goroutine, and does not wait.
type Tracer interface{ Record(*RequestTrace) }

// RequestTrace is how a request ran. The tracer does not keep Header.
type RequestTrace struct {
	// ID, path and headers of the HTTP request, and the status of its response.
	ID, Endpoint string
	Header       http.Header
	Status       int
	// Error is why it was refused or failed; empty where it was not.
	Error      string
	Start, End time.Time
	// Model that ran it; empty, as all below, where it did not get to the engine.
	Model  string
	Params engine.Params
	// Times of the first of its samples to get there, but for Finished, which is the last one's.
	Times     engine.Times
	Sequences int
	// PromptTokens, of which CachedTokens were not computed, and CompletionTokens.
	PromptTokens, CachedTokens, CompletionTokens int
	FinishReasons                                []string
}

// trace hands a request to the tracer, if there is one.
func (s *Server) trace(w *response, r *http.Request, start time.Time) {
	if s.o.Tracer == nil || !w.works {
		return
	}
	t := &RequestTrace{ID: w.id, Endpoint: r.URL.Path, Header: r.Header, Status: w.status, Start: start, End: time.Now()}
	if w.refused != nil {
		t.Error = w.refused.Error()
	}
	if l := w.ran; l != nil {
		t.Model, t.Params, t.Times, t.Sequences = l.model, l.params, l.times, l.samples
		t.PromptTokens, t.CachedTokens, t.CompletionTokens = l.usage.PromptTokens, l.usage.PromptTokensDetails.CachedTokens, l.usage.CompletionTokens
		t.FinishReasons = l.finish
	}
	s.o.Tracer.Record(t)
}

// addTimes adds the times of another of the engine's requests to those of an HTTP request.
func addTimes(t *engine.Times, one engine.Times) {
	first := func(of *time.Time, other time.Time) {
		if of.IsZero() || !other.IsZero() && other.Before(*of) {
			*of = other
		}
	}
	first(&t.Arrived, one.Arrived)
	first(&t.Admitted, one.Admitted)
	first(&t.FirstToken, one.FirstToken)
	if one.Finished.After(t.Finished) {
		t.Finished = one.Finished
	}
}
