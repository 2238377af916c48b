package kernels

// RoPE rotates Q and K in place, rotate-half form: with c = Table[Rows[n], i],
// s = Table[Rows[n], D/2+i], (x[i], x[i+D/2]) becomes (x[i] c - x[i+D/2] s,
// x[i+D/2] c + x[i] s).
type RoPE struct {
	Q     Tensor // [N, heads, D] act
	K     Tensor // [N, kv heads, D] act
	Table Tensor // [T, D] F32, dense: cosines, then sines
	Rows  Tensor // [N] I32: which row of Table
}

// Name implements Op.
func (*RoPE) Name() string { return "rope" }

// Check implements Op.
func (o *RoPE) Check() error {
	c := checker{op: o.Name()}
	c.rotation(&o.Q, &o.K, &o.Table, &o.Rows)
	return c.err
}

// Declare implements Op. Reads has the whole table; Bytes counts the rows used.
func (o *RoPE) Declare(d *Decl) {
	d.update(&o.Q)
	d.update(&o.K)
	d.Reads = o.Table.AppendRanges(d.Reads)
	d.Bytes += int64(o.Rows.Elements()) * int64(o.Table.Shape[1]) * int64(o.Table.DType.Size())
	d.read(&o.Rows)
	d.Flops += 3 * int64(o.Q.Elements()+o.K.Elements())
}

// rotation checks queries, keys and the RoPE table.
func (c *checker) rotation(q, k, table, rows *Tensor) {
	c.tensor("Q", q, floats, 3)
	c.tensor("K", k, floats, 3)
	c.size("K", k, 0, q.Shape[0], "rows", "Q")
	c.size("K", k, 2, q.Shape[2], "columns", "Q")
	c.sameType("K", k, "Q", q)
	c.disjoint("K", k, "Q", q)
	if c.ok() && q.Shape[2]%2 != 0 {
		c.failf("Q is %v, want an even head size", *q)
	}
	c.tensor("Table", table, float32Only, 2)
	c.dense("Table", table)
	c.size("Table", table, 1, q.Shape[2], "columns", "Q")
	c.list("Rows", rows, int32Only, q.Shape[0], "Q")
}

// AppendKV writes K[n] and V[n] to slot Slots[n] of the paged cache: block Slots[n] / B, row
// Slots[n] % B, with B the tokens of a block. Tokens with a negative slot are skipped.
type AppendKV struct {
	K, V           Tensor // [N, kv heads, D] act
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	Slots          Tensor // [N] I32
}

// Name implements Op.
func (*AppendKV) Name() string { return "append_kv" }

// Check implements Op.
func (o *AppendKV) Check() error {
	c := checker{op: o.Name()}
	c.appendedKV(&o.K, &o.V, &o.CacheK, &o.CacheV, &o.Slots)
	return c.err
}

// Declare implements Op. Writes has no part of the cache: only Slots determines which.
func (o *AppendKV) Declare(d *Decl) {
	d.read(&o.K)
	d.read(&o.V)
	d.read(&o.Slots)
	d.Bytes += o.K.Bytes() + o.V.Bytes()
}

// appendedKV checks keys, values and their destination in the cache.
func (c *checker) appendedKV(k, v, cacheK, cacheV, slots *Tensor) {
	c.tensor("K", k, floats, 3)
	c.tensor("V", v, floats, 3)
	c.same("V", v, "K", k)
	c.cache(cacheK, cacheV, "K", k, true)
	c.list("Slots", slots, int32Only, k.Shape[0], "K")
}

// cache checks a pair of cache tensors against tensor x of the step, called name.
func (c *checker) cache(k, v *Tensor, name string, x *Tensor, head bool) {
	c.tensor("CacheK", k, floats, 4)
	c.tensor("CacheV", v, floats, 4)
	c.same("CacheV", v, "CacheK", k)
	c.disjoint("CacheV", v, "CacheK", k)
	c.sameType("CacheK", k, name, x)
	if head {
		c.size("CacheK", k, 2, x.Shape[1], "heads", name)
	}
	c.size("CacheK", k, 3, x.Shape[2], "columns", name)
	if c.ok() && k.Shape[1] == 0 {
		c.failf("CacheK is %v, want at least one token per block", *k)
	}
}

// RoPEAppendKV runs, with the same bits, Norm on the heads of Q and K (RMS, in place; only with
// QNorm and KNorm), RoPE, and AppendKV. K itself does not change: its heads are normed and
// rotated while they are written to the cache. With a negative slot, K[n] and V[n] are not
// written; Q[n] is still rotated.
type RoPEAppendKV struct {
	Q              Tensor // [N, heads, D] act
	K, V           Tensor // [N, kv heads, D] act
	QNorm, KNorm   Tensor // [D] weight: weights of the norms; both or none
	Eps            float32
	Table          Tensor // [T, D] F32, dense: cosines, then sines
	Rows           Tensor // [N] I32: which row of Table
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	Slots          Tensor // [N] I32
}

