//go:build cuda

package cuda

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// The ceilings that shares are of, as measured on the device: reading memory, and a
// large product.
var (
	memoryCeiling  = flag.Float64("memory-tbs", 4.6, "measured read bandwidth in TB/s")
	invariant      = flag.Bool("batch-invariant", false, "measure batch-invariant GEMMs")
	productCeiling = flag.Float64("product-tflops", 800, "measured rate of a large 16-bit product in TFLOP/s")
)

// benchModel has the shapes of one layer.
type benchModel struct {
	name                                                       string
	hidden, heads, kvHeads, d, intermediate, experts, k, vocab int
	method                                                     kernels.RouteMethod
}

var benchModels = []benchModel{
	{"mixtral-8x7b", 4096, 32, 8, 128, 14336, 8, 2, 32000, kernels.SoftmaxRenorm},
	{"phi-3.5-moe", 4096, 32, 8, 128, 6400, 16, 2, 32064, kernels.SparseMixer},
	{"phi-tiny-moe", 4096, 16, 4, 128, 448, 16, 2, 32064, kernels.SparseMixer},
	{"qwen1.5-moe", 2048, 16, 16, 128, 1408, 60, 4, 151936, kernels.Softmax},
	{"qwen3-30b-a3b", 2048, 32, 4, 128, 768, 128, 8, 151936, kernels.SoftmaxRenorm},
}

// bench makes tensors and runs operations.
type bench struct {
	testing.TB
	m      device.Machine
	b      *Backend
	s      device.Stream
	random *rand.Rand
	mems   []device.Memory
	// exponent makes weights of up to 2^(7-exponent).
	exponent int
}

func (x *bench) alloc(n int64) device.Addr {
	m, err := x.m.Alloc(device.HBM(0), n, "benchmark")
	if err != nil {
		x.Fatal(err)
	}
	x.mems = append(x.mems, m)
	return m.Range(0, n).Addr
}

func (x *bench) free() {
	if err := x.s.Synchronize(x.Context()); err != nil {
		x.Fatal(err)
	}
	for _, m := range x.mems {
		if err := m.Free(); err != nil {
			x.Fatal(err)
		}
	}
	x.mems = nil
}

// upload fills n bytes at a with what fill writes for a piece.
func (x *bench) upload(a device.Addr, n int64, fill func(piece []byte)) {
	const most = 64 << 20
	host, err := x.m.Alloc(device.Host, min(n, most), "staging")
	if err != nil {
		x.Fatal(err)
	}
	fill(host.Write(0, host.Bytes()))
	for at := int64(0); at < n; at += host.Bytes() {
		piece := min(host.Bytes(), n-at)
		if err := x.s.Copy(device.Range{Addr: a + device.Addr(at), Bytes: piece}, host.Range(0, piece)); err != nil {
			x.Fatal(err)
		}
	}
	if err := x.s.Synchronize(x.Context()); err != nil {
		x.Fatal(err)
	}
	if err := host.Free(); err != nil {
		x.Fatal(err)
	}
}

// weights returns a dense tensor of random numbers.
func (x *bench) weights(t kernels.DType, shape ...int) kernels.Tensor {
	w := kernels.New(0, t, shape...)
	w.Addr = x.alloc(max(w.Bytes(), 256))
	x.upload(w.Addr, w.Bytes(), func(b []byte) {
		philox.FillDummy(b[:len(b)/t.Size()*t.Size()], t, x.random.Uint64(), "bench", 0, x.exponent)
	})
	return w
}

func (x *bench) act(shape ...int) kernels.Tensor { return x.weights(kernels.BF16, shape...) }

func (x *bench) ints(values ...int32) kernels.Tensor {
	t := kernels.New(0, kernels.I32, len(values))
	t.Addr = x.alloc(t.Bytes())
	x.upload(t.Addr, t.Bytes(), func(b []byte) {
		for i, v := range values {
			binary.LittleEndian.PutUint32(b[4*i:], uint32(v))
		}
	})
	return t
}

func (x *bench) words(values ...uint64) kernels.Tensor {
	t := kernels.New(0, kernels.U64, len(values))
	t.Addr = x.alloc(t.Bytes())
	x.upload(t.Addr, t.Bytes(), func(b []byte) {
		for i, v := range values {
			binary.LittleEndian.PutUint64(b[8*i:], v)
		}
	})
	return t
}

