package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// stringMethods are the methods of str that templates may call.
var stringMethods = table(map[string]entry[Text]{
	"capitalize": {"/", func(r *run, t Text, _ []Value) Value { return r.capitalize(t) }},
	"casefold":   {"/", func(r *run, t Text, _ []Value) Value { return r.remake(t, cases.Fold().String(t.s)) }},
	"center": {"/ width fillchar?", func(r *run, t Text, a []Value) Value {
		// CPython's center, which puts the odd one on the left of an even width.
		width, fill := padding(a)
		n := width - utf8.RuneCountInString(t.s)
		if n <= 0 {
			return t
		}
		left := n/2 + n&width&1
		return r.pad(r.pad(t, width-(n-left), fill, '>'), width, fill, '<')
	}},
	"count": {"/ sub start? end?", func(r *run, t Text, a []Value) Value {
		sub := text(a[0])
		part, _, ok := between(t, a[1], a[2])
		if !ok {
			return 0
		}
		return strings.Count(part.s, sub.s)
	}},
	"endswith": {"/ suffix start? end?", func(r *run, t Text, a []Value) Value {
		part, _, ok := between(t, a[1], a[2])
		return anyOf(a[0], func(s string) bool { return ok && strings.HasSuffix(part.s, s) }, "endswith")
	}},
	"expandtabs": {"tabsize?", func(r *run, t Text, a []Value) Value { return r.expandTabs(t, intOr(a[0], 8)) }},
	"find":       {"/ sub start? end?", func(r *run, t Text, a []Value) Value { return index(t, a, strings.Index) }},
	"format":     {"*", nil}, // format and format_map need their arguments as they are
	"format_map": {"*", nil},
	"index":      {"/ sub start? end?", func(r *run, t Text, a []Value) Value { return mustIndex(index(t, a, strings.Index)) }},
	"isalnum": {"/", func(_ *run, t Text, _ []Value) Value {
		return all(t.s, func(c rune) bool { return unicode.IsLetter(c) || unicode.IsNumber(c) })
	}},
	"isalpha": {"/", func(_ *run, t Text, _ []Value) Value { return all(t.s, unicode.IsLetter) }},
	"isascii": {"/", func(_ *run, t Text, _ []Value) Value { return ascii(t.s) }},
	"isdecimal": {"/", func(_ *run, t Text, _ []Value) Value {
		return all(t.s, func(c rune) bool { return unicode.Is(unicode.Nd, c) })
	}},
	"isdigit": {"/", func(_ *run, t Text, _ []Value) Value { return all(t.s, isUnicodeDigit) }},
	"isidentifier": {"/", func(_ *run, t Text, _ []Value) Value {
		first, _ := utf8.DecodeRuneInString(t.s)
		return t.s != "" && (first == '_' || unicode.IsLetter(first)) && all(t.s, isWord)
	}},
	"islower":     {"/", func(_ *run, t Text, _ []Value) Value { return cased(t.s, unicode.IsLower, isUpper) }},
	"isnumeric":   {"/", func(_ *run, t Text, _ []Value) Value { return all(t.s, unicode.IsNumber) }},
	"isprintable": {"/", func(_ *run, t Text, _ []Value) Value { return t.s == "" || all(t.s, printable) }},
	"isspace":     {"/", func(_ *run, t Text, _ []Value) Value { return all(t.s, isSpace) }},
	"istitle":     {"/", func(_ *run, t Text, _ []Value) Value { return isTitle(t.s) }},
	"isupper":     {"/", func(_ *run, t Text, _ []Value) Value { return cased(t.s, isUpper, unicode.IsLower) }},
	"join": {"/ iterable", func(r *run, t Text, a []Value) Value {
		var texts []Text
		for i, item := range r.collect(a[0]) {
			s, ok := item.(Text)
			if !ok && !t.markup {
				raise("sequence item %d: expected str instance, %s found", i, typeName(item))
			}
			if t.markup {
				s = r.escape(r.str(item)).plain()
			}
			texts = append(texts, s)
		}
		out := r.join(t.plain(), texts)
		out.markup = t.markup
		return out
	}},
	"ljust": {"/ width fillchar?", func(r *run, t Text, a []Value) Value {
		width, fill := padding(a)
		return r.padded(t, width, fill, '<')
	}},
	"lower":     {"/", func(r *run, t Text, _ []Value) Value { return r.lower(t) }},
	"lstrip":    {"/ chars?", func(_ *run, t Text, a []Value) Value { return strip(t, a[0], true, false) }},
	"partition": {"/ sep", func(_ *run, t Text, a []Value) Value { return partition(t, a[0], strings.Index) }},
	"removeprefix": {"/ prefix", func(_ *run, t Text, a []Value) Value {
		return t.slice(len(t.s)-len(strings.TrimPrefix(t.s, text(a[0]).s)), len(t.s))
	}},
	"removesuffix": {"/ suffix", func(_ *run, t Text, a []Value) Value { return t.slice(0, len(strings.TrimSuffix(t.s, text(a[0]).s))) }},
	"replace": {"/ old new count?", func(r *run, t Text, a []Value) Value {
		to := text(a[1])
		if t.markup {
			to = r.escape(to).plain()
		}
		return r.replace(t, text(a[0]).s, to, intOr(a[2], -1))
	}},
	"rfind":  {"/ sub start? end?", func(r *run, t Text, a []Value) Value { return index(t, a, strings.LastIndex) }},
	"rindex": {"/ sub start? end?", func(r *run, t Text, a []Value) Value { return mustIndex(index(t, a, strings.LastIndex)) }},
	"rjust": {"/ width fillchar?", func(r *run, t Text, a []Value) Value {
		width, fill := padding(a)
		return r.padded(t, width, fill, '>')
	}},
	"rpartition": {"/ sep", func(_ *run, t Text, a []Value) Value {
		p := partition(t, a[0], strings.LastIndex).(Tuple)
		if p[1].(Text).s == "" {
			p[0], p[2] = p[2], p[0]
		}
		return p
	}},
	"rsplit": {"sep? maxsplit?", func(r *run, t Text, a []Value) Value { return r.split(t, a, true) }},
	"rstrip": {"/ chars?", func(_ *run, t Text, a []Value) Value { return strip(t, a[0], false, true) }},
	"split":  {"sep? maxsplit?", func(r *run, t Text, a []Value) Value { return r.split(t, a, false) }},
	"splitlines": {"keepends?", func(r *run, t Text, a []Value) Value {
		return r.texts(r.splitLines(t, intOr(a[0], 0) != 0))
	}},
	"startswith": {"/ prefix start? end?", func(r *run, t Text, a []Value) Value {
		part, _, ok := between(t, a[1], a[2])
		return anyOf(a[0], func(s string) bool { return ok && strings.HasPrefix(part.s, s) }, "startswith")
	}},
	"strip": {"/ chars?", func(_ *run, t Text, a []Value) Value { return strip(t, a[0], true, true) }},
	"swapcase": {"/", func(r *run, t Text, _ []Value) Value {
		return r.remake(t, mapRunes(t.s, func(i int, c rune) string {
			switch {
			case isUpper(c):
				return lowerAt(t.s, i, c)
			case unicode.IsLower(c):
				return upper(string(c))
			}
			return string(c)
		}))
	}},
	"title": {"/", func(r *run, t Text, _ []Value) Value {
		inside := false
		return r.remake(t, mapRunes(t.s, func(i int, c rune) string {
			out := string(c)
			switch isCased := isUpper(c) || unicode.IsLower(c) || unicode.IsTitle(c); {
			case isCased && inside:
				out = lowerAt(t.s, i, c)
			case isCased:
				out, inside = titled(c), true
			default:
				inside = false
			}
			return out
		}))
	}},
	"upper": {"/", func(r *run, t Text, _ []Value) Value { return r.upper(t) }},
	"zfill": {"/ width", func(r *run, t Text, a []Value) Value {
		sign := 0
		if t.s != "" && (t.s[0] == '-' || t.s[0] == '+') {
			sign = 1
		}
		digits := r.pad(t.slice(sign, len(t.s)), intArg(a[0])-sign, "0", '>')
		return r.concat(t.slice(0, sign), digits)
	}},
})

