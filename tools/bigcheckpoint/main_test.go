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

	"github.com/moeserve/moeserve/models/safetensors"
)

const tokenizer = "../../testdata/fixtures/mixtral"

var small = shape{
	hidden: 64, intermediate: 96, heads: 4, kvHeads: 2,
	experts: 4, perToken: 2, vocab: 512, context: 128, layers: 2,
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	total, err := write(dir, small, 100_000, 7, tokenizer)
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
	if _, err := write(dir, small, 100_000, 7, tokenizer); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("a second time: %v", err)
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
		w := newWeights(safetensors.Spec{Name: name, DType: safetensors.BF16, Shape: []int{64, 64}}, seed)
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
		"":                              "give one with -o DIR",
		"-o x more":                     `unexpected argument "more"`,
		"-o x -bytes 0":                 "-bytes 0 is not",
		"-o x -bytes NaN":               "-bytes NaN is not",
		"-o x -shard-bytes -1":          "-shard-bytes -1 is not",
		"-o DIR -tokenizer not-a-place": "give -tokenizer DIR",
	} {
		err := run(strings.Fields(strings.ReplaceAll(args, "-o DIR", "-o "+t.TempDir())), io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
