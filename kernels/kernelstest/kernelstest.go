package kernelstest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Options of a run.
type Options struct {
	// Full adds the shapes of real models, with few rows: some GB of memory, and
	// minutes on a CPU. Default: off.
	Full bool
	// BatchInvariant also checks that a row's result has the same bits regardless of the
	// other rows in the operation and of how its experts are split into launches. Default:
	// off.
	BatchInvariant bool
	// Weights are the types of weights to test. Default: BF16, F16 and F32.
	Weights []kernels.DType
	// ExpertWeights are the types of experts' weights to test. Default: Weights.
	ExpertWeights []kernels.DType
	// Seed of all inputs; 0 takes one from the clock. Default: 0.
	Seed uint64
	// Only restricts the run to one of the suite's tests, such as "attention". Default: all.
	Only string
	// Output, if set, receives the bytes of every output, in a fixed order. Two runs with
	// the same seed must agree if the backend promises it. Default: nil.
	Output func(test, tensor string, data []byte)
}

// Open returns a machine, a backend of it, and the stream of a device whose
// memory holds the tensors. It closes them with t.Cleanup, and may return the
// same ones each time. It is called once per operation.
type Open func(t *testing.T) (device.Machine, kernels.Backend, device.Stream)

var tests = []struct {
	name string
	run  func(*rig)
}{
	{"embed", testEmbed},
	{"norm", testNorm},
	{"matmul", testMatMul},
	{"gated_matmul", testGatedMatMul},
	{"clamp", testClamp},
	{"rope", testRoPE},
	{"append_kv", testAppendKV},
	{"rope_append_kv", testRoPEAppendKV},
	{"attention", testAttention},
	{"rope_attention", testRoPEAttention},
	{"route", testRoute},
	{"route_nan", testRouteNaN},
	{"router_gate_up", testRouterGateUp},
	{"route_down", testRouteDown},
	{"route_expert_up", testRouteExpertUp},
	{"group", testSortByExpert},
	{"experts", testExperts},
	{"combine", testCombine},
	{"silu_mul", testSiluMul},
	{"gather", testGather},
	{"copy_blocks", testCopyBlocks},
	{"copy", testCopy},
	{"add_rows", testAddRows},
	{"sample", testSample},
	{"sample_cuts", testSampleCuts},
	{"sample_none", testSampleNone},
	{"adjust", testAdjust},
	{"mask", testMask},
	{"log_probs", testLogProbs},
	{"combine_norm", testCombineNorm},
	{"layout", testLayout},
	{"arguments", testArguments},
}

// Run checks the backends that open returns against the contract of package kernels.
func Run(t *testing.T, open Open, o Options) {
	if len(o.Weights) == 0 {
		o.Weights = []kernels.DType{kernels.BF16, kernels.F16, kernels.F32}
	}
	if len(o.ExpertWeights) == 0 {
		o.ExpertWeights = o.Weights
	}
	if o.Seed == 0 {
		o.Seed = uint64(time.Now().UnixNano())
	}
	t.Logf("kernelstest.Options.Seed: %d", o.Seed)
	for i, test := range tests {
		if o.Only != "" && o.Only != test.name {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			m, b, s := open(t)
			r := &rig{
				T: t, o: o, machine: m, backend: b, stream: s, act: b.ActivationDType(),
				rand: rand.New(rand.NewPCG(o.Seed, uint64(i))),
			}
			if e, ok := s.(device.Executor); ok {
				r.recorder = &recorder{Executor: e}
				r.stream = r.recorder
			}
			test.run(r)
		})
	}
}
