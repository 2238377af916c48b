package schema

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// object is a JSON object whose members keep their order.
type object struct {
	names  []string
	values map[string]any
}

func (o *object) get(name string) any { return o.values[name] }

func (o *object) has(name string) bool {
	_, ok := o.values[name]
	return ok
}

// maxDepth is the maximum nesting of a schema.
const maxDepth = 128

// parse reads a JSON value: objects become *object, numbers json.Number.
func parse(data []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	v, err := parseValue(d, 0)
	if err != nil {
		return nil, fmt.Errorf("it is not valid JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("it is not valid JSON: there is more behind the schema")
	}
	return v, nil
}

func parseValue(d *json.Decoder, depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("it is nested more than %d levels deep", maxDepth)
	}
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t {
	case json.Delim('{'):
		o := &object{values: map[string]any{}}
		for d.More() {
			name, err := d.Token()
			if err != nil {
				return nil, err
			}
			v, err := parseValue(d, depth+1)
			if err != nil {
				return nil, err
			}
			n := name.(string)
			if !o.has(n) {
				o.names = append(o.names, n)
			}
			o.values[n] = v
		}
		_, err := d.Token()
		return o, err
	case json.Delim('['):
		list := []any{}
		for d.More() {
			v, err := parseValue(d, depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err := d.Token()
		return list, err
	}
	return t, nil
}

// text writes a value as compact JSON, whole numbers without a point.
func text(v any) string {
	return form(v, func(names []string) []string { return names }, func(n json.Number) string {
		d, err := parseDecimal(n)
		switch {
		case err != nil || d.part != "" || len(d.whole) > 18:
			return n.String()
		case d.negative:
			return "-" + d.whole
		}
		return cmp.Or(d.whole, "0")
	})
}

// identity is one text of all values that JSON Schema takes for equal: numbers by what they are, objects without order.
func identity(v any) string {
	order := func(names []string) []string { return slices.Sorted(slices.Values(names)) }
	return form(v, order, func(n json.Number) string {
		digits, exponent := scientific(n)
		return digits + "e" + strconv.Itoa(exponent)
	})
}

// form writes a value as compact JSON, members in the order that is given and numbers as number writes them.
func form(v any, order func(names []string) []string, number func(json.Number) string) string {
	var parts []string
	switch v := v.(type) {
	case *object:
		for _, n := range order(v.names) {
			parts = append(parts, text(n)+":"+form(v.values[n], order, number))
		}
		return "{" + strings.Join(parts, ",") + "}"
	case []any:
		for _, x := range v {
			parts = append(parts, form(x, order, number))
		}
		return "[" + strings.Join(parts, ",") + "]"
	case json.Number:
		return number(v)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic("schema: a value without a JSON form: " + err.Error())
	}
	written := strings.TrimSuffix(b.String(), "\n")
	if _, ok := v.(string); ok { // as charsOf does, which escapes these no more than others
		written = separators.Replace(written)
	}
	return written
}

// separators spells what encoding/json escapes for JavaScript of old. Of a backslash only its own escape begins with two.
var separators = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029")

// scientific is the digits of a number, without zeros at their ends, and the power of ten of the last of them.
func scientific(n json.Number) (digits string, exponent int) {
	mantissa, power, _ := strings.Cut(strings.ToLower(string(n)), "e")
	if power != "" {
		exponent, _ = strconv.Atoi(power) // the largest one of those beyond it
		exponent = min(max(exponent, math.MinInt32), math.MaxInt32)
	}
	mantissa, negative := strings.CutPrefix(mantissa, "-")
	whole, part, _ := strings.Cut(mantissa, ".")
	digits = strings.TrimRight(whole+part, "0")
	exponent += len(whole) - len(digits)
	if digits = strings.TrimLeft(digits, "0"); digits == "" {
		return "0", 0
	}
	if negative {
		digits = "-" + digits
	}
	return digits, exponent
}

// Error is a part of a schema that is wrong, or not supported.
type Error struct {
	// Path is the JSON pointer of the schema, Keyword the member that is meant.
	Path, Keyword string
	Why           string
}

func (e *Error) Error() string {
	if e.Keyword == "" {
		return fmt.Sprintf("at %s: %s", e.Path, e.Why)
	}
	return fmt.Sprintf("%s at %s: %s", e.Keyword, e.Path, e.Why)
}

// located is a schema with its place.
type located struct {
	value any
	path  string
}

// inPointer spells a name as a part of a JSON pointer, and fromPointer reads one.
var (
	inPointer   = strings.NewReplacer("~", "~0", "/", "~1")
	fromPointer = strings.NewReplacer("~1", "/", "~0", "~")
)

func (l located) at(names ...string) string {
	path := l.path
	for _, n := range names {
		path += "/" + inPointer.Replace(n)
	}
	return path
}

func (l located) fail(keyword, format string, args ...any) error {
	return &Error{l.path, keyword, fmt.Sprintf(format, args...)}
}
