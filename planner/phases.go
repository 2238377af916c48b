package planner

import (
	"math"
	"strings"
)

// Bound names what limits a phase or a step.
type Bound string

// The bounds.
const (
	BoundGPUMemory  Bound = "gpu-memory"
	BoundGPUCompute Bound = "gpu-compute"
	BoundAttention  Bound = "gpu-attention"
	BoundCPUMemory  Bound = "cpu-memory"
	BoundCPU        Bound = "cpu-compute"
	BoundHostLink   Bound = "host-link"
	BoundPeerLink   Bound = "peer-link"
	BoundD2HLink    Bound = "d2h-link"
	// BoundOverhead: micro-batches wait for each other, since too few are in flight to
	// keep GPU, CPU and links busy.
	BoundOverhead Bound = "overhead"
	// BoundOnDemandFetch: the copies of routed experts cannot start before the router is
	// done.
	BoundOnDemandFetch Bound = "on-demand-fetch"
)

// Text is the bound in the words of a report.
func (b Bound) Text() string {
	switch b {
	case BoundGPUCompute:
		return "GPU compute (GEMM)"
	case BoundD2HLink:
		return "D2H link"
	case BoundOverhead:
		return "synchronization and launch overhead"
	case BoundOnDemandFetch:
		return "on-demand expert fetch"
	}
	text := strings.ReplaceAll(string(b), "-", " ")
	return strings.NewReplacer("gpu", "GPU", "cpu", "CPU").Replace(text)
}

// Phase is one kind of work of a step on the compute GPU, over all layers.
type Phase struct {
	Name         string
	Bytes, Flops float64
	Seconds      float64
	Bound        Bound
}

// The phases of a step, in order.
const (
	phaseQKV = iota
	phaseOutput
	phaseRouter
	phaseElementwise
	phaseShared
	phaseDense
	phaseUp
	phaseDown
	phaseAttention
	phaseHead
	phaseFixed
	phaseCopies
	phaseCount
)

var phaseNames = [phaseCount]string{
	"qkv", "output projection", "router", "elementwise", "shared expert", "dense mlp",
	"experts gate/up", "experts down", "attention", "lm head", "fixed costs", "copies into GPU memory",
}

// LongContext is the tokens of a sequence from which Hardware.GPULongAttentionFlops is the rate of
// attention.
const LongContext = 2048

// work is what a step has to do, by phase.
type work [phaseCount]phaseWork

// phaseWork is the work of a phase; long: its sequences have LongContext tokens or more.
type phaseWork struct {
	bytes, flops float64
	long         bool
}

// stepShape is what the work of a step depends on.
type stepShape struct {
	// tokens go through the layers, logits of them through the output layer.
	tokens, logits float64
	// pairs of a query and a key; the KV cache of kvTokens is read.
	pairs, kvTokens float64
	// context is the tokens of a sequence behind the step.
	context float64
	// projections and experts are the numbers of equal parts in which the tokens go
	// through the attention projections, and through experts (routed and shared).
	projections, experts float64
	// hostAttention: the CPU computes attention.
	hostAttention bool
	// sequences of the step, and the tokens of each in it; 1: it decodes.
	sequences, prompt float64
	// enqueued: the host enqueues every kernel by itself.
	enqueued bool
	// touched is the experts of a layer that have rows; 0: the expected number.
	touched float64
}

// work returns the bytes and flops of a step over all layers. Each phase reads its
// weights once per part. For 16 bit, one part, and N tokens with c tokens of context
// the formulas are, per layer (h hidden, q = heads * head dim, v = 2 * kv heads *
// head dim, I and S the widths of routed and shared experts, V the vocabulary, K
// the KV bytes per token, a the distinct experts):
//
//	qkv          2h(q+v) + 2N(h+q+v)                     2Nh(q+v)
//	output       2qh + 2N(h+q)                           2Nqh
//	router       2hE + 2Nh + 4NE                         2NhE
//	elementwise  2N(2h + 2(q+v) + 4h + (k+2)h)           -
//	shared       6hS + 2N(2h+2S)                         6NhS
//	gate/up      4ahI + 2Nk(h+I)                         4NkhI
//	down         2ahI + 2Nk(h+I)                         2NkhI
//
// and once:
//
//	attention    NcK + 4LNq                              4NcqL
//	head         2hV + 2Nh + 4NV                         2NhV
func (m *Model) work(s stepShape) work {
	w, a := float64(m.WeightBytes), float64(m.ActivationBytes)
	h, q, v := float64(m.Hidden), float64(m.Heads*m.HeadDim), float64(2*m.KVHeads*m.HeadDim)
	e, k, width := float64(m.Experts), float64(m.TopK), float64(m.ExpertWidth)
	layers, moe, dense := float64(m.Layers), float64(m.MoELayers()), float64(m.DenseLayers)
	n := s.tokens
	var x work
	set := func(phase int, times, bytes, flops float64) {
		x[phase].bytes, x[phase].flops = times*bytes, times*flops
	}
	set(phaseQKV, layers, s.projections*w*h*(q+v)+a*n*(h+q+v), 2*n*h*(q+v))
	set(phaseOutput, layers, s.projections*w*q*h+a*n*(h+q), 2*n*q*h)
	set(phaseRouter, moe, w*h*e+a*n*h+4*n*e, 2*n*h*e)
	set(phaseElementwise, layers, a*n*(2*h+2*(q+v)+4*h+(k+2)*h), 0)
	if m.SharedWidth > 0 {
		shared := float64(m.SharedWidth)
		set(phaseShared, moe, s.experts*3*w*h*shared+a*n*(2*h+2*shared), 6*n*h*shared)
	}
	if m.DenseLayers > 0 {
		wide := float64(m.DenseWidth)
		set(phaseDense, dense, s.experts*3*w*h*wide+a*n*(2*h+2*wide), 6*n*h*wide)
	}
	touched := s.experts * m.used(&s)
	set(phaseUp, moe, 2*w*touched*h*width+a*n*k*(h+width), 4*n*k*h*width)
	set(phaseDown, moe, w*touched*h*width+a*n*k*(h+width), 2*n*k*h*width)
	if !s.hostAttention {
		set(phaseAttention, 1, s.kvTokens*float64(m.KVBytesPerToken())+2*a*layers*n*q, 4*s.pairs*q*layers)
		x[phaseAttention].long = s.context >= LongContext
	}
	set(phaseHead, 1, w*h*float64(m.Vocab)+a*s.logits*h+4*s.logits*float64(m.Vocab), 2*s.logits*h*float64(m.Vocab))
	return x
}

