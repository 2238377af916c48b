package kernels

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/device"
)

// kinds is a set of element types.
type kinds uint16

const (
	floats kinds = 1<<F32 | 1<<BF16 | 1<<F16
	onlyF  kinds = 1 << F32
	onlyI  kinds = 1 << I32
	onlyL  kinds = 1 << I64
	onlyU  kinds = 1 << U64
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

// checker collects the first thing wrong with an operation's arguments. Every
// method does nothing after the first error, so that later checks may rely on
// earlier ones. Nothing is allocated while all is well.
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

// tensor checks one tensor by itself: type, rank, a shape without negative
// dimensions, and, unless it is empty, strides that neither overlap nor leave
// gaps in the last dimension, and an aligned address.
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
	inner := 1 // elements from the first to behind the last of the dimensions so far
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

// size checks dimension i of t, whose elements are called what, against n, which
// is what from has.
func (c *checker) size(name string, t *Tensor, i, n int, what, from string) {
	if c.err == nil && t.Shape[i] != n {
		c.failf("%s is %v, want %d %s (%s has %d)", name, *t, n, what, from, n)
	}
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

// apart checks that the written tensor t shares no memory with u. Tensors with
// gaps may be interleaved, so only dense ones are judged.
func (c *checker) apart(name string, t *Tensor, other string, u *Tensor) {
	if c.err == nil && t.Dense() && u.Dense() && overlap(t, u) {
		c.failf("%s %v overlaps %s %v", name, t.Range(), other, u.Range())
	}
}

// inPlace checks that t either is u, element for element, or shares no memory
// with it.
func (c *checker) inPlace(name string, t *Tensor, other string, u *Tensor) {
	if c.err == nil && t.Addr == u.Addr && t.Stride == u.Stride {
		return
	}
	c.apart(name, t, other, u)
}

func overlap(t, u *Tensor) bool {
	a, b := t.Range(), u.Range()
	return a.Bytes > 0 && b.Bytes > 0 && a.Addr < b.End() && b.Addr < a.End()
}

// Check implements Op.
func (o *Embed) Check() error {
	c := checker{op: o.Name()}
	c.tensor("IDs", &o.IDs, onlyI, 1)
	c.tensor("Table", &o.Table, floats, 2)
	c.tensor("Out", &o.Out, floats, 2)
	c.size("Out", &o.Out, 0, o.IDs.Shape[0], "rows", "IDs")
	c.size("Out", &o.Out, 1, o.Table.Shape[1], "columns", "Table")
	c.apart("Out", &o.Out, "Table", &o.Table)
	return c.err
}

// Check implements Op.
func (o *Norm) Check() error {
	c := checker{op: o.Name()}
	rank := 2
	if o.X.Rank == 3 {
		rank = 3
	}
	c.tensor("X", &o.X, floats, rank)
	if c.ok() && !o.Residual.None() {
		c.tensor("Residual", &o.Residual, floats, rank)
		c.same("Residual", &o.Residual, "X", &o.X)
		c.apart("Residual", &o.Residual, "X", &o.X)
	}
	c.normed(o.Kind, &o.Weight, &o.Bias, o.Eps, o.X.Shape[rank-1])
	c.tensor("Out", &o.Out, floats, rank)
	c.same("Out", &o.Out, "X", &o.X)
	c.inPlace("Out", &o.Out, "X", &o.X)
	if c.ok() && !o.Residual.None() {
		c.apart("Out", &o.Out, "Residual", &o.Residual)
	}
	return c.err
}

// normed checks how rows of d elements are normed.
func (c *checker) normed(kind NormKind, weight, bias *Tensor, eps float32, d int) {
	c.tensor("Weight", weight, floats, 1)
	c.size("Weight", weight, 0, d, "elements", "a row of X")
	if c.ok() && !bias.None() {
		c.tensor("Bias", bias, floats, 1)
		c.size("Bias", bias, 0, d, "elements", "a row of X")
	}
	if c.ok() && kind > Layer {
		c.failf("Kind is %d, want RMS (0) or Layer (1)", kind)
	}
	if c.ok() && !(eps >= 0) {
		c.failf("Eps is %g, want 0 or more", eps)
	}
}

// Check implements Op.
func (o *MatMul) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	c.tensor("W", &o.W, floats, 2)
	c.dense("W", &o.W)
	c.size("W", &o.W, 1, o.X.Shape[1], "columns", "X")
	if c.ok() && !o.Bias.None() {
		c.tensor("Bias", &o.Bias, floats, 1)
		c.size("Bias", &o.Bias, 0, o.W.Shape[0], "elements, one per row of W", "W")
	}
	c.tensor("Out", &o.Out, floats, 2)
	c.size("Out", &o.Out, 0, o.X.Shape[0], "rows", "X")
	c.size("Out", &o.Out, 1, o.W.Shape[0], "columns, one per row of W", "W")
	if c.ok() && o.Out.DType != F32 {
		c.sameType("Out", &o.Out, "X", &o.X)
	}
	c.apart("Out", &o.Out, "X", &o.X)
	c.apart("Out", &o.Out, "W", &o.W)
	return c.err
}

// Check implements Op.
func (o *Clamp) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	if c.ok() && !(o.Limit > 0) {
		c.failf("Limit is %g, want more than 0", o.Limit)
	}
	return c.err
}

