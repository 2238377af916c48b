//go:build cuda

package dylib

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	want := []string{"libx.so.14", "libx.so.13", "libx.so.12"}
	if got := Names("libx.so", 14); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := Names("libx.so", 11); len(got) != 0 {
		t.Errorf("%v for a driver that is too old", got)
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libbroken.so.12"), []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	// A broken file in one folder does not hide a good one elsewhere.
	l, err := Open([]string{"libbroken.so.12", "libm.so.6"}, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(l.Path, "libm.so.6") {
		t.Errorf("opened %q", l.Path)
	}
	if _, err := l.Symbol("cosf"); err != nil {
		t.Error(err)
	}
	if _, err := l.Symbol("no_such_function"); err == nil || !strings.Contains(err.Error(), "no_such_function") {
		t.Errorf("a missing symbol: %v", err)
	}
	_, err = Open([]string{"libbroken.so.12"}, []string{dir})
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), Variable) {
		t.Errorf("a broken library: %v", err)
	}
}

func TestFolders(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"a", "b"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(dir, "a"), filepath.Join(dir, "c")); err != nil {
		t.Fatal(err)
	}
	t.Setenv(Variable, strings.Join([]string{dir + "/b", dir + "/a", dir + "/c", dir + "/none", dir + "/["}, ":"))
	if got, want := Folders(), []string{dir + "/b", dir + "/a"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// Wheels in a virtual environment, CUDA 13's before CUDA 12's.
	t.Setenv(Variable, "")
	venv := t.TempDir()
	wheels := venv + "/lib/python3.12/site-packages/nvidia/"
	for _, d := range []string{"cu13/lib", "cuda_nvrtc/lib"} {
		if err := os.MkdirAll(wheels+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("VIRTUAL_ENV", venv)
	got := Folders()
	i, j := slices.Index(got, wheels+"cu13/lib"), slices.Index(got, wheels+"cuda_nvrtc/lib")
	if i < 0 || j < i {
		t.Errorf("%v lacks the wheels of %s, or has them out of order", got, venv)
	}
}
