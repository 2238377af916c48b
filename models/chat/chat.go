package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"
)

// ErrNoTemplate is wrapped by Load's error for a checkpoint without a chat template. Such a model was not trained on
// chats, or its template was not published with it.
var ErrNoTemplate = errors.New("no chat template")

// ErrLimit is wrapped by Render's error if the template exceeds a limit on time, depth or output.
var ErrLimit = errors.New("chat template exceeds its limits")

// RaisedError is wrapped by Render's error if the template rejects the messages with raise_exception.
type RaisedError struct {
	Message string // the message that the template passed to raise_exception
}

// Error implements error.
func (e *RaisedError) Error() string {
	return "the chat template refuses these messages: " + e.Message
}

// Message is one turn of a chat.
type Message struct {
	Role    string // "system", "user", "assistant" or "tool", as the template expects
	Content string

	// Extra is a JSON object whose members the template sees beside role and content, in their order, such as
	// tool_calls, name and reasoning_content. A member named role or content overrides the field, so content may be a
	// list of parts. Nil means no extra members.
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

	// Extra holds further variables of the template, such as enable_thinking: JSON-like values (nil, bool, numbers,
	// string, slices, string-keyed maps, json.RawMessage). They take precedence over special tokens.
	Extra map[string]any

	// Now is the clock behind strftime_now. Default: time.Now.
	Now func() time.Time
}

// Template holds the chat templates of one checkpoint. It is immutable and safe for concurrent use.
type Template struct {
	named  map[string]*program
	tokens map[string]any // special tokens by variable name: bos_token, eos_token, ...
}

const (
	templateFile      = "chat_template.jinja"
	moreTemplates     = "additional_chat_templates"
	tokenizerConfig   = "tokenizer_config.json"
	defaultTemplate   = "default"
	toolTemplate      = "tool_use"
	maxConfigBytes    = 64 << 20
	maxTemplateBytes  = 256 << 10
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
	config, err := readFile(files, name, tokenizerConfig, maxConfigBytes)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("chat: %w", err)
	}
	sources, tokens, err := parseConfig(config)
	if err != nil {
		return nil, fmt.Errorf("chat: %s: %w", path.Join(name, tokenizerConfig), err)
	}
	own, err := templateFiles(files, name)
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

func newTemplate(sources map[string]string, tokens map[string]any) (*Template, error) {
	t := &Template{named: make(map[string]*program, len(sources)), tokens: tokens}
	for name, text := range sources {
		p, err := compile(text)
		if err != nil {
			return nil, fmt.Errorf("chat template %q: %w", name, err)
		}
		t.named[name] = p
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

// Render returns the prompt text of messages. The error wraps a RaisedError if the template rejects the messages, and
// ErrLimit if the rendering exceeds its limits. Its message is one line.
func (t *Template) Render(messages []Message, opts Options) (string, error) {
	vars, err := t.variables(messages, &opts)
	if err != nil {
		return "", fmt.Errorf("chat: %w", err)
	}
	p, err := t.pick(opts.Name, vars["tools"] != nil)
	if err != nil {
		return "", fmt.Errorf("chat: %w", err)
	}
	now := opts.Now
	if now == nil {
		now = time.Now
	}
	text, err := p.run(vars, now)
	if err != nil {
		return "", fmt.Errorf("chat: %w", err)
	}
	return text, nil
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

// variables builds the template's variables. Each call makes new values, because gonja writes into its input.
func (t *Template) variables(messages []Message, opts *Options) (map[string]any, error) {
	vars := map[string]any{"add_generation_prompt": opts.AddGenerationPrompt, "tools": nil, "documents": nil}
	for name, token := range t.tokens {
		vars[name] = clone(token)
	}
	list := make(sequence, 0, len(messages))
	for i, m := range messages {
		d := newDict()
		set(d, "role", m.Role)
		set(d, "content", m.Content)
		if len(m.Extra) > 0 {
			extra, err := decodeJSON(m.Extra)
			if err != nil {
				return nil, fmt.Errorf("message %d: extra fields: %w", i, err)
			}
			fields, ok := asDict(extra)
			if !ok {
				return nil, fmt.Errorf("message %d: extra fields are not a JSON object", i)
			}
			for _, pair := range fields.Pairs {
				set(d, pair.Key.String(), pair.Value.Interface())
			}
		}
		list = append(list, d)
	}
	vars["messages"] = list
	if len(opts.Tools) > 0 {
		tools, err := decodeJSON(opts.Tools)
		if err != nil {
			return nil, fmt.Errorf("tools: %w", err)
		}
		if _, ok := tools.(sequence); !ok && tools != nil {
			return nil, errors.New("tools are not a JSON array")
		}
		vars["tools"] = tools
	}
	for name, v := range opts.Extra {
		value, err := fromGo(v)
		if err != nil {
			return nil, fmt.Errorf("template variable %q: %w", name, err)
		}
		vars[name] = value
	}
	return vars, nil
}

// readFile reads a file of at most limit bytes from the checkpoint called name.
func readFile(files fs.FS, name, file string, limit int64) ([]byte, error) {
	f, err := files.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s is larger than %d KiB", path.Join(name, file), limit>>10)
	}
	return b, err
}

// templateFiles returns, by name, the templates that have their own files.
func templateFiles(files fs.FS, name string) (map[string]string, error) {
	sources := map[string]string{}
	b, err := readFile(files, name, templateFile, maxTemplateBytes)
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
		b, err := readFile(files, name, path.Join(moreTemplates, e.Name()), maxTemplateBytes)
		if err != nil {
			return nil, err
		}
		sources[template] = string(b)
	}
	return sources, nil
}

// parseConfig returns the templates and special tokens of a tokenizer_config.json. Empty input returns none.
func parseConfig(config []byte) (sources map[string]string, tokens map[string]any, err error) {
	sources, tokens = map[string]string{}, map[string]any{}
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
