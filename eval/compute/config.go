package compute

import (
	"encoding/json"

	"github.com/moeserve/moeserve/planner"
)

// Config is a config.json of a model of the shape, as checkpoints have it: of the architecture of Mixtral,
// or with a shared expert of that of Qwen1.5-MoE.
func Config(m *planner.Model) ([]byte, error) {
	c := map[string]any{
		"hidden_act": "silu", "hidden_size": m.Hidden, "max_position_embeddings": 32768, "num_attention_heads": m.Heads, "num_key_value_heads": m.KVHeads,
		"head_dim": m.HeadDim, "num_experts_per_tok": m.TopK, "num_hidden_layers": m.Layers, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
		"tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": m.Vocab,
	}
	if m.SharedWidth > 0 {
		c["architectures"], c["model_type"] = []string{"Qwen2MoeForCausalLM"}, "qwen2_moe"
		c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"] = m.Experts, m.ExpertWidth, m.SharedWidth
		c["intermediate_size"], c["decoder_sparse_step"], c["mlp_only_layers"] = m.SharedWidth, 1, []int{}
		c["norm_topk_prob"], c["use_sliding_window"], c["qkv_bias"] = false, false, true
	} else {
		c["architectures"], c["model_type"] = []string{"MixtralForCausalLM"}, "mixtral"
		c["num_local_experts"], c["intermediate_size"], c["sliding_window"] = m.Experts, m.ExpertWidth, nil
	}
	return json.MarshalIndent(c, "", "  ")
}
