package jinja

import (
	"slices"
	"strings"
)

// maxNesting bounds the recursion of the parser. Python's compiler has a similar bound.
const maxNesting = 150

// parser makes a tree of tokens, with the grammar of jinja2's parser.
type parser struct {
	tokens []token
	pos    int
	depth  int
	// ends are the tags that end the open blocks, for messages; tags the blocks.
	ends [][]string
	tags []string
}

func (p *parser) cur() *token  { return &p.tokens[p.pos] }
func (p *parser) look() *token { return &p.tokens[min(p.pos+1, len(p.tokens)-1)] }

func (p *parser) next() *token {
	t := p.cur()
	if t.kind != "eof" {
		p.pos++
	}
	return t
}

func (p *parser) is(kind string) bool    { return p.cur().kind == kind }
func (p *parser) isName(n string) bool   { return p.cur().kind == "name" && p.cur().text == n }
func (p *parser) skip(kind string) bool  { return p.skipIf(p.is(kind)) }
func (p *parser) skipName(n string) bool { return p.skipIf(p.isName(n)) }

func (p *parser) skipIf(ok bool) bool {
	if ok {
		p.next()
	}
	return ok
}

func (p *parser) fail(format string, args ...any) { raiseAt(p.cur().line, format, args...) }

func (p *parser) expect(kind string) *token {
	if !p.is(kind) {
		if p.is("eof") {
			p.fail("unexpected end of template, expected '%s'.", token{kind: kind})
		}
		p.fail("expected token '%s', got '%s'", token{kind: kind, text: kind}, p.cur())
	}
	return p.next()
}

func (p *parser) expectName(n string) *token {
	if !p.isName(n) {
		p.fail("expected token '%s', got '%s'", n, p.cur())
	}
	return p.next()
}

// nest bounds the depth of recursion.
func (p *parser) nest() func() {
	if p.depth++; p.depth > maxNesting {
		p.fail("more than %d nested blocks and brackets", maxNesting)
	}
	return func() { p.depth-- }
}

// parse parses a whole template.
func (p *parser) parse() []stmt {
	return p.statements(nil)
}

// statements parses up to a tag of ends, which stays the current token, or to the end of the template without any.
func (p *parser) statements(ends []string) []stmt {
	defer p.nest()()
	if ends != nil {
		p.ends = append(p.ends, ends)
		defer func() { p.ends = p.ends[:len(p.ends)-1] }()
	}
	var body []stmt
	var out *output
	print := func(e expr, line int) {
		if out == nil {
			out = &output{line: line}
			body = append(body, out)
		}
		out.parts = append(out.parts, e)
	}
	for {
		switch t := p.cur(); t.kind {
		case "eof":
			if ends != nil {
				p.unknownTag("")
			}
			return body
		case "data":
			p.next()
			print(&constant{Text{s: t.text}}, t.line)
		case "variable_begin":
			p.next()
			print(p.tuple(tupleRules{conditionals: true}), t.line)
			p.expect("variable_end")
		default: // block_begin
			out = nil
			p.next()
			if p.is("name") && slices.Contains(ends, p.cur().text) {
				return body
			}
			body = append(body, p.statement())
			p.expect("block_end")
		}
	}
}

// block parses the body of a statement up to one of the tags of ends, which it returns.
func (p *parser) block(ends ...string) ([]stmt, string) {
	p.skip(":")
	p.expect("block_end")
	body := p.statements(ends)
	return body, p.next().text
}

// body parses the body of a statement that one tag ends.
func (p *parser) body(end string) []stmt {
	body, _ := p.block(end)
	return body
}

func (p *parser) unknownTag(tag string) {
	message := "Unexpected end of template."
	if tag != "" {
		message = "Encountered unknown tag '" + tag + "'."
	}
	if n := len(p.ends); n > 0 {
		looking := "'" + strings.Join(p.ends[n-1], "' or '") + "'"
		if slices.ContainsFunc(p.ends, func(ends []string) bool { return slices.Contains(ends, tag) }) {
			message += " You probably made a nesting mistake. Jinja is expecting this tag, but currently looking for " + looking + "."
		} else {
			message += " Jinja was looking for the following tags: " + looking + "."
		}
	}
	if n := len(p.tags); n > 0 {
		message += " The innermost block that needs to be closed is '" + p.tags[n-1] + "'."
	}
	p.fail("%s", message)
}

