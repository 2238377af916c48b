package forward

import (
	"errors"
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Limits size a Model's workspace and its batches.
type Limits struct {
	// MaxRows is the most rows (tokens) of a group.
	MaxRows int
	// MaxSeqs is the most sequences of a micro-batch.
	MaxSeqs int
	// MaxLogits is the most rows of a group whose logits are wanted.
	MaxLogits int
	// MaxModelLen is the most tokens of a sequence.
	MaxModelLen int
	// BlockTokens is the tokens of a KV block.
	BlockTokens int
	// MaxAdjust is the most adjusted tokens of a group, 0: none may be.
	MaxAdjust int
	// MaxTopLogProbs is how many of the likeliest tokens come with the
	// log-probability of a drawn one, where the vocabulary has so many; 0: there are
	// no log-probabilities.
	MaxTopLogProbs int
}

// MaxBlocks is the most KV blocks of a sequence.
func (l Limits) MaxBlocks() int { return (l.MaxModelLen + l.BlockTokens - 1) / l.BlockTokens }

// TopLogProbs is how many likeliest tokens the model's log-probabilities come
// with: MaxTopLogProbs, at most the vocabulary.
func (l Limits) TopLogProbs(c *models.Config) int { return min(l.MaxTopLogProbs, c.Vocab) }

func (l Limits) validate(c *models.Config) error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"MaxRows", l.MaxRows},
		{"MaxSeqs", l.MaxSeqs},
		{"MaxLogits", l.MaxLogits},
		{"MaxModelLen", l.MaxModelLen},
		{"BlockTokens", l.BlockTokens},
	} {
		if f.value < 1 {
			return fmt.Errorf("forward: limit %s is %d, must be at least 1", f.name, f.value)
		}
	}
	if l.MaxAdjust < 0 || l.MaxAdjust > math.MaxInt32 || l.MaxTopLogProbs < 0 {
		return fmt.Errorf("forward: limits MaxAdjust %d and MaxTopLogProbs %d, must be 0 or more", l.MaxAdjust, l.MaxTopLogProbs)
	}
	if l.MaxModelLen > c.MaxPositions {
		return fmt.Errorf("forward: a length of %d tokens is more than the model's %d positions", l.MaxModelLen, c.MaxPositions)
	}
	return nil
}

// Span is rows [First, First+Rows) of a group: all of them, or a micro-batch's.
type Span struct{ First, Rows int }

// of is the span's part of a tensor with width rows for each row of the group.
func (r Span) of(t kernels.Tensor, width int) kernels.Tensor {
	return t.Slice(r.First*width, (r.First+r.Rows)*width)
}

// Model binds an architecture to weights, a backend and a workspace, and
// enqueues the stages of a step. It owns none of them. One goroutine uses it at
// a time. Two groups in flight at once need two Models over the same Weights.
//
// Every stage method enqueues on s and returns; its error means bad arguments,
// and that the stage is not, or not wholly, enqueued.
type Model struct {
	Config  *models.Config
	Weights *models.Weights
	Limits  Limits

	backend kernels.Backend
	ws      workspace

	// The argument structs are used again at every call, so that none escapes.
	embed    kernels.Embed
	norm     kernels.Norm
	matmul   kernels.MatMul
	clamp    kernels.Clamp
	rope     kernels.RoPE
	appends  kernels.AppendKV
	ropeKV   kernels.RoPEAppendKV
	attn     kernels.Attention
	route    kernels.Route
	group    kernels.Group
	up       kernels.ExpertUp
	down     kernels.ExpertDown
	combine  kernels.Combine
	combined kernels.CombineNorm
	silu     kernels.SiluMul
	gather   kernels.Gather
	sample   kernels.Sample
	adjust   kernels.Adjust
	restore  kernels.Restore
	probs    kernels.LogProbs
}

