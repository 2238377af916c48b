package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// defaultCompletionTokens is max_tokens of a completion that gives none.
const defaultCompletionTokens = 16

// prompt is the prompt of a completion.
type prompt struct {
	ids []int32
	// text is the client's, which the tokenizer encoded, or is decoded from the client's ids.
	text    string
	encoded bool
}

type completionRequest struct {
	common
	prompts []prompt
	echo    bool
}

// parseCompletion reads the body of /v1/completions.
func (s *Server) parseCompletion(ctx context.Context, m *Model, o *object) (*completionRequest, error) {
	r := &completionRequest{common: parseCommon(o, m)}
	special := true
	o.flag("add_special_tokens", &special)
	o.flag("echo", &r.echo)
	if o.integer("logprobs", &r.params.TopLogProbs) {
		r.params.LogProbs = true
		if n := r.params.TopLogProbs; n < 0 || n > engine.MaxTopLogProbs {
			o.fail("logprobs", "invalid_value", "Invalid value for 'logprobs': it must be from 0 to %d, and is %d.", engine.MaxTopLogProbs, n)
		}
	}
	if r.echo && r.params.LogProbs {
		r.params.PromptLogProbs = true
		r.params.TopPromptLogProbs = max(r.params.TopPromptLogProbs, r.params.TopLogProbs)
	}
	best := r.params.N
	if o.integer("best_of", &best); best != r.params.N {
		o.unsupported("best_of", "it must be n, as all completions are returned")
	}
	o.settle(inCompletion)
	raw, ok := o.pop("prompt")
	if !ok {
		o.fail("prompt", "missing_required_parameter", "Missing required parameter: 'prompt'.")
	}
	if err := o.end(); err != nil {
		return nil, err
	}
	if err := m.known(r.model); err != nil {
		return nil, err
	}
	var err error
	if err := m.constrain(ctx, &r.params, &r.structure, nil, false); err != nil {
		return nil, err
	}
	r.prompts, err = m.prompts(ctx, o, raw, special, r.params.N, s.o.MaxSamples)
	return r, err
}

// prompts reads a prompt: text, a list of texts, token ids, or a list of those. Of several, their number times n is
// at most samples.
func (m *Model) prompts(ctx context.Context, o *object, raw json.RawMessage, special bool, n, samples int) ([]prompt, error) {
	most := max(1, samples/n)
	items, listed := []json.RawMessage{raw}, false
	if kindOf(raw) == "an array" {
		if ids, wrong := parseIDs(raw, m.MaxModelLen); len(ids) > 0 || kindOf(wrong) == "a number" {
			most = 1 // one prompt
		} else {
			items, listed = items[:0], true
			eachItem(raw, func(item json.RawMessage) bool {
				items = append(items, item)
				return len(items) <= most
			})
		}
		if len(items) == 0 {
			o.fail("prompt", "invalid_value", "Invalid value for 'prompt': it is an empty array.")
		}
	}
	if len(items) > most {
		tooManyPrompts(o, most, n, samples)
		items = nil
	}
	prompts := make([]prompt, 0, len(items))
	for i, item := range items {
		if ctx.Err() != nil {
			return nil, asError(ctx, ctx.Err(), "prompt")
		}
		name, want := "prompt", "a string, an array of strings, an array of token ids, or an array of those"
		if listed {
			name, want = fmt.Sprintf("prompt[%d]", i), "a string or an array of token ids"
		}
		var p prompt
		switch kindOf(item) {
		case "a string":
			if m.Tokenizer == nil {
				o.fail("prompt", "invalid_value", "The model has no tokenizer: give the prompt as token ids.")
				break
			}
			p.text = unquote(item)
			var err error
			if p.ids, err = m.Tokenizer.EncodeWith(p.text, tokenizer.EncodeOptions{AddSpecial: special, Limit: m.MaxModelLen}); err != nil {
				o.fail("prompt", "invalid_value", "The prompt cannot be turned into tokens: %v", err)
			}
			p.encoded = true
			if len(p.ids) > m.MaxModelLen {
				return nil, promptTooLong("prompt", m.MaxModelLen, fmt.Sprintf("more than %d", m.MaxModelLen))
			}
		case "an array":
			ids, wrong := parseIDs(item, m.MaxModelLen)
			if wrong != nil {
				o.wrongID(fmt.Sprintf("%s[%d]", name, len(ids)), wrong)
				break
			}
			if len(ids) > m.MaxModelLen {
				return nil, promptTooLong("prompt", m.MaxModelLen, fmt.Sprintf("more than %d", m.MaxModelLen))
			}
			if m.Vocab > 0 {
				o.known(name, "prompt token", ids, m.Vocab)
			}
			p = m.decoded(ids)
		default:
			o.wrongType(name, want, item)
		}
		if o.err == nil && len(p.ids) == 0 {
			o.fail(name, "invalid_value", "Invalid value for '%s': it is empty, and there must be at least one token to go on from.", name)
		}
		prompts = append(prompts, p)
	}
	return prompts, o.end()
}