// Name implements Op.
func (*RoPEAppendKV) Name() string { return "rope_append_kv" }

// Check implements Op.
func (o *RoPEAppendKV) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

func (o *RoPEAppendKV) check(c *checker) {
	c.rotation(&o.Q, &o.K, &o.Table, &o.Rows)
	c.appendedKV(&o.K, &o.V, &o.CacheK, &o.CacheV, &o.Slots)
	c.disjoint("Q", &o.Q, "V", &o.V)
	if c.ok() && o.QNorm.None() != o.KNorm.None() {
		c.failf("QNorm is %v and KNorm %v, want both or none", o.QNorm, o.KNorm)
	}
	if c.ok() && !o.QNorm.None() {
		c.list("QNorm", &o.QNorm, floats, o.Q.Shape[2], "a head of Q")
		c.list("KNorm", &o.KNorm, floats, o.Q.Shape[2], "a head of Q")
	}
	if c.ok() && !(o.Eps >= 0) {
		c.failf("Eps is %g, want 0 or more", o.Eps)
	}
}

// Declare implements Op. Reads has the whole table, Bytes counts the rows used. Writes has no
// part of the cache: only Slots determines which.
func (o *RoPEAppendKV) Declare(d *Decl) {
	d.update(&o.Q)
	d.read(&o.K)
	d.read(&o.V)
	if !o.QNorm.None() {
		d.read(&o.QNorm)
		d.read(&o.KNorm)
		d.Flops += 8 * int64(o.Q.Elements()+o.K.Elements())
	}
	d.Reads = o.Table.AppendRanges(d.Reads)
	d.Bytes += int64(o.Rows.Elements()) * int64(o.Table.Shape[1]) * int64(o.Table.DType.Size())
	d.read(&o.Rows)
	d.read(&o.Slots)
	d.Bytes += o.K.Bytes() + o.V.Bytes()
	d.Flops += 3 * int64(o.Q.Elements()+o.K.Elements())
}

// Attention is causal attention over a paged cache that already holds the keys and values of
// this step's tokens. Token r of sequence s, SeqStarts[s] <= r < SeqStarts[s+1], has position p
// = ContextLens[s] - (SeqStarts[s+1] - r) and attends to positions max(0, p-Window+1) .. p (all
// from 0 if Window is 0). Position t is in block BlockTable[s, t/B], row t%B.
type Attention struct {
	Q              Tensor // [N, heads, D] act
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	SeqStarts      Tensor // [S+1] I32: first row of each sequence, then N
	ContextLens    Tensor // [S] I32: tokens in the cache, those of this step included
	BlockTable     Tensor // [S, max blocks] I32
	Window         int    // tokens that a query attends to, itself included; 0: all
	Scale          float32
	// MaxContext is an upper bound of ContextLens, MaxSeqTokens of the tokens of a sequence in
	// this step. They only size the launch.
	MaxContext, MaxSeqTokens int
	// CachedTokens is the sum of ContextLens, AttendedTokens the sum over tokens of the
	// positions that each attends to, both ignoring Window. They only serve to estimate costs;
	// if they are 0, every sequence is assumed to have MaxContext tokens, MaxSeqTokens of them
	// in this step.
	CachedTokens, AttendedTokens int64
	// PastReady states that no operation since the last one that begins only when all before it have ended, as a
	// copy or a wait does, writes keys and values of positions before this step's tokens. So a kernel may read
	// those before its predecessors end.
	PastReady bool
	Out       Tensor // [N, heads, D] act
}

// Name implements Op.
func (*Attention) Name() string { return "attention" }

// Check implements Op.
func (o *Attention) Check() error {
	c := checker{op: o.Name()}
	o.check(&c)
	return c.err
}

