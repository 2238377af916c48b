//go:build cuda

package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/dylib"
	"github.com/moeserve/moeserve/device/cuda/internal/standin"
	"github.com/moeserve/moeserve/device/cuda/nvrtc"
	"github.com/moeserve/moeserve/device/devicetest"
)

func TestConformance(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Machine { return open(t, maxGPUs) })
}

func TestConformanceOnOneGPU(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Machine { return open(t, 1) })
}

// rig is a machine with what most tests use.
type rig struct {
	testing.TB
	m   *Machine
	ctx context.Context
}

func newRig(t testing.TB, gpus int) *rig {
	t.Helper()
	m := open(t, gpus)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return &rig{t, m, ctx}
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) wants(err, target error) {
	r.Helper()
	if !errors.Is(err, target) {
		r.Fatalf("error %v, want one that wraps %q", err, target)
	}
}

func (r *rig) stream(i int, name string) *Stream {
	r.Helper()
	s, err := r.m.NewStream(device.HBM(i), device.StreamOptions{Name: name})
	r.ok(err)
	return s.(*Stream)
}

func (r *rig) host(name string) device.Executor {
	r.Helper()
	s, err := r.m.NewStream(device.Host, device.StreamOptions{Name: name})
	r.ok(err)
	return s.(device.Executor)
}

func (r *rig) event() device.Event {
	r.Helper()
	e, err := r.m.NewEvent()
	r.ok(err)
	return e
}

func (r *rig) fence(label string) device.Fence {
	r.Helper()
	f, err := r.m.NewFence(label)
	r.ok(err)
	return f
}

func (r *rig) alloc(s device.Space, n int64) device.Memory {
	r.Helper()
	mem, err := r.m.Alloc(s, n, r.Name())
	r.ok(err)
	r.Cleanup(func() {
		if err := mem.Free(); err != nil {
			r.Errorf("Free: %v", err)
		}
	})
	return mem
}

func all(m device.Memory) device.Range { return m.Range(0, m.Bytes()) }

// kernels are what the stand-in has by the same names and parameters.
const kernels = `
extern "C" __device__ unsigned variable[4];
extern "C" __global__ void fill(unsigned *to, unsigned value, unsigned n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = value;
}
extern "C" __global__ void mixed(unsigned a, unsigned long long *to, float b, unsigned long long c, int e) {
  if (blockIdx.x || blockIdx.y || threadIdx.x) return;
  to[0] = a;
  to[1] = (unsigned long long)(b * 4);
  to[2] = c;
  to[3] = (unsigned long long)(long long)e;
  to[4] = gridDim.x * 1000000ull + blockDim.x * 1000 + gridDim.y;
}
#if __CUDA_ARCH__ >= 900
struct alignas(64) tensor_map {
  unsigned long long words[16];
};
extern "C" __global__ void tile(const __grid_constant__ tensor_map map, unsigned long long *out, int element, int row, int bytes) {
  __shared__ alignas(1024) unsigned long long tile[16 * 16];
  __shared__ unsigned long long full;
  unsigned at = (unsigned)__cvta_generic_to_shared(tile), barrier = (unsigned)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(at), "l"(&map), "r"(element), "r"(row), "r"(barrier) : "memory");
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(barrier) : "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bytes / 8; i += blockDim.x) out[i] = tile[i];
}
#endif
extern "C" __global__ void trap() { *(volatile int *)1024 = 1; }
`

// load compiles the kernels for a GPU of the machine.
func (r *rig) load(i int) *Module {
	r.Helper()
	code := []byte("standin")
	if onGPU {
		c, err := nvrtc.Open(dylib.Folders(), r.m.DriverVersion()/1000)
		if errors.Is(err, nvrtc.ErrUnavailable) {
			r.Skip(err)
		}
		r.ok(err)
		code, _, err = c.Compile(nvrtc.Source{Name: "test.cu", Text: kernels}, nvrtc.Arch(r.m.Topology().GPUs[i].ComputeCapability))
		r.ok(err)
	}
	mod, err := r.m.LoadModule(device.HBM(i), "test", code)
	r.ok(err)
	r.Cleanup(func() {
		if err := mod.Unload(); err != nil {
			r.Errorf("Unload: %v", err)
		}
	})
	return mod
}

func (r *rig) function(mod *Module, name string) *Function {
	r.Helper()
	f, err := mod.Function(name)
	r.ok(err)
	return f
}

// words reads GPU memory as 64-bit numbers.
func (r *rig) words(s *Stream, src device.Range) []uint64 {
	r.Helper()
	back := r.alloc(device.Host, src.Bytes)
	r.ok(s.Copy(all(back), src))
	r.ok(s.Synchronize(r.ctx))
	var out []uint64
	for b := back.Read(0, src.Bytes); len(b) >= 8; b = b[8:] {
		v := uint64(0)
		for i := range 8 {
			v |= uint64(b[i]) << (8 * i)
		}
		out = append(out, v)
	}
	return out
}

func TestLaunch(t *testing.T) {
	r := newRig(t, 1)
	s, mod := r.stream(0, "compute"), r.load(0)
	mixed := r.function(mod, "mixed")
	mem := r.alloc(device.HBM(0), 64)
	s.Args().U32(7).Addr(mem.Range(0, 64).Addr).F32(2.5).U64(1 << 40).I32(-3)
	r.ok(s.Launch(mixed, Grid{Blocks: [3]int{3, 2}, Threads: [3]int{64}}))
	got := r.words(s, mem.Range(0, 40))
	want := []uint64{7, 10, 1 << 40, ^uint64(2), 3064002}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("the kernel saw %#x as its value %d, want %#x", got[i], i, want[i])
		}
	}
	// The block is empty again, and takes raw bytes as an argument.
	fill := r.function(mod, "fill")
	at := uint64(mem.Range(0, 1).Addr)
	raw := make([]byte, 8)
	for i := range 8 {
		raw[i] = byte(at >> (8 * i))
	}
	s.Args().Bytes(raw, 8).U32(9).U32(4)
	r.ok(s.Launch(fill, Grid{Threads: [3]int{4}}))
	if got := r.words(s, mem.Range(0, 24)); got[0] != 9<<32|9 || got[1] != got[0] || got[2] != 1<<40 {
		t.Errorf("filled: %#x", got)
	}
}

func TestLaunchLimits(t *testing.T) {
	r := newRig(t, 2)
	s, mod := r.stream(0, "compute"), r.load(0)
	fill := r.function(mod, "fill")
	l := fill.Limits()
	if l.Threads <= 0 || l.Registers <= 0 || l.DynamicBytes < 32<<10 {
		t.Errorf("limits %+v", l)
	}
	contains(t, s.Launch(fill, Grid{Threads: [3]int{l.Threads + 1}}), "fill", fmt.Sprint(l.Threads+1))
	big := Grid{SharedBytes: 100 << 10}
	contains(t, s.Launch(fill, big), "AllowDynamicShared")
	r.ok(fill.AllowDynamicShared(100 << 10))
	r.ok(fill.PreferShared())
	mem := r.alloc(device.HBM(0), 8)
	s.Args().Addr(all(mem).Addr).U32(1).U32(2)
	r.ok(s.Launch(fill, big))
	r.ok(s.Synchronize(r.ctx))
	contains(t, fill.AllowDynamicShared(1<<20), "fill", "1048576", "the device allows")
	_, err := mod.Function("none")
	contains(t, err, "none", "test")
	_, err = mod.Global("none")
	contains(t, err, "none")
	if v, err := mod.Global("variable"); err != nil || v.Bytes != 16 || v.Addr == 0 {
		t.Errorf("variable: %v, %v", v, err)
	}
	_, err = r.m.LoadModule(device.HBM(0), "garbage", []byte("no code"))
	contains(t, err, "garbage")
	_, err = r.m.LoadModule(device.Host, "nowhere", []byte("standin"))
	contains(t, err, "nowhere")
	for what, fill := range map[string]func(a *Args){
		"that do not fit": func(a *Args) { a.Bytes(make([]byte, MaxArgBytes), 1).U32(0) },
		"one too many": func(a *Args) {
			for range MaxArgs + 1 {
				a.U32(0)
			}
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("arguments %s do not panic", what)
				}
			}()
			fill(s.Args())
		}()
	}
	if len(r.m.gpus) > 1 {
		contains(t, r.stream(1, "other").Launch(fill, Grid{}), "fill", "gpu0", "other")
	}
}

