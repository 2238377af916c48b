package node_test

import (
	"encoding/json"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/planner"
)

// A calibration by which a kernel copies KV blocks, and its absence, change no token; the kernel
// copies only with a calibration, and only blocks of KV tiers.
func TestCopyKernel(t *testing.T) {
	h, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	h.HostLoadKernelBelow, h.HostStoreKernelBelow, h.PeerLoadKernelBelow, h.PeerLoadKernelBlocks = 1<<30, 1<<30, 1<<30, 4
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	calibrated := t.TempDir() + "/here.json"
	if err := os.WriteFile(calibrated, data, 0o600); err != nil {
		t.Fatal(err)
	}
	const onHost, onPeers = `{"kv_connector_extra_config": {"num_cpu_blocks": 40}}`, `{"kv_connector_extra_config": {"num_gpu_blocks": 40}}`
	want, _ := kernelRun(t, "", "")
	for _, c := range []struct {
		tiers, hardware string
		launched        bool
	}{
		{"", calibrated, false}, {onHost, "", false}, {onHost, "h200", false}, {onHost, calibrated, true}, {onPeers, calibrated, true},
	} {
		got, launches := kernelRun(t, c.tiers, c.hardware)
		if strings.Join(got, "|") != strings.Join(want, "|") {
			t.Errorf("tiers %q, hardware %q: %q, want %q", c.tiers, c.hardware, got, want)
		}
		if (launches > 0) != c.launched {
			t.Errorf("tiers %q, hardware %q: %d copy kernels", c.tiers, c.hardware, launches)
		}
	}
}

// kernelRun generates with few blocks on the GPU and these tiers, and counts copy kernels.
func kernelRun(t *testing.T, tiers, hardware string) (out []string, launches int64) {
	t.Helper()
	var launched atomic.Int64
	s := configs.Defaults()
	s.KV.TransferConfig, s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride, s.Plan.Hardware = tiers, false, 14, hardware
	n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
		return emulated.New(emulated.Options{Check: true, Trace: func(o emulated.Trace) {
			if o.Op == "launch" && o.Name == "copy_blocks" {
				launched.Add(1)
			}
		}})
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	for round := range 6 {
		out = append(out, comeBack(t, n, round)...)
	}
	return out, launched.Load()
}