// statement parses what stands between {% and %}.
func (p *parser) statement() stmt {
	t := p.cur()
	if t.kind != "name" {
		p.fail("tag name expected")
	}
	parse := map[string]func(line int) stmt{
		"for": p.parseFor, "if": p.parseIf, "set": p.parseSet, "with": p.parseWith, "macro": p.parseMacro, "call": p.parseCallBlock,
		"filter": p.parseFilterBlock, "print": p.parsePrint, "block": p.parseBlock,
		"generation": func(line int) stmt { return &scoped{line: line, function: true, body: p.body("endgeneration")} },
		"break":      func(line int) stmt { return &loopControl{line: line, signal: breaks} },
		"continue":   func(line int) stmt { return &loopControl{line: line, signal: continues} },
	}[t.text]
	switch {
	case parse != nil:
	case slices.Contains([]string{"include", "import", "from", "extends"}, t.text):
		p.fail("{%% %s %%} is refused: chat templates may not reach other files", t.text)
	case t.text == "autoescape":
		p.fail("{%% autoescape %%} is not supported")
	default:
		p.unknownTag(t.text)
	}
	p.tags = append(p.tags, t.text)
	defer func() { p.tags = p.tags[:len(p.tags)-1] }()
	p.next()
	return parse(t.line)
}

func (p *parser) parseFor(line int) stmt {
	n := &forStmt{line: line, target: p.target(tupleRules{})}
	p.expectName("in")
	n.iter = p.tuple(tupleRules{})
	if p.skipName("if") {
		n.test = p.expression()
	}
	n.recursive = p.skipName("recursive")
	end := ""
	if n.body, end = p.block("endfor", "else"); end == "else" {
		n.otherwise = p.body("endfor")
	}
	return n
}

func (p *parser) parseIf(line int) stmt {
	n := &ifStmt{line: line}
	for {
		n.tests = append(n.tests, p.tuple(tupleRules{}))
		body, end := p.block("elif", "else", "endif")
		n.bodies = append(n.bodies, body)
		switch end {
		case "else":
			n.otherwise = p.body("endif")
			return n
		case "endif":
			return n
		}
	}
}

func (p *parser) parseSet(line int) stmt {
	target := p.target(tupleRules{namespace: true})
	if p.skip("=") {
		return &setStmt{line: line, target: target, value: p.tuple(tupleRules{conditionals: true})}
	}
	n := &setBlock{line: line, target: target, filter: p.filters(nil)}
	n.body = p.body("endset")
	return n
}

func (p *parser) parseWith(line int) stmt {
	n := &withStmt{line: line}
	for !p.is("block_end") {
		if n.targets != nil {
			p.expect(",")
		}
		n.targets = append(n.targets, p.target(tupleRules{}))
		p.expect("=")
		n.values = append(n.values, p.expression())
	}
	n.body = p.body("endwith")
	return n
}

// nameTarget parses a name that is assigned to.
func (p *parser) nameTarget() string {
	t := p.expect("name")
	p.assignable(t)
	return t.text
}

func (p *parser) assignable(t *token) {
	if slices.Contains([]string{"true", "false", "none", "True", "False", "None"}, t.text) {
		raiseAt(t.line, "can't assign to '%s'", t.text)
	}
}

func (p *parser) signature(m *macroStmt) {
	p.expect("(")
	for !p.is(")") {
		if m.params != nil {
			p.expect(",")
		}
		m.params = append(m.params, p.nameTarget())
		if p.skip("=") {
			m.defaults = append(m.defaults, p.expression())
		} else if m.defaults != nil {
			p.fail("non-default argument follows default argument")
		}
	}
	p.expect(")")
}

func (p *parser) parseMacro(line int) stmt {
	m := &macroStmt{line: line, name: p.nameTarget()}
	p.signature(m)
	m.body = p.body("endmacro")
	p.specials(m)
	return m
}

