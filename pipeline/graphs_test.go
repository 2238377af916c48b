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
)

// capturing is an emulated machine whose compute stream is a device.Capturer: a graph is
// a list of operations with the arguments that they had, so that what a launch of it
// computes shows whether these were those of the step.
type capturing struct {
	*emulated.Machine
	// fail is what the next capture fails with.
	fail error
	// alive counts graphs that nobody has closed.
	alive int
}

func (m *capturing) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if err != nil || o.Name != "compute" {
		return s, err
	}
	return &capturingStream{Stream: s, m: m}, nil
}

// capturingStream refuses in a capture what a graph cannot hold.
type capturingStream struct {
	device.Stream
	m *capturing
	// taking is set within a capture.
	taking *captured
}

// captured is a graph.
type captured struct {
	m      *capturing
	ops    []func() error
	closed bool
}

var errInCapture = errors.New("not in a capture")

func (s *capturingStream) Capture(f func() error) (device.Graph, error) {
	s.taking = &captured{m: s.m}
	err := f()
	g := s.taking
	s.taking = nil
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
	if s.taking != nil {
		s.taking.ops = append(s.taking.ops, func() error { return s.Stream.Copy(dst, src) })
		return nil
	}
	return s.Stream.Copy(dst, src)
}

func (s *capturingStream) Record(ev device.Event) error {
	if s.taking != nil {
		return errInCapture
	}
	return s.Stream.Record(ev)
}

func (s *capturingStream) Raise(f device.Fence, value uint32) error {
	if s.taking != nil {
		return errInCapture
	}
	return s.Stream.Raise(f, value)
}

func (s *capturingStream) Await(f device.Fence, value uint32) error {
	if s.taking != nil {
		return errInCapture
	}
	return s.Stream.Await(f, value)
}

// capturingBackend enqueues on a capturingStream.
type capturingBackend struct{ kernels.Backend }

func (b capturingBackend) Enqueue(s device.Stream, op kernels.Op) error {
	c, ok := s.(*capturingStream)
	switch {
	case !ok:
		return b.Backend.Enqueue(s, op)
	case c.taking == nil:
		return b.Backend.Enqueue(c.Stream, op)
	}
	kept := reflect.New(reflect.TypeOf(op).Elem())
	kept.Elem().Set(reflect.ValueOf(op).Elem())
	c.taking.ops = append(c.taking.ops, func() error { return b.Backend.Enqueue(c.Stream, kept.Interface().(kernels.Op)) })
	return nil
}

// live plays steps of sequences that come, go and come again, mostly several steps of the
// same in a row: prompts, decoding past the borders of blocks and of rounded contexts,
// greedy and drawn in all ways. Equal seeds give equal lives. It returns everything that
// the steps gave, as text.
func (r *rig) live(seed uint64, steps int, again func(error) bool) string {
	r.Helper()
	random := rand.New(rand.NewPCG(seed, 9))
	vocab := r.p.o.config().Vocab
	var all strings.Builder
	var running []Sequence
	leave := func(i int) {
		running[i].Table.Release(false)
		running = slices.Delete(running, i, i+1)
	}
	for n := range steps {
		if len(running) == 0 || len(running) < 6 && random.IntN(12) == 0 {
			q := Sequence{Table: r.kv.NewTable(), LogitRows: 1, Draw: Draw{Seed: random.Uint64(), Sample: int32(n)}}
			for range 1 + random.IntN(20) {
				q.Tokens = append(q.Tokens, int32(random.IntN(vocab)))
			}
			if random.IntN(4) == 0 { // near a border of rounded contexts
				q.Tokens = slices.Repeat(q.Tokens, 62)[:55+random.IntN(8)]
			}
			switch d := &q.Draw; random.IntN(6) {
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
			}
			running = append(running, q)
		}
		// Sometimes not all of them run.
		step := &Step{Logits: random.IntN(2) == 0}
		rows, from := 0, 0
		if random.IntN(15) == 0 {
			from = random.IntN(len(running))
		}
		for i := from; i < len(running); i++ {
			if rows += len(running[i].Tokens); rows > 64 {
				break
			}
			step.Sequences = append(step.Sequences, running[i])
			reserve(r, running[i].Table, running[i].Start+len(running[i].Tokens))
		}
		res, err := r.p.Step(r.Context(), step)
		for err != nil && again != nil && again(err) {
			res, err = r.p.Step(r.Context(), step)
		}
		check(r, err)
		fmt.Fprintf(&all, "%d: %v %v %x\n", n, res.Sampled, res.LogProbs, res.Logits)
		for i := range step.Sequences {
			q := &running[from+i]
			q.Start += len(q.Tokens)
			q.Tokens = []int32{res.Sampled[i]}
		}
		for i := len(running) - 1; i >= 0; i-- {
			if running[i].Start > 150 || random.IntN(80) == 0 {
				leave(i)
			}
		}
	}
	for len(running) > 0 {
		leave(0)
	}
	return all.String()
}

