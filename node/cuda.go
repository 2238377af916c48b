//go:build cuda

package node

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/kernels"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
)

// openCUDA opens the GPU that the settings name and a backend for it, with
// activations of the weights' type where that has 16 bit.
func openCUDA(o *Options, weights kernels.DType) (device.Machine, kernels.Backend, error) {
	s := &o.Settings
	m, err := cuda.Open(cuda.Options{GPUs: []int{s.GPU}, HostBytes: int64(s.HostMemoryGiB * (1 << 30)), Logger: o.Log})
	if err != nil {
		if errors.Is(err, cuda.ErrUnavailable) {
			err = fmt.Errorf("%w: %w", errNoCUDA, err)
		}
		return nil, nil, err
	}
	options := kernelscuda.Options{BatchInvariant: s.BatchInvariant}
	if weights == kernels.F16 {
		options.Activation = kernels.F16
	}
	b, err := kernelscuda.New(m, device.HBM(0), options)
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return m, b, nil
}
