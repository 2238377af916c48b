package server_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/server"
)

// fixed are settings that refuse any change.
type fixed struct{}

func (fixed) Values() map[string]any { return map[string]any{"a": 1} }
func (fixed) Change(map[string]json.RawMessage) error {
	return &server.RefusedError{Name: "a", Err: http.ErrNotSupported}
}

// TestSettingsAvailable: settings can be read and changed where the server has any, by JSON, once the
// model is loaded.
func TestSettingsAvailable(t *testing.T) {
	for _, c := range []struct {
		o            options
		method, kind string
		query        string
		status       int
		want         string
	}{
		{options{server: server.Options{Admin: true}}, http.MethodGet, "", "", http.StatusNotFound, "unknown_url"},
		{options{server: server.Options{Settings: fixed{}}}, http.MethodGet, "", "", http.StatusNotFound, "--admin-address"},
		{options{server: server.Options{Admin: true, Settings: fixed{}}, loading: true}, http.MethodPatch, "application/json", "", http.StatusServiceUnavailable, "still loading"},
		{options{server: server.Options{Admin: true, Settings: fixed{}}}, http.MethodGet, "", "", http.StatusOK, `{"a":1}`},
		{options{server: server.Options{Admin: true, Settings: fixed{}}}, http.MethodGet, "", "?b=1", http.StatusBadRequest, "unknown_parameter"},
		{options{server: server.Options{Admin: true, Settings: fixed{}}}, http.MethodPatch, "text/plain", "", http.StatusUnsupportedMediaType, "application/json"},
		{options{server: server.Options{Admin: true, Settings: fixed{}}}, http.MethodPatch, "application/json", "", http.StatusBadRequest, `"param":"a"`},
		{options{server: server.Options{Admin: true, Settings: fixed{}}}, http.MethodPost, "application/json", "", http.StatusMethodNotAllowed, "use GET or PATCH"},
		{options{server: server.Options{Admin: true, Settings: fixed{}, APIKey: "secret"}}, http.MethodGet, "", "", http.StatusUnauthorized, "invalid_api_key"},
	} {
		h := start(t, c.o)
		r, err := http.NewRequestWithContext(t.Context(), c.method, h.url+"/admin/settings"+c.query, strings.NewReader(`{"a": 2}`))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", c.kind)
		resp, err := h.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		if err := resp.Write(&text); err != nil || resp.StatusCode != c.status || !strings.Contains(text.String(), c.want) {
			t.Errorf("%s of %+v: %v, status %d: %s; want %d, %q", c.method, c.o.server, err, resp.StatusCode, &text, c.status, c.want)
		}
		resp.Body.Close() //nolint:errcheck // only read from
	}
}
