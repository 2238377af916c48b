package grammar

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Grammar is a compiled grammar with the masks of a vocabulary.
type Grammar struct {
	a *automaton
	v *Vocabulary
	// alone are the masks of nodes, by node; firstMask is that before the first token.
	alone     []atomic.Pointer[nodeMask]
	computing [64]sync.Mutex // of the masks of nodes, by node: sequences that begin alike need the same ones at the same time
	firstMask atomic.Pointer[mask]
	maskBytes atomic.Int64
	ambiguous atomic.Pointer[string]
	places    []string // of nodes
}

// ErrAmbiguous: so many readings of a text begin alike that masks would take too long.
var ErrAmbiguous = errors.New("it is too ambiguous: write it so that few of its rules can read the same text")

// mask has a bit for each token that may be next. It is immutable.
type mask struct{ bits []uint32 }

// nodeMask says which tokens may be next at a node, as far as its rule alone decides that.
type nodeMask struct {
	bits []uint32
	// leaves are the nodes of the trie where the rule may end within tokens: whether these may be next depends on the
	// stack.
	leaves []int32
}

// New compiles a grammar. Without a vocabulary it can match texts, and has no masks.
func New(root Expr, v *Vocabulary) (*Grammar, error) {
	g, _, err := NewCounted(context.Background(), root, v)
	return g, err
}

// MaxWork is the number of states that a compilation looks at, at most: some seconds.
const MaxWork = 1 << 26

// NewCounted is New, and returns how many states it has looked at, with an error too. Once the context is done it ends
// with the cause of that.
func NewCounted(ctx context.Context, root Expr, v *Vocabulary) (g *Grammar, work int, err error) {
	nodes, places, work, err := compile(ctx, root)
	if err != nil {
		return nil, work, err
	}
	g = &Grammar{a: newAutomaton(nodes), places: places, v: v, alone: make([]atomic.Pointer[nodeMask], len(nodes))}
	if s := g.a.start(); len(s.configs) == 0 {
		return nil, work, errors.New("only the empty text fits it")
	}
	return g, work, nil
}

// Nodes is the size of the grammar's automata.
func (g *Grammar) Nodes() int { return len(g.a.nodes) }

// Err is ErrAmbiguous once a mask has taken too long, with the place of a rule that the text is in.
func (g *Grammar) Err() error {
	if place := g.ambiguous.Load(); place != nil {
		return placed(*place, ErrAmbiguous)
	}
	return nil
}

// placeOf a state is that of its first node that has one.
func (g *Grammar) placeOf(s *state) *string {
	for _, c := range s.configs {
		if place := &g.places[g.a.nodes[c.node].place]; *place != "" {
			return place
		}
	}
	return new(string)
}

// Words is that of the vocabulary; 0: there is none.
func (g *Grammar) Words() int {
	if g.v == nil {
		return 0
	}
	return g.v.words
}

// Match reports whether a text fits the grammar.
func (g *Grammar) Match(text string) bool { return g.a.run(g.a.start(), text).ends }

// Begins reports whether a text can be continued to one that fits.
func (g *Grammar) Begins(text string) bool { return g.a.run(g.a.start(), text) != g.a.dead }

// Matcher returns a matcher at the beginning of a text.
func (g *Grammar) Matcher() *Matcher { return &Matcher{g: g, at: g.a.start(), first: true} }

// Matcher follows one text, token by token.
type Matcher struct {
	g     *Grammar
	at    *state
	first bool // no token has been read
}

// Accept reads a token, and reports whether it may come next; if not, nothing changes.
func (m *Matcher) Accept(id int32) bool {
	v := m.g.v
	if id < 0 || int(id) >= len(v.text) || v.text[id] == "" {
		return false
	}
	text := v.text[id]
	if m.first {
		text = v.first[id]
	}
	s := m.g.a.run(m.at, text)
	if s == m.g.a.dead {
		return false
	}
	m.at, m.first = s, false
	return true
}

// MayEnd reports whether the text may end here, and Ended whether it must.
func (m *Matcher) MayEnd() bool { return m.at.ends }

// Ended reports whether nothing may follow.
func (m *Matcher) Ended() bool { return m.at.ends && len(m.at.configs) == 0 }

// Ready reports whether Mask has nothing to compute.
func (m *Matcher) Ready() bool { return m.kept().Load() != nil }

func (m *Matcher) kept() *atomic.Pointer[mask] {
	if m.first && m.g.v.differs {
		return &m.g.firstMask
	}
	return &m.at.mask
}

