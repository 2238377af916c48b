package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// rowThreads is the block size of row kernels; each thread has 8 elements.
const rowThreads = 128

// rowGrid is the grid of a kernel with that many items of 8 elements per row.
func rowGrid(rows, items int) grid {
	return grid{x: rows, y: ceil(items, rowThreads), threads: rowThreads}
}

func (l *streamState) embed(o *kernels.Embed) error {
	if err := l.b.activation(o.Name(), "Out", &o.Out); err != nil {
		return err
	}
	columns := o.Out.Shape[1]
	return launch(l, o.Name(), embedKernel, rowGrid(o.Out.Shape[0], ceil(columns, 8)), &embedArgs{
		ids: address(&o.IDs), table: address(&o.Table), out: address(&o.Out),
		tableStride: int64(o.Table.Stride[0]), outStride: int64(o.Out.Stride[0]),
		vocabulary: int32(o.Table.Shape[0]), columns: int32(columns), tableType: int32(o.Table.DType),
		tableAligned: b2i(aligned(&o.Table)), outAligned: b2i(aligned(&o.Out)),
	})
}

// norms are the norm kernels, each with the maximum length of a row.
var norms = [...]struct {
	kernel           kernelID
	elements         int
	threads, perItem int
}{
	{normHead, 256, 256, 32},
	{normWarp, 1024, 256, 32},
	{norm256, 2048, 256, 256},
	{norm256Times2, 4096, 256, 256},
	{norm512Times3, maxNormElements, 512, 512},
}

const maxNormElements = 12288

// checkNorm checks a tensor whose rows are to be normed.
func (b *Backend) checkNorm(op string, x *kernels.Tensor) error {
	if d := x.Shape[x.Rank-1]; d > maxNormElements {
		return fmt.Errorf("cuda: %s: X is %v, want rows of at most %d elements", op, *x, maxNormElements)
	}
	return b.activation(op, "X", x)
}

func (l *streamState) norm(o *kernels.Norm) error {
	d := o.Weight.Shape[0]
	if err := l.b.checkNorm(o.Name(), &o.X); err != nil || d == 0 {
		return err
	}
	a := normArguments(o)
	items := o.X.Shape[0] * int(a.heads)
	a.items = int64(items)
	i := 0
	for norms[i].elements < d {
		i++
	}
	n := &norms[i]
	k, g := n.kernel, grid{x: ceil(items, n.threads/n.perItem), threads: n.threads}
	plain := l.b.plainNorm(o, &a)
	switch {
	case plain && d > 8*256:
		k, g = normFew512, grid{x: items, threads: 512}
	case plain:
		k, g = normFew256, grid{x: items, threads: 256}
	case k == norm256Times2 && items <= l.b.multiprocessors:
		k, g.threads = norm512, 512 // the same sums, with more threads per row and fewer blocks
	}
	return launch(l, o.Name(), k, g, &a)
}

// plainNorm reports whether the kernels for few rows compute a norm.
func (b *Backend) plainNorm(o *kernels.Norm, a *normArgs) bool {
	return o.Out.Shape[0] <= b.multiprocessors && o.Kind == kernels.RMS && o.Bias.None() && a.heads == 1 && a.d%8 == 0 && a.d <= 8*512 &&
		o.Weight.DType == o.Out.DType && a.aligned != 0 && a.weightAligned != 0
}

// normArguments returns the arguments of a norm, except items; X may be none.
func normArguments(o *kernels.Norm) normArgs {
	a := normArgs{
		x: address(&o.X), residual: address(&o.Residual), weight: address(&o.Weight), bias: address(&o.Bias), out: address(&o.Out),
		xRow: int64(o.X.Stride[0]), residualRow: int64(o.Residual.Stride[0]), outRow: int64(o.Out.Stride[0]),
		heads: 1, d: int32(o.Weight.Shape[0]), layer: b2i(o.Kind == kernels.Layer), weightType: int32(o.Weight.DType), biasType: int32(o.Bias.DType),
		eps:     o.Eps,
		aligned: b2i(aligned(&o.X, &o.Residual, &o.Out)), weightAligned: b2i(aligned(&o.Weight)), biasAligned: b2i(aligned(&o.Bias)),
	}
	if o.Out.Rank == 3 {
		a.heads = int32(o.Out.Shape[1])
		a.xHead, a.residualHead, a.outHead = int64(o.X.Stride[1]), int64(o.Residual.Stride[1]), int64(o.Out.Stride[1])
	}
	return a
}

