package grammar

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// ErrTooLarge: a grammar needs more states than are allowed.
var ErrTooLarge = errors.New("it needs too many states: shorten it, or lower the numbers of repetitions (minLength, maxLength, minItems, maxItems, {m,n})")

// ErrNoText: a grammar has no texts.
var ErrNoText = errors.New("no text fits it")

// Limits of what a grammar may need. They keep compilation to some seconds at worst, and its memory to some 150 MiB.
const (
	maxFragments = 1 << 18 // states of the automata before they are made deterministic
	maxNodes     = 1 << 16 // states of the deterministic ones
	maxNesting   = 1 << 10 // of expressions
	maxWork      = MaxWork // states that are looked at
	checkEvery   = 1 << 16 // of them, whether the context is done: some ms
	// inlineSize is the maximum size of a rule that is copied to where it is called: tokens that leave a rule cost more.
	inlineSize = 512
)

// node is a state of a rule's automaton.
type node struct {
	edges  []edge // by bytes, disjoint
	calls  []call
	accept bool // the rule may end here
	place  int32
}

// edge reads a byte from lo to hi.
type edge struct {
	lo, hi byte
	to     int32
}

// call reads a text of the rule that begins at the node start, and goes on at to.
type call struct{ start, to int32 }

// compiler turns rules into nodes.
type compiler struct {
	nodes []node
	// starts are the first nodes of rules.
	starts map[*Rule]int32
	queue  []*Rule
	sizes  map[*Rule]int // of those that are inlined; 0: being measured, -1: not inlined
	nfa    []fragment
	// machines are those of intersections.
	machines map[*intersection]machine
	// copies: all rules are inlined.
	copies bool
	// places are those of nodes, which have the index, and index is by place. place is where errors are: that of the rule
	// that is being compiled, or measured.
	places []string
	index  map[string]int32
	place  string
	// within is the place of the inlined rule that is being emitted, and called that of rules where they are called first.
	within string
	called map[*Rule]string
	depth  int
	work   int
	ctx    context.Context // of the request; compilation ends with it
	err    error
}

func newCompiler(ctx context.Context) *compiler {
	return &compiler{ctx: ctx, starts: map[*Rule]int32{}, sizes: map[*Rule]int{}, machines: map[*intersection]machine{}, index: map[string]int32{}, called: map[*Rule]string{}}
}

// spend counts states that are looked at.
func (c *compiler) spend(states int) {
	before := c.work
	if c.work += states; c.work > maxWork {
		c.tooLarge()
	}
	if c.work/checkEvery != before/checkEvery && c.ctx.Err() != nil {
		c.fail(context.Cause(c.ctx))
	}
}

// tooLarge fails with ErrTooLarge, at the place of what is being compiled.
func (c *compiler) tooLarge() { c.fail(placed(c.place, ErrTooLarge)) }

// tooLargeInAll fails with ErrTooLarge, at the place with the most nodes.
func (c *compiler) tooLargeInAll() {
	sizes := make([]int, len(c.places))
	largest := 0
	for i := range c.nodes {
		p := c.nodes[i].place
		if sizes[p]++; sizes[p] > sizes[largest] {
			largest = int(p)
		}
	}
	place := c.places[largest]
	if place != "" && sizes[largest] <= maxNodes/2 {
		place += ", the largest part"
	}
	c.fail(placed(place, ErrTooLarge))
}

func placed(place string, err error) error {
	if place == "" {
		return err
	}
	return fmt.Errorf("%s: %w", place, err)
}

// newNode adds a node of a place.
func (c *compiler) newNode(place string) int32 {
	p, ok := c.index[place]
	if !ok {
		p = int32(len(c.places))
		c.index[place], c.places = p, append(c.places, place)
	}
	c.nodes = append(c.nodes, node{place: p})
	return int32(len(c.nodes) - 1)
}

// fragment is a state of an automaton that is not deterministic.
type fragment struct {
	empty []int32
	edges []edge
	calls []ruleCall
}

type ruleCall struct {
	rule *Rule
	to   int32
}

// compile returns the nodes of a grammar, of which the first one is the start, and the places that they refer to.
func compile(ctx context.Context, root Expr) (nodes []node, places []string, work int, err error) {
	top := &Rule{Name: "root", Body: root}
	c := newCompiler(ctx)
	c.start(top)
	for len(c.queue) > 0 && c.err == nil {
		r := c.queue[0]
		c.queue = c.queue[1:]
		c.rule(r)
	}
	c.place = ""
	if c.err == nil {
		c.err = c.prune()
	}
	if c.err == nil {
		c.err = c.leftRecursion()
	}
	return c.nodes, c.places, c.work, c.err
}

