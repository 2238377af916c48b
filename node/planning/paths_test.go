package planning_test

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

// The planner hears how fast emulated links are together: links that share a rate gain nothing, and
// relays share the link into the GPU.
func TestHostRatesOfLinks(t *testing.T) {
	for _, c := range []struct {
		spec   string
		relays []int
		want   []float64
	}{
		{"pcie=50GB/s,nvlink=300GB/s", nil, []float64{50}},
		{"pcie=50GB/s,nvlink=300GB/s", []int{3, 1, 2}, []float64{50, 100, 150, 200}},
		{"pcie=50GB/s,nvlink=300GB/s,hostroot=110GB/s", []int{1, 2, 3}, []float64{50, 100, 110, 110}},
		{"pcie=50GB/s,nvlink=300GB/s,hostroot=0-1:50GB/s+2-3:80GB/s", []int{1, 2, 3}, []float64{50, 50, 100, 130}},
		{"pcie=50GB/s,nvlink=80GB/s", []int{1, 2, 3}, []float64{50, 100, 130, 130}},
		{"pcie=50GB/s,nvlink=300GB/s,pairs=2-0:20GB/s", []int{2, 1}, []float64{50, 70, 120}},
		{"pcie=50GB/s", []int{1}, []float64{50, 100}},
		{"nvlink=50GB/s", []int{1}, []float64{1e9, 1e9}}, // not limited
	} {
		o, err := emulated.ParseSpec("virtual,nodata,gpus=4," + c.spec)
		if err != nil {
			t.Fatal(err)
		}
		m, err := emulated.New(o)
		if err != nil {
			t.Fatal(err)
		}
		f := planning.Facts(m, device.HBM(0), nil)
		for _, r := range c.relays {
			f.Relays = append(f.Relays, device.HBM(r))
		}
		known, ok := f.Known()
		if assumed := f.Assume(); !ok || c.want[0] < 1e9 && !slices.Equal(assumed.HostToGPU, known.HostToGPU) {
			t.Errorf("%s: assumed %v, known %v", c.spec, assumed.HostToGPU, known.HostToGPU)
		}
		near := func(got, want float64) bool { return math.Abs(got-want*1e9) <= 1e-6*want*1e9 }
		if !slices.EqualFunc(known.HostToGPU, c.want, near) || known.Validate() != nil {
			t.Errorf("%s, relays %v: %v GB/s, want %v; %v", c.spec, c.relays, known.HostToGPU, c.want, known.Validate())
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Rates of a hardware file are those with its relays; others than were calibrated add nothing.
func TestOver(t *testing.T) {
	for _, c := range []struct {
		calibrated []int // nil: not
		gpu        int
		relays     []int
		want       []float64
	}{
		{nil, 0, nil, []float64{50}},
		{nil, 0, []int{5}, []float64{50, 90}},
		{nil, 0, []int{5, 6, 7}, []float64{50, 90, 120, 120}},
		{[]int{4, 1}, 0, []int{4, 1}, []float64{50, 90, 120}},
		{[]int{4, 1}, 0, []int{2, 1, 3, 4}, []float64{50, 50, 90, 90, 120}},
		{[]int{4, 1}, 3, []int{2, 1}, []float64{50, 90, 120}}, // another GPU
		{[]int{}, 0, []int{2, 1}, []float64{50, 50, 50}},
	} {
		h := planner.Hardware{HostToGPU: []float64{50, 90, 120}, PeerToGPU: 300}
		if c.calibrated != nil {
			h.Multipath = &configs.Multipath{Relays: c.calibrated}
		}
		if got := planning.Calibrated(&h, c.gpu); c.gpu == 0 && !slices.Equal(got, c.calibrated) || c.gpu > 0 && got != nil {
			t.Errorf("calibrated for GPU %d: %v", c.gpu, got)
		}
		planning.Over(&h, c.gpu, c.relays)
		if !slices.Equal(h.HostToGPU, c.want) {
			t.Errorf("%+v: %v", c, h.HostToGPU)
		}
	}
	h := planner.Hardware{HostToGPU: []float64{50, 90}}
	if planning.Over(&h, 0, []int{1}); !slices.Equal(h.HostToGPU, []float64{50}) {
		t.Errorf("without links between GPUs: %v", h.HostToGPU)
	}
}

func TestPolicyPaths(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.json")
	for text, want := range map[string]int{
		`{"batch": 8, "resident_experts": 4, "host_paths": 3}`:      3,
		`{"model": "m", "policy": {"batch": 8, "host_paths": 2}}`:   2,
		`{"batch": 8, "resident_experts": 4}`:                       0,
		`no JSON`:                                                   0,
		`{"policy": {"attention": "gpu", "host_paths": 4}, "x": 1}`: 4,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := planning.PolicyPaths(configs.PolicySource(path)); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
	for _, p := range []configs.PolicySource{configs.NoPolicy, configs.PlannedPolicy, "no/such/file"} {
		if got := planning.PolicyPaths(p); got != 0 {
			t.Errorf("%s: %d", p, got)
		}
	}
}