func (l *streamState) clamp(o *kernels.Clamp) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	return launch(l, o.Name(), clampKernel, rowGrid(o.X.Shape[0], ceil(o.X.Shape[1], 8)), &clampArgs{
		x: address(&o.X), stride: int64(o.X.Stride[0]), columns: int32(o.X.Shape[1]), limit: o.Limit, aligned: b2i(aligned(&o.X)),
	})
}

func (l *streamState) siluMul(o *kernels.SiluMul) error {
	if err := l.b.activation(o.Name(), "Gate", &o.Gate); err != nil {
		return err
	}
	return launch(l, o.Name(), siluMul, rowGrid(o.Out.Shape[0], ceil(o.Out.Shape[1], 8)), &siluMulArgs{
		gate: address(&o.Gate), up: address(&o.Up), out: address(&o.Out),
		gateStride: int64(o.Gate.Stride[0]), upStride: int64(o.Up.Stride[0]), outStride: int64(o.Out.Stride[0]),
		columns: int32(o.Out.Shape[1]), aligned: b2i(aligned(&o.Gate, &o.Up, &o.Out)),
	})
}

func (l *streamState) gather(o *kernels.Gather) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	return launch(l, o.Name(), gatherKernel, rowGrid(o.Out.Shape[0], ceil(o.Out.Shape[1], 8)), &gatherArgs{
		x: address(&o.X), rows: address(&o.Rows), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		count: int32(o.X.Shape[0]), columns: int32(o.Out.Shape[1]), aligned: b2i(aligned(&o.X, &o.Out)),
	})
}

func (l *streamState) combine(o *kernels.Combine) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	a := combineArguments(o)
	return launch(l, o.Name(), combineKernel, rowGrid(o.Out.Shape[0], ceil(o.Out.Shape[1], 8)), &a)
}

func combineArguments(o *kernels.Combine) combineArgs {
	return combineArgs{
		x: address(&o.X), weights: address(&o.Weights), shared: address(&o.Shared), gate: address(&o.SharedGate), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), sharedStride: int64(o.Shared.Stride[0]), gateStride: int64(o.SharedGate.Stride[0]), outStride: int64(o.Out.Stride[0]),
		k: int32(o.Weights.Shape[1]), columns: int32(o.X.Shape[1]), aligned: b2i(aligned(&o.X, &o.Shared, &o.Out)),
	}
}

func (l *streamState) combineNorm(o *kernels.CombineNorm) error {
	d := o.X.Shape[1]
	if err := l.b.checkNorm(o.Name(), &o.X); err != nil || d == 0 {
		return err
	}
	norm := kernels.Norm{Kind: o.Kind, Residual: o.Residual, Weight: o.Weight, Bias: o.Bias, Eps: o.Eps, Out: o.Out}
	a := combineNormArgs{combine: combineArguments(&kernels.Combine{X: o.X, Weights: o.Weights, Shared: o.Shared, SharedGate: o.SharedGate}), norm: normArguments(&norm)}
	k, threads := combineNorm256, 256
	plain := l.b.plainNorm(&norm, &a.norm) && a.combine.aligned != 0
	switch {
	case plain && d > 8*256:
		k, threads = combineNormFew512, 512
	case plain:
		k = combineNormFew256
	case d > 8*512:
		k, threads = combineNorm512Times3, 512
	case d > 8*256 && a.combine.k <= 2:
		k, threads = combineNorm512Few, 512
	case d > 8*256:
		k, threads = combineNorm512, 512
	}
	return launch(l, o.Name(), k, grid{x: o.Out.Shape[0], threads: threads}, &a)
}

func (l *streamState) rope(o *kernels.RoPE) error {
	if err := l.b.activation(o.Name(), "Q", &o.Q); err != nil {
		return err
	}
	half, heads := o.Q.Shape[2]/2, o.Q.Shape[1]+o.K.Shape[1]
	if half == 0 {
		return nil
	}
	return launch(l, o.Name(), ropeKernel, rowGrid(o.Q.Shape[0], heads*ceil(half, 8)), &ropeArgs{
		q: address(&o.Q), k: address(&o.K), table: address(&o.Table), rows: address(&o.Rows),
		qRow: int64(o.Q.Stride[0]), qHead: int64(o.Q.Stride[1]), kRow: int64(o.K.Stride[0]), kHead: int64(o.K.Stride[1]),
		qHeads: int32(o.Q.Shape[1]), kHeads: int32(o.K.Shape[1]), half: int32(half), places: int32(o.Table.Shape[0]),
		aligned: b2i(half%8 == 0 && aligned(&o.Q, &o.K, &o.Table)),
	})
}

