package serving

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Options of a measurement.
type Options struct {
	// Prompts, one for each request.
	Prompts []Prompt
	// OutputLen is the maximum of tokens that a request generates.
	OutputLen int
	// IgnoreEOS has each request generate all of them, where the server knows ignore_eos.
	IgnoreEOS bool
	// Temperature of sampling; 0: greedy.
	Temperature float64
	// Rate is how many requests arrive per second, as a Poisson process; 0: all at once.
	Rate float64
	// MaxConcurrency is the maximum of requests that run at once; 0: no limit.
	MaxConcurrency int
	// Seed of the arrivals.
	Seed uint64
	// Percentiles that are reported, above 0 and below 100. Default: 50, 90, 99.
	Percentiles []float64
	// Run that the result is of.
	Run eval.Run
	// Progress, if set, is called as each request ends, one call at a time.
	Progress func(done, total int)
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if len(o.Percentiles) == 0 {
		o.Percentiles = []float64{50, 90, 99}
	}
	return o
}

// Validate names what is invalid.
func (o *Options) Validate() error {
	switch {
	case len(o.Prompts) == 0:
		return errors.New("serving: no prompts")
	case o.OutputLen < 1:
		return fmt.Errorf("serving: output length %d: must be at least 1", o.OutputLen)
	case !(o.Rate >= 0) || math.IsInf(o.Rate, 0):
		return fmt.Errorf("serving: rate %v: must be a number of requests per second, or 0 for all at once", o.Rate)
	case o.MaxConcurrency < 0:
		return fmt.Errorf("serving: concurrency %d: must be at least 1, or 0 for no limit", o.MaxConcurrency)
	}
	for _, p := range o.Percentiles {
		if !(p > 0 && p < 100) {
			return fmt.Errorf("serving: percentile %v: must be above 0 and below 100", p)
		}
	}
	return nil
}

// Result of a measurement. Latencies are of completed requests; times are in seconds of the
// client's clock.
type Result struct {
	Run           eval.Run `json:"run"`
	BaseURL       string   `json:"base_url"`
	Endpoint      string   `json:"endpoint"`
	Model         string   `json:"model"`
	ServerVersion string   `json:"server_version"`
	// RequestRate is null where all requests are sent at once, MaxConcurrency where nothing
	// limits it.
	RequestRate    *float64 `json:"request_rate"`
	MaxConcurrency *int     `json:"max_concurrency"`
	NumPrompts     int      `json:"num_prompts"`
	Completed      int      `json:"completed"`
	Failed         int      `json:"failed"`
	// Errors counts failed requests by reason.
	Errors map[string]int `json:"errors"`
	// PeakConcurrency is the maximum of requests that ran at once.
	PeakConcurrency int `json:"peak_concurrency"`
	// DurationSeconds is from the first request to the end of the last.
	DurationSeconds   float64 `json:"duration_s"`
	TotalInputTokens  int     `json:"total_input_tokens"`
	TotalOutputTokens int     `json:"total_output_tokens"`
	// RequestThroughput is in requests/s, the others in tokens/s.
	RequestThroughput    float64 `json:"request_throughput"`
	OutputThroughput     float64 `json:"output_throughput"`
	TotalTokenThroughput float64 `json:"total_token_throughput"`
	// TTFT is the time to the first token, TPOT the time per output token after it, ITL the
	// time between two chunks of text, E2EL the time from a request's start to its end.
	TTFT Distribution `json:"ttft_s"`
	TPOT Distribution `json:"tpot_s"`
	ITL  Distribution `json:"itl_s"`
	E2EL Distribution `json:"e2el_s"`
}

// Distribution of a latency, in seconds. All are 0 where nothing was measured.
type Distribution struct {
	Mean float64 `json:"mean"`
	// Stddev is nil of fewer than two values.
	Stddev      *float64     `json:"stddev,omitempty"`
	Percentiles []Percentile `json:"percentiles"`
}

// Percentile is the value that P per cent of the values do not exceed.
type Percentile struct {
	P     float64 `json:"p"`
	Value float64 `json:"value"`
}

// Distribute sums up values; percentiles between two of them are interpolated.
func Distribute(values, percentiles []float64) Distribution {
	d := Distribution{Percentiles: make([]Percentile, len(percentiles))}
	sorted := slices.Sorted(slices.Values(values))
	for i, p := range percentiles {
		d.Percentiles[i].P = p
		if len(sorted) > 0 {
			at := p / 100 * float64(len(sorted)-1)
			low := int(at)
			high := min(low+1, len(sorted)-1)
			d.Percentiles[i].Value = sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
		}
	}
	for _, v := range values {
		d.Mean += v / float64(len(values))
	}
	if len(values) > 1 {
		squares := 0.0
		for _, v := range values {
			squares += (v - d.Mean) * (v - d.Mean)
		}
		s := math.Sqrt(squares / float64(len(values)-1))
		d.Stddev = &s
	}
	return d
}

// arrivalStream separates the random numbers of arrivals from others with the same seed.
const arrivalStream = 0x6172_7269_7661_6c00

// Arrivals are when n requests arrive, as a Poisson process of a rate per second, the first
// at 0; with rate 0 all at 0.
func Arrivals(n int, rate float64, seed uint64) []time.Duration {
	at := make([]time.Duration, n)
	if rate == 0 {
		return at
	}
	r := rand.New(rand.NewPCG(seed, arrivalStream))
	seconds := 0.0
	for i := 1; i < n; i++ {
		seconds += r.ExpFloat64() / rate
		at[i] = time.Duration(min(seconds*1e9, math.MaxInt64/2))
	}
	return at
}

// load is a measurement under way.
type load struct {
	progress func(done int)

	mu            sync.Mutex
	samples       []sample
	errors        map[string]int
	running, peak int
	ended         int
}

