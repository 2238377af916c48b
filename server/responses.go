package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/chat/output"
)

// OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses. Nothing is stored, so
// that a request has all of its conversation. It becomes that of a chat.

// responseRequest is a chat with what its response repeats.
type responseRequest struct {
	*chatRequest
	echo responseEcho
}

// responseEcho are members of a request that its response has, too.
type responseEcho struct {
	Instructions    *string         `json:"instructions"`
	MaxOutputTokens *int            `json:"max_output_tokens"`
	Metadata        json.RawMessage `json:"metadata"`
	Parallel        bool            `json:"parallel_tool_calls"`
	Temperature     float32         `json:"temperature"`
	TopP            float32         `json:"top_p"`
	ToolChoice      json.RawMessage `json:"tool_choice"`
	Tools           json.RawMessage `json:"tools"`
	Reasoning       struct {
		Effort  *string `json:"effort"`
		Summary *string `json:"summary"`
	} `json:"reasoning"`
	Text struct {
		Format json.RawMessage `json:"format"`
	} `json:"text"`
}

// parseResponses reads the body of /v1/responses.
func (m *Model) parseResponses(o *object) (*responseRequest, error) {
	r := &responseRequest{chatRequest: &chatRequest{common: common{params: m.Defaults}, served: m}}
	r.echo = responseEcho{Metadata: json.RawMessage("{}"), Parallel: true, ToolChoice: jsonString("auto"), Tools: json.RawMessage("[]")}
	r.echo.Text.Format = json.RawMessage(`{"type":"text"}`)
	parseIdentity(o, &r.common)
	parseSampling(o, &r.params, m.vocab())
	parseStop(o, &r.params)
	parseEnd(o, &r.params, m.vocab())
	r.echo.Temperature, r.echo.TopP = r.params.Temperature, r.params.TopP
	parseMaxTokens(o, &r.common, "max_output_tokens")
	if r.someTokens(o); r.maxTokens > 0 {
		r.echo.MaxOutputTokens = &r.maxTokens
	}
	o.flag("stream", &r.stream)
	if s := o.sub("stream_options"); s != nil {
		s.settle(inStream)
		o.close(s)
	}
	if metadata, ok := o.pop("metadata"); ok {
		r.echo.Metadata = metadata
	}
	c := &conversation{options: chat.Options{AddGenerationPrompt: true}}
	r.conversation = c
	if reasoning := o.sub("reasoning"); reasoning != nil {
		var effort string
		if reasoning.text("effort", &effort) {
			c.options.Extra.Set("reasoning_effort", jsonString(effort))
			r.echo.Reasoning.Effort = &effort
		}
		reasoning.ignore("summary", "generate_summary") // the response has the reasoning itself
		o.close(reasoning)
	}
	if text := o.sub("text"); text != nil {
		if format := parseFormat(text, "format", &r.common); format != nil {
			r.echo.Text.Format = format
		}
		text.settle(inText)
		o.close(text)
	}
	parseInclude(o)
	c.parameters = "parameters"
	parseResponseTools(o, r)
	o.settle(inResponses)
	var instructions string
	if o.text("instructions", &instructions) {
		r.echo.Instructions = &instructions
		c.messages = append(c.messages, chat.Message{Role: "system", Content: instructions})
	}
	parseInput(o, c)
	return r, o.end()
}

// parseInclude parses include: the response has nothing more than it always has.
func parseInclude(o *object) {
	items, _ := o.list("include", "an array of strings", maxMembers)
	for i, raw := range items {
		if kindOf(raw) != "a string" {
			o.wrongType(fmt.Sprintf("include[%d]", i), "a string", raw)
		} else if name := unquote(raw); name != "reasoning.encrypted_content" { // reasoning is sent as it is
			o.unsupported("include", fmt.Sprintf("%q is not a part of responses", truncate(name)))
		}
	}
}

