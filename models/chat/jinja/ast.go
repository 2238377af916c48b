package jinja

// expr is an expression.
type expr interface {
	eval(r *run, s *scope) Value
}

// stmt is a statement.
type stmt interface {
	exec(r *run, s *scope) signal
}

// signal is how a statement ended.
type signal uint8

const (
	done signal = iota
	breaks
	continues
)

// Expressions. Lines are those of the template.
type (
	constant struct{ value Value }
	name     struct {
		line  int
		name  string
		store bool // it is assigned to
	}
	listExpr  struct{ items []expr }
	tupleExpr struct {
		line  int
		items []expr
	}
	dictExpr  struct{ keys, values []expr }
	attribute struct {
		line int
		of   expr
		name string
	}
	item struct {
		line    int
		of, key expr
	}
	slice struct {
		line                  int
		of, start, stop, step expr // nil: not given
	}
	call struct {
		line int
		of   expr
		args arguments
	}
	filter struct {
		line int
		of   expr // nil: the text of the block
		name string
		args arguments
	}
	test struct {
		line int
		of   expr
		name string
		args arguments
	}
	unaryExpr struct {
		line int
		op   string // - + not
		of   expr
	}
	binaryExpr struct {
		line        int
		op          string // arithmetic, and, or
		left, right expr
	}
	concatExpr struct {
		line  int
		parts []expr
	}
	compareExpr struct {
		line  int
		first expr
		ops   []string // == != < <= > >= in notin
		rest  []expr
	}
	conditional struct {
		line                  int
		test, then, otherwise expr // otherwise may be nil
	}
	// arguments of a call.
	arguments struct {
		args        []expr
		kwargs      []keywordExpr
		star, dstar expr // * and **; nil: none
	}
	keywordExpr struct {
		name  string
		value expr
	}
)

// Statements.
type (
	output struct {
		line  int
		parts []expr
	}
	ifStmt struct {
		line      int
		tests     []expr // if and elifs
		bodies    [][]stmt
		otherwise []stmt
	}
	forStmt struct {
		line      int
		target    expr
		iter      expr
		test      expr // nil: none
		recursive bool
		body      []stmt
		otherwise []stmt
	}
	setStmt struct {
		line   int
		target expr
		value  expr
	}
	setBlock struct {
		line   int
		target expr
		filter expr // nil: none
		body   []stmt
	}
	withStmt struct {
		line            int
		targets, values []expr
		body            []stmt
	}
	macroStmt struct {
		line     int
		name     string
		params   []string
		defaults []expr // of the last parameters
		body     []stmt
		// varargs, kwargs and caller: the body names what callers may pass beyond the parameters.
		varargs, kwargs, caller bool
	}
	callBlock struct {
		line  int
		call  *call
		macro *macroStmt
	}
	filterBlock struct {
		line   int
		filter expr
		body   []stmt
	}
	// scoped is a generation block or a block: its assignments stay inside.
	scoped struct {
		line     int
		function bool // a function of its own in Python, which break and continue do not leave
		body     []stmt
	}
	loopControl struct {
		line   int
		signal signal
	}
	// namespaceRef is a target ns.attr.
	namespaceRef struct {
		line       int
		name, attr string
	}
)

// eval is never called: a namespaceRef is a target only.
func (n *namespaceRef) eval(*run, *scope) Value { return nil }

// children returns the nodes directly below a node, in their order in the template.
func children(n any) []any {
	var out []any
	add := func(list ...expr) {
		for _, e := range list {
			if e != nil {
				out = append(out, e)
			}
		}
	}
	body := func(lists ...[]stmt) {
		for _, list := range lists {
			for _, s := range list {
				out = append(out, s)
			}
		}
	}
	args := func(a *arguments) {
		add(a.args...)
		for _, k := range a.kwargs {
			add(k.value)
		}
		add(a.star, a.dstar)
	}
	switch n := n.(type) {
	case *listExpr:
		add(n.items...)
	case *tupleExpr:
		add(n.items...)
	case *dictExpr:
		add(n.keys...)
		add(n.values...)
	case *attribute:
		add(n.of)
	case *item:
		add(n.of, n.key)
	case *slice:
		add(n.of, n.start, n.stop, n.step)
	case *call:
		add(n.of)
		args(&n.args)
	case *filter:
		add(n.of)
		args(&n.args)
	case *test:
		add(n.of)
		args(&n.args)
	case *unaryExpr:
		add(n.of)
	case *binaryExpr:
		add(n.left, n.right)
	case *concatExpr:
		add(n.parts...)
	case *compareExpr:
		add(n.first)
		add(n.rest...)
	case *conditional:
		add(n.test, n.then, n.otherwise)
	case *output:
		add(n.parts...)
	case *ifStmt:
		add(n.tests...)
		body(n.bodies...)
		body(n.otherwise)
	case *forStmt:
		add(n.target, n.iter, n.test)
		body(n.body, n.otherwise)
	case *setStmt:
		add(n.target, n.value)
	case *setBlock:
		add(n.target, n.filter)
		body(n.body)
	case *withStmt:
		add(n.targets...)
		add(n.values...)
		body(n.body)
	case *macroStmt:
		add(n.defaults...)
		body(n.body)
	case *callBlock:
		out = append(out, n.call, n.macro)
	case *filterBlock:
		add(n.filter)
		body(n.body)
	case *scoped:
		body(n.body)
	}
	return out
}

// walk visits a node and all below it.
func walk(n any, visit func(n any)) {
	visit(n)
	for _, c := range children(n) {
		walk(c, visit)
	}
}
