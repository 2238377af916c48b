package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/models/tokenizer"
)

type chatRequest struct {
	common
	// served is the model that it is for.
	served *Model
	prompt []int32
	// conversation that the prompt is of.
	conversation *conversation
	// firstCall leaves out all calls but the first, withoutReasoning what the model thinks.
	firstCall, withoutReasoning bool
}

// conversation is the input of the chat template.
type conversation struct {
	messages []chat.Message
	options  chat.Options
	// special adds the tokenizer's special tokens around what the template wrote.
	special bool
	// tools that the model may call, by name, and how the request chooses between them.
	tools  map[string]output.Tool
	choice toolChoice
	// functions are the tools as their calls are constrained; strict: one of them is.
	functions []function
	strict    bool
	// parameters is the member of a tool that has their schema.
	parameters string
	// structured: the answer is to be of a grammar, where it is no call.
	structured bool
	// begun is the text of a call at the end of the prompt, and thinking where it leaves the model
	// with its reasoning: render sets them.
	begun    string
	thinking output.Thinking
	// begunName is the function of the call that has begun, if it is known.
	begunName string
}

// parseChat reads the body of /v1/chat/completions.
func (m *Model) parseChat(ctx context.Context, o *object) (*chatRequest, error) {
	r := &chatRequest{common: parseCommon(o, m), served: m}
	parseMaxTokens(o, &r.common, "max_completion_tokens") // the newer name goes first
	r.someTokens(o)
	o.flag("logprobs", &r.params.LogProbs)
	if o.integer("top_logprobs", &r.params.TopLogProbs) && r.params.TopLogProbs != 0 && !r.params.LogProbs {
		o.fail("top_logprobs", "invalid_value", "Invalid value for 'top_logprobs': it needs 'logprobs' to be true.")
	}
	parallel, reasoning := true, true
	o.flag("parallel_tool_calls", &parallel)
	o.flag("include_reasoning", &reasoning)
	r.withoutReasoning = !reasoning
	o.settle(inChat)
	c := parseConversation(o)
	r.conversation = c
	r.firstCall = !parallel || c.choice.name != ""
	if err := o.end(); err != nil {
		return nil, err
	}
	return r, r.render(ctx)
}

// render makes the prompt and the grammar of its completion, once the body is parsed.
func (r *chatRequest) render(ctx context.Context) (err error) {
	m := r.served
	if err := m.known(r.model); err != nil {
		return err
	}
	if r.prompt, err = m.render(ctx, r.conversation, m.MaxModelLen); err != nil {
		return err
	}
	r.params.KeepIDs = m.markers(r.conversation)
	return m.constrain(ctx, &r.params, &r.structure, r.conversation, r.firstCall)
}

// parser of a choice's output.
func (r *chatRequest) parser() *output.Parser {
	c := r.conversation
	return output.New(output.Options{
		Format: r.served.callFormat(c), Tools: c.tools, Begun: c.begun, Reasoning: r.served.Reasoning, Thinking: c.thinking,
	})
}

// endsWithCall ends a choice with its first call.
func (r *chatRequest) endsWithCall() func(text string) bool {
	p := r.parser()
	return func(text string) bool {
		p.Push(text)
		return p.Complete() > 0
	}
}

