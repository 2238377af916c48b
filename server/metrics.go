package server

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/metrics"
)

// Metrics of a node. Requests have the names that routers know from vLLM.
type Metrics struct {
	own     []metrics.Collector // of requests and the engine's state
	state   *stateCollector     // one of them
	readers atomic.Int32        // requests for metrics in progress

	mu sync.Mutex
	// collectors of the model, if there is one.
	collectors []metrics.Collector

	firstToken, interToken, perToken, endToEnd *metrics.Histogram
	queue, prefill, decode, inference          *metrics.Histogram
	prompt, generated                          *metrics.Counter
	success                                    *metrics.Counters
	promptTokens, generationTokens, stepTokens *metrics.Histogram
	maxGenerationTokens, paramsN, paramsTokens *metrics.Histogram
	step, drain                                *metrics.Histogram
}

// maxReaders is the maximum of requests for metrics at a time.
const maxReaders = 4

// vllm describes a metric that has vLLM's name, of a model.
func vllm(model, name, help string, labels ...string) *metrics.Desc {
	return metrics.NewDesc("vllm:"+name, help, labels...).With("model_name", model).With("engine", "0")
}

// Bounds of histograms: of tokens, and of seconds, from the times of the built-in model to those
// after which clients have given up.
var (
	tokenBounds   = []float64{.0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10, 20, 40}
	drainBounds   = []float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	tokenCounts   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}
	sampleCounts  = []float64{1, 2, 5, 10, 20, 50, 100}
	requestBounds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560}
)

// NewMetrics makes the metrics of a node that serves a model under a name.
func NewMetrics(model string) *Metrics {
	m := &Metrics{state: newStateCollector(model)}
	m.own = []metrics.Collector{m.state}
	histogram := func(d *metrics.Desc, bounds []float64) *metrics.Histogram {
		h := metrics.NewHistogram(d, bounds)
		m.own = append(m.own, h)
		return h
	}
	request := func(name, help string) *metrics.Histogram {
		return histogram(vllm(model, name+"_seconds", help), requestBounds)
	}
	counter := func(name, help string) *metrics.Counter {
		c := metrics.NewCounter(vllm(model, name, help))
		m.own = append(m.own, c)
		return c
	}
	m.firstToken = request("time_to_first_token", "Time to first token (TTFT): from a request's arrival to its first token.")
	m.endToEnd = request("e2e_request_latency", "End-to-end latency: from a request's arrival to its last token.")
	m.queue = request("request_queue_time", "Time in the queue: from a request's arrival to its admission.")
	m.prefill = request("request_prefill_time", "Prefill: from a request's admission to its first token.")
	m.decode = request("request_decode_time", "Decode: from a request's first token to its last.")
	m.inference = request("request_inference_time", "Inference: from a request's admission to its last token.")
	m.interToken = histogram(vllm(model, "inter_token_latency_seconds", "Inter-token latency (ITL): between two tokens of a sequence."), tokenBounds)
	m.perToken = histogram(vllm(model, "request_time_per_output_token_seconds", "Time per output token (TPOT): the mean over a request's tokens after the first."), tokenBounds)
	m.promptTokens = histogram(vllm(model, "request_prompt_tokens", "Prompt tokens of a request."), tokenCounts)
	m.generationTokens = histogram(vllm(model, "request_generation_tokens", "Generation tokens of a request, all its sequences together."), tokenCounts)
	m.maxGenerationTokens = histogram(vllm(model, "request_max_num_generation_tokens", "Generation tokens of a request's longest sequence."), tokenCounts)
	m.paramsN = histogram(vllm(model, "request_params_n", "Parameter n of a request."), sampleCounts)
	m.paramsTokens = histogram(vllm(model, "request_params_max_tokens", "Parameter max_tokens of a request, or its default."), tokenCounts)
	m.stepTokens = histogram(vllm(model, "iteration_tokens_total", "Tokens per engine step."), tokenCounts)
	m.prompt = counter("prompt_tokens_total", "Prompt tokens of requests that got their first token.")
	m.generated = counter("generation_tokens_total", "Generation tokens.")
	m.success = metrics.NewCounters(vllm(model, "request_success_total", "Requests that ended, by finish reason.", "finished_reason"),
		string(engine.FinishStop), string(engine.FinishLength), string(engine.FinishAbort))
	m.step = histogram(metrics.NewDesc("moeserve_step_duration_seconds", "Duration of engine steps."), tokenBounds)
	m.drain = histogram(metrics.NewDesc("moeserve_harvest_drain_seconds", "Drain time: from the revocation of borrowed peer memory to the end of its last reader."), drainBounds)
	m.own = append(m.own, m.success)
	return m
}

// ObserveStep counts a step of the engine.
func (m *Metrics) ObserveStep(i engine.StepInfo) {
	m.step.Observe(i.Duration.Seconds())
	m.stepTokens.Observe(float64(i.Tokens))
}

