//go:build cuda

package cuda

/*
// These keep no pointer and run no Go code.
#cgo noescape ms_launch
#cgo noescape ms_event_elapsed
#cgo nocallback ms_launch
#cgo nocallback ms_event_query
#cgo nocallback ms_event_elapsed
#cgo nocallback ms_stream_query
#include "glue.h"
*/
import "C"

import (
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
)

// Module is compiled code, loaded on one GPU.
type Module struct {
	g    *gpu
	name string
	mod  cu.Module
}

// LoadModule loads a cubin (as compiled by package nvrtc) on a GPU. name appears in
// errors. Loading may synchronize with the device, so it should be done at startup.
func (m *Machine) LoadModule(space device.Space, name string, cubin []byte) (*Module, error) {
	if err := m.usable("load", space); err != nil {
		return nil, err
	}
	i, ok := space.GPU()
	if !ok || len(cubin) == 0 {
		return nil, badArgument("load", space, "module %q of %d bytes: it takes the space of a GPU, and code", name, len(cubin))
	}
	mod := &Module{g: m.gpus[i], name: name}
	err := mod.g.enter()
	if err == nil {
		mod.mod, err = cu.LoadData(string(cubin))
	}
	mod.g.leave()
	if err != nil {
		return nil, mod.g.fail("load", code(err), fmt.Sprintf("module %q", name))
	}
	return mod, nil
}

// Unload frees the module; its kernels must not be enqueued afterwards.
func (mod *Module) Unload() error {
	err := mod.g.enter()
	if err == nil {
		err = mod.mod.Unload()
	}
	mod.g.leave()
	if err != nil && mod.g.lost.Load() == nil {
		return mod.g.fail("unload", code(err), fmt.Sprintf("module %q", mod.name))
	}
	return nil
}

// Global returns the address range of a global variable of the module.
func (mod *Module) Global(name string) (device.Range, error) {
	var at cu.DevicePtr
	var n int64
	err := mod.g.enter()
	if err == nil {
		at, n, err = mod.mod.Global(name)
	}
	mod.g.leave()
	if err != nil {
		return device.Range{}, mod.g.fail("load", code(err), fmt.Sprintf("module %q has no variable %q", mod.name, name))
	}
	return device.Range{Addr: device.Addr(at), Bytes: n}, nil
}

// Function is a kernel of a module.
type Function struct {
	g      *gpu
	name   string
	handle C.CUfunction
	// limits are checked at every launch.
	limits Limits
}

// Limits are the resources of a compiled kernel on one device.
type Limits struct {
	// Threads is the maximum number of threads of a block.
	Threads int
	// Registers is the number of registers per thread.
	Registers int
	// SharedBytes is the static shared memory per block, LocalBytes the local memory per
	// thread. DynamicBytes is the maximum dynamic shared memory of a launch.
	SharedBytes, LocalBytes, DynamicBytes int
}

// Function returns a kernel by its compiled name (extern "C" keeps the name of the
// source).
func (mod *Module) Function(name string) (*Function, error) {
	var fn cu.Function
	err := mod.g.enter()
	if err == nil {
		fn, err = mod.mod.Function(name)
	}
	mod.g.leave()
	if err != nil {
		return nil, mod.g.fail("load", code(err), fmt.Sprintf("module %q has no kernel %q", mod.name, name))
	}
	f := &Function{g: mod.g, name: name, handle: *(*C.CUfunction)(unsafe.Pointer(&fn))}
	for _, a := range []struct {
		attribute C.int
		to        *int
	}{
		{C.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &f.limits.Threads},
		{C.CU_FUNC_ATTRIBUTE_NUM_REGS, &f.limits.Registers},
		{C.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &f.limits.SharedBytes},
		{C.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &f.limits.LocalBytes},
		{C.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &f.limits.DynamicBytes},
	} {
		var v C.int
		if c := C.ms_function_attribute(f.g.context(), f.handle, a.attribute, &v); c != success {
			return nil, f.g.fail("load", int(c), fmt.Sprintf("kernel %q", name))
		}
		*a.to = int(v)
	}
	return f, nil
}

