package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/server/spans"
)

func newServe(s *streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve [MODEL]...",
		Short: "Serve the OpenAI API",
		Long: `Serve the OpenAI API: /v1/completions, /v1/chat/completions, /v1/responses and
/v1/models; Anthropic's /v1/messages; beside them /tokenize, /detokenize, /health,
/ping, /load, /version and /metrics, and for operators /debug/node (what it is doing),
/debug/residency (where every expert is), /debug/kv (where KV blocks are) and
/debug/events. With --admin-address HOST:PORT a page shows this in a browser.

MODEL is the directory of a checkpoint, a preset, or built-in: a small model inside
this binary, which is also the default. The server listens from the start;
/health answers 503 until the model is loaded, /health/live 200 from the start.

With several models, one is awake at a time, and the others sleep with their weights in
host memory, until a request comes for one of them: they take turns of --turn-time
seconds while requests wait. All have the same settings.

Parameters that a request does not give are those of the model's
generation_config.json, and else OpenAI's defaults.

While requests run, a line every 10 s logs how many run and wait, prefill and
decode tokens/s, KV cache usage and the hit rate of experts, and each request has
a line with its tokens, TTFT and TPOT; --log-level warn switches both off.

SIGTERM and SIGINT shut the server down: it rejects new requests, lets running ones
finish for --drain-timeout seconds, and exits with 0. A second signal ends it at
once.`,
		Example: `  moeserve serve --offload-fraction 50%
  moeserve serve /models/mixtral-8x7b --host 0.0.0.0 --port 8080
  moeserve serve --model /models/mixtral-8x7b --model /models/qwen3-30b-a3b`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := servedSettings(cmd, args)
			if err != nil {
				return err
			}
			return serve(cmd.Context(), s, set, node.Options{})
		},
	}
	addSettings(cmd.Flags(), configs.For("serve"))
	severalModels(cmd)
	return cmd
}

// modelName is what the model is called where nothing else is said.
func modelName(set *settings) (string, error) {
	if set.Model.Name == "" {
		return checkpoint.BuiltIn, nil
	}
	path, err := filepath.Abs(set.Model.Name)
	return filepath.Base(path), err
}

