package multipath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Roots are the sets of links that do not add up.
type Roots struct {
	Sets []Root `json:"sets"`
}

// Root is links that share what is behind them: a PCIe switch, a root port, the host's memory.
type Root struct {
	Direction Direction `json:"direction"`
	GPUs      []string  `json:"gpus"`
	// BytesPerSecond is what they reach together, Alone the sum of what each reaches alone.
	BytesPerSecond float64 `json:"bytes_per_s"`
	Alone          float64 `json:"alone_bytes_per_s"`
}

// root is links, by their numbers, and their rate together.
type root struct {
	links []int
	rate  float64
}

const (
	// addsUp is the part of the rate that is expected of links at which they count as
	// independent: what links reach varies by a few per cent.
	addsUp = 0.9
	// maxSets bounds how many sets of links are measured: all of 8 links are 247.
	maxSets = 300
)

// errTooManySets: the links are too many for all of their sets to be measured.
var errTooManySets = errors.New("too many sets of links")

// findRoots finds the sets of links that do not add up: alone is the rate of each link, together
// that of a set of several at once. Roots are nested or disjoint. It goes by the size of sets, so
// the first set that is slower than the roots found so far explain is a smallest one, and all of
// its links share one root. Others share it if they can take the place of one of them.
func findRoots(alone []float64, together func(set []int) (float64, error)) ([]root, error) {
	all := make([]int, len(alone))
	for i := range all {
		all[i] = i
	}
	if len(all) < 2 {
		return nil, nil
	}
	var roots []root
	known := map[string]float64{}
	rate := func(set []int) (float64, error) {
		key := fmt.Sprint(set)
		if v, ok := known[key]; ok {
			return v, nil
		}
		if len(known) >= maxSets {
			return 0, errTooManySets
		}
		v, err := together(set)
		known[key] = v
		return v, err
	}
	slow := func(set []int) (bool, error) {
		v, err := rate(set)
		return v < addsUp*expected(alone, roots, set), err
	}
	// members are those of a slow set without whom less is missing to what is expected; so
	// little may be missing that sets without one of them do not count as slow.
	members := func(set []int) ([]int, error) {
		missing := func(set []int) (float64, error) {
			v, err := rate(set)
			return expected(alone, roots, set) - v, err
		}
		all, err := missing(set)
		if err != nil || len(set) == 2 {
			return set, err
		}
		var kept []int
		for i, x := range set {
			without, err := missing(slices.Delete(slices.Clone(set), i, i+1))
			if err != nil {
				return nil, err
			}
			if without < all-min(alone[x], all)/2 {
				kept = append(kept, x)
			}
		}
		if len(kept) < 2 {
			return set, nil
		}
		return kept, nil
	}
	// replaces: with j in the place of one of the set, it is as slow. Behind a root of their own,
	// some of the set may be too slow for it.
	replaces := func(set []int, j int) (bool, error) {
		of, err := rate(set)
		if err != nil {
			return false, err
		}
		for i := range set {
			other := slices.Clone(set)
			other[i] = j
			slices.Sort(other)
			found, err := slow(other)
			if err != nil {
				return false, err
			}
			if v := known[fmt.Sprint(other)]; found && v > addsUp*of && of > addsUp*v {
				return true, nil
			}
		}
		return false, nil
	}
	search := func() error {
		for n := 2; n <= len(all); n++ {
			for set := range subsets(all, n) {
				if more, err := slow(all); err != nil || !more {
					return err // all is explained
				}
				found, err := slow(set)
				if err != nil {
					return err
				}
				if !found {
					continue
				}
				if set, err = members(set); err != nil {
					return err
				}
				r := root{links: slices.Clone(set)}
				for _, j := range all {
					if slices.Contains(set, j) {
						continue
					}
					shares, err := replaces(set, j)
					if err != nil {
						return err
					}
					if shares {
						r.links = append(r.links, j)
					}
				}
				// Roots that overlap are one.
				roots = slices.DeleteFunc(roots, func(known root) bool {
					joined := overlap(known.links, r.links)
					if joined {
						r.links = append(r.links, known.links...)
					}
					return joined
				})
				slices.Sort(r.links)
				r.links = slices.Compact(r.links)
				if r.rate, err = rate(r.links); err != nil {
					return err
				}
				roots = append(roots, r)
			}
		}
		return nil
	}
	err := search()
	if errors.Is(err, errTooManySets) {
		// What all reach together bounds every set of them.
		v, err := together(all)
		return append(roots, root{links: all, rate: v}), err
	}
	return roots, err
}

