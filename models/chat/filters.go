package chat

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// filter is a Jinja2 filter, which templates apply with |.
type filter func(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value

// allFilters are the filters that chat templates use and whose output size is bounded by their input. gonja has them
// too, but its package builtins brings much that chat templates do not need.
func allFilters() map[string]filter {
	return map[string]filter{
		"tojson": toJSON, "items": itemsOf, "list": listOf, "last": lastOf, "reverse": reversed, "join": joined,
		"replace": replaced, "default": defaulted, "d": defaulted,

		"abs":        simple(absolute),
		"capitalize": onText(capitalize),
		"count":      simple(length),
		"e":          simple(escaped),
		"escape":     simple(escaped),
		"float":      withOptions(toFloat, "default"),
		"int":        withOptions(toInt, "default", "base"),
		"length":     simple(length),
		"lower":      onText(strings.ToLower),
		"round":      withOptions(rounded, "precision", "method"),
		"safe":       simple(safe),
		"string":     onText(func(s string) string { return s }),
		"title":      onText(titleWords),
		"trim":       withOptions(trimmed, "chars"),
		"upper":      onText(strings.ToUpper),

		"first":      onItems(firstOf),
		"max":        onItems(extreme(1), "case_sensitive", "attribute"),
		"min":        onItems(extreme(-1), "case_sensitive", "attribute"),
		"sort":       onItems(sorted, "reverse", "case_sensitive", "attribute"),
		"sum":        onItems(sumOf, "attribute", "start"),
		"unique":     onItems(distinct, "case_sensitive", "attribute"),
		"map":        mapped,
		"select":     selected(true),
		"reject":     selected(false),
		"selectattr": selectedBy(true),
		"rejectattr": selectedBy(false),
	}
}

// optionsOf returns the arguments with these names, passed by position or by name. An absent argument is nil.
func optionsOf(args *exec.VarArgs, names []string) ([]*exec.Value, error) {
	if len(args.Args) > len(names) {
		return nil, fmt.Errorf("takes %d arguments at most, not %d", len(names), len(args.Args))
	}
	out := make([]*exec.Value, len(names))
	copy(out, args.Args)
	for name, v := range args.KwArgs {
		i := slices.Index(names, name)
		if i < 0 || out[i] != nil {
			return nil, fmt.Errorf("takes no argument %q here", oneLine(name))
		}
		out[i] = v
	}
	return out, nil
}

// withOptions makes a filter from a function of a value and its options.
func withOptions(f func(in *exec.Value, o []*exec.Value) *exec.Value, names ...string) filter {
	return func(_ *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
		if in.IsError() {
			return in
		}
		o, err := optionsOf(args, names)
		if err != nil {
			return exec.AsValue(err)
		}
		return f(in, o)
	}
}

// simple makes a filter from a function without options.
func simple(f func(in *exec.Value) *exec.Value) filter {
	return withOptions(func(in *exec.Value, _ []*exec.Value) *exec.Value { return f(in) })
}

// onText makes a filter from a function on strings. None becomes the empty string.
func onText(f func(s string) string) filter {
	return simple(func(in *exec.Value) *exec.Value {
		if in.IsNil() {
			return exec.AsValue("")
		}
		return exec.AsValue(f(in.String()))
	})
}

// onItems makes a filter from a function on a list's items, a dict's keys or a string's characters.
func onItems(f func(items []*exec.Value, o []*exec.Value) *exec.Value, names ...string) filter {
	return withOptions(func(in *exec.Value, o []*exec.Value) *exec.Value { return f(itemsIn(in), o) }, names...)
}

func itemsIn(in *exec.Value) []*exec.Value {
	list := listOf(nil, in, nil)
	items := make([]*exec.Value, list.Len())
	for i := range items {
		items[i] = list.Index(i)
	}
	return items
}

func valuesOf(items []*exec.Value) *exec.Value {
	out := make(sequence, len(items))
	for i, v := range items {
		out[i] = v.Interface()
	}
	return exec.AsValue(out)
}

// isTrue reports whether an option is given and true.
func isTrue(o *exec.Value) bool { return o != nil && o.IsTrue() }

// isGiven reports whether an option is given and not none.
func isGiven(o *exec.Value) bool { return o != nil && !o.IsNil() }

func absolute(in *exec.Value) *exec.Value {
	switch {
	case in.IsInteger():
		return exec.AsValue(max(in.Integer(), -in.Integer()))
	case in.IsFloat():
		return exec.AsValue(math.Abs(in.Float()))
	}
	return failed("abs: %s is not a number", oneLine(in.String()))
}

func length(in *exec.Value) *exec.Value { return exec.AsValue(in.Len()) }

func escaped(in *exec.Value) *exec.Value {
	if in.Safe {
		return in
	}
	return exec.AsSafeValue(in.Escaped())
}

func safe(in *exec.Value) *exec.Value {
	in.Safe = true
	return in
}

func defaulted(_ *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	o, err := optionsOf(args, []string{"default_value", "boolean"})
	switch {
	case err != nil:
		return exec.AsValue(fmt.Errorf("default: %w", err))
	case in.IsError(), in.IsNil(), isTrue(o[1]) && !in.IsTrue():
		if o[0] == nil {
			return exec.AsValue("")
		}
		return o[0]
	}
	return in
}

// otherwise returns the option, or v if the option is absent.
func otherwise(o *exec.Value, v any) *exec.Value {
	if o != nil {
		return o
	}
	return exec.AsValue(v)
}

func toFloat(in *exec.Value, o []*exec.Value) *exec.Value {
	if in.IsNumber() {
		return exec.AsValue(in.Float())
	}
	if f, err := strconv.ParseFloat(strings.TrimSpace(in.String()), 64); err == nil {
		return exec.AsValue(f)
	}
	return otherwise(o[0], 0.0)
}

func toInt(in *exec.Value, o []*exec.Value) *exec.Value {
	base := 10
	if isGiven(o[1]) {
		base = o[1].Integer()
	}
	switch {
	case base < 2 || base > 36:
		return failed("int: base %d is not between 2 and 36", base)
	case in.IsInteger():
		return exec.AsValue(in.Integer())
	case in.IsBool():
		if in.Bool() {
			return exec.AsValue(1)
		}
		return exec.AsValue(0)
	}
	text := strings.ToLower(strings.TrimSpace(in.String()))
	text = strings.TrimPrefix(text, map[int]string{16: "0x", 8: "0o", 2: "0b"}[base])
	if n, err := strconv.ParseInt(text, base, strconv.IntSize); err == nil {
		return exec.AsValue(int(n))
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return otherwise(o[0], 0)
	}
	if math.Abs(f) >= 1<<63 {
		return failed("int: %s is out of range", oneLine(text))
	}
	return exec.AsValue(int(f))
}

func rounded(in *exec.Value, o []*exec.Value) *exec.Value {
	precision, method := 0, "common"
	if isGiven(o[0]) {
		precision = o[0].Integer()
	}
	if isGiven(o[1]) {
		method = o[1].String()
	}
	v, factor := in.Float(), math.Pow10(precision)
	switch {
	case method == "floor":
		v = math.Floor(v*factor) / factor
	case method == "ceil":
		v = math.Ceil(v*factor) / factor
	case method != "common":
		return failed("round: method %q is not common, floor or ceil", oneLine(method))
	case precision < 0:
		v = math.RoundToEven(v*factor) / factor
	default: // as in Python: rounds the exact decimal value, half to even
		v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'f', min(precision, maxDecimals), 64), 64)
	}
	if in.IsInteger() && method == "common" {
		return exec.AsValue(int(v))
	}
	return exec.AsValue(v)
}