// TestNothingAllocates holds for all that goes on once a step.
func TestNothingAllocates(t *testing.T) {
	r := newRig(t, 2)
	s, other, mod := r.stream(0, "a"), r.stream(0, "b"), r.load(0)
	last := len(r.m.gpus) - 1 // the same where there is one
	peer := r.stream(last, "peer")
	fill := r.function(mod, "fill")
	mem, host := r.alloc(device.HBM(0), 4096), r.alloc(device.Host, 4096)
	far, near := r.alloc(device.HBM(last), 4096), r.alloc(device.Host, 4096)
	f, gate, e := r.fence("step"), r.fence("gate"), r.event()
	worker := r.host("worker").(*hostStream)
	g, err := s.Capture(func() error {
		s.Args().Addr(all(mem).Addr).U32(1).U32(16)
		return s.Launch(fill, Grid{Threads: [3]int{16}})
	})
	r.ok(err)
	defer g.Close()
	dst, src := all(mem), all(host)
	value := uint32(0)
	for name, step := range map[string]func(){
		"launch": func() {
			s.Args().Addr(dst.Addr).U32(value).U32(16)
			r.ok(s.Launch(fill, Grid{Threads: [3]int{16}}))
		},
		"graph": func() { r.ok(s.LaunchGraph(g)) },
		"tiles": func() {
			_, err := r.m.MapTiles(device.HBM(0), dst.Addr, 16, 128, 256, 16)
			r.ok(err)
		},
		"copy to a GPU":              func() { r.ok(s.Copy(dst, src)) },
		"copy to the host":           func() { r.ok(s.Copy(src, dst)) },
		"copy within the host":       func() { r.ok(s.Copy(src, all(near))) },
		"copy from a peer":           func() { r.ok(s.Copy(dst, all(far))) },
		"copy to a peer":             func() { r.ok(s.Copy(all(far), dst)) },
		"copy on the peer's stream":  func() { r.ok(peer.Copy(dst, all(far))) },
		"copy on the host's stream":  func() { r.ok(worker.Copy(dst, src)); settle(worker) },
		"event on the host's stream": func() { r.ok(s.Record(e)); r.ok(worker.Wait(e)); settle(worker) },
		"fence": func() {
			value++
			r.ok(s.SignalFence(f, value))
			r.ok(other.WaitFence(f, value))
		},
		"wait on the host": func() {
			value++
			r.ok(s.Record(e))
			r.ok(s.SignalFence(f, value))
			r.ok(e.Synchronize(r.ctx))
			r.ok(f.Wait(r.ctx, value))
			r.ok(s.Synchronize(r.ctx))
		},
		"host stream": func() {
			value++
			r.ok(worker.WaitFence(f, value))
			r.ok(worker.Execute(device.Work{Name: "nothing", Run: func(device.Access) error { return nil }}))
			r.ok(s.SignalFence(f, value))
			settle(worker)
		},
		"sleeping wait": func() {
			value++
			r.ok(worker.Execute(device.Work{Name: "sleep", Run: func(device.Access) error { time.Sleep(5 * spinFor); return nil }}))
			r.ok(worker.SignalFence(f, value))
			r.ok(f.Wait(r.ctx, value))
		},
		"event behind fences": func() {
			value += 2
			r.ok(s.WaitFence(gate, value-1))
			r.ok(s.WaitFence(gate, value))
			r.ok(s.Record(e))
			r.ok(other.Wait(e))
			r.ok(gate.Signal(value))
			r.ok(other.Synchronize(r.ctx))
		},
		"time of an event": func() {
			r.ok(s.Record(e))
			r.ok(e.Synchronize(r.ctx))
			_, err := e.Time()
			r.ok(err)
		},
		"event": func() {
			r.ok(s.Record(e))
			r.ok(other.Wait(e))
			for {
				done, err := e.Query()
				r.ok(err)
				if done {
					break
				}
			}
		},
	} {
		step()
		r.ok(s.Synchronize(r.ctx))
		if n := testing.AllocsPerRun(100, step); n >= 1 {
			t.Errorf("%s: %v allocations a time", name, n)
		}
	}
	for _, s := range []*Stream{s, other, peer} {
		r.ok(s.Synchronize(r.ctx))
	}
}

// settle waits until a host stream has nothing to do.
func settle(s *hostStream) {
	for !s.idle() {
		runtime.Gosched()
	}
}

func TestGraph(t *testing.T) {
	r := newRig(t, 1)
	s, other, mod := r.stream(0, "captured"), r.stream(0, "other"), r.load(0)
	fill := r.function(mod, "fill")
	a, b := r.alloc(device.HBM(0), 8), r.alloc(device.HBM(0), 8)
	e, f := r.event(), r.fence("outside")
	g, err := s.Capture(func() error {
		s.Args().Addr(all(a).Addr).U32(5).U32(2)
		if err := s.Launch(fill, Grid{}); err != nil {
			return err
		}
		// What waits cannot be captured, and says so without harm.
		contains(t, s.Record(e), "Capture")
		contains(t, s.SignalFence(f, 1), "Capture")
		contains(t, s.Synchronize(r.ctx), "Capture")
		_, err := s.Capture(func() error { return nil })
		contains(t, err, "Capture")
		return s.Copy(all(b), all(a))
	})
	r.ok(err)
	if g.Nodes() != 2 {
		t.Errorf("%d operations in the graph, want a launch and a copy", g.Nodes())
	}
	r.ok(s.Synchronize(r.ctx))
	s.Args().Addr(all(a).Addr).U32(0).U32(2)
	r.ok(s.Launch(fill, Grid{}))
	r.ok(s.Copy(all(b), all(a)))
	if got := r.words(s, all(b)); got[0] != 0 {
		t.Errorf("before the graph: %#x", got)
	}
	for _, on := range []*Stream{s, other} {
		r.ok(on.LaunchGraph(g))
		if got := r.words(on, all(b)); got[0] != 5<<32|5 {
			t.Errorf("after the graph: %#x", got)
		}
	}
	r.ok(g.Close())
	r.wants(g.Close(), device.ErrClosed)
	contains(t, s.LaunchGraph(g), "graph is closed")
	// An error inside ends the capture and leaves the stream as it was.
	cause := errors.New("second thoughts")
	_, err = s.Capture(func() error { return cause })
	r.wants(err, cause)
	r.ok(s.Copy(all(b), all(a)))
	r.ok(s.Synchronize(r.ctx))
}

