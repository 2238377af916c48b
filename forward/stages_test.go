package forward

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/modelstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sequence is a prompt with its blocks.
type sequence struct {
	ids    []int32
	blocks []int32
}

func sequences(vocab int) []sequence {
	var all []sequence
	for i, n := range []int{37, 5, 64, 1} {
		s := sequence{blocks: []int32{int32(4 * i), int32(4*i + 2), int32(4*i + 1), int32(4*i + 3)}}
		for j := range n {
			s.ids = append(s.ids, int32((31*i+17*j+5)%vocab))
		}
		all = append(all, s)
	}
	return all
}

// part of a sequence, in a micro-batch.
type part struct{ seq, from, to int }

// runGroups runs groups of micro-batches and returns, for each sequence and row,
// its logits and the token drawn from them. Of draw, seed and position are the
// sequence's and the row's.
func runGroups(r *rig, seqs []sequence, draw SamplingParams, groups [][][]part) (logits [][]float32, tokens [][]int32) {
	r.t.Helper()
	vocab := r.model.Config.Vocab
	logits, tokens = make([][]float32, len(seqs)), make([][]int32, len(seqs))
	for i, s := range seqs {
		logits[i], tokens[i] = make([]float32, len(s.ids)*vocab), make([]int32, len(s.ids))
	}
	for _, group := range groups {
		var host []*HostBatch
		rows := 0
		for _, batch := range group {
			h := NewHostBatch(r.model.Config, r.model.Limits)
			h.Reset(rows, rows, 0)
			for _, p := range batch {
				s := seqs[p.seq]
				first, err := h.Append(&Sequence{
					IDs: s.ids[p.from:p.to], Start: p.from, Blocks: s.blocks,
					Long: r.long(len(s.ids)),
				})
				check(r.t, err)
				for i := range p.to - p.from {
					draw.Seed, draw.Position = uint64(p.seq), int32(p.from+i+1)
					_, err := h.Sample(first+i, &draw)
					check(r.t, err)
				}
			}
			rows += h.Rows()
			host = append(host, &h)
		}
		batches := r.step(host...)
		for i, batch := range group {
			f, drawn := r.floats(r.model.Logits(batches[i].Sampling.Span)), r.download(r.model.Sampled(batches[i].Sampling.Span))
			for _, p := range batch {
				n := p.to - p.from
				copy(logits[p.seq][p.from*vocab:], f[:n*vocab])
				f = f[n*vocab:]
				for j := range n {
					tokens[p.seq][p.from+j] = int32(binary.LittleEndian.Uint32(drawn[4*j:]))
				}
				drawn = drawn[4*n:]
			}
		}
	}
	return logits, tokens
}

// A row's result does not depend on micro-batches, chunks, or other rows.
func TestGroups(t *testing.T) {
	for _, name := range []string{"mixtral_window", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe_clip"} {
		t.Run(name, func(t *testing.T) {
			c, src, _ := fixture(t, name)
			r := newRig(t, c, src)
			seqs := sequences(c.Vocab)
			alone := [][][]part{{{{0, 0, 37}}}, {{{1, 0, 5}}}, {{{2, 0, 64}}}, {{{3, 0, 1}}}}
			draw := SamplingParams{
				Temperature: 2, TopK: 50, TopP: 0.9, MinP: 0.01, RepetitionPenalty: 1.3, PresencePenalty: 0.2, FrequencyPenalty: 0.1, LogProbs: true,
				Adjust: []TokenAdjust{{ID: 7, Seen: -1, Bias: 2}, {ID: 1, Seen: 3}, {ID: 30, Seen: 0, Bias: -1}},
			}
			want, wantTokens := runGroups(r, seqs, draw, alone)
			for _, groups := range [][][][]part{
				{{{{0, 0, 37}, {1, 0, 5}, {2, 0, 64}, {3, 0, 1}}}},     // one micro-batch
				{{{{2, 0, 64}, {3, 0, 1}}, {{0, 0, 37}}, {{1, 0, 5}}}}, // three
				{ // chunks, mixed with others
					{{{0, 0, 16}, {1, 0, 4}}, {{2, 0, 33}}},
					{{{2, 33, 64}}, {{0, 16, 17}, {1, 4, 5}}},
					{{{0, 17, 37}, {3, 0, 1}}},
				},
			} {
				got, tokens := runGroups(r, seqs, draw, groups)
				for i := range seqs {
					if !slices.Equal(got[i], want[i]) || !slices.Equal(tokens[i], wantTokens[i]) {
						t.Errorf("sequence %d differs with groups %v", i, groups)
					}
				}
			}
		})
	}
}

