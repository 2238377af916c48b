//go:build cuda

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// promptCase is attention of one layer: sequences with tokens in the step, the last of context.
type promptCase struct {
	Model     string `json:"model"`
	Heads     int    `json:"heads"`
	KVHeads   int    `json:"kv_heads"`
	Sequences int    `json:"sequences"`
	Tokens    int    `json:"tokens"`
	Context   int    `json:"context"`
	// Kernel is the unit that computes it.
	Kernel string `json:"kernel"`
}

// promptResult has the median of times, and rates: operations are those of positions that tokens
// attend to, bytes those of the KV cache, once.
type promptResult struct {
	promptCase
	Seconds   float64 `json:"seconds"`
	Rounds    int     `json:"rounds"`
	Spread    float64 `json:"spread"` // (highest - lowest) / median
	FlopsPerS float64 `json:"flops_per_s"`
	BytesPerS float64 `json:"bytes_per_s"`
}

type promptResults struct {
	ReadBytesPerS float64        `json:"read_bytes_per_s"`
	Results       []promptResult `json:"results"`
}

const (
	promptBlock = 16 // tokens of a KV block
	// stepsInTurn decode steps over other blocks are timed together, one behind the other as in a step of a model: the first
	// launch takes a while to reach the GPU.
	stepsInTurn = 8
)

// attention is the operation of a case, whose KV blocks lie in the pool in no order; q and out have
// room for all its tokens.
func (c *promptCase) attention(x *bench, pool device.Range, q, out *kernels.Tensor) *kernels.Attention {
	plane := promptBlock * c.KVHeads * promptHead
	blocks := int(pool.Bytes) / (4 * plane)
	width := ceil(c.Context, promptBlock)
	if c.Sequences*width > blocks {
		x.Fatalf("%+v needs %d KV blocks, and the pool has %d", *c, c.Sequences*width, blocks)
	}
	starts, lens, table := []int32{0}, []int32(nil), make([]int32, c.Sequences*width)
	for i := range c.Sequences {
		starts, lens = append(starts, int32((i+1)*c.Tokens)), append(lens, int32(c.Context))
	}
	for i, b := range x.random.Perm(blocks)[:len(table)] {
		table[i] = int32(b)
	}
	op := &kernels.Attention{
		Q: q.Slice(0, c.Sequences*c.Tokens), SeqStarts: x.ints(starts...), ContextLens: x.ints(lens...), BlockTable: x.ints(table...).View(c.Sequences, width),
		Scale: float32(1 / math.Sqrt(promptHead)), MaxContext: c.Context, MaxSeqTokens: c.Tokens, Out: out.Slice(0, c.Sequences*c.Tokens),
	}
	for i, to := range [...]*kernels.Tensor{&op.CacheK, &op.CacheV} {
		*to = kernels.New(pool.Addr+device.Addr(2*i*plane), kernels.BF16, blocks, promptBlock, c.KVHeads, promptHead)
		to.Stride[0] = 2 * plane
	}
	return op
}

// use has the backend compute attention by a unit.
func (c *promptCase) use(b *Backend) {
	b.hopper = c.Kernel != "attention.cu"
	b.o.BatchInvariant = c.Kernel == "prompt.cu" // else few tokens are attention.cu's
}

// oneSoftmax is prompt.cu without BatchInvariant: of many tokens, and of few with long contexts.
const oneSoftmax = "prompt.cu, one softmax"

