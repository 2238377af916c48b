package pipeline

import (
	"context"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
)

// executor is an Executor with its stream: it runs the layers of one merge group.
type executor struct {
	model  *forward.Model
	stream device.Stream
	// attention is nil where the host computes attention.
	attention *forward.Attention
	layout    kernels.ExpertLayout
	tracer    *tracer
}

// runRouted runs all routed experts of a layer for a span of tokens: in waves, or, with
// singleLaunch, where all fetches are expected to have completed, in one launch, which leaves
// fewer multiprocessors idle at its end. sorted: the router has sorted the tokens' pairs.
func (x *executor) runRouted(layer int, r forward.Span, use *experts.Use, singleLaunch, sorted bool, m *meter) error {
	if !sorted {
		if err := x.model.SortByExpert(x.stream, layer, r); err != nil {
			return err
		}
	}
	if !singleLaunch || len(use.Waves) < 2 {
		if err := x.runWaves(layer, r, use.Slots, use.Waves, m); err != nil {
			return err
		}
		return x.model.Combine(x.stream, layer, r)
	}
	for i := range use.Waves {
		if err := x.awaitWave(&use.Waves[i], m); err != nil {
			return err
		}
	}
	x.tracer.beforeExperts(use.Waves...)
	if err := x.model.Experts(x.stream, layer, r, use.Slots, use.All, x.layout); err != nil {
		return err
	}
	x.tracer.afterExperts()
	return x.model.Combine(x.stream, layer, r)
}

// runResident groups the tokens of a span by expert and runs the resident experts of a layer,
// of which only routed experts are fetched. sorted: the router has sorted their pairs.
func (x *executor) runResident(layer int, r forward.Span, open *experts.Unrouted, sorted bool, m *meter) error {
	if !sorted {
		if err := x.model.SortByExpert(x.stream, layer, r); err != nil {
			return err
		}
	}
	return x.runWaves(layer, r, open.Slots, open.Waves, m)
}

// runWaves enqueues experts, each wave behind its own copies.
func (x *executor) runWaves(layer int, r forward.Span, slots kernels.Tensor, waves []experts.Wave, m *meter) error {
	for i := range waves {
		w := &waves[i]
		if err := x.awaitWave(w, m); err != nil {
			return err
		}
		x.tracer.beforeExperts(*w)
		if err := x.model.Experts(x.stream, layer, r, slots, w.Experts, x.layout); err != nil {
			return err
		}
	}
	x.tracer.afterExperts()
	return nil
}

// awaitWave makes the stream wait for a wave's copies.
func (x *executor) awaitWave(w *experts.Wave, m *meter) error {
	if len(w.WaitFor) > 0 {
		x.tracer.wait(ExpertCopy, w.WaitFor...)
	}
	return awaitPoints(x.stream, ExpertCopy, w.WaitFor, m)
}

// awaitPoints makes a stream wait for points, and measures the stall.
func awaitPoints(s device.Stream, cause Cause, points []device.Point, m *meter) error {
	await := func() error {
		for _, p := range points {
			if err := s.WaitFence(p.Fence, p.Value); err != nil {
				return err
			}
		}
		return nil
	}
	if allReached(points) {
		return await() // no stall, but it orders the stream's reads after the copies' writes
	}
	return m.wait(cause, nil, nil, await)
}

func allReached(points []device.Point) bool {
	return !slices.ContainsFunc(points, func(p device.Point) bool { return !p.Reached() })
}

// stepState is passed from action to action of a plan.
type stepState struct {
	// step is the store's; within a graph capture it is the store's variant for captures.
	step experts.Step
	// use is the open layer; unrouted is an open layer that waits for its router's selection.
	use      experts.Use
	unrouted experts.Unrouted
	// routed are the expert ids that the router of the open layer selected, predicted those
	// predicted for a later layer.
	routed, predicted routingCopy
	// onCPU are those of the open layer's experts that the CPU computes, once selecting is false: until then
	// they are not known.
	onCPU     []experts.HostExpert
	selecting bool
	// shape of the plan.
	shape *Shape
	// singleLaunch runs all experts of a layer in one launch.
	singleLaunch bool
	// meter measures stalls; nil within a graph capture.
	meter *meter
}

// enqueuer enqueues the actions of plans.
type enqueuer struct {
	executors []executor
	batches   *batcher
	metadata  *stepMetadata
	routing   *routingReader
	// attention is nil where the device computes attention.
	attention *hostAttention
	// cpu is nil where all missing experts are fetched.
	cpu    *cpuExperts
	tracer *tracer
	// ahead counts layers whose experts the CPU got before the host had enqueued the rest of the layer.
	ahead int64
}

// run enqueues actions in their order.
func (q *enqueuer) run(ctx context.Context, plan []Action, f *stepState) error {
	for _, a := range plan {
		q.tracer.action(a, f.shape)
		err := f.meter.beforeAction(a.Kind)
		if err == nil {
			err = q.enqueue(ctx, a, f)
		}
		if err == nil {
			err = f.meter.afterAction(a.Kind)
		}
		if err != nil {
			return fmt.Errorf("pipeline: %s: %w", a, err)
		}
	}
	return nil
}

