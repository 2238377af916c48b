package kernels

// Sample samples one token per row. If Temperature is 0, it is the token with the largest logit
// (the lowest id of equal ones), else the one with the largest logit/Temperature + g, with g a
// Gumbel variate of the counter-based generator keyed by (seed, sample, position, token): see
// philox.Gumbel. Quotient and sum are rounded to float32, so all backends sample the same token
// from the same logits. A token whose logit is NaN or -Inf is never sampled; a row of which
// that is true of all tokens samples -1.
//
// If Temperature is not 0, MinP, TopK and TopP (each none, or one element per row) first remove
// improbable tokens, in this order. With s the quotients, s0 the row's largest, and e = Exp(s -
// s0), or 1 if s = s0:
//
//   - MinP, from 0 (all) to 1, removes the tokens with e < MinP: those less than
//     MinP times as probable as the most probable token.
//   - TopK, 0 for all, keeps the TopK tokens with the largest logits, of equal ones
//     those with the lowest ids.
//   - TopP, above 0 and at most 1 (all), keeps the fewest tokens, in the same order,
//     whose weights reach TopP times the weights of all tokens that MinP and TopK kept. A
//     weight is SampleWeight(e), an integer, so that sums are exact in any order;
//     the product with TopP is not rounded.
type Sample struct {
	Logits      Tensor // [S, V] F32
	Temperature Tensor // [S] F32, finite, >= 0
	Seeds       Tensor // [S] U64
	Samples     Tensor // [S] I32: index of the sample within its request
	Positions   Tensor // [S] I32: position of the sampled token
	TopK        Tensor // [S] I32, >= 0, or none
	TopP, MinP  Tensor // [S] F32, or none
	Out         Tensor // [S] I32, -1: no token can be sampled
}

// Name implements Op.
func (*Sample) Name() string { return "sample" }

// Check implements Op.
func (o *Sample) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, float32Only, 2)
	if c.ok() && o.Logits.Shape[1] < 1 {
		c.failf("Logits is %v, want at least one column", o.Logits)
	}
	s := o.Logits.Shape[0]
	c.list("Temperature", &o.Temperature, float32Only, s, "Logits")
	c.list("Seeds", &o.Seeds, uint64Only, s, "Logits")
	c.list("Samples", &o.Samples, int32Only, s, "Logits")
	c.list("Positions", &o.Positions, int32Only, s, "Logits")
	c.perRow("TopK", &o.TopK, int32Only, s)
	c.perRow("TopP", &o.TopP, float32Only, s)
	c.perRow("MinP", &o.MinP, float32Only, s)
	c.list("Out", &o.Out, int32Only, s, "Logits")
	c.disjoint("Out", &o.Out, "Samples", &o.Samples)
	c.disjoint("Out", &o.Out, "Positions", &o.Positions)
	c.disjoint("Out", &o.Out, "TopK", &o.TopK)
	return c.err
}

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

// perRow checks a tensor of one element for each of s rows of logits, or none.
func (c *checker) perRow(name string, t *Tensor, k kinds, s int) {
	if c.ok() && !t.None() {
		c.list(name, t, k, s, "Logits")
	}
}

// Adjust changes the logits of listed tokens in place, after saving them. Those of row s are
// IDs[Starts[s]:Starts[s+1]], each once. With o the logit and n = Seen, the new logit x is,
// with every operation rounded to float32:
//
//	x = o + Bias
//	x = x / Repetition[s] if n >= 0 and x > 0, x * Repetition[s] if n >= 0
//	x = (x - Frequency[s]*n) - Presence[s] if n > 0
//
// The order is vLLM's: penalties apply to the biased logit.
type Adjust struct {
	Logits Tensor // [S, V] F32
	Starts Tensor // [S+1] I32: the first entry of each row, then L
	IDs    Tensor // [L] I32, each in [0, V)
	// Seen is -1 for a token in neither prompt nor completion, 0 for one in the prompt only, n
	// for one that occurs n times in the completion.
	Seen Tensor // [L] I32
	Bias Tensor // [L] F32, finite, or -Inf for a token that must not be sampled
	// Repetition is above 0; all three are finite.
	Repetition, Presence, Frequency Tensor // [S] F32
	Saved                           Tensor // [L] F32: the original logits
}

