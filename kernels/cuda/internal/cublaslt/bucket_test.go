package cublaslt

import (
	"slices"
	"testing"
)

func TestBucket(t *testing.T) {
	for rows, want := range map[int]int{1: 1, 2: 2, 3: 4, 64: 64, 65: 72, 81: 88, 324: 328, 512: 512, 513: 1024, 4536: 4608} {
		if got := bucket(rows); got != want {
			t.Errorf("%d rows are in bucket %d, want %d", rows, got, want)
		}
	}
}

func TestBuckets(t *testing.T) {
	for most, want := range map[int][]int{1: {1}, 3: {1, 2, 3}, 64: {1, 2, 4, 8, 16, 32, 64}, 75: {1, 2, 4, 8, 16, 32, 64, 72, 75}, 1100: nil} {
		if want == nil { // seven up to 64, and one for every eight up to 512
			if got := Buckets(most); len(got) != 7+56+2 || !slices.Equal(got[len(got)-3:], []int{512, 1024, most}) {
				t.Errorf("up to %d rows: %v", most, got)
			}
			continue
		}
		if got := Buckets(most); !slices.Equal(got, want) {
			t.Errorf("up to %d rows: %v, want %v", most, got, want)
		}
	}
}
