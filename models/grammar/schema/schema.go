package schema

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/grammar"
)

// Options of a grammar.
type Options struct {
	// Space is the white space that may be between the parts of a value. Default: none, or one space, or up to two
	// newlines with up to 20 spaces or tabs behind them.
	Space grammar.Expr
	// Compact has no white space.
	Compact bool
	// Open lets objects that declare properties and do not say additionalProperties have others, and values without a
	// type be of any, as the specification has it.
	Open bool
	// Context is that of the request: once it is done, what is being compiled ends with its cause. Default: never.
	Context context.Context
	// Work counts what compilations take. Those that share one take as long together as one alone may. Default: its own.
	Work *Work
}

// Work is what compilations have taken so far.
type Work struct {
	// States of grammars that were looked at, at most grammar.MaxWork. Callers may add those that they have compiled.
	States int
	merged int // pairs of names that merges compared
}

// someSpace is the default of Options.Space.
var someSpace = grammar.Optional(grammar.Any(
	grammar.Literal(" "),
	grammar.Seq(grammar.Repeat(grammar.Literal("\n"), 1, 2), grammar.Repeat(grammar.Runes(' ', ' ', '\t', '\t'), 0, 20))))

// Space is white space of a pattern, for Options.Space.
func Space(pattern string) (grammar.Expr, error) {
	e, err := grammar.Regex(pattern)
	if err != nil {
		return nil, err
	}
	// Nothing else may be between the parts of JSON.
	other := grammar.Runes(0, '\b', '\v', '\f', 14, 31, '!', utf8.MaxRune)
	if grammar.Overlap(e, grammar.Seq(grammar.Repeat(grammar.Runes(0, utf8.MaxRune), 0, -1), other, grammar.Repeat(grammar.Runes(0, utf8.MaxRune), 0, -1))) {
		return nil, fmt.Errorf("it matches what is no white space of JSON")
	}
	return e, nil
}

// Compile returns the grammar of a schema. Errors are *Error where a part of the schema is wrong or not supported.
func Compile(data []byte, o Options) (grammar.Expr, error) {
	root, err := parse(data)
	if err != nil {
		return nil, err
	}
	c := newCompiler(root, o)
	return c.value(all{{root, "#"}})
}

// AnyObject is any object.
func AnyObject(o Options) grammar.Expr {
	e, err := newCompiler(true, o).object(newShape("#"))
	if err != nil {
		panic("schema: any object: " + err.Error())
	}
	return e
}

// Member is a property of an object, for formats that do not write objects as JSON.
type Member struct {
	Name     string
	Required bool
	// Of is its values as JSON.
	Of grammar.Expr
	// Text: all values are strings, or null with Null; of Values, if there are any, or else of these characters, as they
	// are; nil: any.
	Text, Null bool
	Values     []string
	Chars      grammar.Expr
}

// Members are the properties of a schema of objects; false: there may be others, their number is limited, or the schema
// has alternatives.
func Members(data []byte, o Options) ([]Member, bool) {
	root, err := parse(data)
	if err != nil {
		return nil, false
	}
	c := newCompiler(root, o)
	shapes, err := c.together(all{{root, "#"}})
	if err != nil || len(shapes) != 1 {
		return nil, false
	}
	s := shapes[0]
	of := s.types
	if !s.stated {
		of &= s.implied
	}
	if of != isObject || s.hasEnum || !s.declares || len(s.patterned) > 0 || len(s.names) > 0 || s.minProperties > len(s.required) || s.maxProperties >= 0 && s.maxProperties < len(s.properties) || s.hasAdditional && !slices.ContainsFunc(s.additional, func(l located) bool { return l.value == false }) {
		return nil, false
	}
	members := make([]Member, len(s.properties))
	for i, p := range s.properties {
		m := Member{Name: p.name, Required: slices.Contains(s.required, p.name), Text: true}
		if m.Of, err = c.value(p.of); err != nil {
			return nil, false
		}
		values, err := c.together(p.of)
		if err != nil {
			return nil, false
		}
		var chars []grammar.Expr
		free := false
		for _, v := range values {
			if v.types&isString != 0 && !v.hasEnum {
				e, err := c.characters(v)
				if err != nil {
					return nil, false
				}
				chars, free = append(chars, e), free || e == nil
			}
			m.Text = m.Text && (v.types|isNull == isString|isNull || v.types == isNull)
			m.Null = m.Null || v.types&isNull != 0
			fits, err := c.fitting(v)
			if err != nil {
				return nil, false
			}
			for _, x := range fits {
				if t, ok := x.(string); ok && m.Text {
					m.Values = append(m.Values, t)
				}
			}
			m.Text = m.Text && (!v.hasEnum || len(values) == 1 && len(fits) > 0)
		}
		if m.Text && len(chars) > 0 && !free {
			m.Chars = &grammar.Rule{Name: "characters", Body: grammar.Any(chars...), Place: "at " + p.of[0].path}
		}
		members[i] = m
	}
	return members, !slices.ContainsFunc(s.required, func(n string) bool { return s.property(n) < 0 })
}

