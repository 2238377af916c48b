// Package nvml reads the state of NVIDIA GPUs: memory, load, health (ECC, remapped
// rows, Xid errors), their links, and their partitioning (MIG). It is built on
// github.com/NVIDIA/go-nvml and needs the build tag cuda; Open loads the library.
//
// The package contains no policy: package harvest interprets the readings. It changes
// nothing on a device.
//
// A value that the device or driver does not report is unknown (a nil pointer), never 0.
// ---
//
// # Example
//
//	r, err := nvml.Open()
//	if err != nil {
//		return err // wraps ErrUnavailable where there is no NVML
//	}
//	defer r.Close()
//	for _, d := range devices {
//		state, err := d.Read()
//	}
package nvml
