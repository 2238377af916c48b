package models

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/untrusted"
)

// ErrConfig means that a config.json cannot be used: it is damaged, lacks a field, or
// requires an unsupported feature.
var ErrConfig = errors.New("model configuration cannot be used")

// ConfigError describes an error in a configuration file. It wraps ErrConfig.
type ConfigError struct {
	Source string // the file, or the preset's name
	Field  string // name of the field in the file, or ""
	Reason string
}

func (e *ConfigError) Error() string {
	s := "models: " + untrusted.Name(e.Source) + ": "
	if e.Field != "" {
		s += "field " + e.Field + ": "
	}
	return s + e.Reason
}

// Unwrap returns ErrConfig.
func (e *ConfigError) Unwrap() error { return ErrConfig }

// architectures lists the supported architectures: model_type and the class name in
// transformers.
var architectures = []struct{ kind, class string }{
	{"mixtral", "MixtralForCausalLM"},
	{"olmoe", "OlmoeForCausalLM"},
	{"phimoe", "PhimoeForCausalLM"},
	{"qwen2_moe", "Qwen2MoeForCausalLM"},
	{"qwen3_moe", "Qwen3MoeForCausalLM"},
}

func supported() string {
	var kinds []string
	for _, a := range architectures {
		kinds = append(kinds, a.kind)
	}
	return strings.Join(kinds, ", ")
}

// ReadConfig reads config.json from a checkpoint directory, and the EOS ids from
// generation_config.json if it exists.
func ReadConfig(dir string) (*Config, error) {
	path := filepath.Join(dir, "config.json")
	data, err := readConfigFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &ConfigError{Source: path, Reason: "there is no such file; give the directory of a complete Hugging Face checkpoint"}
	}
	if err != nil {
		return nil, err
	}
	c, err := ParseConfig(data, path)
	if err != nil {
		return nil, err
	}
	path = filepath.Join(dir, "generation_config.json")
	data, err = readConfigFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return nil, err
	}
	return c.WithGeneration(data, path)
}

func readConfigFile(path string) ([]byte, error) {
	data, err := untrusted.ReadFile(path, untrusted.MaxSettings)
	var size *untrusted.SizeError
	if errors.As(err, &size) {
		return nil, &ConfigError{Source: path, Reason: fmt.Sprintf("over %d bytes: not a model's configuration", size.Limit)}
	}
	if err != nil {
		return nil, fmt.Errorf("models: %w", err)
	}
	return data, nil
}

// WithGeneration returns c with the EOS ids of a generation_config.json (a number or a
// list). Without the field, c's own ids remain.
func (c *Config) WithGeneration(data []byte, source string) (*Config, error) {
	r := newReader(data, source)
	d := *c
	if r.has("eos_token_id") {
		d.EOS = r.ids("eos_token_id")
	}
	if r.err != nil {
		return nil, r.err
	}
	return &d, nil
}

