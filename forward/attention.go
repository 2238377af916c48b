package forward

import (
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// KV is a paged cache of keys and values.
type KV interface {
	// View returns a layer's keys and values, [blocks, B, kv heads, D] each.
	View(layer int) (k, v kernels.Tensor)
}

// AttentionBuffers are what goes into the attention of a group's rows and what comes out
// of it, both dense.
type AttentionBuffers struct {
	Projected kernels.Tensor // [N, ProjectedWidth] queries, keys and values, side by side
	Attended  kernels.Tensor // [N, AttendedWidth]
}

// NewAttentionBuffers are those of so many rows of type act, in memory of Bytes at base, a
// multiple of 256.
func NewAttentionBuffers(a *models.Attention, act kernels.DType, rows int, base device.Addr) AttentionBuffers {
	b := AttentionBuffers{Projected: kernels.New(base, act, rows, a.ProjectedWidth())}
	b.Attended = kernels.New(base+device.Addr(device.Align(b.Projected.Bytes())), act, rows, a.AttendedWidth())
	return b
}

// Bytes is the memory of both.
func (b AttentionBuffers) Bytes() int64 {
	return device.Align(b.Projected.Bytes()) + device.Align(b.Attended.Bytes())
}

// Rows is the part of the rows in r.
func (b AttentionBuffers) Rows(r Span) AttentionBuffers {
	return AttentionBuffers{Projected: r.of(b.Projected, 1), Attended: r.of(b.Attended, 1)}
}

// Attention appends to one KV cache and attends over it, by one backend, in buffers that
// the backend reaches as it does the cache: on the compute device those of a Model (see
// Model.Attention), on the host pinned ones. Cache, buffers and the metadata of its calls
// lie where the backend computes. It owns none of them. One goroutine uses it at a time.
type Attention struct {
	shape   *models.Attention
	backend kernels.Backend
	kv      KV
	buffers AttentionBuffers

	// Used again at every call, so that none escapes.
	appendKV kernels.AppendKV
	attend   kernels.Attention
}

// NewAttention attends over kv by the backend, in b.
func NewAttention(shape *models.Attention, on kernels.Backend, kv KV, b AttentionBuffers) *Attention {
	return &Attention{shape: shape, backend: on, kv: kv, buffers: b}
}

// Attention attends over kv by the model's backend, in the model's own buffers.
func (m *Model) Attention(kv KV) *Attention {
	return NewAttention(&m.Config.Attention, m.backend, kv, m.ws.attention)
}

// Buffers are those of all rows.
func (a *Attention) Buffers() AttentionBuffers { return a.buffers }

// Append appends the keys and values of rows r of the buffers, rotated, to the layer's
// cache.
func (a *Attention) Append(s device.Stream, layer int, r Span, b *AttentionMetadata) error {
	_, k, v := split(a.shape, r.of(a.buffers.Projected, 1))
	a.appendKV = kernels.AppendKV{K: heads(a.shape, k), V: heads(a.shape, v), Slots: b.Slots}
	a.appendKV.CacheK, a.appendKV.CacheV = a.kv.View(layer)
	return enqueueLayer(a.backend, s, layer, &a.appendKV)
}

// Attend writes the attention of rows r of the buffers over the layer's cache, where their
// own keys and values are already.
func (a *Attention) Attend(s device.Stream, layer int, r Span, b *AttentionMetadata) error {
	c := a.shape
	q, _, _ := split(c, r.of(a.buffers.Projected, 1))
	a.attend = kernels.Attention{
		Q:         heads(c, q),
		SeqStarts: b.SeqStarts, ContextLens: b.ContextLens, BlockTable: b.BlockTable,
		Window: c.Windows[layer], Scale: float32(1 / math.Sqrt(float64(c.HeadDim))),
		MaxContext: b.MaxContext, MaxRows: b.MaxSeqRows, Stored: b.Stored, Seen: b.Seen,
		Out: heads(c, r.of(a.buffers.Attended, 1)),
	}
	a.attend.CacheK, a.attend.CacheV = a.kv.View(layer)
	return enqueueLayer(a.backend, s, layer, &a.attend)
}

// PreAttention norms b's rows, unless Combine of the layer before has, projects them to
// queries, keys and values, rotates queries and keys, and appends keys and values to the
// layer's cache, over which a attends: the model's own Attention. Of Projected only the
// queries are then as they are to be.
func (m *Model) PreAttention(s device.Stream, layer int, b *Batch, a *Attention) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	// The last operation takes the norms of heads on, unless something comes between.
	norms := c.QKNorm == models.HeadQKNorm && c.ClipQKV == 0
	if err := m.project(s, layer, b, norms); err != nil {
		return err
	}
	q, k, v := split(&c.Attention, b.of(m.ws.attention.Projected, 1))
	op := &m.ops.ropeKV
	*op = kernels.RoPEAppendKV{
		Q: heads(&c.Attention, q), K: heads(&c.Attention, k), V: heads(&c.Attention, v), Table: m.ws.rope, Rows: b.RopeRows, Slots: b.Attention.Slots,
	}
	op.CacheK, op.CacheV = a.kv.View(layer)
	if norms {
		op.QNorm, op.KNorm, op.Eps = w.QNorm, w.KNorm, c.NormEps
	}
	return m.enqueueLayer(s, layer, op)
}

