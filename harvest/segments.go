package harvest

import (
	"fmt"
	"slices"
	"sort"
)

// freeExtent is a contiguous free range of a slab.
type freeExtent struct{ off, bytes int64 }

// segments divides the bytes of one slab: a pure allocator, best fit, coalescing.
type segments struct {
	bytes int64
	// free extents by offset; between two of them a segment is in use.
	free []freeExtent
	used map[int64]int64 // bytes by offset
	// highWater is the highest end of a segment so far.
	highWater int64
}

func newSegments(bytes int64) segments {
	return segments{bytes: bytes, free: []freeExtent{{0, bytes}}, used: map[int64]int64{}}
}

// bestFit returns the smallest free extent of at least n bytes, the first of equals.
func (s *segments) bestFit(n int64) (freeExtent, bool) {
	var found freeExtent
	for _, h := range s.free {
		if h.bytes >= n && (found.bytes == 0 || h.bytes < found.bytes) {
			found = h
		}
	}
	return found, found.bytes > 0
}

// freeAt returns the free extent at off, if it has at least n bytes.
func (s *segments) freeAt(off, n int64) (freeExtent, bool) {
	i := s.search(off)
	if i == len(s.free) || s.free[i].off != off || s.free[i].bytes < n {
		return freeExtent{}, false
	}
	return s.free[i], true
}

// search is the index of the first free extent at or behind off.
func (s *segments) search(off int64) int {
	return sort.Search(len(s.free), func(i int) bool { return s.free[i].off >= off })
}

// allocate allocates the first n bytes of the free extent at off.
func (s *segments) allocate(off, n int64) {
	h, ok := s.freeAt(off, n)
	if !ok || n <= 0 {
		panic(fmt.Sprintf("harvest: no free extent of %d bytes at %d", n, off))
	}
	i := s.search(off)
	if h.bytes == n {
		s.free = slices.Delete(s.free, i, i+1)
	} else {
		s.free[i] = freeExtent{off + n, h.bytes - n}
	}
	s.used[off] = n
	s.highWater = max(s.highWater, off+n)
}

// release frees the segment at off, and merges it with adjacent free extents.
func (s *segments) release(off int64) {
	n, ok := s.used[off]
	if !ok {
		panic(fmt.Sprintf("harvest: no segment at %d", off))
	}
	delete(s.used, off)
	i := s.search(off)
	h := freeExtent{off, n}
	if i < len(s.free) && s.free[i].off == h.off+h.bytes {
		h.bytes += s.free[i].bytes
		s.free = slices.Delete(s.free, i, i+1)
	}
	if i > 0 && s.free[i-1].off+s.free[i-1].bytes == off {
		s.free[i-1].bytes += h.bytes
		return
	}
	s.free = slices.Insert(s.free, i, h)
}

// freeBytes is the number of free bytes, and the largest free extent.
func (s *segments) freeBytes() (free, largest int64) {
	for _, h := range s.free {
		free += h.bytes
		largest = max(largest, h.bytes)
	}
	return free, largest
}

// fragmentation is the fraction of the free bytes outside the largest free extent.
func fragmentation(free, largest int64) float64 {
	if free == 0 {
		return 0
	}
	return 1 - float64(largest)/float64(free)
}
