package jinja

import (
	"fmt"
	"math"
	"math/big"
	"strings"
	"unicode/utf8"
)

// Value is a Python value:
//
//	nil                   None
//	bool, int, float64    bool, int, float
//	*big.Int              an int that does not fit into int
//	Text                  str (and Markup)
//	*List, Tuple, *Dict   list, tuple, dict
//	*undefined            jinja2's Undefined
//
// and what templates make themselves: ranges, dict views, iterators, namespaces, macros, loops, functions.
type Value any

// List is a list. Templates cannot change it.
type List struct{ Items []Value }

// Tuple is a tuple.
type Tuple []Value

// undefined stands for what is not there; using it raises its message.
type undefined struct{ message string }

// rangeValue is a range.
type rangeValue struct{ start, stop, step int }

func (v *rangeValue) len() int {
	switch {
	case v.step > 0 && v.start < v.stop:
		return (v.stop-v.start-1)/v.step + 1
	case v.step < 0 && v.start > v.stop:
		return (v.start-v.stop-1)/-v.step + 1
	}
	return 0
}

// view is what keys, values and items of a dict return.
type view struct {
	kind string
	d    *Dict
}

func (v *view) at(i int) Value {
	switch v.kind {
	case "keys":
		return v.d.keys[i]
	case "values":
		return v.d.values[i]
	}
	return Tuple{v.d.keys[i], v.d.values[i]}
}

// iterator is a generator: it can be walked once, is always true, and has no length.
type iterator struct {
	next func() (Value, bool)
	kind string
}

// namespace is the only value whose attributes a template may set.
type namespace struct{ attrs *Dict }

// group is a namedtuple of groupby.
type group struct{ grouper, list Value }

// Dict is a dict, in the order in which its keys were set first.
type Dict struct {
	keys, values []Value
	index        map[any]int // of hashes; nil while there are few
}

// fewKeys is the number of keys up to which a search is faster than an index.
const fewKeys = 8

// NewDict returns an empty dict.
func NewDict() *Dict { return &Dict{} }

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// Set assigns the value of a key, which keeps its place if it is there already. Set panics if the key cannot be hashed.
func (d *Dict) Set(key, value Value) {
	i := d.find(key)
	if i >= 0 {
		d.values[i] = value
		return
	}
	d.keys, d.values = append(d.keys, key), append(d.values, value)
	if d.index != nil {
		d.index[hash(key)] = len(d.keys) - 1
	} else if len(d.keys) > fewKeys {
		d.index = make(map[any]int, 2*fewKeys)
		for i, k := range d.keys {
			d.index[hash(k)] = i
		}
	}
}

// SetString assigns the value of a key that is the template's own.
func (d *Dict) SetString(key string, value Value) { d.Set(Text{s: key}, value) }

// Update sets all keys of another dict.
func (d *Dict) Update(other *Dict) {
	for i, key := range other.keys {
		d.Set(key, other.values[i])
	}
}

// Get returns the value of a key, and whether it is there.
func (d *Dict) Get(key string) (Value, bool) { return d.get(Text{s: key}) }

func (d *Dict) get(key Value) (Value, bool) {
	if i := d.find(key); i >= 0 {
		return d.values[i], true
	}
	return nil, false
}

func (d *Dict) find(key Value) int {
	h := hash(key)
	if d.index != nil {
		if i, ok := d.index[h]; ok {
			return i
		}
		return -1
	}
	for i, k := range d.keys {
		if hash(k) == h {
			return i
		}
	}
	return -1
}

// bigKey, tupleKey and noneKey are hashes that no other value has.
type (
	bigKey   string
	tupleKey string
	noneKey  struct{}
)

// maxHashed bounds the elements of a tuple that is a key.
const maxHashed = 1000

// hash returns a comparable value, equal for values that Python finds equal as keys. It raises for lists and dicts.
func hash(v Value) any {
	budget := maxHashed
	return hashWithin(v, &budget)
}

func hashWithin(v Value, budget *int) any {
	switch v := v.(type) {
	case nil:
		return noneKey{}
	case Text:
		return v.s
	case bool:
		if v {
			return 1
		}
		return 0
	case int:
		return v
	case *big.Int:
		return bigKey(v.String())
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<62 {
			return int(v)
		}
		if v == math.Trunc(v) && !math.IsInf(v, 0) {
			i, _ := new(big.Float).SetFloat64(v).Int(nil)
			return bigKey(i.String())
		}
		return v
	case Tuple:
		var b strings.Builder
		for _, item := range v {
			if *budget--; *budget < 0 {
				limit("a key of more than %d elements", maxHashed)
			}
			h := hashWithin(item, budget)
			fmt.Fprintf(&b, "%T:%q,", h, fmt.Sprint(h))
		}
		return tupleKey(b.String())
	case *group:
		return hashWithin(Tuple{v.grouper, v.list}, budget)
	case *undefined:
		return undefined{}
	case *List, *Dict, *view:
		raise("unhashable type: '%s'", typeName(v))
	}
	return v
}

