package prefix

import (
	"context"
	"errors"
	"slices"

	"github.com/moeserve/moeserve/eval"
)

// HitsOptions describe a measurement of throughput by hits.
type HitsOptions struct {
	Open Open
	// Places that are measured, in this order. Default: Places but Nowhere.
	Places []Place
	// Fractions of the requests whose prompts are found, 0 to 1. Default: 0, 0.25, 0.5, 0.75, 1.
	Fractions []float64
	// Requests that are submitted at once. Default: 10,000.
	Requests int
	// PromptTokens of each. Default: 512. NewTokens of each. Default: 1.
	PromptTokens, NewTokens int
	// Pool is the number of prompts that are found, in turn. Default: 100.
	Pool int
	// Seed of the prompts.
	Seed uint64
	// Progress, if set, is called after each fraction of a place, with the requests that have
	// run and all that there are to run.
	Progress func(done, total int64)
}

// EnsureDefaults fills in what is zero.
func (o HitsOptions) EnsureDefaults() HitsOptions {
	if len(o.Places) == 0 {
		o.Places = []Place{HBM, Peer, Host, File}
	}
	if len(o.Fractions) == 0 {
		o.Fractions = []float64{0, 0.25, 0.5, 0.75, 1}
	}
	if o.Requests == 0 {
		o.Requests = 10_000
	}
	if o.PromptTokens == 0 {
		o.PromptTokens = 512
	}
	if o.NewTokens == 0 {
		o.NewTokens = 1
	}
	if o.Pool == 0 {
		o.Pool = 100
	}
	return o
}

// Validate reports the first invalid option.
func (o HitsOptions) Validate() error {
	switch {
	case o.Open == nil:
		return errors.New("prefix: HitsOptions.Open is not set")
	case slices.ContainsFunc(o.Fractions, func(f float64) bool { return !(f >= 0 && f <= 1) }):
		return eval.Inputf("prefix: fractions of hits %v: must be from 0 to 1", o.Fractions)
	case o.Requests < 1 || o.PromptTokens < 1 || o.NewTokens < 1 || o.Pool < 1:
		return eval.Inputf("prefix: %d requests of %d and %d tokens, %d prompts: must be at least 1", o.Requests, o.PromptTokens, o.NewTokens, o.Pool)
	}
	return nil
}

// HitsPoint is a batch of which a fraction of the requests finds its prompts.
type HitsPoint struct {
	Place       Place   `json:"place"`
	HitFraction float64 `json:"hit_fraction"`
	Requests    int     `json:"requests"`
	// PromptTokens of all requests, CachedTokens how many of them were found.
	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	// RecomputedTokens are those that the place had, too, and that were computed, since a load was
	// expected to take longer.
	RecomputedTokens int `json:"recomputed_tokens"`
	// Seconds from the submission of all requests to the last token.
	Seconds float64 `json:"duration_s"`
	// RequestThroughput is in requests per second; 0 where they take no time.
	RequestThroughput float64 `json:"request_throughput"`
	// Speedup is RequestThroughput over that without hits in the same place; 0 where it was
	// not measured.
	Speedup float64 `json:"hits_speedup,omitempty"`
}

// Hits measures throughput by place and fraction of hits. ctx, r and skip are as those of TTFT.
func Hits(ctx context.Context, o HitsOptions, r *Result, skip func(Place, error) bool) error {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	m := hits{o: o, r: r}
	each := int64(len(o.Fractions)) * int64(o.Pool+o.Requests)
	m.total = int64(len(o.Places)) * each
	return eachPlace(o.Places, skip, func(i int, p Place) error {
		m.done = int64(i) * each // also where places before were skipped
		return m.place(ctx, p)
	})
}

// hits is a measurement of throughput by hits.
type hits struct {
	o           HitsOptions
	r           *Result
	done, total int64
}

// place measures all fractions in a place.
func (m *hits) place(ctx context.Context, p Place) (err error) {
	o := &m.o
	e, err := o.Open(ctx, p, o.kept(), o.PromptTokens+o.NewTokens)
	if err != nil {
		return &openError{err}
	}
	defer closing(e, &err)
	info := e.Info()
	m.r.describe(info)
	pool := eval.GeneratePrompts(o.Pool, o.PromptTokens, info.Vocab, o.Seed)
	base := 0.0
	for i, f := range o.Fractions {
		// The requests of the fraction before may have taken the places of the pool.
		if _, err := e.Run(ctx, pool, RunOptions{NewTokens: o.NewTokens}); err != nil {
			return err
		}
		if err := e.Settle(ctx); err != nil {
			return err
		}
		fresh := eval.GeneratePrompts(o.Requests, o.PromptTokens, info.Vocab, o.Seed+uint64(i)+1)
		b, err := e.Run(ctx, mix(fresh, pool, f), RunOptions{NewTokens: o.NewTokens})
		if err != nil {
			return err
		}
		x := HitsPoint{
			Place: p, HitFraction: f, Requests: o.Requests, PromptTokens: o.Requests * o.PromptTokens, CachedTokens: b.Cached, RecomputedTokens: b.Recomputed,
			Seconds: slices.Max(b.Last).Seconds(),
		}
		x.RequestThroughput = ratio(float64(o.Requests), x.Seconds)
		if f == 0 {
			base = x.RequestThroughput
		}
		x.Speedup = ratio(x.RequestThroughput, base)
		m.r.Hits = append(m.r.Hits, x)
		if m.done += int64(o.Pool + o.Requests); o.Progress != nil {
			o.Progress(m.done, m.total)
		}
	}
	return nil
}

// kept is how many tokens must be kept so that every prompt of the pool is still there when
// its turn comes: since its last one, others have been stored, at most those of one fraction.
func (o *HitsOptions) kept() int {
	fewest := 1.0
	for _, f := range o.Fractions {
		if f > 0 {
			fewest = min(fewest, f)
		}
	}
	return int(1.25*min(float64(o.Pool)/fewest, float64(o.Pool+o.Requests))) * o.PromptTokens
}

// mix puts prompts of the pool, in turn, in the place of a fraction of the others, evenly.
func mix(fresh, pool [][]int32, fraction float64) [][]int32 {
	all := slices.Clone(fresh)
	next := 0
	for i := range all {
		if int(float64(i+1)*fraction+1e-9) > next {
			all[i] = pool[next%len(pool)]
			next++
		}
	}
	return all
}
