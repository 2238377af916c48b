package eval

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
)

// ErrTokens: trials of one configuration drew different tokens.
var ErrTokens = errors.New("trials drew different tokens")

// Options of a measurement.
type Options struct {
	// Prompts that run as one batch.
	Prompts [][]int32
	// NewTokens are drawn of each request. Default: 32; at least 2.
	NewTokens int
	// Warmup tokens of each request are drawn first and not counted. Default: 50;
	// negative: none.
	Warmup int
	// Trials are counted. Default: 5.
	Trials int
	// Prefills is how many of the trials compute the prompts; the rest go on from
	// these. Default: all.
	Prefills int
	// Cut says how many of the prompts were cut to the context of the model.
	Cut int
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if o.NewTokens == 0 {
		o.NewTokens = 32
	}
	if o.Warmup == 0 {
		o.Warmup = 50
	}
	if o.Trials == 0 {
		o.Trials = 5
	}
	if o.Prefills == 0 || o.Prefills > o.Trials {
		o.Prefills = o.Trials
	}
	return o
}

// Validate names what cannot be.
func (o Options) Validate() error {
	switch {
	case len(o.Prompts) == 0:
		return inputf("eval: no prompts to run")
	case o.NewTokens < 2:
		return inputf("eval: %d new tokens; a decode step takes at least 2", o.NewTokens)
	case o.Trials < 1 || o.Prefills < 1:
		return inputf("eval: %d trials, %d of them with prefill; ask for at least 1", o.Trials, o.Prefills)
	}
	return nil
}

// Throughput measures one configuration: warm-up, then trials, each of which computes
// all prompts and then decodes all requests in lockstep.
func Throughput(ctx context.Context, n Node, cell Cell, o Options) (Result, error) {
	o = o.EnsureDefaults()
	m, err := start(ctx, n, cell, o)
	if err != nil {
		return Result{}, err
	}
	defer m.batch.Close()
	for range o.Trials {
		if err := m.trial(ctx); err != nil {
			return Result{}, err
		}
	}
	return m.end(ctx)
}

// measurement is a cell under way.
type measurement struct {
	o      Options
	node   Node
	info   Info
	batch  Batch
	result Result
	digest [sha256.Size]byte
	// decoded is what decode steps have fetched.
	decoded Bytes
}

// start takes the batch and warms up.
func start(ctx context.Context, n Node, cell Cell, o Options) (*measurement, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	info := n.Info()
	requests := len(o.Prompts)
	m := &measurement{o: o, node: n, info: info, result: Result{
		Model: info.Model, Device: info.Device, Emulated: info.Emulated, DType: info.DType, LoadFormat: info.LoadFormat,
		Tier: cell.Tier, OffloadFraction: cell.Fraction,
		MicroBatchTokens: microBatch(&info, requests), ExpertGrouping: info.Grouping, Attention: info.Attention,
		Requests: requests, GeneratedTokens: requests * o.NewTokens, WarmupTokens: max(o.Warmup, 0), TruncatedPrompts: o.Cut,
		StallS: map[string]float64{},
	}}
	r := &m.result
	r.NumMicroBatches = (requests + r.MicroBatchTokens - 1) / r.MicroBatchTokens
	for _, p := range o.Prompts {
		r.PromptTokens += len(p)
	}
	var err error
	if m.batch, err = n.Batch(o.Prompts, o.NewTokens); err != nil {
		return nil, err
	}
	if err := m.warm(ctx); err != nil {
		m.batch.Close()
		return nil, fmt.Errorf("eval: warm-up: %w", err)
	}
	return m, nil
}

// microBatch is the most rows of a micro-batch of a decode step.
func microBatch(info *Info, requests int) int {
	least := max(info.MicroBatches, 1)
	return min(info.MicroBatchTokens, (requests+least-1)/least)
}

// warm draws the warm-up tokens, over the same positions again and again.
func (m *measurement) warm(ctx context.Context) error {
	if m.o.Warmup <= 0 {
		return nil
	}
	if err := m.batch.Prefill(ctx); err != nil {
		return err
	}
	for left := m.o.Warmup; left > 0; left -= m.o.NewTokens - 1 {
		if err := m.batch.Decode(ctx, 1, 1+min(left, m.o.NewTokens-1)); err != nil {
			return err
		}
	}
	return nil
}

