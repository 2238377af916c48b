package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
)

// ErrStepFailed marks an error of Step after which the same step may be run again: a copy
// failed, or a device other than the compute GPU was lost.
var ErrStepFailed = errors.New("step failed")

// ErrDeviceLost marks an error of Step after which no step can run: the compute GPU was lost.
var ErrDeviceLost = errors.New("the compute device is lost")

// SequenceError is an error of one sequence of a step, of which nothing has run. The same step
// can run without that sequence.
type SequenceError struct {
	// Index of the sequence in Step.Sequences.
	Index int
	Err   error
}

func (e *SequenceError) Error() string {
	return fmt.Sprintf("pipeline: sequence %d: %v", e.Index, e.Err)
}

func (e *SequenceError) Unwrap() error { return e.Err }

// Sequence is one sequence's part of a step.
type Sequence struct {
	// Tokens to compute, at positions Start, Start+1, …
	Tokens []int32
	Start  int
	// Table holds the sequence's KV blocks, for at least Start + len(Tokens) tokens.
	Table *kvcache.Table
	// Long selects the long factors of longrope.
	Long bool
	// LogitRows is the number of last Tokens whose logits are computed, with a token sampled
	// after each: 0 for a chunk that does not end its prompt, 1 for generation, more where
	// more logits are wanted.
	LogitRows int
	// Targets are the tokens that follow the first of Tokens, one after another, which are to be judged
	// as if they had been sampled: see Result.Targets. At most as many as Tokens.
	Targets []int32
	// SamplingParams of the sampled tokens. Its Position is ignored, since Start implies it.
	// Its Adjust and Mask apply to the last logit row only: its counts of a token's occurrences
	// hold after the last token.
	SamplingParams SamplingParams
}

// SamplingParams control how a token is sampled; TokenAdjust changes a token's logit before.
type (
	SamplingParams = forward.SamplingParams
	TokenAdjust    = forward.TokenAdjust
)

// Step is a batch of tokens that runs as one.
type Step struct {
	// Sequences of which none attends to keys or values that another one of the step writes: attention may read those before the
	// step's own tokens early.
	Sequences []Sequence
	// Logits requests the logits; it needs Options.HostLogits.
	Logits bool
	// Ahead allows the pipeline to enqueue the next step before the tokens of this one are known, of the same
	// sequences with one token more each, so that the device does not wait for the host. Their tables have blocks for
	// that token. Where Result.Ahead says that it has done so, the caller calls next either Step, with those of the sequences
	// that go on, in the same order and with the same SamplingParams, or Discard. Before that it gives no block of
	// theirs to anybody, except in order of the compute stream. A step that is not as was expected only takes longer.
	Ahead bool
	// MayEnd is how many of the sequences the sampled tokens may end, and so take out of the next step. Partial: the next
	// step's results are then wanted all the same. By the fastest kernels they may differ, by rounding, from those of a step
	// of fewer sequences; without Partial that step runs instead.
	MayEnd  int
	Partial bool
	// Copies of blocks within the KV cache are made, in this order, before the step reads or
	// writes any other. A step that is run again makes them again.
	Copies []kvcache.Copy
	// Wait are points that the step waits for before it reads or writes the KV cache, such as
	// the ends of KV loads. Every point must be reached in the end, whatever happens to the
	// step. A copy that fails must fail its fence; that fails the step and all others that
	// wait for the same point. Before the step is run again, the failed copy must be started
	// again, with another point.
	Wait []device.Point
	// Meanwhile, if set, is called once the step is enqueued, while the device computes: for work of
	// the host that needs no result of it. A step that fails before does not call it.
	Meanwhile func()
	// Done are signaled by the host once the step has succeeded: its writes to the KV cache
	// are complete, and will not be repeated by a retry. A step that fails signals none.
	Done []device.Point
}

