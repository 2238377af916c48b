package forward

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// KV is a paged KV cache.
type KV interface {
	// View returns a layer's keys and values, each [blocks, B, kv heads, D].
	View(layer int) (k, v kernels.Tensor)
}

// AttentionBuffers are the inputs and the output of attention for the tokens of a step. Both
// tensors are dense.
type AttentionBuffers struct {
	QKV    kernels.Tensor // [N, QKVWidth] queries, keys and values, side by side
	Output kernels.Tensor // [N, OutputWidth]
}

// NewAttentionBuffers returns buffers for a number of tokens, of type act, in the memory at
// base (a multiple of 256), which has room for Bytes.
func NewAttentionBuffers(a *models.Attention, act kernels.DType, rows int, base device.Addr) AttentionBuffers {
	b := AttentionBuffers{QKV: kernels.New(base, act, rows, a.QKVWidth())}
	b.Output = kernels.New(base+device.Addr(device.Align(b.QKV.Bytes())), act, rows, a.OutputWidth())
	return b
}

// Bytes is the memory of both tensors.
func (b AttentionBuffers) Bytes() int64 {
	return device.Align(b.QKV.Bytes()) + device.Align(b.Output.Bytes())
}

// Rows returns the part for the tokens in r.
func (b AttentionBuffers) Rows(r Span) AttentionBuffers {
	return AttentionBuffers{QKV: r.slice(b.QKV, 1), Output: r.slice(b.Output, 1)}
}

// Attention appends to one KV cache and computes attention over it with one backend. Its
// buffers lie where that backend reaches them, as the cache does: in GPU memory those of a
// Model (see Model.Attention), for attention on the CPU pinned host memory. Cache, buffers and
// the metadata passed to its methods lie in the memory of the backend's device; Attention owns
// none of them. It is used by one goroutine at a time.
type Attention struct {
	shape   *models.Attention
	backend kernels.Backend
	kv      KV
	buffers AttentionBuffers

	// The argument structs are fields, and reused by every call, so that they do not escape to
	// the heap.
	appendKV kernels.AppendKV
	compute  kernels.Attention
}

// NewAttention returns an Attention over kv with the given backend and buffers.
func NewAttention(shape *models.Attention, on kernels.Backend, kv KV, b AttentionBuffers) *Attention {
	return &Attention{shape: shape, backend: on, kv: kv, buffers: b}
}

// Attention returns an Attention over kv with the model's backend and the model's own buffers.
func (m *Model) Attention(kv KV) *Attention {
	return NewAttention(&m.Config.Attention, m.backend, kv, m.ws.attention)
}

// Buffers returns the buffers for all tokens.
func (a *Attention) Buffers() AttentionBuffers { return a.buffers }

// Append appends the keys (rotated) and values of tokens r, from the buffers, to the layer's KV
// cache.
func (a *Attention) Append(s device.Stream, layer int, r Span, b *AttentionMetadata) error {
	_, k, v := split(a.shape, r.slice(a.buffers.QKV, 1))
	a.appendKV = kernels.AppendKV{K: heads(a.shape, k), V: heads(a.shape, v), Slots: b.Slots}
	a.appendKV.CacheK, a.appendKV.CacheV = a.kv.View(layer)
	return enqueueLayer(a.backend, s, layer, &a.appendKV)
}

// Compute writes attention's output for tokens r to the buffers. The layer's KV cache must
// already hold the keys and values of these tokens.
func (a *Attention) Compute(s device.Stream, layer int, r Span, b *AttentionMetadata) error {
	a.compute = a.operation(layer, r, b)
	return enqueueLayer(a.backend, s, layer, &a.compute)
}

// operation is what Compute enqueues.
func (a *Attention) operation(layer int, r Span, b *AttentionMetadata) kernels.Attention {
	c := a.shape
	q, _, _ := split(c, r.slice(a.buffers.QKV, 1))
	op := kernels.Attention{
		Q:         heads(c, q),
		SeqStarts: b.SeqStarts, ContextLens: b.ContextLens, BlockTable: b.BlockTable,
		Window: c.Windows[layer], Scale: float32(1 / math.Sqrt(float64(c.HeadDim))),
		MaxContext: b.MaxContext, MaxSeqTokens: b.MaxSeqTokens, CachedTokens: b.CachedTokens, AttendedTokens: b.AttendedTokens,
		PastReady: b.PastReady, Out: heads(c, r.slice(a.buffers.Output, 1)),
	}
	op.CacheK, op.CacheV = a.kv.View(layer)
	return op
}

