package node

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// policyKeys are of the settings that a policy decides.
var policyKeys = []string{"offload-fraction", "max-num-seqs", "max-num-batched-tokens", "micro-batch-size", "expert-grouping", "attention"}

const little = "hbm=6MiB,host=1GiB,virtual"

func planSettings(change func(*configs.Settings)) configs.Settings {
	s := configs.Defaults()
	s.Device.Emulate, s.Plan.Policy = little, configs.PlannedPolicy
	if change != nil {
		change(&s)
	}
	return s
}

// What a policy decides is what a node runs with, it fits, and what is given holds.
func TestFollow(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*configs.Settings)
		given  []string
	}{
		"nothing":   {nil, nil},
		"sequences": {func(s *configs.Settings) { s.Batch.MaxNumSeqs = 5 }, []string{"max-num-seqs"}},
		"defaults":  {nil, []string{"max-num-seqs", "micro-batch-size"}},
		"tokens":    {func(s *configs.Settings) { s.Batch.MaxNumBatchedTokens = 50 }, []string{"max-num-batched-tokens"}},
		"fraction":  {func(s *configs.Settings) { s.Offload.Fraction = 0.75 }, []string{"offload-fraction"}},
		"micro":     {func(s *configs.Settings) { s.Batch.MicroBatchSize = 3 }, []string{"micro-batch-size"}},
		"blocks":    {func(s *configs.Settings) { s.KV.NumGPUBlocksOverride = 20 }, []string{"num-gpu-blocks-override"}},
		"length":    {func(s *configs.Settings) { s.KV.MaxModelLen = 200 }, []string{"max-model-len"}},
		"experts":   {func(s *configs.Settings) { s.Offload.ResidentExperts = "0:0-4;3:1" }, []string{"resident-experts"}},
		"adaptive":  {func(s *configs.Settings) { s.Offload.DynamicResidency = true }, []string{"dynamic-residency"}},
		"attention": {func(s *configs.Settings) { s.Batch.Attention, s.Batch.NumMicroBatches = configs.OnCPU, 3 }, []string{"attention", "num-micro-batches"}},
		"grouping":  {func(s *configs.Settings) { s.Batch.Grouping = configs.PerMicroBatch }, []string{"expert-grouping"}},
		"host":      {func(s *configs.Settings) { s.Offload.Tier = configs.HostTier }, []string{"offload-tier"}},
		"hardware":  {func(s *configs.Settings) { s.Plan.Hardware = "h200" }, []string{"hardware"}},
		"all of them": {func(s *configs.Settings) {
			s.Offload.Fraction, s.Batch.MaxNumSeqs, s.Batch.MaxNumBatchedTokens, s.Batch.MicroBatchSize, s.Batch.Attention = 1, 4, 40, 2, configs.OnGPU
		}, policyKeys},
	} {
		t.Run(name, func(t *testing.T) {
			s := planSettings(c.change)
			if name == "defaults" {
				s.Device.Emulate = "hbm=64MiB,host=1GiB,virtual" // 64 sequences do not fit less
			}
			n, err := Open(t.Context(), Options{Settings: s, Explicit: func(key string) bool { return slices.Contains(c.given, key) }})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}()
			before, after, d := s.Values(), n.Info().Settings.Values(), n.Info().Planned
			for key, v := range after {
				want, decided := d.Settings[key]
				if decided && (v != want || slices.Contains(c.given, key) || !slices.Contains(policyKeys, key)) {
					t.Errorf("%s is %v, the policy says %v, given %v", key, v, want, c.given)
				}
				if !decided && v != before[key] {
					t.Errorf("%s is %v and nobody has changed it from %v", key, v, before[key])
				}
			}
			x := d.Prediction.Policy
			if local := n.Observe().Experts().ResidentExperts; local != x.ResidentExperts {
				t.Errorf("%d experts are resident, planned were %d", local, x.ResidentExperts)
			}
			if blocks := n.kv.Blocks(); blocks < d.KVBlocks {
				t.Errorf("%d blocks, planned were %d at least", blocks, d.KVBlocks)
			}
			if got := n.Info().Limits.MaxModelLen; got < d.MaxModelLen {
				t.Errorf("sequences of %d tokens, planned were %d", got, d.MaxModelLen)
			}
			if x.Batch > n.Info().Limits.MaxSeqs || max(x.Batch, x.PrefillTokens) > n.Info().Limits.MaxTokens {
				t.Errorf("%+v in limits of %+v", x, n.Info().Limits)
			}
			if len(d.Missing) > 0 {
				t.Errorf("not done: %v", d.Missing)
			}
			gpu := d.Prediction.Memory.GPU
			if u, err := n.machine.Usage(device.HBM(0)); err != nil || u.Allocated > gpu.Usable || gpu.Need() > gpu.Usable {
				t.Errorf("%d bytes taken, %d planned, %d usable, %v", u.Allocated, gpu.Need(), gpu.Usable, err)
			}
		})
	}
}