// text returns a str argument.
func text(v Value) Text {
	t, ok := v.(Text)
	if !ok {
		raise("must be str, not %s", typeName(v))
	}
	return t
}

// intArg returns an int argument.
func intArg(v Value) int {
	i, ok := integer(v)
	if !ok {
		failIfUndefined(v)
		raise("'%s' object cannot be interpreted as an integer", typeName(v))
	}
	return i
}

func intOr(v Value, otherwise int) int {
	if v == missing {
		return otherwise
	}
	return intArg(v)
}

// remake is a text computed from t.
func (r *run) remake(t Text, s string) Text {
	r.made(len(s))
	return t.made(s)
}

func (r *run) texts(list []Text) *List {
	values := make([]Value, len(list))
	for i, t := range list {
		values[i] = t
	}
	return r.list(values)
}

func (r *run) padded(t Text, width int, fill string, align byte) Text {
	out := r.pad(t, width, fill, align)
	out.markup = t.markup
	return out
}

func padding(a []Value) (width int, fill string) {
	if a[1] == missing {
		return intArg(a[0]), " "
	}
	fill = text(a[1]).s
	if utf8.RuneCountInString(fill) != 1 {
		raise("The fill character must be exactly one character long")
	}
	return intArg(a[0]), fill
}

// between returns t[start:end], and the offset of its start in characters; ok is false if start is behind the end.
func between(t Text, start, end Value) (part Text, offset int, ok bool) {
	if start == missing && end == missing {
		return t, 0, true
	}
	n := utf8.RuneCountInString(t.s)
	bound := func(v Value, otherwise int) int {
		if v == missing || v == nil {
			return otherwise
		}
		i := intArg(v)
		if i < 0 {
			i = max(i+n, 0)
		}
		return i
	}
	from, to := bound(start, 0), min(bound(end, n), n)
	if from > to {
		return t, 0, false
	}
	return t.slice(byteOffset(t.s, from), byteOffset(t.s, to)), from, true
}