// TestMapTiles brings tiles of a matrix, also such that go beyond it.
func TestMapTiles(t *testing.T) {
	r := newRig(t, 1)
	if r.m.Topology().GPUs[0].ComputeCapability < 90 {
		t.Skip("it needs a GPU of compute capability 9.0 or later")
	}
	at := r.alloc(device.HBM(0), 4096)
	if m, err := r.m.MapTiles(device.HBM(0), all(at).Addr, 20, 72, 160, 16); err != nil || m == (TensorMap{}) {
		t.Errorf("map %v, %v", m, err)
	}
	for _, c := range []struct {
		space         device.Space
		off           device.Addr
		rows, columns int
		stride        int64
		tileRows      int
		want          string
	}{
		{device.HBM(0), 8, 20, 72, 160, 16, "20 rows of 72"},
		{device.HBM(0), 0, 20, 72, 168, 16, "168 bytes apart"},
		{device.HBM(0), 0, 20, 72, 1 << 40, 16, "bytes apart"},
		{device.HBM(0), 0, 0, 72, 160, 16, "0 rows of 72"},
		{device.HBM(0), 0, 20, 72, 160, 257, "tiles of 257 rows"},
		{device.Host, 0, 20, 72, 160, 16, "the space of a GPU"},
	} {
		_, err := r.m.MapTiles(c.space, all(at).Addr+c.off, c.rows, c.columns, c.stride, c.tileRows)
		contains(t, err, "map", c.space.String(), c.want)
	}
	if !onGPU {
		return // the stand-in runs no code
	}
	const rows, columns, stride, tileRows = 20, 72, 160, 16
	s, tile := r.stream(0, "compute"), r.function(r.load(0), "tile")
	host, mem := r.alloc(device.Host, rows*stride), r.alloc(device.HBM(0), rows*stride)
	w := host.Write(0, rows*stride)
	for i := range w {
		w[i] = byte(1 + i%251)
	}
	r.ok(s.Copy(all(mem), all(host)))
	out := r.alloc(device.HBM(0), tileRows*128)
	m, err := r.m.MapTiles(device.HBM(0), all(mem).Addr, rows, columns, stride, tileRows)
	r.ok(err)
	for _, at := range []struct{ element, row int }{{0, 0}, {0, 7}, {64, 3}, {8, 10}} {
		s.Args().Bytes(unsafe.Slice((*byte)(unsafe.Pointer(&m)), 128), 64).Addr(all(out).Addr).I32(int32(at.element)).I32(int32(at.row)).I32(tileRows * 128)
		r.ok(s.Launch(tile, Grid{Threads: [3]int{64}}))
		got := r.words(s, all(out))
		for i := range tileRows * 16 {
			row, chunk := i/16, i/2%8
			element := at.element + (chunk^row%8)*8 + i%2*4
			want := uint64(0)
			if at.row+row < rows && element < columns {
				want = binary.LittleEndian.Uint64(w[(at.row+row)*stride+2*element:])
			}
			if got[i] != want {
				t.Fatalf("from %+v on, row %d, place %d: %#x, want %#x", at, row, i%16, got[i], want)
			}
		}
	}
}

// TestOverlap holds launches to what they may start before: only a launch of that kind
// with nothing in between.
func TestOverlap(t *testing.T) {
	r := newRig(t, 1)
	s, other, mod := r.stream(0, "compute"), r.stream(0, "other"), r.load(0)
	fill := r.function(mod, "fill")
	a, b := r.alloc(device.HBM(0), 8), r.alloc(device.HBM(0), 8)
	e, f := r.event(), r.fence("done")
	able := r.m.Topology().GPUs[0].ComputeCapability >= overlapCapability
	value := uint32(0)
	launch := func(overlap bool) {
		t.Helper()
		value++
		s.Args().Addr(all(a).Addr).U32(value).U32(2)
		r.ok(s.Launch(fill, Grid{Overlap: overlap}))
	}
	wants := func(after string, want bool) {
		t.Helper()
		if got := s.overlaps(s.ops + 1); got != (want && able) {
			t.Errorf("after %s: a launch overlaps: %v, want %v", after, got, want && able)
		}
	}
	wants("nothing", false)
	for _, between := range []struct {
		name string
		do   func()
	}{
		{"a launch that waits for all", func() { launch(false) }},
		{"a copy", func() { r.ok(s.Copy(all(b), all(a))) }},
		{"an event recorded", func() { r.ok(s.Record(e)) }},
		{"a wait for an event", func() { r.ok(other.Record(e)); r.ok(s.Wait(e)) }},
		{"a fence signaled", func() { r.ok(s.SignalFence(f, 1)) }},
		{"a wait for a fence", func() { r.ok(s.WaitFence(f, 1)) }}, // signaled by the line above
		{"a library's call", func() { r.ok(s.Do("library", func() error { return nil })) }},
	} {
		launch(true)
		wants("a launch", true)
		launch(true)
		wants("two launches", true)
		between.do()
		wants(between.name, false)
	}
	launch(true)
	g, err := s.Capture(func() error {
		wants("the beginning of a capture", false)
		launch(true)
		wants("a launch in a capture", true)
		launch(true)
		return nil
	})
	r.ok(err)
	defer g.Close()
	wants("a capture", false)
	launch(true)
	r.ok(s.LaunchGraph(g))
	wants("a graph", false)
	if got, want := r.words(s, all(a))[0], uint64(value-1)<<32|uint64(value-1); got != want {
		t.Errorf("%#x, want %#x, by the graph's last launch", got, want)
	}
	r.ok(f.Close())
}

// TestGraphRefused: what the driver refuses of a capture leaves the stream as it was; a
// launch that it refuses puts the stream into error.
func TestGraphRefused(t *testing.T) {
	if onGPU {
		t.Skip("a real driver refuses nothing on demand")
	}
	r := newRig(t, 1)
	s := r.stream(0, "captured")
	a, b := r.alloc(device.HBM(0), 8), r.alloc(device.HBM(0), 8)
	f := func() error { return s.Copy(all(b), all(a)) }
	for _, call := range []string{"cuStreamBeginCapture_v2", "cuMemcpyAsync", "cuGraphInstantiateWithFlags"} {
		standin.Fail(call, 2, 0)
		_, err := s.Capture(f)
		r.wants(err, device.ErrOutOfMemory)
		r.ok(f())
		r.ok(s.Synchronize(r.ctx))
	}
	g, err := s.Capture(f)
	r.ok(err)
	standin.Fail("cuGraphLaunch", 2, 0)
	r.wants(s.LaunchGraph(g), device.ErrOutOfMemory)
	r.wants(s.Recover(r.ctx), device.ErrOutOfMemory)
	r.ok(s.LaunchGraph(g))
	r.ok(s.Synchronize(r.ctx))
	r.ok(g.Close())
}

func TestDo(t *testing.T) {
	r := newRig(t, 1)
	s := r.stream(0, "library")
	if s.Handle() == 0 || s.Machine() != r.m {
		t.Error("the stream has no handle, or not its machine")
	}
	ran := 0
	r.ok(s.Do("fine", func() error { ran++; return nil }))
	cause := errors.New("status 7")
	err := s.Do("gemm", func() error { ran++; return cause })
	r.wants(err, cause)
	contains(t, err, "launch", "gemm", "library")
	r.ok(s.Do("dropped", func() error { ran++; return nil }))
	if ran != 2 {
		t.Errorf("%d of 3 ran, want the first two", ran)
	}
	r.wants(s.Recover(r.ctx), cause)
	r.ok(s.Do("again", func() error { ran++; return nil }))
	if ran != 3 {
		t.Error("nothing runs after Recover")
	}
}