// rotation checks queries and keys and how they are rotated.
func (c *checker) rotation(q, k, table, rows *Tensor) {
	c.tensor("Q", q, floats, 3)
	c.tensor("K", k, floats, 3)
	c.size("K", k, 0, q.Shape[0], "rows", "Q")
	c.size("K", k, 2, q.Shape[2], "columns", "Q")
	c.sameType("K", k, "Q", q)
	c.apart("K", k, "Q", q)
	if c.ok() && q.Shape[2]%2 != 0 {
		c.failf("Q is %v, want an even head size", *q)
	}
	c.tensor("Table", table, onlyF, 2)
	c.dense("Table", table)
	c.size("Table", table, 1, q.Shape[2], "columns", "Q")
	c.tensor("Rows", rows, onlyI, 1)
	c.size("Rows", rows, 0, q.Shape[0], "elements", "Q")
}

// Check implements Op.
func (o *RoPE) Check() error {
	c := checker{op: o.Name()}
	c.rotation(&o.Q, &o.K, &o.Table, &o.Rows)
	return c.err
}

// cache checks a pair of cache tensors against rows of the step, called name.
func (c *checker) cache(k, v *Tensor, name string, x *Tensor, head bool) {
	c.tensor("CacheK", k, floats, 4)
	c.tensor("CacheV", v, floats, 4)
	c.same("CacheV", v, "CacheK", k)
	c.apart("CacheV", v, "CacheK", k)
	c.sameType("CacheK", k, name, x)
	if head {
		c.size("CacheK", k, 2, x.Shape[1], "heads", name)
	}
	c.size("CacheK", k, 3, x.Shape[2], "columns", name)
	if c.ok() && k.Shape[1] == 0 {
		c.failf("CacheK is %v, want at least one token per block", *k)
	}
}

// appended checks keys and values and where they go.
func (c *checker) appended(k, v, cacheK, cacheV, slots *Tensor) {
	c.tensor("K", k, floats, 3)
	c.tensor("V", v, floats, 3)
	c.same("V", v, "K", k)
	c.cache(cacheK, cacheV, "K", k, true)
	c.tensor("Slots", slots, onlyI, 1)
	c.size("Slots", slots, 0, k.Shape[0], "elements", "K")
}

// Check implements Op.
func (o *AppendKV) Check() error {
	c := checker{op: o.Name()}
	c.appended(&o.K, &o.V, &o.CacheK, &o.CacheV, &o.Slots)
	return c.err
}

// Check implements Op.
func (o *RoPEAppendKV) Check() error {
	c := checker{op: o.Name()}
	c.rotation(&o.Q, &o.K, &o.Table, &o.Rows)
	c.appended(&o.K, &o.V, &o.CacheK, &o.CacheV, &o.Slots)
	c.apart("Q", &o.Q, "V", &o.V)
	if c.ok() && o.QNorm.None() != o.KNorm.None() {
		c.failf("QNorm is %v and KNorm %v, want both or none", o.QNorm, o.KNorm)
	}
	if c.ok() && !o.QNorm.None() {
		c.tensor("QNorm", &o.QNorm, floats, 1)
		c.size("QNorm", &o.QNorm, 0, o.Q.Shape[2], "elements", "a head of Q")
		c.tensor("KNorm", &o.KNorm, floats, 1)
		c.size("KNorm", &o.KNorm, 0, o.Q.Shape[2], "elements", "a head of Q")
	}
	if c.ok() && !(o.Eps >= 0) {
		c.failf("Eps is %g, want 0 or more", o.Eps)
	}
	return c.err
}

