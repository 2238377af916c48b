package harvest_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/harvest"
)

func machine(t testing.TB, o emulated.Options) *emulated.Machine {
	t.Helper()
	m, err := emulated.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// open makes a runtime over gpu1 and gpu2, closed at the end of the test.
func open(t testing.TB, m device.Machine, o harvest.Options) *harvest.Runtime {
	t.Helper()
	o.Machine = m
	if o.Peers == nil {
		o.Peers = peers12
	}
	r, err := harvest.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return r
}

var peers12 = []device.Space{device.HBM(1), device.HBM(2)}

func gpus(n int, bytes int64) []emulated.GPU {
	return slices.Repeat([]emulated.GPU{{MemoryBytes: bytes}}, n)
}

func TestOptions(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true})
	island := machine(t, emulated.Options{Topology: &device.Topology{
		Host: device.Info{MemoryBytes: 1 << 20}, GPUs: []device.Info{{MemoryBytes: 1 << 20}, {MemoryBytes: 1 << 20}},
		Paths: map[device.Pair]device.Path{{From: device.Host, To: device.HBM(0)}: {}},
	}})
	lost := machine(t, emulated.Options{Virtual: true})
	if err := lost.Lose(2); err != nil {
		t.Fatal(err)
	}
	full := machine(t, emulated.Options{Virtual: true, Host: emulated.GPU{MemoryBytes: 1000}})
	for _, c := range []struct {
		name string
		o    harvest.Options
		want string
	}{
		{"Options.Machine is not set", harvest.Options{}, "Options.Machine is not set"},
		{"no such peer", harvest.Options{Machine: m, Peers: []device.Space{device.HBM(7)}}, "no peer gpu7: the machine has 3 GPUs, numbered from 0"},
		{"host", harvest.Options{Machine: m, Peers: []device.Space{device.Host}}, "host memory cannot be a peer; name GPUs"},
		{"itself", harvest.Options{Machine: m, Peers: []device.Space{device.HBM(0)}}, "gpu0 is the GPU that computes and cannot be its own peer; name another"},
		{"twice", harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1), device.HBM(1)}}, "duplicate peer gpu1"},
		{"no path", harvest.Options{Machine: island, Peers: []device.Space{device.HBM(1)}}, "no path from peer gpu1 to gpu0; exclude the peer: device: from gpu1 to gpu0: no path"},
		{"slab", harvest.Options{Machine: m, SlabBytes: -1}, "invalid slab size"},
		{"a client's slab", harvest.Options{Machine: m, Clients: map[string]harvest.ClientOptions{"kv": {SlabBytes: -1}}}, "invalid slab size of -1 bytes for client kv"},
		{"a reserve in slabs", harvest.Options{Machine: m, Clients: map[string]harvest.ClientOptions{"kv": {SlabBytes: 1, ReserveBytes: 2}}}, "2 bytes are reserved for client kv, with slabs of 1"},
		{"a client's peer", harvest.Options{Machine: m, Peers: peers12, Clients: map[string]harvest.ClientOptions{"kv": {Peers: []device.Space{device.HBM(0)}}}}, "client kv may use gpu0, which is not a peer"},
		{"clear", harvest.Options{Machine: m, ScrubBytes: -1}, "invalid scrub buffer of -1 bytes"},
		{"deadline", harvest.Options{Machine: m, Deadline: -1}, "durations must not be negative: deadline -1ns"},
		{"lost", harvest.Options{Machine: lost, Peers: peers12}, "peer gpu2: device: stream on gpu2"},
		{"no host memory", harvest.Options{Machine: full, Peers: peers12}, "1048576 bytes requested"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := harvest.New(c.o)
			if r != nil || err == nil || !strings.HasPrefix(err.Error(), "harvest: ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
	r := open(t, m, harvest.Options{Peers: []device.Space{}})
	if _, err := r.Alloc(1, harvest.Hints{}); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Errorf("without peers: %v", err)
	}
	other := open(t, m, harvest.Options{})
	h, err := other.Alloc(1, harvest.Hints{})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{r.Free(nil), r.Free(h), r.RegisterCallback(h, func(harvest.Revocation) {}), other.RegisterCallback(h, nil), r.Exclude(device.HBM(1), nil)} {
		if err == nil {
			t.Error("bad use is taken")
		}
	}
	if _, err := other.Reclaim(device.HBM(1), 0, 0); err == nil {
		t.Error("a reclaim of nothing is taken")
	}
	if _, err := r.Reclaim(device.HBM(1), 1, 0); err == nil {
		t.Error("a reclaim from what is no peer is taken")
	}
}

// TestPolicyPlaces: policies see what they decide by, through the runtime.
func TestPolicyPlaces(t *testing.T) {
	const slab = 1024
	for _, c := range []struct {
		policy harvest.Policy
		want   device.Space
	}{{harvest.BestFit{}, device.HBM(1)}, {harvest.Locality{}, device.HBM(2)}, {harvest.Stability{}, device.HBM(2)}, {harvest.Interference{}, device.HBM(2)}} {
		t.Run(c.policy.Name(), func(t *testing.T) {
			host := device.Info{MemoryBytes: 1 << 20}
			top := &device.Topology{Host: host, GPUs: []device.Info{host, host, host}, Paths: map[device.Pair]device.Path{
				{From: device.HBM(1), To: device.HBM(0)}: {BytesPerSecond: 25e9},
				{From: device.HBM(2), To: device.HBM(0)}: {BytesPerSecond: 400e9},
			}}
			for _, s := range top.Spaces() {
				top.Paths[device.Pair{From: device.Host, To: s}] = device.Path{}
			}
			m := machine(t, emulated.Options{Topology: top, Virtual: true})
			mm, err := harvest.NewMachineMonitor(m, peers12)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := mm.Close(); err != nil {
					t.Error(err)
				}
			})
			busy := &readings{Monitor: mm, bandwidth: map[device.Space]float64{device.HBM(1): 0.9}}
			r := open(t, m, harvest.Options{Policy: c.policy, Monitor: busy, SlabBytes: slab})
			// Others of gpu1 come and go. What they leave is as much as on gpu2.
			for i := range 4 {
				if err := m.Occupy(device.HBM(1), []int64{1 << 18, -1 << 18}[i%2]); err != nil {
					t.Fatal(err)
				}
				if _, err := r.Tick(time.Duration(i+1) * time.Second); err != nil {
					t.Fatal(err)
				}
			}
			h, err := r.Alloc(slab, harvest.Hints{})
			if err != nil {
				t.Fatal(err)
			}
			if h.Device() != c.want {
				t.Errorf("on %s, want %s", h.Device(), c.want)
			}
		})
	}
	m := machine(t, emulated.Options{GPUs: gpus(3, 16*slab), Virtual: true})
	r := open(t, m, harvest.Options{Policy: harvest.NewFairness(harvest.FairnessOptions{}), SlabBytes: slab, HeadroomBytes: -1})
	held := map[string]int{}
	for range 40 {
		for _, client := range []string{"a", "b"} {
			if _, err := r.Alloc(slab, harvest.Hints{Client: client}); err == nil {
				held[client]++
			} else if !errors.Is(err, harvest.ErrQuota) && !errors.Is(err, harvest.ErrNoCapacity) {
				t.Fatal(err)
			}
		}
	}
	if held["a"] != 16 || held["b"] != 16 {
		t.Errorf("two clients hold %v of 32 slabs, want half each", held)
	}
}