// parseResponseTools parses tools and tool_choice, which become those of a chat.
func parseResponseTools(o *object, r *responseRequest) {
	if raw, ok := o.members["tools"]; ok && !isNull(raw) {
		r.echo.Tools = raw
	}
	if raw, ok := o.members["tool_choice"]; ok && !isNull(raw) {
		r.echo.ToolChoice = raw
	}
	o.flag("parallel_tool_calls", &r.echo.Parallel)
	items, _ := o.list("tools", "an array of objects", maxTools)
	var tools []json.RawMessage
	for i, raw := range items {
		t := &object{path: fmt.Sprintf("tools[%d]", i)}
		t.parse(raw, "'"+t.path+"'")
		kind, name, description := "", "", ""
		if t.text("type", &kind); kind != "function" {
			t.unsupported("type", fmt.Sprintf("%q is a tool that the server would run, and this one runs none", truncate(kind)))
		}
		t.toolName(&name)
		t.text("description", &description)
		schema, _ := t.pop("parameters")
		var strict bool
		t.flag("strict", &strict)
		tools = append(tools, functionTool(name, description, schema, strict))
		if o.close(t); o.err != nil {
			return
		}
	}
	if tools != nil {
		o.members["tools"] = jsonArray(tools)
	}
	if raw := o.members["tool_choice"]; kindOf(raw) == "an object" {
		choice := o.sub("tool_choice")
		if choice == nil {
			return
		}
		var kind, name string
		if choice.text("type", &kind); kind != "function" {
			choice.fail("type", "invalid_value", `Invalid value for '%s': it must be "function", and is %q; "none", "auto" and "required" are sent as strings, without a type.`, choice.name("type"), truncate(kind))
		}
		choice.text("name", &name)
		o.close(choice)
		o.members["tool_choice"] = functionChoice(name)
	}
	parseTools(o, r.conversation)
	r.firstCall = !r.echo.Parallel || r.conversation.choice.name != ""
}

// parseInput parses input: a text of the user's, or items.
func parseInput(o *object, c *conversation) {
	raw, ok := o.pop("input")
	if !ok {
		o.fail("input", "missing_required_parameter", "Missing required parameter: 'input'.")
		return
	}
	b := conversationBuilder{names: map[string]string{}, to: c}
	switch kindOf(raw) {
	case "a string":
		b.say("user", unquote(raw))
		return
	case "an array":
	default:
		o.wrongType("input", "a string or an array of items", raw)
		return
	}
	if _, values := extent(raw); values > maxMessageValues {
		o.tooMany("input", maxMessageValues, "JSON values")
		return
	}
	n := 0
	eachItem(raw, func(raw json.RawMessage) bool {
		item := &object{path: fmt.Sprintf("input[%d]", n)}
		if n++; n > maxMessages {
			o.tooMany("input", maxMessages, "items")
			return false
		}
		item.parse(raw, "'"+item.path+"'")
		b.item(item)
		o.close(item)
		return o.err == nil
	})
	if b.flush(); o.err == nil && len(c.messages) == 0 {
		o.fail("input", "invalid_value", "Invalid value for 'input': it is empty, and there must be at least one item.")
	}
}

// item adds one of the items of the Responses API.
func (b *conversationBuilder) item(o *object) {
	kind := "message"
	o.text("type", &kind)
	o.ignore("id", "status", "phase", "namespace") // those of a response that is sent back
	required := func(member string, to *string) {
		if !o.text(member, to) {
			o.fail(member, "missing_required_parameter", "Missing required parameter: '%s'.", o.name(member))
		}
	}
	switch kind {
	case "message":
		var role string
		switch required("role", &role); role {
		case "user", "assistant", "system", "developer":
		default:
			o.fail("role", "invalid_value", "Invalid value for '%s': it must be user, assistant, system or developer.", o.name("role"))
		}
		if o.err == nil && o.members["content"] == nil {
			o.fail("content", "missing_required_parameter", "Missing required parameter: '%s'.", o.name("content"))
		}
		if text := joined(o, o.blocks("content")); role != "assistant" {
			b.say(role, text)
		} else {
			b.open = true
			b.text = append(b.text, text)
		}
	case "function_call":
		var id, name, arguments string
		required("call_id", &id)
		required("name", &name)
		o.text("arguments", &arguments)
		value := jsonString(arguments)
		if strings.TrimSpace(arguments) == "" {
			value = json.RawMessage("{}")
		} else if json.Valid([]byte(arguments)) && kindOf(json.RawMessage(arguments)) == "an object" {
			value = json.RawMessage(arguments)
			if depth, values := extent(value); depth > maxDepth || values > maxToolValues {
				o.fail("arguments", "invalid_value", "Invalid value for '%s': it has more than %d JSON values, or %d levels.", o.name("arguments"), maxToolValues, maxDepth)
			}
		}
		b.call(id, name, value)
	case "function_call_output":
		var id string
		required("call_id", &id)
		b.result(id, joined(o, o.blocks("output")))
	case "reasoning":
		o.ignore("summary", "encrypted_content")
		b.open = true
		for _, k := range o.blocks("content") {
			var kind, text string
			k.text("type", &kind)
			if k.text("text", &text) {
				b.reasoning = append(b.reasoning, text)
			}
			o.close(k)
		}
	case "item_reference":
		o.fail("type", "unsupported_parameter", "'%s' is not supported: nothing is stored that an item_reference could mean; send the item itself.", o.name("type"))
	default:
		o.fail("type", "unsupported_parameter", "'%s' is not supported: %q is none of message, function_call, function_call_output and reasoning.", o.name("type"), truncate(kind))
	}
}

