package trace_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
)

// written returns the events of what add writes.
func written(t *testing.T, add func(w *trace.Writer)) []event {
	t.Helper()
	var out bytes.Buffer
	w := trace.NewWriter(&out)
	add(w)
	check(t, w.Close())
	return parse(t, out.Bytes())
}

// line is what a test compares of an event, in microseconds.
func line(e *event) string {
	s := fmt.Sprintf("%s %q %g", e.Ph, e.Name, e.TS)
	if e.Ph == "X" {
		s += fmt.Sprintf("+%g", e.Dur)
	}
	if len(e.Args) > 0 {
		s += fmt.Sprint(" ", e.Args)
	}
	return s
}

func compare(t *testing.T, events []event, phases string, want ...string) {
	t.Helper()
	var got []string
	for i := range events {
		if strings.Contains(phases, events[i].Ph) {
			got = append(got, line(&events[i]))
		}
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("got\n%s\nwant\n%s", g, w)
	}
}

const us = time.Microsecond

func launch(stream, name string, start, end time.Duration, n *trace.Note) trace.Span {
	return trace.Span{Space: 1, Stream: stream, Op: trace.Launch, Name: name, Start: start * us, End: end * us, Note: n}
}

// TestSteps: the operations of a stream that runs steps are nested in slices for the step and
// the layer, which end where the next begins; those of other streams are not.
func TestSteps(t *testing.T) {
	first := &trace.Step{Number: 1, Sequences: 2, PrefillTokens: 9, Plan: "layerwise"}
	second := &trace.Step{Number: 2, Sequences: 2, DecodeTokens: 2}
	mixed := &trace.Step{Number: 3, Sequences: 2, PrefillTokens: 5, DecodeTokens: 1}
	note := func(s *trace.Step, layer int) *trace.Note { return &trace.Note{Step: s, Layer: layer, Nested: true} }
	events := written(t, func(w *trace.Writer) {
		w.Add(launch("compute", "embed", 1, 2, note(first, trace.NoLayer)))
		w.Add(launch("compute", "norm", 3, 4, note(first, 0)))
		w.Add(launch("host", "attention", 3, 9, &trace.Note{Step: first, Layer: 0, Stage: "attend", Group: 2, MicroBatch: 1}))
		w.Add(launch("compute", "norm", 4, 6, note(first, 0)))
		w.Add(launch("compute", "norm", 7, 8, note(first, 1)))
		w.Add(launch("compute", "embed", 8, 9, note(second, trace.NoLayer)))
		w.Add(launch("compute", "clear", 10, 11, nil))
		w.Add(launch("compute", "norm", 11, 12, note(mixed, 0)))
	})
	compare(t, events, "X",
		`X "attention" 3+6 map[group:2 layer:0 micro_batch:1 stage:attend step:1]`,
		`X "prefill step" 1+7 map[decode_tokens:0 plan:layerwise prefill_tokens:9 sequences:2 step:1]`,
		`X "embed" 1+1 map[step:1]`,
		`X "layer 0" 3+3 map[layer:0 step:1]`,
		`X "norm" 3+1 map[layer:0 step:1]`,
		`X "norm" 4+2 map[layer:0 step:1]`,
		`X "layer 1" 7+1 map[layer:1 step:1]`,
		`X "norm" 7+1 map[layer:1 step:1]`,
		`X "decode step" 8+1 map[decode_tokens:2 prefill_tokens:0 sequences:2 step:2]`,
		`X "embed" 8+1 map[step:2]`,
		`X "clear" 10+1`,
		`X "prefill and decode step" 11+1 map[decode_tokens:1 prefill_tokens:5 sequences:2 step:3]`,
		`X "layer 0" 11+1 map[layer:0 step:3]`,
		`X "norm" 11+1 map[layer:0 step:3]`)
}