// Run sends all requests and measures them. One request goes ahead that is not counted, so
// that a server that refuses is an error at once. Where ctx ends, the result is of the
// requests that have completed, beside the error.
func Run(ctx context.Context, c *Client, o Options) (Result, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return Result{}, err
	}
	if _, err := c.measure(ctx, o.Prompts[0], &o); err != nil {
		return Result{}, err
	}
	version := c.Version(ctx)
	l := &load{errors: map[string]int{}, progress: func(done int) {
		if o.Progress != nil {
			o.Progress(done, len(o.Prompts))
		}
	}}
	var slots chan struct{}
	if o.MaxConcurrency > 0 {
		slots = make(chan struct{}, o.MaxConcurrency)
	}
	began := time.Now()
	var requests sync.WaitGroup
	for i, at := range Arrivals(len(o.Prompts), o.Rate, o.Seed) {
		if !until(ctx, began.Add(at)) || !enter(ctx, slots) {
			break
		}
		requests.Go(func() {
			l.start()
			s, err := c.measure(ctx, o.Prompts[i], &o)
			l.end(ctx, s, err)
			if slots != nil {
				<-slots // last: the next request begins at once
			}
		})
	}
	requests.Wait()
	r := l.result(&o, time.Since(began))
	r.BaseURL = eval.HideCredentials(c.BaseURL)
	r.Endpoint, r.Model, r.ServerVersion = c.Endpoint, c.Model, version
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if r.Completed == 0 {
		return r, fmt.Errorf("serving: all %d requests failed: %s", r.Failed, r.reasons())
	}
	return r, nil
}

// until waits for a time; false where ctx ends first.
func until(ctx context.Context, t time.Time) bool {
	if ctx.Err() != nil {
		return false
	}
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// enter takes a slot, if there are any; false where ctx ends first.
func enter(ctx context.Context, slots chan struct{}) bool {
	if slots == nil {
		return true
	}
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *load) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running++
	l.peak = max(l.peak, l.running)
}

func (l *load) end(ctx context.Context, s sample, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	l.ended++
	switch {
	case err == nil:
		l.samples = append(l.samples, s)
	case ctx.Err() == nil: // what an interrupt aborts has not failed
		l.failed(reason(err))
	}
	l.progress(l.ended)
}

// maxReasons is the maximum number of reasons of failures that are counted separately: a server may put something new
// into each of its messages.
const maxReasons = 32

// failed counts a failure.
func (l *load) failed(reason string) {
	if _, known := l.errors[reason]; !known && len(l.errors) >= maxReasons {
		reason = "other reasons"
	}
	l.errors[reason]++
}

// reason is why a request failed, without the addresses of its connection, of which each has
// its own.
func reason(err error) string {
	text := err.Error()
	var lost *net.OpError
	if errors.As(err, &lost) {
		text = strings.Replace(text, lost.Error(), lost.Op+": "+lost.Err.Error(), 1)
	}
	return text
}

// result sums up the samples.
func (l *load) result(o *Options, took time.Duration) Result {
	r := Result{
		Run: o.Run, NumPrompts: len(o.Prompts), Completed: len(l.samples), Errors: l.errors,
		PeakConcurrency: l.peak, DurationSeconds: took.Seconds(),
	}
	if o.Rate > 0 {
		r.RequestRate = &o.Rate
	}
	if o.MaxConcurrency > 0 {
		r.MaxConcurrency = &o.MaxConcurrency
	}
	for _, n := range l.errors {
		r.Failed += n
	}
	var ttft, tpot, itl, e2e []float64
	for _, s := range l.samples {
		r.TotalInputTokens += s.promptTokens
		r.TotalOutputTokens += s.outputTokens
		ttft, e2e = append(ttft, s.ttft.Seconds()), append(e2e, s.e2e.Seconds())
		if s.outputTokens > 1 {
			tpot = append(tpot, s.decode.Seconds()/float64(s.outputTokens-1))
		}
		for _, d := range s.itl {
			itl = append(itl, d.Seconds())
		}
	}
	if seconds := r.DurationSeconds; seconds > 0 {
		r.RequestThroughput = float64(r.Completed) / seconds
		r.OutputThroughput = float64(r.TotalOutputTokens) / seconds
		r.TotalTokenThroughput = float64(r.TotalInputTokens+r.TotalOutputTokens) / seconds
	}
	for _, x := range []struct {
		to     *Distribution
		values []float64
	}{{&r.TTFT, ttft}, {&r.TPOT, tpot}, {&r.ITL, itl}, {&r.E2EL, e2e}} {
		*x.to = Distribute(x.values, o.Percentiles)
	}
	return r
}

// reasons lists why requests failed, the most frequent first.
func (r *Result) reasons() string {
	var reasons []string
	for reason := range r.Errors {
		reasons = append(reasons, reason)
	}
	slices.SortFunc(reasons, func(a, b string) int {
		if d := r.Errors[b] - r.Errors[a]; d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	for i, reason := range reasons {
		reasons[i] = fmt.Sprintf("%s (%d)", reason, r.Errors[reason])
	}
	return strings.Join(reasons, "; ")
}

// RandomPrompts are count prompts of length random ids of a vocabulary; with length 0
// their lengths are those of eval.GeneratePrompts. The same arguments give the same prompts.
func RandomPrompts(count, length int, vocabulary []int32, seed uint64) []Prompt {
	prompts := make([]Prompt, count)
	for i, ids := range eval.GeneratePrompts(count, length, len(vocabulary), seed) {
		for j, at := range ids {
			ids[j] = vocabulary[at]
		}
		prompts[i].IDs = ids
	}
	return prompts
}