// workspace holds the activations of a group, at their full size. Its tensors
// have N = MaxRows rows unless said.
type workspace struct {
	counts kernels.Tensor // [layers, E] I64
	rope   kernels.Tensor // [T or 2T, D] F32, T = MaxModelLen

	residual kernels.Tensor // [N, H]
	x        kernels.Tensor // [N, H] output of the last sub-block, but where Combine has added it to residual
	h        kernels.Tensor // [N, H] normed input of the running sub-block, or of the next that Combine has left
	qkv      kernels.Tensor // [N, (heads + 2 kv heads) D]
	attn     kernels.Tensor // [N, heads D]

	router  kernels.Tensor // [N, E] F32
	ids     kernels.Tensor // [N, K] I32
	weights kernels.Tensor // [N, K] F32
	offsets kernels.Tensor // [E+1] I32
	order   kernels.Tensor // [N*K] I32
	up      kernels.Tensor // [N*K, I]
	down    kernels.Tensor // [N*K, H]

	guessIDs     kernels.Tensor // [N, K] I32
	guessWeights kernels.Tensor // [N, K] F32, which nobody reads

	mlp        kernels.Tensor // [N, 2 max(shared, dense)] gate and up, side by side
	shared     kernels.Tensor // [N, H]
	sharedGate kernels.Tensor // [N, 1] F32

	lastX, lastResidual kernels.Tensor // [MaxLogits, H]
	logits              kernels.Tensor // [MaxLogits, V] F32
	sampled             kernels.Tensor // [MaxLogits] I32
	saved               kernels.Tensor // [MaxAdjust] F32
	chosen              kernels.Tensor // [MaxLogits] F32
	topIDs              kernels.Tensor // [MaxLogits, MaxTopLogProbs] I32
	top                 kernels.Tensor // [MaxLogits, MaxTopLogProbs] F32

	bytes int64
}

func newWorkspace(c *models.Config, act kernels.DType, l Limits, base device.Addr) workspace {
	var w workspace
	place := func(t kernels.DType, shape ...int) kernels.Tensor {
		x := kernels.New(base+device.Addr(w.bytes), t, shape...)
		w.bytes += device.Align(x.Bytes())
		return x
	}
	n, d := l.MaxRows, c.HeadDim
	if c.Experts > 0 {
		w.counts = place(kernels.I64, c.Layers, c.Experts)
	}
	w.rope = place(kernels.F32, c.RoPE.Variants()*l.MaxModelLen, d)

	w.residual = place(act, n, c.Hidden)
	w.x = place(act, n, c.Hidden)
	w.h = place(act, n, c.Hidden)
	w.qkv = place(act, n, c.ProjectedWidth())
	w.attn = place(act, n, c.AttendedWidth())
	if c.MoELayers() > 0 {
		w.router = place(kernels.F32, n, c.Experts)
		w.ids = place(kernels.I32, n, c.TopK)
		w.weights = place(kernels.F32, n, c.TopK)
		w.offsets = place(kernels.I32, c.Experts+1)
		w.order = place(kernels.I32, n*c.TopK)
		w.up = place(act, n*c.TopK, c.ExpertWidth)
		w.down = place(act, n*c.TopK, c.Hidden)
		w.guessIDs = place(kernels.I32, n, c.TopK)
		w.guessWeights = place(kernels.F32, n, c.TopK)
	}
	wide := c.SharedWidth
	if c.MoELayers() < c.Layers {
		wide = max(wide, c.DenseWidth)
	}
	if wide > 0 {
		w.mlp = place(act, n, 2*wide)
	}
	if c.SharedWidth > 0 {
		w.shared = place(act, n, c.Hidden)
		w.sharedGate = place(kernels.F32, n, 1)
	}
	w.lastX = place(act, l.MaxLogits, c.Hidden)
	w.lastResidual = place(act, l.MaxLogits, c.Hidden)
	w.logits = place(kernels.F32, l.MaxLogits, c.Vocab)
	w.sampled = place(kernels.I32, l.MaxLogits)
	if l.MaxAdjust > 0 {
		w.saved = place(kernels.F32, l.MaxAdjust)
	}
	if n := l.TopLogProbs(c); n > 0 {
		w.chosen = place(kernels.F32, l.MaxLogits)
		w.topIDs = place(kernels.I32, l.MaxLogits, n)
		w.top = place(kernels.F32, l.MaxLogits, n)
	}
	return w
}

// WorkspaceBytes is the size of the workspace that NewModel needs for a backend of
// that activation type: activations of a group, RoPE tables and activation counts.
func WorkspaceBytes(c *models.Config, b interface{ ActivationDType() kernels.DType }, l Limits) int64 {
	return newWorkspace(c, b.ActivationDType(), l, 0).bytes
}