// measure reports the time of one operation; ops are taken in turn, so that each
// finds the cache as a layer among many does.
func (x *bench) measure(b *testing.B, ops ...kernels.Op) {
	b.Helper()
	for _, op := range ops {
		if err := x.b.Enqueue(x.s, op); err != nil {
			b.Fatal(err)
		}
	}
	seconds := x.time(b, func(i int) error { return x.b.Enqueue(x.s, ops[i%len(ops)]) })
	var d kernels.Decl
	ops[0].Declare(&d)
	memory, product := float64(d.Bytes)/seconds/1e12, float64(d.Flops)/seconds/1e12
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(seconds*1e6, "us")
	b.ReportMetric(float64(d.Bytes)/1e6, "MB")
	b.ReportMetric(float64(d.Flops)/1e9, "GFLOP")
	b.ReportMetric(100*memory / *memoryCeiling, "%memory")
	b.ReportMetric(100*product / *productCeiling, "%product")
	x.free()
	if float64(d.Flops) / *productCeiling > float64(d.Bytes) / *memoryCeiling {
		b.ReportMetric(100*product*1e12/x.largeProduct(b, seconds*float64(b.N)), "%large")
	}
}

// largeProduct returns the rate of dense GEMMs of 8192 x 8192 x 8192 in flop/s, for about
// as long as what they are compared with has run just before: a GPU that is hot is slower.
func (x *bench) largeProduct(b *testing.B, seconds float64) float64 {
	b.Helper()
	const size = 8192
	defer x.free()
	op := &kernels.MatMul{X: x.act(size, size), W: x.act(size, size), Out: x.act(size, size)}
	var d kernels.Decl
	op.Declare(&d)
	times := max(4, min(200, int(seconds/(float64(d.Flops)/(*productCeiling*1e12)))))
	var at [2]time.Duration
	for i := range at {
		for range times {
			if err := x.b.Enqueue(x.s, op); err != nil {
				b.Fatal(err)
			}
		}
		at[i] = x.now(b)
	}
	return float64(d.Flops) * float64(times) / (at[1] - at[0]).Seconds()
}

// now is when all that is enqueued has ended, by the device's clock.
func (x *bench) now(b *testing.B) (at time.Duration) {
	b.Helper()
	e, err := x.m.NewEvent()
	if err == nil {
		err = x.s.Record(e)
	}
	if err == nil {
		err = e.Synchronize(b.Context())
	}
	if err == nil {
		at, err = e.Time()
	}
	if err == nil {
		err = e.Close()
	}
	if err != nil {
		b.Fatal(err)
	}
	return at
}