// tooManyPrompts is the error for more prompts than one request may have.
func tooManyPrompts(o *object, most, n, samples int) {
	what := "prompts"
	if most == 1 {
		what = "prompt"
	}
	o.fail("prompt", "invalid_value", "Invalid value for 'prompt': it has more than %d %s. The number of prompts times n (here %d) may be at most %d (the server's --max-queued-requests): send fewer in a request.",
		most, what, n, samples)
}

// decoded is the prompt of ids.
func (m *Model) decoded(ids []int32) prompt {
	p := prompt{ids: ids}
	if m.Tokenizer != nil {
		p.text = m.Tokenizer.Decode(ids, true)
	}
	return p
}

func (s *Server) completions(w *response, r *http.Request) error {
	var m *Model
	var req *completionRequest
	if err := s.prepare(w, r, func(ctx context.Context, model *Model, o *object) (err error) {
		m = model
		req, err = s.parseCompletion(ctx, m, o)
		return err
	}); err != nil {
		return err
	}
	requests := make([]engine.Request, len(req.prompts))
	for i, p := range req.prompts {
		if err := req.limit(p.ids, defaultCompletionTokens, m.MaxModelLen, "prompt"); err != nil {
			return err
		}
		req.sent.PromptTokens += len(p.ids)
		requests[i] = engine.Request{ID: w.id, Prompt: p.ids, Encoded: p.encoded, CacheSalt: req.cacheSalt, Priority: req.priority, Params: req.params}
		// A grammar's text is that of a start.
		requests[i].Continues = p.text != "" && req.params.Grammar == nil
	}
	a := &completionResponse{req: req, text: m.texts(), head: completionHead{
		ID: "cmpl-" + w.id, Object: "text_completion", Created: time.Now().Unix(), Model: m.called(req.model),
	}}
	a.offsets = make([]int, len(req.prompts)*req.params.N)
	a.streams = make([]*tokenizer.Stream, len(a.offsets))
	if m.Tokenizer != nil && req.params.LogProbs {
		for i := range a.streams {
			a.streams[i] = m.Tokenizer.NewStream(!req.params.SpecialTokens)
			if requests[i/req.params.N].Continues {
				a.streams[i].Continue()
			}
		}
	}
	return s.generate(w, r, m, &req.common, requests, a)
}

type completionHead struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
}

// completion is a response of /v1/completions, whole or a chunk of it.
type completion struct {
	completionHead
	Choices []completionChoice `json:"choices"`
	// Usage is a *usage, which may be null, or omitted.
	Usage any `json:"usage,omitempty"`
}

type completionChoice struct {
	Index          int                 `json:"index"`
	Text           string              `json:"text"`
	LogProbs       *completionLogProbs `json:"logprobs"`
	FinishReason   *string             `json:"finish_reason"`
	PromptLogProbs []positionLogProbs  `json:"prompt_logprobs,omitempty"`
	TokenIDs       []int32             `json:"token_ids,omitempty"`
	PromptTokenIDs []int32             `json:"prompt_token_ids,omitempty"`
}

// completionLogProbs has an entry per token in each of its lists; null for the first token of a prompt.
type completionLogProbs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogProbs []*float64           `json:"token_logprobs"`
	TopLogProbs   []map[string]float64 `json:"top_logprobs"`
	// TextOffset of a token, in characters from the start of the choice's text.
	TextOffset []int `json:"text_offset"`
}

