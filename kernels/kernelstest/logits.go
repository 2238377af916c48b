package kernelstest

import (
	"cmp"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// cuts holds one row's parameters of Sample.
type cuts struct {
	temperature, topP, minP float64
	topK                    int
}

// kept is the reference for the tokens of a row that Sample keeps, in order of falling
// probability.
func kept(logits []float64, c cuts) []int {
	t := float32(c.temperature)
	var ids []int
	for i, v := range logits {
		if !math.IsNaN(v) {
			ids = append(ids, i)
		}
	}
	slices.SortStableFunc(ids, func(i, j int) int { return cmp.Compare(logits[j], logits[i]) })
	e := func(id int) float32 {
		s, s0 := float32(logits[id])/t, float32(logits[ids[0]])/t
		if s == s0 {
			return 1
		}
		return kernels.Exp(s - s0)
	}
	var left []int
	for _, id := range ids {
		if e(id) >= float32(c.minP) {
			left = append(left, id)
		}
	}
	if c.topK > 0 && c.topK < len(left) {
		left = left[:c.topK]
	}
	if c.topP == 1 {
		return left
	}
	weight := func(id int) uint64 { return kernels.SampleWeight(e(id)) }
	var all, sum uint64
	for _, id := range left {
		all += weight(id)
	}
	want := new(big.Rat).Mul(new(big.Rat).SetFloat64(c.topP), new(big.Rat).SetInt(new(big.Int).SetUint64(all)))
	for i, id := range left {
		sum += weight(id)
		if new(big.Rat).SetInt(new(big.Int).SetUint64(sum)).Cmp(want) >= 0 {
			return left[:i+1]
		}
	}
	return left
}

// equal returns logits with many equal values, and some NaN, infinite or negative zero.
func (r *rig) equal(row int) float64 {
	if r.rand.IntN(10) > 0 {
		return float64(-r.rand.IntN(5))
	}
	odd := []float64{math.Copysign(0, -1), math.Inf(-1), math.NaN(), math.Inf(1)}
	if row%5 == 0 {
		return odd[r.rand.IntN(4)]
	}
	return odd[r.rand.IntN(3)]
}

// above is v - w, and 0 for equal infinities.
func above(v, w float64) float64 {
	if v == w {
		return 0
	}
	return v - w
}

// plausible checks the reference against the real softmax: the probability of the tokens
// that TopP keeps reaches TopP, and without the last token it does not, up to the rounding
// of weights.
func (r *rig) plausible(logits []float64, c cuts, left []int) {
	r.Helper()
	if c.topP == 1 || c.minP > 0 || c.topK > 0 {
		return
	}
	var all, sum, last float64
	for _, v := range logits {
		if !math.IsNaN(v) {
			all += math.Exp(above(v, logits[left[0]]) / c.temperature)
		}
	}
	for _, id := range left {
		last = math.Exp(above(logits[id], logits[left[0]])/c.temperature) / all
		sum += last
	}
	if sum < c.topP-1e-5 || sum-last > c.topP+1e-5 {
		r.Fatalf("the reference keeps %d tokens of probability %g together, %g without the last, for a top-p of %g", len(left), sum, sum-last, c.topP)
	}
}

func testSampleCuts(r *rig) {
	type shape struct {
		n, vocabulary int
		deviation     float64 // of the logits; 0: many equal ones
	}
	shapes := []shape{{1, 16, 2}, {2, 33, 3}, {40, 131, 2}, {40, 130, 0}, {2, 20001, 3}, {2, 20003, 0}}
	if r.o.Full {
		shapes = append(shapes, shape{5, 32064, 3}, shape{5, 151936, 4})
	}
	choices := []cuts{
		{1, 1, 0, 0},
		{1, 1, 0, 1},
		{1, 1, 0, 5},
		{5, 1, 0, 40},
		{1, 1, 0, 1 << 30},
		{1, 0.9, 0, 0},
		{2, 0.5, 0, 0},
		{1, 1e-6, 0, 0},
		{0.3, 0.999, 0, 0},
		{1, 1e-30, 0, 0},
		{1, 1, 0.1, 0},
		{3, 1, 0.5, 0},
		{1, 1, 1, 0},
		{2, 1, 1e-7, 0},
		{5, 0.8, 0, 20},
		{5, 0.7, 0.2, 0},
		{4, 1, 0.3, 7},
		{3, 0.6, 0.1, 30},
		{0, 0.5, 0.5, 3},
	}
	for i, s := range shapes {
		for _, with := range []string{"k", "p", "m", "kpm"} {
			r.run(fmt.Sprintf("%+v/with=%s", s, with), func(r *rig) {
				logits := r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.vocabulary).set(func(i int) float64 {
					if s.deviation > 0 {
						return s.deviation * r.rand.NormFloat64()
					}
					return r.equal(i / s.vocabulary)
				})
				row := make([]cuts, s.n)
				for n := range row {
					row[n] = choices[r.rand.IntN(len(choices))]
				}
				per := func(name string, t kernels.DType, value func(c *cuts) float64) tensor {
					return r.dense(name, t, s.n).set(func(n int) float64 { return value(&row[n]) })
				}
				op := kernels.Sample{
					Logits:      logits.Tensor,
					Temperature: per("Temperature", kernels.F32, func(c *cuts) float64 { return c.temperature }).Tensor,
				}
				if strings.Contains(with, "k") {
					op.TopK = per("TopK", kernels.I32, func(c *cuts) float64 { return float64(c.topK) }).Tensor
				}
				if strings.Contains(with, "p") {
					op.TopP = per("TopP", kernels.F32, func(c *cuts) float64 { return c.topP }).Tensor
				}
				if strings.Contains(with, "m") {
					op.MinP = per("MinP", kernels.F32, func(c *cuts) float64 { return c.minP }).Tensor
				}
				seeds, samples, positions := make([]uint64, s.n), make([]int, s.n), make([]int, s.n)
				for n := range seeds {
					seeds[n], samples[n], positions[n] = r.rand.Uint64(), r.rand.IntN(4), r.rand.IntN(1<<17)
				}
				op.Seeds, op.Samples, op.Positions = r.words("Seeds", seeds...).Tensor, r.ints("Samples", samples...).Tensor, r.ints("Positions", positions...).Tensor
				out := r.dense("Out", kernels.I32, s.n, 1)
				out.writes()
				op.Out = out.View(s.n)
				r.do(&op)
				for n, c := range row {
					if op.TopK.None() {
						c.topK = 0
					}
					if op.TopP.None() {
						c.topP = 1
					}
					if op.MinP.None() {
						c.minP = 0
					}
					if c.temperature == 0 {
						c = cuts{1, 1, 0, 1}
					}
					c.topP, c.minP, c.temperature = float64(float32(c.topP)), float64(float32(c.minP)), float64(float32(c.temperature))
					values := logits.row(n)
					left := kept(values, c)
					r.plausible(values, c, left)
					slices.Sort(left)
					var best float32
					want := -1
					for _, id := range left {
						score := float32(float32(values[id])/float32(c.temperature)) + philox.Gumbel(seeds[n], int32(samples[n]), int32(positions[n]), int32(id))
						if want < 0 || score > best {
							best, want = score, id
						}
					}
					r.exact(out, []float64{float64(want)}, n)
				}
				r.invariant(out, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
					part := op
					part.Logits, part.Out = op.Logits.Slice(from, to), out.View(to-from)
					for _, t := range []*kernels.Tensor{&part.Temperature, &part.Seeds, &part.Samples, &part.Positions, &part.TopK, &part.TopP, &part.MinP} {
						if !t.None() {
							*t = t.Slice(from, to)
						}
					}
					return &part
				})
			})
		}
	}
}

