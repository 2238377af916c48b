package output

import (
	"slices"
	"strings"
)

// ReasoningFormat is how a family of models marks its reasoning.
type ReasoningFormat struct {
	// Name, as vLLM's parser.
	Name string
	// Open and Close are the tags around it; text has to keep them where they are special tokens.
	Open, Close string

	// always: the output begins with reasoning, with or without the opening tag.
	always bool
}

// The formats of reasoning.
var (
	// Qwen3 is that of Qwen3 and of most others: reasoning is between tags, of which the prompt may have the first.
	Qwen3 = &ReasoningFormat{Name: "qwen3", Open: "<think>", Close: "</think>"}
	// DeepSeekR1 is that of models that always reason, and may leave out the first tag.
	DeepSeekR1 = &ReasoningFormat{Name: "deepseek_r1", Open: "<think>", Close: "</think>", always: true}
)

// FindReasoning returns the format of a name; nil if there is none.
func FindReasoning(name string) *ReasoningFormat {
	for _, f := range []*ReasoningFormat{Qwen3, DeepSeekR1} {
		if f.Name == name {
			return f
		}
	}
	return nil
}

// ReasoningNames are the names of all formats of reasoning.
func ReasoningNames() []string { return []string{DeepSeekR1.Name, Qwen3.Name} }

// DetectReasoning returns how a model marks its reasoning, by its chat template; nil where it does not. A template may
// have either tag: that of OLMo 3 Think only begins the reasoning.
func DetectReasoning(mentions func(text string) bool) *ReasoningFormat {
	if mentions(Qwen3.Open) || mentions(Qwen3.Close) {
		return Qwen3
	}
	return nil
}

// After says where a prompt leaves the model.
func (f *ReasoningFormat) After(prompt string) Thinking {
	prompt = strings.TrimRight(prompt, " \n\t\r")
	switch {
	case strings.HasSuffix(prompt, f.Open):
		return Thinks
	case strings.HasSuffix(prompt, f.Close):
		return Answers
	}
	return MayThink
}

// thinking splits reasoning from what is behind it. White space at the ends of reasoning, and in front of what
// follows it, is dropped.
type thinking struct {
	p     *Parser
	f     *ReasoningFormat
	state thinkingState
	open  matcher
	close matcher
	space []byte // before what comes next
	wrote bool   // reasoning
}

type thinkingState uint8

const (
	beforeThinking thinkingState = iota // the opening tag may come
	insideThinking
	behindThinking // white space is dropped
	answering
)

func newThinking(p *Parser, f *ReasoningFormat, at Thinking) *thinking {
	t := &thinking{p: p, f: f, open: matcher{markers: []string{f.Open}}, close: matcher{markers: []string{f.Close}}}
	if at == Thinks {
		t.state = insideThinking
	}
	return t
}

func (t *thinking) feed(b byte) {
	switch t.state {
	case beforeThinking:
		if len(t.open.held) == 0 && isSpace(b) {
			t.space = append(t.space, b)
			return
		}
		none := false
		if t.open.feed(b, func(b byte) { none = true; t.space = append(t.space, b) }) >= 0 {
			t.state, t.space = insideThinking, t.space[:0]
			return
		}
		if none {
			t.decide()
		}
	case insideThinking:
		if t.close.feed(b, t.reason) >= 0 {
			t.state, t.space = behindThinking, t.space[:0]
		}
	case behindThinking:
		if isSpace(b) {
			return
		}
		t.state = answering
		fallthrough
	default:
		t.p.content(b)
	}
}

// decide goes on without the opening tag: what came is the beginning of the answer or, of a model that always reasons,
// of its reasoning.
func (t *thinking) decide() {
	came := slices.Concat(t.space, t.open.held)
	t.space, t.open.held = nil, nil
	t.state = answering
	if t.f.always {
		t.state = insideThinking
	}
	for _, b := range came {
		t.feed(b)
	}
}

// reason takes a byte of reasoning.
func (t *thinking) reason(b byte) {
	if isSpace(b) {
		if t.wrote {
			t.space = append(t.space, b)
		}
		return
	}
	t.p.out.write(Reasoning, t.space...)
	t.p.out.write(Reasoning, b)
	t.space, t.wrote = t.space[:0], true
}

func (t *thinking) end() {
	if t.state == beforeThinking {
		t.decide()
	}
	if t.state == insideThinking {
		t.close.end(t.reason)
	}
}
