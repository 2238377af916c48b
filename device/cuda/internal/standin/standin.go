//go:build cuda

package standin

/*
#include <stddef.h>
#include <stdlib.h>
static void call_fail(void *f, const char *call, int code, int skip) { ((void (*)(const char *, int, int))f)(call, code, skip); }
static void call_alive(void *f, char *out, size_t n) { ((void (*)(char *, size_t))f)(out, n); }
*/
import "C"

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"unsafe"

	"github.com/moeserve/moeserve/device/cuda/internal/driver"
)

//go:embed testdata/standin.c
var source []byte

// Build compiles the library into dir with gcc and returns its path.
func Build(dir string) (string, error) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return "", fmt.Errorf("standin: %w", err)
	}
	file, library := filepath.Join(dir, "standin.c"), filepath.Join(dir, "libcuda.so.1")
	if err := os.WriteFile(file, source, 0o644); err != nil {
		return "", fmt.Errorf("standin: %w", err)
	}
	out, err := exec.Command(gcc, "-O1", "-g", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-o", library, file).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("standin: gcc: %w: %s", err, out)
	}
	return library, nil
}

// Fail lets a driver call fail with a result, once, after skip calls of it that
// still succeed. The stand-in must be loaded.
func Fail(call string, code, skip int) {
	name := C.CString(call)
	defer C.free(unsafe.Pointer(name))
	C.call_fail(driver.Symbol("standin_fail"), name, C.int(code), C.int(skip))
}

// Alive lists what was made and not freed; empty if nothing is left.
func Alive() string {
	var buf [256]C.char
	C.call_alive(driver.Symbol("standin_alive"), &buf[0], C.size_t(len(buf)))
	return C.GoString(&buf[0])
}
