package schema

import (
	"math/bits"
	"slices"

	"github.com/moeserve/moeserve/models/grammar"
)

// Limits of arrays with uniqueItems or contains.
const (
	maxUnique    = 12      // values of items
	maxUniqueLen = 1 << 15 // bytes of all their orders
	maxCounted   = 1 << 10 // places times items that are counted
)

// item is what the item at a place has to be.
func (s *shape) item(i int) all {
	if i < len(s.prefix) {
		return s.prefix[i]
	}
	return s.items
}

// unique is arrays of different items, where these have few values.
func (c *compiler) unique(s *shape) (grammar.Expr, error) {
	l := located{path: s.path}
	if len(s.contains) > 0 {
		return nil, l.fail("uniqueItems", "it is not supported beside contains")
	}
	most := s.maxItems
	var values []any
	var allowed [][]int // by place, the last one of all further ones
	for i := 0; i <= len(s.prefix); i++ {
		list, ok, err := c.values(s.item(i))
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, l.fail("uniqueItems", "it is supported where items have few values: those of enum, const, booleans and null, or where maxItems is 1")
		}
		var at []int
		for _, v := range list {
			k := slices.IndexFunc(values, func(w any) bool { return identity(v) == identity(w) })
			if k < 0 {
				k, values = len(values), append(values, v)
			}
			if !slices.Contains(at, k) {
				at = append(at, k)
			}
		}
		allowed = append(allowed, at)
	}
	length := 0
	for _, v := range values {
		length += len(text(v))
	}
	if most < 0 || most > len(values) {
		most = len(values)
	}
	if len(values) > maxUnique || length<<len(values) > 2*maxUniqueLen {
		return nil, l.fail("uniqueItems", "its items have %d values, of %d bytes together: that is too many to keep them different", len(values), length)
	}
	// A state for each set of values that have been used.
	var ends []int
	var paths []grammar.Path
	for used := range 1 << len(values) {
		n := bits.OnesCount(uint(used))
		if n >= s.minItems && n <= most {
			ends = append(ends, used)
		}
		if n >= most {
			continue
		}
		for _, k := range allowed[min(n, len(s.prefix))] {
			if used&(1<<k) == 0 {
				paths = append(paths, grammar.Path{From: used, To: used | 1<<k, Of: c.place(n, grammar.Literal(text(values[k])))})
			}
		}
	}
	return c.list(grammar.Graph(1<<len(values), ends, paths), "uniqueItems at "+s.path), nil
}

// place is an item, with a comma before all but the first one.
func (c *compiler) place(i int, item grammar.Expr) grammar.Expr {
	if i == 0 {
		return item
	}
	return grammar.Seq(c.comma, item)
}

// list is the array of some items.
func (c *compiler) list(items grammar.Expr, place string) grammar.Expr {
	return &grammar.Rule{Name: "list", Body: grammar.Seq(grammar.Literal("["), c.space, items, c.space, grammar.Literal("]")), Place: place}
}

// values is all values that fit schemas, where they are few.
func (c *compiler) values(of all) (values []any, few bool, err error) {
	shapes, err := c.together(of)
	if err != nil {
		return nil, false, err
	}
	for _, s := range shapes {
		switch {
		case s.hasEnum:
			fits, err := c.fitting(s)
			if err != nil {
				return nil, false, err
			}
			values = append(values, fits...)
			continue
		case s.types&^(isNull|isBoolean) != 0:
			return nil, false, nil
		}
		if s.types&isNull != 0 {
			values = append(values, nil)
		}
		if s.types&isBoolean != 0 {
			values = append(values, true, false)
		}
	}
	return values, true, nil
}

// containing is arrays of which some number of items fit a schema.
func (c *compiler) containing(s *shape) (grammar.Expr, error) {
	l := located{path: s.path}
	if len(s.contains) > 1 {
		return nil, l.fail("contains", "it is not supported beside another contains")
	}
	in := s.contains[0]
	if in.max >= 0 && in.max < in.min {
		return grammar.Any(), nil
	}
	places := max(len(s.prefix), s.minItems, s.maxItems, 1) // from here on all are alike, or the array ends
	counted := max(in.min, in.max)
	if places > maxCounted || counted > maxCounted || (places+1)*(counted+1) > maxCounted {
		return nil, l.fail("contains", "it is not supported beside so large numbers of minItems, maxItems, minContains or maxContains")
	}
	// A state for each place and each number of items that count: a place further than all limits is the last one again.
	item := func(i int, counts bool) (grammar.Expr, error) {
		of := s.item(i)
		switch {
		case counts:
			of = join(of, all{in.schema})
		case in.max >= 0:
			of = join(of, all{not(in.schema)})
		}
		e, err := c.value(of)
		return c.place(i, e), err
	}
	state := func(i, n int) int { return min(i, places)*(counted+1) + n }
	var ends []int
	var paths []grammar.Path
	for i := range places + 1 {
		if i == s.maxItems {
			for n := in.min; n <= counted; n++ {
				ends = append(ends, state(i, n))
			}
			break
		}
		plain, err := item(i, false)
		if err != nil {
			return nil, err
		}
		fits, err := item(i, true)
		if err != nil {
			return nil, err
		}
		for n := range counted + 1 {
			if i >= s.minItems && n >= in.min {
				ends = append(ends, state(i, n))
			}
			paths = append(paths, grammar.Path{From: state(i, n), To: state(i+1, n), Of: plain})
			if n < counted {
				paths = append(paths, grammar.Path{From: state(i, n), To: state(i+1, n+1), Of: fits})
			}
		}
	}
	return c.list(grammar.Graph(state(places, counted)+1, ends, paths), "contains at "+s.path), nil
}
