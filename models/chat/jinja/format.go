package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxWidth bounds widths and precisions of one field.
const maxWidth = 1 << 16

// field is one conversion of a format: what the format specifications of % and of str.format have in common.
type field struct {
	fill      string
	align     byte // < > = ^; 0: by type
	sign      byte // + - or space; 0: none
	alternate bool // #
	zero      bool // 0 before the width
	group     byte // , or _; 0: none
	width     int
	precision int // -1: none
	verb      byte
}

// percent is t % v.
func (r *run) percent(t Text, v Value) Value {
	list, isTuple := v.(Tuple)
	if !isTuple {
		list = Tuple{v}
	}
	mapping := false
	switch v.(type) {
	case *Dict, *List, *undefined, *rangeValue:
		mapping = true
	}
	used := 0
	next := func() Value {
		if used >= len(list) {
			raise("not enough arguments for format string")
		}
		used++
		return list[used-1]
	}
	out := builder{r: r}
	for at := 0; ; {
		i := strings.IndexByte(t.s[at:], '%')
		if i < 0 {
			out.add(t.slice(at, len(t.s)))
			break
		}
		out.add(t.slice(at, at+i))
		at += i + 1
		f := field{fill: " ", precision: -1, sign: '-'}
		var key Value
		if strings.HasPrefix(t.s[at:], "(") {
			start, depth := at+1, 1
			for at++; at < len(t.s) && depth > 0; at++ {
				switch t.s[at] {
				case '(':
					depth++
				case ')':
					depth--
				}
			}
			if depth > 0 {
				raise("incomplete format key")
			}
			if _, ok := v.(*Dict); !ok {
				raise("format requires a mapping")
			}
			key = t.slice(start, at-1)
		}
		for ; at < len(t.s) && strings.IndexByte("-+ #0", t.s[at]) >= 0; at++ {
			switch c := t.s[at]; c {
			case '-':
				f.align = '<'
			case '#':
				f.alternate = true
			case '0':
				f.zero = true
			default:
				if f.sign != '+' {
					f.sign = c
				}
			}
		}
		at = f.size(t.s, at, &f.width, next)
		if at < len(t.s) && t.s[at] == '.' {
			f.precision = 0
			at = f.size(t.s, at+1, &f.precision, next)
		}
		for at < len(t.s) && strings.IndexByte("hlL", t.s[at]) >= 0 {
			at++
		}
		if at >= len(t.s) {
			raise("incomplete format")
		}
		f.verb = t.s[at]
		at++
		if f.verb == '%' {
			out.addString("%")
			continue
		}
		var arg Value
		if key != nil {
			value, ok := v.(*Dict).get(key)
			if !ok {
				raise("KeyError: %s", quote(key.(Text).s))
			}
			arg = value
		} else {
			arg = next()
		}
		out.add(r.percentField(&f, arg, t.markup))
	}
	if used < len(list) && !mapping {
		raise("not all arguments converted during string formatting")
	}
	text := out.text()
	text.markup = t.markup
	return text
}

// size reads a width or a precision: a number, or * for the next argument.
func (f *field) size(s string, at int, n *int, next func() Value) int {
	if at < len(s) && s[at] == '*' {
		i, ok := integer(next())
		if !ok {
			raise("* wants int")
		}
		if i < 0 {
			f.align, i = '<', -i
		}
		*n = i
		at++
	}
	for ; at < len(s) && isDigit(s[at]); at++ {
		*n = min(*n*10+int(s[at]-'0'), math.MaxInt32)
	}
	if *n > maxWidth {
		limit("a width of more than %d characters", maxWidth)
	}
	return at
}

