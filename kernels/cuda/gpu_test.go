//go:build cuda

package cuda

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/cuda/dylib"
	"github.com/moeserve/moeserve/device/cuda/nvrtc"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/kernelstest"
)

var (
	full = flag.Bool("full", false, "test at the shapes of real models too, some GB, and on the CPU half an hour")
	seed = flag.Uint64("seed", 0, "of the conformance suite's inputs; 0: another each time")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// compiler skips where NVRTC is not installed.
func compiler(t testing.TB) *nvrtc.Compiler {
	t.Helper()
	c, err := nvrtc.Open(dylib.Folders(), 13)
	if errors.Is(err, nvrtc.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// mostSpilled is how many bytes of registers a thread of a kernel may keep in memory.
const mostSpilled = 64

// mostCode is how many bytes of instructions for compute capability 9.0 a kernel of few rows may have: it takes most of its
// time to bring them.
var mostCode = map[string]uint64{
	"attention_128_wide": 24 << 10, "rope_attention_128_wide": 26 << 10, "norm_rope_attention_128_wide": 31 << 10, "route_sort": 16 << 10, "few_rows_3": 6 << 10, "few_rows_4": 6 << 10, "router_gate_up": 16 << 10, "route_down": 22 << 10, "combine_norm_few_256": 11 << 10, "combine_norm_few_512": 11 << 10,
	"expert_up_256_few": 19 << 10, "expert_up_64_few": 14 << 10, "expert_up_alone_few": 14 << 10,
	"expert_down_256_few": 13 << 10, "expert_down_64_few": 13 << 10, "expert_down_alone_few": 13 << 10,
	"expert_up_64_routed": 31 << 10, "expert_up_alone_routed": 31 << 10, "expert_up_64_routed_few": 30 << 10, "expert_up_alone_routed_few": 30 << 10,
	"expert_down_64_routed": 16 << 10, "expert_down_alone_routed": 16 << 10, "expert_down_64_routed_few": 18 << 10, "expert_down_alone_routed_few": 18 << 10,
	"sixteen_rows_4": 10 << 10, "sixteen_rows_gated_5": 12 << 10, "sixteen_router_gate_up": 22 << 10, "sixteen_route_down": 26 << 10,
	"norm_few_256": 8 << 10, "norm_few_512": 8 << 10, "rope_append_kv_few": 5 << 10, "norm_rope_append_kv_few": 10 << 10,
}

// mostRegisters are those of a thread with which two blocks of 256 threads of attention, or one and one of 512 of the others, find
// room on one multiprocessor of compute capability 9.0: in multiples of 8, of 65,536.
var mostRegisters = map[string]int{
	"attention_128_wide": 128, "rope_attention_128_wide": 128, "norm_rope_attention_128_wide": 128, "few_rows_3": 56, "few_rows_4": 56, "router_gate_up": 64, "route_down": 56,
}

// TestCompile compiles every kernel for what we support, without a GPU. No compiler says
// anything but what kernels take. Kernels of few rows have few instructions.
func TestCompile(t *testing.T) {
	c := compiler(t)
	for _, file := range files {
		for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
			for _, arch := range []string{nvrtc.Arch(80), nvrtc.Arch(90), "compute_80"} {
				if !builtFor(file, arch) {
					continue
				}
				entry := ".text.%s\x00"
				if strings.HasPrefix(arch, "compute_") {
					entry = ".entry %s("
				}
				t.Run(fmt.Sprintf("%s/%s/%s", file, act, arch), func(t *testing.T) {
					t.Parallel()
					start := time.Now()
					u := compilationUnit(file, act)
					if !strings.HasPrefix(arch, "compute_") {
						u.Options = append(u.Options, "--ptxas-options=-v")
					}
					cubin, log, err := c.Compile(u, arch)
					if err != nil {
						t.Fatal(err)
					}
					kernel, counted := "", map[string]bool{}
					for line := range strings.Lines(log) {
						line = strings.TrimSpace(line)
						frame, spilled := 0, 0
						if _, err := fmt.Sscanf(line, "ptxas . %d bytes stack frame, %d bytes spill stores,", &frame, &spilled); err == nil {
							if spilled > mostSpilled {
								t.Errorf("%s: %s", kernel, line)
							}
							continue
						}
						if _, rest, ok := strings.Cut(line, "Compiling entry function '"); ok {
							kernel, _, _ = strings.Cut(rest, "'")
						}
						registers := 0
						if _, err := fmt.Sscanf(line, "ptxas info : Used %d registers", &registers); err == nil && arch == nvrtc.Arch(90) {
							counted[kernel] = true
							if most, limited := mostRegisters[kernel]; limited && registers > most {
								t.Errorf("%s has %d registers, at most %d wanted", kernel, registers, most)
							}
						}
						if line != "" && !strings.HasPrefix(line, "ptxas info ") {
							t.Errorf("the compiler says: %s", line)
						}
					}
					for _, k := range table {
						if k.file == file && !bytes.Contains(cubin, fmt.Appendf(nil, entry, k.name)) {
							t.Errorf("no kernel %s", k.name)
						}
					}
					t.Logf("%d bytes in %v", len(cubin), time.Since(start).Round(time.Millisecond))
					if arch != nvrtc.Arch(90) {
						return
					}
					cubin[6], cubin[20] = 1, 1 // CUDA has versions of its own, which debug/elf rejects
					code, err := elf.NewFile(bytes.NewReader(cubin))
					if err != nil {
						t.Fatal(err)
					}
					for _, k := range table {
						if k.file == file && !counted[k.name] {
							t.Errorf("the compiler does not say how many registers %s has", k.name)
						}
						most, limited := mostCode[k.name]
						if s := code.Section(".text." + k.name); limited && k.file == file && s.Size > most {
							t.Errorf("%s has %d bytes of instructions, at most %d wanted", k.name, s.Size, most)
						}
					}
				})
			}
		}
	}
}

// TestLimitsOfKernels holds limits to kernels that exist.
func TestLimitsOfKernels(t *testing.T) {
	for name := range mostCode {
		if !slices.ContainsFunc(table, func(k kernel) bool { return k.name == name }) {
			t.Errorf("no kernel %s, whose code is limited", name)
		}
	}
	for name := range mostRegisters {
		if !slices.ContainsFunc(table, func(k kernel) bool { return k.name == name }) {
			t.Errorf("no kernel %s, whose registers are limited", name)
		}
	}
}

// TestKernelsWait holds every kernel to waiting for those in front, as launches that
// overlap rely on, and to letting those behind start.
func TestKernelsWait(t *testing.T) {
	c := compiler(t)
	for _, file := range files {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			ptx, _, err := c.Compile(compilationUnit(file, kernels.BF16), "compute_90a")
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range table {
				if k.file != file {
					continue
				}
				_, body, ok := bytes.Cut(ptx, fmt.Appendf(nil, ".entry %s(", k.name))
				if !ok {
					t.Errorf("no kernel %s", k.name)
				}
				body, _, _ = bytes.Cut(body, []byte(".entry "))
				for _, instruction := range []string{"griddepcontrol.wait;", "griddepcontrol.launch_dependents;"} {
					if !bytes.Contains(body, []byte(instruction)) {
						t.Errorf("kernel %s has no %s", k.name, instruction)
					}
				}
			}
		})
	}
}

