package schema

import (
	"encoding/json"
	"slices"
)

// negate is the alternatives of what does not fit a schema: what does not fit one of its keywords.
func (c *compiler) negate(l located) ([]*shape, error) {
	switch v := l.value.(type) {
	case bool:
		return c.shapes(located{!v, l.path})
	case negation:
		return c.shapes(v.of)
	}
	if c.reads++; c.reads > maxReads {
		return nil, l.fail("", "its references and alternatives are too many")
	}
	o, ok := l.value.(*object)
	if !ok {
		return nil, l.fail("", "a schema must be an object, true or false")
	}
	key := "not " + l.path
	if c.open[key] {
		return nil, l.fail("$ref", "it refers to itself without anything in between")
	}
	c.open[key] = true
	defer delete(c.open, key)
	s, err := c.plain(l, o) // which reads all keywords, and reports what is wrong with them
	if err != nil {
		return nil, err
	}
	list, err := c.negatePlain(l, o, s)
	if err != nil {
		return nil, err
	}
	for _, keyword := range combined {
		if !o.has(keyword) {
			continue
		}
		others, err := c.negateCombined(l, o, keyword)
		if err != nil {
			return nil, err
		}
		if list = append(list, others...); len(list) > maxAlternatives {
			return nil, l.fail(keyword, "what does not fit it has more than %d alternatives", maxAlternatives)
		}
	}
	return list, nil
}

// negateCombined is what does not fit one of the combined keywords.
func (c *compiler) negateCombined(l located, o *object, keyword string) ([]*shape, error) {
	v := o.get(keyword)
	switch keyword {
	case "$ref":
		target, err := c.resolve(l, v)
		if err != nil {
			return nil, err
		}
		return c.negate(target)
	case "not":
		return c.shapes(located{v, l.at(keyword)})
	case "if":
		condition := located{v, l.at(keyword)}
		var lists []all
		if o.has("then") {
			lists = append(lists, all{condition, not(located{o.get("then"), l.at("then")})})
		}
		if o.has("else") {
			lists = append(lists, all{not(condition), not(located{o.get("else"), l.at("else")})})
		}
		return c.either(l, lists)
	case "dependentRequired", "dependentSchemas", "dependencies":
		return nil, l.cannot(keyword)
	}
	parts, err := l.parts(keyword, v)
	if err != nil {
		return nil, err
	}
	none := make([]all, len(parts)) // each does not fit
	for i, part := range parts {
		none[i] = all{not(part)}
	}
	switch keyword {
	case "allOf":
		return c.either(l, none)
	case "oneOf":
		each := make([][]*shape, len(parts))
		for i, part := range parts {
			if each[i], err = c.shapes(part); err != nil {
				return nil, err
			}
		}
		if c.exclusive(l, []*shape{newShape(l.path)}, each) != nil {
			return nil, l.cannot(keyword)
		}
	}
	return c.together(slices.Concat(none...))
}

// cannot is the error of a keyword that is not supported where values are not to fit it.
func (l located) cannot(keyword string) error {
	return l.fail(keyword, "it is not supported within not or if, or in a oneOf whose schemas may both fit a value")
}

