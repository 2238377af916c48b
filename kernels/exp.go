package kernels

import "math"

// Exp is e^x for x <= 0, within 2 units in the last place, with the same bits on every backend:
// Sample uses it to decide which tokens to remove. It is 0 if x is below -87 or NaN. With k =
// trunc(x*log2e - 1/2), r = (x - k*hi) - k*lo (hi and lo as in philox.Gumbel) and P = 1 + r (1
// + r (1/2 + r (1/6 + r (1/24 + r (1/120 + r (1/720 + r/5040)))))), it is P 2^k. Every single
// operation is rounded to float32, and none is fused.
func Exp(x float32) float32 {
	const (
		log2e = 1.44269504
		hi    = 0.693359375
		lo    = -2.12194442e-4
	)
	if !(x >= -87) {
		return 0
	}
	k := int32(float32(float32(x*log2e) - 0.5))
	fk := float32(k)
	r := float32(x-float32(fk*hi)) - float32(fk*lo)
	p := float32(1.0/720) + float32(r*float32(1.0/5040))
	p = float32(1.0/120) + float32(r*p)
	p = float32(1.0/24) + float32(r*p)
	p = float32(1.0/6) + float32(r*p)
	p = 0.5 + float32(r*p)
	p = 1 + float32(r*p)
	p = 1 + float32(r*p)
	return p * math.Float32frombits(uint32(k+127)<<23)
}

// SampleWeight is the weight in TopP's sum of a token with e = Exp(…): e in units of 2^-32,
// rounded down.
func SampleWeight(e float32) uint64 { return uint64(e * (1 << 32)) }
