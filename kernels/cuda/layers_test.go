//go:build cuda

package cuda

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// decoder is some layers in which n sequences decode one token each, all experts on the
// device.
type decoder struct {
	hidden kernels.Tensor // [n, hidden], read and left by the layers
	ops    []kernels.Op
}

// sharedWidths are the widths of shared experts.
var sharedWidths = map[string]int{"qwen1.5-moe": 5632}

func (x *bench) decoder(c *benchModel, layers, n, context int) *decoder {
	const tokens = 16
	width := (context + tokens - 1) / tokens
	starts, lens, slots, places, table := make([]int32, n+1), make([]int32, n), make([]int32, n), make([]int32, n), make([]int32, n*width)
	for i := range n {
		starts[i+1], lens[i], places[i] = int32(i+1), int32(context), int32(context-1)
		slots[i] = int32(i*width*tokens + context - 1)
	}
	for i := range table {
		table[i] = int32(i)
	}
	q, wide := c.heads*c.d, (c.heads+2*c.kvHeads)*c.d
	zeros := func(n int) kernels.Tensor { return x.ints(make([]int32, n)...) }
	d := &decoder{hidden: x.act(n, c.hidden)}
	norm, qkv, attended, out := x.act(n, c.hidden), x.act(n, wide), x.act(n, q), x.act(n, c.hidden)
	logits, ids, weights := x.weights(kernels.F32, n, c.experts), zeros(n*c.k).View(n, c.k), x.weights(kernels.F32, n, c.k)
	offsets, order, up, down := zeros(c.experts+1), zeros(n*c.k), x.act(n*c.k, c.intermediate), x.act(n*c.k, c.hidden)
	rope, rows := x.weights(kernels.F32, 1024, c.d), x.ints(places...)
	cacheSlots, seqStarts, contextLens, blocks := x.ints(slots...), x.ints(starts...), x.ints(lens...), x.ints(table...).View(n, width)
	gamma := x.weights(kernels.BF16, c.hidden)
	var both, shared, gate kernels.Tensor
	sharedWidth := sharedWidths[c.name]
	if sharedWidth > 0 {
		both, shared, gate = x.act(n, 2*sharedWidth), x.act(n, c.hidden), x.weights(kernels.F32, n, 1)
	}
	heads := func(t kernels.Tensor, from, n int) kernels.Tensor {
		t = t.Narrow(1, from*c.d, (from+n)*c.d)
		return kernels.Tensor{Addr: t.Addr, DType: t.DType, Rank: 3, Shape: [4]int{t.Shape[0], n, c.d}, Stride: [4]int{t.Stride[0], c.d, 1}}
	}
	add := func(ops ...kernels.Op) { d.ops = append(d.ops, ops...) }
	for layer := range layers {
		cache := x.act(2*len(table), tokens, c.kvHeads, c.d)
		keys, values := cache.Slice(0, len(table)), cache.Slice(len(table), 2*len(table))
		layout, extents, all := x.experts(c)
		first := &kernels.Norm{X: out, Residual: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm}
		if layer == 0 {
			first.X, first.Residual = d.hidden, kernels.Tensor{}
		}
		add(first,
			&kernels.MatMul{X: norm, W: x.act(wide, c.hidden), Out: qkv},
			&kernels.RoPE{Q: heads(qkv, 0, c.heads), K: heads(qkv, c.heads, c.kvHeads), Table: rope, Rows: rows},
			&kernels.AppendKV{K: heads(qkv, c.heads, c.kvHeads), V: heads(qkv, c.heads+c.kvHeads, c.kvHeads), CacheK: keys, CacheV: values, Slots: cacheSlots},
			&kernels.Attention{
				Q: heads(qkv, 0, c.heads), CacheK: keys, CacheV: values, SeqStarts: seqStarts, ContextLens: contextLens, BlockTable: blocks,
				Scale: float32(1 / math.Sqrt(float64(c.d))), MaxContext: context, MaxRows: 1, Out: heads(attended, 0, c.heads),
			},
			&kernels.MatMul{X: attended, W: x.act(c.hidden, q), Out: out},
			&kernels.Norm{X: out, Residual: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm},
			&kernels.MatMul{X: norm, W: x.act(c.experts, c.hidden), Out: logits},
			&kernels.Route{Logits: logits, Method: c.method, IDs: ids, Weights: weights},
			&kernels.Group{IDs: ids, Offsets: offsets, Order: order})
		if sharedWidth > 0 {
			narrow := both.Narrow(1, 0, sharedWidth)
			add(&kernels.MatMul{X: norm, W: x.act(2*sharedWidth, c.hidden), Out: both},
				&kernels.SiluMul{Gate: narrow, Up: both.Narrow(1, sharedWidth, 2*sharedWidth), Out: narrow},
				&kernels.MatMul{X: narrow, W: x.act(c.hidden, sharedWidth), Out: shared},
				&kernels.MatMul{X: norm, W: x.act(1, c.hidden), Out: gate})
		}
		add(&kernels.ExpertUp{X: norm, Offsets: offsets, Order: order, Slots: extents, Experts: all, Layout: layout, Out: up},
			&kernels.ExpertDown{X: up, Offsets: offsets, Order: order, Slots: extents, Experts: all, Layout: layout, Out: down},
			&kernels.Combine{X: down, Weights: weights, Shared: shared, SharedGate: gate, Out: out})
	}
	add(&kernels.Norm{X: out, Residual: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm})
	return d
}