// NewModel binds c to its parts. ws has at least WorkspaceBytes, aligned to 256
// bytes. Before the first step the caller writes Constants into it.
func NewModel(c *models.Config, w *models.Weights, b kernels.Backend, ws device.Range, l Limits) (*Model, error) {
	if err := l.validate(c); err != nil {
		return nil, err
	}
	m := &Model{Config: c, Weights: w, Limits: l, backend: b, ws: newWorkspace(c, b.ActivationDType(), l, ws.Addr)}
	if ws.Bytes < m.ws.bytes {
		return nil, fmt.Errorf("forward: workspace of %d bytes, %d needed", ws.Bytes, m.ws.bytes)
	}
	if ws.Addr%device.Alignment != 0 {
		return nil, fmt.Errorf("forward: workspace at %#x is not aligned to %d bytes", uint64(ws.Addr), device.Alignment)
	}
	return m, nil
}

// Constants hands put what the workspace must hold before the first step: the
// activation counts at zero and the RoPE tables. It comes in pieces of at most
// 1 MB, with the place of each; data is valid during the call only.
func (m *Model) Constants(put func(dst device.Range, data []byte) error) error {
	const piece = 1 << 20
	buf := make([]byte, piece)
	if n := m.ws.counts.Bytes(); n > 0 {
		r := m.ws.counts.Range()
		for off := int64(0); off < n; off += piece {
			part := r.Slice(off, min(piece, n-off))
			if err := put(part, buf[:part.Bytes]); err != nil {
				return fmt.Errorf("forward: clear activation counts: %w", err)
			}
		}
	}
	c, r := m.Config, m.ws.rope.Range()
	row := int64(4 * c.HeadDim)
	rows := max(1, piece/int(row))
	buf = make([]byte, int64(rows)*row)
	freqs := c.RoPE.Frequencies(c.HeadDim)
	for from := 0; from < m.ws.rope.Shape[0]; from += rows {
		n := min(rows, m.ws.rope.Shape[0]-from)
		for i := range n {
			long, position := (from+i)/m.Limits.MaxModelLen, (from+i)%m.Limits.MaxModelLen
			writeRotation(buf[int64(i)*row:][:row], freqs[long], position)
		}
		if err := put(r.Slice(int64(from)*row, int64(n)*row), buf[:int64(n)*row]); err != nil {
			return fmt.Errorf("forward: write RoPE table: %w", err)
		}
	}
	return nil
}

// RopeRow is the row of the RoPE table for a token at the position; long chooses
// the long factors of longrope, which the whole sequence takes once it is longer
// than RoPE.LongAfter.
func (m *Model) RopeRow(position int, long bool) int32 {
	if long && m.Config.RoPE.Variants() > 1 {
		position += m.Limits.MaxModelLen
	}
	return int32(position)
}

// Routing is what the router of the layer run last chose for the group's rows:
// expert ids [rows, K] I32 and their weights [rows, K] F32.
func (m *Model) Routing(rows int) (ids, weights kernels.Tensor) {
	return m.ws.ids.Slice(0, rows), m.ws.weights.Slice(0, rows)
}

// Guessed are the expert ids [rows, K] I32 of the last Guess.
func (m *Model) Guessed(rows int) kernels.Tensor { return m.ws.guessIDs.Slice(0, rows) }

// Counts are the rows that chose each expert since Constants were written:
// [layers, E] I64, zero in dense layers.
func (m *Model) Counts() kernels.Tensor { return m.ws.counts }

// Logits of b's logit rows, [n, V] F32, after Head.
func (m *Model) Logits(b *Batch) kernels.Tensor {
	return m.ws.logits.Slice(b.FirstLogit, b.FirstLogit+b.Logits)
}

// Sampled are the tokens drawn for b's logit rows, [n] I32, after Head.
func (m *Model) Sampled(b *Batch) kernels.Tensor {
	return m.ws.sampled.Slice(b.FirstLogit, b.FirstLogit+b.Logits)
}

// LogProbs are the log-probabilities of the tokens drawn for b's logit rows, [n]
// F32, and ids and log-probabilities of the likeliest tokens of each, [n,
// TopLogProbs] I32 and F32, by falling probability; after the Head of a batch with
// LogProbs set.
func (m *Model) LogProbs(b *Batch) (chosen, topIDs, top kernels.Tensor) {
	from, to := b.FirstLogit, b.FirstLogit+b.Logits
	return m.ws.chosen.Slice(from, to), m.ws.topIDs.Slice(from, to), m.ws.top.Slice(from, to)
}