// Name implements Op.
func (*Adjust) Name() string { return "adjust" }

// Check implements Op.
func (o *Adjust) Check() error {
	c := checker{op: o.Name()}
	c.listed(&o.Logits, &o.Starts, &o.IDs)
	s, l := o.Logits.Shape[0], o.IDs.Shape[0]
	c.list("Seen", &o.Seen, int32Only, l, "IDs")
	c.list("Bias", &o.Bias, float32Only, l, "IDs")
	c.list("Repetition", &o.Repetition, float32Only, s, "Logits")
	c.list("Presence", &o.Presence, float32Only, s, "Logits")
	c.list("Frequency", &o.Frequency, float32Only, s, "Logits")
	c.list("Saved", &o.Saved, float32Only, l, "IDs")
	c.disjoint("Saved", &o.Saved, "Logits", &o.Logits)
	c.disjoint("Saved", &o.Saved, "Bias", &o.Bias)
	return c.err
}

// Declare implements Op. Reads and Writes have all logits, Bytes counts the listed ones.
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

// Restore undoes an Adjust of the same Starts and IDs:
// Logits[s, IDs[i]] = Saved[i] for the entries i of each row s.
type Restore struct {
	Logits Tensor // [S, V] F32
	Starts Tensor // [S+1] I32
	IDs    Tensor // [L] I32
	Saved  Tensor // [L] F32
}

// Name implements Op.
func (*Restore) Name() string { return "restore" }

// Check implements Op.
func (o *Restore) Check() error {
	c := checker{op: o.Name()}
	c.listed(&o.Logits, &o.Starts, &o.IDs)
	c.list("Saved", &o.Saved, float32Only, o.IDs.Shape[0], "IDs")
	c.disjoint("Logits", &o.Logits, "Saved", &o.Saved)
	return c.err
}

// Declare implements Op. Reads and Writes have all logits, Bytes counts the listed ones.
func (o *Restore) Declare(d *Decl) {
	declareListed(d, &o.Logits, o.IDs.Shape[0])
	d.read(&o.Starts)
	d.read(&o.IDs)
	d.read(&o.Saved)
}

// listed checks the logits of Adjust and Restore, and their lists of tokens.
func (c *checker) listed(logits, starts, ids *Tensor) {
	c.tensor("Logits", logits, float32Only, 2)
	c.tensor("Starts", starts, int32Only, 1)
	if c.ok() && starts.Shape[0] != logits.Shape[0]+1 {
		c.failf("Starts is %v, want %d elements (Logits has %d rows)", *starts, logits.Shape[0]+1, logits.Shape[0])
	}
	c.tensor("IDs", ids, int32Only, 1)
}

// declareListed declares logits of which n elements, known on the device, are accessed: Reads
// and Writes have all, Bytes counts n.
func declareListed(d *Decl, logits *Tensor, n int) {
	d.Reads = logits.AppendRanges(d.Reads)
	d.Writes = logits.AppendRanges(d.Writes)
	d.Bytes += 2 * int64(n) * int64(logits.DType.Size())
}

// Mask bans tokens: with t a token and m a row of Allowed,
//
//	Logits[Rows[m], t] = -Inf where bit t%32 of Allowed[m, t/32] is 0
//
// The logits of the other tokens, and of rows that are not listed, stay as they are.
type Mask struct {
	Logits  Tensor // [S, V] F32
	Rows    Tensor // [M] I32, each in [0, S), each once
	Allowed Tensor // [M, W] I32, dense, W = V/32 rounded up; bits behind the last token mean nothing
}

// Name implements Op.
func (*Mask) Name() string { return "mask" }

// Check implements Op.
func (o *Mask) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, float32Only, 2)
	c.tensor("Rows", &o.Rows, int32Only, 1)
	c.tensor("Allowed", &o.Allowed, int32Only, 2)
	c.dense("Allowed", &o.Allowed)
	c.size("Allowed", &o.Allowed, 0, o.Rows.Shape[0], "rows", "Rows")
	if words := (o.Logits.Shape[1] + 31) / 32; c.ok() && o.Allowed.Shape[1] != words {
		c.failf("Allowed is %v, want %d columns (Logits has %d)", o.Allowed, words, o.Logits.Shape[1])
	}
	c.disjoint("Allowed", &o.Allowed, "Logits", &o.Logits)
	return c.err
}

