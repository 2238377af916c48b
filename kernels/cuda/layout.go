package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// Tiles is the tag of the layout for expert.cu. The rows of w1 and w3, alternating by eight,
// and then those of w2 form units of 64 rows. A unit has for every 64 elements of the inner
// dimension (K) a tile of 8 KiB: 64 rows of 128 bytes, with chunk c of 16 bytes of row r at c ^
// (r % 8) (128-byte swizzle).
const Tiles = "tiles-64"

const (
	unitRows = 64  // rows of a unit
	tileRow  = 128 // bytes
	tileStep = tileRow / 2
)

// tiled reports whether experts of a shape are stored in the layout Tiles.
func (b *Backend) tiled(s kernels.ExpertShape) bool {
	return b.hopper && s.DType == b.o.Activation && s.Hidden%unitRows == 0 && s.Intermediate%unitRows == 0
}

// ExpertLayout implements kernels.Backend: Tiles if the device has kernels for it and sizes are
// multiples of 64, else row-major.
func (b *Backend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	l, err := kernels.RowMajorLayout("cuda", s)
	if err == nil && b.tiled(s) {
		l.Tag = Tiles
	}
	return l, err
}

func (b *Backend) checkLayout(op string, l *kernels.ExpertLayout) error {
	if l.Tag == Tiles && b.tiled(l.ExpertShape) {
		return nil
	}
	return kernels.CheckRowMajor("cuda", op, *l)
}

// PackExpert implements kernels.Backend.
func (b *Backend) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	if l.Tag != Tiles {
		return kernels.PackRowMajor("cuda", l, part, row, src, dst)
	}
	if err := kernels.CheckPack("cuda", l, part, row, src, dst); err != nil {
		return err
	}
	if !b.tiled(l.ExpertShape) {
		return fmt.Errorf("cuda: pack expert: no layout %q for %+v on this device", l.Tag, l.ExpertShape)
	}
	inner, start := l.Hidden, 0
	if part == kernels.W2 {
		inner, start = l.Intermediate, 4*l.Hidden*l.Intermediate
	}
	steps := inner / tileStep
	for ; len(src) > 0; row++ {
		at := tilePlace(part, row)
		to, turn := dst[start+(at/unitRows*steps*unitRows+at%unitRows)*tileRow:], at%8
		for k := range steps {
			from, tile := src[:tileRow], to[k*unitRows*tileRow:][:tileRow]
			for c := 0; c < tileRow; c += 16 {
				*(*[16]byte)(tile[c^turn<<4:]) = *(*[16]byte)(from[c:])
			}
			src = src[tileRow:]
		}
	}
	return nil
}

// tilePlace maps a row of a matrix to its index among the rows of all units of w1 and w3, or of
// w2. In the accumulators of the tensor cores a thread has rows r and r+8 of 16: for w1 and w3
// these are the same row of both matrices. Rows of w2 are placed so that a thread has four
// neighboring ones after the results are transposed.
func tilePlace(part kernels.Part, row int) int {
	switch part {
	case kernels.W1:
		return row/8*16 + row%8
	case kernels.W3:
		return row/8*16 + 8 + row%8
	}
	r := row % 16
	return row - r + r>>2<<1 + r&1 + r&2<<2
}
