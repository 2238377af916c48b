package grammar

import (
	"encoding/binary"
	"errors"
	"slices"
)

// maxCount is the maximum number of states of a counter, of which those that are not reached take no memory.
const maxCount = 1 << 30

// All is the texts that fit every part. The rules in it are not recursive. Its automaton is the product of those of the
// parts, of which a Repeat of single characters counts and so takes no more states than are reached.
func All(parts ...Expr) Expr { return &intersection{parts: parts} }

// Except is the texts of e that fit no part of others. The rules in them are not recursive.
func Except(e Expr, others ...Expr) Expr { return &intersection{[]Expr{e}, others} }

// intersection is the texts that fit all parts and none of others. It is compiled to a machine before the automaton of the
// rule that contains it.
type intersection struct{ parts, others []Expr }

func (*intersection) expr() {}

// source is a deterministic automaton without calls. Its first state is 0.
type source interface {
	// at returns the edges of a state, in the order of their bytes, and whether a text may end there.
	at(state int32) (edges []edge, accept bool)
}

// machine is a source whose states are all made.
type machine []node

func (m machine) at(state int32) ([]edge, bool) { return m[state].edges, m[state].accept }

// inverse is a source of all byte strings that fit no text of a machine. Behind the states of that is one for those that
// begin none.
type inverse machine

func (v inverse) at(state int32) (edges []edge, accept bool) {
	none := int32(len(v))
	if state == none {
		return []edge{{0, 255, none}}, true
	}
	next := 0
	for _, e := range v[state].edges {
		if next < int(e.lo) {
			edges = append(edges, edge{byte(next), e.lo - 1, none})
		}
		edges, next = append(edges, e), int(e.hi)+1
	}
	if next <= 255 {
		edges = append(edges, edge{byte(next), 255, none})
	}
	return edges, !v[state].accept
}

// counter is a source of at least min and at most max texts of a unit, one after another; max < 0: any number. The unit
// ends where nothing may follow, and nothing leads to its first state. A state is a count and a state of the unit.
type counter struct {
	unit     machine
	min, max int
}

func (c counter) at(state int32) ([]edge, bool) {
	size := int32(len(c.unit))
	count, within := state/size, state%size
	if within == 0 && c.max >= 0 && int(count) >= c.max {
		return nil, int(count) >= c.min
	}
	next := count + 1
	if c.max < 0 {
		next = min(next, int32(c.min))
	}
	edges := slices.Clone(c.unit[within].edges)
	for i, e := range edges {
		if c.unit[e.to].accept {
			edges[i].to = next * size
		} else {
			edges[i].to = count*size + e.to
		}
	}
	return edges, within == 0 && int(count) >= c.min
}

// machine is the automaton of an intersection; what leads nowhere is not in it.
func (c *compiler) machine(e *intersection) machine {
	if m, ok := c.machines[e]; ok {
		return m
	}
	var sources, counters []source
	for _, p := range e.parts {
		switch s := c.source(p).(type) {
		case counter:
			counters = append(counters, s)
		default:
			sources = append(sources, s)
		}
		if c.err != nil {
			return nil
		}
	}
	for _, p := range e.others {
		if sources = append(sources, inverse(c.flat(p))); c.err != nil {
			return nil
		}
	}
	m := machine{{edges: []edge{{0, 255, 0}}, accept: true}}
	for _, s := range append(sources, counters...) { // those that count come last: the others limit what they reach
		if m = c.product(m, s); c.err != nil {
			return nil
		}
	}
	c.machines[e] = m
	return m
}

// source is the automaton of a part of an intersection.
func (c *compiler) source(e Expr) source {
	if r, ok := e.(*repeat); ok {
		unit := c.flat(r.of)
		counts := c.err == nil && !unit[0].accept && max(r.min, r.max) < maxCount/len(unit)
		for _, n := range unit {
			counts = counts && !(n.accept && len(n.edges) > 0) && !slices.ContainsFunc(n.edges, func(e edge) bool { return e.to == 0 })
		}
		if counts {
			return counter{unit, r.min, r.max}
		}
	}
	return c.flat(e)
}

// flat is the automaton of an expression with all its rules copied into it.
func (c *compiler) flat(e Expr) machine {
	if c.err != nil {
		return nil
	}
	sub := newCompiler(c.ctx)
	sub.copies, sub.place, sub.work, sub.depth, sub.machines = true, c.place, c.work, c.depth, c.machines
	top := &Rule{Name: "part", Body: e, Place: c.place}
	sub.start(top)
	sub.rule(top)
	sub.spend(128 * len(sub.nodes)) // they are made for this alone, and may all be dropped
	if sub.err == nil {
		sub.err = sub.prune()
	}
	c.work = sub.work
	if errors.Is(sub.err, ErrNoText) {
		return machine{{}}
	}
	if sub.err != nil {
		c.fail(sub.err)
		return nil
	}
	return c.reduce(sub.nodes)
}