// TestHostFailureReachesGPU lets a GPU stream wait for host work that turns out to
// have failed: by an event and by a fence, directly and through another stream.
func TestHostFailureReachesGPU(t *testing.T) {
	r := newRig(t, 2)
	cause := errors.New("the disk is gone")
	for _, through := range []string{"event", "fence"} {
		for _, early := range []bool{true, false} {
			host, gpu, next := r.host("host"), r.stream(0, "gpu"), r.stream(len(r.m.gpus)-1, "next")
			e, after, f, last := r.event(), r.event(), r.fence("f"), r.fence("last")
			gate := make(chan struct{})
			if early {
				close(gate)
			}
			r.ok(host.Execute(device.Work{Name: "read", Run: func(device.Access) error { <-gate; return cause }}))
			r.ok(host.Record(e))
			r.ok(host.SignalFence(f, 1))
			if early {
				r.wants(host.Synchronize(r.ctx), cause)
			}
			if through == "event" {
				r.ok(gpu.Wait(e))
			} else {
				r.ok(gpu.WaitFence(f, 1))
			}
			r.ok(gpu.Record(after))
			r.ok(next.Wait(after))
			r.ok(next.SignalFence(last, 1))
			if !early {
				if done, err := after.Query(); done || err != nil {
					t.Errorf("%s: passed (%v, %v) before the host's work ended", through, done, err)
				}
				close(gate)
			}
			for _, s := range []device.Stream{gpu, next, host} {
				r.wants(s.Synchronize(r.ctx), cause)
			}
			r.wants(after.Synchronize(r.ctx), cause)
			for _, s := range []device.Stream{gpu, next, host} {
				r.wants(s.Recover(r.ctx), cause)
				r.ok(s.Synchronize(r.ctx))
			}
			// Behind the recovery it is over.
			r.ok(gpu.Record(after))
			r.ok(next.Wait(after))
			r.ok(next.SignalFence(last, 2))
			r.ok(last.Wait(r.ctx, 2))
			r.ok(next.Synchronize(r.ctx))
			r.ok(after.Synchronize(r.ctx))
		}
	}
}

// TestRefusedCall lets the driver refuse a copy: the stream is in error, and what
// stands behind it does not run and says why.
func TestRefusedCall(t *testing.T) {
	r := newRig(t, 2)
	if onGPU {
		t.Skip("a real driver refuses nothing on demand")
	}
	const outOfResources = 701 // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, which ends nothing
	s, behind := r.stream(0, "copies"), r.stream(1, "behind")
	src, dst := r.alloc(device.Host, 64), r.alloc(device.HBM(0), 64)
	back := r.alloc(device.Host, 64)
	e, f := r.event(), r.fence("arrived")
	for i := range src.Write(0, 64) {
		src.Write(0, 64)[i] = 1
	}
	r.ok(s.Copy(all(dst), all(src)))
	r.ok(s.Copy(all(back), all(dst)))
	r.ok(s.Synchronize(r.ctx))
	for i := range src.Write(0, 64) {
		src.Write(0, 64)[i] = 2
	}
	standin.Fail("cuMemcpyAsync", outOfResources, 0)
	err := s.Copy(all(dst), all(src))
	r.wants(err, device.ErrCopyFailed)
	var typed *device.Error
	if !errors.As(err, &typed) || typed.Op != "copy" || typed.Code != outOfResources || typed.Space != device.HBM(0) {
		t.Errorf("error %+v", typed)
	}
	contains(t, err, "64 bytes from host to gpu0", `"copies"`)
	r.ok(s.Copy(all(back), all(dst)))
	r.ok(s.Record(e))
	r.ok(s.SignalFence(f, 1))
	r.ok(behind.Wait(e))
	r.ok(behind.Copy(all(back), all(src)))
	r.wants(e.Synchronize(r.ctx), device.ErrCopyFailed)
	r.wants(f.Wait(r.ctx, 1), device.ErrCopyFailed)
	r.wants(behind.Synchronize(r.ctx), device.ErrCopyFailed)
	r.wants(s.Synchronize(r.ctx), device.ErrCopyFailed)
	if got := back.Read(0, 1)[0]; got != 1 {
		t.Errorf("work behind a failed copy ran: %d", got)
	}
	for _, st := range []*Stream{s, behind} {
		r.wants(st.Recover(r.ctx), device.ErrCopyFailed)
	}
	r.ok(s.Copy(all(dst), all(src)))
	r.ok(s.Copy(all(back), all(dst)))
	r.ok(s.SignalFence(f, 2))
	r.ok(f.Wait(r.ctx, 2))
	if got := back.Read(0, 1)[0]; got != 2 {
		t.Errorf("after recovery: %d", got)
	}
	for call, do := range map[string]func() error{
		"cuStreamWriteValue32_v2": func() error { return s.SignalFence(f, 3) },
		"cuStreamWaitValue32_v2":  func() error { return s.WaitFence(f, 3) },
		"cuEventRecord":           func() error { return s.Record(e) },
		"cuStreamWaitEvent": func() error {
			r.ok(behind.Record(e))
			return s.Wait(e)
		},
	} {
		standin.Fail(call, outOfResources, 0)
		if err := do(); err == nil {
			t.Errorf("%s was refused and nobody said so", call)
		}
		if s.Recover(r.ctx) == nil {
			t.Errorf("%s was refused and the stream is not in error", call)
		}
	}
	if err := f.Wait(r.ctx, 3); err == nil {
		t.Error("a signal that was refused sets the fence")
	}
}

// TestCopyBatch copies pieces between the host and two GPUs, each stage in one batch.
func TestCopyBatch(t *testing.T) {
	r := newRig(t, 2)
	const pieces, size = 300, 48
	s := r.stream(0, "batches")
	far := device.HBM(0)
	if _, err := r.m.Topology().Path(device.HBM(0), device.HBM(1)); err == nil {
		far = device.HBM(1)
	}
	stages := []device.Memory{r.alloc(device.Host, pieces*size), r.alloc(device.HBM(0), pieces*size), r.alloc(far, pieces*size), r.alloc(device.Host, pieces*size)}
	first := stages[0].Write(0, pieces*size)
	for i := range first {
		first[i] = byte(i / size * 7)
	}
	// Each stage has the pieces in another order: piece i of the last is piece from[i] of the first.
	from := make([]int, pieces)
	for i := range from {
		from[i] = i
	}
	piece := func(m device.Memory, i int) device.Range { return m.Range(int64(i*size), size) }
	for stage, step := range []int{7, 11, 13} {
		var dst, src []device.Range
		next := make([]int, pieces)
		for i := range pieces {
			j := i * step % pieces
			dst, src, next[i] = append(dst, piece(stages[stage+1], i)), append(src, piece(stages[stage], j)), from[j]
		}
		dst, src, from = append(dst, device.Range{}), append(src, device.Range{}), next
		if err := s.CopyBatch(dst, src); onGPU && errors.Is(err, device.ErrNoBatches) {
			t.Skip(err)
		} else {
			r.ok(err)
		}
	}
	r.ok(s.CopyBatch(nil, nil))
	r.ok(s.Synchronize(r.ctx))
	for i, b := range stages[3].Read(0, pieces*size) {
		if want := byte(from[i/size] * 7); b != want {
			t.Fatalf("byte %d is %d, want %d of piece %d", i, b, want, from[i/size])
		}
	}
	host, gpu := stages[0], stages[1]
	contains(t, s.CopyBatch([]device.Range{piece(gpu, 0)}, nil), "1 destinations and 0 sources")
	contains(t, s.CopyBatch([]device.Range{piece(gpu, 0)}, []device.Range{host.Range(0, 16)}), "destination has 48 bytes and source 16")
	contains(t, s.CopyBatch([]device.Range{piece(gpu, 0), piece(stages[3], 0)}, []device.Range{piece(host, 0), piece(host, 1)}), "pair 1", "within host memory")
	r.ok(s.Synchronize(r.ctx))
	if onGPU {
		return
	}
	const outOfResources = 701
	standin.Fail("cuMemcpyBatchAsync", outOfResources, 0)
	err := s.CopyBatch([]device.Range{piece(gpu, 0)}, []device.Range{piece(host, 0)})
	r.wants(err, device.ErrCopyFailed)
	contains(t, err, "a batch of 1 copies, 48 bytes")
	r.wants(s.Recover(r.ctx), device.ErrCopyFailed)
}