// Attend norms b's tokens (unless Combine of the previous layer did), computes their queries,
// keys and values, applies RoPE to queries and keys, appends keys and values to the layer's KV
// cache, and writes attention's output to the buffers. a is the model's own Attention. Afterwards
// the QKV buffer is undefined.
func (m *Model) Attend(s device.Stream, layer int, b *Batch, a *Attention) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	// RoPEAttention also norms the heads, unless clipping comes between projection and norm.
	norms := c.QKNorm == models.HeadQKNorm && c.ClipQKV == 0
	if err := m.project(s, layer, b, norms); err != nil {
		return err
	}
	_, k, v := split(&c.Attention, b.slice(m.ws.attention.QKV, 1))
	op := &m.ops.attend
	op.Attention = a.operation(layer, b.Span, &b.Attention)
	op.Append = kernels.RoPEAppendKV{
		Q: op.Attention.Q, K: heads(&c.Attention, k), V: heads(&c.Attention, v), Table: m.ws.rope, Rows: b.RopeRows,
		CacheK: op.Attention.CacheK, CacheV: op.Attention.CacheV, Slots: b.Attention.Slots,
	}
	if norms {
		op.Append.QNorm, op.Append.KNorm, op.Append.Eps = w.QNorm, w.KNorm, c.NormEps
	}
	return m.enqueueLayer(s, layer, op)
}

// Project is Attend without the append and attention: afterwards the QKV buffer has the rotated
// queries and keys, and the values.
func (m *Model) Project(s device.Stream, layer int, b *Batch) error {
	if err := m.project(s, layer, b, false); err != nil {
		return err
	}
	shape := &m.Config.Attention
	q, k, _ := split(shape, b.slice(m.ws.attention.QKV, 1))
	m.ops.rope = kernels.RoPE{Q: heads(shape, q), K: heads(shape, k), Table: m.ws.rope, Rows: b.RopeRows}
	return m.enqueueLayer(s, layer, &m.ops.rope)
}

