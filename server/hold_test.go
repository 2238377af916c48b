package server_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/server"
)

// exchange sends the start of a request and returns what comes back until the server closes the
// connection, and how long that took.
func (h *harness) exchange(sent string) (string, time.Duration) {
	h.t.Helper()
	conn := h.connect()
	defer conn.Close() //nolint:errcheck // only read from
	begun := time.Now()
	if _, err := io.WriteString(conn, sent); err != nil {
		h.t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil {
		h.t.Errorf("%.80q: %v", sent, err)
	}
	return string(got), time.Since(begun)
}

// A body that never comes holds no connection, whatever the response and however its length is
// given.
func TestWithheldBodies(t *testing.T) { synctest.Test(t, testWithheldBodies) }

func testWithheldBodies(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{APIKey: "k"}})
	const (
		key     = "Authorization: Bearer k\r\n"
		json    = "Content-Type: application/json\r\n"
		length  = "Content-Length: 9\r\n\r\n"
		part    = "Content-Length: 9\r\n\r\n{"
		large   = "Content-Length: 99999999\r\n\r\n"
		chunked = "Transfer-Encoding: chunked\r\n\r\n"
		started = "Transfer-Encoding: chunked\r\n\r\n5\r\n{"
	)
	for _, c := range []struct {
		line, header string
		status       int
		within       time.Duration
	}{
		{"POST /nowhere", "", 404, time.Second},
		{"DELETE /health", "", 405, time.Second},
		{"POST /v1/completions", json, 401, time.Second},
		{"POST /v1/completions", key, 415, time.Second},
		{"GET /health", "", 200, time.Second},
		{"GET /metrics", "", 200, time.Second},
		{"GET /v1/models", key, 200, time.Second},
		{"POST /v1/completions", key + json, 408, 6 * time.Second},
		{"POST /tokenize", key + json, 408, 6 * time.Second},
	} {
		for _, rest := range []string{length, part, chunked, started, large} {
			want := c.status
			if rest == large && want == 408 {
				want = 413
			}
			got, took := h.exchange(c.line + " HTTP/1.1\r\nHost: x\r\n" + c.header + rest)
			if !strings.HasPrefix(got, fmt.Sprintf("HTTP/1.1 %d ", want)) || took > c.within {
				t.Errorf("%s %q: %.60q after %v, want %d within %v", c.line, rest, got, took, want, c.within)
			}
		}
	}
	// A client that waits to be asked for its body is not asked.
	got, took := h.exchange("POST /nowhere HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" + length)
	if !strings.HasPrefix(got, "HTTP/1.1 404 ") || took > 0 {
		t.Errorf("Expect: %.60q after %v", got, took)
	}
	// A body that is there keeps the connection, though nobody needs it.
	got, _ = h.exchange("POST /nowhere HTTP/1.1\r\nHost: x\r\n" + length + "123456789GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if !strings.HasPrefix(got, "HTTP/1.1 404 ") || !strings.Contains(got, "HTTP/1.1 200 ") {
		t.Errorf("two requests: %q", got)
	}
}

// A body may be slow, if it keeps coming.
func TestSlowBody(t *testing.T) { synctest.Test(t, testSlowBody) }

func testSlowBody(t *testing.T) {
	h := start(t, options{pipes: true})
	send := func(size int, pause time.Duration) (string, time.Duration) {
		conn := h.connect()
		defer conn.Close() //nolint:errcheck // only read from
		body := `{"prompt": "` + strings.Repeat("x", size-len(`{"prompt": ""}`)) + `"}`
		begun := time.Now()
		fmt.Fprintf(conn, "POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", size) //nolint:errcheck // the response shows it
		go func() {
			for len(body) > 0 {
				n := min(8<<10, len(body))
				if _, err := io.WriteString(conn, body[:n]); err != nil {
					return
				}
				body = body[n:]
				time.Sleep(pause)
			}
		}()
		got, _ := io.ReadAll(conn)
		return string(got), time.Since(begun)
	}
	if got, took := send(80<<10, 2*time.Second); !strings.HasPrefix(got, "HTTP/1.1 200 ") || took < 10*time.Second {
		t.Errorf("%.60q after %v", got, took)
	}
	if got, took := send(80<<10, 6*time.Second); !strings.HasPrefix(got, "HTTP/1.1 408 ") || took > 10*time.Second {
		t.Errorf("%.60q after %v", got, took)
	}
	if got, took := send(800<<10, time.Second); !strings.HasPrefix(got, "HTTP/1.1 408 ") || took > 32*time.Second {
		t.Errorf("%.60q after %v", got, took)
	}
}

