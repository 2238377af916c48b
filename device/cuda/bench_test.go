//go:build cuda

package cuda

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
)

// Numbers mean something on GPUs only; on the stand-in these run for their own sake.

func BenchmarkLaunch(b *testing.B) {
	r := newRig(b, 1)
	s, fill := r.stream(0, "compute"), r.function(r.load(0), "fill")
	mem := r.alloc(device.HBM(0), 64)
	at := all(mem).Addr
	launch := func() {
		s.Args().Addr(at).U32(1).U32(16)
		r.ok(s.Launch(fill, Grid{Threads: [3]int{16}}))
	}
	b.Run("enqueue", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			launch()
			if i%512 == 511 {
				// The queue is finite.
				b.StopTimer()
				r.ok(s.Synchronize(r.ctx))
				b.StartTimer()
			}
		}
		r.ok(s.Synchronize(r.ctx))
	})
	b.Run("wait", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			launch()
			r.ok(s.Synchronize(r.ctx))
		}
	})
	b.Run("graph", func(b *testing.B) {
		const nodes = 100
		g, err := s.Capture(func() error {
			for range nodes {
				launch()
			}
			return nil
		})
		r.ok(err)
		defer g.Close()
		for b.Loop() {
			r.ok(s.LaunchGraph(g))
			r.ok(s.Synchronize(r.ctx))
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*nodes), "ns/kernel")
	})
}

// BenchmarkFence goes from the host to a stream and back.
func BenchmarkFence(b *testing.B) {
	r := newRig(b, 1)
	s, there, back := r.stream(0, "waits"), r.fence("there"), r.fence("back")
	v := uint32(0)
	for b.Loop() {
		v++
		r.ok(s.WaitFence(there, v))
		r.ok(s.SignalFence(back, v))
		r.ok(there.Signal(v))
		r.ok(back.Wait(r.ctx, v))
	}
	r.ok(s.Synchronize(r.ctx))
}

func BenchmarkEvent(b *testing.B) {
	r := newRig(b, 1)
	s, other, e := r.stream(0, "records"), r.stream(0, "waits"), r.event()
	b.ReportAllocs()
	for b.Loop() {
		r.ok(s.Record(e))
		r.ok(other.Wait(e))
		r.ok(e.Synchronize(r.ctx))
	}
	r.ok(other.Synchronize(r.ctx))
}

func BenchmarkCopy(b *testing.B) {
	r := newRig(b, 2)
	// One expert of Qwen1.5-MoE and of Mixtral, in 16 bits; small ones on the stand-in.
	sizes := []int64{64 << 10, 17301504, 352321536}
	if !onGPU {
		sizes = sizes[:1]
	}
	run := func(name string, on, from, to device.Space) {
		for _, n := range sizes {
			b.Run(fmt.Sprintf("%s/bytes=%d", name, n), func(b *testing.B) {
				r := &rig{b, r.m, r.ctx}
				src, dst := r.alloc(from, n), r.alloc(to, n)
				s, err := r.m.NewStream(on, device.StreamOptions{Name: name})
				r.ok(err)
				b.SetBytes(n)
				for b.Loop() {
					r.ok(s.Copy(all(dst), all(src)))
					r.ok(s.Synchronize(r.ctx))
				}
				r.ok(s.Close())
			})
		}
	}
	g := device.HBM(0)
	run("host to GPU", g, device.Host, g)
	run("GPU to host", g, g, device.Host)
	run("within GPU", g, g, g)
	if len(r.m.gpus) > 1 {
		p := device.HBM(1)
		run("peer to GPU on its own stream", p, p, g)
		run("peer to GPU on the target's stream", g, p, g)
	}
}

// BenchmarkPinned brings in host memory by many threads: pages of the usual size, large
// ones, which allocations are made of, and allocations, which are pinned, too. Pinning takes
// as long again as touching large pages, and goes one after another in the driver however
// it is cut. What a machine gives differs from run to run, so no rate is required.
func BenchmarkPinned(b *testing.B) {
	r := newRig(b, 1)
	bytes := int64(8 << 30)
	if !onGPU {
		bytes = 64 << 20
	}
	if u, err := r.m.Usage(device.Host); err != nil || u.Free() < 2*bytes {
		b.Skipf("needs %d bytes of free host memory: %+v, %v", 2*bytes, u, err)
	}
	threads := r.m.o.TouchThreads
	for _, way := range []struct {
		name string
		run  func() (give func() error)
	}{
		{"touched usual pages", func() func() error {
			m, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
			r.ok(err)
			_ = unix.Madvise(m, unix.MADV_NOHUGEPAGE) // a kernel without large pages refuses
			touch(m, threads)
			return func() error { return unix.Munmap(m) }
		}},
		{"touched large pages", func() func() error {
			m, err := mapHost(bytes, threads, room)
			r.ok(err)
			return func() error { return unix.Munmap(m) }
		}},
		{"allocated", func() func() error {
			mem, err := r.m.Alloc(device.Host, bytes, "large")
			r.ok(err)
			return mem.Free
		}},
	} {
		b.Run(fmt.Sprintf("%s/threads=%d", way.name, threads), func(b *testing.B) {
			b.SetBytes(bytes)
			for b.Loop() {
				give := way.run()
				b.StopTimer()
				r.ok(give())
				b.StartTimer()
			}
		})
	}
}
