package output

import (
	"bytes"
	"encoding/json"
	"slices"
)

// jsonCalls reads calls that are JSON objects: one or a list, and then the end marker.
type jsonCalls struct {
	c       *calls
	state   jsonState
	list    bool
	object  object
	closing closing
	// separated: semicolons separate objects, and nothing ends them.
	separated bool
	// read is the number of calls.
	read int
}

type jsonState uint8

const (
	atObject jsonState = iota // an object or, first of all, a list is next
	inObject
	behindItem // of a list
	atClose
)

// jsonBlock makes blocks that end with a marker, if they have one. With list they begin inside of one.
func jsonBlock(end string, list, separated bool) func(*calls) block {
	return func(c *calls) block {
		return &jsonCalls{c: c, list: list, closing: closing{marker: end}, separated: separated}
	}
}

func (j *jsonCalls) feed(b byte) verdict {
	switch j.state {
	case inObject:
		switch j.object.feed(b) {
		case more:
			return more
		case done:
			return j.behindObject()
		}
		if !j.object.begun {
			return refused
		}
		// What is wrong behind the arguments, such as a missing brace, does not spoil the call.
		j.c.doubt()
		if j.behindObject() == done {
			return refused
		}
		return j.feed(b)
	case behindItem:
		switch {
		case isSpace(b):
			return more
		case b == ',':
			j.state = atObject
			return sure
		case b == ']':
			j.list = false
			return j.next()
		}
		return refused
	case atClose:
		switch {
		case j.separated && b == ';' || b == '}' && j.closing.marker != "" && j.closing.matched == 0:
			if b == ';' {
				j.state = atObject
			}
			return more
		case b == '{' && j.closing.marker != "" && j.closing.matched == 0:
			j.state = atObject
			return j.feed(b)
		}
		return j.closing.feed(b)
	}
	switch {
	case isSpace(b):
		return more
	case b == '{':
		j.state, j.object = inObject, object{c: j.c}
		return more
	case b == '[' && !j.list && j.read == 0:
		j.list = true
		return more
	}
	return refused
}

// behindObject is the verdict on the last byte of an object.
func (j *jsonCalls) behindObject() verdict {
	j.read++
	j.c.out.complete++
	return j.next()
}

// next is the verdict on the last byte of an object or of the list.
func (j *jsonCalls) next() verdict {
	switch {
	case j.list:
		j.state = behindItem
	case j.closing.marker == "" && !j.separated:
		return done
	default:
		j.state = atClose
	}
	return sure
}

func (j *jsonCalls) end() bool { return j.read > 0 && j.state != inObject || j.object.begun }

// object reads one call:
//
//	{"name": "f", "arguments": {…}}
//
// with the members in any order, further ones, "parameters" in place of "arguments", arguments as a string that has
// them as JSON, and all of it as the member "function" of another object, as in OpenAI's API.
type object struct {
	c     *calls
	state objectState
	// key of the present member, and text of the present string, quotes included.
	key  string
	text []byte
	scan scanner
	// inner: this is the member "function". filled: it has had a member.
	inner, filled bool

	name  string
	named bool
	// args came before the name.
	args    []byte
	hasArgs bool
	begun   bool
}

type objectState uint8

const (
	atKey objectState = iota
	inKey
	atColon
	atValue
	inName
	inArguments
	inQuotedArguments
	inNull // arguments
	inOther
	inScalar // another member's
	behindValue
)

func (o *object) feed(b byte) verdict {
	switch o.state {
	case atKey:
		switch {
		case isSpace(b):
			return more
		case b == '"':
			o.string(inKey)
			return more
		case b == '}' && !o.filled:
			return o.close()
		}
		return refused
	case inKey:
		text, ok := o.quoted(b)
		if ok {
			o.key, o.filled, o.state = text, true, atColon
		}
		return more
	case atColon, behindValue, atValue:
		if isSpace(b) {
			return more
		}
	case inName:
		if name, ok := o.quoted(b); ok {
			o.name, o.named, o.state = name, true, behindValue
			if !o.hasArgs {
				_, known := o.c.tools[name]
				return want(known)
			}
			return want(o.begin())
		}
		return more
	case inArguments:
		o.argument(b)
		if o.scan.feed(b) {
			o.state = behindValue
		}
		return more
	case inQuotedArguments:
		if text, ok := o.quoted(b); ok {
			return want(o.whole([]byte(text)))
		}
		return more
	case inNull:
		if o.text = append(o.text, b); string(o.text) == "null" {
			return want(o.whole([]byte("{}")))
		}
		return want(len(o.text) < len("null"))
	case inOther:
		if o.scan.feed(b) {
			o.state = behindValue
		}
		return more
	case inScalar:
		if !isSpace(b) && b != ',' && b != '}' {
			return more
		}
		o.state = behindValue
		return o.feed(b)
	}
	switch {
	case o.state == atColon:
		o.state = atValue
		return want(b == ':')
	case o.state == atValue:
		return o.value(b)
	case b == ',':
		o.state = atKey
		return more
	case b == '}':
		return o.close()
	}
	return refused
}

func want(ok bool) verdict {
	if ok {
		return more
	}
	return refused
}

