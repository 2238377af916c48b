package engine

import (
	"strings"
)

// stream turns tokens into text, as tokenizer.Stream does.
type stream interface {
	Push(id int32) string
	Flush() string
}

// writer writes a sample's text, holding back what might become a stop string.
type writer struct {
	stream  stream
	stop    []string
	include bool
	held    string // decoded, not shown
}

func newWriter(s stream, stop []string, include bool) *writer {
	return &writer{stream: s, stop: stop, include: include}
}

// push takes a token; found says that a stop string is complete, and text is then
// the last.
func (w *writer) push(id int32) (text string, found bool) { return w.add(w.stream.Push(id), false) }

// flush ends the text.
func (w *writer) flush() (text string, found bool) { return w.add(w.stream.Flush(), true) }

func (w *writer) add(s string, end bool) (text string, found bool) {
	w.held += s
	at, size := -1, 0
	for _, stop := range w.stop {
		// The first in the text counts; of those that begin there, the first given.
		if i := strings.Index(w.held, stop); i >= 0 && (at < 0 || i < at) {
			at, size = i, len(stop)
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
			keep = max(keep, overlap(w.held, stop))
		}
	}
	text, w.held = w.held[:len(w.held)-keep], w.held[len(w.held)-keep:]
	return text, false
}

// overlap is the length of the longest end of s that stop begins with, not all of
// stop.
func overlap(s, stop string) int {
	for n := min(len(s), len(stop)-1); n > 0; n-- {
		if strings.HasSuffix(s, stop[:n]) {
			return n
		}
	}
	return 0
}
