package server

import (
	"container/list"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// Engine runs requests. *engine.Engine is one.
type Engine interface {
	// Submit queues a request; the end of ctx ends it. Errors are those of package
	// engine.
	Submit(ctx context.Context, r engine.Request) (*engine.Job, error)
	// State of the engine now, from any goroutine.
	State() engine.State
	// ResetPrefixCache drops cached prefixes that no running request uses and, with external,
	// those of other tiers.
	ResetPrefixCache(external bool)
}

// Template turns messages into the text of a prompt. *chat.Template is one.
type Template interface {
	Render(ctx context.Context, messages []chat.Message, o chat.Options) (chat.Prompt, error)
}

// Model is what is served.
type Model struct {
	// Names that clients know it by, at least one; metrics and responses to who gives none have
	// the first.
	Names     []string
	Engine    Engine
	Tokenizer tokenizer.Tokenizer // nil: prompts are token ids
	Template  Template            // nil: there are no chats
	// TokenizerConfig is the checkpoint's tokenizer_config.json; nil without one.
	TokenizerConfig []byte
	// MaxModelLen is the maximum of prompt and completion tokens together.
	MaxModelLen int
	// Vocab is the number of token ids, which bounds lists of them. 0: not known.
	Vocab int
	// Calls is how it writes tool calls; nil: calls are text, and none can be required. With
	// AutoCallsAreText so are those that a request does not require.
	Calls            *output.Format
	AutoCallsAreText bool
	// Reasoning is how it marks its reasoning; nil: that is a part of the content.
	Reasoning *output.ReasoningFormat
	// SpecialTokensInChat reads special tokens in messages as such; else they are plain text.
	SpecialTokensInChat bool
	// Defaults of parameters that a request does not give. OpenAI's temperature is 1.
	Defaults engine.Params
	// ChatTokens is max_tokens of chats that give none; 0: all that fits.
	ChatTokens int
	// Collectors of the model's metrics, beside the engine's state.
	Collectors []metrics.Collector
	// Residency returns where every expert is, as a value with a JSON form; it is safe for
	// concurrent use. nil: not available.
	Residency func() any
	// KV returns where KV blocks are, and Now what the node is doing, likewise.
	KV, Now func() any
	// Harvest serves requests of other processes for borrowed memory, on the admin address; nil:
	// nothing is borrowed.
	Harvest http.Handler
	// Sleeper puts the model to sleep and wakes it, on the admin address; nil: it sleeps and wakes by
	// itself.
	Sleeper Sleeper
	// Metrics that its requests are counted in. Default: the server's.
	Metrics *Metrics
	// Created is when the model became available.
	Created time.Time

	// grammars are those of its requests; SetModels sets it.
	grammars *grammars
	// others are served beside it.
	others []*Model
}

// Options of a server.
type Options struct {
	// Metrics that requests are counted in. Default: new ones, of a model without name.
	Metrics *Metrics
	// Events that clients can follow. Default: none.
	Events *Events
	// Version of the product.
	Version string
	// Admin has the API's address serve what the admin address serves, too.
	Admin bool
	// Settings that can change, on the admin address; nil: none can.
	Settings Settings
	// APIKey that clients must send, as a bearer token or as X-API-Key, to all but health and
	// metrics; empty: none.
	APIKey string
	// CORS lets web pages use the server. Default: none.
	CORS CORS
	// MaxRequestBytes bounds a body. Default: 16 MiB.
	MaxRequestBytes int64
	// MaxBodyBytes bounds the bodies of all requests that are being read or prepared. Default: four
	// times MaxRequestBytes.
	MaxBodyBytes int64
	// Workers is the maximum of requests that are prepared at a time: parsed, put through the chat
	// template, and tokenized. Default: GOMAXPROCS.
	Workers int
	// MaxConnections is the maximum of open connections. Default: 1024.
	MaxConnections int
	// MaxSamples of a request of several prompts: their number times n. More than the engine's
	// queue holds would never be admitted. Default: 256.
	MaxSamples int
	// MaxConcurrent is the maximum of HTTP requests that use the model at a time; more are
	// rejected with 429. Default: 1024.
	MaxConcurrent int
	// RequestTimeout ends a request that takes longer; 0: never.
	RequestTimeout time.Duration
	// DrainTimeout is how long running requests may continue once Serve is to end. 0: they are
	// aborted.
	DrainTimeout time.Duration
	// TLS is what Serve encrypts connections with; nil: they are not encrypted.
	TLS *tls.Config
	// ReadTimeout is the limit for a client to send its request, WriteTimeout to read a part of
	// the response. Default: 30 s.
	ReadTimeout, WriteTimeout time.Duration
	// Tracer records requests that use a model; nil: none does.
	Tracer Tracer
	// Log gets what an operator can act on. Default: none.
	Log *slog.Logger
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if o.Metrics == nil {
		o.Metrics = NewMetrics("")
	}
	if o.Events == nil {
		o.Events = NewEvents()
	}
	if o.MaxRequestBytes == 0 {
		o.MaxRequestBytes = 16 << 20
	}
	if o.MaxBodyBytes == 0 {
		o.MaxBodyBytes = 4 * o.MaxRequestBytes
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.MaxConnections == 0 {
		o.MaxConnections = 1024
	}
	if o.MaxSamples == 0 {
		o.MaxSamples = 256
	}
	if o.MaxConcurrent == 0 {
		o.MaxConcurrent = 1024
	}
	if o.ReadTimeout == 0 {
		o.ReadTimeout = 30 * time.Second
	}
	if o.WriteTimeout == 0 {
		o.WriteTimeout = 30 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Server is an http.Handler. Serve runs it with what a server on a network needs: timeouts,
// limits, and a shutdown that lets requests finish.
type Server struct {
	o      Options
	routes map[string]map[string]route // by path and method
	// admin are the routes of the admin address.
	admin  map[string]map[string]route
	gate   gate
	intake intake
	// workers has an item for each request that is being prepared; large, one where a large body was.
	workers chan struct{}
	large   chan struct{}
	// passed are the bytes of other bodies since then.
	passed atomic.Int64
	// models are all that are served, the first one that of requests without a name; nil until there
	// are any.
	served atomic.Pointer[[]*Model]
	turned atomic.Pointer[Turns] // nil: models take no turns
	// failed is why the model cannot be served any more.
	failed atomic.Pointer[error]
}

// route is one endpoint.
type route struct {
	handle func(w *response, r *http.Request) error
	// open needs no key.
	open bool
	// works: it needs the model, is limited in number, and refused while the server stops.
	works bool
	// errorBody is the form of its errors; nil: OpenAI's.
	errorBody func(e *Error, id string) any
}

// New makes a server that has no model yet.
func New(o Options) *Server {
	s := &Server{o: o.EnsureDefaults()}
	s.gate.limit = s.o.MaxConcurrent
	s.intake = intake{limit: s.o.MaxRequestBytes, total: s.o.MaxBodyBytes, timeout: s.o.ReadTimeout, reading: map[*bodyReader]struct{}{}}
	s.workers, s.large = make(chan struct{}, s.o.Workers), make(chan struct{}, 1)
	get := func(r route) map[string]route { return map[string]route{http.MethodGet: r, http.MethodHead: r} }
	work := func(h func(*response, *http.Request) error) map[string]route {
		return map[string]route{http.MethodPost: {handle: h, works: true}}
	}
	message := func(h func(*response, *http.Request) error) map[string]route {
		return map[string]route{http.MethodPost: {handle: h, works: true, errorBody: messageError}}
	}
	ping := get(route{handle: s.health, open: true})
	ping[http.MethodPost] = ping[http.MethodGet]
	s.routes = map[string]map[string]route{
		"/v1/completions":             work(s.completions),
		"/v1/chat/completions":        work(s.chat),
		"/v1/responses":               work(s.responses),
		"/v1/messages":                message(s.messages),
		"/v1/messages/count_tokens":   message(s.countTokens),
		"/v1/completions/render":      work(s.renderCompletion),
		"/v1/chat/completions/render": work(s.renderChat),
		"/tokenize":                   work(s.tokenize),
		"/detokenize":                 work(s.detokenize),
		"/tokenizer_info":             get(route{handle: s.tokenizerInfo}),
		"/v1/models":                  get(route{handle: s.models}),
		modelPrefix:                   get(route{handle: s.modelByName}),
		"/":                           get(route{handle: s.index, open: true}),
		"/health":                     get(route{handle: s.health, open: true}),
		"/health/live":                get(route{handle: s.live, open: true}),
		"/health/ready":               get(route{handle: s.ready, open: true}),
		"/ping":                       ping,
		"/load":                       get(route{handle: s.load, open: true}),
		"/version":                    get(route{handle: s.version, open: true}),
		"/metrics":                    get(route{handle: s.metrics, open: true}),
		"/debug/residency":            get(route{handle: s.residency}),
		"/debug/kv":                   get(route{handle: s.kv}),
		"/debug/node":                 get(route{handle: s.node}),
		"/debug/turns":                get(route{handle: s.turns}),
		"/debug/events":               {http.MethodGet: route{handle: s.events}},
	}
	s.addAdmin()
	return s
}

// modelPrefix stands for the models themselves, whose names may have slashes.
const modelPrefix = "/v1/models/"

// SetModels sets the models that are served, and makes the server ready. Their names differ. Requests
// that name no model are for the first.
func (s *Server) SetModels(all ...*Model) {
	for _, m := range all {
		if m.Metrics == nil {
			m.Metrics = s.o.Metrics
		}
		m.Metrics.setModel(m)
		m.grammars = &grammars{byKey: map[grammarKey]*list.Element{}}
		if m.Tokenizer != nil {
			go m.grammars.open(m) // takes some 0.1 s, for which the first request with a grammar would wait
		}
		m.others = slices.DeleteFunc(slices.Clone(all), func(o *Model) bool { return o == m })
	}
	s.served.Store(&all)
}

// Fail reports that the model can no longer be served: health and all requests fail from now
// on.
func (s *Server) Fail(err error) { s.failed.Store(&err) }

// Limits of a connection that no option sets.
const (
	maxHeaderBytes = 64 << 10
	idleTimeout    = 2 * time.Minute
	headerTimeout  = 10 * time.Second
	// closing is the limit for clients to read the end of their last response.
	closing = 2 * time.Second
)

// listen makes the HTTP server of a handler on l, whose connections have limits and are
// encrypted if Options.TLS is set.
func (s *Server) listen(base context.Context, l net.Listener, limit int, to http.Handler) (*http.Server, net.Listener) {
	conns := newConnections(l, limit)
	l = conns
	if s.o.TLS != nil {
		l = tls.NewListener(conns, s.o.TLS)
	}
	h := &http.Server{
		Handler: to, ReadHeaderTimeout: min(headerTimeout, s.o.ReadTimeout), IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return base },
		ConnState:   conns.changed,
		ErrorLog:    slog.NewLogLogger(s.o.Log.Handler(), slog.LevelDebug),
		Protocols:   new(http.Protocols),
	}
	h.Protocols.SetHTTP1(true) // deadlines and limits are those of connections
	return h, l
}

// Serve serves connections of l until ctx is done. Then it refuses new requests, is no longer
// ready, and lets running requests continue for up to DrainTimeout. It closes l, and returns
// nil where ctx was its end.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	base, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	h, l := s.listen(base, l, s.o.MaxConnections, s)
	var background sync.WaitGroup
	background.Go(func() { s.freeMemory(base) })
	defer background.Wait()
	defer cut(nil)
	served := make(chan error, 1)
	go func() { served <- h.Serve(l) }()
	var err error
	select {
	case err = <-served:
		err = fmt.Errorf("server: %w", err)
	case <-ctx.Done():
	}
	idle := s.gate.close()
	s.intake.close()
	if err == nil {
		running := s.gate.count()
		if running > 0 && s.o.DrainTimeout > 0 {
			s.o.Log.Info("draining: new requests are refused, those under way finish; a second signal ends at once", "running", running, "timeout_s", s.o.DrainTimeout.Seconds())
		}
		timer := time.NewTimer(s.o.DrainTimeout)
		defer timer.Stop()
		select {
		case <-idle:
		case <-timer.C:
			if n := s.gate.count(); n > 0 {
				s.o.Log.Warn("drain timeout: aborting requests", "running", n)
			}
		}
	}
	cut(errStopping)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closing)
	defer cancel()
	if h.Shutdown(end) != nil {
		h.Close() //nolint:errcheck // what is left are clients that do not read
	}
	<-idle
	if err == nil {
		<-served
	}
	return err
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(hw http.ResponseWriter, r *http.Request) { s.serve(s.routes, hw, r) }

// serve serves a request by the routes.
func (s *Server) serve(routes map[string]map[string]route, hw http.ResponseWriter, r *http.Request) {
	start := time.Now()
	w := &response{
		ResponseWriter: hw, control: http.NewResponseController(hw), timeout: s.o.WriteTimeout, id: requestID(r), log: s.o.Log,
		request: r, unread: r.ContentLength != 0,
	}
	w.deadline() // in place of that of the connection's last response
	if w.unread {
		w.readUntil(start.Add(s.o.ReadTimeout))
	}
	if len(r.TransferEncoding) > 0 {
		// Of a request that also has a Content-Length, which net/http removes, a proxy may have another
		// idea of where the next one begins (RFC 9112, 6.1).
		w.Header().Set("Connection", "close")
	}
	w.Header().Set("X-Request-Id", w.id)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	defer func() {
		if p := recover(); p != nil {
			s.o.Log.Error("panic in handler", "request_id", w.id, "panic", p, "stack", string(debug.Stack()))
			w.fail(&Error{Status: http.StatusInternalServerError, Type: serverError, Message: "internal error; the server's log has the cause"})
		}
		s.logRequest(w, r, time.Since(start))
		s.trace(w, r, start)
	}()
	if err := s.dispatch(routes, w, r); err != nil {
		e := asError(r.Context(), err, "")
		if e.Status >= http.StatusInternalServerError && e.RetryAfter == 0 {
			s.o.Log.Error("request failed", "request_id", w.id, "endpoint", r.URL.Path, "err", err)
		}
		w.fail(e)
	}
}

func (s *Server) dispatch(routes map[string]map[string]route, w *response, r *http.Request) error {
	if done, err := s.o.CORS.apply(w.Header(), r); err != nil || done {
		if done {
			w.WriteHeader(http.StatusNoContent)
		}
		return err
	}
	path := r.URL.Path
	if strings.HasPrefix(path, modelPrefix) {
		path = modelPrefix
	}
	methods, ok := routes[path]
	if !ok {
		return unknownURL(r.Method, r.URL.Path)
	}
	route, ok := methods[r.Method]
	if !ok {
		var allowed []string
		for m := range methods {
			allowed = append(allowed, m)
		}
		slices.Sort(allowed)
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return &Error{
			Status: http.StatusMethodNotAllowed, Type: invalidRequest, Code: "method_not_allowed",
			Message: fmt.Sprintf("Method %s is not allowed for %s; use %s.", truncate(r.Method), truncate(r.URL.Path), strings.Join(allowed, " or ")),
		}
	}
	if w.errorBody = route.errorBody; w.errorBody != nil {
		w.Header().Set("Request-Id", w.id)
	}
	if !route.open && !s.authorized(r) {
		return &Error{
			Status: http.StatusUnauthorized, Type: invalidRequest, Code: "invalid_api_key",
			Message: "The API key is missing or wrong: send the header Authorization: Bearer KEY, or X-API-Key: KEY.",
		}
	}
	w.works = route.works
	defer func() {
		if w.entered {
			s.gate.leave()
		}
	}()
	return route.handle(w, r)
}

// authorized says whether a request has the key: as a bearer token, or in the header that clients of
// Anthropic's or of Azure's API send. The time that a comparison takes says nothing about the key.
func (s *Server) authorized(r *http.Request) bool {
	if s.o.APIKey == "" {
		return true
	}
	keys := []string{r.Header.Get("X-API-Key"), r.Header.Get("Api-Key")}
	if scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "Bearer") {
		keys = append(keys, key)
	}
	want, ok := sha256.Sum256([]byte(s.o.APIKey)), 0
	for _, key := range keys {
		got := sha256.Sum256([]byte(key))
		ok |= subtle.ConstantTimeCompare(got[:], want[:])
	}
	return ok == 1
}

var goodID = regexp.MustCompile(`^[\w.-]{1,64}$`)

// requestID is the client's id of the request, or a random one.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-Id"); goodID.MatchString(id) {
		return id
	}
	var b [12]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	return hex.EncodeToString(b[:])
}