// Result is the output of a step, in the order of its sequences and, within one, of its logit
// rows. It is valid until the next step.
type Result struct {
	// Sampled are the sampled tokens, one per logit row; -1 where no token can be sampled, as
	// all logits are NaN or -Inf.
	Sampled []int32
	// Logits are one row of vocabulary size per logit row, if requested: the model's logits,
	// before penalties, biases and temperature; -Inf where a mask bans a token.
	Logits [][]float32
	// LogProbs are one per logit row, nil if no sequence requests them. Rows whose
	// SamplingParams do not request them have the zero LogProb.
	LogProbs []LogProb
	// Targets are one per target.
	Targets []LogProb
	// Ahead: the next step is enqueued, see Step.Ahead. AheadPartial: it is not run again for a part of its sequences.
	Ahead, AheadPartial bool
}

// LogProb holds log-probabilities of one logit row or target, by the model's logits before penalties,
// biases and temperature, of the tokens that its mask allows.
type LogProb struct {
	// Sampled is the log-probability of the sampled token, or of the target.
	Sampled float32
	// Rank of a target is the number of tokens that are at least as probable, itself included; 0 for
	// sampled tokens.
	Rank int32
	// TopIDs are the Limits.TopLogProbs most probable tokens, by falling probability and then
	// by rising id; Top are their log-probabilities.
	TopIDs []int32
	Top    []float32
}

// Pipeline runs steps on one compute stream. It must be used by one goroutine, except for
// Stalls and Graphs, which any may call.
type Pipeline struct {
	o       Options
	compute device.Stream
	// done is recorded at the end of a step.
	done device.Event

	plans  *plans
	access accessChooser
	// offloadedUses of the store before the step.
	offloadedUses int64
	batches       *batcher
	metadata      *stepMetadata
	results       *results
	routing       *routingReader
	// attention is nil where the device computes attention.
	attention *hostAttention
	// cpu is nil where all missing experts are fetched.
	cpu          *cpuExperts
	enqueuer     enqueuer
	graphs       graphs
	ahead        ahead
	meter        meter
	launchPolicy launchPolicy
	tracer       *tracer

	// step is the store's part of the latest step; kvLoads are the points that it waits for.
	step    storeStep
	kvLoads kvLoads
	sources []source
}

// New allocates the pipeline's buffers and makes its streams.
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
	p.meter.machine, p.meter.stream, p.meter.log = o.Machine, p.compute, o.Log
	if o.Trace != nil {
		p.tracer = &tracer{w: o.Trace, clock: o.Machine, stream: p.compute}
	}
	p.chooseAccess()
	p.batches = newBatcher(o, func() forward.HostBatch { return forward.NewHostBatch(o.config(), o.GroupLimits(o.Limits)) })
	if o.Graphs > 0 && o.HostAttention == nil && (p.access.possible || !p.plans.anyOffloaded()) { // a graph neither waits nor fetches
		p.graphs.enable(p.compute, o.Graphs)
		p.batches.roundContexts = p.graphs.stream != nil
	}
	if p.graphs.stream != nil && o.Groups() == 1 && o.Trace == nil {
		if err := p.ahead.open(o); err != nil {
			return err
		}
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
	if p.metadata, err = newStepMetadata(o); err != nil {
		return err
	}
	if p.results, err = newResults(o, executors); err != nil {
		return err
	}
	p.routing = &routingReader{results: p.results}
	if p.routing.copied, err = o.Machine.NewFence("routing on host"); err != nil {
		return err
	}
	p.routing.value = p.routing.copied.Value()
	p.sources = append(p.sources, &p.kvLoads)
	if o.HostAttention != nil {
		if p.attention, err = newHostAttention(o); err != nil {
			return fmt.Errorf("attention on the host: %w", err)
		}
		p.attention.tracer = p.tracer
		p.sources = append(p.sources, p.attention)
	}
	if o.CPUExperts != nil && p.plans.onDemand > 0 {
		if p.cpu, err = newCPUExperts(o); err != nil {
			return fmt.Errorf("experts on the CPU: %w", err)
		}
		p.cpu.tracer = p.tracer
		p.access.divides = p.access.possible && o.CPUShare.Divides()
		p.sources = append(p.sources, p.cpu)
	}
	if o.Experts != nil {
		p.sources = append(p.sources, &p.step)
	}
	p.enqueuer = enqueuer{executors: executors, batches: p.batches, metadata: p.metadata, routing: p.routing, attention: p.attention, cpu: p.cpu, tracer: p.tracer}
	return nil
}

