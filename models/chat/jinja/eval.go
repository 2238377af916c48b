package jinja

import (
	"fmt"
	"strings"
)

// scope holds variables. A scope with vars is the context or the globals, which templates do not change.
type scope struct {
	vars   map[string]Value
	names  []string
	values []Value
	parent *scope
	few    struct { // where the first of them are, so that a loop allocates once per item
		names  [3]string
		values [3]Value
	}
}

func newScope(parent *scope) *scope {
	s := &scope{parent: parent}
	s.names, s.values = s.few.names[:0], s.few.values[:0]
	return s
}

func (s *scope) get(name string) (Value, bool) {
	for ; s != nil; s = s.parent {
		if s.vars != nil {
			if v, ok := s.vars[name]; ok {
				return v, true
			}
			continue
		}
		for i := len(s.names) - 1; i >= 0; i-- {
			if s.names[i] == name {
				return s.values[i], true
			}
		}
	}
	return nil, false
}

func (s *scope) set(name string, v Value) {
	for i, n := range s.names {
		if n == name {
			s.values[i] = v
			return
		}
	}
	s.names, s.values = append(s.names, name), append(s.values, v)
}

func (r *run) exec(body []stmt, s *scope) signal {
	for _, n := range body {
		r.step(1)
		if sig := n.exec(r, s); sig != done {
			return sig
		}
	}
	return done
}

func (r *run) eval(e expr, s *scope) Value {
	r.step(1)
	return e.eval(r, s)
}

func (n *constant) eval(*run, *scope) Value { return n.value }

func (n *name) eval(_ *run, s *scope) Value {
	if v, ok := s.get(n.name); ok {
		return v
	}
	return &undefined{"'" + n.name + "' is undefined"}
}

func (r *run) evalAll(list []expr, s *scope) []Value {
	values := make([]Value, len(list))
	for i, e := range list {
		values[i] = r.eval(e, s)
	}
	r.made(wordBytes * len(list))
	return values
}

func (n *listExpr) eval(r *run, s *scope) Value  { return &List{Items: r.evalAll(n.items, s)} }
func (n *tupleExpr) eval(r *run, s *scope) Value { return Tuple(r.evalAll(n.items, s)) }

func (n *dictExpr) eval(r *run, s *scope) Value {
	d := NewDict()
	r.made(4 * wordBytes * len(n.keys))
	for i, key := range n.keys {
		k := r.eval(key, s)
		d.Set(k, r.eval(n.values[i], s))
	}
	return d
}

func (n *attribute) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	r.line = n.line
	return r.attribute(v, n.name)
}

// attribute is v.name: an attribute, or else an item.
func (r *run) attribute(v Value, name string) Value {
	failIfUndefined(v)
	if a, ok := r.ownAttribute(v, name); ok {
		return a
	}
	if found, ok := subscribe(v, Text{s: name}); ok {
		return found
	}
	return &undefined{fmt.Sprintf("%s has no attribute %s", quote(described(v)), quote(name))}
}

func (n *item) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	key := r.eval(n.key, s)
	r.line = n.line
	return r.item(v, key)
}

// item is v[key]: an item, or else an attribute.
func (r *run) item(v, key Value) Value {
	failIfUndefined(v)
	r.scan(v)
	r.scan(key)
	if found, ok := subscribe(v, key); ok {
		return found
	}
	if t, ok := key.(Text); ok {
		if a, ok := r.ownAttribute(v, t.s); ok {
			return a
		}
		return &undefined{fmt.Sprintf("%s has no attribute %s", quote(described(v)), quote(t.s))}
	}
	return &undefined{fmt.Sprintf("%s has no element %s", described(v), r.repr(key).s)}
}

// subscribe is v[key] of Python.
func subscribe(v, key Value) (Value, bool) {
	if d, ok := v.(*Dict); ok {
		switch key.(type) {
		case *List, *Dict, *view:
			return nil, false // a TypeError, which jinja2 takes for a key that is not there
		}
		return d.get(key)
	}
	i, ok := integer(key)
	if !ok {
		return nil, false
	}
	at := func(n int) bool {
		if i < 0 {
			i += n
		}
		return 0 <= i && i < n
	}
	switch v := v.(type) {
	case Text:
		return v.character(i)
	case *List, Tuple, *group:
		if list, _ := items(v); at(len(list)) {
			return list[i], true
		}
	case *rangeValue:
		if at(v.len()) {
			return v.start + i*v.step, true
		}
	}
	return nil, false
}