// start is the first node of a rule.
func (c *compiler) start(r *Rule) int32 {
	at, ok := c.starts[r]
	if !ok {
		at = c.newNode(cmp.Or(r.Place, c.called[r]))
		c.starts[r] = at
		c.queue = append(c.queue, r)
	}
	return at
}

func (c *compiler) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// size estimates the states of an expression with what is inlined; more than inlineSize: too many.
func (c *compiler) size(e Expr) int {
	if c.depth++; c.depth > maxNesting {
		c.fail(fmt.Errorf("it is nested more than %d levels deep", maxNesting))
	}
	defer func() { c.depth-- }()
	if c.err != nil {
		return inlineSize + 1
	}
	n := 1
	switch e := e.(type) {
	case literal:
		n += len(e)
	case sequence:
		for _, p := range e {
			if n += c.size(p); n > inlineSize {
				break
			}
		}
	case choice:
		for _, p := range e {
			if n += c.size(p); n > inlineSize {
				break
			}
		}
	case *repeat:
		n += c.size(e.of) * min(max(e.min, e.max, 1), inlineSize)
	case *separated:
		n += 2 * c.size(e.separator)
		for _, i := range e.items {
			if n += c.size(i.Of); n > inlineSize {
				break
			}
		}
	case *graph:
		n += e.states
		for _, p := range e.paths {
			if n += c.size(p.Of); n > inlineSize {
				break
			}
		}
	case *intersection:
		n += len(c.machine(e))
	case *Rule:
		n += max(c.inlined(e), 1)
	}
	return n
}

// inlined is the size of a rule that is inlined, and -1 of others.
func (c *compiler) inlined(r *Rule) int {
	if n, ok := c.sizes[r]; ok {
		if n == 0 {
			c.sizes[r] = -1 // recursive
		}
		return c.sizes[r]
	}
	c.sizes[r] = 0
	outer := c.place
	c.place = cmp.Or(r.Place, outer)
	n := c.size(r.Body)
	c.place = outer
	if c.sizes[r] < 0 || n > inlineSize {
		n = -1
	}
	c.sizes[r] = n
	return n
}

// rule makes the nodes of a rule, by the subset construction.
func (c *compiler) rule(r *Rule) {
	c.place = c.places[c.nodes[c.starts[r]].place]
	c.within = c.place
	c.nfa = append(c.nfa[:0], fragment{}, fragment{})
	c.emit(r.Body, 0, 1)
	if c.err != nil {
		return
	}
	sets := map[string]int32{}
	var work [][]int32
	intern := func(set []int32) int32 {
		key := make([]byte, 0, 4*len(set))
		for _, s := range set {
			key = append(key, byte(s), byte(s>>8), byte(s>>16), byte(s>>24))
		}
		at, ok := sets[string(key)]
		if !ok {
			if len(sets) == 0 {
				at = c.starts[r]
			} else {
				at = c.newNode(c.place)
			}
			sets[string(key)] = at
			work = append(work, set)
			if len(c.nodes) > maxNodes {
				c.tooLargeInAll()
			}
		}
		return at
	}
	marks := make([]bool, len(c.nfa))
	intern(c.closure([]int32{0}, marks))
	total := 0
	for i := 0; i < len(work) && c.err == nil; i++ {
		set := work[i]
		if total += len(set); total > 16*maxNodes {
			c.tooLarge()
		}
		var n node
		var edges []edge
		var callees []ruleCall
		for _, s := range set {
			n.accept = n.accept || s == 1
			edges = append(edges, c.nfa[s].edges...)
			callees = append(callees, c.nfa[s].calls...)
		}
		n.edges = c.join(edges, marks, intern)
		returns := map[*Rule][]int32{}
		for _, k := range callees {
			returns[k.rule] = append(returns[k.rule], k.to)
		}
		for _, k := range callees {
			to, ok := returns[k.rule]
			if !ok {
				continue // it was there before
			}
			delete(returns, k.rule)
			start := c.start(k.rule)
			n.calls = append(n.calls, call{start, intern(c.closure(to, marks))})
		}
		at := c.starts[r]
		if i > 0 {
			key := make([]byte, 0, 4*len(set))
			for _, s := range set {
				key = append(key, byte(s), byte(s>>8), byte(s>>16), byte(s>>24))
			}
			at = sets[string(key)]
		}
		n.place = c.nodes[at].place
		c.nodes[at] = n
	}
}