// enqueue puts the layers on the stream, through b.
func (d *decoder) enqueue(b *Backend, s device.Stream) error {
	for _, op := range d.ops {
		if err := b.Enqueue(s, op); err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkLayers reports what one layer takes in a graph of several, whose weights the
// second-level cache does not hold, with and without kernels that overlap.
func BenchmarkLayers(b *testing.B) {
	const layers, context = 4, 100
	m, overlapping, s := openGPU(b, Options{})
	serial, err := New(m, device.HBM(0), Options{Serial: true})
	if err != nil {
		b.Fatal(err)
	}
	defer serial.Close()
	for _, c := range benchModels {
		x := &bench{TB: b, m: m, b: overlapping, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 13}
		for _, n := range []int{1, 8} {
			d := x.decoder(&c, layers, n, context)
			for _, mode := range []struct {
				name string
				b    *Backend
			}{{"serial", serial}, {"overlapping", overlapping}} {
				b.Run(fmt.Sprintf("model=%s/rows=%d/%s", c.name, n, mode.name), func(b *testing.B) {
					if err := d.enqueue(mode.b, s); err != nil {
						b.Fatal(err)
					}
					g, err := s.(device.Capturer).Capture(func() error { return d.enqueue(mode.b, s) })
					if err != nil {
						b.Fatal(err)
					}
					defer g.Close()
					seconds := x.time(b, func(int) error { return s.(device.Capturer).LaunchGraph(g) })
					b.ReportMetric(0, "ns/op")
					b.ReportMetric(seconds/layers*1e6, "us/layer")
				})
			}
			x.free()
		}
	}
}

// TestGPUOverlap runs layers with kernels that overlap and with such that do not, on
// two inputs in turn, so that what is read too early is of the other: all bits are the
// same.
func TestGPUOverlap(t *testing.T) {
	const layers, rounds = 2, 20
	m, overlapping, s := openGPU(t, Options{})
	serial, err := New(m, device.HBM(0), Options{Serial: true})
	if err != nil {
		t.Fatal(err)
	}
	defer serial.Close()
	for _, c := range benchModels {
		for _, n := range []int{1, 5, 40} {
			t.Run(fmt.Sprintf("%s/%d", c.name, n), func(t *testing.T) {
				x := &bench{TB: t, m: m, b: overlapping, s: s, random: rand.New(rand.NewPCG(1, uint64(n))), exponent: 13}
				defer x.free()
				d := x.decoder(&c, layers, n, 300)
				x.exponent = 6
				size := d.hidden.Bytes()
				var inputs [2]kernels.Tensor
				for i := range inputs {
					inputs[i] = x.act(n, c.hidden)
				}
				host, err := m.Alloc(device.Host, size, "hidden")
				if err != nil {
					t.Fatal(err)
				}
				defer host.Free()
				hidden := device.Range{Addr: d.hidden.Addr, Bytes: size}
				run := func(b *Backend, i int) error {
					if err := s.Copy(hidden, device.Range{Addr: inputs[i].Addr, Bytes: size}); err != nil {
						return err
					}
					return d.enqueue(b, s)
				}
				result := func() []byte {
					if err := s.Copy(host.Range(0, size), hidden); err != nil {
						t.Fatal(err)
					}
					if err := s.Synchronize(t.Context()); err != nil {
						t.Fatal(err)
					}
					return bytes.Clone(host.Read(0, size))
				}
				var want [2][]byte
				var graphs [2]device.Graph
				for i := range want {
					if err := run(serial, i); err != nil {
						t.Fatal(err)
					}
					want[i] = result()
					if graphs[i], err = s.(device.Capturer).Capture(func() error { return run(overlapping, i) }); err != nil {
						t.Fatal(err)
					}
					defer graphs[i].Close()
				}
				if bytes.Equal(want[0], want[1]) {
					t.Fatal("both inputs give the same")
				}
				for round := range 2 * rounds {
					i := round % 2
					if err := run(overlapping, i); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(result(), want[i]) {
						t.Errorf("round %d: other bits than without overlapping", round)
					}
					if err := s.(device.Capturer).LaunchGraph(graphs[i]); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(result(), want[i]) {
						t.Errorf("round %d, in a graph: other bits than without overlapping", round)
					}
				}
			})
		}
	}
}
