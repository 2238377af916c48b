package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Objects and arrays are read as encoding/json reads them.
func FuzzScan(f *testing.F) {
	for _, seed := range []string{
		`{}`, `[]`, ` { "a" : 1 , "b\u0041\"" : [ "]", {"}": "\\"} ] , "": null } `, `[1,-2.5e+3 , true,[[]],{"a":[]}]`, `"x"`, `[""]`, `{"a":{}}`,
		"[1\n,2\t]", `["\ud800"]`, `12`, `{"a":1,"a":2}`, `"\\ud800 \ud83d\uDE00"`, `"\ud83dx"`, `"\ude00"`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		extent(data) // comes to its end for any bytes
		if !json.Valid(data) || !utf8.Valid(data) {
			return
		}
		var items []json.RawMessage
		if json.Unmarshal(data, &items) == nil && kindOf(data) == "an array" {
			var got []json.RawMessage
			eachItem(data, func(item json.RawMessage) bool { got = append(got, item); return true })
			if !slices.EqualFunc(got, items, slices.Equal) {
				t.Errorf("%s: %s, want %s", data, got, items)
			}
		}
		var members map[string]json.RawMessage
		if json.Unmarshal(data, &members) == nil && kindOf(data) == "an object" {
			got := map[string]json.RawMessage{}
			eachMember(data, func(name string, value json.RawMessage) bool { got[name] = value; return true })
			if !maps.EqualFunc(got, members, slices.Equal) {
				t.Errorf("%s: %s, want %s", data, got, members)
			}
		}
		// encoding/json puts U+FFFD in the place of half a character.
		var text string
		if json.Unmarshal(data, &text) == nil && !strings.Contains(strings.ToLower(string(data)), `\ufffd`) && !bytes.ContainsRune(data, utf8.RuneError) {
			if half := loneSurrogate(data); (half != "") != strings.ContainsRune(text, utf8.RuneError) {
				t.Errorf("%s: %q is half a character, and the text is %q", data, half, text)
			}
		}
		var v any
		if err := json.Unmarshal(data, &v); err != nil {
			return // a number out of range
		}
		var nested func(v any) (depth int)
		nested = func(v any) (depth int) {
			switch v := v.(type) {
			case []any:
				for _, x := range v {
					depth = max(depth, nested(x))
				}
				return depth + 1
			case map[string]any:
				for _, x := range v {
					depth = max(depth, nested(x))
				}
				return depth + 1
			}
			return 0
		}
		if depth, _ := extent(data); depth < nested(v) { // deeper where a name is there twice
			t.Errorf("%s: depth %d, want %d", data, depth, nested(v))
		}
	})
}

func TestExtent(t *testing.T) {
	for text, want := range map[string]string{
		`1`: "0 1", `"[[["`: "0 1", `[]`: "1 1", `{"a": [1, "x", null], "b": {}}`: "2 8", ` [ [ ] , [ [ ] ] ] `: "3 4",
	} {
		depth, values := extent([]byte(text))
		if got := fmt.Sprint(depth, values); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func TestLoneSurrogate(t *testing.T) {
	for text, want := range map[string]string{
		`"x"`: "", `"\n\""`: "", `"\u00e9"`: "", `"\ud83d\ude00"`: "", `"\uD83D\uDE00\\ud800"`: "", `"\\\\ud800"`: "",
		`"\ud800"`: `\ud800`, `"\uDFFF"`: `\uDFFF`, `"\ude00\ud83d"`: `\ude00`, `"\ud83d\n"`: `\ud83d`, `"\ud83d\\ude00"`: `\ud83d`,
		`"\ud83d\ud83d\ude00"`: `\ud83d`, `{"\ud83d": "\ude00"}`: `\ud83d`, `["\ud83d\ude00", "\ude00"]`: `\ude00`,
	} {
		if got := loneSurrogate([]byte(text)); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}
