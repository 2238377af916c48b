package node

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/planner"
)

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
		"blocks":    {func(s *configs.Settings) { s.KV.NumBlocks = 20 }, []string{"num-kv-blocks"}},
		"length":    {func(s *configs.Settings) { s.KV.MaxModelLen = 200 }, []string{"max-model-len"}},
		"experts":   {func(s *configs.Settings) { s.Offload.LocalExperts = "0:0-4;3:1" }, []string{"local-experts"}},
		"adaptive":  {func(s *configs.Settings) { s.Offload.AdaptLocal = true }, []string{"adapt-local"}},
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
			n, err := Open(t.Context(), Options{Settings: s, Given: func(key string) bool { return slices.Contains(c.given, key) }})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}()
			before, after, d := s.Values(), n.Settings().Values(), n.Planned()
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
			if n.plan.LocalExperts != x.LocalExperts {
				t.Errorf("%d experts are local, planned were %d", n.plan.LocalExperts, x.LocalExperts)
			}
			if blocks := n.kv.Blocks(); blocks < d.KVBlocks {
				t.Errorf("%d blocks, planned were %d at least", blocks, d.KVBlocks)
			}
			if x.Batch > n.limits.MaxSeqs || max(x.Batch, x.PrefillTokens) > n.limits.MaxRows {
				t.Errorf("%+v in limits of %+v", x, n.limits)
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
	for _, model := range configs.PresetNames() {
		for _, hardware := range []string{"l4", "h200"} {
			s := configs.Defaults()
			s.Model.Name, s.Plan.Hardware = model, hardware
			p, err := Plan(PlanOptions{Options: Options{Settings: s}})
			var misfit *planner.MisfitError
			if err != nil {
				if !errors.As(err, &misfit) || !errors.Is(err, ErrConfig) {
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

// What a machine tells of itself is what is planned with; what it does not, a preset
// of its name does, or is assumed.
func TestHardwareOfAMachine(t *testing.T) {
	s := planSettings(func(s *configs.Settings) {
		s.Device.Emulate = "gpus=2,hbm=64MiB,host=1GiB,virtual,pcie=2GB/s,nvlink=9GB/s,hostlatency=5us,peerlatency=3us,flops=1T,bw=70GB/s"
	})
	p, err := Plan(PlanOptions{Options: Options{Settings: s}})
	if err != nil {
		t.Fatal(err)
	}
	h := p.Hardware
	if h.GPUMemory != 64<<20 || h.GPUFlops != 1e12 || h.GPUMemoryRate != 70e9 || h.HostToGPU[0] != 2e9 || h.PeerToGPU != 9e9 || h.HostCopyStart != 5e-6 || h.PeerCopyStart != 3e-6 {
		t.Errorf("%+v", h)
	}
	if h.Sources["gpu_flop_per_s"] != "this machine" || h.HostMemoryRate != unlimited {
		t.Errorf("%v, %v", h.HostMemoryRate, h.Sources)
	}
	// Without any rate, or where nothing keeps to them.
	for _, spec := range []string{"virtual", "flops=1T,bw=70GB/s"} {
		s.Device.Emulate = spec
		p, err := Plan(PlanOptions{Options: Options{Settings: s}})
		if err != nil || p.Hardware.HostToGPU[0] != assumedLink || p.Hardware.Sources["host_to_gpu_bytes_per_s"] != Assumed {
			t.Errorf("%s: %+v, %v", spec, p, err)
		}
	}
	if want := int64(64<<20) - 64<<20/20; h.PeerMemory > want || h.PeerMemory < want-132<<10 {
		t.Errorf("peers lend %d bytes", h.PeerMemory)
	}
	for name, c := range map[string]struct {
		info device.Info
		want string
	}{
		"another":   {device.Info{Name: "NVIDIA RTX A6000"}, ""},
		"emulated":  {device.Info{Name: "emulated"}, ""},
		"H200":      {device.Info{Name: "NVIDIA H200", MemoryBytes: 150 << 30}, "preset h200"},
		"H100":      {device.Info{Name: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30}, "preset h100-80"},
		"A100":      {device.Info{Name: "NVIDIA A100-SXM4-80GB", MemoryBytes: 80 << 30}, "preset a100-80"},
		"L4":        {device.Info{Name: "NVIDIA L4"}, "preset l4"},
		"an L40":    {device.Info{Name: "NVIDIA L40S"}, ""},
		"Tesla":     {device.Info{Name: "Tesla T4"}, "preset t4"},
		"lowercase": {device.Info{Name: "tesla t4"}, "preset t4"},
	} {
		if _, got := presetFor(c.info); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestFractionOf(t *testing.T) {
	for _, all := range []int{1, 3, 48, 256, 1440, 6144} {
		for n := range all + 1 {
			f := fractionOf(n, all)
			if got := int(math.Round(f * float64(all))); got != n {
				t.Fatalf("%d of %d is %v, which is %d", n, all, f, got)
			}
		}
	}
	if f := fractionOf(128, 256); f != 0.5 {
		t.Errorf("half is %v", f)
	}
}

// Where nothing fits, it is said what is needed.
func TestPolicyThatDoesNotFit(t *testing.T) {
	_, err := Open(t.Context(), Options{Settings: planSettings(func(s *configs.Settings) { s.Device.Emulate = "hbm=2MiB,host=1GiB,virtual" })})
	var misfit *planner.MisfitError
	if !errors.As(err, &misfit) || !errors.Is(err, ErrConfig) || strings.Contains(err.Error(), "\n") || misfit.Space.Name != "gpu" {
		t.Errorf("%v", err)
	}
}

// TestTracedHardware: a traced machine is one whose peers are emulated, too: they have no
// more memory to lend than this machine.
func TestTracedHardware(t *testing.T) {
	have, ok := availableMemory()
	if !ok {
		t.Skip("this system does not say how much memory it has")
	}
	for _, w := range []*trace.Writer{nil, trace.NewWriter(io.Discard)} {
		n := &Node{settings: configs.Defaults(), trace: w, peers: []device.Space{device.HBM(1)}, footprint: &footprint{expert: kernels.ExpertLayout{Size: 1 << 20}}}
		if err := n.open(func() (device.Machine, error) {
			return emulated.Open(emulated.Options{GPUs: []emulated.GPU{{}, {MemoryBytes: 1 << 50}}})
		}, nil); err != nil {
			t.Fatal(err)
		}
		h, err := n.hardware(&n.settings)
		if err != nil {
			t.Error(err)
		}
		if h.PeerMemory <= 0 || h.PeerMemory > 2*have {
			t.Errorf("traced %v: %d bytes of peers' memory, and this machine has %d", w != nil, h.PeerMemory, have)
		}
		for _, closed := range n.closers {
			if err := closed(); err != nil {
				t.Error(err)
			}
		}
	}
}
