package emulated_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// both runs f on the wall clock and on a virtual one.
func both(t *testing.T, f func(t *testing.T, m *emulated.Machine)) {
	for name, o := range map[string]emulated.Options{"wall": {Check: true}, "virtual": {Check: true, Virtual: true}} {
		t.Run(name, func(t *testing.T) { f(t, open(t, o)) })
	}
}

func wants(t *testing.T, err, target error, op string) {
	t.Helper()
	var e *device.Error
	if !errors.Is(err, target) || !errors.As(err, &e) || e.Op != op {
		t.Fatalf("error %v, want %s: %v", err, op, target)
	}
}

func TestRefuseAlloc(t *testing.T) {
	both(t, func(t *testing.T, m *emulated.Machine) {
		gpu1 := m.Inject(&emulated.Fault{Kind: emulated.RefuseAlloc, Skip: 1, Match: func(p emulated.Point) bool {
			return p.Space == device.HBM(1) && strings.HasPrefix(p.Label, "slab")
		}})
		alloc(t, m, device.HBM(0), 100, "slab 0")
		alloc(t, m, device.HBM(1), 100, "slab 1")
		alloc(t, m, device.HBM(1), 100, "other")
		_, err := m.Alloc(device.HBM(1), 100, "slab 2")
		wants(t, err, device.ErrOutOfMemory, "alloc")
		alloc(t, m, device.HBM(1), 100, "slab 3")
		if gpu1.Hits() != 1 {
			t.Errorf("%d hits", gpu1.Hits())
		}
		if u, err := m.Usage(device.HBM(1)); err != nil || u.Allocated != 3*256 {
			t.Errorf("accounts after a refusal: %+v, %v", u, err)
		}
	})
}

func TestFailCopy(t *testing.T) {
	both(t, func(t *testing.T, m *emulated.Machine) {
		src, dst := alloc(t, m, device.Host, 64, "src"), alloc(t, m, device.Host, 64, "dst")
		peer := alloc(t, m, device.HBM(1), 64, "peer")
		s, other := stream(t, m, device.HBM(0), "s"), stream(t, m, device.HBM(0), "other")
		e, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		f, err := m.NewFence("f")
		if err != nil {
			t.Fatal(err)
		}
		for i := range src.Write(0, 64) {
			src.Write(0, 64)[i] = byte(i)
		}
		clear(dst.Write(0, 64))
		cause := errors.New("row remap pending")
		m.Inject(&emulated.Fault{
			Kind: emulated.FailCopy, Err: cause,
			Match: func(p emulated.Point) bool { return p.From == device.HBM(1) && p.Bytes == 64 },
		})
		ran := false
		err = errors.Join(
			s.Copy(peer.Range(0, 64), src.Range(0, 64)),
			s.Copy(dst.Range(0, 64), peer.Range(0, 64)),
			s.Execute(device.Work{Name: "behind", Run: func(device.Access) error { ran = true; return nil }}),
			s.Record(e), s.SignalFence(f, 1),
			other.WaitFence(f, 1), other.Record(e),
		)
		if err != nil {
			t.Fatal(err)
		}
		wants(t, e.Synchronize(t.Context()), cause, "copy")
		wants(t, f.Wait(t.Context(), 1), cause, "copy")
		wants(t, s.Recover(t.Context()), cause, "copy")
		wants(t, other.Recover(t.Context()), cause, "copy")
		if ran || dst.Read(0, 64)[1] != 0 {
			t.Error("something happened behind a failed copy")
		}
		// The fault struck once: the work is done again.
		if err := errors.Join(s.Copy(dst.Range(0, 64), peer.Range(0, 64)), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		if dst.Read(0, 64)[63] != 63 {
			t.Error("the copy moved nothing")
		}
	})
}

func TestFaultsByChance(t *testing.T) {
	count := func(seed uint64) (hits []int) {
		m := open(t, emulated.Options{Virtual: true, Seed: seed})
		src, dst := alloc(t, m, device.Host, 64, "src"), alloc(t, m, device.HBM(0), 64, "dst")
		f := m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.3})
		s := stream(t, m, device.HBM(0), "s")
		for i := range 200 {
			if err := s.Copy(dst.Range(0, 64), src.Range(0, 64)); err != nil {
				t.Fatal(err)
			}
			if err := s.Recover(t.Context()); err != nil {
				wants(t, err, device.ErrCopyFailed, "copy")
				hits = append(hits, i)
			}
		}
		if f.Hits() != len(hits) {
			t.Errorf("%d hits, %d failures", f.Hits(), len(hits))
		}
		return hits
	}
	a, b, c := count(1), count(1), count(2)
	if len(a) < 30 || len(a) > 90 {
		t.Errorf("%d failures of 200 at 30 %%", len(a))
	}
	if !slices.Equal(a, b) || slices.Equal(a, c) {
		t.Errorf("the seed does not decide: %v, %v, %v", a, b, c)
	}
}