// overlap: two sets have common links, and neither has all of the other's.
func overlap(a, b []int) bool {
	common := 0
	for _, x := range a {
		if slices.Contains(b, x) {
			common++
		}
	}
	return common > 0 && common < len(a) && common < len(b)
}

// expected is the rate of a set of links at once: alone, bounded by each root on the way.
func expected(alone []float64, roots []root, set []int) float64 {
	// From small roots to those that they are behind.
	sorted := slices.SortedStableFunc(slices.Values(roots), func(a, b root) int { return len(a.links) - len(b.links) })
	type group struct {
		links []int
		rate  float64
	}
	var groups []group
	for _, i := range set {
		groups = append(groups, group{[]int{i}, alone[i]})
	}
	for _, r := range sorted {
		joined := group{}
		groups = slices.DeleteFunc(groups, func(g group) bool {
			inside := slices.Contains(r.links, g.links[0])
			if inside {
				joined.links, joined.rate = append(joined.links, g.links...), joined.rate+g.rate
			}
			return inside
		})
		if len(joined.links) > 0 {
			joined.rate = min(joined.rate, r.rate)
			groups = append(groups, joined)
		}
	}
	total := 0.0
	for _, g := range groups {
		total += g.rate
	}
	return total
}

// subsets are those of n of all, in their order.
func subsets(all []int, n int) func(yield func([]int) bool) {
	return func(yield func([]int) bool) {
		at := make([]int, n)
		for i := range at {
			at[i] = i
		}
		for {
			set := make([]int, n)
			for i, x := range at {
				set[i] = all[x]
			}
			if !yield(set) {
				return
			}
			i := n - 1
			for i >= 0 && at[i] == len(all)-n+i {
				i--
			}
			if i < 0 {
				return
			}
			at[i]++
			for i++; i < n; i++ {
				at[i] = at[i-1] + 1
			}
		}
	}
}

// Sets of links are many, so each is measured with fewer copies and rounds than a link.
const (
	setCopies = 8
	setRounds = 3
)

// rootsFlows are the flows of a set of GPUs' own copies.
func (r *rig) rootsFlows(d Direction, set ...int) ([]flow, error) {
	var flows []flow
	for _, i := range set {
		f, err := r.own(i, d)
		if err != nil {
			return nil, err
		}
		f.copies = setCopies
		flows = append(flows, f)
	}
	return flows, nil
}

// roots measures which links share a root, in each direction. There is no entry where all add up.
func (r *rig) roots(ctx context.Context) (*Roots, error) {
	gpus := r.o.gpus()
	found := &Roots{}
	for _, d := range directions {
		var singles []*cell
		for i := range gpus {
			flows, err := r.rootsFlows(d, i)
			if err != nil {
				return nil, err
			}
			singles = append(singles, r.flowCell(flows))
		}
		if err := r.measure(ctx, RootsPart, min(r.o.Rounds, setRounds), singles); err != nil {
			return nil, err
		}
		alone := make([]float64, len(gpus))
		for i, c := range singles {
			alone[i] = c.median(0)
		}
		roots, err := findRoots(alone, func(set []int) (float64, error) {
			flows, err := r.rootsFlows(d, set...)
			if err != nil {
				return 0, err
			}
			c := r.flowCell(flows)
			if err := r.measure(ctx, RootsPart, min(r.o.Rounds, setRounds), []*cell{c}); err != nil {
				return 0, err
			}
			return sum(c.medians()), nil
		})
		if err != nil {
			return nil, err
		}
		for _, x := range roots {
			y := Root{Direction: d, BytesPerSecond: x.rate}
			for _, i := range x.links {
				y.GPUs = append(y.GPUs, gpus[i].String())
				y.Alone += alone[i]
			}
			found.Sets = append(found.Sets, y)
		}
	}
	return found, nil
}

func (r *Roots) table(b *strings.Builder) {
	for _, d := range directions {
		any := false
		for _, x := range r.Sets {
			if x.Direction == d {
				any = true
				fmt.Fprintf(b, "%s: %s share a root: %s GB/s together, %s one at a time\n", d.words(), strings.Join(x.GPUs, ", "), gb(x.BytesPerSecond), gb(x.Alone))
			}
		}
		if !any {
			fmt.Fprintf(b, "%s: no links share a root: all add up\n", d.words())
		}
	}
	b.WriteString("\n")
}
