//go:build cuda

package pipeline_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// -on cpu runs the tests named GPU on the CPU, to test the tests.
var on = flag.String("on", "cuda", "device of the tests named GPU: cuda or cpu")

var tryGPU = sync.OnceValue(func() error {
	m, err := cuda.Open(cuda.Options{})
	if err != nil {
		return err
	}
	return m.Close()
})

// breaking is a machine whose expert copies fail while fail is above 0; each failure lowers
// it. The backend's streams are the machine's own.
type breaking struct {
	device.Machine
	mu   sync.Mutex
	fail int
}

func (m *breaking) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if err != nil || !strings.HasPrefix(o.Name, "copy ") {
		return s, err
	}
	return &breakingStream{s, m}, nil
}

// fails reports whether a copy must fail, and counts it.
func (m *breaking) fails() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail--
	return m.fail >= 0
}

// left sets the number of copies that must fail, and returns the number before.
func (m *breaking) left(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.fail
	m.fail = n
	return max(before, 0)
}

type breakingStream struct {
	device.Stream
	m *breaking
}

func (s *breakingStream) Copy(dst, src device.Range) error {
	if s.m.fails() {
		return &device.Error{Op: "copy", Space: s.Space(), Detail: "injected fault", Err: device.ErrCopyFailed}
	}
	return s.Stream.Copy(dst, src)
}

// gpuRig is a node on a fixture; tests use its pipeline and KV cache.
type gpuRig struct {
	*testing.T
	m *breaking
	n *node.Node
}