func TestStallCopy(t *testing.T) {
	both(t, func(t *testing.T, m *emulated.Machine) {
		src, dst := alloc(t, m, device.Host, 64, "src"), alloc(t, m, device.HBM(0), 64, "dst")
		src.Write(0, 64)
		s, other := stream(t, m, device.HBM(0), "s"), stream(t, m, device.HBM(0), "other")
		held := m.Inject(&emulated.Fault{Kind: emulated.StallCopy})
		e, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Copy(dst.Range(0, 64), src.Range(0, 64)), s.Record(e), other.Execute(device.Work{Name: "beside"}), other.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			if done, err := e.Query(); done || err != nil {
				t.Fatalf("a stalled copy ended: %v, %v", done, err)
			}
		}
		held.Release()
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		const pause = 3 * time.Millisecond
		m.Inject(&emulated.Fault{Kind: emulated.StallCopy, For: pause})
		before := m.Now()
		if err := errors.Join(s.Copy(dst.Range(0, 64), src.Range(0, 64)), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		if took := m.Now() - before; took < pause {
			t.Errorf("a copy stalled for %v took %v", pause, took)
		}
	})
}

// TestCloseWhileStalled: a machine with a copy that is never released closes.
func TestCloseWhileStalled(t *testing.T) {
	for _, o := range []emulated.Options{{}, {Virtual: true}} {
		m, err := emulated.New(o)
		if err != nil {
			t.Fatal(err)
		}
		m.Inject(&emulated.Fault{Kind: emulated.StallCopy})
		mem, err := m.Alloc(device.Host, 64, "mem")
		if err != nil {
			t.Fatal(err)
		}
		s := stream(t, m, device.HBM(0), "s")
		if err := s.Copy(mem.Range(0, 8), mem.Range(8, 8)); err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err == nil || !strings.Contains(err.Error(), "stalled by an injected fault") {
			t.Errorf("Close: %v", err)
		}
	}
}

