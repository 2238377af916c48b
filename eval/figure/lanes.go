package figure

import (
	"cmp"
	"slices"
)

// flag is where the name of a vertical line stands: from left to right, in a lane
// counted from the plot upwards. The line reaches up to the top of its lane.
type flag struct {
	left, right float64
	lane        int
}

const (
	flagGap     = 4 // between a line and its name, and between names of a lane
	lineRoom    = 3 // that a line keeps from other lines' names
	maxSearched = 7 // names whose sides are searched for
)

// flags places the names of vertical lines at the positions at, widths wide, between
// from and to, in as few lanes as there can be: each name right of its line, left of it,
// or above its end, so that no two names overlap and no line runs through a name. No
// width may exceed to-from. The same input gives the same placement. Of more names than
// maxSearched each has a lane of its own, and lines may run through names.
func flags(at, widths []float64, from, to float64) []flag {
	n := len(at)
	if n == 0 {
		return nil
	}
	if n > maxSearched {
		return stairs(at, widths, from, to)
	}
	var best []flag
	bestCost := 0
	sides := make([]int, n)
	for {
		if f, cost, ok := onSides(at, widths, from, to, sides); ok && (best == nil || cost < bestCost) {
			best, bestCost = f, cost
		}
		i := 0
		for ; i < n; i++ {
			if sides[i]++; sides[i] < sideCount {
				break
			}
			sides[i] = 0
		}
		if i == n {
			break
		}
	}
	if best == nil {
		return stairs(at, widths, from, to)
	}
	return best
}

// The sides of a line that its name can stand on.
const (
	rightOf = iota
	leftOf
	above
	sideCount
)

// span is a name on a side of its line, and false where that would reach over an edge.
func span(at, width, from, to float64, side int) (flag, bool) {
	var left float64
	switch side {
	case rightOf:
		left = at + flagGap
	case leftOf:
		left = at - flagGap - width
	default:
		left = max(from, min(at-width/2, to-width))
	}
	return flag{left: left, right: left + width}, left >= from && left+width <= to
}

// onSides puts names, each on its side, into the lowest lanes that they can have. The
// cost counts lanes above all, then names above their line, then names on its left.
func onSides(at, widths []float64, from, to float64, sides []int) (_ []flag, cost int, ok bool) {
	n := len(at)
	f := make([]flag, n)
	for i := range f {
		if f[i], ok = span(at[i], widths[i], from, to, sides[i]); !ok {
			return nil, 0, false
		}
		cost += []int{rightOf: 0, leftOf: 1, above: 10}[sides[i]]
		f[i].lane = -1
	}
	lanes := 0
	for range n {
		next := lowest(f, at)
		if next < 0 {
			return nil, 0, false
		}
		x := &f[next]
		lane := 0
		for j := range f {
			if j != next && x.crosses(at[j]) {
				lane = max(lane, f[j].lane+1)
			}
		}
		for slices.ContainsFunc(f, func(y flag) bool { return y.lane == lane && x.overlaps(y) }) {
			lane++
		}
		x.lane = lane
		lanes = max(lanes, lane+1)
	}
	return f, cost + 1000*lanes, true
}

// lowest is the first name without a lane that crosses only lines whose names have one,
// and -1 where no name is left of which that holds: names that each cross the other's line cannot be placed.
func lowest(f []flag, at []float64) int {
next:
	for i := range f {
		if f[i].lane >= 0 {
			continue
		}
		for j := range f {
			if j != i && f[j].lane < 0 && f[i].crosses(at[j]) {
				continue next
			}
		}
		return i
	}
	return -1
}

// stairs gives each name a lane of its own, those further right the higher ones.
func stairs(at, widths []float64, from, to float64) []flag {
	f := make([]flag, len(at))
	order := make([]int, len(at))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(at[a], at[b]) })
	for lane, i := range order {
		var ok bool
		if f[i], ok = span(at[i], widths[i], from, to, leftOf); !ok {
			f[i], _ = span(at[i], widths[i], from, to, above)
		}
		f[i].lane = lane
	}
	return f
}

// crosses reports whether a line at x would run through the name, or close by.
func (f flag) crosses(x float64) bool { return x > f.left-lineRoom && x < f.right+lineRoom }

func (f flag) overlaps(g flag) bool { return f.left < g.right+flagGap && g.left < f.right+flagGap }