// A plan of a continuous workload has room for sequences of the model's context, and for
// prefill steps of usual size, also for one sequence; a plan of a request has not.
func TestPlanHasRoomForTheContext(t *testing.T) {
	for _, c := range []struct {
		model, hardware   string
		requests, context int
	}{
		{"mixtral-8x7b", "rtx-4090", 0, 32768},
		{"mixtral-8x7b", "l4", 0, 32768},
		{"qwen3-30b-a3b", "l4", 0, 40960},
		{"mixtral-8x7b", "l4", 1, 112},
	} {
		s := configs.Defaults()
		s.Model.Name, s.Plan.Hardware, s.Batch.MaxNumSeqs = c.model, c.hardware, 1
		o := PlanOptions{Options: Options{Settings: s, Workload: planner.Workload{PromptTokens: 77, NewTokens: 32, Requests: c.requests}}}
		p, err := Plan(o)
		if err != nil {
			t.Fatal(err)
		}
		if c.requests == 0 && (p.MaxModelLen != c.context || p.Settings["max-num-batched-tokens"] != 2048) || c.requests > 0 && p.MaxModelLen >= 32768 {
			t.Errorf("%s on %s, %d requests: a context of %d, %v tokens a step", c.model, c.hardware, c.requests, p.MaxModelLen, p.Settings["max-num-batched-tokens"])
		}
		if kv := p.Prediction.Memory.GPU; kv.Need() > kv.Usable {
			t.Errorf("%v", kv)
		}
	}
}

// A bound of TTFT and TPOT holds, and one that is out of reach is an error with the nearest.
func TestPlanWithBounds(t *testing.T) {
	o := PlanOptions{Options: Options{Settings: planSettings(nil)}}
	free, err := Plan(o)
	if err != nil {
		t.Fatal(err)
	}
	o.MaxTTFT, o.MaxTPOT = free.Prediction.TTFT()/2, free.Prediction.TPOT()*0.9
	p, err := Plan(o)
	if err != nil || p.Prediction.TTFT() > o.MaxTTFT || p.Prediction.TPOT() > o.MaxTPOT {
		t.Errorf("%+v, %v", p, err)
	}
	o.MaxTTFT = 1e-9
	_, err = Plan(o)
	var late *planner.LatencyError
	if !errors.As(err, &late) || !errors.Is(err, fault.ErrConfig) {
		t.Errorf("%v", err)
	}
	o.Settings.Plan.Policy = "policy.json"
	if _, err := Plan(o); err == nil || !strings.Contains(err.Error(), "--max-ttft and --max-tpot bound a search, and --policy names a file") {
		t.Errorf("%v", err)
	}
}

// A plan is refused for requests that are longer than a sequence may be. One that is made for the default workload, or
// for a request that may end anywhere, is made for shorter ones.
func TestPlanOfLongRequests(t *testing.T) {
	for _, c := range []struct {
		workload planner.Workload
		length   int
		want     string
	}{
		{planner.Workload{PromptTokens: 40000, NewTokens: 32}, 0, "prompts of 40000 tokens (--input-len) and 32 generated (--output-len) are longer together than a sequence may be, 32768 tokens"},
		{planner.Workload{PromptTokens: 900, NewTokens: 200}, 1000, "1000 tokens (--max-model-len"},
		{planner.Workload{PromptTokens: 900, NewTokens: 100}, 1000, ""},
		{planner.Workload{}, 64, ""},
	} {
		s := configs.Defaults()
		s.Model.Name, s.Plan.Hardware, s.KV.MaxModelLen = "mixtral-8x7b", "h200", c.length
		p, err := Plan(PlanOptions{Options: Options{Settings: s, Workload: c.workload}})
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v of at most %d: %v, want %q", c.workload, c.length, err, c.want)
		}
		if err == nil && p.Workload.PromptTokens+p.Workload.NewTokens > p.MaxModelLen {
			t.Errorf("%+v of at most %d: planned for %+v", c.workload, p.MaxModelLen, p.Workload)
		}
	}
}

