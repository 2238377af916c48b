package experts

import (
	"fmt"
	"math"
	"slices"
)

// ID names an expert: the position of its layer among the layers with experts, and its
// number in the layer.
type ID struct{ Layer, Expert int }

// Placement lists the offloaded experts of each layer with experts, ascending.
type Placement [][]int

// Place offloads round(fraction * layers * experts) experts, spread evenly over layers
// (their counts differ by at most one) and over the ids of a layer.
func Place(layers, experts int, fraction float64) (Placement, error) {
	if layers < 0 || experts < 0 {
		return nil, fmt.Errorf("experts: %d layers of %d experts", layers, experts)
	}
	if !(fraction >= 0 && fraction <= 1) { // also refuses NaN
		return nil, fmt.Errorf("experts: offload fraction %v is not in [0, 1]", fraction)
	}
	total := int(math.Round(fraction * float64(layers*experts)))
	p := make(Placement, layers)
	for l := range p {
		p[l] = spread(share(l, layers, total), experts)
	}
	return p, nil
}

// PlaceResident offloads all experts except those listed.
func PlaceResident(layers, experts int, resident []ID) (Placement, error) {
	p, err := byLayer(layers, experts, resident)
	if err != nil {
		return nil, err
	}
	for l := range p {
		var others []int
		for e := range experts {
			if _, found := slices.BinarySearch(p[l], e); !found {
				others = append(others, e)
			}
		}
		p[l] = others
	}
	return p, nil
}

// byLayer groups a list of experts by layer, ascending. Duplicates are an error.
func byLayer(layers, experts int, ids []ID) (Placement, error) {
	p := make(Placement, layers)
	for _, id := range ids {
		if id.Layer < 0 || id.Layer >= layers || id.Expert < 0 || id.Expert >= experts {
			return nil, fmt.Errorf("experts: no expert %d in layer %d: the model has %d layers of %d experts", id.Expert, id.Layer, layers, experts)
		}
		p[id.Layer] = append(p[id.Layer], id.Expert)
	}
	for l := range p {
		slices.Sort(p[l])
		if len(slices.Compact(slices.Clone(p[l]))) != len(p[l]) {
			return nil, fmt.Errorf("experts: an expert of layer %d is listed twice", l)
		}
	}
	return p, nil
}

// share is how many of total fall to part i of n when they are spread evenly.
func share(i, n, total int) int { return (i+1)*total/n - i*total/n }

// spread selects n of [0, of), evenly spaced, ascending.
func spread(n, of int) []int {
	ids := make([]int, 0, n)
	for e := range of {
		if share(e, of, n) > 0 {
			ids = append(ids, e)
		}
	}
	return ids
}

// Offloaded is the total number of offloaded experts.
func (p Placement) Offloaded() int {
	n := 0
	for _, l := range p {
		n += len(l)
	}
	return n
}

// MaxPerLayer is the largest number of offloaded experts in one layer.
func (p Placement) MaxPerLayer() int {
	n := 0
	for _, l := range p {
		n = max(n, len(l))
	}
	return n
}
