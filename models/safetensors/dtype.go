package safetensors

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// DType is the type of a tensor's elements. The zero value is not a type.
type DType uint8

// The types that the safetensors format defines. Only BF16, F16 and F32 are usable as
// weights here. The others are parsed so that errors can name them and their data can be
// copied.
const (
	Bool DType = iota + 1
	F4
	F6E2M3
	F6E3M2
	U8
	I8
	F8E5M2
	F8E4M3
	F8E8M0
	F8E4M3FNUZ
	F8E5M2FNUZ
	I16
	U16
	F16
	BF16
	I32
	U32
	F32
	C64
	F64
	I64
	U64
)

// dtypes holds, per DType, its name in headers and the element size in bits. It follows
// the format's order of increasing alignment.
var dtypes = [...]struct {
	name string
	bits int
}{
	Bool:       {"BOOL", 8},
	F4:         {"F4", 4},
	F6E2M3:     {"F6_E2M3", 6},
	F6E3M2:     {"F6_E3M2", 6},
	U8:         {"U8", 8},
	I8:         {"I8", 8},
	F8E5M2:     {"F8_E5M2", 8},
	F8E4M3:     {"F8_E4M3", 8},
	F8E8M0:     {"F8_E8M0", 8},
	F8E4M3FNUZ: {"F8_E4M3FNUZ", 8},
	F8E5M2FNUZ: {"F8_E5M2FNUZ", 8},
	I16:        {"I16", 16},
	U16:        {"U16", 16},
	F16:        {"F16", 16},
	BF16:       {"BF16", 16},
	I32:        {"I32", 32},
	U32:        {"U32", 32},
	F32:        {"F32", 32},
	C64:        {"C64", 64},
	F64:        {"F64", 64},
	I64:        {"I64", 64},
	U64:        {"U64", 64},
}

var dtypeByName = func() map[string]DType {
	m := make(map[string]DType, len(dtypes))
	for d := Bool; d.valid(); d++ {
		m[dtypes[d].name] = d
	}
	return m
}()

// ParseDType returns the type that a header calls name, such as "BF16" or
// "F8_E4M3".
func ParseDType(name string) (DType, bool) {
	d, ok := dtypeByName[name]
	return d, ok
}

func (d DType) valid() bool { return d >= Bool && int(d) < len(dtypes) }

// String returns the name that headers use, such as "BF16".
func (d DType) String() string {
	if !d.valid() {
		return "invalid"
	}
	return dtypes[d].name
}

// Bits returns the size of one element in bits: 4 and 6 occur besides whole
// bytes. It is 0 for an invalid type.
func (d DType) Bits() int {
	if !d.valid() {
		return 0
	}
	return dtypes[d].bits
}

// Usable reports whether weights may have this type: BF16, F16 or F32.
func (d DType) Usable() bool { return d == BF16 || d == F16 || d == F32 }

// align returns the alignment in bytes that reading an element needs.
func (d DType) align() int { return max(1, d.Bits()/8) }

// Bytes returns the size in bytes of a tensor of the given shape, or an error if the size
// overflows an int or is not a whole number of bytes.
func (d DType) Bytes(shape []int) (int64, error) {
	if !d.valid() {
		return 0, errors.New("it has no dtype")
	}
	n := uint64(1)
	for _, dim := range shape {
		if dim < 0 {
			return 0, fmt.Errorf("shape %s has a negative dimension", printShape(shape))
		}
		if dim == 0 {
			return 0, nil
		}
	}
	for _, dim := range shape {
		hi, lo := bits.Mul64(n, uint64(dim))
		if hi != 0 {
			return 0, fmt.Errorf("shape %s is too large", printShape(shape))
		}
		n = lo
	}
	hi, lo := bits.Mul64(n, uint64(d.Bits()))
	if hi != 0 || lo/8 > math.MaxInt {
		return 0, fmt.Errorf("shape %s of %s is too large", printShape(shape), d)
	}
	if lo%8 != 0 {
		return 0, fmt.Errorf("shape %s of %s is not a whole number of bytes", printShape(shape), d)
	}
	return int64(lo / 8), nil
}

// printShape is a shape in errors, of which a file may have made many dimensions.
func printShape(shape []int) string {
	const show = 8
	if len(shape) <= show {
		return fmt.Sprint(shape)
	}
	return fmt.Sprintf("%v and %d more", shape[:show], len(shape)-show)
}
