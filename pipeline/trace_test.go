package pipeline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts"
)

// recorded makes a machine record its operations into a trace.
func recorded(w *trace.Writer, o emulated.Options) emulated.Options {
	o.Virtual = true
	o.HostLink, o.PeerLink = emulated.Link{BytesPerSecond: 1e9}, emulated.Link{BytesPerSecond: 4e9}
	o.GPUs = []emulated.GPU{{BytesPerSecond: 10e9}, {BytesPerSecond: 10e9}}
	o.Host = emulated.GPU{BytesPerSecond: 1e9}
	ops := map[string]trace.Op{"copy": trace.Copied, "launch": trace.Launch, "wait": trace.Wait}
	o.Trace = func(e emulated.Trace) {
		op := ops[e.Op]
		if e.Host {
			op = trace.Callback
		}
		if n, _ := e.Note.(*trace.Note); op != "" {
			w.Add(trace.Span{Space: e.Space, Stream: e.Stream, Op: op, Name: e.Name, Bytes: e.Bytes, Note: n, Start: e.Start, End: e.End, Err: e.Err})
		}
	}
	return o
}

// slice is an event of a trace file.
type slice struct {
	Name, Ph, Cat string
	ID            int
	TS, Dur       float64
	TID           int
	Args          map[string]any
}

func (s *slice) text(arg string) string { t, _ := s.Args[arg].(string); return t }

func (s *slice) has(args ...string) bool {
	return !slices.ContainsFunc(args, func(a string) bool { return s.Args[a] == nil })
}

// TestTrace: steps of all plans have slices for the step and its layers, every operation of a
// layer and every fetch has its arguments, and every wave that waits for copies has an arrow
// from each.
func TestTrace(t *testing.T) {
	for _, c := range []struct {
		plan  string
		o     Options
		peers int
	}{
		{"layerwise", Options{SmallBatchTokens: -1}, 0},
		{"layerwise", Options{SmallBatchTokens: -1, MicroBatches: 2}, 1},
		{"on-demand", Options{SmallBatchTokens: 64}, 1},
		{"on-demand", Options{SmallBatchTokens: 64, CPUExperts: host, CPUShare: cpuShare(0.5)}, 0},
		{"CGOPipe", Options{SmallBatchTokens: -1, Grouping: configs.PerMicroBatch, MicroBatches: 2}, 0},
		{"overlapped CPU attention", Options{SmallBatchTokens: -1, HostAttention: host}, 1},
	} {
		t.Run(fmt.Sprint(c.plan, c.peers), func(t *testing.T) {
			var out bytes.Buffer
			w := trace.NewWriter(&out)
			c.o.Trace = w
			r := newRig(t, "mixtral", 0.5, recorded(w, emulated.Options{}), c.o, []device.Space{device.HBM(1)}[:c.peers]...)
			step := r.decoding(5)
			const steps = 4
			for at := range steps {
				step(1 + at)
			}
			check(t, w.Close())
			var f struct{ TraceEvents []slice }
			check(t, json.Unmarshal(out.Bytes(), &f))
			verify(t, f.TraceEvents, c.plan, steps, r.p.o.config().Layers, c.peers > 0)
		})
	}
}

