package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// The benchmarks below hold GEMMs against what the machine itself gives at the
// same moment: each round measures the ceiling and the product, one after the
// other, and reports how they compare (see measure). On a machine with other work,
// take many rounds:
//
//	go test -run '^$' -bench 'Decode|Prefill' -benchtime 64x ./kernels/cpu

// BenchmarkDecode reports at which rate GEMMs of few rows read bfloat16
// weights, of 1 GiB in all so that no cache holds them, against loads of the same
// memory by as many threads.
func BenchmarkDecode(b *testing.B) {
	const hidden = 4096
	for _, isa := range cpu.ISAs() {
		for _, c := range []struct{ rows, out int }{{1, 4096}, {1, 448}, {4, 4096}, {8, 4096}} {
			b.Run(fmt.Sprintf("isa=%s/rows=%d/out=%d", isa, c.rows, c.out), func(b *testing.B) {
				r := openRoof(b, isa, c.rows, hidden, c.out, 1<<30)
				const rounds = 8 // through all weights
				each := len(r.weights) / rounds
				r.measure(b, "GB/s", func(round int) float64 {
					const n = 1 << 30 / rounds
					r.ceilings.Read(r.weights[0].Addr+device.Addr(round%rounds*n), n)
					return n
				}, func(round int) float64 {
					for _, w := range r.weights[round%rounds*each:][:each] {
						r.multiply(b, w)
					}
					r.wait(b)
					return float64(each) * float64(r.weights[0].Bytes())
				})
			})
		}
	}
}

// BenchmarkPrefill reports what a product of many rows computes, against fused
// multiply-adds in registers by as many threads.
func BenchmarkPrefill(b *testing.B) {
	for _, isa := range cpu.ISAs() {
		for _, c := range []struct{ rows, hidden, out int }{{512, 4096, 4096}, {512, 4096, 448}, {64, 4096, 4096}, {16, 4096, 4096}} {
			b.Run(fmt.Sprintf("isa=%s/rows=%d/hidden=%d/out=%d", isa, c.rows, c.hidden, c.out), func(b *testing.B) {
				r := openRoof(b, isa, c.rows, c.hidden, c.out, 1<<27)
				times := max(512/c.rows, 1)
				r.measure(b, "GFLOP/s", func(int) float64 { return r.ceilings.MultiplyAdds() }, func(round int) float64 {
					for i := range times {
						r.multiply(b, r.weights[(round*times+i)%len(r.weights)])
					}
					r.wait(b)
					return 2 * float64(times*c.rows*c.hidden*c.out)
				})
			})
		}
	}
}

// roof has a row of weight matrices and what multiplies with them.
type roof struct {
	backend  *cpu.Backend
	ceilings *cpu.Ceilings
	stream   device.Stream
	x, y     kernels.Tensor
	weights  []kernels.Tensor
}

func openRoof(b *testing.B, isa cpu.ISA, rows, hidden, out, bytes int) *roof {
	m, s, backend := openBenchISA(b, 0, isa)
	r := &roof{backend: backend, ceilings: cpu.NewCeilings(backend), stream: s}
	if r.ceilings == nil {
		b.Skip("no instruction set that ceilings are measured with")
	}
	const spare = 32 << 20 // for x and y
	mem, err := m.Alloc(device.Host, int64(bytes)+2*spare, "tensors")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = mem.Free() })
	rand := rand.New(rand.NewPCG(1, 2))
	random := make([]byte, 1<<20)
	values := make([]float32, len(random)/2)
	for i := range values {
		values[i] = rand.Float32() - 0.5
	}
	kernels.FromFloat32(random, values, kernels.BF16)
	data := mem.Write(0, int64(bytes)+2*spare)
	for len(data) > 0 {
		data = data[copy(data, random):]
	}
	at := func(off int) device.Addr { return mem.Range(int64(off), 0).Addr }
	// Read as float32, pairs of these are as good as any numbers.
	r.x = kernels.New(at(bytes), kernels.F32, rows, hidden)
	r.y = kernels.New(at(bytes+spare), kernels.F32, rows, out)
	w := kernels.New(0, kernels.BF16, out, hidden)
	for off := 0; off+int(w.Bytes()) <= bytes; off += int(w.Bytes()) {
		w.Addr = at(off)
		r.weights = append(r.weights, w)
	}
	return r
}

func (r *roof) multiply(b *testing.B, w kernels.Tensor) {
	if err := r.backend.Enqueue(r.stream, &kernels.MatMul{X: r.x, W: w, Out: r.y}); err != nil {
		b.Fatal(err)
	}
}

func (r *roof) wait(b *testing.B) {
	if err := r.stream.Synchronize(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// measure reports the rates of ceiling and work, which return how much they did:
// the median of each and of their ratios, and the ratio of the best of each, from
// which a machine's other work is missing if it ever paused.
func (r *roof) measure(b *testing.B, unit string, ceiling, work func(round int) float64) {
	var most, got, ratios []float64
	round := 0
	rate := func(f func(int) float64) float64 {
		start := time.Now()
		n := f(round)
		return n / time.Since(start).Seconds() / 1e9
	}
	ceiling(round) // once, so that memory and clocks are warm
	for ; b.Loop(); round++ {
		c, w := rate(ceiling), rate(work)
		most, got, ratios = append(most, c), append(got, w), append(ratios, 100*w/c)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(most), "ceiling-"+unit)
	b.ReportMetric(median(got), unit)
	b.ReportMetric(median(ratios), "%-median")
	b.ReportMetric(100*slices.Max(got)/slices.Max(most), "%-of-best")
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}
