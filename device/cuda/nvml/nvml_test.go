//go:build cuda

package nvml

import (
	"context"
	"errors"
	"strings"
	"testing"

	lib "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// server is the mock of a DGX A100, whose devices tell nothing beyond their names and
// memory until a test says otherwise.
func server() *dgxa100.Server {
	s := dgxa100.New()
	for _, d := range s.Devices {
		m := &d.(*dgxa100.Device).Device
		m.GetUtilizationRatesFunc = func() (lib.Utilization, lib.Return) { return lib.Utilization{}, lib.ERROR_NOT_SUPPORTED }
		m.GetTotalEccErrorsFunc = func(lib.MemoryErrorType, lib.EccCounterType) (uint64, lib.Return) { return 0, lib.ERROR_NOT_SUPPORTED }
		m.GetRemappedRowsFunc = func() (int, int, bool, bool, lib.Return) { return 0, 0, false, false, lib.ERROR_NOT_SUPPORTED }
		m.GetMemoryInfo_v2Func = func() (lib.Memory_v2, lib.Return) { return lib.Memory_v2{}, lib.ERROR_NOT_SUPPORTED }
		m.GetMaxPcieLinkGenerationFunc = func() (int, lib.Return) { return 0, lib.ERROR_NOT_SUPPORTED }
		m.GetMaxPcieLinkWidthFunc = func() (int, lib.Return) { return 0, lib.ERROR_NOT_SUPPORTED }
		m.GetNvLinkStateFunc = func(int) (lib.EnableState, lib.Return) { return 0, lib.ERROR_NOT_SUPPORTED }
	}
	return s
}

func first(s *dgxa100.Server) *mock.Device { return &s.Devices[0].(*dgxa100.Device).Device }

func reader(t *testing.T, s *dgxa100.Server) *Reader {
	t.Helper()
	r, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func devices(t *testing.T, r *Reader) []Device {
	t.Helper()
	all, err := r.Devices()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestDevices(t *testing.T) {
	s := server()
	first(s).GetPciInfoFunc = func() (lib.PciInfo, lib.Return) {
		return lib.PciInfo{Domain: 1, Bus: 0xab, Device: 3}, lib.SUCCESS
	}
	r := reader(t, s)
	all := devices(t, r)
	if len(all) != 8 || all[0].Bus != "0001:ab:03.0" || !strings.Contains(all[7].Name, "A100") || r.DriverVersion() == "" {
		t.Errorf("%d devices, the first %+v; driver %q", len(all), all[0], r.DriverVersion())
	}
	for _, name := range []string{all[3].UUID, strings.TrimPrefix(all[3].UUID, "GPU-")} {
		if d, err := r.Find(name); err != nil || d.UUID != all[3].UUID {
			t.Errorf("Find(%q): %v, %v", name, d.UUID, err)
		}
	}
	_, err := r.Find("GPU-none")
	var e *Error
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "GPU-none") {
		t.Errorf("a device that is not there: %v", err)
	}
}

func TestReadOfAMuteDevice(t *testing.T) {
	d := devices(t, reader(t, server()))[0]
	got, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, Reading{Memory: Memory{Total: 42949672960}}); diff != "" {
		t.Error(diff)
	}
	if p := got.Health.Problem(); p != "" {
		t.Errorf("what is unknown is a problem: %s", p)
	}
	if l := d.Links(); l.PCIeGeneration != 0 || len(l.NVLinks) != 0 {
		t.Errorf("links %+v", l)
	}
}

func TestRead(t *testing.T) {
	s := server()
	m := first(s)
	m.GetMemoryInfo_v2Func = func() (lib.Memory_v2, lib.Return) {
		return lib.Memory_v2{Total: 100, Used: 30, Free: 60, Reserved: 10}, lib.SUCCESS
	}
	m.GetUtilizationRatesFunc = func() (lib.Utilization, lib.Return) { return lib.Utilization{Gpu: 97, Memory: 41}, lib.SUCCESS }
	m.GetTotalEccErrorsFunc = func(kind lib.MemoryErrorType, over lib.EccCounterType) (uint64, lib.Return) {
		if over != lib.VOLATILE_ECC {
			return 0, lib.ERROR_INVALID_ARGUMENT
		}
		return 5 - 2*uint64(kind), lib.SUCCESS
	}
	m.GetRemappedRowsFunc = func() (int, int, bool, bool, lib.Return) { return 1, 2, true, false, lib.SUCCESS }
	got, err := devices(t, reader(t, s))[0].Read()
	if err != nil {
		t.Fatal(err)
	}
	want := Reading{
		Memory: Memory{Total: 100, Used: 30, Free: 60, Reserved: 10}, ComputeLoad: known(97), MemoryLoad: known(41),
		Health: Health{UncorrectedECC: known(int64(3)), RowRemapPending: known(true), RowRemapFailed: known(false)},
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Error(diff)
	}
	m.GetMemoryInfo_v2Func = func() (lib.Memory_v2, lib.Return) { return lib.Memory_v2{}, lib.ERROR_GPU_IS_LOST }
	m.GetMemoryInfoFunc = func() (lib.Memory, lib.Return) { return lib.Memory{}, lib.ERROR_GPU_IS_LOST }
	_, err = devices(t, reader(t, s))[0].Read()
	var e *Error
	if !errors.As(err, &e) || e.Code != int(lib.ERROR_GPU_IS_LOST) {
		t.Errorf("a lost device: %v", err)
	}
}

// TestOlderLibrary must not call what the library lacks: that would end the process.
func TestOlderLibrary(t *testing.T) {
	s := server()
	s.LookupSymbolFunc = func(name string) error {
		switch name {
		case "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkRemoteDeviceType":
			return errors.New("no such symbol")
		}
		return nil
	}
	m := first(s)
	m.GetMemoryInfo_v2Func, m.GetRemappedRowsFunc, m.GetNvLinkRemoteDeviceTypeFunc = nil, nil, nil // the mock panics
	m.GetNvLinkStateFunc = func(i int) (lib.EnableState, lib.Return) { return lib.FEATURE_ENABLED, lib.SUCCESS }
	m.GetNvLinkVersionFunc = func(int) (uint32, lib.Return) { return 3, lib.SUCCESS }
	m.GetNvLinkRemotePciInfoFunc = func(int) (lib.PciInfo, lib.Return) { return lib.PciInfo{Bus: 7}, lib.SUCCESS }
	d := devices(t, reader(t, s))[0]
	if got, err := d.Read(); err != nil || got.Memory.Total != 42949672960 {
		t.Errorf("%+v, %v", got, err)
	}
	if l := d.Links().NVLinks; len(l) != lib.NVLINK_MAX_LINKS || l[0] != (NVLink{Version: 3, Bus: "0000:07:00.0"}) {
		t.Errorf("links %+v", l)
	}
}

func TestHealthProblems(t *testing.T) {
	for want, h := range map[string]Health{
		"":                    {UncorrectedECC: known(int64(0)), RowRemapPending: known(false)},
		"2 uncorrected":       {UncorrectedECC: known(int64(2))},
		"needs a reset":       {RowRemapPending: known(true), RowRemapFailed: known(false)},
		"no spare rows":       {RowRemapPending: known(true), RowRemapFailed: known(true)},
		"1 uncorrected memor": {UncorrectedECC: known(int64(1)), RowRemapFailed: known(true)},
	} {
		if got := h.Problem(); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%+v: %q, want %q", h, got, want)
		}
	}
}

