package server

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
)

// enableThinking is the variable of chat templates that lets a model reason.
const enableThinking = "enable_thinking"

// toolChoice is what a request asks for of its tools.
type toolChoice struct {
	// none: the model is not told of the tools.
	none bool
	// forced: the completion is a call, of the tool name if there is one.
	forced bool
	name   string
}

// parseTools parses the tools that the template describes to the model, and how the request
// chooses between them.
func parseTools(o *object, c *conversation) {
	var raw json.RawMessage
	if tools, ok := o.pop("tools"); ok {
		raw = parseToolList(o, c, tools)
	}
	if choice, ok := o.pop("tool_choice"); ok {
		parseToolChoice(o, c, choice)
	}
	if !c.choice.none {
		c.options.Tools = raw
	}
}

// parseToolList parses tools; nil without any.
func parseToolList(o *object, c *conversation, tools json.RawMessage) json.RawMessage {
	if kindOf(tools) != "an array" {
		o.wrongType("tools", "an array of objects", tools)
		return nil
	}
	if _, values := extent(tools); values > maxToolValues {
		o.tooMany("tools", maxToolValues, "JSON values")
		return nil
	}
	number := 0
	c.tools = map[string]output.Tool{}
	eachItem(tools, func(tool json.RawMessage) bool {
		if number++; number > maxTools {
			o.tooMany("tools", maxTools, "tools")
		} else if checkTool(o, number-1, tool); o.err != nil {
			return false
		} else if f, t := parseTool(tool); f.name != "" {
			c.tools[f.name] = t
			f.index = number - 1
			c.functions = append(slices.DeleteFunc(c.functions, func(g function) bool { return g.name == f.name }), f)
			c.strict = c.strict || f.strict
		}
		return o.err == nil
	})
	if number == 0 || o.err != nil {
		return nil
	}
	return tools
}

// checkTool refuses what is no function with a name: a template would fail on it, or show the model nonsense.
func checkTool(o *object, i int, raw json.RawMessage) {
	t := &object{path: fmt.Sprintf("tools[%d]", i)}
	t.parse(raw, "'"+t.path+"'")
	kind, name := "function", ""
	if t.text("type", &kind); kind != "function" {
		t.unsupported("type", fmt.Sprintf("it is %q; this server runs no tools, and takes functions alone", truncate(kind)))
	}
	if f := t.sub("function"); f == nil {
		t.fail("function", "missing_required_parameter", "Missing required parameter: '%s'.", t.name("function"))
	} else if f.toolName(&name); f.err != nil {
		t.err = f.err
	}
	if o.err == nil {
		o.err = t.err
	}
}

// toolName parses the name of a tool.
func (o *object) toolName(to *string) {
	if !o.text("name", to) {
		o.fail("name", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("name"))
	} else if *to == "" {
		o.fail("name", "invalid_value", "Invalid value for '%s': it is empty.", o.name("name"))
	}
}

// parseTool reads what a parser of calls has to know of a tool. One with an empty name is the
// template's alone.
func parseTool(raw json.RawMessage) (f function, t output.Tool) {
	var tool struct {
		Function struct {
			Name       string
			Parameters json.RawMessage
			Strict     json.RawMessage
		}
	}
	if json.Unmarshal(raw, &tool) != nil {
		return f, t
	}
	f = function{name: tool.Function.Name, parameters: tool.Function.Parameters, strict: string(tool.Function.Strict) == "true"}
	if isNull(f.parameters) {
		f.parameters = nil
	}
	var schema struct {
		Properties map[string]json.RawMessage
	}
	if json.Unmarshal(tool.Function.Parameters, &schema) != nil {
		return f, t // a schema that only the template understands
	}
	for name, raw := range schema.Properties {
		types := typesOf(raw)
		if !slices.Contains(types, any("string")) || slices.ContainsFunc(types, func(t any) bool { return t != "string" && t != "null" }) {
			continue
		}
		if t.Strings == nil {
			t.Strings = map[string]bool{}
		}
		t.Strings[name] = slices.Contains(types, any("null"))
	}
	return f, t
}

// typesOf are the types that the schema of a parameter has, itself or in anyOf, as clients write optional ones; nil
// stands for one that is not named.
func typesOf(raw json.RawMessage) (types []any) {
	type schema struct{ Type any }
	var p struct {
		schema
		AnyOf []schema
	}
	if json.Unmarshal(raw, &p) != nil {
		return nil
	}
	all := p.AnyOf
	if p.Type != nil {
		all = append(all, p.schema)
	}
	for _, s := range all {
		if list, ok := s.Type.([]any); ok {
			types = append(types, list...)
		} else {
			types = append(types, s.Type)
		}
	}
	return types
}

