package models

import "math"

// RoPE is a rotary position embedding. With longrope (LongAfter > 0) each frequency is
// divided by a factor, at all positions of the sequence: by Short in sequences of at most
// LongAfter tokens, by Long in longer ones. When a sequence grows past LongAfter, its keys
// are recomputed. Other scalings are the same for all sequences.
type RoPE struct {
	Theta   float64
	Scaling Scaling
	// LongAfter is original_max_position_embeddings; 0: no longrope.
	LongAfter int
	// Short and Long have HeadDim/2 factors each; they are nil without longrope.
	Short, Long []float32
	// ShortScale and LongScale multiply cosines and sines, with longrope in short and in long
	// sequences. Else LongScale has no meaning, and ShortScale is 1 but with yarn.
	ShortScale, LongScale float32
}

// ScalingKind names how frequencies differ from those of Theta, as rope_type does.
type ScalingKind string

// The kinds. In transformers, dynamic raises Theta in sequences that are longer than
// max_position_embeddings, with new frequencies for each longer sequence. No sequence here
// is: with dynamic, Theta is that of max_position_embeddings tokens, and there is no scaling.
const (
	NoScaling     ScalingKind = ""
	LinearScaling ScalingKind = "linear"
	YarnScaling   ScalingKind = "yarn"
	Llama3Scaling ScalingKind = "llama3"
)

// Scaling extends a model's context by lower frequencies.
type Scaling struct {
	Kind   ScalingKind
	Factor float64
	// Original is the context before the extension in tokens (yarn, llama3).
	Original int
	// BetaFast and BetaSlow are the rotations within Original above which a frequency stays
	// as it is, and below which it is divided by Factor (yarn). Truncate rounds the
	// boundaries to whole dimensions.
	BetaFast, BetaSlow float64
	Truncate           bool
	// LowFactor and HighFactor divide Original into the wavelengths with the same roles
	// (llama3).
	LowFactor, HighFactor float64
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
			power := float32(math.Pow(float64(float32(r.Theta)), float64(float32(2*i)/float32(dim))))
			if factors != nil {
				power *= factors[i]
			}
			f[v].Inverse[i] = 1 / power
			if s := &r.Scaling; s.Kind == YarnScaling {
				f[v].Inverse[i] = s.yarn(power, i, dim, r.Theta)
			} else {
				f[v].Inverse[i] = s.apply(f[v].Inverse[i])
			}
		}
	}
	return f
}

// apply scales an inverse frequency (linear, llama3).
func (s *Scaling) apply(inverse float32) float32 {
	factor := float32(s.Factor)
	switch s.Kind {
	case LinearScaling:
		return inverse / factor
	case Llama3Scaling:
		original := float64(s.Original)
		wave := 1 / inverse * float32(2*math.Pi)
		switch {
		case wave > float32(original/s.LowFactor):
			return inverse / factor
		case wave < float32(original/s.HighFactor):
			return inverse
		}
		// Each product and quotient is rounded to float32, as in the reference.
		smooth := (float32(1/wave*float32(original)) - float32(s.LowFactor)) / float32(s.HighFactor-s.LowFactor)
		low := float32((1-smooth)*inverse) / factor
		return low + float32(smooth*inverse)
	}
	return inverse
}

// yarn mixes the inverse of pair i's frequency power with that divided by Factor (Peng et al.
// 2023, "YaRN", section 3.2).
func (s *Scaling) yarn(power float32, i, dim int, theta float64) float32 {
	boundary := func(rotations float64) float64 {
		return float64(dim) * math.Log(float64(s.Original)/(rotations*2*math.Pi)) / (2 * math.Log(theta))
	}
	low, high := boundary(s.BetaFast), boundary(s.BetaSlow)
	if s.Truncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, float64(dim-1))
	if low == high {
		high += 0.001
	}
	ramp := min(max((float32(i)-float32(low))/float32(high-low), 0), 1)
	kept := 1 - ramp
	interpolated := 1 / float32(float32(s.Factor)*power)
	return float32(interpolated*(1-kept)) + float32(1/power*kept)
}
