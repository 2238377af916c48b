package kernels

// ExpertGEMM has the arguments of ExpertUp, ExpertDown and ExpertFFN: a grouped GEMM of rows of X with a
// matrix of each listed expert, for the tokens routed to it. It does not read the extent of an
// expert without pairs, whose slot may be 0, and does not write the rows of Out that belong to
// experts not listed.
type ExpertGEMM struct {
	X       Tensor // up and FFN: [N, H] act; down: [N*K, I] act, the output of ExpertUp
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
	Slots   Tensor // [E] U64: address of each listed expert's extent
	Experts Tensor // [listed] I32: the experts of this launch, each once
	Layout  ExpertLayout
	Out     Tensor // up: [N*K, I] act, rows in the order of Order, so each expert's are contiguous; down and FFN: [N*K, H] act
	// Columns is the part of the intermediate size that is computed; none: all of it. Then I above is
	// its length, and what ExpertDown writes is a part of a sum.
	Columns Columns
	// Runs, [MostRuns(E, N*K), RunColumns] I32, dense, or none: what Route wrote for these pairs, in agreement with
	// Offsets, of at most MaxRunRows tokens. Only where Experts lists all experts and all
	// columns are computed: then a device need not look for the experts with pairs.
	Runs Tensor
}

// Columns are those of an expert's intermediate size from First up to End, both multiples of
// TileColumns or the size itself: rows of w1 and w3, columns of w2. The zero value is none.
type Columns struct{ First, End int }

// Divisible reports whether operations can compute with a part of an expert's columns, so that others
// compute with the rest: at least one of them has a multiple of TileColumns.
func (l *ExpertLayout) Divisible() bool { return l.Intermediate > TileColumns }

// columns returns the part of the intermediate size that is computed.
func (p *ExpertGEMM) columns() Columns {
	if p.Columns == (Columns{}) {
		return Columns{End: p.Layout.Intermediate}
	}
	return p.Columns
}

// ColumnRange returns the first column that is computed, and how many are.
func (p *ExpertGEMM) ColumnRange() (first, n int) {
	c := p.columns()
	return c.First, c.End - c.First
}

// checkColumns checks that t has the columns that are computed.
func (p *ExpertGEMM) checkColumns(c *checker, name string, t *Tensor) {
	if !c.ok() {
		return
	}
	of, from := p.columns(), "Layout.Intermediate"
	if p.Columns != (Columns{}) {
		from = "Columns"
	}
	whole := func(n int) bool { return n%TileColumns == 0 || n == p.Layout.Intermediate }
	if of.First < 0 || of.End <= of.First || of.End > p.Layout.Intermediate || !whole(of.First) || !whole(of.End) {
		c.failf("Columns is [%d, %d), want a part of %d (Layout.Intermediate) in multiples of %d", of.First, of.End, p.Layout.Intermediate, TileColumns)
		return
	}
	c.size(name, t, 1, of.End-of.First, "columns", from)
}

// checkLists checks X alone, and the lists of experts and pairs.
func (p *ExpertGEMM) checkLists(c *checker) {
	c.tensor("X", &p.X, floats, 2)
	c.tensor("Offsets", &p.Offsets, int32Only, 1)
	c.tensor("Order", &p.Order, int32Only, 1)
	c.tensor("Slots", &p.Slots, uint64Only, 1)
	if e := p.Slots.Shape[0]; c.ok() && p.Offsets.Shape[0] != e+1 {
		c.failf("Offsets is %v, want %d elements (Slots has %d)", p.Offsets, e+1, e)
	}
	c.tensor("Experts", &p.Experts, int32Only, 1)
	if c.ok() && p.Experts.Shape[0] > p.Slots.Shape[0] {
		c.failf("Experts is %v, want at most %d elements (Slots has %d)", p.Experts, p.Slots.Shape[0], p.Slots.Shape[0])
	}
	if c.ok() {
		if err := p.Layout.check(); err != nil {
			c.failf("Layout %v", err)
		}
	}
	if !c.ok() || p.Runs.None() {
		return
	}
	if listed, all := p.Experts.Shape[0], p.Slots.Shape[0]; listed != all {
		c.failf("Runs is %v, want none where not all experts are listed (Experts has %d of %d)", p.Runs, listed, all)
	} else if p.Columns != (Columns{}) {
		c.failf("Runs is %v, want none for a part of the columns (Columns is [%d, %d))", p.Runs, p.Columns.First, p.Columns.End)
	}
	experts, pairs := p.Slots.Shape[0], p.Order.Shape[0]
	if c.ok() && pairs > MaxRunRows*experts {
		c.failf("Runs is %v, want none for more than %d pairs per expert (Order has %d, Slots %d)", p.Runs, MaxRunRows, pairs, experts)
	}
	c.checkRuns(&p.Runs, experts, pairs)
}