// all are the models, none while they are loading.
func (s *Server) all() []*Model {
	if p := s.served.Load(); p != nil {
		return *p
	}
	return nil
}

// current is the model of requests that name none, or why there is none.
func (s *Server) current() (*Model, error) {
	if err := s.failed.Load(); err != nil {
		return nil, &Error{Status: http.StatusInternalServerError, Type: serverError, Message: "the engine failed: " + Message(*err)}
	}
	all := s.all()
	if len(all) == 0 {
		return nil, notNow(errors.New("the model is still loading"))
	}
	return all[0], nil
}

// inURL is the model that the URL's parameter "model" names, the first without.
func (s *Server) inURL(r *http.Request) (*Model, error) {
	m, err := s.current()
	if err != nil {
		return nil, err
	}
	name := r.URL.Query().Get("model")
	if m = m.named(name); m.known(name) != nil {
		return nil, m.known(name)
	}
	return m, nil
}

// named is the model of that name among all that are served with m; m if there is none.
func (m *Model) named(name string) *Model {
	if slices.Contains(m.Names, name) {
		return m
	}
	for _, o := range m.others {
		if slices.Contains(o.Names, name) {
			return o
		}
	}
	return m
}

// vocab is the maximum number of token ids in a list of different ones.
func (m *Model) vocab() int {
	if m.Vocab > 0 {
		return m.Vocab
	}
	return maxTokenIDs
}

