package server_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/server"
)

// TestCachedPrefixes: usage, metrics and the reset of the prefix cache, over HTTP.
func TestCachedPrefixes(t *testing.T) {
	h := start(t, options{server: server.Options{Admin: true}})
	const prompt = "recall: n=75 x=01 l=36 r=56; n=" // of 21 tokens, one block and some more
	cached := func(body string) int {
		t.Helper()
		return *decode[reply](t, h.post(completionsPath, body)).Usage.Details.CachedTokens
	}
	plain := completionBody(fmt.Sprintf("%q", prompt), "")
	salted := completionBody(fmt.Sprintf("%q", prompt), `, "cache_salt": "a"`)
	for i, c := range []struct {
		body string
		want int
	}{
		{plain, 0},
		{plain, 16},
		{salted, 0},
		{salted, 16},
		{completionBody(fmt.Sprintf("[%q, %q]", prompt, prompt), ""), 32},
		{completionBody(fmt.Sprintf("%q", prompt), `, "n": 3`), 16},
	} {
		if got := cached(c.body); got != c.want {
			t.Errorf("request %d, %s: %d cached tokens, want %d", i, c.body, got, c.want)
		}
	}
	for _, r := range h.stream(completionsPath, completionBody(fmt.Sprintf("%q", prompt), `, "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}`)) {
		if got := *r.Usage.Details.CachedTokens; got != 16 {
			t.Errorf("a chunk of a stream: %d cached tokens", got)
		}
	}
	m := h.scrape()
	const model = `{engine="0",model_name="tiny"}`
	if q, hits := m["vllm:prefix_cache_queries_total"+model], m["vllm:prefix_cache_hits_total"+model]; q != 8*21 || hits != 6*16 {
		t.Errorf("%v queries and %v hits", q, hits)
	}
	if a := h.send(http.MethodPost, "/reset_prefix_cache", ""); a.status != http.StatusOK || a.body != "" {
		t.Errorf("reset: %d %s", a.status, a.body)
	}
	if got := cached(plain); got != 0 {
		t.Errorf("%d cached tokens after the reset", got)
	}
	if a := h.send(http.MethodGet, "/reset_prefix_cache", ""); a.status != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d %s", a.status, a.body)
	}
	for _, salt := range []string{`""`, `7`, fmt.Sprintf("%q", strings.Repeat("x", engine.MaxCacheSaltBytes+1))} {
		message, _, param, _ := failed(t, h.send(http.MethodPost, completionsPath, completionBody(`"1+2="`, `, "cache_salt": `+salt)))
		if param != "cache_salt" || !strings.Contains(message, "'cache_salt'") {
			t.Errorf("%.20s: %s of %s", salt, message, param)
		}
	}
	h.post(chatPath, chatBody("x", `, "cache_salt": "b"`))
	if r := h.last(); r.CacheSalt != "b" {
		t.Errorf("%+v", r)
	}
}

// TestAdminParameters: a parameter of an operator's URL that is misspelled, or has no value, is an
// error and changes nothing.
func TestAdminParameters(t *testing.T) {
	h := start(t, options{server: server.Options{Admin: true}})
	const prompt = "recall: n=75 x=01 l=36 r=56; n="
	body := completionBody(fmt.Sprintf("%q", prompt), "")
	h.post(completionsPath, body)
	for query, want := range map[string]struct{ param, message string }{
		"reset_extrnal=true":                       {"reset_extrnal", "reset_extrnal; those of this URL are reset_external and reset_running_requests"},
		"reset_external":                           {"reset_external", "true or false"},
		"reset_external=":                          {"reset_external", "true or false"},
		"reset_external=maybe":                     {"reset_external", "true or false"},
		"reset_external=true&reset_external=false": {"reset_external", "once"},
		"reset_running_requests=7":                 {"reset_running_requests", "true or false"},
		"reset_external=%zz":                       {"", "invalid"},
	} {
		a := h.send(http.MethodPost, "/reset_prefix_cache?"+query, "")
		message, _, param, _ := failed(t, a)
		if a.status != http.StatusBadRequest || param != want.param || !strings.Contains(message, want.message) {
			t.Errorf("%s: %d %s", query, a.status, a.body)
		}
	}
	if got := *decode[reply](t, h.post(completionsPath, body)).Usage.Details.CachedTokens; got != 16 {
		t.Errorf("%d cached tokens: bad requests have reset the cache", got)
	}
	for _, query := range []string{"reset_external=true", "reset_external=False&reset_running_requests=True", "reset_running_requests=1"} {
		if a := h.send(http.MethodPost, "/reset_prefix_cache?"+query, ""); a.status != http.StatusOK {
			t.Errorf("%s: %d %s", query, a.status, a.body)
		}
	}
}

// Only operators reset the prefix cache.
func TestResetPrefixCacheIsForOperators(t *testing.T) {
	h := start(t, options{})
	if a := h.send(http.MethodPost, "/reset_prefix_cache", ""); a.status != http.StatusNotFound {
		t.Errorf("%d %s", a.status, a.body)
	}
}