// parseConversation parses the members that the chat template uses.
func parseConversation(o *object) *conversation {
	c := &conversation{options: chat.Options{AddGenerationPrompt: true}, parameters: "function.parameters"}
	o.flag("add_generation_prompt", &c.options.AddGenerationPrompt)
	o.flag("add_special_tokens", &c.special)
	o.settle(inConversation)
	parseTemplateVariables(o, c)
	var effort string
	if o.text("reasoning_effort", &effort) {
		if c.options.Extra.Get("reasoning_effort") == nil {
			c.options.Extra.Set("reasoning_effort", jsonString(effort))
		}
	}
	var thinks bool
	if o.flag("enable_thinking", &thinks) && c.options.Extra.Get(enableThinking) == nil {
		c.options.Extra.Set(enableThinking, json.RawMessage(strconv.FormatBool(thinks)))
	}
	parseTools(o, c)
	if raw := o.members["messages"]; o.err == nil {
		if _, values := extent(raw); values > maxMessageValues {
			o.tooMany("messages", maxMessageValues, "JSON values")
		}
	}
	messages, ok := o.list("messages", "an array of messages", maxMessages)
	if !ok {
		o.fail("messages", "missing_required_parameter", "Missing required parameter: 'messages'.")
	} else if len(messages) == 0 {
		o.fail("messages", "invalid_value", "Invalid value for 'messages': it is empty, and there must be at least one message.")
	}
	calls := map[string]string{} // names of functions by the ids of calls
	for i, raw := range messages {
		m := &object{path: fmt.Sprintf("messages[%d]", i)}
		m.parse(raw, "'"+m.path+"'")
		c.messages = append(c.messages, parseMessage(m, calls))
		if o.close(m); o.err != nil {
			break
		}
	}
	return c
}

// reserved are variables of chat templates that a request sets by members of their own, or not at
// all: a gateway that checks messages must not be deceived by others in chat_template_kwargs.
var reserved = []string{
	"messages", "tools", "add_generation_prompt", "continue_final_message",
	"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
	"raise_exception", "strftime_now", "chat_template", "tokenize",
}

// parseTemplateVariables parses chat_template_kwargs.
func parseTemplateVariables(o *object, c *conversation) {
	const member = "chat_template_kwargs"
	raw, ok := o.pop("chat_template_kwargs")
	switch {
	case !ok:
		return
	case kindOf(raw) != "an object":
		o.wrongType(member, "an object", raw)
		return
	case len(raw) > maxTemplateVariables:
		o.fail(member, "invalid_value", "Invalid value for '%s': it has %d bytes, and the maximum is %d.", member, len(raw), maxTemplateVariables)
		return
	}
	eachMember(raw, func(name string, value json.RawMessage) bool {
		if slices.Contains(reserved, name) {
			o.fail(member, "invalid_value", "Invalid value for '%s': it must not have %s, which the server sets.", member, name)
		}
		if c.options.Extra.Set(name, value); len(c.options.Extra) > maxMembers {
			o.tooMany(member, maxMembers, "members")
		}
		return o.err == nil
	})
}

// parseMessage parses one message. calls are those of the messages before it, and get its own.
func parseMessage(o *object, calls map[string]string) chat.Message {
	var m chat.Message
	if !o.text("role", &m.Role) {
		o.fail("role", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("role"))
	}
	if roles := []string{"system", "developer", "user", "assistant", "tool", "function"}; !slices.Contains(roles, m.Role) {
		o.fail("role", "invalid_value", "Invalid value for '%s': it must be one of %s, and is %q.", o.name("role"), strings.Join(roles, ", "), truncate(m.Role))
	}
	content, thinking := parseContent(o, &m)
	var extra chat.Object
	for _, member := range []string{"name", "tool_call_id", "reasoning_content", "reasoning"} {
		var text string
		if raw := o.members[member]; o.text(member, &text) {
			extra.Set(member, raw)
		}
	}
	// Templates read reasoning_content, whatever a client's name for it.
	if newer := extra.Get("reasoning"); newer != nil {
		thinking = newer
	}
	if extra.Get("reasoning_content") == nil && thinking != nil {
		extra.Set("reasoning_content", thinking)
	}
	// A result has the id of its call, and some templates want the name of the function.
	if name, ok := calls[textOf(extra.Get("tool_call_id"))]; ok && m.Role == "tool" && extra.Get("name") == nil {
		extra.Set("name", jsonString(name))
	}
	own := parseToolCalls(o, calls)
	if own != nil {
		extra.Set("tool_calls", own)
	}
	if !content && own == nil && extra.Get("reasoning_content") == nil {
		o.fail("content", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("content"))
	}
	o.settle(inMessage) // a message of this API, or of its clients, can be sent back
	if len(extra) > 0 {
		m.Extra = extra.JSON()
	}
	return m
}

