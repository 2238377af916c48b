package jinja

import (
	"fmt"
	"math"
	"math/big"
	"net/url"
	"sort"
	"strings"
	"unicode/utf8"
)

var filters map[string]*builtin

func init() { // filters such as map call filters by name
	filters = raws(table(map[string]entry[any]{
		"abs": {"", func(_ *run, v any, _ []Value) Value {
			failIfUndefined(v)
			if !isNumber(v) {
				raise("bad operand type for abs(): '%s'", typeName(v))
			}
			if f, ok := v.(float64); ok {
				return math.Abs(f)
			}
			return small(new(big.Int).Abs(bigInt(v)))
		}},
		"attr": {"name", func(r *run, v any, a []Value) Value {
			failIfUndefined(v)
			if found, ok := r.ownAttribute(v, r.str(a[0]).s); ok {
				return found
			}
			return &undefined{fmt.Sprintf("%s has no attribute %s", quote(described(v)), r.repr(a[0]).s)}
		}},
		"batch":      {"linecount fill_with?", batch},
		"capitalize": {"", func(r *run, v any, _ []Value) Value { return r.capitalize(r.str(v)) }},
		"center":     {"width?", func(r *run, v any, a []Value) Value { return method(r, v, "center", intOr(a[0], 80)) }},
		"default": {"default_value? boolean?", func(_ *run, v any, a []Value) Value {
			_, undef := v.(*undefined)
			switch {
			case !undef && (a[1] == missing || !truth(a[1]) || truth(v)):
				return v
			case a[0] == missing:
				return Text{}
			}
			return a[0]
		}},
		"dictsort": {"case_sensitive? by? reverse?", dictsort},
		"escape":   {"", func(r *run, v any, _ []Value) Value { return r.escape(r.str(v)) }},
		"filesizeformat": {"binary?", func(r *run, v any, a []Value) Value {
			return Text{s: fileSize(toFloat(v), given(a[0]))}
		}},
		"first": {"", func(r *run, v any, _ []Value) Value {
			if item, ok := r.iterate(v).next(); ok {
				return item
			}
			return &undefined{"No first item, sequence was empty."}
		}},
		"float": {"default?", func(_ *run, v any, a []Value) Value {
			failIfUndefined(v)
			if isNumber(v) {
				return float(v)
			}
			if t, ok := v.(Text); ok {
				if f, ok := parseFloat(t.s); ok {
					return f
				}
			}
			if a[0] == missing {
				return 0.0
			}
			return a[0]
		}},
		"forceescape": {"", func(r *run, v any, _ []Value) Value { return r.escape(r.str(v).plain()) }},
		"groupby":     {"attribute default? case_sensitive?", groupby},
		"indent":      {"width? first? blank?", indent},
		"int":         {"default? base?", toInt},
		"items": {"", func(r *run, v any, _ []Value) Value {
			switch v := v.(type) {
			case *undefined:
				return r.generator(nil)
			case *Dict:
				return r.iterate(&view{"items", v})
			}
			raise("Can only get item pairs from a mapping.")
			return nil
		}},
		"join": {"d? attribute?", func(r *run, v any, a []Value) Value {
			get := r.attrGetter(a[1], missing, false)
			var texts []Text
			for _, item := range r.collect(v) {
				texts = append(texts, r.str(get(item)).plain())
			}
			sep := Text{}
			if a[0] != missing {
				sep = r.str(a[0]).plain()
			}
			return r.join(sep, texts)
		}},
		"last": {"", func(r *run, v any, _ []Value) Value {
			list, ok := r.reversed(v)
			if !ok {
				raise("'%s' object is not reversible", typeName(v))
			}
			if len(list) > 0 {
				return list[0]
			}
			return &undefined{"No last item, sequence was empty."}
		}},
		"length": {"", func(_ *run, v any, _ []Value) Value { return lengthOf(v) }},
		"list":   {"", func(r *run, v any, _ []Value) Value { return r.list(r.collect(v)) }},
		"lower":  {"", func(r *run, v any, _ []Value) Value { return r.lower(r.str(v)) }},
		"max":    {"case_sensitive? attribute?", func(r *run, v any, a []Value) Value { return r.extreme(v, a, ">") }},
		"min":    {"case_sensitive? attribute?", func(r *run, v any, a []Value) Value { return r.extreme(v, a, "<") }},
		"replace": {"old new count?", func(r *run, v any, a []Value) Value {
			limit := -1
			if a[2] != missing && a[2] != nil {
				limit = intArg(a[2])
			}
			return r.replace(r.str(v).plain(), r.str(a[0]).s, r.str(a[1]).plain(), limit)
		}},
		"reverse": {"", func(r *run, v any, _ []Value) Value {
			if t, ok := v.(Text); ok {
				b := builder{r: r}
				for end := len(t.s); end > 0; {
					_, size := utf8.DecodeLastRuneInString(t.s[:end])
					r.step(1)
					b.add(t.slice(end-size, end))
					end -= size
				}
				out := b.text()
				out.markup = t.markup
				return out
			}
			if list, ok := r.reversed(v); ok {
				return r.generator(list)
			}
			if !iterable(v) {
				raise("argument must be iterable")
			}
			list, _ := r.reversed(&List{Items: r.collect(v)})
			return r.list(list)
		}},
		"round": {"precision? method?", round},
		"safe": {"", func(r *run, v any, _ []Value) Value {
			t := r.str(v)
			t.markup = true
			return t
		}},
		"slice": {"slices fill_with?", sliceInto},
		"sort": {"reverse? case_sensitive? attribute?", func(r *run, v any, a []Value) Value {
			return r.list(r.sorted(r.collect(v), r.multiGetter(a[2], !given(a[1])), given(a[0])))
		}},
		"string": {"", func(r *run, v any, _ []Value) Value { return r.str(v) }},
		"sum": {"attribute? start?", func(r *run, v any, a []Value) Value {
			get := r.attrGetter(a[0], missing, false)
			total := Value(0)
			if a[1] != missing {
				total = a[1]
			}
			if _, ok := total.(Text); ok {
				raise("sum() can't sum strings [use ''.join(seq) instead]")
			}
			for it := r.iterate(v); ; {
				item, ok := it.next()
				if !ok {
					return total
				}
				total = r.binary("+", total, get(item))
			}
		}},
		"title":     {"", title},
		"tojson":    {"ensure_ascii? indent? separators? sort_keys?", toJSON},
		"trim":      {"chars?", func(r *run, v any, a []Value) Value { return strip(r.str(v), a[0], true, true) }},
		"truncate":  {"length? killwords? end? leeway?", truncateText},
		"unique":    {"case_sensitive? attribute?", unique},
		"upper":     {"", func(r *run, v any, _ []Value) Value { return r.upper(r.str(v)) }},
		"urlencode": {"", urlEncode},
		"wordcount": {"", func(r *run, v any, _ []Value) Value {
			return len(strings.FieldsFunc(r.str(v).s, func(c rune) bool { return !isWord(c) }))
		}},
		"xmlattr": {"autospace?", xmlAttributes},
	}), map[string]func(*run, Value, *args) Value{
		"format": func(r *run, v Value, a *args) Value {
			if len(a.pos) > 0 && len(a.kw) > 0 {
				raise("can't handle positional and keyword arguments at the same time")
			}
			if len(a.kw) > 0 {
				return r.percent(r.str(v), r.newDict(&args{kw: a.kw}))
			}
			return r.percent(r.str(v), Tuple(a.pos))
		},
		"map":        mapItems,
		"select":     func(r *run, v Value, a *args) Value { return r.selected(v, a, true, false) },
		"reject":     func(r *run, v Value, a *args) Value { return r.selected(v, a, false, false) },
		"selectattr": func(r *run, v Value, a *args) Value { return r.selected(v, a, true, true) },
		"rejectattr": func(r *run, v Value, a *args) Value { return r.selected(v, a, false, true) },
	})
	for short, name := range map[string]string{"d": "default", "count": "length", "e": "escape"} {
		filters[short] = filters[name]
	}
}

