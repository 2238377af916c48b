package cpu_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// attended is one run of AppendKV and Attention on a host stream.
type attended struct {
	heads, kvHeads, dim, window int
	// contexts of the sequences, each of which has so many rows now.
	contexts, rows []int
	threads        int
	isa            cpu.ISA
}

func (a attended) String() string {
	return fmt.Sprintf("%s, %d of %d heads of %d, window %d, %v rows at %v", a.isa, a.kvHeads, a.heads, a.dim, a.window, a.rows, a.contexts)
}

const blockTokens = 16

// run appends what the numbers say, as elements of type t, attends, and returns the
// result, widened.
func (a attended) run(tb testing.TB, t kernels.DType, numbers func(i int) float32) []float32 {
	tb.Helper()
	m, b := openMachine(tb, cpu.Options{Threads: a.threads, ISA: a.isa}, emulated.Options{Check: true})
	s, err := m.NewStream(device.Host, device.StreamOptions{Name: "attention"})
	check := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	check(err)
	next := 0
	place := func(t kernels.DType, fill func([]byte), shape ...int) (kernels.Tensor, device.Memory) {
		x := kernels.New(0, t, shape...)
		mem, err := m.Alloc(device.Host, x.Bytes(), "test")
		check(err)
		tb.Cleanup(func() { _ = mem.Free() })
		fill(mem.Write(0, x.Bytes()))
		x.Addr = mem.Range(0, 0).Addr
		return x, mem
	}
	floats := func(shape ...int) kernels.Tensor {
		x, _ := place(t, func(data []byte) {
			values := make([]float32, len(data)/t.Size())
			for i := range values {
				values[i] = numbers(next)
				next++
			}
			kernels.FromFloat32(data, values, t)
		}, shape...)
		return x
	}
	ints := func(shape []int, values ...int32) kernels.Tensor {
		x, _ := place(kernels.I32, func(data []byte) {
			for i, v := range values {
				binary.LittleEndian.PutUint32(data[4*i:], uint32(v))
			}
		}, shape...)
		return x
	}
	starts, lens, table, slots := []int32{0}, []int32{}, []int32{}, []int32{}
	widest, most, mostRows := 0, 0, 0
	for _, c := range a.contexts {
		widest, most = max(widest, (c+blockTokens-1)/blockTokens), max(most, c)
	}
	for i, c := range a.contexts {
		first := i * widest // blocks from the last to the first
		for k := range widest {
			table = append(table, int32(first+widest-1-k))
		}
		for p := c - a.rows[i]; p < c; p++ {
			slots = append(slots, table[first+p/blockTokens]*blockTokens+int32(p%blockTokens))
		}
		starts, lens = append(starts, starts[i]+int32(a.rows[i])), append(lens, int32(c))
		mostRows = max(mostRows, a.rows[i])
	}
	n := int(starts[len(starts)-1])
	// As the pipeline has them: q, k and v side by side.
	qkv := floats(n, (a.heads+2*a.kvHeads)*a.dim)
	cut := func(from, heads int) kernels.Tensor {
		return qkv.Narrow(1, from*a.dim, (from+heads)*a.dim).View(n, heads, a.dim)
	}
	cacheK := floats(len(a.contexts)*widest, blockTokens, a.kvHeads, a.dim)
	cacheV := floats(len(a.contexts)*widest, blockTokens, a.kvHeads, a.dim)
	out, mem := place(t, func(data []byte) { clear(data) }, n, a.heads, a.dim)
	check(b.Enqueue(s, &kernels.AppendKV{
		K: cut(a.heads, a.kvHeads), V: cut(a.heads+a.kvHeads, a.kvHeads), CacheK: cacheK, CacheV: cacheV, Slots: ints([]int{n}, slots...),
	}))
	check(b.Enqueue(s, &kernels.Attention{
		Q: cut(0, a.heads), CacheK: cacheK, CacheV: cacheV, Out: out, Window: a.window, Scale: 0.3,
		SeqStarts: ints([]int{len(starts)}, starts...), ContextLens: ints([]int{len(lens)}, lens...),
		BlockTable: ints([]int{len(a.contexts), widest}, table...), MaxContext: most, MaxSeqTokens: mostRows,
	}))
	check(s.Synchronize(tb.Context()))
	check(s.Close())
	result := make([]float32, out.Elements())
	kernels.ToFloat32(result, mem.Read(0, out.Bytes()), t)
	return result
}

// TestAttentionOf16Bits: over queries, keys and values of 16 bits, attention is that over
// the same numbers in float32, rounded once.
func TestAttentionOf16Bits(t *testing.T) {
	for _, isa := range cpu.ISAs() {
		for _, a := range []attended{
			{heads: 4, kvHeads: 4, dim: 8, contexts: []int{1}, rows: []int{1}},
			{heads: 8, kvHeads: 2, dim: 128, contexts: []int{97, 1, 200}, rows: []int{1, 1, 1}},
			{heads: 6, kvHeads: 2, dim: 20, contexts: []int{33, 130}, rows: []int{33, 2}},
			{heads: 8, kvHeads: 1, dim: 64, window: 7, contexts: []int{40, 5}, rows: []int{9, 5}},
			{heads: 4, kvHeads: 2, dim: 96, window: 100, contexts: []int{250}, rows: []int{1}, threads: 3},
		} {
			a.isa, a.threads = isa, max(1, a.threads)
			for _, dtype := range []kernels.DType{kernels.BF16, kernels.F16} {
				r := rand.New(rand.NewPCG(1, 2))
				var numbers []float32
				number := func(i int) float32 { // that 16 bits hold
					for len(numbers) <= i {
						var b [2]byte
						var f [1]float32
						kernels.FromFloat32(b[:], []float32{float32(r.NormFloat64())}, dtype)
						kernels.ToFloat32(f[:], b[:], dtype)
						numbers = append(numbers, f[0])
					}
					return numbers[i]
				}
				got, exact := a.run(t, dtype, number), a.run(t, kernels.F32, number)
				rounded := make([]byte, 2*len(exact))
				kernels.FromFloat32(rounded, exact, dtype)
				data := make([]byte, len(rounded))
				kernels.FromFloat32(data, got, dtype)
				if !bytes.Equal(data, rounded) {
					t.Errorf("%v, %v: %v, want %v rounded", dtype, a, got[:4], exact[:4])
				}
			}
		}
	}
}

// TestAttentionOfManySequences: whether a thread computes with all heads of some rows, or with one head, the
// results are the same bits.
func TestAttentionOfManySequences(t *testing.T) {
	for _, window := range []int{0, 20} {
		for _, dtype := range []kernels.DType{kernels.F32, kernels.BF16} {
			random := rand.New(rand.NewPCG(7, 8))
			a := attended{heads: 6, kvHeads: 3, dim: 32, window: window}
			for range 40 {
				rows := 1 + random.IntN(3)
				a.rows, a.contexts = append(a.rows, rows), append(a.contexts, rows+random.IntN(90))
			}
			numbers := func(i int) float32 { return float32(math.Sin(float64(i))) }
			a.threads = 2
			together := a.run(t, dtype, numbers)
			a.threads = 32
			if apart := a.run(t, dtype, numbers); !slices.Equal(together, apart) {
				t.Errorf("%v of %v: heads by heads the results are others", a, dtype)
			}
		}
	}
}