func (r *run) percentField(f *field, v Value, markup bool) Text {
	if f.align == 0 {
		f.align = '>'
	}
	if f.zero && f.align != '<' && strings.IndexByte("sra", f.verb) < 0 {
		f.fill, f.align = "0", '='
	}
	var body Text
	switch f.verb {
	case 's':
		body = r.str(v)
	case 'r', 'a':
		body = r.repr(v)
		if f.verb == 'a' {
			body = body.made(escapeNonASCII(body.s))
		}
	case 'c':
		if t, ok := v.(Text); ok && utf8.RuneCountInString(t.s) == 1 {
			body = t
		} else if i, ok := integer(v); ok && 0 <= i && i <= utf8.MaxRune {
			body = Text{s: string(rune(i))}
		} else {
			raise("%%c requires int or char")
		}
	case 'd', 'i', 'u', 'x', 'X', 'o':
		if !isNumber(v) {
			failIfUndefined(v)
			raise("%%%c format: a real number is required, not %s", f.verb, typeName(v))
		}
		if x, ok := v.(float64); ok {
			if strings.IndexByte("diu", f.verb) < 0 {
				raise("%%%c format: an integer is required, not float", f.verb)
			}
			v = truncate(x)
		}
		if f.verb == 'i' || f.verb == 'u' {
			f.verb = 'd'
		}
		return Text{s: f.integer(v)}
	case 'e', 'E', 'f', 'F', 'g', 'G':
		if !isNumber(v) {
			failIfUndefined(v)
			raise("must be real number, not %s", typeName(v))
		}
		if f.precision < 0 {
			f.precision = 6
		}
		return Text{s: f.float(float(v))}
	default:
		raise("unsupported format character '%c' (0x%x)", f.verb, f.verb)
	}
	if markup {
		body = r.escape(body).plain()
	}
	if f.precision >= 0 && f.verb != 'c' {
		body = firstRunes(body, f.precision)
	}
	return r.pad(body, f.width, " ", f.align)
}

// firstRunes returns the first n characters.
func firstRunes(t Text, n int) Text {
	return t.slice(0, byteOffset(t.s, n))
}

// pad fills a text up to a width with characters on the sides that align leaves.
func (r *run) pad(t Text, width int, fill string, align byte) Text {
	n := width - utf8.RuneCountInString(t.s)
	if n <= 0 {
		return t
	}
	r.room(len(fill), n)
	left := n
	switch align {
	case '<':
		left = 0
	case '^':
		left = n / 2
	}
	b := builder{r: r}
	b.addString(strings.Repeat(fill, left))
	b.add(t)
	b.addString(strings.Repeat(fill, n-left))
	return b.text()
}

// truncate is int(x).
func truncate(x float64) Value {
	if math.IsNaN(x) {
		raise("cannot convert float NaN to integer")
	}
	if math.IsInf(x, 0) {
		raise("cannot convert float infinity to integer")
	}
	i, _ := new(big.Float).SetFloat64(x).Int(nil)
	return small(i)
}

// number puts sign, prefix and digits into the width.
func (f *field) number(negative bool, prefix, digits string) string {
	sign := ""
	switch {
	case negative:
		sign = "-"
	case f.sign == '+' || f.sign == ' ':
		sign = string(f.sign)
	}
	whole, size := len(digits), 3
	if strings.IndexByte("xXob", f.verb) >= 0 && f.verb != 0 {
		size = 4
	} else if i := strings.IndexAny(digits, ".e%ni"); i >= 0 {
		whole = i
	}
	if f.group != 0 {
		if f.align == '=' && f.fill == "0" {
			// Zeros are grouped, too.
			for n := whole; ; n++ {
				total := len(sign) + len(prefix) + n + (n-1)/size + len(digits) - whole
				if total >= f.width {
					digits = strings.Repeat("0", n-whole) + digits
					whole = n
					break
				}
			}
		}
		for i := whole - size; i > 0; i -= size {
			digits = digits[:i] + string(f.group) + digits[i:]
		}
	}
	n := f.width - len(sign) - len(prefix) - utf8.RuneCountInString(digits)
	if n <= 0 {
		return sign + prefix + digits
	}
	left, right := "", ""
	switch f.align {
	case '=':
		return sign + prefix + strings.Repeat(f.fill, n) + digits
	case '<':
		right = strings.Repeat(f.fill, n)
	case '^':
		left, right = strings.Repeat(f.fill, n/2), strings.Repeat(f.fill, n-n/2)
	default:
		left = strings.Repeat(f.fill, n)
	}
	return left + sign + prefix + digits + right
}

