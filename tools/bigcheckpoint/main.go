// Command bigcheckpoint writes a Hugging Face checkpoint with seeded random
// weights: of the Mixtral architecture and about the requested size, or, with
// -preset, of a preset's shape. It is for measuring how a loader behaves on a
// checkpoint that matters in size: its time and its peak memory. Completions of the
// model are meaningless.
//
//	go run ./tools/bigcheckpoint -o /tmp/big -bytes 1.2e9
//	go run ./tools/bigcheckpoint -o /tmp/qwen -preset qwen1.5-moe-a2.7b -shard-bytes 4e9 -tokenizer testdata/fixtures/qwen2_moe
//
// Weights are made while they are written, so the program's own memory stays
// small. The same flags give the same files.
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

// model is what is written: config.json, the tensors in their order, and a reader of
// each one's bytes.
type model struct {
	config []byte
	specs  []write.Spec
	data   func(write.Spec) (io.Reader, error)
}

// bytes returns the size of all weights.
func (m *model) bytes() (total int64, err error) {
	for _, s := range m.specs {
		n, err := s.Bytes()
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// shape holds the dimensions of the model; layers follows from the requested size.
type shape struct {
	hidden, intermediate   int
	heads, kvHeads         int
	experts, perToken      int
	vocab, layers, context int
}

// large is a Mixtral of a quarter of the published width, with the vocabulary of
// the fixtures' tokenizer: 176 MB of experts per layer.
var large = shape{
	hidden: 1024, intermediate: 3584, heads: 16, kvHeads: 4,
	experts: 8, perToken: 2, vocab: 512, context: 2048,
}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "bigcheckpoint:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("bigcheckpoint", flag.ContinueOnError)
	var (
		dir       = flags.String("o", "", "directory to write, made if need be; must be empty")
		size      = flags.Float64("bytes", 1.2e9, "least size of the weights, in bytes")
		shard     = flags.Float64("shard-bytes", 4e8, "largest size of a shard, in bytes")
		seed      = flags.Uint64("seed", 1, "seed of the weights")
		preset    = flags.String("preset", "", "a preset whose shape it has, instead of -bytes: "+strings.Join(configs.PresetNames(), ", "))
		layers    = flags.Int("layers", 0, "layers of the preset; 0: all")
		tokenizer = flags.String("tokenizer", "testdata/fixtures/mixtral", "directory to copy the tokenizer's files from")
	)
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch {
	case *dir == "":
		return errors.New("no output directory: give one with -o DIR")
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case !between(*size, 1, 1e13):
		return fmt.Errorf("-bytes %g is not between 1 and 1e13", *size)
	case !between(*shard, 1, 1e13):
		return fmt.Errorf("-shard-bytes %g is not between 1 and 1e13", *shard)
	}
	given := map[string]bool{}
	flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var (
		m   *model
		err error
	)
	switch {
	case *preset != "" && given["bytes"]:
		return errors.New("-preset and -bytes both set the size: use one")
	case *preset != "":
		m, err = presetModel(*preset, *layers, *seed)
	case given["layers"]:
		return errors.New("-layers needs -preset; with -bytes the number of layers follows from the size")
	default:
		m, err = large.sized(int64(*size)).model(*seed)
	}
	if err != nil {
		return err
	}
	total, err := save(*dir, m, int64(*shard), *tokenizer)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: %d tensors, %d bytes of weights\n", *dir, len(m.specs), total)
	return nil
}

// between reports whether low <= v <= high, which no NaN is.
func between(v, low, high float64) bool { return low <= v && v <= high }

// sized returns s with the fewest layers that make its weights at least bytes.
func (s shape) sized(bytes int64) shape {
	s.layers = 1
	one := s.bytes()
	s.layers = 2
	perLayer := s.bytes() - one
	s.layers = max(1, int((bytes-(one-perLayer)+perLayer-1)/perLayer))
	return s
}

// bytes returns the size of all weights.
func (s shape) bytes() (total int64) {
	for _, t := range s.tensors() {
		n := int64(2) // of a BF16 element
		for _, d := range t.Shape {
			n *= int64(d)
		}
		total += n
	}
	return total
}

// tensors returns all weights in the order of the layers.
func (s shape) tensors() []write.Spec {
	var all []write.Spec
	add := func(name string, dims ...int) {
		all = append(all, write.Spec{Name: name, DType: safetensors.BF16, Shape: dims})
	}
	kv := s.hidden / s.heads * s.kvHeads
	add("model.embed_tokens.weight", s.vocab, s.hidden)
	for l := range s.layers {
		p := fmt.Sprintf("model.layers.%d.", l)
		add(p+"input_layernorm.weight", s.hidden)
		add(p+"self_attn.q_proj.weight", s.hidden, s.hidden)
		add(p+"self_attn.k_proj.weight", kv, s.hidden)
		add(p+"self_attn.v_proj.weight", kv, s.hidden)
		add(p+"self_attn.o_proj.weight", s.hidden, s.hidden)
		add(p+"post_attention_layernorm.weight", s.hidden)
		add(p+"block_sparse_moe.gate.weight", s.experts, s.hidden)
		for e := range s.experts {
			x := fmt.Sprintf("%sblock_sparse_moe.experts.%d.", p, e)
			add(x+"w1.weight", s.intermediate, s.hidden)
			add(x+"w2.weight", s.hidden, s.intermediate)
			add(x+"w3.weight", s.intermediate, s.hidden)
		}
	}
	add("model.norm.weight", s.hidden)
	add("lm_head.weight", s.vocab, s.hidden)
	return all
}

// model returns s with seeded weights.
func (s shape) model(seed uint64) (*model, error) {
	config, err := json.MarshalIndent(s.config(), "", "  ")
	return &model{config: append(config, '\n'), specs: s.tensors(), data: func(t write.Spec) (io.Reader, error) {
		n, err := t.Bytes()
		return io.LimitReader(newWeights(t, seed), n), err
	}}, err
}

// config returns config.json.
func (s shape) config() map[string]any {
	return map[string]any{
		"architectures":           []string{"MixtralForCausalLM"},
		"attention_dropout":       0.0,
		"bos_token_id":            nil,
		"dtype":                   "bfloat16",
		"eos_token_id":            0,
		"hidden_act":              "silu",
		"hidden_size":             s.hidden,
		"intermediate_size":       s.intermediate,
		"max_position_embeddings": s.context,
		"model_type":              "mixtral",
		"num_attention_heads":     s.heads,
		"num_experts_per_tok":     s.perToken,
		"num_hidden_layers":       s.layers,
		"num_key_value_heads":     s.kvHeads,
		"num_local_experts":       s.experts,
		"pad_token_id":            0,
		"rms_norm_eps":            1e-5,
		"rope_parameters":         map[string]any{"rope_type": "default", "rope_theta": 1e6},
		"sliding_window":          nil,
		"tie_word_embeddings":     false,
		"vocab_size":              s.vocab,
	}
}

// save writes the checkpoint and returns the bytes of its weights. A directory
// with files in it is refused, since they would become part of the checkpoint.
func save(dir string, m *model, shardBytes int64, tokenizer string) (int64, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	if there, err := os.ReadDir(dir); err != nil {
		return 0, err
	} else if len(there) > 0 {
		return 0, fmt.Errorf("%s is not empty: remove its files or use another directory", dir)
	}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "generation_config.json"} {
		data, err := os.ReadFile(filepath.Join(tokenizer, name))
		if err != nil {
			return 0, fmt.Errorf("%w: run in the repository's root, or give -tokenizer DIR", err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return 0, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), m.config, 0o644); err != nil {
		return 0, err
	}
	if err := write.Save(dir, m.specs, shardBytes, m.data); err != nil {
		return 0, err
	}
	return m.bytes()
}

// weights is an endless reader of BF16 values of one tensor: matrices about
// normal around 0 with deviation 1/sqrt(columns), vectors (norms) around 1 with
// deviation 1/8.
type weights struct {
	source  *rand.PCG
	mean    float32
	scale   float32 // deviation of a value per unit of the generator's sum
	pending []byte  // made, not yet read
	block   [8192]byte
}

// A sum of four random bytes, centered, is about normal; this is its deviation.
var sumDeviation = math.Sqrt(4 * (256*256 - 1) / 12.0)

func newWeights(t write.Spec, seed uint64) *weights {
	key := sha256.Sum256(fmt.Appendf(nil, "%d/%s", seed, t.Name))
	w := &weights{source: rand.NewPCG(binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:16]))}
	deviation := 1 / math.Sqrt(float64(t.Shape[len(t.Shape)-1]))
	if len(t.Shape) == 1 {
		w.mean, deviation = 1, 1.0/8
	}
	w.scale = float32(deviation / sumDeviation)
	return w
}

// Read fills p; it never fails.
func (w *weights) Read(p []byte) (int, error) {
	if len(w.pending) == 0 {
		for i := 0; i < len(w.block); i += 4 {
			u := w.source.Uint64() // two values of four bytes each
			binary.LittleEndian.PutUint16(w.block[i:], w.value(uint32(u)))
			binary.LittleEndian.PutUint16(w.block[i+2:], w.value(uint32(u>>32)))
		}
		w.pending = w.block[:]
	}
	n := copy(p, w.pending)
	w.pending = w.pending[n:]
	return n, nil
}

// value maps four random bytes to a BF16, truncated from float32.
func (w *weights) value(u uint32) uint16 {
	sum := int32(u&0xff) + int32(u>>8&0xff) + int32(u>>16&0xff) + int32(u>>24) - 510
	return uint16(math.Float32bits(w.mean+float32(sum)*w.scale) >> 16)
}
