package chat

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// environment holds the functions, filters, tests and methods that templates can use: only those that chat templates
// need, all bounded, deterministic and consistent with Jinja2. As in transformers' sandbox, methods that modify a list
// or a dict are missing.
var environment = &exec.Environment{
	Filters:           exec.NewFilterSet(filters()),
	Tests:             exec.NewTestSet(tests()),
	ControlStructures: controlStructures,
	Context: exec.NewContext(map[string]any{
		"range": rangeOf, "namespace": newNamespace, "dict": dictOf,
		"raise_exception": raise, "strftime_now": strftimeNow,
	}),
	Methods: exec.Methods{
		Bool:  exec.NewMethodSet(map[string]exec.Method[bool]{}),
		Int:   exec.NewMethodSet(map[string]exec.Method[int]{}),
		Float: exec.NewMethodSet(map[string]exec.Method[float64]{}),
		Str:   exec.NewMethodSet(stringMethods),
		Dict:  exec.NewMethodSet(dictMethods),
		List:  exec.NewMethodSet(map[string]exec.Method[[]any]{}),
	},
}

// filters returns all filters. Each consumes budget steps in proportion to its input.
func filters() map[string]exec.FilterFunction {
	metered := map[string]exec.FilterFunction{}
	for name, f := range allFilters() {
		metered[name] = func(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
			n := 1
			if in.IsList() || in.IsDict() {
				n += in.Len()
			}
			if err := budgetOf(e.Environment).step(n); err != nil {
				return exec.AsValue(err)
			}
			return normalized(f(e, in, args))
		}
	}
	return metered
}

// normalized converts a gonja list to a sequence.
func normalized(v *exec.Value) *exec.Value {
	if _, ok := v.Interface().(sequence); ok || !v.IsList() {
		return v
	}
	out := make(sequence, v.Len())
	for i := range out {
		out[i] = v.Index(i).Interface()
	}
	return exec.AsValue(out)
}

// argument returns the argument at position i or with the given name.
func argument(args *exec.VarArgs, i int, name string) (*exec.Value, bool) {
	if i >= 0 && i < len(args.Args) {
		return args.Args[i], true
	}
	v, ok := args.KwArgs[name]
	return v, ok
}

func failed(format string, a ...any) *exec.Value { return exec.AsValue(fmt.Errorf(format, a...)) }

// toJSON is transformers' tojson: json.dumps that keeps the order of keys and escapes nothing for HTML.
func toJSON(_ *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	s := jsonStyle{item: ", ", key: ": "}
	if v, ok := argument(args, 0, "ensure_ascii"); ok {
		s.ensureASCII = v.IsTrue()
	}
	if v, ok := argument(args, 1, "indent"); ok && !v.IsNil() {
		n := v.Integer()
		if n < 0 || n > 16 {
			return failed("tojson: indent %d is not between 0 and 16", n)
		}
		s.indent, s.item = strings.Repeat(" ", n), ","
	}
	if v, ok := argument(args, 2, "separators"); ok && !v.IsNil() {
		if !v.IsList() || v.Len() != 2 {
			return failed("tojson: separators are not two strings")
		}
		s.item, s.key = v.Index(0).String(), v.Index(1).String()
	}
	if v, ok := argument(args, 3, "sort_keys"); ok {
		s.sortKeys = v.IsTrue()
	}
	b, err := appendJSON(nil, in, &s, 0)
	if err != nil {
		return failed("tojson: %w", err)
	}
	return exec.AsSafeValue(string(b))
}

func itemsOf(_ *exec.Evaluator, in *exec.Value, _ *exec.VarArgs) *exec.Value {
	d, ok := asDict(in.Interface())
	if !ok {
		if in.IsNil() {
			return exec.AsValue(sequence{})
		}
		return failed("items: not a mapping")
	}
	return exec.AsValue(pairs(d))
}