// join makes the edges of a set of states disjoint.
func (c *compiler) join(edges []edge, marks []bool, intern func([]int32) int32) []edge {
	if len(edges) == 0 {
		return nil
	}
	c.spend(len(edges))
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.lo, b.lo) })
	var bounds [257]bool
	for _, e := range edges {
		bounds[e.lo], bounds[int(e.hi)+1] = true, true
	}
	var out, active []edge // active are those that read lo
	var targets []int32
	for lo, next := 0, 0; lo < 256; {
		hi := lo
		for hi < 255 && !bounds[hi+1] {
			hi++
		}
		active = slices.DeleteFunc(active, func(e edge) bool { return int(e.hi) < lo })
		for ; next < len(edges) && int(edges[next].lo) == lo; next++ {
			active = append(active, edges[next])
		}
		targets = targets[:0]
		for _, e := range active {
			targets = append(targets, e.to)
		}
		from := lo
		if lo = hi + 1; len(targets) == 0 {
			continue
		}
		to := intern(c.closure(targets, marks))
		if n := len(out); n > 0 && out[n-1].to == to && int(out[n-1].hi)+1 == from {
			out[n-1].hi = byte(hi)
			continue
		}
		out = append(out, edge{byte(from), byte(hi), to})
	}
	return out
}

// closure is the sorted set of states that are reached from some without reading anything. Of these only those are in
// it that read something, or are the end.
func (c *compiler) closure(from []int32, marks []bool) []int32 {
	stack := slices.Clone(from)
	var visited, set []int32
	for len(stack) > 0 {
		s := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if marks[s] {
			continue
		}
		marks[s] = true
		visited = append(visited, s)
		f := &c.nfa[s]
		if s == 1 || len(f.edges) > 0 || len(f.calls) > 0 {
			set = append(set, s)
		}
		stack = append(stack, f.empty...)
	}
	for _, s := range visited {
		marks[s] = false
	}
	c.spend(len(visited))
	slices.Sort(set)
	return set
}

func (c *compiler) fragment() int32 {
	if len(c.nfa) >= maxFragments {
		c.tooLarge()
	}
	c.nfa = append(c.nfa, fragment{})
	return int32(len(c.nfa) - 1)
}

func (c *compiler) skip(from, to int32) { c.nfa[from].empty = append(c.nfa[from].empty, to) }

// emit adds the states of an expression between two others. Nothing else leads to `to` from within, and nothing from
// `from` leads elsewhere but what e reads.
func (c *compiler) emit(e Expr, from, to int32) {
	if c.depth++; c.depth > maxNesting {
		c.fail(fmt.Errorf("it is nested more than %d levels deep", maxNesting))
	}
	defer func() { c.depth-- }()
	if c.err != nil {
		return
	}
	switch e := e.(type) {
	case literal:
		for i := range len(e) {
			next := c.fragment()
			c.nfa[from].edges = append(c.nfa[from].edges, edge{e[i], e[i], next})
			from = next
		}
		c.skip(from, to)
	case *byteSet:
		e.each(func(lo, hi byte) { c.nfa[from].edges = append(c.nfa[from].edges, edge{lo, hi, to}) })
	case sequence:
		for _, p := range e {
			next := c.fragment()
			c.emit(p, from, next)
			from = next
		}
		c.skip(from, to)
	case choice:
		for _, p := range e {
			if s, ok := p.(*byteSet); ok {
				c.emit(s, from, to)
				continue
			}
			begin := c.fragment()
			c.skip(from, begin)
			c.emit(p, begin, to)
		}
	case *repeat:
		c.repeat(e, from, to)
	case *separated:
		c.separated(e, from, to)
	case *graph:
		c.graph(e, from, to)
	case *intersection:
		c.emitMachine(c.machine(e), from, to)
	case *Rule:
		if e.Body == nil {
			c.fail(fmt.Errorf("rule %s is not defined", e.Name))
			return
		}
		if c.copies || c.inlined(e) > 0 {
			outer := c.within
			c.within = cmp.Or(e.Place, outer)
			c.emit(e.Body, from, to)
			c.within = outer
			return
		}
		if _, ok := c.called[e]; !ok {
			c.called[e] = c.within
		}
		c.nfa[from].calls = append(c.nfa[from].calls, ruleCall{e, to})
	default:
		panic(fmt.Sprintf("grammar: expression of unknown type %T", e))
	}
}

func (c *compiler) repeat(e *repeat, from, to int32) {
	for range e.min {
		next := c.fragment()
		c.emit(e.of, from, next)
		if from = next; c.err != nil {
			return
		}
	}
	if e.max < 0 {
		loop := c.fragment()
		again := c.fragment()
		c.skip(from, loop)
		c.emit(e.of, loop, again)
		c.skip(again, loop)
		c.skip(loop, to)
		return
	}
	for range e.max - e.min {
		c.skip(from, to)
		next := c.fragment()
		c.emit(e.of, from, next)
		if from = next; c.err != nil {
			return
		}
	}
	c.skip(from, to)
}

