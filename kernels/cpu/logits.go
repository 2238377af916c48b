package cpu

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

func (b *Backend) adjust(o *kernels.Adjust, _ device.Access) error {
	starts, ids := vector[int32](&o.Starts), vector[int32](&o.IDs)
	seen, bias, saved := vector[int32](&o.Seen), vector[float32](&o.Bias), vector[float32](&o.Saved)
	repetition, presence, frequency := vector[float32](&o.Repetition), vector[float32](&o.Presence), vector[float32](&o.Frequency)
	for i, n := range seen {
		if n < -1 {
			return errValue(o.Name(), "Seen", i, int64(n), "-1 or more")
		}
	}
	for i, v := range bias {
		if v != v || math.IsInf(float64(v), 1) {
			return fmt.Errorf("cpu: %s: Bias[%d] is %g, want a finite number or -Inf", o.Name(), i, v)
		}
	}
	for i, r := range repetition {
		switch {
		case !(r > 0) || notFinite(r):
			return fmt.Errorf("cpu: %s: Repetition[%d] is %g, want a finite number above 0", o.Name(), i, r)
		case notFinite(presence[i]):
			return fmt.Errorf("cpu: %s: Presence[%d] is %g, want a finite number", o.Name(), i, presence[i])
		case notFinite(frequency[i]):
			return fmt.Errorf("cpu: %s: Frequency[%d] is %g, want a finite number", o.Name(), i, frequency[i])
		}
	}
	if err := b.lists(o.Name(), starts, ids, o.Logits.Shape[1]); err != nil {
		return err
	}
	for s := range repetition {
		logits := row(&o.Logits, s)
		for i := starts[s]; i < starts[s+1]; i++ {
			x := logits[ids[i]]
			saved[i] = x
			x += bias[i]
			if n := seen[i]; n >= 0 {
				if x > 0 {
					x /= repetition[s]
				} else {
					x *= repetition[s]
				}
				if n > 0 {
					x = float32(x-float32(frequency[s]*float32(n))) - presence[s]
				}
			}
			logits[ids[i]] = x
		}
	}
	return nil
}

// notFinite reports whether f is infinite or NaN.
func notFinite(f float32) bool { return f-f != 0 }

func (b *Backend) restore(o *kernels.Restore, _ device.Access) error {
	starts, ids, saved := vector[int32](&o.Starts), vector[int32](&o.IDs), vector[float32](&o.Saved)
	if err := b.lists(o.Name(), starts, ids, o.Logits.Shape[1]); err != nil {
		return err
	}
	for s := range o.Logits.Shape[0] {
		logits := row(&o.Logits, s)
		for i := starts[s]; i < starts[s+1]; i++ {
			logits[ids[i]] = saved[i]
		}
	}
	return nil
}

func (b *Backend) mask(o *kernels.Mask, _ device.Access) error {
	rows, allowed := vector[int32](&o.Rows), vector[int32](&o.Allowed)
	all, vocabulary, words := o.Logits.Shape[0], o.Logits.Shape[1], o.Allowed.Shape[1]
	for i, r := range rows {
		if r < 0 || int(r) >= all {
			return errValue(o.Name(), "Rows", i, int64(r), "0 to %d", all-1)
		}
	}
	b.rows(len(rows), vocabulary, func(from, to int) {
		for i := from; i < to; i++ {
			logits := row(&o.Logits, int(rows[i]))
			for w, bits := range allowed[i*words:][:words] {
				if bits == -1 {
					continue
				}
				part := logits[32*w : min(32*w+32, vocabulary)]
				for j := range part {
					if uint32(bits)>>j&1 == 0 {
						part[j] = negInf
					}
				}
			}
		}
	})
	return nil
}

