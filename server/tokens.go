package server

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// tokenized is vLLM's response of /tokenize.
type tokenized struct {
	Count       int      `json:"count"`
	MaxModelLen int      `json:"max_model_len"`
	Tokens      []int32  `json:"tokens"`
	TokenStrs   []string `json:"token_strs"`
}

// tokenize returns the ids of a text, or of messages in the chat template.
func (s *Server) tokenize(w *response, r *http.Request) error {
	var a *tokenized
	if err := s.prepare(w, r, func(ctx context.Context, m *Model, o *object) (err error) {
		a, err = m.tokenize(ctx, o)
		return err
	}); err != nil {
		return err
	}
	w.json(http.StatusOK, a)
	return nil
}

func (m *Model) tokenize(ctx context.Context, o *object) (*tokenized, error) {
	var name, text string
	var strs bool
	o.text("model", &name)
	o.flag("return_token_strs", &strs)
	var c *conversation
	special := true
	hasText := false
	if _, ok := o.members["messages"]; ok {
		c = parseConversation(o)
	} else {
		hasText = o.text("prompt", &text)
		o.flag("add_special_tokens", &special)
	}
	if c == nil && !hasText {
		o.fail("prompt", "missing_required_parameter", "Missing required parameter: 'prompt', a text, or 'messages'.")
	}
	if err := o.end(); err != nil {
		return nil, err
	}
	if err := m.known(name); err != nil {
		return nil, err
	}
	a := &tokenized{MaxModelLen: m.MaxModelLen}
	var err error
	switch {
	case c != nil:
		if a.Tokens, err = m.render(ctx, c, maxTokenIDs); err != nil {
			return nil, err
		}
	case m.Tokenizer == nil:
		return nil, badRequest("prompt", "invalid_value", "The model has no tokenizer.")
	default:
		if a.Tokens, err = m.Tokenizer.EncodeWith(text, tokenizer.EncodeOptions{AddSpecial: special, Limit: maxTokenIDs}); err != nil {
			return nil, badRequest("prompt", "invalid_value", "The prompt cannot be turned into tokens: %v", err)
		}
		if len(a.Tokens) > maxTokenIDs {
			return nil, badRequest("prompt", "invalid_value", "Invalid value for 'prompt': it has more than %d tokens.", maxTokenIDs)
		}
	}
	if a.Tokens == nil {
		a.Tokens = []int32{}
	}
	a.Count = len(a.Tokens)
	if strs {
		a.TokenStrs = make([]string, len(a.Tokens))
		for i, id := range a.Tokens {
			a.TokenStrs[i], _ = m.Tokenizer.Token(id)
		}
	}
	return a, nil
}

// tokenizerInfo returns the tokenizer's configuration, in vLLM's form: as transformers has it, special tokens are
// their texts.
func (s *Server) tokenizerInfo(w *response, r *http.Request) error {
	m, err := s.inURL(r)
	if err != nil {
		return err
	}
	if m.Tokenizer == nil {
		return badRequest("", "invalid_value", "The model has no tokenizer.")
	}
	info, err := chat.ParseObject(m.TokenizerConfig)
	if err != nil {
		info = chat.Object{} // without a tokenizer_config.json
	}
	for _, name := range []string{"bos_token", "eos_token", "unk_token", "pad_token"} {
		var token struct{ Content *string }
		if raw := info.Get(name); raw == nil {
			info.Set(name, json.RawMessage("null"))
		} else if json.Unmarshal(raw, &token) == nil && token.Content != nil {
			info.Set(name, jsonString(*token.Content))
		}
	}
	if t, ok := m.Template.(interface{ Source() string }); ok {
		info.Set("chat_template", jsonString(t.Source()))
	}
	w.json(http.StatusOK, info.JSON())
	return nil
}

// detokenized is vLLM's response of /detokenize.
type detokenized struct {
	Prompt string `json:"prompt"`
}

// detokenize returns the text of ids: with special tokens, without ids of the vocabulary that are no tokens.
func (s *Server) detokenize(w *response, r *http.Request) error {
	var a detokenized
	if err := s.prepare(w, r, func(_ context.Context, m *Model, o *object) (err error) {
		a.Prompt, err = m.detokenize(o)
		return err
	}); err != nil {
		return err
	}
	w.json(http.StatusOK, a)
	return nil
}

func (m *Model) detokenize(o *object) (string, error) {
	var name string
	var ids []int32
	o.text("model", &name)
	if !o.ids("tokens", &ids, maxTokenIDs) {
		o.fail("tokens", "missing_required_parameter", "Missing required parameter: 'tokens'.")
	}
	if err := o.end(); err != nil {
		return "", err
	}
	if err := m.known(name); err != nil {
		return "", err
	}
	if m.Tokenizer == nil {
		return "", badRequest("tokens", "invalid_value", "The model has no tokenizer.")
	}
	// A tokenizer may have tokens that its model does not know, and /tokenize returns them.
	if o.known("tokens", "token", ids, max(m.Vocab, m.Tokenizer.VocabSize())); o.err != nil {
		return "", o.err
	}
	return m.Tokenizer.Decode(ids, false), nil
}
