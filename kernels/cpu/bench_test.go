package cpu_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// BenchmarkMatMul reports what GEMMs of common sizes reach, all threads
// together.
func BenchmarkMatMul(b *testing.B) {
	for _, w := range []kernels.DType{kernels.BF16, kernels.F32} {
		for _, c := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {16, 1}, {128, 1}, {1, 2}, {128, 2}} {
			rows, threads := c[0], c[1]
			b.Run(fmt.Sprintf("weights=%s/rows=%d/threads=%d", w, rows, threads), func(b *testing.B) {
				const columns, out = 2048, 1536
				m, s, backend := openBench(b, threads)
				mem, err := m.Alloc(device.HBM(0), 64<<20, "tensors")
				if err != nil {
					b.Fatal(err)
				}
				defer func() { _ = mem.Free() }()
				x := kernels.New(mem.Range(0, 0).Addr, kernels.F32, rows, columns)
				y := kernels.New(mem.Range(8<<20, 0).Addr, kernels.F32, rows, out)
				op := kernels.MatMul{X: x, W: kernels.New(mem.Range(16<<20, 0).Addr, w, out, columns), Out: y}
				for b.Loop() {
					if err := backend.Enqueue(s, &op); err != nil {
						b.Fatal(err)
					}
					if err := s.Synchronize(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(2*float64(rows*columns*out)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			})
		}
	}
}

// BenchmarkAttention reports one layer's attention with the heads of Mixtral-8x7B:
// a token of one sequence, and a prompt.
func BenchmarkAttention(b *testing.B) {
	const heads, kvHeads, d, tokens = 32, 8, 128, 16
	for i, c := range [][2]int{{1, 1024}, {256, 256}, {1, 1024}, {256, 256}} {
		rows, context := c[0], c[1]
		dtype := []kernels.DType{kernels.F32, kernels.BF16}[i/2]
		b.Run(fmt.Sprintf("type=%v/rows=%d/context=%d", dtype, rows, context), func(b *testing.B) {
			m, s, backend := openBench(b, 1)
			mem, err := m.Alloc(device.HBM(0), 64<<20, "tensors")
			if err != nil {
				b.Fatal(err)
			}
			table, err := m.Alloc(device.Host, 4096, "table")
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _, _ = mem.Free(), table.Free() }()
			blocks := context / tokens
			t := table.Write(0, 4096)
			clear(t)
			binary.LittleEndian.PutUint32(t[4:], uint32(rows))
			binary.LittleEndian.PutUint32(t[8:], uint32(context))
			for i := range blocks {
				binary.LittleEndian.PutUint32(t[12+4*i:], uint32(i))
			}
			at := func(i int64) device.Addr { return table.Range(4*i, 0).Addr }
			cache := func(off int64) kernels.Tensor {
				return kernels.New(mem.Range(off, 0).Addr, dtype, blocks, tokens, kvHeads, d)
			}
			op := kernels.Attention{
				Q:      kernels.New(mem.Range(0, 0).Addr, dtype, rows, heads, d),
				CacheK: cache(16 << 20), CacheV: cache(24 << 20),
				SeqStarts: kernels.New(at(0), kernels.I32, 2), ContextLens: kernels.New(at(2), kernels.I32, 1),
				BlockTable: kernels.New(at(3), kernels.I32, 1, blocks), Scale: 0.1, MaxContext: context, MaxSeqTokens: rows,
				Out: kernels.New(mem.Range(32<<20, 0).Addr, dtype, rows, heads, d),
			}
			for b.Loop() {
				if err := backend.Enqueue(s, &op); err != nil {
					b.Fatal(err)
				}
				if err := s.Synchronize(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			var decl kernels.Decl
			op.Declare(&decl)
			b.ReportMetric(float64(decl.Flops)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			b.ReportMetric(float64(decl.Bytes)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
		})
	}
}

// BenchmarkDecodeAttention reports one layer's attention of a micro-batch of 324 sequences with 80 tokens each and
// the heads of Mixtral-8x7B. Blocks lie in random places of 500 MB, so that they are not in a cache.
func BenchmarkDecodeAttention(b *testing.B) {
	const heads, kvHeads, d, tokens, sequences, context = 32, 8, 128, 16, 324, 80
	const each = context / tokens
	const blocks = 4 * sequences * each
	m, s, backend := openBench(b, 1)
	cache := int64(blocks * tokens * kvHeads * d * 2)
	const rowBytes = sequences * heads * d * 2
	mem, err := m.Alloc(device.Host, 2*cache+2*rowBytes, "tensors")
	if err != nil {
		b.Fatal(err)
	}
	all := mem.Write(0, 2*cache+2*rowBytes)
	for i := range all { // so that pages are not all the same one
		all[i] = byte(i % 63)
	}
	const tableBytes = 4 * (2*sequences + 1 + sequences*each)
	table, err := m.Alloc(device.Host, tableBytes, "table")
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _, _ = mem.Free(), table.Free() }()
	write := table.Write(0, tableBytes)
	for i := range sequences {
		binary.LittleEndian.PutUint32(write[4*i+4:], uint32(i+1))
		binary.LittleEndian.PutUint32(write[4*(sequences+1+i):], context)
	}
	for i, block := range rand.New(rand.NewPCG(1, 2)).Perm(blocks)[:sequences*each] {
		binary.LittleEndian.PutUint32(write[4*(2*sequences+1+i):], uint32(block))
	}
	clear(write[:4])
	at := func(i int64) device.Addr { return table.Range(4*i, 0).Addr }
	op := kernels.Attention{
		Q:      kernels.New(mem.Range(2*cache, 0).Addr, kernels.BF16, sequences, heads, d),
		CacheK: kernels.New(mem.Range(0, 0).Addr, kernels.BF16, blocks, tokens, kvHeads, d), CacheV: kernels.New(mem.Range(cache, 0).Addr, kernels.BF16, blocks, tokens, kvHeads, d),
		SeqStarts: kernels.New(at(0), kernels.I32, sequences+1), ContextLens: kernels.New(at(sequences+1), kernels.I32, sequences),
		BlockTable: kernels.New(at(2*sequences+1), kernels.I32, sequences, each), Scale: 0.1, MaxContext: context, MaxSeqTokens: 1,
		Out: kernels.New(mem.Range(2*cache+rowBytes, 0).Addr, kernels.BF16, sequences, heads, d),
	}
	run := func() {
		if err := backend.Enqueue(s, &op); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	run() // starts the threads
	for b.Loop() {
		run()
	}
	b.ReportMetric(float64(b.N)*sequences*context*2*kvHeads*d*2/b.Elapsed().Seconds()/1e9, "GB/s")
}

// BenchmarkSample reports drawing one token from the vocabulary of Qwen models.
func BenchmarkSample(b *testing.B) {
	m, s, backend := openBench(b, 1)
	mem, err := m.Alloc(device.Host, 1<<20, "tensors")
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = mem.Free() }()
	data := mem.Write(0, 1<<20)
	clear(data)
	kernels.FromFloat32(data[:4], []float32{1}, kernels.F32)
	at := func(off int64) device.Addr { return mem.Range(off, 0).Addr }
	op := kernels.Sample{
		Temperature: kernels.New(at(0), kernels.F32, 1), Seeds: kernels.New(at(8), kernels.U64, 1),
		Samples: kernels.New(at(16), kernels.I32, 1), Positions: kernels.New(at(20), kernels.I32, 1),
		Out: kernels.New(at(24), kernels.I32, 1), Logits: kernels.New(at(256), kernels.F32, 1, 151936),
	}
	for b.Loop() {
		if err := backend.Enqueue(s, &op); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func openBench(b *testing.B, threads int) (device.Machine, device.Stream, *cpu.Backend) {
	return openBenchISA(b, threads, "")
}

func openBenchISA(b *testing.B, threads int, isa cpu.ISA) (device.Machine, device.Stream, *cpu.Backend) {
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close() })
	backend := cpu.New(cpu.Options{Threads: threads, ISA: isa})
	b.Cleanup(func() { _ = backend.Close() })
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	if err != nil {
		b.Fatal(err)
	}
	return m, s, backend
}
