package kernels

import "fmt"

// Tiles is the tag of the layout of tensor cores, of experts whose weights have 16 bits and
// whose sizes are multiples of 64. The rows of w1 and w3, alternating by eight, and then those of
// w2 form units of TileRows rows. A unit has for every TileColumns elements of the inner dimension
// (K) a tile of 8 KiB: 64 rows of 128 bytes, with chunk c of 16 bytes of row r at c ^ (r % 8)
// (128-byte swizzle). GPUs read experts in it, and the CPU the same bytes in host memory.
const Tiles = "tiles-64"

const (
	// TileRows is the number of rows of a unit, and of a tile.
	TileRows = 64
	// TileRowBytes is the size of a row of a tile, TileColumns its elements.
	TileRowBytes = 128
	TileColumns  = TileRowBytes / 2
)

// Tileable reports whether experts of a shape can have the layout Tiles.
func (s ExpertShape) Tileable() bool {
	return (s.DType == BF16 || s.DType == F16) && s.Hidden%TileRows == 0 && s.Intermediate%TileRows == 0
}

// PackTiles is Backend.PackExpert for the layout Tiles. Errors begin with the backend's name.
func PackTiles(backend string, l ExpertLayout, part Part, row int, src, dst []byte) error {
	if err := CheckPack(backend, l, part, row, src, dst); err != nil {
		return err
	}
	if l.Tag != Tiles || !l.Tileable() {
		return fmt.Errorf("%s: %s: Layout %+v is not %q, of 16-bit weights with sizes that are multiples of %d", backend, packExpert, l, Tiles, TileRows)
	}
	inner, start := l.Hidden, 0
	if part == W2 {
		inner, start = l.Intermediate, 4*l.Hidden*l.Intermediate
	}
	steps := inner / TileColumns
	for ; len(src) > 0; row++ {
		at := TilePlace(part, row)
		to, turn := dst[start+(at/TileRows*steps*TileRows+at%TileRows)*TileRowBytes:], at%8
		for k := range steps {
			from, tile := src[:TileRowBytes], to[k*TileRows*TileRowBytes:][:TileRowBytes]
			for c := 0; c < TileRowBytes; c += 16 {
				*(*[16]byte)(tile[c^turn<<4:]) = *(*[16]byte)(from[c:])
			}
			src = src[TileRowBytes:]
		}
	}
	return nil
}

// TilePlace maps a row of a matrix to its index among the rows of all units of w1 and w3, or of
// w2. In the accumulators of the tensor cores a thread has rows r and r+8 of 16: for w1 and w3
// these are the same row of both matrices. Rows of w2 are placed so that a thread has four
// neighboring ones after the results are transposed.
func TilePlace(part Part, row int) int {
	switch part {
	case W1:
		return row/8*16 + row%8
	case W3:
		return row/8*16 + 8 + row%8
	}
	r := row % 16
	return row - r + r>>2<<1 + r&1 + r&2<<2
}
