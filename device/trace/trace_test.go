package trace_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/devicetest"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// file is what a trace holds, as its readers see it.
type file struct{ TraceEvents []event }

type event struct {
	Name, Ph, Cat, BP string
	ID                int
	TS, Dur           float64
	PID, TID          int
	Args              map[string]any
}

// parse returns the events of a trace.
func parse(t *testing.T, data []byte) []event {
	t.Helper()
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatalf("%v in %s", err, data)
	}
	return f.TraceEvents
}

// read returns the spans of each row, by "space: stream".
func read(t *testing.T, data []byte) map[string][]trace.Span {
	t.Helper()
	spaces, names, spans := map[int]string{}, map[int]string{}, map[string][]trace.Span{}
	for _, e := range parse(t, data) {
		switch {
		case e.Ph == "M" && e.Name == "process_sort_index":
		case e.Ph == "M" && e.Name == "process_name":
			spaces[e.PID] = e.Args["name"].(string)
		case e.Ph == "M" && e.Name == "thread_name":
			names[e.TID] = spaces[e.PID] + ": " + e.Args["name"].(string)
		case e.Ph == "X":
			row := names[e.TID]
			if row == "" {
				t.Errorf("%+v stands before its row has a name", e)
			}
			bytes, _ := e.Args["bytes"].(float64)
			spans[row] = append(spans[row], trace.Span{
				Op: trace.Op(e.Cat), Name: e.Name, Bytes: int64(bytes),
				Start: time.Duration(math.Round(e.TS * 1e3)), End: time.Duration(math.Round((e.TS + e.Dur) * 1e3)),
			})
		default:
			t.Errorf("unexpected event %+v", e)
		}
	}
	return spans
}

func TestWriter(t *testing.T) {
	var out bytes.Buffer
	w := trace.NewWriter(&out)
	check(t, w.Close())
	if spans := read(t, out.Bytes()); len(spans) != 0 {
		t.Errorf("an empty trace holds %v", spans)
	}
	out.Reset()
	w = trace.NewWriter(&out)
	w.Add(trace.Span{Space: 1, Stream: `a "stream"`, Op: "copy", Bytes: 5, Start: 1500, End: 3500})
	w.Add(trace.Span{Space: 1, Stream: "other", Op: "launch", Name: "norm", Start: 1, End: 2, Err: errors.New("broken")})
	w.Add(trace.Span{Space: 1, Stream: "other", Op: trace.Wait, Start: 10, End: 10 + 1999})
	w.Add(trace.Span{Space: 1, Stream: "other", Op: trace.Callback, Start: 10, End: 10 + 49999})
	w.Add(trace.Span{Space: 1, Stream: "third", Op: "launch", Start: 2, End: 2})
	w.Add(trace.Span{Stream: "other", Op: "launch", Name: "attention", Start: 0, End: time.Hour})
	check(t, w.Close())
	spans := read(t, out.Bytes())
	if len(spans) != 3 || len(spans["gpu0: other"]) != 1 || !strings.Contains(out.String(), `"broken"`) {
		t.Errorf("%v of %s", spans, out.String())
	}
	if s := spans[`gpu0: a "stream"`]; len(s) != 1 || s[0] != (trace.Span{Op: "copy", Name: "copy", Bytes: 5, Start: 1500, End: 3500}) {
		t.Errorf("%+v", s)
	}
	if s := spans["host: other"]; len(s) != 1 || s[0].Name != "attention" || s[0].End != time.Hour {
		t.Errorf("%+v", s)
	}
}

// failing is a writer that fails after some bytes.
type failing struct{ left int }

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errors.New("disk full")
	}
	return len(p), nil
}

func TestWriterFails(t *testing.T) {
	w := trace.NewWriter(&failing{1 << 20})
	for i := range 40000 {
		w.Add(trace.Span{Stream: "s", Op: "launch", Start: time.Duration(i), End: time.Duration(i + 1)})
	}
	if err := w.Flush(); err == nil || w.Flush() != nil {
		t.Errorf("an error is returned once: %v", err)
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("a trace that could not be written: %v", err)
	}
}

// TestFlush: what was added is there before the end, also of a compressed trace.
func TestFlush(t *testing.T) {
	var plain, packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	for _, out := range []io.Writer{&plain, z} {
		w := trace.NewWriter(out)
		w.Add(trace.Span{Stream: "s", Op: "launch", Name: "norm", Start: 1, End: 2})
		check(t, w.Flush())
	}
	r, err := gzip.NewReader(&packed)
	check(t, err)
	unpacked := make([]byte, plain.Len())
	if _, err := io.ReadFull(r, unpacked); err != nil || !strings.Contains(plain.String(), "norm") || string(unpacked) != plain.String() {
		t.Errorf("%v: %q, compressed %q", err, &plain, unpacked)
	}
}

