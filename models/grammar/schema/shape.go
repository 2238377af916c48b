package schema

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/models/grammar"
)

// types is a set of types.
type types uint8

const (
	isNull types = 1 << iota
	isBoolean
	isInteger  // numbers without a fraction
	isFraction // other numbers
	isString
	isArray
	isObject
	isNumber = isInteger | isFraction
	anyType  = isNull | isBoolean | isNumber | isString | isArray | isObject
)

var typeNames = map[string]types{
	"null": isNull, "boolean": isBoolean, "integer": isInteger, "number": isNumber, "string": isString, "array": isArray, "object": isObject,
}

// all are schemas that hold together; none: any value.
type all []located

// key is one text for the same schemas.
func (a all) key() string {
	paths := make([]string, len(a))
	for i, l := range a {
		paths[i] = l.path
	}
	return strings.Join(paths, " ~ ") // which no path has
}

// shape is a schema without references and alternatives: what one value has to be.
type shape struct {
	path  string
	types types
	// stated: a keyword says the types. implied are those of the other keywords.
	stated  bool
	implied types

	hasEnum bool
	enum    []any

	least, most *bound
	multiple    *big.Rat // of which numbers are multiples; nil: any
	minLength   int
	maxLength   int       // -1: any
	patterns    []located // their values are texts
	notPatterns []located
	notStrings  []string
	formats     []string

	prefix   []all
	items    all
	minItems int
	maxItems int // -1: any
	contains []contains
	unique   bool

	declares      bool // properties is there
	properties    []property
	required      []string
	hasAdditional bool
	additional    all // of other names, beside what patterned has for them
	patterned     []patterned
	names         all // of the names themselves
	minProperties int
	maxProperties int // -1: any
}

type property struct {
	name string
	of   all
}

func (s *shape) property(name string) int {
	return slices.IndexFunc(s.properties, func(p property) bool { return p.name == name })
}

// of is the schemas of the property of a name.
func (s *shape) of(name string) all {
	if i := s.property(name); i >= 0 {
		return s.properties[i].of
	}
	of := s.additional
	for _, p := range s.patterned {
		of = join(of, p.of(func(n namePattern) bool { return n.match(name) }))
	}
	return of
}

// patterned is what one schema has of names by patterns, and additional of names that match none.
type patterned struct {
	patterns   []namePattern
	additional all
}

// namePattern is a pattern of names, and the schema of the properties that have them.
type namePattern struct {
	pattern string
	match   func(name string) bool
	names   grammar.Expr // as keys, each in one spelling; without those that only some dialects match
	others  grammar.Expr // all that some dialect matches
	schema  located
}

// of is the schemas of a name that matches some of the patterns.
func (p patterned) of(matches func(namePattern) bool) (of all) {
	for _, n := range p.patterns {
		if matches(n) {
			of = append(of, n.schema)
		}
	}
	if len(of) == 0 {
		return p.additional
	}
	return of
}

// contains is how many items of an array fit a schema.
type contains struct {
	schema   located
	min, max int // max < 0: any
}

// negation is the value of a schema that holds where another one does not.
type negation struct{ of located }

// not is the schema of what does not fit another one. Its path is that of no other schema, since names have no ~( in paths.
func not(l located) located { return located{negation{l}, l.path + " ~(not)"} }

// ignored are keywords that restrict nothing, and those that others read.
var ignored = []string{
	"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$comment", "$defs", "definitions",
	"contentEncoding", "contentMediaType", "contentSchema", "$id", "$anchor", "$vocabulary", "discriminator", "nullable", "then", "else", "minContains", "maxContains",
}

// combined are keywords that make alternatives.
var combined = []string{"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies"}

