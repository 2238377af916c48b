// Package modelstest has small config.json files of every architecture, for tests. It
// does not import models, so that tests inside that package can use it.
package modelstest

import (
	"encoding/json"
	"maps"
)

// Kinds are the architectures: values of model_type.
var Kinds = []string{"mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe"}

// Absent is the value in an edit that removes a field.
type Absent struct{}

// Config returns the config.json of a small model of the given architecture, with the
// older field names. The fields of edit replace its own.
func Config(kind string, edit map[string]any) []byte {
	m := map[string]any{
		"model_type": kind, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
		"vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_experts_per_tok": 2,
		"intermediate_size": 96, "torch_dtype": "bfloat16", "hidden_act": "silu",
	}
	switch kind {
	case "mixtral":
		m["num_local_experts"] = 8
	case "phimoe":
		m["num_local_experts"] = 8
		m["attention_bias"], m["lm_head_bias"] = true, true
	case "qwen2_moe":
		m["num_experts"] = 8
		m["moe_intermediate_size"], m["shared_expert_intermediate_size"] = 48, 80
	case "qwen3_moe":
		m["num_experts"] = 8
		m["moe_intermediate_size"], m["head_dim"] = 48, 32
	case "olmoe":
		m["num_experts"] = 8
	}
	for k, v := range edit {
		if _, out := v.(Absent); out {
			delete(m, k)
		} else {
			m[k] = v
		}
	}
	data, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return data
}

// DenseLayer returns an edit that makes layer 1 dense, if the architecture supports dense
// layers.
func DenseLayer(kind string) map[string]any {
	if kind == "qwen2_moe" || kind == "qwen3_moe" {
		return map[string]any{"mlp_only_layers": []int{1}}
	}
	return nil
}

// LongRoPE is a rope_scaling of 8 pairs, long after 64 tokens.
var LongRoPE = map[string]any{
	"type": "longrope", "original_max_position_embeddings": 64,
	"short_factor": []float64{1, 1, 1, 1, 1, 1, 1, 1}, "long_factor": []float64{1, 2, 3, 4, 5, 6, 7, 8},
}

// With returns a copy of m with one field changed.
func With(m map[string]any, key string, value any) map[string]any {
	c := maps.Clone(m)
	c[key] = value
	return c
}