// Embed starts a step: the embeddings of b's tokens.
func (m *Model) Embed(s device.Stream, b *Batch) error {
	if err := m.fits(b); err != nil {
		return err
	}
	m.embed = kernels.Embed{IDs: b.IDs, Table: m.Weights.Embed, Out: m.rows(m.ws.residual, b)}
	return m.enqueue(s, "embed", &m.embed)
}

// PreAttention norms b's rows, unless Combine of the layer before has, projects them to
// queries, keys and values, rotates queries and keys, and appends keys and values to the
// layer's cache, whose views are [blocks, B, kv heads, D].
func (m *Model) PreAttention(s device.Stream, layer int, b *Batch, k, v kernels.Tensor) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	// The last operation takes the norms of heads on, unless something comes between.
	norms := c.QKNorm == models.HeadQKNorm && c.ClipQKV == 0
	if err := m.project(s, layer, b, norms); err != nil {
		return err
	}
	q, kk, vv := m.split(m.rows(m.ws.qkv, b))
	m.ropeKV = kernels.RoPEAppendKV{
		Q: m.heads(q), K: m.heads(kk), V: m.heads(vv), Table: m.ws.rope, Rows: b.RopeRows, CacheK: k, CacheV: v, Slots: b.Slots,
	}
	if norms {
		m.ropeKV.QNorm, m.ropeKV.KNorm, m.ropeKV.Eps = w.QNorm, w.KNorm, c.NormEps
	}
	return m.enqueueLayer(s, layer, &m.ropeKV)
}

// Project is PreAttention without the append: Projected has queries, keys and values.
func (m *Model) Project(s device.Stream, layer int, b *Batch) error {
	if err := m.project(s, layer, b, false); err != nil {
		return err
	}
	q, k, _ := m.split(m.rows(m.ws.qkv, b))
	m.rope = kernels.RoPE{Q: m.heads(q), K: m.heads(k), Table: m.ws.rope, Rows: b.RopeRows}
	return m.enqueueLayer(s, layer, &m.rope)
}

// project norms b's rows, unless Combine of the layer before has, and projects them to
// queries, keys and values, which are then to be rotated, and, where unnormed says so,
// first to be normed.
func (m *Model) project(s device.Stream, layer int, b *Batch, unnormed bool) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	h := m.rows(m.ws.h, b)
	if layer == 0 || c.Dense[layer-1] {
		m.norm = kernels.Norm{Kind: c.Norm, X: m.rows(m.ws.x, b), Residual: m.rows(m.ws.residual, b), Weight: w.InputNorm, Bias: w.InputNormBias, Eps: c.NormEps, Out: h}
		if layer == 0 {
			// Embed has left the hidden state in the residual; X is not set yet.
			m.norm.X, m.norm.Residual = m.norm.Residual, kernels.Tensor{}
		}
		if err := m.enqueueLayer(s, layer, &m.norm); err != nil {
			return err
		}
	}
	qkv := m.rows(m.ws.qkv, b)
	m.matmul = kernels.MatMul{X: h, W: w.QKV, Bias: w.QKVBias, Out: qkv}
	if err := m.enqueueLayer(s, layer, &m.matmul); err != nil {
		return err
	}
	q, kk, _ := m.split(qkv)
	if c.QKNorm != models.NoQKNorm && !unnormed {
		for _, x := range [...]struct{ x, w kernels.Tensor }{{q, w.QNorm}, {kk, w.KNorm}} {
			if c.QKNorm == models.HeadQKNorm {
				x.x = m.heads(x.x)
			}
			m.norm = kernels.Norm{Kind: kernels.RMS, X: x.x, Weight: x.w, Eps: c.NormEps, Out: x.x}
			if err := m.enqueueLayer(s, layer, &m.norm); err != nil {
				return err
			}
		}
	}
	if c.ClipQKV > 0 {
		m.clamp = kernels.Clamp{X: qkv, Limit: c.ClipQKV}
		return m.enqueueLayer(s, layer, &m.clamp)
	}
	return nil
}

// Projected are the queries, keys and values of b's rows, side by side and dense,
// [rows, ProjectedWidth], from Project on; PreAttention leaves only queries there as
// they are to be.
func (m *Model) Projected(b *Batch) kernels.Tensor { return m.rows(m.ws.qkv, b) }