// value reads the first byte of a member's value.
func (o *object) value(b byte) verdict {
	o.scan = scanner{}
	switch {
	case o.key == "name" && !o.named:
		o.string(inName)
		return want(b == '"')
	case (o.key == "arguments" || o.key == "parameters") && !o.hasArgs:
		switch b {
		case '{':
			o.hasArgs, o.state = true, inArguments
			o.scan.feed(b)
			if o.named && !o.begin() {
				return refused
			}
			o.argument(b)
			return more
		case '"':
			o.string(inQuotedArguments)
			return more
		case 'n':
			o.state, o.text = inNull, append(o.text[:0], b)
			return more
		}
		return refused
	case o.key == "function" && b == '{' && !o.inner:
		o.inner, o.filled, o.state = true, false, atKey
		return more
	case b == '"' || b == '{' || b == '[':
		o.scan.feed(b)
		o.state = inOther
		return more
	case b == ',' || b == '}' || b == ']' || b == ':':
		return refused
	}
	o.state = inScalar
	return more
}

// string begins one, whose first byte is a quote.
func (o *object) string(s objectState) {
	o.state, o.text, o.scan = s, append(o.text[:0], '"'), scanner{}
	o.scan.feed('"')
}

// quoted reads a byte of a string, and returns it at its end. One that is not valid reads as empty.
func (o *object) quoted(b byte) (text string, ok bool) {
	o.text = append(o.text, b)
	if !o.scan.feed(b) {
		return "", false
	}
	if json.Unmarshal(o.text, &text) != nil {
		text = ""
	}
	return text, true
}

// argument takes a byte of the arguments.
func (o *object) argument(b byte) {
	if o.begun {
		o.c.out.write(Arguments, b)
	} else {
		o.args = append(o.args, b)
	}
}

// whole takes arguments in one piece; false where they are no object.
func (o *object) whole(args []byte) bool {
	args = trimmed(args)
	if !json.Valid(args) || args[0] != '{' {
		return false
	}
	o.hasArgs, o.state = true, behindValue
	if o.named && !o.begin() {
		return false
	}
	for _, b := range args {
		o.argument(b)
	}
	return true
}

// begin starts the call, with the arguments that came before its name; false where there is no such tool.
func (o *object) begin() bool {
	if o.begun = o.c.begin(o.name); o.begun {
		o.c.out.write(Arguments, o.args...)
	}
	return o.begun
}

// close ends the object, or that within.
func (o *object) close() verdict {
	switch {
	case o.inner:
		o.inner, o.filled, o.state = false, true, behindValue
		return more
	case o.begun:
		return done
	}
	return refused
}

// scanner finds the end of a JSON string, object or list. It reads no other values, and checks nothing but quotes and
// the number of brackets.
type scanner struct {
	depth    int
	inString bool
	escaped  bool
}

// feed reads a byte, the first one included; true: it is the last.
func (s *scanner) feed(b byte) bool {
	switch {
	case s.escaped:
		s.escaped = false
	case s.inString:
		s.escaped, s.inString = b == '\\', b != '"'
		return !s.inString && s.depth == 0
	case b == '"':
		s.inString = true
	case b == '{' || b == '[':
		s.depth++
	case b == '}' || b == ']':
		s.depth--
		return s.depth == 0
	}
	return false
}

// mistralCalls reads what is behind [TOOL_CALLS]: a list of objects or, of newer models, a name and the arguments.
//
//	[TOOL_CALLS] [{"name": "f", "arguments": {…}}]
//	[TOOL_CALLS]f[ARGS]{…}
type mistralCalls struct {
	c    *calls
	json *jsonCalls // nil: the call has another form, or it is not known yet
	head []byte     // name and tokens up to the arguments
	scan scanner
	args bool
}

// maxHead is the maximum length of what is between [TOOL_CALLS] and arguments, in bytes.
const maxHead = 512

func mistralBlock(c *calls) block { return &mistralCalls{c: c} }

func (m *mistralCalls) feed(b byte) verdict {
	switch {
	case m.json != nil:
		return m.json.feed(b)
	case m.args:
		m.c.out.write(Arguments, b)
		if m.scan.feed(b) {
			m.c.out.complete++
			return done
		}
		return more
	case len(m.head) == 0 && isSpace(b):
		return more
	case len(m.head) == 0 && (b == '[' || b == '{'):
		m.json = &jsonCalls{c: m.c}
		return m.json.feed(b)
	case b == '{':
		name, tokens := m.head, []byte(nil)
		if i := slices.Index(m.head, '['); i >= 0 {
			name, tokens = m.head[:i], trimmed(m.head[i:])
		}
		if len(tokens) > 0 && !bytes.HasSuffix(tokens, []byte(argumentsToken)) || !m.c.begin(string(trimmed(name))) {
			return refused
		}
		m.args = true
		m.scan.feed(b)
		m.c.out.write(Arguments, b)
		return more
	case len(m.head) == maxHead:
		return refused
	}
	m.head = append(m.head, b)
	return more
}

func (m *mistralCalls) end() bool { return m.json != nil && m.json.end() || m.args }
