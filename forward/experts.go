package forward

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Routing is what the router of the layer run last chose for the group's rows:
// expert ids [rows, K] I32 and their weights [rows, K] F32.
func (m *Model) Routing(rows int) (ids, weights kernels.Tensor) {
	return m.ws.routing.ids.Slice(0, rows), m.ws.routing.weights.Slice(0, rows)
}

// PredictRouting are the expert ids [rows, K] I32 of the last Guess.
func (m *Model) PredictRouting(rows int) kernels.Tensor {
	return m.ws.routing.predictedIDs.Slice(0, rows)
}

// MLP runs a dense layer's MLP on rows of the group.
func (m *Model) MLP(s device.Stream, layer int, r Span) error {
	w := &m.Weights.Layers[layer]
	return m.gated(s, layer, w.GateUp, w.Down, r.of(m.ws.h, 1), r.of(m.ws.x, 1))
}

// Group sorts the choices of rows of the group by expert. It comes once per MoE layer
// and span, after PostAttention of every micro-batch in it; spans come one after the
// other, each with its Experts and Combine.
func (m *Model) Group(s device.Stream, layer int, r Span) error {
	at := &m.ws.routing
	m.ops.group = kernels.Group{IDs: r.of(at.ids, 1), Offsets: at.offsets, Order: r.of(at.order, m.Config.TopK)}
	return m.enqueueLayer(s, layer, &m.ops.group)
}

// PredictNext lets the router of a later MoE layer choose for rows [0, rows) of the group
// as if today's hidden state, the residual as PostAttention left it, were what that
// layer will see: most of what it will choose is known that much earlier. Guessed has
// the ids; the step's results do not depend on it, and it counts no activations. It
// comes after PostAttention of every micro-batch and before the first wave of Experts,
// since it works in the room of the router's scores and of the experts' outputs.
func (m *Model) PredictNext(s device.Stream, layer, rows int) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	if c.Dense[layer] {
		return fmt.Errorf("forward: guess for layer %d, which has no router", layer)
	}
	h, scores := m.ws.experts.down.Slice(0, rows), m.ws.routing.scores.Slice(0, rows)
	err := m.norm(s, layer, kernels.Norm{
		Kind: c.Norm, X: m.ws.residual.Slice(0, rows), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h,
	})
	if err != nil {
		return err
	}
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.Router, Bias: w.RouterBias, Out: scores}); err != nil {
		return err
	}
	m.ops.route = kernels.Route{
		Logits: scores, Method: c.Route, Jitter: c.Jitter, IDs: m.PredictRouting(rows), Weights: m.ws.routing.predictedWeights.Slice(0, rows),
	}
	return m.enqueueLayer(s, layer, &m.ops.route)
}

// Shared runs the layer's shared expert on rows of the group. It needs no routed
// expert, so it can run while those are fetched. Without a shared expert it does
// nothing.
func (m *Model) Shared(s device.Stream, layer int, r Span) error {
	if m.Config.SharedWidth == 0 {
		return nil
	}
	w, h := &m.Weights.Layers[layer], r.of(m.ws.h, 1)
	if err := m.gated(s, layer, w.SharedGateUp, w.SharedDown, h, r.of(m.ws.mlp.shared, 1)); err != nil {
		return err
	}
	return m.matmul(s, layer, kernels.MatMul{X: h, W: w.SharedGate, Out: r.of(m.ws.mlp.sharedGate, 1)})
}

// Experts runs one wave of the layer's experts on rows of the group: those in list
// ([n] I32, each once) through the slot table slots ([E] U64, which is only read for
// those in list). All waves of a layer and span together list every expert that a row
// chose.
func (m *Model) Experts(s device.Stream, layer int, r Span, slots, list kernels.Tensor, layout kernels.ExpertLayout) error {
	k := m.Config.TopK
	order, outputs := r.of(m.ws.routing.order, k), r.of(m.ws.experts.up, k)
	up, down := &m.ops.up, &m.ops.down
	up.ExpertGEMM = kernels.ExpertGEMM{
		X: r.of(m.ws.h, 1), Offsets: m.ws.routing.offsets, Order: order, Slots: slots, Experts: list, Layout: layout, Out: outputs,
	}
	if err := m.enqueueLayer(s, layer, up); err != nil {
		return err
	}
	down.ExpertGEMM = up.ExpertGEMM
	down.X, down.Out = outputs, r.of(m.ws.experts.down, k)
	return m.enqueueLayer(s, layer, down)
}

// Combine ends an MoE layer for rows of the group: the weighted sum of the experts'
// outputs, and of the shared expert's. Unless the layer is the last, it also adds the sum
// to the residual and norms that for the next one, whose Project of these rows takes it up:
// until then no stage may come for them.
func (m *Model) Combine(s device.Stream, layer int, r Span) error {
	c := m.Config
	outputs, weights := r.of(m.ws.experts.down, c.TopK), r.of(m.ws.routing.weights, 1)
	var shared, gate kernels.Tensor
	if c.SharedWidth > 0 {
		shared, gate = r.of(m.ws.mlp.shared, 1), r.of(m.ws.mlp.sharedGate, 1)
	}
	if layer == c.Layers-1 {
		// Head norms, and only the rows whose logits are wanted.
		m.ops.combine = kernels.Combine{X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Out: r.of(m.ws.x, 1)}
		return m.enqueueLayer(s, layer, &m.ops.combine)
	}
	next := &m.Weights.Layers[layer+1]
	m.ops.combined = kernels.CombineNorm{
		X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Kind: c.Norm, Residual: r.of(m.ws.residual, 1),
		Weight: next.InputNorm, Bias: next.InputNormBias, Eps: c.NormEps, Out: r.of(m.ws.h, 1),
	}
	return m.enqueueLayer(s, layer, &m.ops.combined)
}

// gated computes down(silu(gate h) * up h) into out.
func (m *Model) gated(s device.Stream, layer int, gateUp, down, h, out kernels.Tensor) error {
	wide := gateUp.Shape[0] / 2
	both := kernels.New(m.ws.mlp.gateUp.Addr, m.ws.mlp.gateUp.DType, h.Shape[0], 2*wide)
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: gateUp, Out: both}); err != nil {
		return err
	}
	gate := both.Narrow(1, 0, wide)
	m.ops.silu = kernels.SiluMul{Gate: gate, Up: both.Narrow(1, wide, 2*wide), Out: gate}
	if err := m.enqueueLayer(s, layer, &m.ops.silu); err != nil {
		return err
	}
	return m.matmul(s, layer, kernels.MatMul{X: gate, W: down, Out: out})
}
