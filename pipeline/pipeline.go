package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
)

// ErrStepFailed marks an error of Step after which the same step may be run
// again: a copy failed, or a device other than the compute device was lost.
var ErrStepFailed = errors.New("step failed")

// Options are the parts a pipeline works with. It owns none of them but its
// streams and its own buffers.
type Options struct {
	Machine device.Machine
	// Space is the compute device's memory.
	Space device.Space
	Model *forward.Model
	// Second is a model over the same weights as Model, with a workspace of its own,
	// for the second of two groups; nil where there is one: see Groups.
	Second *forward.Model
	// Limits of a step; those of the models are GroupLimits of them. Default: Model's.
	Limits forward.Limits
	// Experts is the store of the model's experts, nil for a model without.
	Experts *experts.Store
	// KV lies in the memory of whoever attends.
	KV *kvcache.Pool
	// MicroBatchRows is how many rows attention takes at a time, at most. Default and
	// at most: the step's Limits.MaxRows.
	MicroBatchRows int
	// MicroBatches is into how many micro-batches a step is cut, at least, where it has
	// so many rows. Default: as few as MicroBatchRows allows.
	MicroBatches int
	// Grouping of rows for experts. Those of a layer are all of a merge group; per
	// micro-batch they run in the order of CGOPipe (see MicroBatchwise).
	Grouping configs.Grouping
	// HostAttention attends on the host, over keys and values in its memory. It takes
	// the model's activation type. Default: none, and the device attends.
	HostAttention kernels.Backend
	// SmallBatchRows is the most rows of a step for which only chosen experts are
	// fetched (the plan ChosenOnly). Default: what SmallBatch says; negative: none.
	// On a machine that keeps no data there are none, since no choice comes back.
	SmallBatchRows int
	// HostLogits keeps room in pinned memory for the logits of a step, for those
	// who ask for them. Default: off.
	HostLogits bool
	// Graphs is how many decode steps are kept as graphs, at most, where streams are
	// device.Capturers and every expert is local; negative: none. Default: 16.
	Graphs int
	// Log hears of what makes steps slower. Default: nobody.
	Log *slog.Logger
}

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
	done    device.Event
	shape   Shape
	meter   meter
	// attention is nil where the device attends.
	attention *hostAttention

	// Row data goes through pinned memory to its place on the device: that of a
	// step's micro-batches lies one behind another, uploaded bytes so far.
	pinned, rows device.Memory
	uploaded     int64
	// back is where what the device knows lands in pinned memory, at these places.
	back device.Memory
	at   places
	out  out

	groups  []group
	batches []microBatch
	// The step is cut into so many micro-batches; chosenOnly says which plan it has, and
	// decode that each of its sequences has one row.
	cutInto            int
	chosenOnly, decode bool
	// wanted says of each logit row of the step whether log-probabilities are asked.
	wanted []bool
	// step is the store's part of the latest step.
	step   experts.Step
	plans  map[planKey][]Action
	graphs graphs
	pace   pace

	// answered is raised when a choice or a guess has come back: the step's latest
	// are the values choice and guess, the last of all is answers.
	answered               device.Fence
	choice, guess, answers uint32
	// ids are a choice or a guess as the host reads it.
	ids []int32
	// counts are the activations as the host reads them, [layers, experts]; empty for a
	// model without experts.
	counts []int64
}

// planKey is what the plan of a step depends on, beside the shape.
type planKey struct {
	microBatches int
	chosenOnly   bool
}

