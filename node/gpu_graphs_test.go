//go:build cuda

package node_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/kernels"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// live plays steps of sequences that come and go, mostly the same batch several times in succession:
// prompts, decoding past the borders of blocks and of rounded contexts, greedy and drawn
// in all ways. Equal seeds give equal steps. It returns what every step gave, a line each.
func live(t *testing.T, n *node.Node, seed uint64, steps int) []string {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 9))
	vocab := n.Info().Config.Vocab
	var lines []string
	var running []pipeline.Sequence
	leave := func(i int) {
		running[i].Table.Release(false)
		running = slices.Delete(running, i, i+1)
	}
	for at := range steps {
		if len(running) == 0 || len(running) < 12 && random.IntN(12) == 0 {
			q := pipeline.Sequence{Table: n.KV().NewTable(), LogitRows: 1, SamplingParams: pipeline.SamplingParams{Seed: random.Uint64(), Sample: int32(at)}}
			for range 1 + random.IntN(20) {
				q.Tokens = append(q.Tokens, int32(random.IntN(vocab)))
			}
			if random.IntN(4) == 0 { // near a border of rounded contexts
				q.Tokens = slices.Repeat(q.Tokens, 62)[:55+random.IntN(8)]
			}
			switch d := &q.SamplingParams; random.IntN(5) {
			case 0:
				d.Temperature = 1.1
			case 1:
				d.Temperature, d.TopK = 1, 7
			case 2:
				d.Temperature, d.TopP, d.MinP = 0.9, 0.8, 0.01
			case 3:
				d.RepetitionPenalty, d.Adjust = 1.2, []pipeline.TokenAdjust{{ID: 3, Seen: 1}, {ID: 5, Seen: -1, Bias: 2}}
			}
			running = append(running, q)
		}
		step := &pipeline.Step{}
		rows := 0
		for i := range running {
			q := &running[i]
			if rows += len(q.Tokens); rows > 192 {
				break
			}
			if !q.Table.Reserve(q.Start + len(q.Tokens)) {
				t.Fatal("too few KV blocks")
			}
			step.Sequences = append(step.Sequences, *q)
		}
		res, err := n.Pipeline().Step(t.Context(), step)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, fmt.Sprint(res.Sampled, res.LogProbs))
		for i := range step.Sequences {
			q := &running[i]
			q.Start += len(q.Tokens)
			q.Tokens = []int32{res.Sampled[i]}
			if at%40 < 10 { // every token counts in what comes next
				q.SamplingParams.Seed += uint64(res.Sampled[i])
			}
		}
		for i := len(running) - 1; i >= 0; i-- {
			if running[i].Start > 180 || random.IntN(80) == 0 {
				leave(i)
			}
		}
	}
	for len(running) > 0 {
		leave(0)
	}
	return lines
}

// TestGPUGraphs: decode steps that run as graphs sample the same tokens as others.
func TestGPUGraphs(t *testing.T) {
	const steps = 400
	for i, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			for _, micro := range []int{0, 3} {
				open := func(eager bool) *node.Node {
					return openOnGPU(t, node.Options{Settings: gpuSettings(func(s *configs.Settings) {
						s.Model.Name, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = fixtures.Dir(t, name), 192, 12*12
						s.Batch.MicroBatchSize, s.Kernels.EnforceEager = micro, eager
					})})
				}
				plain := open(true)
				want := live(t, plain, uint64(i), steps)
				if s := plain.Pipeline().Graphs(); s != (pipeline.GraphStats{}) {
					t.Errorf("eager, and yet %+v", s)
				}
				n := open(false)
				for run := range 2 { // the second time with graphs at hand
					got := live(t, n, uint64(i), steps)
					for at := range want {
						if got[at] != want[at] {
							t.Fatalf("micro-batches of %d, run %d, step %d: %s, without graphs %s", micro, run, at, got[at], want[at])
						}
					}
				}
				s := n.Pipeline().Graphs()
				t.Logf("micro-batches of %d: %+v of %d steps", micro, s, 2*steps)
				if *on == "cuda" && (s.Launched < steps || s.Failed > 0) {
					t.Errorf("micro-batches of %d: %+v of %d steps", micro, s, 2*steps)
				}
			}
		})
	}
}

