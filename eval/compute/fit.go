package compute

import (
	"math"
	"slices"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// knots are the points of each curve. Fixed costs of a step have fewer than those of its layers, since
// cases differ less in them.
func knots(c planner.Cost) []float64 {
	switch c {
	case planner.LayerFixed:
		return []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096}
	case planner.HeadWeights:
		return []float64{1, 64, 128, 256, 512, 4096}
	case planner.DenseWeights:
		return []float64{1, 16, 64, 128, 256, 512, 1024, 8192}
	case planner.ExpertWeights:
		return []float64{1, 16, 64, 128, 256, 512, 2048}
	case planner.ExpertFixed:
		return []float64{1, 32, 512}
	case planner.StepFixed:
		return []float64{1, 64, 512, 4096}
	case planner.SharedFixed:
		return []float64{1, 8, 64, 512, 4096}
	case planner.EnqueuedStepFixed, planner.EnqueuedSharedFixed:
		return []float64{8, 512, 8192}
	case planner.EnqueuedLayerFixed:
		return []float64{8, 64, 512, 2048, 8192}
	case planner.KVBytes:
		return []float64{1, 8, 64, 512, 4096}
	case planner.PromptFlops:
		return []float64{8, 64, 512, 2048, 8192}
	}
	return []float64{1}
}

// Fitted is how well a planner.Compute describes the points that it was fitted to.
type Fitted struct {
	// Median and Worst are relative errors, without their signs.
	Median float64 `json:"median_error"`
	Worst  float64 `json:"worst_error"`
}

// unknown is a knot's value.
type unknown struct {
	cost planner.Cost
	knot int
	// least that it can be, and column are its coefficients in the equations.
	least  float64
	column []float64
}

// Fit finds values of at least what the hardware's rates allow, with the least sum of squares of
// relative errors. Knots that no point depends on are left out.
func Fit(points []Point, h *planner.Hardware) (*planner.Compute, Fitted, error) {
	if len(points) == 0 {
		return nil, Fitted{}, eval.Inputf("eval: no steps were measured, which a calibration of kernels needs")
	}
	curves := make([]planner.Curve, planner.Costs)
	for c := range planner.Costs {
		curves[c].At = used(points, c)
	}
	var list []unknown
	first := make([]int, planner.Costs)
	for c := range planner.Costs {
		first[c] = len(list)
		for i, at := range curves[c].At {
			list = append(list, unknown{cost: c, knot: i, least: least(c, at, float64(points[0].Model.EnsureDefaults().WeightBytes), h), column: make([]float64, len(points))})
		}
	}
	for i := range points {
		p := &points[i]
		for _, t := range p.Model.Terms(p.Step) {
			for k, w := range curves[t.Cost].Weights(t.At) {
				list[first[t.Cost]+k].column[i] += w * t.Times / p.Seconds
			}
		}
	}
	values := solve(list, len(points))
	var c planner.Compute
	for k := range planner.Costs {
		x := curves[k]
		if len(x.At) == 0 { // nothing that was measured has it
			x.At = []float64{1}
			x.Values = []float64{0}
		} else {
			x.Values = values[first[k] : first[k]+len(x.At)]
		}
		c.Set(k, x)
	}
	if err := c.Validate(); err != nil {
		return nil, Fitted{}, err
	}
	return &c, fitted(list, values, len(points)), nil
}

// used are the knots of a cost that points depend on.
func used(points []Point, c planner.Cost) []float64 {
	all := planner.Curve{At: knots(c)}
	weight := make([]float64, len(all.At))
	for i := range points {
		for _, t := range points[i].Model.Terms(points[i].Step) {
			if t.Cost == c {
				for k, w := range all.Weights(t.At) {
					weight[k] += math.Abs(w)
				}
			}
		}
	}
	var at []float64
	for k, w := range weight {
		if w > 0 {
			at = append(at, all.At[k])
		}
	}
	return at
}

// slack is the share of the least time by the hardware's rates that a fit keeps to: rates are of
// other kernels than the model's.
const slack = 0.9

// least is the least value of a cost that the hardware's rates allow, with weights of so many bytes.
func least(c planner.Cost, at, weight float64, h *planner.Hardware) float64 {
	switch c {
	case planner.DenseWeights, planner.ExpertWeights, planner.HeadWeights:
		return slack * max(weight/h.GPUMemoryRate, 2*at/h.GPUFlops)
	case planner.KVBytes, planner.ElementwiseBytes:
		return slack / h.GPUMemoryRate
	}
	return 0
}

// sweeps over all unknowns of the solution, at most; it ends before where no value changes.
const sweeps = 20000

// solve finds values of at least their least for which columns times values are closest to 1, by
// coordinate descent: each value in turn is the best for the others.
func solve(list []unknown, equations int) []float64 {
	values, norms := make([]float64, len(list)), make([]float64, len(list))
	rest := make([]float64, equations)
	for i := range rest {
		rest[i] = 1
	}
	for j := range list {
		values[j] = list[j].least
		for i, a := range list[j].column {
			rest[i] -= a * values[j]
			norms[j] += a * a
		}
	}
	for range sweeps {
		changed := 0.0
		for j := range list {
			if norms[j] == 0 {
				continue
			}
			dot := 0.0
			for i, a := range list[j].column {
				dot += a * rest[i]
			}
			by := max(values[j]+dot/norms[j], list[j].least) - values[j]
			if by == 0 {
				continue
			}
			values[j] += by
			for i, a := range list[j].column {
				rest[i] -= a * by
			}
			changed = max(changed, math.Abs(by)*math.Sqrt(norms[j]))
		}
		if changed < 1e-9 {
			break
		}
	}
	return values
}

func fitted(list []unknown, values []float64, equations int) (f Fitted) {
	errors := make([]float64, equations)
	for i := range errors {
		sum := 0.0
		for j := range list {
			sum += list[j].column[i] * values[j]
		}
		errors[i] = math.Abs(sum - 1)
	}
	f.Median, f.Worst = eval.Median(errors), slices.Max(errors)
	return f
}