// Check implements Op.
func (o *Attention) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Q", &o.Q, floats, 3)
	c.cache(&o.CacheK, &o.CacheV, "Q", &o.Q, false)
	if c.ok() && (o.CacheK.Shape[2] == 0 || o.Q.Shape[1]%o.CacheK.Shape[2] != 0) {
		c.failf("Q is %v, want a multiple of CacheK's %d heads", o.Q, o.CacheK.Shape[2])
	}
	c.tensor("ContextLens", &o.ContextLens, onlyI, 1)
	c.tensor("SeqStarts", &o.SeqStarts, onlyI, 1)
	if s := o.ContextLens.Shape[0]; c.ok() && o.SeqStarts.Shape[0] != s+1 {
		c.failf("SeqStarts is %v, want %d elements (ContextLens has %d)", o.SeqStarts, s+1, s)
	}
	c.tensor("BlockTable", &o.BlockTable, onlyI, 2)
	c.size("BlockTable", &o.BlockTable, 0, o.ContextLens.Shape[0], "rows", "ContextLens")
	c.tensor("Out", &o.Out, floats, 3)
	c.same("Out", &o.Out, "Q", &o.Q)
	c.inPlace("Out", &o.Out, "Q", &o.Q)
	c.apart("Out", &o.Out, "CacheK", &o.CacheK)
	c.apart("Out", &o.Out, "CacheV", &o.CacheV)
	switch {
	case !c.ok():
	case o.Window < 0:
		c.failf("Window is %d, want 0 (all) or more", o.Window)
	case !(o.Scale > 0):
		c.failf("Scale is %g, want more than 0", o.Scale)
	case o.Q.Shape[0] > 0 && (o.MaxRows < 1 || o.MaxContext < o.MaxRows):
		c.failf("MaxContext is %d and MaxRows %d, want MaxContext >= MaxRows >= 1", o.MaxContext, o.MaxRows)
	case o.MaxContext > o.BlockTable.Shape[1]*o.CacheK.Shape[1]:
		c.failf("BlockTable is %v, want room for MaxContext %d in blocks of %d", o.BlockTable, o.MaxContext, o.CacheK.Shape[1])
	}
	return c.err
}

// Check implements Op.
func (o *Route) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, onlyF, 2)
	c.tensor("IDs", &o.IDs, onlyI, 2)
	c.dense("IDs", &o.IDs)
	c.size("IDs", &o.IDs, 0, o.Logits.Shape[0], "rows", "Logits")
	k, e := o.IDs.Shape[1], o.Logits.Shape[1]
	if c.ok() && (k < 1 || k > e) {
		c.failf("IDs is %v, want 1 to %d columns (Logits has %d)", o.IDs, e, e)
	}
	c.tensor("Weights", &o.Weights, onlyF, 2)
	c.dense("Weights", &o.Weights)
	c.size("Weights", &o.Weights, 0, o.IDs.Shape[0], "rows", "IDs")
	c.size("Weights", &o.Weights, 1, k, "columns", "IDs")
	if c.ok() && !o.Counts.None() {
		c.tensor("Counts", &o.Counts, onlyL, 1)
		c.size("Counts", &o.Counts, 0, e, "elements", "Logits")
	}
	c.apart("Weights", &o.Weights, "IDs", &o.IDs)
	switch {
	case !c.ok():
	case o.Method > SparseMixer:
		c.failf("Method is %d, want Softmax (0), SoftmaxRenorm (1) or SparseMixer (2)", o.Method)
	case o.Method == SparseMixer && k != 2:
		c.failf("IDs is %v, want 2 columns for SparseMixer", o.IDs)
	case o.Method == SparseMixer && !(o.Jitter >= 0):
		c.failf("Jitter is %g, want 0 or more", o.Jitter)
	}
	return c.err
}