// compiler makes the rules of one schema.
type compiler struct {
	root       any
	o          Options
	space      grammar.Expr
	comma      grammar.Expr
	rules      map[string]*grammar.Rule
	strings    map[string]*grammar.Rule // by their keywords
	open       map[string]bool          // schemas whose alternatives are being looked for
	everything *grammar.Rule
	depth      int
	reads      int // of schemas
	looked     int // reads for contradictions
	patterns   map[string]namePattern
	// alternatives are those that kept keeps, by the key of the schemas; matchers are of strings.
	alternatives map[string][]*shape
	matchers     map[string]func(string) bool
}

func newCompiler(root any, o Options) *compiler {
	c := &compiler{root: root, o: o, rules: map[string]*grammar.Rule{}, strings: map[string]*grammar.Rule{}, open: map[string]bool{}, patterns: map[string]namePattern{}, alternatives: map[string][]*shape{}, matchers: map[string]func(string) bool{}, space: o.Space}
	if c.o.Work == nil {
		c.o.Work = &Work{}
	}
	if c.o.Context == nil {
		c.o.Context = context.Background()
	}
	switch {
	case o.Compact:
		c.space = grammar.Seq()
	case c.space == nil:
		c.space = someSpace
	}
	c.comma = grammar.Seq(c.space, grammar.Literal(","), c.space)
	return c
}

// any is any value.
func (c *compiler) any() grammar.Expr {
	if c.everything == nil {
		c.everything = &grammar.Rule{Name: "value"}
		e, err := c.alternative(newShape("#"))
		if err != nil {
			panic("schema: " + err.Error())
		}
		c.everything.Body = e
	}
	return c.everything
}

// resolve finds what a $ref refers to.
func (c *compiler) resolve(l located, ref any) (located, error) {
	name, ok := ref.(string)
	if !ok {
		return l, l.fail("$ref", "it must be a string")
	}
	fragment, ok := strings.CutPrefix(name, "#")
	if !ok || fragment != "" && fragment[0] != '/' {
		return l, l.fail("$ref", "%s is not supported: only references within the schema, such as #/$defs/name, are", strconv.Quote(name))
	}
	fragment, err := url.PathUnescape(fragment)
	if err != nil {
		return l, l.fail("$ref", "%s is no JSON pointer", strconv.Quote(name))
	}
	if c.embedded(l.path) {
		return l, l.fail("$ref", "%s is not supported: it is within a schema with an $id of its own", strconv.Quote(name))
	}
	at, to := c.root, located{path: "#"}
	if fragment != "" {
		for _, part := range strings.Split(fragment[1:], "/") {
			part = fromPointer.Replace(part)
			var found bool
			if at, found = child(at, part); !found {
				return l, l.fail("$ref", "there is no %s", strconv.Quote(name))
			}
			to.path = to.at(part)
		}
	}
	if c.embedded(to.path) {
		return l, l.fail("$ref", "%s is not supported: it leads into a schema with an $id of its own", strconv.Quote(name))
	}
	to.value = at
	return to, nil
}