// given is the truth of an argument that is false if it is missing.
func given(v Value) bool { return v != missing && truth(v) }

// method calls a method of str.
func method(r *run, v Value, name string, a ...Value) Value {
	return stringMethods[name].call(r, r.str(v), &args{pos: a})
}

// generator is an iterator over values in memory.
func (r *run) generator(list []Value) *iterator {
	it := r.iterate(&List{Items: list})
	it.kind = "generator"
	return it
}

// attrGetter returns a function that follows a path such as "a.0.b" from a value. without stands for what is not there.
func (r *run) attrGetter(path, without Value, ignoreCase bool) func(Value) Value {
	var parts []Value
	switch p := path.(type) {
	case Text:
		for _, s := range strings.Split(p.s, ".") {
			if i, ok := parseInt(s, 10); ok && all(s, isUnicodeDigit) {
				parts = append(parts, i)
			} else {
				parts = append(parts, Text{s: s})
			}
		}
	default:
		if path != missing && path != nil {
			parts = append(parts, path)
		}
	}
	return func(v Value) Value {
		for _, p := range parts {
			v = r.item(v, p)
			if _, ok := v.(*undefined); ok && without != missing && without != nil {
				v = without
			}
		}
		if t, ok := v.(Text); ok && ignoreCase {
			return r.lower(t)
		}
		return v
	}
}

