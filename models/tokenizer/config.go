package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	sugarme "github.com/sugarme/tokenizer"
	sugarnorm "github.com/sugarme/tokenizer/normalizer"
)

// ErrUnsupported is wrapped by Parse's errors about unsupported features of tokenizer.json.
var ErrUnsupported = errors.New("tokenizer feature not supported")

const (
	configFile = "tokenizer_config.json"
	// maxID bounds ids, and with them the tables by id.
	maxID = 1<<23 - 1
)

// fileConfig is a tokenizer.json: the library's types, except that the model's large tables have exact types.
type fileConfig struct {
	sugarme.Config
	Model modelConfig `json:"model"`
}

type modelConfig struct {
	Type                    string           `json:"type"`
	Dropout                 *float64         `json:"dropout"`
	UnkToken                *string          `json:"unk_token"`
	ContinuingSubwordPrefix string           `json:"continuing_subword_prefix"`
	EndOfWordSuffix         string           `json:"end_of_word_suffix"`
	FuseUnk                 bool             `json:"fuse_unk"`
	ByteFallback            bool             `json:"byte_fallback"`
	IgnoreMerges            bool             `json:"ignore_merges"`
	Vocab                   map[string]int32 `json:"vocab"`
	Merges                  mergeList        `json:"merges"`
}

// mergeList reads both spellings of merges: "a b" and ["a", "b"].
type mergeList [][2]string

