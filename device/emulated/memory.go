package emulated

import (
	"fmt"
	"slices"
	"sort"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
)

const (
	// hugeBytes is the minimum mapping size for which huge pages are requested.
	hugeBytes = 4 << 20
	// poisonBytes is the maximum allocation size that a checked machine fills with poison,
	// bytes that are NaN in every floating-point type.
	poisonBytes = 16 << 20
	poison      = 0xff
	// maxFreed is the number of freed allocations whose addresses a checked machine
	// reserves, to name them in findings.
	maxFreed = 4096
)

// memory is one allocation with its own mapping, between two guard pages on a checked
// machine. Machine.mu guards its fields; data, base and bytes do not change while it is
// allocated.
type memory struct {
	m       *Machine
	space   *space
	label   string
	base    device.Addr
	bytes   int64
	rounded int64
	// mapping is the whole mapping, data the part in use.
	mapping, data []byte
	free          bool
	// suspended memory is in index.suspended, and its pages are inaccessible.
	suspended bool
	// users counts the queued and running operations known to access the memory.
	users  int
	shadow *shadow
}

// index finds allocations by address.
type index struct {
	// live is sorted by base.
	live []*memory
	// freed holds freed allocations, still mapped but inaccessible, on a checked machine;
	// oldest first.
	freed []*memory
	// suspended allocations are still mapped but inaccessible.
	suspended []*memory
}

// at returns the position of the first allocation that ends after a.
func (x *index) at(a device.Addr) int {
	return sort.Search(len(x.live), func(i int) bool { return x.live[i].base+device.Addr(x.live[i].bytes) > a })
}

// find returns the allocation that contains all of r, or nil.
func (x *index) find(r device.Range) *memory {
	i := x.at(r.Addr)
	if i == len(x.live) || r.Bytes < 0 {
		return nil
	}
	if mem := x.live[i]; mem.base <= r.Addr && int64(r.Addr-mem.base)+r.Bytes <= mem.bytes {
		return mem
	}
	return nil
}

// findFreed returns the freed or suspended allocation that contained a, or nil.
func (x *index) findFreed(a device.Addr) *memory {
	for _, list := range [][]*memory{x.suspended, x.freed} {
		for i := len(list) - 1; i >= 0; i-- {
			if mem := list[i]; mem.base <= a && a < mem.base+device.Addr(mem.bytes) {
				return mem
			}
		}
	}
	return nil
}

func (x *index) add(mem *memory) {
	i := x.at(mem.base)
	x.live = append(x.live, nil)
	copy(x.live[i+1:], x.live[i:])
	x.live[i] = mem
}

func (x *index) remove(mem *memory) {
	i := x.at(mem.base)
	x.live = append(x.live[:i], x.live[i+1:]...)
}

// Alloc implements device.Machine.
func (m *Machine) Alloc(s device.Space, bytes int64, label string) (device.Memory, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	sp, err := m.space("alloc", s)
	if err != nil {
		return nil, err
	}
	if bytes <= 0 {
		return nil, &device.Error{Op: "alloc", Space: s, Detail: fmt.Sprintf("%q, %d bytes requested; ask for more than 0", label, bytes)}
	}
	mem := &memory{m: m, space: sp, label: label, bytes: bytes, rounded: device.Align(bytes)}
	detail, err := mem.room("alloc")
	if err != nil {
		return nil, err
	}
	if err := mem.mmap(); err != nil {
		return nil, &device.Error{Op: "alloc", Space: s, Detail: detail + "; the system refused: " + err.Error(), Err: device.ErrOutOfMemory}
	}
	mem.live()
	return mem, nil
}

// room returns an error unless the space has free memory for the allocation, and otherwise what
// errors say of it.
func (mem *memory) room(op string) (detail string, err error) {
	sp := mem.space
	detail = fmt.Sprintf("%q, %d bytes requested", mem.label, mem.bytes)
	if sp.lost {
		return detail, sp.lostErr(op, detail)
	}
	free := max(sp.usage.Free(), 0)
	detail += fmt.Sprintf(", %d free of %d", free, sp.usage.Capacity)
	if sp.usage.OtherProcesses > 0 {
		detail += fmt.Sprintf(" (%d used by other processes)", sp.usage.OtherProcesses)
	}
	if mem.bytes > free || device.Align(mem.bytes) > free {
		return detail, &device.Error{Op: op, Space: sp.id, Detail: detail, Err: device.ErrOutOfMemory}
	}
	if f := mem.m.fault(Point{Kind: RefuseAlloc, Space: sp.id, Label: mem.label, Bytes: mem.bytes}); f != nil {
		return detail, &device.Error{Op: op, Space: sp.id, Detail: detail + "; refused by fault injection", Err: f.cause(device.ErrOutOfMemory)}
	}
	return detail, nil
}

