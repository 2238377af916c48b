package kernels

// RouteMethod is how a router turns scores into selected experts and weights.
type RouteMethod uint8

const (
	// Softmax: softmax over all experts, then top-k without renormalization (Qwen2-MoE, OLMoE).
	Softmax RouteMethod = iota
	// SoftmaxRenorm: as Softmax, then the selected weights are divided by their sum (Mixtral,
	// Qwen3-MoE).
	SoftmaxRenorm
	// SparseMixer is Phi's routing at inference, for K = 2.
	SparseMixer
)

// Route selects K experts per token, in descending order of scores, the lower expert first
// among equal scores. NaN counts as the lowest score, so that ids are always K different
// experts.
type Route struct {
	Logits Tensor // [N, E] F32
	Method RouteMethod
	Jitter float32 // SparseMixer's eps (router_jitter_noise)
	// IDs and Weights are [N, K], I32 and F32, dense.
	IDs, Weights Tensor
	// Counts, [E] I64 or none: adds the number of tokens routed to each expert.
	Counts Tensor
	// Offsets, [E+1] I32, and Order, [N*K] I32, or both none: sorts the pairs, as SortByExpert
	// does.
	Offsets, Order Tensor
	// Runs, [MostRuns(E, N*K), RunColumns] I32, dense, or none; only for at most MaxRunRows tokens, and with
	// Order: for each expert that has pairs, ascending, {expert, first place in Order, number of pairs, 0}
	// for every MaxRunPairs of them; rows behind these are 0.
	Runs Tensor
}

const (
	// MaxRunRows is the maximum number of tokens for which Route writes Runs.
	MaxRunRows = 64
	// MaxRunPairs is the maximum number of pairs of a run.
	MaxRunPairs = 16
	// RunColumns is the number of elements of a run.
	RunColumns = 4
)

// MostRuns is the number of rows of Runs, for that number of experts and of (token, k) pairs.
func MostRuns(experts, pairs int) int {
	having := min(experts, pairs) // a run more takes MaxRunPairs pairs more of an expert
	return having + (pairs-having)/MaxRunPairs
}

// ListsRuns reports whether Route should write Runs for that many tokens, each with k of the experts. Of an expert with
// several runs the weights are read again when they may have left a cache, so these should be rare: with up to five pairs
// an expert on average.
func ListsRuns(tokens, experts, k int) bool {
	return tokens <= MaxRunPairs || tokens <= MaxRunRows && tokens*k <= 5*experts
}

// checkRuns checks Runs for that number of experts and pairs.
func (c *checker) checkRuns(runs *Tensor, experts, pairs int) {
	c.tensor("Runs", runs, int32Only, 2)
	c.dense("Runs", runs)
	if most := MostRuns(experts, pairs); c.ok() && (runs.Shape[0] != most || runs.Shape[1] != RunColumns) {
		c.failf("Runs is %v, want [%d %d] (%d experts, %d pairs)", *runs, most, RunColumns, experts, pairs)
	}
}

// Sorting returns the sorting that o includes, if Order is set.
func (o *Route) Sorting() SortByExpert {
	return SortByExpert{IDs: o.IDs, Offsets: o.Offsets, Order: o.Order}
}

// Name implements Op.
func (*Route) Name() string { return "route" }

// Check implements Op.
func (o *Route) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