// New takes its buffers and its streams.
func New(o Options) (_ *Pipeline, err error) {
	if o.Limits == (forward.Limits{}) {
		o.Limits = o.Model.Limits
	}
	l, c := o.Limits, o.Model.Config
	if o.MicroBatchRows <= 0 || o.MicroBatchRows > l.MaxRows {
		o.MicroBatchRows = l.MaxRows
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Pipeline{o: o, plans: map[planKey][]Action{}}
	for _, m := range []*forward.Model{o.Model, o.Second}[:o.Groups()] {
		if m == nil {
			return nil, errors.New("pipeline: Second is not set: there are two groups where the host attends")
		}
		if m.Limits != o.GroupLimits(l) {
			return nil, fmt.Errorf("pipeline: a model with limits %+v, want %+v", m.Limits, o.GroupLimits(l))
		}
		g := group{model: m}
		if o.HostAttention == nil {
			g.attention = m.Attention(o.KV)
		}
		p.groups = append(p.groups, g)
	}
	p.setShape()
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if o.Experts != nil && c.MoELayers() > 0 {
		p.counts = make([]int64, c.Layers*c.Experts)
	}
	p.batches = make([]microBatch, o.mostBatches(l.MaxRows))
	for i := range p.batches {
		p.batches[i].host = forward.NewHostBatch(c, o.GroupLimits(l))
	}
	p.at = placesOf(c, l, len(p.groups))
	bytes := o.RowDataBytes(l)
	if p.pinned, err = o.Machine.Alloc(device.Host, bytes, "row data, pinned"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.rows, err = o.Machine.Alloc(o.Space, bytes, "row data"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.back, err = o.Machine.Alloc(device.Host, o.BackBytes(c, l), "sampled ids, pinned"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.compute, err = o.Machine.NewStream(o.Space, device.StreamOptions{Name: "compute", Priority: 1}); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	p.meter.machine, p.meter.stream = o.Machine, p.compute
	p.openGraphs()
	if p.done, err = o.Machine.NewEvent(); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.answered, err = o.Machine.NewFence("router's answers"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if o.HostAttention != nil {
		if p.attention, err = newHostAttention(&p.o); err != nil {
			return p, fmt.Errorf("pipeline: attention on the host: %w", err)
		}
	}
	return p, nil
}

// setShape works out what all plans have in common, and for how many rows only chosen
// experts are fetched.
func (p *Pipeline) setShape() {
	o, c := &p.o, p.o.Model.Config
	p.shape = Shape{SharedExpert: c.SharedWidth > 0, HostAttention: o.HostAttention != nil}
	for layer, dense := range c.Dense {
		p.shape.MoE = append(p.shape.MoE, !dense)
		// How many of a layer's experts are local stays the same, whichever they are.
		p.shape.Missing = append(p.shape.Missing, !dense && o.Experts != nil && o.Experts.Plan().Missing(layer) > 0)
	}
	switch {
	case o.SmallBatchRows < 0, !o.Machine.Capabilities().KeepsData, !slices.Contains(p.shape.Missing, true):
		o.SmallBatchRows = 0
	case o.SmallBatchRows == 0:
		o.SmallBatchRows = SmallBatch(c.Experts, c.TopK)
	}
	o.SmallBatchRows = min(o.SmallBatchRows, p.groups[0].model.Limits.MaxRows) // they are in one group
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
	shape, err := p.cut(s)
	if err != nil {
		return Result{}, err
	}
	p.meter.begin()
	if p.o.Experts != nil {
		var step experts.Step
		if step, err = p.o.Experts.BeginStep(ctx, p.compute); err == nil {
			p.step = step
			p.pace.begin(p.o.Machine.Now(), p.stepRows(), p.o.Experts.LinkTime())
		}
	}
	if err == nil {
		err = p.enqueue(ctx, shape, s.Logits)
	}
	return p.finish(ctx, s.Logits, err)
}

// enqueue enqueues a step, and marks its end.
func (p *Pipeline) enqueue(ctx context.Context, shape Shape, withLogits bool) error {
	n := shape.MicroBatches
	plan := p.plan(shape)
	uploads, rest := plan[:n], plan[n:] // plans begin with them
	if err := p.carryOut(ctx, uploads); err != nil {
		return err
	}
	graph, again := p.graphs.find(p.batches[:n], p.decode)
	var err error
	if graph != nil {
		err = p.launch(ctx, graph)
	} else {
		err = p.carryOut(ctx, rest)
	}
	if err == nil {
		err = p.bring(n, withLogits)
	}
	if err == nil && again {
		p.capture(ctx, rest)
	}
	return err
}

// plan of a step.
func (p *Pipeline) plan(shape Shape) []Action {
	key := planKey{microBatches: shape.MicroBatches, chosenOnly: p.chosenOnly}
	plan, ok := p.plans[key]
	if ok {
		return plan
	}
	switch {
	case p.chosenOnly:
		plan = ChosenOnly(shape)
	case p.o.Grouping == configs.PerMicroBatch:
		plan = MicroBatchwise(shape)
	case shape.HostAttention:
		plan = PingPong(shape)
	default:
		plan = LayerByLayer(shape)
	}
	p.plans[key] = plan
	return plan
}

// frame is what a plan's actions hand on to each other: the store's step, and the layer
// that is open, by either kind of opening.
type frame struct {
	step     experts.Step
	use      experts.Use
	unrouted experts.Unrouted
}

// carryOut enqueues the plan.
func (p *Pipeline) carryOut(ctx context.Context, plan []Action) error {
	f := frame{step: p.step}
	for _, a := range plan {
		err := p.meter.resume(a.Kind)
		if err == nil {
			err = p.do(ctx, a, &f)
		}
		if err == nil {
			err = p.meter.pause(a.Kind)
		}
		if err != nil {
			return fmt.Errorf("pipeline: %s: %w", a, err)
		}
	}
	return nil
}

// do enqueues one action.
func (p *Pipeline) do(ctx context.Context, a Action, f *frame) (err error) {
	s, b := p.compute, &p.batches[a.MicroBatch]
	m, g := p.groups[b.group].model, &p.groups[a.Group]
	switch a.Kind {
	case Upload:
		return p.upload(a.MicroBatch)
	case Embed:
		return m.Embed(s, &b.batch)
	case Resolve:
		f.use, err = f.step.Layer(ctx, a.Layer)
	case Open:
		f.unrouted, err = f.step.LayerUnrouted(ctx, a.Layer)
	case Prefetch:
		return f.step.Prefetch(a.Layer)
	case Page:
		return f.step.PrefetchPart(a.Layer, a.MicroBatch, p.cutInto)
	case Attend:
		at := p.groups[b.group].attention
		if err = m.PreAttention(s, a.Layer, &b.batch, at); err == nil {
			err = at.Attend(s, a.Layer, b.batch.Span, &b.batch.Attention)
		}
	case Project:
		if err = m.Project(s, a.Layer, &b.batch); err == nil {
			err = p.attention.attend(s, m, a.Layer, b, &p.meter)
		}
	case Collect:
		return p.attention.collect(s, b, &p.meter)
	case Route:
		return m.PostAttention(s, a.Layer, &b.batch)
	case Shared:
		return g.model.Shared(s, a.Layer, g.span())
	case Experts:
		return p.routed(g.model, a.Layer, g.span(), &f.use)
	case FeedForward:
		return p.feedForward(m, a.Layer, b.batch.Span, &f.use)
	case Close:
		return f.use.Close()
	case MLP:
		return g.model.MLP(s, a.Layer, g.span())
	case Head:
		return m.Head(s, &b.batch)
	default:
		return p.doAsked(ctx, a, g, f)
	}
	return err
}

// doAsked enqueues an action of those steps whose host is told what routers choose.
func (p *Pipeline) doAsked(ctx context.Context, a Action, g *group, f *frame) (err error) {
	s, m := p.compute, g.model
	at := &p.at
	switch a.Kind {
	case Ask:
		ids, _ := m.Routing(g.rows)
		p.choice, err = p.ask(at.choice, ids)
	case Guess:
		if err = m.Guess(s, a.Layer, g.rows); err == nil {
			p.guess, err = p.ask(at.guess, m.Guessed(g.rows))
		}
	case Local:
		if err = m.Group(s, a.Layer, g.span()); err == nil {
			err = p.waves(m, a.Layer, g.span(), f.unrouted.Slots, f.unrouted.Waves)
		}
	case Choose:
		if err = p.answer(ctx, p.choice, at.choice, g.rows); err == nil {
			f.use, err = f.unrouted.FetchChosen(ctx, p.ids)
		}
	case Fetched:
		if err = p.waves(m, a.Layer, g.span(), f.use.Slots, f.use.Waves); err == nil {
			err = m.Combine(s, a.Layer, g.span())
		}
	case Hint:
		if err = p.answer(ctx, p.guess, at.guess, g.rows); err == nil {
			err = f.step.PrefetchPredicted(a.Layer, p.ids)
		}
	default:
		panic(fmt.Sprintf("pipeline: an action of unknown kind %d", a.Kind))
	}
	return err
}

// routed runs a layer's routed experts on a span of rows.
func (p *Pipeline) routed(m *forward.Model, layer int, r forward.Span, use *experts.Use) error {
	if err := m.Group(p.compute, layer, r); err != nil {
		return err
	}
	if err := p.whole(m, layer, r, use); err != nil {
		return err
	}
	return m.Combine(p.compute, layer, r)
}

// whole enqueues all of a layer's experts: in waves, or, where what is fetched will have
// arrived anyway, in one launch, which leaves fewer multiprocessors idle at its end.
func (p *Pipeline) whole(m *forward.Model, layer int, r forward.Span, use *experts.Use) error {
	if !p.pace.together || len(use.Waves) < 2 {
		return p.waves(m, layer, r, use.Slots, use.Waves)
	}
	for i := range use.Waves {
		if err := p.await(&use.Waves[i]); err != nil {
			return err
		}
	}
	return m.Experts(p.compute, layer, r, use.Slots, use.All, p.o.Experts.Layout())
}

// feedForward runs a layer's feed-forward block on a span of rows.
func (p *Pipeline) feedForward(m *forward.Model, layer int, r forward.Span, use *experts.Use) error {
	if !p.shape.MoE[layer] {
		return m.MLP(p.compute, layer, r)
	}
	if err := m.Shared(p.compute, layer, r); err != nil {
		return err
	}
	return p.routed(m, layer, r, use)
}

// waves enqueues experts, each wave behind its own copies.
func (p *Pipeline) waves(m *forward.Model, layer int, r forward.Span, slots kernels.Tensor, waves []experts.Wave) error {
	for i := range waves {
		w := &waves[i]
		if err := p.await(w); err != nil {
			return err
		}
		if err := m.Experts(p.compute, layer, r, slots, w.Experts, p.o.Experts.Layout()); err != nil {
			return err
		}
	}
	return nil
}

// await holds the compute stream back until a wave's experts have arrived.
func (p *Pipeline) await(w *experts.Wave) error {
	if landed(w.Await) {
		return w.Wait(p.compute)
	}
	return p.meter.wait(ExpertCopy, nil, nil, func() error { return w.Wait(p.compute) })
}

// landed says that nothing holds back who awaits these points: the stream still has to
// await them, since that orders its reads, but it does not wait.
func landed(points []device.Point) bool {
	return !slices.ContainsFunc(points, func(p device.Point) bool { return !p.Reached() })
}

// ask enqueues the way of expert ids to the host, and returns the value of answered
// that says that they are there.
func (p *Pipeline) ask(off int64, ids kernels.Tensor) (uint32, error) {
	if err := p.copyBack(off, ids); err != nil {
		return 0, err
	}
	p.answers++
	return p.answers, p.compute.Raise(p.answered, p.answers)
}

// answer waits until answered is at value, and reads the ids of so many rows. What the
// device stands still meanwhile, and until it is given more, is the router's.
func (p *Pipeline) answer(ctx context.Context, value uint32, off int64, rows int) error {
	idle, err := p.meter.mark(p.compute)
	if err != nil {
		return err
	}
	if err := p.answered.Await(ctx, value); err != nil {
		return err
	}
	if err := p.meter.asked(idle); err != nil {
		return err
	}
	n := rows * p.o.Model.Config.TopK
	p.ids = slices.Grow(p.ids[:0], n)[:n]
	p.ints(p.ids, off)
	return nil
}

// drop clears what a failed step has left. It goes on where ctx is done already,
// since nothing may be left running on memory that will be used again. A lost device
// whose memory only held copies fails the step like a copy; without the compute device
// there is no other.
func (p *Pipeline) drop(ctx context.Context, cause error) error {
	p.pace.fail()
	ctx = context.WithoutCancel(ctx)
	broken := p.compute.Recover(ctx)
	if p.attention != nil {
		broken = errors.Join(broken, p.attention.recover(ctx))
	}
	reset := p.step.Drop(ctx)
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	again := false
	for _, err := range []error{cause, broken, reset} {
		switch lost := device.LostSpaces(err); {
		case slices.Contains(lost, p.o.Space), len(lost) == 0 && errors.Is(err, device.ErrLost):
			return fmt.Errorf("pipeline: %w", err)
		case len(lost) > 0, errors.Is(err, device.ErrCopyFailed):
			again = true
		}
	}
	if reset != nil {
		return fmt.Errorf("pipeline: after %w: %w", cause, reset)
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
	if p.answered != nil {
		errs = append(errs, p.answered.Close())
	}
	for _, m := range []device.Memory{p.pinned, p.rows, p.back} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	return errors.Join(errs...)
}