func TestAcquireAllocatesNothing(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true})
	r := open(t, m, harvest.Options{SlabBytes: 4096})
	h, err := r.Alloc(100, harvest.Hints{})
	if err != nil {
		t.Fatal(err)
	}
	by := harvest.NewOwner("test")
	f, err := m.NewFence("f")
	if err != nil {
		t.Fatal(err)
	}
	v := uint32(0)
	if n := testing.AllocsPerRun(100, func() {
		a, ok := h.Acquire(by)
		b, ok2 := h.Acquire(nil)
		if !ok || !ok2 {
			t.Fatal("not acquired")
		}
		v++
		if err := f.Signal(v); err != nil {
			t.Fatal(err)
		}
		a.ReleaseAt(device.Point{Fence: f, Value: v})
		b.Release()
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
	var none *harvest.Handle
	if _, ok := none.Acquire(by); ok {
		t.Error("no handle is acquired")
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	m := machine(b, emulated.Options{Virtual: true})
	r := open(b, m, harvest.Options{SlabBytes: 4096})
	h, err := r.Alloc(100, harvest.Hints{})
	if err != nil {
		b.Fatal(err)
	}
	by := harvest.NewOwner("test")
	for b.Loop() {
		ref, _ := h.Acquire(by)
		ref.Release()
	}
}

func BenchmarkAllocFree(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run("handles="+strconv.Itoa(n), func(b *testing.B) {
			m := machine(b, emulated.Options{Virtual: true, NoData: true})
			r := open(b, m, harvest.Options{SlabBytes: 64 << 20})
			for range n {
				if _, err := r.Alloc(1<<20, harvest.Hints{}); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				h, err := r.Alloc(1<<20, harvest.Hints{})
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Free(h); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestManyHolders: more references than can be named are still waited for and
// counted.
func TestManyHolders(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true})
	var got []harvest.DeadlineMissInfo
	r := open(t, m, harvest.Options{SlabBytes: 4096, Events: harvest.EventListener{
		DeadlineMissed: func(i harvest.DeadlineMissInfo) { got = append(got, i) },
	}})
	h, err := r.Alloc(100, harvest.Hints{})
	if err != nil {
		t.Fatal(err)
	}
	refs := make([]harvest.Ref, 7)
	for i := range refs {
		refs[i], _ = h.Acquire(harvest.NewOwner(strconv.Itoa(i)))
	}
	if _, err := reclaimMore(r, h.Device(), 1, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Tick(time.Minute); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || len(got[0].Owners) != 7 || got[0].Owners[3].Owner != "3" || got[0].Owners[3].Duration != time.Minute {
		t.Errorf("violations %v", got)
	}
	for i := range refs {
		if pending, err := r.Tick(time.Minute); err != nil || pending != 1 {
			t.Fatalf("%d references: pending %d, %v", len(refs)-i, pending, err)
		}
		refs[i].Release()
	}
}

// late is a machine whose clock can be set forward.
type late struct {
	*emulated.Machine
	by time.Duration
}

func (m *late) Now() time.Duration { return m.Machine.Now() + m.by }

// TestSlowCallback: a callback that blocks is reported.
func TestSlowCallback(t *testing.T) {
	m := &late{Machine: machine(t, emulated.Options{Virtual: true})}
	var got []harvest.DeadlineMissInfo
	r := open(t, m, harvest.Options{SlabBytes: 4096, CallbackLimit: time.Millisecond, Events: harvest.EventListener{
		DeadlineMissed: func(i harvest.DeadlineMissInfo) { got = append(got, i) },
	}})
	h, err := r.Alloc(100, harvest.Hints{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.RegisterCallback(h, func(harvest.Revocation) { m.by += 5 * time.Millisecond }); err != nil {
		t.Fatal(err)
	}
	c, err := reclaimMore(r, h.Device(), 1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || !got[0].Callback || got[0].Took != 5*time.Millisecond {
		t.Errorf("violations %v", got)
	}
}

// TestMemoryInUse: a client that copies without a reference does no harm, as far as
// the device reports: the memory is released after it, and that is reported.
func TestMemoryInUse(t *testing.T) {
	m := machine(t, emulated.Options{GPUs: gpus(2, 8192), Virtual: true})
	var got []harvest.DeadlineMissInfo
	r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: 1024, Events: harvest.EventListener{
		DeadlineMissed: func(i harvest.DeadlineMissInfo) { got = append(got, i) },
	}})
	h, err := r.Alloc(1024, harvest.Hints{})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "client"})
	if err != nil {
		t.Fatal(err)
	}
	host, err := m.Alloc(device.Host, 1024, "content")
	if err != nil {
		t.Fatal(err)
	}
	stall := m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.Stream == "client" }})
	if err := stream.Copy(h.Region().Range, host.Range(0, 1024)); err != nil {
		t.Fatal(err)
	}
	c, err := reclaimMore(r, device.HBM(1), 1, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	for i, now := range []time.Duration{0, 0, time.Second, 2 * time.Second} {
		if pending, err := r.Tick(now); err != nil || pending != 1 {
			t.Fatalf("tick %d: pending %d, %v", i, pending, err)
		}
		drive(t, m) // the clearing
	}
	if len(got) != 1 || got[0].Err == nil || !strings.Contains(got[0].String(), "still used by 1 operations") {
		t.Errorf("violations %v", got)
	}
	stall.Release()
	if err := errors.Join(stream.Synchronize(t.Context()), stream.Close(), host.Free()); err != nil {
		t.Fatal(err)
	}
	if pending, err := r.Tick(3 * time.Second); err != nil || pending != 0 || !c.Done() {
		t.Errorf("pending %d, %v", pending, err)
	}
}

// drive lets a virtual machine go on.
func drive(t testing.TB, m *emulated.Machine) {
	t.Helper()
	f, err := m.NewFence("drive")
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		f.Value()
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// curious is a machine that looks at memory as it is freed.
type curious struct {
	*emulated.Machine
	freed func(device.Memory)
}

func (m curious) Alloc(s device.Space, bytes int64, label string) (device.Memory, error) {
	mem, err := m.Machine.Alloc(s, bytes, label)
	if err != nil {
		return nil, err
	}
	return watched{mem, m.freed}, nil
}

type watched struct {
	device.Memory
	freed func(device.Memory)
}

func (w watched) Free() error {
	w.freed(w.Memory)
	return w.Memory.Free()
}

// TestCleared: nothing that was written is there when memory is released.
func TestCleared(t *testing.T) {
	for _, c := range []struct{ slab, bytes, zeros int64 }{
		{4096, 4096, 512}, {4096, 3000, 700}, {4096, 100, 4096}, {8192, 8192, 8192}, {1 << 20, 1<<20 - 1, 256},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			m := machine(t, emulated.Options{GPUs: gpus(2, 4<<20), Check: true})
			stream, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "client"})
			if err != nil {
				t.Fatal(err)
			}
			host, err := m.Alloc(device.Host, c.slab, "content")
			if err != nil {
				t.Fatal(err)
			}
			looked := 0
			r, err := harvest.New(harvest.Options{
				Peers: peers12[:1], SlabBytes: c.slab, ScrubBytes: c.zeros,
				Machine: curious{m, func(mem device.Memory) {
					if mem.Space() == device.Host {
						return
					}
					looked++
					if err := errors.Join(stream.Copy(host.Range(0, c.bytes), mem.Range(0, c.bytes)), stream.Synchronize(t.Context())); err != nil {
						t.Error(err)
					}
					for i, b := range host.Read(0, c.bytes) {
						if b != 0 {
							t.Fatalf("byte %d is %d as the memory is released", i, b)
						}
					}
				}},
			})
			if err != nil {
				t.Fatal(err)
			}
			h, err := r.Alloc(c.bytes, harvest.Hints{})
			if err != nil {
				t.Fatal(err)
			}
			for i, to := 0, host.Write(0, c.bytes); i < len(to); i++ {
				to[i] = 1
			}
			ref, _ := h.Acquire(nil)
			if err := errors.Join(stream.Copy(h.Region().Range, host.Range(0, c.bytes)), stream.Synchronize(t.Context())); err != nil {
				t.Fatal(err)
			}
			ref.Release()
			if err := errors.Join(r.Close(t.Context()), stream.Close(), host.Free()); err != nil {
				t.Fatal(err)
			}
			if looked != 1 {
				t.Errorf("%d slabs were released", looked)
			}
		})
	}
}

