package compute

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// Options of a measurement.
type Options struct {
	Cases []Case
	// Open opens a node of a case, with random weights and all of its experts resident. It has room for
	// Case.Needs.
	Open func(context.Context, *Case) (eval.Node, error)
	// Repetitions of a step, whose median counts. Default: 10.
	Repetitions int
	// Progress, if set, is called after each step with the number of those measured and of all.
	Progress func(done, total int)
}

// Point is the time of one step.
type Point struct {
	// Model is the case's, with the sizes of its elements; Step is what was timed, with the experts of a layer that had rows.
	Model planner.Model       `json:"model"`
	Step  planner.ComputeStep `json:"step"`
	// Seconds is the median by the devices' clock.
	Seconds float64 `json:"seconds"`
}

// The first decode steps are not timed: a step is captured as a graph when it occurs the second
// time. counted are steps behind those timed, of which it is counted which experts they use.
const skipped, counted = 3, 3

// Decode steps of few sequences follow one another as in an engine, which enqueues them before the tokens of the step in front
// are known: so many in a row, of up to so many sequences.
const inARow, fewSequences = 8, 64

// newTokens of a sequence in a measurement of a step.
func newTokens(s planner.ComputeStep) int {
	if s.Tokens > 1 {
		return 1
	}
	return 1 + rowOf(s)
}

// rowOf is the number of steps that are timed together.
func rowOf(s planner.ComputeStep) int {
	if s.Tokens == 1 && s.Sequences <= fewSequences {
		return inARow
	}
	return 1
}

// A GPU that computes without a pause is slower than one that has just begun: steps of sustainedRows
// or more run for at least sustained seconds, and the later half of them is timed.
const (
	sustainedRows = 1024
	sustained     = 0.25
)

// Measure times the steps of all cases. Where ctx ends, the points that have been measured are
// returned beside the error.
func Measure(ctx context.Context, o Options) (points []Point, err error) {
	if o.Repetitions == 0 {
		o.Repetitions = 10
	}
	total := 0
	for i := range o.Cases {
		if err := o.Cases[i].validate(); err != nil {
			return nil, err
		}
		total += len(o.Cases[i].Steps)
	}
	for i := range o.Cases {
		c := &o.Cases[i]
		n, err := o.Open(ctx, c)
		if err != nil {
			return points, fmt.Errorf("eval: measure kernels with the model %q: %w", c.Model.Name, err)
		}
		for _, s := range c.Steps {
			p, err := measure(ctx, n, c, s, o.Repetitions)
			if err != nil {
				err = fmt.Errorf("eval: measure kernels with the model %q, %d sequences of %d tokens: %w", c.Model.Name, s.Sequences, s.Context, err)
				return points, errors.Join(err, n.Close())
			}
			if points = append(points, p); o.Progress != nil {
				o.Progress(len(points), total)
			}
		}
		if err := n.Close(); err != nil {
			return points, err
		}
	}
	return points, nil
}

// measure times one step.
func measure(ctx context.Context, n eval.Node, c *Case, s planner.ComputeStep, repetitions int) (p Point, err error) {
	length := s.Tokens
	if s.Tokens == 1 {
		length = s.Context - 1
	}
	b, err := n.Batch(randomPrompts(s.Sequences, length, c.Model.Vocab), newTokens(s))
	if err != nil {
		return p, err
	}
	defer b.Close()
	row := rowOf(s)
	steps := func(ctx context.Context, _ int) error { return b.Prefill(ctx) }
	if s.Tokens == 1 {
		if err := b.Prefill(ctx); err != nil {
			return p, err
		}
		// The same positions again and again, which are the same CUDA graphs.
		steps = func(ctx context.Context, n int) error { return b.Decode(ctx, 1, 1+n) }
	}
	if row > 1 {
		repetitions = (repetitions + 1) / 2
	}
	var seconds []float64
	least, total := 0.0, 0.0
	if s.Sequences*s.Tokens >= sustainedRows {
		least = sustained
	}
	for i := 0; i < skipped+repetitions || total < least; i++ {
		began := n.Now()
		if err := steps(ctx, row); err != nil {
			return p, err
		}
		took := (n.Now() - began).Seconds() / float64(row)
		if took <= 0 {
			return p, eval.Inputf("eval: steps take no time on these devices: --emulate gives no rates to compute times from; add some, as flops=78G,bw=3.9GB/s")
		}
		if total += took; i >= skipped {
			seconds = append(seconds, took)
		}
	}
	if least > 0 {
		seconds = seconds[len(seconds)/2:]
	}
	before, err := n.Counts(ctx)
	if err != nil {
		return p, err
	}
	for range counted {
		if err := steps(ctx, 1); err != nil {
			return p, err
		}
		after, err := n.Counts(ctx)
		if err != nil {
			return p, err
		}
		s.Used += distinct(before.RoutedTokens, after.RoutedTokens) / counted
		before = after
	}
	shape := n.Info().Shape // the case's, with the types of the devices' kernels
	shape.Name = c.Model.Name
	return Point{Model: shape, Step: s, Seconds: eval.Median(seconds)}, nil
}

// randomPrompts are prompts of one length that differ.
func randomPrompts(sequences, tokens, vocab int) [][]int32 {
	all := make([][]int32, sequences)
	for i := range all {
		all[i] = make([]int32, tokens)
		for j := range all[i] {
			all[i][j] = int32((7919*i + 104729*j + j*j) % vocab)
		}
	}
	return all
}

// distinct is the mean over layers of the experts that rows were added to.
func distinct(before, after [][]int64) float64 {
	if len(after) == 0 {
		return 0
	}
	n := 0
	for l := range after {
		for e := range after[l] {
			if after[l][e] > before[l][e] {
				n++
			}
		}
	}
	return float64(n) / float64(len(after))
}
