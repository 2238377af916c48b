package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// layoutTag names the only layout: w1, w3, w2, each row-major.
const layoutTag = "row-major"

const extentAlign = 256 // bytes

// ExpertLayout implements kernels.Backend.
func (b *Backend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	if s.Hidden < 1 || s.Intermediate < 1 {
		return kernels.ExpertLayout{}, fmt.Errorf("cuda: expert of hidden size %d and intermediate size %d, want 1 or more", s.Hidden, s.Intermediate)
	}
	switch s.DType {
	case kernels.F32, kernels.BF16, kernels.F16:
	default:
		return kernels.ExpertLayout{}, fmt.Errorf("cuda: expert weights of type %d, want float32, bfloat16 or float16", s.DType)
	}
	return kernels.ExpertLayout{ExpertShape: s, Tag: layoutTag, Size: (s.Bytes() + extentAlign - 1) / extentAlign * extentAlign}, nil
}

func checkLayout(op string, l *kernels.ExpertLayout) error {
	if l.Tag != layoutTag {
		return fmt.Errorf("cuda: %s: Layout is %q, want %q: it belongs to another backend", op, l.Tag, layoutTag)
	}
	return nil
}

// PackExpert implements kernels.Backend.
func (b *Backend) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	const op = "pack expert"
	if err := checkLayout(op, &l); err != nil {
		return err
	}
	if part > kernels.W2 {
		return fmt.Errorf("cuda: %s: no matrix %d", op, part)
	}
	rows, columns := l.Intermediate, l.Hidden
	if part == kernels.W2 {
		rows, columns = columns, rows
	}
	bytes := columns * l.DType.Size()
	switch n := len(src) / bytes; {
	case len(src)%bytes != 0:
		return fmt.Errorf("cuda: %s: %d bytes of %s, want a multiple of a row's %d", op, len(src), part, bytes)
	case row < 0 || row+n > rows:
		return fmt.Errorf("cuda: %s: rows [%d, %d) of %s, which has %d", op, row, row+n, part, rows)
	case int64(len(dst)) < l.Size:
		return fmt.Errorf("cuda: %s: an extent of %d bytes, want %d", op, len(dst), l.Size)
	}
	copy(dst[int(part)*rows*bytes+row*bytes:], src)
	return nil
}