// The bodies that are read at a time have a limit of their memory together, which small ones need
// not fear.
func TestBodiesTogether(t *testing.T) { synctest.Test(t, testBodiesTogether) }

func testBodiesTogether(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{MaxRequestBytes: 1 << 20, MaxBodyBytes: 1 << 20}})
	large := `{"prompt": "` + strings.Repeat("x", 1<<20-100)
	head := fmt.Sprintf("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", 1<<20)
	first := h.connect()
	defer first.Close() //nolint:errcheck // only read from
	if _, err := io.WriteString(first, head+large); err != nil {
		t.Fatal(err)
	}
	synctest.Wait() // the server has memory for all that it has read
	second := h.connect()
	defer second.Close()                  //nolint:errcheck // only read from
	go io.WriteString(second, head+large) //nolint:errcheck // refused in its midst
	r, err := http.ReadResponse(bufio.NewReader(second), nil)
	if err != nil || r.StatusCode != http.StatusTooManyRequests || r.Header.Get("Retry-After") != "1" {
		t.Errorf("a second large body: %+v, %v", r, err)
	}
	h.post("/tokenize", `{"prompt": "`+strings.Repeat("x", 60<<10)+`"}`)
	if got, err := io.ReadAll(first); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 408 ") {
		t.Errorf("the first: %.60q, %v", got, err)
	}
	h.post("/tokenize", large+`"}`) // its memory is free again
}

// Few requests are prepared at a time; one whose client leaves is not prepared.
func TestPreparation(t *testing.T) { synctest.Test(t, testPreparation) }

// holding is a template that waits.
type holding struct {
	chat  server.Template
	calls atomic.Int32
	until chan struct{}
}

func (b *holding) Render(ctx context.Context, messages []chat.Message, o chat.Options) (chat.Prompt, error) {
	b.calls.Add(1)
	<-b.until
	return b.chat.Render(ctx, messages, o)
}

func testPreparation(t *testing.T) {
	template := &holding{until: make(chan struct{})}
	h := start(t, options{pipes: true, server: server.Options{Workers: 2}, change: func(m *server.Model) {
		template.chat, m.Template = m.Template, template
	}})
	done := make(chan answer, 2)
	for range 2 {
		go func() { done <- h.send(http.MethodPost, "/v1/chat/completions", chatBody("1+2=", `, "max_tokens": 1`)) }()
	}
	synctest.Wait()
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 3)
	for range 3 {
		go func() {
			r, err := h.do(ctx, http.MethodPost, "/v1/chat/completions", chatBody("1+2=", ""))
			if err == nil {
				r.Body.Close() //nolint:errcheck // not read from
			}
			left <- err
		}()
	}
	synctest.Wait()
	if n := template.calls.Load(); n != 2 {
		t.Errorf("%d are prepared at a time, want 2", n)
	}
	leave()
	for range 3 {
		if err := <-left; err == nil {
			t.Error("one that waits was answered")
		}
	}
	synctest.Wait()
	close(template.until)
	for range 2 {
		if a := <-done; a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if n := template.calls.Load(); n != 2 {
		t.Errorf("%d requests of clients that had left were prepared", n-2)
	}
	h.idle()
}

// At the limit of connections the idle ones make way, and where none is idle a client waits.
func TestMaxConnections(t *testing.T) { synctest.Test(t, testMaxConnections) }