// ParseConfig parses a Hugging Face config.json with older or newer field names; source
// identifies it in errors. Fields that the architecture needs are required, unless
// transformers has a default for this architecture on which published checkpoints rely.
// Errors are *ConfigError.
func ParseConfig(data []byte, source string) (*Config, error) {
	r := newReader(data, source)
	kind := r.kind()
	if r.err != nil {
		return nil, r.err
	}
	c := &Config{Type: kind}
	r.unsupported()

	c.Hidden = r.size("hidden_size", maxHidden)
	c.Layers = r.size("num_hidden_layers", maxLayers)
	c.fullLayers = c.Layers
	c.Heads = r.size("num_attention_heads", maxHeads)
	c.KVHeads = c.Heads
	// OLMoE alone defines its key heads by its query heads; null means that in all.
	if r.has("num_key_value_heads") || kind != "olmoe" && !r.null("num_key_value_heads") {
		c.KVHeads = r.size("num_key_value_heads", maxHeads)
	}
	c.Vocab = r.size("vocab_size", maxVocab)
	c.MaxPositions = r.size("max_position_embeddings", maxPositions)
	if r.err != nil {
		return nil, r.err
	}
	if c.Heads%c.KVHeads != 0 {
		r.fail("num_key_value_heads", "%d does not divide num_attention_heads, %d", c.KVHeads, c.Heads)
	}
	switch {
	case r.has("head_dim"):
		c.HeadDim = r.size("head_dim", maxHeadDim)
	case kind == "qwen3_moe":
		r.fail("head_dim", "missing, and this architecture needs it")
	case c.Hidden%c.Heads != 0:
		r.fail("head_dim", "missing, and hidden_size, %d, is not a multiple of num_attention_heads, %d", c.Hidden, c.Heads)
	default:
		c.HeadDim = c.Hidden / c.Heads
	}
	if c.HeadDim > maxHeadDim || c.HeadDim%2 != 0 {
		r.fail("head_dim", "%d: must be even, and at most %d", c.HeadDim, maxHeadDim)
	}
	c.TiedEmbeddings = r.boolean("tie_word_embeddings", false)
	c.NormEps = float32(r.positive("rms_norm_eps"))
	c.DType = r.dtype()
	c.EOS = r.ids("eos_token_id")
	c.Dense = make([]bool, c.Layers)
	c.Windows = make([]int, c.Layers)
	c.TopK = r.size("num_experts_per_tok", maxExperts)
	c.Experts = r.experts()
	width := "intermediate_size"

	switch kind {
	case "mixtral":
		c.Route = kernels.SoftmaxRenorm
		r.window(c, 0, everyLayer)
	case "phimoe":
		c.Norm, c.NormBias = kernels.Layer, true
		c.QKVBias = r.needBoolean("attention_bias")
		c.OBias = c.QKVBias
		c.HeadBias = r.needBoolean("lm_head_bias")
		c.Route, c.Jitter = kernels.SparseMixer, 0.01
		if r.has("router_jitter_noise") {
			c.Jitter = r.number("router_jitter_noise", 0, 1)
		}
		if c.TopK != 2 {
			r.fail("num_experts_per_tok", "%d: this architecture's routing chooses 2", c.TopK)
		}
		r.window(c, 0, everyLayer)
	case "qwen2_moe":
		c.QKVBias = r.boolean("qkv_bias", true)
		c.Route = route(r.boolean("norm_topk_prob", false))
		c.SharedWidth = r.size("shared_expert_intermediate_size", maxWidth)
		width = "moe_intermediate_size"
		r.dense(c)
		if r.boolean("use_sliding_window", false) {
			r.window(c, qwenWindow, r.alternating)
		}
	case "qwen3_moe":
		c.QKVBias = r.boolean("attention_bias", false)
		c.OBias = c.QKVBias
		c.QKNorm = HeadQKNorm
		c.Route = route(r.boolean("norm_topk_prob", false))
		width = "moe_intermediate_size"
		r.dense(c)
		if r.boolean("use_sliding_window", false) {
			r.window(c, qwenWindow, everyLayer)
		}
	case "olmoe":
		c.QKVBias = r.boolean("attention_bias", false)
		c.OBias = c.QKVBias
		c.QKNorm = WholeQKNorm
		c.Route = route(r.boolean("norm_topk_prob", false))
		if r.has("clip_qkv") {
			c.ClipQKV = float32(r.positive("clip_qkv"))
		}
	}
	c.ExpertWidth = r.size(width, maxWidth)
	if n := c.ExpertCount(); n > maxAllExperts {
		r.fail("", "%d experts in %d layers are %d together: moeserve runs models of at most %d", c.Experts, c.MoELayers(), n, maxAllExperts)
	}
	if c.TopK > c.Experts {
		r.fail("num_experts_per_tok", "%d, but there are %d experts", c.TopK, c.Experts)
	}
	c.RoPE = r.rope(c)
	if r.err != nil {
		return nil, r.err
	}
	return c, nil
}

// Limits of sizes, far above any real model's, which keep the count of
// parameters inside 63 bits.
const (
	maxHidden  = 1 << 17
	maxWidth   = 1 << 20
	maxLayers  = 1 << 10
	maxExperts = 1 << 12
	// maxAllExperts bounds the experts of all layers; published models have up to 25,000.
	maxAllExperts = 1 << 17
	maxHeads      = 1 << 12
	maxHeadDim    = 1 << 10
	maxVocab      = 1 << 24
	maxPositions  = 1 << 26
)

func route(renormalized bool) kernels.RouteMethod {
	if renormalized {
		return kernels.SoftmaxRenorm
	}
	return kernels.Softmax
}

func everyLayer(int) bool { return true }

// qwenWindow is the default window of a Qwen model that enables a sliding window.
const qwenWindow = 4096

