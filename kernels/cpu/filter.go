package cpu

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// filter has the tokens of one row that MinP, TopK and TopP keep: those that are at least minP
// as probable as the most probable one and rank no lower than token maxID among those whose
// logit has key minKey.
type filter struct {
	on          bool
	temperature float32
	top         float32 // the largest logit / temperature
	minP        float32
	minKey      uint32
	maxID       int32
}

// filters computes the filter of each row, or returns nil if the operation keeps all tokens.
func (b *Backend) filters(o *kernels.Sample, d *sampleScratch) ([]filter, error) {
	if o.TopK.None() && o.TopP.None() && o.MinP.None() {
		return nil, nil
	}
	n, vocabulary := o.Logits.Shape[0], o.Logits.Shape[1]
	var topK []int32
	var topP, minP []float32
	if !o.TopK.None() {
		topK = vector[int32](&o.TopK)
		for i, k := range topK {
			if k < 0 {
				return nil, errValue(o.Name(), "TopK", i, int64(k), "0 (all) or more")
			}
		}
	}
	if !o.TopP.None() {
		topP = vector[float32](&o.TopP)
		for i, p := range topP {
			if !(p > 0 && p <= 1) {
				return nil, fmt.Errorf("cpu: %s: TopP[%d] is %g, want above 0 and at most 1", o.Name(), i, p)
			}
		}
	}
	if !o.MinP.None() {
		minP = vector[float32](&o.MinP)
		for i, p := range minP {
			if !(p >= 0 && p <= 1) {
				return nil, fmt.Errorf("cpu: %s: MinP[%d] is %g, want 0 to 1", o.Name(), i, p)
			}
		}
	}
	d.filters = resize(d.filters, n)
	filters, temperatures := d.filters, vector[float32](&o.Temperature)
	b.rows(n, 20*vocabulary, func(from, to int) {
		for i := from; i < to; i++ {
			k, p, f := int32(0), float32(1), &filters[i]
			*f = filter{temperature: temperatures[i], minKey: 1, maxID: math.MaxInt32}
			if topK != nil && int(topK[i]) < vocabulary {
				k = topK[i]
			}
			if topP != nil {
				p = topP[i]
			}
			if minP != nil {
				f.minP = minP[i]
			}
			if f.temperature > 0 && (k > 0 || p < 1 || f.minP > 0) {
				f.on = true
				f.cut(row(&o.Logits, i), k, p)
			}
		}
	})
	return filters, nil
}

// order maps logits to keys of the same order, equal logits to equal keys; NaN maps to 0, no
// number does.
func order(v float32) uint32 {
	b := math.Float32bits(v)
	switch {
	case v != v:
		return 0
	case b == 1<<31: // -0 equals 0
		b = 0
	}
	return b ^ (uint32(int32(b)>>31) | 1<<31)
}

// cut sets the filter of a row for TopK k (0: all) and TopP p (1: all).
func (f *filter) cut(logits []float32, k int32, p float32) {
	best := largest(logits)
	if best.id < 0 {
		return
	}
	f.top = best.score / f.temperature
	if k > 0 {
		f.narrow(logits, func(uint64) uint64 { return uint64(k) }, func(float32) uint64 { return 1 })
	}
	if p < 1 {
		part := uint64(float64(p) * (1 << 64)) // exact from 2^-40 on; below, one token is enough
		f.narrow(logits, func(total uint64) uint64 {
			hi, lo := bits.Mul64(total, part)
			if lo != 0 || hi == 0 {
				hi++
			}
			return hi
		}, func(v float32) uint64 { return kernels.SampleWeight(f.e(v)) })
	}
}

// e is the probability of the token of a logit, relative to the most probable token.
func (f *filter) e(v float32) float32 {
	s := v / f.temperature
	if s == f.top {
		return 1
	}
	return kernels.Exp(s - f.top)
}

// keeps reports whether the filter keeps the token id with logit v.
func (f *filter) keeps(v float32, id int32) bool {
	k := order(v)
	return (k > f.minKey || k == f.minKey && id <= f.maxID) && (f.minP == 0 || f.e(v) >= f.minP)
}

// narrow keeps, of the filter's tokens in their order, the fewest whose weights reach
// want(total), with total the sum of all weights; all if they do not reach it. It finds the
// last one's key digit by digit (radix select), from sums of weights by digit.
func (f *filter) narrow(logits []float32, want func(total uint64) uint64, weigh func(v float32) uint64) {
	const digit = 11 // bits; the last digit has one less
	var sums [1 << digit]uint64
	var prefix uint32
	var left uint64
	for _, shift := range [...]int{21, 10, 0} {
		width := min(digit, 32-shift)
		if shift == 0 {
			width = 10
		}
		clear(sums[:])
		for i, v := range logits {
			if k := order(v); uint64(k)>>(shift+width) == uint64(prefix)>>(shift+width) && f.keeps(v, int32(i)) {
				sums[k>>shift&(1<<width-1)] += weigh(v)
			}
		}
		if shift == 21 {
			var total uint64
			for _, s := range sums {
				total += s
			}
			if left = want(total); left > total {
				return
			}
		}
		at := 1<<width - 1
		for ; sums[at] < left; at-- {
			left -= sums[at]
		}
		prefix |= uint32(at) << shift
	}
	for i, v := range logits {
		if order(v) != prefix || !f.keeps(v, int32(i)) {
			continue
		}
		if w := weigh(v); left > w {
			left -= w
			continue
		}
		f.minKey, f.maxID = prefix, int32(i)
		return
	}
}

// draw is the function draw, for the tokens that the filter keeps; first is the id of the first
// logit.
func (f *filter) draw(logits []float32, seed uint64, sample, position, first int32) choice {
	c := choice{id: -1}
	block := int32(-1)
	var noise [4]float32
	for i, v := range logits {
		id := first + int32(i)
		if !f.keeps(v, id) {
			continue
		}
		if id/4 != block {
			block = id / 4
			noise = philox.GumbelBlock(seed, sample, position, block)
		}
		s := v/f.temperature + noise[id%4]
		if c.id < 0 && v > negInf || s > c.score {
			c = choice{s, int32(i)}
		}
	}
	return c
}