// TestLoop: a runtime that was started notices by itself that others need memory,
// and gives it back.
func TestLoop(t *testing.T) {
	m := machine(t, emulated.Options{GPUs: gpus(3, 64<<10), Check: true, Virtual: true})
	r := open(t, m, harvest.Options{SlabBytes: 4096, HeadroomBytes: 8192})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err == nil {
		t.Error("it is started twice")
	}
	h, err := r.Alloc(4096, harvest.Hints{Peers: peers12[:1]})
	if err != nil {
		t.Fatal(err)
	}
	var gone []harvest.Reason
	if err := r.RegisterCallback(h, func(v harvest.Revocation) { gone = append(gone, v.Reason) }); err != nil {
		t.Fatal(err)
	}
	if err := m.Occupy(device.HBM(1), 53<<10); err != nil {
		t.Fatal(err)
	}
	m.Turn()
	if !slices.Equal(gone, []harvest.Reason{harvest.ReasonPressure}) {
		t.Errorf("revoked for %v", gone)
	}
	drive(t, m) // the clearing
	m.Turn()
	if u, err := m.Usage(device.HBM(1)); err != nil || u.Allocated != 0 {
		t.Fatalf("%d bytes are not released, %v", u.Allocated, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Errorf("with nothing to wait for: %v", err)
	}
	if err := r.Start(); err == nil {
		t.Error("it is started after its end")
	}
	m.Turn()
}

// TestTraceIsPlayed: others come and go as a generated trace says. Whatever they do,
// headroom is met after each tick that leaves nothing pending, or nothing is left to
// release; and who is refused and asks gets all the memory after a few ticks.
func TestTraceIsPlayed(t *testing.T) {
	const capacity, headroom = 1 << 20, 1 << 16
	m := machine(t, emulated.Options{GPUs: gpus(3, capacity), Virtual: true, Check: true})
	revoked, refused, waits := 0, 0, 0
	r := open(t, m, harvest.Options{
		SlabBytes: 1 << 15, HeadroomBytes: headroom, ScrubBytes: 4096, Cooldown: 10 * time.Second,
		Events: harvest.EventListener{Revoked: func(harvest.RevokeInfo) { revoked++ }},
	})
	trace, err := tenants.Generate(tenants.Options{
		Peers: peers12, Capacity: []int64{capacity, capacity}, Duration: time.Hour, Churn: 4, Seed: 7,
	})
	if err != nil {
		t.Fatal(err)
	}
	player := tenants.NewPlayer(trace, m, func(s device.Space, bytes int64) {
		if _, err := r.Reclaim(s, bytes, 0); err != nil {
			t.Error(err)
		}
	})
	for now := time.Duration(0); now < time.Hour/2; now += 2 * time.Second {
		if err := player.Advance(now); err != nil {
			t.Fatal(err)
		}
		if waits++; !player.Waiting() {
			waits = 0
		} else if waits == 1 {
			refused++
		} else if waits > 5 {
			t.Fatalf("at %v others still wait for memory: %+v", now, r.State().Peers)
		}
		pending, err := r.Tick(now)
		if err != nil {
			t.Fatal(err)
		}
		drive(t, m)
		if _, err := r.Alloc(10_000, harvest.Hints{Client: "c"}); err != nil && !errors.Is(err, harvest.ErrNoCapacity) {
			t.Fatal(err)
		}
		for _, p := range r.State().Peers {
			if p.Free < headroom && pending == 0 {
				if p.Used+p.FreeInSlabs > 0 {
					t.Fatalf("at %v: %+v", now, p)
				}
			}
		}
	}
	if revoked < 50 || refused < 10 {
		t.Errorf("%d handles were revoked, %d times others were refused memory: the trace does not press", revoked, refused)
	}
	if err := player.Stop(); err != nil {
		t.Error(err)
	}
}

// TestHeadroomOfEachPeer: the headroom is a share of each peer's own memory.
func TestHeadroomOfEachPeer(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true, GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}, {MemoryBytes: 1 << 20}, {MemoryBytes: 8 << 20}}})
	for share, want := range map[float64][2]int64{0: {1 << 20 / 20, 8 << 20 / 20}, 0.25: {1 << 18, 1 << 21}} {
		r := open(t, m, harvest.Options{HeadroomShare: share})
		if p := r.State().Peers; p[0].Headroom != want[0] || p[1].Headroom != want[1] {
			t.Errorf("share %g: headroom %d and %d, want %v", share, p[0].Headroom, p[1].Headroom, want)
		}
	}
	if _, err := harvest.New(harvest.Options{Machine: m, Peers: peers12, HeadroomShare: 1.5}); err == nil {
		t.Error("more than a peer's memory is its headroom")
	}
}

