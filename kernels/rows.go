package kernels

// Embed writes Out[n] = Table[IDs[n]]. Where IDs[n] is -1, as Sample writes if no token can be sampled, row n is NaN.
type Embed struct {
	IDs   Tensor // [N] I32, each in [-1, V)
	Table Tensor // [V, H] weight
	Out   Tensor // [N, H] act
}

// Name implements Op.
func (*Embed) Name() string { return "embed" }

// Check implements Op.
func (o *Embed) Check() error {
	c := checker{op: o.Name()}
	c.tensor("IDs", &o.IDs, int32Only, 1)
	c.tensor("Table", &o.Table, floats, 2)
	c.matrix("Out", &o.Out, floats, dim{o.IDs.Shape[0], "IDs"}, dim{o.Table.Shape[1], "Table"})
	c.disjoint("Out", &o.Out, "Table", &o.Table)
	return c.err
}

// Declare implements Op. Reads has the whole table; Bytes counts the rows used.
func (o *Embed) Declare(d *Decl) {
	d.read(&o.IDs)
	d.Reads = o.Table.AppendRanges(d.Reads)
	d.Bytes += int64(o.Out.Elements()) * int64(o.Table.DType.Size())
	d.write(&o.Out)
}

// NormKind selects RMSNorm or LayerNorm.
type NormKind uint8

// The norms: RMS divides by the root mean square; Layer subtracts the mean,
// divides by the standard deviation (of the population), and has a bias.
const (
	RMS NormKind = iota
	Layer
)

// Norm writes Out = norm(X) * Weight (+ Bias) over the last dimension. With Residual it first
// sets Residual += X and norms that.
type Norm struct {
	Kind     NormKind
	X        Tensor // [N, D] or [N, heads, D] act
	Residual Tensor // as X, or none
	Weight   Tensor // [D] weight
	Bias     Tensor // [D] weight, or none
	Eps      float32
	Out      Tensor // as X; may be X
}

// Name implements Op.
func (*Norm) Name() string { return "norm" }

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
		c.disjoint("Residual", &o.Residual, "X", &o.X)
	}
	c.norm(o.Kind, &o.Weight, &o.Bias, o.Eps, o.X.Shape[rank-1])
	c.tensor("Out", &o.Out, floats, rank)
	c.same("Out", &o.Out, "X", &o.X)
	c.inPlace("Out", &o.Out, "X", &o.X)
	if c.ok() && !o.Residual.None() {
		c.disjoint("Out", &o.Out, "Residual", &o.Residual)
	}
	return c.err
}

// Declare implements Op.
func (o *Norm) Declare(d *Decl) {
	d.read(&o.X)
	if !o.Residual.None() {
		d.update(&o.Residual)
	}
	d.read(&o.Weight)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 8 * int64(o.X.Elements())
}

// norm checks the parameters of a norm of rows of d elements.
func (c *checker) norm(kind NormKind, weight, bias *Tensor, eps float32, d int) {
	c.list("Weight", weight, floats, d, "a row of X")
	if c.ok() && !bias.None() {
		c.list("Bias", bias, floats, d, "a row of X")
	}
	if c.ok() && kind > Layer {
		c.failf("Kind is %d, want RMS (0) or Layer (1)", kind)
	}
	if c.ok() && !(eps >= 0) {
		c.failf("Eps is %g, want 0 or more", eps)
	}
}

// Clamp limits every element of X to [-Limit, Limit], in place (OLMoE's clip_qkv).
type Clamp struct {
	X     Tensor // [N, D] act
	Limit float32
}

// Name implements Op.
func (*Clamp) Name() string { return "clamp" }

// Check implements Op.
func (o *Clamp) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	if c.ok() && !(o.Limit > 0) {
		c.failf("Limit is %g, want more than 0", o.Limit)
	}
	return c.err
}

// Declare implements Op.
func (o *Clamp) Declare(d *Decl) {
	d.update(&o.X)
	d.Flops += 2 * int64(o.X.Elements())
}

// SiluMul writes Out = silu(Gate) * Up.
type SiluMul struct {
	Gate, Up Tensor // [N, I] act
	Out      Tensor // [N, I] act; may be Gate
}

// Name implements Op.
func (*SiluMul) Name() string { return "silu_mul" }

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

// Declare implements Op.
func (o *SiluMul) Declare(d *Decl) {
	d.read(&o.Gate)
	d.read(&o.Up)
	d.write(&o.Out)
	d.Flops += 5 * int64(o.Out.Elements())
}

// Gather writes Out[s] = X[Rows[s]].
type Gather struct {
	X    Tensor // [N, H] act
	Rows Tensor // [S] I32
	Out  Tensor // [S, H] act
}

// Name implements Op.
func (*Gather) Name() string { return "gather" }

// Check implements Op.
func (o *Gather) Check() error {
	c := checker{op: o.Name()}
	c.tensor("X", &o.X, floats, 2)
	c.tensor("Rows", &o.Rows, int32Only, 1)
	c.matrix("Out", &o.Out, floats, dim{o.Rows.Shape[0], "Rows"}, dim{o.X.Shape[1], "X"})
	c.sameType("Out", &o.Out, "X", &o.X)
	c.disjoint("Out", &o.Out, "X", &o.X)
	return c.err
}

// Declare implements Op. Reads has no rows of X: only Rows determines which.
func (o *Gather) Declare(d *Decl) {
	d.read(&o.Rows)
	d.Bytes += o.Out.Bytes()
	d.write(&o.Out)
}
