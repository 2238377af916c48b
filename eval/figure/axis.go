package figure

import (
	"math"
	"strconv"
	"strings"
)

// Axis is a range of values.
type Axis struct {
	Label string
	// Log: decades are equally long. All values must be above 0.
	Log bool
	// From and To are its ends. Both 0: what the data take, from 0 where the axis is
	// linear, up to the next round number.
	From, To float64
}

// tick is a value that an axis marks; a minor one has no label.
type tick struct {
	value float64
	label string
}

// ends returns the axis with both ends set: its own, or round numbers around data from
// lowest to highest, about ticks round numbers apart.
func (a Axis) ends(lowest, highest float64, ticks int) Axis {
	switch {
	case a.From != 0 || a.To != 0:
	case a.Log:
		a.From, a.To = below(lowest), above125(highest)
		if a.From == a.To {
			a.From, a.To = below(a.From*0.9), above125(a.To*1.1)
		}
	default:
		a.From, a.To = min(lowest, 0), max(highest, 0)
		if a.From == a.To {
			a.To = 1
		}
		// Both ends are ticks. The longer range may need a larger step.
		for s := 0.0; s < step(a.To-a.From, ticks); {
			s = step(a.To-a.From, ticks)
			a.From, a.To = math.Floor(a.From/s+1e-9)*s, math.Ceil(a.To/s-1e-9)*s
		}
	}
	return a
}

// below is the maximum of 1, 2 and 5 times powers of ten that are not above v.
func below(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)+1e-9))
	for _, f := range []float64{5, 2} {
		if f*power <= v*(1+1e-9) {
			return f * power
		}
	}
	return power
}

// above125 is the minimum of 1, 2 and 5 times powers of ten that are not below v.
func above125(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)+1e-9))
	for _, f := range []float64{1, 2, 5} {
		if f*power >= v*(1-1e-9) {
			return f * power
		}
	}
	return 10 * power
}

// step is the smallest round number of which no more than ticks make up a range.
func step(length float64, ticks int) float64 {
	s := math.Pow(10, math.Floor(math.Log10(length/float64(ticks))))
	for _, f := range []float64{1, 2, 2.5, 5} {
		if length/(s*f) <= float64(ticks)*(1+1e-9) {
			return s * f
		}
	}
	return 10 * s
}

// at is where a value stands on the axis, 0 to 1.
func (a Axis) at(v float64) float64 {
	if a.Log {
		return math.Log(v/a.From) / math.Log(a.To/a.From)
	}
	return (v - a.From) / (a.To - a.From)
}

// ticks of the axis: about that number where it is linear. A logarithmic axis has them at
// 1, 2 and 5 times the powers of ten, and as many labels as fits allows: all, those of
// the powers of ten, or of every second, third, ... of these.
func (a Axis) ticks(about int, fits func([]tick) bool) []tick {
	if !a.Log {
		step := step(a.To-a.From, about)
		for ; ; step *= 2 {
			var t []tick
			for i := math.Ceil(a.From/step - 1e-9); i*step <= a.To+step*1e-9; i++ {
				v := i*step + 0 // never the zero with a sign
				t = append(t, tick{v, number(v)})
			}
			if fits(t) || len(t) < 3 {
				return t
			}
		}
	}
	for each := range 400 {
		var t []tick
		for decade := math.Floor(math.Log10(a.From) + 1e-9); ; decade++ {
			power := math.Pow(10, decade)
			if power > a.To*(1+1e-9) {
				break
			}
			for _, f := range []float64{1, 2, 5} {
				v := f * power
				if v < a.From*(1-1e-9) || v > a.To*(1+1e-9) {
					continue
				}
				x := tick{value: v}
				if each == 0 || f == 1 && int(decade)%each == 0 {
					x.label = number(v)
				}
				t = append(t, x)
			}
		}
		if fits(t) {
			return t
		}
	}
	return nil
}

// number writes a value of a tick, with commas between thousands, or with an exponent.
func number(v float64) string {
	s := strconv.FormatFloat(v, 'g', 10, 64)
	if strings.Contains(s, "e") || math.Abs(v) >= 1e7 {
		return strconv.FormatFloat(v, 'g', 6, 64)
	}
	whole, rest, _ := strings.Cut(s, ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "−", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if rest != "" {
		rest = "." + rest
	}
	return sign + whole + rest
}
