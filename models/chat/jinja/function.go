package jinja

import "strings"

// missing stands for a parameter that was not given.
var missing Value = &struct{ _ byte }{}

// args are the arguments of a call.
type args struct {
	pos []Value
	kw  []keyword
}

type keyword struct {
	name  string
	value Value
}

func (a *args) named(name string) (Value, bool) {
	for _, k := range a.kw {
		if k.name == name {
			return k.value, true
		}
	}
	return nil, false
}

// builtin is a function, filter, test or method that is written in Go.
type builtin struct {
	name       string
	params     []string
	required   int
	positional bool // keywords are not accepted
	variadic   bool // it gets the arguments as they are
	fn         func(r *run, self Value, a []Value) Value
	raw        func(r *run, self Value, a *args) Value
}

// function is a value that can be called: a builtin, with the value whose method it is.
type function struct {
	self    Value
	builtin *builtin
}

// entry describes a builtin of values of type T. Its signature lists the parameters, those that may be missing with a
// question mark; a slash in front excludes keywords, and * takes all arguments.
type entry[T any] struct {
	signature string
	fn        func(r *run, v T, a []Value) Value
}

func newBuiltin(name, signature string) *builtin {
	b := &builtin{name: name}
	for _, p := range strings.Fields(signature) {
		switch p {
		case "/":
			b.positional = true
		case "*":
			b.variadic = true
		default:
			param, optional := strings.CutSuffix(p, "?")
			if !optional {
				b.required++
			}
			b.params = append(b.params, param)
		}
	}
	return b
}

// table makes builtins of entries.
func table[T any](entries map[string]entry[T]) map[string]*builtin {
	t := make(map[string]*builtin, len(entries))
	for name, e := range entries {
		b := newBuiltin(name, e.signature)
		b.fn = func(r *run, self Value, a []Value) Value {
			v, _ := self.(T)
			return e.fn(r, v, a)
		}
		t[name] = b
	}
	return t
}

// raws adds builtins that take their arguments as they are.
func raws(t map[string]*builtin, entries map[string]func(r *run, self Value, a *args) Value) map[string]*builtin {
	for name, f := range entries {
		t[name] = newBuiltin(name, "*")
		t[name].raw = f
	}
	return t
}

func (b *builtin) call(r *run, self Value, a *args) Value {
	r.step(1)
	r.scan(self)
	for _, v := range a.pos {
		r.scan(v)
	}
	if b.variadic {
		return b.raw(r, self, a)
	}
	return b.fn(r, self, a.bind(b))
}

// bind returns the values of a builtin's parameters.
func (a *args) bind(b *builtin) []Value {
	if len(a.pos) > len(b.params) {
		raise("%s() takes at most %d arguments (%d given)", b.name, len(b.params), len(a.pos))
	}
	out := make([]Value, len(b.params))
	for i := range out {
		out[i] = missing
	}
	copy(out, a.pos)
	for _, k := range a.kw {
		i := -1
		for j, p := range b.params {
			if p == k.name {
				i = j
			}
		}
		if i < 0 || b.positional {
			raise("%s() got an unexpected keyword argument '%s'", b.name, k.name)
		}
		if out[i] != missing {
			raise("%s() got multiple values for argument '%s'", b.name, k.name)
		}
		out[i] = k.value
	}
	for i := range b.required {
		if out[i] == missing {
			raise("%s() missing required argument: '%s'", b.name, b.params[i])
		}
	}
	return out
}
