//go:build cuda

package cuda

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/dylib"
	"github.com/moeserve/moeserve/device/cuda/nvrtc"
	"github.com/moeserve/moeserve/transfer"
)

var measure = flag.Bool("measure", false, "run measurements, which print tables; without it they skip")

func needMeasure(t *testing.T) {
	if !*measure {
		t.Skip("without -measure")
	}
	need(t, 2)
}

// copyRun copies n words of 16 bytes.
const copyRun = `
extern "C" __global__ void __launch_bounds__(512) copy_run(uint4 *to, const uint4 *from, unsigned n) {
  unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) if (i + k * step < n) v[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; k++) if (i + k * step < n) __stcs(to + i + k * step, v[k]);
  }
}
extern "C" __global__ void poke(unsigned *to, unsigned value) { to[threadIdx.x] = value; }
extern "C" __global__ void peek(unsigned *to, const unsigned *from) { to[threadIdx.x] = from[threadIdx.x]; }
`

// measurer has what the measurements use.
type measurer struct {
	*rig
	copyRun, poke, peek *Function
}

func newMeasurer(t *testing.T) *measurer {
	m := &measurer{rig: newRig(t, 2)}
	if !onGPU {
		return m
	}
	c, err := nvrtc.Open(dylib.Folders(), m.m.DriverVersion()/1000)
	m.ok(err)
	code, _, err := c.Compile(nvrtc.Source{Name: "measure.cu", Text: copyRun}, nvrtc.Arch(m.m.Topology().GPUs[0].ComputeCapability))
	m.ok(err)
	mod, err := m.m.LoadModule(device.HBM(0), "measure", code)
	m.ok(err)
	t.Cleanup(func() { m.ok(mod.Unload()) })
	m.copyRun, m.poke, m.peek = m.function(mod, "copy_run"), m.function(mod, "poke"), m.function(mod, "peek")
	return m
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// medians of the columns of samples, in microseconds.
func medians(samples [][]time.Duration) []string {
	var all []string
	for i := range samples[0] {
		var column []time.Duration
		for _, row := range samples {
			column = append(column, row[i])
		}
		slices.Sort(column)
		all = append(all, fmt.Sprintf("%.1f", microseconds(column[len(column)/2])))
	}
	return all
}

// repeat measures with idle time in between, so that all threads sleep.
func repeat(n int, f func() []time.Duration) []string {
	f()
	var samples [][]time.Duration
	for range n {
		time.Sleep(time.Millisecond)
		samples = append(samples, f())
	}
	return medians(samples)
}

type table struct {
	w *tabwriter.Writer
}

func newTable(title string, columns ...string) *table {
	fmt.Println(title)
	t := &table{tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', tabwriter.Debug|tabwriter.AlignRight)}
	t.row(columns...)
	return t
}

func (t *table) row(cells ...string) { fmt.Fprintln(t.w, "| "+strings.Join(cells, "\t ")+"\t") }

// TestMeasureLatency prints what one copy of one run takes, as the host sees it, by ways to learn of
// its end.
func TestMeasureLatency(t *testing.T) {
	needMeasure(t)
	m := newMeasurer(t)
	repetitions, sizes := 25, []int64{4 << 10, 1 << 20, 8 << 20, 16 << 20, 34 << 20}
	if !onGPU {
		repetitions, sizes = 2, sizes[:1]
	}
	largest := sizes[len(sizes)-1]
	dst := m.alloc(device.HBM(0), largest)
	w, err := m.m.words.alloc(m.m.gpus[0])
	m.ok(err)
	var number uint32
	blocked := func(s *Stream) {
		if onGPU { // the stand-in has no such call
			m.ok(s.s.Synchronize())
		} else {
			m.ok(s.Synchronize(m.ctx))
		}
	}
	spin := func(over func() bool) {
		for !over() {
		}
	}
	for _, path := range []struct {
		name string
		from device.Space
		on   int
	}{{"host", device.Host, 0}, {"peer, pushed", device.HBM(1), 1}, {"peer, pulled", device.HBM(1), 0}} {
		src := m.alloc(path.from, largest)
		s := m.stream(path.on, "copies")
		g := s.g
		e, timed, timed2 := m.event2(), m.event(), m.event()
		host, err := m.m.NewStream(device.Host, device.StreamOptions{Name: "watches"})
		m.ok(err)
		watcher := host.(*hostStream)
		fence := m.fence("landed")
		var value uint32
		tab := newTable("us, from "+path.name+" (medians)", "KiB", "on device, by timed events", "plain: cuMemcpyAsync alone", "+cuStreamSynchronize", "+spin cuStreamQuery", "+record, spin cuEventQuery", "+write word, spin", "Go: Copy+Record+spin Query",
			"2 chunks", "kernel 16 blocks", "kernel 64", "kernel 132")
		for _, n := range sizes {
			to, from := dst.Range(0, n), src.Range(0, n)
			plain := func() { m.ok(cu.MemcpyAsync(cu.DevicePtr(to.Addr), cu.DevicePtr(from.Addr), n, s.s)) }
			inside := func(f func() []time.Duration) func() []time.Duration {
				return func() []time.Duration {
					m.ok(g.enter())
					defer g.leave()
					return f()
				}
			}
			one := func(f func()) func() []time.Duration {
				return inside(func() []time.Duration {
					began := time.Now()
					f()
					return []time.Duration{time.Since(began)}
				})
			}
			var cells []string
			add := func(f func() []time.Duration) { cells = append(cells, repeat(repetitions, f)...) }
			add(func() []time.Duration {
				m.ok(s.Record(timed))
				m.ok(s.Copy(to, from))
				m.ok(s.Record(timed2))
				m.ok(s.Synchronize(m.ctx))
				a, err := timed.Time()
				m.ok(err)
				b, err := timed2.Time()
				m.ok(err)
				return []time.Duration{b - a}
			})
			add(inside(func() []time.Duration {
				began := time.Now()
				plain()
				took := time.Since(began)
				blocked(s)
				return []time.Duration{took}
			}))
			add(one(func() {
				plain()
				blocked(s)
			}))
			add(one(func() {
				plain()
				spin(func() bool { over, err := s.idle(); m.ok(err); return over })
			}))
			add(one(func() {
				plain()
				m.ok(s.Record(e))
				spin(func() bool { over, err := e.Query(); m.ok(err); return over })
			}))
			add(one(func() {
				plain()
				number++
				m.ok(s.s.WriteValue32(cu.DevicePtr(w.addr), number, 0))
				spin(func() bool { return w.value.Load() == number })
			}))
			add(func() []time.Duration {
				began := time.Now()
				m.ok(s.Copy(to, from))
				m.ok(s.Record(e))
				spin(func() bool { over, err := e.Query(); m.ok(err); return over })
				return []time.Duration{time.Since(began)}
			})
			add(one(func() {
				half := n / 2
				m.ok(cu.MemcpyAsync(cu.DevicePtr(to.Addr), cu.DevicePtr(from.Addr), half, s.s))
				m.ok(cu.MemcpyAsync(cu.DevicePtr(to.Addr)+cu.DevicePtr(half), cu.DevicePtr(from.Addr)+cu.DevicePtr(half), half, s.s))
				blocked(s)
			}))
			for _, blocks := range []int{16, 64, 132} {
				if m.copyRun == nil || path.on != 0 {
					cells = append(cells, "")
					continue
				}
				add(one(func() {
					s.Args().Addr(to.Addr).Addr(from.Addr).U32(uint32(n / 16))
					m.ok(s.Launch(m.copyRun, Grid{Blocks: [3]int{blocks}, Threads: [3]int{512}}))
					m.ok(s.Record(e))
					spin(func() bool { over, err := e.Query(); m.ok(err); return over })
				}))
			}
			tab.row(append([]string{fmt.Sprint(n >> 10)}, cells...)...)
		}
		m.ok(tab.w.Flush())
		tab = newTable("us since the start, from "+path.name+": Copy, Record, WatchEvent, work runs, waiter goes on; thread asleep before; without and with help",
			"KiB", "copy", "record", "watch", "work", "woken", "copy", "record", "watch", "work", "woken")
		for _, n := range sizes {
			to, from := dst.Range(0, n), src.Range(0, n)
			cells := []string{fmt.Sprint(n >> 10)}
			for _, helps := range []bool{false, true} {
				cells = append(cells, repeat(repetitions, func() []time.Duration {
					value++
					var at [5]time.Time
					began := time.Now()
					m.ok(s.Copy(to, from))
					at[0] = time.Now()
					m.ok(s.Record(e))
					at[1] = time.Now()
					passed, err := watcher.WatchEvent(e, device.Work{Run: func(device.Access) error { at[3] = time.Now(); return fence.Signal(value) }})
					m.ok(err)
					at[2] = time.Now()
					switch {
					case passed:
						at[3] = at[2]
						m.ok(fence.Signal(value))
					case helps:
						m.ok(watcher.Await(m.ctx, device.Point{Fence: fence, Value: value}))
					default:
						m.ok(fence.Wait(m.ctx, value))
					}
					at[4] = time.Now()
					var all []time.Duration
					for _, x := range at {
						all = append(all, x.Sub(began))
					}
					return all
				})...)
			}
			tab.row(cells...)
		}
		m.ok(tab.w.Flush())
		m.ok(host.Close())
		m.ok(s.Close())
	}
	m.engines(dst, largest, sizes, repetitions)
}

// engines prints what one load by the transfer engine takes.
func (m *measurer) engines(dst device.Memory, largest int64, sizes []int64, repetitions int) {
	tab := newTable("us, transfer engine: Submit returns, Wait returns; alone, and of timed chunks: queue, launch, copy, notice, wake", "from", "KiB", "submit", "wait", "wait, Fence.Wait", "64 MiB chunks", "queue", "launch", "copy", "notice", "wake")
	open := func(o transfer.Options) *transfer.Engine {
		o.Machine = m.m
		e, err := transfer.New(o)
		m.ok(err)
		return e
	}
	engines := []*transfer.Engine{open(transfer.Options{}), open(transfer.Options{ChunkBytes: 64 << 20}), open(transfer.Options{Timed: true})}
	landed := m.fence("landed")
	var value uint32
	for _, from := range []device.Space{device.Host, device.HBM(1)} {
		src := m.alloc(from, largest)
		for _, n := range sizes {
			load := func(e *transfer.Engine, help bool) (times []time.Duration) {
				value++
				began, start := time.Now(), m.m.Now()
				t, err := e.Submit(transfer.Request{Dst: dst.Region(0, n), Src: src.Region(0, n), Priority: transfer.KVLoad, Done: device.Point{Fence: landed, Value: value}})
				m.ok(err)
				times = append(times, time.Since(began))
				if help {
					m.ok(t.Wait(m.ctx))
				} else {
					m.ok(t.End().Wait(m.ctx))
				}
				times = append(times, time.Since(began))
				woken := m.m.Now()
				if e.Timed() {
					x, err := t.Times()
					m.ok(err)
					times = []time.Duration{x.Enqueued - start, x.Started - x.Enqueued, x.Landed - x.Started, x.Done - x.Landed, woken - x.Done}
				}
				t.Release()
				return times
			}
			cells := []string{from.String(), fmt.Sprint(n >> 10)}
			cells = append(cells, repeat(repetitions, func() []time.Duration { return load(engines[0], true) })...)
			cells = append(cells, repeat(repetitions, func() []time.Duration { return load(engines[0], false)[1:] })...)
			cells = append(cells, repeat(repetitions, func() []time.Duration { return load(engines[1], true)[1:] })...)
			cells = append(cells, repeat(repetitions, func() []time.Duration { return load(engines[2], true) })...)
			tab.row(cells...)
		}
	}
	m.ok(tab.w.Flush())
	for _, e := range engines {
		m.ok(e.Close())
	}
}

// event2 is an untimed event.
func (r *rig) event2() device.Event {
	e, err := r.m.NewUntimedEvent()
	r.ok(err)
	return e
}

// TestMeasureContention prints what small copies and launches of a decode step take beside large copies.
func TestMeasureContention(t *testing.T) {
	needMeasure(t)
	m := newMeasurer(t)
	const small, run = 4 << 10, 64
	chunk, large, repetitions := int64(8<<20), int64(256<<20), 100
	if !onGPU {
		chunk, large, repetitions = 64<<10, 64<<10, 3
	}
	piece := chunk / 16
	s := m.stream(0, "compute")
	pinned, mem, hbm := m.alloc(device.Host, 2*small), m.alloc(device.HBM(0), small), m.alloc(device.HBM(0), large)
	fill := m.function(m.load(0), "fill")
	begins, ends := m.event(), m.event()
	tab := newTable("us, beside runs of 64 copies of 8 MiB or batches of 16 × 512 KiB, two in flight: host-seen, medians / 90 %", "beside", "GB/s", "copy of 4 KiB to the host", "from the host", "kernel writes to the host", "reads from the host",
		"100 kernels", "kernel fills 256 MiB, on device", "kernel, then 2 copies to the host")
	for _, beside := range []struct {
		name     string
		from, to device.Space
		on       int
		batch    bool
	}{
		{name: "nothing"}, {"stores to the host", device.HBM(0), device.Host, 0, false}, {"the same in batches", device.HBM(0), device.Host, 0, true},
		{"loads from the host", device.Host, device.HBM(0), 0, false}, {"stores to the peer", device.HBM(0), device.HBM(1), 0, false},
		{"the same in batches", device.HBM(0), device.HBM(1), 0, true},
		{"loads from the peer", device.HBM(1), device.HBM(0), 1, false},
	} {
		row := func() {
			stop, copied := make(chan struct{}), make(chan int64, 1)
			end := sync.OnceFunc(func() { close(stop) })
			defer end()
			if beside.from != beside.to {
				src, dst := m.alloc(beside.from, 2*chunk), m.alloc(beside.to, 2*chunk)
				o := m.stream(beside.on, "beside")
				evs := []device.Event{m.event2(), m.event2()}
				go func() {
					n := int64(0)
					defer func() { copied <- n * chunk; _ = o.Close() }()
					var dsts, srcs []device.Range
					for i := range int64(16) {
						dsts, srcs = append(dsts, dst.Range(((i*7)%16)*2*piece, piece)), append(srcs, src.Range(((i*5)%16)*2*piece, piece))
					}
					for ; ; n++ {
						select {
						case <-stop:
							return
						default:
						}
						i := n % 2
						if n > 1 {
							_ = evs[i].Synchronize(context.Background())
						}
						if n > 1 && n%run == 0 { // a small copy may wait for as long as large ones are queued
							_ = evs[1-i].Synchronize(context.Background())
						}
						if beside.batch {
							_ = o.CopyBatch(dsts, srcs)
						} else {
							_ = o.Copy(dst.Range(i*chunk, chunk), src.Range(i*chunk, chunk))
						}
						_ = o.Record(evs[i])
					}
				}()
			} else {
				copied <- 0
			}
			time.Sleep(5 * time.Millisecond)
			cells := []string{beside.name, ""}
			began := time.Now()
			add := func(onDevice bool, f func()) {
				var all []time.Duration
				for range repetitions {
					began := time.Now()
					if onDevice {
						m.ok(s.Record(begins))
					}
					f()
					if onDevice {
						m.ok(s.Record(ends))
					}
					m.ok(s.Synchronize(m.ctx))
					took := time.Since(began)
					if onDevice {
						a, err := begins.Time()
						m.ok(err)
						b, err := ends.Time()
						m.ok(err)
						took = b - a
					}
					all = append(all, took)
				}
				slices.Sort(all)
				cells = append(cells, fmt.Sprintf("%.1f / %.1f", microseconds(all[len(all)/2]), microseconds(all[len(all)*9/10])))
			}
			launch := func(f *Function, to device.Addr, n uint32, blocks int) {
				s.Args().Addr(to).U32(1).U32(n)
				m.ok(s.Launch(f, Grid{Blocks: [3]int{blocks}, Threads: [3]int{512}}))
			}
			add(false, func() { m.ok(s.Copy(pinned.Range(0, small), all(mem))) })
			add(false, func() { m.ok(s.Copy(all(mem), pinned.Range(0, small))) })
			add(false, func() { launch(fill, pinned.Range(0, small).Addr, small/4, 1) })
			if m.peek != nil {
				add(false, func() {
					s.Args().Addr(mem.Range(0, small).Addr).Addr(pinned.Range(small, small).Addr)
					m.ok(s.Launch(m.peek, Grid{Threads: [3]int{512}}))
				})
			} else {
				cells = append(cells, "")
			}
			add(false, func() {
				for range 100 {
					launch(fill, mem.Range(0, small).Addr, small/4, 1)
				}
			})
			add(true, func() { launch(fill, hbm.Range(0, large).Addr, uint32(large/4), 264) })
			add(false, func() {
				launch(fill, mem.Range(0, small).Addr, small/4, 1)
				m.ok(s.Copy(pinned.Range(0, small), all(mem)))
				m.ok(s.Copy(pinned.Range(small, small), all(mem)))
			})
			took := time.Since(began)
			end()
			cells[1] = fmt.Sprintf("%.0f", float64(<-copied)/took.Seconds()/1e9)
			tab.row(cells...)
			m.ok(tab.w.Flush()) // what was measured is seen, should the next row take too long
		}
		row()
	}
}
