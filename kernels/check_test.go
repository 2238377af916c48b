package kernels

import (
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
)

// valid returns arguments of every kind that Check takes, at addresses that do
// not overlap.
type valid struct {
	next device.Addr

	embed     Embed
	norm      Norm
	matmul    MatMul
	gated     GatedMatMul
	clamp     Clamp
	rope      RoPE
	append    AppendKV
	ropeKV    RoPEAppendKV
	attention Attention
	together  RoPEAttention
	route     Route
	router    RouterGateUp
	routeDown RouteDown
	routeUp   RouteExpertUp
	group     SortByExpert
	up        ExpertUp
	down      ExpertDown
	combine   Combine
	combined  CombineNorm
	silu      SiluMul
	gather    Gather
	ffn       ExpertFFN
	copied    CopyBlocks
	added     AddRows
	words     Copy
	sample    Sample
	adjust    Adjust
	restore   Restore
	mask      Mask
	probs     LogProbs
}

func (v *valid) tensor(t DType, shape ...int) Tensor {
	v.next += 1 << 20
	return New(v.next, t, shape...)
}

func newValid() *valid {
	v := &valid{}
	layout := ExpertLayout{ExpertShape: ExpertShape{Hidden: 32, Intermediate: 48, DType: BF16}, Tag: "test", Size: 9216}
	v.embed = Embed{v.tensor(I32, 3), v.tensor(BF16, 100, 32), v.tensor(F32, 3, 32)}
	v.norm = Norm{Kind: Layer, X: v.tensor(F32, 3, 32), Residual: v.tensor(F32, 3, 32), Weight: v.tensor(BF16, 32), Bias: v.tensor(BF16, 32), Eps: 1e-5, Out: v.tensor(F32, 3, 32)}
	v.matmul = MatMul{X: v.tensor(BF16, 2, 32), W: v.tensor(BF16, 8, 32), Bias: v.tensor(BF16, 8), Out: v.tensor(F32, 2, 8)}
	v.clamp = Clamp{v.tensor(F32, 3, 32), 8}
	v.gated = GatedMatMul{X: v.tensor(BF16, 2, 32), W: v.tensor(BF16, 8, 32), Out: v.tensor(BF16, 2, 8)}
	v.rope = RoPE{v.tensor(F32, 3, 4, 16), v.tensor(F32, 3, 2, 16), v.tensor(F32, 64, 16), v.tensor(I32, 3)}
	v.append = AppendKV{v.tensor(F32, 3, 2, 16), v.tensor(F32, 3, 2, 16), v.tensor(F32, 5, 16, 2, 16), v.tensor(F32, 5, 16, 2, 16), v.tensor(I32, 3)}
	v.ropeKV = RoPEAppendKV{
		Q: v.rope.Q, K: v.append.K, V: v.append.V, QNorm: v.tensor(BF16, 16), KNorm: v.tensor(F32, 16), Eps: 1e-6, Table: v.rope.Table, Rows: v.rope.Rows,
		CacheK: v.append.CacheK, CacheV: v.append.CacheV, Slots: v.append.Slots,
	}
	v.attention = Attention{
		Q: v.tensor(F32, 3, 4, 16), CacheK: v.append.CacheK, CacheV: v.append.CacheV, SeqStarts: v.tensor(I32, 3), ContextLens: v.tensor(I32, 2),
		BlockTable: v.tensor(I32, 2, 4), Scale: 0.25, MaxContext: 60, MaxSeqTokens: 2, Out: v.tensor(F32, 3, 4, 16),
	}
	v.together = RoPEAttention{v.ropeKV, v.attention}
	v.together.Attention.Q = v.ropeKV.Q
	v.route = Route{Logits: v.tensor(F32, 3, 8), Method: SparseMixer, Jitter: 0.01, IDs: v.tensor(I32, 3, 2), Weights: v.tensor(F32, 3, 2), Counts: v.tensor(I64, 8), Offsets: v.tensor(I32, 9), Order: v.tensor(I32, 6), Runs: v.tensor(I32, 6, RunColumns)}
	v.router = RouterGateUp{v.matmul, v.gated}
	v.router.GateUp.X = v.matmul.X
	v.routeDown = RouteDown{v.route, v.matmul}
	v.group = SortByExpert{v.route.IDs, v.tensor(I32, 9), v.tensor(I32, 6)}
	v.up = ExpertUp{ExpertGEMM{v.tensor(F32, 3, 32), v.group.Offsets, v.group.Order, v.tensor(U64, 8), v.tensor(I32, 5), layout, v.tensor(F32, 6, 48), Columns{}, Tensor{}}}
	v.routeUp = RouteExpertUp{v.route, v.up}
	v.routeUp.Up.Offsets, v.routeUp.Up.Order, v.routeUp.Up.Runs, v.routeUp.Up.Experts = v.route.Offsets, v.route.Order, v.route.Runs, v.tensor(I32, 8)
	v.down = ExpertDown{ExpertGEMM{v.up.Out, v.group.Offsets, v.group.Order, v.up.Slots, v.up.Experts, layout, v.tensor(F32, 6, 32), Columns{}, Tensor{}}}
	v.ffn = ExpertFFN{v.up.ExpertGEMM, v.tensor(I32, 5)}
	v.ffn.Out = v.down.Out
	v.combine = Combine{v.down.Out, v.route.Weights, v.tensor(F32, 3, 32), v.tensor(F32, 3, 1), v.tensor(F32, 3, 32)}
	v.combined = CombineNorm{
		X: v.down.Out, Weights: v.route.Weights, Shared: v.combine.Shared, SharedGate: v.combine.SharedGate,
		Kind: Layer, Residual: v.tensor(F32, 3, 32), Weight: v.norm.Weight, Bias: v.norm.Bias, Eps: 1e-5, Out: v.tensor(F32, 3, 32),
	}
	v.silu = SiluMul{v.tensor(F32, 3, 48), v.tensor(F32, 3, 48), v.tensor(F32, 3, 48)}
	v.gather = Gather{v.tensor(F32, 3, 32), v.tensor(I32, 2), v.tensor(F32, 2, 32)}
	v.copied = CopyBlocks{Src: v.tensor(U64, 3), Dst: v.tensor(U64, 3), BlockBytes: 4096}
	v.added = AddRows{Src: v.copied.Src, Dst: v.copied.Dst, Columns: 32, DType: BF16}
	v.words = Copy{Src: v.tensor(I32, 3, 5), Dst: v.tensor(I32, 3, 5)}
	v.sample = Sample{
		v.tensor(F32, 2, 100), v.tensor(F32, 2), v.tensor(U64, 2), v.tensor(I32, 2), v.tensor(I32, 2),
		v.tensor(I32, 2), v.tensor(F32, 2), v.tensor(F32, 2), v.tensor(I32, 2),
	}
	v.adjust = Adjust{
		v.sample.Logits, v.tensor(I32, 3), v.tensor(I32, 5), v.tensor(I32, 5), v.tensor(F32, 5),
		v.tensor(F32, 2), v.tensor(F32, 2), v.tensor(F32, 2), v.tensor(F32, 5),
	}
	v.restore = Restore{v.sample.Logits, v.adjust.Starts, v.adjust.IDs, v.adjust.Saved}
	v.mask = Mask{v.sample.Logits, v.tensor(I32, 1), v.tensor(I32, 1, 4)}
	v.probs = LogProbs{v.sample.Logits, v.sample.Out, v.tensor(F32, 2), v.tensor(I32, 2, 7), v.tensor(F32, 2, 7), v.tensor(I32, 2)}
	return v
}

