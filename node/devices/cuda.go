//go:build cuda

package devices

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/cuda/nvml"
	"github.com/moeserve/moeserve/kernels"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/node/sizing"
)

// openCUDA opens GPUs, by the driver's indices, and a backend for the first of them, with
// activations of the weights' type if that has 16 bits.
func openCUDA(o *Options, gpus []int) (device.Machine, kernels.Backend, error) {
	m, err := o.Share.open(func() (device.Machine, error) {
		return cuda.Open(cuda.Options{GPUs: gpus, HostBytes: int64(o.Settings.HostMemoryGiB * (1 << 30)), Log: o.Log})
	})
	if err != nil {
		if mig := partitioned(); mig != "" {
			err = fmt.Errorf("%w; %s", err, mig)
		}
		if errors.Is(err, cuda.ErrUnavailable) {
			err = fmt.Errorf("%w: %w", errNoCUDA, err)
		}
		return nil, nil, err
	}
	options := kernelscuda.Options{BatchInvariant: o.Kernels.BatchInvariant, Serial: !o.Kernels.Overlap}
	if o.Weights == kernels.F16 {
		options.Activation = kernels.F16
	}
	b, err := kernelscuda.New(m, device.HBM(0), options)
	if err != nil {
		return nil, nil, errors.Join(err, o.Share.close(m))
	}
	return m, b, nil
}

// partitioned names the GPUs that are divided by MIG, as the end of an error about GPUs that
// cannot be used; empty where none is.
func partitioned() string {
	r, err := nvml.Open()
	if err != nil {
		return ""
	}
	defer r.Close() //nolint:errcheck // only read from
	devices, err := r.Devices()
	if err != nil {
		return ""
	}
	var all []partition
	for _, d := range devices {
		if m, err := d.MIG(); err == nil && m.Enabled {
			all = append(all, partition{d.UUID, len(m.Instances)})
		}
	}
	return describePartitions(all)
}

// GPUs describes the machine's GPUs as NVML reports them, one line each; without GPUs, note is
// the reason.
func GPUs() (gpus []string, note string) {
	r, err := nvml.Open()
	if err != nil {
		return nil, err.Error()
	}
	defer r.Close() //nolint:errcheck // only read from
	devices, err := r.Devices()
	if err != nil {
		return nil, err.Error()
	}
	for _, d := range devices {
		gpus = append(gpus, describe(r, d))
	}
	if len(gpus) == 0 {
		note = "NVML finds none"
	}
	return gpus, note
}

// DriverVersion is that of the GPUs' driver; empty where there is none.
func DriverVersion() string {
	r, err := nvml.Open()
	if err != nil {
		return ""
	}
	defer r.Close() //nolint:errcheck // only read from
	return r.DriverVersion()
}

func describe(r *nvml.Reader, d nvml.Device) string {
	s := fmt.Sprintf("%s, %s, driver %s", d.Name, d.Bus, r.DriverVersion())
	reading, err := d.Read()
	if err != nil {
		return s + ": " + err.Error()
	}
	s += fmt.Sprintf(", %s of %s used", sizing.Bytes(reading.Memory.Used), sizing.Bytes(reading.Memory.Total))
	if reading.ComputeLoad != nil {
		s += fmt.Sprintf(", %d %% busy", *reading.ComputeLoad)
	}
	links := d.Links()
	s += fmt.Sprintf(", PCIe %d x%d, %d NVLinks", links.PCIeGeneration, links.PCIeWidth, len(links.NVLinks))
	if mig, err := d.MIG(); err == nil && mig.Enabled {
		s += fmt.Sprintf(", MIG with %d instances", len(mig.Instances))
	}
	if problem := reading.Health.Problem(); problem != "" {
		s += ", " + problem
	}
	return s
}