// Attend leaves the cache and the attention that Project, Append and Compute do in other
// buffers, and in fewer operations.
func TestAppendedApart(t *testing.T) {
	for _, x := range []struct {
		name       string
		clip       float32
		ops, apart int // of Attend, of the others
	}{
		{"mixtral", 0, 3, 5},
		{"qwen3_moe", 0, 3, 7},
		{"qwen3_moe", 1, 6, 8}, // norms, then what clips them, then the rotation
		{"olmoe_clip", 0, 6, 8},
	} {
		c, src, _ := fixture(t, x.name)
		if x.clip > 0 {
			c.ClipQKV = x.clip
		}
		r := newRig(t, c, src)
		m, on := r.model, &counting{Backend: r.backend}
		m.backend = on
		h := NewHostBatch(c, m.Limits)
		ids := make([]int32, 20)
		for i := range ids {
			ids[i] = int32(7*i%c.Vocab + 1)
		}
		_, err := h.Append(&Sequence{IDs: ids, Blocks: []int32{3, 1}})
		check(t, err)
		data := make([]byte, StepUploadBytes(m.Limits, 1))
		up := r.alloc(device.HBM(0), int64(len(data)))
		b, n, err := h.Pack(data, up.Range(0, 1).Addr)
		check(t, err)
		check(t, r.upload(up.Range(0, n), data[:n]))

		// Keys and values, of which nothing is set but what is appended.
		cache := func() (kernels.Tensor, *views) {
			zeros := make([]byte, 4*2*4*m.Limits.BlockTokens*c.KVHeads*c.HeadDim)
			all := r.tensor(zeros, kernels.F32, 2*4, m.Limits.BlockTokens, c.KVHeads, c.HeadDim)
			return all, &views{k: []kernels.Tensor{all.Slice(0, 4)}, v: []kernels.Tensor{all.Slice(4, 8)}}
		}
		buffers := m.Buffers(&b)
		all, kv := cache()
		here := m.Attention(kv)
		check(t, m.Embed(r.stream, &b))
		on.ops = 0
		check(t, m.Attend(r.stream, 0, &b, here))
		ops, want := on.ops, r.download(buffers.Output)

		// Its buffers have other rows before these.
		const before = 3
		allToo, kv := cache()
		room := r.alloc(device.HBM(0), NewAttentionBuffers(&c.Attention, kernels.F32, before+b.Rows, 0).Bytes())
		there := NewAttention(&c.Attention, on, kv, NewAttentionBuffers(&c.Attention, kernels.F32, before+b.Rows, room.Range(0, 1).Addr))
		rows := Span{First: before, Rows: b.Rows}
		at := there.Buffers().Rows(rows)
		on.ops = 0
		check(t, m.Project(r.stream, 0, &b))
		check(t, r.stream.Copy(at.QKV.Range(), buffers.QKV.Range()))
		check(t, there.Append(r.stream, 0, rows, &b.Attention))
		check(t, there.Compute(r.stream, 0, rows, &b.Attention))
		if ops != x.ops || on.ops != x.apart {
			t.Errorf("%s, clip %g: %d operations, %d apart, want %d and %d", x.name, x.clip, ops, on.ops, x.ops, x.apart)
		}
		if !slices.Equal(r.download(at.Output), want) {
			t.Errorf("%s, clip %g: attention differs", x.name, x.clip)
		}
		if cached := r.download(all); !slices.Equal(r.download(allToo), cached) || !slices.ContainsFunc(cached, func(b byte) bool { return b != 0 }) {
			t.Errorf("%s, clip %g: caches differ", x.name, x.clip)
		}
	}
}