// TestNeighborGetsMemory: another process that needs more than is free is refused, as on a
// GPU, which no reading shows. It gets the memory once it asks, whatever is borrowed, and
// what it asked for is not borrowed again before it comes.
func TestNeighborGetsMemory(t *testing.T) {
	const slab, hbm, need = 1 << 20, 64 << 20, 58 << 20
	m := machine(t, emulated.Options{GPUs: gpus(2, hbm), Virtual: true, Check: true})
	r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: slab, HeadroomBytes: 4 << 20})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	borrow := func() (n int) {
		for {
			if _, err := r.Alloc(slab, harvest.Hints{Client: "x"}); err != nil {
				return n
			}
			n++
		}
	}
	if n := borrow(); n != 60 {
		t.Fatalf("%d slabs are borrowed, want all but the headroom", n)
	}
	for range 20 {
		if err := m.Occupy(device.HBM(1), need); !errors.Is(err, device.ErrOutOfMemory) {
			t.Fatalf("a neighbor that does not ask: %v", err)
		}
		m.Turn()
		drive(t, m)
	}
	if _, err := r.Reclaim(device.HBM(1), need, 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	tries := 0
	for ; m.Occupy(device.HBM(1), need) != nil; tries++ {
		if n := borrow(); n > 0 || tries == 20 {
			t.Fatalf("%d slabs are borrowed while a neighbor waits, %d tries: %+v", n, tries, r.State().Peers)
		}
		m.Turn()
		drive(t, m)
	}
	if took := m.Now(); took > 100*time.Millisecond {
		t.Errorf("the neighbor got its memory after %v and %d tries", took, tries)
	}
	if n, p := borrow(), r.State().Peers[0]; n > 0 || p.Used != 2<<20 {
		t.Errorf("%d slabs are borrowed, and %d bytes are still used: want what was not asked for, less the headroom that the neighbor leaves nothing of", n, p.Used)
	}
	m.Turn()
	drive(t, m)
	m.Turn()
	if p := r.State().Peers[0]; p.Free < p.Headroom {
		t.Errorf("the headroom is not met beside the neighbor: %+v", p)
	}
}

// TestSmallSlabs: the last slabs of a peer hold one object, so that a small need costs one. An
// object in them can be replaced by another at once; a small slab that stays empty is released.
func TestSmallSlabs(t *testing.T) {
	const object = 1 << 16
	m := machine(t, emulated.Options{GPUs: gpus(2, 11*object), Virtual: true, Check: true})
	r := open(t, m, harvest.Options{
		Peers: peers12[:1], SlabBytes: 1 << 30, HeadroomBytes: object, Cooldown: -1,
		Clients: map[string]harvest.ClientOptions{"c": {SlabBytes: 4 * object}},
	})
	var all []*harvest.Handle
	for {
		h, err := r.Alloc(object, harvest.Hints{Client: "c", Cost: time.Second})
		if err != nil {
			break
		}
		all = append(all, h)
	}
	slabs := func() (sizes []int64) {
		for _, s := range r.State().Peers[0].Slabs {
			sizes = append(sizes, s.Bytes/object)
		}
		return sizes
	}
	if got := slabs(); len(all) != 10 || !slices.Equal(got, []int64{4, 1, 1, 1, 1, 1, 1}) {
		t.Fatalf("%d objects in slabs of %v", len(all), got)
	}
	now := time.Second
	tick := func(after time.Duration) {
		t.Helper()
		now += after
		for range 3 {
			if _, err := r.Tick(now); err != nil {
				t.Fatal(err)
			}
			drive(t, m)
		}
	}
	last := all[9]
	if err := r.Free(last); err != nil {
		t.Fatal(err)
	}
	tick(0)
	again, err := r.Alloc(object, harvest.Hints{Client: "c", Cost: time.Second})
	if err != nil || again.Slab() != last.Slab() {
		t.Fatalf("a replacement has to wait: %v, %v", again, err)
	}
	tick(time.Second)
	if err := r.Free(again); err != nil {
		t.Fatal(err)
	}
	tick(time.Second)
	tick(time.Second)
	if got := slabs(); len(got) != 6 {
		t.Errorf("an empty slab stays: %v", got)
	}
	// A byte more than is free costs one object, not four, and one for the headroom.
	if _, err := r.Reclaim(device.HBM(1), 2*object+1, time.Second); err != nil {
		t.Fatal(err)
	}
	tick(time.Millisecond)
	if got := slabs(); !slices.Equal(got, []int64{4, 1, 1, 1}) {
		t.Errorf("slabs of %v are left", got)
	}
}