func pairs(d *exec.Dict) sequence {
	out := make(sequence, 0, len(d.Pairs))
	for _, p := range d.Pairs {
		out = append(out, sequence{p.Key.Interface(), p.Value.Interface()})
	}
	return out
}

func listOf(_ *exec.Evaluator, in *exec.Value, _ *exec.VarArgs) *exec.Value {
	switch {
	case in.IsError(), in.IsList():
		return in
	case in.IsString():
		return exec.AsValue(characters(in.String()))
	}
	if d, ok := asDict(in.Interface()); ok {
		return exec.AsValue(keys(d))
	}
	return exec.AsValue(sequence{})
}

func keys(d *exec.Dict) sequence {
	out := make(sequence, 0, len(d.Pairs))
	for _, p := range d.Pairs {
		out = append(out, p.Key.Interface())
	}
	return out
}

func lastOf(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	list := listOf(e, in, args)
	if list.IsError() || list.Len() == 0 {
		return list
	}
	return list.Index(list.Len() - 1)
}

func reversed(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	list := normalized(listOf(e, in, args))
	items, ok := list.Interface().(sequence)
	if !ok {
		return list
	}
	items = slices.Clone(items)
	slices.Reverse(items)
	if in.IsString() {
		var b strings.Builder
		for _, c := range items {
			fmt.Fprint(&b, c)
		}
		return exec.AsValue(b.String())
	}
	return exec.AsValue(items)
}

func joined(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	sep := ""
	if v, ok := argument(args, 0, "d"); ok {
		sep = v.String()
	}
	attribute, hasAttribute := argument(args, 1, "attribute")
	list := listOf(e, in, args)
	limit := budgetOf(e.Environment).value
	var b strings.Builder
	for i := range list.Len() {
		item := list.Index(i)
		if hasAttribute {
			item, _ = item.Get(attribute.String())
		}
		if i > 0 {
			b.WriteString(sep)
		}
		b.WriteString(item.String())
		if b.Len() > limit {
			return exec.AsValue(budgetOf(e.Environment).stop(fmt.Errorf("%w: join makes more than %d bytes", ErrLimit, limit)))
		}
	}
	return exec.AsValue(b.String())
}

func replaced(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	out, err := replaceString(in.String(), args, budgetOf(e.Environment).value)
	if err != nil {
		return exec.AsValue(err)
	}
	return exec.AsValue(out)
}

func replaceString(s string, args *exec.VarArgs, limit int) (string, error) {
	from, ok1 := argument(args, 0, "old")
	to, ok2 := argument(args, 1, "new")
	if !ok1 || !ok2 {
		return "", errors.New("replace: what to replace, and with what, are missing")
	}
	count := -1
	if v, ok := argument(args, 2, "count"); ok && !v.IsNil() {
		count = v.Integer()
	}
	hits := strings.Count(s, from.String())
	if count >= 0 {
		hits = min(hits, count)
	}
	if size := len(s) + hits*(len(to.String())-len(from.String())); size > limit {
		return "", fmt.Errorf("replace: the result has more than %d bytes", limit)
	}
	return strings.Replace(s, from.String(), to.String(), count), nil
}

// maxRange bounds the length of the result of range.
const maxRange = 10_000

func rangeOf(e *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	start, stop, step := 0, 0, 1
	for _, v := range args.Args {
		if !v.IsInteger() {
			return failed("range: %s is not an integer", oneLine(v.String()))
		}
	}
	switch len(args.Args) {
	case 3:
		step = args.Args[2].Integer()
		fallthrough
	case 2:
		start, stop = args.Args[0].Integer(), args.Args[1].Integer()
	case 1:
		stop = args.Args[0].Integer()
	default:
		return failed("range takes 1 to 3 integers")
	}
	if step == 0 {
		return failed("range: the step is 0")
	}
	n := 0.0 // floating point, because the difference of two integers may overflow
	if step > 0 && start < stop || step < 0 && start > stop {
		n = math.Ceil((float64(stop) - float64(start)) / float64(step))
	}
	b := budgetOf(e.Environment)
	if n > maxRange {
		return exec.AsValue(b.stop(fmt.Errorf("%w: range of more than %d", ErrLimit, maxRange)))
	}
	if err := b.step(int(n)); err != nil {
		return exec.AsValue(err)
	}
	out := make(sequence, int(n))
	for i := range out {
		out[i] = start + i*step
	}
	return exec.AsValue(out)
}