// parseContent parses a message's content: a text, or parts of text, which are joined by
// newlines. Parts of thinking are returned, as a JSON string; nil without any.
func parseContent(o *object, m *chat.Message) (there bool, thinking json.RawMessage) {
	raw, ok := o.pop("content")
	if !ok {
		return false, nil
	}
	if kindOf(raw) == "a string" && json.Unmarshal(raw, &m.Content) == nil {
		return true, nil
	}
	if kindOf(raw) != "an array" {
		o.wrongType("content", "a string or an array of text parts", raw)
		return true, nil
	}
	var texts, thoughts []string
	var passed []json.RawMessage // to templates that walk parts
	var parts []json.RawMessage  // as many as maxMessageValues allows
	eachItem(raw, func(part json.RawMessage) bool {
		parts = append(parts, part)
		return true
	})
	for i, raw := range parts {
		p := &object{path: fmt.Sprintf("%s[%d]", o.name("content"), i)}
		p.parse(raw, "'"+p.path+"'")
		var kind, text string
		p.text("type", &kind)
		member, to := "text", &texts
		switch kind {
		case "text":
			passed = append(passed, raw)
		case "thinking":
			member, to = "thinking", &thoughts
			p.ignore("signature")
		default:
			p.fail("type", "invalid_value", "Invalid value for '%s': %q is not supported, as the model reads text only.", p.name("type"), truncate(kind))
		}
		if !p.text(member, &text) {
			p.fail(member, "missing_required_parameter", "Missing required parameter: '%s'.", p.name(member))
		}
		*to = append(*to, text)
		p.settle(inPart)
		if o.close(p); o.err != nil {
			return true, nil
		}
	}
	m.Content, m.Parts = strings.Join(texts, "\n"), jsonArray(passed)
	if thoughts != nil {
		thinking = jsonString(strings.Join(thoughts, "\n"))
	}
	return true, thinking
}

// textOf is the text of a JSON string; empty of other values.
func textOf(raw json.RawMessage) string {
	if kindOf(raw) != "a string" {
		return ""
	}
	return unquote(bytes.TrimSpace(raw))
}

// jsonString is a text as JSON.
func jsonString(text string) json.RawMessage {
	data, err := json.Marshal(text)
	if err != nil {
		panic("server: a text without a JSON form: " + err.Error())
	}
	return data
}

// jsonArray is a JSON array of values.
func jsonArray(values []json.RawMessage) json.RawMessage {
	b := []byte{'['}
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, v...)
	}
	return append(b, ']')
}

// parseToolCalls parses the tool calls of an assistant's message. Their arguments become JSON
// values, which is what templates expect; nil without calls. The names of their functions are added to
// names, by the ids of the calls.
func parseToolCalls(o *object, names map[string]string) json.RawMessage {
	raw, ok := o.pop("tool_calls")
	if !ok {
		return nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		o.wrongType("tool_calls", "an array of objects", raw)
		return nil
	}
	if len(list) == 0 {
		return nil
	}
	for i, item := range list {
		c, err := chat.ParseObject(item)
		if err != nil {
			o.wrongType(fmt.Sprintf("tool_calls[%d]", i), "an object", item)
			return nil
		}
		function, err := chat.ParseObject(c.Get("function"))
		if err != nil {
			o.fail("tool_calls", "invalid_type", "Invalid type for '%s': each call must have an object named function.", o.name("tool_calls"))
			return nil
		}
		var text string
		var arguments map[string]json.RawMessage
		written := function.Get("arguments")
		isText := written == nil || json.Unmarshal(written, &text) == nil // or null
		if isText {
			if _, values := extent([]byte(text)); values > maxToolValues {
				o.tooMany("tool_calls", maxToolValues, "JSON values")
				return nil
			}
		}
		switch {
		case isText && strings.TrimSpace(text) == "":
			function.Set("arguments", json.RawMessage("{}")) // of a function without parameters, as with vLLM
		case json.Unmarshal([]byte(text), &arguments) == nil && arguments != nil:
			function.Set("arguments", json.RawMessage(text))
		}
		if id, name := textOf(c.Get("id")), textOf(function.Get("name")); id != "" && name != "" {
			names[id] = name
		}
		c.Set("function", function.JSON())
		list[i] = c.JSON()
	}
	return jsonArray(list)
}

