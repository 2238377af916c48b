package rebalancer

import (
	"math"
	"time"
)

// Rates estimates each expert's uses per second from cumulative counts. It is pure: time
// is passed in.
//
// A rate is an exponentially decaying mean: uses one half-life ago count half. A second
// mean has a shorter half-life. If the two means of an expert differ by more than chance
// explains, its use has changed, and the long mean is reset to the short one. So rates
// are steady under constant load and follow changes quickly.
//
// A pause without any use counts as one half-life at most, so that after a night without
// requests the first request of the morning does not determine all rates.
type Rates struct {
	halfLife time.Duration
	at       time.Duration
	begun    bool
	last     [][]int64
	long     mean
	short    mean
}

// mean is a decaying mean of each expert's uses per second.
type mean struct {
	halfLife time.Duration
	// sum is the weighted sum of rates, weight the sum of the weights, from 0 to 1.
	sum    [][]float64
	weight float64
}

const (
	// shortFactor is the ratio of the two half-lives.
	shortFactor = 4
	// changeDeviations is the minimum difference of the two means, in standard deviations
	// of the short one, that counts as a change.
	changeDeviations = 3
)

// NewRates returns empty rates. halfLife is positive.
func NewRates(halfLife time.Duration) *Rates { return &Rates{halfLife: halfLife} }

// Observe updates the rates by the cumulative uses of each expert, [layers][experts]. The
// first call only sets the base counts, and so does one with decreased counts.
func (r *Rates) Observe(counts [][]int64, now time.Duration) {
	if !r.begun {
		r.begin(counts, now)
		return
	}
	used := false
	for l := range counts {
		for e, n := range counts[l] {
			if n < r.last[l][e] {
				r.begin(counts, now)
				return
			}
			used = used || n > r.last[l][e]
		}
	}
	if !used || now <= r.at {
		return
	}
	dt := min(now-r.at, r.halfLife)
	for _, m := range []*mean{&r.long, &r.short} {
		keep := m.decay(dt)
		for l := range counts {
			for e, n := range counts[l] {
				m.sum[l][e] += (1 - keep) * float64(n-r.last[l][e]) / dt.Seconds()
			}
		}
	}
	for l := range counts {
		copy(r.last[l], counts[l])
		for e := range counts[l] {
			r.resetIfChanged(l, e)
		}
	}
	r.at = now
}

// resetIfChanged resets an expert's long mean if its rate has changed.
func (r *Rates) resetIfChanged(l, e int) {
	long, short := r.long.sum[l][e]/r.long.weight, r.short.sum[l][e]/r.short.weight
	chance := math.Sqrt(max(long, short) * r.short.singleUse() / 2)
	if math.Abs(long-short) > changeDeviations*chance {
		r.long.sum[l][e] = short * r.long.weight
	}
}

func (r *Rates) begin(counts [][]int64, now time.Duration) {
	r.last, r.at, r.begun = make([][]int64, len(counts)), now, true
	r.long, r.short = mean{halfLife: r.halfLife}, mean{halfLife: r.halfLife / shortFactor}
	for l := range counts {
		r.last[l] = append([]int64(nil), counts[l]...)
		r.long.sum = append(r.long.sum, make([]float64, len(counts[l])))
		r.short.sum = append(r.short.sum, make([]float64, len(counts[l])))
	}
}

// decay ages the mean by dt, and returns the factor by which its weight falls.
func (m *mean) decay(dt time.Duration) (keep float64) {
	keep = math.Exp2(-float64(dt) / float64(m.halfLife))
	for _, sums := range m.sum {
		for e := range sums {
			sums[e] *= keep
		}
	}
	m.weight = keep*m.weight + 1 - keep
	return keep
}

// singleUse is the rate that results from a single use now. The variance of a mean of
// independent uses is half of its rate times that.
func (m *mean) singleUse() float64 {
	if m.weight == 0 {
		return 0
	}
	return math.Ln2 / m.halfLife.Seconds() / m.weight
}

// PerSecond is the rate of each expert, [layers][experts]; 0 before any use.
func (r *Rates) PerSecond() [][]float64 {
	rates := make([][]float64, len(r.long.sum))
	for l, sums := range r.long.sum {
		rates[l] = make([]float64, len(sums))
		for e, s := range sums {
			if r.long.weight > 0 {
				rates[l][e] = s / r.long.weight
			}
		}
	}
	return rates
}

// SingleUse is the rate that results from a single use now: differences of this size are
// not significant.
func (r *Rates) SingleUse() float64 { return r.long.singleUse() }
