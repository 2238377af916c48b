package pipeline

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
)

// lax is a machine whose compute stream runs on after a failed fence, as CUDA streams do,
// over data that never arrived: only the source of the data reports the error.
type lax struct {
	*emulated.Machine
	// noTimes, if set, is the error of the time of every event, noEvents that of making
	// another.
	noTimes, noEvents error
}

// laxEvent is an event whose time cannot be read, as on a GPU whose clock is not known.
type laxEvent struct {
	device.Event
	m *lax
}

// Time implements device.Event.
func (e laxEvent) Time() (time.Duration, error) {
	if e.m.noTimes != nil {
		return 0, e.m.noTimes
	}
	return e.Event.Time()
}

func (m *lax) NewEvent() (device.Event, error) {
	if m.noEvents != nil {
		return nil, m.noEvents
	}
	e, err := m.Machine.NewEvent()
	if m.noTimes == nil {
		return e, err
	}
	return laxEvent{e, m}, err
}

func (m *lax) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if err != nil || o.Name != "compute" {
		return s, err
	}
	return laxStream{s.(device.Executor)}, nil
}

type laxStream struct{ device.Executor }

// Record implements device.Stream.
func (s laxStream) Record(e device.Event) error {
	if l, ok := e.(laxEvent); ok {
		e = l.Event
	}
	return s.Executor.Record(e)
}

// WaitFence implements device.Stream. The host waits in place of the stream.
func (s laxStream) WaitFence(f device.Fence, value uint32) error {
	_ = f.Wait(context.Background(), value)
	return nil
}

// TestStreamsRunOn: a step fails if its compute stream ran to the end although experts, or
// attention output, never arrived.
func TestStreamsRunOn(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, c := range []struct {
		match func(emulated.Point) bool
		o     Options
	}{
		{fetch, Options{SmallBatchTokens: -1}},
		{fetch, Options{SmallBatchTokens: 64}},
		{fetch, Options{HostAttention: host, SmallBatchTokens: -1}},
		{hostCopies, Options{HostAttention: host, SmallBatchTokens: -1}},
	} {
		c.o.Machine = &lax{}
		r := newRig(t, "mixtral", 0.75, emulated.Options{Virtual: true, Seed: uint64(i)}, c.o)
		fault := r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: c.match, Times: -1, Chance: 0.05})
		if d := r.run().differs(want); d != "" {
			t.Errorf("case %d: %s", i, d)
		}
		if fault.Hits() == 0 {
			t.Errorf("case %d: no fault was injected", i)
		}
		fault.Release()
	}
}

// failing is a source that fails a number of times, unseen by the compute stream.
type failing struct {
	err    error
	times  int
	resets int
}

func (f *failing) Err(context.Context) error {
	if f.times--; f.times >= 0 {
		return f.err
	}
	return nil
}

func (f *failing) Reset(context.Context) error { f.resets++; return nil }

// TestSources: a source's error fails the step, and decides whether it may be retried. All
// sources are reset, and the same step can be run again.
func TestSources(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	other := errors.New("something else")
	for _, c := range []struct {
		err   error
		retry bool
	}{
		{&device.Error{Op: "copy", Err: device.ErrCopyFailed}, true},
		{&device.Error{Op: "copy", Space: device.HBM(1), Err: device.ErrLost}, true},
		{&device.Error{Op: "copy", Space: space, Err: device.ErrLost}, false},
		{other, false},
	} {
		for _, at := range []int{0, 2} {
			r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true, Check: true}, Options{})
			bad, good := &failing{err: c.err, times: 1}, &failing{}
			r.p.sources = slices.Insert(r.p.sources, at, source(bad), source(good))
			table := r.kv.NewTable()
			reserve(t, table, 8)
			done, err := r.m.NewFence("done")
			check(t, err)
			_, err = r.p.Step(t.Context(), &Step{
				Sequences: []Sequence{{Tokens: []int32{1, 2}, Table: table, LogitRows: 1}}, Done: []device.Point{{Fence: done, Value: 1}},
			})
			table.Release(false)
			if !errors.Is(err, c.err) || errors.Is(err, ErrStepFailed) != c.retry {
				t.Errorf("a source that fails with %v: %v", c.err, err)
			}
			if bad.resets != 1 || good.resets != 1 || done.Value() != 0 {
				t.Errorf("%d and %d resets, want one each; the end of a step that failed is at %d", bad.resets, good.resets, done.Value())
			}
			if d := r.run().differs(want); d != "" {
				t.Error(d)
			}
		}
	}
}

// kvLoad is a rig with a sequence whose KV blocks also have a copy in host memory.
type kvLoad struct {
	*rig
	stream device.Stream
	arrive device.Fence
	value  uint32
	// saved is a copy of the sequence's blocks, junk as many bytes of something else.
	saved, junk device.Memory
	step        Step
	want        history
}

