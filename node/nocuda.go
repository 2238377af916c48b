//go:build !cuda

package node

import (
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
)

func openCUDA(o *Options, _ []int, _ kernels.DType) (device.Machine, kernels.Backend, error) {
	or := ""
	if o.Settings.Device.Kind == configs.CUDA {
		or = ", or leave out --device cuda"
	}
	return nil, nil, fmt.Errorf("%w: this binary was built without CUDA; build it with make, where gcc and a cuda.h are%s", errNoCUDA, or)
}

// GPUs describes the machine's GPUs, a line each; note says why there are none.
func GPUs() (gpus []string, note string) { return nil, "this build has no CUDA in it" }

// openMonitor leaves the watching of peers to harvest.
func (*Node) openMonitor() (harvest.Monitor, error) { return nil, nil }
