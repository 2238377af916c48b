//go:build !cuda

package devices

import (
	"fmt"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
)

func openCUDA(o *Options, _ []int) (device.Machine, kernels.Backend, error) {
	or := ""
	if o.Settings.Kind == configs.CUDA {
		or = "; or leave out --device cuda"
	}
	return nil, nil, fmt.Errorf("%w: this binary was built without CUDA; build it with make, which needs gcc and cuda.h%s", errNoCUDA, or)
}

// GPUs describes the machine's GPUs, one line each; without GPUs, note is the reason.
func GPUs() (gpus []string, note string) { return nil, "this binary was built without CUDA" }

// DriverVersion returns the version of the GPU driver; empty without GPUs.
func DriverVersion() string { return "" }

// OpenMonitor returns nil: harvest uses its own monitor.
func (*Devices) OpenMonitor([]device.Space, func(device.Space) time.Duration) (harvest.Monitor, error) {
	return nil, nil
}

// partitioned names the GPUs that are divided by MIG: without CUDA none.
func partitioned() string { return "" }
