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
	return c.err
}

// Declare implements Op.
func (o *MatMul) Declare(d *Decl) {
	d.read(&o.X)
	d.read(&o.W)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 2 * int64(o.X.Shape[0]) * int64(o.W.Elements())
}