// live adds the allocation to the account and to the index.
func (mem *memory) live() {
	u := &mem.space.usage
	u.Allocated += mem.rounded
	u.Peak = max(u.Peak, u.Allocated)
	mem.m.memory.add(mem)
	if mem.m.check != nil {
		mem.shadow = newShadow(mem.bytes)
	}
}

// SpaceOf implements device.Machine.
func (m *Machine) SpaceOf(a device.Addr) (device.Space, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mem := m.memory.find(device.Range{Addr: a, Bytes: 1})
	if mem == nil {
		return 0, false
	}
	return mem.space.id, true
}

// KernelAddr implements device.Machine: all memory is this process's.
func (m *Machine) KernelAddr(reader device.Space, r device.Range) (device.Addr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.space("map", reader); err != nil {
		return 0, err
	}
	_, gpu := reader.GPU()
	mem := m.memory.find(r)
	if !gpu || mem == nil {
		return 0, &device.Error{Op: "map", Space: reader, Detail: fmt.Sprintf("%v is in no live allocation, or %s has no kernels", r, reader)}
	}
	from := mem.space.id
	_, path := m.topo.Paths[device.Pair{From: from, To: reader}]
	if from != reader && (!path || slices.Contains(m.o.NotMapped, from)) {
		return 0, &device.Error{Op: "map", Space: reader, Detail: fmt.Sprintf("%q on %s", mem.label, from), Err: device.ErrUnreachable}
	}
	return r.Addr, nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

func (mem *memory) mmap() error {
	page := int64(unix.Getpagesize())
	size := roundUp(mem.bytes, page)
	guard := int64(0)
	if mem.m.o.Check {
		guard = page
	}
	prot := unix.PROT_READ | unix.PROT_WRITE
	if mem.m.o.NoData && mem.space.id != device.Host {
		prot = unix.PROT_NONE
	}
	all, err := unix.Mmap(-1, 0, int(size+2*guard), prot, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", size, err)
	}
	mem.mapping, mem.data = all, all[guard:guard+mem.bytes:guard+mem.bytes]
	mem.base = device.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(mem.data))))
	if guard > 0 {
		for _, g := range [][]byte{all[:guard], all[guard+size:]} {
			if err := unix.Mprotect(g, unix.PROT_NONE); err != nil {
				_ = unix.Munmap(all)
				return fmt.Errorf("protect a guard page: %w", err)
			}
		}
	}
	if prot == unix.PROT_NONE {
		return nil
	}
	if size >= hugeBytes {
		// Huge pages only affect speed: a failure is ignored.
		_ = unix.Madvise(all[guard:guard+size], unix.MADV_HUGEPAGE)
	}
	mem.poison()
	return nil
}

// poison fills memory without content with poison on a checked machine.
func (mem *memory) poison() {
	if !mem.m.o.Check || mem.m.o.NoData || mem.bytes > poisonBytes {
		return
	}
	mem.data[0] = poison
	for n := 1; n < len(mem.data); n *= 2 {
		copy(mem.data[n:], mem.data[:n])
	}
}

// pages are the pages in use, without guards; nil where the memory holds no data.
func (mem *memory) pages() []byte {
	if mem.m.o.NoData && mem.space.id != device.Host {
		return nil
	}
	page := int64(unix.Getpagesize())
	guard := int64(0)
	if mem.m.o.Check {
		guard = page
	}
	return mem.mapping[guard : guard+roundUp(mem.bytes, page)]
}

func (mem *memory) unmap() error {
	all := mem.mapping
	mem.mapping, mem.data = nil, nil
	if err := unix.Munmap(all); err != nil {
		return fmt.Errorf("emulated: unmap %q: %w", mem.label, err)
	}
	return nil
}

// retire releases the pages and reserves the addresses, so that a late access faults and
// can be named.
func (mem *memory) retire() error {
	x := &mem.m.memory
	if err := unix.Mprotect(mem.mapping, unix.PROT_NONE); err != nil {
		return fmt.Errorf("emulated: protect freed %q: %w", mem.label, err)
	}
	if err := unix.Madvise(mem.mapping, unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("emulated: drop the pages of freed %q: %w", mem.label, err)
	}
	mem.shadow, mem.data = nil, nil
	x.freed = append(x.freed, mem)
	if len(x.freed) > maxFreed {
		oldest := x.freed[0]
		x.freed = x.freed[1:]
		return oldest.unmap()
	}
	return nil
}

