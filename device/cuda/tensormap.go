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

// TensorMap is the driver's CUtensorMap: a kernel argument, aligned to 64 bytes, that is
// an operand of cp.async.bulk.tensor.
type TensorMap [16]uint64

// MapTiles returns the tensor map of a matrix of 16-bit elements in GPU memory. The address
// at and the row stride in bytes are multiples of 16. A copy transfers a tile of tileRows
// rows, 1 to 256, of 64 elements, 128 bytes, each. It stores the 16-byte chunk c of row r
// at position c ^ (r % 8), and zeros for elements outside the matrix. MapTiles requires
// compute capability 9.0, allocates nothing, and may be called from any goroutine.
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