// parseToolChoice parses tool_choice: a word, or the name of a function.
func parseToolChoice(o *object, c *conversation, raw json.RawMessage) {
	const member = "tool_choice"
	switch kindOf(raw) {
	case "a string":
		switch unquote(raw) {
		case "none":
			c.choice.none = true
		case "auto":
		case "required":
			c.choice.forced = true
		default:
			o.fail(member, "invalid_value", `Invalid value for '%s': it must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}.`, member)
		}
	case "an object":
		s := &object{path: member}
		s.parse(raw, "'"+member+"'")
		var kind string
		if s.text("type", &kind); kind != "function" {
			s.fail("type", "invalid_value", `Invalid value for '%s': it must be "function".`, s.name("type"))
		}
		if f := s.sub("function"); f == nil {
			s.fail("function", "missing_required_parameter", "Missing required parameter: '%s'.", s.name("function"))
		} else {
			if !f.text("name", &c.choice.name) {
				f.fail("name", "missing_required_parameter", "Missing required parameter: '%s'.", f.name("name"))
			}
			s.close(f)
		}
		o.close(s)
		if _, ok := c.tools[c.choice.name]; !ok {
			o.fail(member, "invalid_value", "Invalid value for '%s': there is no tool %q in 'tools'.", member, truncate(c.choice.name))
		}
		c.choice.forced = true
	default:
		o.wrongType(member, "a string or an object", raw)
	}
	if c.choice.forced && len(c.tools) == 0 {
		o.fail(member, "invalid_value", "Invalid value for '%s': it requires a call, and 'tools' has no function.", member)
	}
}

// withoutReasoning prepares the template for a call that is required. Reasoning comes before calls, so a call
// that begins the completion goes without.
func (m *Model) withoutReasoning(c *conversation) {
	if c.choice.forced && m.Reasoning != nil && c.options.Extra.Get(enableThinking) == nil {
		c.options.Extra.Set(enableThinking, json.RawMessage("false"))
	}
}

// beginOutput finds out where a prompt leaves the model, and has it end with the beginning of a call that the
// request requires: of a tool that it names, or of the only one, up to its arguments.
func (m *Model) beginOutput(c *conversation, prompt *chat.Prompt) error {
	if m.Reasoning != nil {
		c.thinking = m.Reasoning.After(prompt.Text)
	}
	switch {
	case !c.choice.forced:
		return nil
	case m.Calls == nil:
		return badRequest("tool_choice", "unsupported_parameter",
			`'tool_choice' is not supported: it must be "none" or "auto", as the server does not know how this model writes calls; it has to be started with --tool-call-parser.`)
	case !c.options.AddGenerationPrompt:
		return badRequest("add_generation_prompt", "invalid_value", "Invalid value for 'add_generation_prompt': 'tool_choice' requires a call, with which the assistant's turn begins.")
	}
	if c.thinking == output.Thinks {
		prompt.Text += "\n" + m.Reasoning.Close + "\n\n"
	}
	name := c.choice.name
	if len(c.tools) == 1 {
		name = slices.Collect(maps.Keys(c.tools))[0]
	}
	var start, end int
	c.begunName = name
	c.begun, start, end = m.Calls.Begin(name)
	if start < end { // the name is the client's
		prompt.Client = append(slices.Clip(prompt.Client), [2]int{len(prompt.Text) + start, len(prompt.Text) + end})
	}
	prompt.Text += c.begun
	return nil
}

// callFormat is how calls in the completion of a conversation are written; nil: it has none.
func (m *Model) callFormat(c *conversation) *output.Format {
	if c.options.Tools == nil || m.AutoCallsAreText && !c.choice.forced {
		return nil
	}
	return m.Calls
}

// checkNames refuses tools that no call can name: what the model writes of them would be text.
func (m *Model) checkNames(c *conversation) error {
	format := m.callFormat(c)
	if format == nil {
		return nil
	}
	for _, f := range c.functions {
		if !format.Spells(f.name) {
			param := fmt.Sprintf("tools[%d]", f.index)
			return badRequest(param, "invalid_value", "Invalid value for '%s': calls as this model writes them (%s) cannot have the name %q; use letters, digits, '_' and '-'.",
				param, format.Name, truncate(f.name))
		}
	}
	return nil
}

// markers are the ids of special tokens that mark calls and reasoning, which the text has to have.
func (m *Model) markers(c *conversation) []int32 {
	var tokens []string
	if f := m.callFormat(c); f != nil {
		tokens = append(tokens, f.Tokens...)
	}
	if m.Reasoning != nil {
		tokens = append(tokens, m.Reasoning.Open, m.Reasoning.Close)
	}
	var ids []int32
	for _, t := range tokens {
		if id, ok := m.Tokenizer.ID(t); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

// newCallID is the id of a call, which the message with its result has, too.
func (m *Model) newCallID() string {
	const short = 9
	if m.Calls.ShortIDs {
		return rand.Text()[:short]
	}
	return "call_" + rand.Text()
}