// TestGPUNoAllocations: decoding with graphs allocates nothing on the heap.
func TestGPUNoAllocations(t *testing.T) {
	if *on != "cuda" {
		t.Skip("TestNoAllocations does this on the CPU")
	}
	for _, fraction := range []float64{0, 0.5} {
		n := openOnGPU(t, node.Options{Settings: gpuSettings(func(s *configs.Settings) {
			s.Model.Name, s.Offload.Fraction = fixtures.Dir(t, "mixtral"), fraction
		})})
		step := &pipeline.Step{}
		for i := range 20 {
			q := pipeline.Sequence{Tokens: []int32{int32(i)}, Table: n.KV().NewTable(), LogitRows: 1}
			defer q.Table.Release(false)
			if !q.Table.Reserve(128) {
				t.Fatal("too few KV blocks")
			}
			step.Sequences = append(step.Sequences, q)
		}
		next := func() {
			res, err := n.Pipeline().Step(t.Context(), step)
			if err != nil {
				t.Fatal(err)
			}
			for i := range step.Sequences {
				q := &step.Sequences[i]
				q.Tokens[0] = res.Sampled[i]
				q.Start++
			}
		}
		for range 62 {
			next()
		}
		for i := range step.Sequences {
			step.Sequences[i].Start = 0
		}
		if got := testing.AllocsPerRun(60, next); got > 0 {
			t.Errorf("fraction %v: %v allocations a step", fraction, got)
		}
		t.Logf("fraction %v: %+v", fraction, n.Pipeline().Graphs())
	}
}

const lostGraphVariable = "MOESERVE_CUDA_LOST_GRAPH"

// TestGPULostGraph loses the device inside a graph, in a process of its own: the step's error
// reports the loss, and the node closes.
func TestGPULostGraph(t *testing.T) {
	if *on != "cuda" {
		t.Skip("there are no graphs on emulated devices")
	}
	needGPU(t)
	alone(t, lostGraphVariable, "the graph's step:", loseGraph)
}

func loseGraph(t *testing.T) {
	var inner *cuda.Machine
	b := &losing{}
	n, err := node.Open(t.Context(), node.Options{
		Settings: gpuSettings(func(s *configs.Settings) { s.Model.Name = fixtures.Dir(t, "mixtral") }),
		OpenMachine: func() (device.Machine, error) {
			var err error
			inner, err = cuda.New(cuda.Options{})
			return inner, err
		},
		OpenBackend: func(device.Machine) (kernels.Backend, error) {
			var err error
			b.Backend, err = kernelscuda.New(inner, device.HBM(0), kernelscuda.Options{})
			return b, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	q := pipeline.Sequence{Tokens: []int32{1}, Table: n.KV().NewTable(), LogitRows: 1}
	if !q.Table.Reserve(16) {
		t.Fatal("too few KV blocks")
	}
	const many = 1 << 20
	ops := 0 // of a step
	for step := range 3 {
		if b.left = many; step == 1 {
			b.left = ops + 5 // behind the step's, in the capture of the same
		}
		_, err = n.Pipeline().Step(t.Context(), &pipeline.Step{Sequences: []pipeline.Sequence{q}})
		if step == 0 {
			ops = many - b.left
		}
		if step < 2 && err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		q.Start++
	}
	if !errors.Is(err, device.ErrLost) || errors.Is(err, pipeline.ErrStepFailed) {
		t.Errorf("error %v, want one that says that the device is lost", err)
	}
	t.Logf("the graph's step: %v; %+v", err, n.Pipeline().Graphs())
	if err := n.Close(); err != nil && !errors.Is(err, fault.ErrLost) {
		t.Errorf("closing: %v", err)
	}
}