// multiGetter is attrGetter of several paths with commas between them. It returns a list.
func (r *run) multiGetter(path Value, ignoreCase bool) func(Value) Value {
	getters := []func(Value) Value{}
	if t, ok := path.(Text); ok {
		for _, p := range strings.Split(t.s, ",") {
			getters = append(getters, r.attrGetter(Text{s: p}, missing, ignoreCase))
		}
	} else {
		getters = append(getters, r.attrGetter(path, missing, ignoreCase))
	}
	return func(v Value) Value {
		list := make([]Value, len(getters))
		for i, get := range getters {
			list[i] = get(v)
		}
		return r.list(list)
	}
}

// sorted is sorted(list, key, reverse).
func (r *run) sorted(list []Value, key func(Value) Value, reverse bool) []Value {
	keys := make([]Value, len(list))
	order := make([]int, len(list))
	for i, v := range list {
		keys[i], order[i] = key(v), i
	}
	sort.SliceStable(order, func(i, j int) bool {
		if reverse {
			i, j = j, i
		}
		return r.order("<", keys[order[i]], keys[order[j]])
	})
	out := make([]Value, len(list))
	for i, from := range order {
		out[i] = list[from]
	}
	return out
}

func (r *run) extreme(v Value, a []Value, op string) Value {
	key := r.attrGetter(a[1], missing, !given(a[0]))
	it := r.iterate(v)
	best, ok := it.next()
	if !ok {
		return &undefined{"No aggregated item, sequence was empty."}
	}
	bestKey := key(best)
	for {
		item, ok := it.next()
		if !ok {
			return best
		}
		if k := key(item); r.order(op, k, bestKey) {
			best, bestKey = item, k
		}
	}
}

func dictsort(r *run, v any, a []Value) Value {
	by := 0
	if a[1] != missing {
		switch t, _ := a[1].(Text); t.s {
		case "key":
		case "value":
			by = 1
		default:
			raise(`You can only sort by either "key" or "value"`)
		}
	}
	d, ok := v.(*Dict)
	if !ok {
		failIfUndefined(v)
		raise("'%s' object has no attribute 'items'", typeName(v))
	}
	key := r.attrGetter(by, missing, !given(a[0]))
	return r.list(r.sorted(r.collect(&view{"items", d}), key, given(a[2])))
}

func groupby(r *run, v any, a []Value) Value {
	ignoreCase := !given(a[2])
	key := r.attrGetter(a[0], a[1], ignoreCase)
	output := r.attrGetter(a[0], a[1], false)
	var out []Value
	var last Value
	for i, item := range r.sorted(r.collect(v), key, false) {
		k := key(item)
		if i == 0 || !r.equal(k, last) {
			shown := k
			if ignoreCase {
				shown = output(item)
			}
			out = append(out, &group{grouper: shown, list: &List{}})
			last = k
		}
		list := out[len(out)-1].(*group).list.(*List)
		list.Items = append(list.Items, item)
	}
	return r.list(out)
}

