//go:build cuda

package node_test

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// These tests run a node on a GPU. -on cpu lets them run on the CPU instead, as a
// test of themselves.
var (
	on      = flag.String("on", "cuda", "device of the tests named GPU: cuda or cpu")
	overlap = flag.Bool("overlap", true, "tests named GPU let kernels overlap")
)

// needGPU skips the test without a GPU, unless MOESERVE_CUDA_TEST=gpu requires one.
func needGPU(t testing.TB) {
	t.Helper()
	if *on == "cpu" || os.Getenv("MOESERVE_CUDA_TEST") == "gpu" {
		return
	}
	if err := tryGPU(); errors.Is(err, cuda.ErrUnavailable) {
		t.Skip(err)
	}
}

var tryGPU = sync.OnceValue(func() error {
	m, err := cuda.Open(cuda.Options{})
	if err != nil {
		return err
	}
	return m.Close()
})

// gpuSettings are what tests on a GPU start from.
func gpuSettings(change func(*configs.Settings)) configs.Settings {
	s := configs.Defaults()
	if err := s.Device.Kind.UnmarshalText([]byte(*on)); err != nil {
		panic(err)
	}
	s.Batch.MaxNumBatchedTokens, s.Kernels.Overlap = 192, *overlap
	change(&s)
	return s
}

// openOnGPU starts a node, and checks at the test's end that it releases everything.
func openOnGPU(t testing.TB, o node.Options) *node.Node {
	t.Helper()
	needGPU(t)
	n, err := node.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// generateOnGPU opens a node, runs the requests and closes it.
func generateOnGPU(t *testing.T, change func(*configs.Settings)) (tokens string) {
	t.Helper()
	n := openOnGPU(t, node.Options{Settings: gpuSettings(change)})
	return generate(t, n)
}

// onGPU are the fixtures that tests of equality run on; the last has float16.
var onGPU = append([]string{"olmoe_clip"}, sameOn...)

// TestGPUSameTokens: the tokens do not depend on where experts are, nor on the size of KV
// blocks (level 1).
func TestGPUSameTokens(t *testing.T) {
	for _, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			dir := fixtures.Dir(t, name)
			want := ""
			for _, f := range []float64{0, 0.25, 0.5, 1} {
				got := generateOnGPU(t, func(s *configs.Settings) { s.Model.Name, s.Offload.Fraction = dir, f })
				if want == "" {
					want = got
				}
				if got != want {
					t.Errorf("fraction %v: tokens %s, with all experts resident %s", f, got, want)
				}
			}
			for _, size := range []int{8, 64} {
				if got := generateOnGPU(t, func(s *configs.Settings) { s.Model.Name, s.KV.BlockSize = dir, size }); got != want {
					t.Errorf("KV blocks of %d tokens: tokens %s, of 16 %s", size, got, want)
				}
			}
			t.Logf("tokens %s", want)
		})
	}
}

// TestGPUBatchInvariant: with batch-invariant GEMMs the tokens depend neither on step
// budgets, nor on micro-batches, nor on the rest of the batch (level 2).
func TestGPUBatchInvariant(t *testing.T) {
	for _, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			dir := fixtures.Dir(t, name)
			model := func(s *configs.Settings) { s.Model.Name, s.Kernels.BatchInvariant = dir, true }
			want := generateOnGPU(t, model)
			for _, c := range []struct {
				batched, micro, seqs int
				fraction             float64
			}{{192, 0, 64, 1}, {1, 0, 64, 0.5}, {7, 3, 64, 0}, {64, 16, 2, 0.5}, {192, 1, 64, 0.25}, {192, 50, 1, 1}} {
				got := generateOnGPU(t, func(s *configs.Settings) {
					model(s)
					s.Batch.MaxNumBatchedTokens, s.Batch.MicroBatchSize, s.Batch.MaxNumSeqs, s.Offload.Fraction = c.batched, c.micro, c.seqs, c.fraction
				})
				if got != want {
					t.Errorf("%+v: tokens %s, want %s", c, got, want)
				}
			}
			alone := openOnGPU(t, node.Options{Settings: gpuSettings(model)})
			var outs []engine.Output
			for _, r := range requests(alone.Info().Config.Vocab) {
				o, err := alone.Engine().Generate(t.Context(), []engine.Request{r}, nil)
				if err != nil {
					t.Fatal(err)
				}
				outs = append(outs, o...)
			}
			if got := digest(outs); got != want {
				t.Errorf("one request at a time: tokens %s, want %s", got, want)
			}
			t.Logf("tokens %s", want)
		})
	}
}

// breaking is a machine whose copies of experts fail when broken says so. The
// streams of the backend are the machine's own.
type breaking struct {
	device.Machine
	broken func(n int) bool

	mu           sync.Mutex
	copies, hits int
}

