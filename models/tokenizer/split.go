package tokenizer

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sugarme/tokenizer/pretokenizer"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
	"github.com/moeserve/moeserve/untrusted"
)

// splitter cuts normalized text into words and appends their ids.
type splitter struct {
	cuts []cutter // each cuts what those before it have left
	last lastStep
}

// lastStep passes a piece of text to the model.
type lastStep interface {
	// encode appends the ids of text. first reports whether text starts at the start of Encode's input.
	encode(out []int32, g *merger, text string, first bool) []int32
}

func (s *splitter) encode(out []int32, g *merger, text string, first bool) ([]int32, error) {
	return s.step(out, g, text, first, 0)
}

// step applies the cut of a depth, and all behind it.
func (s *splitter) step(out []int32, g *merger, text string, first bool, depth int) ([]int32, error) {
	if depth == len(s.cuts) {
		return s.last.encode(out, g, text, first), nil
	}
	// Spans of all depths lie one behind the other.
	from := len(g.spans)
	spans, err := s.cuts[depth].cut(g.spans, text)
	g.spans = spans
	for i := from; i < len(spans) && err == nil && !g.full(out); i++ {
		out, err = s.step(out, g, text[spans[i].start:spans[i].end], first && spans[i].start == 0, depth+1)
	}
	g.spans = g.spans[:from]
	return out, err
}

func buildSplitter(t *Pipeline, c *fileConfig, _ *sideConfig) error {
	t.splitter.last = wholeText{}
	parts := flatten(c.PreTokenizer, "pretokenizers")
	if len(parts) > maxSteps {
		return unsupported("pre_tokenizer with %d steps: up to %d are", len(parts), maxSteps)
	}
	for i, p := range parts {
		switch p.kind() {
		case "ByteLevel", "Metaspace":
			if i < len(parts)-1 {
				return unsupported("pre_tokenizer %s before %s: only as the last one is", p.name(), parts[i+1].name())
			}
			last, err := newLastStep(t, p)
			if err != nil {
				return err
			}
			t.splitter.last = last
		default:
			cut, err := newCutter(p)
			if err != nil {
				return err
			}
			t.splitter.cuts = append(t.splitter.cuts, cut)
		}
	}
	return nil
}

func newLastStep(t *Pipeline, p component) (lastStep, error) {
	if p.kind() == "Metaspace" {
		return newMetaspace(p)
	}
	if t.model.unigram != nil {
		return nil, unsupported("pre_tokenizer ByteLevel with a Unigram model")
	}
	t.model.toByteLevel()
	w := byteWords{addPrefixSpace: p.flag("add_prefix_space", true)}
	if p.flag("use_regex", true) {
		w.next = nextGPT2
	}
	return w, nil
}

func newCutter(p component) (cutter, error) {
	switch p.kind() {
	case "Split":
		s, err := searchOf("pre_tokenizer", p)
		if err != nil {
			return cutter{}, err
		}
		c := cutter{searcher: s, behavior: behavior(p.str("behavior"))}
		if !slices.Contains([]behavior{removed, isolated, mergedWithPrevious, mergedWithNext, contiguous}, c.behavior) {
			return c, unsupported("pre_tokenizer Split with behavior %s", untrusted.Quote(p.str("behavior")))
		}
		c.invert, err = p.need("pre_tokenizer", "invert")
		return c, err
	case "Digits":
		single, err := p.need("pre_tokenizer", "individual_digits")
		ranges, _ := pattern.Named("digit")
		c := cutter{searcher: charClass(pattern.NewSet(ranges).Has), behavior: contiguous}
		if single {
			c.behavior = isolated
		}
		return c, err
	case "WhitespaceSplit":
		return cutter{searcher: charClass(unicode.IsSpace), behavior: removed}, nil
	}
	return cutter{}, unsupported("pre_tokenizer %s: Sequence, Split, Digits, WhitespaceSplit, ByteLevel and Metaspace are", p.name())
}

// wholeText passes the text to a character-level model without splitting.
type wholeText struct{}

func (wholeText) encode(out []int32, g *merger, text string, _ bool) []int32 {
	return g.charText(out, text)
}

// metaspace replaces spaces by a replacement character and puts one before the text.
type metaspace struct {
	replacement string
	scheme      prependScheme
	split       bool // one word per replacement character, which starts it
}

type prependScheme int

const (
	prependAlways prependScheme = iota
	prependFirst                // only where the text starts the input
	prependNever
)

func (p metaspace) encode(out []int32, g *merger, text string, first bool) []int32 {
	text = strings.ReplaceAll(text, " ", p.replacement)
	if (p.scheme == prependAlways || p.scheme == prependFirst && first) && !strings.HasPrefix(text, p.replacement) {
		text = p.replacement + text
	}
	if !p.split {
		return g.charText(out, text)
	}
	for start := 0; start < len(text); {
		end := len(text)
		from := start
		if strings.HasPrefix(text[start:], p.replacement) {
			from += len(p.replacement)
		}
		if i := strings.Index(text[from:], p.replacement); i >= 0 {
			end = from + i
		}
		if out = g.charText(out, text[start:end]); g.full(out) {
			break
		}
		start = end
	}
	return out
}

func newMetaspace(p component) (metaspace, error) {
	s := metaspace{replacement: p.str("replacement"), split: p.flag("split", true)}
	if utf8.RuneCountInString(s.replacement) != 1 {
		return s, fmt.Errorf("pre_tokenizer Metaspace has replacement %s: want one character", untrusted.Quote(s.replacement))
	}
	var err error
	s.scheme, err = prependSchemeOf("pre_tokenizer", p)
	return s, err
}