// product is what both automata read.
func (c *compiler) product(a, b source) machine {
	type pair struct{ a, b int32 }
	at := map[pair]int32{{}: 0}
	pairs := []pair{{}}
	into := [][]int32{nil} // by state, those that lead to it
	var m machine
	var edges []edge
	for i := 0; i < len(pairs); i++ {
		x, endA := a.at(pairs[i].a)
		y, endB := b.at(pairs[i].b)
		edges = edges[:0]
		for len(x) > 0 && len(y) > 0 {
			if lo, hi := max(x[0].lo, y[0].lo), min(x[0].hi, y[0].hi); lo <= hi {
				p := pair{x[0].to, y[0].to}
				to, ok := at[p]
				if !ok {
					to = int32(len(pairs))
					at[p] = to
					pairs, into = append(pairs, p), append(into, nil)
				}
				if k := len(edges); k > 0 && edges[k-1].to == to && int(edges[k-1].hi)+1 == int(lo) {
					edges[k-1].hi = hi
				} else {
					edges = append(edges, edge{lo, hi, to})
				}
				if k := len(into[to]); k == 0 || into[to][k-1] != int32(i) {
					into[to] = append(into[to], int32(i))
				}
			}
			if x[0].hi < y[0].hi {
				x = x[1:]
			} else {
				y = y[1:]
			}
		}
		m = append(m, node{edges: slices.Clone(edges), accept: endA && endB})
		if c.spend(16 * (1 + len(edges))); len(pairs) > maxNodes {
			c.tooLarge()
		}
		if c.err != nil {
			return nil
		}
	}
	ends := make([]bool, len(m))
	var work []int32
	for i, n := range m {
		if n.accept {
			ends[i], work = true, append(work, int32(i))
		}
	}
	for len(work) > 0 {
		last := work[len(work)-1]
		work = work[:len(work)-1]
		for _, from := range into[last] {
			if !ends[from] {
				ends[from], work = true, append(work, from)
			}
		}
	}
	for i := range m {
		m[i].edges = slices.DeleteFunc(m[i].edges, func(e edge) bool { return !ends[e.to] })
	}
	return c.reduce(m)
}

// reduce joins states that lead to the same ones by the same bytes, such as the ends of characters, and drops those that
// nothing leads to.
func (c *compiler) reduce(m machine) machine {
	const passes = 8 // the minimum would take as many as the longest text has bytes
	same := make([]int32, len(m))
	for range passes {
		first := make(map[string]int32, len(m))
		var key []byte
		changed := false
		for i, n := range m {
			key = append(key[:0], 0)
			if n.accept {
				key[0] = 1
			}
			for _, e := range n.edges {
				key = append(key, e.lo, e.hi)
				key = binary.LittleEndian.AppendUint32(key, uint32(e.to))
			}
			to, ok := first[string(key)]
			if !ok {
				to = int32(i)
				first[string(key)] = to
			}
			same[i] = to
		}
		c.spend(16 * len(m))
		for i := range m {
			edges := m[i].edges[:0]
			for _, e := range m[i].edges {
				if same[e.to] != e.to {
					e.to, changed = same[e.to], true
				}
				if n := len(edges); n > 0 && edges[n-1].to == e.to && edges[n-1].hi+1 == e.lo {
					edges[n-1].hi = e.hi
					continue
				}
				edges = append(edges, e)
			}
			m[i].edges = edges
		}
		if !changed {
			break
		}
	}
	at := make([]int32, len(m)) // 1 more than the new number; 0: nothing leads there
	order := []int32{0}
	at[0] = 1
	for i := 0; i < len(order); i++ {
		for _, e := range m[order[i]].edges {
			if at[e.to] == 0 {
				order = append(order, e.to)
				at[e.to] = int32(len(order))
			}
		}
	}
	out := make(machine, len(order))
	for i, from := range order {
		out[i] = node{edges: m[from].edges, accept: m[from].accept}
		for j := range out[i].edges {
			out[i].edges[j].to = at[out[i].edges[j].to] - 1
		}
	}
	return out
}

// emitMachine adds the states of a machine between two others.
func (c *compiler) emitMachine(m machine, from, to int32) {
	first := int32(len(c.nfa))
	for range m {
		if c.fragment(); c.err != nil {
			return
		}
	}
	c.skip(from, first)
	for i, n := range m {
		at := first + int32(i)
		c.nfa[at].edges = slices.Clone(n.edges)
		for j := range n.edges {
			c.nfa[at].edges[j].to += first
		}
		if n.accept {
			c.skip(at, to)
		}
	}
}