func unique(r *run, v any, a []Value) Value {
	key := r.attrGetter(a[1], missing, !given(a[0]))
	seen := map[any]bool{}
	it := r.iterate(v)
	return &iterator{kind: "generator", next: func() (Value, bool) {
		for {
			item, ok := it.next()
			if !ok {
				return nil, false
			}
			if h := hash(key(item)); !seen[h] {
				seen[h] = true
				return item, true
			}
		}
	}}
}

func batch(r *run, v any, a []Value) Value {
	n := intArg(a[0])
	it := r.iterate(v)
	return &iterator{kind: "generator", next: func() (Value, bool) {
		var line []Value
		for n <= 0 || len(line) < n {
			item, ok := it.next()
			if !ok {
				break
			}
			line = append(line, item)
		}
		if len(line) == 0 {
			return nil, false
		}
		if a[1] != missing && a[1] != nil {
			r.room(wordBytes, n)
			for len(line) < n {
				line = append(line, a[1])
			}
		}
		return r.list(line), true
	}}
}

func sliceInto(r *run, v any, a []Value) Value {
	list, n := r.collect(v), intArg(a[0])
	if n == 0 {
		raise("integer division or modulo by zero")
	}
	r.room(wordBytes, n)
	r.step(max(n, 0))
	var out []Value
	start := 0
	for i := range max(n, 0) {
		end := start + len(list)/n
		if i < len(list)%n {
			end++
		}
		part := list[start:end:end]
		if a[1] != missing && a[1] != nil && i >= len(list)%n {
			part = append(part, a[1])
		}
		out = append(out, r.list(part))
		start = end
	}
	return r.generator(out)
}

// mapItems is the filter map: an attribute of every item, or a filter of it.
func mapItems(r *run, v Value, a *args) Value {
	if !truth(v) {
		return r.generator(nil)
	}
	var apply func(Value) Value
	if _, ok := a.named("attribute"); ok && len(a.pos) == 0 {
		bound := a.bind(mapAttribute)
		apply = r.attrGetter(bound[0], bound[1], false)
	}
	it := r.iterateLater(v)
	return &iterator{kind: "generator", next: func() (Value, bool) {
		if apply == nil {
			if len(a.pos) == 0 {
				raise("map requires a filter argument")
			}
			rest := &args{pos: a.pos[1:], kw: a.kw}
			f := filters[r.str(a.pos[0]).s]
			if f == nil {
				raise("No filter named %s.", r.repr(a.pos[0]).s)
			}
			apply = func(v Value) Value { return f.call(r, v, rest) }
		}
		item, ok := it().next()
		if !ok {
			return nil, false
		}
		return apply(item), true
	}}
}

// mapAttribute is the signature of map with an attribute.
var mapAttribute = newBuiltin("map", "attribute default?")

// iterateLater is iterate at the first use, as in a generator.
func (r *run) iterateLater(v Value) func() *iterator {
	var it *iterator
	return func() *iterator {
		if it == nil {
			it = r.iterate(v)
		}
		return it
	}
}

// selected is select, reject, selectattr and rejectattr.
func (r *run) selected(v Value, a *args, want, byAttribute bool) Value {
	if !truth(v) {
		return r.generator(nil)
	}
	it := r.iterateLater(v)
	var passes func(Value) bool
	return &iterator{kind: "generator", next: func() (Value, bool) {
		if passes == nil {
			passes = r.predicate(a, byAttribute)
		}
		for {
			item, ok := it().next()
			if !ok {
				return nil, false
			}
			if passes(item) == want {
				return item, true
			}
		}
	}}
}

func (r *run) predicate(a *args, byAttribute bool) func(Value) bool {
	get := func(v Value) Value { return v }
	pos := a.pos
	if byAttribute {
		if len(pos) == 0 {
			raise("Missing parameter for attribute name")
		}
		get, pos = r.attrGetter(pos[0], missing, false), pos[1:]
	}
	if len(pos) == 0 {
		return func(v Value) bool { return truth(get(v)) }
	}
	t := tests[r.str(pos[0]).s]
	if t == nil {
		raise("No test named %s.", r.repr(pos[0]).s)
	}
	rest := &args{pos: pos[1:], kw: a.kw}
	return func(v Value) bool { return truth(t.call(r, get(v), rest)) }
}

