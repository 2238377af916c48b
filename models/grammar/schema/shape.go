package schema

import (
	"encoding/json"
	"math/big"
	"slices"
	"strconv"
	"strings"
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
	formats     []string

	prefix   []all
	items    all
	minItems int
	maxItems int // -1: any

	declares      bool // properties is there
	properties    []property
	required      []string
	hasAdditional bool
	additional    all
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

// ignored are keywords that restrict nothing, and those that others read.
var ignored = []string{
	"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$comment", "$defs", "definitions",
	"contentEncoding", "contentMediaType", "contentSchema", "$id", "$anchor", "$vocabulary", "discriminator", "nullable", "then", "else", "minContains", "maxContains",
}

// unsupported are keywords that restrict values in ways that no grammar here has, and why.
var unsupported = map[string]string{
	"not": "", "if": "", "contains": "", "unevaluatedItems": "", "unevaluatedProperties": "", "dependentSchemas": "", "dependentRequired": "",
	"dependencies": "", "patternProperties": "", "$dynamicRef": "", "$recursiveRef": "",
}

// limits of what a schema may be.
const (
	maxAlternatives = 256
	maxRules        = 1 << 13
	maxReads        = 1 << 14 // of schemas, of which a reference is one again each time
	maxEnumSchemas  = 1 << 8  // enums beside other keywords
)

// shapes returns the alternatives of a schema.
func (c *compiler) shapes(l located) ([]*shape, error) {
	if on, ok := l.value.(bool); ok {
		if !on {
			return nil, nil
		}
		return []*shape{{path: l.path, types: anyType, maxLength: -1, maxItems: -1, maxProperties: -1}}, nil
	}
	if c.reads++; c.reads > maxReads {
		return nil, l.fail("", "its references and alternatives are too many")
	}
	o, ok := l.value.(*object)
	if !ok {
		return nil, l.fail("", "a schema must be an object, true or false")
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
	and := func(others []*shape) error {
		var joined []*shape
		for _, a := range list {
			for _, b := range others {
				if m := merge(a, b); m != nil {
					joined = append(joined, m)
				}
				if len(joined) > maxAlternatives {
					return l.fail("", "anyOf and allOf together give more than %d alternatives", maxAlternatives)
				}
			}
		}
		list = joined
		return nil
	}
	if o.has("$ref") {
		target, err := c.resolve(l, o.get("$ref"))
		if err != nil {
			return nil, err
		}
		others, err := c.shapes(target)
		if err == nil {
			err = and(others)
		}
		if err != nil {
			return nil, err
		}
	}
	for _, keyword := range []string{"allOf", "anyOf", "oneOf"} {
		if !o.has(keyword) {
			continue
		}
		parts, ok := o.get(keyword).([]any)
		if !ok || len(parts) == 0 {
			return nil, l.fail(keyword, "it must be a list of schemas, and not empty")
		}
		var either []*shape
		var each [][]*shape
		for i, part := range parts {
			others, err := c.shapes(located{part, l.at(keyword, strconv.Itoa(i))})
			if err != nil {
				return nil, err
			}
			if keyword == "allOf" {
				if err := and(others); err != nil {
					return nil, err
				}
				continue
			}
			if either, each = append(either, others...), append(each, others); len(either) > maxAlternatives {
				return nil, l.fail(keyword, "it has more than %d alternatives", maxAlternatives)
			}
		}
		if keyword == "allOf" {
			continue
		}
		if keyword == "oneOf" {
			requireTag(o.get("discriminator"), each)
			if err := c.exclusive(l, list, each); err != nil {
				return nil, err
			}
		}
		if err := and(either); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// plain reads the keywords of one schema.
func (c *compiler) plain(l located, o *object) (*shape, error) {
	s := &shape{path: l.path, types: anyType, maxLength: -1, maxItems: -1, maxProperties: -1}
	for _, keyword := range o.names {
		v := o.values[keyword]
		if why, ok := unsupported[keyword]; ok {
			if why == "" {
				why = "it is not supported"
			} else {
				why = "it is not supported: " + why
			}
			return nil, l.fail(keyword, "%s", why)
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
			if v != false {
				err = l.fail(keyword, "it is not supported")
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
			err = s.readBound(l, keyword, v)
		case "multipleOf":
			err = s.readMultiple(l, v)
		case "prefixItems":
			list, ok := v.([]any)
			if !ok {
				return nil, l.fail(keyword, "it must be a list of schemas")
			}
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
			if !anyName(v) {
				return nil, l.fail(keyword, "it is not supported, but as the type string, which all names are")
			}
			s.implied |= isObject
		case "properties":
			members, ok := v.(*object)
			if !ok {
				return nil, l.fail(keyword, "it must be an object")
			}
			s.implied |= isObject
			s.declares = true
			for _, name := range members.names {
				s.properties = append(s.properties, property{name, all{{members.values[name], l.at(keyword, name)}}})
			}
		case "required":
			list, ok := v.([]any)
			if !ok {
				return nil, l.fail(keyword, "it must be a list of names")
			}
			s.implied |= isObject
			for _, x := range list {
				name, ok := x.(string)
				if !ok {
					return nil, l.fail(keyword, "it must be a list of names")
				}
				if !slices.Contains(s.required, name) {
					s.required = append(s.required, name)
				}
			}
		case "additionalProperties":
			s.implied |= isObject
			s.hasAdditional, s.additional = true, all{{v, l.at(keyword)}}
		}
		if err != nil {
			return nil, err
		}
	}
	return s, nil
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
			return l.fail("type", "%s is no type", text(n))
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
	if s.hasEnum {
		s.enum = slices.DeleteFunc(slices.Clone(s.enum), func(v any) bool { return !has(values, v) })
		return
	}
	s.hasEnum, s.enum = true, values
}

func has(values []any, v any) bool {
	return slices.ContainsFunc(values, func(w any) bool { return equal(v, w) })
}

// typeOf a value.
func typeOf(v any) types {
	switch v := v.(type) {
	case nil:
		return isNull
	case bool:
		return isBoolean
	case json.Number:
		if d, err := parseDecimal(v); err == nil && d.part == "" {
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

func (s *shape) readBound(l located, keyword string, v any) error {
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

// merge is what fits both shapes; nil: nothing can.
func merge(a, b *shape) *shape {
	path := a.path
	if !a.stated && a.implied == 0 && !a.hasEnum { // a says nothing but has alternatives
		path = b.path
	}
	m := &shape{
		path: path, types: a.types & b.types, stated: a.stated || b.stated, implied: a.implied | b.implied,
		hasEnum: a.hasEnum, enum: a.enum,
		least: tighter(a.least, b.least, 1), most: tighter(a.most, b.most, -1), multiple: commonMultiple(a.multiple, b.multiple),
		minLength: max(a.minLength, b.minLength), maxLength: lower(a.maxLength, b.maxLength),
		patterns: slices.Clone(a.patterns), formats: union(a.formats, b.formats),
		items: join(a.items, b.items), minItems: max(a.minItems, b.minItems), maxItems: lower(a.maxItems, b.maxItems),
		declares: a.declares || b.declares, required: union(a.required, b.required), hasAdditional: a.hasAdditional || b.hasAdditional, additional: join(a.additional, b.additional),
		minProperties: max(a.minProperties, b.minProperties), maxProperties: lower(a.maxProperties, b.maxProperties),
	}
	if b.hasEnum {
		m.restrict(b.enum)
	}
	for _, p := range b.patterns {
		if !slices.ContainsFunc(a.patterns, func(o located) bool { return o.value == p.value }) {
			m.patterns = append(m.patterns, p)
		}
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
	for _, p := range a.properties {
		of := b.additional
		if i := b.property(p.name); i >= 0 {
			of = b.properties[i].of
		}
		m.properties = append(m.properties, property{p.name, join(p.of, of)})
	}
	for _, p := range b.properties {
		if a.property(p.name) < 0 {
			m.properties = append(m.properties, property{p.name, join(p.of, a.additional)})
		}
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
					m := merge(a, b)
					if m == nil {
						continue
					}
					for _, x := range beside {
						if all := merge(m, x); all != nil && !c.disjoint(a, b, all.types, 0) {
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
		return !slices.ContainsFunc(a.enum, func(v any) bool { return of&typeOf(v) != 0 && has(b.enum, v) })
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
		i, j := a.property(name), b.property(name)
		of := b.additional
		if j >= 0 {
			of = b.properties[j].of
		}
		if slices.ContainsFunc(of, func(l located) bool { return l.value == false }) {
			return true
		}
		if i < 0 || len(of) == 0 {
			continue
		}
		mine, err1 := c.together(a.properties[i].of)
		others, err2 := c.together(of)
		if err1 != nil || err2 != nil {
			continue
		}
		if !slices.ContainsFunc(mine, func(x *shape) bool {
			return slices.ContainsFunc(others, func(y *shape) bool {
				m := merge(x, y)
				return m != nil && !c.disjoint(x, y, m.types, depth+1)
			})
		}) {
			return true
		}
	}
	return false
}
