package kernels

import "github.com/moeserve/moeserve/device"

// AppendRanges appends the runs of memory that hold t's elements, and nothing
// between them, to dst: one for a dense tensor, one per row (or more) for one
// with gaps.
func (t Tensor) AppendRanges(dst []device.Range) []device.Range {
	if t.None() || t.Elements() == 0 {
		return dst
	}
	size := t.DType.Size()
	run, outer := 1, t.Rank // elements that lie without gaps; dimensions around them
	for outer > 0 && (t.Shape[outer-1] == 1 || t.Stride[outer-1] == run) {
		outer--
		run *= t.Shape[outer]
	}
	var at [MaxRank]int
	for {
		off := 0
		for i, n := range at[:outer] {
			off += n * t.Stride[i]
		}
		dst = append(dst, device.Range{Addr: t.Addr + device.Addr(off*size), Bytes: int64(run * size)})
		i := outer - 1
		for ; i >= 0; i-- {
			if at[i]++; at[i] < t.Shape[i] {
				break
			}
			at[i] = 0
		}
		if i < 0 {
			return dst
		}
	}
}

func (d *Decl) read(t *Tensor) {
	d.Reads = t.AppendRanges(d.Reads)
	d.Bytes += t.Bytes()
}

func (d *Decl) write(t *Tensor) {
	d.Writes = t.AppendRanges(d.Writes)
	d.Bytes += t.Bytes()
}

func (d *Decl) update(t *Tensor) {
	d.read(t)
	d.write(t)
}

// optional reads t unless it is none.
func (d *Decl) optional(t *Tensor) {
	if !t.None() {
		d.read(t)
	}
}

// Name implements Op.
func (*Embed) Name() string { return "embed" }

// Declare implements Op: the whole table counts as read, its rows as traffic.
func (o *Embed) Declare(d *Decl) {
	d.read(&o.IDs)
	d.Reads = o.Table.AppendRanges(d.Reads)
	d.Bytes += int64(o.Out.Elements()) * int64(o.Table.DType.Size())
	d.write(&o.Out)
}

// Name implements Op.
func (*Norm) Name() string { return "norm" }

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

// Name implements Op.
func (*MatMul) Name() string { return "matmul" }

// Declare implements Op.
func (o *MatMul) Declare(d *Decl) {
	d.read(&o.X)
	d.read(&o.W)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 2 * int64(o.X.Shape[0]) * int64(o.W.Elements())
}

// Name implements Op.
func (*Clamp) Name() string { return "clamp" }

// Declare implements Op.
func (o *Clamp) Declare(d *Decl) {
	d.update(&o.X)
	d.Flops += 2 * int64(o.X.Elements())
}

// Name implements Op.
func (*RoPE) Name() string { return "rope" }

// Declare implements Op: the whole table counts as read, its rows as traffic.
func (o *RoPE) Declare(d *Decl) {
	d.update(&o.Q)
	d.update(&o.K)
	d.Reads = o.Table.AppendRanges(d.Reads)
	d.Bytes += int64(o.Rows.Elements()) * int64(o.Table.Shape[1]) * int64(o.Table.DType.Size())
	d.read(&o.Rows)
	d.Flops += 3 * int64(o.Q.Elements()+o.K.Elements())
}

// Name implements Op.
func (*AppendKV) Name() string { return "append_kv" }

// Declare implements Op: the places in the cache are known by Slots only.
func (o *AppendKV) Declare(d *Decl) {
	d.read(&o.K)
	d.read(&o.V)
	d.read(&o.Slots)
	d.Bytes += o.K.Bytes() + o.V.Bytes()
}

// Name implements Op.
func (*RoPEAppendKV) Name() string { return "rope_append_kv" }

// Declare implements Op: the whole table counts as read, its rows as traffic; the
// places in the cache are known by Slots only.
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

// Name implements Op.
func (*Attention) Name() string { return "attention" }

