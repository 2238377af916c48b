package kernels

import (
	"fmt"
)

// ExpertShape is the shape of one expert: w1 and w3 are [Intermediate, Hidden],
// w2 is [Hidden, Intermediate].
type ExpertShape struct {
	Hidden, Intermediate int
	DType                DType
}

// Bytes is the size of the three matrices.
func (s ExpertShape) Bytes() int64 {
	return 3 * int64(s.Hidden) * int64(s.Intermediate) * int64(s.DType.Size())
}

// Part is one of an expert's matrices, named as Mixtral names them.
type Part uint8

// The three matrices: the expert computes W2 (silu(W1 x) * W3 x).
const (
	W1 Part = iota // gate_proj
	W3             // up_proj
	W2             // down_proj
)

func (p Part) String() string { return [...]string{"w1", "w3", "w2"}[p] }

// ExpertLayout is where an expert's matrices are in its one contiguous extent.
type ExpertLayout struct {
	ExpertShape
	// Tag names the layout: with "row-major", w1, w3 and w2 follow one another.
	Tag string
	// Size of the extent in bytes, a multiple of 256, at least Bytes().
	Size int64
}

func (l *ExpertLayout) check() error {
	switch {
	case int(l.DType) >= len(dtypes):
		return fmt.Errorf("has unknown type %d", uint8(l.DType))
	case !floats.has(l.DType):
		return fmt.Errorf("has type %v, want %v", l.DType, floats)
	case l.Hidden < 1 || l.Intermediate < 1:
		return fmt.Errorf("has Hidden %d and Intermediate %d, want 1 or more", l.Hidden, l.Intermediate)
	case l.Tag == "":
		return fmt.Errorf("has no Tag: take it from Backend.ExpertLayout")
	case l.Size < l.Bytes() || l.Size%256 != 0:
		return fmt.Errorf("has Size %d, want a multiple of 256 of at least %d", l.Size, l.Bytes())
	}
	return nil
}

// RowMajor is the tag of the layout in which w1, w3 and w2 follow one another, each row-major
// as in checkpoints.
const RowMajor = "row-major"

// An extent's size is a multiple of extentAlign bytes.
const extentAlign = 256

// RowMajorLayout returns the row-major layout of experts of a shape. Errors begin with the
// backend's name.
func RowMajorLayout(backend string, s ExpertShape) (ExpertLayout, error) {
	if s.Hidden < 1 || s.Intermediate < 1 {
		return ExpertLayout{}, fmt.Errorf("%s: expert of hidden size %d and intermediate size %d, want 1 or more", backend, s.Hidden, s.Intermediate)
	}
	switch s.DType {
	case F32, BF16, F16:
	default:
		return ExpertLayout{}, fmt.Errorf("%s: expert weights of type %d, want float32, bfloat16 or float16", backend, s.DType)
	}
	return ExpertLayout{ExpertShape: s, Tag: RowMajor, Size: (s.Bytes() + extentAlign - 1) / extentAlign * extentAlign}, nil
}

// CheckRowMajor returns an error unless an operation's layout is row-major.
func CheckRowMajor(backend, op string, l ExpertLayout) error {
	if l.Tag != RowMajor {
		return fmt.Errorf("%s: %s: Layout is %q, want %q: it belongs to another backend", backend, op, l.Tag, RowMajor)
	}
	return nil
}

// PackRowMajor is Backend.PackExpert for the row-major layout. Errors begin with the
// backend's name.
func PackRowMajor(backend string, l ExpertLayout, part Part, row int, src, dst []byte) error {
	if err := CheckRowMajor(backend, packExpert, l); err != nil {
		return err
	}
	if err := CheckPack(backend, l, part, row, src, dst); err != nil {
		return err
	}
	rows, columns := partShape(l, part)
	bytes := columns * l.DType.Size()
	copy(dst[(int(part)*rows+row)*bytes:], src)
	return nil
}

const packExpert = "pack expert"

// partShape returns the shape of one matrix of an expert.
func partShape(l ExpertLayout, part Part) (rows, columns int) {
	if part == W2 {
		return l.Hidden, l.Intermediate
	}
	return l.Intermediate, l.Hidden
}

// CheckPack checks the arguments of Backend.PackExpert except the layout's tag. Errors begin
// with the backend's name.
func CheckPack(backend string, l ExpertLayout, part Part, row int, src, dst []byte) error {
	if part > W2 {
		return fmt.Errorf("%s: %s: no matrix %d", backend, packExpert, part)
	}
	rows, columns := partShape(l, part)
	bytes := columns * l.DType.Size()
	switch n := len(src) / bytes; {
	case len(src)%bytes != 0:
		return fmt.Errorf("%s: %s: %d bytes of %s, want a multiple of a row's %d", backend, packExpert, len(src), part, bytes)
	case row < 0 || row+n > rows:
		return fmt.Errorf("%s: %s: rows [%d, %d) of %s, which has %d", backend, packExpert, row, row+n, part, rows)
	case int64(len(dst)) < l.Size:
		return fmt.Errorf("%s: %s: an extent of %d bytes, want %d", backend, packExpert, len(dst), l.Size)
	}
	return nil
}
