package lease_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/lease"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestMachine compares a cell with the obvious model, one call after the other.
func TestMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			cell       lease.Cell
			refs       []lease.Ref
			exclusive  *lease.Exclusive
			generation uint32
			valid      bool
		)
		canceled, cancel := context.WithCancel(context.Background())
		cancel()
		t.Repeat(map[string]func(*rapid.T){
			"acquire": func(t *rapid.T) {
				ref, ok := cell.Acquire()
				if want := valid && exclusive == nil; ok != want {
					t.Fatalf("acquired: %t, want %t", ok, want)
				}
				if ref.Held() != ok {
					t.Fatalf("held: %t after acquired: %t", ref.Held(), ok)
				}
				if !ok {
					return
				}
				if ref.Generation() != generation {
					t.Fatalf("a reference of generation %d, want %d", ref.Generation(), generation)
				}
				refs = append(refs, ref)
			},
			"release": func(t *rapid.T) {
				if len(refs) == 0 {
					t.Skip("no reference")
				}
				i := rapid.IntRange(0, len(refs)-1).Draw(t, "which")
				refs[i].Release()
				if refs[i].Held() {
					t.Fatal("held after Release")
				}
				refs = append(refs[:i], refs[i+1:]...)
			},
			"begin": func(t *rapid.T) {
				e, ok := cell.BeginExclusive()
				if want := exclusive == nil; ok != want {
					t.Fatalf("began: %t, want %t", ok, want)
				}
				if ok {
					exclusive = &e
				}
			},
			"drain": func(t *rapid.T) {
				if exclusive == nil {
					t.Skip("not exclusive")
				}
				if err := exclusive.Drain(canceled); (err == nil) != (len(refs) == 0) {
					t.Fatalf("drain with %d references: %v", len(refs), err)
				}
			},
			"finish": func(t *rapid.T) {
				if exclusive == nil {
					t.Skip("not exclusive")
				}
				switch how := rapid.SampledFrom([]string{"replace", "invalidate", "end"}).Draw(t, "how"); {
				case how == "end":
					exclusive.End()
				case len(refs) > 0:
					mustPanic(t, "references", func() { exclusive.Replace() })
					mustPanic(t, "references", func() { exclusive.Invalidate() })
					return
				case how == "replace":
					generation, valid = generation+1, true
					if got := exclusive.Replace(); got != generation {
						t.Fatalf("generation %d, want %d", got, generation)
					}
				default:
					generation, valid = generation+1, false
					exclusive.Invalidate()
				}
				mustPanic(t, "after its end", exclusive.End)
				exclusive = nil
			},
			"": func(t *rapid.T) {
				g, available, n := cell.State()
				if g != generation || available != (valid && exclusive == nil) || n != len(refs) {
					t.Fatalf("state %d %t %d, want %d %t %d", g, available, n, generation, valid && exclusive == nil, len(refs))
				}
			},
		})
	})
}

type fataler interface{ Fatalf(string, ...any) }

func mustPanic(t fataler, want string, f func()) {
	defer func() {
		if r := recover(); r == nil || !strings.Contains(r.(string), want) {
			t.Fatalf("panic %v, want one with %q", r, want)
		}
	}()
	f()
}

func filled(t *testing.T) *lease.Cell {
	t.Helper()
	var cell lease.Cell
	e, ok := cell.BeginExclusive()
	if !ok {
		t.Fatal("a new cell is held exclusively")
	}
	e.Replace()
	return &cell
}

func TestMisusePanics(t *testing.T) {
	cell := filled(t)
	ref, _ := cell.Acquire()
	twin := ref
	ref.Release()
	mustPanic(t, "released twice", ref.Release)
	mustPanic(t, "0 references", twin.Release)
	var none lease.Ref
	mustPanic(t, "never acquired", none.Release)

	old, _ := cell.Acquire()
	copied := old
	old.Release()
	e, _ := cell.BeginExclusive()
	e.Replace()
	if _, ok := cell.Acquire(); !ok {
		t.Fatal("not acquired")
	}
	mustPanic(t, "a reference of generation 1 is released on a cell with generation 2", copied.Release)
}

// TestHammer: readers come and go while an owner replaces the object again and
// again. What a reader sees under its reference never changes.
func TestHammer(t *testing.T) {
	cell := filled(t)
	var object atomic.Uint32 // written only under the exclusive right, after Drain
	object.Store(1)
	var stop atomic.Bool
	var reads atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for !stop.Load() {
				ref, ok := cell.Acquire()
				if !ok {
					runtime.Gosched()
					continue
				}
				for range 3 {
					if got := object.Load(); got != ref.Generation() {
						t.Errorf("object %d under a reference of generation %d", got, ref.Generation())
					}
					runtime.Gosched()
				}
				reads.Add(1)
				ref.Release()
			}
		})
	}
	for i := range 2000 {
		e, ok := cell.BeginExclusive()
		if !ok {
			t.Fatal("another holder is exclusive")
		}
		if err := e.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			e.End()
		} else {
			object.Add(1)
			e.Replace()
		}
		runtime.Gosched()
	}
	for reads.Load() == 0 { // nothing keeps readers from it now
		runtime.Gosched()
	}
	stop.Store(true)
	wg.Wait()
	if _, available, references := cell.State(); !available || references != 0 {
		t.Errorf("available %t with %d references at the end", available, references)
	}
}

