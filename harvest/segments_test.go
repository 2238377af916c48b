package harvest

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestSegments compares with a map of bytes.
func TestSegments(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 40
		s := newSegments(size)
		var owner [size]int64 // 1 + offset of who has the byte
		runs := func() (holes []freeExtent) {
			for i := int64(0); i < size; i++ {
				if owner[i] != 0 {
					continue
				}
				if n := len(holes); n > 0 && holes[n-1].off+holes[n-1].bytes == i {
					holes[n-1].bytes++
				} else {
					holes = append(holes, freeExtent{i, 1})
				}
			}
			return holes
		}
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				n := rapid.Int64Range(1, 12).Draw(t, "bytes")
				h, ok := s.bestFit(n)
				for _, o := range runs() {
					if o.bytes >= n && (!ok || o.bytes < h.bytes || o.bytes == h.bytes && o.off < h.off) {
						t.Fatalf("best for %d is %v, and %v is better", n, h, o)
					}
				}
				if !ok {
					return
				}
				s.allocate(h.off, n)
				for i := range n {
					if owner[h.off+i] != 0 {
						t.Fatalf("byte %d is handed out twice", h.off+i)
					}
					owner[h.off+i] = 1 + h.off
				}
			},
			"put": func(t *rapid.T) {
				if len(s.used) == 0 {
					t.Skip("nothing is in use")
				}
				var offs []int64
				for off := range s.used {
					offs = append(offs, off)
				}
				slices.Sort(offs)
				off := rapid.SampledFrom(offs).Draw(t, "which")
				s.release(off)
				for i := range owner {
					if owner[i] == 1+off {
						owner[i] = 0
					}
				}
			},
			"": func(t *rapid.T) {
				want := runs()
				if !slices.Equal(s.free, want) {
					t.Fatalf("holes %v, want %v: not joined, or lost", s.free, want)
				}
				var free, largest int64
				for _, h := range want {
					free, largest = free+h.bytes, max(largest, h.bytes)
				}
				if f, l := s.freeBytes(); f != free || l != largest {
					t.Fatalf("room %d, %d, want %d, %d", f, l, free, largest)
				}
				for i := s.highWater; i < size; i++ {
					if owner[i] != 0 {
						t.Fatalf("byte %d is in use behind the high mark %d", i, s.highWater)
					}
				}
			},
		})
	})
}

func TestFragmentation(t *testing.T) {
	for _, c := range []struct {
		free, largest int64
		want          float64
	}{{0, 0, 0}, {100, 100, 0}, {100, 25, 0.75}} {
		if got := fragmentation(c.free, c.largest); got != c.want {
			t.Errorf("%d free, the largest extent %d: %g, want %g", c.free, c.largest, got, c.want)
		}
	}
}
