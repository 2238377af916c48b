package cublaslt

import (
	"slices"
	"testing"
)

func TestBucket(t *testing.T) {
	for rows, want := range map[int]int{1: 1, 2: 2, 3: 4, 64: 64, 65: 96, 81: 96, 324: 352, 512: 512, 513: 1024, 4536: 4608} {
		if got := bucket(rows); got != want {
			t.Errorf("%d rows are in bucket %d, want %d", rows, got, want)
		}
	}
}

func TestBuckets(t *testing.T) {
	for most, want := range map[int][]int{1: {1}, 3: {1, 2, 3}, 64: {1, 2, 4, 8, 16, 32, 64}, 1100: {1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448, 480, 512, 1024, 1100}} {
		if got := Buckets(most); !slices.Equal(got, want) {
			t.Errorf("up to %d rows: %v, want %v", most, got, want)
		}
	}
}