func (l *streamState) appendKV(o *kernels.AppendKV) error {
	if err := l.b.activation(o.Name(), "K", &o.K); err != nil {
		return err
	}
	heads, d := o.K.Shape[1], o.K.Shape[2]
	if d == 0 {
		return nil
	}
	return launch(l, o.Name(), appendKV, rowGrid(o.K.Shape[0], 2*heads*ceil(d, 8)), &appendKVArgs{
		k: address(&o.K), v: address(&o.V), cacheK: address(&o.CacheK), cacheV: address(&o.CacheV), slots: address(&o.Slots),
		kRow: int64(o.K.Stride[0]), kHead: int64(o.K.Stride[1]), vRow: int64(o.V.Stride[0]), vHead: int64(o.V.Stride[1]),
		ckBlock: int64(o.CacheK.Stride[0]), ckToken: int64(o.CacheK.Stride[1]), ckHead: int64(o.CacheK.Stride[2]),
		cvBlock: int64(o.CacheV.Stride[0]), cvToken: int64(o.CacheV.Stride[1]), cvHead: int64(o.CacheV.Stride[2]),
		heads: int32(heads), d: int32(d), blocks: int32(o.CacheK.Shape[0]), tokens: int32(o.CacheK.Shape[1]),
		aligned: b2i(aligned(&o.K, &o.V, &o.CacheK, &o.CacheV)),
	})
}

const (
	// ropeHeads is the number of heads that a thread of rope_append_kv computes at once.
	ropeHeads = 3
	// maxRopeElements is the maximum head size: sixteen lanes with sixteen elements each.
	maxRopeElements = 256
)

func (l *streamState) ropeAppendKV(o *kernels.RoPEAppendKV) error {
	if err := l.b.activation(o.Name(), "Q", &o.Q); err != nil {
		return err
	}
	half := o.Q.Shape[2] / 2
	if half > maxRopeElements/2 {
		return fmt.Errorf("cuda: %s: Q is %v, want heads of at most %d elements", o.Name(), o.Q, maxRopeElements)
	}
	if half == 0 {
		return nil
	}
	lanes := 1
	for 8*lanes < half {
		lanes *= 2
	}
	k := ropeAppendKV
	if !o.QNorm.None() {
		k = normRopeAppendKV
	}
	// If blocks for all heads of all rows can run at once, a thread computes one head.
	rows, heads := o.Q.Shape[0], o.Q.Shape[1]+2*o.K.Shape[1]
	g := rowGrid(rows, heads*lanes)
	whole := half%8 == 0 && aligned(&o.Q, &o.K, &o.V, &o.QNorm, &o.KNorm, &o.Table, &o.CacheK, &o.CacheV)
	switch {
	case rows*g.y > 4*l.b.multiprocessors:
		g.y = ceil(g.y, ropeHeads)
	case rows*g.y <= l.b.multiprocessors && whole && half == 64:
		k += ropeAppendKVFew - ropeAppendKV
	}
	return launch(l, o.Name(), k, g, &ropeAppendKVArgs{
		q: address(&o.Q), k: address(&o.K), v: address(&o.V), qWeight: address(&o.QNorm), kWeight: address(&o.KNorm),
		table: address(&o.Table), rows: address(&o.Rows), cacheK: address(&o.CacheK), cacheV: address(&o.CacheV), slots: address(&o.Slots),
		qRow: int64(o.Q.Stride[0]), qHead: int64(o.Q.Stride[1]), kRow: int64(o.K.Stride[0]), kHead: int64(o.K.Stride[1]),
		vRow: int64(o.V.Stride[0]), vHead: int64(o.V.Stride[1]),
		ckBlock: int64(o.CacheK.Stride[0]), ckToken: int64(o.CacheK.Stride[1]), ckHead: int64(o.CacheK.Stride[2]),
		cvBlock: int64(o.CacheV.Stride[0]), cvToken: int64(o.CacheV.Stride[1]), cvHead: int64(o.CacheV.Stride[2]),
		qHeads: int32(o.Q.Shape[1]), kHeads: int32(o.K.Shape[1]), half: int32(half), lanes: int32(lanes),
		qType: int32(o.QNorm.DType), kType: int32(o.KNorm.DType), places: int32(o.Table.Shape[0]),
		blocks: int32(o.CacheK.Shape[0]), tokens: int32(o.CacheK.Shape[1]), eps: o.Eps,
		aligned: b2i(whole),
	})
}