// measurePrompts times cases, at least three times each and for budget seconds, and reading of
// readRows rows of 8 KiB.
func (x *measurer) measurePrompts(cases []promptCase, readRows int, budget float64) (all promptResults) {
	hopper := x.b.hopper
	rounds := func(enqueue func() error) (times []float64) {
		once := func() float64 {
			took, _, err := x.span([]device.Stream{x.s}, enqueue)
			if err != nil {
				x.Fatal(err)
			}
			return took.Seconds()
		}
		once() // loads code
		n := min(20, int(budget/once()))
		for i := 0; i < max(n, 3); i++ {
			times = append(times, once())
		}
		return times
	}

	x.b.o.BatchInvariant = false
	read := &kernels.MatMul{X: x.act(1, 4096), W: x.act(readRows, 4096), Out: x.weights(kernels.F32, 1, readRows)}
	all.ReadBytesPerS = float64(read.W.Bytes()) / slices.Min(rounds(func() error { return x.b.Enqueue(x.s, read) }))

	pool, rows := int64(0), 0
	for i := range cases {
		c := &cases[i]
		pool = max(pool, int64(c.Sequences)*int64(ceil(c.Context, promptBlock))*promptBlock*int64(c.KVHeads)*promptHead*4)
		rows = max(rows, c.Sequences*c.Tokens*c.Heads)
	}
	cache := device.Range{Addr: x.alloc(pool), Bytes: pool}
	x.fill(cache)
	q, out := x.act(rows, promptHead), x.act(rows, promptHead)
	for i := range cases {
		c := &cases[i]
		c.use(x.b)
		heads := func(t kernels.Tensor) kernels.Tensor {
			return t.Slice(0, rows/c.Heads*c.Heads).View(rows/c.Heads, c.Heads, promptHead)
		}
		queries, outs := heads(q), heads(out)
		ops := []*kernels.Attention{c.attention(x.bench, cache, &queries, &outs)}
		for c.Tokens == 1 && len(ops) < stepsInTurn {
			ops = append(ops, c.attention(x.bench, cache, &queries, &outs))
		}
		times := rounds(func() (err error) {
			for _, op := range ops {
				err = errors.Join(err, x.b.Enqueue(x.s, op))
			}
			return err
		})
		for i := range times {
			times[i] /= float64(len(ops))
		}
		r := promptResult{promptCase: *c, Rounds: len(times), Seconds: median(times)}
		n, m := float64(c.Tokens), float64(c.Context)
		r.Spread = (slices.Max(times) - slices.Min(times)) / r.Seconds
		r.FlopsPerS = 4 * float64(c.Heads) * promptHead * float64(c.Sequences) * (n*(m-n) + n*(n+1)/2) / r.Seconds
		r.BytesPerS = 4 * float64(c.KVHeads) * promptHead * float64(c.Sequences) * m / r.Seconds
		all.Results = append(all.Results, r)
	}
	x.b.hopper, x.b.o.BatchInvariant = hopper, true
	return all
}

func promptTable(all promptResults) [][]string {
	rows := [][]string{{"model", "sequences", "new tokens", "context", "kernel", "ms", "spread", "TFLOP/s", "KV cache, TB/s", "share of reading"}}
	for i := range all.Results {
		r := &all.Results[i]
		rows = append(rows, []string{
			r.Model, fmt.Sprint(r.Sequences), fmt.Sprint(r.Tokens), fmt.Sprint(r.Context), r.Kernel, fmt.Sprintf("%.3f", r.Seconds*1e3), fmt.Sprintf("%.1f %%", 100*r.Spread),
			fmt.Sprintf("%.0f", r.FlopsPerS/1e12), fmt.Sprintf("%.2f", r.BytesPerS/1e12), fmt.Sprintf("%.0f %%", 100*r.BytesPerS/all.ReadBytesPerS),
		})
	}
	return rows
}

