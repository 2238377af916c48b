package kernels

// ExpertGEMM is what ExpertUp and ExpertDown have in common: rows of X times a matrix
// of the listed experts that each row's token chose. It touches no extent of an expert
// without pairs, whose slot may be 0, and leaves the rows of Out of other experts alone.
type ExpertGEMM struct {
	X       Tensor // up: [N, H] act; down: [N*K, I] act, as ExpertUp has left it
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
	Slots   Tensor // [E] U64: address of each listed expert's extent
	Experts Tensor // [listed] I32: the experts of this launch, each once
	Layout  ExpertLayout
	Out     Tensor // up: [N*K, I] act, rows as in Order: an expert's stand together; down: [N*K, H] act
}

// checkLists checks X by itself, and which experts are to be applied to which pairs.
func (p *ExpertGEMM) checkLists(c *checker) {
	c.tensor("X", &p.X, floats, 2)
	c.tensor("Offsets", &p.Offsets, onlyI, 1)
	c.tensor("Order", &p.Order, onlyI, 1)
	c.tensor("Slots", &p.Slots, onlyU, 1)
	if e := p.Slots.Shape[0]; c.ok() && p.Offsets.Shape[0] != e+1 {
		c.failf("Offsets is %v, want %d elements (Slots has %d)", p.Offsets, e+1, e)
	}
	c.tensor("Experts", &p.Experts, onlyI, 1)
	if c.ok() && p.Experts.Shape[0] > p.Slots.Shape[0] {
		c.failf("Experts is %v, want at most %d elements (Slots has %d)", p.Experts, p.Slots.Shape[0], p.Slots.Shape[0])
	}
	if c.ok() {
		if err := p.Layout.check(); err != nil {
			c.failf("Layout %v", err)
		}
	}
}

// checkOut checks that Out has a row of so many columns for each pair, apart from X.
func (p *ExpertGEMM) checkOut(c *checker, columns dim) {
	c.matrix("Out", &p.Out, floats, dim{p.Order.Shape[0], "Order"}, columns)
	c.sameType("Out", &p.Out, "X", &p.X)
	c.apart("Out", &p.Out, "X", &p.X)
}

// declare adds what is read whatever the data says, and an estimate of the rest for a
// product with so many of an expert's matrices: every expert has its even share of the
// pairs, and each listed expert that can have one is read once.
func (p *ExpertGEMM) declare(d *Decl, matrices int64) {
	d.read(&p.Offsets)
	d.read(&p.Order)
	d.read(&p.Slots)
	d.read(&p.Experts)
	order, listed, all := int64(p.Order.Shape[0]), int64(p.Experts.Shape[0]), int64(p.Slots.Shape[0])
	if all == 0 {
		return
	}
	pairs := (order*listed + all - 1) / all
	matrix := int64(p.Layout.Hidden) * int64(p.Layout.Intermediate)
	d.Bytes += min(listed, order) * matrices * matrix * int64(p.Layout.DType.Size())
	d.Bytes += pairs * int64(p.Layout.Hidden+p.Layout.Intermediate) * int64(p.X.DType.Size())
	d.Flops += 2 * matrices * matrix * pairs
}

// ExpertUp computes Out[i] = silu(w1 X[p/K]) * (w3 X[p/K]) for every pair p = Order[i]
// of the listed experts.
type ExpertUp struct{ ExpertGEMM }

// Name implements Op.
func (*ExpertUp) Name() string { return "expert_up" }

// Check implements Op.
func (o *ExpertUp) Check() error {
	c := checker{op: o.Name()}
	o.checkLists(&c)
	c.size("X", &o.X, 1, o.Layout.Hidden, "columns", "Layout.Hidden")
	n, pairs := o.X.Shape[0], o.Order.Shape[0]
	if c.ok() && (n == 0 && pairs != 0 || n != 0 && (pairs == 0 || pairs%n != 0)) {
		c.failf("Order is %v, want K elements for each of X's %d rows", o.Order, n)
	}
	o.checkOut(&c, dim{o.Layout.Intermediate, "Layout.Intermediate"})
	return c.err
}

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertUp) Declare(d *Decl) { o.declare(d, 2) }

// ExpertDown computes Out[p] = w2 X[i] for every pair p = Order[i] of the listed experts.
type ExpertDown struct{ ExpertGEMM }

// Name implements Op.
func (*ExpertDown) Name() string { return "expert_down" }

// Check implements Op.
func (o *ExpertDown) Check() error {
	c := checker{op: o.Name()}
	o.checkLists(&c)
	c.size("X", &o.X, 0, o.Order.Shape[0], "rows", "Order")
	c.size("X", &o.X, 1, o.Layout.Intermediate, "columns", "Layout.Intermediate")
	o.checkOut(&c, dim{o.Layout.Hidden, "Layout.Hidden"})
	return c.err
}

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertDown) Declare(d *Decl) { o.declare(d, 1) }
