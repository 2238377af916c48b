//go:build cuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/cuda/dylib"
	"github.com/moeserve/moeserve/device/cuda/nvrtc"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cuda/internal/cublaslt"
)

// minComputeCapability is the lowest supported compute capability, major*10+minor: it has
// bfloat16 tensor cores and cp.async.
const minComputeCapability = 80

// gpuRunner is a runner on a GPU. All streams share its functions and its library handle.
type gpuRunner struct {
	m         *cuda.Machine
	space     device.Space
	half      bool
	overlap   bool // kernels themselves wait for preceding ones
	modules   []*cuda.Module
	functions [kernelCount]*cuda.Function
	library   *cublaslt.Handle // nil with Options.BatchInvariant
}

// New returns a backend for a GPU of machine, which is of device/cuda. It compiles the kernels
// or loads them from its cache; compiling takes seconds. An error reports what to install, or
// which file does not compile.
func New(machine device.Machine, space device.Space, o Options) (*Backend, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	m, ok := machine.(*cuda.Machine)
	if !ok {
		return nil, fmt.Errorf("cuda: backend of %v: %T is not a machine of package device/cuda", space, machine)
	}
	info, ok := m.Topology().Info(space)
	if _, gpu := space.GPU(); !ok || !gpu {
		return nil, fmt.Errorf("cuda: backend of %v: the machine has no such GPU", space)
	}
	if info.ComputeCapability < minComputeCapability {
		return nil, fmt.Errorf("cuda: backend of %v (%s): compute capability %d.%d, and kernels need %d.%d or later", space, info.Name,
			info.ComputeCapability/10, info.ComputeCapability%10, minComputeCapability/10, minComputeCapability%10)
	}
	folders := dylib.Folders()
	arch := o.Architecture
	if arch == "" {
		arch = nvrtc.Arch(info.ComputeCapability)
	}
	r := &gpuRunner{m: m, space: space, half: o.Activation == kernels.F16, overlap: !o.Serial && supportsOverlap(arch)}
	err := r.load(o, arch, folders)
	if err == nil && !o.BatchInvariant {
		err = r.openLibrary(device.Align(o.WorkspaceBytes), folders)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cuda: backend of %v: %w", space, err), r.close())
	}
	b, err := newBackend(m, space, o, r)
	if err == nil {
		b.hopper, b.largeSmem = arch == hopper, arch == hopper
	}
	return b, err
}

// supportsOverlap reports whether kernels compiled for an architecture wait for preceding ones
// themselves, so that they may be launched to overlap.
func supportsOverlap(arch string) bool {
	_, digits, _ := strings.Cut(strings.TrimRight(arch, "af"), "_")
	n, err := strconv.Atoi(digits)
	return err == nil && n >= 90
}