// typeName is the name of a value's class.
func typeName(v Value) string {
	switch v := v.(type) {
	case nil:
		return "NoneType"
	case bool:
		return "bool"
	case int, *big.Int:
		return "int"
	case float64:
		return "float"
	case Text:
		if v.markup {
			return "Markup"
		}
		return "str"
	case *List:
		return "list"
	case Tuple, *group:
		return "tuple"
	case *Dict:
		return "dict"
	case *undefined:
		return "Undefined"
	case *rangeValue:
		return "range"
	case *view:
		return "dict_" + v.kind
	case *iterator:
		return v.kind
	case *namespace:
		return "Namespace"
	case *macro:
		return "Macro"
	case *loop:
		return "LoopContext"
	case *cycler:
		return "Cycler"
	case *joiner:
		return "Joiner"
	}
	return "function"
}

// described is a value's class as messages of undefined values name it.
func described(v Value) string {
	if v == nil {
		return "None"
	}
	return typeName(v) + " object"
}

// truth is bool(v).
func truth(v Value) bool {
	switch v := v.(type) {
	case nil, *undefined:
		return false
	case bool:
		return v
	case int:
		return v != 0
	case *big.Int:
		return v.Sign() != 0
	case float64:
		return v != 0
	case *loop:
		return v.length() != 0
	}
	if n, ok := length(v); ok {
		return n != 0
	}
	return true
}

// length is len(v), and whether v has one.
func length(v Value) (int, bool) {
	switch v := v.(type) {
	case Text:
		return utf8.RuneCountInString(v.s), true
	case *List:
		return len(v.Items), true
	case Tuple:
		return len(v), true
	case *group:
		return 2, true
	case *Dict:
		return v.Len(), true
	case *view:
		return v.d.Len(), true
	case *rangeValue:
		return v.len(), true
	case *undefined:
		return 0, true
	case *loop:
		return v.length(), true
	}
	return 0, false
}

// lengthOf is len(v), which raises for what has none.
func lengthOf(v Value) int {
	n, ok := length(v)
	if !ok {
		raise("object of type '%s' has no len()", typeName(v))
	}
	return n
}

// items returns the elements of what holds them in memory.
func items(v Value) ([]Value, bool) {
	switch v := v.(type) {
	case *List:
		return v.Items, true
	case Tuple:
		return v, true
	case *group:
		return []Value{v.grouper, v.list}, true
	case *Dict:
		return v.keys, true
	case *undefined:
		return nil, true
	}
	return nil, false
}

// iterable reports whether a value can be walked.
func iterable(v Value) bool {
	if _, ok := items(v); ok {
		return true
	}
	switch v.(type) {
	case Text, *view, *rangeValue, *iterator, *loop:
		return true
	}
	return false
}

// iterate is iter(v). Each element costs a step.
func (r *run) iterate(v Value) *iterator {
	if it, ok := v.(*iterator); ok {
		return it
	}
	i, n, at := 0, 0, func(int) Value { return nil }
	if list, ok := items(v); ok {
		n, at = len(list), func(i int) Value { return list[i] }
	} else {
		switch v := v.(type) {
		case Text:
			rest := v.plain()
			return &iterator{kind: "str_iterator", next: func() (Value, bool) {
				if rest.s == "" {
					return nil, false
				}
				r.step(1)
				r.made(textBytes)
				_, size := utf8.DecodeRuneInString(rest.s)
				c := rest.slice(0, size)
				rest = rest.slice(size, len(rest.s))
				return c, true
			}}
		case *view:
			n, at = v.d.Len(), v.at
		case *rangeValue:
			n, at = v.len(), func(i int) Value { return v.start + i*v.step }
		case *loop:
			return &iterator{kind: "LoopContext", next: func() (Value, bool) {
				item, ok := v.advance()
				return Tuple{item, v}, ok
			}}
		default:
			raise("'%s' object is not iterable", typeName(v))
		}
	}
	return &iterator{kind: typeName(v) + "_iterator", next: func() (Value, bool) {
		if i >= n {
			return nil, false
		}
		r.step(1)
		i++
		return at(i - 1), true
	}}
}

// collect is list(v).
func (r *run) collect(v Value) []Value {
	if list, ok := items(v); ok {
		r.step(len(list))
		return list
	}
	var list []Value
	for it := r.iterate(v); ; {
		item, ok := it.next()
		if !ok {
			return list
		}
		r.made(wordBytes)
		list = append(list, item)
	}
}

// list makes a list of values.
func (r *run) list(values []Value) *List {
	r.made(wordBytes * len(values))
	return &List{Items: values}
}