func (o *Attention) check(c *checker) {
	c.tensor("Q", &o.Q, floats, 3)
	c.cache(&o.CacheK, &o.CacheV, "Q", &o.Q, false)
	if c.ok() && (o.CacheK.Shape[2] == 0 || o.Q.Shape[1]%o.CacheK.Shape[2] != 0) {
		c.failf("Q is %v, want a multiple of CacheK's %d heads", o.Q, o.CacheK.Shape[2])
	}
	c.tensor("ContextLens", &o.ContextLens, int32Only, 1)
	c.tensor("SeqStarts", &o.SeqStarts, int32Only, 1)
	if s := o.ContextLens.Shape[0]; c.ok() && o.SeqStarts.Shape[0] != s+1 {
		c.failf("SeqStarts is %v, want %d elements (ContextLens has %d)", o.SeqStarts, s+1, s)
	}
	c.tensor("BlockTable", &o.BlockTable, int32Only, 2)
	c.size("BlockTable", &o.BlockTable, 0, o.ContextLens.Shape[0], "rows", "ContextLens")
	c.tensor("Out", &o.Out, floats, 3)
	c.same("Out", &o.Out, "Q", &o.Q)
	c.inPlace("Out", &o.Out, "Q", &o.Q)
	c.disjoint("Out", &o.Out, "CacheK", &o.CacheK)
	c.disjoint("Out", &o.Out, "CacheV", &o.CacheV)
	switch {
	case !c.ok():
	case o.Window < 0:
		c.failf("Window is %d, want 0 (all) or more", o.Window)
	case !(o.Scale > 0):
		c.failf("Scale is %g, want more than 0", o.Scale)
	case o.Q.Shape[0] > 0 && (o.MaxSeqTokens < 1 || o.MaxContext < o.MaxSeqTokens):
		c.failf("MaxContext is %d and MaxSeqTokens %d, want MaxContext >= MaxSeqTokens >= 1", o.MaxContext, o.MaxSeqTokens)
	case o.MaxContext > o.BlockTable.Shape[1]*o.CacheK.Shape[1]:
		c.failf("BlockTable is %v, want room for MaxContext %d in blocks of %d", o.BlockTable, o.MaxContext, o.CacheK.Shape[1])
	}
}

// Declare implements Op. Reads has no part of the cache: only BlockTable determines which.
// Without CachedTokens and AttendedTokens, an average token is assumed to attend to MaxContext
// less half of MaxSeqTokens positions. A Window limits the totals.
func (o *Attention) Declare(d *Decl) {
	d.read(&o.Q)
	d.read(&o.SeqStarts)
	d.read(&o.ContextLens)
	d.read(&o.BlockTable)
	d.write(&o.Out)
	seqs, rows, behind := int64(o.ContextLens.Shape[0]), int64(o.Q.Shape[0]), int64(max(o.MaxSeqTokens-1, 0))
	stored, seen := o.CachedTokens, o.AttendedTokens
	if stored == 0 {
		stored, seen = seqs*int64(o.MaxContext), rows*(int64(o.MaxContext)-behind/2)
	}
	if w := int64(o.Window); w > 0 {
		stored, seen = min(stored, seqs*(w+behind)), min(seen, rows*w)
	}
	kv := int64(o.CacheK.Shape[2]) * int64(o.CacheK.Shape[3]) * int64(o.CacheK.DType.Size())
	d.Bytes += 2 * stored * kv
	d.Flops += 4 * int64(o.Q.Shape[1]) * int64(o.Q.Shape[2]) * seen
}

// RoPEAttention runs RoPEAppendKV and then Attention on the same queries, with the bits of both one
// after the other in Out and in the cache. Afterwards Q is undefined.
//
// A token's slot is where BlockTable has its position, or negative, and no sequence has in its
// table a slot to which a token of another one is appended.
type RoPEAttention struct {
	Append    RoPEAppendKV
	Attention Attention // Q, CacheK and CacheV are those of Append
}

// Name implements Op.
func (*RoPEAttention) Name() string { return "rope_attention" }

// Check implements Op.
func (o *RoPEAttention) Check() error {
	c := checker{op: o.Name()}
	o.Append.check(&c)
	o.Attention.check(&c)
	for _, x := range [...]struct {
		name    string
		one, of *Tensor
	}{
		{"Q", &o.Attention.Q, &o.Append.Q}, {"CacheK", &o.Attention.CacheK, &o.Append.CacheK}, {"CacheV", &o.Attention.CacheV, &o.Append.CacheV},
	} {
		if c.ok() && *x.one != *x.of {
			c.failf("%s is %v at %#x, want %v at %#x as in Append", x.name, *x.one, uint64(x.one.Addr), *x.of, uint64(x.of.Addr))
		}
	}
	c.disjoint("Out", &o.Attention.Out, "K", &o.Append.K)
	c.disjoint("Out", &o.Attention.Out, "V", &o.Append.V)
	return c.err
}

// Declare implements Op. Bytes has Q once, as input.
func (o *RoPEAttention) Declare(d *Decl) {
	o.Append.Declare(d)
	o.Attention.Declare(d)
	d.Bytes -= 2 * o.Append.Q.Bytes()
}