// TestProcessesShareAPeer: two runtimes that borrow from one peer, each of which would take
// all of it, leave each other the headroom, and neither starves: who came first releases the
// other's half, and afterwards nothing moves back and forth. When the second ends, or wants no
// more, the first has all again.
func TestProcessesShareAPeer(t *testing.T) {
	const slab, hbm, headroom = 1 << 16, 4 << 20, 1 << 18
	const room = (hbm - headroom) / slab
	m := machine(t, emulated.Options{GPUs: gpus(2, hbm), Virtual: true, Check: true})
	type process struct {
		*harvest.Runtime
		wants int // slabs
	}
	start := func() *process {
		r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: slab, HeadroomBytes: headroom, Cooldown: 100 * time.Millisecond})
		return &process{r, room}
	}
	balance := func(p *process) harvest.Balance {
		b, err := p.Balance(device.HBM(1))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	now := time.Duration(0)
	// run has the processes tell each other what they hold, and borrow.
	run := func(steps int, all ...*process) (least int64) {
		t.Helper()
		least = hbm
		for range steps {
			now += 10 * time.Millisecond
			for i, p := range all {
				var others []harvest.Other
				for j, o := range all {
					if i != j {
						b := balance(o)
						others = append(others, harvest.Other{Held: b.Held, Wants: b.Wants})
					}
				}
				if err := p.SetOthers(device.HBM(1), others); err != nil {
					t.Fatal(err)
				}
				if _, err := p.Tick(now); err != nil {
					t.Fatal(err)
				}
				drive(t, m)
				for b := balance(p); b.Held < int64(p.wants)*slab; b = balance(p) {
					if _, err := p.Alloc(slab, harvest.Hints{Client: "c"}); err != nil {
						break
					}
				}
			}
			u, err := m.Usage(device.HBM(1))
			if err != nil {
				t.Fatal(err)
			}
			least = min(least, u.Free())
		}
		return least
	}
	a, b := start(), start()
	if run(20, a); balance(a).Held != room*slab {
		t.Fatalf("alone it has %+v", balance(a))
	}
	least := run(300, a, b)
	x, y := balance(a).Held/slab, balance(b).Held/slab
	if min(x, y) < room/2-2 || x+y > room {
		t.Errorf("they hold %d and %d of %d slabs", x, y, room)
	}
	if least < headroom-slab {
		t.Errorf("%d bytes were free at times, want a headroom of %d, or a slab less", least, headroom)
	}
	revoked := a.State().Revocations[harvest.ReasonPolicy] + b.State().Revocations[harvest.ReasonPolicy]
	if revoked < room/2-2 || revoked > room/2+2 {
		t.Errorf("%d slabs were revoked for shares, want the second's half once", revoked)
	}
	if run(100, a, b); balance(a).Held/slab != x || balance(b).Held/slab != y {
		t.Errorf("memory moves on: %d and %d slabs, then %+v and %+v", x, y, balance(a), balance(b))
	}
	b.wants = 0
	if err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if run(300, a); balance(a).Held != room*slab {
		t.Errorf("alone again it has %+v", balance(a))
	}
}

// reclaimMore asks for so many bytes more than are free or will be.
func reclaimMore(r *harvest.Runtime, s device.Space, bytes int64, within time.Duration) (*harvest.Reclamation, error) {
	for _, p := range r.State().Peers {
		if p.Space == s {
			bytes += max(p.Free+p.Draining, 0)
		}
	}
	return r.Reclaim(s, bytes, within)
}

