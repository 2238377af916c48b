package emulated_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

func open(t testing.TB, o emulated.Options) *emulated.Machine {
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

func stream(t testing.TB, m device.Machine, space device.Space, name string) device.Executor {
	t.Helper()
	s, err := m.NewStream(space, device.StreamOptions{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return s.(device.Executor)
}

func alloc(t testing.TB, m device.Machine, space device.Space, bytes int64, label string) device.Memory {
	t.Helper()
	mem, err := m.Alloc(space, bytes, label)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mem.Free(); err != nil {
			t.Error(err)
		}
	})
	return mem
}

// BenchmarkExecute is one empty Work, enqueued and run.
func BenchmarkExecute(b *testing.B) {
	for name, o := range map[string]emulated.Options{
		"wall": {}, "virtual": {Virtual: true}, "wall,check": {Check: true}, "virtual,check": {Virtual: true, Check: true},
	} {
		b.Run("mode="+name, func(b *testing.B) {
			m := open(b, o)
			s := stream(b, m, device.HBM(0), "s")
			w := device.Work{Name: "empty", Run: func(device.Access) error { return nil }}
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if err := s.Execute(w); err != nil {
					b.Fatal(err)
				}
				if n++; n%1024 == 0 {
					if err := s.Synchronize(context.Background()); err != nil {
						b.Fatal(err)
					}
				}
			}
			if err := s.Synchronize(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkDeclare is Work that reads blocks out of order through a table, as
// attention does, and appends to one: the check's cost per step.
func BenchmarkDeclare(b *testing.B) {
	const blocks, block = 4096, 1 << 10
	m := open(b, emulated.Options{Virtual: true, Check: true})
	mem := alloc(b, m, device.HBM(0), blocks*block, "cache")
	s := stream(b, m, device.HBM(0), "s")
	ctx := context.Background()
	step := 0
	fill := device.Work{Name: "fill", Writes: []device.Range{mem.Range(0, blocks*block)}}
	if err := s.Execute(fill); err != nil {
		b.Fatal(err)
	}
	w := device.Work{Name: "attention", Run: func(a device.Access) error {
		for i := range int64(1024) {
			a.Read(mem.Range((i*37+int64(step))%blocks*block, block-16))
		}
		a.Write(mem.Range(int64(step)%blocks*block, 16))
		return nil
	}}
	b.ReportAllocs()
	for b.Loop() {
		step++
		if err := s.Execute(w); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHandover is an event from one stream to another and back.
func BenchmarkHandover(b *testing.B) {
	m := open(b, emulated.Options{})
	s, t := stream(b, m, device.HBM(0), "s"), stream(b, m, device.HBM(0), "t")
	e, err := m.NewEvent()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, p := range [][2]device.Stream{{s, t}, {t, s}} {
			if err := p[0].Record(e); err != nil {
				b.Fatal(err)
			}
			if err := p[1].Wait(e); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Synchronize(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCopy(b *testing.B) {
	ctx := context.Background()
	for _, pair := range [][2]device.Space{{device.Host, device.HBM(0)}, {device.HBM(1), device.HBM(0)}} {
		for _, kb := range []int64{64, 1 << 10, 16 << 10} {
			b.Run(fmt.Sprintf("path=%s-%s/kb=%d", pair[0], pair[1], kb), func(b *testing.B) {
				m := open(b, emulated.Options{})
				n := kb << 10
				src, dst := alloc(b, m, pair[0], n, "src"), alloc(b, m, pair[1], n, "dst")
				s := stream(b, m, pair[1], "s")
				b.SetBytes(n)
				for b.Loop() {
					if err := s.Copy(dst.Range(0, n), src.Range(0, n)); err != nil {
						b.Fatal(err)
					}
					if err := s.Synchronize(ctx); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
