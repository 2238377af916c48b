package bench_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// Every cause of stalls has its column.
func TestStallCauses(t *testing.T) {
	got := slices.Sorted(maps.Keys(pipeline.Stalls{}.ByName()))
	if want := slices.Sorted(slices.Values(eval.StallCauses)); !slices.Equal(got, want) {
		t.Errorf("causes %v, columns %v", got, want)
	}
}

// Emulated devices are the hardware whose rates they keep to.
func TestMachine(t *testing.T) {
	h200, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	const same = "pcie=55GB/s,nvlink=395GB/s,flops=800T,bw=4.6TB/s"
	for _, c := range []struct {
		emulate    string
		named      *planner.Hardware
		rates      eval.Rates
		hardware   string
		comparable bool
	}{
		{"", nil, eval.RatesNone, "", false},
		{"", &h200, eval.RatesNone, "h200", false},
		{"pcie=1GB/s", nil, eval.RatesNone, "", false},
		{"pace,pcie=1GB/s", nil, eval.RatesPaced, "emulated", true},
		{"virtual," + same, nil, eval.RatesVirtual, "emulated", true},
		{"virtual," + same, &h200, eval.RatesVirtual, "h200", true},
		{"gpus=1,virtual," + same, &h200, eval.RatesVirtual, "h200", true},
		{"virtual,pcie=1GB/s", &h200, eval.RatesVirtual, "h200", false},
		{"virtual,pcie=55GB/s,nvlink=395GB/s", &h200, eval.RatesVirtual, "h200", false}, // its compute is not limited
		{same, &h200, eval.RatesNone, "h200", false},
	} {
		s := configs.Defaults().Device
		s.Emulate = c.emulate
		d, err := devices.Open(devices.Options{Settings: s, Peers: true})
		if err != nil {
			t.Fatal(err)
		}
		m := bench.Machine(planning.Facts(d.Machine, d.Space, []device.Space{}), &s, c.named)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if !m.Emulated || m.Device != "emulated" || m.Driver != "" || m.Emulation.Spec != c.emulate || m.Emulation.Rates != c.rates || m.Unpaced() != (c.rates == eval.RatesNone) {
			t.Errorf("%q: %+v, %+v", c.emulate, m, m.Emulation)
		}
		if (m.Hardware == nil) != (c.hardware == "") || m.Hardware != nil && (m.Hardware.Name != c.hardware || m.Hardware.Comparable != c.comparable || m.Hardware.Sources["host_to_gpu_bytes_per_s"] == "") {
			t.Errorf("%q: %+v, want %q, comparable %v", c.emulate, m.Hardware, c.hardware, c.comparable)
		}
	}
	// Of a GPU a profile is that of its own product.
	gpu := func(name string, named string) bool {
		h, err := planner.HardwarePreset("h200")
		if err != nil {
			t.Fatal(err)
		}
		h.Name = named
		m := bench.Machine(planning.Machine{Topology: &device.Topology{GPUs: []device.Info{{Name: name, MemoryBytes: 141 << 30}}}, Space: device.HBM(0), Real: true}, &configs.Device{}, &h)
		if m.Emulated || m.Emulation != nil || m.Device != name {
			t.Errorf("%+v", m)
		}
		return m.Hardware.Comparable
	}
	for _, c := range []struct {
		name, hardware string
		want           bool
	}{
		{"NVIDIA H200", "h200", true},
		{"NVIDIA H200", "l4", false},
		{"NVIDIA GeForce GTX 970", "h200", false},
		{"NVIDIA GeForce GTX 970", "NVIDIA GeForce GTX 970, 2026-01-02", true},
		{"NVIDIA H200", "emulated, 2026-01-02", false},
	} {
		if got := gpu(c.name, c.hardware); got != c.want {
			t.Errorf("%s on %s: comparable %v", c.hardware, c.name, got)
		}
	}
}