func verify(t *testing.T, events []slice, plan string, steps, layers int, peers bool) {
	t.Helper()
	rows := map[int]string{}
	for _, e := range events {
		if e.Name == "thread_name" {
			rows[e.TID] = e.text("name")
		}
	}
	seen, fetches, arrows, counters := map[string]int{}, map[string]int{}, map[int]int{}, map[string]int{}
	for i := range events {
		e := &events[i]
		switch {
		case e.Ph == "s", e.Ph == "f":
			arrows[e.ID]++
			if over := under(events, e); e.Ph == "f" && (over == nil || !over.has("experts") && !strings.HasPrefix(plan, "overlapped")) {
				t.Errorf("an arrow ends in %+v", over)
			}
			continue
		case e.Ph == "C":
			counters[e.Name]++
			continue
		case e.Ph != "X":
			continue
		}
		name, _, _ := strings.Cut(e.Name, " ")
		switch row := rows[e.TID]; {
		case e.Name == "decode step":
			seen["step"]++
			if e.text("plan") != plan || e.Args["decode_tokens"] != 5.0 || e.Args["sequences"] != 5.0 || e.Args["prefill_tokens"] != 0.0 {
				t.Errorf("a step of the plan %q: %+v", plan, e)
			}
		case name == "layer":
			seen[fmt.Sprint(e.Args["step"], e.Name)]++
		case e.Cat == "wait" && row == "compute":
			seen[e.text("cause")]++
		case row == "compute" && strings.HasPrefix(e.Name, "expert_"):
			if !e.has("step", "layer", "stage", "experts") {
				t.Errorf("experts run: %+v", e)
			}
		case row == "compute" && e.Cat == "launch", row == "attention":
			if outside := e.Name == "embed" || e.Name == "sample" || e.text("stage") == "head"; !e.has("step", "stage") || !outside && !e.has("layer") {
				t.Errorf("a layer runs: %+v", e)
			}
		case strings.HasPrefix(row, "copy ") && e.has("step") && strings.HasSuffix(e.Name, "fetch experts"):
			fetches[e.text("tier")+" "+e.text("priority")]++
			if !e.has("layer", "experts", "bytes", "GB/s") || (e.Name == "prefetch experts") != (e.text("priority") == "prefetch") {
				t.Errorf("a fetch: %+v", e)
			}
		}
	}
	if seen[ExpertCopy.String()] == 0 || strings.HasPrefix(plan, "overlapped") && seen[CPUAttention.String()] == 0 {
		t.Errorf("waits by cause: %v", seen)
	}
	if seen["step"] != steps {
		t.Errorf("%d steps, want %d", seen["step"], steps)
	}
	for s := range steps {
		for l := range layers {
			if seen[fmt.Sprintf("%dlayer %d", s+1, l)] == 0 {
				t.Errorf("step %d has no layer %d", s+1, l)
			}
		}
	}
	tier := experts.Host.String()
	if peers {
		tier = experts.Peer.String()
	}
	if fetches[tier+" prefetch"] == 0 || plan == "on-demand" && fetches[tier+" demand"] == 0 {
		t.Errorf("fetches %v", fetches)
	}
	if len(arrows) < steps {
		t.Errorf("%d arrows", len(arrows))
	}
	for id, ends := range arrows {
		if ends != 2 {
			t.Errorf("arrow %d has %d ends", id, ends)
		}
	}
	if counters["batch"] != 2*steps || counters["copy host to gpu0"] == 0 && counters["copy gpu1 to gpu0"] == 0 {
		t.Errorf("counters %v", counters)
	}
}

// under returns the innermost slice at an arrow's end.
func under(events []slice, at *slice) (found *slice) {
	for i := range events {
		if e := &events[i]; e.Ph == "X" && e.TID == at.TID && e.TS <= at.TS && at.TS < e.TS+e.Dur && (found == nil || e.Dur <= found.Dur) {
			found = e
		}
	}
	return found
}

// TestTraceCost: a traced step allocates fewer than two notes for each operation.
func TestTraceCost(t *testing.T) {
	w := trace.NewWriter(io.Discard)
	o := recorded(w, emulated.Options{})
	operations, record := 0, o.Trace
	o.Trace = func(e emulated.Trace) {
		operations++
		record(e)
	}
	r := newRig(t, "mixtral", 0.5, o, Options{SmallBatchTokens: -1, Trace: w})
	step := r.decoding(5)
	const from, steps = 5, 40
	for at := range from + steps {
		step(at)
	}
	at, n := from, int64(0)
	operations = 0
	for _, allocations := range allocations(steps, func() { step(at); at++ }) {
		n += allocations
	}
	if n > 2*int64(operations) {
		t.Errorf("%d traced operations allocate %d times", operations, n)
	}
}
