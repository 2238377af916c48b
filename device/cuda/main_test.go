//go:build cuda

package cuda

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device/cuda/internal/standin"
)

// The tests run on the GPUs of this machine where there are any, else on the
// stand-in; MOESERVE_CUDA_TEST=gpu or =standin says which.
var (
	onGPU bool
	// library is Options.Driver for every machine of the tests.
	library string
	// missing is why nothing can be tested.
	missing string
	// count of devices, and of machines that are open.
	count, machines int
	// blamed is what the driver still has of tests that were told so.
	blamed string
)

func TestMain(m *testing.M) {
	if code := prepare(); code >= 0 {
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// prepare picks the driver; it returns an exit code, or -1 to go on.
func prepare() int {
	switch where := os.Getenv("MOESERVE_CUDA_TEST"); where {
	case "gpu":
		onGPU = true
	case "standin":
	case "":
		_, err := os.Stat("/dev/nvidiactl")
		onGPU = err == nil
	default:
		fmt.Fprintf(os.Stderr, "MOESERVE_CUDA_TEST is %q: use gpu or standin\n", where)
		return 2
	}
	if name := os.Getenv(childVariable); name != "" {
		library = os.Getenv(childVariable + "_DRIVER")
		return runChild(name)
	}
	if !onGPU {
		dir, err := os.MkdirTemp("", "standin")
		if err != nil {
			missing = err.Error()
			return -1
		}
		// The library stays open, so its file may go.
		defer os.RemoveAll(dir)
		if library, err = standin.Build(dir); err != nil {
			missing = "there is no GPU, and no stand-in for one: " + err.Error()
			return -1
		}
	}
	if _, err := start(library); err != nil {
		missing = err.Error()
		return -1
	}
	n, err := cu.NumDevices()
	if err != nil {
		missing = err.Error()
		return -1
	}
	count = n
	if onGPU {
		// Making a context takes a third of a second: keep them for all tests.
		for i := range n {
			if _, err := cu.Device(i).RetainPrimaryCtx(); err != nil {
				missing = err.Error()
			}
		}
	}
	return -1
}

// need skips what cannot run here.
func need(t testing.TB, gpus int) {
	t.Helper()
	if missing != "" {
		t.Skip(missing)
	}
	if count < gpus {
		t.Skipf("needs %d GPUs, and this machine has %d", gpus, count)
	}
}

// open opens the first gpus devices, fewer where there are fewer. Whoever opens
// closes, unless the machine is still open at the test's end.
func open(t testing.TB, gpus int) *Machine {
	t.Helper()
	need(t, 1)
	o := Options{Driver: library}
	for i := range min(gpus, count) {
		o.GPUs = append(o.GPUs, i)
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	machines++
	t.Cleanup(func() {
		machines--
		if !m.closed.Load() {
			if err := m.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if onGPU || machines > 0 {
			return
		}
		// Streams end on threads of their own.
		for begin := time.Now(); ; time.Sleep(pause) {
			left := standin.Alive()
			if left == "" || left == blamed {
				return
			}
			if time.Since(begin) > 20*time.Second {
				t.Errorf("left with the driver: %s", left)
				if blamed != "" {
					t.Errorf("of which earlier tests had left: %s", blamed)
				}
				blamed = left
				return
			}
		}
	})
	return m
}

func contains(t testing.TB, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", fmt.Sprint(err), p)
		}
	}
}
