package experts

import "math"

// terms is the number of terms of a time that an estimate can have.
const terms = 3

// estimate is of a time that is a sum of terms: coefficients, in seconds, times known quantities (1 for
// a fixed time). It is a least-squares fit, of relative errors, to recent measurements, in which an
// earlier measurement counts 1 - 1/remembered as much as the next. What measurements do not tell, such
// as the division of a time whose quantities are always the same, is in proportion to the coefficients
// that are assumed.
//
// A measurement that is off by more than a factor of outlier counts as if it were off by that much, but
// for the first ones: one thread that was not running for a while changes little, and a machine that
// has become slower is followed.
type estimate struct {
	// products are the weighted sums of products of two quantities, measured those of a quantity
	// and the time; count is the weight of all measurements.
	products [terms][terms]float64
	measured [terms]float64
	count    float64
}

const (
	remembered = 256
	// outlier is for measurements behind the first warmUp.
	outlier = 3.0
	warmUp  = 16
	// leastCoefficient is the least value of a coefficient, as a share of what is assumed of it.
	leastCoefficient = 0.01
	// leastVariance is the variance of a quantity, as a share of the square of its mean, below
	// which measurements do not tell its part of the time from the fixed one.
	leastVariance = 0.01
)

// assumedWeights are those of the assumed coefficients, where a measurement's weight is 1. That of rows
// is higher: few experts have several, and the CPU gets those last.
var assumedWeights = [terms]float64{0.25, 0.25, 2}

// add adds the measurement of a time for these quantities; assumed is as in coefficients.
func (e *estimate) add(assumed, quantities [terms]float64, seconds float64) {
	if seconds <= 0 {
		return
	}
	weight := 1 / (seconds * seconds)
	if e.count >= warmUp {
		predicted := sum(e.coefficients(assumed), quantities)
		seconds = min(max(seconds, predicted/outlier), predicted*outlier)
		weight = 1 / (predicted * predicted)
	}
	for i := range terms {
		for k := range terms {
			e.products[i][k] += weight*quantities[i]*quantities[k] - e.products[i][k]/remembered
		}
		e.measured[i] += weight*quantities[i]*seconds - e.measured[i]/remembered
	}
	e.count += 1 - e.count/remembered
}

// sum is the time of quantities with these coefficients.
func sum(coefficients, quantities [terms]float64) (seconds float64) {
	for i := range terms {
		seconds += coefficients[i] * quantities[i]
	}
	return seconds
}

// degenerate reports whether the second quantity has varied so little that its coefficient is not
// known.
func (e *estimate) degenerate() bool {
	p := &e.products
	return p[0][0]*p[1][1] < (1+leastVariance)*p[0][1]*p[0][1]
}

// coefficients returns those that fit best; assumed are what they are without measurements, 0 for
// terms that the time does not have.
func (e *estimate) coefficients(assumed [terms]float64) [terms]float64 {
	// The assumed ones fit best if all are multiplied by a factor.
	measured, predicted := 0.0, 0.0
	for i := range terms {
		measured += assumed[i] * e.measured[i]
		for k := range terms {
			predicted += assumed[i] * assumed[k] * e.products[i][k]
		}
	}
	if predicted <= 0 {
		return assumed
	}
	for i := range terms {
		assumed[i] *= measured / predicted
	}
	var known, least [terms]bool
	for i := range terms {
		known[i] = assumed[i] > 0 && e.products[i][i] > 0
	}
	for {
		x := e.fit(assumed, known, least)
		worst := -1
		for i := range terms {
			if known[i] && !least[i] && x[i] < leastCoefficient*assumed[i] && (worst < 0 || x[i]/assumed[i] < x[worst]/assumed[worst]) {
				worst = i
			}
		}
		if worst < 0 {
			return x
		}
		least[worst] = true
	}
}

// fit returns the best coefficients, of which those not known are as assumed, and others have their
// least value.
func (e *estimate) fit(assumed [terms]float64, known, least [terms]bool) (x [terms]float64) {
	// Of quantities in units of their root mean squares: (products + weight) x = measured + weight * assumed.
	var system [terms][terms + 1]float64
	var unit [terms]float64
	for i := range terms {
		unit[i] = 1
		if known[i] {
			unit[i] = math.Sqrt(e.products[i][i])
		}
	}
	for i := range terms {
		if !known[i] || least[i] {
			system[i][i], system[i][terms] = 1, assumed[i]*unit[i]
			if least[i] {
				system[i][terms] *= leastCoefficient
			}
			continue
		}
		for k := range terms {
			system[i][k] = e.products[i][k] / (unit[i] * unit[k])
		}
		weight := assumedWeights[i] / e.count
		system[i][i] += weight
		system[i][terms] = e.measured[i]/unit[i] + weight*assumed[i]*unit[i]
	}
	x = solve(system)
	for i := range terms {
		x[i] /= unit[i]
	}
	return x
}

// solve solves a system of equations by elimination: one whose matrix is positive definite, but for
// equations of one unknown.
func solve(system [terms][terms + 1]float64) (x [terms]float64) {
	for i := range terms {
		for k := i + 1; k < terms; k++ {
			factor := system[k][i] / system[i][i]
			for j := i; j <= terms; j++ {
				system[k][j] -= factor * system[i][j]
			}
		}
	}
	for i := terms - 1; i >= 0; i-- {
		x[i] = system[i][terms]
		for k := i + 1; k < terms; k++ {
			x[i] -= system[i][k] * x[k]
		}
		x[i] /= system[i][i]
	}
	return x
}
