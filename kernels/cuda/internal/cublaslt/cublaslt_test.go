//go:build cuda

package cublaslt

import (
	"errors"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device/cuda/dylib"
)

// TestOpen finds every function, where the library is installed; that takes no GPU.
func TestOpen(t *testing.T) {
	l, err := Open(dylib.Folders(), 13)
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if v := l.Version(); v < 120000 || v >= 140000 {
		t.Errorf("%s is version %d", l.Path, v)
	}
	err = l.check("multiply", 15)
	var s *Status
	if !errors.As(err, &s) || s.Code != 15 || !strings.Contains(err.Error(), "multiply") {
		t.Errorf("status 15 is %v", err)
	}
}

func TestOpenWithoutLibrary(t *testing.T) {
	_, err := Open([]string{t.TempDir()}, 11) // no library is that old
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "pip install nvidia-cublas") {
		t.Errorf("%v", err)
	}
}