// serve runs two actors: the HTTP server from the start, and the engines once their
// models are loaded. The end of the server, which a signal or the engine's failure
// brings about, is the end of the engine, which is the end of the node. o is what
// the node is to have besides.
func serve(ctx context.Context, s *streams, set *settings, o node.Options) (err error) {
	if err := s.inPlace("--trace", set.Output.Trace); err != nil {
		return err
	}
	all, err := servedModels(set)
	if err != nil {
		return err
	}
	cors, err := set.Serve.ParseCORS()
	if err != nil {
		return err
	}
	encryption, err := set.protect()
	if err != nil {
		return err
	}
	if set.Output.LogLevel == configs.LogAuto {
		set.Output.LogLevel = configs.LogInfo
	}
	level := new(slog.LevelVar)
	level.Set(set.Output.LogLevel.Level())
	log := newLogger(s.err, &set.Output, level)
	settings := newLive(&set.Settings, level, log)
	tracer, closeTracer, err := newTracer(ctx, set.Serve.OTLPTracesEndpoint, log)
	if err != nil {
		return err
	}
	defer closeTracer()
	listener, admin, err := listen(ctx, &set.Serve)
	if err != nil {
		return err
	}
	if set.Serve.APIKey == "" && reachable(listener) {
		log.Warn("listening on a non-loopback address without authentication; set MOESERVE_API_KEY", "address", listener.Addr().String())
	}
	sequences := set.Batch.MaxNumSeqs
	if k, ok := configs.Find("max-num-seqs"); ok && set.Plan.Policy != configs.NoPolicy && !set.given(k.Name) {
		sequences = int(k.Max) // the policy is not known before the devices are
	}
	sequences *= len(all)
	metrics, events := all[0].metrics, server.NewEvents()
	srv := server.New(server.Options{
		Metrics: metrics, Events: events, Version: buildInfo().Version, APIKey: set.Serve.APIKey,
		CORS:            server.CORS{Origins: cors.Origins, Methods: cors.Methods, Headers: cors.Headers, Credentials: set.Serve.AllowCredentials},
		MaxRequestBytes: int64(set.Serve.MaxRequestBytes), MaxSamples: set.Serve.MaxQueuedRequests,
		Admin: set.Serve.AdminAddress == configs.SameAddress, Settings: settings,
		// The engine's queue is what fills up; this only bounds the bodies in memory.
		MaxConcurrent:  sequences + set.Serve.MaxQueuedRequests + spareRequests,
		RequestTimeout: time.Duration(set.Serve.RequestTimeout) * time.Second,
		DrainTimeout:   time.Duration(set.Serve.DrainTimeout) * time.Second,
		MaxConnections: maxConnections(set.Serve.MaxConnections, sequences+set.Serve.MaxQueuedRequests+spareRequests, log),
		TLS:            encryption,
		Tracer:         tracer,
		Log:            log,
	})
	serving, stopServing := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(serving, listener) }()
	defer func() {
		stopServing()
		err = errors.Join(err, <-served)
	}()
	if admin != nil {
		log.Info("admin address", "address", scheme(encryption)+admin.Addr().String())
		administered := make(chan error, 1)
		go func() { administered <- srv.ServeAdmin(serving, admin) }()
		defer func() {
			stopServing()
			err = errors.Join(err, <-administered)
		}()
	}

	o.Explicit, o.Log, o.MaxQueued = set.given, log, set.Serve.MaxQueuedRequests
	o.Events = func(e observe.Event) {
		events.Publish(e.Event, e)
		if e.Event == observe.HarvestRevocationEnded {
			metrics.ObserveDrain(e.Drain)
		}
	}
	defer func() { err = errors.Join(err, closeModels(all)) }()
	if err := openModels(ctx, s, o, all, events); err != nil {
		return err
	}
	runner, err := newTurns(all, time.Duration(set.Serve.TurnTime*float64(time.Second)), srv, log)
	if err != nil {
		return err
	}
	settings.serving(all)
	srv.SetModels(models(all, runner)...)
	for _, m := range slices.Backward(all) {
		m.defaults.log(log)
		if t := m.node.Text().Template; t != nil {
			logParsers(log, &m.set.Serve, t.Mentions)
		}
		newStartup(m.names[0], scheme(encryption)+listener.Addr().String(), m.node).log(log)
	}

	running, stopRunning := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRunning()
	ran := make(chan error, 1)
	go func() {
		err := runModels(running, all, runner, srv.Fail)
		stopServing()
		ran <- err
	}()
	var logging sync.WaitGroup
	for _, m := range all {
		log := log
		if len(all) > 1 {
			log = log.With("model", m.names[0])
		}
		logging.Go(func() { observe.LogStatus(running, log, statusInterval, m.node.Observe().Status) })
	}
	if runner == nil {
		defer endWaiting(ctx, all[0].node, log)()
	}
	err = <-served
	served <- nil // which the deferred function takes
	stopRunning()
	logging.Wait()
	return errors.Join(<-ran, err)
}

// listen opens the address of the API and, where it is another one, the admin address.
func listen(ctx context.Context, s *configs.Serve) (api, admin net.Listener, err error) {
	adminAddress, same, err := s.ParseAdminAddress()
	if err != nil {
		return nil, nil, err
	}
	address := net.JoinHostPort(s.Host, strconv.Itoa(s.Port))
	if adminAddress == address && s.Port != 0 {
		return nil, nil, usagef("--admin-address is %s, the address of the API: give same to have both there, or choose another", adminAddress)
	}
	if api, err = new(net.ListenConfig).Listen(ctx, "tcp", address); err != nil {
		return nil, nil, usagef("cannot serve on %s: %w; choose another --host or --port", address, err)
	}
	administers := api
	if adminAddress != "" {
		if admin, err = new(net.ListenConfig).Listen(ctx, "tcp", adminAddress); err != nil {
			return nil, nil, errors.Join(usagef("cannot serve on %s: %w; choose another --admin-address", adminAddress, err), api.Close())
		}
		administers = admin
	}
	if (same || admin != nil) && s.APIKey == "" && reachable(administers) {
		err := usagef("all that reach %s could change settings and put the model to sleep by --admin-address; set MOESERVE_API_KEY, or use a loopback address such as 127.0.0.1:8001", administers.Addr())
		if admin != nil {
			err = errors.Join(err, admin.Close())
		}
		return nil, nil, errors.Join(err, api.Close())
	}
	return api, admin, nil
}

// newTracer exports spans of requests to a collector; nil where there is none. The caller calls stop.
func newTracer(ctx context.Context, endpoint string, log *slog.Logger) (_ server.Tracer, stop func(), err error) {
	if endpoint == "" {
		return nil, func() {}, nil
	}
	e, err := spans.New(ctx, spans.Options{Endpoint: endpoint, Version: buildInfo().Version, Log: log})
	if err != nil {
		return nil, nil, usagef("--otlp-traces-endpoint %s: %w", endpoint, err)
	}
	return e, func() {
		if err := e.Close(); err != nil {
			log.Warn("the last traces of requests were not sent", "err", err)
		}
	}, nil
}

