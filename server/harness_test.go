package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is a server of the built-in model on a port of its own.
type harness struct {
	t      testing.TB
	node   *node.Node
	server *server.Server
	model  *server.Model
	url    string
	client *http.Client
	// dial opens a connection to the server.
	dial func(ctx context.Context, network, address string) (net.Conn, error)
	// stop ends Serve, whose result is then on served; fail is the engine's end.
	stop   func()
	served chan error
	ran    chan error
	// requests that reached the engine.
	mu       sync.Mutex
	requests []engine.Request
}

// start options.
type options struct {
	server server.Options
	node   node.Options
	// loading leaves the model out.
	loading bool
	change  func(*server.Model)
	// pipes are the connections in place of TCP's: what a bubble of synctest needs. They
	// buffer nothing.
	pipes bool
	// failing expects the engine to fail.
	failing bool
}

// Submit and State are the engine's, with a record of what came.
func (h *harness) Submit(ctx context.Context, r engine.Request) (*engine.Job, error) {
	h.mu.Lock()
	h.requests = append(h.requests, r)
	h.mu.Unlock()
	return h.node.Engine().Submit(ctx, r)
}

func (h *harness) State() engine.State { return h.node.Engine().State() }

func (h *harness) ResetPrefixCache(external bool) { h.node.Engine().ResetPrefixCache(external) }

// last is the request that came to the engine last.
func (h *harness) last() engine.Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.requests) == 0 {
		h.t.Fatal("no request has come to the engine")
	}
	return h.requests[len(h.requests)-1]
}

func start(t testing.TB, o options) *harness {
	t.Helper()
	if o.node.Settings == (configs.Settings{}) {
		o.node.Settings = configs.Defaults()
	}
	if o.server.Metrics == nil {
		o.server.Metrics = server.NewMetrics("tiny")
	}
	n, err := node.Open(t.Context(), o.node)
	if err != nil {
		t.Fatal(err)
	}
	var l net.Listener
	dial := new(net.Dialer).DialContext
	if o.pipes {
		p := newPipes()
		l, dial = p, p.DialContext
	} else if l, err = new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	h := &harness{
		t: t, node: n, server: server.New(o.server), url: "http://" + l.Addr().String(), dial: dial,
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DialContext: dial}},
		served: make(chan error, 1), ran: make(chan error, 1),
	}
	h.model = &server.Model{
		Names: []string{"tiny"}, Vocab: 894, Engine: h, Tokenizer: n.Text().Tokenizer, Template: n.Text().Template, MaxModelLen: n.Info().Limits.MaxModelLen,
		Defaults: engine.DefaultParams(), Created: time.Unix(1, 0), Now: func() any { return n.Observe().Now() },
	}
	h.model.Defaults.Temperature = 1
	if o.change != nil {
		o.change(h.model)
	}
	if !o.loading {
		h.server.SetModels(h.model)
	}
	serving, stop := context.WithCancel(context.Background())
	h.stop = stop
	running, halt := context.WithCancel(context.Background())
	go func() { h.served <- h.server.Serve(serving, l) }()
	go func() { h.ran <- n.Engine().Run(running) }()
	t.Cleanup(func() {
		stop()
		if err := <-h.served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		halt()
		if err := <-h.ran; (err != nil) != o.failing {
			t.Errorf("Run: %v", err)
		}
		h.client.CloseIdleConnections()
		if err := n.Close(); err != nil && !o.failing {
			t.Error(err)
		}
	})
	return h
}

// pipes are a listener and those who connect to it, both in this process.
type pipes struct {
	accepts chan net.Conn
	closed  chan struct{}
	close   func()
}

func newPipes() *pipes {
	p := &pipes{accepts: make(chan net.Conn), closed: make(chan struct{})}
	p.close = sync.OnceFunc(func() { close(p.closed) })
	return p
}

// Accept implements net.Listener.
func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.accepts:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p *pipes) Close() error {
	p.close()
	return nil
}

// Addr implements net.Listener.
func (p *pipes) Addr() net.Addr { return pipeAddr{} }

// DialContext connects to the listener, whatever the address.
func (p *pipes) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	there, asks := net.Pipe()
	back, answers := net.Pipe()
	ours, theirs := &pipeConn{Conn: back, write: there}, &pipeConn{Conn: asks, write: answers}
	select {
	case p.accepts <- theirs:
		return ours, nil
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "server" }

// pipeConn is one end of two pipes: Conn is read from. Like TCP's, and unlike net.Pipe's, its
// ways are closed one by one, which lets a client see at once that a response was the last.
type pipeConn struct {
	net.Conn
	write net.Conn
}

func (c *pipeConn) Write(b []byte) (int, error)         { return c.write.Write(b) }
func (c *pipeConn) CloseWrite() error                   { return c.write.Close() }
func (c *pipeConn) SetWriteDeadline(at time.Time) error { return c.write.SetWriteDeadline(at) }

// Close closes the way that is read from first: else the server could end its answer, as its
// client has left, and who still reads here would see a whole one.
func (c *pipeConn) Close() error { return errors.Join(c.Conn.Close(), c.write.Close()) }

func (c *pipeConn) SetDeadline(at time.Time) error {
	return errors.Join(c.Conn.SetReadDeadline(at), c.write.SetWriteDeadline(at))
}