func TestLose(t *testing.T) {
	both(t, func(t *testing.T, m *emulated.Machine) {
		local, peer := alloc(t, m, device.HBM(0), 64, "local"), alloc(t, m, device.HBM(1), 64, "peer")
		src := alloc(t, m, device.Host, 64, "src")
		src.Write(0, 64)
		on0, on1 := stream(t, m, device.HBM(0), "on 0"), stream(t, m, device.HBM(1), "on 1")
		held, err := m.NewFence("held")
		if err != nil {
			t.Fatal(err)
		}
		after, err := m.NewFence("after")
		if err != nil {
			t.Fatal(err)
		}
		e, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(
			on1.Copy(peer.Range(0, 64), src.Range(0, 64)),
			on1.Synchronize(t.Context()),
			on1.WaitFence(held, 1), on1.Record(e), on1.SignalFence(after, 1),
			on0.WaitFence(held, 1), on0.Copy(local.Range(0, 64), peer.Range(0, 64)),
		)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Lose(1); err != nil {
			t.Fatal(err)
		}
		// What was to come from the lost device fails at once, held or not.
		wants(t, e.Synchronize(t.Context()), device.ErrLost, "stream")
		wants(t, after.Wait(t.Context(), 1), device.ErrLost, "stream")
		if err := held.Signal(1); err != nil {
			t.Fatal(err)
		}
		wants(t, on0.Recover(t.Context()), device.ErrLost, "copy")
		for range 2 {
			wants(t, on1.Recover(t.Context()), device.ErrLost, "stream")
		}
		wants(t, on1.Execute(device.Work{Name: "late"}), device.ErrLost, "launch")
		wants(t, on1.SignalFence(after, 2), device.ErrLost, "signal")
		wants(t, on0.Copy(local.Range(0, 64), peer.Range(0, 64)), device.ErrLost, "copy")
		_, err = m.Alloc(device.HBM(1), 64, "late")
		wants(t, err, device.ErrLost, "alloc")
		_, err = m.NewStream(device.HBM(1), device.StreamOptions{})
		wants(t, err, device.ErrLost, "stream")
		// The others go on.
		if err := errors.Join(on0.Copy(local.Range(0, 64), src.Range(0, 64)), on0.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
	})
}

// TestLoseWhileRunning loses a device during a copy from it.
func TestLoseWhileRunning(t *testing.T) {
	m := open(t, links(2))
	local, peer := alloc(t, m, device.HBM(0), 1<<20, "local"), alloc(t, m, device.HBM(1), 1<<20, "peer")
	on0, host := stream(t, m, device.HBM(0), "on 0"), stream(t, m, device.Host, "host")
	// The link needs 262 us; the host stream's work on GPU 0's clock ends at 10 us.
	on1 := stream(t, m, device.HBM(1), "on 1")
	e, err := m.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		on0.Copy(local.Range(0, 1<<20), peer.Range(0, 1<<20)),
		on1.Execute(device.Work{Name: "wait", Flops: 10_000}), on1.Record(e),
		host.Wait(e), host.Execute(device.Work{Name: "lose", Host: true, Run: func(device.Access) error { return m.Lose(1) }}),
	)
	if err != nil {
		t.Fatal(err)
	}
	wants(t, on0.Recover(t.Context()), device.ErrLost, "copy")
	if err := host.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Copies that begin or end while a GPU's link to the host is down fail, in both directions; others do not.
func TestLinkDown(t *testing.T) {
	o := links(2)
	o.HostRates = []emulated.HostRate{{GPU: 1, Span: emulated.Span{From: 150 * time.Microsecond, Until: 400 * time.Microsecond}}}
	m := open(t, o)
	const n = 100_000 // 110 us from and to the host, 30 us between GPUs
	host := alloc(t, m, device.Host, n, "host").Range(0, n)
	gpu := []device.Range{alloc(t, m, device.HBM(0), n, "gpu0").Range(0, n), alloc(t, m, device.HBM(1), n, "gpu1").Range(0, n)}
	s := stream(t, m, device.HBM(1), "copies")
	for i, c := range []struct {
		dst, src device.Range
		fails    bool
	}{
		{gpu[1], host, false}, {host, gpu[1], true}, // which it is when this one ends, at 220 us
		{gpu[1], host, true}, {gpu[0], gpu[1], false}, {gpu[0], host, false}, // the other link
		{gpu[0], host, false}, {gpu[1], host, false},
	} {
		if err := s.Copy(c.dst, c.src); err != nil {
			t.Fatal(err)
		}
		switch err := s.Synchronize(t.Context()); {
		case c.fails && (!errors.Is(err, device.ErrCopyFailed) || !strings.Contains(err.Error(), "the link is down")):
			t.Errorf("copy %d: %v", i, err)
		case !c.fails && err != nil:
			t.Errorf("copy %d at %v: %v", i, m.Now(), err)
		}
		if c.fails {
			_ = s.Recover(t.Context())
		}
	}
	if got := m.Now(); got < 500*time.Microsecond || got > 650*time.Microsecond {
		t.Errorf("it took %v", got)
	}
}

func TestLimit(t *testing.T) {
	m := open(t, emulated.Options{GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}}})
	alloc(t, m, device.HBM(0), 1<<19, "half")
	for _, limit := range []int64{2 << 20, 3 << 18, 1 << 20} {
		if err := m.Limit(device.HBM(0), limit); err != nil {
			t.Fatal(err)
		}
	}
	if u, err := m.Usage(device.HBM(0)); err != nil || u.Capacity != 3<<18 || u.Free() != 1<<18 || u.OtherProcesses != 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	_, err := m.Alloc(device.HBM(0), 1<<18+1, "too much")
	wants(t, err, device.ErrOutOfMemory, "alloc")
	if err := m.Limit(device.HBM(0), 1<<18); err == nil || !strings.Contains(err.Error(), "524288 are allocated") {
		t.Errorf("limited to less than is allocated: %v", err)
	}
	if err := m.Limit(device.HBM(7), 1); err == nil {
		t.Error("a space that the machine lacks was limited")
	}
}

func TestOccupy(t *testing.T) {
	m := open(t, emulated.Options{GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}}})
	mem := alloc(t, m, device.HBM(0), 1<<19, "half")
	err := m.Occupy(device.HBM(0), 1<<19+1)
	wants(t, err, device.ErrOutOfMemory, "occupy")
	if !strings.Contains(err.Error(), "524289 bytes requested by another process, 524288 free of 1048576") {
		t.Errorf("a process takes more than is free: %v", err)
	}
	if err := m.Occupy(device.HBM(0), 1<<19); err != nil {
		t.Fatal(err)
	}
	u, err := m.Usage(device.HBM(0))
	if err != nil || u.OtherProcesses != 1<<19 || u.Free() != 0 {
		t.Errorf("usage %+v, free %d, %v", u, u.Free(), err)
	}
	_, err = m.Alloc(device.HBM(0), 1, "one byte")
	wants(t, err, device.ErrOutOfMemory, "alloc")
	for _, want := range []string{`"one byte"`, "1 bytes requested", "0 free of 1048576", "524288 used by other processes"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if err := m.Occupy(device.HBM(0), -1<<18); err != nil {
		t.Fatal(err)
	}
	alloc(t, m, device.HBM(0), 1<<18, "quarter")
	if err := m.Occupy(device.HBM(0), -2<<18); err == nil {
		t.Error("more was given back than taken")
	}
	if mem.Bytes() != 1<<19 {
		t.Error("the tenant changed memory that was in use")
	}
}