// counting is a backend that counts operations.
type counting struct {
	kernels.Backend
	ops int
}

func (c *counting) Enqueue(s device.Stream, op kernels.Op) error {
	c.ops++
	return c.Backend.Enqueue(s, op)
}

// The counts, the routing and the grouping tell the same.
func TestCounts(t *testing.T) {
	c, src, _ := fixture(t, "qwen2_moe")
	r := newRig(t, c, src)
	seqs := sequences(c.Vocab)
	rows := 0
	for round := range 2 {
		runGroups(r, seqs, SamplingParams{}, [][][]part{{{{0, 0, 37}, {1, 0, 5}}, {{2, 0, 64}}}})
		rows += 37 + 5 + 64
		data := r.download(r.model.Counts())
		for layer, dense := range c.Dense {
			sum := 0
			for e := range c.Experts {
				n := int(binary.LittleEndian.Uint64(data[8*(layer*c.Experts+e):]))
				sum += n
			}
			want := rows * c.TopK
			if dense {
				want = 0
			}
			if sum != want {
				t.Errorf("round %d, layer %d: %d choices, want %d", round, layer, sum, want)
			}
		}
	}
	ids, weights := r.model.Routing(106)
	chosen := make([]int, c.Experts)
	for i, raw := 0, r.download(ids); i < len(raw); i += 4 {
		chosen[binary.LittleEndian.Uint32(raw[i:])]++
	}
	offsets := r.download(r.model.ws.routing.offsets)
	for e := range c.Experts {
		if n := int(binary.LittleEndian.Uint32(offsets[4*e+4:]) - binary.LittleEndian.Uint32(offsets[4*e:])); n != chosen[e] {
			t.Errorf("expert %d: %d pairs, chosen %d times", e, n, chosen[e])
		}
	}
	for _, w := range r.floats(weights) {
		if !(w > 0 && w < 1) {
			t.Fatalf("weight %g", w)
		}
	}
}

// Hidden states of dummy weights neither vanish nor explode, and routing is as
// skewed as asked.
func TestDummyModel(t *testing.T) {
	for _, kind := range modelstest.Kinds {
		var even float64
		for _, skew := range []float64{0, 1.5} {
			c := mustParse(t, kind, map[string]any{"num_hidden_layers": 6, "vocab_size": 300})
			if skew > 0 {
				var err error
				c, err = c.WithRoutingSkew(skew)
				check(t, err)
			}
			r := newRig(t, c, models.NewDummy(c, 3))
			seqs := sequences(c.Vocab)
			logits, tokens := runGroups(r, seqs, SamplingParams{}, [][][]part{{{{0, 0, 37}, {1, 0, 5}, {2, 0, 64}}}})
			if d := deviation(logits[2]); !(d > 0.1 && d < 10) {
				t.Errorf("%s: logits have a deviation of %g", kind, d)
			}
			if d := deviation(r.floats(r.model.ws.residual.Slice(0, 106))); !(d > 0.1 && d < 100) {
				t.Errorf("%s: hidden states have a deviation of %g", kind, d)
			}
			if slices.Max(tokens[2]) == slices.Min(tokens[2]) {
				t.Errorf("%s: every token drawn is %d", kind, tokens[2][0])
			}
			data := r.download(r.model.Counts())
			share := 0.0 // of the most popular expert, mean over layers
			for layer := range c.Layers {
				most := 0
				for e := range c.Experts {
					most = max(most, int(binary.LittleEndian.Uint64(data[8*(layer*c.Experts+e):])))
				}
				share += float64(most) / 106 / float64(c.Layers)
			}
			// Two of eight are chosen. With the skew, the first is to be preferred
			// about every other time.
			t.Logf("%s with skew %g: the most popular expert is chosen by %.2f of the rows", kind, skew, share)
			if skew == 0 {
				even = share
			} else if share < even+0.1 || share < 0.6 {
				t.Errorf("%s: the most popular expert is chosen by %.2f of the rows, %.2f without skew", kind, share, even)
			}
		}
	}
}

