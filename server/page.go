package server

import (
	"net/http"
	"time"

	"github.com/moeserve/moeserve/server/page"
)

// asset serves a file of the page for operators. It holds no data and needs no key; the page asks for one.
func asset(f page.File) func(w *response, _ *http.Request) error {
	return func(w *response, _ *http.Request) error {
		h := w.Header()
		h.Set("Content-Type", f.Type)
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		w.WriteHeader(http.StatusOK)
		_, err := w.Write(f.Content)
		return err
	}
}

// node writes what the node is doing.
func (s *Server) node(w *response, r *http.Request) error {
	m, err := s.inURL(r)
	if err != nil {
		return err
	}
	if m.Now == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: "This server does not say what its node is doing."}
	}
	w.json(http.StatusOK, struct {
		Model   string    `json:"model"`
		Version string    `json:"version"`
		Since   time.Time `json:"since"`
		MaxLen  int       `json:"max_model_len"`
		Now     any       `json:"now"`
	}{m.Names[0], s.o.Version, m.Created, m.MaxModelLen, m.Now()})
	return nil
}
