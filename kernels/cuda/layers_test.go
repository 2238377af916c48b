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
	// places are what says where things are, and what it may be: of two sets of
	// sequences, of other lengths and in other blocks. It is the first.
	places []place
}

type place struct {
	now kernels.Tensor
	of  [2]kernels.Tensor
}

// goTo has the layers work on the one or the other set of sequences.
func (d *decoder) goTo(s device.Stream, i int) error {
	for _, p := range d.places {
		if err := s.Copy(device.Range{Addr: p.now.Addr, Bytes: p.now.Bytes()}, device.Range{Addr: p.of[i].Addr, Bytes: p.now.Bytes()}); err != nil {
			return err
		}
	}
	return nil
}

// sharedWidths are the widths of shared experts.
var sharedWidths = map[string]int{"qwen1.5-moe": 5632, "shared expert": 80}

// headNorms are the models whose heads of q and k are normed.
var headNorms = map[string]bool{"qwen3-30b-a3b": true}

func (x *bench) decoder(c *benchModel, layers, n, context int) *decoder {
	const tokens = 16
	width := (context + tokens - 1) / tokens
	starts := make([]int32, n+1)
	for i := range starts {
		starts[i] = int32(i)
	}
	d := &decoder{}
	// where returns places whose element i of the sets' is at(set's first block, set's
	// context, i).
	where := func(length int, at func(block, context, i int) int) kernels.Tensor {
		var p place
		values := make([]int32, length)
		for set := range p.of {
			for i := range values {
				values[i] = int32(at(set*n*width, context-19*set, i))
			}
			p.of[set] = x.ints(values...)
			if set == 0 {
				p.now = x.ints(values...)
			}
		}
		d.places = append(d.places, p)
		return p.now
	}
	q, wide := c.heads*c.d, (c.heads+2*c.kvHeads)*c.d
	zeros := func(n int) kernels.Tensor { return x.ints(make([]int32, n)...) }
	d.hidden = x.act(n, c.hidden)
	norm, qkv, attended, out := x.act(n, c.hidden), x.act(n, wide), x.act(n, q), x.act(n, c.hidden)
	sharedWidth := sharedWidths[c.name]
	scored := c.experts + min(sharedWidth, 1) // the shared expert's gate is the last
	logits, ids, weights := x.weights(kernels.F32, n, scored), zeros(n*c.k).View(n, c.k), x.weights(kernels.F32, n, c.k)
	offsets, order, up, down := zeros(c.experts+1), zeros(n*c.k), x.act(n*c.k, c.intermediate), x.act(n*c.k, c.hidden)
	var runs kernels.Tensor
	lists := kernels.ListsRuns(n, c.experts, c.k)
	if lists {
		most := kernels.MostRuns(c.experts, n*c.k)
		runs = zeros(most*kernels.RunColumns).View(most, kernels.RunColumns)
	}
	rope, seqStarts := x.weights(kernels.F32, 1024, c.d), x.ints(starts...)
	rows := where(n, func(_, context, _ int) int { return context - 1 })
	contextLens := where(n, func(_, context, _ int) int { return context })
	cacheSlots := where(n, func(block, context, i int) int { return (block+i*width)*tokens + context - 1 })
	blocks := where(n*width, func(block, _, i int) int { return block + i }).View(n, width)
	gamma := x.weights(kernels.BF16, c.hidden)
	var both, shared, gate kernels.Tensor
	if sharedWidth > 0 {
		both, shared, gate = x.act(n, 2*sharedWidth), x.act(n, c.hidden), logits.Narrow(1, c.experts, scored)
	}
	heads := func(t kernels.Tensor, from, n int) kernels.Tensor {
		t = t.Narrow(1, from*c.d, (from+n)*c.d)
		return kernels.Tensor{Addr: t.Addr, DType: t.DType, Rank: 3, Shape: [4]int{t.Shape[0], n, c.d}, Stride: [4]int{t.Stride[0], c.d, 1}}
	}
	add := func(ops ...kernels.Op) { d.ops = append(d.ops, ops...) }
	for layer := range layers {
		cache := x.act(4*n*width, tokens, c.kvHeads, c.d)
		keys, values := cache.Slice(0, 2*n*width), cache.Slice(2*n*width, 4*n*width)
		layout, extents, all := x.experts(c)
		if layer == 0 {
			add(&kernels.Norm{X: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm})
		}
		rotate := kernels.RoPEAppendKV{
			Q: heads(qkv, 0, c.heads), K: heads(qkv, c.heads, c.kvHeads), V: heads(qkv, c.heads+c.kvHeads, c.kvHeads), Table: rope, Rows: rows,
			CacheK: keys, CacheV: values, Slots: cacheSlots,
		}
		if headNorms[c.name] {
			rotate.QNorm, rotate.KNorm, rotate.Eps = x.act(c.d), x.act(c.d), 1e-6
		}
		add(&kernels.MatMul{X: norm, W: x.act(wide, c.hidden), Out: qkv},
			&kernels.RoPEAttention{Append: rotate, Attention: kernels.Attention{
				Q: rotate.Q, CacheK: keys, CacheV: values, SeqStarts: seqStarts, ContextLens: contextLens, BlockTable: blocks,
				Scale: float32(1 / math.Sqrt(float64(c.d))), MaxContext: context, MaxSeqTokens: 1, PastReady: true, Out: heads(attended, 0, c.heads),
			}},
			&kernels.MatMul{X: attended, W: x.act(c.hidden, q), Out: out},
			&kernels.Norm{X: out, Residual: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm})
		router := kernels.MatMul{X: norm, W: x.act(scored, c.hidden), Out: logits}
		route := kernels.Route{Logits: logits.Narrow(1, 0, c.experts), Method: c.method, IDs: ids, Weights: weights, Offsets: offsets, Order: order, Runs: runs}
		if sharedWidth > 0 {
			add(&kernels.RouterGateUp{Router: router, GateUp: kernels.GatedMatMul{X: norm, W: x.act(2*sharedWidth, c.hidden), Out: both}},
				&kernels.RouteDown{Route: route, Down: kernels.MatMul{X: both.Narrow(1, 0, sharedWidth), W: x.act(c.hidden, sharedWidth), Out: shared}})
		} else {
			add(&router)
		}
		product := kernels.ExpertGEMM{X: norm, Offsets: offsets, Order: order, Slots: extents, Experts: all, Layout: layout, Out: up, Runs: runs}
		back := product
		back.X, back.Out = up, down
		expertUp := kernels.ExpertUp{ExpertGEMM: product}
		switch {
		case sharedWidth > 0:
			add(&expertUp)
		case lists:
			add(&kernels.RouteExpertUp{Route: route, Up: expertUp})
		default:
			add(&route, &expertUp)
		}
		add(&kernels.ExpertDown{ExpertGEMM: back},
			&kernels.CombineNorm{X: down, Weights: weights, Shared: shared, SharedGate: gate, Residual: d.hidden, Weight: gamma, Eps: 1e-5, Out: norm})
	}
	return d
}

