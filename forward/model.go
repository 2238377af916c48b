package forward

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Model binds an architecture to weights, a backend and a workspace, and enqueues the stages of
// a step. It owns none of them. It is used by one goroutine at a time. Two steps in flight at
// once need two Models over the same Weights.
//
// Every stage method enqueues on s and returns. Its error means that the arguments are bad and
// that the stage is not, or not completely, enqueued.
type Model struct {
	Config  *models.Config
	Weights *models.Weights
	Limits  Limits

	backend kernels.Backend
	ws      workspace
	ops     arguments
	// runs is what the latest sorting of pairs by expert wrote to ws.routing.runs; none if it did not.
	runs kernels.Tensor
	// unrouted: PostAttention has left the router's selection, ops.route, to Experts.
	unrouted bool
}

// arguments are the argument structs of a model's operations, reused by every call so that they
// do not escape to the heap.
type arguments struct {
	embed        kernels.Embed
	norm         kernels.Norm
	matmul       kernels.MatMul
	clamp        kernels.Clamp
	rope         kernels.RoPE
	attend       kernels.RoPEAttention
	route        kernels.Route
	sort         kernels.SortByExpert
	up           kernels.ExpertUp
	down         kernels.ExpertDown
	combine      kernels.Combine
	combined     kernels.CombineNorm
	gated        kernels.GatedMatMul
	routerGateUp kernels.RouterGateUp
	routeDown    kernels.RouteDown
	routeUp      kernels.RouteExpertUp
	gather       kernels.Gather
	mask         kernels.Mask
	sample       kernels.Sample
	adjust       kernels.Adjust
	restore      kernels.Restore
	probs        kernels.LogProbs
}

// Backend is what the model's operations run on.
func (m *Model) Backend() kernels.Backend { return m.backend }

// NewModel binds c to weights, backend and workspace. ws has at least WorkspaceBytes and is
// aligned to 256 bytes. Before the first step the caller writes Constants into it.
func NewModel(c *models.Config, w *models.Weights, b kernels.Backend, ws device.Range, l Limits) (*Model, error) {
	if err := l.validate(c); err != nil {
		return nil, err
	}
	m := &Model{Config: c, Weights: w, Limits: l, backend: b, ws: newWorkspace(c, b.ActivationDType(), l, ws.Addr)}
	if ws.Bytes < m.ws.bytes {
		return nil, fmt.Errorf("forward: workspace of %d bytes, need %d", ws.Bytes, m.ws.bytes)
	}
	if ws.Addr%device.Alignment != 0 {
		return nil, fmt.Errorf("forward: workspace at %#x is not aligned to %d bytes", uint64(ws.Addr), device.Alignment)
	}
	return m, nil
}

// Constants calls put with the content that the workspace must have before the first step, zero
// expert counts and RoPE tables, in pieces of at most 1 MB with their addresses. data is valid
// during the call only.
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

// Lasting are the parts of the workspace whose content matters beyond a step: those of Constants.
func (m *Model) Lasting() (parts []device.Range) {
	for _, t := range []kernels.Tensor{m.ws.counts, m.ws.rope} {
		if t.Bytes() > 0 {
			parts = append(parts, t.Range())
		}
	}
	return parts
}

// Counts is the number of tokens routed to each expert since Constants were written: [layers,
// E] I64, zero in dense layers.
func (m *Model) Counts() kernels.Tensor { return m.ws.counts }

// Embed starts a step: it looks up the embeddings of b's tokens.
func (m *Model) Embed(s device.Stream, b *Batch) error {
	if err := m.checkBatch(b); err != nil {
		return err
	}
	m.ops.embed = kernels.Embed{IDs: b.IDs, Table: m.Weights.Embed, Out: b.slice(m.ws.residual, 1)}
	return m.enqueue(s, "embed", &m.ops.embed)
}