// Space implements device.Memory.
func (mem *memory) Space() device.Space { return mem.space.id }

// Bytes implements device.Memory.
func (mem *memory) Bytes() int64 { return mem.bytes }

// Range implements device.Memory.
func (mem *memory) Range(off, n int64) device.Range {
	if off < 0 || n < 0 || off > mem.bytes-n {
		panic(fmt.Sprintf("emulated: [%d, %d) is outside of memory %q of %d bytes", off, off+n, mem.label, mem.bytes))
	}
	return device.Range{Addr: mem.base + device.Addr(off), Bytes: n}
}

// Region implements device.Memory.
func (mem *memory) Region(off, n int64) device.Region {
	return device.Region{Space: mem.space.id, Range: mem.Range(off, n)}
}

// Read implements device.Memory.
func (mem *memory) Read(off, n int64) []byte { return mem.touch(off, n, false) }

// Write implements device.Memory.
func (mem *memory) Write(off, n int64) []byte { return mem.touch(off, n, true) }

func (mem *memory) touch(off, n int64, write bool) []byte {
	r := mem.Range(off, n)
	if mem.space.id != device.Host {
		panic(fmt.Sprintf("emulated: memory %q is on %s, which the host cannot access: copy it to host memory first", mem.label, mem.space.id))
	}
	mem.m.mu.Lock()
	defer mem.m.mu.Unlock()
	if mem.free {
		panic(fmt.Sprintf("emulated: host access to memory %q after it was freed", mem.label))
	}
	if mem.suspended {
		panic(fmt.Sprintf("emulated: host access to memory %q while it is suspended", mem.label))
	}
	if c := mem.m.check; c != nil {
		c.host(mem, r, write)
	}
	return mem.data[off : off+n : off+n]
}

// Suspend implements device.Memory.
func (mem *memory) Suspend() error {
	m := mem.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	if err := mem.unused("suspend"); err != nil || mem.suspended {
		return err
	}
	if m.check != nil {
		m.check.free(mem)
	}
	if pages := mem.pages(); pages != nil {
		if err := unix.Mprotect(pages, unix.PROT_NONE); err != nil {
			return fmt.Errorf("emulated: protect suspended %q: %w", mem.label, err)
		}
		if err := unix.Madvise(pages, unix.MADV_DONTNEED); err != nil {
			return fmt.Errorf("emulated: drop the pages of suspended %q: %w", mem.label, err)
		}
	}
	mem.space.usage.Allocated -= mem.rounded
	m.memory.remove(mem)
	mem.suspended, mem.shadow = true, nil
	m.memory.suspended = append(m.memory.suspended, mem)
	return nil
}

// Resume implements device.Memory.
func (mem *memory) Resume() error {
	m := mem.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	if err := mem.unused("resume"); err != nil || !mem.suspended {
		return err
	}
	if _, err := mem.room("resume"); err != nil {
		return err
	}
	if pages := mem.pages(); pages != nil {
		if err := unix.Mprotect(pages, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return fmt.Errorf("emulated: unprotect %q: %w", mem.label, err)
		}
		mem.poison()
	}
	mem.resumed()
	mem.live()
	return nil
}

// resumed removes the allocation from the suspended ones.
func (mem *memory) resumed() {
	mem.suspended = false
	x := &mem.m.memory
	x.suspended = slices.DeleteFunc(x.suspended, func(o *memory) bool { return o == mem })
}

// unused returns an error if the memory was freed, or an operation still uses it.
func (mem *memory) unused(op string) error {
	if mem.free {
		return &device.Error{Op: op, Space: mem.space.id, Detail: fmt.Sprintf("%q was freed before", mem.label), Err: device.ErrClosed}
	}
	if mem.users == 0 {
		return nil
	}
	if c := mem.m.check; c != nil {
		c.freeInUse(mem)
	}
	return &device.Error{
		Op: op, Space: mem.space.id,
		Detail: fmt.Sprintf("%q is still used by %d operations that were enqueued; wait for them first", mem.label, mem.users),
	}
}

// Free implements device.Memory.
func (mem *memory) Free() error {
	m := mem.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	if err := mem.unused("free"); err != nil {
		return err
	}
	mem.free = true
	if mem.suspended {
		mem.resumed()
	} else {
		if m.check != nil {
			m.check.free(mem)
		}
		mem.space.usage.Allocated -= mem.rounded
		m.memory.remove(mem)
	}
	if m.check != nil {
		return mem.retire()
	}
	return mem.unmap()
}
