package load

import (
	"fmt"
	"math/bits"
	"sync"

	"github.com/moeserve/moeserve/kernels"
)

// id names an expert by the position of its layer.
type id struct{ layer, expert int }

// coverage records which rows of every expert's matrices were received.
type coverage struct {
	rows [3]int // by part

	mu          sync.Mutex
	received    map[id]*[3][]uint64 // bit sets of rows, by part
	missingRows int64               // total
}

func newCoverage(shape kernels.ExpertShape, experts int) *coverage {
	c := &coverage{received: map[id]*[3][]uint64{}}
	for p := range c.rows {
		c.rows[p] = Rows(shape, kernels.Part(p))
		c.missingRows += int64(experts) * int64(c.rows[p])
	}
	return c
}

// Rows is how many rows a part has.
func Rows(s kernels.ExpertShape, p kernels.Part) int {
	if p == kernels.W2 {
		return s.Hidden
	}
	return s.Intermediate
}

// RowBytes is the size of one row of a part.
func RowBytes(s kernels.ExpertShape, p kernels.Part) int {
	if p == kernels.W2 {
		return s.Intermediate * s.DType.Size()
	}
	return s.Hidden * s.DType.Size()
}

// add records rows [from, from+n) as received. It fails if one of them was received
// before.
func (c *coverage) add(of id, part kernels.Part, from, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sets := c.received[of]
	if sets == nil {
		sets = new([3][]uint64)
		c.received[of] = sets
	}
	if sets[part] == nil {
		sets[part] = make([]uint64, (c.rows[part]+63)/64)
	}
	set := sets[part]
	for row := from; row < from+n; row++ {
		if set[row/64]&(1<<(row%64)) != 0 {
			return fmt.Errorf("row %d of %v was received twice", row, part)
		}
	}
	for row := from; row < from+n; row++ {
		set[row/64] |= 1 << (row % 64)
	}
	c.missingRows -= int64(n)
	return nil
}

// missing is an error about the first incomplete part, by layer and expert; nil if there
// is none.
func (c *coverage) missing(layers []int, experts int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.missingRows == 0 {
		return nil
	}
	for l, layer := range layers {
		for e := range experts {
			for p, rows := range c.rows {
				have := 0
				if sets := c.received[id{l, e}]; sets != nil {
					for _, w := range sets[p] {
						have += bits.OnesCount64(w)
					}
				}
				if have < rows {
					return fmt.Errorf("experts: layer %d expert %d: received only %d of %d rows of %v (%d rows are missing in total)", layer, e, have, rows, kernels.Part(p), c.missingRows)
				}
			}
		}
	}
	panic(fmt.Sprintf("experts: %d rows are missing, but every part is complete", c.missingRows))
}
