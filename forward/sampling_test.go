package forward

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestDrawErrors(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	limits := Limits{MaxTokens: 64, MaxSeqs: 2, MaxLogits: 2, MaxModelLen: 40, BlockTokens: 16, MaxAdjust: 2}
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	one := func(a TokenAdjust) SamplingParams { return SamplingParams{Adjust: []TokenAdjust{a}} }
	for _, x := range []struct {
		d    SamplingParams
		want string
	}{
		{SamplingParams{Temperature: -1}, "temperature -1, want a finite number of at least 0"},
		{SamplingParams{Temperature: inf}, "temperature +Inf"},
		{SamplingParams{Temperature: nan}, "temperature NaN"},
		{SamplingParams{TopK: -1}, "top-k -1"},
		{SamplingParams{TopP: 1.5}, "top-p 1.5, want 0 to 1"},
		{SamplingParams{TopP: nan}, "top-p NaN"},
		{SamplingParams{MinP: -0.1}, "min-p -0.1"},
		{SamplingParams{RepetitionPenalty: -1}, "repetition penalty -1"},
		{SamplingParams{RepetitionPenalty: inf}, "repetition penalty +Inf"},
		{SamplingParams{PresencePenalty: nan}, "presence penalty NaN"},
		{SamplingParams{FrequencyPenalty: -inf}, "frequency penalty -Inf"},
		{SamplingParams{LogProbs: true}, "but the limit MaxTopLogProbs is 0"},
		{one(TokenAdjust{ID: 512}), "adjusted token 0 has id 512, outside the model's vocabulary of 512"},
		{one(TokenAdjust{ID: -1}), "id -1"},
		{one(TokenAdjust{Seen: -2}), "seen -2 times"},
		{one(TokenAdjust{Bias: nan}), "bias NaN"},
		{one(TokenAdjust{Bias: inf}), "bias +Inf, want a finite number or -Inf"},
		{SamplingParams{Adjust: make([]TokenAdjust, 3)}, "3 adjusted tokens exceed the maximum of 2"},
	} {
		h := NewHostBatch(c, limits)
		if _, err := h.Sample(0, &x.d); err == nil || !strings.Contains(err.Error(), x.want) || len(h.samples.list) != 0 || len(h.samples.adjusts) != 0 {
			t.Errorf("%+v: %v, want %q", x.d, err, x.want)
		}
	}
}