func (c *compiler) graph(e *graph, from, to int32) {
	states := make([]int32, e.states)
	for i := range states {
		states[i] = c.fragment()
	}
	c.skip(from, states[0])
	for _, p := range e.paths {
		begin, end := c.fragment(), c.fragment()
		c.skip(states[p.From], begin)
		c.emit(p.Of, begin, end)
		if c.skip(end, states[p.To]); c.err != nil {
			return
		}
	}
	for _, end := range e.ends {
		c.skip(states[end], to)
	}
}

// separated has two states before each item: where there is none yet, and where the separator comes first.
func (c *compiler) separated(e *separated, from, to int32) {
	none := c.fragment()
	c.skip(from, none)
	some := c.fragment()
	for _, item := range e.items {
		begin, end := c.fragment(), c.fragment()
		c.skip(none, begin)
		c.emit(e.separator, some, begin)
		c.emit(item.Of, begin, end)
		nextNone, nextSome := c.fragment(), c.fragment()
		c.skip(end, nextSome)
		if item.Repeated {
			c.emit(e.separator, end, begin)
		}
		if item.Optional {
			c.skip(none, nextNone)
			c.skip(some, nextSome)
		}
		none, some = nextNone, nextSome
	}
	c.skip(none, to)
	c.skip(some, to)
}

// prune removes what leads to no end.
func (c *compiler) prune() error {
	ends := make([]bool, len(c.nodes))
	for changed := true; changed && c.err == nil; {
		changed = false
		c.spend(len(c.nodes))
		for i := len(c.nodes) - 1; i >= 0; i-- {
			n := &c.nodes[i]
			if ends[i] {
				continue
			}
			if n.accept || slices.ContainsFunc(n.edges, func(e edge) bool { return ends[e.to] }) ||
				slices.ContainsFunc(n.calls, func(k call) bool { return ends[k.start] && ends[k.to] }) {
				ends[i], changed = true, true
			}
		}
	}
	if c.err != nil {
		return c.err
	}
	if !ends[0] {
		return ErrNoText
	}
	for i := range c.nodes {
		n := &c.nodes[i]
		n.edges = slices.DeleteFunc(n.edges, func(e edge) bool { return !ends[e.to] })
		n.calls = slices.DeleteFunc(n.calls, func(k call) bool { return !ends[k.start] || !ends[k.to] })
	}
	return nil
}

// leftRecursion finds rules that begin with themselves, for which no state could be made.
func (c *compiler) leftRecursion() error {
	names := map[int32]string{}
	for r, at := range c.starts {
		names[at] = r.Name
	}
	// nullable rules can be called without reading anything. Callees mostly come behind their callers.
	starts := slices.Sorted(maps.Keys(names))
	slices.Reverse(starts)
	nullable := map[int32]bool{}
	for changed := true; changed && c.err == nil; {
		changed = false
		for _, at := range starts {
			if !nullable[at] && c.reads(at, nullable, nil) {
				nullable[at], changed = true, true
			}
		}
	}
	const visiting, done = 1, 2
	state := map[int32]int{}
	var visit func(at int32) error
	visit = func(at int32) error {
		state[at] = visiting
		var err error
		c.reads(at, nullable, func(k call) {
			if err != nil || state[k.start] == done {
				return
			}
			if state[k.start] == visiting {
				err = fmt.Errorf("rule %s begins with itself (left recursion): write what is repeated behind what is not", names[k.start])
				return
			}
			err = visit(k.start)
		})
		state[at] = done
		return err
	}
	for _, at := range starts {
		if c.err != nil {
			return c.err
		}
		if state[at] != 0 {
			continue
		}
		if err := visit(at); err != nil {
			return err
		}
	}
	return nil
}

// reads visits the calls that a rule can begin with, and reports whether it can end without reading anything.
func (c *compiler) reads(start int32, nullable map[int32]bool, visit func(call)) (ends bool) {
	seen := map[int32]bool{start: true}
	for work := []int32{start}; len(work) > 0; {
		n := &c.nodes[work[0]]
		work = work[1:]
		c.spend(16 + len(n.calls)) // maps are slower than lists
		ends = ends || n.accept
		for _, k := range n.calls {
			if visit != nil {
				visit(k)
			}
			if nullable[k.start] && !seen[k.to] {
				seen[k.to] = true
				work = append(work, k.to)
			}
		}
	}
	return ends
}
