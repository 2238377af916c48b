package models

import "math"

// RoPE is a rotary position embedding. With longrope (LongAfter > 0) each frequency is
// divided by a factor, at all positions of the sequence: by Short in sequences of at most
// LongAfter tokens, by Long in longer ones. When a sequence grows past LongAfter, its keys
// are recomputed.
type RoPE struct {
	Theta float64
	// LongAfter is original_max_position_embeddings; 0: no longrope.
	LongAfter int
	// Short and Long have HeadDim/2 factors each; they are nil without longrope.
	Short, Long []float32
	// ShortScale and LongScale multiply cosines and sines; they are 1 without longrope.
	ShortScale, LongScale float32
}

// Variants returns the number of rotation tables: two (short and long) with longrope, else
// one.
func (r *RoPE) Variants() int {
	if r.LongAfter > 0 {
		return 2
	}
	return 1
}

// Frequencies holds the frequencies of one variant.
type Frequencies struct {
	// Inverse is the rotation of each pair of elements per position, in radians.
	Inverse []float32
	// Scale multiplies cosines and sines.
	Scale float32
}

// Frequencies returns the frequencies of each variant for heads of dim elements. They are
// rounded to float32 where the reference implementation rounds: the exponent, the power,
// its product with the factor, and the quotient.
func (r *RoPE) Frequencies(dim int) []Frequencies {
	f := []Frequencies{{Scale: r.ShortScale}, {Scale: r.LongScale}}[:r.Variants()]
	for v, factors := range [][]float32{r.Short, r.Long}[:r.Variants()] {
		f[v].Inverse = make([]float32, dim/2)
		for i := range f[v].Inverse {
			power := float32(math.Pow(r.Theta, float64(float32(2*i)/float32(dim))))
			if factors != nil {
				power *= factors[i]
			}
			f[v].Inverse[i] = 1 / power
		}
	}
	return f
}