// index is find and rfind, in characters.
func index(t Text, a []Value, find func(s, sub string) int) int {
	sub := text(a[0])
	part, offset, ok := between(t, a[1], a[2])
	if !ok {
		return -1
	}
	i := find(part.s, sub.s)
	if i < 0 {
		return -1
	}
	return offset + utf8.RuneCountInString(part.s[:i])
}

func mustIndex(i int) Value {
	if i < 0 {
		raise("substring not found")
	}
	return i
}

// anyOf asks of a string, or of a tuple of them.
func anyOf(v Value, has func(string) bool, name string) bool {
	list, ok := v.(Tuple)
	if !ok {
		if _, ok := v.(Text); !ok {
			raise("%s first arg must be str or a tuple of str, not %s", name, typeName(v))
		}
		list = Tuple{v}
	}
	for _, item := range list {
		t, ok := item.(Text)
		if !ok {
			raise("tuple for %s must only contain str, not %s", name, typeName(item))
		}
		if has(t.s) {
			return true
		}
	}
	return false
}

// strip cuts white space, or the characters of chars.
func strip(t Text, chars Value, left, right bool) Value {
	cut := isSpace
	switch c := chars.(type) {
	case Text:
		cut = func(r rune) bool { return strings.ContainsRune(c.s, r) }
	default:
		if chars != missing && chars != nil {
			raise("strip arg must be None or str")
		}
	}
	return t.trim(cut, left, right)
}

func partition(t Text, sep Value, find func(s, sub string) int) Value {
	by := text(sep)
	if by.s == "" {
		raise("empty separator")
	}
	i := find(t.s, by.s)
	if i < 0 {
		return Tuple{t, Text{markup: t.markup}, Text{markup: t.markup}}
	}
	return Tuple{t.slice(0, i), t.slice(i, i+len(by.s)), t.slice(i+len(by.s), len(t.s))}
}

// split is str.split, and str.rsplit from the right.
func (r *run) split(t Text, a []Value, right bool) Value {
	limit := intOr(a[1], -1)
	var parts []Text
	if a[0] != missing && a[0] != nil {
		sep := text(a[0]).s
		if sep == "" {
			raise("empty separator")
		}
		for limit != 0 {
			i := strings.Index(t.s, sep)
			if right {
				i = strings.LastIndex(t.s, sep)
			}
			if i < 0 {
				break
			}
			before, after := t.slice(0, i), t.slice(i+len(sep), len(t.s))
			if right {
				before, after = after, before
			}
			parts, t = append(parts, before), after
			r.made(textBytes)
			r.step(1)
			limit--
		}
		parts = append(parts, t)
	} else {
		for t = t.trim(isSpace, !right, right); t.s != ""; t = t.trim(isSpace, !right, right) {
			i := -1
			switch {
			case limit == 0:
			case right:
				i = strings.LastIndexFunc(t.s, isSpace)
			default:
				i = strings.IndexFunc(t.s, isSpace)
			}
			if i < 0 {
				parts = append(parts, t)
				break
			}
			if right {
				_, size := utf8.DecodeRuneInString(t.s[i:])
				parts, t = append(parts, t.slice(i+size, len(t.s))), t.slice(0, i)
			} else {
				parts, t = append(parts, t.slice(0, i)), t.slice(i, len(t.s))
			}
			r.made(textBytes)
			r.step(1)
			limit--
		}
	}
	if right {
		for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
			parts[i], parts[j] = parts[j], parts[i]
		}
	}
	return r.texts(parts)
}

