package serving

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Goodput are bounds on a request's latencies, in seconds; 0: none. A request is good that keeps all
// of them.
type Goodput struct{ TTFT, TPOT, E2EL float64 }

// ParseGoodput reads bounds in milliseconds as vllm bench serve does: "ttft:500", "tpot:50",
// "e2el:10000", separated by spaces or commas.
func ParseGoodput(text string) (g Goodput, err error) {
	for _, pair := range strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == ',' }) {
		key, value, _ := strings.Cut(pair, ":")
		to := map[string]*float64{"ttft": &g.TTFT, "tpot": &g.TPOT, "e2el": &g.E2EL}[key]
		ms, bad := strconv.ParseFloat(value, 64)
		if to == nil || bad != nil || !(ms > 0) || math.IsInf(ms, 0) {
			return g, eval.Inputf("%q is no bound: must be ttft:MS, tpot:MS or e2el:MS, a time in milliseconds above 0", pair)
		}
		*to = ms / 1e3
	}
	return g, nil
}

// good reports whether a request keeps the bounds. A request of one token has no TPOT.
func (g *Goodput) good(s *sample) bool {
	within := func(value, bound float64) bool { return bound == 0 || value <= bound }
	tpot, _ := s.tpot()
	return within(s.ttft.Seconds(), g.TTFT) && within(tpot, g.TPOT) && within(s.e2e.Seconds(), g.E2EL)
}

// tpot is the time per output token after the first, in seconds.
func (s *sample) tpot() (float64, bool) {
	if s.outputTokens < 2 {
		return 0, false
	}
	return (s.e2e - s.ttft).Seconds() / float64(s.outputTokens-1), true
}

// Result of a measurement. Latencies are of completed requests; times are of the client's clock.
// Its JSON is that of vllm bench serve --save-result, with run, base_url, endpoint, server_version,
// failures and goodput in addition.
type Result struct {
	Run           eval.Run
	BaseURL       string
	Endpoint      string
	Model         string
	ServerVersion string
	Label         string
	Arrivals      Arrivals
	// Timed: requests arrived as their trace says.
	Timed bool
	// MaxConcurrency is 0 where nothing limits it.
	MaxConcurrency, NumPrompts, Completed, Failed int
	// Failures counts failed requests by reason.
	Failures map[string]int
	// PeakConcurrency is the maximum of requests that ran at once.
	PeakConcurrency int
	// DurationSeconds is from the first request to the end of the last.
	DurationSeconds                     float64
	TotalInputTokens, TotalOutputTokens int
	RequestThroughput                   float64 // requests/s
	OutputThroughput, TotalThroughput   float64 // tokens/s
	// PeakOutputThroughput is the maximum of tokens within one second, whole ones from the start on, in
	// which each chunk is one token.
	PeakOutputThroughput float64
	// Goodput's bounds, and the requests/s that kept them.
	Goodput        Goodput
	RequestGoodput float64
	// TTFT is the time to the first token, TPOT the time per output token after it, ITL the
	// time between two chunks, E2EL the time from a request's start to its end.
	TTFT, TPOT, ITL, E2EL Distribution
	// Details, with Options.Detailed.
	Details *Details
}

// Details have one element for each request that has completed or failed, in the order of the requests. Times are
// in seconds; StartTimes are since the first request. Of a failed one Errors have the reason, and OutputLens 0.
type Details struct {
	InputLens, OutputLens  []int
	StartTimes, TTFTs      []float64
	ITLs                   [][]float64
	GeneratedTexts, Errors []string
}

// Distribution of a latency, in seconds. All are 0 where nothing was measured.
type Distribution struct {
	Mean, Median float64
	// Stddev is that of the values themselves (divided by their number), as vLLM's.
	Stddev      float64
	Percentiles []Percentile
}

// Percentile is the value that P per cent of the values do not exceed.
type Percentile struct{ P, Value float64 }

// name is how keys name a percentile: p99, p99.9.
func (p Percentile) name() string { return "p" + strconv.FormatFloat(p.P, 'f', -1, 64) }