// checkTokens is checkLists where rows of X are tokens.
func (p *ExpertGEMM) checkTokens(c *checker) {
	p.checkLists(c)
	c.size("X", &p.X, 1, p.Layout.Hidden, "columns", "Layout.Hidden")
	n, pairs := p.X.Shape[0], p.Order.Shape[0]
	if c.ok() && (n == 0 && pairs != 0 || n != 0 && (pairs == 0 || pairs%n != 0)) {
		c.failf("Order is %v, want K elements for each of X's %d rows", p.Order, n)
	}
	if c.ok() && !p.Runs.None() && n > MaxRunRows {
		c.failf("Runs is %v, want none for more than %d rows (X has %d)", p.Runs, MaxRunRows, n)
	}
}

// checkOut checks that Out has a row with that number of columns for each pair, and does not
// overlap X.
func (p *ExpertGEMM) checkOut(c *checker, columns dim) {
	if !p.Runs.None() {
		c.disjoint("Out", &p.Out, "Runs", &p.Runs)
	}
	c.matrix("Out", &p.Out, floats, dim{p.Order.Shape[0], "Order"}, columns)
	c.sameType("Out", &p.Out, "X", &p.X)
	c.disjoint("Out", &p.Out, "X", &p.X)
}

// declare adds the tensors that are always read, and an estimate of the rest, for a GEMM with
// that number of matrices per expert. The estimate gives every expert an equal share of the
// pairs, and reads each listed expert that can have a pair once.
func (p *ExpertGEMM) declare(d *Decl, matrices int64) {
	d.read(&p.Offsets)
	d.read(&p.Order)
	d.read(&p.Slots)
	d.read(&p.Experts)
	d.optional(&p.Runs)
	order, listed, all := int64(p.Order.Shape[0]), int64(p.Experts.Shape[0]), int64(p.Slots.Shape[0])
	if all == 0 {
		return
	}
	pairs := (order*listed + all - 1) / all
	_, n := p.ColumnRange()
	matrix := int64(p.Layout.Hidden) * int64(n)
	d.Bytes += min(listed, order) * matrices * matrix * int64(p.Layout.DType.Size())
	d.Bytes += pairs * int64(p.Layout.Hidden+n) * int64(p.X.DType.Size())
	d.Flops += 2 * matrices * matrix * pairs
}

// ExpertUp is the gate/up projection: Out[i] = silu(w1 X[p/K]) * (w3 X[p/K]) for every pair p =
// Order[i] of the listed experts.
type ExpertUp struct{ ExpertGEMM }

// Name implements Op.
func (*ExpertUp) Name() string { return "expert_up" }

// Check implements Op.
func (o *ExpertUp) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

func (o *ExpertUp) check(c *checker) {
	o.checkTokens(c)
	c.tensor("Out", &o.Out, floats, 2)
	o.checkColumns(c, "Out", &o.Out)
	o.checkOut(c, dim{o.Out.Shape[1], "Out"})
}

// Declare implements Op. Which experts, and which rows of X and Out, only the device knows.
func (o *ExpertUp) Declare(d *Decl) { o.declare(d, 2) }

// ExpertDown is the down projection: Out[p] = w2 X[i] for every pair p = Order[i] of the listed
// experts.
type ExpertDown struct{ ExpertGEMM }

// Name implements Op.
func (*ExpertDown) Name() string { return "expert_down" }

// Check implements Op.
func (o *ExpertDown) Check() error {
	c := checker{op: o.Name()}
	o.checkLists(&c)
	c.size("X", &o.X, 0, o.Order.Shape[0], "rows", "Order")
	o.checkColumns(&c, "X", &o.X)
	o.checkOut(&c, dim{o.Layout.Hidden, "Layout.Hidden"})
	return c.err
}

// Declare implements Op. Which experts, and which rows of X and Out, only the device knows.
func (o *ExpertDown) Declare(d *Decl) { o.declare(d, 1) }

// ExpertFFN is ExpertUp and ExpertDown in one operation: Out[p] = w2 (silu(w1 x) * (w3 x)), where x is
// X[p/K], for every pair p of the listed experts. What is between the two is rounded to the type of X,
// as the output of ExpertUp is, so results have the same bits. Only package cpu has it, for experts in
// host memory: no thread waits for the others between experts.
//
// First has for each listed expert the first column that is computed, up to the last one: of the
// others, another device computes w2's product, and the results have to be added. Columns is none.
type ExpertFFN struct {
	ExpertGEMM
	First Tensor // [listed] I32, multiples of TileColumns; none: 0
}

// Name implements Op.
func (*ExpertFFN) Name() string { return "expert_ffn" }

// Check implements Op.
func (o *ExpertFFN) Check() error {
	c := checker{op: o.Name()}
	o.checkTokens(&c)
	if c.ok() && o.Columns != (Columns{}) {
		c.failf("Columns is [%d, %d), want none: First says where each expert begins", o.Columns.First, o.Columns.End)
	}
	if !o.First.None() {
		c.list("First", &o.First, int32Only, o.Experts.Shape[0], "Experts")
	}
	o.checkOut(&c, dim{o.Layout.Hidden, "Layout.Hidden"})
	return c.err
}

// Declare implements Op. Which experts, and which rows of X and Out, only the device knows.
func (o *ExpertFFN) Declare(d *Decl) {
	o.declare(d, 3)
	if !o.First.None() {
		d.read(&o.First)
	}
}
