//go:build cuda

package devices

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/nvml"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// told is what NVML says of a GPU.
type told struct {
	reading nvml.Reading
	err     error
}

func (t *told) Read() (nvml.Reading, error) { return t.reading, t.err }

// Memory and loss are the machine's word; load and health NVML's, where it has them.
func TestGPUMonitor(t *testing.T) {
	m, err := emulated.New(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close() //nolint:errcheck // nothing was taken
	machine, err := harvest.NewMachineMonitor(m, []device.Space{device.HBM(1), device.HBM(2)})
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close() //nolint:errcheck // streams only
	number, many := func(n int) *int { return &n }, int64(3)
	gpu := &told{reading: nvml.Reading{ComputeLoad: number(70), MemoryLoad: number(20)}}
	w := &monitor{
		MachineMonitor: machine, log: slog.New(slog.DiscardHandler),
		gpus:  map[device.Space]interface{ Read() (nvml.Reading, error) }{device.HBM(1): gpu},
		loads: map[device.Space]load{},
	}
	read := func(s device.Space) harvest.Reading {
		t.Helper()
		w.sample()
		r, err := w.Read(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := read(device.HBM(1)); r.Utilization != 0.7 || r.Bandwidth != 0.2 || r.Health != nil || r.Free != 64<<30 {
		t.Errorf("%+v", r)
	}
	if r := read(device.HBM(2)); r.Utilization != 0 || r.Bandwidth != 0 || r.Health != nil || r.Free != 64<<30 {
		t.Errorf("one that NVML does not know: %+v", r)
	}
	gpu.reading = nvml.Reading{}
	if r := read(device.HBM(1)); r.Utilization != 0 || r.Bandwidth != 0 || r.Health != nil {
		t.Errorf("one that tells nothing: %+v", r)
	}
	gpu.reading.Health.UncorrectedECC = &many
	if r := read(device.HBM(1)); r.Health == nil || !strings.Contains(r.Health.Error(), "3 uncorrected memory errors") {
		t.Errorf("a sick one: %+v", r)
	}
	gpu.reading = nvml.Reading{}
	read(device.HBM(1))
	gpu.err = errors.New("no answer")
	w.fault(nvml.XID{UUID: "x", Code: 31})
	if r := read(device.HBM(1)); r.Health != nil {
		t.Errorf("one without an answer, which may be a moment's: %+v", r)
	}
	w.fault(nvml.XID{UUID: "unknown", Code: fellOff})
	if r := read(device.HBM(1)); !errors.Is(r.Health, gpu.err) || !strings.Contains(r.Health.Error(), "fell off the bus") {
		t.Errorf("one that is gone: %+v", r)
	}
	if r := read(device.HBM(2)); r.Health != nil {
		t.Errorf("the other: %+v", r)
	}
	if err := m.Lose(2); err != nil {
		t.Fatal(err)
	}
	w.sample()
	if r, err := w.Read(device.HBM(2)); !errors.Is(err, device.ErrLost) {
		t.Errorf("one that the machine has lost: %+v, %v", r, err)
	}
}
