package harvest

import (
	"fmt"
	"slices"
	"sort"
)

// hole is a free stretch of a slab.
type hole struct{ off, bytes int64 }

// segments divides the bytes of one slab: pure accounts, best fit, coalescing.
type segments struct {
	bytes int64
	// holes are in the order of their offsets; between two of them something is
	// in use.
	holes []hole
	used  map[int64]int64 // bytes by offset
	// high is the end of everything that was ever handed out.
	high int64
}

func newSegments(bytes int64) segments {
	return segments{bytes: bytes, holes: []hole{{0, bytes}}, used: map[int64]int64{}}
}

// best returns the smallest hole that n bytes fit into, the first of equals.
func (s *segments) best(n int64) (hole, bool) {
	var found hole
	for _, h := range s.holes {
		if h.bytes >= n && (found.bytes == 0 || h.bytes < found.bytes) {
			found = h
		}
	}
	return found, found.bytes > 0
}

// at returns the hole that begins at off, if n bytes fit into it.
func (s *segments) at(off, n int64) (hole, bool) {
	i := s.search(off)
	if i == len(s.holes) || s.holes[i].off != off || s.holes[i].bytes < n {
		return hole{}, false
	}
	return s.holes[i], true
}

// search is the position of the first hole at off or behind it.
func (s *segments) search(off int64) int {
	return sort.Search(len(s.holes), func(i int) bool { return s.holes[i].off >= off })
}

// take takes the first n bytes of the hole at off.
func (s *segments) take(off, n int64) {
	h, ok := s.at(off, n)
	if !ok || n <= 0 {
		panic(fmt.Sprintf("harvest: no hole of %d bytes at %d", n, off))
	}
	i := s.search(off)
	if h.bytes == n {
		s.holes = slices.Delete(s.holes, i, i+1)
	} else {
		s.holes[i] = hole{off + n, h.bytes - n}
	}
	s.used[off] = n
	s.high = max(s.high, off+n)
}

// put gives back what take took at off, and joins it with the holes beside it.
func (s *segments) put(off int64) {
	n, ok := s.used[off]
	if !ok {
		panic(fmt.Sprintf("harvest: nothing is in use at %d", off))
	}
	delete(s.used, off)
	i := s.search(off)
	h := hole{off, n}
	if i < len(s.holes) && s.holes[i].off == h.off+h.bytes {
		h.bytes += s.holes[i].bytes
		s.holes = slices.Delete(s.holes, i, i+1)
	}
	if i > 0 && s.holes[i-1].off+s.holes[i-1].bytes == off {
		s.holes[i-1].bytes += h.bytes
		return
	}
	s.holes = slices.Insert(s.holes, i, h)
}

// room is what is free, and the largest hole.
func (s *segments) room() (free, largest int64) {
	for _, h := range s.holes {
		free += h.bytes
		largest = max(largest, h.bytes)
	}
	return free, largest
}

// fragmentation is the share of the free bytes that one request as large as all of
// them could not have: 0 where they lie in one piece.
func fragmentation(free, largest int64) float64 {
	if free == 0 {
		return 0
	}
	return 1 - float64(largest)/float64(free)
}
