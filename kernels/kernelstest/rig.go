package kernelstest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// guard is the number of poisoned bytes before and after every buffer.
const guard = 256

// poison is the value of every unset byte: NaN as float32, bfloat16 and float16, -1 as an
// integer.
const poison = 0xff

// rig holds one operation's tensors, on the device and as expected.
type rig struct {
	*testing.T
	o       Options
	machine device.Machine
	backend kernels.Backend
	stream  device.Stream
	act     kernels.DType
	rand    *rand.Rand
	buffers []*buffer
	// recorder is the stream if it runs Go work, else nil.
	recorder *recorder
}

// buffer is an allocation on the device. before is its content before the operation, after
// its content afterwards; both include the guards.
type buffer struct {
	name          string
	device, host  device.Memory
	before, after []byte
	out           []byte // 1 for bytes that the operation must write, else 0; nil: none
	dtype         kernels.DType
	partly        bool // the operation need not read everything that is set
}

// tensor is a kernels.Tensor in a buffer.
type tensor struct {
	kernels.Tensor
	buffer *buffer
}

// run runs a case with its own buffers, which it frees at the end.
func (r *rig) run(name string, body func(*rig)) {
	r.Run(name, func(t *testing.T) {
		c := *r
		c.T, c.buffers = t, nil
		defer c.free()
		body(&c)
	})
}

func (r *rig) free() {
	for _, b := range r.buffers {
		for _, m := range []device.Memory{b.device, b.host} {
			if err := m.Free(); err != nil {
				r.Errorf("free %s: %v", b.name, err)
			}
		}
	}
	r.buffers = nil
}

func (r *rig) bufferIn(space device.Space, name string, t kernels.DType, n int) *buffer {
	r.Helper()
	n += 2 * guard
	b := &buffer{name: name, dtype: t, before: bytes.Repeat([]byte{poison}, n)}
	var err error
	if b.device, err = r.machine.Alloc(space, int64(n), name); err != nil {
		r.Fatal(err)
	}
	if b.host, err = r.machine.Alloc(device.Host, int64(n), name+" staging"); err != nil {
		r.Fatal(err)
	}
	r.buffers = append(r.buffers, b)
	return b
}

// dense returns a new poisoned tensor without gaps.
func (r *rig) dense(name string, t kernels.DType, shape ...int) tensor {
	r.Helper()
	return r.denseIn(r.stream.Space(), name, t, shape...)
}

// denseIn is dense in another memory.
func (r *rig) denseIn(space device.Space, name string, t kernels.DType, shape ...int) tensor {
	r.Helper()
	x := kernels.New(0, t, shape...)
	b := r.bufferIn(space, name, t, int(x.Bytes()))
	x.Addr = b.device.Range(guard, x.Bytes()).Addr
	return tensor{x, b}
}

// gaps returns a new poisoned tensor with gaps between its rows (elements of the first
// dimension) and a start that differs from the allocation's.
func (r *rig) gaps(name string, t kernels.DType, shape ...int) tensor {
	r.Helper()
	return r.between(16, 32, name, t, shape...)
}

// between is gaps with the given numbers of elements before and after each row.
func (r *rig) between(before, behind int, name string, t kernels.DType, shape ...int) tensor {
	r.Helper()
	inner := 1
	for _, n := range shape[1:] {
		inner *= n
	}
	x := r.dense(name, t, shape[0], before+inner+behind)
	x.Tensor = x.Narrow(1, before, before+inner)
	if len(shape) > 2 {
		x.Tensor = x.View(shape...)
	}
	return x
}

// rows returns a new tensor, with gaps if gap is set.
func (r *rig) rows(gap bool, name string, t kernels.DType, shape ...int) tensor {
	r.Helper()
	if gap {
		return r.gaps(name, t, shape...)
	}
	return r.dense(name, t, shape...)
}

// offset returns the position of an element in the buffer, in bytes.
func (t tensor) offset(index ...int) int {
	n := int(t.Addr - t.buffer.device.Range(0, 0).Addr)
	for i, j := range index {
		n += j * t.Stride[i] * t.DType.Size()
	}
	return n
}

// each calls f with the index of every row of the last dimension.
func (t tensor) each(f func(index ...int)) {
	var walk func(prefix []int)
	walk = func(prefix []int) {
		if len(prefix) == t.Rank-1 {
			f(prefix...)
			return
		}
		for i := range t.Shape[len(prefix)] {
			walk(append(prefix[:len(prefix):len(prefix)], i))
		}
	}
	walk(nil)
}

// in returns one row of the last dimension in data.
func (t tensor) in(data []byte, index ...int) []byte {
	at := t.offset(index...)
	return data[at:][:t.Shape[t.Rank-1]*t.DType.Size()]
}

// row decodes one row of the last dimension before the operation.
func (t tensor) row(index ...int) []float64 { return t.decode(t.in(t.buffer.before, index...)) }

