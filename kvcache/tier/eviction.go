package tier

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/kvcache"
)

// Eviction decides which blocks of a tier make room for others. Its caller is a Manager, which
// knows which blocks there are and in what state; a policy knows their order.
//
// The policy has a block from its Insert to its Remove or eviction. Evictable blocks are those
// of which the last SetEvictable said true.
type Eviction interface {
	// Insert adds a block that a store begins to fill. It is not evictable.
	Insert(id int32, k kvcache.Key)
	// SetEvictable says that the block became ready, or its last load has ended (true), or that
	// its first load begins (false).
	SetEvictable(id int32, evictable bool)
	// Touch reports a use of a key: id is its block, or -1 for a Miss.
	Touch(id int32, k kvcache.Key, s State)
	// Remove removes a block, evictable or not, which the tier lost or whose store failed.
	Remove(id int32)
	// Evict removes n evictable blocks of which keep is false, appends them to victims in the
	// order of eviction, and returns true. Its caller has checked that there are as many. A
	// policy may refuse nevertheless: then it removes none and returns false.
	Evict(victims []int32, n int, keep func(id int32) bool) ([]int32, bool)
}

// The built-in eviction policies of Options.Policy.
const (
	PolicyLRU = "lru"
	PolicyARC = "arc"
)

// policies are the constructors of eviction policies by name.
var policies = struct {
	sync.Mutex
	by map[string]func(blocks int) Eviction
}{by: map[string]func(int) Eviction{
	PolicyLRU: func(blocks int) Eviction { return NewLRU(blocks) },
	PolicyARC: func(blocks int) Eviction { return NewARC(blocks) },
}}

// RegisterPolicy adds an eviction policy, which Options.Policy then selects. construct makes that of
// a tier of so many blocks, with none in use. It panics if there is one of that name.
func RegisterPolicy(name string, construct func(blocks int) Eviction) {
	policies.Lock()
	defer policies.Unlock()
	if name == "" || policies.by[name] != nil {
		panic(fmt.Sprintf("tier: eviction policy %q is registered twice, or has no name", name))
	}
	policies.by[name] = construct
}

// Policies are the names of the eviction policies, in alphabetical order.
func Policies() []string {
	policies.Lock()
	defer policies.Unlock()
	return slices.Sorted(maps.Keys(policies.by))
}

// LRU evicts the block first that has been evictable and untouched for the longest time. Only
// evictable blocks have a place in its order: a block that becomes evictable comes last, and
// touching another one does nothing.
type LRU struct {
	order     list
	evictable []bool
}

// NewLRU returns the policy of a tier of so many blocks.
func NewLRU(blocks int) *LRU {
	return &LRU{order: newList(blocks), evictable: make([]bool, blocks)}
}

// Insert implements Eviction.
func (l *LRU) Insert(id int32, _ kvcache.Key) { l.evictable[id] = false }

// SetEvictable implements Eviction.
func (l *LRU) SetEvictable(id int32, evictable bool) {
	if l.evictable[id] = evictable; evictable {
		l.order.pushBack(id)
	} else {
		l.order.remove(id)
	}
}

// Touch implements Eviction.
func (l *LRU) Touch(id int32, _ kvcache.Key, s State) {
	if s == Hit && l.evictable[id] {
		l.order.remove(id)
		l.order.pushBack(id)
	}
}

// Remove implements Eviction.
func (l *LRU) Remove(id int32) {
	if l.evictable[id] {
		l.SetEvictable(id, false)
	}
}

// Evict implements Eviction. It fails only where there are too few blocks.
func (l *LRU) Evict(victims []int32, n int, keep func(id int32) bool) ([]int32, bool) {
	from := len(victims)
	for id := l.order.first(); len(victims)-from < n; id = l.order.next(id) {
		if id == l.order.end() {
			return victims[:from], false
		}
		if !keep(id) {
			victims = append(victims, id)
		}
	}
	for _, id := range victims[from:] {
		l.SetEvictable(id, false)
	}
	return victims, true
}

// list is a doubly linked list of numbers below a limit, each in it once at most.
type list struct {
	// The links of a circle; the last element of the slices stands for the list's end.
	before, after []int32
}

func newList(limit int) list {
	l := list{before: make([]int32, limit+1), after: make([]int32, limit+1)}
	l.before[limit], l.after[limit] = int32(limit), int32(limit)
	return l
}

func (l *list) end() int32          { return int32(len(l.after) - 1) }
func (l *list) first() int32        { return l.after[l.end()] }
func (l *list) next(id int32) int32 { return l.after[id] }
func (l *list) link(a, b int32)     { l.after[a], l.before[b] = b, a }
func (l *list) remove(id int32)     { l.link(l.before[id], l.after[id]) }
func (l *list) pushBack(id int32) {
	l.link(l.before[l.end()], id)
	l.link(id, l.end())
}