// TestWaits checks for which architectures kernels can overlap.
func TestWaits(t *testing.T) {
	for arch, want := range map[string]bool{"sm_80": false, "compute_80": false, "sm_89": false, "sm_90a": true, "compute_90": true, "sm_100a": true, "sm_120f": true, "nonsense": false} {
		if supportsOverlap(arch) != want {
			t.Errorf("kernels for %s wait: %v, want %v", arch, !want, want)
		}
	}
}

// TestCompileError checks that an error names file and line.
func TestCompileError(t *testing.T) {
	c := compiler(t)
	s := compilationUnit("route.cu", kernels.BF16)
	s.Text += "\nbroken\n"
	_, _, err := c.Compile(s, nvrtc.Arch(80))
	lines := bytes.Count(mustRead(t, "route.cu"), []byte("\n"))
	if want := fmt.Sprintf("route.cu(%d)", lines+2); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want it to say %q", err, want)
	}
}

func mustRead(t *testing.T, file string) []byte {
	t.Helper()
	b, err := sources.ReadFile("src/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// openGPU skips where there is no GPU, unless MOESERVE_CUDA_TEST=gpu says that there
// is one.
func openGPU(t testing.TB, o Options) (device.Machine, *Backend, device.Stream) {
	t.Helper()
	return openGPUs(t, []int{0}, o)
}

// openGPUs is openGPU on a machine with several GPUs, or with the first if there are fewer.
func openGPUs(t testing.TB, gpus []int, o Options) (device.Machine, *Backend, device.Stream) {
	t.Helper()
	m, err := cuda.Open(cuda.Options{GPUs: gpus})
	if err != nil && len(gpus) > 1 && !errors.Is(err, cuda.ErrUnavailable) {
		m, err = cuda.Open(cuda.Options{})
	}
	if errors.Is(err, cuda.ErrUnavailable) && os.Getenv("MOESERVE_CUDA_TEST") != "gpu" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	b, err := New(m, device.HBM(0), o)
	if err != nil {
		t.Fatal(errors.Join(err, m.Close()))
	}
	t.Logf("backend in %v", time.Since(start).Round(time.Millisecond))
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	if err != nil {
		t.Fatal(errors.Join(err, b.Close(), m.Close()))
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Synchronize(context.Background()), s.Close(), b.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	return m, b, s
}

// TestGPU runs the conformance suite on a GPU, with and without cuBLASLt.
func TestGPU(t *testing.T) {
	for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
		for _, invariant := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/batch-invariant=%v", act, invariant), func(t *testing.T) {
				m, b, s := openGPU(t, Options{Activation: act, BatchInvariant: invariant})
				kernelstest.Run(t, func(*testing.T) (device.Machine, kernels.Backend, device.Stream) {
					return m, b, s
				}, kernelstest.Options{Full: *full, BatchInvariant: invariant, Seed: *seed})
			})
		}
	}
}