// Project is PreAttention without the append: Projected has queries, keys and values.
func (m *Model) Project(s device.Stream, layer int, b *Batch) error {
	if err := m.project(s, layer, b, false); err != nil {
		return err
	}
	shape := &m.Config.Attention
	q, k, _ := split(shape, b.of(m.ws.attention.Projected, 1))
	m.ops.rope = kernels.RoPE{Q: heads(shape, q), K: heads(shape, k), Table: m.ws.rope, Rows: b.RopeRows}
	return m.enqueueLayer(s, layer, &m.ops.rope)
}

// project norms b's rows, unless Combine of the layer before has, and projects them to
// queries, keys and values, which are then to be rotated, and, where unnormed says so,
// first to be normed.
func (m *Model) project(s device.Stream, layer int, b *Batch, unnormed bool) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	h := b.of(m.ws.h, 1)
	if layer == 0 || c.Dense[layer-1] {
		op := kernels.Norm{
			Kind: c.Norm, X: b.of(m.ws.x, 1), Residual: b.of(m.ws.residual, 1), Weight: w.InputNorm, Bias: w.InputNormBias, Eps: c.NormEps, Out: h,
		}
		if layer == 0 {
			// Embed has left the hidden state in the residual; X is not set yet.
			op.X, op.Residual = op.Residual, kernels.Tensor{}
		}
		if err := m.norm(s, layer, op); err != nil {
			return err
		}
	}
	qkv := b.of(m.ws.attention.Projected, 1)
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.QKV, Bias: w.QKVBias, Out: qkv}); err != nil {
		return err
	}
	q, k, _ := split(&c.Attention, qkv)
	if c.QKNorm != models.NoQKNorm && !unnormed {
		for _, x := range [...]struct{ x, w kernels.Tensor }{{q, w.QNorm}, {k, w.KNorm}} {
			if c.QKNorm == models.HeadQKNorm {
				x.x = heads(&c.Attention, x.x)
			}
			if err := m.norm(s, layer, kernels.Norm{Kind: kernels.RMS, X: x.x, Weight: x.w, Eps: c.NormEps, Out: x.x}); err != nil {
				return err
			}
		}
	}
	if c.ClipQKV > 0 {
		m.ops.clamp = kernels.Clamp{X: qkv, Limit: c.ClipQKV}
		return m.enqueueLayer(s, layer, &m.ops.clamp)
	}
	return nil
}

// Buffers are those through which b's rows go to attention and come back: Projected has
// their queries, keys and values from Project on, and PostAttention finds its input in
// Attended.
func (m *Model) Buffers(b *Batch) AttentionBuffers { return m.ws.attention.Rows(b.Span) }

// PostAttention projects b's attention output back, adds it to the residual and
// norms the sum. In an MoE layer it also lets the router choose.
func (m *Model) PostAttention(s device.Stream, layer int, b *Batch) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	x, h := b.of(m.ws.x, 1), b.of(m.ws.h, 1)
	if err := m.matmul(s, layer, kernels.MatMul{X: b.of(m.ws.attention.Attended, 1), W: w.O, Bias: w.OBias, Out: x}); err != nil {
		return err
	}
	err := m.norm(s, layer, kernels.Norm{
		Kind: c.Norm, X: x, Residual: b.of(m.ws.residual, 1), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h,
	})
	if err != nil || c.Dense[layer] {
		return err
	}
	at := &m.ws.routing
	scores := b.of(at.scores, 1)
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.Router, Bias: w.RouterBias, Out: scores}); err != nil {
		return err
	}
	m.ops.route = kernels.Route{
		Logits: scores, Method: c.Route, Jitter: c.Jitter,
		IDs: b.of(at.ids, 1), Weights: b.of(at.weights, 1),
		Counts: kernels.New(m.ws.counts.Slice(layer, layer+1).Addr, kernels.I64, c.Experts),
	}
	return m.enqueueLayer(s, layer, &m.ops.route)
}

// split cuts rows of the joint projection into queries, keys and values.
func split(a *models.Attention, qkv kernels.Tensor) (q, k, v kernels.Tensor) {
	nq, nk := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	return qkv.Narrow(1, 0, nq), qkv.Narrow(1, nq, nq+nk), qkv.Narrow(1, nq+nk, nq+2*nk)
}

// heads views [N, heads*D] as [N, heads, D], as Tensor.View does, but without
// its variable arguments, which allocate.
func heads(a *models.Attention, t kernels.Tensor) kernels.Tensor {
	d := a.HeadDim
	return kernels.Tensor{
		Addr: t.Addr, DType: t.DType, Rank: 3,
		Shape:  [kernels.MaxRank]int{t.Shape[0], t.Shape[1] / d, d},
		Stride: [kernels.MaxRank]int{t.Stride[0], d, 1},
	}
}