// got decodes one row of the last dimension after the operation.
func (t tensor) got(index ...int) []float64 { return t.decode(t.in(t.buffer.after, index...)) }

func (t tensor) decode(b []byte) []float64 {
	size := t.DType.Size()
	x := make([]float64, len(b)/size)
	switch t.DType {
	case kernels.F32:
		for i := range x {
			x[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b[i*size:])))
		}
	case kernels.BF16:
		for i := range x {
			x[i] = float64(kernels.FromBF16(binary.LittleEndian.Uint16(b[i*size:])))
		}
	case kernels.F16:
		for i := range x {
			x[i] = float64(kernels.FromF16(binary.LittleEndian.Uint16(b[i*size:])))
		}
	case kernels.I32:
		for i := range x {
			x[i] = float64(int32(binary.LittleEndian.Uint32(b[i*size:])))
		}
	case kernels.I64:
		for i := range x {
			x[i] = float64(int64(binary.LittleEndian.Uint64(b[i*size:])))
		}
	}
	return x
}

// set fills t, its elements in row-major order, with f's values rounded to its
// type.
func (t tensor) set(f func(i int) float64) tensor {
	n, size := 0, t.DType.Size()
	t.each(func(index ...int) {
		b := t.in(t.buffer.before, index...)
		for i := range t.Shape[t.Rank-1] {
			v, e := f(n), b[i*size:]
			n++
			switch t.DType {
			case kernels.F32:
				binary.LittleEndian.PutUint32(e, math.Float32bits(float32(v)))
			case kernels.BF16:
				binary.LittleEndian.PutUint16(e, kernels.ToBF16(float32(v)))
			case kernels.F16:
				binary.LittleEndian.PutUint16(e, kernels.ToF16(float32(v)))
			case kernels.I32:
				binary.LittleEndian.PutUint32(e, uint32(int32(v)))
			case kernels.I64:
				binary.LittleEndian.PutUint64(e, uint64(int64(v)))
			}
		}
	})
	return t
}

// normal fills t with normal variates around mean.
func (r *rig) normal(t tensor, mean, deviation float64) tensor {
	return t.set(func(int) float64 { return mean + deviation*r.rand.NormFloat64() })
}

// weights returns a weight matrix whose GEMMs keep the magnitude of their inputs.
func (r *rig) weights(name string, t kernels.DType, rows, columns int) tensor {
	r.Helper()
	w := r.dense(name, t, rows, columns)
	r.fillWeights(w.all(), t, columns)
	return w
}

// all returns the bytes of a dense tensor before the operation.
func (t tensor) all() []byte { return t.buffer.before[t.offset():][:t.Bytes()] }

// fillWeights fills dst with random weights of deviation near 1/sqrt(columns): small
// matrices get full mantissas, large ones integers times a power of two, which are fast to
// generate.
func (r *rig) fillWeights(dst []byte, t kernels.DType, columns int) {
	n := len(dst) / t.Size()
	if n > 1<<20 {
		philox.FillDummy(dst, t, r.rand.Uint64(), "weights", 0, int(math.Round(math.Log2(74*math.Sqrt(float64(columns))))))
		return
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.rand.NormFloat64() / math.Sqrt(float64(columns)))
	}
	kernels.FromFloat32(dst, x, t)
}

// ints returns a dense I32 tensor of the values.
func (r *rig) ints(name string, values ...int) tensor {
	r.Helper()
	return r.dense(name, kernels.I32, len(values)).set(func(i int) float64 { return float64(values[i]) })
}

// words returns a dense U64 tensor of the values.
func (r *rig) words(name string, values ...uint64) tensor {
	r.Helper()
	t := r.dense(name, kernels.U64, len(values))
	for i, v := range values {
		binary.LittleEndian.PutUint64(t.all()[8*i:], v)
	}
	return t
}

// writes declares that the operation must write all of t.
func (t tensor) writes() {
	b := t.buffer
	if b.out == nil {
		b.out = make([]byte, len(b.before))
	}
	t.each(func(index ...int) {
		at := t.offset(index...)
		fill(b.out[at:][:t.Shape[t.Rank-1]*t.DType.Size()], 1)
	})
}

// do uploads every buffer, runs the operations, downloads the buffers, and checks that
// only the outputs declared by writes changed. If operations are Go work, do also checks
// their declarations.
func (r *rig) do(ops ...kernels.Op) {
	r.Helper()
	r.doPart(ops...)
	if r.recorder != nil {
		r.recorder.declared(r, true)
	}
}

