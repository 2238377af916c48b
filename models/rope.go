package models

import "math"

// RoPE is a rotary embedding. With longrope (LongAfter > 0) each frequency is
// divided by a factor: by Short in sequences of at most LongAfter tokens, by Long
// in longer ones, all over the sequence. A sequence that grows past LongAfter has
// its keys computed again.
type RoPE struct {
	Theta float64
	// LongAfter is original_max_position_embeddings; 0: no longrope.
	LongAfter int
	// Short and Long have HeadDim/2 factors each; nil without longrope.
	Short, Long []float32
	// ShortScale and LongScale multiply cosines and sines; 1 without longrope.
	ShortScale, LongScale float32
}

// variants is the number of tables that stand one after another: short and long.
func (r *RoPE) variants() int {
	if r.LongAfter > 0 {
		return 2
	}
	return 1
}

// frequencies are those of one variant: rotation per position, in radians, and
// what cosines and sines are multiplied by.
type frequencies struct {
	inverse []float32
	scale   float32
}

// frequencies of each variant for heads of dim elements. They are rounded to
// float32 where the reference implementation rounds: the exponent, the power,
// its product with the factor, and the quotient.
func (r *RoPE) frequencies(dim int) []frequencies {
	f := []frequencies{{scale: r.ShortScale}, {scale: r.LongScale}}[:r.variants()]
	for v, factors := range [][]float32{r.Short, r.Long}[:r.variants()] {
		f[v].inverse = make([]float32, dim/2)
		for i := range f[v].inverse {
			power := float32(math.Pow(r.Theta, float64(float32(2*i)/float32(dim))))
			if factors != nil {
				power *= factors[i]
			}
			f[v].inverse[i] = 1 / power
		}
	}
	return f
}
