//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/moeserve/moeserve/device"
)

// ErrUnavailable reports that CUDA cannot be used on this machine: there is no driver or
// GPU, or it is too old. The error that wraps it states the cause and the remedy.
var ErrUnavailable = errors.New("CUDA is not available")

// Driver results that this package handles specially.
const (
	success        = C.CUDA_SUCCESS
	outOfMemory    = C.CUDA_ERROR_OUT_OF_MEMORY
	notReady       = C.CUDA_ERROR_NOT_READY
	notSupported   = C.CUDA_ERROR_NOT_SUPPORTED
	alreadyEnabled = C.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
	tooManyPeers   = C.CUDA_ERROR_TOO_MANY_PEERS
	deviceInUse    = C.CUDA_ERROR_DEVICE_UNAVAILABLE
	deinitialized  = C.CUDA_ERROR_DEINITIALIZED
	contextIsGone  = C.CUDA_ERROR_CONTEXT_IS_DESTROYED
)

// endsDevice holds the results after which every call on the context fails.
var endsDevice = map[int]bool{
	deinitialized:                       true,
	contextIsGone:                       true,
	C.CUDA_ERROR_ECC_UNCORRECTABLE:      true,
	C.CUDA_ERROR_NVLINK_UNCORRECTABLE:   true,
	C.CUDA_ERROR_ILLEGAL_ADDRESS:        true,
	C.CUDA_ERROR_LAUNCH_TIMEOUT:         true,
	C.CUDA_ERROR_ASSERT:                 true,
	C.CUDA_ERROR_HARDWARE_STACK_ERROR:   true,
	C.CUDA_ERROR_ILLEGAL_INSTRUCTION:    true,
	C.CUDA_ERROR_MISALIGNED_ADDRESS:     true,
	C.CUDA_ERROR_INVALID_ADDRESS_SPACE:  true,
	C.CUDA_ERROR_INVALID_PC:             true,
	C.CUDA_ERROR_LAUNCH_FAILED:          true,
	C.CUDA_ERROR_EXTERNAL_DEVICE:        true,
	C.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: true,
	C.CUDA_ERROR_UNKNOWN:                true,
	226:                                 true, // CUDA_ERROR_CONTAINED; older headers do not have it
	721:                                 true, // CUDA_ERROR_TENSOR_MEMORY_LEAK, the same
	810:                                 true, // CUDA_ERROR_MPS_CLIENT_TERMINATED, the same
}

// cuResult is the error of a direct driver call in functions that also return errors of
// package cu.
type cuResult int

func (r cuResult) Error() string { return errorName(int(r)) }

// code returns the driver's result in an error of package cu, whose errors are integers
// of an unexported type; 0 if err is nil.
func code(err error) int {
	if err == nil {
		return success
	}
	if v := reflect.ValueOf(err); v.Kind() == reflect.Int {
		return int(v.Int())
	}
	return int(C.CUDA_ERROR_UNKNOWN)
}

// errorName returns the driver's name of a result.
func errorName(c int) string {
	if name := C.ms_error_name(C.CUresult(c)); name != nil {
		return C.GoString(name)
	}
	return "CUDA error"
}

// failure returns the typed error of a driver call that returned c on a device that is
// not lost.
// ---
func failure(op string, space device.Space, c int, detail string) *device.Error {
	e := &device.Error{Op: op, Space: space, Code: c, Name: errorName(c), Detail: detail}
	switch {
	case c == outOfMemory:
		e.Err = device.ErrOutOfMemory
	case endsDevice[c]:
		e.Err = device.ErrLost
	case op == "copy":
		e.Err = device.ErrCopyFailed
	}
	return e
}

func unavailable(format string, args ...any) error {
	return &device.Error{Op: "open", Space: device.Host, Detail: fmt.Sprintf(format, args...), Err: ErrUnavailable}
}

func closedError(op string, space device.Space, what string) error {
	return &device.Error{Op: op, Space: space, Detail: what, Err: device.ErrClosed}
}

func badArgument(op string, space device.Space, format string, args ...any) error {
	return &device.Error{Op: op, Space: space, Detail: fmt.Sprintf(format, args...)}
}
