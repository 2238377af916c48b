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

// executor is an Executor at work: it runs the layers of one merge group on a stream.
type executor struct {
	model  *forward.Model
	stream device.Stream
	// attention is the device's, nil where the host attends.
	attention *forward.Attention
	layout    kernels.ExpertLayout
	tracer    *tracer
}

// attend runs a micro-batch's attention block on the device.
func (x *executor) attend(layer int, b *forward.Batch) error {
	if err := x.model.PreAttention(x.stream, layer, b, x.attention); err != nil {
		return err
	}
	return x.attention.Attend(x.stream, layer, b.Span, &b.Attention)
}

// routed runs all of a layer's routed experts on a span of rows: in waves, or, where
// together says that what is fetched will have arrived anyway, in one launch, which leaves
// fewer multiprocessors idle at its end.
func (x *executor) routed(layer int, r forward.Span, use *experts.Use, together bool, m *meter) error {
	if err := x.model.Group(x.stream, layer, r); err != nil {
		return err
	}
	if !together || len(use.Waves) < 2 {
		if err := x.waves(layer, r, use.Slots, use.Waves, m); err != nil {
			return err
		}
		return x.model.Combine(x.stream, layer, r)
	}
	for i := range use.Waves {
		if err := x.await(&use.Waves[i], m); err != nil {
			return err
		}
	}
	x.tracer.wave(use.Waves...)
	if err := x.model.Experts(x.stream, layer, r, use.Slots, use.All, x.layout); err != nil {
		return err
	}
	x.tracer.waved()
	return x.model.Combine(x.stream, layer, r)
}

// resident groups the choices of a span of rows by expert, and runs the resident experts
// of a layer of which only chosen ones are fetched.
func (x *executor) resident(layer int, r forward.Span, open *experts.Unrouted, m *meter) error {
	if err := x.model.Group(x.stream, layer, r); err != nil {
		return err
	}
	return x.waves(layer, r, open.Slots, open.Waves, m)
}

// fetched runs the layer's other chosen experts, and combines all.
func (x *executor) fetched(layer int, r forward.Span, use *experts.Use, m *meter) error {
	if err := x.waves(layer, r, use.Slots, use.Waves, m); err != nil {
		return err
	}
	return x.model.Combine(x.stream, layer, r)
}

// waves enqueues experts, each wave behind its own copies.
func (x *executor) waves(layer int, r forward.Span, slots kernels.Tensor, waves []experts.Wave, m *meter) error {
	for i := range waves {
		w := &waves[i]
		if err := x.await(w, m); err != nil {
			return err
		}
		x.tracer.wave(*w)
		if err := x.model.Experts(x.stream, layer, r, slots, w.Experts, x.layout); err != nil {
			return err
		}
	}
	x.tracer.waved()
	return nil
}

// await holds the stream back until a wave's copies have landed.
func (x *executor) await(w *experts.Wave, m *meter) error {
	if len(w.Await) > 0 {
		x.tracer.wait(ExpertCopy, w.Await...)
	}
	return hold(x.stream, ExpertCopy, w.Await, m)
}

// hold holds a stream back until points are reached, and counts for how long.
func hold(s device.Stream, cause Cause, points []device.Point, m *meter) error {
	await := func() error {
		for _, p := range points {
			if err := s.Await(p.Fence, p.Value); err != nil {
				return err
			}
		}
		return nil
	}
	if reached(points) {
		return await() // does not wait, but orders what the stream reads behind what was written
	}
	return m.wait(cause, nil, nil, await)
}

func reached(points []device.Point) bool {
	return !slices.ContainsFunc(points, func(p device.Point) bool { return !p.Reached() })
}

// frame is what the actions of a plan hand on to each other.
type frame struct {
	// step is the store's, frozen where a graph is captured.
	step experts.Step
	// use is the layer that is open, unrouted one that awaits its router's choice.
	use      experts.Use
	unrouted experts.Unrouted
	// chosen and predicted are the choice of that layer's router, and what a later
	// layer's is predicted to choose.
	chosen, predicted choice
	// shape of the plan.
	shape *Shape
	// together says that all of a layer's experts are launched at once.
	together bool
	// meter counts stalls, nil where a graph is captured.
	meter *meter
}

