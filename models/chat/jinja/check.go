package jinja

import "slices"

// undeclared returns which of names a body reads before it assigns them.
func undeclared(body []stmt, names ...string) map[string]bool {
	found := map[string]bool{}
	for _, s := range body {
		walk(s, func(n any) {
			v, ok := n.(*name)
			if !ok || !slices.Contains(names, v.name) || found[v.name] {
				return
			}
			if v.store {
				names = slices.DeleteFunc(slices.Clone(names), func(s string) bool { return s == v.name })
			} else {
				found[v.name] = true
			}
		})
	}
	return found
}

// maxTreeDepth bounds the recursion of evaluation, as Python's compiler bounds nested brackets.
const maxTreeDepth = 200

// checker finds what jinja2 finds when it compiles a template.
type checker struct {
	depth int
	// soft: inside an if or a conditional expression filters and tests may be unknown until they are used.
	soft bool
	// loops: break and continue are allowed.
	loops bool
	// names that must not be assigned, as a loop around uses them.
	inLoop bool
}

func (c checker) check(n any) {
	if c.depth++; c.depth > maxTreeDepth {
		raise("an expression is nested more than %d deep", maxTreeDepth)
	}
	switch n := n.(type) {
	case *filter:
		if filters[n.name] == nil && !c.soft {
			raiseAt(n.line, "No filter named '%s'.", n.name)
		}
	case *test:
		if tests[n.name] == nil && !c.soft {
			raiseAt(n.line, "No test named '%s'.", n.name)
		}
	case *name:
		if n.store && n.name == "loop" && c.inLoop {
			raiseAt(n.line, "Can't assign to special loop variable in for-loop target")
		}
	case *loopControl:
		if !c.loops {
			raiseAt(n.line, "break and continue are allowed in a loop only")
		}
	case *ifStmt, *conditional:
		c.soft = true
	case *forStmt:
		// A loop's list and its else are no part of the loop.
		inner := c
		inner.soft, inner.loops, inner.inLoop = false, true, true
		for _, part := range children(&forStmt{target: n.target, iter: &constant{}, test: n.test, body: n.body}) {
			inner.check(part)
		}
		c.check(n.iter)
		inner.loops = c.loops
		for _, s := range n.otherwise {
			inner.check(s)
		}
		return
	case *macroStmt:
		c.soft, c.loops = false, false
	case *scoped:
		c.soft, c.loops = false, c.loops && !n.function
	case *setBlock, *withStmt, *filterBlock:
		c.soft = false
	}
	for _, part := range children(n) {
		c.check(part)
	}
}