// check is Check within an operation that includes this one.
func (o *Route) check(c *checker) {
	c.tensor("Logits", &o.Logits, float32Only, 2)
	c.tensor("IDs", &o.IDs, int32Only, 2)
	c.dense("IDs", &o.IDs)
	c.size("IDs", &o.IDs, 0, o.Logits.Shape[0], "rows", "Logits")
	k, e := o.IDs.Shape[1], o.Logits.Shape[1]
	if c.ok() && (k < 1 || k > e) {
		c.failf("IDs is %v, want 1 to %d columns (Logits has %d)", o.IDs, e, e)
	}
	c.tensor("Weights", &o.Weights, float32Only, 2)
	c.dense("Weights", &o.Weights)
	c.size("Weights", &o.Weights, 0, o.IDs.Shape[0], "rows", "IDs")
	c.size("Weights", &o.Weights, 1, k, "columns", "IDs")
	if c.ok() && !o.Counts.None() {
		c.list("Counts", &o.Counts, int64Only, e, "Logits")
	}
	c.disjoint("Weights", &o.Weights, "IDs", &o.IDs)
	switch {
	case !c.ok():
	case o.Method > SparseMixer:
		c.failf("Method is %d, want Softmax (0), SoftmaxRenorm (1) or SparseMixer (2)", o.Method)
	case o.Method == SparseMixer && k != 2:
		c.failf("IDs is %v, want 2 columns for SparseMixer", o.IDs)
	case o.Method == SparseMixer && !(o.Jitter >= 0):
		c.failf("Jitter is %g, want 0 or more", o.Jitter)
	}
	if c.ok() && o.Offsets.None() != o.Order.None() {
		c.failf("Offsets is %v and Order %v, want both or none", o.Offsets, o.Order)
	}
	if sorting := o.Sorting(); c.ok() && !o.Order.None() {
		sorting.check(c)
		if o.Offsets.Shape[0] != e+1 {
			c.failf("Offsets is %v, want %d elements (Logits has %d columns)", o.Offsets, e+1, e)
		}
		c.disjoint("Weights", &o.Weights, "Order", &o.Order)
		c.disjoint("Weights", &o.Weights, "Offsets", &o.Offsets)
	}
	if !c.ok() || o.Runs.None() {
		return
	}
	if o.Order.None() {
		c.failf("Runs is %v, want none without Order", o.Runs)
	} else if n := o.Logits.Shape[0]; n > MaxRunRows {
		c.failf("Runs is %v, want none for more than %d rows (Logits has %d)", o.Runs, MaxRunRows, n)
	}
	c.checkRuns(&o.Runs, e, o.IDs.Elements())
	for _, other := range [...]struct {
		name string
		t    *Tensor
	}{{"Logits", &o.Logits}, {"IDs", &o.IDs}, {"Weights", &o.Weights}, {"Counts", &o.Counts}, {"Offsets", &o.Offsets}, {"Order", &o.Order}} {
		c.disjoint("Runs", &o.Runs, other.name, other.t)
	}
}

// Declare implements Op.
func (o *Route) Declare(d *Decl) {
	d.read(&o.Logits)
	d.write(&o.IDs)
	d.write(&o.Weights)
	if !o.Counts.None() {
		d.update(&o.Counts)
	}
	if !o.Order.None() {
		d.write(&o.Offsets)
		d.write(&o.Order)
	}
	if !o.Runs.None() {
		d.write(&o.Runs)
	}
	d.Flops += int64(o.Logits.Elements()) * int64(4+o.IDs.Shape[1])
}

// SortByExpert sorts a step's (token, k) pairs by expert: the pairs of expert e are
// Order[Offsets[e]:Offsets[e+1]], each as token*K + k, ascending.
type SortByExpert struct {
	IDs     Tensor // [N, K] I32, dense
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
}

// Name implements Op.
func (*SortByExpert) Name() string { return "group" }

// Check implements Op.
func (o *SortByExpert) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

// check is Check within an operation that includes this one.
func (o *SortByExpert) check(c *checker) {
	c.tensor("IDs", &o.IDs, int32Only, 2)
	c.dense("IDs", &o.IDs)
	c.tensor("Offsets", &o.Offsets, int32Only, 1)
	if c.ok() && o.Offsets.Shape[0] < 2 {
		c.failf("Offsets is %v, want one more element than there are experts", o.Offsets)
	}
	c.tensor("Order", &o.Order, int32Only, 1)
	if c.ok() && o.Order.Shape[0] != o.IDs.Elements() {
		c.failf("Order is %v, want %d elements (IDs is %v)", o.Order, o.IDs.Elements(), o.IDs)
	}
	c.disjoint("Order", &o.Order, "IDs", &o.IDs)
	c.disjoint("Offsets", &o.Offsets, "IDs", &o.IDs)
	c.disjoint("Order", &o.Order, "Offsets", &o.Offsets)
}

// Declare implements Op.
func (o *SortByExpert) Declare(d *Decl) {
	d.read(&o.IDs)
	d.write(&o.Offsets)
	d.write(&o.Order)
}
