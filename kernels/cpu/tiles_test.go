package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// expertCase is experts with rows, in one layout and type of activations.
type expertCase struct {
	h        *host
	layout   kernels.ExpertLayout
	act      kernels.DType
	up, down kernels.ExpertGEMM
	ffn      kernels.ExpertGEMM
}

// weightsOf returns the three matrices of an expert, row-major.
func weightsOf(r *rand.Rand, s kernels.ExpertShape) [3][]byte {
	var parts [3][]byte
	for p := range parts {
		values := make([]float32, s.Hidden*s.Intermediate)
		for i := range values {
			values[i] = r.Float32() - 0.5
		}
		parts[p] = make([]byte, len(values)*s.DType.Size())
		kernels.FromFloat32(parts[p], values, s.DType)
	}
	return parts
}

// bytesTensor returns a tensor with these bytes.
func (h *host) bytesTensor(t kernels.DType, data []byte, shape ...int) kernels.Tensor {
	x := tensor[float32](h, t, nil, shape...)
	copy(h.memory[x.Addr].Write(0, x.Bytes()), data)
	return x
}

func (h *host) readBytes(x kernels.Tensor) []byte {
	return slices.Clone(h.memory[x.Addr].Read(0, x.Bytes()))
}

// newExpertCase routes each token to two of the experts, the first of them most often.
func newExpertCase(h *host, s kernels.ExpertShape, tag string, act kernels.DType, tokens int) *expertCase {
	const experts, k = 3, 2
	r := rand.New(rand.NewPCG(1, 2))
	l, err := kernels.RowMajorLayout("cpu", s)
	if err != nil {
		h.Fatal(err)
	}
	l.Tag = tag
	c := &expertCase{h: h, layout: l, act: act}
	slots := make([]uint64, experts)
	for e := range experts {
		extent := make([]byte, l.Size)
		for p, data := range weightsOf(r, s) {
			if err := h.backend.PackExpert(l, kernels.Part(p), 0, data, extent); err != nil {
				h.Fatal(err)
			}
		}
		slots[e] = uint64(h.bytesTensor(s.DType, extent, int(l.Size)/s.DType.Size()).Addr)
	}
	var order, offsets []int32
	for e := range experts {
		offsets = append(offsets, int32(len(order)))
		for n := range tokens {
			first, second := 0, 1+n%2
			if e == first {
				order = append(order, int32(n*k))
			} else if e == second {
				order = append(order, int32(n*k+1))
			}
		}
	}
	offsets = append(offsets, int32(len(order)))
	x := make([]float32, tokens*s.Hidden)
	for i := range x {
		x[i] = kernels.FromBF16(kernels.ToBF16(float32(r.NormFloat64()))) // of any type without rounding
		if act == kernels.F16 || s.DType == kernels.F16 {
			x[i] = float32(int(x[i]*64)) / 64
		}
	}
	data := make([]byte, len(x)*act.Size())
	kernels.FromFloat32(data, x, act)
	zeros := func(rows, columns int) kernels.Tensor { return tensor[float32](h, act, nil, rows, columns) }
	c.up = kernels.ExpertGEMM{
		X: h.bytesTensor(act, data, tokens, s.Hidden), Offsets: h.ints(offsets...), Order: h.ints(order...), Experts: h.ints(2, 0, 1),
		Slots: tensor(h, kernels.U64, slots, experts), Layout: l, Out: zeros(tokens*k, s.Intermediate),
	}
	c.down = c.up
	c.down.X, c.down.Out = c.up.Out, zeros(tokens*k, s.Hidden)
	c.ffn = c.up
	c.ffn.Out = zeros(tokens*k, s.Hidden)
	return c
}

func (c *expertCase) run(ops ...kernels.Op) {
	c.h.Helper()
	for _, op := range ops {
		if err := c.h.backend.Enqueue(c.h.stream, op); err != nil {
			c.h.Fatal(err)
		}
	}
	if err := c.h.stream.Synchronize(c.h.Context()); err != nil {
		c.h.Fatal(err)
	}
}

