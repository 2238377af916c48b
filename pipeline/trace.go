package pipeline

import (
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts"
)

// tracer notes in a trace what the operations of a step are about. A nil tracer does
// nothing.
type tracer struct {
	w     *trace.Writer
	clock device.Clock
	// stream computes.
	stream device.Stream
	steps  int64
	step   *trace.Step
	// layer that runs, and note of the latest action.
	layer int
	note  trace.Note
	// awaited since the latest operation that computes.
	awaited []device.Point
}

// begin begins a step, again for each try.
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

// action comes before each action of a plan.
func (t *tracer) action(a Action, s *Shape) {
	if t == nil {
		return
	}
	n := trace.Note{Step: t.step, Nested: true, Stage: a.Kind.String()}
	switch a.Kind {
	case Upload, Embed, Head:
		t.layer = trace.NoLayer
	case Prefetch, PagePrefetch, PredictNext, PrefetchPredicted:
		// They are about a later layer, while this one runs.
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
	t.annotate(n, a.Kind.computes())
}

// results comes before what brings a step's results to the host.
func (t *tracer) results() {
	if t == nil {
		return
	}
	t.annotate(trace.Note{Step: t.step, Nested: true, Layer: trace.NoLayer, Stage: "results"}, false)
}

// annotate notes what the stream is given next; what computes gets the arrows from what was
// awaited.
func (t *tracer) annotate(n trace.Note, computes bool) {
	if computes && len(t.awaited) > 0 {
		t.w.Awaits(&n, t.awaited)
		t.awaited = t.awaited[:0]
	}
	trace.Annotate(t.stream, &n)
}

// wait comes before a wait for these points.
func (t *tracer) wait(cause Cause, points ...device.Point) {
	if t == nil {
		return
	}
	n := t.note
	n.Cause = cause.String()
	t.annotate(n, false)
	t.awaited = append(t.awaited, points...)
}

// wave comes before experts of a layer run, waved once all of them have.
func (t *tracer) wave(waves ...experts.Wave) {
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

func (t *tracer) waved() {
	if t != nil {
		t.annotate(t.note, true)
	}
}

// onHost notes on a stream of the host's attention what it is given for a micro-batch.
func (t *tracer) onHost(s device.Stream, name string) {
	if t == nil {
		return
	}
	n := t.note
	n.Name, n.Nested = name, false
	trace.Annotate(s, &n)
}

// brings is onHost for a copy that raises done.
func (t *tracer) brings(s device.Stream, name string, done device.Point) {
	if t == nil {
		return
	}
	n := t.note
	n.Name, n.Nested = name, false
	t.w.Request(done).Note(&n, true)
	trace.Annotate(s, &n)
}