// completionResponse writes responses of /v1/completions.
type completionResponse struct {
	req  *completionRequest
	head completionHead
	text *tokenTexts
	// offsets in characters of each choice's next token, in the text of its tokens so far.
	offsets []int
	streams []*tokenizer.Stream
}

func (a *completionResponse) choice(index int, first bool, u *engine.Update) completionChoice {
	c := completionChoice{Index: index, Text: u.Text, FinishReason: finishReason(u.Finish)}
	p := &a.req.prompts[index/a.req.params.N]
	if first && a.req.echo {
		c.Text = p.text + c.Text
	}
	if a.req.tokenIDs {
		c.TokenIDs = tokenIDs(u.Tokens)
		if first {
			c.PromptTokenIDs = p.ids
		}
	}
	if first {
		c.PromptLogProbs = a.req.promptPositions(a.text, index/a.req.params.N, p.ids)
	}
	if a.req.params.LogProbs {
		c.LogProbs = &completionLogProbs{Tokens: []string{}, TokenLogProbs: []*float64{}, TopLogProbs: []map[string]float64{}, TextOffset: []int{}}
		if first && a.req.echo {
			a.addPrompt(c.LogProbs, index, p)
		}
		a.addLogProbs(c.LogProbs, index, u.Tokens)
	}
	return c
}

// addPrompt adds the tokens of a choice's prompt.
func (a *completionResponse) addPrompt(l *completionLogProbs, index int, p *prompt) {
	first := a.text.shown(p.ids[0])
	l.Tokens, l.TokenLogProbs, l.TopLogProbs = append(l.Tokens, first), append(l.TokenLogProbs, nil), append(l.TopLogProbs, nil)
	tokens := make([]engine.Token, len(p.ids)-1)
	for i, t := range a.req.promptTokens[index/a.req.params.N] {
		tokens[i] = t.Token
		tokens[i].Top = t.Top[:min(a.req.params.TopLogProbs, len(t.Top))]
	}
	stream := a.streams[index]
	a.streams[index] = nil // it begins behind the prompt
	a.addLogProbs(l, index, tokens)
	a.streams[index] = stream
	// Special tokens are not in the text, and characters may have several tokens.
	l.TextOffset = a.text.offsets(p.ids)
	a.offsets[index] = utf8.RuneCountInString(p.text)
}

func (a *completionResponse) addLogProbs(l *completionLogProbs, index int, tokens []engine.Token) {
	for _, t := range tokens {
		text := a.text.shown(t.ID)
		top := make(map[string]float64, len(t.Top)+1)
		top[text] = logProb(t.LogProb)
		for _, other := range t.Top {
			name := a.text.shown(other.ID)
			// Of two ids with the same text the likelier one counts.
			if lp, ok := top[name]; !ok || lp < logProb(other.LogProb) {
				top[name] = logProb(other.LogProb)
			}
		}
		l.Tokens = append(l.Tokens, text)
		own := logProb(t.LogProb)
		l.TokenLogProbs = append(l.TokenLogProbs, &own)
		l.TopLogProbs = append(l.TopLogProbs, top)
		l.TextOffset = append(l.TextOffset, a.offsets[index])
		if s := a.streams[index]; s != nil {
			a.offsets[index] += utf8.RuneCountInString(s.Push(t.ID))
		}
	}
}

func (a *completionResponse) whole(choices []engine.Update, u *usage) any {
	c := completion{completionHead: a.head, Usage: u, Choices: make([]completionChoice, len(choices))}
	for i := range choices {
		c.Choices[i] = a.choice(i, true, &choices[i])
	}
	return c
}

// chunks has one chunk for each update, which is a token: its text may come with a later one.
func (a *completionResponse) chunks(index int, first bool, u *engine.Update) []any {
	c := a.choice(index, first, u)
	return []any{completion{completionHead: a.head, Choices: []completionChoice{c}, Usage: a.req.chunkUsage(len(u.Tokens))}}
}

func (a *completionResponse) finished(u *usage) []any {
	return a.req.endOfStream(completion{completionHead: a.head, Choices: []completionChoice{}, Usage: u})
}

func (a *completionResponse) failed(e *Error) []any { return []any{e.body(), streamEnd{}} }

func (a *completionResponse) promptParam() string { return "prompt" }