func newNamespace(_ *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	ns := &namespace{fields: map[string]any{}}
	for name, v := range args.KwArgs {
		v = normalized(v)
		if holdsNamespace(v) {
			return failed("a namespace cannot hold a namespace")
		}
		ns.fields[name] = v.Interface()
	}
	return exec.AsValue(ns)
}

// dictOf makes a dict of its named arguments, sorted by name, because gonja does not preserve their order.
func dictOf(_ *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	names := make([]string, 0, len(args.KwArgs))
	for name := range args.KwArgs {
		names = append(names, name)
	}
	slices.Sort(names)
	d := newDict()
	for _, name := range names {
		set(d, name, args.KwArgs[name].Interface())
	}
	return exec.AsValue(d)
}

func raise(e *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	message := "no reason given"
	if v, ok := argument(args, 0, "message"); ok {
		message = v.String()
	}
	return exec.AsValue(budgetOf(e.Environment).stop(&RaisedError{Message: oneLine(message)}))
}

func strftimeNow(e *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	format, ok := argument(args, 0, "format")
	if !ok || !format.IsString() {
		return failed("strftime_now takes a format")
	}
	return exec.AsValue(strftime(budgetOf(e.Environment).now(), format.String()))
}

// strftime formats a time like C's strftime in the C locale. Unknown directives stay unchanged.
func strftime(t time.Time, format string) string {
	layouts := map[byte]string{
		'Y': "2006", 'm': "01", 'd': "02", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'y': "06", 'B': "January", 'b': "Jan",
		'h': "Jan", 'A': "Monday", 'a': "Mon", 'p': "PM", 'j': "002", 'z': "-0700", 'Z': "MST", 'F': "2006-01-02",
		'T': "15:04:05", 'R': "15:04", 'D': "01/02/06", 'e': "_2",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		bare := format[i] == '-' && i+1 < len(format)
		if bare {
			i++
		}
		layout, ok := layouts[format[i]]
		switch {
		case format[i] == '%':
			b.WriteByte('%')
		case format[i] == 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case ok && bare:
			text := strings.TrimLeft(t.Format(layout), "0 ")
			if text == "" {
				text = "0"
			}
			b.WriteString(text)
		case ok:
			b.WriteString(t.Format(layout))
		default:
			b.WriteByte('%')
			if bare {
				b.WriteByte('-')
			}
			b.WriteByte(format[i])
		}
	}
	return b.String()
}

var dictMethods = map[string]exec.Method[map[string]any]{
	"get": func(_ map[string]any, self *exec.Value, args *exec.VarArgs) (any, error) {
		key, ok := argument(args, 0, "key")
		if !ok {
			return nil, errors.New("get: the key is missing")
		}
		if d, ok := asDict(self.Interface()); ok {
			for _, p := range d.Pairs {
				if p.Key.EqualValueTo(key) {
					return p.Value.Interface(), nil
				}
			}
		}
		if v, ok := argument(args, 1, "default"); ok {
			return v.Interface(), nil
		}
		return nil, nil
	},
	"items":  dictMethod(pairs),
	"keys":   dictMethod(keys),
	"values": dictMethod(values),
}

func values(d *exec.Dict) sequence {
	out := make(sequence, 0, len(d.Pairs))
	for _, p := range d.Pairs {
		out = append(out, p.Value.Interface())
	}
	return out
}