// reader reads fields of a JSON object and keeps the first error.
type reader struct {
	source string
	fields map[string]json.RawMessage
	prefix string // of field names in errors, for an object inside another
	err    error
}

func newReader(data []byte, source string) *reader {
	r := &reader{source: source}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&r.fields); err != nil {
		r.fail("", "not a JSON object: %s", whyNot(data, err))
	} else if _, err := d.Token(); !errors.Is(err, io.EOF) {
		r.fail("", "something follows the JSON object")
	} else if r.fields == nil {
		r.fail("", "not a JSON object: null")
	}
	return r
}

// whyNot is why data is no JSON object, in words for whoever wrote the file.
func whyNot(data []byte, err error) string {
	var other *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &other):
		return "a JSON " + other.Value
	case errors.Is(err, io.EOF):
		return "it is empty"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "it ends too early"
	case errors.As(err, &syntax) && syntax.Offset > 0:
		return fmt.Sprintf("line %d is not JSON", 1+bytes.Count(data[:syntax.Offset-1], []byte("\n")))
	}
	return err.Error()
}

func (r *reader) fail(field, format string, args ...any) {
	if r.err == nil {
		if field != "" {
			field = r.prefix + field
		}
		r.err = &ConfigError{Source: r.source, Field: field, Reason: fmt.Sprintf(format, args...)}
	}
}

// has reports whether the field is present and not null.
func (r *reader) has(field string) bool {
	v, ok := r.fields[field]
	return ok && !bytes.Equal(v, []byte("null"))
}

// null reports whether the field is present and null.
func (r *reader) null(field string) bool {
	v, ok := r.fields[field]
	return ok && bytes.Equal(v, []byte("null"))
}

// decode reads a required field into v; want describes the expected value in errors.
func (r *reader) decode(field string, v any, want string) bool {
	if r.err != nil {
		return false
	}
	if !r.has(field) {
		r.fail(field, "missing, and this architecture needs it")
		return false
	}
	if json.Unmarshal(r.fields[field], v) != nil {
		r.fail(field, "%s: must be %s", brief(r.fields[field]), want)
		return false
	}
	return true
}

// brief formats a value for errors.
func brief(v json.RawMessage) string {
	const show = 40
	if len(v) > show {
		return strings.ToValidUTF8(string(v[:show]), "") + "…"
	}
	return string(v)
}

// size reads an integer from 1 to most.
func (r *reader) size(field string, most int) int {
	var n int
	if !r.decode(field, &n, "a whole number") {
		return 1
	}
	if n < 1 || n > most {
		r.fail(field, "%d: must be from 1 to %d", n, most)
		return 1
	}
	return n
}

// number reads a number between low and high.
func (r *reader) number(field string, low, high float64) float32 {
	var f float64
	if !r.decode(field, &f, "a number") {
		return 0
	}
	if f < low || f > high {
		r.fail(field, "%v: must be from %v to %v", f, low, high)
	}
	return float32(f)
}

// positive reads a number above 0 that float32 can hold. It returns 1 for an invalid one.
func (r *reader) positive(field string) float64 {
	var f float64
	if !r.decode(field, &f, "a number") {
		return 1
	}
	if float32(f) <= 0 || f > math.MaxFloat32 {
		r.fail(field, "%v: must be above 0, and fit float32", f)
		return 1
	}
	return f
}

func (r *reader) boolean(field string, otherwise bool) bool {
	if !r.has(field) {
		return otherwise
	}
	return r.needBoolean(field)
}

func (r *reader) needBoolean(field string) bool {
	var b bool
	r.decode(field, &b, "true or false")
	return b
}

func (r *reader) text(field string) string {
	var s string
	r.decode(field, &s, "a text")
	return s
}

// ids reads token ids: a number, a list, or null.
func (r *reader) ids(field string) []int32 {
	if !r.has(field) {
		return nil
	}
	var one int32
	if json.Unmarshal(r.fields[field], &one) == nil {
		return []int32{one}
	}
	var many []int32
	r.decode(field, &many, "a token id or a list of them")
	return many
}

