package jinja

import "math/big"

var tests map[string]*builtin

func init() { // the test "test" asks for tests by name
	is := func(f func(v Value) bool) entry[any] {
		return entry[any]{"", func(_ *run, v any, _ []Value) Value { return f(v) }}
	}
	compare := func(op string) entry[any] {
		return entry[any]{"/ other", func(r *run, v any, a []Value) Value { return r.order(op, v, a[0]) }}
	}
	cases := func(name string) entry[any] {
		return entry[any]{"", func(r *run, v any, _ []Value) Value { return method(r, v, name) }}
	}
	isUndefined := func(v Value) bool {
		_, ok := v.(*undefined)
		return ok
	}
	modulo := func(v, n Value, r *run) Value { return r.binary("%", v, n) }
	equal := entry[any]{"/ other", func(r *run, v any, a []Value) Value { return r.equal(v, a[0]) }}
	unequal := entry[any]{"/ other", func(r *run, v any, a []Value) Value { return !r.equal(v, a[0]) }}
	tests = table(map[string]entry[any]{
		"odd":         {"", func(r *run, v any, _ []Value) Value { return r.equal(modulo(v, 2, r), 1) }},
		"even":        {"", func(r *run, v any, _ []Value) Value { return r.equal(modulo(v, 2, r), 0) }},
		"divisibleby": {"num", func(r *run, v any, a []Value) Value { return r.equal(modulo(v, a[0], r), 0) }},
		"defined":     is(func(v Value) bool { return !isUndefined(v) }),
		"undefined":   is(isUndefined),
		"filter": {"", func(_ *run, v any, _ []Value) Value {
			t, ok := hash(v).(string)
			return ok && filters[t] != nil
		}},
		"test": {"", func(_ *run, v any, _ []Value) Value {
			t, ok := hash(v).(string)
			return ok && tests[t] != nil
		}},
		"none": is(func(v Value) bool { return v == nil }),
		"boolean": is(func(v Value) bool {
			_, ok := v.(bool)
			return ok
		}),
		"false": is(func(v Value) bool { return v == false }),
		"true":  is(func(v Value) bool { return v == true }),
		"integer": is(func(v Value) bool {
			switch v.(type) {
			case int, *big.Int:
				return true
			}
			return false
		}),
		"float": is(func(v Value) bool {
			_, ok := v.(float64)
			return ok
		}),
		"lower": cases("islower"),
		"upper": cases("isupper"),
		"string": is(func(v Value) bool {
			_, ok := v.(Text)
			return ok
		}),
		"mapping": is(func(v Value) bool {
			_, ok := v.(*Dict)
			return ok
		}),
		"number": is(isNumber),
		"sequence": is(func(v Value) bool {
			switch v.(type) {
			case Text, *List, Tuple, *group, *Dict, *rangeValue, *undefined:
				return true
			}
			return false
		}),
		"iterable": is(iterable),
		"callable": is(func(v Value) bool {
			switch v.(type) {
			case *function, *macro, *loop, *joiner, *undefined:
				return true
			}
			return false
		}),
		"sameas": {"other", func(_ *run, v any, a []Value) Value { return same(v, a[0]) }},
		"escaped": is(func(v Value) bool {
			t, ok := v.(Text)
			return ok && t.markup
		}),
		"in": {"seq", func(r *run, v any, a []Value) Value { return r.contains(a[0], v) }},
		"==": equal, "eq": equal, "equalto": equal, "!=": unequal, "ne": unequal,
		">": compare(">"), "gt": compare(">"), "greaterthan": compare(">"), ">=": compare(">="), "ge": compare(">="),
		"<": compare("<"), "lt": compare("<"), "lessthan": compare("<"), "<=": compare("<="), "le": compare("<="),
	})
}
