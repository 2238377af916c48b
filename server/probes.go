package server

import (
	"net/http"
	"strings"
)

// live is good unless the engine has failed, from which only a restart helps.
func (s *Server) live(w *response, _ *http.Request) error {
	if s.failed.Load() != nil {
		_, err := s.current()
		return &Error{Status: http.StatusServiceUnavailable, Type: serverError, Message: err.Error()}
	}
	w.json(http.StatusOK, struct{}{})
	return nil
}

// health is good while the model answers. As vLLM opens its port only then, what is written for
// vLLM takes this for readiness; as with vLLM a model that sleeps is in good health.
func (s *Server) health(w *response, r *http.Request) error {
	if _, err := s.current(); err != nil && s.failed.Load() == nil {
		return err
	}
	for _, m := range s.all() {
		if s.failed.Load() != nil {
			break
		}
		if m.asleep() {
			w.json(http.StatusOK, map[string]string{"status": "sleeping", "reason": errAsleep.Error()})
			return nil
		}
		if m.Engine.State().Failing != nil {
			w.json(http.StatusOK, map[string]string{"status": "degraded", "reason": errCopies.Error()})
			return nil
		}
	}
	return s.live(w, r)
}

// ready is good while requests are accepted and do not wait for a wake, and steps do not fail.
func (s *Server) ready(w *response, r *http.Request) error {
	if s.gate.isClosed() {
		return notNow(errStopping)
	}
	for _, m := range s.all() {
		if m.asleep() {
			return notNow(errAsleep)
		}
		if m.Engine.State().Failing != nil {
			return notNow(errCopies)
		}
	}
	return s.health(w, r)
}

// load is the number of requests that use the model now, with vLLM's name.
func (s *Server) load(w *response, _ *http.Request) error {
	w.json(http.StatusOK, map[string]int{"server_load": s.gate.count()})
	return nil
}

func (s *Server) version(w *response, _ *http.Request) error {
	w.json(http.StatusOK, map[string]string{"version": s.o.Version})
	return nil
}

// index says what this server is to who opens its address.
func (s *Server) index(w *response, _ *http.Request) error {
	w.json(http.StatusOK, struct {
		Name    string `json:"name"`
		Version string `json:"version"`
		API     string `json:"api"`
		Docs    string `json:"docs"`
	}{"moeserve", s.o.Version, "OpenAI's, below /v1: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses; Anthropic's /v1/messages", "https://github.com/moeserve/moeserve"})
	return nil
}

// elsewhere are paths of other servers, and what to say to who asks for them: how they begin, and
// what is not done, or what to use.
var elsewhere = []struct{ begins, message string }{
	{"/v1/embeddings", "This server does not do embeddings."},
	{"/v1/responses/", "This server does not store responses."},
	{"/v1/messages/batches", "This server does not do batches; send the requests at once."},
	{"/v1/conversations", "This server does not store conversations; use /v1/chat/completions."},
	{"/v1/assistants", "This server does not have the Assistants API; use /v1/chat/completions."},
	{"/v1/threads", "This server does not have the Assistants API; use /v1/chat/completions."},
	{"/v1/audio/", "This server does not do audio."},
	{"/v1/images/", "This server does not do images."},
	{"/v1/videos", "This server does not do videos."},
	{"/v1/moderations", "This server does not do moderations."},
	{"/v1/realtime", "This server does not have the Realtime API; use /v1/chat/completions."},
	{"/v1/files", "This server does not store files."},
	{"/v1/uploads", "This server does not store files."},
	{"/v1/vector_stores", "This server does not store files."},
	{"/v1/batches", "This server does not do batches; send the requests at once."},
	{"/v1/fine_tuning/", "This server does not train."},
	{"/v1/load_lora_adapter", "This server does not do LoRA."},
	{"/v1/unload_lora_adapter", "This server does not do LoRA."},
	{"/v1/rerank", "This server does not rerank."},
	{"/v2/rerank", "This server does not rerank."},
	{"/rerank", "This server does not rerank."},
	{"/v1/score", "This server does not score."},
	{"/score", "This server does not score."},
	{"/classify", "This server does not classify."},
	{"/pooling", "This server does not do embeddings."},
	{"/server_info", "Use /version, /metrics and /debug/residency."},
	{"/sleep", onAdmin},
	{"/wake_up", onAdmin},
	{"/is_sleeping", onAdmin},
	{"/reset_prefix_cache", onAdmin},
	{"/admin/", onAdmin},
	{"/harvest/", onAdmin},
	{"/inference/v1/", "Use /v1/completions."},
	{"/invocations", "Use /v1/completions or /v1/chat/completions."},
	{"/generate", "Use /v1/completions."},
	{"/infill", "This server does not infill; use /v1/completions."},
	{"/api/", "This server does not have Ollama's API; use /v1/chat/completions."},
	{"/v1/v1/", "The base URL of clients ends with one /v1."},
	{"/chat/completions", "The base URL of clients ends with /v1: use /v1/chat/completions."},
	{"/completion", "The base URL of clients ends with /v1: use /v1/completions."},
	{"/models", "The base URL of clients ends with /v1: use /v1/models."},
}

// onAdmin is said of paths of the admin address.
const onAdmin = "It is on the admin address (--admin-address; \"same\" for this one)."

// unknownURL is the error for a path that this server does not have.
func unknownURL(method, path string) *Error {
	message := "Unknown request URL: " + truncate(method) + " " + truncate(path) + "."
	for _, e := range elsewhere {
		if strings.HasPrefix(path, e.begins) {
			message += " " + e.message
			break
		}
	}
	return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: message}
}