// render puts a conversation through the template and encodes it, up to a maximum number of tokens.
func (m *Model) render(ctx context.Context, c *conversation, limit int) ([]int32, error) {
	if m.Template == nil || m.Tokenizer == nil {
		return nil, badRequest("messages", "no_chat_template", "The model has no chat template: use /v1/completions.")
	}
	if ctx.Err() != nil {
		return nil, asError(ctx, ctx.Err(), "messages")
	}
	if err := m.checkNames(c); err != nil {
		return nil, err
	}
	m.withoutReasoning(c)
	prompt, err := m.Template.Render(ctx, c.messages, c.options)
	if err == nil && c.options.Tools != nil {
		without := c.options
		without.Tools = nil
		// A template that fails without tools has a place for them.
		if plain, failed := m.Template.Render(ctx, c.messages, without); failed == nil && plain.Text == prompt.Text {
			return nil, badRequest("tools", "unsupported_parameter", "'tools' is not supported: the model's chat template has no place for them.")
		}
	}
	if ctx.Err() != nil {
		return nil, asError(ctx, ctx.Err(), "messages")
	}
	var raised *chat.RaisedError
	if errors.As(err, &raised) {
		return nil, badRequest("messages", "invalid_value", "The model's chat template refuses the messages: %s", raised.Message)
	}
	if err != nil {
		return nil, badRequest("messages", "invalid_value", "The model's chat template cannot render the messages: %v", err)
	}
	if err := m.beginOutput(c, &prompt); err != nil {
		return nil, err
	}
	o := tokenizer.EncodeOptions{AddSpecial: c.special, Limit: limit}
	if !m.SpecialTokensInChat {
		o.Plain = prompt.Client
	}
	ids, err := m.Tokenizer.EncodeWith(prompt.Text, o)
	if err != nil {
		return nil, badRequest("messages", "invalid_value", "The messages cannot be turned into tokens: %v", err)
	}
	if len(ids) > limit && limit == m.MaxModelLen {
		return nil, promptTooLong("messages", limit, fmt.Sprintf("more than %d", limit))
	}
	if len(ids) > limit {
		return nil, badRequest("messages", "invalid_value", "Invalid value for 'messages': they have more than %d tokens.", limit)
	}
	if len(ids) == 0 {
		return nil, badRequest("messages", "invalid_value", "The model's chat template makes an empty prompt of the messages.")
	}
	return ids, nil
}

func (s *Server) chat(w *response, r *http.Request) error {
	var req *chatRequest
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) (err error) {
		req, err = m.parseChat(ctx, o)
		return err
	}); err != nil {
		return err
	}
	return s.converse(w, r, req, &chatResponse{req: req, text: req.served.texts(), head: completionHead{
		ID: "chatcmpl-" + w.id, Object: "chat.completion", Created: time.Now().Unix(), Model: req.called(),
	}, streamed: make([]*output.Parser, req.params.N)})
}

// called is the name of the model in the response.
func (r *chatRequest) called() string { return r.served.called(r.model) }

// converse generates the completion of a conversation, whose response has any shape.
func (s *Server) converse(w *response, r *http.Request, req *chatRequest, a responseShape) error {
	m := req.served
	if err := req.limit(req.prompt, m.ChatTokens, m.MaxModelLen, a.promptParam()); err != nil {
		return err
	}
	req.sent.PromptTokens = len(req.prompt)
	if req.firstCall && m.callFormat(req.conversation) != nil {
		req.params.Ends = req.endsWithCall
	}
	return s.generate(w, r, m, &req.common, []engine.Request{{ID: w.id, Prompt: req.prompt, Encoded: true, CacheSalt: req.cacheSalt, Priority: req.priority, Params: req.params}}, a)
}