// A batch carries what its rows use, and only that; and a full one fits into the
// room that is kept for it, behind others.
func TestPackDraws(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	l := Limits{MaxTokens: 64, MaxSeqs: 4, MaxLogits: 64, MaxModelLen: 64, BlockTokens: 16, MaxAdjust: 100, MaxTopLogProbs: 5}
	pack := func(dst []byte, draws ...SamplingParams) (Batch, int64) {
		t.Helper()
		h := NewHostBatch(c, l)
		row, err := h.Append(&Sequence{IDs: make([]int32, len(draws)), Blocks: make([]int32, 4)})
		check(t, err)
		for i, d := range draws {
			_, err := h.Sample(row+i, &d)
			check(t, err)
		}
		b, n, err := h.Pack(dst, 256)
		check(t, err)
		return b, n
	}
	dst := make([]byte, StepUploadBytes(l, 1))
	plain, bytes := pack(dst, SamplingParams{}, SamplingParams{Temperature: 1})
	// Greedy rows ignore what cuts the distribution, and penalties change listed
	// tokens only.
	if b, n := pack(dst, SamplingParams{TopK: 5, TopP: 0.5, MinP: 0.5}, SamplingParams{Temperature: 1, TopP: 1, RepetitionPenalty: 2, PresencePenalty: 1}); b != plain || n != bytes {
		t.Errorf("draws that use nothing make %+v of %d bytes, want %+v of %d", b, n, plain, bytes)
	}
	for name, x := range map[string]struct {
		d    SamplingParams
		want func(b *Batch) bool
	}{
		"top-k": {SamplingParams{Temperature: 1, TopK: 5}, func(b *Batch) bool {
			return !b.Sampling.TopK.None() && b.Sampling.TopP.None() && b.Sampling.MinP.None()
		}},
		"top-p": {SamplingParams{Temperature: 1, TopP: 0.5}, func(b *Batch) bool {
			return b.Sampling.TopK.None() && !b.Sampling.TopP.None() && b.Sampling.MinP.None()
		}},
		"min-p": {SamplingParams{Temperature: 1, MinP: 0.5}, func(b *Batch) bool {
			return b.Sampling.TopK.None() && b.Sampling.TopP.None() && !b.Sampling.MinP.None()
		}},
		"logprobs": {SamplingParams{LogProbs: true}, func(b *Batch) bool { return b.Sampling.LogProbs && b.Sampling.Adjust.IDs.None() }},
		"adjust": {SamplingParams{Adjust: []TokenAdjust{{ID: 3}}}, func(b *Batch) bool {
			return b.Sampling.Adjust.IDs.Shape[0] == 1 && b.Sampling.Adjust.Starts.Shape[0] == 3 && b.Sampling.Adjust.Repetition.Shape[0] == 2 && b.Sampling.TopK.None() && !b.Sampling.LogProbs
		}},
	} {
		if b, _ := pack(dst, SamplingParams{}, x.d); !x.want(&b) {
			t.Errorf("%s makes %+v", name, b)
		}
	}
	full := make([]SamplingParams, 64)
	for i := range full {
		full[i] = SamplingParams{Temperature: 1, TopK: 5, TopP: 0.5, MinP: 0.5, LogProbs: true}
	}
	full[63].Adjust = make([]TokenAdjust, 100)
	if _, n := pack(dst, full...); n > StepUploadBytes(l, 1) {
		t.Errorf("a full micro-batch takes %d bytes, %d are kept", n, StepUploadBytes(l, 1))
	}
	// Four micro-batches of 16 rows, each with its part of what may be adjusted.
	all := make([]byte, StepUploadBytes(l, 4))
	used := int64(0)
	for i := range 4 {
		part := slices.Clone(full[:16])
		part[3].Adjust = make([]TokenAdjust, 25)
		_, n := pack(all[used:], part...)
		if used += n; used > StepUploadBytes(l, 4) {
			t.Fatalf("%d micro-batches take %d bytes, %d are kept for 4", i+1, used, StepUploadBytes(l, 4))
		}
	}
}

// Head draws what a float64 reading of the logits says, leaves the logits as they
// were, and returns the log-probabilities of them.
func TestHeadDraws(t *testing.T) {
	c, src, _ := fixture(t, "phimoe")
	r := newRig(t, c, src)
	ids := make([]int32, 24)
	for i := range ids {
		ids[i] = int32((7*i + 3) % c.Vocab)
	}
	h := NewHostBatch(c, r.model.Limits)
	row, err := h.Append(&Sequence{IDs: ids, Blocks: []int32{2, 0, 1}, Long: r.long(len(ids))})
	check(t, err)
	var first, biggest []int32 // without anything, by row
	plain, _ := r.run(ids, 0, r.long(len(ids)), 8)
	for i := range ids {
		order := byLogit(plain[i*c.Vocab:][:c.Vocab])
		first, biggest = append(first, order[0]), append(biggest, order[1])
	}
	banned := float32(math.Inf(-1))
	for i := range ids {
		d := SamplingParams{Position: int32(i + 1)}
		switch i % 4 {
		case 1: // the likeliest is banned
			d.Adjust = []TokenAdjust{{ID: first[i], Seen: -1, Bias: banned}}
		case 2: // any but the likeliest would be a wonder
			d.Temperature, d.TopK, d.Seed = 100, 1, uint64(i)
		case 3: // a penalty that drives the likeliest away, and keeps away from others
			d.FrequencyPenalty, d.LogProbs = 50, true
			d.Adjust = []TokenAdjust{{ID: first[i], Seen: 2}, {ID: biggest[i], Seen: 0}}
		}
		_, err := h.Sample(row+i, &d)
		check(t, err)
	}
	b := r.step(&h)[0]
	if got := r.floats(r.model.Logits(b.Sampling.Span)); !slices.Equal(got, plain) {
		t.Error("the logits are not what they are without penalties")
	}
	drawn := int32s(r.download(r.model.Sampled(b.Sampling.Span)))
	for i, id := range drawn {
		want := first[i]
		if i%4 == 1 || i%4 == 3 {
			want = biggest[i]
		}
		if id != want {
			t.Errorf("row %d draws %d, want %d", i, id, want)
		}
	}
	chosen, topIDs, top := r.model.LogProbs(b.Sampling.Span)
	probs, likeliest, values := r.floats(chosen), int32s(r.download(topIDs)), r.floats(top)
	n := r.model.Limits.MaxTopLogProbs
	for i := range ids {
		logits := plain[i*c.Vocab:][:c.Vocab]
		var sum float64
		for _, v := range logits {
			sum += math.Exp(float64(v))
		}
		near := func(got float32, id int32) bool {
			return math.Abs(float64(got)-(float64(logits[id])-math.Log(sum))) < 1e-4
		}
		if !near(probs[i], drawn[i]) {
			t.Errorf("row %d: log-probability %g of token %d", i, probs[i], drawn[i])
		}
		if want := byLogit(logits)[:n]; !slices.Equal(likeliest[i*n:][:n], want) {
			t.Errorf("row %d: likeliest tokens %v, want %v", i, likeliest[i*n:][:n], want)
		}
		for j, id := range likeliest[i*n:][:n] {
			if !near(values[i*n+j], id) {
				t.Errorf("row %d: log-probability %g of token %d", i, values[i*n+j], id)
			}
		}
	}
}

