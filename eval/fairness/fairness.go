package fairness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
)

// Tier is where the KV blocks of preempted sequences are kept.
type Tier string

// The tiers. None: only what stays in the GPU's memory, and the rest is computed again.
const (
	None Tier = "none"
	Host Tier = "host"
	Peer Tier = "peer"
)

// ParseTiers reads a comma-separated list of tiers. Errors wrap eval.ErrInput.
func ParseTiers(text string) ([]Tier, error) {
	var tiers []Tier
	for _, name := range strings.Split(text, ",") {
		t := Tier(strings.TrimSpace(name))
		switch {
		case !slices.Contains([]Tier{None, Host, Peer}, t):
			return nil, fmt.Errorf("%w: %q is no tier: must be none, host or peer", eval.ErrInput, t)
		case slices.Contains(tiers, t):
			return nil, fmt.Errorf("%w: %s is there twice", eval.ErrInput, t)
		}
		tiers = append(tiers, t)
	}
	return tiers, nil
}

// Line is what one line of the table is of.
type Line struct {
	Policy configs.SchedulingPolicy `json:"scheduling_policy"`
	// Granularity of fair scheduling, in tokens; else 0.
	Granularity int  `json:"fair_granularity,omitempty"`
	Tier        Tier `json:"kv_tier"`
}

// Lines are first come, first served and fair scheduling of each granularity, in each tier.
func Lines(granularities []int, tiers []Tier) []Line {
	var lines []Line
	for _, t := range tiers {
		lines = append(lines, Line{Tier: t})
		for _, g := range granularities {
			lines = append(lines, Line{Policy: configs.FairScheduling, Granularity: g, Tier: t})
		}
	}
	return lines
}

// Engine runs requests once.
type Engine interface {
	// Info describes it.
	Info() Info
	// Run submits each request at its arrival, or between the steps around it, or when nothing
	// else is left to run; and runs all to their ends. They are in order of arrival.
	Run(ctx context.Context, requests []Request) (Outcome, error)
	Close() error
}

// Info describes an engine.
type Info struct {
	// Machine that it runs on.
	eval.Machine
	// Model and DType as a user knows them.
	Model, DType string
	// BlockTokens is the number of tokens of a KV block, Blocks the number of blocks.
	BlockTokens, Blocks int
	// Vocab is the size of the vocabulary.
	Vocab int
}

// Request is one of the workload.
type Request struct {
	Prompt []int32
	// NewTokens are generated, whatever they are.
	NewTokens int
	// Arrival since the start.
	Arrival time.Duration
}

// Outcome is what has become of requests.
type Outcome struct {
	// Arrived is when each was submitted, and Tokens when each of its tokens came, since the
	// start.
	Arrived []time.Duration
	Tokens  [][]time.Duration
	// IDs of these tokens; nil where memory holds no bytes.
	IDs [][]int32
	// Preemptions of sequences, and PrefillTokens computed, those of preempted sequences again.
	Preemptions, PrefillTokens int64
}

// Options describe a measurement.
type Options struct {
	Open  func(ctx context.Context, l Line) (Engine, error)
	Lines []Line
	// Long requests come at the start and get LongTokens each, Short ones get ShortTokens and
	// come Interval apart, the first after Interval. Default: 16 of 192, 32 of 16.
	Long, LongTokens, Short, ShortTokens int
	Interval                             time.Duration
	// PromptTokens of each. Default: 32.
	PromptTokens int
	// Seed of the prompts.
	Seed uint64
	// Progress, if set, is called after each line.
	Progress func(done, total int64)
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	for _, f := range []struct {
		value *int
		by    int
	}{{&o.Long, 16}, {&o.LongTokens, 192}, {&o.Short, 32}, {&o.ShortTokens, 16}, {&o.PromptTokens, 32}} {
		if *f.value == 0 {
			*f.value = f.by
		}
	}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Open == nil:
		return errors.New("fairness: Options.Open is not set")
	case o.Long < 1 || o.LongTokens < 2 || o.Short < 1 || o.ShortTokens < 2 || o.PromptTokens < 1 || o.Interval < 0:
		return fmt.Errorf("%w: %d requests of %d tokens, %d of %d, %v apart, with prompts of %d: must be at least 1, and 2 tokens each",
			eval.ErrInput, o.Long, o.LongTokens, o.Short, o.ShortTokens, o.Interval, o.PromptTokens)
	}
	return nil
}

// Result is a measurement.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	Model       string `json:"model"`
	DType       string `json:"dtype"`
	BlockTokens int    `json:"block_tokens"`
	KVBlocks    int    `json:"kv_blocks"`
	// Long requests of LongTokens each, and Short ones, which come Interval seconds apart.
	Long         int     `json:"long_requests"`
	LongTokens   int     `json:"long_tokens"`
	Short        int     `json:"short_requests"`
	ShortTokens  int     `json:"short_tokens"`
	Interval     float64 `json:"interval_s"`
	PromptTokens int     `json:"prompt_tokens"`
	Points       []Point `json:"points"`
}