// negatePlain is what does not fit one of the other keywords, of which s are those of the schema.
func (c *compiler) negatePlain(l located, o *object, s *shape) (list []*shape, err error) {
	add := func(of types, change func(n *shape)) {
		n := newShape(l.path)
		n.types, n.stated, n.implied = of, true, of
		if change != nil {
			change(n)
		}
		list = append(list, n)
	}
	for _, keyword := range o.names {
		v := o.values[keyword]
		switch keyword {
		case "type":
			if others := anyType &^ typesOf(l, o); others != 0 {
				add(others, func(n *shape) { n.implied = 0 })
			}
		case "enum", "const":
			values := []any{v}
			if keyword == "enum" {
				values = v.([]any)
			}
			if err := negateValues(l, keyword, values, add); err != nil {
				return nil, err
			}
		case "minLength":
			if s.minLength > 0 {
				add(isString, func(n *shape) { n.maxLength = s.minLength - 1 })
			}
		case "maxLength":
			add(isString, func(n *shape) { n.minLength = s.maxLength + 1 })
		case "minItems":
			if s.minItems > 0 {
				add(isArray, func(n *shape) { n.maxItems = s.minItems - 1 })
			}
		case "maxItems":
			add(isArray, func(n *shape) { n.minItems = s.maxItems + 1 })
		case "minProperties":
			if s.minProperties > 0 {
				add(isObject, func(n *shape) { n.maxProperties = s.minProperties - 1 })
			}
		case "maxProperties":
			add(isObject, func(n *shape) { n.minProperties = s.maxProperties + 1 })
		case "pattern":
			add(isString, func(n *shape) { n.notPatterns = s.patterns })
		case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum":
			one := newShape(l.path) // s has both bounds together
			if err := one.readBound(l, o, keyword); err != nil {
				return nil, err
			}
			if one.least == nil && one.most == nil {
				continue // exclusiveMinimum of false
			}
			add(isNumber, func(n *shape) {
				if b := one.least; b != nil {
					n.most = &bound{b.decimal, !b.open}
				} else {
					n.least = &bound{one.most.decimal, !one.most.open}
				}
			})
		case "required":
			for _, name := range s.required {
				list = append(list, lacking(l, name))
			}
		case "properties":
			for _, p := range v.(*object).names {
				add(isObject, func(n *shape) {
					n.required = []string{p}
					n.properties = []property{{p, all{not(located{v.(*object).values[p], l.at(keyword, p)})}}}
				})
			}
		case "items":
			if _, isList := v.([]any); isList || len(s.prefix) > 0 {
				return nil, l.cannot(keyword)
			}
			add(isArray, func(n *shape) { n.contains = []contains{{not(located{v, l.at(keyword)}), 1, -1}} })
		case "contains":
			for _, x := range s.contains {
				if x.min > 0 {
					add(isArray, func(n *shape) { n.contains = []contains{{x.schema, 0, x.min - 1}} })
				}
				if x.max >= 0 {
					add(isArray, func(n *shape) { n.contains = []contains{{x.schema, x.max + 1, -1}} })
				}
			}
		case "uniqueItems":
			if v == true {
				return nil, l.cannot(keyword)
			}
		case "format":
			if len(s.formats) > 0 {
				return nil, l.cannot(keyword)
			}
		case "multipleOf", "prefixItems", "additionalProperties", "patternProperties":
			return nil, l.cannot(keyword)
		case "additionalItems":
			if _, isList := o.get("items").([]any); isList {
				return nil, l.cannot(keyword)
			}
		case "propertyNames":
			if !anyName(v) {
				return nil, l.cannot(keyword)
			}
		}
	}
	return list, nil
}

// typesOf is the types that a schema's type allows.
func typesOf(l located, o *object) types {
	n := newShape(l.path)
	if err := n.readTypes(l, o.get("type"), o.get("nullable") == true); err != nil {
		panic("schema: types that were read before: " + err.Error())
	}
	return n.types
}

// negateValues adds what is none of some values.
func negateValues(l located, keyword string, values []any, add func(types, func(*shape))) error {
	var of types
	var texts []string
	var numbers []decimal
	booleans := map[any]bool{true: true, false: true}
	for _, v := range values {
		of |= typeOf(v)
		switch v := v.(type) {
		case bool:
			delete(booleans, v)
		case string:
			texts = append(texts, v)
		case json.Number:
			d, err := parseDecimal(v)
			if err != nil {
				return l.fail(keyword, "%v", err)
			}
			numbers = append(numbers, d)
		case []any, *object:
			return l.fail(keyword, "an array or an object in it is not supported within not or if, or in a oneOf whose schemas may both fit a value")
		}
	}
	if of&isNumber != 0 {
		of |= isNumber
	}
	if others := anyType &^ of; others != 0 {
		add(others, func(n *shape) { n.implied = 0 })
	}
	if of&isBoolean != 0 {
		for b := range booleans {
			add(isBoolean, func(n *shape) { n.restrict([]any{b}) })
		}
	}
	if of&isString != 0 {
		add(isString, func(n *shape) { n.notStrings = texts })
	}
	slices.SortFunc(numbers, decimal.compare)
	numbers = slices.CompactFunc(numbers, func(a, b decimal) bool { return a.compare(b) == 0 })
	if len(numbers) > maxNotNumbers {
		return l.fail(keyword, "more than %d numbers in it are not supported within not or if, or in a oneOf whose schemas may both fit a value", maxNotNumbers)
	}
	for i := range len(numbers) + min(len(numbers), 1) { // between them
		add(isNumber, func(n *shape) {
			if i > 0 {
				n.least = &bound{numbers[i-1], true}
			}
			if i < len(numbers) {
				n.most = &bound{numbers[i], true}
			}
		})
	}
	return nil
}
