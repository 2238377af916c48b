//go:build cuda

package node_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

var reference = flag.String("reference", "", "what tools/cuda/reference_bf16.py wrote: transformers' own error in bfloat16, to be compared with")

// bound is the relative error, by norm, of logits in bfloat16 over those with the same
// routing in float32.
const bound = 1e-2

// other is what transformers' own arithmetic in bfloat16 does to a fixture.
type other struct {
	// OwnRouting counts positions above the bound, of prompts up to the longrope
	// boundary.
	OwnRouting share `json:"own_routing"`
	// SameRouting is the relative error of each prompt's logits with the choices and
	// weights of the float32 run.
	SameRouting []float64 `json:"same_routing"`
}

// others reads -reference; a fixture that takes its weights from a base has what that
// has. Empty without -reference.
func others(t *testing.T) map[string]other {
	t.Helper()
	all := map[string]other{}
	if *reference == "" {
		return all
	}
	text, err := os.ReadFile(*reference)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatalf("%s: %v", *reference, err)
	}
	for _, name := range fixtures.Names(t) {
		base, err := os.ReadFile(filepath.Join("..", "testdata", "fixtures", name, "base"))
		if err == nil {
			all[name] = all[strings.TrimSpace(string(base))]
		}
		if len(all[name].SameRouting) == 0 {
			t.Errorf("%s says nothing of fixture %s", *reference, name)
		}
	}
	return all
}

// relative is the norm of got - want, divided by that of want.
func relative(got, want []float32) float64 {
	if len(got) != len(want) || len(want) == 0 {
		return math.Inf(1)
	}
	var d, w float64
	for i := range want {
		x := float64(got[i]) - float64(want[i])
		d += x * x
		w += float64(want[i]) * float64(want[i])
	}
	return math.Sqrt(d / w)
}

// largest is the largest absolute difference.
func largest(got, want []float32) float64 {
	d := 0.0
	for i := range want {
		if x := math.Abs(float64(got[i]) - float64(want[i])); !(x <= d) {
			d = x
		}
	}
	return d
}

// onCPU computes in float32.
func onCPU(t testing.TB, dir string) *stages {
	t.Helper()
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return newStages(t, dir, m, cpu.New(cpu.Options{}))
}

