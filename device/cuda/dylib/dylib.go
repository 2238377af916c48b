//go:build cuda

package dylib

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>

static const char *library_path(void *handle) {
  struct link_map *map = NULL;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "";
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"unsafe"
)

// Variable names the environment variable that overrides where libraries are
// looked for.
const Variable = "MOESERVE_CUDA_LIBRARIES"

// oldest is the minimum major version of CUDA whose libraries are supported.
const oldest = 12

// Library is an open library. It stays open: CUDA's do not close cleanly.
type Library struct {
	handle unsafe.Pointer
	// Path is where it was found.
	Path string
}

// ErrNotFound reports that no file with one of the names was found or could be opened.
var ErrNotFound = errors.New("library not found")

// Names lists a library's file names for the major versions of CUDA up to newest,
// newest first: a driver refuses code compiled by a later major version.
func Names(base string, newest int) []string {
	var names []string
	for v := newest; v >= oldest; v-- {
		names = append(names, fmt.Sprintf("%s.%d", base, v))
	}
	return names
}

// Open opens the first of names that can be opened: in each folder, then where the
// dynamic linker looks. All names of one folder come before those of the next. Its
// error wraps ErrNotFound.
func Open(names, folders []string) (*Library, error) {
	var reasons []error
	for _, dir := range append(slices.Clone(folders), "") {
		for _, name := range names {
			path := name
			if dir != "" {
				path = filepath.Join(dir, name)
				if _, err := os.Stat(path); err != nil {
					continue
				}
			}
			cp := C.CString(path)
			h := C.dlopen(cp, C.RTLD_NOW|C.RTLD_LOCAL)
			C.free(unsafe.Pointer(cp))
			if h != nil {
				return &Library{handle: h, Path: C.GoString(C.library_path(h))}, nil
			}
			reasons = append(reasons, errors.New(C.GoString(C.dlerror())))
		}
	}
	return nil, fmt.Errorf("dylib: %v: %w (set %s to its folder): %w", names, ErrNotFound, Variable, errors.Join(reasons...))
}

// Symbol returns the address of a function.
func (l *Library) Symbol(name string) (unsafe.Pointer, error) {
	cn := C.CString(name)
	defer C.free(unsafe.Pointer(cn))
	p := C.dlsym(l.handle, cn)
	if p == nil {
		return nil, fmt.Errorf("dylib: %s has no %s", l.Path, name)
	}
	return p, nil
}

// Folders lists the existing folders that may hold CUDA's libraries, each once, the
// likeliest first.
func Folders() []string {
	if v := os.Getenv(Variable); v != "" {
		return existing(filepath.SplitList(v))
	}
	target := map[string]string{"amd64": "x86_64-linux", "arm64": "sbsa-linux"}[runtime.GOARCH]
	multiarch := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	var patterns []string
	for _, root := range []string{os.Getenv("CUDA_HOME"), os.Getenv("CUDA_PATH"), "/usr/local/cuda", "/usr/local/cuda-1[2-9]*", "/opt/cuda"} {
		if root != "" {
			patterns = append(patterns, root+"/lib64", root+"/targets/"+target+"/lib")
		}
	}
	patterns = append(patterns, "/usr/lib/"+multiarch, "/usr/lib64")
	if conda := os.Getenv("CONDA_PREFIX"); conda != "" {
		patterns = append(patterns, conda+"/lib", conda+"/targets/"+target+"/lib")
	}
	var prefixes []string
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		prefixes = append(prefixes, venv)
	}
	if python, err := exec.LookPath("python3"); err == nil {
		// Not resolved: the python3 of a virtual environment is a link out of it.
		prefixes = append(prefixes, filepath.Dir(filepath.Dir(python)))
	}
	if home, err := os.UserHomeDir(); err == nil {
		prefixes = append(prefixes, filepath.Join(home, ".local"))
	}
	for _, prefix := range append(prefixes, "/usr/local", "/usr") {
		for _, site := range []string{"site-packages", "dist-packages"} {
			// The wheels of CUDA 13 share one folder, those of CUDA 12 have one each.
			patterns = append(patterns, prefix+"/lib/python3*/"+site+"/nvidia/cu1[0-9]/lib", prefix+"/lib/python3*/"+site+"/nvidia/*/lib")
		}
	}
	return existing(patterns)
}

// existing expands patterns to folders, within one pattern the newest first.
func existing(patterns []string) []string {
	var out []string
	seen := map[string]bool{}
	for _, p := range patterns {
		matches, err := filepath.Glob(p)
		if err != nil {
			continue // a folder's name that is no pattern, from the environment
		}
		slices.Sort(matches)
		slices.Reverse(matches)
		for _, dir := range matches {
			real, err := filepath.EvalSymlinks(dir)
			if err != nil || seen[real] {
				continue
			}
			if st, err := os.Stat(real); err != nil || !st.IsDir() {
				continue
			}
			seen[real] = true
			out = append(out, dir)
		}
	}
	return out
}