func (v *valid) all() []Op {
	return []Op{
		&v.embed, &v.norm, &v.matmul, &v.gated, &v.clamp, &v.rope, &v.append, &v.ropeKV, &v.attention, &v.together, &v.route, &v.router, &v.routeDown, &v.group,
		&v.up, &v.routeUp, &v.down, &v.ffn, &v.combine, &v.combined, &v.silu, &v.gather, &v.copied, &v.added, &v.words, &v.sample,
		&v.adjust, &v.restore, &v.mask, &v.probs,
	}
}

// listAll lists all experts in o, and has their runs.
func (v *valid) listAll(o *ExpertGEMM) *ExpertGEMM {
	o.Experts, o.Runs = v.tensor(I32, 8), v.route.Runs
	return o
}

// gap returns t with one more element between its rows.
func gap(t Tensor) Tensor {
	t.Stride[0]++
	return t
}

func TestCheckTakesGoodArguments(t *testing.T) {
	for _, op := range newValid().all() {
		if err := op.Check(); err != nil {
			t.Errorf("%s: %v", op.Name(), err)
		}
	}
	v := newValid()
	withRuns := newValid()
	withRuns.listAll(&withRuns.up.ExpertGEMM)
	wide := ExpertLayout{ExpertShape: ExpertShape{Hidden: 32, Intermediate: 200, DType: BF16}, Tag: "test", Size: 38400}
	for name, op := range map[string]Op{
		"rows with gaps":     &MatMul{X: gap(v.matmul.X), W: v.matmul.W, Out: gap(v.matmul.Out)},
		"no rows":            &MatMul{X: New(0, F32, 0, 32), W: v.matmul.W, Out: New(0, F32, 0, 8)},
		"in place":           &Norm{X: v.norm.X, Weight: v.norm.Weight, Out: v.norm.X},
		"heads":              &Norm{X: v.rope.Q, Weight: New(1<<30, F16, 16), Out: v.rope.Q},
		"part of a wide row": &SiluMul{Gate: v.silu.Gate.Narrow(1, 0, 16), Up: v.silu.Gate.Narrow(1, 16, 32), Out: v.silu.Gate.Narrow(1, 0, 16)},
		"no shared expert":   &Combine{X: v.combine.X, Weights: v.combine.Weights, Out: v.combine.Out},
		"no bias":            &CombineNorm{X: v.combine.X, Weights: v.combine.Weights, Residual: gap(v.combined.Residual), Weight: v.norm.Weight, Out: gap(v.combined.Out)},
		"strided cache":      &AppendKV{v.append.K, v.append.V, gap(v.append.CacheK), gap(v.append.CacheV), v.append.Slots},
		"heads without norms": &RoPEAppendKV{
			Q: v.rope.Q, K: v.append.K, V: v.append.V, Table: v.rope.Table, Rows: v.rope.Rows, CacheK: v.append.CacheK, CacheV: v.append.CacheV, Slots: v.append.Slots,
		},
		"some columns, gate/up": &ExpertUp{ExpertGEMM{v.up.X, v.up.Offsets, v.up.Order, v.up.Slots, v.up.Experts, wide, v.tensor(F32, 6, 64), Columns{64, 128}, Tensor{}}},
		"some columns, down":    &ExpertDown{ExpertGEMM{New(1<<40, F32, 6, 72), v.up.Offsets, v.up.Order, v.up.Slots, v.up.Experts, wide, v.down.Out, Columns{128, 200}, Tensor{}}},
		"whole experts":         &ExpertFFN{v.ffn.ExpertGEMM, Tensor{}},
		"runs, gate/up":         &withRuns.up,
		"no experts listed":     &ExpertDown{ExpertGEMM{v.down.X, v.down.Offsets, v.down.Order, v.down.Slots, v.down.Experts.Slice(0, 0), v.down.Layout, v.down.Out, Columns{}, Tensor{}}},
		"no tokens to experts":  &ExpertUp{ExpertGEMM{New(0, F32, 0, 32), v.up.Offsets, New(0, I32, 0), v.up.Slots, v.up.Experts, v.up.Layout, New(0, F32, 0, 48), Columns{}, Tensor{}}},
		"nothing left out":      &Sample{Logits: v.sample.Logits, Temperature: v.sample.Temperature, Seeds: v.sample.Seeds, Samples: v.sample.Samples, Positions: v.sample.Positions, Out: v.sample.Out},
		"only the token drawn":  &LogProbs{Logits: gap(v.sample.Logits), Tokens: v.sample.Out, Sampled: v.probs.Sampled},
		"no alternatives":       &LogProbs{Logits: v.sample.Logits, Tokens: v.sample.Out, Sampled: v.probs.Sampled, TopIDs: New(0, I32, 2, 0), Top: New(0, F32, 2, 0)},
		"nothing adjusted":      &Restore{v.sample.Logits, v.adjust.Starts, New(0, I32, 0), New(0, F32, 0)},
		"attention on no rows": &Attention{
			Q: New(0, F32, 0, 4, 16), CacheK: v.append.CacheK, CacheV: v.append.CacheV, SeqStarts: v.tensor(I32, 1), ContextLens: New(0, I32, 0),
			BlockTable: New(0, I32, 0, 4), Scale: 1, Out: New(0, F32, 0, 4, 16),
		},
	} {
		if err := op.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckErrors(t *testing.T) {
	nan := float32(math.NaN())
	for _, c := range []struct {
		spoil func(v *valid) Op
		want  string
	}{
		{func(v *valid) Op { v.matmul.W = New(64, F32, 8, 16); return &v.matmul }, "kernels: matmul: W is float32[8 16], want 32 columns (X has 32)"},
		{func(v *valid) Op { v.matmul.X = Tensor{}; return &v.matmul }, "kernels: matmul: X is missing, want float32, bfloat16 or float16 of rank 2"},
		{func(v *valid) Op { v.matmul.X.DType = I32; return &v.matmul }, "kernels: matmul: X is int32[2 32], want float32, bfloat16 or float16"},
		{func(v *valid) Op { v.matmul.X.DType = 77; return &v.matmul }, "kernels: matmul: X has unknown type 77"},
		{func(v *valid) Op { v.matmul.X.Rank = 1; return &v.matmul }, "kernels: matmul: X is bfloat16[2] strides [32], want rank 2"},
		{func(v *valid) Op { v.matmul.X.Shape[0] = -1; return &v.matmul }, "X is bfloat16[-1 32], want no negative dimension"},
		{func(v *valid) Op { v.matmul.X.Stride[1] = 2; return &v.matmul }, "want the last dimension without gaps"},
		{func(v *valid) Op { v.matmul.X.Stride[0] = 31; return &v.matmul }, "X is bfloat16[2 32] strides [31 1], want no overlap between elements"},
		{func(v *valid) Op { v.matmul.X.Addr = 0; return &v.matmul }, "X is bfloat16[2 32] at address 0"},
		{func(v *valid) Op { v.matmul.X.Addr++; return &v.matmul }, "want a multiple of 2 bytes"},
		{func(v *valid) Op { v.matmul.W = gap(v.matmul.W); return &v.matmul }, "W is bfloat16[8 32] strides [33 1], want it dense"},
		{func(v *valid) Op { v.matmul.Bias.Shape[0] = 7; return &v.matmul }, "Bias is bfloat16[7], want 8 elements, one per row of W (W has 8)"},
		{func(v *valid) Op { v.matmul.Out = v.tensor(F32, 3, 8); return &v.matmul }, "Out is float32[3 8], want 2 rows (X has 2)"},
		{func(v *valid) Op { v.matmul.Out = v.tensor(F32, 2, 7); return &v.matmul }, "Out is float32[2 7], want 8 columns, one per row of W (W has 8)"},
		{func(v *valid) Op { v.matmul.Out.DType = F16; return &v.matmul }, "Out is float16[2 8], want bfloat16 as X is"},
		{func(v *valid) Op { v.matmul.Out.Addr = v.matmul.X.Addr; return &v.matmul }, "kernels: matmul: Out [0x"},
		{func(v *valid) Op { v.matmul.Out.Addr = v.matmul.W.Addr + 64; return &v.matmul }, "overlaps W"},

		{func(v *valid) Op { v.embed.IDs.DType = I64; return &v.embed }, "kernels: embed: IDs is int64[3], want int32"},
		{func(v *valid) Op { v.embed.Out = v.tensor(F32, 3, 16); return &v.embed }, "Out is float32[3 16], want 32 columns (Table has 32)"},
		{func(v *valid) Op { v.embed.Out = v.tensor(F32, 4, 32); return &v.embed }, "Out is float32[4 32], want 3 rows (IDs has 3)"},

		{func(v *valid) Op { v.norm.X.Rank = 1; return &v.norm }, "kernels: norm: X is float32[3] strides [32], want rank 2"},
		{func(v *valid) Op { v.norm.Residual = v.tensor(F32, 3, 16); return &v.norm }, "Residual is float32[3 16], want the shape [3 32] of X"},
		{func(v *valid) Op { v.norm.Residual.DType = BF16; return &v.norm }, "Residual is bfloat16[3 32], want float32 as X is"},
		{func(v *valid) Op { v.norm.Residual = v.norm.X; return &v.norm }, "overlaps X"},
		{func(v *valid) Op { v.norm.Out = v.norm.Residual; return &v.norm }, "overlaps Residual"},
		{func(v *valid) Op { v.norm.Out = v.norm.X; v.norm.Out.Addr += 4; return &v.norm }, "overlaps X"},
		{func(v *valid) Op { v.norm.Weight = v.tensor(F32, 31); return &v.norm }, "Weight is float32[31], want 32 elements (a row of X has 32)"},
		{func(v *valid) Op { v.norm.Bias = v.tensor(F32, 33); return &v.norm }, "Bias is float32[33], want 32 elements"},
		{func(v *valid) Op { v.norm.Kind = 2; return &v.norm }, "Kind is 2, want RMS (0) or Layer (1)"},
		{func(v *valid) Op { v.norm.Eps = nan; return &v.norm }, "Eps is NaN, want 0 or more"},

		{func(v *valid) Op { v.clamp.Limit = 0; return &v.clamp }, "kernels: clamp: Limit is 0, want more than 0"},

		{func(v *valid) Op { v.rope.K = v.tensor(F32, 2, 2, 16); return &v.rope }, "kernels: rope: K is float32[2 2 16], want 3 rows (Q has 3)"},
		{func(v *valid) Op { v.rope.K = v.tensor(F32, 3, 2, 8); return &v.rope }, "K is float32[3 2 8], want 16 columns (Q has 16)"},
		{func(v *valid) Op {
			v.rope.Q, v.rope.K = v.tensor(F32, 3, 4, 15), v.tensor(F32, 3, 2, 15)
			return &v.rope
		}, "Q is float32[3 4 15], want an even head size"},
		{func(v *valid) Op { v.rope.Table = v.tensor(BF16, 64, 16); return &v.rope }, "Table is bfloat16[64 16], want float32"},
		{func(v *valid) Op { v.rope.Table = v.tensor(F32, 64, 8); return &v.rope }, "Table is float32[64 8], want 16 columns (Q has 16)"},
		{func(v *valid) Op { v.rope.Rows = v.tensor(I32, 4); return &v.rope }, "Rows is int32[4], want 3 elements (Q has 3)"},

		{func(v *valid) Op { v.gated.W = v.tensor(BF16, 8, 16); return &v.gated }, "kernels: gated_matmul: W is bfloat16[8 16], want 32 columns (X has 32)"},
		{func(v *valid) Op {
			v.gated.W, v.gated.Out = v.tensor(BF16, 7, 32), v.tensor(BF16, 2, 7)
			return &v.gated
		}, "W is bfloat16[7 32], want an even number of rows"},
		{func(v *valid) Op { v.gated.Out = v.tensor(F32, 2, 8); return &v.gated }, "Out is float32[2 8], want bfloat16 as X is"},

		{func(v *valid) Op { v.append.V = v.tensor(F32, 3, 1, 16); return &v.append }, "kernels: append_kv: V is float32[3 1 16], want the shape [3 2 16] of K"},
		{func(v *valid) Op { v.append.CacheV = v.tensor(F32, 4, 16, 2, 16); return &v.append }, "CacheV is float32[4 16 2 16], want the shape [5 16 2 16] of CacheK"},
		{func(v *valid) Op { v.append.CacheV = v.append.CacheK; return &v.append }, "overlaps CacheK"},
		{func(v *valid) Op {
			v.append.CacheK, v.append.CacheV = v.tensor(F32, 5, 16, 4, 16), v.tensor(F32, 5, 16, 4, 16)
			return &v.append
		}, "CacheK is float32[5 16 4 16], want 2 heads (K has 2)"},
		{func(v *valid) Op {
			v.append.CacheK, v.append.CacheV = v.tensor(BF16, 5, 16, 2, 16), v.tensor(BF16, 5, 16, 2, 16)
			return &v.append
		}, "CacheK is bfloat16[5 16 2 16], want float32 as K is"},
		{func(v *valid) Op {
			v.append.CacheK, v.append.CacheV = v.tensor(F32, 5, 0, 2, 16), v.tensor(F32, 5, 0, 2, 16)
			return &v.append
		}, "want at least one token per block"},
		{func(v *valid) Op { v.append.Slots = v.tensor(I32, 2); return &v.append }, "Slots is int32[2], want 3 elements (K has 3)"},

		{func(v *valid) Op { v.ropeKV.K = v.tensor(F32, 3, 2, 8); return &v.ropeKV }, "kernels: rope_append_kv: K is float32[3 2 8], want 16 columns (Q has 16)"},
		{func(v *valid) Op { v.ropeKV.Rows = v.tensor(I32, 2); return &v.ropeKV }, "Rows is int32[2], want 3 elements (Q has 3)"},
		{func(v *valid) Op { v.ropeKV.Slots = v.tensor(I32, 4); return &v.ropeKV }, "Slots is int32[4], want 3 elements (K has 3)"},
		{func(v *valid) Op { v.ropeKV.V = v.tensor(F32, 3, 1, 16); return &v.ropeKV }, "V is float32[3 1 16], want the shape [3 2 16] of K"},
		{func(v *valid) Op { v.ropeKV.V.Addr = v.ropeKV.Q.Addr; return &v.ropeKV }, "overlaps V"},
		{func(v *valid) Op { v.ropeKV.KNorm = Tensor{}; return &v.ropeKV }, "QNorm is bfloat16[16] and KNorm none, want both or none"},
		{func(v *valid) Op { v.ropeKV.QNorm = v.tensor(BF16, 8); return &v.ropeKV }, "QNorm is bfloat16[8], want 16 elements (a head of Q has 16)"},
		{func(v *valid) Op { v.ropeKV.KNorm = v.tensor(I32, 16); return &v.ropeKV }, "KNorm is int32[16], want float32, bfloat16 or float16"},
		{func(v *valid) Op { v.ropeKV.Eps = nan; return &v.ropeKV }, "Eps is NaN, want 0 or more"},

		{func(v *valid) Op { v.attention.Q = v.tensor(F32, 3, 3, 16); return &v.attention }, "kernels: attention: Q is float32[3 3 16], want a multiple of CacheK's 2 heads"},
		{func(v *valid) Op { v.attention.SeqStarts = v.tensor(I32, 2); return &v.attention }, "SeqStarts is int32[2], want 3 elements (ContextLens has 2)"},
		{func(v *valid) Op { v.attention.BlockTable = v.tensor(I32, 3, 4); return &v.attention }, "BlockTable is int32[3 4], want 2 rows (ContextLens has 2)"},
		{func(v *valid) Op { v.attention.Out = v.tensor(F32, 3, 4, 8); return &v.attention }, "Out is float32[3 4 8], want the shape [3 4 16] of Q"},
		{func(v *valid) Op { v.attention.Window = -1; return &v.attention }, "Window is -1, want 0 (all) or more"},
		{func(v *valid) Op { v.attention.Scale = 0; return &v.attention }, "Scale is 0, want more than 0"},
		{func(v *valid) Op { v.attention.MaxSeqTokens = 0; return &v.attention }, "MaxContext is 60 and MaxSeqTokens 0, want MaxContext >= MaxSeqTokens >= 1"},
		{func(v *valid) Op { v.attention.MaxContext = 1; return &v.attention }, "MaxContext is 1 and MaxSeqTokens 2"},
		{func(v *valid) Op { v.attention.MaxContext = 65; return &v.attention }, "BlockTable is int32[2 4], want room for MaxContext 65 in blocks of 16"},

		{func(v *valid) Op { v.together.Append.Slots = v.tensor(I32, 4); return &v.together }, "kernels: rope_attention: Slots is int32[4], want 3 elements (K has 3)"},
		{func(v *valid) Op { v.together.Attention.Scale = 0; return &v.together }, "kernels: rope_attention: Scale is 0, want more than 0"},
		{func(v *valid) Op { v.together.Attention.Q = v.attention.Q; return &v.together }, "as in Append"},
		{func(v *valid) Op { v.together.Attention.CacheV = v.tensor(F32, 5, 16, 2, 16); return &v.together }, "kernels: rope_attention: CacheV is float32[5 16 2 16] at 0x"},
		{func(v *valid) Op {
			v.together.Attention.CacheK = v.tensor(F32, 6, 16, 2, 16)
			v.together.Attention.CacheV = v.tensor(F32, 6, 16, 2, 16)
			return &v.together
		}, "CacheK is float32[6 16 2 16] at 0x"},
		{func(v *valid) Op { v.together.Attention.Out.Addr = v.append.V.Addr; return &v.together }, "overlaps V"},
		{func(v *valid) Op { v.together.Attention.Out.Addr = v.append.K.Addr; return &v.together }, "overlaps K"},

		{func(v *valid) Op { v.route.Logits.DType = BF16; return &v.route }, "kernels: route: Logits is bfloat16[3 8], want float32"},
		{func(v *valid) Op { v.route.IDs = v.tensor(I32, 3, 9); return &v.route }, "IDs is int32[3 9], want 1 to 8 columns (Logits has 8)"},
		{func(v *valid) Op { v.route.IDs = gap(v.route.IDs); return &v.route }, "IDs is int32[3 2] strides [3 1], want it dense"},
		{func(v *valid) Op { v.route.Weights = v.tensor(F32, 3, 1); return &v.route }, "Weights is float32[3 1], want 2 columns (IDs has 2)"},
		{func(v *valid) Op { v.route.Counts = v.tensor(I64, 7); return &v.route }, "Counts is int64[7], want 8 elements (Logits has 8)"},
		{func(v *valid) Op { v.route.Order = Tensor{}; return &v.route }, "Offsets is int32[9] and Order none, want both or none"},
		{func(v *valid) Op { v.route.Offsets = v.tensor(I32, 8); return &v.route }, "route: Offsets is int32[8], want 9 elements (Logits has 8 columns)"},
		{func(v *valid) Op { v.route.Offsets, v.route.Order = Tensor{}, Tensor{}; return &v.route }, "route: Runs is int32[6 4], want none without Order"},
		{func(v *valid) Op { v.route.Runs = v.tensor(I32, 5, 4); return &v.route }, "route: Runs is int32[5 4], want [6 4] (8 experts, 6 pairs)"},
		{func(v *valid) Op { v.route.Runs = v.tensor(I32, 6, 3); return &v.route }, "route: Runs is int32[6 3], want [6 4] (8 experts, 6 pairs)"},
		{func(v *valid) Op { v.route.Runs.DType = F32; return &v.route }, "route: Runs is float32[6 4], want int32"},
		{func(v *valid) Op { v.route.Runs = gap(v.route.Runs); return &v.route }, "route: Runs is int32[6 4] strides [5 1], want it dense"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.Logits.Addr; return &v.route }, "overlaps Logits"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.IDs.Addr; return &v.route }, "overlaps IDs"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.Weights.Addr; return &v.route }, "overlaps Weights"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.Offsets.Addr; return &v.route }, "route: Runs [0x"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.Order.Addr; return &v.route }, "overlaps Order"},
		{func(v *valid) Op { v.route.Runs.Addr = v.route.Counts.Addr; return &v.route }, "overlaps Counts"},
		{func(v *valid) Op {
			v.route = Route{
				Logits: v.tensor(F32, 65, 8), IDs: v.tensor(I32, 65, 2), Weights: v.tensor(F32, 65, 2),
				Offsets: v.route.Offsets, Order: v.tensor(I32, 130), Runs: v.tensor(I32, 15, 4),
			}
			return &v.route
		}, "route: Runs is int32[15 4], want none for more than 64 rows (Logits has 65)"},
		{func(v *valid) Op { v.route.Order = v.tensor(I32, 5); return &v.route }, "route: Order is int32[5], want 6 elements (IDs is int32[3 2])"},
		{func(v *valid) Op { v.route.Order = v.route.IDs.View(6); return &v.route }, "route: Order"},
		{func(v *valid) Op { v.route.Method = 3; return &v.route }, "Method is 3"},
		{func(v *valid) Op { v.route.Jitter = -1; return &v.route }, "Jitter is -1, want 0 or more"},
		{func(v *valid) Op {
			v.route.IDs, v.route.Weights = v.tensor(I32, 3, 1), v.tensor(F32, 3, 1)
			return &v.route
		}, "IDs is int32[3 1], want 2 columns for SparseMixer"},

		{func(v *valid) Op { v.router.Router.W = v.tensor(BF16, 8, 31); return &v.router }, "kernels: router_gate_up: Router: W is bfloat16[8 31], want 32 columns (X has 32)"},
		{func(v *valid) Op { v.router.GateUp.X = v.tensor(BF16, 2, 31); return &v.router }, "kernels: router_gate_up: GateUp: W is bfloat16[8 32], want 31 columns (X has 31)"},
		{func(v *valid) Op {
			v.router.Router.X = v.tensor(F32, 2, 32)
			return &v.router
		}, "kernels: router_gate_up: GateUp.X is bfloat16[2 32], want float32 as Router.X is"},
		{func(v *valid) Op { v.router.Router.Out.Addr = v.router.GateUp.W.Addr; return &v.router }, "kernels: router_gate_up: Router.Out [0x"},
		{func(v *valid) Op { v.router.Router.Out.Addr = v.router.GateUp.W.Addr; return &v.router }, "overlaps GateUp.W"},
		{func(v *valid) Op { v.router.Router.Out.Addr = v.router.GateUp.Out.Addr; return &v.router }, "overlaps GateUp.Out"},
		{func(v *valid) Op {
			v.router.GateUp.X = v.gated.X
			v.router.Router.Out.Addr = v.gated.X.Addr
			return &v.router
		}, "overlaps GateUp.X"},
		{func(v *valid) Op {
			v.router.GateUp.X = v.gated.X
			v.router.GateUp.Out.Addr = v.matmul.X.Addr
			return &v.router
		}, "GateUp.Out [0x"},
		{func(v *valid) Op {
			v.router.GateUp.X = v.gated.X
			v.router.GateUp.Out.Addr = v.matmul.X.Addr
			return &v.router
		}, "overlaps Router.X"},
		{func(v *valid) Op { v.router.GateUp.Out.Addr = v.matmul.W.Addr; return &v.router }, "overlaps Router.W"},
		{func(v *valid) Op { v.router.GateUp.Out.Addr = v.matmul.Bias.Addr; return &v.router }, "overlaps Router.Bias"},
		{func(v *valid) Op { v.routeUp.Route.Method = 3; return &v.routeUp }, "kernels: route_expert_up: Route: Method is 3"},
		{func(v *valid) Op { v.routeUp.Up.X = v.tensor(F32, 3, 16); return &v.routeUp }, "kernels: route_expert_up: Up: X is float32[3 16], want 32 columns (Layout.Hidden has 32)"},
		{func(v *valid) Op { v.routeUp.Up.Order = v.tensor(I32, 6); return &v.routeUp }, "kernels: route_expert_up: Route has Order"},
		{func(v *valid) Op { v.routeUp.Up.Out.Addr = v.route.Logits.Addr; return &v.routeUp }, "overlaps Route.Logits"},
		{func(v *valid) Op { v.routeUp.Route.Weights.Addr = v.route.Logits.Addr; return &v.routeUp }, "overlaps Route.Logits"},
		{func(v *valid) Op { v.routeUp.Route.IDs.Addr = v.routeUp.Up.X.Addr; return &v.routeUp }, "overlaps Up.X"},
		{func(v *valid) Op { v.routeUp.Route.Counts.Addr = v.routeUp.Up.Slots.Addr; return &v.routeUp }, "overlaps Up.Slots"},
		{func(v *valid) Op { v.routeDown.Route.Method = 3; return &v.routeDown }, "kernels: route_down: Route: Method is 3"},
		{func(v *valid) Op { v.routeDown.Down.Bias = v.tensor(BF16, 7); return &v.routeDown }, "kernels: route_down: Down: Bias is bfloat16[7], want 8 elements"},
		{func(v *valid) Op { v.routeDown.Down.Out.Addr = v.route.Logits.Addr; return &v.routeDown }, "kernels: route_down: Down.Out [0x"},
		{func(v *valid) Op { v.routeDown.Down.Out.Addr = v.route.Logits.Addr; return &v.routeDown }, "overlaps Route.Logits"},
		{func(v *valid) Op { v.routeDown.Route.IDs.Addr = v.matmul.X.Addr; return &v.routeDown }, "kernels: route_down: Route.IDs [0x"},
		{func(v *valid) Op { v.routeDown.Route.IDs.Addr = v.matmul.X.Addr; return &v.routeDown }, "overlaps Down.X"},
		{func(v *valid) Op { v.routeDown.Route.Weights.Addr = v.matmul.W.Addr; return &v.routeDown }, "overlaps Down.W"},
		{func(v *valid) Op { v.routeDown.Route.Counts.Addr = v.matmul.Bias.Addr; return &v.routeDown }, "overlaps Down.Bias"},
		{func(v *valid) Op { v.routeDown.Route.Offsets.Addr = v.matmul.Out.Addr; return &v.routeDown }, "Route.Offsets [0x"},
		{func(v *valid) Op { v.routeDown.Route.Order.Addr = v.matmul.Out.Addr; return &v.routeDown }, "overlaps Down.Out"},
		{func(v *valid) Op { v.routeDown.Route.Runs.Addr = v.matmul.W.Addr; return &v.routeDown }, "kernels: route_down: Route.Runs [0x"},
		{func(v *valid) Op { v.group.Order = v.tensor(I32, 5); return &v.group }, "kernels: group: Order is int32[5], want 6 elements (IDs is int32[3 2])"},
		{func(v *valid) Op { v.group.Offsets = v.tensor(I32, 1); return &v.group }, "Offsets is int32[1], want one more element than there are experts"},
		{func(v *valid) Op { v.group.Order.Addr = v.group.IDs.Addr; return &v.group }, "overlaps IDs"},

		{func(v *valid) Op { v.up.X = v.tensor(F32, 3, 16); return &v.up }, "kernels: expert_up: X is float32[3 16], want 32 columns (Layout.Hidden has 32)"},
		{func(v *valid) Op { v.up.X = v.tensor(F32, 4, 32); return &v.up }, "Order is int32[6], want K elements for each of X's 4 rows"},
		{func(v *valid) Op { v.up.Offsets = v.tensor(I32, 8); return &v.up }, "Offsets is int32[8], want 9 elements (Slots has 8)"},
		{func(v *valid) Op { v.up.Experts = v.tensor(I32, 9); return &v.up }, "Experts is int32[9], want at most 8 elements (Slots has 8)"},
		{func(v *valid) Op { v.up.Slots.DType = I64; return &v.up }, "Slots is int64[8], want uint64"},
		{func(v *valid) Op { v.up.Layout.Tag = ""; return &v.up }, "Layout has no Tag: take it from Backend.ExpertLayout"},
		{func(v *valid) Op { v.up.Layout.DType = I32; return &v.up }, "Layout has type int32, want float32, bfloat16 or float16"},
		{func(v *valid) Op { v.up.Layout.Size = 9000; return &v.up }, "Layout has Size 9000, want a multiple of 256 of at least 9216"},
		{func(v *valid) Op { v.up.Layout.Hidden = 0; return &v.up }, "Layout has Hidden 0 and Intermediate 48, want 1 or more"},
		{func(v *valid) Op { v.up.Out = v.tensor(F32, 3, 48); return &v.up }, "Out is float32[3 48], want 6 rows (Order has 6)"},
		{func(v *valid) Op { v.up.Out.DType = F16; return &v.up }, "Out is float16[6 48], want float32 as X is"},
		{func(v *valid) Op { v.down.X = v.tensor(F32, 3, 48); return &v.down }, "kernels: expert_down: X is float32[3 48], want 6 rows (Order has 6)"},
		{func(v *valid) Op { v.down.Out = v.tensor(F32, 6, 48); return &v.down }, "Out is float32[6 48], want 32 columns (Layout.Hidden has 32)"},
		{func(v *valid) Op { v.up.Runs = v.route.Runs; return &v.up }, "kernels: expert_up: Runs is int32[6 4], want none where not all experts are listed (Experts has 5 of 8)"},
		{func(v *valid) Op { v.listAll(&v.down.ExpertGEMM).Runs = v.tensor(I32, 8, 4); return &v.down }, "kernels: expert_down: Runs is int32[8 4], want [6 4] (8 experts, 6 pairs)"},
		{func(v *valid) Op { v.listAll(&v.up.ExpertGEMM).Runs.Addr = v.up.Out.Addr; return &v.up }, "overlaps Runs"},
		{func(v *valid) Op {
			v.listAll(&v.down.ExpertGEMM).Columns = Columns{0, 48}
			return &v.down
		}, "Runs is int32[6 4], want none for a part of the columns (Columns is [0, 48))"},
		{func(v *valid) Op {
			o := v.listAll(&v.up.ExpertGEMM)
			o.X, o.Order, o.Out, o.Runs = v.tensor(F32, 65, 32), v.tensor(I32, 130), v.tensor(F32, 130, 48), v.tensor(I32, 15, 4)
			return &v.up
		}, "Runs is int32[15 4], want none for more than 64 rows (X has 65)"},
		{func(v *valid) Op {
			o := v.listAll(&v.down.ExpertGEMM)
			o.X, o.Order, o.Out, o.Runs = v.tensor(F32, 513, 48), v.tensor(I32, 513), v.tensor(F32, 513, 32), v.tensor(I32, 39, 4)
			return &v.down
		}, "kernels: expert_down: Runs is int32[39 4], want none for more than 64 pairs per expert (Order has 513, Slots 8)"},
		{func(v *valid) Op { v.up.Columns = Columns{0, 32}; return &v.up }, "Columns is [0, 32), want a part of 48 (Layout.Intermediate) in multiples of 64"},
		{func(v *valid) Op { v.up.Columns = Columns{48, 48}; return &v.up }, "Columns is [48, 48), want a part of 48"},
		{func(v *valid) Op { v.up.Columns = Columns{0, 64}; return &v.up }, "Columns is [0, 64), want a part of 48"},
		{func(v *valid) Op { v.down.Columns = Columns{-64, 48}; return &v.down }, "Columns is [-64, 48), want a part of 48"},
		{func(v *valid) Op {
			v.up.Layout.Intermediate, v.up.Layout.Size, v.up.Columns = 128, 24576, Columns{64, 128}
			return &v.up
		}, "Out is float32[6 48], want 64 columns (Columns has 64)"},
		{func(v *valid) Op { v.ffn.Columns = Columns{0, 48}; return &v.ffn }, "kernels: expert_ffn: Columns is [0, 48), want none"},
		{func(v *valid) Op { v.ffn.First = v.tensor(I32, 4); return &v.ffn }, "First is int32[4], want 5 elements (Experts has 5)"},

		{func(v *valid) Op { v.combine.X = v.tensor(F32, 5, 32); return &v.combine }, "kernels: combine: X is float32[5 32], want 6 rows (Weights is float32[3 2])"},
		{func(v *valid) Op { v.combine.SharedGate = Tensor{}; return &v.combine }, "Shared is float32[3 32] and SharedGate none, want both or none"},
		{func(v *valid) Op { v.combine.SharedGate = v.tensor(F32, 3, 2); return &v.combine }, "SharedGate is float32[3 2], want 1 column"},
		{func(v *valid) Op { v.combine.Out = v.combine.Shared; return &v.combine }, "overlaps Shared"},
		{func(v *valid) Op { v.combine.Shared = v.tensor(F32, 4, 32); return &v.combine }, "Shared is float32[4 32], want 3 rows (Weights has 3)"},

		{func(v *valid) Op { v.combined.X = v.tensor(F32, 5, 32); return &v.combined }, "kernels: combine_norm: X is float32[5 32], want 6 rows (Weights is float32[3 2])"},
		{func(v *valid) Op { v.combined.Shared = Tensor{}; return &v.combined }, "Shared is none and SharedGate float32[3 1], want both or none"},
		{func(v *valid) Op { v.combined.Shared = v.tensor(F32, 3, 31); return &v.combined }, "Shared is float32[3 31], want 32 columns (X has 32)"},
		{func(v *valid) Op { v.combined.Shared = v.tensor(BF16, 3, 32); return &v.combined }, "Shared is bfloat16[3 32], want float32 as X is"},
		{func(v *valid) Op { v.combined.Residual = Tensor{}; return &v.combined }, "Residual is missing, want float32, bfloat16 or float16 of rank 2"},
		{func(v *valid) Op { v.combined.Residual = v.tensor(F32, 2, 32); return &v.combined }, "Residual is float32[2 32], want 3 rows (Weights has 3)"},
		{func(v *valid) Op { v.combined.Residual = v.combined.Shared; return &v.combined }, "overlaps Shared"},
		{func(v *valid) Op { v.combined.Residual.Addr = v.combined.X.Addr; return &v.combined }, "overlaps X"},
		{func(v *valid) Op { v.combined.Weight = v.tensor(F32, 31); return &v.combined }, "Weight is float32[31], want 32 elements (a row of X has 32)"},
		{func(v *valid) Op { v.combined.Bias = v.tensor(F32, 33); return &v.combined }, "Bias is float32[33], want 32 elements"},
		{func(v *valid) Op { v.combined.Kind = 2; return &v.combined }, "Kind is 2, want RMS (0) or Layer (1)"},
		{func(v *valid) Op { v.combined.Eps = nan; return &v.combined }, "Eps is NaN, want 0 or more"},
		{func(v *valid) Op { v.combined.Out = v.tensor(F32, 3, 31); return &v.combined }, "Out is float32[3 31], want 32 columns (X has 32)"},
		{func(v *valid) Op { v.combined.Out = v.combined.Residual; return &v.combined }, "overlaps Residual"},

		{func(v *valid) Op { v.silu.Up = v.tensor(F32, 3, 32); return &v.silu }, "kernels: silu_mul: Up is float32[3 32], want the shape [3 48] of Gate"},
		{func(v *valid) Op { v.silu.Out.Addr = v.silu.Up.Addr + 4; return &v.silu }, "overlaps Up"},

		{func(v *valid) Op { v.gather.Out = v.tensor(F32, 3, 32); return &v.gather }, "kernels: gather: Out is float32[3 32], want 2 rows (Rows has 2)"},

		{func(v *valid) Op { v.words.Dst = v.tensor(I32, 15); return &v.words }, "kernels: copy: Dst is int32[15], want the shape [3 5] of Src"},
		{func(v *valid) Op { v.words.Dst.DType = F32; return &v.words }, "Dst is float32[3 5], want int32 as Src is"},
		{func(v *valid) Op { v.words.Dst = gap(v.words.Dst); return &v.words }, "want it dense"},
		{func(v *valid) Op { v.words.Dst.Addr = v.words.Src.Addr + 8; return &v.words }, "overlaps Src"},
		{func(v *valid) Op {
			v.words = Copy{Src: v.tensor(BF16, 3), Dst: v.tensor(BF16, 3)}
			return &v.words
		}, "6 bytes from"},
		{func(v *valid) Op {
			v.words = Copy{Src: v.tensor(BF16, 4), Dst: v.tensor(BF16, 4)}
			v.words.Dst.Addr += 2
			return &v.words
		}, "want multiples of 4"},
		{func(v *valid) Op {
			v.words = Copy{Src: v.tensor(I64, 1<<29+1), Dst: v.tensor(I64, 1<<29+1)}
			return &v.words
		}, "want at most 4294967296"},
		{func(v *valid) Op { v.words.Src2 = v.tensor(I32, 4); return &v.words }, "kernels: copy: Dst2 is missing"},
		{func(v *valid) Op { v.words.Dst2 = v.tensor(I32, 4); return &v.words }, "kernels: copy: Src2 is missing"},
		{func(v *valid) Op {
			v.words.Src2, v.words.Dst2 = v.tensor(I32, 4), v.tensor(I32, 5)
			return &v.words
		}, "Dst2 is int32[5], want the shape [4] of Src2"},
		{func(v *valid) Op {
			v.words.Src2, v.words.Dst2 = v.tensor(I32, 4), v.tensor(I32, 4)
			v.words.Dst2.Addr = v.words.Dst.Addr + 56
			return &v.words
		}, "overlaps Dst"},
		{func(v *valid) Op {
			v.words.Src2, v.words.Dst2 = v.tensor(I32, 4), v.tensor(I32, 4)
			v.words.Dst2.Addr = v.words.Src.Addr
			return &v.words
		}, "Dst2"},
		{func(v *valid) Op {
			v.words.Src2, v.words.Dst2 = v.tensor(I32, 4), v.tensor(I32, 4)
			v.words.Src2.Addr = v.words.Dst.Addr
			return &v.words
		}, "overlaps Src2"},
		{func(v *valid) Op { v.copied.Src.DType = I64; return &v.copied }, "kernels: copy_blocks: Src is int64[3], want uint64"},
		{func(v *valid) Op { v.copied.Dst = v.tensor(U64, 2); return &v.copied }, "Dst is uint64[2], want 3 elements (Src has 3)"},
		{func(v *valid) Op {
			v.copied.Src, v.copied.Dst = v.tensor(U64, 1<<30+1), v.tensor(U64, 1<<30+1)
			return &v.copied
		}, "want at most 1073741824 blocks"},
		{func(v *valid) Op { v.added.Dst = v.tensor(U64, 2); return &v.added }, "kernels: add_rows: Dst is uint64[2], want 3 elements (Src has 3)"},
		{func(v *valid) Op { v.added.DType = I32; return &v.added }, "DType is int32, want float32, bfloat16 or float16"},
		{func(v *valid) Op { v.added.DType = 99; return &v.added }, "DType is unknown type 99, want float32"},
		{func(v *valid) Op { v.added.Columns = 12; return &v.added }, "Columns is 12 of bfloat16, want a multiple of 16 bytes"},
		{func(v *valid) Op {
			v.added.Src, v.added.Dst = v.tensor(U64, 1<<30+1), v.tensor(U64, 1<<30+1)
			return &v.added
		}, "want at most 1073741824 rows"},
		{func(v *valid) Op { v.copied.BlockBytes = 0; return &v.copied }, "BlockBytes is 0, want a multiple of 16 of at most 17179869184"},
		{func(v *valid) Op { v.copied.BlockBytes = 4104; return &v.copied }, "BlockBytes is 4104, want a multiple of 16"},
		{func(v *valid) Op { v.copied.BlockBytes = 1<<34 + 16; return &v.copied }, "want a multiple of 16 of at most"},
		{func(v *valid) Op { v.copied.ThreadBlocks = -1; return &v.copied }, "ThreadBlocks is -1, want 0 (one per multiprocessor) or more"},

		{func(v *valid) Op { v.sample.Logits = v.tensor(F32, 2, 0); return &v.sample }, "kernels: sample: Logits is float32[2 0], want at least one column"},
		{func(v *valid) Op { v.sample.Seeds = v.tensor(U64, 1); return &v.sample }, "Seeds is uint64[1], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.sample.Out = v.tensor(I32, 3); return &v.sample }, "Out is int32[3], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.sample.TopK = v.tensor(F32, 2); return &v.sample }, "kernels: sample: TopK is float32[2], want int32"},
		{func(v *valid) Op { v.sample.TopP = v.tensor(F32, 3); return &v.sample }, "TopP is float32[3], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.sample.MinP = v.tensor(F32, 2, 1); return &v.sample }, "MinP is float32[2 1], want rank 1"},
		{func(v *valid) Op { v.sample.Out = v.sample.TopK; return &v.sample }, "overlaps TopK"},

		{func(v *valid) Op { v.adjust.Logits.DType = F16; return &v.adjust }, "kernels: adjust: Logits is float16[2 100], want float32"},
		{func(v *valid) Op { v.adjust.Starts = v.tensor(I32, 2); return &v.adjust }, "Starts is int32[2], want 3 elements (Logits has 2 rows)"},
		{func(v *valid) Op { v.adjust.Seen = v.tensor(I32, 4); return &v.adjust }, "Seen is int32[4], want 5 elements (IDs has 5)"},
		{func(v *valid) Op { v.adjust.Bias = v.tensor(F32, 6); return &v.adjust }, "Bias is float32[6], want 5 elements (IDs has 5)"},
		{func(v *valid) Op { v.adjust.Repetition = Tensor{}; return &v.adjust }, "Repetition is missing, want float32 of rank 1"},
		{func(v *valid) Op { v.adjust.Presence = v.tensor(F32, 3); return &v.adjust }, "Presence is float32[3], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.adjust.Frequency = v.tensor(F32, 1); return &v.adjust }, "Frequency is float32[1], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.adjust.Saved = v.tensor(F32, 4); return &v.adjust }, "Saved is float32[4], want 5 elements (IDs has 5)"},
		{func(v *valid) Op { v.adjust.Saved.Addr = v.adjust.Logits.Addr; return &v.adjust }, "overlaps Logits"},
		{func(v *valid) Op { v.adjust.Saved.Addr = v.adjust.Bias.Addr; return &v.adjust }, "overlaps Bias"},
		{func(v *valid) Op { v.restore.Starts = v.tensor(I32, 4); return &v.restore }, "kernels: restore: Starts is int32[4], want 3 elements"},
		{func(v *valid) Op { v.restore.Saved = v.tensor(F32, 6); return &v.restore }, "Saved is float32[6], want 5 elements (IDs has 5)"},
		{func(v *valid) Op { v.restore.Saved.Addr = v.restore.Logits.Addr; return &v.restore }, "overlaps Saved"},

		{func(v *valid) Op { v.mask.Rows = v.tensor(I32, 2); return &v.mask }, "kernels: mask: Allowed is int32[1 4], want 2 rows (Rows has 2)"},
		{func(v *valid) Op { v.mask.Allowed = v.tensor(I32, 1, 3); return &v.mask }, "Allowed is int32[1 3], want 4 columns (Logits has 100)"},
		{func(v *valid) Op { v.mask.Allowed.Addr = v.mask.Logits.Addr; return &v.mask }, "overlaps Logits"},

		{func(v *valid) Op { v.probs.Logits = v.tensor(F32, 2, 0); return &v.probs }, "kernels: log_probs: Logits is float32[2 0], want at least one column"},
		{func(v *valid) Op { v.probs.Tokens = v.tensor(I32, 3); return &v.probs }, "Tokens is int32[3], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.probs.Sampled.Addr = v.probs.Logits.Addr; return &v.probs }, "overlaps Logits"},
		{func(v *valid) Op { v.probs.Ranks = v.tensor(I32, 3); return &v.probs }, "Ranks is int32[3], want 2 elements (Logits has 2)"},
		{func(v *valid) Op { v.probs.Top = Tensor{}; return &v.probs }, "TopIDs is int32[2 7] and Top none, want both or none"},
		{func(v *valid) Op { v.probs.TopIDs = v.tensor(I32, 2, 101); return &v.probs }, "TopIDs is int32[2 101], want at most 100 columns (Logits has 100)"},
		{func(v *valid) Op { v.probs.TopIDs = gap(v.probs.TopIDs); return &v.probs }, "TopIDs is int32[2 7] strides [8 1], want it dense"},
		{func(v *valid) Op { v.probs.Top = v.tensor(F32, 2, 6); return &v.probs }, "Top is float32[2 6], want 7 columns (TopIDs has 7)"},
		{func(v *valid) Op { v.probs.Top.Addr = v.probs.Logits.Addr + 4; return &v.probs }, "overlaps Logits"},
	} {
		op := c.spoil(newValid())
		if err := op.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s gives\n\t%v, want\n\t%s", op.Name(), err, c.want)
		}
	}
}