// TestArguments: a note's fields are arguments of the operation, and slices of one track do
// not overlap even if clocks are not exact.
func TestArguments(t *testing.T) {
	events := written(t, func(w *trace.Writer) {
		w.Add(trace.Span{
			Space: 1, Stream: "copy", Op: trace.Copied, Start: 0, End: 1 * us, Bytes: 5000,
			Note: &trace.Note{
				Name: "prefetch experts", Step: &trace.Step{Number: 4}, Layer: 3, Experts: []int{1, 2, 3, 7, 9, 10},
				Tier: "peer", Priority: "prefetch", Detail: `a "name"`,
			},
		})
		w.Add(launch("copy", "matmul", 0, 2, &trace.Note{Layer: trace.NoLayer, Shape: trace.Shape{M: 8, N: 16, K: 32, Flops: 1e6}}))
		w.Add(trace.Span{
			Space: 1, Stream: "copy", Op: trace.Wait, Start: 4 * us, End: 8 * us,
			Note: &trace.Note{Layer: trace.NoLayer, Cause: "expert-copy"}, Err: errors.New("lost"),
		})
	})
	compare(t, events, "X",
		`X "prefetch experts" 0+1 map[GB/s:5 bytes:5000 copy:a "name" experts:1-3,7,9-10 layer:3 priority:prefetch step:4 tier:peer]`,
		`X "matmul" 1+1 map[TFLOP/s:1 k:32 m:8 n:16]`,
		`X "wait: expert-copy" 4+4 map[cause:expert-copy error:lost]`)
}

// TestOverlapped: an operation that clocks place within the one before it has no rate, which
// would not be a number.
func TestOverlapped(t *testing.T) {
	events := written(t, func(w *trace.Writer) {
		w.Add(launch("copy", "matmul", 0, 9, nil))
		w.Add(trace.Span{Space: 1, Stream: "copy", Op: trace.Copied, Start: 5 * us, End: 8 * us, Bytes: 5000})
		w.Add(launch("copy", "matmul", 5, 8, &trace.Note{Layer: trace.NoLayer, Shape: trace.Shape{M: 8, N: 16, K: 32, Flops: 1e6}}))
	})
	compare(t, events, "X", `X "matmul" 0+9`, `X "copy" 9+0 map[bytes:5000]`, `X "matmul" 9+0 map[k:32 m:8 n:16]`)
}

// TestArrows: an arrow leads from each copy to each operation that waited for it, in
// whichever order they are written. A copy without waiters has no arrow, nor has a failed
// one.
func TestArrows(t *testing.T) {
	m, err := emulated.Open(emulated.Options{Virtual: true})
	check(t, err)
	defer func() { check(t, m.Close()) }()
	f, err := m.NewFence("f")
	check(t, err)
	point := func(v uint32) device.Point { return device.Point{Fence: f, Value: v} }
	events := written(t, func(w *trace.Writer) {
		step := &trace.Step{Number: 7}
		w.Begin(step)
		copied := func(c *trace.Copy, start time.Duration, last bool, err error) {
			n := &trace.Note{Layer: trace.NoLayer}
			c.Note(n, last)
			w.Add(trace.Span{Space: 1, Stream: "copy", Op: trace.Copied, Bytes: 1, Start: start * us, End: (start + 5) * us, Note: n, Err: err})
		}
		one, two, three, failed := w.Request(point(1)), w.Request(point(2)), w.Request(point(3)), w.Request(point(4))
		wave := &trace.Note{Layer: 0}
		w.Awaits(wave, []device.Point{point(1), point(2), point(9)})
		again := &trace.Note{Layer: 1}
		w.Awaits(again, []device.Point{point(2), point(4)})
		copied(one, 10, false, nil)
		copied(one, 20, true, nil)
		copied(three, 25, true, nil)
		w.Add(trace.Span{Space: 1, Stream: "compute", Op: trace.Wait, Start: 10 * us, End: 40 * us, Note: wave})
		w.Add(launch("compute", "expert_up", 40, 41, wave))
		w.Add(launch("compute", "expert_down", 41, 42, wave))
		copied(two, 30, true, nil)
		copied(failed, 50, true, errors.New("failed"))
		w.Add(launch("compute", "expert_up", 60, 61, again))
	})
	compare(t, events, "sf",
		`s "copy" 17.5`, `f "copy" 40.5`,
		`s "copy" 32.5`, `f "copy" 40.5`,
		`s "copy" 32.5`, `f "copy" 60.5`)
	connected(t, events, 3)
	for _, e := range events {
		if e.Ph == "X" && e.Cat == "copy" && e.Args["step"] != 7.0 {
			t.Errorf("a copy that step 7 has requested: %+v", e)
		}
	}
}

