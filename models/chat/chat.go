package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/models/chat/jinja"
	"github.com/moeserve/moeserve/untrusted"
)

// ErrNoTemplate is wrapped by Load's error for a checkpoint without a chat template. Such a model was not trained on
// chats, or its template was not published with it.
var ErrNoTemplate = errors.New("no chat template")

// ErrLimit is wrapped by Render's error if the template exceeds a limit on time, steps, depth, output or memory.
var ErrLimit = jinja.ErrLimit

// RaisedError is wrapped by Render's error if the template rejects the messages with raise_exception.
type RaisedError struct {
	Message string // the message that the template passed to raise_exception, as one printable line
}

// Error implements error.
func (e *RaisedError) Error() string {
	return "the chat template refuses these messages: " + e.Message
}

// Message is one turn of a chat.
type Message struct {
	// Role is system, developer, user, assistant or tool, as the template expects. A template that does not know
	// "developer" sees "system" in its place.
	Role string

	// Content is the text of the message.
	Content string

	// Parts is the same as a JSON array of content parts, for templates that walk those. Nil means that there are none.
	Parts json.RawMessage

	// Extra is a JSON object whose members the template sees beside role and content, in their order, such as
	// tool_calls, name and reasoning_content. A member named role or content overrides the field. Nil means no extra
	// members.
	Extra json.RawMessage
}

// Options are the options of one rendering.
type Options struct {
	// AddGenerationPrompt appends the header of the assistant's turn, so that the model generates the reply.
	AddGenerationPrompt bool

	// Tools is a JSON array of tool descriptions, passed to the template unchanged. Nil or null means no tools.
	Tools json.RawMessage

	// Name selects one of several templates. Empty selects "tool_use" if there are tools and a template of that name,
	// else "default".
	Name string

	// Extra holds further variables of the template, such as enable_thinking. They take precedence over special tokens,
	// not over messages, tools and add_generation_prompt.
	Extra Object

	// Now is the clock behind strftime_now. Default: time.Now.
	Now func() time.Time
}

// Prompt is the text that a template wrote.
type Prompt struct {
	Text string

	// Client lists the byte ranges of Text that came from the messages (all but their roles), the tools and
	// Options.Extra. They ascend, and are neither empty nor adjacent. What is outside is the template's own, so that
	// control tokens count there, and are plain text inside.
	Client [][2]int
}

// Template holds the chat templates of one checkpoint. It is immutable and safe for concurrent use.
type Template struct {
	named  map[string]*program
	tokens map[string]string // special tokens by variable name: bos_token, eos_token, ...
}

const (
	templateFile      = "chat_template.jinja"
	moreTemplates     = "additional_chat_templates"
	tokenizerConfig   = "tokenizer_config.json"
	defaultTemplate   = "default"
	toolTemplate      = "tool_use"
	maxConfigBytes    = 64 << 20
	maxTemplateBytes  = 256 << 10
	maxOutputBytes    = 32 << 20
	templateExtension = ".jinja"
)

// tokenVariables are the variables of the special tokens that templates see, as in transformers.
var tokenVariables = []string{
	"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
}

// Load reads the chat templates of a checkpoint from files: chat_template.jinja and additional_chat_templates/*.jinja if
// they exist, else the chat_template of tokenizer_config.json. name identifies the checkpoint in errors. Without any
// template, the error wraps ErrNoTemplate.
func Load(files fs.FS, name string) (*Template, error) {
	config, err := untrusted.ReadFS(files, tokenizerConfig, maxConfigBytes)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("chat: %w", err)
	}
	sources, tokens, err := parseConfig(config)
	if err != nil {
		return nil, fmt.Errorf("chat: %s: %w", path.Join(name, tokenizerConfig), err)
	}
	own, err := templateFiles(files)
	if err != nil {
		return nil, fmt.Errorf("chat: %w", err)
	}
	if len(own) > 0 {
		sources = own
	}
	if len(sources) == 0 {
		return nil, fmt.Errorf("chat: %w: %s has neither a %s nor a chat_template in its %s; send the prompt as it is, "+
			"without chat, or put the model's template there", ErrNoTemplate, name, templateFile, tokenizerConfig)
	}
	t, err := newTemplate(sources, tokens)
	if err != nil {
		return nil, fmt.Errorf("chat: %s: %w", name, err)
	}
	return t, nil
}

