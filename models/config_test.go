package models

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models/modelstest"
	"github.com/moeserve/moeserve/untrusted"
)

func preset(t testing.TB, name string) *Config {
	t.Helper()
	data, ok := configs.Preset(name)
	if !ok {
		t.Fatalf("no preset %s", name)
	}
	c, err := ParseConfig(data, name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The published counts; everything else follows from the shapes.
func TestPresetSizes(t *testing.T) {
	for _, p := range []struct {
		name          string
		parameters    int64
		expertBytes   int64
		experts       int
		otherGiB      float64 // two decimals
		bytesPerToken int64
	}{
		{"mixtral-8x7b", 46_702_792_704, 352_321_536, 256, 2.99, 131072},
		{"phi-3.5-moe", 41_873_153_344, 157_286_400, 512, 2.99, 131072},
		{"phi-tiny-moe", 3_755_220_288, 11_010_048, 512, 1.74, 65536},
		{"qwen1.5-moe-a2.7b", 14_315_784_192, 17_301_504, 1440, 3.46, 196608},
		{"qwen2-57b-a14b", 57_408_658_944, 55_050_240, 1792, 15.06, 57344},
		{"qwen3-30b-a3b", 30_532_122_624, 9_437_184, 6144, 2.87, 98304},
	} {
		c := preset(t, p.name)
		if got := c.Parameters(); got != p.parameters {
			t.Errorf("%s: %d parameters, want %d", p.name, got, p.parameters)
		}
		if got := c.ExpertShape(c.DType).Bytes(); got != p.expertBytes {
			t.Errorf("%s: %d bytes per expert, want %d", p.name, got, p.expertBytes)
		}
		if got := c.ExpertCount(); got != p.experts {
			t.Errorf("%s: %d experts, want %d", p.name, got, p.experts)
		}
		if got := float64(2*c.OtherParameters()) / (1 << 30); math.Abs(got-p.otherGiB) > 0.005 {
			t.Errorf("%s: %.3f GiB beside the experts, want %.2f", p.name, got, p.otherGiB)
		}
		if got := c.KVBytesPerToken(kernels.BF16); got != p.bytesPerToken {
			t.Errorf("%s: %d bytes of KV per token, want %d", p.name, got, p.bytesPerToken)
		}
		if got := len(configs.PresetNames()); got != 6 {
			t.Errorf("%d presets, this table has 6", got)
		}
	}
}

func TestPresetFields(t *testing.T) {
	c := preset(t, "phi-3.5-moe")
	if c.Norm != kernels.Layer || !c.NormBias || !c.QKVBias || !c.OBias || !c.HeadBias || c.Route != kernels.SparseMixer || c.Jitter != 0.01 {
		t.Errorf("phi-3.5-moe: %+v", c)
	}
	r := c.RoPE
	if r.LongAfter != 4096 || len(r.Short) != 64 || len(r.Long) != 64 || r.ShortScale != 1.2431631 || r.LongScale != 1.2431631 || r.Theta != 1e4 {
		t.Errorf("phi-3.5-moe: RoPE %+v", r)
	}
	if c.Windows[0] != 0 {
		t.Errorf("phi-3.5-moe: window %d, though no sequence is longer", c.Windows[0])
	}
	c = preset(t, "phi-tiny-moe")
	if c.HeadDim != 128 || c.Windows[31] != 2047 || c.RoPE.LongAfter != 0 || c.RoPE.ShortScale != 1 {
		t.Errorf("phi-tiny-moe: %+v", c)
	}
	c = preset(t, "qwen1.5-moe-a2.7b")
	if c.Route != kernels.Softmax || !c.QKVBias || c.OBias || c.SharedWidth != 5632 || c.MoELayers() != 24 || c.NormEps != 1e-6 {
		t.Errorf("qwen1.5-moe-a2.7b: %+v", c)
	}
	c = preset(t, "qwen3-30b-a3b")
	if c.Route != kernels.SoftmaxRenorm || c.QKNorm != HeadQKNorm || c.QKVBias || !slices.Equal(c.EOS, []int32{151645}) || c.DType != kernels.BF16 {
		t.Errorf("qwen3-30b-a3b: %+v", c)
	}
}

func TestWithLayers(t *testing.T) {
	c := preset(t, "mixtral-8x7b")
	cut, err := c.WithLayers(3)
	if err != nil {
		t.Fatal(err)
	}
	perLayer := (c.Parameters() - cut.Parameters()) / 29
	if cut.Layers != 3 || len(cut.Dense) != 3 || c.Layers != 32 || cut.Parameters()+29*perLayer != c.Parameters() {
		t.Errorf("cut to %d layers, %d parameters", cut.Layers, cut.Parameters())
	}
	for _, n := range []int{-1, 0, 33} {
		if _, err := c.WithLayers(n); err == nil {
			t.Errorf("cut to %d layers", n)
		}
	}
}

// mustParse reads the config of modelstest.Config.
func mustParse(t testing.TB, kind string, edit map[string]any) *Config {
	t.Helper()
	c, err := ParseConfig(modelstest.Config(kind, edit), "config.json")
	if err != nil {
		t.Fatalf("%s with %v: %v", kind, edit, err)
	}
	return c
}

// Both generations of names give the same architecture.
func TestGenerations(t *testing.T) {
	for _, a := range architectures {
		older := mustParse(t, a.kind, nil)
		count := "num_experts"
		if a.kind == "mixtral" || a.kind == "phimoe" {
			count = "num_local_experts"
		}
		other := map[string]string{"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[count]
		newer := mustParse(t, a.kind, map[string]any{
			"torch_dtype": modelstest.Absent{}, "dtype": "bfloat16", "rope_theta": modelstest.Absent{},
			"rope_parameters": map[string]any{"rope_theta": 1e4, "rope_type": "default"},
			count:             modelstest.Absent{}, other: 8,
		})
		if fmt.Sprintf("%+v", *older) != fmt.Sprintf("%+v", *newer) {
			t.Errorf("%s: older names\n%+v\nnewer\n%+v", a.kind, *older, *newer)
		}
		byClass := mustParse(t, a.kind, map[string]any{"model_type": modelstest.Absent{}, "architectures": []string{strings.ToUpper(a.class)}})
		if byClass.Type != a.kind {
			t.Errorf("class %s is %s", a.class, byClass.Type)
		}
	}
	older := mustParse(t, "phimoe", map[string]any{"rope_scaling": modelstest.LongRoPE})
	parameters := modelstest.With(modelstest.With(modelstest.LongRoPE, "rope_theta", 1e4), "rope_type", "longrope")
	delete(parameters, "original_max_position_embeddings")
	newer := mustParse(t, "phimoe", map[string]any{
		"rope_theta": modelstest.Absent{}, "rope_parameters": parameters, "original_max_position_embeddings": 64,
	})
	if fmt.Sprintf("%+v", *older) != fmt.Sprintf("%+v", *newer) {
		t.Errorf("longrope: older names\n%+v\nnewer\n%+v", *older, *newer)
	}
	alias := mustParse(t, "phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "type", "su")})
	if alias.RoPE.LongAfter != 64 {
		t.Errorf("su: %+v", alias.RoPE)
	}
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name string
		kind string
		edit map[string]any
		ok   func(*Config) bool
	}{
		{"head_dim null is hidden/heads", "mixtral", map[string]any{"head_dim": nil}, func(c *Config) bool { return c.HeadDim == 16 }},
		{"head_dim", "phimoe", map[string]any{"head_dim": 32}, func(c *Config) bool { return c.HeadDim == 32 }},
		{"key heads null are heads", "mixtral", map[string]any{"num_key_value_heads": nil}, func(c *Config) bool { return c.KVHeads == 4 }},
		{"key heads absent are heads in olmoe", "olmoe", map[string]any{"num_key_value_heads": modelstest.Absent{}}, func(c *Config) bool { return c.KVHeads == 4 }},
		{"window", "mixtral", map[string]any{"sliding_window": 32}, func(c *Config) bool { return slices.Equal(c.Windows, []int{32, 32, 32, 32}) }},
		{"window null", "mixtral", map[string]any{"sliding_window": nil}, func(c *Config) bool { return c.Windows[0] == 0 }},
		{"window as long as the context", "mixtral", map[string]any{"sliding_window": 256}, func(c *Config) bool { return c.Windows[0] == 0 }},
		{"window not used", "qwen3_moe", map[string]any{"sliding_window": 32}, func(c *Config) bool { return c.Windows[0] == 0 }},
		{"window by default", "qwen3_moe", map[string]any{"max_position_embeddings": 8192, "use_sliding_window": true}, func(c *Config) bool { return c.Windows[3] == 4096 }},
		{"window used, but null", "qwen3_moe", map[string]any{"max_position_embeddings": 8192, "use_sliding_window": true, "sliding_window": nil}, func(c *Config) bool { return c.Windows[3] == 0 }},
		{"window used", "qwen3_moe", map[string]any{"sliding_window": 32, "use_sliding_window": true}, func(c *Config) bool { return slices.Equal(c.Windows, []int{32, 32, 32, 32}) }},
		{"window in every other layer", "qwen2_moe", map[string]any{"sliding_window": 32, "use_sliding_window": true, "max_window_layers": 2}, func(c *Config) bool { return slices.Equal(c.Windows, []int{32, 0, 0, 0}) }},
		{"window in every other layer, default", "qwen2_moe", map[string]any{"sliding_window": 32, "use_sliding_window": true}, func(c *Config) bool { return slices.Equal(c.Windows, []int{32, 0, 32, 0}) }},
		{"window by layer types", "qwen2_moe", map[string]any{"sliding_window": 32, "use_sliding_window": true, "layer_types": []string{"full_attention", "sliding_attention", "sliding_attention", "full_attention"}}, func(c *Config) bool { return slices.Equal(c.Windows, []int{0, 32, 32, 0}) }},
		{"dense layers", "qwen2_moe", map[string]any{"mlp_only_layers": []int{1}}, func(c *Config) bool {
			return slices.Equal(c.Dense, []bool{false, true, false, false}) && c.DenseWidth == 96
		}},
		{"sparse step", "qwen3_moe", map[string]any{"decoder_sparse_step": 2}, func(c *Config) bool {
			return slices.Equal(c.Dense, []bool{true, false, true, false}) && c.ExpertWidth == 48
		}},
		{"dense width unneeded", "qwen3_moe", map[string]any{"intermediate_size": modelstest.Absent{}}, func(c *Config) bool { return c.DenseWidth == 0 }},
		{"clip", "olmoe", map[string]any{"clip_qkv": 8}, func(c *Config) bool { return c.ClipQKV == 8 }},
		{"renormalized", "olmoe", map[string]any{"norm_topk_prob": true}, func(c *Config) bool { return c.Route == kernels.SoftmaxRenorm }},
		{"not renormalized", "qwen3_moe", map[string]any{"norm_topk_prob": false}, func(c *Config) bool { return c.Route == kernels.Softmax }},
		{"bias", "qwen3_moe", map[string]any{"attention_bias": true}, func(c *Config) bool { return c.QKVBias && c.OBias }},
		{"no bias", "qwen2_moe", map[string]any{"qkv_bias": false}, func(c *Config) bool { return !c.QKVBias }},
		{"eos a number", "mixtral", map[string]any{"eos_token_id": 2}, func(c *Config) bool { return slices.Equal(c.EOS, []int32{2}) }},
		{"eos a list", "mixtral", map[string]any{"eos_token_id": []int{2, 3}}, func(c *Config) bool { return slices.Equal(c.EOS, []int32{2, 3}) }},
		{"dtype absent", "mixtral", map[string]any{"torch_dtype": modelstest.Absent{}}, func(c *Config) bool { return c.DType == kernels.F32 }},
		{"dtype with module", "mixtral", map[string]any{"torch_dtype": "torch.float16"}, func(c *Config) bool { return c.DType == kernels.F16 }},
		{"tied", "mixtral", map[string]any{"tie_word_embeddings": true}, func(c *Config) bool { return c.TiedEmbeddings }},
		{"scaling null", "mixtral", map[string]any{"rope_scaling": nil}, func(c *Config) bool { return c.RoPE.Theta == 1e4 }},
		{"longrope without mscale", "phimoe", map[string]any{"rope_scaling": modelstest.LongRoPE}, func(c *Config) bool {
			want := float32(math.Sqrt(1 + math.Log(4)/math.Log(64)))
			return c.RoPE.ShortScale == want && c.RoPE.LongScale == want && c.RoPE.Long[7] == 8
		}},
		{"longrope with one mscale", "phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "long_mscale", 1.5)}, func(c *Config) bool {
			return c.RoPE.LongScale == 1.5 && c.RoPE.ShortScale != 1.5
		}},
		{"longrope with a factor", "phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "attention_factor", 1.25)}, func(c *Config) bool { return c.RoPE.ShortScale == 1.25 }},
		{"longrope without growth", "phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "original_max_position_embeddings", 256)}, func(c *Config) bool { return c.RoPE.ShortScale == 1 }},
	} {
		got := mustParse(t, c.kind, c.edit)
		if !c.ok(got) {
			t.Errorf("%s: %+v", c.name, *got)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct {
		kind string
		edit map[string]any
		want string
	}{
		{"deepseek_v3", map[string]any{"n_routed_experts": 256}, `models: config.json: field model_type: deepseek_v3 is a mixture-of-experts architecture that is not supported; moeserve runs mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe`},
		{"qwen3_vl_moe", map[string]any{"text_config": map[string]any{"num_experts": 128}}, `qwen3_vl_moe is a mixture-of-experts architecture`},
		{"llama", map[string]any{"_name_or_path": "expert", "num_experts_per_tok": 0}, `models: config.json: field model_type: llama is a dense model, without experts to offload; moeserve runs the mixture-of-experts models mixtral,`},
		{"qwen3", map[string]any{"model_type": modelstest.Absent{}, "architectures": []string{"Qwen3ForCausalLM"}, "num_experts_per_tok": nil}, `field architectures: Qwen3ForCausalLM is a dense model`},
		{"mixtral", map[string]any{"model_type": modelstest.Absent{}}, `field model_type: missing; moeserve runs`},
		{"mixtral", map[string]any{"quantization_config": map[string]any{"quant_method": "fp8"}}, `quantized weights (fp8) are not supported`},
		{"mixtral", map[string]any{"compression_config": map[string]any{}}, `field compression_config: quantized weights are not supported`},
		{"mixtral", map[string]any{"model_type": modelstest.Absent{}, "architectures": []string{"LlamaForCausalLM"}}, `field architectures: LlamaForCausalLM is`},
		{"mixtral", map[string]any{"model_type": 3}, `field model_type: 3: must be a text`},
		{"mixtral", map[string]any{"hidden_size": modelstest.Absent{}}, `field hidden_size: missing, and this architecture needs it`},
		{"mixtral", map[string]any{"hidden_size": nil}, `field hidden_size: missing`},
		{"mixtral", map[string]any{"hidden_size": "64"}, `field hidden_size: "64": must be a whole number`},
		{"mixtral", map[string]any{"hidden_size": 64.5}, `field hidden_size: 64.5: must be a whole number`},
		{"mixtral", map[string]any{"hidden_size": -64}, `field hidden_size: -64: must be from 1 to`},
		{"mixtral", map[string]any{"hidden_size": 1 << 40}, `field hidden_size: 1099511627776: must be from 1 to`},
		{"mixtral", map[string]any{"num_key_value_heads": 3}, `field num_key_value_heads: 3 does not divide num_attention_heads, 4`},
		{"mixtral", map[string]any{"num_key_value_heads": modelstest.Absent{}}, `field num_key_value_heads: missing`},
		{"mixtral", map[string]any{"num_attention_heads": 3, "num_key_value_heads": 3}, `field head_dim: missing, and hidden_size, 64, is not a multiple`},
		{"mixtral", map[string]any{"head_dim": 17}, `field head_dim: 17: must be even`},
		{"qwen3_moe", map[string]any{"head_dim": modelstest.Absent{}}, `field head_dim: missing, and this architecture needs it`},
		{"mixtral", map[string]any{"rope_theta": modelstest.Absent{}}, `field rope_theta: missing`},
		{"mixtral", map[string]any{"rope_theta": 0}, `field rope_theta: 0: must be above 0`},
		{"mixtral", map[string]any{"max_position_embeddings": modelstest.Absent{}}, `field max_position_embeddings: missing`},
		{"mixtral", map[string]any{"rms_norm_eps": modelstest.Absent{}}, `field rms_norm_eps: missing`},
		{"mixtral", map[string]any{"num_local_experts": modelstest.Absent{}}, `field num_local_experts: missing`},
		{"mixtral", map[string]any{"num_experts": 4}, `field num_local_experts: 8, but num_experts is 4`},
		{"mixtral", map[string]any{"num_experts_per_tok": 9}, `field num_experts_per_tok: 9, but there are 8 experts`},
		{"mixtral", map[string]any{"num_hidden_layers": 1024, "num_local_experts": 4096}, `4096 experts in 1024 layers are 4194304 together: moeserve runs models of at most 131072`},
		{"mixtral", map[string]any{"model_type": strings.Repeat("x", 1<<20) + "\x1b"}, `xxx\x1b" is a mixture-of-experts architecture that is not supported`},
		{"mixtral", map[string]any{"hidden_act": strings.Repeat("x", 1<<20)}, `xxx" is not supported`},
		{"mixtral", map[string]any{"torch_dtype": strings.Repeat("x", 1<<20)}, `xxx" is not supported`},
		{"mixtral", map[string]any{"quantization_config": map[string]any{"quant_method": strings.Repeat("x", 1<<20)}}, `xxx") are not supported`},
		{"mixtral", map[string]any{"intermediate_size": modelstest.Absent{}}, `field intermediate_size: missing`},
		{"mixtral", map[string]any{"sliding_window": -1}, `field sliding_window: -1: must not be negative`},
		{"mixtral", map[string]any{"hidden_act": "gelu"}, `field hidden_act: "gelu" is not supported, only "silu"`},
		{"mixtral", map[string]any{"quantization_config": map[string]any{"quant_method": "awq"}}, `field quantization_config: quantized weights (awq) are not supported; download the original`},
		{"mixtral", map[string]any{"partial_rotary_factor": 0.5}, `field partial_rotary_factor: 0.5 is not supported`},
		{"mixtral", map[string]any{"torch_dtype": "float64"}, `field torch_dtype: "float64" is not supported`},
		{"mixtral", map[string]any{"tie_word_embeddings": "yes"}, `field tie_word_embeddings: "yes": must be true or false`},
		{"mixtral", map[string]any{"eos_token_id": "</s>"}, `field eos_token_id: "\u003c/s\u003e": must be a token id or a list of them`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "proportional"}}, `field rope_scaling.rope_type: "proportional" is not supported, only default, linear, dynamic, yarn, longrope and llama3`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "yarn"}}, `field rope_scaling.factor: missing`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "linear", "factor": 0}}, `field rope_scaling.factor: 0: must be above 0`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}, `field rope_scaling.beta_fast: 1: must not be below beta_slow, 2`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "linear", "factor": 4, "partial_rotary_factor": 0.5}}, `field rope_scaling.partial_rotary_factor: 0.5 is not supported`},
		{"mixtral", map[string]any{"rope_scaling": map[string]any{"type": "llama3", "factor": 4, "low_freq_factor": 4, "high_freq_factor": 1}}, `field rope_scaling.high_freq_factor: 1: must be above low_freq_factor, 4`},
		{"phimoe", map[string]any{"rope_scaling": map[string]any{"type": "linear", "factor": 4, "long_mscale": 1.2}}, `field rope_scaling.long_mscale: is of longrope, and the rope_type is linear`},
		{"mixtral", map[string]any{"rope_parameters": map[string]any{"rope_type": "llama3", "rope_theta": 1}}, `field rope_parameters.factor: missing`},
		{"mixtral", map[string]any{"rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 1}, "rope_scaling": map[string]any{"type": "yarn"}}, `field rope_scaling.type: rope_parameters is there too, and says something else; remove one of them`},
		{"mixtral", map[string]any{"rope_scaling": 3}, `field rope_scaling: 3: must be an object`},
		{"phimoe", map[string]any{"attention_bias": modelstest.Absent{}}, `field attention_bias: missing`},
		{"phimoe", map[string]any{"lm_head_bias": modelstest.Absent{}}, `field lm_head_bias: missing`},
		{"phimoe", map[string]any{"num_experts_per_tok": 3}, `field num_experts_per_tok: 3: this architecture's routing chooses 2`},
		{"phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "long_factor", nil)}, `field rope_scaling.long_factor: missing`},
		{"phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "long_factor", []int{1})}, `field rope_scaling.long_factor: 1 factors, 8 needed`},
		{"phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "short_factor", []int{0, 1, 1, 1, 1, 1, 1, 1})}, `field rope_scaling.short_factor: 0: factors must be above 0`},
		{"phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "original_max_position_embeddings", nil)}, `field rope_scaling.original_max_position_embeddings: missing`},
		{"phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.LongRoPE, "short_mscale", -1)}, `field rope_scaling.short_mscale: -1: must be above 0`},
		{"qwen2_moe", map[string]any{"shared_expert_intermediate_size": modelstest.Absent{}}, `field shared_expert_intermediate_size: missing`},
		{"qwen2_moe", map[string]any{"moe_intermediate_size": modelstest.Absent{}}, `field moe_intermediate_size: missing`},
		{"qwen2_moe", map[string]any{"mlp_only_layers": []int{0}, "intermediate_size": modelstest.Absent{}}, `field intermediate_size: missing`},
		{"qwen2_moe", map[string]any{"sliding_window": 8, "use_sliding_window": true, "layer_types": []string{"full_attention"}}, `field layer_types: 1 entries, too few`},
		{"qwen2_moe", map[string]any{"sliding_window": 8, "use_sliding_window": true, "layer_types": []string{"a", "b", "c", "d"}}, `field layer_types: "a" is not supported`},
		{"olmoe", map[string]any{"clip_qkv": -1}, `field clip_qkv: -1: must be above 0`},
	} {
		_, err := ParseConfig(modelstest.Config(c.kind, c.edit), "config.json")
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with %v: %v\nwant %s", c.kind, c.edit, err, c.want)
		}
	}
	for text, want := range map[string]string{
		"": "it is empty", "null": "null", "[]": "a JSON array", "{": "it ends too early", "hello": "line 1 is not JSON", "{\n\"a\": 1,\n}": "line 3 is not JSON",
		"{} {}": "something follows the JSON object", `{"model_type": "mixtral"} x`: "something follows the JSON object",
	} {
		if _, err := ParseConfig([]byte(text), "config.json"); !errors.Is(err, ErrConfig) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestReadConfig(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadConfig(dir); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "config.json: there is no such file; give the directory") {
		t.Errorf("empty directory: %v", err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("config.json", string(modelstest.Config("mixtral", map[string]any{"eos_token_id": 2})))
	for _, c := range []struct {
		generation string
		want       []int32
	}{{"", []int32{2}}, {`{"eos_token_id": 7}`, []int32{7}}, {`{"eos_token_id": [7, 8]}`, []int32{7, 8}}, {`{"temperature": 1}`, []int32{2}}} {
		if c.generation != "" {
			write("generation_config.json", c.generation)
		}
		got, err := ReadConfig(dir)
		if err != nil || !slices.Equal(got.EOS, c.want) {
			t.Errorf("generation config %s: %v, want %v (%v)", c.generation, got, c.want, err)
		}
	}
	write("generation_config.json", `{"eos_token_id": {}}`)
	if _, err := ReadConfig(dir); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "generation_config.json: field eos_token_id") {
		t.Errorf("bad generation config: %v", err)
	}
	write("config.json", strings.Repeat(" ", untrusted.MaxSettings+1))
	if _, err := ReadConfig(dir); !errors.Is(err, ErrConfig) {
		t.Errorf("huge config: %v", err)
	}
}

// Whatever a config says, it is refused, or an architecture whose sizes make
// sense.
func FuzzParseConfig(f *testing.F) {
	for _, name := range configs.PresetNames() {
		data, _ := configs.Preset(name)
		f.Add(data)
	}
	for _, a := range architectures {
		f.Add(modelstest.Config(a.kind, nil))
	}
	f.Add(modelstest.Config("phimoe", map[string]any{"rope_scaling": modelstest.LongRoPE}))
	f.Add(modelstest.Config("qwen2_moe", map[string]any{"mlp_only_layers": []int{1}, "use_sliding_window": true, "sliding_window": 8}))
	for _, rope := range []map[string]any{
		{"type": "linear", "factor": 2},
		{"rope_type": "dynamic", "factor": 2.3},
		{"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 0.7},
		{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
	} {
		f.Add(modelstest.Config("mixtral", map[string]any{"rope_scaling": rope}))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if c, err := new(Config).WithGeneration(data, "generation_config.json"); err != nil && !errors.Is(err, ErrConfig) || err == nil && c == nil {
			t.Fatalf("generation configuration: %v", err)
		}
		c, err := ParseConfig(data, "config.json")
		if err != nil {
			if !errors.Is(err, ErrConfig) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		if len(c.Windows) != c.Layers || len(c.Dense) != c.Layers || c.Heads%c.KVHeads != 0 || c.HeadDim%2 != 0 || c.TopK > c.Experts {
			t.Fatalf("inconsistent: %+v", c)
		}
		// Counting tensors takes memory for each layer.
		if c.Layers <= 64 && c.Parameters() <= 0 {
			t.Fatalf("%d parameters", c.Parameters())
		}
		for _, variant := range c.RoPE.Frequencies(c.HeadDim) {
			for _, inverse := range variant.Inverse {
				if !(inverse >= 0) || !(variant.Scale > 0) {
					t.Fatalf("frequency %v, scale %v", inverse, variant.Scale)
				}
			}
		}
	})
}
