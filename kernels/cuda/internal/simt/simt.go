//go:build cuda && amd64

package simt

/*
#cgo CXXFLAGS: -std=c++17 -Wno-psabi -O2 -fsanitize=alignment -fno-strict-aliasing -Wno-unknown-pragmas -Wno-unused
#cgo LDFLAGS: -static-libstdc++ -static-libgcc
#include "simt.h"
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels/cuda/internal/arguments"
)

// Launch runs a kernel on blocks (x, y, z) of threads, a multiple of 32, with shared
// bytes of dynamic shared memory each, to its end. half says for which activation
// type it is compiled; seed decides in which order threads run. The kernels in front are
// still to write awaited: its bytes are all ones until the threads of a block can do
// nothing more before they have waited. early: the kernel behind may start before that, as launch_dependents came before
// the wait. Several goroutines may launch at once.
func Launch(half bool, name string, args []byte, blocks [3]int, threads, shared int, seed uint64, awaited ...device.Range) (early bool, err error) {
	return launch(number(half), name, args, blocks, threads, shared, seed, awaited...)
}

// Fault runs a kernel of faults.cc, with which the tests see that faults are found.
func Fault(name string, args []byte, blocks [3]int, threads, shared int, seed uint64, awaited ...device.Range) (early bool, err error) {
	return launch(faults, name, args, blocks, threads, shared, seed, awaited...)
}

func launch(of table, name string, args []byte, blocks [3]int, threads, shared int, seed uint64, awaited ...device.Range) (early bool, err error) {
	if err := checkArguments(of, name, len(args)); err != nil {
		return false, err
	}
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	a := C.CBytes(args)
	defer C.free(a)
	grid := [3]C.unsigned{C.unsigned(blocks[0]), C.unsigned(blocks[1]), C.unsigned(blocks[2])}
	ranges := make([]C.simt_range, len(awaited), len(awaited)+1)
	for i, r := range awaited {
		ranges[i] = C.simt_range{at: C.uint64_t(r.Addr), bytes: C.uint64_t(r.Bytes)}
	}
	runtime.LockOSThread() // what went wrong is in memory of the thread
	defer runtime.UnlockOSThread()
	problem := C.simt_launch(C.int(of), n, a, &grid[0], C.unsigned(threads), C.size_t(shared), C.uint64_t(seed), unsafe.SliceData(ranges), C.size_t(len(ranges)))
	if problem != nil {
		return false, fmt.Errorf("simt: %s: %s", name, C.GoString(problem))
	}
	return C.simt_launched_early() != 0, nil
}

// Arguments are the structs of kernels' arguments as the compiler has laid them out, for
// one activation type. Types of fields are left out.
func Arguments(half bool) []arguments.Struct {
	var structs []arguments.Struct
	for i := C.size_t(0); ; i++ {
		f := C.simt_argument_field(C.int(number(half)), i)
		if f.args == nil {
			return structs
		}
		if f.name == nil {
			structs = append(structs, arguments.Struct{Name: C.GoString(f.args), Size: int(f.bytes)})
			continue
		}
		s := &structs[len(structs)-1]
		s.Fields = append(s.Fields, arguments.Field{Name: C.GoString(f.name), Offset: int(f.offset), Size: int(f.bytes)})
	}
}

// checkArguments compares the size of a kernel's argument struct with bytes.
func checkArguments(of table, name string, bytes int) error {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	if want := C.simt_argument_bytes(C.int(of), n); int(want) != bytes {
		return fmt.Errorf("simt: %s: %d bytes of arguments, want %d (-1: no such kernel)", name, bytes, int(want))
	}
	return nil
}

// table is one of those of simt.h.
type table int

const (
	bf16 table = iota
	f16
	faults
)

func number(half bool) table {
	if half {
		return f16
	}
	return bf16
}