// allowing is a mask of some tokens.
type allowing []int32

func (a allowing) Allowed(dst []uint32) {
	clear(dst)
	for _, id := range a {
		dst[id/32] |= 1 << (id % 32)
	}
}

// Head samples only tokens that a row's mask allows, before penalties too, with log-probabilities of these alone; other rows
// are as without.
func TestHeadMasks(t *testing.T) {
	c, src, _ := fixture(t, "phimoe")
	r := newRig(t, c, src)
	ids := make([]int32, 12)
	for i := range ids {
		ids[i] = int32((5*i + 2) % c.Vocab)
	}
	plain, _ := r.run(ids, 0, r.long(len(ids)), 8)
	h := NewHostBatch(c, r.model.Limits)
	row, err := h.Append(&Sequence{IDs: ids, Blocks: []int32{2, 0, 1}, Long: r.long(len(ids))})
	check(t, err)
	allowed := func(i int) allowing { return allowing{int32(i), int32(40 + i), int32(c.Vocab - 1)} }
	for i := range ids {
		d := SamplingParams{Position: int32(i + 1), LogProbs: true}
		if i%3 > 0 {
			d.Mask = allowed(i)
		}
		if i%3 == 2 { // the likeliest of the allowed ones is banned
			d.Adjust = []TokenAdjust{{ID: best(plain[i*c.Vocab:], allowed(i)), Seen: -1, Bias: float32(math.Inf(-1))}}
		}
		_, err := h.Sample(row+i, &d)
		check(t, err)
	}
	b := r.step(&h)[0]
	probs, _, _ := r.model.LogProbs(b.Sampling.Span)
	got := r.floats(probs)
	for i, id := range int32s(r.download(r.model.Sampled(b.Sampling.Span))) {
		logits := plain[i*c.Vocab:][:c.Vocab]
		of := byLogit(logits)
		if i%3 > 0 {
			of = allowed(i)
		}
		left := of
		if i%3 == 2 {
			first := best(logits, of)
			left = slices.DeleteFunc(slices.Clone(of), func(id int32) bool { return id == first })
		}
		if want := best(logits, left); id != want {
			t.Errorf("row %d samples %d, want %d of %v", i, id, want, left)
		}
		var sum float64
		for _, id := range of {
			sum += math.Exp(float64(logits[id]))
		}
		if want := float64(logits[id]) - math.Log(sum); math.Abs(float64(got[i])-want) > 1e-4 {
			t.Errorf("row %d: log-probability %g, want %g", i, got[i], want)
		}
	}
	if _, err := h.PackMasks(make([]byte, 64), 256, &b); err == nil {
		t.Error("masks are packed into too small a buffer")
	}
}

// best is the likeliest of some ids.
func best(logits []float32, ids []int32) int32 {
	return slices.MaxFunc(ids, func(i, j int32) int { return cmp.Compare(logits[i], logits[j]) })
}

// byLogit are the ids by falling logit.
func byLogit(logits []float32) []int32 {
	ids := make([]int32, len(logits))
	for i := range ids {
		ids[i] = int32(i)
	}
	slices.SortStableFunc(ids, func(i, j int32) int { return cmp.Compare(logits[j], logits[i]) })
	return ids
}

func int32s(b []byte) []int32 {
	out := make([]int32, len(b)/4)
	for i := range out {
		out[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return out
}