// trial runs all requests once, and counts.
func (m *measurement) trial(ctx context.Context) error {
	r, n := &m.result, len(m.result.Trials)
	fail := func(err error) error { return fmt.Errorf("eval: trial %d: %w", n+1, err) }
	var t Trial
	if n < m.o.Prefills {
		_, seconds, err := m.timed(ctx, m.batch.Prefill)
		if err != nil {
			return fail(err)
		}
		t.PrefillSeconds = seconds
	} else {
		t.PrefillSeconds, t.PrefillRepeated = r.Trials[n%m.o.Prefills].PrefillSeconds, true
	}
	fetched, seconds, err := m.timed(ctx, func(ctx context.Context) error { return m.batch.Decode(ctx, 1, m.o.NewTokens) })
	if err != nil {
		return fail(err)
	}
	t.DecodeSeconds = seconds
	m.decoded.Host += fetched.Host
	m.decoded.Peer += fetched.Peer
	digest := Digest(m.batch.Tokens())
	if n == 0 {
		m.digest = digest
	}
	if digest != m.digest {
		return fail(ErrTokens)
	}
	r.Trials = append(r.Trials, t)
	return nil
}

// timed runs one part of a trial, and counts what it fetched and waited for.
func (m *measurement) timed(ctx context.Context, part func(context.Context) error) (Bytes, float64, error) {
	before, err := m.node.Counts(ctx)
	if err != nil {
		return Bytes{}, 0, err
	}
	began := m.node.Now()
	if err := part(ctx); err != nil {
		return Bytes{}, 0, err
	}
	took := m.node.Now() - began
	after, err := m.node.Counts(ctx)
	if err != nil {
		return Bytes{}, 0, err
	}
	if took <= 0 {
		return Bytes{}, 0, errors.New("a part of it took no time on the devices' clock: give emulated devices rates, or leave the virtual clock out")
	}
	fetched := Bytes{Host: after.FetchedHost - before.FetchedHost, Peer: after.FetchedPeer - before.FetchedPeer}
	m.result.FetchedBytes.Host += fetched.Host
	m.result.FetchedBytes.Peer += fetched.Peer
	for cause, s := range after.Stalls {
		m.result.StallS[cause] += s - before.Stalls[cause]
	}
	return fetched, took.Seconds(), nil
}

// end repeats the last step, to see which experts it goes through, and sums up.
func (m *measurement) end(ctx context.Context) (Result, error) {
	before, err := m.node.Counts(ctx)
	if err == nil {
		err = m.batch.Decode(ctx, m.o.NewTokens-1, m.o.NewTokens)
	}
	if err != nil {
		return Result{}, fmt.Errorf("eval: the last step again: %w", err)
	}
	after, err := m.node.Counts(ctx)
	if err != nil {
		return Result{}, fmt.Errorf("eval: %w", err)
	}
	for l, layer := range after.RoutedTokens {
		for e := range layer {
			layer[e] -= before.RoutedTokens[l][e]
		}
	}
	r := &m.result
	r.chosen(after.RoutedTokens)
	r.HBMPeakBytes = after.PeakBytes
	if m.info.KeepsData {
		r.TokensSHA256 = hex.EncodeToString(m.digest[:])
	}
	steps := int64(len(r.Trials) * r.steps())
	r.DecodeStepBytes = Bytes{Host: m.decoded.Host / steps, Peer: m.decoded.Peer / steps}
	maps.DeleteFunc(r.StallS, func(_ string, s float64) bool { return s == 0 })
	r.rates()
	r.plan(&m.info)
	return *r, nil
}

// Digest is over all ids in order, each as 32 bits, the lowest byte first.
func Digest(tokens [][]int32) [sha256.Size]byte {
	h := sha256.New()
	var b []byte
	for _, sequence := range tokens {
		b = b[:0]
		for _, id := range sequence {
			b = binary.LittleEndian.AppendUint32(b, uint32(id))
		}
		h.Write(b)
	}
	return [sha256.Size]byte(h.Sum(nil))
}