// maxDecimals exceeds the number of decimals of any float64.
const maxDecimals = 400

func trimmed(in *exec.Value, o []*exec.Value) *exec.Value {
	if !in.IsString() {
		return failed("trim: %s is not a string", oneLine(in.String()))
	}
	if isGiven(o[0]) {
		return exec.AsValue(strings.Trim(in.String(), o[0].String()))
	}
	return exec.AsValue(strings.TrimSpace(in.String()))
}

// titleWords capitalizes words. Unlike in Python's str.title, a word ends at a space, a dash or an opening bracket, and
// not at an apostrophe.
func titleWords(s string) string {
	var b strings.Builder
	for s != "" {
		word := s
		if i := strings.IndexAny(s, " \t\n\r\f\v-([{<"); i >= 0 {
			word = s[:i+1]
		}
		b.WriteString(capitalize(word))
		s = s[len(word):]
	}
	return b.String()
}

func firstOf(items []*exec.Value, _ []*exec.Value) *exec.Value {
	if len(items) == 0 {
		return exec.AsValue("")
	}
	return items[0]
}

// attributeOf follows a path such as "function.name" or "0.id" from v, and returns none if the path does not exist.
func attributeOf(v, path *exec.Value) *exec.Value {
	if !isGiven(path) {
		return v
	}
	for part := range strings.SplitSeq(path.String(), ".") {
		var ok bool
		if i, err := strconv.Atoi(part); err == nil {
			v, ok = v.GetItem(i)
		} else {
			v, ok = v.Get(part)
		}
		if !ok || v.IsNil() {
			return exec.AsValue(nil)
		}
	}
	return v
}

