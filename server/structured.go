package server

import (
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
)

// structure is what a request wants its completion to be; the zero value: anything.
type structure struct {
	// kind is a member of structured_outputs: json, json_object, regex, choice or grammar.
	kind string
	// text is the schema, the expression or the grammar; choices those of choice.
	text    string
	choices []string
	// space is the pattern of white space in JSON.
	space         string
	compact, open bool
	// param is the member of the body that errors name.
	param string
}

const (
	// maxChoices is the maximum number of choices, maxSchema the maximum length of a schema in bytes.
	maxChoices = 1 << 12
	maxSchema  = 256 << 10
)

// parseResponseFormat parses OpenAI's response_format.
func parseResponseFormat(o *object, c *common) {
	f := o.sub("response_format")
	if f == nil {
		return
	}
	var kind string
	f.text("type", &kind)
	switch kind {
	case "text":
	case "json_object":
		c.structure = structure{kind: kind, param: f.path}
	case "json_schema":
		s := f.sub("json_schema")
		if s == nil {
			f.fail("json_schema", "missing_required_parameter", "Missing required parameter: '%s'.", f.name("json_schema"))
			break
		}
		c.structure = parseSchema(s)
		f.close(s)
	case "structural_tag":
		f.unsupported("type", `"structural_tag" is not; tools constrain the calls of a model, and structured_outputs the whole completion`)
	default:
		f.fail("type", "invalid_value", `Invalid value for '%s': it must be "text", "json_object" or "json_schema".`, f.name("type"))
	}
	o.close(f)
}

// parseSchema parses a schema with its name.
func parseSchema(s *object) structure {
	var name string
	var strict bool
	s.text("name", &name)
	s.text("description", &name)
	s.flag("strict", &strict) // every schema is
	raw, ok := s.pop("schema")
	if !ok {
		s.fail("schema", "missing_required_parameter", "Missing required parameter: '%s'.", s.name("schema"))
	}
	return structure{kind: "json", text: string(raw), param: s.name("schema")}
}

// parseFormat parses the format of a text as Anthropic's Messages API and OpenAI's Responses API have it, and
// returns it as it came, nil if there is none.
func parseFormat(o *object, member string, c *common) json.RawMessage {
	raw, ok := o.pop(member)
	if !ok || isNull(raw) {
		return nil
	}
	f := &object{path: o.name(member)}
	f.parse(raw, "'"+f.path+"'")
	var kind string
	f.text("type", &kind)
	switch kind {
	case "text":
	case "json_object":
		c.structure = structure{kind: kind, param: f.path}
	case "json_schema":
		c.structure = parseSchema(f)
	default:
		f.fail("type", "invalid_value", `Invalid value for '%s': it must be "text", "json_object" or "json_schema".`, f.name("type"))
	}
	o.close(f)
	return raw
}

// parseStructuredOutputs parses vLLM's structured_outputs.
func parseStructuredOutputs(o *object, c *common) {
	f := o.sub("structured_outputs")
	if f == nil {
		return
	}
	s := structure{}
	var kinds []string
	one := func(kind string) {
		kinds = append(kinds, kind)
		s.kind, s.param = kind, f.name(kind)
	}
	if raw, ok := f.pop("json"); ok {
		one("json")
		if s.text = string(raw); kindOf(raw) == "a string" {
			s.text = unquote(raw)
		}
	}
	if f.text("regex", &s.text) {
		one("regex")
	}
	if items, ok := f.list("choice", "an array of strings", maxChoices); ok {
		one("choice")
		if len(items) == 0 {
			f.fail("choice", "invalid_value", "Invalid value for '%s': it is empty.", f.name("choice"))
		}
		for i, item := range items {
			if kindOf(item) != "a string" {
				f.wrongType(fmt.Sprintf("choice[%d]", i), "a string", item)
				break
			}
			s.choices = append(s.choices, unquote(item))
		}
	}
	if f.text("grammar", &s.text) {
		one("grammar")
	}
	var object, others bool
	off := f.flag("json_object", &object) && !object
	if object {
		one("json_object")
	}
	f.flag("disable_any_whitespace", &s.compact)
	if f.flag("disable_additional_properties", &others) {
		s.open = !others
	}
	f.text("whitespace_pattern", &s.space)
	f.settle(inStructured)
	switch {
	case len(kinds) > 1:
		f.fail(kinds[1], "invalid_value", "Invalid value for '%s': it must have one of %s, not both.", f.path, strings.Join(kinds, " and "))
	case len(kinds) == 1 && c.structure.kind != "":
		f.fail(kinds[0], "invalid_value", "Invalid value for '%s': 'response_format' restricts the completion, too. Give one of them.", f.path)
	case len(kinds) == 1:
		c.structure = s
	}
	if o.close(f); len(kinds) == 0 && !off {
		o.fail("structured_outputs", "invalid_value", "Invalid value for '%s': it must have one of json, json_object, regex, choice and grammar.", f.path)
	}
}

