package planner

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Compute is what the engine reaches on a GPU, as `bench kernels --calibrate` measures it on models
// of generic shapes: the time of a step is a sum over its layers of fixed costs (launches, and
// what does not grow with weights) and of weights, each at the seconds that a weight takes with so
// many rows. Seconds of a weight are bound by memory with few rows and by arithmetic with many;
// a curve has both, and what kernels reach between them.
type Compute struct {
	// Decode has the fixed costs of decode steps that are launched as CUDA graphs, over rows;
	// Enqueued those of steps whose kernels the host enqueues one by one: prefill, and
	// decode steps with fetches.
	Decode   FixedCosts `json:"decode"`
	Enqueued FixedCosts `json:"enqueued"`
	// Dense is seconds per weight of projections, router and shared experts, over rows.
	Dense Curve `json:"dense_s_per_weight"`
	// Experts is the same of routed experts, over the rows of an expert. Counted are the
	// weights of experts that have rows.
	Experts Curve `json:"experts_s_per_weight"`
	// Expert is seconds of each expert that has rows, over its rows: what does not grow with its weights.
	Expert Curve `json:"expert_s"`
	// Head is the same of the output layer, over its rows.
	Head Curve `json:"head_s_per_weight"`
	// Sampling is seconds per logit.
	Sampling float64 `json:"sampling_s_per_logit"`
	// Elementwise is seconds per byte of activations that kernels read and write.
	Elementwise float64 `json:"elementwise_s_per_byte"`
	// Attention is seconds per byte of KV cache that decode attention reads, over the
	// sequences of a step.
	Attention Curve `json:"attention_s_per_byte"`
	// Prompts is seconds per floating-point operation of attention in prefill, over the tokens of a prompt.
	Prompts Curve `json:"prompt_attention_s_per_flop"`
}

// FixedCosts are curves over the rows of a step, in seconds: of a step, of each of its layers, and
// of each layer with a shared expert in addition.
type FixedCosts struct {
	Step   Curve `json:"step_s"`
	Layer  Curve `json:"layer_s"`
	Shared Curve `json:"shared_expert_s"`
}

// Curve is values at ascending points. Between two it is a line; it is constant before the first,
// and goes on as between the last two, but does not fall, behind the last.
// In JSON it is an array of pairs of a point and a value.
type Curve struct {
	At, Values []float64
}

// MarshalJSON implements json.Marshaler.
func (c Curve) MarshalJSON() ([]byte, error) {
	pairs := make([][2]float64, len(c.At))
	for i := range pairs {
		pairs[i] = [2]float64{c.At[i], c.Values[i]}
	}
	return json.Marshal(pairs)
}

// UnmarshalJSON implements json.Unmarshaler.
func (c *Curve) UnmarshalJSON(text []byte) error {
	var pairs [][]float64
	if err := json.Unmarshal(text, &pairs); err != nil {
		return fmt.Errorf("a curve is an array of pairs of a point and a value: %w", err)
	}
	*c = Curve{}
	for _, p := range pairs {
		if len(p) != 2 {
			return fmt.Errorf("a curve is an array of pairs of a point and a value, and has %v", p)
		}
		c.At, c.Values = append(c.At, p[0]), append(c.Values, p[1])
	}
	return nil
}

// Value of the curve at x; 0 of an empty curve.
func (c Curve) Value(x float64) float64 {
	if len(c.At) == 0 {
		return 0
	}
	i, part := c.find(x)
	if part == 0 {
		return c.Values[i]
	}
	v := c.Values[i]*(1-part) + c.Values[i+1]*part
	if part > 1 {
		v = max(v, c.Values[i+1])
	}
	return v
}

// Weights are the shares of the points in the value at x, which is linear in their values.
func (c Curve) Weights(x float64) []float64 {
	w := make([]float64, len(c.At))
	if len(w) == 0 {
		return w
	}
	i, part := c.find(x)
	w[i] = 1 - part
	if part != 0 {
		w[i+1] = part
	}
	return w
}

// find returns the point before x, and which part of the way to the next one x is: above 1 behind the
// last. It is 0 where a curve has one point, and before its first.
func (c Curve) find(x float64) (i int, part float64) {
	n := len(c.At)
	if n == 1 || x <= c.At[0] {
		return 0, 0
	}
	i, _ = slices.BinarySearch(c.At, x)
	i = min(i, n-1) - 1
	return i, (x - c.At[i]) / (c.At[i+1] - c.At[i])
}