// Check implements Op.
func (o *Group) Check() error {
	c := checker{op: o.Name()}
	c.tensor("IDs", &o.IDs, onlyI, 2)
	c.dense("IDs", &o.IDs)
	c.tensor("Offsets", &o.Offsets, onlyI, 1)
	if c.ok() && o.Offsets.Shape[0] < 2 {
		c.failf("Offsets is %v, want one more element than there are experts", o.Offsets)
	}
	c.tensor("Order", &o.Order, onlyI, 1)
	if c.ok() && o.Order.Shape[0] != o.IDs.Elements() {
		c.failf("Order is %v, want %d elements (IDs is %v)", o.Order, o.IDs.Elements(), o.IDs)
	}
	c.apart("Order", &o.Order, "IDs", &o.IDs)
	c.apart("Offsets", &o.Offsets, "IDs", &o.IDs)
	c.apart("Order", &o.Order, "Offsets", &o.Offsets)
	return c.err
}

// experts checks what both expert products share.
func (c *checker) experts(offsets, order, slots, experts *Tensor, l *ExpertLayout) {
	c.tensor("Offsets", offsets, onlyI, 1)
	c.tensor("Order", order, onlyI, 1)
	c.tensor("Slots", slots, onlyU, 1)
	if e := slots.Shape[0]; c.ok() && offsets.Shape[0] != e+1 {
		c.failf("Offsets is %v, want %d elements (Slots has %d)", *offsets, e+1, e)
	}
	c.tensor("Experts", experts, onlyI, 1)
	if c.ok() && experts.Shape[0] > slots.Shape[0] {
		c.failf("Experts is %v, want at most %d elements (Slots has %d)", *experts, slots.Shape[0], slots.Shape[0])
	}
	if c.ok() {
		if err := l.check(); err != nil {
			c.failf("Layout %v", err)
		}
	}
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

// Check implements Op.
func (o *ExpertUp) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	c.experts(&o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout)
	c.size("X", &o.X, 1, o.Layout.Hidden, "columns", "Layout.Hidden")
	n, pairs := o.X.Shape[0], o.Order.Shape[0]
	if c.ok() && (n == 0 && pairs != 0 || n != 0 && (pairs == 0 || pairs%n != 0)) {
		c.failf("Order is %v, want K elements for each of X's %d rows", o.Order, n)
	}
	c.tensor("Out", &o.Out, floats, 2)
	c.size("Out", &o.Out, 0, pairs, "rows", "Order")
	c.size("Out", &o.Out, 1, o.Layout.Intermediate, "columns", "Layout.Intermediate")
	c.sameType("Out", &o.Out, "X", &o.X)
	c.apart("Out", &o.Out, "X", &o.X)
	return c.err
}

// Check implements Op.
func (o *ExpertDown) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	c.experts(&o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout)
	c.size("X", &o.X, 0, o.Order.Shape[0], "rows", "Order")
	c.size("X", &o.X, 1, o.Layout.Intermediate, "columns", "Layout.Intermediate")
	c.tensor("Out", &o.Out, floats, 2)
	c.size("Out", &o.Out, 0, o.Order.Shape[0], "rows", "Order")
	c.size("Out", &o.Out, 1, o.Layout.Hidden, "columns", "Layout.Hidden")
	c.sameType("Out", &o.Out, "X", &o.X)
	c.apart("Out", &o.Out, "X", &o.X)
	return c.err
}

// Check implements Op.
func (o *Combine) Check() error {
	c := checker{op: o.Name()}
	c.combined(&o.X, &o.Weights, &o.Shared, &o.SharedGate)
	c.combination("Out", &o.Out, &o.X, &o.Weights, &o.Shared)
	return c.err
}

// combined checks what experts' outputs are combined of.
func (c *checker) combined(x, weights, shared, gate *Tensor) {
	c.tensor("Weights", weights, onlyF, 2)
	c.dense("Weights", weights)
	c.tensor("X", x, floats, 2)
	if c.ok() && x.Shape[0] != weights.Elements() {
		c.failf("X is %v, want %d rows (Weights is %v)", *x, weights.Elements(), *weights)
	}
	if c.ok() && shared.None() != gate.None() {
		c.failf("Shared is %v and SharedGate %v, want both or none", *shared, *gate)
	}
	if c.ok() && !shared.None() {
		n := weights.Shape[0]
		c.tensor("Shared", shared, floats, 2)
		c.size("Shared", shared, 0, n, "rows", "Weights")
		c.size("Shared", shared, 1, x.Shape[1], "columns", "X")
		c.sameType("Shared", shared, "X", x)
		c.tensor("SharedGate", gate, onlyF, 2)
		c.size("SharedGate", gate, 0, n, "rows", "Weights")
		if c.ok() && gate.Shape[1] != 1 {
			c.failf("SharedGate is %v, want 1 column", *gate)
		}
	}
}