// occupy lets another process allocate so many bytes, or what is free if that is less. It
// returns how many.
func occupy(t interface{ Fatal(...any) }, m *emulated.Machine, s device.Space, bytes int64) int64 {
	u, err := m.Usage(s)
	if err == nil {
		bytes = min(bytes, max(u.Free(), 0))
		err = m.Occupy(s, bytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// TestModel compares a runtime, one call after the other, with what its invariants
// say, on a checked virtual machine whose schedule is random.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const hbm, slab, headroom = 16 << 10, 4 << 10, 2 << 10
		m, err := emulated.New(emulated.Options{
			GPUs: gpus(3, hbm), Virtual: true, Check: true,
			Schedule: emulated.Random, Seed: rapid.Uint64().Draw(t, "seed"),
		})
		if err != nil {
			t.Fatal(err)
		}
		type object struct {
			h       *harvest.Handle
			refs    []harvest.Ref
			pending []device.Point // given to ReleaseAt, not signaled
			content byte
			freed   bool
			called  int
		}
		var (
			objects []*object
			now     time.Duration
			serial  uint32
			lost    bool
			// What an operator has changed.
			rooms     = map[device.Space]int64{peers12[0]: headroom, peers12[1]: headroom}
			withdrawn = map[device.Space]bool{}
		)
		r, err := harvest.New(harvest.Options{
			Machine: m, Peers: peers12, SlabBytes: slab, HeadroomBytes: headroom,
			Cooldown: time.Millisecond, ScrubBytes: 512,
		})
		if err != nil {
			t.Fatal(err)
		}
		stream, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "client"})
		if err != nil {
			t.Fatal(err)
		}
		host, err := m.Alloc(device.Host, 8<<10, "content")
		if err != nil {
			t.Fatal(err)
		}
		fence, err := m.NewFence("client")
		if err != nil {
			t.Fatal(err)
		}
		by := harvest.NewOwner("model")
		pick := func(t *rapid.T, ok func(*object) bool) *object {
			var os []*object
			for _, o := range objects {
				if ok(o) {
					os = append(os, o)
				}
			}
			if len(os) == 0 {
				t.Skip("none")
			}
			return rapid.SampledFrom(os).Draw(t, "object")
		}
		usable := func(o *object) bool { a, _ := o.h.State(); return a }
		// move copies the content in or out and waits; the caller has a reference. It is
		// false for a lost peer.
		move := func(t *rapid.T, o *object, in bool) bool {
			dst, src := o.h.Region().Range, host.Range(0, o.h.Bytes())
			if !in {
				dst, src = src, dst
			}
			err := stream.Copy(dst, src)
			if err == nil {
				err = stream.Synchronize(t.Context())
			}
			if err != nil && !errors.Is(err, device.ErrLost) {
				t.Fatal(err)
			}
			// What a lost peer fails must not stay in the stream.
			_ = stream.Recover(t.Context())
			return err == nil
		}
		check := func(t *rapid.T, o *object) {
			if !move(t, o, false) {
				return
			}
			for i, b := range host.Read(0, o.h.Bytes()) {
				if b != o.content {
					t.Fatalf("byte %d of %v is %d, want %d", i, o.h, b, o.content)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				n := rapid.Int64Range(1, 6<<10).Draw(t, "bytes")
				h, err := r.Alloc(n, harvest.Hints{Cost: time.Duration(rapid.IntRange(0, 5).Draw(t, "cost"))})
				if errors.Is(err, harvest.ErrNoCapacity) {
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				o := &object{h: h}
				if err := r.RegisterCallback(h, func(harvest.Revocation) { o.called++ }); err != nil {
					t.Fatal(err)
				}
				if withdrawn[h.Region().Space] {
					t.Fatalf("%v is on a peer that is withdrawn", h)
				}
				objects = append(objects, o)
				serial++
				o.content = byte(serial)
				for i, to := 0, host.Write(0, n); i < len(to); i++ {
					to[i] = o.content
				}
				ref, ok := h.Acquire(by)
				if !ok {
					t.Fatal("a new handle cannot be acquired")
				}
				move(t, o, true)
				ref.Release()
			},
			"check": func(t *rapid.T) {
				o := pick(t, usable)
				ref, ok := o.h.Acquire(by)
				if !ok {
					t.Fatal("not acquired")
				}
				check(t, o)
				ref.Release()
			},
			"check what is freed or being revoked": func(t *rapid.T) {
				check(t, pick(t, func(o *object) bool { return len(o.refs) > 0 && !usable(o) }))
			},
			"acquire": func(t *rapid.T) {
				o := pick(t, func(*object) bool { return true })
				ref, ok := o.h.Acquire(by)
				if ok != usable(o) || ok && (o.freed || o.called > 0) {
					t.Fatalf("acquired: %t; %+v", ok, o)
				}
				if ok {
					o.refs = append(o.refs, ref)
				}
			},
			"release": func(t *rapid.T) {
				o := pick(t, func(o *object) bool { return len(o.refs) > 0 })
				ref := o.refs[0]
				o.refs = o.refs[1:]
				if rapid.Bool().Draw(t, "later") {
					serial++
					p := device.Point{Fence: fence, Value: serial}
					ref.ReleaseAt(p)
					o.pending = append(o.pending, p)
				} else {
					ref.Release()
				}
			},
			"signal": func(t *rapid.T) {
				serial++
				if err := fence.Signal(serial); err != nil {
					t.Fatal(err)
				}
				for _, o := range objects {
					o.pending = nil
				}
			},
			"free": func(t *rapid.T) {
				o := pick(t, func(*object) bool { return true })
				available := usable(o)
				switch err := r.Free(o.h); {
				case err == nil && !available, err != nil && available:
					t.Fatalf("free of %v, available %t: %v", o.h, available, err)
				case err == nil:
					o.freed = true
				case errors.Is(err, harvest.ErrFreed) != o.freed, errors.Is(err, harvest.ErrRevoked) == o.freed:
					t.Fatal(err)
				}
			},
			"take": func(t *rapid.T) {
				s := rapid.SampledFrom(peers12).Draw(t, "peer")
				u, err := m.Usage(s)
				if errors.Is(err, device.ErrLost) {
					t.Skip("lost")
				}
				if err != nil {
					t.Fatal(err)
				}
				occupy(t, m, s, rapid.Int64Range(0, hbm).Draw(t, "bytes")-u.OtherProcesses)
			},
			"reclaim": func(t *rapid.T) {
				s := rapid.SampledFrom(peers12).Draw(t, "peer")
				if _, err := reclaimMore(r, s, rapid.Int64Range(1, hbm).Draw(t, "bytes"), time.Millisecond); err != nil {
					t.Fatal(err)
				}
			},
			"lose": func(t *rapid.T) {
				if rapid.IntRange(0, 20).Draw(t, "chance") != 20 || lost {
					t.Skip("rare")
				}
				lost = true
				if err := m.Lose(2); err != nil {
					t.Fatal(err)
				}
			},
			"set headroom": func(t *rapid.T) {
				s := rapid.SampledFrom(peers12).Draw(t, "peer")
				rooms[s] = rapid.Int64Range(0, hbm).Draw(t, "bytes")
				if err := r.SetHeadroom(s, rooms[s]); err != nil {
					t.Fatal(err)
				}
			},
			"withdraw": func(t *rapid.T) {
				s := rapid.SampledFrom(peers12).Draw(t, "peer")
				withdrawn[s] = rapid.IntRange(0, 3).Draw(t, "away") == 3
				if err := r.Withdraw(s, withdrawn[s]); err != nil {
					t.Fatal(err)
				}
			},
			"tick": func(t *rapid.T) {
				now += time.Duration(rapid.IntRange(0, 2000).Draw(t, "us")) * time.Microsecond
				if _, err := r.Tick(now); err != nil {
					t.Fatal(err)
				}
				for _, p := range r.State().Peers {
					if (p.Free+p.Draining < rooms[p.Space] || withdrawn[p.Space]) && p.Used+p.FreeInSlabs > 0 {
						t.Fatalf("headroom is not met, or the peer is withdrawn, and slabs are in service: %+v", p)
					}
				}
			},
			"": func(t *rapid.T) {
				var spans []device.Range
				for _, o := range objects {
					if len(o.refs)+len(o.pending) > 0 && o.called > 0 {
						t.Fatalf("%v was called back with readers", o.h)
					}
					if o.called > 1 || o.freed && o.called > 0 {
						t.Fatalf("%v was freed %t and called back %d times", o.h, o.freed, o.called)
					}
					if len(o.refs)+len(o.pending) > 0 || usable(o) {
						spans = append(spans, o.h.Region().Range)
					}
				}
				slices.SortFunc(spans, func(a, b device.Range) int { return int(int64(a.Addr) - int64(b.Addr)) })
				for i := 1; i < len(spans); i++ {
					if spans[i-1].End() > spans[i].Addr {
						t.Fatalf("%v and %v overlap", spans[i-1], spans[i])
					}
				}
				for _, p := range r.State().Peers {
					var sum int64
					for _, s := range p.Slabs {
						sum += s.Bytes
					}
					if p.Used+p.FreeInSlabs+p.Draining != sum {
						t.Fatalf("accounts: %+v", p)
					}
				}
			},
		})
		for _, o := range objects {
			for i := range o.refs {
				o.refs[i].Release()
			}
		}
		serial++
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(fence.Signal(serial), r.Close(ctx), stream.Close(), host.Free(), m.Close()); err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			if !o.freed && o.called != 1 {
				t.Fatalf("%v was not freed and called back %d times", o.h, o.called)
			}
		}
	})
}

