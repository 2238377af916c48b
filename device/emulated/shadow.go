package emulated

import (
	"slices"
	"sort"
)

// cell is the access state of a run of bytes. Cells are immutable and shared between runs.
type cell struct {
	// write is the last write, or nil if no write can conflict any more.
	write   *accessRecord
	written bool
	// reads since the last write, at most one per actor.
	reads []*accessRecord
}

var (
	quietWritten   = &cell{written: true}
	quietUnwritten = &cell{}
)

// withRead returns the cell with read d added. Reads that d knows of are dropped: an access
// ordered after d is ordered after them.
func (c *cell) withRead(d *accessRecord) *cell {
	reads := make([]*accessRecord, 0, len(c.reads)+1)
	for _, r := range c.reads {
		if r == d {
			return c
		}
		if !d.actor.known(r) {
			reads = append(reads, r)
		}
	}
	return &cell{write: c.write, written: c.written, reads: append(reads, d)}
}

// without returns the cell less the accesses known to all.
func (c *cell) without(all vclock) *cell {
	n := cell{written: c.written}
	if c.write != nil && c.write.at > all.at(c.write.id) {
		n.write = c.write
	}
	for _, r := range c.reads {
		if r.at > all.at(r.id) {
			n.reads = append(n.reads, r)
		}
	}
	switch {
	case n.write == nil && n.reads == nil && n.written:
		return quietWritten
	case n.write == nil && n.reads == nil:
		return quietUnwritten
	case n.write == c.write && len(n.reads) == len(c.reads):
		return c
	}
	return &n
}

// run is the bytes [lo, hi) of an allocation.
type run struct {
	lo, hi int64
	*cell
}

// shadow covers an allocation with runs, in order and without gaps.
type shadow struct {
	runs    []run
	scratch []run
	cells   map[*cell]*cell
}

func newShadow(bytes int64) *shadow {
	return &shadow{runs: []run{{0, bytes, quietUnwritten}}, cells: map[*cell]*cell{}}
}

// from returns the index of the run that contains byte lo.
func (s *shadow) from(lo int64) int {
	return sort.Search(len(s.runs), func(i int) bool { return s.runs[i].hi > lo })
}

// each visits the parts of runs within [lo, hi).
func (s *shadow) each(lo, hi int64, f func(lo, hi int64, c *cell)) {
	for i := s.from(lo); i < len(s.runs) && s.runs[i].lo < hi; i++ {
		f(max(lo, s.runs[i].lo), min(hi, s.runs[i].hi), s.runs[i].cell)
	}
}

// update replaces each cell within [lo, hi) by the result of f, which is called once per
// distinct cell; its result is used for all runs of that cell.
func (s *shadow) update(lo, hi int64, f func(lo, hi int64, old *cell) *cell) {
	first := s.from(lo)
	out := s.scratch[:0]
	add := func(lo, hi int64, c *cell) {
		if n := len(out); n > 0 && out[n-1].cell == c {
			out[n-1].hi = hi
		} else if lo < hi {
			out = append(out, run{lo, hi, c})
		}
	}
	// Neighboring runs are included, so that equal adjacent runs merge.
	if first > 0 {
		first--
	}
	i := first
	for ; i < len(s.runs); i++ {
		r := s.runs[i]
		if r.lo > hi {
			break
		}
		l, h := max(lo, r.lo), min(hi, r.hi)
		if l >= h {
			add(r.lo, r.hi, r.cell)
			continue
		}
		now, ok := s.cells[r.cell]
		if !ok {
			now = f(l, h, r.cell)
			s.cells[r.cell] = now
		}
		add(r.lo, l, r.cell)
		add(l, h, now)
		add(h, r.hi, r.cell)
	}
	clear(s.cells)
	s.runs = slices.Replace(s.runs, first, i, out...)
	s.scratch = out[:0]
}
