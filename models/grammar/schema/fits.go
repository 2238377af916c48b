package schema

import (
	"context"
	"encoding/json"
	"errors"
	"math/big"
	"slices"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/grammar"
)

// fitting is the values of a shape's enum that fit the rest of it.
func (c *compiler) fitting(s *shape) (values []any, err error) {
	rest := *s
	rest.hasEnum, rest.enum = false, nil
	for _, v := range s.enum {
		fits, err := c.fits(&rest, v)
		var inner *Error
		switch {
		case err == nil:
		case c.o.Context.Err() != nil:
			return nil, context.Cause(c.o.Context)
		case errors.As(err, &inner):
			return nil, err
		case errors.Is(err, errTogether):
			return nil, located{path: s.path}.fail("enum", "%v", err)
		case errors.Is(err, grammar.ErrTooLarge):
			return nil, located{path: s.path}.fail("enum", "the keywords beside it need too many states: lower their numbers ({m,n}), or leave them out")
		default:
			return nil, located{path: s.path}.fail("enum", "the keywords beside it: %v", err)
		}
		if fits {
			values = append(values, v)
		}
	}
	return values, nil
}

// errTogether: the values of all enums have taken too long.
var errTogether = errors.New("the keywords beside this and other enums need too many states together: lower their numbers ({m,n}), or leave them out")

// fitCost is what it takes to compare a value with a shape, but for its parts, in states.
const fitCost = 64

// fits says whether a value fits a shape, as the specification has it.
func (c *compiler) fits(s *shape, v any) (bool, error) {
	if c.o.Work.States += fitCost; c.o.Work.States > grammar.MaxWork {
		return false, errTogether
	}
	if c.o.Context.Err() != nil {
		return false, context.Cause(c.o.Context)
	}
	if s.types&typeOf(v) == 0 || s.hasEnum && len(common([]any{v}, s.enum)) == 0 {
		return false, nil
	}
	switch v := v.(type) {
	case json.Number:
		return s.fitsNumber(v)
	case string:
		return c.fitsString(s, v)
	case []any:
		return c.fitsArray(s, v)
	case *object:
		return c.fitsObject(s, v)
	}
	return true, nil
}

// fitsAll says whether a value fits schemas that hold together.
func (c *compiler) fitsAll(of all, v any) (bool, error) {
	if len(of) == 0 {
		return true, nil
	}
	shapes, err := c.kept(of)
	if err != nil {
		return false, err
	}
	for _, s := range shapes {
		if fits, err := c.fits(s, v); fits || err != nil {
			return fits, err
		}
	}
	return false, nil
}

// kept is together for what is asked for again and again. The shapes must not be changed.
func (c *compiler) kept(of all) ([]*shape, error) {
	key := of.key()
	if shapes, ok := c.alternatives[key]; ok {
		return shapes, nil
	}
	shapes, err := c.together(of)
	if err == nil {
		c.alternatives[key] = shapes
	}
	return shapes, err
}

func (s *shape) fitsNumber(v json.Number) (bool, error) {
	if s.least == nil && s.most == nil && s.multiple == nil {
		return true, nil
	}
	d, err := parseDecimal(v)
	if err != nil {
		return false, err
	}
	if b := s.least; b != nil {
		if n := d.compare(b.decimal); n < 0 || n == 0 && b.open {
			return false, nil
		}
	}
	if b := s.most; b != nil {
		if n := d.compare(b.decimal); n > 0 || n == 0 && b.open {
			return false, nil
		}
	}
	if s.multiple == nil {
		return true, nil
	}
	digits, _ := new(big.Int).SetString("0"+d.whole+d.part, 10)
	x := new(big.Rat).SetFrac(digits, power(len(d.part)))
	return x.Quo(x, s.multiple).IsInt(), nil
}

func (c *compiler) fitsString(s *shape, v string) (bool, error) {
	if n := utf8.RuneCountInString(v); n < s.minLength || s.maxLength >= 0 && n > s.maxLength || slices.Contains(s.notStrings, v) {
		return false, nil
	}
	for _, l := range s.patterns {
		if fits, err := c.matches(l, false, v); !fits || err != nil {
			return false, err
		}
	}
	for _, l := range s.notPatterns {
		if matches, err := c.matches(l, true, v); matches || err != nil {
			return false, err
		}
	}
	for _, f := range s.formats {
		if fits, err := c.written("format "+f, quoted(formats[f]), v); !fits || err != nil {
			return false, err
		}
	}
	return true, nil
}

// matches says whether a text matches a pattern, in some dialect where it is not to.
func (c *compiler) matches(l located, excluded bool, v string) (bool, error) {
	pattern := l.value.(string)
	key, parse := "pattern "+pattern, grammar.ParsePattern
	if excluded {
		key, parse = "not "+key, grammar.ParseExcluded
	}
	p, err := parse(pattern)
	if err != nil {
		return false, l.fail("pattern", "%v", err)
	}
	return c.written(key, quoted(p.Within(charsOf, spelled)), v)
}

// written says whether a string is a text of an expression, which key stands for.
func (c *compiler) written(key string, of grammar.Expr, v string) (bool, error) {
	match, ok := c.matchers[key]
	if !ok {
		before := c.o.Work.States
		var err error
		match, err = c.matcher(of)
		if all := c.o.Work.States; errors.Is(err, grammar.ErrTooLarge) && all > grammar.MaxWork && all-before <= grammar.MaxWork {
			err = errTogether
		}
		if err != nil {
			return false, err
		}
		c.matchers[key] = match
	}
	return match(v), nil
}

func (c *compiler) fitsArray(s *shape, v []any) (bool, error) {
	if len(v) < s.minItems || s.maxItems >= 0 && len(v) > s.maxItems {
		return false, nil
	}
	seen := map[string]bool{}
	for i, x := range v {
		if fits, err := c.fitsAll(s.item(i), x); !fits || err != nil {
			return false, err
		}
		seen[identity(x)] = true
	}
	if s.unique && len(seen) < len(v) {
		return false, nil
	}
	for _, in := range s.contains {
		n := 0
		for _, x := range v {
			fits, err := c.fitsAll(all{in.schema}, x)
			if err != nil {
				return false, err
			}
			if fits {
				n++
			}
		}
		if n < in.min || in.max >= 0 && n > in.max {
			return false, nil
		}
	}
	return true, nil
}

func (c *compiler) fitsObject(s *shape, v *object) (bool, error) {
	n := len(v.names)
	if n < s.minProperties || s.maxProperties >= 0 && n > s.maxProperties || slices.ContainsFunc(s.required, func(name string) bool { return !v.has(name) }) {
		return false, nil
	}
	for _, name := range v.names {
		if fits, err := c.fitsAll(s.names, name); !fits || err != nil {
			return false, err
		}
		if fits, err := c.fitsAll(s.of(name), v.values[name]); !fits || err != nil {
			return false, err
		}
	}
	return true, nil
}