// doPart is do for operations that need not read everything that is set.
func (r *rig) doPart(ops ...kernels.Op) {
	r.Helper()
	if r.recorder != nil {
		r.recorder.reads, r.recorder.writes = nil, nil
	}
	r.upload()
	for _, op := range ops {
		if err := r.backend.Enqueue(r.stream, op); err != nil {
			r.Fatal(err)
		}
	}
	r.download()
	for _, b := range r.buffers {
		if bytes.Equal(b.after, b.before) {
			b.report(r)
			continue
		}
		for i, v := range b.after {
			if v != b.before[i] && (b.out == nil || b.out[i] == 0) {
				r.Fatalf("byte %d of %s (%d in all) changed from %#x to %#x, which is no output", i-guard, b.name, len(b.after)-2*guard, b.before[i], v)
			}
		}
		b.report(r)
	}
}

// report passes the content of an output to Options.Output.
func (b *buffer) report(r *rig) {
	if b.out != nil && r.o.Output != nil {
		r.o.Output(r.Name(), b.name, b.after)
	}
}

// fill sets all of b to v.
func fill(b []byte, v byte) {
	if len(b) == 0 {
		return
	}
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

func (r *rig) upload() {
	r.Helper()
	for _, b := range r.buffers {
		n := int64(len(b.before))
		copy(b.host.Write(0, n), b.before)
		r.must(r.stream.Copy(b.device.Range(0, n), b.host.Range(0, n)))
	}
}

func (r *rig) download() {
	r.Helper()
	for _, b := range r.buffers {
		n := int64(len(b.before))
		r.must(r.stream.Copy(b.host.Range(0, n), b.device.Range(0, n)))
	}
	r.must(r.stream.Synchronize(r.Context()))
	for _, b := range r.buffers {
		b.after = append(b.after[:0], b.host.Read(0, int64(len(b.before)))...)
	}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// tolerance is the maximum error of a row, relative to its norm. Backends with 16-bit
// activations may accumulate with slightly less precision than float32.
func (r *rig) tolerance(t kernels.DType) float64 {
	switch {
	case t != kernels.F32:
		return 1e-2
	case r.act != kernels.F32:
		return 1e-4
	}
	return 1e-5
}

// near compares a row of t with the expected values.
func (r *rig) near(t tensor, want []float64, index ...int) {
	r.Helper()
	r.close(t, t.got(index...), want, 0, index...)
}

// close compares elements of a row of t. Where sums cancel, the error is measured as if
// the elements had at least the magnitude usual.
func (r *rig) close(t tensor, got, want []float64, usual float64, index ...int) {
	r.Helper()
	var off, norm float64
	worst := 0
	for i, w := range want {
		d := got[i] - w
		if math.IsNaN(d) {
			r.Fatalf("%s%v[%d] is %g, want %g", t.buffer.name, index, i, got[i], w)
		}
		if math.Abs(d) > math.Abs(got[worst]-want[worst]) {
			worst = i
		}
		off += d * d
		norm += w * w
	}
	norm = max(norm, usual*usual*float64(len(want)), 1e-60)
	if limit := r.tolerance(t.DType); math.Sqrt(off) > limit*math.Sqrt(norm) {
		r.Fatalf("%s%v is off by %.3g of its norm, want %.3g; element %d is %.9g, want %.9g",
			t.buffer.name, index, math.Sqrt(off/norm), limit, worst, got[worst], want[worst])
	}
}

// exact checks a row of integers.
func (r *rig) exact(t tensor, want []float64, index ...int) {
	r.Helper()
	for i, g := range t.got(index...) {
		if g != want[i] {
			r.Fatalf("%s%v is %v, want %v", t.buffer.name, index, t.got(index...), want)
		}
	}
}

// invariant checks, if BatchInvariant is set, that the rows of out have the same bits if
// the operation gets only these rows. op returns the operation on rows [from, to), with
// out as its output.
func (r *rig) invariant(out tensor, op func(r *rig, from, to int, out kernels.Tensor) kernels.Op) {
	r.Helper()
	n := out.Shape[0]
	if !r.o.BatchInvariant || n < 2 {
		return
	}
	want := bytes.Clone(out.buffer.after)
	cut := 1 + r.rand.IntN(n-1)
	for _, c := range [][2]int{{0, cut}, {cut, n}, {n - 1, n}} {
		part := tensor{out.Slice(c[0], c[1]), out.buffer}
		out.buffer.out = nil
		part.writes()
		r.doPart(op(r, c[0], c[1], part.Tensor))
		if r.recorder != nil {
			r.recorder.declared(r, false)
		}
		r.alike(part, want, fmt.Sprintf("rows %d to %d alone", c[0], c[1]))
	}
}

// alike checks that t has the same bits as want.
func (r *rig) alike(t tensor, want []byte, what string) {
	r.Helper()
	t.each(func(index ...int) {
		if got, want := t.in(t.buffer.after, index...), t.in(want, index...); !bytes.Equal(got, want) {
			r.Fatalf("%s%v with %s is not what it was before, bit for bit: %v, want %v", t.buffer.name, index, what, t.decode(got), t.decode(want))
		}
	})
}
