package kvcache

// Policy decides the order in which free blocks with a key are evicted. Its caller is a
// Manager. NewLRU returns one.
type Policy interface {
	// Add adds a block that became free.
	Add(block int32)
	// Remove removes a block that a sequence matched and uses again.
	Remove(block int32)
	// Victim removes and returns the next block to evict. Its caller has checked that
	// there is one.
	Victim() int32
}

// LRU evicts the least recently released block first. It does not allocate memory after
// NewLRU.
type LRU struct {
	// A circular doubly linked list in order of release. The last element of the
	// slices is its head and stands for no block.
	before, after []int32
}

// NewLRU returns an empty policy for block ids [0, blocks).
func NewLRU(blocks int) *LRU {
	l := &LRU{before: make([]int32, blocks+1), after: make([]int32, blocks+1)}
	l.before[blocks], l.after[blocks] = int32(blocks), int32(blocks)
	return l
}

func (l *LRU) head() int32 { return int32(len(l.after) - 1) }

// Add implements Policy.
func (l *LRU) Add(block int32) {
	head := l.head()
	last := l.before[head]
	l.before[block], l.after[block] = last, head
	l.after[last], l.before[head] = block, block
}

// Remove implements Policy.
func (l *LRU) Remove(block int32) {
	l.after[l.before[block]], l.before[l.after[block]] = l.after[block], l.before[block]
}

// Victim implements Policy.
func (l *LRU) Victim() int32 {
	first := l.after[l.head()]
	l.Remove(first)
	return first
}