// toFloat is float(v).
func toFloat(v Value) float64 {
	failIfUndefined(v)
	if isNumber(v) {
		return float(v)
	}
	t, ok := v.(Text)
	if !ok {
		raise("float() argument must be a string or a real number, not '%s'", typeName(v))
	}
	f, ok := parseFloat(t.s)
	if !ok {
		raise("could not convert string to float: %s", quote(t.s))
	}
	return f
}

func toInt(_ *run, v any, a []Value) Value {
	failIfUndefined(v)
	switch v := v.(type) {
	case float64:
		if math.IsNaN(v) {
			break // a ValueError
		}
		return truncate(v)
	case bool, int, *big.Int:
		return small(bigInt(v))
	case Text:
		if i, ok := parseInt(v.s, intOr(a[1], 10)); ok {
			return i
		}
		if f, ok := parseFloat(v.s); ok && !math.IsNaN(f) && !math.IsInf(f, 0) {
			return truncate(f)
		}
	}
	if a[0] == missing {
		return 0
	}
	return a[0]
}

func round(_ *run, v any, a []Value) Value {
	how := "common"
	if a[1] != missing {
		t, _ := a[1].(Text)
		how = t.s
	}
	precision := intOr(a[0], 0)
	if how != "common" && how != "ceil" && how != "floor" {
		raise("method must be common, ceil or floor")
	}
	if !isNumber(v) {
		failIfUndefined(v)
		raise("type %s doesn't define __round__ method", typeName(v))
	}
	f, isFloat := v.(float64)
	if how == "common" {
		if isFloat {
			return roundFloat(f, precision)
		}
		if precision >= 0 {
			return small(bigInt(v))
		}
		if precision < -maxDigits {
			return 0
		}
		unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(-precision)), nil)
		return small(unit.Mul(unit, roundRat(new(big.Rat).SetFrac(bigInt(v), unit))))
	}
	unit := integers("**", 10, precision)
	x := toFloat(arithmetic("*", v, unit))
	if math.IsNaN(x) || math.IsInf(x, 0) {
		truncate(x) // raises
	}
	if how == "ceil" {
		x = math.Ceil(x)
	} else {
		x = math.Floor(x)
	}
	return arithmetic("/", truncate(x), unit)
}

// arithmetic is binary of numbers.
func arithmetic(op string, a, b Value) Value {
	_, isFloat := a.(float64)
	_, areFloats := b.(float64)
	if isFloat || areFloats {
		return floats(op, a, b)
	}
	return integers(op, a, b)
}

// title capitalizes words as the filter of jinja2 does, which differs from str.title.
func title(r *run, v any, _ []Value) Value {
	t := r.str(v)
	var b strings.Builder
	rest := t.s
	isBreak := func(c rune) bool { return isSpace(c) || strings.ContainsRune("-({[<", c) }
	for rest != "" {
		word := strings.IndexFunc(rest, isBreak)
		if word < 0 {
			word = len(rest)
		}
		if word > 0 {
			_, size := utf8.DecodeRuneInString(rest)
			b.WriteString(upper(rest[:size]) + lower(rest[size:word]))
		}
		gap := len(rest[word:]) - len(strings.TrimLeftFunc(rest[word:], isBreak))
		b.WriteString(rest[word : word+gap])
		rest = rest[word+gap:]
	}
	return r.remake(t, b.String())
}

func indent(r *run, v any, a []Value) Value {
	t := text(v)
	by, ok := a[0].(Text)
	if !ok {
		by = r.repeat(Text{s: " "}, intOr(a[0], 4))
	}
	lines := r.splitLines(r.concat(t, Text{s: "\n", markup: t.markup}), false)
	b := builder{r: r}
	if given(a[1]) {
		b.add(by)
	}
	for i, line := range lines {
		if i > 0 {
			b.addString("\n")
			if line.s != "" || given(a[2]) {
				b.add(by)
			}
		}
		b.add(line)
	}
	out := b.text()
	out.markup = t.markup
	return out
}

