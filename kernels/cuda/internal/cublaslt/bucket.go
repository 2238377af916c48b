package cublaslt

import "math/bits"

// bucket rounds a number of rows up to those for which algorithms are chosen.
func bucket(rows int) int {
	switch {
	case rows <= 64:
		return 1 << bits.Len(uint(rows-1))
	case rows <= 512:
		return (rows + 7) / 8 * 8
	}
	return (rows + 511) / 512 * 512
}

// Buckets are numbers of rows up to most, one for each choice of an algorithm.
func Buckets(most int) []int {
	var rows []int
	for n := 1; n <= most; n = bucket(n) + 1 {
		rows = append(rows, min(bucket(n), most))
	}
	return rows
}
