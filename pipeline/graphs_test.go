package pipeline

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// capturing is an emulated machine whose compute stream is a device.Capturer. A graph is a
// list of operations with their arguments, so that a launch computes the right results only
// if these arguments are the step's.
type capturing struct {
	*emulated.Machine
	// fail is the error of the next capture.
	fail error
	// alive counts graphs that have not been closed.
	alive int
}

func (m *capturing) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if err != nil || o.Name != "compute" {
		return s, err
	}
	return &capturingStream{Stream: s, m: m}, nil
}

// capturingStream rejects operations in a capture that a graph cannot contain.
type capturingStream struct {
	device.Stream
	m *capturing
	// capturing is set within a capture.
	capturing *captured
}

// captured is an emulated graph.
type captured struct {
	m      *capturing
	ops    []func() error
	closed bool
}

var errInCapture = errors.New("not in a capture")

func (s *capturingStream) Capture(f func() error) (device.Graph, error) {
	s.capturing = &captured{m: s.m}
	err := f()
	g := s.capturing
	s.capturing = nil
	if err = errors.Join(err, s.m.fail); err != nil {
		s.m.fail = nil
		return nil, err
	}
	s.m.alive++
	return g, nil
}

func (s *capturingStream) LaunchGraph(g device.Graph) error {
	c := g.(*captured)
	if c.closed {
		return device.ErrClosed
	}
	for _, op := range c.ops {
		if err := op(); err != nil {
			return err
		}
	}
	return nil
}

func (g *captured) Nodes() int { return len(g.ops) }

func (g *captured) Close() error {
	if g.closed {
		return device.ErrClosed
	}
	g.closed = true
	g.m.alive--
	return nil
}

func (s *capturingStream) Copy(dst, src device.Range) error {
	if s.capturing != nil {
		s.capturing.ops = append(s.capturing.ops, func() error { return s.Stream.Copy(dst, src) })
		return nil
	}
	return s.Stream.Copy(dst, src)
}

func (s *capturingStream) Record(ev device.Event) error {
	if s.capturing != nil {
		return errInCapture
	}
	return s.Stream.Record(ev)
}

func (s *capturingStream) SignalFence(f device.Fence, value uint32) error {
	if s.capturing != nil {
		return errInCapture
	}
	return s.Stream.SignalFence(f, value)
}

func (s *capturingStream) WaitFence(f device.Fence, value uint32) error {
	if s.capturing != nil {
		return errInCapture
	}
	return s.Stream.WaitFence(f, value)
}

// capturingBackend enqueues on a capturingStream.
type capturingBackend struct{ kernels.Backend }

func (b capturingBackend) Enqueue(s device.Stream, op kernels.Op) error {
	c, ok := s.(*capturingStream)
	switch {
	case !ok:
		return b.Backend.Enqueue(s, op)
	case c.capturing == nil:
		return b.Backend.Enqueue(c.Stream, op)
	}
	kept := reflect.New(reflect.TypeOf(op).Elem())
	kept.Elem().Set(reflect.ValueOf(op).Elem())
	c.capturing.ops = append(c.capturing.ops, func() error { return b.Backend.Enqueue(c.Stream, kept.Interface().(kernels.Op)) })
	return nil
}

