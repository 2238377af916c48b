package kernels

// Shapes: N rows (tokens) of a step, S sequences, H hidden size, E experts, K
// experts per token, I expert intermediate size, V vocabulary, D head size.
// "act" is the backend's activation type, "weight" one of BF16, F16, F32. Rows
// may have gaps between them (strides) unless "dense" is said; the last
// dimension never has. Outputs share no memory with inputs unless it is said, nor
// with each other; addresses are multiples of the element's size. Ids, slots,
// offsets and block numbers must lie in their ranges; kernels/cpu checks them.

// Embed writes Out[n] = Table[IDs[n]].
type Embed struct {
	IDs   Tensor // [N] I32, each in [0, V)
	Table Tensor // [V, H] weight
	Out   Tensor // [N, H] act
}

// NormKind chooses between the two norms.
type NormKind uint8

// The norms: RMS divides by the root mean square; Layer subtracts the mean,
// divides by the standard deviation (of the population), and has a bias.
const (
	RMS NormKind = iota
	Layer
)

// Norm writes Out = norm(X) * Weight (+ Bias) over the last dimension. With
// Residual it first does Residual += X and norms that.
type Norm struct {
	Kind     NormKind
	X        Tensor // [N, D] or [N, heads, D] act
	Residual Tensor // as X, or none
	Weight   Tensor // [D] weight
	Bias     Tensor // [D] weight, or none
	Eps      float32
	Out      Tensor // as X; may be X
}

// MatMul writes Out = X Wᵀ (+ Bias).
type MatMul struct {
	X    Tensor // [N, A] act
	W    Tensor // [M, A] weight, dense
	Bias Tensor // [M] weight, or none
	Out  Tensor // [N, M] act or F32
}

// Clamp limits every element of X to [-Limit, Limit], in place (OLMoE's clip_qkv).
type Clamp struct {
	X     Tensor // [N, D] act
	Limit float32
}

// RoPE rotates Q and K in place, rotate-half form: with c = Table[Rows[n], i],
// s = Table[Rows[n], D/2+i], (x[i], x[i+D/2]) becomes (x[i] c - x[i+D/2] s,
// x[i+D/2] c + x[i] s).
type RoPE struct {
	Q     Tensor // [N, heads, D] act
	K     Tensor // [N, kv heads, D] act
	Table Tensor // [T, D] F32, dense: cosines, then sines
	Rows  Tensor // [N] I32: which row of Table
}

// AppendKV writes K[n] and V[n] to place Slots[n] of the paged cache:
// block Slots[n] / B, row Slots[n] % B, with B the block's tokens. A negative
// slot is left out.
type AppendKV struct {
	K, V           Tensor // [N, kv heads, D] act
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	Slots          Tensor // [N] I32
}

// RoPEAppendKV is Norm of the heads of Q and K (RMS, in place) where there are
// weights for it, RoPE, and AppendKV, one after the other and with the same bits,
// but for K, which stays as it was: its heads are normed and rotated on their way
// into the cache. A negative slot leaves K[n] and V[n] out; Q[n] is rotated all the
// same.
type RoPEAppendKV struct {
	Q              Tensor // [N, heads, D] act
	K, V           Tensor // [N, kv heads, D] act
	QNorm, KNorm   Tensor // [D] weight: of the norms; or none, both
	Eps            float32
	Table          Tensor // [T, D] F32, dense: cosines, then sines
	Rows           Tensor // [N] I32: which row of Table
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	Slots          Tensor // [N] I32
}

// Attention is causal attention over a paged cache that already holds the rows'
// own keys and values. Row r of sequence s, SeqStarts[s] <= r < SeqStarts[s+1],
// stands at position p = ContextLens[s] - (SeqStarts[s+1] - r) and sees positions
// max(0, p-Window+1) .. p (all from 0 with Window 0); position t lies in block
// BlockTable[s, t/B], row t%B.
type Attention struct {
	Q              Tensor // [N, heads, D] act
	CacheK, CacheV Tensor // [blocks, B, kv heads, D] act, strided
	SeqStarts      Tensor // [S+1] I32: first row of each sequence, then N
	ContextLens    Tensor // [S] I32: tokens in the cache, those of this step included
	BlockTable     Tensor // [S, max blocks] I32
	Window         int    // tokens a query sees, itself included; 0: all
	Scale          float32
	// MaxContext is at least every ContextLens, MaxRows at least every sequence's
	// rows in this step; both only size the work.
	MaxContext, MaxRows int
	// Stored is the sum of ContextLens, Seen that of the positions that each row sees,
	// both as without a Window. Only the estimate of what it costs goes by them; where they
	// are 0 every sequence is taken to have MaxContext tokens and MaxRows rows.
	Stored, Seen int64
	Out          Tensor // [N, heads, D] act
}

// RouteMethod is how a router turns scores into experts and weights.
type RouteMethod uint8

const (
	// Softmax over all experts, then top-k, weights as they are (Qwen2-MoE, OLMoE).
	Softmax RouteMethod = iota
	// SoftmaxRenorm divides the chosen weights by their sum (Mixtral, Qwen3-MoE).
	SoftmaxRenorm
	// SparseMixer is Phi's routing at inference, for K = 2.
	SparseMixer
)