func newKVLoad(t *testing.T, mo emulated.Options, fraction float64, o Options) *kvLoad {
	t.Helper()
	x := &kvLoad{rig: newRig(t, "mixtral", fraction, mo, o)}
	at := space
	if o.HostAttention != nil {
		at = device.Host
	}
	var err error
	x.stream, err = x.m.NewStream(at, device.StreamOptions{Name: "load KV"})
	check(t, err)
	x.arrive, err = x.m.NewFence("KV loaded")
	check(t, err)
	table := x.kv.NewTable()
	t.Cleanup(func() { table.Release(false) })
	reserve(t, table, 40)
	prompt := make([]int32, 33)
	for i := range prompt {
		prompt[i] = int32(3 * i)
	}
	_, err = x.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: prompt, Table: table}}})
	check(t, err)
	size := int64(len(table.Blocks())) * x.p.o.KV.Shape().BlockBytes()
	for _, m := range []*device.Memory{&x.saved, &x.junk} {
		*m, err = x.m.Alloc(device.Host, size, "KV copy")
		check(t, err)
		t.Cleanup(func() { check(t, (*m).Free()) })
	}
	copy(x.junk.Write(0, size), bytes.Repeat([]byte{0x3f}, int(size)))
	x.step = Step{Logits: true, Sequences: []Sequence{{Tokens: []int32{7}, Start: len(prompt), Table: table, LogitRows: 1}}}
	res, err := x.p.Step(t.Context(), &x.step)
	check(t, err)
	x.want.add(res)
	x.copies(func(block, saved device.Range) error { return x.stream.Copy(saved, block) }, x.saved)
	check(t, x.stream.Synchronize(t.Context()))
	return x
}

// copies enqueues one copy for each of the sequence's blocks.
func (x *kvLoad) copies(enqueue func(block, saved device.Range) error, m device.Memory) {
	x.Helper()
	k, _ := x.p.o.KV.View(0)
	n := x.p.o.KV.Shape().BlockBytes()
	for i, id := range x.step.Sequences[0].Table.Blocks() {
		check(x, enqueue(device.Range{Addr: k.Addr + device.Addr(int64(id)*n), Bytes: n}, m.Range(int64(i)*n, n)))
	}
}

// load overwrites the sequence's blocks and loads them again. It returns the point at which
// the load is complete.
func (x *kvLoad) load() device.Point {
	x.Helper()
	put := func(block, saved device.Range) error { return x.stream.Copy(block, saved) }
	x.copies(put, x.junk)
	x.copies(put, x.saved)
	x.value++
	check(x, x.stream.SignalFence(x.arrive, x.value))
	return device.Point{Fence: x.arrive, Value: x.value}
}

// kvCases calls each for ways to run a step while KV blocks are copied.
func kvCases(each func(mo emulated.Options, fraction float64, o Options)) {
	for i, o := range append([]Options{{Graphs: 4}, {SmallBatchTokens: -1}}, variants...) {
		for _, schedule := range []emulated.Schedule{emulated.Eager, emulated.Lazy, emulated.Random} {
			fraction := 0.5
			if o.Graphs > 0 {
				fraction = 0
			}
			each(emulated.Options{
				Virtual: true, Check: true, Schedule: schedule, Seed: uint64(i),
				Host: emulated.GPU{BytesPerSecond: 1e9}, HostLink: emulated.Link{BytesPerSecond: 1e7},
			}, fraction, o)
		}
	}
}

// TestWait: a step does not read the KV cache before the points that it waits for, and its
// stall is measured.
func TestWait(t *testing.T) {
	kvCases(func(mo emulated.Options, fraction float64, o Options) {
		x := newKVLoad(t, mo, fraction, o)
		for range 3 { // as a graph too
			x.step.Wait = []device.Point{x.load()}
			res, err := x.p.Step(t.Context(), &x.step)
			check(t, err)
			var got history
			if got.add(res); got.differs(x.want) != "" {
				t.Errorf("%+v, %+v: %s", o, mo, got.differs(x.want))
			}
		}
		if s := x.p.Graphs(); (s.Launched > 0) != (o.Graphs > 0) {
			t.Errorf("%+v: %+v", o, s)
		}
		// Overwritten and loaded again, three times.
		takes := time.Duration(6 * float64(x.saved.Bytes()) / mo.HostLink.BytesPerSecond * 1e9)
		if s := x.p.Stalls(); o.HostAttention == nil && s[KVLoad] < takes*9/10 {
			t.Errorf("%+v, %+v: KV loads take %v; stalls %v", o, mo, takes, s.ByName())
		}
	})
}

