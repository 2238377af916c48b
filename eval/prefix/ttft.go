package prefix

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// TTFTOptions describe a measurement of time to first token.
type TTFTOptions struct {
	Open Open
	// Places that are measured, in this order. Default: Places.
	Places []Place
	// Lengths of prefixes, in tokens; a prompt has one token more, which is always computed.
	// Default: DefaultLengths.
	Lengths []int
	// Shorten, if set, reports whether shorter prefixes may help where an engine cannot be opened:
	// the longest is then left out in that place.
	Shorten func(error) bool
	// Repetitions of a request whose prompt is found. Default: 5.
	Repetitions int
	// NewTokens of each request; those after the first are for the time of a decode step.
	// Default: 8; minimum: 2.
	NewTokens int
	// Seed of the prompts.
	Seed uint64
	// Progress, if set, is called after each request, with the tokens of prefixes that have run
	// and all that there are to run.
	Progress func(done, total int64)
}

// DefaultLengths are 1 K to 90 K tokens.
func DefaultLengths() []int { return []int{1024, 2048, 4096, 8192, 16384, 32768, 65536, 90000} }

// EnsureDefaults fills in what is zero.
func (o TTFTOptions) EnsureDefaults() TTFTOptions {
	if len(o.Places) == 0 {
		o.Places = Places
	}
	if len(o.Lengths) == 0 {
		o.Lengths = DefaultLengths()
	}
	if o.Repetitions == 0 {
		o.Repetitions = 5
	}
	if o.NewTokens == 0 {
		o.NewTokens = 8
	}
	return o
}

// Validate reports the first invalid option.
func (o TTFTOptions) Validate() error {
	switch {
	case o.Open == nil:
		return errors.New("prefix: TTFTOptions.Open is not set")
	case slices.Min(o.Lengths) < 1:
		return eval.Inputf("prefix: a prefix of %d tokens: must have at least 1", slices.Min(o.Lengths))
	case o.Repetitions < 1:
		return eval.Inputf("prefix: %d repetitions: must be at least 1", o.Repetitions)
	case o.NewTokens < 2:
		return eval.Inputf("prefix: %d new tokens: must be at least 2, so that there is a decode step", o.NewTokens)
	}
	return nil
}

// TTFTPoint is a prompt with its prefix in a place.
type TTFTPoint struct {
	Place Place `json:"place"`
	// PrefixTokens are those of the prompt but the last.
	PrefixTokens int `json:"prefix_tokens"`
	// MissSeconds is the time to first token of the request that computes the prompt.
	MissSeconds float64 `json:"miss_ttft_s"`
	// Seconds is that of those that find it, CachedTokens how many of its tokens they found:
	// 0 and the time of a miss in Nowhere.
	Seconds      float64 `json:"ttft_s"`
	CachedTokens int     `json:"cached_tokens"`
	// RecomputedTokens are those that the place had, too, and that were computed, since a load was
	// expected to take longer.
	RecomputedTokens int `json:"recomputed_tokens"`
	// LoadSeconds is the time from the submission of the prefix's load until the host sees that its last
	// byte is in the GPU's memory, of requests that find the prompt; LoadShare is that over their time to first token.
	// Both are medians, each of its own; 0 where nothing is loaded: in HBM, in Nowhere, and where all was
	// computed again.
	LoadSeconds float64 `json:"load_s,omitempty"`
	LoadShare   float64 `json:"load_share,omitempty"`
	// DecodeStepSeconds is the mean time of a token after the first.
	DecodeStepSeconds float64 `json:"decode_step_s"`
	// Speedup is the time to first token in Nowhere over Seconds; 0 where it was not measured.
	Speedup float64 `json:"ttft_speedup,omitempty"`
}

// TTFT measures the time to first token by place and length, and appends the points to r,
// also where ctx ends before all are measured. An engine that cannot be opened for a place
// fails the measurement, unless skip, which may be nil, accepts the error.
func TTFT(ctx context.Context, o TTFTOptions, r *Result, skip func(Place, error) bool) error {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	m := ttft{o: o, r: r}
	defer m.compare()
	for _, p := range o.Places {
		m.total += m.tokens(p)
	}
	var before int64 // tokens of the places before, also where they were skipped
	return eachPlace(o.Places, skip, func(_ int, p Place) error {
		m.done, before = before, before+m.tokens(p)
		return m.place(ctx, p)
	})
}

// eachPlace measures the places in turn. An engine that cannot be opened (openError) ends it, unless
// skip, which may be nil, accepts the error.
func eachPlace(places []Place, skip func(Place, error) bool, measure func(i int, p Place) error) error {
	for i, p := range places {
		err := measure(i, p)
		var opening *openError
		if err != nil && (!errors.As(err, &opening) || skip == nil || !skip(p, opening.err)) {
			return fmt.Errorf("prefix: %s: %w", p, err)
		}
	}
	return nil
}