// combination checks a written tensor that has a row for each of weights, and lies apart
// from what is combined.
func (c *checker) combination(name string, t, x, weights, shared *Tensor) {
	c.tensor(name, t, floats, 2)
	c.size(name, t, 0, weights.Shape[0], "rows", "Weights")
	c.size(name, t, 1, x.Shape[1], "columns", "X")
	c.sameType(name, t, "X", x)
	c.apart(name, t, "X", x)
	if c.ok() && !shared.None() {
		c.apart(name, t, "Shared", shared)
	}
}

// Check implements Op.
func (o *CombineNorm) Check() error {
	c := checker{op: o.Name()}
	c.combined(&o.X, &o.Weights, &o.Shared, &o.SharedGate)
	c.normed(o.Kind, &o.Weight, &o.Bias, o.Eps, o.X.Shape[1])
	c.combination("Residual", &o.Residual, &o.X, &o.Weights, &o.Shared)
	c.combination("Out", &o.Out, &o.X, &o.Weights, &o.Shared)
	c.apart("Out", &o.Out, "Residual", &o.Residual)
	return c.err
}

// Check implements Op.
func (o *SiluMul) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Gate", &o.Gate, floats, 2)
	c.tensor("Up", &o.Up, floats, 2)
	c.same("Up", &o.Up, "Gate", &o.Gate)
	c.tensor("Out", &o.Out, floats, 2)
	c.same("Out", &o.Out, "Gate", &o.Gate)
	c.inPlace("Out", &o.Out, "Gate", &o.Gate)
	c.inPlace("Out", &o.Out, "Up", &o.Up)
	return c.err
}

// Check implements Op.
func (o *Gather) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	c.tensor("Rows", &o.Rows, onlyI, 1)
	c.tensor("Out", &o.Out, floats, 2)
	c.size("Out", &o.Out, 0, o.Rows.Shape[0], "rows", "Rows")
	c.size("Out", &o.Out, 1, o.X.Shape[1], "columns", "X")
	c.sameType("Out", &o.Out, "X", &o.X)
	c.apart("Out", &o.Out, "X", &o.X)
	return c.err
}

// Check implements Op.
func (o *Sample) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, onlyF, 2)
	if c.ok() && o.Logits.Shape[1] < 1 {
		c.failf("Logits is %v, want at least one column", o.Logits)
	}
	s := o.Logits.Shape[0]
	c.tensor("Temperature", &o.Temperature, onlyF, 1)
	c.size("Temperature", &o.Temperature, 0, s, "elements", "Logits")
	c.tensor("Seeds", &o.Seeds, onlyU, 1)
	c.size("Seeds", &o.Seeds, 0, s, "elements", "Logits")
	c.tensor("Samples", &o.Samples, onlyI, 1)
	c.size("Samples", &o.Samples, 0, s, "elements", "Logits")
	c.tensor("Positions", &o.Positions, onlyI, 1)
	c.size("Positions", &o.Positions, 0, s, "elements", "Logits")
	c.perRow("TopK", &o.TopK, onlyI, s)
	c.perRow("TopP", &o.TopP, onlyF, s)
	c.perRow("MinP", &o.MinP, onlyF, s)
	c.tensor("Out", &o.Out, onlyI, 1)
	c.size("Out", &o.Out, 0, s, "elements", "Logits")
	c.apart("Out", &o.Out, "Samples", &o.Samples)
	c.apart("Out", &o.Out, "Positions", &o.Positions)
	c.apart("Out", &o.Out, "TopK", &o.TopK)
	return c.err
}

// perRow checks a tensor of one element for each of s rows of logits, which may
// be none.
func (c *checker) perRow(name string, t *Tensor, k kinds, s int) {
	if c.ok() && !t.None() {
		c.tensor(name, t, k, 1)
		c.size(name, t, 0, s, "elements", "Logits")
	}
}

