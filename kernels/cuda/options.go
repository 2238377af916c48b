package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// Options of a Backend.
type Options struct {
	// Activation is the type of activations and of the KV cache: kernels.BF16 or
	// kernels.F16, best that of the weights. Default: BF16.
	Activation kernels.DType
	// BatchInvariant keeps all products away from cuBLASLt, so that no row's result
	// depends on other rows. Default: off.
	BatchInvariant bool
	// Streams is how many streams may use the backend; each has a workspace.
	// Default: 1.
	Streams int
	// WorkspaceBytes is the size of one stream's workspace: for cuBLASLt, for the
	// chunks of long sequences in small batches, for draws from large vocabularies.
	// Less costs speed only. Default: 32 MiB.
	WorkspaceBytes int64
	// CacheDir keeps compiled kernels. Default: moeserve/cubin in the user's cache
	// directory.
	CacheDir string
	// Serial keeps kernels from starting before the one in front has ended, which they
	// do from compute capability 9.0 on where both are of this backend; results are the
	// same. Default: off.
	Serial bool
	// Architecture is what kernels are compiled for, as NVRTC names it: "sm_90a", or
	// "compute_80" for code that the driver translates for a later device. Default:
	// exactly the device's.
	Architecture string
}

// EnsureDefaults fills in what is not given.
func (o Options) EnsureDefaults() Options {
	if o.Activation == kernels.Invalid {
		o.Activation = kernels.BF16
	}
	if o.Streams <= 0 {
		o.Streams = 1
	}
	if o.WorkspaceBytes <= 0 {
		o.WorkspaceBytes = 32 << 20
	}
	return o
}

// Validate says which option cannot be.
func (o Options) Validate() error {
	if o.Activation != kernels.BF16 && o.Activation != kernels.F16 {
		return fmt.Errorf("cuda: Options.Activation is %v, want %v or %v", o.Activation, kernels.BF16, kernels.F16)
	}
	return nil
}