func deviation(x []float32) float64 {
	var sum, squares float64
	for _, f := range x {
		sum += float64(f)
		squares += float64(f) * float64(f)
	}
	n := float64(len(x))
	return math.Sqrt(squares/n - sum/n*sum/n)
}

// The table has, in each variant, the rotation of every position.
func TestConstants(t *testing.T) {
	c := mustParse(t, "phimoe", map[string]any{"rope_scaling": modelstest.With(modelstest.With(modelstest.LongRoPE, "short_mscale", 1.25), "long_mscale", 1.5)})
	src := models.NewDummy(c, 0)
	r := newRig(t, c, src)
	table := r.floats(r.model.ws.rope)
	d := c.HeadDim
	for _, long := range []bool{false, true} {
		for _, position := range []int{0, 1, 63, 64, 255} {
			row := table[int(ropeRow(c, &r.model.Limits, position, long))*d:][:d]
			for i := range d / 2 {
				factor, scale := 1.0, 1.25
				if long {
					factor, scale = float64(i+1), 1.5
				}
				angle := float64(position) / (factor * math.Pow(1e4, float64(2*i)/float64(d)))
				if math.Abs(float64(row[i])-scale*math.Cos(angle)) > 1e-4 || math.Abs(float64(row[d/2+i])-scale*math.Sin(angle)) > 1e-4 {
					t.Errorf("position %d, long %v, pair %d: %g, %g", position, long, i, row[i], row[d/2+i])
				}
			}
		}
	}
	for i, b := range r.download(r.model.Counts()) {
		if b != 0 {
			t.Fatalf("byte %d of the counts is %d", i, b)
		}
	}
}

func TestAppendErrors(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	limits := Limits{MaxTokens: 64, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 40, BlockTokens: 16}
	for _, x := range []struct {
		q    Sequence
		want string
	}{
		{Sequence{}, "sequence of 0 tokens from"},
		{Sequence{IDs: []int32{1}, Start: -1}, "from position -1"},
		{Sequence{IDs: make([]int32, 41), Blocks: make([]int32, 3)}, "sequence of 41 tokens exceeds the maximum of 40"},
		{Sequence{IDs: make([]int32, 17), Blocks: make([]int32, 1)}, "1 blocks of 16 tokens are too few for a sequence of 17"},
		{Sequence{IDs: []int32{512}, Blocks: make([]int32, 1)}, "token id 512 is outside the model's vocabulary of 512"},
		{Sequence{IDs: []int32{-1}, Blocks: make([]int32, 1)}, "token id -1"},
	} {
		h := NewHostBatch(c, limits)
		if _, err := h.Append(&x.q); err == nil || !strings.Contains(err.Error(), x.want) || h.Rows() != 0 {
			t.Errorf("%v: %v", x.q, err)
		}
	}
}

func TestPackErrors(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	limits := Limits{MaxTokens: 64, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 40, BlockTokens: 16}
	h := NewHostBatch(c, limits)
	dst := make([]byte, StepUploadBytes(limits, 1))
	if _, _, err := h.Pack(dst, 256); err == nil {
		t.Error("an empty batch is packed")
	}
	_, err := h.Append(&Sequence{IDs: []int32{1, 2}, Blocks: []int32{0}})
	check(t, err)
	_, err = h.Sample(2, &SamplingParams{})
	check(t, err)
	if _, _, err := h.Pack(dst, 256); err == nil || !strings.Contains(err.Error(), "logits of row 2 of 2") {
		t.Errorf("logits of a row that there is not: %v", err)
	}
	h.Reset(0, 0, 0)
	_, err = h.Append(&Sequence{IDs: []int32{1, 2}, Blocks: []int32{0}})
	check(t, err)
	if _, _, err := h.Pack(dst[:256], 256); err == nil || !strings.Contains(err.Error(), "upload buffer of 256") {
		t.Errorf("too little room: %v", err)
	}
	b, n, err := h.Pack(dst, 256)
	check(t, err)
	if n > int64(len(dst)) || b.Rows != 2 || b.Attention.Seqs != 1 || b.Attention.MaxContext != 2 || !b.Sampling.Seeds.None() {
		t.Errorf("%+v, %d bytes", b, n)
	}
}