// TestGraphsChangeNothing: steps that run as graphs give what they give otherwise,
// whoever comes and goes, and however few graphs are kept.
func TestGraphsChangeNothing(t *testing.T) {
	for i, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const steps = 120
			seed := uint64(i)
			plain := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{})
			want := plain.live(seed, steps, nil)
			counted := plain.store.RoutedTokens()
			for _, o := range []Options{
				{Graphs: 5}, {Graphs: 1}, {Graphs: 3, MicroBatchTokens: 2}, {Graphs: 3, Grouping: configs.PerMicroBatch, MicroBatches: 2},
			} {
				r := newRig(t, name, 0, emulated.Options{Virtual: true, Check: true}, o)
				for range 2 { // the second time with graphs at hand
					if got := r.live(seed, steps, nil); got != want {
						t.Fatalf("%d graphs, micro-batches of %d: %s", o.Graphs, o.MicroBatchTokens, firstDifference(got, want))
					}
				}
				s := r.p.Graphs()
				t.Logf("%+v of %d steps", s, 2*steps)
				if s.Launched < steps/2 || s.Captured <= int64(o.Graphs) || s.Held > int64(o.Graphs) || s.Failed != 0 || r.capturing.alive != int(s.Held) {
					t.Errorf("%d graphs, micro-batches of %d: %+v of %d steps, %d graphs are alive", o.Graphs, o.MicroBatchTokens, s, 2*steps, r.capturing.alive)
				}
				for i, of := range r.store.Uses() {
					if of[0] != 2*steps {
						t.Errorf("experts are used in %d of %d steps", of[0], 2*steps)
					}
					for e, n := range r.store.RoutedTokens()[i] {
						if n != 2*counted[i][e] {
							t.Errorf("layer %d expert %d is chosen by %d rows, want %d", i, e, n, 2*counted[i][e])
						}
					}
				}
				if got, want := r.store.Stats().Uses[experts.Resident], 2*plain.store.Stats().Uses[experts.Resident]; got != want {
					t.Errorf("%d hits, want %d", got, want)
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

// TestGraphsOnlyOfDecoding: what is not the same step again runs as it did.
func TestGraphsOnlyOfDecoding(t *testing.T) {
	r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 16})
	table := r.kv.NewTable()
	defer table.Release(false)
	reserve(t, table, 96)
	one := func(at, rows int) GraphStats {
		t.Helper()
		_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: []int32{1, 2, 3}[:rows], Start: at, Table: table, LogitRows: 1}}})
		check(t, err)
		return r.p.Graphs()
	}
	for i, c := range []struct {
		at, rows int
		want     GraphStats
	}{
		{0, 3, GraphStats{}},
		{0, 3, GraphStats{}}, // a prompt, however often
		{3, 1, GraphStats{}},
		{4, 1, GraphStats{Captured: 1, Held: 1}},
		{5, 1, GraphStats{Captured: 1, Held: 1, Launched: 1}},
		{5, 2, GraphStats{Captured: 1, Held: 1, Launched: 1}},
		{7, 1, GraphStats{Captured: 1, Held: 1, Launched: 2}}, // still there
		{63, 1, GraphStats{Captured: 1, Held: 1, Launched: 3}},
		{64, 1, GraphStats{Captured: 1, Held: 1, Launched: 3}}, // contexts that are rounded to more
		{20, 1, GraphStats{Captured: 1, Held: 1, Launched: 4}},
		{65, 1, GraphStats{Captured: 1, Held: 1, Launched: 4}}, // not in a row
		{66, 1, GraphStats{Captured: 2, Held: 2, Launched: 4}},
		{67, 1, GraphStats{Captured: 2, Held: 2, Launched: 5}},
		{21, 1, GraphStats{Captured: 2, Held: 2, Launched: 6}},
	} {
		if got := one(c.at, c.rows); got != c.want {
			t.Fatalf("step %d, of %d rows from %d: %+v, want %+v", i, c.rows, c.at, got, c.want)
		}
	}
	for _, o := range []Options{{Graphs: 16, HostAttention: host}, {Graphs: 16}} {
		fraction := 0.0
		if o.HostAttention == nil {
			fraction = 0.25
		}
		r := newRig(t, "mixtral", fraction, emulated.Options{Virtual: true}, o)
		r.live(1, 50, nil)
		if s := r.p.Graphs(); s != (GraphStats{}) {
			t.Errorf("fraction %v, attention on the host: %v: %+v", fraction, o.HostAttention != nil, s)
		}
	}
}

