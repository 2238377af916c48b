package cpu

import (
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// checkIndex checks that all values lie in [low, n).
func checkIndex(op, name string, values []int32, low, n int) error {
	for i, v := range values {
		if int(v) < low || int(v) >= n {
			return errValue(op, name, i, int64(v), "%d to %d", low, n-1)
		}
	}
	return nil
}

func (b *Backend) embed(o *kernels.Embed, _ device.Access) error {
	ids := vector[int32](&o.IDs)
	if err := checkIndex(o.Name(), "IDs", ids, -1, o.Table.Shape[0]); err != nil {
		return err
	}
	stride := o.Table.Stride[0] * o.Table.DType.Size()
	b.rows(len(ids), o.Out.Shape[1], func(from, to int) {
		for n := from; n < to; n++ {
			if ids[n] < 0 {
				fill(row(&o.Out, n), float32(math.NaN()))
				continue
			}
			b.set.load(row(&o.Out, n), o.Table.Addr+device.Addr(int(ids[n])*stride), o.Table.DType)
		}
	})
	return nil
}

func fill(x []float32, v float32) {
	for i := range x {
		x[i] = v
	}
}

func (b *Backend) norm(o *kernels.Norm, _ device.Access) error {
	d := o.Weight.Shape[0]
	heads := 1
	x, out, residual := o.X, o.Out, o.Residual
	if x.Rank == 3 {
		heads = x.Shape[1]
	} else {
		asHeads(&x)
		asHeads(&out)
		asHeads(&residual)
	}
	if d == 0 {
		return nil
	}
	n := normer{kind: o.Kind, eps: o.Eps}
	defer b.release(n.load(b, &o.Weight, &o.Bias))
	b.rows(x.Shape[0]*heads, 4*d, func(from, to int) {
		for i := from; i < to; i++ {
			in := head(&x, i/heads, i%heads)
			if !o.Residual.None() {
				r := head(&residual, i/heads, i%heads)
				add(r, in)
				in = r
			}
			n.norm(head(&out, i/heads, i%heads), in)
		}
	})
	return nil
}

// normer norms rows with one norm's parameters.
type normer struct {
	kind         kernels.NormKind
	eps          float32
	weight, bias []float32 // bias is nil for none
}

// load converts weights, and bias unless it is none, to scratch memory, which the caller
// releases.
func (n *normer) load(b *Backend, weight, bias *kernels.Tensor) *[]float32 {
	d := weight.Shape[0]
	scratch := b.floats(2 * d)
	n.weight = (*scratch)[:d]
	b.set.load(n.weight, weight.Addr, weight.DType)
	if !bias.None() {
		n.bias = (*scratch)[d : 2*d]
		b.set.load(n.bias, bias.Addr, bias.DType)
	}
	return scratch
}

func (n *normer) norm(to, x []float32) {
	if n.kind == kernels.RMS {
		rms(to, x, n.weight, n.eps)
	} else {
		layer(to, x, n.weight, n.eps)
	}
	add(to, n.bias)
}

// add adds x to to.
func add(to, x []float32) {
	for i, v := range x {
		to[i] += v
	}
}

// asHeads turns a tensor of rank 2 into one of rank 3 with a single head.
func asHeads(t *kernels.Tensor) {
	t.Rank, t.Shape[2], t.Stride[2] = 3, t.Shape[1], t.Stride[1]
	t.Shape[1], t.Stride[1] = 1, 0
}

func rms(to, x, weight []float32, eps float32) {
	mean := sum(x, func(v float32) float32 { return float32(v * v) }) / float32(len(x))
	scale := 1 / float32(math.Sqrt(float64(mean+eps)))
	for j, v := range x {
		to[j] = float32(weight[j] * float32(v*scale))
	}
}

func layer(to, x, weight []float32, eps float32) {
	mean := sum(x, func(v float32) float32 { return v }) / float32(len(x))
	variance := sum(x, func(v float32) float32 { return float32((v - mean) * (v - mean)) }) / float32(len(x))
	scale := 1 / float32(math.Sqrt(float64(variance+eps)))
	for j, v := range x {
		to[j] = float32(weight[j] * float32((v-mean)*scale))
	}
}

func (b *Backend) clamp(o *kernels.Clamp, _ device.Access) error {
	b.rows(o.X.Shape[0], o.X.Shape[1], func(from, to int) {
		for n := from; n < to; n++ {
			x := row(&o.X, n)
			for i, v := range x {
				switch {
				case v > o.Limit:
					x[i] = o.Limit
				case v < -o.Limit:
					x[i] = -o.Limit
				}
			}
		}
	})
	return nil
}

func (b *Backend) rope(o *kernels.RoPE, _ device.Access) error {
	rows := vector[int32](&o.Rows)
	if err := checkIndex(o.Name(), "Rows", rows, 0, o.Table.Shape[0]); err != nil {
		return err
	}
	b.rows(len(rows), o.Q.Shape[2]*(o.Q.Shape[1]+o.K.Shape[1]), func(from, to int) {
		for n := from; n < to; n++ {
			table := row(&o.Table, int(rows[n]))
			for _, t := range [...]*kernels.Tensor{&o.Q, &o.K} {
				for h := range t.Shape[1] {
					x := head(t, n, h)
					rotate(x, x, table)
				}
			}
		}
	})
	return nil
}

// rotate writes head x, rotated by a row of the RoPE table, to to, which may be x.
func rotate(to, x, table []float32) {
	half := len(x) / 2
	for i := range half {
		c, s, v, w := table[i], table[half+i], x[i], x[half+i]
		to[i] = float32(v*c) - float32(w*s)
		to[half+i] = float32(w*c) + float32(v*s)
	}
}

func (b *Backend) ropeAppendKV(o *kernels.RoPEAppendKV, access device.Access) error {
	rows, slots := vector[int32](&o.Rows), vector[int32](&o.Slots)
	if err := checkIndex(o.Name(), "Rows", rows, 0, o.Table.Shape[0]); err != nil {
		return err
	}
	if err := declareAppended(o.Name(), slots, &o.CacheK, &o.CacheV, access); err != nil {
		return err
	}
	heads, kvHeads, d, tokens := o.Q.Shape[1], o.K.Shape[1], o.Q.Shape[2], o.CacheK.Shape[1]
	var qNorm, kNorm []float32
	if !o.QNorm.None() {
		scratch := b.floats(2 * d)
		defer b.release(scratch)
		qNorm, kNorm = (*scratch)[:d], (*scratch)[d:]
		b.set.load(qNorm, o.QNorm.Addr, o.QNorm.DType)
		b.set.load(kNorm, o.KNorm.Addr, o.KNorm.DType)
	}
	b.rows(len(rows), d*(heads+2*kvHeads), func(from, to int) {
		turn := func(to, x, weight, table []float32) {
			if weight != nil {
				rms(to, x, weight, o.Eps)
				x = to
			}
			rotate(to, x, table)
		}
		for n := from; n < to; n++ {
			table, s := row(&o.Table, int(rows[n])), int(slots[n])
			for h := range heads {
				q := head(&o.Q, n, h)
				turn(q, q, qNorm, table)
			}
			if s < 0 {
				continue
			}
			for h := range kvHeads {
				turn(at[float32](cachedAddr(&o.CacheK, s/tokens, s%tokens, h), d), head(&o.K, n, h), kNorm, table)
				copy(at[float32](cachedAddr(&o.CacheV, s/tokens, s%tokens, h), d), head(&o.V, n, h))
			}
		}
	})
	return nil
}

func (b *Backend) combine(o *kernels.Combine, _ device.Access) error {
	b.combined(o, func(int, []float32) {})
	return nil
}

func (b *Backend) combineNorm(o *kernels.CombineNorm, _ device.Access) error {
	if o.Weight.Shape[0] == 0 {
		return nil
	}
	norm := normer{kind: o.Kind, eps: o.Eps}
	defer b.release(norm.load(b, &o.Weight, &o.Bias))
	b.combined(&kernels.Combine{X: o.X, Weights: o.Weights, Shared: o.Shared, SharedGate: o.SharedGate, Out: o.Out}, func(n int, out []float32) {
		residual := row(&o.Residual, n)
		add(residual, out)
		norm.norm(out, residual)
	})
	return nil
}

// combined executes o, and calls then with each row of Out.
func (b *Backend) combined(o *kernels.Combine, then func(n int, out []float32)) {
	k := o.Weights.Shape[1]
	weights := vector[float32](&o.Weights)
	b.rows(o.Out.Shape[0], (k+1)*o.Out.Shape[1], func(from, to int) {
		p, rows := make([]float32, k, k+1), make([]uint64, k, k+1)
		for n := from; n < to; n++ {
			p, rows := p[:copy(p, weights[n*k:])], rows
			for i := range k {
				rows[i] = uint64(rowAddr(&o.X, n*k+i))
			}
			if !o.Shared.None() {
				p = append(p, sigmoid(row(&o.SharedGate, n)[0]))
				rows = append(rows, uint64(rowAddr(&o.Shared, n)))
			}
			out := row(&o.Out, n)
			clear(out)
			b.set.addWeighted(out, p, rows)
			then(n, out)
		}
	})
}

func (b *Backend) siluMul(o *kernels.SiluMul, _ device.Access) error {
	b.rows(o.Out.Shape[0], 2*o.Out.Shape[1], func(from, to int) {
		pad := b.floats(2 * maxLanes)
		defer b.release(pad)
		for n := from; n < to; n++ {
			b.set.gated(row(&o.Out, n), row(&o.Gate, n), row(&o.Up, n), *pad)
		}
	})
	return nil
}

func (b *Backend) gather(o *kernels.Gather, access device.Access) error {
	rows := vector[int32](&o.Rows)
	if err := checkIndex(o.Name(), "Rows", rows, 0, o.X.Shape[0]); err != nil {
		return err
	}
	bytes := 4 * o.X.Shape[1]
	m := merger{declare: access.Read}
	for _, r := range rows {
		m.add(o.X.Addr+device.Addr(4*int(r)*o.X.Stride[0]), bytes)
	}
	m.flush()
	b.rows(len(rows), o.X.Shape[1], func(from, to int) {
		for n := from; n < to; n++ {
			copy(row(&o.Out, n), row(&o.X, int(rows[n])))
		}
	})
	return nil
}