// compare orders numbers by value and strings by characters, ignoring case unless caseSensitive is set. None sorts
// first. Other values have no order.
func compare(a, b *exec.Value, caseSensitive bool) (int, error) {
	switch {
	case a.IsNil() || b.IsNil():
		return cmp.Compare(presence(a), presence(b)), nil
	case a.IsNumber() && b.IsNumber():
		return cmp.Compare(a.Float(), b.Float()), nil
	case a.IsString() && b.IsString():
		s, t := a.String(), b.String()
		if !caseSensitive {
			s, t = strings.ToLower(s), strings.ToLower(t)
		}
		return strings.Compare(s, t), nil
	case a.IsBool() && b.IsBool():
		return cmp.Compare(a.String(), b.String()), nil // "False" comes before "True"
	}
	return 0, fmt.Errorf("%s and %s have no order", oneLine(a.String()), oneLine(b.String()))
}

func presence(v *exec.Value) int {
	if v.IsNil() {
		return 0
	}
	return 1
}

// extreme returns a function that finds the maximum (sign 1) or minimum (sign -1) of a list.
func extreme(sign int) func(items []*exec.Value, o []*exec.Value) *exec.Value {
	return func(items []*exec.Value, o []*exec.Value) *exec.Value {
		best := exec.AsValue("")
		for i, v := range items {
			order, err := sign, error(nil)
			if i > 0 {
				order, err = compare(attributeOf(v, o[1]), attributeOf(best, o[1]), isTrue(o[0]))
			}
			if err != nil {
				return exec.AsValue(err)
			}
			if order*sign > 0 {
				best = v
			}
		}
		return best
	}
}

func sorted(items []*exec.Value, o []*exec.Value) *exec.Value {
	paths := []*exec.Value{nil}
	if isGiven(o[2]) {
		paths = nil
		for p := range strings.SplitSeq(o[2].String(), ",") {
			paths = append(paths, exec.AsValue(p))
		}
	}
	var failure error
	slices.SortStableFunc(items, func(a, b *exec.Value) int {
		for _, p := range paths {
			order, err := compare(attributeOf(a, p), attributeOf(b, p), isTrue(o[1]))
			failure = cmp.Or(failure, err)
			if order != 0 && isTrue(o[0]) {
				return -order
			}
			if order != 0 {
				return order
			}
		}
		return 0
	})
	if failure != nil {
		return exec.AsValue(failure)
	}
	return valuesOf(items)
}

