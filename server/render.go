package server

import (
	"context"
	"net/http"
)

// rendered is a prompt as the model gets it, in the form of vLLM's render endpoints: routers ask for it to look
// prefixes up in their index.
type rendered struct {
	TokenIDs []int32 `json:"token_ids"`
}

// renderCompletion returns the ids of each prompt of a completion request, which it does not run.
func (s *Server) renderCompletion(w *response, r *http.Request) error {
	var all []rendered
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) error {
		req, err := s.parseCompletion(ctx, m, o)
		if err != nil {
			return err
		}
		for _, p := range req.prompts {
			all = append(all, rendered{p.ids})
		}
		return nil
	}); err != nil {
		return err
	}
	w.json(http.StatusOK, all)
	return nil
}

// renderChat returns the ids of the prompt of a chat completion request, which it does not run.
func (s *Server) renderChat(w *response, r *http.Request) error {
	var one rendered
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) error {
		req, err := m.parseChat(ctx, o)
		if err != nil {
			return err
		}
		one.TokenIDs = req.prompt
		return nil
	}); err != nil {
		return err
	}
	w.json(http.StatusOK, one)
	return nil
}
