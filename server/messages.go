package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
)

// Anthropic's Messages API: https://docs.anthropic.com/en/api/messages. Requests become the same
// conversations as those of /v1/chat/completions, and the completion is parsed the same way.

// parseMessages reads the body of /v1/messages; counting, that of /v1/messages/count_tokens, which has no
// max_tokens.
func (m *Model) parseMessages(o *object, counting bool) (*chatRequest, error) {
	r := &chatRequest{common: common{params: m.Defaults}, served: m}
	parseIdentity(o, &r.common)
	parseSampling(o, &r.params, m.vocab())
	parseEnd(o, &r.params, m.vocab())
	parseMaxTokens(o, &r.common, "max_tokens")
	r.someTokens(o)
	if r.maxTokensParam == "" && !counting {
		o.fail("max_tokens", "missing_required_parameter", "Missing required parameter: 'max_tokens'.")
	}
	if raw, ok := o.pop("stop_sequences"); ok {
		s := &object{members: map[string]json.RawMessage{"stop": raw}}
		if parseStop(s, &r.params); s.err != nil {
			o.fail("stop_sequences", s.err.Code, "%s", strings.ReplaceAll(s.err.Message, "'stop", "'stop_sequences"))
		}
	}
	o.flag("stream", &r.stream)
	o.settle(inMessages)
	c := &conversation{options: chat.Options{AddGenerationPrompt: true}}
	r.conversation = c
	parseThinking(o, c)
	parseOutputConfig(o, r)
	c.parameters = "input_schema"
	parseMessageTools(o, r)
	parseSystem(o, c)
	items, ok := o.list("messages", "an array of messages", maxMessages)
	if !ok || len(items) == 0 {
		o.fail("messages", "missing_required_parameter", "Missing required parameter: 'messages', with at least one message.")
	}
	b := conversationBuilder{names: map[string]string{}, to: c}
	values := 0
	for i, raw := range items {
		if _, n := extent(raw); values+n > maxMessageValues {
			o.tooMany("messages", maxMessageValues, "JSON values")
		} else {
			values += n
		}
		one := &object{path: fmt.Sprintf("messages[%d]", i)}
		one.parse(raw, "'"+one.path+"'")
		b.message(one)
		if o.close(one); o.err != nil {
			break
		}
	}
	b.flush()
	last := len(c.messages) - 1
	for last >= 0 && c.messages[last].Role == "system" { // as in Anthropic's API, one may follow the user's
		last--
	}
	if last < 0 {
		o.fail("messages", "invalid_value", "Invalid value for 'messages': there must be a user message, and all are system messages.")
	} else if c.messages[last].Role == "assistant" {
		o.fail("messages", "unsupported_parameter", "The last message must be the user's, or a system message behind it: one of the assistant's is not continued.")
	}
	return r, o.end()
}

// parseThinking parses thinking, which sets the template's variable. Its budget is not kept.
func parseThinking(o *object, c *conversation) {
	t := o.sub("thinking")
	if t == nil {
		return
	}
	var kind, display string
	t.text("type", &kind)
	t.ignore("budget_tokens") // reasoning is as long as the model makes it
	t.text("display", &display)
	switch kind {
	case "enabled":
		c.options.Extra.Set(enableThinking, json.RawMessage("true"))
	case "disabled":
		c.options.Extra.Set(enableThinking, json.RawMessage("false"))
	case "adaptive":
	default:
		t.fail("type", "invalid_value", `Invalid value for '%s': it must be "enabled", "disabled" or "adaptive".`, t.name("type"))
	}
	o.close(t)
}

// parseOutputConfig parses output_config.
func parseOutputConfig(o *object, r *chatRequest) {
	s := o.sub("output_config")
	if s == nil {
		return
	}
	var effort string
	if s.text("effort", &effort) {
		r.conversation.options.Extra.Set("reasoning_effort", jsonString(effort))
	}
	parseFormat(s, "format", &r.common)
	o.close(s)
}