// WarmUp enqueues each dense GEMM of the model once for each number of rows, on any workspace
// content. It is for backends whose first GEMM of a shape must not be enqueued while a stream
// waits. No step may be running.
func (m *Model) WarmUp(s device.Stream, rows []int) error {
	seen := map[bool]bool{}
	for layer, dense := range m.Config.Dense {
		if seen[dense] {
			continue // its GEMMs have the shapes of an earlier layer's
		}
		seen[dense] = true
		w := &m.Weights.Layers[layer]
		for _, n := range rows {
			r := Span{Rows: n}
			x, h := r.slice(m.ws.x, 1), r.slice(m.ws.h, 1)
			err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.QKV, Bias: w.QKVBias, Out: r.slice(m.ws.attention.QKV, 1)})
			if err == nil {
				err = m.matmul(s, layer, kernels.MatMul{X: r.slice(m.ws.attention.Output, 1), W: w.O, Bias: w.OBias, Out: x})
			}
			switch {
			case err != nil:
			case dense:
				err = m.MLP(s, layer, r)
			default:
				if err = m.matmul(s, layer, kernels.MatMul{X: h, W: w.Router, Bias: w.RouterBias, Out: r.slice(m.ws.routing.scores, 1)}); err == nil {
					err = m.SharedExpert(s, layer, r)
				}
			}
			if err != nil {
				return err
			}
		}
	}
	for _, n := range rows {
		if n = min(n, m.Limits.MaxLogits); n > 0 {
			err := m.matmul(s, m.Config.Layers, kernels.MatMul{
				X: m.ws.head.x.Slice(0, n), W: m.Weights.Head, Bias: m.Weights.HeadBias, Out: m.ws.head.logits.Slice(0, n),
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// checkBatch checks b once per step, at its first stage.
func (m *Model) checkBatch(b *Batch) error {
	l, a, d, t := m.Limits, &b.Attention, &b.Sampling, &b.Targets
	switch {
	case b.First < 0 || b.Rows < 1 || b.First+b.Rows > l.MaxTokens:
		return fmt.Errorf("forward: micro-batch of tokens [%d, %d) in a step of at most %d", b.First, b.First+b.Rows, l.MaxTokens)
	case a.Seqs > l.MaxSeqs:
		return fmt.Errorf("forward: micro-batch of %d sequences exceeds the maximum of %d", a.Seqs, l.MaxSeqs)
	case d.First < 0 || d.First+d.Rows > l.MaxLogits:
		return fmt.Errorf("forward: logit rows [%d, %d) in a step of at most %d", d.First, d.First+d.Rows, l.MaxLogits)
	case t.First < 0 || t.First+t.Rows > l.MaxTokens:
		return fmt.Errorf("forward: targets [%d, %d) in a step of at most %d", t.First, t.First+t.Rows, l.MaxTokens)
	case a.MaxContext > l.MaxModelLen:
		return fmt.Errorf("forward: sequence of %d tokens exceeds the maximum of %d", a.MaxContext, l.MaxModelLen)
	case d.Adjust.IDs.Shape[0] > l.MaxAdjust:
		return fmt.Errorf("forward: %d adjusted tokens exceed the maximum of %d", d.Adjust.IDs.Shape[0], l.MaxAdjust)
	case (d.LogProbs || t.Rows > 0) && l.MaxTopLogProbs == 0:
		return errors.New("forward: log-probabilities requested, but the limit MaxTopLogProbs is 0")
	}
	return nil
}

// matmul enqueues a dense GEMM of a layer.
func (m *Model) matmul(s device.Stream, layer int, op kernels.MatMul) error {
	m.ops.matmul = op
	return m.enqueueLayer(s, layer, &m.ops.matmul)
}

// norm enqueues a norm of a layer.
func (m *Model) norm(s device.Stream, layer int, op kernels.Norm) error {
	m.ops.norm = op
	return m.enqueueLayer(s, layer, &m.ops.norm)
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