func TestLimits(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	r := newRig(t, c, models.NewDummy(c, 0))
	good := Limits{MaxTokens: 8, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 32, BlockTokens: 16, MaxAdjust: 3}
	need := WorkspaceBytes(c, r.backend, good)
	ws := r.alloc(device.HBM(0), need+256)
	for _, x := range []struct {
		limits Limits
		ws     device.Range
		want   string
	}{
		{Limits{MaxTokens: 8, MaxSeqs: 2, MaxModelLen: 32, BlockTokens: 16}, ws.Range(0, need), "limit MaxLogits is 0"},
		{Limits{MaxTokens: 8, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 512, BlockTokens: 16}, ws.Range(0, need), "512 tokens exceeds the model's maximum of 256"},
		{Limits{MaxTokens: 8, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 32, BlockTokens: 16, MaxAdjust: -1}, ws.Range(0, need), "limits MaxAdjust -1"},
		{Limits{MaxTokens: 8, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 32, BlockTokens: 16, MaxTopLogProbs: -1}, ws.Range(0, need), "MaxTopLogProbs -1"},
		{good, ws.Range(0, need-256), "need "},
		{good, ws.Range(4, need), "not aligned"},
	} {
		if _, err := NewModel(c, r.model.Weights, r.backend, x.ws, x.limits); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v", x.limits, err)
		}
	}
	m, err := NewModel(c, r.model.Weights, r.backend, ws.Range(0, need), good)
	check(t, err)
	rows := Span{Rows: 3}
	for _, x := range []struct {
		b    Batch
		want string
	}{
		{Batch{}, "tokens [0, 0)"},
		{Batch{Span: Span{First: 4, Rows: 5}}, "tokens [4, 9) in a step of at most 8"},
		{Batch{Span: rows, Attention: AttentionMetadata{Seqs: 3}}, "3 sequences exceeds the maximum of 2"},
		{Batch{Span: rows, Sampling: SamplingMetadata{Span: Span{First: 1, Rows: 2}}}, "logit rows [1, 3)"},
		{Batch{Span: rows, Attention: AttentionMetadata{MaxContext: 33}}, "33 tokens exceeds the maximum of 32"},
		{Batch{Span: rows, Sampling: SamplingMetadata{Adjust: AdjustMetadata{IDs: kernels.New(256, kernels.I32, 4)}}}, "4 adjusted tokens exceed the maximum of 3"},
		{Batch{Span: rows, Sampling: SamplingMetadata{LogProbs: true}}, "but the limit MaxTopLogProbs is 0"},
	} {
		if err := m.Embed(r.stream, &x.b); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v", x.b, err)
		}
	}
}

// checking is a backend that checks operations and runs none.
type checking struct {
	kernels.Backend
	// routedUps are those that route and compute gate/up of what they select.
	ops, routedUps int
	// names are those of the operations, where they are to be listed.
	list  bool
	names []string
}

func (c *checking) Enqueue(_ device.Stream, op kernels.Op) error {
	c.ops++
	if _, ok := op.(*kernels.RouteExpertUp); ok {
		c.routedUps++
	}
	if c.list {
		c.names = append(c.names, op.Name())
	}
	return op.Check()
}

func (c *checking) ActivationDType() kernels.DType { return kernels.BF16 }

