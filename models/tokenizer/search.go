package tokenizer

import (
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
	"github.com/moeserve/moeserve/untrusted"
)

// searcher finds matches in texts.
type searcher interface {
	// search calls yield for the matches in text, in order. An error says that there are too many steps.
	search(text string, yield func(start, end int)) error
	// growth is how many times as long a text can become where each match is replaced by n bytes.
	growth(n int) float64
}

// literal is a string that is not empty.
type literal string

func (l literal) search(text string, yield func(start, end int)) error {
	for at := 0; ; {
		i := strings.Index(text[at:], string(l))
		if i < 0 {
			return nil
		}
		yield(at+i, at+i+len(l))
		at += i + len(l)
	}
}

func (l literal) growth(n int) float64 { return max(1, float64(n)/float64(len(l))) }

// charClass matches single characters.
type charClass func(r rune) bool

func (c charClass) search(text string, yield func(start, end int)) error {
	for i, r := range text {
		if c(r) {
			yield(i, i+utf8.RuneLen(r))
		}
	}
	return nil
}

func (c charClass) growth(n int) float64 { return max(1, float64(n)) }

// The split patterns that have matchers of their own, as tokenizer.json files spell them; see package pattern for all
// others.
const (
	gpt2Pattern   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	qwen2Pattern  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	llama3Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// words is a pattern that matches everywhere: next returns the length of the first match of a text that is not empty.
type words func(text string) int

func (w words) search(text string, yield func(start, end int)) error {
	for at := 0; at < len(text); {
		n := w(text[at:])
		yield(at, at+n)
		at += n
	}
	return nil
}

func (w words) growth(n int) float64 { return max(1, float64(n)) }

// expression is any other regular expression.
type expression struct {
	source  string
	pattern *pattern.Pattern
}

func newExpression(source string) (searcher, error) {
	switch source {
	case gpt2Pattern:
		return words(nextGPT2), nil
	case qwen2Pattern:
		return words(func(s string) int { return nextQwen2(s, 1) }), nil
	case llama3Pattern:
		return words(func(s string) int { return nextQwen2(s, 3) }), nil
	}
	p, err := pattern.Compile(source)
	if err != nil {
		return nil, err
	}
	return &expression{source, p}, nil
}

// search finds matches as Oniguruma's iterator does: an empty match right behind another one does not count.
func (x *expression) search(text string, yield func(start, end int)) error {
	var m pattern.Matcher
	m.Begin(text)
	last := -1
	for at := 0; at <= len(text); {
		start, end, ok, err := m.Find(x.pattern, at)
		if err != nil {
			return &textError{x.source, err}
		}
		if !ok {
			return nil
		}
		if start == end && end == last {
			if at == len(text) {
				return nil
			}
			_, n := utf8.DecodeRuneInString(text[at:])
			at += n
			continue
		}
		yield(start, end)
		at, last = end, end
	}
	return nil
}

func (x *expression) growth(n int) float64 {
	if least := x.pattern.Minimum(); least > 0 {
		return max(1, float64(n)/float64(least))
	}
	return 1 + float64(n)
}

// textError means that a text cannot be encoded.
type textError struct {
	pattern string
	err     error
}

func (e *textError) Error() string {
	return "tokenizer.json: pattern " + untrusted.Quote(e.pattern) + ": " + e.err.Error()
}

func (e *textError) Unwrap() error { return e.err }

// behavior is what a Split does with matches.
type behavior string

const (
	removed            behavior = "Removed"
	isolated           behavior = "Isolated"
	mergedWithPrevious behavior = "MergedWithPrevious"
	mergedWithNext     behavior = "MergedWithNext"
	contiguous         behavior = "Contiguous"
)

// cutter cuts texts at the matches of a searcher.
type cutter struct {
	searcher searcher
	behavior behavior
	invert   bool
}

// span is a part of a text; matched says whether the searcher has found it.
type span struct {
	start, end int
	matched    bool
}

// cut appends the parts of a text that is not empty, as the reference's split does.
func (c *cutter) cut(spans []span, text string) ([]span, error) {
	first := len(spans)
	at := 0
	err := c.searcher.search(text, func(start, end int) {
		if at != start {
			spans = append(spans, span{at, start, c.invert})
		}
		spans = append(spans, span{start, end, !c.invert})
		at = end
	})
	if err != nil {
		return spans, err
	}
	if at != len(text) {
		spans = append(spans, span{at, len(text), c.invert})
	}
	all := spans[first:]
	kept := all[:0]
	before := false // the span before is a match
	switch c.behavior {
	case mergedWithPrevious, contiguous:
		for _, s := range all {
			join := s.matched && !before
			if c.behavior == contiguous {
				join = s.matched == before
			}
			before = s.matched
			if n := len(kept); join && n > 0 {
				kept[n-1].end = s.end
			} else {
				kept = append(kept, s)
			}
		}
	case mergedWithNext:
		// From the end, into the end of the same memory.
		at := len(all)
		for i := len(all) - 1; i >= 0; i-- {
			s := all[i]
			if s.matched && !before && at < len(all) {
				all[at].start = s.start
			} else {
				at--
				all[at] = s
			}
			before = s.matched
		}
		kept = append(kept, all[at:]...)
	default:
		for _, s := range all {
			if c.behavior == isolated || !s.matched {
				kept = append(kept, s)
			}
		}
	}
	out := spans[:first]
	for _, s := range kept {
		if s.start < s.end {
			out = append(out, s)
		}
	}
	return out, nil
}
