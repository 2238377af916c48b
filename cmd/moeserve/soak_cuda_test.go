//go:build cuda

package main

import (
	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/kernels"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/node"
)

// On GPUs a soak serves Qwen1.5-MoE with seeded random weights, a tenth of its experts and KV blocks on
// the second GPU. Its kernels are batch-invariant, so that an answer under load is the one alone.
func init() {
	soakDevices["cuda"] = func(set *settings, o *node.Options, opened func(device.Machine)) kvBlocks {
		set.Model.Name, set.Model.LoadFormat = "qwen1.5-moe-a2.7b", configs.LoadDummy
		set.Batch.MaxNumSeqs, set.KV.MaxModelLen, set.KV.NumGPUBlocksOverride = 48, 1024, 120
		set.Offload.Fraction = 0.1
		set.Device.Peers, set.Offload.Tier, set.Harvest.Headroom = "1", configs.AnyTier, "2GiB"
		var m *cuda.Machine
		o.OpenMachine = func() (_ device.Machine, err error) {
			if m, err = cuda.New(cuda.Options{GPUs: []int{0, 1}}); err == nil {
				opened(m)
			}
			return m, err
		}
		o.OpenBackend = func(device.Machine) (kernels.Backend, error) {
			return kernelscuda.New(m, device.HBM(0), kernelscuda.Options{BatchInvariant: true})
		}
		return kvBlocks{peer: 300, host: 300, file: 600}
	}
}