func TestLinks(t *testing.T) {
	s := server()
	m := first(s)
	m.GetMaxPcieLinkGenerationFunc = func() (int, lib.Return) { return 4, lib.SUCCESS }
	m.GetMaxPcieLinkWidthFunc = func() (int, lib.Return) { return 16, lib.SUCCESS }
	m.GetNvLinkStateFunc = func(i int) (lib.EnableState, lib.Return) {
		switch {
		case i >= 4:
			return 0, lib.ERROR_INVALID_ARGUMENT
		case i == 1:
			return lib.FEATURE_DISABLED, lib.SUCCESS
		}
		return lib.FEATURE_ENABLED, lib.SUCCESS
	}
	m.GetNvLinkVersionFunc = func(int) (uint32, lib.Return) { return 3, lib.SUCCESS }
	m.GetNvLinkRemoteDeviceTypeFunc = func(i int) (lib.IntNvLinkDeviceType, lib.Return) {
		if i == 0 {
			return lib.NVLINK_DEVICE_TYPE_SWITCH, lib.SUCCESS
		}
		return lib.NVLINK_DEVICE_TYPE_GPU, lib.SUCCESS
	}
	m.GetNvLinkRemotePciInfoFunc = func(i int) (lib.PciInfo, lib.Return) { return lib.PciInfo{Bus: uint32(i)}, lib.SUCCESS }
	got := devices(t, reader(t, s))[0].Links()
	want := Links{PCIeGeneration: 4, PCIeWidth: 16, NVLinks: []NVLink{{Version: 3, Switch: true}, {Version: 3, Bus: "0000:02:00.0"}, {Version: 3, Bus: "0000:03:00.0"}}}
	if diff := cmp.Diff(got, want, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}

func TestMIG(t *testing.T) {
	s := server()
	d := devices(t, reader(t, s))[0]
	if got, err := d.MIG(); err != nil || got.Enabled {
		t.Errorf("not partitioned: %+v, %v", got, err)
	}
	m := first(s)
	m.GetMigModeFunc = func() (int, int, lib.Return) { return 0, 0, lib.ERROR_NOT_SUPPORTED }
	if got, err := d.MIG(); err != nil || got.Enabled {
		t.Errorf("a device without MIG: %+v, %v", got, err)
	}
	m.GetMigModeFunc = func() (int, int, lib.Return) { return lib.DEVICE_MIG_ENABLE, lib.DEVICE_MIG_ENABLE, lib.SUCCESS }
	m.GetMaxMigDeviceCountFunc = func() (int, lib.Return) { return 7, lib.SUCCESS }
	m.GetMigDeviceHandleByIndexFunc = func(i int) (lib.Device, lib.Return) {
		if i%3 != 0 {
			return nil, lib.ERROR_NOT_FOUND
		}
		return &mock.Device{GetUUIDFunc: func() (string, lib.Return) { return "MIG-" + string(rune('0'+i)), lib.SUCCESS }}, lib.SUCCESS
	}
	got, err := d.MIG()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, MIG{Enabled: true, Instances: []string{"MIG-0", "MIG-3", "MIG-6"}}); diff != "" {
		t.Error(diff)
	}
	m.GetMigModeFunc = func() (int, int, lib.Return) { return 0, 0, lib.ERROR_UNKNOWN }
	if _, err := d.MIG(); err == nil {
		t.Error("a failed call counts as not partitioned")
	}
}