// ObserveDrain counts a revocation whose last reader took d.
func (m *Metrics) ObserveDrain(d time.Duration) { m.drain.Observe(d.Seconds()) }

// reading reads a job and counts what comes.
type reading struct {
	m        *Metrics
	job      *engine.Job
	params   engine.Params
	finish   engine.FinishReason
	finished []engine.FinishReason // of the samples that have ended
	prompted bool
	tokens   int
	// samples that have tokens, by number.
	samples map[int]sampleReading
}

// sampleReading is what has come of a sample: its tokens, and when the latest did.
type sampleReading struct {
	tokens int
	at     time.Time
}

func (m *Metrics) read(job *engine.Job, p engine.Params) *reading {
	return &reading{m: m, job: job, params: p, finish: engine.FinishAbort, samples: map[int]sampleReading{}}
}

// next is the job's next update. A job that was aborted ends with an error.
func (r *reading) next(ctx context.Context) (engine.Update, error) {
	u, err := r.job.Next(ctx)
	for err == nil && u.Finish == engine.FinishAbort {
		// The last of these is followed by the cause.
		if u, err = r.job.Next(ctx); errors.Is(err, io.EOF) {
			if err = ctx.Err(); err == nil {
				err = engine.ErrStopped
			}
		}
		r.finish = engine.FinishAbort
	}
	if err != nil {
		if !errors.Is(err, io.EOF) {
			r.finish = engine.FinishAbort
		}
		return u, err
	}
	if u.Finish != "" {
		r.finish = u.Finish
		r.finished = append(r.finished, u.Finish)
	}
	if len(u.Tokens) == 0 {
		return u, nil
	}
	if !r.prompted {
		r.prompted = true
		r.m.prompt.Add(r.job.Usage().PromptTokens)
	}
	r.m.generated.Add(len(u.Tokens))
	r.tokens += len(u.Tokens)
	sample, ok := r.samples[u.Sample]
	if ok {
		r.m.interToken.Observe(u.At.Sub(sample.at).Seconds())
	}
	r.samples[u.Sample] = sampleReading{sample.tokens + len(u.Tokens), u.At}
	return u, nil
}

// log is how the job ran.
func (r *reading) log() jobLog {
	l := jobLog{usage: r.job.Usage(), times: r.job.Times(), samples: r.params.N, finish: r.finished}
	if r.finish == engine.FinishAbort {
		l.finish = append(l.finish, r.finish)
	}
	return l
}

// done counts a job that is not read any more.
func (r *reading) done() {
	if len(r.finished) < r.params.N {
		r.finish = engine.FinishAbort // its client has gone before the end of every sample
	}
	r.m.success.Of(string(r.finish)).Add(1)
	r.m.paramsN.Observe(float64(r.params.N))
	r.m.paramsTokens.Observe(float64(r.params.MaxTokens))
	t := r.job.Times()
	between := func(h *metrics.Histogram, from, to time.Time) {
		if !from.IsZero() && !to.IsZero() {
			h.Observe(to.Sub(from).Seconds())
		}
	}
	between(r.m.queue, t.Arrived, t.Admitted)
	between(r.m.firstToken, t.Arrived, t.FirstToken)
	between(r.m.prefill, t.Admitted, t.FirstToken)
	if r.finish == engine.FinishAbort {
		return // its length depends on when the client left
	}
	r.m.promptTokens.Observe(float64(r.job.Usage().PromptTokens))
	r.m.generationTokens.Observe(float64(r.tokens))
	longest := 0
	for _, s := range r.samples {
		longest = max(longest, s.tokens)
	}
	r.m.maxGenerationTokens.Observe(float64(longest))
	between(r.m.endToEnd, t.Arrived, t.Finished)
	between(r.m.decode, t.FirstToken, t.Finished)
	between(r.m.inference, t.Admitted, t.Finished)
	// Samples run side by side.
	if more := float64(r.tokens)/float64(r.params.N) - 1; more > 0 && !t.FirstToken.IsZero() && !t.Finished.IsZero() {
		r.m.perToken.Observe(t.Finished.Sub(t.FirstToken).Seconds() / more)
	}
}

// setModel replaces the metrics of the model.
func (m *Metrics) setModel(of *Model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collectors = of.Collectors
	m.state.model.Store(of)
}

// all are the collectors of one model: its requests', its engine's, and its own.
func (m *Metrics) all() []metrics.Collector {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Concat(m.own, m.collectors)
}

// gather returns the collectors of the process and of all models. Where there are several, metrics that have
// no name of a model get one.
func (m *Metrics) gather(models []*Model) []metrics.Collector {
	all := []metrics.Collector{metrics.Runtime(), metrics.Process()}
	if len(models) < 2 {
		return append(all, m.all()...)
	}
	for _, of := range models {
		for _, c := range of.Metrics.all() {
			all = append(all, metrics.WithLabel(c, "model_name", of.Names[0]))
		}
	}
	return all
}