// reachable reports whether other machines may reach a listener.
func reachable(l net.Listener) bool {
	a, ok := l.Addr().(*net.TCPAddr)
	return ok && !a.IP.IsLoopback()
}

// endWaiting has the requests of a model end that sleeps when ctx is done: they would hold up the end
// of the server, and never run.
func endWaiting(ctx context.Context, n *node.Node, log *slog.Logger) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		if n.Sleeping().Asleep() {
			log.Debug("requests that waited for a wake are ended", "err", n.Engine().Close())
		}
	})
}

// statusInterval is between two lines of the log that say what the server does.
const statusInterval = 10 * time.Second

// spareRequests are HTTP requests that neither run nor wait: on their way in or out.
const spareRequests = 64

// withoutTokenizer says whether a model is a directory without a tokenizer; prompts
// are then token ids.
func withoutTokenizer(dir string) bool {
	if dir == "" {
		return false
	}
	_, err := os.Stat(filepath.Join(dir, "tokenizer.json"))
	return errors.Is(err, os.ErrNotExist)
}

// sleeper has the server put a node to sleep and wake it.
type sleeper struct{ n *node.Node }

var _ server.Sleeper = sleeper{}

// Sleep implements server.Sleeper.
func (s sleeper) Sleep(ctx context.Context, level int, mode engine.PauseMode) error {
	_, err := s.n.Sleep(ctx, sleeping.Level(level), mode)
	return lacksMemory(err)
}

// lacksMemory has the server say that memory is lacking.
func lacksMemory(err error) error {
	if errors.Is(err, device.ErrOutOfMemory) {
		return &server.OutOfMemoryError{Err: err}
	}
	return err
}

// Wake implements server.Sleeper.
func (s sleeper) Wake(ctx context.Context, tags []string) error {
	var all []sleeping.Tag
	for _, t := range tags {
		all = append(all, sleeping.Tag(t))
	}
	_, err := s.n.Wake(ctx, all...)
	return lacksMemory(err)
}

// Level implements server.Sleeper.
func (s sleeper) Level() int { return int(s.n.Sleeping().Level) }

// model is what the server is to know of a node.
func model(names []string, defaults *sampling, s *configs.Serve, n *node.Node) *server.Model {
	m := &server.Model{
		Names: names, Engine: n.Engine(), Tokenizer: n.Text().Tokenizer, TokenizerConfig: n.Text().Config, MaxModelLen: n.Info().Limits.MaxModelLen,
		Vocab: n.Info().Config.Vocab, SpecialTokensInChat: n.Text().SpecialTokensInChat,
		Defaults: defaults.params, ChatTokens: defaults.maxTokens, Created: time.Now(),
		Collectors: n.Observe().Collectors(names[0]),
		Residency:  func() any { return n.Observe().Residency() },
		Now:        func() any { return n.Observe().Now() },
		KV:         func() any { return n.Observe().KV() },
		Sleeper:    sleeper{n},
	}
	if l := n.Lender(); l != nil {
		m.Harvest = reclaim.Handler(l)
	}
	if t := n.Text().Template; t != nil {
		m.Template = t
		m.Calls, m.Reasoning = parsers(s, t.Mentions)
		m.AutoCallsAreText = !s.EnableAutoToolChoice
	}
	return m
}

// logParsers logs what was found in a chat template, or is set.
func logParsers(log *slog.Logger, s *configs.Serve, mentions func(string) bool) {
	calls, reasoning := parsers(s, mentions)
	names := []string{configs.NoParser, configs.NoParser}
	if calls != nil {
		names[0] = calls.Name
	}
	if reasoning != nil {
		names[1] = reasoning.Name
	}
	log.Info("chat template", "tool_call_parser", names[0], "reasoning_parser", names[1])
}

// parsers are the formats of a model's tool calls and of its reasoning, nil: none, whose chat template
// mentions what mentions says.
func parsers(s *configs.Serve, mentions func(string) bool) (calls *output.Format, reasoning *output.ReasoningFormat) {
	if calls = output.Find(s.ToolCallParser); s.ToolCallParser == configs.AutoParser {
		calls = output.Detect(mentions)
	}
	if reasoning = output.FindReasoning(s.ReasoningParser); s.ReasoningParser == configs.AutoParser {
		reasoning = output.DetectReasoning(mentions)
	}
	return calls, reasoning
}
