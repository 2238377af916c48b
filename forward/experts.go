package forward

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Routing returns the router's result for the latest layer: expert ids [rows, K] I32 and their
// weights [rows, K] F32, for the step's first rows tokens.
func (m *Model) Routing(rows int) (ids, weights kernels.Tensor) {
	return m.ws.routing.ids.Slice(0, rows), m.ws.routing.weights.Slice(0, rows)
}

// PredictedRouting returns the expert ids [rows, K] I32 of the latest PredictNext.
func (m *Model) PredictedRouting(rows int) kernels.Tensor {
	return m.ws.routing.predictedIDs.Slice(0, rows)
}

// ExpertInput returns the latest layer's input of router and experts, [rows, H], for tokens r.
func (m *Model) ExpertInput(r Span) kernels.Tensor { return r.slice(m.ws.h, 1) }

// ExpertOutputs returns where the output of each (token, k) pair of tokens r goes that Combine
// reads, [rows*K, H]: for experts that are computed elsewhere.
func (m *Model) ExpertOutputs(r Span) kernels.Tensor {
	return r.slice(m.ws.experts.down, m.Config.TopK)
}

// MLP runs a dense layer's MLP on tokens r of the step.
func (m *Model) MLP(s device.Stream, layer int, r Span) error {
	w := &m.Weights.Layers[layer]
	gateUp, down := m.mlp(w.GateUp, w.Down, r, m.ws.x)
	return m.runMLP(s, layer, gateUp, down)
}

// SortByExpert sorts the (token, expert) pairs of tokens r by expert. It runs once per MoE
// layer and span, after PostAttention of every micro-batch in the span, unless the span is one
// micro-batch's whose PostAttention has sorted. Spans run one after another, each with its Experts
// and Combine.
func (m *Model) SortByExpert(s device.Stream, layer int, r Span) error {
	if m.unrouted {
		return fmt.Errorf("forward: sort by expert in layer %d, whose selection is left to Experts", layer)
	}
	at := &m.ws.routing
	m.runs = kernels.Tensor{}
	m.ops.sort = kernels.SortByExpert{IDs: r.slice(at.ids, 1), Offsets: at.offsets, Order: r.slice(at.order, m.Config.TopK)}
	return m.enqueueLayer(s, layer, &m.ops.sort)
}

// PredictNext runs the router of a later MoE layer on the current hidden state (the residual as
// PostAttention left it) of tokens [0, rows). Most of the experts that the later layer will
// select are thus known that much earlier. PredictedRouting returns the ids. The step's results
// do not depend on them, and they are not counted in Counts. It must run after PostAttention of
// every micro-batch, which must not leave the selection to Experts, and before the first wave of Experts, since it uses the
// memory of the router's scores and of the experts' outputs.
func (m *Model) PredictNext(s device.Stream, layer, rows int) error {
	c, w := m.Config, &m.Weights.Layers[layer]
	if c.Dense[layer] {
		return fmt.Errorf("forward: predict routing of layer %d, which has no router", layer)
	}
	if m.unrouted {
		return fmt.Errorf("forward: predict routing of layer %d before Experts of a layer whose selection is left to it", layer)
	}
	h, scores := m.ws.experts.down.Slice(0, rows), m.ws.routing.predictedScores.Slice(0, rows)
	err := m.norm(s, layer, kernels.Norm{
		Kind: c.Norm, X: m.ws.residual.Slice(0, rows), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h,
	})
	if err != nil {
		return err
	}
	bias := w.RouterBias
	if !bias.None() {
		bias = bias.Slice(0, c.Experts)
	}
	if err := m.matmul(s, layer, kernels.MatMul{X: h, W: w.Router.Slice(0, c.Experts), Bias: bias, Out: scores}); err != nil {
		return err
	}
	m.ops.route = kernels.Route{
		Logits: scores, Method: c.Route, Jitter: c.Jitter, IDs: m.PredictedRouting(rows), Weights: m.ws.routing.predictedWeights.Slice(0, rows),
	}
	return m.enqueueLayer(s, layer, &m.ops.route)
}

// SharedExpert runs the layer's shared expert on tokens r. It needs no routed expert, so it can
// run while those are fetched. Without a shared expert it does nothing.
func (m *Model) SharedExpert(s device.Stream, layer int, r Span) error {
	if m.Config.SharedWidth == 0 {
		return nil
	}
	gateUp, down := m.sharedMLP(layer, r)
	return m.runMLP(s, layer, gateUp, down)
}

// Experts runs one wave of the layer's routed experts on tokens r: the experts in list ([n]
// I32, each once), found through the slot table slots ([E] U64; only the entries of listed
// experts are read). All waves of a layer and span together must list every expert that a token
// was routed to.
func (m *Model) Experts(s device.Stream, layer int, r Span, slots, list kernels.Tensor, layout kernels.ExpertLayout) error {
	return m.ExpertColumns(s, layer, r, slots, list, layout, kernels.Columns{})
}

