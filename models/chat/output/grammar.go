package output

import (
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
)

// Function is what a call may be of.
type Function struct {
	Name string
	// Arguments is a JSON object. Members are its properties; nil with Listed false: they are not known.
	Arguments grammar.Expr
	Members   []schema.Member
	Listed    bool
}

// Calls is the grammar of calls of some functions: of what is behind the text that Begin returns for begun, where the
// prompt ends with that, or of whole calls. With many there may be several. nil: the format cannot say what a function
// takes.
func (f *Format) Calls(functions []Function, begins bool, begun string, many bool) grammar.Expr {
	var first, next []grammar.Expr
	for i := range functions {
		x := &functions[i]
		var args grammar.Expr
		if f.arguments == nil {
			args = grammar.Seq(grammar.Optional(grammar.Literal(" ")), x.Arguments, grammar.Literal("}"))
		} else if args = f.arguments(x); args == nil {
			return nil
		}
		name := x.Name
		if f.quoted {
			name = inString(name)
		}
		call := grammar.Seq(grammar.Literal(name+f.behindName), args)
		next = append(next, call)
		switch {
		case !begins || begun == "":
			first = append(first, call)
		case begun == x.Name:
			first = append(first, args)
		}
	}
	parts := []grammar.Expr{grammar.Any(first...)}
	if !begins {
		parts = append([]grammar.Expr{grammar.Literal(f.begin)}, parts...)
	}
	if many {
		parts = append(parts, grammar.Repeat(grammar.Seq(grammar.Literal(f.between), &grammar.Rule{Name: "call", Body: grammar.Any(next...)}), 0, -1))
	}
	return grammar.Seq(append(parts, grammar.Literal(f.end))...)
}

// TextOrCalls is any text and then calls, or a text without any; nil: the format has no text by which calls begin.
func (f *Format) TextOrCalls(functions []Function, many bool) grammar.Expr {
	if f.bare {
		return nil
	}
	marker := f.markers[0].start
	inner := *f
	inner.begin = strings.TrimPrefix(f.begin, marker)
	calls := inner.Calls(functions, false, "", many)
	if calls == nil {
		return nil
	}
	return grammar.Any(grammar.Without(marker), grammar.Seq(grammar.Until(marker), calls))
}

// Answer is what a model writes from where its prompt ends on, if its answer is one of a grammar: its reasoning, and then
// that.
func (f *ReasoningFormat) Answer(at Thinking, answer grammar.Expr) grammar.Expr {
	space := grammar.Repeat(grammar.Runes('\t', '\n', '\r', '\r', ' ', ' '), 0, 8)
	thought := grammar.Seq(grammar.Until(f.Close), space, answer)
	switch {
	case at == Answers:
		return answer
	case at == Thinks || f.always:
		return thought
	}
	return grammar.Any(answer, grammar.Seq(space, grammar.Literal(f.Open), thought))
}

// xmlArguments are tags of parameters. Strings stand in them as they are, in one line or several.
func xmlArguments(f *Function) grammar.Expr {
	if !f.Listed {
		return nil
	}
	parts := make([]grammar.Expr, len(f.Members), len(f.Members)+1)
	for i, m := range f.Members {
		end := grammar.Literal("\n" + closeParameter + "\n")
		value := grammar.Seq(m.Of, end)
		switch {
		case m.Text && len(m.Values) > 0:
			value = grammar.Seq(grammar.Literals(m.Values...), end)
			if m.Null {
				value = grammar.Any(value, grammar.Seq(grammar.Literal("null"), end))
			}
		case m.Text && m.Chars != nil:
			char := grammar.Repeat(grammar.Runes(0, utf8.MaxRune), 0, -1)
			value = grammar.Except(m.Chars, grammar.Seq(char, grammar.Literal(closeParameter), char))
			if m.Null {
				value = grammar.Any(value, grammar.Literal("null"))
			}
			value = grammar.Seq(value, end)
		case m.Text:
			value = grammar.Seq(grammar.Until(closeParameter), grammar.Literal("\n"))
		}
		value = grammar.Seq(grammar.Literal(parameterTag+m.Name+">\n"), value)
		if strings.ContainsAny(m.Name, "><\n") {
			return nil
		}
		if !m.Required {
			value = grammar.Optional(value)
		}
		parts[i] = value
	}
	return grammar.Seq(append(parts, grammar.Literal(closeFunctionTag))...)
}

// pythonKeywords are arguments by name, whose values are JSON, which the parser of calls takes for Python's.
func pythonKeywords(f *Function) grammar.Expr {
	if !f.Listed {
		return nil
	}
	items := make([]grammar.Item, len(f.Members))
	for i, m := range f.Members {
		if m.Name == "" || strings.IndexFunc(m.Name, func(r rune) bool { return r < 0x80 && !isNameByte(byte(r)) }) >= 0 {
			return nil
		}
		items[i] = grammar.Item{Of: grammar.Seq(grammar.Literal(m.Name+"="), m.Of), Optional: !m.Required}
	}
	return grammar.Seq(grammar.Separated(grammar.Literal(", "), items...), grammar.Literal(")"))
}
