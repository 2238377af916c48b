//go:build cuda

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestCUDAScripts runs the scripts of testdata/cuda with a stand-in for the driver,
// whose folder they find as $STANDIN.
func TestCUDAScripts(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("there is a driver, which would be found in place of the stand-in")
	}
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	source := filepath.FromSlash("../../device/cuda/internal/standin/testdata/standin.c")
	out, err := exec.CommandContext(t.Context(), gcc, "-O1", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread",
		"-o", filepath.Join(dir, "libcuda.so.1"), source).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "cuda"),
		Setup: func(env *testscript.Env) error {
			env.Setenv("STANDIN", dir)
			return nil
		},
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"fails": scriptFails},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}
