package eval_test

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

const (
	hostRate, peerRate = 55.3e9, 395e9
	hostLatency        = 7400 * time.Nanosecond
	peerLatency        = 9300 * time.Nanosecond
)

// transferOn measures copies on a machine with ANCHORS' links and so many GPUs.
func transferOn(t *testing.T, gpus int) []eval.TransferPoint {
	t.Helper()
	m, err := emulated.New(emulated.Options{
		Virtual: true, NoData: true, GPUs: make([]emulated.GPU, gpus),
		HostLink: emulated.Link{BytesPerSecond: hostRate, Latency: hostLatency},
		PeerLink: emulated.Link{BytesPerSecond: peerRate, Latency: peerLatency},
	})
	if err != nil {
		t.Fatal(err)
	}
	o := eval.TransferOptions{Machine: m, Compute: device.HBM(0), Repetitions: 2}
	if gpus > 1 {
		o.Peer = device.HBM(1)
	}
	points, err := eval.Transfer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range o.Needs() {
		if u, err := m.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: %d bytes taken at most, %v, and %d announced", s, u.Peak, err, want)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err) // memory that was not given back
	}
	return points
}

func TestTransfer(t *testing.T) {
	points := transferOn(t, 2)
	if want := 4 * len(eval.DefaultSizes()); len(points) != want {
		t.Fatalf("%d points, want %d", len(points), want)
	}
	host := func(bytes int64) float64 { return hostLatency.Seconds() + float64(bytes)/hostRate }
	peer := func(bytes int64) float64 { return peerLatency.Seconds() + float64(bytes)/peerRate }
	for _, p := range points {
		// The engine's chunks have a start each.
		if share := p.EngineBytesPerSecond / p.BytesPerSecond; share < 0.6 || share > 1.01 {
			t.Errorf("%s, %d bytes: the engine reaches %.2f of the rate", p.Path, p.Bytes, share)
		}
		var latency, rate float64
		n := float64(p.Bytes)
		switch p.Path {
		case eval.HostPath, eval.D2HPath:
			latency, rate = host(p.Bytes), n/host(p.Bytes)
		case eval.PeerPath:
			latency, rate = peer(p.Bytes), n/peer(p.Bytes)
		case eval.BothPath:
			latency, rate = max(host(p.Bytes), peer(p.Bytes)), n/host(p.Bytes)+n/peer(p.Bytes)
		}
		// Together, a whole number of copies on each path ends about together.
		slack := 1e-3
		if p.Path == eval.BothPath {
			slack = 0.04
		}
		if math.Abs(p.LatencySeconds/latency-1) > 1e-3 || math.Abs(p.BytesPerSecond/rate-1) > slack {
			t.Errorf("%s, %d bytes: %.3g s and %.4g bytes/s, want %.3g and %.4g", p.Path, p.Bytes, p.LatencySeconds, p.BytesPerSecond, latency, rate)
		}
	}
}

func TestCalibrate(t *testing.T) {
	base, err := planner.HardwarePreset("a100-80")
	if err != nil {
		t.Fatal(err)
	}
	h, err := eval.Calibrate(&eval.TransferResult{Machine: eval.Machine{Device: "here"}, Points: transferOn(t, 2)}, eval.Calibration{Base: base})
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if h, err = planner.ParseHardware(data); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"host", h.HostToGPU[0], hostRate},
		{"back", h.GPUToHost, hostRate},
		{"peer", h.PeerToGPU, peerRate},
		{"start from the host", h.HostCopyLatency, hostLatency.Seconds()},
		{"start from a peer", h.PeerCopyLatency, peerLatency.Seconds()},
	} {
		if math.Abs(c.got/c.want-1) > 1e-3 {
			t.Errorf("%s: %.4g, want %.4g", c.name, c.got, c.want)
		}
	}
	if h.Name != "here" || len(h.HostToGPU) != 1 || h.GPUFlops != base.GPUFlops || !strings.HasPrefix(h.Sources["peer_to_gpu_bytes_per_s"], "measured") {
		t.Errorf("%+v", h)
	}
	if base.Name == "here" || strings.Contains(base.Sources["host_to_gpu_bytes_per_s"], "bench transfer") {
		t.Errorf("the base has changed: %+v", base)
	}
	alone, err := eval.Calibrate(&eval.TransferResult{Machine: eval.Machine{Device: "here"}, Points: transferOn(t, 1)}, eval.Calibration{Base: base})
	if err != nil || alone.PeerMemory != 0 || alone.PeerToGPU != 0 {
		t.Errorf("without peers: %+v, %v", alone, err)
	}
	if _, err := eval.Calibrate(&eval.TransferResult{}, eval.Calibration{Base: base}); err == nil {
		t.Error("calibrated from nothing")
	}
}