// child is a member of an object, or an item of an array.
func child(of any, name string) (any, bool) {
	switch v := of.(type) {
	case *object:
		return v.get(name), v.has(name)
	case []any:
		if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < len(v) {
			return v[i], true
		}
	}
	return nil, false
}

// embedded says whether a place is in a part of the schema that has an $id and so is a document of its own.
func (c *compiler) embedded(path string) bool {
	at := c.root
	for _, part := range strings.Split(path, "/")[1:] {
		at, _ = child(at, fromPointer.Replace(part))
		if o, ok := at.(*object); ok {
			if id, isText := o.get("$id").(string); isText && !strings.HasPrefix(id, "#") {
				return true
			}
		}
	}
	return false
}

// together is the alternatives of schemas that hold together.
func (c *compiler) together(of all) ([]*shape, error) {
	list := []*shape{newShape("#")}
	for i, l := range of {
		others, err := c.shapes(l)
		switch {
		case err != nil:
		case i == 0:
			list = others
		default:
			list, err = c.both(l, list, others)
		}
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// value is the rule of schemas that hold together.
func (c *compiler) value(of all) (grammar.Expr, error) {
	if len(of) == 0 {
		return c.any(), nil
	}
	key := of.key()
	if r := c.rules[key]; r != nil {
		return r, nil
	}
	if len(c.rules) >= maxRules {
		return nil, of[0].fail("", "the schema has more than %d parts", maxRules)
	}
	r := &grammar.Rule{Name: key, Place: "at " + of[0].path}
	c.rules[key] = r
	// A reference alone is the rule of what it refers to.
	if o, ok := of[0].value.(*object); ok && len(of) == 1 && o.has("$ref") && !slices.ContainsFunc(o.names, func(n string) bool { return n != "$ref" && !slices.Contains(ignored, n) }) && o.get("nullable") == nil {
		target, err := c.resolve(of[0], o.get("$ref"))
		if err != nil {
			return nil, err
		}
		if r.Body, err = c.value(all{target}); err != nil {
			return nil, err
		}
		if loops(r) {
			return nil, of[0].fail("$ref", "it refers to itself without anything in between")
		}
		return r, nil
	}
	shapes, err := c.together(of)
	if err != nil {
		return nil, err
	}
	if c.depth++; c.depth > maxDepth*4 {
		return nil, of[0].fail("", "it is nested too deep")
	}
	defer func() { c.depth-- }()
	parts := make([]grammar.Expr, len(shapes))
	for i, s := range shapes {
		c.o.Work.merged += memberCost * (len(s.properties) + len(s.required) + len(s.prefix))
		if err := c.spent(of[0]); err != nil {
			return nil, err
		}
		if parts[i], err = c.alternative(s); err != nil {
			return nil, err
		}
	}
	r.Body = grammar.Any(parts...)
	return r, nil
}

// loops says whether a rule is only itself.
func loops(r *grammar.Rule) bool {
	seen := map[*grammar.Rule]bool{}
	for !seen[r] {
		seen[r] = true
		next, ok := r.Body.(*grammar.Rule)
		if !ok {
			return false
		}
		r = next
	}
	return true
}

// alternative is the texts of a shape.
func (c *compiler) alternative(s *shape) (grammar.Expr, error) {
	of := s.types
	if !s.stated && s.implied != 0 && !c.o.Open && !s.hasEnum {
		of &= s.implied
	}
	if s.hasEnum {
		return c.enum(s)
	}
	var parts []grammar.Expr
	if of&isNull != 0 {
		parts = append(parts, grammar.Literal("null"))
	}
	if of&isBoolean != 0 {
		parts = append(parts, grammar.Literals("true", "false"))
	}
	switch n := of & isNumber; {
	case n != 0 && s.multiple != nil:
		e, err := s.multiples(n == isInteger)
		if err != nil {
			return nil, err
		}
		if n == isFraction {
			e = grammar.All(e, notWhole)
		}
		parts = append(parts, e)
	case n == isInteger:
		parts = append(parts, integers(s.least, s.most))
	case n == isNumber:
		parts = append(parts, numbers(s.least, s.most))
	case n == isFraction:
		parts = append(parts, grammar.All(numbers(s.least, s.most), notWhole))
	}
	for _, t := range []struct {
		of   types
		make func(*shape) (grammar.Expr, error)
	}{{isString, c.string}, {isArray, c.array}, {isObject, c.object}} {
		if of&t.of == 0 {
			continue
		}
		e, err := t.make(s)
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	return grammar.Any(parts...), nil
}

// enum is the values of a list that fit the rest of a shape.
func (c *compiler) enum(s *shape) (grammar.Expr, error) {
	values, err := c.fitting(s)
	if err != nil {
		return nil, err
	}
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = text(v)
	}
	return grammar.Literals(texts...), nil
}

func (c *compiler) string(s *shape) (grammar.Expr, error) {
	if s.maxLength >= 0 && s.maxLength < s.minLength {
		return grammar.Any(), nil
	}
	if slices.Contains(s.formats, "uri") && s.maxLength > maxURI {
		short := *s
		short.maxLength = max(maxURI, s.minLength)
		s = &short
	}
	var key strings.Builder // without the places of patterns
	for _, p := range s.patterns {
		fmt.Fprintf(&key, "%q ", p.value)
	}
	for _, p := range s.notPatterns {
		fmt.Fprintf(&key, "not %q ", p.value)
	}
	fmt.Fprintf(&key, "%q %q %d %d", s.notStrings, s.formats, s.minLength, s.maxLength)
	if r := c.strings[key.String()]; r != nil { // equal ones are one, which is compiled once
		return r, nil
	}
	var parts, not []grammar.Expr
	for _, l := range s.patterns {
		p, err := grammar.ParsePattern(l.value.(string))
		if err != nil {
			return nil, l.fail("pattern", "%v", err)
		}
		parts = append(parts, p.Within(charsOf, anyChar))
	}
	for _, l := range s.notPatterns {
		p, err := grammar.ParseExcluded(l.value.(string))
		if err != nil {
			return nil, l.fail("pattern", "%v", err)
		}
		not = append(not, p.Within(charsOf, spelled))
	}
	for _, t := range s.notStrings {
		not = append(not, grammar.Literal(strings.TrimSuffix(text(t)[1:], `"`)))
	}
	if len(not) > 0 { // in the spelling that these are in
		parts = append(parts, grammar.Repeat(spelled, 0, -1))
	}
	for _, f := range s.formats {
		parts = append(parts, formats[f])
	}
	keywords := slices.Concat(several("pattern", len(s.patterns)+len(s.notPatterns)), several("format", len(s.formats)))
	if len(s.notStrings) > 0 {
		keywords = append(keywords, "enum")
	}
	if s.minLength > 0 || s.maxLength >= 0 {
		parts = append(parts, grammar.Repeat(anyChar, s.minLength, s.maxLength))
	}
	if s.minLength > 0 {
		keywords = append(keywords, "minLength")
	}
	if s.maxLength >= 0 {
		keywords = append(keywords, "maxLength")
	}
	if len(keywords) == 0 {
		return quoted(grammar.Repeat(anyChar, 0, -1)), nil
	}
	place := keywords[0]
	if len(keywords) > 1 {
		place += " beside " + strings.Join(keywords[1:], " and ")
	}
	if l := slices.Concat(s.patterns, s.notPatterns); len(l) > 0 {
		place += " at " + l[0].path
	} else {
		place += " at " + s.path
	}
	of := parts[0]
	if len(parts) > 1 || len(s.patterns) > 0 { // a pattern alone so that one with too many states is told from what is around it
		// A value that fits all parts is a text of each in the same spelling: that of patterns, which others have, too.
		of = grammar.All(parts...)
	}
	if len(not) > 0 {
		of = grammar.Except(of, not...)
	}
	r := &grammar.Rule{Name: "string", Body: quoted(of), Place: place}
	c.strings[key.String()] = r
	return r, nil
}

// characters is the strings of a shape as they are, without quotes and escapes; nil: any.
func (c *compiler) characters(s *shape) (grammar.Expr, error) {
	char := grammar.Runes(0, utf8.MaxRune)
	text := grammar.Repeat(char, 0, -1)
	var parts, not []grammar.Expr
	for _, l := range s.patterns {
		p, err := grammar.ParsePattern(l.value.(string))
		if err != nil {
			return nil, l.fail("pattern", "%v", err)
		}
		parts = append(parts, p.Within(grammar.Runes, char))
	}
	for _, l := range s.notPatterns {
		p, err := grammar.ParseExcluded(l.value.(string))
		if err != nil {
			return nil, l.fail("pattern", "%v", err)
		}
		not = append(not, p.Within(grammar.Runes, char))
	}
	for _, t := range s.notStrings {
		not = append(not, grammar.Literal(t))
	}
	most := s.maxLength
	for _, f := range s.formats { // whose characters need no escapes
		if parts = append(parts, formats[f]); f == "uri" && most > maxURI {
			most = max(maxURI, s.minLength)
		}
	}
	if s.minLength > 0 || most >= 0 {
		if most >= 0 && most < s.minLength {
			return grammar.Any(), nil
		}
		parts = append(parts, grammar.Repeat(char, s.minLength, most))
	}
	switch {
	case len(parts)+len(not) == 0:
		return nil, nil
	case len(parts) == 0:
		parts = append(parts, text)
	}
	return grammar.Except(grammar.All(parts...), not...), nil
}

// several is how errors call n keywords of a name that hold together.
func several(keyword string, n int) []string {
	switch n {
	case 0:
		return nil
	case 1:
		return []string{keyword}
	case 2:
		return []string{keyword, "another " + keyword}
	}
	return []string{keyword, fmt.Sprintf("%d other %ss", n-1, keyword)}
}

func (c *compiler) array(s *shape) (grammar.Expr, error) {
	open, end := grammar.Seq(grammar.Literal("["), c.space), grammar.Seq(c.space, grammar.Literal("]"))
	empty := grammar.Seq(open, grammar.Literal("]"))
	if s.maxItems >= 0 && s.maxItems < s.minItems {
		return grammar.Any(), nil
	}
	if s.maxItems == 0 {
		if slices.ContainsFunc(s.contains, func(in contains) bool { return in.min > 0 }) {
			return grammar.Any(), nil
		}
		return empty, nil
	}
	if s.unique && s.maxItems != 1 {
		return c.unique(s)
	}
	if len(s.contains) > 0 {
		return c.containing(s)
	}
	item, err := c.value(s.items)
	if err != nil {
		return nil, err
	}
	first := []grammar.Expr{item}
	if len(s.prefix) > 0 {
		first = first[:0]
		for _, of := range s.prefix {
			e, err := c.value(of)
			if err != nil {
				return nil, err
			}
			first = append(first, e)
		}
	}
	most := -1
	if s.maxItems >= 0 {
		most = max(s.maxItems-len(first), 0)
	}
	rest := grammar.Repeat(grammar.Seq(c.comma, item), max(s.minItems-len(first), 0), most)
	for i := len(first) - 1; i > 0; i-- {
		if s.maxItems >= 0 && i >= s.maxItems {
			rest = grammar.Seq()
			continue
		}
		rest = grammar.Seq(c.comma, first[i], rest)
		if i >= s.minItems {
			rest = grammar.Optional(rest)
		}
	}
	some := grammar.Seq(open, first[0], rest, end)
	if s.minItems > 0 {
		return some, nil
	}
	return grammar.Any(empty, some), nil
}
