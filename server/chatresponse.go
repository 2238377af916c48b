package server

import (
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat/output"
)

// chatCompletion is a whole response of /v1/chat/completions.
type chatCompletion struct {
	completionHead
	Choices        []chatChoice       `json:"choices"`
	Usage          *usage             `json:"usage"`
	PromptTokenIDs []int32            `json:"prompt_token_ids,omitempty"`
	PromptLogProbs []positionLogProbs `json:"prompt_logprobs,omitempty"`
}

type chatChoice struct {
	Index        int           `json:"index"`
	Message      chatMessage   `json:"message"`
	LogProbs     *chatLogProbs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
	TokenIDs     []int32       `json:"token_ids,omitempty"`
}

// chatMessage is the assistant's. Content is null where there are only calls or reasoning.
type chatMessage struct {
	Role    string  `json:"role"`
	Content *string `json:"content"`
	Refusal *string `json:"refusal"`
	reasoningText
	ToolCalls []chatCall `json:"tool_calls,omitempty"`
}

// reasoningText is reasoning under vLLM's name for it, and under that which vLLM had before, and
// DeepSeek has: clients read either.
type reasoningText struct {
	Reasoning        string `json:"reasoning,omitempty"`
	ReasoningContent string `json:"reasoning_content,omitempty"`
}

// chatCall is a tool call or, in a stream, a part of one: only the first has an id.
type chatCall struct {
	// Index in the message, in streams.
	Index    *int         `json:"index,omitempty"`
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Function chatFunction `json:"function"`
}

type chatFunction struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
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
	reasoningText
	ToolCalls []chatCall `json:"tool_calls,omitempty"`
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
	// streamed are the parsers of each choice of a stream; nil before its first update.
	streamed []*output.Parser
}

// message collects deltas. calls are in the order of their index.
func (a *chatResponse) message(deltas []output.Delta) (content string, reasoning reasoningText, calls []chatCall) {
	content = output.Join(deltas, output.Content)
	if !a.req.withoutReasoning {
		reasoning.Reasoning = output.Join(deltas, output.Reasoning)
		reasoning.ReasoningContent = reasoning.Reasoning
	}
	for _, d := range deltas {
		if d.Kind != output.Call && d.Kind != output.Arguments || a.req.firstCall && d.Index > 0 {
			continue
		}
		if d.Kind == output.Call || len(calls) == 0 || *calls[len(calls)-1].Index != d.Index {
			calls = append(calls, chatCall{Index: &d.Index})
		}
		c := &calls[len(calls)-1]
		if d.Kind == output.Call {
			c.ID, c.Type, c.Function.Name = a.req.served.newCallID(), "function", d.Text
		} else {
			c.Function.Arguments += d.Text
		}
	}
	return content, reasoning, calls
}

// finishOfChat is the reason for the end of an output.
func finishOfChat(r engine.FinishReason, p *output.Parser) *string {
	if r == engine.FinishStop && p.Calls() > 0 {
		reason := "tool_calls"
		return &reason
	}
	return finishReason(r)
}

func (a *chatResponse) logProbs(tokens []engine.Token) *chatLogProbs {
	if !a.req.params.LogProbs {
		return nil
	}
	one := func(id int32, lp float32) chatLogProb {
		text := a.text.shown(id)
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
	c := chatCompletion{completionHead: a.head, Usage: u, PromptTokenIDs: a.promptIDs(), PromptLogProbs: a.req.promptPositions(a.text, 0, a.req.prompt), Choices: make([]chatChoice, len(choices))}
	for i, u := range choices {
		p := a.req.parser()
		content, reasoning, calls := a.message(append(p.Push(u.Text), p.End()...))
		for i := range calls {
			calls[i].Index = nil
		}
		m := chatMessage{Role: "assistant", Content: &content, reasoningText: reasoning, ToolCalls: calls}
		if content == "" && (calls != nil || reasoning.Reasoning != "") {
			m.Content = nil
		}
		c.Choices[i] = chatChoice{
			Index: i, Message: m, LogProbs: a.logProbs(u.Tokens),
			FinishReason: finishOfChat(u.Finish, p), TokenIDs: a.ids(u.Tokens),
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
	if a.streamed[index] == nil {
		a.streamed[index] = a.req.parser()
	}
	p := a.streamed[index]
	deltas := p.Push(u.Text)
	if u.Finish != "" {
		deltas = append(deltas, p.End()...)
	}
	content, reasoning, calls := a.message(deltas)
	c, tokens := chatChunkChoice{LogProbs: a.logProbs(u.Tokens), TokenIDs: a.ids(u.Tokens)}, len(u.Tokens)
	other := reasoning.Reasoning != "" || calls != nil
	if content != "" || other || u.Finish == "" {
		c.Delta.reasoningText, c.Delta.ToolCalls = reasoning, calls
		if content != "" || !other {
			c.Delta.Content = &content
		}
		add(tokens, c)
		c, tokens = chatChunkChoice{}, 0
	}
	if u.Finish != "" {
		c.FinishReason = finishOfChat(u.Finish, p)
		add(tokens, c)
	}
	return all
}

func (a *chatResponse) finished(u *usage) []any {
	c := chatChunk{completionHead: a.head, Choices: []chatChunkChoice{}, Usage: u}
	c.Object = "chat.completion.chunk"
	return a.req.endOfStream(c)
}

func (a *chatResponse) failed(e *Error) []any { return []any{e.body(), streamEnd{}} }

func (a *chatResponse) promptParam() string { return "messages" }