// known checks that a request is for this model; one that names none is.
func (m *Model) known(name string) error {
	if name == "" || slices.Contains(m.Names, name) {
		return nil
	}
	var quoted []string
	for _, o := range append([]*Model{m}, m.others...) {
		for _, n := range o.Names {
			quoted = append(quoted, strconv.Quote(n))
		}
	}
	return &Error{
		Status: http.StatusNotFound, Type: invalidRequest, Param: "model", Code: "model_not_found",
		Message: fmt.Sprintf("The model %q does not exist; this server has %s.", truncate(name), strings.Join(quoted, ", ")),
	}
}

// called is the name of the model in the response to a request that gives name, if it gives one.
func (m *Model) called(name string) string {
	if name == "" {
		return m.Names[0]
	}
	return name
}

// prepare reads a request's JSON body and has do make of it what the engine, or the response, is to
// have. A request counts as in progress once its body is read; few are prepared at a time, in the
// order in which they were admitted. ctx ends when the client leaves.
func (s *Server) prepare(w *response, r *http.Request, do func(ctx context.Context, m *Model, o *object) error) error {
	m, err := s.current()
	if err != nil {
		return err
	}
	if err := s.gate.check(); err != nil {
		return err
	}
	if err := jsonBody(r); err != nil {
		return err
	}
	data, body, err := s.intake.take(w, r)
	defer s.prepared(body)
	if err != nil {
		return err
	}
	if err := s.gate.enter(); err != nil {
		return err
	}
	w.entered = true
	ctx := r.Context()
	select {
	case s.workers <- struct{}{}:
		defer func() { <-s.workers }()
	case <-ctx.Done():
		return asError(ctx, ctx.Err(), "")
	}
	o := parseBody(data)
	if o.err != nil {
		return o.err
	}
	if ctx.Err() != nil {
		return asError(ctx, ctx.Err(), "")
	}
	if id := o.peek("request_id"); goodID.MatchString(id) {
		w.id = id
		w.Header().Set("X-Request-Id", id)
	}
	return do(ctx, m.named(o.peek("model")), o)
}

