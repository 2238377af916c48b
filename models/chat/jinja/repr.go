package jinja

import (
	"fmt"
	"math"
	"math/big"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// str is str(v).
func (r *run) str(v Value) Text {
	switch v := v.(type) {
	case Text:
		return v
	case *undefined:
		return Text{}
	}
	b := builder{r: r}
	b.repr(v)
	return b.text()
}

// repr is repr(v).
func (r *run) repr(v Value) Text {
	b := builder{r: r}
	b.repr(v)
	return b.text()
}

func (b *builder) repr(v Value) {
	b.r.step(1)
	b.r.enter()
	defer b.r.leave()
	switch v := v.(type) {
	case nil:
		b.addString("None")
	case bool:
		if v {
			b.addString("True")
		} else {
			b.addString("False")
		}
	case int, *big.Int:
		b.addString(formatInt(v))
	case float64:
		b.addString(formatFloat(v))
	case Text:
		if v.markup {
			b.addString("Markup(")
			defer b.addString(")")
		}
		at := len(b.b)
		b.addString(quote(v.s))
		if v.client != nil {
			b.mark(at, len(b.b))
		}
	case *undefined:
		b.addString("Undefined")
	case *List:
		b.sequence("[", v.Items, "]")
	case Tuple:
		if len(v) == 1 {
			b.sequence("(", v, ",)")
		} else {
			b.sequence("(", v, ")")
		}
	case *group:
		b.sequence("(", []Value{v.grouper, v.list}, ")")
	case *Dict:
		b.addString("{")
		for i, key := range v.keys {
			if i > 0 {
				b.addString(", ")
			}
			b.repr(key)
			b.addString(": ")
			b.repr(v.values[i])
		}
		b.addString("}")
	case *view:
		b.addString("dict_" + v.kind + "(")
		b.sequence("[", b.r.collect(v), "]")
		b.addString(")")
	case *rangeValue:
		s := fmt.Sprintf("range(%d, %d", v.start, v.stop)
		if v.step != 1 {
			s += fmt.Sprintf(", %d", v.step)
		}
		b.addString(s + ")")
	case *namespace:
		b.addString("<Namespace ")
		b.repr(v.attrs)
		b.addString(">")
	case *macro:
		b.addString("<Macro " + quote(v.node.name) + ">")
	case *loop:
		b.addString(fmt.Sprintf("<LoopContext %d/%d>", v.index+1, v.length()))
	default:
		b.addString("<" + typeName(v) + " object>")
	}
}

func (b *builder) sequence(open string, items []Value, end string) {
	b.addString(open)
	for i, item := range items {
		if i > 0 {
			b.addString(", ")
		}
		b.repr(item)
	}
	b.addString(end)
}

// quote is repr of a string.
func quote(s string) string {
	mark := byte('\'')
	if strings.IndexByte(s, '\'') >= 0 && strings.IndexByte(s, '"') < 0 {
		mark = '"'
	}
	b := make([]byte, 0, len(s)+2)
	b = append(b, mark)
	for _, c := range s {
		switch {
		case c == rune(mark) || c == '\\':
			b = append(b, '\\', byte(c))
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c < ' ' || c == 0x7f || c > 0x7f && !printable(c):
			b = appendEscape(b, c)
		default:
			b = utf8.AppendRune(b, c)
		}
	}
	return string(append(b, mark))
}

// appendEscape writes \xhh, \uhhhh or \Uhhhhhhhh.
func appendEscape(b []byte, c rune) []byte {
	switch {
	case c < 0x100:
		return fmt.Appendf(b, `\x%02x`, c)
	case c < 0x10000:
		return fmt.Appendf(b, `\u%04x`, c)
	}
	return fmt.Appendf(b, `\U%08x`, c)
}

// printable is str.isprintable of a character.
func printable(c rune) bool {
	return c == ' ' || unicode.IsPrint(c)
}

// jsonStyle are the parameters of json.dumps.
type jsonStyle struct {
	ascii, sortKeys bool
	indent          *string // nil: one line
	item, key       string  // separators behind an item and a key
}

// json writes a value as Python's json.dumps.
func (b *builder) json(v Value, s *jsonStyle, newline string) {
	b.r.step(1)
	b.r.enter()
	defer b.r.leave()
	inner := newline
	if s.indent != nil {
		inner += *s.indent
	}
	switch v := v.(type) {
	case Text:
		at := len(b.b)
		b.addString(jsonString(v.s, s.ascii))
		if v.client != nil {
			b.mark(at, len(b.b))
		}
	case *List, Tuple, *group:
		list, _ := items(v)
		if len(list) == 0 {
			b.addString("[]")
			return
		}
		b.addString("[" + inner)
		for i, item := range list {
			if i > 0 {
				b.addString(s.item + inner)
			}
			b.json(item, s, inner)
		}
		b.addString(newline + "]")
	case *Dict:
		if v.Len() == 0 {
			b.addString("{}")
			return
		}
		order := make([]int, v.Len())
		for i := range order {
			order[i] = i
		}
		if s.sortKeys {
			sort.SliceStable(order, func(i, j int) bool { return b.r.order("<", v.keys[order[i]], v.keys[order[j]]) })
		}
		b.addString("{" + inner)
		for n, i := range order {
			if n > 0 {
				b.addString(s.item + inner)
			}
			key, ok := v.keys[i].(Text)
			if !ok {
				key = Text{s: jsonScalar(v.keys[i], "keys must be str, int, float, bool or None, not %s")}
			}
			b.json(key, s, "")
			b.addString(s.key)
			b.json(v.values[i], s, inner)
		}
		b.addString(newline + "}")
	default:
		b.addString(jsonScalar(v, "Object of type %s is not JSON serializable"))
	}
}

func jsonScalar(v Value, otherwise string) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case int, *big.Int:
		return formatInt(v)
	case float64:
		switch {
		case math.IsNaN(v):
			return "NaN"
		case math.IsInf(v, 0):
			return strings.Replace(formatFloat(v), "inf", "Infinity", 1)
		}
		return formatFloat(v)
	}
	raise(otherwise, typeName(v))
	return ""
}

func jsonString(s string, asciiOnly bool) string {
	b := append(make([]byte, 0, len(s)+2), '"')
	for i := 0; i < len(s); {
		c, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', byte(c))
		case c < ' ':
			if j := strings.IndexByte("\b\t\n\f\r", byte(c)); j >= 0 {
				b = append(b, '\\', "btnfr"[j])
			} else {
				b = fmt.Appendf(b, `\u%04x`, c)
			}
		case asciiOnly && c > 0xffff:
			c -= 0x10000
			b = fmt.Appendf(b, `\u%04x\u%04x`, 0xd800+c>>10, 0xdc00+c&0x3ff)
		case asciiOnly && c >= 0x7f:
			b = fmt.Appendf(b, `\u%04x`, c)
		default:
			b = append(b, s[i:i+size]...)
		}
		i += size
	}
	return string(append(b, '"'))
}
