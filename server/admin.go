package server

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// addAdmin makes the routes of the admin address: those for operators, which the API has, too,
// and those that act, which it has only if Options.Admin says so.
func (s *Server) addAdmin() {
	acting := map[string]map[string]route{
		"/harvest/reclaim":    {http.MethodPost: route{handle: s.harvest}},
		"/harvest/borrowed":   {http.MethodGet: route{handle: s.harvest}},
		"/reset_prefix_cache": {http.MethodPost: route{handle: s.resetPrefixCache}},
	}
	s.admin = maps.Clone(acting)
	for path, r := range s.routes {
		if strings.HasPrefix(path, "/health") || strings.HasPrefix(path, "/debug/") || path == "/metrics" || path == "/version" {
			s.admin[path] = r
		}
	}
	if s.o.Admin {
		maps.Copy(s.routes, acting)
	}
}

// harvest passes requests for borrowed memory on.
func (s *Server) harvest(w *response, r *http.Request) error {
	m, err := s.current()
	if err != nil {
		return err
	}
	if m.Harvest == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Message: "this server borrows no memory of other GPUs"}
	}
	m.Harvest.ServeHTTP(w, r)
	return nil
}

// resetPrefixCache drops cached prefixes and, with reset_external=true, those of other tiers. Its
// parameter and response, a status without a body, are vLLM's.
func (s *Server) resetPrefixCache(w *response, r *http.Request) error {
	m, err := s.current()
	if err != nil {
		return err
	}
	external := false
	if v := r.URL.Query().Get("reset_external"); v != "" {
		if external, err = strconv.ParseBool(v); err != nil {
			return badRequest("reset_external", "invalid_value", "Invalid value for 'reset_external': it must be true or false.")
		}
	}
	m.Engine.ResetPrefixCache(external)
	w.WriteHeader(http.StatusOK)
	return nil
}

// maxAdmins is the maximum of connections to the admin address.
const maxAdmins = 256

// ServeAdmin serves the admin address on l until ctx is done. It closes l, and returns nil
// where ctx was its end.
func (s *Server) ServeAdmin(ctx context.Context, l net.Listener) error {
	base, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	h, l := s.listen(base, l, maxAdmins, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serve(s.admin, w, r) }))
	stop := context.AfterFunc(ctx, func() { h.Close() }) //nolint:errcheck // the end of its connections
	defer stop()
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
