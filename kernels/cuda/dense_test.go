//go:build cuda

package cuda

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// BenchmarkDense times dense GEMMs of three models on cuBLASLt and as batch-invariant
// kernels of every shape that chooseHopperTile weighs; chosen says which it takes.
func BenchmarkDense(b *testing.B) {
	m, own, s := openGPU(b, Options{BatchInvariant: true})
	if !own.hopper {
		b.Skip("these kernels are for sm_90a")
	}
	library, err := New(m, own.work.Space(), Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := library.Close(); err != nil {
			b.Error(err)
		}
	})
	for _, p := range []struct {
		name           string
		columns, inner int
	}{
		{"qwen-qkv", 6144, 2048},
		{"qwen-o", 2048, 2048},
		{"qwen-shared-up", 11264, 2048},
		{"qwen-shared-down", 2048, 5632},
		{"qwen-lm_head", 151936, 2048},
		{"mixtral-qkv", 6144, 4096},
		{"mixtral-o", 4096, 4096},
	} {
		for _, rows := range []int{77, 324, 4536, 8192} {
			if p.columns > 1<<17 && rows > 324 {
				continue
			}
			x := &bench{TB: b, m: m, b: own, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 6}
			in, to := x.act(rows, p.inner), x.act(rows, p.columns)
			var ops []*kernels.MatMul
			for range max(1, min(8, 128<<20/(2*p.columns*p.inner))) {
				ops = append(ops, &kernels.MatMul{X: in, W: x.act(p.columns, p.inner), Out: to})
			}
			run := func(name string, one func(*kernels.MatMul) error) {
				b.Run(fmt.Sprintf("%s/rows=%d/%s", p.name, rows, name), func(b *testing.B) {
					x.TB = b
					seconds := x.time(b, func(i int) error { return one(ops[i%len(ops)]) })
					b.ReportMetric(0, "ns/op")
					b.ReportMetric(seconds*1e6, "us")
					b.ReportMetric(2e-12*float64(rows)*float64(p.columns)*float64(p.inner)/seconds, "TFLOP/s")
				})
			}
			run("library", func(o *kernels.MatMul) error { return library.Enqueue(s, o) })
			giveUp(library, s)
			l, err := own.streamState(s, true)
			if err != nil {
				b.Fatal(err)
			}
			chosen, chosenTokens := own.chooseHopperTile(rows, p.columns)
			for i := range denseShapes {
				e := &denseShapes[i]
				for parts := ceil(rows, e.maxTokens); parts <= ceil(rows, e.maxTokens)+2; parts++ {
					shape, tokens := kernelID(i), ceil(ceil(rows, parts), tokenStep)*tokenStep
					name := fmt.Sprintf("dense_%d/tokens=%d", e.units*unitRows, tokens)
					if shape == chosen && tokens == chosenTokens {
						name += "/chosen"
					}
					run(name, func(o *kernels.MatMul) error { return l.hopperGEMMTiled(o, false, shape, tokens) })
				}
			}
			l.release()
			x.TB = b
			x.free()
		}
	}
}

// testDenseTiles holds all tiles of dense GEMMs to the bits of the narrowest.
func testDenseTiles(t *testing.T, m device.Machine, b *Backend, s device.Stream) {
	const rows, inner, columns = 70, 712, 200 // more steps than there are stages, and odd ends
	x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 9}
	defer x.free()
	l, err := b.streamState(s, true)
	if err != nil {
		t.Fatal(err)
	}
	in, weights, bias := x.weights(b.o.Activation, rows, inner), x.weights(b.o.Activation, columns, inner), x.weights(b.o.Activation, columns)
	for _, outType := range []kernels.DType{b.o.Activation, kernels.F32} {
		var want []byte
		for i := range denseShapes {
			for _, tokens := range []int{16, 48, 80, denseShapes[i].maxTokens} {
				op := &kernels.MatMul{X: in, W: weights, Bias: bias, Out: x.weights(outType, rows, columns)}
				if err := op.Check(); err != nil {
					t.Fatal(err)
				}
				if err := l.hopperGEMMTiled(op, outType == kernels.F32, kernelID(i), tokens); err != nil {
					t.Fatal(err)
				}
				got := x.download(&op.Out)
				if want == nil {
					want = got
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s, %d weight rows, %d tokens: other bits than with the narrowest tiles", outType, denseShapes[i].units*unitRows, tokens)
				}
			}
		}
	}
}

// download returns the bytes of a dense tensor once all that is enqueued has ended.
func (x *bench) download(t *kernels.Tensor) []byte {
	host, err := x.m.Alloc(device.Host, t.Bytes(), "results")
	if err != nil {
		x.Fatal(err)
	}
	err = x.s.Copy(host.Range(0, t.Bytes()), device.Range{Addr: t.Addr, Bytes: t.Bytes()})
	if err == nil {
		err = x.s.Synchronize(x.Context())
	}
	if err != nil {
		x.Fatal(err)
	}
	got := bytes.Clone(host.Read(0, t.Bytes()))
	if err := host.Free(); err != nil {
		x.Fatal(err)
	}
	return got
}