// TestGraphsThatFail: a step that cannot be taken down is the last that is tried, while
// graphs that are there still serve, and neither that nor steps that fail change a result.
func TestGraphsThatFail(t *testing.T) {
	const steps = 120
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{}).live(4, steps, nil)
	var log bytes.Buffer
	r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 4, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if got := r.live(4, steps, nil); got != want {
		t.Fatal(firstDifference(got, want))
	}
	before := r.p.Graphs()
	for len(r.p.graphs.held) > 1 {
		check(t, r.p.graphs.held[0].graph.Close())
		r.p.graphs.held = slices.Delete(r.p.graphs.held, 0, 1)
	}
	r.capturing.fail = errors.New("no memory for graphs")
	if got := r.live(4, steps, nil); got != want {
		t.Fatal(firstDifference(got, want))
	}
	s := r.p.Graphs()
	if s.Failed != 1 || s.Captured != before.Captured || s.Launched <= before.Launched {
		t.Errorf("%+v, before the failure %+v: a graph that is there goes on to serve", s, before)
	}
	if n := strings.Count(log.String(), "no memory for graphs"); n != 1 {
		t.Errorf("the log has %d lines on it: %s", n, log.String())
	}

	// Copies of row data and of results fail now and then.
	r = newRig(t, "mixtral", 0, emulated.Options{Virtual: true, Seed: 3}, Options{Graphs: 4})
	faults := r.m.Inject(&emulated.Fault{
		Kind: emulated.FailCopy, Chance: 0.05, Times: -1,
		Match: func(p emulated.Point) bool { return p.Stream == "compute" },
	})
	failed := 0
	again := func(err error) bool {
		failed++
		return errors.Is(err, ErrStepFailed) && errors.Is(err, device.ErrCopyFailed)
	}
	for range 2 {
		if got := r.live(4, steps, again); got != want {
			t.Fatal(firstDifference(got, want))
		}
	}
	if s := r.p.Graphs(); faults.Hits() == 0 || failed == 0 || s.Launched < steps/2 {
		t.Errorf("%d copies failed, and %d steps; %+v", faults.Hits(), failed, s)
	}
}
