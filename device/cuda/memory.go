//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
)

const (
	hugePage = 2 << 20
	// smallBytes is the size below which host memory is allocated by cuMemHostAlloc:
	// mapping and pinning it ourselves pays off only with many pages to touch.
	smallBytes = 4 << 20
)

// memory is one allocation. Its fields do not change until it is freed, but for suspended.
type memory struct {
	m       *Machine
	space   device.Space
	label   string
	base    device.Addr
	bytes   int64
	rounded int64
	// g is the GPU that holds the memory, nil for host memory.
	g *gpu
	// data is the host's view of host memory; mapping is the mmap behind it, nil if the
	// driver allocated the memory.
	data, mapping []byte
	freed         atomic.Bool
	// suspended memory has addresses, and nothing behind them. The owner's calls guard it.
	suspended atomic.Bool
}

var _ device.Memory = (*memory)(nil)

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// Alloc implements device.Machine.
func (m *Machine) Alloc(space device.Space, bytes int64, label string) (device.Memory, error) {
	if err := m.usable("alloc", space); err != nil {
		return nil, err
	}
	if bytes <= 0 {
		return nil, badArgument("alloc", space, "%q, %d bytes requested; ask for more than 0", label, bytes)
	}
	mem := &memory{m: m, space: space, label: label, bytes: bytes}
	var err error
	if space == device.Host {
		err = mem.allocHost()
	} else {
		err = mem.allocDevice()
	}
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	closed := m.closed.Load()
	if !closed {
		m.memory.add(mem)
		mem.account().add(mem.rounded)
	}
	m.mu.Unlock()
	if closed {
		return nil, errors.Join(closedError("alloc", space, "the machine"), mem.release())
	}
	return mem, nil
}

// SpaceOf implements device.Machine.
func (m *Machine) SpaceOf(a device.Addr) (device.Space, bool) {
	mem := m.memory.find(device.Range{Addr: a, Bytes: 1})
	if mem == nil {
		return 0, false
	}
	return mem.space, true
}

// KernelAddr implements device.Machine. Pinned memory is mapped for all devices when it is
// allocated, and a GPU's memory for the peers that have access to it.
func (m *Machine) KernelAddr(reader device.Space, r device.Range) (device.Addr, error) {
	if err := m.usable("map", reader); err != nil {
		return 0, err
	}
	i, gpu := reader.GPU()
	mem := m.memory.find(r)
	if !gpu || mem == nil {
		return 0, badArgument("map", reader, "%v is in no live allocation, or %s has no kernels", r, reader)
	}
	g := m.gpus[i]
	refused := func(c int) error {
		e := &device.Error{Op: "map", Space: reader, Detail: fmt.Sprintf("%q on %s", mem.label, mem.space), Err: device.ErrUnreachable}
		if c != success {
			e.Code, e.Name = c, errorName(c)
		}
		return e
	}
	if mem.g != nil {
		if mem.g != g && !slices.Contains(mem.g.access, C.int(g.dev)) {
			return 0, refused(success)
		}
		return r.Addr, nil
	}
	var at C.CUdeviceptr
	if c := C.ms_host_address(g.context(), unsafe.Pointer(unsafe.SliceData(mem.data)), &at); c != success {
		return 0, refused(int(c))
	}
	return device.Addr(at) + r.Addr - mem.base, nil
}

// account returns the account that mem counts toward; Machine.mu guards it.
func (mem *memory) account() *account {
	if mem.g != nil {
		return &mem.g.account
	}
	return &mem.m.host
}

// allocError returns the error of an allocation that does not fit: the driver returned c,
// or why is the cause.
func (mem *memory) allocError(op string, c int, why error) error {
	detail := fmt.Sprintf("%q, %d bytes requested", mem.label, mem.bytes)
	if u, err := mem.m.Usage(mem.space); err == nil {
		detail += fmt.Sprintf(", %d free of %d (%d used by other processes)", max(u.Free(), 0), u.Capacity, u.OtherProcesses)
	}
	if why != nil {
		detail += "; " + why.Error()
	}
	e := &device.Error{Op: op, Space: mem.space, Detail: detail, Err: device.ErrOutOfMemory}
	if c != success {
		e.Code, e.Name = c, errorName(c)
	}
	return e
}