// TestFreeDoesNotWait frees memory while a stream stands before a fence that only the
// caller of Free will signal.
func TestFreeDoesNotWait(t *testing.T) {
	r := newRig(t, 1)
	s, f := r.stream(0, "held"), r.fence("later")
	mem := r.alloc(device.HBM(0), 1<<20)
	src := r.alloc(device.Host, 1<<20)
	r.ok(s.WaitFence(f, 1))
	r.ok(s.Copy(all(mem), all(src)))
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			other, err := r.m.Alloc(device.HBM(0), 10<<20, "while held")
			if err != nil {
				return err
			}
			return other.Free()
		}()
	}()
	select {
	case err := <-done:
		r.ok(err)
	case <-time.After(time.Minute):
		t.Error("Alloc or Free waits for a stream that waits for a fence")
	}
	r.ok(f.Signal(1))
	r.ok(s.Synchronize(r.ctx))
}

func TestAccounts(t *testing.T) {
	r := newRig(t, 2)
	for i := range r.m.gpus {
		space := device.HBM(i)
		before, err := r.m.Usage(space)
		r.ok(err)
		if before.OtherProcesses <= 0 || before.Capacity <= 0 {
			t.Errorf("%s: %+v; the context takes something", space, before)
		}
		var mems []device.Memory
		for _, n := range []int64{1, 3 << 20, 40 << 20} {
			mem, err := r.m.Alloc(space, n, "accounted")
			r.ok(err)
			mems = append(mems, mem)
		}
		after, err := r.m.Usage(space)
		r.ok(err)
		const granule = 2 << 20
		if got := after.Allocated - before.Allocated; got != (1+2+20)*granule {
			t.Errorf("%s: %d bytes are accounted for 1 byte, 3 MiB and 40 MiB", space, got)
		}
		// What the driver sees is what is accounted, but for others that come and go.
		if d := after.OtherProcesses - before.OtherProcesses; d < -granule || d > granule {
			t.Errorf("%s: others took %d bytes while we allocated", space, d)
		}
		for _, mem := range mems {
			r.ok(mem.Free())
		}
		end, err := r.m.Usage(space)
		r.ok(err)
		if end.Allocated != before.Allocated || end.Peak != after.Allocated {
			t.Errorf("%s: %+v after everything was freed", space, end)
		}
		_, err = r.m.Alloc(space, end.Free()+granule, "all and more")
		r.wants(err, device.ErrOutOfMemory)
		contains(t, err, "all and more", fmt.Sprint(end.Free()+granule), "free of")
	}
	// Far more than there is, but no more than the host is said to have.
	o := r.m.o
	o.HostBytes = 1 << 50
	large, err := New(o)
	r.ok(err)
	if u, err := large.Usage(device.Host); err != nil || u.Capacity != o.HostBytes || u.Free() < 1<<49 {
		t.Errorf("a host of %d bytes: %+v, %v", o.HostBytes, u, err)
	}
	r.ok(large.Close())
	_, err = r.m.Alloc(device.Host, 1<<60, "the world")
	r.wants(err, device.ErrOutOfMemory)
	contains(t, err, "the world", "free of")
}

// TestLargeHostMemory goes through mapping, touching and pinning.
func TestLargeHostMemory(t *testing.T) {
	r := newRig(t, 1)
	const n = 3*smallBytes + 4097
	src, dst, mem := r.alloc(device.Host, n), r.alloc(device.Host, n), r.alloc(device.HBM(0), n)
	b := src.Write(0, n)
	for i := range b {
		b[i] = byte(i * 7 >> 3)
	}
	s := r.stream(0, "round trip")
	r.ok(s.Copy(all(mem), all(src)))
	r.ok(s.Copy(all(dst), all(mem)))
	r.ok(s.Synchronize(r.ctx))
	if string(dst.Read(0, n)) != string(b) {
		t.Error("other bytes came back")
	}
	if !onGPU {
		standin.Fail("cuMemHostRegister_v2", outOfMemory, 0)
		_, err := r.m.Alloc(device.Host, n, "not to be pinned")
		r.wants(err, device.ErrOutOfMemory)
		standin.Fail("cuMemHostGetDevicePointer_v2", 1, 0) // CUDA_ERROR_INVALID_VALUE
		_, err = r.m.KernelAddr(device.HBM(0), all(src))
		r.wants(err, device.ErrUnreachable)
		at, err := r.m.KernelAddr(device.HBM(0), src.Range(256, 256))
		r.ok(err)
		if at != src.Range(256, 256).Addr {
			t.Errorf("kernels read host memory at %#x, which is at %v", at, src.Range(256, 256))
		}
	}
}

// TestHostRunsShort takes memory in pieces, and gives all of them back when a piece is
// not to be had.
func TestHostRunsShort(t *testing.T) {
	var asked []int64
	_, err := mapHost(3*touchBytes, 2, func(n int64) bool {
		asked = append(asked, n)
		return false
	})
	contains(t, err, "0 of 3221225472 bytes", "ran out of memory")
	if len(asked) != 1 || asked[0] != touchBytes {
		t.Errorf("asked for room for %v", asked)
	}
	asked = nil
	b, err := mapHost(5<<20, 3, func(n int64) bool {
		asked = append(asked, n)
		return true
	})
	if err != nil || len(b) != 5<<20 || len(asked) != 1 || asked[0] != 5<<20 {
		t.Fatalf("%d bytes, %v, asked %v", len(b), err, asked)
	}
	if err := (&memory{mapping: b}).unmap(); err != nil {
		t.Error(err)
	}
}

// TestEventsOfManyStreams records one event on streams of all kinds in turn, with
// waits for the earlier recording still queued.
func TestEventsOfManyStreams(t *testing.T) {
	r := newRig(t, 2)
	// Open for an hour, so that a time that is not set is told from one that is: clocks
	// of devices are only known about as well as the host is quick to ask them.
	r.m.Opened = r.m.Opened.Add(-time.Hour)
	last := len(r.m.gpus) - 1
	kinds := []device.Stream{r.stream(0, "a"), r.host("b"), r.stream(last, "c"), r.host("d")}
	e, gate := r.event(), r.fence("gate")
	gates := uint32(0)
	for round := range 12 {
		from, to := kinds[round%4], kinds[(round*3+1)%4]
		gates++
		r.ok(from.WaitFence(gate, gates))
		r.ok(from.Record(e))
		if from != to {
			// The same event again, behind the wait for its earlier recording.
			r.ok(to.Wait(e))
			r.ok(to.Record(e))
		}
		if done, err := e.Query(); done || err != nil {
			t.Fatalf("round %d: passed (%v, %v) while the gate is shut", round, done, err)
		}
		r.ok(gate.Signal(gates))
		r.ok(e.Synchronize(r.ctx))
		at, err := e.Time()
		r.ok(err)
		if now := r.m.Now(); at > now || now-at > 10*time.Second {
			t.Errorf("round %d: passed at %v, and it is %v", round, at, now)
		}
		r.ok(from.Synchronize(r.ctx))
		r.ok(to.Synchronize(r.ctx))
	}
}

