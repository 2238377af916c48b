package forward

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Logits returns logit rows r of the step, [r.Rows, V] F32, after Head: the model's, but for the tokens that masks ban.
func (m *Model) Logits(r Span) kernels.Tensor { return r.slice(m.ws.head.logits, 1) }

// Sampled returns the tokens sampled for logit rows r of the step, [r.Rows] I32, after Head.
func (m *Model) Sampled(r Span) kernels.Tensor { return r.slice(m.ws.head.sampled, 1) }

// LogProbs returns, for logit rows r of the step, the log-probabilities of the sampled tokens,
// [r.Rows] F32, and ids and log-probabilities of the most probable tokens, [r.Rows,
// TopLogProbs] I32 and F32, in descending order. It is valid after the Head of a batch that
// requests them.
func (m *Model) LogProbs(r Span) (sampled, topIDs, top kernels.Tensor) {
	return r.slice(m.ws.head.sampledLogProbs, 1), r.slice(m.ws.head.topIDs, 1), r.slice(m.ws.head.topLogProbs, 1)
}

// TargetResults are of targets T of a step, after Head: the log-probability of each as the token that
// follows its row, its rank (see kernels.LogProbs), and ids and log-probabilities of the most probable
// tokens there, in descending order.
type TargetResults struct {
	LogProbs    kernels.Tensor // [T] F32
	Ranks       kernels.Tensor // [T] I32
	TopIDs, Top kernels.Tensor // [T, TopLogProbs] I32 and F32
}

// Targets returns the results for targets r of the step.
func (m *Model) Targets(r Span) TargetResults {
	t := &m.ws.head.targets
	return TargetResults{r.slice(t.logProbs, 1), r.slice(t.ranks, 1), r.slice(t.topIDs, 1), r.slice(t.top, 1)}
}

// Head ends a step: it computes the log-probabilities of b's targets, then the logits of its logit rows,
// samples a token from each, and computes log-probabilities if b requests them. Penalties and biases are
// undone after sampling, so that Logits are the model's, except that those of a micro-batch are lost where
// a later one of the step has targets; masks are not, and log-probabilities are those of the tokens that they
// allow. Without logit rows and targets it does nothing.
func (m *Model) Head(s device.Stream, b *Batch) error {
	if err := m.compare(s, b); err != nil {
		return err
	}
	d := &b.Sampling
	if d.Rows == 0 {
		return nil
	}
	if err := m.unembed(s, b, d.LogitRows, d.Span); err != nil {
		return err
	}
	logits, adjusted := m.Logits(d.Span), !d.Adjust.IDs.None()
	if !d.Masks.Rows.None() {
		m.ops.mask = kernels.Mask{Logits: logits, Rows: d.Masks.Rows, Allowed: d.Masks.Allowed}
		if err := m.enqueue(s, "head", &m.ops.mask); err != nil {
			return err
		}
	}
	if adjusted {
		a := &d.Adjust
		m.ops.adjust = kernels.Adjust{
			Logits: logits, Starts: a.Starts, IDs: a.IDs, Seen: a.Seen, Bias: a.Bias,
			Repetition: a.Repetition, Presence: a.Presence, Frequency: a.Frequency, Saved: m.ws.head.saved.Slice(0, a.IDs.Shape[0]),
		}
		if err := m.enqueue(s, "head", &m.ops.adjust); err != nil {
			return err
		}
	}
	m.ops.sample = kernels.Sample{
		Logits: logits, Temperature: d.Temperature, Seeds: d.Seeds, Samples: d.Samples, Positions: d.Positions,
		TopK: d.TopK, TopP: d.TopP, MinP: d.MinP, Out: m.Sampled(d.Span),
	}
	if err := m.enqueue(s, "head", &m.ops.sample); err != nil {
		return err
	}
	if adjusted {
		m.ops.restore = kernels.Restore{Logits: logits, Starts: d.Adjust.Starts, IDs: d.Adjust.IDs, Saved: m.ops.adjust.Saved}
		if err := m.enqueue(s, "head", &m.ops.restore); err != nil {
			return err
		}
	}
	if !d.LogProbs {
		return nil
	}
	m.ops.probs = kernels.LogProbs{Logits: logits, Tokens: m.Sampled(d.Span)}
	m.ops.probs.Sampled, m.ops.probs.TopIDs, m.ops.probs.Top = m.LogProbs(d.Span)
	return m.enqueue(s, "head", &m.ops.probs)
}

// compare enqueues the log-probabilities of b's targets. The logits of all of them could take more memory
// than the model: at most MaxLogits rows of them exist at a time, in the place of those to sample from.
func (m *Model) compare(s device.Stream, b *Batch) error {
	t := &b.Targets
	for from := 0; from < t.Rows; from += m.Limits.MaxLogits {
		to := min(from+m.Limits.MaxLogits, t.Rows)
		at := Span{Rows: to - from}
		if err := m.unembed(s, b, t.RowIDs.Slice(from, to), at); err != nil {
			return err
		}
		out := m.Targets(Span{First: t.First + from, Rows: to - from})
		m.ops.probs = kernels.LogProbs{
			Logits: m.Logits(at), Tokens: t.IDs.Slice(from, to),
			Sampled: out.LogProbs, Ranks: out.Ranks, TopIDs: out.TopIDs, Top: out.Top,
		}
		if err := m.enqueue(s, "head", &m.ops.probs); err != nil {
			return err
		}
	}
	return nil
}

// unembed enqueues the final norm and the output projection of rows of b, which become these logit rows.
func (m *Model) unembed(s device.Stream, b *Batch, rows kernels.Tensor, at Span) error {
	c, w := m.Config, m.Weights
	x, residual := at.slice(m.ws.head.x, 1), at.slice(m.ws.head.residual, 1)
	for _, g := range [...]struct{ from, to kernels.Tensor }{{m.ws.x, x}, {m.ws.residual, residual}} {
		m.ops.gather = kernels.Gather{X: b.slice(g.from, 1), Rows: rows, Out: g.to}
		if err := m.enqueue(s, "head", &m.ops.gather); err != nil {
			return err
		}
	}
	m.ops.norm = kernels.Norm{Kind: c.Norm, X: x, Residual: residual, Weight: w.FinalNorm, Bias: w.FinalNormBias, Eps: c.NormEps, Out: x}
	if err := m.enqueue(s, "head", &m.ops.norm); err != nil {
		return err
	}
	m.ops.matmul = kernels.MatMul{X: x, W: w.Head, Bias: w.HeadBias, Out: m.Logits(at)}
	return m.enqueue(s, "head", &m.ops.matmul)
}