// An MoE layer's Combine norms for the layer behind it, of whatever kind, whose Project
// then does not; nobody norms twice, and the last layer leaves it to Head.
func TestCombineNorms(t *testing.T) {
	c, src, _ := fixture(t, "qwen2_moe_sparse_step")
	l, err := models.NewLayout(c, src, nil)
	check(t, err)
	b := &checking{list: true}
	limits := Limits{MaxTokens: 4, MaxSeqs: 1, MaxLogits: 1, MaxModelLen: 16, BlockTokens: 16}
	m, err := NewModel(c, l.Bind(1<<20), b, device.Range{Addr: 1 << 30, Bytes: WorkspaceBytes(c, b, limits)}, limits)
	check(t, err)
	batch := Batch{Span: Span{Rows: 4}, RopeRows: kernels.New(1<<43, kernels.I32, 4)}
	ops := func(run error) string {
		check(t, run)
		defer func() { b.names = nil }()
		return strings.Join(b.names, " ")
	}
	behind := map[bool]int{}
	for layer, dense := range c.Dense {
		want := "norm matmul rope"
		if layer > 0 {
			behind[c.Dense[layer-1]]++
			if !c.Dense[layer-1] {
				want = "matmul rope"
			}
		}
		if got := ops(m.Project(nil, layer, &batch)); got != want {
			t.Errorf("layer %d: Project enqueues %q, want %q", layer, got, want)
		}
		if dense {
			continue
		}
		want = "combine_norm"
		if layer == c.Layers-1 {
			want = "combine"
		}
		if got := ops(m.Combine(nil, layer, Span{Rows: 4})); got != want {
			t.Errorf("layer %d: Combine enqueues %q, want %q", layer, got, want)
		}
	}
	if behind[false] == 0 || behind[true] == 0 || c.Dense[c.Layers-1] {
		t.Errorf("dense layers %v: no case of each kind", c.Dense)
	}
}

// listing is a backend that lists the runs that operations have, and runs none.
type listing struct {
	checking
	route, up, down kernels.Tensor
}

func (l *listing) Enqueue(s device.Stream, op kernels.Op) error {
	switch o := op.(type) {
	case *kernels.Route:
		l.route = o.Runs
	case *kernels.RouteDown:
		l.route = o.Route.Runs
	case *kernels.ExpertUp:
		l.up = o.Runs
	case *kernels.RouteExpertUp:
		l.route, l.up = o.Route.Runs, o.Up.Runs
	case *kernels.ExpertDown:
		l.down = o.Runs
	}
	return l.checking.Enqueue(s, op)
}