func TestWatchXID(t *testing.T) {
	s := server()
	r := reader(t, s)
	all := devices(t, r)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waits, freed, registered := 0, 0, 0
	set := &mock.EventSet{
		FreeFunc: func() lib.Return { freed++; return lib.SUCCESS },
		WaitFunc: func(ms uint32) (lib.EventData, lib.Return) {
			waits++
			switch waits {
			case 1:
				return lib.EventData{}, lib.ERROR_TIMEOUT
			case 2:
				return lib.EventData{Device: s.Devices[1], EventType: lib.EventTypeXidCriticalError, EventData: 79}, lib.SUCCESS
			}
			gone := &mock.Device{GetUUIDFunc: func() (string, lib.Return) { return "", lib.ERROR_GPU_IS_LOST }}
			return lib.EventData{Device: gone, EventData: 48}, lib.SUCCESS
		},
	}
	s.EventSetCreateFunc = func() (lib.EventSet, lib.Return) { return set, lib.SUCCESS }
	for _, d := range s.Devices {
		d.(*dgxa100.Device).RegisterEventsFunc = func(kinds uint64, _ lib.EventSet) lib.Return {
			if kinds == lib.EventTypeXidCriticalError {
				registered++
			}
			return lib.SUCCESS
		}
	}
	var got []XID
	err := r.WatchXID(ctx, all[:2], func(x XID) {
		if got = append(got, x); len(got) == 2 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || freed != 1 || registered != 2 {
		t.Errorf("%v; set freed %d times, %d devices registered", err, freed, registered)
	}
	if diff := cmp.Diff(got, []XID{{UUID: all[1].UUID, Code: 79}, {UUID: "unknown", Code: 48}}); diff != "" {
		t.Error(diff)
	}
	set.WaitFunc = func(uint32) (lib.EventData, lib.Return) { return lib.EventData{}, lib.ERROR_UNKNOWN }
	if err := r.WatchXID(t.Context(), all, func(XID) {}); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("a wait that fails: %v", err)
	}
}

func TestUnavailable(t *testing.T) {
	s := server()
	s.InitFunc = func() lib.Return { return lib.ERROR_LIBRARY_NOT_FOUND }
	_, err := New(s)
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("%v", err)
	}
}

// TestThisMachine reads the real thing where there is one, and is refused cleanly
// where there is none.
func TestThisMachine(t *testing.T) {
	r, err := Open()
	if err != nil {
		if !errors.Is(err, ErrUnavailable) || strings.Contains(err.Error(), "\n") {
			t.Fatalf("no NVML, and not in one clear line: %v", err)
		}
		t.Skip(err)
	}
	defer r.Close()
	all := devices(t, r)
	t.Logf("driver %s, %d devices", r.DriverVersion(), len(all))
	for _, d := range all {
		got, err := d.Read()
		if err != nil {
			t.Fatal(err)
		}
		mig, err := d.MIG()
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s %s %s: %+v; problem %q; links %+v; MIG %+v", d.Bus, d.UUID, d.Name, got.Memory, got.Health.Problem(), d.Links(), mig)
		if got.Memory.Total <= 0 || got.Memory.Used < 0 || got.Memory.Used+got.Memory.Free+got.Memory.Reserved > got.Memory.Total+1<<20 {
			t.Errorf("memory %+v does not add up", got.Memory)
		}
	}
}
