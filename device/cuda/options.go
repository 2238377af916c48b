//go:build cuda

package cuda

import (
	"log/slog"
	"runtime"
)

// Options say what Open opens.
type Options struct {
	// GPUs are the driver's numbers of the devices, as CUDA_VISIBLE_DEVICES leaves
	// them; the machine numbers them by their place in this list. Default: the first
	// alone.
	GPUs []int
	// Driver is the path of the driver's library. Default: where drivers lie.
	Driver string
	// HostBytes is how much memory the host has in all. Default: what the system says
	// it has now; to be set where a virtual machine is given memory only as it uses it.
	HostBytes int64
	// TouchThreads bring in the pages of new host memory. Default: the number of
	// processors, at most 16.
	TouchThreads int
	// Log is told what a user may want to know and nobody needs to act on.
	// Default: nobody.
	Log *slog.Logger
}

// EnsureDefaults fills in what is not given.
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
