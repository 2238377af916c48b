package cpu_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/kernels/philox"
)

// TestBadSampling gives the operations on logits data that they refuse: see
// TestBadData.
func TestBadSampling(t *testing.T) {
	h := openHost(t, 2)
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	some := func(v ...float32) kernels.Tensor { return tensor(h, kernels.F32, v, len(v)) }
	logits := func(s int) kernels.Tensor { return h.floats(s, 5) }
	sample := func(change func(o *kernels.Sample)) kernels.Op {
		o := &kernels.Sample{
			Logits: logits(2), Temperature: some(1, 1), Seeds: tensor[uint64](h, kernels.U64, nil, 2),
			Samples: h.ints(0, 0), Positions: h.ints(0, 0), Out: h.ints(0, 0),
		}
		change(o)
		return o
	}
	adjust := func(change func(o *kernels.Adjust)) kernels.Op {
		o := &kernels.Adjust{
			Logits: logits(2), Starts: h.ints(0, 2, 3), IDs: h.ints(4, 0, 4), Seen: h.ints(0, 1, -1), Bias: some(0, 1, -inf),
			Repetition: some(1, 1), Presence: some(0, 0), Frequency: some(0, 0), Saved: some(0, 0, 0),
		}
		change(o)
		return o
	}
	restore := func(starts, ids kernels.Tensor) kernels.Op {
		return &kernels.Restore{Logits: logits(2), Starts: starts, IDs: ids, Saved: h.floats(ids.Shape[0])}
	}
	probs := func(token int32) kernels.Op {
		return &kernels.LogProbs{Logits: logits(1), Tokens: h.ints(token), Sampled: some(0)}
	}
	for _, c := range []struct {
		op   kernels.Op
		want string
	}{
		{sample(func(o *kernels.Sample) { o.TopK = h.ints(0, -1) }), "cpu: sample: TopK[1] is -1, want 0 (all) or more"},
		{sample(func(o *kernels.Sample) { o.TopP = some(0, 1) }), "cpu: sample: TopP[0] is 0, want above 0 and at most 1"},
		{sample(func(o *kernels.Sample) { o.TopP = some(1, nan) }), "cpu: sample: TopP[1] is NaN"},
		{sample(func(o *kernels.Sample) { o.TopP = some(1, 1.5) }), "cpu: sample: TopP[1] is 1.5"},
		{sample(func(o *kernels.Sample) { o.MinP = some(-0.5, 1) }), "cpu: sample: MinP[0] is -0.5, want 0 to 1"},
		{sample(func(o *kernels.Sample) { o.MinP = some(0, nan) }), "cpu: sample: MinP[1] is NaN"},
		{adjust(func(o *kernels.Adjust) { o.Starts = h.ints(1, 2, 3) }), "cpu: adjust: Starts[0] is 1, want 0"},
		{adjust(func(o *kernels.Adjust) { o.Starts = h.ints(0, 2, 1) }), "cpu: adjust: Starts[2] is 1, want 2 to 3"},
		{adjust(func(o *kernels.Adjust) { o.Starts = h.ints(0, 4, 3) }), "cpu: adjust: Starts[1] is 4, want 0 to 3"},
		{adjust(func(o *kernels.Adjust) { o.Starts = h.ints(0, 1, 2) }), "cpu: adjust: Starts[2] is 2, want 3"},
		{adjust(func(o *kernels.Adjust) { o.IDs = h.ints(4, 5, 4) }), "cpu: adjust: IDs[1] is 5, want 0 to 4"},
		{adjust(func(o *kernels.Adjust) { o.IDs = h.ints(4, 0, -1) }), "cpu: adjust: IDs[2] is -1, want 0 to 4"},
		{adjust(func(o *kernels.Adjust) { o.IDs = h.ints(4, 4, 4) }), "cpu: adjust: IDs[1] is 4, want each token of a row once"},
		{adjust(func(o *kernels.Adjust) { o.Seen = h.ints(0, -2, 0) }), "cpu: adjust: Seen[1] is -2, want -1 or more"},
		{adjust(func(o *kernels.Adjust) { o.Bias = some(0, 0, inf) }), "cpu: adjust: Bias[2] is +Inf, want a finite number or -Inf"},
		{adjust(func(o *kernels.Adjust) { o.Bias = some(0, nan, 0) }), "cpu: adjust: Bias[1] is NaN"},
		{adjust(func(o *kernels.Adjust) { o.Repetition = some(1, 0) }), "cpu: adjust: Repetition[1] is 0, want a finite number above 0"},
		{adjust(func(o *kernels.Adjust) { o.Repetition = some(inf, 1) }), "cpu: adjust: Repetition[0] is +Inf"},
		{adjust(func(o *kernels.Adjust) { o.Presence = some(0, nan) }), "cpu: adjust: Presence[1] is NaN, want a finite number"},
		{adjust(func(o *kernels.Adjust) { o.Frequency = some(-inf, 0) }), "cpu: adjust: Frequency[0] is -Inf, want a finite number"},
		{restore(h.ints(0, 1, 3), h.ints(1, 2)), "cpu: restore: Starts[2] is 3, want 1 to 2"},
		{restore(h.ints(0, 1, 2), h.ints(1, 5)), "cpu: restore: IDs[1] is 5, want 0 to 4"},
		{&kernels.Mask{Logits: logits(2), Rows: h.ints(2), Allowed: h.ints(-1).View(1, 1)}, "cpu: mask: Rows[0] is 2, want 0 to 1"},
		{probs(5), "cpu: log_probs: Tokens[0] is 5, want -1 to 4"},
		{probs(-2), "cpu: log_probs: Tokens[0] is -2, want -1 to 4"},
	} {
		if err := h.backend.Enqueue(h.stream, c.op); err != nil {
			t.Errorf("enqueue %s: %v, want the operation to fail", c.op.Name(), err)
			continue
		}
		if err := h.stream.Recover(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s gives %v, want %q", c.op.Name(), err, c.want)
		}
	}
	// After all that the scratch memory is as it was: good lists are taken.
	if err := h.backend.Enqueue(h.stream, adjust(func(*kernels.Adjust) {})); err != nil {
		t.Error(err)
	}
	if err := h.stream.Synchronize(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestCutShares draws often from a few tokens: each comes as often as what is left
// of the softmax says.
func TestCutShares(t *testing.T) {
	const rows = 20000
	h := openHost(t, 2)
	probabilities := []float64{0.05, 0.4, 0.15, 0.3, 0.1}
	logits := make([]float32, 0, rows*len(probabilities))
	seeds, positions := make([]uint64, rows), make([]int32, rows)
	ones, topP, topK := make([]float32, rows), make([]float32, rows), make([]int32, rows)
	for n := range rows {
		for _, p := range probabilities {
			logits = append(logits, float32(math.Log(p)))
		}
		seeds[n], positions[n], ones[n], topP[n], topK[n] = 11, int32(n), 1, 0.8, 4
	}
	// Of the four likeliest (0.95), 0.8 takes three: 0.4, 0.3 and 0.15.
	out := tensor[int32](h, kernels.I32, nil, rows)
	err := h.backend.Enqueue(h.stream, &kernels.Sample{
		Logits: tensor(h, kernels.F32, logits, rows, len(probabilities)), Temperature: tensor(h, kernels.F32, ones, rows),
		Seeds: tensor(h, kernels.U64, seeds, rows), Samples: tensor[int32](h, kernels.I32, nil, rows), Positions: tensor(h, kernels.I32, positions, rows),
		TopK: tensor(h, kernels.I32, topK, rows), TopP: tensor(h, kernels.F32, topP, rows), Out: out,
	})
	if err == nil {
		err = h.stream.Synchronize(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	counts := make([]float64, len(probabilities))
	for _, b := range h.bits(out) {
		counts[b]++
	}
	for id, want := range []float64{0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0} {
		if got := counts[id] / rows; math.Abs(got-want) > 5*math.Sqrt(want*(1-want)/rows) {
			t.Errorf("token %d is drawn with frequency %.4f, want %.4f", id, got, want)
		}
	}
}

// bits are the 32-bit words of a tensor once nothing writes it any more.
func (h *host) bits(x kernels.Tensor) []uint32 {
	values := h.read(x)
	words := make([]uint32, len(values))
	for i, v := range values {
		words[i] = math.Float32bits(v)
	}
	return words
}

// TestSamplingGarbage bounds what sampling allocates, whatever its rows.
func TestSamplingGarbage(t *testing.T) {
	m, b := openMachine(t, cpu.Options{Threads: 1}, emulated.Options{})
	h := newHost(t, m, b)
	const rows, vocabulary = 30, 1000
	ones := make([]float32, rows)
	for i := range ones {
		ones[i] = 0.5
	}
	part, logits := tensor(h, kernels.F32, ones, rows), h.floats(rows, vocabulary)
	starts, ids := make([]int32, rows+1), make([]int32, rows)
	for i := range rows {
		starts[i+1] = int32(i + 1)
	}
	list := tensor(h, kernels.I32, ids, rows)
	ops := []kernels.Op{
		&kernels.Adjust{
			Logits: logits, Starts: h.ints(starts...), IDs: list, Seen: list, Bias: part,
			Repetition: part, Presence: part, Frequency: part, Saved: h.floats(rows),
		},
		&kernels.Sample{
			Logits: logits, Temperature: part, Seeds: tensor[uint64](h, kernels.U64, nil, rows), Samples: list, Positions: list,
			TopK: list, TopP: part, MinP: part, Out: tensor[int32](h, kernels.I32, nil, rows),
		},
		&kernels.LogProbs{Logits: logits, Tokens: list, Sampled: h.floats(rows), TopIDs: tensor[int32](h, kernels.I32, nil, rows, 20), Top: h.floats(rows, 20)},
	}
	for _, op := range ops {
		n := testing.AllocsPerRun(50, func() {
			if err := h.backend.Enqueue(h.stream, op); err != nil {
				t.Error(err)
			}
			if err := h.stream.Synchronize(t.Context()); err != nil {
				t.Error(err)
			}
		})
		if n > 25 {
			t.Errorf("%s: %g allocations of an operation of %d rows, want at most 25", op.Name(), n, rows)
		}
	}
}

func BenchmarkSampling(b *testing.B) {
	const vocabulary = 151936
	m, backend := openMachine(b, cpu.Options{}, emulated.Options{})
	h := newHost(b, m, backend)
	for _, rows := range []int{1, 16} {
		values := make([]float32, rows*vocabulary)
		for i := range values { // about normal, deviation 3
			values[i] = -philox.Gumbel(1, 0, 0, int32(i)) * 2.3
		}
		logits := tensor(h, kernels.F32, values, rows, vocabulary)
		all := func(v float32) kernels.Tensor {
			x := make([]float32, rows)
			for i := range x {
				x[i] = v
			}
			return tensor(h, kernels.F32, x, rows)
		}
		zeros := tensor[int32](h, kernels.I32, nil, rows)
		fifty := make([]int32, rows)
		for i := range fifty {
			fifty[i] = 50
		}
		plain := kernels.Sample{
			Logits: logits, Temperature: all(0.8), Seeds: tensor[uint64](h, kernels.U64, nil, rows), Samples: zeros, Positions: zeros,
			Out: tensor[int32](h, kernels.I32, nil, rows),
		}
		topK, topP, minP := plain, plain, plain
		topK.TopK, topP.TopP, minP.MinP = tensor(h, kernels.I32, fifty, rows), all(0.95), all(0.05)
		both := topK
		both.TopP = topP.TopP
		for _, c := range []struct {
			name string
			op   kernels.Op
		}{
			{"plain", &plain},
			{"top-k", &topK},
			{"top-p", &topP},
			{"min-p", &minP},
			{"top-k-p", &both},
			{"logprobs", &kernels.LogProbs{Logits: logits, Tokens: zeros, Sampled: all(0), TopIDs: tensor[int32](h, kernels.I32, nil, rows, 20), Top: h.floats(rows, 20)}},
		} {
			b.Run(fmt.Sprintf("rows=%d/%s", rows, c.name), func(b *testing.B) {
				for b.Loop() {
					if err := h.backend.Enqueue(h.stream, c.op); err != nil {
						b.Fatal(err)
					}
					if err := h.stream.Synchronize(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
