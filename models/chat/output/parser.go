package output

import (
	"bytes"
	"slices"
	"strings"
)

// Kind is what a Delta brings.
type Kind uint8

// The kinds.
const (
	// Content is text of the answer.
	Content Kind = iota
	// Reasoning is text of what the model writes before its answer.
	Reasoning
	// Call begins a tool call: Text is the function's name.
	Call
	// Arguments are text of the arguments of the last call, which all together are a JSON object as the model wrote it.
	Arguments
)

// Delta is a part of an output. Deltas of one kind that follow each other, of the same call, are one text.
type Delta struct {
	Kind Kind
	Text string
	// Index of the call, from 0, of Call and Arguments.
	Index int
}

// Tool is a function that a request lets the model call.
type Tool struct {
	// Strings are the parameters whose values are strings by the tool's schema; true: or null. Formats that do not
	// quote values need them.
	Strings map[string]bool
}

// Thinking is where a model is with its reasoning when its output begins.
type Thinking uint8

// The cases.
const (
	// MayThink: the output begins with reasoning if the model writes the opening tag.
	MayThink Thinking = iota
	// Thinks: the prompt ends inside of reasoning.
	Thinks
	// Answers: the prompt ends behind reasoning.
	Answers
)

// Options of a parser.
type Options struct {
	// Format of tool calls; nil: there are none, and all is content.
	Format *Format
	// Tools by name: calls of others are content.
	Tools map[string]Tool
	// Reasoning says how reasoning is marked; nil: it is a part of the content.
	Reasoning *ReasoningFormat
	// Thinking is where the prompt ends.
	Thinking Thinking
	// Begun is the text of a call with which the prompt ended, see Format.Begin.
	Begun string
}

// Parser reads one output. It belongs to one goroutine.
type Parser struct {
	out      sink
	thinking *thinking // nil: all is content
	calls    *calls    // nil: content is not searched for calls
}

// New returns a parser at the beginning of an output.
func New(o Options) *Parser {
	p := &Parser{}
	if o.Format != nil {
		p.calls = newCalls(&p.out, o.Format, o.Tools)
		for i := range len(o.Begun) {
			p.calls.feed(o.Begun[i])
		}
	}
	if o.Reasoning != nil && o.Thinking != Answers && o.Begun == "" {
		p.thinking = newThinking(p, o.Reasoning, o.Thinking)
	}
	return p
}

// Push reads the next piece of the output, and returns what is certain now.
func (p *Parser) Push(text string) []Delta {
	for i := range len(text) {
		if p.thinking != nil {
			p.thinking.feed(text[i])
		} else {
			p.content(text[i])
		}
	}
	return p.out.take()
}

// End ends the output, and returns what was held back.
func (p *Parser) End() []Delta {
	if p.thinking != nil {
		p.thinking.end()
	}
	if p.calls != nil {
		p.calls.end()
	}
	return p.out.take()
}

// Calls is the number of calls that have begun.
func (p *Parser) Calls() int { return p.out.calls }

// Complete is the number of calls that are complete.
func (p *Parser) Complete() int { return p.out.complete }

// content reads a byte that is no reasoning.
func (p *Parser) content(b byte) {
	if p.calls != nil {
		p.calls.feed(b)
	} else {
		p.out.write(Content, b)
	}
}

// sink collects deltas.
type sink struct {
	deltas []Delta
	kind   Kind
	text   []byte // of the last delta
	// calls that have begun, and that are complete.
	calls, complete int
}

func (s *sink) write(k Kind, text ...byte) {
	if len(text) == 0 {
		return
	}
	if s.kind != k {
		s.flush()
		s.kind = k
	}
	s.text = append(s.text, text...)
}

func (s *sink) writeString(k Kind, text string) { s.write(k, []byte(text)...) }

// begin starts a call.
func (s *sink) begin(name string) {
	s.flush()
	s.deltas = append(s.deltas, Delta{Kind: Call, Text: name, Index: s.calls})
	s.calls++
}

func (s *sink) flush() {
	if len(s.text) == 0 {
		return
	}
	d := Delta{Kind: s.kind, Text: string(s.text)}
	if s.kind == Arguments {
		d.Index = s.calls - 1
	}
	s.deltas = append(s.deltas, d)
	s.text = s.text[:0]
}

func (s *sink) take() []Delta {
	s.flush()
	d := s.deltas
	s.deltas = nil
	return d
}