// compare fills in what was measured in Nowhere over what was measured elsewhere.
func (m *ttft) compare() {
	nowhere := map[int]float64{}
	for _, x := range m.r.TTFT {
		if x.Place == Nowhere {
			nowhere[x.PrefixTokens] = x.Seconds
		}
	}
	for i := range m.r.TTFT {
		x := &m.r.TTFT[i]
		x.Speedup = ratio(nowhere[x.PrefixTokens], x.Seconds)
	}
}

// openError is why an engine could not be opened.
type openError struct{ err error }

func (e *openError) Error() string { return e.err.Error() }
func (e *openError) Unwrap() error { return e.err }

// ttft is a measurement of time to first token.
type ttft struct {
	o           TTFTOptions
	r           *Result
	done, total int64
}

// hits is how many requests of a place find their prompt.
func (m *ttft) hits(p Place) int {
	if p == Nowhere {
		return 0
	}
	return m.o.Repetitions
}

// tokens is the sum of the prefixes that run in a place: a warm-up, and of each length the
// miss and the hits.
func (m *ttft) tokens(p Place) int64 {
	sum := int64(slices.Min(m.o.Lengths))
	for _, n := range m.o.Lengths {
		sum += int64(1+m.hits(p)) * int64(n)
	}
	return sum
}

// open opens the engine of a place, and returns the lengths that it has room for.
func (m *ttft) open(ctx context.Context, p Place) (Engine, []int, error) {
	lengths := slices.Clone(m.o.Lengths)
	for {
		longest := slices.Max(lengths)
		kept := slices.Min(lengths) // of the warm-up
		for _, n := range lengths {
			kept += n
		}
		e, err := m.o.Open(ctx, p, kept, longest+1+m.o.NewTokens)
		if err == nil || len(lengths) == 1 || m.o.Shorten == nil || !m.o.Shorten(err) {
			return e, lengths, err
		}
		lengths = slices.DeleteFunc(lengths, func(n int) bool { return n == longest })
		m.total -= int64(1+m.hits(p)) * int64(longest)
		if len(lengths) == 0 {
			return nil, nil, err
		}
	}
}

// place measures all lengths in a place.
func (m *ttft) place(ctx context.Context, p Place) (err error) {
	e, lengths, err := m.open(ctx, p)
	if err != nil {
		return &openError{err}
	}
	defer closing(e, &err)
	info := e.Info()
	m.r.describe(info)
	run := func(tokens []int32) (Batch, error) {
		b, err := e.Run(ctx, [][]int32{tokens}, RunOptions{NewTokens: m.o.NewTokens})
		if err == nil {
			m.done += int64(len(tokens) - 1)
			if m.o.Progress != nil {
				m.o.Progress(m.done, m.total)
			}
		}
		return b, err
	}
	// What is done for the first time takes longer.
	if _, err := run(prompt(slices.Min(m.o.Lengths)+1, info.Vocab, m.o.Seed)); err != nil {
		return err
	}
	for _, n := range lengths {
		tokens := prompt(n+1, info.Vocab, m.o.Seed+uint64(n)+1)
		miss, err := run(tokens)
		if err != nil {
			return err
		}
		x := TTFTPoint{Place: p, PrefixTokens: n, MissSeconds: miss.First[0].Seconds(), Seconds: miss.First[0].Seconds(), DecodeStepSeconds: m.step(&miss).Seconds()}
		if m.hits(p) > 0 {
			if err := e.Settle(ctx); err != nil {
				return err
			}
			var times, loads, steps []time.Duration
			var shares []float64
			for range m.hits(p) {
				hit, err := run(tokens)
				if err != nil {
					return err
				}
				times, loads, steps = append(times, hit.First[0]), append(loads, hit.Loading), append(steps, m.step(&hit))
				shares = append(shares, ratio(hit.Loading.Seconds(), hit.First[0].Seconds()))
				x.CachedTokens, x.RecomputedTokens = hit.Cached, hit.Recomputed
			}
			x.Seconds, x.DecodeStepSeconds = eval.Median(times).Seconds(), eval.Median(steps).Seconds()
			x.LoadSeconds, x.LoadShare = eval.Median(loads).Seconds(), eval.Median(shares)
		}
		m.r.TTFT = append(m.r.TTFT, x)
	}
	return nil
}

// step is the mean time of a token after the first.
func (m *ttft) step(b *Batch) time.Duration {
	return (b.Last[0] - b.First[0]) / time.Duration(m.o.NewTokens-1)
}