// reversed is reversed(v), and whether v can be walked backwards.
func (r *run) reversed(v Value) ([]Value, bool) {
	switch v.(type) {
	case *iterator, *loop:
		return nil, false
	}
	if !iterable(v) {
		return nil, false
	}
	list := r.collect(v)
	back := make([]Value, 0, len(list))
	for i := len(list) - 1; i >= 0; i-- {
		back = append(back, list[i])
	}
	r.made(wordBytes * len(back))
	return back, true
}

// equal is a == b.
func (r *run) equal(a, b Value) bool {
	r.step(1)
	r.enter()
	defer r.leave()
	if isNumber(a) && isNumber(b) {
		return compareNumbers(a, b) == 0
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case Text:
		b, ok := b.(Text)
		r.scan(a)
		return ok && a.s == b.s
	case *undefined:
		_, ok := b.(*undefined)
		return ok
	case *Dict:
		b, ok := b.(*Dict)
		if !ok || a.Len() != b.Len() {
			return false
		}
		for i, key := range a.keys {
			v, ok := b.get(key)
			if !ok || !r.equal(a.values[i], v) {
				return false
			}
		}
		return true
	case *rangeValue:
		b, ok := b.(*rangeValue)
		n := a.len()
		return ok && n == b.len() && (n == 0 || a.start == b.start && (n == 1 || a.step == b.step))
	case *List, Tuple, *group:
		if isTuple(a) != isTuple(b) {
			return false
		}
		if _, list := b.(*List); !list && !isTuple(b) {
			return false
		}
		x, _ := items(a)
		y, _ := items(b)
		if len(x) != len(y) {
			return false
		}
		for i := range x {
			if !r.equal(x[i], y[i]) {
				return false
			}
		}
		return true
	}
	return same(a, b)
}

func isTuple(v Value) bool {
	switch v.(type) {
	case Tuple, *group:
		return true
	}
	return false
}

// same is a is b. Scalars of one type that are equal count as one object, as those of CPython mostly are.
func same(a, b Value) bool {
	switch x := a.(type) {
	case Text:
		y, ok := b.(Text)
		return ok && x.s == y.s && x.markup == y.markup
	case Tuple:
		y, ok := b.(Tuple)
		return ok && len(x) == len(y) && (len(x) == 0 || &x[0] == &y[0])
	case *big.Int:
		y, ok := b.(*big.Int)
		return ok && x == y
	}
	switch b.(type) {
	case Text, Tuple:
		return false
	}
	return a == b
}

// order compares a and b for the operator op, which must be one of < <= > >=.
func (r *run) order(op string, a, b Value) bool {
	c, ok := r.compare(a, b, op)
	if !ok {
		return false // a NaN
	}
	switch op {
	case "<":
		return c < 0
	case "<=":
		return c <= 0
	case ">":
		return c > 0
	}
	return c >= 0
}

// compare returns the sign of a - b; ok is false for numbers without order. It raises for values that Python does not
// compare with op.
func (r *run) compare(a, b Value, op string) (c int, ok bool) {
	r.step(1)
	r.enter()
	defer r.leave()
	failIfUndefined(a, b)
	if isNumber(a) && isNumber(b) {
		c := compareNumbers(a, b)
		return c, c != unordered
	}
	switch x := a.(type) {
	case Text:
		if y, ok := b.(Text); ok {
			r.scan(x)
			switch {
			case x.s < y.s:
				return -1, true
			case x.s > y.s:
				return 1, true
			}
			return 0, true
		}
	case *List, Tuple, *group:
		if _, list := b.(*List); !list && !isTuple(b) || isTuple(a) != isTuple(b) {
			break
		}
		x1, _ := items(a)
		y1, _ := items(b)
		for i := range min(len(x1), len(y1)) {
			if !r.equal(x1[i], y1[i]) {
				return r.compare(x1[i], y1[i], op)
			}
		}
		return len(x1) - len(y1), true
	}
	raise("'%s' not supported between instances of '%s' and '%s'", op, typeName(a), typeName(b))
	return 0, false
}

// contains is v in container.
func (r *run) contains(container, v Value) bool {
	switch c := container.(type) {
	case Text:
		t, ok := v.(Text)
		if !ok {
			raise("'in <string>' requires string as left operand, not %s", typeName(v))
		}
		r.scan(c)
		return c.find(t.s) >= 0
	case *Dict:
		r.scan(v)
		return c.find(v) >= 0
	case *view:
		if c.kind == "keys" {
			return c.d.find(v) >= 0
		}
	case *iterator:
	default:
		if !iterable(container) {
			raise("argument of type '%s' is not iterable", typeName(container))
		}
	}
	for it := r.iterate(container); ; {
		item, ok := it.next()
		if !ok {
			return false
		}
		if same(item, v) || r.equal(item, v) {
			return true
		}
	}
}

// failIfUndefined raises the message of the first undefined value.
func failIfUndefined(values ...Value) {
	for _, v := range values {
		if u, ok := v.(*undefined); ok {
			raise("%s", u.message)
		}
	}
}
