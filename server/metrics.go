package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/moeserve/moeserve/engine"
)

// Metrics of a node, on a registry of their own. Requests have the names that
// routers know from vLLM.
type Metrics struct {
	registry *prometheus.Registry
	handler  http.Handler
	labels   prometheus.Labels // of metrics that have vLLM's names

	mu sync.Mutex
	// collectors of the model, if there is one.
	collectors []prometheus.Collector

	firstToken, interToken, perToken, endToEnd prometheus.Histogram
	queue, prefill, decode, inference          prometheus.Histogram
	prompt, generated                          prometheus.Counter
	success                                    *prometheus.CounterVec
	step, drain                                prometheus.Histogram
}

// Bounds of histograms, in seconds. They begin where the built-in model is and end
// where somebody has long given up.
var (
	tokenBounds   = []float64{.0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10, 20, 40}
	drainBounds   = []float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	requestBounds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560}
)

// NewMetrics makes the metrics of a node that serves a model under a name.
func NewMetrics(model string) *Metrics {
	labels := prometheus.Labels{"model_name": model}
	m := &Metrics{registry: prometheus.NewRegistry(), labels: labels}
	histogram := func(name, help string, bounds []float64, labels prometheus.Labels) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: bounds, ConstLabels: labels})
		m.registry.MustRegister(h)
		return h
	}
	request := func(name, help string) prometheus.Histogram {
		return histogram("vllm:"+name+"_seconds", help, requestBounds, labels)
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:" + name, Help: help, ConstLabels: labels})
		m.registry.MustRegister(c)
		return c
	}
	m.firstToken = request("time_to_first_token", "From a request's arrival to its first token.")
	m.endToEnd = request("e2e_request_latency", "From a request's arrival to its last token.")
	m.queue = request("request_queue_time", "From a request's arrival to its admission.")
	m.prefill = request("request_prefill_time", "From a request's admission to its first token.")
	m.decode = request("request_decode_time", "From a request's first token to its last.")
	m.inference = request("request_inference_time", "From a request's admission to its last token.")
	m.interToken = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", tokenBounds, labels)
	m.perToken = histogram("vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens.", tokenBounds, labels)
	m.prompt = counter("prompt_tokens_total", "Tokens of prompts whose first token came.")
	m.generated = counter("generation_tokens_total", "Tokens generated.")
	m.success = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "vllm:request_success_total", Help: "Requests that ended, by reason.", ConstLabels: labels,
	}, []string{"finished_reason"})
	m.step = histogram("moeserve_step_duration_seconds", "Steps of the engine.", tokenBounds, nil)
	m.drain = histogram("moeserve_harvest_drain_seconds", "From a revocation of borrowed memory to the end of its last reader.", drainBounds, nil)
	m.registry.MustRegister(m.success,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, r := range []engine.FinishReason{engine.FinishStop, engine.FinishLength, engine.FinishAbort} {
		m.success.WithLabelValues(string(r)) // counters that are not there yet have no rate
	}
	m.handler = promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, MaxRequestsInFlight: 4})
	return m
}

// ObserveStep counts a step of the engine that took d.
func (m *Metrics) ObserveStep(d time.Duration) { m.step.Observe(d.Seconds()) }

// ObserveDrain counts a revocation whose last reader took d.
func (m *Metrics) ObserveDrain(d time.Duration) { m.drain.Observe(d.Seconds()) }

// reading reads a job and counts what comes.
type reading struct {
	m        *Metrics
	job      *engine.Job
	n        int
	finish   engine.FinishReason
	prompted bool
	tokens   int
	// at are the times of the samples' latest tokens.
	at map[int]time.Time
}

func (m *Metrics) read(job *engine.Job, p engine.Params) *reading {
	return &reading{m: m, job: job, n: p.N, finish: engine.FinishAbort, at: map[int]time.Time{}}
}

// next is the job's next update. A job that was aborted ends with an error.
func (r *reading) next(ctx context.Context) (engine.Update, error) {
	u, err := r.job.Next(ctx)
	for err == nil && u.Finish == engine.FinishAbort {
		// Behind the last of these stands why.
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
	}
	if len(u.Tokens) == 0 {
		return u, nil
	}
	if !r.prompted {
		r.prompted = true
		r.m.prompt.Add(float64(r.job.Usage().PromptTokens))
	}
	r.m.generated.Add(float64(len(u.Tokens)))
	r.tokens += len(u.Tokens)
	if last, ok := r.at[u.Sample]; ok {
		r.m.interToken.Observe(u.At.Sub(last).Seconds())
	}
	r.at[u.Sample] = u.At
	return u, nil
}

// done counts a job that nobody reads any more.
func (r *reading) done() {
	r.m.success.WithLabelValues(string(r.finish)).Inc()
	t := r.job.Times()
	between := func(h prometheus.Histogram, from, to time.Time) {
		if !from.IsZero() && !to.IsZero() {
			h.Observe(to.Sub(from).Seconds())
		}
	}
	between(r.m.queue, t.Arrived, t.Admitted)
	between(r.m.firstToken, t.Arrived, t.FirstToken)
	between(r.m.prefill, t.Admitted, t.FirstToken)
	if r.finish == engine.FinishAbort {
		return // its length is its client's doing
	}
	between(r.m.endToEnd, t.Arrived, t.Finished)
	between(r.m.decode, t.FirstToken, t.Finished)
	between(r.m.inference, t.Admitted, t.Finished)
	// Samples run side by side.
	if more := float64(r.tokens)/float64(r.n) - 1; more > 0 && !t.FirstToken.IsZero() && !t.Finished.IsZero() {
		r.m.perToken.Observe(t.Finished.Sub(t.FirstToken).Seconds() / more)
	}
}

// setModel has the metrics be of a model, and of it alone.
func (m *Metrics) setModel(of *Model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.collectors {
		m.registry.Unregister(c)
	}
	m.collectors = append([]prometheus.Collector{newStateCollector(of.Engine, m.labels)}, of.Collectors...)
	m.registry.MustRegister(m.collectors...)
}

// stateCollector reads the engine's state when metrics are read.
type stateCollector struct {
	engine Engine

	waiting, running, kv, config, preemptions *prometheus.Desc
}

func newStateCollector(e Engine, labels prometheus.Labels) *stateCollector {
	desc := func(name, help string, variable ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, variable, labels)
	}
	return &stateCollector{
		engine:      e,
		waiting:     desc("vllm:num_requests_waiting", "Requests that wait for admission."),
		running:     desc("vllm:num_requests_running", "Requests that run."),
		kv:          desc("vllm:kv_cache_usage_perc", "Share of the KV blocks that is taken, from 0 to 1."),
		config:      desc("vllm:cache_config_info", "Sizes of the KV cache.", "block_size", "num_gpu_blocks"),
		preemptions: desc("vllm:num_preemptions_total", "How often a running request gave its KV blocks back."),
	}
}

// Describe implements prometheus.Collector.
func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.waiting, c.running, c.kv, c.config, c.preemptions} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	s := c.engine.State()
	gauge(c.waiting, float64(s.Waiting))
	gauge(c.running, float64(s.Running))
	gauge(c.kv, float64(s.KVUsedBlocks)/float64(max(1, s.KVBlocks)))
	gauge(c.config, 1, strconv.Itoa(s.BlockTokens), strconv.Itoa(s.KVBlocks))
	ch <- prometheus.MustNewConstMetric(c.preemptions, prometheus.CounterValue, float64(s.Preemptions))
}
