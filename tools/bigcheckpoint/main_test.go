package main

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

const tokenizer = "../../testdata/fixtures/mixtral"

var small = shape{
	hidden: 64, intermediate: 96, heads: 4, kvHeads: 2,
	experts: 4, perToken: 2, vocab: 512, context: 128, layers: 2,
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	m, err := small.model(7)
	if err != nil {
		t.Fatal(err)
	}
	total, err := save(dir, m, 100_000, tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	c, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	if c.Bytes() != total || len(c.Files()) < 3 {
		t.Errorf("%d bytes in %d files, want %d in several", c.Bytes(), len(c.Files()), total)
	}
	var want []string
	for _, s := range small.tensors() {
		want = append(want, s.Name)
		got, _ := c.Tensor(s.Name)
		if !slices.Equal(got.Shape, s.Shape) || got.DType != safetensors.BF16 {
			t.Fatalf("%s is %s %v", s.Name, got.DType, got.Shape)
		}
		values := make([]float32, got.Elements())
		if err := got.Float32s(values); err != nil {
			t.Fatal(err)
		}
		mean, deviation := moments(values)
		wantMean, wantDeviation := 0.0, 1/math.Sqrt(float64(s.Shape[len(s.Shape)-1]))
		if len(s.Shape) == 1 {
			wantMean, wantDeviation = 1, 0.125
		}
		// Five standard errors, and the shift of half a step by truncation.
		room := 5/math.Sqrt(float64(len(values))) + 0.03
		if math.Abs(mean-wantMean) > room*wantDeviation || math.Abs(deviation/wantDeviation-1) > room {
			t.Errorf("%s: mean %.4f and deviation %.4f, want %.4f and %.4f", s.Name, mean, deviation, wantMean, wantDeviation)
		}
	}
	if missing, unexpected := c.Diff(slices.Values(want)); len(missing)+len(unexpected) > 0 {
		t.Errorf("missing %v, unexpected %v", missing, unexpected)
	}
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		ModelType string `json:"model_type"`
		Layers    int    `json:"num_hidden_layers"`
	}
	if err := json.Unmarshal(text, &config); err != nil || config.ModelType != "mixtral" || config.Layers != 2 {
		t.Errorf("config %+v, %v", config, err)
	}
	if _, err := save(dir, m, 100_000, tokenizer); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("a second time: %v", err)
	}
}