func (m *breaking) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if err != nil || !strings.HasPrefix(o.Name, "copy ") {
		return s, err
	}
	return &breakingStream{s, m}, nil
}

type breakingStream struct {
	device.Stream
	m *breaking
}

func (s *breakingStream) Copy(dst, src device.Range) error {
	s.m.mu.Lock()
	n := s.m.copies
	s.m.copies++
	bad := s.m.broken != nil && s.m.broken(n)
	if bad {
		s.m.hits++
	}
	s.m.mu.Unlock()
	if bad {
		return &device.Error{Op: "copy", Space: s.Space(), Detail: fmt.Sprintf("copy %d is to fail", n), Err: device.ErrCopyFailed}
	}
	return s.Stream.Copy(dst, src)
}

// set replaces what breaks copies, counted from here.
func (m *breaking) set(broken func(n int) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken, m.copies, m.hits = broken, 0, 0
}

// TestGPUSameTokensDespiteFaults: copies that fail change no token.
func TestGPUSameTokensDespiteFaults(t *testing.T) {
	needGPU(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			model := func(s *configs.Settings) { s.Model.Name, s.Offload.Fraction = fixtures.Dir(t, name), 0.75 }
			want := generateOnGPU(t, model)
			for _, c := range []struct {
				name string
				// broken says whether copy n fails, after so many steps were run again.
				broken func(n int, again int64) bool
				// hits and again are the least that must be.
				hits  int
				again int64
			}{
				{"one fails", func(n int, _ int64) bool { return n == 3 }, 1, 1},
				{"two in a row", func(n int, _ int64) bool { return n == 5 || n == 6 }, 2, 1},
				{"all of three tries from one on", func(n int, again int64) bool { return n >= 3 && again < 3 }, 3, 3},
				{"some fail, by chance", func(n int, again int64) bool { return again < 3 && (n == 1 || random.IntN(12) == 0) }, 1, 1},
			} {
				n, m := openBreaking(t, model)
				m.set(func(at int) bool { return c.broken(at, n.Engine().State().Retried) })
				if got := generate(t, n); got != want {
					t.Errorf("%s: tokens %s, want %s", c.name, got, want)
				}
				retried := n.Engine().State().Retried
				t.Logf("%s: %d of %d copies failed, %d steps were run again", c.name, m.hits, m.copies, retried)
				if m.hits < c.hits || retried < c.again {
					t.Errorf("%s: %d copies failed, want %d; %d steps were run again, want %d", c.name, m.hits, c.hits, retried, c.again)
				}
			}
			n, m := openBreaking(t, model)
			for range 2 {
				m.set(func(int) bool { return true })
				_, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil)
				if !errors.Is(err, pipeline.ErrStepFailed) || !errors.Is(err, device.ErrCopyFailed) {
					t.Errorf("all copies fail: error %v", err)
				}
				free(t, n)
			}
			m.set(nil)
			if got := generate(t, n); got != want {
				t.Errorf("once copies work again: tokens %s, want %s", got, want)
			}
		})
	}
}

// openBreaking opens a node on a GPU, and returns the machine whose copies can be made
// to fail, too. Its expert cache holds what one layer misses, so that every step copies: one of
// two layers would hold all experts of a fixture that has only two.
func openBreaking(t *testing.T, change func(*configs.Settings)) (*node.Node, *breaking) {
	t.Helper()
	m := &breaking{}
	o := node.Options{Settings: gpuSettings(change), CacheLayers: 1, RetryTimeout: 100 * time.Millisecond}
	o.OpenMachine = func() (_ device.Machine, err error) {
		if *on == "cpu" {
			m.Machine, err = emulated.Open(emulated.Options{})
		} else {
			m.Machine, err = cuda.New(cuda.Options{})
		}
		return m, err
	}
	if *on != "cpu" {
		o.OpenBackend = func(device.Machine) (kernels.Backend, error) {
			return kernelscuda.New(m.Machine, device.HBM(0), kernelscuda.Options{Serial: !*overlap})
		}
	}
	return openOnGPU(t, o), m
}

// losing is a backend that, after some operations, runs one that writes where no
// memory is.
type losing struct {
	*kernelscuda.Backend
	left int // operations until then; 0: never
}

func (b *losing) Enqueue(s device.Stream, op kernels.Op) error {
	if b.left--; b.left == 0 {
		bad := kernels.Clamp{X: kernels.New(4096, b.ActivationDType(), 1, 64), Limit: 1}
		if err := b.Backend.Enqueue(s, &bad); err != nil {
			return err
		}
	}
	return b.Backend.Enqueue(s, op)
}

const lostVariable = "MOESERVE_CUDA_LOST"