func (r *run) expandTabs(t Text, size int) Text {
	if size > maxWidth {
		limit("a width of more than %d characters", maxWidth)
	}
	b := builder{r: r}
	column := 0
	for i, c := range t.s {
		switch c {
		case '\t':
			if size > 0 {
				n := size - column%size
				b.addString(strings.Repeat(" ", n))
				column += n
			}
			continue
		case '\n', '\r':
			column = -1
		}
		b.add(t.slice(i, i+utf8.RuneLen(c)))
		column++
	}
	out := b.text()
	out.markup = t.markup
	return out
}

func (r *run) upper(t Text) Text { return r.remake(t, upper(t.s)) }
func (r *run) lower(t Text) Text { return r.remake(t, lower(t.s)) }

// capitalize puts the first character in title case, and the others in lower case.
func (r *run) capitalize(t Text) Text {
	if t.s == "" {
		return t
	}
	c, size := utf8.DecodeRuneInString(t.s)
	return r.remake(t, titled(c)+lower(t.s[size:]))
}

// upper and lower map by Unicode's full case mappings, as Python does.
func upper(s string) string {
	if ascii(s) {
		return strings.ToUpper(s)
	}
	return cases.Upper(language.Und).String(s)
}

func lower(s string) string {
	if ascii(s) {
		return strings.ToLower(s)
	}
	return cases.Lower(language.Und, cases.HandleFinalSigma(true)).String(s)
}

func titled(c rune) string {
	if c < utf8.RuneSelf {
		return strings.ToUpper(string(c))
	}
	return cases.Title(language.Und).String(string(c))
}

// lowerAt is the lower case of the character at a byte offset. That of a sigma depends on what is around it.
func lowerAt(s string, at int, c rune) string {
	if c != 'Σ' {
		return lower(string(c))
	}
	letter := func(c rune) bool { return isUpper(c) || unicode.IsLower(c) || unicode.IsTitle(c) }
	ignored := func(c rune) bool {
		return unicode.In(c, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune("'.:·’", c)
	}
	before, _ := utf8.DecodeLastRuneInString(strings.TrimRightFunc(s[:at], ignored))
	behind, _ := utf8.DecodeRuneInString(strings.TrimLeftFunc(s[at+len("Σ"):], ignored))
	if letter(before) && !letter(behind) {
		return "ς"
	}
	return "σ"
}

func mapRunes(s string, f func(at int, c rune) string) string {
	var b strings.Builder
	for i, c := range s {
		b.WriteString(f(i, c))
	}
	return b.String()
}

func all(s string, is func(rune) bool) bool {
	return s != "" && strings.IndexFunc(s, func(c rune) bool { return !is(c) }) < 0
}

func isUpper(c rune) bool { return unicode.IsUpper(c) }

// isWord reports whether c matches \w.
func isWord(c rune) bool { return c == '_' || unicode.IsLetter(c) || unicode.IsNumber(c) }

// isUnicodeDigit is str.isdigit: decimal digits, and those in superscript and the like.
func isUnicodeDigit(c rune) bool {
	return unicode.Is(unicode.Nd, c) || strings.ContainsRune("²³¹", c) || 0x2070 <= c && c <= 0x2089 && unicode.IsNumber(c) ||
		0x2460 <= c && c <= 0x2468 || 0x2474 <= c && c <= 0x247c || 0x2488 <= c && c <= 0x2490
}

// cased reports whether a string has characters of one case and none of the other.
func cased(s string, is, isNot func(rune) bool) bool {
	found := false
	for _, c := range s {
		if isNot(c) || unicode.IsTitle(c) {
			return false
		}
		found = found || is(c)
	}
	return found
}

func isTitle(s string) bool {
	found, inside := false, false
	for _, c := range s {
		switch {
		case isUpper(c) || unicode.IsTitle(c):
			if inside {
				return false
			}
			found, inside = true, true
		case unicode.IsLower(c):
			if !inside {
				return false
			}
		default:
			inside = false
		}
	}
	return found
}

// decimals turns decimal digits of any script into those of ASCII.
func decimals(s string) string {
	if ascii(s) {
		return s
	}
	return strings.Map(func(c rune) rune {
		if c >= utf8.RuneSelf && unicode.Is(unicode.Nd, c) {
			zero := c
			for zero > c-9 && unicode.Is(unicode.Nd, zero-1) {
				zero--
			}
			return '0' + (c-zero)%10
		}
		return c
	}, s)
}