// kind reads the architecture.
func (r *reader) kind() string {
	if r.err != nil {
		return ""
	}
	known := func(kind string) bool {
		for _, a := range architectures {
			if a.kind == kind {
				return true
			}
		}
		return false
	}
	if r.has("model_type") {
		kind := r.text("model_type")
		if r.err == nil && !known(kind) {
			r.unknown("model_type", untrusted.Name(kind))
		}
		return kind
	}
	var classes []string
	if !r.has("architectures") {
		r.fail("model_type", "missing; moeserve runs %s", supported())
		return ""
	}
	r.decode("architectures", &classes, "a list of class names")
	for _, a := range architectures {
		// Published Phi checkpoints write PhiMoEForCausalLM.
		if len(classes) > 0 && strings.EqualFold(classes[0], a.class) {
			return a.kind
		}
	}
	r.unknown("architectures", untrusted.Name(strings.Join(classes, ", ")))
	return ""
}

// unknown rejects an architecture. A configuration without any expert field is reported as
// a dense model.
func (r *reader) unknown(field, name string) {
	experts := false
	for key, value := range r.fields {
		// A multimodal model has its language model's fields in an object of their own.
		named := strings.Contains(key, "expert") && string(value) != "null" && string(value) != "0"
		experts = experts || named || value[0] == '{' && bytes.Contains(value, []byte("expert"))
	}
	if experts {
		r.fail(field, "%s is a mixture-of-experts architecture that is not supported; moeserve runs %s", name, supported())
		return
	}
	r.fail(field, "%s is a dense model, without experts to offload; moeserve runs the mixture-of-experts models %s", name, supported())
}

// unsupported rejects features that would silently change results.
func (r *reader) unsupported() {
	if r.has("hidden_act") {
		if act := r.text("hidden_act"); r.err == nil && act != "silu" && act != "swish" {
			r.fail("hidden_act", "%s is not supported, only \"silu\"", untrusted.Quote(act))
		}
	}
	for _, field := range []string{"quantization_config", "compression_config"} {
		if !r.has(field) {
			continue
		}
		var q struct {
			Method string `json:"quant_method"`
		}
		how := ""
		if json.Unmarshal(r.fields[field], &q) == nil && q.Method != "" {
			how = " (" + untrusted.Name(q.Method) + ")"
		}
		r.fail(field, "quantized weights%s are not supported; download the original checkpoint in BF16, FP16 or FP32", how)
	}
	if r.has("partial_rotary_factor") {
		if f := r.number("partial_rotary_factor", 0, math.MaxFloat32); f != 1 {
			r.fail("partial_rotary_factor", "%v is not supported, only 1", f)
		}
	}
}

// experts reads the number of experts from either field name.
func (r *reader) experts() int {
	const older, newer = "num_experts", "num_local_experts"
	switch {
	case r.has(older) && r.has(newer):
		a, b := r.size(older, maxExperts), r.size(newer, maxExperts)
		if a != b {
			r.fail(newer, "%d, but %s is %d", b, older, a)
		}
		return a
	case r.has(older):
		return r.size(older, maxExperts)
	}
	return r.size(newer, maxExperts)
}

// dtype reads the type of weights from either field name.
func (r *reader) dtype() kernels.DType {
	for _, field := range []string{"dtype", "torch_dtype"} {
		if !r.has(field) {
			continue
		}
		switch name := r.text(field); strings.TrimPrefix(name, "torch.") {
		case "bfloat16":
			return kernels.BF16
		case "float16":
			return kernels.F16
		case "float32":
			return kernels.F32
		default:
			r.fail(field, "%s is not supported, only bfloat16, float16 and float32", untrusted.Quote(name))
		}
	}
	return kernels.F32
}

// dense reads which layers have a dense MLP instead of experts.
func (r *reader) dense(c *Config) {
	step := 1
	if r.has("decoder_sparse_step") {
		step = r.size("decoder_sparse_step", math.MaxInt32)
	}
	var only []int
	if r.has("mlp_only_layers") {
		r.decode("mlp_only_layers", &only, "a list of layers")
	}
	for i := range c.Dense {
		c.Dense[i] = slices.Contains(only, i) || (i+1)%step != 0
	}
	if slices.Contains(c.Dense, true) {
		c.DenseWidth = r.size("intermediate_size", maxWidth)
	}
}

// window reads the sliding window of the layers for which slides returns true; null or 0
// means no window.
func (r *reader) window(c *Config, otherwise int, slides func(layer int) bool) {
	w := otherwise
	if r.null("sliding_window") || r.has("sliding_window") && !r.decode("sliding_window", &w, "a whole number or null") {
		return
	}
	if w < 0 {
		r.fail("sliding_window", "%d: must not be negative", w)
		return
	}
	if w >= c.MaxPositions {
		w = 0 // no sequence is longer than the window
	}
	for i := range c.Windows {
		if slides(i) {
			c.Windows[i] = w
		}
	}
}

