package kvcache

// Policy orders the free blocks whose content can still be matched. A Manager calls
// it; NewLRU makes one.
type Policy interface {
	// Add takes in a block that became free.
	Add(block int32)
	// Remove takes out a block that is used again for what it holds.
	Remove(block int32)
	// Victim takes out the block whose content is given up next. There is one.
	Victim() int32
}

// LRU gives up the least recently freed block first. It allocates nothing after
// NewLRU.
type LRU struct {
	// The blocks are a ring of links, in order from the one behind the last entry,
	// which stands for no block.
	before, after []int32
}

// NewLRU orders the blocks [0, blocks), of which it has none so far.
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
