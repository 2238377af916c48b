package chat

import (
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// tests are the Jinja2 tests, which templates call with "is".
func tests() map[string]exec.TestFunction {
	equal := with(func(v, to *exec.Value) (bool, error) { return v.EqualValueTo(to), nil })
	differs := with(func(v, to *exec.Value) (bool, error) { return !v.EqualValueTo(to), nil })
	less, atMost := ordered(func(o int) bool { return o < 0 }), ordered(func(o int) bool { return o <= 0 })
	greater, atLeast := ordered(func(o int) bool { return o > 0 }), ordered(func(o int) bool { return o >= 0 })
	there := func(v *exec.Value) bool { return !v.IsError() && !v.IsNil() }
	return map[string]exec.TestFunction{
		"boolean":   is((*exec.Value).IsBool),
		"callable":  is((*exec.Value).IsCallable),
		"defined":   is(there),
		"even":      is(func(v *exec.Value) bool { return v.IsInteger() && v.Integer()%2 == 0 }),
		"false":     is(func(v *exec.Value) bool { return v.IsBool() && !v.Bool() }),
		"float":     is((*exec.Value).IsFloat),
		"integer":   is((*exec.Value).IsInteger),
		"iterable":  is((*exec.Value).IsIterable),
		"lower":     is(func(v *exec.Value) bool { return v.IsString() && strings.ToLower(v.String()) == v.String() }),
		"mapping":   is((*exec.Value).IsDict),
		"none":      is((*exec.Value).IsNil),
		"number":    is((*exec.Value).IsNumber),
		"odd":       is(func(v *exec.Value) bool { return v.IsInteger() && v.Integer()%2 != 0 }),
		"sequence":  is((*exec.Value).IsIterable),
		"string":    is((*exec.Value).IsString),
		"true":      is(func(v *exec.Value) bool { return v.IsBool() && v.Bool() }),
		"undefined": is(func(v *exec.Value) bool { return !there(v) }),
		"upper":     is(func(v *exec.Value) bool { return v.IsString() && strings.ToUpper(v.String()) == v.String() }),

		"divisibleby": with(func(v, by *exec.Value) (bool, error) {
			return v.IsInteger() && by.Integer() != 0 && v.Integer()%by.Integer() == 0, nil
		}),
		"in": with(func(v, list *exec.Value) (bool, error) { return list.Contains(v), nil }),
		"eq": equal, "equalto": equal, "==": equal,
		"ne": differs, "!=": differs,
		"lt": less, "lessthan": less, "<": less,
		"le": atMost, "<=": atMost,
		"gt": greater, "greaterthan": greater, ">": greater,
		"ge": atLeast, ">=": atLeast,
	}
}

// is makes a test from a predicate on the value.
func is(f func(*exec.Value) bool) exec.TestFunction {
	return func(_ *exec.Context, v *exec.Value, args *exec.VarArgs) (bool, error) {
		return f(v), arguments(args, 0)
	}
}

// with makes a test from a predicate on the value and one argument.
func with(f func(v, other *exec.Value) (bool, error)) exec.TestFunction {
	return func(_ *exec.Context, v *exec.Value, args *exec.VarArgs) (bool, error) {
		if err := arguments(args, 1); err != nil {
			return false, err
		}
		return f(v, args.Args[0])
	}
}

// ordered makes a test from a comparison of the value with one argument. Values without an order are an error.
func ordered(holds func(order int) bool) exec.TestFunction {
	return with(func(v, to *exec.Value) (bool, error) {
		if v.IsNil() || to.IsNil() {
			return false, nil
		}
		order, err := compare(v, to, true)
		return err == nil && holds(order), err
	})
}

func arguments(args *exec.VarArgs, n int) error {
	if len(args.Args) != n || len(args.KwArgs) > 0 {
		return fmt.Errorf("a test takes %d arguments here, not %d", n, len(args.Args)+len(args.KwArgs))
	}
	return nil
}
