package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	sugarme "github.com/sugarme/tokenizer"

	"github.com/moeserve/moeserve/untrusted"
)

// ErrUnsupported is wrapped by Parse's errors about unsupported features of tokenizer.json.
var ErrUnsupported = errors.New("tokenizer feature not supported")

const (
	configFile = "tokenizer_config.json"
	// maxID bounds ids, and with them the tables by id.
	maxID = 1<<23 - 1
)

// fileConfig is a tokenizer.json: the library's type, but for added tokens, where a missing id is not id 0, and for the
// model, which has a type of its own by its kind.
type fileConfig struct {
	sugarme.Config
	AddedTokens []addedConfig
	Model       json.RawMessage
}

// addedConfig is an added token of a tokenizer.json.
type addedConfig struct {
	ID *int64 `json:"id"`
	sideAddedConfig
}

// UnmarshalJSON refuses what the reference refuses: another version of the format, and keys that it does not know.
func (c *fileConfig) UnmarshalJSON(b []byte) error {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(b, &members); err != nil {
		return err
	}
	parts := map[string]any{
		"version": &c.Version, "added_tokens": &c.AddedTokens, "normalizer": &c.Normalizer, "pre_tokenizer": &c.PreTokenizer,
		"model": &c.Model, "post_processor": &c.PostProcessor, "decoder": &c.Decoder,
		"truncation": nil, "padding": nil, // in transformers, arguments of calls replace them
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		to, ok := parts[name]
		if !ok {
			return unsupported("the member %s", untrusted.Quote(name))
		}
		if to == nil {
			continue
		}
		if err := json.Unmarshal(members[name], to); err != nil {
			return memberError(name, err)
		}
	}
	if _, ok := members["version"]; ok && c.Version != "1.0" {
		return unsupported("version %s: only \"1.0\" is", untrusted.Quote(c.Version))
	}
	return nil
}

// memberError is the error of reading a member, without the names of types in Go. The name of a file's whole object is "".
func memberError(name string, err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		path := strings.Split(name+"."+wrong.Field, ".")
		// No member has a capital letter: what does is an embedded type.
		path = slices.DeleteFunc(path, func(s string) bool { return s == "" || s != strings.ToLower(s) })
		if len(path) > 0 {
			return fmt.Errorf("%s is %s, which is not what belongs there", untrusted.Name(strings.Join(path, ".")), wrong.Value)
		}
	}
	if name == "" {
		return err
	}
	return fmt.Errorf("%s: %w", name, err)
}

// sideConfig is what tokenizer_config.json adds to tokenizer.json.
type sideConfig struct {
	AddBOS                  *bool                      `json:"add_bos_token"`
	AddEOS                  *bool                      `json:"add_eos_token"`
	BOS                     *tokenName                 `json:"bos_token"`
	EOS                     *tokenName                 `json:"eos_token"`
	Unk                     *tokenName                 `json:"unk_token"`
	Pad                     *tokenName                 `json:"pad_token"`
	AddedTokensDecoder      map[string]sideAddedConfig `json:"added_tokens_decoder"`
	AdditionalSpecialTokens json.RawMessage            `json:"additional_special_tokens"`
	ExtraSpecialTokens      json.RawMessage            `json:"extra_special_tokens"`
}

// sideAddedConfig is an added token as tokenizer_config.json describes it, under its id: the library's type, without its
// member id.
type sideAddedConfig struct {
	sugarme.TokenConfig
	Unused json.RawMessage `json:"id"` // of any type: in place of TokenConfig.Id
}

func (c sideAddedConfig) token() addedToken {
	return addedToken{
		content: c.Content, singleWord: c.SingleWord, lstrip: c.Lstrip, rstrip: c.Rstrip,
		normalized: c.Normalized, special: c.Special,
	}
}

// tokenName reads a token that is given as a string or as an object with its content.
type tokenName struct{ token addedToken }

func (n *tokenName) UnmarshalJSON(b []byte) error {
	var content string
	if err := json.Unmarshal(b, &content); err == nil {
		n.token = addedToken{content: content, special: true}
		return nil
	}
	var c sideAddedConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return errors.New("a token is neither a string nor an object with its content")
	}
	n.token = c.token()
	n.token.special = true
	return nil
}