// enqueuer enqueues the actions of plans.
type enqueuer struct {
	executors []executor
	batches   *batcher
	rows      *stepMetadata
	choices   *choices
	// attention is nil where the device attends.
	attention *hostAttention
	tracer    *tracer
}

// run enqueues actions, one after another.
func (q *enqueuer) run(ctx context.Context, plan []Action, f *frame) error {
	for _, a := range plan {
		q.tracer.action(a, f.shape)
		err := f.meter.resume(a.Kind)
		if err == nil {
			err = q.do(ctx, a, f)
		}
		if err == nil {
			err = f.meter.pause(a.Kind)
		}
		if err != nil {
			return fmt.Errorf("pipeline: %s: %w", a, err)
		}
	}
	return nil
}

// do enqueues one action: that of a micro-batch on its group's executor.
func (q *enqueuer) do(ctx context.Context, a Action, f *frame) (err error) {
	b := &q.batches.all[a.MicroBatch]
	mine := &q.executors[b.group]
	x, rows := &q.executors[a.Group], q.batches.groups[a.Group].span()
	switch a.Kind {
	case Upload:
		return q.rows.upload(mine.stream, b)
	case Embed:
		return mine.model.Embed(mine.stream, &b.batch)
	case Resolve:
		f.use, err = f.step.Layer(ctx, a.Layer)
	case Open:
		f.unrouted, err = f.step.LayerUnrouted(ctx, a.Layer)
	case Prefetch:
		return f.step.Prefetch(a.Layer)
	case PagePrefetch:
		return f.step.PrefetchPart(a.Layer, a.MicroBatch, a.Pages)
	case Attend:
		return mine.attend(a.Layer, &b.batch)
	case Project:
		if err = mine.model.Project(mine.stream, a.Layer, &b.batch); err == nil {
			err = q.attention.attend(mine.stream, mine.model, a.Layer, b, f.meter)
		}
	case AwaitAttention:
		return q.attention.collect(mine.stream, b, f.meter)
	case Route:
		return mine.model.PostAttention(mine.stream, a.Layer, &b.batch)
	case RouterToHost:
		ids, _ := x.model.Routing(rows.Rows)
		f.chosen, err = q.choices.send(x.stream, q.choices.results.at.choice, ids)
	case PredictNext:
		if err = x.model.PredictNext(x.stream, a.Layer, rows.Rows); err == nil {
			f.predicted, err = q.choices.send(x.stream, q.choices.results.at.predicted, x.model.PredictRouting(rows.Rows))
		}
	case Shared:
		return x.model.Shared(x.stream, a.Layer, rows)
	case Experts:
		return x.routed(a.Layer, rows, &f.use, f.together, f.meter)
	case RunResident:
		return x.resident(a.Layer, rows, &f.unrouted, f.meter)
	case FetchChosen:
		var ids []int32
		if ids, err = q.choices.await(ctx, f.chosen, f.meter); err == nil {
			f.use, err = f.unrouted.FetchChosen(ctx, ids)
		}
	case RunFetched:
		return x.fetched(a.Layer, rows, &f.use, f.meter)
	case Close:
		return f.use.Release()
	case PrefetchPredicted:
		var ids []int32
		if ids, err = q.choices.await(ctx, f.predicted, f.meter); err == nil {
			err = f.step.PrefetchPredicted(a.Layer, ids)
		}
	case MLP:
		return x.model.MLP(x.stream, a.Layer, rows)
	case FeedForward:
		if mine.model.Config.Dense[a.Layer] {
			return mine.model.MLP(mine.stream, a.Layer, b.batch.Span)
		}
		if err = mine.model.Shared(mine.stream, a.Layer, b.batch.Span); err == nil {
			err = mine.routed(a.Layer, b.batch.Span, &f.use, f.together, f.meter)
		}
	case Head:
		return mine.model.Head(mine.stream, &b.batch)
	default:
		panic(fmt.Sprintf("pipeline: an action of unknown kind %d", a.Kind))
	}
	return err
}