// TestChunks: consecutive chunks of one copy are one slice, but not chunks of other copies,
// after a pause, or that started with another priority.
func TestChunks(t *testing.T) {
	events := written(t, func(w *trace.Writer) {
		one, two := w.Request(device.Point{}), w.Request(device.Point{})
		chunk := func(c *trace.Copy, start, end time.Duration, startedAs string) {
			n := &trace.Note{Layer: 1, Priority: "prefetch", StartedAs: startedAs}
			c.Note(n, false)
			w.Add(trace.Span{Space: 1, Stream: "copy", Op: trace.Copied, Start: start * us, End: end * us, Bytes: 1000, Note: n})
		}
		chunk(one, 0, 10, "")
		chunk(one, 10, 20, "")
		chunk(one, 25, 40, "")
		chunk(one, 51, 52, "")
		chunk(one, 52, 54, "demand")
		chunk(two, 54, 55, "")
		chunk(one, 55, 56, "demand")
	})
	compare(t, events, "X",
		`X "copy" 0+40 map[GB/s:0.075 bytes:3000 chunks:3 layer:1 priority:prefetch]`,
		`X "copy" 51+1 map[GB/s:1 bytes:1000 layer:1 priority:prefetch]`,
		`X "copy" 52+2 map[GB/s:0.5 bytes:1000 layer:1 priority:prefetch started_as:demand]`,
		`X "copy" 54+1 map[GB/s:1 bytes:1000 layer:1 priority:prefetch]`,
		`X "copy" 55+1 map[GB/s:1 bytes:1000 layer:1 priority:prefetch started_as:demand]`)
}

// connected checks that arrows have numbers of their own, that each begins and ends, in this
// order, and that there is a slice at either end.
func connected(t *testing.T, events []event, want int) {
	t.Helper()
	begun := map[int]*event{}
	n := 0
	for i := range events {
		e := &events[i]
		switch e.Ph {
		case "s":
			if begun[e.ID] != nil {
				t.Errorf("arrow %d begins twice", e.ID)
			}
			begun[e.ID] = e
		case "f":
			if begun[e.ID] == nil || e.BP != "e" || e.TS < begun[e.ID].TS {
				t.Errorf("arrow %+v begins with %+v", e, begun[e.ID])
			}
			n++
		default:
			continue
		}
		found := false
		for _, x := range events {
			found = found || x.Ph == "X" && x.TID == e.TID && x.TS <= e.TS && e.TS < x.TS+x.Dur
		}
		if !found {
			t.Errorf("no slice at %+v", e)
		}
	}
	if n != len(begun) || n != want {
		t.Errorf("%d arrows begin and %d end, want %d", len(begun), n, want)
	}
}

// TestCounters: a link's throughput is averaged over windows of a millisecond, and 0 after
// the last.
func TestCounters(t *testing.T) {
	events := written(t, func(w *trace.Writer) {
		w.Counter("batch", "sequences", 5*us, 3)
		n := &trace.Note{Layer: trace.NoLayer, Priority: "demand"}
		for _, at := range []time.Duration{0, 500, 800, 5000} {
			w.Add(trace.Span{Space: 1, Stream: "copy host to gpu0", Op: trace.Copied, Start: at * us, End: (at + 250) * us, Bytes: 1e6, Note: n})
		}
		// Copies of the compute stream are no link's.
		w.Add(trace.Span{Space: 1, Stream: "compute", Op: trace.Copied, Start: 0, End: us, Bytes: 1e6})
	})
	compare(t, events, "C",
		`C "batch" 5 map[sequences:3]`,
		`C "copy host to gpu0" 0 map[GB/s:2.8]`,
		`C "copy host to gpu0" 1000 map[GB/s:0.2]`,
		`C "copy host to gpu0" 2000 map[GB/s:0]`,
		`C "copy host to gpu0" 5000 map[GB/s:1]`,
		`C "copy host to gpu0" 6000 map[GB/s:0]`)
}