// load compiles and loads every kernel of the architecture.
func (r *gpuRunner) load(o Options, arch string, folders []string) error {
	compiler, err := nvrtc.Open(folders, r.m.DriverVersion()/1000)
	if err != nil {
		return err
	}
	cache := nvrtc.Cache{Dir: o.CacheDir}
	if cache.Dir == "" {
		// Without a cache directory, kernels are compiled each time.
		if dir, err := os.UserCacheDir(); err == nil {
			cache.Dir = filepath.Join(dir, "moeserve", "cubin")
		}
	}
	cubins := make([][]byte, len(files))
	var group errgroup.Group
	for i, file := range files {
		if !builtFor(file, arch) {
			continue
		}
		group.Go(func() (err error) {
			cubins[i], _, err = compiler.Cached(cache, compilationUnit(file, o.Activation), arch)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	modules := make(map[string]*cuda.Module)
	for i, file := range files {
		if cubins[i] == nil {
			continue
		}
		mod, err := r.m.LoadModule(r.space, file, cubins[i])
		if err != nil {
			return err
		}
		r.modules = append(r.modules, mod)
		modules[file] = mod
	}
	for i, k := range table {
		if modules[k.file] == nil || !builtFor(k.name, arch) {
			continue
		}
		f, err := modules[k.file].Function(k.name)
		if err == nil {
			err = f.AllowDynamicShared(k.shared)
		}
		if err == nil && r.overlap {
			err = f.PreferShared()
		}
		if err != nil {
			return err
		}
		r.functions[i] = f
	}
	return nil
}

// files are the compilation units.
var files = []string{"elementwise.cu", "route.cu", "sample.cu", "gemm.cu", "attention.cu", "few.cu", "copy.cu", "expert.cu", "dense.cu", "prompt.cu"}

// builtFor reports whether a unit, or a kernel, is built for an architecture.
func builtFor(name, arch string) bool { return onlyFor[name] == "" || onlyFor[name] == arch }

// compilationUnit returns the NVRTC source of one of files.
func compilationUnit(file string, act kernels.DType) nvrtc.Source {
	s := nvrtc.Source{Name: file, Text: source(file)}
	if act == kernels.F16 {
		s.Options = []string{"-DACT_F16"}
	}
	return s
}

// do runs f with the GPU's context current.
func (r *gpuRunner) do(name string, f func() error) error {
	s, err := r.m.NewStream(r.space, device.StreamOptions{Name: name})
	if err != nil {
		return err
	}
	return errors.Join(s.(*cuda.Stream).Do(name, f), s.Synchronize(context.Background()), s.Close())
}

func (r *gpuRunner) openLibrary(work int64, folders []string) error {
	library, err := cublaslt.Open(folders, r.m.DriverVersion()/1000)
	if err != nil {
		return fmt.Errorf("%w (with Options.BatchInvariant it is not needed)", err)
	}
	return r.do("cuBLASLt", func() (err error) {
		r.library, err = library.NewHandle(work)
		return err
	})
}

func gpuStream(s device.Stream) (*cuda.Stream, error) {
	if st, ok := s.(*cuda.Stream); ok {
		return st, nil
	}
	return nil, fmt.Errorf("stream %q of %v is not a stream of a GPU", s.Name(), s.Space())
}

func (r *gpuRunner) launch(s device.Stream, k kernelID, g grid, args []byte) error {
	st, err := gpuStream(s)
	if err != nil {
		return err
	}
	st.Args().Bytes(args, 8)
	return st.Launch(r.functions[k], cuda.Grid{Blocks: [3]int{g.x, g.y, g.z}, Threads: [3]int{g.threads}, SharedBytes: g.shared, Overlap: r.overlap && !g.noOverlap})
}

func (r *gpuRunner) matmul(s device.Stream, work device.Range, p *libraryGEMM) (bool, error) {
	if r.library == nil {
		return false, nil
	}
	st, err := gpuStream(s)
	if err != nil {
		return false, err
	}
	done := false
	err = st.Do("matmul", func() (err error) {
		done, err = r.library.MatMul(st.Handle(), uint64(work.Addr), &cublaslt.Product{
			X: uint64(p.x), W: uint64(p.w), Bias: uint64(p.bias), Out: uint64(p.out),
			Rows: p.rows, Columns: p.columns, Inner: p.inner, XStride: p.xStride, OutStride: p.outStride,
			Half: r.half, OutFloat: p.outFloat,
		})
		return err
	})
	return done, err
}

func (r *gpuRunner) mapTiles(to *tensorMap, of *tileMap) error {
	m, err := r.m.MapTiles(r.space, of.at, of.rows, of.columns, 2*int64(of.stride), of.tileRows)
	*to = tensorMap(m)
	return err
}

func (r *gpuRunner) close() error {
	var errs []error
	if r.library != nil {
		errs = append(errs, r.do("cuBLASLt", r.library.Close))
	}
	for _, mod := range r.modules {
		errs = append(errs, mod.Unload())
	}
	return errors.Join(errs...)
}