// TestDone: an operation that waits for a step's end finds everything that the step wrote,
// also after a retry.
func TestDone(t *testing.T) {
	kvCases(func(mo emulated.Options, fraction float64, o Options) {
		x := newKVLoad(t, mo, fraction, o)
		done, err := x.m.NewFence("done")
		check(t, err)
		x.copies(func(block, saved device.Range) error { return x.stream.Copy(block, saved) }, x.junk)
		check(t, x.stream.Synchronize(t.Context()))
		q := &x.step.Sequences[0]
		q.Tokens, q.Start = append(make([]int32, 33), 7), 0
		for i := range 33 {
			q.Tokens[i] = int32(3 * i)
		}
		x.step.Done = []device.Point{{Fence: done, Value: 1}}
		stored, err := x.m.Alloc(device.Host, x.saved.Bytes(), "stored")
		check(t, err)
		check(t, x.stream.WaitFence(done, 1))
		x.copies(func(block, saved device.Range) error { return x.stream.Copy(saved, block) }, stored)
		fault := x.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: own, Skip: 1})
		defer fault.Release()
		if _, err := x.p.Step(t.Context(), &x.step); !errors.Is(err, ErrStepFailed) || done.Value() != 0 {
			t.Errorf("%+v: a step whose copy fails: %v; its end is at %d", o, err, done.Value())
		}
		_, err = x.p.Step(t.Context(), &x.step)
		check(t, err)
		check(t, x.stream.Synchronize(t.Context()))
		// The blocks hold older content behind the 34 tokens.
		shape := x.p.o.KV.Shape()
		full := int64(2) * shape.BlockBytes()
		if !bytes.Equal(stored.Read(0, full), x.saved.Read(0, full)) {
			t.Errorf("%+v, %+v: the stored blocks differ from what the step wrote", o, mo)
		}
		check(t, stored.Free())
	})
}

// TestWaitFails: a load that fails fails the step, whether or not the compute stream sees the
// failure.
func TestWaitFails(t *testing.T) {
	for _, machine := range []device.Machine{nil, &lax{}} {
		x := newKVLoad(t, emulated.Options{Virtual: true}, 0.5, Options{Machine: machine, SmallBatchTokens: -1})
		other := errors.New("not a copy")
		for i, cause := range []error{&device.Error{Op: "copy", Err: device.ErrCopyFailed}, other} {
			x.value++
			failed := device.Point{Fence: x.arrive, Value: x.value}
			check(t, x.arrive.Fail(failed.Value, cause))
			x.step.Wait = []device.Point{x.load(), failed}
			if _, err := x.p.Step(t.Context(), &x.step); !errors.Is(err, cause) || errors.Is(err, ErrStepFailed) != (i == 0) {
				t.Errorf("on %T: a load that fails with %v: %v", machine, cause, err)
			}
			x.step.Wait = []device.Point{x.load()}
			res, err := x.p.Step(t.Context(), &x.step)
			check(t, err)
			var got history
			if got.add(res); got.differs(x.want) != "" {
				t.Errorf("on %T: %s", machine, got.differs(x.want))
			}
		}
	}
}

// TestAwaitPointsOrders: a copy that has completed does not stall the stream, but the stream
// must wait for its fence, or nothing variants the stream's reads after the copy.
func TestAwaitPointsOrders(t *testing.T) {
	for _, awaits := range []bool{true, false} {
		findings := 0
		m, err := emulated.New(emulated.Options{Virtual: true, Check: true, Report: func(emulated.Finding) { findings++ }})
		check(t, err)
		stream := func(name string) device.Executor {
			s, err := m.NewStream(space, device.StreamOptions{Name: name})
			check(t, err)
			return s.(device.Executor)
		}
		compute, copies := stream("compute"), stream("copy")
		from, err := m.Alloc(device.Host, 256, "host copy")
		check(t, err)
		slot, err := m.Alloc(space, 256, "slot")
		check(t, err)
		from.Write(0, 256)
		landed, err := m.NewFence("landed")
		check(t, err)
		check(t, copies.Copy(slot.Range(0, 256), from.Range(0, 256)))
		check(t, copies.SignalFence(landed, 1))
		point := device.Point{Fence: landed, Value: 1}
		for !point.Reached() { // the query lets the machine continue, and establishes no order
			continue
		}
		counted := &meter{machine: m, stream: compute}
		if awaits {
			wave := experts.Wave{WaitFor: []device.Point{point}}
			check(t, awaitPoints(compute, ExpertCopy, wave.WaitFor, counted))
		}
		check(t, compute.Execute(device.Work{Name: "experts", Reads: []device.Range{slot.Range(0, 256)}, Run: func(device.Access) error { return nil }}))
		check(t, errors.Join(compute.Synchronize(t.Context()), copies.Synchronize(t.Context())))
		if (findings == 0) != awaits || counted.used != 0 {
			t.Errorf("awaited: %v: %d findings, %d events", awaits, findings, counted.used)
		}
		_ = errors.Join(from.Free(), slot.Free(), m.Close()) // with the findings
	}
}
