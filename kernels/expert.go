package kernels

// ExpertUp computes Out[i] = silu(w1 X[p/K]) * (w3 X[p/K]) for every pair p = Order[i]
// of the listed experts, and leaves the rows of other experts alone. It touches no
// extent of an expert without pairs, whose slot may be 0.
type ExpertUp struct {
	X       Tensor // [N, H] act
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
	Slots   Tensor // [E] U64: address of each listed expert's extent
	Experts Tensor // [listed] I32: the experts of this launch, each once
	Layout  ExpertLayout
	Out     Tensor // [N*K, I] act, rows as in Order: an expert's stand together
}

// Name implements Op.
func (*ExpertUp) Name() string { return "expert_up" }

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

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertUp) Declare(d *Decl) {
	declareExperts(d, &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout, o.X.DType, 2)
}

// ExpertDown computes Out[p] = w2 X[i] for every pair p = Order[i] of the listed experts.
type ExpertDown struct {
	X       Tensor // [N*K, I] act, as ExpertUp has left it
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
	Slots   Tensor // [E] U64
	Experts Tensor // [listed] I32
	Layout  ExpertLayout
	Out     Tensor // [N*K, H] act
}

// Name implements Op.
func (*ExpertDown) Name() string { return "expert_down" }

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

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertDown) Declare(d *Decl) {
	declareExperts(d, &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout, o.X.DType, 1)
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

// declareExperts declares what both expert products read whatever the data says,
// and estimates the rest: every expert has its even share of the pairs, and each
// listed expert that can have one is read once.
func declareExperts(d *Decl, offsets, order, slots, experts *Tensor, l *ExpertLayout, act DType, parts int64) {
	d.read(offsets)
	d.read(order)
	d.read(slots)
	d.read(experts)
	listed, all := int64(experts.Shape[0]), int64(slots.Shape[0])
	if all == 0 {
		return
	}
	pairs := (int64(order.Shape[0])*listed + all - 1) / all
	matrix := int64(l.Hidden) * int64(l.Intermediate)
	d.Bytes += min(listed, int64(order.Shape[0])) * parts * matrix * int64(l.DType.Size())
	d.Bytes += pairs * int64(l.Hidden+l.Intermediate) * int64(act.Size())
	d.Flops += 2 * parts * matrix * pairs
}