func (n *slice) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	var bounds [3]Value
	for i, e := range []expr{n.start, n.stop, n.step} {
		if e != nil {
			bounds[i] = r.eval(e, s)
		}
	}
	r.line = n.line
	failIfUndefined(v)
	length := 0
	switch v := v.(type) {
	case Text, *List, Tuple, *rangeValue:
		length, _ = lengthOf(v), 0
	case *Dict:
		raise("unhashable type: 'slice'")
	default:
		raise("'%s' object is not subscriptable", typeName(v))
	}
	start, stop, step := sliceBounds(bounds, length)
	if x, ok := v.(*rangeValue); ok {
		return &rangeValue{x.start + start*x.step, x.start + stop*x.step, x.step * step}
	}
	picks := (&rangeValue{start, stop, step}).len()
	r.step(picks)
	if t, ok := v.(Text); ok {
		r.scan(t)
		if step == 1 {
			from := byteOffset(t.s, start)
			return t.slice(from, from+byteOffset(t.s[from:], max(stop-start, 0)))
		}
		offsets := r.runes(t)
		b := builder{r: r}
		for i := range picks {
			at := start + i*step
			b.add(t.slice(offsets[at], offsets[at+1]))
		}
		out := b.text()
		out.markup = t.markup
		return out
	}
	list, _ := items(v)
	if step == 1 {
		list = list[start:max(start, stop):max(start, stop)]
	} else {
		out := make([]Value, picks)
		for i := range out {
			out[i] = list[start+i*step]
		}
		r.made(wordBytes * picks)
		list = out
	}
	if isTuple(v) {
		return Tuple(list)
	}
	return &List{Items: list}
}

// sliceBounds is slice.indices of Python.
func sliceBounds(bounds [3]Value, n int) (start, stop, step int) {
	index := func(v Value, otherwise, low, high int) int {
		if v == nil {
			return otherwise
		}
		i, ok := integer(v)
		if !ok {
			raise("slice indices must be integers or None or have an __index__ method")
		}
		if i < 0 {
			i = max(i+n, low)
		}
		return min(i, high)
	}
	step = 1
	if bounds[2] != nil {
		i, ok := integer(bounds[2])
		if !ok {
			raise("slice indices must be integers or None or have an __index__ method")
		}
		if i == 0 {
			raise("slice step cannot be zero")
		}
		step = max(min(i, n+1), -n-1)
	}
	if step > 0 {
		return index(bounds[0], 0, 0, n), index(bounds[1], n, 0, n), step
	}
	return index(bounds[0], n-1, -1, n-1), index(bounds[1], -1, -1, n-1), step
}

// values evaluates arguments.
func (a *arguments) values(r *run, s *scope) *args {
	out := &args{pos: r.evalAll(a.args, s)}
	if a.star != nil {
		out.pos = append(out.pos, r.collect(r.eval(a.star, s))...)
	}
	for _, k := range a.kwargs {
		out.kw = append(out.kw, keyword{k.name, r.eval(k.value, s)})
	}
	if a.dstar != nil {
		d, ok := r.eval(a.dstar, s).(*Dict)
		if !ok {
			raise("argument after ** must be a mapping")
		}
		for i, key := range d.keys {
			t, ok := key.(Text)
			if !ok {
				raise("keywords must be strings")
			}
			if _, ok := out.named(t.s); ok {
				raise("got multiple values for keyword argument %s", quote(t.s))
			}
			out.kw = append(out.kw, keyword{t.s, d.values[i]})
		}
	}
	return out
}

func (n *call) eval(r *run, s *scope) Value {
	f := r.eval(n.of, s)
	a := n.args.values(r, s)
	r.line = n.line
	return r.call(f, a)
}

// call calls a value.
func (r *run) call(f Value, a *args) Value {
	r.step(1)
	r.enter()
	defer r.leave()
	failIfUndefined(f)
	switch f := f.(type) {
	case *function:
		return f.builtin.call(r, f.self, a)
	case *macro:
		return f.call(r, a)
	case *loop:
		return f.recurse(a)
	case *cycler, *joiner:
		if j, ok := f.(*joiner); ok {
			return j.call()
		}
	}
	raise("'%s' object is not callable", typeName(f))
	return nil
}

func (n *filter) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	return n.apply(r, s, v)
}

func (n *filter) apply(r *run, s *scope, v Value) Value {
	f := filters[n.name]
	if f == nil {
		raiseAt(n.line, "No filter named %s found.", quote(n.name))
	}
	a := n.args.values(r, s)
	r.line = n.line
	return f.call(r, v, a)
}

// applyAll applies a chain of filters whose innermost has no operand.
func applyAll(e expr, r *run, s *scope, v Value) Value {
	if e == nil {
		return v
	}
	f := e.(*filter)
	return f.apply(r, s, applyAll(f.of, r, s, v))
}

