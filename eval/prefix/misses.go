package prefix

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// MissesOptions describe a measurement of what tiers cost prompts that they do not have.
type MissesOptions struct {
	Open Open
	// Places whose tiers are measured, in this order. Default: Peer, Host, File.
	Places []Place
	// Lengths of prompts, in tokens. Default: DefaultLengths.
	Lengths []int
	// Repetitions of each length, with the tier and without in turn. Default: 5.
	Repetitions int
	// Seed of the prompts.
	Seed uint64
	// Progress, if set, is called after each request, with the tokens of prompts that have run
	// and all that there are to run.
	Progress func(done, total int64)
}

// EnsureDefaults fills in what is zero.
func (o MissesOptions) EnsureDefaults() MissesOptions {
	if len(o.Places) == 0 {
		o.Places = []Place{Peer, Host, File}
	}
	if len(o.Lengths) == 0 {
		o.Lengths = DefaultLengths()
	}
	if o.Repetitions == 0 {
		o.Repetitions = 5
	}
	return o
}

// Validate reports the first invalid option.
func (o MissesOptions) Validate() error {
	switch {
	case o.Open == nil:
		return errors.New("prefix: MissesOptions.Open is not set")
	case slices.ContainsFunc(o.Places, func(p Place) bool { return p == HBM || p == Nowhere }):
		return eval.Inputf("prefix: misses in %v: must be tiers, which are peer, host and file", o.Places)
	case slices.Min(o.Lengths) < 1:
		return eval.Inputf("prefix: a prompt of %d tokens: must have at least 1", slices.Min(o.Lengths))
	case o.Repetitions < 1:
		return eval.Inputf("prefix: %d repetitions: must be at least 1", o.Repetitions)
	}
	return nil
}

// MissPoint is prompts of a length that a tier does not have.
type MissPoint struct {
	Place        Place `json:"place"`
	PromptTokens int   `json:"prompt_tokens"`
	// Seconds is the median time to first token of requests that are looked up and stored in the
	// tier, FirstSeconds that of the first of them; PlainSeconds is the median of those that are
	// not, in the same engine and in turn with them.
	Seconds      float64 `json:"miss_ttft_s"`
	FirstSeconds float64 `json:"first_miss_ttft_s"`
	PlainSeconds float64 `json:"plain_ttft_s"`
	// Cost is what the tier adds to PlainSeconds, as a fraction of it.
	Cost float64 `json:"miss_cost"`
}

// Misses measures what tiers cost prompts that they do not have. ctx, r and skip are as those of
// TTFT.
func Misses(ctx context.Context, o MissesOptions, r *Result, skip func(Place, error) bool) error {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	m := misses{o: o, r: r}
	each := int64(2 * slices.Min(o.Lengths)) // warm-up
	for _, n := range o.Lengths {
		each += int64(2 * o.Repetitions * n)
	}
	m.total = int64(len(o.Places)) * each
	return eachPlace(o.Places, skip, func(i int, p Place) error {
		m.done = int64(i) * each // also where places before were skipped
		return m.place(ctx, p)
	})
}

// misses is a measurement of misses.
type misses struct {
	o           MissesOptions
	r           *Result
	done, total int64
	prompts     uint64 // so far
}

// place measures all lengths with the tier of a place, which has room for two prompts of the
// longest: stores of the last ones evict others.
func (m *misses) place(ctx context.Context, p Place) (err error) {
	longest := slices.Max(m.o.Lengths)
	e, err := m.o.Open(ctx, p, 2*longest, longest+1)
	if err != nil {
		return &openError{err}
	}
	defer closing(e, &err)
	m.r.describe(e.Info())
	run := func(n int, tiers bool) (time.Duration, error) {
		if err := e.Settle(ctx); err != nil {
			return 0, err
		}
		m.prompts++
		b, err := e.Run(ctx, [][]int32{prompt(n, e.Info().Vocab, m.o.Seed+m.prompts)}, RunOptions{NewTokens: 1, WithoutTiers: !tiers})
		if err != nil {
			return 0, err
		}
		if m.done += int64(n); m.o.Progress != nil {
			m.o.Progress(m.done, m.total)
		}
		return b.First[0], nil
	}
	// What is done for the first time takes longer.
	for _, tiers := range []bool{false, true} {
		if _, err := run(slices.Min(m.o.Lengths), tiers); err != nil {
			return err
		}
	}
	for _, n := range m.o.Lengths {
		times := map[bool][]time.Duration{}
		for i := range m.o.Repetitions {
			for _, tiers := range []bool{i%2 == 0, i%2 != 0} {
				d, err := run(n, tiers)
				if err != nil {
					return err
				}
				times[tiers] = append(times[tiers], d)
			}
		}
		x := MissPoint{Place: p, PromptTokens: n, FirstSeconds: times[true][0].Seconds()}
		x.Seconds, x.PlainSeconds = eval.Median(times[true]).Seconds(), eval.Median(times[false]).Seconds()
		x.Cost = ratio(x.Seconds-x.PlainSeconds, x.PlainSeconds)
		m.r.Misses = append(m.r.Misses, x)
	}
	return nil
}