// TestGPULost loses the device while requests run, in a process of its own, since a process
// cannot recover a lost device: the requests end with an error that reports the loss, and the
// node closes.
func TestGPULost(t *testing.T) {
	if *on != "cuda" {
		t.Skip("TestLostDevice does this on emulated devices")
	}
	needGPU(t)
	alone(t, lostVariable, "requests ended:", lose)
}

// alone runs the rest of a test in a process of its own, which recognizes itself by an
// environment variable, must succeed, and must log says.
func alone(t *testing.T, variable, says string, rest func(*testing.T)) {
	t.Helper()
	if os.Getenv(variable) != "" {
		rest(t)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), says) {
		t.Errorf("%v:\n%s", err, out)
	}
	t.Logf("%s", out)
}

func lose(t *testing.T) {
	var inner *cuda.Machine
	n, err := node.Open(t.Context(), node.Options{
		Settings: gpuSettings(func(s *configs.Settings) { s.Model.Name, s.Offload.Fraction = fixtures.Dir(t, "mixtral"), 0.5 }),
		OpenMachine: func() (device.Machine, error) {
			var err error
			inner, err = cuda.New(cuda.Options{})
			return inner, err
		},
		OpenBackend: func(device.Machine) (kernels.Backend, error) {
			b, err := kernelscuda.New(inner, device.HBM(0), kernelscuda.Options{})
			return &losing{b, 100}, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil)
	if !errors.Is(err, fault.ErrLost) {
		t.Errorf("error %v, want one that says that the device is lost", err)
	}
	t.Logf("requests ended: %v", err)
	if err := n.Close(); err != nil {
		t.Logf("closed: %v", err)
		if !errors.Is(err, fault.ErrLost) {
			t.Errorf("closing: %v", err)
		}
	}
}

// TestGPUOutOfMemory: a model that does not fit is rejected before anything is loaded, with
// the bytes needed, the bytes usable, and settings that fit.
func TestGPUOutOfMemory(t *testing.T) {
	if *on != "cuda" {
		t.Skip("emulated devices have as much memory as the machine has")
	}
	needGPU(t)
	for name, test := range map[string]struct {
		change func(*configs.Settings)
		want   []string
	}{
		"weights": {
			func(s *configs.Settings) { s.Device.GPUMemoryUtilization = 0.4 },
			[]string{"gpu0", "need ", "usable", "--offload-fraction 0."},
		},
		"KV cache": {
			func(s *configs.Settings) { s.Offload.Fraction, s.KV.NumGPUBlocksOverride = 0.5, 1<<20 },
			[]string{"--num-gpu-blocks-override is 1048576", "there is room for"},
		},
	} {
		n, err := node.Open(t.Context(), node.Options{Settings: gpuSettings(func(s *configs.Settings) {
			s.Model.Name, s.Model.LoadFormat, s.Device.HostMemoryGiB = "mixtral-8x7b", configs.LoadDummy, 120
			test.change(s)
		})})
		if err == nil {
			t.Errorf("%s: opened", name)
			if err := n.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		t.Logf("%s: %v", name, err)
		for _, w := range test.want {
			if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q does not say %q", name, err, w)
			}
		}
	}
}

// completions runs prompts through the built-in model.
func completions(t *testing.T, prompts []string, change func(*configs.Settings)) []string {
	t.Helper()
	n := openOnGPU(t, node.Options{Settings: gpuSettings(change)})
	var rs []engine.Request
	for _, p := range prompts {
		ids, err := n.Text().Encode(p)
		if err != nil {
			t.Fatal(err)
		}
		p := engine.DefaultParams()
		p.MaxTokens = 48
		rs = append(rs, engine.Request{Prompt: ids, Params: p})
	}
	outs, err := n.Engine().Generate(t.Context(), rs, nil)
	if err != nil {
		t.Fatal(err)
	}
	texts := make([]string, len(outs))
	for i, o := range outs {
		texts[i] = n.Text().Tokenizer.Decode(o.TokenIDs, true)
	}
	return texts
}

// TestGPUBuiltIn: the built-in model completes prompts of every task on a GPU as on the CPU.
func TestGPUBuiltIn(t *testing.T) {
	f, err := os.Open("../models/tiny/testdata/eval.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read from
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var prompts []string
	seen := map[string]int{}
	for lines := bufio.NewScanner(z); lines.Scan(); {
		var q struct{ Task, Prompt string }
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		if seen[q.Task]++; seen[q.Task] <= 6 {
			prompts = append(prompts, q.Prompt)
		}
	}
	want := completions(t, prompts, func(s *configs.Settings) { s.Device.Kind = configs.CPU })
	for _, f := range []float64{0, 0.5, 1} {
		got := completions(t, prompts, func(s *configs.Settings) { s.Offload.Fraction = f })
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("fraction %v: the completion of %q is %q, on the CPU %q", f, prompts[i], got[i], want[i])
			}
		}
	}
	t.Logf("%d prompts of %d tasks", len(prompts), len(seen))
}