func dictMethod(f func(*exec.Dict) sequence) exec.Method[map[string]any] {
	return func(_ map[string]any, self *exec.Value, _ *exec.VarArgs) (any, error) {
		d, ok := asDict(self.Interface())
		if !ok {
			return nil, errors.New("not a mapping")
		}
		return f(d), nil
	}
}

// stringMethods are the Python string methods that templates use. gonja's versions differ from Python's in their
// defaults.
var stringMethods = map[string]exec.Method[string]{
	"strip":        stripMethod(strings.TrimFunc),
	"lstrip":       stripMethod(strings.TrimLeftFunc),
	"rstrip":       stripMethod(strings.TrimRightFunc),
	"upper":        plain(strings.ToUpper),
	"lower":        plain(strings.ToLower),
	"casefold":     plain(strings.ToLower),
	"title":        plain(title),
	"capitalize":   plain(capitalize),
	"splitlines":   splitLines,
	"split":        splitMethod(false),
	"rsplit":       splitMethod(true),
	"startswith":   affix(strings.HasPrefix),
	"endswith":     affix(strings.HasSuffix),
	"removeprefix": withString(func(s, a string) any { return strings.TrimPrefix(s, a) }),
	"removesuffix": withString(func(s, a string) any { return strings.TrimSuffix(s, a) }),
	"find":         withString(func(s, a string) any { return runeIndex(s, strings.Index(s, a)) }),
	"rfind":        withString(func(s, a string) any { return runeIndex(s, strings.LastIndex(s, a)) }),
	"count":        withString(func(s, a string) any { return strings.Count(s, a) }),
	"isdigit":      every(unicode.IsDigit),
	"isalpha":      every(unicode.IsLetter),
	"isspace":      every(unicode.IsSpace),
	"isalnum":      every(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }),
	"isupper":      func(s string, _ *exec.Value, _ *exec.VarArgs) (any, error) { return cased(s, strings.ToUpper), nil },
	"islower":      func(s string, _ *exec.Value, _ *exec.VarArgs) (any, error) { return cased(s, strings.ToLower), nil },
	"replace": func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		return replaceString(s, args, maxValueBytes+len(s))
	},
	"join": func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		list, ok := argument(args, 0, "iterable")
		if !ok || !list.IsList() {
			return nil, errors.New("join: not a list")
		}
		var b strings.Builder
		for i := range list.Len() {
			if i > 0 {
				b.WriteString(s)
			}
			b.WriteString(list.Index(i).String())
			if b.Len() > maxOutputBytes {
				return nil, fmt.Errorf("join: the result has more than %d bytes", maxOutputBytes)
			}
		}
		return b.String(), nil
	},
}

func plain(f func(string) string) exec.Method[string] {
	return func(s string, _ *exec.Value, _ *exec.VarArgs) (any, error) { return f(s), nil }
}

func withString(f func(s, a string) any) exec.Method[string] {
	return func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		a, ok := argument(args, 0, "")
		if !ok || !a.IsString() {
			return nil, errors.New("the argument is not a string")
		}
		return f(s, a.String()), nil
	}
}

// affix implements startswith and endswith, for one string or for any string of a list.
func affix(has func(s, affix string) bool) exec.Method[string] {
	return func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		a, ok := argument(args, 0, "")
		switch {
		case ok && a.IsString():
			return has(s, a.String()), nil
		case ok && a.IsList():
			for i := range a.Len() {
				if has(s, a.Index(i).String()) {
					return true, nil
				}
			}
			return false, nil
		}
		return nil, errors.New("the argument is neither a string nor a list of strings")
	}
}

func every(f func(rune) bool) exec.Method[string] {
	return func(s string, _ *exec.Value, _ *exec.VarArgs) (any, error) {
		return s != "" && strings.IndexFunc(s, func(r rune) bool { return !f(r) }) < 0, nil
	}
}

func cased(s string, to func(string) string) bool {
	return to(s) == s && strings.ToUpper(s) != strings.ToLower(s)
}

