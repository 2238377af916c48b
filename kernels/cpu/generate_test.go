package cpu_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestGenerated holds the assembly to its generator. It skips where avo, which
// nothing else needs, has not been downloaded.
func TestGenerated(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the generator: left out by -short")
	}
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-tags", "avo", "-o", filepath.Join(dir, "gen"), "./gen")
	build.Env = append(os.Environ(), "GOPROXY=off")
	if out, err := build.CombinedOutput(); err != nil {
		if bytes.Contains(out, []byte("GOPROXY=off")) {
			t.Skip("github.com/mmcloughlin/avo has not been downloaded: go generate ./kernels/cpu does it")
		}
		t.Fatalf("build the generator: %v\n%s", err, out)
	}
	const assembly, stubs = "simd_amd64.s", "stubs_amd64.go"
	gen := exec.CommandContext(t.Context(), filepath.Join(dir, "gen"), "-out", assembly, "-stubs", stubs, "-pkg", "cpu")
	gen.Dir = dir
	if out, err := gen.CombinedOutput(); err != nil {
		t.Fatalf("run the generator: %v\n%s", err, out)
	}
	for _, name := range []string{assembly, stubs} {
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what gen writes: run go generate ./kernels/cpu", name)
		}
	}
}
