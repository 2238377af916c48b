//go:build cuda

package cuda

/*
// Writing a map keeps no pointer and runs no Go code.
#cgo noescape ms_map_tiles
#cgo nocallback ms_map_tiles
#include "glue.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
)

// TensorMap is the driver's CUtensorMap: an argument of kernels, at a multiple of 64 bytes
// among these, that cp.async.bulk.tensor is given.
type TensorMap [16]uint64

// MapTiles returns the map of a matrix of 16-bit numbers that lies at an address of the
// memory of a GPU, a multiple of 16, its rows stride bytes apart, also a multiple of 16. A
// copy brings tileRows rows, 1 to 256, of 64 elements each: 128 bytes a row, chunk c of 16
// bytes of row r in place c ^ (r % 8), and zeros beyond the matrix. It needs compute
// capability 9.0. It may be called from any goroutine, and allocates nothing.
func (m *Machine) MapTiles(space device.Space, at device.Addr, rows, columns int, stride int64, tileRows int) (t TensorMap, err error) {
	if err := m.usable("map", space); err != nil {
		return t, err
	}
	i, ok := space.GPU()
	if !ok {
		return t, badArgument("map", space, "a matrix in tiles: it takes the space of a GPU")
	}
	g := m.gpus[i]
	if c := C.ms_map_tiles(g.context(), unsafe.Pointer(&t), C.uint64_t(at), C.uint64_t(rows), C.uint64_t(columns), C.uint64_t(stride), C.uint(tileRows)); c != success {
		return t, g.fail("map", int(c), fmt.Sprintf("a matrix of %d rows of %d at %#x, %d bytes apart, in tiles of %d rows", rows, columns, uint64(at), stride, tileRows))
	}
	return t, nil
}