// parseMessageTools parses tools and tool_choice, which become those of a chat.
func parseMessageTools(o *object, r *chatRequest) {
	items, _ := o.list("tools", "an array of objects", maxTools)
	var tools []json.RawMessage
	for i, raw := range items {
		t := &object{path: fmt.Sprintf("tools[%d]", i)}
		t.parse(raw, "'"+t.path+"'")
		kind, name, description := "custom", "", ""
		if t.text("type", &kind); kind != "custom" {
			t.unsupported("type", fmt.Sprintf("%q is a tool that the server would run, and this one runs none", truncate(kind)))
		}
		t.toolName(&name)
		t.text("description", &description)
		schema, _ := t.pop("input_schema")
		var strict bool
		t.flag("strict", &strict)
		t.ignore("cache_control", "input_examples", "defer_loading", "eager_input_streaming", "allowed_callers")
		tools = append(tools, functionTool(name, description, schema, strict))
		if o.close(t); o.err != nil {
			return
		}
	}
	if tools != nil {
		o.members["tools"] = jsonArray(tools)
	}
	choice := o.sub("tool_choice")
	if choice == nil {
		parseTools(o, r.conversation)
		return
	}
	var kind, name string
	var single bool
	choice.text("type", &kind)
	choice.flag("disable_parallel_tool_use", &single)
	choice.text("name", &name)
	switch kind {
	case "auto", "none":
		o.members["tool_choice"] = jsonString(kind)
	case "any":
		o.members["tool_choice"] = jsonString("required")
	case "tool":
		o.members["tool_choice"] = functionChoice(name)
	default:
		choice.fail("type", "invalid_value", `Invalid value for '%s': it must be "auto", "any", "tool" or "none".`, choice.name("type"))
	}
	o.close(choice)
	parseTools(o, r.conversation)
	r.firstCall = single || r.conversation.choice.name != ""
}

// functionTool is a tool as chat templates know it.
func functionTool(name, description string, schema json.RawMessage, strict bool) json.RawMessage {
	f := chat.Object{{Name: "name", Value: jsonString(name)}}
	if description != "" {
		f.Set("description", jsonString(description))
	}
	if schema != nil {
		f.Set("parameters", schema)
	}
	if strict {
		f.Set("strict", json.RawMessage("true"))
	}
	return chat.Object{{Name: "type", Value: jsonString("function")}, {Name: "function", Value: f.JSON()}}.JSON()
}

// functionChoice is the tool_choice of a chat that names a function.
func functionChoice(name string) json.RawMessage {
	f := chat.Object{{Name: "name", Value: jsonString(name)}}
	return chat.Object{{Name: "type", Value: jsonString("function")}, {Name: "function", Value: f.JSON()}}.JSON()
}

// parseSystem parses system: a text, or blocks of text.
func parseSystem(o *object, c *conversation) {
	if o.members["system"] == nil {
		return
	}
	s := &object{path: "system", members: map[string]json.RawMessage{"system": o.members["system"]}}
	delete(o.members, "system")
	if blocks := s.blocks("system"); len(blocks) > 0 {
		c.messages = append(c.messages, chat.Message{Role: "system", Content: joined(s, blocks)})
	}
	o.close(s)
}

// blocks are those of a member that is a list of content blocks, or a text, which is one of them.
func (o *object) blocks(member string) []*object {
	raw, ok := o.pop(member)
	if !ok {
		return nil
	}
	if kindOf(raw) == "a string" {
		return []*object{{path: o.name(member), members: map[string]json.RawMessage{"type": jsonString("text"), "text": raw}}}
	}
	if kindOf(raw) != "an array" {
		o.wrongType(member, "a string or an array of content blocks", raw)
		return nil
	}
	var all []*object
	eachItem(raw, func(item json.RawMessage) bool {
		b := &object{path: fmt.Sprintf("%s[%d]", o.name(member), len(all))}
		if b.parse(item, "'"+b.path+"'"); b.err != nil {
			o.err = b.err
		}
		all = append(all, b)
		return o.err == nil
	})
	return all
}

// textBlocks are the types of blocks that have a text.
var textBlocks = map[string]bool{"text": true, "input_text": true, "output_text": true}

