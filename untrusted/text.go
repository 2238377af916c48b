package untrusted

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Limits of printed text, in bytes.
const (
	maxName = 200
	maxLine = 2000
)

// ellipsis marks where text was cut.
const ellipsis = "…"

// Name returns a name or a path as messages have it: as it is if it is short and printable,
// else as Quote.
func Name(s string) string {
	if len(s) > maxName || !printable(s) {
		return Quote(s)
	}
	return s
}

// Quote returns s in double quotes, with escapes for what is not printable. The middle of
// long text is left out: its end often says more than that.
func Quote(s string) string {
	if q := strconv.Quote(s[:min(len(s), maxName)]); len(s) <= maxName && len(q) <= maxName+2 {
		return q
	}
	// Each half may grow by its escapes.
	head, tail := strings.TrimSuffix(quoteSome(s, maxName*3/4), `"`), ""
	n := min(maxName/4, len(s))
	for ; n > 0; n-- {
		rest := s[len(s)-n:]
		if !utf8.RuneStart(rest[0]) {
			continue
		}
		if q := strconv.Quote(rest); len(q) <= maxName/4+2 {
			tail = q[1:]
			break
		}
	}
	if tail == "" {
		tail = `"`
	}
	return head + ellipsis + tail
}

// quoteSome quotes as much of the start of s as is at most n bytes long when quoted.
func quoteSome(s string, n int) string {
	end := 0
	size := 0
	for end < len(s) {
		_, k := utf8.DecodeRuneInString(s[end:])
		q := len(strconv.Quote(s[end:end+k])) - 2
		if size+q > n {
			break
		}
		size, end = size+q, end+k
	}
	return strconv.Quote(s[:end])
}

// Line returns a message as one line of at most 2,000 bytes: lines are joined by semicolons,
// and what is not printable is escaped.
func Line(s string) string {
	if len(s) <= maxLine && printable(s) {
		return s
	}
	var b strings.Builder
	broken := false // a line break came before
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		char := s[i : i+n]
		i += n
		if r == '\n' || r == '\r' {
			broken = b.Len() > 0
			continue
		}
		if !strconv.IsPrint(r) || r == utf8.RuneError && n == 1 {
			char = strconv.Quote(char)
			char = char[1 : len(char)-1]
		}
		if broken {
			char, broken = "; "+char, false
		}
		if b.Len()+len(char) > maxLine-len(ellipsis) {
			b.WriteString(ellipsis)
			break
		}
		b.WriteString(char)
	}
	return b.String()
}

func printable(s string) bool {
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !strconv.IsPrint(r) || r == utf8.RuneError && n == 1 {
			return false
		}
		i += n
	}
	return true
}