// TestAbandonedWaits ends waits on a host stream by their context: an abandoned Recover
// clears nothing.
func TestAbandonedWaits(t *testing.T) {
	r := newRig(t, 1)
	host, gate, e := r.host("slow"), r.fence("gate"), r.event()
	cause := errors.New("no luck")
	r.ok(host.WaitFence(gate, 1))
	r.ok(host.Execute(device.Work{Name: "fails", Run: func(device.Access) error { return cause }}))
	r.ok(host.Record(e))
	for _, wait := range []func(context.Context) error{host.Recover, host.Synchronize, e.Synchronize} {
		ctx, cancel := context.WithTimeout(r.ctx, 2*time.Millisecond)
		r.wants(wait(ctx), context.DeadlineExceeded)
		cancel()
	}
	r.ok(gate.Signal(1))
	r.wants(host.Synchronize(r.ctx), cause)
	r.wants(host.Recover(r.ctx), cause)
	r.ok(host.Synchronize(r.ctx))
	contains(t, gate.Signal(1), "values must increase", "gate")
	contains(t, gate.Fail(2, nil), "use Signal")
	r.ok(host.SignalFence(gate, 1))
	contains(t, host.Recover(r.ctx), "values must increase", "slow")
}

// TestManyDependencies lets a stream that is never synchronized wait for ever more
// fences and events: what it remembers of them stays small.
func TestManyDependencies(t *testing.T) {
	r := newRig(t, 1)
	s, host := r.stream(0, "gpu"), r.host("host")
	f, e := r.fence("f"), r.event()
	for i := range uint32(300) {
		r.ok(host.SignalFence(f, i+1))
		r.ok(s.WaitFence(f, i+1))
		r.ok(host.Record(e))
		r.ok(s.Wait(e))
		r.ok(e.Synchronize(r.ctx))
	}
	if n := len(s.epoch.open); n > 32 {
		t.Errorf("%d outcomes are remembered", n)
	}
	// Fences that are closed, whose words count for others then.
	seen := r.fence("seen")
	for i := range uint32(300) {
		f := r.fence("short-lived")
		r.ok(s.WaitFence(f, 1))
		r.ok(s.SignalFence(seen, i+1))
		r.ok(f.Signal(1))
		r.ok(seen.Wait(r.ctx, i+1))
		r.ok(f.Close())
	}
	if n := len(s.epoch.open); n > 32 {
		t.Errorf("%d outcomes are remembered", n)
	}
	r.ok(s.Synchronize(r.ctx))
}

func TestCloseSaysWhoIsHeld(t *testing.T) {
	r := newRig(t, 1)
	s, f := r.stream(0, "compute"), r.fence("weights of layer 3")
	r.ok(s.WaitFence(f, 4))
	waiting := make(chan error, 1)
	go func() { waiting <- f.Wait(r.ctx, 9) }()
	time.Sleep(2 * pause)
	err := r.m.Close()
	contains(t, err, `"compute"`, "weights of layer 3", "to reach 4", "it is at 0")
	r.wants(<-waiting, device.ErrClosed)
	_, err = r.m.NewEvent()
	r.wants(err, device.ErrClosed)
	_, err = r.m.NewFence("late")
	r.wants(err, device.ErrClosed)
	r.wants(s.Synchronize(r.ctx), device.ErrClosed)
}

func TestForeignObjects(t *testing.T) {
	r, other := newRig(t, 1), newRig(t, 1)
	s := r.stream(0, "ours")
	contains(t, s.Record(other.event()), "not of this machine")
	contains(t, s.Wait(other.event()), "not of this machine")
	contains(t, s.SignalFence(other.fence("f"), 1), "not of this machine")
	contains(t, r.host("h").WaitFence(other.fence("f"), 1), "not of this machine")
	contains(t, s.Copy(all(r.alloc(device.HBM(0), 8)), all(other.alloc(device.HBM(0), 8))), "is not in one live allocation")
	r.ok(s.Synchronize(r.ctx))
}

func TestOpenRefuses(t *testing.T) {
	need(t, 1)
	for _, test := range []struct {
		gpus []int
		want string
	}{
		{[]int{count}, fmt.Sprintf("this machine has %d", count)},
		{[]int{-1}, "GPU -1"},
		{[]int{0, 0}, "twice"},
	} {
		_, err := Open(Options{Driver: library, GPUs: test.gpus})
		contains(t, err, test.want)
		if errors.Is(err, ErrUnavailable) {
			t.Errorf("%v: a wrong number is not a missing GPU: %v", test.gpus, err)
		}
	}
	_, err := Open(Options{Driver: "/another/libcuda.so.1"})
	r := &rig{TB: t}
	r.wants(err, ErrUnavailable)
	contains(t, err, "loaded already")
}

// The tests below need a process of their own: what they do to the driver, or find it
// like, holds for a whole process.

const childVariable = "MOESERVE_CUDA_CHILD"

// children run in such processes, and return what went wrong.
var children = map[string]func() error{
	"open":  func() error { _, err := Open(Options{Driver: library}); return err },
	"lost":  loseDevice,
	"probe": loseUnnoticed,
}

func runChild(name string) int {
	if err := children[name](); err != nil {
		fmt.Println(err)
		return 4
	}
	return 0
}

// child runs one and returns what it printed.
func child(t *testing.T, name, driver string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), append(env, childVariable+"="+name, childVariable+"_DRIVER="+driver)...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// keepStandIn builds a stand-in that stays for a test's children.
func keepStandIn(t *testing.T) string {
	t.Helper()
	need(t, 1)
	if onGPU {
		return ""
	}
	driver, err := standin.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return driver
}

func TestUnavailable(t *testing.T) {
	driver := keepStandIn(t)
	tests := []struct{ name, driver, env, want string }{
		{"no driver", "/none/libcuda.so.1", "A=B", "there is no NVIDIA driver"},
		{"no driver either", "libm.so.6", "A=B", "no CUDA driver"},
	}
	if !onGPU {
		tests = append(tests, []struct{ name, driver, env, want string }{
			{"no device", driver, "STANDIN_DEVICES=0", "CUDA_ERROR_NO_DEVICE"},
			{"old driver", driver, "STANDIN_VERSION=11080", "offers CUDA 11.8; 12.0 is needed"},
			{"old GPU", driver, "STANDIN_CAPABILITY=75", "compute capability 7.5"},
		}...)
	}
	for _, test := range tests {
		out, err := child(t, "open", test.driver, test.env)
		if err == nil || !strings.Contains(out, test.want) || !strings.HasSuffix(out, ErrUnavailable.Error()) {
			t.Errorf("%s: %q (%v), want %q", test.name, out, err, test.want)
		}
		if strings.Contains(out, "\n") {
			t.Errorf("%s: more than one line: %q", test.name, out)
		}
	}
}

