package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
)

// ErrStepFailed marks an error of Step after which the same step may be run
// again: a copy failed, or a device other than the compute device was lost.
var ErrStepFailed = errors.New("step failed")

// Sequence is one sequence's part of a step.
type Sequence struct {
	// Tokens to compute, at positions Start, Start+1, …
	Tokens []int32
	Start  int
	// Table holds the places of the sequence's keys and values, with room for
	// Start + len(Tokens).
	Table *kvcache.Table
	// Long takes the long factors of longrope.
	Long bool
	// LogitRows is how many of the last Tokens have their logits computed and a
	// token drawn behind them: 0 for a chunk that does not end its prompt, 1 to go
	// on generating, more where the logits are wanted.
	LogitRows int
	// Draw says how tokens are drawn; its Position is left out, as Start says it. Its
	// Adjust counts for the last logit row only: what it says of a token's
	// occurrences holds behind the last token.
	Draw Draw
}

// Draw says how a token is drawn, TokenAdjust how a token's logit is changed
// before.
type (
	Draw        = forward.Draw
	TokenAdjust = forward.TokenAdjust
)

// Step is a set of rows that runs as one.
type Step struct {
	Sequences []Sequence
	// Logits asks for the logits; the pipeline must have been made with HostLogits.
	Logits bool
	// Wait are points behind which keys and values are where the step reads them: it
	// touches none before. Each is reached in the end, whatever becomes of the step. A copy
	// that did not get there must fail its fence, which fails the step, and every other that
	// waits for the same point: before the step is run again, what failed has to be
	// begun again, with another point.
	Wait []device.Point
	// Done are raised by the host once the step has ended well: what it wrote is there,
	// and will not be written again by another try. A step that fails raises none.
	Done []device.Point
}

// Result is what a step gives, in the order of its sequences and, within one,
// of its logit rows. All of it is valid until the next step.
type Result struct {
	// Sampled tokens, one per logit row.
	Sampled []int32
	// Logits, a row of the vocabulary's size per logit row, where asked for: the
	// model's own, without penalties, biases and temperature.
	Logits [][]float32
	// LogProbs, one per logit row, where a Draw asks for them: the zero LogProb for
	// rows whose Draw does not; nil where none does.
	LogProbs []LogProb
}

// LogProb is how likely tokens were behind one logit row, by the model's own
// logits, without penalties, biases and temperature.
type LogProb struct {
	// Chosen is the log-probability of the token drawn.
	Chosen float32
	// TopIDs are the likeliest tokens, by falling probability, the lower id of equal
	// ones first, and Top their log-probabilities: Limits.TopLogProbs of them.
	TopIDs []int32
	Top    []float32
}

// Pipeline carries steps out on one compute stream. One goroutine uses it, but for
// Stalls and Graphs.
type Pipeline struct {
	o       Options
	compute device.Stream
	// done is recorded behind a step.
	done device.Event

	plans   *plans
	batches *batcher
	rows    *stepMetadata
	results *results
	choices *choices
	// attention is nil where the device attends.
	attention *hostAttention
	enqueuer  enqueuer
	graphs    graphs
	meter     meter
	pace      pace
	tracer    *tracer

	// step is the store's part of the latest step, and loads what that waits for.
	step    storeStep
	loads   loads
	sources []source
}

// New takes its buffers and its streams.
func New(o Options) (_ *Pipeline, err error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	p := &Pipeline{o: o, plans: newPlans(&o), graphs: graphs{log: o.Log, clock: o.Machine}}
	if err := p.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("pipeline: %w", err), p.Close())
	}
	return p, nil
}