// What is written of a preset is what moeserve makes of it, and what it finds in a
// checkpoint; in the order in which published ones have it.
func TestPreset(t *testing.T) {
	const preset, layers, seed = "phi-tiny-moe", 2, 5
	data, _ := configs.Preset(preset)
	var fields map[string]any
	if err := json.Unmarshal(data, &fields); err != nil {
		t.Fatal(err)
	}
	// Its architecture, a few megabytes of it.
	fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"] = 512, 128, 1024
	data, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	m, err := configModel(data, "preset "+preset, layers, seed)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "new")
	total, err := save(dir, m, 4e6, tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	config, err := models.ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	files, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close() //nolint:errcheck // only read from
	if config.Layers != layers || files.Bytes() != total || len(files.Files()) < 2 {
		t.Errorf("%d layers, %d bytes in %d files; want %d, %d in several", config.Layers, files.Bytes(), len(files.Files()), layers, total)
	}
	if _, err := models.NewLayout(config, models.NewCheckpoint(files), nil); err != nil {
		t.Error(err)
	}
	dummy := models.NewDummy(config, seed)
	for _, name := range dummy.Names() {
		got, _ := files.Tensor(name)
		err := dummy.Read(name, 0, int64(len(got.Data)), func(want []byte) error {
			if !bytes.Equal(got.Data, want) {
				t.Errorf("%s differs from the dummy's", name)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if first, last := m.specs[0].Name, m.specs[len(m.specs)-1].Name; first != "model.embed_tokens.weight" || strings.Contains(last, "layers") {
		t.Errorf("the first tensor is %s and the last %s", first, last)
	}
}

// Every preset that can be written has the tensors, and the size, of its dummy weights.
func TestPresetTensors(t *testing.T) {
	for _, preset := range configs.PresetNames() {
		m, err := presetModel(preset, 0, 1)
		if err != nil {
			if !strings.Contains(err.Error(), "only bfloat16 is written") {
				t.Errorf("%s: %v", preset, err)
			}
			continue
		}
		config, err := models.ParseConfig(m.config, preset)
		if err != nil {
			t.Fatal(err)
		}
		dummy := models.NewDummy(config, 1)
		var names []string
		for _, s := range m.specs {
			names = append(names, s.Name)
			want, _ := dummy.Tensor(s.Name)
			if !slices.Equal(s.Shape, want.Shape) {
				t.Errorf("%s: %s is %v, want %v", preset, s.Name, s.Shape, want.Shape)
			}
		}
		want := slices.Sorted(slices.Values(dummy.Names()))
		if slices.Sort(names); !slices.Equal(names, want) {
			t.Errorf("%s: %d tensors, want %d", preset, len(names), len(want))
		}
	}
}

// A tensor's bytes do not depend on how it is read.
func TestDummyReader(t *testing.T) {
	m, err := presetModel("qwen1.5-moe-a2.7b", 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(m.specs, func(s write.Spec) bool { return s.Name == "model.layers.0.self_attn.q_proj.weight" })
	read := func(wrap func(io.Reader) io.Reader) []byte {
		r, err := m.data(m.specs[i])
		if err != nil {
			t.Fatal(err)
		}
		out, err := io.ReadAll(wrap(r))
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	whole := read(func(r io.Reader) io.Reader { return r })
	want, err := m.specs[i].Bytes()
	if err != nil || int64(len(whole)) != want {
		t.Fatalf("%d bytes, want %d, %v", len(whole), want, err)
	}
	if !bytes.Equal(whole, read(iotest.HalfReader)) {
		t.Error("half as much at a time gives others")
	}
}

func moments(values []float32) (mean, deviation float64) {
	for _, v := range values {
		mean += float64(v)
	}
	mean /= float64(len(values))
	for _, v := range values {
		deviation += (float64(v) - mean) * (float64(v) - mean)
	}
	return mean, math.Sqrt(deviation / float64(len(values)))
}

// Bytes depend on the seed and the tensor's name, not on how they are read.
func TestWeightsAreSeeded(t *testing.T) {
	read := func(name string, seed uint64, step int) []byte {
		w := newWeights(write.Spec{Name: name, DType: safetensors.BF16, Shape: []int{64, 64}}, seed)
		var out []byte
		for len(out) < 20_000 {
			p := make([]byte, min(step, 20_000-len(out)))
			if _, err := io.ReadFull(w, p); err != nil {
				t.Fatal(err)
			}
			out = append(out, p...)
		}
		return out
	}
	want := read("a", 1, 20_000)
	if !bytes.Equal(read("a", 1, 333), want) {
		t.Error("the size of a read matters")
	}
	if bytes.Equal(read("a", 2, 20_000), want) || bytes.Equal(read("b", 1, 20_000), want) {
		t.Error("seed or name does not matter")
	}
}

func TestSized(t *testing.T) {
	for _, want := range []int64{1, 2e8, 1e9, 12e8, 1e11} {
		s := large.sized(want)
		if s.bytes() < want {
			t.Errorf("%d bytes asked, %d given", want, s.bytes())
		}
		if s.layers > 1 {
			s.layers--
			if s.bytes() >= want {
				t.Errorf("%d bytes asked, %d layers were enough", want, s.layers)
			}
		}
	}
}

func TestRunRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"":                                     "give one with -o DIR",
		"-o x more":                            `unexpected argument "more"`,
		"-o x -bytes 0":                        "-bytes 0 is not",
		"-o x -bytes NaN":                      "-bytes NaN is not",
		"-o x -shard-bytes -1":                 "-shard-bytes -1 is not",
		"-o DIR -tokenizer not-a-place":        "give -tokenizer DIR",
		"-o x -preset nobody":                  "-preset nobody is unknown: presets are mixtral-8x7b",
		"-o x -preset mixtral-8x7b -bytes 5":   "both set the size",
		"-o x -preset mixtral-8x7b -layers 33": "mixtral-8x7b has 32",
		"-o x -layers 3":                       "-layers needs -preset",
	} {
		err := run(strings.Fields(strings.ReplaceAll(args, "-o DIR", "-o "+t.TempDir())), io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
