//go:build simulate

package node_test

func init() {
	shiftSplits = []int{64, 80, 96, 112, 128, 144, 160, 172}
	shiftLeast = []int{64, 96}
}