func (mem *memory) allocDevice() error {
	i, _ := mem.space.GPU()
	g := mem.m.gpus[i]
	mem.g = g
	if mem.bytes > g.facts.memoryBytes {
		// More than the device has: rounding and reserving such sizes could overflow.
		return mem.allocError("alloc", success, nil)
	}
	mem.rounded = roundUp(mem.bytes, g.granularity)
	var at C.CUdeviceptr
	c := C.ms_device_alloc(g.context(), C.int(g.dev), C.size_t(mem.rounded), &g.access[0], C.int(len(g.access)), &at)
	switch c {
	case success:
		mem.base = device.Addr(at)
		return nil
	case outOfMemory:
		return mem.allocError("alloc", int(c), nil)
	}
	return g.fail("alloc", int(c), fmt.Sprintf("%q, %d bytes requested", mem.label, mem.bytes))
}

func (mem *memory) allocHost() error {
	if u, err := mem.m.Usage(device.Host); err != nil || mem.bytes > u.Free() {
		// The operating system would not refuse the mapping; it would kill the process when
		// the pages are touched.
		return mem.allocError("alloc", success, err)
	}
	g := mem.m.anyGPU()
	mem.rounded = roundUp(mem.bytes, int64(os.Getpagesize()))
	var p unsafe.Pointer
	var c C.CUresult
	if mem.bytes < smallBytes || !mem.m.registers {
		c = C.ms_host_alloc(g.context(), C.size_t(mem.rounded), &p)
	} else {
		all, err := mapHost(mem.rounded, mem.m.o.TouchThreads, room)
		if err != nil {
			return mem.allocError("alloc", success, err)
		}
		mem.mapping, p = all, unsafe.Pointer(unsafe.SliceData(all))
		c = mem.register()
	}
	if c != success {
		_ = mem.unmap()
		if c == outOfMemory {
			return mem.allocError("alloc", int(c), nil)
		}
		return g.fail("alloc", int(c), fmt.Sprintf("%q, %d bytes of pinned host memory requested", mem.label, mem.bytes))
	}
	mem.base = device.Addr(uintptr(p))
	mem.data = unsafe.Slice((*byte)(p), mem.bytes)
	return nil
}

const (
	// touchBytes are paged in at a time, after a check of the available memory.
	touchBytes = 1 << 30
	// spareBytes are left to other processes.
	spareBytes = 256 << 20
	// growPatience is the maximum wait for a virtual machine to receive more memory.
	growPatience = 5 * time.Second
)

// mapHost maps bytes of memory in huge pages and pages them in with parallel threads, each
// on its own range. room reports whether a number of bytes is available.
func mapHost(bytes int64, threads int, room func(int64) bool) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	// Huge pages are only an optimization; a kernel without them refuses harmlessly.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if err := pageIn(b, threads, room); err != nil {
		return nil, errors.Join(err, unix.Munmap(b))
	}
	return b, nil
}

// pageIn pages mapped memory in, as mapHost does.
func pageIn(b []byte, threads int, room func(int64) bool) error {
	for rest := b; len(rest) > 0; {
		part := rest[:min(touchBytes, len(rest))]
		rest = rest[len(part):]
		if !room(int64(len(part))) {
			return fmt.Errorf("%d of %d bytes were paged in before the system ran out of memory", len(b)-len(rest)-len(part), len(b))
		}
		touch(part, threads)
	}
	return nil
}

// register pins mapped memory.
func (mem *memory) register() C.CUresult {
	return C.ms_host_register(mem.m.anyGPU().context(), unsafe.Pointer(unsafe.SliceData(mem.mapping)), C.size_t(len(mem.mapping)))
}

// room waits up to growPatience until bytes plus spareBytes are available, and reports
// whether they are.
func room(bytes int64) bool {
	root := os.DirFS("/")
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, available := hostMemory(root); available >= bytes+spareBytes {
			return true
		}
		if time.Since(begin) > growPatience {
			return false
		}
	}
}

func touch(b []byte, threads int) {
	share := int(roundUp(int64((len(b)+threads-1)/threads), hugePage))
	var wg sync.WaitGroup
	for len(b) > 0 {
		part := b[:min(share, len(b))]
		b = b[len(part):]
		wg.Go(func() {
			C.ms_touch((*C.uchar)(unsafe.Pointer(unsafe.SliceData(part))), C.size_t(len(part)), C.size_t(os.Getpagesize()))
		})
	}
	wg.Wait()
}

