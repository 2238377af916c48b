//go:build cuda

package driver_test

import (
	"strings"
	"testing"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device/cuda/internal/driver"
	"github.com/moeserve/moeserve/device/cuda/internal/standin"
)

// TestLoad walks through a process's life with a driver: none, none that fits, one,
// and no second.
func TestLoad(t *testing.T) {
	if _, err := cu.NumDevices(); err == nil || err.Error() != "NotInitialized" {
		t.Errorf("before any driver is loaded: %v", err)
	}
	if err := driver.Init(); err == nil {
		t.Error("a driver that is not loaded starts")
	}
	if p := driver.Symbol("cuInit"); p != nil {
		t.Error("a driver that is not loaded has symbols")
	}
	for path, want := range map[string]string{"/none/libcuda.so.1": "/none/libcuda.so.1", "libm.so.6": "no cuInit"} {
		if _, err := driver.Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Load(%q): %v", path, err)
		}
	}
	path, err := standin.Build(t.TempDir())
	if err != nil {
		t.Skip(err)
	}
	for _, p := range []string{path, path, ""} {
		if got, err := driver.Load(p); err != nil || got != path {
			t.Errorf("Load(%q): %q, %v", p, got, err)
		}
	}
	if _, err := driver.Load("libm.so.6"); err == nil || !strings.Contains(err.Error(), "loaded already") {
		t.Errorf("a second driver: %v", err)
	}
	if err := driver.Init(); err != nil {
		t.Error(err)
	}
	if n, err := cu.NumDevices(); err != nil || n != 2 {
		t.Errorf("%d devices, %v", n, err)
	}
	missing := driver.Missing()
	found := func(name string) bool { return strings.Contains(" "+strings.Join(missing, " ")+" ", " "+name+" ") }
	if !found("cuTexRefSetArray") || found("cuStreamWaitValue32_v2") || found("cuEventElapsedTime_v2") {
		t.Errorf("calls that the stand-in lacks: %v", missing)
	}
	if _, err := cu.MemAllocManaged(1, 0); err == nil || err.Error() != "NotFound" {
		t.Errorf("a call that the driver lacks: %v", err)
	}
}

func TestInitErrors(t *testing.T) {
	for code, want := range map[int]string{100: "CUDA_VISIBLE_DEVICES", 803: "restart", 5: "(5)"} {
		if got := driver.InitError(code).Error(); !strings.Contains(got, want) || strings.Contains(got, "\n") {
			t.Errorf("%d: %q, want %q in one line", code, got, want)
		}
	}
}