// joined is the text of blocks that have nothing else.
func joined(o *object, blocks []*object) string {
	var texts []string
	for _, b := range blocks {
		var kind, text string
		if b.text("type", &kind); !textBlocks[kind] {
			b.fail("type", "invalid_value", "Invalid value for '%s': %q is not supported here, as the model reads text only.", b.name("type"), truncate(kind))
		}
		if !b.text("text", &text) {
			b.fail("text", "missing_required_parameter", "Missing required parameter: '%s'.", b.name("text"))
		}
		b.ignore("cache_control", "citations", "annotations", "logprobs")
		texts = append(texts, text)
		o.close(b)
	}
	return strings.Join(texts, "\n")
}

// conversationBuilder makes messages of a chat of the items of other APIs. What the assistant has written
// in a row, reasoning, text and calls, becomes one message.
type conversationBuilder struct {
	// names of functions by the ids of calls.
	names map[string]string
	to    *conversation

	open            bool
	text, reasoning []string
	calls           []json.RawMessage
}

// flush ends the assistant's message.
func (b *conversationBuilder) flush() {
	if !b.open {
		return
	}
	var extra chat.Object
	if b.reasoning != nil {
		extra.Set("reasoning_content", jsonString(strings.Join(b.reasoning, "\n")))
	}
	if b.calls != nil {
		extra.Set("tool_calls", jsonArray(b.calls))
	}
	m := chat.Message{Role: "assistant", Content: strings.Join(b.text, "\n")}
	if len(extra) > 0 {
		m.Extra = extra.JSON()
	}
	b.to.messages = append(b.to.messages, m)
	*b = conversationBuilder{names: b.names, to: b.to}
}

// say adds a message that is not the assistant's.
func (b *conversationBuilder) say(role, text string) {
	b.flush()
	b.to.messages = append(b.to.messages, chat.Message{Role: role, Content: text})
}

// call adds a call with its arguments, of which a JSON object becomes one for the template.
func (b *conversationBuilder) call(id, name string, arguments json.RawMessage) {
	b.open = true
	b.names[id] = name
	f := chat.Object{{Name: "name", Value: jsonString(name)}, {Name: "arguments", Value: arguments}}
	b.calls = append(b.calls, chat.Object{
		{Name: "id", Value: jsonString(id)}, {Name: "type", Value: jsonString("function")}, {Name: "function", Value: f.JSON()},
	}.JSON())
}

// result adds the result of a call.
func (b *conversationBuilder) result(id, text string) {
	b.flush()
	extra := chat.Object{{Name: "tool_call_id", Value: jsonString(id)}}
	if name, ok := b.names[id]; ok {
		extra.Set("name", jsonString(name))
	}
	b.to.messages = append(b.to.messages, chat.Message{Role: "tool", Content: text, Extra: extra.JSON()})
}

// message adds one of Anthropic's messages.
func (b *conversationBuilder) message(o *object) {
	var role string
	switch o.text("role", &role); role {
	case "user", "assistant", "system":
	default:
		o.fail("role", "invalid_value", "Invalid value for '%s': it must be user, assistant or system.", o.name("role"))
	}
	if o.err == nil && o.members["content"] == nil {
		o.fail("content", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("content"))
	}
	var texts []*object
	blocks := o.blocks("content")
	for _, k := range blocks {
		if o.err != nil {
			return
		}
		var kind string
		if raw := k.members["type"]; kindOf(raw) == "a string" {
			kind = unquote(raw)
		}
		switch {
		case role == "assistant" && kind == "text":
			b.open = true
			b.text = append(b.text, joined(o, []*object{k}))
			continue
		case role == "assistant" && kind == "thinking":
			var text string
			k.text("thinking", &text)
			k.ignore("signature")
			b.open = true
			b.reasoning = append(b.reasoning, text)
		case role == "assistant" && kind == "redacted_thinking":
			k.ignore("data") // which only who wrote it can read
			b.open = true
		case role == "assistant" && kind == "tool_use":
			var id, name string
			k.text("id", &id)
			k.text("name", &name)
			input, ok := k.pop("input")
			if id == "" || name == "" || !ok || kindOf(input) != "an object" {
				k.fail("input", "invalid_value", "Invalid value for '%s': a tool_use has an id, a name and an object as input.", k.path)
			}
			k.ignore("cache_control", "caller")
			b.call(id, name, input)
		case role == "user" && kind == "tool_result":
			var id string
			if !k.text("tool_use_id", &id) {
				k.fail("tool_use_id", "missing_required_parameter", "Missing required parameter: '%s'.", k.name("tool_use_id"))
			}
			k.ignore("is_error", "cache_control")
			b.result(id, joined(k, k.blocks("content")))
		default:
			texts = append(texts, k)
			continue
		}
		k.ignore("type")
		o.close(k)
	}
	if texts != nil || len(blocks) == 0 {
		if text := joined(o, texts); role == "assistant" {
			b.open = true
		} else {
			b.say(role, text)
		}
	}
}