func stripMethod(trim func(string, func(rune) bool) string) exec.Method[string] {
	return func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		chars, ok := argument(args, 0, "chars")
		if !ok || chars.IsNil() {
			return trim(s, unicode.IsSpace), nil
		}
		set := chars.String()
		return trim(s, func(r rune) bool { return strings.ContainsRune(set, r) }), nil
	}
}

// splitMethod implements Python's split and rsplit.
func splitMethod(right bool) exec.Method[string] {
	return func(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		limit := -1
		if v, ok := argument(args, 1, "maxsplit"); ok {
			limit = v.Integer()
		}
		var parts []string
		sep, ok := argument(args, 0, "sep")
		switch {
		case !ok || sep.IsNil():
			parts = splitSpace(s, limit, right)
		case sep.String() == "":
			return nil, errors.New("split: empty separator")
		default:
			parts = splitString(s, sep.String(), limit, right)
		}
		out := make(sequence, len(parts))
		for i, p := range parts {
			out[i] = p
		}
		return out, nil
	}
}

func splitString(s, sep string, limit int, right bool) []string {
	if limit < 0 {
		return strings.Split(s, sep)
	}
	if !right {
		return strings.SplitN(s, sep, limit+1)
	}
	var parts []string
	for ; limit > 0; limit-- {
		i := strings.LastIndex(s, sep)
		if i < 0 {
			break
		}
		parts = append(parts, s[i+len(sep):])
		s = s[:i]
	}
	parts = append(parts, s)
	slices.Reverse(parts)
	return parts
}

func splitSpace(s string, limit int, right bool) []string {
	if limit < 0 {
		return strings.Fields(s)
	}
	var parts []string
	if right {
		for s = strings.TrimRightFunc(s, unicode.IsSpace); s != ""; limit-- {
			i := strings.LastIndexFunc(s, unicode.IsSpace)
			if limit == 0 || i < 0 {
				parts = append(parts, s)
				break
			}
			_, n := utf8.DecodeRuneInString(s[i:])
			parts = append(parts, s[i+n:])
			s = strings.TrimRightFunc(s[:i], unicode.IsSpace)
		}
		slices.Reverse(parts)
		return parts
	}
	for s = strings.TrimLeftFunc(s, unicode.IsSpace); s != ""; limit-- {
		i := strings.IndexFunc(s, unicode.IsSpace)
		if limit == 0 || i < 0 {
			parts = append(parts, s)
			break
		}
		parts = append(parts, s[:i])
		s = strings.TrimLeftFunc(s[i:], unicode.IsSpace)
	}
	return parts
}

func splitLines(s string, _ *exec.Value, args *exec.VarArgs) (any, error) {
	keep := false
	if v, ok := argument(args, 0, "keepends"); ok {
		keep = v.IsTrue()
	}
	out := sequence{}
	for s != "" {
		i := strings.IndexAny(s, "\r\n")
		if i < 0 {
			out = append(out, s)
			break
		}
		n := 1
		if strings.HasPrefix(s[i:], "\r\n") {
			n = 2
		}
		if keep {
			out = append(out, s[:i+n])
		} else {
			out = append(out, s[:i])
		}
		s = s[i+n:]
	}
	return out, nil
}

// runeIndex converts a byte index to Python's index, which counts characters.
func runeIndex(s string, i int) int {
	if i < 0 {
		return -1
	}
	return utf8.RuneCountInString(s[:i])
}

func title(s string) string {
	var b strings.Builder
	inWord := false
	for _, r := range s {
		if inWord {
			b.WriteRune(unicode.ToLower(r))
		} else {
			b.WriteRune(unicode.ToTitle(r))
		}
		inWord = unicode.IsLetter(r)
	}
	return b.String()
}

func capitalize(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return s
	}
	return string(unicode.ToTitle(r)) + strings.ToLower(s[n:])
}