// TestUntraced: a nil Writer does nothing, and allocates nothing.
func TestUntraced(t *testing.T) {
	var w *trace.Writer
	if n := testing.AllocsPerRun(10, func() {
		w.Begin(nil)
		w.Counter("batch", "sequences", 0, 1)
		w.Add(trace.Span{Op: trace.Launch, End: 1})
		if w.Request(device.Point{}) != nil {
			t.Error("a copy is followed without a trace")
		}
		w.Awaits(nil, nil)
	}); n != 0 {
		t.Errorf("%v allocations without a trace", n)
	}
}

// TestCost: writing an operation allocates nothing.
func TestCost(t *testing.T) {
	w := trace.NewWriter(discard{})
	n := &trace.Note{Name: "fetch experts", Step: &trace.Step{Number: 1}, Layer: 2, Nested: true, Experts: []int{1, 2}, Tier: "host", Priority: "demand", Stage: "attend"}
	at := time.Duration(0)
	if n := testing.AllocsPerRun(1000, func() {
		w.Add(trace.Span{Space: 1, Stream: "copy", Op: trace.Copied, Start: at, End: at + us, Bytes: 100, Note: n})
		at += 2 * us
	}); n != 0 {
		t.Errorf("%v allocations for an operation", n)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestNotes: operations of all streams carry their stream's note, on a machine that traces
// itself and on a wrapped one.
func TestNotes(t *testing.T) {
	for _, wrapped := range []bool{false, true} {
		var out bytes.Buffer
		w := trace.NewWriter(&out)
		o := emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e9}, Host: emulated.GPU{FlopsPerSecond: 1e9}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e9}}}
		if !wrapped {
			o.Trace = func(e emulated.Trace) {
				n, _ := e.Note.(*trace.Note)
				w.Add(trace.Span{Space: e.Space, Stream: e.Stream, Op: trace.Op(e.Op), Name: e.Name, Bytes: e.Bytes, Note: n, Start: e.Start, End: e.End})
			}
		}
		inner, err := emulated.Open(o)
		check(t, err)
		m := device.Machine(inner)
		if wrapped {
			m = trace.Wrap(inner, w)
		}
		a, err := m.Alloc(device.Host, 1<<20, "a")
		check(t, err)
		b, err := m.Alloc(device.HBM(0), 1<<20, "b")
		check(t, err)
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "copies"})
		check(t, err)
		trace.Annotate(s, &trace.Note{Name: "first", Layer: 4})
		check(t, s.Copy(b.Range(0, 1<<20), a.Range(0, 1<<20)))
		err = trace.WithShape(s, trace.Shape{M: 2}, func() error { return s.Copy(b.Range(0, 1<<20), a.Range(0, 1<<20)) })
		check(t, err)
		trace.Annotate(s, &trace.Note{Name: "second", Layer: trace.NoLayer})
		check(t, s.Copy(b.Range(0, 1<<20), a.Range(0, 1<<20)))
		check(t, s.Synchronize(t.Context()))
		check(t, a.Free())
		check(t, b.Free())
		check(t, m.Close())
		check(t, w.Close())
		var got []string
		for _, e := range parse(t, out.Bytes()) {
			if e.Ph == "X" {
				got = append(got, fmt.Sprint(e.Name, " ", e.Args["layer"], e.Args["m"]))
			}
		}
		if g := strings.Join(got, ", "); g != "first 4 <nil>, first 4 2, second <nil> <nil>" {
			t.Errorf("wrapped %v: %s", wrapped, g)
		}
	}
}