func (m *mergeList) UnmarshalJSON(b []byte) error {
	var lines []string
	if err := json.Unmarshal(b, &lines); err == nil {
		*m = make(mergeList, 0, len(lines))
		for i, line := range lines {
			if strings.HasPrefix(line, "#version") {
				continue
			}
			left, right, ok := strings.Cut(line, " ")
			if !ok || strings.Contains(right, " ") {
				return fmt.Errorf("merge %d is %q: want two tokens with one space between them", i, line)
			}
			*m = append(*m, [2]string{left, right})
		}
		return nil
	}
	var pairs [][]string
	if err := json.Unmarshal(b, &pairs); err != nil {
		return errors.New(`merges are neither ["a b", ...] nor [["a", "b"], ...]`)
	}
	*m = make(mergeList, 0, len(pairs))
	for i, p := range pairs {
		if len(p) != 2 {
			return fmt.Errorf("merge %d has %d tokens: want 2", i, len(p))
		}
		*m = append(*m, [2]string{p[0], p[1]})
	}
	return nil
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

// sideAddedConfig is an added token as tokenizer_config.json describes it, under its id.
type sideAddedConfig struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	Lstrip     bool   `json:"lstrip"`
	Rstrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
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
func Parse(tokenizerJSON, tokenizerConfigJSON []byte) (*BPE, error) {
	var c fileConfig
	if err := json.Unmarshal(tokenizerJSON, &c); err != nil {
		return nil, fmt.Errorf("not a tokenizer.json: %w", err)
	}
	var side sideConfig
	if len(tokenizerConfigJSON) > 0 {
		if err := json.Unmarshal(tokenizerConfigJSON, &side); err != nil {
			return nil, fmt.Errorf("%s: %w", configFile, err)
		}
	}
	loadClasses()
	t := &BPE{bos: noToken, eos: noToken}
	for _, build := range []func(*BPE, *fileConfig) error{
		buildModel, buildNormalizer, buildSplitter,
	} {
		if err := build(t, &c); err != nil {
			return nil, err
		}
	}
	if err := buildAdded(t, &c, &side); err != nil {
		return nil, err
	}
	if err := buildDecoder(t, &c); err != nil {
		return nil, err
	}
	if err := buildSpecials(t, &c, &side); err != nil {
		return nil, err
	}
	m := t.model
	t.scratch.New = func() any { return &merger{m: m} }
	return t, nil
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

func buildModel(t *BPE, c *fileConfig) error {
	mc := &c.Model
	switch {
	case mc.Type != "BPE" && (mc.Type != "" || mc.Merges == nil):
		return unsupported("model type %q: only BPE is", mc.Type)
	case mc.Dropout != nil && *mc.Dropout != 0:
		return unsupported("model.dropout %g: only null or 0 is", *mc.Dropout)
	case mc.ContinuingSubwordPrefix != "":
		return unsupported("model.continuing_subword_prefix %q: only an empty one is", mc.ContinuingSubwordPrefix)
	case mc.EndOfWordSuffix != "":
		return unsupported("model.end_of_word_suffix %q: only an empty one is", mc.EndOfWordSuffix)
	}
	vocab := mc.Vocab
	for token, id := range vocab {
		if err := t.set(id, token); err != nil {
			return err
		}
	}
	m := &model{
		vocab: vocab, merges: make(map[uint64]mergeRule, len(mc.Merges)),
		byteFallback: mc.ByteFallback, unk: noToken, fuseUnk: mc.FuseUnk, cache: newWordCache(),
	}
	if mc.UnkToken != nil {
		id, ok := vocab[*mc.UnkToken]
		if !ok {
			return fmt.Errorf("model.unk_token %q is not in the vocabulary", *mc.UnkToken)
		}
		m.unk = id
	}
	fallback := true // all 256 byte tokens are there
	for b := range m.byteTokens {
		id, ok := vocab[fmt.Sprintf("<0x%02X>", b)]
		if !ok {
			id, fallback = noToken, false
		}
		m.byteTokens[b] = id
	}
	isByte := map[int32]bool{}
	for _, id := range m.byteTokens {
		isByte[id] = id >= 0
	}
	pairs := new(pairSet)
	for i, p := range mc.Merges {
		left, ok1 := vocab[p[0]]
		right, ok2 := vocab[p[1]]
		if !ok1 || !ok2 {
			return fmt.Errorf("merge %d joins %q and %q, which are not both in the vocabulary", i, p[0], p[1])
		}
		joined := p[0] + p[1]
		id, ok := vocab[joined]
		if !ok {
			return fmt.Errorf("merge %d makes %q, which is not in the vocabulary", i, joined)
		}
		m.merges[pairKey(left, right)] = mergeRule{rank: uint32(i), id: id}
		if mc.ByteFallback && (isByte[left] || isByte[right]) || m.unk >= 0 && (left == m.unk || right == m.unk) {
			pairs = nil
		}
		if pairs != nil {
			prev := rune(-1)
			for _, r := range joined {
				if prev >= 0 {
					pairs.add(prev, r)
				}
				prev = r
			}
		}
	}
	// Cuts are safe if each character becomes symbols independently. That fails for unknown characters that fuse or that
	// byte tokens overtake, and for ignore_merges, which looks up whole words.
	if !mc.IgnoreMerges && (m.unk < 0 || mc.ByteFallback && fallback || !mc.ByteFallback && !mc.FuseUnk) {
		m.pairs = pairs
	}
	if mc.IgnoreMerges {
		m.whole = m.vocab
	}
	t.model = m
	return nil
}

// set records the token of an id.
func (t *BPE) set(id int32, token string) error {
	if id < 0 || id > maxID {
		return fmt.Errorf("token %q has id %d: ids run from 0 to %d", token, id, maxID)
	}
	if n := int(id) + 1; n > len(t.tokens) {
		t.tokens = append(t.tokens, make([]string, n-len(t.tokens))...)
		t.present = append(t.present, make([]bool, n-len(t.present))...)
		t.special = append(t.special, make([]bool, n-len(t.special))...)
	}
	if t.present[id] && t.tokens[id] != token {
		return fmt.Errorf("tokens %q and %q have the same id %d", t.tokens[id], token, id)
	}
	t.tokens[id], t.present[id] = token, true
	return nil
}

// component is one part of the tokenizer's pipeline as JSON.
type component map[string]any

func (c component) kind() string { s, _ := c["type"].(string); return s }

func (c component) str(key string) string { s, _ := c[key].(string); return s }

// flag returns a boolean field, or its default where it is absent.
func (c component) flag(key string, def bool) bool {
	if b, ok := c[key].(bool); ok {
		return b
	}
	return def
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

// stringPattern returns the literal string that a Replace matches.
func stringPattern(where string, c component) (string, error) {
	pattern, _ := c["pattern"].(map[string]any)
	s, ok := pattern["String"].(string)
	if !ok || s == "" {
		return "", unsupported("%s Replace with pattern %v: only a String that is not empty is", where, c["pattern"])
	}
	return s, nil
}

func buildNormalizer(t *BPE, c *fileConfig) error {
	for _, n := range flatten(c.Normalizer, "normalizers") {
		switch n.kind() {
		case "Prepend":
			t.normalizer = append(t.normalizer, prepend(n.str("prepend")))
		case "Replace":
			old, err := stringPattern("normalizer", n)
			if err != nil {
				return err
			}
			t.normalizer = append(t.normalizer, replace{old: old, new: n.str("content")})
		case "NFC":
			t.normalizer = append(t.normalizer, nfc{})
		default:
			return unsupported("normalizer %q: Sequence, Prepend, Replace and NFC are", n.kind())
		}
	}
	return nil
}

func buildSplitter(t *BPE, c *fileConfig) error {
	var pattern func(string) int
	cut := false // a Split came before
	t.splitter = wholeText{}
	parts := flatten(c.PreTokenizer, "pretokenizers")
	for i, p := range parts {
		last := i == len(parts)-1
		switch p.kind() {
		case "Split":
			expr, _ := p["pattern"].(map[string]any)
			regex, _ := expr["Regex"].(string)
			switch regex {
			case gpt2Pattern:
				pattern = nextGPT2
			case qwen2Pattern:
				pattern = nextQwen2
			default:
				return unsupported("pre_tokenizer Split with pattern %v: the regular expressions of GPT-2 and Qwen2 are",
					p["pattern"])
			}
			if p.str("behavior") != "Isolated" || p.flag("invert", false) || cut || last {
				return unsupported("pre_tokenizer Split with behavior %q and invert %v: only one Isolated Split before a "+
					"ByteLevel is", p.str("behavior"), p.flag("invert", false))
			}
			cut = true
		case "ByteLevel":
			if !last {
				return unsupported("pre_tokenizer ByteLevel before %q: only as the last one is", parts[i+1].kind())
			}
			prefix := p.flag("add_prefix_space", true)
			if p.flag("use_regex", true) {
				if cut {
					return unsupported("pre_tokenizer ByteLevel with use_regex after a Split: only without use_regex is")
				}
				pattern = nextGPT2
			}
			if cut && prefix {
				return unsupported("pre_tokenizer ByteLevel with add_prefix_space after a Split: only without it is")
			}
			t.splitter = byteWords{next: pattern, addPrefixSpace: prefix}
			t.model.toByteLevel()
		case "Metaspace":
			if len(parts) > 1 {
				return unsupported("pre_tokenizer Metaspace in a Sequence with others: only alone is")
			}
			s, err := newMetaspace(p)
			if err != nil {
				return err
			}
			t.splitter = s
		default:
			return unsupported("pre_tokenizer %q: Sequence, Split, ByteLevel and Metaspace are", p.kind())
		}
	}
	return nil
}

func newMetaspace(p component) (metaspace, error) {
	s := metaspace{replacement: p.str("replacement"), split: p.flag("split", true)}
	if utf8.RuneCountInString(s.replacement) != 1 {
		return s, fmt.Errorf("pre_tokenizer Metaspace has replacement %q: want one character", s.replacement)
	}
	scheme := p.str("prepend_scheme")
	if scheme == "" {
		scheme = "always"
		if !p.flag("add_prefix_space", true) {
			scheme = "never"
		}
	}
	switch scheme {
	case "always":
		s.scheme = prependAlways
	case "first":
		s.scheme = prependFirst
	case "never":
		s.scheme = prependNever
	default:
		return s, unsupported("pre_tokenizer Metaspace with prepend_scheme %q: always, first and never are", scheme)
	}
	return s, nil
}

// toByteLevel makes the model start from the bytes of a word.
func (m *model) toByteLevel() {
	m.byteLevel = true
	for b, char := range byteChars {
		id, ok := m.vocab[char]
		if !ok {
			id = noToken
		}
		m.byteStart[b] = id
	}
	m.pairs = nil
	if m.whole == nil {
		return
	}
	m.whole = make(map[string]int32, len(m.vocab))
	for token, id := range m.vocab {
		if raw := string(unspell(nil, token)); spell(raw) == token {
			m.whole[raw] = id
		}
	}
}

// buildAdded registers added tokens as the reference does: a token of the vocabulary keeps its id, a new one gets the
// next free id, and a later definition of a token replaces an earlier one.
func buildAdded(t *BPE, c *fileConfig, side *sideConfig) error {
	t.added = map[string]int32{}
	var list []addedToken
	index := map[string]int{} // in list
	next := int32(len(c.Model.Vocab))
	add := func(token addedToken) error {
		if token.content == "" {
			return nil
		}
		if i, ok := index[token.content]; ok {
			list[i] = token
			return nil
		}
		id, ok := t.model.vocab[token.content]
		if !ok {
			id = next
		}
		if err := t.set(id, token.content); err != nil {
			return fmt.Errorf("added token: %w", err)
		}
		t.added[token.content] = id
		next = max(next, id+1)
		index[token.content] = len(list)
		list = append(list, token)
		return nil
	}
	for _, a := range c.AddedTokens {
		if err := add(addedToken{
			content: a.Content, singleWord: a.SingleWord, lstrip: a.Lstrip, rstrip: a.Rstrip,
			normalized: a.Normalized, special: a.Special,
		}); err != nil {
			return err
		}
	}
	restated := make([]int64, 0, len(side.AddedTokensDecoder))
	for key := range side.AddedTokensDecoder {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil {
			return fmt.Errorf("%s: added_tokens_decoder has the key %q, which is no id", configFile, key)
		}
		restated = append(restated, id)
	}
	slices.Sort(restated)
	for _, id := range restated {
		if err := add(side.AddedTokensDecoder[strconv.FormatInt(id, 10)].token()); err != nil {
			return err
		}
	}
	named := []*tokenName{side.BOS, side.EOS, side.Unk, side.Pad}
	for _, raw := range []json.RawMessage{side.AdditionalSpecialTokens, side.ExtraSpecialTokens} {
		var more []*tokenName
		if len(raw) == 0 || raw[0] != '[' {
			continue
		}
		if err := json.Unmarshal(raw, &more); err != nil {
			return fmt.Errorf("%s: special tokens: %w", configFile, err)
		}
		named = append(named, more...)
	}
	for _, n := range named {
		if n == nil {
			continue
		}
		if _, ok := index[n.token.content]; ok {
			continue
		}
		if err := add(n.token); err != nil {
			return err
		}
	}
	t.raw, t.normalized = newAddedTrie(), newAddedTrie()
	for _, special := range []bool{true, false} {
		for _, token := range list {
			if token.special != special {
				continue
			}
			id := t.added[token.content]
			t.special[id] = token.special
			if token.normalized {
				t.normalized.add(t.normalizer.apply(token.content), token, id)
			} else {
				t.raw.add(token.content, token, id)
			}
		}
	}
	return nil
}

func buildDecoder(t *BPE, c *fileConfig) error {
	d := &t.decoder
	d.pieces = t.tokens
	steps := flatten(c.Decoder, "decoders")
	if len(steps) == 0 {
		d.kind = decodeJoined
		return nil
	}
	if steps[0].kind() == "ByteLevel" && len(steps) == 1 {
		d.kind = decodeBytes
		d.pieces = make([]string, len(t.tokens))
		var raw []byte
		for id, token := range t.tokens {
			raw = unspell(raw[:0], token)
			if string(raw) == token {
				d.pieces[id] = token
			} else {
				d.pieces[id] = string(raw)
			}
		}
		return nil
	}
	d.kind = decodeText
	d.isByte = make([]bool, len(t.tokens))
	d.pieces = slices.Clone(t.tokens)
	fused, fallback := false, false
	order := 0 // of the step before: Replace 1, ByteFallback 2, Fuse 3, Strip 4
	for _, s := range steps {
		at := 0
		switch s.kind() {
		case "Replace":
			at = 1
			old, err := stringPattern("decoder", s)
			if err != nil {
				return err
			}
			replaceAll(d.pieces, old, s.str("content"))
		case "ByteFallback":
			at, fallback = 2, true
		case "Fuse":
			at, fused = 3, true
		case "Strip":
			at = 4
			r, n := utf8.DecodeRuneInString(s.str("content"))
			start, _ := s["start"].(float64)
			stop, _ := s["stop"].(float64)
			if n == 0 || n != len(s.str("content")) || start < 0 || start > math.MaxInt16 || stop != 0 || !fused {
				return unsupported("decoder Strip of %q, %g at the start and %g at the stop: only one character, none at "+
					"the stop, after a Fuse is", s.str("content"), start, stop)
			}
			d.strip, d.stripCount = r, int(start)
		}
		if at == 0 || at < order || at == order && at > 1 {
			return unsupported("decoder %s: ByteLevel alone, and Replace, ByteFallback, Fuse and Strip in this order are",
				kinds(steps))
		}
		order = at
	}
	if fallback {
		for id, piece := range d.pieces {
			if b, ok := fallbackByte(piece); ok && t.present[id] {
				d.isByte[id], d.pieces[id] = true, string([]byte{b})
			}
		}
	}
	return nil
}

// replaceAll applies the library's Replace decoder to the pieces that contain old, because the decoder compiles a
// regular expression for each piece.
func replaceAll(pieces []string, old, content string) {
	r := sugarnorm.NewReplace(sugarnorm.String, old, content)
	for i, piece := range pieces {
		if strings.Contains(piece, old) {
			pieces[i] = r.DecodeChain([]string{piece})[0]
		}
	}
}

func kinds(steps []component) string {
	var b bytes.Buffer
	for i, s := range steps {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(s.kind())
	}
	return b.String()
}

// buildSpecials reads which special tokens surround a prompt. As in transformers, tokenizer_config.json takes precedence
// over the post-processor.
func buildSpecials(t *BPE, c *fileConfig, side *sideConfig) error {
	for _, p := range flatten(c.PostProcessor, "processors") {
		switch p.kind() {
		case "ByteLevel":
		case "TemplateProcessing":
			if err := t.template(p); err != nil {
				return err
			}
		default:
			return unsupported("post_processor %q: Sequence, TemplateProcessing and ByteLevel are", p.kind())
		}
	}
	named := func(n *tokenName) int32 {
		if n == nil {
			return noToken
		}
		if id, ok := t.ID(n.token.content); ok {
			return id
		}
		return noToken
	}
	t.bos, t.eos = named(side.BOS), named(side.EOS)
	if side.AddBOS != nil || side.AddEOS != nil {
		t.prefix, t.suffix = nil, nil
		if side.AddBOS != nil && *side.AddBOS && t.bos >= 0 {
			t.prefix = []int32{t.bos}
		}
		if side.AddEOS != nil && *side.AddEOS && t.eos >= 0 {
			t.suffix = []int32{t.eos}
		}
	}
	return nil
}

// template adds the special tokens of a TemplateProcessing around the existing ones.
func (t *BPE) template(p component) error {
	table, _ := p["special_tokens"].(map[string]any)
	var before, after []int32
	seen := false
	for _, item := range p.list("single") {
		if _, ok := item["Sequence"]; ok {
			if seq, _ := item["Sequence"].(map[string]any); seen || component(seq).str("id") != "A" {
				return unsupported("post_processor TemplateProcessing whose single form is not one sequence A")
			}
			seen = true
			continue
		}
		special, _ := item["SpecialToken"].(map[string]any)
		name := component(special).str("id")
		entry, _ := table[name].(map[string]any)
		ids, ok := entry["ids"].([]any)
		if !ok {
			return fmt.Errorf("post_processor TemplateProcessing uses %q, which its special_tokens lack", name)
		}
		for _, v := range ids {
			f, ok := v.(float64)
			if !ok || f != math.Trunc(f) || f < 0 || f > maxID {
				return fmt.Errorf("post_processor TemplateProcessing gives %q the id %v", name, v)
			}
			if seen {
				after = append(after, int32(f))
			} else {
				before = append(before, int32(f))
			}
		}
	}
	if !seen {
		return unsupported("post_processor TemplateProcessing whose single form is not one sequence A")
	}
	t.prefix = append(before, t.prefix...)
	t.suffix = append(t.suffix, after...)
	return nil
}
