package cpu

import (
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

func (b *Backend) route(o *kernels.Route, access device.Access) error {
	k := o.IDs.Shape[1]
	ids, weights := vector[int32](&o.IDs), vector[float32](&o.Weights)
	b.rows(o.Logits.Shape[0], 10*o.Logits.Shape[1], func(from, to int) {
		for n := from; n < to; n++ {
			logits, ids, weights := row(&o.Logits, n), ids[n*k:][:k], weights[n*k:][:k]
			top(ids, logits)
			if o.Method == kernels.SparseMixer {
				for i := range ids {
					weights[i] = sparse(logits, ids[:i], ids[i], 2*o.Jitter)
				}
				continue
			}
			softmax(weights, logits, ids)
			if o.Method == kernels.SoftmaxRenorm {
				var s float32
				for _, w := range weights {
					s += w
				}
				for i := range weights {
					weights[i] /= s
				}
			}
		}
	})
	if !o.Counts.None() {
		counts := vector[int64](&o.Counts)
		for _, e := range ids {
			counts[e]++
		}
	}
	if !o.Order.None() {
		sorting := o.Sorting()
		if err := b.group(&sorting, access); err != nil {
			return err
		}
	}
	if !o.Runs.None() {
		listRuns(vector[int32](&o.Runs), vector[int32](&o.Offsets))
	}
	return nil
}

// listRuns writes the runs of experts with those offsets. runs has room for all that have pairs.
func listRuns(runs, offsets []int32) {
	clear(runs)
	n := 0
	for e, first := range offsets[:len(offsets)-1] {
		for ; first < offsets[e+1]; first += kernels.MaxRunPairs {
			copy(runs[n*kernels.RunColumns:], []int32{int32(e), first, min(offsets[e+1]-first, kernels.MaxRunPairs), 0})
			n++
		}
	}
}

// top sets ids to the indices of the largest scores, in descending order, the lower index first
// among equals. NaN counts as the lowest score.
func top(ids []int32, scores []float32) {
	for i := range ids {
		best := int32(-1)
		for e, s := range scores {
			if contains(ids[:i], int32(e)) {
				continue
			}
			if best < 0 || s > scores[best] || scores[best] != scores[best] && s == s {
				best = int32(e)
			}
		}
		ids[i] = best
	}
}

func contains(ids []int32, id int32) bool {
	for _, i := range ids {
		if i == id {
			return true
		}
	}
	return false
}

// softmax sets weights to the softmax over all scores, evaluated at ids, the first of which has
// the largest score.
func softmax(weights, scores []float32, ids []int32) {
	largest := scores[ids[0]]
	var s float32
	for _, v := range scores {
		s += exp(v - largest)
	}
	for i, id := range ids {
		weights[i] = exp(scores[id]-largest) / s
	}
}

// sparse returns the weight of expert id, which has the largest score m of those not selected
// before: the softmax over all s that were not selected and have (m - s) / max(|s|, m) <=
// limit, evaluated at id.
func sparse(scores []float32, taken []int32, id int32, limit float32) float32 {
	m := scores[id]
	var sum float32
	for e, s := range scores {
		if contains(taken, int32(e)) || (m-s)/max(float32(math.Abs(float64(s))), m) > limit {
			continue
		}
		sum += exp(s - m)
	}
	return 1 / sum
}

func (b *Backend) group(o *kernels.SortByExpert, _ device.Access) error {
	ids, offsets, order := vector[int32](&o.IDs), vector[int32](&o.Offsets), vector[int32](&o.Order)
	if err := checkIndex(o.Name(), "IDs", ids, 0, len(offsets)-1); err != nil {
		return err
	}
	// Counting sort: count one place behind each expert's, sum up, place the pairs while the
	// starts advance to the ends, and shift these back by one.
	clear(offsets)
	for _, e := range ids {
		offsets[e+1]++
	}
	for e := 1; e < len(offsets); e++ {
		offsets[e] += offsets[e-1]
	}
	for p, e := range ids {
		order[offsets[e]] = int32(p)
		offsets[e]++
	}
	copy(offsets[1:], offsets[:len(offsets)-1])
	offsets[0] = 0
	return nil
}
