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

// ErrTokens: trials of one configuration sampled different tokens.
var ErrTokens = errors.New("trials sampled different tokens")

// Options of a measurement.
type Options struct {
	// Prompts that run as one batch.
	Prompts [][]int32
	// NewTokens are sampled of each request. Default: 32; minimum: 2.
	NewTokens int
	// Warmup tokens of each request are sampled first and not counted. Default: 50;
	// negative: none.
	Warmup int
	// Trials that are counted. Default: 5.
	Trials int
	// Prefills is how many of the trials compute the prompts; the rest go on from
	// these. Default: all.
	Prefills int
	// TokensMayDiffer allows trials to sample different tokens: which experts the CPU computes depends
	// on time, and it rounds otherwise than a GPU.
	TokensMayDiffer bool
	// Cut is how many of the prompts were cut to the context of the model.
	Cut int
	// Run that the results are of.
	Run Run
	// Progress, if set, is called after each step.
	Progress func(Progress)
}

// Progress is how far a measurement has got.
type Progress struct {
	// Cell that is measured: Number of Cells, from 1.
	Cell          Cell
	Number, Cells int
	// Done and Total count steps: of all cells of a sweep that have not been measured before.
	Done, Total int
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

// Validate names what is invalid.
func (o Options) Validate() error {
	switch {
	case len(o.Prompts) == 0:
		return Inputf("eval: no prompts to run")
	case o.NewTokens < 2:
		return Inputf("eval: %d new tokens: must be at least 2, so that there is a decode step", o.NewTokens)
	case o.Trials < 1 || o.Prefills < 1:
		return Inputf("eval: %d trials, %d of them with prefill: must be at least 1", o.Trials, o.Prefills)
	}
	return nil
}

// Throughput measures one configuration: warm-up, then trials, each of which computes
// all prompts and then decodes all requests in lockstep. Where ctx ends after a trial, the
// result is of the trials that ended, beside the error.
func Throughput(ctx context.Context, n Node, cell Cell, o Options) (Result, error) {
	o = o.EnsureDefaults()
	m, err := start(ctx, n, cell, o, newMeter(&o, 1))
	if err != nil {
		return Result{}, err
	}
	defer m.batch.Close()
	for range o.Trials {
		if err := m.trial(ctx); err != nil {
			r, _ := m.partial(ctx)
			return r, err
		}
	}
	r, err := m.end(ctx)
	if err != nil {
		r, _ = m.partial(ctx)
	}
	return r, err
}

// meter counts the steps of a measurement.
type meter struct {
	report      func(Progress)
	cells       int
	done, total int
	// next is the number of the cell that starts next, from 0.
	next int
}

func newMeter(o *Options, cells int) *meter {
	if o.Progress == nil {
		return &meter{report: func(Progress) {}, cells: cells}
	}
	return &meter{report: o.Progress, cells: cells}
}

// skip leaves the next cell out of the count.
func (m *meter) skip() { m.cells-- }

// steps reports n more steps of a cell, the number-th, where each cell has each in all.
func (m *meter) steps(c Cell, number, n, each int) {
	m.done += n
	m.total = each * m.cells
	m.report(Progress{Cell: c, Number: number, Cells: m.cells, Done: min(m.done, m.total), Total: m.total})
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
	meter   *meter
	number  int // of the cell, from 1
}

// start allocates the batch and warms up.
func start(ctx context.Context, n Node, cell Cell, o Options, meter *meter) (*measurement, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	info := n.Info()
	requests := len(o.Prompts)
	meter.next++
	m := &measurement{o: o, node: n, info: info, meter: meter, number: meter.next, result: Result{
		Run: o.Run, Machine: info.Machine, Model: info.Model, DType: info.DType, LoadFormat: info.LoadFormat,
		Tier: cell.Tier, OffloadFraction: cell.Fraction, AllPaths: cell.AllPaths, Setting: cell.Setting, HostPaths: max(info.HostPaths, 1),
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

// prefillSteps is in how many steps the prompts are computed.
func (m *measurement) prefillSteps() int {
	each := max(m.info.StepTokens, 1)
	return (m.result.PromptTokens + each - 1) / each
}

// steps is how many steps the cell has in all, but for the repeated last one.
func (m *measurement) steps() int {
	n := m.o.Prefills*m.prefillSteps() + m.o.Trials*(m.o.NewTokens-1)
	if m.o.Warmup > 0 {
		n += m.prefillSteps() + m.o.Warmup
	}
	return n
}

// prefill computes the prompts.
func (m *measurement) prefill(ctx context.Context) error {
	if err := m.batch.Prefill(ctx); err != nil {
		return err
	}
	m.did(m.prefillSteps())
	return nil
}

// decode samples tokens, and reports each.
func (m *measurement) decode(ctx context.Context, from, to int) error {
	if m.o.Progress == nil {
		return m.batch.Decode(ctx, from, to)
	}
	for at := from; at < to; at++ {
		if err := m.batch.Decode(ctx, at, at+1); err != nil {
			return err
		}
		m.did(1)
	}
	return nil
}

func (m *measurement) did(steps int) {
	m.meter.steps(m.result.Cell(), m.number, steps, m.steps())
}

// microBatch is the maximum of tokens of a micro-batch of a decode step.
func microBatch(info *Info, requests int) int {
	n := max(info.MicroBatches, 1)
	return min(info.MicroBatchTokens, (requests+n-1)/n)
}

// warm samples the warm-up tokens, over the same positions again and again.
func (m *measurement) warm(ctx context.Context) error {
	if m.o.Warmup <= 0 {
		return nil
	}
	if err := m.prefill(ctx); err != nil {
		return err
	}
	for left := m.o.Warmup; left > 0; left -= m.o.NewTokens - 1 {
		if err := m.decode(ctx, 1, 1+min(left, m.o.NewTokens-1)); err != nil {
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
	var prefill part
	var err error
	if n < m.o.Prefills {
		if prefill, err = m.timed(ctx, m.prefill); err != nil {
			return fail(err)
		}
		t.PrefillSeconds = prefill.seconds
	} else {
		t.PrefillSeconds, t.PrefillRepeated = r.Trials[n%m.o.Prefills].PrefillSeconds, true
	}
	decode, err := m.timed(ctx, func(ctx context.Context) error { return m.decode(ctx, 1, m.o.NewTokens) })
	if err != nil {
		return fail(err)
	}
	t.DecodeSeconds = decode.seconds
	digest := Digest(m.batch.Tokens())
	if n == 0 {
		m.digest = digest
	}
	if digest != m.digest && !m.o.TokensMayDiffer {
		return fail(ErrTokens)
	}
	m.decoded.add(decode.fetched)
	m.count(&prefill)
	m.count(&decode)
	r.Trials = append(r.Trials, t)
	return nil
}

// part is what one part of a trial took.
type part struct {
	seconds      float64
	fetched      Bytes
	hits, misses int64
	directSteps  int64
	stalls       map[string]float64
}

// count adds a part to the result.
func (m *measurement) count(p *part) {
	r := &m.result
	r.FetchedBytes.add(p.fetched)
	r.Hits += p.hits
	r.Misses += p.misses
	r.DirectSteps += p.directSteps
	for cause, s := range p.stalls {
		r.StallS[cause] += s
	}
}

// timed runs one part of a trial, and counts its uses, fetches and stalls.
func (m *measurement) timed(ctx context.Context, run func(context.Context) error) (part, error) {
	before, err := m.node.Counts(ctx)
	if err != nil {
		return part{}, err
	}
	began := m.node.Now()
	if err := run(ctx); err != nil {
		return part{}, err
	}
	took := m.node.Now() - began
	after, err := m.node.Counts(ctx)
	if err != nil {
		return part{}, err
	}
	if took <= 0 {
		return part{}, errors.New("the virtual clock did not advance, since --emulate gives no rates to compute times from: add some, as pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s, or leave out virtual (--hardware does not set them)")
	}
	p := part{
		seconds: took.Seconds(),
		fetched: Bytes{Host: after.FetchedHost - before.FetchedHost, Peer: after.FetchedPeer - before.FetchedPeer},
		hits:    after.Hits - before.Hits, misses: after.Misses - before.Misses, directSteps: after.DirectSteps - before.DirectSteps,
		stalls: map[string]float64{},
	}
	for cause, s := range after.Stalls {
		p.stalls[cause] = s - before.Stalls[cause]
	}
	return p, nil
}

// partial is the result of the trials that ended before ctx did; false where there are
// none, or ctx has not ended. It has nothing of which experts were used.
func (m *measurement) partial(ctx context.Context) (Result, bool) {
	if ctx.Err() == nil || len(m.result.Trials) == 0 {
		return Result{}, false
	}
	counts, err := m.node.Counts(context.WithoutCancel(ctx))
	if err != nil {
		return Result{}, false
	}
	return m.sum(&counts), true
}

// end repeats the last step, to see which experts it uses, and sums up.
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
	m.result.routed(after.RoutedTokens)
	return m.sum(&after), nil
}

// sum is the result of the trials, with the counts behind them.
func (m *measurement) sum(counts *Counts) Result {
	r := &m.result
	r.HBMPeakBytes = counts.PeakBytes
	if m.info.KeepsData {
		r.TokensSHA256 = hex.EncodeToString(m.digest[:])
	}
	steps := int64(len(r.Trials) * r.steps())
	r.DecodeStepBytes = Bytes{Host: m.decoded.Host / steps, Peer: m.decoded.Peer / steps}
	maps.DeleteFunc(r.StallS, func(_ string, s float64) bool { return s == 0 })
	r.rates()
	r.plan(&m.info)
	return *r
}

// Digest is over all ids in order, each as 32 bits, little-endian.
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