// promptCases are whole prompts, chunks at the end of long ones, and decode steps. Phi-3.5-MoE has
// Mixtral's attention, 32 heads and 8 of keys and values of 128: longrope is applied before.
func promptCases() (cases []promptCase) {
	const k = 1024
	for _, m := range []promptCase{{Model: "mixtral-8x7b", Heads: 32, KVHeads: 8}, {Model: "qwen3-30b-a3b", Heads: 32, KVHeads: 4}} {
		add := func(sequences, tokens, context int, kernels ...string) {
			c := m
			c.Sequences, c.Tokens, c.Context = sequences, tokens, context
			for _, c.Kernel = range kernels {
				cases = append(cases, c)
			}
		}
		add(1, 4*k, 4*k, "prompt.cu", oneSoftmax, "attention.cu")
		add(1, 16*k, 16*k, "prompt.cu", oneSoftmax, "attention.cu")
		add(1, 32*k, 32*k, "prompt.cu", oneSoftmax)
		add(1, 128*k, 128*k, "prompt.cu", oneSoftmax)
		add(1, 8*k, 32*k, "prompt.cu", oneSoftmax)
		add(1, 8*k, 128*k, "prompt.cu", oneSoftmax)
		for _, context := range []int{32 * k, 128 * k} {
			for _, sequences := range []int{1, 8, 32} {
				add(sequences, 1, context, "attention.cu", "prompt.cu", oneSoftmax)
			}
		}
	}
	return cases
}

// TestMeasurePrompts times attention of long prompts and decode attention over long contexts, at
// the shapes of tools/cuda/flash.py.
func TestMeasurePrompts(t *testing.T) {
	needMeasure(t, "attention.cu", "prompt.cu", "few.cu")
	m, b, s := openGPU(t, Options{BatchInvariant: true})
	if !b.hopper {
		t.Skip("needs compute capability 9.0")
	}
	x := newMeasurer(t, m, b, s, 0)
	defer x.free()
	cases := slices.DeleteFunc(promptCases(), func(c promptCase) bool { return c.Tokens > *promptMost })
	results := x.measurePrompts(cases, 256<<10, 0.15)
	fmt.Printf("Reading memory: %.2f TB/s; phi-3.5-moe has the attention of mixtral-8x7b, so its rows are those\n", results.ReadBytesPerS/1e12)
	printTable(os.Stdout, promptTable(results))
	writeMeasured(t, results)
}