// TestExpertFFN holds experts in one operation, row-major and in the layout of tensor cores, to the
// bits of the two operations, for every instruction set, type of weights, and number of rows and
// threads.
func TestExpertFFN(t *testing.T) {
	for _, isa := range isas() {
		for _, w := range []kernels.DType{kernels.BF16, kernels.F16} {
			for _, s := range []struct{ hidden, intermediate, tokens, threads int }{
				{64, 64, 1, 1}, {64, 128, 2, 3}, {1152, 64, 3, 2}, {192, 1088, 8, 8}, {320, 128, 21, 3}, {64, 64, 300, 2},
			} {
				t.Run(fmt.Sprintf("%s/%v/%+v", isa, w, s), func(t *testing.T) {
					shape := kernels.ExpertShape{Hidden: s.hidden, Intermediate: s.intermediate, DType: w}
					m, b := openMachine(t, cpu.Options{Threads: s.threads, ISA: isa, Spin: time.Duration(s.tokens%2) * 10 * time.Microsecond}, emulated.Options{Check: true})
					h := newHost(t, m, b)
					for _, act := range []kernels.DType{kernels.F32, kernels.BF16, kernels.F16} {
						two := newExpertCase(h, shape, kernels.RowMajor, act, s.tokens)
						two.run(&kernels.ExpertUp{ExpertGEMM: two.up}, &kernels.ExpertDown{ExpertGEMM: two.down})
						want := h.readBytes(two.down.Out)
						for _, tag := range []string{kernels.RowMajor, kernels.Tiles} {
							one := newExpertCase(h, shape, tag, act, s.tokens)
							for range 3 { // threads that have not slept since
								one.run(&kernels.ExpertFFN{ExpertGEMM: one.ffn})
								if got := h.readBytes(one.ffn.Out); !slices.Equal(got, want) {
									t.Errorf("%s, activations of %v: other bits than of two operations", tag, act)
								}
								clear(h.memory[one.ffn.Out.Addr].Write(0, one.ffn.Out.Bytes()))
							}
						}
					}
				})
			}
		}
	}
}

// TestHalfActivations holds experts with 16-bit activations to those with the same values in
// float32: the results are theirs, rounded once.
func TestHalfActivations(t *testing.T) {
	shape := kernels.ExpertShape{Hidden: 128, Intermediate: 192, DType: kernels.BF16}
	h := openHost(t, 2)
	for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
		exact, c := newExpertCase(h, shape, kernels.RowMajor, kernels.F32, 5), newExpertCase(h, shape, kernels.RowMajor, act, 5)
		// The same values, of both types.
		values := make([]float32, c.up.X.Elements())
		kernels.ToFloat32(values, h.readBytes(c.up.X), act)
		kernels.FromFloat32(h.memory[exact.up.X.Addr].Write(0, exact.up.X.Bytes()), values, kernels.F32)
		rounded := func(x kernels.Tensor) []byte {
			data := make([]byte, x.Elements()*act.Size())
			kernels.FromFloat32(data, h.read(x), act)
			return data
		}
		exact.run(&kernels.ExpertUp{ExpertGEMM: exact.up})
		c.run(&kernels.ExpertUp{ExpertGEMM: c.up})
		up := h.readBytes(c.up.Out)
		if !slices.Equal(up, rounded(exact.up.Out)) {
			t.Errorf("%v: gate/up is not the float32 result, rounded", act)
		}
		middle := make([]float32, c.up.Out.Elements())
		kernels.ToFloat32(middle, up, act)
		kernels.FromFloat32(h.memory[exact.up.Out.Addr].Write(0, exact.up.Out.Bytes()), middle, kernels.F32)
		exact.run(&kernels.ExpertDown{ExpertGEMM: exact.down})
		c.run(&kernels.ExpertDown{ExpertGEMM: c.down})
		if !slices.Equal(h.readBytes(c.down.Out), rounded(exact.down.Out)) {
			t.Errorf("%v: down is not the float32 result, rounded", act)
		}
	}
}