// program is a compiled template, and what it expects of messages.
type program struct {
	template         *jinja.Template
	source           string
	parts, developer bool
}

func newTemplate(sources, tokens map[string]string) (*Template, error) {
	t := &Template{named: make(map[string]*program, len(sources)), tokens: tokens}
	for name, text := range sources {
		if len(text) > maxTemplateBytes {
			return nil, fmt.Errorf("chat template %s is larger than %d KiB", untrusted.Quote(name), maxTemplateBytes>>10)
		}
		p, err := jinja.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("chat template %s does not parse: %s", untrusted.Quote(name), untrusted.Line(err.Error()))
		}
		t.named[name] = &program{template: p, source: text, parts: p.WalksParts(), developer: p.Mentions("developer")}
	}
	return t, nil
}

// Names returns the sorted names of the templates. A single template is called "default".
func (t *Template) Names() []string {
	names := make([]string, 0, len(t.named))
	for name := range t.named {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Source is the text of the template that messages go through without tools; empty where only others are named.
func (t *Template) Source() string {
	if p := t.named[defaultTemplate]; p != nil {
		return p.source
	}
	return ""
}

// Mentions reports whether the source of a template contains text, such as the tag of tool calls.
func (t *Template) Mentions(text string) bool {
	for _, p := range t.named {
		if strings.Contains(p.source, text) {
			return true
		}
	}
	return false
}

// Render returns the prompt text of messages. The error wraps a RaisedError if the template rejects the messages,
// ErrLimit if the rendering exceeds its limits, and ctx's cause if ctx ends. Its message is one line.
func (t *Template) Render(ctx context.Context, messages []Message, opts Options) (Prompt, error) {
	prompt, err := t.render(ctx, messages, &opts)
	if err != nil {
		return Prompt{}, fmt.Errorf("chat: %w", err)
	}
	return prompt, nil
}

func (t *Template) render(ctx context.Context, messages []Message, opts *Options) (Prompt, error) {
	var tools jinja.Value
	if len(opts.Tools) > 0 {
		v, err := jinja.Decode(opts.Tools, jinja.FromClient)
		if err != nil {
			return Prompt{}, fmt.Errorf("tools: %w", err)
		}
		if _, ok := v.(*jinja.List); !ok && v != nil {
			return Prompt{}, errors.New("tools are not a JSON array")
		}
		tools = v
	}
	p, err := t.pick(opts.Name, tools != nil)
	if err != nil {
		return Prompt{}, err
	}
	vars := map[string]jinja.Value{"documents": nil}
	for name, token := range t.tokens {
		vars[name] = jinja.NewText(token, jinja.FromTemplate)
	}
	for _, m := range opts.Extra {
		if vars[m.Name], err = jinja.Decode(m.Value, jinja.FromClient); err != nil {
			return Prompt{}, fmt.Errorf("template variable %s: %w", untrusted.Quote(m.Name), err)
		}
	}
	list := &jinja.List{}
	for i := range messages {
		m, err := p.message(&messages[i])
		if err != nil {
			return Prompt{}, fmt.Errorf("message %d: %w", i, err)
		}
		list.Items = append(list.Items, m)
	}
	vars["messages"], vars["tools"], vars["add_generation_prompt"] = list, tools, opts.AddGenerationPrompt
	text, err := p.template.Render(ctx, vars, jinja.Options{Now: opts.Now, MaxBytes: maxOutputBytes})
	if err == nil {
		return Prompt{Text: text.String(), Client: text.Client()}, nil
	}
	var raised *jinja.RaisedError
	switch {
	case errors.As(err, &raised):
		return Prompt{}, &RaisedError{Message: untrusted.Line(raised.Message)}
	case errors.Is(err, ErrLimit), ctx.Err() != nil:
		return Prompt{}, fmt.Errorf("chat template: %w", err)
	}
	return Prompt{}, errors.New("the chat template failed: " + untrusted.Line(err.Error()))
}

// message returns a message as the template expects it.
func (p *program) message(m *Message) (*jinja.Dict, error) {
	d := jinja.NewDict()
	role := m.Role
	if role == "developer" && !p.developer {
		role = "system"
	}
	d.SetString("role", jinja.NewText(role, jinja.FromTemplate))
	content := jinja.Value(jinja.NewText(m.Content, jinja.FromClient))
	if len(m.Parts) > 0 && p.parts {
		v, err := jinja.Decode(m.Parts, jinja.FromClient)
		if err != nil {
			return nil, fmt.Errorf("content parts: %w", err)
		}
		content = v
	}
	d.SetString("content", content)
	if len(m.Extra) == 0 {
		return d, nil
	}
	v, err := jinja.Decode(m.Extra, jinja.FromClient)
	if err != nil {
		return nil, fmt.Errorf("extra fields: %w", err)
	}
	extra, ok := v.(*jinja.Dict)
	if !ok {
		return nil, errors.New("extra fields are not a JSON object")
	}
	d.Update(extra)
	return d, nil
}

func (t *Template) pick(name string, tools bool) (*program, error) {
	if name == "" {
		name = defaultTemplate
		if p, ok := t.named[toolTemplate]; ok && tools {
			return p, nil
		}
	}
	p, ok := t.named[name]
	if !ok {
		return nil, fmt.Errorf("there is no chat template %q: the checkpoint has %s", name, strings.Join(t.Names(), ", "))
	}
	return p, nil
}

// templateFiles returns, by name, the templates that have their own files.
func templateFiles(files fs.FS) (map[string]string, error) {
	sources := map[string]string{}
	b, err := untrusted.ReadFS(files, templateFile, maxTemplateBytes)
	switch {
	case err == nil:
		sources[defaultTemplate] = string(b)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	entries, err := fs.ReadDir(files, moreTemplates)
	if errors.Is(err, fs.ErrNotExist) {
		return sources, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		template, ok := strings.CutSuffix(e.Name(), templateExtension)
		if !ok || e.IsDir() {
			continue
		}
		b, err := untrusted.ReadFS(files, path.Join(moreTemplates, e.Name()), maxTemplateBytes)
		if err != nil {
			return nil, err
		}
		sources[template] = string(b)
	}
	return sources, nil
}

// parseConfig returns the templates and special tokens of a tokenizer_config.json. Empty input returns none.
func parseConfig(config []byte) (sources, tokens map[string]string, err error) {
	sources, tokens = map[string]string{}, map[string]string{}
	if len(config) == 0 {
		return sources, tokens, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
		return nil, nil, err
	}
	for _, name := range tokenVariables {
		raw, ok := fields[name]
		if !ok || string(raw) == "null" {
			continue
		}
		var object struct {
			Content string `json:"content"`
		}
		var text string
		if json.Unmarshal(raw, &text) != nil {
			if err := json.Unmarshal(raw, &object); err != nil {
				return nil, nil, fmt.Errorf("%s is neither a string nor an object with its content", name)
			}
			text = object.Content
		}
		tokens[name] = text
	}
	raw, ok := fields["chat_template"]
	if !ok || string(raw) == "null" {
		return sources, tokens, nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		sources[defaultTemplate] = text
		return sources, tokens, nil
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if json.Unmarshal(raw, &list) == nil {
		for _, e := range list {
			sources[e.Name] = e.Template
		}
		return sources, tokens, nil
	}
	if json.Unmarshal(raw, &sources) != nil {
		return nil, nil, errors.New("chat_template is neither a string nor a list of named templates")
	}
	return sources, tokens, nil
}
