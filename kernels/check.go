package kernels

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/device"
)

// kinds is a set of element types.
type kinds uint16

const (
	floats      kinds = 1<<F32 | 1<<BF16 | 1<<F16
	float32Only kinds = 1 << F32
	int32Only   kinds = 1 << I32
	int64Only   kinds = 1 << I64
	uint64Only  kinds = 1 << U64
	anyType           = floats | int32Only | int64Only | uint64Only
)

func (k kinds) has(t DType) bool { return k>>t&1 != 0 }

func (k kinds) String() string {
	var names []string
	for t := range dtypes {
		if k.has(DType(t)) {
			names = append(names, dtypes[t].name)
		}
	}
	if n := len(names); n > 1 {
		return strings.Join(names[:n-1], ", ") + " or " + names[n-1]
	}
	return strings.Join(names, "")
}

// checker keeps the first error in an operation's arguments. After an error every method is a
// no-op, so later checks may rely on earlier ones. Nothing is allocated unless there is an
// error.
type checker struct {
	op  string
	err error
}

func (c *checker) ok() bool { return c.err == nil }

func (c *checker) failf(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("kernels: %s: %s", c.op, fmt.Sprintf(format, args...))
	}
}

// tensor checks one tensor alone: type, rank, non-negative dimensions, and, unless it is empty,
// strides without overlap and without gaps in the last dimension, and an aligned address.
func (c *checker) tensor(name string, t *Tensor, k kinds, rank int) {
	if c.err != nil {
		return
	}
	if int(t.DType) >= len(dtypes) {
		c.failf("%s has unknown type %d", name, uint8(t.DType))
		return
	}
	if t.None() {
		c.failf("%s is missing, want %v of rank %d", name, k, rank)
		return
	}
	if !k.has(t.DType) {
		c.failf("%s is %v, want %v", name, *t, k)
		return
	}
	if t.Rank != rank {
		c.failf("%s is %v, want rank %d", name, *t, rank)
		return
	}
	for _, n := range t.Shape[:rank] {
		if n < 0 {
			c.failf("%s is %v, want no negative dimension", name, *t)
			return
		}
	}
	if t.Elements() == 0 {
		return
	}
	inner := 1 // elements spanned by the dimensions so far
	for i := rank - 1; i >= 0; i-- {
		n, stride := t.Shape[i], t.Stride[i]
		switch {
		case n == 1:
			continue
		case i == rank-1 && stride != 1:
			c.failf("%s is %v, want the last dimension without gaps", name, *t)
			return
		case stride < inner:
			c.failf("%s is %v, want no overlap between elements", name, *t)
			return
		}
		inner += (n - 1) * stride
	}
	if t.Addr == 0 {
		c.failf("%s is %v at address 0", name, *t)
		return
	}
	if t.Addr%device.Addr(t.DType.Size()) != 0 {
		c.failf("%s lies at %#x, want a multiple of %d bytes", name, uint64(t.Addr), t.DType.Size())
	}
}

func (c *checker) dense(name string, t *Tensor) {
	if c.err == nil && !t.Dense() {
		c.failf("%s is %v, want it dense", name, *t)
	}
}

// size checks that dimension i of t is n, as it is in the argument called from. what names the
// elements of the dimension in errors.
func (c *checker) size(name string, t *Tensor, i, n int, what, from string) {
	if c.err == nil && t.Shape[i] != n {
		c.failf("%s is %v, want %d %s (%s has %d)", name, *t, n, what, from, n)
	}
}

// list checks a tensor of one dimension with n elements, as many as the argument called from
// has.
func (c *checker) list(name string, t *Tensor, k kinds, n int, from string) {
	c.tensor(name, t, k, 1)
	c.size(name, t, 0, n, "elements", from)
}

// dim is the expected size of a dimension, and the argument that determines it.
type dim struct {
	n    int
	from string
}

// matrix checks a tensor with that number of rows and columns.
func (c *checker) matrix(name string, t *Tensor, k kinds, rows, columns dim) {
	c.tensor(name, t, k, 2)
	c.size(name, t, 0, rows.n, "rows", rows.from)
	c.size(name, t, 1, columns.n, "columns", columns.from)
}

// same checks that t has the shape and type of u.
func (c *checker) same(name string, t *Tensor, from string, u *Tensor) {
	if c.err == nil && (t.Rank != u.Rank || t.Shape != u.Shape) {
		c.failf("%s is %v, want the shape %v of %s", name, *t, u.Shape[:u.Rank], from)
	}
	c.sameType(name, t, from, u)
}

func (c *checker) sameType(name string, t *Tensor, from string, u *Tensor) {
	if c.err == nil && t.DType != u.DType {
		c.failf("%s is %v, want %v as %s is", name, *t, u.DType, from)
	}
}

// disjoint checks that the output t shares no memory with u. Tensors with gaps may be
// interleaved, so only dense ones are checked.
func (c *checker) disjoint(name string, t *Tensor, other string, u *Tensor) {
	if c.err == nil && t.Dense() && u.Dense() && overlap(t, u) {
		c.failf("%s %v overlaps %s %v", name, t.Range(), other, u.Range())
	}
}

// inPlace checks that t is u, element for element, or shares no memory with it.
func (c *checker) inPlace(name string, t *Tensor, other string, u *Tensor) {
	if c.err == nil && t.Addr == u.Addr && t.Stride == u.Stride {
		return
	}
	c.disjoint(name, t, other, u)
}

func overlap(t, u *Tensor) bool {
	a, b := t.Range(), u.Range()
	return a.Overlaps(b)
}
