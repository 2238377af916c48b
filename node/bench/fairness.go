package bench

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/eval/fairness"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/planner"
)

// Fairness is a node as package fairness measures it: requests run through its engine, to which
// they are submitted between steps.
type Fairness struct {
	n        *node.Node
	hardware *planner.Hardware
	started  time.Duration
	failed   chan error

	mu       sync.Mutex
	requests []fairness.Request
	jobs     []*engine.Job // submitted
	ended    int
	out      fairness.Outcome
	ids      [][]int32
	readers  sync.WaitGroup
}

var _ fairness.Engine = (*Fairness)(nil)

// OpenFairness opens a node with open. hardware replaces what is known of its machine's rates;
// nil: it does not.
func OpenFairness(o node.Options, hardware *planner.Hardware, open func(node.Options) (*node.Node, error)) (*Fairness, error) {
	b := &Fairness{hardware: hardware, failed: make(chan error, 1)}
	o.DeviceTime, o.Listener = true, engine.Listener{StepFinished: func(engine.StepInfo) { b.submitDue(false) }}
	var err error
	b.n, err = open(o)
	return b, err
}

// Info implements fairness.Engine.
func (b *Fairness) Info() fairness.Info {
	i := b.n.Info()
	return fairness.Info{
		Machine: Machine(i.Facts, &i.Settings.Device, b.hardware),
		Model:   modelName(i), DType: i.Config.DType.String(),
		BlockTokens: b.n.KV().BlockTokens(), Blocks: b.n.KV().Blocks(), Vocab: i.Config.Vocab,
	}
}

// Run implements fairness.Engine. It is called once.
func (b *Fairness) Run(ctx context.Context, requests []fairness.Request) (fairness.Outcome, error) {
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	e := b.n.Engine()
	before := e.State()
	b.started, b.requests = b.n.Machine().Now(), requests
	b.out.Arrived, b.out.Tokens = make([]time.Duration, len(requests)), make([][]time.Duration, len(requests))
	b.ids = make([][]int32, len(requests))
	if b.n.Machine().Capabilities().KeepsData {
		b.out.IDs = b.ids
	}
	b.submitDue(true)
	ran := make(chan error, 1)
	go func() { ran <- e.Run(running) }()
	all := make(chan struct{})
	go func() {
		b.readers.Wait()
		close(all)
	}()
	var err error
	select {
	case <-all:
	case err = <-b.failed:
	}
	cancel()
	err = errors.Join(ctx.Err(), err, <-ran)
	<-all
	after := e.State()
	b.out.Preemptions, b.out.PrefillTokens = after.Preemptions-before.Preemptions, after.PrefillTokens-before.PrefillTokens
	return b.out, err
}

// submitDue submits the requests that have arrived, and at least one where nothing else is left
// to run. The engine calls it after each step.
func (b *Fairness) submitDue(idle bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.n.Machine().Now() - b.started
	for len(b.jobs) < len(b.requests) && (idle || b.requests[len(b.jobs)].Arrival <= now) {
		i := len(b.jobs)
		params := engine.DefaultParams()
		params.MaxTokens, params.IgnoreEOS = b.requests[i].NewTokens, true
		job, err := b.n.Engine().Submit(context.Background(), engine.Request{Prompt: b.requests[i].Prompt, Params: params})
		if err != nil {
			b.fail(err)
			return
		}
		idle = false
		b.jobs, b.out.Arrived[i] = append(b.jobs, job), now
		b.readers.Go(func() { b.read(i, job) })
	}
}

// fail ends Run with the first error.
func (b *Fairness) fail(err error) {
	select {
	case b.failed <- err:
	default:
	}
}

// read reads a job to its end.
func (b *Fairness) read(i int, job *engine.Job) {
	var at []time.Duration
	var ids []int32
	for {
		u, err := job.Next(context.Background())
		if err != nil {
			if !errors.Is(err, io.EOF) {
				b.fail(err)
			}
			break
		}
		if len(u.Tokens) > 0 {
			ids = append(ids, u.Tokens[0].ID)
			at = append(at, u.At.Sub(time.Unix(0, 0))-b.started)
		}
	}
	b.mu.Lock()
	b.out.Tokens[i], b.ids[i] = at, ids
	b.ended++
	idle := b.ended == len(b.jobs)
	b.mu.Unlock()
	if idle {
		b.submitDue(true)
	}
}

// Close implements fairness.Engine.
func (b *Fairness) Close() error { return b.n.Close() }
