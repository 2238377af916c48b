package jinja

import (
	"fmt"
	"strings"
	"time"
)

// maxRange is jinja2's limit on the length of a range in its sandbox.
const maxRange = 100_000

// globals are the functions that every template sees.
var globals = map[string]Value{}

func init() { // the functions call the evaluator, which knows the globals
	functions := raws(table(map[string]entry[any]{
		"range": {"/ start stop? step?", func(_ *run, _ any, a []Value) Value {
			v := &rangeValue{0, intArg(a[0]), 1}
			if a[1] != missing {
				v.start, v.stop = v.stop, intArg(a[1])
			}
			if v.step = intOr(a[2], 1); v.step == 0 {
				raise("range() arg 3 must not be zero")
			}
			const far = 1 << 60 // beyond which differences may overflow
			if max(v.start, v.stop, v.step) > far || min(v.start, v.stop, v.step) < -far || v.len() > maxRange {
				raise("Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
			}
			return v
		}},
		"raise_exception": {"message", func(r *run, _ any, a []Value) Value {
			panic(&exception{err: &RaisedError{Message: r.str(a[0]).s}})
		}},
		"strftime_now": {"format", func(r *run, _ any, a []Value) Value {
			format := text(a[0])
			return r.remake(format, strftime(r.now(), format.s))
		}},
		"joiner": {"sep?", func(_ *run, _ any, a []Value) Value {
			if a[0] == missing {
				return &joiner{sep: Text{s: ", "}}
			}
			return &joiner{sep: a[0]}
		}},
	}), map[string]func(*run, Value, *args) Value{
		"namespace": func(r *run, _ Value, a *args) Value { return &namespace{attrs: r.newDict(a)} },
		"dict":      func(r *run, _ Value, a *args) Value { return r.newDict(a) },
		"cycler": func(_ *run, _ Value, a *args) Value {
			if len(a.pos) == 0 {
				raise("at least one item has to be provided")
			}
			return &cycler{items: a.pos}
		},
	})
	for name, b := range functions {
		globals[name] = &function{builtin: b}
	}
	stringMethods["format"].raw = func(r *run, self Value, a *args) Value { return r.format(self.(Text), a) }
	stringMethods["format_map"].raw = func(r *run, self Value, a *args) Value {
		d, ok := (*Dict)(nil), false
		if len(a.pos) == 1 && len(a.kw) == 0 {
			d, ok = a.pos[0].(*Dict)
		}
		if !ok {
			raise("format_map() takes exactly one mapping")
		}
		named := &args{}
		for i, key := range d.keys {
			if t, ok := key.(Text); ok {
				named.kw = append(named.kw, keyword{t.s, d.values[i]})
			}
		}
		return r.format(self.(Text), named)
	}
}

// newDict is dict(*args, **kwargs).
func (r *run) newDict(a *args) *Dict {
	d := NewDict()
	if len(a.pos) > 1 {
		raise("dict expected at most 1 argument, got %d", len(a.pos))
	}
	if len(a.pos) == 1 {
		if from, ok := a.pos[0].(*Dict); ok {
			for i, key := range from.keys {
				d.Set(key, from.values[i])
			}
		} else {
			for i, item := range r.collect(a.pos[0]) {
				pair := r.collect(item)
				if len(pair) != 2 {
					raise("dictionary update sequence element #%d has length %d; 2 is required", i, len(pair))
				}
				d.Set(pair[0], pair[1])
			}
		}
	}
	for _, k := range a.kw {
		d.SetString(k.name, k.value)
	}
	r.made(4 * wordBytes * d.Len())
	return d
}

// cycler goes round its items.
type cycler struct {
	items []Value
	pos   int
}

func (c *cycler) attribute(name string) (Value, bool) {
	switch name {
	case "current":
		return c.items[c.pos], true
	case "pos":
		return c.pos, true
	case "items":
		return Tuple(c.items), true
	case "next", "reset":
		return &function{self: c, builtin: cyclerMethods[name]}, true
	}
	return nil, false
}

var cyclerMethods = table(map[string]entry[*cycler]{
	"next": {"", func(_ *run, c *cycler, _ []Value) Value {
		v := c.items[c.pos]
		c.pos = (c.pos + 1) % len(c.items)
		return v
	}},
	"reset": {"", func(_ *run, c *cycler, _ []Value) Value {
		c.pos = 0
		return nil
	}},
})

// joiner is empty at its first call, and the separator at others.
type joiner struct {
	sep  Value
	used bool
}

func (j *joiner) call() Value {
	if !j.used {
		j.used = true
		return Text{}
	}
	return j.sep
}

// loopCall is the signature of a recursive loop.
var loopCall = newBuiltin("loop", "iterable")

var loopMethods = raws(map[string]*builtin{}, map[string]func(*run, Value, *args) Value{
	"cycle": func(_ *run, self Value, a *args) Value {
		if len(a.pos) == 0 {
			raise("no items for cycling given")
		}
		return a.pos[self.(*loop).index%len(a.pos)]
	},
	"changed": func(r *run, self Value, a *args) Value {
		l := self.(*loop)
		if l.hasSeen && r.equal(Tuple(l.seen), Tuple(a.pos)) {
			return false
		}
		l.seen, l.hasSeen = a.pos, true
		return true
	},
})

var dictMethods = table(map[string]entry[*Dict]{
	"get": {"/ key default?", func(_ *run, d *Dict, a []Value) Value {
		if v, ok := d.get(a[0]); ok {
			return v
		}
		if a[1] == missing {
			return nil
		}
		return a[1]
	}},
	"keys":   {"", func(_ *run, d *Dict, _ []Value) Value { return &view{"keys", d} }},
	"values": {"", func(_ *run, d *Dict, _ []Value) Value { return &view{"values", d} }},
	"items":  {"", func(_ *run, d *Dict, _ []Value) Value { return &view{"items", d} }},
	"copy":   {"", func(_ *run, d *Dict, _ []Value) Value { return d }}, // nothing can change either
	"fromkeys": {"/ iterable value?", func(r *run, _ *Dict, a []Value) Value {
		d := NewDict()
		for _, key := range r.collect(a[0]) {
			if a[1] == missing {
				d.Set(key, nil)
			} else {
				d.Set(key, a[1])
			}
		}
		r.made(4 * wordBytes * d.Len())
		return d
	}},
})

var listMethods = table(map[string]entry[*List]{
	"count": {"/ value", func(r *run, l *List, a []Value) Value { return r.countItems(l.Items, a[0]) }},
	"index": {"/ value start? stop?", func(r *run, l *List, a []Value) Value { return r.indexItem(l.Items, a) }},
	"copy":  {"", func(_ *run, l *List, _ []Value) Value { return &List{Items: l.Items} }},
})

var tupleMethods = table(map[string]entry[Tuple]{
	"count": {"/ value", func(r *run, t Tuple, a []Value) Value { return r.countItems(t, a[0]) }},
	"index": {"/ value start? stop?", func(r *run, t Tuple, a []Value) Value { return r.indexItem(t, a) }},
})

var floatMethods = table(map[string]entry[float64]{
	"is_integer": {"", func(_ *run, f float64, _ []Value) Value { return f == float64(int(f)) }},
})

func (r *run) countItems(list []Value, v Value) int {
	n := 0
	for _, item := range list {
		if r.equal(item, v) {
			n++
		}
	}
	return n
}

func (r *run) indexItem(list []Value, a []Value) int {
	for i := range 2 {
		if a[i+1] == missing {
			a[i+1] = nil
		}
	}
	start, stop, _ := sliceBounds([3]Value{a[1], a[2], nil}, len(list))
	for i := start; i < stop; i++ {
		if r.equal(list[i], a[0]) {
			return i
		}
	}
	raise("%s is not in list", r.repr(a[0]).s)
	return 0
}

// strftime formats a time like C's strftime in the C locale. Unknown directives stay as they are.
func strftime(t time.Time, format string) string {
	layouts := map[byte]string{
		'Y': "2006", 'm': "01", 'd': "02", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'y': "06", 'B': "January", 'b': "Jan",
		'h': "Jan", 'A': "Monday", 'a': "Mon", 'p': "PM", 'j': "002", 'F': "2006-01-02", 'T': "15:04:05", 'R': "15:04",
		'D': "01/02/06", 'e': "_2", 'c': "Mon Jan _2 15:04:05 2006", 'x': "01/02/06", 'X': "15:04:05",
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
		case format[i] == 'w':
			fmt.Fprint(&b, int(t.Weekday()))
		case format[i] == 's':
			fmt.Fprint(&b, t.Unix())
		case format[i] == 'n', format[i] == 't':
			b.WriteByte("\n\t"[strings.IndexByte("nt", format[i])])
		case format[i] == 'z', format[i] == 'Z': // the time of now() is naive
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