// TestGPUOneMultiprocessor runs the suite with the tiles and grids of a device that has
// one.
func TestGPUOneMultiprocessor(t *testing.T) {
	for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
		t.Run(fmt.Sprint(act), func(t *testing.T) {
			m, b, s := openGPU(t, Options{Activation: act, BatchInvariant: true})
			b.multiprocessors = 1
			kernelstest.Run(t, func(*testing.T) (device.Machine, kernels.Backend, device.Stream) {
				return m, b, s
			}, kernelstest.Options{BatchInvariant: true, Seed: *seed})
		})
	}
}

// TestGPUTiles is testExpertTiles, testExpertRuns and testDenseTiles on a GPU.
func TestGPUTiles(t *testing.T) {
	m, b, s := openGPU(t, Options{BatchInvariant: true})
	if !b.hopper {
		t.Skip("needs compute capability 9.0: experts lie by rows before")
	}
	testExpertTiles(t, m, b, s)
	testExpertRuns(t, m, b, s)
	testDenseTiles(t, m, b, s)
}

// TestGPUOlder runs the suite on kernels compiled for compute capability 8.0, as an
// A100 has them; the driver translates them for the GPU that is there.
func TestGPUOlder(t *testing.T) {
	for _, act := range []kernels.DType{kernels.BF16, kernels.F16} {
		t.Run(fmt.Sprint(act), func(t *testing.T) {
			m, b, s := openGPU(t, Options{Activation: act, BatchInvariant: true, Architecture: "compute_80"})
			kernelstest.Run(t, func(*testing.T) (device.Machine, kernels.Backend, device.Stream) {
				return m, b, s
			}, kernelstest.Options{BatchInvariant: true, Seed: *seed})
		})
	}
}

// TestGPUTwice runs the suite twice on the same inputs: all outputs have the same
// bits.
func TestGPUTwice(t *testing.T) {
	m, b, s := openGPU(t, Options{})
	var sums [2][]byte
	for i := range sums {
		h := sha256.New()
		kernelstest.Run(t, func(*testing.T) (device.Machine, kernels.Backend, device.Stream) {
			return m, b, s
		}, kernelstest.Options{Full: *full, Seed: max(*seed, 1), Output: func(test, tensor string, data []byte) {
			fmt.Fprintf(h, "%s %d\n", tensor, len(data))
			h.Write(data)
		}})
		sums[i] = h.Sum(nil)
	}
	if !bytes.Equal(sums[0], sums[1]) {
		t.Errorf("two runs on the same inputs gave %x and %x", sums[0], sums[1])
	}
}

// TestGPUStart times a start with a cold and with a warm cache.
func TestGPUStart(t *testing.T) {
	dir := t.TempDir()
	var took [2]time.Duration
	for i := range took {
		start := time.Now()
		t.Run(fmt.Sprint(i), func(t *testing.T) { openGPU(t, Options{CacheDir: dir}) })
		took[i] = time.Since(start)
	}
	t.Logf("cold %v, warm %v, both with the opening of the device", took[0].Round(time.Millisecond), took[1].Round(time.Millisecond))
	if took[0] > time.Minute {
		t.Errorf("a start without a cache took %v", took[0])
	}
}

func TestNewRefuses(t *testing.T) {
	m, b, s := openGPU(t, Options{})
	if _, err := New(m, device.HBM(7), Options{}); err == nil || !strings.Contains(err.Error(), "no such GPU") {
		t.Errorf("a GPU too many: %v", err)
	}
	if _, err := New(nil, device.HBM(0), Options{}); err == nil || !strings.Contains(err.Error(), "not a machine of package device/cuda") {
		t.Errorf("no machine: %v", err)
	}
	t.Setenv(dylib.Variable, t.TempDir())
	// They may be found in the usual places, or be loaded already.
	again, err := New(m, device.HBM(0), Options{})
	if err == nil {
		err = again.Close()
	}
	if err != nil && !strings.Contains(err.Error(), "pip install") {
		t.Errorf("without libraries: %v", err)
	}
	// The backend that is open works on.
	mem, err := m.Alloc(device.HBM(0), 256, "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Enqueue(s, &kernels.Clamp{X: kernels.New(mem.Range(0, 256).Addr, kernels.BF16, 2, 64), Limit: 1}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(s.Synchronize(t.Context()), mem.Free()); err != nil {
		t.Error(err)
	}
}
