package kernels

// MatMul writes Out = X Wᵀ (+ Bias).
type MatMul struct {
	X    Tensor // [N, A] act
	W    Tensor // [M, A] weight, dense
	Bias Tensor // [M] weight, or none
	Out  Tensor // [N, M] act or F32
}

// Name implements Op.
func (*MatMul) Name() string { return "matmul" }

// Check implements Op.
func (o *MatMul) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

// check is Check within an operation that includes this one.
func (o *MatMul) check(c *checker) {
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
	c.disjoint("Out", &o.Out, "X", &o.X)
	c.disjoint("Out", &o.Out, "W", &o.W)
}

// Declare implements Op.
func (o *MatMul) Declare(d *Decl) {
	d.read(&o.X)
	d.read(&o.W)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 2 * int64(o.X.Shape[0]) * int64(o.W.Elements())
}

// GatedMatMul is a gate/up projection: it writes silu(gate) up, where gate is the first half of
// X Wᵀ and up the second, with the bits of MatMul and SiluMul one after the other.
type GatedMatMul struct {
	X Tensor // [N, A] act
	W Tensor // [2I, A] weight, dense
	// Out is [N, 2I] act: the first I columns are the result, the others are undefined afterwards.
	Out Tensor
}

// Apart returns the operations that o replaces.
func (o *GatedMatMul) Apart() (MatMul, SiluMul) {
	wide := o.Out.Shape[1] / 2
	gate := o.Out.Narrow(1, 0, wide)
	return MatMul{X: o.X, W: o.W, Out: o.Out}, SiluMul{Gate: gate, Up: o.Out.Narrow(1, wide, 2*wide), Out: gate}
}

// Name implements Op.
func (*GatedMatMul) Name() string { return "gated_matmul" }

// Check implements Op.
func (o *GatedMatMul) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

// check is Check within an operation that includes this one.
func (o *GatedMatMul) check(c *checker) {
	all := MatMul{X: o.X, W: o.W, Out: o.Out}
	all.check(c)
	c.sameType("Out", &o.Out, "X", &o.X)
	if c.ok() && o.W.Shape[0]%2 != 0 {
		c.failf("W is %v, want an even number of rows: gate, then up", o.W)
	}
}

// Declare implements Op.
func (o *GatedMatMul) Declare(d *Decl) {
	product, silu := o.Apart()
	product.Declare(d)
	d.Flops += 5 * int64(silu.Out.Elements())
}