// chooseAccess decides whether steps of few tokens can read experts in place.
func (p *Pipeline) chooseAccess() {
	o := &p.o
	c := &p.access
	c.setting, c.model = o.ExpertAccess, o.AccessModel
	if o.CPUShare != nil && o.CPUShare.Auto() && c.model.Known() && c.model.CPURate > 0 {
		c.cpuLimit = p.plans.onDemand
	}
	if c.setting == configs.CopyAccess || !p.plans.anyOffloaded() || c.setting == configs.AutoAccess && (!c.model.Known() || o.CPUShare != nil && !o.CPUShare.Auto()) {
		return
	}
	err := o.Experts.InPlace()
	if err == nil && !o.Machine.Capabilities().KeepsData {
		err = errors.New("the machine only computes durations, and has none for reads over a link")
	}
	if err != nil {
		p.copyInstead(err)
		return
	}
	c.possible, c.limit = true, min(MaxInPlaceTokens, o.GroupLimits(o.Limits).MaxTokens)
}

// copyInstead makes all steps from now on copy experts, and says why.
func (p *Pipeline) copyInstead(why error) {
	p.access.possible = false
	p.o.Log.Warn("experts are not read in place; steps of few tokens copy those that they need", "setting", "--expert-access "+p.access.setting.String(), "err", why)
}

// Compute returns the stream on which steps run. Nothing else may be enqueued on it during a
// step.
func (p *Pipeline) Compute() device.Stream { return p.compute }

// Step runs s to its end. An error that does not wrap ErrDeviceLost leaves everything as it
// was before the step, except for KV that the step computes again, and for counts of routed
// tokens. A *SequenceError is of one sequence alone.
func (p *Pipeline) Step(ctx context.Context, s *Step) (Result, error) {
	if s.Logits && !p.o.HostLogits {
		return Result{}, errors.New("pipeline: Step.Logits needs Options.HostLogits")
	}
	if x := p.ahead.enqueued; x != nil {
		var expected bool
		if p.ahead.rows, expected = x.rowsOf(s, p.ahead.rows[:0]); expected && (x.partial || len(p.ahead.rows) == len(x.sequences)) {
			return p.collect(ctx, s, p.ahead.rows)
		}
		if err := p.Discard(ctx); err != nil {
			return Result{}, err
		}
	}
	tokens, err := p.batches.validate(s)
	if err != nil {
		return Result{}, err
	}
	plan, start := p.planFor(tokens), p.o.Machine.Now()
	if err := p.batches.split(s, tokens, &plan.shape); err != nil {
		return Result{}, err
	}
	p.meter.begin()
	p.tracer.begin(s, plan)
	p.metadata.used, p.kvLoads = 0, s.Wait
	if err = p.begin(ctx, tokens); err == nil {
		err = p.enqueue(ctx, plan, s)
	}
	if err == nil {
		err = p.enqueueAhead(ctx, s)
	}
	if err == nil {
		if s.Meanwhile != nil {
			s.Meanwhile()
		}
		err = p.end(ctx, p.done)
	}
	if err == nil {
		err = signal(s.Done)
	}
	if err != nil {
		return Result{}, p.recover(ctx, err)
	}
	res := p.complete(s)
	p.ahead.end(p.o.Machine.Now(), start, res.Sampled)
	return res, nil
}

// signal signals the end of a successful step.
func signal(done []device.Point) error {
	for _, d := range done {
		if err := d.Fence.Signal(d.Value); err != nil {
			return fmt.Errorf("pipeline: signal the end of a step: %w", err)
		}
	}
	return nil
}

