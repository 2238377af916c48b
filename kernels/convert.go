package kernels

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/x448/float16"
)

// ToBF16 rounds f to bfloat16, to nearest, ties to even. A NaN stays a NaN: it
// keeps its sign and the upper bits of its payload and becomes quiet.
func ToBF16(f float32) uint16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBF16 returns the value of a bfloat16, exactly.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// ToF16 rounds f to IEEE half precision, to nearest, ties to even.
func ToF16(f float32) uint16 { return float16.Fromfloat32(f).Bits() }

// FromF16 returns the value of an IEEE half, exactly.
func FromF16(h uint16) float32 { return float16.Frombits(h).Float32() }

// ToFloat32 converts len(dst) little-endian elements of type t (F32, BF16 or F16) in src to
// float32. It panics if the size of src does not match or t is not a float type.
func ToFloat32(dst []float32, src []byte, t DType) {
	checkSize(len(src), len(dst), t)
	switch t {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case BF16:
		for i := range dst {
			dst[i] = FromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = FromF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
}

// FromFloat32 rounds src to little-endian elements of type t (F32, BF16 or F16) in dst. It
// panics if the size of dst does not match or t is not a float type.
func FromFloat32(dst []byte, src []float32, t DType) {
	checkSize(len(dst), len(src), t)
	switch t {
	case F32:
		for i, f := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(f))
		}
	case BF16:
		for i, f := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], ToBF16(f))
		}
	case F16:
		for i, f := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], ToF16(f))
		}
	}
}

func checkSize(bytes, elements int, t DType) {
	if int(t) >= len(dtypes) || !floats.has(t) {
		panic(fmt.Sprintf("kernels: convert elements of type %d, want %v", t, floats))
	}
	if bytes != elements*t.Size() {
		panic(fmt.Sprintf("kernels: convert %d elements of %v in %d bytes", elements, t, bytes))
	}
}