// Mask has a bit for each token that may come next: that of id is bit id%32 of word id/32. It must not be changed. It
// may be empty where the vocabulary cannot spell what has to come, and is where it would take too long: see Grammar.Err.
func (m *Matcher) Mask() []uint32 {
	kept := m.kept()
	if k := kept.Load(); k != nil {
		return k.bits
	}
	w := walk{g: m.g, limit: maxMaskWork}
	var k *mask
	if m.first && m.g.v.differs {
		k = w.maskOfFirst(m.at)
	} else {
		k = w.maskOf(m.at)
	}
	if w.work > maxMaskWork {
		m.g.ambiguous.Store(m.g.placeOf(m.at))
		k = &mask{make([]uint32, m.g.v.words)}
	}
	kept.Store(k)
	return k.bits
}

// Clone returns a matcher of the same text.
func (m *Matcher) Clone() *Matcher {
	c := *m
	return &c
}

func set(bits []uint32, id int32) { bits[id/32] |= 1 << (id % 32) }

// newMask returns an empty mask, after dropping all masks if they are too many.
func (g *Grammar) newMask() []uint32 {
	if n := g.maskBytes.Add(4 * int64(g.v.words)); n > maxMaskBytes {
		g.a.mu.Lock()
		g.a.flush()
		g.a.mu.Unlock()
		for i := range g.alone {
			g.alone[i].Store(nil)
		}
		g.maskBytes.Store(0)
	}
	return make([]uint32, g.v.words)
}

// maskOfFirst tries every token.
func (w *walk) maskOfFirst(s *state) *mask {
	g := w.g
	bits := g.newMask()
	for id, text := range g.v.first {
		if g.v.text[id] != "" && w.text(s, text) != g.a.dead {
			set(bits, int32(id))
		}
	}
	return &mask{bits}
}

// maskOf joins the masks of a state's nodes.
func (w *walk) maskOf(s *state) *mask {
	g := w.g
	var own []uint32
	var shared []uint32
	for i, c := range s.configs {
		if i > 0 && s.configs[i-1].node == c.node {
			continue
		}
		n := w.maskAlone(c.node)
		if len(s.configs) == 1 && len(n.leaves) == 0 {
			return &mask{n.bits}
		}
		switch {
		case own == nil && shared == nil:
			shared = n.bits
			continue
		case own == nil:
			own = g.newMask()
			copy(own, shared)
		}
		for w, bits := range n.bits {
			own[w] |= bits
		}
	}
	if own == nil {
		own = g.newMask()
		copy(own, shared)
	}
	for i, c := range s.configs {
		if i > 0 && s.configs[i-1].node == c.node {
			continue
		}
		for _, at := range w.maskAlone(c.node).leaves {
			if t := w.text(s, g.v.path(at)); t != g.a.dead && len(t.configs) > 0 {
				w.below(at, t, own)
			}
		}
	}
	return &mask{own}
}

// maskAlone is what one node decides. It is not kept where it is not complete.
func (w *walk) maskAlone(n int32) *nodeMask {
	g := w.g
	if m := g.alone[n].Load(); m != nil {
		return m
	}
	l := &g.computing[int(n)%len(g.computing)]
	l.Lock()
	defer l.Unlock()
	if m := g.alone[n].Load(); m != nil { // meanwhile
		return m
	}
	m := &nodeMask{bits: g.newMask()}
	w.all(g.a.alone(n), m)
	m.leaves = slices.Clip(m.leaves)
	if w.work <= maxMaskWork {
		g.alone[n].Store(m)
	}
	return m
}

const (
	// warmWalks is how many masks that take a walk through all of the vocabulary Warm computes, at about 2 ms each.
	warmWalks = 48
	// warmWorkers is how many goroutines compute them, at most; half of the processors are left to steps.
	warmWorkers = 8
)

// Warm computes masks that take long, some 0.1 s of a processor, so that no step waits for these, and the first one. Of an
// ambiguous grammar it looks at as many configurations as one mask may, since each of its nodes can take that many.
func (g *Grammar) Warm() { g.warm(max(1, min(warmWorkers, runtime.GOMAXPROCS(0)/2))) }

func (g *Grammar) warm(workers int) {
	g.Matcher().Mask()
	var next, visited atomic.Int64 // node of the automaton; nodes of the vocabulary
	var all sync.WaitGroup
	for range workers {
		all.Go(func() { g.warmNodes(&next, &visited, maxMaskWork/workers) })
	}
	all.Wait()
}