// listed checks the logits, and the lists of them, of Adjust and Restore.
func (c *checker) listed(logits, starts, ids *Tensor) {
	c.tensor("Logits", logits, onlyF, 2)
	c.tensor("Starts", starts, onlyI, 1)
	if c.ok() && starts.Shape[0] != logits.Shape[0]+1 {
		c.failf("Starts is %v, want %d elements (Logits has %d rows)", *starts, logits.Shape[0]+1, logits.Shape[0])
	}
	c.tensor("IDs", ids, onlyI, 1)
}

// Check implements Op.
func (o *Adjust) Check() error {
	c := checker{op: o.Name()}
	c.listed(&o.Logits, &o.Starts, &o.IDs)
	s, l := o.Logits.Shape[0], o.IDs.Shape[0]
	c.tensor("Seen", &o.Seen, onlyI, 1)
	c.size("Seen", &o.Seen, 0, l, "elements", "IDs")
	c.tensor("Bias", &o.Bias, onlyF, 1)
	c.size("Bias", &o.Bias, 0, l, "elements", "IDs")
	c.tensor("Repetition", &o.Repetition, onlyF, 1)
	c.size("Repetition", &o.Repetition, 0, s, "elements", "Logits")
	c.tensor("Presence", &o.Presence, onlyF, 1)
	c.size("Presence", &o.Presence, 0, s, "elements", "Logits")
	c.tensor("Frequency", &o.Frequency, onlyF, 1)
	c.size("Frequency", &o.Frequency, 0, s, "elements", "Logits")
	c.tensor("Saved", &o.Saved, onlyF, 1)
	c.size("Saved", &o.Saved, 0, l, "elements", "IDs")
	c.apart("Saved", &o.Saved, "Logits", &o.Logits)
	c.apart("Saved", &o.Saved, "Bias", &o.Bias)
	return c.err
}

// Check implements Op.
func (o *Restore) Check() error {
	c := checker{op: o.Name()}
	c.listed(&o.Logits, &o.Starts, &o.IDs)
	c.tensor("Saved", &o.Saved, onlyF, 1)
	c.size("Saved", &o.Saved, 0, o.IDs.Shape[0], "elements", "IDs")
	c.apart("Logits", &o.Logits, "Saved", &o.Saved)
	return c.err
}

// Check implements Op.
func (o *LogProbs) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, onlyF, 2)
	if c.ok() && o.Logits.Shape[1] < 1 {
		c.failf("Logits is %v, want at least one column", o.Logits)
	}
	s := o.Logits.Shape[0]
	c.tensor("Tokens", &o.Tokens, onlyI, 1)
	c.size("Tokens", &o.Tokens, 0, s, "elements", "Logits")
	c.tensor("Chosen", &o.Chosen, onlyF, 1)
	c.size("Chosen", &o.Chosen, 0, s, "elements", "Logits")
	c.apart("Chosen", &o.Chosen, "Logits", &o.Logits)
	if c.ok() && o.TopIDs.None() != o.Top.None() {
		c.failf("TopIDs is %v and Top %v, want both or none", o.TopIDs, o.Top)
	}
	if !c.ok() || o.TopIDs.None() {
		return c.err
	}
	c.tensor("TopIDs", &o.TopIDs, onlyI, 2)
	c.dense("TopIDs", &o.TopIDs)
	c.size("TopIDs", &o.TopIDs, 0, s, "rows", "Logits")
	if n, v := o.TopIDs.Shape[1], o.Logits.Shape[1]; c.ok() && n > v {
		c.failf("TopIDs is %v, want at most %d columns (Logits has %d)", o.TopIDs, v, v)
	}
	c.apart("TopIDs", &o.TopIDs, "Tokens", &o.Tokens)
	c.tensor("Top", &o.Top, onlyF, 2)
	c.dense("Top", &o.Top)
	c.size("Top", &o.Top, 0, s, "rows", "Logits")
	c.size("Top", &o.Top, 1, o.TopIDs.Shape[1], "columns", "TopIDs")
	c.apart("Top", &o.Top, "Logits", &o.Logits)
	c.apart("Top", &o.Top, "Chosen", &o.Chosen)
	return c.err
}