// Point is what a policy gave the requests. Times are in seconds.
type Point struct {
	Line
	// Jain is Jain's index of the requests' rates.
	Jain float64 `json:"jain_index"`
	// TTFT is the time to first token, ShortTTFT that of short requests, TPOT the mean time of a
	// request's tokens after the first, ITL the time between two tokens: percentiles, and the maximum.
	TTFT50      float64 `json:"ttft_p50_s"`
	TTFT99      float64 `json:"ttft_p99_s"`
	ShortTTFT50 float64 `json:"short_ttft_p50_s"`
	ShortTTFT99 float64 `json:"short_ttft_p99_s"`
	TPOT50      float64 `json:"tpot_p50_s"`
	TPOT99      float64 `json:"tpot_p99_s"`
	ITL99       float64 `json:"itl_p99_s"`
	ITLMax      float64 `json:"itl_max_s"`
	// Seconds from the start to the last token, and OutputThroughput in tokens per second.
	Seconds          float64 `json:"duration_s"`
	OutputThroughput float64 `json:"output_throughput"`
	Preemptions      int64   `json:"preemptions"`
	// RecomputedTokens were computed in addition to those of the prompts.
	RecomputedTokens int64 `json:"recomputed_tokens"`
	// TokensSHA256 identifies all tokens: see eval.Result.
	TokensSHA256 string `json:"tokens_sha256"`
}

// Measure appends a point to r for each line. Where ctx ends, or a line fails, r has the points of
// those before it, beside the error.
func Measure(ctx context.Context, o Options, r *Result) error {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	r.Long, r.LongTokens, r.Short, r.ShortTokens, r.Interval, r.PromptTokens = o.Long, o.LongTokens, o.Short, o.ShortTokens, o.Interval.Seconds(), o.PromptTokens
	for i, l := range o.Lines {
		p, err := o.line(ctx, l, r)
		if err != nil {
			return fmt.Errorf("fairness: %s with tier %s: %w", l.Policy, l.Tier, err)
		}
		r.Points = append(r.Points, p)
		if o.Progress != nil {
			o.Progress(int64(i+1), int64(len(o.Lines)))
		}
	}
	return nil
}

// line measures one.
func (o *Options) line(ctx context.Context, l Line, r *Result) (p Point, err error) {
	e, err := o.Open(ctx, l)
	if err != nil {
		return Point{}, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	info := e.Info()
	r.Machine, r.Model, r.DType, r.BlockTokens, r.KVBlocks = info.Machine, info.Model, info.DType, info.BlockTokens, info.Blocks
	requests := o.requests(info.Vocab)
	out, err := e.Run(ctx, requests)
	if err != nil {
		return Point{}, err
	}
	return point(l, requests, o.Long, out)
}

// requests are the long ones, then the short ones.
func (o *Options) requests(vocab int) []Request {
	prompts := eval.GeneratePrompts(o.Long+o.Short, o.PromptTokens, vocab, o.Seed)
	requests := make([]Request, len(prompts))
	for i := range requests {
		requests[i] = Request{Prompt: prompts[i], NewTokens: o.LongTokens}
		if i >= o.Long {
			requests[i].NewTokens, requests[i].Arrival = o.ShortTokens, time.Duration(i-o.Long+1)*o.Interval
		}
	}
	return requests
}

// point sums up an outcome, of which the first requests are the long ones.
func point(l Line, requests []Request, long int, out Outcome) (Point, error) {
	p := Point{Line: l, Preemptions: out.Preemptions, RecomputedTokens: out.PrefillTokens}
	var rates, ttft, tpot, itl []float64
	tokens := 0
	for i, at := range out.Tokens {
		if len(at) != requests[i].NewTokens {
			return Point{}, fmt.Errorf("request %d got %d tokens of %d", i, len(at), requests[i].NewTokens)
		}
		last := at[len(at)-1]
		rates = append(rates, float64(len(at))/(last-out.Arrived[i]).Seconds())
		ttft = append(ttft, (at[0] - out.Arrived[i]).Seconds())
		tpot = append(tpot, (last-at[0]).Seconds()/float64(len(at)-1))
		for k := range at[1:] {
			itl = append(itl, (at[k+1] - at[k]).Seconds())
		}
		p.Seconds = max(p.Seconds, last.Seconds())
		p.RecomputedTokens -= int64(len(requests[i].Prompt))
		tokens += len(at)
	}
	p.Jain, p.OutputThroughput = Jain(rates), float64(tokens)/p.Seconds
	p.ShortTTFT50, p.ShortTTFT99 = eval.Percentile(ttft[long:], 50), eval.Percentile(ttft[long:], 99)
	p.TTFT50, p.TTFT99 = eval.Percentile(ttft, 50), eval.Percentile(ttft, 99)
	p.ITLMax = slices.Max(itl)
	if out.IDs != nil {
		p.TokensSHA256 = fmt.Sprintf("%x", eval.Digest(out.IDs))
	}
	p.TPOT50, p.TPOT99, p.ITL99 = eval.Percentile(tpot, 50), eval.Percentile(tpot, 99), eval.Percentile(itl, 99)
	return p, nil
}

// Jain is Jain's index of rates: from 1/n to 1; 0 of none.
func Jain(rates []float64) float64 {
	var sum, squares float64
	for _, x := range rates {
		sum += x
		squares += x * x
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(rates)) * squares)
}
