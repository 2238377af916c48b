// Package preload_test runs a program that knows nothing of moeserve with the library of
// preload/multipath, on a stand-in for the CUDA driver.
package preload_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// rig is a folder with the library, the stand-in and the program.
type rig struct{ dir string }

// buildOnce compiles into a folder that outlives the test that needs it first.
var buildOnce = sync.OnceValues(func() (rig, error) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return rig{}, err
	}
	dir, err := os.MkdirTemp("", "multipath")
	if err != nil {
		return rig{}, err
	}
	r := rig{dir: dir}
	sources, err := filepath.Glob("../../preload/multipath/*.c")
	if err != nil {
		return r, err
	}
	for _, args := range [][]string{
		slices.Concat([]string{"libmoeserve-multipath.so", "-O2", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread"}, sources, []string{"-ldl"}),
		slices.Concat([]string{"lose_relay.so", "-O2", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread", "../../tools/cuda/lose_relay.c"}, sources, []string{"-ldl"}),
		{"libmoeserve-reclaim.so", "-O2", "-fvisibility=hidden", "-shared", "-fPIC", "../../preload/reclaim.c", "-ldl"},
		{"libcuda.so.1", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "testdata/cuda.c"},
		{"program", "-O2", "-pthread", "testdata/program.c", filepath.Join(dir, "libcuda.so.1"), "-ldl"},
	} {
		args[0] = filepath.Join(dir, args[0])
		if out, err := exec.Command(gcc, append([]string{"-g", "-Wall", "-Wextra", "-Werror", "-o"}, args...)...).CombinedOutput(); err != nil {
			return r, fmt.Errorf("%s: %w: %s", args[0], err, out)
		}
	}
	return r, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if r, err := buildOnce(); err == nil {
		os.RemoveAll(r.dir) //nolint:errcheck // in the folder for temporary files
	}
	os.Exit(code)
}

func build(t *testing.T) rig {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("LD_PRELOAD is Linux's")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc")
	}
	r, err := buildOnce()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run runs a case of the program, which must end well, and returns the report.
func (r rig) run(t *testing.T, env []string, args ...string) string {
	t.Helper()
	report := filepath.Join(t.TempDir(), "report")
	c := exec.CommandContext(t.Context(), filepath.Join(r.dir, "program"), args...)
	c.WaitDelay = time.Second
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+r.dir, "LD_PRELOAD="+filepath.Join(r.dir, "libmoeserve-multipath.so"),
		"MOESERVE_MULTIPATH_THRESHOLD=1M", "MOESERVE_MULTIPATH_LOG="+report, "STANDIN_RATE=2000000000")
	c.Env = append(c.Env, env...)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
	said, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(said), "\n") != 1 || !strings.HasPrefix(string(said), "moeserve-multipath[") {
		t.Fatalf("%v: the report is not one line: %q", args, said)
	}
	return string(said)
}

// number returns the number that stands before or behind a word of a report, 0 without the word.
func number(t *testing.T, report, pattern string) int {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(report)
	if found == nil {
		return 0
	}
	n, err := strconv.Atoi(found[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestReach: each function of the driver makes copies over a relay, in whichever way a program
// has looked it up.
func TestReach(t *testing.T) {
	r := build(t)
	for _, way := range []string{"linked", "dlsym", "runtime", "runtime-11"} {
		t.Run(way, func(t *testing.T) {
			// Twelve functions, four of them in both directions.
			if said := r.run(t, nil, "reach", way); number(t, said, `: (\d+) copies relayed`) < 16 {
				t.Error(said)
			}
		})
	}
}

// TestOrder: work before and behind a copy sees it where it stands, in each kind of stream.
func TestOrder(t *testing.T) {
	r := build(t)
	for _, kind := range []string{"legacy", "thread", "blocking", "nonblocking", "legacy-between"} {
		t.Run(kind, func(t *testing.T) {
			for _, relays := range []string{"2", "4"} {
				if said := r.run(t, []string{"STANDIN_DEVICES=" + relays, "STANDIN_RELAY_US=2000"}, "order", kind); number(t, said, `: (\d+) copies relayed`) < 11 {
					t.Error(said)
				}
			}
		})
	}
}

// TestReasons: what is left alone is counted, with its bytes.
func TestReasons(t *testing.T) {
	said := build(t).run(t, nil, "reasons")
	for reason, copies := range map[string]int{
		"small": 1, "pageable": 1, "managed": 1, "device-to-device": 2, "range": 1, "memory": 1, "context": 1, "capture": 2, "shape": 2, "access": 1,
	} {
		if got := number(t, said, ` `+reason+` (\d+) \(`); got != copies {
			t.Errorf("%s: %d copies, want %d: %s", reason, got, copies, said)
		}
	}
	if got := number(t, said, `small 1 \((\d+) bytes\)`); got != 1<<19 {
		t.Errorf("%d bytes in small copies: %s", got, said)
	}
}

// TestMapped: memory that a program maps itself is relayed if relays are to have access to it,
// and then if they have it as a whole.
func TestMapped(t *testing.T) {
	r := build(t)
	if said := r.run(t, nil, "mapped"); number(t, said, ` memory (\d+) \(`) != 2 {
		t.Errorf("not asked for: %s", said)
	}
	if said := r.run(t, []string{"MOESERVE_MULTIPATH_MAPPED=1"}, "mapped"); number(t, said, ` memory (\d+) \(`) != 1 {
		t.Error(said)
	}
}

// TestNothingWaits: copies that cannot begin yet hold up neither others nor the program.
func TestNothingWaits(t *testing.T) {
	r := build(t)
	// A relay serves three streams at a time, one where streams share a queue of the hardware.
	for env, streams := range map[string]int{"": 3, "CUDA_DEVICE_MAX_CONNECTIONS=1": 1} {
		if said := r.run(t, []string{env}, "independent"); number(t, said, `: (\d+) copies relayed`) != 1+streams || number(t, said, `busy (\d+) \(`) != 13-streams {
			t.Errorf("%s: %s", env, said)
		}
	}
	// 512 chunks may wait on a relay: of 1 MiB, or of 2 where the rates that were seen give it more than 8 MiB of a
	// copy. What goes over it before is less than that of one copy, and without a limit 128 copies would wait.
	said := r.run(t, nil, "many")
	copies, relayed, chunk := number(t, said, `: (\d+) copies relayed`), number(t, said, `over GPU 1: (\d+) bytes`), 1<<20
	if relayed > copies*7900<<10 {
		chunk = 2 << 20
	}
	if chunks := relayed / chunk; chunks > 512+16 {
		t.Errorf("%d chunks waited on a relay: %s", chunks, said)
	}
}

// TestAdapts: the parts of a copy follow the rates of earlier ones.
func TestAdapts(t *testing.T) { build(t).run(t, []string{"STANDIN_RELAY_US=8000"}, "adapts") }

// TestLoss: a relay that is lost, or refuses, costs no byte.
func TestLoss(t *testing.T) {
	r := build(t)
	for _, args := range [][]string{{"loss", "before"}, {"loss", "during"}, {"loss", "refused"}, {"loss", "first-refused"}, {"loss", "told-once"}, {"loss-synchronous"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			if said := r.run(t, []string{"STANDIN_RELAY_US=3000"}, args...); !strings.Contains(said, "GPU 1 is lost") {
				t.Error(said)
			}
		})
	}
}

// TestLossBeside: a relay that refuses a copy ends those that it makes for other streams: they are not taken for
// ended while it still writes.
func TestLossBeside(t *testing.T) {
	if said := build(t).run(t, []string{"STANDIN_RELAY_US=20000"}, "loss-beside"); !strings.Contains(said, "GPU 1 is lost") {
		t.Error(said)
	}
}

// TestLossOnGPUs: the fault that tests on GPUs inject is one that the library gets over.
func TestLossOnGPUs(t *testing.T) {
	r := build(t)
	at := filepath.Join(t.TempDir(), "now")
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{"LD_PRELOAD=" + filepath.Join(r.dir, "lose_relay.so"), "LOSE_AT=" + at, "STANDIN_RELAY_US=1000"}
	if said := r.run(t, env, "threads"); !strings.Contains(said, "GPU 1 is lost: cuStreamQuery: error 719") {
		t.Error(said)
	}
}

// TestLossShared: of most faults of a GPU CUDA tells all contexts of the process. A program whose copy was not completed
// then gets the error, and never goes on with wrong bytes.
func TestLossShared(t *testing.T) {
	r := build(t)
	start := time.Now()
	if said := r.run(t, []string{"STANDIN_SHARED=1"}, "loss-shared"); !strings.Contains(said, "GPU 1 is lost") {
		t.Error(said)
	}
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("the context ended after %v", took)
	}
}

// TestLossEnqueued: the error comes between two calls of one copy.
func TestLossEnqueued(t *testing.T) {
	build(t).run(t, []string{"STANDIN_SHARED=1"}, "loss-enqueued")
}

// TestLossDoubted: an error that the driver reports once is not taken for the loss of a relay, which still writes.
func TestLossDoubted(t *testing.T) {
	if said := build(t).run(t, []string{"STANDIN_RELAY_US=20000"}, "loss-doubted"); strings.Contains(said, "is lost") {
		t.Error(said)
	}
}

// TestContextStays: what the library does on a relay leaves the program's context current.
func TestContextStays(t *testing.T) {
	build(t).run(t, []string{"STANDIN_STUCK=1"}, "stays")
}

// TestSleeps: without a relayed copy in progress the driver gets the program's calls and no others.
func TestSleeps(t *testing.T) { build(t).run(t, nil, "sleeps") }

func TestThreads(t *testing.T) {
	r := build(t)
	if said := r.run(t, []string{"STANDIN_DEVICES=3"}, "threads"); number(t, said, `: (\d+) copies relayed`) < 30 {
		t.Error(said)
	}
}

// TestProcess: forks, an end without synchronizing, a context that ends, and errors of the driver
// are the program's as without the library.
func TestProcess(t *testing.T) {
	r := build(t)
	for _, name := range []string{"forks", "forks-first", "leaves", "resets", "refused"} {
		t.Run(name, func(t *testing.T) {
			if said := r.run(t, nil, name); number(t, said, `: (\d+) copies relayed`) < 1 {
				t.Error(said)
			}
		})
	}
}

// TestNoRelay: without one that can be used the copies are the driver's, and the report says why.
func TestNoRelay(t *testing.T) {
	r := build(t)
	for name, c := range map[string]struct {
		env  []string
		want string
	}{
		"one GPU":           {[]string{"STANDIN_DEVICES=1"}, "no-relay"},
		"none named":        {[]string{"MOESERVE_MULTIPATH_RELAYS=none"}, "no-relay"},
		"itself":            {[]string{"MOESERVE_MULTIPATH_RELAYS=0"}, "no-relay"},
		"no peer access":    {[]string{"STANDIN_ALONE=1"}, "GPU 1 cannot be a relay: no peer access"},
		"peers over PCIe":   {[]string{"STANDIN_PCIE=1"}, "GPU 1 cannot be a relay: no NVLink"},
		"a GPU that is not": {[]string{"MOESERVE_MULTIPATH_RELAYS=7"}, `this process sees no GPU "7": give numbers below 2`},
		"no memory":         {[]string{"STANDIN_MEMORY=50000000"}, "GPU 1 cannot be a relay: cuMemAlloc_v2: error 2"},
		"little memory":     {[]string{"STANDIN_MEMORY=1100000000"}, "GPU 1 cannot be a relay: memory: less than 1 GiB would be left"},
		"a large threshold": {[]string{"MOESERVE_MULTIPATH_THRESHOLD=1G"}, "small 6"},
	} {
		t.Run(name, func(t *testing.T) {
			if said := r.run(t, c.env, "alone"); !strings.Contains(said, c.want) || number(t, said, `: (\d+) copies relayed`) != 0 {
				t.Errorf("%s, want %q", said, c.want)
			}
		})
	}
	for _, env := range []string{"MOESERVE_MULTIPATH_RELAYS=1", "MOESERVE_MULTIPATH_RELAYS=GPU-02020202-0202-0202-0202-020202020202", "MOESERVE_MULTIPATH_RELAYS=all"} {
		if said := r.run(t, []string{env}, "order", "legacy"); number(t, said, `over GPU 1: (\d+) bytes`) == 0 {
			t.Errorf("%s: %s", env, said)
		}
	}
	if said := r.run(t, []string{"STANDIN_UNRANGED=1"}, "order", "legacy"); number(t, said, `over GPU 1: (\d+) bytes`) == 0 {
		t.Errorf("the driver does not tell ranges: %s", said)
	}
	// Named, a GPU is a relay over PCIe, too.
	if said := r.run(t, []string{"STANDIN_PCIE=1", "MOESERVE_MULTIPATH_RELAYS=1"}, "order", "legacy"); number(t, said, `over GPU 1: (\d+) bytes`) == 0 {
		t.Error(said)
	}
	hardware := filepath.Join(t.TempDir(), "hardware.json")
	if err := os.WriteFile(hardware, []byte(`{"multipath": {"threshold_in_bytes": 2000000, "threshold_out_bytes": 9000000}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for threshold, want := range map[string]string{"": "small 6", "4M": "no-relay"} {
		if said := r.run(t, []string{"MOESERVE_HARDWARE=" + hardware, "MOESERVE_MULTIPATH_THRESHOLD=" + threshold, "STANDIN_DEVICES=1"}, "alone"); !strings.Contains(said, want) {
			t.Errorf("threshold %q beside a calibrated one of 9 MB: %s", threshold, said)
		}
	}
	if said := r.run(t, []string{"MOESERVE_MULTIPATH_THRESHOLD=lots", "STANDIN_DEVICES=1"}, "alone"); !strings.Contains(said, `"lots" is no size`) || !strings.Contains(said, "small 6") {
		t.Error(said)
	}
}

// TestBoth: the library that gets memory back may be preloaded, too.
func TestBoth(t *testing.T) {
	r := build(t)
	errs := filepath.Join(t.TempDir(), "errors")
	c := exec.CommandContext(t.Context(), filepath.Join(r.dir, "program"), "both")
	f, err := os.Create(errs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c.Stderr, c.Stdout = f, f
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+r.dir, "MOESERVE_MULTIPATH_THRESHOLD=1M", "MOESERVE_RECLAIM_VERBOSE=1", "MOESERVE_RUNTIME_DIR="+t.TempDir(),
		"LD_PRELOAD="+filepath.Join(r.dir, "libmoeserve-multipath.so")+" "+filepath.Join(r.dir, "libmoeserve-reclaim.so"))
	failed := c.Run()
	said, err := os.ReadFile(errs)
	if err != nil || failed != nil {
		t.Fatalf("%v, %v: %s", err, failed, said)
	}
	if n := number(t, string(said), `: (\d+) copies relayed`); n < 16 || !strings.Contains(string(said), "refused: asked for") {
		t.Errorf("%d copies are relayed: %s", n, said)
	}
}

// TestSilent: a program that does not copy large pieces is told nothing.
func TestSilent(t *testing.T) {
	r := build(t)
	c := exec.CommandContext(t.Context(), filepath.Join(r.dir, "program"), "none such")
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+r.dir, "LD_PRELOAD="+filepath.Join(r.dir, "libmoeserve-multipath.so"))
	out, err := c.CombinedOutput()
	if c.ProcessState == nil || c.ProcessState.ExitCode() != 2 || len(out) > 0 {
		t.Errorf("%v: %q", err, out)
	}
}
