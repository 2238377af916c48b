package server

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/server/page"
)

// addAdmin makes the routes of the admin address: those for operators, which the API has, too,
// and those that act, which it has only if Options.Admin says so.
func (s *Server) addAdmin() {
	acting := map[string]map[string]route{
		"/harvest/reclaim":    {http.MethodPost: route{handle: s.harvest}},
		"/harvest/borrowed":   {http.MethodGet: route{handle: s.harvest}},
		"/reset_prefix_cache": {http.MethodPost: route{handle: s.resetPrefixCache}},
		"/sleep":              {http.MethodPost: route{handle: s.sleep}},
		"/wake_up":            {http.MethodPost: route{handle: s.wakeUp}},
		"/is_sleeping":        {http.MethodGet: route{handle: s.isSleeping}},
		"/admin/settings":     {http.MethodGet: route{handle: s.settings}, http.MethodPatch: route{handle: s.changeSettings}},
	}
	s.admin = maps.Clone(acting)
	for path, f := range page.Files {
		s.admin[path] = map[string]route{http.MethodGet: {handle: asset(f), open: true}, http.MethodHead: {handle: asset(f), open: true}}
	}
	s.admin["/v1/completions"] = s.routes["/v1/completions"] // for the page's prompts
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
	if _, err := flags(r); err != nil {
		return err
	}
	m.Harvest.ServeHTTP(w, r)
	return nil
}

// resetPrefixCache drops cached prefixes and, with reset_external=true, those of other tiers. Its
// parameters and response, a status without a body, are vLLM's. What requests that run have is not
// found by later ones in any case, so reset_running_requests, for which vLLM preempts them, changes
// nothing.
func (s *Server) resetPrefixCache(w *response, r *http.Request) error {
	const external = "reset_external"
	if _, err := s.current(); err != nil {
		return err
	}
	set, err := flags(r, external, "reset_running_requests")
	if err != nil {
		return err
	}
	for _, m := range s.all() {
		m.Engine.ResetPrefixCache(set[external])
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

// flags parses the parameters of a request's URL, which are true or false.
func flags(r *http.Request, known ...string) (map[string]bool, error) {
	query, err := parameters(r, known...)
	if err != nil {
		return nil, err
	}
	set := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		value := query[name]
		if set[name], err = strconv.ParseBool(value[0]); err != nil || len(value) > 1 {
			return nil, badRequest(name, "invalid_value", "Invalid value for '%s': it must be true or false, once.", name)
		}
	}
	return set, nil
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