// Nothing but what was measured, and on a real device, says "measured"; the name says
// which machine it is.
func TestCalibrateSources(t *testing.T) {
	base, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	copies := []string{"host_to_gpu_bytes_per_s", "gpu_to_host_bytes_per_s", "host_copy_latency_s"}
	peers := []string{"peer_to_gpu_bytes_per_s", "peer_copy_latency_s"}
	both, alone := transferOn(t, 2), transferOn(t, 1)
	own := base
	own.Name, own.Sources = "emulated", nil
	for _, c := range []struct {
		result              eval.TransferResult
		base                planner.Hardware
		name, measured, was string
	}{
		{eval.TransferResult{Machine: eval.Machine{Device: "NVIDIA H200"}, Points: both}, base, "NVIDIA H200, 2026-11-22, moeserve v1", "measured by bench transfer: ", "from h200 (not measured here)"},
		{eval.TransferResult{Machine: eval.Machine{Device: "NVIDIA H200"}, Points: alone}, base, "NVIDIA H200, 2026-11-22, moeserve v1", "measured by bench transfer: ", "from h200 (not measured here)"},
		{eval.TransferResult{Machine: eval.Machine{Device: "emulated", Emulated: true}, Points: both}, base, "emulated, 2026-11-22, moeserve v1", "emulated by bench transfer: ", "from h200 (not measured here)"},
		{eval.TransferResult{Machine: eval.Machine{Device: "cpu", Emulated: true}, Points: both}, base, "cpu, emulated, 2026-11-22, moeserve v1", "emulated by bench transfer: ", "from h200 (not measured here)"},
		{eval.TransferResult{Machine: eval.Machine{Device: "emulated", Emulated: true}, Points: both}, own, "emulated, 2026-11-22, moeserve v1", "emulated by bench transfer: ", "as the devices are emulated (not measured)"},
	} {
		h, err := eval.Calibrate(&c.result, eval.Calibration{Base: c.base, Date: "2026-11-22", Version: "v1"})
		if err != nil || h.Name != c.name {
			t.Errorf("%q, %v, want %q", h.Name, err, c.name)
		}
		hasPeer := len(c.result.Points) == len(both)
		for _, key := range planner.HardwareFields() {
			want := c.was
			switch {
			case slices.Contains(copies, key) || hasPeer && slices.Contains(peers, key):
				want = c.measured
			case key == "multipath":
				want = "none: bench transfer measured one link"
			case strings.HasPrefix(key, "peer_") && !hasPeer:
				want = "none: bench transfer had no peer"
			}
			if !strings.HasPrefix(h.Sources[key], want) {
				t.Errorf("%s: the source of %s is %q, want %q", c.name, key, h.Sources[key], want)
			}
		}
		if len(h.Sources) != len(planner.HardwareFields()) {
			t.Errorf("%s: %d sources", c.name, len(h.Sources))
		}
	}
}

func TestTransferOutput(t *testing.T) {
	machine := eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}}
	r := &eval.TransferResult{Machine: machine, Points: transferOn(t, 2)}
	var table, list, svg, picture bytes.Buffer
	if err := eval.WriteTransferTable(&table, r); err != nil || !strings.Contains(table.String(), "16.5 MiB") || !strings.Contains(table.String(), "host and peer to gpu µs") {
		t.Errorf("%v\n%s", err, &table)
	}
	if err := eval.WriteTransferCSV(&list, r); err != nil || strings.Count(list.String(), "\n") != 1+len(r.Points) {
		t.Errorf("%v\n%s", err, &list)
	}
	if err := eval.PlotTransfer(&svg, "svg", r); err != nil {
		t.Fatal(err)
	}
	text := svgText(t, svg.Bytes())
	for _, want := range []string{"to and from the GPU", "emulated", "Mixtral-8x7B, 336 MiB: 7.1×", "size of the copy (MiB)", "time of a single copy (µs)", eval.HostPath, eval.PeerPath, eval.BothPath} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	if err := eval.PlotTransfer(&picture, "png", r); err != nil {
		t.Fatal(err)
	}
	inked(t, picture.Bytes())
}
