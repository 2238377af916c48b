package grammar

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// maxStack is the maximum depth of rules within rules, and so of values of JSON within others, of which parsers take
	// about as many. Text that would need more is not of the grammar.
	maxStack = 1 << 13
	// maxConfigs is the maximum number of configurations of a state. A grammar that is ambiguous beyond it loses some of
	// its texts.
	maxConfigs = 1 << 12
	// maxStates is the number of states that are kept, maxKept that of their configurations and frames, and maxMaskBytes
	// the bytes of masks.
	maxStates    = 1 << 15
	maxKept      = 1 << 20
	maxMaskBytes = 64 << 20
	// maxMaskWork is the number of configurations that one mask may look at, which takes some tenths of a second. Masks of
	// schemas and published tokenizers look at some thousands.
	maxMaskWork = 1 << 20
)

// frame is a stack: the node to return to, and the stack below. Equal stacks are one frame.
type frame struct {
	to    int32
	depth int32
	id    uint32
	below *frame
}

// unknown is the stack below a node that is looked at alone: a rule that ends there leaves it.
var unknown = &frame{to: -1}

// config is a node whose edges read the next byte, and the stack to return to; nil: the text ends with the rule.
type config struct {
	node  int32
	stack *frame
}

// state is what has been read so far.
type state struct {
	configs []config
	// ends: the text may end here or, over an unknown stack, the rule.
	ends bool
	// next by class of bytes; nil: not computed yet.
	next []atomic.Pointer[state]
	mask atomic.Pointer[mask]
}

// automaton makes states.
type automaton struct {
	nodes []node
	// class of each byte: bytes of a class are never told apart. sample is one byte of each.
	class  [256]uint8
	sample []byte
	dead   *state

	mu     sync.Mutex
	states map[string]*state
	frames map[frameKey]*frame
	lastID uint32
	// first is the state before the text.
	first *state
	// flushes counts how often all was dropped.
	flushes int
	// kept counts the configurations and frames of states.
	kept int
	// The memory of closures.
	seen map[config]struct{}
	work []config
	key  []byte
}

type frameKey struct {
	to    int32
	below *frame
}

func newAutomaton(nodes []node) *automaton {
	a := &automaton{nodes: nodes, seen: map[config]struct{}{}}
	var bounds [257]bool
	for i := range nodes {
		for _, e := range nodes[i].edges {
			bounds[e.lo], bounds[int(e.hi)+1] = true, true
		}
	}
	class := -1
	for b := range 256 {
		if b == 0 || bounds[b] {
			class++
			a.sample = append(a.sample, byte(b))
		}
		a.class[b] = uint8(class)
	}
	a.dead = &state{next: make([]atomic.Pointer[state], len(a.sample))}
	for i := range a.dead.next {
		a.dead.next[i].Store(a.dead)
	}
	a.flush()
	return a
}

// flush drops all states. Those that are in use stay as they are.
func (a *automaton) flush() {
	a.states, a.frames = map[string]*state{}, map[frameKey]*frame{}
	a.first = nil
	a.kept = 0
	a.flushes++
}

// start is the state before the text.
func (a *automaton) start() *state {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.first == nil {
		a.first = a.state([]config{{0, nil}})
	}
	return a.first
}

// alone is the state of a node whose stack is not known.
func (a *automaton) alone(n int32) *state {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.intern([]config{{n, unknown}}, false)
}

// step is the state after a byte.
func (a *automaton) step(s *state, b byte) *state {
	class := a.class[b]
	if t := s.next[class].Load(); t != nil {
		return t
	}
	t, _ := a.miss(s, class)
	return t
}

// run is the state after a text.
func (a *automaton) run(s *state, text string) *state {
	for i := range len(text) {
		if s = a.step(s, text[i]); s == a.dead {
			break
		}
	}
	return s
}

// miss computes a step, and returns how many configurations it has looked at.
func (a *automaton) miss(s *state, class uint8) (_ *state, work int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t := s.next[class].Load(); t != nil {
		return t, 0
	}
	b := a.sample[class]
	var to []config
	for _, c := range s.configs {
		edges := a.nodes[c.node].edges
		i, ok := slices.BinarySearchFunc(edges, b, func(e edge, b byte) int {
			switch {
			case e.hi < b:
				return -1
			case e.lo > b:
				return 1
			}
			return 0
		})
		if ok {
			to = append(to, config{edges[i].to, c.stack})
		}
	}
	t := a.dead
	if len(to) > 0 {
		if len(a.states) > maxStates || a.kept > maxKept {
			a.flush()
		}
		t = a.state(to)
		work = len(a.seen)
	}
	s.next[class].Store(t)
	return t, len(s.configs) + work
}

// state is that of configurations and of all that they lead to without reading a byte. The caller holds the lock, as in
// all that follows.
func (a *automaton) state(from []config) *state {
	clear(a.seen)
	work := append(a.work[:0], from...)
	var reads []config
	ends := false
	for len(work) > 0 {
		c := work[len(work)-1]
		work = work[:len(work)-1]
		if _, ok := a.seen[c]; ok || len(a.seen) > 8*maxConfigs {
			continue
		}
		a.seen[c] = struct{}{}
		n := &a.nodes[c.node]
		if len(n.edges) > 0 && len(reads) < maxConfigs {
			reads = append(reads, c)
		}
		if n.accept {
			if c.stack == nil || c.stack == unknown {
				ends = true
			} else {
				work = append(work, config{c.stack.to, c.stack.below})
			}
		}
		for _, k := range n.calls {
			stack := c.stack
			if to := &a.nodes[k.to]; !to.accept || len(to.edges) > 0 || len(to.calls) > 0 { // else there is nothing to return to
				if stack = a.push(k.to, c.stack); stack == nil {
					continue
				}
			}
			work = append(work, config{k.start, stack})
		}
	}
	a.work = work
	if len(reads) == 0 && !ends {
		return a.dead
	}
	return a.intern(reads, ends)
}

// push is a stack with a node above another stack; nil: it would be too deep.
func (a *automaton) push(to int32, below *frame) *frame {
	depth := int32(1)
	if below != nil {
		depth = below.depth + 1
	}
	if depth > maxStack {
		return nil
	}
	key := frameKey{to, below}
	f := a.frames[key]
	if f == nil {
		a.lastID++
		f = &frame{to: to, depth: depth, id: a.lastID, below: below}
		a.frames[key] = f
		a.kept++
	}
	return f
}

func (a *automaton) intern(configs []config, ends bool) *state {
	id := func(c config) uint32 {
		if c.stack == nil {
			return ^uint32(0)
		}
		return c.stack.id
	}
	slices.SortFunc(configs, func(x, y config) int { return cmp.Or(cmp.Compare(x.node, y.node), cmp.Compare(id(x), id(y))) })
	key := append(a.key[:0], 0)
	if ends {
		key[0] = 1
	}
	for _, c := range configs {
		key = binary.LittleEndian.AppendUint32(key, uint32(c.node))
		key = binary.LittleEndian.AppendUint32(key, id(c))
	}
	a.key = key
	s := a.states[string(key)]
	if s == nil {
		s = &state{configs: slices.Clip(configs), ends: ends, next: make([]atomic.Pointer[state], len(a.sample))}
		a.states[string(key)] = s
		a.kept += len(configs)
	}
	return s
}