// Route chooses K experts per row. Equal scores: the lower expert first. Order:
// by falling score. A score that is no number counts as the lowest, so that ids
// are always K different experts.
type Route struct {
	Logits Tensor // [N, E] F32
	Method RouteMethod
	Jitter float32 // SparseMixer's eps (router_jitter_noise)
	// IDs and Weights are [N, K], I32 and F32, dense.
	IDs, Weights Tensor
	// Counts, [E] I64 or none, gains the number of rows that chose each expert.
	Counts Tensor
}

// Group sorts a step's (token, k) pairs by expert: those of expert e are
// Order[Offsets[e]:Offsets[e+1]], each pair as token*K + k, ascending.
type Group struct {
	IDs     Tensor // [N, K] I32, dense
	Offsets Tensor // [E+1] I32
	Order   Tensor // [N*K] I32
}

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

// Combine writes Out[n] = sum over k, in order of k, of Weights[n, k] X[n*K+k],
// plus sigmoid(SharedGate[n]) Shared[n] where there is a shared expert.
type Combine struct {
	X          Tensor // [N*K, H] act
	Weights    Tensor // [N, K] F32, dense
	Shared     Tensor // [N, H] act, or none
	SharedGate Tensor // [N, 1] F32, or none
	Out        Tensor // [N, H] act
}

// CombineNorm does what Combine and a Norm of its output with Residual do, with the same
// bits: with x what Combine writes, rounded to the activation type, it does Residual
// += x and writes Out = norm(Residual) * Weight (+ Bias). x itself is not kept.
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

// SiluMul writes Out = silu(Gate) * Up.
type SiluMul struct {
	Gate, Up Tensor // [N, I] act
	Out      Tensor // [N, I] act; may be Gate
}

// Gather writes Out[s] = X[Rows[s]].
type Gather struct {
	X    Tensor // [N, H] act
	Rows Tensor // [S] I32
	Out  Tensor // [S, H] act
}

// Sample draws one token per row: the largest logit (the lowest id of equal
// ones) where Temperature is 0, else the largest of logit/Temperature + g, with g
// a Gumbel variate of the counter-based generator keyed by (seed, sample,
// position, token): see GumbelNoise. Quotient and sum are rounded to float32, so
// all backends draw the same token from the same logits. A logit that is no
// number is never drawn.
//
// Where Temperature is not 0, MinP, TopK and TopP, each of them none or one
// element per row, leave out unlikely tokens before that, in this order. With s
// the quotients, s0 the row's largest and e = Exp(s - s0), or 1 where s = s0:
//
//   - MinP, from 0 (all) to 1, leaves out the tokens with e < MinP: those less
//     than MinP times as likely as the likeliest.
//   - TopK, 0 for all, keeps the TopK tokens with the largest logits, of equal ones
//     those with the lowest ids.
//   - TopP, above 0 and at most 1 (all), keeps the fewest tokens, in the same order,
//     whose weights reach TopP times the weights of all that MinP and TopK left. A
//     weight is SampleWeight(e), an integer, so that sums are exact in any order;
//     nor is the product rounded.
type Sample struct {
	Logits      Tensor // [S, V] F32
	Temperature Tensor // [S] F32, finite, >= 0
	Seeds       Tensor // [S] U64
	Samples     Tensor // [S] I32: which of a request's samples
	Positions   Tensor // [S] I32: position of the token drawn
	TopK        Tensor // [S] I32, >= 0, or none
	TopP, MinP  Tensor // [S] F32, or none
	Out         Tensor // [S] I32
}

// Adjust changes the logits of listed tokens in place, and saves them first: those
// of row s are IDs[Starts[s]:Starts[s+1]], each once. With o the logit and n =
// Seen, it becomes, every operation rounded to float32:
//
//	x = o / Repetition[s] if n >= 0 and o > 0, o * Repetition[s] if n >= 0, else o
//	x = (x - Frequency[s]*n) - Presence[s] if n > 0
//	x = x + Bias
type Adjust struct {
	Logits Tensor // [S, V] F32
	Starts Tensor // [S+1] I32: the first entry of each row, then L
	IDs    Tensor // [L] I32, each in [0, V)
	// Seen is -1 for a token in neither prompt nor answer, 0 for one in the prompt
	// only, n for one that stands n times in the answer.
	Seen Tensor // [L] I32
	Bias Tensor // [L] F32, finite, or -Inf for a token never to be drawn
	// Repetition is above 0; all three are finite.
	Repetition, Presence, Frequency Tensor // [S] F32
	Saved                           Tensor // [L] F32: the logits as they were
}

// Restore undoes an Adjust of the same Starts and IDs:
// Logits[s, IDs[i]] = Saved[i] for the entries i of each row s.
type Restore struct {
	Logits Tensor // [S, V] F32
	Starts Tensor // [S+1] I32
	IDs    Tensor // [L] I32
	Saved  Tensor // [L] F32
}

// LogProbs takes the logarithm of the softmax over each row: Chosen is that of
// Tokens, Top those of the N likeliest tokens, TopIDs. Order: by falling logit, the
// lower id of equal ones first. A logit that is no number is left out, of the
// softmax too; where a row has fewer than N numbers, the rest of TopIDs is -1 and
// of Top -Inf.
type LogProbs struct {
	Logits Tensor // [S, V] F32
	Tokens Tensor // [S] I32, each in [0, V)
	Chosen Tensor // [S] F32
	TopIDs Tensor // [S, N] I32, dense, N <= V, or none
	Top    Tensor // [S, N] F32, dense, or none as TopIDs
}