func TestCheckWithoutTensors(t *testing.T) {
	for _, op := range []Op{
		&Embed{}, &Norm{}, &MatMul{}, &GatedMatMul{}, &Clamp{}, &RoPE{}, &AppendKV{}, &RoPEAppendKV{}, &Attention{}, &RoPEAttention{}, &Route{}, &RouterGateUp{}, &RouteDown{}, &RouteExpertUp{}, &SortByExpert{},
		&ExpertUp{}, &ExpertDown{}, &Combine{}, &CombineNorm{}, &SiluMul{}, &Gather{}, &CopyBlocks{}, &AddRows{}, &ExpertFFN{}, &Copy{}, &Sample{}, &Adjust{}, &Restore{}, &Mask{}, &LogProbs{},
	} {
		if err := op.Check(); err == nil || !strings.HasPrefix(err.Error(), "kernels: "+op.Name()+": ") || !strings.Contains(err.Error(), " is missing, want ") {
			t.Errorf("%s without tensors gives %v", op.Name(), err)
		}
	}
}

func TestDeclare(t *testing.T) {
	v, withRuns := newValid(), newValid()
	withRuns.listAll(&withRuns.up.ExpertGEMM)
	for _, c := range []struct {
		op            Op
		flops, bytes  int64
		reads, writes int
	}{
		{&v.embed, 0, 3*4 + 3*32*2 + 3*32*4, 2, 1},
		{&v.norm, 8 * 96, 4*96*4 + 2*32*2, 4, 2},
		{&v.gated, 2*2*32*8 + 5*2*4, 2*32*2 + 8*32*2 + 2*8*2, 2, 1},
		{&v.matmul, 2 * 2 * 32 * 8, 2*32*2 + 8*32*2 + 8*2 + 2*8*4, 3, 1},
		{&v.clamp, 2 * 96, 2 * 96 * 4, 1, 1},
		{&v.rope, 3 * (3*4*16 + 3*2*16), 2*4*(3*4*16+3*2*16) + 3*16*4 + 3*4, 4, 2},
		{&v.append, 0, 4*3*2*16*4 + 3*4, 3, 0},
		{&v.ropeKV, (3 + 8) * (3*4*16 + 3*2*16), 2*4*3*4*16 + 4*3*2*16*4 + 16*2 + 16*4 + 3*16*4 + 2*3*4, 8, 1},
		// Two sequences of 60 tokens, of whose rows the average sees 60.
		{
			&v.together, (3+8)*(3*4*16+3*2*16) + 4*3*4*16*60,
			3*4*16*4 + 4*3*2*16*4 + 16*2 + 16*4 + 3*16*4 + 2*3*4 + 3*4*16*4 + 3*4 + 2*4 + 2*4*4 + 2*2*60*2*16*4, 12, 2,
		},
		{&v.attention, 4 * 3 * 4 * 16 * 60, 2*3*4*16*4 + 3*4 + 2*4 + 2*4*4 + 2*2*60*2*16*4, 4, 1},
		{&v.route, 3 * 8 * 6, 3*8*4 + 2*3*2*4 + 2*8*8 + 9*4 + 6*4 + 6*4*4, 2, 6},
		{&v.router, 2*2*2*32*8 + 5*2*4, 2*32*2 + 2*8*32*2 + 8*2 + 2*8*4 + 2*8*2, 5, 2},
		{&v.routeDown, 3*8*6 + 2*2*32*8, 3*8*4 + 2*3*2*4 + 2*8*8 + 9*4 + 6*4 + 6*4*4 + 2*32*2 + 8*32*2 + 8*2 + 2*8*4, 5, 7},
		{&v.group, 0, 6*4 + 9*4 + 6*4, 1, 2},
		// 5 of 8 experts are listed: 4 of the 6 pairs are theirs.
		{&v.up, 2 * 2 * 32 * 48 * 4, 9*4 + 6*4 + 8*8 + 5*4 + 5*2*32*48*2 + 4*(32+48)*4, 4, 0},
		{&withRuns.up, 2 * 2 * 32 * 48 * 6, 9*4 + 6*4 + 8*8 + 8*4 + 6*4*4 + 6*2*32*48*2 + 6*(32+48)*4, 5, 0},
		{&v.down, 2 * 32 * 48 * 4, 9*4 + 6*4 + 8*8 + 5*4 + 5*32*48*2 + 4*(32+48)*4, 4, 0},
		{&v.ffn, 3 * 2 * 32 * 48 * 4, 9*4 + 6*4 + 8*8 + 2*5*4 + 5*3*32*48*2 + 4*(32+48)*4, 5, 0},
		{&v.combine, 2 * (6*32 + 3*32), 6*32*4 + 6*4 + 3*32*4 + 3*4 + 3*32*4, 4, 1},
		{&v.combined, 2*(6*32+3*32) + 8*3*32, 6*32*4 + 6*4 + 3*32*4 + 3*4 + 3*3*32*4 + 2*32*2, 7, 2},
		{&v.silu, 5 * 3 * 48, 3 * 3 * 48 * 4, 2, 1},
		{&v.gather, 0, 2*4 + 2*2*32*4, 1, 1},
		{&v.copied, 0, 2*3*8 + 2*3*4096, 2, 0},
		{&v.added, 3 * 32, 2*3*8 + 3*3*32*2, 2, 0},
		{&v.sample, 40 * 200, 200*4 + 2*(4+8+4+4+4) + 2*3*4, 8, 1},
		{&v.adjust, 5 * 5, 2*5*4 + 3*4 + 3*5*4 + 3*2*4 + 5*4, 8, 2},
		{&v.restore, 0, 2*5*4 + 3*4 + 2*5*4, 4, 1},
		{&v.mask, 0, 100*4 + 4 + 4*4, 3, 1},
		{&v.probs, 20 * 200, 200*4 + 2*4 + 2*4 + 2*2*7*4 + 2*4, 2, 4},
	} {
		var d Decl
		c.op.Declare(&d)
		if d.Flops != c.flops || d.Bytes != c.bytes || len(d.Reads) != c.reads || len(d.Writes) != c.writes {
			t.Errorf("%s declares %d flops, %d bytes, %d reads and %d writes, want %d, %d, %d and %d",
				c.op.Name(), d.Flops, d.Bytes, len(d.Reads), len(d.Writes), c.flops, c.bytes, c.reads, c.writes)
		}
		n := testing.AllocsPerRun(10, func() {
			if err := c.op.Check(); err != nil {
				t.Error(err)
			}
			d.Reset()
			c.op.Declare(&d)
		})
		if n != 0 {
			t.Errorf("%s: Check and Declare allocate %g times, want 0", c.op.Name(), n)
		}
	}
}