// warmNodes computes masks of nodes, as long as all workers together have not walked enough, nor this one looked at too many
// configurations.
func (g *Grammar) warmNodes(next, visited *atomic.Int64, limit int) {
	trie := len(g.v.nodes)
	m, w := &nodeMask{bits: make([]uint32, g.v.words)}, walk{g: g, limit: limit}
	for visited.Load() < int64(warmWalks*trie) && w.work <= limit {
		n := int(next.Add(1) - 1)
		if n >= len(g.alone) {
			return
		}
		if len(g.a.nodes[n].edges) == 0 || g.alone[n].Load() != nil {
			continue
		}
		walked := w.all(g.a.alone(int32(n)), m)
		visited.Add(int64(walked))
		if walked < trie/16 || w.work > limit {
			clear(m.bits)
			m.leaves = m.leaves[:0]
			continue
		}
		m.leaves = slices.Clip(m.leaves)
		g.alone[n].Store(m)
		m = &nodeMask{bits: g.newMask()}
	}
}

// walk goes through the trie of a vocabulary, with the states that its bytes lead to. It stops where it has looked at more
// configurations than its limit.
type walk struct {
	g     *Grammar
	limit int
	stack []*state // by depth
	work  int
}

// text is the state after a text.
func (w *walk) text(s *state, text string) *state {
	a := w.g.a
	for i := range len(text) {
		class := a.class[text[i]]
		t := s.next[class].Load()
		if t == nil {
			t = w.miss(s, class)
		}
		if s = t; s == a.dead {
			break
		}
	}
	return s
}

// miss computes a step, or returns the dead state if all has been spent.
func (w *walk) miss(s *state, class uint8) *state {
	if w.work > w.limit {
		return w.g.a.dead
	}
	t, work := w.g.a.miss(s, class)
	w.work += work
	return t
}

// all sets the tokens that may come next, and lists the nodes where the rule of s may end. It returns how many nodes it
// has looked at.
func (w *walk) all(s *state, m *nodeMask) (visited int) {
	w.stack = slices.Grow(w.stack[:0], w.g.v.depth+1)[:w.g.v.depth+1]
	w.stack[0] = s
	return w.run(0, int32(len(w.g.v.nodes)), m.bits, func(at int32, t *state) {
		// What is below a node that is listed is looked at with it.
		if n := len(m.leaves); t.ends && w.g.v.nodes[at].end > at+1 && (n == 0 || at >= w.g.v.nodes[m.leaves[n-1]].end) {
			m.leaves = append(m.leaves, at)
		}
	})
}

// below sets the tokens below a node that may come next, from the state there on.
func (w *walk) below(at int32, s *state, bits []uint32) {
	w.stack = slices.Grow(w.stack[:0], w.g.v.depth+1)[:w.g.v.depth+1]
	w.stack[w.g.v.nodes[at].depth] = s
	w.run(at+1, w.g.v.nodes[at].end, bits, nil)
}

// run walks nodes[from:to], whose parents' states are in the stack.
func (w *walk) run(from, to int32, bits []uint32, visit func(at int32, t *state)) (visited int) {
	a, v, stack := w.g.a, w.g.v, w.stack
	for i := from; i < to; visited++ {
		n := &v.nodes[i]
		s := stack[n.depth-1]
		class := a.class[n.b]
		t := s.next[class].Load()
		if t == nil {
			t = w.miss(s, class)
		}
		if t == a.dead {
			i = n.end
			continue
		}
		stack[n.depth] = t
		for _, id := range v.ids[n.ids:][:n.count] {
			set(bits, id)
		}
		if visit != nil && t.ends {
			visit(i, t)
		}
		i++
	}
	return visited
}

// Overlap reports whether a text fits both expressions. Where that takes too long to find out it is true.
func Overlap(a, b Expr) bool {
	g, err := New(a, nil)
	if err != nil {
		return false
	}
	h, err := New(b, nil)
	if err != nil {
		return false
	}
	type pair struct{ x, y *state }
	seen := map[pair]bool{}
	for work := []pair{{g.a.start(), h.a.start()}}; len(work) > 0; {
		p := work[len(work)-1]
		work = work[:len(work)-1]
		if p.x.ends && p.y.ends || len(seen) > maxStates {
			return true
		}
		for b := range 256 {
			if q := (pair{g.a.step(p.x, byte(b)), h.a.step(p.y, byte(b))}); q.x != g.a.dead && q.y != h.a.dead && !seen[q] {
				seen[q] = true
				work = append(work, q)
			}
		}
	}
	return false
}