// Emulated devices have the memory that they name also where hardware is named, whose rates they have.
func TestPlanOfEmulatedHardware(t *testing.T) {
	s := configs.Defaults()
	s.Model.Name, s.Plan.Hardware, s.Device.Emulate, s.Device.Peers = "mixtral-8x7b", "h200", "hbm=24GiB,host=100GiB,virtual,nodata", "none"
	p, err := Plan(PlanOptions{Options: Options{Settings: s}})
	if err != nil || p.Hardware.GPUMemory != 24<<30 || p.Hardware.HostMemory != 100<<30 || p.Hardware.GPUMemoryRate != 4.6e12 {
		t.Errorf("%+v, %v", p, err)
	}
	s.Device.Emulate = "hbm=8GiB"
	var misfit *planner.MisfitError
	if _, err := Plan(PlanOptions{Options: Options{Settings: s}}); !errors.As(err, &misfit) {
		t.Errorf("with 8 GiB: %v", err)
	}
}

// GPUs lend memory to a plan only where peers are named, as to run; emulated devices do so by
// default.
func TestPlanAssumesThePeersOfRun(t *testing.T) {
	for _, c := range []struct {
		peers, emulate string
		want           bool
	}{{"auto", "", false}, {"none", "", false}, {"1", "", true}, {"auto", "hbm=80GiB,host=512GiB", true}} {
		s := configs.Defaults()
		s.Model.Name, s.Plan.Hardware, s.Device.Peers, s.Device.Emulate = "mixtral-8x7b", "h100-80", c.peers, c.emulate
		p, err := Plan(PlanOptions{Options: Options{Settings: s}})
		if err != nil || p.Hardware.PeerMemory > 0 != c.want {
			t.Errorf("peers %s: %d bytes of peers, %v", c.peers, p.Hardware.PeerMemory, err)
		}
	}
}

// A policy that was planned is the same when it is read again.
func TestPlanAndRead(t *testing.T) {
	for _, hardware := range []string{"", "l4", "h200"} {
		s := planSettings(func(s *configs.Settings) { s.Plan.Hardware = hardware })
		found, err := Plan(PlanOptions{Options: Options{Settings: s}, Unrestricted: true})
		if err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(map[string]any{"policy": found.Prediction.Policy})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "policy.json")
		s.Plan.Policy = configs.PolicySource(path)
		if err := os.WriteFile(path, data, 0o666); err != nil {
			t.Fatal(err)
		}
		read, err := Plan(PlanOptions{Options: Options{Settings: s}})
		if err != nil {
			t.Fatal(err)
		}
		if read.Prediction.Policy != found.Prediction.Policy || math.Abs(read.Prediction.TokS/found.Prediction.TokS-1) > 1e-12 {
			t.Errorf("%q: %+v, then %+v", hardware, found.Prediction.Policy, read.Prediction.Policy)
		}
	}
}

