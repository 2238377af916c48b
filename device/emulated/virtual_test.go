package emulated_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// links is a machine with round figures: a byte per nanosecond from the host, four
// from peers, a flop per nanosecond.
func links(gpus int) emulated.Options {
	o := emulated.Options{
		Virtual:  true,
		HostLink: emulated.Link{BytesPerSecond: 1e9, Latency: 10 * time.Microsecond},
		PeerLink: emulated.Link{BytesPerSecond: 4e9, Latency: 5 * time.Microsecond},
	}
	for range gpus {
		o.GPUs = append(o.GPUs, emulated.GPU{FlopsPerSecond: 1e9, BytesPerSecond: 2e9})
	}
	return o
}

// job is a copy of so many bytes, or work, behind so much work on its stream.
type job struct {
	from, to     device.Space
	bytes        int64
	flops, moved int64
	on           device.Space
	after        time.Duration
}

// times runs each job on a stream of its own, all at once, and returns when each
// ended.
func times(t *testing.T, o emulated.Options, jobs []job) []time.Duration {
	t.Helper()
	ends := map[string]time.Duration{}
	o.Trace = func(tr emulated.Trace) {
		if tr.Op == "copy" || tr.Name == "job" {
			ends[tr.Stream] = tr.End
		}
	}
	m := open(t, o)
	var streams []device.Executor
	for i, j := range jobs {
		space := j.on
		if j.bytes > 0 {
			space = j.to
		}
		s := stream(t, m, space, fmt.Sprint(i))
		streams = append(streams, s)
		var start device.Event
		if j.after > 0 {
			var err error
			if start, err = m.NewEvent(); err != nil {
				t.Fatal(err)
			}
			// The host has a processor of its own, which only one job may use.
			d := stream(t, m, device.Host, "delay")
			if err := errors.Join(d.Execute(device.Work{Name: "delay", Flops: j.after.Nanoseconds()}), d.Record(start), s.Wait(start)); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		if j.bytes > 0 {
			err = s.Copy(alloc(t, m, j.to, j.bytes, "dst").Range(0, j.bytes), alloc(t, m, j.from, j.bytes, "src").Range(0, j.bytes))
		} else {
			err = s.Execute(device.Work{Name: "job", Flops: j.flops, Bytes: j.moved})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var out []time.Duration
	for i, s := range streams {
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		out = append(out, ends[fmt.Sprint(i)])
	}
	return out
}

func TestModels(t *testing.T) {
	const us = time.Microsecond
	g := device.HBM
	rooted := links(3)
	rooted.HostRoots = []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: 1e9}}
	delayed := links(2)
	delayed.Host.FlopsPerSecond = 1e9
	beside := links(2)
	beside.Host.FlopsPerSecond = 1e9
	beside.Traffic = []emulated.Traffic{
		{GPU: 0, Span: emulated.Span{From: 60 * us, Until: 160 * us}},
		{GPU: 1, ToHost: true, BytesPerSecond: 0.25e9, Span: emulated.Span{Until: time.Second}},
	}
	crawls := links(2)
	crawls.HostRates = []emulated.HostRate{{GPU: 0, BytesPerSecond: 0.1e9, Span: emulated.Span{From: 60 * us, Until: 160 * us}}, {GPU: 1, BytesPerSecond: 0.5e9}}
	for _, c := range []struct {
		name string
		o    emulated.Options
		jobs []job
		want []time.Duration
	}{
		{"one copy", links(2), []job{{to: g(0), bytes: 100_000}}, []time.Duration{110 * us}},
		{"one byte", links(2), []job{{to: g(0), bytes: 1}}, []time.Duration{10*us + 1}},
		{"peer", links(2), []job{{from: g(1), to: g(0), bytes: 100_000}}, []time.Duration{30 * us}},
		{"within a GPU, at half its bandwidth", links(2), []job{{from: g(0), to: g(0), bytes: 100_000}}, []time.Duration{100 * us}},
		{"one link, two copies", links(2), []job{{to: g(0), bytes: 100_000}, {to: g(0), bytes: 100_000}}, []time.Duration{210 * us, 210 * us}},
		{"one link, a short and a long copy", links(2), []job{{to: g(0), bytes: 100_000}, {to: g(0), bytes: 20_000}}, []time.Duration{130 * us, 50 * us}},
		{"two links", links(2), []job{{to: g(0), bytes: 100_000}, {to: g(1), bytes: 100_000}}, []time.Duration{110 * us, 110 * us}},
		{"both directions", links(2), []job{{to: g(0), bytes: 100_000}, {from: g(0), to: device.Host, bytes: 100_000}}, []time.Duration{110 * us, 110 * us}},
		{"behind one root", rooted, []job{{to: g(0), bytes: 100_000}, {to: g(1), bytes: 100_000}, {to: g(2), bytes: 100_000}}, []time.Duration{210 * us, 210 * us, 110 * us}},
		{"beside traffic that comes and goes", beside, []job{{to: g(0), bytes: 200_000}, {to: g(1), bytes: 100_000}}, []time.Duration{260 * us, 110 * us}},
		{"beside traffic of the other direction", beside, []job{{from: g(0), to: device.Host, bytes: 100_000}, {from: g(1), to: device.Host, bytes: 75_000}}, []time.Duration{110 * us, 110 * us}},
		{"a copy that comes within traffic", beside, []job{{to: g(0), bytes: 20_000}, {to: g(0), bytes: 40_000, after: 100 * us}}, []time.Duration{30 * us, 175 * us}},
		{"a link that crawls for a time", crawls, []job{{to: g(0), bytes: 100_000}, {from: g(1), to: device.Host, bytes: 50_000}}, []time.Duration{200 * us, 110 * us}},
		{"host and peer into one GPU", links(2), []job{{to: g(0), bytes: 100_000}, {from: g(1), to: g(0), bytes: 100_000}}, []time.Duration{110 * us, 30 * us}},
		{"two peers into one GPU", links(3), []job{{from: g(1), to: g(0), bytes: 100_000}, {from: g(2), to: g(0), bytes: 100_000}}, []time.Duration{55 * us, 55 * us}},
		{"a copy that comes later", delayed, []job{{to: g(0), bytes: 100_000}, {to: g(0), bytes: 100_000, after: 50 * us}}, []time.Duration{160 * us, 210 * us}},
		{"work bound by flops", links(1), []job{{on: g(0), flops: 50_000, moved: 50_000}}, []time.Duration{50 * us}},
		{"work bound by bytes", links(1), []job{{on: g(0), flops: 10_000, moved: 50_000}}, []time.Duration{25 * us}},
		{"two works on a GPU", links(1), []job{{on: g(0), flops: 50_000}, {on: g(0), flops: 10_000}}, []time.Duration{60 * us, 20 * us}},
		{"two works on two GPUs", links(2), []job{{on: g(0), flops: 50_000}, {on: g(1), flops: 10_000}}, []time.Duration{50 * us, 10 * us}},
		{"work beside a copy", links(1), []job{{on: g(0), flops: 50_000}, {to: g(0), bytes: 100_000}}, []time.Duration{50 * us, 110 * us}},
		{"nothing costs nothing", emulated.Options{Virtual: true}, []job{{to: g(0), bytes: 100_000}, {on: g(0), flops: 1e9}}, []time.Duration{0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, sched := range []emulated.Schedule{emulated.Eager, emulated.Random} {
				o := c.o
				o.Schedule = sched
				got := times(t, o, c.jobs)
				for i := range got {
					// Each end is rounded up to a nanosecond, and so are those before it.
					if d := got[i] - c.want[i]; d < 0 || d > 3 {
						t.Errorf("%v: job %d ended at %v, want %v", sched, i, got[i], c.want[i])
					}
				}
			}
		})
	}
}

// jumble runs a random program of three streams that wait for each other, and
// returns what ran, in order, with its times.
func jumble(t *testing.T, o emulated.Options) []string {
	t.Helper()
	var log []string
	o.Trace = func(tr emulated.Trace) {
		log = append(log, fmt.Sprintf("%s %s %s %v %v", tr.Stream, tr.Op, tr.Name, tr.Start, tr.End))
	}
	m := open(t, o)
	rng := rand.New(rand.NewPCG(1, 2))
	host, hbm := alloc(t, m, device.Host, 1<<16, "host"), alloc(t, m, device.HBM(0), 1<<16, "hbm")
	var streams []device.Executor
	for i := range 3 {
		streams = append(streams, stream(t, m, device.HBM(i), fmt.Sprint(i)))
	}
	e, err := m.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		s := streams[rng.IntN(3)]
		var err error
		switch rng.IntN(5) {
		case 0, 1:
			err = s.Execute(device.Work{Name: fmt.Sprint(i), Flops: rng.Int64N(50_000)})
		case 2:
			n := rng.Int64N(1 << 16)
			err = s.Copy(hbm.Range(0, n), host.Range(0, n))
		case 3:
			if err = s.Record(e); err == nil {
				err = streams[rng.IntN(3)].Wait(e)
			}
		case 4:
			if rng.IntN(5) == 0 {
				err = s.Synchronize(t.Context())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range streams {
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return log
}

func TestDeterminism(t *testing.T) {
	free := emulated.Options{Virtual: true}
	for name, o := range map[string]emulated.Options{"timed": links(3), "free": free} {
		t.Run(name, func(t *testing.T) {
			orders := map[string]bool{}
			for _, sched := range []emulated.Schedule{emulated.Eager, emulated.Lazy, emulated.Random} {
				for seed := range uint64(3) {
					o.Schedule, o.Seed = sched, seed
					first := jumble(t, o)
					for range 3 {
						if diff := cmp.Diff(first, jumble(t, o)); diff != "" {
							t.Fatalf("%v, seed %d: another run went another way:\n%s", sched, seed, diff)
						}
					}
					orders[strings.Join(first, "\n")] = true
				}
			}
			// Eager, lazy, and three seeds.
			if len(orders) != 5 {
				t.Errorf("%d different orders, want 5", len(orders))
			}
		})
	}
}

// TestLazy: what nobody waits for has not run.
func TestLazy(t *testing.T) {
	for _, sched := range []emulated.Schedule{emulated.Eager, emulated.Lazy} {
		m := open(t, emulated.Options{Virtual: true, Schedule: sched})
		a, b := stream(t, m, device.HBM(0), "a"), stream(t, m, device.HBM(0), "b")
		var ran []string
		work := func(name string) device.Work {
			return device.Work{Name: name, Run: func(device.Access) error { ran = append(ran, name); return nil }}
		}
		f, err := m.NewFence("f")
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(a.Execute(work("a1")), a.SignalFence(f, 1), a.Execute(work("a2")), b.WaitFence(f, 1), b.Execute(work("b1")), b.Synchronize(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"a1", "a2", "b1"}
		if sched == emulated.Lazy {
			want = []string{"a1", "b1"}
		}
		if !slices.Equal(ran, want) {
			t.Errorf("%v: ran %v, want %v", sched, ran, want)
		}
		if err := a.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPriority(t *testing.T) {
	m := open(t, emulated.Options{Virtual: true})
	var ran []string
	var all []device.Stream
	for i, name := range []string{"low", "high", "middle"} {
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: name, Priority: []int{0, 2, 1}[i]})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.(device.Executor).Execute(device.Work{Run: func(device.Access) error { ran = append(ran, name); return nil }}); err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	for _, s := range all {
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"high", "middle", "low"}; !slices.Equal(ran, want) {
		t.Errorf("ran %v, want %v", ran, want)
	}
}

// TestNothingRunsUnwaited: neither work nor time goes on by itself.
func TestNothingRunsUnwaited(t *testing.T) {
	m := open(t, links(1))
	s := stream(t, m, device.HBM(0), "s")
	ran := false
	if err := s.Execute(device.Work{Flops: 1000, Run: func(device.Access) error { ran = true; return nil }}); err != nil {
		t.Fatal(err)
	}
	e, err := m.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Record(e); err != nil {
		t.Fatal(err)
	}
	if done, err := e.Query(); done || err != nil || ran || m.Now() != 0 {
		t.Errorf("nobody waited, and: passed %v, %v, ran %v, now %v", done, err, ran, m.Now())
	}
	if err := e.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if at, err := e.Time(); !ran || at != 1000 || m.Now() != 1000 || err != nil {
		t.Errorf("ran %v, the event at %v, %v, now %v", ran, at, err, m.Now())
	}
}

func TestDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := emulated.New(emulated.Options{Virtual: true})
		if err != nil {
			t.Fatal(err)
		}
		a, b := stream(t, m, device.HBM(0), "a"), stream(t, m, device.HBM(1), "b")
		f, err := m.NewFence("ids")
		if err != nil {
			t.Fatal(err)
		}
		e, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(a.WaitFence(f, 3), a.Record(e), b.Wait(e)); err != nil {
			t.Fatal(err)
		}
		for name, wait := range map[string]func() error{
			"stream": func() error { return b.Synchronize(t.Context()) },
			"event":  func() error { return e.Synchronize(t.Context()) },
			"fence":  func() error { return f.Wait(t.Context(), 3) },
			"close":  b.Close,
		} {
			err := wait()
			if !errors.Is(err, emulated.ErrDeadlock) {
				t.Fatalf("%s: %v", name, err)
			}
			for _, want := range []string{`stream "a" (gpu0) waits for fence "ids" to reach 3 (now 0)`, `stream "b" (gpu1) waits for an event of stream "a" (gpu0)`} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %q does not say %q", name, err, want)
				}
			}
		}
		// Somebody who comes in time ends the wait.
		go func() {
			time.Sleep(time.Second)
			if err := f.Signal(3); err != nil {
				t.Error(err)
			}
		}()
		if err := b.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		// A stream that waits for itself.
		if err := a.Execute(device.Work{Name: "selfish", Run: func(device.Access) error { return a.Synchronize(t.Context()) }}); err != nil {
			t.Fatal(err)
		}
		if err := a.Recover(t.Context()); !errors.Is(err, emulated.ErrDeadlock) || !strings.Contains(err.Error(), `runs launch "selfish"`) {
			t.Errorf("a stream that waits for itself: %v", err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestTurns: a goroutine that slept while another drove the machine drives on when
// that one is done.
func TestTurns(t *testing.T) { synctest.Test(t, testTurns) }

func testTurns(t *testing.T) {
	m := open(t, emulated.Options{Virtual: true, DeadlockAfter: time.Hour})
	a, b := stream(t, m, device.HBM(0), "a"), stream(t, m, device.HBM(1), "b")
	f, err := m.NewFence("f")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	err = errors.Join(
		b.Execute(device.Work{Name: "b"}),
		a.Execute(device.Work{Name: "a", Run: func(device.Access) error {
			go func() { ended <- b.Synchronize(t.Context()) }()
			synctest.Wait() // it has found the machine driven and sleeps
			return nil
		}}),
		a.Synchronize(t.Context()),
	)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("nobody drives the machine")
		// Any call wakes it.
		if err := f.Signal(1); err != nil {
			t.Error(err)
		}
		<-ended
	}
}

// TestIdle: with synctest.Wait, programs of several goroutines run the same way
// every time.
func TestIdle(t *testing.T) {
	run := func() (log []string) {
		synctest.Test(t, func(t *testing.T) {
			o := links(2)
			o.Idle = synctest.Wait
			o.Trace = func(tr emulated.Trace) {
				log = append(log, fmt.Sprintf("%s %s %v %v", tr.Stream, tr.Op, tr.Start, tr.End))
			}
			m := open(t, o)
			src, dst := alloc(t, m, device.Host, 1<<16, "src"), alloc(t, m, device.HBM(0), 1<<16, "dst")
			compute, fetch := stream(t, m, device.HBM(0), "compute"), stream(t, m, device.HBM(0), "fetch")
			host := stream(t, m, device.Host, "router")
			asked, there := make(chan uint32, 4), make(chan error, 1)
			f, err := m.NewFence("there")
			if err != nil {
				t.Fatal(err)
			}
			const steps = 30
			go func() {
				for v := range asked {
					n := int64(v) * 100
					if err := errors.Join(fetch.Copy(dst.Range(0, n), src.Range(0, n)), fetch.SignalFence(f, v)); err != nil {
						there <- err
						return
					}
				}
				there <- nil
			}()
			for v := uint32(1); v <= steps; v++ {
				err := errors.Join(
					host.Execute(device.Work{Name: "ask", Host: true, Flops: 100, Run: func(device.Access) error { asked <- v; return nil }}),
					compute.Execute(device.Work{Name: "attention", Flops: 5000}),
					compute.WaitFence(f, v),
					compute.Execute(device.Work{Name: "experts", Flops: 7000}),
				)
				if err == nil && v%3 == 0 {
					err = compute.Synchronize(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			close(asked)
			if err := errors.Join(<-there, fetch.Synchronize(t.Context())); err != nil {
				t.Fatal(err)
			}
		})
		return log
	}
	first := run()
	for range 10 {
		if diff := cmp.Diff(first, run()); diff != "" {
			t.Fatalf("another run went another way:\n%s", diff)
		}
	}
}

// TestNoData moves a model of 200 GB through a machine without data.
func TestNoData(t *testing.T) {
	o, err := emulated.ParseSpec("gpus=2,hbm=256GiB,host=512GiB,pcie=50GB/s,flops=800T,bw=4TB/s,virtual,nodata,check")
	if err != nil {
		t.Fatal(err)
	}
	m := open(t, o)
	if c := m.Capabilities(); c != (device.Capabilities{Emulated: true, Timed: true}) {
		t.Errorf("a virtual machine without data says that it has %+v", c)
	}
	const n = 200e9
	src, dst := alloc(t, m, device.Host, n, "experts"), alloc(t, m, device.HBM(0), n, "slots")
	ids := alloc(t, m, device.Host, 4096, "ids")
	copy(ids.Write(0, 5), "hello")
	if got := string(ids.Read(0, 5)); got != "hello" {
		t.Errorf("host memory gives %q", got)
	}
	src.Write(0, n)
	s := stream(t, m, device.HBM(0), "s")
	var ran []string
	run := func(name string) func(device.Access) error {
		return func(device.Access) error { ran = append(ran, name); return nil }
	}
	err = errors.Join(
		s.Copy(dst.Range(0, n), src.Range(0, n)),
		s.Execute(device.Work{Name: "gemm", Reads: []device.Range{dst.Range(0, n)}, Flops: 800e12, Run: run("kernel")}),
		s.Execute(device.Work{Name: "answer", Host: true, Run: run("host")}),
		s.Synchronize(t.Context()),
	)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(ran, []string{"host"}) {
		t.Errorf("ran %v", ran)
	}
	if got := m.Now(); got != 5*time.Second {
		t.Errorf("4 s of copy and 1 s of work took %v", got)
	}
}

// TestTurn: loops of a virtual clock run where Turn is called, in the order in which they
// were begun, and Yield does one operation.
func TestTurn(t *testing.T) {
	m := open(t, emulated.Options{Virtual: true})
	var got []string
	loop := func(name string, rounds int) (stop func()) {
		return m.Loop(time.Hour, func(time.Duration) time.Duration {
			got = append(got, name)
			if rounds--; rounds == 0 {
				return -1
			}
			return time.Hour
		})
	}
	defer loop("a", 0)()
	loop("b", 2)
	stop := loop("c", 0)
	host, err := m.NewStream(device.Host, device.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		work := device.Work{Name: "work", Host: true, Run: func(device.Access) error {
			got = append(got, "work")
			return nil
		}}
		if err := errors.Join(host.(device.Executor).Execute(work), host.(device.Executor).Execute(work)); err != nil {
			t.Fatal(err)
		}
		if i == 2 {
			stop()
		}
		m.Turn()
		if err := m.Yield(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if want := strings.Fields("a b c work a b c work a work a work"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if err := errors.Join(host.Synchronize(t.Context()), host.Close()); err != nil {
		t.Error(err)
	}
	if n := testing.AllocsPerRun(100, m.Turn); n > 0 {
		t.Errorf("Turn allocates %v times", n)
	}
}