// Attended is where PostAttention finds the attention of b's rows, dense, [rows,
// AttendedWidth].
func (m *Model) Attended(b *Batch) kernels.Tensor { return m.rows(m.ws.attn, b) }

// Elsewhere appends the keys and values of projected, a copy of Projected, to the
// layer's cache, and writes the rows' attention over the cache to attended, of the
// shape of Attended, by another backend than the model's. The tensors of b and all
// others lie in memory of that backend.
func (m *Model) Elsewhere(s device.Stream, on kernels.Backend, layer int, b *Batch, projected, attended, k, v kernels.Tensor) error {
	_, kk, vv := m.split(projected)
	m.appends = kernels.AppendKV{K: m.heads(kk), V: m.heads(vv), CacheK: k, CacheV: v, Slots: b.Slots}
	if err := enqueueLayer(on, s, layer, &m.appends); err != nil {
		return err
	}
	return m.attend(s, on, layer, b, projected, attended, k, v)
}

// Attention of b's rows over the layer's cache.
func (m *Model) Attention(s device.Stream, layer int, b *Batch, k, v kernels.Tensor) error {
	return m.attend(s, m.backend, layer, b, m.rows(m.ws.qkv, b), m.rows(m.ws.attn, b), k, v)
}

func (m *Model) attend(s device.Stream, on kernels.Backend, layer int, b *Batch, projected, attended, k, v kernels.Tensor) error {
	c := m.Config
	q, _, _ := m.split(projected)
	m.attn = kernels.Attention{
		Q: m.heads(q), CacheK: k, CacheV: v,
		SeqStarts: b.SeqStarts, ContextLens: b.ContextLens, BlockTable: b.BlockTable,
		Window: c.Windows[layer], Scale: float32(1 / math.Sqrt(float64(c.HeadDim))),
		MaxContext: b.MaxContext, MaxRows: b.MaxSeqRows, Stored: b.Stored, Seen: b.Seen,
		Out: m.heads(attended),
	}
	return enqueueLayer(on, s, layer, &m.attn)
}

// PostAttention projects b's attention output back, adds it to the residual and
// norms the sum. In an MoE layer it also lets the router choose.
func (m *Model) PostAttention(s device.Stream, layer int, b *Batch) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	x, h := m.rows(m.ws.x, b), m.rows(m.ws.h, b)
	m.matmul = kernels.MatMul{X: m.rows(m.ws.attn, b), W: w.O, Bias: w.OBias, Out: x}
	if err := m.enqueueLayer(s, layer, &m.matmul); err != nil {
		return err
	}
	m.norm = kernels.Norm{Kind: c.Norm, X: x, Residual: m.rows(m.ws.residual, b), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h}
	if err := m.enqueueLayer(s, layer, &m.norm); err != nil {
		return err
	}
	if c.Dense[layer] {
		return nil
	}
	logits := m.rows(m.ws.router, b)
	m.matmul = kernels.MatMul{X: h, W: w.Router, Bias: w.RouterBias, Out: logits}
	if err := m.enqueueLayer(s, layer, &m.matmul); err != nil {
		return err
	}
	m.route = kernels.Route{
		Logits: logits, Method: c.Route, Jitter: c.Jitter,
		IDs: m.rows(m.ws.ids, b), Weights: m.rows(m.ws.weights, b),
		Counts: kernels.New(m.ws.counts.Slice(layer, layer+1).Addr, kernels.I64, c.Experts),
	}
	return m.enqueueLayer(s, layer, &m.route)
}

// MLP runs a dense layer's MLP on rows of the group.
func (m *Model) MLP(s device.Stream, layer int, r Span) error {
	w := &m.Weights.Layers[layer]
	return m.gated(s, layer, r, w.GateUp, w.Down, m.ws.x)
}

// Group sorts the choices of rows of the group by expert. It comes once per MoE layer
// and span, after PostAttention of every micro-batch in it; spans come one after the
// other, each with its Experts and Combine.
func (m *Model) Group(s device.Stream, layer int, r Span) error {
	m.group = kernels.Group{IDs: r.of(m.ws.ids, 1), Offsets: m.ws.offsets, Order: r.of(m.ws.order, m.Config.TopK)}
	return m.enqueueLayer(s, layer, &m.group)
}