// Declare implements Op. Reads and Writes have all logits, Bytes counts those of the listed rows as written.
func (o *Mask) Declare(d *Decl) {
	d.Reads = o.Logits.AppendRanges(d.Reads)
	d.Writes = o.Logits.AppendRanges(d.Writes)
	d.Bytes += int64(o.Rows.Shape[0]) * int64(o.Logits.Shape[1]) * int64(o.Logits.DType.Size())
	d.read(&o.Rows)
	d.read(&o.Allowed)
}

// LogProbs computes log(softmax) of each row: Sampled for the tokens in Tokens, Top for the N
// most probable tokens, TopIDs, in descending order of logits, the lower id of equal ones
// first. NaN logits are ignored, in the softmax too; if a row has fewer than N numbers, the
// rest of TopIDs is -1 and of Top -Inf. Sampled is NaN for the token -1, which is none.
//
// Ranks are how many tokens are at least as probable as those in Tokens, themselves included, as vLLM
// counts: 1 for the only most probable one, and 0 for the token -1 and one whose logit is NaN.
type LogProbs struct {
	Logits  Tensor // [S, V] F32
	Tokens  Tensor // [S] I32, each in [0, V), or -1
	Sampled Tensor // [S] F32
	TopIDs  Tensor // [S, N] I32, dense, N <= V, or none
	Top     Tensor // [S, N] F32, dense, or none as TopIDs
	Ranks   Tensor // [S] I32, or none
}

// Name implements Op.
func (*LogProbs) Name() string { return "log_probs" }

// Check implements Op.
func (o *LogProbs) Check() error {
	c := checker{op: o.Name()}
	c.tensor("Logits", &o.Logits, float32Only, 2)
	if c.ok() && o.Logits.Shape[1] < 1 {
		c.failf("Logits is %v, want at least one column", o.Logits)
	}
	s := o.Logits.Shape[0]
	c.list("Tokens", &o.Tokens, int32Only, s, "Logits")
	c.list("Sampled", &o.Sampled, float32Only, s, "Logits")
	c.disjoint("Sampled", &o.Sampled, "Logits", &o.Logits)
	c.perRow("Ranks", &o.Ranks, int32Only, s)
	c.disjoint("Ranks", &o.Ranks, "Tokens", &o.Tokens)
	if c.ok() && o.TopIDs.None() != o.Top.None() {
		c.failf("TopIDs is %v and Top %v, want both or none", o.TopIDs, o.Top)
	}
	if !c.ok() || o.TopIDs.None() {
		return c.err
	}
	c.tensor("TopIDs", &o.TopIDs, int32Only, 2)
	c.dense("TopIDs", &o.TopIDs)
	c.size("TopIDs", &o.TopIDs, 0, s, "rows", "Logits")
	if n, v := o.TopIDs.Shape[1], o.Logits.Shape[1]; c.ok() && n > v {
		c.failf("TopIDs is %v, want at most %d columns (Logits has %d)", o.TopIDs, v, v)
	}
	c.disjoint("TopIDs", &o.TopIDs, "Tokens", &o.Tokens)
	c.tensor("Top", &o.Top, float32Only, 2)
	c.dense("Top", &o.Top)
	c.size("Top", &o.Top, 0, s, "rows", "Logits")
	c.size("Top", &o.Top, 1, o.TopIDs.Shape[1], "columns", "TopIDs")
	c.disjoint("Top", &o.Top, "Logits", &o.Logits)
	c.disjoint("Top", &o.Top, "Sampled", &o.Sampled)
	return c.err
}

// Declare implements Op.
func (o *LogProbs) Declare(d *Decl) {
	d.read(&o.Logits)
	d.read(&o.Tokens)
	d.write(&o.Sampled)
	if !o.TopIDs.None() {
		d.write(&o.TopIDs)
		d.write(&o.Top)
	}
	if !o.Ranks.None() {
		d.write(&o.Ranks)
	}
	d.Flops += 20 * int64(o.Logits.Elements())
}