// testSampleNone: a row in which no logit is a number above -Inf samples -1, whatever its
// parameters, and the rows beside it are sampled as ever.
func testSampleNone(r *rig) {
	nan, inf := math.NaN(), math.Inf(-1)
	for _, vocabulary := range []int{16, 131, 20001} {
		for _, none := range [][]float64{{nan}, {inf}, {nan, inf}} {
			for _, with := range []string{"", "k", "p", "m", "kpm"} {
				r.run(fmt.Sprintf("vocabulary=%d/%v/with=%s", vocabulary, none, with), func(r *rig) {
					// Odd rows have no number but, in rows 3 and 7, one.
					const rows = 8
					only := r.rand.IntN(vocabulary)
					logits := r.gaps("Logits", kernels.F32, rows, vocabulary).set(func(i int) float64 {
						switch row := i / vocabulary; {
						case row%2 == 0:
							return r.rand.NormFloat64()
						case row%4 == 3 && i%vocabulary == only:
							return -3e38
						}
						return none[r.rand.IntN(len(none))]
					})
					per := func(name string, t kernels.DType, value func(n int) float64) kernels.Tensor {
						return r.dense(name, t, rows).set(value).Tensor
					}
					op := kernels.Sample{
						Logits:      logits.Tensor,
						Temperature: per("Temperature", kernels.F32, func(n int) float64 { return []float64{0, 1, 0.01, 1e-40}[n/2] }),
						Seeds:       r.words("Seeds", make([]uint64, rows)...).Tensor, Samples: r.ints("Samples", make([]int, rows)...).Tensor,
						Positions: r.ints("Positions", 0, 1, 2, 3, 4, 5, 6, 7).Tensor,
					}
					if strings.Contains(with, "k") {
						op.TopK = per("TopK", kernels.I32, func(int) float64 { return 5 })
					}
					if strings.Contains(with, "p") {
						op.TopP = per("TopP", kernels.F32, func(int) float64 { return 0.9 })
					}
					if strings.Contains(with, "m") {
						op.MinP = per("MinP", kernels.F32, func(int) float64 { return 0.1 })
					}
					out := r.dense("Out", kernels.I32, rows)
					out.writes()
					op.Out = out.Tensor
					r.do(&op)
					for n, id := range out.got() {
						switch {
						case n%4 == 1 && id != -1:
							r.Errorf("row %d has no number and samples %g, want -1", n, id)
						case n%4 == 3 && id != float64(only):
							r.Errorf("row %d has the number at %d only and samples %g", n, only, id)
						case n%2 == 0 && (id < 0 || id >= float64(vocabulary)):
							r.Errorf("row %d samples %g", n, id)
						}
					}
				})
			}
		}
	}
}