// Guess lets the router of a later MoE layer choose for rows [0, rows) of the group
// as if today's hidden state, the residual as PostAttention left it, were what that
// layer will see: most of what it will choose is known that much earlier. Guessed has
// the ids; the step's results do not depend on it, and it counts no activations. It
// comes after PostAttention of every micro-batch and before the first wave of Experts,
// since it works in the room of the router's scores and of the experts' outputs.
func (m *Model) Guess(s device.Stream, layer, rows int) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	if c.Dense[layer] {
		return fmt.Errorf("forward: guess for layer %d, which has no router", layer)
	}
	h, logits := m.ws.down.Slice(0, rows), m.ws.router.Slice(0, rows)
	m.norm = kernels.Norm{Kind: c.Norm, X: m.ws.residual.Slice(0, rows), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h}
	if err := m.enqueueLayer(s, layer, &m.norm); err != nil {
		return err
	}
	m.matmul = kernels.MatMul{X: h, W: w.Router, Bias: w.RouterBias, Out: logits}
	if err := m.enqueueLayer(s, layer, &m.matmul); err != nil {
		return err
	}
	m.route = kernels.Route{Logits: logits, Method: c.Route, Jitter: c.Jitter, IDs: m.Guessed(rows), Weights: m.ws.guessWeights.Slice(0, rows)}
	return m.enqueueLayer(s, layer, &m.route)
}

// Shared runs the layer's shared expert on rows of the group. It needs no routed
// expert, so it can run while those are fetched. Without a shared expert it does
// nothing.
func (m *Model) Shared(s device.Stream, layer int, r Span) error {
	if m.Config.SharedWidth == 0 {
		return nil
	}
	w := &m.Weights.Layers[layer]
	if err := m.gated(s, layer, r, w.SharedGateUp, w.SharedDown, m.ws.shared); err != nil {
		return err
	}
	m.matmul = kernels.MatMul{X: r.of(m.ws.h, 1), W: w.SharedGate, Out: r.of(m.ws.sharedGate, 1)}
	return m.enqueueLayer(s, layer, &m.matmul)
}

// Experts runs one wave of the layer's experts on rows of the group: those in list
// ([n] I32, each once) through the slot table slots ([E] U64, which is only read for
// those in list). All waves of a layer and span together list every expert that a row
// chose.
func (m *Model) Experts(s device.Stream, layer int, r Span, slots, list kernels.Tensor, layout kernels.ExpertLayout) error {
	k := m.Config.TopK
	order, up := r.of(m.ws.order, k), r.of(m.ws.up, k)
	m.up.ExpertProduct = kernels.ExpertProduct{X: r.of(m.ws.h, 1), Offsets: m.ws.offsets, Order: order, Slots: slots, Experts: list, Layout: layout, Out: up}
	if err := m.enqueueLayer(s, layer, &m.up); err != nil {
		return err
	}
	m.down.ExpertProduct = m.up.ExpertProduct
	m.down.X, m.down.Out = up, r.of(m.ws.down, k)
	return m.enqueueLayer(s, layer, &m.down)
}

// Combine ends an MoE layer for rows of the group: the weighted sum of the experts'
// outputs, and of the shared expert's. Unless the layer is the last, it also adds the sum
// to the residual and norms that for the next one, whose Project of these rows takes it up:
// until then no stage may come for them.
func (m *Model) Combine(s device.Stream, layer int, r Span) error {
	c := m.Config
	outputs, weights := r.of(m.ws.down, c.TopK), r.of(m.ws.weights, 1)
	var shared, gate kernels.Tensor
	if c.SharedWidth > 0 {
		shared, gate = r.of(m.ws.shared, 1), r.of(m.ws.sharedGate, 1)
	}
	if layer == c.Layers-1 {
		// Head norms, and only the rows whose logits are wanted.
		m.combine = kernels.Combine{X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Out: r.of(m.ws.x, 1)}
		return m.enqueueLayer(s, layer, &m.combine)
	}
	next := &m.Weights.Layers[layer+1]
	m.combined = kernels.CombineNorm{
		X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Kind: c.Norm, Residual: r.of(m.ws.residual, 1),
		Weight: next.InputNorm, Bias: next.InputNormBias, Eps: c.NormEps, Out: r.of(m.ws.h, 1),
	}
	return m.enqueueLayer(s, layer, &m.combined)
}