// TestRuns holds when experts get the runs that the router has listed: of few tokens that it has sorted, and where
// all experts and all of their columns are computed. It also holds who runs the router's selection if that is left to
// experts.
func TestRuns(t *testing.T) {
	c := mustParse(t, "qwen2_moe", nil)
	l, err := models.NewLayout(c, models.NewDummy(c, 0), nil)
	check(t, err)
	b := &listing{checking: checking{list: true}}
	limits := Limits{MaxTokens: 32, MaxSeqs: 1, MaxLogits: 1, MaxModelLen: 32, BlockTokens: 16}
	m, err := NewModel(c, l.Bind(1<<20), b, device.Range{Addr: 1 << 30, Bytes: WorkspaceBytes(c, b, limits)}, limits)
	check(t, err)
	slots, list := kernels.New(1<<41, kernels.U64, c.Experts), kernels.New(1<<42, kernels.I32, c.Experts)
	shape := c.ExpertShape(l.ExpertDType)
	layout := kernels.ExpertLayout{ExpertShape: shape, Tag: "row-major", Size: device.Align(shape.Bytes())}
	ops := func(run error) string {
		check(t, run)
		defer func() { b.names = nil }()
		return strings.Join(b.names, " ")
	}
	for rows, few := range map[int]bool{1: true, 3: true, 16: true, 20: true, 21: false} {
		batch := Batch{Span: Span{Rows: rows}}
		for name, sorts := range map[string]func() error{
			"router":                          func() error { return m.PostAttention(nil, 0, &batch, true, false) },
			"router, later":                   func() error { return m.PostAttention(nil, 0, &batch, true, true) },
			"router beside the shared expert": func() error { return m.PostAttentionShared(nil, 0, &batch) },
			"sorted later": func() error {
				return errors.Join(m.PostAttention(nil, 0, &batch, false, false), m.SortByExpert(nil, 0, batch.Span))
			},
			"sorted later, later": func() error {
				return errors.Join(m.PostAttention(nil, 0, &batch, false, true), m.SortByExpert(nil, 0, batch.Span))
			},
			"sorted again": func() error {
				return errors.Join(m.PostAttention(nil, 0, &batch, true, false), m.SortByExpert(nil, 0, batch.Span))
			},
		} {
			b.route = kernels.Tensor{}
			left := few && name == "router, later"
			if got := ops(sorts()); strings.Contains(got, "route") == left {
				t.Errorf("%d rows, %s: the router enqueues %q", rows, name, got)
			}
			if want := few && !strings.HasPrefix(name, "sorted later") && !left; b.route.None() == want {
				t.Errorf("%d rows, %s: the router's runs are %v", rows, name, b.route)
			}
			want := few && strings.HasPrefix(name, "router")
			up := "expert_up"
			if left {
				up = "route_expert_up"
			}
			if got := ops(m.Experts(nil, 0, batch.Span, slots, list, layout)); got != up+" expert_down" {
				t.Errorf("%d rows, %s: Experts enqueues %q, want %s first", rows, name, got, up)
			}
			if b.up.None() == want || b.up != b.down || want && b.up != b.route {
				t.Errorf("%d rows, %s: runs of gate/up are %v, of down %v", rows, name, b.up, b.down)
			}
			for part, run := range map[string]func() error{
				"experts": func() error { return m.Experts(nil, 0, batch.Span, slots, list.Slice(1, c.Experts), layout) },
				"columns": func() error {
					return m.ExpertColumns(nil, 0, batch.Span, slots, list, layout, kernels.Columns{End: shape.Intermediate})
				},
			} {
				// The first call after the router's, and the second one.
				up := "expert_up"
				if left {
					up = "route expert_up"
				}
				ops(sorts())
				for range 2 {
					got := ops(run())
					if !b.up.None() || !b.down.None() {
						t.Errorf("%d rows, %s, some of the %s: runs of gate/up are %v, of down %v", rows, name, part, b.up, b.down)
					}
					if got != up+" expert_down" {
						t.Errorf("%d rows, %s, some of the %s: Experts enqueues %q, want %s first", rows, name, part, got, up)
					}
					up = "expert_up"
				}
			}
		}
	}
}

// What reads or overwrites the router's selection is refused where that is left to Experts.
func TestLeftToExperts(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	l, err := models.NewLayout(c, models.NewDummy(c, 0), nil)
	check(t, err)
	b := &listing{}
	limits := Limits{MaxTokens: 16, MaxSeqs: 1, MaxLogits: 1, MaxModelLen: 16, BlockTokens: 16}
	m, err := NewModel(c, l.Bind(1<<20), b, device.Range{Addr: 1 << 30, Bytes: WorkspaceBytes(c, b, limits)}, limits)
	check(t, err)
	batch := Batch{Span: Span{Rows: 1}}
	check(t, m.PostAttention(nil, 0, &batch, true, true))
	if err := m.SortByExpert(nil, 0, batch.Span); err == nil || !strings.Contains(err.Error(), "layer 0, whose selection is left to Experts") {
		t.Errorf("SortByExpert: %v", err)
	}
	if err := m.PredictNext(nil, 1, 1); err == nil || !strings.Contains(err.Error(), "predict routing of layer 1 before Experts") {
		t.Errorf("PredictNext: %v", err)
	}
	check(t, m.PostAttention(nil, 0, &batch, true, false))
	check(t, errors.Join(m.SortByExpert(nil, 0, batch.Span), m.PredictNext(nil, 1, 1)))
}