// messages is /v1/messages.
func (s *Server) messages(w *response, r *http.Request) error {
	var req *chatRequest
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) (err error) {
		if req, err = m.parseMessages(o, false); err == nil {
			err = req.render(ctx)
		}
		return err
	}); err != nil {
		return err
	}
	req.usage, req.usageSoFar = true, true // message_start has that of the prompt
	a := &messageResponse{req: req, head: message{ID: "msg_" + w.id, Type: "message", Role: "assistant", Model: req.called(), Content: []any{}}}
	a.parts = newParts(req, a)
	return s.converse(w, r, req, a)
}

// countTokens is /v1/messages/count_tokens.
func (s *Server) countTokens(w *response, r *http.Request) error {
	var n struct {
		InputTokens int `json:"input_tokens"`
	}
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) error {
		req, err := m.parseMessages(o, true)
		if err != nil {
			return err
		}
		if err := m.known(req.model); err != nil {
			return err
		}
		ids, err := m.render(ctx, req.conversation, maxTokenIDs)
		n.InputTokens = len(ids)
		return err
	}); err != nil {
		return err
	}
	w.json(http.StatusOK, n)
	return nil
}

// message is a response of /v1/messages. StopReason is null in a stream's message_start.
type message struct {
	ID           string       `json:"id"`
	Type         string       `json:"type"`
	Role         string       `json:"role"`
	Model        string       `json:"model"`
	Content      []any        `json:"content"`
	StopReason   *string      `json:"stop_reason"`
	StopSequence *string      `json:"stop_sequence"`
	Usage        messageUsage `json:"usage"`
}

// messageUsage counts tokens; those of the input that were cached are not among InputTokens.
type messageUsage struct {
	InputTokens   int `json:"input_tokens"`
	CacheCreation int `json:"cache_creation_input_tokens"`
	CacheRead     int `json:"cache_read_input_tokens"`
	OutputTokens  int `json:"output_tokens"`
}

func (u *usage) ofMessage() messageUsage {
	cached := u.PromptTokensDetails.CachedTokens
	return messageUsage{InputTokens: u.PromptTokens - cached, CacheRead: cached, OutputTokens: u.CompletionTokens}
}

// The blocks of a message.
type (
	textBlock struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	thinkingBlock struct {
		Type     string `json:"type"`
		Thinking string `json:"thinking"`
		// Signature is empty: whoever sends the block back is believed.
		Signature string `json:"signature"`
	}
	toolUseBlock struct {
		Type  string          `json:"type"`
		ID    string          `json:"id"`
		Name  string          `json:"name"`
		Input json.RawMessage `json:"input"`
	}
)

// block is a part of a message as one of its blocks; empty, it is that of a content_block_start.
func (p *part) block(empty bool) any {
	text := p.text
	if empty {
		text = ""
	}
	switch p.kind {
	case output.Reasoning:
		return thinkingBlock{Type: "thinking", Thinking: text}
	case output.Call:
		// Arguments that max_tokens has cut are no JSON, and the stop reason says so.
		b := toolUseBlock{Type: "tool_use", ID: p.id, Name: p.name, Input: json.RawMessage("{}")}
		if kindOf(json.RawMessage(text)) == "an object" && json.Valid([]byte(text)) {
			b.Input = json.RawMessage(text)
		}
		return b
	}
	return textBlock{Type: "text", Text: text}
}