// Head ends a step: the logits of b's logit rows and a token drawn from each, with
// log-probabilities where b wants them. The logits stay what the model gave:
// penalties and biases are undone once the tokens are drawn. It does nothing where
// b has no logit rows.
func (m *Model) Head(s device.Stream, b *Batch) error {
	if b.Logits == 0 {
		return nil
	}
	c, w := m.Config, m.Weights
	from, to := b.FirstLogit, b.FirstLogit+b.Logits
	x, residual := m.ws.lastX.Slice(from, to), m.ws.lastResidual.Slice(from, to)
	for _, g := range [...]struct{ from, to kernels.Tensor }{{m.ws.x, x}, {m.ws.residual, residual}} {
		m.gather = kernels.Gather{X: m.rows(g.from, b), Rows: b.LogitRows, Out: g.to}
		if err := m.enqueue(s, "head", &m.gather); err != nil {
			return err
		}
	}
	m.norm = kernels.Norm{Kind: c.Norm, X: x, Residual: residual, Weight: w.FinalNorm, Bias: w.FinalNormBias, Eps: c.NormEps, Out: x}
	if err := m.enqueue(s, "head", &m.norm); err != nil {
		return err
	}
	m.matmul = kernels.MatMul{X: x, W: w.Head, Bias: w.HeadBias, Out: m.Logits(b)}
	if err := m.enqueue(s, "head", &m.matmul); err != nil {
		return err
	}
	adjusted := !b.AdjustIDs.None()
	if adjusted {
		m.adjust = kernels.Adjust{
			Logits: m.Logits(b), Starts: b.AdjustStarts, IDs: b.AdjustIDs, Seen: b.AdjustSeen, Bias: b.AdjustBias,
			Repetition: b.Repetition, Presence: b.Presence, Frequency: b.Frequency, Saved: m.ws.saved.Slice(0, b.AdjustIDs.Shape[0]),
		}
		if err := m.enqueue(s, "head", &m.adjust); err != nil {
			return err
		}
	}
	m.sample = kernels.Sample{
		Logits: m.Logits(b), Temperature: b.Temperature, Seeds: b.Seeds, Samples: b.Samples, Positions: b.DrawPositions,
		TopK: b.TopK, TopP: b.TopP, MinP: b.MinP, Out: m.Sampled(b),
	}
	if err := m.enqueue(s, "head", &m.sample); err != nil {
		return err
	}
	if adjusted {
		m.restore = kernels.Restore{Logits: m.Logits(b), Starts: b.AdjustStarts, IDs: b.AdjustIDs, Saved: m.adjust.Saved}
		if err := m.enqueue(s, "head", &m.restore); err != nil {
			return err
		}
	}
	if !b.LogProbs {
		return nil
	}
	m.probs = kernels.LogProbs{Logits: m.Logits(b), Tokens: m.Sampled(b)}
	m.probs.Chosen, m.probs.TopIDs, m.probs.Top = m.LogProbs(b)
	return m.enqueue(s, "head", &m.probs)
}