// Name returns the kernel's name.
func (f *Function) Name() string { return f.name }

// Limits returns the limits of a launch.
func (f *Function) Limits() Limits { return f.limits }

// AllowDynamicShared allows launches up to n bytes of dynamic shared memory; the default
// limit is 48 KiB less the static shared memory.
func (f *Function) AllowDynamicShared(n int) error {
	if n <= f.limits.DynamicBytes {
		return nil
	}
	if n > math.MaxInt32 {
		return badArgument("load", f.g.space, "kernel %q: %d bytes of shared memory", f.name, n)
	}
	if c := C.ms_set_function_attribute(f.g.context(), f.handle, C.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, C.int(n)); c != success {
		return f.g.fail("load", int(c), fmt.Sprintf("kernel %q: %d bytes of dynamic shared memory; the device allows a block %d in all", f.name, n, f.g.facts.sharedBytes))
	}
	f.limits.DynamicBytes = n
	return nil
}

// PreferShared sets the kernel's preferred shared memory carveout to the maximum, even if
// the kernel needs little. A multiprocessor with a smaller carveout runs no block of a
// kernel that needs more until it is idle, so overlapping kernels should use the same one.
func (f *Function) PreferShared() error {
	if c := C.ms_set_function_attribute(f.g.context(), f.handle, C.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, C.CU_SHAREDMEM_CARVEOUT_MAX_SHARED); c != success {
		return f.g.fail("load", int(c), fmt.Sprintf("kernel %q: all memory as shared memory", f.name))
	}
	return nil
}

// Grid is the shape of a launch. A zero counts as 1.
type Grid struct {
	// Blocks in x, y and z, and threads of a block likewise.
	Blocks, Threads [3]int
	// SharedBytes is the dynamic shared memory of a block.
	SharedBytes int
	// Overlap (programmatic dependent launch) states that the kernel executes
	// griddepcontrol.wait before it ends, before it reads what a preceding kernel may still
	// write, and before it writes what a preceding kernel may still access. If
	// the stream's previous operation is also a launch with Overlap, the kernel's blocks
	// may start once all blocks of the previous kernel have executed
	// griddepcontrol.launch_dependents or exited. Overlap has no effect below compute
	// capability 9.0.
	Overlap bool
}

// Args are the arguments of a stream's next launch, in the order and of the types of the
// kernel's parameters. They are stored in memory that the stream owns, so adding arguments
// and launching allocate nothing. Adding more than MaxArgs arguments, or more than
// MaxArgBytes bytes, panics.
type Args struct{ block *C.ms_arguments }

// MaxArgBytes is the maximum size of the arguments of one launch, MaxArgs their maximum
// number.
const (
	MaxArgBytes = C.MS_ARGUMENT_BYTES
	MaxArgs     = C.MS_ARGUMENTS
)

// Args empties the stream's argument block and returns it, to be filled for the
// next Launch.
func (s *Stream) Args() *Args {
	s.args.block.bytes, s.args.block.count = 0, 0
	return &s.args
}

func (a *Args) place(n, align int) unsafe.Pointer {
	at := (int(a.block.bytes) + align - 1) &^ (align - 1)
	if at+n > MaxArgBytes || a.block.count == MaxArgs {
		panic(fmt.Sprintf("cuda: the arguments of a launch exceed %d, or %d bytes", MaxArgs, MaxArgBytes))
	}
	p := unsafe.Pointer(&a.block.data[at])
	a.block.at[a.block.count] = p
	a.block.bytes = C.size_t(at + n)
	a.block.count++
	return p
}

// Addr adds a pointer.
func (a *Args) Addr(v device.Addr) *Args { return a.U64(uint64(v)) }

// U64 adds a 64-bit number.
func (a *Args) U64(v uint64) *Args { *(*uint64)(a.place(8, 8)) = v; return a }

