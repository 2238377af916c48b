package server

import (
	"strings"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat/output"
)

// part is one part of an assistant's message: reasoning, text, or a call.
type part struct {
	kind output.Kind // Content, Reasoning or Call
	// index in the message.
	index int
	// id of a call, and name of its function.
	id, name string
	// text so far; of a call its arguments.
	text string
}

// partEvents are told of the parts of a message as they come, one after another.
type partEvents interface {
	begin(p *part)
	more(p *part, text string)
	end(p *part)
}

// parts divides an assistant's message into its parts, for APIs whose messages are lists of them.
type parts struct {
	req    *chatRequest
	parser *output.Parser
	to     partEvents
	list   []*part
	// open: the last of the list is not complete.
	open bool
	// blank is white space with which a part may begin: one of white space alone is none.
	blank     string
	blankKind output.Kind
}

func newParts(req *chatRequest, to partEvents) *parts {
	return &parts{req: req, parser: req.parser(), to: to}
}

// push adds an update. The last one ends the message.
func (p *parts) push(u *engine.Update) {
	deltas := p.parser.Push(u.Text)
	if u.Finish != "" {
		deltas = append(deltas, p.parser.End()...)
	}
	for _, d := range deltas {
		p.add(d)
	}
	if u.Finish != "" {
		p.close()
	}
}

func (p *parts) add(d output.Delta) {
	switch d.Kind {
	case output.Reasoning, output.Content:
		if d.Kind == output.Reasoning && p.req.withoutReasoning {
			return
		}
		if p.open && p.last().kind == d.Kind {
			p.write(d.Text)
			return
		}
		if p.blankKind != d.Kind {
			p.blank = ""
		}
		p.blank, p.blankKind = p.blank+d.Text, d.Kind
		if strings.TrimSpace(p.blank) != "" {
			text := p.blank
			p.begin(&part{kind: d.Kind})
			p.write(text)
		}
	case output.Call:
		if !p.req.firstCall || d.Index == 0 {
			p.begin(&part{kind: output.Call, id: p.req.served.newCallID(), name: d.Text})
		}
	case output.Arguments:
		if !p.req.firstCall || d.Index == 0 {
			p.write(d.Text)
		}
	}
}

func (p *parts) last() *part { return p.list[len(p.list)-1] }

func (p *parts) begin(one *part) {
	p.close()
	p.blank, p.open = "", true
	one.index = len(p.list)
	p.list = append(p.list, one)
	p.to.begin(one)
}

func (p *parts) write(text string) {
	one := p.last()
	one.text += text
	p.to.more(one, text)
}

func (p *parts) close() {
	if !p.open {
		return
	}
	if one := p.last(); one.kind == output.Call && strings.TrimSpace(one.text) == "" {
		p.write("{}") // of a function without parameters
	}
	p.open = false
	p.to.end(p.last())
}

// called reports whether the message has calls.
func (p *parts) called() bool {
	for _, one := range p.list {
		if one.kind == output.Call {
			return true
		}
	}
	return false
}

// noEvents is for messages that are not streamed.
type noEvents struct{}

func (noEvents) begin(*part)        {}
func (noEvents) more(*part, string) {}
func (noEvents) end(*part)          {}

// wholeParts are those of a message that is complete.
func wholeParts(req *chatRequest, u *engine.Update) *parts {
	p := newParts(req, noEvents{})
	p.push(u)
	return p
}