// planFor chooses how a step of so many tokens gets at offloaded experts, and returns its plan.
func (p *Pipeline) planFor(tokens int) *plan {
	peers := 0.0
	if p.o.Experts != nil {
		peers = p.o.Experts.PeerShare()
	}
	chosen := p.access.choose(tokens, tokens <= p.plans.onDemand, peers)
	share := p.o.CPUShare
	if share != nil {
		share.Restrict(chosen == onCPU, chosen == wholeExperts)
	}
	// Where nothing is fetched, nothing is predicted.
	return p.plans.get(tokens, chosen, share != nil && share.TakesAll() && peers == 0)
}

// begin begins the store's part of a step.
func (p *Pipeline) begin(ctx context.Context, tokens int) (err error) {
	if p.o.Experts == nil {
		return nil
	}
	step, err := p.o.Experts.BeginStep(ctx, p.compute)
	if err != nil {
		return err
	}
	p.step.Step = step
	p.launchPolicy.begin(p.o.Machine.Now(), tokens, p.o.Experts.LinkTime())
	return nil
}

// enqueue enqueues a step, and records its end.
func (p *Pipeline) enqueue(ctx context.Context, plan *plan, s *Step) error {
	if plan.inPlace {
		step, err := p.step.ReadInPlace()
		if errors.Is(err, experts.ErrNotInPlace) { // any more: it was possible in New
			p.copyInstead(err)
		}
		if err != nil {
			return fmt.Errorf("pipeline: %w", err)
		}
		p.step.Step = step
	}
	f := stepState{step: p.step.Step, shape: &plan.shape, singleLaunch: p.launchPolicy.singleLaunch, meter: &p.meter}
	if err := p.enqueuer.run(ctx, plan.uploads, &f); err != nil {
		return err
	}
	if len(p.kvLoads) > 0 {
		p.tracer.wait(KVLoad, p.kvLoads...)
	}
	if err := awaitPoints(p.compute, KVLoad, p.kvLoads, &p.meter); err != nil {
		return fmt.Errorf("pipeline: wait for KV blocks: %w", err)
	}
	if err := p.copyBlocks(s.Copies); err != nil {
		return err
	}
	// Masks are computed while the device runs the layers, so what needs them is enqueued behind these, and is in no graph.
	work := plan.rest()
	if p.batches.masked {
		work = plan.layers
	}
	graph, capture := p.graphs.find(p.batches, plan)
	if graph != nil {
		if err := p.launch(ctx, plan, graph); err != nil {
			return err
		}
	} else if err := p.enqueuer.run(ctx, work, &f); err != nil {
		return err
	}
	if p.batches.masked {
		if err := p.enqueueHeads(ctx, plan, &f); err != nil {
			return err
		}
	}
	p.tracer.results()
	if err := p.results.enqueueCopies(p.batches, s.Logits); err != nil {
		return err
	}
	if err := p.compute.Record(p.done); err != nil {
		return err
	}
	if capture {
		p.graphs.capture(func() error {
			// Step.UseAllLayers, or Step.ReadInPlace, does the store's part at each launch.
			return p.enqueuer.run(ctx, work, &stepState{step: p.step.ForCapture(), shape: &plan.shape})
		})
	}
	return nil
}

// enqueueHeads enqueues the heads of a step with masks, behind these.
func (p *Pipeline) enqueueHeads(ctx context.Context, plan *plan, f *stepState) error {
	for i := range p.batches.used() {
		if b := &p.batches.all[i]; b.host.Masked() {
			if err := p.metadata.uploadMasks(p.compute, b); err != nil {
				return fmt.Errorf("pipeline: masks: %w", err)
			}
		}
	}
	return p.enqueuer.run(ctx, plan.heads, f)
}

// copyBlocks enqueues copies of blocks within the KV cache. Attention on the host, too, runs
// behind the compute stream.
func (p *Pipeline) copyBlocks(copies []kvcache.Copy) error {
	for _, c := range copies {
		if err := p.compute.Copy(p.o.KV.Region(c.Dst).Range, p.o.KV.Region(c.Src).Range); err != nil {
			return fmt.Errorf("pipeline: copy KV block %d to %d: %w", c.Src, c.Dst, err)
		}
	}
	return nil
}