// TestMachine: a wrapped machine works as before, and its copies, waits and host work are in
// the trace, in order, with about the times they took.
func TestMachine(t *testing.T) { synctest.Test(t, testMachine) }

func testMachine(t *testing.T) {
	const bytes1 = 1 << 20
	for _, virtual := range []bool{false, true} {
		var out bytes.Buffer
		w := trace.NewWriter(&out)
		inner, err := emulated.New(emulated.Options{
			Virtual: virtual, HostLink: emulated.Link{BytesPerSecond: bytes1 * 200}, // 5 ms
		})
		check(t, err)
		if !virtual {
			inner.Inject(&emulated.Fault{Kind: emulated.StallCopy, For: 5 * time.Millisecond, Times: 1})
		}
		m := trace.Wrap(inner, w)
		a, err := m.Alloc(device.Host, bytes1, "a")
		check(t, err)
		b, err := m.Alloc(device.HBM(0), bytes1, "b")
		check(t, err)
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "copies"})
		check(t, err)
		c, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
		check(t, err)
		h, err := m.NewStream(device.Host, device.StreamOptions{Name: "host"})
		check(t, err)
		ev, err := m.NewEvent()
		check(t, err)
		copy(a.Write(0, 4), "data")
		began := m.Now()
		check(t, s.Copy(b.Range(0, bytes1), a.Range(0, bytes1)))
		check(t, s.Record(ev))
		check(t, c.Wait(ev))
		ran := false
		stream := c.(*trace.Stream)
		check(t, stream.Span("launch", "kernel", 0, func() error {
			return stream.Unwrap().(device.Executor).Execute(device.Work{Name: "kernel", Run: func(device.Access) error { ran = true; return nil }})
		}))
		refused := errors.New("refused")
		if err := stream.Span("launch", "refused", 0, func() error { return refused }); !errors.Is(err, refused) {
			t.Errorf("an operation that is refused: %v", err)
		}
		check(t, h.(device.Executor).Execute(device.Work{Name: "nap", Run: func(device.Access) error { time.Sleep(2 * time.Millisecond); return nil }}))
		for _, x := range []device.Stream{s, c, h} {
			check(t, x.Synchronize(context.Background()))
		}
		// What a host stream watches for is traced when it runs.
		f, err := m.NewFence("f")
		check(t, err)
		seen, watcher := 0, h.(device.Watcher)
		look := device.Work{Name: "look", Host: true, Run: func(device.Access) error {
			seen++
			time.Sleep(time.Millisecond)
			return nil
		}}
		_, err = watcher.Watch(device.Point{Fence: f, Value: 1}, look)
		check(t, err)
		check(t, c.WaitFence(f, 1))
		check(t, c.Record(ev))
		_, err = watcher.WatchEvent(ev, look)
		check(t, err)
		check(t, f.Signal(1))
		check(t, c.Synchronize(context.Background()))
		check(t, h.Synchronize(context.Background()))
		took := m.Now() - began
		check(t, a.Free())
		check(t, b.Free())
		check(t, s.Close())
		check(t, c.Close())
		check(t, m.Close())
		check(t, w.Close())
		spans := read(t, out.Bytes())
		copies, waits := spans["gpu0: copies"], spans["gpu0: compute"]
		if !ran || len(copies) != 1 || copies[0].Bytes != bytes1 {
			t.Fatalf("the work ran: %v, copies %+v", ran, copies)
		}
		if d := copies[0].End - copies[0].Start; d < 4999*time.Microsecond || d > took {
			t.Errorf("the copy takes %v in the trace, of %v in all", d, took)
		}
		if len(waits) == 0 || waits[0].Op != "wait" || waits[0].End < copies[0].End {
			t.Errorf("waits %+v for copies %+v", waits, copies)
		}
		if seen != 2 || !virtual && (len(spans["host: host"]) != 3 || spans["host: host"][1].Name != "look") {
			t.Errorf("work that was watched for ran %d times, and is traced as %+v", seen, spans["host: host"])
		}
		if naps := spans["host: host"]; !virtual && (len(naps) == 0 || naps[0].Name != "nap" || naps[0].End-naps[0].Start < 2*time.Millisecond) {
			t.Errorf("work of the host %+v", naps)
		}
		for row, all := range spans {
			for i := 1; i < len(all); i++ {
				if all[i].Start < all[i-1].End {
					t.Errorf("%s: %+v overlaps %+v", row, all[i], all[i-1])
				}
			}
		}
	}
}

// TestConformance: a traced machine passes the conformance suite.
func TestConformance(t *testing.T) {
	for _, virtual := range []bool{false, true} {
		devicetest.Run(t, func(t *testing.T) device.Machine {
			m, err := emulated.Open(emulated.Options{Virtual: virtual})
			check(t, err)
			return trace.Wrap(m, trace.NewWriter(io.Discard))
		})
	}
}
