package planner

import "testing"

// mixtralOn has the rates of MoE-Lightning's planner, some of which are above those of the
// datasheets that profiles keep to.
func mixtralOn(t testing.TB, hardware string, newTokens int) hrm {
	t.Helper()
	const gib = 1 << 30
	h := hardwarePreset(t, hardware)
	h.HostToGPU, h.GPUToHost = []float64{16 * gib}, 16*gib
	switch hardware {
	case "l4":
		h.GPUMemoryRate = 285 * gib
	case "t4":
		h.GPUMemoryRate, h.GPUFlops = 300*gib, 65e12
	}
	return hrm{
		Model: presetModel(t, "mixtral-8x7b"), Hardware: h,
		Workload: Workload{PromptTokens: 77, NewTokens: newTokens},
	}
}

// The golden case of MoE-Lightning's planner, part by part, to 0.1 % (figures that
// are given with fewer digits: to half of the last).
func TestHRMGolden(t *testing.T) {
	const gib = 1 << 30
	m := mixtralOn(t, "l4", 32)
	p, ok, err := m.evaluate(324, 14)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	for _, c := range []struct {
		name      string
		got, want float64
		digit     float64
	}{
		{"wg", p.LocalShare, 0.055884688, 1e-9},
		{"seconds a step", p.StepSeconds, 4.957, 1e-3},
		{"GPU peak, GiB", p.GPUBytes / gib, 20.640, 1e-3},
		{"inter, GiB", p.Intermediate / gib, 5.25, 1e-2},
		{"tok/s", p.TokS, 944.66, 1e-2},
		{"CPU, ms a layer", 1e3 * p.CPU, 25.7, 1e-1},
		{"GPU FFN, ms a layer", 1e3 * p.GPU, 129.5, 1e-1},
		{"link, ms a layer", 1e3 * p.Link, 154.9, 1e-1},
	} {
		if !near(c.got, c.want, max(0.001, 0.5*c.digit/c.want)) {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
	best, ok, err := m.search()
	if err != nil || !ok || best != p {
		t.Errorf("search finds %+v, %v, %v", best, ok, err)
	}
}

// The policies that MoE-Lightning published, as (micro-batch, number of them). The
// memory of its T4 and of that machine's host is not given: all four follow with the
// preset's 14.58 and 186 GiB, which are fitted (they do from 14.58 to 14.68). One of
// the L4's does not follow from the golden case's numbers: at 256 new tokens the
// search finds 3 % more, 353.96 tok/s, at (164, 10) than at the published (132, 12),
// 344.88. With 180 to 183.25 GiB of host memory instead of 184.29 it finds the
// published one, so that run had about 1 to 4 GiB less of it.
func TestHRMPublishedPolicies(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		hardware      string
		newTokens     int
		hostGiB       float64 // 0: the preset's
		micro, number int
	}{
		{"l4", 32, 0, 324, 14},
		{"l4", 64, 0, 228, 16},
		{"l4", 128, 0, 164, 16},
		{"l4", 256, 0, 164, 10}, // published: 132, 12
		{"l4", 256, 180, 132, 12},
		{"l4", 256, 183.25, 132, 12},
		{"t4", 32, 0, 164, 19},
		{"t4", 64, 0, 164, 19},
		{"t4", 128, 0, 164, 14},
		{"t4", 256, 0, 100, 15},
	} {
		m := mixtralOn(t, c.hardware, c.newTokens)
		if c.hostGiB > 0 {
			m.Hardware.HostMemory = int64(c.hostGiB * gib)
		}
		p, ok, err := m.search()
		if err != nil || !ok || p.MicroBatch != c.micro || p.MicroBatches != c.number {
			t.Errorf("%s, %d new tokens, %v GiB: %+v, %v, %v; want %d x %d", c.hardware, c.newTokens, c.hostGiB, p, ok, err, c.micro, c.number)
		}
	}
	m := mixtralOn(t, "l4", 256)
	for _, c := range []struct {
		micro, number int
		tokS          float64
	}{{164, 10, 353.96}, {132, 12, 344.88}} {
		if p, ok, err := m.evaluate(c.micro, c.number); err != nil || !ok || !near(p.TokS, c.tokS, 1e-4) {
			t.Errorf("%d x %d: %v tok/s, %v, %v; want %v", c.micro, c.number, p.TokS, ok, err, c.tokS)
		}
	}
}

func TestHRMRefuses(t *testing.T) {
	m := mixtralOn(t, "l4", 32)
	if _, ok, err := m.evaluate(4096, 32); ok || err != nil {
		t.Errorf("131,072 rows fit an L4: %v, %v", ok, err)
	}
	if _, _, err := m.evaluate(0, 1); err == nil {
		t.Error("micro-batches of nothing")
	}
	m.Hardware.HostMemory = 10 << 30
	if p, ok, err := m.search(); ok || err != nil {
		t.Errorf("Mixtral fits 10 GiB: %+v, %v", p, err)
	}
	m.Workload.NewTokens = 1
	if _, _, err := m.search(); err == nil {
		t.Error("no decode step, and no error")
	}
}
