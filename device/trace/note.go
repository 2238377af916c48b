package trace

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// Note is what a trace prints of operations besides what they are and how long they took.
// What has its zero value is left out. It is not changed once a stream is annotated with it.
type Note struct {
	// Name is printed in place of the operation's own.
	Name string
	// Step that the operations belong to, or in which they were requested.
	Step *Step
	// Layer by the model's number, from 0, or NoLayer.
	Layer int
	// Nested says that the stream runs the step: its operations stand within slices for the
	// step and, where they have one, for the layer.
	Nested bool
	// Stage of the layer.
	Stage string
	// MicroBatch is printed where there are several, counted from 1, Group likewise.
	MicroBatch, Group int
	// Experts that are copied or computed.
	Experts []int
	// Tier that a copy reads.
	Tier string
	// Priority with which a copy was requested: demand, prefetch, migration. StartedAs is
	// the one that it had when it started, where that is another.
	Priority, StartedAs string
	// Cause of a wait.
	Cause string
	// Detail is a copy's own name.
	Detail string
	// Shape of a GEMM.
	Shape Shape

	// copy is what the operations are parts of, source what it is to those who wait for its
	// last, which waits is about.
	copy   *Copy
	source *source
	waits  *waits
}

// NoLayer is the Layer of what belongs to none.
const NoLayer = -1

// Shape is that of a GEMM [M, K] x [K, N], or of those of several experts together.
type Shape struct {
	M, N, K int
	// Experts whose matrices are multiplied with; M is then the sum over the experts as far
	// as the host can estimate it, 0 where it cannot.
	Experts int
	// Flops counts a multiply-add as two.
	Flops int64
}

// Step is one step of the engine.
type Step struct {
	// Number counts steps from 1.
	Number int64
	// Sequences of the batch, and the tokens that they compute: of prompts, and one for each
	// sequence that decodes.
	Sequences, PrefillTokens, DecodeTokens int
	// Plan by which it runs.
	Plan string
}

// name is that of the step's slice.
func (s *Step) name() string {
	switch {
	case s.PrefillTokens == 0:
		return "decode step"
	case s.DecodeTokens == 0:
		return "prefill step"
	}
	return "prefill and decode step"
}

// Annotate gives what is enqueued on the stream from now on a note, where the stream is one
// of a traced machine.
func Annotate(s device.Stream, n *Note) {
	if a, ok := s.(device.Annotator); ok {
		a.Annotate(n)
	}
}

// Shaped enqueues by do GEMMs of this shape: the stream's note, with the shape.
func Shaped(s device.Stream, shape Shape, do func() error) error {
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

// source is a copy that others may wait for: the slice in which its last byte lands, once
// that is known, and the slices that have waited for it until then.
type source struct {
	at      place
	known   bool
	waiting []place
}

// waits are the copies that the next operation with their note has waited for.
type waits struct{ sources []*source }

// place is a point within a slice.
type place struct {
	row row
	at  int64 // ns
}

// points says which copy raises which point of a fence.
type points map[device.Fence][]raised

type raised struct {
	value uint32
	by    *source
}

// pointsKept bounds the points of one fence: one that is awaited later gets no arrow.
const pointsKept = 64

func (p points) add(at device.Point, s *source) {
	all := p[at.Fence]
	if len(all) >= pointsKept {
		all = slices.Delete(all, 0, len(all)-pointsKept+1)
	}
	p[at.Fence] = append(all, raised{at.Value, s})
}

func (p points) find(at device.Point) *source {
	all := p[at.Fence]
	for i := range all {
		// From the latest on: a fence that is used again has a value anew.
		if r := &all[len(all)-1-i]; r.value == at.Value {
			return r.by
		}
	}
	return nil
}

// Copy is a copy as the trace follows it from its request to those who wait for it. A nil
// Copy is one that is not traced.
type Copy struct {
	step   *Step
	source source
}

// Request begins to follow a copy that raises done.
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

// Describer is the label of a copy that is about more than a text: it sets what it knows of
// the note's fields, of which Priority is set.
type Describer interface{ Describe(n *Note) }

// Note makes n that of some of the copy's bytes, where last says that no more follow.
func (c *Copy) Note(n *Note, last bool) {
	n.Step, n.copy = c.step, c
	if last {
		n.source = &c.source
	}
}

// Awaits makes n the note of what waits for these points: the next operation with it gets
// an arrow from each copy that raises one.
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