func (mem *memory) unmap() error {
	if mem.mapping == nil {
		return nil
	}
	b := mem.mapping
	mem.mapping = nil
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("unmap %d bytes: %w", len(b), err)
	}
	return nil
}

// release returns the memory to the driver.
func (mem *memory) release() error {
	if mem.g != nil {
		mapped := C.int(1)
		if mem.suspended.Load() {
			mapped = 0
		}
		c := C.ms_device_free(mem.g.context(), C.CUdeviceptr(mem.base), C.size_t(mem.rounded), mapped)
		// A lost device has no memory left to release.
		if c == success || mem.g.lost.Load() != nil {
			return nil
		}
		return mem.g.fail("free", int(c), fmt.Sprintf("%q", mem.label))
	}
	if !mem.suspended.Load() {
		if err := mem.unpin("free"); err != nil {
			return err
		}
	}
	return mem.unmap()
}

// unpin has devices no longer access host memory.
func (mem *memory) unpin(op string) error {
	g := mem.m.anyGPU()
	p := unsafe.Pointer(unsafe.SliceData(mem.data))
	var c C.CUresult
	if mem.mapping != nil {
		c = C.ms_host_unregister(g.context(), p)
	} else {
		c = C.ms_host_free(g.context(), p)
	}
	if c != success && g.lost.Load() == nil {
		// The memory is still pinned: if it were unmapped, devices could write to pages
		// that have a new owner.
		return g.fail(op, int(c), fmt.Sprintf("%q", mem.label))
	}
	return nil
}

// Space implements device.Memory.
func (mem *memory) Space() device.Space { return mem.space }

// Bytes implements device.Memory.
func (mem *memory) Bytes() int64 { return mem.bytes }

// Range implements device.Memory.
func (mem *memory) Range(off, n int64) device.Range {
	if off < 0 || n < 0 || off > mem.bytes-n {
		panic(fmt.Sprintf("cuda: [%d, %d) is outside of memory %q of %d bytes", off, off+n, mem.label, mem.bytes))
	}
	return device.Range{Addr: mem.base + device.Addr(off), Bytes: n}
}

// Region implements device.Memory.
func (mem *memory) Region(off, n int64) device.Region {
	return device.Region{Space: mem.space, Range: mem.Range(off, n)}
}

// Read implements device.Memory.
func (mem *memory) Read(off, n int64) []byte { return mem.view(off, n) }

// Write implements device.Memory.
func (mem *memory) Write(off, n int64) []byte { return mem.view(off, n) }

func (mem *memory) view(off, n int64) []byte {
	mem.Range(off, n)
	if mem.space != device.Host {
		panic(fmt.Sprintf("cuda: memory %q is on %s, which the host cannot access: copy it to host memory first", mem.label, mem.space))
	}
	if mem.freed.Load() {
		panic(fmt.Sprintf("cuda: host access to memory %q after it was freed", mem.label))
	}
	if mem.suspended.Load() {
		panic(fmt.Sprintf("cuda: host access to memory %q while it is suspended", mem.label))
	}
	return mem.data[off : off+n : off+n]
}

// Suspend implements device.Memory.
func (mem *memory) Suspend() error {
	m := mem.m
	if mem.freed.Load() {
		return closedError("suspend", mem.space, fmt.Sprintf("%q was freed before", mem.label))
	}
	if mem.g == nil && mem.mapping == nil || !mem.suspended.CompareAndSwap(false, true) {
		return nil // what the driver itself has mapped keeps its addresses only while it is allocated
	}
	m.mu.Lock()
	m.memory.remove(mem)
	m.suspended[mem] = struct{}{}
	mem.account().add(-mem.rounded)
	m.mu.Unlock()
	if err := mem.giveBack(); err != nil {
		mem.awake() // it is still mapped, and pinned: a Resume must not get memory for it again
		return err
	}
	if mem.g != nil {
		return nil
	}
	if err := unix.Madvise(mem.mapping, unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("cuda: drop the pages of suspended %q: %w", mem.label, err)
	}
	return nil
}

