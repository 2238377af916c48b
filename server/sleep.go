package server

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/engine"
)

// Sleeper puts a model to sleep and wakes it. Its methods wait for each other. Errors for lack of
// memory are an *OutOfMemoryError.
type Sleeper interface {
	// Sleep gives the GPU's memory to others: at level 1 the weights go to host memory, at level 2
	// they are loaded again by Wake. mode says what becomes of running requests.
	Sleep(ctx context.Context, level int, mode engine.PauseMode) error
	// Wake gets the memory of these tags ("weights", "kv_cache"), of all without, and what was in it.
	Wake(ctx context.Context, tags []string) error
	// Level is 0 where no memory is given back.
	Level() int
}

// OutOfMemoryError says that others have the memory that a sleep or a wake needs.
type OutOfMemoryError struct{ Err error }

func (e *OutOfMemoryError) Error() string { return e.Err.Error() }
func (e *OutOfMemoryError) Unwrap() error { return e.Err }

// sleepTags are vLLM's.
var sleepTags = []string{"weights", "kv_cache"}

// errAsleep: the model sleeps.
var errAsleep = errors.New("the model sleeps, and requests wait until it is woken (POST /wake_up on the admin address)")

// asleep reports whether the model sleeps.
func (m *Model) asleep() bool { return m.Sleeper != nil && m.Sleeper.Level() > 0 }

// sleeper is that of the model, or why there is none.
func (s *Server) sleeper() (Sleeper, error) {
	m, err := s.current()
	if err != nil {
		return nil, err
	}
	if m.Sleeper == nil {
		return nil, &Error{Status: http.StatusNotFound, Type: invalidRequest, Message: "this server's models take turns, and sleep and wake with their requests"}
	}
	return m.Sleeper, nil
}

// sleep puts the model to sleep. Parameters and response, a status without a body, are vLLM's.
func (s *Server) sleep(w *response, r *http.Request) error {
	m, err := s.sleeper()
	if err != nil {
		return err
	}
	query, err := parameters(r, "level", "mode")
	if err != nil {
		return err
	}
	level, mode := 1, engine.PauseAbort
	if all := query["level"]; all != nil {
		at := slices.Index([]string{"1", "2"}, all[0])
		if at < 0 || len(all) > 1 {
			return badRequest("level", "invalid_value", "Invalid value for 'level': it must be 1 (weights go to host memory) or 2 (they are loaded again), once.")
		}
		level = at + 1
	}
	if all := query["mode"]; all != nil {
		mode = engine.PauseMode(all[0])
		if mode.Validate() != nil || len(all) > 1 {
			return badRequest("mode", "invalid_value", "Invalid value for 'mode': it must be abort (running requests end with an error), wait (they finish first) or keep (they go on after the wake), once.")
		}
	}
	if err := m.Sleep(r.Context(), level, mode); err != nil {
		return sleepError(r.Context(), err)
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

// wakeUp wakes the model. Parameters and response, a status without a body, are vLLM's.
func (s *Server) wakeUp(w *response, r *http.Request) error {
	m, err := s.sleeper()
	if err != nil {
		return err
	}
	query, err := parameters(r, "tags")
	if err != nil {
		return err
	}
	for _, tag := range query["tags"] {
		if !slices.Contains(sleepTags, tag) {
			return badRequest("tags", "invalid_value", "Invalid value for 'tags': it must be %s.", strings.Join(sleepTags, " or "))
		}
	}
	if err := m.Wake(r.Context(), query["tags"]); err != nil {
		return sleepError(r.Context(), err)
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

// isSleeping says whether any memory of the model is given back.
func (s *Server) isSleeping(w *response, r *http.Request) error {
	m, err := s.sleeper()
	if err != nil {
		return err
	}
	if _, err := parameters(r); err != nil {
		return err
	}
	w.json(http.StatusOK, map[string]bool{"is_sleeping": m.Level() > 0})
	return nil
}

// sleepError is an error of sleep or wake as its client reads it.
func sleepError(ctx context.Context, err error) error {
	if memory := (*OutOfMemoryError)(nil); errors.As(err, &memory) {
		return &Error{Status: http.StatusServiceUnavailable, Type: unavailable, Code: "out_of_memory", RetryAfter: retrySoon, Message: Message(err)}
	}
	if ctx.Err() != nil || errors.Is(err, engine.ErrStopped) {
		return asError(ctx, err, "")
	}
	return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: Message(err)}
}

// parameters parses those of a request's URL. One that is unknown is an error: who misspells it would
// take the response for success.
func parameters(r *http.Request, known ...string) (url.Values, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, badRequest("", "invalid_value", "The URL's query is invalid: %s.", truncate(err.Error()))
	}
	for name := range query {
		if !slices.Contains(known, name) {
			these := "there are none here"
			if len(known) > 0 {
				these = "those of this URL are " + strings.Join(known, " and ")
			}
			return nil, badRequest(truncate(name), "unknown_parameter", "Unrecognized URL parameter supplied: %s; %s.", truncate(name), these)
		}
	}
	return query, nil
}