// integer formats an int by the verbs d x X o b.
func (f *field) integer(v Value) string {
	b := bigInt(v)
	base, prefix := 10, ""
	switch f.verb {
	case 'x', 'X':
		base, prefix = 16, "0"+string(f.verb)
	case 'o':
		base, prefix = 8, "0o"
	case 'b':
		base, prefix = 2, "0b"
	}
	if !f.alternate {
		prefix = ""
	}
	if base == 10 {
		formatInt(v) // raises where it is too long
	}
	digits := new(big.Int).Abs(b).Text(base)
	if f.verb == 'X' {
		digits = strings.ToUpper(digits)
	}
	if n := f.precision - len(digits); n > 0 {
		digits = strings.Repeat("0", n) + digits
	}
	return f.number(b.Sign() < 0, prefix, digits)
}

// float formats a float by the verbs e E f F g G %, and by 0 for general with a point or an exponent.
func (f *field) float(x float64) string {
	negative := math.Signbit(x) && !math.IsNaN(x)
	digits := ""
	switch abs := math.Abs(x); {
	case math.IsNaN(x) || math.IsInf(x, 0) || f.precision < 0:
		digits = formatFloat(abs)
	case f.verb == '%':
		digits = strconv.FormatFloat(abs*100, 'f', f.precision, 64)
	case f.verb == 'g' || f.verb == 'G' || f.verb == 0:
		digits = general(abs, f.precision, f.alternate, f.verb == 0)
	default:
		digits = strconv.FormatFloat(abs, f.verb|0x20, f.precision, 64)
	}
	if f.alternate && !strings.ContainsAny(digits, ".ni") { // a point all the same
		i := strings.IndexByte(digits+"e", 'e')
		digits = digits[:i] + "." + digits[i:]
	}
	if f.verb == '%' {
		digits += "%"
	}
	s := f.number(negative, "", digits)
	if f.verb == 'E' || f.verb == 'F' || f.verb == 'G' {
		s = strings.ToUpper(s)
	}
	return s
}

// general is C's %g. With point it has an exponent or a point in any case, as str of a float.
func general(x float64, precision int, alternate, point bool) string {
	precision = max(precision, 1)
	s := strconv.FormatFloat(x, 'e', precision-1, 64)
	i := strings.IndexByte(s, 'e')
	exp, _ := strconv.Atoi(s[i+1:])
	mantissa, tail, fixed := s[:i], s[i:], precision
	if point {
		fixed--
	}
	if -4 <= exp && exp < fixed {
		mantissa, tail = strconv.FormatFloat(x, 'f', precision-1-exp, 64), ""
	}
	if !alternate && strings.Contains(mantissa, ".") {
		mantissa = strings.TrimRight(strings.TrimRight(mantissa, "0"), ".")
	}
	if point && tail == "" && !strings.Contains(mantissa, ".") {
		mantissa += ".0"
	}
	return mantissa + tail
}

// format is str.format(*args, **kwargs).
func (r *run) format(t Text, a *args) Text {
	auto := 0
	out := r.formatWith(t, a, &auto, 2)
	out.markup = t.markup
	return out
}