// alternating reports whether a layer of Qwen2-MoE uses the sliding window: as layer_types
// specifies, else every other layer of the first max_window_layers, from layer 0 on.
func (r *reader) alternating(layer int) bool {
	if r.has("layer_types") {
		var types []string
		if !r.decode("layer_types", &types, "a list of texts") {
			return false
		}
		if layer >= len(types) {
			r.fail("layer_types", "%d entries, too few for num_hidden_layers", len(types))
			return false
		}
		switch types[layer] {
		case "sliding_attention":
			return true
		case "full_attention":
			return false
		}
		r.fail("layer_types", "%s is not supported, only full_attention and sliding_attention", untrusted.Quote(types[layer]))
		return false
	}
	first := 28 // as transformers has it
	if r.has("max_window_layers") {
		r.decode("max_window_layers", &first, "a whole number")
	}
	return layer%2 == 0 && layer < first
}

// rope reads the rotary embedding: rope_theta and rope_scaling, or the newer
// rope_parameters with both.
func (r *reader) rope(c *Config) RoPE {
	e := RoPE{ShortScale: 1, LongScale: 1}
	top, field := r, "rope_scaling"
	if r.has("rope_parameters") {
		field = "rope_parameters"
		var older, newer map[string]any
		if r.has("rope_scaling") && r.decode("rope_scaling", &older, "an object") && r.decode(field, &newer, "an object") {
			for _, name := range slices.Sorted(maps.Keys(older)) {
				if v := older[name]; v != nil && !reflect.DeepEqual(v, newer[name]) && !(name == "type" && reflect.DeepEqual(v, newer["rope_type"])) {
					r.fail("rope_scaling."+name, "rope_parameters is there too, and says something else; remove one of them")
				}
			}
		}
	}
	in := &reader{source: r.source, prefix: field + ".", fields: map[string]json.RawMessage{}}
	if r.has(field) {
		r.decode(field, &in.fields, "an object")
	}
	if in.has("rope_theta") {
		top = in
	}
	e.Theta = top.positive("rope_theta")

	kind := "default"
	for _, name := range []string{"rope_type", "type"} {
		if in.has(name) {
			kind = in.text(name)
			break
		}
	}
	switch kind {
	case "default":
	case "longrope", "su":
		in.longrope(c, r, &e)
	case "linear":
		e.Scaling = Scaling{Kind: LinearScaling, Factor: in.positive("factor")}
	case "dynamic":
		in.dynamic(c, &e)
	case "yarn":
		in.yarn(c, r, &e)
	case "llama3":
		in.llama3(c, r, &e)
	default:
		in.fail("rope_type", "%s is not supported, only default, linear, dynamic, yarn, longrope and llama3", untrusted.Quote(kind))
	}
	for _, field := range []string{"short_mscale", "long_mscale"} {
		if e.Scaling.Kind != NoScaling && in.has(field) {
			in.fail(field, "is of longrope, and the rope_type is %s", kind)
		}
	}
	if in.has("partial_rotary_factor") {
		if f := in.number("partial_rotary_factor", 0, math.MaxFloat32); f != 1 {
			in.fail("partial_rotary_factor", "%v is not supported, only 1", f)
		}
	}
	if r.err == nil {
		r.err = in.err
	}
	return e
}

// dynamic reads e's Theta for sequences of up to MaxPositions tokens; longer ones, for which
// transformers raises it, there are none.
func (r *reader) dynamic(c *Config, e *RoPE) {
	factor := r.positive("factor")
	if c.HeadDim <= 2 {
		r.fail("rope_type", "dynamic needs heads of more than 2 elements")
		return
	}
	positions := float64(c.MaxPositions)
	growth := factor*positions/positions - (factor - 1)
	e.Theta *= math.Pow(growth, float64(c.HeadDim)/float64(c.HeadDim-2))
}