// connect opens a connection of its own to the server.
func (h *harness) connect() net.Conn {
	h.t.Helper()
	conn, err := h.dial(h.t.Context(), "tcp", strings.TrimPrefix(h.url, "http://"))
	if err != nil {
		h.t.Fatal(err)
	}
	return conn
}

// answer is a response.
type answer struct {
	status int
	header http.Header
	body   string
}

func (h *harness) do(ctx context.Context, method, path, body string, header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, h.url+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return h.client.Do(r)
}

// send sends a request and reads the whole response.
func (h *harness) send(method, path, body string, header ...string) answer {
	h.t.Helper()
	r, err := h.do(h.t.Context(), method, path, body, header...)
	if err != nil {
		h.t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	data, err := io.ReadAll(r.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return answer{r.StatusCode, r.Header, string(data)}
}

// post is send for a body that must be answered with 200.
func (h *harness) post(path, body string) string {
	h.t.Helper()
	a := h.send(http.MethodPost, path, body)
	if a.status != http.StatusOK || a.header.Get("Content-Type") != "application/json" {
		h.t.Fatalf("%s %s: status %d, %s: %s", path, body, a.status, a.header.Get("Content-Type"), a.body)
	}
	return a.body
}

func decode[T any](t testing.TB, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}

// failure is an error's body.
type failure struct {
	Error struct {
		Message, Type string
		Param, Code   *string
	}
}

// failed checks that a response has the form of OpenAI's errors, and returns it.
func failed(t testing.TB, a answer) (message, kind, param, code string) {
	t.Helper()
	if got := a.header.Get("Content-Type"); got != "application/json" {
		t.Fatalf("status %d, %s: %s", a.status, got, a.body)
	}
	var all map[string]map[string]any
	if err := json.Unmarshal([]byte(a.body), &all); err != nil || len(all) != 1 || len(all["error"]) != 4 {
		t.Fatalf("status %d: not the shape of an error: %s", a.status, a.body)
	}
	f := decode[failure](t, a.body).Error
	if f.Message == "" || f.Type == "" {
		t.Fatalf("an error without message or type: %s", a.body)
	}
	text := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	return f.Message, f.Type, text(f.Param), text(f.Code)
}

// choice is one of a response of either endpoint, whole or a chunk.
type choice struct {
	Index   int
	Text    string
	Message struct {
		Role, Content string
		Refusal       *string
	}
	Delta struct {
		Role    string
		Content *string
	}
	LogProbs       *logProbs
	FinishReason   *string `json:"finish_reason"`
	TokenIDs       []int32 `json:"token_ids"`
	PromptTokenIDs []int32 `json:"prompt_token_ids"`
}

type logProbs struct {
	Tokens        []string
	TokenLogProbs []float64            `json:"token_logprobs"`
	TopLogProbs   []map[string]float64 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"`
	Content       []struct {
		logProb
		Top []logProb `json:"top_logprobs"`
	}
}

type logProb struct {
	Token   string
	LogProb float64
	Bytes   []int
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          *struct {
		CachedTokens *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type reply struct {
	ID, Object, Model string
	Created           int64
	Choices           []choice
	Usage             *usage
	PromptTokenIDs    []int32 `json:"prompt_token_ids"`
}

// events sends a request and reads its events, without the one at the end, which
// must be there.
func (h *harness) events(path, body string) []string {
	h.t.Helper()
	r, err := h.do(h.t.Context(), http.MethodPost, path, body)
	if err != nil {
		h.t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != "text/event-stream" {
		data, _ := io.ReadAll(r.Body)
		h.t.Fatalf("%s %s: status %d, %s: %s", path, body, r.StatusCode, r.Header.Get("Content-Type"), data)
	}
	events, err := readEvents(r.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	if len(events) == 0 || events[len(events)-1] != "[DONE]" {
		h.t.Fatalf("%s %s: the stream does not end with [DONE]: %q", path, body, events)
	}
	return events[:len(events)-1]
}

func readEvents(r io.Reader) ([]string, error) {
	var events []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			events = append(events, data)
		}
	}
	return events, lines.Err()
}

// stream is events as replies.
func (h *harness) stream(path, body string) []reply {
	h.t.Helper()
	var all []reply
	for _, e := range h.events(path, body) {
		all = append(all, decode[reply](h.t, e))
	}
	return all
}

// eventually waits until something holds. It belongs in a bubble of synctest, where the two
// minutes that it waits at most are no time at all.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	end := time.Now().Add(2 * time.Minute)
	for synctest.Wait(); !holds(); synctest.Wait() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// idle waits, in a bubble, until nothing runs or waits in the engine, and its blocks are free.
func (h *harness) idle() {
	h.t.Helper()
	eventually(h.t, "the engine is idle", func() bool {
		s := h.State()
		return s.Running+s.Waiting+s.KVUsedBlocks == 0
	})
}

// stepTakes is how long a step of a slow engine takes at least.
const stepTakes = 60 * time.Millisecond

// slow is a node whose steps take their time, on the clock of the bubble.
func slow() node.Options {
	return node.Options{
		Settings: configs.Defaults(),
		Listener: engine.Listener{StepFinished: func(engine.StepInfo) { time.Sleep(stepTakes) }},
	}
}
