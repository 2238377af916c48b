package node_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// timed is a preset on a machine without data and with a virtual clock.
type timed struct {
	*testing.T
	n *node.Node
	m *emulated.Machine
}

// openTimed opens the first layers of a preset (0: all) on a GPU as fast as an H200, with a
// link to the host of the given rate (0: no limit).
func openTimed(t *testing.T, model string, layers int, fraction, bytesPerSecond float64) timed {
	t.Helper()
	s := configs.Defaults()
	s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.Offload.Fraction, s.KV.MaxModelLen = model, configs.LoadDummy, layers, fraction, 1024
	var m *emulated.Machine
	var loaded, all int64
	n, err := node.Open(t.Context(), node.Options{
		Settings: s,
		OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(emulated.Options{
				Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: bytesPerSecond},
				GPUs: []emulated.GPU{{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.8e12}},
			})
			return m, err
		},
		Progress: func(done, total int64) { loaded, all = done, total },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	if loaded != all || all < 1e9 {
		t.Errorf("%s: %d of %d bytes were loaded", model, loaded, all)
	}
	return timed{t, n, m}
}

// run generates so many tokens for each of a few requests, and returns how long that
// takes on the virtual clock and the bytes of the experts fetched for it.
func (x timed) run(tokens int) (time.Duration, int64) {
	x.Helper()
	requests := make([]engine.Request, 16)
	for i := range requests {
		requests[i] = request([]int32{1, 2, 3}, tokens)
	}
	fetched := func() int64 {
		r, err := x.n.Observe().Report(x.Context())
		if err != nil {
			x.Fatal(err)
		}
		return r.Experts.Fetched[experts.Host]
	}
	began, before := x.m.Now(), fetched()
	if _, err := x.n.Engine().Generate(x.Context(), requests, nil); err != nil {
		x.Fatal(err)
	}
	return x.m.Now() - began, fetched() - before
}

// step is what one decode step takes.
func (x timed) step() (time.Duration, int64) {
	x.Helper()
	x.run(1) // from here on the first layer's experts are prefetched
	const steps = 9
	short, few := x.run(1)
	long, many := x.run(1 + steps)
	return (long - short) / steps, (many - few) / steps
}

// TestOverlap: copies overlap compute, so a step takes as long as the longer of the two.
func TestOverlap(t *testing.T) {
	const layers = 6
	for _, model := range []string{"qwen1.5-moe-a2.7b", "mixtral-8x7b"} {
		compute, _ := openTimed(t, model, layers, 0, 0).step()
		_, bytes := openTimed(t, model, layers, 0.5, 0).step()
		for _, share := range []float64{0.5, 0.95, 1.05, 2} { // of the copies' time in that of compute
			copies := time.Duration(share * float64(compute))
			took, moved := openTimed(t, model, layers, 0.5, float64(bytes)/copies.Seconds()).step()
			slower := max(compute, copies)
			if moved != bytes || took < slower*99/100 || took > slower*104/100 {
				t.Errorf("%s: compute takes %v, the copies of %d bytes %v, and together with %d bytes %v", model, compute, bytes, copies, moved, took)
			}
		}
	}
}

// TestPresetsWithoutData: every preset runs in its full shape in virtual time,
// whether or not this machine's memory could hold it.
func TestPresetsWithoutData(t *testing.T) {
	all := configs.PresetNames()
	for _, model := range all[:racedetector.Fewer(len(all), 2)] {
		if took, bytes := openTimed(t, model, 0, 0.75, 55e9).run(1); took <= 0 || bytes <= 0 {
			t.Errorf("%s: a step takes %v and copies %d bytes", model, took, bytes)
		}
	}
}