// testPrompts holds attention by prompt.cu to that by attention.cu, but for rounding, and to its own
// bits for a prompt in steps of other sizes, among other sequences, and, with BatchInvariant, for
// tokens one by one.
func testPrompts(t *testing.T, m device.Machine, b *Backend, s device.Stream, c promptCase, window int) {
	x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 7}
	defer x.free()
	hopper, invariant := b.hopper, b.o.BatchInvariant
	defer func() { b.hopper, b.o.BatchInvariant = hopper, invariant }()
	pool := device.Range{Bytes: int64(c.Sequences) * int64(ceil(c.Context, promptBlock)) * promptBlock * int64(c.KVHeads) * promptHead * 4}
	pool.Addr = x.alloc(pool.Bytes)
	x.fill(pool)
	rows := c.Sequences * c.Tokens
	q, out := x.act(rows, c.Heads, promptHead), x.act(rows, c.Heads, promptHead)
	op := c.attention(x, pool, &q, &out)
	op.Window = window
	host, err := m.Alloc(device.Host, out.Bytes(), "results")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Free() //nolint:errcheck // Machine.Close reports what is left
	enqueue := func(op *kernels.Attention) error { return b.Enqueue(s, op) }
	run := func(ops ...*kernels.Attention) []byte {
		clear(host.Write(0, out.Bytes()))
		err := s.Copy(out.Range(), host.Range(0, out.Bytes()))
		for _, op := range ops {
			if err == nil {
				err = enqueue(op)
			}
		}
		if err == nil {
			err = s.Copy(host.Range(0, out.Bytes()), out.Range())
		}
		if err == nil {
			err = s.Synchronize(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		return bytes.Clone(host.Read(0, out.Bytes()))
	}
	c.Kernel = "attention.cu"
	c.use(b)
	other := run(op)
	near := func(got []byte, from, to int) {
		var sum, difference float64
		for i := from; i < to; i += 2 {
			v := float64(kernels.FromBF16(uint16(other[i]) | uint16(other[i+1])<<8))
			d := float64(kernels.FromBF16(uint16(got[i])|uint16(got[i+1])<<8)) - v
			sum, difference = sum+v*v, difference+d*d
		}
		if off := math.Sqrt(difference / sum); !(off < 5e-3) {
			t.Errorf("%+v, window %d: bytes %d to %d differ from attention.cu's by %g of the norm", c, window, from, to, off)
		}
	}

	// part is the tokens from to to of a sequence.
	part := func(sequence, from, to int) *kernels.Attention {
		p, first := *op, sequence*c.Tokens
		p.Q, p.Out = q.Slice(first+from, first+to), out.Slice(first+from, first+to)
		p.SeqStarts, p.ContextLens, p.BlockTable = x.ints(0, int32(to-from)), x.ints(int32(c.Context-c.Tokens+to)), op.BlockTable.Slice(sequence, sequence+1)
		p.MaxContext, p.MaxSeqTokens = c.Context-c.Tokens+to, to-from
		return &p
	}
	row := c.Heads * promptHead * 2
	var want []byte
	check := func(sequence, from, to int, got []byte, what string) {
		at, n := (sequence*c.Tokens+from)*row, (to-from)*row
		if !bytes.Equal(got[at:at+n], want[at:at+n]) {
			t.Errorf("%+v, window %d: tokens %d to %d of sequence %d have other bits %s", c, window, from, to, sequence, what)
		}
	}
	if c.Tokens >= 2*queriesPerWarp {
		c.Kernel = oneSoftmax
		c.use(b)
		want = run(op)
		near(want, 0, len(want))
		half := c.Tokens / 2
		for i := range c.Sequences {
			check(i, 0, c.Tokens, run(part(i, 0, half), part(i, half, c.Tokens)), "in halves")
		}
	}
	c.Kernel = "prompt.cu"
	c.use(b)
	want = run(op)
	near(want, 0, len(want))
	for i := range c.Sequences {
		var parts []*kernels.Attention
		for from := 0; from < c.Tokens; {
			to := min(c.Tokens, from+1+x.random.IntN(max(1, c.Tokens/3)))
			parts = append(parts, part(i, from, to))
			from = to
		}
		check(i, 0, c.Tokens, run(parts...), "in steps of other sizes")
		for range 3 {
			j := x.random.IntN(c.Tokens)
			check(i, j, j+1, run(part(i, j, j+1)), "alone")
		}
		check(i, c.Tokens-1, c.Tokens, run(part(i, c.Tokens-1, c.Tokens)), "alone")
	}
	// Few tokens whose sequence is split into chunks of any number of tiles, which a rounded length does not change.
	b.o.BatchInvariant = false
	l, err := b.streamState(s, true)
	if err != nil {
		t.Fatal(err)
	}
	enqueue = func(op *kernels.Attention) error { return l.prompt(op, 1) }
	n := min(c.Tokens, max(1, queriesPerWarp/(c.Heads/c.KVHeads)))
	for i := range c.Sequences {
		o := part(i, c.Tokens-n, c.Tokens)
		want = run(o)
		near(want, (i*c.Tokens+c.Tokens-n)*row, (i+1)*c.Tokens*row)
		o.MaxContext = ceil(c.Context, 256) * 256
		check(i, c.Tokens-n, c.Tokens, run(o), "with a rounded length")
	}
}

// TestGPUPrompts is testPrompts at the shapes of models.
func TestGPUPrompts(t *testing.T) {
	m, b, s := openGPU(t, Options{BatchInvariant: true})
	if !b.hopper {
		t.Skip("needs compute capability 9.0")
	}
	for _, c := range []promptCase{
		{Heads: 32, KVHeads: 8, Sequences: 1, Tokens: 4000, Context: 4000},
		{Heads: 32, KVHeads: 4, Sequences: 2, Tokens: 1500, Context: 9000},
		{Heads: 16, KVHeads: 16, Sequences: 3, Tokens: 700, Context: 1111},
		{Heads: 28, KVHeads: 4, Sequences: 1, Tokens: 3, Context: 30000},
	} {
		testPrompts(t, m, b, s, c, 0)
		testPrompts(t, m, b, s, c, 1000)
	}
}
