package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// Options of a Backend.
type Options struct {
	// Activation is the type of activations and of the KV cache, kernels.BF16 or kernels.F16;
	// that of the weights is fastest. Default: BF16.
	Activation kernels.DType
	// BatchInvariant disables cuBLASLt, so that no token's result depends on the other tokens
	// of the batch. Default: off.
	BatchInvariant bool
	// Streams is the maximum number of streams that use the backend, except those on which only
	// blocks are copied; each has a workspace. Default: 1.
	Streams int
	// WorkspaceBytes is the size of one stream's workspace: for cuBLASLt, for split attention
	// over long sequences, for sampling from large vocabularies. A smaller one only costs
	// speed. Default: 64 MiB, which has room for the partial results of decode attention over a
	// million tokens with 32 heads.
	WorkspaceBytes int64
	// CacheDir is the directory of compiled kernels. Default: moeserve/cubin in the user's
	// cache directory.
	CacheDir string
	// Serial disables programmatic dependent launch, by which (from compute capability 9.0 on)
	// a kernel may start before the preceding one has ended. Results are the same. Default:
	// off.
	Serial bool
	// Architecture is the target of compilation, as NVRTC names it: "sm_90a", or "compute_80"
	// for PTX that the driver compiles for a later device. Default: exactly the device's.
	Architecture string
}

// EnsureDefaults sets unset options to their defaults.
func (o Options) EnsureDefaults() Options {
	if o.Activation == kernels.Invalid {
		o.Activation = kernels.BF16
	}
	if o.Streams <= 0 {
		o.Streams = 1
	}
	if o.WorkspaceBytes <= 0 {
		o.WorkspaceBytes = 64 << 20
	}
	return o
}

// Validate returns an error for the first invalid option.
func (o Options) Validate() error {
	if o.Activation != kernels.BF16 && o.Activation != kernels.F16 {
		return fmt.Errorf("cuda: Options.Activation is %v, want %v or %v", o.Activation, kernels.BF16, kernels.F16)
	}
	return nil
}