// Parse reads the tokenizer of a checkpoint: the bytes of its tokenizer.json and of its tokenizer_config.json, which
// may be nil. A feature that is not supported is an error that wraps ErrUnsupported.
func Parse(tokenizerJSON, tokenizerConfigJSON []byte) (*Pipeline, error) {
	var c fileConfig
	if err := json.Unmarshal(tokenizerJSON, &c); err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	var side sideConfig
	if len(tokenizerConfigJSON) > 0 {
		if err := json.Unmarshal(tokenizerConfigJSON, &side); err != nil {
			return nil, fmt.Errorf("%s: %w", configFile, memberError("", err))
		}
	}
	loadClasses()
	t := &Pipeline{bos: noToken, eos: noToken}
	for _, build := range []func(*Pipeline, *fileConfig, *sideConfig) error{
		buildModel, buildNormalizer, buildSplitter, buildAdded, buildDecoder, buildSpecials,
	} {
		if err := build(t, &c, &side); err != nil {
			return nil, err
		}
	}
	m := t.model
	m.finish(t.special)
	t.dense = m.covering && !slices.ContainsFunc(t.splitter.cuts, func(c cutter) bool { return c.behavior == removed })
	t.scratch.New = func() any { return &merger{m: m} }
	return t, nil
}

// finish measures the vocabulary, and takes special tokens out of what a word is made of: where their text is plain, it
// becomes other tokens.
func (m *model) finish(special []bool) {
	for token := range m.vocab {
		m.longest = max(m.longest, len(token))
	}
	starts := m.byteTokens[:]
	if m.byteLevel {
		starts = m.byteStart[:]
	}
	m.covering = (m.byteLevel || m.byteFallback) && !slices.Contains(starts, noToken)
	for pair, rule := range m.merges {
		if special[rule.id] {
			delete(m.merges, pair)
		}
	}
	isSpecial := func(_ string, id int32) bool { return special[id] }
	maps.DeleteFunc(m.vocab, isSpecial)
	maps.DeleteFunc(m.whole, isSpecial)
	if m.unigram != nil {
		m.unigram.finish(special)
	}
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrUnsupported, fmt.Errorf(format, args...))
}

// component is one part of the tokenizer's pipeline as JSON.
type component map[string]any

func (c component) kind() string { s, _ := c["type"].(string); return s }

// name is the kind as errors have it.
func (c component) name() string { return untrusted.Quote(c.kind()) }

func (c component) str(key string) string { s, _ := c[key].(string); return s }

// flag returns a boolean field, or its default where it is absent.
func (c component) flag(key string, def bool) bool {
	if b, ok := c[key].(bool); ok {
		return b
	}
	return def
}

// need returns a boolean field that the reference does not do without.
func (c component) need(where, key string) (bool, error) {
	b, ok := c[key].(bool)
	if !ok {
		return false, fmt.Errorf("%s %s lacks %s, true or false", where, c.name(), key)
	}
	return b, nil
}

func (c component) list(key string) []component {
	items, _ := c[key].([]any)
	out := make([]component, 0, len(items))
	for _, v := range items {
		m, _ := v.(map[string]any)
		out = append(out, m)
	}
	return out
}

// flatten returns the components of nested Sequences in order. A nil component gives none.
func flatten(c component, key string) []component {
	if c == nil {
		return nil
	}
	if c.kind() != "Sequence" {
		return []component{c}
	}
	var out []component
	for _, child := range c.list(key) {
		if child == nil {
			child = component{}
		}
		out = append(out, flatten(child, key)...)
	}
	return out
}

// searchOf is what a component looks for: its pattern, which is a String or a Regex.
func searchOf(where string, c component) (searcher, error) {
	p, _ := c["pattern"].(map[string]any)
	s, isString := p["String"].(string)
	regex, isRegex := p["Regex"].(string)
	switch {
	case len(p) != 1 || !isString && !isRegex:
		return nil, fmt.Errorf("%s %s has no pattern that is a String or a Regex", where, c.name())
	case isString && s == "":
		return nil, unsupported("%s %s with an empty pattern", where, c.name())
	case isString:
		return literal(s), nil
	}
	x, err := newExpression(regex)
	if err != nil {
		return nil, unsupported("%s %s with the pattern %s: %w", where, c.name(), untrusted.Quote(regex), err)
	}
	if e, ok := x.(*expression); ok && c.kind() == "Replace" && e.pattern.Minimum() == 0 {
		return nil, unsupported("%s %s with the pattern %s, which can match nothing: the reference fails on it", where, c.name(), untrusted.Quote(regex))
	}
	return x, nil
}

// names lists the kinds of components.
func names(steps []component) string {
	var all []string
	for _, s := range steps {
		all = append(all, s.kind())
	}
	return untrusted.Name(strings.Join(all, ", "))
}
