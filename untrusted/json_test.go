package untrusted

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestJSONError(t *testing.T) {
	for text, want := range map[string]string{
		"": "it is empty", " \n": "it is empty",
		"[1": "it is not JSON: it ends too early", `"a`: "it is not JSON: it ends too early", "\n[\n": "it is not JSON: it ends too early",
		"id,x\n1,2\n":                   `line 1 is not JSON from "id,x" on`,
		"1,2\n":                         `it is not JSON from ",2" on`,
		"{\n \"a\": 1,\n}":              `line 3 is not JSON from "}" on`,
		"\"a\nb\"":                      `line 1 is not JSON from "\n" on`,
		"{} " + strings.Repeat("é", 30): `it is not JSON from "` + strings.Repeat("é", 20) + `" on`,
		`{"a": tru}`:                    `it is not JSON from "tru}" on`,
		"[1, name]":                     `it is not JSON from "name]" on`,
		"\x00\xff":                      `it is not JSON from "\x00\xff" on`,
	} {
		var v any
		if err := JSONError([]byte(text), json.Unmarshal([]byte(text), &v)); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
		var given map[string]int
		if err := JSONError([]byte(text), json.NewDecoder(strings.NewReader(text)).Decode(&given)); text != "1,2\n" && !strings.HasPrefix(text, "{}") && (err == nil || err.Error() != want) {
			t.Errorf("%q by a decoder: %v, want %s", text, err, want)
		}
	}
	var number int
	var wrong *json.UnmarshalTypeError
	if err := JSONError([]byte(`"x"`), json.Unmarshal([]byte(`"x"`), &number)); !errors.As(err, &wrong) {
		t.Errorf("a value of another type: %v", err)
	}
	if err := JSONError(nil, nil); err != nil {
		t.Error(err)
	}
}

func FuzzJSONError(f *testing.F) {
	f.Add([]byte("{\n1"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var v any
		err := JSONError(data, json.Unmarshal(data, &v))
		if (err == nil) != json.Valid(data) && err == nil {
			t.Errorf("%q: %v", data, err)
		}
		if err != nil && (strings.Contains(err.Error(), "invalid character") || !utf8.ValidString(err.Error())) && !strings.Contains(string(data), "invalid character") {
			t.Errorf("%q: %v", data, err)
		}
	})
}