func (c Curve) check(name string) string {
	bad := func(v float64) bool { return !(v >= 0) || math.IsInf(v, 0) }
	switch {
	case len(c.At) == 0 || len(c.At) != len(c.Values):
		return fmt.Sprintf("%s has %d points and %d values; it must have at least one of both, and as many", name, len(c.At), len(c.Values))
	case slices.ContainsFunc(c.At, bad) || slices.ContainsFunc(c.Values, bad):
		return fmt.Sprintf("%s has a negative or infinite number", name)
	}
	for i := range c.At[1:] {
		if c.At[i+1] <= c.At[i] {
			return fmt.Sprintf("%s has points that do not ascend: %v", name, c.At)
		}
	}
	return ""
}

// Validate names all parts, by their keys, that cannot be.
func (c *Compute) Validate() error {
	var wrong []string
	for _, x := range []struct {
		name string
		c    Curve
	}{
		{"decode.step_s", c.Decode.Step},
		{"decode.layer_s", c.Decode.Layer},
		{"decode.shared_expert_s", c.Decode.Shared},
		{"enqueued.step_s", c.Enqueued.Step},
		{"enqueued.layer_s", c.Enqueued.Layer},
		{"enqueued.shared_expert_s", c.Enqueued.Shared},
		{"dense_s_per_weight", c.Dense},
		{"experts_s_per_weight", c.Experts},
		{"expert_s", c.Expert},
		{"head_s_per_weight", c.Head},
		{"attention_s_per_byte", c.Attention},
		{"prompt_attention_s_per_flop", c.Prompts},
	} {
		if text := x.c.check(x.name); text != "" {
			wrong = append(wrong, text)
		}
	}
	for _, x := range []struct {
		name  string
		value float64
	}{{"sampling_s_per_logit", c.Sampling}, {"elementwise_s_per_byte", c.Elementwise}} {
		if !(x.value >= 0) || math.IsInf(x.value, 0) {
			wrong = append(wrong, fmt.Sprintf("%s is %v, it must be at least 0", x.name, x.value))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("planner: compute: %s", strings.Join(wrong, "; "))
	}
	return nil
}

// Cost is a part of Compute: what a term of a step takes of it.
type Cost uint8

// The costs, in the order of the parts of Compute.
const (
	StepFixed Cost = iota
	LayerFixed
	SharedFixed
	EnqueuedStepFixed
	EnqueuedLayerFixed
	EnqueuedSharedFixed
	DenseWeights
	ExpertWeights
	ExpertFixed
	HeadWeights
	LogitSampling
	ElementwiseBytes
	KVBytes
	PromptFlops
	// Costs is their number.
	Costs
)

// curve is the part of a cost that has one.
func (c *Compute) curve(k Cost) *Curve {
	return [...]*Curve{
		&c.Decode.Step, &c.Decode.Layer, &c.Decode.Shared, &c.Enqueued.Step, &c.Enqueued.Layer, &c.Enqueued.Shared,
		&c.Dense, &c.Experts, &c.Expert, &c.Head, nil, nil, &c.Attention, &c.Prompts,
	}[k]
}

// Set puts a part into c.
func (c *Compute) Set(k Cost, x Curve) {
	switch k {
	case LogitSampling:
		c.Sampling = x.Values[0]
	case ElementwiseBytes:
		c.Elementwise = x.Values[0]
	default:
		*c.curve(k) = x
	}
}

func (c *Compute) value(k Cost, at float64) float64 {
	switch k {
	case LogitSampling:
		return c.Sampling
	case ElementwiseBytes:
		return c.Elementwise
	}
	return c.curve(k).Value(at)
}

// Term of a step's time: Times the value of a part At a point.
type Term struct {
	Cost      Cost
	Times, At float64
	phase     int
}

// ComputeStep is a step of the GPU alone, all experts resident and in one part.
type ComputeStep struct {
	// Sequences with Tokens new ones each; 1: it decodes, as a graph. Context is the
	// tokens of a sequence that attention reads, the new ones included.
	Sequences int `json:"sequences"`
	Tokens    int `json:"tokens"`
	Context   int `json:"context"`
	// Enqueued: the host enqueues every kernel by itself.
	Enqueued bool `json:"enqueued"`
	// Used is the experts of a layer that have rows, a mean. Default: the expected number.
	Used float64 `json:"experts_used"`
}

// Terms of a step's time.
func (m Model) Terms(s ComputeStep) []Term {
	m = m.EnsureDefaults()
	n, tokens := float64(s.Sequences), float64(s.Sequences*s.Tokens)
	shape := stepShape{
		tokens: tokens, logits: n, sequences: n, prompt: float64(s.Tokens), projections: 1, experts: 1, enqueued: s.Enqueued, touched: s.Used,
	}
	if s.Tokens == 1 {
		shape.pairs = n * m.seen(float64(s.Context))
		shape.kvTokens = shape.pairs
	} else {
		shape.pairs, shape.kvTokens = n*m.pairs(float64(s.Tokens)), tokens
	}
	return m.terms(&shape)
}

// used is the number of experts of a layer that have rows, in each part of the step.
func (m *Model) used(s *stepShape) float64 {
	if s.touched > 0 {
		return s.touched
	}
	return m.Distinct(s.tokens / s.experts)
}

// activationBytes are read and written by a step's kernels besides weights, KV cache and logits.
func (m *Model) activationBytes(s *stepShape) float64 {
	without := *m
	without.WeightBytes = 0
	sum := 0.0
	for i, x := range without.work(*s) {
		if i != phaseAttention && i != phaseHead {
			sum += x.bytes
		}
	}
	return sum
}

// terms of a step's time.
func (m *Model) terms(s *stepShape) []Term {
	h, q, v := float64(m.Hidden), float64(m.Heads*m.HeadDim), float64(2*m.KVHeads*m.HeadDim)
	layers, moe, dense := float64(m.Layers), float64(m.MoELayers()), float64(m.DenseLayers)
	step, layer, shared := StepFixed, LayerFixed, SharedFixed
	if s.enqueued {
		step, layer, shared = EnqueuedStepFixed, EnqueuedLayerFixed, EnqueuedSharedFixed
	}
	n := s.tokens
	pRows, eRows := n/s.projections, n/s.experts
	w := m.work(*s)
	list := make([]Term, 0, 16)
	add := func(phase int, cost Cost, times, at float64) {
		if times > 0 {
			list = append(list, Term{cost, times, at, phase})
		}
	}
	add(phaseFixed, step, 1, n)
	add(phaseFixed, layer, layers*s.projections, pRows)
	add(phaseQKV, DenseWeights, layers*s.projections*h*(q+v), pRows)
	add(phaseOutput, DenseWeights, layers*s.projections*q*h, pRows)
	add(phaseRouter, DenseWeights, moe*s.projections*h*float64(m.Experts), pRows)
	add(phaseElementwise, ElementwiseBytes, m.activationBytes(s), 1)
	if m.SharedWidth > 0 {
		add(phaseFixed, shared, moe*s.experts, eRows)
		add(phaseShared, DenseWeights, moe*s.experts*3*h*float64(m.SharedWidth), eRows)
	}
	add(phaseDense, DenseWeights, dense*s.experts*3*h*float64(m.DenseWidth), eRows)
	touched := m.used(s)
	matrix, rows := moe*s.experts*touched*h*float64(m.ExpertWidth), eRows*float64(m.TopK)/touched
	add(phaseFixed, ExpertFixed, moe*s.experts*touched, rows)
	add(phaseUp, ExpertWeights, 2*matrix, rows)
	add(phaseDown, ExpertWeights, matrix, rows)
	switch {
	case s.hostAttention:
	case s.prompt > 1:
		add(phaseAttention, PromptFlops, w[phaseAttention].flops, s.prompt)
	default:
		add(phaseAttention, KVBytes, s.kvTokens*float64(m.KVBytesPerToken()), s.sequences)
	}
	add(phaseHead, HeadWeights, h*float64(m.Vocab), s.logits)
	add(phaseHead, LogitSampling, s.logits*float64(m.Vocab), 1)
	return list
}

// Seconds of a step on the GPU.
func (c *Compute) Seconds(m Model, s ComputeStep) float64 {
	sum := 0.0
	for _, t := range m.Terms(s) {
		sum += t.Times * c.value(t.Cost, t.At)
	}
	return sum
}