func newGPURig(t *testing.T, invariant bool, fraction float64, microBatch int, change ...func(*configs.Settings)) *gpuRig {
	t.Helper()
	if *on == "cuda" && os.Getenv("MOESERVE_CUDA_TEST") != "gpu" {
		if err := tryGPU(); errors.Is(err, cuda.ErrUnavailable) {
			t.Skip(err)
		}
	}
	r := &gpuRig{T: t, m: &breaking{}}
	s := configs.Defaults()
	s.Model.Name, s.Offload.Fraction = fixtures.Dir(t, "mixtral"), fraction
	s.Batch.ExpertAccess = configs.CopyAccess // these tests are about copies
	s.Batch.MicroBatchSize, s.Batch.MaxNumBatchedTokens, s.KV.NumGPUBlocksOverride = microBatch, 192, 64
	for _, c := range change {
		c(&s)
	}
	var err error
	r.n, err = node.Open(t.Context(), node.Options{
		Settings: s,
		OpenMachine: func() (_ device.Machine, err error) {
			if *on == "cpu" {
				r.m.Machine, err = emulated.Open(emulated.Options{})
			} else {
				r.m.Machine, err = cuda.Open(cuda.Options{})
			}
			return r.m, err
		},
		OpenBackend: func(device.Machine) (kernels.Backend, error) {
			if *on == "cpu" {
				return cpu.New(cpu.Options{}), nil
			}
			return kernelscuda.New(r.m.Machine, device.HBM(0), kernelscuda.Options{BatchInvariant: invariant})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.n.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// steps runs five sequences: prompts, whole and in chunks, beside others that decode, and
// then decode steps alone, some greedy and some sampled. It returns each sequence's tokens. A
// step that failed is retried up to retries times.
func (r *gpuRig) steps(retries int) [][]int32 {
	r.Helper()
	ids := make([][]int32, 5) // prompts, then sampled tokens
	tables := make([]*kvcache.Table, len(ids))
	done, prompt := make([]int, len(ids)), []int{40, 1, 23, 64, 5}
	for i, n := range prompt {
		for j := range n {
			ids[i] = append(ids[i], int32((7*i+13*j+j*j)%r.n.Info().Config.Vocab))
		}
		tables[i] = r.n.KV().NewTable()
		defer tables[i].Release(false)
	}
	chunks := [][]int{ // tokens of each sequence in a step; -1: all the rest
		{16, -1, 0, 0, 0},
		{16, -1, 10, 0, 3},
		{-1, -1, -1, 50, -1},
		{-1, -1, -1, -1, -1},
	}
	for range 5 {
		chunks = append(chunks, []int{-1, -1, -1, -1, -1})
	}
	for n, counts := range chunks {
		step := &pipeline.Step{}
		var sampled []int
		for i, k := range counts {
			if k < 0 {
				k = len(ids[i]) - done[i]
			}
			if k == 0 {
				continue
			}
			q := pipeline.Sequence{Tokens: ids[i][done[i] : done[i]+k], Start: done[i], Table: tables[i], SamplingParams: pipeline.SamplingParams{Seed: uint64(i)}}
			if i%2 == 1 {
				q.SamplingParams.Temperature, q.SamplingParams.TopK = 1.2, 30
			}
			done[i] += k
			if done[i] == len(ids[i]) {
				q.LogitRows = 1
				sampled = append(sampled, i)
			}
			if !tables[i].Reserve(done[i]) {
				r.Fatal("too few KV blocks")
			}
			step.Sequences = append(step.Sequences, q)
		}
		res, err := r.n.Pipeline().Step(r.Context(), step)
		for try := 0; err != nil && try < retries; try++ {
			if !errors.Is(err, pipeline.ErrStepFailed) || !errors.Is(err, device.ErrCopyFailed) {
				r.Fatalf("step %d: %v", n, err)
			}
			res, err = r.n.Pipeline().Step(r.Context(), step)
		}
		if err != nil {
			r.Fatalf("step %d: %v", n, err)
		}
		for at, i := range sampled {
			ids[i] = append(ids[i], res.Sampled[at])
		}
	}
	for i := range ids {
		ids[i] = ids[i][prompt[i]:]
	}
	return ids
}

func (r *gpuRig) same(what string, got, want [][]int32) {
	r.Helper()
	for i := range want {
		if !slices.Equal(got[i], want[i]) {
			r.Errorf("%s: sequence %d got %v, want %v", what, i, got[i], want[i])
		}
	}
}

// TestGPUSameResults: with micro-batches of every size, the tokens of the same steps depend
// neither on where experts are nor on the run; with batch-invariant kernels not on the size
// either.
func TestGPUSameResults(t *testing.T) {
	for _, invariant := range []bool{false, true} {
		t.Run(fmt.Sprintf("batch-invariant=%v", invariant), func(t *testing.T) {
			var all [][]int32
			for _, size := range []int{0, 3, 16, 50} {
				var want [][]int32
				if invariant {
					want = all
				}
				for _, fraction := range []float64{0, 0.5, 1} {
					r := newGPURig(t, invariant, fraction, size)
					for run := range 2 {
						got := r.steps(0)
						if want == nil {
							want = got
						}
						r.same(fmt.Sprintf("micro-batches of %d, fraction %v, run %d", size, fraction, run), got, want)
					}
				}
				all = want
			}
			t.Logf("tokens %v", all)
		})
	}
}

// TestGPUPlans: with attention on the GPU or the CPU, and with experts run per layer or per
// micro-batch, the tokens of the same steps depend neither on where experts are nor on the
// run; with batch-invariant kernels not on the grouping either. Failed steps can be retried.
func TestGPUPlans(t *testing.T) {
	for _, attention := range []configs.Place{configs.OnGPU, configs.OnCPU} {
		var want [][]int32
		for _, grouping := range []configs.Grouping{configs.PerLayer, configs.PerMicroBatch} {
			for _, fraction := range []float64{0, 0.5, 1} {
				r := newGPURig(t, true, fraction, 16, func(s *configs.Settings) { s.Batch.Attention, s.Batch.Grouping = attention, grouping })
				for run := range 3 {
					retries := 0
					if run == 2 && fraction > 0 {
						retries = 3
						r.m.left(retries)
					}
					got := r.steps(retries)
					if want == nil {
						want = got
					}
					r.same(fmt.Sprintf("attention on the %s, experts by %s, fraction %v, run %d", attention, grouping, fraction, run), got, want)
				}
			}
		}
		t.Logf("attention on the %s: tokens %v", attention, want)
	}
}

// TestGPUFailedSteps: steps whose copies fail can be retried, and the pipeline can run
// further steps after one that was not retried; neither changes a token.
func TestGPUFailedSteps(t *testing.T) {
	want := newGPURig(t, false, 0, 16).steps(0)
	for _, n := range []int{1, 2, 3, 7} {
		r := newGPURig(t, false, 1, 16)
		r.m.left(n)
		r.same(fmt.Sprintf("%d copies fail", n), r.steps(n), want)
		if left := r.m.left(0); left > 0 {
			t.Errorf("%d of %d faults were not injected", left, n)
		}
	}
	r := newGPURig(t, false, 1, 16)
	table := r.n.KV().NewTable()
	defer table.Release(false)
	if !table.Reserve(2) {
		t.Fatal("too few KV blocks")
	}
	step := &pipeline.Step{Sequences: []pipeline.Sequence{{Tokens: []int32{1, 2}, Table: table, LogitRows: 1}}}
	r.m.left(1 << 30)
	for range 3 {
		if _, err := r.n.Pipeline().Step(t.Context(), step); !errors.Is(err, pipeline.ErrStepFailed) || !errors.Is(err, device.ErrCopyFailed) {
			t.Errorf("all copies fail: error %v", err)
		}
	}
	r.m.left(0)
	r.same("once copies work again", r.steps(0), want)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.n.Pipeline().Step(ctx, step); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled step: %v", err)
	}
	r.same("after a canceled step", r.steps(0), want)
}
