package planning_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

// What the planner hears of emulated devices is what they were told to be.
func TestHardware(t *testing.T) {
	s := configs.Defaults().Device
	known := func(spec string) (planner.Hardware, bool) {
		t.Helper()
		s.Emulate = spec
		d, err := devices.Open(devices.Options{Settings: s, Peers: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		peers, err := d.Peers(configs.PeerChoice{Auto: true})
		if err != nil {
			t.Fatal(err)
		}
		if want := device.HBM(1); d.Real() || len(peers) == 0 || peers[0] != want || d.Space != device.HBM(0) {
			t.Errorf("%s: peers %v of %v", spec, peers, d.Space)
		}
		return planning.Facts(d.Machine, d.Space, peers).Known()
	}
	h, ok := known("virtual,nodata,gpus=2,hbm=10GiB,host=20GiB,pcie=50GB/s,nvlink=300GB/s,hostlatency=2us,peerlatency=3us,flops=7T,bw=2TB/s")
	if !ok || h.Validate() != nil {
		t.Fatalf("%+v, %v, %v", h, ok, h.Validate())
	}
	if h.GPUMemory != 10<<30 || h.HostMemory != 20<<30 || h.PeerMemory != 10<<30 || h.GPUFlops != 7e12 || h.GPUMemoryRate != 2e12 ||
		!slices.Equal(h.HostToGPU, []float64{50e9}) || h.GPUToHost != 50e9 || h.PeerToGPU != 300e9 ||
		math.Abs(h.HostCopyLatency-2e-6) > 1e-12 || math.Abs(h.PeerCopyLatency-3e-6) > 1e-12 {
		t.Errorf("%+v", h)
	}
	if h, ok := known("virtual"); !ok || h.Validate() != nil {
		t.Errorf("without limits: %+v, %v, %v", h, ok, h.Validate())
	}
	if h, ok := known("pcie=50GB/s,flops=7T"); ok {
		t.Errorf("rates that nothing keeps: %+v", h)
	}
	if _, ok := known("pace,pcie=50GB/s,flops=7T"); !ok {
		t.Error("paced devices have no rates")
	}
	s.Emulate = "gpus=0"
	if _, err := devices.Open(devices.Options{Settings: s}); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("%v", err)
	}
}

// A real GPU is known by its name and, where two have one, by its memory.
func TestHardwareOfGPUs(t *testing.T) {
	for _, c := range []struct {
		name, want string
	}{
		{"NVIDIA H200", "h200"},
		{"NVIDIA A100-SXM4-80GB", "a100-80"},
		{"NVIDIA L4", "l4"},
		{"Tesla T4", "t4"},
		{"NVIDIA L40S", "l40s"},
		{"NVIDIA L40", ""},
		{"NVIDIA H100 80GB HBM3", "h100-80"},
	} {
		h, from := planning.Preset(device.Info{Name: c.name, MemoryBytes: 80e9})
		ok := from != ""
		if ok != (c.want != "") || h.Name != c.want {
			t.Errorf("%s: %q, want %q", c.name, h.Name, c.want)
		}
	}
}

func TestPresetOf(t *testing.T) {
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
		"A100 40":   {device.Info{Name: "NVIDIA A100-SXM4-40GB", MemoryBytes: 42405855232}, "preset a100-40"},
		"a 4090":    {device.Info{Name: "NVIDIA GeForce RTX 4090", MemoryBytes: 24 << 30}, "preset rtx-4090"},
		"a laptop":  {device.Info{Name: "NVIDIA GeForce RTX 4090 Laptop GPU"}, ""},
		"an L40":    {device.Info{Name: "NVIDIA L40"}, ""},
		"Tesla":     {device.Info{Name: "Tesla T4"}, "preset t4"},
		"lowercase": {device.Info{Name: "tesla t4"}, "preset t4"},
	} {
		if _, got := planning.Preset(c.info); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// Hardware is found by any spelling of a profile's name; a file of that name comes first,
// and a folder does not count.
func TestLoadHardware(t *testing.T) {
	t.Chdir(t.TempDir())
	load := func(name, want string) {
		t.Helper()
		h, err := planning.LoadHardware(name)
		if got := fmt.Sprint(h.Name, err); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	load("h200", "h200<nil>")
	load("RTX 4090", "rtx-4090<nil>")
	load("a100", `hardware "a100" is ambiguous: give a100-40 or a100-80`)
	load("mine.json", `there is no file "mine.json": give a JSON file that describes a machine, or one of `+strings.Join(configs.HardwareNames(), ", "))
	load("h201", `there is no hardware "h201": known are `+strings.Join(configs.HardwareNames(), ", ")+"; did you mean h20 or h200?")
	if err := os.Mkdir("4090", 0o755); err != nil {
		t.Fatal(err)
	}
	load("4090", "rtx-4090<nil>")
	for _, name := range []string{"h100", "h200"} {
		if err := os.WriteFile(name, []byte(`{"name": "mine", "base": "l4"}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load("h100", "mine<nil>")
	load("h200", "h200<nil>")
}

// A machine that has peers is planned with a link to them, also where the profile of its
// product has none.
func TestAssumePeersOverPCIe(t *testing.T) {
	top := &device.Topology{GPUs: []device.Info{{Name: "NVIDIA L40S", MemoryBytes: 45 << 30}, {Name: "NVIDIA L40S", MemoryBytes: 45 << 30}}}
	m := planning.Machine{Topology: top, Space: device.HBM(0), Real: true}
	if h := m.Assume(); h.PeerToGPU != 0 {
		t.Errorf("without peers: %v bytes/s", h.PeerToGPU)
	}
	m.Peers = []device.Space{device.HBM(1)}
	h := m.Assume()
	if h.PeerToGPU != h.HostToGPU[0] || h.PeerToGPU == 0 || h.Sources["peer_to_gpu_bytes_per_s"] != planning.Assumed {
		t.Errorf("with peers: %v bytes/s, %q", h.PeerToGPU, h.Sources["peer_to_gpu_bytes_per_s"])
	}
}