// prepared ends the use of a body.
func (s *Server) prepared(b *bodyReader) {
	b.release()
	if b.read < largeBody && s.passed.Add(b.read) < manyBodies {
		return
	}
	s.passed.Store(0)
	select {
	case s.large <- struct{}{}:
	default:
	}
}

// freeMemory returns memory to the system some time after large bodies have passed, until ctx ends:
// the heap would else keep its size for minutes.
func (s *Server) freeMemory(ctx context.Context) {
	for {
		select {
		case <-s.large:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(freePause):
		case <-ctx.Done():
			return
		}
		debug.FreeOSMemory()
	}
}

// freePause is between two times that memory is returned.
const freePause = 3 * time.Second

// jsonBody checks that a request says of its body that it is JSON.
func jsonBody(r *http.Request) error {
	sent := r.Header.Get("Content-Type")
	if kind, _, err := mime.ParseMediaType(sent); err != nil || kind != "application/json" {
		got := "is not given"
		if sent != "" {
			got = "is " + truncate(sent)
		}
		return &Error{
			Status: http.StatusUnsupportedMediaType, Type: invalidRequest, Code: "unsupported_media_type",
			Message: "The body must be JSON, and its Content-Type " + got + ": add the header Content-Type: application/json (curl: -H 'Content-Type: application/json').",
		}
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return &Error{
			Status: http.StatusUnsupportedMediaType, Type: invalidRequest, Code: "unsupported_media_type",
			Message: "The body must not be compressed: send no Content-Encoding.",
		}
	}
	return nil
}