// launch enqueues a captured step behind its uploads.
func (p *Pipeline) launch(ctx context.Context, plan *plan, graph device.Graph) error {
	if p.o.Experts != nil && !plan.inPlace {
		if err := p.step.UseAllLayers(ctx); err != nil {
			return err
		}
	}
	return p.graphs.launch(graph)
}

// end waits for a step's end, and checks all sources for errors.
func (p *Pipeline) end(ctx context.Context, done device.Event) error {
	if err := done.Synchronize(ctx); err != nil {
		return err
	}
	for _, s := range p.sources {
		if err := s.Err(ctx); err != nil {
			return err
		}
	}
	return nil
}

// complete reads the results of a successful step.
func (p *Pipeline) complete(s *Step) Result {
	if stalls, err := p.meter.end(); err == nil {
		p.launchPolicy.end(p.o.Machine.Now(), stalls[ExpertCopy])
	} else {
		p.launchPolicy.fail() // the step's tokens are good all the same
	}
	took := p.o.Machine.Now() - p.launchPolicy.start
	if p.o.Experts != nil {
		p.o.Experts.AddRoutedTokens(p.results.routedTokens())
	}
	if p.plans.anyOffloaded() {
		used := p.o.Experts.OffloadedUses()
		p.access.took(took, used-p.offloadedUses)
		p.offloadedUses = used
	}
	res := p.results.read(p.batches, s.Logits)
	p.ahead.tell(&res)
	return res
}

// recover cleans up after a failed step. It does so even if ctx is done, since no operation
// may still run on memory that will be used retry. The loss of a device whose memory only
// holds copies fails the step as a failed copy does; the loss of the compute GPU is
// permanent.
func (p *Pipeline) recover(ctx context.Context, cause error) error {
	p.launchPolicy.fail()
	p.ahead.drop(&p.step)
	ctx = context.WithoutCancel(ctx)
	errs := []error{cause, p.compute.Recover(ctx)}
	for _, s := range p.sources {
		errs = append(errs, s.Reset(ctx))
	}
	if p.plans.anyOffloaded() {
		p.offloadedUses = p.o.Experts.OffloadedUses() // the next step's do not include this one's
	}
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	retry := false
	for _, err := range errs {
		switch lost := device.LostSpaces(err); {
		case errors.Is(err, experts.ErrNotInPlace): // the next ones copy
			retry = true
		case slices.Contains(lost, p.o.space()), len(lost) == 0 && errors.Is(err, device.ErrLost):
			return fmt.Errorf("pipeline: %w: %w", ErrDeviceLost, err)
		case len(lost) > 0, errors.Is(err, device.ErrCopyFailed):
			retry = true
			for _, s := range lost {
				if p.access.chosen == inPlace { // copies report it themselves
					p.o.Experts.PeerLost(s, err)
				}
			}
		}
	}
	if retry {
		return fmt.Errorf("%w: %w", ErrStepFailed, cause)
	}
	return cause
}

// Suspend releases what the pipeline has on the device beside its memory (captured graphs), and
// returns that memory, for its user to suspend and to resume before the next step. No step may be
// running.
func (p *Pipeline) Suspend() (device.Memory, error) {
	if err := p.graphs.close(); err != nil {
		return nil, fmt.Errorf("pipeline: suspend: %w", err)
	}
	return p.metadata.device, nil
}

// Close releases streams, graphs and buffers. No step may be running.
func (p *Pipeline) Close() error {
	errs := []error{p.graphs.close()}
	if p.attention != nil {
		errs = append(errs, p.attention.close())
	}
	if p.cpu != nil {
		errs = append(errs, p.cpu.close())
	}
	if p.compute != nil {
		errs = append(errs, p.compute.Close())
	}
	errs = append(errs, p.meter.close(), p.ahead.close())
	if p.done != nil {
		errs = append(errs, p.done.Close())
	}
	if p.routing != nil {
		errs = append(errs, p.routing.close())
	}
	if p.metadata != nil {
		errs = append(errs, p.metadata.close())
	}
	if p.results != nil {
		errs = append(errs, p.results.close())
	}
	return errors.Join(errs...)
}
