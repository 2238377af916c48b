package models

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/kernels"
)

// param is one tensor of a checkpoint that is not a routed expert.
type param struct {
	// names are all accepted names of the tensor; the first is the name in published
	// checkpoints of the architecture.
	names []string
	// rows and cols are its shape; a vector has cols 0.
	rows, cols int
	// to is the tensor that holds the parameter. Parameters with the same to are
	// concatenated along rows, in the order given.
	to *kernels.Tensor
}

func (p param) elements() int64 { return int64(p.rows) * int64(max(1, p.cols)) }

func (p param) shape() []int {
	if p.cols == 0 {
		return []int{p.rows}
	}
	return []int{p.rows, p.cols}
}

// denseTensors lists c's tensors other than routed experts, with destinations in w.
func denseTensors(c *Config, w *Weights) []param {
	w.Layers = make([]LayerWeights, c.Layers)
	var all []param
	add := func(to *kernels.Tensor, rows, cols int, names ...string) {
		all = append(all, param{names: names, rows: rows, cols: cols, to: to})
	}
	norm := func(weight, bias *kernels.Tensor, name string) {
		add(weight, c.Hidden, 0, name+".weight")
		if c.NormBias {
			add(bias, c.Hidden, 0, name+".bias")
		}
	}
	linear := func(weight, bias *kernels.Tensor, rows, cols int, name string) {
		add(weight, rows, cols, name+".weight")
		if bias != nil {
			add(bias, rows, 0, name+".bias")
		}
	}
	only := func(has bool, bias *kernels.Tensor) *kernels.Tensor {
		if has {
			return bias
		}
		return nil
	}

	add(&w.Embed, c.Vocab, c.Hidden, "model.embed_tokens.weight")
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	for i := range c.Layers {
		l, at := &w.Layers[i], fmt.Sprintf("model.layers.%d.", i)
		norm(&l.InputNorm, &l.InputNormBias, at+"input_layernorm")
		for _, p := range []struct {
			name string
			rows int
		}{{"q", q}, {"k", kv}, {"v", kv}} {
			linear(&l.QKV, only(c.QKVBias, &l.QKVBias), p.rows, c.Hidden, at+"self_attn."+p.name+"_proj")
		}
		linear(&l.O, only(c.OBias, &l.OBias), c.Hidden, q, at+"self_attn.o_proj")
		switch c.QKNorm {
		case HeadQKNorm:
			add(&l.QNorm, c.HeadDim, 0, at+"self_attn.q_norm.weight")
			add(&l.KNorm, c.HeadDim, 0, at+"self_attn.k_norm.weight")
		case WholeQKNorm:
			add(&l.QNorm, q, 0, at+"self_attn.q_norm.weight")
			add(&l.KNorm, kv, 0, at+"self_attn.k_norm.weight")
		}
		norm(&l.PostNorm, &l.PostNormBias, at+"post_attention_layernorm")
		mlp := func(gateUp, down *kernels.Tensor, width int, name string) {
			linear(gateUp, nil, width, c.Hidden, name+".gate_proj")
			linear(gateUp, nil, width, c.Hidden, name+".up_proj")
			linear(down, nil, c.Hidden, width, name+".down_proj")
		}
		if c.Dense[i] {
			mlp(&l.GateUp, &l.Down, c.DenseWidth, at+"mlp")
			continue
		}
		add(&l.Router, c.Experts, c.Hidden, routerNames(c, at, "weight")...)
		if c.RoutingSkew > 0 {
			add(&l.RouterBias, c.Experts, 0, routerNames(c, at, "bias")...)
		}
		if c.SharedWidth > 0 {
			linear(&l.Router, only(c.RoutingSkew > 0, &l.RouterBias), 1, c.Hidden, at+sharedGate)
			mlp(&l.SharedGateUp, &l.SharedDown, c.SharedWidth, at+"mlp.shared_expert")
		}
	}
	norm(&w.FinalNorm, &w.FinalNormBias, "model.norm")
	if !c.TiedEmbeddings {
		add(&w.Head, c.Vocab, c.Hidden, "lm_head.weight")
	}
	if c.HeadBias {
		add(&w.HeadBias, c.Vocab, 0, "lm_head.bias")
	}
	return all
}

// sharedGate is the name of the gate of a layer's shared expert.
const sharedGate = "mlp.shared_expert_gate"

// blocks returns the names of the MoE block, the architecture's published one first.
func blocks(c *Config) []string {
	if c.Type == "mixtral" || c.Type == "phimoe" {
		return []string{"block_sparse_moe", "mlp"}
	}
	return []string{"mlp", "block_sparse_moe"}
}

func routerNames(c *Config, at, kind string) []string {
	var names []string
	for _, gate := range []string{"gate", "router"} {
		for _, block := range blocks(c) {
			names = append(names, at+block+"."+gate+"."+kind)
		}
	}
	return names
}

// expertParts are the names of an expert's three matrices in both conventions, in the
// order of kernels.Part.
var expertParts = [...][3]string{
	{kernels.W1: "w1", kernels.W3: "w3", kernels.W2: "w2"},
	{kernels.W1: "gate_proj", kernels.W3: "up_proj", kernels.W2: "down_proj"},
}

// expertNames holds the names of a layer's experts in a checkpoint.
type expertNames struct {
	prefix string    // "model.layers.3.mlp.experts."
	fused  bool      // gate_up_proj and down_proj hold all experts
	parts  [3]string // by kernels.Part, where not fused
}

func (n expertNames) tensor(expert int, part kernels.Part) string {
	return fmt.Sprintf("%s%d.%s.weight", n.prefix, expert, n.parts[part])
}

func (n expertNames) gateUp() string { return n.prefix + "gate_up_proj" }
func (n expertNames) down() string   { return n.prefix + "down_proj" }

// expertLayouts lists the naming conventions for a layer's experts, the architecture's
// published one first.
func expertLayouts(c *Config, layer int) []expertNames {
	var all []expertNames
	parts := expertParts[:]
	if blocks(c)[0] == "mlp" {
		parts = [][3]string{expertParts[1], expertParts[0]}
	}
	for _, block := range blocks(c) {
		prefix := fmt.Sprintf("model.layers.%d.%s.experts.", layer, block)
		all = append(all, expertNames{prefix: prefix, parts: parts[0]}, expertNames{prefix: prefix, fused: true}, expertNames{prefix: prefix, parts: parts[1]})
	}
	return all
}

// ignored reports whether an unexpected tensor may be skipped: RoPE frequencies, which old
// writers saved although they follow from the config, the second copy of a tied embedding,
// and layers that the caller has removed.
func ignored(c *Config, name string) bool {
	if strings.HasSuffix(name, ".rotary_emb.inv_freq") || c.TiedEmbeddings && name == "lm_head.weight" {
		return true
	}
	rest, ok := strings.CutPrefix(name, "model.layers.")
	if !ok {
		return false
	}
	number, _, _ := strings.Cut(rest, ".")
	layer, err := strconv.Atoi(number)
	return err == nil && layer >= c.Layers && layer < c.fullLayers
}