// write writes the current metrics.
func (m *Metrics) write(w http.ResponseWriter, r *http.Request, models []*Model, more []metrics.Collector) error {
	defer m.readers.Add(-1)
	if m.readers.Add(1) > maxReaders {
		return &Error{
			Status: http.StatusServiceUnavailable, Type: unavailable, RetryAfter: retrySoon,
			Message: "too many requests for metrics at the same time; retry later",
		}
	}
	all := append(m.gather(models), more...)
	var text bytes.Buffer
	if err := metrics.Write(&text, all...); err != nil {
		return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: Message(err)}
	}
	w.Header().Set("Content-Type", metrics.ContentType)
	w.Header().Add("Vary", "Accept-Encoding")
	var err error
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, err = text.WriteTo(z)
		err = errors.Join(err, z.Close())
	} else {
		_, err = text.WriteTo(w)
	}
	if err != nil {
		return &writeError{err}
	}
	return nil
}

// stateCollector reads the engine's state when metrics are read. Before there is one, nothing
// runs or waits: routers read that as a server without load, and its health says that it loads.
type stateCollector struct {
	model atomic.Pointer[Model]

	waiting, running, kv, config, preemptions, retries, lora, sleep *metrics.Desc
	prefixQueries, prefixHits, externalQueries, externalHits        *metrics.Desc
}

func newStateCollector(model string) *stateCollector {
	desc := func(name, help string, labels ...string) *metrics.Desc { return vllm(model, name, help, labels...) }
	return &stateCollector{
		waiting:         desc("num_requests_waiting", "Sequences that wait to be admitted, or for their KV blocks to be loaded (a request with n=4 has 4)."),
		running:         desc("num_requests_running", "Sequences that run (a request with n=4 has 4)."),
		kv:              desc("kv_cache_usage_perc", "Share of the KV cache blocks in use, from 0 to 1."),
		config:          desc("cache_config_info", "Sizes of the KV cache.", "block_size", "num_gpu_blocks"),
		preemptions:     desc("num_preemptions_total", "Running sequences preempted, because the KV cache was full or (fair scheduling) others were behind."),
		prefixQueries:   desc("prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache: those of each request once, when it is admitted."),
		externalQueries: desc("external_prefix_cache_queries_total", "Prompt tokens that the prefix cache does not have, and that were looked up in other tiers: those of each request once."),
		externalHits:    desc("external_prefix_cache_hits_total", "Prompt tokens loaded from other tiers, which were not computed again."),
		prefixHits:      desc("prefix_cache_hits_total", "Prompt tokens found in the prefix cache, which were not computed again."),
		sleep:           desc("engine_sleep_state", "1 for the state of the model: awake, asleep with its weights in host memory (level 1), or without weights (level 2).", "sleep_state"),
		retries:         metrics.NewDesc("moeserve_step_retries_total", "Steps tried again because a copy failed."),
		lora: metrics.NewDesc("vllm:lora_requests_info", "When the metrics were read, in Unix seconds, for routers that look for LoRA adapters: there are none.",
			"max_lora", "running_lora_adapters", "waiting_lora_adapters"),
	}
}

// sleepStates are vLLM's names of the levels of sleep.
var sleepStates = []string{"awake", "weights_offloaded", "discard_all"}

// Collect implements metrics.Collector.
func (c *stateCollector) Collect(to *metrics.Sink) {
	var s engine.State
	if m := c.model.Load(); m != nil {
		s = m.Engine.State()
		level := 0
		if m.Sleeper != nil {
			level = m.Sleeper.Level()
		}
		for i, state := range sleepStates {
			now := 0.0
			if i == level {
				now = 1
			}
			to.Gauge(c.sleep, now, state)
		}
		to.Gauge(c.config, 1, strconv.Itoa(s.BlockTokens), strconv.Itoa(s.KVMaxBlocks))
	}
	to.Gauge(c.waiting, float64(s.Waiting))
	to.Gauge(c.running, float64(s.Running))
	to.Gauge(c.kv, float64(s.KVUsedBlocks)/float64(max(1, s.KVBlocks)))
	to.Counter(c.preemptions, float64(s.Preemptions))
	to.Counter(c.prefixQueries, float64(s.PrefixCacheQueries))
	to.Counter(c.prefixHits, float64(s.PrefixCacheHits))
	to.Counter(c.externalQueries, float64(s.ExternalQueries))
	to.Counter(c.externalHits, float64(s.ExternalHits))
	to.Counter(c.retries, float64(s.Retried))
	to.Gauge(c.lora, float64(time.Now().Unix()), "0", "", "")
}