func sumOf(items []*exec.Value, o []*exec.Value) *exec.Value {
	sum, whole := 0.0, true
	if isGiven(o[1]) {
		items = append(slices.Clone(items), nil) // the start value has no attributes
	}
	for _, v := range items {
		if v == nil {
			v = o[1]
		} else {
			v = attributeOf(v, o[0])
		}
		if !v.IsNumber() {
			return failed("sum: %s is not a number", oneLine(v.String()))
		}
		sum += v.Float()
		whole = whole && v.IsInteger()
	}
	if whole {
		return exec.AsValue(int(sum))
	}
	return exec.AsValue(sum)
}

func distinct(items []*exec.Value, o []*exec.Value) *exec.Value {
	seen := map[any]bool{}
	var kept []*exec.Value
	for _, v := range items {
		by := attributeOf(v, o[1])
		var key any
		switch {
		case by.IsNil(), by.IsBool():
			key = by.Interface()
		case by.IsNumber():
			key = by.Float()
		case by.IsString() && isTrue(o[0]):
			key = by.String()
		case by.IsString():
			key = strings.ToLower(by.String())
		default:
			return failed("unique: %s cannot be told from others", oneLine(by.String()))
		}
		if !seen[key] {
			seen[key] = true
			kept = append(kept, v)
		}
	}
	return valuesOf(kept)
}

// mapped applies a filter to each item, or reads an attribute of each.
func mapped(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	each := func(v *exec.Value) *exec.Value { return e.ExecuteFilterByName(args.Args[0].String(), v, rest(args, 1)) }
	if len(args.Args) == 0 {
		o, err := optionsOf(args, []string{"attribute", "default"})
		if err == nil && !isGiven(o[0]) {
			err = errors.New("map: which filter, or which attribute, is missing")
		}
		if err != nil {
			return exec.AsValue(err)
		}
		each = func(v *exec.Value) *exec.Value {
			if v = attributeOf(v, o[0]); v.IsNil() && o[1] != nil {
				return o[1]
			}
			return v
		}
	}
	items := itemsIn(in)
	for i, v := range items {
		if items[i] = each(v); items[i].IsError() {
			return items[i]
		}
	}
	return valuesOf(items)
}

// rest returns copies of the arguments after the first n. Copies are needed because some functions of gonja remove
// arguments.
func rest(args *exec.VarArgs, n int) *exec.VarArgs {
	out := exec.NewVarArgs()
	if n < len(args.Args) {
		out.Args = slices.Clone(args.Args[n:])
	}
	for name, v := range args.KwArgs {
		out.KwArgs[name] = v
	}
	return out
}

// passes reports whether v passes the test named by argument i. Without that argument, it reports whether v is true.
func passes(e *exec.Evaluator, v *exec.Value, args *exec.VarArgs, i int) (bool, error) {
	if i < len(args.Args) {
		v = e.ExecuteTestByName(args.Args[i].String(), v, rest(args, i+1))
	}
	if v.IsError() {
		return false, v
	}
	return v.IsTrue(), nil
}

// keep returns the items for which ok returns want.
func keep(in *exec.Value, want bool, ok func(v *exec.Value) (bool, error)) *exec.Value {
	if in.IsError() {
		return in
	}
	var kept []*exec.Value
	for _, v := range itemsIn(in) {
		is, err := ok(v)
		if err != nil {
			return exec.AsValue(err)
		}
		if is == want {
			kept = append(kept, v)
		}
	}
	return valuesOf(kept)
}

// selected keeps the items that pass a test (want true) or fail it (want false).
func selected(want bool) filter {
	return func(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
		return keep(in, want, func(v *exec.Value) (bool, error) { return passes(e, v, args, 0) })
	}
}

// selectedBy keeps the items with an attribute that passes a test (want true) or fails it (want false).
func selectedBy(want bool) filter {
	return func(e *exec.Evaluator, in *exec.Value, args *exec.VarArgs) *exec.Value {
		if len(args.Args) == 0 {
			return failed("which attribute to select by is missing")
		}
		return keep(in, want, func(v *exec.Value) (bool, error) { return passes(e, attributeOf(v, args.Args[0]), args, 1) })
	}
}
