//go:build simulate

package rebalancer_test

func init() {
	shiftCases = append(shiftCases, []shiftCase{
		{6, 1.2, []int{48}, 0.25e9},
		{6, 1.2, []int{60, 60}, 0.25e9},
		{6, 1.2, []int{60, 60}, 8e9},
		{6, 1.2, []int{100, 80, 60}, 0.5e9},
		{1, 1.2, []int{60, 60}, 1e9},
	}...)
	sharedParts = []int{0, 1, 2, 3, 4, 5, 6, 7, 8}
}