// BenchmarkExperts reports at which rate the experts of a layer that lie in host memory, in the
// layout of the GPU, are read for one token or a few that are all routed to them, beside plain loads
// by as many threads. 1 GiB of experts are read in turn, so that no cache holds them.
//
//	go test -run '^$' -bench Experts -benchtime 100x ./kernels/cpu
func BenchmarkExperts(b *testing.B) {
	for _, m := range []struct {
		name                 string
		hidden, intermediate int
		experts              []int
	}{{"mixtral-8x7b", 4096, 14336, []int{1}}, {"qwen1.5-moe-a2.7b", 2048, 1408, []int{1, 2, 13}}} {
		for _, threads := range slices.Compact([]int{1, max(1, runtime.GOMAXPROCS(0)*7/8), runtime.GOMAXPROCS(0)}) {
			for _, rows := range []int{1, 2, 4, 8} {
				for _, experts := range m.experts {
					b.Run(fmt.Sprintf("model=%s/threads=%d/rows=%d/experts=%d", m.name, threads, rows, experts), func(b *testing.B) {
						benchExperts(b, kernels.ExpertShape{Hidden: m.hidden, Intermediate: m.intermediate, DType: kernels.BF16}, threads, rows, experts)
					})
				}
			}
		}
	}
}

func benchExperts(b *testing.B, s kernels.ExpertShape, threads, rows, listed int) {
	const bytes = 1 << 30
	m, backend := openMachine(b, cpu.Options{Threads: threads, Spin: time.Millisecond}, emulated.Options{})
	h := newHost(b, m, backend)
	l, err := kernels.RowMajorLayout("cpu", s)
	if err != nil {
		b.Fatal(err)
	}
	l.Tag = kernels.Tiles
	groups := int(bytes / l.Size / int64(listed))
	// Any bits below an exponent of 1 are good weights.
	weights := h.bytesTensor(kernels.BF16, nil, groups*listed*int(l.Size)/2)
	data := h.memory[weights.Addr].Write(0, weights.Bytes())
	for i := 0; i < len(data); i += 2 {
		data[i], data[i+1] = byte(i>>1*7), 0x3c+byte(i>>9&1)<<7
	}
	var order, offsets, ids []int32
	for e := range listed {
		offsets, ids = append(offsets, int32(len(order))), append(ids, int32(e))
		for r := range rows {
			order = append(order, int32(r*listed+e))
		}
	}
	op := kernels.ExpertFFN{ExpertGEMM: kernels.ExpertGEMM{
		X: tensor[float32](h, kernels.BF16, nil, rows, s.Hidden), Order: h.ints(order...), Experts: h.ints(ids...), Layout: l,
		Offsets: h.ints(append(offsets, int32(len(order)))...), Out: tensor[float32](h, kernels.BF16, nil, rows*listed, s.Hidden),
	}}
	var tables []kernels.Tensor
	for g := range groups {
		var slots []uint64
		for e := range listed {
			slots = append(slots, uint64(weights.Addr)+uint64(g*listed+e)*uint64(l.Size))
		}
		tables = append(tables, tensor(h, kernels.U64, slots, listed))
	}
	reads := 0.0
	if c := cpu.NewCeilings(backend); c != nil {
		n := int(weights.Bytes()) / (512 * threads) * 512 * threads
		start := time.Now()
		c.Read(weights.Addr, n)
		reads = float64(n) / time.Since(start).Seconds() / 1e9
	}
	var took []float64
	for i := 0; b.Loop(); i++ {
		op.Slots = tables[i%groups]
		start := time.Now()
		if err := cpu.RunFFN(backend, &op); err != nil { // streams of emulated devices start late
			b.Fatal(err)
		}
		took = append(took, time.Since(start).Seconds())
	}
	read := float64(l.Bytes()) * float64(listed) / 1e9
	b.ReportMetric(read*float64(b.N)/b.Elapsed().Seconds(), "GB/s")
	b.ReportMetric(read/median(took), "median-GB/s")
	b.ReportMetric(read/slices.Min(took), "best-GB/s")
	b.ReportMetric(reads, "read-GB/s")
}