// lists holds the entries of Adjust for each row, one row after another.
type lists struct {
	starts, ids, seen []int
	bias              []float64
}

// lists returns lists of 0 to most tokens per row.
func (r *rig) lists(rows, vocabulary, most int) lists {
	l := lists{starts: []int{0}}
	for n := range rows {
		count := r.rand.IntN(min(most, vocabulary) + 1)
		if n%4 == 1 {
			count = 0
		}
		for _, id := range r.rand.Perm(vocabulary)[:count] {
			l.ids = append(l.ids, id)
			l.seen = append(l.seen, r.rand.IntN(6)-1)
			l.bias = append(l.bias, []float64{0, 0, -1.5, 100, math.Inf(-1)}[r.rand.IntN(5)])
		}
		l.starts = append(l.starts, len(l.ids))
	}
	return l
}

func testAdjust(r *rig) {
	for i, s := range []struct{ n, vocabulary, most int }{{1, 16, 16}, {2, 33, 5}, {7, 131, 131}, {33, 258, 40}, {3, 20001, 5000}, {2, 50, 0}} {
		r.run(fmt.Sprintf("%+v", s), func(r *rig) {
			logits := r.normal(r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.vocabulary), 0, 3)
			l := r.lists(s.n, s.vocabulary, s.most)
			starts, ids, seen := r.ints("Starts", l.starts...), r.ints("IDs", l.ids...), r.ints("Seen", l.seen...)
			bias := r.dense("Bias", kernels.F32, len(l.ids)).set(func(i int) float64 { return l.bias[i] })
			repetition := r.dense("Repetition", kernels.F32, s.n).set(func(int) float64 { return 0.5 + r.rand.Float64() })
			presence := r.normal(r.dense("Presence", kernels.F32, s.n), 0, 1)
			frequency := r.normal(r.dense("Frequency", kernels.F32, s.n), 0, 1)
			saved := r.dense("Saved", kernels.F32, len(l.ids))
			logits.writes()
			saved.writes()
			adjust := kernels.Adjust{
				Logits: logits.Tensor, Starts: starts.Tensor, IDs: ids.Tensor, Seen: seen.Tensor, Bias: bias.Tensor,
				Repetition: repetition.Tensor, Presence: presence.Tensor, Frequency: frequency.Tensor, Saved: saved.Tensor,
			}
			r.do(&adjust)
			originals := make([]float64, len(l.ids))
			for n := range s.n {
				want := logits.row(n)
				factor, one, each := float32(repetition.row()[n]), float32(presence.row()[n]), float32(frequency.row()[n])
				for j := l.starts[n]; j < l.starts[n+1]; j++ {
					id := l.ids[j]
					originals[j] = want[id]
					x := float32(want[id]) + float32(l.bias[j])
					switch {
					case l.seen[j] < 0:
					case x > 0:
						x /= factor
					default:
						x *= factor
					}
					if l.seen[j] > 0 {
						x = float32(x-float32(each*float32(l.seen[j]))) - one
					}
					want[id] = float64(x)
				}
				r.exact(logits, want, n)
			}
			r.exact(saved, originals)

			// The same again, and back: only what is saved has changed.
			logits.buffer.out = nil
			before := logits.buffer.before
			logits.writes()
			r.doPart(&adjust, &kernels.Restore{Logits: logits.Tensor, Starts: starts.Tensor, IDs: ids.Tensor, Saved: saved.Tensor})
			r.alike(logits, before, "Restore behind Adjust")
		})
	}
}