// specials finds out which of caller, varargs and kwargs a macro's body names.
func (p *parser) specials(m *macroStmt) {
	found := undeclared(m.body, "caller", "varargs", "kwargs")
	m.caller = found["caller"]
	m.varargs = found["varargs"] && !slices.Contains(m.params, "varargs")
	m.kwargs = found["kwargs"] && !slices.Contains(m.params, "kwargs")
	if i := slices.Index(m.params, "caller"); m.caller && i >= 0 {
		if i < len(m.params)-len(m.defaults) {
			raiseAt(m.line, `When defining macros or call blocks the special "caller" argument must be omitted or be given a default.`)
		}
		m.caller = false
	}
}

func (p *parser) parseCallBlock(line int) stmt {
	m := &macroStmt{line: line, name: "caller"}
	if p.is("(") {
		p.signature(m)
	}
	c, ok := p.expression().(*call)
	if !ok {
		p.fail("expected call")
	}
	m.body = p.body("endcall")
	p.specials(m)
	return &callBlock{line: line, call: c, macro: m}
}

func (p *parser) parseFilterBlock(line int) stmt {
	first := p.filter(nil)
	n := &filterBlock{line: line, filter: p.filters(first)}
	n.body = p.body("endfilter")
	return n
}

func (p *parser) parsePrint(line int) stmt {
	n := &output{line: line}
	for !p.is("block_end") {
		if n.parts != nil {
			p.expect(",")
		}
		n.parts = append(n.parts, p.expression())
	}
	return n
}

// parseBlock parses a block, which renders where it stands as no template extends another.
func (p *parser) parseBlock(line int) stmt {
	name := p.expect("name").text
	p.skipName("scoped")
	p.skipName("required")
	n := &scoped{line: line, function: true, body: p.body("endblock")}
	p.skipName(name)
	return n
}

// tupleRules say how a tuple without brackets is parsed.
type tupleRules struct {
	simplified   bool // names and literals alone
	namespace    bool // ns.attr too
	conditionals bool // conditional expressions too
	parentheses  bool // it stands in brackets, so that it may be empty
}

// target parses what is assigned to.
func (p *parser) target(rules tupleRules) expr {
	rules.simplified = true
	line := p.cur().line
	e := p.tuple(rules)
	if !assignable(e) {
		raiseAt(line, "can't assign to '%s'", kindOf(e))
	}
	return e
}

func assignable(e expr) bool {
	switch e := e.(type) {
	case *name:
		e.store = true
		return true
	case *namespaceRef:
		return true
	case *tupleExpr:
		return !slices.ContainsFunc(e.items, func(e expr) bool { return !assignable(e) })
	}
	return false
}

// kindOf names a node as jinja2 does.
func kindOf(e expr) string {
	switch e.(type) {
	case *constant:
		return "const"
	case *listExpr:
		return "list"
	case *dictExpr:
		return "dict"
	case *tupleExpr:
		return "tuple"
	}
	return "expression"
}

// tuple parses an expression, or several with commas between them.
func (p *parser) tuple(rules tupleRules) expr {
	line := p.cur().line
	parse := func() expr {
		switch {
		case rules.simplified:
			return p.primary(rules.namespace)
		case rules.conditionals || rules.parentheses:
			return p.expression()
		}
		return p.or()
	}
	var items []expr
	isTuple := false
	for {
		if items != nil {
			p.expect(",")
		}
		if p.is("variable_end") || p.is("block_end") || p.is(")") {
			break
		}
		items = append(items, parse())
		if !p.is(",") {
			break
		}
		isTuple = true
	}
	if !isTuple {
		if items != nil {
			return items[0]
		}
		if !rules.parentheses {
			p.fail("Expected an expression, got '%s'", p.cur())
		}
	}
	return &tupleExpr{line: line, items: items}
}

func (p *parser) expression() expr {
	defer p.nest()()
	line := p.cur().line
	e := p.or()
	for p.skipName("if") {
		c := &conditional{line: line, then: e, test: p.or()}
		if p.skipName("else") {
			c.otherwise = p.expression()
		}
		e, line = c, p.cur().line
	}
	return e
}