// generate runs steps of sequences that start and end at random, mostly several steps of the
// same sequences in a row: prompts, decoding across the ends of blocks and of rounded
// contexts, with all kinds of sampling. Equal seeds give equal sequences. It returns the
// output of all steps as text. retry reports whether to retry a failed step.
func (r *rig) generate(seed uint64, steps int, retry func(error) bool) string {
	r.Helper()
	random := rand.New(rand.NewPCG(seed, 9))
	vocab := r.p.o.config().Vocab
	var all strings.Builder
	var running []Sequence
	end := func(i int) {
		running[i].Table.Release(false)
		running = slices.Delete(running, i, i+1)
	}
	for n := range steps {
		if len(running) == 0 || len(running) < 6 && random.IntN(12) == 0 {
			q := Sequence{Table: r.kv.NewTable(), LogitRows: 1, SamplingParams: SamplingParams{Seed: random.Uint64(), Sample: int32(n)}}
			for range 1 + random.IntN(20) {
				q.Tokens = append(q.Tokens, int32(random.IntN(vocab)))
			}
			if random.IntN(4) == 0 { // near a border of rounded contexts
				q.Tokens = slices.Repeat(q.Tokens, 62)[:55+random.IntN(8)]
			}
			kind := random.IntN(7)
			if r.noLogits && kind > 2 && random.IntN(5) > 0 {
				kind = 6
			}
			switch d := &q.SamplingParams; kind {
			case 0:
				d.Temperature = 1.1
			case 1:
				d.Temperature, d.TopK = 1, 7
			case 2:
				d.Temperature, d.TopP, d.MinP = 0.9, 0.8, 0.01
			case 3:
				d.LogProbs = true
			case 4:
				d.RepetitionPenalty, d.Adjust = 1.2, []TokenAdjust{{ID: 3, Seen: 1}, {ID: 5, Seen: -1, Bias: 2}}
			case 5:
				d.Temperature, d.Mask = float32(random.IntN(2)), everyThird{}
			}
			running = append(running, q)
		}
		// Sometimes only some of the sequences run.
		step := &Step{Logits: random.IntN(2) == 0 && !r.noLogits}
		tokens, from := 0, 0
		if random.IntN(15) == 0 {
			from = random.IntN(len(running))
		}
		for i := from; i < len(running); i++ {
			if tokens += len(running[i].Tokens); tokens > 64 {
				break
			}
			step.Sequences = append(step.Sequences, running[i])
			reserve(r, running[i].Table, min(running[i].Start+len(running[i].Tokens)+1, r.p.o.Limits.MaxModelLen))
		}
		step.Partial = n%2 == 0
		if step.Ahead = r.ahead; step.Ahead && n%20 == 0 {
			if err := r.p.Discard(r.Context()); err != nil && (retry == nil || !retry(err)) {
				r.Fatal(err)
			}
		}
		res, err := r.p.Step(r.Context(), step)
		for err != nil && retry != nil && retry(err) {
			res, err = r.p.Step(r.Context(), step)
		}
		check(r, err)
		fmt.Fprintf(&all, "%d: %v %v %x\n", n, res.Sampled, res.LogProbs, res.Logits)
		for i := range step.Sequences {
			q := &running[from+i]
			if q.SamplingParams.Mask != nil && res.Sampled[i]%3 != 0 {
				r.Fatalf("step %d: token %d is sampled, which the mask bans", n, res.Sampled[i])
			}
			q.Start += len(q.Tokens)
			q.Tokens = []int32{res.Sampled[i]}
		}
		for i := len(running) - 1; i >= 0; i-- {
			if running[i].Start > 150 || random.IntN(80) == 0 {
				end(i)
			}
		}
	}
	for len(running) > 0 {
		end(0)
	}
	return all.String()
}

// everyThird is a mask of the tokens that three divides.
type everyThird struct{}

func (everyThird) Allowed(dst []uint32) {
	clear(dst)
	for id := 0; id < 32*len(dst); id += 3 {
		dst[id/32] |= 1 << (id % 32)
	}
}

// TestGraphsSameResults: steps that run as graphs give the same results as others, whichever
// sequences start and end, and however few graphs are kept.
func TestGraphsSameResults(t *testing.T) {
	for i, name := range sameOn[:racedetector.Fewer(len(sameOn), 1)] { // in virtual time: one goroutine
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const steps = 120
			seed := uint64(i)
			plain := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{})
			want := plain.generate(seed, steps, nil)
			counted := plain.store.RoutedTokens()
			for _, o := range []Options{
				{Graphs: 5}, {Graphs: 1}, {Graphs: 3, MicroBatchTokens: 2}, {Graphs: 3, Grouping: configs.PerMicroBatch, MicroBatches: 2},
			} {
				r := newRig(t, name, 0, emulated.Options{Virtual: true, Check: true}, o)
				for range 2 { // the second time with graphs of the first
					if got := r.generate(seed, steps, nil); got != want {
						t.Fatalf("%d graphs, micro-batches of %d: %s", o.Graphs, o.MicroBatchTokens, firstDifference(got, want))
					}
				}
				s := r.p.Graphs()
				t.Logf("%+v of %d steps", s, 2*steps)
				if s.Launched < steps/2 || s.Captured <= int64(o.Graphs) || s.Kept > int64(o.Graphs) || s.Failed != 0 || r.capturing.alive != int(s.Kept) {
					t.Errorf("%d graphs, micro-batches of %d: %+v of %d steps, %d graphs are alive", o.Graphs, o.MicroBatchTokens, s, 2*steps, r.capturing.alive)
				}
				for i, of := range r.store.Uses() {
					if of[0] != 2*steps {
						t.Errorf("experts are used in %d of %d steps", of[0], 2*steps)
					}
					for e, n := range r.store.RoutedTokens()[i] {
						if n != 2*counted[i][e] {
							t.Errorf("layer %d expert %d has %d routed tokens, want %d", i, e, n, 2*counted[i][e])
						}
					}
				}
				if got, want := r.store.Stats().Uses[experts.Resident], 2*plain.store.Stats().Uses[experts.Resident]; got != want {
					t.Errorf("%d uses of resident experts, want %d", got, want)
				}
			}
		})
	}
}

