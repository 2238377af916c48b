//go:build cuda

package cuda

import (
	"log/slog"
	"runtime"
)

// Options configure Open.
type Options struct {
	// GPUs are the driver's device ordinals, after CUDA_VISIBLE_DEVICES; the machine
	// numbers the devices by their position in this list. Default: ordinal 0 only.
	GPUs []int
	// Driver is the path of the driver library. Default: the known locations.
	Driver string
	// HostBytes is the host's total memory. Default: the total that the system reports
	// at Open; set it on virtual machines that receive memory only as they use it.
	HostBytes int64
	// TouchThreads is the number of threads that page in new host memory. Default: the
	// number of processors, at most 16.
	TouchThreads int
	// Log receives informational messages that require no action. Default: discarded.
	Log *slog.Logger
}

// EnsureDefaults returns o with unset fields set to their defaults.
// ---
func (o Options) EnsureDefaults() Options {
	if len(o.GPUs) == 0 {
		o.GPUs = []int{0}
	}
	if o.TouchThreads <= 0 {
		o.TouchThreads = min(runtime.NumCPU(), 16)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}
