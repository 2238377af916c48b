package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// Tiles is the tag of the layout for expert.cu.
const Tiles = kernels.Tiles

const (
	unitRows = kernels.TileRows     // rows of a unit
	tileRow  = kernels.TileRowBytes // bytes
	tileStep = kernels.TileColumns
)

// tiled reports whether experts of a shape are stored in the layout Tiles.
func (b *Backend) tiled(s kernels.ExpertShape) bool {
	return b.hopper && s.DType == b.o.Activation && s.Tileable()
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
	return kernels.PackTiles("cuda", l, part, row, src, dst)
}