// ExpertColumns is Experts for a part of the listed experts' columns; the outputs are parts of sums. Of no
// columns it is Experts.
func (m *Model) ExpertColumns(s device.Stream, layer int, r Span, slots, list kernels.Tensor, layout kernels.ExpertLayout, c kernels.Columns) error {
	k := m.Config.TopK
	order, outputs := r.slice(m.ws.routing.order, k), r.slice(m.ws.experts.gateUp, k)
	if c != (kernels.Columns{}) {
		outputs = outputs.Narrow(1, c.First, c.End)
	}
	var runs kernels.Tensor
	if list.Shape[0] == m.Config.Experts && c == (kernels.Columns{}) {
		runs = m.runs
	}
	up, down := &m.ops.up, &m.ops.down
	up.ExpertGEMM = kernels.ExpertGEMM{
		X: r.slice(m.ws.h, 1), Offsets: m.ws.routing.offsets, Order: order, Slots: slots, Experts: list, Layout: layout, Out: outputs, Columns: c, Runs: runs,
	}
	var err error
	switch {
	case !m.unrouted:
		err = m.enqueueLayer(s, layer, up)
	case runs.None(): // not all experts at once
		if err = m.enqueueLayer(s, layer, &m.ops.route); err == nil {
			err = m.enqueueLayer(s, layer, up)
		}
	default:
		m.ops.routeUp.Route, m.ops.routeUp.Up = m.ops.route, *up
		err = m.enqueueLayer(s, layer, &m.ops.routeUp)
	}
	m.unrouted = false
	if err != nil {
		return err
	}
	down.ExpertGEMM = up.ExpertGEMM
	down.X, down.Out = outputs, r.slice(m.ws.experts.down, k)
	return m.enqueueLayer(s, layer, down)
}

// Combine ends an MoE layer for tokens r: it computes the weighted sum of the outputs of routed
// experts and shared expert. Unless the layer is the last, it also adds the sum to the residual
// and norms that for the next layer, whose Project reads it; until then no other stage may run
// on these tokens.
func (m *Model) Combine(s device.Stream, layer int, r Span) error {
	c := m.Config
	outputs, weights := r.slice(m.ws.experts.down, c.TopK), r.slice(m.ws.routing.weights, 1)
	var shared, gate kernels.Tensor
	if c.SharedWidth > 0 {
		shared, gate = r.slice(m.ws.mlp.shared, 1), r.slice(m.ws.routing.scores, 1).Narrow(1, c.Experts, c.Experts+1)
	}
	if layer == c.Layers-1 {
		// After the last layer, Head norms only the rows whose logits are needed.
		m.ops.combine = kernels.Combine{X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Out: r.slice(m.ws.x, 1)}
		return m.enqueueLayer(s, layer, &m.ops.combine)
	}
	next := &m.Weights.Layers[layer+1]
	m.ops.combined = kernels.CombineNorm{
		X: outputs, Weights: weights, Shared: shared, SharedGate: gate, Kind: c.Norm, Residual: r.slice(m.ws.residual, 1),
		Weight: next.InputNorm, Bias: next.InputNormBias, Eps: c.NormEps, Out: r.slice(m.ws.h, 1),
	}
	return m.enqueueLayer(s, layer, &m.ops.combined)
}

// sharedMLP returns the GEMMs of a layer's shared expert on tokens r.
func (m *Model) sharedMLP(layer int, r Span) (kernels.GatedMatMul, kernels.MatMul) {
	w := &m.Weights.Layers[layer]
	return m.mlp(w.SharedGateUp, w.SharedDown, r, m.ws.mlp.shared)
}

// mlp returns the GEMMs that compute down(silu(gate h) * up h) of tokens r into out, which is for all tokens.
func (m *Model) mlp(gateUp, down kernels.Tensor, r Span, out kernels.Tensor) (kernels.GatedMatMul, kernels.MatMul) {
	h, wide := r.slice(m.ws.h, 1), gateUp.Shape[0]/2
	both := kernels.New(m.ws.mlp.gateUp.Addr, m.ws.mlp.gateUp.DType, h.Shape[0], 2*wide)
	return kernels.GatedMatMul{X: h, W: gateUp, Out: both}, kernels.MatMul{X: both.Narrow(1, 0, wide), W: down, Out: r.slice(out, 1)}
}

// runMLP enqueues both GEMMs.
func (m *Model) runMLP(s device.Stream, layer int, gateUp kernels.GatedMatMul, down kernels.MatMul) error {
	m.ops.gated = gateUp
	if err := m.enqueueLayer(s, layer, &m.ops.gated); err != nil {
		return err
	}
	return m.matmul(s, layer, down)
}