func (n *test) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	f := tests[n.name]
	if f == nil {
		raiseAt(n.line, "No test named %s found.", quote(n.name))
	}
	a := n.args.values(r, s)
	r.line = n.line
	return f.call(r, v, a)
}

func (n *unaryExpr) eval(r *run, s *scope) Value {
	v := r.eval(n.of, s)
	if n.op == "not" {
		return !truth(v)
	}
	r.line = n.line
	return unary(n.op, v)
}

func (n *binaryExpr) eval(r *run, s *scope) Value {
	left := r.eval(n.left, s)
	switch n.op {
	case "and":
		if !truth(left) {
			return left
		}
		return r.eval(n.right, s)
	case "or":
		if truth(left) {
			return left
		}
		return r.eval(n.right, s)
	}
	right := r.eval(n.right, s)
	r.line = n.line
	return r.binary(n.op, left, right)
}

func (n *concatExpr) eval(r *run, s *scope) Value {
	b := builder{r: r}
	for _, v := range r.evalAll(n.parts, s) {
		b.add(r.str(v))
	}
	return b.text()
}

func (n *compareExpr) eval(r *run, s *scope) Value {
	left := r.eval(n.first, s)
	for i, op := range n.ops {
		right := r.eval(n.rest[i], s)
		r.line = n.line
		ok := false
		switch op {
		case "==":
			ok = r.equal(left, right)
		case "!=":
			ok = !r.equal(left, right)
		case "in":
			ok = r.contains(right, left)
		case "notin":
			ok = !r.contains(right, left)
		default:
			ok = r.order(op, left, right)
		}
		if !ok {
			return false
		}
		left = right
	}
	return true
}

func (n *conditional) eval(r *run, s *scope) Value {
	switch {
	case truth(r.eval(n.test, s)):
		return r.eval(n.then, s)
	case n.otherwise != nil:
		return r.eval(n.otherwise, s)
	}
	return &undefined{fmt.Sprintf("the inline if-expression on line %d evaluated to false and no else section was defined.", n.line)}
}

func (n *output) exec(r *run, s *scope) signal {
	for _, e := range n.parts {
		r.line = n.line
		r.write(r.str(r.eval(e, s)))
	}
	return done
}

func (n *ifStmt) exec(r *run, s *scope) signal {
	for i, e := range n.tests {
		r.line = n.line
		if truth(r.eval(e, s)) {
			return r.exec(n.bodies[i], s)
		}
	}
	return r.exec(n.otherwise, s)
}

// assign assigns a value to a target.
func (r *run) assign(target expr, v Value, s *scope) {
	switch t := target.(type) {
	case *name:
		s.set(t.name, v)
	case *namespaceRef:
		r.namespace(t, s).attrs.SetString(t.attr, v)
	case *tupleExpr:
		if !iterable(v) {
			raise("cannot unpack non-iterable %s object", typeName(v))
		}
		list := r.collect(v)
		if len(list) < len(t.items) {
			raise("not enough values to unpack (expected %d, got %d)", len(t.items), len(list))
		}
		if len(list) > len(t.items) {
			raise("too many values to unpack (expected %d)", len(t.items))
		}
		for i, e := range t.items {
			r.assign(e, list[i], s)
		}
	}
}

// namespace returns the namespace that a target names.
func (r *run) namespace(t *namespaceRef, s *scope) *namespace {
	v, _ := s.get(t.name)
	ns, ok := v.(*namespace)
	if !ok {
		raiseAt(t.line, "cannot assign attribute on non-namespace object")
	}
	return ns
}

func (n *setStmt) exec(r *run, s *scope) signal {
	r.line = n.line
	walk(n.target, func(part any) {
		if t, ok := part.(*namespaceRef); ok {
			r.namespace(t, s)
		}
	})
	v := r.eval(n.value, s)
	r.line = n.line
	r.assign(n.target, v, s)
	return done
}

func (n *setBlock) exec(r *run, s *scope) signal {
	inner := newScope(s)
	sig := done
	v := Value(r.capture(func() { sig = r.exec(n.body, inner) }))
	if sig != done {
		return sig
	}
	v = applyAll(n.filter, r, inner, v)
	r.assign(n.target, v, s)
	return done
}

func (n *filterBlock) exec(r *run, s *scope) signal {
	inner := newScope(s)
	sig := done
	v := Value(r.capture(func() { sig = r.exec(n.body, inner) }))
	if sig != done {
		return sig
	}
	r.write(r.str(applyAll(n.filter, r, inner, v)))
	return done
}