// I64 adds a 64-bit number.
func (a *Args) I64(v int64) *Args { return a.U64(uint64(v)) }

// U32 adds a 32-bit number.
func (a *Args) U32(v uint32) *Args { *(*uint32)(a.place(4, 4)) = v; return a }

// I32 adds a 32-bit number.
func (a *Args) I32(v int32) *Args { return a.U32(uint32(v)) }

// F32 adds a float.
func (a *Args) F32(v float32) *Args { return a.U32(math.Float32bits(v)) }

// Bytes adds a struct whose alignment is align bytes, a power of two.
func (a *Args) Bytes(v []byte, align int) *Args {
	copy(unsafe.Slice((*byte)(a.place(len(v), align)), len(v)), v)
	return a
}

// Launch enqueues a kernel with the arguments that Args was filled with.
func (s *Stream) Launch(f *Function, d Grid) error {
	if err := s.usable("launch"); err != nil {
		return err
	}
	if f.g != s.g {
		return badArgument("launch", s.g.space, "kernel %q was loaded on %s, and %s is not of it", f.name, f.g.space, s)
	}
	var shape C.ms_shape
	for i := range 3 {
		shape.grid[i], shape.block[i] = C.uint(max(d.Blocks[i], 1)), C.uint(max(d.Threads[i], 1))
	}
	shape.shared = C.uint(d.SharedBytes)
	threads := int64(shape.block[0]) * int64(shape.block[1]) * int64(shape.block[2])
	if threads > int64(f.limits.Threads) || d.SharedBytes < 0 || d.SharedBytes > f.limits.DynamicBytes {
		return badArgument("launch", s.g.space, "kernel %q with %d threads and %d bytes of shared memory a block: %d and %d are the most (see AllowDynamicShared)",
			f.name, threads, d.SharedBytes, f.limits.Threads, f.limits.DynamicBytes)
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if d.Overlap {
		if s.overlaps(op) {
			shape.overlap = 1
		}
		s.overlapping = op
	}
	if s.begins(launchOperation) {
		defer s.m.endEnqueuing()
	}
	if c := C.ms_launch(s.g.context(), f.handle, streamHandle(s.s), shape, s.args.block); c != success {
		return s.refused(op, "launch", int(c), fmt.Sprintf("kernel %q, blocks %v of %v threads", f.name, d.Blocks, d.Threads))
	}
	return nil
}

// overlaps reports whether operation op, a launch with Overlap, immediately follows another
// one. In such a sequence, everything before the first launch has completed when any of
// them starts.
func (s *Stream) overlaps(op uint64) bool {
	return s.g.facts.capability >= overlapCapability && s.overlapping != 0 && s.overlapping == op-1
}

// overlapCapability is the minimum compute capability for Overlap.
const overlapCapability = 90

// Do runs f, locked to its thread, with the stream's context current, for libraries that
// enqueue on Stream.Handle. If the stream is in error, Do does not run f. An error of f
// puts the stream into error, and Do returns it as a *device.Error.
func (s *Stream) Do(name string, f func() error) error {
	if err := s.usable("launch"); err != nil {
		return err
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if err := s.g.enter(); err != nil {
		s.g.leave()
		return s.refused(op, "launch", code(err), name)
	}
	err := f()
	s.g.leave()
	if err != nil {
		// The error may be the first sign that the context is lost.
		s.g.probe()
		e := &device.Error{Op: "launch", Space: s.g.space, Detail: fmt.Sprintf("%s: %q", s, name), Err: err}
		if lost := s.g.lostError("launch", e.Detail); lost != nil {
			e = lost
		}
		s.epoch.fail(op, e)
		return e
	}
	return nil
}

// Handle returns the driver's CUstream, for libraries.
func (s *Stream) Handle() uintptr { return uintptr(unsafe.Pointer(streamHandle(s.s))) }

// Machine returns the stream's machine.
// ---
func (s *Stream) Machine() *Machine { return s.m }