// unsupported are keywords that restrict values in ways that no grammar here has.
var unsupported = []string{"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}

// limits of what a schema may be.
const (
	maxAlternatives = 256
	maxRules        = 1 << 13
	maxReads        = 1 << 14 // of schemas, of which a reference is one again each time
	maxNotNumbers   = 16      // numbers that a value is not
	maxNamePatterns = 4       // of one object
	maxMerged       = 1 << 28 // pairs of names that merges compare, or what takes as long: a second or two
	mergeCost       = 1 << 7  // of one merge, in such pairs
	valueCost       = 1 << 6  // of a value of an enum, and of a member of properties or of prefixItems that is read
	itemCost        = 1 << 8  // of an item of prefixItems in a merge
	memberCost      = 1 << 9  // of making the grammar of a member
)

func newShape(path string) *shape {
	return &shape{path: path, types: anyType, maxLength: -1, maxItems: -1, maxProperties: -1}
}

// shapes returns the alternatives of a schema.
func (c *compiler) shapes(l located) ([]*shape, error) {
	if on, ok := l.value.(bool); ok {
		if !on {
			return nil, nil
		}
		return []*shape{newShape(l.path)}, nil
	}
	if c.reads++; c.reads > maxReads {
		return nil, l.fail("", "its references and alternatives are too many")
	}
	if n, ok := l.value.(negation); ok {
		return c.negate(n.of)
	}
	o, ok := l.value.(*object)
	if !ok {
		return nil, l.fail("", "a schema must be an object, true or false")
	}
	if err := c.spent(l); err != nil {
		return nil, err
	}
	if c.open[l.path] {
		return nil, l.fail("$ref", "it refers to itself without anything in between")
	}
	c.open[l.path] = true
	defer delete(c.open, l.path)
	base, err := c.plain(l, o)
	if err != nil {
		return nil, err
	}
	list := []*shape{base}
	for _, keyword := range combined {
		if !o.has(keyword) {
			continue
		}
		if keyword == "allOf" {
			parts, err := l.parts(keyword, o.get(keyword))
			for _, part := range parts {
				if err == nil {
					list, err = c.with(l, list, part)
				}
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		others, err := c.combine(l, o, keyword, list)
		if err == nil {
			list, err = c.both(l, list, others)
		}
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// contradicts says whether an object requires a property that no value fits, as far as that is found with few reads.
func (c *compiler) contradicts(s *shape) bool {
	if s.types != isObject {
		return false
	}
	for _, name := range s.required {
		of := s.of(name)
		if never(of) {
			return true
		}
		if len(of) < 2 || c.looked > maxReads {
			continue
		}
		before := c.reads
		shapes, err := c.together(of)
		c.looked, c.reads = c.looked+c.reads-before, before
		if err == nil && len(shapes) == 0 {
			return true
		}
	}
	return false
}

// with is the alternatives that fit a schema, too.
func (c *compiler) with(l located, list []*shape, of located) ([]*shape, error) {
	others, err := c.shapes(of)
	if err != nil {
		return nil, err
	}
	return c.both(l, list, others)
}

// both is the alternatives that fit one of each list.
func (c *compiler) both(l located, list, others []*shape) ([]*shape, error) {
	var joined []*shape
	for _, a := range list {
		for _, b := range others {
			if m := c.merge(a, b); m != nil && !c.contradicts(m) {
				joined = append(joined, m)
			}
			if err := c.spent(l); err != nil {
				return nil, err
			}
			if len(joined) > maxAlternatives {
				return nil, l.fail("", "its keywords with alternatives (anyOf, oneOf, not, if, dependentRequired, ...) give more than %d together", maxAlternatives)
			}
		}
	}
	return joined, nil
}

// spent is the error where reading and merging schemas, and making grammars of them, has taken too long.
func (c *compiler) spent(l located) error {
	switch {
	case c.o.Context.Err() != nil:
		return context.Cause(c.o.Context)
	case c.o.Work.merged > maxMerged:
		return l.fail("", "its keywords with alternatives (anyOf, oneOf, not, if, dependentRequired, ...) and those beside them take too long: give it fewer alternatives, or shorter lists of properties and of enum")
	}
	return nil
}

// parts are the schemas of a list.
func (l located) parts(keyword string, v any) ([]located, error) {
	list, ok := v.([]any)
	if !ok || len(list) == 0 {
		return nil, l.fail(keyword, "it must be a list of schemas, and not empty")
	}
	parts := make([]located, len(list))
	for i, part := range list {
		parts[i] = located{part, l.at(keyword, strconv.Itoa(i))}
	}
	return parts, nil
}

// combine is the alternatives of a keyword, which hold beside others.
func (c *compiler) combine(l located, o *object, keyword string, beside []*shape) ([]*shape, error) {
	v := o.get(keyword)
	switch keyword {
	case "$ref":
		target, err := c.resolve(l, v)
		if err != nil {
			return nil, err
		}
		return c.shapes(target)
	case "not":
		return c.negate(located{v, l.at(keyword)})
	case "if":
		condition := located{v, l.at(keyword)}
		return c.either(l, []all{l.branch(o, condition, "then"), l.branch(o, not(condition), "else")})
	case "dependentRequired", "dependentSchemas", "dependencies":
		return c.dependencies(l, keyword, v)
	}
	parts, err := l.parts(keyword, v)
	if err != nil {
		return nil, err
	}
	each, either := make([][]*shape, len(parts)), []*shape(nil)
	for i, part := range parts {
		if each[i], err = c.shapes(part); err != nil {
			return nil, err
		}
		if either = append(either, each[i]...); len(either) > maxAlternatives {
			return nil, l.fail(keyword, "it has more than %d alternatives", maxAlternatives)
		}
	}
	if keyword == "anyOf" {
		return either, nil
	}
	requireTag(o.get("discriminator"), each)
	overlap := c.exclusive(l, beside, each)
	if overlap == nil {
		return either, nil
	}
	// One of them fits, and the others do not.
	alone := make([]all, len(parts))
	for i, part := range parts {
		alone[i] = all{part}
		for j, other := range parts {
			if j != i {
				alone[i] = append(alone[i], not(other))
			}
		}
	}
	if either, err = c.either(l, alone); err != nil {
		return nil, fmt.Errorf("%w; what would distinguish them here: %w", overlap, err)
	}
	return either, nil
}

// either is the alternatives of lists of schemas that hold together.
func (c *compiler) either(l located, lists []all) (either []*shape, err error) {
	for _, of := range lists {
		shapes, err := c.together(of)
		if err != nil {
			return nil, err
		}
		if either = append(either, shapes...); len(either) > maxAlternatives {
			return nil, l.fail("", "it has more than %d alternatives", maxAlternatives)
		}
	}
	return either, nil
}

// branch is a condition with what then or else say.
func (l located) branch(o *object, condition located, keyword string) all {
	if !o.has(keyword) {
		return all{condition}
	}
	return all{condition, {o.get(keyword), l.at(keyword)}}
}

// dependencies is what holds where a property is there.
func (c *compiler) dependencies(l located, keyword string, v any) ([]*shape, error) {
	members, ok := v.(*object)
	if !ok {
		return nil, l.fail(keyword, "it must be an object")
	}
	list := []*shape{newShape(l.path)}
	for _, name := range members.names {
		dependency, err := c.dependency(l, keyword, name, members.values[name])
		if err != nil {
			return nil, err
		}
		other := newShape(l.path)
		other.types, other.stated = anyType&^isObject, true
		if list, err = c.both(l, list, append(dependency, lacking(l, name), other)); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// lacking is objects without a property.
func lacking(l located, name string) *shape {
	s := newShape(l.path)
	s.types, s.stated, s.implied = isObject, true, isObject
	s.properties = []property{{name, all{{false, l.path + " ~(without " + name + ")"}}}}
	return s
}

// dependency is the objects with a property and what that asks for.
func (c *compiler) dependency(l located, keyword, name string, v any) ([]*shape, error) {
	present := newShape(l.path)
	present.types, present.stated, present.implied, present.required = isObject, true, isObject, []string{name}
	if _, isList := v.([]any); isList == (keyword == "dependentSchemas") && keyword != "dependencies" {
		return nil, l.fail(keyword, "%s must have a %s", strconv.Quote(name), map[bool]string{true: "schema", false: "list of names"}[isList])
	}
	if list, ok := v.([]any); ok {
		names, err := l.strings(keyword, list)
		if err != nil {
			return nil, err
		}
		present.required = union(present.required, names)
		return []*shape{present}, nil
	}
	return c.with(l, []*shape{present}, located{v, l.at(keyword, name)})
}

// strings are the names of a list.
func (l located) strings(keyword string, v any) (names []string, err error) {
	list, ok := v.([]any)
	for _, x := range list {
		name, isText := x.(string)
		if ok = ok && isText; ok && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if !ok {
		return nil, l.fail(keyword, "it must be a list of names")
	}
	return names, nil
}

// plain reads the keywords of one schema.
func (c *compiler) plain(l located, o *object) (*shape, error) {
	s := newShape(l.path)
	for _, keyword := range o.names {
		v := o.values[keyword]
		if slices.Contains(unsupported, keyword) {
			return nil, l.fail(keyword, "it is not supported")
		}
		var err error
		switch keyword {
		case "type":
			err = s.readTypes(l, v, o.get("nullable") == true)
		case "enum":
			list, ok := v.([]any)
			if !ok {
				return nil, l.fail(keyword, "it must be a list")
			}
			s.restrict(list)
		case "const":
			s.restrict([]any{v})
		case "minLength", "maxLength":
			s.implied |= isString
			err = count(l, keyword, v, map[string]*int{"minLength": &s.minLength, "maxLength": &s.maxLength}[keyword])
		case "minItems", "maxItems":
			s.implied |= isArray
			err = count(l, keyword, v, map[string]*int{"minItems": &s.minItems, "maxItems": &s.maxItems}[keyword])
		case "minProperties", "maxProperties":
			s.implied |= isObject
			err = count(l, keyword, v, map[string]*int{"minProperties": &s.minProperties, "maxProperties": &s.maxProperties}[keyword])
		case "uniqueItems":
			unique, ok := v.(bool)
			if !ok {
				return nil, l.fail(keyword, "it must be true or false")
			}
			s.implied |= isArray
			s.unique = unique
		case "contains":
			s.implied |= isArray
			in := contains{located{v, l.at(keyword)}, 1, -1}
			for bound, to := range map[string]*int{"minContains": &in.min, "maxContains": &in.max} {
				if o.has(bound) {
					err = errors.Join(err, count(l, bound, o.get(bound), to))
				}
			}
			if in.min > 0 || in.max >= 0 {
				s.contains = append(s.contains, in)
			}
		case "pattern", "format":
			t, ok := v.(string)
			if !ok {
				return nil, l.fail(keyword, "it must be a string")
			}
			if keyword == "pattern" {
				s.patterns = append(s.patterns, located{t, l.path})
				s.implied |= isString
			} else if formats[t] != nil {
				s.formats = append(s.formats, t)
				s.implied |= isString
			}
		case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum":
			err = s.readBound(l, o, keyword)
		case "multipleOf":
			err = s.readMultiple(l, v)
		case "prefixItems":
			list, ok := v.([]any)
			if !ok {
				return nil, l.fail(keyword, "it must be a list of schemas")
			}
			c.o.Work.merged += valueCost * len(list)
			s.readPrefix(l, keyword, list)
		case "items":
			if list, ok := v.([]any); ok { // of draft 7: prefixItems
				if o.has("prefixItems") {
					return nil, l.fail(keyword, "it must be one schema beside prefixItems")
				}
				s.readPrefix(l, keyword, list)
				continue
			}
			s.implied |= isArray
			s.items = all{{v, l.at(keyword)}}
		case "additionalItems": // of draft 7: behind a list of items it is items, elsewhere nothing
			if _, ok := o.get("items").([]any); ok {
				s.items = all{{v, l.at(keyword)}}
			}
		case "propertyNames":
			s.implied |= isObject
			if !anyName(v) {
				s.names = all{{v, l.at(keyword)}}
			}
		case "patternProperties":
			s.implied |= isObject
			err = c.readPatterned(s, l, v)
		case "properties":
			members, ok := v.(*object)
			if !ok {
				return nil, l.fail(keyword, "it must be an object")
			}
			s.implied |= isObject
			s.declares = true
			c.o.Work.merged += valueCost * len(members.names)
			for _, name := range members.names {
				s.properties = append(s.properties, property{name, all{{members.values[name], l.at(keyword, name)}}})
			}
		case "required":
			s.implied |= isObject
			s.required, err = l.strings(keyword, v)
		case "additionalProperties":
			s.implied |= isObject
			s.hasAdditional, s.additional = true, all{{v, l.at(keyword)}}
		}
		if err != nil {
			return nil, err
		}
	}
	for i := range s.patterned { // one, of this schema
		p := &s.patterned[i]
		p.additional, s.additional = s.additional, nil
		for j, property := range s.properties {
			for _, n := range p.patterns {
				if n.match(property.name) {
					s.properties[j].of = join(s.properties[j].of, all{n.schema})
				}
			}
		}
	}
	return s, nil
}

// readPatterned reads patternProperties.
func (c *compiler) readPatterned(s *shape, l located, v any) error {
	const keyword = "patternProperties"
	members, ok := v.(*object)
	switch {
	case !ok:
		return l.fail(keyword, "it must be an object")
	case len(members.names) == 0:
		return nil
	case len(members.names) > maxNamePatterns:
		return l.fail(keyword, "more than %d patterns of one object are not supported", maxNamePatterns)
	}
	var p patterned
	for _, pattern := range members.names {
		n, ok := c.patterns[pattern]
		if !ok {
			parsed, err := grammar.ParsePattern(pattern)
			if err != nil {
				return l.fail(keyword, "%s: %v", strconv.Quote(pattern), err)
			}
			excluded, err := grammar.ParseExcluded(pattern)
			if err != nil {
				return l.fail(keyword, "%s: %v", strconv.Quote(pattern), err)
			}
			n = namePattern{pattern: pattern, names: quoted(parsed.Within(charsOf, spelled)), others: quoted(excluded.Within(charsOf, spelled))}
			if n.match, err = c.matcher(n.others); err != nil {
				return l.fail(keyword, "%s: %v", strconv.Quote(pattern), err)
			}
			c.patterns[pattern] = n
		}
		n.schema = located{members.values[pattern], l.at(keyword, pattern)}
		p.patterns = append(p.patterns, n)
	}
	s.declares, s.patterned = true, []patterned{p}
	return nil
}

// matcher says whether a name fits the expression of keys. All of them together take as long as one grammar may.
func (c *compiler) matcher(keys grammar.Expr) (func(name string) bool, error) {
	if c.o.Work.States > grammar.MaxWork {
		return nil, grammar.ErrTooLarge
	}
	g, work, err := grammar.NewCounted(c.o.Context, keys, nil)
	if c.o.Work.States += work; c.o.Work.States > grammar.MaxWork && c.o.Context.Err() == nil {
		err = grammar.ErrTooLarge
	}
	switch {
	case errors.Is(err, grammar.ErrNoText):
		return func(string) bool { return false }, nil
	case err != nil:
		return nil, err
	}
	return func(name string) bool { return g.Match(text(name)) }, nil
}

func (s *shape) readTypes(l located, v any, nullable bool) error {
	names, ok := v.([]any)
	if !ok {
		names = []any{v}
	}
	s.stated = true
	var of types
	for _, n := range names {
		name, _ := n.(string)
		t, ok := typeNames[name]
		if !ok {
			return l.fail("type", "it must be array, boolean, integer, null, number, object or string, and is %s", text(n))
		}
		of |= t
	}
	if nullable {
		of |= isNull
	}
	s.types &= of
	return nil
}

// restrict has a value be one of a list.
func (s *shape) restrict(values []any) {
	if !s.hasEnum {
		s.hasEnum, s.enum = true, values
		return
	}
	s.enum = common(s.enum, values)
}

// common is the values of a list that are in another one, too.
func common(list, others []any) []any {
	in := make(map[string]bool, len(others))
	for _, v := range others {
		in[identity(v)] = true
	}
	return slices.DeleteFunc(slices.Clone(list), func(v any) bool { return !in[identity(v)] })
}

// typeOf a value.
func typeOf(v any) types {
	switch v := v.(type) {
	case nil:
		return isNull
	case bool:
		return isBoolean
	case json.Number:
		if _, exponent := scientific(v); exponent >= 0 {
			return isInteger
		}
		return isFraction
	case string:
		return isString
	case []any:
		return isArray
	}
	return isObject
}

// maxCount is the maximum of a length.
const maxCount = 1 << 20

func count(l located, keyword string, v any, to *int) error {
	n, ok := v.(json.Number)
	if !ok {
		return l.fail(keyword, "it must be a number")
	}
	d, err := parseDecimal(n)
	if err != nil || d.negative || d.part != "" {
		return l.fail(keyword, "it must be a whole number, not negative")
	}
	if *to, err = strconv.Atoi("0" + d.whole); err != nil || *to > maxCount {
		return l.fail(keyword, "it must be at most %d", maxCount)
	}
	return nil
}

// readBound reads one bound. In draft 4, and OpenAPI 3.0, the exclusive ones are true beside the others.
func (s *shape) readBound(l located, o *object, keyword string) error {
	v := o.get(keyword)
	if exclusive, ok := v.(bool); ok && strings.HasPrefix(keyword, "exclusive") {
		if v = o.get(strings.ToLower(strings.TrimPrefix(keyword, "exclusive"))); !exclusive || v == nil {
			return nil
		}
	}
	n, ok := v.(json.Number)
	if !ok {
		return l.fail(keyword, "it must be a number")
	}
	d, err := parseDecimal(n)
	if err != nil {
		return l.fail(keyword, "%v", err)
	}
	s.implied |= isNumber
	b := &bound{d, strings.HasPrefix(keyword, "exclusive")}
	if strings.HasSuffix(strings.ToLower(keyword), "minimum") {
		s.least = tighter(s.least, b, 1)
	} else {
		s.most = tighter(s.most, b, -1)
	}
	return nil
}

// merge is what fits both shapes; nil: nothing can, or there is no time left, of which both reports the error.
func (c *compiler) merge(a, b *shape) *shape {
	names := func(s *shape) int { return len(s.properties) + len(s.required) + len(s.notStrings) + len(s.enum) }
	merged := &c.o.Work.merged
	*merged += mergeCost + names(a)*names(b) + len(a.required)*len(a.properties) + itemCost*max(len(a.prefix), len(b.prefix))
	if a.hasEnum && b.hasEnum {
		*merged += valueCost*(len(a.enum)+len(b.enum)) - len(a.enum)*len(b.enum)
	}
	if *merged > maxMerged || c.o.Context.Err() != nil {
		return nil
	}
	path := a.path
	if !a.stated && a.implied == 0 && !a.hasEnum { // a says nothing but has alternatives
		path = b.path
	}
	m := &shape{
		path: path, types: a.types & b.types, stated: a.stated || b.stated, implied: a.implied | b.implied,
		hasEnum: a.hasEnum, enum: a.enum,
		least: tighter(a.least, b.least, 1), most: tighter(a.most, b.most, -1), multiple: commonMultiple(a.multiple, b.multiple),
		minLength: max(a.minLength, b.minLength), maxLength: lower(a.maxLength, b.maxLength),
		patterns: joinTexts(a.patterns, b.patterns), notPatterns: joinTexts(a.notPatterns, b.notPatterns), notStrings: union(a.notStrings, b.notStrings), formats: union(a.formats, b.formats),
		items: join(a.items, b.items), minItems: max(a.minItems, b.minItems), maxItems: lower(a.maxItems, b.maxItems),
		contains: slices.Clone(a.contains), unique: a.unique || b.unique,
		declares: a.declares || b.declares, required: union(a.required, b.required), hasAdditional: a.hasAdditional || b.hasAdditional, additional: join(a.additional, b.additional),
		patterned: slices.Concat(a.patterned, b.patterned), names: join(a.names, b.names),
		minProperties: max(a.minProperties, b.minProperties), maxProperties: lower(a.maxProperties, b.maxProperties),
	}
	if b.hasEnum {
		m.restrict(b.enum)
	}
	if m.hasEnum && len(m.notStrings) > 0 {
		m.enum = slices.DeleteFunc(slices.Clone(m.enum), func(v any) bool { t, ok := v.(string); return ok && slices.Contains(m.notStrings, t) })
	}
	for i := range max(len(a.prefix), len(b.prefix)) {
		at := func(s *shape) all {
			if i < len(s.prefix) {
				return s.prefix[i]
			}
			return s.items
		}
		m.prefix = append(m.prefix, join(at(a), at(b)))
	}
	for _, x := range b.contains {
		if !slices.ContainsFunc(a.contains, func(y contains) bool { return x.schema.path == y.schema.path && x.min == y.min && x.max == y.max }) {
			m.contains = append(m.contains, x)
		}
	}
	for _, p := range a.properties {
		m.properties = append(m.properties, property{p.name, join(p.of, b.of(p.name))})
	}
	for _, p := range b.properties {
		if a.property(p.name) < 0 {
			m.properties = append(m.properties, property{p.name, join(p.of, a.of(p.name))})
		}
	}
	if apart(m, m) {
		m.types &^= isNumber
	}
	if m.maxLength >= 0 && m.maxLength < m.minLength {
		m.types &^= isString
	}
	if m.maxItems >= 0 && m.maxItems < m.minItems {
		m.types &^= isArray
	}
	if m.maxProperties >= 0 && m.maxProperties < m.minProperties {
		m.types &^= isObject
	}
	if m.types == 0 || m.hasEnum && len(m.enum) == 0 {
		return nil
	}
	return m
}

func lower(a, b int) int {
	if a < 0 || b >= 0 && b < a {
		return b
	}
	return a
}

func union(a, b []string) []string {
	out := slices.Clone(a)
	for _, x := range b {
		if !slices.Contains(out, x) {
			out = append(out, x)
		}
	}
	return out
}

func join(a, b all) all {
	out := slices.Clone(a)
	for _, x := range b {
		if !slices.ContainsFunc(out, func(o located) bool { return o.path == x.path }) {
			out = append(out, x)
		}
	}
	return out
}

// joinTexts is all patterns of two lists.
func joinTexts(a, b []located) []located {
	out := slices.Clone(a)
	for _, x := range b {
		if !slices.ContainsFunc(out, func(o located) bool { return o.value == x.value }) {
			out = append(out, x)
		}
	}
	return out
}

// readPrefix reads the schemas of an array's first items.
func (s *shape) readPrefix(l located, keyword string, list []any) {
	s.implied |= isArray
	for i, x := range list {
		s.prefix = append(s.prefix, all{{x, l.at(keyword, strconv.Itoa(i))}})
	}
}

// anyName says whether a schema of propertyNames fits all names.
func anyName(v any) bool {
	o, ok := v.(*object)
	if !ok {
		return v == true
	}
	return !slices.ContainsFunc(o.names, func(n string) bool {
		return !slices.Contains(ignored, n) && (n != "type" || o.get(n) != "string")
	})
}

// requireTag has all alternatives of oneOf that have the discriminator's property require it: so
// texts tell which one they are of, where the property may be left out because it has a default.
func requireTag(discriminator any, each [][]*shape) {
	d, ok := discriminator.(*object)
	if !ok {
		return
	}
	tag, ok := d.get("propertyName").(string)
	if !ok {
		return
	}
	for _, shapes := range each {
		for _, s := range shapes {
			if s.property(tag) >= 0 {
				s.required = union(s.required, []string{tag})
			}
		}
	}
}

// exclusive reports an error unless no value can fit two of several schemas, each given by its alternatives, with what
// holds beside them.
func (c *compiler) exclusive(l located, beside []*shape, each [][]*shape) error {
	for i := range each {
		for j := range i {
			for _, a := range each[j] {
				for _, b := range each[i] {
					m := c.merge(a, b)
					if m == nil {
						continue
					}
					for _, x := range beside {
						if all := c.merge(m, x); all != nil && !c.disjoint(a, b, all.types, 0) {
							return l.fail("oneOf", "the schemas %d and %d may both fit a value: use anyOf, or give them types, values of enum or const, or a required property, that differ", j, i)
						}
					}
				}
			}
		}
	}
	return nil
}

// disjoint says whether no value of some types fits both shapes, as far as that is easily seen.
func (c *compiler) disjoint(a, b *shape, of types, depth int) bool {
	if depth > 4 {
		return false
	}
	if a.hasEnum && b.hasEnum {
		c.o.Work.merged += valueCost * (len(a.enum) + len(b.enum))
		return !slices.ContainsFunc(common(a.enum, b.enum), func(v any) bool { return of&typeOf(v) != 0 })
	}
	for t := isNull; t <= isObject; t <<= 1 {
		if of&t == 0 {
			continue
		}
		for _, s := range []*shape{a, b} { // an enum without values of a type
			if s.hasEnum && !slices.ContainsFunc(s.enum, func(v any) bool { return typeOf(v) == t }) {
				of &^= t
			}
		}
		switch {
		case of&t == 0:
		case t&isNumber != 0 && (apart(a, b) || apart(b, a)):
		case t == isString && (a.maxLength >= 0 && a.maxLength < b.minLength || b.maxLength >= 0 && b.maxLength < a.minLength):
		case t == isArray && (a.maxItems >= 0 && a.maxItems < b.minItems || b.maxItems >= 0 && b.maxItems < a.minItems):
		case t == isObject && (c.tellApart(a, b, depth) || c.tellApart(b, a, depth)):
		default:
			return false
		}
	}
	return true
}

// apart says whether the numbers of a are below those of b.
func apart(a, b *shape) bool {
	if a.most == nil || b.least == nil {
		return false
	}
	d := a.most.compare(b.least.decimal)
	return d < 0 || d == 0 && (a.most.open || b.least.open)
}

// tellApart says whether a requires a property that b does not allow, or not with such values.
func (c *compiler) tellApart(a, b *shape, depth int) bool {
	for _, name := range a.required {
		i, of := a.property(name), b.of(name)
		if slices.ContainsFunc(of, func(l located) bool { return l.value == false }) {
			return true
		}
		if i < 0 || len(of) == 0 {
			continue
		}
		mine, err1 := c.kept(a.properties[i].of)
		others, err2 := c.kept(of)
		if err1 != nil || err2 != nil {
			continue
		}
		if !slices.ContainsFunc(mine, func(x *shape) bool {
			return slices.ContainsFunc(others, func(y *shape) bool {
				m := c.merge(x, y)
				return m != nil && !c.disjoint(x, y, m.types, depth+1)
			})
		}) {
			return true
		}
	}
	return false
}
