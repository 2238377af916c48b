package schema

import (
	"slices"

	"github.com/moeserve/moeserve/models/grammar"
)

// member is one of the members of an object.
type member struct {
	of       grammar.Expr
	required bool
}

func (c *compiler) object(s *shape) (grammar.Expr, error) {
	closed := s.declares && !s.hasAdditional && !c.o.Open
	named, err := c.names(s.names)
	if err != nil {
		return nil, err
	}
	isName := func(string) bool { return true }
	if named != nil {
		if isName, err = c.matcher(named); err != nil {
			return nil, located{path: s.path}.fail("propertyNames", "%v", err)
		}
	}
	properties := slices.Clone(s.properties)
	for _, name := range s.required {
		if s.property(name) < 0 {
			properties = append(properties, property{name, s.of(name)})
		}
	}
	var members []member
	var names []string
	for _, p := range properties {
		names = append(names, p.name)
		required := slices.Contains(s.required, p.name)
		if never(p.of) || !isName(p.name) {
			if required {
				return grammar.Any(), nil
			}
			continue
		}
		e, err := c.member(grammar.Literal(text(p.name)), p.of)
		if err != nil {
			return nil, err
		}
		members = append(members, member{e, required})
	}
	others, err := c.others(s, names, named, closed)
	if err != nil {
		return nil, err
	}
	var inner grammar.Expr
	if s.minProperties > len(s.required) || s.maxProperties >= 0 && (others != nil || len(members) > s.maxProperties) {
		if inner, err = c.counted(s, members, others); err != nil {
			return nil, err
		}
	} else {
		var items []grammar.Item
		for _, m := range members {
			items = append(items, grammar.Item{Of: m.of, Optional: !m.required})
		}
		if others != nil {
			items = append(items, grammar.Item{Of: others, Optional: true, Repeated: true})
		}
		inner = grammar.Separated(c.comma, items...)
	}
	return grammar.Seq(grammar.Literal("{"), c.space, inner, c.space, grammar.Literal("}")), nil
}

// never says whether no value fits schemas, as far as is easily seen.
func never(of all) bool {
	return slices.ContainsFunc(of, func(l located) bool { return l.value == false })
}

func (c *compiler) member(key grammar.Expr, of all) (grammar.Expr, error) {
	e, err := c.value(of)
	return grammar.Seq(key, c.space, grammar.Literal(":"), c.space, e), err
}

// names is the strings that fit schemas of names; nil: all do.
func (c *compiler) names(of all) (grammar.Expr, error) {
	if len(of) == 0 {
		return nil, nil
	}
	shapes, err := c.together(of)
	if err != nil {
		return nil, err
	}
	var parts []grammar.Expr
	for _, s := range shapes {
		if s.types &= isString; s.types == 0 {
			continue
		}
		s.stated = true
		e, err := c.alternative(s)
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	return grammar.Any(parts...), nil
}

// others is members with names that are not declared; nil: there are none.
func (c *compiler) others(s *shape, declared []string, named grammar.Expr, closed bool) (grammar.Expr, error) {
	var patterns []namePattern
	for _, p := range s.patterned {
		for _, n := range p.patterns {
			if !slices.ContainsFunc(patterns, func(o namePattern) bool { return o.pattern == n.pattern }) {
				patterns = append(patterns, n)
			}
		}
	}
	if len(patterns) > maxNamePatterns {
		return nil, located{path: s.path}.fail("patternProperties", "more than %d patterns of one object are not supported", maxNamePatterns)
	}
	base := quoted(grammar.Repeat(anyChar, 0, -1))
	switch {
	case len(declared) > 0:
		base = keyOther(declared)
	case len(patterns) > 0:
		base = quoted(grammar.Repeat(spelled, 0, -1))
	case named != nil:
		base = named
	}
	var parts []grammar.Expr
	for set := range 1 << len(patterns) { // of the patterns that a name matches
		if set == 0 && closed {
			continue
		}
		matches := func(n namePattern) bool {
			i := slices.IndexFunc(patterns, func(o namePattern) bool { return o.pattern == n.pattern })
			return set>>i&1 != 0
		}
		of := s.additional
		for _, p := range s.patterned {
			of = join(of, p.of(matches))
		}
		if never(of) {
			continue
		}
		key := base
		if named != nil && (len(declared) > 0 || len(patterns) > 0) {
			key = grammar.All(key, named)
		}
		var not []grammar.Expr
		for _, n := range patterns {
			if matches(n) {
				key = grammar.All(key, n.names)
			} else {
				not = append(not, n.others)
			}
		}
		if len(not) > 0 {
			key = grammar.Except(key, not...)
		}
		if len(patterns) > 0 {
			key = &grammar.Rule{Name: "key", Body: key, Place: "patternProperties at " + s.path}
		}
		e, err := c.member(key, of)
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	if len(parts) == 0 {
		return nil, nil
	}
	return grammar.Any(parts...), nil
}

// maxCountedMembers is the maximum of declared members times the number of which objects have some.
const maxCountedMembers = 1 << 12

// counted is the members of objects of which the number is limited. Other members may have the same name twice, which
// counts once, so that they count for the minimum as one, and for the maximum each.
func (c *compiler) counted(s *shape, members []member, others grammar.Expr) (grammar.Expr, error) {
	least, most := s.minProperties, s.maxProperties
	if most >= 0 && most < max(least, len(s.required)) {
		return grammar.Any(), nil
	}
	l := located{path: s.path}
	if others != nil && least > len(members)+1 {
		return nil, l.fail("minProperties", "it is not supported above the number of properties and one: list names in properties")
	}
	// A state for each member and each number of those before it.
	counted := min(max(least, most), len(members)) // more need not be counted
	keyword := "minProperties"
	if most >= 0 {
		keyword = "maxProperties"
	}
	if (len(members)+1)*(counted+1) > maxCountedMembers {
		return nil, l.fail(keyword, "it is not supported beside %d properties", len(members))
	}
	state := func(i, n int) int { return i*(counted+1) + n }
	var ends []int
	var paths []grammar.Path
	with := func(n int, e grammar.Expr) grammar.Expr {
		if n > 0 {
			return grammar.Seq(c.comma, e)
		}
		return e
	}
	for i, m := range members {
		for n := range counted + 1 {
			if !m.required {
				paths = append(paths, grammar.Path{From: state(i, n), To: state(i+1, n), Of: grammar.Seq()})
			}
			if most < 0 || n < most {
				paths = append(paths, grammar.Path{From: state(i, n), To: state(i+1, min(n+1, counted)), Of: with(n, m.of)})
			}
		}
	}
	end := state(len(members), counted) + 1
	for n := range counted + 1 {
		if n >= least {
			ends = append(ends, state(len(members), n))
		}
		if others != nil && (most < 0 || n < most) && n+1 >= least {
			paths = append(paths, grammar.Path{From: state(len(members), n), To: end, Of: with(n, grammar.Seq(others, grammar.Repeat(grammar.Seq(c.comma, others), 0, max(most-n-1, -1))))})
		}
	}
	return &grammar.Rule{Name: "members", Body: grammar.Graph(end+1, append(ends, end), paths), Place: keyword + " at " + s.path}, nil
}