// prependSchemeOf reads the scheme of a Metaspace. As in the reference, add_prefix_space, the older spelling, must not
// contradict it.
func prependSchemeOf(where string, p component) (prependScheme, error) {
	name := p.str("prepend_scheme")
	scheme, ok := map[string]prependScheme{"": prependAlways, "always": prependAlways, "first": prependFirst, "never": prependNever}[name]
	if !ok {
		return scheme, unsupported("%s Metaspace with prepend_scheme %s: always, first and never are", where, untrusted.Quote(name))
	}
	if !p.flag("add_prefix_space", true) && scheme != prependNever {
		return scheme, fmt.Errorf("%s Metaspace has add_prefix_space false, which contradicts its prepend_scheme: give prepend_scheme never", where)
	}
	return scheme, nil
}

// byteWords splits text with a pattern and passes the bytes of each word to a byte-level model.
type byteWords struct {
	next           func(string) int // length of the first word of a non-empty text; nil: the text is one word
	addPrefixSpace bool
}

func (p byteWords) encode(out []int32, g *merger, text string, _ bool) []int32 {
	if p.addPrefixSpace && !strings.HasPrefix(text, " ") {
		text = " " + text
	}
	if p.next == nil {
		return g.byteWord(out, text)
	}
	for len(text) > 0 {
		n := p.next(text)
		if out = g.byteWord(out, text[:n]); g.full(out) {
			break
		}
		text = text[n:]
	}
	return out
}

// nextGPT2 returns the length of the first match of gpt2Pattern in s, which is not empty.
func nextGPT2(s string) int {
	if s[0] == '\'' && len(s) > 1 {
		switch s[1] {
		case 's', 't', 'm', 'd':
			return 2
		case 'r', 'v', 'l':
			if len(s) > 2 && (s[1:3] == "re" || s[1:3] == "ve" || s[1:3] == "ll") {
				return 3
			}
		}
	}
	i := 0
	if s[0] == ' ' {
		i = 1
	}
	if i < len(s) {
		switch c, n := classAt(s, i); c {
		case letter, number, other:
			return skipClass(s, i+n, c)
		}
	}
	return nextSpaces(s)
}

// nextQwen2 returns the length of the first match of qwen2Pattern, or with 3 digits of llama3Pattern, in s, which is not
// empty.
func nextQwen2(s string, digits int) int {
	if s[0] == '\'' {
		if n := contraction(s); n > 0 {
			return n
		}
	}
	c, n := classAt(s, 0)
	switch c {
	case letter:
		return skipClass(s, n, letter)
	case number:
		for digits--; digits > 0 && n < len(s); digits-- {
			d, k := classAt(s, n)
			if d != number {
				break
			}
			n += k
		}
		return n
	}
	newline := s[0] == '\r' || s[0] == '\n'
	if !newline && n < len(s) {
		if d, k := classAt(s, n); d == letter {
			return skipClass(s, n+k, letter)
		}
	}
	i := 0
	if s[0] == ' ' {
		i = 1
	}
	if i < len(s) {
		if d, k := classAt(s, i); d == other {
			i = skipClass(s, i+k, other)
			for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
				i++
			}
			return i
		}
	}
	// A run of space: up to its last line break, if it has one.
	end := skipClass(s, n, space)
	if last := strings.LastIndexAny(s[:end], "\r\n"); last >= 0 {
		return last + 1
	}
	return nextSpaces(s)
}

// contraction returns the length of the English contraction that s starts with, in any case, or 0. U+017F folds to s.
func contraction(s string) int {
	if strings.HasPrefix(s[1:], "\u017f") {
		return 3
	}
	if len(s) > 1 {
		switch s[1] | 0x20 {
		case 's', 't', 'm', 'd':
			return 2
		}
	}
	if len(s) > 2 {
		switch string([]byte{s[1] | 0x20, s[2] | 0x20}) {
		case "re", "ve", "ll":
			return 3
		}
	}
	return 0
}

// nextSpaces matches \s+(?!\S)|\s+ at the start of s: a run of white space. If a non-space character follows and the run
// has more than one character, the match excludes the run's last character.
func nextSpaces(s string) int {
	_, n := classAt(s, 0)
	end, last := n, 0
	for end < len(s) {
		c, k := classAt(s, end)
		if c != space {
			if last > 0 {
				return last
			}
			return end
		}
		last = end
		end += k
	}
	return end
}

// skipClass returns the end of the run of class c that continues at i.
func skipClass(s string, i int, c class) int {
	for i < len(s) {
		d, n := classAt(s, i)
		if d != c {
			break
		}
		i += n
	}
	return i
}

// byteChars maps each byte to its character in byte-level vocabularies: the byte itself if it is printable, else the
// next free code point from U+0100.
var byteChars = func() (t [256]string) {
	for b, char := range pretokenizer.BytesChar {
		t[b] = char
	}
	return t
}()

// charBytes is the inverse of byteChars: it maps code points to bytes; -1 if no byte has that character.
var charBytes = func() (t [0x144]int16) {
	for i := range t {
		t[i] = -1
	}
	for b, c := range byteChars {
		r, _ := utf8.DecodeRuneInString(c)
		t[r] = int16(b)
	}
	return t
}()

// unspell appends the bytes that a byte-level token represents, or the token unchanged if one of its characters
// represents no byte.
func unspell(dst []byte, token string) []byte {
	n := len(dst)
	for _, r := range token {
		if int(r) >= len(charBytes) || charBytes[r] < 0 {
			return append(dst[:n], token...)
		}
		dst = append(dst, byte(charBytes[r]))
	}
	return dst
}

// spell converts bytes to their characters in a byte-level vocabulary.
func spell(raw string) string {
	var b strings.Builder
	for i := range len(raw) {
		b.WriteString(byteChars[raw[i]])
	}
	return b.String()
}
