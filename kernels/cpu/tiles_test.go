package cpu_test

import (
	"fmt"
	"math/rand/v2"
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

func (c *expertCase) outputs() (up, down []byte) {
	c.run(&kernels.ExpertUp{ExpertGEMM: c.up}, &kernels.ExpertDown{ExpertGEMM: c.down})
	return c.h.readBytes(c.up.Out), c.h.readBytes(c.down.Out)
}

// TestTiles holds experts in the layout of tensor cores to the bits of row-major ones, for every
// instruction set, type of weights, and number of rows and threads.
func TestTiles(t *testing.T) {
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
						wantUp, wantDown := newExpertCase(h, shape, kernels.RowMajor, act, s.tokens).outputs()
						up, down := newExpertCase(h, shape, kernels.Tiles, act, s.tokens).outputs()
						if !slices.Equal(up, wantUp) || !slices.Equal(down, wantDown) {
							t.Errorf("activations of %v: tiles give other bits than row-major experts", act)
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
	for _, tag := range []string{kernels.RowMajor, kernels.Tiles} {
		for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
			exact, c := newExpertCase(h, shape, tag, kernels.F32, 5), newExpertCase(h, shape, tag, act, 5)
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
				t.Errorf("%s, %v: gate/up is not the float32 result, rounded", tag, act)
			}
			middle := make([]float32, c.up.Out.Elements())
			kernels.ToFloat32(middle, up, act)
			kernels.FromFloat32(h.memory[exact.up.Out.Addr].Write(0, exact.up.Out.Bytes()), middle, kernels.F32)
			exact.run(&kernels.ExpertDown{ExpertGEMM: exact.down})
			c.run(&kernels.ExpertDown{ExpertGEMM: c.down})
			if !slices.Equal(h.readBytes(c.down.Out), rounded(exact.down.Out)) {
				t.Errorf("%s, %v: down is not the float32 result, rounded", tag, act)
			}
		}
	}
}

// BenchmarkExperts reports at which rate experts in host memory, in the layout of the GPU, are
// read for one token or a few that are all routed to them, beside plain loads by as many threads.
// 1 GiB of experts are read in turn, so that no cache holds them.
//
//	go test -run '^$' -bench Experts -benchtime 100x ./kernels/cpu
func BenchmarkExperts(b *testing.B) {
	for _, m := range []struct {
		name                 string
		hidden, intermediate int
	}{{"mixtral-8x7b", 4096, 14336}, {"qwen1.5-moe-a2.7b", 2048, 1408}} {
		for _, tag := range []string{kernels.Tiles, kernels.RowMajor} {
			for _, threads := range []int{1, 8, 16} {
				for _, rows := range []int{1, 2, 4, 8} {
					if tag == kernels.RowMajor && rows > 1 && rows < 8 {
						continue
					}
					b.Run(fmt.Sprintf("model=%s/layout=%s/threads=%d/rows=%d", m.name, tag, threads, rows), func(b *testing.B) {
						benchExperts(b, kernels.ExpertShape{Hidden: m.hidden, Intermediate: m.intermediate, DType: kernels.BF16}, tag, threads, rows)
					})
				}
			}
		}
	}
}

func benchExperts(b *testing.B, s kernels.ExpertShape, tag string, threads, rows int) {
	const bytes = 1 << 30
	m, backend := openMachine(b, cpu.Options{Threads: threads, Spin: 50 * time.Microsecond}, emulated.Options{})
	h := newHost(b, m, backend)
	l, err := kernels.RowMajorLayout("cpu", s)
	if err != nil {
		b.Fatal(err)
	}
	l.Tag = tag
	experts := int(bytes / l.Size)
	// Any bits below an exponent of 1 are good weights.
	weights := h.bytesTensor(kernels.BF16, nil, experts*int(l.Size)/2)
	data := h.memory[weights.Addr].Write(0, weights.Bytes())
	for i := 0; i < len(data); i += 2 {
		data[i], data[i+1] = byte(i>>1*7), 0x3c+byte(i>>9&1)<<7
	}
	slots, order := make([]uint64, experts), make([]int32, rows)
	for e := range slots {
		slots[e] = uint64(weights.Addr) + uint64(e)*uint64(l.Size)
	}
	for r := range order {
		order[r] = int32(r)
	}
	op := kernels.ExpertGEMM{
		X: tensor[float32](h, kernels.BF16, nil, rows, s.Hidden), Order: h.ints(order...), Experts: h.ints(0), Layout: l,
		Slots: tensor(h, kernels.U64, slots[:1], 1), Offsets: h.ints(0, int32(rows)), Out: tensor[float32](h, kernels.BF16, nil, rows, s.Intermediate),
	}
	out := tensor[float32](h, kernels.BF16, nil, rows, s.Hidden)
	var tables []kernels.Tensor
	for e := range slots {
		tables = append(tables, tensor(h, kernels.U64, slots[e:e+1], 1))
	}
	reads := 0.0
	if c := cpu.NewCeilings(backend); c != nil {
		n := int(weights.Bytes()) / (512 * threads) * 512 * threads
		start := time.Now()
		c.Read(weights.Addr, n)
		reads = float64(n) / time.Since(start).Seconds() / 1e9
	}
	for i := 0; b.Loop(); i++ {
		up := kernels.ExpertUp{ExpertGEMM: op}
		up.Slots = tables[i%experts]
		down := kernels.ExpertDown(up)
		down.X, down.Out = up.Out, out
		for _, op := range []kernels.Op{&up, &down} {
			if err := backend.Enqueue(h.stream, op); err != nil {
				b.Fatal(err)
			}
		}
		if err := h.stream.Synchronize(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(l.Bytes())*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
	b.ReportMetric(reads, "read-GB/s")
}