func TestNoPeerAccess(t *testing.T) {
	need(t, 2)
	if onGPU {
		t.Skip("needs devices that cannot reach each other")
	}
	t.Setenv("STANDIN_PEERS", "0")
	if _, err := start(library); err != nil {
		t.Fatal(err)
	}
	// The stand-in reads its environment when it starts, which it does at every Open.
	r := newRig(t, 2)
	a, b := r.alloc(device.HBM(0), 8), r.alloc(device.HBM(1), 8)
	s := r.stream(0, "between")
	r.wants(s.Copy(all(a), all(b)), device.ErrUnreachable)
	_, err := r.m.KernelAddr(device.HBM(0), all(b))
	r.wants(err, device.ErrUnreachable)
	via := r.alloc(device.Host, 8)
	down := r.stream(1, "down")
	r.ok(down.Copy(all(via), all(b)))
	r.ok(down.Synchronize(r.ctx))
	r.ok(s.Copy(all(a), all(via)))
	r.ok(s.Synchronize(r.ctx))
}

// TestFencesWhileBusy: fences can be made while a stream waits for one, also where the driver allocates
// pinned memory only once no stream has work.
func TestFencesWhileBusy(t *testing.T) {
	need(t, 1)
	if !onGPU {
		t.Setenv("STANDIN_IDLE_ALLOC", "1")
	}
	r := newRig(t, 1)
	gate, s := r.fence("gate"), r.stream(0, "waits")
	r.ok(s.WaitFence(gate, 1))
	made := make(chan error, 1)
	go func() {
		for range 1024 - 16 { // others were made before
			if _, err := r.m.NewFence("another"); err != nil { // the machine closes it
				made <- err
				return
			}
		}
		made <- nil
	}()
	select {
	case err := <-made:
		r.ok(err)
		r.ok(gate.Signal(1))
	case <-time.After(20 * time.Second):
		t.Error("who makes fences waits for a stream that waits")
		r.ok(gate.Signal(1))
		r.ok(<-made)
	}
	r.ok(s.Synchronize(r.ctx))
}