// giveBack unmaps device memory, and unpins host memory.
func (mem *memory) giveBack() error {
	if mem.g == nil {
		return mem.unpin("suspend")
	}
	c := C.ms_device_unmap(mem.g.context(), C.CUdeviceptr(mem.base), C.size_t(mem.rounded))
	if c == success || mem.g.lost.Load() != nil {
		return nil
	}
	return mem.g.fail("suspend", int(c), fmt.Sprintf("%q", mem.label))
}

// awake takes memory that is there into the account again.
func (mem *memory) awake() {
	m := mem.m
	m.mu.Lock()
	defer m.mu.Unlock()
	mem.suspended.Store(false)
	delete(m.suspended, mem)
	m.memory.add(mem)
	mem.account().add(mem.rounded)
}

// Resume implements device.Memory.
func (mem *memory) Resume() error {
	m := mem.m
	if mem.freed.Load() {
		return closedError("resume", mem.space, fmt.Sprintf("%q was freed before", mem.label))
	}
	if !mem.suspended.Load() {
		return nil
	}
	if err := m.usable("resume", mem.space); err != nil {
		return err
	}
	var err error
	if mem.g != nil {
		err = mem.mapAgain()
	} else {
		err = mem.pinAgain()
	}
	if err != nil {
		return err
	}
	mem.awake()
	return nil
}

// mapAgain gets device memory for the addresses.
func (mem *memory) mapAgain() error {
	g := mem.g
	switch c := C.ms_device_map(g.context(), C.int(g.dev), C.size_t(mem.rounded), &g.access[0], C.int(len(g.access)), C.CUdeviceptr(mem.base)); c {
	case success:
		return nil
	case outOfMemory:
		return mem.allocError("resume", int(c), nil)
	default:
		return g.fail("resume", int(c), fmt.Sprintf("%q, %d bytes requested", mem.label, mem.bytes))
	}
}

// pinAgain gets pinned memory for the addresses.
func (mem *memory) pinAgain() error {
	if u, err := mem.m.Usage(device.Host); err != nil || mem.bytes > u.Free() {
		return mem.allocError("resume", success, err)
	}
	err := pageIn(mem.mapping, mem.m.o.TouchThreads, room)
	if err == nil {
		switch c := mem.register(); c {
		case success:
			return nil
		case outOfMemory:
			err = mem.allocError("resume", int(c), nil)
		default:
			err = mem.m.anyGPU().fail("resume", int(c), fmt.Sprintf("%q, %d bytes of pinned host memory requested", mem.label, mem.bytes))
		}
	} else {
		err = mem.allocError("resume", success, err)
	}
	return errors.Join(err, unix.Madvise(mem.mapping, unix.MADV_DONTNEED))
}

// Free implements device.Memory.
func (mem *memory) Free() error {
	m := mem.m
	m.mu.Lock()
	if !mem.freed.CompareAndSwap(false, true) {
		m.mu.Unlock()
		return closedError("free", mem.space, fmt.Sprintf("%q was freed before", mem.label))
	}
	if mem.suspended.Load() {
		delete(m.suspended, mem)
	} else {
		m.memory.remove(mem)
		mem.account().add(-mem.rounded)
	}
	m.mu.Unlock()
	return mem.release()
}

// Usage implements device.Machine.
func (m *Machine) Usage(space device.Space) (device.Usage, error) {
	if err := m.usable("usage", space); err != nil {
		return device.Usage{}, err
	}
	if space == device.Host {
		// Other processes hold the part of total that is neither available nor allocated here.
		// ---
		total, available := hostMemory(os.DirFS("/"))
		m.mu.Lock()
		defer m.mu.Unlock()
		u := usage(total, available, m.host)
		u.Capacity = m.topo.Host.MemoryBytes
		return u, nil
	}
	i, _ := space.GPU()
	g := m.gpus[i]
	err := g.enter()
	var free int64
	if err == nil {
		free, _, err = cu.MemInfo()
	}
	g.leave()
	if err != nil {
		return device.Usage{}, g.fail("usage", code(err), "")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return usage(g.facts.memoryBytes, free, g.account), nil
}

func usage(capacity, free int64, a account) device.Usage {
	return device.Usage{Capacity: capacity, Allocated: a.allocated, Peak: a.peak, OtherProcesses: max(0, capacity-free-a.allocated)}
}
