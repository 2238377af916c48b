// Package nvml reads the state of NVIDIA GPUs: memory, load, health (ECC, remapped
// rows, Xid errors), what connects them, and how they are partitioned (MIG). It
// stands on github.com/NVIDIA/go-nvml, needs the build tag cuda, and opens the
// library when Open is called.
//
// It is not the place for policy: package harvest decides what a reading means. It
// changes nothing on a device.
//
// What a device or driver does not tell is marked as unknown (a nil pointer), never
// as 0.
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