// grammars compiles the grammars of one model's requests, and keeps the latest.
type grammars struct {
	once       sync.Once
	vocabulary *grammar.Vocabulary
	kept       []int32 // special tokens that are a part of texts

	mu     sync.Mutex
	byKey  map[grammarKey]*list.Element // of *compiled
	latest list.List
}

// grammarKey is the hash of all that a grammar depends on.
type grammarKey [sha256.Size]byte

// compiled is a grammar that is compiled once, unless the request that compiles it ends before: then the next one does.
type compiled struct {
	key  grammarKey
	turn chan struct{} // has an item while a request compiles it, or looks at what was compiled
	done bool
	g    *grammar.Grammar
	err  error
}

// maxGrammars is the number of grammars that are kept, each with masks and states of up to some 100 MiB, of a real
// vocabulary and schema about two.
const maxGrammars = 32

// open makes the vocabulary, the first time: before requests, or with the first one.
func (s *grammars) open(m *Model) {
	s.once.Do(func() {
		marks := map[string]bool{}
		if m.Calls != nil {
			for _, t := range m.Calls.Tokens {
				marks[t] = true
			}
		}
		if m.Reasoning != nil {
			marks[m.Reasoning.Open], marks[m.Reasoning.Close] = true, true
		}
		var tokens []grammar.Token
		for id := range int32(min(m.Vocab, m.Tokenizer.VocabSize())) {
			text, first, special, ok := m.Tokenizer.Piece(id)
			spelled, _ := m.Tokenizer.Token(id)
			switch {
			case !ok || special && !marks[spelled]:
				continue
			case special:
				s.kept = append(s.kept, id)
			}
			tokens = append(tokens, grammar.Token{ID: id, Text: text, First: first})
		}
		s.vocabulary = grammar.NewVocabulary(m.Vocab, tokens)
	})
}

