package kernels

// Combine writes Out[n] = sum over k, in order of k, of Weights[n, k] X[n*K+k], plus
// sigmoid(SharedGate[n]) Shared[n] if there is a shared expert.
type Combine struct {
	X          Tensor // [N*K, H] act
	Weights    Tensor // [N, K] F32, dense
	Shared     Tensor // [N, H] act, or none
	SharedGate Tensor // [N, 1] F32, or none
	Out        Tensor // [N, H] act
}

// Name implements Op.
func (*Combine) Name() string { return "combine" }

// Check implements Op.
func (o *Combine) Check() error {
	c := checker{op: o.Name()}
	c.combined(&o.X, &o.Weights, &o.Shared, &o.SharedGate)
	c.combination("Out", &o.Out, &o.X, &o.Weights, &o.Shared)
	return c.err
}

// Declare implements Op.
func (o *Combine) Declare(d *Decl) {
	declareCombined(d, &o.X, &o.Weights, &o.Shared, &o.SharedGate)
	d.write(&o.Out)
}

// combined checks the inputs of the weighted sum of expert outputs.
func (c *checker) combined(x, weights, shared, gate *Tensor) {
	c.tensor("Weights", weights, float32Only, 2)
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
		c.matrix("Shared", shared, floats, dim{n, "Weights"}, dim{x.Shape[1], "X"})
		c.sameType("Shared", shared, "X", x)
		c.tensor("SharedGate", gate, float32Only, 2)
		c.size("SharedGate", gate, 0, n, "rows", "Weights")
		if c.ok() && gate.Shape[1] != 1 {
			c.failf("SharedGate is %v, want 1 column", *gate)
		}
	}
}

// combination checks an output with a row for each row of weights; it must not overlap x and
// shared.
func (c *checker) combination(name string, t, x, weights, shared *Tensor) {
	c.matrix(name, t, floats, dim{weights.Shape[0], "Weights"}, dim{x.Shape[1], "X"})
	c.sameType(name, t, "X", x)
	c.disjoint(name, t, "X", x)
	if c.ok() && !shared.None() {
		c.disjoint(name, t, "Shared", shared)
	}
}

func declareCombined(d *Decl, x, weights, shared, gate *Tensor) {
	d.read(x)
	d.read(weights)
	d.Flops += 2 * int64(x.Elements())
	if !shared.None() {
		d.read(shared)
		d.read(gate)
		d.Flops += 2 * int64(shared.Elements())
	}
}

// CombineNorm is Combine followed by a Norm of its output with Residual, with the same bits: if
// x is the output of Combine, rounded to the activation type, it sets Residual += x and Out =
// norm(Residual) * Weight (+ Bias). x itself is not stored.
type CombineNorm struct {
	X          Tensor // [N*K, H] act
	Weights    Tensor // [N, K] F32, dense
	Shared     Tensor // [N, H] act, or none
	SharedGate Tensor // [N, 1] F32, or none
	Kind       NormKind
	Residual   Tensor // [N, H] act
	Weight     Tensor // [H] weight
	Bias       Tensor // [H] weight, or none
	Eps        float32
	Out        Tensor // [N, H] act
}

// Name implements Op.
func (*CombineNorm) Name() string { return "combine_norm" }

// Check implements Op.
func (o *CombineNorm) Check() error {
	c := checker{op: o.Name()}
	c.combined(&o.X, &o.Weights, &o.Shared, &o.SharedGate)
	c.norm(o.Kind, &o.Weight, &o.Bias, o.Eps, o.X.Shape[1])
	c.combination("Residual", &o.Residual, &o.X, &o.Weights, &o.Shared)
	c.combination("Out", &o.Out, &o.X, &o.Weights, &o.Shared)
	c.disjoint("Out", &o.Out, "Residual", &o.Residual)
	return c.err
}

// Declare implements Op.
func (o *CombineNorm) Declare(d *Decl) {
	declareCombined(d, &o.X, &o.Weights, &o.Shared, &o.SharedGate)
	d.update(&o.Residual)
	d.read(&o.Weight)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 8 * int64(o.Out.Elements())
}