// project norms b's tokens (unless Combine of the previous layer did) and computes queries,
// keys and values. RoPE is left to the caller, and so are the norms of the heads if
// skipHeadNorms is set.
func (m *Model) project(s device.Stream, layer int, b *Batch, skipHeadNorms bool) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	h := b.slice(m.ws.h, 1)
	if layer == 0 || c.Dense[layer-1] {
		op := kernels.Norm{
			Kind: c.Norm, X: b.slice(m.ws.x, 1), Residual: b.slice(m.ws.residual, 1), Weight: w.InputNorm, Bias: w.InputNormBias, Eps: c.NormEps, Out: h,
		}
		if layer == 0 {
			// Embed wrote the hidden state to the residual; X is not set yet.
			op.X, op.Residual = op.Residual, kernels.Tensor{}
		}
		if err := m.norm(s, layer, op); err != nil {
			return err
		}
	}
	qkv := b.slice(m.ws.attention.QKV, 1)
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.QKV, Bias: w.QKVBias, Out: qkv}); err != nil {
		return err
	}
	q, k, _ := split(&c.Attention, qkv)
	if c.QKNorm != models.NoQKNorm && !skipHeadNorms {
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

// Buffers returns the attention buffers of b's tokens: Project leaves queries, keys and values
// in QKV, and PostAttention reads attention's output from Output.
func (m *Model) Buffers(b *Batch) AttentionBuffers { return m.ws.attention.Rows(b.Span) }

// PostAttention applies the output projection to b's attention output, adds the result to the
// residual and norms the sum. In an MoE layer it also runs the router, and the gate of the shared
// expert, and with sorts does what SortByExpert does for b's tokens. inExperts, with sorts: the next Experts of the layer, for
// the same tokens, enqueues the router's selection, which it may run at the same time; nothing between them reads that.
func (m *Model) PostAttention(s device.Stream, layer int, b *Batch, sorts, inExperts bool) error {
	m.unrouted = false
	if err := m.projectOutput(s, layer, b); err != nil || m.Config.Dense[layer] {
		return err
	}
	if err := m.matmul(s, layer, m.router(layer, b)); err != nil {
		return err
	}
	m.ops.route = m.route(layer, b, sorts)
	m.runs, m.unrouted = m.ops.route.Runs, inExperts && !m.ops.route.Runs.None()
	if m.unrouted {
		return nil
	}
	return m.enqueueLayer(s, layer, &m.ops.route)
}

// PostAttentionShared does what PostAttention, which sorts, and SharedExpert do for b's tokens, with the
// same bits. The layer has a router and a shared expert, which may run at the same time.
func (m *Model) PostAttentionShared(s device.Stream, layer int, b *Batch) error {
	m.unrouted = false
	if m.Config.Dense[layer] || m.Config.SharedWidth == 0 {
		return fmt.Errorf("forward: layer %d has no router with a shared expert beside it", layer)
	}
	if err := m.projectOutput(s, layer, b); err != nil {
		return err
	}
	gateUp, down := m.sharedMLP(layer, b.Span)
	m.ops.routerGateUp = kernels.RouterGateUp{Router: m.router(layer, b), GateUp: gateUp}
	if err := m.enqueueLayer(s, layer, &m.ops.routerGateUp); err != nil {
		return err
	}
	m.ops.routeDown = kernels.RouteDown{Route: m.route(layer, b, true), Down: down}
	m.runs = m.ops.routeDown.Route.Runs
	return m.enqueueLayer(s, layer, &m.ops.routeDown)
}

// projectOutput applies the output projection, adds the result to the residual and norms the sum.
func (m *Model) projectOutput(s device.Stream, layer int, b *Batch) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	x := b.slice(m.ws.x, 1)
	if err := m.matmul(s, layer, kernels.MatMul{X: b.slice(m.ws.attention.Output, 1), W: w.O, Bias: w.OBias, Out: x}); err != nil {
		return err
	}
	return m.norm(s, layer, kernels.Norm{
		Kind: c.Norm, X: x, Residual: b.slice(m.ws.residual, 1), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: b.slice(m.ws.h, 1),
	})
}

// router computes the scores of experts, and of the gate of the shared one.
func (m *Model) router(layer int, b *Batch) kernels.MatMul {
	w := &m.Weights.Layers[layer]
	return kernels.MatMul{X: b.slice(m.ws.h, 1), W: w.Router, Bias: w.RouterBias, Out: b.slice(m.ws.routing.scores, 1)}
}

// route selects experts by the router's scores, and with sorts does what SortByExpert does.
func (m *Model) route(layer int, b *Batch, sorts bool) kernels.Route {
	c, at := m.Config, &m.ws.routing
	o := kernels.Route{
		Logits: b.slice(at.scores, 1).Narrow(1, 0, c.Experts), Method: c.Route, Jitter: c.Jitter,
		IDs: b.slice(at.ids, 1), Weights: b.slice(at.weights, 1),
		Counts: kernels.New(m.ws.counts.Slice(layer, layer+1).Addr, kernels.I64, c.Experts),
	}
	if sorts {
		o.Offsets, o.Order = at.offsets, b.slice(at.order, c.TopK)
		if kernels.ListsRuns(b.Rows, c.Experts, c.TopK) {
			o.Runs = at.runs.Slice(0, kernels.MostRuns(c.Experts, b.Rows*c.TopK))
		}
	}
	return o
}

// split returns the queries, keys and values in the rows of the QKV projection.
func split(a *models.Attention, qkv kernels.Tensor) (q, k, v kernels.Tensor) {
	nq, nk := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	return qkv.Narrow(1, 0, nq), qkv.Narrow(1, nq, nq+nk), qkv.Narrow(1, nq+nk, nq+2*nk)
}

// heads returns [N, heads*D] as [N, heads, D]. It is Tensor.View without variadic arguments,
// which would be allocated.
func heads(a *models.Attention, t kernels.Tensor) kernels.Tensor {
	d := a.HeadDim
	return kernels.Tensor{
		Addr: t.Addr, DType: t.DType, Rank: 3,
		Shape:  [kernels.MaxRank]int{t.Shape[0], t.Shape[1] / d, d},
		Stride: [kernels.MaxRank]int{t.Stride[0], d, 1},
	}
}