// Join is the text of all deltas of a kind.
func Join(deltas []Delta, k Kind) string {
	var b strings.Builder
	for _, d := range deltas {
		if d.Kind == k {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

// matcher finds the first of some markers in text that comes byte by byte. What may become a marker it holds.
type matcher struct {
	markers []string
	held    []byte
}

// feed reads a byte. It passes the bytes that belong to no marker to pass, and returns the index of the marker that
// is complete, or -1.
func (m *matcher) feed(b byte, pass func(byte)) int {
	m.held = append(m.held, b)
	for len(m.held) > 0 {
		for i, s := range m.markers {
			if len(s) >= len(m.held) && s[:len(m.held)] == string(m.held) {
				if len(s) > len(m.held) {
					return -1
				}
				m.held = m.held[:0]
				return i
			}
		}
		first := m.held[0]
		m.held = append(m.held[:0], m.held[1:]...)
		pass(first)
	}
	return -1
}

// end passes what is held.
func (m *matcher) end(pass func(byte)) {
	for _, b := range m.held {
		pass(b)
	}
	m.held = m.held[:0]
}

func isSpace(b byte) bool { return b == ' ' || b == '\n' || b == '\t' || b == '\r' }

// calls searches content for calls. Outside of them it is a matcher of markers; behind one, a block reads all bytes
// until it is done, or refuses one.
type calls struct {
	out    *sink
	format *Format
	tools  map[string]Tool
	find   matcher
	// space before what comes next, which is dropped where that is a call. behind: nothing but space came since
	// the last call.
	space  []byte
	behind bool
	// block reads what is behind a marker; nil outside. raw are its bytes since it was last certain, marker and space
	// before it included, and certain says that nothing has to be kept.
	block   block
	raw     []byte
	certain bool
	// started: the text has a byte that is no space.
	started bool
}

// verdict of a block on a byte.
type verdict uint8

const (
	more    verdict = iota // the byte belongs to the block, which goes on
	sure                   // the same, and all up to it belongs to calls
	done                   // the block ends with the byte
	refused                // the block has ended before the byte
)

// block reads what is behind a marker.
type block interface {
	feed(b byte) verdict
	// end ends the block behind the last byte that it has not refused. isCall: the bytes since it was last certain are
	// no content.
	end() (isCall bool)
}

func newCalls(out *sink, f *Format, tools map[string]Tool) *calls {
	c := &calls{out: out, format: f, tools: tools}
	for _, m := range f.markers {
		c.find.markers = append(c.find.markers, m.start)
	}
	return c
}

func (c *calls) feed(b byte) {
	if c.block == nil {
		c.outside(b)
		return
	}
	switch c.block.feed(b) {
	case more:
		if !c.certain {
			c.raw = append(c.raw, b)
		}
	case sure:
		c.doubt()
	case done:
		c.block, c.behind = nil, true
	case refused:
		isCall := c.block.end()
		c.block, c.behind = nil, isCall
		if isCall {
			// What is kept is short, but for white space: it may begin a marker.
			for _, b := range slices.Clone(c.raw) {
				c.feed(b)
			}
		} else {
			c.spill()
		}
		c.feed(b)
	}
}

// outside reads a byte that is in no block.
func (c *calls) outside(b byte) {
	if !c.started && !isSpace(b) {
		c.started = true
		if c.format.bare && (b == '{' || b == '[') {
			c.open("", jsonBlock("", false, true))
			c.feed(b)
			return
		}
	}
	if i := c.find.feed(b, c.pass); i >= 0 {
		c.open(c.format.markers[i].start, c.format.markers[i].block)
	}
}

// open starts a block behind a marker.
func (c *calls) open(marker string, b func(*calls) block) {
	c.raw, c.certain = append(append(c.raw[:0], c.space...), marker...), false
	c.space = c.space[:0]
	c.block = b(c)
}

// pass takes a byte that belongs to no marker.
func (c *calls) pass(b byte) {
	if isSpace(b) {
		c.space = append(c.space, b)
		return
	}
	c.out.write(Content, c.space...)
	c.out.write(Content, b)
	c.space, c.behind = c.space[:0], false
}

// spill makes content of what a block has read in vain.
func (c *calls) spill() {
	for _, b := range c.raw {
		c.pass(b)
	}
	c.raw = c.raw[:0]
}

// begin starts a call, unless there is no such tool. From now on the block is certain.
func (c *calls) begin(name string) bool {
	if _, ok := c.tools[name]; !ok {
		return false
	}
	c.out.begin(name)
	c.raw, c.certain = c.raw[:0], true
	return true
}

// doubt says that what came belongs to calls, and what comes may not: it is kept.
func (c *calls) doubt() { c.raw, c.certain = c.raw[:0], false }

func (c *calls) end() {
	if c.block != nil {
		isCall := c.block.end()
		if c.block, c.behind = nil, c.behind || isCall; !isCall {
			c.spill()
		}
	}
	c.find.end(c.pass)
	if !c.behind {
		c.out.write(Content, c.space...)
	}
	c.space = c.space[:0]
}

// closing reads what is behind the last call of a block: white space, and the end marker.
type closing struct {
	marker  string
	matched int
}

func (c *closing) feed(b byte) verdict {
	switch {
	case c.matched == 0 && isSpace(b):
		return more
	case c.matched < len(c.marker) && b == c.marker[c.matched]:
		if c.matched++; c.matched == len(c.marker) {
			return done
		}
		return more
	}
	return refused
}

// trimmed is text without the white space around it.
func trimmed(text []byte) []byte { return bytes.Trim(text, " \n\t\r") }