// TestHammer does random operations from 8 goroutines, MOESERVE_HAMMER of them in all
// (100,000 where that is unset), as two clients that displace each other, while others take and
// give back memory, a neighbor reclaims and the runtime ticks. Every byte is written by a copy and checked by
// another: nobody's bytes are ever anybody else's.
func TestHammer(t *testing.T) {
	const workers, hbm, slab = 8, 256 << 10, 16 << 10
	operations := 100_000
	if v := os.Getenv("MOESERVE_HAMMER"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < workers {
			t.Fatalf("MOESERVE_HAMMER is %q and must be a number of operations", v)
		}
		operations = n
	}
	m := machine(t, emulated.Options{GPUs: gpus(3, hbm)})
	var allocated, freedOrRevoked, violations atomic.Int64
	r := open(t, m, harvest.Options{
		SlabBytes: slab, HeadroomBytes: 2 * slab, Cooldown: time.Millisecond, Interval: 200 * time.Microsecond,
		ScrubBytes: 4096, Deadline: 10 * time.Second, Residence: time.Millisecond, Reserve: time.Millisecond,
		Clients: map[string]harvest.ClientOptions{"hammer 1": {SlabBytes: slab / 2}},
		Events: harvest.EventListener{
			Allocated:      func(harvest.AllocInfo) { allocated.Add(1) },
			Freed:          func(harvest.FreeInfo) { freedOrRevoked.Add(1) },
			Revoked:        func(harvest.RevokeInfo) { freedOrRevoked.Add(1) },
			DeadlineMissed: func(harvest.DeadlineMissInfo) { violations.Add(1) },
		},
	})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	const seed = 1
	var all, rest sync.WaitGroup
	ctx, done := context.WithCancel(t.Context())
	rest.Go(func() { // others
		rng := rand.New(rand.NewPCG(seed, 100))
		held := map[device.Space]int64{}
		for i := 0; ; i++ {
			if m.Yield(ctx, time.Duration(rng.IntN(3000))*time.Microsecond) != nil {
				return
			}
			s := peers12[rng.IntN(2)]
			if i%8 == 0 {
				if _, err := reclaimMore(r, s, rng.Int64N(4*slab)+1, 0); err != nil {
					t.Error(err)
				}
				continue
			}
			to := int64(hbm * math.Pow(rng.Float64(), 3)) // mostly little
			// The workers allocate meanwhile: what is free now may not be in a moment.
			switch err := m.Occupy(s, to-held[s]); {
			case err == nil:
				held[s] = to
			case !errors.Is(err, device.ErrOutOfMemory):
				t.Error(err)
			}
		}
	})
	// Whose memory is displaced depends on the time: until each client's was, work goes on for a while.
	until := time.Now().Add(20 * time.Second)
	displaced := func() bool {
		clients := r.State().Clients
		for _, name := range []string{"hammer 0", "hammer 1"} {
			if clients[name].Displaced == 0 {
				return time.Now().After(until)
			}
		}
		return true
	}
	var checked, refused, calls, revoked, ops atomic.Int64
	for w := range workers {
		all.Go(func() {
			c := hammerer{t: t, m: m, r: r, rng: rand.New(rand.NewPCG(seed, uint64(w))), client: fmt.Sprint("hammer ", w%2), calls: &calls, by: harvest.NewOwner(fmt.Sprint("worker ", w))}
			if err := c.work(operations/workers, displaced); err != nil {
				t.Error(err)
			}
			checked.Add(c.checked)
			refused.Add(c.refused)
			revoked.Add(c.revoked)
			ops.Add(int64(c.serial))
		})
	}
	all.Wait()
	done()
	rest.Wait()
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d allocated, %d refused, %d revoked, %d bytes checked, %d violations", allocated.Load(), refused.Load(), revoked.Load(), checked.Load(), violations.Load())
	if allocated.Load() != freedOrRevoked.Load() {
		t.Errorf("%d handles were allocated and %d ended", allocated.Load(), freedOrRevoked.Load())
	}
	if calls.Load() != revoked.Load() {
		t.Errorf("%d callbacks for %d handles revoked", calls.Load(), revoked.Load())
	}
	for name, c := range r.State().Clients {
		t.Logf("%s: %d bytes displaced", name, c.Displaced)
		if c.Displaced == 0 {
			t.Errorf("nothing of %s was displaced", name)
		}
	}
	if checked.Load() < int64(operations) || revoked.Load() == 0 || refused.Load() == 0 {
		t.Error("too little happened")
	}
}

// hammerer is one client.
type hammerer struct {
	t      *testing.T
	m      *emulated.Machine
	r      *harvest.Runtime
	rng    *rand.Rand
	client string
	by     *harvest.Owner
	calls  *atomic.Int64
	stream device.Stream
	host   device.Memory
	fence  device.Fence
	serial uint32

	objects                   []*hammered
	checked, refused, revoked int64
}

type hammered struct {
	h      *harvest.Handle
	seed   byte
	called atomic.Int32
}

const hammerBytes = 3000

func (c *hammerer) work(n int, enough func() bool) (err error) {
	if c.stream, err = c.m.NewStream(device.HBM(0), device.StreamOptions{Name: "worker"}); err != nil {
		return err
	}
	if c.host, err = c.m.Alloc(device.Host, 2*hammerBytes, "content"); err != nil {
		return err
	}
	if c.fence, err = c.m.NewFence("worker"); err != nil {
		return err
	}
	for i := 0; i < n || i%100 > 0 || !enough(); i++ {
		for before := c.refused; ; before = c.refused {
			if err := c.operate(); err != nil {
				return err
			}
			if c.refused == before {
				break
			}
			runtime.Gosched() // and do another operation instead
		}
	}
	for len(c.objects) > 0 {
		if err := c.free(len(c.objects) - 1); err != nil {
			return err
		}
	}
	if err := c.fence.Wait(c.t.Context(), c.serial); err != nil {
		return err
	}
	return errors.Join(c.stream.Close(), c.host.Free(), c.fence.Close())
}