// Warm enqueues each dense product of the model once for each number of rows, over
// whatever the workspace holds: for backends whose first product of a shape must not
// come while a stream waits. No step may be running.
func (m *Model) Warm(s device.Stream, rows []int) error {
	product := func(layer int, x, w, bias, out kernels.Tensor) error {
		m.matmul = kernels.MatMul{X: x, W: w, Bias: bias, Out: out}
		return m.enqueueLayer(s, layer, &m.matmul)
	}
	seen := map[bool]bool{}
	for layer, dense := range m.Config.Dense {
		if seen[dense] {
			continue // its products have the shapes of an earlier layer's
		}
		seen[dense] = true
		w := &m.Weights.Layers[layer]
		for _, n := range rows {
			x, h := m.ws.x.Slice(0, n), m.ws.h.Slice(0, n)
			err := product(layer, h, w.QKV, w.QKVBias, m.ws.qkv.Slice(0, n))
			if err == nil {
				err = product(layer, m.ws.attn.Slice(0, n), w.O, w.OBias, x)
			}
			switch {
			case err != nil:
			case dense:
				err = m.MLP(s, layer, Span{Rows: n})
			default:
				if err = product(layer, h, w.Router, w.RouterBias, m.ws.router.Slice(0, n)); err == nil {
					err = m.Shared(s, layer, Span{Rows: n})
				}
			}
			if err != nil {
				return err
			}
		}
	}
	for _, n := range rows {
		if n = min(n, m.Limits.MaxLogits); n > 0 {
			if err := product(m.Config.Layers, m.ws.lastX.Slice(0, n), m.Weights.Head, m.Weights.HeadBias, m.ws.logits.Slice(0, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// gated computes down(silu(gate h) * up h) of the group's rows into out.
func (m *Model) gated(s device.Stream, layer int, r Span, gateUp, down, out kernels.Tensor) error {
	wide := gateUp.Shape[0] / 2
	h := r.of(m.ws.h, 1)
	both := kernels.New(m.ws.mlp.Addr, m.ws.mlp.DType, r.Rows, 2*wide)
	m.matmul = kernels.MatMul{X: h, W: gateUp, Out: both}
	if err := m.enqueueLayer(s, layer, &m.matmul); err != nil {
		return err
	}
	gate := both.Narrow(1, 0, wide)
	m.silu = kernels.SiluMul{Gate: gate, Up: both.Narrow(1, wide, 2*wide), Out: gate}
	if err := m.enqueueLayer(s, layer, &m.silu); err != nil {
		return err
	}
	m.matmul = kernels.MatMul{X: gate, W: down, Out: r.of(out, 1)}
	return m.enqueueLayer(s, layer, &m.matmul)
}

// rows is the part of a group's tensor that b covers.
func (m *Model) rows(t kernels.Tensor, b *Batch) kernels.Tensor {
	return t.Slice(b.First, b.First+b.Rows)
}

// split cuts rows of the joint projection into queries, keys and values.
func (m *Model) split(qkv kernels.Tensor) (q, k, v kernels.Tensor) {
	nq, nk := m.Config.Heads*m.Config.HeadDim, m.Config.KVHeads*m.Config.HeadDim
	return qkv.Narrow(1, 0, nq), qkv.Narrow(1, nq, nq+nk), qkv.Narrow(1, nq+nk, nq+2*nk)
}

// heads views [N, heads*D] as [N, heads, D], as Tensor.View does, but without
// its variable arguments, which allocate.
func (m *Model) heads(t kernels.Tensor) kernels.Tensor {
	d := m.Config.HeadDim
	return kernels.Tensor{
		Addr: t.Addr, DType: t.DType, Rank: 3,
		Shape:  [kernels.MaxRank]int{t.Shape[0], t.Shape[1] / d, d},
		Stride: [kernels.MaxRank]int{t.Stride[0], d, 1},
	}
}

// fits checks b once per step, at its first stage.
func (m *Model) fits(b *Batch) error {
	l := m.Limits
	switch {
	case b.First < 0 || b.Rows < 1 || b.First+b.Rows > l.MaxRows:
		return fmt.Errorf("forward: micro-batch of rows [%d, %d) in a group of at most %d", b.First, b.First+b.Rows, l.MaxRows)
	case b.Seqs > l.MaxSeqs:
		return fmt.Errorf("forward: micro-batch of %d sequences, at most %d fit", b.Seqs, l.MaxSeqs)
	case b.FirstLogit < 0 || b.FirstLogit+b.Logits > l.MaxLogits:
		return fmt.Errorf("forward: logit rows [%d, %d) in a group of at most %d", b.FirstLogit, b.FirstLogit+b.Logits, l.MaxLogits)
	case b.MaxContext > l.MaxModelLen:
		return fmt.Errorf("forward: sequence of %d tokens, at most %d fit", b.MaxContext, l.MaxModelLen)
	case b.AdjustIDs.Shape[0] > l.MaxAdjust:
		return fmt.Errorf("forward: %d adjusted tokens, at most %d fit", b.AdjustIDs.Shape[0], l.MaxAdjust)
	case b.LogProbs && l.MaxTopLogProbs == 0:
		return errors.New("forward: log-probabilities asked of a model whose limit MaxTopLogProbs is 0")
	}
	return nil
}

func (m *Model) enqueueLayer(s device.Stream, layer int, op kernels.Op) error {
	return enqueueLayer(m.backend, s, layer, op)
}

func enqueueLayer(on kernels.Backend, s device.Stream, layer int, op kernels.Op) error {
	if err := on.Enqueue(s, op); err != nil {
		return fmt.Errorf("forward: layer %d %s: %w", layer, op.Name(), err)
	}
	return nil
}

func (m *Model) enqueue(s device.Stream, stage string, op kernels.Op) error {
	if err := m.backend.Enqueue(s, op); err != nil {
		return fmt.Errorf("forward: %s %s: %w", stage, op.Name(), err)
	}
	return nil
}
