package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/node/fault"
)

// Text is what turns text into a model's ids and back.
type Text struct {
	// Tokenizer is nil where the model has none (a preset).
	Tokenizer tokenizer.Tokenizer
	// Template is the chat template; nil where the model has none, or where it is
	// broken: then Broken says how.
	Template *chat.Template
	Broken   error
	name     string
}

// ReadText reads tokenizer and chat template, where the model has files.
func (m *Model) ReadText() (Text, error) {
	t := Text{name: m.Name}
	if m.Files == nil {
		return t, nil
	}
	tok, err := fs.ReadFile(m.Files, "tokenizer.json")
	if errors.Is(err, fs.ErrNotExist) {
		return t, fault.Of(fault.ErrModel, fmt.Errorf("%s has no tokenizer.json, which turns text into the model's ids; download the complete checkpoint", m.Name))
	}
	if err != nil {
		return t, fault.Of(fault.ErrModel, err)
	}
	config, err := fs.ReadFile(m.Files, "tokenizer_config.json")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return t, fault.Of(fault.ErrModel, err)
	}
	if t.Tokenizer, err = tokenizer.Parse(tok, config); err != nil {
		return t, fault.Of(fault.ErrModel, fmt.Errorf("%s: %w", m.Name, err))
	}
	t.Template, err = chat.Load(m.Files, m.Name)
	if err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		t.Template, t.Broken = nil, fault.Of(fault.ErrModel, fmt.Errorf("%s: %w", m.Name, err))
	}
	return t, nil
}

// Encode turns text into the ids of a prompt: as it stands, with the special tokens that
// the tokenizer puts around a prompt, or, if asChat, as a user's message in the model's
// chat template. Errors wrap fault.ErrConfig where the model has no tokenizer or no
// template.
func (t Text) Encode(text string, asChat bool) ([]int32, error) {
	if t.Tokenizer == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer: give the prompt as token ids", t.name))
	}
	if !asChat {
		return t.Tokenizer.Encode(text, true), nil
	}
	if t.Template == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no chat template: leave out --chat, or add a chat_template.jinja", t.name))
	}
	text, err := t.Template.Render([]chat.Message{{Role: "user", Content: text}}, chat.Options{AddGenerationPrompt: true})
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	// The template has written the special tokens out.
	return t.Tokenizer.Encode(text, false), nil
}

// Encoder returns what turns text into the ids of a prompt, with the special tokens
// that the tokenizer puts around one. An error wraps fault.ErrConfig where the model has
// no tokenizer.
func (m *Model) Encoder() (func(text string) []int32, error) {
	if m.Files == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer: leave the file of prompts out, and they are generated", m.Name))
	}
	if _, err := fs.Stat(m.Files, "tokenizer.json"); err != nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer.json: leave the file of prompts out, and they are generated", m.Name))
	}
	t, err := m.ReadText()
	if err != nil {
		return nil, err
	}
	return func(text string) []int32 { return t.Tokenizer.Encode(text, true) }, nil
}