// time returns the seconds that run's operations take on the device, a call.
func (x *bench) time(b *testing.B, run func(i int) error) float64 {
	b.Helper()
	if err := x.s.Synchronize(b.Context()); err != nil {
		b.Fatal(err)
	}
	// b.Loop's own clock stops when the last is enqueued, which is not its end.
	begin := x.now(b)
	i := 0
	for b.Loop() {
		if err := run(i); err != nil {
			b.Fatal(err)
		}
		i++
		if i%256 == 0 { // a stream's queue is finite
			if err := x.s.Synchronize(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
	return (x.now(b) - begin).Seconds() / float64(b.N)
}

// BenchmarkKernels reports time, bytes and floating-point operations of every kernel
// of one layer, and their shares of the ceilings, where operations bind also of a large
// product measured right behind (%large): one row, a batch of decoding, and a step of
// the paper's size. Times below 4 us are those of launching.
func BenchmarkKernels(b *testing.B) {
	m, backend, s := openGPU(b, Options{BatchInvariant: *invariant})
	for _, c := range benchModels {
		for _, n := range []int{1, 324, 4536} {
			x := &bench{TB: b, m: m, b: backend, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 6}
			x.layer(b, &c, n)
		}
	}
}

func (x *bench) layer(b *testing.B, c *benchModel, n int) {
	run := func(name string, ops func() []kernels.Op) {
		b.Run(fmt.Sprintf("model=%s/rows=%d/%s", c.name, n, name), func(b *testing.B) {
			x.TB = b
			x.measure(b, ops()...)
		})
	}
	one := func(name string, op func() kernels.Op) {
		run(name, func() []kernels.Op { return []kernels.Op{op()} })
	}
	// product rotates over weights that the second-level cache does not hold.
	product := func(name string, rows, columns, inner int, out kernels.DType) {
		run("matmul-"+name, func() []kernels.Op {
			in, to := x.act(rows, inner), x.weights(out, rows, columns)
			var ops []kernels.Op
			for range max(1, min(16, 256<<20/(2*columns*inner))) {
				ops = append(ops, &kernels.MatMul{X: in, W: x.act(columns, inner), Out: to})
			}
			return ops
		})
	}
	product("qkv", n, (c.heads+2*c.kvHeads)*c.d, c.hidden, kernels.BF16)
	product("o", n, c.hidden, c.heads*c.d, kernels.BF16)
	product("router", n, c.experts, c.hidden, kernels.F32)
	product("lm_head", min(n, 324), c.vocab, c.hidden, kernels.F32)
	one("embed", func() kernels.Op {
		return &kernels.Embed{IDs: x.ints(x.upTo(n, c.vocab)...), Table: x.act(c.vocab, c.hidden), Out: x.act(n, c.hidden)}
	})
	one("norm", func() kernels.Op {
		return &kernels.Norm{X: x.act(n, c.hidden), Residual: x.act(n, c.hidden), Weight: x.act(c.hidden), Eps: 1e-5, Out: x.act(n, c.hidden)}
	})
	one("rope", func() kernels.Op {
		return &kernels.RoPE{Q: x.act(n, c.heads, c.d), K: x.act(n, c.kvHeads, c.d), Table: x.weights(kernels.F32, 1024, c.d), Rows: x.ints(x.upTo(n, 1024)...)}
	})
	x.attention(b, c, n, one)
	one("route", func() kernels.Op {
		return &kernels.Route{Logits: x.weights(kernels.F32, n, c.experts), Method: c.method, Jitter: 0.01, IDs: x.ints(x.upTo(n*c.k, 1)...).View(n, c.k), Weights: x.weights(kernels.F32, n, c.k)}
	})
	one("group", func() kernels.Op {
		ids, offsets, order := x.pairs(c, n)
		return &kernels.SortByExpert{IDs: ids, Offsets: offsets, Order: order}
	})
	one("expert_up", func() kernels.Op {
		_, offsets, order := x.pairs(c, n)
		layout, slots, experts := x.experts(c)
		return &kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{X: x.act(n, c.hidden), Offsets: offsets, Order: order, Slots: slots, Experts: experts, Layout: layout, Out: x.act(n*c.k, c.intermediate)}}
	})
	one("expert_down", func() kernels.Op {
		_, offsets, order := x.pairs(c, n)
		layout, slots, experts := x.experts(c)
		return &kernels.ExpertDown{ExpertGEMM: kernels.ExpertGEMM{X: x.act(n*c.k, c.intermediate), Offsets: offsets, Order: order, Slots: slots, Experts: experts, Layout: layout, Out: x.act(n*c.k, c.hidden)}}
	})
	one("combine", func() kernels.Op {
		return &kernels.Combine{X: x.act(n*c.k, c.hidden), Weights: x.weights(kernels.F32, n, c.k), Out: x.act(n, c.hidden)}
	})
	one("combine_norm", func() kernels.Op {
		o := &kernels.CombineNorm{
			X: x.act(n*c.k, c.hidden), Weights: x.weights(kernels.F32, n, c.k), Residual: x.act(n, c.hidden), Weight: x.act(c.hidden), Eps: 1e-5, Out: x.act(n, c.hidden),
		}
		if sharedWidths[c.name] > 0 {
			o.Shared, o.SharedGate = x.act(n, c.hidden), x.weights(kernels.F32, n, 1)
		}
		return o
	})
	one("silu_mul", func() kernels.Op {
		return &kernels.SiluMul{Gate: x.act(n, c.intermediate), Up: x.act(n, c.intermediate), Out: x.act(n, c.intermediate)}
	})
	x.logits(c, min(n, 324), one)
}

// logits measures what works on rows of logits: draws, with cuts as requests have them
// and with those of few or many tokens; lists of 200 tokens a row; the 20 likeliest.
func (x *bench) logits(c *benchModel, rows int, one func(string, func() kernels.Op)) {
	sample := func() *kernels.Sample {
		return &kernels.Sample{
			Logits: x.weights(kernels.F32, rows, c.vocab), Temperature: x.floats(rows, 1), Seeds: x.words(make([]uint64, rows)...),
			Samples: x.ints(make([]int32, rows)...), Positions: x.ints(x.upTo(rows, 1000)...), Out: x.ints(make([]int32, rows)...),
		}
	}
	topK := func(k int32) kernels.Tensor { return x.ints(slices.Repeat([]int32{k}, rows)...) }
	one("sample", func() kernels.Op { return sample() })
	one("sample-top_k=50", func() kernels.Op {
		o := sample()
		o.TopK = topK(50)
		return o
	})
	one("sample-top_p=0.95", func() kernels.Op {
		o := sample()
		o.TopP = x.floats(rows, 0.95)
		return o
	})
	one("sample-top_p=0.95-temperature=0.1", func() kernels.Op {
		o := sample()
		o.Temperature, o.TopP = x.floats(rows, 0.1), x.floats(rows, 0.95)
		return o
	})
	one("sample-all_cuts", func() kernels.Op {
		o := sample()
		o.TopK, o.TopP, o.MinP = topK(50), x.floats(rows, 0.9), x.floats(rows, 0.05)
		return o
	})
	one("log_probs", func() kernels.Op {
		return &kernels.LogProbs{
			Logits: x.weights(kernels.F32, rows, c.vocab), Tokens: x.ints(x.upTo(rows, c.vocab)...), Sampled: x.floats(rows, 0),
			TopIDs: x.ints(make([]int32, 20*rows)...).View(rows, 20), Top: x.floats(20*rows, 0).View(rows, 20), Ranks: x.ints(make([]int32, rows)...),
		}
	})
	adjust := func() *kernels.Adjust {
		const each = 200
		starts, ids := []int32{0}, []int32(nil)
		for range rows {
			first := x.random.IntN(c.vocab)
			for i := range each {
				ids = append(ids, int32((first+i*97)%c.vocab))
			}
			starts = append(starts, int32(len(ids)))
		}
		n := len(ids)
		return &kernels.Adjust{
			Logits: x.weights(kernels.F32, rows, c.vocab), Starts: x.ints(starts...), IDs: x.ints(ids...), Seen: x.ints(make([]int32, n)...), Bias: x.floats(n, 0),
			Repetition: x.floats(rows, 1), Presence: x.floats(rows, 0), Frequency: x.floats(rows, 0), Saved: x.floats(n, 0),
		}
	}
	one("adjust", func() kernels.Op { return adjust() })
	one("mask", func() kernels.Op {
		list, words := make([]int32, rows), (c.vocab+31)/32
		for i := range list {
			list[i] = int32(i)
		}
		return &kernels.Mask{Logits: x.weights(kernels.F32, rows, c.vocab), Rows: x.ints(list...), Allowed: x.ints(x.upTo(rows*words, 1<<30)...).View(rows, words)}
	})
	one("restore", func() kernels.Op {
		a := adjust()
		return &kernels.Restore{Logits: a.Logits, Starts: a.Starts, IDs: a.IDs, Saved: a.Saved}
	})
}

// floats returns n equal numbers.
func (x *bench) floats(n int, v float32) kernels.Tensor {
	t := kernels.New(0, kernels.F32, n)
	t.Addr = x.alloc(t.Bytes())
	x.upload(t.Addr, t.Bytes(), func(b []byte) {
		for ; len(b) >= 4; b = b[4:] {
			binary.LittleEndian.PutUint32(b, math.Float32bits(v))
		}
	})
	return t
}

func (x *bench) upTo(n, limit int) []int32 {
	v := make([]int32, n)
	for i := range v {
		v[i] = int32(x.random.IntN(limit))
	}
	return v
}

// pairs routes n tokens at random and sorts them.
func (x *bench) pairs(c *benchModel, n int) (ids, offsets, order kernels.Tensor) {
	var chosen []int32
	for range n {
		for _, e := range x.random.Perm(c.experts)[:c.k] {
			chosen = append(chosen, int32(e))
		}
	}
	starts, sorted := make([]int32, c.experts+1), []int32(nil)
	for e := range c.experts {
		for p, id := range chosen {
			if int(id) == e {
				sorted = append(sorted, int32(p))
			}
		}
		starts[e+1] = int32(len(sorted))
	}
	return x.ints(chosen...).View(n, c.k), x.ints(starts...), x.ints(sorted...)
}

// experts returns all experts of a layer.
func (x *bench) experts(c *benchModel) (kernels.ExpertLayout, kernels.Tensor, kernels.Tensor) {
	layout, err := x.b.ExpertLayout(kernels.ExpertShape{Hidden: c.hidden, Intermediate: c.intermediate, DType: kernels.BF16})
	if err != nil {
		x.Fatal(err)
	}
	extents := x.act(c.experts, int(layout.Size/2))
	slots, all := make([]uint64, c.experts), make([]int32, c.experts)
	for e := range slots {
		slots[e], all[e] = uint64(extents.Addr)+uint64(e)*uint64(layout.Size), int32(e)
	}
	return layout, x.words(slots...), x.ints(all...)
}

// attention measures n sequences that decode at 600 tokens, and n tokens of prompts
// of up to 512; what writes their keys and values; and the copy of a block of each.
func (x *bench) attention(b *testing.B, c *benchModel, n int, one func(string, func() kernels.Op)) {
	const tokens = 16
	op := func(sequences, rows, context int) *kernels.Attention {
		width := (context + tokens - 1) / tokens
		starts, lens, table := make([]int32, sequences+1), make([]int32, sequences), make([]int32, sequences*width)
		for i := range lens {
			starts[i+1] = starts[i] + int32(rows)
			lens[i] = int32(context)
		}
		for i := range table {
			table[i] = int32(i)
		}
		cache := x.act(2*len(table), tokens, c.kvHeads, c.d)
		return &kernels.Attention{
			Q: x.act(sequences*rows, c.heads, c.d), CacheK: cache.Slice(0, len(table)), CacheV: cache.Slice(len(table), 2*len(table)), SeqStarts: x.ints(starts...), ContextLens: x.ints(lens...),
			BlockTable: x.ints(table...).View(sequences, width), Scale: float32(1 / math.Sqrt(float64(c.d))), MaxContext: context, MaxSeqTokens: rows,
			Out: x.act(sequences*rows, c.heads, c.d),
		}
	}
	one("attention-decode", func() kernels.Op { return op(n, 1, 600) })
	if n > 1 {
		rows := min(n, 512)
		one("attention-prefill", func() kernels.Op { return op(n/rows, rows, rows) })
	}
	one("copy_blocks", func() kernels.Op {
		size := 2 * tokens * c.kvHeads * c.d
		from, to := x.act(n, size), x.act(n, size)
		var src, dst []uint64
		for i, j := range x.random.Perm(n) {
			src, dst = append(src, uint64(from.Slice(i, i+1).Addr)), append(dst, uint64(to.Slice(j, j+1).Addr))
		}
		return &kernels.CopyBlocks{Src: x.words(src...), Dst: x.words(dst...), BlockBytes: int64(2 * size)}
	})
	one("append_kv", func() kernels.Op {
		a := op(n, 1, tokens)
		k := x.act(n, c.kvHeads, c.d)
		return &kernels.AppendKV{K: k, V: k, CacheK: a.CacheK, CacheV: a.CacheV, Slots: x.ints(x.upTo(n, n*tokens)...)}
	})
	// Queries, keys and values lie side by side, as one product leaves them.
	ropeAppendKV := func() *kernels.RoPEAppendKV {
		a, all := op(n, 1, tokens), x.act(n, c.heads+2*c.kvHeads, c.d)
		slots := make([]int32, n)
		for i := range slots {
			slots[i] = int32(i*tokens + x.random.IntN(tokens))
		}
		return &kernels.RoPEAppendKV{
			Q: all.Narrow(1, 0, c.heads), K: all.Narrow(1, c.heads, c.heads+c.kvHeads), V: all.Narrow(1, c.heads+c.kvHeads, c.heads+2*c.kvHeads),
			Table: x.weights(kernels.F32, 1024, c.d), Rows: x.ints(x.upTo(n, 1024)...), CacheK: a.CacheK, CacheV: a.CacheV, Slots: x.ints(slots...),
		}
	}
	one("rope_append_kv", func() kernels.Op { return ropeAppendKV() })
	one("rope_append_kv-norm", func() kernels.Op {
		o := ropeAppendKV()
		o.QNorm, o.KNorm, o.Eps = x.act(c.d), x.act(c.d), 1e-6
		return o
	})
}