func (r *run) formatWith(t Text, a *args, auto *int, depth int) Text {
	if depth == 0 {
		raise("Max string recursion exceeded")
	}
	out := builder{r: r}
	s := t.s
	for at := 0; at < len(s); {
		i := strings.IndexAny(s[at:], "{}")
		if i < 0 {
			out.add(t.slice(at, len(s)))
			break
		}
		out.add(t.slice(at, at+i))
		at += i
		if at+1 < len(s) && s[at+1] == s[at] {
			out.addString(s[at : at+1])
			at += 2
			continue
		}
		if s[at] == '}' {
			raise("Single '}' encountered in format string")
		}
		end, nested := at+1, 1
		for ; end < len(s); end++ {
			if s[end] == '{' {
				nested++
			} else if s[end] == '}' {
				if nested--; nested == 0 {
					break
				}
			}
		}
		if end >= len(s) {
			if at+1 == len(s) {
				raise("Single '{' encountered in format string")
			}
			raise("expected '}' before end of string")
		}
		name, spec, conversion := t.slice(at+1, end), Text{}, ""
		if j := strings.IndexAny(name.s, ":!"); j >= 0 {
			name, spec = name.slice(0, j), name.slice(j, len(name.s))
		}
		v := r.formatValue(name.s, a, auto)
		if strings.HasPrefix(spec.s, "!") {
			if len(spec.s) < 2 || len(spec.s) > 2 && spec.s[2] != ':' {
				raise("expected ':' after conversion specifier")
			}
			conversion, spec = spec.s[1:2], spec.slice(2, len(spec.s))
		}
		if spec.s != "" {
			spec = r.formatWith(spec.slice(1, len(spec.s)), a, auto, depth-1)
		}
		at = end + 1
		switch conversion {
		case "":
		case "s":
			v = r.str(v)
		case "r":
			v = r.repr(v)
		case "a":
			q := r.repr(v)
			v = q.made(escapeNonASCII(q.s))
		default:
			raise("Unknown conversion specifier %s", conversion)
		}
		body := r.formatField(v, spec.s)
		if t.markup {
			body = r.escape(body).plain()
		}
		out.add(body)
	}
	return out.text()
}

// formatValue finds the value of a replacement field such as 0.name[key].
func (r *run) formatValue(name string, a *args, auto *int) Value {
	first, rest := name, ""
	if i := strings.IndexAny(name, ".["); i >= 0 {
		first, rest = name[:i], name[i:]
	}
	var v Value
	i, err := strconv.Atoi(first)
	switch {
	case first == "" || err == nil && isDigit(first[0]):
		if first == "" {
			if *auto < 0 {
				raise("cannot switch from manual field specification to automatic field numbering")
			}
			i = *auto
			*auto++
		} else {
			if *auto > 0 {
				raise("cannot switch from automatic field numbering to manual field specification")
			}
			*auto = -1
		}
		if i >= len(a.pos) {
			raise("Replacement index %d out of range for positional args tuple", i)
		}
		v = a.pos[i]
	default:
		var ok bool
		if v, ok = a.named(first); !ok {
			raise("KeyError: %s", quote(first))
		}
	}
	for rest != "" {
		if rest[0] == '.' {
			end := strings.IndexAny(rest[1:], ".[") + 1
			if end == 0 {
				end = len(rest)
			}
			if end == 1 {
				raise("Empty attribute in format string")
			}
			v, rest = r.attribute(v, rest[1:end]), rest[end:]
			continue
		}
		end := strings.IndexByte(rest, ']')
		if rest[0] != '[' || end < 0 {
			raise("Missing ']' in format string")
		}
		if end == 1 {
			raise("Empty attribute in format string")
		}
		var key Value = Text{s: rest[1:end]}
		if n, err := strconv.Atoi(rest[1:end]); err == nil && isDigit(rest[1]) {
			key = n
		}
		v, rest = r.item(v, key), rest[end+1:]
	}
	return v
}