// responses is /v1/responses.
func (s *Server) responses(w *response, r *http.Request) error {
	var req *responseRequest
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) (err error) {
		if req, err = m.parseResponses(o); err == nil {
			err = req.render(ctx)
		}
		return err
	}); err != nil {
		return err
	}
	a := &responsesResponse{req: req.chatRequest, id: w.id, head: responseObject{
		ID: "resp_" + w.id, Object: "response", CreatedAt: time.Now().Unix(), Status: "in_progress", Model: req.called(),
		Output: []any{}, responseEcho: req.echo, Truncation: "disabled",
	}}
	a.parts = newParts(req.chatRequest, a)
	return s.converse(w, r, req.chatRequest, a)
}

// responseObject is a response of /v1/responses.
type responseObject struct {
	ID                 string              `json:"id"`
	Object             string              `json:"object"`
	CreatedAt          int64               `json:"created_at"`
	Status             string              `json:"status"`
	Error              *responseError      `json:"error"`
	IncompleteDetails  *incompleteResponse `json:"incomplete_details"`
	Model              string              `json:"model"`
	Output             []any               `json:"output"`
	PreviousResponseID *string             `json:"previous_response_id"`
	Store              bool                `json:"store"`
	Background         bool                `json:"background"`
	Truncation         string              `json:"truncation"`
	responseEcho
	Usage *responseUsage `json:"usage"`
}

type responseError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

type incompleteResponse struct {
	Reason string `json:"reason"`
}

type responseUsage struct {
	InputTokens        int           `json:"input_tokens"`
	InputTokensDetails promptDetails `json:"input_tokens_details"`
	OutputTokens       int           `json:"output_tokens"`
	// OutputTokensDetails has the number of tokens of the text of reasoning.
	OutputTokensDetails struct {
		ReasoningTokens int `json:"reasoning_tokens"`
	} `json:"output_tokens_details"`
	TotalTokens int `json:"total_tokens"`
}

// The items of a response, and the content of a message or of reasoning.
type (
	messageItem struct {
		ID      string `json:"id"`
		Type    string `json:"type"`
		Status  string `json:"status"`
		Role    string `json:"role"`
		Content []any  `json:"content"`
	}
	reasoningItem struct {
		ID      string `json:"id"`
		Type    string `json:"type"`
		Status  string `json:"status"`
		Summary []any  `json:"summary"`
		Content []any  `json:"content"`
	}
	callItem struct {
		ID        string `json:"id"`
		Type      string `json:"type"`
		Status    string `json:"status"`
		CallID    string `json:"call_id"`
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	}
	outputText struct {
		Type        string `json:"type"`
		Text        string `json:"text"`
		Annotations []any  `json:"annotations"`
		LogProbs    []any  `json:"logprobs"`
	}
	reasoningContent struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
)

// responsesResponse writes responses of /v1/responses.
type responsesResponse struct {
	req   *chatRequest
	id    string
	head  responseObject
	parts *parts
	// events of a stream that parts have added, and are to be sent; sequence is the number of the next.
	events   []any
	sequence int
	// finish is why a stream's completion has ended.
	finish engine.FinishReason
}

// itemID is the id of the item that a part is.
func (a *responsesResponse) itemID(p *part) string {
	kind := map[output.Kind]string{output.Content: "msg", output.Reasoning: "rs", output.Call: "fc"}[p.kind]
	return fmt.Sprintf("%s_%s_%d", kind, a.id, p.index)
}

// content of a message or of reasoning.
func (p *part) content(text string) any {
	if p.kind == output.Reasoning {
		return reasoningContent{"reasoning_text", text}
	}
	return outputText{"output_text", text, []any{}, []any{}}
}

