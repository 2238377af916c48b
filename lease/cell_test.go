package lease_test

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	var object atomic.Uint32 // written only under the exclusive right, without references
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
		for {
			if _, _, references := cell.State(); references == 0 {
				break
			}
			runtime.Gosched()
		}
		if i%3 == 0 {
			e.End()
		} else {
			object.Add(1)
			e.Replace()
		}
		runtime.Gosched()
	}
	for end := time.Now().Add(time.Minute); reads.Load() == 0; runtime.Gosched() { // nothing keeps readers from it now
		if time.Now().After(end) {
			t.Error("nobody has read after a minute")
			break
		}
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

// TestPoints: a reference released at a fence value leaves that point to the next owner,
// until the owner knows or has passed on that it is over.
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

	e, _ := cell.BeginExclusive()
	if p := e.Points(); len(p) != 2 || p[0] != (device.Point{Fence: f, Value: 3}) || p[1] != (device.Point{Fence: g, Value: 1}) {
		t.Errorf("points %v", p)
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
}

// TestDropReached: a point that is reached is forgotten in time, since it would count as
// not reached half the fence's range later. Its failure is reported.
func TestDropReached(t *testing.T) {
	for _, start := range []uint32{0, 1<<32 - 2} {
		m, err := emulated.New(emulated.Options{Virtual: true, FenceStart: start})
		if err != nil {
			t.Fatal(err)
		}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		f, err := m.NewFence("f")
		ok(err)
		g, err := m.NewFence("g")
		ok(err)
		at := func(p device.Point) device.Point { return device.Point{Fence: p.Fence, Value: start + p.Value} }
		cell := filled(t)
		for _, p := range []device.Point{{Fence: f, Value: 1}, {Fence: g, Value: 5}} {
			ref, _ := cell.Acquire()
			ref.ReleaseAt(at(p))
		}
		ok(f.Signal(start + 1))
		if err := cell.DropReached(); err != nil {
			t.Error(err)
		}
		for k := range uint32(3) {
			ok(f.Signal(start + (k+1)<<30))
		}
		e, _ := cell.BeginExclusive()
		if p := e.Points(); len(p) != 1 || p[0] != at(device.Point{Fence: g, Value: 5}) {
			t.Errorf("from %#x: points %v", start, p)
		}
		if err := cell.DropReached(); err != nil { // nobody has a reference
			t.Error(err)
		}
		e.End()
		boom := errors.New("boom")
		ok(g.Fail(start+5, boom))
		if err := cell.DropReached(); !errors.Is(err, boom) {
			t.Errorf("from %#x: a failed reader's error is %v", start, err)
		}
		e, _ = cell.BeginExclusive()
		if p := e.Points(); len(p) != 0 {
			t.Errorf("from %#x: points %v", start, p)
		}
		e.Invalidate()
		ok(m.Close())
	}
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
