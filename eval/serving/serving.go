package serving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Options of a measurement.
type Options struct {
	// Requests, in order of arrival.
	Requests []Request
	// OutputLen is the maximum of tokens that a request generates which has none of its own.
	OutputLen int
	// IgnoreEOS has each request generate all of them, where the server knows ignore_eos.
	IgnoreEOS bool
	// Temperature of sampling; 0: greedy.
	Temperature float64
	// Arrivals say when requests arrive; Timed: each does as its At says.
	Arrivals Arrivals
	Timed    bool
	// MaxConcurrency is the maximum of requests that run at once; 0: no limit.
	MaxConcurrency int
	// Warmups are requests like the first that are sent before, and not counted. Default: 1, so that
	// a server that refuses is an error at once.
	Warmups int
	// Seed of the arrivals.
	Seed uint64
	// Percentiles that are reported, above 0 and below 100. Default: 50, 90, 99.
	Percentiles []float64
	// Goodput bounds latencies of requests that count as good.
	Goodput Goodput
	// Detailed results have what was measured of each request.
	Detailed bool
	// Label of the result.
	Label string
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
	o.Warmups = max(o.Warmups, 1)
	o.Arrivals = o.Arrivals.EnsureDefaults()
	return o
}

// Validate names what is invalid.
func (o *Options) Validate() error {
	switch {
	case len(o.Requests) == 0:
		return errors.New("serving: no requests")
	case o.OutputLen < 1:
		return fmt.Errorf("serving: output length %d: must be at least 1", o.OutputLen)
	case o.MaxConcurrency < 0:
		return fmt.Errorf("serving: concurrency %d: must be at least 1, or 0 for no limit", o.MaxConcurrency)
	case o.Timed && (o.Arrivals.Rate != 0 || o.Arrivals.Ramp.Strategy != ""):
		return errors.New("serving: a trace has arrivals of its own: leave out the rate")
	}
	for _, p := range o.Percentiles {
		if !(p > 0 && p < 100) {
			return fmt.Errorf("serving: percentile %v: must be above 0 and below 100", p)
		}
	}
	return o.Arrivals.Validate()
}

// arrivals are when requests arrive.
func (o *Options) arrivals() []time.Duration {
	if !o.Timed {
		return o.Arrivals.Times(len(o.Requests), o.Seed)
	}
	at := make([]time.Duration, len(o.Requests))
	for i := range at {
		at[i] = o.Requests[i].At
	}
	return at
}

// load is a measurement under way.
type load struct {
	progress func(done int)

	mu            sync.Mutex
	samples       []sample
	lost          []sample // those that failed
	errors        map[string]int
	running, peak int
	ended         int
}

// Run sends all requests and measures them. Options.Warmups go ahead that are not counted.
// Where ctx ends, the result is of the
// requests that have completed, beside the error.
func Run(ctx context.Context, c *Client, o Options) (Result, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return Result{}, err
	}
	if err := c.warmUp(ctx, &o); err != nil {
		return Result{}, err
	}
	version := c.Version(ctx)
	l := &load{errors: map[string]int{}, progress: func(done int) {
		if o.Progress != nil {
			o.Progress(done, len(o.Requests))
		}
	}}
	var slots chan struct{}
	if o.MaxConcurrency > 0 {
		slots = make(chan struct{}, o.MaxConcurrency)
	}
	began := time.Now()
	var requests sync.WaitGroup
	for i, at := range o.arrivals() {
		if !until(ctx, began.Add(at)) || !enter(ctx, slots) {
			break
		}
		requests.Go(func() {
			l.start()
			s, err := c.measure(ctx, &o.Requests[i], &o)
			s.request = i
			l.end(ctx, s, err)
			if slots != nil {
				<-slots // last: the next request begins at once
			}
		})
	}
	requests.Wait()
	r := l.result(&o, began)
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

// warmUp sends the requests that are not counted: one, and then the others at once, as far as
// the limit of concurrency allows.
func (c *Client) warmUp(ctx context.Context, o *Options) error {
	if _, err := c.measure(ctx, &o.Requests[0], o); err != nil {
		return err
	}
	slots := make(chan struct{}, min(o.Warmups, cmp.Or(o.MaxConcurrency, o.Warmups)))
	errs := make([]error, o.Warmups-1)
	var requests sync.WaitGroup
	for i := range errs {
		slots <- struct{}{}
		requests.Go(func() {
			_, errs[i] = c.measure(ctx, &o.Requests[0], o)
			<-slots
		})
	}
	requests.Wait()
	return errors.Join(errs...)
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
		s.failure = reason(err)
		l.lost = append(l.lost, s)
		l.failed(s.failure)
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

// result sums up the samples of a measurement that has just ended.
func (l *load) result(o *Options, began time.Time) Result {
	r := Result{
		Run: o.Run, Label: o.Label, Arrivals: o.Arrivals, Timed: o.Timed, MaxConcurrency: o.MaxConcurrency, NumPrompts: len(o.Requests),
		Completed: len(l.samples), Failures: l.errors, PeakConcurrency: l.peak, DurationSeconds: time.Since(began).Seconds(), Goodput: o.Goodput,
	}
	for _, n := range l.errors {
		r.Failed += n
	}
	r.sumUp(l.samples, o, began)
	if o.Detailed {
		r.Details = details(append(l.samples, l.lost...), began)
	}
	return r
}