func (n *withStmt) exec(r *run, s *scope) signal {
	inner := newScope(s)
	for i, target := range n.targets {
		r.assign(target, r.eval(n.values[i], s), inner)
	}
	return r.exec(n.body, inner)
}

func (n *scoped) exec(r *run, s *scope) signal {
	return r.exec(n.body, newScope(s))
}

func (n *loopControl) exec(*run, *scope) signal { return n.signal }

func (n *forStmt) exec(r *run, s *scope) signal {
	r.line = n.line
	l := &loop{r: r, node: n, scope: s}
	return l.run(r.eval(n.iter, s))
}

// loop is the variable loop, and a loop under way.
type loop struct {
	r     *run
	node  *forStmt
	scope *scope // around it
	depth int    // of recursion, from 0

	source               Value // what is walked
	it                   *iterator
	filtered             bool // by a condition: then the length comes of walking
	index                int  // from 0; -1 before the first
	size                 int  // -1: not known yet
	ahead                []Value
	previous, current    Value
	hasPrevious, hasSeen bool
	seen                 []Value // by changed; nil: none
}

func (l *loop) run(v Value) signal {
	n, r := l.node, l.r
	l.source, l.index, l.size = v, -1, -1
	l.it = r.iterate(v)
	if n.test != nil {
		inner := l.it
		l.filtered = true
		l.it = &iterator{kind: "generator", next: func() (Value, bool) {
			for {
				item, ok := inner.next()
				if !ok {
					return nil, false
				}
				s := newScope(l.scope)
				r.assign(n.target, item, s)
				if truth(r.eval(n.test, s)) {
					return item, true
				}
			}
		}}
	}
	ran := false
	for {
		item, ok := l.advance()
		if !ok {
			break
		}
		s := newScope(l.scope)
		s.set("loop", l)
		r.line = n.line
		r.assign(n.target, item, s)
		sig := r.exec(n.body, s)
		if sig == breaks {
			break
		}
		ran = ran || sig == done
	}
	if !ran { // jinja2 looks at whether a body was run to its end
		return r.exec(n.otherwise, newScope(l.scope))
	}
	return done
}

// advance moves to the next item.
func (l *loop) advance() (Value, bool) {
	item, ok := l.peek()
	if !ok {
		return nil, false
	}
	l.ahead = l.ahead[1:]
	l.index++
	l.previous, l.hasPrevious = l.current, l.index > 0
	l.current = item
	return item, true
}

func (l *loop) peek() (Value, bool) {
	if len(l.ahead) == 0 {
		item, ok := l.it.next()
		if !ok {
			return nil, false
		}
		l.ahead = append(l.ahead, item)
	}
	return l.ahead[0], true
}

func (l *loop) length() int {
	if l.size < 0 {
		if n, ok := length(l.source); ok && !l.filtered {
			l.size = n
			return n
		}
		for {
			item, ok := l.it.next()
			if !ok {
				break
			}
			l.r.made(wordBytes)
			l.ahead = append(l.ahead, item)
		}
		l.size = l.index + 1 + len(l.ahead)
	}
	return l.size
}

// recurse renders the loop's body for other items.
func (l *loop) recurse(a *args) Value {
	if !l.node.recursive {
		raise("The loop must have the 'recursive' marker to be called recursively.")
	}
	v := a.bind(loopCall)[0]
	inner := &loop{r: l.r, node: l.node, scope: l.scope, depth: l.depth + 1}
	return l.r.capture(func() { inner.run(v) })
}

func (l *loop) attribute(name string) (Value, bool) {
	switch name {
	case "index":
		return l.index + 1, true
	case "index0":
		return l.index, true
	case "revindex":
		return l.length() - l.index, true
	case "revindex0":
		return l.length() - l.index - 1, true
	case "first":
		return l.index == 0, true
	case "last":
		_, more := l.peek()
		return !more, true
	case "length":
		return l.length(), true
	case "depth":
		return l.depth + 1, true
	case "depth0":
		return l.depth, true
	case "previtem":
		if !l.hasPrevious {
			return &undefined{"there is no previous item"}, true
		}
		return l.previous, true
	case "nextitem":
		if next, ok := l.peek(); ok {
			return next, true
		}
		return &undefined{"there is no next item"}, true
	case "cycle", "changed":
		return &function{self: l, builtin: loopMethods[name]}, true
	}
	return nil, false
}

// macro is a macro, or the body of a call block.
type macro struct {
	node  *macroStmt
	scope *scope // where it is defined
}

func (n *macroStmt) exec(_ *run, s *scope) signal {
	s.set(n.name, &macro{node: n, scope: s})
	return done
}

