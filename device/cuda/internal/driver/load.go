//go:build cuda

package driver

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "load.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"
)

// InitError is a failed cuInit, as the driver's CUresult.
type InitError int

func (e InitError) Error() string {
	why, ok := map[InitError]string{
		3:   "CUDA_ERROR_NOT_INITIALIZED",
		34:  "CUDA_ERROR_STUB_LIBRARY: this libcuda.so is a toolkit's stub",
		100: "CUDA_ERROR_NO_DEVICE: there is no GPU, or CUDA_VISIBLE_DEVICES hides it",
		803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: the library and the kernel module are of different versions; restart after the driver's update",
		804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: the forward-compatibility library does not fit this GPU",
		999: "CUDA_ERROR_UNKNOWN: the kernel module may be missing, or the device files may not be readable",
	}[e]
	if !ok {
		why = "an error of the driver"
	}
	return fmt.Sprintf("cuInit: %s (%d)", why, int(e))
}

// places hold drivers that the dynamic linker may not know of.
var places = []string{
	"libcuda.so.1",
	"/usr/local/nvidia/lib64/libcuda.so.1", // Kubernetes nodes of several clouds
	"/usr/lib/wsl/lib/libcuda.so.1",        // Windows Subsystem for Linux
	"/run/opengl-driver/lib/libcuda.so.1",  // NixOS
	"/usr/lib64/nvidia/libcuda.so.1",       // older packages of Red Hat's family
}

var open struct {
	sync.Mutex
	path string
}

// Load opens the driver and fills the table; it runs none of the driver's
// functions. An empty path tries the known places. A process has one driver:
// loading it again is free, loading another is an error.
func Load(path string) (string, error) {
	open.Lock()
	defer open.Unlock()
	if open.path != "" {
		if path == "" || path == open.path {
			return open.path, nil
		}
		return "", fmt.Errorf("driver: %s is loaded already, %s cannot be", open.path, path)
	}
	try := places
	if path != "" {
		try = []string{path}
	}
	var first error
	for _, p := range try {
		var why [512]C.char
		cp := C.CString(p)
		rc := C.driver_open(cp, &why[0], C.size_t(len(why)))
		C.free(unsafe.Pointer(cp))
		if rc == 0 {
			open.path = p
			return p, nil
		}
		if first == nil {
			first = errors.New(C.GoString(&why[0]))
		}
	}
	return "", fmt.Errorf("driver: %w", first)
}

// Init runs the driver's cuInit, which takes up to a second on a machine with many
// GPUs. Its error is an InitError.
func Init() error {
	if rc := C.driver_init(); rc != 0 {
		return InitError(rc)
	}
	return nil
}

// Missing lists the calls of the table that the loaded driver lacks.
func Missing() []string {
	buf := make([]byte, 1<<14)
	C.driver_missing((*C.char)(unsafe.Pointer(&buf[0])), C.size_t(len(buf)))
	s, _, _ := strings.Cut(string(buf), "\x00")
	return strings.Fields(s)
}

// Symbol returns the address of an exported symbol of the loaded driver, or nil.
func Symbol(name string) unsafe.Pointer {
	cn := C.CString(name)
	defer C.free(unsafe.Pointer(cn))
	return C.driver_symbol(cn)
}