// Stages, and putting a batch together, allocate nothing; and they suit a backend
// with 16-bit activations.
func TestNoAllocations(t *testing.T) {
	for _, kind := range modelstest.Kinds {
		c := mustParse(t, kind, modelstest.DenseLayer(kind))
		l, err := models.NewLayout(c, models.NewDummy(c, 0), nil)
		check(t, err)
		b := &checking{}
		limits := Limits{MaxTokens: 64, MaxSeqs: 4, MaxLogits: 4, MaxModelLen: 64, BlockTokens: 16, MaxAdjust: 8, MaxTopLogProbs: 5}
		m, err := NewModel(c, l.Bind(1<<20), b, device.Range{Addr: 1 << 30, Bytes: WorkspaceBytes(c, b, limits)}, limits)
		check(t, err)
		keys := kernels.New(1<<40, kernels.BF16, 16, 16, c.KVHeads, c.HeadDim)
		values := kernels.New(1<<44, kernels.BF16, 16, 16, c.KVHeads, c.HeadDim)
		attention := m.Attention(&views{k: slices.Repeat([]kernels.Tensor{keys}, c.Layers), v: slices.Repeat([]kernels.Tensor{values}, c.Layers)})
		slots := kernels.New(1<<41, kernels.U64, c.Experts)
		list := kernels.New(1<<42, kernels.I32, c.Experts)
		shape := c.ExpertShape(l.ExpertDType)
		layout := kernels.ExpertLayout{ExpertShape: shape, Tag: "row-major", Size: device.Align(shape.Bytes())}
		h := NewHostBatch(c, limits)
		dst := make([]byte, StepUploadBytes(limits, 1))
		q := Sequence{Start: 20, Blocks: make([]int32, 4)}
		var draw SamplingParams
		// later: Experts get the router's selection to run.
		later := false
		step := func() {
			span := Span{Rows: len(q.IDs)}
			h.Reset(0, 0, 0)
			row, err := h.Append(&q)
			check(t, err)
			_, err = h.Sample(row+span.Rows-1, &draw)
			check(t, err)
			batch, _, err := h.Pack(dst, 1<<43)
			check(t, err)
			check(t, m.Embed(nil, &batch))
			for layer := range c.Layers {
				check(t, m.Attend(nil, layer, &batch, attention))
				check(t, m.PostAttention(nil, layer, &batch, true, later))
				if c.Dense[layer] {
					check(t, m.MLP(nil, layer, span))
					continue
				}
				if !later {
					check(t, m.PredictNext(nil, layer, span.Rows))
					check(t, m.SortByExpert(nil, layer, span))
				}
				check(t, m.SharedExpert(nil, layer, span))
				if c.SharedWidth > 0 && !later {
					check(t, m.PostAttentionShared(nil, layer, &batch))
				}
				check(t, m.Experts(nil, layer, span, slots, list, layout))
				check(t, m.Combine(nil, layer, span))
			}
			check(t, m.Head(nil, &batch))
		}
		moe := 0
		for _, dense := range c.Dense {
			if !dense {
				moe++
			}
		}
		for _, later = range []bool{false, true} {
			q.IDs = make([]int32, 10)
			routed := 0
			if later {
				q.IDs, routed = q.IDs[:1], moe
			}
			draw, b.ops = SamplingParams{}, 0
			step()
			plain := b.ops
			for _, draw = range []SamplingParams{
				{},
				{
					Temperature: 1, TopK: 3, TopP: 0.5, MinP: 0.1, RepetitionPenalty: 1.1, PresencePenalty: 0.5, FrequencyPenalty: 0.1,
					Adjust: []TokenAdjust{{ID: 1, Seen: 2}, {ID: 5, Seen: -1, Bias: 3}}, LogProbs: true,
				},
			} {
				step()
				b.ops, b.routedUps = 0, 0
				step()
				if want := plain + 3*len(draw.Adjust)/2; b.ops != want || b.routedUps != routed {
					t.Errorf("%s: a step of %d operations, %d of which route and compute gate/up, want %d and %d: %+v", kind, b.ops, b.routedUps, want, routed, draw)
				}
				if n := testing.AllocsPerRun(10, step); n > 0 {
					t.Errorf("%s, later %v: a step of %d operations allocates %v times", kind, later, b.ops, n)
				}
			}
		}
	}
}
