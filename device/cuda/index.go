//go:build cuda

package cuda

import (
	"slices"
	"sort"
	"sync/atomic"

	"github.com/moeserve/moeserve/device"
)

// index finds allocations by address. Readers, on the path of every copy, need no lock.
// Writers hold Machine.mu.
type index struct{ sorted atomic.Pointer[[]*memory] }

func (x *index) all() []*memory {
	if p := x.sorted.Load(); p != nil {
		return *p
	}
	return nil
}

// find returns the allocation that contains all of r, or nil.
func (x *index) find(r device.Range) *memory {
	live := x.all()
	i := after(live, r.Addr)
	if i == len(live) || r.Bytes < 0 {
		return nil
	}
	if mem := live[i]; mem.base <= r.Addr && int64(r.Addr-mem.base) <= mem.bytes-r.Bytes {
		return mem
	}
	return nil
}

// after returns the position of the first allocation that ends after address a.
// ---
func after(live []*memory, a device.Addr) int {
	return sort.Search(len(live), func(i int) bool { return live[i].base+device.Addr(live[i].bytes) > a })
}

func (x *index) add(mem *memory) {
	live := x.all()
	grown := slices.Insert(slices.Clone(live), after(live, mem.base), mem)
	x.sorted.Store(&grown)
}

func (x *index) remove(mem *memory) {
	left := slices.DeleteFunc(slices.Clone(x.all()), func(m *memory) bool { return m == mem })
	x.sorted.Store(&left)
}
