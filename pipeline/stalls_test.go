package pipeline

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestStallsByCause slows one thing down at a time: nearly all stalls must then have that
// cause.
func TestStallsByCause(t *testing.T) {
	slow := emulated.Link{BytesPerSecond: 50e6}
	for _, c := range []struct {
		want Cause
		mo   emulated.Options
		o    Options
		// fraction of experts that are offloaded.
		fraction float64
	}{
		{ExpertCopy, emulated.Options{HostLink: slow}, Options{SmallBatchTokens: -1}, 1},
		{ExpertCopy, emulated.Options{HostLink: slow}, Options{SmallBatchTokens: 64}, 1},
		{ExpertCopy, emulated.Options{HostLink: slow}, Options{Grouping: configs.PerMicroBatch, MicroBatches: 3}, 1},
		{KVCopy, emulated.Options{HostLink: slow}, Options{HostAttention: host}, 0},
		{CPUAttention, emulated.Options{Host: emulated.GPU{BytesPerSecond: 10e6}}, Options{HostAttention: host}, 0},
		{CPUAttention, emulated.Options{Host: emulated.GPU{FlopsPerSecond: 50e6}}, Options{HostAttention: host, Grouping: configs.PerMicroBatch}, 0},
	} {
		c.mo.Virtual = true
		c.mo.GPUs = []emulated.GPU{{BytesPerSecond: 100e9}}
		r := newRig(t, "mixtral", c.fraction, c.mo, c.o)
		began := r.m.Now()
		r.run()
		took, stalls := r.m.Now()-began, r.p.Stalls()
		if got, sum := stalls[c.want], stalls.Sum(); got < sum*9/10 || sum > took || sum < took/4 {
			t.Errorf("%v on %+v: stalls %v of %v, want nearly all by %s", c.o, c.mo, stalls.ByName(), took, c.want)
		}
		var last Stalls
		first, end, parts, err := r.p.LatestStep(nil)
		check(t, err)
		for i, s := range parts {
			if last[s.Cause] += s.End - s.Begin; s.Begin < first || s.End > end || s.Begin >= s.End || i > 0 && s.Begin < parts[i-1].End {
				t.Errorf("%v on %+v: stall %d of the last step, from %v to %v, is %+v", c.o, c.mo, i, first, end, s)
			}
		}
		if last[c.want] == 0 || last[c.want] > stalls[c.want] || end-first > took {
			t.Errorf("%v on %+v: stalls %v of the last step, which took %v", c.o, c.mo, last.ByName(), end-first)
		}
	}
}

// TestUnmeasuredSteps: a step whose events cannot be made, or their times not be read, is as
// good as any other. It counts no stalls, and the log says so at most once a minute.
func TestUnmeasuredSteps(t *testing.T) {
	mo := emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 50e6}}
	want := newRig(t, "mixtral", 0.5, mo, Options{}).run()
	for _, c := range []lax{{noTimes: errors.New("no times")}, {noEvents: errors.New("no events")}} {
		m := lax{}
		var log strings.Builder
		r := newRig(t, "mixtral", 0.5, mo, Options{Machine: &m, Log: slog.New(slog.NewTextHandler(&log, nil))})
		m.noTimes, m.noEvents = c.noTimes, c.noEvents
		if d := r.run().differs(want); d != "" {
			t.Errorf("%+v: %s", c, d)
		}
		if s := r.p.Stalls(); s.Sum() != 0 {
			t.Errorf("%+v: stalls %v", c, s.ByName())
		}
		if n := strings.Count(log.String(), "not measured"); n != 1 {
			t.Errorf("%+v: %d messages in %v: %s", c, n, r.m.Now(), &log)
		}
		m.noTimes, m.noEvents = nil, nil
		if r.run(); r.p.Stalls().Sum() == 0 {
			t.Errorf("%+v: no stalls once events work", c)
		}
	}
}

// TestStallsLaunchBound: a device that has run out of work stalls by LaunchBound, or by
// RouterSync while the host waits for a router.
func TestStallsLaunchBound(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: []emulated.GPU{{}, {BytesPerSecond: 1e9}}})
	check(t, err)
	defer func() { check(t, m.Close()) }()
	stream := func(space device.Space) device.Executor {
		s, err := m.NewStream(space, device.StreamOptions{Name: "compute"})
		check(t, err)
		return s.(device.Executor)
	}
	s, other := stream(device.HBM(0)), stream(device.HBM(1))
	p := &Pipeline{meter: meter{machine: m, stream: s}}
	const pause = 5 * time.Millisecond
	pass := func(d time.Duration) { // once the stream has run out of work
		t.Helper()
		check(t, s.Synchronize(t.Context()))
		check(t, other.Execute(device.Work{Name: "pass time", Bytes: d.Nanoseconds()}))
		check(t, other.Synchronize(t.Context()))
	}
	p.meter.begin()
	check(t, p.meter.afterAction(Attention)) // within a layer: not checked
	pass(pause)
	check(t, p.meter.beforeAction(Route))
	check(t, p.meter.afterAction(RoutedExperts))
	check(t, p.meter.beforeAction(Upload)) // launches no kernels
	pass(pause)
	check(t, p.meter.beforeAction(Attention)) // first stall
	check(t, p.meter.afterAction(Attention))  // from here on every action is checked
	pass(pause)
	check(t, p.meter.beforeAction(Route)) // second stall
	check(t, p.meter.afterAction(Route))
	idle, err := p.meter.record(s)
	check(t, err)
	pass(2 * pause)
	check(t, p.meter.afterRouterSync(idle))
	check(t, p.meter.beforeAction(RunFetched)) // RouterSync has counted it
	check(t, s.Synchronize(t.Context()))
	_, err = p.meter.end()
	check(t, err)
	if got, want := p.Stalls(), (Stalls{LaunchBound: 2 * pause, RouterSync: 2 * pause}); got != want || len(p.meter.spans) != 3 {
		t.Errorf("stalls %v in %d spans", got.ByName(), len(p.meter.spans))
	}
	check(t, p.meter.close())
	check(t, s.Close())
	check(t, other.Close())
}
