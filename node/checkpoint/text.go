package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/untrusted"
)

// Text converts between text and a model's token ids.
type Text struct {
	// Tokenizer is nil if the model has none (a preset).
	Tokenizer tokenizer.Tokenizer
	// Template is the chat template; nil if the model has none, or if it is invalid: then
	// Broken is the error.
	Template *chat.Template
	Broken   error
	// SpecialTokensInChat reads special tokens in messages as such; else they are plain text.
	SpecialTokensInChat bool
	// Config is the tokenizer_config.json; nil without one.
	Config []byte
	name   string
}

// ReadText reads tokenizer and chat template, if the model has files.
func (m *Model) ReadText() (Text, error) {
	t := Text{name: m.Name}
	if m.Files == nil {
		return t, nil
	}
	tok, err := untrusted.ReadFS(m.Files, "tokenizer.json", untrusted.MaxData)
	if errors.Is(err, fs.ErrNotExist) {
		return t, fault.Of(fault.ErrModel, fmt.Errorf("%s has no tokenizer.json; download the complete checkpoint, or give prompts as token ids", m.Name))
	}
	if err != nil {
		return t, fault.Of(fault.ErrModel, err)
	}
	config, err := untrusted.ReadFS(m.Files, "tokenizer_config.json", untrusted.MaxSettings)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return t, fault.Of(fault.ErrModel, err)
	}
	t.Config = config
	if t.Tokenizer, err = tokenizer.Parse(tok, config); err != nil {
		return t, fault.Of(fault.ErrModel, fmt.Errorf("%s: %w", m.Name, err))
	}
	t.Template, err = chat.Load(m.Files, m.Name)
	if err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		t.Template, t.Broken = nil, fault.Of(fault.ErrModel, fmt.Errorf("%w; moeserve run --raw does without the template", err))
	}
	return t, nil
}

// TemplateUse says what a caller wants of a chat template.
type TemplateUse uint8

// The uses: none, or none before it is asked for; put prompts through it if there is one;
// do nothing without one.
const (
	NoTemplate TemplateUse = iota
	TemplateIfAny
	TemplateNeeded
)

// Check says why the template cannot be used so: that it is broken, or, where it is needed,
// missing.
func (t Text) Check(use TemplateUse) error {
	switch {
	case use == NoTemplate:
		return nil
	case t.Broken != nil:
		return t.Broken
	case use == TemplateNeeded && t.Template == nil:
		return fault.Of(fault.ErrConfig, fmt.Errorf("%s has no chat template: it is a base model, which continues a text (moeserve run); for a chat, give an instruct model, or add a chat_template.jinja", t.name))
	}
	return nil
}

// Encode turns text into the ids of a prompt as it is, with the special tokens that the
// tokenizer puts around one. An error wraps fault.ErrConfig where the model has no
// tokenizer.
func (t Text) Encode(text string) ([]int32, error) {
	if t.Tokenizer == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer; give the prompt as token ids", t.name))
	}
	ids, err := t.Tokenizer.Encode(text, true)
	return ids, fault.Of(fault.ErrModel, err)
}

// EncodeChat turns a conversation into the ids of a prompt for the assistant's next message,
// by the model's chat template. Errors are as those of Encode and Check.
func (t Text) EncodeChat(messages []chat.Message) ([]int32, error) {
	if err := t.Check(TemplateNeeded); err != nil {
		return nil, err
	}
	prompt, err := t.Template.Render(context.Background(), messages, chat.Options{AddGenerationPrompt: true})
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	// The template includes the special tokens.
	var o tokenizer.EncodeOptions
	if !t.SpecialTokensInChat {
		o.Plain = prompt.Client
	}
	ids, err := t.Tokenizer.EncodeWith(prompt.Text, o)
	return ids, fault.Of(fault.ErrModel, err)
}

// Encoder returns a function that converts text to the token ids of a prompt, with the
// tokenizer's special tokens around it. An error wraps fault.ErrConfig if the model has no
// tokenizer.
func (m *Model) Encoder() (func(text string) ([]int32, error), error) {
	if m.Files == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer for --dataset-path: name a folder with its config.json and a tokenizer, or leave --dataset-path out for random prompts", m.Name))
	}
	if _, err := fs.Stat(m.Files, "tokenizer.json"); err != nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no tokenizer.json for --dataset-path: add it, or leave --dataset-path out for random prompts", m.Name))
	}
	t, err := m.ReadText()
	if err != nil {
		return nil, err
	}
	return t.Encode, nil
}