// get compiles the grammar that expr describes, unless one of the same key is kept. It ends with the context.
func (s *grammars) get(ctx context.Context, parts []string, expr func() (grammar.Expr, error)) (*grammar.Grammar, error) {
	key := grammarKey(sha256.Sum256(fmt.Appendf(nil, "%q", parts))) // parts may be as large as a request, and contain anything
	s.mu.Lock()
	e := s.byKey[key]
	if e == nil {
		e = s.latest.PushFront(&compiled{key: key, turn: make(chan struct{}, 1)})
		s.byKey[key] = e
		if s.latest.Len() > maxGrammars {
			last := s.latest.Back()
			delete(s.byKey, s.latest.Remove(last).(*compiled).key)
		}
	}
	s.latest.MoveToFront(e)
	s.mu.Unlock()
	c := e.Value.(*compiled)
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if !c.done {
		x, err := expr()
		if err == nil {
			if c.g, _, err = grammar.NewCounted(ctx, x, s.vocabulary); err == nil {
				c.g.Warm()
			}
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		c.err, c.done = err, true
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.g, c.g.Err()
}

// constrain sets the grammar of a request: that of its structure, and of the calls that c requires or, with strict tools,
// allows. c is nil for a completion without a conversation.
func (m *Model) constrain(ctx context.Context, p *engine.Params, s *structure, c *conversation, oneCall bool) error {
	calls := c != nil && m.callFormat(c) != nil && (c.choice.forced || c.strict || s.kind != "")
	if s.kind == "" && !calls {
		return nil
	}
	if m.Tokenizer == nil || m.Vocab == 0 {
		return badRequest(s.param, "unsupported_parameter", "'%s' is not supported: the model has no tokenizer.", s.param)
	}
	g := m.grammars
	g.open(m)
	if c != nil {
		c.structured = s.kind != ""
	}
	key := []string{s.kind, s.text, s.space, strconv.FormatBool(s.compact), strconv.FormatBool(s.open), fmt.Sprintf("%q", s.choices)}
	if c != nil {
		key = append(key, strconv.Itoa(int(c.thinking)))
	}
	if calls {
		key = append(key, strconv.FormatBool(oneCall), strconv.FormatBool(c.choice.forced), c.begunName, c.parameters, string(c.options.Tools))
	}
	made, err := g.get(ctx, key, func() (grammar.Expr, error) {
		if calls && c.choice.forced {
			return m.callGrammar(ctx, c, oneCall)
		}
		var answer grammar.Expr
		var err error
		switch {
		case s.kind == "":
			answer, err = m.callGrammar(ctx, c, oneCall)
		default:
			if answer, err = s.expr(ctx); err == nil && calls {
				either, noCalls := m.callGrammar(ctx, c, oneCall)
				if noCalls == nil {
					answer = grammar.Any(answer, either)
				} else if !errors.Is(noCalls, errUnconstrained) {
					err = noCalls
				}
			}
		}
		if err != nil {
			return nil, err
		}
		if c != nil && m.Reasoning != nil {
			answer = m.Reasoning.Answer(c.thinking, answer)
		}
		return answer, nil
	})
	var bad *Error
	switch {
	case err != nil && ctx.Err() != nil:
		return asError(ctx, ctx.Err(), "")
	case errors.Is(err, errUnconstrained):
		return nil
	case errors.As(err, &bad):
		return bad
	case err != nil && calls && s.kind == "":
		return badRequest("tools", "invalid_value", "The tools cannot constrain the completion: %v.", err)
	case err != nil:
		return badRequest(s.param, "invalid_value", "Invalid value for '%s': %v.", s.param, err)
	}
	p.Grammar, p.KeepIDs = made, g.kept
	return nil
}

// errUnconstrained: a model's format of calls cannot say what the tools take.
var errUnconstrained = errors.New("the format of calls cannot be constrained to these tools")

// expr is the texts of a structure.
func (s *structure) expr(ctx context.Context) (grammar.Expr, error) {
	o := schema.Options{Compact: s.compact, Open: s.open, Context: ctx}
	if s.space != "" {
		space, err := schema.Space(s.space)
		if err != nil {
			return nil, fmt.Errorf("whitespace_pattern: %w", err)
		}
		o.Space, o.Compact = space, false
	}
	switch s.kind {
	case "json":
		if len(s.text) > maxSchema {
			return nil, fmt.Errorf("it has %d bytes, and the maximum is %d", len(s.text), maxSchema)
		}
		return schema.Compile([]byte(s.text), o)
	case "json_object":
		return schema.AnyObject(o), nil
	case "regex":
		return grammar.Regex(s.text)
	case "choice":
		if slices.Contains(s.choices, "") {
			return nil, errors.New("a choice is empty")
		}
		return grammar.Literals(s.choices...), nil
	}
	return grammar.ParseGBNF(s.text)
}

// callGrammar is that of calls: of what is behind the beginning of one that is required, else of a text that may have some.
// Arguments follow the schema of their tool, those of one that is not strict without keywords that are not supported. All
// schemas together take as long as one may.
func (m *Model) callGrammar(ctx context.Context, c *conversation, oneCall bool) (grammar.Expr, error) {
	var functions []output.Function
	o := schema.Options{Context: ctx, Work: &schema.Work{}}
	for _, f := range c.functions {
		if c.choice.name != "" && f.name != c.choice.name {
			continue
		}
		x := output.Function{Name: f.name, Arguments: schema.AnyObject(schema.Options{})}
		if kindOf(f.parameters) == "an object" {
			parameters, err := f.parameters, error(nil)
			if o.Work.States > grammar.MaxWork {
				err = fmt.Errorf("with those of the tools before it: %w", grammar.ErrTooLarge)
			} else if !f.strict {
				parameters, err = schema.Supported(parameters, o)
			}
			var e grammar.Expr
			if err == nil {
				e, err = schema.Compile(parameters, o)
			}
			var members []schema.Member
			var listed bool
			if err == nil {
				// One that is too large, or that nothing fits, must not spoil the others.
				members, listed = schema.Members(parameters, o)
				texts := []grammar.Expr{e, grammar.Literal("{}")}
				for _, m := range members {
					if m.Chars != nil {
						texts = append(texts, m.Chars)
					}
				}
				var work int
				_, work, err = grammar.NewCounted(ctx, grammar.Any(texts...), nil)
				o.Work.States += work
			}
			switch {
			case ctx.Err() != nil:
				return nil, context.Cause(ctx)
			case err == nil:
				x.Arguments = e
				x.Members, x.Listed = members, listed
			case f.strict:
				param := fmt.Sprintf("tools[%d].%s", f.index, c.parameters)
				return nil, badRequest(param, "invalid_value", "Invalid value for '%s': %v.", param, err)
			}
		} else {
			x.Listed = f.parameters == nil
		}
		functions = append(functions, x)
	}
	e := m.Calls.TextOrCalls(functions, !oneCall)
	switch {
	case c.choice.forced:
		e = m.Calls.Calls(functions, true, c.begunName, !oneCall)
	case c.structured:
		e = m.Calls.Calls(functions, false, "", !oneCall)
	}
	if e == nil {
		return nil, errUnconstrained
	}
	return e, nil
}

// function is a tool as its calls are constrained.
type function struct {
	name       string
	parameters json.RawMessage
	strict     bool
	index      int // in tools
}
