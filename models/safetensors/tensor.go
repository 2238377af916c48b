package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"unsafe"

	"github.com/x448/float16"
	"golang.org/x/sys/unix"
)

// Tensor is a view of one tensor in a checkpoint. It owns nothing, is cheap to
// copy, and is valid until the checkpoint's Close.
type Tensor struct {
	Name  string
	DType DType
	// Shape lists the dimensions, slowest first. It is empty for a scalar, and a dimension
	// may be 0. It must not be changed.
	Shape []int
	// Data holds the elements in row-major order, little-endian, without padding. It is in
	// a read-only mapping: writing to it faults. Files by old writers may start it at an
	// offset that is not a multiple of the element size: check Aligned before accessing
	// Data as anything but bytes.
	Data []byte
	File string // path of the file that Data is in

	shard *shard
}

// Elements returns the number of elements: 1 for a scalar, 0 where a dimension
// is 0.
func (t Tensor) Elements() int {
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Index returns the view of element i along the first dimension: expert i of a
// [experts, rows, columns] tensor, say. It panics if the tensor is a scalar, if
// i is out of range, or if the element is not a whole number of bytes.
func (t Tensor) Index(i int) Tensor {
	if i < 0 || i >= t.Shape[0] {
		panic(fmt.Sprintf("safetensors: index %d out of range of tensor %q with shape %v", i, t.Name, t.Shape))
	}
	n, err := t.DType.Bytes(t.Shape[1:])
	if err != nil {
		panic(fmt.Sprintf("safetensors: index of tensor %q: %v", t.Name, err))
	}
	at := int64(i) * n
	t.Shape, t.Data = t.Shape[1:], t.Data[at:at+n:at+n]
	return t
}

// Read calls read with the tensor's data. If the file was truncated, Read converts the
// fault of accessing lost data to an error that wraps [ErrChanged]; side effects of read
// up to then remain. read must stay on its goroutine and must not keep data.
func (t Tensor) Read(read func(data []byte) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr })
			if !ok || !t.mapped(fault.Addr()) {
				panic(r)
			}
			err = t.shard.changed(t.Name, "its data vanished while it was read, as the file became shorter")
		}
	}()
	return read(t.Data)
}

// mapped reports whether addr lies in the page range of the tensor's data.
func (t Tensor) mapped(addr uintptr) bool {
	pages := t.pages()
	if len(pages) == 0 {
		return false
	}
	first := uintptr(unsafe.Pointer(unsafe.SliceData(pages)))
	return addr >= first && addr-first < uintptr(len(pages))
}

// CopyTo copies the tensor's bytes to dst, which must have exactly their length. If the
// file was truncated, the error wraps [ErrChanged].
func (t Tensor) CopyTo(dst []byte) error {
	if len(dst) != len(t.Data) {
		return fmt.Errorf("safetensors: copy tensor %q: destination has %d bytes, the tensor %d",
			t.Name, len(dst), len(t.Data))
	}
	return t.Read(func(data []byte) error {
		copy(dst, data)
		return nil
	})
}

// Float32s decodes a BF16, F16 or F32 tensor exactly to float32, into dst, which must have
// length Elements(). Data may be unaligned. Another dtype or length is an error; a
// truncated file is [ErrChanged].
func (t Tensor) Float32s(dst []float32) error {
	if err := t.usable(); err != nil {
		return err
	}
	if n := t.Elements(); len(dst) != n {
		return fmt.Errorf("safetensors: decode tensor %q: destination has %d elements, the tensor %d",
			t.Name, len(dst), n)
	}
	return t.Read(func(data []byte) error {
		switch t.DType {
		case BF16:
			for i := range dst {
				dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*i:])) << 16)
			}
		case F16:
			for i := range dst {
				dst[i] = float16.Frombits(binary.LittleEndian.Uint16(data[2*i:])).Float32()
			}
		case F32:
			for i := range dst {
				dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
			}
		}
		return nil
	})
}

func (t Tensor) usable() error {
	if t.DType.Usable() {
		return nil
	}
	return &FileError{
		File: t.File, Tensor: t.Name, Err: ErrMismatch,
		Reason: fmt.Sprintf("dtype %s cannot be used for weights", t.DType),
		Advice: "use a checkpoint in BF16, F16 or F32",
	}
}

// Aligned reports whether Data begins at a multiple of the element's size, as it
// does in every file that current writers make.
func (t Tensor) Aligned() bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(t.Data)))%uintptr(t.DType.align()) == 0
}

// Prefetch asks the kernel to start reading the pages of the tensor's bytes [off, off+n).
// It does not wait for data, but it blocks while the disk's request queue is full. It
// panics if the range is not within Data.
func (t Tensor) Prefetch(off, n int64) {
	t.Data = t.Data[off : off+n]
	t.advise(unix.MADV_WILLNEED)
}

// Release removes the tensor's pages from this process's resident set, including pages
// shared with adjacent tensors. Data stays valid: access maps the pages again, from the
// page cache or the disk.
func (t Tensor) Release() { t.advise(unix.MADV_DONTNEED) }

// advise is best effort: if the kernel rejects the advice, only speed or memory suffers.
func (t Tensor) advise(advice int) {
	if pages := t.pages(); len(pages) > 0 {
		_ = unix.Madvise(pages, advice)
	}
}

// pages returns the part of the mapping that holds Data, widened to whole pages;
// nil if Data is empty or the checkpoint is closed.
func (t Tensor) pages() []byte {
	if len(t.Data) == 0 || t.shard == nil || t.shard.mapping == nil {
		return nil
	}
	page := os.Getpagesize()
	m := t.shard.mapping
	begin := int(uintptr(unsafe.Pointer(unsafe.SliceData(t.Data))) - uintptr(unsafe.Pointer(unsafe.SliceData(m))))
	end := begin + len(t.Data)
	// A mapping occupies whole pages even where the file ends inside one.
	whole := unsafe.Slice(unsafe.SliceData(m), (len(m)+page-1)/page*page)
	return whole[begin/page*page : (end+page-1)/page*page]
}