// lists checks lists of tokens: row s has ids[starts[s]:starts[s+1]], each once.
func (b *Backend) lists(op string, starts, ids []int32, vocabulary int) error {
	if starts[0] != 0 {
		return errValue(op, "Starts", 0, int64(starts[0]), "0")
	}
	last := len(starts) - 1
	for s := range last {
		if n := starts[s+1]; n < starts[s] || int(n) > len(ids) {
			return errValue(op, "Starts", s+1, int64(n), "%d to %d", starts[s], len(ids))
		}
	}
	if n := starts[last]; int(n) != len(ids) {
		return errValue(op, "Starts", last, int64(n), "%d", len(ids))
	}
	d := b.drawing()
	defer b.draws.Put(d)
	if len(d.listed) < vocabulary {
		d.listed = make([]int32, vocabulary)
	}
	checked := 0
	defer func() {
		for _, id := range ids[:checked] {
			d.listed[id] = 0
		}
	}()
	for s := range last {
		for _, id := range ids[starts[s]:starts[s+1]] {
			if id < 0 || int(id) >= vocabulary {
				return errValue(op, "IDs", checked, int64(id), "0 to %d", vocabulary-1)
			}
			if d.listed[id] == int32(s+1) {
				return errValue(op, "IDs", checked, int64(id), "each token of a row once")
			}
			d.listed[id] = int32(s + 1)
			checked++
		}
	}
	return nil
}

func (b *Backend) logProbs(o *kernels.LogProbs, _ device.Access) error {
	tokens, chosen := vector[int32](&o.Tokens), vector[float32](&o.Sampled)
	vocabulary := o.Logits.Shape[1]
	for i, id := range tokens {
		if id < -1 || int(id) >= vocabulary {
			return errValue(o.Name(), "Tokens", i, int64(id), "-1 to %d", vocabulary-1)
		}
	}
	var topIDs []int32
	var top []float32
	var ranks []int32
	if !o.Ranks.None() {
		ranks = vector[int32](&o.Ranks)
	}
	n := 0
	if !o.TopIDs.None() {
		topIDs, top, n = vector[int32](&o.TopIDs), vector[float32](&o.Top), o.TopIDs.Shape[1]
	}
	b.rows(len(tokens), 20*vocabulary, func(from, to int) {
		for i := from; i < to; i++ {
			logits := row(&o.Logits, i)
			c := logSoftmaxOf(logits)
			chosen[i] = float32(math.NaN())
			if id := tokens[i]; id >= 0 {
				chosen[i] = c.logOf(logits[id])
			}
			if ranks != nil {
				ranks[i] = rankOf(logits, tokens[i])
			}
			if n > 0 {
				ids, values := topIDs[i*n:][:n], top[i*n:][:n]
				mostLikely(logits, ids, values)
				for j, id := range ids {
					if id >= 0 {
						values[j] = c.logOf(values[j])
					}
				}
			}
		}
	})
	return nil
}

// rankOf is the number of logits that are at least a token's: see kernels.LogProbs.
func rankOf(logits []float32, id int32) (rank int32) {
	if id < 0 {
		return 0
	}
	own := logits[id]
	for _, v := range logits {
		if v >= own {
			rank++
		}
	}
	return rank
}

// logSoftmax has what the log-softmax of an element depends on besides its logit.
type logSoftmax struct {
	largest float32
	logSum  float64 // of e^(logit - largest)
}

// logSoftmaxOf sums over a row, in runs of sumChunk elements, each in order in
// float32.
func logSoftmaxOf(logits []float32) logSoftmax {
	best := largest(logits)
	c := logSoftmax{largest: best.score}
	var sum float64
	for len(logits) > 0 {
		part := logits[:min(sumChunk, len(logits))]
		logits = logits[len(part):]
		var s float32
		for _, v := range part {
			if v == c.largest {
				s++
			} else {
				s += kernels.Exp(v - c.largest) // 0 for NaN
			}
		}
		sum += float64(s)
	}
	c.logSum = math.Log(sum)
	return c
}

func (c logSoftmax) logOf(v float32) float32 {
	if v == c.largest {
		return float32(-c.logSum)
	}
	return float32(float64(v) - float64(c.largest) - c.logSum)
}

// mostLikely writes the len(ids) largest logits and their ids, in descending order; -1 and -Inf
// if there are fewer numbers.
func mostLikely(logits []float32, ids []int32, values []float32) {
	n := 0
	for i, v := range logits {
		if v != v || n == len(ids) && !(v > values[n-1]) {
			continue
		}
		if n < len(ids) {
			n++
		}
		at := n - 1
		for ; at > 0 && v > values[at-1]; at-- {
			ids[at], values[at] = ids[at-1], values[at-1]
		}
		ids[at], values[at] = int32(i), v
	}
	for i := n; i < len(ids); i++ {
		ids[i], values[i] = -1, negInf
	}
}