func (p *Pipeline) open() (err error) {
	o := &p.o
	if p.compute, err = o.Machine.NewStream(o.space(), device.StreamOptions{Name: "compute", Priority: 1}); err != nil {
		return err
	}
	if p.done, err = o.Machine.NewEvent(); err != nil {
		return err
	}
	p.meter.machine, p.meter.stream = o.Machine, p.compute
	if o.Trace != nil {
		p.tracer = &tracer{w: o.Trace, clock: o.Machine, stream: p.compute}
	}
	p.batches = newBatcher(o, func() forward.HostBatch { return forward.NewHostBatch(o.config(), o.GroupLimits(o.Limits)) })
	if o.Graphs > 0 && o.HostAttention == nil && !p.plans.missing() { // a graph neither waits nor fetches
		p.graphs.open(p.compute, o.Graphs)
		p.batches.rounds = p.graphs.stream != nil
	}
	executors := make([]executor, len(o.Executors))
	for i, x := range o.Executors {
		executors[i] = executor{model: x.Model, stream: p.compute, tracer: p.tracer}
		if o.HostAttention == nil {
			executors[i].attention = x.Model.Attention(o.KV)
		}
		if o.Experts != nil {
			executors[i].layout = o.Experts.Layout()
		}
	}
	if p.rows, err = newStepMetadata(o); err != nil {
		return err
	}
	if p.results, err = newResults(o, executors); err != nil {
		return err
	}
	p.choices = &choices{results: p.results}
	if p.choices.arrived, err = o.Machine.NewFence("router's answers"); err != nil {
		return err
	}
	p.sources = append(p.sources, &p.loads)
	if o.HostAttention != nil {
		if p.attention, err = newHostAttention(o); err != nil {
			return fmt.Errorf("attention on the host: %w", err)
		}
		p.attention.tracer = p.tracer
		p.sources = append(p.sources, p.attention)
	}
	if o.Experts != nil {
		p.sources = append(p.sources, &p.step)
	}
	p.enqueuer = enqueuer{executors: executors, batches: p.batches, rows: p.rows, choices: p.choices, attention: p.attention, tracer: p.tracer}
	return nil
}

// Compute is the stream on which steps run; nothing else may be enqueued on it
// while one does.
func (p *Pipeline) Compute() device.Stream { return p.compute }

// Step runs s to its end. An error that wraps ErrStepFailed leaves everything as
// it was before the step but for keys and values that the step computes again, and
// for activation counts.
func (p *Pipeline) Step(ctx context.Context, s *Step) (Result, error) {
	if s.Logits && !p.o.HostLogits {
		return Result{}, errors.New("pipeline: logits asked of a pipeline made without HostLogits")
	}
	rows, err := p.batches.rowsOf(s)
	if err != nil {
		return Result{}, err
	}
	plan := p.plans.of(rows)
	if err := p.batches.cut(s, rows, &plan.shape); err != nil {
		return Result{}, err
	}
	p.meter.begin()
	p.tracer.begin(s, plan)
	p.rows.used, p.loads = 0, s.Wait
	if err = p.begin(ctx, rows); err == nil {
		err = p.enqueue(ctx, plan, s.Logits)
	}
	if err == nil {
		err = p.end(ctx)
	}
	if err != nil {
		return Result{}, p.drop(ctx, err)
	}
	return p.finish(s)
}

// begin begins the store's part of a step of so many rows.
func (p *Pipeline) begin(ctx context.Context, rows int) (err error) {
	if p.o.Experts == nil {
		return nil
	}
	step, err := p.o.Experts.BeginStep(ctx, p.compute)
	if err != nil {
		return err
	}
	p.step.Step = step
	p.pace.begin(p.o.Machine.Now(), rows, p.o.Experts.LinkTime())
	return nil
}

