package models

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// Dummy is a Source of seeded random weights in the shapes of a config. The same seed
// gives the same bytes on every machine, regardless of how reads are split. Dummy keeps no
// weights in memory.
//
// Weights have a deviation of about 1/sqrt(fan-in), so that hidden states and
// logits stay in a sane range; norms have weight 1.
type Dummy struct {
	config  *Config
	seed    uint64
	names   []string
	tensors map[string]dummyTensor
	buffers sync.Pool // *[]byte
}

// dummyTensor describes how to fill a tensor.
type dummyTensor struct {
	rows, cols int // cols 0: a vector
	kind       dummyKind
	exponent   int // of philox.FillDummy
	layer      int // of a router's bias
}

type dummyKind uint8

const (
	dummyRandom dummyKind = iota
	dummyOnes
	dummyRouterBias
	dummyZeros
)

// routerDeviation is the standard deviation of a dummy router's scores: that of the
// standard Gumbel distribution, pi/sqrt(6). With Gumbel scores and biases ln p, an expert
// would have the maximum score with probability p.
const routerDeviation = 1.28

// biasExponent gives biases a standard deviation of 0.04.
const biasExponent = 11

// NewDummy makes the Source of c's dummy weights, in c.DType.
func NewDummy(c *Config, seed uint64) *Dummy {
	d := &Dummy{config: c, seed: seed, tensors: map[string]dummyTensor{}}
	add := func(name string, t dummyTensor) {
		d.names = append(d.names, name)
		d.tensors[name] = t
	}
	var w Weights
	for _, p := range denseTensors(c, &w) {
		t := dummyTensor{rows: p.rows, cols: p.cols, exponent: biasExponent}
		switch {
		case p.to == &w.Embed && !c.TiedEmbeddings:
			t.exponent = exponentFor(1)
		case p.cols > 0:
			t.exponent = exponentFor(math.Sqrt(1 / float64(p.cols)))
		case strings.HasSuffix(p.names[0], "norm.weight"):
			t.kind = dummyOnes
		}
		for i := range w.Layers {
			gate := strings.Contains(p.names[0], sharedGate) // of the shared expert, as other GEMMs
			switch {
			case p.to == &w.Layers[i].Router && !gate:
				t.exponent = exponentFor(routerDeviation / math.Sqrt(float64(p.cols)))
			case p.to == &w.Layers[i].RouterBias && gate:
				t.kind = dummyZeros
			case p.to == &w.Layers[i].RouterBias:
				t.kind, t.layer = dummyRouterBias, i
			}
		}
		add(p.names[0], t)
	}
	for layer, dense := range c.Dense {
		if dense {
			continue
		}
		names := expertLayouts(c, layer)[0]
		in := dummyTensor{rows: c.ExpertWidth, cols: c.Hidden, exponent: exponentFor(math.Sqrt(1 / float64(c.Hidden)))}
		out := dummyTensor{rows: c.Hidden, cols: c.ExpertWidth, exponent: exponentFor(math.Sqrt(1 / float64(c.ExpertWidth)))}
		for e := range c.Experts {
			add(names.tensor(e, kernels.W1), in)
			add(names.tensor(e, kernels.W3), in)
			add(names.tensor(e, kernels.W2), out)
		}
	}
	return d
}

// exponentFor returns the exponent of philox.FillDummy whose standard deviation, 73.9 *
// 2^-exponent, is nearest.
func exponentFor(deviation float64) int { return int(math.Round(math.Log2(73.9 / deviation))) }

// Origin names the generator and its seed.
func (d *Dummy) Origin() string { return fmt.Sprintf("dummy weights (seed %d)", d.seed) }

// Names lists the tensors, layer by layer.
func (d *Dummy) Names() []string { return slices.Clone(d.names) }

// Tensor describes a tensor.
func (d *Dummy) Tensor(name string) (Info, bool) {
	t, ok := d.tensors[name]
	if !ok {
		return Info{}, false
	}
	info := Info{DType: d.config.DType, TypeName: d.config.DType.String(), Shape: []int{t.rows}, File: d.Origin()}
	if t.cols > 0 {
		info.Shape = append(info.Shape, t.cols)
	}
	return info, true
}

// Read generates the requested bytes, which must be whole elements.
func (d *Dummy) Read(name string, off, n int64, read func(data []byte) error) error {
	buf, _ := d.buffers.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	defer d.buffers.Put(buf)
	if int64(cap(*buf)) < n {
		*buf = make([]byte, n)
	}
	data := (*buf)[:n]
	t, size := d.tensors[name], int64(d.config.DType.Size())
	switch t.kind {
	case dummyRandom:
		philox.FillDummy(data, d.config.DType, d.seed, name, off/size, t.exponent)
	case dummyOnes:
		ones := make([]float32, n/size)
		for i := range ones {
			ones[i] = 1
		}
		kernels.FromFloat32(data, ones, d.config.DType)
	case dummyZeros:
		clear(data)
	case dummyRouterBias:
		bias := d.routerBias(t.layer)[off/size:]
		kernels.FromFloat32(data, bias[:n/size], d.config.DType)
	}
	return read(data)
}

// routerBias returns the biases of a Zipf distribution, -skew ln(rank), for the layer's
// experts in an order that the seed determines.
func (d *Dummy) routerBias(layer int) []float32 {
	order := make([]int, d.config.Experts)
	key := make([]uint32, len(order))
	for e := range order {
		order[e] = e
		key[e] = philox.Block([4]uint32{uint32(e), uint32(layer)}, [2]uint32{uint32(d.seed), uint32(d.seed >> 32)})[0]
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(key[a], key[b]) })
	bias := make([]float32, len(order))
	for rank, e := range order {
		bias[e] = float32(-d.config.RoutingSkew * math.Log(float64(rank+1)))
	}
	return bias
}

// Prefetch does nothing, because no weights are stored.
func (d *Dummy) Prefetch(string, int64, int64) {}

// Release does nothing, because no weights are stored.
func (d *Dummy) Release(string) {}
