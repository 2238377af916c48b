package engine

import (
	"strings"
)

// stream detokenizes incrementally, as tokenizer.Stream does.
type stream interface {
	Push(id int32) string
	Flush() string
}

// detokenizer converts a sample's tokens to text. It holds back text that may be the beginning of
// a stop string.
type detokenizer struct {
	stream  stream
	stop    []string
	include bool
	held    string // decoded, not returned yet
	// early: stop strings do not end the text yet.
	early bool
	// matched is the stop string that was found.
	matched string
	// ends says that text was the last; nil: stop strings alone do.
	ends func(text string) bool
}

func newDetokenizer(s stream, stop []string, include bool) *detokenizer {
	return &detokenizer{stream: s, stop: stop, include: include}
}

// push adds a token. found: a stop string is complete, and text is the last.
func (w *detokenizer) push(id int32) (text string, found bool) {
	return w.add(w.stream.Push(id), false)
}

// release returns the text that was held back for a stop string that will not come.
func (w *detokenizer) release() string {
	text := w.held
	w.held = ""
	return text
}

// flush returns the text held back at the end.
func (w *detokenizer) flush() (text string, found bool) { return w.add(w.stream.Flush(), true) }

func (w *detokenizer) add(s string, end bool) (text string, found bool) {
	w.held += s
	at, size := -1, 0
	for _, stop := range w.stop {
		// The earliest match wins; at the same position, the first in the list.
		if i := strings.Index(w.held, stop); !w.early && i >= 0 && (at < 0 || i < at) {
			at, size, w.matched = i, len(stop), stop
		}
	}
	if at >= 0 {
		if w.include {
			at += size
		}
		text, w.held = w.held[:at], ""
		return text, true
	}
	keep := 0
	if !end {
		for _, stop := range w.stop {
			keep = max(keep, suffixPrefix(w.held, stop))
		}
	}
	text, w.held = w.held[:len(w.held)-keep], w.held[len(w.held)-keep:]
	if w.ends != nil && text != "" && w.ends(text) {
		w.held = ""
		return text, true
	}
	return text, false
}

// suffixPrefix is the length of the longest suffix of s that is a proper prefix of stop.
func suffixPrefix(s, stop string) int {
	for n := min(len(s), len(stop)-1); n > 0; n-- {
		if strings.HasSuffix(s, stop[:n]) {
			return n
		}
	}
	return 0
}