// Every preset has a plan or a reason on machines with and without peers, and peers do
// not make it slower.
func TestPlanPresets(t *testing.T) {
	names := configs.PresetNames()
	for _, model := range names[:racedetector.Fewer(len(names), 2)] {
		for _, hardware := range []string{"l4", "h200"} {
			s := configs.Defaults()
			s.Model.Name, s.Plan.Hardware = model, hardware
			p, err := Plan(PlanOptions{Options: Options{Settings: s}})
			var misfit *planner.MisfitError
			if err != nil {
				if !errors.As(err, &misfit) || !errors.Is(err, fault.ErrConfig) {
					t.Errorf("%s on %s: %v", model, hardware, err)
				}
				continue
			}
			if x := p.Prediction.Policy; len(p.Missing) > 0 || x.KVOnHost > 0 && x.Attention != configs.OnCPU {
				t.Errorf("%s on %s: %+v", model, hardware, p.Prediction.Policy)
			}
			if p.Hardware.PeerMemory == 0 {
				continue
			}
			s.Offload.Tier = configs.HostTier
			q, err := Plan(PlanOptions{Options: Options{Settings: s}})
			if err != nil || q.Prediction.TokS > p.Prediction.TokS*1.02 {
				t.Errorf("%s on %s: %v tok/s without peers, %v with, %v", model, hardware, q.Prediction.TokS, p.Prediction.TokS, err)
			}
		}
	}
}

// Plans use the rates that a machine reports; what it does not report is from the hardware
// preset of its name, or assumed.
func TestHardwareOfAMachine(t *testing.T) {
	s := planSettings(func(s *configs.Settings) {
		s.Device.Emulate = "gpus=2,hbm=64MiB,host=1GiB,virtual,pcie=2GB/s,nvlink=9GB/s,hostlatency=5us,peerlatency=3us,flops=1T,bw=70GB/s"
	})
	p, err := Plan(PlanOptions{Options: Options{Settings: s}})
	if err != nil {
		t.Fatal(err)
	}
	h := p.Hardware
	if h.GPUMemory != 64<<20 || h.GPUFlops != 1e12 || h.GPUMemoryRate != 70e9 || h.HostToGPU[0] != 2e9 || h.PeerToGPU != 9e9 || h.HostCopyLatency != 5e-6 || h.PeerCopyLatency != 3e-6 {
		t.Errorf("%+v", h)
	}
	if h.Sources["gpu_flop_per_s"] != "this machine" || h.HostMemoryRate < 1e17 {
		t.Errorf("%v, %v", h.HostMemoryRate, h.Sources)
	}
	// Without any rate, or where nothing keeps to them.
	for _, spec := range []string{"virtual", "flops=1T,bw=70GB/s"} {
		s.Device.Emulate = spec
		p, err := Plan(PlanOptions{Options: Options{Settings: s}})
		if err != nil || p.Hardware.Sources["host_to_gpu_bytes_per_s"] != planning.Assumed {
			t.Errorf("%s: %+v, %v", spec, p, err)
		}
	}
	if want := int64(64<<20) - 64<<20/20; h.PeerMemory > want || h.PeerMemory < want-132<<10 {
		t.Errorf("peers lend %d bytes", h.PeerMemory)
	}
}

// Where nothing fits, it is said what is needed.
func TestPolicyThatDoesNotFit(t *testing.T) {
	_, err := Open(t.Context(), Options{Settings: planSettings(func(s *configs.Settings) { s.Device.Emulate = "hbm=2MiB,host=1GiB,virtual" })})
	var misfit *planner.MisfitError
	if !errors.As(err, &misfit) || !errors.Is(err, fault.ErrConfig) || strings.Contains(err.Error(), "\n") || misfit.Space.Name != "gpu" {
		t.Errorf("%v", err)
	}
}

// TestTracedHardware: a traced machine is one whose peers are emulated, too: they have no
// more memory to lend than this machine.
func TestTracedHardware(t *testing.T) {
	have, ok := devices.AvailableMemory()
	if !ok {
		t.Skip("this system does not say how much memory it has")
	}
	for _, trace := range []string{"", filepath.Join(t.TempDir(), "trace.json")} {
		s := planSettings(func(s *configs.Settings) { s.Device.Emulate, s.Output.Trace = "", trace })
		p, err := Plan(PlanOptions{Options: Options{Settings: s, OpenMachine: func() (device.Machine, error) {
			return emulated.Open(emulated.Options{GPUs: []emulated.GPU{{}, {MemoryBytes: 1 << 50}}})
		}}})
		if err != nil {
			t.Fatal(err)
		}
		if h := p.Hardware; h.PeerMemory <= 0 || h.PeerMemory > 2*have {
			t.Errorf("traced %q: %d bytes of peers' memory, and this machine has %d", trace, h.PeerMemory, have)
		}
	}
}