// yarn reads e's scaling out of r, the RoPE object of the config in top.
func (r *reader) yarn(c *Config, top *reader, e *RoPE) {
	s := Scaling{Kind: YarnScaling, BetaFast: 32, BetaSlow: 1, Truncate: r.boolean("truncate", true)}
	s.Original = r.original(top, c.MaxPositions)
	if r.null("factor") {
		s.Factor = float64(c.MaxPositions) / float64(s.Original)
	} else {
		s.Factor = r.positive("factor")
	}
	for field, to := range map[string]*float64{"beta_fast": &s.BetaFast, "beta_slow": &s.BetaSlow} {
		var f float64
		if r.has(field) && r.decode(field, &f, "a number") && f != 0 {
			*to = r.positive(field)
		}
	}
	if s.BetaFast < s.BetaSlow {
		r.fail("beta_fast", "%v: must not be below beta_slow, %v", s.BetaFast, s.BetaSlow)
	}
	if e.Theta <= 1 {
		r.fail("rope_theta", "%v: must be above 1 with yarn", e.Theta)
	}
	attention := func(m float64) float64 {
		if s.Factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(s.Factor) + 1
	}
	scale := attention(1)
	var m, mAll float64
	if r.has("mscale") && r.has("mscale_all_dim") {
		r.decode("mscale", &m, "a number")
		r.decode("mscale_all_dim", &mAll, "a number")
	}
	switch {
	case r.has("attention_factor"):
		scale = r.positive("attention_factor")
	case m != 0 && mAll != 0:
		scale = attention(m) / attention(mAll)
	}
	if !(scale > 0 && scale <= math.MaxFloat32) {
		r.fail("mscale", "with mscale_all_dim and factor it scales by %v: must be above 0", scale)
	}
	e.Scaling, e.ShortScale = s, float32(scale)
}

// llama3 reads e's scaling out of r, the RoPE object of the config in top.
func (r *reader) llama3(c *Config, top *reader, e *RoPE) {
	e.Scaling = Scaling{
		Kind: Llama3Scaling, Factor: r.positive("factor"), Original: r.original(top, c.MaxPositions),
		LowFactor: r.positive("low_freq_factor"), HighFactor: r.positive("high_freq_factor"),
	}
	if r.err == nil && e.Scaling.HighFactor <= e.Scaling.LowFactor {
		r.fail("high_freq_factor", "%v: must be above low_freq_factor, %v", e.Scaling.HighFactor, e.Scaling.LowFactor)
	}
}

const originalPositions = "original_max_position_embeddings"

// original reads the context before it was extended: the config's own before the RoPE
// object's, as in transformers, and otherwise where neither has one.
func (r *reader) original(top *reader, otherwise int) int {
	for _, from := range []*reader{top, r} {
		if from.has(originalPositions) {
			n := from.size(originalPositions, maxPositions)
			if r.err == nil {
				r.err = from.err
			}
			return n
		}
	}
	return otherwise
}

// longrope reads e's factors out of r, the RoPE object of the config in top.
func (r *reader) longrope(c *Config, top *reader, e *RoPE) {
	from := r
	if !r.has(originalPositions) && top.has(originalPositions) {
		from = top
	}
	e.LongAfter = from.size(originalPositions, maxPositions)
	if r.err == nil {
		r.err = from.err
	}
	e.Short, e.Long = r.factors("short_factor", c.HeadDim/2), r.factors("long_factor", c.HeadDim/2)

	// Without an mscale, transformers scales by what LongRoPE's paper derives from
	// how much the context grows.
	scale := 1.0
	growth := float64(c.MaxPositions) / float64(e.LongAfter)
	if r.has("factor") {
		growth = r.positive("factor")
	}
	switch {
	case r.has("attention_factor"):
		scale = r.positive("attention_factor")
	case growth > 1 && e.LongAfter > 1:
		scale = math.Sqrt(1 + math.Log(growth)/math.Log(float64(e.LongAfter)))
	}
	e.ShortScale, e.LongScale = float32(scale), float32(scale)
	if r.has("short_mscale") {
		e.ShortScale = float32(r.positive("short_mscale"))
	}
	if r.has("long_mscale") {
		e.LongScale = float32(r.positive("long_mscale"))
	}
}

// factors reads n positive numbers.
func (r *reader) factors(field string, n int) []float32 {
	var f []float32
	if !r.decode(field, &f, "a list of numbers") {
		return nil
	}
	if len(f) != n {
		r.fail(field, "%d factors, %d needed: half of the head size", len(f), n)
	}
	for _, x := range f {
		if !(x > 0) {
			r.fail(field, "%v: factors must be above 0", x)
		}
	}
	return f
}