// enqueue puts the layers on the stream, through b.
func (d *decoder) enqueue(b kernels.Backend, s device.Stream) error {
	for _, op := range d.ops {
		if err := b.Enqueue(s, op); err != nil {
			return err
		}
	}
	return nil
}

// openBoth opens a GPU with a backend whose kernels do not overlap, and one whose do.
func openBoth(tb testing.TB) (m device.Machine, serial, overlapping *Backend, s device.Stream) {
	tb.Helper()
	m, overlapping, s = openGPU(tb, Options{})
	serial, err := New(m, device.HBM(0), Options{Serial: true})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := serial.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m, serial, overlapping, s
}

// giveUp has a backend give a stream up that it may have taken, on which nothing is under
// way, so that another may take it.
func giveUp(b *Backend, s device.Stream) {
	if l := b.states[s]; l != nil {
		l.release()
	}
}

// bytesOfDecode are the bytes that a layer reads in a decode step of n sequences: its weights,
// of the experts those that n tokens select on average, and keys and values.
func (c *benchModel) bytesOfDecode(n, context int) float64 {
	q, kv := c.heads*c.d, c.kvHeads*c.d
	used := float64(c.experts) * (1 - math.Pow(1-float64(c.k)/float64(c.experts), float64(n)))
	elements := c.hidden*(2*q+2*kv+c.experts) + 3*c.hidden*sharedWidths[c.name] + 2*n*context*kv
	return 2 * (float64(elements) + used*3*float64(c.hidden*c.intermediate))
}

// BenchmarkDecodeLayers reports what a layer of a decode step takes in a graph of several
// layers, as a share of reading its bytes (%memory), and what each of a layer's operations takes
// in a graph of that operation of all layers alone.
func BenchmarkDecodeLayers(b *testing.B) {
	const layers = 4
	m, backend, s := openGPU(b, Options{})
	for _, c := range benchModels {
		for _, n := range []int{1, 8, 64} {
			for _, context := range []int{100, 1000} {
				x := &bench{TB: b, m: m, b: backend, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 13}
				var d *decoder
				measure := func(what string, ops []kernels.Op) {
					b.Run(fmt.Sprintf("model=%s/rows=%d/context=%d/%s", c.name, n, context, what), func(b *testing.B) {
						if d == nil {
							d = x.decoder(&c, layers, n, context)
						}
						whole := ops == nil
						if whole {
							ops = d.ops
						}
						enqueue := func() error { return (&decoder{ops: ops}).enqueue(backend, s) }
						if err := enqueue(); err != nil {
							b.Fatal(err)
						}
						g, err := s.(device.Capturer).Capture(enqueue)
						if err != nil {
							b.Fatal(err)
						}
						defer g.Close()
						seconds := x.time(b, func(int) error { return s.(device.Capturer).LaunchGraph(g) }) / layers
						b.ReportMetric(0, "ns/op")
						b.ReportMetric(seconds*1e6, "us/layer")
						if whole {
							b.ReportMetric(100*c.bytesOfDecode(n, context)/seconds/(*memoryCeiling*1e12), "%memory")
						}
					})
				}
				measure("layer", nil)
				if d == nil {
					continue // filtered out
				}
				each := len(d.ops[1:]) / layers
				for i := range each {
					var ops []kernels.Op
					for layer := range layers {
						ops = append(ops, d.ops[1+layer*each+i])
					}
					measure(fmt.Sprintf("%02d-%s", i, ops[0].Name()), ops)
				}
				x.free()
			}
		}
	}
}

// BenchmarkLayers reports what one layer takes in a graph of several, whose weights the
// second-level cache does not hold, with and without kernels that overlap.
func BenchmarkLayers(b *testing.B) {
	const layers, context = 4, 100
	m, serial, overlapping, s := openBoth(b)
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
					defer giveUp(mode.b, s)
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
// two inputs in turn, of sequences that lie elsewhere, so that what is read too early is
// of the other: all bits are the same.
func TestGPUOverlap(t *testing.T) {
	const layers, rounds = 2, 20
	m, serial, overlapping, s := openBoth(t)
	for _, c := range benchModels {
		for _, n := range []int{1, 5, 12, 40, 70} {
			t.Run(fmt.Sprintf("%s/%d", c.name, n), func(t *testing.T) {
				giveUp(overlapping, s)
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
					if err := d.goTo(s, i); err != nil {
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
				}
				giveUp(serial, s)
				for i := range graphs {
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
