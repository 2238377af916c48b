package emulated_test

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestOverlap: on the wall clock streams really run beside each other.
func TestOverlap(t *testing.T) {
	m := open(t, emulated.Options{})
	a, b := stream(t, m, device.HBM(0), "a"), stream(t, m, device.HBM(0), "b")
	there, back := make(chan bool), make(chan bool)
	err := errors.Join(
		a.Execute(device.Work{Name: "ping", Run: func(device.Access) error { there <- true; <-back; return nil }}),
		b.Execute(device.Work{Name: "pong", Run: func(device.Access) error { <-there; back <- true; return nil }}),
		a.Synchronize(t.Context()), b.Synchronize(t.Context()),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// TestCloseEndsWaits: a goroutine that waits for what never comes is let go by
// Close.
func TestCloseEndsWaits(t *testing.T) { synctest.Test(t, testCloseEndsWaits) }

func testCloseEndsWaits(t *testing.T) {
	for _, o := range []emulated.Options{{}, {Virtual: true, DeadlockAfter: time.Hour}} {
		m, err := emulated.New(o)
		if err != nil {
			t.Fatal(err)
		}
		s := stream(t, m, device.HBM(0), "s")
		f, err := m.NewFence("never")
		if err != nil {
			t.Fatal(err)
		}
		e, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.WaitFence(f, 1), s.Record(e)); err != nil {
			t.Fatal(err)
		}
		waits := []func() error{
			func() error { return s.Synchronize(t.Context()) },
			func() error { return e.Synchronize(t.Context()) },
			func() error { return f.Wait(t.Context(), 1) },
		}
		ended := make(chan error)
		for _, w := range waits {
			go func() { ended <- w() }()
		}
		synctest.Wait()
		if err := m.Close(); err == nil {
			t.Error("Close is silent about a stream that waits")
		}
		for range waits {
			if err := <-ended; !errors.Is(err, device.ErrClosed) {
				t.Errorf("a wait ended with %v", err)
			}
		}
	}
}

// TestPace: copies take what the model says or more, and links are shared.
func TestPace(t *testing.T) {
	const n, copies = 1 << 20, 10
	m := open(t, emulated.Options{
		GPUs: make([]emulated.GPU, 2), Pace: true,
		HostLink: emulated.Link{BytesPerSecond: 1e9, Latency: 20 * time.Microsecond},
		HostRoots: []emulated.Root{{
			GPUs: []int{0, 1}, BytesPerSecond: 1e9,
		}},
	})
	src := alloc(t, m, device.Host, n, "src")
	var streams []device.Executor
	start := m.Now()
	for i := range 2 {
		s, dst := stream(t, m, device.HBM(i), "copy"), alloc(t, m, device.HBM(i), n, "dst")
		streams = append(streams, s)
		for range copies {
			if err := s.Copy(dst.Range(0, n), src.Range(0, n)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, s := range streams {
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	took := m.Now() - start
	// Both share a byte per nanosecond; latencies hide behind the other's bytes.
	least := time.Duration(2 * copies * n)
	if took < least {
		t.Errorf("%d MiB at 1 GB/s took %v, want at least %v", 2*copies, took, least)
	}
	t.Logf("took %v, %.1f %% over the model", took, 100*(float64(took)/float64(least)-1))
}

// TestCapacityIsVirtual: memory that nobody touches costs nothing, and what is freed
// is gone.
func TestCapacityIsVirtual(t *testing.T) {
	for _, check := range []bool{false, true} {
		m := open(t, emulated.Options{Check: check})
		before := resident(t)
		var mems []device.Memory
		for i := range 3 {
			mem, err := m.Alloc(device.HBM(i), 60<<30, "huge")
			if err != nil {
				t.Fatal(err)
			}
			mems = append(mems, mem)
		}
		if grew := resident(t) - before; grew > 64<<20 {
			t.Errorf("180 GiB untouched cost %d MiB", grew>>20)
		}
		for _, mem := range mems {
			if err := mem.Free(); err != nil {
				t.Fatal(err)
			}
		}
		touched, err := m.Alloc(device.Host, 256<<20, "touched")
		if err != nil {
			t.Fatal(err)
		}
		clear(touched.Write(0, 256<<20))
		if grew := resident(t) - before; grew < 200<<20 {
			t.Errorf("256 MiB touched cost %d MiB", grew>>20)
		}
		if err := touched.Free(); err != nil {
			t.Fatal(err)
		}
		if grew := resident(t) - before; grew > 64<<20 {
			t.Errorf("%d MiB stay behind a free", grew>>20)
		}
	}
}

// TestRounding: what an allocation is rounded to must fit too.
func TestRounding(t *testing.T) {
	m := open(t, emulated.Options{GPUs: []emulated.GPU{{MemoryBytes: 1000}}})
	_, err := m.Alloc(device.HBM(0), 769, "rounds to 1024")
	wants(t, err, device.ErrOutOfMemory, "alloc")
	alloc(t, m, device.HBM(0), 257, "rounds to 512")
	if u, err := m.Usage(device.HBM(0)); err != nil || u.Allocated != 512 || u.Peak != 512 || u.Free() != 488 {
		t.Errorf("usage %+v, %v", u, err)
	}
	alloc(t, m, device.HBM(0), 200, "rounds to 256")
	_, err = m.Alloc(device.HBM(0), 256, "no room")
	wants(t, err, device.ErrOutOfMemory, "alloc")
}

// resident is this process's memory in bytes.
func resident(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("needs Linux's /proc: %v", err)
	}
	pages := int64(0)
	for _, c := range strings.Fields(string(b))[1] {
		pages = pages*10 + int64(c-'0')
	}
	return pages * int64(os.Getpagesize())
}

// TestPoison: fresh memory on a checked machine holds NaN.
func TestPoison(t *testing.T) {
	m := open(t, emulated.Options{Check: true})
	mem := alloc(t, m, device.Host, 4096, "fresh")
	for i, b := range mem.Write(0, 4096) {
		if b != 0xff {
			t.Fatalf("byte %d is %#x", i, b)
		}
	}
}

// TestAddresses: kernels on the CPU reach all memory by address.
func TestAddresses(t *testing.T) {
	m := open(t, emulated.Options{Check: true})
	src, hbm, dst := alloc(t, m, device.Host, 8, "src"), alloc(t, m, device.HBM(0), 8, "hbm"), alloc(t, m, device.Host, 8, "dst")
	copy(src.Write(0, 8), "12345678")
	s := stream(t, m, device.HBM(0), "s")
	r := hbm.Range(0, 8)
	err := errors.Join(
		s.Copy(r, src.Range(0, 8)),
		s.Execute(device.Work{
			Name: "increment", Reads: []device.Range{r}, Writes: []device.Range{r},
			Run: func(device.Access) error {
				a := uintptr(r.Addr)
				b := unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), r.Bytes)
				for i := range b {
					b[i]++
				}
				return nil
			},
		}),
		s.Copy(dst.Range(0, 8), r),
		s.Synchronize(t.Context()),
	)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(dst.Read(0, 8)); got != "23456789" {
		t.Errorf("got %q", got)
	}
}

// TestPanic: Work that panics on a virtual machine leaves one that closes, and says
// so.
func TestPanic(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	s := stream(t, m, device.HBM(0), "s")
	if err := s.Execute(device.Work{Name: "broken", Run: func(device.Access) error { panic("broken invariant") }}); err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_ = s.Synchronize(t.Context())
	}()
	if err := m.Close(); err == nil || !strings.Contains(err.Error(), `runs launch "broken"`) {
		t.Errorf("Close: %v", err)
	}
}

// TestAllocations: the paths of every step make no garbage.
func TestAllocations(t *testing.T) {
	m := open(t, emulated.Options{})
	s, other := stream(t, m, device.HBM(0), "s"), stream(t, m, device.HBM(0), "other")
	src, dst := alloc(t, m, device.Host, 64, "src"), alloc(t, m, device.HBM(0), 64, "dst")
	e, err := m.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.NewFence("f")
	if err != nil {
		t.Fatal(err)
	}
	var ran atomic.Int64
	w := device.Work{Name: "work", Reads: []device.Range{dst.Range(0, 64)}, Run: func(device.Access) error { ran.Add(1); return nil }}
	value := uint32(0)
	step := func() {
		value++
		err := errors.Join(
			s.Copy(dst.Range(0, 64), src.Range(0, 64)), s.Execute(w), s.Record(e), other.Wait(e),
			other.Execute(w), other.SignalFence(f, value), s.WaitFence(f, value),
		)
		if err != nil {
			t.Error(err)
		}
		for f.Value() != value { // a wait makes garbage
			runtime.Gosched()
		}
	}
	for range 100 {
		step()
	}
	if got := testing.AllocsPerRun(200, step); got > 0 {
		t.Errorf("%v allocations a step", got)
	}
	if ran.Load() != 2*int64(value) {
		t.Errorf("%d works ran, want %d", ran.Load(), 2*value)
	}
}