func truncateText(r *run, v any, a []Value) Value {
	length, leeway := intOr(a[0], 255), 5
	if a[3] != missing && a[3] != nil {
		leeway = intArg(a[3])
	}
	end := Text{s: "..."}
	if a[2] != missing {
		end = text(a[2])
	}
	endLength := lengthOf(end)
	if length < endLength || leeway < 0 {
		raise("expected length >= %d, got %d", endLength, length)
	}
	if n := lengthOf(v); n <= length+leeway {
		return v
	}
	t := firstRunes(text(v), length-endLength)
	if !given(a[1]) {
		if i := strings.LastIndexByte(t.s, ' '); i >= 0 {
			t = t.slice(0, i)
		}
	}
	return r.concat(t, end)
}

func toJSON(r *run, v any, a []Value) Value {
	s := jsonStyle{ascii: given(a[0]), sortKeys: given(a[3]), item: ", ", key: ": "}
	if a[1] != missing && a[1] != nil {
		by, ok := a[1].(Text)
		if !ok {
			by = r.repeat(Text{s: " "}, intArg(a[1]))
		}
		if len(by.s) > maxWidth {
			limit("an indentation of more than %d characters", maxWidth)
		}
		s.indent, s.item = &by.s, ","
	}
	if a[2] != missing && a[2] != nil {
		pair := r.collect(a[2])
		if len(pair) != 2 {
			raise("separators must be two strings")
		}
		s.item, s.key = text(pair[0]).s, text(pair[1]).s
	}
	b := builder{r: r}
	newline := ""
	if s.indent != nil {
		newline = "\n"
	}
	b.json(v, &s, newline)
	t := b.text()
	if t.client != nil {
		// Braces and numbers between the client's strings are the client's, too.
		t.client = []Span{{0, len(t.s)}}
	}
	return t
}

func urlEncode(r *run, v any, _ []Value) Value {
	quoted := func(v Value, query bool) string {
		s := strings.ReplaceAll(url.QueryEscape(r.str(v).s), "%7E", "~")
		if query {
			return s
		}
		return strings.ReplaceAll(strings.ReplaceAll(s, "+", "%20"), "%2F", "/")
	}
	switch v.(type) {
	case *Dict, *List, Tuple, *iterator, *view:
		list := v.(Value)
		if d, ok := v.(*Dict); ok {
			list = &view{"items", d}
		}
		var parts []string
		for _, item := range r.collect(list) {
			pair := r.collect(item)
			if len(pair) != 2 {
				raise("not enough values to unpack (expected 2, got %d)", len(pair))
			}
			parts = append(parts, quoted(pair[0], true)+"="+quoted(pair[1], true))
		}
		return r.remake(NewText(".", FromClient), strings.Join(parts, "&"))
	}
	return r.remake(r.str(v), quoted(v, false))
}

func xmlAttributes(r *run, v any, a []Value) Value {
	d, ok := v.(*Dict)
	if !ok {
		failIfUndefined(v)
		raise("'%s' object has no attribute 'items'", typeName(v))
	}
	b := builder{r: r}
	for i, key := range d.keys {
		value := d.values[i]
		if _, undef := value.(*undefined); undef || value == nil {
			continue
		}
		if strings.ContainsAny(text(key).s, " \t\n\r\f\v/>=") {
			raise("Invalid character in attribute name: %s", quote(text(key).s))
		}
		if len(b.b) > 0 || a[0] == missing || truth(a[0]) {
			b.addString(" ")
		}
		b.add(r.escape(text(key)))
		b.addString(`="`)
		b.add(r.escape(r.str(value)))
		b.addString(`"`)
	}
	return b.text()
}

// fileSize is a size as people read it.
func fileSize(bytes float64, binary bool) string {
	base, suffix := 1000.0, "B"
	if binary {
		base, suffix = 1024, "iB"
	}
	switch {
	case bytes == 1:
		return "1 Byte"
	case bytes < base:
		return formatInt(truncate(bytes)) + " Bytes"
	}
	unit := base
	for i, prefix := range "kMGTPEZY" {
		unit *= base
		if bytes < unit || i == 7 {
			p := string(prefix)
			if binary {
				p = strings.ToUpper(p)
			}
			return fmt.Sprintf("%.1f %s%s", base*bytes/unit, p, suffix)
		}
	}
	return ""
}