func (s *Server) metrics(w *response, r *http.Request) error {
	w.deadline()
	var more []metrics.Collector
	if t := s.turned.Load(); t != nil {
		more = []metrics.Collector{t.switches, t.copies}
	}
	return s.o.Metrics.write(w, r, s.all(), more)
}

type modelJSON struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	MaxModelLen int    `json:"max_model_len"`
}

func (m *Model) json(name string) modelJSON {
	return modelJSON{ID: name, Object: "model", Created: m.Created.Unix(), OwnedBy: "moeserve", MaxModelLen: m.MaxModelLen}
}

func (s *Server) models(w *response, _ *http.Request) error {
	if _, err := s.current(); err != nil {
		return err
	}
	var data []modelJSON
	for _, m := range s.all() {
		for _, name := range m.Names {
			data = append(data, m.json(name))
		}
	}
	w.json(http.StatusOK, struct {
		Object string      `json:"object"`
		Data   []modelJSON `json:"data"`
	}{"list", data})
	return nil
}

func (s *Server) modelByName(w *response, r *http.Request) error {
	m, err := s.current()
	if err != nil {
		return err
	}
	name := strings.TrimPrefix(r.URL.Path, modelPrefix)
	if name == "" {
		return &Error{
			Status: http.StatusNotFound, Type: invalidRequest, Param: "model", Code: "model_not_found",
			Message: "There is no model of an empty name; /v1/models lists the models.",
		}
	}
	if m = m.named(name); m.known(name) != nil {
		return m.known(name)
	}
	w.json(http.StatusOK, m.json(name))
	return nil
}