func (n *callBlock) exec(r *run, s *scope) signal {
	f := r.eval(n.call.of, s)
	a := n.call.args.values(r, s)
	a.kw = append(a.kw, keyword{"caller", &macro{node: n.macro, scope: s}})
	r.line = n.line
	r.write(r.str(r.call(f, a)))
	return done
}

func (m *macro) call(r *run, a *args) Value {
	n := m.node
	s := newScope(m.scope)
	kw := a.kw
	take := func(name string) (Value, bool) {
		for i, k := range kw {
			if k.name == name {
				kw = append(kw[:i:i], kw[i+1:]...)
				return k.value, true
			}
		}
		return nil, false
	}
	given := min(len(a.pos), len(n.params))
	values := make([]Value, len(n.params))
	for i := range n.params {
		values[i] = missing
		if i < given {
			values[i] = a.pos[i]
		} else if v, ok := take(n.params[i]); ok {
			values[i] = v
		}
	}
	var caller Value
	if n.caller {
		if v, ok := take("caller"); ok && v != nil {
			caller = v
		} else {
			caller = &undefined{"No caller defined"}
		}
	}
	if len(kw) > 0 && !n.kwargs {
		raise("macro %s takes no keyword argument %s", quote(n.name), quote(kw[0].name))
	}
	if len(a.pos) > given && !n.varargs {
		raise("macro %s takes not more than %d argument(s)", quote(n.name), len(n.params))
	}
	if n.caller {
		s.set("caller", caller)
	}
	if n.kwargs {
		d := NewDict()
		for _, k := range kw {
			d.SetString(k.name, k.value)
		}
		s.set("kwargs", d)
	}
	if n.varargs {
		s.set("varargs", Tuple(a.pos[given:]))
	}
	for i, param := range n.params {
		v := values[i]
		if v == missing {
			if d := i - (len(n.params) - len(n.defaults)); d >= 0 {
				v = r.eval(n.defaults[d], s)
			} else {
				v = &undefined{fmt.Sprintf("parameter %s was not provided", quote(param))}
			}
		}
		s.set(param, v)
	}
	return r.capture(func() { r.exec(n.body, s) })
}

func (m *macro) attribute(name string) (Value, bool) {
	switch name {
	case "name":
		return Text{s: m.node.name}, true
	case "arguments":
		var t Tuple
		for _, p := range m.node.params {
			t = append(t, Text{s: p})
		}
		return t, true
	case "catch_kwargs":
		return m.node.kwargs, true
	case "catch_varargs":
		return m.node.varargs, true
	case "caller":
		return m.node.caller, true
	}
	return nil, false
}

// ownAttribute returns what getattr of Python finds on a value. What the sandbox refuses is undefined.
func (r *run) ownAttribute(v Value, name string) (Value, bool) {
	var methods map[string]*builtin
	unsafe := ""
	switch v := v.(type) {
	case Text:
		methods = stringMethods
	case *Dict:
		methods, unsafe = dictMethods, " clear pop popitem setdefault update "
	case *List:
		methods, unsafe = listMethods, " append clear pop reverse insert sort extend remove "
	case Tuple:
		methods = tupleMethods
	case *group:
		switch name {
		case "grouper":
			return v.grouper, true
		case "list":
			return v.list, true
		}
		return r.ownAttribute(Tuple{v.grouper, v.list}, name)
	case *rangeValue:
		switch name {
		case "start":
			return v.start, true
		case "stop":
			return v.stop, true
		case "step":
			return v.step, true
		}
	case *namespace:
		return v.attrs.Get(name)
	case *loop:
		return v.attribute(name)
	case *macro:
		return v.attribute(name)
	case *cycler:
		return v.attribute(name)
	case float64:
		methods = floatMethods
	case bool, int:
		switch name {
		case "real", "numerator":
			i, _ := integer(v)
			return i, true
		case "imag":
			return 0, true
		case "denominator":
			return 1, true
		}
	}
	if b := methods[name]; b != nil {
		return &function{self: v, builtin: b}, true
	}
	if unsafe != "" && strings.Contains(unsafe, " "+name+" ") || strings.HasPrefix(name, "__") && strings.HasSuffix(name, "__") && known(name) {
		return &undefined{fmt.Sprintf("access to attribute %s of %s object is unsafe.", quote(name), quote(typeName(v)))}, true
	}
	return nil, false
}

// known reports whether every Python object has an attribute of this name.
func known(name string) bool {
	return strings.Contains(" __class__ __doc__ __init__ __eq__ __repr__ __str__ __hash__ __dir__ __format__ __new__ __reduce__ __sizeof__ ", " "+name+" ")
}
