//go:build cuda

package nvrtc

/*
#include <stdlib.h>

typedef struct {
  int (*version)(int *major, int *minor);
  int (*create)(void **program, const char *source, const char *name, int headers, const char *const *text, const char *const *names);
  int (*compile)(void *program, int n, const char *const *options);
  int (*destroy)(void **program);
  const char *(*error)(int result);
  int (*cubin_size)(void *program, size_t *n);
  int (*cubin)(void *program, char *out);
  int (*ptx_size)(void *program, size_t *n);
  int (*ptx)(void *program, char *out);
  int (*log_size)(void *program, size_t *n);
  int (*log)(void *program, char *out);
} nvrtc_calls;

static int rtc_version(nvrtc_calls *c, int *major, int *minor) { return c->version(major, minor); }
static int rtc_create(nvrtc_calls *c, void **p, char *source, char *name, int n, char **text, char **names) {
  return c->create(p, source, name, n, (const char *const *)text, (const char *const *)names);
}
static int rtc_compile(nvrtc_calls *c, void *p, int n, char **options) { return c->compile(p, n, (const char *const *)options); }
static int rtc_destroy(nvrtc_calls *c, void **p) { return c->destroy(p); }
static const char *rtc_error(nvrtc_calls *c, int r) { return c->error(r); }
static int rtc_cubin_size(nvrtc_calls *c, void *p, size_t *n) { return c->cubin_size(p, n); }
static int rtc_cubin(nvrtc_calls *c, void *p, void *out) { return c->cubin(p, out); }
static int rtc_ptx_size(nvrtc_calls *c, void *p, size_t *n) { return c->ptx_size(p, n); }
static int rtc_ptx(nvrtc_calls *c, void *p, void *out) { return c->ptx(p, out); }
static int rtc_log_size(nvrtc_calls *c, void *p, size_t *n) { return c->log_size(p, n); }
static int rtc_log(nvrtc_calls *c, void *p, void *out) { return c->log(p, out); }
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/moeserve/moeserve/device/cuda/dylib"
)

// ErrUnavailable reports that no NVRTC was found that is compatible with the driver.
var ErrUnavailable = errors.New("NVRTC is not available")

// Error is a failed compilation, with the compiler's full output.
type Error struct {
	Source, Arch string
	// Log has a line for each message, with the source's name and line number.
	Log string
	// Result is NVRTC's name of the result code.
	Result string
}

func (e *Error) Error() string {
	return fmt.Sprintf("nvrtc: compile %s for %s: %s\n%s", e.Source, e.Arch, e.Result, e.Log)
}

// Compiler is an open libnvrtc. Its methods may be called from several goroutines.
type Compiler struct {
	// Path of the library.
	Path         string
	Major, Minor int
	calls        *C.nvrtc_calls
}

// Open opens the newest libnvrtc of the folders (see dylib.Folders) whose major
// version is at most that of the driver's CUDA version. Its error wraps ErrUnavailable
// and states what to install.
func Open(folders []string, driverMajor int) (*Compiler, error) {
	l, err := dylib.Open(dylib.Names("libnvrtc.so", driverMajor), folders)
	if err != nil {
		return nil, fmt.Errorf("nvrtc: %w: install NVRTC of CUDA %d or 12, from a toolkit or by pip install nvidia-cuda-nvrtc-cu12: %w", ErrUnavailable, driverMajor, err)
	}
	openBuiltins(l.Path)
	c := &Compiler{Path: l.Path, calls: (*C.nvrtc_calls)(C.calloc(1, C.sizeof_nvrtc_calls))}
	if c.calls == nil {
		return nil, fmt.Errorf("nvrtc: out of memory for the function table")
	}
	table := unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(c.calls)), int(C.sizeof_nvrtc_calls)/int(unsafe.Sizeof(uintptr(0))))
	for i, name := range []string{
		"nvrtcVersion", "nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram", "nvrtcGetErrorString",
		"nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcGetPTXSize", "nvrtcGetPTX", "nvrtcGetProgramLogSize", "nvrtcGetProgramLog",
	} {
		if table[i], err = l.Symbol(name); err != nil {
			C.free(unsafe.Pointer(c.calls))
			return nil, fmt.Errorf("nvrtc: %w: %w", ErrUnavailable, err)
		}
	}
	var major, minor C.int
	if r := C.rtc_version(c.calls, &major, &minor); r != 0 {
		return nil, c.fail("version", r)
	}
	c.Major, c.Minor = int(major), int(minor)
	return c, nil
}

// openBuiltins opens the libnvrtc-builtins beside the library at path. NVRTC opens it by
// name at the first compilation, and the dynamic linker does not search every folder that
// an NVRTC may come from, but finds a library that is already open. If it cannot be opened
// here, NVRTC tries itself and reports the error.
func openBuiltins(path string) {
	major := path[strings.LastIndexByte(path, '.')+1:]
	if real, err := filepath.EvalSymlinks(path); err == nil {
		// The file of a toolkit is libnvrtc.so.12.9.86, behind a link.
		path = real
	}
	found, err := filepath.Glob(filepath.Join(filepath.Dir(path), "libnvrtc-builtins.so."+major+".*"))
	if err != nil {
		return
	}
	for _, file := range found {
		if _, err := dylib.Open([]string{file}, nil); err == nil {
			return
		}
	}
}

// Version is the compiler's: "12.9".
func (c *Compiler) Version() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

func (c *Compiler) fail(op string, r C.int) error {
	return fmt.Errorf("nvrtc: %s: %s (%d)", op, C.GoString(C.rtc_error(c.calls, r)), int(r))
}

// Arch names the exact target of a compute capability (major*10+minor): from 9.0 on
// the architecture's own instruction set, whose name ends in a.
func Arch(capability int) string {
	if capability >= 90 {
		return fmt.Sprintf("sm_%da", capability)
	}
	return fmt.Sprintf("sm_%d", capability)
}

// cStrings are C copies of Go strings, and a C array of them.
type cStrings struct {
	all   []*C.char
	array **C.char
}

func newStrings(s ...string) cStrings {
	c := cStrings{array: (**C.char)(C.calloc(C.size_t(len(s)+1), C.size_t(unsafe.Sizeof(uintptr(0)))))}
	for i, v := range s {
		c.all = append(c.all, C.CString(v))
		unsafe.Slice(c.array, len(s))[i] = c.all[i]
	}
	return c
}

func (c cStrings) free() {
	for _, p := range c.all {
		C.free(unsafe.Pointer(p))
	}
	C.free(unsafe.Pointer(c.array))
}

// Compile makes a cubin for arch, like "sm_90a", or, for one like "compute_80", PTX,
// which the driver compiles for its device when the module is loaded. log is the compiler's
// output, also on success. An error in the source is an *Error.
func (c *Compiler) Compile(s Source, arch string) (cubin []byte, log string, err error) {
	names := slices.Sorted(maps.Keys(s.Headers))
	texts := make([]string, len(names))
	for i, n := range names {
		texts[i] = s.Headers[n]
	}
	main, headers, contents := newStrings(s.Text, s.Name), newStrings(names...), newStrings(texts...)
	defer main.free()
	defer headers.free()
	defer contents.free()
	var p unsafe.Pointer
	if r := C.rtc_create(c.calls, &p, main.all[0], main.all[1], C.int(len(names)), contents.array, headers.array); r != 0 {
		return nil, "", c.fail("create "+s.Name, r)
	}
	defer C.rtc_destroy(c.calls, &p)
	options := newStrings(append([]string{"--gpu-architecture=" + arch, "--std=c++17", "--device-as-default-execution-space"}, s.Options...)...)
	defer options.free()
	r := C.rtc_compile(c.calls, p, C.int(len(options.all)), options.array)
	var n C.size_t
	if C.rtc_log_size(c.calls, p, &n) == 0 && n > 1 {
		text := make([]byte, n)
		if C.rtc_log(c.calls, p, unsafe.Pointer(&text[0])) == 0 {
			log = strings.TrimSpace(strings.TrimRight(string(text), "\x00"))
		}
	}
	if r != 0 {
		return nil, log, &Error{Source: s.Name, Arch: arch, Log: log, Result: C.GoString(C.rtc_error(c.calls, r))}
	}
	virtual := strings.HasPrefix(arch, "compute_")
	if virtual {
		r = C.rtc_ptx_size(c.calls, p, &n)
	} else {
		r = C.rtc_cubin_size(c.calls, p, &n)
	}
	if r != 0 || n == 0 {
		return nil, log, c.fail("result of "+s.Name, r)
	}
	cubin = make([]byte, n)
	if virtual {
		r = C.rtc_ptx(c.calls, p, unsafe.Pointer(&cubin[0]))
	} else {
		r = C.rtc_cubin(c.calls, p, unsafe.Pointer(&cubin[0]))
	}
	if r != 0 {
		return nil, log, c.fail("result of "+s.Name, r)
	}
	return cubin, log, nil
}

// Cached is Compile with a cache; hit reports that the result came from the cache. Failing
// to store a result is not an error: it is compiled again next time.
// ---
func (c *Compiler) Cached(cache Cache, s Source, arch string) (cubin []byte, hit bool, err error) {
	key := KeyOf(s, arch, c.Version())
	if cubin, ok := cache.Load(key); ok {
		return cubin, true, nil
	}
	cubin, _, err = c.Compile(s, arch)
	if err == nil {
		_ = cache.Store(key, cubin)
	}
	return cubin, false, err
}
