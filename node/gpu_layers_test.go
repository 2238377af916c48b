//go:build cuda

package node_test

import (
	"bufio"
	"encoding/binary"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/node"
)

var (
	python  = flag.String("python", "", "a python3 with torch and transformers, which makes the layers of TestGPULayers")
	presets = flag.String("presets", "", "presets of TestGPULayers, separated by commas; default: all")
)

// TestGPULayers compares one layer of every preset, in its full shape and with random
// weights, with PyTorch in float32. Positions at which the router's scores are closer than
// twice the error of bfloat16 may be routed to other experts and are not compared; they must
// be the minority.
func TestGPULayers(t *testing.T) {
	if *python == "" {
		t.Skip("give -python, with torch and transformers")
	}
	needGPU(t)
	args := append([]string{"../tools/cuda/layers.py", t.TempDir(), *on}, strings.FieldsFunc(*presets, func(r rune) bool { return r == ',' })...)
	cmd := exec.CommandContext(t.Context(), *python, args...)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		name, path, ok := strings.Cut(lines.Text(), " ")
		if !ok || !filepath.IsAbs(path) {
			continue
		}
		done++
		t.Run(name, func(t *testing.T) { compareLayer(t, path) })
		if err := os.RemoveAll(path); err != nil {
			t.Error(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		text, _ := os.ReadFile(log.Name())
		t.Errorf("%v: %s", err, text)
	}
	if err := log.Close(); err != nil {
		t.Error(err)
	}
	want := len(configs.PresetNames())
	if *presets != "" {
		want = len(strings.Split(*presets, ","))
	}
	if done != want {
		t.Errorf("%d layers of %d", done, want)
	}
}

func compareLayer(t *testing.T, dir string) {
	results, err := safetensors.OpenFile(filepath.Join(dir, "reference.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := results.Close(); err != nil {
			t.Error(err)
		}
	}()
	floats := func(name string) []float32 {
		x, ok := results.Tensor(name)
		if !ok {
			t.Fatalf("the reference has no %s", name)
		}
		f := make([]float32, x.Elements())
		if err := x.Float32s(f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	tensor, _ := results.Tensor("ids")
	ids := make([]int32, tensor.Elements())
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(tensor.Data[4*i:]))
	}
	want, margins, other := floats("logits"), floats("margins"), floats("bf16_error")
	rounds := floats("router_error")[0]

	start := time.Now()
	n := openOnGPU(t, node.Options{HostLogits: true, WithoutTokenizer: true, Settings: gpuSettings(func(s *configs.Settings) {
		s.Model.Name, s.Offload.Fraction, s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.KV.MaxModelLen = dir, 0.5, 64, 4, 64
	})})
	opened := time.Since(start)
	got := logitsOf(t, n, ids, false)
	vocab := n.Info().Config.Vocab
	decided, worst, worstOther, undecided := 0, 0.0, float32(0), 0.0
	for i := range ids {
		e := relative(got[i*vocab:][:vocab], want[i*vocab:][:vocab])
		if margins[i] <= 2*rounds {
			undecided = max(undecided, e)
			continue
		}
		decided++
		worst, worstOther = max(worst, e), max(worstOther, other[i])
		if !(e <= bound) {
			t.Errorf("token %d: relative error %.4f, at most %g is allowed; the router chose by %.4f, and bfloat16 is %.4f off", i, e, bound, margins[i], rounds)
		}
	}
	t.Logf("relative error at most %.4f in the %d of %d positions whose choice is clear (transformers in bfloat16: %.4f), %.4f in the others; opened in %v",
		worst, decided, len(ids), worstOther, undecided, opened.Round(time.Millisecond))
	if 2*decided < len(ids) {
		t.Errorf("only %d of %d positions have a clear choice", decided, len(ids))
	}
}