func (c *hammerer) operate() error {
	// What the callbacks say goes first, as in a residency map.
	for i := len(c.objects) - 1; i >= 0; i-- {
		if c.objects[i].called.Load() > 0 {
			if err := c.free(i); err != nil {
				return err
			}
		}
	}
	switch k := c.rng.IntN(10); {
	case len(c.objects) == 0 || k < 3 && len(c.objects) < 48:
		return c.alloc()
	case k < 5:
		return c.free(c.rng.IntN(len(c.objects)))
	case k < 7: // read, and let go before the copy has run
		o := c.objects[c.rng.IntN(len(c.objects))]
		o.h.CountUse()
		o.h.SetCost(time.Duration(c.rng.IntN(1000)) * time.Microsecond)
		if ref, ok := o.h.Acquire(c.by); ok {
			return c.enqueue(&ref, c.host.Range(hammerBytes, o.h.Bytes()), o.h.Region().Range)
		}
		return nil
	default:
		return c.check(c.objects[c.rng.IntN(len(c.objects))])
	}
}

// enqueue copies and gives ref back at the copy's end.
func (c *hammerer) enqueue(ref *harvest.Ref, dst, src device.Range) error {
	c.serial++
	err := errors.Join(c.stream.Copy(dst, src), c.stream.SignalFence(c.fence, c.serial))
	ref.ReleaseAt(device.Point{Fence: c.fence, Value: c.serial})
	return err
}

func (c *hammerer) alloc() error {
	cost := time.Duration(c.rng.IntN(1000)) * time.Microsecond
	if c.rng.IntN(10) == 0 {
		cost *= 1000
		use := harvest.Use{PerSecond: c.rng.Float64(), Saved: time.Millisecond, Wanted: c.rng.Int64N(10 * hammerBytes), WantedPerSecond: c.rng.Float64()}
		if err := c.r.SetUse(c.client, use); err != nil {
			return err
		}
	}
	h, err := c.r.Alloc(c.rng.Int64N(hammerBytes)+1, harvest.Hints{Client: c.client, Cost: cost})
	if errors.Is(err, harvest.ErrNoCapacity) {
		c.refused++
		return nil
	}
	if err != nil {
		return err
	}
	o := &hammered{h: h, seed: byte(c.rng.IntN(256))}
	switch err := c.r.RegisterCallback(h, func(harvest.Revocation) {
		c.calls.Add(1)
		o.called.Add(1)
	}); {
	case errors.Is(err, harvest.ErrRevoked): // between Alloc and here
		c.revoked++
		c.calls.Add(1) // the callback that came too late
		return nil
	case err != nil:
		return err
	}
	c.objects = append(c.objects, o)
	ref, ok := h.Acquire(c.by)
	if !ok {
		return nil
	}
	// The stream is done with the buffer: each operation that fills it waits here.
	if err := c.fence.Wait(c.t.Context(), c.serial); err != nil {
		return err
	}
	for i, to := 0, c.host.Write(0, h.Bytes()); i < len(to); i++ {
		to[i] = o.seed + byte(i*7)
	}
	return c.enqueue(&ref, h.Region().Range, c.host.Range(0, h.Bytes()))
}

func (c *hammerer) check(o *hammered) error {
	ref, ok := o.h.Acquire(c.by)
	if !ok {
		return nil
	}
	n := o.h.Bytes()
	if err := c.enqueue(&ref, c.host.Range(hammerBytes, n), o.h.Region().Range); err != nil {
		return err
	}
	if err := c.fence.Wait(c.t.Context(), c.serial); err != nil {
		return err
	}
	for i, b := range c.host.Read(hammerBytes, n) {
		if b != o.seed+byte(i*7) {
			return fmt.Errorf("byte %d of %v is %d, want %d", i, o.h, b, o.seed+byte(i*7))
		}
	}
	c.checked += n
	return nil
}

// free ends an object that may have been revoked.
func (c *hammerer) free(i int) error {
	o := c.objects[i]
	c.objects = slices.Delete(c.objects, i, i+1)
	err := c.r.Free(o.h)
	if errors.Is(err, harvest.ErrRevoked) {
		c.revoked++
		return nil
	}
	if err == nil && o.called.Load() != 0 {
		return fmt.Errorf("%v was freed and called back", o.h)
	}
	return err
}

// TestOnRelease: listeners of a client learn once, before its memory is released, of each slab that
// has memory of it; those of others do not.
func TestOnRelease(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: make([]emulated.GPU, 2)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r, err := harvest.New(harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 1024, HeadroomBytes: -1, Cooldown: -1})
	if err != nil {
		t.Fatal(err)
	}
	var told []uint64
	var ref harvest.Ref
	r.OnRelease("a", func(slab uint64) {
		told = append(told, slab)
		if ref.Held() {
			ref.Release() // the memory is read elsewhere from now on
		}
	})
	r.OnRelease("b", func(slab uint64) { t.Errorf("client b is told of slab %d", slab) })
	r.OnRelease("c", func(slab uint64) { told = append(told, 100+slab) })
	a, err := r.Alloc(512, harvest.Hints{Client: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Alloc(1024, harvest.Hints{Client: "c"}); err != nil {
		t.Fatal(err)
	}
	ref, _ = a.Acquire(nil)
	if err := r.Free(a); err != nil { // who reads it holds the slab
		t.Fatal(err)
	}
	if err := r.Withdraw(device.HBM(1), true); err != nil {
		t.Fatal(err)
	}
	if len(told) > 0 {
		t.Errorf("told of %v with the lock held", told)
	}
	for pending, i := 1, 0; pending > 0; i++ {
		if pending, err = r.Tick(m.Now()); err != nil || i == 1000 {
			t.Fatalf("tick %d: %v", i, err)
		}
		if err := m.Yield(t.Context(), time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	if want := []uint64{1, 102}; !slices.Equal(told, want) {
		t.Errorf("told of slabs %v, want %v", told, want)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