// item is a part of a message as an item; empty, it is that of a response.output_item.added.
func (a *responsesResponse) item(p *part, empty bool) any {
	status, text, content := "completed", p.text, []any{p.content(p.text)}
	if empty {
		status, text, content = "in_progress", "", []any{}
	} else if a.finish == engine.FinishLength && p == a.parts.last() {
		status = "incomplete"
	}
	switch p.kind {
	case output.Reasoning:
		return reasoningItem{a.itemID(p), "reasoning", status, []any{}, content}
	case output.Call:
		return callItem{a.itemID(p), "function_call", status, p.id, p.name, text}
	}
	return messageItem{a.itemID(p), "message", status, "assistant", content}
}

// complete is the response at its end.
func (a *responsesResponse) complete(u *usage) responseObject {
	r := a.head
	for _, p := range a.parts.list {
		r.Output = append(r.Output, a.item(p, false))
	}
	if r.Status = "completed"; a.finish == engine.FinishLength {
		r.Status, r.IncompleteDetails = "incomplete", &incompleteResponse{"max_output_tokens"}
	}
	r.Usage = &responseUsage{InputTokens: u.PromptTokens, InputTokensDetails: u.PromptTokensDetails, OutputTokens: u.CompletionTokens, TotalTokens: u.TotalTokens}
	for _, p := range a.parts.list {
		if p.kind == output.Reasoning {
			if ids, err := a.req.served.Tokenizer.Encode(p.text, false); err == nil {
				r.Usage.OutputTokensDetails.ReasoningTokens += len(ids)
			}
		}
	}
	return r
}

func (a *responsesResponse) whole(choices []engine.Update, u *usage) any {
	a.finish = choices[0].Finish
	a.parts = wholeParts(a.req, &choices[0])
	return a.complete(u)
}

// event adds an event, whose data has its name as type, and its number.
func (a *responsesResponse) event(name string, members ...chat.Member) {
	data := append(chat.Object{member("type", name), member("sequence_number", a.sequence)}, members...)
	a.sequence++
	a.events = append(a.events, namedEvent{name, data.JSON()})
}

// ofPart adds an event about the text of a part.
func (a *responsesResponse) ofPart(p *part, name string, members ...chat.Member) {
	all := []chat.Member{member("item_id", a.itemID(p)), member("output_index", p.index)}
	if p.kind != output.Call {
		all = append(all, member("content_index", 0))
	}
	a.event(name, append(all, members...)...)
}

// textEvents are how events about the text of a part begin.
var textEvents = map[output.Kind]string{
	output.Content: "response.output_text.", output.Reasoning: "response.reasoning_text.", output.Call: "response.function_call_arguments.",
}

func (a *responsesResponse) begin(p *part) {
	a.event("response.output_item.added", member("output_index", p.index), member("item", a.item(p, true)))
	if p.kind != output.Call {
		a.ofPart(p, "response.content_part.added", member("part", p.content("")))
	}
}

func (a *responsesResponse) more(p *part, text string) {
	members := []chat.Member{member("delta", text)}
	if p.kind == output.Content {
		members = append(members, member("logprobs", []any{}))
	}
	a.ofPart(p, textEvents[p.kind]+"delta", members...)
}

func (a *responsesResponse) end(p *part) {
	switch p.kind {
	case output.Call:
		a.ofPart(p, textEvents[p.kind]+"done", member("name", p.name), member("arguments", p.text))
	case output.Reasoning:
		a.ofPart(p, textEvents[p.kind]+"done", member("text", p.text))
	default:
		a.ofPart(p, textEvents[p.kind]+"done", member("text", p.text), member("logprobs", []any{}))
	}
	if p.kind != output.Call {
		a.ofPart(p, "response.content_part.done", member("part", p.content(p.text)))
	}
	a.event("response.output_item.done", member("output_index", p.index), member("item", a.item(p, false)))
}

func (a *responsesResponse) take() []any {
	events := a.events
	a.events = nil
	return events
}

func (a *responsesResponse) chunks(_ int, first bool, u *engine.Update) []any {
	if first {
		a.event("response.created", member("response", a.head))
		a.event("response.in_progress", member("response", a.head))
	}
	a.finish = u.Finish
	a.parts.push(u)
	return a.take()
}

func (a *responsesResponse) finished(u *usage) []any {
	r := a.complete(u)
	a.event("response."+r.Status, member("response", r))
	return a.take()
}

func (a *responsesResponse) failed(e *Error) []any {
	body := e.body().Error
	a.event("error", member("code", body.Code), member("message", body.Message), member("param", body.Param))
	r := a.head
	r.Status, r.Error = "failed", &responseError{"server_error", body.Message}
	a.event("response.failed", member("response", r))
	return a.take()
}

func (a *responsesResponse) promptParam() string { return "input" }