// TestStreamsBegunAtOnce: streams whose first operations are enqueued at once, by a goroutine each, do not wait behind
// each other's waits. Bytes pass through all of them in turn.
func TestStreamsBegunAtOnce(t *testing.T) {
	need(t, 1)
	rounds := 60
	if !onGPU {
		t.Setenv("STANDIN_SHARED_QUEUES", "1")
		rounds = 10
	}
	r := newRig(t, maxGPUs)
	const n, count, turns = 4096, 6, 3 * 6
	spaces := r.m.Topology().Spaces()
	memory := []device.Memory{r.alloc(device.Host, n)}
	for i := range count {
		memory = append(memory, r.alloc(spaces[i%len(spaces)], n))
	}
	for round := range rounds {
		turn := r.fence("turn")
		var streams []device.Stream
		for i := range count {
			s, err := r.m.NewStream(spaces[i%len(spaces)], device.StreamOptions{Name: fmt.Sprint(i)})
			r.ok(err)
			streams = append(streams, s)
		}
		begin := make(chan struct{})
		var all sync.WaitGroup
		for i, s := range streams {
			all.Go(func() {
				<-begin
				for k := uint32(i); k < turns; k += count {
					if err := errors.Join(s.WaitFence(turn, k), s.Copy(memory[i+1].Range(0, n), memory[i].Range(0, n)), s.SignalFence(turn, k+1)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		close(begin)
		all.Wait()
		ctx, stop := context.WithTimeout(r.ctx, 20*time.Second)
		err := turn.Wait(ctx, turns)
		stop()
		if err != nil {
			t.Errorf("round %d: it is turn %d of %d, and nobody takes it: %v", round, turn.Value(), turns, err)
			for ; turn.Value() < turns; time.Sleep(20 * time.Millisecond) {
				_ = turn.Signal(turn.Value() + 1) // a stream may do it
			}
		}
		for _, s := range streams {
			r.ok(s.Synchronize(r.ctx))
			r.ok(s.Close())
		}
		r.ok(turn.Close())
	}
}

// TestStreamsBeginApart: two streams whose first operations are of one kind, and enqueued at once, do not wait behind each
// other's waits, for each kind.
func TestStreamsBeginApart(t *testing.T) {
	need(t, 2)
	if !onGPU {
		t.Setenv("STANDIN_SHARED_QUEUES", "1")
	}
	r := newRig(t, 2)
	fill := r.function(r.load(0), "fill")
	here, host, far := r.alloc(device.HBM(0), 64), r.alloc(device.Host, 64), r.alloc(device.HBM(1), 64)
	other, more := r.alloc(device.HBM(0), 64), r.alloc(device.Host, 64)
	past, recorded := r.fence("past"), r.event()
	r.ok(past.Signal(1))
	capturing := r.stream(0, "captures")
	r.ok(capturing.Record(recorded))
	launch := func(s *Stream) error {
		s.Args().Addr(all(here).Addr).U32(1).U32(16)
		return s.Launch(fill, Grid{Threads: [3]int{16}})
	}
	graph, err := capturing.Capture(func() error { return launch(capturing) })
	r.ok(err)
	defer graph.Close() //nolint:errcheck // the machine's end says so
	for name, first := range map[string]func(s *Stream) error{
		"launch":            launch,
		"graph":             func(s *Stream) error { return s.LaunchGraph(graph) },
		"copy to a GPU":     func(s *Stream) error { return s.Copy(all(here), all(host)) },
		"copy to the host":  func(s *Stream) error { return s.Copy(all(host), all(here)) },
		"copy within a GPU": func(s *Stream) error { return s.Copy(all(here), all(other)) },
		"copy to a peer":    func(s *Stream) error { return s.Copy(all(far), all(here)) },
		"copy on the host":  func(s *Stream) error { return s.Copy(all(more), all(host)) },
		"batch": func(s *Stream) error {
			return s.CopyBatch([]device.Range{all(here), all(other)}, []device.Range{all(host), all(more)})
		},
		"wait for a fence":  func(s *Stream) error { return s.WaitFence(past, 1) },
		"wait for an event": func(s *Stream) error { return s.Wait(recorded) },
		"signal":            func(s *Stream) error { return s.SignalFence(r.fence("own"), 1) },
		"record":            func(s *Stream) error { return s.Record(r.event()) },
	} {
		for range 3 {
			f := r.fence("signaled by the other")
			waits, signals := r.stream(0, "waits"), r.stream(0, "signals")
			var both sync.WaitGroup
			begin := make(chan struct{})
			for _, s := range []*Stream{waits, signals} {
				both.Go(func() {
					<-begin
					if err := first(s); err != nil && !(onGPU && errors.Is(err, device.ErrNoBatches)) {
						t.Errorf("%s: %v", name, err)
					}
				})
			}
			close(begin)
			both.Wait()
			r.ok(waits.WaitFence(f, 1))
			r.ok(signals.SignalFence(f, 1))
			ctx, stop := context.WithTimeout(r.ctx, 20*time.Second)
			if err := f.Wait(ctx, 1); err != nil {
				t.Errorf("%s: a signal stands behind another stream's wait: %v", name, err)
				r.ok(f.Signal(1))
			}
			stop()
			r.ok(waits.Synchronize(r.ctx))
			r.ok(signals.Synchronize(r.ctx))
		}
	}
}

// TestBeginPatience: where the driver does not take a stream's first operation, others can be enqueued nevertheless.
func TestBeginPatience(t *testing.T) {
	r := newRig(t, 1)
	r.m.enqueuing <- struct{}{} // as of a call of the driver that does not return
	f, s := r.fence("signaled"), r.stream(0, "other")
	r.ok(s.SignalFence(f, 1))
	r.ok(f.Wait(r.ctx, 1))
	r.m.endEnqueuing()
}

func TestLostDevice(t *testing.T) {
	driver := keepStandIn(t)
	for _, name := range []string{"lost", "probe"} {
		if out, err := child(t, name, driver); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		} else {
			t.Logf("%s: %s", name, out)
		}
	}
	for _, result := range []string{"226", "721", "810"} { // of a stand-in's kernel that fails
		t.Setenv("STANDIN_FAULT", result)
		if out, err := child(t, "lost", driver); err != nil {
			t.Errorf("lost by %s: %v: %s", result, err, out)
		}
	}
}

// plain reports failures of a child: by panic, so that they end it.
type plain struct{ testing.TB }

func (plain) Helper()                   {}
func (plain) Name() string              { return "child" }
func (plain) Cleanup(func())            {}
func (plain) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (plain) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
func (plain) Skip(args ...any)          { fmt.Println("skipped:", fmt.Sprint(args...)); os.Exit(0) }

func childRig() (*rig, error) {
	o := Options{Driver: library, GPUs: []int{0, 1}}
	m, err := New(o)
	if err != nil && onGPU {
		o.GPUs = o.GPUs[:1]
		m, err = New(o)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	_ = cancel // the process ends
	return &rig{plain{}, m, ctx}, nil
}

// loseDevice runs a kernel that writes where it must not.
func loseDevice() error {
	r, err := childRig()
	if err != nil {
		return err
	}
	bad, waits := r.stream(0, "bad"), r.stream(len(r.m.gpus)-1, "waits")
	mod := r.load(0)
	mem, host := r.alloc(device.HBM(0), 64), r.alloc(device.Host, 64)
	e, f, g := r.event(), r.fence("never comes"), r.fence("gate")
	trap := r.function(mod, "trap")
	bad.Args()
	r.ok(bad.WaitFence(g, 1))
	r.ok(bad.Launch(trap, Grid{}))
	r.ok(bad.Copy(all(host), all(mem)))
	r.ok(bad.Record(e))
	r.ok(bad.SignalFence(f, 1))
	if len(r.m.gpus) > 1 {
		r.ok(waits.WaitFence(f, 1))
	}
	r.ok(g.Signal(1))
	r.wants(bad.Synchronize(r.ctx), device.ErrLost)
	// The other device's stream is let go, and knows.
	if len(r.m.gpus) > 1 {
		r.wants(waits.Synchronize(r.ctx), device.ErrLost)
		r.wants(waits.Recover(r.ctx), device.ErrLost)
		// A real fault takes the process's contexts on other GPUs with it.
		if err := waits.Synchronize(r.ctx); err != nil && (!onGPU || !errors.Is(err, device.ErrLost)) {
			r.Fatal(err)
		}
	}
	r.wants(f.Wait(r.ctx, 1), device.ErrLost)
	r.wants(e.Synchronize(r.ctx), device.ErrLost)
	for range 2 {
		r.wants(bad.Recover(r.ctx), device.ErrLost)
	}
	r.wants(bad.Copy(all(mem), all(host)), device.ErrLost)
	r.wants(bad.Launch(trap, Grid{}), device.ErrLost)
	r.wants(bad.SignalFence(f, 2), device.ErrLost)
	r.wants(f.Wait(r.ctx, 2), device.ErrLost)
	_, err = r.m.Alloc(device.HBM(0), 1, "late")
	r.wants(err, device.ErrLost)
	if os.Getenv("STANDIN_FAULT") == "" {
		contains(r, err, "CUDA_ERROR_ILLEGAL_ADDRESS", "gpu0")
	}
	_, err = r.m.NewStream(device.HBM(0), device.StreamOptions{})
	r.wants(err, device.ErrLost)
	r.ok(mem.Free())
	r.ok(bad.Close())
	r.ok(host.Free())
	if len(r.m.gpus) > 1 && !onGPU {
		// The other device works on; a real fault takes it with it.
		a, b := r.alloc(device.HBM(1), 64), r.alloc(device.Host, 64)
		r.ok(waits.Copy(all(a), all(b)))
		r.ok(waits.Synchronize(r.ctx))
		r.ok(a.Free())
		r.ok(b.Free())
	}
	fmt.Println(err)
	return r.m.Close()
}

// loseUnnoticed waits on the host for a fence that a device was to signal: nobody asks
// the device anything meanwhile but the wait itself.
func loseUnnoticed() error {
	r, err := childRig()
	if err != nil {
		return err
	}
	bad, f := r.stream(0, "bad"), r.fence("never comes")
	trap := r.function(r.load(0), "trap")
	bad.Args()
	r.ok(bad.Launch(trap, Grid{}))
	if err := bad.SignalFence(f, 1); err != nil {
		// Faster than we.
		r.wants(err, device.ErrLost)
	}
	err = f.Wait(r.ctx, 1)
	r.wants(err, device.ErrLost)
	fmt.Println(err)
	return r.m.Close()
}

// TestSideBySide enqueues on many streams from as many goroutines, with allocations
// beside.
func TestSideBySide(t *testing.T) {
	r := newRig(t, 2)
	const streams, rounds, n = 6, 40, 4096
	var wg sync.WaitGroup
	for i := range streams {
		st := r.stream(i%len(r.m.gpus), fmt.Sprint(i))
		src, dst := r.alloc(device.Host, n), r.alloc(device.Host, n)
		wg.Go(func() {
			for k := range rounds {
				mem, err := r.m.Alloc(st.Space(), n, "short-lived")
				if err != nil {
					t.Error(err)
					return
				}
				src.Write(0, n)[k] = byte(k)
				err = errors.Join(st.Copy(all(mem), all(src)), st.Copy(all(dst), all(mem)), st.Synchronize(r.ctx))
				if err != nil || dst.Read(0, n)[k] != byte(k) {
					t.Errorf("stream %d, round %d: %v", i, k, err)
				}
				if err := mem.Free(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestDriverIsAskedWithoutTheLock: whoever enqueues on a host stream does not wait for the
// driver, which the stream asks for what it watches.
func TestDriverIsAskedWithoutTheLock(t *testing.T) {
	r := newRig(t, 1)
	gpu, f, ev := r.stream(0, "gpu"), r.fence("held"), r.event()
	host := r.host("watches").(*hostStream)
	r.ok(gpu.WaitFence(f, 1))
	r.ok(gpu.Record(ev))
	ran := make(chan struct{})
	over, err := host.WatchEvent(ev, device.Work{Name: "passed", Run: func(device.Access) error { close(ran); return nil }})
	if over || err != nil {
		t.Fatal(over, err)
	}
	held := ev.(*event)
	held.mu.Lock() // asking for the event takes until the end of the test
	done := make(chan error, 1)
	go func() {
		var err error
		// The stream looks at what it watches many times meanwhile.
		for range 20000 {
			if err = host.Execute(device.Work{Name: "other"}); err != nil {
				break
			}
			runtime.Gosched()
		}
		done <- err
	}()
	select {
	case err := <-done:
		r.ok(err)
	case <-r.ctx.Done():
		t.Error("the stream's lock is held while the driver is asked")
	}
	held.mu.Unlock()
	r.ok(f.Signal(1))
	<-ran
	r.ok(host.Synchronize(r.ctx))
	r.ok(gpu.Synchronize(r.ctx))
}
