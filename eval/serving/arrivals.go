package serving

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Arrivals say when requests arrive. The zero value: all at once.
type Arrivals struct {
	// Rate in requests per second; 0: all at once.
	Rate float64
	// Burstiness is the shape of the gamma distribution of the times between two requests: 1 is a
	// Poisson process, less has bursts, more is more even, +Inf is even. Default: 1.
	Burstiness float64
	// Ramp, if set, changes the rate from the first request to the last.
	Ramp Ramp
}

// Ramp is a rate that rises, or falls, with the number of the request.
type Ramp struct {
	// Strategy is linear or exponential; empty: there is no ramp.
	Strategy   string
	Start, End float64 // requests per second
}

// The strategies.
const (
	Linear      = "linear"
	Exponential = "exponential"
)

// EnsureDefaults fills in what is zero.
func (a Arrivals) EnsureDefaults() Arrivals {
	if a.Burstiness == 0 {
		a.Burstiness = 1
	}
	return a
}

// Validate names what is invalid.
func (a *Arrivals) Validate() error {
	positive := func(f float64) bool { return f > 0 && !math.IsInf(f, 0) }
	switch {
	case a.Rate != 0 && !positive(a.Rate):
		return fmt.Errorf("serving: rate %v: must be a number of requests per second, or 0 for all at once", a.Rate)
	case !(a.Burstiness > 0):
		return fmt.Errorf("serving: burstiness %v: must be above 0", a.Burstiness)
	case a.Ramp.Strategy == "":
		return nil
	case a.Ramp.Strategy != Linear && a.Ramp.Strategy != Exponential:
		return fmt.Errorf("serving: ramp-up strategy %q: must be %s or %s", a.Ramp.Strategy, Linear, Exponential)
	case a.Rate != 0:
		return fmt.Errorf("serving: rate %v: a ramp-up has rates of its own", a.Rate)
	case !positive(a.Ramp.Start) || !positive(a.Ramp.End):
		return fmt.Errorf("serving: ramp-up from %v to %v requests/s: both must be above 0", a.Ramp.Start, a.Ramp.End)
	}
	return nil
}

// at is the rate after request i of n.
func (a *Arrivals) at(i, n int) float64 {
	part := float64(i) / float64(max(1, n-1))
	switch a.Ramp.Strategy {
	case Linear:
		return a.Ramp.Start + part*(a.Ramp.End-a.Ramp.Start)
	case Exponential:
		return a.Ramp.Start * math.Pow(a.Ramp.End/a.Ramp.Start, part)
	}
	return a.Rate
}

// arrivalStream separates the random numbers of arrivals from others with the same seed.
const arrivalStream = 0x6172_7269_7661_6c00

// Times are when n requests arrive, the first at 0. The same seed gives the same times.
func (a Arrivals) Times(n int, seed uint64) []time.Duration {
	a = a.EnsureDefaults()
	at := make([]time.Duration, n)
	if a.Rate == 0 && a.Ramp.Strategy == "" {
		return at
	}
	r := rand.New(rand.NewPCG(seed, arrivalStream))
	seconds := 0.0
	for i := 1; i < n; i++ {
		gap := 1.0
		if !math.IsInf(a.Burstiness, 1) {
			gap = gamma(r, a.Burstiness) / a.Burstiness
		}
		seconds += gap / a.at(i-1, n)
		at[i] = time.Duration(min(seconds*1e9, math.MaxInt64/2))
	}
	return at
}

// gamma draws from the gamma distribution of a shape, with scale 1: Marsaglia and Tsang, "A simple
// method for generating gamma variables", 2000. Shapes below 1 are drawn from shape + 1.
func gamma(r *rand.Rand, shape float64) float64 {
	if shape == 1 {
		return r.ExpFloat64()
	}
	boost := 1.0
	if shape < 1 {
		boost = math.Pow(r.Float64(), 1/shape)
		shape++
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v *= v * v
		if math.Log(1-r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return boost * d * v
		}
	}
}