// Distribute sums up values; percentiles between two of them are interpolated.
func Distribute(values, percentiles []float64) Distribution {
	d := Distribution{Percentiles: make([]Percentile, len(percentiles))}
	sorted := slices.Sorted(slices.Values(values))
	quantile := func(p float64) float64 {
		if len(sorted) == 0 {
			return 0
		}
		at := p / 100 * float64(len(sorted)-1)
		low := int(at)
		high := min(low+1, len(sorted)-1)
		return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
	}
	for i, p := range percentiles {
		d.Percentiles[i] = Percentile{p, quantile(p)}
	}
	d.Median = quantile(50)
	for _, v := range values {
		d.Mean += v / float64(len(values))
	}
	squares := 0.0
	for _, v := range values {
		squares += (v - d.Mean) * (v - d.Mean)
	}
	if len(values) > 0 {
		d.Stddev = math.Sqrt(squares / float64(len(values)))
	}
	return d
}

// latencies are the measured ones, in the order of the table.
func (r *Result) latencies() []latency {
	return []latency{
		{"ttft", "TTFT (time to first token)", &r.TTFT},
		{"tpot", "TPOT (time per output token)", &r.TPOT},
		{"itl", "ITL (inter-token latency)", &r.ITL},
		{"e2el", "end-to-end latency", &r.E2EL},
	}
}

type latency struct {
	key, name string
	*Distribution
}

// field is a key of the JSON object.
type field struct {
	key   string
	value any
}

// fields are those of the JSON object, in order: vLLM's, and then ours.
func (r *Result) fields() []field {
	kind := "openai"
	if r.Endpoint == ChatCompletions {
		kind = "openai-chat"
	}
	a := r.Arrivals.EnsureDefaults()
	var label, rate, limit, goodput any
	if r.Label != "" {
		label = r.Label
	}
	if rate = a.Rate; a.Rate == 0 {
		rate = "inf"
	}
	if r.MaxConcurrency > 0 {
		limit = r.MaxConcurrency
	}
	if r.Goodput != (Goodput{}) {
		goodput = r.RequestGoodput
	}
	var burstiness any = a.Burstiness
	if math.IsInf(a.Burstiness, 1) {
		burstiness = "inf"
	}
	f := []field{
		{"date", r.Run.Date.Format("20060102-150405")},
		{"endpoint_type", kind},
		{"backend", kind},
		{"label", label},
		{"model_id", r.Model},
		{"tokenizer_id", r.Model},
		{"num_prompts", r.NumPrompts},
		{"request_rate", rate},
		{"burstiness", burstiness},
		{"max_concurrency", limit},
	}
	if p := a.Ramp; p.Strategy != "" {
		f = append(f, field{"ramp_up_strategy", p.Strategy}, field{"ramp_up_start_rps", p.Start}, field{"ramp_up_end_rps", p.End})
	}
	f = append(f, []field{
		{"duration", r.DurationSeconds},
		{"completed", r.Completed},
		{"failed", r.Failed},
		{"total_input_tokens", r.TotalInputTokens},
		{"total_output_tokens", r.TotalOutputTokens},
		{"request_throughput", r.RequestThroughput},
		{"request_goodput", goodput},
		{"output_throughput", r.OutputThroughput},
		{"total_token_throughput", r.TotalThroughput},
		{"max_output_tokens_per_s", r.PeakOutputThroughput},
		{"max_concurrent_requests", r.PeakConcurrency},
	}...)
	for _, l := range r.latencies() {
		f = append(f, field{"mean_" + l.key + "_ms", 1e3 * l.Mean}, field{"median_" + l.key + "_ms", 1e3 * l.Median}, field{"std_" + l.key + "_ms", 1e3 * l.Stddev})
		for _, p := range l.Percentiles {
			f = append(f, field{p.name() + "_" + l.key + "_ms", 1e3 * p.Value})
		}
	}
	return append(f, field{"base_url", r.BaseURL}, field{"endpoint", r.Endpoint}, field{"server_version", r.ServerVersion})
}