// TestDeclareStored: sequences cost what they have, not what the longest has.
func TestDeclareStored(t *testing.T) {
	v := newValid()
	var longest, d Decl
	v.attention.Declare(&longest)
	v.attention.CachedTokens, v.attention.AttendedTokens = 5, 4
	v.attention.Declare(&d)
	if want := int64(4 * 4 * 16 * 4); d.Flops != want {
		t.Errorf("%d flops, want %d", d.Flops, want)
	}
	if want := int64(2*3*4*16*4 + 3*4 + 2*4 + 2*4*4 + 2*5*2*16*4); d.Bytes != want || d.Bytes >= longest.Bytes {
		t.Errorf("%d bytes, want %d, less than %d", d.Bytes, want, longest.Bytes)
	}
}

// TestDeclareWindow holds a window's attention to what it can see.
func TestDeclareWindow(t *testing.T) {
	v := newValid()
	v.attention.Window = 10
	var d Decl
	v.attention.Declare(&d)
	if want := int64(4 * 3 * 4 * 16 * 10); d.Flops != want {
		t.Errorf("%d flops, want %d", d.Flops, want)
	}
	if want := int64(2*3*4*16*4 + 3*4 + 2*4 + 2*4*4 + 2*2*11*2*16*4); d.Bytes != want { // 2 rows see 11 tokens
		t.Errorf("%d bytes, want %d", d.Bytes, want)
	}
}