// Declare implements Op: the blocks are known by BlockTable only. Without Stored and
// Seen the average row of a sequence sees all of MaxContext but the half of MaxRows that
// stand behind it. A Window bounds what all sequences and rows have together.
func (o *Attention) Declare(d *Decl) {
	d.read(&o.Q)
	d.read(&o.SeqStarts)
	d.read(&o.ContextLens)
	d.read(&o.BlockTable)
	d.write(&o.Out)
	seqs, rows, behind := int64(o.ContextLens.Shape[0]), int64(o.Q.Shape[0]), int64(max(o.MaxRows-1, 0))
	stored, seen := o.Stored, o.Seen
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

// Name implements Op.
func (*Route) Name() string { return "route" }

// Declare implements Op.
func (o *Route) Declare(d *Decl) {
	d.read(&o.Logits)
	d.write(&o.IDs)
	d.write(&o.Weights)
	if !o.Counts.None() {
		d.update(&o.Counts)
	}
	d.Flops += int64(o.Logits.Elements()) * int64(4+o.IDs.Shape[1])
}

// Name implements Op.
func (*Group) Name() string { return "group" }

// Declare implements Op.
func (o *Group) Declare(d *Decl) {
	d.read(&o.IDs)
	d.write(&o.Offsets)
	d.write(&o.Order)
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

// Name implements Op.
func (*ExpertUp) Name() string { return "expert_up" }

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertUp) Declare(d *Decl) {
	declareExperts(d, &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout, o.X.DType, 2)
}

// Name implements Op.
func (*ExpertDown) Name() string { return "expert_down" }

// Declare implements Op: experts, and which rows of X and Out are theirs, are
// known on the device only.
func (o *ExpertDown) Declare(d *Decl) {
	declareExperts(d, &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout, o.X.DType, 1)
}

// Name implements Op.
func (*Combine) Name() string { return "combine" }

// Declare implements Op.
func (o *Combine) Declare(d *Decl) {
	declareCombined(d, &o.X, &o.Weights, &o.Shared, &o.SharedGate)
	d.write(&o.Out)
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

// Name implements Op.
func (*CombineNorm) Name() string { return "combine_norm" }

// Declare implements Op.
func (o *CombineNorm) Declare(d *Decl) {
	declareCombined(d, &o.X, &o.Weights, &o.Shared, &o.SharedGate)
	d.update(&o.Residual)
	d.read(&o.Weight)
	d.optional(&o.Bias)
	d.write(&o.Out)
	d.Flops += 8 * int64(o.Out.Elements())
}

// Name implements Op.
func (*SiluMul) Name() string { return "silu_mul" }

// Declare implements Op.
func (o *SiluMul) Declare(d *Decl) {
	d.read(&o.Gate)
	d.read(&o.Up)
	d.write(&o.Out)
	d.Flops += 5 * int64(o.Out.Elements())
}

// Name implements Op.
func (*Gather) Name() string { return "gather" }

// Declare implements Op: the rows of X are known by Rows only.
func (o *Gather) Declare(d *Decl) {
	d.read(&o.Rows)
	d.Bytes += o.Out.Bytes()
	d.write(&o.Out)
}

// Name implements Op.
func (*Sample) Name() string { return "sample" }

// Declare implements Op.
func (o *Sample) Declare(d *Decl) {
	d.read(&o.Logits)
	d.read(&o.Temperature)
	d.read(&o.Seeds)
	d.read(&o.Samples)
	d.read(&o.Positions)
	d.optional(&o.TopK)
	d.optional(&o.TopP)
	d.optional(&o.MinP)
	d.write(&o.Out)
	d.Flops += 40 * int64(o.Logits.Elements())
}

// declareListed declares logits of which the data lists n elements: all of them
// may change, those are the traffic.
func declareListed(d *Decl, logits *Tensor, n int) {
	d.Reads = logits.AppendRanges(d.Reads)
	d.Writes = logits.AppendRanges(d.Writes)
	d.Bytes += 2 * int64(n) * int64(logits.DType.Size())
}

// Name implements Op.
func (*Adjust) Name() string { return "adjust" }

// Declare implements Op: all logits count as read and written, those listed as
// traffic.
func (o *Adjust) Declare(d *Decl) {
	declareListed(d, &o.Logits, o.IDs.Shape[0])
	d.read(&o.Starts)
	d.read(&o.IDs)
	d.read(&o.Seen)
	d.read(&o.Bias)
	d.read(&o.Repetition)
	d.read(&o.Presence)
	d.read(&o.Frequency)
	d.write(&o.Saved)
	d.Flops += 5 * int64(o.IDs.Shape[0])
}

// Name implements Op.
func (*Restore) Name() string { return "restore" }

// Declare implements Op: all logits count as read and written, those listed as
// traffic.
func (o *Restore) Declare(d *Decl) {
	declareListed(d, &o.Logits, o.IDs.Shape[0])
	d.read(&o.Starts)
	d.read(&o.IDs)
	d.read(&o.Saved)
}

// Name implements Op.
func (*LogProbs) Name() string { return "log_probs" }

// Declare implements Op.
func (o *LogProbs) Declare(d *Decl) {
	d.read(&o.Logits)
	d.read(&o.Tokens)
	d.write(&o.Chosen)
	if !o.TopIDs.None() {
		d.write(&o.TopIDs)
		d.write(&o.Top)
	}
	d.Flops += 20 * int64(o.Logits.Elements())
}