// messageResponse writes responses of /v1/messages.
type messageResponse struct {
	req   *chatRequest
	head  message
	parts *parts
	// events of a stream that parts have added, and are to be sent.
	events []any
	// finish are the members of a stream's message_delta.
	finish message
}

// stop sets why a message has ended.
func (m *message) stop(u *engine.Update, p *parts) {
	reason := "end_turn"
	switch {
	case u.Finish == engine.FinishLength:
		reason = "max_tokens"
	case p.called():
		reason = "tool_use"
	case u.StopString != "":
		reason = "stop_sequence"
		m.StopSequence = &u.StopString
	}
	m.StopReason = &reason
}

func (a *messageResponse) whole(choices []engine.Update, u *usage) any {
	p := wholeParts(a.req, &choices[0])
	m := a.head
	for _, one := range p.list {
		m.Content = append(m.Content, one.block(false))
	}
	m.stop(&choices[0], p)
	m.Usage = u.ofMessage()
	return m
}

// event adds an event, whose data has its name as type.
func (a *messageResponse) event(name string, members chat.Object) {
	data := append(chat.Object{{Name: "type", Value: jsonString(name)}}, members...)
	a.events = append(a.events, namedEvent{name, data.JSON()})
}

// member is a member of an event.
func member(name string, value any) chat.Member {
	data, err := json.Marshal(value)
	if err != nil {
		panic("server: an event without a JSON form: " + err.Error())
	}
	return chat.Member{Name: name, Value: data}
}

func (a *messageResponse) begin(p *part) {
	a.event("content_block_start", chat.Object{member("index", p.index), member("content_block", p.block(true))})
}

func (a *messageResponse) more(p *part, text string) {
	delta := map[output.Kind][2]string{
		output.Content: {"text_delta", "text"}, output.Reasoning: {"thinking_delta", "thinking"}, output.Call: {"input_json_delta", "partial_json"},
	}[p.kind]
	a.event("content_block_delta", chat.Object{
		member("index", p.index), member("delta", map[string]string{"type": delta[0], delta[1]: text}),
	})
}

func (a *messageResponse) end(p *part) {
	a.event("content_block_stop", chat.Object{member("index", p.index)})
}

func (a *messageResponse) take() []any {
	events := a.events
	a.events = nil
	return events
}

func (a *messageResponse) chunks(_ int, first bool, u *engine.Update) []any {
	if first {
		start := a.head
		start.Usage = a.req.sent.ofMessage()
		a.event("message_start", chat.Object{member("message", start)})
		a.event("ping", nil)
	}
	a.parts.push(u)
	if u.Finish != "" {
		a.finish.stop(u, a.parts)
	}
	return a.take()
}

func (a *messageResponse) finished(u *usage) []any {
	a.event("message_delta", chat.Object{
		member("delta", struct {
			StopReason   *string `json:"stop_reason"`
			StopSequence *string `json:"stop_sequence"`
		}{a.finish.StopReason, a.finish.StopSequence}),
		member("usage", u.ofMessage()),
	})
	a.event("message_stop", nil)
	return a.take()
}

func (a *messageResponse) failed(e *Error) []any {
	return []any{namedEvent{"error", messageError(e, "")}}
}

func (a *messageResponse) promptParam() string { return "messages" }

// messageError is an error in Anthropic's form.
func messageError(e *Error, id string) any {
	kinds := map[int]string{
		http.StatusUnauthorized: "authentication_error", http.StatusForbidden: "permission_error", http.StatusNotFound: "not_found_error",
		http.StatusRequestEntityTooLarge: "request_too_large", http.StatusTooManyRequests: "rate_limit_error",
		http.StatusServiceUnavailable: "overloaded_error", http.StatusGatewayTimeout: "timeout_error",
	}
	kind := kinds[e.Status]
	switch {
	case kind != "":
	case e.Status >= http.StatusInternalServerError:
		kind = "api_error"
	default:
		kind = "invalid_request_error"
	}
	var body struct {
		Type  string `json:"type"`
		Error struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"error"`
		RequestID string `json:"request_id,omitempty"`
	}
	body.Type, body.Error.Type, body.Error.Message, body.RequestID = "error", kind, e.body().Error.Message, id
	return body
}