// enqueue enqueues one action. An action of a micro-batch runs on the executor of its group.
func (q *enqueuer) enqueue(ctx context.Context, a Action, f *stepState) (err error) {
	if f.selecting && a.Kind != ComputeOnCPU {
		if err := q.startOnCPU(ctx, f, true); err != nil {
			return err
		}
	}
	b := &q.batches.all[a.MicroBatch]
	owner := &q.executors[b.group]
	x, tokens := &q.executors[a.Group], q.batches.groups[a.Group].span()
	// Where a group is one micro-batch, the router sorts.
	sorted := f.shape.microBatchesOf(a.Group) == 1
	if a.Kind.perMicroBatch() {
		sorted = f.shape.microBatchesOf(b.group) == 1
	}
	switch a.Kind {
	case Upload:
		return q.metadata.upload(owner.stream, b)
	case Embed:
		return owner.model.Embed(owner.stream, &b.batch)
	case Resolve:
		f.use, err = f.step.Layer(ctx, a.Layer)
	case ResolveOnDemand:
		f.unrouted, err = f.step.LayerUnrouted(ctx, a.Layer)
	case Prefetch:
		return f.step.Prefetch(a.Layer)
	case PagePrefetch:
		return f.step.PrefetchPart(a.Layer, a.MicroBatch, a.Pages)
	case Attention:
		return owner.model.Attend(owner.stream, a.Layer, &b.batch, owner.attention)
	case ProjectQKV:
		if err = owner.model.Project(owner.stream, a.Layer, &b.batch); err == nil {
			err = q.attention.enqueue(owner.stream, owner.model, a.Layer, b, f.meter)
		}
	case AwaitAttention:
		return q.attention.await(owner.stream, b, f.meter)
	case Route:
		return owner.model.PostAttention(owner.stream, a.Layer, &b.batch, sorted, f.shape.RouteInExperts)
	case RouteShared:
		return owner.model.PostAttentionShared(owner.stream, a.Layer, &b.batch)
	case RouterToHost:
		if q.cpu != nil {
			if err := q.cpu.copyInput(x, tokens); err != nil {
				return err
			}
		}
		ids, _ := x.model.Routing(tokens.Rows)
		f.routed, err = q.routing.copyToHost(x.stream, q.routing.results.offsets.routed, ids)
		f.selecting = f.shape.CPUExperts
	case PredictNext:
		if err = x.model.PredictNext(x.stream, a.Layer, tokens.Rows); err == nil {
			f.predicted, err = q.routing.copyToHost(x.stream, q.routing.results.offsets.predicted, x.model.PredictedRouting(tokens.Rows))
		}
	case SharedExpert:
		return x.model.SharedExpert(x.stream, a.Layer, tokens)
	case RoutedExperts:
		return x.runRouted(a.Layer, tokens, &f.use, f.singleLaunch, sorted, f.meter)
	case RunResident:
		return x.runResident(a.Layer, tokens, &f.unrouted, sorted, f.meter)
	case FetchChosen:
		ids := q.routing.ids
		if !f.shape.CPUExperts { // ComputeOnCPU has not waited for them
			ids, err = q.routing.await(ctx, f.routed, f.meter)
		}
		if err == nil {
			f.use, err = f.unrouted.FetchChosen(ctx, ids)
		}
	case ComputeOnCPU:
		if f.selecting {
			err = q.startOnCPU(ctx, f, false)
		}
		if err != nil {
			return err
		}
		return q.cpu.readDivided(x, a.Layer, tokens, f.onCPU)
	case RunFetched:
		if err := x.runWaves(a.Layer, tokens, f.use.Slots, f.use.Waves, f.meter); err != nil {
			return err
		}
		if q.cpu != nil {
			if f.use.AwaitsHost {
				if err := q.cpu.recordFetched(x.stream); err != nil {
					return err
				}
			}
			if err := q.cpu.await(x, tokens, f.meter); err != nil {
				return err
			}
		}
		return x.model.Combine(x.stream, a.Layer, tokens)
	case Release:
		return f.use.Release()
	case PrefetchPredicted:
		var ids []int32
		if ids, err = q.routing.await(ctx, f.predicted, f.meter); err == nil {
			err = f.step.PrefetchPredicted(a.Layer, ids)
		}
	case MLP:
		return x.model.MLP(x.stream, a.Layer, tokens)
	case FeedForward:
		if owner.model.Config.Dense[a.Layer] {
			return owner.model.MLP(owner.stream, a.Layer, b.batch.Span)
		}
		if err = owner.model.SharedExpert(owner.stream, a.Layer, b.batch.Span); err == nil {
			err = owner.runRouted(a.Layer, b.batch.Span, &f.use, f.singleLaunch, sorted, f.meter)
		}
	case Head:
		return owner.model.Head(owner.stream, &b.batch)
	default:
		panic(fmt.Sprintf("pipeline: unknown action kind %d", a.Kind))
	}
	return err
}

// startOnCPU starts the layer's experts on the CPU, behind the router's selection. ahead: only if that has
// reached the host. With few tokens the device has often made the selection before the host has enqueued the rest of
// the layer, for which these experts need not wait.
func (q *enqueuer) startOnCPU(ctx context.Context, f *stepState, ahead bool) error {
	if ahead {
		if !f.routed.done.Reached() {
			return nil
		}
		q.ahead++
	}
	f.selecting = false
	ids, err := q.routing.await(ctx, f.routed, f.meter)
	if err != nil {
		return err
	}
	q.cpu.measure() // all behind the latest selection is behind this one, too
	if f.onCPU, err = f.unrouted.ChooseOnCPU(ids); err != nil {
		return err
	}
	return q.cpu.enqueue(ids, f.onCPU)
}