// TestOneOwner: of many who want to be exclusive one is.
func TestOneOwner(t *testing.T) {
	cell := filled(t)
	var owners atomic.Int32
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				if e, ok := cell.BeginExclusive(); ok {
					if n := owners.Add(1); n != 1 {
						t.Errorf("%d owners", n)
					}
					owners.Add(-1)
					e.End()
				}
			}
		})
	}
	wg.Wait()
}

// TestDrainWaits: Drain ends with the last release, not before.
func TestDrainWaits(t *testing.T) { synctest.Test(t, testDrainWaits) }

func testDrainWaits(t *testing.T) {
	cell := filled(t)
	a, _ := cell.Acquire()
	b, _ := cell.Acquire()
	e, _ := cell.BeginExclusive()
	drained := make(chan error, 1)
	go func() { drained <- e.Drain(context.Background()) }()
	a.Release()
	synctest.Wait()
	select {
	case err := <-drained:
		t.Fatalf("drained with a reference left: %v", err)
	default:
	}
	b.Release()
	if err := <-drained; err != nil {
		t.Error(err)
	}
	e.Invalidate()
	if _, ok := cell.Acquire(); ok {
		t.Error("an invalid object was acquired")
	}
}

// TestPoints: a reference released at a fence value keeps the place in use until
// then, for the host by Drain and for a stream by Points.
func TestPoints(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	fence := func(name string) device.Fence {
		f, err := m.NewFence(name)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	f, g := fence("f"), fence("g")
	cell := filled(t)
	at := func(p device.Point) {
		ref, ok := cell.Acquire()
		if !ok {
			t.Fatal("not acquired")
		}
		ref.ReleaseAt(p)
	}
	at(device.Point{Fence: f, Value: 3})
	at(device.Point{Fence: g, Value: 1})
	at(device.Point{Fence: f, Value: 2}) // the later value stays

	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	e, _ := cell.BeginExclusive()
	if p := e.Points(); len(p) != 2 || p[0] != (device.Point{Fence: f, Value: 3}) || p[1] != (device.Point{Fence: g, Value: 1}) {
		t.Errorf("points %v", p)
	}
	drains := func(want bool) {
		t.Helper()
		if err := e.Drain(canceled); (err == nil) != want {
			t.Errorf("Drain: %v", err)
		}
	}
	signal := func(f device.Fence, v uint32) {
		if err := f.Signal(v); err != nil {
			t.Fatal(err)
		}
	}
	signal(f, 2)
	drains(false)
	signal(f, 3)
	drains(false)
	signal(g, 1)
	drains(true)
	if p := e.Points(); len(p) != 0 {
		t.Errorf("points %v after Drain", p)
	}
	e.Replace()

	// Replace forgets them, Invalidate keeps them, Settle forgets them.
	at(device.Point{Fence: f, Value: 9})
	e, _ = cell.BeginExclusive()
	e.Invalidate()
	e, _ = cell.BeginExclusive()
	if p := e.Points(); len(p) != 1 {
		t.Errorf("points %v after Invalidate", p)
	}
	e.Replace()
	at(device.Point{Fence: f, Value: 9})
	e, _ = cell.BeginExclusive()
	e.ForgetReaders()
	if p := e.Points(); len(p) != 0 {
		t.Errorf("points %v after ForgetReaders", p)
	}
	e.End()

	// A reader's failure comes out of Drain, and the right stays.
	boom := errors.New("boom")
	at(device.Point{Fence: f, Value: 10})
	e, _ = cell.BeginExclusive()
	if err := f.Fail(10, boom); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain(t.Context()); !errors.Is(err, boom) {
		t.Errorf("Drain: %v", err)
	}
	e.ForgetReaders()
	e.Invalidate()
}

func TestAllocations(t *testing.T) {
	cell := filled(t)
	if n := testing.AllocsPerRun(100, func() {
		ref, _ := cell.Acquire()
		ref.Release()
	}); n != 0 {
		t.Errorf("%v allocations for a reference", n)
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	var cell lease.Cell
	e, _ := cell.BeginExclusive()
	e.Replace()
	for b.Loop() {
		ref, _ := cell.Acquire()
		ref.Release()
	}
}

// TestPointsArePruned: a place that is read for long, each time to the end of
// another fence, keeps only points that are not reached, and failures.
func TestPointsArePruned(t *testing.T) {
	m, err := emulated.New(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	cell := filled(t)
	var fences []device.Fence
	for i := range 500 {
		f, err := m.NewFence("reader")
		if err != nil {
			t.Fatal(err)
		}
		fences = append(fences, f)
		ref, _ := cell.Acquire()
		ref.ReleaseAt(device.Point{Fence: f, Value: 1})
		switch i {
		case 3: // is never reached
		case 5:
			err = f.Fail(1, errors.New("boom"))
		default:
			err = f.Signal(1)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	e, _ := cell.BeginExclusive()
	points := e.Points()
	if len(points) > 32 {
		t.Errorf("%d points are kept", len(points))
	}
	for _, i := range []int{3, 5, 499} {
		if !slices.Contains(points, device.Point{Fence: fences[i], Value: 1}) {
			t.Errorf("point %d is forgotten", i)
		}
	}
	e.ForgetReaders()
	e.End()
	for _, f := range fences {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}
