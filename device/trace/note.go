package trace

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// Note is what a trace shows of operations besides their kind and their times. Zero values
// are not shown. A note is not changed after a stream was annotated with it.
type Note struct {
	// Name replaces the operation's own name.
	Name string
	// Step that the operations belong to, or in which they were requested.
	Step *Step
	// Layer is the model's number of the layer, from 0, or NoLayer.
	Layer int
	// Nested: the stream runs the step, so its operations are nested in slices for the step
	// and, if they have one, the layer.
	Nested bool
	// Stage of the layer.
	Stage string
	// MicroBatch and Group are counted from 1, and 0 where there is only one.
	MicroBatch, Group int
	// Experts that are copied, or whose outputs are computed.
	Experts []int
	// Tier is the source of a copy.
	Tier string
	// Priority of a copy's request: demand, prefetch, kv-load, kv-store, migration. StartedAs
	// is the priority at the start of the copy, if it was another.
	Priority, StartedAs string
	// Relay is the GPU whose link with the host a copy takes in place of that of its own GPU.
	Relay string
	// Cause of a wait.
	Cause string
	// Detail is a copy's own name.
	Detail string
	// Shape of a GEMM.
	Shape Shape

	// copy is the copy that the operations are chunks of. source, set for its last chunk, is
	// the beginning of arrows; waits is set for an operation at which arrows end.
	copy   *Copy
	source *source
	waits  *waits
}

// NoLayer is the Layer of operations outside layers.
const NoLayer = -1

// Shape is the shape of a GEMM [M, K] x [K, N], or of a grouped GEMM over several experts.
type Shape struct {
	M, N, K int
	// Experts is the number of experts of a grouped GEMM; M is then the host's estimate of
	// the sum over the experts, 0 if it has none.
	Experts int
	// Flops counts a multiply-add as two.
	Flops int64
}

// Step is one step of the engine.
type Step struct {
	// Number counts steps from 1.
	Number int64
	// Sequences of the batch; PrefillTokens of prompts, and DecodeTokens, one for each
	// sequence that decodes.
	Sequences, PrefillTokens, DecodeTokens int
	// Plan is the name of the step's plan.
	Plan string
}

// name returns the name of the step's slice.
func (s *Step) name() string {
	switch {
	case s.PrefillTokens == 0:
		return "decode step"
	case s.DecodeTokens == 0:
		return "prefill step"
	}
	return "prefill and decode step"
}

// Annotate sets the note of the operations enqueued on the stream from now on, if the stream
// is traced.
func Annotate(s device.Stream, n *Note) {
	if a, ok := s.(device.Annotator); ok {
		a.Annotate(n)
	}
}

// WithShape adds a GEMM's shape to the stream's note while do enqueues it.
func WithShape(s device.Stream, shape Shape, do func() error) error {
	a, ok := s.(device.Annotator)
	if !ok {
		return do()
	}
	before := a.Annotate(nil)
	n := Note{Layer: NoLayer}
	if about, ok := before.(*Note); ok && about != nil {
		n = *about
	}
	n.Shape = shape
	a.Annotate(&n)
	err := do()
	a.Annotate(before)
	return err
}

// source is a copy that operations may wait for: the slice in which its last byte arrives,
// once written, and the slices of the waiting operations written before it.
type source struct {
	at      anchor
	written bool
	waiters []anchor
}

// waits are the copies that the next operation with this note has waited for.
type waits struct{ sources []*source }

// anchor is a point within a slice.
type anchor struct {
	track trackID
	at    int64 // ns
}

// points maps points of fences to the copies that signal them.
type points map[device.Fence][]pointSource

type pointSource struct {
	value  uint32
	source *source
}

// maxPoints bounds the points kept per fence: a wait for an older one gets no arrow.
const maxPoints = 64

func (p points) add(at device.Point, s *source) {
	all := p[at.Fence]
	if len(all) >= maxPoints {
		all = slices.Delete(all, 0, len(all)-maxPoints+1)
	}
	p[at.Fence] = append(all, pointSource{at.Value, s})
}

func (p points) find(at device.Point) *source {
	all := p[at.Fence]
	for i := range all {
		// From the latest on: a fence that is reused has the same value again.
		if r := &all[len(all)-1-i]; r.value == at.Value {
			return r.source
		}
	}
	return nil
}

// Copy follows a copy from its request to the operations that wait for it. A nil Copy is not
// traced.
type Copy struct {
	step   *Step
	source source
}

// Request starts to follow a copy that signals done.
func (w *Writer) Request(done device.Point) *Copy {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &Copy{step: w.step}
	w.points.add(done, &c.source)
	return c
}

// Describer is a copy's label that has more than a text: it sets the fields that it knows of
// a note whose Priority is set.
type Describer interface{ Describe(n *Note) }

// Note makes n the note of a chunk of the copy; last is true for its last chunk.
func (c *Copy) Note(n *Note, last bool) {
	n.Step, n.copy = c.step, c
	if last {
		n.source = &c.source
	}
}

// Awaits makes n the note of an operation that waits for points. The next operation with this
// note gets an arrow from each copy that signals one of them.
func (w *Writer) Awaits(n *Note, points []device.Point) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range points {
		if s := w.points.find(p); s != nil {
			if n.waits == nil {
				n.waits = &waits{}
			}
			n.waits.sources = append(n.waits.sources, s)
		}
	}
}