func testMaxConnections(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{MaxConnections: 2}})
	const get = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
	open := func() net.Conn {
		conn := h.connect()
		if _, err := io.WriteString(conn, get); err != nil {
			t.Fatal(err)
		}
		if r, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || r.StatusCode != 200 {
			t.Fatalf("%+v, %v", r, err)
		}
		return conn
	}
	var idle []net.Conn
	for range 4 {
		synctest.Wait()
		idle = append(idle, open())
	}
	for i, conn := range idle {
		conn.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // never fails
		_, err := conn.Read(make([]byte, 1))
		if closed := err == io.EOF; closed != (i < 2) { //nolint:errorlint // of a pipe
			t.Errorf("connection %d: %v", i, err)
		}
		conn.Close() //nolint:errcheck // only read from
	}
	synctest.Wait()
	ctx, leave := context.WithCancel(t.Context())
	for range 2 {
		r, _ := h.begin(ctx)
		defer r.Body.Close() //nolint:errcheck // left in the middle
	}
	served := make(chan net.Conn, 1)
	go func() { served <- open() }()
	synctest.Wait()
	if len(served) > 0 {
		t.Error("a third connection was served")
	}
	leave()
	(<-served).Close() //nolint:errcheck // read from to its end
	h.idle()
}

// A request with two lengths is the last of its connection.
func TestTwoLengths(t *testing.T) { synctest.Test(t, testTwoLengths) }

func testTwoLengths(t *testing.T) {
	h := start(t, options{pipes: true})
	const next = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
	for _, line := range []string{"POST /tokenize", "GET /health"} {
		got, _ := h.exchange(line + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + next)
		if n := strings.Count(got, "HTTP/1.1 "); n != 1 || !strings.Contains(got, "Connection: close") {
			t.Errorf("%s: %d responses: %q", line, n, got)
		}
	}
}

// Connections that hang do not delay the end of a server: it comes when the requests under way had
// their time, and clients a moment to read.
func TestStopWithHungConnections(t *testing.T) { synctest.Test(t, testStopWithHungConnections) }

func testStopWithHungConnections(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{DrainTimeout: 3 * time.Second}})
	const post = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	running := fmt.Sprintf(long, true)
	for _, sent := range []string{
		"", "GET /health HTTP", "GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", post + "Content-Length: 9\r\n\r\n{", post + "Transfer-Encoding: chunked\r\n\r\n",
		"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", fmt.Sprintf(post+"Content-Length: %d\r\n\r\n%s", len(running), running),
	} {
		for range 20 {
			conn := h.connect()
			defer conn.Close() //nolint:errcheck // nothing is read from it
			if _, err := io.WriteString(conn, sent); err != nil {
				t.Fatal(err)
			}
			if strings.Contains(sent, running) {
				break
			}
		}
	}
	eventually(t, "one runs", func() bool { return h.State().Running == 1 })
	begun := time.Now()
	h.stop()
	if err := <-h.served; err != nil {
		t.Error(err)
	}
	h.served <- nil
	if took := time.Since(begun); took > 5500*time.Millisecond {
		t.Errorf("the end took %v", took)
	}
}

// The memory of large bodies goes back to the system.
func TestMemoryIsReturned(t *testing.T) { synctest.Test(t, testMemoryIsReturned) }

func testMemoryIsReturned(t *testing.T) {
	h := start(t, options{pipes: true})
	body := `{"prompt": "x", "metadata": {"a": "` + strings.Repeat("x", 15<<20) + `"}, "temperature": -1}`
	for range 4 {
		if a := h.send(http.MethodPost, "/v1/completions", body); a.status != http.StatusBadRequest {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	time.Sleep(10 * time.Second) // on the bubble's clock
	synctest.Wait()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if kept := m.HeapIdle - m.HeapReleased; kept > 8<<20 {
		t.Errorf("%d MiB of the heap are idle and not returned", kept>>20)
	}
}

// A handler that reads its body itself, as those of the admin address do, has a deadline too.
func TestWithheldBodyOfHandler(t *testing.T) { synctest.Test(t, testWithheldBodyOfHandler) }

func testWithheldBodyOfHandler(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{Admin: true}, change: func(m *server.Model) {
		m.Harvest = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.ReadAll(r.Body); err != nil {
				w.WriteHeader(http.StatusBadRequest)
			}
		})
	}})
	const post = "POST /harvest/reclaim HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
	if got, took := h.exchange(post + "{"); !strings.HasPrefix(got, "HTTP/1.1 400 ") || took > 31*time.Second {
		t.Errorf("%.60q after %v", got, took)
	}
	got, _ := h.exchange(post + "{}GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if n := strings.Count(got, "HTTP/1.1 200 "); n != 2 {
		t.Errorf("%d responses: %q", n, got)
	}
}
