package cpu

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// at returns n elements at address a. The memory is outside of Go's heap (or its allocator
// keeps it alive), and the operation has declared it.
func at[T float32 | uint16 | int32 | int64 | uint64 | byte](a device.Addr, n int) []T {
	if n == 0 {
		return nil
	}
	// The address is read as a pointer from where it is stored: vet cannot follow addresses of
	// mapped memory.
	return unsafe.Slice(*(**T)(unsafe.Pointer(&a)), n)
}

// vector returns a tensor of rank 1, or any dense one, as a slice.
func vector[T float32 | int32 | int64 | uint64](t *kernels.Tensor) []T {
	return at[T](t.Addr, t.Elements())
}

// row returns row i of a float32 tensor of rank 2.
func row(t *kernels.Tensor, i int) []float32 {
	return at[float32](rowAddr(t, i), t.Shape[1])
}

func rowAddr(t *kernels.Tensor, i int) device.Addr {
	return t.Addr + device.Addr(4*i*t.Stride[0])
}

// head returns head h of row i of a float32 tensor of rank 3.
func head(t *kernels.Tensor, i, h int) []float32 {
	return at[float32](headAddr(t, i, h), t.Shape[2])
}

func headAddr(t *kernels.Tensor, i, h int) device.Addr {
	return t.Addr + device.Addr(t.DType.Size()*(i*t.Stride[0]+h*t.Stride[1]))
}

// widened returns a tensor of rank 2 in float32: itself, or a copy in scratch memory, which the
// caller releases, with rows index(pair, its index among all pairs) for all pairs of the experts.
func (b *Backend) widened(t *kernels.Tensor, found []expertPairs, index func(pair, place int) int) (kernels.Tensor, *[]float32) {
	if t.DType == kernels.F32 {
		return *t, b.floats(0)
	}
	columns := t.Shape[1]
	scratch := b.floats(t.Shape[0] * columns)
	for _, s := range found {
		for j, p := range s.pairs {
			i := index(int(p), s.first+j)
			b.set.load((*scratch)[i*columns:][:columns], t.Addr+device.Addr(t.DType.Size()*i*t.Stride[0]), t.DType)
		}
	}
	return kernels.New(addrOf(*scratch), kernels.F32, t.Shape[0], columns), scratch
}

// addrOf is the address of scratch memory, which the caller keeps alive.
func addrOf(scratch []float32) device.Addr {
	return device.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(scratch))))
}

// load converts len(dst) weights of type t at address a to float32.
func load(dst []float32, a device.Addr, t kernels.DType) {
	switch t {
	case kernels.F32:
		copy(dst, at[float32](a, len(dst)))
	case kernels.BF16:
		src := at[uint16](a, len(dst))
		dst = dst[:len(src)]
		for i, b := range src {
			dst[i] = bf16(b)
		}
	case kernels.F16:
		src := at[uint16](a, len(dst))
		dst = dst[:len(src)]
		for i, b := range src {
			dst[i] = half(b)
		}
	default:
		panic(fmt.Sprintf("cpu: weights of type %v", t)) // Check lets none through
	}
}

// half converts an IEEE half: in float32's fields its exponent is too small by 112, which a
// multiplication corrects, subnormals included.
func half(h uint16) float32 {
	sign, rest := uint32(h&0x8000)<<16, uint32(h&0x7fff)
	if rest >= 0x7c00 { // infinite or NaN
		return math.Float32frombits(sign | 0x7f800000 | rest&0x3ff<<13)
	}
	const up = 1 << 112
	f := math.Float32frombits(rest<<13) * up
	return math.Float32frombits(math.Float32bits(f) | sign)
}

// merger declares ranges through an Access and merges adjacent ones.
type merger struct {
	declare func(device.Range)
	last    device.Range
}

func (m *merger) add(a device.Addr, bytes int) {
	if m.last.Bytes > 0 && m.last.End() == a {
		m.last.Bytes += int64(bytes)
		return
	}
	m.flush()
	m.last = device.Range{Addr: a, Bytes: int64(bytes)}
}

func (m *merger) flush() {
	if m.last.Bytes > 0 {
		m.declare(m.last)
	}
	m.last = device.Range{}
}