// seconds of a phase, and what bounds it.
func (h *Hardware) seconds(phase int, x phaseWork) (float64, Bound) {
	rate, bound := h.GPUFlops, BoundGPUCompute
	if phase == phaseAttention {
		rate, bound = h.GPUAttentionFlops, BoundAttention
		if x.long && h.GPULongAttentionFlops > 0 {
			rate = h.GPULongAttentionFlops
		}
	}
	if t := x.flops / rate; t > x.bytes/h.GPUMemoryRate {
		return t, bound
	}
	return x.bytes / h.GPUMemoryRate, BoundGPUMemory
}

// stepTimes are the phases of a step with their times, those without work included.
type stepTimes [phaseCount]Phase

// roofline is the time of a step whose phases are each at their bound.
func (h *Hardware) roofline(m *Model, s stepShape) (t stepTimes) {
	for i, x := range m.work(s) {
		seconds, bound := h.seconds(i, x)
		t[i] = Phase{Name: phaseNames[i], Bytes: x.bytes, Flops: x.flops, Seconds: seconds, Bound: bound}
	}
	return t
}

// times is the time of a step: by what was measured of the GPU's kernels, otherwise the roofline.
func (h *Hardware) times(m *Model, s stepShape) stepTimes {
	t := h.roofline(m, s)
	if h.Compute == nil {
		return t
	}
	for i := range t {
		t[i].Seconds = 0
	}
	for _, x := range m.terms(&s) {
		t[x.phase].Seconds += x.Times * h.Compute.value(x.Cost, x.At)
	}
	t[phaseFixed].Bound = BoundOverhead
	return t
}

// total is the time of all phases, in seconds.
func (t *stepTimes) total() float64 {
	sum := 0.0
	for i := range t {
		sum += t[i].Seconds
	}
	return sum
}

// list is the phases that take time, and the bound of the largest part of it.
func (t *stepTimes) list() ([]Phase, Bound) {
	list := make([]Phase, 0, phaseCount)
	by := map[Bound]float64{}
	for _, x := range t {
		if x.Seconds == 0 {
			continue
		}
		list = append(list, x)
		by[x.Bound] += x.Seconds
	}
	main := BoundGPUMemory
	for _, b := range []Bound{BoundGPUCompute, BoundAttention, BoundOverhead} {
		if by[b] > by[main] {
			main = b
		}
	}
	return list, main
}

// RooflineCase is one cell of a table of rooflines: a step that decodes a batch and whose
// copies overlap with all of its compute.
type RooflineCase struct {
	// Batch is the number of sequences, each with Context tokens before its new one.
	Batch   int
	Context float64
	// Groups is the number of parts in which the batch goes through projections and
	// experts: 1 where experts run once a layer, the number of micro-batches where they
	// run per micro-batch. Default: 1.
	Groups int
	// Fraction of the experts that a step fetches, over links that carry Rate bytes/s
	// together.
	Fraction, Rate float64
}

// Roofline is the minimum time of a step.
type Roofline struct {
	// Compute and Copies are in seconds; the step takes the longer of the two.
	Compute, Copies float64
	// TokS is the decode throughput in tokens/s.
	TokS float64
	// Phases of the compute, over all layers.
	Phases []Phase
}

// Rooflines computes the roofline of a step: the sum of its phases, each at its own
// bound, or the copies of fraction * layers * E(1-(1-k/E)^N) experts, whichever is
// longer. Copies have no latency here.
func Rooflines(m Model, h Hardware, c RooflineCase) Roofline {
	m = m.EnsureDefaults()
	groups := float64(max(c.Groups, 1))
	n := float64(c.Batch)
	seen := m.seen(c.Context)
	t := h.roofline(&m, stepShape{
		tokens: n, logits: n, pairs: n * seen, kvTokens: n * seen, context: c.Context + 1,
		projections: groups, experts: groups,
	})
	var r Roofline
	r.Phases, _ = t.list()
	r.Compute = t.total()
	if c.Fraction > 0 {
		r.Copies = c.Fraction * float64(m.MoELayers()) * m.Distinct(n) * float64(m.ExpertBytes()) / c.Rate
	}
	r.TokS = n / math.Max(r.Compute, r.Copies)
	return r
}
