package kernels

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/device"
)

// DType is the type of a tensor's elements.
type DType uint8

// Element types.
const (
	Invalid DType = iota
	F32
	BF16
	F16
	I32
	I64
	U64
)

var dtypes = [...]struct {
	name string
	size int
}{Invalid: {"invalid", 0}, F32: {"float32", 4}, BF16: {"bfloat16", 2}, F16: {"float16", 2}, I32: {"int32", 4}, I64: {"int64", 8}, U64: {"uint64", 8}}

// Size is the number of bytes of one element.
func (d DType) Size() int { return dtypes[d].size }

func (d DType) String() string { return dtypes[d].name }

// MaxRank is the largest number of dimensions.
const MaxRank = 4

// Tensor is a view of device memory: an address, a type, a shape and strides in
// elements. It is a value and owns nothing. The zero Tensor means "none".
type Tensor struct {
	Addr   device.Addr
	DType  DType
	Rank   int
	Shape  [MaxRank]int
	Stride [MaxRank]int
}

// New returns a dense row-major tensor at addr.
func New(addr device.Addr, t DType, shape ...int) Tensor {
	if len(shape) > MaxRank {
		panic(fmt.Sprintf("kernels: tensor of rank %d", len(shape)))
	}
	x := Tensor{Addr: addr, DType: t, Rank: len(shape)}
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		x.Shape[i], x.Stride[i] = shape[i], stride
		stride *= shape[i]
	}
	return x
}

// None reports whether t is the zero Tensor.
func (t Tensor) None() bool { return t.DType == Invalid }

// Elements is the number of elements of the shape.
func (t Tensor) Elements() int {
	n := 1
	for _, s := range t.Shape[:t.Rank] {
		n *= s
	}
	return n
}

// Dense reports whether the elements lie row-major without gaps.
func (t Tensor) Dense() bool {
	stride := 1
	for i := t.Rank - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Stride[i] != stride {
			return false
		}
		stride *= t.Shape[i]
	}
	return true
}

// Bytes is the size of the elements, without gaps.
func (t Tensor) Bytes() int64 { return int64(t.Elements()) * int64(t.DType.Size()) }

// Range is the smallest range that holds every element; its size is 0 for an
// empty tensor.
func (t Tensor) Range() device.Range {
	last := 0
	for i, s := range t.Shape[:t.Rank] {
		if s == 0 {
			return device.Range{Addr: t.Addr}
		}
		last += (s - 1) * t.Stride[i]
	}
	return device.Range{Addr: t.Addr, Bytes: int64(last+1) * int64(t.DType.Size())}
}

// AppendRanges appends to dst the contiguous ranges of memory that hold t's elements, and no
// bytes between them: one for a dense tensor, one per row (or more) for one with gaps.
func (t Tensor) AppendRanges(dst []device.Range) []device.Range {
	if t.None() || t.Elements() == 0 {
		return dst
	}
	size := t.DType.Size()
	run, outer := 1, t.Rank // elements without gaps; dimensions around them
	for outer > 0 && (t.Shape[outer-1] == 1 || t.Stride[outer-1] == run) {
		outer--
		run *= t.Shape[outer]
	}
	var at [MaxRank]int
	for {
		off := 0
		for i, n := range at[:outer] {
			off += n * t.Stride[i]
		}
		dst = append(dst, device.Range{Addr: t.Addr + device.Addr(off*size), Bytes: int64(run * size)})
		i := outer - 1
		for ; i >= 0; i-- {
			if at[i]++; at[i] < t.Shape[i] {
				break
			}
			at[i] = 0
		}
		if i < 0 {
			return dst
		}
	}
}

// Slice returns elements [from, to) of the first dimension.
func (t Tensor) Slice(from, to int) Tensor { return t.Narrow(0, from, to) }

// Narrow returns elements [from, to) of dimension dim.
func (t Tensor) Narrow(dim, from, to int) Tensor {
	if dim >= t.Rank || from < 0 || to < from || to > t.Shape[dim] {
		panic(fmt.Sprintf("kernels: narrow dimension %d of %v to [%d, %d)", dim, t, from, to))
	}
	t.Addr += device.Addr(from * t.Stride[dim] * t.DType.Size())
	t.Shape[dim] = to - from
	return t
}

// View returns the same elements in another shape. A dense tensor may take any shape with as
// many elements; of one with gaps between rows, only the last dimension may be split or kept.
func (t Tensor) View(shape ...int) Tensor {
	v := New(t.Addr, t.DType, shape...)
	if v.Elements() != t.Elements() {
		panic(fmt.Sprintf("kernels: view %v as %v", t, shape))
	}
	if t.Dense() {
		return v
	}
	if t.Rank == 2 && v.Rank == 3 && v.Shape[0] == t.Shape[0] && t.Stride[1] == 1 {
		v.Stride[0] = t.Stride[0]
		return v
	}
	panic(fmt.Sprintf("kernels: view %v with gaps as %v", t, shape))
}

func (t Tensor) String() string {
	if t.None() {
		return "none"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s%v", t.DType, t.Shape[:t.Rank])
	if !t.Dense() {
		fmt.Fprintf(&b, " strides %v", t.Stride[:t.Rank])
	}
	return b.String()
}