// stagesOnGPU computes in the activation type.
func stagesOnGPU(t testing.TB, dir string, act kernels.DType) *stages {
	t.Helper()
	needGPU(t)
	if *on == "cpu" {
		return onCPU(t, dir)
	}
	m, err := cuda.Open(cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := kernelscuda.New(m, device.HBM(0), kernelscuda.Options{Activation: act})
	if err != nil {
		t.Fatal(err)
	}
	return newStages(t, dir, m, b)
}

// TestGPUSameRouting: with the choices and weights of the float32 run in place of the
// routers' own, the logits of every prompt are those of that run, within the bound.
// Where transformers' own arithmetic in bfloat16 exceeds the bound, so may ours, by no
// more than that does on any prompt. With 8 times finer rounding, float16, errors are so much smaller.
func TestGPUSameRouting(t *testing.T) {
	others := others(t)
	for _, name := range fixtures.Names(t) {
		t.Run(name, func(t *testing.T) {
			dir, want := fixtures.Dir(t, name), fixtures.Load(t, name)
			exact := onCPU(t, dir)
			half := stagesOnGPU(t, dir, kernels.F16)
			gpu := stagesOnGPU(t, dir, kernels.BF16)
			noise := 0.0
			for i, p := range want.Prompts {
				ids := int32s(p.IDs)
				after := exact.config.RoPE.LongAfter
				long := after > 0 && len(ids) > after
				logits, chosen := exact.run(ids, long, nil)
				if d := largest(logits, p.Logits); d > tolerance {
					t.Fatalf("prompt %d: the CPU is %g away from the reference", i, d)
				}
				a, _ := gpu.run(ids, long, chosen)
				b, _ := half.run(ids, long, chosen)
				noise = max(noise, largest(a, logits))
				ea, eb := relative(a, logits), relative(b, logits)
				most, theirs := bound, ""
				if o, ok := others[name]; ok && i < len(o.SameRouting) {
					most, theirs = max(most, slices.Max(o.SameRouting)), fmt.Sprintf(" (transformers: %.4f)", o.SameRouting[i])
				}
				t.Logf("prompt %d, %d tokens: relative error %.4f in bfloat16%s, %.5f in float16", i, len(ids), ea, theirs, eb)
				switch {
				case !(ea <= most) && (*reference != "" || original(name)):
					t.Errorf("prompt %d: relative error %g in bfloat16, at most %g is allowed", i, ea, most)
				case !(ea <= most):
					t.Logf("prompt %d: above %g, and without -reference, so it is not known whether transformers is, too", i, most)
				}
				if !(eb <= bound/4) {
					t.Errorf("prompt %d: relative error %g in float16, at most %g is allowed", i, eb, bound/4)
				}
			}
			checkGreedySameRouting(t, gpu, exact, want, noise)
		})
	}
}

// checkGreedySameRouting compares the best token behind every prefix of the
// reference's greedy runs, with the routing of the float32 run: it is the same wherever
// that is ahead by more than noise, the largest error of a logit on the prompts.
func checkGreedySameRouting(t *testing.T, gpu, exact *stages, want fixtures.Expected, noise float64) {
	t.Helper()
	positions, clearly, equal := 0, 0, 0
	for i, s := range greedyRuns(want) {
		var theirs []float32
		after := exact.config.RoPE.LongAfter
		ids := s.prefix()
		ours := teacherForced(after, ids, want.Vocab, func(ids []int32, long bool) []float32 {
			logits, chosen := exact.run(ids, long, nil)
			// The second run is of the whole sequence, of which what is past the boundary
			// counts.
			theirs = append(theirs, logits[min(len(theirs), len(logits)):]...)
			got, _ := gpu.run(ids, long, chosen)
			return got
		})
		for j, id := range s.greedy {
			at := (len(s.prompt) - 1 + j) * want.Vocab
			best, margin := top(theirs[at : at+want.Vocab])
			if best != int(id) {
				t.Fatalf("sequence %d: the CPU draws %d for token %d, the reference %d", i, best, j, id)
			}
			got, _ := top(ours[at : at+want.Vocab])
			positions++
			if got == best {
				equal++
			}
			if margin > noise {
				clearly++
				if got != best {
					t.Errorf("sequence %d: token %d is %d, the reference has %d by a margin of %.3f, errors are up to %.3f", i, j, got, best, margin, noise)
				}
			}
		}
	}
	t.Logf("greedy tokens: %d of %d equal; %d have a margin above %.3f", equal, positions, clearly, noise)
}

// greedyRun is one of the reference's.
type greedyRun struct{ prompt, greedy []int32 }

// prefix is all that tokens were drawn behind.
func (r greedyRun) prefix() []int32 { return slices.Concat(r.prompt, r.greedy[:len(r.greedy)-1]) }

func greedyRuns(want fixtures.Expected) []greedyRun {
	var runs []greedyRun
	for _, p := range want.Prompts {
		if len(p.Greedy) > 0 {
			runs = append(runs, greedyRun{int32s(p.IDs), int32s(p.Greedy)})
		}
	}
	for _, x := range want.Texts {
		runs = append(runs, greedyRun{int32s(x.PromptIDs), int32s(x.GreedyIDs)})
	}
	return runs
}

// original says whether a fixture has weights of the five from which the others were
// made.
func original(name string) bool {
	return slices.Contains([]string{"mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"}, strings.TrimSuffix(name, "_old_config"))
}

// logitsOf runs a sequence in one step and returns the logits of all its tokens.
func logitsOf(t *testing.T, n *node.Node, ids []int32, long bool) []float32 {
	t.Helper()
	table := n.KV().NewTable()
	defer table.Release(false)
	if !table.Reserve(len(ids)) {
		t.Fatal("too few KV blocks")
	}
	res, err := n.Pipeline().Step(t.Context(), &pipeline.Step{Logits: true, Sequences: []pipeline.Sequence{{
		Tokens: ids, Table: table, LogitRows: len(ids), Long: long,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(res.Logits...)
}

// share counts positions whose logits have a relative error above the bound.
type share struct {
	Positions int `json:"positions"`
	Above     int `json:"above"`
}

func (s share) value() float64 { return float64(s.Above) / float64(max(s.Positions, 1)) }

func (s share) String() string {
	return fmt.Sprintf("%.1f %% (%d of %d)", 100*s.value(), s.Above, s.Positions)
}

// TestGPUOwnRouting: with the routers' own choices, some positions go another way than
// in float32: not more of them than in the reference implementation in bfloat16. And
// greedy tokens are the reference's wherever its best logit is clear.
func TestGPUOwnRouting(t *testing.T) {
	others := others(t)
	for _, name := range fixtures.Names(t) {
		t.Run(name, func(t *testing.T) {
			dir, want := fixtures.Dir(t, name), fixtures.Load(t, name)
			n := openOnGPU(t, node.Options{HostLogits: true, Settings: gpuSettings(func(s *configs.Settings) { s.Model.Name, s.Offload.Fraction = dir, 0.5 })})
			after := n.Info().Config.RoPE.LongAfter
			var all, short share // short: prompts up to the longrope boundary
			noise := 0.0
			for _, p := range want.Prompts {
				long := after > 0 && len(p.IDs) > after
				got := logitsOf(t, n, int32s(p.IDs), long)
				noise = max(noise, largest(got, p.Logits))
				for at := 0; at < len(got); at += want.Vocab {
					above := 0
					if !(relative(got[at:at+want.Vocab], p.Logits[at:at+want.Vocab]) <= bound) {
						above = 1
					}
					all.Positions, all.Above = all.Positions+1, all.Above+above
					if !long {
						short.Positions, short.Above = short.Positions+1, short.Above+above
					}
				}
			}
			t.Logf("positions above %g: %v; largest error of a logit: %.3f", bound, all, noise)
			if o, ok := others[name]; ok {
				t.Logf("up to the longrope boundary: %v; transformers in bfloat16: %v", short, o.OwnRouting)
				if short.Positions != o.OwnRouting.Positions {
					t.Errorf("%d positions, and %d of transformers", short.Positions, o.OwnRouting.Positions)
				}
				if short.value() > o.OwnRouting.value()+0.02 {
					t.Errorf("%v of the positions are above %g, in transformers %v", short, bound, o.OwnRouting)
				}
			}
			checkGreedyOnGPU(t, n, onCPU(t, dir), want, noise)
		})
	}
}

// follow requests count greedy tokens after ids.
func follow(ids []int32, count int) engine.Request {
	return request(ids, count)
}

// checkGreedyOnGPU compares greedy tokens under the routers' own choices, once with the reference's tokens as the
// prefix of each position, and once drawn on our own, up to the first that differs. They
// may differ where the reference's two best logits are closer than the largest error of
// a logit: that on prompts, which is noise, and behind the reference's tokens.
func checkGreedyOnGPU(t *testing.T, n *node.Node, exact *stages, want fixtures.Expected, noise float64) {
	t.Helper()
	sequences := greedyRuns(want)
	var rs []engine.Request
	for _, s := range sequences {
		rs = append(rs, follow(s.prompt, len(s.greedy)))
	}
	free, err := n.Engine().Generate(t.Context(), rs, nil)
	if err != nil {
		t.Fatal(err)
	}
	var ours, theirs [][]float32
	for _, s := range sequences {
		ids := s.prefix()
		after := n.Info().Config.RoPE.LongAfter
		ours = append(ours, teacherForced(after, ids, want.Vocab, func(ids []int32, long bool) []float32 { return logitsOf(t, n, ids, long) }))
		theirs = append(theirs, teacherForced(after, ids, want.Vocab, func(ids []int32, long bool) []float32 {
			logits, _ := exact.run(ids, long, nil)
			return logits
		}))
		noise = max(noise, largest(ours[len(ours)-1], theirs[len(theirs)-1]))
	}
	positions, clearly, equal, whole := 0, 0, 0, 0
	for i, s := range sequences {
		same := true // up to here, of the tokens drawn on our own
		for j, id := range s.greedy {
			at := (len(s.prompt) - 1 + j) * want.Vocab
			best, margin := top(theirs[i][at : at+want.Vocab])
			if best != int(id) {
				t.Fatalf("sequence %d: the CPU draws %d for token %d, the reference %d", i, best, j, id)
			}
			got, _ := top(ours[i][at : at+want.Vocab])
			positions++
			if margin > noise {
				clearly++
			}
			if got == best {
				equal++
			} else if margin > noise {
				t.Errorf("sequence %d: token %d is %d, the reference has %d by a margin of %.3f, errors are up to %.3f", i, j, got, best, margin, noise)
			}
			if same && free[i].TokenIDs[j] != id {
				same = false
				if margin > noise {
					t.Errorf("sequence %d: token %d was drawn as %d, the reference has %d by a margin of %.3f, errors are up to %.3f", i, j, free[i].TokenIDs[j], id, margin, noise)
				}
			}
		}
		if same {
			whole++
		}
	}
	t.Logf("greedy tokens: %d of %d equal; %d have a margin above %.3f; %d of %d sequences equal to their end", equal, positions, clearly, noise, whole, len(sequences))
}

// teacherForced returns the logits of every position of ids as a greedy run would see
// them: past the longrope boundary with the long factors throughout, before it with
// the short ones.
func teacherForced(after int, ids []int32, vocab int, run func(ids []int32, long bool) []float32) []float32 {
	if after == 0 || len(ids) <= after {
		return run(ids, false)
	}
	short := run(ids[:after], false)
	return append(short, run(ids, true)[after*vocab:]...)
}

// top returns the best entry and how far it is ahead of the second.
func top(row []float32) (best int, margin float64) {
	second := math.Inf(-1)
	for i, v := range row[1:] {
		switch {
		case v > row[best]:
			second, best = float64(row[best]), i+1
		case float64(v) > second:
			second = float64(v)
		}
	}
	return best, float64(row[best]) - second
}
