package server

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"unicode"
	"unicode/utf16"
)

// The functions of this file read JSON that is known to be valid, in place: they copy only names
// with escapes, and stop where their caller has seen enough. A list that fills a whole body costs
// what its first entries cost, up to its limit.

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// afterSpace is the position of the first byte from i on that is not white space.
func afterSpace(data []byte, i int) int {
	for i < len(data) && isSpace(data[i]) {
		i++
	}
	return i
}

// afterString is the position behind the string that starts at data[i].
func afterString(data []byte, i int) int {
	for i++; i < len(data); i++ {
		switch data[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(data)
}

// afterScalar is the position behind the number, true, false or null that starts at data[i].
func afterScalar(data []byte, i int) int {
	for i < len(data) && data[i] != ',' && data[i] != ']' && data[i] != '}' && !isSpace(data[i]) {
		i++
	}
	return i
}

// afterValue is the position behind the value that starts at data[i].
func afterValue(data []byte, i int) int {
	depth := 0
	for i < len(data) {
		switch c := data[i]; {
		case c == '"':
			i = afterString(data, i)
		case c == '{' || c == '[':
			depth++
			i++
			continue
		case c == '}' || c == ']':
			depth--
			i++
		case c == ',' || c == ':' || isSpace(c):
			i++
			continue
		default:
			i = afterScalar(data, i)
		}
		if depth == 0 {
			return i
		}
	}
	return i
}

// extent of a value: how deep arrays and objects are nested in it, and how many values and names
// it has, itself included.
func extent(data []byte) (depth, values int) {
	now := 0
	for i := 0; i < len(data); {
		switch c := data[i]; {
		case c == '"':
			values++
			i = afterString(data, i)
		case c == '{' || c == '[':
			values++
			now++
			depth = max(depth, now)
			i++
		case c == '}' || c == ']':
			now--
			i++
		case c == ',' || c == ':' || isSpace(c):
			i++
		default:
			values++
			i = afterScalar(data, i)
		}
	}
	return depth, values
}

// eachMember calls do for the members of an object in their order, until it returns false.
func eachMember(data []byte, do func(name string, value json.RawMessage) bool) {
	for i := afterSpace(data, 0) + 1; ; i++ { // behind { or ,
		i = afterSpace(data, i)
		if i >= len(data) || data[i] == '}' {
			return
		}
		end := afterString(data, i)
		name := unquote(data[i:end])
		i = afterSpace(data, afterSpace(data, end)+1) // behind the colon
		end = afterValue(data, i)
		if !do(name, json.RawMessage(data[i:end:end])) {
			return
		}
		if i = afterSpace(data, end); i >= len(data) || data[i] == '}' {
			return
		}
	}
}

// eachItem calls do for the items of an array in their order, until it returns false.
func eachItem(data []byte, do func(item json.RawMessage) bool) {
	for i := afterSpace(data, 0) + 1; ; i++ { // behind [ or ,
		i = afterSpace(data, i)
		if i >= len(data) || data[i] == ']' {
			return
		}
		end := afterValue(data, i)
		if !do(json.RawMessage(data[i:end:end])) {
			return
		}
		if i = afterSpace(data, end); i >= len(data) || data[i] == ']' {
			return
		}
	}
}

// loneSurrogate is the first escape in the strings of data, as \ud800, that is an unpaired UTF-16 surrogate; empty if
// there is none.
func loneSurrogate(data []byte) string {
	for {
		i := bytes.IndexByte(data, '\\')
		if i < 0 {
			return ""
		}
		data = data[i:]
		r := escaped(data)
		switch {
		case !utf16.IsSurrogate(r):
			data = data[2:]
		case utf16.DecodeRune(r, escaped(data[6:])) == unicode.ReplacementChar:
			return string(data[:6])
		default:
			data = data[12:]
		}
	}
}

// escaped is the value of \uXXXX where data begins with one, else 0.
func escaped(data []byte) rune {
	if len(data) < 6 || data[0] != '\\' || data[1] != 'u' {
		return 0
	}
	n, err := strconv.ParseUint(string(data[2:6]), 16, 16)
	if err != nil {
		return 0
	}
	return rune(n)
}

// unquote reads a string.
func unquote(quoted []byte) string {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return string(quoted[1 : len(quoted)-1])
	}
	var s string
	json.Unmarshal(quoted, &s) //nolint:errcheck // it is a valid string
	return s
}

// tokenID reads a number as JSON's: a whole one from 0 to 2^31-1, in decimal digits.
func tokenID(raw json.RawMessage) (int32, bool) {
	n := int64(0)
	for _, c := range raw {
		if c < '0' || c > '9' {
			return 0, false
		}
		if n = n*10 + int64(c-'0'); n > math.MaxInt32 {
			return 0, false
		}
	}
	return int32(n), len(raw) > 0
}