func firstDifference(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("%.200q, want %.200q", a[i], b[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(a), len(b))
}

// TestGraphsOnlyDecode: only a decode step that is the same to the device as the one before
// is captured.
func TestGraphsOnlyDecode(t *testing.T) {
	r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 16})
	table := r.kv.NewTable()
	defer table.Release(false)
	reserve(t, table, 96)
	one := func(at, tokens int) GraphStats {
		t.Helper()
		_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: []int32{1, 2, 3}[:tokens], Start: at, Table: table, LogitRows: 1}}})
		check(t, err)
		return r.p.Graphs()
	}
	for i, c := range []struct {
		at, tokens int
		want       GraphStats
	}{
		{0, 3, GraphStats{}},
		{0, 3, GraphStats{}}, // a prompt is never captured
		{3, 1, GraphStats{}},
		{4, 1, GraphStats{Captured: 1, Kept: 1}},
		{5, 1, GraphStats{Captured: 1, Kept: 1, Launched: 1}},
		{5, 2, GraphStats{Captured: 1, Kept: 1, Launched: 1}},
		{7, 1, GraphStats{Captured: 1, Kept: 1, Launched: 2}}, // the graph is still kept
		{63, 1, GraphStats{Captured: 1, Kept: 1, Launched: 3}},
		{64, 1, GraphStats{Captured: 1, Kept: 1, Launched: 3}}, // the context rounds up to more
		{20, 1, GraphStats{Captured: 1, Kept: 1, Launched: 4}},
		{65, 1, GraphStats{Captured: 1, Kept: 1, Launched: 4}}, // not in a row
		{66, 1, GraphStats{Captured: 2, Kept: 2, Launched: 4}},
		{67, 1, GraphStats{Captured: 2, Kept: 2, Launched: 5}},
		{21, 1, GraphStats{Captured: 2, Kept: 2, Launched: 6}},
	} {
		if got := one(c.at, c.tokens); got != c.want {
			t.Fatalf("step %d, of %d tokens from position %d: %+v, want %+v", i, c.tokens, c.at, got, c.want)
		}
	}
	for _, o := range []Options{{Graphs: 16, HostAttention: host}, {Graphs: 16}} {
		fraction := 0.0
		if o.HostAttention == nil {
			fraction = 0.25
		}
		r := newRig(t, "mixtral", fraction, emulated.Options{Virtual: true}, o)
		r.generate(1, 50, nil)
		if s := r.p.Graphs(); s != (GraphStats{}) {
			t.Errorf("fraction %v, host attention: %v: %+v", fraction, o.HostAttention != nil, s)
		}
	}
}

// TestGraphFailures: after a failed capture no other is tried, while existing graphs are
// still launched; neither this nor failed steps change a result.
func TestGraphFailures(t *testing.T) {
	const steps = 120
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{}).generate(4, steps, nil)
	var log bytes.Buffer
	r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 4, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if got := r.generate(4, steps, nil); got != want {
		t.Fatal(firstDifference(got, want))
	}
	before := r.p.Graphs()
	for len(r.p.graphs.kept) > 1 {
		check(t, r.p.graphs.kept[0].graph.Close())
		r.p.graphs.kept = slices.Delete(r.p.graphs.kept, 0, 1)
	}
	r.capturing.fail = errors.New("no memory for graphs")
	if got := r.generate(4, steps, nil); got != want {
		t.Fatal(firstDifference(got, want))
	}
	s := r.p.Graphs()
	if s.Failed != 1 || s.Captured != before.Captured || s.Launched <= before.Launched {
		t.Errorf("%+v, before the failure %+v: existing graphs must still be launched", s, before)
	}
	if n := strings.Count(log.String(), "no memory for graphs"); n != 1 {
		t.Errorf("the log has %d lines on it: %s", n, log.String())
	}

	// Copies of step metadata and of results fail at random.
	r = newRig(t, "mixtral", 0, emulated.Options{Virtual: true, Seed: 3}, Options{Graphs: 4})
	faults := r.m.Inject(&emulated.Fault{
		Kind: emulated.FailCopy, Chance: 0.05, Times: -1,
		Match: func(p emulated.Point) bool { return p.Stream == "compute" },
	})
	failed := 0
	retry := func(err error) bool {
		failed++
		return errors.Is(err, ErrStepFailed) && errors.Is(err, device.ErrCopyFailed)
	}
	for range 2 {
		if got := r.generate(4, steps, retry); got != want {
			t.Fatal(firstDifference(got, want))
		}
	}
	if s := r.p.Graphs(); faults.Hits() == 0 || failed == 0 || s.Launched < steps/2 {
		t.Errorf("%d copies failed, and %d steps; %+v", faults.Hits(), failed, s)
	}
}
