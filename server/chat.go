package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
)

type chatRequest struct {
	common
	prompt []int32
}

// conversation is the input of the chat template.
type conversation struct {
	messages []chat.Message
	options  chat.Options
	// special adds the tokenizer's special tokens around what the template wrote.
	special bool
}

// parseChat reads the body of /v1/chat/completions.
func (m *Model) parseChat(ctx context.Context, o *object) (*chatRequest, error) {
	r := &chatRequest{common: parseCommon(o, m)}
	parseMaxTokens(o, &r.common, "max_completion_tokens") // the newer name goes first
	o.flag("logprobs", &r.params.LogProbs)
	if o.integer("top_logprobs", &r.params.TopLogProbs) && r.params.TopLogProbs != 0 && !r.params.LogProbs {
		o.fail("top_logprobs", "invalid_value", "Invalid value for 'top_logprobs': it needs 'logprobs' to be true.")
	}
	o.settle(inChat)
	c := parseConversation(o)
	if err := o.end(); err != nil {
		return nil, err
	}
	if err := m.known(r.model); err != nil {
		return nil, err
	}
	var err error
	r.prompt, err = m.render(ctx, c, m.MaxModelLen)
	return r, err
}

// parseConversation parses the members that the chat template uses.
func parseConversation(o *object) *conversation {
	c := &conversation{options: chat.Options{AddGenerationPrompt: true}}
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
	for i, raw := range messages {
		m := &object{path: fmt.Sprintf("messages[%d]", i)}
		m.parse(raw, "'"+m.path+"'")
		c.messages = append(c.messages, parseMessage(m))
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

// parseTools parses the tools that the template describes to the model. Tool calls of the
// model are returned as text.
func parseTools(o *object, c *conversation) {
	raw, choice := json.RawMessage(nil), "auto"
	if tools, ok := o.pop("tools"); ok {
		if kindOf(tools) != "an array" {
			o.wrongType("tools", "an array of objects", tools)
			return
		}
		if _, values := extent(tools); values > maxToolValues {
			o.tooMany("tools", maxToolValues, "JSON values")
			return
		}
		number := 0
		eachItem(tools, func(tool json.RawMessage) bool {
			if number++; kindOf(tool) != "an object" {
				o.wrongType("tools", "an array of objects", tools)
			} else if number > maxTools {
				o.tooMany("tools", maxTools, "tools")
			}
			return o.err == nil
		})
		if number > 0 {
			raw = tools
		}
	}
	if picked, ok := o.pop("tool_choice"); ok {
		if json.Unmarshal(picked, &choice) != nil || choice != "none" && choice != "auto" {
			o.unsupported("tool_choice", `it must be "none" or "auto", as nothing makes the model call a tool`)
		}
	}
	if choice == "auto" {
		c.options.Tools = raw
	}
}

// parseMessage parses one message.
func parseMessage(o *object) chat.Message {
	var m chat.Message
	if !o.text("role", &m.Role) {
		o.fail("role", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("role"))
	}
	if roles := []string{"system", "developer", "user", "assistant", "tool", "function"}; !slices.Contains(roles, m.Role) {
		o.fail("role", "invalid_value", "Invalid value for '%s': it must be one of %s.", o.name("role"), strings.Join(roles, ", "))
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
	calls := parseToolCalls(o)
	if calls != nil {
		extra.Set("tool_calls", calls)
	}
	if !content && calls == nil {
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
// values, which is what templates expect; nil without calls.
func parseToolCalls(o *object) json.RawMessage {
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
			o.wrongType("tool_calls", "an array of objects", raw)
			return nil
		}
		function, err := chat.ParseObject(c.Get("function"))
		if err != nil {
			o.fail("tool_calls", "invalid_type", "Invalid type for '%s': each call must have an object named function.", o.name("tool_calls"))
			return nil
		}
		var text string
		var arguments map[string]json.RawMessage
		if json.Unmarshal(function.Get("arguments"), &text) == nil {
			if _, values := extent([]byte(text)); values > maxToolValues {
				o.tooMany("tool_calls", maxToolValues, "JSON values")
				return nil
			}
		}
		if text != "" && json.Unmarshal([]byte(text), &arguments) == nil && arguments != nil {
			function.Set("arguments", json.RawMessage(text))
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
	prompt, err := m.Template.Render(ctx, c.messages, c.options)
	if err == nil && c.options.Tools != nil {
		without := c.options
		without.Tools = nil
		var plain chat.Prompt
		if plain, err = m.Template.Render(ctx, c.messages, without); err == nil && plain.Text == prompt.Text {
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
	var m *Model
	var req *chatRequest
	if err := s.prepare(w, r, func(ctx context.Context, model *Model, o *object) (err error) {
		m = model
		req, err = m.parseChat(ctx, o)
		return err
	}); err != nil {
		return err
	}
	if err := req.limit(req.prompt, m.ChatTokens, m.MaxModelLen, "messages"); err != nil {
		return err
	}
	req.sent.PromptTokens = len(req.prompt)
	a := &chatResponse{req: req, text: m.texts(), head: completionHead{
		ID: "chatcmpl-" + w.id, Object: "chat.completion", Created: time.Now().Unix(), Model: m.called(req.model),
	}}
	return s.generate(w, r, m, &req.common, []engine.Request{{ID: w.id, Prompt: req.prompt, Encoded: true, CacheSalt: req.cacheSalt, Priority: req.priority, Params: req.params}}, a)
}

// chatCompletion is a whole response of /v1/chat/completions.
type chatCompletion struct {
	completionHead
	Choices        []chatChoice `json:"choices"`
	Usage          *usage       `json:"usage"`
	PromptTokenIDs []int32      `json:"prompt_token_ids,omitempty"`
}

type chatChoice struct {
	Index        int           `json:"index"`
	Message      chatMessage   `json:"message"`
	LogProbs     *chatLogProbs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
	TokenIDs     []int32       `json:"token_ids,omitempty"`
}

type chatMessage struct {
	Role    string  `json:"role"`
	Content string  `json:"content"`
	Refusal *string `json:"refusal"`
}

// chatChunk is a chunk of a streamed response.
type chatChunk struct {
	completionHead
	Choices []chatChunkChoice `json:"choices"`
	// Usage is a *usage, which may be null, or omitted.
	Usage          any     `json:"usage,omitempty"`
	PromptTokenIDs []int32 `json:"prompt_token_ids,omitempty"`
}

type chatChunkChoice struct {
	Index        int           `json:"index"`
	Delta        chatDelta     `json:"delta"`
	LogProbs     *chatLogProbs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
	TokenIDs     []int32       `json:"token_ids,omitempty"`
}

type chatDelta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type chatLogProbs struct {
	Content []chatLogProb `json:"content"`
	Refusal []chatLogProb `json:"refusal"`
}

type chatLogProb struct {
	Token   string  `json:"token"`
	LogProb float64 `json:"logprob"`
	// Bytes of the token's text, as numbers; null where it has none.
	Bytes []int         `json:"bytes"`
	Top   []chatLogProb `json:"top_logprobs,omitzero"`
}

// chatResponse writes responses of /v1/chat/completions.
type chatResponse struct {
	req  *chatRequest
	head completionHead
	text *tokenTexts
}

func (a *chatResponse) logProbs(tokens []engine.Token) *chatLogProbs {
	if !a.req.params.LogProbs {
		return nil
	}
	one := func(id int32, lp float32) chatLogProb {
		text, _ := a.text.shown(id)
		return chatLogProb{Token: text, LogProb: logProb(lp), Bytes: a.text.bytes(id)}
	}
	l := &chatLogProbs{Content: []chatLogProb{}}
	for _, t := range tokens {
		p := one(t.ID, t.LogProb)
		p.Top = []chatLogProb{}
		for _, other := range t.Top {
			p.Top = append(p.Top, one(other.ID, other.LogProb))
		}
		l.Content = append(l.Content, p)
	}
	return l
}

func (a *chatResponse) ids(tokens []engine.Token) []int32 {
	if !a.req.tokenIDs {
		return nil
	}
	return tokenIDs(tokens)
}

func (a *chatResponse) promptIDs() []int32 {
	if !a.req.tokenIDs {
		return nil
	}
	return a.req.prompt
}

func (a *chatResponse) whole(choices []engine.Update, u *usage) any {
	c := chatCompletion{completionHead: a.head, Usage: u, PromptTokenIDs: a.promptIDs(), Choices: make([]chatChoice, len(choices))}
	for i, u := range choices {
		c.Choices[i] = chatChoice{
			Index: i, Message: chatMessage{Role: "assistant", Content: u.Text}, LogProbs: a.logProbs(u.Tokens),
			FinishReason: finishReason(u.Finish), TokenIDs: a.ids(u.Tokens),
		}
	}
	return c
}

// chunks are the assistant's role in the first, one for each token, whose text may come with a
// later one, and the reason in the last.
func (a *chatResponse) chunks(index int, first bool, u *engine.Update) []any {
	var all []any
	add := func(tokens int, c chatChunkChoice) *chatChunk {
		c.Index = index
		chunk := &chatChunk{completionHead: a.head, Choices: []chatChunkChoice{c}, Usage: a.req.chunkUsage(tokens)}
		chunk.Object = "chat.completion.chunk"
		all = append(all, chunk)
		return chunk
	}
	if first {
		chunk := add(0, chatChunkChoice{Delta: chatDelta{Role: "assistant", Content: new(string)}})
		if index == 0 {
			chunk.PromptTokenIDs = a.promptIDs()
		}
	}
	c, tokens := chatChunkChoice{LogProbs: a.logProbs(u.Tokens), TokenIDs: a.ids(u.Tokens)}, len(u.Tokens)
	if u.Text != "" || u.Finish == "" {
		c.Delta.Content = &u.Text
		add(tokens, c)
		c, tokens = chatChunkChoice{}, 0
	}
	if u.Finish != "" {
		c.FinishReason = finishReason(u.Finish)
		add(tokens, c)
	}
	return all
}

func (a *chatResponse) last(u *usage) any {
	c := chatChunk{completionHead: a.head, Choices: []chatChunkChoice{}, Usage: u}
	c.Object = "chat.completion.chunk"
	return c
}

func (a *chatResponse) promptParam() string { return "messages" }