func (p *parser) or() expr {
	left := p.and()
	for line := p.cur().line; p.skipName("or"); line = p.cur().line {
		left = &binaryExpr{line: line, op: "or", left: left, right: p.and()}
	}
	return left
}

func (p *parser) and() expr {
	left := p.not()
	for line := p.cur().line; p.skipName("and"); line = p.cur().line {
		left = &binaryExpr{line: line, op: "and", left: left, right: p.not()}
	}
	return left
}

func (p *parser) not() expr {
	defer p.nest()()
	if line := p.cur().line; p.skipName("not") {
		return &unaryExpr{line: line, op: "not", of: p.not()}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	n := &compareExpr{line: p.cur().line, first: p.sum()}
	for {
		op := p.cur().kind
		switch {
		case slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, op):
			p.next()
		case p.skipName("in"):
			op = "in"
		case p.isName("not") && p.look().kind == "name" && p.look().text == "in":
			p.next()
			p.next()
			op = "notin"
		case n.ops == nil:
			return n.first
		default:
			return n
		}
		n.ops, n.rest = append(n.ops, op), append(n.rest, p.sum())
	}
}

// arithmetic parses operands with the operators of one precedence between them.
func (p *parser) arithmetic(operand func() expr, ops ...string) expr {
	left := operand()
	for slices.Contains(ops, p.cur().kind) {
		t := p.next()
		left = &binaryExpr{line: t.line, op: t.kind, left: left, right: operand()}
	}
	return left
}

func (p *parser) sum() expr { return p.arithmetic(p.concat, "+", "-") }

func (p *parser) concat() expr {
	n := &concatExpr{line: p.cur().line, parts: []expr{p.product()}}
	for p.skip("~") {
		n.parts = append(n.parts, p.product())
	}
	if len(n.parts) == 1 {
		return n.parts[0]
	}
	return n
}

func (p *parser) product() expr { return p.arithmetic(p.power, "*", "/", "//", "%") }

func (p *parser) power() expr {
	return p.arithmetic(func() expr { return p.unary(true) }, "**")
}

func (p *parser) unary(withFilters bool) expr {
	defer p.nest()()
	var e expr
	if t := p.cur(); p.skip("-") || p.skip("+") {
		e = &unaryExpr{line: t.line, op: t.kind, of: p.unary(false)}
	} else {
		e = p.primary(false)
	}
	e = p.postfix(e)
	if withFilters {
		e = p.filterExpr(e)
	}
	return e
}

func (p *parser) primary(namespace bool) expr {
	t := p.cur()
	switch t.kind {
	case "name":
		p.next()
		switch t.text {
		case "true", "True":
			return &constant{true}
		case "false", "False":
			return &constant{false}
		case "none", "None":
			return &constant{nil}
		}
		if namespace && p.skip(".") {
			return &namespaceRef{line: t.line, name: t.text, attr: p.expect("name").text}
		}
		return &name{line: t.line, name: t.text}
	case "string":
		p.next()
		s := t.text
		for p.is("string") {
			s += p.next().text
		}
		return &constant{Text{s: s}}
	case "number":
		p.next()
		return &constant{t.value}
	case "(":
		p.next()
		e := p.tuple(tupleRules{parentheses: true})
		p.expect(")")
		return e
	case "[":
		p.next()
		n := &listExpr{}
		for !p.is("]") {
			if n.items != nil {
				p.expect(",")
			}
			if p.is("]") {
				break
			}
			n.items = append(n.items, p.expression())
		}
		p.expect("]")
		return n
	case "{":
		p.next()
		n := &dictExpr{}
		for !p.is("}") {
			if n.keys != nil {
				p.expect(",")
			}
			if p.is("}") {
				break
			}
			n.keys = append(n.keys, p.expression())
			p.expect(":")
			n.values = append(n.values, p.expression())
		}
		p.expect("}")
		return n
	}
	p.fail("unexpected '%s'", t)
	return nil
}

