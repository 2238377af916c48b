//go:build cuda

package nvrtc

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/device/cuda/dylib"
)

func compiler(t *testing.T) *Compiler {
	t.Helper()
	c, err := Open(dylib.Folders(), 13)
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("NVRTC %s: %s", c.Version(), c.Path)
	return c
}

const saxpy = `#include "scale.h"
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += scale(a) * x[i];
}`

func TestCompile(t *testing.T) {
	c := compiler(t)
	s := Source{Name: "saxpy.cu", Text: saxpy, Headers: map[string]string{"scale.h": "__device__ inline float scale(float a) { return FACTOR * a; }"}, Options: []string{"-DFACTOR=2"}}
	for _, arch := range []string{Arch(80), Arch(90)} {
		cubin, log, err := c.Compile(s, arch)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(cubin, []byte("\x7fELF")) || !bytes.Contains(cubin, []byte("saxpy")) {
			t.Errorf("%s: %d bytes that are no cubin with the kernel; log %q", arch, len(cubin), log)
		}
	}
}

func TestCompileErrors(t *testing.T) {
	c := compiler(t)
	for _, test := range []struct {
		name string
		s    Source
		arch string
		want []string
	}{
		{"syntax", Source{Name: "bad.cu", Text: "\n\n__global__ void k( {"}, "sm_80", []string{"bad.cu", "sm_80", "(3)"}},
		{"header", Source{Name: "bad.cu", Text: `#include "none.h"`}, "sm_80", []string{"none.h"}},
		{"architecture", Source{Name: "ok.cu", Text: "__global__ void k() {}"}, "sm_1", []string{"ok.cu", "sm_1"}},
	} {
		_, log, err := c.Compile(test.s, test.arch)
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v is no *Error (log %q)", test.name, err, log)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", test.name, err, want)
			}
		}
	}
}

func TestCached(t *testing.T) {
	c, cache := compiler(t), Cache{Dir: t.TempDir()}
	s := Source{Name: "k.cu", Text: `extern "C" __global__ void k(int *p) { *p = VALUE; }`, Options: []string{"-DVALUE=1"}}
	first, hit, err := c.Cached(cache, s, Arch(80))
	if err != nil || hit {
		t.Fatalf("first: hit %v, %v", hit, err)
	}
	again, hit, err := c.Cached(cache, s, Arch(80))
	if err != nil || !hit || !bytes.Equal(first, again) {
		t.Errorf("again: hit %v, %v, the same: %v", hit, err, bytes.Equal(first, again))
	}
	s.Options = []string{"-DVALUE=2"}
	if _, hit, err := c.Cached(cache, s, Arch(80)); err != nil || hit {
		t.Errorf("another option: hit %v, %v", hit, err)
	}
}

func TestCompileSideBySide(t *testing.T) {
	c := compiler(t)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			s := Source{Name: "k.cu", Text: strings.Replace(`extern "C" __global__ void kernelN() {}`, "N", string(rune('a'+i)), 1)}
			cubin, _, err := c.Compile(s, Arch(80))
			if err != nil || !bytes.Contains(cubin, []byte("kernel"+string(rune('a'+i)))) {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	wg.Wait()
}

func TestNoLibrary(t *testing.T) {
	t.Setenv(dylib.Variable, t.TempDir())
	_, err := Open(nil, 11)
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "pip install") {
		t.Errorf("%v", err)
	}
}