// enqueue enqueues a step, and marks its end.
func (p *Pipeline) enqueue(ctx context.Context, plan *plan, withLogits bool) error {
	f := frame{step: p.step.Step, shape: &plan.shape, together: p.pace.together, meter: &p.meter}
	if err := p.enqueuer.run(ctx, plan.uploads, &f); err != nil {
		return err
	}
	if len(p.loads) > 0 {
		p.tracer.wait(KVLoad, p.loads...)
	}
	if err := hold(p.compute, KVLoad, p.loads, &p.meter); err != nil {
		return fmt.Errorf("pipeline: wait for keys and values: %w", err)
	}
	graph, again := p.graphs.find(p.batches)
	if graph != nil {
		if err := p.launch(ctx, graph); err != nil {
			return err
		}
	} else if err := p.enqueuer.run(ctx, plan.rest, &f); err != nil {
		return err
	}
	p.tracer.results()
	if err := p.results.bring(p.batches, withLogits); err != nil {
		return err
	}
	if err := p.compute.Record(p.done); err != nil {
		return err
	}
	if again {
		p.graphs.capture(func() error {
			// Step.UseAllLayers does the store's part for each launch.
			return p.enqueuer.run(ctx, plan.rest, &frame{step: p.step.ForCapture(), shape: &plan.shape})
		})
	}
	return nil
}

// launch enqueues a whole step behind its uploads.
func (p *Pipeline) launch(ctx context.Context, graph device.Graph) error {
	if p.o.Experts != nil {
		if err := p.step.UseAllLayers(ctx); err != nil {
			return err
		}
	}
	return p.graphs.launch(graph)
}

// end waits for the step's end, and asks whether to believe it.
func (p *Pipeline) end(ctx context.Context) error {
	if err := p.done.Synchronize(ctx); err != nil {
		return err
	}
	for _, s := range p.sources {
		if err := s.Err(ctx); err != nil {
			return err
		}
	}
	return nil
}

// finish says that the step has ended well, and reads what it gave.
func (p *Pipeline) finish(s *Step) (Result, error) {
	for _, d := range s.Done {
		if err := d.Fence.Raise(d.Value); err != nil {
			return Result{}, fmt.Errorf("pipeline: raise the end of a step: %w", err)
		}
	}
	stalls, err := p.meter.end()
	if err != nil {
		return Result{}, err
	}
	p.pace.end(p.o.Machine.Now(), stalls[ExpertCopy])
	if p.o.Experts != nil {
		p.o.Experts.AddRoutedTokens(p.results.activations())
	}
	return p.results.read(p.batches, s.Logits), nil
}

// drop clears what a failed step has left. It goes on where ctx is done already,
// since nothing may be left running on memory that will be used again. A lost device
// whose memory only held copies fails the step like a copy; without the compute device
// there is no other.
func (p *Pipeline) drop(ctx context.Context, cause error) error {
	p.pace.fail()
	ctx = context.WithoutCancel(ctx)
	errs := []error{cause, p.compute.Recover(ctx)}
	for _, s := range p.sources {
		errs = append(errs, s.Reset(ctx))
	}
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	again := false
	for _, err := range errs {
		switch lost := device.LostSpaces(err); {
		case slices.Contains(lost, p.o.space()), len(lost) == 0 && errors.Is(err, device.ErrLost):
			return fmt.Errorf("pipeline: %w", err)
		case len(lost) > 0, errors.Is(err, device.ErrCopyFailed):
			again = true
		}
	}
	if again {
		return fmt.Errorf("%w: %w", ErrStepFailed, cause)
	}
	return cause
}

// Close releases stream and buffers. No step may be running.
func (p *Pipeline) Close() error {
	errs := []error{p.graphs.close()}
	if p.attention != nil {
		errs = append(errs, p.attention.close())
	}
	if p.compute != nil {
		errs = append(errs, p.compute.Close())
	}
	errs = append(errs, p.meter.release())
	if p.done != nil {
		errs = append(errs, p.done.Close())
	}
	if p.choices != nil {
		errs = append(errs, p.choices.close())
	}
	if p.rows != nil {
		errs = append(errs, p.rows.close())
	}
	if p.results != nil {
		errs = append(errs, p.results.close())
	}
	return errors.Join(errs...)
}
