package forward

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// workspace holds the activations of a step, at their maximum size, and the data that a model
// keeps between steps. Its tensors have N = MaxTokens rows unless noted.
type workspace struct {
	counts kernels.Tensor // [layers, E] I64
	rope   kernels.Tensor // [T or 2T, D] F32, T = MaxModelLen

	residual kernels.Tensor // [N, H]
	x        kernels.Tensor // [N, H] output of the latest sub-block, unless Combine already added it to residual
	h        kernels.Tensor // [N, H] normed input of the current sub-block, or of the next if Combine computed it

	attention AttentionBuffers
	routing   routingBuffers
	experts   expertBuffers
	mlp       mlpBuffers
	head      headBuffers

	bytes int64
}

// routingBuffers are a router's scores and results; none if no layer has experts.
type routingBuffers struct {
	scores  kernels.Tensor // [N, E] F32, or with a shared expert [N, E+1]: the last column is its gate's
	ids     kernels.Tensor // [N, K] I32
	weights kernels.Tensor // [N, K] F32
	offsets kernels.Tensor // [E+1] I32
	order   kernels.Tensor // [N*K] I32
	runs    kernels.Tensor // [MostRuns(E, MaxRunRows*K), RunColumns] I32

	predictedScores  kernels.Tensor // [N, E] F32
	predictedIDs     kernels.Tensor // [N, K] I32
	predictedWeights kernels.Tensor // [N, K] F32, written by PredictNext and never read
}

// expertBuffers are the outputs of the routed experts' GEMMs; none if no layer has experts.
type expertBuffers struct {
	gateUp kernels.Tensor // [N*K, I]
	down   kernels.Tensor // [N*K, H]
}

// mlpBuffers are for dense layers and for the shared expert.
type mlpBuffers struct {
	gateUp kernels.Tensor // [N, 2 max(shared, dense)] gate and up, side by side
	shared kernels.Tensor // [N, H]
}

// headBuffers are for logit rows: L = MaxLogits.
type headBuffers struct {
	x, residual     kernels.Tensor // [L, H]
	logits          kernels.Tensor // [L, V] F32
	sampled         kernels.Tensor // [L] I32
	saved           kernels.Tensor // [MaxAdjust] F32
	sampledLogProbs kernels.Tensor // [L] F32
	topIDs          kernels.Tensor // [L, MaxTopLogProbs] I32
	topLogProbs     kernels.Tensor // [L, MaxTopLogProbs] F32

	targets targetBuffers
}

// targetBuffers are the results for targets; none if MaxTopLogProbs is 0.
type targetBuffers struct {
	logProbs kernels.Tensor // [N] F32
	ranks    kernels.Tensor // [N] I32
	topIDs   kernels.Tensor // [N, MaxTopLogProbs] I32
	top      kernels.Tensor // [N, MaxTopLogProbs] F32
}

func newWorkspace(c *models.Config, act kernels.DType, l Limits, base device.Addr) workspace {
	var w workspace
	place := func(t kernels.DType, shape ...int) kernels.Tensor {
		x := kernels.New(base+device.Addr(w.bytes), t, shape...)
		w.bytes += device.Align(x.Bytes())
		return x
	}
	n, d := l.MaxTokens, c.HeadDim
	if c.Experts > 0 {
		w.counts = place(kernels.I64, c.Layers, c.Experts)
	}
	w.rope = place(kernels.F32, c.RoPE.Variants()*l.MaxModelLen, d)

	w.residual = place(act, n, c.Hidden)
	w.x = place(act, n, c.Hidden)
	w.h = place(act, n, c.Hidden)
	w.attention = NewAttentionBuffers(&c.Attention, act, n, base+device.Addr(w.bytes))
	w.bytes += w.attention.Bytes()
	if c.MoELayers() > 0 {
		w.routing.scores = place(kernels.F32, n, c.Experts)
		w.routing.predictedScores = w.routing.scores
		if c.SharedWidth > 0 { // its gate's scores last until the end of the layer
			w.routing.scores = place(kernels.F32, n, c.Experts+1)
		}
		w.routing.ids = place(kernels.I32, n, c.TopK)
		w.routing.weights = place(kernels.F32, n, c.TopK)
		w.routing.offsets = place(kernels.I32, c.Experts+1)
		w.routing.order = place(kernels.I32, n*c.TopK)
		w.routing.runs = place(kernels.I32, kernels.MostRuns(c.Experts, kernels.MaxRunRows*c.TopK), kernels.RunColumns)
		w.experts.gateUp = place(act, n*c.TopK, c.ExpertWidth)
		w.experts.down = place(act, n*c.TopK, c.Hidden)
		w.routing.predictedIDs = place(kernels.I32, n, c.TopK)
		w.routing.predictedWeights = place(kernels.F32, n, c.TopK)
	}
	wide := c.SharedWidth
	if c.MoELayers() < c.Layers {
		wide = max(wide, c.DenseWidth)
	}
	if wide > 0 {
		w.mlp.gateUp = place(act, n, 2*wide)
	}
	if c.SharedWidth > 0 {
		w.mlp.shared = place(act, n, c.Hidden)
	}
	w.head.x = place(act, l.MaxLogits, c.Hidden)
	w.head.residual = place(act, l.MaxLogits, c.Hidden)
	w.head.logits = place(kernels.F32, l.MaxLogits, c.Vocab)
	w.head.sampled = place(kernels.I32, l.MaxLogits)
	if l.MaxAdjust > 0 {
		w.head.saved = place(kernels.F32, l.MaxAdjust)
	}
	if n := l.TopLogProbs(c); n > 0 {
		w.head.sampledLogProbs = place(kernels.F32, l.MaxLogits)
		w.head.topIDs = place(kernels.I32, l.MaxLogits, n)
		w.head.topLogProbs = place(kernels.F32, l.MaxLogits, n)
		t := &w.head.targets
		t.logProbs, t.ranks = place(kernels.F32, l.MaxTokens), place(kernels.I32, l.MaxTokens)
		t.topIDs, t.top = place(kernels.I32, l.MaxTokens, n), place(kernels.F32, l.MaxTokens, n)
	}
	return w
}

// WorkspaceBytes is the size of the workspace that NewModel needs for a backend of that
// activation type: the activations of a step, RoPE tables and expert counts.
func WorkspaceBytes(c *models.Config, b interface{ ActivationDType() kernels.DType }, l Limits) int64 {
	return newWorkspace(c, b.ActivationDType(), l, 0).bytes
}