// formatField is format(v, spec).
func (r *run) formatField(v Value, spec string) Text {
	if spec == "" {
		return r.str(v)
	}
	f := parseSpec(spec)
	switch x := v.(type) {
	case Text:
		if f.zero && f.align == '=' {
			f.align = '<'
		}
		if f.sign != 0 || f.group != 0 || f.alternate || f.align == '=' || f.verb != 0 && f.verb != 's' {
			raise("Unknown format code '%c' for object of type 'str'", f.verb)
		}
		if f.precision >= 0 {
			x = firstRunes(x, f.precision)
		}
		if f.align == 0 {
			f.align = '<'
		}
		return r.pad(x, f.width, f.fill, f.align)
	case float64:
		return Text{s: f.formatFloat(x)}
	case bool, int, *big.Int:
		switch f.verb {
		case 0, 'n', 'd', 'x', 'X', 'o', 'b':
			if f.precision >= 0 {
				raise("Precision not allowed in integer format specifier")
			}
			if f.verb == 0 || f.verb == 'n' {
				f.verb = 'd'
			}
			return Text{s: f.integer(v)}
		case 'c':
			if f.sign != 0 || f.precision >= 0 || f.alternate {
				raise("Sign not allowed with integer format specifier 'c'")
			}
			i, _ := integer(v)
			if i < 0 || i > utf8.MaxRune {
				raise("%%c arg not in range(0x110000)")
			}
			if f.align == 0 || f.align == '=' {
				f.align = '>'
			}
			return r.pad(Text{s: string(rune(i))}, f.width, f.fill, f.align)
		case 'e', 'E', 'f', 'F', 'g', 'G', '%':
			return Text{s: f.formatFloat(float(v))}
		}
		raise("Unknown format code '%c' for object of type 'int'", f.verb)
	}
	raise("unsupported format string passed to %s.__format__", typeName(v))
	return Text{}
}

// formatFloat formats a float by a verb of str.format.
func (f *field) formatFloat(x float64) string {
	switch f.verb {
	case 0:
	case 'n', 'e', 'E', 'f', 'F', 'g', 'G', '%':
		if f.verb == 'n' {
			f.verb = 'g'
		}
		if f.precision < 0 {
			f.precision = 6
		}
	default:
		raise("Unknown format code '%c' for object of type 'float'", f.verb)
	}
	return f.float(x)
}

// parseSpec reads a specification of str.format: [[fill]align][sign][#][0][width][grouping][.precision][type].
func parseSpec(spec string) field {
	f := field{fill: " ", precision: -1}
	_, size := utf8.DecodeRuneInString(spec)
	rest, filled := spec, false
	switch {
	case len(spec) > size && strings.IndexByte("<>=^", spec[size]) >= 0:
		f.fill, f.align, rest, filled = spec[:size], spec[size], spec[size+1:], true
	case strings.IndexByte("<>=^", spec[0]) >= 0:
		f.align, rest = spec[0], spec[1:]
	}
	take := func(set string) byte {
		if rest != "" && strings.IndexByte(set, rest[0]) >= 0 {
			c := rest[0]
			rest = rest[1:]
			return c
		}
		return 0
	}
	number := func(n *int) {
		end := 0
		for end < len(rest) && isDigit(rest[end]) {
			end++
		}
		if end > 0 {
			*n, _ = strconv.Atoi(rest[:end])
			if *n > maxWidth || end > 9 {
				limit("a width of more than %d characters", maxWidth)
			}
		}
		rest = rest[end:]
	}
	f.sign = take("+- ")
	f.alternate = take("#") != 0
	if !filled && take("0") != 0 {
		f.fill = "0"
		if f.align == 0 {
			f.zero, f.align = true, '='
		}
	}
	number(&f.width)
	f.group = take(",_")
	if take(".") != 0 {
		number(&f.precision)
		if f.precision < 0 {
			raise("Format specifier missing precision")
		}
	}
	if len(rest) > 1 {
		raise("Invalid format specifier")
	}
	if rest != "" {
		f.verb = rest[0]
	}
	if f.group == ',' && strings.IndexByte("sncxXob", f.verb) >= 0 || f.group == '_' && strings.IndexByte("snc", f.verb) >= 0 {
		raise("Cannot specify '%c' with '%c'.", f.group, f.verb)
	}
	return f
}

// escapeNonASCII is the difference between ascii and repr.
func escapeNonASCII(s string) string {
	b := make([]byte, 0, len(s))
	for _, c := range s {
		if c < utf8.RuneSelf {
			b = append(b, byte(c))
		} else {
			b = appendEscape(b, c)
		}
	}
	return string(b)
}