func (p *parser) postfix(e expr) expr {
	for {
		switch p.cur().kind {
		case ".", "[":
			e = p.subscript(e)
		case "(":
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) filterExpr(e expr) expr {
	for {
		switch {
		case p.is("|"):
			e = p.filters(e)
		case p.isName("is"):
			e = p.test(e)
		case p.is("("):
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) subscript(of expr) expr {
	t := p.next()
	if t.kind == "." {
		switch a := p.next(); {
		case a.kind == "name":
			return &attribute{line: t.line, of: of, name: a.text}
		case a.kind == "number":
			if _, ok := a.value.(float64); !ok {
				return &item{line: t.line, of: of, key: &constant{a.value}}
			}
		}
		raiseAt(t.line, "expected name or number")
	}
	var keys []expr
	var part *slice
	for !p.is("]") {
		if keys != nil {
			p.expect(",")
		}
		key, s := p.index()
		keys = append(keys, key)
		if s != nil {
			part = s
		}
	}
	p.expect("]")
	switch {
	case len(keys) == 1 && part != nil:
		part.line, part.of = t.line, of
		return part
	case part != nil:
		raiseAt(t.line, "slices in a tuple are not supported")
	case len(keys) == 1:
		return &item{line: t.line, of: of, key: keys[0]}
	}
	return &item{line: t.line, of: of, key: &tupleExpr{line: t.line, items: keys}}
}

// index parses what stands in square brackets: a key or a slice.
func (p *parser) index() (expr, *slice) {
	s := &slice{}
	if !p.is(":") {
		e := p.expression()
		if !p.is(":") {
			return e, nil
		}
		s.start = e
	}
	p.next()
	if !p.is(":") && !p.is("]") && !p.is(",") {
		s.stop = p.expression()
	}
	if p.skip(":") && !p.is("]") && !p.is(",") {
		s.step = p.expression()
	}
	return nil, s
}

func (p *parser) arguments() arguments {
	t := p.expect("(")
	var a arguments
	ensure := func(ok bool) {
		if !ok {
			raiseAt(t.line, "invalid syntax for function call expression")
		}
	}
	for first := true; !p.is(")"); first = false {
		if !first {
			p.expect(",")
			if p.is(")") {
				break
			}
		}
		switch {
		case p.skip("*"):
			ensure(a.star == nil && a.dstar == nil)
			a.star = p.expression()
		case p.skip("**"):
			ensure(a.dstar == nil)
			a.dstar = p.expression()
		case p.is("name") && p.look().kind == "=":
			ensure(a.dstar == nil)
			key := p.next().text
			p.next()
			ensure(!slices.ContainsFunc(a.kwargs, func(k keywordExpr) bool { return k.name == key }))
			a.kwargs = append(a.kwargs, keywordExpr{name: key, value: p.expression()})
		default:
			ensure(a.star == nil && a.dstar == nil && a.kwargs == nil)
			a.args = append(a.args, p.expression())
		}
	}
	p.expect(")")
	return a
}

func (p *parser) call(of expr) expr {
	return &call{line: p.cur().line, of: of, args: p.arguments()}
}

// filters parses filters with their bars.
func (p *parser) filters(e expr) expr {
	for p.skip("|") {
		e = p.filter(e)
	}
	return e
}

func (p *parser) filter(e expr) expr {
	f := &filter{line: p.cur().line, of: e, name: p.dotted()}
	if p.is("(") {
		f.args = p.arguments()
	}
	return f
}

func (p *parser) dotted() string {
	s := p.expect("name").text
	for p.skip(".") {
		s += "." + p.expect("name").text
	}
	return s
}

func (p *parser) test(of expr) expr {
	line := p.next().line
	negated := p.skipName("not")
	n := &test{line: line, of: of, name: p.dotted()}
	switch t := p.cur(); {
	case t.kind == "(":
		n.args = p.arguments()
	case slices.Contains([]string{"name", "string", "number", "[", "{"}, t.kind) && !p.isName("else") && !p.isName("or") && !p.isName("and"):
		if p.isName("is") {
			p.fail("You cannot chain multiple tests with is")
		}
		n.args.args = []expr{p.postfix(p.primary(false))}
	}
	if negated {
		return &unaryExpr{line: line, op: "not", of: n}
	}
	return n
}