func testMask(r *rig) {
	for i, s := range []struct{ n, vocabulary, listed int }{{1, 16, 1}, {2, 33, 1}, {7, 131, 7}, {33, 258, 20}, {3, 20001, 2}, {2, 50, 0}} {
		r.run(fmt.Sprintf("%+v", s), func(r *rig) {
			logits := r.normal(r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.vocabulary), 0, 3)
			rows, words := r.rand.Perm(s.n)[:s.listed], (s.vocabulary+31)/32
			bits := make([]int, s.listed*words)
			for j := range bits {
				switch r.rand.IntN(4) { // all and none of 32, too
				case 0:
				case 1:
					bits[j] = -1
				default:
					bits[j] = int(int32(r.rand.Uint32()))
				}
			}
			allowed := r.ints("Allowed", bits...).View(s.listed, words)
			logits.writes()
			r.do(&kernels.Mask{Logits: logits.Tensor, Rows: r.ints("Rows", rows...).Tensor, Allowed: allowed})
			for n := range s.n {
				want := logits.row(n)
				if at := slices.Index(rows, n); at >= 0 {
					for id := range want {
						if uint32(bits[at*words+id/32])>>(id%32)&1 == 0 {
							want[id] = math.Inf(-1)
						}
					}
				}
				r.exact(logits, want, n)
			}
		})
	}
}

