package output

import (
	"encoding/json"
	"fmt"
	"strings"
)

// xmlCalls reads one call of Qwen3-Coder:
//
//	<tool_call>
//	<function=f>
//	<parameter=a>
//	text
//	</parameter>
//	</function>
//	</tool_call>
//
// It makes JSON of the arguments: a value that is a string by the tool's schema is passed on as it comes, any other one
// at its end, as the JSON that it is or else as a string.
type xmlCalls struct {
	c     *calls
	state xmlState
	// tag that has begun, or the name that is being read.
	tag  []byte
	name string
	tool Tool
	// value of the present parameter, and the newline that may be its last byte.
	value      matcher
	isString   bool
	orNull     bool // a string or null, which is known at its end
	text       []byte
	newline    bool
	first      bool
	parameters int
	begun      bool
	closing    closing
}

type xmlState uint8

const (
	atFunction xmlState = iota
	inFunctionName
	atParameter // or at the end of the function
	inParameterName
	inValue
	behindFunction
)

const (
	functionTag      = "<function="
	parameterTag     = "<parameter="
	closeParameter   = "</parameter>"
	closeFunctionTag = "</function>"
)

// xmlBlock makes blocks that begin with a function's tag or, as models may leave out the first tag, inside of it.
func xmlBlock(at xmlState) func(*calls) block {
	return func(c *calls) block {
		return &xmlCalls{c: c, state: at, value: matcher{markers: []string{closeParameter}}, closing: closing{marker: closeCall}}
	}
}

func (x *xmlCalls) feed(b byte) verdict {
	switch x.state {
	case atFunction:
		return x.opening(b, functionTag)
	case atParameter:
		return x.opening(b, parameterTag, closeFunctionTag, closeCall) // models may leave out the function's
	case inFunctionName, inParameterName:
		switch {
		case b == '>':
			return x.named(string(trimmed(x.tag)))
		case b == '\n' || b == '<' || len(x.tag) == maxHead:
			return x.refuse()
		}
		x.tag = append(x.tag, b)
		return more
	case inValue:
		if x.value.feed(b, x.valueByte) < 0 {
			return more
		}
		x.endValue()
		x.state, x.tag = atParameter, x.tag[:0]
		return sure
	}
	return x.closing.feed(b)
}

// xmlName reports whether a name can stand in a tag.
func xmlName(name string) bool {
	return len(name) <= maxHead && !strings.ContainsAny(name, "<>\n") && string(trimmed([]byte(name))) == name
}

// opening reads a tag that is one of some.
func (x *xmlCalls) opening(b byte, tags ...string) verdict {
	if len(x.tag) == 0 && isSpace(b) {
		return more
	}
	x.tag = append(x.tag, b)
	for _, t := range tags {
		switch {
		case !strings.HasPrefix(t, string(x.tag)):
			continue
		case len(t) > len(x.tag):
			return more
		}
		x.tag = x.tag[:0]
		switch t {
		case functionTag:
			x.state = inFunctionName
			return more
		case parameterTag:
			x.state = inParameterName
			return more
		}
		x.begin()
		x.c.out.write(Arguments, '}')
		x.c.out.complete++
		x.state = behindFunction
		if t == closeCall {
			return done
		}
		return sure
	}
	return x.refuse()
}

// refuse ends the block, and the arguments of a call that has begun.
func (x *xmlCalls) refuse() verdict {
	if x.begun {
		x.c.out.write(Arguments, '}')
		x.c.out.complete++
	}
	return refused
}

// named takes the name of the function or of a parameter.
func (x *xmlCalls) named(name string) verdict {
	x.tag = x.tag[:0]
	if x.state == inFunctionName {
		known := false
		x.name, x.state = name, atParameter
		x.tool, known = x.c.tools[name]
		return want(known)
	}
	x.begin()
	if x.parameters > 0 {
		x.c.out.writeString(Arguments, ", ")
	}
	x.parameters++
	x.c.out.writeString(Arguments, `"`+inString(name)+`": `)
	x.first, x.newline, x.text = true, false, x.text[:0]
	orNull, isString := x.tool.Strings[name]
	x.isString, x.orNull = isString && !orNull, orNull
	if x.isString {
		x.c.out.write(Arguments, '"')
	}
	x.state = inValue
	return sure
}

func (x *xmlCalls) begin() {
	if !x.begun {
		x.begun = x.c.begin(x.name) // which is known
		x.c.out.write(Arguments, '{')
	}
}

// valueByte takes a byte of a value. A newline at either end belongs to the tags.
func (x *xmlCalls) valueByte(b byte) {
	first := x.first
	x.first = false
	if first && b == '\n' {
		return
	}
	if x.newline {
		x.newline = false
		x.write('\n')
	}
	if b == '\n' {
		x.newline = true
		return
	}
	x.write(b)
}

// write passes on a byte of a string, in JSON, or keeps one of another value.
func (x *xmlCalls) write(b byte) {
	if !x.isString {
		x.text = append(x.text, b)
		return
	}
	switch {
	case b == '"' || b == '\\':
		x.c.out.write(Arguments, '\\', b)
	case b == '\n':
		x.c.out.writeString(Arguments, `\n`)
	case b == '\t':
		x.c.out.writeString(Arguments, `\t`)
	case b < ' ':
		x.c.out.writeString(Arguments, fmt.Sprintf(`\u%04x`, b))
	default:
		x.c.out.write(Arguments, b)
	}
}

func (x *xmlCalls) endValue() {
	if x.isString {
		x.c.out.write(Arguments, '"')
		return
	}
	value := trimmed(x.text)
	if v, ok := constants[string(value)]; ok {
		value = []byte(v)
	}
	if !json.Valid(value) || x.orNull && string(value) != "null" {
		value = []byte(`"` + inString(string(x.text)) + `"`)
	}
	x.c.out.write(Arguments, value...)
}

func (x *xmlCalls) end() bool { return x.begun }

// constants are those of Python in JSON.
var constants = map[string]string{"True": "true", "False": "false", "None": "null"}
