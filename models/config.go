package models

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/kernels"
)

// QKNorm is whether queries and keys are normed before RoPE.
type QKNorm uint8

// The kinds: none; each head separately (Qwen3-MoE); the whole projection (OLMoE).
const (
	NoQKNorm QKNorm = iota
	HeadQKNorm
	WholeQKNorm
)

// Config is an architecture as data. ParseConfig makes one that is complete and
// consistent; it is not changed afterwards.
type Config struct {
	// Type is the model_type: "mixtral".
	Type string

	Hidden, Layers, Vocab int
	// MaxPositions is the maximum number of tokens of a sequence.
	MaxPositions int

	Norm     kernels.NormKind
	NormBias bool
	NormEps  float32

	Attention
	FeedForward

	HeadBias bool
	// TiedEmbeddings: the output projection is the embedding table.
	TiedEmbeddings bool
	// DType is the type of weights that the config names; float32 where it names
	// none. A checkpoint's tensors may have another.
	DType kernels.DType
	// EOS ends generation: any of these ids. It may be empty.
	EOS []int32

	// fullLayers is Layers before WithLayers.
	fullLayers int
}

// FullLayers is the number of the model's layers, of which Layers are left after WithLayers.
func (c *Config) FullLayers() int { return c.fullLayers }

// Attention is that of every layer.
type Attention struct {
	Heads, KVHeads, HeadDim int
	// Windows has, per layer, how many tokens a query attends to, itself included; 0: all.
	Windows []int
	// QKVBias and OBias: the projections that have biases.
	QKVBias, OBias bool
	QKNorm         QKNorm
	// ClipQKV limits queries, keys and values to [-ClipQKV, ClipQKV]; 0: no limit.
	ClipQKV float32
	RoPE    RoPE
}

// FeedForward is the second half of every layer: routed experts, or one MLP.
type FeedForward struct {
	Route kernels.RouteMethod
	// Jitter is SparseMixer's eps.
	Jitter float32
	// RoutingSkew, if above 0, adds biases to the router's scores so that the k-th most popular
	// expert of a layer is selected about k^-RoutingSkew times as often as the first. Only
	// dummy weights have it: see WithRoutingSkew.
	RoutingSkew float64
	// Experts and TopK of each MoE layer, ExpertWidth the experts' intermediate size.
	Experts, TopK, ExpertWidth int
	// SharedWidth is the shared expert's intermediate size; 0: there is none.
	SharedWidth int
	// Dense: per layer, whether it has one MLP of DenseWidth instead of experts.
	Dense      []bool
	DenseWidth int
}

// ExpertShape of weights of type t.
func (c *Config) ExpertShape(t kernels.DType) kernels.ExpertShape {
	return kernels.ExpertShape{Hidden: c.Hidden, Intermediate: c.ExpertWidth, DType: t}
}

// QKVWidth is the number of elements of a token's queries, keys and values together.
func (a *Attention) QKVWidth() int { return (a.Heads + 2*a.KVHeads) * a.HeadDim }

// OutputWidth is the number of elements of a token's attention output, and of its queries.
func (a *Attention) OutputWidth() int { return a.Heads * a.HeadDim }

// MoELayers is the number of layers with experts.
func (c *Config) MoELayers() int {
	n := 0
	for _, dense := range c.Dense {
		if !dense {
			n++
		}
	}
	return n
}

// ExpertCount is the number of routed experts of all layers.
func (c *Config) ExpertCount() int { return c.MoELayers() * c.Experts }

// Parameters is the number of weights, a tied table counted once.
func (c *Config) Parameters() int64 {
	return c.ExpertParameters() + c.OtherParameters()
}

// ExpertParameters is the number of weights of the routed experts.
func (c *Config) ExpertParameters() int64 {
	return int64(c.ExpertCount()) * 3 * int64(c.Hidden) * int64(c.ExpertWidth)
}

// OtherParameters is the number of weights of everything except the routed experts.
func (c *Config) OtherParameters() int64 {
	var n int64
	for _, p := range denseTensors(c, new(Weights)) {
		n += p.elements()
	}
	return n
}

// KVBytesPerToken is the size of a token's keys and values of all layers, of
// elements of type t.
func (c *Config) KVBytesPerToken(t kernels.DType) int64 {
	return 2 * int64(c.Layers) * int64(c.KVHeads) * int64(c.HeadDim) * int64(t.Size())
}

// WithLayers returns c cut to its first n layers.
func (c *Config) WithLayers(n int) (*Config, error) {
	if n < 1 || n > c.Layers {
		return nil, fmt.Errorf("models: cannot cut a model of %d layers to %d: give 1 to %d", c.Layers, n, c.Layers)
	}
	d := *c
	d.Layers = n
	d.Windows = slices.Clone(c.Windows[:n])
	d.Dense = slices.Clone(c.Dense[:n])
	return &d, nil
}

// WithRoutingSkew returns c for dummy weights whose routing is skewed: see
// Config.RoutingSkew.
func (c *Config) WithRoutingSkew(exponent float64) (*Config, error) {
	if !(exponent > 0 && exponent <= 8) {
		return nil, fmt.Errorf("models: routing skew %v: give an exponent above 0, at most 8", exponent)
	}
	d := *c
	d.RoutingSkew = exponent
	return &d, nil
}
