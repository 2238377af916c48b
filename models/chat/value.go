package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// Templates see JSON values as nil, bool, int, float64, string, sequence and *exec.Dict. A Dict keeps the order of its
// keys, which a Go map would lose.

// sequence is a list that supports Python's negative indices, which fail on the first element of gonja's own lists.
type sequence []any

// GetItem implements exec.ItemGetter.
func (s sequence) GetItem(key any) (*exec.Value, bool) {
	i, ok := key.(int)
	if !ok {
		return exec.AsValue(nil), false
	}
	if i < 0 {
		i += len(s)
	}
	if i < 0 || i >= len(s) {
		return exec.AsValue(nil), false
	}
	return exec.ToValue(s[i]), true
}

// namespace is the only kind of value whose attributes a template may set.
type namespace struct{ fields map[string]any }

// GetAttribute implements exec.AttributeGetter.
func (n *namespace) GetAttribute(name string) (*exec.Value, bool) {
	v, ok := n.fields[name]
	return exec.ToValue(v), ok
}

// String omits the contents of a namespace, which may contain the namespace itself.
func (n *namespace) String() string { return "<namespace>" }

func newDict() *exec.Dict { return exec.NewDict() }

// set assigns a value to a key. An existing key keeps its position.
func set(d *exec.Dict, key string, v any) {
	for _, p := range d.Pairs {
		if p.Key.String() == key {
			p.Value = exec.AsValue(v)
			return
		}
	}
	d.Pairs = append(d.Pairs, &exec.Pair{Key: exec.AsValue(key), Value: exec.AsValue(v)})
}

func asDict(v any) (*exec.Dict, bool) {
	d, ok := v.(*exec.Dict)
	return d, ok
}

// clone copies a value of a Template, because renderings must not share it.
func clone(v any) any {
	switch v := v.(type) {
	case sequence:
		out := make(sequence, len(v))
		for i := range v {
			out[i] = clone(v[i])
		}
		return out
	case *exec.Dict:
		out := newDict()
		for _, p := range v.Pairs {
			set(out, p.Key.String(), clone(p.Value.Interface()))
		}
		return out
	}
	return v
}

// maxJSONDepth bounds the nesting of values, because functions walk them recursively.
const maxJSONDepth = 64

// decodeJSON reads one JSON value, keeping the order of object keys.
func decodeJSON(b []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v, err := decodeValue(d, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return v, nil
}

func decodeValue(d *json.Decoder, depth int) (any, error) {
	tok, err := d.Token()
	if err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if depth > maxJSONDepth {
		return nil, fmt.Errorf("JSON is nested deeper than %d", maxJSONDepth)
	}
	switch tok := tok.(type) {
	case json.Delim:
		if tok == '[' {
			list := sequence{}
			for d.More() {
				v, err := decodeValue(d, depth+1)
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
			_, err := d.Token()
			return list, err
		}
		dict, at := newDict(), map[string]int{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, fmt.Errorf("not JSON: %w", err)
			}
			name, _ := key.(string)
			v, err := decodeValue(d, depth+1)
			if err != nil {
				return nil, err
			}
			if i, ok := at[name]; ok {
				dict.Pairs[i].Value = exec.AsValue(v)
				continue
			}
			at[name] = len(dict.Pairs)
			dict.Pairs = append(dict.Pairs, &exec.Pair{Key: exec.AsValue(name), Value: exec.AsValue(v)})
		}
		_, err := d.Token()
		return dict, err
	case json.Number:
		return number(tok), nil
	default:
		return tok, nil // string, bool or nil
	}
}

// number returns an int if n is an integer that fits, else a float64.
func number(n json.Number) any {
	if i, err := strconv.Atoi(n.String()); err == nil {
		return i
	}
	f, _ := n.Float64()
	return f
}

// fromGo converts a value of Options.Extra, through JSON, to the types that templates see.
func fromGo(v any) (any, error) {
	b, ok := v.(json.RawMessage)
	if !ok {
		var err error
		if b, err = json.Marshal(v); err != nil {
			return nil, err
		}
	}
	return decodeJSON(b)
}

// jsonStyle holds the formatting options of tojson, which match those of Python's json.dumps.
type jsonStyle struct {
	ensureASCII bool
	indent      string // "": one line
	item, key   string // separators after an item and after a key
	sortKeys    bool
}

var errNotJSON = errors.New("value has no JSON form")

// appendJSON writes a value as Python's json.dumps does.
func appendJSON(b []byte, v *exec.Value, s *jsonStyle, depth int) ([]byte, error) {
	if depth > maxJSONDepth {
		return nil, fmt.Errorf("value is nested deeper than %d", maxJSONDepth)
	}
	if v.IsNil() {
		return append(b, "null"...), nil
	}
	if d, ok := v.Interface().(*exec.Dict); ok {
		return appendJSONDict(b, d, s, depth)
	}
	switch {
	case v.IsError(), v.IsCallable():
		return nil, errNotJSON
	case v.IsString():
		return appendJSONString(b, v.String(), s.ensureASCII), nil
	case v.IsBool():
		return strconv.AppendBool(b, v.Bool()), nil
	case v.IsInteger():
		return strconv.AppendInt(b, int64(v.Integer()), 10), nil
	case v.IsFloat():
		return append(b, pythonFloat(v.Float())...), nil
	case v.IsList():
		if v.Len() == 0 {
			return append(b, "[]"...), nil
		}
		b = append(b, '[')
		for i := range v.Len() {
			b = s.separate(b, i, depth+1)
			var err error
			if b, err = appendJSON(b, v.Index(i), s, depth+1); err != nil {
				return nil, err
			}
		}
		return append(s.line(b, depth), ']'), nil
	}
	return nil, errNotJSON
}

func appendJSONDict(b []byte, d *exec.Dict, s *jsonStyle, depth int) ([]byte, error) {
	if len(d.Pairs) == 0 {
		return append(b, "{}"...), nil
	}
	pairs := d.Pairs
	if s.sortKeys {
		pairs = slices.Clone(pairs)
		slices.SortStableFunc(pairs, func(a, b *exec.Pair) int { return strings.Compare(a.Key.String(), b.Key.String()) })
	}
	b = append(b, '{')
	for i, p := range pairs {
		b = s.separate(b, i, depth+1)
		b = append(appendJSONString(b, p.Key.String(), s.ensureASCII), s.key...)
		var err error
		if b, err = appendJSON(b, p.Value, s, depth+1); err != nil {
			return nil, err
		}
	}
	return append(s.line(b, depth), '}'), nil
}

func (s *jsonStyle) separate(b []byte, i, depth int) []byte {
	if i > 0 {
		b = append(b, s.item...)
	}
	return s.line(b, depth)
}

func (s *jsonStyle) line(b []byte, depth int) []byte {
	if s.indent == "" {
		return b
	}
	b = append(b, '\n')
	for range depth {
		b = append(b, s.indent...)
	}
	return b
}

func appendJSONString(b []byte, text string, ascii bool) []byte {
	b = append(b, '"')
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == '\b':
			b = append(b, `\b`...)
		case r == '\f':
			b = append(b, `\f`...)
		case r < 0x20 || ascii && r >= 0x7F && r < 0x10000:
			if r == 0x7F {
				b = append(b, byte(r))
				continue
			}
			b = fmt.Appendf(b, `\u%04x`, r)
		case ascii && r >= 0x10000:
			r -= 0x10000
			b = fmt.Appendf(b, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

// pythonFloat writes a float as Python's repr does.
func pythonFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
