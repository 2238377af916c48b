package server_test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/moeserve/moeserve/server"
)

// thing is an event's data.
type thing struct {
	Event string
	N     int
	Count int
	Text  string
}

// followed is a stream of events under way.
type followed struct {
	t     testing.TB
	lines *bufio.Scanner
	close func()
}

// follow begins to follow events, and returns when none is missed any more.
func (h *harness) follow() *followed {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.t.Context())
	r, err := h.do(ctx, http.MethodGet, "/debug/events", "")
	if err != nil {
		h.t.Fatal(err)
	}
	f := &followed{t: h.t, lines: bufio.NewScanner(r.Body), close: func() {
		cancel()
		r.Body.Close() //nolint:errcheck // left in the middle
	}}
	h.t.Cleanup(f.close)
	f.lines.Buffer(nil, 1<<20)
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != "text/event-stream" || !f.lines.Scan() || f.lines.Text() != ": events" {
		h.t.Fatalf("status %d, %s: %q", r.StatusCode, r.Header.Get("Content-Type"), f.lines.Text())
	}
	return f
}

// next is the next event, false at the stream's end.
func (f *followed) next() (thing, bool) {
	f.t.Helper()
	name := ""
	for f.lines.Scan() {
		if n, ok := strings.CutPrefix(f.lines.Text(), "event: "); ok {
			name = n
		}
		if data, ok := strings.CutPrefix(f.lines.Text(), "data: "); ok {
			v := decode[thing](f.t, data)
			if v.Event != name {
				f.t.Errorf("event %q with data %s", name, data)
			}
			return v, true
		}
	}
	return thing{}, false
}

// Everybody who follows gets every event, in order, until he leaves or the server
// ends.
func TestEvents(t *testing.T) {
	events := server.NewEvents()
	h := start(t, options{server: server.Options{Events: events}, loading: true})
	events.Publish("early", thing{Event: "early"}) // without a listener
	a, b := h.follow(), h.follow()
	for i := range 20 {
		name := fmt.Sprintf("kind.%d", i%3)
		events.Publish(name, thing{Event: name, N: i})
	}
	for i := range 20 {
		for _, f := range []*followed{a, b} {
			if v, ok := f.next(); !ok || v.N != i || v.Event != fmt.Sprintf("kind.%d", i%3) {
				t.Fatalf("event %d is %+v (there %v)", i, v, ok)
			}
		}
	}
	a.close()
	events.Publish("late", thing{Event: "late", N: 20})
	if v, ok := b.next(); !ok || v.N != 20 {
		t.Errorf("%+v, %v", v, ok)
	}
	h.stop()
	if v, ok := b.next(); ok {
		t.Errorf("after the end: %+v", v)
	}
}

// There are only so many followers, and who leaves makes room.
func TestManyFollowers(t *testing.T) { synctest.Test(t, testManyFollowers) }

func testManyFollowers(t *testing.T) {
	h := start(t, options{pipes: true, loading: true})
	first := h.follow()
	for range 15 {
		h.follow()
	}
	a := h.send(http.MethodGet, "/debug/events", "")
	if _, kind, _, code := failed(t, a); a.status != http.StatusTooManyRequests || kind != "rate_limit_error" || code != "too_many_requests" {
		t.Errorf("status %d: %s", a.status, a.body)
	}
	first.close()
	eventually(t, "there is room again", func() bool {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := h.do(ctx, http.MethodGet, "/debug/events", "")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close() //nolint:errcheck // left in the middle
		return r.StatusCode == http.StatusOK
	})
}

// A listener that does not read loses events, learns how many and where, and does not
// block publishers.
func TestSlowFollower(t *testing.T) { synctest.Test(t, testSlowFollower) }

func testSlowFollower(t *testing.T) {
	const published = 4000
	events := server.NewEvents()
	h := start(t, options{server: server.Options{Events: events}, loading: true, pipes: true})
	f := h.follow()
	text := strings.Repeat("x", 4<<10)
	for i := range published {
		events.Publish("e", thing{Event: "e", N: i, Text: text})
	}
	at, lost := 0, 0
	for at < published {
		v, ok := f.next()
		switch {
		case !ok:
			t.Fatalf("the stream ends at event %d", at)
		case v.Event == "lost" && v.Count > 0:
			at += v.Count
			lost += v.Count
		case v.Event != "e" || v.N != at:
			t.Fatalf("%s %d, want %d", v.Event, v.N, at)
		default:
			at++
		}
	}
	if at != published || lost == 0 || lost > published-1024 {
		t.Errorf("%d events in all, %d of them lost", at, lost)
	}
	events.Publish("e", thing{Event: "e", N: published})
	if v, ok := f.next(); !ok || v.N != published {
		t.Errorf("afterwards: %+v, %v", v, ok)
	}
}

// The residency of experts needs the API key, and a loaded model.
func TestResidency(t *testing.T) {
	h := start(t, options{server: server.Options{APIKey: "k"}, change: func(m *server.Model) {
		m.Residency = func() any { return map[string]any{"tiers": []string{"resident", "peer"}} }
	}})
	for _, path := range []string{"/debug/residency", "/debug/events"} {
		if a := h.send(http.MethodGet, path, ""); a.status != http.StatusUnauthorized {
			t.Errorf("%s without a key: status %d", path, a.status)
		}
		if a := h.send(http.MethodPost, path, "{}"); a.status != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: status %d", path, a.status)
		}
	}
	a := h.send(http.MethodGet, "/debug/residency", "", "Authorization", "Bearer k")
	if a.status != http.StatusOK || a.body != `{"tiers":["resident","peer"]}`+"\n" {
		t.Errorf("status %d: %s", a.status, a.body)
	}
	if a := start(t, options{}).send(http.MethodGet, "/debug/residency", ""); a.status != http.StatusNotFound {
		t.Errorf("not known: status %d: %s", a.status, a.body)
	}
	if a := start(t, options{loading: true}).send(http.MethodGet, "/debug/residency", ""); a.status != http.StatusServiceUnavailable {
		t.Errorf("while loading: status %d: %s", a.status, a.body)
	}
}