func testLogProbs(r *rig) {
	shapes := []struct{ n, vocabulary, top int }{{1, 16, 16}, {2, 33, 20}, {7, 131, 1}, {33, 258, 5}, {3, 20001, 20}, {4, 100, -1}, {3, 7, 0}}
	if r.o.Full {
		shapes = append(shapes, struct{ n, vocabulary, top int }{2, 151936, 20})
	}
	for i, s := range shapes {
		for _, ties := range []bool{false, true} {
			r.run(fmt.Sprintf("%+v/ties=%v", s, ties), func(r *rig) {
				logits := r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.vocabulary).set(func(i int) float64 {
					if !ties {
						return 5 * r.rand.NormFloat64()
					}
					return r.equal(i / s.vocabulary)
				})
				tokens := make([]int, s.n)
				for n := range tokens { // no number is drawn that is none
					if n%7 == 5 { // nothing was drawn
						tokens[n] = -1
						continue
					}
					for tokens[n] = r.rand.IntN(s.vocabulary); math.IsNaN(logits.row(n)[tokens[n]]); {
						tokens[n] = r.rand.IntN(s.vocabulary)
					}
				}
				chosen := r.dense("Chosen", kernels.F32, s.n, 1)
				chosen.writes()
				ranks := r.dense("Ranks", kernels.I32, s.n, 1)
				ranks.writes()
				op := kernels.LogProbs{Ranks: ranks.View(s.n), Logits: logits.Tensor, Tokens: r.ints("Tokens", tokens...).Tensor, Sampled: chosen.View(s.n)}
				var ids, top tensor
				if s.top >= 0 {
					ids, top = r.dense("TopIDs", kernels.I32, s.n, s.top), r.dense("Top", kernels.F32, s.n, s.top)
					ids.writes()
					top.writes()
					op.TopIDs, op.Top = ids.Tensor, top.Tensor
				}
				r.do(&op)
				for n := range s.n {
					values := logits.row(n)
					order := kept(values, cuts{temperature: 1, topP: 1})
					var sum float64
					for _, id := range order {
						sum += math.Exp(above(values[id], values[order[0]]))
					}
					logProb := func(id int) float64 { return above(values[id], values[order[0]]) - math.Log(sum) }
					if got := chosen.got(n)[0]; tokens[n] >= 0 {
						r.logProb(chosen, 0, logProb(tokens[n]), n)
					} else if !math.IsNaN(got) {
						r.Fatalf("the log-probability of no token is %g, want NaN", got)
					}
					rank := 0
					for _, v := range values {
						if tokens[n] >= 0 && v >= values[tokens[n]] {
							rank++
						}
					}
					if got := ranks.got(n)[0]; got != float64(rank) {
						r.Fatalf("the rank of token %d in row %d is %g, want %d", tokens[n], n, got, rank)
					}
					for j := range s.top {
						want, value := -1.0, math.Inf(-1)
						if j < len(order) {
							want, value = float64(order[j]), logProb(order[j])
						}
						if got := ids.got(n)[j]; got != want {
							r.Fatalf("TopIDs[%d %d] is %g, want %g", n, j, got, want)
						}
						r.logProb(top, j, value, n)
					}
				}
				ranks.buffer.out = nil // judged by the rows above, as are these; the log-probabilities alone leave them out
				if s.top >= 0 {
					ids.buffer.out, top.buffer.out = nil, nil
				}
				r.invariant(chosen, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
					return &kernels.LogProbs{Logits: op.Logits.Slice(from, to), Tokens: op.Tokens.Slice(from, to), Sampled: out.View(to - from)}
				})
			})
		}
	}
}

// logProb checks element j of a row of log-probabilities.
func (r *rig) logProb(t tensor, j int, want float64, row int) {
	r.Helper()
	if got := t.got(row)[j]; got != want && !(math.Abs(got-want) <= 1e-5*max(1, math.Abs(want))) {
		r.Fatalf("%s[%d %d] is %.9g, want %.9g", t.buffer.name, row, j, got, want)
	}
}
