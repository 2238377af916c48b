package pipeline

import (
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts"
)

// tracer annotates the operations of a step in a trace. A nil tracer does nothing.
type tracer struct {
	w     *trace.Writer
	clock device.Clock
	// stream is the compute stream.
	stream device.Stream
	steps  int64
	step   *trace.Step
	// layer that is running, and the note of the latest action.
	layer int
	note  trace.Note
	// awaited are the points waited for since the latest operation that launches kernels.
	awaited []device.Point
}

// begin begins a step. Every retry is a step of its own.
func (t *tracer) begin(s *Step, p *plan) {
	if t == nil {
		return
	}
	t.steps++
	t.step = &trace.Step{Number: t.steps, Sequences: len(s.Sequences), Plan: p.name}
	for i := range s.Sequences {
		if q := &s.Sequences[i]; len(q.Tokens) == 1 && q.Start > 0 {
			t.step.DecodeTokens++
		} else {
			t.step.PrefillTokens += len(q.Tokens)
		}
	}
	t.w.Begin(t.step)
	now := t.clock.Now()
	t.w.Counter("batch", "sequences", now, float64(t.step.Sequences))
	t.w.Counter("batch", "tokens", now, float64(t.step.PrefillTokens+t.step.DecodeTokens))
	t.layer, t.awaited = trace.NoLayer, t.awaited[:0]
}

// action is called before each action of a plan.
func (t *tracer) action(a Action, s *Shape) {
	if t == nil {
		return
	}
	n := trace.Note{Step: t.step, Nested: true, Stage: a.Kind.String()}
	switch a.Kind {
	case Upload, Embed, Head:
		t.layer = trace.NoLayer
	case Prefetch, PagePrefetch, PredictNext, PrefetchPredicted:
		// These concern a later layer, while this one runs.
	default:
		t.layer = a.Layer
	}
	n.Layer = t.layer
	if s.MicroBatches > 1 && a.Kind.perMicroBatch() {
		n.MicroBatch = a.MicroBatch + 1
	}
	if s.groups() > 1 && !a.Kind.perMicroBatch() {
		n.Group = a.Group + 1
	}
	t.note = n
	t.annotate(n, a.Kind.launchesKernels())
}

// results is called before the copies of a step's results.
func (t *tracer) results() {
	if t == nil {
		return
	}
	t.annotate(trace.Note{Step: t.step, Nested: true, Layer: trace.NoLayer, Stage: "results"}, false)
}

// annotate sets the note of the stream's next operations. Kernels get arrows from the copies
// that were waited for.
func (t *tracer) annotate(n trace.Note, kernels bool) {
	if kernels && len(t.awaited) > 0 {
		t.w.Awaits(&n, t.awaited)
		t.awaited = t.awaited[:0]
	}
	trace.Annotate(t.stream, &n)
}

// wait is called before a wait for points.
func (t *tracer) wait(cause Cause, points ...device.Point) {
	if t == nil {
		return
	}
	n := t.note
	n.Cause = cause.String()
	t.annotate(n, false)
	t.awaited = append(t.awaited, points...)
}

// beforeExperts is called before waves of experts run, afterExperts once the layer's waves
// are enqueued.
func (t *tracer) beforeExperts(waves ...experts.Wave) {
	if t == nil {
		return
	}
	n := t.note
	for i := range waves {
		n.Experts = append(n.Experts, waves[i].IDs...)
	}
	slices.Sort(n.Experts)
	t.annotate(n, true)
}

func (t *tracer) afterExperts() {
	if t != nil {
		t.annotate(t.note, true)
	}
}

// hostWork annotates the next operation of a stream of host attention with the micro-batch.
func (t *tracer) hostWork(s device.Stream, name string) {
	if t == nil {
		return
	}
	n := t.note
	n.Name, n.Nested = name, false
	trace.Annotate(s, &n)
}

// copyBack is hostWork for a copy that signals done.
func (t *tracer) copyBack(s device.Stream, name string, done device.Point) {
	if t == nil {
		return
	}
	n := t.note
	n.Name, n.Nested = name, false
	t.w.Request(done).Note(&n, true)
	trace.Annotate(s, &n)
}