// MarshalJSON writes the object of vllm bench serve --save-result. Rates that are infinite are the
// string "inf" there.
func (r Result) MarshalJSON() ([]byte, error) {
	f := r.fields()
	bounds := map[string]float64{}
	for key, bound := range map[string]float64{"ttft": r.Goodput.TTFT, "tpot": r.Goodput.TPOT, "e2el": r.Goodput.E2EL} {
		if bound > 0 {
			bounds[key] = 1e3 * bound
		}
	}
	f = append(f, field{"goodput", bounds}, field{"failures", r.Failures}, field{"run", r.Run})
	if d := r.Details; d != nil {
		f = append(f, []field{
			{"input_lens", d.InputLens},
			{"output_lens", d.OutputLens},
			{"start_times", d.StartTimes},
			{"ttfts", d.TTFTs},
			{"itls", d.ITLs},
			{"generated_texts", d.GeneratedTexts},
			{"errors", d.Errors},
		}...)
	}
	var b bytes.Buffer
	for i, x := range f {
		value, err := json.Marshal(x.value)
		if err != nil {
			return nil, fmt.Errorf("serving: %s: %w", x.key, err)
		}
		before := ","
		if i == 0 {
			before = "{"
		}
		fmt.Fprintf(&b, "%s%q:%s", before, x.key, value)
	}
	b.WriteString("}")
	return b.Bytes(), nil
}

// reasons lists why requests failed, the most frequent first.
func (r *Result) reasons() string {
	var reasons []string
	for reason := range r.Failures {
		reasons = append(reasons, reason)
	}
	slices.SortFunc(reasons, func(a, b string) int {
		if d := r.Failures[b] - r.Failures[a]; d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	for i, reason := range reasons {
		reasons[i] = fmt.Sprintf("%s (%d)", reason, r.Failures[reason])
	}
	return strings.Join(reasons, "; ")
}

// sumUp computes what a result has of samples, the first request having begun at a time.
func (r *Result) sumUp(samples []sample, o *Options, began time.Time) {
	var ttft, tpot, itl, e2e []float64
	good := 0
	perSecond := map[int]int{}
	for i := range samples {
		s := &samples[i]
		r.TotalInputTokens += s.promptTokens
		r.TotalOutputTokens += s.outputTokens
		ttft, e2e = append(ttft, s.ttft.Seconds()), append(e2e, s.e2e.Seconds())
		if t, ok := s.tpot(); ok {
			tpot = append(tpot, t)
		}
		if r.Goodput.good(s) {
			good++
		}
		at := s.began.Sub(began) + s.ttft
		perSecond[int(at.Seconds())]++
		for _, d := range s.itl {
			itl = append(itl, d.Seconds())
			at += d
			perSecond[int(at.Seconds())]++
		}
	}
	for _, n := range perSecond {
		r.PeakOutputThroughput = max(r.PeakOutputThroughput, float64(n))
	}
	if seconds := r.DurationSeconds; seconds > 0 {
		r.RequestThroughput = float64(r.Completed) / seconds
		r.RequestGoodput = float64(good) / seconds
		r.OutputThroughput = float64(r.TotalOutputTokens) / seconds
		r.TotalThroughput = float64(r.TotalInputTokens+r.TotalOutputTokens) / seconds
	}
	for _, x := range []struct {
		to     *Distribution
		values []float64
	}{{&r.TTFT, ttft}, {&r.TPOT, tpot}, {&r.ITL, itl}, {&r.E2EL, e2e}} {
		*x.to = Distribute(x.values, o.Percentiles)
	}
}

func details(samples []sample, began time.Time) *Details {
	slices.SortFunc(samples, func(a, b sample) int { return a.request - b.request })
	d := &Details{}
	for i := range samples {
		s := &samples[i]
		itl := make([]float64, len(s.itl))
		for k, t := range s.itl {
			itl[k] = t.Seconds()
		}
		tokens := s.outputTokens
		if s.failure != "" {
			tokens = 0
		}
		d.InputLens, d.OutputLens = append(d.InputLens, s.promptTokens), append(d.OutputLens, tokens)
		d.StartTimes, d.TTFTs = append(d.StartTimes, s.began.Sub(began).Seconds()), append(d.TTFTs, s.ttft.Seconds())
		d.ITLs, d.GeneratedTexts, d.Errors = append(d.ITLs, itl), append(d.GeneratedTexts, s.text), append(d.Errors, s.failure)
	}
	return d
}
