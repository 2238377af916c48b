package prefix

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Traffic is what is copied between the GPU and a tier while sequences decode.
type Traffic string

// The kinds of traffic.
const (
	// Quiet: nothing is copied.
	Quiet Traffic = "none"
	// OwnStores: as many blocks are stored as the sequences fill.
	OwnStores Traffic = "own stores"
	// Stores and Loads: blocks are stored, or loaded, one transfer after the other.
	Stores Traffic = "stores"
	Loads  Traffic = "loads"
)

// Decoder decodes a batch of sequences step by step. Nothing else runs on its engine.
type Decoder interface {
	Info() Info
	// Steps runs so many steps, in each of which every sequence has a token, beside that traffic.
	// The steps of each call are the same.
	Steps(ctx context.Context, n int, t Traffic) (Steps, error)
	Close() error
}

// Steps are decode steps that have run.
type Steps struct {
	// Times of each, and Host what each one's host spent on the copies: while the device computes,
	// so the step is longer only where the host is not done before.
	Times, Host []time.Duration
	// Bytes that were copied by the end of the last.
	Bytes int64
}

// OpenDecoder opens a decoder of so many sequences of tokens tokens, with the tier of a place, for
// calls of so many steps.
type OpenDecoder func(ctx context.Context, p Place, sequences, tokens, steps int) (Decoder, error)

// DecodesOptions describe a measurement of what copies of KV blocks cost decode steps.
type DecodesOptions struct {
	Open OpenDecoder
	// Places of the tiers, in this order. Default: Peer, Host, File.
	Places []Place
	// Sequences that decode. Default: 32. Tokens of each. Default: 512.
	Sequences, Tokens int
	// Rounds, in each of which there are Steps steps beside each kind of traffic. Default: 5 of 20.
	Rounds, Steps int
	// Progress, if set, is called after each round of a place, with the steps that have run and all
	// that there are to run.
	Progress func(done, total int64)
}

// EnsureDefaults fills in what is zero.
func (o DecodesOptions) EnsureDefaults() DecodesOptions {
	if len(o.Places) == 0 {
		o.Places = []Place{Peer, Host, File}
	}
	for _, f := range []struct {
		field *int
		value int
	}{{&o.Sequences, 32}, {&o.Tokens, 512}, {&o.Rounds, 5}, {&o.Steps, 20}} {
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	return o
}

// Validate reports the first invalid option.
func (o DecodesOptions) Validate() error {
	switch {
	case o.Open == nil:
		return errors.New("prefix: DecodesOptions.Open is not set")
	case slices.ContainsFunc(o.Places, func(p Place) bool { return p == HBM || p == Nowhere }):
		return eval.Inputf("prefix: stores in %v: must be tiers, which are peer, host and file", o.Places)
	case o.Sequences < 1 || o.Tokens < 1 || o.Rounds < 1 || o.Steps < 1:
		return eval.Inputf("prefix: %d sequences of %d tokens, %d rounds of %d steps: must be at least 1", o.Sequences, o.Tokens, o.Rounds, o.Steps)
	}
	return nil
}

// DecodePoint is decode steps beside a kind of traffic with a tier.
type DecodePoint struct {
	Place     Place   `json:"place"`
	Traffic   Traffic `json:"kv_traffic"`
	Sequences int     `json:"sequences"`
	// ContextTokens of each sequence.
	ContextTokens int `json:"context_tokens"`
	// StepSeconds is the median of all rounds' steps.
	StepSeconds float64 `json:"decode_step_s"`
	// Cost is what the traffic adds to the mean step of a round without, as a fraction of it: the
	// median of all rounds.
	Cost float64 `json:"step_cost"`
	// HostSeconds is the median time of a step that the host spends on starting and ending the
	// copies, while the device computes.
	HostSeconds float64 `json:"kv_host_s"`
	// BytesPerSecond that were copied during the steps.
	BytesPerSecond float64 `json:"kv_bytes_per_s"`
}

// Decodes measures what copies of KV blocks cost running decodes. ctx, r and skip are as those of
// TTFT.
func Decodes(ctx context.Context, o DecodesOptions, r *Result, skip func(Place, error) bool) error {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	m := decodes{o: o, r: r}
	each := int64(o.Rounds * o.Steps * len(traffics))
	m.total = int64(len(o.Places)) * each
	return eachPlace(o.Places, skip, func(i int, p Place) error {
		m.done = int64(i) * each // also where places before were skipped
		return m.place(ctx, p)
	})
}

var traffics = []Traffic{Quiet, OwnStores, Stores, Loads}

// decodes is a measurement of decode steps.
type decodes struct {
	o           DecodesOptions
	r           *Result
	done, total int64
}

// place measures all kinds of traffic with the tier of a place, in turn and in changing order.
func (m *decodes) place(ctx context.Context, p Place) (err error) {
	o := &m.o
	d, err := o.Open(ctx, p, o.Sequences, o.Tokens, o.Steps)
	if err != nil {
		return &openError{err}
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	m.r.describe(d.Info())
	type sum struct {
		steps   []time.Duration
		host    []time.Duration
		rounds  []time.Duration
		elapsed time.Duration
		bytes   int64
	}
	sums := map[Traffic]*sum{}
	for _, t := range traffics {
		sums[t] = &sum{}
		if _, err := d.Steps(ctx, min(o.Steps, 3), t); err != nil { // what is done for the first time takes longer
			return err
		}
	}
	for round := range o.Rounds {
		for i := range traffics {
			t := traffics[(round+i)%len(traffics)]
			ran, err := d.Steps(ctx, o.Steps, t)
			if err != nil {
				return err
			}
			s, all := sums[t], time.Duration(0)
			for _, d := range ran.Times {
				all += d
			}
			s.steps, s.rounds = append(s.steps, ran.Times...), append(s.rounds, all)
			s.host = append(s.host, ran.Host...)
			s.elapsed, s.bytes = s.elapsed+all, s.bytes+ran.Bytes
			m.done += int64(o.Steps)
		}
		if o.Progress != nil {
			o.Progress(m.done, m.total)
		}
	}
	for _, t := range traffics {
		s := sums[t]
		var costs []float64
		for i, d := range s.rounds {
			quiet := sums[Quiet].rounds[i]
			costs = append(costs, ratio((d-quiet).Seconds(), quiet.Seconds()))
		}
		m.r.Decodes = append(m.r.Decodes, DecodePoint{
			Place: p, Traffic: t, Sequences: o.Sequences, ContextTokens: o.Tokens, StepSeconds: eval.Median(s.steps).Seconds(),
			Cost: eval.Median(costs), HostSeconds: eval.Median(s.host).Seconds(), BytesPerSecond: ratio(float64(s.bytes), s.elapsed.Seconds()),
		})
	}
	return nil
}
